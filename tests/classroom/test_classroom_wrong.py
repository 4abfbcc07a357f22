"""Files that once had full marks or a message that misled:
each loses its step now, and its author is told why.
"""

import re
import tracemalloc
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import pytest
from tools import sampled, says
from tools.grader import KERNEL, NUMPY, alone, judged, line_of, right, with_another

from evictionary.classroom import assignment as assignments, contest, grading
from evictionary.classroom.inputs import decided_by
from evictionary.classroom.judgement import Line, reference
from evictionary.spec_tests.judge.law import load_laws


class Wrong(NamedTuple):
    """A right file whose `function` has another body, or
    without a function a whole file; the step that it loses.

    `told` are words of the message or the script, with | between them. `law` is a part of the names of the
    laws that are asked.
    """

    assignment: str
    step: str
    function: str
    body: str
    told: str = ""
    law: str = ""

    @property
    def source(self) -> str:
        """The file; its `right` is the right function."""
        return with_another(self.function, self.body, right(self.assignment)) if self.function else self.body


PASSED_ON = "length, keep_ratio=keep_ratio, sink_size=sink_size, lag_size=lag_size"
COUNTED = "(keys, calls=[]): calls.append(1); return right(keys) + "
REFUSING = "a ValueError with 'keys' in its message"
MESSAGES = [
    # An argument that is written into, no answer, a terminal.
    Wrong(
        "keydiff",
        "score",
        "score",
        "(keys): out = right(keys); keys /= 2; return out",
        "score writes into keys",
    ),
    Wrong(
        "lagkv",
        "score",
        "score",
        "(*parts): out = right(*parts); parts[1][:] = 0; return out",
        "writes into argument 2",
    ),
    Wrong(
        "momentkv",
        "update",
        "update",
        "(sums, *x): new = right(sums, *x); sums[0][:] += 1; return new",
        "writes into sums",
    ),
    Wrong("keydiff", "anchor", "anchor", "(keys): right(keys)", "anchor returned None: is there a return?"),
    Wrong(
        "keydiff", "anchor", "anchor", "(keys): breakpoint(); return right(keys)", "there is no terminal here"
    ),
    Wrong("keydiff", "anchor", "anchor", "(keys): input(); return right(keys)", "take input() out"),
    # An answer of another form.
    Wrong(
        *("expected_attention", "statistics", "query_statistics", "(*args): return right(*args)[0]"),
        "query_statistics returned one ndarray, wanted a tuple of 2 arrays|smallest input",
    ),
    Wrong(
        "momentkv",
        "sums",
        "update",
        "(*args): return tuple(right(*args))",
        "wanted Moments(count, key_sum|smallest input",
    ),
    Wrong(
        "lagkv",
        "length",
        "retained_length",
        "(length, **x): return float(right(length, **x))",
        "a float; wanted a whole",
    ),
    Wrong(
        *("keydiff", "score", "score", "(keys): return right(keys).astype(np.float32)"),
        "score returned float32, wanted float64, the dtype of its input",
    ),
    Wrong(
        "keydiff",
        "score",
        "score",
        "(keys): return right(keys).tolist()",
        "score returned a list of 1, wanted one array or number",
    ),
    Wrong(
        "keydiff",
        "score",
        "score",
        "(keys): return right(keys)[..., None]",
        "returned shape (1, 1, 1, 1), wanted (1, 1, 1)",
    ),
    # A refusal.
    Wrong(
        "keydiff",
        "edges",
        "score",
        "(keys): assert np.isfinite(keys).all(); return right(keys)",
        "wanted          a ValueError",
    ),
    Wrong(
        "keydiff",
        "edges",
        "score",
        "(keys): raise ValueError('hmm')",
        f"bad input raises ValueError: hmm|{REFUSING}",
        "bad_shapes",
    ),
    Wrong(
        *("keydiff", "edges", "score", "(keys): return np.zeros(keys.shape[:-1])"),
        *(f"bad input is accepted in silence|{REFUSING}", "bad_shapes"),
    ),
    Wrong(
        *("keydiff", "edges", "", "def score(keys):\n    return keys.sum(-1)\n"),
        *(
            'except ValueError as error:\n    print("expected a ValueError:", error)\nprint("got',
            "bad_shapes",
        ),
    ),
    # The last digits, two answers, constants, and the call that is wrong among others that are right.
    Wrong(
        "keydiff",
        "anchor",
        "anchor",
        "(keys): return right(keys) * (1 + 1e-9)",
        "(norm + 1e-12) or a step in a lower precision",
    ),
    Wrong("keydiff", "anchor", "anchor", f"{COUNTED}(len(calls) > 6)", "two answers to one input"),
    Wrong("keydiff", "anchor", "anchor", f"{COUNTED}(len(calls) == 3)", "two answers to one input"),
    Wrong(
        *("lagkv", "defaults", "retained_length"),
        f"(length, *, keep_ratio, sink_size=9, lag_size=1024): return right({PASSED_ON})",
        "retained_length(2063, keep_ratio=0.5) = ",
    ),
    Wrong(
        *("lagkv", "select", "select"),
        "(keys, values, **named): return right(keys, values, **named) & (named['sink_size'] > 3)",
        *("impl.lagkv.select(keys, values, ", "retained_length"),
    ),
]


