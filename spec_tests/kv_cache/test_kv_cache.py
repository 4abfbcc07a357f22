"""Laws of a KV cache: attention, grouped heads, positions, prefill, decode, memory, a window with sinks
(KVC-1 to KVC-8).
"""

import functools

from evictionary.reference.kv_cache import KVCache
from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.kv_cache.helpers import (
    BOUNDS,
    CASES,
    attend_by_hand,
    check_held,
    check_turned,
    cut,
    decoded,
    prefilled_by_hand,
    seen_by,
    size_of,
    text_of,
    turned_by,
    turned_by_hand,
    weights_by_hand,
)

WEIGHTS, ATTEND, ROTATE = "kv_cache.weights", "kv_cache.attend", "kv_cache.rotate"
PREFILL, DECODE, BYTES = "kv_cache.prefill", "kv_cache.decode", "kv_cache.cache_bytes"


# Attention


def last_queries(impl, case, seed):
    """Queries of the last token, of half of the tokens and of all, with the keys of their heads."""
    queries, keys, _ = text_of(impl, case, seed)
    keys = for_each_reader(keys, queries)
    return [(queries[..., -count:, :], keys) for count in (1, (case.length + 1) // 2, case.length)]


@law("KVC-1", of=WEIGHTS, case=CASES, seed=seeds())
def test_the_weights_are_a_softmax_over_the_tokens_so_far(impl, case, seed):
    """Each of the last queries has a softmax of q . k / sqrt(D) over the tokens up to its own."""
    for queries, keys in last_queries(impl, case, seed):
        size = 1 + np.abs(keys).max() * np.abs(queries).max()
        agrees(impl, WEIGHTS, queries, keys, by_hand=weights_by_hand, size=size, what="the weights")


@law("KVC-1", of=WEIGHTS, case=CASES, seed=seeds())
def test_the_weights_of_a_query_sum_to_one(impl, case, seed):
    """No weight is negative, and those of each query sum to 1."""
    for queries, keys in last_queries(impl, case, seed):
        got = impl.kv_cache.weights(queries, keys)
        totals(got, 1, impl.allowance(WEIGHTS, queries, keys), "the weights of a query")


@law("KVC-1", of=WEIGHTS, case=CASES, seed=seeds())
def test_what_comes_later_changes_no_weight(impl, case, seed):
    """A text that is cut off has the weights that its tokens have in the whole text."""
    queries, keys = last_queries(impl, case, seed)[-1]
    stop = (case.length + 1) // 2
    got = impl.kv_cache.weights(queries[..., :stop, :], keys[..., :stop, :])
    what = "the weights of a text that is cut off"
    same(impl, WEIGHTS, queries, keys, got=got, becomes=lambda own: own[..., :stop, :stop], what=what)


@law("KVC-1", of=WEIGHTS)
def test_large_logits_stay_finite(impl):
    """Logits of about 1e4: the largest takes all of the weight, and nothing overflows."""
    channels = width(impl, 4)
    keys = np.eye(channels)[None, None, [0, 1, 0]] * np.array([1.0, 1.0, -1.0])[:, None]
    queries = np.eye(channels)[None, None, [0]] * largest_product(impl, channels)
    near(impl.kv_cache.weights(queries, keys), np.array([[[[1.0, 0, 0]]]]), 0.0, "the weights")


# A window and sinks


@law("KVC-2", of=WEIGHTS, case=CASES, seed=seeds())
def test_a_window_and_sinks_are_a_masked_softmax(impl, case, seed):
    """Each query sees the last tokens of its window, its own among them, and the first tokens of the text."""
    for queries, keys in last_queries(impl, case, seed):
        for window, sinks in BOUNDS:
            agrees(
                impl,
                WEIGHTS,
                queries,
                keys,
                window=window,
                sinks=sinks,
                by_hand=weights_by_hand(queries, keys, window, sinks),
                size=1 + np.abs(keys).max() * np.abs(queries).max(),
                what=f"the weights with a window of {window} and {sinks} sinks",
            )


@law("KVC-2", of=WEIGHTS)
def test_each_token_counts_what_it_sees(impl):
    """Nine zero keys: a query gives the same weight to each token that it sees, and 0 to all others."""
    zeros = np.zeros((1, 1, 9, width(impl)))
    for window, sinks in BOUNDS:
        expected = np.zeros((9, 9))
        for own in range(9):
            seen = seen_by(own, window, sinks)
            expected[own, seen] = 1 / len(seen)
        got = impl.kv_cache.weights(zeros, zeros, window=window, sinks=sinks)
        what = f"the weights with a window of {window} and {sinks} sinks"
        rounds_to(impl, got, expected[None, None], what, terms=9)


@law("KVC-2", of=WEIGHTS, case=CASES, seed=seeds())
def test_a_window_over_the_whole_text_changes_nothing(impl, case, seed):
    """A window as long as the text gives what no window gives, whatever the sinks are."""
    for queries, keys in last_queries(impl, case, seed):
        got = impl.kv_cache.weights(queries, keys, window=case.length, sinks=1)
        same(impl, WEIGHTS, queries, keys, got=got, what="the weights with a window over the whole text")


# Grouped heads


def check_shows_the_weights(impl, queries, keys, what, **bounds):
    """Raise Violation unless values that tell the tokens apart show the implementation's own weights."""
    length = keys.shape[2]
    told_apart = np.broadcast_to(np.eye(length), (*keys.shape[:2], length, length)).copy()
    got = impl.kv_cache.attend(queries, keys, told_apart, **bounds)
    same(impl, WEIGHTS, queries, for_each_reader(keys, queries), **bounds, got=got, what=what)


@law("KVC-3", of=ATTEND, case=CASES, seed=seeds())
def test_the_output_is_the_weighted_sum_of_the_values(impl, case, seed):
    """Query head h weighs the values of KV head h // G, head by head."""
    queries, keys, values = text_of(impl, case, seed)
    size = size_of(queries, keys, values)
    for count in (1, case.length):
        last = queries[:, :, -count:]
        agrees(impl, ATTEND, last, keys, values, by_hand=attend_by_hand, size=size, what="the output")


@law("KVC-3", of=ATTEND, case=CASES, seed=seeds())
def test_grouped_heads_are_repeated_kv_heads(impl, case, seed):
    """Keys and values stored once for each query head, a copy beside the other, give the same output."""
    queries, keys, values = text_of(impl, case, seed)
    repeated = (for_each_reader(each, queries) for each in (keys, values))
    got = impl.kv_cache.attend(queries, *repeated)
    same(impl, ATTEND, queries, keys, values, got=got, what="the output with repeated KV heads")


@law("KVC-3", of=(WEIGHTS, ATTEND), case=CASES, seed=seeds())
def test_a_value_of_its_own_for_each_token_shows_the_weights(impl, case, seed):
    """Where value t is 1 in channel t and 0 elsewhere, the output of a head is its row of weights."""
    queries, keys, _ = text_of(impl, case, seed)
    check_shows_the_weights(impl, queries, keys, "the output")


@law("KVC-2", of=(WEIGHTS, ATTEND), case=CASES, seed=seeds())
def test_the_output_sees_the_window_and_the_sinks(impl, case, seed):
    """With one KV head, its readers weigh the values by the weights of the same window and sinks."""
    queries, keys, _ = text_of(impl, case, seed)
    for window, sinks in BOUNDS[1:]:
        bounds: dict[str, Any] = {"window": window, "sinks": sinks}
        what = f"the output with a window of {window} and {sinks} sinks"
        check_shows_the_weights(impl, queries[:, : case.group], keys[:, :1], what, **bounds)


@law("KVC-3", of=ATTEND, case=CASES)
def test_each_query_head_gives_what_its_kv_head_holds(impl, case):
    """Where all values of a KV head are one number, its G query heads give this number, and no other do."""
    heads = case.num_kv_heads
    values = np.broadcast_to(np.arange(heads)[:, None, None], (case.batch, heads, case.length, 1)) + 1.0
    got = impl.kv_cache.attend(case.queries, case.keys, values.copy())
    expected = for_each_reader(values[:, :, -1:], case.queries)
    rounds_to(impl, got, expected, "the output", terms=case.length, size=float(heads))


# Positions


@law("KVC-4", of=ROTATE, case=CASES)
def test_pairs_of_channels_turn_by_their_position(impl, case):
    """Channels i and i + D/2 turn as one point, by the angle position * 10000^(-2i/D)."""
    keys = impl.round(case.keys)
    for first in (0, 1, 1000):
        positions = np.arange(first, first + case.length)
        expected = turned_by_hand(keys, positions)
        check_turned(impl, impl.kv_cache.rotate(keys, positions), expected, positions)


@law("KVC-4", of=ROTATE, case=CASES, seed=seeds())
def test_a_product_depends_on_the_distance_only(impl, case, seed):
    """Query and key moved by the same number of positions have the product that they had."""
    queries, keys = impl.rounded((case.next_keys, case.keys))
    apart = np.random.default_rng(seed).integers(0, 50, size=case.length)

    def products(shift):
        here, there = np.arange(case.length) + shift, apart + shift
        return (impl.kv_cache.rotate(queries, here) * impl.kv_cache.rotate(keys, there)).sum(axis=-1)

    size = lengths(queries) * lengths(keys)
    for shift in (1, 500):
        what, angle = f"q . k, both moved by {shift},", 2 * (case.length + shift + 50)
        rounds_to(impl, products(shift), products(0), what, terms=case.head_dim, size=size, angle=angle)


# Prefill


@law("KVC-5", of=PREFILL, case=CASES, seed=seeds())
def test_prefill_attends_between_turned_tokens(impl, case, seed):
    """Queries and keys turn to their positions, values do not; then each token attends to those so far."""
    states = text_of(impl, case, seed)
    by_hand, size = prefilled_by_hand(*states), 10 * size_of(*states)
    agrees(impl, PREFILL, *states, pick=0, by_hand=by_hand, size=size, what="the output")


def check_is_attend(impl, states, **bounds):
    """Raise Violation unless prefill gives what the implementation's own attend gives of turned states."""
    places = np.arange(states[0].shape[2])
    turned = [impl.round(impl.kv_cache.rotate(each, places)) for each in states[:2]]
    got, more = (
        impl.kv_cache.prefill(*states, **bounds)[0],
        impl.allowance(PREFILL, *states, pick=0, **bounds),
    )
    same(impl, ATTEND, *turned, states[2], **bounds, got=got, more=more, what="the output of prefill")


@law("KVC-5", of=(ROTATE, ATTEND, PREFILL), case=CASES, seed=seeds())
def test_prefill_is_attend_between_turned_tokens(impl, case, seed):
    """Turn queries and keys by rotate, leave the values, and attend: this is the output of prefill."""
    check_is_attend(impl, text_of(impl, case, seed))


@law("KVC-7", of=(ROTATE, ATTEND, PREFILL), case=CASES, seed=seeds())
def test_prefill_hands_its_window_to_attend(impl, case, seed):
    """With a window and sinks, the output of prefill is that of attend with the same window and sinks."""
    for window, sinks in BOUNDS[1:]:
        check_is_attend(impl, text_of(impl, case, seed), window=window, sinks=sinks)


@law("KVC-5", of=PREFILL, case=CASES, seed=seeds())
def test_prefill_leaves_a_cache_of_the_whole_text(impl, case, seed):
    """The cache holds each key, turned once to its position, each value as it was, and their number."""
    states, tokens = text_of(impl, case, seed), list(range(case.length))
    turned = turned_by(impl, states[1], tokens)
    check_held(impl, impl.kv_cache.prefill(*states)[1], turned, states[2], tokens)


@law("KVC-5", of=PREFILL, case=CASES, seed=seeds())
def test_a_text_that_is_cut_off_has_the_same_outputs(impl, case, seed):
    """No token sees a later one: the outputs of a text that is cut off are those of the whole text."""
    states, stop = text_of(impl, case, seed), (case.length + 1) // 2
    got = impl.kv_cache.prefill(*cut(states, 0, stop))[0]
    what = "the output of a text that is cut off"
    same(impl, PREFILL, *states, pick=0, got=got, becomes=lambda own: own[:, :, :stop], what=what)


# Decode


def cache_of(impl, case, later):
    """A cache of the tokens of a case, which are the last ones of a longer text: some are forgotten."""
    positions = range(later, later + case.length)
    keys, values = impl.rounded((turned_by_hand(case.keys, positions), case.values))
    return KVCache(keys, values, later + case.length)


def next_token(impl, case):
    """The query, the key and the value of a token that the cache does not have."""
    return impl.rounded((case.queries[:, :, 0], case.next_keys[:, :, 0], case.next_values[:, :, 0]))


def outputs_from(start, outputs):
    return outputs[:, :, start:]


@law("KVC-6", of=(PREFILL, DECODE), case=CASES, seed=seeds())
def test_decoding_gives_what_reading_at_once_gives(impl, case, seed):
    """A text read up to some token and then decoded token by token has the outputs of prefill alone."""
    states = text_of(impl, case, seed)
    for start in sorted({1, (case.length + 1) // 2}):
        got, _ = decoded(impl, states, start)
        what = f"the output decoded from token {start} on"
        later = functools.partial(outputs_from, start)
        same(impl, PREFILL, *states, pick=0, got=got, becomes=later, what=what)


LATER = (0, 7, 500)
"""How many tokens a cache has lost before those that it holds."""


@law("KVC-6", of=DECODE, case=CASES)
def test_a_new_token_attends_to_the_cache_and_to_itself(impl, case):
    """It turns to the position after all tokens that were seen, also where the cache has lost some."""
    token = next_token(impl, case)
    for cache in (cache_of(impl, case, later) for later in LATER):
        query, key = (turned_by_hand(each[:, :, None], [cache.seen]) for each in token[:2])
        keys = np.concatenate([cache.keys, key], axis=2)
        values = np.concatenate([cache.values, token[2][:, :, None]], axis=2)
        by_hand, size = attend_by_hand(query, keys, values)[:, :, 0], 1000 * size_of(query, keys, values)
        what = "the output of the new token"
        agrees(impl, DECODE, *token, cache, pick=0, by_hand=by_hand, size=size, what=what)


@law("KVC-6", of=DECODE, case=CASES)
def test_the_cache_grows_by_the_new_token_alone(impl, case):
    """Earlier keys and values stay bit for bit; the new key is turned once; one more token is seen."""
    token = next_token(impl, case)
    for cache in (cache_of(impl, case, later) for later in LATER):
        turned = turned_by(impl, token[1][:, :, None], [cache.seen])
        keys, values, seen = impl.kv_cache.decode(*token, cache)[1]
        equal(seen, cache.seen + 1, f"the cache has seen {seen} tokens, wanted {cache.seen + 1}")
        equal(keys[:, :, :-1], cache.keys, "the keys of earlier tokens are others than before")
        equal(values[:, :, :-1], cache.values, "the values of earlier tokens are others than before")
        equal(values[:, :, -1], token[2], "the last value is not that of the new token")
        check_turned(impl, keys[:, :, -1:], turned, [cache.seen])


# A bounded cache


@law("KVC-7", of=(PREFILL, DECODE), case=CASES, seed=seeds())
def test_decoding_in_a_window_gives_what_the_mask_gives(impl, case, seed):
    """With a bounded cache each token has the output that prefill gives it with the same window and sinks."""
    states = text_of(impl, case, seed)
    for window, sinks in BOUNDS[1:]:
        bounds: dict[str, Any] = {"window": window, "sinks": sinks}
        got, _ = decoded(impl, states, 1, **bounds)
        what = f"the output decoded in a window of {window} with {sinks} sinks"
        later = functools.partial(outputs_from, 1)
        same(impl, PREFILL, *states, **bounds, pick=0, got=got, becomes=later, what=what)


@law("KVC-7", of=(PREFILL, DECODE), case=CASES, seed=seeds())
def test_a_bounded_cache_holds_the_first_and_the_last_tokens(impl, case, seed):
    """After prefill, and after decoding, it holds the sinks and the window, at their positions."""
    states = text_of(impl, case, seed)
    turned = turned_by(impl, states[1], range(case.length))
    for window, sinks in BOUNDS[1:]:
        bounds: dict[str, Any] = {"window": window, "sinks": sinks}
        held = seen_by(case.length - 1, window, sinks)
        check_held(impl, impl.kv_cache.prefill(*states, **bounds)[1], turned, states[2], held)
        check_held(impl, decoded(impl, states, 1, **bounds)[1], turned, states[2], held)


@law("KVC-7", of=PREFILL, case=CASES, seed=seeds())
def test_prefill_sees_a_window_and_sinks(impl, case, seed):
    """With a window and sinks, the output is that of the tokens that each token sees."""
    states = text_of(impl, case, seed)
    for window, sinks in BOUNDS[1:]:
        bounds: dict[str, Any] = {"window": window, "sinks": sinks}
        by_hand, size = prefilled_by_hand(*states, **bounds), 10 * size_of(*states)
        what = f"the output with a window of {window} and {sinks} sinks"
        agrees(impl, PREFILL, *states, **bounds, pick=0, by_hand=by_hand, size=size, what=what)


# Memory


SHAPES: dict[str, Any] = {
    "num_layers": st.sampled_from([3, 1, 32]),
    "num_kv_heads": st.sampled_from([5, 1, 8]),
    "group": st.sampled_from([4, 1, 7]),
    "head_dim": st.sampled_from([64, 2, 128]),
    "dtype": st.sampled_from(["float32", "float16", "int8"]),
}


def config(num_layers, num_kv_heads, group, head_dim, dtype):
    """The arguments of `cache_bytes` for such a model."""
    return {
        "num_layers": num_layers,
        "num_query_heads": group * num_kv_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "bytes_per_number": np.dtype(dtype).itemsize,
    }


@law("KVC-8", of=BYTES, length=st.sampled_from([7, 1, 300]), **SHAPES)
def test_the_formula_gives_the_bytes_of_the_arrays(impl, length, **shape):
    """Keys and values of every layer, allocated as arrays, have so many bytes."""
    one = np.zeros((shape["num_kv_heads"], length, shape["head_dim"]), shape["dtype"]).nbytes
    got = impl.kv_cache.cache_bytes(length, **config(**shape))
    equal(got, shape["num_layers"] * (one + one), f"the formula gives {got} bytes, the arrays have others")


@law("KVC-8", of=BYTES)
def test_a_token_of_an_8b_model_takes_128_kib(impl):
    """Llama-3.1-8B: 32 layers, 32 query heads, 8 KV heads, head_dim 128, two bytes a number by default."""
    sizes = {"num_layers": 32, "num_query_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    for length in (1, 1000):
        got = impl.kv_cache.cache_bytes(length, **sizes)
        equal(got, length * 128 * 1024, f"{length} tokens take {got} bytes")


@law("KVC-8", of=BYTES, **SHAPES)
def test_a_window_bounds_the_bytes(impl, **shape):
    """A cache with a window holds its sinks and its window, and never more tokens than the text has."""
    one = impl.kv_cache.cache_bytes(1, **config(**shape))
    for (window, sinks), length in itertools.product(BOUNDS, (2, 5, 300)):
        got = impl.kv_cache.cache_bytes(length, **config(**shape), window=window, sinks=sinks)
        what = f"{length} tokens with a window of {window} and {sinks} sinks take {got} bytes"
        equal(got, len(seen_by(length - 1, window, sinks)) * one, f"{what}, where one token takes {one}")


@law("KVC-8", of=(BYTES, PREFILL), case=CASES, seed=seeds())
def test_the_formula_gives_the_bytes_of_a_bounded_cache(impl, case, seed):
    """The cache that prefill leaves has the bytes of the formula, with and without a window."""
    queries, keys, _ = text_of(impl, case, seed)
    for window, sinks in BOUNDS:
        bounds: dict[str, Any] = {"window": window, "sinks": sinks}
        _, (held, values, _) = impl.kv_cache.prefill(queries, keys, keys, **bounds)
        measured = (held.size + values.size) // case.batch * 2
        shape = config(1, case.num_kv_heads, case.group, case.head_dim, "float16")
        got = impl.kv_cache.cache_bytes(case.length, **shape, **bounds)
        equal(got, measured, f"with a window of {window} and {sinks} sinks the formula gives {got} bytes")
