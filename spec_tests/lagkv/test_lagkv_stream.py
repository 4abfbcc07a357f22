"""Laws of LagKV: attention as section 2.1 has it (LK-1 to LK-6), the recursion (LK-R) and the variants
(LK-14 to LK-16).
"""

from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.lagkv.helpers import (
    RETAINED,
    SCORE,
    asked,
    by_oracle,
    caches,
    check_partitions,
    hundredths,
    lags,
    sinks,
    states_at,
)
from evictionary.spec_tests.shared.helpers import holds_tokens

PROJECT, WEIGHTS, OUTPUT = (
    f"lagkv_theory.{name}" for name in ("project", "attention_weights", "attention_output")
)
APPEND, STEP = "lagkv.append", "lagkv.step"
LOCAL_SCORE, LOCAL_SELECT, NORM_SELECT = (
    "lagkv_variants.local_score",
    "lagkv_variants.local_select",
    "lagkv_variants.norm_select",
)


def streamed(impl, case, percent, sink, lag, seed):
    """The mask that the stream keeps after each step, its state, and the number of tokens it has taken:
    chunks of any length.
    """
    generator = np.random.default_rng(seed)
    # long chunks, short ones, single tokens
    cut = generator.random(max(0, case.length - 1)) < generator.choice([0.05, 0.3, 1.0])
    cuts = [*(np.flatnonzero(cut) + 1).tolist(), case.length]
    return states_at(impl, case.keys, case.values, cuts, **asked(percent, sink, lag))


@law("LK-1", of=PROJECT, case=seeded_cases(max_length=17), width=st.integers(1, 5), seed=seeds())
def test_each_head_projects_with_its_own_matrices(impl, case, width, seed):
    """Q, K and V are the states times W_Q, W_K and W_V, row by row."""
    generator, states = np.random.default_rng(seed), impl.round(case.keys)
    weights = [impl.round(generator.normal(size=(case.head_dim, width))) for _ in range(3)]
    for pick, matrix in enumerate(weights):
        by_hand, size = (states[..., None] * matrix).sum(axis=-2), np.abs(states).max() * np.abs(matrix).sum()
        agrees(impl, PROJECT, states, *weights, pick=pick, by_hand=by_hand, size=size, what="QKV"[pick])


@law("LK-2", of=OUTPUT, case=seeded_cases(max_length=17), seed=seeds())
def test_heads_stand_side_by_side(impl, case, seed):
    """Concat(A_i V_i) W_O is the sum over the heads of A_i V_i times that head's rows of W_O."""
    generator, values = np.random.default_rng(seed), impl.round(case.values)
    batch, num_heads, length, width = values.shape
    weights = impl.round(generator.dirichlet(np.ones(length), size=(batch, num_heads, 2)))
    output_weight = impl.round(generator.normal(size=(num_heads * width, 3)))
    by_head = sum(
        weights[:, i] @ values[:, i] @ output_weight[i * width : (i + 1) * width] for i in range(num_heads)
    )
    size = np.abs(values).max() * np.abs(output_weight).sum()
    agrees(impl, OUTPUT, weights, values, output_weight, by_hand=by_head, size=size)


@law("LK-3", of=WEIGHTS, case=seeded_cases(max_length=17))
def test_attention_weights_are_a_causal_softmax(impl, case):
    """Row t is the softmax of q_t . k_j / sqrt(d_h) over j <= t, and zero after t."""
    queries, keys = impl.round(case.next_keys), impl.round(case.keys)
    size = np.abs(queries).max() * np.abs(keys).max()
    got = agrees(impl, WEIGHTS, queries, keys, by_hand=causal_weights, size=size)
    equal(got[..., ~np.tri(case.length, dtype=bool)], 0, "a token attends to one after it")


@law("LK-4", of=PROJECT, case=seeded_cases(max_length=17), seed=seeds())
def test_a_new_token_projects_as_in_the_prompt(impl, case, seed):
    """The q, k and v of the newest token are the last rows
    of Q, K and V: a projection sees one token at a time.
    """
    generator = np.random.default_rng(seed)
    weights = [impl.round(generator.normal(size=(case.head_dim, 3))) for _ in range(3)]
    alone = impl.lagkv_theory.project(case.keys[:, :, -1:], *weights)
    for pick, got in enumerate(alone):
        row = np.broadcast_to(got, (*got.shape[:2], 1, 3))
        same(impl, PROJECT, case.keys, *weights, pick=pick, got=row, becomes=lambda rows: rows[:, :, -1:])


