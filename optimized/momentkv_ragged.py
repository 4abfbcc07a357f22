r"""A decoding step of MomentKV for heads that share the budget of their layer (AdaKV): they keep different
numbers of tokens, flat and without padding.

As `momentkv.step`, but each row of the batch evicts as many tokens as its layer is over its budget: none, or
one for each KV head. Of the cache a step reads each key and value once, and copies only what it scores.
"""

import math
from typing import NamedTuple

import torch
from torch.linalg import vector_norm

from . import ada_kv
from .attention import add_sums, products, rows_of_heads
from .momentkv import PROBED, evicted_part, lowest, norms_across, predicting
from .states import CompressedCache, Moments


class Decoded(NamedTuple):
    """After a step: output [B, H_q, D_v]; gone, the rows of the flat tensors whose tokens are evicted; stays
    [B, H_kv], whether the new token of a head is stored.
    """

    output: torch.Tensor
    gone: torch.Tensor
    stays: torch.Tensor


def step_trusted(
    query: torch.Tensor,
    new_key: torch.Tensor,
    new_value: torch.Tensor,
    cache: CompressedCache,
    moments: Moments,
    position: torch.Tensor,
    budgets: list[int],
    floors: list[int],
) -> Decoded:
    r"""MK-A1 and AD-1..3: the new token of each head joins, the
    lowest scores of the layer leave, then the query attends.

    Args: query [B, H_q, D]; new_key [B, H_kv, D]; new_value [B, H_kv, D_v]; cache, its rows in any order
    within a head; moments, which change in place; position [B, H_kv] of the new token; budgets, the tokens of
    a head on average, and floors, those that each head keeps for itself, for each row of the batch. Nothing
    is checked, and the cache stays as it is: the caller removes what is gone.
    """
    batch, heads = cache.lengths.shape
    lengths, spans = cache.lengths.flatten(), rows_of_heads(cache)
    stored, over = (
        len(cache.keys),
        [
            max(0, total + heads - heads * budget)
            for total, budget in zip(cache.lengths.sum(dim=1).tolist(), budgets, strict=True)
        ],
    )
    mean_value, prediction = (field.flatten(0, 1) for field in predicting(moments, cache.keys))
    dtype, new = prediction.dtype, int(lengths.max())  # the place of the new token, behind the longest head
    places = torch.arange(new + 1, device=lengths.device)
    is_token = (places < lengths[:, None]).index_fill_(1, places[-1:], True)
    starts = lengths.cumsum(0) - lengths
    own_key, own_value = (state.flatten(0, 1)[:, None] for state in (new_key, new_value))

    # The products of each token with its queries, and of its key with the first channels of the prediction.
    rows = query.to(dtype).reshape(batch * heads, -1, query.shape[-1]) / math.sqrt(query.shape[-1])
    tile, group = torch.cat([rows, prediction[:, :PROBED]], dim=1), rows.shape[1]
    both = tile.new_full((*tile.shape[:2], new + 1), -math.inf)
    products(tile, cache.keys, spans, both)
    both[..., new:] = tile @ own_key.to(dtype).mT
    logits, predicted = both.tensor_split([group], dim=1)

    gone, stays = lengths.new_empty(0), torch.ones_like(is_token[:, -1])
    if max(over):

        def at(states: torch.Tensor, new_states: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
            """What the tokens have at chosen places [R, n] of their heads."""
            inside = states[(starts[:, None] + chosen).clamp(max=stored - 1)]
            return torch.where(
                (chosen == new).view(*chosen.shape, *[1] * (states.ndim - 1)), new_states, inside
            )

        def scored(chosen: torch.Tensor) -> torch.Tensor:
            keys, values = at(cache.keys, own_key, chosen), at(cache.values, own_value, chosen)
            residuals = values.to(dtype) - mean_value - keys.to(dtype) @ prediction.mT
            scores = alpha.gather(1, chosen) * vector_norm(residuals, dim=-1)
            return scores.masked_fill(~is_token.gather(1, chosen), math.inf)

        alpha = logits.softmax(dim=-1).mean(dim=1)
        apart = predicted.neg()
        apart[..., new] += own_value[:, 0, :PROBED]
        for own, span in zip(apart, spans, strict=True):
            own[:, : span.stop - span.start] += cache.values[span, :PROBED].T
        apart -= mean_value[..., :PROBED].mT
        bounds = (alpha * norms_across(apart)).masked_fill(~is_token, math.inf)
        scores, chosen = lowest(bounds, scored, min(max(over), new + 1))
        leaves = ada_kv.leaving(
            scores.unflatten(0, (batch, heads)),
            at(cache.positions, position.flatten()[:, None], chosen).unflatten(0, (batch, heads)),
            cache.lengths + 1 - torch.tensor(floors, device=lengths.device)[:, None],
            over,
        )
        head, column = leaves.flatten(0, 1).nonzero(as_tuple=True)
        place = chosen[head, column]
        row, is_new = starts[head] + place, place == new
        gone, stays[head[is_new]] = row[~is_new], False
        _add(
            moments,
            head,
            *(
                torch.where(is_new[:, None], own[head, 0], states[row.clamp(max=stored - 1)])
                for own, states in ((own_key, cache.keys), (own_value, cache.values))
            ),
        )
        logits[head, :, place] = -math.inf

    evicted_value, evicted_logit = evicted_part(query.unflatten(1, (heads, -1)), moments)
    shares = torch.cat([logits, evicted_logit.flatten(0, 1)[..., None]], dim=-1).softmax(dim=-1)
    output = shares[..., new : new + 1] * own_value.to(dtype) + shares[..., -1:] * evicted_value.flatten(0, 1)
    add_sums(shares, cache.values, spans, output)
    return Decoded(output.reshape(*query.shape[:2], -1).to(query.dtype), gone, stays.view(batch, heads))


def _add(moments: Moments, head: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """MK-25 in place, for tokens with keys [n, D] and values [n, D_v] of some heads [n]."""
    count, *sums = (field.view(-1, *field.shape[2:]) for field in moments)
    keys, values = keys.to(sums[0].dtype), values.to(sums[0].dtype)
    count.index_add_(0, head, torch.ones_like(head))
    for total, new in zip(sums, (keys, values, values[:, :, None] * keys[:, None]), strict=True):
        total.index_add_(0, head, new)
