"""Verify code that nobody trusts: the laws on new inputs, then the time, then the laws again, in one
process behind walls.

The laws, the seeds, the expected values and the clock stay in this process. What the code is given lies where
earlier inputs were; what it answers is copied before it is looked at. Code that is right only at first, only
for some inputs, or only until its time is taken is wrong here.
"""

import contextlib
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from evictionary.classroom import checks
from evictionary.classroom.assignment import Assignment, Step
from evictionary.classroom.child import Child, Limits, StudentError
from evictionary.classroom.grading import TWO_ANSWERS, ByLaws, lacking, plain, put_down
from evictionary.errors import require
from evictionary.spec_tests.judge.cases import Case, seeds
from evictionary.spec_tests.judge.degenerate import EDGE, REFUSAL
from evictionary.spec_tests.judge.domain import Domain
from evictionary.spec_tests.judge.implementation import ANY, Implementation, contract_functions, oracle
from evictionary.spec_tests.judge.law import Law, load_laws, suite_version
from evictionary.spec_tests.judge.outcome import TimedOut, outcome
from evictionary.spec_tests.judge.remote import Gone
from evictionary.spec_tests.judge.tolerance import Violation
from evictionary.spec_tests.memory import helpers as memory
from evictionary.spec_tests.memory.arguments import arguments_of
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


