"""Laws of Compactor: CO-1 to CO-5."""

from evictionary.spec_tests.judge.prelude import *

LEVERAGE, SKETCHED, CHUNKS, SCORE = (
    f"compactor.{name}" for name in ("leverage", "sketched_leverage", "chunk_attention", "score")
)
MODEST = ("normal", "ties", "duplicate_keys", "drift", "sinks", "constant_channel")
channels, sizes = st.sampled_from([1, 3, 8, 48]), st.sampled_from([1, 2, 5, 16, 40])


def states_of(case, seed, count=3):
    """queries, keys, values, unrotated keys and a sketch [B, H_kv, D, k] in quarters.

    The unrotated keys are short: where the ridge counts, what the mean of half precision rounds does not.
    """
    drawn = np.random.default_rng(seed + 1).normal(size=(*case.keys.shape[:2], case.keys.shape[-1], count))
    return prompt_queries(case, seed), case.keys, case.values, case.next_keys / 16, np.round(4 * drawn) / 4


def hat(keys, ridge=0.0):
    """The diagonal of the hat matrix of keys [.., T, D]: how much of each key's place its nearest point in
    the span of the channels has. A ridge is a further key for each channel.
    """
    more = np.broadcast_to(
        math.sqrt(ridge) * np.eye(keys.shape[-1]), (*keys.shape[:-2], *2 * keys.shape[-1:])
    )
    heads = np.concatenate([keys, more], axis=-2).reshape(-1, sum(keys.shape[-2:]), keys.shape[-1])
    found = [rows @ np.linalg.lstsq(rows, np.eye(len(rows)), rcond=1e-9)[0] for rows in heads]
    return np.diagonal(found, axis1=1, axis2=2)[:, : keys.shape[-2]].reshape(keys.shape[:-1])


def received(queries, keys, chunk_size):
    """CO-3 from one matrix of all queries and tokens, [B, H_q, T, D] to [B, H_q, T]."""
    chunk = np.arange(keys.shape[2]) // chunk_size
    logits = np.where(chunk[:, None] == chunk, np.einsum("bhmd,bhtd->bhmt", queries, keys), -np.inf)
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.einsum("bhmt,bhm->bht", powers, 1 / powers.sum(axis=-1))


def standard(scores):
    """CO-4, from the deviation of the population."""
    rows = scores.reshape(len(scores), -1)
    deviation = rows.std(axis=1, keepdims=True) * math.sqrt(rows.shape[1] / max(1, rows.shape[1] - 1))
    return ((rows - rows.mean(axis=1, keepdims=True)) / np.maximum(deviation, 1e-6)).reshape(scores.shape)


@law("CO-1", of=LEVERAGE, case=cases(max_length=33), ridge=st.sampled_from([0.0, 0.25, 1.0]))
def test_leverage_is_the_diagonal_of_the_hat_matrix(impl, case, ridge):
    """Also by least squares. It lies between 0 and 1, and without a ridge it sums to the rank."""
    keys = impl.round(case.keys)
    got = agrees(impl, LEVERAGE, keys, ridge=ridge, by_hand=hat(keys, ridge), size=1e4)
    lies(impl, got, (0, 1), "the leverage")
    ranks = np.linalg.matrix_rank(keys, rtol=1e-9) * 1.0
    lies(impl, got.mean(axis=-1), (0 if ridge else ranks / keys.shape[2], ranks / keys.shape[2]), "the sum")


@law("CO-1", of=LEVERAGE, case=cases(max_length=33, kinds=("ties",)), power=st.integers(-1, 1))
def test_leverage_is_the_same_in_every_basis(impl, case, power):
    """K A for an invertible A: here all channels from each on are added, and the sums scaled."""
    other = case.keys @ np.tri(case.keys.shape[-1]) * 2.0**power
    same(impl, LEVERAGE, case.keys, got=impl.compactor.leverage(other), what="the leverage of K A")


@law("CO-1", of=LEVERAGE, case=seeded_cases(min_length=2, max_length=33, kinds=MODEST), seed=seeds())
def test_another_token_never_raises_the_leverage_of_the_others(impl, case, seed):
    """Leverage moves with the tokens, each head has its own, and the last token only takes from the rest."""
    move_with_tokens(impl, LEVERAGE, seed, (case.keys,))
    same_alone(impl, LEVERAGE, case.keys)
    fewer = impl.compactor.leverage(case.keys[:, :, :-1])
    lies(impl, impl.compactor.leverage(case.keys)[:, :, :-1], (0, fewer), "the leverage", times=2)


