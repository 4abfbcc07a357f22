"""Wrong KeyDiffs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from evictionary.reference import keydiff, keydiff_theory, keydiff_variants
from evictionary.reference.attention import attention_logits, softmax
from evictionary.reference.keydiff import Cache, pairwise_score, score, unit
from evictionary.reference.keydiff_theory import Operations
from evictionary.reference.selection import top_k
from evictionary.spec_tests.harness.planted import mutant

SCORE, PAIRWISE = "keydiff.score", "keydiff.pairwise_score"
ATTENTION, CACHED = "keydiff_theory.causal_attention", "keydiff_theory.cached_attention"
APPEND, EVICT = "keydiff.append", "keydiff.evict"
BLOCK, PROMPT, DECODE = "keydiff.process_block", "keydiff.process_prompt", "keydiff.decode"
MEDIAN, RAW, DOT, EUCLID = (f"keydiff_variants.{name}_score" for name in ("median", "raw_mean", "dot_product", "euclidean"))
RECENT, STEPS = "keydiff_variants.select_with_recent", "keydiff_theory.score_step_by_step"


def scorer(misconception: str, *, of: str = SCORE, killed_by: str = "KD-8") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Plant a wrong score that refuses the keys that the right one refuses: it dies by its numbers."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def checked(keys):
            score(keys)
            return function(keys)

        return mutant(of, killed_by=killed_by, misconception=misconception)(checked)

    return decorate


def cosine(keys: np.ndarray, anchor: np.ndarray) -> np.ndarray:
    return (unit(keys) * unit(anchor)).sum(axis=-1)


@scorer("mean taken before normalising")
def raw_mean_anchor(keys):
    return -cosine(keys, keys.mean(axis=-2, keepdims=True))


@scorer("the sign left out: the most typical keys are kept")
def typical_keys_kept(keys):
    return cosine(keys, unit(keys).mean(axis=-2, keepdims=True))


@scorer("the absolute value of the cosine: a key opposite to the anchor counts as near to it")
def absolute_cosine(keys):
    return -np.abs(cosine(keys, unit(keys).mean(axis=-2, keepdims=True)))


@scorer("1 - cosine returned for -cosine")
def cosine_distance(keys):
    return 1 - cosine(keys, unit(keys).mean(axis=-2, keepdims=True))


@scorer("dot product with the anchor instead of the cosine")
def dot_product(keys):
    return -(keys * unit(keys).mean(axis=-2, keepdims=True)).sum(axis=-1)


@scorer("the anchor left unnormalised: the scores shrink with its length")
def anchor_not_normalised(keys):
    return -(unit(keys) * unit(keys).mean(axis=-2, keepdims=True)).sum(axis=-1)


@scorer("Euclidean distance to the anchor instead of the cosine")
def euclidean_distance(keys):
    return np.linalg.norm(keys - unit(keys).mean(axis=-2, keepdims=True), axis=-1)


@scorer("keys divided by the sum of their absolute values instead of by their Euclidean norm")
def manhattan_directions(keys):
    total = np.abs(keys).sum(axis=-1, keepdims=True)
    return -cosine(keys, (keys / np.where(total == 0, 1, total)).mean(axis=-2, keepdims=True))


@scorer("the median of the unit keys as the anchor")
def median_anchor(keys):
    return -cosine(keys, np.median(unit(keys), axis=-2, keepdims=True))


@scorer("one anchor for all heads of a layer")
def anchor_over_all_heads(keys):
    return -cosine(keys, unit(keys).mean(axis=(1, 2), keepdims=True))


@scorer("the anchor of batch item 0 used for the whole batch")
def anchor_of_the_first_batch_item(keys):
    return -cosine(keys, unit(keys[:1]).mean(axis=-2, keepdims=True))


@scorer("the scores of a layer averaged over its heads")
def scores_shared_by_the_heads(keys):
    scores = score(keys)
    return np.broadcast_to(scores.mean(axis=1, keepdims=True), scores.shape).copy()


@scorer("the mean taken over the channels instead of the tokens")
def mean_over_channels(keys):
    return -cosine(keys, np.broadcast_to(unit(keys).mean(axis=-1, keepdims=True), keys.shape))


@scorer("an epsilon of 1e-6 added to the squared norms")
def epsilon_inside_the_norm(keys):
    directions = keys / np.sqrt((keys * keys).sum(axis=-1, keepdims=True) + 1e-6)
    mean = directions.mean(axis=-2, keepdims=True)
    return -(directions * mean / np.sqrt((mean * mean).sum(axis=-1, keepdims=True) + 1e-6)).sum(axis=-1)


@scorer("a zero key divided by its zero norm")
def zero_norm_divided(keys):
    with np.errstate(all="ignore"):
        directions = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
        mean = directions.mean(axis=-2, keepdims=True)
        return -(directions * mean).sum(axis=-1) / np.linalg.norm(mean, axis=-1)


@scorer("scores rounded to bfloat16")
def scores_in_bfloat16(keys):
    return (score(keys).astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32).astype(np.float64)


@scorer("the anchor summed in float16")
def anchor_in_half_precision(keys):
    total = unit(keys).astype(np.float16).sum(axis=-2, keepdims=True, dtype=np.float16)
    return -cosine(keys, total.astype(np.float64))


@scorer("the tokens after the last whole tile of 16 left out of the anchor")
def tail_tile_left_out(keys):
    whole = max(1, keys.shape[-2] // 16) * 16
    return -cosine(keys, unit(keys[..., :whole, :]).mean(axis=-2, keepdims=True))


@scorer("the last tile of 16 tokens filled up with ones that enter the anchor: an unmasked tail")
def tail_tile_not_masked(keys):
    padding = -keys.shape[-2] % 16
    padded = np.concatenate([keys, np.ones((*keys.shape[:-2], padding, keys.shape[-1]))], axis=-2)
    return -cosine(keys, unit(padded).mean(axis=-2, keepdims=True))


@scorer("the anchor of a token averaged over the tokens up to it only (a causal mean)")
def running_anchor(keys):
    return -cosine(keys, np.cumsum(unit(keys), axis=-2))


@scorer("the newest token left out of the anchor")
def newest_token_left_out(keys):
    return -cosine(keys, unit(keys[..., : max(1, keys.shape[-2] - 1), :]).mean(axis=-2, keepdims=True))


@scorer("the first token forced to be kept (a protected sink)")
def first_token_protected(keys):
    scores = score(keys)
    scores[..., 0] = 1
    return scores


@scorer("the most recent token forced to be kept (a protected window)")
def last_token_protected(keys):
    scores = score(keys)
    scores[..., -1] = 1
    return scores


@mutant(SCORE, killed_by="KD-8", misconception="NaN and infinite numbers replaced in silence")
def not_finite_replaced(keys):
    if keys.ndim < 2 or 0 in keys.shape:
        raise ValueError("keys")
    directions = unit(np.nan_to_num(keys, posinf=1e3, neginf=-1e3))
    return -(directions * unit(directions.sum(axis=-2, keepdims=True))).sum(axis=-1)


@mutant(SCORE, killed_by="KD-8", misconception="empty axes and too few axes scored in silence")
def nothing_refused(keys):
    with np.errstate(all="ignore"):
        directions = unit(keys)
        total = directions.sum(axis=-2, keepdims=True) if keys.ndim > 1 else directions
        return -(directions * unit(total)).sum(axis=-1)


@mutant(PAIRWISE, killed_by="KD-7", misconception="the key itself left out of its row sum")
def own_similarity_left_out(keys):
    return pairwise_score(keys) + (np.abs(keys).max(axis=-1) > 0)


@mutant(PAIRWISE, killed_by="KD-7", misconception="dot products summed instead of cosines")
def dot_products_summed(keys):
    return -(keys @ np.swapaxes(keys, -1, -2)).sum(axis=-1)


@mutant(PAIRWISE, killed_by="KD-7", misconception="the mean of each row of the similarity matrix instead of its sum")
def row_means(keys):
    return pairwise_score(keys) / keys.shape[-2]


@mutant(PAIRWISE, killed_by="KD-7", misconception="only the similarities to earlier tokens summed (a causal matrix)")
def earlier_tokens_only(keys):
    return -np.tril(keydiff.similarity_matrix(keys)).sum(axis=-1)


@mutant("keydiff.similarity_matrix", killed_by="KD-7", misconception="the matrix of dot products, the norms not divided out")
def gram_matrix(keys):
    return keys @ np.swapaxes(keys, -1, -2)


@mutant("keydiff.similarity_matrix", killed_by="KD-7", misconception="the diagonal set to zero")
def diagonal_emptied(keys):
    return keydiff.similarity_matrix(keys) * (1 - np.eye(keys.shape[-2]))


@mutant("keydiff.similarity_matrix", killed_by="KD-7", misconception="each row divided by the norm of its own key alone")
def norms_of_the_rows_only(keys):
    return unit(keys) @ np.swapaxes(keys, -1, -2)


@mutant("keydiff.anchor", killed_by="KD-7", misconception="the anchor is the mean of the raw keys")
def anchor_of_raw_keys(keys):
    return keys.mean(axis=-2)


@mutant("keydiff.anchor", killed_by="KD-8", misconception="the anchor scaled to length one")
def anchor_of_length_one(keys):
    return unit(keydiff.anchor(keys))


@mutant("keydiff.anchor", killed_by="KD-8", misconception="zero keys left out of the number of tokens divided by")
def zero_keys_not_counted(keys):
    count = (np.abs(keys).max(axis=-1) > 0).sum(axis=-1)[..., None]
    return unit(keys).sum(axis=-2) / np.maximum(count, 1)


@mutant(
    "keydiff_theory.pairwise_objective",
    killed_by="KD-O",
    misconception="each pair counted once instead of twice, the diagonal once",
)
def each_pair_once(keys, kept):
    own = (kept & (np.abs(keys).max(axis=-1) > 0)).sum(axis=-1)
    return (keydiff_theory.pairwise_objective(keys, kept) + own) / 2


@mutant("keydiff_theory.pairwise_objective", killed_by="KD-O", misconception="the pairs of a key with itself left out")
def different_keys_only(keys, kept):
    return keydiff_theory.pairwise_objective(keys, kept) - (kept & (np.abs(keys).max(axis=-1) > 0)).sum(axis=-1)


@mutant("keydiff_theory.relaxed_objective", killed_by="KD-O", misconception="the mean over the kept keys instead of all keys")
def mean_of_the_kept(keys, kept):
    return keydiff_theory.pairwise_objective(keys, kept) / np.maximum(kept.sum(axis=-1), 1)


@mutant("keydiff_theory.relaxed_objective", killed_by="KD-O", misconception="the mean normalised: cosines with it summed")
def cosines_with_the_mean(keys, kept):
    return -(score(keys) * kept).sum(axis=-1)


@mutant("keydiff_theory.transformer_block", killed_by="KD-1", misconception="the feed-forward network applied before attention")
def feed_forward_first(states, attend, feed_forward):
    return attend(feed_forward(states))


@mutant(
    "keydiff_theory.transformer_block",
    killed_by="KD-1",
    misconception="residual connections, which the equation does not have, added",
)
def residuals_added(states, attend, feed_forward):
    middle = states + attend(states)
    return middle + feed_forward(middle)


def attended(queries, keys, values, *, scale=None, hidden=None):
    """Attention with a scale or a mask of one's own; `hidden` is True where a query does not see a key."""
    logits = queries @ np.swapaxes(keys, -1, -2) * (scale or queries.shape[-1] ** -0.5)
    if hidden is None:
        hidden = np.triu(np.ones(logits.shape[-2:], dtype=bool), k=keys.shape[-2] - queries.shape[-2] + 1)
    return softmax(np.where(hidden, -np.inf, logits)) @ values


