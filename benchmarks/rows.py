"""The rows of the GPU benchmark: for each, its inputs, the arms that are timed side by side, the check and
the least bytes.

A row is measured on one layer of Llama-3.1-8B (8 KV heads, 32 query heads, 128 channels, bfloat16). Only the
sizes need a GPU: `Place(device="cpu", shrink=512)` makes the same rows small enough to check on a CPU.

`bytes` is the least number of bytes that any implementation has to move, not
the bytes that ours moves; `flops` is the least number of multiplications.
Checks compare one KV head with the float64 mathematics of `reference`.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.row import (
    Arm,
    Inputs,
    Place,
    Row,
    Work,
    error,
    exact,
    first_head,
    peer_arm,
    rows_apart,
    sides,
    sized,
)
from benchmarks.torch_peers import (
    expected_attention_torch,
    gvote_torch,
    keydiff_torch,
    lagkv_torch,
    moments_torch,
    received_torch,
    statistics_torch,
)
from evictionary.optimized.cache import CompressedCache
from evictionary.optimized.momentkv import Moments, step_trusted
from evictionary.optimized.rope import rotate
from evictionary.optimized.states import zero_moments

# The mathematics; what is timed comes from `place.ours`.
from evictionary.reference import attention, cache, expected_attention, gvote, keydiff, knorm, lagkv, momentkv
from evictionary.spec_tests.judge.implementation import oracle

XL = 131_072


# scoring
# ------------------------------------------------------------------------------------------------------------


def lagkv_row(place: Place) -> Work:
    tokens, lag, sinks = place.tokens(XL), max(8, 128 // place.shrink), 16 if place.shrink == 1 else 4
    settings = {"keep_ratio": 0.25, "sink_size": sinks, "lag_size": lag}
    compress, retained = place.ours("lagkv", "compress"), lagkv.retained_length(tokens, **settings)

    def want(inputs: Inputs) -> np.ndarray:
        states = first_head(*inputs)
        return states[0][lagkv.select(*states, **settings)]

    def press(kvpress: Any) -> Arm:
        one = kvpress.LagKVPress(compression_ratio=1 - retained / tokens, n_sink=sinks, lag_size=lag)
        return lambda keys, values: one.compress(place.layer, None, keys, values, None, {})

    return Work(
        make=lambda seed: place.cache(1, tokens, seed),
        bytes=2 * place.bytes_of(tokens + retained),
        **sides(
            place,
            lambda keys, values: compress(keys, values, **settings),
            lambda keys, values: lagkv_torch(keys, values, lag // 4, sinks, lag),
            press,
        ),
        want=want,
        read=lambda inputs, got: got[0][0, 0],
        reads={"ours": lambda inputs, got: got.keys[:retained]},
        apart=rows_apart,
        limit=0.01,  # float32 may exchange scores that nearly tie
    )


def want_keydiff(inputs: Inputs) -> np.ndarray:
    return keydiff.score(*first_head(inputs[0]))[0, 0]


def keydiff_row(place: Place) -> Work:
    tokens = place.tokens(XL)
    return Work(
        make=lambda seed: place.cache(1, tokens, seed)[:1],
        bytes=2 * place.bytes_of(tokens),
        **sides(
            place,
            place.ours("keydiff", "score"),
            keydiff_torch,
            lambda kvpress: lambda keys: kvpress.KeyDiffPress().score(None, None, keys, None, None, {}),
        ),
        want=want_keydiff,
    )


def keydiff_anchor_row(place: Place) -> Work:
    tokens, score, anchor_sum = (
        place.tokens(XL),
        place.ours("keydiff", "score"),
        place.ours("keydiff", "anchor_sum"),
    )

    def make(seed: int) -> Inputs:
        keys = place.cache(1, tokens, seed)[0]
        return keys, anchor_sum(keys)

    return Work(
        make=make,
        bytes=place.bytes_of(tokens),
        arms={
            "ours": place.ours("keydiff", "score_with_anchor"),
            "our two passes": lambda keys, anchor: score(keys),
        },
        want=want_keydiff,
    )


def expected_attention_row(place: Place) -> Work:
    tokens, queries, dim = place.tokens(XL), place.heads * place.group, place.head_dim

    def make(seed: int) -> Inputs:
        factor = place.states(1, queries, dim, dim, seed=seed, dtype=torch.float32) / math.sqrt(dim)
        mean = place.states(1, queries, dim, seed=seed + 1, dtype=torch.float32) / 4
        return *place.cache(1, tokens, seed), mean, factor @ factor.mT

    def want(inputs: Inputs) -> np.ndarray:
        of_group = (states[:, : place.group] for states in inputs[2:])
        return expected_attention.score(*first_head(*inputs[:2]), *exact(*of_group))[0, 0]

    def press(kvpress: Any) -> Arm:
        # the statistics are inputs, as they are for the other arms
        class Given(kvpress.ExpectedAttentionPress):
            def get_query_statistics(self, module: Any, hidden_states: Any) -> Any:
                return tuple(x.to(place.dtype) for x in hidden_states)

        one = Given(n_sink=0, epsilon=0.02)
        return lambda k, v, mean, covariance: one.score(place.layer, (mean, covariance), k, v, None, {})

    return Work(
        make=make,
        bytes=2 * place.bytes_of(tokens),
        flops=2.0 * tokens * queries * dim * dim,
        **sides(place, place.ours("expected_attention", "score"), expected_attention_torch, press),
        want=want,
        limit=1e-2,
    )


def statistics_row(place: Place) -> Work:
    tokens, count, dim = place.tokens(XL), place.heads * place.group, place.head_dim

    def want(inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
        return expected_attention.query_statistics(*exact(rotate(inputs[0][:1, :1].double(), -inputs[1])))

    def apart(got: Any, wanted: tuple[np.ndarray, np.ndarray]) -> float:
        mean, covariance = first_head(*got)
        return max(float(np.abs(mean - wanted[0]).max()), error(covariance, wanted[1]))

    def press(kvpress: Any) -> Arm:
        # kvpress projects the hidden states of the prompt once more instead, so its result is another one.
        weight = place.states(count * dim, count * dim, seed=0) / math.sqrt(count * dim)
        module = place.layer
        module.q_proj = lambda hidden: hidden @ weight
        module.rotary_emb = lambda states, positions: (
            states.new_ones(1, 512, dim),
            states.new_zeros(1, 512, dim),
        )
        one = kvpress.ExpectedAttentionPress(n_sink=0)
        return lambda queries, positions: one.get_query_statistics(
            module, queries.view(1, tokens, count * dim)
        )

    arms = sides(place, place.ours("expected_attention", "unrotated_statistics"), statistics_torch, press)
    return Work(
        make=lambda seed: (
            place.states(1, count, tokens, dim, seed=seed),
            torch.arange(tokens, device=place.device),
        ),
        bytes=tokens * count * dim * place.dtype.itemsize,
        flops=2.0 * tokens * count * dim * dim,
        **arms,
        want=want,
        read=lambda inputs, got: got,
        reads={name: None for name in arms["arms"] if name.startswith("kvpress")},
        apart=apart,
        limit=2e-2,
    )


# selection and compaction
# --------------------------------------------------------------------------------------------------------


# What the normal numbers of a selection become. KeyDiff's cosines and the scores of Expected Attention have
# one top byte in common, which is all that the first pass of a radix selection sees.
SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda scores: scores,
    "16 values": lambda scores: (scores * 16 / 6).round(),
    "KeyDiff": lambda scores: (0.02 * scores - 0.75).clamp(-0.99, -0.51),
    "EA": lambda scores: (0.015 * scores + 0.22).clamp(0.13, 0.49),
}


@sized
def select_row(place: Place, rows: int, length: int, kind: str = "normal") -> Work:
    """Top-k with k = n / 2, of one kind of SCORES; compared are the sums of the kept scores."""
    top_k, tokens = place.ours("selection", "top_k"), place.tokens(length)
    half = tokens // 2

    def kept_sums(inputs: Inputs, kept: torch.Tensor) -> torch.Tensor:
        return (inputs[0].double() * kept).sum(dim=-1).where(kept.sum(dim=-1) == half, math.nan)

    def of_indices(inputs: Inputs, got: Any) -> torch.Tensor:
        return kept_sums(
            inputs, torch.zeros_like(inputs[0], dtype=torch.bool).scatter_(-1, got[1].long(), True)
        )

    flash, missing = peer_arm(
        "FlashInfer", "flashinfer-python", lambda flashinfer: lambda scores: flashinfer.top_k(scores, half)
    )
    peers = {"torch.topk": lambda scores: scores.topk(half, dim=-1, sorted=False)} | flash
    return Work(
        make=lambda seed: (SCORES[kind](place.states(rows, tokens, seed=seed, dtype=torch.float32)),),
        bytes=rows * tokens * 5,
        arms={"ours": lambda scores: top_k(scores, half), **peers},
        missing=missing,
        want=lambda inputs: exact(
            inputs[0].double().sort(dim=-1, descending=True).values[:, :half].sum(dim=-1)
        )[0],
        read=kept_sums,
        reads=dict.fromkeys(peers, of_indices),
    )


def random_mask(place: Place, tokens: int, kept: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A mask [1, H_kv, T] that keeps `kept` random tokens
    of each head, and their positions [1, H_kv, kept].
    """
    mask = place.states(1, place.heads, tokens, seed=seed + 1000, dtype=torch.float32).argsort(dim=-1) < kept
    return mask, mask.nonzero()[:, 2].view(1, place.heads, kept)


