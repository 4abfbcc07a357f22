"""What the tests of the cache share: tokens to read, and short ways to read, to generate and to look at
what is stored.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evictionary.cache.evicting_cache import EvictingCache
from evictionary.cache.layers import EvictingLayer
from evictionary.models import versions

from . import refused as refused, saved

IDS = torch.randint(3, 259, (1, 60), generator=torch.Generator().manual_seed(3))


def written(folder: Path, text: str) -> str:
    """The path of a file of a method."""
    return str(saved(folder / "mine.py", text))


@torch.no_grad()
def read(model: Any, ids: torch.Tensor, cache: Any, **named: Any) -> torch.Tensor:
    """The logits of ids [B, M]."""
    return model(ids, **versions.argument(cache), use_cache=True, **named).logits


def cached(
    model: Any,
    ids: torch.Tensor,
    method: str | None,
    *arguments: Any,
    sizes: Sequence[int] = (),
    given: Any = None,
    **named: Any,
) -> EvictingCache:
    """A cache that has read ids [B, M], or parts of them of these sizes; `given` goes to the model, all
    else to the cache.
    """
    cache = EvictingCache(model, method, *arguments, **named)
    read_in(model, cache, sizes or [ids.shape[1]], ids, **(given or {}))
    return cache


def loaded(cache: EvictingCache, folder: Path, model: Any) -> EvictingCache:
    """The cache as its file gives it back."""
    cache.save(folder / "cache")
    return EvictingCache.load(folder / "cache", model)


def read_in(
    model: Any, cache: Any, sizes: Sequence[int], ids: torch.Tensor = IDS, **named: Any
) -> torch.Tensor:
    """The logits of the first tokens, read in parts of these sizes."""
    return torch.cat(
        [read(model, part, cache, **named) for part in ids[:, : sum(sizes)].split(list(sizes), dim=1)], dim=1
    )


def masked_logits(
    model: Any, ids: torch.Tensor, visible: Mapping[int, torch.Tensor], cache: Any = None, **named: Any
) -> torch.Tensor:
    """The logits of ids [B, M] where token m of a layer attends to what row m of its `visible` [B, H_kv,
    M, T] says.

    The layers are called in their order; a module may serve several.
    """
    waiting = dict(visible)

    def masked(module: Any, arguments: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        own = waiting.pop(min(waiting))
        mask = torch.where(own, 0.0, torch.finfo(torch.float32).min).to(model.dtype)
        return arguments, given | {
            # a layer may have a number of heads of its own
            "attention_mask": mask.repeat_interleave(
                getattr(module, "num_heads", model.config.num_attention_heads) // own.shape[1], dim=1
            )
        }

    with ExitStack() as hooks:
        for module in model.modules():
            if "Attention" in type(module).__name__ and getattr(module, "layer_idx", None) in (*visible, -1):
                hooks.enter_context(module.register_forward_pre_hook(masked, with_kwargs=True))
        logits = read(model, ids, cache, **named)
    assert not waiting
    return logits


def generate(
    model: Any,
    ids: torch.Tensor,
    cache: Any = None,
    *,
    count: int = 8,
    mask: torch.Tensor | None = None,
    **named: Any,
) -> torch.Tensor:
    """The ids with `count` more of greedy generation."""
    settings = {
        "max_new_tokens": count,
        "min_new_tokens": count,
        "do_sample": False,
        "pad_token_id": 0,
    } | named
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, **versions.argument(cache), **settings)


def padded(*lengths: int, width: int = 30) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Rows of IDS, of these lengths, padded on the left to
    `width`, and the arguments of the model that say so.
    """
    mask = torch.stack([torch.arange(width) >= width - length for length in lengths]).long()
    ids = torch.cat([IDS[:, 10 * row : 10 * row + width] for row in range(len(lengths))]) * mask
    return ids, {"attention_mask": mask, "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0)}


def after(given: dict[str, torch.Tensor], steps: int = 1) -> dict[str, torch.Tensor]:
    """The arguments for the `steps`-th token after a padded batch, read alone."""
    ones = torch.ones(len(given["attention_mask"]), steps, dtype=torch.long)
    positions = given["position_ids"][:, -1:] + steps
    return {"attention_mask": torch.cat([given["attention_mask"], ones], dim=1), "position_ids": positions}


def positions_of(layer: EvictingLayer) -> list[list[int]]:
    """The positions that each head of the first row stores."""
    _, _, positions, filled = layer.contents()
    return [positions[0, head][filled[0, head]].tolist() for head in range(positions.shape[1])]


def places(kept: Any) -> list[list[int]]:
    """The positions of each head where a kept mask [1, H_kv, T] is True."""
    return [row.nonzero()[0].tolist() for row in kept[0]]


def small(method: str) -> dict[str, Any]:
    """Options of a method that suit prompts of some sixty tokens."""
    return {
        "snapkv": {"window_size": 4},
        "criticalkv": {"window_size": 4},
        "lagkv": {"sink_size": 2, "lag_size": 4},
        "duo_attention": {"sink_size": 2, "recent_size": 8, "threshold": 2.0},
        "kvzap": {"window_size": 8, "threshold": 0.0},
    }.get(method.partition("+")[0], {})


def same_moments(layer: EvictingLayer, wanted: Sequence[Any]) -> None:
    """Fail unless a layer holds these moments, up to rounding."""
    near(layer.moments or (), wanted, rtol=1e-4, atol=1e-3)


def near(got: Sequence[Any], wanted: Sequence[Any], rtol: float = 1e-4, atol: float = 1e-4) -> None:
    """Fail unless tensors are as near to arrays as that."""
    for ours, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=rtol, atol=atol)


def same(got: EvictingCache, wanted: EvictingCache) -> None:
    """Fail unless two caches hold the same states of the same tokens."""
    for ours, theirs in zip(got.layers, wanted.layers, strict=True):
        assert all(map(torch.equal, ours.contents(), theirs.contents()))
