"""Makes what is stored of the study: `python -m docs_build.study` reads docs/study/, writes its summary
and its picture.

results.jsonl.xz has the measurements of every composition, finals.jsonl.xz those of the final, and
pyramid.jsonl.xz those of the final with PyramidKV's division on some of its prompts. `evictionary study`
writes such a file, and `xz -9e` compresses it.
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
    """The whole study, with its final, and with what PyramidKV changes in the final."""
    found, finals, pyramid = (
        study.summarise(lines(f"{name}.jsonl")) for name in ("results", "finals", "pyramid")
    )
    # The final recommends: it is of a few compositions, on prompts that had no part in choosing these.
    return found | {"finals": finals, "recommended": finals["recommended"], "pyramid": pyramid}


if __name__ == "__main__":
    found = summary()
    put(study.STORED, json.dumps(found, indent=1) + "\n")
    put(PICTURE, drawn(study.picture(found), "svg"))
    print(f"Wrote {study.STORED} and {PICTURE}.")
