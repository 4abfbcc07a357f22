"""A class: several processes grade many submissions, with progress; finished grades are not computed again."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import multiprocessing
import os
import re
import signal
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jsonschema import ValidationError

from evictionary import __version__
from evictionary.classroom import assignment as assignments
from evictionary.classroom import bundle, formats, grading, sandbox, submissions
from evictionary.classroom.assignment import Assignment
from evictionary.classroom.child import clean, visible
from evictionary.classroom.judgement import Judgement, Line, empty
from evictionary.classroom.submissions import Handed
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
    roster: frozenset[str] = frozenset()
    folder: Path | None = None

    @property
    def loaded(self) -> Assignment:
        return assignments.load(self.assignment, self.folder)

    @property
    def seed_id(self) -> str:
        """A digest that tells whether two runs had the same seeds, without revealing the seeds."""
        return hashlib.sha256(b"evictionary/" + self.secret).hexdigest()[:16]


def find(
    paths: Sequence[Path], file: str, output: Path | None = None, leave_out: Callable[[Path], None] = lambda path: None
) -> dict[str, Handed]:
    """The submissions by student: each path itself, or the entries of a folder with more than the assignment's `file`.

    leave_out is called with each entry of a folder that is no submission; hidden entries and the folder `output` are skipped. Two
    submissions of one name are none: the result of that student says why. Raises UsageError if a path does not exist.
    """
    found: dict[str, Handed] = {}
    for path in paths:
        if not path.exists():
            raise UsageError(f"submission: got {path}, wanted a file or folder that exists")
        for each in _entries(path.resolve(), file, output, leave_out) if path.is_dir() else [path]:
            student = submissions.student_of(each)
            if student in found and _is_mistaken(each):
                leave_out(each)
            elif student in found:
                earlier = found[student]
                told = earlier if isinstance(earlier, str) else f"more than one submission has this name: {visible(earlier.name)}"
                found[student] = f"{told}, {visible(each.name)}"
            else:
                found[student] = each
    if not found:
        raise UsageError(f"submission: got none, wanted {submissions.KINDS}")
    return found


def _is_mistaken(path: Path) -> bool:
    return path.name.endswith(tuple(submissions.MISTAKEN)) and not path.is_dir()


def _entries(folder: Path, file: str, output: Path | None, leave_out: Callable[[Path], None]) -> list[Path]:
    """The submissions of a folder, or the folder itself if the assignment's file is all that it holds of them."""
    others: list[Path] = []
    found: list[Path] = []
    for each in sorted(folder.iterdir()):
        if each.name.startswith((".", "__")) or (output is not None and os.path.realpath(each) == os.path.realpath(output)):
            continue
        is_one = each.is_dir() or each.is_symlink() or each.name.endswith(submissions.ENDINGS) or _is_mistaken(each)
        (found if is_one else others).append(each)
    found.sort(key=_is_mistaken)
    if [each.name for each in found if not _is_mistaken(each)] == [Path(file).name] and not found[0].is_dir():
        return [folder]
    for each in others:
        leave_out(each)
    return found


def grade_one(order: Order, student: str, path: Handed) -> dict[str, Any]:
    """Grade one submission: return the content of grade.json, also when the grading fails."""
    assignment = order.loaded
    settings, notes = _settings(order, student, path)
    digest = ""
    try:
        source = submissions.read(path, assignment)
        digest = hashlib.sha256(source).hexdigest()
        judgement = _judge(order, assignment, source, settings)
        judgement.notes = [*notes, *submissions.oddities(source), *judgement.notes]
    except submissions.BadSubmission as error:
        judgement = empty(assignment, clean(error))
    except Exception as error:
        return _failed(order, settings, student, path, error)
    return _as_json(order, settings, student, path, digest, judgement)


def _judge(order: Order, assignment: Assignment, source: bytes, settings: dict[str, Any]) -> Judgement:
    return grading.judge(
        source,
        assignment,
        secret=order.secret,
        examples=order.examples,
        constants=settings["constants"],
        origin=assignment.file,
        seconds=order.seconds,
    )


def _failed(order: Order, settings: dict[str, Any], student: str, path: Handed, error: Exception) -> dict[str, Any]:
    why = f"the grader itself failed, which is not the student's doing: {type(error).__name__}: {clean(error)}"
    return _as_json(order, settings, student, path, "", empty(order.loaded, why))


