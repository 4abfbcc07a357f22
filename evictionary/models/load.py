"""Loads a model: the embedded one, a name on the Hugging Face hub, or a local folder."""

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from evictionary.errors import UsageError, require
from evictionary.models import embedded

EMBEDDED = "embedded"

NO_SOFTMAX = {"diffllama": "differential attention", "doge": "a mask that it makes from the values"}
"""Model types without plain softmax attention, which nothing else in their configuration reveals."""


def load(name: str = EMBEDDED) -> tuple[PreTrainedModel, Any]:
    """Return (model, tokenizer) for `embedded`, a hub name or a folder, ready to run on the GPU if there is one.

    Raises UsageError for a name or folder that cannot be loaded or a model that cannot be compressed, InstallError where the
    embedded model cannot be installed.
    """
    _quiet_transformers()
    folder = str(embedded.install()) if name == EMBEDDED else name
    require(folder.strip(), f"model: got {name!r}, wanted a hub name, a folder, or {EMBEDDED}")
    is_folder = Path(folder).is_dir()
    require(
        is_folder or not folder.startswith((".", "/", "~")),
        f"model: got {name!r}, wanted a folder that exists, a hub name, or {EMBEDDED}",
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float32 if name == EMBEDDED else "auto"
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=is_folder)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=is_folder)
    except Exception as error:  # a damaged file, other shapes, a missing package: transformers raises what its parts raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(f"model: got {name!r}, wanted a hub name or a folder with a causal language model: {reason}") from error
    require_supported(model)
    return model.eval().to(device), tokenizer


def _quiet_transformers() -> None:
    """Turn off progress bars and warnings, which would appear between the lines of a command."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def unwrapped(model: Any) -> PreTrainedModel:
    """The transformers model inside of a wrapper, such as that of PEFT or torch.compile. Raises UsageError where there is none.

    A wrapper answers to the names of its model, but its own forward may call the model's parts past the hooks of a cache.
    """
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    found = next((module for module in modules if isinstance(module, PreTrainedModel)), None)
    require(found is not None, f"model: got {type(model).__name__}, wanted a transformers model, or a module with one inside")
    return found


def loaded(module: torch.nn.Module, name: str) -> torch.Tensor:
    """A weight of a module, also one that accelerate left on the disk. Raises UsageError for one that is nowhere."""
    weight = getattr(module, name)
    if weight.device.type != "meta":
        return weight
    hook = getattr(module, "_hf_hook", None)
    found: Any = next(
        (each.weights_map for each in (hook, *getattr(hook, "hooks", ())) if getattr(each, "weights_map", None)), None
    )
    require(
        found is not None, f"model: got {type(module).__name__} without numbers in its {name} (device meta), wanted loaded weights"
    )
    return found[name]


def require_supported(model: PreTrainedModel) -> None:
    """Raise UsageError unless the model is a decoder with rotary positions and full attention in at least one layer."""
    name = type(model).__name__
    config = model.config.get_text_config()
    require(not model.config.is_encoder_decoder, f"model: got {name}, an encoder-decoder; wanted a decoder-only language model")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    others = kinds - {"full_attention", "sliding_attention"}
    require(
        not others, f"model: got {name} with layers of {', '.join(sorted(others))}; wanted full or sliding attention in every layer"
    )
    require(
        getattr(config, "rope_parameters", None) is not None,
        f"model: got {name}, whose configuration has no rope_parameters: it has no rotary positions (RoPE), or an attention of "
        "its own that no cache can watch; wanted a model with them",
    )
    require(
        not all(is_sliding(config, index) for index in range(config.num_hidden_layers)),
        f"model: got {name} with a sliding window in every layer, which bounds its cache already; wanted full attention in some",
    )
    require(
        not getattr(config, "attn_logit_softcapping", None),
        f"model: got {name} with capped attention logits, wanted plain softmax attention",
    )
    require(
        config.model_type not in NO_SOFTMAX,
        f"model: got {name} with {NO_SOFTMAX.get(config.model_type)}, wanted plain softmax attention",
    )
    require(
        not getattr(config, "kv_lora_rank", None),
        f"model: got {name} with latent attention, wanted a cache of full keys and values",
    )
    require(
        not getattr(config, "num_kv_shared_layers", None),
        f"model: got {name} whose layers share keys and values, wanted a cache for each layer",
    )
    require(
        not any(_has_sinks(module, config) for module in model.modules()),
        f"model: got {name} with learned attention sinks, wanted plain softmax attention",
    )


def _has_sinks(module: Any, config: Any) -> bool:
    """Whether a module is full attention with a learned logit in its softmax, beside the tokens' logits."""
    return getattr(module, "sinks", None) is not None and not is_sliding(config, getattr(module, "layer_idx", 0))


def is_sliding(config: Any, layer_index: int) -> bool:
    """Whether a layer of a text configuration has sliding-window attention; the cache does not compress it."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return kinds[layer_index] == "sliding_attention"
    return bool(getattr(config, "sliding_window", None)) and getattr(config, "use_sliding_window", True)
