"""Laws of KeyDiff's tables (KD-T1, KD-T5 to KD-T11): every
average recomputed, and what the text says of the numbers.
"""

import itertools
from collections.abc import Collection, Iterable
from typing import NamedTuple

from evictionary.spec_tests.judge.law import law
from evictionary.spec_tests.papers.tables import printed

CHINESE = ("MF-zh", "DuReader", "VCSum", "LSHT", "PR-zh")
BUDGETS = ("2K", "4K", "6K", "8K")
RIVALS = ("H2O", "TOVA", "Sink", "SnapKV")
# The tables of keydiff_longbench.csv: 8 and its English part, which is table 1; then 7, 9, 10 and 11.
FULL, ONE_SHOT, QWEN = ("full 8B", "full 3B"), ("one shot 8B", "one shot 3B"), ("Qwen 7B", "Qwen 3B")
BLOCKS, RECENT = ("first block size 3B", "second block size 3B"), ("recent 8B", "recent 3B")


class Row(NamedTuple):
    """A row of a table, in hundredths of a point: the score of each task, their printed average, and that
    of table 1, or 0.
    """

    tasks: dict[str, int]
    average: int
    english_average: int


def scores(table: str) -> dict[tuple[str, str], Row]:
    """(method, budget) to its row; the full cache has the budget "-"."""
    found = {}
    for cells in printed("keydiff_longbench"):
        if cells["table"] == table:
            numbers = {name: round(100 * float(text)) for name, text in list(cells.items())[3:] if text}
            average, english_average = numbers.pop("average"), numbers.pop("English average", 0)
            found[cells["method"], cells["budget"]] = Row(numbers, average, english_average)
    return found


def lengths() -> dict[str, list[int]]:
    """Each dataset to its number of prompts: of up to 2K tokens, up to 4K, up to 6K, up to 8K, of more,
    and all (table 5).
    """
    rows = [list(cells.values()) for cells in printed("keydiff_lengths") if cells["all"]]
    return {row[0]: [int(text) for text in row[1:7]] for row in rows}


def ratios() -> dict[str, list[int]]:
    """Each dataset, and their average, to its compression
    ratios at 2K, 4K, 6K and 8K, in hundredths (table 6).
    """
    rows = [list(cells.values()) for cells in printed("keydiff_lengths")]
    return {row[0]: [round(100 * float(text)) for text in row[7:]] for row in rows}


def is_mean(average: int, numbers: Collection[int]) -> bool:
    """Whether `average` is the mean, rounded either way to
    a whole hundredth (a half may have gone up or down).
    """
    return 2 * abs(average * len(numbers) - sum(numbers)) <= len(numbers)


def averages_hold(table: str, tasks: int = 21) -> bool:
    """Whether each row has this many tasks, and their mean is its printed average."""
    return all(
        len(row.tasks) == tasks and is_mean(row.average, row.tasks.values()) for row in scores(table).values()
    )


def english(row: Row) -> list[int]:
    return [score for task, score in row.tasks.items() if task not in CHINESE]


def averages(table: str) -> dict[tuple[str, str], int]:
    return {key: row.average for key, row in scores(table).items()}


def english_averages(table: str) -> dict[tuple[str, str], int]:
    """The averages that table 1 prints."""
    return {key: row.english_average for key, row in scores(table).items() if row.english_average}


def shortfall(rows: dict[tuple[str, str], int], budget: str) -> float:
    """By how many per cent KeyDiff's average falls short of the full cache's."""
    return 100 * (1 - rows["KeyDiff", budget] / rows["Full", "-"])


@law("KD-T1")
def test_the_averages_of_table_1_hold():
    """Each of the 42 averages is the mean of the English columns of its row in the full table."""
    rows = [row for table in FULL for row in scores(table).values() if row.english_average]
    assert len(rows) == 42 and all(is_mean(row.english_average, english(row)) for row in rows)


