"""The kernels on a GPU: `python -m benchmarks.gpu --out FOLDER [--rows 1,2b] [--minutes 9]`; it limits
itself to nine minutes.

First the laws judge `optimized`, which hands its tensors to the kernels, on the GPU in bfloat16, float16 and
float32: a method that breaks a law, or whose laws do not finish, is listed and not timed. There is no option
to leave the laws out. Then the run measures the ceilings of this GPU, then every row of `rows` and `decoder`,
side by side with its peers. A row that still runs a minute after its time is broken off; if this does not
help, the run ends itself and prints where it stopped. A second call at the same commit, on the same GPU, goes
on where the first one stopped: laws that held and rows that were measured are not run again.

How a row is measured. Inputs are random, in several sets: two sets of large inputs; of small inputs at least
twenty sets, which together are five times the L2 cache. Triton's `do_bench_cudagraph` captures many calls,
which take the sets in turn, in one CUDA graph and times ten replays of it. An arm that waits for the GPU
cannot be captured: `do_bench` times its calls one by one, and the result says so. The arms take turns, A B C
C B A, three times at least. Before that every output is compared with the float64 mathematics, and its memory
is filled with NaN first.

A ratio is claimed only if the intervals from the 20 % to the 80 % quantile do not overlap. `floor` is the
larger of two times: the least bytes over the best measured bandwidth, and the least multiplications over the
measured rate of a matrix product; the reached share of the floor is `floor / median`. The goals in time are
for an H200: on another GPU, rows that move much data keep the share of the floor that the goal is there.
Results are written after every row, so a run that is killed keeps what it had.

`--rehearse` needs no GPU: the kernels run as compiled code (docs/compiled.md) on rows a thousandth as long,
so that nothing fails at its first try on a GPU. No time is taken.
"""

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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import typer
from rich.console import Console
from torch.utils._pytree import tree_leaves

from benchmarks.contract_rows import CONTRACT_ROWS
from benchmarks.decoder import MODEL_ROWS
from benchmarks.product import PRODUCT_ROWS
from benchmarks.row import NoKernel, Place, Row, Work
from benchmarks.rows import KERNEL_ROWS
from benchmarks.timing import (
    ROOT,
    interleaved,
    output_of,
    provenance,
    ratio,
    seconds,
    show,
    spread,
    write_json,
)
from evictionary import store
from evictionary.errors import require
from evictionary.spec_tests.judge import compiled

SCHEMA = "evictionary/benchmark-gpu/1"
LINES, RESULT = "gpu.jsonl", "gpu.json"
ROWS = {row.id: row for row in [*KERNEL_ROWS, *CONTRACT_ROWS, *MODEL_ROWS, *PRODUCT_ROWS]}
TAUGHT = sorted(path.stem for path in (ROOT / "optimized" / "teaching").glob("[!_]*.py"))
"""What has a kernel to read: also without a row its laws are judged, in a run of all rows."""
MINUTES = 9.0  # of the whole run
RESERVE = 30.0  # seconds of them, in which a row is broken off and the results are written
SHARE_OF_LAWS = 0.55  # of the rest, at most
SECONDS_OF_A_ROW = 20.0  # at least, if the machine has that many: torch.compile takes about ten of them
GRACE = 60.0  # seconds that a row may take longer
# for which the goals are written
H200 = {"copy_bytes_per_s": 4.3e12, "read_bytes_per_s": 4.3e12, "matmul_flops_per_s": 790e12}
DTYPES = ("bfloat16", "float16", "float32")
ROTATED_BYTES = 300 * 10**6  # five times the L2 cache of an H200
REPLAY = 5  # milliseconds of a graph: shorter replays would measure the launch of the graph
ROUNDS = (3, 5)  # more would leave the last rows without time
NO_CUDA = "Torch not compiled with CUDA enabled"  # a CUDA graph, torch.compile
GOOD = ("right", "not compared")
PACKAGES = ("torch", "triton", "kvpress", "flashinfer-python", "flash-attn")
NEEDED = ("pytest", "hypothesis", "filelock")  # for the laws and the store
# what an earlier call must share, if this one is to go on with it
SAME = ("schema", "commit", "versions", "dtype", "gpu")


# A row
# ------------------------------------------------------------------------------------------------------------


