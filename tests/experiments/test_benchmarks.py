"""The benchmarks themselves, without a GPU and without kvpress: every row small on a CPU, the statistics,
the files, the page.
"""

import contextlib
import functools
import itertools
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import typer
from conftest import tiny_llama
from tools import refused, says
from tools.reading import IDS

from benchmarks import contract_rows, corrections, costs, cpu, gpu, host, report, rows, timing
from benchmarks.row import NoKernel, Place, Row, Work, rows_apart
from evictionary.optimized import knorm
from evictionary.spec_tests.judge.law import judging_files

TINY = Place(device="cpu", dtype=torch.float32, shrink=512, heads=2, group=2, head_dim=16)
CEILINGS = {"copy_bytes_per_s": 4e12, "read_bytes_per_s": 4.4e12, "matmul_flops_per_s": 8e14}


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("row", gpu.ROWS.values(), ids=lambda row: row.id)
def test_every_row_is_right_and_timed_where_it_is_small(row: Row) -> None:
    result = gpu.run_row(row, TINY, CEILINGS, 20.0)
    work = row.build(TINY)
    assert {name: arm["status"] for name, arm in result["arms"].items()} == dict.fromkeys(
        work.arms, "measured"
    )
    assert all(arm.get("error", 0) < 1e-5 for arm in result["arms"].values())
    assert result["bytes"] > 0 and result["floor_s"] > 0 and result["arms"]["ours"]["seconds"]["count"] >= 6
    assert row.goal_ratio is None or any(name.startswith(row.peer) for name in [*work.arms, *work.missing])
    json.dumps(result, allow_nan=False)


def test_least_bytes_of_the_published_sizes() -> None:
    """The byte models at full size, against the arithmetic of the design: one layer's K of 131,072 tokens
    is 268 MB.
    """
    keys = 131_072 * 8 * 128 * 2
    wanted = {
        "1": 2 * keys * 1.25,
        "2": 2 * keys,
        "2b": keys,
        "3": 2 * keys,
        "3b": 4 * keys,
        "5": 2 * keys,
        "6": 2 * keys,
        "7": 2 * keys,
        "9": 2 * keys,
        "10": 2 * keys,
        "4": 8 * 131_072 * 5,
        "4-256": 256 * 131_072 * 5,
    }
    full = Place(device="meta")
    assert {name: gpu.ROWS[name].build(full).bytes for name in wanted} == pytest.approx(wanted, rel=0.01)


def work(call: Any = lambda x: x + x, **others: Any) -> Work:
    """A row whose right answer is twice its input; `others` are more arms."""
    return Work(
        make=lambda seed: (torch.ones(4),),
        arms={"ours": call, "peer": lambda x: 2 * x, **others},
        want=lambda inputs: (2 * inputs[0]).double().numpy(),
        read=lambda inputs, got: got,
        bytes=32,
    )


def twice(call: Any = lambda x: x + x, name: str = "0", stems: tuple[str, ...] = (), **others: Any) -> Row:
    return Row(name, "twice", stems, lambda place: work(call, **others))


def test_a_row_without_time_measures_ours_and_says_what_was_left_out() -> None:
    result = gpu.run_row(twice(), TINY, CEILINGS, 0.0)
    assert result["status"] == "measured" and result["missing"] == {"peer": "no time was left"}


@pytest.mark.parametrize(
    ("call", "status"),
    [
        (lambda x: 2.1 * x, "not timed, ours is wrong: error 0.05"),
        (lambda x: x * math.nan, "not timed, ours is wrong: error inf"),
        (lambda x: x[:2], "not timed, ours is wrong: error inf"),
        (lambda x: x.no_such_thing(), "not timed, ours is failed: AttributeError"),
    ],
)
def test_a_wrong_kernel_is_not_timed(call: Any, status: str) -> None:
    result = gpu.run_row(twice(call), TINY, CEILINGS, 1.0)
    assert result["status"].startswith(status)
    assert not any("seconds" in arm for arm in result["arms"].values())


