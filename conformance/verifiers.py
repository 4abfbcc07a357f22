"""Wrong answers in front of two benchmarks of generated kernels: `python -m conformance.verifiers` writes
verifiers.json, which docs/verify.md shows.

The tasks are those that `evictionary tasks` writes. An answer is a planted mistake of a task's
function, a right variant, or an exploit of exploits.toml. The benchmarks' own functions
compare it with the reference at their own settings, on a CPU. KernelBench draws five inputs
and allows 1e-4, absolute and relative together; its static checker reads the file of an
exploit first. FlashInfer-Bench draws three inputs and allows an error of 1e-2, absolute or
relative. What they say of time is not asked. What `evictionary verify` says is in the tests.

`python -m conformance.verifiers --read` has FlashInfer-Bench read every task and run its workload instead.
"""

import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import tomllib
import traceback
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import torch
import typer

from conformance.borrowed import FETCHED, folder_of, take
from conformance.wild import ROOT, Source, bring
from evictionary.classroom import bundle
from evictionary.classroom.tasks import Task, tasks, write
from evictionary.spec_tests.judge.degenerate import MATHEMATICS
from evictionary.spec_tests.judge.outcome import TimedOut, outcome, time_limit
from evictionary.spec_tests.proof.asking import laws_for
from evictionary.spec_tests.proof.planted import Mutant, load_controls, load_mutants
from evictionary.store import put

HERE = Path(__file__).parent
RESULTS = HERE / "verifiers.json"
EXPLOITS: dict[str, dict[str, Any]] = tomllib.loads((HERE / "exploits.toml").read_text(encoding="utf-8"))
# Right files; docs/classroom/transcript.md shows the steps to the first.
RIGHT = ROOT / "docs" / "classroom" / "transcript" / "3_right.py"
BASES = EXPLOITS.pop("base") | {"numpy": RIGHT.read_text(encoding="utf-8")}
SECONDS, BYTES = 30, 16 * 2**30  # for an exploit that hangs, or takes all memory
KERNELBENCH = Source(
    name="kernelbench",
    title="KernelBench",
    url="https://github.com/ScalingIntelligence/KernelBench",
    licence="MIT",
    commit="423217d9fda91e0c2d67e4a43bf62f96f6d104f1",
    files={
        "src/kernelbench/eval.py": "b42ce1268ec64ee7274db307ab98945c1e868792b54689554014b28c41787ee6",
        "src/kernelbench/kernel_static_checker.py": (
            "2fcfd82082d36d49ce00e26d78d43847f090d699eb5ddc8db7afe1acb9646565"
        ),
    },
    methods={},
)
PACKAGES = (
    "flashinfer-bench==0.1.2", "docstring-parser", "pydantic", "pydantic-core", "annotated-types",
    "typing-inspection", "apache-tvm-ffi",
)  # fmt: skip
INSTALLED = FETCHED / "flashinfer_bench"

Answer = Callable[..., torch.Tensor]


def fetch_kernelbench() -> None:
    """Bring its files, once, below build/wild."""
    given = os.environ.get("WILD_KERNELBENCH")
    bring(KERNELBENCH, Path(given) if given else None)


def fetch_flashinfer() -> None:
    """Bring the package, once, below build/wild, where it can be imported."""
    if not INSTALLED.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(INSTALLED)]
        subprocess.run([*pip, *PACKAGES], check=True)
    sys.path.append(str(INSTALLED))


@cache
def _kernelbench() -> SimpleNamespace:
    """KernelBench's functions; as a package they import clients of services."""
    from pydantic import BaseModel

    names = (
        "KernelExecResult", "_process_input_tensor", "get_error_name", "get_tolerance_for_precision",
        "register_and_format_exception", "run_and_check_correctness", "set_seed",
    )  # fmt: skip
    given = {"BaseModel": BaseModel, "traceback": traceback}
    return take("kernelbench", "src/kernelbench/eval.py", *names, **given)


def by_kernelbench(task: Task, problem: dict[str, Any], answer: Answer) -> bool:
    """What KernelBench's `run_and_check_correctness` says, in float32."""
    new = type("ModelNew", (torch.nn.Module,), {"forward": lambda self, *given: answer(*given)})()
    check = _kernelbench().run_and_check_correctness
    cpu = torch.device("cpu")
    return bool(check(problem["Model"](), new, problem["get_inputs"], {}, 5, device=cpu).correctness)