def run_row(
    row: Row, place: Place, found: dict[str, float], seconds: float, *, grace: float = GRACE
) -> dict[str, Any]:
    """Check and time one row. The result reports any
    failure under `status`; only "measured" means success.

    After `seconds` no further peer is begun; `grace` seconds
    later the running peer, or the whole row, is broken off.
    """
    result: dict[str, Any] = {"id": row.id, "title": row.title, "goal_ratio": row.goal_ratio, "arms": {}}
    try:
        with at_most(seconds + grace):
            _run_row(row, place, found, seconds, result)
    except NoKernel as error:
        result["status"] = f"no kernel yet: {error}"
    except Exception as error:
        result["status"] = failed(error)
    gc.collect()
    torch.cuda.empty_cache()
    return result


def _run_row(row: Row, place: Place, found: dict[str, float], seconds: float, result: dict[str, Any]) -> None:
    end, work, arms = time.monotonic() + seconds, row.build(place), result["arms"]
    floor = floor_of(work, found)
    # The goal of a small input is a number of launches, which take the same time on any GPU.
    goal = row.goal_s if row.latency or row.goal_s is None else row.goal_s * floor / floor_of(work, H200)
    result |= {
        "bytes": work.bytes,
        "flops": work.flops,
        "floor_s": floor,
        "goal_s": goal,
        "missing": work.missing,
    }
    result["latency"] = row.latency
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
    least = math.ceil(ROTATED_BYTES / max(1, sum(each.nbytes for each in tensors)))
    count = 1 if not place.is_gpu else work.copies or max(least, 20 if row.latency else 2)
    inputs = [work.make(seed) for seed in range(count)]
    result |= {"copies": count, "shapes": [list(each.shape) for each in tensors]}
    measures = {}
    for name in [name for name, arm in arms.items() if arm["status"] in GOOD]:
        try:
            measure, how = prepare(
                work.arms[name], inputs, place, name in work.waits, work.units.get(name, 1)
            )
            arms[name] |= cost(lambda name=name: work.arms[name](*inputs[0]), place) | {"how": how}
            measure()
            measures[name] = measure
        except Exception as error:
            if name == "ours":
                raise
            arms[name]["status"] = failed(error)  # a peer out of memory, say
    timed = interleaved(measures, *ROUNDS, end)
    for name, times in timed.items():
        arms[name] |= {"seconds": times._asdict(), "status": "measured"}
    ours = timed.pop("ours")
    result["ratios"] = {name: ratio(ours, times)._asdict() for name, times in timed.items()}
    result |= {"share_of_floor": floor / ours.p50, "status": "measured"}


def floor_of(work: Work, found: dict[str, float]) -> float:
    """The least seconds: the larger of bytes at the better
    measured bandwidth and multiplications at the measured rate.
    """
    memory = max(found["copy_bytes_per_s"], found["read_bytes_per_s"])
    return max(work.bytes / memory, work.flops / found["matmul_flops_per_s"]) / work.units.get("ours", 1)


def check_arm(work: Work, name: str, want: Any, place: Place) -> dict[str, Any]:
    """Call an arm once, on memory full of NaN, and compare its output with the reference."""
    read = work.reads.get(name, work.read)
    try:
        pristine, inputs = work.make(0), work.make(0)  # an arm may change its inputs
        # an output that is not written shows
        for size in (2**29, 2**24, 2**20) if place.is_gpu and place.shrink == 1 else ():
            torch.full((size,), math.nan, device=place.device)
        output = work.arms[name](*inputs)
        if want is None or read is None:
            return {"status": "not compared"}
        distance = work.apart(read(pristine, output), want)
    except Exception as error:
        return {"status": failed(error)}
    # A peer with larger rounding is still a peer; its error stands beside its time.
    wrong = not distance <= (work.limit if name == "ours" else 0.2)
    shown = distance if math.isfinite(distance) else None
    return {
        "status": f"wrong: error {distance:.2g}, wanted at most {work.limit:.2g}" if wrong else "right",
        "error": shown,
    }


def prepare(
    call: Callable[..., Any], inputs: list[tuple[Any, ...]], place: Place, waits: bool, units: int = 1
) -> tuple[Callable[[], list[float]], str]:
    """Return a function that gives the seconds of some calls, which take the sets of inputs in turn, and
    how it measures them.

    A call makes so many `units`, and the seconds are those of one. On a CPU it times one call, to test the
    machinery without a GPU; its figures are not for publication.
    """
    turn = itertools.cycle(inputs)

    def run() -> Any:
        return call(*next(turn))

    if not place.is_gpu:
        return lambda: [seconds(run) / units], "clock of the processor"
    from triton.testing import do_bench, do_bench_cudagraph

    def of_graph() -> list[float]:
        # Each capture has a stream of its own, for which torch holds the memory back that a call has freed.
        torch.cuda.empty_cache()
        return [ms / 1e3 / units for ms in do_bench_cudagraph(run, rep=REPLAY, return_mode="all")]

    how = "events, waits for the GPU"
    if not waits:
        try:
            with never_waiting():
                run()
            of_graph()
            return of_graph, "graph"
        except TimeoutError:
            raise
        except Exception as error:  # a call that cannot be captured can still be timed
            how = f"events, not captured: {type(error).__name__}"
    return lambda: [
        ms / 1e3 / units for ms in do_bench(run, warmup=1, rep=4 * REPLAY, return_mode="all")
    ], how


