"""kvpress's `StreamingLLMPress`, asked at every compression ratio what it keeps."""

from kvpress import StreamingLLMPress

from conformance.borrowed import leave_out, scores_by_budget

DOMAIN = {"dtype": ("float32",), "max_length": 512}  # every budget is asked


def score(keys, *, sink_size=4):
    length = keys.shape[2]
    leave_out(sink_size >= length, "no more tokens than sinks, which the press refuses")

    def kept_at(budget):  # the ratio in the middle of those that leave this budget
        press = StreamingLLMPress(compression_ratio=1 - (budget + 0.5) / length, n_sink=sink_size)
        return press.score(None, None, keys, None, None, {})

    return scores_by_budget(kept_at, range(1, length))