def told_the_count(place: Place, kernels: str, told: Callable[[Any], Arm], counting: Arm) -> dict[str, Arm]:
    """Ours where the host knows how many tokens stay, so that it waits for nothing, and ours that counts;
    on a CPU the latter.
    """
    if not place.is_gpu:
        return {"ours": counting}
    return {"ours": told(place.kernels(kernels)), "ours, with the count": counting}


def compact_row(place: Place) -> Work:
    tokens = place.tokens(XL)
    half, compress = tokens // 2, place.ours("cache", "compress")

    def make(seed: int) -> Inputs:
        kept, positions = random_mask(place, tokens, half, seed)
        return *place.cache(1, tokens, seed), kept, kept.reshape(-1).cumsum(0), positions

    def gather(keys: torch.Tensor, values: torch.Tensor, kept: Any, rows: Any, index: torch.Tensor) -> Any:
        index = index[..., None].expand(-1, -1, -1, keys.shape[-1])
        return keys.gather(2, index), values.gather(2, index)

    counting = lambda k, v, kept, rows, index: compress(k, v, kept)  # noqa: E731
    told = lambda kernels: (  # noqa: E731
        lambda k, v, kept, rows, index: kernels.copy_kept(k, v, kept, rows, place.heads * half)
    )
    return Work(
        make=make,
        bytes=4 * place.bytes_of(half),
        arms=told_the_count(place, "cache", told, counting) | {"two torch.gather": gather},
        want=lambda inputs: exact(inputs[0][0, 0][inputs[2][0, 0]])[0],
        read=lambda inputs, got: got.keys[:half],
        reads={"two torch.gather": lambda inputs, got: got[0][0, 0]},
        apart=rows_apart,
        waits=frozenset({"ours, with the count"}),
        limit=0.0,
    )


