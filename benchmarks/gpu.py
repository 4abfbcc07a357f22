"""The kernels on a GPU: `python -m benchmarks.gpu --out FOLDER [--rows 1,2b] [--minutes 9]`; it limits itself to nine minutes.

First the laws judge `optimized`, which hands its tensors to the kernels, on the GPU in bfloat16, float16 and float32: a method that
breaks a law, or whose laws do not finish, is listed and not timed. There is no option to leave the laws out. Then the run measures
the ceilings of this GPU, then every row of `rows` and `decoder`, side by side with its peers. A row that still runs a minute after
its time is broken off; if this does not help, the run ends itself and prints where it stopped. A second call at the same commit,
on the same GPU, goes on where the first one stopped: laws that held and rows that were measured are not run again.

How a row is measured. Inputs are random, in several sets: two sets of large inputs; of small inputs at least twenty sets, which
together are five times the L2 cache. All calls, one for each set, are captured in one CUDA graph, and a measurement is one replay,
between two events, divided by the number of calls; an arm that waits for the GPU cannot be captured and is timed by events around
its calls, which the result says. The arms take turns, A B C C B A, three times at least. Before that every output is compared with
the float64 mathematics, and its memory is filled with NaN first.

A ratio is claimed only if the intervals from the 20 % to the 80 % quantile do not overlap. `floor` is the larger of two times: the
least bytes over the best measured bandwidth, and the least multiplications over the measured rate of a matrix product; the reached
share of the floor is `floor / median`. The goals in time are for an H200: on another GPU, rows that move much data keep the share
of the floor that the goal is there. Results are written after every row, so a run that is killed keeps what it had.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.decoder import MODEL_ROWS
from benchmarks.row import NoKernel, Place, Row, Work
from benchmarks.rows import KERNEL_ROWS
from benchmarks.timing import ROOT, Spread, after, interleaved, output_of, provenance, ratio, spread, write_json

SCHEMA = "evictionary/benchmark-gpu/1"
ROWS = [*KERNEL_ROWS, *MODEL_ROWS]
MINUTES = 9.0  # of the whole run
RESERVE = 30.0  # seconds of them, in which a row is broken off and the results are written
SHARE_OF_LAWS = 0.55  # of the rest, at most
SECONDS_OF_A_ROW = 20.0  # at least, if the machine has that many: torch.compile takes about ten of them
GRACE = 60.0  # seconds that a row may take longer
H200 = {"copy_bytes_per_s": 4.3e12, "read_bytes_per_s": 4.3e12, "matmul_flops_per_s": 790e12}  # for which the goals are written
SLEEP = 20_000_000  # cycles, 10 ms: the GPU is busy for longer than the host takes to launch a graph of thousands of nodes
DTYPES = ("bfloat16", "float16", "float32")
ROTATED_BYTES = 300 * 10**6  # five times the L2 cache of an H200
LEAST_REPLAY = 2e-3  # seconds: shorter replays would measure the launch of the graph
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

    def one(job: tuple[str, str, str]) -> tuple[str, str, bool]:
        """The stem, what is wrong with it, and whether anything was judged."""
        stem, dtype, file = job
        if f"{file} {dtype}" in passed:
            return stem, "", True
        left = end - time.monotonic()
        if left <= 0:
            return stem, f"{dtype}: no time was left for its laws", True
        options = ["-q", "-x", "-p", "no:cacheprovider", "--profile", "student", "--device", device, "--dtype", dtype]
        command = [sys.executable, "-m", "pytest", file, "--impl", "optimized", *options]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=left, check=False)
        except subprocess.TimeoutExpired:
            return stem, f"{dtype}: its laws did not finish in {seconds:.0f} s", True
        if done.returncode == 0:
            passed.add(f"{file} {dtype}")
        if done.returncode in (0, NOTHING_TO_JUDGE):
            return stem, "", done.returncode == 0
        printed = (done.stdout + done.stderr).splitlines()
        telling = ("does not hold", "what is wrong", "raised in", "smallest input")
        found = [" ".join(line.split()) for line in printed if any(words in line for words in telling)] or printed[-3:]
        return stem, f"{dtype}: {'; '.join(found)[:1000]}", True

    # The stems that compile most come first, so that none of them runs alone at the end.
    jobs = [(stem, dtype, file) for stem in sorted(stems, key=heaviest) for file in law_files(stem) for dtype in dtypes]
    # A process for each file, not for each processor: most of the time is compiling kernels, and the next process reuses them.
    with ThreadPoolExecutor(max(1, min(14, (os.cpu_count() or 2) - 2))) as pool:
        outcomes = list(pool.map(one, jobs))
    judged = {stem for stem, _, any_law in outcomes if any_law}
    verdicts = {stem: "" if stem in judged else "no law judges it" for stem in stems}
    for stem, why, _ in outcomes:
        verdicts[stem] = "; ".join(filter(None, (verdicts[stem], why)))
    return verdicts


def heaviest(stem: str) -> int:
    """Order of the stems: the stems with the longest kernels first."""
    kernels = (ROOT / "optimized" / "kernels").glob(f"{stem}*.py")
    return -sum(path.stat().st_size for path in kernels)


def law_files(stem: str) -> list[str]:
    """The files with laws for implementations of a stem; laws about the papers alone judge nothing here."""
    files = [ROOT / "spec_tests" / f"test_{stem}.py", *sorted((ROOT / "spec_tests").glob(f"test_{stem}_*.py"))]
    return [str(path.relative_to(ROOT)) for path in files if path.exists()]


# Time ----------------------------------------------------------------------------------------------------------------------------


class ProcessorWatch:
    """Times calls on a CPU, to test the machinery without a GPU. Its figures are not for publication."""

    def rotation(self, size: int, latency: bool) -> int:
        return 1

    def poison(self) -> None:
        pass

    def prepare(self, call: Callable[..., Any], inputs: list[tuple[Any, ...]], waits: bool) -> tuple[Callable[[], float], str]:
        def measure() -> float:
            start = time.perf_counter()
            for one in inputs:
                call(*one)
            return (time.perf_counter() - start) / len(inputs)

        return measure, "clock of the processor"

    def cost(self, call: Callable[..., Any], inputs: tuple[Any, ...]) -> dict[str, int | None]:
        return {"launches": None, "memory_bytes": None}

    def clean(self) -> None:
        pass


class GraphWatch:
    """Times calls on a GPU: a captured graph of one call for each set of inputs, between two events."""

    def rotation(self, size: int, latency: bool) -> int:
        return max(20 if latency else 2, math.ceil(ROTATED_BYTES / max(size, 1)))

    def poison(self) -> None:
        """Fill memory with NaN before it is allocated again, so that an output which is not written shows."""
        for size in (2**29, 2**24, 2**20):
            torch.full((size,), math.nan, device="cuda")

    def prepare(self, call: Callable[..., Any], inputs: list[tuple[Any, ...]], waits: bool) -> tuple[Callable[[], float], str]:
        """Return a function that measures once, in seconds for a call, and how it does it."""

        def run(repeats: int) -> None:
            for _ in range(repeats):
                for one in inputs:
                    call(*one)

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for one in inputs[:2]:
                call(*one)
        torch.cuda.synchronize()
        if not waits:
            try:
                first = self._captured(run, 1)
                repeats = max(1, math.ceil(LEAST_REPLAY / max(self._timed(first), 1e-7)))
                repeats = min(repeats, max(1, 4000 // len(inputs)))
                replay = first if repeats == 1 else self._captured(run, repeats)
                return lambda: self._timed(replay) / (repeats * len(inputs)), "graph"
            except TimeoutError:
                raise
            except Exception as error:  # a call that cannot be captured can still be timed
                torch.cuda.synchronize()
                how = f"events, not captured: {type(error).__name__}"
        else:
            how = "events, waits for the GPU"
        return lambda: self._timed(lambda: run(1)) / len(inputs), how

    def _captured(self, run: Callable[[int], None], repeats: int) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(repeats)
        graph.replay()
        torch.cuda.synchronize()
        return graph.replay

    def _timed(self, run: Callable[[], None]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SLEEP)  # the GPU is still busy when the work arrives, so the time of the launch itself is not measured
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def cost(self, call: Callable[..., Any], inputs: tuple[Any, ...]) -> dict[str, int | None]:
        """Activities on the GPU (kernels, copies, fills), and the rise of allocated memory during a call, its result included."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = call(*inputs)
        torch.cuda.synchronize()
        memory = torch.cuda.max_memory_allocated() - before
        del result
        launches: int | None = None
        try:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                call(*inputs)
                torch.cuda.synchronize()
            launches = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events()) or None
        except Exception:  # no profiler: the number is unknown, the time is not
            pass
        return {"launches": launches, "memory_bytes": memory}

    def clean(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()


def ceilings(watch: GraphWatch) -> dict[str, float]:
    """Bytes a second of a copy and of a read, and operations a second of a matrix product: the medians."""
    from benchmarks.ceilings import works

    found = {}
    for name, (call, size) in works().items():
        measure, _ = watch.prepare(call, [()], waits=False)
        found[name] = size / spread([measure() for _ in range(9)]).p50
    watch.clean()
    return found


# Rows ----------------------------------------------------------------------------------------------------------------------------


def size_of(value: Any) -> int:
    """The bytes of all tensors in a tuple, tuples within it included."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(size_of(entry) for entry in value) if isinstance(value, tuple) else 0


def shapes_of(value: Any) -> Any:
    """The shapes of all tensors in a tuple, nested as they are."""
    if isinstance(value, torch.Tensor):
        return list(value.shape)
    return [shapes_of(entry) for entry in value] if isinstance(value, tuple) else None


def floor_of(work: Work, found: dict[str, float]) -> float:
    """The least seconds: the larger of bytes at the better measured bandwidth and multiplications at the measured rate."""
    memory = max(found["copy_bytes_per_s"], found["read_bytes_per_s"])
    return max(work.bytes / memory, work.flops / found["matmul_flops_per_s"]) / work.units.get("ours", 1)


@contextmanager
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


def run_row(row: Row, place: Place, watch: Any, found: dict[str, float], seconds: float, *, grace: float = GRACE) -> dict[str, Any]:
    """Check and time one row. The result reports any failure under `status`; only "measured" means success.

    After `seconds` no further peer is begun; `grace` seconds later the running peer, or the whole row, is broken off.
    """
    result: dict[str, Any] = {"id": row.id, "title": row.title, "goal_ratio": row.goal_ratio, "arms": {}}
    try:
        with at_most(seconds + grace):
            _run_row(row, place, watch, found, seconds, result)
    except NoKernel as error:
        result["status"] = f"no kernel yet: {error}"
    except Exception as error:
        result["status"] = f"failed: {type(error).__name__}: {str(error)[:300]}"
    watch.clean()
    return result


def _run_row(row: Row, place: Place, watch: Any, found: dict[str, float], seconds: float, result: dict[str, Any]) -> None:
    end = time.monotonic() + seconds
    work = row.build(place)
    floor = floor_of(work, found)
    # The goal of a small input is a number of launches, which take the same time on any GPU.
    goal = row.goal_s if row.latency or row.goal_s is None else row.goal_s * floor / floor_of(work, H200)
    result |= {"bytes": work.bytes, "flops": work.flops, "floor_s": floor, "goal_s": goal, "missing": work.missing}
    result["latency"] = row.latency
    arms: dict[str, dict[str, Any]] = result["arms"]
    for name, call in work.arms.items():
        if name != "ours" and time.monotonic() > end:
            work.missing[name] = "no time was left"
            continue
        arms[name] = check_arm(work, name, call, watch)
        if name == "ours" and arms[name]["status"] not in GOOD:
            result["status"] = f"not timed, ours is {arms[name]['status']}"
            return
    good = {name: work.arms[name] for name, arm in arms.items() if arm["status"] in GOOD}
    first = work.make(0)
    count = work.copies or watch.rotation(size_of(first), row.latency)
    inputs = [first, *(work.make(seed) for seed in range(1, count))]
    result |= {"copies": count, "shapes": shapes_of(first)}
    measures = {}
    for name, call in good.items():
        try:
            measure, how = watch.prepare(call, inputs, name in work.waits)
            arms[name] |= watch.cost(call, inputs[0]) | {"how": how}
            measure()
        except Exception as error:
            if name == "ours":
                raise
            arms[name]["status"] = f"failed: {type(error).__name__}: {str(error)[:300]}"  # a peer out of memory, say
            continue
        units = work.units.get(name, 1)

        def measured(measure: Callable[[], float] = measure, units: int = units) -> float:
            for one in inputs:
                work.renew(one)
            return measure() / units

        measures[name] = measured
    timed = interleaved(measures, ROUNDS[1], enough=after(ROUNDS[0], end))
    for name, times in timed.items():
        arms[name] |= {"seconds": times.as_json(), "status": "measured"}
    ours = timed["ours"]
    result["ratios"] = {name: ratio(ours, times).as_json() for name, times in timed.items() if name != "ours"}
    result["share_of_floor"] = floor / ours.p50
    result["status"] = "measured"


def check_arm(work: Work, name: str, call: Callable[..., Any], watch: Any) -> dict[str, Any]:
    """Call an arm once, on memory full of NaN, and compare its output with the reference."""
    try:
        pristine = work.make(0)
        inputs = work.make(0) if work.check else pristine  # an arm may change its inputs
        watch.poison()
        output = call(*inputs)
        if name in work.read:
            output = work.read[name](pristine, output)
        if work.check is None or output is None:
            return {"status": "not compared"}
        distance = work.check(pristine, output)
    except Exception as error:
        return {"status": f"failed: {type(error).__name__}: {str(error)[:300]}"}
    # A peer with larger rounding is still a peer; its error stands beside its time.
    wrong = not distance <= (work.limit if name == "ours" else 0.2)
    shown = distance if math.isfinite(distance) else None
    return {"status": f"wrong: error {distance:.2g}, wanted at most {work.limit:.2g}" if wrong else "right", "error": shown}


# Command -------------------------------------------------------------------------------------------------------------------------


def gpu() -> tuple[str, str]:
    """Name and driver, then clocks, power and temperature, as nvidia-smi gives them; empty without it."""
    fields = ("name,driver_version", "clocks.sm,clocks.mem,power.draw,temperature.gpu")
    name, state = (output_of("nvidia-smi", f"--query-gpu={some}", "--format=csv,noheader") for some in fields)
    return name, state


def chosen(wanted: str | None) -> list[Row]:
    """The rows that `--rows` names, all by default. Raises ValueError for an unknown one."""
    if wanted is None:
        return ROWS
    known = {row.id: row for row in ROWS}
    unknown = [name for name in wanted.split(",") if name not in known]
    if unknown:
        raise ValueError(f"--rows: got {', '.join(unknown)}, wanted some of {', '.join(known)}")
    return [known[name] for name in wanted.split(",")]


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
    watch: Any,
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
    made = {"schema": SCHEMA, **provenance(*PACKAGES), "gpu": gpu()[0], "dtype": str(place.dtype)}
    before = {} if again else earlier(target, made)
    kept = {row["id"]: row for row in before.get("rows", []) if row["status"] == "measured"}
    passed = set(before.get("laws_passed", []))
    order = [row.id for row in ROWS]
    result: dict[str, Any] = made | {"gpu_before": gpu()[1], "laws": before.get("laws", {}), "rows": list(kept.values())}

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
    result["ceilings"] = ceiling = found(watch)
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
            one = run_row(row, place, watch, ceiling, share, grace=min(GRACE, max(left - share, 5)))
        result["rows"].append(one)
        write()
        console.print(summary(one))
    result["gpu_after"] = gpu()[1]
    result["seconds"] = time.monotonic() - start
    write()
    return result


def summary(row: dict[str, Any]) -> str:
    """One line about a row."""
    if row["status"] != "measured":
        return f"{row['id']:>7}  {row['status']}"
    ours = Spread(**row["arms"]["ours"]["seconds"])
    return f"{row['id']:>7}  {microseconds(ours.p50)} us, {row['share_of_floor']:.0%} of the floor"


def microseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.4g}"


def table(result: dict[str, Any]) -> Table:
    """All rows: one line for each arm, the first one ours."""
    times_of = ("p20 us", "median us", "p80 us", "floor us", "of floor", "goal us", "ratio")
    shown = Table(
        "row",
        "arm",
        *times_of,
        "launches",
        "MB",
        "error",
        "how",
        title=f"{result['gpu'] or 'no GPU'}, {result['date']}, commit {result['commit']}",
    )
    for row in result["rows"]:
        if row["status"] != "measured":
            shown.add_row(row["id"], f"{row['title']}: {row['status']}", *[""] * 11)
        for name, arm in row["arms"].items():
            if "seconds" not in arm:
                shown.add_row(row["id"], f"{name}: {arm['status']}", *[""] * 11)
                continue
            times, ours = arm["seconds"], name == "ours"
            against = row["ratios"].get(name)
            memory = arm["memory_bytes"]
            shown.add_row(
                row["id"],
                f"{name}: {row['title']}" if ours else name,
                *(microseconds(times[part]) for part in ("p20", "p50", "p80")),
                microseconds(row["floor_s"]) if ours else "",
                f"{row['share_of_floor']:.0%}" if ours else "",
                microseconds(row["goal_s"]) if ours else "",
                "" if against is None else f"{against['value']:.2f}{'' if against['claimed'] else ' (overlap)'}",
                str(arm["launches"] or ""),
                "" if memory is None else f"{memory / 1e6:.1f}",
                "" if arm.get("error") is None else f"{arm['error']:.1e}",
                arm["how"],
            )
        for name, why in row.get("missing", {}).items():
            shown.add_row(row["id"], f"{name}: missing, {why}", *[""] * 11)
    return shown


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns 0; 1 if laws or rows fail; 2 without a GPU or for bad options."""
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
    try:
        rows = chosen(options.rows)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if not options.minutes > 1:
        print(f"--minutes: got {options.minutes:g}, wanted more than 1", file=sys.stderr)
        return 2
    if options.list:
        for row in rows:
            ratios = f", {row.goal_ratio:g} x {row.peer}" if row.goal_ratio else ""
            print(f"{row.id:>7}  {row.title}; goal {microseconds(row.goal_s) + ' us' if row.goal_s else 'none in time'}{ratios}")
        return 0
    if not torch.cuda.is_available():
        print(
            "benchmarks.gpu: torch sees no GPU here; run it on a machine with one. --list shows what it would do.", file=sys.stderr
        )
        return 2
    if options.out is None:
        print("benchmarks.gpu: --out FOLDER is needed, where gpu.json goes", file=sys.stderr)
        return 2
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        print(f"benchmarks.gpu: the laws are judged first, and {' and '.join(absent)} is not installed", file=sys.stderr)
        return 2
    limit = 60 * options.minutes
    faulthandler.dump_traceback_later(limit - 5, exit=True)  # a compiler or a driver that hangs reacts to nothing else
    torch.set_grad_enabled(False)
    result = run(
        rows, Place(), GraphWatch(), options.out / "gpu.json",
        laws=judge, found=ceilings, seconds=limit - RESERVE, again=options.again,
    )  # fmt: skip
    faulthandler.cancel_dump_traceback_later()
    Console(width=220).print(table(result))
    bad = [row for row in result["rows"] if row["status"] != "measured" and not row["status"].startswith("no kernel yet")]
    return int(any(result["laws"].values()) or bool(bad))


if __name__ == "__main__":
    sys.exit(main())
