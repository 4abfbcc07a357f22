"""Verify code that nobody trusts: the laws on new inputs, then the time, then the laws again, in one
process behind walls.

The laws, the seeds, the expected values and the clock stay in this process. What the code is given lies where
earlier inputs were; what it answers is copied before it is looked at. Code that is right only at first, only
for some inputs, or only until its time is taken is wrong here.
"""

import ast
import contextlib
import copy
import importlib.util
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from evictionary.classroom import checks
from evictionary.classroom.assignment import Assignment
from evictionary.classroom.child import BANNED, Child, Limits, StudentError
from evictionary.classroom.grading import NO_EXECUTOR, TWO_ANSWERS, ByLaws, lacking, plain, put_down
from evictionary.classroom.step import Step
from evictionary.errors import require
from evictionary.reference.contract import contract_of
from evictionary.spec_tests.judge import compiled
from evictionary.spec_tests.judge.cases import Case, seeds
from evictionary.spec_tests.judge.degenerate import EDGE, REFUSAL
from evictionary.spec_tests.judge.domain import Domain, OutsideDomain
from evictionary.spec_tests.judge.implementation import (
    ANY,
    STEPS,
    Implementation,
    called_otherwise,
    contract_functions,
    oracle,
)
from evictionary.spec_tests.judge.law import Law, load_laws, suite_version
from evictionary.spec_tests.judge.outcome import TimedOut, outcome
from evictionary.spec_tests.judge.remote import Gone
from evictionary.spec_tests.judge.tolerance import Violation
from evictionary.spec_tests.memory import helpers as memory
from evictionary.spec_tests.memory.arguments import (
    SETTINGS,
    arguments_inside,
    arguments_of,
    fits,
    signature_of,
)
from evictionary.spec_tests.verdict import report
from evictionary.spec_tests.verdict.diagnosis import sign

SCHEMA = "evictionary/verify/1"
EXAMPLES = 12
LIMITS = Limits(20.0, 3600, 8 * 2**30, 2**28, each_call=True)
# What the time is taken of, how often, and from which share of the time of a new input an old one counts as
# remembered.
TIMED = Case(num_kv_heads=4, group=2, length=2048, head_dim=64, value_dim=64)
TIMES, REMEMBERED, LEAST_SECONDS = 5, 0.5, 2e-3
TURNS = 3  # chance makes an old input fast once; who remembers is fast each time
NOTHING = "def {}(*arguments, **named):\n    return 0.0\n"
HOLDS, FAILS, ENDED = "holds", "fails", "the process had ended before"
UNCOUNTED = (EDGE, REFUSAL)  # as `evictionary judge` has it without --strict
# Shapes of layers that people run: batch, KV heads, group, tokens, channels. With a group of 4 and 8 heads it
# is Llama 3's, with 7 and 4 Qwen 2.5's.
MODELS = ((4, 8, 4, 317, 128), (2, 4, 7, 523, 128), (1, 8, 5, 1000, 128), (1, 16, 1, 411, 80))
# Of mathematics that costs more than a matrix of all pairs, and in an interpreter, fewer tokens do.
AFFORDABLE, FEW_TOKENS = 0.03, 33
# What a file is asked in where neither it nor the caller says it: every dtype of a model for torch.
DTYPES = {"numpy": ("float64",), "torch": ("float32", "bfloat16", "float16")}
WITHOUT_BFLOAT16 = "Triton's interpreter computes with NumPy, which has no bfloat16"
MEMORY_NOTES = {
    "test_memory::test_global_random_generators_are_left_alone": {
        "random": "it changed the state of a global random generator"
    },
    "test_memory::test_outputs_are_memory_of_their_own": {
        "argument": "a result shares memory with an argument",
        "next": "a result shares memory with that of the call before",
    },
}
"""What the process of the code is looked at for: an answer that came through a pipe does not show it."""

# What it means that code tries something that no function of the contract needs; the first that fits.
MEANINGS = {
    "import pytest": "it imports the tools that judge it",
    "import hypothesis": "it imports the tools that judge it",
    "import ": "it imports the library that holds the answer",
    "replace ": "it replaces functions of a library",
    "open ": "it opens files that are not its own",
    "write ": "it writes files",
    "object.": "it changes the code of functions",
    "gc.": "it looks into the objects of others",
    "sys._": "it looks into the frames of others",
    "sys.": "it follows what others do",
    "socket.": "it opens a connection",
    "ctypes.": "it leaves Python",
    "": "it starts, signals or limits processes, or changes files",
}


