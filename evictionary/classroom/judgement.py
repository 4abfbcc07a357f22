"""What becomes of one submission: its judgement, a line for each step, and the run that leads to it."""

import hashlib
import importlib
import importlib.util
import types
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from evictionary.classroom.assignment import Assignment
from evictionary.classroom.child import Child, as_tuple


@dataclass
class Line:
    """The verdict on one step: passed, failed, not judged yet or blocked, its points, the laws, and the
    message for a failure.

    Blocked means that this machine cannot judge it, which is not the student's doing; the next run of the
    grader tries again.
    """

    name: str
    requirement: str
    title: str
    max_points: int
    verdict: str = "not judged yet"
    points: int = 0
    laws: dict[str, str] = field(default_factory=dict)
    reason: str = ""
    message: str = ""
    misconceptions: list[str] = field(default_factory=list)
    read: str = ""
    repro: str = ""


@dataclass
class Judgement:
    """The result of one submission. `error` says why nothing could be judged; `walls` names the
    protections around the child.

    `notes` are for the instructor alone: what is odd about the file or about what it does.
    """

    lines: list[Line]
    error: str = ""
    walls: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    leaderboard: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def score(self) -> int:
        return sum(line.points for line in self.lines)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "score": self.score, "max_score": sum(line.max_points for line in self.lines)}


def empty(assignment: Assignment, error: str = "") -> Judgement:
    """A judgement without any judged step."""
    lines = [
        Line(step.name, step.requirement, step.title, step.points, read=step.read)
        for step in assignment.steps
    ]
    return Judgement(lines, error)


def to_nobody(text: str, done: int, total: int) -> None:
    """What a run tells of its progress, where nobody asked for it."""


@dataclass
class Run:
    """One submission that is being judged: the file, how a
    process for it is started, what its inputs are drawn from.

    origin is the path that messages name. Without a secret the seeds are those of `check_seed`. constants are
    the student's own defaults; seconds replaces the assignment's limit for each step; tried is what the code
    tried and was refused; needs names walls without which no code runs. told is called with what is done
    now, how much is done, and of how much.
    """

    assignment: Assignment
    path: Path
    origin: str = ""
    secret: bytes | None = None
    examples: int = 1
    constants: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None
    check_seed: int = 0
    tried: set[str] = field(default_factory=set)
    needs: tuple[str, ...] = ()
    told: Callable[[str, int, int], None] = to_nobody

    def child(self, patience: int = 1, **changes: Any) -> Child:
        """A process that runs the file, and may take `patience`
        times its limit; changes are of its settings.
        """
        one = self.assignment
        limits = one.limits(patience * (one.seconds if self.seconds is None else self.seconds))
        settings: dict[str, Any] = {
            "library": one.library,
            "interpret": one.interpret,
            "limits": limits,
            "tried": self.tried,
            "needs": self.needs,
            **changes,
        }
        return Child(self.path, one.stem, named=named(one.stem), **settings)

    def seed(self, name: str) -> int:
        """The seed for one law or one purpose."""
        source = f"check/{self.check_seed}/".encode() if self.secret is None else self.secret
        return int.from_bytes(hashlib.sha256(source + name.encode()).digest()[:8], "big")


def reference(stem: str) -> types.ModuleType:
    """The module of the reference, or an empty module for a method without a paper."""
    name = f"evictionary.reference.{stem}"
    return importlib.import_module(name) if importlib.util.find_spec(name) else types.ModuleType(stem)


def named(stem: str) -> Callable[[str, dict[str, Any]], Any]:
    """The reference's named tuples by name: the child's result gets a class that the laws know; other
    tuples stay plain.
    """

    def of(name: str, fields: dict[str, Any]) -> Any:
        known: Any = getattr(reference(stem), name.rpartition(".")[2], None)
        return (
            known(*fields.values())
            if getattr(known, "_fields", None) == tuple(fields)
            else as_tuple(name, fields)
        )

    return of
