"""A decoder of the shape of Llama-3.1-8B with random
weights, and the rows of the GPU benchmark that need one.

Random weights give the right times, since all shapes are fixed. The decoder is plain torch; the rows compare
different attention functions in it. Other rows check the kernels; here they are not checked again.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from benchmarks.row import Place, Row, Work, sized
from benchmarks.rows import XL, decoding, random_moments, whole_cache
from evictionary.optimized.keydiff import update_anchor

LAYERS, VOCABULARY = 32, 128_256
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Decoder:
    """Layers of RMSNorm, attention with RoPE, and a gated feed-forward, then the head over the vocabulary."""

    def __init__(self, place: Place, layers: int) -> None:
        self.place, self.layers = place, layers
        width = place.heads * place.group * place.head_dim
        inner, narrow = 7 * width // 2, place.heads * place.head_dim
        shapes = {
            "qkv": (width + 2 * narrow, width),
            "out": (width, width),
            "up": (2 * inner, width),
            "down": (width, inner),
        }
        self.weights = [
            {name: place.states(*shape, seed=layer).mul_(0.02) for name, shape in shapes.items()}
            for layer in range(layers)
        ]
        self.head = place.states(place.tokens(VOCABULARY), width, seed=99).mul_(0.02)
        self.width, self.split = width, [width, narrow, narrow]
        angle = torch.linspace(0, 1, place.head_dim // 2, device=place.device).repeat(2)
        self.cos, self.sin = angle.cos().to(place.dtype), angle.sin().to(place.dtype)
        # Norms, rotation and gate are fused, as in an inference engine; the products stay cuBLAS. A decoder
        # starts without code of another one: torch stops compiling a function after some shapes, and would go
        # on with the slow one without a warning.
        if place.is_gpu:
            torch.compiler.reset()
        self.before, self.after = (
            torch.compile(f, dynamic=False) if place.is_gpu else f for f in (self._before, self._after)
        )

    def bytes(self) -> int:
        """The bytes of the weights, which a decoding step reads once."""
        tensors = [self.head, *(weight for layer in self.weights for weight in layer.values())]
        return sum(x.numel() * x.element_size() for x in tensors)

    def _before(self, hidden: torch.Tensor, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values [..., heads, D] of hidden states [..., width]."""
        states = linear(rms_norm(hidden, (self.width,)), qkv).split(self.split, dim=-1)
        query, key, value = (x.unflatten(-1, (-1, self.place.head_dim)) for x in states)

        def turned(x: torch.Tensor) -> torch.Tensor:
            first, second = x.chunk(2, dim=-1)
            return x * self.cos + torch.cat([-second, first], dim=-1) * self.sin

        return turned(query), turned(key), value

    def _after(
        self, hidden: torch.Tensor, attended: torch.Tensor, out: Any, up: Any, down: Any
    ) -> torch.Tensor:
        """The rest of a layer, from the output of its attention [..., heads, D]."""
        hidden = hidden + linear(attended.flatten(-2), out)
        gate, inner = linear(rms_norm(hidden, (self.width,)), up).chunk(2, dim=-1)
        return hidden + linear(silu(gate) * inner, down)

    def step(self, hidden: torch.Tensor, attend: Attend) -> torch.Tensor:
        """One decoding step of hidden states [B, width];
        `attend(layer, query, key, value)` gives [B, H_q, D].
        """
        for layer, weights in enumerate(self.weights):
            query, key, value = self.before(hidden, weights["qkv"])
            attended = attend(layer, query, key, value)
            hidden = self.after(hidden, attended, weights["out"], weights["up"], weights["down"])
        return linear(rms_norm(hidden, (self.width,)), self.head)

    def prefill(self, hidden: torch.Tensor) -> torch.Tensor:
        """The layers over a prompt [B, T, width], causal."""
        for weights in self.weights:
            hidden = self.over_prompt(hidden, weights)
        return hidden

    def over_prompt(
        self, hidden: torch.Tensor, weights: dict[str, torch.Tensor], cache: Any = None
    ) -> torch.Tensor:
        """A layer over tokens [B, T, width]: causal attention to one another, or attention to the keys and
        values of `cache`.
        """
        query, *own = (x.transpose(1, 2) for x in self.before(hidden, weights["qkv"]))
        attended = scaled_dot_product_attention(
            query, *(cache or own), is_causal=cache is None, enable_gqa=True
        )
        return self.after(hidden, attended.transpose(1, 2), weights["out"], weights["up"], weights["down"])