def library_of(source: bytes) -> tuple[str, bool]:
    """The library that a file computes with, numpy or torch, and whether it has Triton kernels."""
    imported = set(re.findall(rb"^\s*(?:import|from)\s+(torch|triton)\b", source, re.MULTILINE))
    return ("torch" if imported else "numpy"), b"triton" in imported


def refused(source: bytes) -> str:
    """Why a file cannot be verified at all, or an empty string."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ""  # the process says so
    if any(map(is_torch_compile, ast.walk(tree))):
        return (
            "torch.compile starts a compiler and writes files, which no code behind the walls may do: "
            "verify the function without it, or judge it with `evictionary judge`"
        )
    return ""


def is_torch_compile(node: ast.AST) -> bool:
    """Whether a piece of a program says `torch.compile`, or imports it by its name."""
    if isinstance(node, ast.ImportFrom):
        return node.module == "torch" and any(each.name == "compile" for each in node.names)
    return isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.compile"


def does_not_travel(path: str) -> str:
    """Why a function cannot be asked in another process, or an empty string."""
    parameters = signature_of(path).parameters.values()
    takes = [
        each.name for each in parameters if each.default is each.empty and callable(SETTINGS.get(each.name))
    ]
    gives = "" if path != "cache.heads" else "gives slices one after another"
    told = f"takes a function as {takes[0]}" if takes else gives
    return (
        f"{path} {told}, which does not travel to another process: judge it with `evictionary judge`"
        if told
        else ""
    )


@dataclass
class Untrusted(ByLaws):
    """A file of which some functions are judged by all of
    their laws, on the inputs that it is said to accept.

    `outcomes` has for each law what became of it at first and afterwards: holds, fails, or why it was not
    asked. `reasons` say what is wrong beside the laws, by kind; `seconds_of` is the processor time of a call
    of each function. `device` is cpu or compiled, and `allowed` are packages that the file may import.
    `dtypes` says of each dtype that was not asked why.
    """

    examples: int = EXAMPLES
    functions: tuple[str, ...] = ()
    domain: Domain = field(default_factory=Domain)
    strict: bool = False
    outcomes: dict[str, list[str]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    seconds_of: dict[str, float] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    failed: Law | None = None
    failed_in: str = ""
    walls: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    allowed: tuple[str, ...] = ()
    dtypes: dict[str, str] = field(default_factory=dict)
    asked_in: list[str] = field(default_factory=list)
    law_of: dict[str, Law] = field(default_factory=dict)

    def child(self, patience: int = 1, **changes: Any) -> Child:
        limits = replace(LIMITS, wall_seconds=self.seconds or LIMITS.wall_seconds)
        if self.device == compiled.DEVICE:  # what Triton's compiler tries is not the doing of the code
            changes = {"device": self.device, "interpret": False, "tried": set()} | changes
        return super().child(patience, limits=limits, strict=memory.SEAMS, allowed=self.allowed, **changes)

    def implementation(self, child: Child, step: Step) -> Implementation:
        judged: Any = super().implementation(child, step)
        stem = self.assignment.stem
        known = {each for each in contract_functions((stem,)) if each.split(".")[1] in child.functions}
        asked = (law.functions for law in load_laws().values() if known.issuperset(law.functions))
        provided = dict.fromkeys(path for functions in asked for path in functions)
        provided |= dict.fromkeys(path for path in self.functions if path in known & STEPS)
        if not self.functions:
            provided = {path: None for path in provided if not does_not_travel(path)}
        self.functions = self.functions or tuple(provided)
        if missing := sorted({*self.functions} - {*provided}) or (
            [] if provided else [f"a function of {stem}"]
        ):
            self.reasons["missing"] = f"the file does not have {', '.join(missing)}, or no law asks it"
        for name in set(vars(judged.modules[stem])) - {each.split(".")[1] for each in self.functions}:
            delattr(judged.modules[stem], name)
        judged.domain, judged.device = self.domain, self.device
        judged.slow = self.assignment.interpret
        return judged

    def in_each_dtype(self, judged: Implementation) -> Iterator[Implementation]:
        """The implementation in each dtype that the caller names, or in those of the library; not in one
        that it refuses where nobody asks for it.
        """
        library = self.assignment.library
        named = self.domain.dtype
        for place, dtype in enumerate(named or DTYPES[library]):
            one = copy.copy(judged)
            one.dtype, one.calls, one.outside_of = dtype, [], type(judged.outside_of)()
            self.set_dtype(one)
            if dtype == "bfloat16" and self.assignment.interpret and self.device == "cpu":
                self.dtypes[dtype] = WITHOUT_BFLOAT16
            elif place and not named and (reason := self.refuses(one)):
                self.dtypes[dtype] = reason
            else:
                self.asked_in.append(dtype)
                yield one

    def set_dtype(self, judged: Any) -> None:
        judged.child.dtype = judged.dtype if self.assignment.library == "torch" else ""

    def refuses(self, judged: Any) -> str:
        """What a file says where it refuses a dtype as a whole."""
        case = self.domain.fitted({"case": Case(batch=2, num_kv_heads=2, group=2, length=17)})["case"]
        said = ""
        for path in self.functions:
            if (given := arguments_of(judged, path, case)) is not None:
                try:
                    memory.ask(judged, path, memory.natives_of(judged, given))
                except Violation as error:
                    said = plain(error.message)
                else:
                    return ""
        return said

    def laws(self, step: Step) -> list[Law]:
        known = {*self.functions, ANY}
        return [
            *(law for law in load_laws().values() if law.functions and known.issuperset(law.functions)),
            IN_TURN,
            *SIZES_OF_MODELS,
        ]

    def ask(self, step: Step, plan: Callable[[int], None], advance: Callable[[str], None]) -> None:
        """The laws, the time, and the laws again, all of
        one process: what it remembers, it remembers here.
        """
        with self.child() as child:
            self.walls = child.walls
            judged = self.implementation(child, step)
            laws, each_dtype = self.laws(step), list(self.in_each_dtype(judged))
            require(each_dtype, f"--domain: got nothing that can be asked: {' '.join(self.dtypes.values())}")
            plan(2 * len(laws) * len(each_dtype) + 1)
            for turn in range(2):
                self.check_seed += turn
                for one in each_dtype:
                    self.set_dtype(one)
                    for law in laws:
                        advance(law.sentence)
                        key = law.name if one is each_dtype[0] else f"{law.name} [{one.dtype}]"
                        self.law_of[key] = law
                        self.outcomes.setdefault(key, []).append(self.outcome(law, one, step))
                if self.reasons or (self.failed is not None and self.counts(self.failed)):
                    return
                if not turn:
                    advance("the time")
                    self.set_dtype(each_dtype[0])
                    try:
                        self.take_time(each_dtype[0])
                    except (Violation, StudentError, ValueError) as error:
                        self.reasons["time"] = str(error)

    def outcome(self, law: Law, judged: Implementation, step: Step) -> str:
        if reason := law.missing(judged)[1]:
            return reason
        if judged.child.remote.gone:
            return ENDED
        judged.child.notes.clear()
        word, message = outcome(self.drawn(law, step), judged)
        seen = {
            each: told for each, told in MEMORY_NOTES.get(law.name, {}).items() if each in judged.child.notes
        }
        if lends := memory.VIEWS & {*self.functions}:
            seen = {each: told for each, told in seen.items() if each == "random" or not lends}
        if word == "passed" and seen:
            self.said.setdefault("what is wrong", next(iter(seen.values())))
            word = "killed"
        if word == "not asked":
            return message
        if word != "passed" and judged.child.remote.gone:
            self.reasons.setdefault("no answer", plain(message) if word != "timed out" else message)
        elif word != "passed":
            if self.failed is None or self.counts(law) > self.counts(self.failed):
                self.failed, self.failed_in = law, judged.dtype
            with contextlib.suppress(Exception):  # strange numbers must not end the judge
                self.said["it looks like"] = self.said.get("it looks like") or sign(judged)
        return HOLDS if word == "passed" else FAILS

    def counts(self, law: Law) -> bool:
        return self.strict or law.kind not in UNCOUNTED

    def take_time(self, judged: Any) -> None:
        """Each function on new inputs, and on the same ones at once again: the answers have to be right,
        and each to take its time.

        The kernel of the system counts the processor time; that of a function that does nothing is taken off.
        """
        names = [path.split(".")[1] for path in self.functions]
        idle = "".join(map(NOTHING.format, names)).encode()
        with put_down(idle, self.assignment.stem) as file, replace(self, path=file).child() as idling:
            for path, name in zip(self.functions, names, strict=True):
                for turn in range(TURNS):
                    seconds = self.times_of(judged, idling, path, name, turn)
                    if len(seconds["idle"]) < TIMES:
                        break
                    new, old, none = map(min, seconds.values())  # what else runs on the machine only adds
                    # A function of a millisecond may cost no more at its best than the passing of its
                    # arguments at its best.
                    self.seconds_of[path] = max(0.0, statistics.median(seconds["new"]) - none)
                    if new - none <= LEAST_SECONDS or old - none >= REMEMBERED * (new - none):
                        break
                else:
                    told = (
                        f"{path} takes {new - none:.2g} s for a new input, and {max(0, old - none):.2g} s "
                        "for one just given"
                    )
                    self.reasons["remembered"] = f"{told}: it remembers answers"

    def times_of(self, judged: Any, idling: Any, path: str, name: str, turn: int) -> dict[str, list[float]]:
        """The processor time of each call, which has to answer right; no call where the domain has no
        input of this size.
        """
        seconds: dict[str, list[float]] = {"new": [], "old": [], "idle": []}
        for number in range(turn * TIMES, (turn + 1) * TIMES):
            case = replace(self.timed(path), seed=self.seed(f"{path} {number}") % 2**16)
            arguments = arguments_inside(judged, path, case)
            if arguments is None:
                break
            with np.errstate(all="ignore"):
                expected = oracle(path)(**arguments)
            args, named = memory.as_called(
                path, {key: judged.native(each) for key, each in arguments.items()}
            )
            for word, child in (("new", judged.child), ("old", judged.child), ("idle", idling)):
                before = child.remote.busy()
                got = child.call(name, *args, **named)
                seconds[word].append(child.remote.busy() - before)
                if word != "idle":
                    with contextlib.suppress(OutsideDomain):
                        memory.agree(
                            judged, path, arguments, expected, got, "is wrong while its time is taken"
                        )
        return seconds

    def timed(self, path: str) -> Case:
        """The text that the time of a function is taken of: 2,048 tokens for scores and selections, fewer
        where the mathematics takes long.
        """
        slow = path.split(".")[1] not in memory.SEAMS and not affordable(path, replace(TIMED, length=512))
        return replace(TIMED, length=FEW_TOKENS) if slow else TIMED

    def explain_failure(self, step: Step) -> None:
        """What is wrong with the first law that fails, with the smallest input, in a process of its own."""
        if self.failed is None or not self.counts(self.failed) or "what is wrong" in self.said:
            return
        with contextlib.suppress(Exception, TimedOut), self.child() as child:
            judged = self.implementation(child, step)
            judged.dtype = self.failed_in
            self.set_dtype(judged)
            error = self.failure(self.failed, judged, step)
            if error is None:
                self.said["what is wrong"] = TWO_ANSWERS
            else:
                self.said |= {name: plain(text) for name, text in report.said(self.failed, judged, error)}


def inside(impl: Any, case_of: Callable[[str], Case]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each function with arguments of its case, where the domain has them. Raises OutsideDomain for none."""
    asked = False
    for path in impl.asked_of_memory():
        if (given := arguments_inside(impl, path, case_of(path))) is not None:
            asked = True
            yield path, given
    if not asked:
        raise OutsideDomain("no arguments of this size lie inside the domain")


