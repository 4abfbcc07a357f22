"""Cases as JSON, for ports in languages that no Python reaches: inputs, what the reference gives for them,
and the error allowed.

The cases of a requirement are calls that its laws make of the reference: for each planted mistake the
smallest that shows it, a few plain ones of several sizes, the smallest degenerate and refused ones, and some
that tell two mistakes apart. Each case names the mistakes that it tells from the right answer at its dtype.
docs/any_language.md describes the files, `vectors.schema.json` is their schema.
"""

import functools
import hashlib
import inspect
import json
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from evictionary.spec_tests.judge import wire
from evictionary.spec_tests.judge.degenerate import EDGE, KINDS, MATHEMATICS, REFUSAL, degenerate
from evictionary.spec_tests.judge.domain import Domain, OutsideDomain
from evictionary.spec_tests.judge.implementation import ANY, Call, Implementation, load, oracle
from evictionary.spec_tests.judge.law import Law, load_laws, suite_version
from evictionary.spec_tests.judge.outcome import outcome
from evictionary.spec_tests.judge.process import member, plain
from evictionary.spec_tests.judge.tolerance import allowance
from evictionary.spec_tests.proof.asking import laws_for
from evictionary.spec_tests.proof.planted import Mutant, answer, load_mutants
from evictionary.store import grouped

SCHEMA = "evictionary/vectors/1"
INDEX, SCHEMA_FILE = "vectors.json", "vectors.schema.json"
DTYPES = ("float64", "float32")
WRITTEN = ("float32", "float16", "bfloat16")
# Inputs that each law draws, that it draws again with the channels of trained models, and that it draws for a
# mistake which none of them shows.
EXAMPLES, WIDE_EXAMPLES, LONGER_LOOK, WIDE = 6, 6, 30, (64, 128)
# Calls with more numbers make no case; with the channels of trained models they may have more, and hold many
# tokens if they can.
MOST_NUMBERS, MOST_WIDE_NUMBERS, MANY_TOKENS = 1024, 16_384, 17