@law("KD-T1")
def test_the_loss_at_8k_is_not_four_hundredths_of_a_per_cent():
    """At 8K KeyDiff loses .35 and .20 % of the full cache's average on table 1, .38 and .73 % on all
    tasks; printed: .04 %.
    """
    tables = [*map(english_averages, FULL), *map(averages, FULL)]
    assert [round(shortfall(table, "8K"), 2) for table in tables] == [0.35, 0.20, 0.38, 0.73]
    assert [table["Full", "-"] - table["KeyDiff", "8K"] for table in tables] == [17, 9, 19, 31]


@law("KD-T1")
def test_the_loss_at_6k_is_about_what_is_printed():
    """At 6K the loss is 1.40 and 1.31 % on table 1, within
    the printed 1.5 %; on all tasks it is 1.11 and 1.94 %.
    """
    tables = [*map(english_averages, FULL), *map(averages, FULL)]
    assert [round(shortfall(table, "6K"), 2) for table in tables] == [1.40, 1.31, 1.11, 1.94]


@law("KD-S1")
def test_keydiff_is_best_on_most_tasks():
    """Of the 128 cells (model, budget, task) of table 1 KeyDiff is alone in front in 72 and shares the
    lead in 6.
    """
    ahead = level = 0
    for table in FULL:
        rows = scores(table)
        for budget in BUDGETS:
            others = [
                max(cell) for cell in zip(*(english(rows[rival, budget]) for rival in RIVALS), strict=True)
            ]
            for own, other in zip(english(rows["KeyDiff", budget]), others, strict=True):
                ahead, level = ahead + (own > other), level + (own == other)
    assert (ahead, level) == (72, 6)


@law("KD-S1")
def test_keydiff_leads_with_a_smaller_budget_from_4k():
    """KeyDiff at 4K and 6K beats every other method at the next larger budget; at 2K it does not."""
    for table in map(english_averages, FULL):
        assert [
            table["KeyDiff", own] > max(table[rival, larger] for rival in RIVALS)
            for own, larger in itertools.pairwise(BUDGETS)
        ] == [False, True, True]


@law("KD-T1")
def test_passage_retrieval_is_not_near_the_full_cache_on_the_small_model():
    """At 2K passage retrieval keeps 96.00 of 99.50 on the
    8B model, but 60.50 of 96.50, 63 %, on the 3B model.
    """
    shares = [
        rows["KeyDiff", "2K"].tasks["PR-en"] / rows["Full", "-"].tasks["PR-en"] for rows in map(scores, FULL)
    ]
    assert [round(share, 2) for share in shares] == [0.96, 0.63]
    assert max(scores("full 3B")[rival, "2K"].tasks["PR-en"] for rival in RIVALS) == 3250


@law("KD-T5")
def test_each_row_of_the_lengths_adds_up():
    """The five classes of each dataset add up to its total; 4,120 prompts in all."""
    rows = lengths().values()
    assert all(sum(row[:5]) == row[5] for row in rows)
    assert sum(row[5] for row in rows) == 4120


@law("KD-T5")
def test_more_prompts_are_longer_than_8k_than_printed():
    """2,330 of 4,120 prompts are longer than 8K, 56.6 % (57.0 % of the English ones); printed: 51 %."""
    every = lengths()
    foreign = [name for name in every if name.endswith("Zh") or name in ("dureader", "vcsum", "lsht")]
    assert len(foreign) == len(CHINESE)
    for names, expected in ((list(every), 56.6), ([name for name in every if name not in foreign], 57.0)):
        share = sum(every[name][4] for name in names) / sum(every[name][5] for name in names)
        assert round(100 * share, 1) == expected


@law("KD-T5")
def test_a_mean_ratio_is_not_a_share_of_prompts():
    """At 2K the mean ratio .31 says that 69 % of a prompt goes, not that 69 % of the prompts are
    compressed: 94.4 % are.
    """
    rows = lengths().values()
    compressed = 1 - sum(row[0] for row in rows) / sum(row[5] for row in rows)
    assert round(100 * compressed, 1) == 94.4


