"""Checks the laws on one submission: oracle, seeds and verdict stay in the parent, the student's code runs
in a child process.
"""

import contextlib
import functools
import hashlib
import importlib.util
import inspect
import pickle
import re
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import reject
from hypothesis.errors import Flaky

from evictionary.classroom import checks, sandbox
from evictionary.classroom.assignment import Assignment, law_named
from evictionary.classroom.child import Child, StudentError, clean
from evictionary.classroom.inputs import decided_by
from evictionary.classroom.judgement import Judgement, Line, Run, empty, reference, to_nobody
from evictionary.classroom.step import Step
from evictionary.errors import InstallError
from evictionary.spec_tests.judge import compiled
from evictionary.spec_tests.judge.degenerate import REFUSAL
from evictionary.spec_tests.judge.implementation import Call, Implementation, oracle
from evictionary.spec_tests.judge.law import Law, load_laws
from evictionary.spec_tests.judge.outcome import SECONDS, TimedOut, outcome, time_limit
from evictionary.spec_tests.judge.remote import Gone
from evictionary.spec_tests.judge.tolerance import Allowance, Violation
from evictionary.spec_tests.verdict import report
from evictionary.spec_tests.verdict.diagnosis import differs, misconceptions, numbers_in

CHECK_EXAMPLES, GRADE_EXAMPLES = 8, 25
TIMED_SHAPE = (1, 8, 2**16, 128)  # the keys that a kernel is timed with: 256 MiB in float32
LONGEST_TEXT = 20_000
MOST_SHOWN = 128  # numbers of an input beside a message
MOST_UNASKED = 2**16  # numbers in an answer whose shape nothing says, or is wrong


def judge(
    source: bytes,
    assignment: Assignment,
    *,
    secret: bytes | None = None,
    examples: int = CHECK_EXAMPLES,
    constants: dict[str, float] | None = None,
    origin: str = "",
    seconds: float | None = None,
    explain: bool = True,
    check_seed: int = 0,
    needs: tuple[str, ...] = (),
    told: Callable[[str, int, int], None] = to_nobody,
) -> Judgement:
    """Judge the text of a student's file, step by step.

    Each law has a seed of its own, made from the secret of a grade, or without one from check_seed. constants
    are the student's own defaults, where the course uses them. origin is the path that the repro names;
    seconds bounds the waiting for the child in each step. explain looks for the smallest counterexample of
    the first failure. needs names walls without which no code runs: RuntimeError then. told is called with
    what is done now, how much is done, and of how much.
    """
    started = time.monotonic()
    result = empty(assignment)
    if reason := blocked(assignment):
        for line in result.lines:
            line.verdict, line.reason = "blocked", reason
        return result
    with put_down(source, assignment.stem) as path:
        kind = _contest().Contest if assignment.contest else ByLaws
        run = kind(
            assignment,
            path,
            origin or assignment.file,
            secret,
            examples,
            constants or {},
            seconds,
            check_seed,
            needs=needs,
            told=told,
        )
        run.judge_steps(result, explained=not explain)
    if run.tried:
        result.notes.append(f"the code tried: {', '.join(sorted(run.tried))}")
    for line in result.lines:
        line.reason, line.message, line.repro = (
            clean(each, LONGEST_TEXT) for each in (line.reason, line.message, line.repro)
        )
    result.seconds = round(time.monotonic() - started, 2)
    return result


