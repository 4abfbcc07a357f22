"""Correct GVotes of other kinds."""

from evictionary.reference.cache import CompressedCache
from evictionary.spec_tests.expected_attention.forms import waves_in_closed_form
from evictionary.spec_tests.gvote import forms
from evictionary.spec_tests.rope.variants import torch_angles
from evictionary.spec_tests.shared import forms as shared
from evictionary.spec_tests.shared.variants import *

WEIGHTS, NUCLEUS, SELECT = "gvote.attention_weights", "gvote.nucleus", "gvote.select"
STATISTICS, SAMPLE, PROJECT = (
    f"gvote.{name}" for name in ("hidden_statistics", "sample_hidden_states", "project")
)
COS_SIN, ROTATION, LOGITS = (
    f"gvote.{name}" for name in ("average_cos_sin", "rotate_by_average", "sampled_logits")
)
TOP_EACH, ALLOCATE, UNION, PRUNE = "gvote.top_each", "gvote_theory.allocate", "gvote.union", "gvote.prune"
ALGORITHM, OPTIMAL, OVERLAP = (
    "gvote.algorithm_1",
    "gvote_theory.optimal_keep_set",
    "gvote_theory.attention_overlap",
)
POWERS = {"softmax": shared.softmax_in_powers_of_two}

powers_of_two = put_together(forms, "attention_weights", **POWERS)
head_by_head = control(SELECT, dtypes=NUMPY, max_length=8192, name="head_by_head")(
    put_together(forms, "select", nucleus=forms.nucleus_token_by_token, **POWERS)
)
control(WEIGHTS, dtypes=NUMPY, name="one_tile_at_a_time")(
    put_together(forms, "attention_weights", softmax=shared.softmax_online)
)


@control(WEIGHTS, array_library="torch", dtypes=ALL, name="torch_weights")
def softmax_of_products(query, keys):
    return torch.softmax((keys @ query[..., None])[..., 0] / math.sqrt(keys.shape[-1]), dim=-1)


@control("gvote_theory.output", array_library="torch", dtypes=ALL)
def torch_weighted_sum(attention, values):
    return torch.einsum("...t,...td->...d", attention, values)


@control("gvote_theory.importance", dtypes=NUMPY)
def one_query_at_a_time(queries, keys):
    """The attention of one query after the other added up, from the last."""
    return sum(powers_of_two(queries[..., row, :], keys) for row in reversed(range(queries.shape[-2])))


@control("gvote_theory.importance", array_library="torch", dtypes=ALL)
@through_float32
def torch_summed_by_ones(queries, keys):
    weights = torch.softmax(queries @ keys.mT / math.sqrt(keys.shape[-1]), dim=-1)
    return weights.mT @ weights.new_ones(weights.shape[-2])


# The best of each row, and the nucleus


@control(ALLOCATE, array_library="torch", dtypes=ALL)
def torch_one_sort(scores, budget):
    order = scores.flatten().argsort(descending=True, stable=True)[:budget]
    return torch.bincount(order // scores.shape[-1], minlength=scores[..., 0].numel()).view(scores.shape[:-1])


@control(TOP_EACH, array_library="torch", dtypes=ALL)
def torch_ranked(scores, budgets):
    return scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1) < budgets[..., None]


@control(TOP_EACH, array_library="torch", dtypes=ALL, edges=False)
def torch_last_of_equals(scores, budgets):
    """A sort from the last token on."""
    return torch_ranked(scores.flip(-1), budgets).flip(-1)


@control(TOP_EACH, array_library="torch", dtypes=ALL, edges=False)
def torch_topk_of_each_row(scores, budgets):
    """torch.topk row by row, which keeps any of equal scores."""
    kept = torch.zeros(scores.shape, dtype=torch.bool)
    for row in np.ndindex(*scores.shape[:-1]):
        kept[row][scores[row].topk(min(int(budgets[row]), scores.shape[-1])).indices] = True
    return kept


def torch_marked(order, marks):
    """The mask in token order of `marks`, which are in the order of a sort."""
    return torch.zeros(order.shape, dtype=torch.bool).scatter(-1, order, marks)


@control(NUCLEUS, array_library="torch", dtypes=ALL)
@in_float32
def torch_mass_before(attention, p):
    """A token is in as long as those before it hold less than p."""
    falling, order = attention.sort(dim=-1, descending=True, stable=True)
    needed = (falling.cumsum(dim=-1) - falling < p * falling.sum(dim=-1, keepdim=True)) & (falling > 0)
    needed[..., 0] = True
    return torch_marked(order, needed)


