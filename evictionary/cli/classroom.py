"""The commands of a student: an assignment begun, checked, and packed to be handed in."""

import itertools
import os
import secrets
from collections.abc import Iterator
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
    plain_table,
    show,
    whole_number,
)
from evictionary.cli.teaching import FOLDER, Assignments, as_id
from evictionary.errors import require, require_known, usage
from evictionary.progress import doing

if TYPE_CHECKING:
    from evictionary.classroom.assignment import Assignment
    from evictionary.classroom.judgement import Judgement

Name = Annotated[str, typer.Argument(help=f"The assignment: {', '.join(names()) or 'none is installed'}.")]
Work = Annotated[Path, typer.Option(help="The folder of your own files.")]
Student = Annotated[
    str | None,
    typer.Option(
        help="Your id, if your course draws the constants from it; `start` writes it down for the other "
        "commands."
    ),
]
WHO = "student.txt"  # in the folder of the student's files
COLOURS = {"passed": "green", "failed": "red", "not judged yet": "yellow", "blocked": "yellow"}

UNUSABLE = "wanted a file that the grader accepts"


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
    return student if student is None else as_id(student)


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
