"""The assignment in which students write the rows that show planted mistakes."""

import pytest
from tools.grader import judged

from evictionary.classroom.judgement import Line

RIGHT = """
import numpy as np


def lost_ties():
    return np.zeros(1025), 1025


def crowded_bin():
    return 1 + np.arange(2049) * 1e-7, 1


def padded_lanes():
    return -np.ones(1025, np.float32), np.int64(1)


def lost_candidates():
    return [np.eye(1, 32769, 32768)[0], 1]


def wrapped_positions():
    return np.eye(1, 65537, 65536)[0], 1


def counted_ties():
    return np.zeros(65537), 1


def clamped_scores():
    return np.array([-np.inf, -7e4]), 1, None


def protected_blocks():
    return np.zeros(4097), 1, np.arange(4097) == 4096


def rows(seed):
    some = np.random.default_rng(seed).normal(size=40)
    small = [(some, 20), (np.round(some), 20), (some, 20, some < np.sort(some)[10])]
    large = [lost_ties(), crowded_bin(), padded_lanes(), wrapped_positions(), counted_ties()]
    return [*small, *large, clamped_scores(), protected_blocks()]
"""


def lines_of(changed: str = "") -> dict[str, Line]:
    return {line.name: line for line in judged("judge", RIGHT + changed).lines}


def test_rows_that_show_one_mistake_each_have_full_marks() -> None:
    assert {name: line.message for name, line in lines_of().items() if line.verdict != "passed"} == {}


@pytest.mark.parametrize(
    ("name", "body", "told"),
    [
        ("lost_ties", "return np.zeros(1024), 1024", "what does not show: a stash of 1,024 entries"),
        ("lost_ties", "return np.zeros(2049), 2049", "scores: got 2049, wanted 1 to 2048"),
        ("crowded_bin", "return np.ones(2049), 1", "what does not show: scores binned in half precision"),
        ("padded_lanes", "return np.ones(1025), 1", "what does not show: from the second tile"),
        (
            "lost_candidates",
            "return np.eye(1, 32768, 32767)[0], 1",
            "what does not show: a list of 32,768 candidates",
        ),
        ("counted_ties", "return np.zeros(65537), 2000", "what shows too: a stash of 1,024 entries"),
        (
            "clamped_scores",
            "return np.array([-1e5, np.nan]), 1",
            "wanted an array [T] of floats, none of them NaN",
        ),
        (
            "clamped_scores",
            "return np.array([-1e5, -7e4]), 3",
            "budget: got 3, wanted a whole number from 1 to 2",
        ),
        (
            "clamped_scores",
            "return np.array([-1e5, -7e4]), 'one'",
            "budget: got one, wanted a whole number from 1 to 2",
        ),
        (
            "clamped_scores",
            "return np.array([-1e5, -7e4])",
            "a row is (scores, budget) or (scores, budget, protected)",
        ),
        (
            "protected_blocks",
            "return np.zeros(4097), 1, np.arange(4097) > 9",
            "with at most as many True as the budget",
        ),
        ("rows", "return [lost_ties()]", "what does not show: a list of 32,768 candidates"),
        ("rows", "return rows_of(0)", "returned the same scores for two seeds"),
        ("rows", "return [*rows_of(0), (np.array([seed / 7]), 1)]", "those that are drawn do not show: "),
        ("rows", "return 1", "rows returned one int, wanted a list of rows"),
        ("rows", "return [*rows_of(seed), *[wrapped_positions()] * 2]", "more than 262144 scores"),
    ],
)
def test_a_wrong_row_loses_its_step_and_is_told_why(name: str, body: str, told: str) -> None:
    argument = "seed" if name == "rows" else ""
    lines = lines_of(f"\n\nrows_of = rows\n\n\ndef {name}({argument}):\n    {body}\n")
    assert lines[name].verdict == "failed" and told in lines[name].message
    assert "this law alone" not in lines[name].message
    assert {each for each, line in lines.items() if line.verdict == "failed"} <= {name, "rows"}
