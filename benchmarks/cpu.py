"""The torch path of `optimized` against kvpress on a CPU:
`python -m benchmarks.cpu [--out FOLDER] [--tokens 1024,4096]`.

Both score the same tensors in one process, one layer of Llama-3.1-8B: 8 KV heads and 32 query heads of 128
channels, batch 1, in float32 and bfloat16. kvpress needs another version of transformers than this project,
so the command makes its own environment (torch of `requirements/tested.txt`, kvpress and what it requires)
in the user's cache folder, once, and runs there.

The benchmark compares whole scores, from the same input tensors to the input of top-k. A press of kvpress
takes hidden states and an attention module; the module here projects with the identity, so the hidden states
are the queries, and the projection costs nothing. Expected Attention includes the statistics of the queries
and their averaging over RoPE on both sides. LagKV is `select` against ranks: both choose within partitions.
Compactor protects no token: with the default ones the last chunk is shorter, which kvpress 0.5.5 pads (law
CO-3). CriticalKV is `projected_norms` with an eighth of the output's channels: the attention that it weighs
comes from another paper than in kvpress. KVzap's surrogate is the linear one. In float32 the two results must
agree; in bfloat16 kvpress computes in bfloat16 and `optimized` in float32, so there they may differ.

The floor of a method is the larger of two times, both measured in the same run:
that of reading its inputs once, as many bytes in one tensor that is summed up, and
that of its multiplications in a float32 product of matrices; of a symmetric matrix
only one triangle counts. The share that we reach is the floor over our median.

The arms alternate (ours, kvpress, kvpress, ours); one call of each comes first and is not timed. Time is
processor time, which a busy machine disturbs less, or wall-clock time with more than one thread; memory is
the rise of the resident set during the call, result included.
"""

import ctypes
import gc
import json
import math
import os
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple

import typer

from benchmarks.timing import RESULTS, ROOT, exponent, interleaved, provenance, ratio, seconds, write_json

KVPRESS = "0.5.5"
TOKENS = (1024, 4096, 16384, 65536)
DTYPES = ("float32", "bfloat16")
KV_HEADS, QUERY_HEADS, HEAD_DIM = 8, 32, 128
WINDOW, KERNEL = 64, 5  # SnapKV's, as in kvpress
SKETCH, CHUNK = 48, 256  # Compactor's, as in kvpress
CHANNELS = HEAD_DIM * QUERY_HEADS // 8  # of W_o, for CriticalKV
SINKS, LAG = 4, 128  # LagKV's, as in kvpress
# The goals: how many times faster than kvpress, and the largest exponent of the growth in the number of
# tokens.
GOALS = {"keydiff": 3.0, "lagkv": 2.0, "expected_attention": 3.0} | dict.fromkeys(
    ("snapkv", "tova", "knorm", "q_filters", "compactor", "kvzap", "criticalkv"), 1.0
)
LARGEST_EXPONENT = 1.05
SIDES = ("ours", "kvpress")
ROUNDS = 30


class Pair(NamedTuple):
    """A method in both libraries, and the distance of the two results: a number that is small if they agree.

    bytes and flops are the least that any implementation reads and multiplies.
    """

    ours: Callable[[], Any]
    kvpress: Callable[[], Any]
    distance: Callable[[Any, Any], float]
    bytes: int
    flops: float = 0.0


