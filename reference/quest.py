r"""Quest (arXiv 2406.10774): all tokens stay in the cache, and each query attends to the pages whose
keys may score highest for it.

The paper is `assets/quest_paper.pdf` of the public code, mit-han-lab/Quest at commit 01c1623. What
the paper leaves open follows `quest/models/` and `quest/utils/controller.py` there.
"""

import numpy as np

from .attention import attention_logits, grouped, softmax
from .checks import as_count
from .contract import Mask, Real, Setting, contract
from .selection import top_k

METHOD = "evicts nothing: each later query attends to the pages with the highest bounds of q . k"
TRAITS = {"per_query"}


@contract
def select(
    query: Real[np.ndarray, "B H_q D"],
    keys: Real[np.ndarray, "B H_kv T D"],
    layer_index: Setting[int, ">= 0"],
    *,
    budget: Setting[int, ">= 1"],
    page_size: Setting[int, ">= 1"] = 16,
    skipped_layers: Setting[int, ">= 0"] = 2,
) -> Mask[np.ndarray, "B H_q T"]:
    r"""QU-3: the tokens that each query head attends to: those of the `budget // page_size` pages with
    the highest bounds, the last page among them.

    Args: query, of the last token; keys, its own included; layer_index, counted from 0: the first
    `skipped_layers` attend to all; budget, tokens for a head; page_size, tokens of a page. Source:
    section 3.4; the last page, and that it counts, as in the public code.
    """
    length = keys.shape[2]
    low, high = page_bounds(keys, page_size=page_size)
    # Decision: at least the last page, whatever the budget. A budget of all tokens is no choice: the
    # public code leaves a page out where T tokens fill no whole number of pages.
    pages = max(1, budget // page_size)
    if budget >= length or layer_index < skipped_layers:
        pages = low.shape[2]
    scores = bounds(query, low, high)
    last = np.broadcast_to(np.arange(low.shape[2]) == low.shape[2] - 1, scores.shape)
    return np.repeat(top_k(scores, pages, last), page_size, axis=-1)[..., :length]


@contract
def page_bounds(
    keys: Real[np.ndarray, "B H_kv T D"], *, page_size: Setting[int, ">= 1"] = 16
) -> tuple[Real[np.ndarray, "B H_kv P D"], Real[np.ndarray, "B H_kv P D"]]:
    r"""QU-1: `m_i = min k_i` and `M_i = max k_i` over the keys of a page, channel by channel.

    Token t is in page `t // page_size` of the P = ceil(T / page_size) pages, so the last may be shorter.
    Returns m and M. Source: Algorithm 1, of the keys of a page at once.
    """
    starts = np.arange(0, keys.shape[2], page_size)
    return np.minimum.reduceat(keys, starts, axis=2), np.maximum.reduceat(keys, starts, axis=2)


@contract
def append(
    low: Real[np.ndarray, "B H_kv P D"],
    high: Real[np.ndarray, "B H_kv P D"],
    key: Real[np.ndarray, "B H_kv D"],
    count: Setting[int, ">= 1"],
    *,
    page_size: Setting[int, ">= 1"] = 16,
) -> tuple[Real[np.ndarray, "B H_kv pages D"], Real[np.ndarray, "B H_kv pages D"]]:
    r"""QU-1: the bounds after one more token: the last page is widened, or a new page begins.

    Args: low and high, those so far; count, the tokens of the last page, 1 to page_size: a page of
    page_size tokens is full. Returns both, in new arrays: pages is P + 1 where a new page begins, and P
    otherwise. Source: Algorithm 1, "when inserting new token".
    """
    new, last = key[:, :, None], np.arange(low.shape[2])[:, None] == low.shape[2] - 1
    if as_count("count", count, low=1, high=page_size) == page_size:
        return np.concatenate([low, new], axis=2), np.concatenate([high, new], axis=2)
    return np.where(last, np.minimum(low, new), low), np.where(last, np.maximum(high, new), high)


@contract
def bounds(
    query: Real[np.ndarray, "B H_q D"],
    low: Real[np.ndarray, "B H_kv P D"],
    high: Real[np.ndarray, "B H_kv P D"],
) -> Real[np.ndarray, "B H_q P"]:
    r"""QU-2: `U = sum_i max(q_i m_i, q_i M_i)`, which no `q . k` of a key of the page exceeds.

    Args: low and high, from `page_bounds`. Returns bounds without the factor 1 / sqrt(D). Source:
    Algorithm 1 and section 3.4.
    """
    # Decision: each query head for itself, also where a group reads one KV head, as in
    # `evaluation/quest_attention.py`.
    products = grouped(query, low.shape[1])[..., None, :] * np.stack([low, high])[:, :, :, None]
    return products.max(axis=0).sum(axis=-1).reshape(*query.shape[:2], -1)


@contract
def attend(
    query: Real[np.ndarray, "B H_q D"],
    keys: Real[np.ndarray, "B H_kv T D"],
    values: Real[np.ndarray, "B H_kv T D_v"],
    attended: Mask[np.ndarray, "B H_q T"],
) -> Real[np.ndarray, "B H_q D_v"]:
    r"""QU-4: `softmax(q . k_t / sqrt(D)) V` over the
    tokens t that the query head attends to, and no others.

    Args: attended, from `select`, a token or more of each head. Source: section 3.4, "normal
    self-attention only on selected pages".
    """
    logits = attention_logits(grouped(query, keys.shape[1]), keys)
    weights = softmax(np.where(grouped(attended, keys.shape[1]), logits, -np.inf))
    return (weights @ values).reshape(*query.shape[:2], -1)
