"""What LagKV's paper says, recomputed from its own numbers: tables 1 to 3 (LK-T) and the claims of its text (LK-S)."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import strategies as st

from evictionary.reference.attention import attention_logits, softmax
from evictionary.reference.lagkv import compression_ratio, keep_ratio_for, normalise, retained_length, tokens_per_partition
from evictionary.reference.lagkv_theory import attention_weights
from evictionary.spec_tests.harness.law import law

TASKS = ("SK1", "SK2", "SK3", "MK1", "MK2", "MK3", "MV", "MQ", "VT", "CWE", "FWE", "QA1", "QA2")
# Compression ratio, method, the thirteen tasks, the average.
LLAMA_RULER = """
0.0   FullKV       100.0 100.0 100.0  97.4 100.0 100.0 100.0  98.2 100.0  90.2  87.5  75.7  54.7  92.6
0.25  SnapKV       100.0 100.0  33.3  98.7  83.3  63.9  97.9  98.2  94.8  85.3  90.2  64.9  46.9  81.3
0.25  StreamingLLM  72.5  74.7  72.5  79.2  86.7  66.7  72.7  75.0  90.5   0.1  87.1  75.7  43.8  69.0
0.25  LagKV        100.0 100.0  95.7  97.4  96.7  56.9  99.4  98.5 100.0  88.4  89.0  74.3  50.0  88.2
0.5   SnapKV       100.0  94.2  15.9  93.5  48.3  15.3  77.9  87.8  94.8  72.3  85.5  44.6  37.5  66.8
0.5   StreamingLLM  47.2  46.0  46.4  53.2  50.0  44.4  48.5  52.4  69.5   1.6  83.1  75.7  35.9  50.3
0.5   LagKV        100.0  98.8  88.4  98.7  81.7  13.9  97.9  98.5  98.7  65.7  86.3  66.2  45.3  80.0
0.75  SnapKV        93.4  79.3   4.3  52.0  26.7   1.4  33.5  35.7  83.0  17.1  77.2  28.4  26.6  43.0
0.75  StreamingLLM  28.6  21.8  20.3  33.8  26.7  23.6  23.2  27.1  43.6   0.9  80.4  33.8  29.7  30.3
0.75  LagKV        100.0  98.8  46.4  90.9  33.3   1.4  86.2  92.4  96.1  10.9  73.3  46.0  42.2  62.9
0.875 SnapKV        85.7  43.7   4.3  26.0  15.0   1.4  17.1  14.3  61.3   1.9  66.3  18.9  26.6  29.4
0.875 StreamingLLM  12.1  13.8  11.6  26.0  16.7  15.3  12.3  13.4  20.7   0.9  75.3  29.7  29.7  21.3
0.875 LagKV         95.6  77.0   5.8  75.3   8.3   1.4  70.6  80.8  89.8   1.5  62.0  29.7  37.5  48.9
"""
QWEN_RULER = """
0.0   FullKV       100.0 100.0 100.0  99.2  99.1  94.2  94.3 100.0  99.0  79.9  93.2  72.6  48.2  90.8
0.25  SnapKV        88.2  90.6   4.5  44.5  57.1  50.0  39.8  44.9  92.2  80.1  92.8  62.9  42.0  60.7
0.25  StreamingLLM  76.3  72.5  75.9  78.9  79.5  67.5  71.1  74.4  76.8  74.1  89.3  69.3  36.6  72.5
0.25  LagKV        100.0  99.3  86.6  98.4  88.4  24.2  93.9  99.4  99.0  79.3  92.1  66.1  45.5  82.5
0.5   SnapKV        86.8  64.5   3.6  24.2  28.6   9.2  21.9  23.0  90.8  77.8  92.3  40.3  35.7  46.1
0.5   StreamingLLM  50.7  42.8  52.7  52.3  45.5  45.8  48.8  51.2  61.5  72.3  88.3  72.6  33.0  55.2
0.5   LagKV        100.0  97.8  48.2  98.4  54.5   3.3  93.9  95.3  98.6  74.4  89.5  58.1  42.9  73.5
0.75  SnapKV        82.2  18.8   3.6  13.3  10.7   4.2  13.2  12.2  79.7  64.4  89.3  27.4  27.7  34.4
0.75  StreamingLLM  25.0  20.3  22.3  28.9  25.9  20.0  24.4  25.8  35.8  66.9  82.3  32.3  24.1  33.4
0.75  LagKV         99.3  87.7   8.9  85.2   6.2   0.8  86.2  83.5  95.6  43.8  69.5  39.5  29.5  56.6
0.875 SnapKV        69.7   8.0   3.6  14.1   6.2   0.8  11.6  11.4  55.1  47.7  79.2  19.4  22.3  26.9
0.875 StreamingLLM  11.2  13.8  14.3  18.8  15.2  12.5  13.4  14.0  20.7  56.1  78.1  21.0  18.8  23.7
0.875 LagKV         99.3  62.3   3.6  56.2   0.0   0.8  60.2  50.6  93.0  18.8  55.2  29.0  22.3  42.4
"""
# Lag size (0: the whole cache), 1/r; single-document QA, multi-document QA, summaries, few-shot, synthetic, code; the average
# of LongBench; the partial score of the 64-digit passkeys.
LLAMA_LONGBENCH = """
   0 1  40.71  37.90  28.29  68.49  68.00  58.70  47.44  99.44
