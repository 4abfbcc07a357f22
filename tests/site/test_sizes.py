"""The table of sizes: what the laws ask each function for, beside today's models."""

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis.errors import UnsatisfiedAssumption

from docs_build import pages, sizes
from evictionary.spec_tests.judge.domain import NothingToAsk
from evictionary.spec_tests.judge.implementation import contract_functions, load, oracle
from evictionary.spec_tests.judge.law import load_laws
from evictionary.spec_tests.judge.reach import Reach, in_a_line
from evictionary.spec_tests.memory import models
from evictionary.spec_tests.proof.planted import load_controls

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "sizes.md"

STORED = sizes.stored()


def test_a_size_of_a_model_that_no_law_asks_has_a_reason() -> None:
    assert [gap for gap in sizes.gaps(STORED) if not gap.reason] == []
    assert {*STORED} == {*contract_functions()}, "`python -m docs_build.sizes` counts them anew"


def test_a_gap_is_found() -> None:
    lacking = {**STORED, "knorm.score": {**STORED["knorm.score"], "KV heads": 5}}
    found = [gap for gap in sizes.gaps(lacking) if not gap.reason]
    assert found == [sizes.Gap("knorm.score", "KV heads", 16, 5, "")]


def test_a_reason_is_needed() -> None:
    """What the laws of sizes leave to others is asked for less, or a right variant gives another answer."""
    asked_elsewhere = {*models.NOT_ASKED} - {gap.function for gap in sizes.gaps(STORED)}
    assert asked_elsewhere == {"pyramid_kv.budgets"}
    variant = load_controls()["pyramid_kv.rounded_line"].implementation("float64")
    assert [*variant.pyramid_kv.budgets(1000, 33)] != [*oracle("pyramid_kv.budgets")(1000, 33)]


def test_sizes_in_a_line_are_no_single_input() -> None:
    asked: Reach = {
        "knorm.score": {"tokens": 65537, "KV heads": 1, "query heads of each": 1, "channels": 2},
        "selection.top_k": {"tokens": 131072, "sequences": 1},
    }
    told = "131,072 tokens, 1 KV head, 1 query head of each, 1 sequence, 2 channels (each alone)"
    assert in_a_line(asked) == told
    assert in_a_line({"knorm.score": {"tokens": 1}}) == "1 token"


@pytest.mark.whole
def test_the_stored_sizes_are_those_of_todays_laws() -> None:
    """As far as the laws of sizes go, which are asked again here."""
    impl = load("reference")
    own = [law for name, law in load_laws().items() if name.startswith("test_memory_sizes::")]
    for impl.methods in {(path.partition(".")[0],) for path in contract_functions()}:
        for law in own:
            drawn = {"seed": 0} | ({"kind_of_keys": "sinks"} if "kind_of_keys" in law.drawn else {})
            with suppress(NothingToAsk, UnsatisfiedAssumption):
                law.check(impl, **drawn)
    more = {
        (path, what): (size, STORED[path].get(what))
        for path, sizes_of_path in impl.reach.items()
        for what, size in sizes_of_path.items()
        if size > STORED[path].get(what, 0)
    }
    assert own and more == {}, "`python -m docs_build.sizes` counts them anew"


def test_the_page_has_a_row_for_each_function_and_unit() -> None:
    page = pages.filled("reference/sizes.md", PAGE.read_text(encoding="utf-8"))
    assert all(f"| `{path}` |" in page for path in contract_functions())
    assert all(f"\n| {unit} | {most:,} | " in page for unit, most in sizes.WANTED.items())