@mutant(ATTENTION, killed_by="KD-2", misconception="the scale 1/sqrt(D) left out")
def no_scale(queries, keys, values):
    return attended(queries, keys, values, scale=1.0)


@mutant(ATTENTION, killed_by="KD-2", misconception="logits divided by D instead of sqrt(D)")
def scale_by_dimension(queries, keys, values):
    return attended(queries, keys, values, scale=1 / queries.shape[-1])


@mutant(ATTENTION, killed_by="KD-2", misconception="the causal mask left out")
def later_tokens_seen(queries, keys, values):
    return attended(queries, keys, values, hidden=np.zeros((1, 1), dtype=bool))


@mutant(ATTENTION, killed_by="KD-2", misconception="the mask on the diagonal too: a token does not see itself")
def own_token_hidden(queries, keys, values):
    hidden = np.triu(np.ones((queries.shape[-2], keys.shape[-2]), dtype=bool))
    hidden[0, 0] = False
    return attended(queries, keys, values, hidden=hidden)


@mutant(ATTENTION, killed_by="KD-2", misconception="weights masked after the softmax and not normalised again")
def masked_after_the_softmax(queries, keys, values):
    return np.tril(softmax(attention_logits(queries, keys))) @ values


@mutant(ATTENTION, killed_by="KD-2", misconception="hidden logits set to 0 instead of -inf")
def hidden_logits_zero(queries, keys, values):
    return softmax(np.tril(attention_logits(queries, keys))) @ values