def test_a_peer_that_fails_leaves_the_others() -> None:
    """One that cannot be called, one that is wrong, one that fails only when it is timed."""
    late = Mock(side_effect=itertools.chain([2 * torch.ones(4)], itertools.repeat(MemoryError("too large"))))
    result = gpu.run_row(twice(none=lambda: None, wrong=lambda x: 3 * x, late=late), TINY, CEILINGS, 5.0)
    assert {name: arm["status"].split(":")[0] for name, arm in result["arms"].items()} == {
        "ours": "measured",
        "peer": "measured",
        "none": "failed",
        "wrong": "wrong",
        "late": "failed",
    }
    assert set(result["ratios"]) == {"peer"} and result["shapes"] == [[4]]


def run(rows: list[Row], folder: Path, laws: Any = lambda *_: "", **options: Any) -> dict[str, Any]:
    """A run on the processor, with ceilings that are not measured."""
    return gpu.run(rows, TINY, folder, **{"laws": laws, "found": lambda place: CEILINGS, **options})


def test_a_kernel_that_does_not_exist_is_said_to_be_missing(tmp_path: Path) -> None:
    refused(lambda: TINY.ours("keydiff", "no_such_function"), error=NoKernel)
    given = [
        Row("a", "none", ("keydiff",), lambda place: work(place.ours("keydiff", "no_such_function"))),
        twice(name="b", stems=("lagkv",)),
        twice(name="c", stems=("keydiff",)),
    ]
    broken = {("lagkv", "float16"): "float16: LK-12 does not hold"}
    result = run(given, tmp_path / "folder", lambda *part: broken.get(part[:2], ""))
    assert result == json.loads((tmp_path / "folder" / "gpu.json").read_text(encoding="utf-8"))
    told = {"keydiff": "", "lagkv": "float16: LK-12 does not hold"}
    assert (result["laws"], result["ceilings"], result["schema"]) == (told, CEILINGS, gpu.SCHEMA)
    statuses = ["no kernel yet", "not timed, laws fail", "measured"]
    assert [row["status"].split(":")[0] for row in result["rows"]] == statuses
    assert result["commit"] and result["versions"]["torch"]
    assert [line["arm"] for line in gpu.lines(result)] == ["none", "twice", "twice", "ours", "peer"]
    says(report.page(tmp_path / "folder"), "no kernel yet", "laws fail: lagkv")


