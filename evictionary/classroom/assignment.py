"""An assignment: a folder of tutorials/assignments/ with handout, starter file, assignment.toml and the instructor's note."""

from __future__ import annotations

import hashlib
import re
import tomllib
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from evictionary.classroom.child import Limits
from evictionary.errors import UsageError

ASSIGNMENTS = Path(str(files("evictionary.tutorials"))) / "assignments"


@dataclass(frozen=True)
class Step:
    """One line of the grade: a requirement of the paper, or a part of it, the laws that judge it, and its points.

    `needs` names the steps that must pass before this step is judged; `read` says where to read about it. `check` names a check
    of the grader beside the laws: constants (the student's own defaults), overflow (LagKV's deviations in the thousands), votes
    (GVote's samples, each by itself), blocks (H2O's scores of a prompt whose matrix the memory does not hold), kernel (the scores
    depend on what a Triton kernel writes) or rows (the student's rows of scores show the planted mistakes of `catches`; `longest`
    bounds the tokens of a step with one row, 0 stands for many rows). `calm` leaves out inputs on which a softmax without its
    maximum overflows, so that one mistake does not cost a step by luck.
    `thoroughness` multiplies the number of inputs that each law draws, for mistakes that show on few inputs.
    """

    name: str
    requirement: str
    title: str
    points: int
    laws: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    read: str = ""
    check: str = ""
    thoroughness: int = 1
    calm: bool = False
    catches: tuple[str, ...] = ()
    longest: int = 0


@dataclass(frozen=True)
class Assignment:
    """One assignment: the functions to write, and the steps that judge them."""

    name: str
    title: str
    file: str
    stem: str
    library: str
    folder: Path
    steps: tuple[Step, ...]
    interpret: bool = False
    contest: bool = False
    constants: dict[str, list[float]] = field(default_factory=dict)
    memory_gib: float = 2
    seconds: int = 20

    @property
    def max_score(self) -> int:
        return sum(step.points for step in self.steps)

    @property
    def dtype(self) -> str:
        return "float64" if self.library == "numpy" else "float32"

    @property
    def starter(self) -> Path:
        return self.folder / "starter.py"

    def limits(self, seconds: float | None = None) -> Limits:
        """The limits of a child process for one step; `seconds` replaces the assignment's own limit."""
        wall = self.seconds if seconds is None else seconds
        return Limits(wall, max(1, round(wall)), int(self.memory_gib * 2**30))

    def constants_of(self, student: str) -> dict[str, float]:
        """The constants of one student: drawn from the id, the same each time, from the values that assignment.toml lists."""
        drawn = {}
        for name, values in self.constants.items():
            digest = hashlib.sha256(f"{self.name}/{name}/{student}".encode()).digest()
            drawn[name] = values[int.from_bytes(digest[:8], "big") % len(values)]
        return drawn

    def starter_for(self, student: str | None) -> str:
        """The starter file; with a student's id, the defaults of its functions are that student's constants."""
        text = self.starter.read_text(encoding="utf-8")
        for name, value in (self.constants_of(student) if student else {}).items():
            text = re.sub(rf"(\b{name}: \w+ = )[\d.]+", rf"\g<1>{value}", text)
        return text


def names() -> list[str]:
    """The names of all assignments."""
    return sorted(path.parent.name for path in ASSIGNMENTS.glob("*/assignment.toml"))


def load(name: str) -> Assignment:
    """Read an assignment. Raises UsageError if no assignment has that name."""
    folder = ASSIGNMENTS / name
    if name not in names():
        wanted = ", ".join(names()) or "a clone of the repository, for the assignments come with it"
        raise UsageError(f"assignment: got {name!r}, wanted one of {wanted}")
    content: dict[str, Any] = tomllib.loads((folder / "assignment.toml").read_text(encoding="utf-8"))
    steps = tuple(_step(fields) for fields in content.pop("step"))
    return Assignment(name=name, folder=folder, steps=steps, **content)


def _step(fields: dict[str, Any]) -> Step:
    typed: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    return Step(**typed)
