"""The report on a failing law: what does not hold, the smallest input, the misconception that it matches,
and a repro.
"""

import re
import shlex
import traceback
from fractions import Fraction
from typing import Any

import numpy as np

from evictionary.spec_tests.judge import compiled, watch
from evictionary.spec_tests.judge.arithmetic import EPSILON
from evictionary.spec_tests.judge.cases import Case
from evictionary.spec_tests.judge.degenerate import REFUSAL
from evictionary.spec_tests.judge.implementation import ANY, AS, Implementation
from evictionary.spec_tests.judge.law import LAWS, Law
from evictionary.spec_tests.judge.process import PREFIX, ProgramFailed
from evictionary.spec_tests.judge.tolerance import Unlike, Violation
from evictionary.spec_tests.judge.watch import NotAsked
from evictionary.spec_tests.proof.planted import Mutant
from evictionary.spec_tests.verdict.diagnosis import misconceptions, numbers_in, sign

# Options of this run that are not the default: the command for one law repeats them.
ASKED: list[str] = []

AGAIN = "to see it again, run"
UNCHECKED = 'the file may say CONVENTIONS = ("unchecked",): it checks no argument'
_MOST_LINES = 10  # of an input
_MOST_PRINTED = 128  # numbers in an argument of a program that makes a call again


def told(law: Law, implementation: Implementation, parts: list[tuple[str, str]]) -> str:
    """The parts of a report, a line each below the requirement that does not hold."""
    lines = [
        f"{_functions(law)} of {implementation} does not refuse bad input as {law.requirement.id} says"
        if law.kind == REFUSAL and ANY not in law.functions
        else f"{law.requirement.id} does not hold for {_functions(law)} of {implementation}"
    ]
    for name, text in parts:
        lines += (
            [f"  {name}", *(f"    {line}" for line in text.splitlines())]
            if name == AGAIN
            else [f"  {name:16}{indented(text)}"]
        )
    return "\n".join(lines)


def said(
    law: Law, implementation: Implementation, error: BaseException, matches: list[Mutant] | None = None
) -> list[tuple[str, str]]:
    """The parts of a report, each with its name, in the order in which they are read."""
    matches = misconceptions(law, implementation) if matches is None else matches
    requirement, calls = law.requirement, implementation.calls
    related = isinstance(error, Unlike)
    if isinstance(error, Violation):
        names = ("its own answer", "the other") if related else ("expected", "got")
        given = zip(names, (error.expected, error.got), strict=True)
        wrong = [
            ("what is wrong", error.message),
            *((name, _show(each)) for name, each in given if each is not None),
            ("worst", _worst(error.expected, error.got)),
        ]
    else:
        frame = _raised_in(error, implementation)
        wrong = [
            ("what is wrong", f"{type(error).__name__}: {_first_line(error)}"),
            ("raised in", f"{frame.filename}:{frame.lineno}, {frame.name}: {frame.line}"),
        ]
    known, judged_in = "your numbers match a known bug", implementation.dtype
    if law.kind == REFUSAL and ANY not in law.functions:
        known = "a known bug does the same"
    own = calls[-1].dtype if calls else judged_in
    wider = f"it answers in {own} and is judged in {judged_in}; `--dtype {own}` judges it in its own"
    make_program = repro_of_a_relation if related else repro
    program = make_program(law, implementation) if calls else ""
    drawn = {name: each for name, each in implementation.drawn.items() if not isinstance(each, np.ndarray)}
    # what is large is not made smaller
    is_small = not law.examples and not implementation.domain.excludes_small
    parts = [
        *wrong,
        *(
            ("misconception", f"{known}: {each.misconception} ({each.killed_by}{above})")
            for each in matches
            for above in [each.above and f", right up to {each.above}"]
        ),
        ("it looks like", "" if matches else sign(implementation, law)),
        ("the dtype", wider if EPSILON.get(own, 0) > EPSILON[judged_in] else ""),
        *(
            ("undefined", f"{place}: `{source}` has no `other`: behind the mask it holds no number")
            for place, source in compiled.UNFILLED.items()
        ),
        ("not wanted?", UNCHECKED if law.kind == REFUSAL and ANY not in law.functions else ""),
        ("the law", law.sentence),
        ("the equation", f"{requirement.statement} ({requirement.source})"),
        ("what holds", requirement.mended),
        (
            f"{'smallest' if is_small else 'an'} input",
            _shortened(arguments(calls[-1].arguments)) if calls else "",
        ),
        (AGAIN, program),
        ("made of", ", ".join(f"{name} = {each!r}" for name, each in drawn.items() if calls and not program)),
        ("this law alone", _alone(law, implementation)),
    ]
    return [(name, text) for name, text in parts if text]