def pairs(
    tokens: int, dtype: str, *, heads: tuple[int, int] = (QUERY_HEADS, KV_HEADS), head_dim: int = HEAD_DIM
) -> dict[str, Pair]:
    """Every method on the same tensors: `optimized` and the press of the same name."""
    import kvpress
    import torch

    from benchmarks.row import attention_module
    from evictionary.optimized import (
        compactor,
        criticalkv,
        expected_attention,
        keydiff,
        knorm,
        kvzap,
        lagkv,
        q_filters,
        snapkv,
        tova,
    )

    generator = torch.Generator().manual_seed(0)
    kind = getattr(torch, dtype)
    keys, values = (
        torch.randn(1, heads[1], tokens, head_dim, generator=generator).to(kind) for _ in range(2)
    )
    hidden_states = torch.randn(1, tokens, heads[0] * head_dim, generator=generator).to(kind)
    queries = hidden_states.view(1, tokens, heads[0], head_dim).transpose(1, 2)
    w_o, surrogate, along = (
        torch.randn(*shape, generator=generator).to(kind)
        for shape in (
            (heads[0], head_dim, CHANNELS),
            (1, heads[1], hidden_states.shape[2]),
            (1, heads[1], head_dim),
        )
    )
    bias = torch.zeros(1, heads[1], dtype=kind)
    module = attention_module(heads, head_dim)
    module.layer_idx, module.num_key_value_groups = 0, heads[0] // heads[1]
    module.k_proj = lambda hidden_states: keys.transpose(1, 2)
    module.config.head_dim, module.config.hidden_size = head_dim, CHANNELS
    module.o_proj = SimpleNamespace(weight=w_o.flatten(0, 1).T)
    # The queries count as already rotated: kvpress rotates them by an angle of 0.
    still = {
        "position_embeddings": (
            torch.ones(1, tokens, head_dim, dtype=kind),
            torch.zeros(1, tokens, head_dim, dtype=kind),
        )
    }

    def press(one: Any) -> Callable[[], Any]:
        return lambda: one.score(module, hidden_states, keys, values, None, still)

    q_filter_press, kvzap_press = kvpress.QFilterPress(), kvpress.KVzapPress(model_type="linear")
    q_filter_press.q_filters = -along  # stored with the other sign
    linear = torch.nn.Linear(hidden_states.shape[2], heads[1], dtype=kind)
    linear.weight, linear.bias = torch.nn.Parameter(surrogate[0]), torch.nn.Parameter(bias[0])
    kvzap_press.kvzap_model = SimpleNamespace(layers=[linear])

    def compact() -> Any:
        whole = {"sink_size": 0, "recent_size": 0, "chunk_size": CHUNK}
        torch.manual_seed(0)  # kvpress draws its sketch in each call
        sketch = torch.randn(1, heads[1], head_dim, SKETCH, dtype=kind) / math.sqrt(SKETCH)
        return compactor.score(queries, keys, values, keys, sketch, compression_ratio=0.5, **whole)

    def compact_in_kvpress() -> Any:
        torch.manual_seed(0)
        return press(kvpress.CompactorPress(0.5, sink_size_start=0, sink_size_end=0))()

    def expect() -> Any:
        statistics = expected_attention.query_statistics(queries)
        averaged = expected_attention.average_rope(*statistics, position=tokens)
        return expected_attention.score(keys, values, *averaged)

    def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
        return float((ours.double() - theirs.double()).abs().max() / ours.double().abs().max())

    def apart_before(protected: int) -> Callable[[Any, Any], float]:
        return lambda ours, theirs: apart(ours[..., :-protected], theirs[..., :-protected])

    def differing(kept: torch.Tensor, ranks: torch.Tensor) -> float:
        # the upper half of every partition, and the protected ones
        return float(((ranks >= 0.5) != kept).float().mean())

    products = 2.0 * heads[0] * tokens * head_dim  # of every query head with every key, for one query
    return {
        "keydiff": Pair(lambda: keydiff.score(keys), press(kvpress.KeyDiffPress()), apart, keys.nbytes),
        "lagkv": Pair(
            lambda: lagkv.select(keys, values, keep_ratio=0.5, sink_size=SINKS, lag_size=LAG),
            press(kvpress.LagKVPress(n_sink=SINKS, lag_size=LAG)),
            differing,
            2 * keys.nbytes,
        ),
        "expected_attention": Pair(
            expect,
            press(kvpress.ExpectedAttentionPress(n_sink=0, epsilon=0.02)),
            apart,
            queries.nbytes + 2 * keys.nbytes,
            2 * products * (head_dim + 1) / 2,
        ),
        "snapkv": Pair(
            lambda: snapkv.score(queries[:, :, -WINDOW:], keys, window_size=WINDOW, kernel_size=KERNEL),
            press(kvpress.SnapKVPress(window_size=WINDOW, kernel_size=KERNEL)),
            apart_before(WINDOW),
            keys.nbytes,
            WINDOW * products,
        ),
        "tova": Pair(
            lambda: tova.score(queries[:, :, -1:], keys),
            press(kvpress.TOVAPress()),
            apart_before(1),
            keys.nbytes,
            products,
        ),
        "knorm": Pair(lambda: knorm.score(keys), press(kvpress.KnormPress()), apart, keys.nbytes),
        "q_filters": Pair(lambda: q_filters.score(keys, along), press(q_filter_press), apart, keys.nbytes),
        "kvzap": Pair(
            lambda: kvzap.score(hidden_states, surrogate, bias),
            press(kvzap_press),
            apart,
            hidden_states.nbytes,
            2.0 * hidden_states.numel() * heads[1],
        ),
        "compactor": Pair(
            compact,
            compact_in_kvpress,
            apart,
            queries.nbytes + 2 * keys.nbytes,
            CHUNK * products + 4.0 * keys.numel() * SKETCH,
        ),
        "criticalkv": Pair(
            lambda: criticalkv.projected_norms(values, w_o),
            lambda: kvpress.CriticalKVPress.vwl1norm(values, module),
            apart,
            values.nbytes,
            CHANNELS * products,
        ),
    }


