"""MomentKV in a cache, and its correction beside any method (`+moments`): evicted tokens live on in the
moments of each head.
"""

from collections.abc import Callable
from typing import Any

import torch

from evictionary.optimized import ada_kv, momentkv, momentkv_ragged
from evictionary.optimized.states import CompressedCache, Moments
from evictionary.policies import Compression, Policy, State, moments_of, with_moments


class MomentKV(Policy):
    needs_no_cap = True  # MK-9 expands exp(q . k) about the mean key, without a cap

    def serves(self, method: Any) -> bool:
        return bool(method.corrected)

    def opened(self, compression: Compression) -> State:
        """MK-22: the moments of no token."""
        return with_moments(momentkv.no_moments(compression.keys, compression.values))

    def evicted(self, compression: Compression, kept: torch.Tensor) -> None:
        """MK-25: the tokens that go join the moments. Where every place holds a token, the same pass copies
        those that stay.
        """
        keys, values, moments = compression.keys, compression.values, moments_of(compression.state)
        assert moments is not None
        if compression.filled is None:
            compression.compressed, moments = momentkv.compress_prompt(keys, values, kept, moments)
        else:
            moments = momentkv.update(moments, keys, values, compression.filled & ~kept)
        compression.state |= with_moments(moments)

    def part(self, queries: torch.Tensor, moments: Moments) -> tuple[torch.Tensor, torch.Tensor]:
        """MK-9, MK-11: the evicted tokens' part, from their moments: output [B, H_q, M, D_v] and log-sum-exp
        [B, H_q, M].
        """
        batch, num_query_heads, num_queries, head_dim = queries.shape
        grouped = queries.reshape(batch, moments.count.shape[1], -1, head_dim)
        output, log_sum_exp = momentkv.evicted_part(grouped, moments)
        asked = batch, num_query_heads, num_queries
        return output.reshape(*asked, -1), log_sum_exp.reshape(asked)

    def stepping(self, method: Any) -> Callable[..., torch.Tensor] | None:
        return step if method.function is momentkv.score and method.is_top_k else None

    def stepping_in_heads(self, method: Any) -> Callable[..., momentkv_ragged.Decoded] | None:
        shares = method.head_budgets is ada_kv.select and method.merge is None
        return step_in_heads if method.function is momentkv.score and shares else None


def step_in_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: CompressedCache,
    state: State,
    position: torch.Tensor,
    budgets: list[int],
) -> momentkv_ragged.Decoded:
    """MK-A1 and AD-3, as `step`, for ragged heads that share a budget: those of each row, on average."""
    moments = moments_of(state)
    assert moments is not None
    floors = [ada_kv.own_budget(budget) for budget in budgets]
    return momentkv_ragged.step_trusted(query, key, value, cache, moments, position, budgets, floors)


def step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    state: State,
    position: torch.Tensor,
) -> torch.Tensor:
    """MK-A1 in place: the attention [B, H_q, D_v] of a new token, which takes the slot of the evicted
    token or none.

    Args: query [B, H_q, D]; key and value of the token, [B, H_kv, D]; slots, the keys, values and positions
    of a full layer; state, with moments; position [B, H_kv] of the token. Changes the slots and the state.
    """
    moments = moments_of(state)
    assert moments is not None
    return momentkv.step_trusted(query, key, value, *slots, moments, position)