1024 2  39.42  37.12  27.38  67.71  68.50  58.83  46.74  99.27
1024 4  37.06  36.77  26.79  66.96  63.50  58.42  45.54  96.57
1024 6  35.74  36.08  26.33  66.33  60.50  57.91  44.65  91.77
1024 8  35.49  35.99  25.90  65.21  61.00  57.95  44.31  86.26
 512 2  39.43  37.45  27.35  67.82  67.50  58.66  46.73  97.02
 512 4  37.39  36.27  26.19  66.56  62.50  57.86  45.16  85.73
 512 6  34.95  35.62  25.52  65.87  59.50  58.14  44.11  75.67
 512 8  34.03  36.12  25.25  64.94  56.00  57.50  43.47  68.25
 128 2  38.56  36.80  27.20  67.64  68.00  59.27  46.48  92.76
 128 4  36.66  36.58  25.62  66.78  66.50  57.90  45.28  73.41
 128 6  34.57  35.41  24.59  63.59  64.00  56.97  43.49  38.48
 128 8  33.78  34.60  23.91  62.21  61.50  55.68  42.42  25.01
"""
QWEN_LONGBENCH = """
   0 1  41.62  45.00  26.41  68.91 100.00  63.60  51.53 100.00
1024 2  39.80  42.85  26.11  67.66  99.50  63.12  50.33  99.75
1024 4  36.92  40.39  24.81  65.91  95.00  61.60  48.15  96.98
1024 6  35.77  39.74  24.68  65.28  93.50  61.45  47.52  77.47
1024 8  34.60  39.10  24.18  64.74  90.50  61.30  46.73  66.88
 512 2  38.72  42.79  25.91  67.98  98.50  62.00  49.91  97.07
 512 4  35.42  39.12  24.49  64.59  94.00  60.16  47.01  75.89
 512 6  34.00  38.04  23.72  64.31  87.50  58.80  45.69  42.70
 512 8  32.14  37.83  23.11  63.48  82.50  58.71  44.64  30.00
 128 2  38.67  42.49  25.69  67.75  99.00  60.64  49.61  65.93
 128 4  34.47  39.78  24.07  65.13  96.00  58.67  46.91  20.83
 128 6  32.83  38.15  22.95  62.23  90.50  56.25  44.76  16.18
 128 8  32.47  37.10  22.20  60.24  88.50  56.10  43.78  15.07
