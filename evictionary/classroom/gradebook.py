"""The gradebook of an assignment: what the course makes of the grades, as the tables that platforms import.

A grade says what a file is worth. The course adds who handed in nothing, late days, and the points that a
second grader has set with a reason. Nothing here runs code, and no grade.json changes.
"""

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from evictionary import store
from evictionary.classroom import formats
from evictionary.errors import require, usage

T = TypeVar("T")
NOTHING = "nothing was handed in"
# The columns of Canvas that say who somebody is. Its import needs them as its export has them.
CANVAS_IDS = ("SIS Login ID", "SIS User ID", "ID")
CANVAS_WHO = ("Student", *CANVAS_IDS, "Section")
CANVAS_MOST = "Points Possible"


class Override(NamedTuple):
    """The points that somebody has set in place of the grader's, and why."""

    points: float
    reason: str
    by: str


@dataclass(frozen=True)
class Rules:
    """What a course does with the grades: the ids of the roster, the days that each was late, how many of
    them are free and how many percent of the points each further one costs, and overrides.
    """

    roster: tuple[str, ...] = ()
    days_late: Mapping[str, int] = field(default_factory=dict)
    free_days: int = 0
    percent_a_day: float = 10
    overrides: Mapping[str, Override] = field(default_factory=dict)


class Row(NamedTuple):
    """A line of the gradebook. `changed` says what the course made of the grader's points, the last first.
    `missing` is true where nothing was handed in and nobody has set the points.
    """

    id: str
    points: float
    of: int
    told: str
    changed: tuple[str, ...] = ()
    days_late: int = 0
    missing: bool = False

    @property
    def comment(self) -> str:
        return "; ".join((*self.changed, self.told))

    def as_json(self) -> dict[str, Any]:
        """The line for the summary, which `evictionary course` reads."""
        names = ("id", "points", "of", "days_late", "missing")
        return {name: getattr(self, name) for name in names}

    @property
    def counted(self) -> str:
        """The points that count, for the student, if they are not the grader's."""
        return f"{self.points:g} of {self.of} points: {'; '.join(self.changed)}" if self.changed else ""


def rows(grades: Sequence[Mapping[str, Any]], rules: Rules | None = None) -> list[Row]:
    """The line of each student, in order of the ids: of all who have a grade, and of all on the roster.

    Late days come before an override, which counts as it is. Raises UsageError where a rule names somebody
    without a line, and for more points than there are.
    """
    rules = rules or Rules()
    most = max((grade["max_score"] for grade in grades), default=0)
    found = {grade["student"]: Row(grade["student"], grade["score"], most, _told(grade)) for grade in grades}
    found |= {each: Row(each, 0, most, NOTHING, missing=True) for each in rules.roster if each not in found}
    for name, given in (("--days-late", rules.days_late), ("--overrides", rules.overrides)):
        strangers = sorted(given.keys() - found.keys())
        wanted = "wanted ids that have a grade or are on the roster"
        require(not strangers, f"{name}: got {', '.join(strangers)}, {wanted}")
    for student, days in rules.days_late.items():
        found[student] = _late(found[student], days, rules)
    for student, override in rules.overrides.items():
        wanted = f"wanted at most the {most} of the assignment"
        require(override.points <= most, f"--overrides: got {override.points:g} for {student}, {wanted}")
        found[student] = _overridden(found[student], override)
    return [found[student] for student in sorted(found)]


def _told(grade: Mapping[str, Any]) -> str:
    """What became of a submission, in one line: the steps that have no points, each with its reason."""
    lost = [
        f"{line['name']}: {formats.verdict(line)}" for line in grade["lines"] if line["verdict"] != "passed"
    ]
    return " ".join((grade["error"] or "; ".join(lost) or "full marks").split())


def _late(row: Row, days: int, rules: Rules) -> Row:
    costly = max(0, days - rules.free_days)
    lost = min(100.0, rules.percent_a_day * costly)
    late = f"{days} day{'s' * (days != 1)} late, {min(days, rules.free_days)} free"
    said = f"{late}: {lost:g} % of {row.points:g} lost"
    points = round(row.points * (1 - lost / 100), 1)
    return row._replace(points=points, changed=(said, *row.changed), days_late=days)


def _overridden(row: Row, override: Override) -> Row:
    said = f"set to {override.points:g} by {override.by}, instead of {row.points:g}: {override.reason}"
    return row._replace(points=override.points, changed=(said, *row.changed), missing=False)


def table(found: Sequence[Row]) -> str:
    """gradebook.csv, with the columns id, points, of and comment."""
    lines = [(no_formula(row.id), _number(row.points), row.of, no_formula(row.comment)) for row in found]
    return _written([("id", "points", "of", "comment"), *lines])


def canvas(found: Sequence[Row], export: str, column: str) -> tuple[str, list[str]]:
    """The table that Canvas imports, from an export of its gradebook, and the ids that the export lacks.

    It has the columns of the export that say who somebody is, and `column` with the points. A student is
    found by the login, the SIS id or the id of Canvas. Raises UsageError for a file that is no such export.
    """
    reader = csv.DictReader(io.StringIO(export))
    names = [name for name in reader.fieldnames or () if name in CANVAS_WHO]
    is_export = "Student" in names and any(name in names for name in CANVAS_IDS)
    wanted = f"wanted Canvas's export, with the columns Student and one of {', '.join(CANVAS_IDS)}"
    require(is_export, f"--canvas: got the columns {', '.join(reader.fieldnames or ()) or 'none'}, {wanted}")
    points = {row.id: row.points for row in found}
    known: set[str] = set()
    lines: list[tuple[Any, ...]] = [(*names, column)]
    for each in reader:
        who = tuple(each[name] or "" for name in names)
        ids = [own for name in CANVAS_IDS if (own := (each.get(name) or "").strip()) in points]
        if (each["Student"] or "").strip() == CANVAS_MOST:
            lines.append((*who, max((row.of for row in found), default=0)))
        elif ids:
            known.add(ids[0])
            lines.append((*who, _number(points[ids[0]])))
    return _written(lines), sorted(points.keys() - known)