def _alone(law: Law, implementation: Implementation) -> str:
    asked = [f"--dtype {implementation.dtype}" if "--dtype" in each else each for each in ASKED]
    if purpose := implementation.origin.partition(AS)[2]:
        asked = [f"--method {purpose}" if "--method" in each else each for each in asked]
    words = ["evictionary judge", _named(implementation.origin), *asked, "--law", law.name.partition("::")[2]]
    return " ".join(words)


def _first_line(error: BaseException) -> str:
    """What an error says, in a line. Triton's compiler says where, shows the source, and says why last."""
    lines = str(error).strip().splitlines() or [""]
    return f"{lines[0]} {lines[-1]}" if type(error).__name__ == "CompilationError" else lines[0]


def _raised_in(error: BaseException, implementation: Implementation) -> traceback.FrameSummary:
    """The line that raised an error; of a call that a function does not accept, the line that defines it."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = (compiled.__file__, compiled.folder() or compiled.__file__)
    own = [each for each in frames if not each.filename.startswith(theirs)]
    frame = (own or frames)[-1]
    if frame.filename == watch.__file__ and implementation.calls:
        stem, name = implementation.calls[-1].function.split(".")
        if code := getattr(getattr(implementation.modules[stem], name), "__code__", None):
            return traceback.FrameSummary(code.co_filename, code.co_firstlineno, code.co_name)
    return frame


def _functions(law: Law) -> str:
    return " and ".join(law.functions).replace(ANY, "the functions")


def unanswered(law: Law, subject: Any, what: str, line: str = "") -> str:
    """Say why a law has no answer; line is where the implementation was, if that is known."""
    judged = isinstance(subject, Implementation)
    return "\n".join(
        [
            f"{law.requirement.id} has no answer of {f'{_functions(law)} of ' * judged}{subject}",
            f"  what is wrong   {what}",
            *([f"  it was at       {line}"] if line else []),
            f"  the law         {law.sentence}",
            *([f"  this law alone  {_alone(law, subject)}"] if judged else []),
        ]
    )


def unanswerable(implementation: Implementation, error: BaseException) -> tuple[str, str] | None:
    """Why an error is no answer to a law, and where it was
    raised; None for one that says something of the mathematics.
    """
    if isinstance(error, ProgramFailed) or (isinstance(error, NotAsked) and error.__cause__ is None):
        return str(error), ""
    if found := compiled.fault(error):
        return found
    if isinstance(error, NotAsked):
        what = str(error)
    elif (
        isinstance(error, MemoryError)
        or "OutOfMemoryError" in type(error).__name__
        or "can't allocate memory" in str(error)
    ):
        arrays = [
            each
            for call in implementation.calls[-1:]
            for each in call.arguments.values()
            if isinstance(each, np.ndarray)
        ]
        tokens = max((each.shape[-2] for each in arrays if each.ndim > 1), default=0)
        what = (
            f"out of memory at {tokens:,} tokens: declare `max_length` (DOMAIN or --domain) if it takes fewer"
        )
    else:
        return None
    frames = traceback.extract_tb((error.__cause__ or error).__traceback__)
    frame = ([each for each in frames if "site-packages" not in each.filename] or frames)[-1]
    return what, f"{frame.filename}:{frame.lineno}, {frame.name}"


def _named(origin: str) -> str:
    """What was judged, as the command line names it."""
    program = origin.removeprefix(PREFIX)
    origin = origin.partition(AS)[0]
    return shlex.quote(origin) if program.partition(AS)[0] == origin else f"--exec {shlex.quote(program)}"


def repro(law: Law, implementation: Implementation) -> str:
    """A program that makes the last recorded call again and prints it beside the reference.

    Where it would be a page of numbers, since a law made a large input of its case, the program asks the law
    again; it is empty where that is a page of numbers too.
    """
    call = implementation.calls[-1]
    path = call.function
    arguments = ", ".join(
        key if place < call.positional else f"{key}={key}" for place, key in enumerate(call.arguments)
    )
    cases = {key: value for key, value in implementation.drawn.items() if isinstance(value, Case)}
    literals = {
        key: _from_case(value, cases, implementation)
        or ("" if numbers_in(value) > _MOST_PRINTED else _literal(value))
        for key, value in call.arguments.items()
    }
    if not all(literals.values()):
        return _asking(law, implementation)
    is_named = any("case." in literal for literal in literals.values())
    case = [f"case = {next(iter(cases.values()))!r}"] if is_named else []
    return "\n".join(
        [
            "import numpy as np",
            *(["from evictionary.spec_tests.judge.cases import Case"] if case else []),
            *sorted({line for value in call.arguments.values() for line in _imports(value)}),
            *["from numpy import inf, nan"]
            * any(re.search(r"\b(inf|nan)\b", each) for each in literals.values()),
            "from evictionary.spec_tests.judge.implementation import load, oracle",
            *case,
            *(f"{key} = {literal}" for key, literal in literals.items() if "impl." not in literal),
            _loading(implementation),
            *(f"{key} = {literal}" for key, literal in literals.items() if "impl." in literal),
            _expecting(law, f'oracle("{path}")({arguments})'),
            f'print("got     ", impl.{path}({arguments}))',
        ]
    )


def _asking(law: Law, implementation: Implementation) -> str:
    """A program that asks a law again with what it had drawn, and prints the last call of that function
    beside the reference.
    """
    stated = _stated(law, implementation)
    if stated is None:
        return ""
    path = implementation.calls[-1].function
    return f"""\
{_odd_numbers(stated)}from contextlib import suppress
from evictionary.spec_tests.judge.cases import Case
from evictionary.spec_tests.judge.implementation import load, oracle
from evictionary.spec_tests.judge.law import load_laws
{_loading(implementation)}
with suppress(Exception):
    load_laws()["{law.name}"].check(impl, {stated})