@mutant(ATTENTION, killed_by="KD-2", misconception="the softmax taken over the queries instead of the keys")
def softmax_over_queries(queries, keys, values):
    hidden = np.triu(np.ones((queries.shape[-2], keys.shape[-2]), dtype=bool), k=1)
    return softmax(np.where(hidden, -np.inf, attention_logits(queries, keys)), axis=-2) @ values


@mutant(ATTENTION, killed_by="KD-2", misconception="exponentials taken without subtracting the maximum")
def overflowing_softmax(queries, keys, values):
    with np.errstate(all="ignore"):
        weights = np.tril(np.exp(attention_logits(queries, keys)))
        return weights / weights.sum(axis=-1, keepdims=True) @ values


@mutant(
    CACHED,
    killed_by="KD-3",
    misconception="the causal mask aligned with the first cached token: the cache is hidden like the future",
)
def mask_from_the_corner(queries, keys, values, cache):
    both = keydiff.append(cache, keys, values)
    return attended(queries, both.keys, both.values, hidden=~np.tri(queries.shape[-2], both.keys.shape[-2], dtype=bool))


@mutant(CACHED, killed_by="KD-3", misconception="the new tokens left without a mask: they see those after them")
def new_tokens_unmasked(queries, keys, values, cache):
    both = keydiff.append(cache, keys, values)
    return attended(queries, both.keys, both.values, hidden=np.zeros((1, 1), dtype=bool))


