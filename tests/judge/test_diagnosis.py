"""A mistake is named only where the numbers leave no
other, and a NaN is traced to the division that made it.
"""

import numpy as np
import pytest
from hypothesis import Phase, settings
from tools import refused

from evictionary.reference.attention import softmax
from evictionary.spec_tests.judge.law import load_laws
from evictionary.spec_tests.judge.outcome import prepared
from evictionary.spec_tests.proof.planted import Implementation, Mutant, load_controls, load_mutants, replaced
from evictionary.spec_tests.verdict.diagnosis import misconceptions, sign

LAGKV = sorted(
    name
    for name, law in load_laws().items()
    if law.functions == ("lagkv.score",)
    and law.kind != "refusal"
    and "without_a_range" not in name  # there the equations as printed have a bug that is planted
)


def part(states, following):
    low, high = following.min(-2, keepdims=True), following.max(-2, keepdims=True)
    return softmax(((states - low) / (high - low)).std(-1, ddof=1))


def literal(keys, values, next_keys, next_values):
    """Equations 7 to 11 as they are printed, with nothing said of a channel without a range."""
    with np.errstate(all="ignore"):
        return part(keys, next_keys) + part(values, next_values)


def first_token_left_out(keys, values, next_keys, next_values):
    """The range runs over the next partition from its second token on. Nobody planted this one."""
    return literal(keys, values, next_keys[..., 1:, :], next_values[..., 1:, :])


def raw_mean(keys):
    mean = keys.mean(-2, keepdims=True)
    with np.errstate(all="ignore"):
        return -(keys * mean).sum(-1) / np.sqrt((keys * keys).sum(-1) * (mean * mean).sum(-1))


def named(law: str, implementation: Implementation) -> list[str] | None:
    """The mistakes that are named where the law fails; None where it holds."""
    try:
        prepared(load_laws()[law], max_examples=50, seed=None)(implementation)
    except Exception:
        return [mutant.misconception for mutant in misconceptions(load_laws()[law], implementation)]
    return None


@pytest.mark.parametrize("law", LAGKV)
def test_a_mistake_that_nobody_planted_gets_no_name(law: str) -> None:
    assert not named(law, replaced("mine", {"lagkv.score": first_token_left_out}))


COSINE = "test_keydiff::test_score_is_minus_the_cosine_to_the_anchor"


def test_a_mistake_that_is_planted_gets_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the edit of another one finds no place: the reference of a reader who changed it."""
    stale = Mutant("keydiff.stale", "keydiff.score", "KD-8", "none", edits=(("no such text", "another"),))
    for _ in range(2):
        assert named(COSINE, replaced("mine", {"keydiff.score": raw_mean})) == [
            "mean taken before normalising"
        ]
        monkeypatch.setitem(load_mutants(), stale.name, stale)


@pytest.mark.parametrize(
    ("law", "planted"),
    [
        ("test_lagkv::test_the_kept_mask_has_the_retained_length", "lagkv.compressed_too_early"),
        ("test_gvote_steps::test_the_nucleus_is_never_empty", "gvote.first_row_for_all"),
    ],
)
def test_a_mistake_that_few_inputs_of_the_law_show_gets_its_name(law: str, planted: str) -> None:
    mutant = load_mutants()[planted]
    assert named(law, mutant.implementation()) == [mutant.misconception]


def test_few_kept_tokens_look_like_no_earlier_answer() -> None:
    """Another choice among equal scores keeps, of two tokens, what was kept of two others."""
    law = load_laws()["test_ada_kv::test_of_equal_scores_the_lower_head_then_position_stays"]
    implementation = load_controls()["ada_kv.select_last_of_equals"].implementation("float64")
    refused(lambda: prepared(law, max_examples=200, seed=None)(implementation), "a tie", AssertionError)
    assert sign(implementation, law) == ""


def added_for_safety(keys):
    norms = np.linalg.norm(keys, axis=-1, keepdims=True)
    return (keys / (norms + 1e-12)).mean(axis=-2)


def test_the_error_of_the_last_digits_is_that_of_the_call_that_a_report_shows() -> None:
    """Short keys among earlier inputs have a larger one: 1e-12 is more of a short norm."""
    implementation = replaced("mine", {"keydiff.anchor": added_for_safety})
    for length in (1e-3, 2.0):
        implementation.call("keydiff.anchor", np.array([[length, 0.0]]))
    told = "the largest error is 5.0e-13, 5.0e-13 of the largest number, more than rounding explains"
    assert sign(implementation).startswith(told)


def test_a_nan_is_traced_to_the_division_that_made_it() -> None:
    law = load_laws()["test_lagkv::test_the_score_where_a_range_is_missing"]
    implementation = replaced("mine", {"lagkv.score": literal})
    shrinking = settings(
        max_examples=50, derandomize=True, report_multiple_bugs=False, phases=[Phase.generate, Phase.shrink]
    )
    refused(lambda: shrinking(law.test())(implementation), "", AssertionError)
    (found,) = misconceptions(law, implementation)
    assert found.misconception == "a channel constant in the next partition divided by a range of zero"


def test_a_report_looks_at_no_answer_to_another_law() -> None:
    """Scores of zero keys are NaN, and those of a long prompt are not."""
    laws, impl = load_laws(), replaced("mine", {"keydiff.score": raw_mean})
    long = laws["test_keydiff::test_long_prompts_are_scored_against_the_mean_of_all_their_keys"]
    impl.keydiff.score(np.zeros((1, 1, 64, 2)))  # as another law does
    assert "are NaN" in sign(impl)
    with pytest.raises(AssertionError):
        prepared(long, max_examples=50, seed=None)(impl)
    assert "are NaN" not in sign(impl, long)


def test_a_law_that_writes_into_an_answer_changes_no_report() -> None:
    impl = replaced("mine", {"keydiff.score": raw_mean})
    answer = impl.keydiff.score(np.ones((1, 1, 4, 2)))
    answer += 1
    assert np.array_equal(impl.calls[-1].result, answer - 1)
