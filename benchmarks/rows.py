"""The rows of the GPU benchmark: for each, its inputs, the arms that are timed side by side, the check and the least bytes.

A row is measured on one layer of Llama-3.1-8B (8 KV heads, 32 query heads, 128 channels, bfloat16). Only the sizes need a GPU:
`Place(device="cpu", shrink=512)` makes the same rows small enough to check on a CPU.

`bytes` is the least number of bytes that any implementation has to move, not the bytes that ours moves; `flops` is the least number
of multiplications. Checks compare one KV head with the float64 mathematics of `reference`.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.row import (
    Place,
    Row,
    Work,
    compiled,
    error,
    exact,
    first_head,
    layer_module,
    once,
    optional,
    press_arm,
    rows_apart,
)
from benchmarks.torch_peers import (
    expected_attention_torch,
    gvote_torch,
    keydiff_torch,
    lagkv_torch,
    momentkv_torch,
    moments_torch,
    received_torch,
    statistics_torch,
)
from evictionary.optimized.cache import CompressedCache
from evictionary.optimized.momentkv import Moments
from evictionary.optimized.rope import rotate
from evictionary.optimized.states import zero_moments
from evictionary.reference import attention as reference_attention
from evictionary.reference import cache as reference_cache
from evictionary.reference import expected_attention as reference_expected_attention
from evictionary.reference import gvote as reference_gvote
from evictionary.reference import keydiff as reference_keydiff
from evictionary.reference import knorm as reference_knorm
from evictionary.reference import lagkv as reference_lagkv
from evictionary.reference import momentkv as reference_momentkv

XL = 131_072


# scoring -------------------------------------------------------------------------------------------------------------------------


def lagkv_row(place: Place) -> Work:
    tokens, lag, sinks = place.tokens(XL), max(8, 128 // place.shrink), 16 if place.shrink == 1 else 4
    settings = {"keep_ratio": 0.25, "sink_size": sinks, "lag_size": lag}
    compress = place.ours("lagkv", "compress")
    retained = reference_lagkv.retained_length(tokens, **settings)

    @once
    def want(inputs: tuple[Any, ...]) -> np.ndarray:
        keys, values = first_head(*inputs)
        return keys[reference_lagkv.select(keys, values, **settings)]

    def press(kvpress: Any, label: str) -> Callable[..., Any]:
        one = kvpress.LagKVPress(compression_ratio=1 - retained / tokens, n_sink=sinks, lag_size=lag)
        return lambda keys, values: one.compress(layer_module(place), None, keys, values, None, {})

    def eager(keys: torch.Tensor, values: torch.Tensor) -> Any:
        return lagkv_torch(keys, values, lag // 4, sinks, lag)

    arms, missing = press_arm("LagKVPress", press)
    one_head = {name: lambda inputs, got: got[0][0, 0] for name in ("eager torch", "torch.compile", *arms)}
    return Work(
        make=lambda seed: place.cache(1, tokens, seed),
        arms={"ours": lambda k, v: compress(k, v, **settings), "eager torch": eager, **compiled(eager, place), **arms},
        check=lambda inputs, got: rows_apart(got, want(inputs)),
        bytes=2 * place.bytes_of(tokens + retained),
        read={"ours": lambda inputs, got: got.keys[:retained], **one_head},
        missing=missing,
        limit=0.01,  # float32 may exchange scores that nearly tie
    )


def checked_head(reference: Callable[..., np.ndarray]) -> Callable[[tuple[Any, ...], torch.Tensor], float]:
    """Compare the first KV head with a reference of the inputs."""
    want = once(lambda inputs: reference(inputs)[0, 0])
    return lambda inputs, got: error(got[0, 0], want(inputs))


def check_keydiff() -> Callable[[tuple[Any, ...], torch.Tensor], float]:
    return checked_head(lambda inputs: reference_keydiff.score(first_head(inputs[0])[0]))


def keydiff_row(place: Place) -> Work:
    tokens, score = place.tokens(XL), place.ours("keydiff", "score")
    arms, missing = press_arm(
        "KeyDiffPress", lambda kvpress, _: lambda keys: kvpress.KeyDiffPress().score(None, None, keys, None, None, {})
    )
    return Work(
        make=lambda seed: (place.cache(1, tokens, seed)[0],),
        arms={"ours": score, "eager torch": keydiff_torch, **compiled(keydiff_torch, place), **arms},
        check=check_keydiff(),
        bytes=2 * place.bytes_of(tokens),
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
        check=check_keydiff(),
        bytes=place.bytes_of(tokens),
    )


def expected_attention_row(place: Place) -> Work:
    tokens, score = place.tokens(XL), place.ours("expected_attention", "score")
    queries, dim = place.heads * place.group, place.head_dim

    def make(seed: int) -> tuple[Any, ...]:
        factor = place.states(1, queries, dim, dim, seed=seed, dtype=torch.float32) / math.sqrt(dim)
        mean = place.states(1, queries, dim, seed=seed + 1, dtype=torch.float32) / 4
        return *place.cache(1, tokens, seed), mean, factor @ factor.mT

    def reference(inputs: tuple[Any, ...]) -> np.ndarray:
        keys, values, mean, covariance = inputs
        group = slice(0, place.group)
        head = exact(keys[:1, :1], values[:1, :1], mean[:, group], covariance[:, group])
        return reference_expected_attention.score(*head)

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
        check=checked_head(reference),
        bytes=2 * place.bytes_of(tokens),
        flops=2.0 * tokens * queries * dim * dim,
        missing=missing,
        limit=1e-2,
    )


def statistics_row(place: Place) -> Work:
    tokens, unrotated = place.tokens(XL), place.ours("expected_attention", "unrotated_statistics")
    count, dim = place.heads * place.group, place.head_dim

    def make(seed: int) -> tuple[Any, ...]:
        return place.states(1, count, tokens, dim, seed=seed), torch.arange(tokens, device=place.device)

    @once
    def want(inputs: tuple[Any, ...]) -> tuple[np.ndarray, np.ndarray]:
        plain = rotate(inputs[0][:1, :1].double(), -inputs[1])
        return reference_expected_attention.query_statistics(exact(plain)[0])

    def check(inputs: tuple[Any, ...], got: tuple[torch.Tensor, torch.Tensor]) -> float:
        mean, covariance = want(inputs)
        return max(float(np.abs(first_head(got[0])[0] - mean).max()), error(got[1][:1, :1], covariance))

    def press(kvpress: Any, label: str) -> Callable[..., Any]:
        # kvpress projects the hidden states of the prompt once more instead. The projection is not checked against ours.
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
        read={name: lambda inputs, got: None for name in arms},  # its queries differ: they are projected once more
        missing=missing,
        limit=2e-2,
    )


# selection and compaction --------------------------------------------------------------------------------------------------------


# What the normal numbers of a selection become. KeyDiff's cosines and the scores of Expected Attention have one top byte in common,
# which is all that the first pass of a radix selection sees.
SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda scores: scores,
    "16 values": lambda scores: (scores * 16 / 6).round(),
    "KeyDiff": lambda scores: (0.02 * scores - 0.75).clamp(-0.99, -0.51),
    "EA": lambda scores: (0.015 * scores + 0.22).clamp(0.13, 0.49),
}


def select_row(rows: int, length: int, kind: str = "normal") -> Callable[[Place], Work]:
    """Top-k with k = n / 2, of one kind of SCORES."""

    def build(place: Place) -> Work:
        top_k, tokens = place.ours("selection", "top_k"), place.tokens(length)
        half = tokens // 2

        def make(seed: int) -> tuple[Any, ...]:
            return (SCORES[kind](place.states(rows, tokens, seed=seed, dtype=torch.float32)),)

        want = once(lambda scores: scores.sort(dim=-1, descending=True).values[:, :half].sum(dim=-1))

        def check(inputs: tuple[Any, ...], kept: torch.Tensor) -> float:
            scores = inputs[0].double()
            if not kept.sum(dim=-1).eq(half).all():
                return math.inf
            best = want(scores)
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
    copy = importlib.import_module("evictionary.optimized.kernels.cache").copy_kept if place.is_gpu else None

    def make(seed: int) -> tuple[Any, ...]:
        kept = random_mask(place, 1, tokens, half, seed)
        rows = kept.reshape(-1).cumsum(0)
        return *place.cache(1, tokens, seed), kept, rows, positions_of(kept, half)

    def gather(keys: torch.Tensor, values: torch.Tensor, kept: Any, rows: Any, index: torch.Tensor) -> Any:
        index = index[..., None].expand(-1, -1, -1, keys.shape[-1])
        return keys.gather(2, index), values.gather(2, index)

    counted = {"ours, with the count": lambda k, v, kept, rows, index: compress(k, v, kept)}
    alone = {"ours": lambda k, v, kept, rows, index: copy(k, v, kept, rows, place.heads * half)} if copy else {}
    want = once(lambda inputs: exact(inputs[0][0, 0])[0][exact(inputs[2][0, 0])[0]])
    arms = {**alone, **counted, "two torch.gather": gather}
    return Work(
        make=make,
        arms=arms if copy else {"ours": counted["ours, with the count"], "two torch.gather": gather},
        check=lambda inputs, got: rows_apart(got, want(inputs)),
        bytes=4 * place.bytes_of(half),
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


def whole_cache(keys: torch.Tensor, values: torch.Tensor) -> CompressedCache:
    """Keys and values [B, H_kv, T, D] as a compressed cache from which nothing is evicted; attention reads no positions of it."""
    lengths = torch.full(keys.shape[:2], keys.shape[2], device=keys.device)
    return CompressedCache(keys.flatten(0, 2), values.flatten(0, 2), lengths, lengths)


def check_attention(place: Place) -> Callable[[tuple[Any, ...], Any], float]:
    """Compare the last head of a decoded batch with the reference."""

    @once
    def want(inputs: tuple[Any, ...]) -> np.ndarray:
        queries, cache = inputs[:2]
        count = int(cache.lengths[-1, -1])
        one = reference_cache.CompressedCache(
            *exact(cache.keys[-count:], cache.values[-count:]), np.arange(count), np.array([[count]])
        )
        return reference_attention.attend(exact(queries[-1:, -place.group :])[0], one)[0]

    return lambda inputs, got: error(got[-1:, -place.group :], want(inputs))


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

        flash, missing = flashinfer_arm(place, torch.full((sequences, place.heads), tokens), 16)
        return Work(
            make=make,
            arms={"ours": attend, "SDPA": sdpa, **flash},
            check=check_attention(place),
            bytes=2 * sequences * place.bytes_of(tokens),
            read={"ours": lambda inputs, got: got[0]},
            missing=missing,
            limit=2e-2,
        )

    return build


def flashinfer_decode(place: Place, lengths: torch.Tensor, page: int) -> Callable[[torch.Tensor, CompressedCache], torch.Tensor]:
    """FlashInfer's paged decode, planned: every KV head is a request of its own, its tokens in pages of `page` tokens."""
    import flashinfer

    workspace = torch.empty(128 * 2**20, dtype=torch.uint8, device=place.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    pages = lengths.flatten().to(place.device, torch.int32) // page
    starts = torch.cat([pages.new_zeros(1), pages.cumsum(0, dtype=torch.int32)])
    indices = torch.arange(int(starts[-1]), dtype=torch.int32, device=place.device)
    kinds = {"q_data_type": place.dtype, "kv_data_type": place.dtype}
    wrapper.plan(starts, indices, torch.full_like(pages, page), place.group, 1, place.head_dim, page, **kinds)

    def run(queries: torch.Tensor, cache: CompressedCache) -> torch.Tensor:
        paged = tuple(x.view(-1, page, 1, place.head_dim) for x in cache[:2])
        return wrapper.run(queries.reshape(-1, place.group, place.head_dim), paged).view_as(queries)

    return run


def flashinfer_arm(place: Place, lengths: torch.Tensor, page: int) -> tuple[dict[str, Callable[..., Any]], dict[str, str]]:
    """The arm of FlashInfer, or why it is missing; the plan is not timed."""
    flashinfer, why = optional("flashinfer")
    if flashinfer is None:
        return {}, {"FlashInfer": why}
    label = f"FlashInfer {flashinfer.__version__}"
    try:
        return {label: flashinfer_decode(place, lengths, page)}, {}
    except Exception as error:
        return {}, {label: f"{type(error).__name__}: {error}"}


def ragged_row(place: Place) -> Work:
    """Ragged heads, beside padded ones: every KV head is a head of its own, and the query heads of its group are its queries."""
    attend, sequences, mean = place.ours("attention", "attend"), place.batch(32), place.tokens(4096)
    drawn = np.random.default_rng(0).lognormal(sigma=0.7, size=(sequences, place.heads))
    lengths = torch.from_numpy(np.minimum(drawn / drawn.mean(), 3.0) * mean).long().clamp(min=1)  # in every set of inputs
    filled = (torch.arange(int(lengths.max())) < lengths[..., None]).to(place.device)
    ends = lengths.to(place.device)

    def make(seed: int) -> tuple[Any, ...]:
        queries = place.states(sequences, place.heads * place.group, 1, place.head_dim, seed=seed + 7)
        cache = flat_cache(place, lengths, 10 * seed)
        padded = []
        for states in cache[:2]:
            whole = states.new_zeros(*filled.shape, place.head_dim)
            whole[filled] = states
            padded.append(whole)
        return queries, cache, *padded

    def sdpa(queries: torch.Tensor, cache: Any, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        grouped = queries.view(sequences, place.heads, place.group, place.head_dim)
        return scaled_dot_product_attention(grouped, keys, values, attn_mask=filled[:, :, None]).view_as(queries)

    shape = (sequences, place.heads, place.group, filled.shape[2])
    blocks = create_block_mask(lambda b, h, query, token: token < ends[b, h], *shape, device=place.device)
    flex_attend = torch.compile(flex_attention, dynamic=False) if place.is_gpu else flex_attention

    def flex(queries: torch.Tensor, cache: Any, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        grouped = queries.view(sequences, place.heads, place.group, place.head_dim)
        return flex_attend(grouped, keys, values, block_mask=blocks).view_as(queries)

    flash, missing = flashinfer_arm(place, lengths, 1)
    flash = {name: lambda queries, cache, *_, run=run: run(queries, cache) for name, run in flash.items()}
    return Work(
        make=make,
        arms={"ours": lambda queries, cache, *_: attend(queries, cache), "padded SDPA": sdpa, "FlexAttention": flex, **flash},
        check=check_attention(place),
        bytes=2 * sequences * place.bytes_of(mean),
        read={"ours": lambda inputs, got: got[0]},
        missing=missing,
        limit=2e-2,
    )


# the attention that keys receive, and the simplest methods ----------------------------------------------------------------------


def received_row(stem: str, length: int, window: int) -> Callable[[Place], Work]:
    """The attention that every key receives from the last `window` queries; 0: from all, beside the attention of the prompt."""

    def build(place: Place) -> Work:
        score, tokens = place.ours("received_attention", "score", entry=(stem, "score")), place.tokens(length)
        count, last = place.heads * place.group, min(window, tokens // 2) if window else tokens
        options = {"window_size": last} if stem == "snapkv" else {}

        def make(seed: int) -> tuple[Any, ...]:
            return place.states(1, count, last, place.head_dim, seed=seed + 7), *place.cache(1, tokens, seed)

        def reference(inputs: tuple[Any, ...]) -> np.ndarray:
            queries, keys = inputs[:2]
            # TOVA's score is the mean over all heads; the other scores are compared in the first head.
            heads = exact(queries, keys) if stem == "tova" else exact(queries[:, : place.group], keys[:, :1])
            return importlib.import_module(f"evictionary.reference.{stem}").score(*heads, **options)

        def attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            return scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)

        def eager(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            return received_torch(stem, queries, keys)

        wanted = once(lambda inputs: reference(inputs)[0, 0])

        def check(inputs: tuple[Any, ...], got: torch.Tensor) -> float:
            want = wanted(inputs)
            finite = np.isfinite(want)  # SnapKV's window is infinite
            return error(exact(got[0, 0])[0][finite], want[finite])

        beside = {"eager torch": eager, **compiled(eager, place)} if window else {"SDPA of the prompt": attention}
        pairs = tokens * last - last * (last - 1) // 2  # of a query and a token that it sees
        return Work(
            make=make,
            arms={"ours": lambda queries, keys, values: score(queries, keys, **options), **beside},
            check=check,
            bytes=place.bytes_of(tokens) * (2 if window else 1),
            flops=2.0 * 2 * count * place.head_dim * pairs,
            read={"SDPA of the prompt": lambda inputs, got: None},  # another function, of as many products
            limit=1e-3,
        )

    return build


def norm_row(place: Place) -> Work:
    tokens, score = place.tokens(XL), place.ours("knorm", "score")
    norm = lambda keys: -torch.linalg.vector_norm(keys, dim=-1, dtype=torch.float32)  # noqa: E731
    return Work(
        make=lambda seed: (place.cache(1, tokens, seed)[0],),
        arms={"ours": score, "eager torch": norm, **compiled(norm, place)},
        check=checked_head(lambda inputs: reference_knorm.score(first_head(inputs[0])[0])),
        bytes=place.bytes_of(tokens),
    )


def ends_row(place: Place) -> Work:
    tokens, compress = place.tokens(XL), place.ours("streaming_llm", "compress")
    half = tokens // 2

    def cut(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.cat([states[:, :, :4], states[:, :, tokens - half + 4 :]], dim=2) for states in (keys, values))

    want = once(lambda inputs: exact(torch.cat([inputs[0][0, 0, :4], inputs[0][0, 0, tokens - half + 4 :]]))[0])
    return Work(
        make=lambda seed: place.cache(1, tokens, seed),
        arms={"ours": lambda k, v: compress(k, v, budget=half), "two torch.cat": cut},
        check=lambda inputs, got: rows_apart(got, want(inputs)),
        bytes=4 * place.bytes_of(half),
        read={"ours": lambda inputs, got: got.keys[:half], "two torch.cat": lambda inputs, got: got[0][0, 0]},
        limit=0.0,
    )


# MomentKV ------------------------------------------------------------------------------------------------------------------------


def random_moments(place: Place, batch: int, seed: int) -> Moments:
    """Moments of 500 evicted tokens of each head, in float32."""
    keys, values = (place.states(batch, place.heads, 500, place.head_dim, seed=seed + part, dtype=torch.float32) for part in (5, 6))
    count = torch.full((batch, place.heads), 500, device=place.device)
    return Moments(count, keys.sum(dim=2), values.sum(dim=2), values.mT @ keys)


NEW_TOKENS = 64  # of a set of inputs: as many calls of a graph insert tokens that differ


def moment_inputs(place: Place, batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """The arguments of `momentkv.step`: query, new key and value, full cache, positions, moments, position of the new token."""
    query = place.states(batch, place.heads * place.group, place.head_dim, seed=seed + 7)
    new = (place.states(batch, place.heads, place.head_dim, seed=seed + part) for part in (8, 9))
    positions = torch.arange(length, device=place.device).repeat(batch, place.heads, 1)
    position = torch.full((batch, place.heads), length, device=place.device)
    return query, *new, *place.cache(batch, length, seed), positions, random_moments(place, batch, seed), position


def each_token(step: Callable[..., Any]) -> Callable[..., Any]:
    """`step` with the next of the new tokens [N, B, H_kv, D] at every call: a graph captures many calls, each with its own."""
    calls = itertools.count()

    def run(query: torch.Tensor, new_keys: torch.Tensor, new_values: torch.Tensor, *rest: Any) -> Any:
        place = next(calls) % len(new_keys)
        return step(query, new_keys[place], new_values[place], *rest)

    return run


def draw_tokens(inputs: tuple[Any, ...]) -> None:
    """Draw other new tokens: a cache into which the same ones are written again and again is not one that occurs."""
    inputs[1].normal_()
    inputs[2].normal_()


def moments_of_head(moments: Moments) -> reference_momentkv.Moments:
    return reference_momentkv.Moments(*first_head(*moments))


def step_row(batch: int, length: int) -> Callable[[Place], Work]:
    """A decoding step of MomentKV in place: attend, score, evict, correct, update."""

    def build(place: Place) -> Work:
        step, attend = place.ours("momentkv", "step"), place.ours("attention", "attend")
        sequences, tokens = place.batch(batch), place.tokens(length)

        def make(seed: int) -> tuple[Any, ...]:
            query, _, _, *rest = moment_inputs(place, sequences, tokens, seed)
            shape = (NEW_TOKENS, sequences, place.heads, place.head_dim)
            return query, *(place.states(*shape, seed=seed + part) for part in (8, 9)), *rest

        def plain(query: torch.Tensor, new_key: Any, new_value: Any, keys: torch.Tensor, values: torch.Tensor, *_: Any) -> Any:
            return attend(query[:, :, None], whole_cache(keys, values))

        @once
        def want(inputs: tuple[Any, ...]) -> np.ndarray:
            query, new_keys, new_values, keys, values, _, moments, _ = inputs
            head = first_head(new_keys[0], new_values[0], keys, values)
            group = exact(query[:1, : place.group])[0]
            return reference_momentkv.decode_step(group, *head, moments_of_head(moments), tokens).output

        state = place.head_dim**2 + 2 * place.head_dim
        return Work(
            make=make,
            arms={"ours": each_token(step), "plain decode": plain, "eager torch": each_token(momentkv_torch)},
            check=lambda inputs, got: error(got[:1, : place.group], want(inputs)),
            renew=draw_tokens,
            bytes=sequences * (2 * place.bytes_of(tokens) + place.heads * 2 * 4 * state),
            flops=2.0 * sequences * place.heads * tokens * place.head_dim**2,
            # Attention without moments is another function: it is timed, not compared.
            read={"plain decode": lambda inputs, got: None},
            limit=2e-2,
        )

    return build


def prompt_moments_row(place: Place) -> Work:
    tokens = place.tokens(XL)
    count = min(place.tokens(1024), tokens // 2)
    compress = place.ours("momentkv", "compress_prompt")
    kernel = importlib.import_module("evictionary.optimized.kernels.momentkv").compress_prompt if place.is_gpu else None

    def make(seed: int) -> tuple[Any, ...]:
        kept = random_mask(place, 1, tokens, count, seed)
        return *place.cache(1, tokens, seed), kept, positions_of(kept, count)

    @once
    def want(inputs: tuple[Any, ...]) -> np.ndarray:
        keys, values, kept = first_head(*inputs[:3])
        gone = ~kept[0, 0]
        return values[0, 0][gone].T @ keys[0, 0][gone]

    def counted(keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor, index: Any) -> Any:
        return compress(keys, values, kept)

    # The peer is given what is kept, so ours is too: the host knows the number of kept tokens, and waits for nothing.
    def known(keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor, index: Any) -> Any:
        return kernel(keys, values, kept, zero_moments(keys, values), total=place.heads * count)

    arms = {"ours": known, "ours, with the count": counted} if kernel else {"ours": counted}
    return Work(
        make=make,
        arms={**arms, "masked product, gathers": moments_torch},
        check=lambda inputs, got: error(got[0, 0], want(inputs)),
        bytes=2 * place.bytes_of(tokens + count),
        flops=2.0 * tokens * place.heads * place.head_dim**2,
        read={
            **{name: lambda inputs, got: got[1].value_key_sum for name in arms},
            "masked product, gathers": lambda inputs, got: got[-1],
        },
        waits=frozenset({"ours, with the count"}),
    )


def mix_row(place: Place) -> Work:
    attend, plain = place.ours("momentkv", "attend"), place.ours("attention", "attend")
    sequences, tokens = place.batch(32), place.tokens(1024)

    def make(seed: int) -> tuple[Any, ...]:
        query, _, _, keys, values, _, moments, _ = moment_inputs(place, sequences, tokens, seed)
        return query, keys, values, torch.ones(keys.shape[:3], dtype=torch.bool, device=place.device), moments

    def without(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor, moments: Any) -> Any:
        return plain(query[:, :, None], whole_cache(keys, values))

    @once
    def want(inputs: tuple[Any, ...]) -> np.ndarray:
        query, keys, values, kept, moments = inputs
        group = exact(query[:1, : place.group])[0]
        return reference_momentkv.attend(group, *first_head(keys, values, kept), moments_of_head(moments))

    return Work(
        make=make,
        arms={"ours": attend, "attention without moments": without},
        check=lambda inputs, got: error(got[:1, : place.group], want(inputs)),
        bytes=sequences * (2 * place.bytes_of(tokens) + place.heads * 4 * place.head_dim**2),
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

    @once
    def want(inputs: tuple[Any, ...]) -> np.ndarray:
        query, keys, sampled = inputs
        return reference_gvote.select(*exact(query[:, : place.group], keys[:, :1], sampled[:, : place.group]), p=0.95)[0, 0]

    return Work(
        make=make,
        arms={"ours": lambda query, keys, sampled: select(query, keys, sampled, p=0.95), "eager torch": gvote_torch},
        check=lambda inputs, got: float((exact(got[0, 0])[0] != want(inputs)).mean()),
        bytes=2 * place.bytes_of(tokens),
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
    Row("4-ties", "as 4, scores of 16 values", ("selection",), select_row(8, XL, "16 values"), None, None, "torch.topk", True),
    Row("4-kd", "as 4, scores as KeyDiff's", ("selection",), select_row(8, XL, "KeyDiff"), 25e-6, 4, "torch.topk", True),
    Row("4-ea", "as 4, scores as Expected Attention's", ("selection",), select_row(8, XL, "EA"), 25e-6, 4, "torch.topk", True),
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
    Row("15", "H2O: score of a prompt, n = 16384", ("h2o",), received_row("h2o", 16384, 0), None, 1, "SDPA of the prompt"),
    Row("16", "SnapKV: score, W = 32; T = 131072", ("snapkv",), received_row("snapkv", XL, 32), 170e-6, 5, "eager torch"),
    Row("17", "TOVA: score; T = 131072", ("tova",), received_row("tova", XL, 1), 150e-6, 5, "eager torch"),
    Row("18", "KNorm: score; T = 131072", ("knorm",), norm_row, 75e-6, 2, "eager torch"),
    Row("19", "StreamingLLM: half of T = 131072 kept", ("streaming_llm",), ends_row, 150e-6, 1, "two torch.cat"),
    Row("11", "MomentKV: attention with the moments mixed in", ("momentkv",), mix_row, None, None, "attention without moments"),
]
