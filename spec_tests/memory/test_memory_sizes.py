"""Laws of real sizes, whatever a function computes: MEM-10.

The laws of an equation ask for what a person checks by hand. These ask every function of the contract for the
sizes of models, one large axis at a time: such a case costs milliseconds. They fail where a function is right
at small sizes and wrong at a large one; of what is wrong at both, the laws of its equation say.
"""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from unittest import mock

from evictionary.reference import rope, selection
from evictionary.spec_tests.judge import compiled, interpreted
from evictionary.spec_tests.judge.by_hand import accumulating
from evictionary.spec_tests.judge.domain import OutsideDomain
from evictionary.spec_tests.judge.implementation import STEPS
from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.judge.tolerance import FACTOR
from evictionary.spec_tests.memory.arguments import arguments_inside, signature_of
from evictionary.spec_tests.memory.helpers import (
    Raises,
    agree,
    answering,
    as_called,
    holds_nan,
    in_turn,
    leaves,
    same_bits,
    taken,
)
from evictionary.spec_tests.memory.models import (
    ALL_PAIRS,
    BATCHES,
    CHANNELS,
    GROUPS,
    KV_HEADS,
    LENGTHS,
    NOT_ASKED,
    SMALL,
    values_in_use,
)


@law("MEM-10", of=ANY, examples=2, seed=seeds())
def test_kv_heads_of_models(impl, seed):
    """A function that is right with two KV heads is right with as many as models have: 1, 4, 5, 8, 16."""
    ask_sizes(impl, seed, "KV heads", "num_kv_heads", KV_HEADS)


@law("MEM-10", of=ANY, examples=2, seed=seeds())
def test_groups_of_models(impl, seed):
    """A function that is right with two query heads of each KV head is right with 1 to 8 of them, and 16."""
    ask_sizes(impl, seed, "query heads of each KV head", "group", GROUPS)


@law("MEM-10", of=ANY, examples=2, seed=seeds())
def test_batches_of_models(impl, seed):
    """A function that is right for one sequence is right for a batch of up to eight."""
    ask_sizes(impl, seed, "sequences", "batch", BATCHES)


@law("MEM-10", of=ANY, examples=2, seed=seeds())
def test_channels_of_models(impl, seed):
    """A function that is right with four channels is right with as many as models have: 32 to 256."""
    ask_sizes(impl, seed, "channels", "head_dim", CHANNELS)


@law("MEM-10", of=ANY, examples=2, seed=seeds())
def test_texts_of_hundreds_of_tokens(impl, seed):
    """A function that is right for 24 tokens is right for 300 to 1,000, which no tile of 16 divides."""
    ask_sizes(impl, seed, "tokens", "length", LENGTHS)


@law("MEM-10", of=ANY, examples=2, seed=seeds(), kind_of_keys=st.sampled_from(["outlier_channel", "sinks"]))
def test_norms_of_models(impl, seed, kind_of_keys):
    """A function that is right for keys and values of normal numbers is right for those of a model, which
    have a channel of fifty to a hundred times the others.
    """
    wide = replace(SMALL, seed=seed, head_dim=64, value_dim=64)
    large = replace(wide, kind=kind_of_keys)
    told = f"keys of the kind {kind_of_keys!r}"
    right_at(impl, wide, [Question(path, large, told) for path in functions(impl, large)])


@law("MEM-10", of=ANY, examples=2, seed=seeds())
def test_settings_of_papers_and_models(impl, seed):
    """A function that is right with settings for a short text is right with its defaults and with the
    settings that papers and models use, one at a time.
    """
    right_at(impl, replace(SMALL, seed=seed), in_use(impl, seed))


@dataclass(frozen=True)
class Question:
    """A function, the sizes at which it is asked, and what is large about them in words. With settings, they
    and the defaults are taken in place of those for a short text.
    """

    path: str
    case: Case
    told: str
    settings: Mapping[str, Any] | None = None


def ask_sizes(impl: Implementation, seed: int, unit: str, axis: str, wanted: list[int]) -> None:
    """Ask every function for each of these sizes of one axis."""
    small = replace(SMALL, seed=seed)
    right_at(impl, small, of_axis(impl, small, unit, axis, wanted))


