"""The points of a course: several gradebooks, joined into one line for each student.

A course is a TOML file. Each table of it is a part with a weight, and names the gradebooks that count in it.
Work that is missing is missing: it is 0 only if somebody says so. Nothing here runs code.
"""

import csv
import io
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from evictionary.classroom import gradebook, submissions
from evictionary.errors import did_you_mean, require, require_known, usage

MISSING = "missing"
KEYS = ("of", "weight", "best")
OWN = ("id", "days_late", "total")  # columns of the table that are no gradebook
WHOLE = 100  # percent, which the weights come to
KINDS = "a folder in which `evictionary gradebook` ran, or a table with the columns id, points and of"


class Gradebook(NamedTuple):
    """The points of one assignment, or of an exam: None for who is in it and handed in nothing."""

    name: str
    of: float
    points: Mapping[str, float | None]
    days_late: Mapping[str, int]


class Part(NamedTuple):
    """What a course counts together: the `best` of some gradebooks, for `weight` percent of the total."""

    name: str
    weight: float
    best: int
    gradebooks: tuple[Gradebook, ...]


class Line(NamedTuple):
    """A student's points by gradebook, the late days of all, and the total in percent. What is missing is
    None, and so is a total for which work is missing.
    """

    id: str
    points: dict[str, float | None]
    days_late: int
    total: float | None


def read(path: Path) -> tuple[Part, ...]:
    """The parts of a course. The paths of its gradebooks begin at the folder of the file.

    Raises UsageError for what is no such file, a gradebook that is not there, is there twice or cannot be
    read, and weights that do not come to 100.
    """
    with usage(f"course: got {path}, wanted a TOML file of a course", OSError, ValueError):
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    require(found, f"course: got {path} without a part, wanted a table for each, such as [assignments]")
    parts = tuple(_part(path, name, given, len(found)) for name, given in found.items())
    names = [each.name for part in parts for each in part.gradebooks]
    twice = sorted({name for name in names if [*names, *OWN].count(name) > 1})
    told = "wanted each gradebook once, under a name that no other column has"
    require(not twice, f"course: got {', '.join(twice)} twice in {path}, {told}")
    has_weight = {"weight" in given for given in found.values()}
    told = f"course: got a weight for only some parts of {path}, wanted one for each or for none"
    require(len(has_weight) == 1, told)
    weights = ", ".join(f"{part.name} {part.weight:g}" for part in parts)
    whole = sum(part.weight for part in parts)
    told = f"course: got weights that sum to {whole:g} in {path} ({weights}), wanted {WHOLE}"
    require(math.isclose(whole, WHOLE), told)
    return parts


def _part(path: Path, name: str, given: Any, parts: int) -> Part:
    """One table of a course. Without a weight it counts as much as each other part."""
    where = f"course: got [{name}] of {path}"
    require(isinstance(given, dict), f"{where} with {given!r}, wanted a table such as [{name}]")
    for key in given:
        require_known(f"course, [{name}] of {path}", key, KEYS)
    of, weight = given.get("of"), given.get("weight", WHOLE / parts)
    is_list = isinstance(of, list) and of and all(isinstance(each, str) for each in of)
    require(is_list, f"{where} with of = {of!r}, wanted a list of gradebooks, each {KINDS}")
    best = given.get("best", len(of))
    is_weight = type(weight) in (int, float) and 0 < weight <= WHOLE
    require(is_weight, f"{where} with weight = {weight!r}, wanted a number above 0 and at most {WHOLE}")
    is_best = type(best) is int and 1 <= best <= len(of)
    require(is_best, f"{where} with best = {best!r}, wanted a whole number from 1 to its gradebooks")
    books = tuple(_gradebook(path.parent / each, f"{where} with {each!r}") for each in of)
    return Part(name, weight, best, books)


def _gradebook(path: Path, where: str) -> Gradebook:
    if path.name == submissions.GRADEBOOK:
        path = path.parent
    near = did_you_mean(path.name, [each.name for each in path.parent.glob("*")])
    require(path.exists(), f"{where}{near}, which is not there; wanted {KINDS}")
    return _of_a_folder(path, where) if path.is_dir() else _of_a_table(path)


