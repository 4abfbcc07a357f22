"""The rows of the GPU benchmark: for each, its inputs, the arms that are timed side by side, the check and the least bytes.

A row is measured on one layer of Llama-3.1-8B (8 KV heads, 32 query heads, 128 channels, bfloat16). Nothing here needs a GPU but
the sizes: `Place(device="cpu", shrink=512)` makes the same rows small enough to check on a CPU.

`bytes` is the least that any implementation has to move, not what ours happens to move; `flops` is the least that it has to
multiply. Checks compare one KV head with the float64 mathematics of `reference`.
"""

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
from torch.nn.functional import scaled_dot_product_attention

import reference.attention
import reference.cache
import reference.expected_attention
import reference.gvote
import reference.keydiff
import reference.lagkv
import reference.momentkv
from optimized.cache import CompressedCache
from optimized.momentkv import Moments, no_moments
from optimized.rope import rotate

XL = 131_072


class NoKernel(Exception):
    """The row needs a kernel that this checkout does not have."""


@dataclass(frozen=True)
class Place:
    """Where a row runs and how large: lengths are divided by `shrink`, and batches are then of two at most."""

    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    shrink: int = 1
    heads: int = 8
    group: int = 4
    head_dim: int = 128

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

    def ours(self, stem: str, name: str) -> Callable[..., Any]:
        """The entry point of `optimized`; on a GPU it must have a kernel under it, or NoKernel is raised."""
        kernel = None
        if self.device.startswith("cuda"):
            try:
                kernels = importlib.import_module(f"optimized.kernels.{stem}")
            except ImportError as error:
                raise NoKernel(f"optimized/kernels/{stem}.py: {error}") from error
            kernel = getattr(kernels, name, None)
            if not callable(kernel):
                raise NoKernel(f"no {name} in optimized/kernels/{stem}.py")
        entry = getattr(importlib.import_module(f"optimized.{stem}"), name, kernel)
        if entry is None:
            raise NoKernel(f"no {name} in optimized/{stem}.py")
        return entry


@dataclass
class Work:
    """One row ready to run. The first arm is ours; every arm is called with one set of inputs of `make`.

    read turns the output of an arm into what `check` takes, where they differ; missing says why a peer is not there; limit is the
    largest error, relative to the largest number, with which ours is timed; waits names the arms that wait for the GPU, which
    cannot be captured; units says how many pieces (tokens) a call makes, where the time of one is compared; copies, how many sets
    of inputs are rotated, where that is not left to their size.
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


@dataclass(frozen=True)
class Row:
    """A line of the table: goal_s in seconds and the ratio aimed at are goals, not measurements."""

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
    """The arm torch.compile, where there is a GPU to compile for."""
    return {"torch.compile": torch.compile(function, dynamic=False)} if place.device.startswith("cuda") else {}


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


def layer_module(place: Place) -> Any:
    """As little of an attention layer as the presses of kvpress look at."""
    config = SimpleNamespace(num_attention_heads=place.heads * place.group, num_key_value_heads=place.heads)
    return SimpleNamespace(config=config, head_dim=place.head_dim, q_proj=lambda hidden_states: hidden_states)


# torch expressions ---------------------------------------------------------------------------------------------------------------


def lagkv_torch(
    keys: torch.Tensor, values: torch.Tensor, kept_each: int, sinks: int, lag: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """LagKV of a whole cache in batched torch: scores of all partitions, top-k of each, gather."""
    length = keys.shape[2]
    parts = (length - sinks) // lag
    end = sinks + parts * lag

    def variation(states: torch.Tensor) -> torch.Tensor:
        cut = states[:, :, sinks:end].unflatten(2, (parts, lag)).float()
        after = cut[:, :, 1:]
        low, high = after.amin(dim=-2, keepdim=True), after.amax(dim=-2, keepdim=True)
        return ((cut[:, :, :-1] - low) / (high - low)).std(dim=-1).softmax(dim=-1)

    chosen = (variation(keys) + variation(values)).topk(kept_each, dim=-1).indices.sort(dim=-1).values
    starts = torch.arange(sinks, end - lag, lag, device=keys.device)
    lead = keys.shape[:2]
    first = torch.arange(sinks, device=keys.device).expand(*lead, -1)
    last = torch.arange(end - lag, length, device=keys.device).expand(*lead, -1)
    index = torch.cat([first, (chosen + starts[:, None]).flatten(2), last], dim=-1)[..., None].expand(-1, -1, -1, keys.shape[-1])
    return keys.gather(2, index), values.gather(2, index)


def keydiff_torch(keys: torch.Tensor) -> torch.Tensor:
    """KD-8 in torch: unit keys, their mean, cosines."""
    unit = torch.nn.functional.normalize(keys.float(), dim=-1)
    return -torch.cosine_similarity(unit.mean(dim=-2, keepdim=True), keys.float(), dim=-1)


def expected_attention_torch(
    keys: torch.Tensor, values: torch.Tensor, mean: torch.Tensor, covariance: torch.Tensor
) -> torch.Tensor:
    """EA-7..9 in torch, one query head of each group at a time, the quadratic form in the precision of the keys."""
    heads, head_dim = keys.shape[1], keys.shape[3]
    means, covariances = mean.unflatten(1, (heads, -1)), covariance.unflatten(1, (heads, -1))
    weights: Any = 0.0
    for g in range(means.shape[2]):
        linear = (keys @ means[:, :, g, :, None].to(keys.dtype)).squeeze(-1).float() / math.sqrt(head_dim)
        quadratic = ((keys @ covariances[:, :, g].to(keys.dtype)).float() * keys).sum(dim=-1) / (2 * head_dim)
        weights = weights + (linear + quadratic).softmax(dim=-1) / means.shape[2]
    return (weights + 0.02) * values.float().norm(dim=-1)


def statistics_torch(queries: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and covariance of queries turned back by their positions, in torch."""
    plain = rotate(queries, -positions).float()
    mean = plain.mean(dim=-2)
    centred = plain - mean[..., None, :]
    return mean, centred.mT @ centred / queries.shape[-2]


