"""An artificial class: right, wrong and hostile submissions, to test the grader.

`python -m tests.tools.synthetic FOLDER --count 200` writes submissions to the KeyDiff assignment: every attack of
`attacks.py`; half of the other submissions are right, and half have one planted mistake each.
`evictionary grade FOLDER --assignment keydiff --output GRADES` grades them, and `--report GRADES` writes docs/classroom/class.md.
"""

import argparse
import importlib
import inspect
import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

from evictionary import reference
from evictionary.classroom import assignment as assignments
from evictionary.classroom import bundle, formats, grading
from evictionary.classroom.assignment import Assignment, Step
from evictionary.spec_tests.harness.implementation import oracle
from evictionary.spec_tests.harness.law import load_laws
from evictionary.spec_tests.harness.planted import Mutant, edited_source, load_mutants
from evictionary.store import table

from . import attacks

SWEEP_SEED = b"the seeds of the sweep"
NUMPY = ("keydiff", "lagkv", "expected_attention", "momentkv", "gvote", "h2o", "duo_attention")
PAGES = Path(__file__).parents[2] / "docs" / "classroom"
# A right answer as a student would write it; docs/classroom/transcript.md shows the steps to it.
SOLUTION = PAGES / "transcript" / "3_right.py"

_MUTANT_STUB = "def mutant(*args, **kwargs):\n    return lambda function: function\n"


def bundled(stem: str, mutant: Mutant | None = None) -> str:
    """The reference of a method as one file that imports only NumPy; a mutant replaces the right function."""
    sources, last = bundle.sources(), ""
    if mutant is not None and mutant.edits:
        path = mutant.edited or mutant.of
        module = f"bundled.{path.split('.')[0]}"
        sources[module] = sources[module].replace(inspect.getsource(oracle(path)), edited_source(path, mutant.edits))
    elif mutant is not None:
        spec_tests = importlib.import_module("evictionary.spec_tests")
        tests = Path(next(iter(spec_tests.__path__)))
        sources["bundled.oracle"] = (
            "import importlib\ndef oracle(path):\n    stem, name = path.split('.')\n"
            "    return getattr(importlib.import_module(f'bundled.{stem}'), name)\n"
        )
        sources["bundled.arithmetic"] = bundle.renamed((tests / "harness" / "arithmetic.py").read_text(encoding="utf-8"))
        sources["bundled.planted"] = _MUTANT_STUB
        source_file = inspect.getsourcefile(inspect.unwrap(mutant.function)) or ""
        sources["bundled.wrong"] = bundle.renamed(Path(source_file).read_text(encoding="utf-8"))
        function = mutant.of.split(".")[1]
        last = f'{function} = vars(sys.modules["bundled.wrong"])["{mutant.name.split(".")[1]}"]'
    return bundle.packed(stem, sources, last)


def mutants_of(assignment: Assignment) -> list[Mutant]:
    """The planted mistakes of the assignment: in one of its functions, against one of its requirements.

    Mistakes that begin above a size are its own only where it has a law of sizes for that function.
    """
    laws = [load_laws()[name] for step in assignment.steps for name in step.laws]
    functions, large = (
        {each for law in chosen for each in law.functions} for chosen in (laws, [law for law in laws if law.examples])
    )
    requirements = {law.requirement.id for law in laws}
    found = [one for one in load_mutants().values() if one.killed_by in requirements]
    return [one for one in found if one.of in (large if one.above else functions)]


