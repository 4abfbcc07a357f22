"""Wrong groupings of query heads and wrong causal attention; the wrong `attend` are in shared.py."""

from __future__ import annotations

import numpy as np

from evictionary.reference.attention import attention_logits, by_group, causal_attention, softmax
from evictionary.spec_tests.harness.planted import mutant

BY_GROUP, CAUSAL = "attention.by_group", "attention.causal_attention"


def masked(logits, beyond, hidden=-np.inf):
    """The logits, `hidden` where a query would see more than the tokens up to its row + `beyond`."""
    rows, tokens = (np.arange(count) for count in logits.shape[-2:])
    return np.where(tokens <= rows[:, None] + beyond, logits, hidden)


@mutant(BY_GROUP, killed_by="ATT-5", misconception="query head h beside KV head h % H_kv instead of h // G")
def query_heads_interleaved(queries, keys):
    grouped, shared = by_group(queries, keys)
    batch, num_kv_heads, group, num_queries, head_dim = grouped.shape
    return np.swapaxes(queries.reshape(batch, group, num_kv_heads, num_queries, head_dim), 1, 2), shared


@mutant(BY_GROUP, killed_by="ATT-5", misconception="the query heads of a group in reverse order")
def group_reversed(queries, keys):
    grouped, shared = by_group(queries, keys)
    return grouped[:, :, ::-1], shared


@mutant(BY_GROUP, killed_by="ATT-5", misconception="queries of batch item 0 for the whole batch")
def queries_of_the_first_batch_item(queries, keys):
    grouped, shared = by_group(queries, keys)
    return np.broadcast_to(grouped[:1], grouped.shape), shared


@mutant(BY_GROUP, killed_by="ATT-5", misconception="queries scaled by 1/sqrt(D) on the way, which the logits then do again")
def queries_scaled(queries, keys):
    grouped, shared = by_group(queries, keys)
    return grouped / np.sqrt(keys.shape[-1]), shared


@mutant(BY_GROUP, killed_by="ATT-5", misconception="query heads that no group divides cut off in silence")
def surplus_heads_cut_off(queries, keys):
    heads = max(1, keys.shape[1])
    if np.ndim(queries) != 4 or queries.shape[1] % heads == 0 or queries.shape[1] < heads:
        return by_group(queries, keys)
    return by_group(queries[:, : queries.shape[1] // heads * heads], keys)


@mutant(CAUSAL, killed_by="ATT-6", misconception="the causal mask left out")
def later_tokens_seen(queries, keys):
    return softmax(attention_logits(queries, keys))


@mutant(CAUSAL, killed_by="ATT-6", misconception="fewer queries than tokens aligned to the first tokens instead of the last")
def mask_from_the_upper_left(queries, keys):
    return softmax(masked(attention_logits(queries, keys), 0))


@mutant(CAUSAL, killed_by="ATT-6", misconception="a mask one token too far: each query sees the next token")
def next_token_seen(queries, keys):
    return softmax(masked(attention_logits(queries, keys), keys.shape[-2] - queries.shape[-2] + 1))


@mutant(CAUSAL, killed_by="ATT-6", misconception="hidden logits set to -10 instead of -inf: a little weight goes to later tokens")
def hidden_logits_finite(queries, keys):
    return softmax(masked(attention_logits(queries, keys), keys.shape[-2] - queries.shape[-2], hidden=-10.0))


@mutant(CAUSAL, killed_by="ATT-6", misconception="weights masked after the softmax and not normalised again")
def masked_after_the_softmax(queries, keys):
    return np.tril(softmax(attention_logits(queries, keys)), k=keys.shape[-2] - queries.shape[-2])


@mutant(CAUSAL, killed_by="ATT-6", misconception="logits divided by D instead of sqrt(D)")
def logits_over_dimension(queries, keys):
    return causal_attention(queries / np.sqrt(keys.shape[-1]), keys)
