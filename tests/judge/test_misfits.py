"""The generated refusals: their right calls are accepted, and they tell an implementation that looks from
one that does not.
"""

from collections.abc import Callable

import numpy as np
import pytest

from evictionary.reference import knorm
from evictionary.reference.contract import contracts
from evictionary.spec_tests.judge.implementation import STEPS, oracle
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