def in_turn(impl: Any, case: Case, seed: int) -> None:
    """Inputs that differ little, one after the other: an answer that is remembered by a part or a sum of
    its input is wrong.
    """
    generator = np.random.default_rng(seed)
    for path, arguments in inside(impl, lambda path: case):
        memory.require_right(impl, path, arguments, "is wrong")
        for name in (each.name for each in contract_of(path).arguments):
            array = arguments.get(name)
            if not isinstance(array, np.ndarray) or array.dtype.kind != "f" or not array.size:
                continue
            one_changed, two_exchanged = array.copy(), array.copy()
            place, another = (tuple(generator.integers(np.array(array.shape)).tolist()) for _ in range(2))
            others = (2.5 - array[place], 1 - array[place], array[place] / 2)
            two_exchanged[place], two_exchanged[another] = array[another], array[place]
            for number in others:
                one_changed[place] = impl.round(number)
                if fits(path, {**arguments, name: one_changed}):
                    break
            for other in (one_changed, two_exchanged):
                asked = {**arguments, name: other}
                if fits(path, asked):
                    memory.require_right(impl, path, asked, f"does not see that {name} has changed")


SENTENCE = "An input in which one number is another, or two have changed places, has an answer of its own."
DRAWN = {"case": memory.PLAIN, "seed": seeds()}
IN_TURN = checks.own_law(checks.Check((ANY,), SENTENCE, in_turn, DRAWN), "inputs in turn", "MEM-3")