@functools.lru_cache(maxsize=1)
def decoder(place: Place) -> Decoder:
    """All layers; the weights are made once for the rows that follow each other."""
    return Decoder(place, max(1, LAYERS // place.shrink))


def over(place: Place, caches: list[tuple[torch.Tensor, torch.Tensor]], *, ours: bool) -> Attend:
    """Attention over full caches [B, H_kv, T, D], one for
    each layer, the new token in the last slot: ours, or SDPA.
    """
    queries = place.states(len(caches[0][0]), place.heads * place.group, 1, place.head_dim, seed=0)
    attends = [decoding(place, queries, whole_cache(*states)) for states in caches] if ours else []

    def run(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys, values = caches[layer]
        keys[:, :, -1], values[:, :, -1] = key, value  # whole caches are views of them
        if not ours:
            return scaled_dot_product_attention(query[:, :, None], keys, values, enable_gqa=True)[:, :, 0]
        return attends[layer](query[:, :, None])[0][:, :, 0]

    return run


def with_moments(place: Place, batch: int, tokens: int, model: Decoder) -> Attend:
    """MomentKV in every layer, with a full cache of `tokens` slots."""
    step, shape = place.ours("momentkv", "step"), (batch, place.heads)
    layers = [
        (
            *place.cache(batch, tokens, layer),
            torch.arange(tokens, device=place.device).repeat(*shape, 1),
            random_moments(place, batch, layer),
        )
        for layer in range(model.layers)
    ]
    position = torch.full(shape, tokens, device=place.device)
    return lambda layer, query, key, value: step(query, key, value, *layers[layer], position)


def steps(place: Place, model: Decoder, batch: int, attends: dict[str, Attend], bytes: int) -> Work:
    """Decoding steps of the model with several attentions;
    each reads the weights and `bytes` of all caches.

    Each step draws new hidden states: MomentKV writes what they
    give into its cache, and a cache of one token is unrealistic.
    """

    def step(attend: Attend) -> Callable[..., Any]:
        return lambda hidden: model.step(hidden.normal_(), attend)

    return Work(
        make=lambda seed: (place.states(batch, model.width, seed=seed),),
        arms={name: step(attend) for name, attend in attends.items()},
        bytes=model.bytes() + bytes,
        copies=1,
    )


@sized
def overhead_row(place: Place, batch: int) -> Work:
    """A decoding step of the whole model, MomentKV against the same cache without moments."""
    sequences, tokens, model = place.batch(batch), place.tokens(1024), decoder(place)
    caches = [place.cache(sequences, tokens, layer) for layer in range(model.layers)]
    attends = {
        "ours": with_moments(place, sequences, tokens, model),
        "fixed L": over(place, caches, ours=True),
    }
    each = 2 * (place.bytes_of(tokens) + place.heads * 4 * place.head_dim * (place.head_dim + 2))
    return steps(place, model, sequences, attends, model.layers * sequences * each)


def decode_model_row(place: Place) -> Work:
    """B = 1: a cache of 1,024 tokens with moments, against all 131,072 tokens."""
    tokens, model = place.tokens(1024), decoder(place)
    caches = [place.cache(1, place.tokens(XL), layer) for layer in range(model.layers)]
    attends = {
        "ours": with_moments(place, 1, tokens, model),
        "full cache, SDPA": over(place, caches, ours=False),
        "full cache, our decode": over(place, caches, ours=True),
    }
    return steps(place, model, 1, attends, model.layers * 2 * place.bytes_of(tokens))


def throughput_row(place: Place) -> Work:
    """The same bytes of cache as whole sequences of 32,768 tokens, or as four times as many, compressed;
    time for one token.

    There are as many sequences as fit into four fifths of the memory that the weights leave, 24 at most.
    """
    model, tokens = decoder(place), place.tokens(32_768)
    free = torch.cuda.mem_get_info()[0] if place.is_gpu else 2**20
    few = max(1, min(place.batch(24), int(0.8 * free) // (model.layers * 2 * place.bytes_of(tokens))))
    caches = [place.cache(few, tokens, layer) for layer in range(model.layers)]
    shape = (4 * few, place.heads, tokens // 4, place.head_dim)
    compressed = over(place, [(keys.view(shape), values.view(shape)) for keys, values in caches], ours=True)
    ours, sdpa = (over(place, caches, ours=own) for own in (True, False))
    return Work(
        make=lambda seed: (
            place.states(4 * few, model.width, seed=seed),
            place.states(few, model.width, seed=seed),
        ),
        arms={
            "ours": lambda many, fewer: model.step(many, compressed),
            "full cache, SDPA": lambda many, fewer: model.step(fewer, sdpa),
            "full cache, our decode": lambda many, fewer: model.step(fewer, ours),
        },
        bytes=model.bytes() + few * model.layers * 2 * place.bytes_of(tokens),
        units={"ours": 4 * few, "full cache, SDPA": few, "full cache, our decode": few},
        copies=1,
    )


@sized
def share_row(place: Place, length: int) -> Work:
    """One-shot compression to a half, by three methods,
    beside the prefill of the layer that it belongs to.
    """
    tokens, layer, lag = place.tokens(length), Decoder(place, 1), max(8, 128 // place.shrink)
    lagkv, keydiff, top_k = (
        place.ours("lagkv", "compress"),
        place.ours("keydiff", "score"),
        place.ours("selection", "top_k"),
    )
    gather = place.ours("cache", "compress")
    return Work(
        make=lambda seed: (place.states(1, tokens, layer.width, seed=seed), *place.cache(1, tokens, seed)),
        arms={
            "ours": lambda h, k, v: lagkv(k, v, keep_ratio=0.5, sink_size=4, lag_size=lag),
            "KeyDiff": lambda h, k, v: gather(k, v, top_k(keydiff(k), tokens // 2)),
            "prefill of one layer": lambda h, k, v: layer.prefill(h),
        },
        bytes=3 * place.bytes_of(tokens),
        waits=frozenset({"KeyDiff", "prefill of one layer"}),  # the graph would keep gigabytes of temporaries
        copies=1,
    )


def block_row(place: Place) -> Work:
    """KeyDiff in blocks of 128 tokens, budget 8,192: evicted slots are written again, against score,
    select and compact.
    """
    names = ("score_with_anchor", "anchor_sum", "score")
    with_anchor, anchor_sum, score = (place.ours("keydiff", name) for name in names)
    top_k, gather = place.ours("selection", "top_k"), place.ours("cache", "compress")
    budget, block, layer = place.tokens(8192), max(8, 128 // place.shrink), Decoder(place, 1)

    def make(seed: int) -> tuple[Any, ...]:
        keys, values = place.cache(1, budget + block, seed)
        return place.states(1, block, layer.width, seed=seed), keys, values, anchor_sum(keys)

    def replace(hidden: Any, keys: torch.Tensor, values: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        # The cache holds budget + block tokens; the lowest go, and the next block takes their slots.
        slots = with_anchor(keys, anchor).topk(block, dim=-1, largest=False, sorted=False).indices
        slots = slots[..., None].expand(-1, -1, -1, place.head_dim)
        new_keys, new_values = keys[:, :, :block].clone(), values[:, :, :block].clone()
        anchor = update_anchor(anchor, new_keys, keys.gather(2, slots))
        keys.scatter_(2, slots, new_keys)
        values.scatter_(2, slots, new_values)
        return anchor

    return Work(
        make=make,
        arms={
            "ours": replace,
            "score, select, compact": lambda h, k, v, anchor: gather(k, v, top_k(score(k), budget)),
            "block step of one layer": lambda h, k, v, anchor: layer.over_prompt(h, layer.weights[0], (k, v)),
        },
        bytes=place.bytes_of(budget + block),
        waits=frozenset({"score, select, compact"}),
    )


BOTH = ("momentkv", "attention")

MODEL_ROWS = [
    Row(
        "14",
        "compression beside prefill, one layer, n = 131072",
        ("lagkv", "keydiff"),
        share_row(XL),
        None,
        100,
        "prefill",
    ),
    Row(
        "14-4k",
        "compression beside prefill, one layer, n = 4096",
        ("lagkv", "keydiff"),
        share_row(4096),
        None,
        100,
        "prefill",
    ),
    Row(
        "14b",
        "KeyDiff: eviction in blocks of 128, budget 8192, by code of the benchmark",
        ("keydiff",),
        block_row,
        None,
        12.5,
        "block step",
        True,
    ),
    Row(
        "8c",
        "MomentKV: step of a decoder, B = 1, L = 1024",
        BOTH,
        overhead_row(1),
        None,
        0.95,
        "fixed L",
    ),
    Row(
        "8c-32",
        "MomentKV: step of a decoder, B = 32, L = 1024",
        BOTH,
        overhead_row(32),
        None,
        0.95,
        "fixed L",
    ),
    Row(
        "12",
        "a decoder, B = 1: L = 1024 against all 131072",
        BOTH,
        decode_model_row,
        4.2e-3,
        2,
        "full cache, SDPA",
    ),
    Row(
        "13",
        "a decoder, one token, same bytes, compressed 4 x",
        ("attention",),
        throughput_row,
        None,
        2.5,
        "full cache, SDPA",
    ),
]
