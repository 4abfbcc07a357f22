"""What several files of the laws of ada_kv use."""

from fractions import Fraction

from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.shared.helpers import sorted_choice


def as_good(kept, expected, scores, protected, what):
    """Raise Violation unless each layer keeps tokens of the expected scores, whichever of equal ones, and
    each head its protected tokens and its own best.
    """
    require_mask(kept, scores.shape, what)
    got, wanted = (
        np.sort(np.where(mask, scores, -np.inf).reshape(len(scores), -1)) for mask in (kept, expected)
    )
    equal(got, wanted, what)
    for head in np.ndindex(scores.shape[:2]):
        count = int(kept[head].sum())
        selects(kept[head], scores[head], count, protected=protected[head], what=f"head {head}")


def shared_by_sorting(scores, budget, percent, protected):
    """What stable sorts keep of scores [1, H, T] whose heads have as many protected tokens: each head's own,
    then the layer's best.
    """
    taken = int(protected[0, 0].sum())
    own = sorted_choice(scores, taken + percent * (budget - taken) // 100, protected)
    layer = (1, scores[0].size)
    kept = sorted_choice(scores.reshape(layer), scores.shape[1] * budget, own.reshape(layer))
    return kept.reshape(scores.shape)


def shared_by_hand(scores, budget, ratio, protected):
    """AdaKV token by token, for one layer [H, T]: what is protected, each head's own best, then the
    layer's best one at a time.
    """
    heads, length = scores.shape
    order = sorted(np.ndindex(heads, length), key=lambda place: (-scores[place], place))
    kept = protected.copy()
    for head in range(heads):
        own = int(Fraction(str(ratio)) * (min(budget, length) - int(protected[head].sum())))
        for place in [place for place in order if place[0] == head and not protected[place]][:own]:
            kept[place] = True
    for place in [place for place in order if not kept[place]][
        : heads * min(budget, length) - int(kept.sum())
    ]:
        kept[place] = True
    return kept
