"""Rows of the GPU benchmark that run what a user gets:
`EvictingCache` in a model of transformers, beside its DynamicCache.

The model has the shape of Llama-3.1-8B and random weights, which give the right times. Each arm is a whole
forward, with the hooks of the cache and the processor's time. Other rows check the numbers.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import is_flash_attn_2_available

from benchmarks.costs import read
from benchmarks.row import Arm, Place, Row, Work, sized
from benchmarks.rows import reading_row
from evictionary.cache.captured_step import captured_step
from evictionary.cache.evicting_cache import EvictingCache

LAYERS, VOCABULARY, WIDTH_OF_A_GATE = 32, 128_256, 3.5
PLAIN, FLASH = "DynamicCache, sdpa", "DynamicCache, flash_attention_2"


class Asked(NamedTuple):
    """A method with its settings, and whether its step is captured in one CUDA graph."""

    method: str
    settings: dict[str, Any]
    is_captured: bool = False


IN_BLOCKS = {"budget": 1024, "every": 64}
OF_A_TOKEN = {
    "ours": Asked("momentkv", {"budget": 1024}),
    "ours, captured": Asked("momentkv", {"budget": 1024}, is_captured=True),
    "KeyDiff, L = 1024, every 64": Asked("keydiff", IN_BLOCKS),
    "KeyDiff, L = 1024, every 64, captured": Asked("keydiff", IN_BLOCKS, is_captured=True),
    "KeyDiff, half": Asked("keydiff", {"compression_ratio": 0.5}),
    "KeyDiff + AdaKV, half": Asked("keydiff+ada_kv", {"compression_ratio": 0.5}),
}
"""The arms of a token by name. Ours evicts at each one."""
OF_A_PROMPT = {
    "ours": Asked("keydiff", {"compression_ratio": 0.5}),
    "SnapKV, half": Asked("snapkv", {"compression_ratio": 0.5}),
    "H2O, half": Asked("h2o", {"compression_ratio": 0.5}),
}


def model_of(place: Place) -> PreTrainedModel:
    """A model on the device of a place, in its dtype, and smaller where the place shrinks."""
    width = place.heads * place.group * place.head_dim
    shape = LlamaConfig(
        vocab_size=place.tokens(VOCABULARY),
        hidden_size=width,
        intermediate_size=int(WIDTH_OF_A_GATE * width),
        num_hidden_layers=max(1, LAYERS // place.shrink),
        num_attention_heads=place.heads * place.group,
        num_key_value_heads=place.heads,
        head_dim=place.head_dim,
        max_position_embeddings=131_072,
    )
    with torch.device(place.device):
        return LlamaForCausalLM(shape).to(place.dtype).eval()


def twin_of(model: PreTrainedModel, attention: str = "sdpa") -> PreTrainedModel:
    """The same model with the same weights, and hooks of its own."""
    weights = {id(weight): weight for weight in model.parameters()}
    twin = copy.deepcopy(model, weights)
    twin.set_attn_implementation(attention)
    return twin


def tokens_of(place: Place, batch: int, length: int, seed: int) -> torch.Tensor:
    """Ids [batch, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(place.tokens(VOCABULARY), (batch, length), generator=generator).to(place.device)


def bytes_of(model: PreTrainedModel, cached: int) -> int:
    """The least bytes of a token: the weights, and the cache of all layers."""
    return sum(weight.nbytes for weight in model.parameters()) + cached


def arms_of(
    place: Place,
    model: PreTrainedModel,
    asked: dict[str, Asked],
    ours: Callable[[PreTrainedModel, Asked], Arm],
    whole: Callable[[PreTrainedModel], Arm],
) -> dict[str, Any]:
    """The arms of methods and of DynamicCache, as fields of a Work, and why one is missing. Each has a model
    of its own, so that none pays for the hooks of another's cache.
    """
    has_flash = place.is_gpu and is_flash_attn_2_available()
    attentions = {PLAIN: "sdpa"} | ({FLASH: "flash_attention_2"} if has_flash else {})
    arms = {name: ours(twin_of(model), each) for name, each in asked.items()}
    arms |= {name: whole(twin_of(model, attention)) for name, attention in attentions.items()}
    return {
        "arms": arms,
        "missing": {} if has_flash else {FLASH: "flash-attn is not installed"},
        "waits": frozenset(arms),  # the hooks are called from the processor, or a graph is replayed
        "copies": 1,
    }


@sized
def token_row(place: Place, batch: int, length: int) -> Work:
    """A token of each text, after a prompt: with all of it cached, and with what is left of it."""
    model, sequences, tokens = model_of(place), place.batch(batch), place.tokens(length)
    prompt = tokens_of(place, sequences, tokens, seed=0)

    def ours(own: PreTrainedModel, asked: Asked) -> Arm:
        settings = asked.settings
        budget = {"budget": place.tokens(settings["budget"])} if "budget" in settings else {}
        cache = EvictingCache(own, asked.method, **settings | budget)
        read(own, prompt, cache)
        if asked.is_captured:
            # the first call records it; the arm holds the model, which a cache does not
            step = functools.cache(lambda model: captured_step(cache))
            return torch.no_grad()(lambda ids: step(own)(ids))
        return lambda ids: read(own, ids, cache)

    def whole(own: PreTrainedModel) -> Arm:
        full = DynamicCache()
        read(own, prompt, full)

        def call(ids: torch.Tensor) -> None:
            read(own, ids, full)
            full.crop(-1)  # as long at each call

        return call

    cached = model.config.num_hidden_layers * 2 * sequences * place.bytes_of(place.tokens(1024))
    return Work(
        make=lambda seed: (tokens_of(place, sequences, 1, seed),),
        bytes=bytes_of(model, cached),
        **arms_of(place, model, OF_A_TOKEN, ours, whole),
    )


@sized
def prompt_row(place: Place, length: int) -> Work:
    """A prompt that is read and compressed to a half, and one that is read."""
    model, tokens = model_of(place), place.tokens(length)

    def ours(own: PreTrainedModel, asked: Asked) -> Arm:
        def call(ids: torch.Tensor) -> None:
            with EvictingCache(own, asked.method, **asked.settings) as cache:
                read(own, ids, cache)

        return call

    def whole(own: PreTrainedModel) -> Arm:
        return lambda ids: read(own, ids, DynamicCache())

    return Work(
        make=lambda seed: (tokens_of(place, 1, tokens, seed),),
        bytes=bytes_of(model, model.config.num_hidden_layers * 2 * place.bytes_of(tokens)),
        flops=2.0 * tokens * sum(weight.numel() for weight in model.parameters()),
        **arms_of(place, model, OF_A_PROMPT, ours, whole),
    )


PRODUCT_ROWS = [
    Row(
        "30",
        "EvictingCache in transformers: a token, B = 1; MomentKV, L = 1024 of 32768",
        ("momentkv", "keydiff", "attention"),
        token_row(1, 32_768),
        peer=PLAIN,
    ),
    Row(
        "30-32",
        "EvictingCache in transformers: a token, B = 32; MomentKV, L = 1024 of 4096",
        ("momentkv", "keydiff", "attention"),
        token_row(32, 4096),
        peer=PLAIN,
    ),
    Row(
        "31",
        "EvictingCache in transformers: a prompt of 32768; KeyDiff, half",
        ("keydiff", "snapkv", "h2o"),
        prompt_row(32_768),
        peer=PLAIN,
    ),
    Row(
        "31-h2o",
        "H2O in a layer that reads a prompt of 16384: attention and score",
        ("h2o",),
        reading_row(16_384),
        peer="SDPA of the prompt",
    ),
]