def momentkv_torch(
    query: torch.Tensor, new_key: torch.Tensor, new_value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
    positions: torch.Tensor, moments: Moments, position: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """One step of MomentKV in batched torch, in place: score, evict the lowest, add it to the moments, attend, mix."""
    heads, dim = keys.shape[1], keys.shape[3]
    all_keys = torch.cat([keys, new_key[:, :, None]], dim=2).float()
    all_values = torch.cat([values, new_value[:, :, None]], dim=2).float()
    grouped = query.float().unflatten(1, (heads, -1)) / math.sqrt(dim)

    def means() -> tuple[torch.Tensor, ...]:
        count = moments.count.clamp(min=1)[..., None].float()
        mean_key, mean_value = moments.key_sum / count, moments.value_sum / count
        spread = moments.value_key_sum - moments.value_sum[..., None] * mean_key[..., None, :]
        return count, mean_key, mean_value, spread

    count, _, mean_value, spread = means()
    logits = grouped @ all_keys.mT
    residual = all_values - mean_value[:, :, None] - all_keys @ spread.mT / (count[..., None] * math.sqrt(dim))
    scores = logits.softmax(dim=-1).mean(dim=2) * residual.norm(dim=-1)
    lowest = scores.argmin(dim=-1, keepdim=True)
    row = lowest[..., None].expand(-1, -1, -1, dim)
    gone_key, gone_value = all_keys.gather(2, row)[:, :, 0], all_values.gather(2, row)[:, :, 0]
    moments.count.add_(1)
    moments.key_sum.add_(gone_key)
    moments.value_sum.add_(gone_value)
    moments.value_key_sum.add_(gone_value[..., None] * gone_key[..., None, :])
    count, mean_key, mean_value, spread = means()
    logits = logits.scatter(3, lowest[:, :, None].expand(-1, -1, logits.shape[2], -1), -math.inf)
    evicted_logit = count.log() + (grouped @ mean_key[..., None]).squeeze(-1)
    evicted_value = mean_value[:, :, None] + grouped @ spread.mT / count[..., None]
    weights = torch.cat([logits, evicted_logit[..., None]], dim=-1).softmax(dim=-1)
    output = weights[..., :-1] @ all_values + weights[..., -1:] * evicted_value
    slot = lowest.clamp(max=keys.shape[2] - 1)
    replaces = (lowest < keys.shape[2])[..., None]
    row = slot[..., None].expand(-1, -1, -1, dim)
    keys.scatter_(2, row, torch.where(replaces, new_key[:, :, None], keys.gather(2, row)))
    values.scatter_(2, row, torch.where(replaces, new_value[:, :, None], values.gather(2, row)))
    positions.scatter_(2, slot, torch.where(replaces[..., 0], position[..., None], positions.gather(2, slot)))
    return output.flatten(1, 2).to(query.dtype)


def moments_torch(keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor, index: torch.Tensor) -> tuple[Any, ...]:
    """Moments of what is not kept, and the rows of what is, in torch: a masked product and two gathers."""
    gone_keys, gone_values = torch.where(kept[..., None], 0, keys), torch.where(kept[..., None], 0, values)
    index = index[..., None].expand(-1, -1, -1, keys.shape[-1])
    sums = gone_keys.sum(dim=-2, dtype=torch.float32), gone_values.sum(dim=-2, dtype=torch.float32)
    return keys.gather(2, index), values.gather(2, index), *sums, gone_values.mT @ gone_keys


def gvote_torch(query: torch.Tensor, keys: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """GVote in torch: softmax and sort for the budgets, a sort of all sampled logits for the votes."""
    heads, length = keys.shape[1], keys.shape[2]
    current = query.unflatten(1, (heads, -1)).float() / math.sqrt(keys.shape[-1])
    falling = (current @ keys.float().mT).softmax(dim=-1).sort(dim=-1, descending=True).values
    tail = falling.flip(-1).cumsum(dim=-1, dtype=torch.float64).flip(-1)
    budgets = (tail > 0.05 * tail[..., :1]).sum(dim=-1)  # [B, H_kv, G]
    logits = sampled.unflatten(1, (heads, -1)).flatten(2, 3).float() @ keys.float().mT
    order = logits.argsort(dim=-1, descending=True)
    votes = torch.arange(length, device=keys.device) < budgets.repeat_interleave(sampled.shape[2], dim=2)[..., None]
    return torch.zeros_like(votes).scatter_(-1, order, votes).any(dim=2)


# scoring -------------------------------------------------------------------------------------------------------------------------


def lagkv_row(place: Place) -> Work:
    tokens, lag, sinks = place.tokens(XL), max(8, 128 // place.shrink), 16 if place.shrink == 1 else 4
    settings = {"keep_ratio": 0.25, "sink_size": sinks, "lag_size": lag}
    compress = place.ours("lagkv", "compress")
    retained = reference.lagkv.retained_length(tokens, **settings)

    def check(inputs: tuple[Any, ...], got: torch.Tensor) -> float:
        keys, values = exact(*(x[:1, :1] for x in inputs))
        kept = reference.lagkv.select(keys, values, **settings)
        return rows_apart(got, keys[kept])

    def press(kvpress: Any, label: str) -> Callable[..., Any]:
        one = kvpress.LagKVPress(compression_ratio=1 - retained / tokens, n_sink=sinks, lag_size=lag)
        return lambda keys, values: one.compress(layer_module(place), None, keys, values, None, {})

    def eager(keys: torch.Tensor, values: torch.Tensor) -> Any:
        return lagkv_torch(keys, values, lag // 4, sinks, lag)

    arms, missing = press_arm("LagKVPress", press)
    one_head = {name: lambda inputs, got: got[0][0, 0] for name in ("eager torch", "torch.compile", *arms)}
    width = 2 * place.heads * place.head_dim * place.dtype.itemsize
    return Work(
        make=lambda seed: place.cache(1, tokens, seed),
        arms={"ours": lambda k, v: compress(k, v, **settings), "eager torch": eager, **compiled(eager, place), **arms},
        check=check,
        bytes=(tokens + retained) * width,
        read={"ours": lambda inputs, got: got.keys[:retained], **one_head},
        missing=missing,
        limit=0.01,  # float32 may exchange scores that nearly tie
    )


def keydiff_row(place: Place) -> Work:
    tokens, score = place.tokens(XL), place.ours("keydiff", "score")
    arms, missing = press_arm(
        "KeyDiffPress", lambda kvpress, _: lambda keys: kvpress.KeyDiffPress().score(None, None, keys, None, None, {})
    )
    return Work(
        make=lambda seed: (place.cache(1, tokens, seed)[0],),
        arms={"ours": score, "eager torch": keydiff_torch, **compiled(keydiff_torch, place), **arms},
        check=lambda inputs, got: error(got[0, 0], reference.keydiff.score(exact(inputs[0][:1, :1])[0])[0, 0]),
        bytes=2 * tokens * place.heads * place.head_dim * place.dtype.itemsize,
        missing=missing,
    )


def keydiff_anchor_row(place: Place) -> Work:
    tokens, score = place.tokens(XL), place.ours("keydiff", "score")
    with_anchor, anchor_sum = place.ours("keydiff", "score_with_anchor"), place.ours("keydiff", "anchor_sum")

    def make(seed: int) -> tuple[Any, ...]:
        keys = place.cache(1, tokens, seed)[0]
        return keys, anchor_sum(keys)

    return Work(
        make=make,
        arms={"ours": with_anchor, "our two passes": lambda keys, anchor: score(keys)},
        check=lambda inputs, got: error(got[0, 0], reference.keydiff.score(exact(inputs[0][:1, :1])[0])[0, 0]),
        bytes=tokens * place.heads * place.head_dim * place.dtype.itemsize,
    )


def expected_attention_row(place: Place) -> Work:
    tokens, score = place.tokens(XL), place.ours("expected_attention", "score")
    queries, dim = place.heads * place.group, place.head_dim

    def make(seed: int) -> tuple[Any, ...]:
        factor = place.states(1, queries, dim, dim, seed=seed, dtype=torch.float32) / math.sqrt(dim)
        mean = place.states(1, queries, dim, seed=seed + 1, dtype=torch.float32) / 4
        return *place.cache(1, tokens, seed), mean, factor @ factor.mT

    def check(inputs: tuple[Any, ...], got: torch.Tensor) -> float:
        keys, values, mean, covariance = inputs
        group = slice(0, place.group)
        want = reference.expected_attention.score(*exact(keys[:1, :1], values[:1, :1], mean[:, group], covariance[:, group]))
        return error(got[0, 0], want[0, 0])

    def press(kvpress: Any, label: str) -> Callable[..., Any]:
        class Given(kvpress.ExpectedAttentionPress):  # the statistics are inputs, as they are for the other arms
            def get_query_statistics(self, module: Any, hidden_states: Any) -> Any:
                return tuple(x.to(place.dtype) for x in hidden_states)

        one = Given(n_sink=0, epsilon=0.02)
        return lambda k, v, mean, covariance: one.score(layer_module(place), (mean, covariance), k, v, None, {})

    arms, missing = press_arm("ExpectedAttentionPress", press)
    return Work(
        make=make,
        arms={"ours": score, "eager torch": expected_attention_torch, **compiled(expected_attention_torch, place), **arms},
        check=check,
        bytes=2 * tokens * place.heads * dim * place.dtype.itemsize,
        flops=2.0 * tokens * queries * dim * dim,
        missing=missing,
        limit=1e-2,
    )


def statistics_row(place: Place) -> Work:
    tokens, unrotated = place.tokens(XL), place.ours("expected_attention", "unrotated_statistics")
    count, dim = place.heads * place.group, place.head_dim

    def make(seed: int) -> tuple[Any, ...]:
        return place.states(1, count, tokens, dim, seed=seed), torch.arange(tokens, device=place.device)

    def check(inputs: tuple[Any, ...], got: tuple[torch.Tensor, torch.Tensor]) -> float:
        plain = rotate(inputs[0][:1, :1].double(), -inputs[1])
        mean, covariance = reference.expected_attention.query_statistics(exact(plain)[0])
        return max(float(np.abs(exact(got[0][:1, :1])[0] - mean).max()), error(got[1][:1, :1], covariance))

    def press(kvpress: Any, label: str) -> Callable[..., Any]:
        # What it does instead: project the hidden states of the prompt once more. The projection is not checked against ours.
        weight = place.states(count * dim, count * dim, seed=0) / math.sqrt(count * dim)
        module = layer_module(place)
        module.q_proj = lambda hidden: hidden @ weight
        module.rotary_emb = lambda states, positions: (states.new_ones(1, 512, dim), states.new_zeros(1, 512, dim))
        one = kvpress.ExpectedAttentionPress(n_sink=0)
        return lambda queries, positions: one.get_query_statistics(module, queries.view(1, tokens, count * dim))

    arms, missing = press_arm("ExpectedAttentionPress", press)
    return Work(
        make=make,
        arms={"ours": unrotated, "eager torch": statistics_torch, **compiled(statistics_torch, place), **arms},
        check=check,
        bytes=tokens * count * dim * place.dtype.itemsize,
        flops=2.0 * tokens * count * dim * dim,
        read={name: lambda inputs, got: None for name in arms},  # its queries are others: projected once more
        missing=missing,
        limit=2e-2,
    )


# selection and compaction --------------------------------------------------------------------------------------------------------


def select_row(rows: int, length: int, *, levels: int = 0) -> Callable[[Place], Work]:
    """Top-k with k = n / 2; with `levels`, scores have so many values, and most of them tie."""

    def build(place: Place) -> Work:
        top_k, tokens = place.ours("selection", "top_k"), place.tokens(length)
        half = tokens // 2

        def make(seed: int) -> tuple[Any, ...]:
            scores = place.states(rows, tokens, seed=seed, dtype=torch.float32)
            return ((scores * levels / 6).round() if levels else scores,)

        def check(inputs: tuple[Any, ...], kept: torch.Tensor) -> float:
            scores = inputs[0].double()
            if not kept.sum(dim=-1).eq(half).all():
                return math.inf
            best = scores.sort(dim=-1, descending=True).values[:, :half].sum(dim=-1)
            return float((best - (scores * kept).sum(dim=-1)).abs().max() / best.abs().max())

        def mask(inputs: tuple[Any, ...], got: Any) -> torch.Tensor:
            return torch.zeros_like(inputs[0], dtype=torch.bool).scatter_(-1, got[1].long(), True)

        arms: dict[str, Callable[..., Any]] = {
            "ours": lambda scores: top_k(scores, half),
            "torch.topk": lambda scores: scores.topk(half, dim=-1, sorted=False),
        }
        flashinfer, why = optional("flashinfer")
        missing = {} if flashinfer else {"FlashInfer": why}
        if flashinfer is not None:
            arms[label := f"FlashInfer {flashinfer.__version__}"] = lambda scores: flashinfer.top_k(scores, half)
            missing.pop(label, None)
        return Work(
            make=make,
            arms=arms,
            check=check,
            bytes=rows * tokens * 5,
            read={name: mask for name in arms if name != "ours"},
            missing=missing,
        )

    return build


def random_mask(place: Place, batch: int, tokens: int, kept: int, seed: int) -> torch.Tensor:
    """A mask that keeps `kept` random tokens of each head."""
    shape = (batch, place.heads, tokens)
    order = place.states(*shape, seed=seed + 1000, dtype=torch.float32).argsort(dim=-1)
    return order < kept


def positions_of(kept: torch.Tensor, count: int) -> torch.Tensor:
    """The positions [B, H, count] of the kept tokens of a mask that keeps equally many in each head."""
    return kept.nonzero()[:, 2].view(*kept.shape[:2], count)


def compact_row(place: Place) -> Work:
    tokens = place.tokens(XL)
    half, compress = tokens // 2, place.ours("cache", "compress")
    on_gpu = place.device.startswith("cuda")
    copy = importlib.import_module("optimized.kernels.cache").copy_kept if on_gpu else None

    def make(seed: int) -> tuple[Any, ...]:
        kept = random_mask(place, 1, tokens, half, seed)
        rows = kept.reshape(-1).cumsum(0)
        return *place.cache(1, tokens, seed), kept, rows, positions_of(kept, half)

    def gather(keys: torch.Tensor, values: torch.Tensor, kept: Any, rows: Any, index: torch.Tensor) -> Any:
        index = index[..., None].expand(-1, -1, -1, keys.shape[-1])
        return keys.gather(2, index), values.gather(2, index)

    counted = {"ours, with the count": lambda k, v, kept, rows, index: compress(k, v, kept)}
    alone = {"ours": lambda k, v, kept, rows, index: copy(k, v, kept, rows, place.heads * half)} if copy else {}
    arms = {**alone, **counted, "two torch.gather": gather}
    return Work(
        make=make,
        arms=arms if copy else {"ours": counted["ours, with the count"], "two torch.gather": gather},
        check=lambda inputs, got: rows_apart(got, exact(inputs[0][0, 0])[0][exact(inputs[2][0, 0])[0]]),
        bytes=4 * place.heads * half * place.head_dim * place.dtype.itemsize,
        read={
            "two torch.gather": lambda inputs, got: got[0][0, 0],
            **{name: lambda inputs, got: got.keys[:half] for name in ("ours", "ours, with the count")},
        },
        waits=frozenset({"ours, with the count"}),
        limit=0.0,
    )


# attention -----------------------------------------------------------------------------------------------------------------------


def flat_cache(place: Place, lengths: torch.Tensor, seed: int) -> CompressedCache:
    """A compressed cache of the given lengths [B, H_kv]."""
    total = int(lengths.sum())
    positions = torch.cat([torch.arange(int(n)) for n in lengths.flatten()]).to(place.device)
    storage = (place.states(total, place.head_dim, seed=seed + part) for part in (0, 1))
    return CompressedCache(*storage, positions, lengths.to(place.device))


def check_attention(place: Place) -> Callable[[tuple[Any, ...], Any], float]:
    """Compare the last head of a decoded batch with the reference."""

    def check(inputs: tuple[Any, ...], got: torch.Tensor) -> float:
        queries, cache = inputs[:2]
        count = int(cache.lengths[-1, -1])
        one = reference.cache.CompressedCache(
            *exact(cache.keys[-count:], cache.values[-count:]), np.arange(count), np.array([[count]])
        )
        want, _ = reference.attention.attend(exact(queries[-1:, -place.group :])[0], one)
        return error(got[-1:, -place.group :], want)

    return check


def decode_row(batch: int, length: int) -> Callable[[Place], Work]:
    """Flash-decoding with heads of one length, beside SDPA and FlashInfer."""

    def build(place: Place) -> Work:
        attend, sequences, tokens = place.ours("attention", "attend"), place.batch(batch), place.tokens(length)

        def make(seed: int) -> tuple[Any, ...]:
            lengths = torch.full((sequences, place.heads), tokens)
            queries = place.states(sequences, place.heads * place.group, 1, place.head_dim, seed=seed + 7)
            return queries, flat_cache(place, lengths, 10 * seed)

        def sdpa(queries: torch.Tensor, cache: CompressedCache) -> torch.Tensor:
            keys, values = (x.view(sequences, place.heads, tokens, -1) for x in cache[:2])
            return scaled_dot_product_attention(queries, keys, values, enable_gqa=True)

        flash, missing = flashinfer_decode(place, sequences, tokens)
        return Work(
            make=make,
            arms={"ours": attend, "SDPA": sdpa, **flash},
            check=check_attention(place),
            bytes=2 * sequences * place.heads * tokens * place.head_dim * place.dtype.itemsize,
            read={"ours": lambda inputs, got: got[0]},
            missing=missing,
            limit=2e-2,
        )

    return build


def flashinfer_decode(place: Place, batch: int, tokens: int) -> tuple[dict[str, Callable[..., Any]], dict[str, str]]:
    """FlashInfer's paged decode: every KV head is a request of its own, pages of 16 tokens; the plan is not timed."""
    flashinfer, why = optional("flashinfer")
    if flashinfer is None:
        return {}, {"FlashInfer": why}
    label = f"FlashInfer {flashinfer.__version__}"
    try:
        requests, pages = batch * place.heads, tokens // 16
        workspace = torch.empty(128 * 2**20, dtype=torch.uint8, device=place.device)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        starts = torch.arange(requests + 1, dtype=torch.int32, device=place.device) * pages
        indices = torch.arange(requests * pages, dtype=torch.int32, device=place.device)
        last = torch.full((requests,), 16, dtype=torch.int32, device=place.device)
        wrapper.plan(starts, indices, last, place.group, 1, place.head_dim, 16, q_data_type=place.dtype, kv_data_type=place.dtype)
    except Exception as error:
        return {}, {label: f"{type(error).__name__}: {error}"}

    def run(queries: torch.Tensor, cache: CompressedCache) -> torch.Tensor:
        paged = tuple(x.view(-1, 16, 1, place.head_dim) for x in cache[:2])
        return wrapper.run(queries.reshape(-1, place.group, place.head_dim), paged).view_as(queries)

    return {label: run}, {}


def ragged_row(place: Place) -> Work:
    attend, sequences, mean = place.ours("attention", "attend"), place.batch(32), place.tokens(4096)

    def make(seed: int) -> tuple[Any, ...]:
        generator = np.random.default_rng(seed)
        drawn = generator.lognormal(sigma=0.7, size=(sequences, place.heads))
        lengths = torch.from_numpy(np.minimum(drawn / drawn.mean(), 3.0) * mean).long().clamp(min=1)
        queries = place.states(sequences, place.heads * place.group, 1, place.head_dim, seed=seed + 7)
        cache = flat_cache(place, lengths, 10 * seed)
        longest = int(lengths.max())
        filled = (torch.arange(longest) < lengths[..., None]).to(place.device)
        padded = []
        for states in cache[:2]:
            whole = states.new_zeros(*filled.shape, place.head_dim)
            whole[filled] = states
            padded.append(whole)
        return queries, cache, *padded, filled.repeat_interleave(place.group, dim=1)[:, :, None]

    def sdpa(queries: torch.Tensor, cache: Any, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)

    return Work(
        make=make,
        arms={"ours": lambda queries, cache, *_: attend(queries, cache), "padded SDPA": sdpa},
        check=check_attention(place),
        bytes=2 * sequences * place.heads * mean * place.head_dim * place.dtype.itemsize,
        read={"ours": lambda inputs, got: got[0]},
        limit=2e-2,
    )


# MomentKV ------------------------------------------------------------------------------------------------------------------------


def random_moments(place: Place, batch: int, seed: int) -> Moments:
    """Moments of 500 evicted tokens of each head, in float32."""
    keys, values = (place.states(batch, place.heads, 500, place.head_dim, seed=seed + part, dtype=torch.float32) for part in (5, 6))
    count = torch.full((batch, place.heads), 500, device=place.device)
    return Moments(count, keys.sum(dim=2), values.sum(dim=2), values.mT @ keys)


def moment_inputs(place: Place, batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """The arguments of `momentkv.step`: query, new key and value, full cache, positions, moments, position of the new token."""
    query = place.states(batch, place.heads * place.group, place.head_dim, seed=seed + 7)
    new = (place.states(batch, place.heads, place.head_dim, seed=seed + part) for part in (8, 9))
    positions = torch.arange(length, device=place.device).repeat(batch, place.heads, 1)
    position = torch.full((batch, place.heads), length, device=place.device)
    return query, *new, *place.cache(batch, length, seed), positions, random_moments(place, batch, seed), position


def moments_of_head(moments: Moments) -> reference.momentkv.Moments:
    return reference.momentkv.Moments(*exact(*(field[:1, :1] for field in moments)))


def step_row(batch: int, length: int) -> Callable[[Place], Work]:
    """A decoding step of MomentKV in place: attend, score, evict, correct, update."""

    def build(place: Place) -> Work:
        step, attend = place.ours("momentkv", "step"), place.ours("attention", "attend")
        sequences, tokens = place.batch(batch), place.tokens(length)

        def make(seed: int) -> tuple[Any, ...]:
            return moment_inputs(place, sequences, tokens, seed)

        def plain(query: torch.Tensor, new_key: Any, new_value: Any, keys: torch.Tensor, values: torch.Tensor, *_: Any) -> Any:
            lengths = torch.full(keys.shape[:2], tokens, device=place.device)
            return attend(query[:, :, None], CompressedCache(keys.flatten(0, 2), values.flatten(0, 2), lengths, lengths))

        def check(inputs: tuple[Any, ...], got: torch.Tensor) -> float:
            query, new_key, new_value, keys, values, _, moments, _ = inputs
            head = exact(query[:1, : place.group], new_key[:1, :1], new_value[:1, :1], keys[:1, :1], values[:1, :1])
            want = reference.momentkv.decode_step(*head, moments_of_head(moments), tokens).output
            return error(got[:1, : place.group], want)

        state = place.head_dim**2 + 2 * place.head_dim
        return Work(
            make=make,
            arms={"ours": step, "plain decode": plain, "eager torch": momentkv_torch},
            check=check,
            bytes=sequences * place.heads * (2 * tokens * place.head_dim * place.dtype.itemsize + 2 * 4 * state),
            flops=2.0 * sequences * place.heads * tokens * place.head_dim**2,
            # Attention without moments is another function: it is timed, not compared.
            read={"plain decode": lambda inputs, got: None},
            limit=2e-2,
        )

    return build


def prompt_moments_row(place: Place) -> Work:
    tokens = place.tokens(XL)
    count = min(place.tokens(1024), tokens // 2)
    try:
        compress = place.ours("momentkv", "compress_prompt")
    except NoKernel:
        if place.device.startswith("cuda"):
            raise
        gather, update = place.ours("cache", "compress"), place.ours("momentkv", "update")

        def compress(keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor) -> tuple[CompressedCache, Moments]:
            return gather(keys, values, kept), update(no_moments(keys, values), keys, values, ~kept)

    def make(seed: int) -> tuple[Any, ...]:
        kept = random_mask(place, 1, tokens, count, seed)
        return *place.cache(1, tokens, seed), kept, positions_of(kept, count)

    def check(inputs: tuple[Any, ...], got: torch.Tensor) -> float:
        keys, values, kept = exact(*(x[:1, :1] for x in inputs[:3]))
        gone = ~kept[0, 0]
        return error(got[0, 0], values[0, 0][gone].T @ keys[0, 0][gone])

    def torch_arm(keys: Any, values: Any, kept: Any, index: Any) -> Any:
        return moments_torch(keys, values, kept, index)

    return Work(
        make=make,
        arms={"ours": lambda k, v, kept, index: compress(k, v, kept), "masked product, gathers": torch_arm},
        check=check,
        bytes=2 * (tokens + count) * place.heads * place.head_dim * place.dtype.itemsize,
        flops=2.0 * tokens * place.heads * place.head_dim**2,
        read={
            "ours": lambda inputs, got: got[1].value_key_sum,
            "masked product, gathers": lambda inputs, got: got[-1],
        },
        waits=frozenset({"ours"}),
    )


def mix_row(place: Place) -> Work:
    attend, plain = place.ours("momentkv", "attend"), place.ours("attention", "attend")
    sequences, tokens = place.batch(32), place.tokens(1024)

    def make(seed: int) -> tuple[Any, ...]:
        query, _, _, keys, values, _, moments, _ = moment_inputs(place, sequences, tokens, seed)
        return query, keys, values, torch.ones(keys.shape[:3], dtype=torch.bool, device=place.device), moments

    def without(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor, moments: Any) -> Any:
        lengths = torch.full(keys.shape[:2], tokens, device=place.device)
        return plain(query[:, :, None], CompressedCache(keys.flatten(0, 2), values.flatten(0, 2), lengths, lengths))

    def check(inputs: tuple[Any, ...], got: torch.Tensor) -> float:
        query, keys, values, kept, moments = inputs
        head = exact(query[:1, : place.group], keys[:1, :1], values[:1, :1], kept[:1, :1])
        return error(got[:1, : place.group], reference.momentkv.attend(*head, moments_of_head(moments)))

    return Work(
        make=make,
        arms={"ours": attend, "attention without moments": without},
        check=check,
        bytes=sequences * place.heads * (2 * tokens * place.head_dim * place.dtype.itemsize + 4 * place.head_dim**2),
        read={"attention without moments": lambda inputs, got: None},
        limit=2e-2,
    )


def gvote_row(place: Place) -> Work:
    tokens, select = place.tokens(XL), place.ours("gvote", "select")
    count, dim = place.heads * place.group, place.head_dim

    def make(seed: int) -> tuple[Any, ...]:
        # Logits of deviation 3: nine tokens in a hundred hold 95 % of the mass. Random weights would give flat attention.
        query = 3 * place.states(1, count, dim, seed=seed + 7)
        sampled = query[:, :, None] + place.states(1, count, 8, dim, seed=seed + 8)
        return query, place.cache(1, tokens, seed)[0], sampled

    def check(inputs: tuple[Any, ...], got: torch.Tensor) -> float:
        query, keys, sampled = inputs
        want = reference.gvote.select(*exact(query[:, : place.group], keys[:, :1], sampled[:, : place.group]), p=0.95)
        return float((exact(got[0, 0])[0] != want[0, 0]).mean())

    return Work(
        make=make,
        arms={"ours": lambda query, keys, sampled: select(query, keys, sampled, p=0.95), "eager torch": gvote_torch},
        check=check,
        bytes=2 * tokens * place.heads * dim * place.dtype.itemsize,
        flops=2.0 * tokens * count * 9 * dim,
        limit=5e-3,  # tokens whose logits nearly tie with the last vote of one of 32 rows
    )


KERNEL_ROWS = [
    Row("1", "LagKV: score, select, compact; T = 131072, L = 128, r = 0.25", ("lagkv",), lagkv_row, 185e-6, 6, "eager torch"),
    Row("2", "KeyDiff: score; T = 131072", ("keydiff",), keydiff_row, 145e-6, 4, "eager torch"),
    Row("2b", "KeyDiff: score with a kept anchor; T = 131072", ("keydiff",), keydiff_anchor_row, 73e-6, 2, "our two passes"),
    Row("3", "Expected Attention: score; T = 131072", ("expected_attention",), expected_attention_row, 500e-6, 5, "eager torch"),
    Row("3b", "Expected Attention: query statistics", ("expected_attention",), statistics_row, 350e-6, 15, "kvpress"),
    Row("4", "select n/2 of 8 x 131072", ("selection",), select_row(8, XL), 25e-6, 4, "torch.topk", True),
    Row("4-ties", "as 4, scores of 16 values", ("selection",), select_row(8, XL, levels=16), None, None, "torch.topk", True),
    Row("4-256", "select n/2 of 256 x 131072", ("selection",), select_row(256, XL), 110e-6, 4, "torch.topk"),
    Row("4b", "select n/2 of 8 x 8192", ("selection",), select_row(8, 8192), 10e-6, 5, "torch.topk", True),
    Row("5", "compaction of K and V; T = 131072, half kept", ("cache",), compact_row, 150e-6, 1.3, "two torch.gather"),
    Row("6", "decode attention, B = 32, n = 4096", ("attention", "cache"), decode_row(32, 4096), 150e-6, 1, "SDPA"),
    Row("6b", "decode attention, B = 1, n = 1024", ("attention", "cache"), decode_row(1, 1024), 10e-6, 1.6, "SDPA", True),
    Row("7", "decode attention, ragged, mean 4096, longest 3 x", ("attention", "cache"), ragged_row, 157e-6, 2.3, "padded SDPA"),
    Row("8", "MomentKV: a decoding step, B = 32, L = 1024", ("momentkv",), step_row(32, 1024), 52e-6, 10, "eager torch"),
    Row("8b", "MomentKV: a decoding step, B = 1, L = 512", ("momentkv",), step_row(1, 512), 10e-6, 5, "eager torch", True),
    Row("9", "MomentKV: moments and compaction of a prompt", ("momentkv",), prompt_moments_row, 175e-6, 4, "masked product"),
    Row("10", "GVote: budgets, votes, union; T = 131072, S = 8", ("gvote",), gvote_row, 220e-6, 8, "eager torch"),
    Row("11", "MomentKV: attention with the moments mixed in", ("momentkv",), mix_row, None, None, "attention without moments"),
]
