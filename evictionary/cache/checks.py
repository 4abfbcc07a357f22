"""What a cache refuses or warns of: forwards that are not its own, models that it cannot watch, states
that are not finite.
"""

import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from evictionary.errors import MethodError, require
from evictionary.optimized.checks import is_finite

MEDIA = re.compile("pixel|image|video|audio|input_features|mm_encoder")  # the arguments of what is not text


def media(named: Mapping[str, Any]) -> list[str]:
    """The arguments of a forward that bring what is not text."""
    return [name for name, value in named.items() if value is not None and MEDIA.search(name)]


def require_one_length(layers: Iterable[Any]) -> int:
    """The tokens that the layers have read. Raises RuntimeError after an interrupted forward."""
    read = sorted({layer.get_seq_length() for layer in layers if hasattr(layer, "get_seq_length")})
    require(
        len(read) <= 1,
        f"cache: got layers that have read {' and '.join(map(str, read))} tokens, wanted one number: a "
        "forward was interrupted or failed; use a copy from before it, or cache.reset() and the prompt again",
        RuntimeError,
    )
    return int(read[0])


def warn_of_length(read: int, new: int, longest: int | None) -> None:
    """Warn where `new` tokens exceed the context that the model was made for."""
    if longest is not None and read <= longest < read + new:
        warnings.warn(
            f"the text is now longer than the model's context of {longest} tokens: evicted tokens count, for "
            "the later ones keep their positions",
            stacklevel=4,
        )


def require_announced(is_announced: bool) -> None:
    """Raise RuntimeError where a cache that watches its
    model reads tokens that the model has not announced.
    """
    require(
        is_announced,
        "cache: got tokens of another model, wanted those of the model object that it was made with, called "
        "as a whole and not in a part: a model that was loaded again is another one; cache.save(path) and "
        "EvictingCache.load(path, model) take a cache to it",
        RuntimeError,
    )


def require_seen(layer_index: int, is_handed: bool) -> None:
    """Raise RuntimeError where the attention of a layer has not called back after its last tokens."""
    require(
        not is_handed,
        f"layer {layer_index}: tokens were read but their queries were never seen, so the cache could not "
        "compress them: the "
        "forward before was interrupted; wanted a copy from before it, or cache.reset() and the prompt again",
        RuntimeError,
    )


def require_remembered(is_forgetful: bool, new: int, seen: int) -> None:
    """Raise UsageError for several tokens at once after
    others, in a model whose recurrent layers then begin anew.
    """
    require(
        not is_forgetful or new == 1 or seen == 0,
        f"prompt: got {new} tokens after the {seen} that were read, wanted one: with several the recurrent "
        "layers of this model "
        "forget the text, in transformers itself; read the prompt in one forward",
    )


def require_rows(rows: int, held: int) -> None:
    """Raise UsageError for a batch of more or fewer rows than the cache holds."""
    require(
        rows == held,
        f"batch size: got {rows}, wanted {held}, the rows that the cache holds: "
        "cache.batch_repeat_interleave and cache.batch_select_indices change them",
    )


def require_not_checkpointed(model: torch.nn.Module) -> None:
    """Raise UsageError for gradient checkpointing in train mode: transformers gives such layers no cache."""
    parts = (
        part
        for layer in (model.modules() if model.training else ())
        if getattr(layer, "gradient_checkpointing", False) and layer.training
        for part in layer.modules()
    )
    require(
        not any(getattr(part, "layer_idx", None) is not None for part in parts),
        f"model: got {type(model).__name__} in train mode with gradient checkpointing, where transformers "
        "gives its layers no cache, wanted model.eval(), model.gradient_checkpointing_disable() or no cache",
    )


def require_stored(is_announced: bool, model: Any) -> None:
    """Raise RuntimeError after a forward whose tokens have not come to the cache."""
    require(
        not is_announced,
        f"model: got a forward of {type(model).__name__} that gave its cache no token, "
        "wanted a model whose layers do",
        RuntimeError,
    )


def require_read_twice(layers: Iterable[Any], is_asked: bool) -> None:
    """Raise RuntimeError where the second reading of a prompt that was asked for has not come to its end."""
    require(
        not is_asked or all(layer.evicted_at for layer in layers),
        "cache: got more tokens before the prompt was read a second time: the forward before was interrupted "
        "or failed; wanted cache.reset() and the prompt again",
        RuntimeError,
    )


def require_left_padding(real: torch.Tensor, seen: int, is_watched: bool) -> None:
    """Raise UsageError for padding [B, M] that no cache can take: after tokens, of a whole row in the first
    block, or, where the cache attends by itself, after the first block.
    """
    if real.all():
        return
    require(
        not (seen and is_watched),
        "attention_mask: got padding after tokens, wanted it before the first prompt alone",
    )
    require(
        seen or not (real[:, :-1] & ~real[:, 1:]).any(),
        "attention_mask: got padding after tokens, wanted it before them: tokenizer.padding_side = 'left'",
    )
    require(
        seen or real.any(dim=1).all(),
        f"attention_mask: got a row with only padding in the first {real.shape[1]} tokens, wanted a larger "
        "block: the first block must hold a token of each row of the batch",
    )


def require_watchable(model: Any, handed: Any) -> None:
    """Raise UsageError for a model whose attention got other keys than the cache returned."""
    require(
        not handed,
        f"model: got {type(model).__name__}, which gives its attention other keys than the cache returned, "
        "so no method "
        "can see its queries; wanted another model",
    )


def require_readable_twice(
    length: int, longest: int | None, padding: torch.Tensor | None, named: Mapping[str, Any]
) -> None:
    """Raise UsageError for a prompt that a model cannot read twice; `named`, the arguments of its forward."""
    found = media(named)
    require(not found, f"{', '.join(found)}: got a prompt with media, wanted text: the prompt is read twice")
    require(
        longest is None or 2 * length <= longest,
        f"prompt: got {length} tokens, wanted at most half of the model's context of {longest}: the prompt "
        "is read twice",
    )
    require(
        padding is None, "attention_mask: got padding, wanted prompts of one length: the prompt is read twice"
    )


def require_whole(full: Any, layer_index: int, recorded: dict[str, torch.Tensor]) -> None:
    """Raise UsageError unless a prefilled layer holds all
    tokens of a prompt, and states of all of them were recorded.
    """
    stored, seen = 0 if full.keys is None else full.keys.shape[-2], full.get_seq_length()
    require(
        stored and stored == seen,
        f"prefilled: got {stored} of {seen} tokens in layer {layer_index}, wanted all tokens of a prompt",
    )
    for name, states in recorded.items():
        require(
            states.shape[-2] == seen,
            f"prefilled: got {name} of {states.shape[-2]} of {seen} tokens in layer {layer_index}, wanted a "
            "prompt that "
            "was read in one forward",
        )


def require_finite(layer_index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Raise MethodError for NaN or infinite numbers on a CPU. A GPU would have to be waited for; there the
    scores show NaN.
    """
    for name, states in (("keys", keys), ("values", values)):
        require(
            states.device.type != "cpu" or is_finite(states),
            f"{name}: got NaN or infinite numbers in layer {layer_index}, wanted finite ones",
            MethodError,
        )


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that a GPU has too little
    memory, or comes from a method that met such an error.
    """
    return isinstance(error, torch.OutOfMemoryError) or isinstance(error.__cause__, torch.OutOfMemoryError)