def _of_a_folder(folder: Path, where: str) -> Gradebook:
    """The gradebook that `evictionary gradebook` has written beside the grades."""
    told = f"{where}, wanted {KINDS}. Run `evictionary gradebook {folder}`"
    with usage(told, OSError, ValueError, KeyError, TypeError):
        found = json.loads((folder / submissions.SUMMARY).read_text(encoding="utf-8"))
        rows = found["gradebook"]
        return Gradebook(
            found["assignment"],
            max(row["of"] for row in rows),
            {row["id"]: None if row["missing"] else row["points"] for row in rows},
            {row["id"]: row["days_late"] for row in rows},
        )


def _of_a_table(path: Path) -> Gradebook:
    """A table of the course's own, with the columns id, points, of and perhaps days_late. An empty cell of
    points means that the work is missing.
    """

    def row(line: Mapping[str, str]) -> tuple[float | None, float, int]:
        points = float(line["points"]) if line["points"].strip() else None
        of, days = float(line["of"]), int(line.get("days_late") or 0)
        if not (0 < of < math.inf and days >= 0 and 0 <= (points or 0) <= of):
            raise ValueError("points of 0 to `of`, and days of 0 or more")
        return points, of, days

    wanted = "an id, points or nothing, and the possible points"
    rows = gradebook.by_id(path, "course", ("id", "points", "of"), row, wanted)
    require(rows, f"course: got {path} without a line, wanted {wanted}")
    possible = {of for _, of, _ in rows.values()}
    told = f"course: got {path} with {len(possible)} numbers in the column `of`, wanted one for all"
    require(len(possible) == 1, told)
    return Gradebook(
        path.stem,
        possible.pop(),
        {student: points for student, (points, _, _) in rows.items()},
        {student: days for student, (_, _, days) in rows.items()},
    )


def gradebooks(parts: Sequence[Part]) -> list[Gradebook]:
    """The gradebooks of all parts, in their order."""
    return [each for part in parts for each in part.gradebooks]


def lines(parts: Sequence[Part], roster: Sequence[str] = (), missing_is_zero: bool = False) -> list[Line]:
    """The line of each student, in order of the ids: of all who are in a gradebook or on the roster."""
    books = gradebooks(parts)
    return [
        Line(
            student,
            {book.name: book.points.get(student) for book in books},
            sum(book.days_late.get(student, 0) for book in books),
            _total(student, parts, missing_is_zero),
        )
        for student in sorted({*roster}.union(*(book.points for book in books)))
    ]


def _total(student: str, parts: Sequence[Part], missing_is_zero: bool) -> float | None:
    total = 0.0
    for part in parts:
        given = [(book.points.get(student), book.of) for book in part.gradebooks]
        shares = sorted((points / of for points, of in given if points is not None), reverse=True)
        if len(shares) < part.best and not missing_is_zero:
            return None
        total += part.weight * sum(shares[: part.best]) / part.best
    return round(total, 2)


def in_one_only(parts: Sequence[Part]) -> dict[str, str]:
    """The students who are in only one of several gradebooks, and in which: an id may have an error."""
    found: dict[str, list[str]] = {}
    for book in gradebooks(parts):
        for student in book.points:
            found.setdefault(student, []).append(book.name)
    several = len(gradebooks(parts)) > 1
    return {student: names[0] for student, names in sorted(found.items()) if several and len(names) == 1}


def table(found: Sequence[Line]) -> str:
    """The course as CSV: the columns id, one for each gradebook, days_late and total."""
    names = [*found[0].points] if found else []
    content = io.StringIO()
    writer = csv.writer(content, lineterminator="\n")
    writer.writerow([OWN[0], *names, *OWN[1:]])
    for line in found:
        points = [_cell(each) for each in (*line.points.values(), line.days_late, line.total)]
        writer.writerow([gradebook.no_formula(line.id), *points])
    return content.getvalue()


def _cell(number: float | None) -> str:
    return MISSING if number is None else f"{number:.10g}"
