"""The attention that keys receive, in Triton's interpreter: `TRITON_INTERPRET=1 pytest
tests/kernels/test_received_attention.py`.

Sizes at which the two passes cut their work, beside the torch path in float64. `test_kernels.py` asks what it
asks of all kernels.
"""

import functools
import os

import pytest
import torch
from tools import kernels
from tools.kernels import assert_close

from evictionary.optimized import h2o, knorm, momentkv, selection, snapkv, streaming_llm, tova
from evictionary.optimized.cache import compress

pytest.importorskip("triton")
assert os.environ.get("TRITON_INTERPRET") == "1", (
    "run with TRITON_INTERPRET=1: Triton chooses its interpreter when it is imported"
)

KERNELS = kernels.KERNELS["received_attention"]


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
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
    monkeypatch.setattr(KERNELS, "LEAST_TOKENS_OF_A_SPLIT", 32)
    shapes = (1, 2 * group, count, 24), (1, 2, count + beyond, 24), (1, 2, count + beyond, 40)
    queries, keys, values = (drawn(*shape, dtype=dtype) for shape in shapes)
    exact = h2o.attend_and_score(queries.double(), keys.double(), values.double())
    output, score = h2o.attend_and_score(queries, keys, values)
    assert_near(score, exact[1])
    assert_near(h2o.score(queries, keys), h2o.score(queries.double(), keys.double()))
    assert output.dtype == dtype
    assert_close(output, exact[0], bound)


def test_the_other_methods_read_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    states = drawn(1, 4, 40, 16), drawn(1, 2, 90, 16), drawn(1, 2, 90, 16)
    calls, own = [], KERNELS.score
    monkeypatch.setattr(KERNELS, "score", lambda *given: calls.append(given[0].shape[2]) or own(*given))
    for score, count in ((snapkv.score, 2), (tova.score, 2), (momentkv.score_prompt, 3)):
        assert_near(score(*states[:count]), score(*(each.double() for each in states[:count])))
    assert calls == [32, 1, 40]


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1000.0])
def test_logits_of_any_size(scale: float) -> None:
    """Attention that is flat, and attention that is all on one token: no sum underflows, and none
    overflows.
    """
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
    for dtype in (torch.bfloat16, torch.float64):
        got = streaming_llm.compress(keys.to(dtype), values.to(dtype), budget=budget, sink_size=sink_size)
        assert got.keys.dtype == dtype
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, check_dtype=False)


def test_no_program_and_no_memory_beyond_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a million tokens in 32 sequences: a grid of one axis below 2^31, and of temporary memory a few
    numbers for each row.
    """
    sizes: list[int] = []

    class Recorded:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            assert len(grid) == 1 and 0 < grid[0] < 2**31
            return lambda *arguments, **constants: sizes.extend(
                x.nbytes for x in arguments if isinstance(x, torch.Tensor)
            )

    meta = functools.partial(torch.empty, device="meta")
    monkeypatch.setattr(KERNELS, "floats", lambda like, *shape: meta(shape))
    monkeypatch.setattr(KERNELS, "on_tensor_cores", lambda states: True)  # there is no card to ask
    for name in ("sum_rows", "sum_columns", "merge_splits"):
        monkeypatch.setattr(KERNELS, name, Recorded())
    for count in (1, 64, 2**20):
        queries, keys = (
            meta(32, 32, count, 128, dtype=torch.float16),
            meta(32, 8, 2**20, 128, dtype=torch.float16),
        )
        sizes.clear()
        KERNELS.score(queries, keys)
        assert max(size for size in sizes if size not in (queries.nbytes, keys.nbytes)) <= max(
            4 * 32 * 32 * count, 4 * 32 * 8 * 2**20
        )