@dataclass
class Untrusted(ByLaws):
    """A file of which some functions are judged by all of their laws, on the inputs that it is said to
    accept.

    `outcomes` has for each law what became of it at first and afterwards: holds, fails, or why it was not
    asked. `reasons` say what is wrong beside the laws, by kind; `seconds_of` is the processor time of a call
    of each function.
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
    walls: dict[str, Any] = field(default_factory=dict)

    def child(self, patience: int = 1, **changes: Any) -> Child:
        limits = replace(LIMITS, wall_seconds=self.seconds or LIMITS.wall_seconds)
        return super().child(patience, limits=limits, strict=memory.SEAMS, **changes)

    def implementation(self, child: Child, step: Step) -> Implementation:
        judged = super().implementation(child, step)
        stem = self.assignment.stem
        known = {each for each in contract_functions((stem,)) if each.split(".")[1] in child.functions}
        asked = (law.functions for law in load_laws().values() if known.issuperset(law.functions))
        provided = dict.fromkeys(path for functions in asked for path in functions)
        self.functions = self.functions or tuple(provided)
        if missing := sorted({*self.functions} - {*provided}) or (
            [] if provided else [f"a function of {stem}"]
        ):
            self.reasons["missing"] = f"the file does not have {', '.join(missing)}, or no law asks it"
        for name in set(vars(judged.modules[stem])) - {each.split(".")[1] for each in self.functions}:
            delattr(judged.modules[stem], name)
        judged.domain = self.domain
        return judged

    def laws(self, step: Step) -> list[Law]:
        known = {*self.functions, ANY}
        return [
            *(law for law in load_laws().values() if law.functions and known.issuperset(law.functions)),
            IN_TURN,
        ]

    def ask(self, step: Step, plan: Callable[[int], None], advance: Callable[[str], None]) -> None:
        """The laws, the time, and the laws again, all of one process: what it remembers, it remembers
        here.
        """
        with self.child() as child:
            self.walls = child.walls
            judged = self.implementation(child, step)
            laws = self.laws(step)
            plan(2 * len(laws) + 1)
            for turn in range(2):
                self.check_seed += turn
                for law in laws:
                    advance(law.sentence)
                    self.outcomes.setdefault(law.name, []).append(self.outcome(law, judged, step))
                if self.reasons or (self.failed is not None and self.counts(self.failed)):
                    return
                if not turn:
                    advance("the time")
                    try:
                        self.take_time(judged)
                    except (Violation, StudentError, ValueError) as error:
                        self.reasons["time"] = str(error)

    def outcome(self, law: Law, judged: Implementation, step: Step) -> str:
        if reason := law.missing(judged)[1]:
            return reason
        if judged.child.remote.gone:
            return ENDED
        word, message = outcome(self.drawn(law, step), judged)
        if word == "not asked":
            return message
        if word != "passed" and judged.child.remote.gone:
            self.reasons.setdefault("no answer", plain(message) if word != "timed out" else message)
        elif word != "passed":
            if self.failed is None or self.counts(law) > self.counts(self.failed):
                self.failed = law
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
            case = replace(TIMED, seed=self.seed(f"{path} {number}") % 2**16)
            arguments = arguments_of(judged, path, self.domain.fitted({"case": case})["case"])
            if arguments is None:
                break
            expected = oracle(path)(**arguments)
            for word, child in (("new", judged.child), ("old", judged.child), ("idle", idling)):
                before = child.remote.busy()
                got = child.call(name, **arguments)
                seconds[word].append(child.remote.busy() - before)
                if word != "idle":
                    memory.agree_within_rounding(
                        judged, path, arguments, expected, got, "is wrong while its time is taken"
                    )
        return seconds

    def explain_failure(self, step: Step) -> None:
        """What is wrong with the first law that fails, with the smallest input, in a process of its own."""
        if self.failed is None or not self.counts(self.failed):
            return
        with contextlib.suppress(Exception, TimedOut), self.child() as child:
            judged = self.implementation(child, step)
            error = self.failure(self.failed, judged, step)
            if error is None:
                self.said["what is wrong"] = TWO_ANSWERS
            else:
                self.said |= {name: plain(text) for name, text in report.said(self.failed, judged, error)}


def in_turn(impl: Any, case: Case, seed: int) -> None:
    """Inputs that differ little, one after the other: an answer that is remembered by a part or a sum of
    its input is wrong.
    """
    generator = np.random.default_rng(seed)
    for path, arguments, _ in memory.callables(impl, case):
        for name in ("keys", "values", "queries", "query", "scores"):
            if name not in arguments:
                continue
            one_changed, two_exchanged = arguments[name].copy(), arguments[name].copy()
            place, another = (tuple(generator.integers(one_changed.shape)) for _ in range(2))
            one_changed[place] = impl.round(2.5 - one_changed[place])
            two_exchanged[place], two_exchanged[another] = two_exchanged[another], two_exchanged[place]
            for other in (one_changed, two_exchanged):
                asked = {**arguments, name: other}
                got = impl.function(path)(**asked)
                expected = oracle(path)(**asked)
                memory.agree_within_rounding(
                    impl, path, asked, expected, got, f"does not see that {name} has changed"
                )


SENTENCE = "An input in which one number is another, or two have changed places, has an answer of its own."
DRAWN = {"case": memory.PLAIN, "seed": seeds()}
IN_TURN = checks.own_law(checks.Check((ANY,), SENTENCE, in_turn, DRAWN), "inputs in turn", "MEM-3")


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
    step = Step("verify", "MEM-3", "", 0)
    with put_down(source, stem) as path:
        one = Assignment("verify", "", path.name, stem, library, path.parent, (step,), interpret)
        require(not lacking(one), lacking(one))
        run = Untrusted(one, path, path.name, check_seed=seed, functions=functions, **settings)
        try:
            run.ask(step, plan, advance)
        except (Gone, StudentError) as error:
            run.reasons["no answer"] = str(error)
        if not run.reasons:
            advance("what is wrong")
            run.explain_failure(step)
    return told(run) | {"seed": seed}


def told(run: Untrusted) -> dict[str, Any]:
    """The verdict: whether the code is correct, and if not, in what way."""
    known = load_laws()
    counted = [name for name in run.outcomes if name not in known or run.counts(known[name])]
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
    for_some = "the code is right for a while or for some inputs"
    said = {
        **run.reasons,
        "later": f"{len(later)} laws hold at first and fail afterwards: {for_some}" if later else "",
        "tried": "; ".join(tried),
        "laws": f"{len(failing)} of {len(asked)} laws fail" if failing else "",
    }
    reasons = {name: text for name, text in said.items() if text}
    held = {path for name in hold if name in known for path in known[name].functions}
    if not reasons and not {*run.functions} <= held:
        reasons["laws"] = f"no law of one of {', '.join(run.functions)} was asked"
    correct, cheats = not reasons, {"tried", "remembered", "time"} & {*reasons}
    score = 0.0 if cheats or not asked else sum(name in hold for name in asked) / len(asked)
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
        "seconds": run.seconds_of,
        "walls": run.walls,
    }
