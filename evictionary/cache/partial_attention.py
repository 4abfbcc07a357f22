"""Attention over a cache in parts: ragged heads, later tokens, and the moments of evicted tokens, weighted
by their mass.

Each part gives its output and the log-sum-exp of its logits. The attention over all parts is the mean of the
outputs, weighted by exp(log-sum-exp). On a GPU, two kernels do this for all parts at once.
"""

import math
from collections.abc import Iterable

import torch

from evictionary.cache.layers import EvictingLayer
from evictionary.optimized import attention, gradients, kernels
from evictionary.optimized.checks import working_dtype
from evictionary.optimized.softmax import PLAIN, Softmax
from evictionary.optimized.states import Moments
from evictionary.policies import Policy

Part = tuple[torch.Tensor, torch.Tensor]


def attend(
    queries: torch.Tensor, layer: EvictingLayer, policies: Iterable[Policy] = (), softmax: Softmax = PLAIN
) -> torch.Tensor:
    """The attention of the layer's last M tokens over all
    stored tokens and, with moments, over the evicted ones.

    Args: queries [B, H_q, M, D], scaled so that the logits are `q . k / sqrt(D)`; layer, with the M tokens
    already appended; policies, of which one gives the part of the moments; softmax, the model's: a sink is
    one more part, of output 0. Returns [B, H_q, M, D_v] in the dtype of queries.
    """
    keys, values = layer.slots()
    moments = layer.moments
    is_float32 = moments is None or moments.key_sum.dtype == torch.float32
    # beside ragged heads the kernel has no place for a bias
    fits = (
        is_float32
        and keys.dtype == queries.dtype
        and softmax.cap is None
        and (layer.bias is None or layer.ragged is None)
    )
    parts = []
    beside = layer.ragged, moments, layer.bias
    if fits and kernels.take("attention", queries, keys, values, beside=beside):
        recent = (keys, values) if layer.stored else None
        parts.append(
            kernels.attention.attend(queries, layer.ragged, recent, moments, layer.plans, bias=layer.bias)
        )
        moments = None
    elif queries.shape[2] == 1 and not gradients.are_wanted(queries, keys, values, layer.ragged, moments):
        return attend_token(queries, layer, _beside(queries, values, moments, policies, softmax), softmax.cap)
    elif layer.ragged is not None and softmax.cap is not None:
        # padded: the attention over flat heads has no cap
        keys, values, _, filled = layer.contents()
        parts.append(attend_dense(queries, keys, values, filled, softmax.cap))
    else:
        if layer.stored:
            parts.append(attend_dense(queries, keys, values, cap=softmax.cap, bias=layer.bias))
        if layer.ragged is not None:
            parts.append(attention.attend_trusted(queries, layer.ragged))
    return mix(parts + _beside(queries, values, moments, policies, softmax)).to(queries.dtype)


def _beside(
    queries: torch.Tensor,
    values: torch.Tensor,
    moments: Moments | None,
    policies: Iterable[Policy],
    softmax: Softmax,
) -> list[Part]:
    """The parts beside the stored tokens: the evicted ones in their moments, and the model's sink."""
    found = [] if moments is None else [policy.part(queries, moments) for policy in policies]
    parts = [part for part in found if part is not None]
    if softmax.sinks is not None:
        sinks = softmax.sinks.to(queries).float()[:, None].expand(queries.shape[:3])
        parts.append((sinks.new_zeros(*queries.shape[:3], values.shape[-1]), sinks))
    return parts


