"""Who guards the oracle: mistakes are made in `reference/` itself, so that the implementation and the
oracle make them alike.

A law that only compares the two sees nothing then. What remains are the laws that compute in a way of their
own: plain loops, brute force, an exact fraction, a closed form, an example by hand. The mistakes are those of
the bank and small ones that a program makes of the source (`source_mutations.py`). `python -m
evictionary.spec_tests.proof.oracle` plants them all and writes docs/oracle.md.
"""

import inspect
import json
import sys
import tomllib
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from hypothesis.errors import Unsatisfiable

from evictionary.spec_tests.judge import tolerance
from evictionary.spec_tests.judge.degenerate import REFUSAL
from evictionary.spec_tests.judge.implementation import oracle
from evictionary.spec_tests.judge.law import SUITE, Law, load_laws
from evictionary.spec_tests.judge.outcome import outcome, prepared, time_limit
from evictionary.spec_tests.proof.asking import DOCS, in_processes, laws_for
from evictionary.spec_tests.proof.planted import copied, load_mutants, replaced
from evictionary.spec_tests.proof.source_mutations import functions, mutations
from evictionary.store import grouped, table

EQUIVALENT = SUITE / "proof" / "oracle.toml"
SECONDS = 20
# Inputs that each law draws: at first, to record what a function is called with, and for what was not seen
# before.
FEW, SOME, MANY = 3, 8, 100
# Laws that are asked first, and in all; the nearest ones.
NEAR, FAR = 10, 100
# Calls of each law that are recorded, and of all laws; where they are fewer, the laws draw more.
CALLS, ENOUGH = 60, 300
# Mistakes of one function that a process takes at a time.
PART = 60

BANK, PROGRAM = "by hand", "by the program"
SEEN, SAME, LISTED, UNSEEN = "seen", "same numbers", "equivalent", "unseen"
COLUMNS = (BANK, PROGRAM, SEEN, SAME, LISTED, UNSEEN)
PAGE = DOCS / "oracle.md"
REASONS = "\n## Equivalent, and why\n"


# Of one call, by place and by name.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Result:
    """What became of one mistake in the function `of`: `verdict`, and the law that saw it."""

    of: str
    mistake: str
    made: str
    verdict: str
    law: str = ""
    reason: str = ""


