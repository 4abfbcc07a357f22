"""The kernels in Triton's interpreter, beside the laws:
`TRITON_INTERPRET=1 pytest tests/kernels/test_kernels.py`.

The laws judge the kernels through `optimized` in a run with TRITON_INTERPRET=1. Here stands what no law asks:
that the entries launch their kernels, sizes beyond a tile, any layout in memory, offsets beyond 2^31, NaN as
on a GPU, the same bits in two runs and alone as in a batch, and the functions that the reference lacks. The
oracle is the same entry in float64: it takes the torch path.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest.mock import MagicMock, Mock, patch

import numpy as np
import pytest
import torch
from conftest import tiny_llama
from tools.kernels import KERNELS, assert_close, launched_by_a_grid
from tools.reading import positions_of, read_in
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map
from triton.runtime import interpreter

from evictionary import EvictingCache, optimized
from evictionary.optimized import (
    attention,
    attention_matching,
    cache,
    cake,
    cam,
    compactor,
    criticalkv,
    dropkv,
    expected_attention as ea,
    flash,
    gvote,
    h2o,
    keydiff,
    knorm,
    kvzap,
    kvzip,
    lagkv,
    momentkv as mk,
    paging,
    q_filters,
    quest,
    rkv,
    selection,
    snapkv,
    streaming_llm,
    tova,
    triattention,
)
from evictionary.optimized.states import CompressedCache, Moments, PagedCache
from evictionary.reference.contract import arguments, contracts
from evictionary.spec_tests.judge.implementation import load
from evictionary.spec_tests.judge.misfits import fitting

assert os.environ.get("TRITON_INTERPRET") == "1", (
    "run with TRITON_INTERPRET=1: Triton chooses its interpreter when it is imported"
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LAG = {"keep_ratio": 0.3, "sink_size": 3, "lag_size": 16}

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "tokens before heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every second channel": lambda x: torch.stack([x, torch.full_like(x, 77)], dim=-1).flatten(-2)[..., ::2],
}


class States(NamedTuple):
    """Keys [B, H_kv, T, D], values [.., D_v] and queries [B, H_q, M, D] of a dtype; a mask; statistics and
    moments in float32.
    """

    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor
    kept: torch.Tensor
    mean: torch.Tensor
    covariance: torch.Tensor
    evicted: torch.Tensor
    key_sum: torch.Tensor
    value_sum: torch.Tensor
    value_key_sum: torch.Tensor

    @property
    def query(self) -> torch.Tensor:
        return self.queries[:, :, 0]

    @property
    def moments(self) -> Moments:
        return Moments(*self[6:])

    def copied(self, layout: str = "contiguous") -> States:
        return States(*(LAYOUTS[layout](x.clone()) for x in self[:3]), *(x.clone() for x in self[3:]))

    def exact(self) -> States:
        return States(*(x.double() if x.is_floating_point() else x.clone() for x in self))


def drawn(shape: tuple[int, ...] = (2, 2, 2, 3, 41, 24, 40), dtype: torch.dtype = torch.float32) -> States:
    """Normal states of B, H_kv, G, M, T, D and D_v; the first head keeps no token, and nothing has been
    evicted from it.
    """
    batch, heads, group, count, length, head_dim, value_dim = shape
    torch.manual_seed(0)
    keys, values = (torch.randn(batch, heads, length, size).to(dtype) for size in (head_dim, value_dim))
    queries = torch.randn(batch, heads * group, count, head_dim).to(dtype)
    kept, gone = torch.rand(batch, heads, length) < 0.4, torch.rand(batch, heads, 90) < 0.7
    kept[0, 0] = gone[0, 0] = False
    mean, root = (torch.randn(batch, heads * group, *[head_dim] * axes) for axes in (1, 2))
    old_keys, old_values = (
        torch.randn(batch, heads, 90, size) * gone[..., None] for size in (head_dim, value_dim)
    )
    moments = gone.sum(dim=-1), old_keys.sum(dim=2), old_values.sum(dim=2), old_values.mT @ old_keys
    return States(keys, values, queries, kept, mean, root @ root.mT / head_dim, *moments)


def one_head(s: States) -> CompressedCache:
    """The first head as a compressed cache that shares its memory, whatever its strides."""
    length = s.keys.shape[2]
    return CompressedCache(s.keys[0, 0], s.values[0, 0], torch.arange(length), torch.tensor([[length]]))


def top_k(s: States) -> torch.Tensor:
    return selection.top_k(s.keys[..., 0], (s.keys.shape[2] + int(s.kept.sum(dim=-1).amax())) // 2, s.kept)


def ragged(s: States) -> Any:
    return attention.attend(s.queries, cache.compress(s.keys, s.values, s.kept))


def in_pages(s: States) -> PagedCache:
    """The states as pools, each sequence a page; the last
    sequence holds half of its tokens, none if there is one.
    """
    keys, values = (states.transpose(1, 2) for states in (s.keys, s.values))
    batch, length, heads, _ = keys.shape
    lengths = torch.full((batch, heads), length)
    lengths[-1, -1] //= 2
    positions = torch.arange(length)[None, :, None].repeat(batch, 1, heads)
    return PagedCache(
        keys, values, positions, torch.arange(batch, dtype=torch.int32)[:, None], lengths, lengths[:, 0]
    )


def unrotated(s: States) -> Any:
    return ea.unrotated_statistics(s.keys[..., : s.keys.shape[-1] // 2 * 2], torch.tensor([1000]))


def turned(s: States) -> torch.Tensor:
    """TriAttention, of whose channels two are a pair: of an odd number the last one is left out."""
    keys, query = (states[..., : states.shape[-1] // 2 * 2] for states in (s.keys, s.query))
    return triattention.score(keys, query, query[..., ::2].abs())


def projection(s: States) -> torch.Tensor:
    """W_o of two query heads for each KV head, to 37 numbers."""
    shape = 2 * s.values.shape[1], s.values.shape[3], 37
    return (torch.arange(math.prod(shape)) % 17 - 8).view(shape).to(s.queries)


def last_queries(s: States) -> torch.Tensor:
    """The queries of the last tokens, at least of two and no more than there are tokens."""
    return torch.cat([s.queries, s.queries], dim=2)[:, :, : s.keys.shape[2]]


def several_splits(states: torch.Tensor) -> torch.Tensor:
    """The tokens over again, until they are more than a split."""
    return states.repeat(1, 1, 2 + 64 // states.shape[2], 1)


def step(s: States) -> tuple[torch.Tensor, ...]:
    length = s.keys.shape[2]
    positions = torch.arange(length).flip(0).repeat(*s.keys.shape[:2], 1)
    output = mk.step(
        s.query, *(s.keys[:, :, 0] / 2, s.values[:, :, 0] / 2), s.keys, s.values, positions, s.moments, length
    )
    return output, s.keys, s.values, positions, *s.moments


CALLS: dict[str, tuple[Callable[[States], Any], str]] = {
    "keydiff.score": (lambda s: keydiff.score(s.keys), "sum_unit_keys score_keys"),
    "keydiff.anchor_sum": (lambda s: keydiff.anchor_sum(s.keys), "sum_unit_keys"),
    "keydiff.score_with_anchor": (
        lambda s: keydiff.score_with_anchor(s.keys, s.moments.key_sum),
        "score_keys",
    ),
    "keydiff.update_anchor": (
        lambda s: keydiff.update_anchor(s.moments.key_sum, s.keys, s.keys[:, :, :5]),
        "sum_unit_keys",
    ),
    "lagkv.score": (
        lambda s: lagkv.score(s.keys, s.values, s.keys[:, :, -9:], s.values[:, :, -9:]),
        "score_partitions",
    ),
    "lagkv.select": (lambda s: lagkv.select(s.keys, s.values, **LAG), "score_partitions keep_whole"),
    "lagkv.compress": (lambda s: lagkv.compress(s.keys, s.values, **LAG), "compress_partitions"),
    "selection.top_k": (top_k, "keep_whole"),
    "cache.compress": (lambda s: cache.compress(s.keys, s.values, s.kept), "copy_rows"),
    "attention.attend": (
        lambda s: attention.attend(s.queries[:1, :2], one_head(s)),
        "attend_chunks merge_chunks",
    ),
    "attention.attend, ragged": (ragged, "copy_rows attend_chunks merge_chunks"),
    "attention.attend, pages": (
        lambda s: paging.attend_pages(s.queries, in_pages(s)),
        "attend_chunks merge_chunks",
    ),
    "attention_matching.attend": (
        lambda s: attention_matching.attend(s.queries, s.keys, s.values, s.keys[..., 0]),
        "attend_chunks merge_chunks",
    ),
    "paging.compact_in_place": (lambda s: paging.compact_in_place(in_pages(s), s.kept), "compact_heads"),
    "gvote.select": (
        lambda s: gvote.select(s.query, s.keys, s.queries, p=0.9),
        "multiply count_nuclei keep_whole",
    ),
    "gvote.nucleus": (lambda s: gvote.nucleus(s.keys[..., 0].relu(), 0.7), "count_nuclei keep_whole"),
    "gvote.top_each": (lambda s: gvote.top_each(s.keys[..., 0], s.kept.sum(dim=-1)), "keep_whole"),
    "ea.query_statistics": (lambda s: ea.query_statistics(s.keys), "sum_products"),
    "ea.unrotated_statistics": (unrotated, "sum_products"),
    "ea.score": (
        lambda s: ea.score(s.keys, s.values, s.mean, s.covariance),
        "split_covariances expected_logits weigh_values",
    ),
    "momentkv.update": (lambda s: mk.update(s.moments, s.keys, s.values, s.kept), "sum_evicted"),
    "momentkv.compress_prompt": (lambda s: mk.compress_prompt(s.keys, s.values, s.kept), "sum_evicted"),
    "momentkv.score": (lambda s: mk.score(s.query, s.keys, s.values, s.moments), "walk_cache finish_scores"),
    "momentkv.attend": (
        lambda s: mk.attend(s.query, s.keys, s.values, s.kept, s.moments),
        "attend_chunks merge_chunks",
    ),
    "momentkv.step": (step, "walk_cache find_lowest evict write_new"),
    "h2o.score": (lambda s: h2o.score(last_queries(s), s.keys), "sum_rows sum_columns"),
    "h2o.attend_and_score": (
        lambda s: h2o.attend_and_score(last_queries(s), s.keys, s.values),
        "sum_rows sum_columns",
    ),
    "snapkv.score": (lambda s: snapkv.score(last_queries(s), s.keys, window_size=2), "sum_rows sum_columns"),
    "tova.score": (
        lambda s: tova.score(s.queries, several_splits(s.keys)),
        "sum_rows merge_splits sum_columns",
    ),
    "compactor.group_attention": (
        lambda s: compactor.group_attention(s.keys.repeat(1, 2, 1, 1) / 4, s.keys, chunk_size=8),
        "sum_rows sum_columns",
    ),
    "cake.preference": (
        lambda s: cake.preference(last_queries(s), s.keys, window_size=2),
        "sum_rows measure_columns",
    ),
    "dropkv.score": (
        lambda s: dropkv.score(last_queries(s) * 2, s.keys, s.values, window_size=2),
        "walk_rows sum_changes",
    ),
    "criticalkv.projected_norms": (
        lambda s: criticalkv.projected_norms(s.values, projection(s)),
        "sum_projections",
    ),
    "rkv.redundancy": (
        lambda s: rkv.redundancy(s.keys, threshold=0.3),
        "sum_unit_keys score_keys find_latest",
    ),
    "cam.spread": (
        lambda s: cam.spread(s.values, s.kept, s.keys[..., 0].sigmoid(), merge_size=5),
        "receive",
    ),
    "kvzap.score": (
        lambda s: kvzap.score(s.keys[:, 0], s.keys[:, -1, :3], s.keys[:, 0, :3, 0]),
        "project_states",
    ),
    "quest.bounds": (lambda s: quest.bounds(s.query, *quest.page_bounds(s.keys, page_size=3)), "bound_pages"),
    "knorm.score": (lambda s: knorm.score(s.keys), "score_norms"),
    "q_filters.score": (lambda s: q_filters.score(s.keys, s.query[:, : s.keys.shape[1]]), "project_keys"),
    "triattention.score": (turned, "project_keys"),
    "streaming_llm.compress": (lambda s: streaming_llm.compress(s.keys, s.values, budget=9), "copy_ends"),
}
# These products round a factor to float16, or their output to the dtype of the cache.
ROUNDED = (
    "attention.attend",
    "attention_matching.attend",
    "h2o.attend",
    "momentkv.score",
    "momentkv.attend",
    "momentkv.step",
    "cam.spread",
    "ea.query",
    "ea.unrotated",
)
same_bits = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that the interpreter runs, in their order."""
    names: list[str] = []
    run = interpreter.GridExecutor.__call__

    def recorded(executor: Any, *arguments: Any, **options: Any) -> Any:
        names.append(executor.fn.__name__)
        return run(executor, *arguments, **options)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", recorded)
    return names


