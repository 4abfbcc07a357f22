"""The commands of a course: its gradebooks joined, submissions that are alike, an exam."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.text import Text

from evictionary.cli.console import AsJson, app, examples, exit_codes, names_in, plain_table, show
from evictionary.cli.teaching import FOLDER, Assignments, few, secret_of
from evictionary.errors import require, require_known, usage
from evictionary.progress import doing


@app.command(epilog=examples("evictionary course course.toml --roster roster.csv"))
def course(
    course: Annotated[
        Path,
        typer.Argument(
            help="A TOML file with a table for each part of the course: its gradebooks (`of`), its weight in "
            "percent, and how many of them count (`best`)."
        ),
    ],
    roster: Annotated[
        Path | None, typer.Option(help="The ids of the course, one in the first column of each line.")
    ] = None,
    missing_is_zero: Annotated[
        bool,
        typer.Option(
            "--missing-is-zero", help="Count missing work as 0 points; else who lacks some has no total."
        ),
    ] = False,
    output: Annotated[Path, typer.Option(help="The table to write.")] = Path("course.csv"),
    as_json: AsJson = False,
) -> None:
    """Join the gradebooks of several assignments into one table: points, late days and the total of each
    student. Runs no code.
    """
    with exit_codes(), doing("reading the gradebooks"):
        from evictionary.classroom import classes, course as courses, formats, gradebook as gradebooks

        parts = courses.read(course)
        ids = gradebooks.read_roster(roster) if roster else ()
        lines = courses.lines(parts, ids, missing_is_zero)
        names = [line.id for line in lines]
        with usage(f"--output: got {output}, wanted a file in {FOLDER}", OSError):
            formats.put(output, courses.table(lines))
    result = {
        "parts": [
            {
                **part._asdict(),
                "gradebooks": [{"name": each.name, "of": each.of} for each in part.gradebooks],
            }
            for part in parts
        ],
        "students": [line._asdict() for line in lines],
        "without_a_total": [line.id for line in lines if line.total is None],
        "in_one_only": courses.in_one_only(parts),
        "alike": classes.alike(names),
        "not_on_roster": [each for each in names if ids and each not in ids],
    }
    show(as_json, result, _course(result, output))


def _course(result: dict[str, Any], output: Path) -> Iterator[Any]:
    """What a course comes to, for people: each gradebook, and what the instructor should know."""
    students = result["students"]
    right = ("of", "handed in", "missing", "mean")
    table = plain_table("part", "gradebook", *right, right=right, title=f"{len(students)} students")
    for part in result["parts"]:
        counted = f"{escape(part['name'])}: {part['weight']:g} %, the best {part['best']}"
        for book in part["gradebooks"]:
            there = [each["points"][book["name"]] for each in students]
            points = [each for each in there if each is not None]
            mean = f"{sum(points) / len(points):.1f}" if points else ""
            counts = (str(len(points)), str(len(there) - len(points)))
            table.add_row(counted, escape(book["name"]), f"{book['of']:g}", *counts, mean)
            counted = ""
    yield table
    lacking, single = result["without_a_total"], result["in_one_only"]
    to_know = {
        "No total, because work is missing: {}. --missing-is-zero counts it as 0.": few(lacking),
        "In one gradebook only: {}": few([f"{student} ({name})" for student, name in single.items()]),
        "Names that differ only in capitals, spaces or accents: {}": few(
            [repr(name) for name in result["alike"]]
        ),
        "Not on the roster: {}": few(result["not_on_roster"]),
    }
    for text, named in to_know.items():
        yield named and Text(text.format(named), "yellow")
    yield f"The table: [bold]{escape(str(output))}[/]"


@app.command(epilog=examples("evictionary similar handed_in/ --assignment keydiff"))
def similar(
    assignment: Annotated[str, typer.Option(help="The assignment that the submissions answer.")],
    submission: Annotated[
        list[Path],
        typer.Argument(help="Files, archives or folders, or one folder that holds many of them."),
    ],
    least: Annotated[
        float, typer.Option(help="Show pairs that share at least this part of the shorter file, 0 to 1.")
    ] = 0.8,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Show which submissions are much alike, without comments, texts and chosen names. Runs no code.

    The project's reference takes part, so a copy of it shows. What the starter file has does not count. A
    short function has few right forms, so read each pair yourself: a number proves nothing.
    """
    with exit_codes(), doing("comparing the submissions") as now:
        from evictionary.classroom import classes, similar as alike, submissions
        from evictionary.classroom.assignment import load

        require(0 < least <= 1, f"--least: got {least:g}, wanted more than 0 and at most 1")
        chosen = load(assignment, assignments)
        found, _ = classes.find(submission, chosen.file)
        sources: dict[str, bytes] = {}
        for done, (student, path) in enumerate(found.items()):
            now(f"reading {student}", done, len(found))
            with contextlib.suppress(submissions.BadSubmission):
                sources[student] = submissions.read(path, chosen)
        pairs = alike.pairs(sources | alike.model(chosen.stem), chosen.starter.read_bytes(), least)
        unread = sorted(found.keys() - sources.keys())
    table = plain_table("alike", "one", "other", right=("alike",), title=f"{len(sources)} submissions")
    for pair in pairs:
        table.add_row(f"{pair.share:.0%}", escape(pair.one), escape(pair.other))
    none = f"No two of {len(sources)} submissions share {least:.0%} of the shorter one."
    told = {"submissions": len(sources), "unread": unread, "pairs": [each._asdict() for each in pairs]}
    cannot = unread and Text(f"Cannot be read: {few(unread)}", "yellow")
    show(as_json, told, [table if pairs else none, cannot])


@app.command(epilog=examples("evictionary exam --seed-file first.secret --questions kv_cache,keydiff"))
def exam(
    seed_file: Annotated[Path, typer.Option(help="A file of secret bytes: the numbers are drawn from it.")],
    output: Annotated[Path, typer.Option(help="The folder for exam.md and answers.md.")] = Path("exam"),
    questions: Annotated[
        list[str] | None,
        typer.Option(help="The lessons to ask about, by name, comma-separated or repeated; all by default."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write an exam on the lessons, and its answers. The numbers are drawn from your secret, so students do
    not know them.
    """
    with exit_codes():
        from evictionary.classroom import exam as exams, formats

        wanted = tuple(names_in(questions) or exams.QUESTIONS)
        for name in wanted:
            require_known("--questions", name, exams.QUESTIONS)
        drawn = exams.drawn(secret_of(seed_file), wanted)
        with usage(f"--output: got {output}, wanted {FOLDER}", OSError):
            output.mkdir(parents=True, exist_ok=True)
            formats.put(output / "exam.md", exams.sheet(drawn))
            formats.put(output / "answers.md", exams.answers(drawn))
    told = {"questions": [each._asdict() for each in drawn], "points": exams.POINTS * len(drawn)}
    said = f"{len(drawn)} questions, {told['points']} points: [bold]{escape(str(output / 'exam.md'))}[/]"
    show(as_json, told, [said, f"The answers: {escape(str(output / 'answers.md'))}"])
