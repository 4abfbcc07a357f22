"""What the laws still see in half precision, and inside a domain of 64 channels, where real kernels run."""

from statistics import median

import pytest
from sampling import sampled

from evictionary.spec_tests.judge import tolerance
from evictionary.spec_tests.judge.degenerate import MATHEMATICS
from evictionary.spec_tests.judge.domain import Domain
from evictionary.spec_tests.judge.implementation import Implementation
from evictionary.spec_tests.judge.law import load_laws
from evictionary.spec_tests.judge.outcome import outcome
from evictionary.spec_tests.proof.planted import load_mutants, replaced

LAWS = load_laws()
ASKED = sorted(name for name, law in LAWS.items() if law.functions and law.kind == MATHEMATICS)
CHANNELS = Domain.read({"head_dim": (64,)})


def reference_at(dtype: str) -> Implementation:
    found = replaced("reference", {}, dtype=dtype)
    found.domain |= CHANNELS
    return found


# Why these allow as much as they expect, or more, in half precision.
WIDE = {}


def shares(name: str, dtype: str) -> list[float]:
    """Of each comparison of a law, the mean error that is allowed in parts of the mean number that is expected."""
    tolerance.LISTENERS.append(found := [])
    try:
        assert outcome(LAWS[name], reference_at(dtype), max_examples=8)[0] != "killed"
    finally:
        tolerance.LISTENERS.pop()
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", sampled(ASKED, every=40))
def test_no_law_allows_as_much_as_it_expects(name: str, dtype: str) -> None:
    """One that does would pass a tensor of zeros. Those that must say why."""
    found = shares(name, dtype)
    assert not found or median(found) <= 1 or name in WIDE


def test_a_law_by_hand_is_asked_of_a_kernel_for_64_channels() -> None:
    """Channels of zeros change no logit, so the law is asked. One whose numbers they change is not."""
    asked = LAWS["test_h2o::test_equal_keys_score_by_how_long_they_were_seen"]
    apart = LAWS["test_lagkv::test_the_deviation_is_that_of_a_sample"]
    assert outcome(asked, reference_at("bfloat16"))[0] == "passed"
    wrong = load_mutants()["h2o.mean_over_queries"].implementation("bfloat16")
    wrong.domain |= CHANNELS
    assert outcome(asked, wrong)[0] == "killed"
    assert outcome(apart, reference_at("float64")) == ("crashed", "NothingToAsk: head_dim 2 lies outside its domain (64)")