"""
TASKS_OF_A_CATEGORY = (3, 3, 3, 3, 1, 2)
RULER = {"LK-T1": LLAMA_RULER, "LK-T2": QWEN_RULER}
ROUNDING_OF_TENTHS = 0.05 + 0.05 + 1e-9  # of the thirteen printed numbers, and of their printed mean
ROUNDING_OF_HUNDREDTHS = 0.005 + 0.005 + 1e-9


def ruler(text):
    """The rows of a table of RULER: {(ratio, method): the thirteen tasks and the average}."""
    rows = [line.split() for line in text.strip().splitlines()]
    return {(float(ratio), method): np.array(numbers, dtype=float) for ratio, method, *numbers in rows}


def longbench(text):
    """The rows of one model in table 3: {(lag size, 1/r): six categories, their average, the passkeys}."""
    rows = np.array([line.split() for line in text.strip().splitlines()], dtype=float)
    return {(int(row[0]), int(row[1])): row[2:] for row in rows}


def possible(number, percentages):
    """Whether all these percentages, rounded twice to tenths, can be shares of `number` yes-or-no examples."""
    return all(abs(100 * round(share * number / 100) / number - share) <= 0.0551 for share in percentages)


def numbers_of_examples(text):
    """The smallest possible number of examples of each task with one answer; RULER's 500 are possible for none of them."""
    columns = dict(zip(TASKS, np.array(list(ruler(text).values())).T, strict=False))
    single = {task: column for task, column in columns.items() if task[:2] in ("SK", "MK", "QA")}
    assert not any(possible(500, column) for column in single.values())
    return {task: next(number for number in itertools.count(1) if possible(number, column)) for task, column in single.items()}


@law("LK-T1")
def test_the_averages_of_table_1():
    """All 13 averages are means of their 13 tasks, as far as rounding lets one see."""
    for row in ruler(LLAMA_RULER).values():
        assert abs(row[:-1].mean() - row[-1]) <= ROUNDING_OF_TENTHS


@law("LK-T2")
def test_the_averages_of_table_2():
    """All 13 averages are means of their 13 tasks, as far as rounding lets one see."""
    for row in ruler(QWEN_RULER).values():
        assert abs(row[:-1].mean() - row[-1]) <= ROUNDING_OF_TENTHS


@law("LK-T1")
def test_table_1_is_measured_on_part_of_the_examples():
    """The single-answer tasks fit 60 to 91 examples, not the 500 of RULER: a point or two between methods is within chance."""
    assert numbers_of_examples(LLAMA_RULER) == {
        "SK1": 91,
        "SK2": 87,
        "SK3": 69,
        "MK1": 77,
        "MK2": 60,
        "MK3": 72,
        "QA1": 74,
        "QA2": 64,
    }


@law("LK-T2")
def test_table_2_is_measured_on_other_examples_than_table_1():
    """The single-answer tasks fit 112 to 152 examples here: the two tables are not of one test set."""
    assert numbers_of_examples(QWEN_RULER) == {
        "SK1": 152,
        "SK2": 138,
        "SK3": 112,
        "MK1": 128,
        "MK2": 112,
        "MK3": 120,
        "QA1": 124,
        "QA2": 112,
    }


@law("LK-S1")
def test_lagkv_has_the_best_average_everywhere():
    """At each of the four ratios and for both models the average of LagKV is above those of SnapKV and StreamingLLM."""
    for text in RULER.values():
        table = ruler(text)
        for ratio in (0.25, 0.5, 0.75, 0.875):
            assert table[ratio, "LagKV"][-1] > max(table[ratio, "SnapKV"][-1], table[ratio, "StreamingLLM"][-1]) + 6


