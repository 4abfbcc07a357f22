"""Where a model is loaded: what is asked for is there before anything is loaded, processes share the GPUs, a
divided model measures what a whole one does. There is no GPU here: torch is told of some.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tools import failed, invoke, refused, run, saved
from tools.pages import ROOT, blocks

from docs_build.pages import PROGRAM
from evictionary import store
from evictionary.evaluation import run as evaluation
from evictionary.models.load import load
from evictionary.models.loading import Loading, fewest

COMMANDS = {
    "run": ("--prompt-file", "{text}", "--question", "What?"),
    "demo": (),
    "calibrate": ("--text-file", "{text}", "--output", "{folder}/new.calibration"),
    "eval": ("--methods", "keydiff", "--output", "{folder}/eval"),
    "study": ("--methods", "keydiff", "--output", "{folder}/study"),
    "claims": ("--papers", "keydiff", "--output", "{folder}/claims"),
}
LOADED = [
    name
    for name, command in PROGRAM.commands.items()
    if "--model" in {o for p in command.params for o in p.opts}
]


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let torch see so many GPUs."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: count > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)


def seats() -> Callable[[int], Callable[[str], bool]]:
    """The seats of a machine, as `take` of each of its processes."""
    taken: dict[str, int] = {}
    return lambda process: lambda seat: taken.setdefault(seat, process) == process


@pytest.mark.parametrize("processes", [1, 4, 7])
@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_a_process_takes_the_next_gpu(gpus: int, processes: int) -> None:
    take = seats()
    names = [f"GPU-{index}" for index in range(gpus)]
    assert [fewest(names, take(each)) for each in range(processes)] == [
        each % gpus for each in range(processes)
    ]


def test_a_process_that_sees_its_own_gpu_first_has_it() -> None:
    """dask-cuda shows each worker all GPUs, its own first; others show a worker one alone."""
    take, names = seats(), ["a", "b", "c"]
    assert [fewest(names[each:] + names[:each], take(each)) for each in range(3)] == [0, 0, 0]
    assert [fewest([name], seats()(0)) for name in names] == [0, 0, 0]


WORKER = """
import sys, types, torch
torch.cuda.device_count = lambda: 2
torch.cuda.get_device_properties = lambda index: types.SimpleNamespace(uuid=f"GPU-{index}")
from evictionary.models.loading import Loading
print(Loading(*sys.argv[1:]).in_worker().device, flush=True)
sys.stdin.read()
"""


def test_processes_share_the_gpus_and_one_that_died_leaves_its_own(tmp_path: Path) -> None:
    with ExitStack() as stack:

        def worker(*asked: str) -> tuple[Any, str]:
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", WORKER, *asked],
                    env=os.environ | {"TMPDIR": str(tmp_path)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            assert process.stdout is not None
            return process, process.stdout.readline().strip()

        first, second, third = worker(), worker("cuda"), worker()
        assert [first[1], second[1], third[1]] == ["cuda:0", "cuda:1", "cuda:0"]
        second[0].kill()
        second[0].wait()
        assert [worker()[1], worker("cuda:0")[1], worker("cpu")[1]] == ["cuda:1", "cuda:0", "cpu"]


def test_a_machine_with_one_device_needs_no_seat(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a worker that was started with a CUDA_VISIBLE_DEVICES of its own has its cuda:0."""
    for count in (0, 1):
        with_gpus(monkeypatch, count)
        assert Loading().in_worker() == Loading()
    with_gpus(monkeypatch, 8)
    assert Loading(device_map="auto").in_worker() == Loading(device_map="auto")


@dataclass(frozen=True)
class Told(evaluation.ModelPlan):
    """Lines that say on which device a worker would have loaded the model."""

    seats: str = ""
    IDENTITY = ("model", "unit")

    def work(self) -> list[tuple[int, list[int]]]:
        return [(unit, [unit]) for unit in range(6)]

    def named(self, unit: int, part: int) -> dict[str, int]:
        return {"unit": unit}

    def in_worker(self) -> "Told":
        torch.cuda.device_count = lambda: 2
        torch.cuda.get_device_properties = lambda index: SimpleNamespace(uuid=f"GPU-{index}")
        tempfile.tempdir = self.seats
        return super().in_worker()  # type: ignore[return-value]

    def measure(self, unit: int, parts: Any) -> Iterator[store.Line]:
        yield {**self.common(), "unit": unit, "device": self.loading.device, "process": os.getpid()}

    def text(self, line: store.Line) -> str:
        return str(line["unit"])


