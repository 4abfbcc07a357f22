"""Laws of real sizes, whatever a function computes: MEM-10.

The laws of an equation ask for what a person checks by hand. These ask every function of the contract for the
sizes of models, one large axis at a time: such a case costs milliseconds. They fail where a function is right
at small sizes and wrong at a large one; of what is wrong at both, the laws of its equation say.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from evictionary.spec_tests.judge import compiled, interpreted
from evictionary.spec_tests.judge.domain import OutsideDomain
from evictionary.spec_tests.judge.implementation import STEPS
from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.memory.arguments import arguments_inside, signature_of
from evictionary.spec_tests.memory.helpers import (
    Raises,
    agree,
    answering,
    as_called,
    holds_nan,
    in_turn,
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
        if given is None:
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
    try:
        with answering(path):
            got = impl.call(path, *args, **kwargs)
        agree(impl, path, given, expected, tuple(got) if isinstance(got, Iterator) else got, otherwise)
    except OutsideDomain:
        return None
    except Violation as found:
        if isinstance(found, Raises) and path not in STEPS:
            raise
        return found
    return None
