"""The generated refusals: their right calls are accepted, and they tell an implementation that looks from
one that does not.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from evictionary.reference import knorm
from evictionary.reference.contract import PARITIES, contract_of, contracts
from evictionary.spec_tests.judge.implementation import STEPS, load, oracle
from evictionary.spec_tests.judge.law import load_laws
from evictionary.spec_tests.judge.misfits import fitting, misfits
from evictionary.spec_tests.proof.asking import outcome
from evictionary.spec_tests.proof.planted import replaced

LAW = "test_refusals::test_knorm_score_refuses_what_does_not_fit"


@pytest.mark.parametrize("path", sorted(contracts()))
def test_arguments_that_fit_are_accepted_and_each_misfit_is_refused(path: str) -> None:
    oracle(path)(**fitting(path))
    oracle(path)(**fitting(path, optional=True))
    for wrong in misfits(path):
        with pytest.raises(ValueError, match=wrong.argument):
            oracle(path)(**wrong.given)


def stricter(path: str) -> Iterator[tuple[str, Any]]:
    """Wrong arguments of a function that the laws leave alone, because a right kernel may take them: an axis
    too many, infinity as a setting, and zero where a setting is even.
    """
    given = fitting(path, optional=True)
    for each in contract_of(path).arguments:
        if not each.state and not each.lead:
            yield each.name, given[each.name][None]
    for name, own in contract_of(path).settings.items():
        *_, high, _, closed_high = own.limits
        if not own.whole and not (closed_high and high == math.inf):
            yield name, math.inf
        if own.text in PARITIES:
            yield name, 0


OURS = {layer: load(layer) for layer in ("reference", "optimized")}


@pytest.mark.parametrize(
    ("layer", "path"),
    [(layer, path) for layer, impl in OURS.items() for path in impl.functions() if path in contracts()],
)
def test_both_layers_refuse_more_than_the_laws_ask(layer: str, path: str) -> None:
    impl = OURS[layer]
    for argument, wrong in stricter(path):
        with pytest.raises(ValueError, match=argument):
            impl.call(path, **fitting(path, optional=True) | {argument: wrong})


def test_every_function_of_the_contract_has_its_law() -> None:
    assert {law.functions for name, law in load_laws().items() if name.startswith("test_refusals::")} == {
        (path,) for path in contracts().keys() - STEPS
    }


def length(keys: np.ndarray) -> np.ndarray:
    return -np.sqrt((keys * keys).sum(axis=-1))


def a_nan_shows(keys: np.ndarray) -> np.ndarray:
    if keys.ndim < 2 or not keys.size:
        raise ValueError("keys: got no tokens")
    return np.where(np.isfinite(keys).all(axis=-1), length(keys), np.nan)


def a_nan_is_hidden(keys: np.ndarray) -> np.ndarray:
    return np.nan_to_num(a_nan_shows(keys))


def nothing_is_looked_at(keys: np.ndarray) -> np.ndarray:
    return length(np.nan_to_num(keys, posinf=np.nan))


@pytest.mark.parametrize(
    ("score", "found"),
    [
        (knorm.score, "passed"),
        (a_nan_shows, "passed"),
        (a_nan_is_hidden, "killed"),
        (nothing_is_looked_at, "killed"),
    ],
)
def test_the_law_tells_who_looks_at_the_arguments(score: Callable[..., np.ndarray], found: str) -> None:
    assert outcome(load_laws()[LAW], replaced("one more", {"knorm.score": score}))[0] == found
