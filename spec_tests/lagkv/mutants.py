"""Wrong LagKVs that are no edit of the right one; the others are in lagkv.toml."""

from evictionary.reference.lagkv import Stream, step
from evictionary.spec_tests.proof.planted import mutant

STREAMS: list[Stream] = []


@mutant(
    "lagkv.step",
    killed_by="LK-R",
    misconception="the stream kept in a global: a second continuation starts from the end of the first",
)
def stream_in_a_global(stream, keys, values, *, keep_ratio, sink_size=16, lag_size=1024):
    last = (
        STREAMS[-1]
        if stream is not None and STREAMS and STREAMS[-1].keys.shape[:2] == keys.shape[:2]
        else stream
    )
    STREAMS[:] = [step(last, keys, values, keep_ratio=keep_ratio, sink_size=sink_size, lag_size=lag_size)]
    return STREAMS[-1]
