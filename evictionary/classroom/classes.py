"""A class: several processes grade many submissions,
with progress; finished grades are not computed again.
"""

import contextlib
import hashlib
import multiprocessing
import os
import re
import signal
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jsonschema import ValidationError

from evictionary import __version__
from evictionary.classroom import assignment as assignments, bundle, formats, grading, sandbox, submissions
from evictionary.classroom.assignment import Assignment
from evictionary.classroom.child import clean, visible
from evictionary.classroom.judgement import Judgement, Line, empty
from evictionary.errors import UsageError, did_you_mean, require, usage
from evictionary.store import grouped


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
    needs: tuple[str, ...] = ()

    @property
    def loaded(self) -> Assignment:
        return assignments.load(self.assignment, self.folder)

    @property
    def seed_id(self) -> str:
        """A digest that tells whether two runs had the same seeds, without revealing the seeds."""
        return hashlib.sha256(b"evictionary/" + self.secret).hexdigest()[:16]


def find(
    paths: Sequence[Path], file: str, output: Path | None = None
) -> tuple[dict[str, submissions.Handed], list[Path]]:
    """The submissions by student, and the entries of a folder that are none.

    A submission is a path itself, or an entry of a folder with more than the assignment's `file`. Hidden
    entries and the folder `output` are skipped. A student with two submissions has none: the result of that
    student says why. Raises UsageError if a path does not exist.
    """
    found: dict[str, submissions.Handed] = {}
    left_out: list[Path] = []
    for path in paths:
        require(path.exists(), f"submission: got {path}, wanted a file or folder that exists")
        for each in _entries(path.resolve(), file, output, left_out) if path.is_dir() else [path]:
            student = submissions.student_of(each)
            earlier = found.get(student)
            if earlier is None:
                found[student] = each
            elif _is_mistaken(each):
                left_out.append(each)
            else:
                twice = "more than one submission has this name"
                told = earlier if isinstance(earlier, str) else f"{twice}: {visible(earlier.name)}"
                found[student] = f"{told}, {visible(each.name)}"
    require(found, f"submission: got none, wanted {submissions.KINDS}")
    return found, left_out


def _is_mistaken(path: Path) -> bool:
    return path.name.endswith(tuple(submissions.MISTAKEN)) and not path.is_dir()


def _entries(folder: Path, file: str, output: Path | None, left_out: list[Path]) -> list[Path]:
    """The submissions of a folder, or the folder itself
    if the assignment's file is all that it holds of them.

    What else it holds is added to left_out.
    """
    grades = output and os.path.realpath(output)
    found: list[Path] = []
    others: list[Path] = []
    for each in sorted(folder.iterdir()):
        if not each.name.startswith((".", "__")) and os.path.realpath(each) != grades:
            is_one = (
                each.is_dir()
                or each.is_symlink()
                or each.name.endswith(submissions.ENDINGS)
                or _is_mistaken(each)
            )
            (found if is_one else others).append(each)
    found.sort(key=_is_mistaken)
    if [each.name for each in found if not _is_mistaken(each)] == [Path(file).name] and not found[0].is_dir():
        return [folder]
    left_out.extend(others)
    return found


def grade_one(order: Order, student: str, path: submissions.Handed) -> dict[str, Any]:
    """Grade one submission: return the content of grade.json, also when the grading fails."""
    (settings, notes), digest = _settings(order, student, path), ""
    try:
        source = submissions.read(path, order.loaded)
        judgement = _judge(order, order.loaded, source, settings["constants"])
        judgement.notes = [*notes, *submissions.oddities(source), *judgement.notes]
        digest = hashlib.sha256(source).hexdigest()
    except submissions.BadSubmission as error:
        judgement = empty(order.loaded, clean(error))
    except Exception as error:
        judgement = _failed(order, error)
    return _as_json(order, settings, student, path, digest, judgement)


def _judge(order: Order, assignment: Assignment, source: bytes, constants: dict[str, float]) -> Judgement:
    return grading.judge(
        source,
        assignment,
        secret=order.secret,
        examples=order.examples,
        constants=constants,
        origin=assignment.file,
        seconds=order.seconds,
        needs=order.needs,
    )


def _failed(order: Order, error: Exception) -> Judgement:
    why = "the grader itself failed, which is not the student's doing"
    return empty(order.loaded, f"{why}: {type(error).__name__}: {clean(error)}")