def test_the_processes_of_a_run_are_on_different_gpus(tmp_path: Path) -> None:
    lines = store.run(Told("m", seats=str(tmp_path)), tmp_path / "out", jobs=2)
    places = {line["process"]: line["device"] for line in lines}
    assert all(places[line["process"]] == line["device"] for line in lines)
    assert sorted(places.values()) == [f"cuda:{index}" for index in range(len(places))]
    assert os.getpid() not in places


@pytest.mark.parametrize(
    ("gpus", "jobs", "asked", "told"),
    [
        (0, 4, Loading(), ""),
        (4, 1, Loading(), ""),
        (4, 4, Loading("cpu"), ""),
        (1, 2, Loading(), "2 processes, each with a model of its own, share cuda:0: take fewer --jobs"),
        (4, 4, Loading(), "4 processes, each with a model of its own, on 4 GPUs: each alone"),
        (4, 6, Loading("cuda"), "6 processes, each with a model of its own, on 4 GPUs: 2 at most share one"),
        (4, 6, Loading("cuda:3"), "share cuda:3"),
    ],
)
def test_what_processes_do_with_the_gpus_is_said(
    gpus: int, jobs: int, asked: Loading, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(monkeypatch, gpus)
    said = asked.shared_out(jobs)
    assert (told in said) if told else not said


def test_processes_do_not_divide_a_model_each() -> None:
    assert not Loading(device_map="auto").shared_out(1)
    refused(lambda: Loading(device_map="auto").shared_out(2), "jobs: got 2 with device_map 'auto', wanted 1")


# What cannot be had
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", LOADED)
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--device", "cuda"), r"device: got 'cuda', wanted cpu: .*"),
        (("--dtype", "float8"), r"dtype: got 'float8', wanted one of auto, float32, bfloat16, float16"),
        (("--device", "cpu", "--device-map", "auto"), r"device: got 'cpu' beside device_map 'auto'"),
    ],
)
def test_every_command_refuses_before_it_loads(
    command: str, options: tuple[str, ...], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("AutoTokenizer", "AutoModelForCausalLM", "AutoConfig"):
        monkeypatch.setattr(
            f"transformers.{kind}.from_pretrained", lambda *given, **named: pytest.fail("loaded")
        )
    monkeypatch.setattr("evictionary.models.embedded.install", lambda: pytest.fail("installed"))
    monkeypatch.chdir(tmp_path)
    text = saved(tmp_path / "text.txt", "a text")
    words = [word.format(text=text, folder=tmp_path) for word in COMMANDS[command]]
    assert told.partition(": .*")[0] in failed(command, *words, *options, code=2)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"device": "auto"}, "device: got 'auto', wanted cpu, cuda, .*--device-map divides"),
        ({"device": "0"}, "device: got '0'"),
        ({"device": "gpu"}, "device: got 'gpu', wanted cpu"),
        ({"device": "meta"}, "device: got 'meta', wanted cpu"),
        ({"device": "cpu:1"}, "device: got 'cpu:1', wanted cpu"),
        ({"dtype": "int8"}, "dtype: got 'int8'"),
        ({"dtype": torch.float64}, "dtype: got 'float64'"),
        ({"device_map": "cuda:1"}, "device_map: got 'cuda:1', wanted one of auto.*--device names one"),
        ({"device_map": {"model": "cpu", "lm_head": 0}}, "device_map: got 'cuda:0', wanted cpu"),
        ({"device_map": {"model": "cpu", "lm_head": "tape"}}, "device_map: got 'tape', wanted cpu"),
        ({"revision": "v2"}, "revision: got 'v2' for .*, which has one alone"),
        ({"revision": " "}, "revision: got ' ', wanted a name"),
        ({"attn": "fastest"}, "model: got .* with attn 'fastest'"),
    ],
)
def test_what_cannot_be_had_is_named(asked: dict[str, Any], told: str, model_folder: Path) -> None:
    refused(lambda: load(str(model_folder), **asked), told)