@contextlib.contextmanager
def put_down(source: bytes, stem: str) -> Iterator[Path]:
    """A file of this text in a folder of its own, for a child
    to read. A warning would only repeat what a law says.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, warnings.catch_warnings():
        path = Path(folder) / f"{stem}.py"
        path.write_bytes(source)
        path.parent.chmod(0o755)
        path.chmod(0o644)
        warnings.simplefilter("ignore")
        yield path


def _contest() -> types.ModuleType:
    # it imports torch, which other assignments need not have
    return importlib.import_module("evictionary.classroom.contest")


def lacking(assignment: Assignment) -> str:
    """What this machine lacks for the assignment and the way out, or an empty string."""
    if told := sandbox.lacking():
        return told
    needed = ["torch"] * (assignment.library == "torch") + ["triton"] * assignment.interpret
    missing = next((module for module in needed if not _is_there(module)), "")
    advice = "which the assignment needs: pip install 'evictionary[torch]'"
    if missing == "triton" and sys.platform != "linux":
        advice = (
            "which the assignment needs, and which is for Linux: on Windows use WSL, on macOS a container"
        )
    return f"this machine has no {missing}, {advice}" if missing else ""


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def blocked(assignment: Assignment) -> str:
    """Why this machine cannot judge the assignment, or an empty string."""
    if reason := lacking(assignment):
        return reason
    if assignment.contest:
        try:
            _contest().load_model()
        except InstallError as error:
            return f"this machine has no model: {error}"
    return ""


def gpu_milliseconds(assignment: Assignment, path: Path) -> float:
    """The median time of the student's score on this machine's GPU, in a child without limits: CUDA does
    not run with them.
    """
    keys = np.random.default_rng(0).standard_normal(TIMED_SHAPE, dtype=np.float32)
    with Child(
        path, assignment.stem, library="torch", limits=assignment.limits(300), device="cuda", confine=False
    ) as child:
        return float(child.call("score", keys, time_it=True))


# The oracle's results by input: a class is graded with the same seeds, so most inputs come again with the
# next submission.
_remembered: dict[bytes, Allowance] = {}
MOST_REMEMBERED = 20_000


class _WrongForm(Violation):
    """An answer that is not of the oracle's shape and precision; `got` is the answer if it is small."""


class _Judged(Implementation):
    """An implementation that calls the oracle once for each input.

    calm says that inputs on which a softmax without its maximum overflows are left out, because another step
    judges them; slow, that an interpreter computes. child is the student's process, for what is no function
    of a method; library is the one it computes with.
    """

    calm = False
    slow = False
    child: Child
    library: str

    def __repr__(self) -> str:
        return f"{self.name} ({self.library}, {self.device}, {self.dtype})"

    def allowance(self, path: str, *args: Any, pick: int | None = None, **kwargs: Any) -> Allowance:
        key = hashlib.sha256(pickle.dumps((path, self.dtype, pick, args, kwargs))).digest()
        if key not in _remembered:
            if len(_remembered) >= MOST_REMEMBERED:
                _remembered.clear()
            _remembered[key] = super().allowance(path, *args, pick=pick, **kwargs)
        return _remembered[key]

    def call(self, path: str, *args: Any, **kwargs: Any) -> Any:
        if self.calm and path == "lagkv.score" and _overflows(*args):
            reject()
        try:
            return super().call(path, *args, **kwargs)
        except _WrongForm as error:
            self.calls[-1].result = error.got  # a known mistake is known by it
            raise

    def native(self, value: Any) -> Any:
        """Rows of channels in the memory, however the law
        came by them: a step of its own asks about strides.
        """
        found = super().native(value)
        if self.dtype == "bfloat16" and isinstance(found, np.ndarray) and found.dtype.kind == "f":
            found = found.astype(np.float32)  # NumPy has no bfloat16; these numbers are some
        return np.require(found, requirements="C") if isinstance(found, np.ndarray) else found

    @contextlib.contextmanager
    def refuses(self, pattern: str = "") -> Iterator[None]:
        """As the laws have it, but what is wanted is said to
        a student: the words that the message has to have.
        """
        try:
            with super().refuses(pattern):
                yield
        except Violation as error:
            if isinstance(error.expected, str):  # it says how the input was refused
                words = " or ".join(repr(word) for word in pattern.split("|"))
                error.expected = "a ValueError" + (f" with {words} in its message" if words else "")
            raise


def _overflows(keys: np.ndarray, values: np.ndarray, next_keys: np.ndarray, next_values: np.ndarray) -> bool:
    """Whether exp may overflow at some deviation of a partition."""
    try:
        scaled = [oracle("lagkv.normalise")(*each) for each in ((keys, next_keys), (values, next_values))]
    except ValueError:  # shapes that a refusal is about
        return False
    return any(each.std(axis=-1).max() > 500 for each in scaled)


def _parts(answer: Any) -> list[Any]:
    """The arrays and numbers of an answer, those of a state that it holds among them."""
    return [part for entry in answer for part in _parts(entry)] if isinstance(answer, tuple) else [answer]