@dataclass(eq=False)
class Example:
    """One call of a function of the reference, its arguments as a reader of the JSON gets them."""

    function: str
    arguments: dict[str, Any]
    written: dict[str, Any]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        # both are dear, and asked for again and again
        self.allowed, self.catches = functools.cache(self._allowed), functools.cache(self._catches)

    @cached_property
    def numbers(self) -> int:
        """How many numbers the arguments hold."""
        return sum(np.size(leaf) for value in self.arguments.values() for leaf in leaves(value))

    @cached_property
    def key(self) -> str:
        """The arguments as text, by which calls are told apart."""
        return json.dumps(self.written)

    @property
    def rows(self) -> tuple[int, int]:
        """How many keys a head has, and their head_dim; 0 and 0 where there are none."""
        keys = self.arguments.get("keys")
        return keys.shape[-2:] if isinstance(keys, np.ndarray) and keys.ndim > 1 else (0, 0)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Those whose tolerances are written: numbers that
        half precision holds, float32 and float64 hold too.
        """
        return tuple(dict.fromkeys((*DTYPES, self.dtype)))

    @cached_property
    def result(self) -> Any:
        """What the reference gives, or the ValueError that it raises."""
        return answer(oracle(self.function), **self.arguments)

    @cached_property
    def kind(self) -> str:
        """The class of law that such a call belongs to."""
        if isinstance(self.result, ValueError):
            return REFUSAL
        return EDGE if degenerate(self.function, self.arguments) else MATHEMATICS

    def _allowed(self, dtype: str) -> list[tuple[float, float]]:
        """For each array of the result the largest and the mean error that a dtype allows; empty where
        there is no one answer.

        A mask or a number of tokens has one where rounding at random, which the error is measured by, does
        not change it.
        """
        function, found = oracle(self.function), []
        # Those without a default by position, as laws call it: what they have measured is remembered.
        leading = [
            each.name
            for each in inspect.signature(function).parameters.values()
            if each.default is each.empty and each.kind is not each.KEYWORD_ONLY
        ]
        args = [self.arguments[name] for name in leading]
        kwargs = {name: value for name, value in self.arguments.items() if name not in leading}
        several = isinstance(self.result, tuple | list)
        nested = several and any(isinstance(each, tuple | list) for each in self.result)
        asked = (lambda *args, **kwargs: tuple(leaves(function(*args, **kwargs)))) if nested else function
        for place, leaf in enumerate(leaves(self.result)):
            each = allowance(asked, *args, dtype=dtype, pick=place if several else None, **kwargs)
            if not np.isfinite(each.largest) or (np.asarray(leaf).dtype.kind != "f" and each.largest >= 0.5):
                return []
            found.append((each.largest, each.mean))
        return found

    @cached_property
    def usable(self) -> bool:
        """Whether there is something to compare with that every right implementation gives."""
        return self.kind == REFUSAL or all(map(self.allowed, self.dtypes))

    def _catches(self, mutant: Mutant) -> bool:
        """Whether the numbers of a planted mistake lie outside what the dtype allows, or it accepts what
        is to be refused.
        """
        got = answer(mutant.function, **self.arguments)
        if isinstance(got, Exception) or isinstance(self.result, ValueError):
            # a mistake that raises shows itself, and is no wrong number
            return not isinstance(got, Exception)
        mine, theirs = leaves(self.result), leaves(got)
        if len(mine) != len(theirs) or any(
            np.shape(one) != np.shape(other) for one, other in zip(mine, theirs, strict=True)
        ):
            return self.usable
        size = max(
            (
                np.abs(each[np.isfinite(each)]).max(initial=0)
                for each in map(np.asarray, mine)
                if each.dtype.kind == "f"
            ),
            default=0,
        )
        if all(_agree(one, other, 1e-8 * size, 1e-8 * size) for one, other in zip(mine, theirs, strict=True)):
            return False  # most often so, and the allowance is dear
        return self.usable and any(
            not _agree(one, other, *errors)
            for one, other, errors in zip(mine, theirs, self.allowed(self.dtype), strict=True)
        )

    def as_json(self) -> dict[str, Any]:
        """The case as it is written."""
        if isinstance(self.result, ValueError):
            expected: Any = {"error": str(self.result)}
        else:
            errors = zip(*map(self.allowed, self.dtypes), strict=True)
            tolerances = iter([dict(zip(self.dtypes, each, strict=True)) for each in errors])
            expected = written(self.result, lambda: next(tolerances))
        return {
            "function": self.function,
            "kind": self.kind,
            "arguments": self.written,
            "expected": expected,
        }


def _agree(expected: Any, got: Any, largest: float, mean: float) -> bool:
    expected, got = np.asarray(expected, dtype=np.float64), np.asarray(got, dtype=np.float64)
    same = (expected == got) | (np.isnan(expected) & np.isnan(got))
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0, np.abs(expected - got))
    return (
        bool(np.isfinite(error).all())
        and float(error.max(initial=0)) <= largest
        and float(error.sum()) <= mean * error.size
    )


def leaves(value: Any) -> list[Any]:
    """The arrays and numbers of a value, tuples and lists taken apart."""
    return [leaf for each in value for leaf in leaves(each)] if isinstance(value, tuple | list) else [value]


def written(value: Any, tolerance: Callable[[], dict[str, tuple[float, float]]] | None = None) -> Any:
    """A value as JSON; with `tolerance`, that of each array and number beside it.

    Raises OutsideDomain for what JSON cannot hold, such as a function.
    """

    def leaf(value: Any, _: str) -> Any:
        if not isinstance(value, np.ndarray) and tolerance is None:
            return plain(value)
        array = np.asarray(float(value) if isinstance(value, Fraction) else value)
        kinds = {"f": "float", "b": "bool", "i": "int", "u": "int"}
        if array.dtype.kind not in kinds:
            raise OutsideDomain(f"{array.dtype} cannot be written down")
        found: dict[str, Any] = {
            "shape": list(array.shape),
            "dtype": kinds[array.dtype.kind],
            "data": [plain(each) for each in array.ravel().tolist()],
        }
        if tolerance is not None:
            errors = tolerance()
            if found["dtype"] == "float":
                found["tolerance"] = {
                    dtype: {"largest": largest, "mean": mean} for dtype, (largest, mean) in errors.items()
                }
        return found

    return wire.to_json(value, leaf)


def read(value: Any) -> Any:
    """What `written` has written, as NumPy."""
    if isinstance(value, list):
        return tuple(read(each) for each in value)
    if isinstance(value, dict) and "type" in value:
        return member(value["type"])(
            **{field: read(each) for field, each in value.items() if field != "type"}
        )
    if isinstance(value, dict):
        dtype = {"float": np.float64, "bool": np.bool_, "int": np.int64}[value["dtype"]]
        return np.array(
            [float(each) if value["dtype"] == "float" else each for each in value["data"]], dtype
        ).reshape(value["shape"])
    return float(value) if value in ("nan", "inf", "-inf") else value


def _example(call: Call, dtype: str) -> Example | None:
    """The call as an example, or None where it cannot be one."""
    try:
        stored = {name: written(value) for name, value in call.arguments.items()}
    except OutsideDomain:
        return None
    example = Example(call.function, {name: read(value) for name, value in stored.items()}, stored, dtype)
    most = MOST_WIDE_NUMBERS if example.rows[1] in WIDE else MOST_NUMBERS
    right = isinstance(example.result, ValueError) or all(map(_is_numeric, leaves(example.result)))
    return example if right and example.numbers <= most else None


def _is_numeric(value: Any) -> bool:
    """Whether a result can be compared as numbers; a text, nothing and an error cannot."""
    return isinstance(value, Fraction) or np.asarray(value).dtype.kind in "fbiu"


def laws_of(methods: list[str] | None = None) -> list[Law]:
    """The laws that call functions, of some methods or of all. Long inputs would fill files of many MB:
    their laws stay out.
    """
    found = [
        law for law in load_laws().values() if law.functions and ANY not in law.functions and not law.examples
    ]
    stems = [f"test_{method}{end}" for method in methods or [] for end in ("::", "_")]
    return [law for law in found if not stems or law.name.startswith(tuple(stems))]


def generate(
    laws: list[Law], advance: Callable[[str], None], dtype: str = "float32", domain: Domain | None = None
) -> dict[str, dict[str, Any]]:
    """The file of each requirement of these laws, by its
    name; `advance` is told of each law and each requirement.

    Every number of an input is exact at dtype, and the inputs lie inside the domain.
    """
    pool = _Pool(dtype, domain or Domain())
    for law in laws:
        advance(law.sentence[:48])
        pool.draw(law)
    # Other mistakes, such as a random number, show in memory and not in numbers; some are of torch alone.
    numeric = {law.requirement.id for law in laws_of()}
    planted = (each for each in load_mutants().values() if each.killed_by in numeric and not each.above)
    mutants = defaultdict(list, grouped((each.of, each) for each in planted if each.array_library == "numpy"))
    chosen: dict[str, dict[str, list[Example]]] = defaultdict(dict)
    not_caught: dict[str, list[str]] = defaultdict(list)
    requirements = dict.fromkeys(law.requirement for law in laws)
    for requirement in requirements:
        advance(f"{requirement.id} {requirement.name}"[:48])
        for function in sorted(function for each, function in pool.asked if each == requirement.id):
            own = [mutant for mutant in mutants[function] if mutant.killed_by == requirement.id]
            smallest = {mutant.name: pool.smallest(mutant) for mutant in own}
            not_caught[requirement.id] += [name for name, each in smallest.items() if each is None]
            chosen[function][requirement.id] = pool.plain(requirement.id, function)
            chosen[function][requirement.id] += filter(None, smallest.values())
    for function, of_requirement in chosen.items():
        if mutants[function]:
            pool.tell_apart(mutants[function], of_requirement)
    content = {}
    for requirement in requirements:
        cases: list[dict[str, Any]] = []
        mistakes: dict[str, str] = {}
        for function in sorted(function for function in chosen if requirement.id in chosen[function]):
            for example in sorted(
                {id(each): each for each in chosen[function][requirement.id]}.values(), key=_simplest_first
            ):
                caught = [mutant for mutant in mutants[function] if example.catches(mutant)]
                mistakes |= {mutant.name: mutant.misconception for mutant in caught}
                cases.append(
                    {
                        "id": f"{requirement.id}/{len(cases) + 1}",
                        **example.as_json(),
                        "catches": [each.name for each in caught],
                    }
                )
        if cases:
            content[f"{requirement.id}.json"] = {
                "schema": SCHEMA,
                "requirement": requirement.id,
                "statement": requirement.statement,
                "source": requirement.source,
                "functions": sorted({case["function"] for case in cases}),
                "mistakes": mistakes,
                "not_caught": not_caught[requirement.id],
                "cases": cases,
            }
    return content


class _Pool:
    """The calls that laws make of the reference, by function, and by requirement and function."""

    def __init__(self, dtype: str, domain: Domain) -> None:
        # NumPy has no bfloat16, and needs none: the reference computes in float64, on numbers that the dtype
        # holds.
        self.narrow, self.wide = (
            load("reference", domain=domain),
            load("reference", domain=Domain(head_dim=WIDE) | domain),
        )
        self.narrow.dtype = self.wide.dtype = self.dtype = dtype
        self.examples: dict[str, dict[str, Example]] = defaultdict(dict)
        self.asked: dict[tuple[str, str], dict[str, Example]] = defaultdict(dict)

    def draw(self, law: Law) -> None:
        """Run a law on the reference and keep its calls."""
        self._run(law, self.narrow, EXAMPLES)
        if law.drawn and law.kind == MATHEMATICS and not law.brute_force:
            self._run(law, self.wide, WIDE_EXAMPLES)

    def _run(self, law: Law, implementation: Implementation, max_examples: int) -> None:
        implementation.history = deque()
        outcome(law, implementation, max_examples=max_examples)
        for call in implementation.history:
            if (example := _example(call, self.dtype)) is not None:
                example = self.examples[call.function].setdefault(example.key, example)
                self.asked[law.requirement.id, call.function][example.key] = example

    def smallest(self, mutant: Mutant) -> Example | None:
        """The smallest call that shows a planted mistake, generic ones before degenerate ones; None where
        no single call does.
        """
        for example in sorted(self.examples[mutant.of].values(), key=_simplest_first):
            if example.catches(mutant):
                return example
        implementation = mutant.implementation()
        implementation.dtype, implementation.domain = self.dtype, self.narrow.domain
        for law in laws_for(mutant, mutant.killed_by):
            if outcome(law, implementation, max_examples=LONGER_LOOK)[0] == "killed":
                for call in implementation.calls:
                    if (
                        call.function == mutant.of
                        and (found := _example(call, self.dtype))
                        and found.catches(mutant)
                    ):
                        return self.examples[mutant.of].setdefault(found.key, found)
        return None

    def tell_apart(self, mutants: list[Mutant], chosen: dict[str, list[Example]]) -> None:
        """Add generic calls to those of the requirements until no two mistakes that some call tells apart
        show in the same ones.
        """
        before = [each for examples in chosen.values() for each in examples if each.kind == MATHEMATICS]
        groups = [[mutant for mutant in mutants if any(each.catches(mutant) for each in before)]]
        others = [
            each
            for each in self.examples[mutants[0].of].values()
            if each.kind == MATHEMATICS and each not in before
        ]
        for example in [*before, *sorted(others, key=_simplest_first)]:
            parts = []
            for group in groups:
                caught = [each for each in group if example.catches(each)]
                parts += [caught, [each for each in group if each not in caught]]
                if all(parts[-2:]) and example in others:
                    chosen[min(chosen, key=lambda requirement: requirement != caught[0].killed_by)].append(
                        example
                    )
            groups = [part for part in parts if len(part) > 1]

    def plain(self, requirement: str, function: str) -> list[Example]:
        """Generic calls from small to large and one for each wide head; the smallest degenerate and the
        smallest refused one.
        """
        own = sorted(self.asked[requirement, function].values(), key=_simplest_first)
        generic = [each for each in own if each.kind == MATHEMATICS]
        narrow = [each for each in generic if each.rows[1] not in WIDE]
        rows = [narrow[len(narrow) // 4 :], narrow[len(narrow) // 2 :], narrow[::-1]]
        wide = sorted(generic, key=lambda each: each.rows[0] < MANY_TOKENS)
        rows += [
            *([each for each in wide if each.rows[1] == channels] for channels in WIDE),
            *([each for each in own if each.kind == kind] for kind in (EDGE, REFUSAL)),
        ]
        return [found for row in rows if (found := next((each for each in row if each.usable), None))]


def _simplest_first(example: Example) -> tuple[int, int, str]:
    return KINDS.index(example.kind), example.numbers, example.key


def write(content: dict[str, dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Write the files, their schema and the index with their checksums; what an index there lists beside
    them goes. The index.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / INDEX).is_file():
        for name in json.loads((folder / INDEX).read_text(encoding="utf-8"))["files"]:
            (folder / Path(name).name).unlink(missing_ok=True)
    entries = {}
    for name, each in content.items():
        head = json.dumps({**each, "cases": []}, indent=1).removesuffix("[]\n}")
        cases = ",\n".join(json.dumps(case) for case in each["cases"])  # one line for each
        (folder / name).write_text(f"{head}[\n{cases}\n]\n}}\n", encoding="utf-8")
        entries[name] = {
            "sha256": _digest(folder / name),
            "functions": each["functions"],
            "cases": len(each["cases"]),
            "mistakes": len(each["mistakes"]),
            "not_caught": len(each["not_caught"]),
        }
    schema = files("evictionary.spec_tests").joinpath("verdict", SCHEMA_FILE).read_text(encoding="utf-8")
    (folder / SCHEMA_FILE).write_text(schema, encoding="utf-8")
    entries[SCHEMA_FILE] = {"sha256": _digest(folder / SCHEMA_FILE)}
    index = {"schema": SCHEMA, "suite": suite_version(), "files": entries}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return index


def check(folder: Path) -> list[str]:
    """A sentence for each file that is not as the index says; none where all are. Raises ValueError where
    there is no index.
    """
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        if index["schema"] != SCHEMA:
            raise ValueError(f"schema {index['schema']}")
        listed = {str(name): str(entry["sha256"]) for name, entry in index["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"got {folder}, wanted a folder with a {INDEX} of {SCHEMA} ({type(error).__name__}: {error})"
        ) from None
    here = {name: _digest(folder / name) for name in listed if (folder / name).is_file()}
    changed = f"has been changed: its checksum is not that of {INDEX}"
    return [
        *(
            f"{name} {changed if name in here else 'is missing'}"
            for name in listed
            if here.get(name) != listed[name]
        ),
        *(
            f"{path.name} is not listed in {INDEX}"
            for path in sorted(folder.glob("*.json"))
            if path.name not in {*listed, INDEX}
        ),
    ]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
