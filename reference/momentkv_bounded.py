r"""A correction that is never worse: bounds of what
the evicted tokens can have given, beside MomentKV.

Derived here, from no paper. Two more rows of keys and two of values per head, the least and the
largest number of each channel of the evicted tokens, and the moments of `momentkv.py` enclose the
output of full attention in a box. MomentKV's output outside the box moves to its nearest point,
and its correction shrinks as far as the box cannot show that it helps.
E is the evicted set, R the retained one; logits are `s_i = q . k_i / sqrt(d)`.
"""

from typing import NamedTuple

import numpy as np

from .attention import attention_logits, grouped
from .contract import Mask, Open, Real, State, contract
from .momentkv import (
    Moments,
    approximate_evicted,
    log_evicted_partition,
    log_mixing_weights,
    recover,
    retained_attention,
)

# sinh(40) = 1e17: the radius of MB-4 then exceeds the box of the values up to 1e34 evicted tokens.
LARGEST_REACH = 40.0


class Bounds(NamedTuple):
    r"""MB-1: the least and the largest number of each channel of the evicted keys and values.

    Where nothing was evicted, low is infinity and high minus infinity. They are exact in the dtype
    of the cache.
    """

    key_low: Open[np.ndarray, "D"]
    key_high: Open[np.ndarray, "D"]
    value_low: Open[np.ndarray, "D_v"]
    value_high: Open[np.ndarray, "D_v"]


@contract
def no_bounds(
    keys: Real[np.ndarray, "... T D"], values: Real[np.ndarray, "... T D_v"]
) -> State[Bounds, "..."]:
    r"""MB-1: the bounds of the empty set, for these keys and values."""
    key_high, value_high = (np.full_like(states[..., 0, :], -np.inf) for states in (keys, values))
    return Bounds(-key_high, key_high, -value_high, value_high)


@contract
def update(
    bounds: State[Bounds, "..."],
    keys: Real[np.ndarray, "... T D"],
    values: Real[np.ndarray, "... T D_v"],
    evicted: Mask[np.ndarray, "... T"],
) -> State[Bounds, "..."]:
    r"""MB-1: `low = min(low, k_j)`, `high = max(high, k_j)`
    for every evicted token j; values alike.

    Args: bounds, before; evicted, True = evicted now. Returns the Bounds after.
    """
    gone = evicted[..., None]
    key_low, value_low = (np.where(gone, states, np.inf).min(axis=-2) for states in (keys, values))
    key_high, value_high = (np.where(gone, states, -np.inf).max(axis=-2) for states in (keys, values))
    return Bounds(
        np.minimum(bounds.key_low, key_low),
        np.maximum(bounds.key_high, key_high),
        np.minimum(bounds.value_low, value_low),
        np.maximum(bounds.value_high, value_high),
    )


def logit_range(
    query: Real[np.ndarray, "B H_kv D"], bounds: State[Bounds, "B H_kv"]
) -> tuple[Real[np.ndarray, "B H_kv"], Real[np.ndarray, "B H_kv"]]:
    r"""MB-2: `m <= s_i <= M` for every evicted i, with
    `m = sum_c min(q_c low_c, q_c high_c) / sqrt(d)`.

    M has max in place of min. Proof: q_c k_ic is linear in k_ic, so it lies between its values at
    the ends of channel c; add the channels.
    Args: finite bounds. Returns m and M.
    """
    ends = query * bounds.key_low, query * bounds.key_high
    root = np.sqrt(query.shape[-1])
    return np.minimum(*ends).sum(axis=-1) / root, np.maximum(*ends).sum(axis=-1) / root


