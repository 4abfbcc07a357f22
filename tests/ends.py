"""Both ends of the ranges in pyproject.toml, each in an environment of its own, with no pinned version.

    python tests/ends.py newest                         # the newest releases, beyond the ranges too
    python tests/ends.py oldest                         # the oldest that the ranges allow
    python tests/ends.py newest --pin transformers==5.19.0 --only cache

It builds the wheel, installs it with what runs models, prints the versions, and then tries what people do:
the wheel in an empty folder, the README's scorer and its third example, lm-evaluation-harness, an exported
folder, and tests/cache. A part that fails does not stop the others; the last lines say what failed.
"""

import argparse
import re
import shlex
import shutil
import sys
import time
import tomllib
import venv
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tools import ROOT, laid, run
from wheel import SCORER, built, try_the_base, try_the_model

RANGES = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TOLD = "torch transformers triton numpy hypothesis pytest accelerate safetensors tokenizers lm_eval peft"
WARNS_OF_NOTHING = "import warnings; warnings.simplefilter('error'); from evictionary import EvictingCache"
EXPORTED = """
import sys
from evictionary.models.load import load
model, tokenizer = load(sys.argv[1])
given = tokenizer("A text about nothing at all. " * 9, return_tensors="pt")
asked = {"max_new_tokens": 3, "custom_generate": "exported", "trust_remote_code": True}
found = model.generate(**given, **asked, return_dict_in_generate=True)
from evictionary.models import versions
kept = versions.cache_in(found).tokens_kept
assert kept < given["input_ids"].shape[1], kept
print(f"an exported folder keeps {kept} tokens")
"""
# A task of the harness with a file beside it: most of its own bring texts from a hub.
TASK = """task: colours
dataset_path: json
dataset_kwargs: {data_files: {test: colours.json}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc}]
"""
COLOURS = '{"text": "The sky is blue. The grass is green. The sky is", "choices": [" blue", " green"]}\n'


def wanted() -> list[str]:
    """Each dependency of what runs models, from the oldest release that its range allows: name>=version."""
    ranges = [*RANGES["dependencies"]]
    for extra in ("torch", "model", "harness"):
        ranges += RANGES["optional-dependencies"][extra]
    found = [match[0] for each in ranges if (match := re.match(r"[\w-]+>=[\d.]+", each))]
    return [each for each in found if not each.startswith("triton")]  # torch brings its own


def lowest() -> list[str]:
    """The oldest release of each dependency that its range allows."""
    return [each.replace(">=", "==") for each in wanted()]


def environment(folder: Path, wheel: Path, pins: list[str]) -> Path:
    """A fresh environment with the wheel and all that runs models; returns its folder of programs.

    No range ends here: a release beyond one should be tried
    on the day that it comes. The part `import` names it.
    """
    venv.create(folder, with_pip=True)
    print("installing: minutes, and gigabytes where the newest torch brings CUDA", flush=True)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run(*pip, "--upgrade", *wanted(), "peft", *pins, cwd=folder)
    run(*pip, "--no-deps", wheel, cwd=folder)
    return folder / "bin"


def parts(programs: Path, parent: Path) -> dict[str, Callable[[], object]]:
    """What is tried, by name."""
    python, evictionary = programs / "python", programs / "evictionary"
    folder, model = parent / "alone", parent / "model"
    readme = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    scorer = next(block for block in readme if block.startswith("import numpy"))
    example = next(block for block in readme if "EvictingCache(" in block)
    laid(folder, {"mine/keydiff.py": SCORER, "my_kernels/keydiff.py": scorer, "example.py": example})
    laid(folder, {"exported.py": EXPORTED, "colours/colours.yaml": TASK, "colours.json": COLOURS})

    def judges_the_readmes_scorer() -> None:
        told = run(evictionary, "judge", "my_kernels", cwd=folder, code=1).stdout
        assert "KD-8 does not hold" in told and "mean taken before normalising" in told, told

    def exports() -> None:
        run(evictionary, *shlex.split("export exported --method keydiff"), cwd=folder)
        run(python, "exported.py", model, cwd=folder)

    harness = [python, "-m", "evictionary.evaluation.harness", "--model", "evictionary", "--device", "cpu"]
    harness += ["--tasks", "colours", "--include_path", "colours"]
    settings = "pretrained=embedded,dtype=float32,method=keydiff,compression_ratio=0.5"
    cache = [python, "-m", "pytest", "-q", "-n", "auto", "-p", "no:cacheprovider", "tests/cache"]
    return {
        "import": partial(run, python, "-c", WARNS_OF_NOTHING, cwd=folder),
        "wheel": partial(try_the_base, programs, folder),
        "model": partial(try_the_model, programs, folder, model),
        "judge": judges_the_readmes_scorer,
        "readme": partial(run, python, "-W", "error::FutureWarning", "example.py", cwd=folder),
        "export": exports,
        "lm-eval": partial(run, *harness, "--model_args", settings, cwd=folder),
        "cache": partial(run, *cache, cwd=ROOT),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("end", choices=["newest", "oldest"])
    parser.add_argument("--pin", nargs="*", default=[], help="other versions, such as torch==2.13.0")
    parser.add_argument("--only", nargs="*", default=[], help="some parts, such as: cache readme")
    parser.add_argument("--python", help="the python of an environment that is there, to install nothing")
    given = parser.parse_args()

    parent = ROOT / "build" / given.end
    shutil.rmtree(parent, ignore_errors=True)
    parent.mkdir(parents=True)
    from conftest import save_tiny_model  # beside this program

    save_tiny_model(parent / "model")
    pins = given.pin + (lowest() if given.end == "oldest" else [])
    programs = (
        Path(given.python).parent
        if given.python
        else environment(parent / "environment", built(parent), pins)
    )
    say = f"from importlib.metadata import version\nfor name in {TOLD.split()}: print(name, version(name))"
    print(run(programs / "python", "-c", say, cwd=parent).stdout.strip().replace("\n", ", "), flush=True)

    failed = []
    for name, part in parts(programs, parent).items():
        if given.only and name not in given.only:
            continue
        began = time.monotonic()
        try:
            part()
            outcome = "ok"
        except Exception as error:  # whatever a part raises, the others are tried
            failed.append(name)
            outcome = f"FAILED\n{str(error)[-4000:]}"
        print(f"{given.end}, {name}: {outcome} ({time.monotonic() - began:.0f} s)", flush=True)
    sys.exit(f"{given.end}: {', '.join(failed)} failed" if failed else 0)


if __name__ == "__main__":
    main()