@mutant(CACHED, killed_by="KD-3", misconception="the cache attended to alone: new tokens do not see one another, nor themselves")
def cache_alone(queries, keys, values, cache):
    return attended(queries, cache.keys, cache.values, hidden=np.zeros((1, 1), dtype=bool))


@mutant(
    CACHED,
    killed_by="KD-3",
    misconception="keys hidden by their place in the cache as if it were their position: evicted gaps count",
)
def places_for_positions(queries, keys, values, cache):
    both = keydiff.append(cache, keys, values)
    last = np.arange(both.keys.shape[-2] - queries.shape[-2], both.keys.shape[-2])
    return attended(queries, both.keys, both.values, hidden=both.positions[..., None, :] > last[:, None])


@mutant(APPEND, killed_by="KD-3", misconception="new tokens put before the cache")
def new_tokens_first(cache, keys, values):
    joined = keydiff.append(cache, keys, values)
    joined_keys, joined_values = (np.roll(states, keys.shape[-2], axis=-2) for states in (joined.keys, joined.values))
    return Cache(joined_keys, joined_values, np.roll(joined.positions, keys.shape[-2], axis=-1), joined.seen)


@mutant(APPEND, killed_by="KD-3", misconception="positions counted from the length of the cache, not from the tokens seen")
def positions_from_the_buffer(cache, keys, values):
    return keydiff.append(cache and cache._replace(seen=cache.keys.shape[-2]), keys, values)


@mutant(APPEND, killed_by="KD-3", misconception="positions of each block counted from 0")
def positions_restarted(cache, keys, values):
    joined = keydiff.append(cache, keys, values)
    joined.positions[..., -keys.shape[-2] :] = np.arange(keys.shape[-2])
    return joined


@mutant(EVICT, killed_by="KD-4", misconception="keys gathered, values cut off: row n of the two are different tokens")
def values_cut_off(cache, kept):
    left = keydiff.evict(cache, kept)
    return left._replace(values=cache.values[..., : left.keys.shape[-2], :])


@mutant(EVICT, killed_by="KD-4", misconception="the mask of the first head applied to all heads")
def first_head_decides(cache, kept):
    keydiff.evict(cache, kept)
    return keydiff.evict(cache, np.broadcast_to(kept[:, :1], kept.shape).copy())


@mutant(EVICT, killed_by="KD-4", misconception="the kept tokens renumbered from 0")
def positions_renumbered(cache, kept):
    left = keydiff.evict(cache, kept)
    return left._replace(positions=np.broadcast_to(np.arange(left.keys.shape[-2]), left.positions.shape).copy())


@mutant(EVICT, killed_by="KD-4", misconception="the number of tokens seen set back to the number kept")
def seen_set_back(cache, kept):
    left = keydiff.evict(cache, kept)
    return left._replace(seen=left.keys.shape[-2])


@mutant(EVICT, killed_by="KD-4", misconception="rows that keep more than the others cut to the shortest in silence")
def uneven_rows_cut(cache, kept):
    kept = np.asarray(kept, dtype=bool)
    return keydiff.evict(cache, kept & (np.cumsum(kept, axis=-1) <= kept.sum(axis=-1).min()))


