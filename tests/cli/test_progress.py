"""What a command says of itself while it works: on standard error, with a terminal and without one."""

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tools import ROOT, as_json, invoke, judge, printed, python, refused, saved, says

from evictionary import progress
from evictionary.methods import catalogue
from evictionary.methods.resolve import resolve
from evictionary.models import names
from evictionary.progress import Doing, doing


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> tuple[Doing, Clock, list[str]]:
    """What is being done since 0 s, its clock, and the lines that it tells."""
    monkeypatch.setattr(progress, "FIRST", 2.0)
    clock, lines = Clock(), list[str]()
    return Doing("loading", lines.append, clock), clock, lines


def test_what_takes_less_than_two_seconds_says_nothing(watched: tuple[Doing, Clock, list[str]]) -> None:
    now, clock, lines = watched
    for clock.now in (0.5, 1.9):
        now.tick()
        now("reading", 1, 2)
    assert lines == []
    clock.now = 2.0
    now.tick()
    assert lines == ["reading (1 of 2, 2 s left)"]


def test_a_line_says_how_much_is_done_and_the_time_left(watched: tuple[Doing, Clock, list[str]]) -> None:
    now, clock, lines = watched
    clock.now = 3.0
    now.tick()
    assert lines == ["loading (3 s)"]
    clock.now = 4.0
    read = 0.0
    now("reading", lambda: read, 1165, " tokens")
    clock.now, read = 9.0, 233.0
    now.tick()
    assert lines[1:] == ["reading (233 of 1,165 tokens, 20 s left)"]
    clock.now = 20.0
    now("first", 0, 10)
    clock.now = 26.0  # the time of all the steps counts, not that of this one
    now("third", 2, 10)
    assert lines[-1] == "third (2 of 10, 24 s left)"
    clock.now = 40.0
    now("fourth", 3, 10, left=7200)
    assert lines[-1] == "fourth (3 of 10, 2.0 h left)"


def test_lines_are_seconds_apart_and_few_in_hours(watched: tuple[Doing, Clock, list[str]]) -> None:
    now, clock, lines = watched
    told = []
    for clock.now in range(36_000):
        before = len(lines)
        now.tick()
        told += [clock.now] * (len(lines) - before)
    gaps = [later - earlier for earlier, later in itertools.pairwise(told)]
    assert (told[0], min(gaps), max(gaps)) == (2, 5, 60) and len(told) < 700


def test_what_is_done_inside_is_shown_and_then_what_was_before(
    told: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with doing("outside") as now:
        now("a", 1, 2)
        with doing("inside"):
            now("b", 1, 3)
        assert now.step.text == "a" and now.step.total == 2
        assert list(progress.tracked("xy", 2, "items")) == ["x", "y"] and now.step.text == "a"
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" (")[0] for line in lines] == [
        "outside",
        "a",
        "inside",
        "b",
        "items",
        "items",
        "items",
        "items",
    ]


def test_a_closed_standard_error_ends_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FIRST", 0.0)
    lines: list[str] = []

    def tell(line: str) -> None:
        lines.append(line)
        raise BrokenPipeError

    Doing("loading", tell).tick()
    assert lines == ["loading (0 s)"]


@pytest.fixture
def asks(model_folder: Path, tmp_path: Path) -> list[object]:
    """`evictionary run` with the tiny model, a short text and a question."""
    text = saved(tmp_path / "text.txt", "The baker sold eleven loaves of bread on Monday. " * 3)
    return [
        *("run", "--model", model_folder, "--prompt-file", text, "--max-new-tokens", 4),
        *("--question", "How many?"),
    ]


def lines_of(*arguments: object) -> list[str]:
    """What a command says on standard error."""
    done = invoke(*arguments)
    assert done.exit_code in (0, 1), done.output
    return [line for line in done.stderr.splitlines() if line.strip()]


