"""Times the reference at a size that a lesson uses: `python -m benchmarks.reference`.

Every method over 4,096 tokens, 8 KV heads of 128 dimensions, one query head each, in float64 on one core. The
goal is one second; H2O reads all queries, so it is quadratic by definition.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import functools
import importlib
import inspect
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import track

from benchmarks.timing import RESULTS, seconds, show, write_json
from evictionary.reference import momentkv
from evictionary.spec_tests.judge.implementation import STEMS

TOKENS, HEADS, HEAD_DIM = 4096, 8, 128


def workloads() -> dict[str, Callable[[], Any]]:
    """One call for each method, on the same tensors."""
    generator = np.random.default_rng(0)
    keys, values = generator.normal(size=(2, 1, HEADS, TOKENS, HEAD_DIM))
    queries = generator.normal(size=(1, HEADS, TOKENS, HEAD_DIM))
    factor = generator.normal(size=(1, HEADS, HEAD_DIM, HEAD_DIM)) / HEAD_DIM
    moments = momentkv.update(
        momentkv.no_moments(keys, values), keys, values, np.arange(TOKENS) % 2 == np.zeros((1, HEADS, 1))
    )
    given: dict[str, Any] = {
        "keys": keys,
        "values": values,
        "query": queries[:, :, -1],
        "queries": queries,
        "query_mean": queries.mean(axis=2),
        "query_covariance": factor @ factor.swapaxes(-1, -2),
        "sampled_queries": queries[:, :, :8],
        "moments": moments,
        "budget": TOKENS // 2,
        "keep_ratio": 0.5,
        "lag_size": 128,
    }
    # The queries that a method reads, if it does not read all.
    latest = {"snapkv": 32, "tova": 1}
    found = {}
    for stem in STEMS:
        module = importlib.import_module(f"evictionary.reference.{stem}")
        if hasattr(module, "METHOD"):
            seam = getattr(module, "select", None) or module.score
            read = {
                each.name: given[each.name]
                for each in inspect.signature(seam).parameters.values()
                if each.default is each.empty or each.name == "lag_size"
            }
            if stem in latest:
                read["queries"] = queries[:, :, -latest[stem] :]
            found[f"{stem}.{seam.__name__}"] = functools.partial(seam, **read)
    return found


def measured(call: Callable[[], Any], runs: int) -> dict[str, float]:
    """Processor seconds of the runs, after one uncounted run."""
    call()
    found = [seconds(call, time.process_time) for _ in range(runs)]
    return {"median": statistics.median(found), "least": min(found), "most": max(found)}


def main(
    runs: Annotated[int, typer.Option(help="Counted runs of each method.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Time every method of the reference."""
    calls = track(workloads().items(), description="methods", console=Console(stderr=True))
    timed = {name: measured(call, runs) for name, call in calls}
    result = {
        "tokens": TOKENS,
        "heads": HEADS,
        "head_dim": HEAD_DIM,
        "runs": runs,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "seconds": timed,
    }
    write_json(RESULTS / "reference.json", result)
    if as_json:
        print(json.dumps(result, indent=1))
        return
    show(
        f"{TOKENS} tokens x {HEADS} heads x {HEAD_DIM}, processor seconds",
        [
            {"method": name, **{part: f"{value:.3f}" for part, value in one.items()}}
            for name, one in timed.items()
        ],
    )


if __name__ == "__main__":
    typer.run(main)