def affordable(path: str, case: Case) -> bool:
    """Whether the mathematics answers a case at once, as far as one of few tokens tells."""
    few = replace(case, length=FEW_TOKENS)
    given = arguments_of(Implementation("reference", {}), path, few)
    if given is None:
        return False
    started = time.perf_counter()
    fits(path, given)
    return time.perf_counter() - started < AFFORDABLE


def of_a_model(batch: int, num_kv_heads: int, group: int, length: int, head_dim: int) -> Law:
    """The law that the answers are right at the shape of a layer that people run."""

    def check(impl: Any, case: Case) -> None:
        def at_a_size(path: str) -> Case:
            short = impl.slow or not affordable(path, case)
            return replace(case, length=FEW_TOKENS) if short else case

        for path, given in inside(impl, at_a_size):
            memory.require_right(impl, path, given, f"is wrong with {told}")

    told = (
        f"batch {batch}, {num_kv_heads} KV heads, a group of {group}, {length} tokens and {head_dim} channels"
    )
    cases = seeds().map(
        lambda seed: Case(
            "normal", seed, batch, num_kv_heads, group, length, head_dim, head_dim, num_queries=4
        )
    )
    sentence = f"The answers are right with {told}."
    found = checks.Check((ANY,), sentence, check, {"case": cases}, examples=1)
    return checks.own_law(found, f"{num_kv_heads} KV heads, group {group}", "MEM-3")