def log_partition_bounds(
    query: Real[np.ndarray, "B H_kv D"], moments: State[Moments, "B H_kv"], bounds: State[Bounds, "B H_kv"]
) -> tuple[Open[np.ndarray, "B H_kv"], Open[np.ndarray, "B H_kv"]]:
    r"""MB-3: `n e^sbar <= Z_E <= n ((1 - p) e^m + p e^M)`,
    with `p = (sbar - m) / (M - m)`; as logarithms.

    Proof: below, Jensen (MK-11). Above, exp is convex, so on [m, M] it lies below its chord:
    `e^s <= e^m + (s - m) (e^M - e^m) / (M - m)`. Add up over the evicted tokens: s becomes sbar.
    Both are -inf where nothing was evicted.
    """
    lower = log_evicted_partition(query, moments)
    least, largest = logit_range(query, _finite(bounds, moments))
    log_count = np.log(np.maximum(moments.count, 1))
    spread = largest - least
    mean_logit = np.where(moments.count > 0, lower - log_count, 0)
    share = np.clip((mean_logit - least) / np.where(spread > 0, spread, 1), 0, 1)
    with np.errstate(divide="ignore"):  # p may round to 0; Jensen's bound is larger then
        chord = log_count + largest + np.log(share + (1 - share) * np.exp(-spread))
    return lower, np.where(moments.count > 0, np.maximum(chord, lower), -np.inf)


def evicted_bounds(
    query: Real[np.ndarray, "B H_kv D"], moments: State[Moments, "B H_kv"], bounds: State[Bounds, "B H_kv"]
) -> tuple[Real[np.ndarray, "B H_kv D_v"], Real[np.ndarray, "B H_kv D_v"]]:
    r"""MB-4: a box that holds f_E: in [low, high] and
    `|f_E - vbar| <= a sinh((M - m) / 2)`, by channel.

    `a = sqrt((high - vbar) (vbar - low))`. Proof: f_E is a mean of the v_i with weights p_i, so it
    is in [low, high]. And `f_E - vbar = sum (p_i - 1/n) (v_i - vbar)`, at most
    `sqrt(n sum (p_i - 1/n)^2) std(v)` by Cauchy-Schwarz. Numbers in [l, h] of mean x have a
    variance of at most (h - x)(x - l) (Bhatia and Davis), so `std(v) <= a`; and for `n p_i`, of
    mean 1, with h = e^(M - m) l, this is at most `(h - l)^2 / (4 h l) = sinh^2((M - m) / 2)`, its
    largest over l.
    Returns low and high, 0 where nothing was evicted.
    """
    bounds = _finite(bounds, moments)
    low, high = bounds.value_low, bounds.value_high
    mean = np.clip(recover(moments).mean_value, low, high)
    least, largest = logit_range(query, bounds)
    reach = np.sinh(np.minimum((largest - least) / 2, LARGEST_REACH))[..., None]
    radius = np.sqrt((high - mean) * (mean - low)) * reach
    return np.maximum(low, mean - radius), np.minimum(high, mean + radius)


def bounded_evicted(
    query: Real[np.ndarray, "B H_kv D"], moments: State[Moments, "B H_kv"], bounds: State[Bounds, "B H_kv"]
) -> Real[np.ndarray, "B H_kv D_v"]:
    r"""MB-5: MomentKV's fhat_E (MK-9) moved to the nearest point of the box of MB-4.

    Never farther from f_E than fhat_E is, for the box is convex and holds f_E. Proof: channel by
    channel, a number that moves to the near end of an interval approaches all of the interval.
    """
    return np.clip(approximate_evicted(query, moments), *evicted_bounds(query, moments, bounds))


