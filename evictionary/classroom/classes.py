"""A class: several processes grade many submissions, with progress; finished grades are not computed again."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evictionary import __version__
from evictionary.classroom import assignment as assignments
from evictionary.classroom import formats, grading, submissions, worker
from evictionary.classroom.child import clean
from evictionary.errors import UsageError


@dataclass(frozen=True)
class Order:
    """The settings that all submissions of a class share."""

    assignment: str
    secret: bytes
    examples: int
    formats: tuple[str, ...]
    personal: bool = False
    seconds: float | None = None

    @property
    def seed_id(self) -> str:
        """A digest that tells whether two runs had the same seeds, without revealing the seeds."""
        return hashlib.sha256(b"evictionary/" + self.secret).hexdigest()[:16]


def find(
    paths: Sequence[Path], file: str, output: Path | None = None, leave_out: Callable[[Path], None] = lambda path: None
) -> dict[str, Path]:
    """The submissions by student: each path itself, or the entries of a folder with more than the assignment's `file`.

    leave_out is called with each entry of a folder that is no submission; hidden entries and the folder `output` are skipped.
    Raises UsageError if a path does not exist or two submissions have one name.
    """
    found: dict[str, Path] = {}
    for path in paths:
        if not path.exists():
            raise UsageError(f"submission: got {path}, wanted a file or folder that exists")
        for each in _entries(path.resolve(), file, output, leave_out) if path.is_dir() else [path]:
            student = submissions.student_of(each)
            if student in found:
                raise UsageError(f"submission: {each} and {found[student]} have one name, {student!r}")
            found[student] = each
    if not found:
        raise UsageError(f"submission: got none, wanted {submissions.KINDS}")
    return found


def _entries(folder: Path, file: str, output: Path | None, leave_out: Callable[[Path], None]) -> list[Path]:
    """The submissions of a folder, or the folder itself if the assignment's file is all that it holds of them."""
    others: list[Path] = []
    found: list[Path] = []
    for each in sorted(folder.iterdir()):
        if each.name.startswith((".", "__")) or (output is not None and os.path.realpath(each) == os.path.realpath(output)):
            continue
        is_one = each.is_dir() or each.is_symlink() or each.name.endswith(submissions.ENDINGS)
        (found if is_one else others).append(each)
    if [each.name for each in found] == [Path(file).name] and not found[0].is_dir():
        return [folder]
    for each in others:
        leave_out(each)
    return found


def grade_one(order: Order, student: str, path: Path) -> dict[str, Any]:
    """Grade one submission: return the content of grade.json, also when the grading fails."""
    assignment = assignments.load(order.assignment)
    settings = _settings(order, student, path)
    digest = ""
    try:
        source = submissions.read(path, assignment)
        digest = hashlib.sha256(source).hexdigest()
        judgement = grading.judge(
            source,
            assignment,
            secret=order.secret,
            examples=order.examples,
            constants=settings["constants"],
            origin=assignment.file,
            seconds=order.seconds,
        )
    except submissions.BadSubmission as error:
        judgement = grading.empty(assignment, clean(error))
    except Exception as error:
        return _failed(settings, student, error)
    return _as_json(settings, student, digest, judgement)


def _failed(settings: dict[str, Any], student: str, error: Exception) -> dict[str, Any]:
    why = f"the grader itself failed, which is not the student's doing: {type(error).__name__}: {clean(error)}"
    return _as_json(settings, student, "", grading.empty(assignments.load(settings["assignment"]), why))


def _settings(order: Order, student: str, path: Path) -> dict[str, Any]:
    """The settings that a grade depends on, beside the student's file; a grade with the same settings is not computed again.

    With personal constants this starts a process that reads the id out of the archive.
    """
    assignment = assignments.load(order.assignment)
    personal_id = submissions.personal_id(path, student) if order.personal else student
    return {
        "schema": formats.SCHEMA,
        "suite": __version__,
        "assignment": assignment.name,
        "seed_id": order.seed_id,
        "examples": order.examples,
        "constants": assignment.constants_of(personal_id) if order.personal else {},
        "personal_id": personal_id,
        "assignment_sha256": hashlib.sha256(repr((replace(assignment, folder=Path()), order.seconds)).encode()).hexdigest(),
    }


def _as_json(settings: dict[str, Any], student: str, digest: str, judgement: grading.Judgement) -> dict[str, Any]:
    return {
        **settings,
        "title": assignments.load(settings["assignment"]).title,
        "student": student,
        "source_sha256": digest,
        "graded_at": formats.now(),
        **judgement.as_json(),
    }


