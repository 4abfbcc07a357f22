"""The commands that the help lists under Teach: an assignment, its grades, a course."""

import contextlib
import itertools
import json
import math
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.text import Text

from evictionary.classroom import names
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
from evictionary.errors import require, require_known, usage
from evictionary.progress import doing

if TYPE_CHECKING:
    from evictionary.classroom.assignment import Assignment
    from evictionary.classroom.classes import Order
    from evictionary.classroom.gradebook import Rules
    from evictionary.classroom.judgement import Judgement
    from evictionary.classroom.submissions import Handed


Name = Annotated[str, typer.Argument(help=f"The assignment: {', '.join(names()) or 'none is installed'}.")]
Assignments = Annotated[
    Path | None, typer.Option(help="A folder of your own assignments, in place of those that come with this.")
]
Work = Annotated[Path, typer.Option(help="The folder of your own files.")]
Student = Annotated[
    str | None,
    typer.Option(
        help="Your id, if your course draws the constants from it; `start` writes it down for the other "
        "commands."
    ),
]
WHO = "student.txt"  # in the folder of the student's files
MOST_SHOWN = 10
COLOURS = {"passed": "green", "failed": "red", "not judged yet": "yellow", "blocked": "yellow"}


FOLDER = "a folder that can be written"
UNUSABLE = "wanted a file that the grader accepts"
FORGED = (
    "got it where a student's code could write its own grade, for this machine has neither Landlock nor the "
    "filter of system calls. Nothing was run. Grade on Linux, or in a container on it (the page of that name "
    "in the documentation)"
)


