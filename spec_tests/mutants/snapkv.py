"""Wrong SnapKVs."""

from __future__ import annotations

import numpy as np

from evictionary.reference import snapkv
from evictionary.reference.attention import attention_logits, by_group, causal_attention, softmax
from evictionary.reference.snapkv import average_pool
from evictionary.spec_tests.harness.planted import mutant

SCORE, POOL = "snapkv.score", "snapkv.average_pool"


def scored(
    queries,
    keys,
    window_size,
    kernel_size,
    *,
    attend=causal_attention,
    reduce=lambda weights: weights.mean(axis=(2, 3)),
    pool=average_pool,
):
    """SnapKV with an attention, a mean [B, H_kv, G, W, N] to [B, H_kv, N] or pooling of one's own; refuses as SnapKV does."""
    right = snapkv.score(queries, keys, window_size=window_size, kernel_size=kernel_size)
    grouped, shared = by_group(queries, keys)
    before = max(0, keys.shape[2] - window_size)
    if before:
        right[..., :before] = pool(reduce(attend(grouped[..., -window_size:, :], shared)[..., :before]), kernel_size)
    return right


@mutant(SCORE, killed_by="SN-1", misconception="the sum over the window instead of the mean")
def sum_over_the_window(queries, keys, *, window_size=32, kernel_size=7):
    return scored(queries, keys, window_size, kernel_size, reduce=lambda weights: weights.sum(axis=3).mean(axis=2))


@mutant(SCORE, killed_by="SN-1", misconception="the last query alone instead of the window's mean")
def last_query_only(queries, keys, *, window_size=32, kernel_size=7):
    return scored(queries, keys, window_size, kernel_size, reduce=lambda weights: weights[..., -1, :].mean(axis=2))


@mutant(SCORE, killed_by="SN-1", misconception="the sum over the query heads of a group instead of the mean")
def sum_over_the_group(queries, keys, *, window_size=32, kernel_size=7):
    return scored(queries, keys, window_size, kernel_size, reduce=lambda weights: weights.mean(axis=3).sum(axis=2))


@mutant(SCORE, killed_by="SN-1", misconception="the largest weight of the group instead of the mean")
def largest_of_the_group(queries, keys, *, window_size=32, kernel_size=7):
    return scored(queries, keys, window_size, kernel_size, reduce=lambda weights: weights.mean(axis=3).max(axis=2))


@mutant(SCORE, killed_by="SN-1", misconception="queries averaged over the group before the softmax")
def averaged_before_the_softmax(queries, keys, *, window_size=32, kernel_size=7):
    def attend(grouped, shared):
        return causal_attention(grouped.mean(axis=2, keepdims=True), shared)

    return scored(queries, keys, window_size, kernel_size, attend=attend)


@mutant(SCORE, killed_by="SN-1", misconception="the window's queries averaged before the softmax")
def window_averaged_before_the_softmax(queries, keys, *, window_size=32, kernel_size=7):
    def attend(grouped, shared):
        return causal_attention(grouped.mean(axis=3, keepdims=True), shared)

    return scored(queries, keys, window_size, kernel_size, attend=attend)


@mutant(SCORE, killed_by="SN-1", misconception="the causal mask within the window left out")
def window_not_causal(queries, keys, *, window_size=32, kernel_size=7):
    return scored(queries, keys, window_size, kernel_size, attend=lambda *states: softmax(attention_logits(*states)))


@mutant(
    SCORE,
    killed_by="SN-1",
    misconception="the softmax over the tokens before the window alone: what the window gives itself is not counted",
)
def softmax_before_the_window(queries, keys, *, window_size=32, kernel_size=7):
    def attend(grouped, shared):
        return softmax(attention_logits(grouped, shared)[..., : max(1, keys.shape[2] - window_size)])

    return scored(queries, keys, window_size, kernel_size, attend=attend)


@mutant(SCORE, killed_by="SN-1", misconception="the scale 1/sqrt(D) left out")
def no_scale(queries, keys, *, window_size=32, kernel_size=7):
    def attend(grouped, shared):
        return causal_attention(grouped * np.sqrt(keys.shape[-1]), shared)

    return scored(queries, keys, window_size, kernel_size, attend=attend)