@law("KD-T6")
def test_two_ratios_contradict_the_lengths():
    """A mean of min(1, N/L) grows with N, and r8 >= s + (r6 - s) 4/3, s the share within 8K: not so for
    MultiNews and VCSum.
    """
    ratio = ratios()
    assert [name for name, row in ratio.items() if sorted(row) != row] == ["multi-news"]
    wrong = []
    for name, row in lengths().items():
        within = sum(row[:4]) / row[5]
        sixth = (ratio[name][2] - 0.5) / 100  # the least that rounds to what is printed
        if ratio[name][3] / 100 + 0.005 < within + max(0, sixth - within) * 4 / 3:
            wrong.append(name)
    assert wrong == ["multi-news", "vcsum"]


@law("KD-T6")
def test_each_ratio_lies_where_its_lengths_allow():
    """Between what the class bounds of table 5 allow at least and at most lies every other ratio."""
    ratio = ratios()
    outside = []
    for name, row in lengths().items():
        for place, budget in enumerate((2, 4, 6, 8)):
            least = most = 0.0
            for longest, number in zip((2, 4, 6, 8), row[:4], strict=True):
                least += number * min(1, budget / longest)
                most += number * (1 if longest <= budget else budget / (longest - 2))
            most += row[4] * budget / 8
            if not least / row[5] - 0.005 <= ratio[name][place] / 100 <= most / row[5] + 0.005:
                outside.append((name, budget))
    assert outside == [("multi-news", 8)]


@law("KD-T6")
def test_the_averages_of_the_ratios():
    """The columns average to .318, .534, .679 and .752; printed .31, .53, .67 and .77: cut off, the last
    from other cells.
    """
    ratio = ratios()
    average = ratio.pop("average")
    means = [sum(column) / len(column) for column in zip(*ratio.values(), strict=True)]
    assert [round(mean, 1) for mean in means] == [31.8, 53.4, 67.9, 75.2]
    assert [int(mean) for mean in means[:3]] == average[:3] and [
        round(mean) for mean in means[:3]
    ] != average[:3]
    # With the least that table 5 allows in the two wrong cells the last average is the printed one, cut off
    # like the others.
    repaired = (sum(row[3] for row in ratio.values()) - 53 - 68 + 97.5 + 73.7) / len(ratio)
    assert int(repaired) == average[3] == 77


@law("KD-T7")
def test_the_averages_of_table_7_hold():
    """Without NarrativeQA, each average is the mean of the twenty tasks of its row; the full rows are
    those of the other tables.
    """
    for table, blocks in zip(ONE_SHOT, FULL, strict=True):
        assert averages_hold(table, tasks=20)
        whole = scores(blocks)["Full", "-"].tasks
        assert scores(table)["Full", "-"].tasks == {
            task: score for task, score in whole.items() if task != "NarrativeQA"
        }


@law("KD-T7")
def test_the_sink_rows_of_two_models_are_one():
    """The four rows of Sink for the 8B model are those of the
    3B model, number by number; no other row occurs twice.
    """
    large, small = map(scores, ONE_SHOT)
    assert [key for key in large if large[key] in small.values()] == [("Sink", budget) for budget in BUDGETS]


def shares_of(percentage: int, numbers: Iterable[int]) -> list[int]:
    """Those numbers of examples of which some whole number
    makes this percentage (in hundredths), as it is rounded.
    """
    return [
        number
        for number in numbers
        if abs(round(percentage * number / 10**4) * 10**4 / number - percentage) <= 0.5
    ]


@law("KD-T7")
def test_table_7_has_other_examples_than_the_full_cache():
    """LSHT: each of 16 rows on the 8B model fits 41 to 49 examples, each of 12 on the 3B model 70 to 75,
    the full rows 200.
    """
    for table, rows, numbers in zip(ONE_SHOT, (16, 12), (range(41, 50), range(70, 76)), strict=True):
        lsht = {key: row.tasks["LSHT"] for key, row in scores(table).items() if key[0] != "Sink"}
        assert shares_of(lsht.pop(("Full", "-")), [200]) == [200]
        assert len(lsht) == rows and all(shares_of(percentage, numbers) for percentage in lsht.values())
    # By chance a percentage between 10 and 40 fits so: 1 in 26 the first range, 1 in 24 the second.
    assert [
        sum(bool(shares_of(each, fits)) for each in range(1000, 4000))
        for fits in (range(41, 50), range(70, 76))
    ] == [115, 127]