def test_a_machine_with_gpus_says_which(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 8)
    refused(
        lambda: Loading("cuda:9").require_here(),
        "device: got 'cuda:9', wanted cpu, cuda, or cuda:0 to cuda:7$",
    )
    Loading("cuda:7").require_here()
    with_gpus(monkeypatch, 0)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    refused(lambda: Loading("cuda").require_here(), "torch finds no GPU here, with CUDA_VISIBLE_DEVICES=''")
    monkeypatch.setattr("evictionary.models.loading.find_spec", lambda name: None)
    refused(lambda: Loading(device_map="auto").require_here(), "without accelerate, wanted it: pip install")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"model": [1]}'])
def test_a_file_that_divides_nothing_is_refused(content: str, tmp_path: Path) -> None:
    path, text = saved(tmp_path / "split.json", content), saved(tmp_path / "text.txt", "a text")
    told = failed("run", "--prompt-file", text, "--question", "What?", "--device-map", path, code=2)
    assert f"--device-map: got {path}" in told and "wanted a JSON file with a device for each module" in told


def test_a_device_that_is_full_is_named(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any, **named: Any) -> Any:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free. Of the allocated "
            "memory 9 is something else."
        )

    monkeypatch.setattr("torch.nn.Module.to", full)
    text = saved(tmp_path / "text.txt", "a text")
    told = failed("run", "--model", model_folder, "--prompt-file", text, "--question", "What?", code=1)
    assert (
        "GPU 0 has 1.00 GiB free. --dtype bfloat16, --device-map auto" in told
        and "allocated memory" not in told
    )


# What is had
# ---------------------------------------------------------------------------------------------------------


def plan_for(folder: Path, **changes: Any) -> evaluation.Plan:
    settings: dict[str, Any] = {
        "methods": [
            (name, {}) for name in ("keydiff", "expected_attention", "snapkv+ada_kv", "keydiff+moments")
        ],
        **{"tasks": ["copy"], "lengths": [400], "seeds": [1], "ratios": [0.5]},
    }
    return evaluation.Plan(model=str(folder), **settings | changes)


def test_a_folder_has_one_type_of_numbers_and_any_devices(model_folder: Path, tmp_path: Path) -> None:
    plain = plan_for(model_folder, methods=[("keydiff", {})])
    half = replace(plain, loading=Loading(dtype="bfloat16"))
    lines = store.run(half, tmp_path / "half")
    assert {(line["device"], line["dtype"]) for line in lines} == {("cpu", "bfloat16")}
    assert {line["bytes_before"] for line in lines} == {
        line["bytes_before"] // 2 for line in store.run(plain, tmp_path / "plain")
    }
    for first, other, held in (("half", plain, "with dtype bfloat16"), ("plain", half, str(model_folder))):
        refused(
            lambda first=first, other=other: store.run(other, tmp_path / first),
            rf"output: .* holds the results of .*{held}, wanted .* for {other.subject(other.common())}$",
        )
    path = tmp_path / "plain" / store.RESULTS
    older = [json.loads(line) for line in path.read_text().splitlines()]
    for line in older[1:]:  # of before there was a choice, or measured elsewhere
        line["device"] = "cuda:5"
    for name in ("loading", "device", "dtype"):
        del older[0][name]
    store.write(path, older)
    on_cpu = replace(plain, loading=Loading("cpu"))
    assert store.run(on_cpu, path.parent, advance=lambda at: pytest.fail("measured again")) == older


def test_a_process_has_room_for_one_model(model_folder: Path) -> None:
    evaluation.loaded.cache_clear()
    first = evaluation.loaded(str(model_folder), Loading())
    assert evaluation.loaded(str(model_folder), Loading()) is first
    assert evaluation.loaded(str(model_folder), Loading(dtype="bfloat16"))[0].dtype == torch.bfloat16
    assert evaluation.loaded.cache_info().currsize == 1


DIVIDED = {
    **{"model.embed_tokens": "disk", "model.layers.0": "cpu", "model.layers.1": "disk"},
    **{"model.norm": "cpu", "lm_head": "disk", "model.rotary_emb": "cpu"},
}