@contextlib.contextmanager
def never_waiting() -> Iterator[None]:
    """Raise where a call waits for the GPU: after a capture that fails, torch frees no memory any more."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def cost(call: Callable[[], Any], place: Place) -> dict[str, int | None]:
    """Activities on the GPU (kernels, copies, fills), and the
    rise of allocated memory during a call, its result included.
    """
    if not place.is_gpu:
        return {"launches": None, "memory_bytes": None}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    launches = sum(each.device_type == torch.autograd.DeviceType.CUDA for each in profile.events()) or None
    return {"launches": launches, "memory_bytes": torch.cuda.max_memory_allocated() - before}


def failed(error: Exception) -> str:
    return f"failed: {type(error).__name__}: {str(error)[:300]}"


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in code that takes longer, and again every half minute, as soon as Python or a
    called program can.
    """

    def late(number: int, frame: Any) -> None:
        raise TimeoutError(f"not done after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), 30)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def rehearse(rows: Sequence[Row]) -> Iterator[tuple[str, str, str]]:
    """Call every arm of the rows once, small, with the
    kernels as compiled code: row, arm, and what became of it.
    """
    compiled.begin()
    for row in rows:
        for arm, status in _tried(row, Place(shrink=1024)):
            yield row.id, arm, "needs a GPU" if NO_CUDA in status else status


def _tried(row: Row, place: Place) -> Iterator[tuple[str, str]]:
    """Every arm of a row with its status; a row that cannot be built is ours that failed."""
    try:
        work = row.build(place)
        want = work.want and work.want(work.make(0))
        for arm in work.arms:
            yield arm, check_arm(work, arm, want, place)["status"]
    except Exception as error:
        yield "ours", failed(error)


# Laws and ceilings
# ------------------------------------------------------------------------------------------------------------


def broken_law(stem: str, dtype: str, device: str, seconds: float) -> str:
    """What is wrong with a method of `optimized` by its laws: nothing if all hold."""
    if seconds <= 0:
        return f"{dtype}: no time was left for its laws"
    command = [
        sys.executable,
        "-m",
        "evictionary",
        "judge",
        "optimized",
        "--method",
        stem,
        "--dtype",
        dtype,
        "--device",
        device,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    try:
        done = subprocess.run(
            [*command, "--profile", "student", "--jobs", "1"],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"{dtype}: its laws did not finish in {seconds:.0f} s"
    if not done.returncode:
        return ""
    printed = (done.stdout + done.stderr).splitlines()
    telling = ("does not hold", "what is wrong", "raised in", "smallest input")
    found = [
        " ".join(line.split()) for line in printed if any(words in line for words in telling)
    ] or printed[-3:]
    return f"{dtype}: {'; '.join(found)[:1000]}"


def ceilings(place: Place) -> dict[str, float]:
    """Bytes a second of a copy and of a read, and operations a second of a matrix product: the medians."""
    source = torch.randn(10**9 // 4, device=place.device)
    target = torch.empty_like(source)
    # zeros would be faster
    left, right = (torch.randn(8192, 8192, device=place.device, dtype=torch.bfloat16) for _ in range(2))
    works: dict[str, tuple[Callable[[], Any], float]] = {
        "copy_bytes_per_s": (lambda: target.copy_(source), 2e9),
        "read_bytes_per_s": (source.sum, 1e9),
        "matmul_flops_per_s": (lambda: left @ right, 2.0 * 8192**3),
    }
    return {
        name: size / spread(prepare(call, [()], place, waits=False)[0]()).p50
        for name, (call, size) in works.items()
    }


# The run
# ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan(store.Plan):
    """The laws of each stem in each dtype, those of the rows first, then each row. `model` says the code and
    the GPU, and `path` is the file of the lines.

    laws is `broken_law`, and found gives the ceilings.
    """

    model: str
    rows: Sequence[Row]
    place: Place
    path: Path
    seconds: float
    laws: Callable[..., str] = broken_law
    found: Callable[[Place], dict[str, float]] = ceilings
    start: float = field(default_factory=time.monotonic)

    IDENTITY: ClassVar = ("model", "id")

    def work(self) -> list[tuple[str, list[Any]]]:
        stems = sorted({stem for row in self.rows for stem in row.stems})
        stems += [stem for stem in TAUGHT if stem not in stems] if len(self.rows) == len(ROWS) else []
        return [("laws", [(stem, dtype) for stem in stems for dtype in DTYPES]), ("rows", list(self.rows))]

    def named(self, unit: str, part: Any) -> dict[str, str]:
        return {"id": part.id if isinstance(part, Row) else " ".join(part)}

    def measure(self, unit: str, parts: Sequence[Any]) -> Iterator[store.Line]:
        for part, found in zip(
            parts, self.judged(parts) if unit == "laws" else self.timed(parts), strict=True
        ):
            yield {"model": self.model, **self.named(unit, part), **found}

    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.start)

    def judged(self, parts: Sequence[tuple[str, str]]) -> Iterator[dict[str, Any]]:
        """The verdict of each method in each dtype. A process of
        its own judges it: most of the time is compiling kernels.
        """

        def one(part: tuple[str, str]) -> dict[str, Any]:
            why = self.laws(*part, self.place.device, self.left() - (1 - SHARE_OF_LAWS) * self.seconds)
            return {"law": part[0], "error": why or None}

        with ThreadPoolExecutor(max(1, min(14, (os.cpu_count() or 2) - 2))) as pool:
            yield from pool.map(one, parts)

    def timed(self, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
        """The result of each row. A row whose method breaks a law is not timed."""
        verdicts = stored(self.path)["laws"]
        ceiling = self.found(self.place)
        for index, row in enumerate(rows):
            left, broken = self.left(), [stem for stem in row.stems if verdicts.get(stem)]
            if broken or left < 5:
                status = f"not timed, laws fail: {', '.join(broken)}" if broken else "no time was left"
                one: dict[str, Any] = {"id": row.id, "title": row.title, "status": status, "arms": {}}
            else:
                share = max(left / (len(rows) - index), min(left, SECONDS_OF_A_ROW))
                one = run_row(row, self.place, ceiling, share, grace=min(GRACE, max(left - share, 5)))
            yield {
                "row": one,
                "ceilings": ceiling,
                "error": None if one["status"] == "measured" else one["status"],
            }

    def text(self, line: store.Line) -> str:
        if "law" in line:
            return f"{line['id']}: {line['error'] or 'every law holds'}"
        return (
            f"{line['id']:>7}  "
            f"{line['error'] or '{:.4g} us'.format(1e6 * line['row']['arms']['ours']['seconds']['p50'])}"
        )


def stored(path: Path) -> dict[str, Any]:
    """What the lines of a run say: the laws that each stem breaks, the ceilings, and the rows in the order
    of the table.
    """
    lines = list(store.read(path, Plan.identify).values())
    judged, rows = ([line for line in lines if kind in line] for kind in ("law", "row"))
    laws: dict[str, list[str]] = {line["law"]: [] for line in judged}
    for line in judged:
        laws[line["law"]] += [line["error"]] if line["error"] else []
    order = {name: place for place, name in enumerate(ROWS)}
    return {
        "laws": {stem: "; ".join(told) for stem, told in laws.items()},
        "ceilings": rows[-1]["ceilings"] if rows else {},
        "rows": [line["row"] for line in sorted(rows, key=lambda line: order.get(line["id"], len(order)))],
    }


def told_by_gpu(*fields: str) -> str:
    """What nvidia-smi says of its fields, such as clocks.sm; empty without it."""
    return output_of("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")


STATE = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")


def run(
    rows: Sequence[Row],
    place: Place,
    folder: Path,
    *,
    seconds: float = 60 * MINUTES - RESERVE,
    again: bool = False,
    **given: Any,
) -> dict[str, Any]:
    """Laws, ceilings, rows: a line of gpu.jsonl each, and gpu.json with all after each. `given` are other
    fields of the Plan.

    `again` forgets what an earlier call measured; so does another commit, GPU or version.
    """
    console, path = Console(stderr=True), folder / LINES
    made = {
        "schema": SCHEMA,
        **provenance(*PACKAGES),
        "gpu": told_by_gpu("name", "driver_version"),
        "dtype": str(place.dtype),
    }
    plan = Plan(json.dumps([made[name] for name in SAME]), rows, place, path, seconds, **given)
    made["gpu_before"] = told_by_gpu(*STATE)
    changed = made["commit"] == "unknown" or made["commit"].endswith("+")
    if (
        again
        or changed
        or plan.model not in {line["model"] for line in store.read(path, Plan.identify).values()}
    ):
        path.unlink(missing_ok=True)

    def write(**more: Any) -> dict[str, Any]:
        write_json(folder / RESULT, result := made | stored(path) | more)
        return result

    def advance(progress: store.Progress) -> None:
        console.print(progress.text, highlight=False, markup=False)
        write()

    store.run(plan, folder, name=LINES, advance=advance)
    return write(gpu_after=told_by_gpu(*STATE), seconds=time.monotonic() - plan.start)


def lines(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The columns of a table of all rows: a line for each arm,
    the first one ours, and for each peer that is missing.
    """
    for row in result["rows"]:
        yield {
            "row": row["id"],
            "arm": row["title"],
            "status": row["status"],
            "floor us": 1e6 * row.get("floor_s", math.nan),
        }
        for name, arm in row["arms"].items():
            times = (
                {f"{part} us": 1e6 * arm["seconds"][part] for part in ("p20", "p50", "p80")}
                if "seconds" in arm
                else {}
            )
            against = row.get("ratios", {}).get(name, {})
            yield {
                "arm": name,
                **arm,
                **times,
                "ratio": against.get("value", ""),
                "claimed": against.get("claimed", ""),
            }
        yield from (
            {"arm": name, "status": f"missing: {why}"} for name, why in row.get("missing", {}).items()
        )


def main(
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="The folder for gpu.json; needed, except with --list."),
    ] = None,
    rows: Annotated[str, typer.Option(metavar="ID,ID", help="Only these rows, such as 1,2b.")] = "",
    minutes: Annotated[float, typer.Option(help="The limit of the run, laws included.")] = MINUTES,
    again: Annotated[
        bool, typer.Option("--again", help="Measure again what an earlier call has measured.")
    ] = False,
    only_list: Annotated[
        bool, typer.Option("--list", help="Print the rows and their goals, and stop.")
    ] = False,
    rehearsal: Annotated[
        bool, typer.Option("--rehearse", help="Run the rows once and small, as compiled code without a GPU.")
    ] = False,
) -> None:
    """Time the kernels on a GPU. There is no --skip-laws: a method that breaks a law is not timed.

    The exit code is 1 if laws or rows fail, and 2 without a GPU or for bad options.
    """
    wanted = rows.split(",") if rows else list(ROWS)
    absent = " and ".join(name for name in NEEDED if importlib.util.find_spec(name) is None)
    refusals = {
        f"--rows: got {', '.join(set(wanted) - set(ROWS))}, wanted some of {', '.join(ROWS)}": not set(wanted)
        <= set(ROWS),
        f"--minutes: got {minutes:g}, wanted more than 1": not minutes > 1,
    }
    if rehearsal:
        refusals |= {f"--rehearse: {compiled.missing()}": bool(compiled.missing())}
    elif not only_list:
        refusals |= {
            "torch sees no GPU here; run it on a machine with one. --list shows what it would "
            "do": not torch.cuda.is_available(),
            "--out FOLDER is needed, where gpu.json goes": out is None,
            f"the laws are judged first, and {absent} is not installed": bool(absent),
        }
    for why, refused in refusals.items():
        require(not refused, why, typer.BadParameter)
    torch.set_grad_enabled(False)
    if rehearsal:
        right = True
        for found in rehearse([ROWS[name] for name in wanted]):
            right &= found[2] in (*GOOD, "needs a GPU")
            print("{:>7}  {:24} {}".format(*found), flush=True)
        raise typer.Exit(int(not right))
    if only_list or out is None:
        for row in (ROWS[name] for name in wanted):
            ratios = f", {row.goal_ratio:g} x {row.peer}" if row.goal_ratio else ""
            print(
                f"{row.id:>7}  {row.title}; goal "
                f"{f'{1e6 * row.goal_s:.4g} us' if row.goal_s else 'none in time'}{ratios}"
            )
        return
    # a compiler or a driver that hangs reacts to nothing else
    faulthandler.dump_traceback_later(60 * minutes - 5, exit=True)
    result = run([ROWS[name] for name in wanted], Place(), out, seconds=60 * minutes - RESERVE, again=again)
    faulthandler.cancel_dump_traceback_later()
    show(f"{result['gpu'] or 'no GPU'}, {result['date']}, commit {result['commit']}", list(lines(result)))
    bad = [
        row
        for row in result["rows"]
        if row["status"] != "measured" and not row["status"].startswith("no kernel yet")
    ]
    raise typer.Exit(int(any(result["laws"].values()) or bool(bad)))


if __name__ == "__main__":
    typer.run(main)
