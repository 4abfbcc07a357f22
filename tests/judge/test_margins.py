"""How near right variants come to an alarm, and which of them are chosen for it."""

import json
from pathlib import Path

import typer
from typer.testing import CliRunner

from evictionary.spec_tests.judge.law import load_laws
from evictionary.spec_tests.judge.outcome import outcome
from evictionary.spec_tests.proof.margins import Cell, cover, main, part, used
from evictionary.spec_tests.proof.planted import load_controls, load_mutants


def cell(shares: dict[str, float], *otherwise: str) -> Cell:
    return Cell("method.score", "test_method::test_law", "float32", shares, otherwise)


def test_the_variant_that_comes_nearest_in_most_cells_is_chosen_first() -> None:
    cells = [cell({"a": 0.9, "b": 0.5, "c": 0.1}), cell({"a": 0.2, "b": 0.1}), cell({"a": 0.1, "c": 0.4})]
    assert cover(cells) == [("a", 2), ("c", 1)]


def test_a_variant_that_comes_about_as_near_as_a_chosen_one_is_left_out() -> None:
    assert cover([cell({"a": 0.5, "b": 0.45}), cell({"a": 0.5, "b": 0.45})]) == [("a", 2)]


def test_an_error_far_below_what_is_allowed_chooses_nobody() -> None:
    assert cover([cell({"a": 0.04, "b": 0.0})]) == []


def test_who_alone_answers_otherwise_is_chosen_whatever_its_numbers_are() -> None:
    assert cover([cell({"a": 0.5, "b": 0.0}, "b")]) == [("a", 1), ("b", 1)]


def test_no_error_is_no_share_of_nothing() -> None:
    assert (part(0.0, 0.0), part(1.0, 4.0), part(1.0, 0.0)) == (0.0, 0.25, float("inf"))


def test_a_right_variant_uses_a_part_of_the_allowance_and_a_mistake_more_than_all() -> None:
    law = load_laws()["test_h2o::test_score_is_the_attention_received_from_all_queries"]
    words, shares = [], []
    for implementation in (
        load_controls()["h2o.torch_all_at_once"].implementation("bfloat16"),
        load_mutants()["h2o.mean_over_queries"].implementation("bfloat16"),
    ):
        with used() as found:
            words.append(outcome(law, implementation, max_examples=4, seed=0)[0])
        shares.append(max(found))
    assert words == ["passed", "killed"]
    assert 0 < shares[0] <= 1 < shares[1]


def test_the_tool_says_of_each_variant_of_a_folder_what_it_adds(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(main)
    arguments = ["--only", "knorm", "--dtype", "float32", "--max-examples", "2", "--seeds", "1"]
    ran = CliRunner().invoke(app, [*arguments, "--output", str(tmp_path / "knorm.json")])
    assert ran.exit_code == 0, ran.output
    own = {name for name in load_controls() if name.startswith("knorm.")}
    assert own == {line.split(":")[0].strip() for line in ran.stdout.splitlines() if line.startswith("  ")}
    cells = json.loads((tmp_path / "knorm.json").read_text())["cells"]["knorm"]
    assert cells and all(set(each["shares"]) == own for each in cells)
    assert all(0 <= share <= 1 for each in cells for share in each["shares"].values())
    wrong = CliRunner().invoke(app, ["--only", "knrom"])
    assert wrong.exit_code == 2