@law("LK-S1")
def test_lagkv_is_not_best_at_every_task():
    """Of 104 cells LagKV is strictly best in 65 and behind in 34; at MK3 a sliding window beats it in all eight rows."""
    best = behind = 0
    for text in RULER.values():
        table = ruler(text)
        for ratio in (0.25, 0.5, 0.75, 0.875):
            others = np.maximum(table[ratio, "SnapKV"], table[ratio, "StreamingLLM"])[:-1]
            gain = table[ratio, "LagKV"][:-1] - others
            best, behind = best + int((gain > 0).sum()), behind + int((gain < 0).sum())
            mk3 = TASKS.index("MK3")
            assert table[ratio, "StreamingLLM"][mk3] > table[ratio, "LagKV"][mk3] + 9
    assert (best, behind) == (65, 34)


@law("LK-T3")
def test_longbench_averages_weigh_categories_by_their_tasks():
    """LB Avg. is the mean over 15 tasks, weights 3, 3, 3, 3, 1, 2: no other weights up to 6 give the 26 printed numbers."""
    rows = np.array([*longbench(LLAMA_LONGBENCH).values(), *longbench(QWEN_LONGBENCH).values()])

    def fits(weights):
        averages = rows[:, :6] @ np.array(weights) / sum(weights)
        return bool((np.abs(averages - rows[:, 6]) <= ROUNDING_OF_HUNDREDTHS).all())

    candidates = (weights for weights in itertools.product(range(1, 7), repeat=6) if math.gcd(*weights) == 1)
    assert [weights for weights in candidates if fits(weights)] == [TASKS_OF_A_CATEGORY]


@law("LK-T3")
def test_the_plain_mean_of_the_categories_is_another_number():
    """Unweighted, the whole cache would average 50.35 and 57.59, where 47.44 and 51.53 are printed."""
    for text, mean, printed in ((LLAMA_LONGBENCH, 50.35, 47.44), (QWEN_LONGBENCH, 57.59, 51.53)):
        row = longbench(text)[0, 1]
        assert row[6] == printed
        assert row[:6].mean() == pytest.approx(mean, abs=0.005)


@law("LK-S2")
def test_half_as_much_again_as_h2o_in_one_figure_only():
    """At "4x": exact match 89 against 35, 54 points more; partial match 96.57 against 70.8, 25.8 points or 36 % more."""
    lagkv_partial = longbench(LLAMA_LONGBENCH)[1024, 4][7]
    assert lagkv_partial == 96.57
    assert 89 - 35 > 50 and 89 / 35 - 1 > 0.5
    assert lagkv_partial - 70.8 < 26 and lagkv_partial / 70.8 - 1 < 0.37


@law("LK-S2")
def test_four_times_is_not_the_same_compression():
    """L=1024 and r=4x compress 8,192 tokens 2.29 times and 16,384 tokens 2.91 times: H2O at 4x keeps fewer tokens."""
    for length, left, factor in ((8192, 3584, 2.29), (16384, 5632, 2.91)):
        got = retained_length(length, keep_ratio=0.25, sink_size=16, lag_size=1024)
        assert got == left
        assert length / got == pytest.approx(factor, abs=0.005)
    assert not any(length >= 3.5 * retained_length(length, keep_ratio=0.25) for length in range(1, 22544))


@law("LK-S2")
def test_a_small_partition_loses_to_the_quoted_h2o():
    """With L=128 LagKV does compress about 4 times (3.66 at 8,192), and then has 20.8 (Qwen) and 73.4 (Llama) against 70.8."""
    assert 8192 / retained_length(8192, keep_ratio=0.25, lag_size=128) == pytest.approx(3.66, abs=0.005)
    assert longbench(QWEN_LONGBENCH)[128, 4][7] == 20.83
    assert longbench(LLAMA_LONGBENCH)[128, 4][7] == 73.41


@law("LK-S3")
def test_ninety_percent_of_longbench_remain():
    """At L=1024 and r=8x: 93.4 % for Llama, 90.7 % for Qwen."""
    for text, share in ((LLAMA_LONGBENCH, 0.934), (QWEN_LONGBENCH, 0.907)):
        table = longbench(text)
        assert table[1024, 8][6] / table[0, 1][6] == pytest.approx(share, abs=0.0005)