# attention
# ------------------------------------------------------------------------------------------------------------


def flat_cache(place: Place, lengths: torch.Tensor, seed: int) -> CompressedCache:
    """A compressed cache of the given lengths [B, H_kv]."""
    positions = torch.cat([torch.arange(int(n)) for n in lengths.flatten()]).to(place.device)
    storage = (place.states(len(positions), place.head_dim, seed=seed + part) for part in (0, 1))
    return CompressedCache(*storage, positions, lengths.to(place.device))


def whole_cache(keys: torch.Tensor, values: torch.Tensor) -> CompressedCache:
    """Keys and values [B, H_kv, T, D] as a compressed cache from which nothing is evicted."""
    lengths = torch.full(keys.shape[:2], keys.shape[2], device=keys.device)
    positions = torch.arange(keys.shape[2], device=keys.device).repeat(lengths.numel())
    return CompressedCache(keys.flatten(0, 2), values.flatten(0, 2), positions, lengths)


def decoding(place: Place, queries: torch.Tensor, stored: CompressedCache) -> Arm:
    """The attention of `queries` over one cache: as a model,
    it cuts the cache into chunks once, and not in each step.
    """
    attend = place.ours("attention", "attend")
    if not place.is_gpu:
        return lambda queries: attend(queries, stored)
    decode = partial(place.kernels("attention").attend, cache=stored, plans={})
    decode(queries)
    return decode


