"""Shared by all benchmarks: the order of the arms, the statistics of their times, and the rule for
claiming a ratio.
"""

import datetime
import itertools
import json
import math
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from evictionary.store import put

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"


class Spread(NamedTuple):
    """The 20 %, 50 % and 80 % quantiles of repeated measurements, and their number."""

    p20: float
    p50: float
    p80: float
    count: int


def spread(values: Sequence[float]) -> Spread:
    """The quantiles of `values`, linear between neighbours.
    Raises ValueError for an empty or non-finite list.
    """
    if not values or not np.isfinite(values).all():
        raise ValueError(f"values: got {list(values)}, wanted at least one finite number")
    return Spread(*np.quantile(values, (0.2, 0.5, 0.8)).tolist(), len(values))


class Ratio(NamedTuple):
    """The speed-up of the first of two arms: median over
    median; claimed only if their intervals do not overlap.
    """

    value: float
    claimed: bool


def ratio(ours: Spread, peer: Spread) -> Ratio:
    """`peer / ours` of the medians. It is claimed if the
    intervals p20 to p80 of the two have no number in common.
    """
    return Ratio(peer.p50 / ours.p50, peer.p20 > ours.p80 or peer.p80 < ours.p20)


def interleaved(
    arms: Mapping[str, Callable[[], Sequence[float]]], least: int, most: int, end: float
) -> dict[str, Spread]:
    """Measure the arms in the order A B C C B A: a drift of the clock in time falls on every arm alike.

    Args: arms, each a function that measures itself and returns seconds, one or several; `least` rounds of
    that order are made, and more until the time `end` (of `time.monotonic`), `most` in all. Returns the
    spread of every arm.
    """
    found: dict[str, list[float]] = {name: [] for name in arms}
    for done in range(most):
        if done >= least and time.monotonic() > end:
            break
        for name in [*arms, *reversed(arms)]:
            found[name].extend(arms[name]())
    return {name: spread(values) for name, values in found.items()}


def seconds(call: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call by the given clock."""
    start = clock()
    call()
    return clock() - start


def turns(call: Callable[[], Any], base: Callable[[], Any], rounds: int) -> list[tuple[float, float]]:
    """The seconds of two calls in rounds in which they take turns.

    Each is called once before its clock starts, since the other has just used the processor.
    """

    def timed(one: Callable[[], Any]) -> float:
        one()
        return seconds(one)

    return [(timed(call), timed(base)) for _ in range(rounds)]


def taking_turns(call: Callable[[], Any], base: Callable[[], Any], rounds: int) -> dict[str, float]:
    """The median seconds of a call, and its ratios to another one in rounds in which the two take turns."""
    times = turns(call, base, rounds)
    ratios = [own / other for own, other in times]
    return {
        "seconds": statistics.median(own for own, _ in times),
        "ratio": statistics.median(ratios),
        "ratio_lowest": min(ratios),
        "ratio_highest": max(ratios),
    }


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """The slope of log seconds over log size, by least squares: 1 for linear growth. Raises ValueError for
    fewer than two sizes.
    """
    if len(set(sizes)) < 2 or len(sizes) != len(seconds):
        raise ValueError(
            f"sizes: got {len(set(sizes))} different ones for {len(seconds)} times, wanted at least two, one "
            "each"
        )
    across, up = [math.log(size) for size in sizes], [math.log(second) for second in seconds]
    return statistics.linear_regression(across, up).slope


def bytes_of(cache: Any) -> int:
    """Bytes of the keys and values of a cache of transformers."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def versions(*packages: str) -> dict[str, str]:
    """The installed versions of packages, "not installed" where there is none."""
    found = dict.fromkeys(packages, "not installed")
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def output_of(*command: str) -> str:
    """The output of a command, stripped; an empty string if it does not exist or fails."""
    try:
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def processor() -> str:
    """The name of the processor, as the system gives it."""
    told = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.*)", told.read_text("utf-8"), re.M) if told.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def provenance(*packages: str) -> dict[str, Any]:
    """The origin of a result: date, commit (with "+" where files differ from it), versions, machine."""
    commit = output_of("git", "rev-parse", "--short=12", "HEAD")
    changed = output_of(
        "git",
        "status",
        "--porcelain",
        "--untracked-files=no",
        "--",
        "optimized",
        "reference",
        "benchmarks/*.py",
    )
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": (commit + ("+" if changed else "")) if commit else "unknown",
        "python": platform.python_version(),
        "versions": versions(*packages),
        "processor": processor(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Store a result, as a whole: a run that is killed
    keeps the one before. Make its folder if there is none.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    put(path, json.dumps(result, indent=1) + "\n")


def show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as a table, with a column for each name in them."""
    names = dict.fromkeys(itertools.chain.from_iterable(rows))
    table = Table(*(name.replace("_", " ") for name in names), title=title, title_justify="left")
    for row in rows:
        table.add_row(
            *(
                f"{row[name]:.4g}" if isinstance(row.get(name), float) else str(row.get(name, ""))
                for name in names
            )
        )
    Console().print(table)
