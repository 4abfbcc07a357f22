r"""KVzap to read: a token stays if `w . h_t + b` reaches the threshold, or if it is one of the last ones
(ZA-5). One launch; a program judges one tile of tokens for one KV head.
"""

import torch
import triton
import triton.language as tl

BLOCK, PART = 64, 64  # tokens of a tile, channels at a time


@torch.no_grad()
def select(
    keys: torch.Tensor,
    hidden_states: torch.Tensor,
    surrogate_weights: torch.Tensor,
    surrogate_bias: torch.Tensor,
    *,
    threshold: float = -4.0,
    window_size: int = 128,
) -> torch.Tensor:
    r"""ZA-5: the last M of T tokens of keys [B, H_kv, T, D] are judged by hidden_states [B, M, hidden]; with
    surrogate_weights [B, H_kv, hidden] and surrogate_bias [B, H_kv] this gives kept [B, H_kv, T], boolean.
    """
    batch, heads, length, _ = keys.shape
    _, count, channels = hidden_states.shape
    wide = torch.promote_types(keys.dtype, torch.float32)
    weights, bias = (each.to(wide).contiguous() for each in (surrogate_weights, surrogate_bias))
    # A tensor, for Triton would pass a Python number in float32.
    limit = torch.tensor([threshold], dtype=torch.float64, device=keys.device)
    kept = torch.ones(batch, heads, length, dtype=torch.bool, device=keys.device)
    grid = (batch * heads, triton.cdiv(count, BLOCK))
    judge[grid](
        hidden_states.contiguous(), weights, bias, kept, limit, heads, length, count, channels, window_size,
        BLOCK, PART,
    )  # fmt: skip
    return kept


@triton.jit
def judge(
    states_ptr, weights_ptr, bias_ptr, kept_ptr, limit_ptr, heads, length, count, channels, window_size,
    BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """kept[head, t] = the token is one of the last window_size, or its score reaches the threshold.
    Grid: heads, tiles of the last count tokens.
    """
    head = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    states = states_ptr + (head // heads * count + tokens)[:, None] * channels
    scores = tl.zeros((BLOCK,), weights_ptr.dtype.element_ty)
    for start in range(0, channels, PART):
        part = start + tl.arange(0, PART)
        weights = tl.load(weights_ptr + head * channels + part, mask=part < channels, other=0.0)
        inside = (tokens < count)[:, None] & (part < channels)[None, :]
        tile = tl.load(states + part[None, :], mask=inside, other=0.0).to(scores.dtype)  # [BLOCK, PART]
        scores += tl.sum(tile * weights[None, :], axis=1)
    scores += tl.load(bias_ptr + head)
    kept = (scores.to(tl.float64) >= tl.load(limit_ptr)) | (tokens >= count - window_size)
    tl.store(kept_ptr + head * length + length - count + tokens, kept, mask=tokens < count)