def floor(pair: Pair, clock: Callable[[], float]) -> float:
    """Seconds that the bytes and the multiplications of a pair take on this machine, the larger of the
    two: the least of twenty.
    """
    import torch

    source, square = torch.ones(pair.bytes // 4), torch.ones(1024, 1024)
    source.sum(), square @ square
    read = min(seconds(lambda: source.sum(), clock) for _ in range(20))
    product = min(seconds(lambda: square @ square, clock) for _ in range(20))
    return max(read, product * pair.flops / (2 * 1024**3))


def rise_of_memory(call: Callable[[], Any]) -> tuple[int, Any]:
    """Bytes by which the resident set rose during a call, at most (Linux only, elsewhere 0), and the
    result of the call.
    """
    try:
        gc.collect()
        # give freed memory back, so that the call cannot use it unseen
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        # reset the highest mark to the present one
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before = _status("VmRSS")
    except OSError:
        return 0, call()
    result = call()
    return max(0, _status("VmHWM") - before), result


def _status(name: str) -> int:
    line = next(
        line
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        if line.startswith(name)
    )
    return int(line.split()[1]) * 1024


def measure(
    pair: Pair, *, rounds: int, budget: float, clock: Callable[[], float] = time.process_time
) -> dict[str, Any]:
    """Memory, distance and time of both sides of a pair: two rounds at least, and more until `budget`
    seconds are over.
    """
    end = time.monotonic() + budget
    calls = dict(zip(SIDES, (pair.ours, pair.kvpress), strict=True))
    # also the call that warms up, and is not timed
    risen = {side: rise_of_memory(call) for side, call in calls.items()}
    distance = pair.distance(*(result for _, result in risen.values()))
    sizes = {f"{side}_bytes": risen.pop(side)[0] for side in SIDES}  # the results go before anything is timed
    arms = {side: lambda call=call: [seconds(call, clock)] for side, call in calls.items()}
    timed = interleaved(arms, 2, rounds, end)
    least = floor(pair, clock)
    return {
        "floor_s": least,
        "share_of_floor": least / timed["ours"].p50,
        **{f"{side}_s": times._asdict() for side, times in timed.items()},
        **sizes,
        "ratio": ratio(timed["ours"], timed["kvpress"])._asdict(),
        "distance": distance,
    }


# The environment
# ------------------------------------------------------------------------------------------------------------

# The pinned packages: the other constraints are for another version of transformers than kvpress needs.
PINNED = ("torch", "numpy", "triton")


def constraints(text: str) -> str:
    """The lines of requirements/tested.txt that the environment of kvpress keeps."""
    return "\n".join(line for line in text.splitlines() if line.split("==")[0] in PINNED) + "\n"


def environment() -> Path:
    """The Python of an environment with the torch of this
    project and with kvpress, made on the first call.
    """
    import platformdirs

    folder = Path(platformdirs.user_cache_dir("evictionary")) / f"kvpress-{KVPRESS}"
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    done = folder / "constraints.txt"
    packages = (f"kvpress=={KVPRESS}", "rich", "typer")
    wanted = f"# for {', '.join(packages)}\n" + constraints(
        (ROOT / "requirements" / "tested.txt").read_text(encoding="utf-8")
    )
    if done.exists() and done.read_text(encoding="utf-8") == wanted and python.exists():
        return python
    print(f"making an environment with kvpress {KVPRESS} in {folder} (once) ...", file=sys.stderr)
    venv.create(folder, with_pip=True, clear=True)
    pinned = folder / "pinned.txt"
    pinned.write_text(wanted, encoding="utf-8")
    install = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--constraint",
        str(pinned),
    ]
    # torch is installed first and alone: the later packages find it and do not install a newer one.
    subprocess.run([*install, "torch", "numpy"], check=True)
    subprocess.run([*install, *packages], check=True)
    pinned.rename(done)  # the environment is complete only now
    return python


