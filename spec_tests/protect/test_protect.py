"""Laws of protection: PR-1, PR-2, PR-3."""

from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.shared.helpers import a_mask, draw_mask, sorted_choice

PROTECTED, CHOOSE = "protect.protected", "protect.choose"
ends = st.integers(0, 12)
budgets = st.integers(0, 40)


def ends_by_hand(filled, front, back):
    """The first and the last tokens of each row, one row at a time."""
    stays = np.zeros(filled.shape, dtype=bool)
    for row in np.ndindex(filled.shape[:-1]):
        there = np.flatnonzero(filled[row])
        stays[row][[*there[:front], *there[len(there) - min(back, len(there)) :]]] = True
    return stays


def protected(impl, filled, budget, **settings):
    """What is protected; Violation unless it is a mask."""
    return a_mask(impl.protect.protected(filled, budget, **settings), filled.shape)


def chosen(impl, scores, budget, **settings):
    """What is kept; Violation unless it is a mask."""
    return a_mask(impl.protect.choose(scores, budget, **settings), scores.shape)


@law("PR-1", of=PROTECTED, seed=seeds(), length=st.integers(1, 33), first=ends, last=ends)
def test_the_first_and_the_last_tokens_of_each_row_are_protected(impl, seed, length, first, last):
    """They are the first and the last of the tokens that are there: rows have empty places."""
    filled = draw_mask((2, 3, length), seed)
    got = protected(impl, filled, 40, first=first, last=last)
    equal(got, ends_by_hand(filled, first, last), "other tokens are protected")


@law("PR-1", of=PROTECTED)
def test_seven_tokens_by_hand(impl):
    """Of tokens 0 to 6 the first two and the last one: 0, 1, 6; where 0 and 6 are empty 1, 2, 5."""
    filled = np.array([[[True] * 7, [False, *[True] * 5, False]]])
    wanted = [[np.isin(np.arange(7), [0, 1, 6]), np.isin(np.arange(7), [1, 2, 5])]]
    equal(impl.protect.protected(filled, 7, first=2, last=1), wanted, "other tokens are protected")


@law("PR-1", of=PROTECTED)
def test_four_and_thirty_two_are_protected_unless_told(impl):
    """Of 60 tokens the first 4 and the last 32 are protected."""
    wanted = (np.arange(60) < 4) | (np.arange(60) >= 28)
    got = impl.protect.protected(np.ones((1, 1, 60), dtype=bool), 60)
    equal(got, wanted[None, None], "other tokens are protected")


@law("PR-2", of=PROTECTED, kind="edge", seed=seeds(), length=st.integers(1, 33), budget=budgets)
def test_a_small_budget_keeps_the_first_tokens_and_then_the_newest(impl, seed, length, budget):
    """Of the first 5 and the last 9 as many are protected as the budget has room for."""
    filled = draw_mask((2, 3, length), seed)
    front = min(5, budget)
    got = protected(impl, filled, budget, first=5, last=9)
    equal(got, ends_by_hand(filled, front, min(9, budget - front)), "other tokens are protected")
    require(
        (got.sum(axis=-1) <= budget).all(),
        "more tokens are protected than the budget has room for",
        budget,
        got.sum(axis=-1),
    )


@law("PR-2", of=CHOOSE, kind="edge", seed=seeds(), budget=st.integers(0, 12))
def test_a_small_budget_is_kept(impl, seed, budget):
    """With a budget of fewer than the 12 protected tokens the first 4 stay, and the newest, in every row."""
    scores = np.random.default_rng(seed).integers(-8, 9, size=(2, 3, 30)).astype(float)
    wanted = (np.arange(30) < min(4, budget)) | (np.arange(30) >= 30 - max(0, budget - 4))
    got = chosen(impl, scores, budget, first=4, last=8)
    equal(got, np.broadcast_to(wanted, got.shape), "other tokens are kept")


@law("PR-3", of=CHOOSE, case=cases(max_length=33), budget=budgets, first=ends, last=ends)
def test_the_best_of_the_others_fill_the_budget(impl, case, budget, first, last):
    """Each row keeps exactly min(budget, T) tokens: the protected ones and the best of the others."""
    scores = impl.round(case.keys[..., 0])
    front = min(first, budget)
    back = min(last, budget - front)
    stays = ends_by_hand(np.ones(scores.shape, dtype=bool), front, back)
    kept = impl.protect.choose(scores, budget, first=first, last=last)
    selects(kept, scores, min(budget, scores.shape[-1]), protected=stays)


@law("PR-3", of=CHOOSE, case=cases(max_length=33), budget=budgets)
def test_without_protected_tokens_the_highest_scores_stay(impl, case, budget):
    """With no token protected at either end, the choice is a top-k."""
    scores = impl.round(case.keys[..., 0])
    kept = impl.protect.choose(scores, budget, first=0, last=0)
    selects(kept, scores, min(budget, scores.shape[-1]))