def _precision(part: Any) -> int:
    """The bytes of one number of a float array, 0 for everything else."""
    return part.dtype.itemsize if isinstance(part, np.ndarray | np.generic) and part.dtype.kind == "f" else 0


@dataclass
class ByLaws(Run):
    """A submission that is judged by laws, a step after another."""

    unloadable: str = ""  # why the file cannot even be imported
    explained: bool = False  # whether a failure has been explained
    is_slow: bool = False  # a step has run out of time twice

    def judge_steps(self, result: Judgement, explained: bool) -> None:
        """Judge the steps in their order, each where those that it needs have passed."""
        self.explained = explained
        steps = self.assignment.steps
        for done, (step, line) in enumerate(zip(steps, result.lines, strict=True)):
            self.told(f"judging {self.origin}: {line.title}", done, len(steps))
            passed = {each.name for each in result.lines if each.verdict == "passed"}
            missing = [name for name in step.needs if name not in passed]
            if step.check == compiled.DEVICE and not compiled.folder():
                line.verdict, line.reason = "blocked", NO_EXECUTOR
            elif missing:
                line.reason = f"needs {', '.join(missing)} first"
            elif not self.unloadable:
                self.judge(step, line, result)
        if self.unloadable:
            for line in (each for each in result.lines if not each.laws):
                line.verdict, line.reason = "not judged yet", "needs a file that can be loaded"
            told = f"{self.unloadable}. No step is judged before it can."
            result.lines.insert(
                0,
                Line(
                    "file", "", "Your file can be loaded", 0, "failed", reason=self.unloadable, message=told
                ),
            )

    def judge(self, step: Step, line: Line, result: Judgement) -> None:
        """Judge one step, and explain the first failure.

        A step that runs out of time is judged once more with three times as much time, because the machine
        may have been busy.
        """
        failing, late = self._try(step, line, result, patience=1)
        if late and not self.is_slow:
            line.laws, line.reason, line.message = {}, "", ""
            failing, self.is_slow = self._try(step, line, result, patience=3)
        if failing is not None and not self.explained:
            self.explained = True
            # In another child, because this takes more calls than judging; the verdict does not depend on
            # this child.
            with contextlib.suppress(Exception, TimedOut), self.child(3, **on_device(step)) as child:
                self.explain(failing, self.implementation(child, step), line, step)

    def _try(self, step: Step, line: Line, result: Judgement, patience: int) -> tuple[Law | None, bool]:
        """Check the laws of a step on a child; returns the
        first law that fails, and whether the time ran out.
        """
        line.verdict, failing, loaded = "failed", None, False
        try:
            with self.child(patience, **on_device(step)) as child:
                loaded = True
                result.walls = child.walls
                implementation = self.implementation(child, step)
                for law in self.laws(step):
                    missing = law.missing(implementation)[1]
                    word, message = (
                        ("failed", missing) if missing else outcome(self.drawn(law, step), implementation)
                    )
                    line.laws[law.name] = word
                    if word != "passed" and not line.reason:
                        died = message.startswith(Gone.__name__)
                        message = plain(message)
                        if died and "SIGSEGV" in message:
                            message += ": a load or a store outside of an array. Does each have its mask?"
                        is_whole = bool(missing) or died or word == "timed out"  # the message says it all
                        line.reason = message if is_whole else law.sentence
                        line.message = message if is_whole else _stated(law, implementation, message)
                        failing = None if is_whole else law
                if line.laws and all(word == "passed" for word in line.laws.values()):
                    line.verdict, line.points = "passed", step.points
                return failing, child.is_late or "timed out" in line.laws.values()
        except (Gone, StudentError) as error:
            line.reason = line.message = str(error)
            is_late = isinstance(error, Gone) and error.is_late
            if not loaded and not (is_late and patience == 1):
                self.unloadable = f"your file cannot be loaded: {error}"
            return None, is_late

    def implementation(self, child: Child, step: Step) -> Implementation:
        """The functions of the child as an implementation; arrays
        are sent as NumPy, whatever library the child uses.

        The paper's defaults are filled in if a law leaves them out, because a student's own constants may
        differ; the step that is about these constants has to see the student's.
        """
        one = self.assignment
        module, by_paper = types.ModuleType(one.stem), reference(one.stem)
        constants = {} if step.check == "constants" else self.constants
        for name in child.functions:
            setattr(module, name, _proxy(child, name, getattr(by_paper, name, None), constants))
        device = on_device(step).get("device", "cpu")
        judged = _Judged(Path(self.origin).stem, {one.stem: module}, self.origin, "numpy", device, one.dtype)
        judged.child, judged.calm, judged.library = child, step.calm, one.library
        return judged

    def laws(self, step: Step) -> list[Law]:
        own = (
            [checks.law(step, self.assignment.stem, self.constants, self.seed(step.check))]
            if step.check
            else []
        )
        return [*map(law_named, step.laws), *own]

    def drawn(self, law: Law, step: Step, shrinks: bool = False) -> Law:
        count = step.thoroughness * self.examples
        # Of the inputs of thousands of tokens, a law says itself how few it needs.
        return decided_by(self.seed(law.name), law, min(count, law.examples or count), shrinks=shrinks)

    def explain(self, law: Law, implementation: Implementation, line: Line, step: Step) -> None:
        """Run a failing law once more with shrinking, and write the student's message."""
        load_laws()  # what else of the function fails is among all of them
        told = self.failure(law, implementation, step)
        if told is None:
            line.message = f"{line.message}\n{TWO_ANSWERS}"
            return
        matches = misconceptions(law, implementation)
        _last_the_one_that_failed(implementation.calls, implementation.dtype)
        parts = report.said(law, implementation, told, matches)
        # A student cannot open the grader's own files, nor run its own laws.
        is_hidden = {
            "raised in": "classroom/" in dict(parts).get("raised in", ""),
            "this law alone": law.name.startswith(checks.OWN),
            "not wanted?": True,  # what is handed in has to refuse what the handout says
        }
        shown = [(name, text) for name, text in parts if not is_hidden.get(name)]
        line.message = plain(report.told(law, implementation, shown))
        if law.kind == REFUSAL and isinstance(told, StudentError) and not matches:
            line.message += WANTED
        line.repro = report.repro(law, implementation) if implementation.calls else ""
        if line.repro and self.assignment.interpret and not on_device(step):
            line.repro = f'import os\nos.environ.setdefault("TRITON_INTERPRET", "1")\n{line.repro}'
        line.misconceptions = [match.misconception for match in matches]

    def failure(self, law: Law, implementation: Implementation, step: Step) -> BaseException | None:
        """Why a law fails with the smallest input that is found; None where it holds this time."""
        try:
            with time_limit(SECONDS):
                self.drawn(law, step, shrinks=True).check(implementation)
        except (KeyboardInterrupt, TimedOut):
            raise
        except BaseException as error:
            return _told(error)
        return None


