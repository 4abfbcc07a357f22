"""Correct CriticalKVs of other kinds."""

from evictionary.spec_tests.shared.variants import *
from evictionary.spec_tests.snapkv.variants import before_a_window_of, shifted_sums, torch_pooled

NORMS, IMPORTANCE, SCORE, BOUND = (
    f"criticalkv.{name}" for name in ("projected_norms", "importance", "score", "error_bound")
)


@control(NORMS, dtypes=NUMPY)
def component_by_component(values, w_o):
    """One component of the hidden state after the other, the group's heads apart until the end."""
    group = w_o.shape[0] // values.shape[1]
    lengths = np.zeros((values.shape[0], w_o.shape[0], values.shape[2]), values.dtype)
    for column in range(w_o.shape[-1]):
        lengths += np.abs(np.einsum("bhtd,hd->bht", np.repeat(values, group, axis=1), w_o[..., column]))
    return lengths.reshape(*values.shape[:2], group, -1).mean(axis=2)


@control(IMPORTANCE, dtypes=NUMPY)
def query_by_query(queries, keys, *, window_size=32, kernel_size=5):
    """Streamed attention, pooled by shifted sums, and a running maximum over the queries of the group."""
    weights = streamed(queries[:, :, -window_size:], keys)[..., :-window_size]
    pooled = shifted_sums(weights, kernel_size)
    lost = pooled.sum(axis=-1, keepdims=True)
    pooled = pooled / np.where(lost == 0, 1, lost) * weights.sum(axis=-1, keepdims=True)
    rows = pooled.reshape(*keys.shape[:2], -1, pooled.shape[-1])
    largest = functools.reduce(np.maximum, np.moveaxis(rows, 2, 0))
    least = np.einsum("bht->bh", largest) / keys.dtype.type(largest.shape[-1])
    return np.where(largest < least[..., None], least[..., None], largest)


def first_count(share, budget) -> int:
    return int(Fraction(repr(float(share))) * budget)


@control(SCORE, array_library="torch", dtypes=ALL)
@through_float32
@before_a_window_of(32)
def torch_score(queries, keys, values, w_o, *, budget, kernel_size=5, first_share=0.5, epsilon=1e-4):
    """torch; the first stage by a stable sort."""
    window, by_group = queries.shape[2], (keys.shape[1], -1)
    weights = torch_weights(queries, keys)[..., :-window]
    pooled = torch_pooled(weights, kernel_size)
    lost = pooled.sum(dim=-1, keepdim=True)
    pooled = pooled * weights.sum(dim=-1, keepdim=True) / lost.where(lost > 0, 1)
    largest = pooled.amax(dim=2).unflatten(1, by_group).amax(dim=2)
    scores = largest.clamp(min=largest.mean(dim=-1, keepdim=True))
    first = torch_top(scores, max(0, first_count(first_share, budget) - window))
    repeated = values[:, :, :-window].repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    norms = torch.einsum("bhtd,hdc->bhtc", repeated, w_o).abs().sum(dim=-1).unflatten(1, by_group).mean(dim=2)
    return ((scores + epsilon) * norms).masked_fill(first, torch.inf)


@control(SCORE, array_library="torch", dtypes=ALL)
def torch_largest_of_the_dtype(queries, keys, values, w_o, **settings):
    """As in kvpress's CriticalKVPress, the first stage
    and the window have the largest number of the dtype.
    """
    return torch_score(queries, keys, values, w_o, **settings).clamp(max=torch.finfo(keys.dtype).max)


@control(BOUND, dtypes=NUMPY)
def change_by_change(weights, norms, kept):
    """The lengths of the changes of the tokens added up: p n of the evicted, p n (1/S - 1) of the kept."""
    share = np.where(kept, weights, 0).sum(axis=-1, keepdims=True)
    return (weights * norms * np.where(kept, 1 / share - 1, 1)).sum(axis=-1)
