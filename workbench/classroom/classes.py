"""A class: many submissions graded by several processes, with progress; what is done already is not done again."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench import __version__
from workbench.classroom import assignment as assignments
from workbench.classroom import formats, grading, submissions
from workbench.classroom.assignment import Assignment
from workbench.errors import UsageError


@dataclass(frozen=True)
class Order:
    """How a class is graded: what every submission has in common."""

    assignment: str
    secret: bytes
    examples: int
    formats: tuple[str, ...]
    personal: bool = False
    seconds: float | None = None

    @property
    def seed_id(self) -> str:
        """Says whether two runs had the same seeds, and nothing about them."""
        return hashlib.sha256(b"evictionary/" + self.secret).hexdigest()[:16]


def find(paths: Sequence[Path], file: str) -> dict[str, Path]:
    """The submissions by student: each path itself, or, for a folder without the assignment's `file`, what lies in it.

    Raises UsageError where a path does not exist or two submissions have one name.
    """
    found: dict[str, Path] = {}
    for path in paths:
        if not path.exists():
            raise UsageError(f"submission: got {path}, wanted a file or folder that exists")
        entries = [path]
        if path.is_dir() and not os.path.lexists(path / Path(file).name):
            entries = sorted(each for each in path.iterdir() if each.is_dir() or each.suffix in (".zip", ".py"))
        for each in entries:
            student = submissions.student_of(each)
            if student in found:
                raise UsageError(f"submission: {each} and {found[student]} have one name, {student!r}")
            found[student] = each
    if not found:
        raise UsageError("submission: got none, wanted a folder, a .zip or a .py file")
    return found


def grade_one(order: Order, student: str, path: Path) -> dict[str, Any]:
    """The content of grade.json for one submission, whatever becomes of it."""
    assignment = assignments.load(order.assignment)
    constants = assignment.constants_of(student) if order.personal else {}
    digest = ""
    try:
        source = submissions.read(path, assignment)
        digest = hashlib.sha256(source).hexdigest()
        judgement = grading.judge(
            source,
            assignment,
            secret=order.secret,
            examples=order.examples,
            constants=constants,
            origin=assignment.file,
            seconds=order.seconds,
        )
    except submissions.BadSubmission as error:
        judgement = grading.empty(assignment, str(error))
    except Exception as error:
        judgement = grading.empty(assignment, f"the grader itself failed, which is not the student's doing: {error}")
    return _as_json(order, assignment, student, digest, constants, judgement)


def _as_json(
    order: Order, assignment: Assignment, student: str, digest: str, constants: dict[str, float], judgement: grading.Judgement
) -> dict[str, Any]:
    return {
        "schema": formats.SCHEMA,
        "suite": __version__,
        "assignment": assignment.name,
        "title": assignment.title,
        "student": student,
        "source_sha256": digest,
        "seed_id": order.seed_id,
        "examples": order.examples,
        "constants": constants,
        "graded_at": formats.now(),
        **judgement.as_json(),
    }


def run(
    order: Order, found: dict[str, Path], output: Path, jobs: int, advance: Callable[[str], None] = lambda student: None
) -> Iterator[dict[str, Any]]:
    """Grade the submissions, write their folders under `output`, and give each grade as it is done.

    One that has been graded with the same file, seeds and settings is read from its folder.
    """
    waiting = {}
    for student, path in found.items():
        done = _stored(order, student, path, output)
        if done is None:
            waiting[student] = path
        else:
            advance(student)
            yield done

    def finish(grade: dict[str, Any]) -> dict[str, Any]:
        formats.write(grade, output / grade["student"], list(order.formats))
        advance(grade["student"])
        return grade

    if jobs == 1:
        for student, path in waiting.items():
            yield finish(grade_one(order, student, path))
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures: dict[Future[dict[str, Any]], str] = {
            pool.submit(grade_one, order, student, path): student for student, path in waiting.items()
        }
        for future in as_completed(futures):
            student = futures[future]
            try:
                grade = future.result()
            except Exception as error:  # the pool broke: a result is written all the same
                assignment = assignments.load(order.assignment)
                judgement = grading.empty(assignment, f"the grader itself failed, which is not the student's doing: {error}")
                grade = _as_json(order, assignment, student, "", {}, judgement)
            yield finish(grade)


def _stored(order: Order, student: str, path: Path, output: Path) -> dict[str, Any] | None:
    try:
        grade = json.loads((output / student / "grade.json").read_text(encoding="utf-8"))
        formats.validator("grade").validate(grade)
        assignment = assignments.load(order.assignment)
        digest = hashlib.sha256(submissions.read(path, assignment)).hexdigest()
    except Exception:  # nothing there, or nothing that can be trusted: it is graded
        return None
    constants = assignment.constants_of(student) if order.personal else {}
    wanted = (formats.SCHEMA, __version__, order.assignment, digest, order.seed_id, order.examples, constants)
    keys = ("schema", "suite", "assignment", "source_sha256", "seed_id", "examples", "constants")
    same = all(grade[key] == value for key, value in zip(keys, wanted, strict=True))
    has_files = all((output / student / formats.FORMATS[name][0]).exists() for name in order.formats)
    return grade if same and has_files and not grade["error"] else None


def summary(grades: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How the class did: the distribution of the points, how many pass each step, which misconceptions are frequent."""
    steps: dict[str, Counter[str]] = {}
    for grade in grades:
        for line in grade["lines"]:
            steps.setdefault(line["name"], Counter())[line["verdict"]] += 1
    mistakes = Counter(mistake for grade in grades for line in grade["lines"] for mistake in line["misconceptions"])
    return {
        "submissions": len(grades),
        "errors": sum(bool(grade["error"]) for grade in grades),
        "distribution": dict(sorted(Counter(grade["score"] for grade in grades).items())),
        "steps": {name: dict(counts) for name, counts in steps.items()},
        "misconceptions": dict(mistakes.most_common(10)),
        "grading_seconds": round(sum(grade["seconds"] for grade in grades), 1),
    }
