"""Grades right and wrong submissions in many styles over many seeds: whether luck decides about points.

`python tests/classroom_styles.py --seeds 200 --jobs 2` grades them and writes
docs/classroom/styles.md; a run that was stopped goes on. A submission is what
the variants of a method are made of, `spec_tests/<method>/forms.py`, with one
form chosen for each part. A wrong one has an edit of `tests/styles/wrong.toml`.
"""

import ast
import copy
import hashlib
import itertools
import linecache
import os
import random
import re
import runpy
import tomllib
import types
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from hypothesis.errors import UnsatisfiedAssumption

from evictionary import store
from evictionary.classroom import assignment as assignments, checks, grading, worker
from evictionary.classroom.child import StudentError
from evictionary.classroom.judgement import Judgement, empty, named
from evictionary.cli.console import measuring
from evictionary.spec_tests.judge.law import SUITE, Law, suite_version
from evictionary.spec_tests.proof.planted import edited_text, edits_of, refusing

ROOT = Path(__file__).resolve().parents[1]
STYLES = ROOT / "tests" / "styles"
PAGE, STORE = ROOT / "docs" / "classroom" / "styles.md", ROOT / "build" / "styles.jsonl"
RIGHT_EACH = 30
LONG_EVERY = 10


WRONG = tomllib.loads((STYLES / "wrong.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Submission:
    """One file: the assignment, the function chosen for each part, and the mistake of `wrong.toml`, if
    there is one.
    """

    assignment: str
    chosen: tuple[tuple[str, str], ...]
    wrong: str = ""

    @property
    def name(self) -> str:
        return self.wrong or "+".join(form for _, form in self.chosen)

    @property
    def source(self) -> str:
        text = whole(self.assignment)
        if self.wrong:
            mistake = WRONG[self.assignment][self.wrong]
            # Where a form of its own has the name of a shared one, it is the last.
            ((before, own, after),) = re.findall(
                rf"(.*)(^def {mistake['in']}\(.*?\n\n\n)(.*)", text, flags=re.M | re.S
            )
            text = before + edited_text(self.wrong, own, edits_of(mistake["was"], mistake["is"])) + after
        return text + "".join(f"{part} = {form}\n" for part, form in self.chosen)


def names() -> list[str]:
    """The assignments that have styles."""
    return sorted(WRONG)


def forms_of(assignment: str) -> Path:
    """The file of an assignment's forms; that of the kernel is no part of a method's specification."""
    own = SUITE / assignment / "forms.py"
    return own if own.exists() else STYLES / f"{assignment}.py"


def whole(assignment: str) -> str:
    """The forms of an assignment and those that it shares
    with others, as one file that imports nothing of ours.
    """
    shared = re.compile(r"^from evictionary.*\n", re.M)
    own = forms_of(assignment).read_text(encoding="utf-8")
    return (
        (SUITE / "shared" / "forms.py").read_text(encoding="utf-8") if shared.search(own) else ""
    ) + shared.sub("", own)


def submissions(assignment: str) -> list[Submission]:
    """The right submissions of an assignment, which have
    every form of every part among them, and its wrong ones.
    """
    parts = runpy.run_path(str(forms_of(assignment)))["FORMS"]
    right = {part: [form.__name__ for form in forms] for part, forms in parts.items()}
    turns = {
        part: [
            form
            for turn in range(RIGHT_EACH)
            for form in random.Random(f"{part}/{turn}").sample(forms, len(forms))
        ]
        for part, forms in right.items()
    }
    first = Submission(assignment, tuple((part, forms[0]) for part, forms in right.items()))
    others = [
        Submission(assignment, tuple((part, turn[number]) for part, turn in turns.items()))
        for number in range(2 * RIGHT_EACH)
    ]
    found = list(dict.fromkeys([first, *others]))[:RIGHT_EACH]
    for name, mistake in WRONG[assignment].items():
        chosen = [
            (part, mistake["in"] if mistake["in"] in forms else forms[0]) for part, forms in right.items()
        ]
        found.append(Submission(assignment, tuple(chosen), name))
    return found


def readable() -> list[str]:
    """The assignments of which `solution` writes one; that of the kernel is no mathematics."""
    return [name for name in names() if assignments.load(name).library == "numpy"]


def solution(assignment: str) -> str:
    """The mathematics of an assignment as a file to read: the first right submission, with the names of the
    handout and without the forms that it does not use. It does not refuse bad input.
    """
    text, chosen = whole(assignment), dict(submissions(assignment)[0].chosen)
    tree = ast.parse(text)
    defined: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined[node.name] = node
        elif isinstance(node, ast.Assign):
            defined |= {ast.unparse(target): node for target in node.targets}
    needed, asked = set[ast.stmt](), [*chosen.values()]
    while asked:
        name = chosen.get(name := asked.pop(), name)
        if name in defined and defined[name] not in needed:
            needed.add(defined[name])
            asked += _names(defined[name])
    used = {name for node in needed for name in _names(node)}
    imports = [
        ast.unparse(node)
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        and used & {each.asname or each.name for each in node.names}
    ]
    parts = ["\n".join(dict.fromkeys(imports)), *(_text(text, node) for node in tree.body if node in needed)]
    written = "\n\n\n".join(parts) + "\n"
    for part, form in chosen.items():
        written = re.sub(rf"\b{form}\b", part, written)
    return written


def _names(node: ast.AST) -> list[str]:
    return [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]


def _text(text: str, node: Any) -> str:
    """A definition as it was written, with its decorators."""
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


class Inside:
    """Calls the functions of a file in this process as a child
    would: nobody hostile wrote it, and a child takes longer.
    """

    walls: dict[str, Any] = {}  # noqa: RUF012
    is_late = False

    def __init__(self, source: str, stem: str) -> None:
        self.module, self.stem = types.ModuleType(stem), stem
        file = f"<{hashlib.sha256(source.encode()).hexdigest()}>"
        # Triton reads a kernel's source
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        exec(compile(source, file, "exec"), vars(self.module))
        self.named = named(stem)
        self.functions = [name for name, value in vars(self.module).items() if callable(value)]

    def __enter__(self) -> "Inside":
        return self

    def __exit__(self, *_: object) -> None:
        return

    def call(self, name: str, *args: Any, change_launches: bool = False, **kwargs: Any) -> Any:
        native = self.in_torch if hasattr(self.module, "torch") else copy.deepcopy
        try:
            is_kernel = hasattr(self.module, "triton")
            with worker.watched_launches() if is_kernel else nullcontext({"added": 0.0}) as launches:
                launches["added"] = float(change_launches)
                given, named = [*map(native, args)], {key: native(value) for key, value in kwargs.items()}
                function = getattr(self.module, name)
                function = worker.kernels_alone(given[0])(function) if is_kernel else function
                result = worker.answer(refusing(f"{self.stem}.{name}", function), given, named)
        except ValueError:
            raise
        except Exception as error:
            raise StudentError(type(error).__name__, str(error), "") from error
        if hasattr(result, "numpy"):
            return result.numpy()
        return self.named(type(result).__name__, result._asdict()) if hasattr(result, "_fields") else result

    def in_torch(self, value: Any) -> Any:
        return (
            self.module.torch.from_numpy(np.array(value, order="K"))
            if isinstance(value, np.ndarray)
            else value
        )


def graded(assignment: str, seed: int, examples: int, found: Sequence[Submission]) -> Iterator[store.Line]:
    """Submissions of an assignment at one seed: the points
    of each, the steps that failed, and the first message.
    """
    one, secret = assignments.load(assignment), f"styles/{seed}".encode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = side_by_side(one, found, secret, examples, long=seed % LONG_EVERY == 0)
    for each, result in results.items():
        failed = [line for line in result.lines if line.verdict == "failed"]
        yield {
            "assignment": assignment,
            "seed": seed,
            "submission": each.name,
            "wrong": bool(each.wrong),
            "points": result.score,
            "failed": [line.name for line in failed],
            "message": failed[0].message[:300] if failed else "",
        }


def side_by_side(
    one: assignments.Assignment, found: Sequence[Submission], secret: bytes, examples: int, long: bool
) -> dict[Submission, Judgement]:
    """Judge all submissions on each input before the next is drawn, as the grader judges one: drawing
    takes most of the time.

    `long` asks the laws of long inputs too.
    """
    run = grading.ByLaws(one, Path(), secret=secret, examples=examples)
    children = {each: Inside(each.source, one.stem) for each in found}
    results = {each: empty(one) for each in found}
    for place, step in enumerate(one.steps):
        verdicts = {
            each: {line.name: line.verdict for line in result.lines} for each, result in results.items()
        }
        ready = [each for each in found if all(verdicts[each][name] == "passed" for name in step.needs)]
        judged = {each: run.implementation(children[each], step) for each in ready}  # type: ignore[arg-type]
        for each in judged:
            results[each].lines[place].verdict = "passed"
        # This process holds the matrix that a student's may not: what a prompt takes is not asked here.
        asked = replace(step, check="") if step.check == "blocks" else step
        for law in (each for each in run.laws(asked) if long or not each.examples):
            for each, message in failures(law, run, step, judged).items():
                line = results[each].lines[place]
                line.verdict, line.message = "failed", line.message or message
        for each in judged:
            line = results[each].lines[place]
            line.points = step.points if line.verdict == "passed" else 0
    return results


def failures(
    law: Law, run: Any, step: assignments.Step, judged: dict[Submission, Any]
) -> dict[Submission, str]:
    """The submissions that fail a law, with the message of the first input that they fail on."""
    failed: dict[Submission, str] = {}

    def check_all(_: None, **inputs: Any) -> None:
        for each, implementation in judged.items():
            if each not in failed:
                try:
                    law.check(implementation, **inputs)
                except UnsatisfiedAssumption:  # the input is not one for this law
                    raise
                except Exception as error:
                    failed[each] = f"{type(error).__name__}: {error}"

    run.drawn(replace(law, check=check_all), step).check(None)
    return failed


@cache
def digest(assignment: str) -> str:
    """A digest of everything that the points depend on."""
    content = b"".join(
        path.read_bytes() for path in (forms_of(assignment), STYLES / "wrong.toml", Path(checks.__file__))
    )
    content += repr(assignments.load(assignment).steps).encode()
    return hashlib.sha256(content + str(suite_version()).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Plan(store.Plan):
    """Every submission of some assignments at every seed; the oracle's numbers are computed once for all
    of a seed.
    """

    assignments: tuple[str, ...]
    seeds: int
    examples: int

    model = ""  # none takes part
    IDENTITY = ("assignment", "seed", "submission", "wrong", "examples")

    def work(self) -> list[tuple[tuple[str, int], list[Submission]]]:
        every = {name: submissions(name) for name in self.assignments}
        right = {name: [each for each in found if not each.wrong] for name, found in every.items()}
        units = itertools.product(range(self.seeds), self.assignments)
        # The points of a wrong one are told only where all laws are asked.
        return [((name, seed), right[name] if seed % LONG_EVERY else every[name]) for seed, name in units]

    def named(self, unit: tuple[str, int], part: Submission) -> dict[str, Any]:
        named = {"assignment": unit[0], "seed": unit[1], "examples": self.examples}
        return named | {"submission": part.name, "wrong": bool(part.wrong)}

    def is_done(self, line: store.Line, part: Submission) -> bool:
        return line["digest"] == digest(line["assignment"])

    def measure(self, unit: tuple[str, int], parts: Sequence[Submission]) -> Iterator[store.Line]:
        for line in graded(*unit, self.examples, parts):
            yield line | {"digest": digest(unit[0]), "examples": self.examples}

    def text(self, line: store.Line) -> str:
        return f"{line['assignment']}, seed {line['seed']}"


def current(lines: list[store.Line]) -> list[store.Line]:
    """The lines of the files and the laws as they are now."""
    return [
        line
        for line in lines
        if line["assignment"] in names() and line["digest"] == digest(line["assignment"])
    ]


def page(lines: list[store.Line]) -> str:
    """The Markdown page: right submissions that lost points,
    and how the points of each wrong one differ between seeds.
    """
    gradings = []
    for name, examples in sorted({(line["assignment"], line["examples"]) for line in lines}):
        own = [
            line
            for line in lines
            if (line["assignment"], line["examples"], line["wrong"]) == (name, examples, False)
        ]
        few, seeds = sum(line["points"] < 100 for line in own), len({line["seed"] for line in own})
        gradings.append((name, len({line["submission"] for line in own}), examples, seeds, len(own), few))
    by_mistake: dict[tuple[str, str], list[store.Line]] = defaultdict(list)
    for line in (line for line in lines if line["wrong"] and line["seed"] % LONG_EVERY == 0):
        by_mistake[line["assignment"], line["submission"]].append(line)
    counts = {key: sorted(Counter(line["points"] for line in own).items()) for key, own in by_mistake.items()}
    mistakes = [
        (
            name,
            mistake.replace("_", " "),
            ", ".join(f"{points}: {count}" for points, count in counts[name, mistake]),
            ", ".join(by_luck(own)) or "-",
        )
        for (name, mistake), own in sorted(by_mistake.items())
    ]
    head = ["assignment", "right submissions", "inputs a law", "seeds", "gradings", "below 100 points"]
    return f"""\
# No luck

{RIGHT_EACH} right submissions to each assignment, in different styles, and mistakes that are not among the
planted ones, each graded at every seed; laws of long inputs, which take most of the time, are asked at each
{LONG_EVERY}th seed. `python tests/classroom_styles.py --seeds N --examples INPUTS` made this page; the
submissions are the forms of the correct variants put together, the mistakes are in `tests/styles/wrong.toml`.

{store.table(head, gradings)}

Wrong submissions, at the seeds at which all laws are asked: the points that they had, each with the number of
seeds. A step is decided by luck if it fails at some seeds and passes at others; steps that wait for
it follow it.

{store.table(["assignment", "mistake", "points: seeds", "decided by luck"], mistakes)}
"""


def by_luck(lines: list[store.Line]) -> list[str]:
    """The steps that fail at some seeds and not at others, without those that were not judged because an
    earlier one failed.
    """
    needs = {step.name: step.needs for step in assignments.load(lines[0]["assignment"]).steps}

    def judged(line: store.Line) -> set[str]:
        passed: set[str] = set()
        seen = set()
        for name, before in needs.items():
            if set(before) <= passed:
                seen.add(name)
                passed |= {name} - set(line["failed"])
        return seen

    return [
        name for name in needs if len({name in line["failed"] for line in lines if name in judged(line)}) == 2
    ]


def main(
    seeds: int = 3,
    jobs: int = 1,
    examples: int = grading.GRADE_EXAMPLES,
    assignments: Annotated[str, typer.Option(help="Some of them, comma-separated.")] = ",".join(names()),
    solutions: Annotated[
        Path | None, typer.Option(help="Write a model solution of each into this folder, and grade nothing.")
    ] = None,
) -> None:
    """Grade every submission at every seed that is not graded yet, and write the page."""
    if solutions:
        solutions.mkdir(parents=True, exist_ok=True)
        for name in readable():
            (solutions / f"{name}.py").write_text(solution(name), encoding="utf-8")
        return
    os.environ["TRITON_INTERPRET"] = "1"  # of this process and of its helpers, before a kernel imports Triton
    plan = Plan(tuple(assignments.split(",")), seeds, examples)
    with measuring() as advance:
        lines = current(store.run(plan, STORE.parent, jobs=jobs, advance=advance, name=STORE.name))
    for line in lines:
        if not line["wrong"] and line["points"] < 100:
            print(
                f"{line['assignment']}, seed {line['seed']}: {line['points']} for {line['submission']}: "
                f"{line['message']}"
            )
    store.put(PAGE, page([line for line in lines if line["seed"] < seeds]))


if __name__ == "__main__":
    import classroom_styles  # by its name, so that other processes find the plan

    typer.run(classroom_styles.main)
