"""The inputs: tiny literal arrays that shrink to something
a person checks by hand, and seeded cases of a drawn kind.

Both have the same fields, so that a law takes either: keys, values, queries, next_keys, next_values. A
failing case prints as the expression that makes it again.
"""

import os
import zlib
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from hypothesis import strategies as st

KINDS = (
    "normal",
    "ties",
    "duplicate_keys",
    "zero_keys",
    "cancelling_keys",
    "constant_channel",
    "outlier_channel",
    "huge",
    "tiny",
    "mixed_norms",
    "drift",
    "sinks",
)
# Kinds of long inputs alone: what they show takes thousands of tokens, or they say more of scores than of
# states.
LONG_KINDS = ("moving_mean", "one_bin", "minute", "vast", "saturated", "small")


@dataclass(frozen=True)
class Case:
    """A seeded case: arrays of `transformers`' axes drawn
    from `seed` and then given the trait that `kind` names.

    keys, next_keys [batch, num_kv_heads, length, head_dim]; values, next_values [.., length, value_dim];
    queries [batch, group * num_kv_heads, num_queries, head_dim].
    """

    kind: str = "normal"
    seed: int = 0
    batch: int = 1
    num_kv_heads: int = 1
    group: int = 1
    length: int = 8
    head_dim: int = 4
    value_dim: int = 4
    num_queries: int = 1

    def _generator(self, name: str) -> np.random.Generator:
        # Of a hundred drawn cases a dozen seeds or so differ (hypothesis repeats what it drew), but all their
        # sizes do.
        sizes = (
            self.batch,
            self.num_kv_heads,
            self.length,
            self.group,
            self.head_dim,
            self.value_dim,
            self.num_queries,
        )
        return np.random.default_rng(
            [self.seed, (*KINDS, *LONG_KINDS).index(self.kind), *sizes, zlib.crc32(name.encode())]
        )

    def _states(self, name: str, channels: int) -> np.ndarray:
        generator = self._generator(name)
        return _with_trait(
            self.kind,
            generator.normal(size=(self.batch, self.num_kv_heads, self.length, channels)),
            generator,
        )

    # Each array is drawn when a law first reads it: of long inputs most laws read one.

    @cached_property
    def keys(self) -> np.ndarray:
        return self._states("keys", self.head_dim)

    @cached_property
    def values(self) -> np.ndarray:
        return self._states("values", self.value_dim)

    @cached_property
    def next_keys(self) -> np.ndarray:
        return self._states("next_keys", self.head_dim)

    @cached_property
    def next_values(self) -> np.ndarray:
        return self._states("next_values", self.value_dim)

    @cached_property
    def queries(self) -> np.ndarray:
        shape = (self.batch, self.group * self.num_kv_heads, self.num_queries, self.head_dim)
        return self._generator("queries").normal(size=shape)