@control(NUCLEUS, array_library="torch", dtypes=ALL)
@in_float32
def torch_searched(attention, p):
    """The number of tokens by a binary search in the cumulated mass of the normalised weights."""
    falling, order = attention.sort(dim=-1, descending=True, stable=True)
    total, positive = falling.sum(dim=-1, keepdim=True), (falling > 0).sum(dim=-1, keepdim=True)
    mass = falling.cumsum(dim=-1) / torch.where(total == 0, 1, total)
    # At p = 1 rounding may keep the mass below 1 for ever, or lift it there too early: every weight above 0
    # is wanted.
    count = torch.searchsorted(mass, torch.full_like(total, p)) + 1 if p < 1 else positive
    count = torch.minimum(count, positive).clamp(min=1)
    return torch_marked(order, (torch.arange(falling.shape[-1]) < count).expand(falling.shape))


@control(NUCLEUS, array_library="torch", dtypes=ALL, edges=False)
def torch_last_of_equal_weights(attention, p):
    return torch_mass_before(attention.flip(-1), p).flip(-1)


@control("gvote.single_step_budget", array_library="torch")
def torch_count(candidates):
    return torch.count_nonzero(candidates, dim=-1)


# The synthetic queries


def observed(hidden_states, sink_size):
    return hidden_states[..., min(sink_size, hidden_states.shape[-2] - 1) :, :]


@control(STATISTICS, dtypes=NUMPY)
def one_token_at_a_time(hidden_states, *, sink_size=4):
    return shared.running_statistics(np.moveaxis(observed(hidden_states, sink_size), -2, 0))


@control(STATISTICS, array_library="torch", dtypes=ALL)
@through_float32
def torch_statistics(hidden_states, *, sink_size=4):
    variance, mean = torch.var_mean(observed(hidden_states, sink_size), dim=-2, correction=0)
    return mean, variance


@control(SAMPLE, dtypes=NUMPY)
def product_first(mean, variance, noise):
    return np.sqrt(variance)[..., None, :] * noise + mean[..., None, :]


@control(SAMPLE, array_library="torch", dtypes=ALL)
def torch_addcmul(mean, variance, noise):
    """A fused multiply-add of broadcast tensors."""
    return torch.addcmul(mean[..., None, :], variance.sqrt()[..., None, :], noise)


@control(PROJECT, dtypes=NUMPY)
def channels_from_the_last(hidden_states, query_weight, query_bias=None):
    queries = np.einsum("...sc,...cd->...sd", hidden_states[..., ::-1], query_weight[..., ::-1, :])
    return queries if query_bias is None else query_bias[..., None, :] + queries


@control(PROJECT, array_library="torch", dtypes=ALL)
def torch_linear(hidden_states, query_weight, query_bias=None):
    """torch's own linear layer, whose weight is transposed."""
    return torch.nn.functional.linear(hidden_states, query_weight.mT, query_bias)


control(COS_SIN, dtypes=NUMPY, name="closed_form")(waves_in_closed_form)


@control(COS_SIN, array_library="torch", dtypes=("float32", "float16", "bfloat16"))
def torch_table(head_dim, *, position, horizon=512, theta=10000.0):
    angles = torch_angles(torch.empty(head_dim), torch.arange(position, position + horizon), theta).chunk(
        2, dim=-1
    )[0]
    return angles.cos().mean(dim=0), angles.sin().mean(dim=0)


@control(ROTATION, dtypes=NUMPY)
def complex_pairs(queries, *, position, horizon=512, theta=10000.0):
    """Each pair as a complex number times the mean phase."""
    cos, sin = waves_in_closed_form(queries.shape[-1], position=position, horizon=horizon, theta=theta)
    half = queries.shape[-1] // 2
    turned = (queries[..., :half] + 1j * queries[..., half:]) * (cos + 1j * sin)
    return np.concatenate([turned.real, turned.imag], axis=-1).astype(queries.dtype)


@control(ROTATION, array_library="torch", dtypes=ALL)
def torch_rotate_half(queries, **window):
    """As transformers do it: a table of both halves in the dtype of the queries, and rotate_half."""
    cos, sin = (
        torch.from_numpy(np.tile(wave, 2)).to(queries.dtype)
        for wave in waves_in_closed_form(queries.shape[-1], **window)
    )
    first, second = queries.chunk(2, dim=-1)
    return queries * cos + torch.cat([-second, first], dim=-1) * sin


