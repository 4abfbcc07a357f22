"""An artificial class: right, wrong and hostile submissions, to test the grader.

`python -m tests.tools.synthetic FOLDER --count 200` writes submissions to the KeyDiff
assignment: every attack of `attacks.py`; half of the other submissions are right, and half
have one planted mistake each. `evictionary grade FOLDER --assignment keydiff --output GRADES`
grades them, and `--report GRADES` writes docs/classroom/class.md.
"""

import itertools
import json
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from evictionary import reference
from evictionary.classroom import assignment as assignments, formats, grading
from evictionary.spec_tests.judge.law import load_laws
from evictionary.spec_tests.proof.planted import Mutant, load_mutants
from evictionary.store import put, table

from . import attacks
from .grader import NUMPY, PAGES, SOLUTION, bundled, handed_in, judged

SWEEP_SEED = b"the seeds of the sweep"


def mutants_of(assignment: assignments.Assignment) -> list[Mutant]:
    """The planted mistakes of the assignment: in one of its functions, against one of its requirements.

    Mistakes that begin above a size are its own only where it has a law of sizes for that function.
    """
    laws = [load_laws()[name] for step in assignment.steps for name in step.laws]
    large = {each for law in laws if law.examples for each in law.functions}
    functions = {each for law in laws for each in law.functions}
    requirements = {law.requirement.id for law in laws}
    found = [one for one in load_mutants().values() if one.killed_by in requirements]
    return [one for one in found if one.of in (large if one.above else functions)]


def write_class(folder: Path, count: int) -> dict[str, int]:
    """Write `count` submissions to the KeyDiff assignment into a folder; returns how many of each kind."""
    files = {
        f"hostile {name}.py".replace(" ", "_").replace("'", ""): text
        for name, text in attacks.SOURCES.items()
    }
    hostile = len(files) + len(attacks.archives(folder, Path(next(iter(reference.__path__))) / "keydiff.py"))
    wrong, right = max(0, count - hostile) // 2, (max(0, count - hostile) + 1) // 2
    for number, mutant in zip(
        range(wrong), itertools.cycle(mutants_of(assignments.load("keydiff"))), strict=False
    ):
        files[f"wrong_{number:03}_{mutant.name.split('.')[1]}.py"] = bundled("keydiff", mutant)
    for number in range(right):
        files[f"right_{number:03}.py"] = bundled("keydiff") if number % 2 else SOLUTION
    handed_in(folder, files)
    return {"hostile": hostile, "wrong": wrong, "right": right}


def hand_in(name: str, mistake: str) -> tuple[bool, bool, str]:
    """Submit a planted mistake: whether a step of its requirement is lost, whether its misconception is
    named, and what is told.

    Only the steps of that requirement are judged: the other steps say nothing
    about it and take most of the time. What is told is empty, or where these
    steps accept the mistake or do not name it, what the whole assignment says.
    """
    one, mutant = assignments.load(name), load_mutants()[mistake]

    def outcome(steps: tuple[assignments.Step, ...]) -> tuple[list[str], bool, int]:
        settings = {"secret": SWEEP_SEED, "examples": grading.GRADE_EXAMPLES}
        result = judged(replace(one, steps=steps), bundled(one.stem, mutant), **settings)
        named = mutant.misconception in [each for line in result.lines for each in line.misconceptions]
        return [line.name for line in result.lines if line.verdict == "failed"], named, result.score

    own = [
        step
        for step in one.steps
        if mutant.killed_by in {load_laws()[law].requirement.id for law in step.laws}
    ]
    lost, is_named, _ = outcome(tuple(replace(step, needs=()) for step in own))
    if lost and is_named:
        return True, True, ""
    failed, named, points = outcome(one.steps)
    told = f"failed {', '.join(failed) or 'nothing'}, misconception {'named' if named else 'not named'}"
    return bool(lost), is_named, f"in the whole assignment {points} points, {told}"