def _call(*args: Any, **kwargs: Any) -> Any:
    return _planted(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821


@contextmanager
def unchecked(function: Callable[..., Any]) -> Iterator[None]:
    """A function of the reference that takes what it is given."""
    said = getattr(function, "contract", None)
    if said is None:
        yield
        return
    signature = said.signature
    said.read = lambda *args, **kwargs: signature.bind(*args, **kwargs).arguments
    try:
        yield
    finally:
        del said.read


@contextmanager
def planted(path: str, wrong: Callable[..., Any]) -> Iterator[None]:
    """The reference with `wrong` in the place of a function, for whoever calls it: the function stays and
    gets other code.
    """
    whole = oracle(path)
    right = inspect.unwrap(whole)
    assert isinstance(right, types.FunctionType)
    code, copy, inside = right.__code__, copied(whole), False

    def once(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside:  # a planted mistake may call the right function
            return copy(*args, **kwargs)
        inside = True
        try:
            return wrong(*args, **kwargs)
        finally:
            inside = False

    right.__globals__["_planted"], right.__wrapped__ = once, copy  # type: ignore[attr-defined]
    right.__code__ = _call.__code__
    tolerance.forget()
    try:
        with unchecked(whole):  # a mistake may be that nothing is checked
            yield
    finally:
        right.__code__ = code
        del right.__globals__["_planted"], right.__wrapped__  # type: ignore[attr-defined]
        tolerance.forget()


def fails(law: Law, max_examples: int) -> bool:
    """Whether a law that is put to the reference fails: by
    an assertion, by an error, or because it never ends.
    """
    test = prepared(law, max_examples=max_examples, seed=None)
    try:
        with time_limit(SECONDS), np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
            test(**({"impl": replaced("the reference", {})} if law.functions else {}))
    except (KeyboardInterrupt, SystemExit):
        raise
    except Unsatisfiable:
        return False
    except BaseException:  # pytest's own failures and TimedOut are no Exception
        return True
    return False


def executed(name: str) -> set[str]:
    """The functions of the reference that a law runs, by itself or in the oracle."""
    paths = {inspect.unwrap(oracle(path)).__code__: path for path in functions()}
    found: set[str] = set()

    def note(frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code in paths:
            found.add(paths[frame.f_code])

    tolerance.forget()
    sys.setprofile(note)
    try:
        failed = fails(load_laws()[name], 2)
    finally:
        sys.setprofile(None)
    if failed:
        raise RuntimeError(f"{name} fails with the right reference, wanted a law that holds")
    return found


def same(right: Any, other: Any) -> bool:
    """Whether two answers are the same numbers, up to the rounding of float64."""
    if isinstance(right, tuple | list):
        return isinstance(other, tuple | list) and len(right) == len(other) and all(map(same, right, other))
    if isinstance(right, np.ndarray | np.generic | float):
        right, other = np.asarray(right), np.asarray(other)
        if right.shape != other.shape or right.dtype.kind != other.dtype.kind:
            return False
        if right.dtype.kind != "f":
            return bool(np.array_equal(right, other))
        size = np.abs(right[np.isfinite(right)]).max(initial=0)
        return bool(np.isclose(right, other, rtol=0, atol=1e-9 * size, equal_nan=True).all())
    return bool(right == other)


def recorded(path: str, laws: list[Law]) -> list[Arguments]:
    """The arguments with which these laws call a function, some
    calls of each law; float64 alone, not the other arithmetics.
    """
    right, kept = copied(oracle(path)), 0
    found: list[Arguments] = []

    def note(*args: Any, **kwargs: Any) -> Any:
        arrays = [each for each in (*args, *kwargs.values()) if isinstance(each, np.ndarray)]
        if len(found) - kept < CALLS and all(
            type(each) is np.ndarray and each.size < 10**5 for each in arrays
        ):
            found.append(deepcopy((args, kwargs)))
        return right(*args, **kwargs)

    for max_examples in (SOME, MANY):
        for law in laws:
            kept = len(found)
            if max_examples == SOME or (kept < ENOUGH and not law.examples):
                with planted(path, note):
                    fails(law, max_examples)
    return found


def differ(right: Callable[..., Any], wrong: Callable[..., Any], calls: list[Arguments]) -> bool:
    """Whether two functions give other numbers for one of the calls, or there is none."""

    def answer(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
                found = function(*deepcopy(args), **deepcopy(kwargs))
            return list(found) if isinstance(found, Iterator) else found
        except Exception as error:
            return type(error)

    return not calls or any(not same(answer(right, *call), answer(wrong, *call)) for call in calls)


def longest(values: Any) -> int:
    """The largest extent of the arrays among some arguments."""
    nested = (
        values.values() if isinstance(values, dict) else values if isinstance(values, tuple | list) else ()
    )
    return max([*getattr(values, "shape", ()), *map(longest, nested)], default=0)


def beyond(path: str, wrong: Callable[..., Any], size: int) -> Callable[..., Any]:
    """The mistake where an array has more than `size` along an axis, and the right function below."""
    right = copied(oracle(path))
    return lambda *args, **kwargs: (wrong if longest((args, kwargs)) > size else right)(*args, **kwargs)


def judge(path: str, mistakes: list[tuple[str, str]], names: list[str], above: int = 0) -> list[Result]:
    """Put each mistake in one function, (what, how made),
    to the laws that run it, until the first law sees it.

    above, a size up to which the function stays right.
    """
    laws, results = [load_laws()[name] for name in names], []
    calls: list[Arguments] = []
    by_program = {str(each): each for each in mutations(path)}

    def first(wrong: Callable[..., Any], some: list[Law], max_examples: int) -> str:
        with planted(path, wrong):
            law = next((law for law in some if fails(law, max_examples)), None)
        if law in laws:  # a law that has seen one mistake is the first to be asked about the next
            laws.remove(law)
            laws.insert(0, law)
        return law.name if law else ""

    for mistake, made in mistakes:
        own: list[Law] = []
        if made == PROGRAM:
            wrong = by_program[mistake].function
            wrong = beyond(path, wrong, above) if above else wrong
        else:
            mutant = load_mutants()[mistake]
            wrong, own = (
                mutant.function,
                [law for law in laws_for(mutant, mutant.killed_by) if law.kind != REFUSAL],
            )
        law = first(wrong, laws[:NEAR], FEW) or first(wrong, own, FEW)
        if not law:
            if made == PROGRAM:
                calls = calls or recorded(path, laws)
                other = differ(oracle(path), wrong, calls)
            else:  # planted where few inputs show it: its own laws know whether it gives other numbers
                other = any(
                    outcome(each, mutant.implementation(), max_examples=3 * SOME)[0] != "passed"
                    for each in own
                )
            if not other:
                results.append(Result(path, mistake, made, SAME))
                continue
            law = first(wrong, laws[NEAR:], FEW) or first(wrong, own or laws[:NEAR], MANY)
        results.append(Result(path, mistake, made, SEEN if law else UNSEEN, law))
    return results


def bank() -> dict[str, list[str]]:
    """The names of the planted mistakes by their function; those that compute with torch are no reference."""
    numeric = (each for each in load_mutants().values() if each.array_library == "numpy")
    return grouped(sorted((each.of, each.name) for each in numeric))


def listed() -> dict[tuple[str, str], str]:
    """The mistakes that are none, (function, mistake), each with the reason that was found for it."""
    entries = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8"))["equivalent"]
    return {(entry["of"], mistake): entry["reason"] for entry in entries for mistake in entry["mistakes"]}


def run(only: list[str], jobs: int, above: int = 0) -> list[Result]:
    """Judge every mistake in the functions whose path contains one of `only`, in as many processes; all
    where it is empty.

    above, a size up to which the functions stay right: then those of the program alone are made, and long
    laws are asked first.
    """
    right = replaced("the reference", {})
    laws = {
        name: law for name, law in load_laws().items() if law.kind != REFUSAL and not law.missing(right)[0]
    }
    runs = dict(zip(laws, in_processes(jobs, executed, [(name,) for name in laws], "laws"), strict=True))
    by_hand, work = bank(), []
    for path in functions():
        if only and not any(each in path for each in only):
            continue
        names = [name for name in laws if path in runs[name]]
        # First the laws that are about this function, then those that run few others; what is long comes
        # last.
        far = {name: (laws[name].examples > 0) != (above > 0) for name in names}
        names.sort(key=lambda name: (far[name], path not in laws[name].functions, len(runs[name]), name))
        mistakes = [
            *((str(each), PROGRAM) for each in mutations(path)),
            *((name, BANK) for name in by_hand.get(path, []) if not above),
        ]
        work += [
            (path, mistakes[start : start + PART], names[:FAR], above)
            for start in range(0, len(mistakes), PART)
        ]
    reasons = listed()
    found = [each for part in in_processes(jobs, judge, work, "mistakes") for each in part]
    return [
        replace(each, verdict=LISTED, reason=reasons[each.of, each.mistake])
        if each.verdict == UNSEEN and (each.of, each.mistake) in reasons
        else each
        for each in found
    ]


def page(results: list[Result], earlier: str = "") -> str:
    """The table as Markdown: of each function how many mistakes were made and what became of them, and the
    reasons. Functions that were not judged keep the rows that an earlier page has of them.
    """
    words = grouped((each.of, word) for each in results for word in (each.made, each.verdict))
    head, *judged = table(
        ["function", *COLUMNS], [[f"`{path}`", *map(found.count, COLUMNS)] for path, found in words.items()]
    ).splitlines()
    top, *listed = table(
        ["function", "mistake", "reason"],
        [(f"`{each.of}`", f"`{each.mistake}`", each.reason) for each in results if each.verdict == LISTED],
    ).splitlines()
    counts, _, reasons = earlier.partition(REASONS)
    rows, why = (
        _in_order([*_rows(new), *(line for line in _rows(old.splitlines()) if _of(line) not in words)])
        for new, old in ((judged, counts), (listed, reasons))
    )
    total = dict(zip(COLUMNS, np.sum([counted(line) for line in rows], axis=0, dtype=int), strict=True))
    planted = load_mutants().values()
    return f"""# Who guards the oracle

Everything is compared with `reference/`. What if `reference/` is wrong? Here the same bug is planted in
the implementation and in the reference. Comparing the two finds nothing; only a law with an independent
computation can detect it: plain loops, brute force, an exact fraction, a closed form, an example by hand.

{total[BANK]} mistakes are those of the [bank](kill_matrix.md) that compute with NumPy. The others of the
bank compute with torch, so the reference cannot make them. {total[PROGRAM]} mistakes are made by a
program, which replaces one operator, number, axis, bound or call in the source of a function. We do not
change code that only checks arguments. `make oracle` made this page.

- **Seen**: {total[SEEN]}. A law fails.
- **Same numbers**: {total[SAME]}. The function gives the same numbers for all inputs that its laws draw;
  in the bank, these are mistakes that only change which arguments are accepted.
- **Equivalent**: {total[LISTED]}. The function gives different numbers, and a reason says why no law can
  object.
- **Unseen**: {total[UNSEEN]}.

These figures speak of these mistakes, and of no others. A mistake that begins at a size is seen if a law
draws that size: {sum(bool(each.above) for each in planted)} of the bank begin at one, such as a budget of
100 or the last of several whole tiles. The program's mistakes hold at every size.
`python -m evictionary.spec_tests.proof.oracle --above 100` makes them where an array is longer than 100
alone, in the functions named by `--only`. *Same numbers* then also means that no law draws such a size.

{chr(10).join([head, judged[0], *rows])}
{REASONS}
{chr(10).join([top, listed[0], *why])}
"""


def _rows(lines: list[str]) -> list[str]:
    """The lines of a table that begin with a function."""
    return [line for line in lines if line.startswith("| `")]


def _of(line: str) -> str:
    return line.split("`")[1]


def _in_order(lines: list[str]) -> list[str]:
    """The lines of the functions that there are, in the order of the reference."""
    order = list(functions())
    return sorted((line for line in lines if _of(line) in order), key=lambda line: order.index(_of(line)))


def counted(line: str) -> list[int]:
    """The numbers of a row of the page, as COLUMNS has them."""
    return [int(cell.rstrip(" |")) for cell in line.split(" | ")[1:]]


def main(
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="FUNCTION", help="A part of `stem.function`; the page keeps the others."),
    ] = None,
    above: Annotated[
        int,
        typer.Option(
            metavar="SIZE", help="Make mistakes that only arrays longer than this meet; no page then."
        ),
    ] = 0,
    jobs: Annotated[int, typer.Option(help="Processes.")] = 2,
    file: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", help="Write every mistake with its verdict, and the law that saw it."
        ),
    ] = None,
) -> None:
    """Plant mistakes in the reference, and write which laws see them. The exit code is 1 for one unseen."""
    results = run(only or [], jobs, above)
    if file:
        file.write_text(json.dumps([asdict(each) for each in results], indent=1) + "\n", encoding="utf-8")
    if not above:
        earlier = PAGE.read_text(encoding="utf-8") if only and PAGE.exists() else ""
        PAGE.write_text(page(results, earlier), encoding="utf-8")
    unseen = [each for each in results if each.verdict == UNSEEN]
    for each in unseen:
        print(f"unseen: {each.of}: {each.mistake}")
    total = Counter(each.verdict for each in results)
    print(
        ", ".join(f"{total[word]} {word}" for word in (SEEN, SAME, LISTED, UNSEEN)) + f", of {len(results)}"
    )
    raise typer.Exit(int(bool(unseen)))


if __name__ == "__main__":
    typer.run(main)