def write_class(folder: Path, count: int) -> dict[str, int]:
    """Write `count` submissions to the KeyDiff assignment into a folder; returns how many of each kind."""
    folder.mkdir(parents=True, exist_ok=True)
    hostile = attacks.archives(folder, Path(next(iter(reference.__path__))) / "keydiff.py")
    for name, source in attacks.SOURCES.items():
        hostile[name] = folder / f"hostile {name}.py".replace(" ", "_").replace("'", "")
        hostile[name].write_text(source, encoding="utf-8")
    left = max(0, count - len(hostile))
    mistakes = itertools.cycle(mutants_of(assignments.load("keydiff")))
    for number in range(left // 2):
        mutant = next(mistakes)
        path = folder / f"wrong_{number:03}_{mutant.name.split('.')[1]}.py"
        path.write_text(bundled("keydiff", mutant), encoding="utf-8")
    for number in range(left - left // 2):
        source = (SOLUTION.read_text(encoding="utf-8"), bundled("keydiff"))[number % 2]
        (folder / f"right_{number:03}.py").write_text(source, encoding="utf-8")
    return {"hostile": len(hostile), "wrong": left // 2, "right": left - left // 2}


def hand_in(assignment: Assignment, mutant: Mutant, secret: bytes) -> tuple[bool, bool]:
    """Submit a planted mistake; returns whether a step of its requirement is lost, and whether its misconception is named.

    Only the steps of that requirement are judged: the other steps say nothing about it and take most of the time.
    """
    steps = tuple(replace(step, needs=()) for step in assignment.steps if _judges(step, mutant.killed_by))
    judgement = grading.judge(
        bundled(assignment.stem, mutant).encode(),
        replace(assignment, steps=steps),
        secret=secret,
        examples=grading.GRADE_EXAMPLES,
    )
    told = [each for line in judgement.lines for each in line.misconceptions]
    return any(line.verdict == "failed" for line in judgement.lines), mutant.misconception in told


def _in_whole(assignment: Assignment, mutant: Mutant) -> str:
    """The whole assignment's judgement of a mistake that the steps of its requirement accept or do not name."""
    source = bundled(assignment.stem, mutant).encode()
    judgement = grading.judge(source, assignment, secret=SWEEP_SEED, examples=grading.GRADE_EXAMPLES)
    failed = [line.name for line in judgement.lines if line.verdict == "failed"]
    told = [each for line in judgement.lines for each in line.misconceptions]
    named = "named" if mutant.misconception in told else "not named"
    return f"in the whole assignment {judgement.score} points, failed {', '.join(failed) or 'nothing'}, misconception {named}"


def _judges(step: Step, requirement: str) -> bool:
    return any(load_laws()[name].requirement.id == requirement for name in step.laws)


def outcomes(name: str, wrong: list[str]) -> list[tuple[bool, bool, str]]:
    """Hand planted mistakes in: whether each loses its step, whether it is named, and where one is not so, what is known of it."""
    assignment, mutants = assignments.load(name), [load_mutants()[each] for each in wrong]
    found = [hand_in(assignment, mutant, SWEEP_SEED) for mutant in mutants]
    return [(*each, "" if all(each) else _in_whole(assignment, mutant)) for each, mutant in zip(found, mutants, strict=True)]


def sweep(jobs: int) -> None:
    """Submit every planted mistake to its assignment and write docs/classroom/mistakes.md."""
    import joblib

    lines = [
        "# Every planted mistake, handed in",
        "",
        "Each mistake of the bank that lies in a function of an assignment, submitted by a student who has the rest right.",
        "`python -m tests.tools.synthetic --sweep` made this page. A misconception is named only where an input",
        "separates it from every other planted mistake, and only for the first step that fails.",
        "",
    ]
    rows, exceptions = [], []
    for name in NUMPY:
        mutants = mutants_of(assignments.load(name))
        names = [mutant.name for mutant in mutants]
        done = joblib.Parallel(n_jobs=jobs)(joblib.delayed(outcomes)(name, names[at : at + 4]) for at in range(0, len(names), 4))
        judged = list(itertools.chain(*done))
        rows.append((name, len(mutants), sum(lost for lost, _, _ in judged), sum(told for _, told, _ in judged)))
        print(*rows[-1], flush=True)
        pairs = zip(mutants, judged, strict=True)
        exceptions += [f"- {name}, {one.killed_by}: {one.misconception}: {whole}" for one, (_, _, whole) in pairs if whole]
    lines.append(table(["assignment", "handed in", "lost the points of its requirement", "was told its misconception"], rows))
    if exceptions:
        lines += ["", "The exceptions, at these seeds:", "", *exceptions]
    (PAGES / "mistakes.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def report(grades: Path) -> None:
    """Write docs/classroom/class.md: the points of a class that `write_class` wrote, and what became of each attack."""
    points: dict[int, Counter[str]] = {}
    hostile, seconds, told = [], [], []
    for path in sorted(grades.glob("*/grade.json")):
        grade = json.loads(path.read_text(encoding="utf-8"))
        kind = next((kind for kind in ("right", "wrong") if grade["student"].startswith(f"{kind}_")), "hostile")
        points.setdefault(grade["score"], Counter())[kind] += 1
        seconds.append(grade["seconds"])
        if kind == "wrong":
            told.append(any(line["misconceptions"] for line in grade["lines"]))
        if kind == "hostile":
            said = next((line["reason"] for line in grade["lines"] if line["reason"]), "")
            name = grade["student"].removeprefix("hostile_").replace("_", " ")
            said = formats.cell((grade["error"] or said).replace(f"{PAGES.parents[1]}/", "")[:160])
            hostile.append((formats.cell(name), grade["score"], f"{grade['seconds']:.1f}", said))
    rows = [(each, counts["right"], counts["wrong"], counts["hostile"]) for each, counts in sorted(points.items())[::-1]]
    lines = [
        "# A class that never was",
        "",
        "`python -m tests.tools.synthetic handed_in --count 200` wrote hostile, wrong and right submissions to the",
        "KeyDiff assignment, `evictionary grade handed_in --assignment keydiff --seconds 5 --output grades` graded them, and",
        "`python -m tests.tools.synthetic --report grades` made this page.",
        "",
        table(["points", "right", "one planted mistake", "hostile"], rows),
        "",
        f"{len(seconds)} submissions, {sum(seconds) / len(seconds):.1f} s each on average and {max(seconds):.0f} s at most;",
        f"{sum(told)} of the {len(told)} planted mistakes were named, the others with the law and the input that show them.",
        "",
        "## What became of each attack",
        "",
        table(["attack", "points", "seconds", "what the result says first"], hostile),
    ]
    (PAGES / "class.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("handed_in"))
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--sweep", action="store_true", help="submit every planted mistake and write the page about it")
    parser.add_argument(
        "--report", type=Path, metavar="GRADES", help="write the page about a class that was graded into this folder"
    )
    parser.add_argument("--jobs", type=int, default=-1, help="processes of --sweep. Default: one for each core")
    arguments = parser.parse_args()
    if arguments.sweep:
        sweep(arguments.jobs)
        return
    if arguments.report:
        report(arguments.report)
        return
    print(", ".join(f"{count} {kind}" for kind, count in write_class(arguments.folder, arguments.count).items()))


if __name__ == "__main__":
    main()
