"""What the tests of the classroom share: to judge a file, to grade a submission, to call a command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from evictionary.classroom import assignment as assignments
from evictionary.classroom import classes, formats, grading
from evictionary.classroom.child import Child, Limits
from evictionary.classroom.judgement import Judgement
from evictionary.cli.app import app

EVERY_FORMAT = tuple(formats.FORMATS)


def judged(name: str, source: str, **settings: Any) -> Judgement:
    return grading.judge(source.encode(), assignments.load(name), **{"secret": b"a secret", "examples": 2, **settings})


def verdicts(judged: Judgement) -> dict[str, str]:
    return {line.name: line.verdict for line in judged.lines}


def order(examples: int = 1, handed_out: tuple[str, ...] = (), secret: bytes = b"a secret") -> classes.Order:
    """How a class of the KeyDiff assignment is graded."""
    return classes.Order("keydiff", secret, examples, handed_out)


def written(folder: Path, source: str | bytes = "", name: str = "ada.py") -> Path:
    """A student's file."""
    (folder / name).write_bytes(source if isinstance(source, bytes) else source.encode())
    return folder / name


def child_of(folder: Path, source: str, seconds: float = 20) -> Child:
    """A child that runs a KeyDiff file."""
    return Child(written(folder, source, "keydiff.py"), "keydiff", limits=Limits(seconds))


def graded(source: str | bytes, tmp_path: Path, examples: int = 1, handed_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """What becomes of one student's file in a class of one."""
    found = {"ada": written(tmp_path, source)}
    (grade,) = classes.run(order(examples, handed_out), found, tmp_path / "grades", 1)
    return grade


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])