@mutant("keydiff_theory.attention_policy", killed_by="KD-5", misconception="the weights averaged over the heads: one set for all")
def one_set_for_all_heads(weights, budget, *, aggregate):
    shared = np.broadcast_to(weights.mean(axis=1, keepdims=True), weights.shape)
    return keydiff_theory.attention_policy(shared.copy(), budget, aggregate=aggregate)


@mutant("keydiff_theory.attention_policy", killed_by="KD-5", misconception="the least attended tokens kept")
def least_attended(weights, budget, *, aggregate):
    return top_k(-aggregate(weights), budget)


@mutant(
    "keydiff_theory.attention_policy",
    killed_by="KD-5",
    misconception="the weights transposed: what queries give, not what keys get",
)
def queries_for_keys(weights, budget, *, aggregate):
    square = weights[..., -min(weights.shape[-2:]) :, :]
    scores = aggregate(np.swapaxes(square, -1, -2))
    padded = np.concatenate([scores, np.zeros((*scores.shape[:-1], weights.shape[-1] - scores.shape[-1]))], axis=-1)
    return top_k(padded, budget)


def stepped(cache, keys, values, budget, choose):
    """A step of KD-6 in which `choose(joined, new, budget)` says what stays of the joined cache, whose last `new` are new."""
    keydiff.process_block(cache, keys, values, budget=budget)  # refuses what is to be refused
    joined = keydiff.append(cache, keys, values)
    return keydiff.evict(joined, choose(joined, keys.shape[-2], min(budget, joined.keys.shape[-2])))


def in_blocks(keys, values, budget, block_size, choose):
    """A prompt block by block, each by `stepped`."""
    keydiff.process_prompt(keys, values, budget=budget, block_size=block_size)
    cache = None
    for start in range(0, keys.shape[-2], block_size):
        block = (..., slice(start, start + block_size), slice(None))
        cache = stepped(cache, keys[block], values[block], budget, choose)
    return cache


def protecting(states, places, budget):
    """The N best by the score, the tokens at `places` first."""
    protected = np.zeros(states.keys.shape[:-1], dtype=bool)
    protected[..., places] = True
    return top_k(score(states.keys) + 4 * protected, budget)


@mutant(
    BLOCK, killed_by="KD-6", misconception="the anchor taken over the old cache alone: the block is scored against a stale mean"
)
def stale_anchor(cache, keys, values, *, budget, scorer=score):
    def choose(joined, new, budget):
        old = joined.keys[..., : max(1, joined.keys.shape[-2] - new), :]
        return top_k(-keydiff.cosine(joined.keys, keydiff.anchor(old)), budget)

    return stepped(cache, keys, values, budget, choose)


@mutant(BLOCK, killed_by="KD-6", misconception="the new block protected: only cached tokens can go")
def new_block_protected(cache, keys, values, *, budget, scorer=score):
    return stepped(cache, keys, values, budget, lambda joined, new, budget: protecting(joined, slice(-new, None), budget))


@mutant(BLOCK, killed_by="KD-6", misconception="the first token protected as a sink in every step")
def sink_protected(cache, keys, values, *, budget, scorer=score):
    return stepped(cache, keys, values, budget, lambda joined, new, budget: protecting(joined, 0, budget))


@mutant(BLOCK, killed_by="KD-6", misconception="the budget left for the old tokens, the block kept on top of it: N + B tokens stay")
def block_on_top_of_the_budget(cache, keys, values, *, budget, scorer=score):
    def choose(joined, new, budget):
        return top_k(score(joined.keys), min(budget + new, joined.keys.shape[-2]))

    return stepped(cache, keys, values, budget, choose)


@mutant(BLOCK, killed_by="KD-6", misconception="the cache left in the order of the scores, not of the positions")
def score_order(cache, keys, values, *, budget, scorer=score):
    left = keydiff.process_block(cache, keys, values, budget=budget)
    order = np.argsort(-score(left.keys), axis=-1, kind="stable")
    left_keys, left_values = (np.take_along_axis(states, order[..., None], axis=-2) for states in (left.keys, left.values))
    return Cache(left_keys, left_values, np.take_along_axis(left.positions, order, axis=-1), left.seen)


@mutant(PROMPT, killed_by="KD-6", misconception="the prompt compressed in one shot, the block size ignored")
def one_shot(keys, values, *, budget, block_size, scorer=score):
    keydiff.process_prompt(keys, values, budget=budget, block_size=block_size)
    return keydiff.process_block(None, keys, values, budget=budget)


