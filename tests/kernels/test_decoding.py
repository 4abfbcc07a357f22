"""Decoding on a GPU, watched without one: the host waits for nothing, the kernels are launched, and no
cache is copied.

The model and the cache are put on torch's device `meta`, whose tensors have shapes and no numbers, and count
as tensors of a GPU. So the code takes every branch that it takes on a GPU, and torch shows each of its
operations, those of the model too. Two parts of the model are left out: the forwards get no attention mask,
at which transformers itself looks, and torch's attention, one kernel on a GPU, gives zeros here.
"""

import functools
import math
import weakref
from typing import Any

import pytest
import torch
from conftest import tiny_llama
from tools.kernels import KERNELS
from tools.reading import cached, read, refused
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from evictionary.cache.model_hooks import _batch_hook
from evictionary.optimized.states import CompressedCache, zero_moments

pytest.importorskip("triton")

PROMPT, BUDGET, STEPS = 1200, 600, 20
IDS = torch.randint(3, 259, (1, PROMPT + STEPS), generator=torch.Generator().manual_seed(4))


class Watch(TorchDispatchMode):
    """Counts the operations for which the host waits, and those that write `large` bytes or more into one
    tensor.
    """

    def __init__(self, large: int) -> None:
        super().__init__()
        self.large = large
        self.waits: list[str] = []
        self.copies: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        waits = any(
            tag in function.tags for tag in (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
        )
        # only a mask among the indices makes the result's shape depend on numbers
        if function is torch.ops.aten.index.Tensor:
            waits = any(index is not None and index.dtype == torch.bool for index in args[1])
        if waits:
            self.waits.append(str(function))
            raise AssertionError(f"{function} waits for the GPU")
        result = function(*args, **(kwargs or {}))
        storages = {part.untyped_storage()._cdata for part in given}
        for part in [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]:
            if part.device.type == "cpu" and any(each.is_meta for each in given):
                self.waits.append(f"{function} to the CPU")
            is_view = part.untyped_storage()._cdata in storages and not function._schema.is_mutable
            if not is_view and part.nbytes >= self.large:
                self.copies.append(str(function))
        return result


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take meta tensors for tensors of a GPU."""
    monkeypatch.setattr(
        functional, "scaled_dot_product_attention", lambda query, *_, **__: torch.zeros_like(query)
    )
    monkeypatch.setattr(
        torch.Tensor, "is_cuda", property(lambda tensor: tensor.device.type == "meta"), raising=False
    )


def to_meta(cache: Any) -> None:
    for layer in cache.layers:
        vars(layer).update(tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), vars(layer)))


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    ("method", "settings", "kernels", "copies"),
    [
        ("momentkv", {"budget": BUDGET}, {"walk_cache", "find_lowest", "evict", "write_new"}, 0),
        (
            "momentkv",
            {"compression_ratio": 0.5},
            {"walk_cache", "find_lowest", "evict", "write_new", "attend_chunks", "merge_chunks"},
            1,
        ),
        ("momentkv+ada_kv", {"budget": BUDGET, "every": 0}, {"attend_chunks", "merge_chunks"}, 0),
        ("keydiff+moments", {"budget": BUDGET}, {"attend_chunks", "merge_chunks"}, 1),
        ("knorm+ada_kv", {"budget": BUDGET}, {"attend_chunks", "merge_chunks"}, 0),
        ("keydiff", {"budget": BUDGET}, set(), 1),
        ("keydiff", {"budget": BUDGET, "every": STEPS + 1}, set(), 1),
        ("lagkv", {"compression_ratio": 0.5, "every": 1, "options": {"lag_size": 256}}, set(), 1),
    ],
    ids=lambda value: " ".join(sorted(value)) if isinstance(value, set) else str(value),
)
def test_a_decoded_token_waits_for_nothing_and_copies_no_cache(
    launched: list[tuple[str, tuple[int, ...]]],
    method: str,
    settings: dict[str, Any],
    kernels: set[str],
    copies: int,
) -> None:
    """`copies`: how often, in all steps, K and V of a layer move to larger storage, which grows by an
    eighth.
    """
    model = tiny_llama(max_position_embeddings=4096)
    with cached(model, IDS[:, :PROMPT], method, **settings) as cache:
        model.to("meta")
        to_meta(cache)
        with Watch(large=2 * BUDGET * 8 * 4 // 2) as watch:  # half of the keys of a layer
            for token in IDS[:, PROMPT:].to("meta").split(1, dim=1):
                read(model, token, cache)
    assert {name for name, _ in launched} == kernels
    assert not watch.waits
    assert len(watch.copies) <= copies * 2 * 2 * 2  # K and V of two layers: the storage, and what was in it


@pytest.mark.usefixtures("on_a_gpu", "launched")
def test_the_mask_of_a_decoded_token_is_not_looked_at() -> None:
    model = tiny_llama()
    with cached(model, IDS[:, :40], "momentkv", budget=20) as cache:
        to_meta(cache)
        token, mask = (torch.ones(1, length, dtype=torch.long, device="meta") for length in (1, 41))
        with Watch(100):
            _batch_hook(weakref.ref(cache), model)(
                model, (token,), {"past_key_values": cache, "attention_mask": mask}
            )


def test_the_watch_sees_waits_and_copies() -> None:
    """The tests above can fail: each of these operations is counted."""
    tensor = torch.zeros(8, 8, device="meta")
    for operation in (tensor.max().item, tensor.any().__bool__, tensor.nonzero, lambda: tensor[tensor > 0]):
        with Watch(100):
            refused(operation, "waits for the GPU", AssertionError)
    for copy in (
        tensor.clone,
        lambda: torch.cat([tensor, tensor]),
        lambda: tensor.copy_(tensor),
        tensor[:, :4].contiguous,
    ):
        with Watch(100) as watch:
            copy()
        assert watch.copies, copy
    with Watch(100) as watch:
        tensor[:, :4].mT[None].expand(3, -1, -1)
    assert not watch.copies and not watch.waits


SIZES = {
    "a block of 2,048 tokens behind 32K kept": (1, 32, 8, 2048, 8 * 32768, 2048),
    "a prompt of 16,384 tokens": (1, 32, 8, 16384, 8 * 1024, 16384),
    "a batch of 32 that decodes behind 128K": (32, 32, 8, 1, 32 * 8 * 131072, 512),
    "one token behind 32K": (1, 32, 8, 1, 8 * 32768, 0),
}


@pytest.mark.parametrize("size", SIZES)
def test_the_attention_of_the_largest_sizes_fits_a_gpu(
    launched: list[tuple[str, tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    """The limits of CUDA's grids, which Triton's interpreter does not know, and the memory beside the
    output.
    """
    batch, num_query_heads, num_kv_heads, num_queries, stored, length = SIZES[size]
    allocated, meta = [], functools.partial(torch.empty, dtype=torch.bfloat16, device="meta")

    def floats(like: torch.Tensor, *shape: int) -> torch.Tensor:
        allocated.append(4 * math.prod(shape))
        return meta(shape)

    monkeypatch.setattr(KERNELS["attention"], "floats", floats)
    storage, recent = meta(stored, 128), meta(batch, num_kv_heads, length, 128)
    queries = meta(batch, num_query_heads, num_queries, 128)
    cache = CompressedCache(storage, storage, storage[:, 0], meta(batch, num_kv_heads).long())
    output, _ = KERNELS["attention"].attend(
        queries, cache, (recent, recent) if length else None, zero_moments(recent, recent)
    )
    assert output.shape == queries.shape
    assert max(allocated) <= KERNELS["attention"].WORKSPACE
    assert all(len(grid) == 1 and grid[0] < 2**31 for _, grid in launched)
    chunks = [grid[0] for name, grid in launched if name == "attend_chunks"]
    # two for each multiprocessor, and no crowd of tiny ones
    assert all(264 <= programs <= 2**16 for programs in chunks)
