"""The teaching kernels: they are short enough to read, stand on a page, their functions launch them, and
they compile for a GPU.

The laws judge them in a run of their own: `make kernels`.
"""

import ast
import json
import tomllib

import pytest
from tools import ROOT
from tools.kernels import compiled

from docs_build.entries import definitions

STEMS = sorted(
    path.stem for path in (ROOT / "optimized" / "teaching").glob("*.py") if path.stem != "__init__"
)
# AdaKV is two calls of the kernel of `selection`.
WITHOUT_A_KERNEL = {"ada_kv"}
SHARED = {
    "attention_matching",
    "cake",
    "compactor",
    "h2o",
    "kvzip",
    "q_filters",
    "snapkv",
    "tova",
    "triattention",
}


def kernels(stem: str) -> dict[str, str]:
    """The source of each kernel function of a file, decorators and docstring included."""
    found = definitions(f"optimized/teaching/{stem}.py").values()
    return {one.name: one.source for one in found if one.source.startswith("@triton.jit")}


def test_each_file_is_of_a_method_and_stands_on_a_page() -> None:
    methods = {
        path.stem
        for path in (ROOT / "reference").glob("*.py")
        if "\nMETHOD = " in path.read_text(encoding="utf-8")
    }
    additions = {"cake", "cam", "chunk_kv"}
    assert set(STEMS) <= methods | additions | {"ada_kv", "paging", "selection"}
    tuned = {path.stem for path in (ROOT / "optimized" / "kernels").glob("*.py")}
    # These share tuned kernels; AdaKV calls that of the selection.
    assert set(STEMS) >= (methods & tuned) | {*SHARED, "ada_kv", "chunk_kv", "selection"}
    # The kernel to read of the others is all that a GPU needs, and each tuned kernel has a bound.
    told = tomllib.loads((ROOT / "docs" / "kernels.toml").read_text(encoding="utf-8"))
    assert (methods | additions) & set(STEMS) - tuned - SHARED == {"chunk_kv", "duo_attention"}
    assert set(told["kernels"]) == set(
        json.loads((ROOT / "docs" / "kernels.json").read_text(encoding="utf-8"))
    )
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
    assert [stem for stem in STEMS if f"<!-- code: optimized/teaching/{stem}.py -->" not in pages] == []


@pytest.mark.parametrize("stem", STEMS)
def test_the_kernels_of_a_file_are_short(stem: str) -> None:
    written = kernels(stem)
    assert bool(written) == (stem not in WITHOUT_A_KERNEL)
    lines = 0
    for source in written.values():
        function = ast.parse(source).body[0]
        assert isinstance(function, ast.FunctionDef) and len(function.args.args) <= 12
        # A long signature has a line for each argument, and is read at a glance.
        lines += len(source.splitlines()) - function.body[0].lineno + 1
    assert lines <= 60


@pytest.mark.slow
def test_the_functions_launch_every_kernel_and_none_spills_on_an_h100() -> None:
    """Compiled for sm_90 in a process without Triton's
    interpreter: no register of any kernel goes to memory.
    """
    found = compiled("-c", COMPILE, fused=True)
    assert [report for report in found if report["spills"] or report["stack"]] == []
    assert {report["kernel"] for report in found} == {
        name for stem in STEMS for name, source in kernels(stem).items() if "Grid:" in source
    }


COMPILE = """
import json
import torch
from evictionary.optimized.kernels import compiling
from evictionary.optimized.states import Moments, PagedCache
from evictionary.optimized.teaching import (
    attention_matching, cake, cam, compactor, criticalkv, dropkv, duo_attention, expected_attention, gvote,
    keydiff, knorm, kvzap, kvzip, lagkv, momentkv, paging, q_filters, quest, rkv, snapkv, streaming_llm,
    tova, triattention,
)


def made(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


keys, queries, query = made(2, 8, 4096, 128), made(2, 32, 4096, 128), made(2, 32, 128)
kept, sums = made(2, 8, 4096, dtype=torch.bool), made(2, 8, 128)
moments = Moments(made(2, 8, dtype=torch.int64), sums, sums, made(2, 8, 128, 128))


def launch():
    attention_matching.attend(queries, keys, keys, keys[..., 0])
    cake.preference(queries, keys)
    cam.spread(keys, kept, keys[..., 0])
    compactor.chunk_attention(queries.unflatten(1, (8, -1)), keys[:, :, None])
    criticalkv.score(queries, keys, keys, made(32, 128, 4096), budget=1024)
    dropkv.score(queries, keys, keys)
    duo_attention.select(keys, made(2, 8))
    expected_attention.score(keys, keys, *expected_attention.query_statistics(queries))
    gvote.select(query, keys, queries[:, :, :8])
    keydiff.score(keys)
    knorm.score(keys)
    kvzap.select(keys, keys[:, 0], made(2, 8, 128), made(2, 8))
    kvzip.score(keys, queries, keys)
    lagkv.select(keys, keys, keep_ratio=0.25)
    momentkv.score(query, keys, keys, momentkv.update(moments, keys, keys, kept))
    momentkv.attend(query, keys, keys, kept, moments)
    table, lengths = made(2, 256, dtype=torch.int64), made(2, 8, dtype=torch.int64)
    pool = made(512, 16, 8, 128)
    paging.compact_pages(PagedCache(pool, pool, pool[..., 0].long(), table, lengths, lengths[:, 0]), kept)
    q_filters.score(keys, query[:, :8])
    quest.bounds(query, keys, keys)
    rkv.score(queries, keys)
    snapkv.score(queries, keys)
    streaming_llm.score(keys)
    tova.score(queries, keys)
    triattention.score(keys, query, made(2, 32, 64))


for kernel, compile_now in compiling._intercepted(launch, "sm_90"):
    found = compiling.inspect(compiling.Configuration("teaching", launch), kernel, "sm_90", compile_now())
    print(json.dumps({"kernel": kernel, "spills": found["spills"], "stack": found["stack"]}))
"""