@app.command(
    epilog=examples(
        "evictionary start keydiff",
    )
)
def start(
    assignment: Name,
    work: Work = Path("work"),
    student: Student = None,
    github_classroom: Annotated[
        bool,
        typer.Option(
            "--github-classroom",
            help="For an instructor: write the folder .github of a template repository too.",
        ),
    ] = False,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Begin an assignment: write its starter file, with the functions to fill in."""
    with exit_codes(), doing("loading the assignment"):
        from evictionary.classroom import formats
        from evictionary.classroom.assignment import load
        from evictionary.classroom.grading import lacking

        chosen = load(assignment, assignments)
        path = work / chosen.file
        require(
            not (github_classroom and student),
            "--student: a template is the same for a whole class; leave it out with --github-classroom",
        )
        template = _template(chosen, work, assignments) if github_classroom else {}
        student = _who(work, student)
        require(
            not path.exists(),
            f"assignment: {path} exists already and may hold your work; move it away to begin anew",
        )
        who = {work / WHO: student + "\n"} if student else {}
        texts = {path: chosen.starter_for(student), **who, **template}
        with usage(f"--work: got {work}, wanted {FOLDER}", OSError), formats.new_folders(texts):
            formats.put_all(texts)
    handout = chosen.folder / "README.md"
    told = {"assignment": chosen.name, "file": str(path), "handout": str(handout), "points": chosen.max_score}
    missing = lacking(chosen)
    wants_float64 = any(step.check != "rows" for step in chosen.steps)
    only = "Only NumPy is there." + (
        " Arrays come in float64, and results must be float64 too." if wants_float64 else ""
    )
    parts = [
        f"[bold]{chosen.title}[/]: {chosen.max_score} points in {len(chosen.steps)} steps. Write in "
        f"[bold]{escape(str(path))}[/].",
        f"The handout: {escape(str(handout))}",
        only if chosen.library == "numpy" else "",
        missing and Text(f"Here `check` cannot judge it: {missing}", "yellow"),
        template and f"For GitHub Classroom: {escape(', '.join(map(str, template)))}",
        f"Then: [bold]{escape(_command('check', chosen, work, assignments))}[/]",
    ]
    show(as_json, told, parts, indent=None, soft_wrap=True)


def _template(chosen: "Assignment", work: Path, assignments: Path | None) -> dict[Path, str]:
    """The files of GitHub Classroom, by their paths. Raises UsageError where its machines cannot judge."""
    from evictionary.classroom import github

    wanted = "wanted an assignment that comes with this and is for NumPy"
    require(chosen.library == "numpy" and not assignments, f"--github-classroom: got {chosen.name}, {wanted}")
    found = {work / path: text for path, text in github.files(chosen).items()}
    for path in found:
        require(not path.exists(), f"--github-classroom: {path} exists already; move it away")
        for folder in path.parents:
            is_free = folder.is_dir() or not os.path.lexists(folder)
            require(is_free, f"--github-classroom: {folder} is no folder; move it away")
    return found


@app.command(
    epilog=examples(
        "evictionary check keydiff",
    )
)
def check(
    assignment: Name,
    work: Work = Path("work"),
    student: Student = None,
    seed: Annotated[
        int | None, whole_number("Draw the inputs of an earlier run again; new ones by default.")
    ] = None,
    step: Annotated[
        str | None, typer.Option(help="Judge this step alone, with those that it needs; all by default.")
    ] = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Judge your file on drawn inputs: the points of each
    step and, for the first failure, what to do about it.

    The exit code is 0 with full marks, 1 below, and 2 if this machine cannot judge the assignment.
    """
    with exit_codes():
        with doing("loading the assignment"):
            from evictionary.classroom import grading, submissions

            chosen, path, student = _begun(assignment, assignments, work, student)
            if step:
                require(not chosen.contest, f"--step: got {step}, but the contest judges its steps together")
                require_known("--step", step, [each.name for each in chosen.steps])
                chosen = chosen.only(step)
            with usage(f"assignment: got {path}, {UNUSABLE}", submissions.BadSubmission):
                source = submissions.read(path, chosen)
        constants = chosen.constants_of(student) if student else {}
        # A quarter of the grader's time limit: a student does not wait for minutes on an endless loop.
        drawn = secrets.randbelow(10**6) if seed is None else seed
        with doing(f"judging {path}") as now:
            judged = grading.judge(
                source,
                chosen,
                constants=constants,
                origin=str(path),
                seconds=chosen.seconds / 4,
                check_seed=drawn,
                told=now,
            )
    hidden = grading.GRADE_EXAMPLES * sum(step.thoroughness * len(step.laws) for step in chosen.steps)
    is_blocked = any(line.verdict == "blocked" for line in judged.lines)
    again = _command("check", chosen, work, assignments)
    again += f"{f' --step {step}' if step else ''} --seed {drawn}"
    time = _time(chosen, path) if chosen.interpret and not is_blocked else ()
    parts = itertools.chain(_judged(chosen, judged, path, again), [_hidden(chosen, hidden)], time)
    show(as_json, judged.as_json() | {"hidden_cases": hidden, "check_seed": drawn}, parts)
    if judged.score < chosen.max_score:
        raise typer.Exit(2 if is_blocked else 1)


def _begun(
    assignment: str, assignments: Path | None, work: Path, student: str | None
) -> "tuple[Assignment, Path, str | None]":
    """An assignment, the student's file and id. Raises UsageError where `start` has not written the file."""
    from evictionary.classroom.assignment import load

    chosen = load(assignment, assignments)
    begin = _command("start", chosen, work, assignments)
    require(
        (work / chosen.file).is_file(),
        f"--work: got {work}, wanted a folder with {chosen.file}; `{begin}` writes it",
    )
    return chosen, work / chosen.file, _who(work, student)


def _who(work: Path, student: str | None) -> str | None:
    """The id of --student, or the one that `start` wrote
    down. Raises UsageError for one that no folder can have.
    """
    if student is None and (work / WHO).is_file():
        student = (work / WHO).read_text(encoding="utf-8", errors="replace").strip()
    return student if student is None else _as_id(student)


def _as_id(student: str) -> str:
    from evictionary.classroom import submissions

    told = f"--student: got {student!r}, wanted an id that can be the name of a folder of its own"
    require(submissions.is_id(student), told)
    return student


def _command(name: str, chosen: "Assignment", work: Path, assignments: Path | None) -> str:
    """The command to type next, with the folders of this command."""
    options = ("" if work == Path("work") else f" --work {work}") + (
        f" --assignments {assignments}" if assignments else ""
    )
    return f"evictionary {name} {chosen.name}{options}"


def _judged(chosen: "Assignment", judged: "Judgement", path: Path, again: str) -> Iterator[Any]:
    """The points of each step, and the first failure in
    full; its script is written beside the student's file.
    """
    table = plain_table("step", "requirement", "points", "verdict", right=("points",), title=chosen.title)
    for line in judged.lines:
        verdict = f"[{COLOURS[line.verdict]}]{line.verdict}[/]"
        shown = (
            f"{verdict}, {escape(line.reason)}"
            if line.verdict in ("not judged yet", "blocked") or chosen.contest
            else verdict
        )
        table.add_row(
            f"{line.name}: {line.title}", line.requirement, f"{line.points} of {line.max_points}", shown
        )
    yield table
    yield f"[bold]{judged.score} of {chosen.max_score} points[/] in {judged.seconds:.0f} s"
    if blocked := next((line.reason for line in judged.lines if line.verdict == "blocked"), ""):
        yield Text(f"Not judged: {blocked}", "yellow")
    first = next((line for line in judged.lines if line.verdict == "failed"), None)
    if first is None:
        return
    yield f"\n[bold]First failure: {first.name}[/]"
    yield Text(first.message or first.reason)
    yield first.read and Text(f"  to read         {first.read}")
    if first.repro:
        script = path.parent / f"see_{path.stem}.py"
        try:
            script.write_text(first.repro + "\n", encoding="utf-8")
            yield Text(f"  as a script     {script}")
        except OSError as error:
            yield Text(f"  as a script     not written: {error}")
    yield Text(f"  the same inputs {again}")


def _hidden(chosen: "Assignment", cases: int) -> str:
    """The hidden cases of the grader, in a sentence."""
    from evictionary.classroom.grading import GRADE_EXAMPLES

    if chosen.contest:
        return "\nThe grader asks about five longer texts; nobody knows their numbers and places beforehand."
    laws, each = (
        sum(len(step.laws) for step in chosen.steps),
        GRADE_EXAMPLES * max(step.thoroughness for step in chosen.steps),
    )
    told = f"\nThe grader checks the same {laws} laws on your file with up to {each} secret inputs each: "
    return f"{told}up to {cases} hidden cases, and no hidden rule." if laws else ""


def _time(chosen: "Assignment", path: Path) -> Iterator[str | Text]:
    """How long the kernel takes if there is a GPU, or how it fails there; neither is graded."""
    import torch

    if not torch.cuda.is_available():
        yield "No GPU here: the kernel ran in Triton's interpreter and was not timed."
        return
    from evictionary.classroom import child, grading
    from evictionary.spec_tests.judge.remote import Gone

    try:
        told = f"{grading.gpu_milliseconds(chosen, path):.4f} ms for 65,536 tokens of 8 heads."
    except (child.StudentError, Gone, RuntimeError, ValueError) as error:
        told = f"the kernel fails, although the interpreter runs it: {child.clean(error)}"
    yield Text(f"On {torch.cuda.get_device_name()}: {told}")


@app.command(
    epilog=examples(
        "evictionary submit keydiff",
    )
)
def submit(
    assignment: Name,
    work: Work = Path("work"),
    student: Student = None,
    output: Annotated[
        Path | None, typer.Option(help="The archive to write; the assignment's name with .zip by default.")
    ] = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Pack the archive to hand in: your file and a manifest, and nothing else."""
    with exit_codes():
        from evictionary.classroom import submissions

        chosen, path, student = _begun(assignment, assignments, work, student)
        target = output or Path(f"{chosen.name}.zip")
        require(target.suffix == ".zip", f"--output: got {target}, wanted a name that ends in .zip")
        with (
            usage(f"assignment: got {path}, {UNUSABLE}", submissions.BadSubmission),
            usage(f"--output: got {target}, wanted a file in {FOLDER}", OSError),
        ):
            packed = submissions.pack(chosen, work, target, student)
    is_begun = path.read_text(encoding="utf-8", errors="replace") != chosen.starter_for(student)
    if not is_begun:
        messages.print(
            f"{path} is still the starter file, as `start` wrote it.",
            style="yellow",
            markup=False,
            soft_wrap=True,
        )
    told = {"assignment": chosen.name, "archive": str(target), "files": packed, "begun": is_begun}
    said = f"[bold]{escape(str(target))}[/] holds {' and '.join(packed)}. Hand it in."
    show(as_json, told, [said], indent=None, soft_wrap=True)


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
            found = {_as_id(student): zero or _of_one(submission or [])}
        elif submission:
            found, left_out = classes.find(submission, chosen.file, output)
        anew = names_in(again) or []
        for each in anew:
            require_known("--again", each, found)
        if left_out:
            told = (
                f"Left out, because a submission is {submissions.KINDS}: "
                f"{_few([path.name for path in left_out])}"
            )
            messages.print(told, style="yellow", markup=False)
        missing = [] if zero else missing_walls(without_walls)
        needs = tuple(name for name in child.KEEP_FILES if name not in missing)
        # Code that could change a grade of its own runs only where no grade is written.
        require(needs or try_it or law, f"--without-walls: {FORGED}")
        secret = os.urandom(32) if try_it or zero else _secret(seed_file)
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
        "No total, because work is missing: {}. --missing-is-zero counts it as 0.": _few(lacking),
        "In one gradebook only: {}": _few([f"{student} ({name})" for student, name in single.items()]),
        "Names that differ only in capitals, spaces or accents: {}": _few(
            [repr(name) for name in result["alike"]]
        ),
        "Not on the roster: {}": _few(result["not_on_roster"]),
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
    cannot = unread and Text(f"Cannot be read: {_few(unread)}", "yellow")
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
        drawn = exams.drawn(_secret(seed_file), wanted)
        with usage(f"--output: got {output}, wanted {FOLDER}", OSError):
            output.mkdir(parents=True, exist_ok=True)
            formats.put(output / "exam.md", exams.sheet(drawn))
            formats.put(output / "answers.md", exams.answers(drawn))
    told = {"questions": [each._asdict() for each in drawn], "points": exams.POINTS * len(drawn)}
    said = f"{len(drawn)} questions, {told['points']} points: [bold]{escape(str(output / 'exam.md'))}[/]"
    show(as_json, told, [said, f"The answers: {escape(str(output / 'answers.md'))}"])


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


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _secret(seed_file: Path | None) -> bytes:
    if seed_file is None:
        messages.print(
            "No --seed-file: the seeds are new, and a second run will have others.", style="yellow"
        )
        return os.urandom(32)
    with usage(f"--seed-file: got {seed_file}, wanted a file that can be read", OSError):
        secret = seed_file.read_bytes()
    require(
        len(secret.strip()) >= 8,
        f"--seed-file: got {seed_file} with {len(secret)} bytes, wanted at least 8 secret bytes",
    )
    return secret


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
        f"{result['errors']} could not be judged; the error in grade.json says why: {{}}": _few(
            result["unjudged"]
        ),
        "Blocked, and to be graded on another machine: {}; the verdict in grade.json says why": _few(
            result["blocked"]
        ),
        "Handed in under an id that another one has too: {}": _few(result["one_id"]),
        "Names that differ only in capitals, spaces or accents: {}": _few(
            [repr(name) for name in result["alike"]]
        ),
        "Handed in nothing: {}": _few(result["nothing_handed_in"]),
        "Not on the roster: {}": _few(result["not_on_roster"]),
        "Not in the export of Canvas: {}": _few(result.get("not_in_canvas", [])),
        "{}": "\n".join(notes[:MOST_SHOWN]),
        "Notes on {} more are in summary.json.": str(more) if more > 0 else "",
        "Walls missing here: {}. The page on isolation says what is open then.": missing,
    }
    for text, named in to_know.items():
        yield named and Text(text.format(named), "yellow")
    yield f"{result['seconds']:.0f} s. The grades: [bold]{escape(str(output))}[/]"