NO_EXECUTOR = (
    "this machine does not execute compiled kernels: `make build/compiled` in a clone, or the commands of "
    "docs/compiled.md and EVICTIONARY_COMPILED=FOLDER"
)


def on_device(step: Step) -> dict[str, Any]:
    """The settings of the process that a step is asked in: that of compiled code has no interpreter."""
    # What Triton's compiler tries is not the student's doing.
    is_compiled = step.check == compiled.DEVICE
    return {"device": compiled.DEVICE, "interpret": False, "tried": set()} if is_compiled else {}


def plain(message: str) -> str:
    """A message without the names of our own exceptions."""
    return re.sub(rf"\b({StudentError.__name__}|{Gone.__name__}): ", "", message)


def _stated(law: Law, implementation: Implementation, message: str) -> str:
    """The law that fails, what is wrong, and the input of the last call if it is short; nothing smaller
    has been looked for.
    """
    given = implementation.calls[-1].arguments if implementation.calls else {}
    is_short = 0 < numbers_in(tuple(given.values())) <= MOST_SHOWN
    shown = f"\n  an input        {report.indented(report.arguments(given))}" if is_short else ""
    return f"  what is wrong   {message}\n  the law         {law.sentence}{shown}"


TWO_ANSWERS = (
    "your function gives two answers to one input, or fails on it only sometimes: does it keep something "
    "between calls (a global, "
    "a default argument, a cache), or draw random numbers?"
)