def for_assistants(grades: Sequence[Mapping[str, Any]], found: Sequence[Row]) -> str:
    """A Markdown page for who answers the students' questions: for each row of the gradebook, the first step
    without its points, the mistake if the grader knows it, where to read, and the notes that no student sees.
    """
    head = ["student", "points", "first step lost", "the mistake", "to read", "note"]
    by_student = {grade["student"]: grade for grade in grades}
    lines = []
    for row in found:
        points = f"{_number(row.points)} of {row.of}"
        grade = by_student.get(row.id)
        if grade is None:
            lines.append([formats.cell(each) for each in (row.id, points, "", row.comment, "", "")])
            continue
        lost = next((line for line in grade["lines"] if line["verdict"] != "passed"), None)
        mistake = "; ".join(lost["misconceptions"]) or lost["reason"] if lost else ""
        step, read = (lost["name"], lost["read"]) if lost else ("", "")
        notes = "; ".join((*row.changed, *grade["notes"]))
        told = (row.id, points, step, grade["error"] or mistake, read, notes)
        lines.append([formats.cell(each) for each in told])
    return f"# {formats.cell(grades[0]['title'])}: for the assistants\n\n{store.table(head, lines)}\n"


def tell_students(grades: Sequence[Mapping[str, Any]], found: Sequence[Row], folder: Path) -> list[str]:
    """Write the points that count into the grade.md of each student who has one; returns whose grade.md says
    something else now.

    A page that says it already is left as it is, with its time. A link is left alone: a container may have
    put it there.
    """
    counted = {row.id: row.counted for row in found}
    told = []
    for grade in grades:
        student = grade["student"]
        path = folder / student / formats.FORMATS["markdown"][0]
        page = formats.markdown(formats.for_student(dict(grade)), counted[student])
        is_own = path.is_file() and not path.is_symlink()
        if is_own and path.read_text(encoding="utf-8", errors="replace") != page:
            formats.put(path, page)
            told.append(student)
    return told


def read_roster(path: Path, option: str = "--roster") -> tuple[str, ...]:
    """The ids of a course: the first column of a table, or one in each line, in their order.

    Raises UsageError without an id, and where two students have the same.
    """
    found: dict[str, list[str]] = {}
    for row in _read(path, option, "a text file with one id in each line"):
        each, *others = [cell.strip() for cell in row]
        if each:
            earlier = found.setdefault(each, others)
            told = f"as {', '.join(earlier)} and as {', '.join(others)}"
            same = f"{option}: got the id {each!r} twice in {path}, {told}; wanted an id for each student"
            require(earlier == others, same)
    require(found, f"{option}: got {path} without an id, wanted one in each line")
    return tuple(found)


def read_days_late(path: Path) -> dict[str, int]:
    """The days that students were late, from a table with the columns id and days."""

    def days(line: Mapping[str, str]) -> int:
        return _at_least_0(int(line["days"]))

    return by_id(path, "--days-late", ("id", "days"), days, "a whole number of days, 0 or more")


def read_overrides(path: Path) -> dict[str, Override]:
    """The points that a second grader has set, from a table with the columns id, points, reason and by."""

    def override(line: Mapping[str, str]) -> Override:
        reason, by = (" ".join(line[name].split()) for name in ("reason", "by"))
        if not (reason and by):
            raise ValueError
        return Override(_at_least_0(float(line["points"])), reason, by)

    wanted = "points of 0 or more, a reason, and who gives it"
    return by_id(path, "--overrides", ("id", "points", "reason", "by"), override, wanted)


def _at_least_0(number: T) -> T:
    if not number >= 0:  # type: ignore[operator]
        raise ValueError
    return number


def by_id(
    path: Path, option: str, columns: Sequence[str], of: Callable[[Mapping[str, str]], T], wanted: str
) -> dict[str, T]:
    """A table with these columns as a dictionary by id. Raises UsageError, which names the line."""
    head, *lines = [*_read(path, option, f"a table with the columns {', '.join(columns)}")] or [[]]
    names = [each.strip() for each in head]
    missing = [each for each in columns if each not in names]
    told = f"{option}: got {path} without {', '.join(missing)}, wanted the columns {', '.join(columns)}"
    require(not missing, told)
    found: dict[str, T] = {}
    for number, line in enumerate(lines, 2):
        where = f"{option}: got {','.join(line)!r} in line {number} of {path}"
        with usage(f"{where}, wanted {wanted}", ValueError):
            each = dict(zip(names, line, strict=True))
            value = of(each)
        student = each["id"].strip()
        require(student and student not in found, f"{where}, wanted each id once")
        found[student] = value
    return found


def _read(path: Path, option: str, wanted: str) -> Iterator[list[str]]:
    """The lines of a table that are not empty."""
    with usage(f"{option}: got {path}, wanted {wanted}", OSError, ValueError, csv.Error):
        lines = list(csv.reader(path.read_text(encoding="utf-8-sig").splitlines()))
    return (line for line in lines if any(each.strip() for each in line))


def _written(lines: Sequence[Sequence[Any]]) -> str:
    content = io.StringIO()
    csv.writer(content, lineterminator="\n").writerows(lines)
    return content.getvalue()


def _number(points: float) -> str:
    return f"{points:g}"


def no_formula(text: str) -> str:
    """A text that a spreadsheet shows, where it would compute it."""
    return f"'{text}" if text.lstrip()[:1] in tuple("=+-@|%") else text
