"""What the tests of the classroom share: right and wrong
files, to hand them in, to judge them, to grade them.
"""

import importlib
import inspect
import io
import json
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from evictionary.classroom import assignment as assignments, bundle, classes, formats, grading
from evictionary.classroom.child import Child, Limits
from evictionary.classroom.judgement import Judgement, Line
from evictionary.spec_tests.judge.implementation import oracle
from evictionary.spec_tests.proof.planted import AROUND, Mutant, edited_source, given_to

from . import saved

NUMPY = (
    *("kv_cache", "keydiff", "lagkv", "expected_attention", "momentkv", "gvote", "h2o", "duo_attention"),
    "quantisation",
)
PAGES = Path(__file__).parents[2] / "docs" / "classroom"
EVERY_FORMAT = tuple(formats.FORMATS)
EVERY_FILE = {formats.GRADE, *(file for file, _ in formats.FORMATS.values())}
# A right answer as a student would write it; docs/classroom/transcript.md shows the steps to it.
SOLUTION = (PAGES / "transcript" / "3_right.py").read_text(encoding="utf-8")
KERNEL = """
import torch
import triton
import triton.language as tl


@triton.jit
def score_keys(keys, scores, tokens, channels, TOKENS: tl.constexpr, CHANNELS: tl.constexpr):
    head = tl.program_id(0)
    rows, columns = tl.arange(0, TOKENS), tl.arange(0, CHANNELS)
    inside = (rows[:, None] < tokens) & (columns[None, :] < channels)
    places = head * tokens * channels + rows[:, None] * channels + columns[None, :]
    tile = tl.load(keys + places, mask=inside, other=0.0)
    largest = tl.max(tl.abs(tile), axis=1)
    tile = tile / tl.where(largest > 0, largest, 1.0)[:, None]
    norms = tl.sqrt(tl.sum(tile * tile, axis=1))
    units = tile / tl.where(norms > 0, norms, 1.0)[:, None]
    anchor = tl.sum(units, axis=0)
    length = tl.sqrt(tl.sum(anchor * anchor))
    anchor = anchor / tl.where(length > 0, length, 1.0)
    tl.store(scores + head * tokens + rows, -tl.sum(units * anchor[None, :], axis=1), mask=rows < tokens)


def score(keys):
    if keys.ndim < 2 or 0 in keys.shape or not keys.isfinite().all():
        raise ValueError("keys: wanted finite numbers and no empty axis")
    keys = keys.contiguous()
    tokens, channels = keys.shape[-2:]
    scores = torch.empty(keys.shape[:-1], device=keys.device)
    sizes = triton.next_power_of_2(tokens), triton.next_power_of_2(channels)
    score_keys[(scores.numel() // tokens,)](keys, scores, tokens, channels, *sizes)
    return scores
"""


# What stands for the suite beside a planted mistake.
_ORACLE = """import importlib
def oracle(path):
    stem, name = path.split('.')
    return getattr(importlib.import_module(f'bundled.{stem}'), name)
"""
# What a mistake around the checks of a function needs before it.
_AROUND = """import functools
import inspect
from collections.abc import Callable
from typing import Any
from bundled.contract import naming
"""
_PLANTED = "def mutant(*args, **kwargs):\n    return lambda function: function\n"


def bundled(stem: str, mutant: Mutant | None = None) -> str:
    """The reference of a method as one file that imports only NumPy; a mutant replaces the right function."""
    sources, last = bundle.sources(), ""
    if mutant is not None and mutant.edits:
        path = mutant.edited or mutant.of
        module = f"bundled.{path.split('.')[0]}"
        sources[module] = sources[module].replace(
            inspect.getsource(oracle(path)), edited_source(path, mutant.edits)
        )
        if any(f"@{name}(" in now for _, now in mutant.edits for name in AROUND):
            around = "".join(map(inspect.getsource, (given_to, *AROUND.values())))
            sources[module] = f"{_AROUND}{around}{sources[module]}"
    elif mutant is not None:
        arithmetic = importlib.import_module("evictionary.spec_tests.judge.arithmetic")
        wrong = inspect.getmodule(inspect.unwrap(mutant.function))
        sources |= {
            "bundled.oracle": _ORACLE,
            "bundled.arithmetic": bundle.renamed(inspect.getsource(arithmetic)),
        }
        sources |= {"bundled.planted": _PLANTED, "bundled.wrong": bundle.renamed(inspect.getsource(wrong))}
        last = (
            f'{mutant.of.split(".")[1]} = vars(sys.modules["bundled.wrong"])["{mutant.name.split(".")[1]}"]'
        )
    return bundle.packed(stem, sources, last)


