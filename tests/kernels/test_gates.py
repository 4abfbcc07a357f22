"""What would fail or be slow on a GPU, found without one: the device of a launch, the sizes of grids,
memory, arguments; and that the host of a decoded token waits for nothing.

The machine code is looked at in test_kernel_compile.py, the results of the kernels in test_kernels.py.
"""

import ast
import functools
import importlib
import inspect
import math
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from conftest import tiny_llama
from tools import ROOT, refused
from tools.kernels import KERNELS, launched_by_a_grid
from tools.reading import cached, read
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from evictionary.optimized import kernels
from evictionary.optimized.kernels import launching
from evictionary.optimized.momentkv_bounded import no_bounds
from evictionary.optimized.states import CompressedCache, PagedCache, zero_moments


def functions(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """The public functions of a module, also those it imports from a module beside it."""
    folder, found = module.__name__.rpartition(".")[0], inspect.getmembers(module, inspect.isfunction)
    return {
        name: value
        for name, value in found
        if value.__module__.startswith(folder) and not name.startswith("_")
    }


# The device of a launch
# -----------------------------------------------------------------------------------------------------------


def on_gpu(dtype: torch.dtype = torch.bfloat16, head_dim: int = 128) -> Any:
    """What `kernels.take` asks a tensor on the second GPU of a machine."""
    return SimpleNamespace(
        is_cuda=True, device=torch.device("cuda:1"), dtype=dtype, shape=(1, 8, 4096, head_dim)
    )


@pytest.mark.parametrize("first", [on_gpu(), (on_gpu(), None)], ids=["a tensor", "a state"])
def test_a_launcher_runs_with_the_device_of_the_tensors_as_the_current_one(
    first: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = [torch.device("cuda:0")]

    @contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        current.append(wanted)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    launched = launching.launcher(lambda *given, **named: (current[-1], given, named))
    assert launched(first, 1, two=2) == (torch.device("cuda:1"), (first, 1), {"two": 2})
    assert current == [torch.device("cuda:0")]


def callers() -> Iterator[tuple[Path, ast.Module]]:
    """The files outside of the kernels that may call them."""
    for folder in ("optimized", "evictionary"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.parent.name != "kernels":
                yield path, ast.parse(path.read_text(encoding="utf-8"))


def launchers(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The launchers that a piece of a program names, `kernels.keydiff.score` as its file and its name."""
    for node in ast.walk(tree):
        if found := re.fullmatch(r"kernels\.(\w+)\.(\w+)", ast.unparse(node)):
            yield found[1], found[2]


def test_nobody_gets_kernels_without_asking_whether_they_take_the_tensors() -> None:
    for path, tree in callers():
        imported = re.findall(r"kernels\.(\w+) import|kernels import (\w+)", path.read_text(encoding="utf-8"))
        assert {name for pair in imported for name in pair if name} <= {"launching"}, path
        asked = [
            found
            for node in ast.walk(tree)
            if isinstance(node, ast.If)
            and re.search("kernels.take|kernels_take|in_kernels", ast.unparse(node.test))
            for line in node.body
            for found in launchers(line)
        ]
        assert sorted(asked) == sorted(launchers(tree)), path


def test_whatever_is_called_of_a_file_of_kernels_is_a_launcher() -> None:
    called = {each for _, tree in callers() for each in launchers(tree)}
    assert {stem for stem, _ in called} == set(KERNELS) - {"expected_attention_statistics", "momentkv_prompt"}
    a_launcher = launching.launcher(print).__code__
    for stem, name in called:
        assert getattr(KERNELS[stem], name).__code__ is a_launcher, f"{stem}.{name}"


@pytest.mark.parametrize(
    ("tensor", "told"),
    [
        (on_gpu(torch.float64), "got torch.float64, wanted torch.float32, torch.float16"),
        (on_gpu(head_dim=320), "got 320 channels"),
    ],
    ids=["float64", "320 channels"],
)
def test_what_no_kernel_takes_is_said_once(tensor: Any, told: str) -> None:
    launching._warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert not kernels.take("keydiff", on_gpu(), tensor)
        assert not kernels.take("keydiff", tensor)
        # nobody expects kernels on a CPU
        assert not kernels.take("keydiff", torch.ones(2, 320, dtype=torch.float64))
    assert [told in str(one.message) for one in said] == [True]


HEADS, LENGTH, CHANNELS = (1, 2), 8, 4
STATES = torch.ones(*HEADS, LENGTH, CHANNELS)
QUERIES = torch.ones(1, 4, LENGTH, CHANNELS)
MASK = torch.ones(*HEADS, LENGTH, dtype=torch.bool)
# An argument of each name that an entry of `optimized` has.
ARGUMENTS: dict[str, Any] = {
    **dict.fromkeys(
        ("keys", "values", "next_keys", "next_values", "replay_keys", "new_keys", "evicted_keys"), STATES
    ),
    **dict.fromkeys(("queries", "replay_queries", "sampled_queries", "states"), QUERIES),
    **dict.fromkeys(("kept", "evicted", "protected"), MASK),
    **dict.fromkeys(("new_key", "new_value", "anchor"), STATES[:, :, 0]),
    **dict.fromkeys(("scores", "attention", "weights", "bias", "draws"), STATES[..., 0]),
    "query": QUERIES[:, :, 0],
    "query_mean": QUERIES[:, :, 0],
    "query_covariance": torch.ones(1, 4, CHANNELS, CHANNELS),
    "budgets": torch.ones(HEADS, dtype=torch.int64),
    "moments": zero_moments(STATES, STATES),
    "bounds": no_bounds(STATES, STATES),
    "w_o": torch.ones(4, CHANNELS, 3),
    "cache": CompressedCache(
        STATES[0].flatten(0, 1), STATES[0].flatten(0, 1), torch.arange(16), torch.full(HEADS, LENGTH)
    ),
    "paged": PagedCache(
        *[STATES.transpose(1, 2)] * 2,
        torch.zeros(1, 8, 2).long(),
        torch.tensor([[0]]),
        torch.full(HEADS, 2),
        torch.tensor([2]),
    ),
    "count": 1,
    "attended": torch.ones(1, 4, LENGTH, dtype=torch.bool),
    "compactor.chunk_attention keys": QUERIES,
    "replay_hidden_states": torch.ones(1, LENGTH, 3),
    "sketch": torch.ones(*HEADS, CHANNELS, 2),
    "unrotated_keys": STATES,
    "positions": torch.arange(LENGTH),
    "momentkv.step positions": torch.arange(LENGTH).repeat(*HEADS, 1),
    "momentkv.step position": torch.full(HEADS, LENGTH),
    **{"budget": LENGTH, "keep_ratio": 0.5, "sink_size": 1, "lag_size": 2, "position": LENGTH, "p": 0.9},
}


def entries() -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """Each function of `optimized` that promises errors, with arguments that are right for it."""
    for path in sorted((ROOT / "optimized").glob("[!_]*.py")):
        module = importlib.import_module(f"evictionary.optimized.{path.stem}")
        for name, function in functions(module).items():
            if function.__module__ == module.__name__ and re.search(
                "[Rr]aises|errors", function.__doc__ or ""
            ):
                entry = f"{path.stem}.{name}"
                named = [
                    one.name
                    for one in inspect.signature(function).parameters.values()
                    if one.default is one.empty
                ]
                named += [one for one in inspect.signature(function).parameters if one == "protected"]
                yield (
                    entry,
                    function,
                    {one: ARGUMENTS.get(f"{entry} {one}", ARGUMENTS.get(one)) for one in named},
                )


ENTRIES = {
    name: (function, arguments)
    for name, function, arguments in entries()
    if not name.startswith(("checks.", "cpu.", "states."))
}


@pytest.mark.parametrize("name", ENTRIES)
def test_tensors_on_two_devices_are_refused_by_name(name: str) -> None:
    function, arguments = ENTRIES[name]
    tensors = {one: value for one, value in arguments.items() if isinstance(value, torch.Tensor | tuple)}
    parts = [
        (one, field)
        for one, value in tensors.items()
        for field in (value._fields if isinstance(value, tuple) else [None])
    ]
    for one, field in parts if len(parts) > 1 else ():
        given = arguments[one]
        moved = given._replace(**{field: getattr(given, field).to("meta")}) if field else given.to("meta")
        call = functools.partial(function, **arguments | {one: moved})
        refused(call, rf"^({'|'.join(tensors)})\b.*(device|on meta)", ValueError)


# The largest documented sizes
# ---------------------------------------------------------------------------------------------------

GIB = 2**30
TOKENS, BATCH, KV_HEADS, HEAD_DIM = 131_072, 32, 8, 128


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def states(batch: int = BATCH, heads: int = KV_HEADS, tokens: int = TOKENS) -> torch.Tensor:
    return meta(batch, heads, tokens, HEAD_DIM)


def mask(batch: int = BATCH) -> torch.Tensor:
    return meta(batch, KV_HEADS, TOKENS, dtype=torch.bool)


numbers, whole = functools.partial(meta, dtype=torch.float32), functools.partial(meta, dtype=torch.int64)


def attended(batch: int, queries: int, tokens: int = TOKENS) -> tuple[Any, ...]:
    """Queries, and a cache of `tokens` kept tokens in each head."""
    storage = states(1, 1, batch * KV_HEADS * tokens)[0, 0]
    return states(batch, 32, queries), CompressedCache(
        storage, storage, whole(storage.shape[0]), whole(batch, KV_HEADS)
    )


def moments(batch: int = BATCH) -> Any:
    return zero_moments(states(batch), states(batch))


def stepped(batch: int, tokens: int) -> tuple[Any, ...]:
    cache, new = states(batch, tokens=tokens), states(batch)[:, :, 0]
    return (
        query(batch),
        new,
        new,
        cache,
        cache,
        whole(batch, KV_HEADS, tokens),
        moments(batch),
        whole(batch, KV_HEADS),
    )


def query(batch: int = BATCH) -> torch.Tensor:
    return states(batch, 32)[:, :, 0]


def in_pages(size: int = 16) -> tuple[Any, ...]:
    """A cache of full pages, and which of its tokens stay."""
    count = TOKENS // size
    pools = (meta(BATCH * count, size, KV_HEADS, HEAD_DIM), meta(BATCH * count, size, KV_HEADS, HEAD_DIM))
    positions = whole(BATCH * count, size, KV_HEADS)
    return PagedCache(*pools, positions, whole(BATCH, count), whole(BATCH, KV_HEADS), whole(BATCH)), mask()


LAG = {"sink_size": 16, "lag_size": 128, "kept_each": 32}
OPTIONS = {"lagkv.select": LAG, "lagkv.compress": LAG}
ANCHOR = numbers(BATCH, KV_HEADS, HEAD_DIM)
# The arguments of each launcher, and the most GiB that it may take beside its result. The keys alone have 8
# GiB at these sizes.
LARGEST: dict[str, tuple[Callable[[], tuple[Any, ...]], float]] = {
    # 64 partial sums for each head, and 4 bytes for the norm of a key of 256.
    "keydiff.score": (lambda: (states(),), 0.14),
    "keydiff.anchor_sum": (lambda: (states(),), 0.01),
    "keydiff.score_with_anchor": (lambda: (states(), ANCHOR), 0),
    "lagkv.score": (lambda: (states(tokens=4096),) * 4, 0),
    # The score of each token, its row, and whether it is kept.
    "lagkv.select": (lambda: (states(), states(), mask()), 0.16),
    "lagkv.compress": (lambda: (states(), states(), 16 + 1022 * 32 + 240), 0),
    # Histograms of 1 KiB: four of each row, and one of each of its chunks, 256 at most; AdaKV has one
    # row for all heads of a sequence.
    "selection.top_k, many rows": (
        lambda: (numbers(256, TOKENS), TOKENS // 2, mask().view(256, TOKENS)),
        0.01,
    ),
    "selection.top_k, long rows": (lambda: (numbers(BATCH, 8 * TOKENS), 4 * TOKENS), 0.01),
    "cache.copy_kept": (lambda: (states(), states(), mask(), whole(BATCH * KV_HEADS * TOKENS), 2**24), 0),
    # A float32 logit for each query head and token.
    "expected_attention.score": (
        lambda: (states(), states(), numbers(BATCH, 32, 128), numbers(BATCH, 32, 128, 128), 0.02),
        0.6,
    ),
    # One partial sum of products for each of 1,024 query heads.
    "expected_attention.query_statistics": (lambda: (states(heads=32),), 0.1),
    "expected_attention.unrotated_statistics": (lambda: (states(heads=32), whole(TOKENS), 1e4), 0.1),
    # A float32 logit of the last query for each query head and token. Those of the samples go in waves of 64
    # MiB.
    "gvote.select": (lambda: (query(), states(), states(heads=32, tokens=8), 0.05), 0.6),
    "gvote.nucleus": (lambda: (numbers(256, TOKENS), 0.05), 0.02),
    "gvote.top_each": (lambda: (numbers(256, TOKENS), whole(256)), 0.02),
    # The partial outputs of a wave of queries, and what describes them.
    "attention.attend, decoding": (lambda: attended(BATCH, 1), 0.1),
    "attention.attend, a block of a prompt": (lambda: attended(1, 512, 32_768), 0.3),
    "attention.attend, a long block of a prompt": (lambda: attended(1, 32_768), 0.3),
    "paging.compact": (in_pages, 0),
    "knorm.score": (lambda: (states(),), 0),
    "kvzap.score": (
        lambda: (meta(BATCH, TOKENS, 4096), numbers(BATCH, KV_HEADS, 4096), numbers(BATCH, KV_HEADS)),
        0,
    ),
    "quest.bounds": (lambda: (query(), *[states(tokens=TOKENS // 16)] * 2), 0),
    "criticalkv.projected_norms": (
        lambda: (states(), meta(4096, 32, HEAD_DIM).permute(1, 2, 0)),
        0,
    ),
    # For each token numbers in float64, and the place of a similar one.
    "rkv.totals": (lambda: (states(), 0.5), 1),
    "cam.spread": (
        lambda: (states(), mask(), numbers(BATCH, KV_HEADS, TOKENS), *[whole(BATCH, KV_HEADS, TOKENS)] * 2),
        0.01,
    ),
    # The outputs of 128 rows of each KV head in 32 splits, and once more where they are weighed.
    "dropkv.sum_squares": (lambda: (states(heads=32, tokens=32), states(), states()), 1.1),
    "received_attention.measure_window": (lambda: (states(heads=32, tokens=32), states()), 0.02),
    "projections.project": (lambda: (states(), numbers(BATCH, 32, 128), numbers(BATCH, 32, 64)), 0),
    "streaming_llm.compress": (lambda: (states(), states(), 4, 4092), 0),
    # The logarithm of the normaliser of each query; for a window, in 64 splits.
    "received_attention.score": (lambda: (states(heads=32), states()), 0.6),
    "received_attention.score, of a window": (lambda: (states(heads=32, tokens=32), states()), 0.01),
    # And the keys of a text and of its replay, one behind the other.
    "received_attention.score_replay": (lambda: (states(), states(heads=32), states()), 1),
    "received_attention.score_chunks": (lambda: (states(heads=32), states(), 256), 0.6),
    "received_attention.attend_and_score": (lambda: (states(heads=32), states(), states()), 0.6),
    # 20 bytes for each token and KV head: the logits of four query heads, and the norm of the residual.
    "momentkv.step": (lambda: stepped(128, 1024), 0.05),
    "momentkv.score": (lambda: (query(), states(), states(), moments()), 0.65),
    "momentkv.attend": (lambda: (query(), states(), states(), mask(), moments()), 0.05),
    # Partial moments, of few splits.
    "momentkv_prompt.update": (lambda: (moments(), states(), states(), mask()), 0.1),
    # And the row of each token: 8 bytes.
    "momentkv_prompt.compress_prompt": (lambda: (states(), states(), mask(), moments(), 2**24), 0.4),
}


class Allocated(TorchDispatchMode):
    """Counts the bytes of the tensors that are made and still in use, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, given = func(*args, **(kwargs or {})), storages([args, kwargs])
        for address, storage in storages(result).items():
            if address not in given.keys() | self.known:
                self.known.add(address)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.freed, address, storage.nbytes())
        return result

    def freed(self, address: int, size: int) -> None:
        self.known.remove(address)
        self.now -= size


def storages(result: Any) -> dict[int, torch.UntypedStorage]:
    """The memory of the tensors of a result, by its address."""
    found = [leaf.untyped_storage() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return {storage._cdata: storage for storage in found}


def walk(name: str) -> tuple[float, Any]:
    """Call a launcher at its largest size; return the GiB that it took beside its result."""
    inputs, (stem, _, function) = LARGEST[name][0](), name.partition(",")[0].partition(".")
    with Allocated() as allocated:
        result = getattr(KERNELS[stem], function)(*inputs, **OPTIONS.get(name, {}))
        kept = sum(
            storage.nbytes() for address, storage in storages(result).items() if address in allocated.known
        )
        return (allocated.peak - kept) / GIB, result


@pytest.mark.parametrize("name", LARGEST)
def test_grids_and_memory_at_the_largest_documented_sizes(
    name: str, launched: list[tuple[str, tuple[int, ...]]]
) -> None:
    taken, _ = walk(name)
    assert launched
    for kernel, grid in launched:
        for size, limit in zip(grid, (2**31 - 1, 65_535, 65_535), strict=False):
            assert 0 < size <= limit, f"{kernel}: grid {grid}"
    assert taken <= LARGEST[name][1], f"{taken:.3f} GiB"


def test_the_memory_of_a_launcher_is_counted() -> None:
    with Allocated() as allocated:
        first = meta(2**20)
        view = first[:7]
        del first
        second = view.new_zeros(2**18, dtype=torch.uint8)
    assert allocated.now == allocated.peak == 2**21 + 2**18
    del view
    assert allocated.now == second.numel()


def test_every_kernel_is_walked(launched: list[tuple[str, tuple[int, ...]]]) -> None:
    for name in LARGEST:
        walk(name)
    assert {kernel for kernel, _ in launched} == launched_by_a_grid()


def test_no_kernel_function_has_more_than_25_arguments() -> None:
    counted = {
        f"{path.stem}.{node.name}": len(node.args.args)
        for path in sorted((ROOT / "optimized").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(one) for one in node.decorator_list)
    }
    assert counted and not {name: count for name, count in counted.items() if count > 25}


# Decoding
# -----------------------------------------------------------------------------------------------------------
#
# The model and the cache are put on torch's device `meta`, whose tensors have shapes and no numbers, and
# count as tensors of a GPU. So the code takes every branch that it takes on a GPU, and torch shows each of
# its operations, those of the model too. Two parts of the model are left out: the forwards get no attention
# mask, at which transformers itself looks, and torch's attention, one kernel on a GPU, gives zeros here.

PROMPT, BUDGET, STEPS = 1200, 600, 20
IDS = torch.randint(3, 259, (1, PROMPT + STEPS), generator=torch.Generator().manual_seed(4))


class Watch(TorchDispatchMode):
    """Counts the operations for which the host waits, and
    those that write `large` bytes or more into one tensor.
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
    """`copies`: how often, in all steps, K and V of a
    layer move to larger storage, which grows by an eighth.
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
        (look,) = model.base_model._forward_pre_hooks.values()
        with Watch(100):
            look(model.base_model, (token,), {**cache.argument, "attention_mask": mask})


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


CACHES = {
    "a block of 2,048 tokens behind 32K kept": (1, 32, 8, 2048, 8 * 32768, 2048),
    "a prompt of 16,384 tokens": (1, 32, 8, 16384, 8 * 1024, 16384),
    "a batch of 32 that decodes behind 128K": (32, 32, 8, 1, 32 * 8 * 131072, 512),
    "one token behind 32K": (1, 32, 8, 1, 8 * 32768, 0),
}


@pytest.mark.parametrize("size", CACHES)
def test_the_attention_of_the_largest_sizes_fits_a_gpu(
    launched: list[tuple[str, tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    """The limits of CUDA's grids, which Triton's interpreter
    does not know, and the memory beside the output.
    """
    batch, num_query_heads, num_kv_heads, num_queries, stored, length = CACHES[size]
    floats = Mock(side_effect=lambda like, *shape: meta(*shape))
    monkeypatch.setattr(KERNELS["attention"], "floats", floats)
    storage, recent = meta(stored, 128), meta(batch, num_kv_heads, length, 128)
    queries = meta(batch, num_query_heads, num_queries, 128)
    cache = CompressedCache(storage, storage, storage[:, 0], meta(batch, num_kv_heads).long())
    output, _ = KERNELS["attention"].attend(
        queries, cache, (recent, recent) if length else None, zero_moments(recent, recent)
    )
    assert output.shape == queries.shape
    largest = max(4 * math.prod(call.args[1:]) for call in floats.call_args_list)
    assert largest <= KERNELS["attention"].WORKSPACE
    assert all(len(grid) == 1 and grid[0] < 2**31 for _, grid in launched)
    chunks = [grid[0] for name, grid in launched if name == "attend_chunks"]
    # two for each multiprocessor, and no crowd of tiny ones
    assert all(264 <= programs <= 2**16 for programs in chunks)