@law("LK-S4")
def test_qwen_falls_below_85_percent():
    """At L=128 and r=8x Llama keeps 89.4 %, but Qwen 84.96 %: below 85 even where every rounding is in its favour."""
    llama, qwen = longbench(LLAMA_LONGBENCH), longbench(QWEN_LONGBENCH)
    assert llama[128, 8][6] / llama[0, 1][6] == pytest.approx(0.894, abs=0.0005)
    assert (qwen[128, 8][6] + 0.005) / (qwen[0, 1][6] - 0.005) < 0.85
    assert round(100 * qwen[128, 8][6] / qwen[0, 1][6]) == 85
    assert min(qwen[128, 8][:6] / qwen[0, 1][:6]) == pytest.approx(0.780, abs=0.0005)  # single-document QA
    for table in (llama, qwen):
        assert min(table, key=lambda setup: table[setup][6]) == (128, 8)


@law(
    "LK-S5",
    length=st.integers(1, 4000),
    percent=st.integers(0, 100),
    sink=st.integers(0, 20),
    lag=st.integers(1, 200),
    times=st.integers(2, 8),
)
def test_a_divisor_as_lag_never_retains_more(length, percent, sink, lag, times):
    """Where the smaller lag divides the larger one, as 128, 512 and 1024 do, it compresses at least as much."""
    keep_ratio = Fraction(percent, 100)
    small = retained_length(length, keep_ratio=keep_ratio, sink_size=sink, lag_size=lag)
    assert small <= retained_length(length, keep_ratio=keep_ratio, sink_size=sink, lag_size=lag * times)


@law("LK-S5")
def test_a_smaller_lag_can_compress_less():
    """In general it does not: of 16 tokens at r = 1/2, L = 6 leaves 13 and L = 8 leaves 12, for 16 is no multiple of 6."""
    assert [retained_length(16, keep_ratio=0.5, sink_size=0, lag_size=lag) for lag in (6, 8)] == [13, 12]
    assert [retained_length(200, keep_ratio=0.5, sink_size=0, lag_size=lag) for lag in (96, 100)] == [152, 150]


@law("LK-S6")
def test_short_contexts_are_never_compressed():
    """With S=16 and L=1024 nothing is evicted below 2,064 tokens, and the last 1,024 to 2,047 tokens are always whole."""
    assert retained_length(2063, keep_ratio=0.125) == 2063
    assert retained_length(2064, keep_ratio=0.125) == 16 + 128 + 1024
    windows = {retained_length(length, keep_ratio=0) - 16 for length in range(2064, 9000)}
    assert (min(windows), max(windows)) == (1024, 2047)


@law("LK-S6")
def test_a_grid_that_gives_27_percent():
    """Two of ten lengths under 2K and eleven depths of which one is at the end: 2/10 + 8/10 * 1/11 = 27.3 %."""
    short = Fraction(2, 10)
    assert round(float(100 * (short + (1 - short) / 11)), 1) == 27.3


@law("LK-S6")
def test_the_bottom_line_depends_on_the_lengths():
    """At 3,087 tokens the window is 2,047: passkeys in the last two thirds are whole too, not at 100 % depth alone."""
    window = retained_length(3087, keep_ratio=0) - 16
    assert window == 2047
    assert window / 3087 > 0.66


@law("LK-S7")
def test_a_sixth_is_not_0167():
    """r = 0.167 keeps 171 of 1024 tokens, r = 1/6 keeps 170; at 512 and 128 both keep 85 and 21; none of the six is whole."""
    for lag, printed, exact in ((1024, 171, 170), (512, 85, 85), (128, 21, 21)):
        assert tokens_per_partition(0.167, lag) == printed
        assert tokens_per_partition(Fraction(1, 6), lag) == exact
        assert Fraction(lag, 6).denominator > 1