def write_mistakes(jobs: int) -> None:
    """Submit every planted mistake to its assignment and write docs/classroom/mistakes.md."""
    import joblib

    rows, exceptions = [], []
    for name in NUMPY:
        mutants = mutants_of(assignments.load(name))
        found = joblib.Parallel(n_jobs=jobs)(joblib.delayed(hand_in)(name, mutant.name) for mutant in mutants)
        rows.append(
            (name, len(mutants), sum(lost for lost, _, _ in found), sum(told for _, told, _ in found))
        )
        print(*rows[-1], flush=True)
        exceptions += [
            f"- {name}, {one.killed_by}: {one.misconception}: {whole}"
            for one, (_, _, whole) in zip(mutants, found, strict=True)
            if whole
        ]
    apart = "\n".join(["\n\nThe exceptions, at these seeds:\n", *exceptions]) if exceptions else ""
    head = ["assignment", "handed in", "lost the points of its requirement", "was told its misconception"]
    page = f"""\
# Every planted mistake, handed in

Each mistake of the bank that lies in a function of an assignment, submitted by a student who has the rest
right. `python -m tests.tools.synthetic --sweep` made this page. A misconception is named only where an input
separates it from every other planted mistake, and only for the first step that fails.

{table(head, rows)}{apart}
"""
    put(PAGES / "mistakes.md", page)


def write_report(grades: Path) -> None:
    """Write docs/classroom/class.md: the points of a class
    that `write_class` wrote, and what became of each attack.
    """
    points: dict[int, Counter[str]] = defaultdict(Counter)
    hostile, seconds, told = [], [], []
    for path in sorted(grades.glob("*/grade.json")):
        grade = json.loads(path.read_text(encoding="utf-8"))
        kind = next(
            (kind for kind in ("right", "wrong") if grade["student"].startswith(f"{kind}_")), "hostile"
        )
        points[grade["score"]][kind] += 1
        seconds.append(grade["seconds"])
        told += [any(line["misconceptions"] for line in grade["lines"])] * (kind == "wrong")
        if kind == "hostile":
            said = grade["error"] or next((line["reason"] for line in grade["lines"] if line["reason"]), "")
            name = grade["student"].removeprefix("hostile_").replace("_", " ")
            said = formats.cell(said.replace(f"{PAGES.parents[1]}/", "")[:160])
            hostile.append((formats.cell(name), grade["score"], f"{grade['seconds']:.1f}", said))
    rows = [
        (each, counts["right"], counts["wrong"], counts["hostile"])
        for each, counts in sorted(points.items())[::-1]
    ]
    page = f"""\
# A class that never was

`python -m tests.tools.synthetic handed_in --count 200` wrote hostile, wrong and right submissions to the
KeyDiff assignment. `evictionary grade handed_in --assignment keydiff --seconds 5 --output grades` graded
them. `python -m tests.tools.synthetic --report grades` made this page.

{table(["points", "right", "one planted mistake", "hostile"], rows)}

The {len(seconds)} submissions took {sum(seconds) / len(seconds):.1f} s each on average and
{max(seconds):.0f} s at most. The grader named {sum(told)} of the {len(told)} planted mistakes. For the others
it gave the law (property test) and the input that show them.

## What became of each attack

{table(["attack", "points", "seconds", "what the result says first"], hostile)}
"""
    put(PAGES / "class.md", page)


def main(
    folder: Annotated[Path, typer.Argument()] = Path("handed_in"),
    count: int = 200,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Submit every planted mistake and write the page about it.")
    ] = False,
    report: Annotated[
        Path | None, typer.Option(help="Write the page about a class that was graded into this folder.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Processes of --sweep; one for each core by default.")] = -1,
) -> None:
    """Write an artificial class, or a page about it."""
    if sweep:
        write_mistakes(jobs)
    elif report:
        write_report(report)
    else:
        print(", ".join(f"{number} {kind}" for kind, number in write_class(folder, count).items()))


if __name__ == "__main__":
    typer.run(main)
