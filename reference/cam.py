r"""CaM (PMLR 235:58840-58850), an addition: the value of an evicted token may live on in the values of
the next kept tokens.

Only the paper's abstract could be read. The definition follows the formula and the algorithm that
`cam_press.py` of NVIDIA/kvpress, commit 8bb29b9, cites from it, and the authors' public code,
zyxxmu/cam, commit fc80e64.
"""

import numpy as np

from .contract import Mask, Real, Setting, Share, Weight, contract

INPUTS = {
    "attention": ("queries", "[B, H_kv, T], received from the queries since the last compression (CAM-2)"),
    "kept": ("", "[B, H_kv, T], boolean, what stays: an addition reads it, and no method"),
    "draws": ("queries", "[B, H_kv, T], uniform in [0, 1), seeded (CAM-4)"),
}


@contract
def merge_values(
    values: Real[np.ndarray, "B H_kv T D_v"],
    attention: Weight[np.ndarray, "B H_kv T"],
    kept: Mask[np.ndarray, "B H_kv T"],
    draws: Share[np.ndarray, "B H_kv T"],
    *,
    merge_size: Setting[int, ">= 1"] = 32,
) -> Real[np.ndarray, "B H_kv T D_v"]:
    r"""CAM-4: `v_j + sum_i M_i S_ij v_i` with `M_i = [u_i < p_i]`: an evicted value is merged with
    probability p_i, or lost.

    Args: attention, what each token has received; kept, any number in a head; draws u, uniform in [0, 1);
    merge_size m, the kept tokens that share a value. Returns the values, those of evicted tokens as they
    were; the keys stay. Source: the merge mask of the paper, a Bernoulli variable.
    """
    merged = draws < probabilities(attention, kept, merge_size=merge_size)
    return spread(values, kept, merged.astype(np.float64), merge_size=merge_size)


@contract
def shares(
    kept: Mask[np.ndarray, "... T"], *, merge_size: Setting[int, ">= 1"] = 32
) -> Share[np.ndarray, "... T T"]:
    r"""CAM-1: `S_ij = 1 / m_i` if j is one of the next m kept tokens after the evicted token i, of
    which there are m_i, and 0 otherwise.

    Args: merge_size m. A row sums to 1, or to 0 for a kept token and where no kept token comes later.
    """
    before = np.cumsum(kept, axis=-1)
    place = before[..., None, :] - before[..., :, None]  # of a later kept token j: 1 for the next one
    is_near = (place > 0) & (place <= merge_size)
    receives = is_near & kept[..., None, :] & ~kept[..., :, None]
    # Decision: near the end of a text fewer than m tokens share a value; the authors' code divides
    # by m there too.
    return receives / np.maximum(receives.sum(axis=-1, keepdims=True), 1)


@contract
def probabilities(
    attention: Weight[np.ndarray, "... T"],
    kept: Mask[np.ndarray, "... T"],
    *,
    merge_size: Setting[int, ">= 1"] = 32,
) -> Share[np.ndarray, "... T"]:
    r"""CAM-2: `p_i = min(1, A_i / sum_j S_ij A_j)`, the attention of an evicted token beside the mean
    of the tokens that would share its value.

    Args: attention A. Returns 0 for a kept token and where no kept token comes later. Source: the paper's
    clamp to [0, 1].
    """
    share = shares(kept, merge_size=merge_size)
    mean = (share @ attention[..., None])[..., 0]
    # Decision: beside a mean of 0 any attention is enough, and none is not.
    ratio = np.where(mean > 0, attention / np.where(mean > 0, mean, 1), attention > 0)
    return np.where(share.any(axis=-1), np.minimum(ratio, 1), 0)


@contract
def spread(
    values: Real[np.ndarray, "... T D_v"],
    kept: Mask[np.ndarray, "... T"],
    weights: Share[np.ndarray, "... T"],
    *,
    merge_size: Setting[int, ">= 1"] = 32,
) -> Real[np.ndarray, "... T D_v"]:
    r"""CAM-3: `v_j + sum_i w_i S_ij v_i`: the tokens
    after an evicted one share the part w_i of its value.

    With w = p this is the expectation of CAM-4, for which nothing has to be drawn.

    Args: weights w; those of kept tokens do not count.
    """
    # Decision: all tokens that go merge their own values at once; the paper evicts one at a time, so
    # a receiver that goes later passes on what it got.
    received = weights[..., None] * shares(kept, merge_size=merge_size)
    return values + np.swapaxes(received, -1, -2) @ values