def by_flashinfer(task: Task, problem: dict[str, Any], answer: Answer) -> bool:
    """What FlashInfer-Bench's `DefaultEvaluator` says;
    numbers such as a budget are those of KernelBench's file.
    """
    from flashinfer_bench.bench.config import BenchmarkConfig
    from flashinfer_bench.bench.evaluators.default import DefaultEvaluator
    from flashinfer_bench.compile.runnable import Runnable, RunnableMetadata
    from flashinfer_bench.data import Definition, Workload

    of = task.definition()
    inputs = {
        name: {"type": "random"} if isinstance(value, torch.Tensor) else {"type": "scalar", "value": value}
        for name, value in zip(of["inputs"], problem["get_inputs"](), strict=True)
    }
    axes = {name: task.sizes[name] for name, axis in of["axes"].items() if axis["type"] == "var"}
    workload = Workload.model_validate({"uuid": "one", "axes": axes, "inputs": inputs})
    definition, settings = Definition.model_validate(of), BenchmarkConfig(profile_baseline=False)
    right = DefaultEvaluator.build_baseline(definition, workload, settings, "cpu")
    about = RunnableMetadata(
        build_type="python", definition_name="d", solution_name="s", destination_passing_style=False
    )
    _, wrong = DefaultEvaluator.check_correctness(
        definition, Runnable(answer, about), right.inputs, right.outputs, settings, "", "cpu"
    )
    return wrong is None


BENCHMARKS = {"KernelBench": by_kernelbench, "FlashInfer-Bench": by_flashinfer}


def accepted(task: Task, answer: Answer) -> list[str]:
    """The benchmarks that take an answer for correct."""
    problem: dict[str, Any] = {}
    exec(task.kernelbench(), problem)
    with (
        patch("torch.cuda.synchronize"),
        open(os.devnull, "w") as silent,
        redirect_stdout(silent),
        redirect_stderr(silent),
    ):
        return [name for name, says in BENCHMARKS.items() if says(task, problem, answer)]


def answer_of(function: Callable[..., Any], library: str, task: Task) -> Answer:
    """A function of NumPy arrays or torch tensors as one of tensors; numbers are given by name."""

    def answer(*given: Any) -> torch.Tensor:
        arrays = [each for each in given if isinstance(each, torch.Tensor)]
        pairs = zip(task.inputs, given, strict=True)
        named = {one.name: each for one, each in pairs if not isinstance(each, torch.Tensor)}
        if library == "torch":
            found = function(*arrays, **named)
        else:
            numbers = function(*(each.double().numpy() for each in arrays), **named)
            found = torch.from_numpy(np.ascontiguousarray(numbers))
        return found.float() if found.is_floating_point() else found

    return answer


def source_of(exploit: dict[str, Any], calls: int = 5) -> str:
    """The file of an exploit: what stands above the right file, that file, and what stands below it. One
    that waits for so many calls counts `calls`.
    """
    stem, name = exploit.get("method", "keydiff.score").split(".")
    base = BASES[exploit.get("base", "numpy")] if stem == "keydiff" else bundle.bundled(stem)
    below = f"\n\nimport numpy as np\n\nright = {name}\n{exploit.get('after', '')}\n"
    return f"{exploit.get('before', '')}\n{base}{below}".replace("AT_FIRST", str(calls))


def _judge_exploit(exploit: dict[str, Any], task: Task, file: Path) -> None:
    """Write down who accepts an exploit; nothing is written where it ends the process."""
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    sys.path.append(str(INSTALLED))
    text, scope, checker = source_of(exploit), dict[str, Any](__name__="answer"), dict[str, Any]()
    exec(compile(text, "answer.py", "exec"), scope)
    found = accepted(task, answer_of(scope["score"], exploit.get("base", "numpy"), task))
    path = folder_of("kernelbench") / "src/kernelbench/kernel_static_checker.py"
    exec(path.read_text(encoding="utf-8"), checker)
    if not checker["validate_kernel_static"](text, backend="", precision="fp32")[0]:
        found = [name for name in found if name != "KernelBench"]
    put(file, json.dumps(found))