@pytest.mark.parametrize("wrong", MESSAGES, ids=lambda one: f"{one.assignment} {one.step}: {one.body[:60]}")
def test_a_wrong_file_loses_its_step_and_is_told_why(wrong: Wrong) -> None:
    line = line_of(wrong.assignment, wrong.step, wrong.source, wrong.law, examples=4)
    (step,) = alone(wrong.assignment, wrong.step).steps
    assert (line.verdict, len(line.laws)) == (
        "failed",
        len([law for law in step.laws if wrong.law in law]) + bool(step.check),
    )
    says(line.message + line.repro, *wrong.told.split("|"))
    says(line.message, never=("StudentError", "Flaky", "site-packages"))
    assert not re.search(r"made of\s*$", line.message, re.MULTILINE)
    assert len(line.message) < 3000, "thousands of tokens are no explanation"
    assert wrong.step != "select" or "impl.lagkv.retained_length" not in line.message


@pytest.mark.parametrize(
    ("size", "told"),
    [
        (10**6, "score returned shape (1000000, 1, 1, 1), wanted (1, 1, 1)"),
        (10**7, "bytes, more than 4194304)"),
    ],
)
def test_an_answer_without_end_takes_no_room(size: int, told: str) -> None:
    """With the expected numbers of a longer input, this would be gigabytes."""
    tracemalloc.start()
    line = line_of(
        "keydiff", "score", with_another("score", f"(keys): return np.zeros(({size}, 1, 1, 1), np.float16)")
    )
    largest = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert told in line.message and largest < 2**27


NUMPY_ONLY = "this assignment is for NumPy only"