SIZES_OF_MODELS = [of_a_model(*shape) for shape in MODELS]


def verify(
    source: bytes,
    stem: str,
    functions: tuple[str, ...] = (),
    *,
    seed: int,
    plan: Callable[[int], None] = lambda count: None,
    advance: Callable[[str], None] = lambda sentence: None,
    **settings: Any,
) -> dict[str, Any]:
    """Verify the text of a file: what `evictionary verify` prints.

    Without functions, all are judged that it has of this file of the reference. settings are those of
    `Untrusted`: examples, seconds for a call, domain, strict. plan and advance are told the progress.
    """
    library, interpret = library_of(source)
    require(not (reason := refused(source)), reason)
    device, allowed = settings.get("device", "cpu"), settings.get("allowed", ())
    for name in allowed:
        there = name.isidentifier() and name not in BANNED and importlib.util.find_spec(name)
        require(there, f"--allow: got {name!r}, wanted the name of a package that is installed here")
    wanted = settings.get("domain", Domain()).dtype
    require(
        library == "torch" or "bfloat16" not in wanted,
        "--domain: got dtype=bfloat16, which NumPy has not; a file that imports torch can be asked for it",
    )
    if device == compiled.DEVICE:
        require(interpret, "--device: got compiled, wanted a file that imports triton")
        require(compiled.folder(), f"--device: {NO_EXECUTOR}")
    for function in functions:
        require(not (reason := does_not_travel(function)), reason)
    step = Step("verify", "MEM-3", "", 0)
    with put_down(source, stem) as path:
        one = Assignment("verify", "", path.name, stem, library, path.parent, (step,), interpret)
        require(not lacking(one), lacking(one))
        run = Untrusted(one, path, path.name, check_seed=seed, functions=functions, **settings)
        misfit, reason = called_otherwise_in(source, functions or contract_functions((stem,)))
        if misfit:
            run.functions = (misfit,)
            run.reasons["no answer"] = reason
        else:
            try:
                run.ask(step, plan, advance)
            except (Gone, StudentError) as error:
                run.reasons["no answer"] = str(error)
        if not run.reasons:
            advance("what is wrong")
            run.explain_failure(step)
    return told(run) | {"seed": seed}


def called_otherwise_in(source: bytes, functions: Iterable[str]) -> tuple[str, str]:
    """The first function that cannot be called as the contract calls it, and what `evictionary judge` says of
    it; two empty strings where all can be. The text is read and not run, so what is decorated or bound
    otherwise is left to the laws.
    """
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return "", ""  # the process says so
    last: dict[str, ast.stmt] = {}
    for node in body:
        last |= dict.fromkeys(_bound(node), node)
    for path in sorted({*functions} - STEPS):
        found = last.get(path.split(".")[1])
        if not isinstance(found, ast.FunctionDef) or found.decorator_list:
            continue
        if reason := called_otherwise(path, _of_signature(found)):
            return path, reason
    return "", ""