@pytest.fixture(autouse=True)
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits of few tokens, so that 200 of them make several."""
    for module in KERNELS.values():
        monkeypatch.setattr(module, "LEAST_TOKENS_OF_A_SPLIT", 64, raising=False)


CHUNKED = {"count_byte", "keep_chunks"}


@pytest.mark.parametrize("name", CALLS)
def test_an_entry_launches_its_kernels(name: str, launched: list[str]) -> None:
    call, kernels = CALLS[name]
    call(drawn())
    assert set(launched) == set(kernels.split())
    launched.clear()
    call(drawn().exact())  # float64 takes the torch path
    assert not launched


def test_long_rows_go_in_chunks(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KERNELS["selection"], "LONGEST_SHORT_ROW", 0)
    states = drawn((1, 1, 2, 2, 300, 16, 16))
    assert_close(top_k(states), top_k(states.exact()), 0)
    assert set(launched) == CHUNKED


def test_every_kernel_is_launched_by_an_entry() -> None:
    assert {*" ".join(kernels for _, kernels in CALLS.values()).split(), *CHUNKED} == launched_by_a_grid()


ONE, ODD, PADDED, LONG_ROW, WIDE = SHAPES = (
    (1, 1, 1, 1, 1, 2, 1),
    (1, 2, 3, 5, 65, 5, 3),
    (2, 2, 4, 1, 31, 24, 80),
    (1, 1, 2, 2, 200, 16, 16),
    (1, 1, 1, 2, 20, 256, 256),
)
SIZES = [
    *((torch.float32, shape) for shape in SHAPES),
    (torch.float16, PADDED),
    (torch.float16, LONG_ROW),
    (torch.bfloat16, ODD),
    (torch.bfloat16, WIDE),
]


@pytest.fixture
def one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two factors give the same product whichever stands first, as in compiled code.

    The received attention computes each logit twice, as query times key and as key times query. The BLAS of
    some processors adds up the two in different orders: a logit of 76 then differs by seven roundings, and
    each weight with it.
    """

    def dot(builder: Any, one: Any, other: Any, sum_before: Any, *precision: Any) -> Any:
        del builder, precision
        product = np.matmul(one.data, other.data, dtype=np.float64).astype(sum_before.data.dtype)
        return interpreter.TensorHandle(product + sum_before.data, sum_before.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


@pytest.mark.usefixtures("one_order")
@pytest.mark.parametrize(("dtype", "shape"), SIZES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_sizes_around_and_beyond_a_tile(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    states, rounded = drawn(shape, dtype), name.startswith(ROUNDED)
    bounds = {
        torch.float32: 4e-6,
        torch.float16: 4e-3 if rounded else 4e-6,
        torch.bfloat16: 1e-2 if rounded else 3e-5,
    }
    assert_close(CALLS[name][0](states.copied()), CALLS[name][0](states.exact()), bounds[dtype])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CALLS)
def test_a_second_run_gives_the_same_bits_in_any_layout(name: str, layout: str) -> None:
    same_bits(CALLS[name][0](drawn().copied(layout)), CALLS[name][0](drawn()))


# The splits of MomentKV and of the statistics follow the batch; compressed caches have no axis for it.
ALONE = (
    "keydiff.score",
    "lagkv.score",
    "lagkv.select",
    "selection.top_k",
    "gvote.select",
    "ea.score",
    "h2o.score",
    "tova.score",
    "cake.preference",
    "dropkv.score",
    "criticalkv.projected_norms",
    "rkv.redundancy",
    "kvzap.score",
    "quest.bounds",
)


@pytest.mark.parametrize("name", ALONE)
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(name: str) -> None:
    states = drawn()
    same_bits(CALLS[name][0](States(*(x[-1:] for x in states))), CALLS[name][0](states)[-1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "path",
    [
        each
        for each in sorted(contracts().keys() & load("optimized").functions())
        if {one.lead for one in arguments(each)} == {"..."}
    ],
)
def test_any_leading_axes_fit_where_the_contract_says_so(path: str, dtype: torch.dtype) -> None:
    function, named = load("optimized").function(path), {each.name for each in arguments(path)}

    def random(ones: Any) -> Any:
        torch.manual_seed(1)
        if isinstance(ones, np.ndarray):
            return torch.rand(ones.shape, dtype=dtype) if ones.dtype.kind == "f" else torch.as_tensor(ones)
        return ones

    def changed(given: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
        return {name: tree_map(change, value) if name in named else value for name, value in given.items()}

    given = tree_map(random, fitting(path))
    whole = function(**given)
    for cut in (lambda x: x[0], lambda x: x[0, 1], lambda x: x[None]):
        assert_close(function(**changed(given, cut)), tree_map(cut, whole), 1e-5)


FAR = torch.empty(2**32 + 2**21, dtype=torch.float16)  # of which only the pages that are written take memory


@pytest.mark.parametrize(
    "strides", [(0, 2**31 + 64, 40, 1), (0, 0, 2**32 + 1024, 1)], ids=["heads apart", "tokens apart"]
)
@pytest.mark.parametrize("name", CALLS)
def test_offsets_beyond_32_bits(name: str, strides: tuple[int, ...]) -> None:
    """Heads or tokens lie 2^31 elements and more apart, where 32-bit offsets would wrap."""
    near = drawn((1, 2, 1, 2, 32, 16, 16) if strides[1] else (1, 1, 2, 2, 2, 16, 16), torch.float16)
    apart = {
        name: torch.as_strided(FAR, each.shape, strides, place).copy_(each)
        for name, (each, place) in {"keys": (near.keys, 0), "values": (near.values, 2**20)}.items()
    }
    same_bits(CALLS[name][0](near.copied()._replace(**apart)), CALLS[name][0](near))


def test_scores_of_all_kinds_select_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """All equal, few values with both zeros and infinities, protected or not, in both schedules, with
    every kind of budget.
    """
    few = torch.tensor([-torch.inf, -1.0, -0.0, 0.0, 1.0, torch.inf])
    for schedule, length in itertools.product((KERNELS["selection"].LONGEST_SHORT_ROW, 0), (1, 5000)):
        monkeypatch.setattr(KERNELS["selection"], "LONGEST_SHORT_ROW", schedule)
        protected = torch.rand(2, length) < 0.1
        for scores in (few[torch.randint(6, (2, length))], torch.zeros(2, length)):
            for budget in {0, 1, length // 3, length - 1, length, length + 4}:
                shield = protected if protected.sum(dim=-1).max() <= budget else None
                assert torch.equal(
                    selection.top_k(scores, budget, shield), selection.top_k(scores.double(), budget, shield)
                )


# The last is the first that registers do not hold.
@pytest.mark.parametrize("length", [1, 15, 16, 17, 16_384, 16_385])
def test_keys_that_share_leading_bytes_select_alike(length: int, launched: list[str]) -> None:
    """Rows of numbers that share their first 0 to 4 bytes, of both signs, with equals among them, protected
    or not, in both schedules.
    """
    unknown = 2 ** torch.tensor([32, 24, 16, 8, 0])[:, None]
    bits = 0x3F5A3C7E // unknown * unknown + torch.randint(0x7F800000, (5, length)) % unknown
    bits[:, ::3] = bits[:, :1].clone()
    scores = bits.to(torch.int32).view(torch.float32)
    counts = torch.tensor([length // 2, length - 1, (length + 1) // 3, length, 0], dtype=torch.int32)
    for rows, order in ((scores, counts), (-scores, counts.flip(0))):
        for kept, row, count in zip(KERNELS["selection"].keep_each(rows, order), rows, order, strict=True):
            assert torch.equal(kept, selection.top_k(row.double(), int(count)))
    shield = torch.rand(5, length) < 0.1
    budget = int(shield.sum(dim=-1).max()) + length // 3
    assert torch.equal(
        selection.top_k(scores, budget, shield), selection.top_k(scores.double(), budget, shield)
    )
    assert set(launched) == (CHUNKED if length > 16_384 else {"keep_whole"})


@pytest.mark.parametrize("longest", [2**14, 0])
def test_of_too_many_protected_tokens_the_first_are_kept(
    longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where nobody counts them before the launch."""
    monkeypatch.setattr(KERNELS["selection"], "LONGEST_SHORT_ROW", longest)
    scores, shield = torch.randn(3, 40), torch.rand(3, 40) < 0.5
    shield[0] = True
    kept = KERNELS["selection"].top_k(scores, 5, shield)
    assert torch.equal(kept, shield & (shield.cumsum(dim=-1) <= 5))


@pytest.mark.parametrize("longest", [2**14, 0])
@pytest.mark.parametrize("length", [1, 65, 5000])
def test_votes_of_all_kinds_are_counted_alike(
    length: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights in 64ths, of which every sum is exact: ties,
    zeros, no mass, several tiles; then votes among few scores.
    """
    monkeypatch.setattr(KERNELS["selection"], "LONGEST_SHORT_ROW", longest)
    weights = torch.randint(0, 5, (3, length)) / 64
    weights[1], weights[2] = weights[1, 0], 0
    for p in (0, 1e-9, 0.25, 0.5, 1.0):
        assert torch.equal(gvote.nucleus(weights, p), gvote.nucleus(weights.double(), p))
    budgets = torch.tensor([0, length // 3, length + 4])
    scores = torch.tensor([-1.5, -0.0, 0.0, 2.0])[torch.randint(4, (3, length))]
    assert torch.equal(gvote.top_each(scores, budgets), gvote.top_each(scores.double(), budgets))


def test_samples_go_in_waves_that_fit_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {(32, 2**12): (16, 8, 8), (1, 2**17): (1, 4, 8), (1, 2**20): (1, 1, 4)}
    for (batch, length), wave in sizes.items():
        assert KERNELS["gvote"]._waves(batch, 8, 8, bytes_each=16 * length) == wave
    states = drawn((2, 2, 2, 3, 41, 16, 16))
    whole = CALLS["gvote.select"][0](states)
    for samples in (0, 2, 3, 9):  # what fits: samples, heads, sequences
        monkeypatch.setattr(KERNELS["gvote"], "WORKSPACE", samples * 4 * 2 * 41)
        assert torch.equal(CALLS["gvote.select"][0](states), whole)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_covariances_beyond_float16(scale: float) -> None:
    """Statistics beyond the range of the keys' dtype, and values whose squares leave float32."""
    states = drawn(dtype=torch.float16)
    mean, covariance = states.mean * scale**0.5, states.covariance * scale
    keys = (states.keys * scale**-0.5).half()
    for values in (states.values, states.values.float() * 1e-30, states.values.float() * 1e25):
        got = ea.score(keys.to(values.dtype), values, mean, covariance, epsilon=0)
        exact = ea.score(keys.double(), values.double(), mean.double(), covariance.double(), epsilon=0)
        assert ((got.double() - exact).abs() <= 4e-6 * exact).all()


@pytest.mark.parametrize("theta", [100.0, 10000.0, 500000.0])
def test_queries_are_turned_back_from_near_and_far(theta: float) -> None:
    """Of an angle, position 200,000 may miss 2^-33 turns as often."""
    queries = drawn((1, 2, 1, 1, 70, 80, 1)).keys
    queries[..., 1] += 100  # a mean of a hundred deviations, which cancels nothing
    far = torch.randint(0, 200_000, (1, 2, 70)), torch.tensor([131_071])
    for positions, bound in ((torch.arange(70), 2e-5), *((each, 2e-3) for each in far)):
        exact = ea.unrotated_statistics(queries.double(), positions, theta)
        assert_close(ea.unrotated_statistics(queries, positions, theta), exact, bound)


def test_carried_angles_do_not_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seventy-five tiles in one split: each carries the angles
    of the one before it, and the sixty-fifth begins anew.
    """
    monkeypatch.setattr(KERNELS["expected_attention_statistics"], "LEAST_TOKENS_OF_A_SPLIT", 1200)
    queries = drawn((1, 1, 1, 1, 1200, 16, 1)).keys
    for positions in (torch.arange(5000, 6200), torch.cat([torch.arange(600), torch.arange(9000, 9600)])):
        exact = ea.unrotated_statistics(queries.double(), positions)
        assert_close(ea.unrotated_statistics(queries, positions), exact, 2e-5)


def test_a_kept_anchor_does_not_drift() -> None:
    """60 steps of block prompt processing, a third of the keys
    alike: the sum that was kept scores as one taken afresh.
    """
    kept_keys, common = torch.randn(1, 2, 96, 64), torch.randn(64)
    anchor = keydiff.anchor_sum(kept_keys)
    for _ in range(60):
        new, slots = torch.randn(1, 2, 8, 64), torch.randperm(96)[:8]
        new[:, :, ::3] += 3 * common
        anchor = keydiff.update_anchor(anchor, new, kept_keys[:, :, slots])
        kept_keys[:, :, slots] = new
    assert_close(anchor, keydiff.anchor_sum(kept_keys.double()), 2e-6)
    assert_close(keydiff.score_with_anchor(kept_keys, anchor), keydiff.score(kept_keys.double()), 2e-6)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("length", [1, 40, 200])
def test_of_equal_tokens_the_latest_goes(dtype: torch.dtype, length: int) -> None:
    """In a tile, in a split or beside the cache. Halves, and a
    power of two of evicted tokens: no order of addition matters.
    """
    keys, values = (torch.randn(1, 2, 1, 24).round().to(dtype).repeat(1, 1, length, 1) / 2 for _ in range(2))
    positions = torch.stack([torch.randperm(length), torch.randperm(length) + 5]).view(1, 2, length)
    gone = torch.randn(2, 1, 2, 64, 24).round().to(dtype)
    moments = mk.update(mk.no_moments(keys, values), *gone, torch.ones(1, 2, 64, dtype=torch.bool))
    before, new = positions.clone(), (keys[:, :, 0].clone(), values[:, :, 0].clone())
    # The new token is later than those of the first head, and earlier than most of the second.
    position = torch.tensor([[length, 2]])
    mk.step(torch.randn(1, 4, 24).round().to(dtype), *new, keys, values, positions, moments, position)
    assert torch.equal(positions[0, 0], before[0, 0])
    assert torch.equal(positions[0, 1], torch.where(before[0, 1] == length + 4, 2, before[0, 1]))


@pytest.mark.parametrize("place", [0, 40, 70])
def test_an_evicted_token_may_have_held_all_of_the_attention(place: int) -> None:
    """A token of value 0 scores 0 and goes; what rounding left of its weight must not be the output."""
    states = drawn((1, 1, 3, 1, 71, 16, 40))
    states.queries[..., 0], states.keys[0, 0, place], states.values[0, 0, place] = 4, 0, 0
    states.keys[0, 0, place, 0] = 20

    def stepped(s: States) -> torch.Tensor:
        new, slots = zip(*((x[:, :, 70], x[:, :, :70].clone()) for x in (s.keys, s.values)), strict=True)
        return mk.step(s.query, *new, *slots, torch.arange(70).view(1, 1, 70), mk.no_moments(*slots), 70)

    assert_close(stepped(states), stepped(states.exact()), 1e-5)


@np.errstate(invalid="ignore")
@pytest.mark.filterwarnings("ignore:All-NaN")
def test_nan_stays_where_it_is_and_no_address_follows_from_it() -> None:
    """On a GPU nobody looks for NaN beforehand. The launchers get it here as they would get it there."""
    s = drawn((1, 3, 2, 2, 41, 16, 16))
    s.keys[0, 1, 7, 3] = torch.nan
    assert KERNELS["keydiff"].score_with_anchor(s.keys, torch.ones(1, 3, 16)).isnan().nonzero().tolist() == [
        [0, 1, 7]
    ]
    scores = KERNELS["expected_attention"].score(s.keys, s.values, s.mean, s.covariance, 0.02)
    assert scores[0, 1].isnan().all() and scores[0, ::2].isfinite().all()
    positions = (
        KERNELS["lagkv"].compress(s.keys, s.values, 29, sink_size=3, lag_size=16, kept_each=4).positions
    )
    assert positions.view(3, 29).diff().gt(0).all() and positions.ge(0).all() and positions.lt(41).all()
    rows = torch.randn(3, 41)
    rows[0, 3], rows[1] = torch.nan, torch.nan
    assert KERNELS["selection"].top_k(rows, 7).sum(dim=-1).tolist() == [7, 7, 7]
    assert KERNELS["gvote"].top_each(rows, torch.tensor([41, 7, 1])).sum(dim=-1).tolist() == [41, 7, 1]
    assert KERNELS["gvote"].nucleus(rows, 0.5).any(dim=-1).all()
    assert KERNELS["gvote"].select(s.query, s.keys, s.queries, 0.1).any(dim=-1).all()
    changes = KERNELS["dropkv"].sum_squares(s.queries, s.keys, s.values)
    for found in (changes, KERNELS["rkv"].totals(s.keys, 0.3)):
        assert found[0, 1].isnan().any() and found[0, ::2].isfinite().all()
    positions, position, new = torch.arange(41).repeat(1, 3, 1), torch.full((1, 3), 41), torch.ones(1, 3, 16)
    output = KERNELS["momentkv"].step(s.query, new, new, s.keys, s.values, positions, s.moments, position)
    assert positions.ge(0).all() and positions.le(41).all()
    assert output[0, 2:4].isnan().any() and output[0, :2].isfinite().all() and output[0, 4:].isfinite().all()


MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "momentkv": (
        "momentkv",
        {"budget": 16},
        "sum_evicted walk_cache find_lowest evict write_new attend_chunks merge_chunks",
    ),
    "momentkv, growing": (
        "momentkv",
        {"compression_ratio": 0.5},
        "walk_cache find_lowest evict write_new attend_chunks merge_chunks",
    ),
    "ragged": ("knorm+ada_kv", {"compression_ratio": 0.5}, "copy_rows attend_chunks merge_chunks"),
    "ragged, moments": (
        "knorm+ada_kv+moments",
        {"compression_ratio": 0.5},
        "sum_evicted attend_chunks merge_chunks",
    ),
    "biased": ("attention_matching", {"budget": 12}, "attend_chunks merge_chunks"),
    "keydiff": ("keydiff", {"budget": 12, "every": 4}, "sum_unit_keys score_keys copy_rows"),
    "lagkv": (
        "lagkv",
        {"compression_ratio": 0.5, "every": 1, "options": {"sink_size": 2, "lag_size": 4}},
        "compress_partitions",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_decodes_with_the_kernels_as_with_torch(
    name: str, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    method, settings, kernels = MODELS[name]
    model = tiny_llama()

    def decoded() -> tuple[torch.Tensor, list[list[list[int]]]]:
        with EvictingCache(model, method, **settings) as evicting:
            return read_in(model, evicting, [30, *[1] * 6, 3, 1]), [*map(positions_of, evicting.layers)]

    logits, positions = decoded()
    assert set(kernels.split()) <= set(launched)
    launched.clear()
    monkeypatch.setattr(optimized.kernels, "take", lambda *_, **__: False)
    wanted, wanted_positions = decoded()
    assert not launched and positions == wanted_positions
    assert_close(logits, wanted.double(), 1e-4)


@pytest.mark.parametrize("length", [1, 5])
def test_logits_far_below_zero_overflow_nothing(length: int) -> None:
    """Beside the tokens of a row stand zeros, whose exponentials above such a peak are infinite."""
    query, keys = torch.full((1, 1, 2), -1.0), torch.full((1, 1, length, 2), 300.0)
    assert gvote.select(query, keys, torch.ones(1, 1, 2, 2), p=0.9).any()


# The attention that keys receive, at sizes at which the two passes cut their work.

RECEIVED = KERNELS["received_attention"]


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float32).to(
        dtype
    )


def assert_near(got: torch.Tensor, wanted: torch.Tensor, bound: float = 4e-6) -> None:
    assert got.dtype == torch.float32
    assert_close(got, wanted, bound)


@pytest.mark.parametrize("beyond", [0, 40])
@pytest.mark.parametrize(("group", "count"), [(1, 1), (3, 7), (2, 30)])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 4e-6), (torch.float16, 4e-3), (torch.bfloat16, 2e-2)], ids=str
)
def test_all_splits_blocks_and_rows(
    group: int, count: int, beyond: int, dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that sees nothing of a split, a split of its own for the last token, rows that fill no block,
    a prompt of one tile.
    """
    monkeypatch.setattr(RECEIVED, "LEAST_TOKENS_OF_A_SPLIT", 32)
    shapes = (1, 2 * group, count, 24), (1, 2, count + beyond, 24), (1, 2, count + beyond, 40)
    queries, keys, values = (normal(*shape, dtype=dtype) for shape in shapes)
    exact = h2o.attend_and_score(queries.double(), keys.double(), values.double())
    output, score = h2o.attend_and_score(queries, keys, values)
    assert_near(score, exact[1])
    assert_near(h2o.score(queries, keys), h2o.score(queries.double(), keys.double()))
    replay = keys, queries, keys[:, :, beyond:]
    assert_near(kvzip.score(*replay), kvzip.score(*(states.double() for states in replay)))
    assert output.dtype == dtype
    assert_close(output, exact[0], bound)


@pytest.mark.parametrize("shape", [(1, 2, 3, 37, 24), (2, 2, 1, 70, 64), (1, 1, 4, 1, 8)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 4e-6), (torch.float16, 4e-3), (torch.bfloat16, 2e-2)], ids=str
)
def test_the_normalisers_of_flash_attention_give_the_scores(
    dtype: torch.dtype, bound: float, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's FlashAttention gives the output and the logarithms, and one pass of ours the scores."""
    batch, heads, group, length, channels = shape
    sizes = (batch, group * heads, length, channels), *[(batch, heads, length, channels)] * 2
    queries, keys, values = (normal(*size, dtype=dtype) for size in sizes)
    exact = h2o.attend_and_score(queries.double(), keys.double(), values.double())
    monkeypatch.setattr(RECEIVED, "_sum_rows", Mock(side_effect=AssertionError("the rows are summed again")))
    output, score = h2o.attend_and_score(queries, keys, values)
    assert output.dtype == dtype
    assert_close(output, exact[0], bound)
    assert_near(score, exact[1], bound)


@contextlib.contextmanager
def on_a_card_of(capability: tuple[int, int]) -> Iterator[None]:
    """A torch with kernels for a GPU, which has this capability."""
    card = patch.object(torch.cuda, "get_device_capability", return_value=capability)
    with card, patch.object(flash, "has_kernel", return_value=True):
        yield


def test_flash_attention_on_a_gpu_takes_the_arguments_that_it_is_given() -> None:
    """Shapes and dtypes of its GPU operator, without a GPU. It takes no part of a text and no wide heads."""
    with FakeTensorMode(), on_a_card_of((9, 0)):

        def states(heads: int, length: int = 40, dtype: torch.dtype = torch.bfloat16, channels: int = 64):
            return torch.empty(2, heads, length, channels, dtype=dtype, device="cuda")

        assert flash.serves(states(8), states(2), states(2))
        output, logarithms = flash.attend(states(8), states(2), states(2))
        assert output.shape == (2, 8, 40, 64) and output.dtype == torch.bfloat16
        assert logarithms.shape == (2, 8, 40) and logarithms.dtype == torch.float32
        assert not flash.serves(states(8, 3), states(2), states(2))
        assert not flash.serves(states(8, channels=320), states(2, channels=320), states(2, channels=320))
        assert not flash.serves(states(8, channels=20), states(2, channels=20), states(2, channels=20))
        assert not flash.serves(states(8), states(2), states(2, channels=32))
        full = [states(heads, dtype=torch.float32) for heads in (8, 2, 2)]
        assert not flash.serves(*full)


def test_an_older_gpu_has_no_flash_attention() -> None:
    with FakeTensorMode():
        states = torch.empty(1, 2, 40, 64, dtype=torch.float16, device="cuda")
        with on_a_card_of((8, 0)):
            assert flash.serves(states, states, states)
        with on_a_card_of((7, 5)):
            assert not flash.serves(states, states, states)
        assert flash.has_kernel() == torch.cuda.is_available()


def test_the_other_methods_read_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    states = normal(1, 4, 40, 16), normal(1, 2, 90, 16), normal(1, 2, 90, 16)
    launcher = Mock(wraps=RECEIVED.score)
    monkeypatch.setattr(RECEIVED, "score", launcher)
    for score, count in ((snapkv.score, 2), (tova.score, 2), (mk.score_prompt, 3)):
        assert_near(score(*states[:count]), score(*(each.double() for each in states[:count])))
    assert [call.args[0].shape[2] for call in launcher.call_args_list] == [32, 1, 40]


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1000.0])
def test_logits_of_any_size(scale: float) -> None:
    """Attention that is flat, and attention that is all
    on one token: no sum underflows, and none overflows.
    """
    queries, keys = normal(1, 2, 33, 16) * scale, normal(1, 1, 60, 16)
    assert_near(h2o.score(queries, keys), h2o.score(queries.double(), keys.double()), 4e-6 * max(1.0, scale))


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_norms_of_any_size(scale: float) -> None:
    keys = normal(2, 3, 70, 20) * scale
    keys[0, 0, 3] = 0
    assert_near(knorm.score(keys), knorm.score(keys.double()), 2e-7)
    ends = normal(2, 6, 20), normal(2, 6, 10).abs()
    assert_near(triattention.score(keys, *ends), triattention.score(keys.double(), *ends), 4e-6)


@pytest.mark.parametrize("sink_size", [4, 200])
@pytest.mark.parametrize("budget", [0, 3, 77, 150, 400])
def test_ends_are_what_score_and_top_k_keep(sink_size: int, budget: int) -> None:
    keys, values = normal(1, 2, 150, 20, dtype=torch.bfloat16), normal(1, 2, 150, 8, dtype=torch.bfloat16)
    scores = streaming_llm.score(keys, sink_size=sink_size)
    wanted = cache.compress(keys, values, selection.top_k(scores, budget))
    for dtype in (torch.bfloat16, torch.float64):
        got = streaming_llm.compress(keys.to(dtype), values.to(dtype), budget=budget, sink_size=sink_size)
        assert got.keys.dtype == dtype
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, check_dtype=False)


def test_no_program_and_no_memory_beyond_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a million tokens in 32 sequences: a grid of one axis below 2^31, and of temporary memory a few
    numbers for each row.
    """
    kernel, meta = MagicMock(), functools.partial(torch.empty, device="meta")
    monkeypatch.setattr(RECEIVED, "floats", lambda like, *shape: meta(shape))
    monkeypatch.setattr(RECEIVED, "on_tensor_cores", lambda states: True)  # there is no card to ask
    for name in ("sum_rows", "sum_columns", "merge_splits"):
        monkeypatch.setattr(RECEIVED, name, kernel)
    keys = meta(32, 8, 2**20, 128, dtype=torch.float16)
    for count in (1, 64, 2**20):
        queries = meta(32, 32, count, 128, dtype=torch.float16)
        RECEIVED.score(queries, keys)
        given = [each for call in kernel.__getitem__().call_args_list for each in call.args]
        sizes = {each.nbytes for each in given if isinstance(each, torch.Tensor)}
        assert max(sizes - {queries.nbytes, keys.nbytes}) <= max(4 * 32 * 32 * count, 4 * 32 * 8 * 2**20)
        kernel.__getitem__().reset_mock()
    grids = [call.args[0] for call in kernel.__getitem__.call_args_list if call.args]
    assert grids and all(len(grid) == 1 and 0 < grid[0] < 2**31 for grid in grids)