def attention_work(
    place: Place, lengths: torch.Tensor, arms: dict[str, Arm], page: int, **options: Any
) -> Work:
    """One query of each head over a cache of the given lengths
    [B, H_kv], FlashInfer with pages of `page` tokens beside.

    Each arm takes the queries, the cache, our attention over it, and what `options["beside"]`, a function of
    the cache, makes of it.
    """
    group, beside = place.group, options.pop("beside", lambda stored: ())

    def make(seed: int) -> Inputs:
        stored = flat_cache(place, lengths, 10 * seed)
        queries = place.states(len(lengths), place.heads * group, 1, place.head_dim, seed=seed + 7)
        return queries, stored, decoding(place, queries, stored), *beside(stored)

    def want(inputs: Inputs) -> np.ndarray:
        queries, stored = inputs[:2]
        count = int(stored.lengths[-1, -1])
        states = exact(stored.keys[-count:], stored.values[-count:])
        one = cache.CompressedCache(*states, np.arange(count), np.array([[count]]))
        return attention.attend(exact(queries[-1:, -group:])[0], one)[0]

    decode = partial(flashinfer_decode, place=place, lengths=lengths, page=page)  # its plan is not timed
    flash, missing = peer_arm("FlashInfer", "flashinfer-python", decode)
    return Work(
        make=make,
        arms={"ours": lambda queries, stored, decode, *_: decode(queries), **arms, **flash},
        missing=missing,
        want=want,
        read=lambda inputs, got: got[-1:, -group:],
        reads={"ours": lambda inputs, got: got[0][-1:, -group:]},
        limit=2e-2,
        **options,
    )