@law("KD-T7")
def test_200_examples_fit_the_full_table_and_not_table_7():
    """Half an example of 200 is a quarter of a point: so divide 49 of the 50 cells of LSHT with blocks,
    and 12 of 38 without.
    """
    cells = [
        [row.tasks["LSHT"] for table in tables for row in scores(table).values()]
        for tables in (FULL, ONE_SHOT)
    ]
    assert [(sum(cell % 25 == 0 for cell in each), len(each)) for each in cells] == [(49, 50), (12, 38)]
    trec = [row.tasks["TREC"] for row in scores(ONE_SHOT[0]).values()]
    assert sum(cell % 50 != 0 for cell in trec) == 13 and all(
        row.tasks["TREC"] % 50 == 0 for row in scores(FULL[0]).values()
    )


@law("KD-T7")
def test_without_blocks_h2o_retrieves_more_than_the_full_cache():
    """PR-en on the 8B model at 2K: H2O has 5.88 with blocks,
    100.00 without, and the full cache of all examples 99.50.
    """
    without, blocks = scores(ONE_SHOT[0]), scores(FULL[0])
    assert [rows["H2O", "2K"].tasks["PR-en"] for rows in (blocks, without)] == [588, 10000]
    assert without["Full", "-"].tasks["PR-en"] == 9950
    assert [rows["KeyDiff", "8K"].tasks["Musique"] for rows in (blocks, without)] == [3088, 1358]


@law("KD-T8")
def test_the_averages_of_the_full_table_hold():
    """Each of the 50 averages is the mean of the 21 tasks of its row."""
    assert sum(len(scores(table)) for table in FULL) == 50 and all(map(averages_hold, FULL))


@law("KD-T8")
def test_keydiff_leads_the_full_table():
    """On all tasks KeyDiff has the best average of the six methods at every budget, for both models."""
    for table in map(averages, FULL):
        for budget in BUDGETS:
            assert (
                max((average, method) for (method, own), average in table.items() if own == budget)[1]
                == "KeyDiff"
            )


@law("KD-T9")
def test_on_qwen_keydiff_leads_with_large_budgets_only():
    """KeyDiff leads at 6K and 8K (7B) and at 8K (3B); at 2K only H2O is worse, on both."""
    assert all(map(averages_hold, QWEN))
    for table, firsts in zip(map(averages, QWEN), (["6K", "8K"], ["8K"]), strict=True):
        assert [
            budget
            for budget in BUDGETS
            if table["KeyDiff", budget] > max(table[rival, budget] for rival in RIVALS)
        ] == firsts
        assert [rival for rival in RIVALS if table[rival, "2K"] < table["KeyDiff", "2K"]] == ["H2O"]


@law("KD-T10")
def test_other_block_sizes_change_little():
    """At two other block sizes each average is the mean of its row, KeyDiff leads everywhere and moves by
    less than .5.
    """
    usual = averages("full 3B")
    assert all(map(averages_hold, BLOCKS))
    for table in map(averages, BLOCKS):
        for budget in BUDGETS:
            assert table["KeyDiff", budget] > max(table[rival, budget] for rival in RIVALS)
            assert abs(table["KeyDiff", budget] - usual["KeyDiff", budget]) < 50


@law("KD-T11")
def test_recent_tokens_help_small_budgets():
    """A tenth of recent tokens helps at 2K and 4K for both models, and costs a little at 6K and 8K."""
    assert all(map(averages_hold, RECENT))
    for table, usual in zip(map(averages, RECENT), map(averages, FULL), strict=True):
        gains = [table["Recent10", budget] - usual["KeyDiff", budget] for budget in BUDGETS]
        assert min(gains[:2]) > 0 > max(gains[2:]) >= min(gains[2:]) > -15