def _settings(order: Order, student: str, path: Handed) -> tuple[dict[str, Any], list[str]]:
    """The settings that a grade depends on, beside the student's file, and notes on the id.

    A grade with the same settings is not computed again. With personal constants this starts a process that reads the id out of
    the archive.
    """
    assignment = order.loaded
    personal_id, note = submissions.personal_id(path, student, order.roster) if order.personal else (student, "")
    settings = {
        "schema": formats.SCHEMA,
        "suite": __version__,
        "assignment": assignment.name,
        "seed_id": order.seed_id,
        "examples": order.examples,
        "constants": assignment.constants_of(personal_id) if order.personal else {},
        "personal_id": personal_id,
        "assignment_sha256": hashlib.sha256(repr((replace(assignment, folder=Path()), order.seconds)).encode()).hexdigest(),
    }
    return settings, [note] if note else []


def _as_json(
    order: Order, settings: dict[str, Any], student: str, path: Handed, digest: str, judgement: Judgement
) -> dict[str, Any]:
    content = {
        **settings,
        "title": order.loaded.title,
        "student": student,
        "file": "" if isinstance(path, str) else visible(path.name),
        "source_sha256": digest,
        "graded_at": formats.now(),
        **judgement.as_json(),
    }
    for line in content["lines"]:
        line["message"], line["repro"] = _within_walls(line["message"], order), line["repro"] and OUTSIDE + line["repro"]
    return content


OUTSIDE = "# This runs the student's code with your rights, outside of the walls. `evictionary grade --law` runs it inside.\n"


def _within_walls(message: str, order: Order) -> str:
    """A message for a grade, which an instructor may follow: the command of a law runs in a child, and the script is named."""
    message = re.sub(
        r"evictionary judge (\S+) --law (\S+)", rf"evictionary grade \1 --assignment {order.assignment} --law \2", message
    )
    return message.replace("to see it again, run\n", "to see it again, run (this runs the student's code with your rights)\n")


def by_one_law(order: Order, student: str, path: Handed, law: str) -> Line:
    """Judge one submission by one law of its assignment, in a child as always.

    Raises UsageError unless a step has that law, and where the submission cannot be read.
    """
    one = order.loaded
    for step in one.steps:
        laws = tuple(each for each in step.laws if law in (each, each.rpartition("::")[2]))
        if laws or law == step.check:
            judged = replace(step, laws=laws, check="" if laws else step.check, needs=())
            try:
                source = submissions.read(path, one)
            except submissions.BadSubmission as error:
                raise UsageError(f"submission: {clean(error)}") from None
            line = _judge(order, replace(one, steps=(judged,)), source, _settings(order, student, path)[0]).lines[0]
            return replace(line, message=_within_walls(line.message, order))
    known = sorted({each.rpartition("::")[2] for step in one.steps for each in (*step.laws, step.check) if each})
    raise UsageError(f"--law: got {law!r}, wanted one of {', '.join(known)}")


def tried(order: Order, solution: Handed | None = None) -> Iterator[tuple[str, int, Judgement]]:
    """What an assignment gives to a right answer, by default the reference, and to its starter, each with the points it should get.

    Raises UsageError if the answer cannot be read, or the reference has no method of that name.
    """
    one = order.loaded
    settings: dict[str, Any] = {"constants": {}}
    if solution is None and one.stem not in bundle.STEMS:
        raise UsageError(f"submission: got none, wanted a right answer to {one.name}, for the reference has no {one.stem}")
    try:
        right = bundle.bundled(one.stem).encode() if solution is None else submissions.read(solution, one)
    except submissions.BadSubmission as error:
        raise UsageError(f"submission: {clean(error)}") from None
    yield "the reference" if solution is None else "the right answer", one.max_score, _judge(order, one, right, settings)
    yield "the starter file", 0, _judge(order, one, one.starter.read_bytes(), settings)