def of_exploits(task: Task) -> Iterator[tuple[str, list[str]]]:
    """Who accepts each exploit of keydiff.score, each in a process of its own."""
    start = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, exploit) in enumerate(EXPLOITS.items()):
            if "method" not in exploit:
                file = Path(folder) / f"{number}.json"
                process = start.Process(target=_judge_exploit, args=(exploit, task, file))
                process.start()
                process.join(SECONDS)
                process.kill()
                yield name, json.loads(file.read_text(encoding="utf-8")) if file.exists() else []


def of_functions(answers: dict[str, Any], of: dict[str, Task]) -> Iterator[tuple[str, list[str]]]:
    """Who accepts planted mistakes or right variants."""
    for name, each in answers.items():
        task = of[each.of]
        with suppress(TimedOut), time_limit(SECONDS):  # some are plain loops
            yield name, accepted(task, answer_of(each.function, each.array_library, task))


def is_shown_by_mathematics(mutant: Mutant) -> bool:
    """Whether a law of mathematics kills a mistake: of bad input and of degenerate input nobody asks here."""
    own = (law for law in laws_for(mutant, mutant.killed_by) if law.kind == MATHEMATICS)
    return any(outcome(law, mutant.implementation())[0] == "killed" for law in own)


def read() -> None:
    """Have FlashInfer-Bench read every task, and run its reference on its workload."""
    from flashinfer_bench.bench.utils import gen_inputs, load_safetensors
    from flashinfer_bench.data import TraceSet

    with tempfile.TemporaryDirectory() as there:
        folder = Path(there)
        written = write("flashinfer-bench", folder)
        found = TraceSet.from_path(there)
        for name, definition in found.definitions.items():
            (trace,) = found.workloads[name]
            tensors = load_safetensors(definition, trace.workload, folder)
            inputs = gen_inputs(definition, trace.workload, "cpu", tensors)
            scope: dict[str, Any] = {}
            exec(definition.reference, scope)
            answers = scope["run"](*inputs)
            answers = answers if isinstance(answers, tuple) else (answers,)
            got = [(tuple(each.shape), str(each.dtype).partition(".")[2]) for each in answers]
            shapes = definition.get_output_shapes(trace.workload.axes)
            dtypes = [each.dtype.value for each in definition.outputs.values()]
            wanted = [*zip(map(tuple, shapes), dtypes, strict=True)]
            if got != wanted:
                raise SystemExit(f"{name}: got {got}, wanted {wanted}")
            print(f"{name}: {len(definition.reference)} characters", file=sys.stderr, flush=True)
    print(f"flashinfer-bench read and ran {len(found.definitions)} of {len(written)} tasks")


ASKED = (
    "ada_kv.select", "gvote.select", "h2o.score", "h2o.select", "keydiff.score", "knorm.score", "lagkv.score",
    "lagkv.select", "selection.top_k", "streaming_llm.score", "tova.score",
)  # fmt: skip
"""The functions of which both benchmarks are asked: wrong answers to them take half an hour."""


def main(
    only_read: Annotated[
        bool, typer.Option("--read", help="Have FlashInfer-Bench read and run every task instead.")
    ] = False,
) -> None:
    """Ask both benchmarks of every answer."""
    fetch_flashinfer()
    if only_read:
        return read()
    fetch_kernelbench()
    of = {task.path: task for task in tasks(("float32",)) if task.path in ASKED}
    variants = {
        name: each
        for name, each in load_controls().items()
        if each.of in of and each.max_length is None and "float32" in each.dtypes
    }
    mistakes = {
        name: each for name, each in load_mutants().items() if each.of in of and is_shown_by_mathematics(each)
    }
    versions = {
        "KernelBench": KERNELBENCH.commit,
        "FlashInfer-Bench": PACKAGES[0].partition("==")[2],
        "torch": torch.__version__,
    }
    found: dict[str, Any] = {
        "versions": versions,
        "date": datetime.now(UTC).date().isoformat(),
        **{kind: {} for kind in ("exploits", "mistakes", "right variants")},
    }
    for kind, rows in (
        ("right variants", of_functions(variants, of)),
        ("exploits", of_exploits(of["keydiff.score"])),
        ("mistakes", of_functions(mistakes, of)),
    ):
        for name, benchmarks in rows:
            found[kind][name] = benchmarks
            print(
                f"{kind}: {name}: {', '.join(benchmarks) or 'refused by both'}", file=sys.stderr, flush=True
            )
            put(RESULTS, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