def of_axis(impl: Implementation, small: Case, unit: str, axis: str, wanted: list[int]) -> Iterator[Question]:
    """The questions with other sizes of one axis."""
    for size in wanted:
        if axis == "length" and size > longest(impl):
            continue
        sizes: dict[str, Any] = {axis: size} | ({"value_dim": size} if axis == "head_dim" else {})
        case = replace(small, **sizes)
        for path in functions(impl, case):
            if axis != "length" or path not in ALL_PAIRS:
                yield Question(path, case, f"{size} {unit}")


def in_use(impl: Implementation, seed: int) -> Iterator[Question]:
    """The questions with each value of each setting that is in use; one of a function without settings."""
    for path in functions(impl, replace(SMALL, seed=seed)):
        values = [
            (name, value) for name in signature_of(path).parameters for value in values_in_use(path, name)
        ]
        if not values:
            yield Question(path, replace(LONG, seed=seed), f"{LONG.length} tokens", {})
        for name, value in values:
            length = max(LONG.length, 3 * value + 44 if isinstance(value, int) else 0)
            case = replace(LONG, seed=seed, length=min(length, longest(impl)))
            yield Question(path, case, f"{name}={value!r}", {name: value})


LONG = Case(length=LENGTHS[0], head_dim=8, value_dim=8, num_queries=LENGTHS[0])
"""One head, a few pairs of channels, and queries for every window."""

MOST_TOKENS = 3200
"""Enough for two partitions of LagKV's 1,024 tokens, and what comes behind them."""


def is_slow(impl: Implementation) -> bool:
    """Whether a call takes a second that takes a millisecond elsewhere."""
    return interpreted.is_used() or impl.device == compiled.DEVICE


def functions(impl: Implementation, case: Case) -> list[str]:
    """The functions that a case is asked of: all, or where that takes long, some of a large package."""
    found = [path for path in impl.asked_of_memory() if path not in NOT_ASKED]
    return in_turn(found, case) if is_slow(impl) else found


def longest(impl: Implementation) -> int:
    """How many tokens are asked at most."""
    return LENGTHS[0] if is_slow(impl) else MOST_TOKENS


def right_at(impl: Implementation, small: Case, questions: Iterable[Question]) -> None:
    """Raise what a function does wrong where it is asked for something large, unless it is wrong at small
    sizes too. Raises OutsideDomain where nothing could be asked.
    """
    asked, silent = False, "no function of it takes such arguments"
    for question in questions:
        drawn = arguments_inside(impl, question.path, question.case, question.settings)
        given = taken(impl, question.path, drawn)
        if given is None or is_left_open(question.path, given):
            continue
        error = wrong(impl, question.path, given, f"is wrong with {question.told}")
        if error is None:
            asked = True
            continue
        calls = impl.calls[-1:]
        if not is_wrong_anyway(impl, question.path, small):
            impl.calls[:] = calls
            raise error
        silent = "what is wrong at small sizes is not asked for large ones"
    if not asked:
        raise OutsideDomain(silent, always=True)


def is_left_open(path: str, given: dict[str, Any]) -> bool:
    """Whether the paper leaves the answer to these arguments open, so that several are right."""
    return path == "h2o.select" and given["budget"] % 2 == 1  # either half may have the odd token


def is_wrong_anyway(impl: Implementation, path: str, small: Case) -> bool:
    """Whether a function is wrong at small sizes too: for numbers that are alike, where a mistake may hide
    in the roundings of half precision, or for keys of many lengths.
    """
    for kind in ("normal", "mixed_norms"):
        usual = taken(impl, path, arguments_inside(impl, path, replace(small, kind=kind)))
        if usual is not None and wrong(impl, path, usual, "is wrong") is not None:
            return True
    return False