def run(
    order: Order, found: dict[str, Handed], output: Path, jobs: int, advance: Callable[[str], None] = lambda student: None
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
        return _failed(order, _settings(order, student, found[student])[0], student, found[student], error)

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

    alone = ((student, grade_one(order, student, path)) for student, path in waiting.items())
    for student, result in alone if jobs == 1 else _in_processes(order, waiting, jobs):
        yield finish(failed(student, result) if isinstance(result, Exception) else result)


def _in_processes(order: Order, waiting: dict[str, Handed], jobs: int) -> Iterator[tuple[str, dict[str, Any] | Exception]]:
    """The grade of each student, or what ended its process. A process that dies breaks its pool: the others go on, each alone."""
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_leave_interrupts)
    futures: dict[Future[dict[str, Any]], str] = {}
    lost = []
    try:
        for student, path in waiting.items():
            futures[pool.submit(grade_one, order, student, path)] = student
        for future in as_completed(futures):
            student, error = futures[future], future.exception()
            if isinstance(error, BrokenProcessPool) and len(waiting) > 1:
                lost.append(student)
            else:
                yield student, error if isinstance(error, Exception) else future.result()
    except BaseException:
        # Interrupted: running submissions are ended, waiting ones are not started. The next run goes on from here.
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    for student in lost:
        yield from _in_processes(order, {student: waiting[student]}, 1)


def _leave_interrupts() -> None:
    """Set up a process of the pool: Ctrl-C is left to the parent, which ends the process; temporary folders are deleted then."""
    sandbox.end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))


def _stored(order: Order, student: str, path: Handed, output: Path) -> dict[str, Any] | None:
    try:
        grade = json.loads((output / student / "grade.json").read_text(encoding="utf-8"))
        formats.validator("grade").validate(grade)
        digest = hashlib.sha256(submissions.read(path, order.loaded)).hexdigest()
    except Exception:  # no grade, or a damaged one: the submission is graded
        return None
    wanted = _settings(order, student, path)[0] | {"source_sha256": digest}
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
    names = Counter(_alike(grade["student"]) for grade in grades)
    mistakes = Counter(mistake for grade in grades for line in grade["lines"] for mistake in line["misconceptions"])
    return {
        "submissions": len(grades),
        "errors": sum(bool(grade["error"]) for grade in grades),
        "unjudged": sorted(grade["student"] for grade in grades if grade["error"]),
        "blocked": sorted(grade["student"] for grade in grades if formats.blocked(grade)),
        "one_id": sorted(grade["student"] for grade in grades if ids[grade["personal_id"]] > 1),
        "alike": sorted(grade["student"] for grade in grades if names[_alike(grade["student"])] > 1),
        "notes": {grade["student"]: grade["notes"] for grade in grades if grade["notes"]},
        "distribution": dict(sorted(Counter(grade["score"] for grade in grades).items())),
        "steps": {name: dict(counts) for name, counts in steps.items()},
        "walls_missing": sorted({name for grade in grades for name, stands in grade["walls"].items() if not stands}),
        "misconceptions": dict(mistakes.most_common(10)),
        "grading_seconds": round(sum(grade["seconds"] for grade in grades), 1),
    }


def _alike(student: str) -> str:
    """What is left of a name without capitals, spaces and the ways to write an accent: one folder to some systems."""
    return "".join(unicodedata.normalize("NFKC", student).casefold().split())


def gradebook(grades: Sequence[dict[str, Any]]) -> str:
    """The table that a course's platform imports: a line for each student with the id, the points and what became of each step."""
    content = io.StringIO()
    rows = csv.writer(content, lineterminator="\n")
    rows.writerow(("id", "points", "of", "comment"))
    for grade in sorted(grades, key=lambda one: str(one["student"])):
        lost = [f"{line['name']}: {line['verdict']}, {line['reason']}" for line in grade["lines"] if line["verdict"] != "passed"]
        comment = grade["error"] or "; ".join(lost) or "full marks"
        rows.writerow((_no_formula(grade["student"]), grade["score"], grade["max_score"], _no_formula(" ".join(comment.split()))))
    return content.getvalue()


def _no_formula(text: str) -> str:
    """A text that a spreadsheet shows, where it would compute it."""
    return f"'{text}" if text.lstrip()[:1] in tuple("=+-@|%") else text


def written(folder: Path) -> list[dict[str, Any]]:
    """The grades that are written in a folder of grades. Raises UsageError for a damaged one, and if there is none."""
    grades = []
    for path in sorted(folder.glob("*/grade.json")):
        try:
            grades.append(json.loads(path.read_text(encoding="utf-8")))
            formats.validator("grade").validate(grades[-1])
        except (ValueError, ValidationError) as error:
            raise UsageError(f"grades: {path} is no grade of this version: {clean(error)}") from None
    if not grades:
        raise UsageError(f"grades: got {folder}, wanted a folder that `evictionary grade` wrote, with a folder for each student")
    return grades