@mutant(PROMPT, killed_by="KD-6", misconception="only the first block compressed, the others appended whole")
def first_block_only(keys, values, *, budget, block_size, scorer=score):
    cache = keydiff.process_prompt(keys, values, budget=budget, block_size=block_size)
    if block_size < keys.shape[-2]:
        first, rest = (..., slice(block_size), slice(None)), (..., slice(block_size, None), slice(None))
        cache = keydiff.append(keydiff.process_block(None, keys[first], values[first], budget=budget), keys[rest], values[rest])
    return cache


@mutant(PROMPT, killed_by="KD-6", misconception="the tokens after the last whole block dropped")
def tail_dropped(keys, values, *, budget, block_size, scorer=score):
    keydiff.process_prompt(keys, values, budget=budget, block_size=block_size)
    whole = max(1, keys.shape[-2] // block_size) * block_size
    return keydiff.process_prompt(keys[..., :whole, :], values[..., :whole, :], budget=budget, block_size=block_size)


@mutant(PROMPT, killed_by="KD-6", misconception="the first block never compressed: a prompt of one block stays whole")
def first_block_left_whole(keys, values, *, budget, block_size, scorer=score):
    cache = keydiff.process_prompt(keys, values, budget=budget, block_size=block_size)
    return cache if block_size < keys.shape[-2] else keydiff.append(None, keys, values)


@mutant(PROMPT, killed_by="KD-6", misconception="of equally distinct tokens the later one kept")
def later_of_equal_tokens(keys, values, *, budget, block_size, scorer=score):
    def choose(joined, new, budget):
        return top_k(score(joined.keys)[..., ::-1], budget)[..., ::-1]

    return in_blocks(keys, values, budget, block_size, choose)


@mutant(PROMPT, killed_by="KD-6", misconception="a budget or block size below 1 taken for 1 in silence")
def sizes_raised_to_one(keys, values, *, budget, block_size, scorer=score):
    return keydiff.process_prompt(keys, values, budget=max(1, budget), block_size=max(1, block_size))


@mutant(DECODE, killed_by="KD-6", misconception="the oldest token evicted in decoding (a sliding window)")
def oldest_evicted(cache, key, value, *, budget, scorer=score):
    def choose(joined, new, budget):
        length = joined.keys.shape[-2]
        return np.broadcast_to(np.arange(length) >= length - budget, joined.keys.shape[:-1])

    return stepped(cache, key[..., None, :], value[..., None, :], budget, choose)


@mutant(DECODE, killed_by="KD-6", misconception="tokens appended in decoding without evicting any: the cache grows past the budget")
def never_evicted(cache, key, value, *, budget, scorer=score):
    return keydiff.append(cache, key[..., None, :], value[..., None, :])


@mutant(DECODE, killed_by="KD-6", misconception="the new token always kept: one of the old ones makes room for it")
def new_token_protected(cache, key, value, *, budget, scorer=score):
    return new_block_protected(cache, key[..., None, :], value[..., None, :], budget=budget)


@scorer("the median of the unit keys instead of the keys", of=MEDIAN, killed_by="KD-T2")
def median_of_directions(keys):
    return -cosine(keys, np.median(unit(keys), axis=-2, keepdims=True))


@scorer("of an even number of keys the lower of the two in the middle (as torch.median has it)", of=MEDIAN, killed_by="KD-T2")
def lower_median(keys):
    return -cosine(keys, np.sort(keys, axis=-2)[..., (keys.shape[-2] - 1) // 2, None, :])


@scorer("the median taken over the channels instead of the tokens", of=MEDIAN, killed_by="KD-T2")
def median_over_channels(keys):
    return -cosine(keys, np.broadcast_to(np.median(keys, axis=-1, keepdims=True), keys.shape))


@scorer("the key in the middle of the sequence for the median", of=MEDIAN, killed_by="KD-T2")
def middle_position(keys):
    return -cosine(keys, keys[..., keys.shape[-2] // 2, None, :])


@scorer("the mean of the unit keys: the variant is KeyDiff itself", of=RAW, killed_by="KD-T2")
def mean_of_directions(keys):
    return score(keys)


@scorer("the keys left unnormalised in the product with the mean", of=RAW, killed_by="KD-T2")
def keys_not_normalised(keys):
    return -(keys * unit(keys.mean(axis=-2, keepdims=True))).sum(axis=-1)


@scorer("the dot product with the mean of the unit keys", of=DOT, killed_by="KD-T3")
def dot_with_the_mean_direction(keys):
    return -(keys * unit(keys).mean(axis=-2, keepdims=True)).sum(axis=-1)


@scorer("the dot product scaled by 1/sqrt(D), as in attention", of=DOT, killed_by="KD-T3")
def scaled_dot_product(keys):
    return keydiff_variants.dot_product_score(keys) / math.sqrt(keys.shape[-1])


@scorer("the cosine, so that the length of a key plays no part", of=DOT, killed_by="KD-T3")
def cosine_for_the_dot_product(keys):
    return keydiff_variants.raw_mean_score(keys)


@scorer("the distance to the mean of the unit keys", of=EUCLID, killed_by="KD-T3")
def distance_to_the_mean_direction(keys):
    return np.linalg.norm(keys - unit(keys).mean(axis=-2, keepdims=True), axis=-1)


@scorer("the squared distance", of=EUCLID, killed_by="KD-T3")
def squared_distance(keys):
    return keydiff_variants.euclidean_score(keys) ** 2


@scorer("minus the distance: what is near the mean kept", of=EUCLID, killed_by="KD-T3")
def nearest_kept(keys):
    return -keydiff_variants.euclidean_score(keys)


@scorer("the distance to the origin", of=EUCLID, killed_by="KD-T3")
def distance_to_the_origin(keys):
    return np.linalg.norm(keys, axis=-1)


def kept_with_recent(keys, budget, recent_ratio, count, scores=None):
    """The variant of KD-T11 with a number of recent tokens, or scores, of one's own."""
    keydiff_variants.select_with_recent(keys, budget=budget, recent_ratio=recent_ratio)
    length = keys.shape[-2]
    latest = np.broadcast_to(np.arange(length) >= length - count, keys.shape[:-1])
    return top_k(score(keys) if scores is None else scores, min(budget, length), latest)


@mutant(RECENT, killed_by="KD-T11", misconception="the share taken of the cache instead of the budget")
def share_of_the_cache(keys, *, budget, recent_ratio):
    count = math.floor(recent_ratio * keys.shape[-2])
    return kept_with_recent(keys, budget, recent_ratio, min(count, budget))


@mutant(RECENT, killed_by="KD-T11", misconception="int(share * N) in binary floating point instead of the exact floor")
def float_share(keys, *, budget, recent_ratio):
    return kept_with_recent(keys, budget, recent_ratio, int(float(recent_ratio) * min(budget, keys.shape[-2])))


@mutant(RECENT, killed_by="KD-T11", misconception="the recent tokens kept on top of the budget")
def recent_on_top(keys, *, budget, recent_ratio):
    kept = keydiff_variants.select_with_recent(keys, budget=budget, recent_ratio=recent_ratio)
    return kept | top_k(score(keys), min(budget, keys.shape[-2]))


@mutant(RECENT, killed_by="KD-T11", misconception="the first tokens kept as recent ones")
def oldest_for_recent(keys, *, budget, recent_ratio):
    return keydiff_variants.select_with_recent(keys[..., ::-1, :], budget=budget, recent_ratio=recent_ratio)[..., ::-1]


@mutant(RECENT, killed_by="KD-T11", misconception="the recent tokens left out of the anchor of the others")
def anchor_of_the_older(keys, *, budget, recent_ratio):
    size = min(budget, keys.shape[-2])
    count = math.floor(Fraction(repr(float(recent_ratio))) * size)
    older = keys[..., : max(1, keys.shape[-2] - count), :]
    return kept_with_recent(keys, budget, recent_ratio, count, -keydiff.cosine(keys, keydiff.anchor(older)))


@mutant(RECENT, killed_by="KD-T11", misconception="shares outside [0, 1] and budgets below 1 clipped in silence")
def clipped_share(keys, *, budget, recent_ratio):
    return keydiff_variants.select_with_recent(keys, budget=max(1, budget), recent_ratio=min(1, max(0, recent_ratio)))


def steps(keys, quotient):
    """The steps of appendix A.2.1 up to the last quotient of dots [..., T], norms [..., T] and the anchor's length [..., 1]."""
    keydiff_theory.score_step_by_step(keys)
    norms = np.sqrt((keys * keys).sum(axis=-1))
    mu = (keys / norms[..., None]).mean(axis=-2)
    return -quotient((keys @ mu[..., None])[..., 0], norms, np.sqrt((mu * mu).sum(axis=-1, keepdims=True)))


@mutant(STEPS, killed_by="KD-A1", misconception="epsilon added to the denominator instead of bounding it from below")
def epsilon_added(keys, *, epsilon=1e-8):
    return steps(keys, lambda dots, norms, length: dots / (norms * length + epsilon))


@mutant(STEPS, killed_by="KD-A1", misconception="the dot products divided by the norms of the keys alone")
def anchor_length_forgotten(keys, *, epsilon=1e-8):
    return steps(keys, lambda dots, norms, length: dots / np.maximum(norms, epsilon))


@mutant(STEPS, killed_by="KD-A1", misconception="the dot products of the raw keys divided by the anchor's length alone")
def key_norm_forgotten(keys, *, epsilon=1e-8):
    return steps(keys, lambda dots, norms, length: dots / np.maximum(length, epsilon))


@mutant(
    "keydiff_theory.operation_count",
    killed_by="KD-A1",
    misconception="the paper's printed list, d products of the anchor with 1/n short",
)
def printed_operations(length, head_dim):
    return keydiff_theory.operation_count(length, head_dim)._replace(multiplications=length * (3 * head_dim + 1) + head_dim)


@mutant(
    "keydiff_theory.operation_count", killed_by="KD-A1", misconception="a sum of n terms counted as n additions instead of n - 1"
)
def sums_of_n_additions(length, head_dim):
    return keydiff_theory.operation_count(length, head_dim)._replace(additions=3 * length * head_dim + length)


@mutant("keydiff_theory.flops", killed_by="KD-A1", misconception="every operation weighed as one")
def unweighted_operations(count, *, division=5, square_root=8):
    return sum(Operations(*count))


@mutant("keydiff_theory.alignment_bound", killed_by="KD-C1", misconception="the logarithm of the weight instead of its odds")
def weight_for_odds(count, weight, largest_norm):
    keydiff_theory.alignment_bound(count, weight, largest_norm)
    return (math.log(count) + math.log(weight)) / largest_norm - 1


@mutant("keydiff_theory.alignment_bound", killed_by="KD-C1", misconception="logarithms in base 2")
def base_two(count, weight, largest_norm):
    return (keydiff_theory.alignment_bound(count, weight, largest_norm) + 1) / math.log(2) - 1


@mutant(
    "keydiff_theory.alignment_bound",
    killed_by="KD-C1",
    misconception="the bound a - M on the logit returned for that on the cosine",
)
def logit_bound(count, weight, largest_norm):
    return keydiff_theory.alignment_bound(count, weight, largest_norm) * largest_norm


@mutant(
    "keydiff_theory.alignment_bound",
    killed_by="KD-C1",
    misconception="weights of 0 and 1, no keys and norms of 0 moved into their range",
)
def arguments_moved_into_range(count, weight, largest_norm):
    return keydiff_theory.alignment_bound(max(1, count), min(1 - 1e-9, max(1e-9, weight)), max(largest_norm, 1e-9))


@mutant("keydiff_theory.squared_cosines", killed_by="KD-C2", misconception="the cosines not squared")
def cosines_not_squared(vector, basis):
    return keydiff.cosine(basis, vector)


@mutant("keydiff_theory.squared_cosines", killed_by="KD-C2", misconception="the columns of the basis taken for its vectors")
def columns_for_rows(vector, basis):
    return keydiff_theory.squared_cosines(vector, np.swapaxes(basis, -1, -2))


@mutant("keydiff_theory.squared_cosines", killed_by="KD-C2", misconception="squared coordinates, the vector's norm not divided out")
def squared_coordinates(vector, basis):
    return (basis @ vector[..., None])[..., 0] ** 2


@mutant("keydiff_theory.anchor_cosine_bound", killed_by="KD-C3", misconception="the factor 1/2 dropped")
def half_dropped(key_query, anchor_query):
    return 2 * keydiff_theory.anchor_cosine_bound(key_query, anchor_query) - 1


@mutant(
    "keydiff_theory.anchor_cosine_bound", killed_by="KD-C3", misconception="the sum of the two cosines instead of their difference"
)
def sum_for_difference(key_query, anchor_query):
    return keydiff_theory.anchor_cosine_bound(key_query, -anchor_query)


@mutant("keydiff_theory.anchor_cosine_bound", killed_by="KD-C3", misconception="numbers that are no cosines clipped in silence")
def clipped_cosines(key_query, anchor_query):
    return keydiff_theory.anchor_cosine_bound(np.clip(key_query, -1, 1), np.clip(anchor_query, -1, 1))
