"""Loads a model: the embedded one, a name on the Hugging Face hub, or a local folder."""

import logging
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)
from transformers.utils import logging as transformers_logging

from evictionary.errors import UsageError, require
from evictionary.models.names import EMBEDDED, hint, located

NO_SOFTMAX = {"diffllama": "differential attention", "doge": "a mask that it makes from the values"}
"""Model types without plain softmax attention, which nothing else in their configuration reveals."""
FORGETFUL = {"jamba"}
"""Model types whose recurrent layers begin anew where several later tokens are read at once, in
transformers 5.23.
"""
EVICTED = (DynamicLayer, LinearAttentionAndFullAttentionLayer)
"""The layers of a transformers cache that a cache with eviction replaces: full attention, alone or beside
a recurrent state.
"""
LEFT_ALONE = (DynamicSlidingWindowLayer, LinearAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer)
"""The layers that it leaves alone: they have a window, or a state of one size, and grow no further."""
NOTHING = "DummyLayer"
"""What newer versions of transformers keep for a layer without attention."""


def load(name: str = EMBEDDED) -> tuple[PreTrainedModel, Any]:
    """Return (model, tokenizer) for `embedded`, a hub name or a folder, ready to run on the GPU if there
    is one.

    Raises UsageError for a name or folder that cannot be loaded or a model that cannot be compressed,
    InstallError where the embedded model cannot be installed.
    """
    _quiet_transformers()
    place = located(name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float32 if name == EMBEDDED else "auto"
    try:
        tokenizer = AutoTokenizer.from_pretrained(place.name, local_files_only=place.is_local)
        model: Any = AutoModelForCausalLM.from_pretrained(
            place.name, dtype=dtype, local_files_only=place.is_local
        )
    # a damaged file, other shapes, a missing package: transformers raises what its parts raise
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"model: got {name!r}{hint(name)}, wanted a hub name or a folder with a causal language model: "
            f"{reason}"
        ) from error
    require_supported(model)
    return model.eval().to(device), tokenizer


def _quiet_transformers() -> None:
    """Turn off progress bars and warnings, which would appear between the lines of a command."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def unwrapped(model: Any) -> PreTrainedModel:
    """The transformers model inside of a wrapper, such as that of PEFT or torch.compile. Raises UsageError
    where there is none.

    A wrapper answers to the names of its model, but its own forward may call the model's parts past the hooks
    of a cache.
    """
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    found = next((module for module in modules if isinstance(module, PreTrainedModel)), None)
    require(
        found is not None,
        f"model: got {type(model).__name__}, wanted a transformers model, or a module with one inside",
    )
    return found


def loaded(module: torch.nn.Module, name: str) -> torch.Tensor:
    """A weight of a module, also one that accelerate left on the disk. Raises UsageError for one that is
    nowhere.
    """
    weight = getattr(module, name)
    if weight.device.type != "meta":
        return weight
    hook = getattr(module, "_hf_hook", None)
    found: Any = next(
        (
            each.weights_map
            for each in (hook, *getattr(hook, "hooks", ()))
            if getattr(each, "weights_map", None)
        ),
        None,
    )
    require(
        found is not None,
        f"model: got {type(module).__name__} without numbers in its {name} (device meta), wanted loaded "
        "weights",
    )
    return found[name]


def require_supported(model: PreTrainedModel) -> None:
    """Raise UsageError unless the model is a decoder of known positions, with full attention in at least
    one layer.
    """
    name = type(model).__name__
    config = model.config.get_text_config()
    require(
        not model.config.is_encoder_decoder,
        f"model: got {name}, an encoder-decoder; wanted a decoder-only language model",
    )
    require(
        not getattr(config, "kv_lora_rank", None),
        f"model: got {name} with latent attention: one latent for all heads is cached, and their keys are "
        "made from it "
        "afterwards; wanted a cache of the keys and values of each head",
    )
    require(
        not getattr(config, "cross_attention_layers", None),
        f"model: got {name} with cross-attention layers, whose keys and values are those of an image; wanted "
        "layers that attend to the text alone",
    )
    layers = DynamicCache(config=model.config).layers
    others = sorted(
        {type(layer).__name__ for layer in layers}
        - {kind.__name__ for kind in (*EVICTED, *LEFT_ALONE)}
        - {NOTHING}
    )
    require(
        not others,
        f"model: got {name}, which keeps {', '.join(others)} for a layer; wanted full attention, a sliding "
        "window, or a state "
        "in the place of a cache in every layer",
    )
    require(
        getattr(config, "rope_parameters", None) is not None
        or any(isinstance(layer, LinearAttentionLayer) for layer in layers),
        f"model: got {name}, whose configuration has no rope_parameters: it has no rotary positions (RoPE), "
        "or an attention of "
        "its own that no cache can watch; wanted a model with them",
    )
    require(
        any(type(layer) in EVICTED for layer in layers),
        f"model: got {name} with a sliding window or a state in every layer, which bounds its cache already; "
        "wanted full "
        "attention in some",
    )
    require(
        config.model_type not in NO_SOFTMAX,
        f"model: got {name} with {NO_SOFTMAX.get(config.model_type)}, wanted plain softmax attention",
    )
    require(
        not getattr(config, "num_kv_shared_layers", None),
        f"model: got {name} whose layers share keys and values, wanted a cache for each layer",
    )