def _settings(order: Order, student: str, path: submissions.Handed) -> tuple[dict[str, Any], list[str]]:
    """The settings that a grade depends on, beside the student's file, and notes on the id.

    A grade with the same settings is not computed again. With personal constants this starts a process that
    reads the id out of the archive.
    """
    assignment = order.loaded
    personal_id, note = (
        submissions.personal_id(path, student, order.roster) if order.personal else (student, "")
    )
    settings = {
        "schema": formats.SCHEMA,
        "suite": __version__,
        "assignment": assignment.name,
        "seed_id": order.seed_id,
        "examples": order.examples,
        "constants": assignment.constants_of(personal_id) if order.personal else {},
        "personal_id": personal_id,
        "assignment_sha256": hashlib.sha256(
            repr((replace(assignment, folder=Path()), order.seconds)).encode()
        ).hexdigest(),
    }
    return settings, [note] if note else []


def _as_json(
    order: Order,
    settings: dict[str, Any],
    student: str,
    path: submissions.Handed,
    digest: str,
    judgement: Judgement,
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
        line["message"], line["repro"] = (
            _within_walls(line["message"], order),
            line["repro"] and OUTSIDE + line["repro"],
        )
    return content


OUTSIDE = (
    "# This runs the student's code with your rights, outside of the walls. `evictionary grade --law` "
    "runs it inside.\n"
)


def _within_walls(message: str, order: Order) -> str:
    """A message for a grade, which an instructor may follow: the command of a law runs in a child, and the
    script is named.
    """
    inside = rf"evictionary grade \1 --assignment {order.assignment} --law \2"
    message = re.sub(r"evictionary judge (\S+) (?:--.* )?--law (\S+)", inside, message)
    return message.replace(
        "to see it again, run\n", "to see it again, run (this runs the student's code with your rights)\n"
    )


def by_one_law(order: Order, student: str, path: submissions.Handed, law: str) -> Line:
    """Judge one submission by one law of its assignment, in a child as always.

    Raises UsageError unless a step has that law, and where the submission cannot be read.
    """
    one = order.loaded
    for step in one.steps:
        laws = tuple(each for each in step.laws if law in (each, each.rpartition("::")[2]))
        if laws or law == step.check:
            judged = replace(step, laws=laws, check="" if laws else step.check, needs=())
            constants = _settings(order, student, path)[0]["constants"]
            line = _judge(order, replace(one, steps=(judged,)), _readable(path, one), constants).lines[0]
            return replace(line, message=_within_walls(line.message, order))
    known = sorted(
        {each.rpartition("::")[2] for step in one.steps for each in (*step.laws, step.check) if each}
    )
    raise UsageError(f"--law: got {law!r}{did_you_mean(law, known)}, wanted one of {', '.join(known)}")


def _readable(path: submissions.Handed, assignment: Assignment) -> bytes:
    with usage("submission", submissions.BadSubmission):
        return submissions.read(path, assignment)


def tried(order: Order, solution: submissions.Handed | None = None) -> Iterator[tuple[str, int, Judgement]]:
    """What an assignment gives to a right answer, by default the reference, and to its starter, each with
    the points it should get.

    Raises UsageError if the answer cannot be read, or the reference has no method of that name.
    """
    one, name = order.loaded, "the reference" if solution is None else "the right answer"
    wanted = f"submission: got none, wanted a right answer to {one.name}, for the reference has no {one.stem}"
    require(solution is not None or one.stem in bundle.STEMS, wanted)
    right = bundle.bundled(one.stem).encode() if solution is None else _readable(solution, one)
    yield name, one.max_score, _judge(order, one, right, {})
    yield "the starter file", 0, _judge(order, one, one.starter.read_bytes(), {})


def run(
    order: Order,
    found: dict[str, submissions.Handed],
    output: Path,
    jobs: int,
    advance: Callable[[str], None] = lambda student: None,
    again: Collection[str] = (),
) -> Iterator[dict[str, Any]]:
    """Grade the submissions, write their folders under
    `output`, and yield each grade as soon as it is finished.

    A submission that was graded with the same file, seeds and settings is read from its folder, unless
    `again` names its student.
    """
    waiting = {}
    for student, path in found.items():
        if student not in again and (done := _stored(order, student, path, output)):
            advance(student)
            yield done
        else:
            waiting[student] = path

    def written(student: str, result: dict[str, Any] | Exception) -> dict[str, Any]:
        """Write a grade, or why there is none. What cannot be written in a format of a platform is a
        failure of the grader.
        """
        path = found[student]
        if isinstance(result, Exception):
            result = _as_json(
                order, _settings(order, student, path)[0], student, path, "", _failed(order, result)
            )
        formats.write(result, output / student, list(order.formats))
        return result

    alone = ((student, grade_one(order, student, path)) for student, path in waiting.items())
    for student, result in alone if jobs == 1 else _in_processes(order, waiting, jobs):
        try:
            grade = written(student, result)
        except OSError:  # the folder cannot be written
            raise
        except Exception as error:
            grade = written(student, error)
        advance(student)
        yield grade


def _in_processes(
    order: Order, waiting: dict[str, submissions.Handed], jobs: int
) -> Iterator[tuple[str, dict[str, Any] | Exception]]:
    """The grade of each student, or what ended its process. A process that dies breaks its pool: the
    others go on, each alone.
    """
    pool = ProcessPoolExecutor(
        jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_leave_interrupts
    )
    lost = []
    try:
        futures = {pool.submit(grade_one, order, student, path): student for student, path in waiting.items()}
        for future in as_completed(futures):
            student, error = futures[future], future.exception()
            if isinstance(error, BrokenProcessPool) and len(waiting) > 1:
                lost.append(student)
            else:
                yield student, error if isinstance(error, Exception) else future.result()
    except BaseException:
        # Interrupted: running submissions are ended, waiting ones are not started. The next run goes on from
        # here.
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    for student in lost:
        yield from _in_processes(order, {student: waiting[student]}, 1)


def _leave_interrupts() -> None:
    """Set up a process of the pool: Ctrl-C is left to the parent, which ends the process; temporary
    folders are deleted then.
    """
    sandbox.end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))