def test_run_says_what_auto_takes_before_it_reads(told: None, asks: list[object]) -> None:
    said = lines_of(*asks)
    order = [
        "loading the model",
        "auto: keydiff+ada_kv+moments",
        "reading the prompt",
        "answering question 1",
    ]
    places = [next(place for place, line in enumerate(said) if part in line) for part in order]
    assert places == sorted(places)
    assert re.fullmatch(r"full cache: reading the prompt \(0 of [\d,]+ tokens\)", said[-2])
    assert json.loads(invoke(*asks, "--json").stdout)["note"].startswith("auto: ")  # nothing of it is there
    assert [line for line in lines_of(*asks, "--quiet") if not line.startswith("auto")] == []


@pytest.mark.parametrize(("readings", "often"), [(1, "once"), (2, "twice")])
def test_auto_says_how_often_the_prompt_is_read_and_what_another_number_costs(
    asks: list[object], readings: int, often: str
) -> None:
    found = as_json(*asks, "--readings", readings)
    assert found["readings"] == resolve(found["method"]).readings() == readings
    other = f"--readings {3 - readings} takes it"
    says(found["note"], f"the model reads the prompt {often}. At 50% removed it cost", other)
    assert found["method"] in found["note"] and "auto" not in printed(*asks)


@pytest.mark.parametrize("method", [*catalogue.names(), "keydiff+ada_kv+moments", "snapkv+cake"])
def test_a_method_reads_a_prompt_as_often_as_it_says(model_folder: Path, method: str) -> None:
    import torch

    from evictionary.cache.evicting_cache import EvictingCache
    from evictionary.models.load import load

    model, _ = load(str(model_folder))
    cache = EvictingCache(model, method, budget=20)  # some try the model with a few tokens first
    read: list[int] = []
    model.base_model.layers[0].register_forward_hook(lambda *given: read.append(given[1][0].shape[1]))
    with torch.no_grad():
        model(torch.arange(40)[None] + 3, **cache.argument)
    assert read == [40] * resolve(method).readings()


def test_a_calibration_file_spares_kvzap_the_second_reading() -> None:
    assert [resolve("kvzap").readings(each) for each in (None, {"calibration": "file"})] == [2, 1]
    assert resolve("kvzip").readings({"calibration": "file"}) == 2


def test_the_layers_of_a_cache_count_what_is_read() -> None:
    from evictionary.cache.layers import EvictingLayer
    from evictionary.cli.run import _tokens_read

    def after(*pairs: tuple[int, int]) -> Any:
        layers = [EvictingLayer() for _ in pairs]
        for layer, (seen, evicted_at) in zip(layers, pairs, strict=True):
            layer.seen, layer.evicted_at = seen, evicted_at
        return SimpleNamespace(layers=layers)

    once, twice = after((40, 40), (0, 0)), after((40, 40), (80, 0))
    assert _tokens_read(once, 40, 1)() == 20
    assert _tokens_read(twice, 40, 2)() == 60  # both layers once, and one of two a second time


# A short call of each command that may take seconds, and what it says that it is doing.
CALLS = {
    "demo --model {model} --output {tmp}/r.html --methods keydiff --ratios 0.5 --depths 0.5 --tokens 300": [
        "loading the libraries",
        "loading the model",
        "prompt 1 of 1: keydiff, removed: 50% (1 of 2, ",
        "writing the report",
    ],
    "eval --model {model} --output {tmp}/out --methods keydiff --ratios 0.5 --tasks passkey7 --samples 1": [
        "loading the libraries",
        "loading the model",
        "keydiff (2 of ",
        "writing the report",
    ],
    "calibrate --model {model} --text-file {tmp}/text.txt --output {tmp}/c --train-gates 1": [
        "loading the libraries",
        "loading the model",
        "reading the text (0 of ",
        "the first step",
    ],
    "export {tmp}/folder": ["loading the libraries"],
    "contract keydiff.score": ["loading the laws"],
    "new keydiff.score --folder {tmp}/new": ["loading the laws"],
    "vectors --output {tmp}/vectors --method knorm": ["loading the laws", "(0 of "],
    "vectors --check {tmp}/absent": ["comparing the files"],
    "tasks {tmp}/tasks --format kernelbench": ["writing the tasks"],
    "start keydiff --work {tmp}/work": ["loading the assignment"],
    "check keydiff --work {tmp}/begun": [
        "judging",
        "The anchor is the mean of the unit keys (0 of 6)",
        " (1 of 6, ",
    ],
    "gradebook {tmp}": ["reading the grades"],
}


