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


def check_partitions(impl, kept, case, percent, sink, lag, path=SCORE, takes=4):
    """Raise Violation unless sinks and window are kept and each partition before the last keeps its best
    floor(rL) tokens.

    path names the function whose scores count. It takes 1 to 4 of these: the keys and the values of the
    partitions but the last, and the keys and the values of their successors.
    """
    require_mask(kept, case.keys.shape[:3], "the selection")
    compressed = max(0, (case.length - sink) // lag - 1)
    last = sink + compressed * lag
    equal(kept[..., :sink], True, "a sink token was evicted")
    equal(kept[..., last:], True, "a token of the sliding window was evicted")
    if not compressed:
        return
    keys, values = (
        states[:, :, sink : last + lag].reshape(*states.shape[:2], compressed + 1, lag, -1)
        for states in (case.keys, case.values)
    )
    states = (keys[:, :, :-1], values[:, :, :-1], keys[:, :, 1:], values[:, :, 1:])
    allowed = impl.allowance(path, *states[:takes])
    parts = kept[..., sink:last].reshape(allowed.expected.shape)
    selects(parts, allowed.expected, percent * lag // 100, slack=lambda: allowed.largest, what="a partition")
