"""The parts of a row of the GPU benchmark: the place, the work, the arms, and the distance of two results."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from evictionary.optimized.rope import frequencies


class NoKernel(Exception):
    """The row needs a kernel that this checkout does not have."""


@dataclass(frozen=True)
class Place:
    """The device and the size of a row: `shrink` divides the lengths, and then batches have at most two rows."""

    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    shrink: int = 1
    heads: int = 8
    group: int = 4
    head_dim: int = 128

    @property
    def is_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def tokens(self, count: int) -> int:
        return max(min(count, 64), count // self.shrink)

    def batch(self, count: int) -> int:
        return count if self.shrink == 1 else min(count, 2)

    def states(self, *shape: int, seed: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Normal numbers, the same for the same seed."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=self.device, dtype=dtype or self.dtype)

    def cache(self, batch: int, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (batch, self.heads, tokens, self.head_dim)
        return self.states(*shape, seed=2 * seed), self.states(*shape, seed=2 * seed + 1)

    def free_bytes(self) -> int:
        """The free memory of the GPU; elsewhere room for one small sequence."""
        return torch.cuda.mem_get_info()[0] if self.is_gpu else 2**20

    def bytes_of(self, tokens: int) -> int:
        """The bytes of the keys (or of the values) of `tokens` tokens in each KV head."""
        return self.heads * tokens * self.head_dim * self.dtype.itemsize

    def ours(self, stem: str, name: str, entry: tuple[str, str] | None = None) -> Callable[..., Any]:
        """The function of `optimized` (`entry`, if its kernel has another name); on a GPU, raises NoKernel without a kernel."""
        if self.is_gpu:
            try:
                kernels = importlib.import_module(f"evictionary.optimized.kernels.{stem}")
            except ImportError as error:
                raise NoKernel(f"optimized/kernels/{stem}.py: {error}") from error
            if not callable(getattr(kernels, name, None)):
                raise NoKernel(f"no {name} in optimized/kernels/{stem}.py")
        stem, name = entry or (stem, name)
        found = getattr(importlib.import_module(f"evictionary.optimized.{stem}"), name, None)
        if found is None:
            raise NoKernel(f"no {name} in optimized/{stem}.py")
        return found


@dataclass
class Work:
    """One row ready to run. The first arm is ours; every arm is called with one set of inputs of `make`.

    read converts the output of an arm for `check`, if they differ; missing says why a peer is not there; limit is the largest
    error, relative to the largest number, with which our arm is timed; waits names the arms that wait for the GPU and cannot be
    captured; units is the number of pieces (tokens) of a call, if the time of one piece is compared; copies is the number of input
    sets that are rotated, by default chosen from their size; renew draws what must be new in a set of inputs, before every
    measurement and outside of its time.
    """

    make: Callable[[int], tuple[Any, ...]]
    arms: dict[str, Callable[..., Any]]
    check: Callable[[tuple[Any, ...], Any], float] | None  # None: the parts are checked in rows of their own
    bytes: int
    flops: float = 0.0
    read: dict[str, Callable[[tuple[Any, ...], Any], Any]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    limit: float = 1e-3
    waits: frozenset[str] = frozenset()
    units: dict[str, int] = field(default_factory=dict)
    copies: int | None = None
    renew: Callable[[tuple[Any, ...]], Any] = lambda inputs: None


@dataclass(frozen=True)
class Row:
    """A line of the table: goal_s (seconds, on an H200) and goal_ratio are goals, not measurements."""

    id: str
    title: str
    stems: tuple[str, ...]
    build: Callable[[Place], Work]
    goal_s: float | None = None
    goal_ratio: float | None = None
    peer: str = ""  # the arm that the ratio is about
    latency: bool = False


def exact(*tensors: torch.Tensor) -> list[np.ndarray]:
    """Tensors as float64 (or boolean) arrays."""
    return [(x.double() if x.is_floating_point() else x).cpu().numpy() for x in tensors]


def once(reference: Callable[..., Any]) -> Callable[..., Any]:
    """A function that computes at its first call and remembers: all arms of a row are compared for the same inputs."""
    found: list[Any] = []

    def remembered(*arguments: Any) -> Any:
        if not found:
            found.append(reference(*arguments))
        return found[0]

    return remembered


def first_head(*tensors: torch.Tensor) -> list[np.ndarray]:
    """The first KV head of the first sequence of each tensor, as arrays."""
    return exact(*(x[:1, :1] for x in tensors))


def error(got: Any, want: np.ndarray) -> float:
    """The largest difference, relative to the largest number wanted; NaN is infinitely wrong."""
    got = exact(got)[0] if isinstance(got, torch.Tensor) else got
    if got.shape != want.shape or not np.isfinite(got).all():
        return math.inf
    return float(np.abs(got - want).max() / max(np.abs(want).max(), 1e-300))


def rows_apart(got: torch.Tensor, want: np.ndarray) -> float:
    """The share of rows of `want` [n, D] that `got` [n, D] lacks, whatever their order."""
    if got.shape[0] != want.shape[0]:
        return math.inf
    mark = np.random.default_rng(0).normal(size=want.shape[1])
    found, wanted = exact(got)[0] @ mark, want @ mark
    return float(1 - np.isclose(np.sort(found), np.sort(wanted), rtol=0, atol=1e-9).mean())


def compiled(function: Callable[..., Any], place: Place) -> dict[str, Callable[..., Any]]:
    """The arm torch.compile, if there is a GPU."""
    return {"torch.compile": torch.compile(function, dynamic=False)} if place.is_gpu else {}


def optional(module: str) -> tuple[ModuleType | None, str]:
    """A module and an empty string, or None and why it is not there."""
    try:
        return importlib.import_module(module), ""
    except Exception as error:  # a broken installation must not end the run either
        return None, f"{type(error).__name__}: {error}".splitlines()[0]


def press_arm(name: str, score: Callable[[Any, Any], Callable[..., Any]]) -> tuple[dict[str, Callable[..., Any]], dict[str, str]]:
    """The arm of kvpress, or why it is missing. `score` takes the package and its version and returns the arm."""
    kvpress, why = optional("kvpress")
    if kvpress is None:
        return {}, {"kvpress": why}
    label = f"kvpress {version('kvpress')}"
    try:
        return {label: score(kvpress, label)}, {}
    except Exception as error:
        return {}, {label: f"{name}: {type(error).__name__}: {error}"}


def attention_module(heads: tuple[int, int], head_dim: int) -> Any:
    """The parts of an attention layer that the presses of kvpress read: its shape, an identity for a projection, and RoPE.

    Args: heads, the query heads and the KV heads.
    """

    def rotary(states: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions[..., None].double() * frequencies(head_dim)
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(states.dtype), angles.sin().to(states.dtype)

    return SimpleNamespace(
        config=SimpleNamespace(num_attention_heads=heads[0], num_key_value_heads=heads[1]),
        head_dim=head_dim,
        q_proj=lambda hidden_states: hidden_states,
        rotary_emb=rotary,
    )


def layer_module(place: Place) -> Any:
    """The layer of a place, for the presses of kvpress."""
    return attention_module((place.heads * place.group, place.heads), place.head_dim)