def right(name: str) -> str:
    """A right answer to an assignment."""
    stem = assignments.load(name).stem
    return SOLUTION if stem == "keydiff" else bundled(stem)


def with_another(function: str, body: str, source: str = SOLUTION) -> str:
    """A file with another function of that name, whose body may call the one of the file as `right`."""
    return f"{source}\n\nimport numpy as np\n\nright = {function}\n\n\ndef {function}{body}\n"


def alone(name: str, *steps: str, **changes: Any) -> assignments.Assignment:
    """An assignment with some of its steps, which need no other; changes replace fields of them."""
    one = assignments.load(name)
    return replace(
        one, steps=tuple(replace(each, needs=(), **changes) for each in one.steps if each.name in steps)
    )


def judged(name: str | assignments.Assignment, source: str, **settings: Any) -> Judgement:
    one = assignments.load(name) if isinstance(name, str) else name
    return grading.judge(source.encode(), one, **{"secret": b"a secret", "examples": 2, **settings})


def line_of(name: str, step: str, source: str, law: str = "", **settings: Any) -> Line:
    """The line of one step, asked without those that it needs, by the laws with `law` in their names."""
    one = alone(name, step)
    one = alone(name, step, laws=tuple(each for each in one.steps[0].laws if law in each))
    return judged(one, source, **{"examples": 3, **settings}).lines[-1]


def verdicts(judged: Judgement) -> dict[str, str]:
    return {line.name: line.verdict for line in judged.lines}


def written(folder: Path, source: str | bytes = "", name: str = "ada.py") -> Path:
    """A student's file; its folder is made."""
    return saved(folder / name, source)


def handed_in(folder: Path, files: Mapping[str, str | bytes | Mapping[Any, str | bytes]]) -> Path:
    """A folder of files; one that has files of its own is an archive of the kind that its name says."""
    for name, content in files.items():
        path = written(folder, b"" if isinstance(content, Mapping) else content, name)
        if isinstance(content, Mapping) and name.endswith(".zip"):
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
                for inside, text in content.items():
                    archive.writestr(inside, text)
        elif isinstance(content, Mapping):
            with tarfile.open(path, "w:gz" if name.endswith("gz") else "w") as tar:
                for inside, text in content.items():
                    entry = inside if isinstance(inside, tarfile.TarInfo) else tarfile.TarInfo(inside)
                    data = text.encode() if isinstance(text, str) else text
                    entry.size = len(data)
                    tar.addfile(entry, io.BytesIO(data))
    return folder


def child_of(folder: Path, source: str, seconds: float = 20) -> Child:
    """A child that runs a KeyDiff file."""
    return Child(written(folder, source, "keydiff.py"), "keydiff", limits=Limits(seconds))


def order(
    examples: int = 1, handed_out: tuple[str, ...] = (), secret: bytes = b"a secret", **settings: Any
) -> classes.Order:
    """How a class of the KeyDiff assignment is graded."""
    return classes.Order("keydiff", secret, examples, handed_out, **settings)


def graded(
    source: str | bytes, tmp_path: Path, examples: int = 1, handed_out: tuple[str, ...] = ()
) -> dict[str, Any]:
    """What becomes of one student's file in a class of one."""
    (grade,) = classes.run(
        order(examples, handed_out), {"ada": written(tmp_path, source)}, tmp_path / "grades", 1
    )
    return grade


def to_grade(folder: Path, assignment: str = "keydiff") -> tuple[object, ...]:
    """What `evictionary grade` is asked in these tests: the folder of the grades is `grades`."""
    secret = written(folder, "nobody guesses this", "secret")
    return "--assignment", assignment, "--seed-file", secret, "--output", folder / "grades", "--examples", 1


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def json_of(path: Path) -> Any:
    return json.loads(text_of(path))