def attend_token(
    queries: torch.Tensor, layer: EvictingLayer, beside: list[Part], cap: float | None = None
) -> torch.Tensor:
    """`attend` for one token, which decodes: the logits of all parts stand in one row, so one softmax does.

    The places of a row: the ragged tokens of its head, those since, and one for each part `beside`. Keys and
    values are read once for all query heads of a group, and nothing of the cache is copied. Args: queries
    [B, H_q, 1, D]; the others as in `attend`.
    """
    keys, values = (states.flatten(0, 1) for states in layer.slots())
    dtype, ragged = working_dtype(queries), layer.ragged_slots
    rows = queries.to(dtype).reshape(len(keys), -1, queries.shape[-1]) / math.sqrt(queries.shape[-1])
    spans = attention.rows_of_heads(ragged) if ragged is not None else []
    start = layer.longest - layer.stored
    end = layer.longest
    logits = rows.new_full((*rows.shape[:2], end + len(beside)), -math.inf)
    if ragged is not None:
        attention.products(rows, ragged.keys, spans, logits)
    torch.bmm(rows, keys.to(dtype).mT, out=logits[..., start:end])
    if cap is not None:
        absent = logits == -math.inf  # behind the tokens of a short head: a cap would make a logit of it
        logits = (cap * (logits / cap).tanh()).masked_fill(absent, -math.inf)
    if layer.bias is not None:
        bias = layer.bias.flatten(0, 1)[:, None]
        logits[..., start : start + bias.shape[-1]] += bias
    for place, (_, log_sum_exp) in enumerate(beside, end):
        logits[..., place] = log_sum_exp.reshape(rows.shape[:2])
    weights = logits.softmax(dim=-1)
    output = weights[..., start:end] @ values.to(dtype)
    if ragged is not None:
        attention.add_sums(weights, ragged.values, spans, output)
    for place, (own, _) in enumerate(beside, end):
        output += weights[..., place, None] * own.reshape(output.shape)
    return output.reshape(*queries.shape[:3], -1).to(queries.dtype)


def attend_dense(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    filled: torch.Tensor | None = None,
    cap: float | None = None,
    bias: torch.Tensor | None = None,
) -> Part:
    """Output and log-sum-exp of M causal queries over keys [B, H_kv, T, D]; the last M keys are the
    queries' own tokens.

    filled [B, H_kv, T] is False where there is no token; cap is that of the logits; bias
    [B, H_kv, n] is added to those of the first n keys.
    """
    batch, num_query_heads, num_queries, head_dim = queries.shape
    num_kv_heads, length = keys.shape[1:3]
    # rows: a group's query heads, and their queries
    grouped = queries.float().reshape(batch, num_kv_heads, -1, head_dim)
    logits = (grouped @ keys.float().mT / math.sqrt(head_dim)).view(
        batch, num_kv_heads, -1, num_queries, length
    )
    if cap is not None:
        absent = logits == -math.inf  # behind the tokens of a short head: a cap would make a logit of it
        logits = (cap * (logits / cap).tanh()).masked_fill(absent, -math.inf)
    if bias is not None:
        logits[..., : bias.shape[-1]] += bias[:, :, None, None]
    if num_queries > 1:
        logits = logits.masked_fill(~causal(num_queries, length, keys.device), -math.inf)
    if filled is not None:
        logits = logits.masked_fill(~filled[:, :, None, None], -math.inf)
    log_sum_exp = logits.logsumexp(dim=-1)
    weights = (logits - log_sum_exp[..., None]).exp().flatten(2, 3)
    output = weights @ values.float()
    return output.reshape(batch, num_query_heads, num_queries, -1), log_sum_exp.reshape(
        batch, num_query_heads, num_queries
    )


def causal(num_queries: int, length: int, device: torch.device) -> torch.Tensor:
    """The causal mask [M, T] of the last M tokens: True
    where a token attends, at everything stored up to itself.
    """
    places = torch.arange(length, device=device)
    return places <= places[length - num_queries :, None]


def mix(parts: list[Part]) -> torch.Tensor:
    """MK-2, ATT-3: the outputs weighted by the softmax of
    their log-sum-exps. An empty part has -inf and no weight.
    """
    if len(parts) == 1:
        return parts[0][0]
    weights = torch.stack([log_sum_exp.float() for _, log_sum_exp in parts]).softmax(dim=0)
    return (weights[..., None] * torch.stack([output.float() for output, _ in parts])).sum(dim=0)
