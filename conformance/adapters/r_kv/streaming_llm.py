"""R-KV's baseline `StreamingLLM`."""

from conformance.borrowed import leave_out, mask, positions_as_values, scores_by_budget, take

DOMAIN = {"dtype": ("float32",), "max_length": 512}  # every budget is asked

StreamingLLM = take("r_kv", "rkv/compression/streamingllm.py", "StreamingLLM").StreamingLLM


def score(keys, *, sink_size=4):
    length = keys.shape[2]
    leave_out(sink_size >= length, "no more tokens than sinks, which the class does not take")

    def kept_at(budget):
        cluster = StreamingLLM(budget=budget, first_tokens=sink_size)
        return mask(cluster.update_kv(keys, keys, positions_as_values(keys))[1], length)

    return scores_by_budget(kept_at, range(sink_size + 1, length + 1))
