"""Loads a model: the embedded one, a name on the Hugging Face hub, or a local folder."""

import contextlib
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
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
from evictionary.models.loading import DeviceMap, Loading
from evictionary.models.names import EMBEDDED, hint, located
from evictionary.models.weights import require_weights

NO_SOFTMAX = {"diffllama": "differential attention", "doge": "a mask that it makes from the values"}
"""Model types without plain softmax attention, which nothing else in their configuration reveals."""
FORGETFUL = {"jamba"}
"""Model types whose recurrent layers begin anew where several later tokens are read at once, in
transformers 5.23.
"""
EVICTED = (DynamicLayer, LinearAttentionAndFullAttentionLayer)
"""The layers of a transformers cache that a cache with eviction replaces: full attention, alone or next to
a recurrent state.
"""
LEFT_ALONE = (DynamicSlidingWindowLayer, LinearAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer)
"""The layers that it leaves alone: they have a window, or a state of one size, and grow no further."""
NOTHING = "DummyLayer"
"""What newer versions of transformers keep for a layer without attention."""


def load(
    name: str = EMBEDDED,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "auto",
    device_map: DeviceMap | None = None,
    revision: str | None = None,
    attn: str | None = None,
) -> tuple[PreTrainedModel, Any]:
    """Load a model and its tokenizer, ready to run on the first GPU, or on the CPU without one.

    Args:
        name: `embedded` for SmolLM2-135M-Instruct, which is installed from the package index, a name on the
            Hugging Face hub, a folder, or a GGUF file.
        device: The device, such as "cpu" or "cuda:1".
        dtype: "float32", "bfloat16", "float16", or "auto" for its files' dtype (float32 for `embedded`).
        device_map: How transformers divides a large model among devices: "auto", or a device for each module.
        revision: The branch, tag or commit of a name on the hub.
        attn: An attention of transformers, such as "eager", instead of the model's own.

    Returns:
        The model, in evaluation mode, and its tokenizer.

    Raises:
        UsageError: The model cannot be loaded or cannot be compressed, or, before anything is loaded, the
            device is not here.
        InstallError: The embedded model cannot be installed.

    Examples:
        >>> from evictionary.models.load import load
        >>> model, tokenizer = load(dtype="float32", device="cpu")
        >>> model.dtype
        torch.float32
    """
    named = None if device is None else str(device)
    wanted = Loading(named, str(dtype).removeprefix("torch."), device_map, revision, attn)
    wanted.require_here()
    _quiet_transformers()
    source, place = _source(name, revision), named or ("cuda" if torch.cuda.is_available() else "cpu")
    numbers = "float32" if (name, wanted.dtype) == (EMBEDDED, "auto") else wanted.dtype
    with _named(name, wanted), _current(place):
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model: Any = AutoModelForCausalLM.from_pretrained(
            **source, dtype=numbers, device_map=device_map, attn_implementation=attn
        )
        require_supported(model)
        if not hasattr(model, "hf_device_map"):  # quantized weights are on the current device already
            model.to(place)
    return model.eval(), tokenizer


def _source(name: str, revision: str | None) -> dict[str, Any]:
    """Where transformers finds a model. Raises UsageError for what is no place of one."""
    place = located(name)
    require(
        revision is None or not Path(place.name).is_dir(),
        f"revision: got {revision!r} for {name!r}, which has one alone, wanted none",
    )
    return {
        "pretrained_model_name_or_path": place.name,
        "revision": revision or "main",
        "local_files_only": place.is_local,
        **place.file,
    }


@contextlib.contextmanager
def _named(name: str, wanted: Loading) -> Iterator[None]:
    """Raise UsageError with the model's name, and with what was asked, where it cannot be loaded."""
    try:
        yield
    except (UsageError, torch.OutOfMemoryError):
        raise
    # a damaged file, other shapes, a missing package: transformers raises what its parts raise
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        asked = {option: getattr(wanted, option) for option in ("attn", "device_map", "revision")}
        words = "".join(f" with {option} {value!r}" for option, value in asked.items() if value is not None)
        raise UsageError(
            f"model: got {name!r}{hint(name)}{words}, wanted a hub name or a folder with a causal language "
            f"model: {reason}"
        ) from error


def _current(place: str) -> AbstractContextManager[Any]:
    """A GPU as the current device."""
    return torch.cuda.device(place) if place.startswith("cuda") else contextlib.nullcontext()


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


def require_supported(model: PreTrainedModel) -> None:
    """Raise UsageError unless the model is a decoder of known positions, with full attention in at least
    one layer, and its weights have numbers.
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
    require_weights(model)