def _stored(order: Order, student: str, path: submissions.Handed, output: Path) -> dict[str, Any] | None:
    """The grade in a student's folder, if it has all files
    and was made from the same file with the same settings.
    """
    try:
        grade = formats.read(output / student / formats.GRADE)
        digest = hashlib.sha256(submissions.read(path, order.loaded)).hexdigest()
    except Exception:  # no grade, or a damaged one: the submission is graded
        return None
    wanted = _settings(order, student, path)[0] | {"source_sha256": digest}
    same = all(grade[key] == value for key, value in wanted.items())
    has_files = all((output / student / formats.FORMATS[name][0]).exists() for name in order.formats)
    return grade if same and has_files and not grade["error"] and not formats.blocked(grade) else None


def summary(grades: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The result of the class: the distribution of points,
    how many pass each step, the most frequent misconceptions.
    """
    steps = grouped((line["name"], line["verdict"]) for grade in grades for line in grade["lines"])
    ids = Counter(grade["personal_id"] for grade in grades)
    mistakes = Counter(
        mistake for grade in grades for line in grade["lines"] for mistake in line["misconceptions"]
    )
    return {
        "submissions": len(grades),
        "errors": sum(bool(grade["error"]) for grade in grades),
        "unjudged": sorted(grade["student"] for grade in grades if grade["error"]),
        "blocked": sorted(grade["student"] for grade in grades if formats.blocked(grade)),
        "one_id": sorted(grade["student"] for grade in grades if ids[grade["personal_id"]] > 1),
        "alike": alike(grade["student"] for grade in grades),
        "notes": {grade["student"]: grade["notes"] for grade in grades if grade["notes"]},
        "distribution": dict(sorted(Counter(grade["score"] for grade in grades).items())),
        "steps": {name: dict(Counter(verdicts)) for name, verdicts in steps.items()},
        "walls_missing": sorted(
            {name for grade in grades for name, stands in grade["walls"].items() if not stands}
        ),
        "misconceptions": dict(mistakes.most_common(10)),
        "grading_seconds": round(sum(grade["seconds"] for grade in grades), 1),
    }


def alike(students: Iterable[str]) -> list[str]:
    """The names that differ from another one only in capitals, spaces or the ways to write an accent."""
    names = sorted(students)
    counts = Counter(map(_alike, names))
    return [name for name in names if counts[_alike(name)] > 1]


def _alike(student: str) -> str:
    """What is left of a name without capitals, spaces and
    the ways to write an accent: one folder to some systems.
    """
    return "".join(unicodedata.normalize("NFKC", student).casefold().split())


def require_own(folder: Path, assignment: str) -> None:
    """Refuse a folder that has grades of another assignment: a student's new grade would take the place of
    the old one. A damaged grade is none. Raises UsageError.
    """
    others = set()
    for path in folder.glob(f"*/{formats.GRADE}"):
        with contextlib.suppress(ValueError, ValidationError):
            others.add(formats.read(path)["assignment"])
    told = f"which has grades of {' and '.join(sorted(others))}; wanted a folder of its own for {assignment}"
    require(others <= {assignment}, f"--output: got {folder}, {told}")


def written(folder: Path) -> list[dict[str, Any]]:
    """The grades that are written in a folder of grades. Raises UsageError for a damaged one, if there is
    none, and if they are of more than one assignment.
    """
    grades = []
    for path in sorted(folder.glob(f"*/{formats.GRADE}")):
        with usage(f"grades: {path} is no grade of this version", ValueError, ValidationError):
            grades.append(formats.read(path))
    wanted = "wanted a folder that `evictionary grade` wrote, with a folder for each student"
    require(grades, f"grades: got {folder}, {wanted}")
    names = sorted({grade["assignment"] for grade in grades})
    told = f"grades: got {folder} with grades of {' and '.join(names)}, wanted one assignment in a folder"
    require(len(names) == 1, told)
    return grades
