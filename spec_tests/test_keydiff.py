"""Laws of KeyDiff: KD-7, KD-8, KD-O."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import strategies as st

from reference.keydiff import score, similarity_matrix
from reference.selection import top_k
from spec_tests.cases import cases, seeds, tiny_cases
from spec_tests.law import law
from spec_tests.tolerance import Violation, check_selection

SCORE = "keydiff.score"


@law("KD-8", of=SCORE, case=cases())
def test_score_is_minus_the_cosine_to_the_anchor(impl, case):
    """The score is minus the cosine between each key and the mean of the unit keys."""
    impl.agrees(SCORE, case.keys)


@law("KD-8", of=SCORE, case=cases(), seed=seeds())
def test_rescaling_each_key_changes_nothing(impl, case, seed):
    """Each key may be multiplied by its own positive number: only directions count (powers of two, so nothing is rounded)."""
    allowed = impl.allowance(SCORE, case.keys)
    factors = 2.0 ** np.random.default_rng(seed).integers(-3, 4, size=(*case.keys.shape[:-1], 1))
    allowed.check(impl.keydiff.score(impl.round(case.keys) * factors), "the score of the rescaled keys")


@law("KD-8", of=SCORE, case=cases(), seed=seeds())
def test_turning_all_keys_changes_nothing(impl, case, seed):
    """One orthogonal map of all keys (here channels exchanged and mirrored) leaves the scores as they are."""
    allowed = impl.allowance(SCORE, case.keys)
    generator = np.random.default_rng(seed)
    channels = case.keys.shape[-1]
    turned = case.keys[..., generator.permutation(channels)] * generator.choice([-1.0, 1.0], size=channels)
    allowed.check(impl.keydiff.score(turned), "the score of the turned keys")


@law("KD-8", of=SCORE, case=cases(), seed=seeds())
def test_scores_move_with_their_tokens(impl, case, seed):
    """Permuting the tokens permutes the scores: position plays no part."""
    allowed = impl.allowance(SCORE, case.keys)
    order = np.random.default_rng(seed).permutation(case.keys.shape[2])
    allowed.check(impl.keydiff.score(case.keys[:, :, order]), "the permuted score", allowed.expected[:, :, order])


@law("KD-8", of=SCORE, case=cases(min_length=2), seed=seeds())
def test_heads_do_not_see_each_other(impl, case, seed):
    """The scores of a head are the same when it is scored alone."""
    allowed = impl.allowance(SCORE, case.keys)
    together = impl.keydiff.score(case.keys)
    for item, head in np.ndindex(case.keys.shape[:2]):
        allowed.check(
            together[item : item + 1, head : head + 1],
            "the head scored with others",
            allowed.expected[item : item + 1, head : head + 1],
        )
        alone = impl.keydiff.score(case.keys[item : item + 1, head : head + 1])
        allowed.check(alone, "the head scored alone", allowed.expected[item : item + 1, head : head + 1])


@law("KD-8", of=SCORE, case=tiny_cases(min_length=1), zero_at=st.integers(0, 4))
def test_a_zero_key_scores_zero(impl, case, zero_at):
    """The cosine with a zero vector is 0: a zero key scores 0, and all-zero keys score 0."""
    keys = case.keys.copy()
    keys[:, :, zero_at % keys.shape[2]] = 0
    for states in (keys, np.zeros_like(keys)):
        got = impl.keydiff.score(states)
        zero = np.abs(states).max(axis=-1) == 0
        if np.isnan(got).any() or (got[zero] != 0).any():
            raise Violation("the score of a zero key is not 0", 0.0, got[zero])


@law("KD-8", of=SCORE)
def test_the_anchor_is_the_mean_of_unit_keys(impl):
    """Keys (10,0), (0,1), (.2,1), (1,1) rank 0, 1, 2, 3; with the raw mean as anchor they would rank 1, 2, 3, 0."""
    score = impl.keydiff.score(np.array([[[[10.0, 0], [0, 1], [0.2, 1], [1, 1]]]]))
    order = np.argsort(-score[0, 0], kind="stable")
    if order.tolist() != [0, 1, 2, 3]:
        raise Violation("the tokens rank in another order", [0, 1, 2, 3], order)


@law("KD-8", of=SCORE, bad=st.sampled_from([(3,), (2, 0, 4, 3), (2, 1, 0, 3)]))
def test_bad_shapes_are_refused(impl, bad):
    """Too few axes, or an empty one, raise ValueError."""
    with pytest.raises(ValueError, match="keys"):
        impl.keydiff.score(np.zeros(bad))


@law("KD-7", of="keydiff.pairwise_score", case=cases())
def test_pairwise_score_sums_the_rows_of_the_similarity_matrix(impl, case):
    """The score of KD-7 is minus the sum of the cosines to all keys, the key itself among them."""
    impl.agrees("keydiff.pairwise_score", case.keys)


@law("KD-7", of=("keydiff.pairwise_score", "keydiff.anchor", SCORE), case=cases())
def test_both_scores_rank_alike(impl, case):
    """Row i of S sums to T |mu| cos(k_i, mu): the pairwise score is the anchor's score times a positive number."""
    length = np.linalg.norm(impl.keydiff.anchor(case.keys), axis=-1, keepdims=True)
    allowed = impl.allowance("keydiff.pairwise_score", case.keys)
    got = case.keys.shape[2] * length * impl.keydiff.score(case.keys)
    error = float(np.abs(got - allowed.expected).max())
    if error > 2 * allowed.largest + 8 * case.keys.shape[2] * 2.0**-52:
        raise Violation(f"T |mu| score differs from the pairwise score by {error:.3g}", allowed.expected, got)


@law("KD-O", of=(SCORE, "selection.top_k"), case=cases(min_length=2, max_length=5), share=st.fractions(0, 1))
def test_top_k_solves_the_relaxed_problem(impl, case, share):
    """No other set of N keys has a smaller sum of khat_i . mu: every set is tried."""
    budget = max(1, int(share * case.keys.shape[2]))
    scores = impl.allowance(SCORE, case.keys)
    kept = impl.selection.top_k(impl.keydiff.score(case.keys), budget)
    check_selection(kept, scores.expected, budget, slack=scores.largest)
    for item, head in np.ndindex(case.keys.shape[:2]):
        row = scores.expected[item, head]
        best = max(sum(row[list(chosen)]) for chosen in itertools.combinations(range(row.size), budget))
        if best - row[kept[item, head]].sum() > 2 * budget * scores.largest + 1e-12:
            raise Violation("another set of the same size is less similar to the anchor", best, row[kept[item, head]].sum())


@law("KD-O")
def test_the_pairwise_problem_is_not_solved():
    """For the problem as stated, min over S of the sum of all pairwise cosines, KD-O is false: 4 is kept where 0 is possible."""
    keys = np.array([[1.0, 0], [1, 0], [1, 0], [-1, 0], [-1, 0]])
    similarity = similarity_matrix(keys)

    def objective(chosen: tuple[int, ...]) -> float:
        return float(similarity[np.ix_(chosen, chosen)].sum())

    kept = tuple(np.flatnonzero(top_k(score(keys), 2)).tolist())
    assert objective(kept) == 4
    assert min(objective(chosen) for chosen in itertools.combinations(range(5), 2)) == 0