@pytest.mark.parametrize("call", CALLS)
def test_each_command_says_what_it_is_doing(
    told: None, model_folder: Path, tmp_path: Path, call: str
) -> None:
    saved(tmp_path / "text.txt", "The baker sold eleven loaves of bread on Monday. " * 9)
    if "begun" in call:
        invoke("start", "keydiff", "--work", tmp_path / "begun")
    done = invoke(*call.format(model=model_folder, tmp=tmp_path).split())
    places = [done.stderr.find(part) for part in CALLS[call]]
    assert min(places) >= 0 and places == sorted(places), done.output
    says(done.stdout, never=CALLS[call][:1])


def test_a_terminal_has_a_bar_and_standard_output_the_result_alone(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    result = tmp_path / "result.txt"
    command = [sys.executable, "-m", "evictionary", "contract", "keydiff.score"]
    environment = os.environ | {"TERM": "xterm"}
    with (
        result.open("w") as out,
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=theirs),
    ):
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # the other end is closed
            while part := os.read(ours, 2**16):
                shown += part
    os.close(ours)
    assert b"loading the laws" in shown and b"\x1b[2K" in shown  # and it is erased
    assert result.read_text().startswith("def score(keys") and "loading" not in result.read_text()


# Names of models
# ---------------------------------------------------------------------------------------------------------


def test_a_hub_that_is_not_there_is_asked_once_and_told_in_one_sentence() -> None:
    """The address is one of this machine, where nobody answers."""
    program = "from evictionary.models.names import require_model; require_model('owner/embeded')"
    offline = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0"}
    told = python("-c", program, code=1, **offline).stderr
    says(told, "model: got 'owner/embeded'", "the hub cannot be reached (", never=["Retrying", "retry"])


@pytest.mark.parametrize(
    ("cause", "answered"),
    [
        (ConnectionRefusedError(111, "refused"), False),
        (TimeoutError("slow"), False),
        (ValueError("404"), True),
    ],
)
def test_only_a_hub_that_cannot_be_reached_is_given_up(
    monkeypatch: pytest.MonkeyPatch, cause: Exception, answered: bool
) -> None:
    asked: list[str] = []

    def ask(url: str) -> None:
        asked.append(url)
        raise RuntimeError(str(cause)) from cause

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", ask)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(names, "_is_stored", lambda name: False)
    names._unreached.cache_clear()
    if answered:
        names.require_model("owner/name")
    else:
        refused(lambda: names.require_model("owner/name"), "the hub cannot be reached")
        refused(lambda: names.require_model("owner/name"), "no earlier download of that name is here")
        monkeypatch.setattr(names, "_is_stored", lambda name: True)
        assert names.located("owner/name")[:2] == ("owner/name", True)
    assert len(asked) == 1
    names._unreached.cache_clear()


def test_offline_mode_is_told_without_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    names._unreached.cache_clear()
    refused(lambda: names.require_model("owner/name"), "HF_HUB_OFFLINE is set")
    names._unreached.cache_clear()


def test_a_typo_of_a_folder_or_of_embedded_gets_a_hint(tmp_path: Path) -> None:
    (tmp_path / "llama-3").mkdir()
    assert names.hint(f"{tmp_path}/lama-3") == f" (did you mean {tmp_path}/llama-3?)"
    assert [names.hint(name) for name in ("embeded", "Embedded")] == [" (did you mean embedded?)"] * 2
    assert names.hint("owner/quite_another") == names.hint("./no/such/model") == ""


@pytest.mark.whole
def test_a_quiet_verdict_leaves_standard_error_empty() -> None:
    """Libraries of the judged code, Triton's among them, have nothing to say of what lives at the end."""
    done = judge("optimized", "--method", "knorm", "--dtype", "float32", "--quiet")
    assert done.stdout.splitlines()[-1].startswith("PASS")
    assert done.stderr == ""
