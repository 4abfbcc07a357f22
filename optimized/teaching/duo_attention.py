r"""DuoAttention to read: a retrieval head keeps every token, a streaming head the first and the last ones
(DA-2). One launch.
"""

import torch
import triton
import triton.language as tl

BLOCK = 512  # tokens of a tile


@torch.no_grad()
def select(
    keys: torch.Tensor,
    gates: torch.Tensor,
    *,
    threshold: float = 0.5,
    sink_size: int = 128,
    recent_size: int = 256,
) -> torch.Tensor:
    r"""DA-2: the shape of keys [B, H_kv, T, D] and gates [B, H_kv] give kept [B, H_kv, T], boolean."""
    recent_size = max(recent_size, 0 if sink_size else 1)  # a streaming head keeps a token at least
    kept = torch.empty(keys.shape[:3], dtype=torch.bool, device=keys.device)
    grid = (gates.numel(), triton.cdiv(keys.shape[2], BLOCK))
    keep_ends[grid](gates.contiguous(), kept, threshold, sink_size, recent_size, keys.shape[2], BLOCK)
    return kept


@triton.jit
def keep_ends(gates_ptr, kept_ptr, threshold, sink_size, recent_size, length, BLOCK: tl.constexpr):
    """kept[head, t] = the gate of the head reaches the threshold, or t is one of the first or the last.
    Grid: heads, tiles.
    """
    head = tl.program_id(0).to(tl.int64)
    positions = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # The first tokens of a retrieval head are all of them.
    sink_size = tl.where(tl.load(gates_ptr + head) >= threshold, length, sink_size)
    kept = (positions < sink_size) | (positions >= length - recent_size)
    tl.store(kept_ptr + head * length + positions, kept, mask=positions < length)
