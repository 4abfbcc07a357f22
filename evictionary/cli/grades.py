"""The commands of a class: its grades, and the gradebook that sums them up."""

import itertools
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.text import Text

from evictionary.cli.console import (
    AsJson,
    app,
    examples,
    exit_codes,
    messages,
    missing_walls,
    names_in,
    plain_table,
    show,
    whole_number,
)
from evictionary.cli.teaching import FOLDER, Assignments, as_id, few, secret_of
from evictionary.errors import require, require_known, usage
from evictionary.progress import doing

if TYPE_CHECKING:
    from evictionary.classroom.classes import Order
    from evictionary.classroom.gradebook import Rules
    from evictionary.classroom.judgement import Judgement
    from evictionary.classroom.submissions import Handed

MOST_SHOWN = 10
FORGED = (
    "got it where a student's code could write its own grade, for this machine has neither Landlock nor the "
    "filter of system calls. Nothing was run. Grade on Linux, or in a container on it (the page of that name "
    "in the documentation)"
)


@app.command(
    epilog=examples(
        "evictionary grade handed_in --assignment keydiff --seed-file keydiff.secret --output grades/keydiff",
    )
)
def grade(
    assignment: Annotated[str, typer.Option(help="The assignment that the submissions answer.")],
    submission: Annotated[
        list[Path] | None,
        typer.Argument(help="Files, archives or folders, or one folder that holds many of them."),
    ] = None,
    seed_file: Annotated[
        Path | None, typer.Option(help="A file of secret bytes; without it, new seeds are drawn.")
    ] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            "--formats",
            help="Some of gradescope, classroom50, junit, markdown, comma-separated or repeated; all by "
            "default.",
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option(help="The folder for the grades; each student gets a folder in it.")
    ] = Path("grades"),
    jobs: Annotated[int, typer.Option(help="How many submissions are graded at the same time.")] = 1,
    examples: Annotated[
        int | None, typer.Option(help="How many inputs each law draws; 25 by default.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="The time limit of a student's code in each step, in seconds.")
    ] = None,
    personal: Annotated[
        bool,
        typer.Option(help="Draw sink size, lag size and epsilon from the id in each archive, or its name."),
    ] = False,
    roster: Annotated[
        Path | None,
        typer.Option(
            help="The ids of the course for --personal: a file with one in the first column of each line."
        ),
    ] = None,
    student: Annotated[
        str | None, typer.Option(help="The student's id for a single submission; its file name by default.")
    ] = None,
    law: Annotated[
        str | None, typer.Option(help="Judge a single submission by this law only, and write no grade.")
    ] = None,
    try_it: Annotated[
        bool,
        typer.Option(
            "--try",
            help="Try an assignment: a right answer, by default the reference, has all points, the starter "
            "none.",
        ),
    ] = False,
    zero: Annotated[
        str | None,
        typer.Option(
            help="Write 0 points for the --student, with this reason; no submission is read or run."
        ),
    ] = None,
    again: Annotated[
        list[str] | None,
        typer.Option(
            help="Grade the submissions of these ids anew, even if nothing changed; comma-separated or "
            "repeated."
        ),
    ] = None,
    assignments: Assignments = None,
    without_walls: Annotated[
        bool,
        typer.Option(
            "--without-walls",
            help="Grade even where walls around a student's code are missing, but for those that keep it "
            "from changing a grade.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Grade submissions with secret seeds: write grade.json
    for each, and the files that course platforms read.

    A run that was stopped continues from there if you repeat the command with the same seed file.
    """
    goes_on = "the finished grades are written, and the same command goes on from there"
    with exit_codes(goes_on if seed_file else "without a --seed-file the next run begins anew"):
        from evictionary.classroom import (
            child,
            classes,
            formats as written,
            gradebook as gradebooks,
            submissions,
        )
        from evictionary.classroom.assignment import load
        from evictionary.classroom.grading import GRADE_EXAMPLES

        chosen = load(assignment, assignments)
        wanted = names_in(formats) or list(written.FORMATS)
        for name in wanted:
            require_known("--format", name, written.FORMATS)
        for argument, count in (("--jobs", jobs), ("--examples", examples)):
            require(count is None or count >= 1, f"{argument}: got {count}, wanted at least 1")
        require(seconds is None or 0 < seconds < math.inf, f"--seconds: got {seconds}, wanted more than 0")
        require(roster is None or personal, "--roster: got it alone, wanted it with --personal")
        require(submission or try_it or zero, f"submission: got none, wanted {submissions.KINDS}")
        alone = zero is None or (student is not None and not (submission or try_it or law))
        require(alone, "--zero: wanted it with a --student, and with no submission, --try or --law")
        ids = frozenset(gradebooks.read_roster(roster) if roster else ())
        left_out: list[Path] = []
        found: dict[str, Handed] = {}
        if student is not None:
            found = {as_id(student): zero or _of_one(submission or [])}
        elif submission:
            found, left_out = classes.find(submission, chosen.file, output)
        anew = names_in(again) or []
        for each in anew:
            require_known("--again", each, found)
        if left_out:
            told = (
                f"Left out, because a submission is {submissions.KINDS}: "
                f"{few([path.name for path in left_out])}"
            )
            messages.print(told, style="yellow", markup=False)
        missing = [] if zero else missing_walls(without_walls)
        needs = tuple(name for name in child.KEEP_FILES if name not in missing)
        # Code that could change a grade of its own runs only where no grade is written.
        require(needs or try_it or law, f"--without-walls: {FORGED}")
        secret = os.urandom(32) if try_it or zero else secret_of(seed_file)
        order = classes.Order(
            assignment,
            secret,
            examples or GRADE_EXAMPLES,
            tuple(wanted),
            personal,
            seconds,
            ids,
            assignments,
            needs,
        )
        require(len(found) <= 1 or not (try_it or law), f"submission: got {len(found)}, wanted a single one")
        if try_it:
            with doing("judging a right answer, then the starter file"):
                tried = list(classes.tried(order, *found.values()))
        elif law:
            with doing("judging by the law"):
                line = classes.by_one_law(order, *found.popitem(), law)
        else:
            result = _graded(order, found, output, jobs, missing, left_out, anew)
    if try_it:
        found_out = [{"file": name, "wanted": wanted, **judged.as_json()} for name, wanted, judged in tried]
        show(as_json, found_out, itertools.chain(*(_tried(*each) for each in tried)))
        raise typer.Exit(0 if all(judged.score == wanted for _, wanted, judged in tried) else 1)
    if law:
        show(as_json, asdict(line), [Text(line.message or f"{line.verdict}: {line.reason or line.title}")])
        raise typer.Exit({"passed": 0, "blocked": 2}.get(line.verdict, 1))
    show(as_json, result, _class(result, output))


def _graded(
    order: "Order",
    found: "dict[str, Handed]",
    output: Path,
    jobs: int,
    missing: list[str],
    left_out: list[Path],
    again: list[str],
) -> dict[str, Any]:
    """Grade the class and write what it comes to; returns the summary."""
    from evictionary.classroom import classes

    with usage(f"--output: got {output}, wanted {FOLDER}", OSError):
        output.mkdir(parents=True, exist_ok=True)
    classes.require_own(output, order.assignment)
    started = time.monotonic()
    with doing("grading") as now:
        now("grading", 0, len(found))
        done = itertools.count(1)
        told = lambda student: now(f"graded {student}", next(done), len(found))  # noqa: E731
        grades = list(classes.run(order, found, output, jobs, told, again))
    return _sum_up(grades, output, missing, [str(path) for path in left_out], time.monotonic() - started)


@app.command(
    epilog=examples(
        "evictionary gradebook grades/keydiff --roster roster.csv",
    )
)
def gradebook(
    grades: Annotated[
        Path,
        typer.Argument(help="The folder that `evictionary grade` wrote, with a folder for each student."),
    ],
    roster: Annotated[
        Path | None,
        typer.Option(
            help="The ids of the course, one in the first column of each line: who has no grade has 0."
        ),
    ] = None,
    days_late: Annotated[
        Path | None, typer.Option(help="How late each was: a table with the columns id and days.")
    ] = None,
    free_days: Annotated[int, whole_number("How many late days cost nothing.")] = 0,
    percent_a_day: Annotated[
        float, typer.Option(help="How many percent of the points each further late day costs.")
    ] = 10,
    overrides: Annotated[
        Path | None,
        typer.Option(
            help="Points that a second grader has set: a table with the columns id, points, reason and by."
        ),
    ] = None,
    canvas: Annotated[
        Path | None,
        typer.Option(help="An export of Canvas's gradebook; canvas.csv, which it imports, is written too."),
    ] = None,
    column: Annotated[
        str | None,
        typer.Option(help="The name of Canvas's column, with its number; the assignment's title by default."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Sum up a folder of grades: write gradebook.csv, the table that course platforms import, summary.json,
    and a page for your assistants. Runs no code.
    """
    with exit_codes(), doing("reading the grades"):
        from evictionary.classroom import classes, formats, gradebook as gradebooks, submissions

        require(free_days >= 0, f"--free-days: got {free_days}, wanted 0 or more")
        require(0 <= percent_a_day <= 100, f"--percent-a-day: got {percent_a_day:g}, wanted 0 to 100")
        found = classes.written(grades)
        rules = gradebooks.Rules(
            gradebooks.read_roster(roster) if roster else (),
            gradebooks.read_days_late(days_late) if days_late else {},
            free_days,
            percent_a_day,
            gradebooks.read_overrides(overrides) if overrides else {},
        )
        rows = gradebooks.rows(found, rules)
        result = _sum_up(found, grades, [], [], 0, rules)
        with usage(f"grades: got {grades}, wanted {FOLDER}", OSError):
            formats.put(grades / submissions.ASSISTANTS, gradebooks.for_assistants(found, rows))
            result["told_anew"] = gradebooks.tell_students(found, rows, grades)
        if canvas:
            with usage(f"--canvas: got {canvas}, wanted Canvas's export", OSError, ValueError):
                export = canvas.read_text(encoding="utf-8-sig")
            table, lacking = gradebooks.canvas(rows, export, column or found[0]["title"])
            result["not_in_canvas"] = lacking
            with usage(f"grades: got {grades}, wanted {FOLDER}", OSError):
                formats.put(grades / submissions.CANVAS, table)
    told = f"grade.md was written anew for {len(result['told_anew'])} of {len(found)} students."
    show(as_json, result, itertools.chain(_class(result, grades), [told]))


def _sum_up(
    grades: list[dict[str, Any]],
    output: Path,
    missing: list[str],
    left_out: list[str],
    seconds: float,
    rules: "Rules | None" = None,
) -> dict[str, Any]:
    """Write what the grades of a class come to; returns the summary."""
    from evictionary.classroom import classes, formats, gradebook, submissions

    result = classes.summary(grades)
    walls = sorted({*result["walls_missing"], *missing})
    result |= {"left_out": left_out, "walls_missing": walls, "seconds": round(seconds, 1)}
    rows = gradebook.rows(grades, rules)
    result["assignment"] = grades[0]["assignment"]
    result["gradebook"] = [row.as_json() for row in rows]
    result["nothing_handed_in"] = [row.id for row in rows if row.comment.endswith(gradebook.NOTHING)]
    roster = set(rules.roster if rules else ())
    result["not_on_roster"] = [row.id for row in rows if roster and row.id not in roster]
    with usage(f"--output: got {output}, wanted {FOLDER}", OSError):
        formats.put(output / submissions.SUMMARY, json.dumps(result, indent=1) + "\n")
        formats.put(output / submissions.GRADEBOOK, gradebook.table(rows))
    return result


def _tried(name: str, wanted: int, judged: "Judgement") -> Iterator[Text]:
    """Whether a file has the points that an assignment
    should give it, and if not, what became of each step.
    """
    is_right = judged.score == wanted
    yield Text(f"{name}: {judged.score} points, wanted {wanted}", "green" if is_right else "red")
    for line in judged.lines if not is_right else []:
        yield Text(f"  {line.name}: {line.verdict}, {line.points} of {line.max_points} {line.reason}")


def _of_one(paths: list[Path]) -> Path:
    """The single submission of a student who is named; whatever it holds, there will be a result for it."""
    require(
        len(paths) == 1, f"--student: got one id for {len(paths)} submissions, wanted a single submission"
    )
    require(paths[0].exists(), f"submission: got {paths[0]}, wanted a file or folder that exists")
    return paths[0].resolve() if paths[0].is_dir() else paths[0]


def _class(result: dict[str, Any], output: Path) -> Iterator[Any]:
    """The summary of a class for people: the distribution of the points, the steps, and what the
    instructor should know.
    """
    count, largest = result["submissions"], max(result["distribution"].values())
    title = f"{count} submission" + "s" * (count != 1)
    table = plain_table("points", "submissions", "", right=("points", "submissions"), title=title)
    for points, count in result["distribution"].items():
        table.add_row(str(points), str(count), "█" * max(1, round(40 * count / largest)))
    yield table
    for name, counts in result["steps"].items():
        yield f"{name}: " + ", ".join(f"{count} {word}" for word, count in counts.items())
    yield from (
        Text(f"{count} of the submissions: {each}", "dim") for each, count in result["misconceptions"].items()
    )
    notes = [f"{student}: {'; '.join(each)}" for student, each in result["notes"].items()]
    more, missing = len(notes) - MOST_SHOWN, ", ".join(result["walls_missing"])
    to_know = {
        f"{result['errors']} could not be judged; the error in grade.json says why: {{}}": few(
            result["unjudged"]
        ),
        "Blocked, and to be graded on another machine: {}; the verdict in grade.json says why": few(
            result["blocked"]
        ),
        "Handed in under an id that another one has too: {}": few(result["one_id"]),
        "Names that differ only in capitals, spaces or accents: {}": few(
            [repr(name) for name in result["alike"]]
        ),
        "Handed in nothing: {}": few(result["nothing_handed_in"]),
        "Not on the roster: {}": few(result["not_on_roster"]),
        "Not in the export of Canvas: {}": few(result.get("not_in_canvas", [])),
        "{}": "\n".join(notes[:MOST_SHOWN]),
        "Notes on {} more are in summary.json.": str(more) if more > 0 else "",
        "Walls missing here: {}. The page on isolation says what is open then.": missing,
    }
    for text, named in to_know.items():
        yield named and Text(text.format(named), "yellow")
    yield f"{result['seconds']:.0f} s. The grades: [bold]{escape(str(output))}[/]"
