"""The program that guards the oracle: it plants a mistake for every caller, sees what laws see, and its
list is up to date.
"""

import numpy as np
import pytest

from evictionary.reference import keydiff, keydiff_variants
from evictionary.spec_tests.proof import oracle
from evictionary.spec_tests.proof.source_mutations import mutations

COMPARING = "test_keydiff::test_score_is_minus_the_cosine_to_the_anchor"
BY_HAND = "test_keydiff::test_score_in_plain_loops"
SIGN = ("return -cosine(keys, anchor(keys))  ->  return cosine(keys, anchor(keys))", oracle.PROGRAM)


def test_mutations_replace_one_thing_and_leave_checks_alone() -> None:
    made = [str(each) for each in mutations("keydiff_theory.alignment_bound")]
    line = "return (math.log(count) + math.log(weight / (1 - weight))) / largest_norm - 1"
    assert f"{line}  ->  {line.replace(') + ', ') - ')}" in made
    assert f"{line}  ->  {line.replace('(1 - weight)', '(2 - weight)')}" in made
    assert all(each.startswith("return") for each in made), "a check of an argument was mutated"
    assert len(set(made)) == len(made)


def test_a_planted_mistake_reaches_every_caller_and_goes_away() -> None:
    keys = np.array([[1.0, 0], [0, 1], [3, 1]])
    before = keydiff.score(keys), keydiff_variants.raw_mean_score(keys)
    with oracle.planted("keydiff.cosine", lambda keys, direction: keys[..., 0]):
        assert (keydiff.score(keys) == -keys[..., 0]).all()
        assert (keydiff_variants.raw_mean_score(keys) == -keys[..., 0]).all()  # imported by name from there
        # the default of an argument
        assert keydiff.process_prompt(keys, keys, budget=1, block_size=3).keys.tolist() == [[0.0, 1.0]]
    assert (keydiff.score(keys) == before[0]).all() and (
        keydiff_variants.raw_mean_score(keys) == before[1]
    ).all()


@pytest.mark.parametrize(("law", "verdict"), [(COMPARING, oracle.UNSEEN), (BY_HAND, oracle.SEEN)])
def test_only_a_law_of_its_own_sees_a_mistake_that_the_oracle_makes_too(law: str, verdict: str) -> None:
    (result,) = oracle.judge("keydiff.score", [SIGN], [law])
    assert (result.verdict, result.law) == (verdict, law if verdict == oracle.SEEN else "")


def test_a_mistake_that_begins_at_a_size_is_seen_by_a_law_that_draws_it() -> None:
    mistake = str(
        next(
            each
            for each in mutations("momentkv.decode_step")
            if each.was.startswith("while") and ">=" in each.now
        )
    )
    law = "test_momentkv_steps::test_steps_at_the_budgets_of_the_paper_evict_the_lowest_score"
    (result,) = oracle.judge("momentkv.decode_step", [(mistake, oracle.PROGRAM)], [law], above=66)
    assert result.verdict == oracle.SEEN
    right_below = oracle.beyond("keydiff.score", lambda keys: keys[..., 0], 3)
    keys = np.arange(8.0).reshape(4, 2)
    assert (right_below(keys[:3]) == keydiff.score(keys[:3])).all() and (
        right_below(keys) == keys[:, 0]
    ).all()


def test_a_mutation_without_effect_is_told_apart() -> None:
    (result,) = oracle.judge(
        "gvote_theory.allocate",
        [("scores = np.asanyarray(scores)  ->  pass", oracle.PROGRAM)],
        ["test_gvote_steps::test_quotas_sum_to_the_budget"],
    )
    assert result.verdict == oracle.SAME


def test_what_is_listed_as_equivalent_exists() -> None:
    listed = oracle.listed()
    made = {(path, str(each)) for path in {of for of, _ in listed} for each in mutations(path)}
    assert set(listed) <= made | {(path, name) for path, names in oracle.bank().items() for name in names}
    assert all(listed.values()), "an equivalent mistake has no reason"
