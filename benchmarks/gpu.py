"""The kernels on a GPU: `python -m benchmarks.gpu --out FOLDER [--rows 1,2b] [--minutes 9]`; it limits itself to nine minutes.

First the laws judge `optimized`, which hands its tensors to the kernels, on the GPU in bfloat16, float16 and float32: a method that
breaks a law, or whose laws do not finish, is listed and not timed. There is no option to leave the laws out. Then the run measures
the ceilings of this GPU, then every row of `rows` and `decoder`, side by side with its peers. A row that still runs a minute after
its time is broken off; if this does not help, the run ends itself and prints where it stopped. A second call at the same commit,
on the same GPU, goes on where the first one stopped: laws that held and rows that were measured are not run again.

How a row is measured. Inputs are random, in several sets: two sets of large inputs; of small inputs at least twenty sets, which
together are five times the L2 cache. Triton's `do_bench_cudagraph` captures many calls, which take the sets in turn, in one CUDA
graph and times ten replays of it. An arm that waits for the GPU cannot be captured: `do_bench` times its calls one by one, and the
result says so. The arms take turns, A B C C B A, three times at least. Before that every output is compared with the float64
mathematics, and its memory is filled with NaN first.

A ratio is claimed only if the intervals from the 20 % to the 80 % quantile do not overlap. `floor` is the larger of two times: the
least bytes over the best measured bandwidth, and the least multiplications over the measured rate of a matrix product; the reached
share of the floor is `floor / median`. The goals in time are for an H200: on another GPU, rows that move much data keep the share
of the floor that the goal is there. Results are written after every row, so a run that is killed keeps what it had.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import importlib.util
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.utils._pytree import tree_leaves

from benchmarks.decoder import MODEL_ROWS
from benchmarks.row import NoKernel, Place, Row, Work
from benchmarks.rows import KERNEL_ROWS
from benchmarks.timing import ROOT, interleaved, output_of, provenance, ratio, seconds, show, spread, write_json
from evictionary.spec_tests.judge.law import judging_files

SCHEMA = "evictionary/benchmark-gpu/1"
ROWS = [*KERNEL_ROWS, *MODEL_ROWS]
MINUTES = 9.0  # of the whole run
RESERVE = 30.0  # seconds of them, in which a row is broken off and the results are written
SHARE_OF_LAWS = 0.55  # of the rest, at most
SECONDS_OF_A_ROW = 20.0  # at least, if the machine has that many: torch.compile takes about ten of them
GRACE = 60.0  # seconds that a row may take longer
H200 = {"copy_bytes_per_s": 4.3e12, "read_bytes_per_s": 4.3e12, "matmul_flops_per_s": 790e12}  # for which the goals are written
DTYPES = ("bfloat16", "float16", "float32")
ROTATED_BYTES = 300 * 10**6  # five times the L2 cache of an H200
REPLAY = 5  # milliseconds of a graph: shorter replays would measure the launch of the graph
ROUNDS = (3, 10)
GOOD = ("right", "not compared")
PACKAGES = ("torch", "triton", "kvpress", "flashinfer-python", "flash-attn")
NEEDED = ("pytest", "hypothesis")  # the laws are judged with them
NOTHING_TO_JUDGE = 5  # what pytest returns for a file none of whose laws is about these functions


# Laws ----------------------------------------------------------------------------------------------------------------------------


def judge(
    stems: list[str], *, device: str, seconds: float, dtypes: Iterable[str] = DTYPES, passed: set[str] | None = None
) -> dict[str, str]:
    """Judge the laws of stems on `optimized` in parallel: an empty string for a stem that passes all of them.

    passed: the files of laws, each with its dtype, that have passed already; they are not run again, and those that pass join them.
    """
    end = time.monotonic() + seconds
    passed = set() if passed is None else passed
    # The stems that compile most come first, so that none of them runs alone at the end.
    jobs = [(stem, file, dtype) for stem in sorted(stems, key=heaviest) for file in law_files(stem) for dtype in dtypes]

    def one(job: tuple[str, str, str]) -> str | None:
        _, file, dtype = job
        if f"{file} {dtype}" in passed:
            return ""
        why = broken_law(file, dtype, device, end)
        if why == "":
            passed.add(f"{file} {dtype}")
        return why

    # A process for each file, not for each processor: most of the time is compiling kernels, and the next process reuses them.
    with ThreadPoolExecutor(max(1, min(14, (os.cpu_count() or 2) - 2))) as pool:
        found = dict(zip(jobs, pool.map(one, jobs), strict=True))
    verdicts = {}
    for stem in stems:
        told = [why for (own, _, _), why in found.items() if own == stem and why is not None]
        verdicts[stem] = "; ".join(filter(None, told)) if told else "no law judges it"
    return verdicts


def broken_law(file: str, dtype: str, device: str, end: float) -> str | None:
    """What is wrong with `optimized` by the laws of a file: nothing if all hold, None if none of them judges it."""
    left = end - time.monotonic()
    if left <= 0:
        return f"{dtype}: no time was left for its laws"
    options = ["-q", "-x", "-p", "no:cacheprovider", "--profile", "student", "--device", device, "--dtype", dtype]
    command = [sys.executable, "-m", "pytest", file, "--impl", "optimized", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=left, check=False)
    except subprocess.TimeoutExpired:
        return f"{dtype}: its laws did not finish in {left:.0f} s"
    if done.returncode in (0, NOTHING_TO_JUDGE):
        return "" if done.returncode == 0 else None
    printed = (done.stdout + done.stderr).splitlines()
    telling = ("does not hold", "what is wrong", "raised in", "smallest input")
    found = [" ".join(line.split()) for line in printed if any(words in line for words in telling)] or printed[-3:]
    return f"{dtype}: {'; '.join(found)[:1000]}"


def heaviest(stem: str) -> int:
    """Order of the stems: the stems with the longest kernels first."""
    kernels = (ROOT / "optimized" / "kernels").glob(f"{stem}*.py")
    return -sum(path.stat().st_size for path in kernels)


def law_files(stem: str) -> list[str]:
    """The files with laws for implementations of a stem; laws about the papers alone judge nothing here."""
    files = judging_files(ROOT / "spec_tests")
    return [str(path.relative_to(ROOT)) for path in files if path.stem == f"test_{stem}" or path.stem.startswith(f"test_{stem}_")]


# Time ----------------------------------------------------------------------------------------------------------------------------


def prepare(
    call: Callable[..., Any], inputs: list[tuple[Any, ...]], place: Place, waits: bool
) -> tuple[Callable[[], list[float]], str]:
    """Return a function that gives the seconds of some calls, which take the sets of inputs in turn, and how it measures them.

    On a CPU it times one call, to test the machinery without a GPU; its figures are not for publication.
    """
    turn = itertools.cycle(inputs)

    def run() -> Any:
        return call(*next(turn))

    if not place.is_gpu:
        return lambda: [seconds(run)], "clock of the processor"
    from triton.testing import do_bench, do_bench_cudagraph

    how = "events, waits for the GPU"
    if not waits:
        try:
            do_bench_cudagraph(run, rep=1)
            return lambda: [ms / 1e3 for ms in do_bench_cudagraph(run, rep=REPLAY, return_mode="all")], "graph"
        except TimeoutError:
            raise
        except Exception as error:  # a call that cannot be captured can still be timed
            how = f"events, not captured: {type(error).__name__}"
    return lambda: [ms / 1e3 for ms in do_bench(run, warmup=1, rep=4 * REPLAY, return_mode="all")], how


def poison(place: Place) -> None:
    """Fill memory of the GPU with NaN before it is allocated again, so that an output which is not written shows."""
    for size in (2**29, 2**24, 2**20) if place.is_gpu else ():
        torch.full((size,), math.nan, device=place.device)


def cost(call: Callable[..., Any], inputs: tuple[Any, ...], place: Place) -> dict[str, int | None]:
    """Activities on the GPU (kernels, copies, fills), and the rise of allocated memory during a call, its result included."""
    found: dict[str, int | None] = {"launches": None, "memory_bytes": None}
    if place.is_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call(*inputs)
        torch.cuda.synchronize()
        found["memory_bytes"] = torch.cuda.max_memory_allocated() - before
        with contextlib.suppress(Exception):  # without a profiler the number is unknown, the time is not
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                call(*inputs)
                torch.cuda.synchronize()
            found["launches"] = sum(each.device_type == torch.autograd.DeviceType.CUDA for each in profile.events()) or None
    return found


def clean(place: Place) -> None:
    """Give the memory of a row back."""
    if place.is_gpu:
        gc.collect()
        torch.cuda.empty_cache()


def ceilings(place: Place) -> dict[str, float]:
    """Bytes a second of a copy and of a read, and operations a second of a matrix product: the medians."""
    from benchmarks.ceilings import works

    found = {name: size / spread(prepare(call, [()], place, waits=False)[0]()).p50 for name, (call, size) in works().items()}
    clean(place)
    return found


# Rows ----------------------------------------------------------------------------------------------------------------------------


def floor_of(work: Work, found: dict[str, float]) -> float:
    """The least seconds: the larger of bytes at the better measured bandwidth and multiplications at the measured rate."""
    memory = max(found["copy_bytes_per_s"], found["read_bytes_per_s"])
    return max(work.bytes / memory, work.flops / found["matmul_flops_per_s"]) / work.units.get("ours", 1)


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in code that takes longer, and again every half minute, as soon as Python or a called program can."""

    def late(number: int, frame: Any) -> None:
        raise TimeoutError(f"not done after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), 30)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_row(row: Row, place: Place, found: dict[str, float], seconds: float, *, grace: float = GRACE) -> dict[str, Any]:
    """Check and time one row. The result reports any failure under `status`; only "measured" means success.

    After `seconds` no further peer is begun; `grace` seconds later the running peer, or the whole row, is broken off.
    """
    result: dict[str, Any] = {"id": row.id, "title": row.title, "goal_ratio": row.goal_ratio, "arms": {}}
    try:
        with at_most(seconds + grace):
            _run_row(row, place, found, seconds, result)
    except NoKernel as error:
        result["status"] = f"no kernel yet: {error}"
    except Exception as error:
        result["status"] = failed(error)
    clean(place)
    return result


def failed(error: Exception) -> str:
    return f"failed: {type(error).__name__}: {str(error)[:300]}"


def _run_row(row: Row, place: Place, found: dict[str, float], seconds: float, result: dict[str, Any]) -> None:
    end = time.monotonic() + seconds
    work = row.build(place)
    floor = floor_of(work, found)
    # The goal of a small input is a number of launches, which take the same time on any GPU.
    goal = row.goal_s if row.latency or row.goal_s is None else row.goal_s * floor / floor_of(work, H200)
    result |= {"bytes": work.bytes, "flops": work.flops, "floor_s": floor, "goal_s": goal, "missing": work.missing}
    result["latency"] = row.latency
    arms: dict[str, dict[str, Any]] = result["arms"]
    want = work.want and work.want(work.make(0))
    for name in work.arms:
        if name != "ours" and time.monotonic() > end:
            work.missing[name] = "no time was left"
            continue
        arms[name] = check_arm(work, name, want, place)
        if name == "ours" and arms[name]["status"] not in GOOD:
            result["status"] = f"not timed, ours is {arms[name]['status']}"
            return
    tensors = [each for each in tree_leaves(work.make(0)) if isinstance(each, torch.Tensor)]
    least = math.ceil(ROTATED_BYTES / max(1, sum(each.nbytes for each in tensors))) if place.is_gpu else 1
    count = work.copies or max(least, (20 if row.latency else 2) if place.is_gpu else 1)
    inputs = [work.make(seed) for seed in range(count)]
    result |= {"copies": count, "shapes": [list(each.shape) for each in tensors]}
    measures = {}
    for name, arm in arms.items():
        try:
            if arm["status"] in GOOD:
                measure, how = prepare(work.arms[name], inputs, place, name in work.waits)
                arm |= cost(work.arms[name], inputs[0], place) | {"how": how}
                measure()
                measures[name] = each_piece(measure, work.units.get(name, 1))
        except Exception as error:
            if name == "ours":
                raise
            arm["status"] = failed(error)  # a peer out of memory, say
    timed = interleaved(measures, *ROUNDS, end)
    for name, times in timed.items():
        arms[name] |= {"seconds": times._asdict(), "status": "measured"}
    ours = timed.pop("ours")
    result["ratios"] = {name: ratio(ours, times)._asdict() for name, times in timed.items()}
    result["share_of_floor"] = floor / ours.p50
    result["status"] = "measured"


def each_piece(measure: Callable[[], list[float]], units: int) -> Callable[[], list[float]]:
    """`measure`, whose calls make so many pieces, in seconds for a piece."""
    return lambda: [each / units for each in measure()]


def check_arm(work: Work, name: str, want: Any, place: Place) -> dict[str, Any]:
    """Call an arm once, on memory full of NaN, and compare its output with the reference."""
    read = work.reads.get(name, work.read)
    try:
        pristine, inputs = work.make(0), work.make(0)  # an arm may change its inputs
        poison(place)
        output = work.arms[name](*inputs)
        if want is None or read is None:
            return {"status": "not compared"}
        distance = work.apart(read(pristine, output), want)
    except Exception as error:
        return {"status": failed(error)}
    # A peer with larger rounding is still a peer; its error stands beside its time.
    wrong = not distance <= (work.limit if name == "ours" else 0.2)
    shown = distance if math.isfinite(distance) else None
    return {"status": f"wrong: error {distance:.2g}, wanted at most {work.limit:.2g}" if wrong else "right", "error": shown}


# Command -------------------------------------------------------------------------------------------------------------------------


def told_by_gpu(*fields: str) -> str:
    """What nvidia-smi says of its fields, such as clocks.sm; empty without it."""
    return output_of("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")


STATE = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")


def earlier(target: Path, made: dict[str, Any]) -> dict[str, Any]:
    """The result of an earlier call with the same code, versions, GPU and dtype; empty if there is none."""
    if not target.exists() or made["commit"] == "unknown" or made["commit"].endswith("+"):
        return {}
    found: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    same = ("schema", "commit", "versions", "dtype", "gpu")
    return found if all(found.get(name) == made[name] for name in same) else {}


def run(
    rows: list[Row],
    place: Place,
    target: Path,
    *,
    laws: Callable[..., dict[str, str]],
    found: Any,
    seconds: float = 60 * MINUTES - RESERVE,
    again: bool = False,
) -> dict[str, Any]:
    """Laws, ceilings, rows; `target` is written after each. `found` gives the ceilings; `laws` is `judge`.

    `again` forgets what an earlier call measured.
    """
    start = time.monotonic()
    console = Console(stderr=True)
    made = {"schema": SCHEMA, **provenance(*PACKAGES), "gpu": told_by_gpu("name", "driver_version"), "dtype": str(place.dtype)}
    before = {} if again else earlier(target, made)
    kept = {row["id"]: row for row in before.get("rows", []) if row["status"] == "measured"}
    passed = set(before.get("laws_passed", []))
    order = [row.id for row in ROWS]
    result: dict[str, Any] = made | {"gpu_before": told_by_gpu(*STATE), "laws": before.get("laws", {}), "rows": list(kept.values())}

    def write() -> None:
        result["laws_passed"] = sorted(passed)
        result["rows"].sort(key=lambda row: order.index(row["id"]) if row["id"] in order else len(order))
        write_json(target, result)

    if kept:
        console.print(f"measured by an earlier call, and kept: {', '.join(kept)}")
    rows = [row for row in rows if row.id not in kept]
    stems = sorted({stem for row in rows for stem in row.stems})
    console.print(f"laws of {', '.join(stems)} on {place.device}, {', '.join(DTYPES)} ...")
    verdicts = laws(stems, device=place.device, seconds=seconds * SHARE_OF_LAWS, passed=passed)
    result["laws"] = result["laws"] | verdicts
    for stem, why in verdicts.items():
        console.print(f"  {stem}: {why or 'every law holds'}")
    write()
    result["ceilings"] = ceiling = found(place)
    console.print("ceilings: " + ", ".join(f"{name} {value:.3g}" for name, value in ceiling.items()))
    write()
    for index, row in enumerate(rows):
        left = seconds - (time.monotonic() - start)
        broken = [stem for stem in row.stems if verdicts.get(stem)]
        if broken or left < 5:
            status = f"not timed, laws fail: {', '.join(broken)}" if broken else "no time was left"
            one: dict[str, Any] = {"id": row.id, "title": row.title, "status": status, "arms": {}}
        else:
            share = max(left / (len(rows) - index), min(left, SECONDS_OF_A_ROW))
            one = run_row(row, place, ceiling, share, grace=min(GRACE, max(left - share, 5)))
        result["rows"].append(one)
        write()
        console.print(summary(one))
    result["gpu_after"] = told_by_gpu(*STATE)
    result["seconds"] = time.monotonic() - start
    write()
    return result


def summary(row: dict[str, Any]) -> str:
    """One line about a row."""
    if row["status"] != "measured":
        return f"{row['id']:>7}  {row['status']}"
    return f"{row['id']:>7}  {microseconds(row['arms']['ours']['seconds']['p50'])} us, {row['share_of_floor']:.0%} of the floor"


def microseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.4g}"