@law("CO-1", of=LEVERAGE)
def test_copies_share_and_what_no_other_key_has_counts_whole(impl):
    """Two copies have 1/2 each, a key in a channel of its own has 1, and a zero key 0."""
    keys, expected = np.zeros((1, 1, 4, width(impl))), np.array([[[1, 1, 2, 0]]]) / 2
    keys[..., :2, 0], keys[..., 2, 1] = 2, 4
    rounds_to(impl, impl.compactor.leverage(keys), expected, "the leverage", roundings=4)


@law("CO-2", of=SKETCHED, case=cases(max_length=33, kinds=MODEST), seed=seeds(), count=channels)
def test_the_sketch_has_the_leverage_of_centred_keys_in_its_channels(impl, case, seed, count):
    """(K - mean) Phi of short keys with the ridge 0.01, also by least squares. Each head has its own sketch,
    and the scores sum to less than its channels.
    """
    keys, sketch = impl.round(case.keys / 16), states_of(case, seed, count)[-1]
    by_hand = hat((keys - keys.mean(axis=2, keepdims=True)) @ sketch, 0.01)
    got = agrees(impl, SKETCHED, keys, sketch, by_hand=by_hand, size=1e6)
    lies(impl, got.mean(axis=-1), (0, count / keys.shape[2]), "the sum of the leverage")
    same_alone(impl, SKETCHED, keys, sketch)


@law("CO-2", of=(LEVERAGE, SKETCHED), case=seeded_cases(max_length=33, kinds=("ties",)))
def test_an_orthogonal_sketch_is_exact(impl, case):
    """The channels in another order, turned round. Keys and their opposites have a mean of zero."""
    keys = np.concatenate([case.keys, -case.keys], axis=2)
    sketch = np.broadcast_to(-np.eye(case.head_dim)[::-1], (*keys.shape[:2], *2 * keys.shape[-1:]))
    got = impl.compactor.sketched_leverage(keys, sketch, ridge=0.0)
    same(impl, LEVERAGE, keys, got=got, what="the leverage through an orthogonal sketch")


@law("CO-2", of=SKETCHED)
def test_two_opposite_keys_share_what_the_ridge_leaves(impl):
    """Of length 1/8 in the one channel that the sketch has: 1/64 of 2/64 and 0.01."""
    keys, sketch = np.zeros((1, 1, 2, width(impl))), np.zeros((1, 1, width(impl), 3))
    keys[..., 0], sketch[..., 0, 0] = (1 / 8, -1 / 8), 1
    got, expected = impl.compactor.sketched_leverage(keys, sketch), np.full((1, 1, 2), 1 / (2 + 0.64))
    rounds_to(impl, got, expected, "the leverage", size=expected)


@law("CO-3", of=CHUNKS, case=cases(max_length=33), seed=seeds(), chunk_size=sizes)
def test_a_token_receives_attention_from_its_whole_chunk(impl, case, seed, chunk_size):
    """From queries before and after it, without a scale; also from one matrix. A chunk receives 1 for
    each of its tokens, a short last one too: what fills it up neither asks nor receives.
    """
    queries = prompt_queries(case, seed)
    keys = for_each_reader(impl.round(case.keys), queries)
    by_hand, size = received(queries, keys, chunk_size), keys.shape[-1] * (1 + np.abs(keys).max())
    got = agrees(impl, CHUNKS, queries, keys, chunk_size=chunk_size, by_hand=by_hand, size=size)
    sums = np.add.reduceat(got - 1, np.arange(0, keys.shape[2], chunk_size), axis=-1)
    slack = within(impl, times=chunk_size)
    near(sums, np.zeros(sums.shape), slack, "what a chunk receives beside 1 for each token")


@law("CO-3", of=CHUNKS, examples=2, case=long_cases(("normal",), lengths=(2049, 1023), head_dims=(64, 80)))
def test_a_long_text_has_chunks_of_256_tokens(impl, case):
    """Each receives attention as a text of its own."""
    queries, keys = prompt_queries(case, case.seed), impl.round(case.keys)
    agrees(impl, CHUNKS, queries, keys, expected=received(queries, keys, 256), more=1e-9)