def _told(error: BaseException) -> BaseException:
    """The error to show: the first one of a group; one of our own if the same input fails at one time and
    not at another.
    """
    if isinstance(error, Flaky):
        inner = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else None
        return inner if isinstance(inner, Gone) else Violation(TWO_ANSWERS)
    return _told(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def _last_the_one_that_failed(calls: list[Call], dtype: str) -> None:
    """Put the last call whose result is not the oracle's at the end: that call is shown, and a law may
    make right ones after it.
    """
    if not calls or calls[-1].result is None:  # the last call raised
        return
    for place in reversed(range(len(calls))):
        if calls[place].result is not None and differs(oracle(calls[place].function), calls[place], dtype):
            calls.append(calls.pop(place))
            return


WANTED = (
    "\n  wanted          a ValueError: bad input is refused by `raise ValueError(...)`, not by assert "
    "or by chance"
)


def _proxy(child: Child, name: str, by_paper: Any, constants: dict[str, Any]) -> Callable[..., Any]:
    """A function of the child as one of this process.

    by_paper, the reference's function of that name if there is one, gives the form of the result, and the
    defaults of arguments for which a student may have personal constants.
    """
    if not isinstance(by_paper, types.FunctionType):
        return functools.partial(child.call, name)
    parameters = inspect.signature(by_paper).parameters
    defaults = {key: one.default for key, one in parameters.items() if key in constants}

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs = {**defaults, **kwargs}
        answer = child.call(name, *args, **kwargs)
        try:
            right = by_paper(*args, **kwargs)
        except Exception:  # bad input; the law says what is right then
            if sum(getattr(part, "size", 1) for part in _parts(answer)) > MOST_UNASKED:
                raise _WrongForm(
                    f"{name} returned more than {MOST_UNASKED} numbers for an input that it should refuse"
                ) from None
            return answer
        return _of_the_form(name, answer, right, max(map(_precision, args), default=0))

    return call


def _of_the_form(name: str, answer: Any, right: Any, precision: int) -> Any:
    """The answer, if it has the parts, the shapes and the precision of the right one, or that of the input
    where it is lower.

    A list may stand for a tuple. Raises StudentError for other parts, and Violation for other arrays: before
    they are converted or kept. The laws judge the numbers.
    """
    if isinstance(right, list) and isinstance(answer, list | tuple):
        return list(_of_the_form(name, tuple(answer), tuple(right), precision))
    fields = getattr(right, "_fields", ())
    answer = tuple(answer) if isinstance(answer, list) and isinstance(right, tuple) else answer
    got, wanted = _parts(answer), _parts(right)
    alike = isinstance(answer, tuple) == isinstance(right, tuple) and getattr(answer, "_fields", ()) == fields
    known = np.ndarray | np.generic | int | float | Fraction | str | None
    if not (alike and all(isinstance(part, known) for part in got) and len(got) == len(wanted)):
        kind = type(answer).__name__
        shown = f"a {kind} of {len(answer)}" if isinstance(answer, tuple | list) else f"one {kind}"
        several = (
            f"{type(right).__name__}({', '.join(fields)})" if fields else f"a tuple of {len(wanted)} arrays"
        )
        expected = several if isinstance(right, tuple) else "one array or number"
        raise StudentError("TypeError", f"{name} returned {shown}, wanted {expected}", "")
    kept = answer if sum(np.size(part) for part in got) <= MOST_UNASKED else None
    for part, one in zip(got, wanted, strict=True):
        if isinstance(one, int) and not isinstance(part, int | np.integer):
            raise _WrongForm(
                f"{name} returned {part!r}, a {type(part).__name__}; wanted a whole number, such as {one}",
                one,
                part,
            )
        if np.shape(part) != np.shape(one):
            raise _WrongForm(f"{name} returned shape {np.shape(part)}, wanted {np.shape(one)}", None, kept)
        if 0 < _precision(part) < min(_precision(one), precision):
            told = (
                f"{name} returned {part.dtype}, wanted {one.dtype}, the dtype of its input: compute in "
                f"{one.dtype}"
            )
            raise _WrongForm(told, None, kept)
    return answer
