r"""KVzip (arXiv 2505.23416): keep the tokens that are
needed most when the model reads the text a second time.

The paper is known here from its public code: NVIDIA/kvpress,
kvpress/presses/kvzip_press.py at 00dd63a, which names snu-mllab/KVzip.
"""

from collections.abc import Iterator

import torch

from . import kernels
from .attention import grouped_attention
from .checks import fits, working_dtype
from .operators import operator

# Entries of the attention matrix at a time.
TILE = 2**22


@operator()
@fits()
def score(keys: torch.Tensor, replay_queries: torch.Tensor, replay_keys: torch.Tensor) -> torch.Tensor:
    r"""KZ-1, KZ-2: `score_t = max_gm A_gmt`, the largest
    attention that any query of the replay gives to a token.

    The m-th of the M tokens of the replay sees the text and the replay up to itself. Blocks of queries are
    computed at a time.

    Args: replay_queries and replay_keys, after RoPE, at the positions after the text. Returns scores
    [B, H_kv, T], from 0 to 1, higher = keep, float32 (float64 for float64); it costs O(M T). Raises
    ValueError naming the argument that does not fit, and on a CPU for NaN or infinite numbers.
    """
    if kernels.take("received_attention", keys, replay_queries, replay_keys):
        return kernels.received_attention.score_replay(keys, replay_queries, replay_keys)
    scores = [keys.new_zeros(keys.shape[::2], dtype=working_dtype(keys))] * keys.shape[1]
    for head, _, weights in replay_attention_in_blocks(keys, replay_queries, replay_keys):
        scores[head] = scores[head].maximum(weights.amax(dim=(1, 2)))
    return torch.stack(scores, dim=1)


def replay_attention_in_blocks(
    keys: torch.Tensor, replay_queries: torch.Tensor, replay_keys: torch.Tensor
) -> Iterator[tuple[int, slice, torch.Tensor]]:
    r"""KZ-1: the attention [B, G, m, T] of m queries of the
    replay on the text, with their KV head and their places.
    """
    batch, heads, length, _ = keys.shape
    num_queries, group = replay_queries.shape[2], replay_queries.shape[1] // heads
    dtype = working_dtype(keys)
    block = max(1, TILE // (batch * group * (length + num_queries)))
    for head in range(heads):
        whole = torch.cat([keys[:, head : head + 1], replay_keys[:, head : head + 1]], dim=2).to(dtype)
        queries = replay_queries[:, head * group : (head + 1) * group].to(dtype)
        for start in range(0, num_queries, block):
            stop = min(start + block, num_queries)
            weights = grouped_attention(queries[:, :, start:stop], whole[:, :, : length + stop], head)
            yield head, slice(start, stop), weights[:, 0, ..., :length]
