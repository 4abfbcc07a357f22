"""Right delayed evictions of other forms."""

from evictionary.spec_tests.shared.variants import *

DUE, JUDGE, THRESHOLD = "dms.due", "dms.judge", "dms.threshold"


def head_by_head(filled, arrived, window_size):
    """The tokens of each head from the newest one back."""
    arrived = filled.shape[-1] if arrived is None else arrived
    found = np.zeros(filled.shape, dtype=bool)
    for head in np.ndindex(filled.shape[:-1]):
        newest_first = np.flatnonzero(filled[head])[::-1]
        found[head][newest_first[window_size : window_size + arrived]] = True
    return found


def counted_from_the_end(filled, arrived, window_size):
    """How many tokens of its head are not older than a token."""
    arrived = filled.shape[-1] if arrived is None else arrived
    since = np.cumsum(filled[..., ::-1], axis=-1)[..., ::-1]
    return (since > window_size) & (since <= window_size + arrived) & filled


def torch_due(filled, arrived, window_size):
    """The newest tokens, less those that wait."""
    arrived = filled.shape[-1] if arrived is None else arrived
    since = filled.flip(-1).cumsum(-1).flip(-1)
    return filled & (since <= window_size + arrived) & ~(since <= window_size)


@control(DUE)
def from_the_newest_back(filled, arrived=None, *, window_size=128):
    return head_by_head(filled, arrived, window_size)


@control(DUE)
def counts_since(filled, arrived=None, *, window_size=128):
    return counted_from_the_end(filled, arrived, window_size)


@control(DUE, array_library="torch", dtypes=ALL)
def torch_counts_since(filled, arrived=None, *, window_size=128):
    return torch_due(filled, arrived, window_size)


@control(JUDGE)
def token_by_token(scores, filled, thresholds, arrived=None, *, window_size=128):
    """Each token that is due, one after the other."""
    kept = np.array(filled)
    for item, head, token in zip(*np.nonzero(head_by_head(filled, arrived, window_size)), strict=True):
        if scores[item, head, token] < thresholds[item]:
            kept[item, head, token] = False
    return kept


@control(JUDGE)
def union_of_three(scores, filled, thresholds, arrived=None, *, window_size=128):
    """The window, what was judged before, and the tokens that pass now."""
    arrived = filled.shape[-1] if arrived is None else arrived
    since = np.cumsum(filled[..., ::-1], axis=-1)[..., ::-1]
    passed = scores >= np.asarray(thresholds)[:, None, None]
    return filled & ((since <= window_size) | (since > window_size + arrived) | passed)


@control(JUDGE, array_library="torch", dtypes=ALL)
def torch_infinity_for_the_others(scores, filled, thresholds, arrived=None, *, window_size=128):
    """Infinity for the scores of all tokens that are not due, and one comparison."""
    considered = scores.double().masked_fill(~torch_due(filled, arrived, window_size), torch.inf)
    return filled & (considered >= thresholds.double()[:, None, None])


@control(THRESHOLD)
def item_by_item(scores, judged, going):
    """The judged scores of each batch item in order."""
    found = []
    for own, here, count in zip(scores, judged, going, strict=True):
        in_order = np.sort(own[here])
        found.append(-np.inf if count == 0 else in_order[count] if count < len(in_order) else np.inf)
    return np.array(found)


@control(THRESHOLD)
def partitioned(scores, judged, going):
    """The one score that is asked for, without the order of the others."""
    found = np.full(len(scores), np.inf)
    for item, count in enumerate(going):
        own = scores[item][judged[item]]
        if count < len(own):
            found[item] = np.partition(own, int(count))[count]
    return np.where(np.asarray(going) > 0, found, -np.inf)


@control(THRESHOLD, array_library="torch", dtypes=ALL)
def torch_kth_of_the_negative(scores, judged, going):
    """The highest score of what stays is found from the other end."""
    ordered = (-scores).masked_fill(~judged, -torch.inf).flatten(1).sort(dim=-1, descending=True).values
    ends = ordered.new_full((len(scores), 1), torch.inf)
    table = torch.cat([ends, -ordered[:, 1:], ends], dim=1)
    count = judged.sum(dim=(1, 2)).minimum(going)
    return table.gather(1, count[:, None].long()).squeeze(1).where(going > 0, -torch.inf)