@law("LK-5", of=APPEND, case=cases())
def test_new_tokens_come_after_the_cached_ones(impl, case):
    """Cat[K : k] holds the cached tokens first, each unchanged; an empty cache is allowed."""
    for cached in (case.keys, case.keys[:, :, :0]):
        got = impl.lagkv.append(cached, case.next_keys)
        wanted = impl.round(np.concatenate([cached, case.next_keys], axis=2))
        equal(got, wanted, "the new tokens do not follow the cached ones unchanged")


@law("LK-6", of=WEIGHTS, case=seeded_cases(max_length=17), seed=seeds())
def test_the_newest_queries_attend_to_themselves_too(impl, case, seed):
    """The weights of the newest queries over the cache, themselves included, query by query."""
    new = int(np.random.default_rng(seed).integers(1, case.length + 1))
    queries, size = case.next_keys[:, :, -new:], 1 + np.abs(case.keys).max()
    agrees(impl, WEIGHTS, queries, case.keys, by_hand=causal_weights, size=size)


@law("LK-6", of=(WEIGHTS, APPEND), case=seeded_cases(min_length=2, max_length=17), seed=seeds())
def test_cached_decoding_is_uncached_attention(impl, case, seed):
    """The newest queries over the cache, themselves included,
    have the weights that they have in the whole matrix.
    """
    new = int(np.random.default_rng(seed).integers(1, case.length))
    cached = impl.lagkv.append(case.keys[:, :, :-new], case.keys[:, :, -new:])
    got = impl.lagkv_theory.attention_weights(case.next_keys[:, :, -new:], cached)
    same(impl, WEIGHTS, case.next_keys, case.keys, got=got, becomes=lambda weights: weights[:, :, -new:])


@law("LK-R", of=STEP, case=caches, percent=hundredths, sink=sinks, lag=lags, seed=seeds())
def test_any_chunking_keeps_what_one_shot_keeps(impl, case, percent, sink, lag, seed):
    """However the tokens come, each partition keeps its best
    floor(rL) tokens, judged against the whole next partition.
    """
    *_, (kept, end, _) = streamed(impl, case, percent, sink, lag, seed)
    ascending = (np.diff(end.positions, axis=-1) > 0).all()
    require(ascending, "the positions of a head are not distinct and ascending", None, end.positions)
    check_partitions(kept, case.keys, case.values, percent, sink, lag, by_oracle(impl))


@law("LK-R", of=STEP, case=caches, percent=hundredths, sink=sinks, lag=lags, seed=seeds())
def test_rows_of_the_stream_are_tokens_of_the_sequence(impl, case, percent, sink, lag, seed):
    """Row n holds the key and the value of the token at
    position n of that head, unchanged, after every step.
    """
    for _, state, _ in streamed(impl, case, percent, sink, lag, seed):
        holds_tokens(state, impl.round(case.keys), impl.round(case.values))


@law("LK-R", of=(STEP, RETAINED), case=caches, percent=hundredths, sink=sinks, lag=lags, seed=seeds())
def test_an_evicted_token_never_returns(impl, case, percent, sink, lag, seed):
    """After each step the cache is what it was, less some
    tokens, with the new ones; its length is that of LK-12.
    """
    place, before, seen = np.arange(case.length), np.zeros(case.keys.shape[:3], dtype=bool), 0
    for kept, state, stop in streamed(impl, case, percent, sink, lag, seed):
        new = (place >= seen) & (place < stop)
        require(
            not (kept & ~before & ~new).any(),
            "a token returned, or one that has not come is kept",
            before,
            kept,
        )
        equal(int(state.seen), stop, "the stream has counted other tokens")
        length = impl.lagkv.retained_length(stop, **asked(percent, sink, lag))
        equal(kept.sum(axis=-1), length, f"after {stop} tokens the cache is not retained_length({stop}) long")
        before, seen = kept, stop


