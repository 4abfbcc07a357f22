"""Makes what is stored of the study: `python -m docs_build.study` reads docs/study/, writes its summary
and its picture.

results.jsonl.xz has the measurements of every composition on texts that programs made, finals.jsonl.xz those
of its final, and pyramid.jsonl.xz those of the final with PyramidKV's division on some of its prompts.
real.jsonl.xz, real_2000.jsonl.xz, real_4000.jsonl.xz and real_finals.jsonl.xz are of texts that people wrote.
protected.jsonl.xz compares selections with and without `+protect`. `evictionary study` writes such a file,
and `xz -9e` compresses it.
"""

import json

from docs_build.entries import ROOT
from evictionary.evaluation import study
from evictionary.evaluation.pages import drawn
from evictionary.store import Line, put, read

MEASURED = ROOT / "docs" / "study"
PICTURE = ROOT / "docs" / "images" / "study.svg"


def lines(name: str) -> list[Line]:
    """The measurements in a file of docs/study/."""
    return list(read(MEASURED / name, study.Plan.identify).values())


def summary() -> study.Summary:
    """The whole study, its finals, and what `--method auto` takes: the composition of least cost in the final
    of real texts. Of these the study of real texts chooses the same one, on average over the sizes, so these
    prompts had no part in choosing it.
    """
    names = ("results", "finals", "pyramid", "real", "real_2000", "real_4000", "real_finals", "protected")
    found, *others = (study.summarise(lines(f"{name}.jsonl")) for name in names)
    found |= dict(zip(names[1:], others, strict=True))
    return found | {"recommended": found["real_finals"]["recommended"]}


if __name__ == "__main__":
    found = summary()
    put(study.STORED, json.dumps(found, indent=1) + "\n")
    put(PICTURE, drawn(study.picture(found), "svg"))
    print(f"Wrote {study.STORED} and {PICTURE}.")