def test_a_second_call_goes_on_where_the_first_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Laws that held and rows that were measured are kept at the same commit, and only there."""
    built: list[str] = []
    asked: list[str] = []

    def laws(stem: str, *_: Any) -> str:
        asked.append(stem)
        return "no time was left" if stem == "stem 2" and len(asked) <= 6 else ""

    def call(commit: str = "0123456789ab", **options: Any) -> tuple[list[str], int, list[str]]:
        """The rows that are built, the laws that are asked, and the status of each row."""
        monkeypatch.setattr(
            gpu, "provenance", lambda *_: {"commit": commit, "versions": {}, "date": "2026-01-02"}
        )
        before = len(built), len(asked)
        given = [
            Row(name, "twice", (f"stem {name}",), lambda place, name=name: built.append(name) or work())
            for name in "12"
        ]
        rows = run(given, tmp_path, laws, **options)["rows"]
        return built[before[0] :], len(asked) - before[1], [row["status"] for row in rows]

    assert call() == (["1"], 6, ["measured", "not timed, laws fail: stem 2"])
    for commit, options, wanted in (
        ("0123456789ab", {}, (["2"], 3)),
        ("0123456789ab", {}, ([], 0)),
        ("0123456789ab", {"again": True}, (["1", "2"], 6)),
        ("fedcba987654", {}, (["1", "2"], 6)),
        *[("fedcba987654+", {}, (["1", "2"], 6))] * 2,
    ):
        assert call(commit, **options) == (*wanted, ["measured"] * 2)


def test_every_call_inserts_another_token_and_all_are_drawn_anew() -> None:
    built = gpu.ROWS["8"].build(TINY)
    inputs = built.make(0)
    seen = [(inputs[2].clone(), inputs[4].clone())]  # the new keys, and those of the cache
    for _ in range(rows.NEW_TOKENS + 1):
        built.arms["ours"](*inputs)
        seen.append((inputs[2].clone(), inputs[4].clone()))
    new_keys, keys = zip(*seen, strict=True)
    assert not torch.equal(new_keys[0][0], new_keys[0][1]) and not torch.equal(keys[1], keys[2])
    assert torch.equal(new_keys[0], new_keys[-2]) and not torch.equal(new_keys[0], new_keys[-1])


def test_calls_on_a_gpu_take_the_inputs_in_turn_and_say_how_they_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    testing = pytest.importorskip("triton.testing")
    seen: list[int] = []

    bench = Mock(side_effect=lambda run, **_: [run(), run(), run()])
    uncaptured = Mock(side_effect=RuntimeError("operation not permitted when stream is capturing"))
    refusing = Mock(side_effect=RuntimeError("called a synchronizing CUDA operation"))

    def timed(waits: bool, of_graph: Any, watch: Any = contextlib.nullcontext) -> tuple[list[float], str]:
        seen.clear()
        monkeypatch.setattr(gpu, "never_waiting", watch)
        monkeypatch.setattr(testing, "do_bench_cudagraph", of_graph)
        monkeypatch.setattr(testing, "do_bench", bench)
        measure, how = gpu.prepare(lambda x: (seen.append(x), 1000.0 * x)[1], [(1,), (2,)], Place(), waits)
        return measure(), how

    assert timed(False, bench) == ([1.0, 2.0, 1.0], "graph") and seen == [1, 2, 1, 2, 1, 2, 1]
    assert timed(False, uncaptured) == ([2.0, 1.0, 2.0], "events, not captured: RuntimeError")
    # what waits is never captured: torch would free no memory after it
    assert timed(False, bench, refusing) == ([1.0, 2.0, 1.0], "events, not captured: RuntimeError")
    assert timed(True, uncaptured) == ([1.0, 2.0, 1.0], "events, waits for the GPU")


def test_the_mathematics_is_computed_once_for_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    score = Mock(wraps=rows.keydiff.score)
    monkeypatch.setattr(rows.keydiff, "score", score)
    assert len(gpu.run_row(gpu.ROWS["2"], TINY, CEILINGS, 5.0)["arms"]) > 1 and score.call_count == 1


@pytest.mark.parametrize(("latency", "wanted"), [(False, 2e-6), (True, 1e-6)])
def test_a_goal_in_time_follows_the_ceilings_of_the_machine(latency: bool, wanted: float) -> None:
    slow = {name: value / 2 for name, value in gpu.H200.items()}
    result = gpu.run_row(replace(twice(), goal_s=1e-6, latency=latency), TINY, slow, 1.0)
    assert result["goal_s"] == pytest.approx(wanted)


def test_results_are_written_after_every_row(tmp_path: Path) -> None:
    def killed(place: Place) -> Work:
        assert len(json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))["rows"]) == 1
        raise KeyboardInterrupt

    refused(lambda: run([twice(), Row("1", "killed", (), killed)], tmp_path), error=KeyboardInterrupt)
    assert json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))["rows"][0]["status"] == "measured"


def test_a_peer_that_hangs_is_broken_off_and_the_others_are_timed() -> None:
    def hang(x: torch.Tensor) -> torch.Tensor:
        while True:
            x = x + 0

    result = gpu.run_row(twice(hangs=hang, **{"after it": lambda x: 2 * x}), TINY, CEILINGS, 1.0, grace=0.0)
    told = {"ours": "measured", "peer": "measured", "hangs": "failed: TimeoutError: not done after 1 s"}
    assert {name: arm["status"] for name, arm in result["arms"].items()} == told
    assert result["status"] == "measured" and result["missing"] == {"after it": "no time was left"}
    result = gpu.run_row(twice(hang), TINY, CEILINGS, 0.1, grace=0.1)
    assert result["status"].startswith("not timed, ours is failed: TimeoutError")


def test_the_laws_are_written_before_anything_else_can_fail(tmp_path: Path) -> None:
    broken = Mock(side_effect=RuntimeError("no memory"))
    refused(lambda: run([twice(stems=("lagkv",))], tmp_path, found=broken), error=RuntimeError)
    assert json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))["laws"] == {"lagkv": ""}


def test_the_judge_knows_the_methods_of_every_row_and_of_every_kernel() -> None:
    judged = {*gpu.TAUGHT, *(stem for row in gpu.ROWS.values() for stem in row.stems)}
    known, asked = (
        {path.stem.removeprefix("test_") for path in judging_files(stems=stems)} for stems in ((), judged)
    )
    kernels = {path.stem for path in (gpu.ROOT / "optimized" / "kernels").glob("*.py")}
    assert judged <= known and kernels & known <= asked


@pytest.mark.parametrize(
    ("stem", "seconds", "told"),
    [
        ("knorm", 120, "^$"),
        ("knorm", 0, "no time"),
        ("knorm", 0.1, "did not finish"),
        ("no_such_method", 120, "got 'no_such_method'"),
    ],
)
def test_the_laws_are_put_to_the_implementation(stem: str, seconds: float, told: str) -> None:
    """The real command, on a CPU, for the smallest method; what is not judged is not right."""
    assert re.search(told, gpu.broken_law(stem, "float32", "cpu", seconds))


def test_without_a_gpu_the_command_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(message: str, **named: Any) -> None:
        refused(lambda: gpu.main(**named), message, typer.BadParameter)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    told("no GPU", out=Path("nowhere"))
    told("--rows: got 99", rows="1,99")
    told("--minutes: got 0.5", only_list=True, minutes=0.5)
    gpu.main(only_list=True, rows="1,2b")
    assert capsys.readouterr().out.count("\n") == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    told("--out FOLDER is needed")
    monkeypatch.setattr(gpu, "NEEDED", ("pytest", "no_such_package"))
    told("no_such_package is not installed", out=Path("nowhere"))


def test_rows_apart_sees_rows_that_are_not_there() -> None:
    rows = torch.randn(10, 4, dtype=torch.float64)
    changed = rows * (torch.arange(10) != 3)[:, None]
    apart = [rows_apart(each, rows.numpy()) for each in (rows.flip(0), changed, rows[:9])]
    assert apart == [0, 0.1, math.inf]  # one of ten, wherever it stands among the others


FAST, SLOW, WIDE = (
    timing.Spread(0.9, 1.0, 1.1, 6),
    timing.Spread(1.8, 2.0, 2.2, 6),
    timing.Spread(1.1, 2.0, 3.0, 6),
)


@pytest.mark.parametrize(
    ("got", "wanted"),
    [
        (timing.spread([5.0, 1.0, 3.0, 2.0, 4.0, 6.0]), (2.0, 3.5, 5.0, 6)),
        (timing.spread([2.0]), (2.0, 2.0, 2.0, 1)),
        (timing.ratio(FAST, SLOW), (2.0, True)),
        (timing.ratio(SLOW, FAST), (0.5, True)),
        (timing.ratio(FAST, WIDE), (2.0, False)),  # claimed only where the intervals are apart
        (timing.exponent([1, 2, 4], [3, 6, 12]), pytest.approx(1)),
        (timing.exponent([1, 10], [1, 100]), pytest.approx(2)),
    ],
)
def test_quantiles_ratios_and_exponents(got: Any, wanted: Any) -> None:
    assert got == wanted


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: timing.spread([]), "values: got"),
        (lambda: timing.spread([1.0, math.nan]), "values: got"),
        (lambda: timing.exponent([1], [1]), "sizes: got"),
    ],
)
def test_what_has_no_statistics_is_refused(call: Any, told: str) -> None:
    refused(lambda: call(), told, ValueError)


def test_arms_take_turns_there_and_back() -> None:
    order: list[str] = []
    arms = {name: (lambda name=name: order.append(name) or [1.0, 3.0]) for name in "ABC"}  # type: ignore[func-returns-value]
    times = timing.interleaved(arms, 2, 5, end=0.0)
    assert "".join(order) == "ABCCBA" * 2 and times["B"] == timing.Spread(1.0, 2.0, 3.0, 8)
    order.clear()
    timing.interleaved(arms, 2, 5, end=math.inf)
    assert "".join(order) == "ABCCBA" * 5


def test_the_clock_of_the_cpu_benchmark() -> None:
    pair = cpu.Pair(lambda: torch.ones(8), lambda: torch.ones(2**18), lambda a, b: 0.0, 2**12, 2.0 * 1024**3)
    found = cpu.measure(pair, rounds=3, budget=0.0)
    # a product, which it does not compute
    assert found["share_of_floor"] == found["floor_s"] / found["ours_s"]["p50"] > 1
    assert found["ours_s"]["count"] == 4 and found["distance"] == 0 and found["kvpress_s"]["p50"] > 0
    assert (
        cpu.rise_of_memory(lambda: torch.ones(2**24))[0] in range(2**25, 2**28)
        or not Path("/proc/self/clear_refs").exists()
    )


def test_arguments_and_results_travel_to_the_environment_of_kvpress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "environment", lambda: sys.executable)
    assert cpu.in_kvpress("benchmarks.timing", "spread", [1.0, 2.0, 3.0]) == list(
        timing.spread([1.0, 2.0, 3.0])
    )


def test_the_constraints_leave_out_what_kvpress_needs_otherwise() -> None:
    assert cpu.constraints(
        "torch==2.13.0\ntransformers==5.23.0\n# a comment\nnumpy==2.4.6\nhuggingface_hub==2.4.0\n"
    ).splitlines() == ["torch==2.13.0", "numpy==2.4.6"]


def test_the_page_is_what_the_stored_results_say() -> None:
    assert report.PAGE.read_text(encoding="utf-8") == report.page()


def test_the_page_without_a_gpu_result_gives_the_command(tmp_path: Path) -> None:
    commands = ("python -m benchmarks.gpu --out benchmarks/results", "python -m benchmarks.cpu")
    says(report.page(tmp_path), "No GPU result is stored yet", "No CPU result is stored yet", *commands)


def test_the_page_tells_what_a_real_model_took(tmp_path: Path) -> None:
    result = {
        "model": "embedded", "machine": "a machine", "torch": "2", "transformers": "5",
        "dates": {"compression": "2026-01-02", "decoding": "2026-01-03", "blocks": "2026-01-04"},
        "tokens": 4096, "budget": 1024, "block": 512,
        "compression": [
            {"method": "reading the prompt", "seconds": 8.0, "share_of_prefill": 1.0},
            {"method": "keydiff", "seconds": 0.1, "share_of_prefill": 0.0125},
        ],
        "decoded": 8,
        "decoding": [
            {"cache": "ragged", "tokens": 2048, "seconds": 0.4, "ratio": 0.8, "ratio_lowest": 0.7,
            "ratio_highest": 0.9, "bytes": 2e6},
        ],
        "decoding_kvpress": [
            {"cache": "kvpress: tova", "tokens": 8192, "seconds": 0.8, "ratio": 1, "ratio_lowest": 1,
            "ratio_highest": 1, "bytes": 8e6},
        ],
        "blocks": [{"method": "tova", "prompt_tokens": 8192, "peak_bytes": 1e6, "full_bytes": 8e6,
        "share_of_full": 0.125}],
    }  # fmt: skip
    (tmp_path / "model.json").write_text(json.dumps(result))
    says(
        report.page(tmp_path),
        "| keydiff | 0.100 | 1.2% |",
        "| ragged | 2,048 | 20.0 | 0.80 | 0.70 | 0.90 | 2.0 |",
        "| kvpress: tova | 8,192 | 10.0 | 1.00 | 1.00 | 1.00 | 8.0 |",
        "| tova | 1.0 | 8.0 | 12.5% |",
        "8,192 tokens in blocks of 512, with a budget of 1,024",
    )


# the time of the processor


def test_a_launch_that_does_nothing_leaves_the_processors_time() -> None:
    """Kernels are taken and none of them runs: what a score would be is never written."""
    keys = torch.randn(1, 2, 8, 16)
    with host.launching_nothing(), torch.no_grad():
        assert (knorm.score(keys) == 0).all()
    assert (knorm.score(keys) < 0).all()


def test_a_finite_number_is_not_looked_for_as_on_a_gpu() -> None:
    with host.launching_nothing(), torch.no_grad():
        knorm.score(torch.full((1, 1, 2, 16), math.nan))
    with pytest.raises(ValueError, match="keys: got NaN"):
        knorm.score(torch.full((1, 1, 2, 16), math.nan))


def caches() -> list[str]:
    """The rows of a token in a cache."""
    return [f"cache {name}" for name in host.CACHES] + [f"captured {name}" for name in host.CAPTURED]


@pytest.mark.whole
def test_the_processors_time_is_measured_for_each_row_and_stored(tmp_path: Path) -> None:
    host.main(calls=2, run="before", out=tmp_path)
    host.main(calls=2, run="now", out=tmp_path)
    stored = json.loads((tmp_path / "host.json").read_text(encoding="utf-8"))
    timed = {row.id for row in [*rows.KERNEL_ROWS, *contract_rows.CONTRACT_ROWS]}
    for run in ("before", "now"):
        found = {row["row"]: row for row in stored[run]["rows"]}
        assert {*found} == timed | {*caches()}
        assert all(row["least_us"] > 0 for name, row in found.items() if name in timed)
    says(report.page(tmp_path), "| 18: KNorm: score; T = 131072 |", "a token and layer of a cache: momentkv")
    refused(
        functools.partial(host.main, run="later"),
        "--run: got 'later', wanted now or before",
        typer.BadParameter,
    )


def test_the_stored_times_of_the_processor_are_those_of_todays_rows() -> None:
    stored = json.loads((timing.RESULTS / "host.json").read_text(encoding="utf-8"))["now"]["rows"]
    timed = [row.id for row in [*rows.KERNEL_ROWS, *contract_rows.CONTRACT_ROWS]]
    assert [row["row"] for row in stored] == [*caches(), *timed]


# the costs of a token with each method


def measured_costs(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *methods: str, **named: Any
) -> dict[str, Any]:
    """What the command stores, of a tiny model and a prompt of 48 tokens."""
    monkeypatch.setattr(costs, "load_model", lambda name: (tiny_llama(num_hidden_layers=5), None))
    monkeypatch.setattr(costs.passkey, "make", lambda *_, **__: Mock(context_ids=IDS))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    costs.main(tokens=48, rounds=3, method=list(methods), out=folder, **named)
    return json.loads((folder / "costs.json").read_text(encoding="utf-8"))


def test_the_costs_of_methods_are_measured_stored_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = ("keydiff", "momentkv+ada_kv", "quest", "attention_matching")
    measured_costs(monkeypatch, tmp_path, *methods, run="before")
    measured_costs(monkeypatch, tmp_path, *methods)
    stored = measured_costs(monkeypatch, tmp_path, "keydiff", also=["prompt", "growth"])
    assert stored["now"]["commit"] and stored["now"]["versions"]["transformers"]
    for run in ("before", "now"):
        found = stored[run]["tokens"]["48"]["rows"]
        assert {row["method"] for row in found} == set(methods) and len(found) == len(methods)
        for row in found:
            decode = row["decode"]
            assert 0 < decode["low"] <= decode["high"] and decode["ms"] > 0
            assert 0 < decode["bytes"] <= 1.25
            assert ("growth" in row) == (run == "now" and row["method"] == "keydiff")
            # A row that is measured again has an origin of its own; the others keep theirs.
            assert ("made" in row) == (run == "now" and row["method"] == "keydiff")
    (part,) = costs.compared(stored)
    assert all(row["before"]["method"] == row["method"] for row in part["rows"])
    assert [bool(row["work"]) for row in part["rows"]] == [
        row["decode"]["ratio"] > costs.LIMIT for row in part["rows"]
    ]
    (tmp_path / "model.json").write_text((timing.RESULTS / "model.json").read_text(encoding="utf-8"))
    for text in (capsys.readouterr().out, report.page(tmp_path)):
        says(text, *(f"| {method} | " for method in methods), "| method | growth of a compression |")


def test_a_slow_method_fits_one_layer_and_the_others_hold_copies() -> None:
    model = tiny_llama(num_hidden_layers=3)
    with costs.Reader(model, IDS).compressed("attention_matching") as cache:
        first, *others = (layer.tensors() for layer in cache.layers)
    assert others and "bias" in first
    for other in others:
        assert all(torch.equal(other[name], tensor) for name, tensor in first.items())
        assert other["keys"].data_ptr() != first["keys"].data_ptr()


def test_every_method_that_decodes_has_a_stored_cost() -> None:
    """Now, and before; and above the limit the table says what takes the time."""
    stored = json.loads((timing.RESULTS / "costs.json").read_text(encoding="utf-8"))
    (part,) = costs.compared(stored)
    assert {row["method"] for row in part["rows"]} == set(costs.names())
    newer = {"keydiff+protect"}  # which the commit before did not have
    assert {row["method"] for row in part["rows"] if not row["before"]} == newer
    assert "not known" not in {row["work"] for row in part["rows"]}


def test_the_work_that_is_named_is_that_of_functions_that_exist() -> None:
    for told in costs.WORK.values():
        places = re.findall(r"`(\w+)` in\s+`([\w/]+\.py)`", told)
        assert places
        for function, path in places:
            assert f"def {function}(" in (timing.ROOT / path).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ({"method": ["no_such_method"]}, "--method: got no_such_method"),
        ({"also": ["no_such_part"]}, "--also: got no_such_part"),
        ({"run": "later"}, "--run: got later"),
    ],
)
def test_the_command_of_the_costs_refuses_what_it_does_not_know(
    named: dict[str, Any], told: str, tmp_path: Path
) -> None:
    refused(lambda: costs.main(out=tmp_path, **named), told, typer.BadParameter)


# the corrections of MomentKV: the table of docs/methods/momentkv_bounded.md


@pytest.mark.parametrize("kind", corrections.KINDS)
def test_the_promises_hold_on_drawn_steps(kind: Any) -> None:
    first = np.arange(corrections.LENGTH) < corrections.EVICTED
    evicted = np.broadcast_to(first, (corrections.AT_ONCE, 1, corrections.LENGTH))
    none, paper, nearest, certified = corrections.errors(*kind(np.random.default_rng(1)), evicted)
    assert (nearest <= paper + corrections.ROUNDING).all() and certified.mean() < none.mean()
    assert (certified <= none + corrections.ROUNDING).all()


def test_the_table_has_a_row_for_each_kind() -> None:
    rows = list(corrections.rows(steps=corrections.AT_ONCE))
    assert [row[0] for row in rows] == [kind.__name__ for kind in corrections.KINDS]
    assert {len(row) for row in rows} == {1 + len(corrections.COLUMNS)} == {9}
