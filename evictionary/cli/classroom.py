"""The commands `evictionary start`, `check`, `submit` and `grade`."""

from __future__ import annotations

import json
import math
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from evictionary.cli.console import AsJson, exit_codes, messages, names_in, progress, whole_number
from evictionary.errors import UsageError

if TYPE_CHECKING:
    from evictionary.classroom.assignment import Assignment
    from evictionary.classroom.grading import Judgement

app = typer.Typer()

Name = Annotated[
    str, typer.Argument(help="The assignment: keydiff, lagkv, expected_attention, momentkv, gvote, kernel or contest.")
]
Work = Annotated[Path, typer.Option(help="The folder of your own files.")]
Student = Annotated[str | None, typer.Option(help="Your id, if your course draws the constants from it.")]
COLOURS = {"passed": "green", "failed": "red", "not judged yet": "yellow", "blocked": "yellow"}


@contextmanager
def _writing(argument: str, path: Path, wanted: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"{argument}: got {path}, wanted {wanted}: {error.strerror}") from None


@app.command(epilog="Example: [bold]evictionary start keydiff[/]")
def start(assignment: Name, work: Work = Path("work"), student: Student = None, as_json: AsJson = False) -> None:
    """Begin an assignment: write its starter file, with the functions to fill in."""
    with exit_codes():
        from evictionary.classroom import assignment as assignments

        chosen = assignments.load(assignment)
        path = work / chosen.file
        if path.exists():
            raise UsageError(f"assignment: {path} exists already and may hold your work; move it away to begin anew")
        with _writing("--work", work, "a folder that can be written"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(chosen.starter_for(student), encoding="utf-8")
    handout = chosen.folder / "README.md"
    if as_json:
        typer.echo(json.dumps({"assignment": chosen.name, "file": str(path), "handout": str(handout), "points": chosen.max_score}))
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"[bold]{chosen.title}[/]: {chosen.max_score} points in {len(chosen.steps)} steps. Write in [bold]{escape(str(path))}[/]."
    )
    console.print(f"The handout: {escape(str(handout))}")
    if chosen.library == "numpy":
        told = "Only NumPy is there."
        if any(step.check != "rows" for step in chosen.steps):
            told += " Arrays come in float64, and results must be float64 too."
        console.print(told)
    console.print(f"Then: [bold]{escape(_command('check', chosen, work, student))}[/]")


