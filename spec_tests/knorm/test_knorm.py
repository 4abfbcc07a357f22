"""Laws of KNorm: KN-1."""

from evictionary.spec_tests.judge.prelude import *


@law("KN-1", of="knorm.score", case=cases())
def test_score_is_minus_the_norm(impl, case):
    """The score is minus the Euclidean norm of the key."""
    agrees(
        impl,
        "knorm.score",
        case.keys,
        by_hand=lambda keys: np.apply_along_axis(lambda key: -math.hypot(*key), -1, keys),
    )


@law("KN-1", of="knorm.score", case=cases(), seed=seeds())
def test_shorter_keys_score_higher(impl, case, seed):
    """Halving some keys halves their scores and leaves the others alone."""
    factors = np.random.default_rng(seed).choice([0.5, 1.0], size=case.keys.shape[:-1])
    same(
        impl,
        "knorm.score",
        case.keys,
        got=impl.knorm.score(impl.round(case.keys) * factors[..., None]),
        becomes=lambda expected: expected * factors,
        what="the score of the halved keys",
    )


@law("KN-1", of="knorm.score", channels=st.sampled_from([2, 33]), batch=st.sampled_from([1, 8]))
def test_a_three_four_key_scores_minus_five(impl, channels, batch):
    """|(3, 4)| = 5, also with zeros between, and a zero key has none; in each sequence of a batch, where the
    key is as many times as long as the sequence has a number.
    """
    times = np.arange(1.0, batch + 1)[:, None, None]
    keys = times[..., None] * np.array([[[[3.0, *[0] * (channels - 2), 4], [0] * channels]]])
    expected = times * np.array([[[-5.0, 0.0]]])
    agrees(impl, "knorm.score", keys, expected=expected, what="the score")


@law("KN-1", of="knorm.score", examples=3, case=long_cases(kinds=("moving_mean", "minute", "vast", "sinks")))
def test_every_key_of_a_long_prompt_has_its_norm(impl, case):
    """Of thousands of keys, at scales from 1e-7 to 1e4,
    each scores minus the root of the sum of its squares.
    """
    keys = of_dtype(impl, case.keys)
    expected = -np.sqrt(sum(np.square(keys[..., channel]) for channel in range(keys.shape[-1])))
    got, terms = impl.knorm.score(keys), case.head_dim
    rounds_to(impl, got, expected, "the score of a long prompt", terms=terms, size=-expected)


@law("KN-1", of="knorm.score", examples=3, case=long_cases(lengths=(4095, 8191), head_dims=(256, 128)))
def test_small_squares_beside_a_large_one_count(impl, case):
    """A square of 2^14, wherever it stands, beside many
    that a sum in float16, or in bfloat16, loses one by one.
    """
    tokens = np.arange(case.length)
    small = np.where(tokens < case.length // 2, 2.75, 7.5)[:, None]
    keys = np.broadcast_to(small, (1, case.num_kv_heads, case.length, case.head_dim)).copy()
    keys[:, :, tokens, tokens % case.head_dim] = 128
    expected = -np.sqrt(np.square(keys).sum(axis=-1))
    rounds_to(impl, impl.knorm.score(keys), expected, "the score", terms=case.head_dim, size=-expected)