def lines(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The columns of a table of all rows: one line for each arm, the first one ours, and for each peer that is missing."""
    for row in result["rows"]:
        yield {"row": row["id"], "arm": row["title"] if row["status"] == "measured" else f"{row['title']}: {row['status']}"}
        for name, arm in row["arms"].items():
            if "seconds" not in arm:
                yield {"arm": f"{name}: {arm['status']}"}
                continue
            line = {"arm": name, **{f"{part} us": microseconds(arm["seconds"][part]) for part in ("p20", "p50", "p80")}}
            if name == "ours":
                line |= {"floor us": microseconds(row["floor_s"]), "goal us": microseconds(row["goal_s"])}
                line["of floor"] = f"{row['share_of_floor']:.0%}"
            else:
                against = row["ratios"][name]
                line["ratio"] = f"{against['value']:.2f}{'' if against['claimed'] else ' (overlap)'}"
            memory = arm["memory_bytes"]
            yield line | {
                "launches": arm["launches"] or "",
                "MB": "" if memory is None else f"{memory / 1e6:.1f}",
                "error": "" if arm.get("error") is None else f"{arm['error']:.1e}",
                "how": arm["how"],
            }
        for name, why in row.get("missing", {}).items():
            yield {"arm": f"{name}: missing, {why}"}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns 0, or 1 if laws or rows fail. Exits with 2 without a GPU or for bad options."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="There is no --skip-laws: a method that breaks a law is not timed.",
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="the folder for gpu.json (needed, except with --list)")
    parser.add_argument("--rows", metavar="ID,ID", help="only these rows, such as 1,2b")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"the limit of the run, laws included (default {MINUTES:g})")
    parser.add_argument("--again", action="store_true", help="measure again what an earlier call has measured")
    parser.add_argument("--list", action="store_true", help="print the rows and their goals, and stop")
    options = parser.parse_args(arguments)
    known = {row.id: row for row in ROWS}
    wanted = options.rows.split(",") if options.rows else list(known)
    absent = " and ".join(name for name in NEEDED if importlib.util.find_spec(name) is None)
    refusals = {
        f"--rows: got {', '.join(set(wanted) - set(known))}, wanted some of {', '.join(known)}": not set(wanted) <= set(known),
        f"--minutes: got {options.minutes:g}, wanted more than 1": not options.minutes > 1,
    }
    if not options.list:
        refusals |= {
            "torch sees no GPU here; run it on a machine with one. --list shows what it would do": not torch.cuda.is_available(),
            "--out FOLDER is needed, where gpu.json goes": options.out is None,
            f"the laws are judged first, and {absent} is not installed": bool(absent),
        }
    for why, refused in refusals.items():
        if refused:
            parser.error(why)
    rows = [known[name] for name in wanted]
    if options.list:
        for row in rows:
            ratios = f", {row.goal_ratio:g} x {row.peer}" if row.goal_ratio else ""
            print(f"{row.id:>7}  {row.title}; goal {microseconds(row.goal_s) + ' us' if row.goal_s else 'none in time'}{ratios}")
        return 0
    limit = 60 * options.minutes
    faulthandler.dump_traceback_later(limit - 5, exit=True)  # a compiler or a driver that hangs reacts to nothing else
    torch.set_grad_enabled(False)
    result = run(
        rows, Place(), options.out / "gpu.json",
        laws=judge, found=ceilings, seconds=limit - RESERVE, again=options.again,
    )  # fmt: skip
    faulthandler.cancel_dump_traceback_later()
    show(f"{result['gpu'] or 'no GPU'}, {result['date']}, commit {result['commit']}", list(lines(result)))
    bad = [row for row in result["rows"] if row["status"] != "measured" and not row["status"].startswith("no kernel yet")]
    return int(any(result["laws"].values()) or bool(bad))


if __name__ == "__main__":
    sys.exit(main())
