"""Correct H2Os of other kinds."""

from evictionary.spec_tests.h2o import forms
from evictionary.spec_tests.shared.variants import *

SCORE, SELECT = "h2o.score", "h2o.select"
DECODING = {"received": forms.received_query_by_query, "score": forms.score_head_by_head}

control(SCORE, dtypes=NUMPY, name="as_decoding_does_it")(put_together(forms, "score", **DECODING))
control(SELECT, dtypes=NUMPY, name="two_parts")(
    put_together(forms, "select", select=forms.select_in_two_parts, **DECODING)
)


def over_the_group(received, keys):
    """[B, H_q, T] to [B, H_kv, T], the mean over each group."""
    return received.reshape(*keys.shape[:2], -1, keys.shape[2]).mean(2)


@control(SCORE, dtypes=NUMPY)
def tokens_first(queries, keys):
    """A permuted layout; the group's mean before the sum over the queries, that taken from the last query
    to the first.
    """
    length, scale = keys.shape[2], keys.dtype.type(1 / math.sqrt(keys.shape[-1]))
    by_token = np.ascontiguousarray(keys.transpose(2, 0, 1, 3)) * scale
    grouped = queries.reshape(keys.shape[0], keys.shape[1], -1, *queries.shape[2:])
    logits = np.einsum("tbhd,bhgmd->mtbhg", by_token, grouped)
    seen = np.arange(length) <= np.arange(length - queries.shape[2], length)[:, None]
    logits = np.where(seen[:, :, None, None, None], logits, -np.inf)
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return (powers / powers.sum(axis=1, keepdims=True)).mean(axis=-1)[::-1].sum(axis=0).transpose(1, 2, 0)


@control(SCORE, array_library="torch", dtypes=ALL)
@through_float32
def torch_all_at_once(queries, keys):
    """The whole matrix, summed as a product with ones."""
    weights = torch_weights(queries, keys)
    return over_the_group((weights.new_ones(1, weights.shape[2]) @ weights)[:, :, 0], keys)


@control(SCORE, array_library="torch", dtypes=("float64", "float32", "bfloat16"))
def torch_weights_rounded(queries, keys):
    """The weights in the dtype of the keys, as eager code gives them, summed in float32 or wider."""
    return over_the_group(cast(torch_weights(queries, keys)).sum(dim=2), keys).to(keys.dtype)


@control(SCORE, array_library="torch", dtypes=("float64", "float32"))
def torch_padded_blocks(queries, keys):
    """Blocks of 16 queries, the last one filled up with rubbish whose weights are masked."""
    num_queries, length = queries.shape[2], keys.shape[2]
    repeated = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1) / math.sqrt(keys.shape[-1])
    padded = torch.cat(
        [queries, torch.full((*queries.shape[:2], -num_queries % 16, queries.shape[3]), 1e3)], dim=2
    ).to(keys.dtype)
    unseen = torch.cat(
        [hidden(num_queries, length), torch.zeros(-num_queries % 16, length, dtype=torch.bool)]
    )
    total = torch.zeros(*queries.shape[:2], length, dtype=keys.dtype)
    for start in range(0, padded.shape[2], 16):
        rows = slice(start, start + 16)
        weights = (padded[:, :, rows] @ repeated.mT).masked_fill(unseen[rows], -torch.inf).softmax(dim=-1)
        total += weights.masked_fill(~(torch.arange(start, start + 16) < num_queries)[:, None], 0).sum(dim=2)
    return over_the_group(total, keys)


def torch_top_beside(recent, queries, keys, budget):
    """The last `recent` tokens, and of the others the highest scores."""
    scores = torch_all_at_once(queries, keys)
    scores[..., max(0, keys.shape[2] - recent) :] = torch.inf
    return torch_top(scores, budget)


@control(SELECT, array_library="torch", dtypes=ALL)
def torch_sorted(queries, keys, *, budget):
    return torch_top_beside((budget + 1) // 2, queries, keys, budget)


@control(SELECT, array_library="torch", dtypes=ALL, edges=False)
def torch_odd_token_to_the_heavy_hitters(queries, keys, *, budget):
    """The recent half of an odd budget rounded down: the paper leaves it open."""
    return torch_top_beside(budget // 2, queries, keys, budget)