@control(LOGITS, array_library="torch", dtypes=ALL)
def torch_logits(sampled_queries, keys):
    return sampled_queries @ keys.mT / math.sqrt(keys.shape[-1])


# Votes


@control(UNION, array_library="torch")
def torch_any(votes):
    return votes.any(dim=-2)


control(PRUNE, array_library="torch", dtypes=ALL, name="torch_gathered")(torch_indexing)


def torch_elected(ranked):
    """torch in the dtype of the keys throughout, as eager
    code does it; `ranked` has the arguments of `top_each`.
    """

    def select(query, keys, sampled_queries, *, p=0.95):
        repeated = keys.repeat_interleave(query.shape[1] // keys.shape[1], dim=1)
        budgets = torch_mass_before(softmax_of_products(query, repeated), p).sum(dim=-1)
        votes = ranked(
            torch_logits(sampled_queries, repeated), budgets[..., None].expand(sampled_queries.shape[:3])
        )
        return votes.unflatten(1, (keys.shape[1], -1)).flatten(2, 3).any(dim=2)

    return select


torch_select = torch_elected(torch_ranked)
control(SELECT, array_library="torch", dtypes=ALL, name="torch_rounding_each_step")(torch_select)
control(SELECT, array_library="torch", dtypes=ALL, edges=False, name="torch_votes_for_the_last_of_equals")(
    torch_elected(torch_last_of_equals)
)


@control(SELECT, array_library="torch", dtypes=("float64", "float32"))
def torch_padded(query, keys, sampled_queries, *, p=0.95):
    """Tokens padded to a multiple of 16 with rubbish, whose logits are masked; a sample at a time."""
    length, num_kv_heads = keys.shape[2], keys.shape[1]
    padded = torch.nn.functional.pad(keys, (0, 0, 0, -length % 16), value=1e3)
    states = torch.cat([query[:, :, None], sampled_queries], dim=2).unflatten(1, (num_kv_heads, -1))
    logits = torch.einsum("bhgsd,bhtd->sbhgt", states, padded) / math.sqrt(keys.shape[-1])
    logits[..., length:] = -torch.inf
    budgets = torch_searched(logits[0].softmax(dim=-1), p).sum(dim=-1)
    kept = torch.zeros(*keys.shape[:2], padded.shape[2], dtype=torch.bool)
    for sample in logits[1:]:
        kept |= torch_ranked(sample, budgets).any(dim=2)
    return kept[..., :length].contiguous()


# The whole algorithm, and what the paper compares it with


@control(ALGORITHM, dtypes=NUMPY)
def numpy_line_by_line(
    query, keys, values, hidden_states, query_weight, noise, *, p=0.95, sink_size=4, **window
):
    """Welford's statistics, a projection head by head, complex phases and a selection head by head."""
    states = product_first(*one_token_at_a_time(hidden_states, sink_size=sink_size), noise)
    sampled = np.stack([channels_from_the_last(states, weight) for weight in query_weight], axis=1)
    kept = head_by_head(query, keys, complex_pairs(sampled, position=keys.shape[2], **window), p=p)
    return CompressedCache(keys[kept], values[kept], np.argwhere(kept)[:, 2], kept.sum(axis=-1))


@control(ALGORITHM, array_library="torch", dtypes=ALL)
def torch_algorithm(
    query, keys, values, hidden_states, query_weight, noise, *, p=0.95, sink_size=4, **window
):
    """torch, at least in float32 until the votes are cast, each row of the cache gathered as it is."""
    wide_query, wide_keys, hidden_states, query_weight, noise = cast(
        (query, keys, hidden_states, query_weight, noise)
    )
    states = torch_addcmul(*torch_statistics(hidden_states, sink_size=sink_size), noise)
    sampled = torch.einsum("bsc,hcd->bhsd", states, query_weight)
    rotated = torch_rotate_half(sampled, position=keys.shape[2], **window)
    return torch_indexing(keys, values, torch_select(wide_query, wide_keys, rotated, p=p))


@control(OPTIMAL, array_library="torch", dtypes=ALL)
def torch_any_nucleus(attention, p):
    return torch_mass_before(attention, p).any(dim=-2)


@control(OPTIMAL, array_library="torch", dtypes=ALL, edges=False)
def torch_any_nucleus_of_the_last(attention, p):
    return torch_last_of_equal_weights(attention, p).any(dim=-2)


@control(OVERLAP, array_library="torch", dtypes=ALL)
def torch_product(attention, candidates):
    return (attention * candidates).sum(dim=-1)
