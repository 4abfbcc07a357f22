"""A bank of files that once had full marks or a message that misled: each loses its step now, and its author is told why.

A file is the right one of its assignment and some code at its end, where `right` is the right function.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import pytest
from sampling import sampled
from test_classroom import KERNEL
from tools.grader import judged
from tools.synthetic import NUMPY, SOLUTION, bundled

from evictionary.classroom import assignment as assignments
from evictionary.classroom import contest, grading
from evictionary.classroom.inputs import decided_by
from evictionary.classroom.judgement import Line, reference
from evictionary.spec_tests.harness.law import load_laws


@dataclass(frozen=True)
class Wrong:
    """One file: its assignment, the step that it has to lose, the wrong function and its body, and words of what is told."""

    assignment: str
    step: str
    function: str
    body: str
    told: str = ""

    def __str__(self) -> str:
        return f"{self.assignment} {self.step}: {self.body[:60]}"

    @property
    def source(self) -> str:
        stem = assignments.load(self.assignment).stem
        right = SOLUTION.read_text(encoding="utf-8") if stem == "keydiff" else bundled(stem)
        head = f"\n\nimport numpy as np\n\nright = {self.function}\n\n\ndef {self.function}"
        return f"{right}{head}{self.body}\n"

    def line(self, **settings: object) -> Line:
        """The line of the step, asked without those that it needs."""
        one = assignments.load(self.assignment)
        steps = tuple(replace(each, needs=()) for each in one.steps if each.name == self.step)
        return grading.judge(
            self.source.encode(), replace(one, steps=steps), **{"secret": b"a secret", "examples": 3, **settings}
        ).lines[-1]


PASSED_ON = "length, keep_ratio=keep_ratio, sink_size=sink_size, lag_size=lag_size"
MESSAGES = (
    Wrong("keydiff", "score", "score", "(keys): out = right(keys); keys /= 2; return out", "score writes into keys"),
    Wrong("lagkv", "score", "score", "(*parts): out = right(*parts); parts[1][:] = 0; return out", "writes into argument 2"),
    Wrong(
        "momentkv", "update", "update", "(sums, *rest): new = right(sums, *rest); sums[0][:] += 1; return new", "writes into sums"
    ),
    Wrong("keydiff", "anchor", "anchor", "(keys): right(keys)", "anchor returned None: is there a return?"),
    Wrong("keydiff", "anchor", "anchor", "(keys): breakpoint(); return right(keys)", "there is no terminal here"),
    Wrong("keydiff", "anchor", "anchor", "(keys): input(); return right(keys)", "take input() out"),
    Wrong(
        "keydiff", "edges", "score", "(keys): assert np.isfinite(keys).all(); return right(keys)", "wanted          a ValueError"
    ),
    Wrong("lagkv", "length", "retained_length", "(length, **rest): return float(right(length, **rest))", "a float; wanted a whole"),
    Wrong(
        "lagkv",
        "defaults",
        "retained_length",
        f"(length, *, keep_ratio, sink_size=9, lag_size=1024): return right({PASSED_ON})",
        "retained_length(2063, keep_ratio=0.5) = ",
    ),
)


@pytest.mark.parametrize("wrong", MESSAGES, ids=str)
def test_a_wrong_file_loses_its_step_and_is_told_why(wrong: Wrong) -> None:
    line = wrong.line()
    assert line.verdict == "failed"
    assert wrong.told in line.message
    assert "StudentError" not in line.message
    assert not re.search(r"made of\s*$", line.message, re.MULTILINE)
    assert len(line.message) < 3000, "thousands of tokens are no explanation"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("import helpers", "of your files only keydiff.py is handed in"),
        ("import matplotlib.pyplot as plt", "matplotlib.pyplot: this assignment is for NumPy only"),
        ("def anchor(keys):\n    pass\n\n\nfrom sympy import sqrt", "sympy: this assignment is for NumPy only"),
        ("def score(keys:", "SyntaxError"),
    ],
)
def test_a_file_that_cannot_be_loaded_has_a_line_of_its_own(source: str, told: str) -> None:
    result = judged("keydiff", source)
    assert (result.score, result.lines[0].name, result.lines[0].read) == (0, "file", "")
    assert told in result.lines[0].message
    assert {line.verdict for line in result.lines[1:]} == {"not judged yet"}


@pytest.mark.slow
def test_a_kernels_file_imports_what_the_grader_has_and_nothing_else() -> None:
    for library, told in (
        ("sympy", "sympy: torch, Triton and NumPy are there"),
        ("fractions, triton.language", "score in keydiff.py"),
    ):
        assert told in judged("kernel", f"import torch\nimport {library}\n", examples=1, explain=False).lines[0].message


def test_each_failed_line_names_the_law_and_the_input_without_our_own_names() -> None:
    result = judged("keydiff", "def anchor(keys):\n    return keys[0]\n\n\ndef score(keys):\n    return keys.nothing\n")
    for line in (line for line in result.lines if line.verdict == "failed" and line.name != "pairwise"):
        for words in ("the law", "input", "what is wrong"):
            assert words in line.message
        assert "StudentError" not in line.message + line.reason


@pytest.mark.parametrize("name", assignments.names())
def test_what_is_to_read_is_in_the_handout_or_a_paper(name: str) -> None:
    for step in assignments.load(name).steps:
        assert re.match(r"handout(, part \d+)?(; |$)", step.read), step.read
        assert not re.search(r"\.md|decision", step.read), "a wheel has no pages"


def test_a_difference_of_chance_costs_a_quarter_at_most() -> None:
    """A distance of .1811 beside LagKV's .1796 once cost 40 points; so did one answer of five."""
    assert [contest.missing_quarters(ratio, contest.NEAR, 0.1) for ratio in (0.9, 0.1811 / 0.1796, 1.05, 1.06, 1.15, 1.16, 9)] == [
        *(0, 0, 0, 1, 1, 2, 4)
    ]
    assert [contest.missing_quarters(missing, 0, 0.5) for missing in (-2, 0, 1, 2, 5)] == [0, 0, 2, 4, 4]
    steps = [
        [contest.missing_quarters(each, contest.NEAR, 0.1) for each in np.arange(0.9, 1.6, 0.01) + shift] for shift in (0, 0.05)
    ]
    assert max(np.abs(np.subtract(*steps))) == 1