def run(
    order: Order, found: dict[str, Path], output: Path, jobs: int, advance: Callable[[str], None] = lambda student: None
) -> Iterator[dict[str, Any]]:
    """Grade the submissions, write their folders under `output`, and yield each grade as soon as it is finished.

    A submission that was graded with the same file, seeds and settings is read from its folder.
    """
    waiting = {}
    for student, path in found.items():
        done = _stored(order, student, path, output)
        if done is None:
            waiting[student] = path
        else:
            advance(student)
            yield done

    def failed(student: str, error: Exception) -> dict[str, Any]:
        return _failed(_settings(order, student, found[student]), student, error)

    def finish(grade: dict[str, Any]) -> dict[str, Any]:
        try:
            formats.write(grade, output / grade["student"], list(order.formats))
        except OSError:  # the folder cannot be written
            raise
        except Exception as error:
            grade = failed(grade["student"], error)
            formats.write(grade, output / grade["student"], list(order.formats))
        advance(grade["student"])
        return grade

    if jobs == 1:
        for student, path in waiting.items():
            yield finish(grade_one(order, student, path))
        return
    broken = {}
    for student, result in _in_processes(order, waiting, jobs):
        if isinstance(result, BrokenProcessPool):
            broken[student] = waiting[student]
        else:
            yield finish(failed(student, result) if isinstance(result, Exception) else result)
    # A process that dies breaks its whole pool, so each submission that was lost with it gets a pool of its own.
    for student, path in broken.items():
        for _, result in _in_processes(order, {student: path}, 1):
            yield finish(failed(student, result) if isinstance(result, Exception) else result)


def _in_processes(order: Order, waiting: dict[str, Path], jobs: int) -> Iterator[tuple[str, dict[str, Any] | Exception]]:
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_leave_interrupts)
    futures: dict[Future[dict[str, Any]], str] = {}
    try:
        for student, path in waiting.items():
            futures[pool.submit(grade_one, order, student, path)] = student
        for future in as_completed(futures):
            error = future.exception()
            yield futures[future], error if isinstance(error, Exception) else future.result()
    except BaseException:
        # Interrupted: running submissions are ended, waiting ones are not started. The next run goes on from here.
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _leave_interrupts() -> None:
    """Set up a process of the pool: Ctrl-C is left to the parent, which ends the process; temporary folders are deleted then."""
    worker.end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))


def _stored(order: Order, student: str, path: Path, output: Path) -> dict[str, Any] | None:
    try:
        grade = json.loads((output / student / "grade.json").read_text(encoding="utf-8"))
        formats.validator("grade").validate(grade)
        digest = hashlib.sha256(submissions.read(path, assignments.load(order.assignment))).hexdigest()
    except Exception:  # no grade, or a damaged one: the submission is graded
        return None
    wanted = _settings(order, student, path) | {"source_sha256": digest}
    same = all(grade[key] == value for key, value in wanted.items())
    has_files = all((output / student / formats.FORMATS[name][0]).exists() for name in order.formats)
    is_judged = not grade["error"] and not formats.blocked(grade)
    return grade if same and has_files and is_judged else None


def summary(grades: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The result of the class: the distribution of points, how many pass each step, the most frequent misconceptions."""
    steps: dict[str, Counter[str]] = {}
    for grade in grades:
        for line in grade["lines"]:
            steps.setdefault(line["name"], Counter())[line["verdict"]] += 1
    ids = Counter(grade["personal_id"] for grade in grades)
    mistakes = Counter(mistake for grade in grades for line in grade["lines"] for mistake in line["misconceptions"])
    return {
        "submissions": len(grades),
        "errors": sum(bool(grade["error"]) for grade in grades),
        "unjudged": sorted(grade["student"] for grade in grades if grade["error"]),
        "blocked": sorted(grade["student"] for grade in grades if formats.blocked(grade)),
        "one_id": sorted(grade["student"] for grade in grades if ids[grade["personal_id"]] > 1),
        "distribution": dict(sorted(Counter(grade["score"] for grade in grades).items())),
        "steps": {name: dict(counts) for name, counts in steps.items()},
        "walls_missing": sorted({name for grade in grades for name, stands in grade["walls"].items() if not stands}),
        "misconceptions": dict(mistakes.most_common(10)),
        "grading_seconds": round(sum(grade["seconds"] for grade in grades), 1),
    }