@pytest.mark.parametrize(
    ("name", "source", "told"),
    [
        ("keydiff", "import helpers", "of your files only keydiff.py is handed in"),
        ("keydiff", "import torch", f"torch: {NUMPY_ONLY}"),
        ("keydiff", "import matplotlib.pyplot as plt", f"matplotlib.pyplot: {NUMPY_ONLY}"),
        ("keydiff", "def anchor(keys):\n    pass\n\n\nfrom sympy import sqrt", f"sympy: {NUMPY_ONLY}"),
        ("keydiff", "def score(keys:", "SyntaxError"),
        pytest.param(
            "kernel",
            "import torch\nimport sympy\n",
            "sympy: torch, Triton and NumPy are there",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_file_that_cannot_be_loaded_has_a_line_of_its_own(name: str, source: str, told: str) -> None:
    result = judged(name, source, examples=1)
    assert (result.score, result.lines[0].name, result.lines[0].read) == (0, "file", "")
    assert told in result.lines[0].message
    assert {line.verdict for line in result.lines[1:]} == {"not judged yet"}


@pytest.mark.slow
def test_a_kernels_file_imports_what_the_grader_has() -> None:
    source = "import torch\nimport fractions, triton.language\n"
    assert "score in keydiff.py" in judged("kernel", source, examples=1, explain=False).lines[0].message


def test_each_failed_line_names_the_law_and_the_input_without_our_own_names() -> None:
    result = judged(
        "keydiff", "def anchor(keys):\n    return keys[0]\n\n\ndef score(keys):\n    return keys.nothing\n"
    )
    for line in (line for line in result.lines if line.verdict == "failed" and line.name != "pairwise"):
        says(line.message, "the law", "input", "what is wrong")
        assert "StudentError" not in line.message + line.reason


@pytest.mark.parametrize("name", assignments.names())
def test_what_is_to_read_is_in_the_handout_or_a_paper(name: str) -> None:
    for step in assignments.load(name).steps:
        assert re.match(r"handout(, part \d+)?(; |$)", step.read), step.read
        assert not re.search(r"\.md|decision", step.read), "a wheel has no pages"


def test_a_difference_of_chance_costs_a_quarter_at_most() -> None:
    """A distance of .1811 beside LagKV's .1796 once cost 40 points; so did one answer of five."""
    distances = {0.9: 0, 0.1811 / 0.1796: 0, 1.05: 0, 1.06: 1, 1.15: 1, 1.16: 2, 9: 4}
    assert {each: contest.missing_quarters(each, contest.NEAR, 0.1) for each in distances} == distances
    answers = {-2: 0, 0: 0, 1: 2, 2: 4, 5: 4}
    assert {each: contest.missing_quarters(each, 0, 0.5) for each in answers} == answers
    near, less = (
        [contest.missing_quarters(n / 100 + shift, contest.NEAR, 0.1) for n in range(90, 160)]
        for shift in (0, 0.05)
    )
    assert max(np.abs(np.subtract(near, less))) == 1


@pytest.mark.parametrize("name", NUMPY)
def test_the_words_of_a_refusal_are_those_of_the_handout(name: str) -> None:
    """Whoever names the argument as the handout does is
    understood: each law of a refusal asks for one of its words.
    """
    one, asked = assignments.load(name), set()
    words = set(re.findall(r"`(\w+)`", (one.folder / "README.md").read_text(encoding="utf-8")))

    class Asked(grading._Judged):
        def refuses(self, pattern: str = "") -> object:
            asked.add(pattern)
            return suppress(ValueError)

    impl = Asked(one.stem, {one.stem: reference(one.stem)}, "", "numpy", "cpu", "float64")
    for law in (load_laws()[each] for step in one.steps for each in step.laws):
        if law.kind == "refusal":
            decided_by(1, law, 40).check(impl)
    assert {pattern for pattern in asked if not words & set(pattern.split("|"))} == set()


ABOVE = {
    "70 tokens": "max(length for each in args[:2] for length in np.shape(each)) > 150",
    "16 channels": "np.shape(args[0])[-1] > 16",
    "8 heads": "np.ndim(args[0]) > 2 and np.shape(args[0])[1] > 8",
    "4 items": "np.ndim(args[0]) > 2 and np.shape(args[0])[0] > 4",
}
SIZED = {
    ("kv_cache", "sizes"): ("weights", "attend", "rotate"),
    ("keydiff", "sizes"): ("score", "anchor"),
    ("lagkv", "sizes"): ("score", "select"),
    ("gvote", "sizes"): ("attention_weights", "nucleus", "select"),
    ("expected_attention", "sizes"): ("query_statistics", "average_rope", "score"),
    ("momentkv", "sizes"): ("score", "attend"),
    ("h2o", "select"): ("score", "select"),
    ("duo_attention", "gates"): ("estimate_gates",),
    ("quantisation", "sizes"): ("quantise", "by_token", "by_channel", "kivi", "hadamard"),
}
WITHOUT_TOKENS = {"estimate_gates", "query_statistics", "average_rope"}
TURNED = "tuple(part[..., ::-1] for part in out) if isinstance(out, tuple) else out[..., ::-1]"
LARGER = [
    Wrong(
        "keydiff", "sizes", "anchor", "(keys): B, H, T, D = keys.shape; return right(keys)", "a size of axes"
    ),
    Wrong(
        "keydiff",
        "symmetries",
        "score",
        "(keys): return right(np.where(np.abs(keys) < 1e-12, 0, keys))",
        "1e-20",
    ),
    *(
        Wrong(
            *step,
            function,
            f"(*args, **rest): out = right(*args, **rest); return ({TURNED}) if {condition} else out",
            above,
        )
        for step, functions in SIZED.items()
        for function in functions
        for above, condition in ABOVE.items()
        if (above, function) not in {("70 tokens", each) for each in WITHOUT_TOKENS}
    ),
]


@pytest.mark.parametrize(
    "wrong",
    sampled([(one,) for one in LARGER], every=12),
    ids=lambda one: f"{one.assignment} {one.function} above {one.told}",
)
def test_what_is_wrong_above_a_size_loses_points(wrong: Wrong) -> None:
    assert line_of(wrong.assignment, wrong.step, wrong.source, examples=1, explain=False).verdict == "failed"


IN_TORCH = (
    "-torch.cosine_similarity(torch.nn.functional.normalize(keys, dim=-1).mean(-2, keepdim=True), "
    "keys, dim=-1)"
)
COPIES = """
@triton.jit
def copied(source, target, SIZE: tl.constexpr):
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(target + place, tl.load(source + place))


def score(keys):
    if keys.ndim < 2 or 0 in keys.shape or not keys.isfinite().all():
        raise ValueError("keys: wanted finite numbers and no empty axis")
    right, written = {right}, torch.empty(keys.shape[:-1])
    copied[(right.numel(),)](right, written, 1)
    return written
"""
NUMPY_ALONE = "torch.from_numpy(-(lambda k: (k * k[..., :1, :]).sum(-1))(keys.numpy()))"
LEAVES = "    scores = torch.empty(keys.shape[:-1], device=keys.device)\n"
COMPUTES = "a kernel has to compute with the keys"
# The step that is lost, a text of the right kernel and what stands there instead, and words of what is told.
KERNELS = {
    "no kernel": ("score", LEAVES, f"    return {IN_TORCH}\n", COMPUTES),
    "what the kernel adds is added": (
        "score",
        "    return scores\n",
        "    first = keys[..., :1, :].contiguous()\n"
        "    score_keys[(first.shape[0] * first.shape[1],)](first, scores, 1, channels, 1, sizes[1])\n"
        f"    return {IN_TORCH} + scores.flatten()[0] + 1\n",
        COMPUTES,
    ),
    "a kernel that copies": ("score", "", COPIES.format(right=IN_TORCH), COMPUTES),
    "a kernel that copies from NumPy": ("score", "", COPIES.format(right=NUMPY_ALONE), ""),
    "no other": ("score", ", other=0.0", "", ""),
    "no rescaling": (
        "edges",
        "    tile = tile / tl.where(largest > 0, largest, 1.0)[:, None]\n",
        "",
        "of keydiff (torch, cpu, float32)",
    ),
    "no strides": ("symmetries", "    keys = keys.contiguous()\n", "", "the score of a transposed tensor"),
    "64 channels": ("sizes", "triton.next_power_of_2(channels)", "64", ""),
    "zeros above 64 channels": (
        "sizes",
        LEAVES,
        LEAVES + "    if channels > 64:\n        return scores.zero_()\n",
        "",
    ),
    "zeros above 130 tokens": (
        "sizes",
        LEAVES,
        LEAVES + "    if tokens > 130:\n        return scores.zero_()\n",
        "",
    ),
    "no grid": (
        "score",
        "score_keys[(scores.numel() // tokens,)](",
        "score_keys(",
        "a kernel is launched with its grid",
    ),
    "no mask": ("score", ", mask=rows < tokens)", ")", ""),
}


@pytest.mark.parametrize("mistake", sampled(KERNELS, every=len(KERNELS)))
def test_a_wrong_kernel_loses_its_step(mistake: str) -> None:
    step, was, instead, told = KERNELS[mistake]
    assert was in KERNEL
    one = alone("kernel", step, laws=alone("kernel", step).steps[0].laws[:1])
    source = KERNEL.replace(was, instead) if was else KERNEL + instead
    line = judged(one, source, examples=10, explain="(torch" in told).lines[-1]
    assert (line.verdict, told in line.message) == ("failed", True)


# The assignment in which students write the rows that show planted mistakes

ROWS = """
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
    return {line.name: line for line in judged("judge", ROWS + changed).lines}


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
    says(lines[name].message, told, never=["this law alone"])
    assert {name} <= {each for each, line in lines.items() if line.verdict == "failed"} <= {name, "rows"}