@law("LK-R", of=STEP, case=caches, percent=hundredths, sink=sinks, lag=lags)
def test_the_chunks_of_the_paper_compress_one_partition_each(impl, case, percent, sink, lag):
    """S + 2L tokens and then L at a time: after each full chunk one partition more is static, and at most
    L + remainder are not.
    """
    cuts = sorted(
        {min(case.length, stop) for stop in range(sink + 2 * lag, case.length + lag, lag)} | {case.length}
    )
    states = states_at(impl, case.keys, case.values, cuts, **asked(percent, sink, lag))
    for number, (_, state, stop) in enumerate(states, start=1):
        if stop >= sink + 2 * lag and not (stop - sink) % lag:
            static = sink + number * (percent * lag // 100)
            equal(
                int(state.static_length),
                static,
                f"after {stop} tokens {number} partitions are not compressed",
            )
            equal(state.keys.shape[2], static + lag, f"after {stop} tokens the next partition is not whole")


@law("LK-R", of=STEP, case=caches, lag=lags)
def test_a_step_leaves_the_stream_that_it_was_given(impl, case, lag):
    """The step is pure: two continuations of one stream do not disturb each other."""
    settings = asked(50, 1, lag)
    start = impl.lagkv.step(None, case.keys, case.values, **settings)
    copies = start.keys.copy(), start.values.copy(), start.positions.copy()
    first = impl.lagkv.step(start, case.next_keys, case.next_values, **settings)
    impl.lagkv.step(start, -case.next_keys, case.next_values, **settings)
    again = impl.lagkv.step(start, case.next_keys, case.next_values, **settings)
    for got, wanted in zip((*start[:3], *first[:3]), (*copies, *again[:3]), strict=True):
        equal(got, wanted, "a step changed the stream that it was given")


@law("LK-14", of=LOCAL_SCORE, case=cases())
def test_local_score_is_the_score_against_itself(impl, case):
    """LocalKV takes minimum and maximum from the partition that it scores."""
    states = case.keys, case.values
    got = impl.lagkv_variants.local_score(*states)
    agrees(impl, SCORE, *states, *states, got=got, what="the local score")


@law("LK-15", of="lagkv.normalise", case=cases())
def test_locally_normalised_values_fill_the_unit_interval(impl, case):
    """Normalised by its own range, each channel that varies runs from 0 to 1."""
    keys = impl.round(case.keys)
    got = impl.lagkv.normalise(keys, keys)
    varies = (keys.max(axis=2) > keys.min(axis=2)).astype(float)
    # A quotient of equal numbers is exactly 1; a product with the reciprocal, as correct, is rounded once
    # more.
    near(got.min(axis=2), np.zeros_like(varies), within(impl, roundings=1), "the least of a channel")
    near(got.max(axis=2), varies, within(impl, roundings=1), "the largest of a channel")


@law("LK-14", of=LOCAL_SELECT, case=caches, percent=hundredths, sink=sinks, lag=lags)
def test_local_selection_keeps_the_best_of_each_partition(impl, case, percent, sink, lag):
    """LocalKV changes the score alone: sinks and window stay, the last partition is not compressed, though
    it could be scored.
    """
    kept = impl.lagkv_variants.local_select(case.keys, case.values, **asked(percent, sink, lag))
    check_partitions(kept, case.keys, case.values, percent, sink, lag, by_oracle(impl, LOCAL_SCORE, takes=2))


@law("LK-15", of=LOCAL_SCORE)
def test_the_local_range_is_not_the_next_one(impl):
    """A token at the edge of its own partition but in the
    middle of the next one scores differently in the two.
    """
    keys, following = np.array([[[[0.0, 0], [1, 0], [0, 1]]]]), np.array([[[[0.0, 0], [8, 1], [4, 0]]]])
    local, lagged = agrees(impl, LOCAL_SCORE, keys, keys), oracle(SCORE)(keys, keys, following, following)
    require(
        np.abs(local - lagged).max() >= 1e-3,
        "the local score is that against the next partition",
        lagged,
        local,
    )


@law("LK-16", of=NORM_SELECT, case=caches, percent=hundredths, sink=sinks, lag=lags)
def test_norm_selection_keeps_the_smallest_keys(impl, case, percent, sink, lag):
    """From the third layer on each partition keeps its
    floor(rL) keys of smallest norm; the values play no part.
    """
    settings = {"layer": 2} | asked(percent, sink, lag)
    kept = impl.lagkv_variants.norm_select(case.keys, case.values, **settings)
    scored = by_oracle(impl, "knorm.score", takes=1)
    check_partitions(kept, case.keys, case.values, percent, sink, lag, scored)
    others = impl.lagkv_variants.norm_select(case.keys, -3 * case.values[:, :, ::-1], **settings)
    equal(others, kept, "other values changed what is kept")


@law("LK-16", of=NORM_SELECT, case=caches, layer=st.integers(0, 4), skipped=st.integers(0, 4))
def test_the_first_layers_keep_everything(impl, case, layer, skipped):
    """Layers 0 and 1 are left whole, or as many as
    skipped_layers says; the layer after them is compressed.
    """
    for given, first in (({}, 2), ({"skipped_layers": skipped}, skipped)):
        settings = {"layer": layer, "keep_ratio": 0, "sink_size": 0, "lag_size": 2} | given
        kept = impl.lagkv_variants.norm_select(case.keys, case.values, **settings)
        equal(kept.all(), layer < first or case.length < 4, f"layer {layer} with the first {first} skipped")