@law("CO-1", of=LEVERAGE, examples=2, case=long_cases(("normal",), lengths=(4097, 2049), head_dims=(64, 80)))
def test_a_long_text_has_the_leverage_of_its_orthonormal_factor(impl, case):
    """The squares of Q in K = Q R, one row for each of thousands of keys."""
    keys = impl.round(case.keys)
    agrees(impl, LEVERAGE, keys, expected=(np.linalg.qr(keys)[0] ** 2).sum(axis=-1), more=1e-9)


@law(
    "CO-5",
    of=SCORE,
    case=seeded_cases(max_length=33, kinds=MODEST),
    seed=seeds(),
    ratio=shares(),
    ends=st.integers(0, 3),
)
def test_the_score_blends_leverage_and_attention(impl, case, seed, ratio, ends):
    """r z(leverage) + z(attention) of the tokens between the first and the last, which score infinity and
    take no part; also by other loops.
    """
    states = impl.rounded(states_of(case, seed))
    middle, by_hand = slice(ends, max(ends, case.length - 2)), np.full(case.keys.shape[:3], np.inf)
    queries, keys, values, plain = (each[:, :, middle] for each in states[:4])
    if keys.size:
        weights = over_group(received(queries, for_each_reader(keys, queries), 5), keys.shape[1])
        padded = np.pad(weights * lengths(values), ((0, 0), (0, 0), (1, 1)))
        pooled = (padded[..., :-2] + padded[..., 1:-1] + padded[..., 2:]) / 3
        outliers = standard(hat((plain - plain.mean(axis=2, keepdims=True)) @ states[4], 0.01))
        by_hand[:, :, middle] = ratio * outliers + standard(pooled)
    settings = {"compression_ratio": ratio, "sink_size": ends, "recent_size": 2, "chunk_size": 5}
    agrees(impl, SCORE, *states, **settings, by_hand=by_hand, size=1e8)


@law("CO-5", of=SCORE, kind="edge", length=st.integers(1, 20))
def test_the_first_8_tokens_and_the_last_4_stay_unless_told(impl, length):
    """They score infinity. Where all others are alike, these score 0: nothing is divided by zero."""
    got = impl.compactor.score(*np.zeros((4, 1, 1, length, 2)), np.ones((1, 1, 2, 3)), compression_ratio=0.5)
    is_middle = (np.arange(length) >= 8) & (np.arange(length) < length - 4)
    equal(got, np.where(is_middle, 0, np.inf)[None, None], "the first 8 and the last 4 score something else")


@law("CO-4", of=SCORE)
def test_two_heads_are_standardised_together(impl):
    """Of three tokens with even attention, head 0 has the values 0, 0 and 3, and head 1 none: pooled 0, 1, 1
    and 0, 0, 0. The variance is 2/3 over 2 where head 0 is alone, and 4/3 over 5 for both.
    """
    pooled = np.array([[[0.0, 1, 1], [0, 0, 0]]])
    for heads, mean, variance in ((1, 2 / 3, 1 / 3), (2, 1 / 3, 4 / 15)):
        states, sketch = np.zeros((4, 1, heads, 3, width(impl))), np.ones((1, heads, width(impl), 3))
        states[2, 0, 0, 2, 0] = 3
        got = impl.compactor.score(*states, sketch, compression_ratio=0.5, sink_size=0, recent_size=0)
        near(got, (pooled[:, :heads] - mean) / math.sqrt(variance), within(impl), "the score")


@law("CO-4", of=SCORE, case=seeded_cases(min_length=15, max_length=33, kinds=MODEST), seed=seeds())
def test_neither_the_unit_of_values_nor_the_rest_of_the_batch_counts(impl, case, seed):
    """The values of an item in another unit give the same
    scores, and each item scores alone as among others.
    """
    queries, keys, values, *rest = states = states_of(case, seed)
    units = 4.0 ** np.arange(1, case.batch + 1)[:, None, None, None]
    longer = impl.compactor.score(queries, keys, units * values, *rest, compression_ratio=0.5)
    same(impl, SCORE, *states, got=longer, compression_ratio=0.5)
    items = [[each[[item]] for each in states] for item in range(case.batch)]
    alone = [impl.compactor.score(*item, compression_ratio=0.5) for item in items]
    same(impl, SCORE, *states, got=np.concatenate(alone), compression_ratio=0.5)