def _bound(node: ast.stmt) -> Iterator[str]:
    """The names that a statement of a file binds."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
        return
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            yield each.id
        elif isinstance(each, ast.alias):
            yield each.asname or each.name
        elif isinstance(each, ast.FunctionDef):
            yield each.name


def _of_signature(node: ast.FunctionDef) -> Callable[..., Any]:
    """An empty function with the arguments of another, of which only constants are kept as defaults."""
    arguments = copy.deepcopy(node.args)
    for each in ast.walk(arguments):
        if isinstance(each, ast.arg):
            each.annotation = None
    unsaid = ast.Constant(...)
    arguments.defaults = [each if isinstance(each, ast.Constant) else unsaid for each in arguments.defaults]
    arguments.kw_defaults = [
        each if each is None or isinstance(each, ast.Constant) else unsaid for each in arguments.kw_defaults
    ]
    empty = ast.Lambda(arguments, ast.Constant(None))
    return cast(
        Callable[..., Any],
        eval(compile(ast.fix_missing_locations(ast.Expression(empty)), node.name, "eval")),
    )


def functions_asked(run: Untrusted, names: list[str]) -> set[str]:
    """The functions that laws of these names have asked. What no law asks by itself is compared with the
    mathematics in turn.
    """
    known = load_laws()
    laws = [run.law_of[name] for name in names]
    alone = {law.functions for law in known.values()}
    in_turn = {path for path in run.functions if (path,) not in alone and IN_TURN.name in names}
    return in_turn | {path for law in laws if law.name in known for path in law.functions}


def told(run: Untrusted) -> dict[str, Any]:
    """The verdict: whether the code is correct, and if not, in what way."""
    counted = [name for name in run.outcomes if run.counts(run.law_of[name])]
    hold = [name for name, each in run.outcomes.items() if {*each} == {HOLDS}]
    fail = [name for name, each in run.outcomes.items() if FAILS in each]
    left_out = {name: each[0] for name, each in run.outcomes.items() if name not in (*hold, *fail)}
    asked = [name for name in counted if name not in left_out or left_out[name] == ENDED]
    failing = [name for name in fail if name in counted]
    later = [name for name in failing if run.outcomes[name][0] == HOLDS]
    tried = (
        f"{next(told for begun, told in MEANINGS.items() if each.startswith(begun))}: {each}"
        for each in sorted(run.tried)
    )
    uncounted = len(fail) - len(failing)
    beside = f", and {uncounted} of edges or refusals, which count only with --strict" if uncounted else ""
    for_some = "the code is right for a while or for some inputs"
    said = {
        **run.reasons,
        "later": f"{len(later)} laws hold at first and fail afterwards: {for_some}" if later else "",
        "tried": "; ".join(tried),
        "laws": f"{len(failing)} of {len(asked)} laws fail{beside}" if failing else "",
    }
    reasons = {name: text for name, text in said.items() if text}
    if not reasons and not {*run.functions} <= functions_asked(run, hold):
        reasons["laws"] = f"no law of one of {', '.join(run.functions)} was asked"
    correct, cheats = not reasons, {"tried", "remembered", "time"} & {*reasons}
    # What was never called has answered nothing.
    uncalled = "missing" in reasons or not {*run.functions} <= functions_asked(run, [*hold, *fail])
    score = 0.0 if cheats or uncalled or not asked else sum(name in hold for name in asked) / len(asked)
    return {
        "schema": SCHEMA,
        "suite": suite_version(),
        "functions": [*run.functions],
        "correct": correct,
        "verdict": f"PASS: {len(hold)} laws hold" if correct else f"FAIL: {'; '.join(reasons.values())}",
        "score": score,
        "reasons": reasons,
        "misconception": run.said.get("misconception", ""),
        "looks_like": run.said.get("it looks like", ""),
        "wrong": run.said.get("what is wrong", ""),
        "input": run.said.get("smallest input", run.said.get("an input", "")),
        "laws": {"hold": hold, "fail": fail, "not_asked": left_out},
        "dtypes": {"asked": run.asked_in, "not_asked": run.dtypes},
        "device": run.device,
        "seconds": run.seconds_of,
        "walls": run.walls,
    }
