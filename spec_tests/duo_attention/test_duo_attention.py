"""Laws of DuoAttention: DA-1 to DA-4."""

from evictionary.reference.rope import rotate
from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.shared.helpers import quarters, refuses

ESTIMATE, SELECT = "duo_attention.estimate_gates", "duo_attention.select"
GATED, LOSS = "duo_attention.gated_attention", "duo_attention.training_loss"
sizes = st.integers(0, 6)


def gates_of(case, seed):
    """A gate in quarters for each head, [B, H_kv]: the same in every dtype."""
    return np.random.default_rng(seed).integers(0, 5, size=case.keys.shape[:2]) / 4


def areas(impl, query, key, length):
    """The area under the cumulated attention of each KV head, place by place, and what it may be wrong by:
    logits of turned states, and a sum.
    """
    places, group = np.arange(length), query.shape[1] // key.shape[1]
    expected, slack = np.zeros(key.shape[:2]), np.full(key.shape[:2], rounding(impl, length))
    for item, reader in np.ndindex(query.shape[:2]):
        keys = rotate(np.repeat(key[item, reader // group][None], length, axis=0), places)
        last = rotate(query[item, reader][None], places[-1:])
        weights = causal_weights(last, keys)[0]
        turned = 2 * angle_error(impl, length) * lengths(last) * lengths(keys)
        wrong = softmax_slack(impl, weights, logit_errors(impl, last, keys)[0] + turned)
        expected[item, reader // group] += np.cumsum(weights).mean() / group
        slack[item, reader // group] += np.cumsum(wrong).mean() / group
    return expected, np.minimum(slack, 1)


@law(
    "DA-1",
    of=ESTIMATE,
    case=seeded_cases(head_dims=EVEN_DIMS, kinds=("normal", "drift", "ties")),
    length=st.sampled_from([1, 2, 7, 33]),
)
def test_the_estimate_is_the_area_under_the_cumulated_attention(impl, case, length):
    """Mean query and mean key turned to each place, the
    attention of the last one, added up place by place.
    """
    query, key = impl.round(case.queries[:, :, 0]), impl.round(case.keys[:, :, 0])
    got = impl.duo_attention.estimate_gates(query, key, length=length)
    expected, slack = areas(impl, query, key, length)
    near(got, expected, slack, "the gates")


@law("DA-1", of=ESTIMATE)
def test_a_head_that_looks_everywhere_has_a_gate_above_one_half(impl):
    """A zero query gives 1/500 to each place: the cumulated
    attention rises to 1, and its mean is 501/1000.
    """
    got = impl.duo_attention.estimate_gates(np.zeros((1, 2, 2)), np.ones((1, 1, 2)))
    rounds_to(impl, got, [[0.501]], "the gate", terms=500)


@law("DA-1", of=ESTIMATE)
def test_a_head_that_looks_at_its_own_place_has_a_gate_of_one_half(impl):
    """Mean query and mean key 16 e1: RoPE turns the first place away, so of two places the last has all
    attention. Cumulated it is 0, then 1.
    """
    state = 16 * np.eye(1, width(impl))[None]
    near(impl.duo_attention.estimate_gates(state, state, length=2), np.array([[0.5]]), 0.01, "the gate")


@law(
    "DA-2", of=SELECT, case=cases(), seed=seeds(), sink_size=sizes, recent_size=st.sampled_from([2, 0, 6, 1])
)
def test_retrieval_heads_keep_all_and_the_others_both_ends(impl, case, seed, sink_size, recent_size):
    """From the threshold on every token stays; below it the first and the last, and nothing between."""
    assume(sink_size + recent_size)
    gates, length = gates_of(case, seed), case.keys.shape[2]
    place = np.arange(length)
    # Without sinks, or without recent tokens, a slice of the last -0 is the whole row.
    for sinks, recent in ((sink_size, recent_size), (0, recent_size or 1), (sink_size or 1, 0)):
        kept = impl.duo_attention.select(case.keys, gates, sink_size=sinks, recent_size=recent)
        ends = (place < sinks) | (place >= length - recent)
        wanted = (gates[..., None] >= 0.5) | ends
        equal(kept, wanted, "a retrieval head does not keep all tokens, or another one not both ends")


@law("DA-2", of=SELECT, threshold=st.sampled_from([0.25, 0.5, 0.75]))
def test_a_gate_at_the_threshold_is_a_retrieval_head(impl, threshold):
    """Of the gates 1/4, 1/2 and 3/4 those from the threshold on keep five tokens, the others two."""
    gates = np.array([[0.25, 0.5, 0.75]])
    kept = impl.duo_attention.select(
        np.ones((1, 3, 5, width(impl))), gates, threshold=threshold, sink_size=1, recent_size=1
    )
    equal(kept.sum(axis=-1), np.where(gates >= threshold, 5, 2), "other heads keep everything")


@law("DA-2", of=SELECT)
def test_a_prompt_that_both_ends_cover_stays_whole(impl):
    """One to five tokens with two sinks and a window of three: a streaming head keeps all of them."""
    for length in range(1, 6):
        kept = impl.duo_attention.select(
            np.ones((1, 1, length, width(impl))), np.array([[0.25]]), sink_size=2, recent_size=3
        )
        equal(kept, np.ones((1, 1, length), dtype=bool), f"of {length} tokens some are lost")


@law("DA-2", of=SELECT)
def test_the_defaults_are_128_and_256_tokens(impl):
    """Of 500 tokens a streaming head keeps the first 128 and the last 256."""
    kept = impl.duo_attention.select(np.ones((1, 1, 500, width(impl, 1))), np.array([[0.25]]))
    equal(np.flatnonzero(kept), [*range(128), *range(244, 500)], "other tokens are kept")


@law("DA-2", of=SELECT, kind="refusal")
def test_no_token_at_all_is_refused(impl):
    """Two sizes of 0, by which a streaming head would keep nothing, raise ValueError."""
    refuses(impl, SELECT, "recent_size", 0, sink_size=0)


@law("DA-2", of=SELECT, kind="refusal", shape=st.sampled_from([(1, 3), (2, 2), (2,), (1, 2, 1)]))
def test_gates_of_another_model_are_refused(impl, shape):
    """Gates of other heads or rows, or with other axes, raise ValueError."""
    refused(impl, "gates", SELECT, np.ones((1, 2, 3, 4)), np.ones(shape))


@law(
    "DA-2",
    of=SELECT,
    examples=2,
    case=long_cases(kinds=("normal",), lengths=(70_001, 40_960), head_dims=(64,)),
)
def test_a_streaming_head_forgets_the_middle_of_a_long_prompt(impl, case):
    """Of tens of thousands of tokens 384 stay in the last
    head, which is a streaming one, and all in the others.
    """
    gates = np.where(np.arange(case.num_kv_heads) == case.num_kv_heads - 1, 0.25, 0.75)[None]
    kept = impl.duo_attention.select(case.keys, gates)
    expected = np.ones(case.keys.shape[:3], dtype=bool)
    expected[0, -1, 128:-256] = False
    equal(kept, expected, "other tokens stay than both ends of a streaming head")


def states_of(case, seed, count):
    """Queries [B, H_q, M, D] of at most `count` last tokens,
    in quarters, and the keys and values of the case.
    """
    queries = quarters(seed, *case.queries.shape[:2], min(count, case.length), case.head_dim)
    return queries, case.keys, case.values


many: dict[str, Any] = {
    "case": seeded_cases(kinds=("normal", "drift", "ties")),
    "seed": seeds(),
    "count": st.sampled_from([1, 2, 5]),
}


@law("DA-3", of=GATED, sink_size=st.integers(0, 4), recent_size=st.integers(1, 5), **many)
def test_a_gated_head_mixes_both_attentions_by_its_gate(impl, case, seed, count, sink_size, recent_size):
    """Also computed query by query: full attention, and
    attention over the first and the last tokens alone.
    """
    queries, keys, values = states_of(case, seed, count)
    gates, sizes = gates_of(case, seed), {"sink_size": sink_size, "recent_size": recent_size}
    allowed = impl.allowance(GATED, queries, keys, values, gates, **sizes)
    allowed.check(impl.duo_attention.gated_attention(queries, keys, values, gates, **sizes), "the output")
    keys, values, gate = (
        for_each_reader(each, queries) for each in (impl.round(keys), impl.round(values), gates)
    )
    expected = np.zeros((*queries.shape[:3], values.shape[-1]))
    for item, head, row in np.ndindex(queries.shape[:3]):
        last = keys.shape[2] - queries.shape[2] + row
        seen = [place for place in range(last + 1) if place < sink_size or place > last - recent_size]
        for share, places in ((gate[item, head], list(range(last + 1))), (1 - gate[item, head], seen)):
            weights = causal_weights(queries[item, head, row][None], keys[item, head][places])[0]
            expected[item, head, row] += share * weights @ values[item, head][places]
    loops(allowed.expected, expected, (1 + np.abs(keys).max()) * (1 + np.abs(values).max()))


@law("DA-3", of=GATED)
def test_a_streaming_head_does_not_see_the_middle(impl):
    """500 zero keys, of which token 200 alone has a value:
    gates of 1, 1/2 and 0 give 1/500, half of it, and nothing.
    """
    values = (np.arange(500) == 200).astype(float).reshape(1, 1, 500, 1).repeat(3, axis=1)
    states, gates = (np.ones((1, 3, 1, 2)), np.zeros((1, 3, 500, 2)), values), np.array([[1.0, 0.5, 0.0]])
    agrees(impl, GATED, *states, gates, expected=np.array([0.002, 0.001, 0]).reshape(1, 3, 1, 1))
    # Tokens 127 and 244 are the last of the 128 sinks and the first of the last 256; 128 and 243 are in the
    # middle.
    for place, is_seen in ((127, True), (128, False), (243, False), (244, True)):
        values = (np.arange(500) == place).astype(float).reshape(1, 1, 500, 1)
        got = impl.duo_attention.gated_attention(
            np.ones((1, 1, 1, 2)), np.zeros((1, 1, 500, 2)), values, np.zeros((1, 1))
        )
        equal(
            (got > 0.002).all(),
            is_seen,
            f"a streaming head {'does not see' if is_seen else 'sees'} token {place}",
        )
    # The fourth of four sinks is seen by the fourth token alone: by none before it.
    last = (
        np.ones((1, 1, 4, 2)),
        np.zeros((1, 1, 4, 2)),
        np.eye(4)[3].reshape(1, 1, 4, 1),
        np.zeros((1, 1)),
    )
    agrees(impl, GATED, *last, expected=last[2] / 4, sink_size=4, recent_size=1)


@law("DA-4", of=LOSS, seed=seeds(), tokens=st.integers(1, 5), penalty=st.sampled_from([0.0, 0.25, 2.0]))
def test_the_loss_is_the_mean_squared_distance_and_the_sum_of_the_gates(impl, seed, tokens, penalty):
    """States and gates in quarters: number by number."""
    draw = np.random.default_rng(seed)
    states, wanted = np.round(4 * draw.normal(size=(2, tokens, 6))) / 4
    gates = draw.integers(0, 5, size=(3, 2)) / 4
    got = impl.duo_attention.training_loss(states, wanted, gates, penalty=penalty)
    squares = [(x - y) ** 2 for x, y in zip(states.flat, wanted.flat, strict=True)]
    expected = sum(squares) / len(squares) + penalty * sum(gates.flat)
    terms, size = states.size + gates.size, 1 + expected
    rounds_to(impl, np.array(got), expected, "the loss", terms=terms, size=size)
