"""Right protections of other forms."""

from evictionary.reference import selection
from evictionary.spec_tests.shared.variants import *


def room(budget, first, last):
    """The tokens that stay at each end."""
    front = first if first < budget else budget
    return front, last if front + last < budget else budget - front


@control("protect.protected")
def token_by_token(filled, budget, *, first=4, last=32):
    """The places of the tokens of each row, cut at both ends."""
    front, back = room(budget, first, last)
    stays = np.zeros(filled.shape, dtype=bool)
    for row in np.ndindex(filled.shape[:-1]):
        there = list(np.flatnonzero(filled[row]))
        stays[row][there[:front] + there[::-1][:back]] = True
    return stays


@control("protect.protected")
def counted_from_both_sides(filled, budget, *, first=4, last=32):
    """How many tokens are before a token, and how many after it."""
    front, back = room(budget, first, last)
    until = np.cumsum(filled, axis=-1)
    since = np.cumsum(filled[..., ::-1], axis=-1)[..., ::-1]
    return np.where(filled, (until <= front) | (since <= back), False)


@control("protect.choose", max_length=4096)
def a_choice_in_the_middle(scores, budget, *, first=4, last=32):
    """Both ends, and a top-k of what is between them with the rest of the budget."""
    length = scores.shape[-1]
    front, back = (min(count, length) for count in room(budget, first, last))
    if front + back >= length:
        return np.ones(scores.shape, dtype=bool)
    middle = scores[..., front : length - back]
    kept = np.ones(scores.shape, dtype=bool)
    kept[..., front : length - back] = selection.top_k(middle, budget - front - back)
    return kept


@control("protect.choose", array_library="torch", dtypes=ALL)
def a_sort_by_rank(scores, budget, *, first=4, last=32):
    """Ranks in the place of scores: those of protected tokens are above all others."""
    length = scores.shape[-1]
    front, back = room(budget, first, last)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    rank = order.argsort(dim=-1)
    rank[..., :front] -= 2 * length
    rank[..., max(length - back, 0) :] -= 2 * length
    best = rank.argsort(dim=-1)[..., :budget]
    return torch.zeros(scores.shape, dtype=torch.bool).scatter_(-1, best, True)


@control("protect.choose")
def one_after_another(scores, budget, *, first=4, last=32):
    """The first, the newest, and then the best token that is left, until the budget is full."""
    kept = np.zeros(scores.shape, dtype=bool)
    for row in np.ndindex(scores.shape[:-1]):
        tokens = range(scores.shape[-1])
        by_score = sorted(tokens, key=lambda token: -scores[row][token])
        wishes = dict.fromkeys([*tokens[:first], *tokens[::-1][:last], *by_score])
        kept[row][list(wishes)[:budget]] = True
    return kept
