"""What several files of the laws of lagkv use."""

from evictionary.spec_tests.judge.prelude import *

SCORE, SELECT, RETAINED = "lagkv.score", "lagkv.select", "lagkv.retained_length"


sinks = st.integers(0, 5)


lags = st.sampled_from([1, 2, 3, 4, 7, 8, 16])


hundredths = st.integers(0, 100)


caches = st.builds(
    Case,
    kind=st.sampled_from(KINDS),
    seed=seeds(),
    batch=st.integers(1, 2),
    num_kv_heads=st.integers(1, 2),
    length=st.integers(1, 64),
    head_dim=st.sampled_from([2, 4, 8]),
    value_dim=st.sampled_from([2, 6]),
)


def asked(percent, sink, lag):
    return {"keep_ratio": percent / 100, "sink_size": sink, "lag_size": lag}


def by_oracle(impl, path=SCORE, takes=4):
    """The oracle's scores of partitions, and what they may be wrong by; `path` takes the first 1 to 4 of the
    keys, the values, and those of the successors.
    """

    def scored(*states):
        allowed = impl.allowance(path, *states[:takes])
        return allowed.expected, lambda: allowed.largest

    return scored


def check_partitions(kept, keys, values, percent, sink, lag, scored):
    """Raise Violation unless sinks and window are kept and each
    partition before the last keeps its best floor(rL) tokens.

    scored gives the scores, and what they may be wrong by, of the keys and the values of the partitions but
    the last, and of those of their successors.
    """
    require_mask(kept, keys.shape[:3], "the selection")
    compressed = max(0, (keys.shape[2] - sink) // lag - 1)
    last = sink + compressed * lag
    equal(kept[..., :sink], True, "a sink token was evicted")
    equal(kept[..., last:], True, "a token of the sliding window was evicted")
    if compressed:
        keys, values = (
            states[:, :, sink : last + lag].reshape(*states.shape[:2], compressed + 1, lag, -1)
            for states in (keys, values)
        )
        scores, slack = scored(keys[:, :, :-1], values[:, :, :-1], keys[:, :, 1:], values[:, :, 1:])
        parts = kept[..., sink:last].reshape(scores.shape)
        selects(parts, scores, percent * lag // 100, slack=slack, what="a partition")


def states_at(impl, keys, values, cuts, **settings):
    """The mask that the stream keeps after each chunk that ends at one of `cuts`, its state, and the number
    of tokens it has taken.
    """
    state: Any = None
    for start, stop in itertools.pairwise([0, *cuts]):
        state = impl.lagkv.step(state, keys[:, :, start:stop], values[:, :, start:stop], **settings)
        kept = np.zeros(keys.shape[:3], dtype=bool)
        np.put_along_axis(kept, state.positions, True, axis=-1)
        yield kept, state, stop