def _with_trait(kind: str, states: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Give states [B, H, T, D] the trait of `kind`. Each kind defeats a wrong implementation that plain
    noise lets live.
    """
    length, channels = states.shape[-2:]
    match kind:
        case "ties":  # small whole numbers: many equal scores, and sums without rounding
            return np.round(states * 1.5)
        case "duplicate_keys":  # a few distinct rows, each many times
            return states[..., generator.integers(0, min(3, length), size=length), :]
        case "zero_keys":  # a zero vector in every head, where a division by a norm fails
            states[..., generator.integers(0, length), :] = 0
            return states
        case "cancelling_keys":  # the raw mean nearly vanishes, the mean of the unit vectors does not
            sign = np.where(np.arange(length) % 3 == 0, -2.0, 1.0)[:, None]
            return sign * states[..., :1, :] + 0.25 * states
        case "constant_channel":  # the range of one channel is zero
            states[..., generator.integers(0, channels)] = 0.75
            return states
        case "outlier_channel":  # one channel a hundred times the others, as in trained models
            states[..., generator.integers(0, channels)] *= 100
            return states
        case "huge":
            return states * 256
        case "tiny":
            return states / 256
        # norms over three orders of magnitude: what normalises too late is dominated by the largest
        case "mixed_norms":
            return states * 10.0 ** generator.uniform(-1.5, 1.5, size=(*states.shape[:-1], 1))
        # the mean moves along the sequence: the previous, the own and the next partition differ
        case "drift":
            return states + 3 * np.arange(length)[:, None] / length + generator.normal(size=(channels,))
        # massive activations: a channel or two of the first tokens, the same in all of them, dwarf the others
        case "sinks":
            channel = generator.integers(0, channels)
            states[..., :4, channel] = 50 + states[..., :4, channel]
            return states
        # the mean wanders over thousands of tokens: no stretch of them has the mean of the whole
        case "moving_mean":
            phases = np.arange(length)[:, None] / 1000 + generator.uniform(0, 2 * np.pi, size=channels)
            return states + 2 * np.sin(phases)
        # between 1 and the next float16: one value in half precision, different ones in float32
        case "one_bin":
            return 1 + 2.0**-11 * np.abs(np.tanh(states))
        case "minute":  # where an epsilon that is added for safety, 1e-6 or so, is no longer small
            return states * 1e-7
        case "small":  # norms of some 2e-4, below those of any model
            return states * 2.0**-15
        case "vast":
            return states * 1e4
        case "saturated":  # nine of ten are 0, as scores that are cut off: more equal ones than 16 bits count
            return np.where(np.abs(states) < 1.645, 0, states)
    return states


@dataclass(frozen=True, repr=False)
class Tiny:
    """Literal arrays of one or two heads, of numbers such
    as -1, 0, 0.5 and 2, on which most sums are exact.
    """

    keys: np.ndarray
    values: np.ndarray
    next_keys: np.ndarray
    next_values: np.ndarray
    queries: np.ndarray

    def as_case(self) -> Case:
        """A seeded case of the same sizes, of small whole numbers; the numbers of this one are its seed."""
        _, heads, length, head_dim = self.keys.shape
        seed = (
            zlib.crc32(b"".join(getattr(self, name).tobytes() for name in self.__dataclass_fields__)) % 2**16
        )
        group = self.queries.shape[1] // heads
        return Case(
            "ties", seed, 1, heads, group, length, head_dim, self.values.shape[-1], self.queries.shape[2]
        )

    def __repr__(self) -> str:
        fields = ", ".join(
            f"{name}=np.array({getattr(self, name).tolist()})" for name in self.__dataclass_fields__
        )
        return f"Tiny({fields})"


_SHORT = st.sampled_from([0.0, 1.0, -1.0, 2.0, 0.5, -2.0, 3.0, -0.5, 8.0])


@st.composite
def tiny_cases(
    draw: st.DrawFn, min_length: int = 1, max_length: int = 5, min_dim: int = 1, group: int = 1
) -> Tiny:
    """Draw a Tiny: one head and few tokens first, so that a counterexample shrinks to what fits on a line."""
    heads = draw(st.integers(1, 2))
    length, following = draw(st.integers(min_length, max_length)), draw(st.integers(1, max_length))
    head_dim, value_dim = draw(st.integers(min_dim, 3)), draw(st.integers(1, 3))

    def numbers(*shape: int) -> np.ndarray:
        count = int(np.prod(shape))
        return np.array(draw(st.lists(_SHORT, min_size=count, max_size=count))).reshape(shape)

    return Tiny(
        numbers(1, heads, length, head_dim),
        numbers(1, heads, length, value_dim),
        numbers(1, heads, following, head_dim),
        numbers(1, heads, following, value_dim),
        numbers(1, group * heads, 1, head_dim),
    )


def seeds() -> st.SearchStrategy[int]:
    """A seed for what a law draws itself, such as a permutation."""
    return st.integers(0, 2**16)


# Sizes at which kernels break: one, a tile less one, a tile, a tile and one.
LENGTHS = (1, 2, 3, 5, 15, 16, 17, 31, 32, 33, 64, 65, 129)
# RoPE turns pairs of channels. The odd number lies beyond a tile.
EVEN_DIMS = (2, 4, 8, 6, 16)
HEAD_DIMS = (*EVEN_DIMS, 33)


def seeded_cases(
    min_length: int = 1,
    max_length: int = LENGTHS[-1],
    kinds: tuple[str, ...] = KINDS,
    head_dims: tuple[int, ...] = HEAD_DIMS,
    groups: tuple[int, ...] = (1, 2, 3, 8),
) -> st.SearchStrategy[Case]:
    """Draw a Case: any kind, any of the awkward sizes between the bounds."""
    lengths = [length for length in LENGTHS if min_length <= length <= max_length]
    return st.builds(
        Case,
        kind=st.sampled_from(kinds),
        seed=seeds(),
        batch=st.sampled_from([1, 2, 1, 3]),
        num_kv_heads=st.sampled_from([1, 2, 1, 2, 5]),
        group=st.sampled_from(groups),
        length=st.sampled_from(lengths),
        head_dim=st.sampled_from(head_dims),
        value_dim=st.sampled_from(head_dims),
        num_queries=st.integers(1, 3),
    )


# Lengths at which long inputs break: one token less or more than whole tiles, splits, and what 15, 16 and 8 +
# 8 bits count. A law that draws one long case draws the first of each of these.
LONG_LENGTHS = (65_537, 4_097, 1_025, 32_769, 8_191, 12_289, 4_095, 40_960, 16_385)
# Enough for several splits; a plain loop over the tokens and the heads of a group ends in seconds.
SPLIT_LENGTHS = (16_385, 4_097, 8_191, 32_769, 12_289)
LONG_HEAD_DIMS = (64, 80, 128, 96, 256)
# Numbers of one array of a long case; where there would be more, it has one KV head, and as few channels as a
# model has.
_MOST_NUMBERS = 2**21


def _interpreted() -> bool:
    """Triton's interpreter takes a second for what a processor does in a millisecond: with it long inputs
    have a few tiles.
    """
    return os.environ.get("TRITON_INTERPRET") == "1"


def long_cases(
    kinds: tuple[str, ...] = ("moving_mean", "normal", "sinks"),
    groups: tuple[int, ...] = (1,),
    lengths: tuple[int, ...] = LONG_LENGTHS,
    head_dims: tuple[int, ...] = LONG_HEAD_DIMS,
) -> st.SearchStrategy[Case]:
    """Draw a Case of the sizes of real models: thousands of tokens, head_dim from 64 to 256."""

    def affordable(case: Case) -> Case:
        if _interpreted():
            return replace(case, num_kv_heads=1, length=257, head_dim=64, value_dim=64)
        if case.num_kv_heads * case.length * max(case.head_dim, case.value_dim) > _MOST_NUMBERS:
            return replace(case, num_kv_heads=1, head_dim=64, value_dim=64)
        return case

    return st.builds(
        Case,
        kind=st.sampled_from(kinds),
        seed=seeds(),
        num_kv_heads=st.sampled_from([2, 1, 3]),
        group=st.sampled_from(groups),
        length=st.sampled_from(lengths),
        head_dim=st.sampled_from(head_dims),
        value_dim=st.sampled_from(head_dims),
        num_queries=st.just(1),
    ).map(affordable)


# What papers run on: prompts up to 128K. With two channels and a head or two they cost milliseconds.
PAPER_LENGTHS = (131_072, 16_384, 32_769)


def paper_cases(
    lengths: tuple[int, ...] = PAPER_LENGTHS,
    kinds: tuple[str, ...] = ("moving_mean", "normal"),
    groups: tuple[int, ...] = (1,),
) -> st.SearchStrategy[Case]:
    """Draw a Case of the lengths that papers use, of as few channels and heads as a law needs."""
    return st.builds(
        Case,
        kind=st.sampled_from(kinds),
        seed=seeds(),
        num_kv_heads=st.sampled_from([1, 2]),
        group=st.sampled_from(groups),
        length=st.sampled_from((257,) if _interpreted() else lengths),
        head_dim=st.just(2),
        value_dim=st.just(2),
    )


def long_rows(
    kinds: tuple[str, ...] = ("ties", "one_bin", "vast", "normal", "duplicate_keys", "minute"),
    lengths: tuple[int, ...] = (131_072, 65_537, *LONG_LENGTHS[1:], 131_071),
) -> st.SearchStrategy[Case]:
    """Draw a Case with one channel, of up to 131,072 tokens:
    its keys are rows of scores [batch, heads, length].
    """
    return st.builds(
        Case,
        kind=st.sampled_from(kinds),
        seed=seeds(),
        num_kv_heads=st.sampled_from([1, 2]),
        length=st.sampled_from((4097,) if _interpreted() else lengths),
        head_dim=st.just(1),
    )


def cases(
    min_length: int = 1, max_length: int = LENGTHS[-1], kinds: tuple[str, ...] = KINDS, min_dim: int = 1
) -> st.SearchStrategy[Tiny | Case]:
    """Draw from both families."""
    return st.one_of(
        tiny_cases(min_length, min(max_length, min_length + 4), min_dim=min_dim),
        seeded_cases(min_length, max_length, kinds),
    )


def shares() -> st.SearchStrategy[float]:
    """A share of the tokens, 0 to 1 in sixteenths, evenly drawn: of `st.fractions(0, 1)` four in five lie
    at an end.
    """
    return st.integers(0, 16).map(lambda count: count / 16)


def prompt_queries(case, seed):
    """Queries of every token, [B, H_q, T, D], in quarters: the same in every dtype."""
    batch, num_query_heads, _, head_dim = case.queries.shape
    shape = (batch, num_query_heads, case.keys.shape[2], head_dim)
    return np.round(4 * np.random.default_rng(seed).normal(size=shape)) / 4
