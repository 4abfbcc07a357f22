"""The parts of a row of the GPU benchmark: the place, the work, the arms, and the distance of two results."""

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
    """The device and the size of a row: `shrink` divides
    the lengths, and then batches have at most two rows.
    """

    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    shrink: int = 1
    heads: int = 8
    group: int = 4
    head_dim: int = 128

    @property
    def is_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def layer(self) -> SimpleNamespace:
        """The parts of its attention layer that the presses of kvpress read."""
        return attention_module((self.heads * self.group, self.heads), self.head_dim)

    def tokens(self, count: int) -> int:
        return max(min(count, 64), count // self.shrink)

    def batch(self, count: int) -> int:
        return count if self.shrink == 1 else min(count, 2)

    def states(self, *shape: int, seed: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Normal numbers, the same for the same seed; where
        they are few, from the processor, which is always there.
        """
        where = self.device if self.shrink == 1 else "cpu"
        generator = torch.Generator(where).manual_seed(seed)
        drawn = torch.randn(shape, generator=generator, device=where, dtype=dtype or self.dtype)
        return drawn.to(self.device)

    def cache(self, batch: int, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (batch, self.heads, tokens, self.head_dim)
        return self.states(*shape, seed=2 * seed), self.states(*shape, seed=2 * seed + 1)

    def bytes_of(self, tokens: int) -> int:
        """The bytes of the keys (or of the values) of `tokens` tokens in each KV head."""
        return self.heads * tokens * self.head_dim * self.dtype.itemsize

    def kernels(self, stem: str) -> ModuleType:
        """The kernels of a stem."""
        return importlib.import_module(f"evictionary.optimized.kernels.{stem}")

    def ours(self, stem: str, name: str, entry: tuple[str, str] | None = None) -> Callable[..., Any]:
        """The function of `optimized` (`entry`, if its kernel has another name). Raises NoKernel without
        it or its kernel.
        """
        try:
            if self.is_gpu:
                getattr(self.kernels(stem), name)
            stem, name = entry or (stem, name)
            found: Callable[..., Any] = getattr(
                importlib.import_module(f"evictionary.optimized.{stem}"), name
            )
        except (ImportError, AttributeError) as error:
            raise NoKernel(str(error)) from error
        return found


Inputs = tuple[Any, ...]
Arm = Callable[..., Any]
Read = Callable[[Inputs, Any], Any]


def exact(*tensors: torch.Tensor) -> list[np.ndarray]:
    """Tensors as float64 (or boolean) arrays."""
    return [(x.double() if x.is_floating_point() else x).cpu().numpy() for x in tensors]


def first_head(*tensors: torch.Tensor) -> list[np.ndarray]:
    """The first KV head of the first sequence of each tensor, as arrays [1, 1, ...]."""
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
    found, wanted = np.sort(exact(got)[0] @ mark), want @ mark
    first, end = np.searchsorted(found, wanted - 1e-9), np.searchsorted(found, wanted + 1e-9)
    return float((first == end).mean())


@dataclass
class Work:
    """One row ready to run. The first arm is ours; every arm is called with one set of inputs of `make`.

    want is the float64 mathematics of a part of the output (None: other rows check the parts), read takes
    that part of an output (reads: of an arm with another output, None for an arm that computes something
    else), and `apart` is the distance of the two. missing says why a peer is not there. limit is the largest
    distance with which our arm is timed. waits names the arms that wait for the GPU and cannot be captured.
    units is the number of pieces (tokens) of a call, if the time of one piece is compared. copies is the
    number of input sets that are rotated, by default chosen from their size.
    """

    make: Callable[[int], Inputs]
    arms: dict[str, Arm]
    bytes: int
    flops: float = 0.0
    want: Callable[[Inputs], Any] | None = None
    read: Read = lambda inputs, got: got[0, 0]
    reads: dict[str, Read | None] = field(default_factory=dict)
    apart: Callable[[Any, Any], float] = error
    limit: float = 1e-3
    missing: dict[str, str] = field(default_factory=dict)
    waits: frozenset[str] = frozenset()
    units: dict[str, int] = field(default_factory=dict)
    copies: int | None = None


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


def sized(build: Callable[..., Work]) -> Callable[..., Callable[[Place], Work]]:
    """A function of a place and sizes, as a function of the sizes alone that gives the `build` of a Row."""
    return lambda *sizes: lambda place: build(place, *sizes)


def sides(place: Place, ours: Arm, eager: Arm, press: Callable[[Any], Arm] | None = None) -> dict[str, Any]:
    """The arms and the missing peers of a Work: ours, eager torch, on a GPU torch.compile of it, and a
    press of kvpress.
    """
    arms = {"ours": ours, "eager torch": eager}
    if place.is_gpu:
        arms["torch.compile"] = torch.compile(eager, dynamic=False)
    theirs, missing = peer_arm("kvpress", "kvpress", press) if press else ({}, {})
    return {"arms": arms | theirs, "missing": missing}


def peer_arm(
    name: str, distribution: str, build: Callable[[Any], Arm]
) -> tuple[dict[str, Arm], dict[str, str]]:
    """The arm of a package that need not be installed, by name and version, or why it is missing. `build`
    takes the package.
    """
    label = name
    try:
        package = importlib.import_module(name.lower())
        label = f"{name} {version(distribution)}"
        return {label: build(package)}, {}
    except Exception as error:  # a broken installation must not end the run either
        return {}, {label: f"{type(error).__name__}: {error}".splitlines()[0]}


def attention_module(heads: tuple[int, int], head_dim: int) -> Any:
    """The parts of an attention layer that the presses of kvpress read: its shape, an identity for a
    projection, and RoPE.

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