@mutant(SCORE, killed_by="SN-1", misconception="query head h reads KV head h % H_kv instead of h // G")
def interleaved_heads(queries, keys, *, window_size=32, kernel_size=7):
    snapkv.score(queries, keys, window_size=window_size, kernel_size=kernel_size)
    order = np.arange(queries.shape[1]).reshape(-1, keys.shape[1]).T.ravel()
    return snapkv.score(queries[:, order], keys, window_size=window_size, kernel_size=kernel_size)


@mutant(SCORE, killed_by="SN-1", misconception="the first queries of the prompt taken for the window")
def first_queries(queries, keys, *, window_size=32, kernel_size=7):
    right = snapkv.score(queries, keys, window_size=window_size, kernel_size=kernel_size)
    window = min(window_size, keys.shape[2])
    first = np.concatenate([queries[:, :, window:], queries[:, :, :window]], axis=2)
    return snapkv.score(first, keys, window_size=window_size, kernel_size=kernel_size) if window < keys.shape[2] else right


@mutant(SCORE, killed_by="SN-1", misconception="all queries of the prompt averaged instead of those of the window")
def all_queries(queries, keys, *, window_size=32, kernel_size=7):
    right = snapkv.score(queries, keys, window_size=window_size, kernel_size=kernel_size)
    before = keys.shape[2] - window_size
    if before > 0:
        weights = causal_attention(*by_group(queries, keys))[..., :before].mean(axis=(2, 3))
        right[..., :before] = average_pool(weights, kernel_size)
    return right


@mutant(
    SCORE, killed_by="SN-1", misconception="pooling over all tokens, the window's weights too, which leak to the tokens beside it"
)
def window_pooled_too(queries, keys, *, window_size=32, kernel_size=7):
    right = snapkv.score(queries, keys, window_size=window_size, kernel_size=kernel_size)
    before = keys.shape[2] - window_size
    if before > 0:
        weights = causal_attention(*by_group(queries[:, :, -window_size:], keys)).mean(axis=(2, 3))
        right[..., :before] = average_pool(weights, kernel_size)[..., :before]
    return right


@mutant(SCORE, killed_by="SN-1", misconception="no pooling")
def not_pooled(queries, keys, *, window_size=32, kernel_size=7):
    return scored(queries, keys, window_size, kernel_size, pool=lambda weights, kernel: weights)