@app.command(epilog="Example: [bold]evictionary check keydiff[/]")
def check(
    assignment: Name,
    work: Work = Path("work"),
    student: Student = None,
    seed: Annotated[int | None, whole_number("Draw the inputs of an earlier run again; new ones by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """Judge your file on drawn inputs: the points of each step and, for the first failure, what to do about it.

    The exit code is 0 with full marks, 1 below, and 2 if this machine cannot judge the assignment.
    """
    with exit_codes():
        from evictionary.classroom import assignment as assignments
        from evictionary.classroom import grading, submissions

        chosen = assignments.load(assignment)
        path = _started(work, chosen)
        try:
            source = submissions.read(path, chosen)
        except submissions.BadSubmission as error:
            raise UsageError(f"assignment: got {path}, wanted a file that the grader accepts: {error}") from None
        constants = chosen.constants_of(student) if student else {}
        # A quarter of the grader's time limit: a student does not wait for minutes on an endless loop.
        drawn = secrets.randbelow(10**6) if seed is None else seed
        judged = grading.judge(source, chosen, constants=constants, origin=str(path), seconds=chosen.seconds / 4, check_seed=drawn)
    hidden = grading.GRADE_EXAMPLES * sum(step.thoroughness * len(step.laws) for step in chosen.steps)
    if as_json:
        typer.echo(json.dumps(judged.as_json() | {"hidden_cases": hidden, "check_seed": drawn}, indent=1))
    else:
        _print(chosen, judged, path, f"{_command('check', chosen, work, student)} --seed {drawn}")
        _print_rest(chosen, hidden, path)
    if judged.score < chosen.max_score:
        raise typer.Exit(2 if any(line.verdict == "blocked" for line in judged.lines) else 1)


def _started(work: Path, chosen: Assignment) -> Path:
    path = work / chosen.file
    if not path.is_file():
        raise UsageError(f"--work: got {work}, wanted a folder with {chosen.file}; `{_command('start', chosen, work)}` writes it")
    return path


def _command(name: str, chosen: Assignment, work: Path, student: str | None = None) -> str:
    """The command to type next, with the folder and the id of this command."""
    options = ("" if work == Path("work") else f" --work {work}") + (f" --student {student}" if student else "")
    return f"evictionary {name} {chosen.name}{options}"


def _print(chosen: Assignment, judged: Judgement, path: Path, again: str) -> None:
    console = Console(highlight=False)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=chosen.title, title_justify="left")
    for header in ("step", "requirement", "points", "verdict"):
        table.add_column(header, justify="right" if header == "points" else "left")
    for line in judged.lines:
        verdict = f"[{COLOURS[line.verdict]}]{line.verdict}[/]"
        shown = f"{verdict}, {escape(line.reason)}" if line.verdict in ("not judged yet", "blocked") or chosen.contest else verdict
        table.add_row(f"{line.name}: {line.title}", line.requirement, f"{line.points} of {line.max_points}", shown)
    console.print(table)
    console.print(f"[bold]{judged.score} of {chosen.max_score} points[/] in {judged.seconds:.0f} s")
    first = next((line for line in judged.lines if line.verdict == "failed"), None)
    if first is None:
        return
    console.print(f"\n[bold]First failure: {first.name}[/]")
    console.print(first.message or first.reason, markup=False, soft_wrap=True)
    if first.read:
        console.print(f"  to read         {first.read}", markup=False)
    if first.repro:
        script = path.parent / f"see_{path.stem}.py"
        try:
            script.write_text(first.repro + "\n", encoding="utf-8")
        except OSError as error:
            console.print(f"  as a script     not written: {error}", markup=False)
        else:
            console.print(f"  as a script     {script}", markup=False, soft_wrap=True)
    console.print(f"  the same inputs {again}", markup=False, soft_wrap=True)


def _print_rest(chosen: Assignment, hidden: int, path: Path) -> None:
    from evictionary.classroom.grading import GRADE_EXAMPLES

    console = Console(highlight=False)
    laws = sum(len(step.laws) for step in chosen.steps)
    if laws:
        each = GRADE_EXAMPLES * max(step.thoroughness for step in chosen.steps)
        console.print(
            f"\nThe grader checks the same {laws} laws on your file with up to {each} secret inputs each: "
            f"up to {hidden} hidden cases, and no hidden rule."
        )
    elif chosen.contest:
        console.print("\nThe grader asks about five longer texts; nobody knows their numbers and places beforehand.")
    if chosen.interpret:
        _print_time(chosen, path)


def _print_time(chosen: Assignment, path: Path) -> None:
    """Print how long the kernel takes if there is a GPU; the time is not graded."""
    import torch

    if not torch.cuda.is_available():
        Console().print("No GPU here: the kernel ran in Triton's interpreter and was not timed.")
        return
    from evictionary.classroom import grading

    Console().print(
        f"On {torch.cuda.get_device_name()}: {grading.gpu_milliseconds(chosen, path):.4f} ms for 65,536 tokens of 8 heads."
    )


@app.command(epilog="Example: [bold]evictionary submit keydiff[/]")
def submit(
    assignment: Name,
    work: Work = Path("work"),
    student: Student = None,
    output: Annotated[Path | None, typer.Option(help="The archive to write; the assignment's name with .zip by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """Pack the archive to hand in: your file and a manifest, and nothing else."""
    with exit_codes():
        from evictionary.classroom import assignment as assignments
        from evictionary.classroom import submissions

        chosen = assignments.load(assignment)
        target = output or Path(f"{chosen.name}.zip")
        path = _started(work, chosen)
        if student is not None and not submissions.is_id(student):
            raise UsageError(f"--student: got {student!r}, wanted an id that can be the name of a folder of its own")
        if target.suffix != ".zip":
            raise UsageError(f"--output: got {target}, wanted a name that ends in .zip")
        try:
            with _writing("--output", target, "a file in a folder that can be written"):
                packed = submissions.pack(chosen, work, target, student)
        except submissions.BadSubmission as error:
            raise UsageError(f"assignment: got {path}, wanted a file that the grader accepts: {error}") from None
    if as_json:
        typer.echo(json.dumps({"assignment": chosen.name, "archive": str(target), "files": packed}))
        return
    Console(highlight=False, soft_wrap=True).print(f"[bold]{escape(str(target))}[/] holds {' and '.join(packed)}. Hand it in.")


@app.command(epilog="Example: [bold]evictionary grade handed_in/ --assignment keydiff --seed-file secret --jobs 4[/]")
def grade(
    submission: Annotated[list[Path], typer.Argument(help="Files, archives or folders, or one folder that holds many of them.")],
    assignment: Annotated[str, typer.Option(help="The assignment that the submissions answer.")],
    seed_file: Annotated[Path | None, typer.Option(help="A file of secret bytes; without it, new seeds are drawn.")] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            "--formats",
            help="Some of gradescope, classroom50, junit, markdown, comma-separated or repeated; all by default.",
        ),
    ] = None,
    output: Annotated[Path, typer.Option(help="The folder for the grades; each student gets a folder in it.")] = Path("grades"),
    jobs: Annotated[int, typer.Option(help="How many submissions are graded at the same time.")] = 1,
    examples: Annotated[int | None, typer.Option(help="How many inputs each law draws; 25 by default.")] = None,
    seconds: Annotated[float | None, typer.Option(help="The time limit of a student's code in each step, in seconds.")] = None,
    personal: Annotated[
        bool, typer.Option(help="Draw sink size, lag size and epsilon from the id in each archive, or its name.")
    ] = False,
    student: Annotated[str | None, typer.Option(help="The student's id for a single submission; its file name by default.")] = None,
    without_walls: Annotated[
        bool, typer.Option("--without-walls", help="Grade even where the walls around a student's code are missing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Grade submissions with secret seeds: write grade.json for each, and the files that course platforms read.

    A run that was stopped goes on where it stopped if you repeat the command with the same seed file.
    """
    with exit_codes():
        from evictionary.classroom import assignment as assignments
        from evictionary.classroom import classes, submissions
        from evictionary.classroom import formats as written
        from evictionary.classroom.grading import GRADE_EXAMPLES

        chosen = assignments.load(assignment)
        wanted = names_in(formats) or list(written.FORMATS)
        for name in wanted:
            if name not in written.FORMATS:
                raise UsageError(f"--format: got {name!r}, wanted some of {', '.join(written.FORMATS)}")
        for argument, count in (("--jobs", jobs), ("--examples", examples)):
            if count is not None and count < 1:
                raise UsageError(f"{argument}: got {count}, wanted at least 1")
        if seconds is not None and not 0 < seconds < math.inf:
            raise UsageError(f"--seconds: got {seconds}, wanted more than 0")
        left_out: list[Path] = []
        if student is None:
            found = classes.find(submission, chosen.file, output, left_out.append)
        else:
            found = {student: _of_one(student, submission)}
        if left_out:
            messages.print(
                f"Left out, because a submission is {submissions.KINDS}: {_few([path.name for path in left_out])}",
                style="yellow",
                markup=False,
            )
        missing = _missing_walls(without_walls)
        secret = _secret(seed_file)
        with _writing("--output", output, "a folder that can be written"):
            output.mkdir(parents=True, exist_ok=True)
        order = classes.Order(assignment, secret, examples or GRADE_EXAMPLES, tuple(wanted), personal, seconds)
        started = time.monotonic()
        with progress() as (plan, advance):
            plan(len(found))
            grades: list[dict[str, Any]] = []
            try:
                grades.extend(classes.run(order, found, output, jobs, lambda name: advance(name)))
            except KeyboardInterrupt:
                messages.print(f"Stopped. {_GO_ON if seed_file else _BEGIN_ANEW}", style="yellow")
                raise typer.Exit(130) from None
        result = classes.summary(grades)
        result |= {
            "left_out": [str(path) for path in left_out],
            "walls_missing": sorted({*result["walls_missing"], *missing}),
            "seconds": round(time.monotonic() - started, 1),
        }
        (output / submissions.SUMMARY).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(result, indent=1))
    else:
        _print_class(result, output)


_GO_ON = "The finished grades are written; the same command goes on from there."
_BEGIN_ANEW = "Without a --seed-file the next run begins anew."


def _missing_walls(without: bool) -> list[str]:
    """The walls that are missing here. Raises UsageError if code could do harm and the instructor does not say `without`."""
    from evictionary.classroom import child

    walls = child.walls_here()
    harm = [f"no {name}: it could {what}" for name, what in child.OPEN.items() if not walls.get(name)]
    told = f"A student's code has too few walls around it on this machine ({'; '.join(harm)})."
    if harm and not without:
        raise UsageError(
            f"--without-walls: {told} Nothing was run. Grade each submission in a container of its own "
            "(docs/classroom/container.md), or give --without-walls if there is nothing here to lose"
        )
    if harm:
        messages.print(told, style="yellow", markup=False)
    return [name for name, stands in walls.items() if not stands]


def _of_one(student: str, paths: list[Path]) -> Path:
    """The single submission of a student who is named; whatever it holds, there will be a result for it."""
    from evictionary.classroom import submissions

    if len(paths) != 1:
        raise UsageError(f"--student: got one id for {len(paths)} submissions, wanted a single submission")
    if not submissions.is_id(student):
        raise UsageError(f"--student: got {student!r}, wanted an id that can be the name of a folder of its own")
    if not paths[0].exists():
        raise UsageError(f"submission: got {paths[0]}, wanted a file or folder that exists")
    return paths[0].resolve() if paths[0].is_dir() else paths[0]


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _secret(seed_file: Path | None) -> bytes:
    if seed_file is None:
        messages.print("No --seed-file: the seeds are new, and a second run will have others.", style="yellow")
        return os.urandom(32)
    try:
        secret = seed_file.read_bytes()
    except OSError as error:
        raise UsageError(f"--seed-file: got {seed_file}, wanted a file that can be read: {error.strerror}") from None
    if len(secret.strip()) < 8:
        raise UsageError(f"--seed-file: got {seed_file} with {len(secret)} bytes, wanted at least 8 secret bytes")
    return secret


def _print_class(result: dict[str, Any], output: Path) -> None:
    console = Console(highlight=False)
    count, largest = result["submissions"], max(result["distribution"].values())
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=f"{count} submission" + "s" * (count != 1), title_justify="left")
    table.add_column("points", justify="right")
    table.add_column("submissions", justify="right")
    table.add_column("")
    for points, count in result["distribution"].items():
        table.add_row(str(points), str(count), "█" * max(1, round(40 * count / largest)))
    console.print(table)
    for name, counts in result["steps"].items():
        console.print(f"{name}: " + ", ".join(f"{count} {word}" for word, count in counts.items()))
    for mistake, count in result["misconceptions"].items():
        console.print(f"{count} of the submissions: {mistake}", style="dim", markup=False)
    if result["errors"]:
        shown = _few(result["unjudged"])
        console.print(
            f"{result['errors']} could not be judged; the error in grade.json says why: {shown}", style="yellow", markup=False
        )
    if result["blocked"]:
        console.print(
            f"Blocked, and to be graded on another machine: {_few(result['blocked'])}; the verdict in grade.json says why",
            style="yellow",
            markup=False,
        )
    if result["one_id"]:
        console.print(f"Handed in under an id that another one has too: {_few(result['one_id'])}", style="yellow", markup=False)
    if result["walls_missing"]:
        missing = ", ".join(result["walls_missing"])
        console.print(f"Walls missing here: {missing}. docs/classroom/isolation.md says what is open then.", style="yellow")
    console.print(f"{result['seconds']:.0f} s. The grades: [bold]{escape(str(output))}[/]")