call = [call for call in impl.calls if call.function == "{path}"][-1]
args, kwargs = call.given
{_expecting(law, "oracle(call.function)(*args, **kwargs)")}
print("got     ", impl.{path}(*args, **kwargs))"""


def repro_of_a_relation(law: Law, implementation: Implementation) -> str:
    """A program that asks a law of two answers again, and
    prints both; empty where it would be a page of numbers.
    """
    stated = _stated(law, implementation)
    if stated is None:
        return ""
    return f"""\
{_odd_numbers(stated)}from evictionary.spec_tests.judge.cases import Case
from evictionary.spec_tests.judge.implementation import load
from evictionary.spec_tests.judge.law import load_laws
from evictionary.spec_tests.judge.tolerance import Unlike
{_loading(implementation)}
try:
    load_laws()["{law.name}"].check(impl, {stated})
except Unlike as error:
    print("its own answer", error.expected)
    print("the other     ", error.got)"""


def _odd_numbers(stated: str) -> str:
    """The line that a program needs for the numbers that Python has no literal of."""
    return "from numpy import inf, nan\n" if "inf" in stated or "nan" in stated else ""


def _stated(law: Law, implementation: Implementation) -> str | None:
    """What a law had drawn, as the arguments of a call; None where no line can say it."""
    drawn = {
        name: value.item() if isinstance(value, np.generic) else value
        for name, value in implementation.drawn.items()
    }
    if law.name not in LAWS or not all(map(_is_stated, drawn.values())):
        return None
    return ", ".join(f"{name}={value!r}" for name, value in drawn.items())


def _loading(implementation: Implementation) -> str:
    return (
        f'impl = load("{implementation.origin}", device="{implementation.device}", '
        f'dtype="{implementation.dtype}")'
    )


def _expecting(law: Law, call: str) -> str:
    """The line that prints what is expected; of a law of refusals that is the error."""
    line = f'print("expected", {call})'
    if law.kind != REFUSAL:
        return line
    return f'try:\n    {line}\nexcept ValueError as error:\n    print("expected a ValueError:", error)'


def _is_stated(value: Any) -> bool:
    """Whether the repr of a value makes it again."""
    return isinstance(value, Case | bool | int | float | str | None) or (
        isinstance(value, list | tuple) and all(map(_is_stated, value))
    )


def _from_case(value: Any, cases: dict[str, Case], implementation: Implementation) -> str:
    """`impl.round(case.keys)` where a large array is one of
    the drawn case, so that nobody reads ten thousand numbers.
    """
    if not isinstance(value, np.ndarray) or value.size <= 64 or not cases:
        return ""
    case = next(iter(cases.values()))
    arrays = {name: getattr(case, name) for name in ("keys", "values", "next_keys", "next_values", "queries")}
    arrays["queries[:, :, 0]"] = case.queries[:, :, 0]
    alike = (name for name, array in arrays.items() if np.array_equal(implementation.round(array), value))
    return next((f"impl.round(case.{name})" for name in alike), "")


def _imports(value: Any) -> list[str]:
    """The line that `_literal` needs for a named tuple or a fraction."""
    kind = type(value)
    is_named = isinstance(value, Fraction) or hasattr(value, "_fields")
    return [f"from {kind.__module__} import {kind.__name__}"] if is_named else []


def _literal(value: Any) -> str:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = ", ".join(
            f"{key}={_literal(entry)}" for key, entry in zip(value._fields, value, strict=True)
        )
        return f"{type(value).__name__}({fields})"
    if isinstance(value, np.ndarray):
        dtype = "" if value.dtype == np.float64 else f", dtype=np.{value.dtype.name}"
        return f"np.array({value.tolist()}{dtype}).reshape({value.shape})"
    return repr(value)


def _worst(expected: Any, got: Any) -> str:
    """Where two arrays too large to be read differ most, and by what."""
    both = isinstance(expected, np.ndarray) and isinstance(got, np.ndarray) and expected.shape == got.shape
    if not both or got.size <= 60 or not {expected.dtype.kind, got.dtype.kind} <= set("fiub"):
        return ""
    with np.errstate(invalid="ignore"):
        apart = np.where(expected == got, 0, np.abs(np.subtract(got, expected, dtype=np.float64)))
    apart[np.isnan(apart)] = np.inf
    at = np.unravel_index(int(apart.argmax()), apart.shape)
    place = ", ".join(map(str, at))
    return (
        f"at [{place}]: expected {expected[at]!s}, got {got[at]!s}; {np.count_nonzero(apart)} of "
        f"{apart.size} differ"
    )


def _shortened(text: str) -> str:
    """The first lines of an input: the program that makes the call again has all of it."""
    first, more = text.split("\n")[:_MOST_LINES], text.count("\n") + 1 - _MOST_LINES
    return "\n".join([*first, *([f"... {more} lines more"] if more > 0 else [])])


def arguments(given: dict[str, Any]) -> str:
    """The arguments of a call, a line each; of large arrays the ends."""
    return "\n".join(f"{name} = {_show(value)}" for name, value in given.items())


def _show(value: Any) -> str:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return "\n".join(f"{name} = {_show(entry)}" for name, entry in zip(value._fields, value, strict=True))
    if isinstance(value, np.ndarray):
        with np.printoptions(precision=9, suppress=True, threshold=60, edgeitems=3, linewidth=110):
            return f"{value!s}" + (f"   shape {value.shape}" if value.size != 1 else "")
    return str(value)


def indented(text: str) -> str:
    """The lines after the first, moved to the column of the first."""
    return text.replace("\n", "\n" + " " * 18)