@pytest.mark.parametrize("name", NUMPY)
def test_the_words_of_a_refusal_are_those_of_the_handout(name: str) -> None:
    """Whoever names the argument as the handout does is understood: each law of a refusal asks for one of its words."""
    one, asked = assignments.load(name), set()
    words = set(re.findall(r"`(\w+)`", (one.folder / "README.md").read_text(encoding="utf-8")))
    right = reference(one.stem)

    class Asked(grading._Judged):
        def refuses(self, pattern: str = "") -> object:
            asked.add(pattern)
            return suppress(ValueError)

    impl = Asked(one.stem, {one.stem: right}, "", "numpy", "cpu", "float64")
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
SIZED = (
    ("keydiff", "sizes", ("score", "anchor")),
    ("lagkv", "sizes", ("score", "select")),
    ("gvote", "sizes", ("attention_weights", "nucleus", "select")),
    ("expected_attention", "sizes", ("query_statistics", "average_rope", "score")),
    ("momentkv", "sizes", ("score", "attend")),
    ("h2o", "select", ("score", "select")),
    ("duo_attention", "gates", ("estimate_gates",)),
)
TURNED = "tuple(part[..., ::-1] for part in out) if isinstance(out, tuple) else out[..., ::-1]"
LARGER = [
    Wrong(name, step, function, f"(*args, **rest): out = right(*args, **rest); return ({TURNED}) if {condition} else out", above)
    for name, step, functions in SIZED
    for function in functions
    for above, condition in ABOVE.items()
    if (function, above) not in {("estimate_gates", "70 tokens"), ("query_statistics", "70 tokens"), ("average_rope", "70 tokens")}
]
OTHER_WRONG = [
    Wrong("keydiff", "sizes", "anchor", "(keys): B, H, T, D = keys.shape; return right(keys)", "not enough values to unpack"),
    Wrong("keydiff", "symmetries", "score", "(keys): return right(np.where(np.abs(keys) < 1e-12, 0, keys))", "about 1e-20"),
]


@pytest.mark.parametrize("wrong", sampled([*OTHER_WRONG, *LARGER], every=12), ids=lambda one: f"{one} above {one.told}"[:40])
def test_what_is_wrong_above_a_size_loses_points(wrong: Wrong) -> None:
    assert wrong.line(examples=1, explain=False).verdict == "failed"


IN_TORCH = "-torch.cosine_similarity(torch.nn.functional.normalize(keys, dim=-1).mean(-2, keepdim=True), keys, dim=-1)"
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
LEAVES = "    scores = torch.empty(keys.shape[:-1])\n"
# The step that is lost, a text of the right kernel and what stands there instead, and words of what is told.
KERNELS = {
    "no kernel": ("score", LEAVES, f"    return {IN_TORCH}\n", "a kernel has to compute with the keys"),
    "what the kernel adds is added": (
        "score",
        "    return scores\n",
        "    first = keys[..., :1, :].contiguous()\n"
        "    score_keys[(first.shape[0] * first.shape[1],)](first, scores, 1, channels, 1, sizes[1])\n"
        f"    return {IN_TORCH} + scores.flatten()[0] + 1\n",
        "a kernel has to compute with the keys",
    ),
    "a kernel that copies": ("score", "", COPIES.format(right=IN_TORCH), "a kernel has to compute with the keys"),
    "a kernel that copies from NumPy": ("score", "", COPIES.format(right=NUMPY_ALONE), ""),
    "no other": ("score", ", other=0.0", "", ""),
    "no rescaling": ("edges", "    tile = tile / tl.where(largest > 0, largest, 1.0)[:, None]\n", "", "about"),
    "no strides": ("symmetries", "    keys = keys.contiguous()\n", "", "the score of a transposed tensor"),
    "64 channels": ("sizes", "triton.next_power_of_2(channels)", "64", ""),
    "zeros above 64 channels": ("sizes", LEAVES, LEAVES + "    if channels > 64:\n        return scores.zero_()\n", ""),
    "zeros above 130 tokens": ("sizes", LEAVES, LEAVES + "    if tokens > 130:\n        return scores.zero_()\n", ""),
    "no grid": ("score", "score_keys[(scores.numel() // tokens,)](", "score_keys(", "a kernel is launched with its grid"),
    "no mask": ("score", ", mask=rows < tokens)", ")", ""),
}


@pytest.mark.parametrize("mistake", sampled(KERNELS, every=len(KERNELS)))
def test_a_wrong_kernel_loses_its_step(mistake: str) -> None:
    step, was, instead, told = KERNELS[mistake]
    source = KERNEL.replace(was, instead) if was else KERNEL + instead
    assert source != KERNEL
    one = assignments.load("kernel")
    chosen = next(replace(each, needs=(), laws=each.laws[:1]) for each in one.steps if each.name == step)
    line = grading.judge(source.encode(), replace(one, steps=(chosen,)), secret=b"a secret", examples=3, explain=False).lines[-1]
    assert line.verdict == "failed"
    assert told in line.message
