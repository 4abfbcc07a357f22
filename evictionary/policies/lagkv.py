"""LagKV in a cache, and every method that compresses each token once (TRAITS = {"recursive"}), or solves
for a keep_ratio.

The state is `static`: the tokens of each row that have been
compressed, or are sinks, and are left alone from now on.
"""

import inspect
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

import torch

from evictionary.errors import UsageError
from evictionary.optimized import gradients, lagkv
from evictionary.policies import Compression, Policy, State


class LagKV(Policy):
    def serves(self, method: Any) -> bool:
        return "recursive" in method.traits or _solver(method) is not None

    def opened(self, compression: Compression) -> State:
        """Only the sinks, in a cache that compresses again."""
        is_recursive = compression.every and "recursive" in compression.method.traits
        return {"static": [compression.options["sink_size"]] * len(compression.keys)} if is_recursive else {}

    def keeps_all(self, method: Any, options: Mapping[str, Any], state: State, stored: int) -> bool | None:
        """LK-12: a partition is compressed once the next one is complete."""
        return stored < min(state["static"]) + 2 * options["lag_size"] if "static" in state else None

    def arguments(
        self,
        method: Any,
        options: Mapping[str, Any],
        state: State,
        length: int,
        amount: int,
        removed: float,
        row: int,
    ) -> dict[str, Any]:
        """LK-13: the fraction of a partition that stays meets the budget of a prompt; what is static counts
        among the sinks.

        Partitions that come one after another all keep the same fraction.
        """
        found = {"keep_ratio": _keep_ratio(method, options, state, length, amount, removed)}
        return found | ({"sink_size": state["static"][row]} if "static" in state else {})

    def fused(self, compression: Compression) -> Callable[..., torch.Tensor] | None:
        """LK-12 and CACHE-1 at once: the pass that chooses the tokens copies them. Copies with a graph are
        made apart, for a choice has none.
        """
        is_graph = gradients.are_wanted(compression.keys, compression.values)
        if compression.method.function is not lagkv.select or compression.method.corrected or is_graph:
            return None

        def select(keys: torch.Tensor, values: torch.Tensor, **options: Any) -> torch.Tensor:
            compression.compressed = lagkv.compress(keys, values, **options)
            kept = torch.zeros(keys.shape[:3], dtype=torch.bool, device=keys.device)
            return kept.scatter_(2, compression.compressed.positions.view(*keys.shape[:2], -1), True)

        return select

    def evicted(self, compression: Compression, kept: torch.Tensor) -> None:
        """LK-R: the partitions that were compressed are left alone with the tokens before them."""
        if "static" not in compression.state:
            return
        options, filled = compression.options, compression.filled
        lengths = [kept.shape[2]] * len(kept) if filled is None else filled[:, 0].sum(dim=-1).tolist()
        keep_ratio = _keep_ratio(compression.method, options, compression.state, 1, 1, compression.ratio)
        each = lagkv.tokens_per_partition(keep_ratio, options["lag_size"])
        compression.state["static"] = [
            static + max(0, (length - static) // options["lag_size"] - 1) * each
            for static, length in zip(compression.state["static"], lengths, strict=True)
        ]

    def most(self, method: Any, options: Mapping[str, Any], length: int, amount: int, removed: float) -> int:
        """LK-12: the sinks and the last partition stay whole."""
        if "recursive" not in method.traits:
            return amount
        sizes = {name: options[name] for name in ("sink_size", "lag_size")}
        keep_ratio = _keep_ratio(method, options, {}, length, amount, removed)
        return max(amount, lagkv.retained_length(length, keep_ratio=keep_ratio, **sizes))


def _solver(method: Any) -> Callable[..., float] | None:
    """The method's own `keep_ratio_for` of a budget, if its module has one."""
    return getattr(method.module, "keep_ratio_for", None)


def _keep_ratio(
    method: Any, options: Mapping[str, Any], state: State, length: int, amount: int, removed: float
) -> Any:
    """The option, the method's own solution for a budget, or the fraction that is not removed."""
    solve = _solver(method)
    if "keep_ratio" in options:
        return options["keep_ratio"]
    if solve is None or "static" in state:
        return float(1 - Decimal(repr(float(removed))))
    try:
        return solve(
            length,
            amount,
            **{name: options[name] for name in inspect.signature(solve).parameters if name in options},
        )
    except ValueError as error:
        raise UsageError(f"option {error}") from None