def wrong(impl: Implementation, path: str, given: dict[str, Any], otherwise: str) -> Violation | None:
    """What does not hold where the answer is not that of the mathematics; None where it is, and where nothing
    can be said of it: the mathematics gives NaN, a rounding decides, or the dtype cannot hold the numbers.

    Raises Violation where the function raises, unless it is a step that no law names.
    """
    with np.errstate(all="ignore"):
        expected = oracle(path)(**given)
    if holds_nan(expected):
        return None
    args, kwargs = as_called(path, given)
    got = None
    try:
        with answering(path):
            got = impl.call(path, *args, **kwargs)
        got = tuple(got) if isinstance(got, Iterator) else got
        agree(impl, path, given, expected, got, otherwise)
    except OutsideDomain:
        return None
    except Violation as found:
        if isinstance(found, Raises) and path not in STEPS:
            raise
        is_excused = got is not None and (
            a_tie_decides(path, given, expected)
            or is_between_codes(path, given, got)
            or is_right_but_for_angles(impl, path, given, expected, got)
        )
        return None if is_excused else found
    return None


def a_tie_decides(path: str, given: dict[str, Any], expected: Any) -> bool:
    """Whether the mathematics makes other numbers infinite where the last of equal scores are kept, in place
    of the first.
    """

    first_of_equals = selection.top_k

    def last_of_equals(scores, budget, protected=None):
        backwards = None if protected is None else protected[..., ::-1]
        return first_of_equals(scores[..., ::-1], budget, backwards)[..., ::-1]

    with in_place_of(first_of_equals, last_of_equals) as replaced, np.errstate(all="ignore"):
        other = oracle(path)(**given)
    return replaced.called and not same_bits(
        *([np.isinf(leaf) for leaf in floats(one)] for one in (expected, other))
    )


FROM_FLOAT32 = ("quantisation.e4m3", "quantisation.fp8")
"""Functions that round to codes of a byte: torch and hardware do it from float32, of float64 too."""


def is_between_codes(path: str, given: dict[str, Any], got: Any) -> bool:
    """Whether each number has the code of some number that is as near as float32 tells apart: halfway
    between two codes, either is right.
    """
    if path not in FROM_FLOAT32:
        return False
    generator, size = np.random.default_rng(0), FACTOR * EPSILON["float32"]

    def moved(value: Any) -> Any:
        is_moved = isinstance(value, np.ndarray)
        return value * (1 + size * generator.uniform(-1, 1, size=value.shape)) if is_moved else value

    answers = [
        oracle(path)(**{name: moved(value) for name, value in given.items()}) for _ in range(CODE_RUNS)
    ]
    return bool(((np.min(answers, axis=0) <= got) & (got <= np.max(answers, axis=0))).all())


CODE_RUNS = 16


def is_right_but_for_angles(
    impl: Implementation, path: str, given: dict[str, Any], expected: Any, got: Any
) -> bool:
    """Whether an answer is right where angles of RoPE are rounded as the accumulator of the dtype does it.

    The plain computation of the tolerance has exact angles. At position 1,000 a rounding of float32 is an
    angle of 1e-4, and every implementation whose tables are float32 makes it.
    """
    generator, size = np.random.default_rng(0), FACTOR * accumulating(impl)
    exact = rope.frequencies

    def rounded(head_dim, theta=10000.0):
        found = exact(head_dim, theta)
        return found * (1 + size * generator.choice([-1, 1], size=found.shape))

    wrong_by = 0.0
    with in_place_of(exact, rounded) as replaced, np.errstate(all="ignore"):
        for _ in range(ANGLE_RUNS):
            for leaf, other in zip(floats(expected), floats(oracle(path)(**given)), strict=True):
                wrong_by = max(wrong_by, np.abs(other - leaf)[np.isfinite(leaf)].max(initial=0))
    if not replaced.called:
        return False

    try:
        agree(impl, path, given, expected, got, "is wrong", more=wrong_by)
    except Violation:
        return False
    return True


ANGLE_RUNS = 6


def floats(answer: Any) -> list[np.ndarray]:
    """The floating numbers of an answer."""
    return [leaf for leaf in leaves(answer) if leaf.dtype.kind == "f"]


@contextlib.contextmanager
def in_place_of(function: Callable[..., Any], other: Callable[..., Any]) -> Iterator[mock.Mock]:
    """What is called in place of a function in all modules of `reference`, meanwhile."""
    replaced = mock.Mock(wraps=other)
    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("evictionary.reference.") and vars(module).get(function.__name__) is function:
                stack.enter_context(mock.patch.object(module, function.__name__, replaced))
        yield replaced