def in_kvpress(module: str, function: str, *arguments: Any, threads: int = 1) -> Any:
    """What a function of this repository returns in the environment of kvpress; arguments and result
    travel as JSON.
    """
    call = "import importlib, json, sys; module, name, given = sys.argv[1:]"
    call += "; print(json.dumps(getattr(importlib.import_module(module), name)(*json.loads(given))))"
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    command = [str(environment()), "-c", call, module, function, json.dumps(arguments)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | variables, check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


# The command
# ------------------------------------------------------------------------------------------------------------


def benchmark(tokens: list[int], dtypes: list[str], threads: int, seconds_each: float) -> dict[str, Any]:
    """Measure every method at every size; runs in the environment of kvpress."""
    import torch

    made = provenance("torch", "kvpress", "transformers", "numpy")  # read now, before the files can change
    clock = time.process_time if threads == 1 else time.perf_counter
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    for pair in pairs(1024, dtypes[0]).values():
        pair.ours(), pair.kvpress()  # libraries are loaded on the first call, and would count as its memory
    methods: dict[str, dict[str, dict[str, Any]]] = {}
    for dtype in dtypes:
        for count in tokens:
            found = methods.setdefault(dtype, {}).setdefault(str(count), {})
            for name, pair in pairs(count, dtype).items():
                found[name] = measure(pair, rounds=ROUNDS, budget=seconds_each, clock=clock)
                distance = found[name]["distance"]
                # In bfloat16 kvpress rounds, and may choose other tokens: there the distance is stored and
                # not judged.
                if dtype == "float32" and not distance < 1e-3:
                    raise RuntimeError(
                        f"{name}, {count} tokens: ours and kvpress are {distance:.2g} apart, wanted less "
                        "than 1e-3"
                    )
                print(line(dtype, count, name, found[name]), file=sys.stderr, flush=True)
    exponents = {
        dtype: {
            name: {
                side: exponent(tokens, [by[str(count)][name][f"{side}_s"]["p50"] for count in tokens])
                for side in SIDES
            }
            for name in by[str(tokens[0])]
        }
        for dtype, by in methods.items()
        if len(tokens) > 1
    }
    return {
        "schema": "evictionary/benchmark-cpu/1",
        "floors": True,
        **made,
        "threads": threads,
        "clock": clock.__name__,
        "heads": [QUERY_HEADS, KV_HEADS],
        "head_dim": HEAD_DIM,
        "tokens": tokens,
        "dtypes": dtypes,
        "goals": {"ratio": GOALS, "exponent": LARGEST_EXPONENT},
        "methods": methods,
        "exponents": exponents,
    }


def line(dtype: str, count: int, name: str, one: dict[str, Any]) -> str:
    """One measurement in words."""
    times = (
        f"{side} {one[f'{side}_s']['p50'] * 1e3:.4g} ms, {one[f'{side}_bytes'] / 2**20:.1f} MiB"
        for side in SIDES
    )
    claimed = "" if one["ratio"]["claimed"] else " (intervals overlap)"
    reached = f"{one['share_of_floor']:.0%} of the floor"
    return (
        f"{dtype:9} {count:6} {name:18} {'; '.join(times)}; {one['ratio']['value']:.2f} x{claimed}; {reached}"
    )


def main(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where cpu.json goes.")] = RESULTS,
    tokens: Annotated[str, typer.Option(help="Sizes of the cache, separated by commas.")] = ",".join(
        map(str, TOKENS)
    ),
    dtypes: Annotated[str, typer.Option(help="float32, bfloat16 or both.")] = ",".join(DTYPES),
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 1,
    seconds: Annotated[float, typer.Option(help="Time for each method at each size.")] = 4.0,
) -> None:
    """Measure the torch path of `optimized` beside kvpress."""
    counts = [int(count) for count in tokens.split(",")]
    if min(counts) < SINKS + 2 * LAG:
        least = f"at least {SINKS + 2 * LAG}: LagKV has nothing to choose from below"
        raise typer.BadParameter(f"--tokens: got {min(counts)}, wanted {least}")
    result = in_kvpress(
        "benchmarks.cpu", "benchmark", counts, dtypes.split(","), threads, seconds, threads=threads
    )
    write_json(out / "cpu.json", result)
    for dtype, by in result["exponents"].items():
        for name, growth in by.items():
            goal = "" if growth["ours"] <= LARGEST_EXPONENT else f", goal {LARGEST_EXPONENT} missed"
            print(
                f"{dtype:9} {name:18} grows as T^{growth['ours']:.2f} (kvpress "
                f"T^{growth['kvpress']:.2f}){goal}"
            )


if __name__ == "__main__":
    typer.run(main)
