"""Rows of the GPU benchmark that run what a user gets:
`EvictingCache` in a model of transformers, beside its DynamicCache.

The model has the shape of Llama-3.1-8B and random weights, which give the right times. Each arm is a whole
forward, with the hooks of the cache and the processor's time. Other rows check the numbers.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import is_flash_attn_2_available

from benchmarks.costs import read
from benchmarks.row import Arm, Place, Row, Work, sized
from evictionary.cache.evicting_cache import EvictingCache

LAYERS, VOCABULARY, WIDTH_OF_A_GATE = 32, 128_256, 3.5
PLAIN, FLASH = "DynamicCache, sdpa", "DynamicCache, flash_attention_2"
OF_A_TOKEN: dict[str, tuple[str, dict[str, Any]]] = {
    "ours": ("momentkv", {"budget": 1024}),
    "KeyDiff, half": ("keydiff", {"compression_ratio": 0.5}),
    "KeyDiff + AdaKV, half": ("keydiff+ada_kv", {"compression_ratio": 0.5}),
}
"""The arms of a token, each a method with its settings. Ours evicts at each token."""
OF_A_PROMPT: dict[str, tuple[str, dict[str, Any]]] = {
    "ours": ("keydiff", {"compression_ratio": 0.5}),
    "SnapKV, half": ("snapkv", {"compression_ratio": 0.5}),
    "H2O, half": ("h2o", {"compression_ratio": 0.5}),
}


def model_of(place: Place, attention: str = "sdpa", like: PreTrainedModel | None = None) -> PreTrainedModel:
    """A model on the device of a place, in its dtype, and smaller where the place shrinks; with the weights
    of another one, or its own.
    """
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
        attn_implementation=attention,
    )
    with torch.device(place.device):
        model = LlamaForCausalLM(shape).to(place.dtype).eval()
    if like is not None:
        model.load_state_dict(like.state_dict(), assign=True)
    return model


def tokens_of(place: Place, batch: int, length: int, seed: int) -> torch.Tensor:
    """Ids [batch, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(place.tokens(VOCABULARY), (batch, length), generator=generator).to(place.device)


def bytes_of(model: PreTrainedModel, cached: int) -> int:
    """The least bytes of a token: the weights, and the cache of all layers."""
    return sum(weight.nbytes for weight in model.parameters()) + cached


def peers(place: Place, model: PreTrainedModel, arm: Callable[[PreTrainedModel], Arm]) -> dict[str, Any]:
    """The arms of DynamicCache, each in a model of its own with the same weights, which no cache has hooks
    in; and why one is missing.
    """
    has_flash = place.is_gpu and is_flash_attn_2_available()
    attentions = {PLAIN: "sdpa"} | ({FLASH: "flash_attention_2"} if has_flash else {})
    arms = {name: arm(model_of(place, attention, model)) for name, attention in attentions.items()}
    return {"arms": arms, "missing": {} if has_flash else {FLASH: "flash-attn is not installed"}}


@sized
def token_row(place: Place, batch: int, length: int) -> Work:
    """A token of each text, after a prompt: with all of it cached, and with what is left of it."""
    model, sequences, tokens = model_of(place), place.batch(batch), place.tokens(length)
    prompt = tokens_of(place, sequences, tokens, seed=0)

    def compressed(method: str, settings: dict[str, Any]) -> Arm:
        budget = {"budget": place.tokens(settings["budget"])} if "budget" in settings else {}
        cache = EvictingCache(model, method, **settings | budget)
        read(model, prompt, cache)
        return lambda ids: read(model, ids, cache)

    def whole(plain: PreTrainedModel) -> Arm:
        full = DynamicCache()
        read(plain, prompt, full)

        def call(ids: torch.Tensor) -> None:
            read(plain, ids, full)
            full.crop(-1)  # as long at each call

        return call

    others = peers(place, model, whole)
    arms = {name: compressed(*asked) for name, asked in OF_A_TOKEN.items()} | others["arms"]
    cached = model.config.num_hidden_layers * 2 * sequences * place.bytes_of(place.tokens(1024))
    return Work(
        make=lambda seed: (tokens_of(place, sequences, 1, seed),),
        arms=arms,
        bytes=bytes_of(model, cached),
        missing=others["missing"],
        waits=frozenset(arms),  # the hooks are called from the processor
        copies=1,
    )


@sized
def prompt_row(place: Place, length: int) -> Work:
    """A prompt that is read and compressed to a half, and one that is read."""
    model, tokens = model_of(place), place.tokens(length)

    def compressing(method: str, settings: dict[str, Any]) -> Arm:
        def call(ids: torch.Tensor) -> None:
            with EvictingCache(model, method, **settings) as cache:
                read(model, ids, cache)

        return call

    others = peers(place, model, lambda plain: lambda ids: read(plain, ids, DynamicCache()))
    arms = {name: compressing(*asked) for name, asked in OF_A_PROMPT.items()} | others["arms"]
    return Work(
        make=lambda seed: (tokens_of(place, 1, tokens, seed),),
        arms=arms,
        bytes=bytes_of(model, model.config.num_hidden_layers * 2 * place.bytes_of(tokens)),
        flops=2.0 * tokens * sum(weight.numel() for weight in model.parameters()),
        missing=others["missing"],
        waits=frozenset(arms),
        copies=1,
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
]