@law("PR-3", of=CHOOSE, seed=seeds(), budget=st.integers(5, 24), low=st.booleans())
def test_no_score_displaces_a_protected_token(impl, seed, budget, low):
    """The first 2 and the last 3 tokens stay with the score -infinity, where others have infinity."""
    scores = np.random.default_rng(seed).choice([-1.0, 2.0, np.inf], size=(2, 3, 24))
    scores[..., [0, 1, 21, 22, 23]] = -np.inf if low else np.inf
    stays = np.broadcast_to(np.isin(np.arange(24), [0, 1, 21, 22, 23]), scores.shape)
    selects(chosen(impl, scores, budget, first=2, last=3), scores, budget, protected=stays)


@law("PR-3", of=CHOOSE, budget=st.integers(0, 7))
def test_seven_tokens_by_their_scores(impl, budget):
    """Scores 0, 9, 3, 8, 5, 1, 2 with one token protected at each end: 0 and 6 come first, then 1,
    3, 4, 2, 5.
    """
    scores = np.array([[[0.0, 9, 3, 8, 5, 1, 2]]])
    kept = impl.protect.choose(scores, budget, first=1, last=1)
    equal(kept, np.isin(np.arange(7), [0, 6, 1, 3, 4, 2, 5][:budget])[None, None], "other tokens are kept")


@law("PR-3", of=CHOOSE)
def test_four_and_thirty_two_stay_unless_told(impl):
    """Of 60 tokens whose scores are highest in the middle, a budget of 37 keeps the first 4, the last 32 and
    the best one.
    """
    scores = -abs(np.arange(60.0) - 15)[None, None]
    wanted = np.isin(np.arange(60), [*range(4), 15, *range(28, 60)])
    equal(impl.protect.choose(scores, 37), wanted[None, None], "other tokens are kept")


@law("PR-3", of=CHOOSE, kind="edge", seed=seeds(), budget=budgets, first=ends, last=ends)
def test_of_equal_scores_the_lower_position_stays(impl, seed, budget, first, last):
    """Which of equal scores stay is our decision: those that a stable sort puts first."""
    scores = np.random.default_rng(seed).integers(-1, 2, size=(1, 2, 33)).astype(float)
    front = min(first, budget)
    stays = ends_by_hand(np.ones(scores.shape, dtype=bool), front, min(last, budget - front))
    got = impl.protect.choose(scores, budget, first=first, last=last)
    equal(got, sorted_choice(scores, min(budget, 33), stays), "a tie went elsewhere")


@law("PR-3", of=CHOOSE, seed=seeds(), budget=budgets, first=ends, last=ends)
def test_each_head_of_each_batch_item_chooses_for_itself(impl, seed, budget, first, last):
    """What a head keeps alone, it keeps among others."""
    scores = np.random.default_rng(seed).integers(-8, 9, size=(2, 3, 40)).astype(float)
    together = impl.protect.choose(scores, budget, first=first, last=last)
    for item, head in np.ndindex(2, 3):
        own = slice(item, item + 1), slice(head, head + 1)
        alone = impl.protect.choose(scores[own], budget, first=first, last=last)
        equal(together[own], alone, "a head keeps other tokens among others than alone")


@law("PR-1", of=PROTECTED, seed=seeds(), first=ends, last=ends)
def test_each_row_is_protected_for_itself(impl, seed, first, last):
    """What is protected in a row alone is protected among others."""
    filled = draw_mask((2, 3, 33), seed)
    together = impl.protect.protected(filled, 40, first=first, last=last)
    for item, head in np.ndindex(2, 3):
        own = slice(item, item + 1), slice(head, head + 1)
        alone = impl.protect.protected(filled[own], 40, first=first, last=last)
        equal(together[own], alone, "a row has other protected tokens among others than alone")


@law("PR-3", of=CHOOSE, examples=2, case=long_rows(("normal",)), last=st.sampled_from([32, 1024]))
def test_a_long_row_keeps_both_ends(impl, case, last):
    """Rows of up to 131,072 tokens keep half: the first 4, the last 32 or 1,024, and the best others."""
    scores = impl.round(case.keys[..., 0])
    length, budget = scores.shape[-1], scores.shape[-1] // 2
    assume(budget >= last + 4)
    stays = np.broadcast_to((np.arange(length) < 4) | (np.arange(length) >= length - last), scores.shape)
    selects(chosen(impl, scores, budget, first=4, last=last), scores, budget, protected=stays)


@law("PR-1", of=PROTECTED, examples=2, case=long_rows(("normal",)))
def test_a_long_row_has_both_ends_protected(impl, case):
    """Of up to 131,072 places, some of them empty, 128 tokens and 1,024 are protected at the ends."""
    filled = case.keys[..., 0] > -1
    got = protected(impl, filled, 2000, first=128, last=1024)
    equal(got, ends_by_hand(filled, 128, 1024), "other tokens are protected")
