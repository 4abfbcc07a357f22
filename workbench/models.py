"""Loads a model: the embedded one, a name on the Hugging Face hub, or a local folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from workbench import embedded
from workbench.errors import UsageError

EMBEDDED = "embedded"


def load(name: str = EMBEDDED) -> tuple[PreTrainedModel, Any]:
    """Return (model, tokenizer) for `embedded`, a hub name or a folder, ready to run on the GPU if there is one.

    Raises UsageError for a name or folder that cannot be loaded or a model that cannot be compressed, InstallError where the
    embedded model cannot be installed.
    """
    folder = str(embedded.install()) if name == EMBEDDED else name
    if not folder.strip():
        raise UsageError(f"model: got {name!r}, wanted a hub name, a folder, or {EMBEDDED}")
    is_folder = Path(folder).is_dir()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float32 if name == EMBEDDED else "auto"
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=is_folder)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=is_folder)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(f"model: got {name!r}, wanted a hub name or a folder with a causal language model: {reason}") from error
    require_supported(model)
    return model.eval().to(device), tokenizer


def require_supported(model: PreTrainedModel) -> None:
    """Raise UsageError unless the model is a decoder with rotary positions and full attention in every layer."""
    name = type(model).__name__
    config = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        raise UsageError(f"model: got {name}, an encoder-decoder; wanted a decoder-only language model")
    if getattr(config, "rope_parameters", None) is None:
        raise UsageError(f"model: got {name}, which has no rotary positions (RoPE); wanted a model that has them")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None):
        kinds.add("sliding_attention")
    if kinds != {"full_attention"}:
        others = ", ".join(sorted(kinds - {"full_attention"}))
        raise UsageError(f"model: got {name} with layers of {others}; wanted full attention in every layer")
