"""The evaluation: resumable without loss, the same whoever
computes it, honest about failures, and its reports.
"""

import html
import json
import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tools import as_json, invoke, printed, refused, saved, without_seconds
from tools.pages import pictures_of

from evictionary import store
from evictionary.cli import evaluate as cli_eval
from evictionary.evaluation import pages, report as eval_report, run as evaluation, tasks
from evictionary.evaluation.run import Plan
from evictionary.models.load import load

NAMES = ["passkey7", "copy"]


def plan_for(model: Path, **changes: Any) -> Plan:
    """Twelve measurements: two prompts, each with the full
    cache, a budget and a ratio of KeyDiff, and random eviction.
    """
    settings: dict[str, Any] = {
        "methods": [("keydiff", {})],
        "tasks": NAMES,
        "lengths": [600],
        "seeds": [1],
        "ratios": [0.5],
        "budgets": [40],
    }
    return Plan(model=str(model), **{**settings, **changes})


@pytest.fixture(scope="module")
def finished(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[store.Line]]:
    """A folder with the results of the plan, in one go, and its lines."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, store.run(plan_for(model_folder), folder)


def test_the_full_cache_alone_when_no_method_is_asked(model_folder: Path) -> None:
    plan = replace(plan_for(model_folder), methods=[("full", {})])
    assert [setting.method for setting in plan.settings()] == ["full"]


def test_every_measurement_has_a_line(finished: tuple[Path, list[store.Line]]) -> None:
    folder, lines = finished
    assert [json.loads(text) for text in (folder / "results.jsonl").read_text().splitlines()] == lines
    for name in NAMES:
        mine = [line for line in lines if line["task"] == name]
        tokens = mine[0]["tokens"]
        assert [
            tuple(line[key] for key in ("method", "ratio", "budget", "tokens_kept")) for line in mine
        ] == [
            ("full", 0.0, None, tokens),
            *(
                (method, *amount)
                for method in ("keydiff", "random", "random_protected")
                for amount in ((0.5, None, tokens // 2), (None, 40, 40))
            ),
        ]
        for line in mine:
            assert line["bytes_after"] * tokens == line["bytes_before"] * line["tokens_kept"]
            assert line["error"] is None and 0 <= line["partial"] <= 1
            assert line["versions"] == evaluation.versions()


@pytest.mark.slow
def test_a_dask_cluster_of_two_workers_finds_the_same(
    finished: tuple[Path, list[store.Line]], model_folder: Path, tmp_path: Path
) -> None:
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        lines = store.run(plan_for(model_folder), tmp_path, dask=cluster.scheduler_address)
        measured_there = client.run(
            lambda: sys.modules["evictionary.evaluation.run"].loaded.cache_info().currsize
        )
    assert list(measured_there.values()) == [1, 1]
    assert without_seconds(lines) == without_seconds(finished[1])


def test_a_method_that_fails_is_recorded_and_tried_again(model_folder: Path, tmp_path: Path) -> None:
    mine = saved(tmp_path / "mine.py", "def score(keys):\n    raise RuntimeError('not [yet]')\n")
    output = tmp_path / "out"
    common = [
        *("eval", "--model", model_folder, "--methods", f"{mine},keydiff", "--ratios", 0.5),
        *("--tasks", "passkey7", "--lengths", 600, "--samples", 1, "--output", output),
    ]
    done = invoke(*common, "--json")
    assert done.exit_code == 1, done.output
    found = json.loads(done.stdout)
    assert [(row["method"], row["failed"], row["prompts"]) for row in found["rows"]] == [
        ("full", 0, 1),
        (str(mine), 1, 0),
        ("keydiff", 0, 1),
        ("random", 0, 1),
        ("random_protected", 0, 1),
    ]
    message = "score in mine.py raised RuntimeError at mine.py, line 2: not [yet]"
    assert found["failures"] == [{"label": str(mine), "error": message, "count": 1}]
    assert f"failed {mine}, 1 times: {message}" in done.stderr
    assert "failed" in (output / "table.md").read_text()
    scores = []
    for sign in (1, -1):  # an edited file is measured anew
        mine.write_text(f"def score(keys):\n    return {sign} * keys.sum(-1)\n")
        assert printed(*common, "--format", "markdown").startswith("## 600 tokens")
        lines = store.read(output / "results.jsonl", Plan.identify).values()
        scores += [line for line in lines if line["method"] == str(mine)]
    assert len(lines) == 5 and scores[0]["source"] != scores[1]["source"]


@pytest.mark.parametrize(("traits", "fails"), [("", True), ("TRAITS = {'own_budget'}\n", False)])
@pytest.mark.parametrize("name", ["mine.py", "mine.py+moments"])
def test_a_cache_that_did_not_shrink_as_asked_has_no_score(
    model_folder: Path, tmp_path: Path, name: str, traits: str, fails: bool
) -> None:
    """A method that keeps everything, or a token too many,
    is refused, unless it says that it sets its own budget.
    """
    plan = plan_for(
        model_folder, methods=[(str(tmp_path / name), {})], tasks=["passkey7"], ratios=[], budgets=[40]
    )
    for kept in ("length", "budget + 1", "budget"):
        chosen = f"np.broadcast_to(np.arange(length) < {kept}, keys.shape[:3])"
        select = f"def select(keys, length, budget):\n    return {chosen}\n"
        mine = saved(tmp_path / "mine.py", f"import numpy as np\n{traits}{select}")
        (line,) = (line for line in store.run(plan, tmp_path / "out") if line["method"].startswith(str(mine)))
        stored = line["tokens"] if kept == "length" else 41
        told = f"the cache stores {stored} of {line['tokens']} tokens in each head, where 40 were asked for"
        if fails and kept != "budget":
            assert f"{told}; a method" in line["error"] and "exact" not in line
        else:
            assert line["error"] is None


@pytest.mark.parametrize("options", [{}, {"lag_size": 32}, {"lag_size": 32, "keep_ratio": 0.9}])
@pytest.mark.parametrize("name", ["lagkv", "lagkv+pyramid_kv"])
def test_what_a_partition_keeps_whole_is_no_failure(
    model_folder: Path, tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    plan = plan_for(model_folder, methods=[(name, options)], tasks=["passkey7"], ratios=[0.5, 0.95])
    assert [line["error"] for line in store.run(plan, tmp_path) if line["method"] == name] == [None] * 3


def test_more_methods_join_the_results(
    finished: tuple[Path, list[store.Line]], model_folder: Path, tmp_path: Path
) -> None:
    store.write(tmp_path / store.RESULTS, finished[1])
    told = Mock()
    lagkv = plan_for(model_folder, methods=[("lagkv", {"lag_size": "16"})], tasks=["copy"], budgets=[])
    for plan, count in ((plan_for(model_folder), 14), (lagkv, 15)):
        assert len(store.run(plan, tmp_path, advance=told)) == count
    texts = [call.args[0].text for call in told.call_args_list]
    assert texts == ["copy, 600 tokens, seed 1: lagkv (lag_size=16)"], "what is there is measured again"


def test_compositions_and_methods_of_every_kind(model_folder: Path, tmp_path: Path) -> None:
    # ragged, captured states, decoding
    names = ["gvote", "expected_attention", "snapkv+ada_kv", "keydiff+moments", "momentkv"]
    plan = plan_for(model_folder, methods=[(name, {}) for name in names], tasks=["copy"], budgets=[])
    lines = store.run(plan, tmp_path)
    assert [line["error"] for line in lines] == [None] * 8
    assert all(0 < line["bytes_after"] < line["bytes_before"] for line in lines if line["method"] != "full")


@torch.no_grad()
def perplexity(model: Any, ids: torch.Tensor, count: int) -> float:
    """The perplexity of the last `count` of ids [1, T], in one forward over all of them."""
    logits = model(ids).logits[0, -count - 1 : -1]
    return float(torch.nn.functional.cross_entropy(logits, ids[0, -count:]).exp())


def test_a_text_that_goes_on_has_a_perplexity(model_folder: Path, tmp_path: Path) -> None:
    names = ["perplexity", "perplexity_decoding"]
    methods: list[tuple[str, dict[str, Any]]] = [("keydiff", {}), ("gvote", {}), ("lagkv", {"lag_size": 8})]
    lines = store.run(
        plan_for(model_folder, methods=methods, tasks=names, lengths=[140], seeds=[0, 1], ratios=[]), tmp_path
    )
    assert [line["error"] for line in lines] == [None] * len(lines)
    full = {(line["task"], line["seed"]): line["perplexity"] for line in lines if line["method"] == "full"}
    model, tokenizer = load(str(model_folder))
    for seed in (0, 1):
        prompt = tasks.get("perplexity").make(tokenizer, 140, seed)
        text = torch.cat([prompt.context_ids, prompt.question_ids, prompt.continuation], dim=1)
        wanted = pytest.approx(perplexity(model, text, 64), rel=1e-3)
        assert [full[name, seed] for name in names] == [wanted, wanted]
    evicted = {
        (line["task"], line["seed"]): line["perplexity"]
        for line in lines
        if (line["method"], line["budget"]) == ("keydiff", 40)
    }
    # the second one evicts while it decodes
    assert evicted["perplexity", 0] != evicted["perplexity_decoding", 0]
    rows = eval_report.summarise(lines)
    row = next(row for row in rows if row["method"] == "full" and row["task"] == "perplexity")
    assert row["perplexity"] == pytest.approx((full["perplexity", 0] * full["perplexity", 1]) ** 0.5)
    assert f"(ppl {row['perplexity']:.3g})" in eval_report.markdown(rows)


def test_a_line_without_a_score_is_no_measurement(finished: tuple[Path, list[store.Line]]) -> None:
    line = finished[1][1]
    Plan.identify(line)
    for name in evaluation.SCORED:
        without = {key: value for key, value in line.items() if key != name}
        refused(lambda without=without: Plan.identify(without), name, KeyError)
        refused(lambda name=name: Plan.identify(line | {name: None}), "a score is missing", ValueError)


def test_reports(finished: tuple[Path, list[store.Line]], tmp_path: Path) -> None:
    # two lengths, and one measurement that failed
    longer = [line | {"length": 900} for line in finished[1]]
    lost = ("exact", "partial", "bytes_after", "answer")
    failed = {name: value for name, value in longer[1].items() if name not in lost} | {"error": "<no>"}
    found = eval_report.write([*finished[1], longer[0], failed, *longer[2:]], tmp_path)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    pictures = {f"{name}.{kind}" for name in ("heatmap", "scores") for kind in ("png", "svg")}
    assert written.keys() == {"report.html", "summary.json", "table.md", *pictures}
    assert json.loads(written["summary.json"]) == found and written["scores.png"].startswith(b"\x89PNG")
    page, table = written["report.html"].decode(), written["table.md"].decode()
    assert pictures_of(tmp_path / "report.html") == 3 and "&lt;no&gt;" in page
    assert re.findall("^##.*$", table, re.MULTILINE) == ["## 600 tokens", "## 900 tokens"]
    assert "\n| keydiff | 40 tokens kept |" in table
    answers = {line["answer"] for line in finished[1] if line["task"] == "passkey7" and line["answer"]}
    assert any(f"<td>{html.escape(answer)}</td>" in page.replace("&#39;", "&#x27;") for answer in answers)
    # the same results draw the same file
    assert pages.drawn(eval_report.scores_figure(found["rows"]), "svg") == written["scores.svg"]


def test_means_are_over_the_prompts() -> None:
    line = {
        **{"model": "m", "task": "copy", "length": 9, "method": "keydiff", "options": {}, "ratio": 0.5},
        **{"budget": None, "error": None, "tokens_kept": 4, "bytes_before": 80, "bytes_after": 40},
        "seconds": 1.0,
    }
    (row,) = eval_report.summarise(
        [line | {"seed": 0, "exact": 1.0, "partial": 1.0}, line | {"seed": 1, "exact": 0.0, "partial": 0.5}]
    )
    assert (row["exact"], row["partial"], row["removed"], row["prompts"]) == (0.5, 0.75, 0.5, 2)
    # the share of tokens that a model predicts is no retrieval, and no part of the mean
    other = row | {"task": "perplexity", "partial": 0.1, "perplexity": 9.0}
    means = [eval_report.pivot(rows)[1][0]["mean"] for rows in ([row, other], [other])]
    assert means == [0.75, None]


@pytest.mark.parametrize(("right", "of"), [(0, 5), (3, 5), (5, 5), (40, 200)])
def test_an_interval_holds_the_shares_from_which_what_was_seen_is_not_far(right: int, of: int) -> None:
    """The ends of Wilson's interval are the shares p whose own standard error is 1/1.96 of the distance to
    what was seen.
    """
    for end in eval_report.wilson(right, of):
        if 0 < end < 1:
            assert abs(right / of - end) == pytest.approx(1.96 * (end * (1 - end) / of) ** 0.5)
    assert eval_report.wilson(0, 5)[0] == 0 and eval_report.wilson(5, 5)[1] == 1


def test_the_command_prints_tables(finished: tuple[Path, list[store.Line]], model_folder: Path) -> None:
    common = [
        *("eval", "--model", model_folder, "--output", finished[0], "--tasks", ",".join(NAMES)),
        *("--methods", "keydiff", "--ratios", 0.5, "--budgets", 40),
        *("--lengths", 600, "--samples", 1, "--seed", 1),
    ]
    told, found = printed(*common), as_json(*common)
    assert "600 tokens" in told and "keydiff" in told
    assert len(found["rows"]) == 14 and json.loads(printed(*common, "--format", "json")) == found
    assert printed(*common, "--format", "markdown").strip() == eval_report.markdown(found["rows"]).strip()


def test_methods_with_options_are_read() -> None:
    given = ["keydiff,lagkv:lag_size=128, sink_size=4", "dir/my.py:score:sign=-1", "keydiff+ada_kv,"]
    assert cli_eval.parse_methods(given) == [
        ("keydiff", {}),
        ("lagkv", {"lag_size": "128", "sink_size": "4"}),
        ("dir/my.py:score", {"sign": "-1"}),
        ("keydiff+ada_kv", {}),
    ]


def test_the_help_names_every_task() -> None:
    assert f"{cli_eval.TASKS},{cli_eval.REAL}".split(",") == list(tasks.TASKS)


def test_the_course_project_measures_perplexity(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The starter of tutorials/project: its decode loop
    has the perplexity of one forward over the whole text.
    """
    script = runpy.run_path(
        str(Path(__file__).parents[2] / "tutorials" / "project" / "starter" / "measure.py")
    )
    text = saved(
        tmp_path / "text.txt", "The baker sold eleven loaves of bread on Monday, and none on Tuesday."
    )
    arguments = ["--model", str(model_folder), "--text", str(text), "--prompt", "40", "--tokens", "20"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["measure.py", *arguments, "--methods", "full", "keydiff"])
        script["main"]()
    full, keydiff = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[2:]
    )
    model, tokenizer = load(str(model_folder))
    ids = tokenizer(text.read_text(), return_tensors="pt")["input_ids"][:, :60]
    assert float(full[1]) == pytest.approx(perplexity(model, ids, 20), rel=1e-3)
    assert float(keydiff[4]) < float(full[4]) and float(keydiff[5]) < float(full[5])