def flashinfer_decode(flashinfer: Any, place: Place, lengths: torch.Tensor, page: int) -> Arm:
    """FlashInfer's paged decode, planned: every KV head is a
    request of its own, its tokens in pages of `page` tokens.
    """
    workspace = torch.empty(128 * 2**20, dtype=torch.uint8, device=place.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    pages = lengths.flatten().to(place.device, torch.int32) // page
    starts = torch.cat([pages.new_zeros(1), pages.cumsum(0, dtype=torch.int32)])
    indices = torch.arange(int(starts[-1]), dtype=torch.int32, device=place.device)
    kinds = {"q_data_type": place.dtype, "kv_data_type": place.dtype}
    wrapper.plan(starts, indices, torch.full_like(pages, page), place.group, 1, place.head_dim, page, **kinds)

    def run(queries: torch.Tensor, stored: CompressedCache, *_: Any) -> torch.Tensor:
        paged = tuple(x.view(-1, page, 1, place.head_dim) for x in stored[:2])
        return wrapper.run(queries.reshape(-1, place.group, place.head_dim), paged).view_as(queries)

    return run


@sized
def decode_row(place: Place, batch: int, length: int) -> Work:
    """Flash-decoding with heads of one length, beside SDPA and FlashInfer."""
    sequences, tokens = place.batch(batch), place.tokens(length)

    def sdpa(queries: torch.Tensor, stored: CompressedCache, _: Arm) -> torch.Tensor:
        keys, values = (x.view(sequences, place.heads, tokens, -1) for x in stored[:2])
        return scaled_dot_product_attention(queries, keys, values, enable_gqa=True)

    lengths = torch.full((sequences, place.heads), tokens)
    return attention_work(
        place, lengths, {"SDPA": sdpa}, page=16, bytes=2 * sequences * place.bytes_of(tokens)
    )


def ragged_row(place: Place) -> Work:
    """Ragged heads, beside padded ones: every KV head is a head of its own, and the query heads of its
    group are its queries.
    """
    sequences, mean = place.batch(32), place.tokens(4096)
    drawn = np.random.default_rng(0).lognormal(sigma=0.7, size=(sequences, place.heads))
    # in every set of inputs
    lengths = torch.from_numpy(np.minimum(drawn / drawn.mean(), 3.0) * mean).long().clamp(min=1)
    filled = (torch.arange(int(lengths.max())) < lengths[..., None]).to(place.device)
    ends = lengths.to(place.device)
    shape = (sequences, place.heads, place.group, filled.shape[2])
    blocks = create_block_mask(lambda b, h, query, token: token < ends[b, h], *shape, device=place.device)
    flex = torch.compile(flex_attention, dynamic=False) if place.is_gpu else flex_attention

    def padded(stored: CompressedCache) -> Inputs:
        whole = torch.zeros(2, *filled.shape, place.head_dim, device=place.device, dtype=place.dtype)
        whole[:, filled] = torch.stack(stored[:2])
        return tuple(whole)

    def over_padded(function: Callable[..., Any], **mask: Any) -> Arm:
        grouped = (sequences, place.heads, place.group, place.head_dim)
        return lambda queries, stored, _, *states: function(queries.view(grouped), *states, **mask).view_as(
            queries
        )

    sdpa = over_padded(scaled_dot_product_attention, attn_mask=filled[:, :, None])
    arms = {"padded SDPA": sdpa, "FlexAttention": over_padded(flex, block_mask=blocks)}
    return attention_work(
        place, lengths, arms, page=1, bytes=2 * sequences * place.bytes_of(mean), beside=padded
    )


# the attention that keys receive, and the simplest methods
# ----------------------------------------------------------------------


@sized
def received_row(place: Place, stem: str, length: int, window: int) -> Work:
    """The attention that every key receives from the last `window` queries; 0: from all, beside the
    attention of the prompt.
    """
    score, tokens = place.ours("received_attention", "score", entry=(stem, "score")), place.tokens(length)
    count, last = place.heads * place.group, min(window, tokens // 2) if window else tokens
    options = {"window_size": last} if stem == "snapkv" else {}

    def want(inputs: Inputs) -> np.ndarray:
        queries, keys = inputs[:2]
        # TOVA's score is the mean over all heads; the other scores are compared in the first head.
        heads = exact(queries, keys) if stem == "tova" else exact(queries[:, : place.group], keys[:, :1])
        return oracle(f"{stem}.score")(*heads, **options)[0, 0]

    def apart(got: torch.Tensor, wanted: np.ndarray) -> float:
        finite = np.isfinite(wanted)  # SnapKV's window is infinite
        return error(exact(got)[0][finite], wanted[finite])

    arms = sides(
        place,
        lambda queries, keys, values: score(queries, keys, **options),
        lambda queries, keys, values: received_torch(stem, queries, keys),
    )
    if not window:
        attention_of_prompt = partial(scaled_dot_product_attention, is_causal=True, enable_gqa=True)
        arms["arms"] = {"ours": arms["arms"]["ours"], "SDPA of the prompt": attention_of_prompt}
    pairs = tokens * last - last * (last - 1) // 2  # of a query and a token that it sees
    return Work(
        make=lambda seed: (
            place.states(1, count, last, place.head_dim, seed=seed + 7),
            *place.cache(1, tokens, seed),
        ),
        bytes=place.bytes_of(tokens) * (2 if window else 1),
        flops=2.0 * 2 * count * place.head_dim * pairs,
        **arms,
        want=want,
        reads={"SDPA of the prompt": None},  # another function, of as many products
        apart=apart,
    )


@sized
def reading_row(place: Place, length: int) -> Work:
    """The attention of a prompt and the attention that every key receives, as H2O needs both in a model."""
    attend = place.ours("received_attention", "attend_and_score", entry=("h2o", "attend_and_score"))
    score = received_row("h2o", length, 0)(place)
    return replace(
        score,
        arms=score.arms | {"ours": attend},
        bytes=(2 + 2 * place.group) * place.bytes_of(place.tokens(length)),  # queries and outputs too
        flops=1.5 * score.flops,  # a third product of the same size
        read=lambda inputs, got: got[1][0, 0],
    )


def norm_row(place: Place) -> Work:
    tokens = place.tokens(XL)
    return Work(
        make=lambda seed: place.cache(1, tokens, seed)[:1],
        bytes=place.bytes_of(tokens),
        **sides(
            place,
            place.ours("knorm", "score"),
            lambda keys: -torch.linalg.vector_norm(keys, dim=-1, dtype=torch.float32),
        ),
        want=lambda inputs: knorm.score(*first_head(*inputs))[0, 0],
    )


def ends_row(place: Place) -> Work:
    tokens, compress = place.tokens(XL), place.ours("streaming_llm", "compress")
    half = tokens // 2

    def cut(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(
            torch.cat([states[:, :, :4], states[:, :, tokens - half + 4 :]], dim=2)
            for states in (keys, values)
        )

    return Work(
        make=lambda seed: place.cache(1, tokens, seed),
        bytes=4 * place.bytes_of(half),
        arms={"ours": lambda k, v: compress(k, v, budget=half), "two torch.cat": cut},
        want=lambda inputs: np.delete(exact(inputs[0][0, 0])[0], np.s_[4 : tokens - half + 4], axis=0),
        read=lambda inputs, got: got.keys[:half],
        reads={"two torch.cat": lambda inputs, got: got[0][0, 0]},
        apart=rows_apart,
        limit=0.0,
    )


# MomentKV
# ------------------------------------------------------------------------------------------------------------


def random_moments(place: Place, batch: int, seed: int) -> Moments:
    """Moments of 500 evicted tokens of each head, in float32."""
    keys, values = (
        place.states(batch, place.heads, 500, place.head_dim, seed=seed + part, dtype=torch.float32)
        for part in (5, 6)
    )
    count = torch.full((batch, place.heads), 500, device=place.device)
    return Moments(count, keys.sum(dim=2), values.sum(dim=2), values.mT @ keys)


NEW_TOKENS = 64  # of a set of inputs: as many calls insert tokens that differ


def each_token(step: Callable[..., Any]) -> Callable[..., Any]:
    """`step` with another one of the new tokens [N, B, H_kv, D] at every call.

    MomentKV writes them into its cache, and a cache into which the same ones are written again and again is
    unrealistic. So all are drawn anew after N calls: two launches more in N steps.
    """
    calls = itertools.count()

    def run(_: Any, query: torch.Tensor, new_keys: torch.Tensor, new_values: torch.Tensor, *rest: Any) -> Any:
        turn, place = divmod(next(calls), len(new_keys))
        if turn and not place:
            new_keys.normal_()
            new_values.normal_()
        return step(query, new_keys[place], new_values[place], *rest)

    return run


def plain_decode(decode: Arm, query: torch.Tensor, *_: Any) -> Any:
    """The attention of a decoding step without moments."""
    return decode(query[:, :, None])


@sized
def step_row(place: Place, batch: int, length: int) -> Work:
    """A decoding step of MomentKV in place: attend, score, evict, correct, update."""
    step = place.ours("momentkv", "step")
    sequences, tokens, heads, dim = place.batch(batch), place.tokens(length), place.heads, place.head_dim

    def make(seed: int) -> Inputs:
        query = place.states(sequences, heads * place.group, dim, seed=seed + 7)
        new = (place.states(NEW_TOKENS, sequences, heads, dim, seed=seed + part) for part in (8, 9))
        positions = torch.arange(tokens, device=place.device).repeat(sequences, heads, 1)
        position = torch.full((sequences, heads), tokens, device=place.device)
        moments, states = random_moments(place, sequences, seed), place.cache(sequences, tokens, seed)
        plain = decoding(place, query[:, :, None], whole_cache(*states))
        return plain, query, *new, *states, positions, moments, position

    def want(inputs: Inputs) -> np.ndarray:
        _, query, new_keys, new_values, keys, values, _, moments, _ = inputs
        head = first_head(new_keys[0], new_values[0], keys, values)
        group = exact(query[:1, : place.group])[0]
        return momentkv.decode_step(group, *head, momentkv.Moments(*first_head(*moments)), tokens).output

    return Work(
        make=make,
        bytes=sequences * (2 * place.bytes_of(tokens) + heads * 2 * 4 * (dim**2 + 2 * dim)),
        flops=2.0 * sequences * heads * tokens * dim**2,
        arms={
            "ours": each_token(step),
            "plain decode": plain_decode,
            "eager torch": each_token(step_trusted),
        },
        want=want,
        read=lambda inputs, got: got[:1, : place.group],
        reads={"plain decode": None},  # attention without moments is another function
        limit=2e-2,
    )


def prompt_moments_row(place: Place) -> Work:
    tokens = place.tokens(XL)
    count = min(place.tokens(1024), tokens // 2)
    compress = place.ours("momentkv", "compress_prompt")

    def want(inputs: Inputs) -> np.ndarray:
        keys, values, kept = (states[0, 0] for states in first_head(*inputs[:3]))
        return values[~kept].T @ keys[~kept]

    def told(kernels: Any) -> Arm:
        return lambda k, v, kept, index: kernels.compress_prompt(
            k, v, kept, zero_moments(k, v), total=place.heads * count
        )

    ours = told_the_count(
        place, "momentkv", told, lambda keys, values, kept, index: compress(keys, values, kept)
    )
    return Work(
        make=lambda seed: (*place.cache(1, tokens, seed), *random_mask(place, tokens, count, seed)),
        bytes=2 * place.bytes_of(tokens + count),
        flops=2.0 * tokens * place.heads * place.head_dim**2,
        arms={**ours, "masked product, gathers": moments_torch},
        want=want,
        read=lambda inputs, got: got[1].value_key_sum[0, 0],
        reads={"masked product, gathers": lambda inputs, got: got[-1][0, 0]},
        waits=frozenset({"ours, with the count"}),
    )


def mix_row(place: Place) -> Work:
    attend = place.ours("momentkv", "attend")
    sequences, tokens = place.batch(32), place.tokens(1024)

    def make(seed: int) -> Inputs:
        query = place.states(sequences, place.heads * place.group, place.head_dim, seed=seed + 7)
        keys, values = place.cache(sequences, tokens, seed)
        kept = torch.ones(keys.shape[:3], dtype=torch.bool, device=place.device)
        plain = decoding(place, query[:, :, None], whole_cache(keys, values))
        return plain, query, keys, values, kept, random_moments(place, sequences, seed)

    def want(inputs: Inputs) -> np.ndarray:
        group = exact(inputs[1][:1, : place.group])[0]
        return momentkv.attend(group, *first_head(*inputs[2:5]), momentkv.Moments(*first_head(*inputs[5])))

    return Work(
        make=make,
        bytes=sequences * (2 * place.bytes_of(tokens) + place.heads * 4 * place.head_dim**2),
        arms={
            "ours": lambda _, *inputs: attend(*inputs),
            "attention without moments": plain_decode,
        },
        want=want,
        read=lambda inputs, got: got[:1, : place.group],
        reads={"attention without moments": None},
        limit=2e-2,
    )


def gvote_row(place: Place) -> Work:
    tokens, select = place.tokens(XL), place.ours("gvote", "select")
    count, dim = place.heads * place.group, place.head_dim

    def make(seed: int) -> Inputs:
        # Logits of deviation 3: nine tokens in a hundred hold 95 % of the mass. Random weights would give
        # flat attention.
        query = 3 * place.states(1, count, dim, seed=seed + 7)
        sampled = query[:, :, None] + place.states(1, count, 8, dim, seed=seed + 8)
        return query, place.cache(1, tokens, seed)[0], sampled

    def want(inputs: Inputs) -> np.ndarray:
        query, keys, sampled = inputs
        return gvote.select(*exact(query[:, : place.group], keys[:, :1], sampled[:, : place.group]), p=0.95)[
            0, 0
        ]

    return Work(
        make=make,
        bytes=2 * place.bytes_of(tokens),
        flops=2.0 * tokens * count * 9 * dim,
        arms={
            "ours": lambda query, keys, sampled: select(query, keys, sampled, p=0.95),
            "eager torch": gvote_torch,
        },
        want=want,
        apart=lambda got, wanted: float((exact(got)[0] != wanted).mean()),
        limit=5e-3,  # tokens whose logits nearly tie with the last vote of one of 32 rows
    )


KERNEL_ROWS = [
    Row(
        "1",
        "LagKV: score, select, compact; T = 131072, L = 128, r = 0.25",
        ("lagkv",),
        lagkv_row,
        185e-6,
        6,
        "eager torch",
    ),
    Row("2", "KeyDiff: score; T = 131072", ("keydiff",), keydiff_row, 145e-6, 4, "eager torch"),
    Row(
        "2b",
        "KeyDiff: score with a kept anchor; T = 131072",
        ("keydiff",),
        keydiff_anchor_row,
        73e-6,
        2,
        "our two passes",
    ),
    Row(
        "3",
        "Expected Attention: score; T = 131072",
        ("expected_attention",),
        expected_attention_row,
        500e-6,
        5,
        "eager torch",
    ),
    Row(
        "3b",
        "Expected Attention: query statistics",
        ("expected_attention",),
        statistics_row,
        350e-6,
        15,
        "kvpress",
    ),
    Row("4", "select n/2 of 8 x 131072", ("selection",), select_row(8, XL), 25e-6, 4, "torch.topk", True),
    Row(
        "4-ties",
        "as 4, scores of 16 values",
        ("selection",),
        select_row(8, XL, "16 values"),
        None,
        None,
        "torch.topk",
        True,
    ),
    Row(
        "4-kd",
        "as 4, scores as KeyDiff's",
        ("selection",),
        select_row(8, XL, "KeyDiff"),
        25e-6,
        4,
        "torch.topk",
        True,
    ),
    Row(
        "4-ea",
        "as 4, scores as Expected Attention's",
        ("selection",),
        select_row(8, XL, "EA"),
        25e-6,
        4,
        "torch.topk",
        True,
    ),
    Row("4-256", "select n/2 of 256 x 131072", ("selection",), select_row(256, XL), 110e-6, 4, "torch.topk"),
    Row("4b", "select n/2 of 8 x 8192", ("selection",), select_row(8, 8192), 10e-6, 5, "torch.topk", True),
    Row(
        "5",
        "compaction of K and V; T = 131072, half kept",
        ("cache",),
        compact_row,
        150e-6,
        1.3,
        "two torch.gather",
    ),
    Row(
        "6",
        "decode attention, B = 32, n = 4096",
        ("attention", "cache"),
        decode_row(32, 4096),
        150e-6,
        1,
        "SDPA",
    ),
    Row(
        "6b",
        "decode attention, B = 1, n = 1024",
        ("attention", "cache"),
        decode_row(1, 1024),
        10e-6,
        1.6,
        "SDPA",
        True,
    ),
    Row(
        "7",
        "decode attention, ragged, mean 4096, longest 3 x",
        ("attention", "cache"),
        ragged_row,
        157e-6,
        2.3,
        "padded SDPA",
    ),
    Row(
        "8",
        "MomentKV: a decoding step, B = 32, L = 1024",
        ("momentkv",),
        step_row(32, 1024),
        52e-6,
        10,
        "eager torch",
    ),
    Row(
        "8b",
        "MomentKV: a decoding step, B = 1, L = 512",
        ("momentkv",),
        step_row(1, 512),
        10e-6,
        5,
        "eager torch",
        True,
    ),
    Row(
        "9",
        "MomentKV: moments and compaction of a prompt",
        ("momentkv",),
        prompt_moments_row,
        175e-6,
        4,
        "masked product",
    ),
    Row(
        "10",
        "GVote: budgets, votes, union; T = 131072, S = 8",
        ("gvote",),
        gvote_row,
        220e-6,
        8,
        "eager torch",
    ),
    Row(
        "15",
        "H2O: score of a prompt, n = 16384",
        ("h2o",),
        received_row("h2o", 16384, 0),
        None,
        1,
        "SDPA of the prompt",
    ),
    Row(
        "16",
        "SnapKV: score, W = 32; T = 131072",
        ("snapkv",),
        received_row("snapkv", XL, 32),
        170e-6,
        5,
        "eager torch",
    ),
    Row("17", "TOVA: score; T = 131072", ("tova",), received_row("tova", XL, 1), 150e-6, 5, "eager torch"),
    Row("18", "KNorm: score; T = 131072", ("knorm",), norm_row, 75e-6, 2, "eager torch"),
    Row(
        "19",
        "StreamingLLM: half of T = 131072 kept",
        ("streaming_llm",),
        ends_row,
        150e-6,
        1,
        "two torch.cat",
    ),
    Row(
        "11",
        "MomentKV: attention with the moments mixed in",
        ("momentkv",),
        mix_row,
        None,
        None,
        "attention without moments",
    ),
]