@law("LK-S7")
def test_a_ratio_of_a_partition_is_not_the_ratio_of_the_cache():
    """r = 8x at L=1024 compresses 16,384 tokens 4.3 times, at L=128 7.2 times; 8 times is the limit of long contexts."""
    for lag, factor in ((1024, 4.27), (128, 7.21)):
        assert 16384 / retained_length(16384, keep_ratio=0.125, lag_size=lag) == pytest.approx(factor, abs=0.005)
    # With floor(rL) the cache may even shrink by more than 1/r: at L = 3 and r = 1/2 to nearly a third.
    assert compression_ratio(3000, keep_ratio=0.5, sink_size=0, lag_size=3) > 0.5


@law("LK-S8")
def test_normalising_erases_the_variance_of_the_channels():
    """A channel a hundred times as wide in both partitions normalises to the same numbers: its variance is gone, by design."""
    generator = np.random.default_rng(0)
    states, following = generator.normal(size=(2, 64, 4))
    wide = np.array([128.0, 1, 1, 1])
    assert (wide * states).var(axis=0)[0] > 100 * states.var(axis=0).max()
    assert normalise(wide * states, wide * following).var(axis=0) == pytest.approx(normalise(states, following).var(axis=0))


@law("LK-S10")
def test_two_whole_layers_are_memory_too():
    """Of 32 (Llama) or 28 layers (Qwen) two are left whole: at r = 1/8 the variant may hold up to 44 % or 50 % more than LagKV."""
    for layers, more in ((32, 0.4375), (28, 0.5)):
        kept = (2 + (layers - 2) * 0.125) / layers
        assert kept / 0.125 - 1 == more


@law("LK-S11")
def test_the_ratios_of_ruler_are_nearly_reached():
    """At 16,384 tokens and L=128 one token more a partition is 0.77 % of the cache: each ratio is met from above within that."""
    for ratio in (0.25, 0.5, 0.75, 0.875):
        keep_ratio = keep_ratio_for(16384, int(16384 * (1 - ratio)), lag_size=128)
        assert 0 <= compression_ratio(16384, keep_ratio=keep_ratio, lag_size=128) - ratio < 126 / 16384


@law("LK-S12")
def test_qwen_falls_faster_at_small_partitions():
    """Below rL = 256 Qwen keeps a smaller share of its passkey score than Llama in all nine setups; from 256 on they are alike."""
    llama, qwen = longbench(LLAMA_LONGBENCH), longbench(QWEN_LONGBENCH)
    small = 0
    for lag, times in llama:
        if lag == 0:
            continue
        shares = [table[lag, times][7] / table[0, 1][7] for table in (llama, qwen)]
        if lag / times < 256:
            small += 1
            assert shares[1] < shares[0] - 0.1
        else:
            assert abs(shares[1] - shares[0]) < 0.01
    assert small == 9


@law("LK-S12")
def test_the_product_alone_does_not_decide():
    """rL = 64 comes from L=512, 8x and from L=128, 2x: 68.3 against 92.8 (Llama), 30.0 against 65.9 (Qwen)."""
    for text, deep, shallow in ((LLAMA_LONGBENCH, 68.25, 92.76), (QWEN_LONGBENCH, 30.0, 65.93)):
        table = longbench(text)
        assert (table[512, 8][7], table[128, 2][7]) == (deep, shallow)


@law("LK-3")
def test_without_a_mask_the_past_changes():
    """Two tokens with q = k = 0: as printed, token 0 attends to both half and half, while decoding gave it weight 1 on itself."""
    states = np.zeros((2, 1))
    assert softmax(attention_logits(states, states)).tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert attention_weights(states, states).tolist() == [[1.0, 0.0], [0.5, 0.5]]
    assert attention_weights(states[:1], states[:1]).tolist() == [[1.0]]
