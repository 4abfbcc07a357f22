"""The time of the processor in a call of each kernel: `python -m benchmarks.host`, on any machine.

A GPU waits while the processor checks arguments, allocates and launches. So this is the least time that a
small call takes. It is measured for our arm of the rows of the GPU benchmark, and for a token in a cache, by
itself and captured. The launcher does nothing, and no more does a graph: what Triton does for a launch is
left out, and what a GPU does. NaN is not looked for, as on a GPU.
"""

import contextlib
import importlib
import json
import os
import pkgutil
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from benchmarks.contract_rows import CONTRACT_ROWS
from benchmarks.costs import read
from benchmarks.row import Place, Row
from benchmarks.rows import KERNEL_ROWS
from benchmarks.timing import RESULTS, provenance, show, turns, write_json
from evictionary.cache import captured_step, checks as cache_checks
from evictionary.cache.evicting_cache import EvictingCache
from evictionary.optimized import checks, kernels
from evictionary.progress import tracked

SMALL = Place(device="cpu", shrink=512)
"""The time does not depend on the sizes."""

LAYERS, TOKENS = 8, 25
"""Of the model whose cache is measured, and of a text after its prompt."""


def no_launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """In the place of `launching.launch`: a launch that does nothing."""
    return lambda *given, **named: None


@contextlib.contextmanager
def launching_nothing() -> Iterator[None]:
    """Kernels take tensors of the processor, and none of their launches does anything."""
    modules = (
        importlib.import_module(f"{kernels.__name__}.{module.name}")
        for module in pkgutil.iter_modules(kernels.__path__)
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, TRITON_INTERPRET="1"))
        stack.enter_context(patch.multiple(checks, is_finite=lambda value: True, _require_numbers=_unread))
        stack.enter_context(patch.object(cache_checks, "is_finite", lambda value: True))
        # What no kernel writes has to be a number: some functions go on with it as a place in a tensor.
        stack.enter_context(patch.multiple(torch, empty=torch.zeros, empty_like=torch.zeros_like))
        stack.enter_context(patch.object(torch.Tensor, "new_empty", torch.Tensor.new_zeros))
        for module in modules:
            if hasattr(module, "launch"):
                stack.enter_context(patch.object(module, "launch", no_launch))
        yield


def _unread(argument: Any, value: torch.Tensor) -> None:
    """In the place of what reads the numbers of a tensor on a processor."""


@torch.no_grad()
def of_row(row: Row, calls: int) -> dict[str, Any]:
    """The time of a call of a row's kernel."""
    work = row.build(SMALL)
    given, few = work.make(0), torch.zeros(8)
    with launching_nothing():
        ours, additions = apart(turns(lambda: work.arms["ours"](*given), lambda: few.add(1), calls))
    return {"row": row.id, "title": row.title} | told(min(ours), statistics.median(ours), additions)


def no_replay(
    call: Callable[[], torch.Tensor], device: torch.device
) -> tuple[Callable[[], None], torch.Tensor]:
    """In the place of `captured_step.record`: a graph that does nothing."""
    return lambda: None, call()


@contextlib.contextmanager
def replaying_nothing() -> Iterator[None]:
    """Steps are captured as on a GPU, and none of their graphs does anything."""
    stand_ins: dict[str, Any] = {
        "has_graphs": lambda device: True,
        "record": no_replay,
        "aside": lambda device: contextlib.nullcontext(),
        "never_waiting": contextlib.nullcontext,
    }
    with patch.multiple(captured_step, **stand_ins):
        yield


CACHES: dict[str, dict[str, Any]] = {
    "momentkv": {"budget": 32},
    "keydiff": {"compression_ratio": 0.5},
    "keydiff+ada_kv": {"compression_ratio": 0.5},
    "keydiff+moments": {"compression_ratio": 0.5},
}
"""What a token costs in them: a step in place, plain layers, ragged heads, and moments beside the rows."""


CAPTURED = ("momentkv",)
"""The caches whose captured step is measured."""
PROMPT = torch.arange(64)[None]


def small_model() -> LlamaForCausalLM:
    """A model whose arithmetic takes little time."""
    shape = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
    )  # fmt: skip
    return LlamaForCausalLM(shape).eval()


@torch.no_grad()
def of_captured(name: str, calls: int) -> dict[str, Any]:
    """The time of a captured step, for each layer: there is no other, since the model is not called."""
    model, few = small_model(), torch.zeros(8)
    with EvictingCache(model, name, **CACHES[name]) as cache:
        read(model, PROMPT, cache)
        with launching_nothing(), replaying_nothing():
            step = captured_step.captured_step(cache)
            ours, additions = apart(turns(lambda: step(PROMPT[:, :1]), lambda: few.add(1), calls))
    title = f"a token and layer of a captured step: {name}"
    own = [find(ours) / LAYERS for find in (min, statistics.median)]
    return {"row": f"captured {name}", "title": title} | told(*own, additions)


@torch.no_grad()
def of_cache(name: str, calls: int) -> dict[str, Any]:
    """The time that a layer of a cache adds to a token, beside that of DynamicCache."""
    model, few, pairs = small_model(), torch.zeros(8), list[tuple[float, float]]()
    while len(pairs) < calls:  # a cache that grows long would take time for its tokens
        with EvictingCache(model, name, **CACHES[name]) as cache:
            full = DynamicCache()
            for each in (cache, full):
                read(model, PROMPT, each)
            with launching_nothing():
                ours, others = (partial(read, model, PROMPT[:, :1], each) for each in (cache, full))
                pairs += turns(ours, others, min(calls, TOKENS))
    own, other = apart(pairs)
    _, additions = apart(turns(lambda: few.add(1), lambda: few.add(1), calls))
    added = [(find(own) - find(other)) / LAYERS for find in (min, statistics.median)]
    return {"row": f"cache {name}", "title": f"a token and layer of a cache: {name}"} | told(
        *added, additions
    )


def apart(pairs: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """The seconds of each of two calls."""
    return [own for own, _ in pairs], [other for _, other in pairs]


def told(least: float, median: float, additions: list[float]) -> dict[str, float]:
    """Two times in microseconds, and how many additions of eight numbers in torch take as long as the median,
    in the same run.
    """
    return {
        "least_us": 1e6 * least,
        "median_us": 1e6 * median,
        "additions": median / statistics.median(additions),
    }


def main(
    calls: Annotated[int, typer.Option(help="How often each kernel is called.")] = 500,
    run: Annotated[str, typer.Option(help="Store the times as this run: now, or before.")] = "now",
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where host.json goes.")] = RESULTS,
) -> None:
    """Measure the time of the processor in a call of each kernel."""
    if run not in ("now", "before"):
        raise typer.BadParameter(f"--run: got {run!r}, wanted now or before")
    torch.set_num_threads(1)
    rows = [*KERNEL_ROWS, *CONTRACT_ROWS]
    work = [partial(of_cache, name) for name in CACHES]
    work += [partial(of_captured, name) for name in CAPTURED] + [partial(of_row, row) for row in rows]
    found = list(tracked((measure(calls) for measure in work), len(work), "rows"))
    path = out / "host.json"
    stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    stored[run] = provenance("torch", "triton", "transformers") | {"calls": calls, "rows": found}
    write_json(path, stored)
    show("the processor's time in a call", found)


if __name__ == "__main__":
    typer.run(main)
