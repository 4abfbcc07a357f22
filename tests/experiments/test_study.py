"""The study: its cells are those of the cache itself, its
intervals those of the prompts, and a killed run loses nothing.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tools import as_json, printed, refused, saved, says

import docs_build.pages
import docs_build.study
from evictionary import store
from evictionary.cache.evicting_cache import EvictingCache
from evictionary.cli import study as cli_study
from evictionary.evaluation import study, tasks
from evictionary.evaluation.questions import prefill
from evictionary.methods.resolve import resolve
from evictionary.models import versions
from evictionary.models.load import load

SELECTORS, REAL = ("keydiff", "random", "momentkv", "gvote"), ("real", "real_2000", "real_4000")


def plan_for(model: Path, **changes: Any) -> study.Plan:
    settings = {
        "selectors": SELECTORS,
        "tasks": ["passkey7"],
        "seeds": [1, 2, 3],
        "ratios": [0.5, 0.75],
        "lengths": [400],
    }
    return study.Plan(str(model), **{**settings, **changes})


@pytest.fixture(scope="module")
def finished(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[store.Line]]:
    folder = tmp_path_factory.mktemp("study")
    return folder, store.run(plan_for(model_folder), folder)


def test_a_cell_is_the_loss_of_the_right_answer_with_that_composition(
    finished: tuple[Path, list[store.Line]], model_folder: Path
) -> None:
    model, tokenizer = load(str(model_folder))
    prompt = tasks.get("passkey7").make(tokenizer, 400, 1)
    answer = tokenizer(" " + prompt.answers[0], add_special_tokens=False, return_tensors="pt")["input_ids"]
    for line in (line for line in finished[1] if line["seed"] == 1):
        for name, (loss, _, kept) in line["cells"].items():
            with EvictingCache(model, name, line["ratio"], seed=1) as cache:
                prefill(model, prompt.context_ids, cache)
                assert kept == pytest.approx(cache.tokens_kept, abs=0.01)
                with torch.no_grad():
                    logits = model(
                        torch.cat([prompt.question_ids, answer], dim=1), **versions.argument(cache)
                    ).logits[0]
            wanted = torch.nn.functional.cross_entropy(logits[-answer.shape[1] - 1 : -1], answer[0])
            assert loss == pytest.approx(float(wanted), abs=1e-3), name


def test_every_composition_is_there_once() -> None:
    added = {
        "keydiff": {"", "+moments", "+ada_kv", "+ada_kv+moments", "+pyramid_kv", "+pyramid_kv+moments"},
        "momentkv": {"", "+ada_kv", "+pyramid_kv"},  # corrected by itself
        "h2o": {"", "+moments", "+pyramid_kv", "+pyramid_kv+moments"},  # has no scores
        "gvote": {"", "+moments"},  # has its own budget
    }
    assert {name: {each.removeprefix(name) for each in study.compositions(name)} for name in added} == added


@pytest.mark.slow
def test_two_processes_find_the_same(
    finished: tuple[Path, list[store.Line]], model_folder: Path, tmp_path: Path
) -> None:
    assert store.run(plan_for(model_folder), tmp_path, jobs=2) == finished[1]


def line_of(
    task: str,
    seed: int,
    cells: dict[str, list[float]],
    full: float = 1.0,
    ratio: float = 0.5,
    length: int = 100,
) -> store.Line:
    return {
        "model": "small",
        "length": length,
        "error": None,
        "versions": {},
        "ratio": ratio,
        "selector": next(iter(cells)),
    } | {"task": task, "seed": seed, "full": [full, 1, 90], "cells": cells}


def test_costs_are_means_over_tasks_of_means_over_prompts_and_comparisons_are_of_the_same_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = []
    monkeypatch.setattr(study, "LEAST", 1)
    difficulty = {("passkey7", 0): 0.0, ("passkey7", 1): 2.0, ("copy", 0): 5.0, ("perplexity", 0): 8.0}
    for (task, seed), hard in difficulty.items():
        # KeyDiff is worse than KNorm by 0.1 on every prompt; the prompts differ by far more.
        knorm = {"knorm": [1 + hard, task != "perplexity", 45]}
        keydiff = {"keydiff": [1.1 + hard, 0, 45], "keydiff+moments": [1.0 + hard, 1, 45]}
        lines += [line_of(task, seed, cells) for cells in (knorm, keydiff, {"gvote": [1, 1, 70]})]
    # The other selectors lack a prompt and a ratio.
    alone = [
        line_of("copy", 1, {"knorm": [99, 0, 45]}),
        line_of("copy", 0, {"knorm": [99, 0, 45]}, ratio=0.75),
    ]
    found = study.summarise(lines + alone)
    rows = {row["method"]: row for row in found["rows"]}
    assert {row["ratio"] for row in found["rows"]} == {0.5}
    assert (rows["knorm"]["cost"], rows["knorm"]["tokens_kept"]) == pytest.approx(((1 + 5 + 8) / 3, 45))
    assert rows["knorm"]["tasks"] == pytest.approx({"passkey7": 1, "copy": 5, "perplexity": 8})
    assert (rows["keydiff"]["exact"], rows["knorm"]["exact"]) == (0, 1)
    assert rows["gvote"]["own"] and not rows["knorm"]["own"]
    (best,) = found["recommended"]
    assert best["prompts"] == {"passkey7": 2, "copy": 1, "perplexity": 1}
    # GVote's cost is less, but it keeps more than was asked for; KeyDiff is worse on every prompt
    assert {*best["as_good"], best["method"]} == {"knorm", "keydiff+moments"}
    (effect,) = found["effects"]
    assert effect["change"] == pytest.approx(-0.1) and effect["interval"] == pytest.approx([-0.1, -0.1])
    assert (effect["addition"], effect["better"], effect["of"]) == ("moments", 1, 1)


def test_intervals_have_the_width_of_a_mean_of_prompts() -> None:
    values = np.random.default_rng(3).normal(size=100)
    low, high = study.summarise(
        [line_of("copy", seed, {"knorm": [value, 0, 45]}, full=0.0) for seed, value in enumerate(values)]
    )["rows"][0]["interval"]
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 10, rel=0.1)
    assert low < values.mean() < high


def test_a_question_at_two_lengths_is_one_prompt() -> None:
    """Its costs are averaged, 9 of 10 prompts are told by the
    larger one, and without one of them it does not count.
    """
    costs = np.random.default_rng(4).normal(size=(31, 2))
    lines = [
        line_of("copy", seed, {"knorm": [cost, 0, 45]}, full=0.0, length=length)
        for seed, both in enumerate(costs)
        for cost, length in zip(both, (100, 200), strict=True)
    ]
    means = [
        line_of("copy", seed, {"knorm": [cost.mean(), 0, 45]}, full=0.0) for seed, cost in enumerate(costs)
    ]
    found = study.summarise(lines[:-1])
    ((row,), (wanted,)) = found["rows"], study.summarise(means[:-1])["rows"]
    assert [row["cost"], *row["interval"]] == pytest.approx([wanted["cost"], *wanted["interval"]])
    assert row["nine_of_ten"] == study.bound(costs[:-1].max(axis=1))
    assert list(row["lengths"].values()) == pytest.approx(costs[:-1].mean(axis=0))
    assert found["recommended"][0]["prompts"] == {"copy": 30}


def test_nine_of_ten_prompts_stay_below_the_bound_in_nine_of_ten_samples() -> None:
    """Of uniform numbers the bound is the share below it. 22 numbers are the least: 1 - 0.9^22 > 0.9."""
    samples = np.random.default_rng(5).random((2000, 60))
    covered = np.mean([study.bound(sample) >= 0.9 for sample in samples])
    assert np.mean([np.sort(sample)[56] >= 0.9 for sample in samples]) < 0.9 <= covered
    assert [study.bound(samples[0, :count]) for count in (21, 22)] == [None, samples[0, :22].max()]


@pytest.mark.parametrize(("readings", "name"), [(1, "keydiff+ada_kv+moments"), (2, "kvzip+ada_kv")])
def test_what_auto_promises_is_of_prompts_that_had_no_part_in_choosing(readings: int, name: str) -> None:
    """Other prompts than those of the final of real texts choose it: of what all the earlier parts measured,
    with so many readings at most, it costs least on average. The pages name it.
    """
    stored = json.loads(study.STORED.read_text(encoding="utf-8"))
    earlier = [stored[part]["rows"] for part in study.EARLIER]
    measured = set.intersection(*({row["method"] for row in rows} for rows in earlier))
    costs = {
        each: sum(row["cost"] for rows in earlier for row in rows if row["method"] == each)
        for each in measured & {row["method"] for row in stored["real_finals"]["rows"]}
        if resolve(each).readings() <= readings
    }
    assert len(costs) == 2 + 2 * readings and name == min(costs, key=lambda each: costs[each])
    final = {(row["method"], row["ratio"]): row for row in stored["real_finals"]["rows"]}
    for ratio in study.RATIOS:
        taken, why = study.recommended(ratio + 0.01, readings)
        row = final[name, ratio]
        assert taken == name and row["cost"] < row["nine_of_ten"]
        says(why, f"{row['cost']:.2f} nats", f"lose at most {row['nine_of_ten']:.2g} nats", "one small model")
    page = docs_build.pages.studied("study.md", "real_finals.auto")
    says(page, f"| `{name}` | {readings} | {final[name, 0.5]['cost']:.2f} |")


def test_too_few_prompts_are_refused() -> None:
    lines = [line_of("copy", seed, {"knorm": [1, 1, 45]}) for seed in range(12)]
    study.summarise(lines)
    lines += [line_of("copy", seed, {"tova": [1, 1, 45]}) for seed in range(11)]
    refused(lambda: study.summarise(lines), "got fewer than 12 prompts of a task with every method")


def test_the_command_writes_a_table_and_a_picture_and_recommends(
    finished: tuple[Path, list[store.Line]],
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(study, "LEAST", 3)
    monkeypatch.setattr(cli_study, "FEWEST", 3)
    saved(tmp_path / "results.jsonl", (finished[0] / "results.jsonl").read_bytes())
    asked = [
        *("study", "--output", str(tmp_path), "--model", str(model_folder)),
        *("--methods", ",".join(SELECTORS), "--tasks", "passkey7", "--seed", "1", "--samples", "3"),
        *("--ratios", "0.5,0.75", "--lengths", "400"),
    ]
    found = as_json(*asked)
    assert json.loads((tmp_path / "summary.json").read_text()) | {"output": found["output"]} == found
    assert [entry["ratio"] for entry in found["recommended"]] == [0.5, 0.75]
    table = (tmp_path / "table.md").read_text()
    for row in found["rows"]:
        cost, low, high = (f"{number:.3f}" for number in (row["cost"], *row["interval"]))
        told = f"{re.escape(row['method'])}` \\| .* \\| {cost} \\| {low} \\| {high} \\| {row['exact']:.0%}"
        assert re.search(rf"^\| `{told} \| \d+ \|$", table, re.M)
    assert "keydiff" in (tmp_path / "study.svg").read_text() and "costs least" in printed(*asked)


def test_what_protection_changes_is_what_was_measured() -> None:
    """The table of the page has the measured costs, and their difference, for each composition that protects
    nothing by itself.
    """
    found = study.summarise(docs_build.study.lines("protected.jsonl"))
    costs = {(row["method"], row["ratio"]): row["cost"] for row in found["rows"]}
    table = docs_build.pages.studied("study.md", "protected")
    rows = re.findall(
        r"^\| `([a-z_+]+)` \| (\d+)% \| ([-+.0-9]+(?: \| [-+.0-9]+){4}) \|$", table, re.MULTILINE
    )
    for method, removed, told in rows:
        protected, ratio = re.sub(r"^\w+", r"\g<0>+protect", method), int(removed) / 100
        before, after = costs[method, ratio], costs[protected, ratio]
        alone, together, *change = told.split(" | ")
        assert [alone, together, change[0]] == [f"{before:.2f}", f"{after:.2f}", f"{after - before:+.2f}"]
        assert float(change[1]) <= float(change[0]) <= float(change[2])
    assert len({method for method, _, _ in rows}) == 10 and len(rows) == 10 * len(study.RATIOS)


def test_moments_take_the_memory_that_a_cache_says(model_folder: Path) -> None:
    """A cache holds as many bytes more as so many tokens have."""
    model, _ = load(str(model_folder))
    ids = torch.arange(64)[None] % model.config.vocab_size
    beside = []
    for name in ("keydiff", "keydiff+moments"):
        cache = EvictingCache(model, name, 0.5)
        model(ids, **versions.argument(cache))
        beside.append(cache.nbytes_beside / (cache.nbytes / cache.tokens_kept))
    wanted = docs_build.study.of_moments(model.config.head_dim)
    assert beside[1] - beside[0] == pytest.approx(wanted)
    row = {"method": "keydiff+moments", "tokens_kept": 46}
    assert docs_build.study.memory(row) == 46 + docs_build.study.of_moments()
    assert docs_build.study.memory(row | {"method": "keydiff"}) == 46


def test_a_picture_shows_compositions_of_every_addition() -> None:
    """A selector may have additions that are no allocator."""
    stored = json.loads(study.STORED.read_text(encoding="utf-8"))["real"]
    assert "snapkv+cake" in {row["method"] for row in stored["rows"]}
    labels = [text.get_text() for text in study.picture(stored).axes[0].get_yticklabels()]
    assert {"snapkv+cake", "keydiff"} <= set(labels)


def test_the_help_names_the_tasks() -> None:
    assert (tuple(cli_study.TASKS.split(",")), cli_study.FEWEST) == (study.TASKS, study.LEAST)


def test_the_stored_study_follows_from_its_measurements_and_its_final_from_other_prompts() -> None:
    stored, found = json.loads(study.STORED.read_text(encoding="utf-8")), docs_build.study.summary()
    for one, other in (
        (stored, found),
        *((stored[name], found[name]) for name in ("finals", *REAL, "real_finals")),
    ):
        assert [(row["method"], row["ratio"]) for row in one["rows"]] == [
            (row["method"], row["ratio"]) for row in other["rows"]
        ]
        assert [row["cost"] for row in one["rows"]] == pytest.approx([row["cost"] for row in other["rows"]])
    assert [entry["as_good"] for entry in stored["recommended"]] == [
        entry["as_good"] for entry in found["recommended"]
    ]
    for names in (("results", "finals"), *((name, "real_finals") for name in REAL)):
        every, finals = ({line["seed"] for line in docs_build.study.lines(f"{name}.jsonl")} for name in names)
        assert every.isdisjoint(finals)


def test_auto_has_the_numbers_of_the_nearest_ratio(model_folder: Path, tmp_path: Path) -> None:
    text = saved(tmp_path / "text.txt", "The gate key is 12. " * 10)
    asked = ["run", "--model", str(model_folder), "--prompt-file", str(text), "--question", "Which?"]
    found = as_json(*asked, "--compression-ratio", "0.7", "--max-new-tokens", "2")
    assert found["method"] == study.recommended(0.75)[0] and "At 75% removed" in found["note"]
    assert "At 90% removed" in as_json(*asked, "--budget", "7", "--max-new-tokens", "2")["note"]
