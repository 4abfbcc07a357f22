"""The attention that keys receive, in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/kernels/test_received_attention.py`.

Sizes at which the two passes cut their work, beside the torch path in float64. `test_kernels.py` asks what it asks of all kernels.
"""

from __future__ import annotations

import importlib
import os

import pytest
import torch

from evictionary.optimized import h2o, knorm, momentkv, selection, snapkv, streaming_llm, tova
from evictionary.optimized.cache import compress

pytest.importorskip("triton")
assert os.environ.get("TRITON_INTERPRET") == "1", "run with TRITON_INTERPRET=1: Triton chooses its interpreter when it is imported"

KERNELS = importlib.import_module("evictionary.optimized.kernels.received_attention")


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float32).to(dtype)


def assert_near(got: torch.Tensor, wanted: torch.Tensor, bound: float = 4e-6) -> None:
    assert got.shape == wanted.shape and got.dtype == torch.float32
    finite = wanted.isfinite()
    assert torch.equal(got[~finite].double(), wanted[~finite])
    assert (got.double() - wanted)[finite].abs().amax() <= bound * wanted[finite].abs().amax()


@pytest.mark.parametrize(("group", "count"), [(1, 1), (3, 7), (2, 30)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_all_splits_blocks_and_rows(group: int, count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that sees nothing of a split, a split of its own for the last token, rows that fill no block, a prompt of one tile."""
    monkeypatch.setattr(KERNELS, "LEAST_TOKENS_OF_A_SPLIT", 32)
    for length in (count, count + 40):
        queries, keys = drawn(1, 2 * group, count, 24, dtype=dtype), drawn(1, 2, length, 24, dtype=dtype)
        values = drawn(1, 2, length, 40, dtype=dtype)
        exact = h2o.attend_and_score(queries.double(), keys.double(), values.double())
        assert_near(h2o.score(queries, keys), h2o.score(queries.double(), keys.double()))
        output, score = h2o.attend_and_score(queries, keys, values)
        assert_near(score, exact[1])
        assert output.dtype == dtype
        assert_near(output.float(), exact[0], {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 2e-2}[dtype])


def test_the_other_methods_read_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, keys, values = drawn(1, 4, 40, 16), drawn(1, 2, 90, 16), drawn(1, 2, 90, 16)
    wide = queries.double(), keys.double()
    wanted = [snapkv.score(*wide), tova.score(*wide), momentkv.score_prompt(*wide, values.double())]
    calls: list[int] = []
    monkeypatch.setattr(KERNELS, "score", lambda *states, kernel=KERNELS.score: calls.append(states[0].shape[2]) or kernel(*states))
    for got, exact in zip([snapkv.score(queries, keys), tova.score(queries, keys)], wanted, strict=False):
        assert_near(got, exact)
    assert_near(momentkv.score_prompt(queries, keys, values), wanted[2])
    assert calls == [32, 1, 40]


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1000.0])
def test_logits_of_any_size(scale: float) -> None:
    """Attention that is flat, and attention that is all on one token: no sum underflows, and none overflows."""
    queries, keys = drawn(1, 2, 33, 16) * scale, drawn(1, 1, 60, 16)
    assert_near(h2o.score(queries, keys), h2o.score(queries.double(), keys.double()), 4e-6 * max(1.0, scale))


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_norms_of_any_size(scale: float) -> None:
    keys = drawn(2, 3, 70, 20) * scale
    keys[0, 0, 3] = 0
    assert_near(knorm.score(keys), knorm.score(keys.double()), 2e-7)


@pytest.mark.parametrize("sink_size", [4, 200])
@pytest.mark.parametrize("budget", [0, 3, 77, 150, 400])
def test_ends_are_what_score_and_top_k_keep(sink_size: int, budget: int) -> None:
    keys, values = drawn(1, 2, 150, 20, dtype=torch.bfloat16), drawn(1, 2, 150, 8, dtype=torch.bfloat16)
    wanted = compress(keys, values, selection.top_k(streaming_llm.score(keys, sink_size=sink_size), budget))
    for some in ((keys, values), (keys.double(), values.double())):
        got = streaming_llm.compress(*some, budget=budget, sink_size=sink_size)
        assert all(torch.equal(mine.to(other.dtype), other) for mine, other in zip(got, wanted, strict=True))
        assert got.keys.dtype == some[0].dtype


def test_no_program_and_no_memory_beyond_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a million tokens in 32 sequences: a grid of one axis below 2^31, and of temporary memory a few numbers for each row."""
    sizes: list[int] = []
    monkeypatch.setattr(KERNELS, "floats", lambda like, *shape: torch.empty(*shape, device="meta"))
    monkeypatch.setattr(KERNELS, "on_tensor_cores", lambda states: True)  # there is no card to ask

    class Recorded:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            assert len(grid) == 1 and 0 < grid[0] < 2**31
            return lambda *arguments, **constants: sizes.extend(x.nbytes for x in arguments if isinstance(x, torch.Tensor))

    for name in ("sum_rows", "sum_columns", "merge_splits"):
        monkeypatch.setattr(KERNELS, name, Recorded())
    for count in (1, 64, 2**20):
        queries = torch.empty(32, 32, count, 128, device="meta", dtype=torch.float16)
        keys = torch.empty(32, 8, 2**20, 128, device="meta", dtype=torch.float16)
        sizes.clear()
        KERNELS.score(queries, keys)
        largest = max(size for size in sizes if size not in (queries.nbytes, keys.nbytes))
        assert largest <= max(4 * 32 * 32 * count, 4 * 32 * 8 * 2**20)