def test_a_divided_model_measures_what_a_whole_one_does(model_folder: Path, tmp_path: Path) -> None:
    plan = plan_for(model_folder, tasks=["copy", "perplexity_decoding"])
    divided = replace(plan, loading=Loading(device_map=DIVIDED))
    whole, found = store.run(plan, tmp_path / "whole"), store.run(divided, tmp_path / "divided")
    assert {line["error"] for line in found} == {None}
    assert {line["device"] for line in found} == {"cpu, disk"}
    apart = {"seconds", "device", "perplexity"}
    same = [
        [{name: line[name] for name in line.keys() - apart} for line in lines] for lines in (whole, found)
    ]
    assert same[0] == same[1]
    numbers = [[line["perplexity"] for line in lines if "perplexity" in line] for lines in (whole, found)]
    assert numbers[1] == pytest.approx(numbers[0], rel=1e-5)


@pytest.mark.parametrize("division", ["auto", "file"])
def test_the_command_divides_a_model(division: str, model_folder: Path, tmp_path: Path) -> None:
    text = saved(tmp_path / "text.txt", "The keeper of the lighthouse wrote a book about it. " * 8)
    path = saved(tmp_path / "split.json", json.dumps(DIVIDED))
    common = (
        "run",
        "--model",
        model_folder,
        "--prompt-file",
        text,
        "--question",
        "Who?",
        "--method",
        "keydiff",
    )
    told = [
        invoke(*common, "--max-new-tokens", 4, "--json", *more)
        for more in ((), ("--device-map", path if division == "file" else "auto"))
    ]
    assert [each.exit_code for each in told] == [0, 0]
    whole, divided = (json.loads(each.stdout) for each in told)
    assert divided["answers"] == whole["answers"]


# The page
# ---------------------------------------------------------------------------------------------------------

SRUN = """#!/bin/bash
trap 'kill $(jobs -p)' TERM
"$@" &
"$@" &
wait
"""


ASKED = "--dtype bfloat16 --lengths 4000 --samples 20"
SCRIPTS = ["one GPU", "eight shards", "a Slurm array", "by hand", "Slurm"]


@pytest.mark.parametrize(
    "index",
    [pytest.param(index, marks=[pytest.mark.slow] * (index in (1, 2, 4))) for index in range(5)],
    ids=SCRIPTS,
)
def test_the_scripts_of_the_page_measure(index: int, model_folder: Path, tmp_path: Path) -> None:
    """With two workers or shards on a CPU, another port, one
    method, and a stand-in for srun that runs its command twice.
    """
    scripts = blocks(ROOT / "docs" / "many_gpus.md", "bash")
    assert [ASKED in each for each in scripts] == [True, True, True, False, False]
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    script = scripts[index].replace("8786", str(port)).replace("0 1 2 3 4 5 6 7", "0 1")
    script = script.replace("1 2 3 4 5 6 7 8", "1 2").replace("/8", "/2").replace("of-8", "of-2")
    script = script.replace(ASKED, "--dtype bfloat16 --lengths 600 --methods keydiff --tasks copy")
    saved(tmp_path / "bin" / "srun", SRUN).chmod(0o755)
    (tmp_path / "path" / "or").mkdir(parents=True)
    (tmp_path / "path" / "or" / "hub-name").symlink_to(model_folder)
    paths = (tmp_path / "bin", Path(sys.executable).parent, os.environ["PATH"])
    if "#SBATCH --array=1-8" in script:  # what sbatch does, and what the page says to type then
        saved(tmp_path / "job", script)
        page = (ROOT / "docs" / "many_gpus.md").read_text()
        assert "`evictionary join measured/*-of-8`" in page
        script = (
            "for id in 1 2; do SLURM_ARRAY_TASK_ID=$id bash -e job; done; evictionary join measured/*-of-2"
        )
    run("bash", "-e", "-c", script, cwd=tmp_path, PATH=":".join(map(str, paths)))
    lines = store.read(tmp_path / "measured" / store.RESULTS, evaluation.Plan.identify).values()
    assert len({line["seed"] for line in lines}) == 5 and {line["error"] for line in lines} == {None}
