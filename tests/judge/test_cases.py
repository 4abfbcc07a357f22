"""The inputs that the laws draw: every kind is reached and has its trait, sizes are spread, large arrays
are not degenerate.
"""

import itertools
from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

from evictionary.spec_tests.judge.cases import (
    HEAD_DIMS,
    KINDS,
    LENGTHS,
    LONG_HEAD_DIMS,
    LONG_KINDS,
    LONG_LENGTHS,
    Case,
    Tiny,
    cases,
    long_cases,
    long_rows,
    seeded_cases,
    shares,
    tiny_cases,
)
from evictionary.spec_tests.judge.law import load_laws


def draws(strategy: SearchStrategy[Any], count: int) -> list[Any]:
    """What a law of so many inputs gets, the same in every run."""
    found = []

    @settings(
        max_examples=count,
        database=None,
        derandomize=True,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(value=strategy)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found


@cache
def seeded() -> list[Case]:
    return draws(seeded_cases(), 1000)


@pytest.mark.parametrize(
    ("field", "wanted"),
    [
        ("kind", KINDS),
        ("length", LENGTHS),
        ("head_dim", HEAD_DIMS),
        ("value_dim", HEAD_DIMS),
        ("group", (1, 2, 3, 8)),
        ("batch", (1, 2, 3)),
        ("num_kv_heads", (1, 2, 5)),
        ("num_queries", (1, 2, 3)),
    ],
)
def test_every_value_is_reached_about_as_often(field: str, wanted: tuple[Any, ...]) -> None:
    counts = Counter(getattr(case, field) for case in seeded())
    assert set(counts) == set(wanted)
    even = len(seeded()) / len(wanted)
    assert all(even / 3 <= count <= 3 * even for count in counts.values()), counts


def test_hardly_two_cases_hold_the_same_numbers() -> None:
    normal = [case.keys.flat[-1] for case in seeded() if case.kind == "normal"]
    for held in (normal, [case.keys.tobytes() for case in seeded()]):
        assert len(set(held)) > 0.9 * len(held)


def test_both_families_are_drawn() -> None:
    counts = Counter(type(case) for case in draws(cases(), 300))
    assert min(counts[Tiny], counts[Case]) > 60, counts


def test_tiny_cases_are_of_every_length_and_hardly_ever_zero() -> None:
    found = draws(tiny_cases(), 300)
    assert {case.keys.shape[1:3] for case in found} == set(itertools.product((1, 2), range(1, 6)))
    assert sum(not case.keys.any() for case in found) < 60
    assert len({case.keys.tobytes() for case in found}) > 100


def test_shares_are_spread_over_the_whole_range() -> None:
    counts = Counter(draws(shares(), 400))
    assert set(counts) == {count / 16 for count in range(17)} and counts[0.0] + counts[1.0] < 120


def large(kind: str, **sizes: int) -> Case:
    return Case(
        kind=kind,
        **{"seed": 1, "batch": 2, "num_kv_heads": 2, "length": 65, "head_dim": 16, "value_dim": 8} | sizes,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_large_arrays_are_finite_and_differ(kind: str) -> None:
    case = large(kind)
    for states in (case.keys, case.values, case.next_keys, case.next_values, case.queries):
        assert np.isfinite(states).all() and np.unique(states).size > 5
        # one channel at most is constant
        assert (states.std(axis=(0, 1, 2)) > 0).sum() >= states.shape[-1] - 1
    for one, other in (
        (case.keys[0], case.keys[1]),
        (case.keys[:, 0], case.keys[:, 1]),
        (case.keys, case.next_keys),
    ):
        assert not np.array_equal(one, other)
    np.testing.assert_array_equal(large(kind).keys, case.keys)


def test_normal_arrays_are_normal() -> None:
    keys = Case(seed=2, length=4096, head_dim=16).keys
    assert np.unique(keys).size == keys.size and abs(keys.mean()) < 0.02 and abs(keys.std() - 1) < 0.02


def ratio_of_channel_spreads(keys: np.ndarray) -> float:
    spreads = np.sort(keys.std(axis=(0, 1, 2)))
    return float(spreads[-1] / spreads[-2])


TRAITS = {
    "ties": lambda keys: (keys == np.round(keys)).all() and np.unique(keys).size < 20,
    "duplicate_keys": lambda keys: len(np.unique(keys[0, 0], axis=0)) <= 3,
    "zero_keys": lambda keys: (~keys.any(axis=-1)).any(axis=-1).all(),
    # The raw mean is short beside the keys, the mean of the unit keys is not.
    "cancelling_keys": lambda keys: (
        np.linalg.norm(keys.mean(axis=2), axis=-1).max() < 0.1 * np.linalg.norm(keys, axis=-1).mean()
        and np.linalg.norm((keys / np.linalg.norm(keys, axis=-1, keepdims=True)).mean(axis=2), axis=-1).min()
        > 0.2
    ),
    "constant_channel": lambda keys: (np.ptp(keys, axis=(0, 1, 2)) == 0).sum() == 1,
    "outlier_channel": lambda keys: ratio_of_channel_spreads(keys) > 50,
    "huge": lambda keys: np.abs(keys).mean() > 100,
    "tiny": lambda keys: np.abs(keys).mean() < 0.01,
    "mixed_norms": lambda keys: np.ptp(np.log10(np.linalg.norm(keys, axis=-1))) > 2,
    "drift": lambda keys: (keys[:, :, -16:].mean(axis=(2, 3)) - keys[:, :, :16].mean(axis=(2, 3)) > 1).all(),
    "sinks": lambda keys: (np.abs(keys[:, :, :4]).max(axis=-1) > 5 * np.abs(keys[:, :, 4:]).max()).all(),
}
LONG_TRAITS = {
    "moving_mean": lambda keys: np.ptp(keys.reshape(2, 2, 16, 256, -1).mean(axis=3), axis=2).min() > 1,
    "one_bin": lambda keys: (
        np.unique(keys.astype(np.float16)).size == 1 and np.unique(keys.astype(np.float32)).size > 1024
    ),
    "minute": lambda keys: np.abs(keys).max() < 1e-6,
    "small": lambda keys: 1e-6 < np.abs(keys).max() < 1e-3,
    "vast": lambda keys: np.abs(keys).mean() > 5000,
    "saturated": lambda keys: 0.88 < (keys == 0).mean() < 0.92,
}


LONG_SIZES = {"seed": 3, "length": 4096, "head_dim": 64, "value_dim": 64}
EVERY_TRAIT = {
    **{kind: (trait, {}) for kind, trait in TRAITS.items()},
    **{kind: (trait, LONG_SIZES) for kind, trait in LONG_TRAITS.items()},
}


@pytest.mark.parametrize("kind", sorted(EVERY_TRAIT))
def test_each_kind_has_its_trait_and_plain_noise_has_not(kind: str) -> None:
    trait, sizes = EVERY_TRAIT[kind]
    assert trait(large(kind, **sizes).keys) and not trait(large("normal", **sizes).keys)


def test_every_kind_has_a_trait_here() -> None:
    assert (set(TRAITS) | {"normal"}, set(LONG_TRAITS)) == (set(KINDS), set(LONG_KINDS))


def test_long_cases_have_the_sizes_of_models() -> None:
    found = draws(long_cases(groups=(16, 1, 4)), 200)
    for field, wanted in (("length", LONG_LENGTHS), ("head_dim", LONG_HEAD_DIMS), ("group", (1, 4, 16))):
        assert {getattr(case, field) for case in found} == set(wanted)
    assert max(case.num_kv_heads * case.length * case.head_dim for case in found) < 2**23  # 64 MiB of float64
    # The one case that a short profile draws is long enough for every mistake of size.
    assert draws(long_cases(), 1)[0].length == LONG_LENGTHS[0] > 2**16


def test_long_rows_tie_and_crowd_beyond_what_a_stash_holds() -> None:
    rows = {case.kind: case for case in draws(long_rows(), 100)}
    counts = {kind: np.unique(case.keys[0, 0], return_counts=True)[1].max() for kind, case in rows.items()}
    assert min(counts["ties"], counts["duplicate_keys"]) > 1024
    crowded = np.unique(rows["one_bin"].keys[0, 0].astype(np.float16), return_counts=True)[1].max()
    assert crowded > 2048 > counts["one_bin"]


def looks(found: list[Any]) -> dict[str, Counter[Any]]:
    """How often each kind, length or number comes among draws."""
    if not isinstance(found[0], Case | Tiny):
        return {"value": Counter(map(repr, found))}
    lengths = [case.length if isinstance(case, Case) else case.keys.shape[2] for case in found]
    return {"kind": Counter(getattr(case, "kind", "tiny") for case in found), "length": Counter(lengths)}


@pytest.mark.slow
def test_no_law_draws_one_value_most_of_the_time() -> None:
    """Of what each law draws, no kind, length or number comes more than eight times in ten."""
    strategies = {repr(strategy): strategy for law in load_laws().values() for strategy in law.drawn.values()}
    strategies.pop("data()", None)
    drawn = {name: looks(draws(strategy, 60)) for name, strategy in strategies.items()}
    every = [
        (f"{name}: {look}", counts)
        for name, found in drawn.items()
        for look, counts in found.items()
        if len(counts) > 1
    ]
    assert [name for name, counts in every if max(counts.values()) > 0.8 * sum(counts.values())] == []