@mutant(SCORE, killed_by="SN-1", misconception="the largest weight of the neighbours instead of their mean (max pooling)")
def max_pooled(queries, keys, *, window_size=32, kernel_size=7):
    def pool(weights, kernel):
        padded = np.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(kernel // 2, kernel // 2)])
        return np.lib.stride_tricks.sliding_window_view(padded, kernel, axis=-1).max(axis=-1)

    return scored(queries, keys, window_size, kernel_size, pool=pool)


@mutant(SCORE, killed_by="SN-1", misconception="a kernel of 5 by default (as in other releases) instead of 7")
def kernel_of_five(queries, keys, *, window_size=32, kernel_size=5):
    return snapkv.score(queries, keys, window_size=window_size, kernel_size=kernel_size)


@mutant(SCORE, killed_by="SN-1", misconception="a window of 64 by default instead of 32")
def window_of_64(queries, keys, *, window_size=64, kernel_size=7):
    return snapkv.score(queries, keys, window_size=min(window_size, keys.shape[2]), kernel_size=kernel_size)


@mutant(SCORE, killed_by="SN-1", misconception="the window one token too short")
def window_one_short(queries, keys, *, window_size=32, kernel_size=7):
    snapkv.score(queries, keys, window_size=window_size, kernel_size=kernel_size)
    return snapkv.score(queries, keys, window_size=max(1, window_size - 1), kernel_size=kernel_size)


@mutant(SCORE, killed_by="SN-1", misconception="the window scored like the other tokens: it has to earn its place")
def window_not_protected(queries, keys, *, window_size=32, kernel_size=7):
    scores = snapkv.score(queries, keys, window_size=window_size, kernel_size=kernel_size)
    weights = causal_attention(*by_group(queries[:, :, -window_size:], keys)).mean(axis=(2, 3))
    return np.where(np.isinf(scores), weights, scores)


@mutant(
    SCORE,
    killed_by="SN-1",
    misconception="the window given the largest score before it instead of infinity: a tie can evict it",
)
def window_at_the_maximum(queries, keys, *, window_size=32, kernel_size=7):
    scores = snapkv.score(queries, keys, window_size=window_size, kernel_size=kernel_size)
    largest = np.where(np.isinf(scores), 0, scores).max(axis=-1, keepdims=True)
    return np.where(np.isinf(scores), largest, scores)


@mutant(SCORE, killed_by="SN-1", misconception="batch item 0 deciding for the whole batch")
def first_batch_item_decides(queries, keys, *, window_size=32, kernel_size=7):
    scores = snapkv.score(queries, keys, window_size=window_size, kernel_size=kernel_size)
    return np.broadcast_to(scores[:1], scores.shape).copy()


@mutant(SCORE, killed_by="SN-1", misconception="weights in bfloat16")
def weights_in_bfloat16(queries, keys, *, window_size=32, kernel_size=7):
    def attend(*states):
        bits = causal_attention(*states).astype(np.float32).view(np.uint32)
        return (bits & 0xFFFF0000).view(np.float32).astype(np.float64)

    return scored(queries, keys, window_size, kernel_size, attend=attend)


@mutant(SCORE, killed_by="SN-1", misconception="an empty window or an even kernel made good in silence")
def any_settings_taken(queries, keys, *, window_size=32, kernel_size=7):
    return snapkv.score(queries, keys, window_size=max(1, int(window_size)), kernel_size=int(kernel_size) // 2 * 2 + 1)


@mutant(SCORE, killed_by="SN-1", misconception="fewer queries than the window, or queries that do not fit, taken in silence")
def nothing_refused(queries, keys, *, window_size=32, kernel_size=7):
    try:
        return snapkv.score(queries, keys, window_size=window_size, kernel_size=kernel_size)
    except ValueError:
        snapkv.score(keys, keys, window_size=window_size, kernel_size=kernel_size)  # the settings are still refused
        return np.where(np.arange(keys.shape[2]) < keys.shape[2] - window_size, 0, np.inf) + np.zeros(keys.shape[:3])


@mutant(
    POOL, killed_by="SN-1", misconception="the mean at the ends over the neighbours that exist instead of over the whole kernel"
)
def padding_not_counted(weights, kernel_size):
    return average_pool(weights, kernel_size) / average_pool(np.ones_like(weights), kernel_size)


@mutant(POOL, killed_by="SN-1", misconception="the kernel over the tokens before each one instead of around it")
def kernel_to_the_left(weights, kernel_size):
    average_pool(weights, kernel_size)
    padded = np.concatenate([np.zeros((*weights.shape[:-1], kernel_size - 1)), weights], axis=-1)
    return np.lib.stride_tricks.sliding_window_view(padded, kernel_size, axis=-1).mean(axis=-1)


@mutant(POOL, killed_by="SN-1", misconception="the sum over the kernel instead of the mean")
def pooled_sum(weights, kernel_size):
    return average_pool(weights, kernel_size) * kernel_size


@mutant(POOL, killed_by="SN-1", misconception="a reach of kernel_size tokens to each side instead of half of it")
def twice_the_reach(weights, kernel_size):
    average_pool(weights, kernel_size)
    return average_pool(weights, 2 * kernel_size + 1)


@mutant(POOL, killed_by="SN-1", misconception="the ends filled with the first and the last weight instead of zeros")
def ends_repeated(weights, kernel_size):
    average_pool(weights, kernel_size)
    padded = np.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(kernel_size // 2, kernel_size // 2)], mode="edge")
    return np.lib.stride_tricks.sliding_window_view(padded, kernel_size, axis=-1).mean(axis=-1)
