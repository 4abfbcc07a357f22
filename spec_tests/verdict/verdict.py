"""The verdict: by requirement, one column for each implementation, and the files that carry it elsewhere.

Four classes of law are told apart. *mathematics* is what the equation says on generic inputs, and *memory*
what compiled code touches; the exit code is that of these laws. *edge* is a degenerate input whose meaning is
our decision; *refusal* is bad input that must raise. One cause, one failure: what depends on a requirement
that fails is not judged.

`--report FOLDER` writes `conformance.json` (the schema is docs/conformance.md, its version is in the file),
`junit.xml` and `badge.json` (one line, in the format of shields.io endpoints).
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from evictionary.spec_tests.judge import compiled
from evictionary.spec_tests.judge.degenerate import EDGE, KINDS, MATHEMATICS, MEMORY, REFUSAL
from evictionary.spec_tests.judge.implementation import ANY, NO_GPU, Implementation
from evictionary.spec_tests.judge.law import REQUIREMENTS, load_laws, suite_version
from evictionary.spec_tests.judge.reach import Reach, in_a_line, merge
from evictionary.spec_tests.judge.watch import NO_MORE
from evictionary.spec_tests.verdict.coverage import functions as functions_by_requirement
from evictionary.store import grouped

SCHEMA = "evictionary/conformance/2"
# The column of the laws that are about a paper, not about an implementation.
PAPER = "the papers themselves"
MOST_NAMED = 12
UNCOUNTED = " (counted only with --strict)"
WORDS = ("pass", "fail", "expected failure", "not judged", "not provided", "not applicable", "variant")

JUDGED = pytest.StashKey[list[Implementation]]()
FOUND: pytest.StashKey[Verdict] = pytest.StashKey()
# (requirement, column, "not provided" or "not applicable", the reason)
LEFT_OUT = pytest.StashKey[list[tuple[str, str, str, str]]]()


def identifier(implementation: Implementation) -> str:
    """What stands behind the name of a test for the implementation that it judges."""
    return f"{implementation.name}-{implementation.dtype}"


class BadExpectation(ValueError):
    """A file of expected failures that cannot be read; the message names the line."""


def read_expected(path: Path) -> dict[str, str]:
    """A file of expected failures: on each line an id or a law, and why. Blank lines and what follows a #
    do not count.
    """
    found = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        name, _, reason = line.partition("#")[0].strip().partition(" ")
        if name and not reason.strip():
            raise BadExpectation(f"{path}, line {number}: {name} has no reason, wanted one behind it")
        if name:
            found[name] = reason.strip()
    return found


@functools.cache
def requirements_of(function: str) -> frozenset[str]:
    """The requirements that a function of the reference writes: its docstring begins with them."""
    return frozenset(name for name, written in functions_by_requirement().items() if function in written)


def _count(number: int, one: str, several: str) -> str:
    """`1 law holds`, `2 laws hold`, and nothing for none."""
    return f"{number} law{'s' * (number > 1)} {one if number == 1 else several}" if number else ""


def _by_kind(entries: Iterable[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """The entries of each class of law that has some."""
    entries = list(entries)
    return [
        (kind, found) for kind in KINDS if (found := [entry for entry in entries if entry["kind"] == kind])
    ]


ANY_ERROR = " (for bad input any error passes; --strict wants a ValueError)"


def _general() -> list[str]:
    """The requirements of any function."""
    return [name for name in REQUIREMENTS if name.startswith("MEM-")]


def _rows() -> list[tuple[str, str, list[str]]]:
    """The rows of a summary: a title, a class of law, and the requirements. What is asked of any function has
    a row of its own.
    """
    general = _general()
    own = [name for name in REQUIREMENTS if name not in general]
    of_mathematics = [("mathematics", MATHEMATICS, own), ("any function", MATHEMATICS, general)]
    return of_mathematics + [(kind, kind, own + general) for kind in KINDS if kind != MATHEMATICS]


def _raised(entry: dict[str, Any]) -> str:
    """The kind of error by which code failed a law: `NotImplementedError`; empty where it gave an answer."""
    said = entry.get("said", {})
    what = said.get("what is wrong", "")
    # a law of memory says the function before it
    found = re.match(r"(\w+)" if "raised in" in said else r"\S+ raises (\w+)", what)
    return found[1] if found else ""


def _named(requirements: list[str]) -> str:
    """The requirements by name, or how many they are where nobody would read the names."""
    return ", ".join(requirements) if len(requirements) <= MOST_NAMED else f"{len(requirements)} requirements"


class Verdict:
    """What the laws said, gathered from the reports of one run: a list of law outcomes for each
    requirement and column.
    """

    def __init__(self, terminal: Any, config: pytest.Config, expected: dict[str, str] | None = None) -> None:
        self.judged = config.stash[JUDGED]
        self.expected = expected or {}
        self.strict = config.getoption("strict")
        self.line = ""  # the last of the run, which says what it found or why it found nothing
        self.laws: dict[tuple[str, str], list[dict[str, Any]]] = {}
        self.executed: dict[str, Counter[str]] = defaultdict(Counter)
        self.reach: dict[str, Reach] = defaultdict(dict)
        self.others = self.other_failures = 0
        self.reasons: dict[tuple[str, str], tuple[str, str]] = {}
        for outcome in ("passed", "failed", "error"):
            for result in terminal.stats.get(outcome, []):
                properties = dict(getattr(result, "user_properties", []))
                self.others += "law" not in properties
                is_other = "law" not in properties or properties["law"][1] == PAPER
                self.other_failures += outcome != "passed" and is_other
                if "law" not in properties or (result.when != "call" and not result.failed):
                    continue
                requirement, column, name, kind, functions = properties["law"]
                self.executed[column].update(properties.get("compiled", {}))
                merge(self.reach[column], properties.get("reach", {}))
                if reason := properties.get("not applicable"):
                    self.reasons.setdefault((requirement, column), ("not applicable", reason))
                    continue
                entry = {"law": name, "kind": kind, "functions": functions, "outcome": "pass"}
                if outcome != "passed":
                    said = properties.get("said", {})
                    entry |= {"outcome": "fail", "message": str(result.longrepr), "said": said}
                entry |= {key: properties[key] for key in ("unanswered",) if key in properties}
                self.laws.setdefault((requirement, column), []).append(entry)
        for requirement, column, verdict, reason in config.stash.get(LEFT_OUT, []):
            self.reasons.setdefault((requirement, column), (verdict, reason))
        self.reasons |= {
            (requirement, str(implementation)): ("variant", f"{function} is declared to be {variant}")
            for implementation in self.judged
            for function, variant in implementation.variants.items()
            for requirement in requirements_of(function)
        }
        self.columns = [*map(str, self.judged), *[PAPER] * any(column == PAPER for _, column in self.laws)]
        # What any law has met a fault of does not hold to a law of memory either.
        laws = [(column, entry) for (_, column), found in self.laws.items() for entry in found]
        faults = {
            column: entry for column, entry in laws if entry.get("unanswered", "").startswith(compiled.FAULT)
        }
        for column, entry in laws:
            if column in faults and entry["kind"] == MEMORY and entry["outcome"] == "pass":
                entry.update(faults[column], law=entry["law"], kind=MEMORY, functions=entry["functions"])
        for key, entries in list(self.laws.items()):  # where nothing was launched, nothing was seen
            passes = all(entry["kind"] == MEMORY and entry["outcome"] == "pass" for entry in entries)
            if passes and not self.executed[key[1]]["launches"]:
                self.reasons[key] = ("not applicable", "no kernel was launched")
                del self.laws[key]
        self._expect()
        for column in self.columns:
            self._excuse(column)

    def _expect(self) -> None:
        """Turn the failures that were foretold into such."""
        self.unmatched = set(self.expected)
        for (requirement, _), entries in self.laws.items():
            for entry in entries:
                name = entry["law"].partition("::")[2]
                if entry["outcome"] == "fail" and (matched := {requirement, name} & set(self.expected)):
                    self.unmatched -= matched
                    entry["outcome"], entry["reason"] = "expected failure", self.expected[matched.pop()]

    def _excuse(self, column: str) -> None:
        """A law that needs a function whose own requirement fails
        is not judged; nor is an edge whose mathematics fails.
        """
        place = {name: index for index, name in enumerate(REQUIREMENTS)}
        failed = {
            name
            for (name, each), _ in self.laws.items()
            if each == column and self._failing(name, column, MATHEMATICS)
        }
        for name in failed | {name for name, each in self.laws if each == column}:
            for entry in self.laws[name, column]:
                if entry["outcome"] != "fail" or entry["kind"] == REFUSAL:
                    continue
                own = [requirements_of(function) for function in entry["functions"]]
                # of a function with several requirements the first one is the cause
                last = place[name] if any(name in ids for ids in own) else len(place)
                causes = {each for ids in own for each in ids & failed if each != name and place[each] < last}
                if entry["kind"] == EDGE and name in failed:
                    causes.add(name)
                if causes:
                    cause = min(causes, key=place.__getitem__)
                    is_silent = self._shown(cause, column, MATHEMATICS)[0] == "no answer"
                    entry["outcome"] = "not judged"
                    entry["reason"] = f"{cause} {'has no answer' if is_silent else 'fails'}"

    def _failing(self, requirement: str, column: str, kind: str) -> list[dict[str, Any]]:
        entries = self.laws.get((requirement, column), [])
        return [entry for entry in entries if entry["kind"] == kind and entry["outcome"] == "fail"]

    def _counts(self, entry: dict[str, Any]) -> bool:
        """Whether an outcome is a failure that counts: of mathematics, with strict of any class of law,
        and always no answer.
        """
        return entry["outcome"] == "fail" and (
            self.strict or entry["kind"] in (MATHEMATICS, MEMORY) or "unanswered" in entry
        )

    def unanswered_with(self, text: str) -> str:
        """Why the first law has no answer whose reason holds a text; empty where there is none."""
        reasons = [entry.get("unanswered", "") for entries in self.laws.values() for entry in entries]
        return next((reason for reason in reasons if text in reason), "")

    def unexecuted(self) -> str:
        """Why compiled code of a law could not be executed; empty where all could."""
        return next((why for _, why in self.reasons.values() if why.startswith(compiled.CANNOT)), "")

    def in_a_line(self, required: list[str]) -> tuple[bool, str]:
        """Whether the verdict is good, and why; an empty line where nothing was judged, a GPU is all that
        is missing, or a launch could not be executed.
        """
        entries = [(column, entry) for (_, column), found in self.laws.items() for entry in found]
        own = [entry for column, entry in entries if column != PAPER]
        silent = [entry for entry in own if entry["outcome"] == "fail" and "unanswered" in entry]
        faulty = [entry for entry in silent if entry["unanswered"].startswith(compiled.FAULT)]
        elsewhere = [entry for entry in silent if NO_GPU in entry["unanswered"]]
        wrong = [entry for entry in own if entry["outcome"] == "fail" and "unanswered" not in entry]
        reasons = [
            *(
                _count(len(of), f"of {kind} fails", f"of {kind} fail")
                for kind, of in _by_kind(filter(self._counts, wrong))
            ),
            _count(len(faulty), "meets a fault of compiled code", "meet a fault of compiled code"),
            _count(len(silent) - len(faulty) - len(elsewhere), "has no answer", "have no answer"),
            f"{self.other_failures} other failures" if self.other_failures else "",
            f"{len(missing)} of the required are not provided" if (missing := self.missing(required)) else "",
        ]
        if any(reasons) or elsewhere:
            reasons += [_count(len(elsewhere), "needs a GPU", "need a GPU")] * any(reasons)
            raised = {_raised(entry) for entry in filter(self._counts, wrong)}
            why = f"; each time it raises {min(raised)}" if len(raised) == 1 and "" not in raised else ""
            return False, f"FAIL: {', '.join(filter(None, reasons))}{why}" * any(reasons)
        if self.unexecuted():
            return False, ""
        reasons = [
            _count(sum(entry["outcome"] == "pass" for _, entry in entries), "holds", "hold"),
            *(
                _count(len(of), f"of {kind} fails", f"of {kind} fail") + UNCOUNTED
                for kind, of in _by_kind(wrong)
            ),
            _count(sum(entry["outcome"] == "not judged" for entry in own), "is not judged", "are not judged"),
            _count(
                sum(entry["outcome"] == "expected failure" for entry in own),
                "fails as expected",
                "fail as expected",
            ),
        ]
        return True, f"PASS: {', '.join(filter(None, reasons))}" if entries else ""

    def of(self, requirement: str, column: str, kind: str = "") -> tuple[str, str]:
        """(pass, fail, expected failure, not judged, not applicable, not provided, variant or "", how many
        laws or why).
        """
        laws = [entry for entry in self.laws.get((requirement, column), []) if kind in ("", entry["kind"])]
        if not laws:
            return (
                ("", "")
                if (requirement, column) in self.laws
                else self.reasons.get((requirement, column), ("", ""))
            )
        for word in ("fail", "not judged", "expected failure"):
            if bad := [entry for entry in laws if entry["outcome"] == word]:
                return word, bad[0].get("reason", f"{len(bad)} of {len(laws)} laws")
        return "pass", f"{len(laws)} laws" if len(laws) > 1 else "1 law"

    def _shown(self, requirement: str, column: str, kind: str) -> tuple[str, str]:
        """What `of` says, for a reader: a law that has no answer is not called wrong."""
        word, detail = self.of(requirement, column, kind)
        failing = self._failing(requirement, column, kind)
        silent = bool(failing) and all("unanswered" in entry for entry in failing)
        return ("no answer", detail) if word == "fail" and silent else (word, detail)

    def missing(self, required: list[str]) -> list[str]:
        """Say what `--require` asks for and an implementation does not provide."""
        wanted = list(REQUIREMENTS) if "all" in required else required
        return [
            f"{requirement} is required of {column}: {reason}"
            for column in self.columns
            for requirement in wanted
            for verdict, reason in [self.of(requirement, column)]
            if verdict == "not provided"
        ]

    def write_table(self, terminal: Any) -> None:
        """One row for each requirement that the run touched; the reasons stand below."""
        rows = [name for name in REQUIREMENTS if any(self.of(name, column)[0] for column in self.columns)]
        if not rows:
            return
        terminal.section("verdict by requirement")
        width = max(22, *(len(column) + 2 for column in self.columns))
        terminal.write_line(f"{'':10}" + "".join(f"{column:{width}}" for column in self.columns))
        for name in rows:
            terminal.write(f"{name:10}")
            for column in self.columns:
                verdict, detail = self.of(name, column)
                failing = [kind for kind in KINDS if self._failing(name, column, kind)]
                shown = (
                    f"{verdict} ({detail})" if verdict in ("pass", "fail", "not judged") else verdict or "-"
                )
                if verdict == "fail" and MATHEMATICS not in failing:
                    shown = f"{' and '.join(failing)} only: {detail}"
                bad = verdict == "fail" and MATHEMATICS in failing
                terminal.write(
                    f"{shown:{width}}", green=verdict == "pass", red=bad, yellow=verdict != "pass" and not bad
                )
            terminal.write_line("")
        for (requirement, column), (verdict, reason) in sorted(self.reasons.items()):
            if (requirement, column) not in self.laws and verdict != "not provided":
                terminal.write_line(f"{requirement:10}{verdict} by {column}: {reason}", yellow=True)
        absent = Counter(
            column for (name, column), (verdict, _) in self.reasons.items() if verdict == "not provided"
        )
        for column, count in absent.items():
            terminal.write_line(
                f"{column} does not provide the functions of {count} requirements", yellow=True
            )
        for one in filter(self._executed, self.judged):
            terminal.write_line(f"{one} executed {self._executed(one)}")

    def write_summary(self, terminal: Any) -> None:
        """What a kernel author reads in ten seconds, and the first failure whole."""
        for place, one in enumerate(self.judged):
            column = str(one)
            if place:
                terminal.write_line("")
            terminal.write_line(column, bold=True)
            functions = one.functions()
            named = (
                ", ".join(functions)
                if len(functions) <= MOST_NAMED
                else f"{len(functions)} functions, which --json names"
            )
            terminal.write_line(f"  {'judged as':15}{named}")
            for title, kind, names in _rows():
                words = grouped(
                    (word, f"{name} ({detail})" if word in ("not judged", "expected failure") else name)
                    for name in names
                    if (name, column) in self.laws
                    for word, detail in [self._shown(name, column, kind)]
                    if word
                )
                if not words:
                    continue
                line = [
                    *(f"{word}: {', '.join(of)}" for word, of in words.items() if word != "pass"),
                    *([f"pass: {_named(words['pass'])}"] if "pass" in words else []),
                ]
                own = [
                    each
                    for name in names
                    for each in self.laws.get((name, column), [])
                    if each["kind"] == kind
                ]
                uncounted = "fail" in words and not any(map(self._counts, own))
                # a law of any function that refuses, the one on gradients, asks for more than an error
                of_input = kind == REFUSAL and {*words} == {"pass"} and {*words["pass"]} - {*_general()}
                any_error = ANY_ERROR if of_input and not self.strict else ""
                shown = f"  {title:15}{'; '.join(line)}{UNCOUNTED * uncounted}{any_error}"
                terminal.write_line(shown, red="fail" in words, green=set(words) == {"pass"})
            if executed := self._executed(one):
                terminal.write_line(f"  {'executed':15}{executed}")
            if asked := in_a_line(self.reach[column]):
                terminal.write_line(f"  {'asked up to':15}{asked}")
            for word in ("not applicable", "variant"):
                found = grouped(
                    (why, name)
                    for (name, each), (said, why) in self.reasons.items()
                    if each == column and said == word
                    if (name, column) not in self.laws or why.startswith(compiled.CANNOT)
                )
                for why, names in found.items():
                    terminal.write_line(f"  {word:15}{', '.join(names)}: {why}", yellow=True)
        if first := self._first_failure():
            name, column, entry = first
            terminal.section("the first failure" + UNCOUNTED * (not self._counts(entry)))
            terminal.write_line(entry["message"])
            laws = load_laws()
            others = [each for each in self.laws[name, column] if each is not entry]
            for title, outcome in (("it keeps", "pass"), ("it breaks too", "fail")):
                # the relations between answers, which tell what the mistake is not
                of_outcome = [
                    laws[each["law"]]
                    for each in others
                    # where there is no answer, none is broken
                    if each["outcome"] == outcome and "unanswered" not in each and not _raised(each)
                ]
                related = sorted((law for law in of_outcome if law.relates), key=lambda law: law.place)
                if related:
                    terminal.write_line(f"  {title:16}{'; '.join(law.in_words for law in related)}")

    def _first_failure(self) -> tuple[str, str, dict[str, Any]] | None:
        """The requirement, the column and the law that a report shows whole; None where all laws hold.

        The most basic law comes first: by its place in the specification, the definition before what follows
        from it, and what is asked of any function last.
        """
        order, laws = list(REQUIREMENTS), load_laws()
        failures = [
            (
                not self._counts(entry),
                NO_MORE in entry["message"] or NO_GPU in entry["message"],
                KINDS.index(entry["kind"]),
                ANY in entry["functions"],
                order.index(name),
                laws[entry["law"]].relates,
                laws[entry["law"]].place,
                [*map(str, self.judged), column].index(column),
                name,
                column,
                entry,
            )
            for (name, column), entries in self.laws.items()
            for entry in entries
            if entry["outcome"] == "fail"
        ]
        if not failures:
            return None
        *_, name, column, entry = min(failures, key=lambda failure: failure[:-1])
        return name, column, entry

    def _executed(self, implementation: Implementation) -> str:
        """How much compiled code was executed; an empty string for a device that runs it itself."""
        found = self.executed[str(implementation)]
        many = f"; no race was looked for in {found['unchecked']:,} launches with too many accesses"
        return (
            f"{found['launches']:,} launches with {found['accesses']:,} accesses, compiled for "
            f"{compiled.TARGET}{many * bool(found['unchecked'])}"
        ) * (implementation.device == compiled.DEVICE)

    def as_json(self) -> dict[str, Any]:
        """The content of conformance.json."""
        first = self._first_failure()
        return {
            "schema": SCHEMA,
            "suite": suite_version(),
            "verdict": self.line,
            "first_failure": first and {"requirement": first[0], "implementation": first[1], **first[2]},
            "implementations": [self._column(one) for one in self.judged],
        }

    def _column(self, implementation: Implementation) -> dict[str, Any]:
        column = str(implementation)
        requirements: dict[str, dict[str, Any]] = {
            name: {
                "verdict": verdict,
                "reason": "" if verdict in ("pass", "fail") else detail,
                "kinds": {kind: word for kind in KINDS if (word := self.of(name, column, kind)[0])},
                "statement": requirement.statement,
                "source": requirement.source,
                "laws": sorted(self.laws.get((name, column), []), key=lambda entry: entry["law"]),
            }
            for name, requirement in REQUIREMENTS.items()
            for verdict, detail in [self.of(name, column)]
            if verdict
        }
        counts = Counter(entry["verdict"] for entry in requirements.values())
        return {
            "name": implementation.name,
            "array_library": implementation.array_library,
            "device": implementation.device,
            "dtype": implementation.dtype,
            "domain": implementation.domain.said(),
            "conventions": sorted(implementation.conventions),
            "functions": implementation.functions(),
            **(
                {"compiled": {**compiled.WANTED, **self.executed[column]}}
                if implementation.device == compiled.DEVICE
                else {}
            ),
            "asked": self.reach[column],
            "counts": {word: counts[word] for word in WORDS},
            "requirements": requirements,
        }

    def write_files(self, folder: Path) -> None:
        """Write conformance.json and badge.json; pytest itself writes junit.xml beside them."""
        folder.mkdir(parents=True, exist_ok=True)
        content = self.as_json()
        (folder / "conformance.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        counts = [column["counts"] for column in content["implementations"]]
        passed, failed = (sum(each[word] for each in counts) for word in ("pass", "fail"))
        memory = {
            entry["kinds"].get(MEMORY)
            for column in content["implementations"]
            for entry in column["requirements"].values()
        }
        told = ", memory fails" if "fail" in memory else ", memory holds" * ("pass" in memory)
        badge = {
            "schemaVersion": 1,
            "label": "evictionary",
            "message": f"{passed} of {passed + failed} requirements{told}",
            "color": "red" if failed else "green",
        }
        (folder / "badge.json").write_text(json.dumps(badge) + "\n", encoding="utf-8")
