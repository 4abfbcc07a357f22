"""Quantised keys and values behind any method: `+kivi`, `+hadamard` and `+fp8`.

A layer is quantised when it is compressed: of the tokens that stay, those that left the exact window since
the last time. What is quantised once stays as it is. The layer holds the numbers that packed codes give back,
and `saved` counts what these take less.

The state of a layer says which of its tokens are quantised, in their order, [B, H_kv, n]: `quantised.keys`
has the number of a key's group, 0 for an exact key, and `quantised.values` is True for a quantised value.
"""

from collections.abc import Mapping
from typing import Any

import torch

from evictionary.errors import UsageError, require
from evictionary.optimized import quantisation
from evictionary.optimized.cache import compress
from evictionary.policies import Compression, Policy, State
from evictionary.reference.quantisation import FP8, HADAMARD, KIVI

PACKED = (2, 4, 8)
"""The bits of a code that a cache takes: a byte is full of them, and a group has more than two numbers."""


class Quantisation(Policy):
    def serves(self, method: Any) -> bool:
        return bool(method.quantised)

    def opened(self, compression: Compression) -> State:
        """Nothing yet; UsageError for options that do not fit the channels of the layer."""
        for states in (compression.keys, compression.values):
            require_fitting(compression.method.quantised, compression.options, states.shape[-1])
        return {}

    def evicted(self, compression: Compression, kept: torch.Tensor) -> None:
        """Quantise what is kept and has left the window."""
        if not compression.is_final:
            return
        scheme, options = compression.method.quantised, compression.options
        keys, values = compression.keys.clone(), compression.values.clone()
        groups = _as_long(compression.state.get("quantised.keys"), kept).int()
        quantised = _as_long(compression.state.get("quantised.values"), kept).bool()
        window, group_size = options["residual"], options.get("group_size", 1)

        rank, waiting = _ranked(kept & (groups == 0))
        now = rank <= (waiting // window * window if scheme == KIVI else waiting - window)
        now &= rank > 0
        keys[now] = _keys_given_back(keys[now], scheme, options)
        groups = torch.where(now, groups.amax(dim=-1, keepdim=True) + 1 + (rank - 1) // group_size, groups)

        rank, waiting = _ranked(kept & ~quantised)
        now = (rank > 0) & (rank <= waiting - window)
        values[now] = _values_given_back(values[now], scheme, options)

        compression.compressed = compress(keys, values, kept)
        for name, entry in (("quantised.keys", groups.int()), ("quantised.values", quantised | now)):
            compression.state[name] = _in_front(entry, kept)

    def saved(
        self, method: Any, options: Mapping[str, Any], state: State, keys: torch.Tensor, values: torch.Tensor
    ) -> int:
        if "quantised.keys" not in state:
            return 0
        groups, quantised = state["quantised.keys"], state["quantised.values"]
        saved, each = 0, keys.element_size()
        for count, of_key in zip((groups > 0).sum(dim=-1).flatten().tolist(), _distinct(groups), strict=True):
            channels = keys.shape[-1]
            if method.quantised == KIVI:
                packed = channels * (_bytes(count, options["bits"]) + 2 * of_key * each)
            else:
                packed = count * _token_bytes(method.quantised, options, channels, each)
            saved += count * channels * each - packed
        channels = values.shape[-1]
        of_token = channels * each - _token_bytes(method.quantised, options, channels, each)
        return saved + int(quantised.sum()) * of_token


def require_fitting(scheme: str, options: Mapping[str, Any], channels: int | None = None) -> None:
    """Raise UsageError unless the options of a quantised cache fit one another and a number of channels."""
    least = 1 if scheme == KIVI else 0
    require(
        options["residual"] >= least,
        f"option residual: got {options['residual']}, wanted a whole number of at least {least}",
    )
    if scheme == FP8:
        return
    bits, group_size = options["bits"], options["group_size"]
    require(bits in PACKED, f"option bits: got {bits}, wanted one of {', '.join(map(str, PACKED))}")
    require(group_size >= 1, f"option group_size: got {group_size}, wanted a whole number of at least 1")
    require(
        scheme != KIVI or options["residual"] % group_size == 0,
        f"option residual: got {options['residual']}, wanted a multiple of group_size, {group_size}",
    )
    if channels is None:
        return
    require(
        channels % min(group_size, channels) == 0,
        f"option group_size: got {group_size}, wanted a divisor of the {channels} channels of a head",
    )
    require(
        scheme != HADAMARD or channels & (channels - 1) == 0,
        f"method: got +{HADAMARD} for heads of {channels} channels, wanted a power of two",
    )


def _keys_given_back(keys: torch.Tensor, scheme: str, options: Mapping[str, Any]) -> torch.Tensor:
    """Keys [M, D] of all heads in a row, each with whole groups, as their cache gives them back."""
    if scheme != KIVI or not len(keys):
        return _values_given_back(keys, scheme, options)
    blocks = keys.unflatten(0, (-1, options["group_size"]))
    return _rounded(quantisation.by_channel, blocks, options).flatten(0, 1)


def _values_given_back(values: torch.Tensor, scheme: str, options: Mapping[str, Any]) -> torch.Tensor:
    """Values [M, D_v] as their cache gives them back."""
    if not len(values):
        return values
    if scheme == FP8:
        return _rounded(quantisation.fp8, values, {})
    return _rounded(quantisation.rotated if scheme == HADAMARD else quantisation.by_token, values, options)


def _rounded(function: Any, states: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
    try:
        return function(states, **{name: options[name] for name in ("bits", "group_size") if name in options})
    except ValueError as error:
        raise UsageError(str(error)) from None


def _as_long(entry: torch.Tensor | None, kept: torch.Tensor) -> torch.Tensor:
    """An entry of the state [B, H_kv, n] for all places [B, H_kv, N]: those that came since are exact."""
    if entry is None:
        return torch.zeros_like(kept)
    return torch.nn.functional.pad(entry, (0, kept.shape[-1] - entry.shape[-1]))


def _in_front(entry: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """The entries of the kept places, in their order, with 0 behind those of a shorter head."""
    order = kept.int().argsort(dim=-1, descending=True, stable=True)[..., : int(kept.sum(dim=-1).max())]
    return (entry * kept).gather(-1, order)


def _ranked(waiting: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The place of each token among those that wait, from 1, and 0 for the others; how many wait."""
    rank = waiting.cumsum(dim=-1)
    return rank * waiting, rank[..., -1:]


def _distinct(groups: torch.Tensor) -> list[int]:
    """How many groups each head has a key of: their two numbers stay until the last key goes."""
    in_order = torch.nn.functional.pad(groups.flatten(0, 1).sort(dim=-1).values, (1, 0))
    return (in_order.diff(dim=-1) != 0).sum(dim=-1).tolist()


def _token_bytes(scheme: str, options: Mapping[str, Any], channels: int, each: int) -> int:
    """The bytes of one token of one head in codes."""
    if scheme == FP8:
        return channels + each
    return _bytes(channels, options["bits"]) + 2 * channels // min(options["group_size"], channels) * each


def _bytes(count: int, bits: int) -> int:
    """The bytes of a row of codes."""
    return -(-count * bits // 8)
