r"""Quest (arXiv 2406.10774): all tokens stay in the cache, and each query attends to the pages whose keys may
score highest for it.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from evictionary.reference.checks import as_count

from . import kernels
from .attention import grouped_logits
from .checks import fits, working_dtype
from .operators import operator
from .selection import top_k
from .softmax import PLAIN, current, weights


@operator()
@fits()
@torch.no_grad()
def select(
    query: torch.Tensor,
    keys: torch.Tensor,
    layer_index: int,
    *,
    budget: int,
    page_size: int = 16,
    skipped_layers: int = 2,
) -> torch.Tensor:
    r"""QU-3: the tokens that each query head attends to: those of the `budget // page_size` pages with the
    highest bounds, the last page among them.

    Args: query, of the last token; keys, its own included; layer_index, counted from 0: the first
    `skipped_layers` attend to all; budget, tokens for a head; page_size, tokens of a page. Returns
    [B, H_q, T], boolean. Raises ValueError naming the argument, and on a CPU for NaN or infinite numbers.
    """
    length = keys.shape[2]
    low, high = page_bounds(keys, page_size=page_size)
    # Decision: at least the last page, whatever the budget; a budget of all tokens is no choice.
    pages = max(1, budget // page_size)
    if budget >= length or layer_index < skipped_layers:
        pages = low.shape[2]
    scores = bounds(query, low, high)
    last = torch.arange(low.shape[2], device=keys.device) == low.shape[2] - 1
    return top_k(scores, pages, last.expand(scores.shape)).repeat_interleave(page_size, dim=-1)[..., :length]


@operator("keys", "keys")
@fits()
def page_bounds(keys: torch.Tensor, *, page_size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    r"""QU-1: `m_i = min k_i` and `M_i = max k_i` over the keys of a page, channel by channel.

    Token t is in page `t // page_size`, so the last may be shorter. Returns m and
    M, [B, H_kv, P, D] with P = ceil(T / page_size), in the dtype of keys. Raises
    ValueError naming the argument, and on a CPU for NaN or infinite numbers.
    """
    return page_bounds_trusted(keys, page_size)


def page_bounds_trusted(keys: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`page_bounds` without a look at its arguments."""
    length = keys.shape[2]
    parts = [part for part in keys.tensor_split([length // size * size], dim=2) if part.shape[2]]
    found = [part.unflatten(2, (-1, min(size, part.shape[2]))).aminmax(dim=3) for part in parts]
    return torch.cat([each.min for each in found], dim=2), torch.cat([each.max for each in found], dim=2)


@operator("low", "high")
@fits()
def append(
    low: torch.Tensor, high: torch.Tensor, key: torch.Tensor, count: int, *, page_size: int = 16
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""QU-1: the bounds after one more token: the last page is widened, or a new page begins.

    Args: low and high, those so far; count, the tokens of the last page, up to page_size: a page of page_size
    tokens is full. Returns both, in new tensors. Raises ValueError naming the argument, and on a CPU for NaN
    or infinite numbers.
    """
    new, pages = key[:, :, None], torch.arange(low.shape[2], device=low.device)[:, None]
    if as_count("count", count, low=1, high=page_size) == page_size:
        return torch.cat([low, new], dim=2), torch.cat([high, new], dim=2)
    is_last = pages == low.shape[2] - 1
    return torch.where(is_last, low.minimum(new), low), torch.where(is_last, high.maximum(new), high)


@operator()
@fits()
def bounds(query: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    r"""QU-2: `U = sum_i max(q_i m_i, q_i M_i)`, which no `q . k` of a key of the page exceeds.

    A positive channel of the query takes the maximum and a negative one the minimum, so U is the sum of two
    products of matrices.

    Args: low and high, low at most high. Returns [B, H_q, P], without the factor 1 / sqrt(D), in float32
    (float64 for float64). Raises ValueError naming the argument, and on a CPU for NaN or infinite numbers.
    """
    return bounds_trusted(query, low, high)


def bounds_trusted(query: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """`bounds` without a look at its arguments."""
    if kernels.take("quest", query, low, high):
        return kernels.quest.bounds(query, low, high)
    rows = query.to(working_dtype(query)).unflatten(1, (low.shape[1], -1))
    # Decision: each query head for itself, also where a group reads one KV head.
    return (rows.clamp(min=0) @ high.to(rows).mT + rows.clamp(max=0) @ low.to(rows).mT).flatten(1, 2)


@operator("values")
@fits()
def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, attended: torch.Tensor
) -> torch.Tensor:
    r"""QU-4: `softmax(q . k_t / sqrt(D)) V` over the tokens t that the query head attends to, and no others.

    It computes all logits and masks, so it shows what Quest answers and saves no time.

    Args: attended, from `select`, a token or more of each head. Returns [B, H_q, D_v] in the dtype of query.
    Raises ValueError naming the argument, and on a CPU for NaN or infinite numbers.
    """
    return attend_trusted(query, keys, values, attended)


def attend_trusted(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, attended: torch.Tensor
) -> torch.Tensor:
    """`attend` without a look at its arguments. The query heads of a group read keys and values once."""
    if current() == PLAIN and keys.dtype == working_dtype(keys):  # one call, whose weights are as exact
        rows, chosen = (each.unflatten(1, (keys.shape[1], -1)) for each in (query, attended))
        return scaled_dot_product_attention(rows, keys, values, attn_mask=chosen).flatten(1, 2)
    logits = grouped_logits(query[:, :, None], keys).squeeze(3)
    shares = weights(logits.masked_fill_(~attended.view(logits.shape), -torch.inf))
    return (shares @ values.to(shares)).flatten(1, 2).to(query.dtype)


class Pages:
    """The bounds of the pages of a cache that grows (QU-1): each page is read when it is complete, and the
    last one with each token.
    """

    def __init__(self, keys: torch.Tensor, page_size: int) -> None:
        """Of keys [B, H_kv, T, D]."""
        self.page_size, self.complete = page_size, 0
        # [2, B, H_kv, room, D]: the lowest, and the highest
        self._bounds = keys.detach().new_empty(2, *keys.shape[:2], 0, keys.shape[3])

    def update(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The bounds of keys [B, H_kv, T, D], of which the complete pages seen before are as they were."""
        keys, size, pages = keys.detach(), self.page_size, -(-keys.shape[2] // self.page_size)
        is_fixed = self._bounds.is_inference() and not torch.is_inference_mode_enabled()
        if pages > self._bounds.shape[3] or is_fixed:  # the room doubles, so pages are seldom copied
            grown = self._bounds.new_empty(*self._bounds.shape[:3], 2 * pages, keys.shape[3])
            grown[:, :, :, : self.complete] = self._bounds[:, :, :, : self.complete]
            self._bounds = grown
        new, places = keys[:, :, self.complete * size :], slice(self.complete, pages)
        is_one = pages == self.complete + 1
        fresh = new.aminmax(dim=2, keepdim=True) if is_one else page_bounds_trusted(new, size)
        for bounds, each in zip(self._bounds, fresh, strict=True):
            bounds[:, :, places] = each
        self.complete = keys.shape[2] // size
        low, high = self._bounds[:, :, :, :pages]
        return low, high


def attend_pages(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pages: Pages, budget: int
) -> torch.Tensor:
    r"""QU-2..4 for a cache that decodes: `attend` over what `select` chooses, in a layer that chooses.

    Args: query [B, H_q, D]; keys [B, H_kv, T, D] and values [B, H_kv, T, D_v], the new token's included;
    pages, of the tokens before; budget below T. Nothing is checked. Returns [B, H_q, D_v].

    It reads all keys, and is no faster for that: the query heads of a group choose different pages, so at
    half of the tokens they read a KV head one and a half times, where a full cache reads it once.
    """
    with torch.no_grad():  # a choice has no gradient
        scores = bounds_trusted(query, *pages.update(keys))
        # the last page, and the best others: of equal ones the first
        best = scores[..., :-1].argsort(dim=-1, descending=True, stable=True)
        best = best[..., : max(1, budget // pages.page_size) - 1]
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
        chosen[..., -1] = True
    attended = chosen.repeat_interleave(pages.page_size, dim=-1)[..., : keys.shape[2]]
    return attend_trusted(query, keys, values, attended)
