"""What the tests of the classroom share: to write a file as a student would, to judge it, to grade it, to call a command."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from evictionary.classroom import assignment as assignments
from evictionary.classroom import classes, formats, grading
from evictionary.classroom.child import Child, Limits
from evictionary.classroom.judgement import Judgement, Line
from evictionary.cli.app import app

from . import synthetic

EVERY_FORMAT = tuple(formats.FORMATS)
EVERY_FILE = {"grade.json", *(file for file, _ in formats.FORMATS.values())}
SOLUTION = synthetic.SOLUTION.read_text(encoding="utf-8")


def right(name: str) -> str:
    """A right answer to an assignment on NumPy."""
    stem = assignments.load(name).stem
    return SOLUTION if stem == "keydiff" else synthetic.bundled(stem)


def with_another(function: str, body: str, source: str = SOLUTION) -> str:
    """A file with another function of that name, whose body may call the one of the file as `right`."""
    return f"{source}\n\nimport numpy as np\n\nright = {function}\n\n\ndef {function}{body}\n"


def alone(name: str, *steps: str, **changes: Any) -> assignments.Assignment:
    """An assignment with some of its steps, which need no other; changes replace fields of them. A law is named by a part."""
    one = assignments.load(name)
    chosen = [replace(each, needs=(), **changes) for each in one.steps if each.name in steps]
    return replace(one, steps=tuple(chosen))


def judged(name: str | assignments.Assignment, source: str, **settings: Any) -> Judgement:
    one = assignments.load(name) if isinstance(name, str) else name
    return grading.judge(source.encode(), one, **{"secret": b"a secret", "examples": 2, **settings})


def line_of(name: str, step: str, source: str, law: str = "", **settings: Any) -> Line:
    """The line of one step, asked without those that it needs; where `law` is given, by the laws with that in their names."""
    one = alone(name, step)
    if law:
        one = alone(name, step, laws=tuple(each for each in one.steps[0].laws if law in each))
    return judged(one, source, **{"examples": 3, **settings}).lines[-1]


def verdicts(judged: Judgement) -> dict[str, str]:
    return {line.name: line.verdict for line in judged.lines}


def order(examples: int = 1, handed_out: tuple[str, ...] = (), secret: bytes = b"a secret") -> classes.Order:
    """How a class of the KeyDiff assignment is graded."""
    return classes.Order("keydiff", secret, examples, handed_out)


def written(folder: Path, source: str | bytes = "", name: str = "ada.py") -> Path:
    """A student's file; its folder is made."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(source if isinstance(source, bytes) else source.encode())
    return folder / name


def packed(path: Path, files: dict[str, str | bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def child_of(folder: Path, source: str, seconds: float = 20) -> Child:
    """A child that runs a KeyDiff file."""
    return Child(written(folder, source, "keydiff.py"), "keydiff", limits=Limits(seconds))


def graded(source: str | bytes, tmp_path: Path, examples: int = 1, handed_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """What becomes of one student's file in a class of one."""
    found = {"ada": written(tmp_path, source)}
    (grade,) = classes.run(order(examples, handed_out), found, tmp_path / "grades", 1)
    return grade


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def json_of(path: Path) -> Any:
    return json.loads(text_of(path))


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def as_json(*arguments: object) -> Any:
    """What a command says as JSON."""
    return json.loads(invoke(*arguments, "--json").stdout)
