"""What docs/abstracts.md says in sentences is what the study has."""

import pytest

from docs_build import abstracts
from docs_build.abstracts import ABSTRACTS, LEVEL, OTHER, SAME, rows
from docs_build.study import interval, measured


@pytest.mark.parametrize(
    ("name", "orders"),
    [
        ("KD-T1", [SAME, SAME, SAME]),
        ("LK-S1", [SAME, SAME, SAME]),
        ("EA-T1", [OTHER, LEVEL, LEVEL]),
        ("EA-T1, texts of 1,000 tokens", [LEVEL, LEVEL, SAME]),
        ("EA-T1, texts of 2,000 tokens", [SAME, LEVEL, LEVEL]),
        ("EA-T1, texts of 4,000 tokens", [LEVEL, OTHER, OTHER]),
        ("MK-S1", [OTHER, OTHER, LEVEL]),
    ],
)
def test_the_order_of_an_abstract_is_what_the_page_says(name: str, orders: list[str]) -> None:
    (abstract,) = (each for each in ABSTRACTS if each.id == name)
    assert [row.verdict for row in rows(abstract)] == orders


def signs(method: str, other: str) -> list[str]:
    """The order of two methods of the study at each size."""
    return [abstracts.Row(0, 0, other, 0, *ends, 0).verdict for ends in intervals(method, other)]


def intervals(method: str, other: str) -> list[tuple[float, float]]:
    return [interval(found[method], found[other]) for found in measured("results").values()]


def test_expected_attention_costs_less_than_what_looks_at_attention() -> None:
    assert signs("expected_attention+ada_kv", "tova") == signs("expected_attention+ada_kv", "snapkv")
    assert set(signs("expected_attention+ada_kv", "tova")) == {SAME}
    short = [row for each in ABSTRACTS if each.part in ("real", "real_2000") for row in rows(each)]
    assert len(short) == 6 and all(row.difference < 0 for row in short)


def test_momentkv_is_level_with_the_same_division_of_snapkv() -> None:
    assert set(signs("momentkv+ada_kv", "snapkv+ada_kv")) == {LEVEL}
    assert signs("momentkv+ada_kv", "snapkv") == [SAME, SAME, LEVEL]
    assert signs("h2o", "momentkv+ada_kv")[:2] == signs("h2o", "snapkv")[:2] == [SAME, SAME]


def test_gvote_keeps_half_and_the_others_need_a_quarter_for_its_cost() -> None:
    (gvote,) = (each for each in ABSTRACTS if each.own)
    half, quarter, tenth = rows(gvote)
    assert all(0.45 < row.kept / 100 < 0.55 and row.best == "streaming_llm" for row in (half, quarter, tenth))
    assert half.low > 0 and quarter.low < 0 < quarter.high


def test_lagkv_keeps_more_than_a_tenth() -> None:
    (lagkv,) = (each for each in ABSTRACTS if each.id == "LK-S1")
    assert [f"{row.kept:.0f}" for row in rows(lagkv)] == ["49", "24", "13"]


def test_an_interval_decides_the_order() -> None:
    row = abstracts.Row(0.5, 1.0, "tova", 2.0, -1.5, -0.5, 50)
    assert row.difference == -1 and row.verdict == SAME
    assert row._replace(high=0.5).verdict == LEVEL and row._replace(low=0.5, high=1.5).verdict == OTHER