@contract
def attend(
    query: Real[np.ndarray, "B H_q D"],
    keys: Real[np.ndarray, "B H_kv T D"],
    values: Real[np.ndarray, "B H_kv T D_v"],
    kept: Mask[np.ndarray, "B H_kv T"],
    moments: State[Moments, "B H_kv"],
    bounds: State[Bounds, "B H_kv"],
) -> Real[np.ndarray, "B H_q D_v"]:
    r"""MB-6: MomentKV's output (MK-12) moved to the nearest point of the box that holds f.

    `f - f_R = w_E (f_E - f_R)` (MK-4), with `w_E = Z_E / (Z_R + Z_E)` between the weights that MB-3
    gives, w and W, and f_E in [l, h] (MB-4). A product is extreme at the ends, so f is in the box
    `f_R + [min(w a, W a), max(w b, W b)]`, `a = l - f_R`, `b = h - f_R`, channel by channel. The
    nearest point is never farther from f than MomentKV's output is (as in MB-5), whatever the
    queries, keys and values. It is no promise that it is better than f_R: see `attend_certified`.
    Args: as `momentkv.attend`, and bounds of the same evicted tokens.
    """
    from_retained, correction, low, high = _parts(query, keys, values, kept, moments, bounds)
    return _by_query_head(from_retained + np.clip(correction, low, high))


@contract
def attend_certified(
    query: Real[np.ndarray, "B H_q D"],
    keys: Real[np.ndarray, "B H_kv T D"],
    values: Real[np.ndarray, "B H_kv T D_v"],
    kept: Mask[np.ndarray, "B H_kv T"],
    moments: State[Moments, "B H_kv"],
    bounds: State[Bounds, "B H_kv"],
) -> Real[np.ndarray, "B H_q D_v"]:
    r"""MB-7: as much of the correction u of MB-6 as cannot hurt: never farther from f than f_R is.

    `|f_R + t u - f| <= |f_R - f|` holds exactly if `t |u|^2 / 2 <= u . (f - f_R)`. The right side
    is at least `g = sum_c min(u_c low_c, u_c high_c)`, attained at a corner of the box of MB-6. So
    `t = min(1, max(0, 2 g / |u|^2))` never hurts, and a larger t up to 1 would hurt at that corner.
    At last the point moves to the nearest one of the box, which approaches f again. If f_R is in
    the box, f may be f_R for all that the box says: no move is safe, and indeed g <= 0 and t = 0.
    Args, returns and raises as `attend`.
    """
    from_retained, correction, low, high = _parts(query, keys, values, kept, moments, bounds)
    step = np.clip(correction, low, high)
    gain = np.minimum(step * low, step * high).sum(axis=-1, keepdims=True)
    length = (step * step).sum(axis=-1, keepdims=True)
    scale = np.clip(2 * gain / np.where(length > 0, length, 1), 0, 1)
    return _by_query_head(from_retained + np.clip(scale * step, low, high))


def _parts(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    kept: np.ndarray,
    moments: Moments,
    bounds: Bounds,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """f_R, MomentKV's correction of it, and the box of f - f_R, low and high; [B, H_kv, G, D_v]."""
    for name, field in bounds._asdict().items():
        if (~np.isfinite(field).all(axis=-1) & (moments.count > 0)).any():
            raise ValueError(f"bounds.{name}: got infinite bounds of evicted tokens, wanted `update`'s")
    queries = grouped(query, keys.shape[1])
    logits = attention_logits(queries, keys)
    from_retained, log_retained = retained_attention(logits, values, kept[..., None, :])
    # One more axis: the query heads of a group share the evicted tokens.
    moments = Moments(*(field[:, :, None] for field in moments))
    bounds = Bounds(*(field[:, :, None] for field in bounds))
    least, largest = (
        np.exp(log_mixing_weights(log_retained, log_evicted)[1])[..., None]
        for log_evicted in log_partition_bounds(queries, moments, bounds)
    )
    correction = least * (approximate_evicted(queries, moments) - from_retained)
    low, high = (end - from_retained for end in evicted_bounds(queries, moments, bounds))
    low, high = np.minimum(least * low, largest * low), np.maximum(least * high, largest * high)
    return from_retained, correction, low, high


def _by_query_head(output: np.ndarray) -> np.ndarray:
    return output.reshape(output.shape[0], -1, output.shape[-1])


def _finite(bounds: Bounds, moments: Moments) -> Bounds:
    """The bounds with 0 where nothing was evicted: infinity times 0 would be NaN."""
    return Bounds(*(np.where(moments.count[..., None] > 0, field, 0) for field in bounds))
