"""The classroom: the assignments, what a student is told, the grader's files, and that the grader grades."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import os
import pickle
import re
import runpy
import select
import signal
import struct
import subprocess
import sys
import tarfile
import tracemalloc
import zipfile
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import classroom_styles
import numpy as np
import pytest
from hypothesis import assume
from hypothesis import strategies as st
from jsonschema import ValidationError
from markdown_it import MarkdownIt
from sampling import sampled
from typer.testing import CliRunner, Result

from docs_build import transcript
from evictionary.classroom import assignment as assignments
from evictionary.classroom import attacks, classes, contest, formats, grading, seccomp, submissions, worker
from evictionary.classroom.child import Child, ChildDied, Limits, closed
from evictionary.classroom.inputs import decided_by
from evictionary.classroom.synthetic import NUMPY, SOLUTION, bundled
from evictionary.cli.app import app
from evictionary.errors import InstallError
from evictionary.spec_tests.harness import matrix
from evictionary.spec_tests.harness.law import REQUIREMENTS, load_laws
from evictionary.spec_tests.harness.planted import load_mutants

KERNEL = """
import torch
import triton
import triton.language as tl


@triton.jit
def score_keys(keys, scores, tokens, channels, TOKENS: tl.constexpr, CHANNELS: tl.constexpr):
    head = tl.program_id(0)
    rows, columns = tl.arange(0, TOKENS), tl.arange(0, CHANNELS)
    inside = (rows[:, None] < tokens) & (columns[None, :] < channels)
    tile = tl.load(keys + head * tokens * channels + rows[:, None] * channels + columns[None, :], mask=inside, other=0.0)
    largest = tl.max(tl.abs(tile), axis=1)
    tile = tile / tl.where(largest > 0, largest, 1.0)[:, None]
    norms = tl.sqrt(tl.sum(tile * tile, axis=1))
    units = tile / tl.where(norms > 0, norms, 1.0)[:, None]
    anchor = tl.sum(units, axis=0)
    length = tl.sqrt(tl.sum(anchor * anchor))
    anchor = anchor / tl.where(length > 0, length, 1.0)
    tl.store(scores + head * tokens + rows, -tl.sum(units * anchor[None, :], axis=1), mask=rows < tokens)


def score(keys):
    if keys.ndim < 2 or 0 in keys.shape or not keys.isfinite().all():
        raise ValueError("keys: wanted finite numbers and no empty axis")
    keys = keys.contiguous()
    tokens, channels = keys.shape[-2:]
    scores = torch.empty(keys.shape[:-1])
    sizes = triton.next_power_of_2(tokens), triton.next_power_of_2(channels)
    score_keys[(scores.numel() // tokens,)](keys, scores, tokens, channels, *sizes)
    return scores
"""


def judged(name: str, source: str, **settings: Any) -> grading.Judgement:
    return grading.judge(source.encode(), assignments.load(name), **{"secret": b"a secret", "examples": 2, **settings})


def verdicts(judgement: grading.Judgement) -> dict[str, str]:
    return {line.name: line.verdict for line in judgement.lines}


def order(examples: int = 1, handed_out: tuple[str, ...] = (), secret: bytes = b"a secret") -> classes.Order:
    """How a class of the KeyDiff assignment is graded."""
    return classes.Order("keydiff", secret, examples, handed_out)


def written(folder: Path, source: str | bytes = "", name: str = "ada.py") -> Path:
    """A student's file."""
    (folder / name).write_bytes(source if isinstance(source, bytes) else source.encode())
    return folder / name


def child_of(folder: Path, source: str, seconds: float = 20) -> Child:
    """A child that runs a KeyDiff file."""
    return Child(written(folder, source, "keydiff.py"), "keydiff", limits=Limits(seconds))


# The assignments

every_assignment = pytest.mark.parametrize("name", [*NUMPY, "judge", "kernel", "contest"])


def test_the_assignments_are_those_of_this_list() -> None:
    assert assignments.names() == sorted([*NUMPY, "judge", "kernel", "contest"])


@every_assignment
def test_an_assignment_is_whole(name: str) -> None:
    one, laws = assignments.load(name), load_laws()
    assert one.max_score == 100
    handout, note = ((one.folder / file).read_text(encoding="utf-8") for file in ("README.md", "instructor.md"))
    earlier: set[str] = set()
    for step in one.steps:
        assert step.requirement in REQUIREMENTS
        assert not step.laws or step.requirement in {laws[law].requirement.id for law in step.laws}
        assert set(step.needs) <= earlier
        assert f"| {step.name} | {step.requirement} | {step.title} | {step.points} |" in handout
        earlier.add(step.name)
    assert "**AI assistants.**" in handout
    assert "Expected time" in note
    bank = {mutant.misconception for mutant in load_mutants().values()}
    assert set(re.findall(r'^- "(.+?)"(?:: |$)', note, flags=re.MULTILINE)) <= bank


@every_assignment
def test_the_starter_file_scores_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "load_model", lambda: None)  # no text is read to a file without a scorer
    result = judged(name, assignments.load(name).starter_for(None), examples=1, explain=False)
    assert result.score == 0
    assert "NotImplementedError" in result.lines[0].message


@pytest.mark.parametrize("name", sampled(NUMPY, every=len(NUMPY)))
def test_the_reference_as_a_student_has_full_marks_and_the_canary_none(name: str) -> None:
    one = assignments.load(name)
    right = bundled(one.stem)
    result = judged(name, right)
    assert result.score == 100, [line.message for line in result.lines if line.message]
    # The same file, whose functions raise: whoever graded the reference in the student's place would not notice.
    names = re.findall(r"^def (\w+)", one.starter.read_text(encoding="utf-8"), flags=re.MULTILINE)
    canary = (
        right + "\n\ndef raises(*args, **kwargs):\n    raise RuntimeError('canary')\n\n" + "".join(f"{n} = raises\n" for n in names)
    )
    assert judged(name, canary, examples=1, explain=False).score == 0


@pytest.mark.slow
def test_a_triton_kernel_is_graded_in_the_interpreter() -> None:
    assert judged("kernel", KERNEL, examples=1).score == 100
    plain = "import torch\n\n\ndef score(keys):\n    return -torch.cosine_similarity(keys.mean(-2, keepdim=True), keys, dim=-1)\n"
    without = judged("kernel", plain, examples=1, explain=False)
    assert without.score == 0
    assert without.lines[0].laws["grader::score"] == "killed"


MISTAKES = (
    ("keydiff", "keydiff.raw_mean_anchor"),
    ("keydiff", "keydiff.row_means"),
    ("lagkv", "lagkv.population_deviation"),
    ("expected_attention", "expected_attention.variance_not_halved"),
    ("momentkv", "momentkv.kept_for_evicted"),
    ("gvote", "gvote.crossing_token_left_out"),
    ("h2o", "h2o.mask_from_the_upper_left"),
    ("duo_attention", "duo_attention.above_the_threshold"),
)


@pytest.mark.parametrize(("name", "mutant"), sampled(MISTAKES, every=len(MISTAKES)))
def test_a_mistake_loses_its_points_and_is_named(name: str, mutant: str) -> None:
    planted = load_mutants()[mutant]
    result = judged(name, bundled(assignments.load(name).stem, planted), examples=15)
    lost = [line for line in result.lines if line.requirement == planted.killed_by and line.verdict == "failed"]
    assert lost
    assert planted.misconception in [each for line in result.lines for each in line.misconceptions]
    first = next(line for line in result.lines if line.verdict == "failed")
    for word in ("the law", "smallest input", "expected", "got", "to see it again"):
        assert word in first.message
    compile(first.repro, "repro", "exec")


OWN_DEFAULTS = """

_length, _select = retained_length, select


def retained_length(length, *, keep_ratio, sink_size={sink_size}, lag_size={lag_size}):
    return _length(length, keep_ratio=keep_ratio, sink_size=sink_size, lag_size=lag_size)


def select(keys, values, *, keep_ratio, sink_size={sink_size}, lag_size={lag_size}):
    return _select(keys, values, keep_ratio=keep_ratio, sink_size=sink_size, lag_size=lag_size)
"""


@pytest.mark.slow
def test_constants_of_a_student() -> None:
    one = assignments.load("lagkv")
    mine = one.constants_of("student-1")
    assert mine == one.constants_of("student-1") != one.constants_of("student-2")
    assert f"sink_size: int = {mine['sink_size']}" in one.starter_for("student-1")
    source = bundled("lagkv") + OWN_DEFAULTS.format(**mine)
    assert judged("lagkv", source, constants=mine, examples=1).score == 100
    for name in mine:
        other = judged("lagkv", source, constants=mine | {name: mine[name] + 1}, examples=1)
        assert [line.name for line in other.lines if line.verdict == "failed"] == ["defaults"]


@pytest.mark.slow
def test_a_scorer_is_judged_beside_lagkv(monkeypatch: pytest.MonkeyPatch, model_folder: Path) -> None:
    from evictionary.models.load import load as load_model

    monkeypatch.setattr(contest, "load_model", lambda: load_model(str(model_folder)))
    contest.texts.cache_clear()
    source = "def score(keys, values):\n    return values.norm(dim=-1)\n"
    result = judged("contest", source, secret=None)
    contest.texts.cache_clear()
    assert verdicts(result)["scores"] == "passed"
    assert {"not judged yet"}.isdisjoint(verdicts(result).values())
    assert [row["name"] for row in result.leaderboard] == ["right of 1", "relative distance"]
    huge = judged("contest", "import torch\n\n\ndef score(keys, values):\n    return keys[..., 0].double() * 1e300\n")
    assert (huge.score, "infinite" in huge.lines[0].reason) == (0, True)
    noisy = judged("contest", "import torch\n\n\ndef score(keys, values):\n    return torch.rand(keys.shape[:-1])\n")
    assert (noisy.score, noisy.leaderboard) == (0, [])


def test_an_answer_of_too_few_parts_loses_its_step_and_no_other() -> None:
    def first(name: str, function: str, body: str) -> grading.Line:
        one = assignments.load(name)
        source = f"{bundled(name)}\n\n_right = {function}\n\n\ndef {function}(*args):\n    return {body}\n"
        result = grading.judge(source.encode(), replace(one, steps=one.steps[:2]), secret=b"a secret", examples=2)
        assert len(result.lines[0].laws) == len(one.steps[0].laws)
        return result.lines[0]

    line = first("expected_attention", "query_statistics", "_right(*args)[0]")
    assert line.verdict == "failed"
    assert "query_statistics returned one ndarray, wanted a tuple of 2 arrays" in line.message
    assert "smallest input" in line.message
    assert "wanted Moments(count, key_sum" in first("momentkv", "update", "tuple(_right(*args))").message


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("return _right(keys).astype(np.float32)", "score returned float32, wanted float64, the dtype of its input"),
        ("return _right(keys).tolist()", "score returned a list of 1, wanted one array or number"),
        ("return _right(keys)[..., None]", "score returned shape (1, 1, 1, 1), wanted (1, 1, 1)"),
        # With the expected numbers of a longer input, this would be gigabytes.
        ("return np.zeros((10**6, 1, 1, 1), np.float16)", "score returned shape (1000000, 1, 1, 1), wanted (1, 1, 1)"),
        (
            "return np.zeros((10**7, 1, 1, 1), np.float16)",
            "bytes, more than 4194304)",
        ),
    ],
)
def test_a_student_is_told_what_an_answer_is_and_what_is_wanted(body: str, told: str) -> None:
    one = assignments.load("keydiff")
    source = f"{SOLUTION.read_text(encoding='utf-8')}\n\n_right = score\n\n\ndef score(keys):\n    {body}\n"
    tracemalloc.start()
    result = grading.judge(source.encode(), replace(one, steps=one.steps[1:2]), secret=b"a secret", examples=2)
    largest = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert told in result.lines[0].message
    assert largest < 2**27


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("raise ValueError('hmm')", "bad input raises ValueError: hmm"),
        ("return np.zeros(keys.shape[:-1])", "bad input is accepted in silence"),
    ],
)
def test_a_student_is_told_the_words_of_a_refusal(body: str, told: str) -> None:
    one = assignments.load("keydiff")
    source = f"import numpy as np\n\n\ndef score(keys):\n    {body}\n"
    (edges,) = (step for step in one.steps if step.name == "edges")
    (refusals,) = (law for law in edges.laws if law.endswith("bad_shapes_are_refused"))
    result = grading.judge(source.encode(), replace(one, steps=(replace(edges, needs=(), laws=(refusals,)),)), examples=2)
    assert told in result.lines[0].message
    assert "a ValueError with 'keys' in its message" in result.lines[0].message
    assert "site-packages" not in result.lines[0].message


def test_another_array_library_is_named() -> None:
    assert "torch: this assignment is for NumPy only" in judged("keydiff", "import torch\n", explain=False).lines[0].reason


WHOLE_MATRIX = """
import numpy as np


def score(queries, keys):
    logits = queries @ np.swapaxes(keys, -1, -2) / keys.shape[-1] ** 0.5
    weights = np.exp(np.where(np.tri(keys.shape[2], dtype=bool), logits, -np.inf))
    return (weights / weights.sum(-1, keepdims=True)).sum(-2)
"""


def test_a_long_prompt_has_no_room_for_a_matrix_of_its_weights() -> None:
    one = assignments.load("h2o")
    (blocks,) = (replace(step, needs=(), laws=()) for step in one.steps if step.name == "blocks")
    result = grading.judge(WHOLE_MATRIX.encode(), replace(one, steps=(blocks,)), examples=1)
    assert result.score == 0
    assert "MemoryError: Unable to allocate 512. MiB" in result.lines[0].message
    assert "8192 queries on 8192 tokens are scored without a matrix of their weights" in result.lines[0].message


@pytest.mark.slow
def test_a_step_may_draw_more_inputs_than_others() -> None:
    """One mistake shows on few inputs: with 10 for each law it passes, at this seed, the step that it gets wrong."""
    one, mistake = assignments.load("gvote"), load_mutants()["gvote.ranked_together"]
    (votes,) = (step for step in one.steps if step.name == "votes")
    for steps, points in (((replace(votes, needs=(), thoroughness=1),), 15), ((replace(votes, needs=()),), 0)):
        result = grading.judge(
            bundled("gvote", mistake).encode(), replace(one, steps=steps), secret=b"3", examples=10, explain=points == 0
        )
        assert result.score == points
    assert mistake.misconception in result.lines[0].misconceptions


def test_what_fails_in_explaining_changes_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise ZeroDivisionError

    source = SOLUTION.read_text(encoding="utf-8").replace("return unit(keys).mean(axis=-2)", "return keys.mean(axis=-2)")
    before = judged("keydiff", source, explain=False)
    monkeypatch.setattr(grading._Run, "explain", fail)
    assert verdicts(judged("keydiff", source)) == verdicts(before)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each child that is started may be waited for."""
    waits: list[float] = []

    class Counted(Child):
        def __enter__(self) -> Child:
            waits.append(self.limits.wall_seconds)
            return super().__enter__()

    monkeypatch.setattr(grading, "Child", Counted)
    return waits


def test_a_file_that_cannot_be_loaded_is_not_tried_for_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = counted(monkeypatch)
    result = judged("lagkv", "import time\ntime.sleep(60)\n", seconds=0.25)
    assert waits == [0.25, 0.75]
    assert verdicts(result)["range"] == "failed"
    assert result.lines[1].reason == result.lines[0].reason
    assert "cannot be loaded" in result.lines[0].reason


def test_code_that_hangs_has_one_second_try_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(child: Child, *args: Any, **settings: Any) -> None:
        child.is_late = True
        raise child._end("no answer")

    waits = counted(monkeypatch)
    monkeypatch.setattr(Child, "call", hang)
    judged("lagkv", "def score(*args):\n    pass\n", seconds=10)
    assert waits == [10, 30, 10, 10, 10, 10]


def test_a_seed_draws_the_same_inputs_whatever_is_loaded(tmp_path: Path) -> None:
    law = next(law for law in load_laws().values() if law.functions)

    def drawn() -> list[int]:
        found: list[int] = []
        counting = replace(law, check=lambda impl, number: found.append(number), drawn={"number": st.integers()})
        decided_by(1, counting, 200).check(None)
        return found

    before = drawn()
    assert len(set(before)) > 190
    path = tmp_path / "numbers_of_mine.py"
    path.write_text("\n".join(f"N{n} = {10**9 + n}" for n in range(200)), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("numbers_of_mine", path)
    assert spec is not None and spec.loader is not None
    sys.modules["numbers_of_mine"] = importlib.util.module_from_spec(spec)
    try:
        assert drawn() == before
    finally:
        del sys.modules["numbers_of_mine"]


def test_a_law_counts_the_inputs_that_it_accepts_and_fails_with_the_smallest() -> None:
    law, accepted = next(law for law in load_laws().values() if law.functions), []

    def judged(impl: Any, number: int) -> None:
        assume(number % 2)
        accepted.append(number)
        assert impl or number < 1000

    asked = replace(law, check=judged, drawn={"number": st.integers(0, 2**16)})
    decided_by(1, asked, 20).check(True)
    assert len(accepted) == 20
    with pytest.raises(AssertionError):
        decided_by(1, asked, 20, shrinks=True).check(False)
    assert accepted[-1] == 1001
    with pytest.raises(RuntimeError, match="got no input of 200"):
        decided_by(1, replace(asked, drawn={"number": st.just(2)}), 20).check(True)


# The child


def test_the_kernel_refuses_what_the_hook_would(tmp_path: Path) -> None:
    with child_of(tmp_path, attacks.PROBE) as child:
        assert child.walls["system calls"] == bool(seccomp.program())
        assert child.call("harm") == "" or not child.walls["system calls"]


def test_the_filter_of_system_calls() -> None:
    """Each machine's numbers are different ones, and what a scorer needs is not among them."""
    needed = {"x86_64": {"read": 0, "write": 1, "mmap": 9, "futex": 202}, "aarch64": {"read": 63, "write": 64, "futex": 98}}
    for machine, allowed in needed.items():
        numbers = seccomp.refused(machine)
        assert len(set(numbers.values())) == len(numbers)
        assert set(allowed.values()).isdisjoint(numbers.values())
        assert len(seccomp.program(machine)) % 8 == 0
    assert seccomp.refused("x86_64")["socket"] == 41
    assert seccomp.refused("aarch64")["socket"] == 198
    assert seccomp.program("riscv64") == b""


def test_a_child_ends_with_its_grader(tmp_path: Path) -> None:
    path = written(tmp_path, "import time\n\n\ndef score(keys):\n    time.sleep(600)\n", "keydiff.py")
    program = (
        "import sys\nfrom pathlib import Path\nfrom evictionary.classroom.child import Child\n"
        "with Child(Path(sys.argv[1]), 'keydiff') as child:\n    print(child._process.pid, flush=True)\n"
        "    child.call('score', 1)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, path], stdout=subprocess.PIPE, cwd=Path(__file__).parents[1]) as grader:
        assert grader.stdout is not None
        ended = select.poll()
        ended.register(os.pidfd_open(int(grader.stdout.readline())), select.POLLIN)
        grader.kill()
        assert ended.poll(20_000)


def test_the_oracle_is_closed_wherever_it_is_installed(tmp_path: Path) -> None:
    site = tmp_path / "lib" / "python3" / "site-packages"
    for name in ("reference", "numpy", "evictionary-1.dist-info"):
        (site / name).mkdir(parents=True)
    (tmp_path / "lib" / "link").symlink_to(site)
    (tmp_path / "lib" / "os.py").touch()
    hidden = closed(site)
    assert {str(site / "reference"), str(site / "evictionary-1.dist-info"), str(Path(__file__).parents[1])} <= set(hidden)
    # Not Python's whole folder, then, nor a link that leads back to it.
    assert worker.without(str(tmp_path), hidden) == [str(tmp_path / "lib" / "os.py"), str(site / "numpy")]
    assert worker.without(str(site / "reference"), hidden) == []


def test_one_dead_child_costs_one_step() -> None:
    source = SOLUTION.read_text(encoding="utf-8") + "\n\ndef anchor(keys):\n    import os\n\n    os._exit(0)\n"
    source = source.replace("unit(anchor(keys))", "unit(unit(keys).mean(axis=-2))")
    result = judged("keydiff", source)
    assert verdicts(result) == {
        "anchor": "failed",
        "score": "passed",
        "symmetries": "passed",
        "edges": "passed",
        "pairwise": "not judged yet",
    }
    assert "exited with code 0" in result.lines[0].reason
    assert result.lines[-1].reason == "needs anchor first"


def test_the_child_sees_neither_environment_nor_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", "of the grader")
    source = "import os, sys\n\n\ndef seen():\n    return (str(dict(os.environ)), str(sys.argv), str(sorted(sys.modules)))\n"
    with child_of(tmp_path, source) as child:
        environment, arguments, modules = child.call("seen")
    assert "A_TOKEN" not in environment
    assert "secret" not in arguments
    for name in ("reference", "optimized", "spec_tests", "hypothesis", "evictionary"):
        assert f"'{name}'" not in modules


def test_what_may_not_cross() -> None:
    def frame(**arrays: Any) -> bytes:
        body = io.BytesIO()
        np.savez(body, **arrays)
        return body.getvalue()

    with pytest.raises(worker.BadFrame):
        worker.unpack(b"{}", frame(a0=np.array([print], dtype=object)))
    packed = io.BytesIO()
    np.savez_compressed(packed, a0=np.zeros(10**6))
    with pytest.raises(worker.BadFrame, match="compressed"):
        worker.unpack(b"{}", packed.getvalue())
    with pytest.raises(worker.BadFrame, match="bytes"):
        worker.sizes(b"\xff" * 16)
    with pytest.raises(worker.BadFrame):
        worker.encode({"a": 1}, [])
    # Values that no function returns.
    for content in ({"plain": {"a": 1}}, {"plain": [1]}, 5):
        with pytest.raises(worker.BadFrame):
            worker.decode(content, {})
    assert worker.decode(worker.encode(Fraction(-3, 7), []), {}) == Fraction(-3, 7)
    with pytest.raises(ValueError, match="invalid literal"):
        worker.decode({"fraction": "1e999999999"}, {})
    # The keys that a kernel is timed with go through, an answer of that size does not.
    timed = struct.pack(">QQ", 100, 4 * math.prod(grading.TIMED_SHAPE) + 1000)
    assert worker.sizes(timed, worker.LARGEST_CALL)[0] == 100
    with pytest.raises(worker.BadFrame):
        worker.sizes(timed)
    # A header that claims more than there is.
    claims = io.BytesIO()
    with zipfile.ZipFile(claims, "w") as archive:
        member = io.BytesIO()
        np.lib.format.write_array_header_1_0(member, {"descr": "<f8", "fortran_order": False, "shape": (10**12,)})
        archive.writestr("a0.npy", member.getvalue())
    with pytest.raises(worker.BadFrame, match="size"):
        worker.unpack(b"{}", claims.getvalue())


def test_an_alarm_is_no_answer(tmp_path: Path) -> None:
    """The time limit of a law is an exception while the grader waits for the child, which has no more calls afterwards."""

    class Alarm(Exception):
        pass

    def ring(*_: Any) -> None:
        raise Alarm

    previous = signal.signal(signal.SIGALRM, ring)
    try:
        with child_of(tmp_path, "import time\n\n\ndef score(keys):\n    time.sleep(60)\n") as child:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(Alarm):
                child.call("score", 1)
            with pytest.raises(ChildDied, match="interrupted"):
                child.call("score", 1)
    finally:
        signal.signal(signal.SIGALRM, previous)


def test_a_child_that_does_not_read_does_not_hold_the_grader(tmp_path: Path) -> None:
    source = "import time\n\n\ndef score(keys):\n    time.sleep(60)\n"
    with child_of(tmp_path, source, 0.3) as child, pytest.raises(ChildDied, match="no answer"):
        child.call("score", np.zeros(10**6))


# What is written


def graded(source: str | bytes, tmp_path: Path, examples: int = 1, handed_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """What becomes of one student's file in a class of one."""
    found = {"ada": written(tmp_path, source)}
    (grade,) = classes.run(order(examples, handed_out), found, tmp_path / "grades", 1)
    return grade


EVERY_FORMAT = tuple(formats.FORMATS)


def test_every_format_is_valid(tmp_path: Path, junit: Any) -> None:
    wrong = bundled("keydiff", load_mutants()["keydiff.raw_mean_anchor"])
    grade = graded(wrong, tmp_path, 2, EVERY_FORMAT)
    folder = tmp_path / "grades" / "ada"
    files = {name: (folder / file).read_text(encoding="utf-8") for name, (file, _) in formats.FORMATS.items()}
    junit.validate(files["junit"])
    gradescope, classroom50 = json.loads(files["gradescope"]), json.loads(files["classroom50"])
    assert gradescope["score"] == sum(test["score"] for test in gradescope["tests"]) == grade["score"] == 15
    assert classroom50["score"] == sum(test["score"] for test in classroom50["tests"]) == 15
    assert all(type(test["score"]) is int for test in classroom50["tests"])
    assert 'failures="1"' in files["junit"] and 'skipped="3"' in files["junit"]
    tokens = MarkdownIt().enable("table").parse(files["markdown"])
    assert [token.type for token in tokens].count("tr_open") == 1 + len(grade["lines"])
    with pytest.raises(ValidationError):
        formats.validator("classroom50").validate(classroom50 | {"extra": 1})
    with pytest.raises(ValidationError):
        formats.validator("classroom50").validate(classroom50 | {"score": 1.5})


def test_what_the_runner_of_classroom_50_says_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"CLASSROOM": "llm-systems", "OWNER": "ada", "SUBMISSION_TAG": "submit/1", "COMMIT_URL": "https://c"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    graded("", tmp_path, 1, ("classroom50",))
    result = json.loads((tmp_path / "grades" / "ada" / "result.json").read_text(encoding="utf-8"))
    assert [result[key] for key in ("classroom", "owner", "submission", "commit", "review")] == [*told.values(), "https://c"]


HOSTILE = (
    "\0\x1b[31m\x9b\ufffe\uffff\u202e </failure> ````````\n| a \\| b | ![x](https://a.b/c) [y](d) <img> www.e.f https://g.h **i**"
)


def test_a_hostile_message_is_text_in_every_format(tmp_path: Path, junit: Any) -> None:
    graded(f"def anchor(keys):\n    raise RuntimeError({HOSTILE!r})\n", tmp_path, 1, EVERY_FORMAT)
    folder = tmp_path / "grades" / "ada"
    junit.validate((folder / "junit.xml").read_text(encoding="utf-8"))
    for file, _ in formats.FORMATS.values():
        assert {"\x1b", "\x9b", "\ufffe", "\u202e"}.isdisjoint((folder / file).read_text(encoding="utf-8"))
    # Beside the message, which stands in a fence, the same words stand in a cell and in a sentence.
    grade = json.loads((folder / "grade.json").read_text(encoding="utf-8"))
    page = formats.markdown(grade | {"error": HOSTILE, "lines": [line | {"reason": HOSTILE} for line in grade["lines"]]})
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(page)
    assert [token.type for token in tokens].count("tr_open") == 1 + len(grade["lines"])
    assert [token.type for token in tokens].count("td_open") == 4 * len(grade["lines"])
    inside = {child.type for token in tokens for child in token.children or []}
    assert inside <= {"text", "text_special"}
    assert "https://" not in page.split("`" * 8)[0] and "www." not in page.split("`" * 8)[0]


# A class


def test_a_class_is_graded_resumed_and_summed_up(tmp_path: Path) -> None:
    handed_in = tmp_path / "handed_in"
    (handed_in / "folder").mkdir(parents=True)
    (handed_in / "folder" / "keydiff.py").write_bytes(SOLUTION.read_bytes())
    written(handed_in, "def score(keys):\n    return keys[..., 0]\n", "wrong.py")
    written(handed_in, "no archive", "broken.zip")
    one = order(1, ("gradescope",))
    found = classes.find([handed_in], "keydiff.py")
    assert sorted(found) == ["broken", "folder", "wrong"]
    done: list[str] = []
    first = {grade["student"]: grade for grade in classes.run(one, found, tmp_path / "grades", 2, done.append)}
    assert {student: grade["score"] for student, grade in first.items()} == {"broken": 0, "folder": 100, "wrong": 0}
    assert sorted(done) == sorted(found)
    assert "cannot be read" in first["broken"]["error"]
    for student in found:
        assert (tmp_path / "grades" / student / "results.json").exists()
    # What is done is read, not graded again; a file that has changed is.
    stored = tmp_path / "grades" / "folder" / "grade.json"
    stored.write_text(json.dumps(first["folder"] | {"seconds": 12345.0}), encoding="utf-8")
    written(handed_in, "", "wrong.py")
    second = {grade["student"]: grade for grade in classes.run(one, found, tmp_path / "grades", 1)}
    assert second["folder"]["seconds"] == 12345
    assert second["wrong"]["source_sha256"] != first["wrong"]["source_sha256"]
    summary = classes.summary(list(second.values()))
    assert summary["distribution"] == {0: 2, 100: 1}
    assert (summary["errors"], summary["unjudged"]) == (1, ["broken"])
    # On a system without a wall, the instructor is told.
    bare = second["wrong"] | {"walls": {"landlock": 0, "system calls": True, "user nobody": False}}
    assert {"landlock", "user nobody"} <= set(classes.summary([*second.values(), bare])["walls_missing"])


def test_one_ended_process_is_no_other_students_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool of processes breaks as a whole; each student of it is graded again alone."""
    pools = []

    def broken(order: classes.Order, waiting: dict[str, Path], jobs: int) -> Any:
        pools.append(sorted(waiting))
        for student, path in waiting.items():
            yield student, BrokenProcessPool() if jobs > 1 or student == "eve" else classes.grade_one(order, student, path)

    monkeypatch.setattr(classes, "_in_processes", broken)
    found = {student: written(tmp_path, name=f"{student}.py") for student in ("ada", "eve")}
    grades = {grade["student"]: grade["error"] for grade in classes.run(order(), found, tmp_path / "grades", 2)}
    assert pools == [["ada", "eve"], ["ada"], ["eve"]]
    assert grades["ada"] == ""
    assert "not the student's doing: BrokenProcessPool" in grades["eve"]


def test_a_result_that_cannot_be_written_is_one_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def derive(grade: dict[str, Any]) -> str:
        return "fine" if grade["error"] else str(1 / 0)

    monkeypatch.setitem(formats.FORMATS, "markdown", ("grade.md", derive))
    assert "ZeroDivisionError" in graded("", tmp_path, 1, ("markdown",))["error"]
    assert (tmp_path / "grades" / "ada" / "grade.md").read_text(encoding="utf-8") == "fine"


def test_what_students_hand_in(tmp_path: Path) -> None:
    one, right = assignments.load("keydiff"), b"# right"
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "keydiff.py").write_bytes(right)
    handed_in = tmp_path / "handed_in"
    handed_in.mkdir()
    for name, mode in (("dan.tar.gz", "w:gz"), ("dora.tgz", "w:gz"), ("dirk.tar", "w")):
        with tarfile.open(handed_in / name, mode) as archive:  # type: ignore[call-overload]
            archive.add(tmp_path / "work" / "keydiff.py", "./keydiff.py")
    with zipfile.ZipFile(handed_in / "mac.zip", "w") as packed:
        packed.writestr("keydiff.py", right)
        packed.writestr("__MACOSX/keydiff.py", b"of the Finder")
    with zipfile.ZipFile(handed_in / "windows.zip", "w") as packed:
        packed.writestr("work\\keydiff.py", right)
    with zipfile.ZipFile(handed_in / "shadows.zip", "w") as packed:
        for name in ("keydiff.py", "numpy.py", "json.py", "sitecustomize.py", "mine.pth", "grade.json"):
            packed.writestr(name, right)
    (handed_in / "Žofie Müller.py").write_bytes(right)
    Path(os.fsdecode(os.fsencode(handed_in) + b"/\xff.py")).write_bytes(right)
    for name in (".DS_Store", "essay.docx"):
        (handed_in / name).touch()
    for name in ("__MACOSX", "grades", ".git"):
        (handed_in / name).mkdir()
    left_out: list[Path] = []
    found = classes.find([handed_in], "keydiff.py", handed_in / "grades", left_out.append)
    assert sorted(found) == sorted(["dan", "dora", "dirk", "mac", "windows", "shadows", "Žofie Müller", "\ufffd-baadfedd"])
    assert [path.name for path in left_out] == ["essay.docx"]
    for student, path in found.items():
        if student != "windows":
            assert submissions.read(path, one) == right, student
    with pytest.raises(submissions.BadSubmission, match=r"there is work/keydiff\.py\. `evictionary submit` packs it"):
        submissions.read(found["windows"], one)


def test_a_bad_name_costs_one_submission(tmp_path: Path) -> None:
    handed_in = tmp_path / "handed_in"
    for folder in ("bob", "eve"):
        (handed_in / folder).mkdir(parents=True)
    (handed_in / "eve" / "keydiff.py").write_bytes(b"# right")
    with zipfile.ZipFile(handed_in / "bob" / "upload.zip", "w") as packed:  # as course platforms store it
        packed.writestr("keydiff.py", "# right")
    (handed_in / "mallory").symlink_to(handed_in / "eve")
    (handed_in / "loop").symlink_to(handed_in / "loop")
    for name in (b"keydiff.py", b"summary.json.py", b" .py", b"\xff" * 200 + b".py", b"a\nb.py", b"a\\b.py"):
        Path(os.fsdecode(os.fsencode(handed_in) + b"/" + name)).write_bytes(b"# right")
    found = classes.find([handed_in], "keydiff.py")
    assert len(found) == 10
    assert {"bob", "eve", "mallory", "loop", "keydiff"} <= set(found)
    assert all(submissions.is_id(student) for student in found)
    for student, path in found.items():
        (tmp_path / "grades" / student).mkdir(parents=True)
        if student in ("mallory", "loop"):
            with pytest.raises(submissions.BadSubmission, match="is a symbolic link"):
                submissions.read(path, assignments.load("keydiff"))
        else:
            assert submissions.read(path, assignments.load("keydiff")) == b"# right"
    # A folder with one assignment's file is one submission.
    assert classes.find([handed_in / "eve"], "keydiff.py") == {"eve": handed_in / "eve"}


@pytest.mark.parametrize("upload", ["nothing", "wrong.py", "essay.docx"])
def test_a_named_student_has_a_result_whatever_is_uploaded(upload: str, tmp_path: Path) -> None:
    (tmp_path / "submission").mkdir()
    if upload != "nothing":
        written(tmp_path / "submission", name=upload)
    arguments = ("--assignment", "keydiff", "--student", "student", "--format", "gradescope", "--output", tmp_path / "grades")
    assert invoke("grade", tmp_path / "submission", *arguments).exit_code == 0
    result = json.loads((tmp_path / "grades" / "student" / "results.json").read_text(encoding="utf-8"))
    assert (result["score"], result["output"]) == (0, "there is no file keydiff.py")


def test_other_points_or_limits_are_graded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = assignments.load("keydiff")
    path, asked = written(tmp_path), []

    def judge(source: bytes, assignment: assignments.Assignment, **settings: Any) -> grading.Judgement:
        asked.append(assignment.max_score)
        return grading.empty(assignment)

    monkeypatch.setattr(grading, "judge", judge)
    changed = replace(one, steps=(replace(one.steps[0], points=20), *one.steps[1:]))
    fewer = replace(one, steps=(replace(one.steps[0], laws=one.steps[0].laws[:1]), *one.steps[1:]))
    for loaded, limits in (
        (one, order()),
        (one, order()),
        (changed, order()),
        (fewer, order()),
        (fewer, replace(order(), seconds=3)),
    ):
        monkeypatch.setattr(assignments, "load", lambda name, loaded=loaded: loaded)
        list(classes.run(limits, {"ada": path}, tmp_path / "grades", 1))
    assert asked == [100, 105, 100, 100]


def test_only_the_file_itself_is_run(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "mallory.zip", "w") as packed:
        packed.writestr("keydiff.py", "from helper import score\n")
        for name in ("helper.py", "numpy.py", "sitecustomize.py"):
            packed.writestr(name, SOLUTION.read_bytes())
    grade = classes.grade_one(order(), "mallory", tmp_path / "mallory.zip")
    assert grade["score"] == 0
    assert "No module named 'helper'" in grade["lines"][0]["reason"]


def test_a_failure_of_the_grader_is_written_down_and_graded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(grading, "judge", fail)
    assert "not the student's doing" in graded("", tmp_path)["error"]
    monkeypatch.undo()
    assert graded("", tmp_path)["error"] == ""


def test_seeds_are_secret_and_differ_by_law() -> None:
    one = assignments.load("keydiff")
    run = grading._Run(one, Path(), "", b"a secret", 1, {}, None)
    assert run.seed("a") != run.seed("b")
    assert run.seed("a") == grading._Run(one, Path(), "", b"a secret", 9, {}, None).seed("a")
    assert "secret" not in order().seed_id
    assert order().seed_id != order(secret=b"another").seed_id


# The command line


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.slow
def test_the_transcript_of_the_docs_is_what_happens() -> None:
    assert transcript.PAGE.read_text(encoding="utf-8") == transcript.run()


def test_mistakes_on_the_command_line(tmp_path: Path) -> None:
    one = written(tmp_path, name="ada.py")
    large = tmp_path / "large"
    large.mkdir()
    written(large, b"#" * 2_000_000, "keydiff.py")
    written(large, name="lagkv.py")
    for arguments, wanted in (
        (("start", "calculus"), "wanted one of"),
        (("check", "keydiff", "--work", tmp_path), "evictionary start keydiff"),
        (("submit", "keydiff", "--work", tmp_path), "evictionary start keydiff"),
        (("grade", tmp_path / "nothing", "--assignment", "keydiff"), "exists"),
        (("grade", tmp_path, "--assignment", "keydiff", "--format", "pdf"), "gradescope"),
        (("grade", one, "--assignment", "keydiff", "--examples", 0), "--examples: got 0, wanted at least 1"),
        (("grade", one, "--assignment", "keydiff", "--seconds", "nan"), "--seconds: got nan"),
        (("grade", one, "--assignment", "keydiff", "--student", "../ada"), "--student: got '../ada'"),
        (("grade", one, "--assignment", "keydiff", "--student", "summary.json"), "--student: got 'summary.json'"),
        (("grade", one, "--assignment", "keydiff", "--student", "a" * 300), "the name of a folder of its own"),
        (("grade", one, "--assignment", "keydiff", "--seed-file", one), "with 0 bytes, wanted at least 8"),
        (("grade", one, "--assignment", "keydiff", "--output", one), "--output"),
        (("start", "keydiff", "--work", one), "--work"),
        (("check", "keydiff", "--work", large), "keydiff.py has 2000000 bytes"),
        (("submit", "keydiff", "--work", large), "keydiff.py has 2000000 bytes"),
        (("submit", "lagkv", "--work", large, "--output", tmp_path / "none" / "a.zip"), "--output"),
        (("submit", "lagkv", "--work", large, "--output", "a.rar"), "ends in .zip"),
    ):
        result = invoke(*arguments)
        assert result.exit_code == 2
        assert wanted in " ".join(result.stderr.split())
    assert invoke("start", "keydiff", "--work", tmp_path).exit_code == 0
    again = invoke("start", "keydiff", "--work", tmp_path)
    assert again.exit_code == 2 and "may hold your work" in again.stderr


def test_grade_reads_what_submit_packs(tmp_path: Path) -> None:
    work, archive, secret = tmp_path / "work", tmp_path / "ada.zip", written(tmp_path, "nobody guesses this", "secret")
    work.mkdir()
    written(work, SOLUTION.read_bytes(), "keydiff.py")
    written(work, "not to be handed in", "diary.txt")
    assert invoke("submit", "keydiff", "--work", work, "--output", archive).exit_code == 0
    assert sorted(zipfile.ZipFile(archive).namelist()) == [submissions.MANIFEST, "keydiff.py"]
    arguments = ("--assignment", "keydiff", "--seed-file", secret, "--output", tmp_path / "grades", "--examples", 1, "--json")
    result = invoke("grade", archive, *arguments)
    assert json.loads(result.stdout)["distribution"] == {"100": 1}
    assert {path.name for path in (tmp_path / "grades" / "ada").iterdir()} == {
        "grade.json",
        *(file for file, _ in formats.FORMATS.values()),
    }


def test_what_is_typed_next_and_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "w[1]"
    started = invoke("start", "lagkv", "--work", work, "--student", "ada")
    assert f"evictionary check lagkv --work {work} --student ada" in started.stdout
    assert "results must be float64 too" in started.stdout
    begun = json.loads(invoke("start", "keydiff", "--work", work, "--json").stdout)
    assert begun["file"] == str(work / "keydiff.py")
    assert Path(begun["handout"]).exists()
    checked = invoke("check", "keydiff", "--work", work)
    assert checked.exit_code == 1
    assert str(work / "see_keydiff.py") in checked.stdout
    assert json.loads(invoke("check", "keydiff", "--work", work, "--json").stdout)["hidden_cases"] == 475
    packed = json.loads(invoke("submit", "keydiff", "--work", work, "--output", tmp_path / "a.zip", "--json").stdout)
    assert packed["files"] == ["keydiff.py", submissions.MANIFEST]
    # What a student's message holds is no markup.
    monkeypatch.setattr(contest, "load_model", lambda: None)  # no text is read to a file without a scorer
    written(work, "raise RuntimeError('[/bold] no')\n", "scorer.py")
    refused = invoke("check", "contest", "--work", work)
    assert refused.exit_code == 1
    assert "[/bold] no" in " ".join(refused.stdout.split())


def test_grade_says_what_it_leaves_out(tmp_path: Path) -> None:
    handed_in = tmp_path / "handed_in"
    handed_in.mkdir()
    written(handed_in)
    written(handed_in, name="essay.docx")
    result = invoke("grade", handed_in, "--assignment", "keydiff", "--output", tmp_path / "grades", "--json")
    assert "essay.docx" in result.stderr
    assert json.loads(result.stdout)["left_out"] == [str(handed_in / "essay.docx")]


def test_an_interrupted_class_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(classes, "run", interrupted)
    path, secret = written(tmp_path), written(tmp_path, "nobody guesses this", "secret")
    arguments = ("grade", path, "--assignment", "keydiff", "--output", tmp_path / "grades")
    for more, wanted in ((("--seed-file", secret), "the same command goes on"), ((), "begins anew")):
        result = invoke(*arguments, *more)
        assert result.exit_code == 130
        assert wanted in " ".join(result.stderr.split())


# Luck, and points for the work


def test_every_form_of_every_style_is_handed_in() -> None:
    wrong = 0
    for name in classroom_styles.names():
        found = classroom_styles.submissions(name)
        right = [each for each in found if not each.wrong]
        assert len(set(right)) == classroom_styles.RIGHT_EACH
        parts = runpy.run_path(str(classroom_styles.STYLES / f"{name}.py"))["RIGHT"]
        forms = {(part, form.__name__) for part, each in parts.items() for form in each}
        assert {chosen for each in right for chosen in each.chosen} == forms
        wrong += len(found) - len(right)
    assert wrong >= 60


@pytest.mark.parametrize("name", sampled(NUMPY, every=len(NUMPY)))
def test_right_styles_have_full_marks(name: str) -> None:
    for line in classroom_styles.graded(name, seed=1, examples=1):
        assert line["points"] == 100 or line["wrong"], line


def test_the_styles_are_kept_and_their_page_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def graded(assignment: str, seed: int, examples: int) -> Any:
        for place, each in enumerate(classroom_styles.submissions(assignment)):
            failed = ["weights"] if each.wrong and seed else []
            asked.append((assignment, seed, place))
            line = {"submission": each.name, "wrong": bool(each.wrong), "points": 85 if failed else 100, "message": ""}
            yield {"assignment": assignment, "seed": seed, "failed": failed} | line

    asked: list[Any] = []
    monkeypatch.setattr(classroom_styles, "graded", graded)
    monkeypatch.setattr(classroom_styles, "STORE", tmp_path / "build" / "styles.jsonl")
    classroom_styles.run(["gvote"], 1, 25, 1)
    classroom_styles.STORE.write_bytes(classroom_styles.STORE.read_bytes()[:-20])
    classroom_styles.run(["gvote"], 2, 25, 1)
    assert {(name, seed) for name, seed, _ in asked} == {("gvote", 0), ("gvote", 1)}
    page = classroom_styles.page(list(classroom_styles.stored(25)), 25)
    assert "| gvote | 30 | 2 | " in page
    assert "| gvote | softmax in float32 | 85: 1, 100: 1 | weights |" in page


class _Table(classroom_styles.Inside):
    """Answers from what it has seen while it was learning, and with zeros to anything else."""

    seen: dict[bytes, Any] = {}  # noqa: RUF012
    learns = True

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        key = pickle.dumps((name, args, kwargs))
        if self.learns:
            self.seen[key] = super().call(name, *args, **kwargs)
        return self.seen.get(key, np.zeros(np.shape(args[0])[:-1]))


def test_a_table_of_the_inputs_of_one_check_is_worth_little_at_the_next() -> None:
    one = replace(assignments.load("keydiff"), steps=assignments.load("keydiff").steps[1:3])
    table = _Table(SOLUTION.read_text(encoding="utf-8"), "keydiff")

    def points(check_seed: int) -> int:
        run = grading._Run(one, Path(), one.file, None, 3, {}, None, check_seed)
        run.child = lambda patience=1: table  # type: ignore[assignment, misc, return-value]
        result = grading.empty(one)
        grading._judge_steps(run, result, explained=True)
        return result.score

    assert points(1) == 50
    table.learns = False
    assert (points(1), points(2)) == (50, 0)


def test_check_draws_new_inputs_unless_told_otherwise(tmp_path: Path) -> None:
    written(tmp_path, "def score(keys):\n    return keys[..., 0]\n", "keydiff.py")
    arguments = ("check", "keydiff", "--work", tmp_path)
    first, second = (json.loads(invoke(*arguments, "--json").stdout)["check_seed"] for _ in range(2))
    assert first != second
    assert f"evictionary check keydiff --work {tmp_path} --seed 7" in invoke(*arguments, "--seed", 7).stdout


def test_samples_that_never_vote_have_the_points_of_the_nucleus_alone() -> None:
    (never,) = (each for each in classroom_styles.submissions("gvote") if each.wrong == "samples_that_never_vote")
    result = judged("gvote", never.source, explain=False)
    assert verdicts(result)["votes"] == "failed"
    assert verdicts(result)["logits"] == "not judged yet"
    assert result.score == 60


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake", ["a_launch_that_never_happens", "a_launch_whose_scores_are_left", "a_launch_that_is_multiplied_by_zero"]
)
def test_a_launch_that_adds_nothing_is_worth_nothing(mistake: str) -> None:
    (one,) = (each for each in classroom_styles.submissions("kernel") if each.wrong == mistake)
    result = judged("kernel", one.source, examples=1, explain=False)
    assert result.score == 0
    assert {name: word for name, word in result.lines[0].laws.items() if word != "passed"} == {"grader::score": "killed"}


# What a student is told


def explained(name: str, step: str, source: str, law: str = "") -> grading.Line:
    """The line of one step of a wrong file, or of one of its laws."""
    one = assignments.load(name)
    (chosen,) = (each for each in one.steps if each.name == step)
    laws = tuple(each for each in chosen.laws if law in each)
    return grading.judge(
        source.encode(), replace(one, steps=(replace(chosen, needs=(), laws=laws),)), secret=b"a secret", examples=4
    ).lines[0]


def test_an_error_in_the_last_digits_is_explained() -> None:
    source = SOLUTION.read_text(encoding="utf-8")
    small = source + "\n\n_right = anchor\n\n\ndef anchor(keys):\n    return _right(keys) * (1 + 1e-9)\n"
    message = explained("keydiff", "anchor", small).message
    assert "a number added for safety (norm + 1e-12)" in message
    assert "step in float32" in message


@pytest.mark.parametrize("added", ["(len(_calls) > 6)", "(len(_calls) == 3)"])
def test_what_is_kept_between_calls_is_named_in_plain_words(added: str) -> None:
    state = f"\n\n_right, _calls = anchor, []\n\n\ndef anchor(keys):\n    _calls.append(1)\n    return _right(keys) + {added}\n"
    message = explained("keydiff", "anchor", SOLUTION.read_text(encoding="utf-8") + state).message
    assert "two answers to one input" in message
    assert "Flaky" not in message


def test_a_script_prints_the_students_answer_where_the_reference_refuses() -> None:
    line = explained("keydiff", "edges", "def score(keys):\n    return keys.sum(-1)\n", "bad_shapes")
    assert 'except ValueError as error:\n    print("expected a ValueError:", error)\nprint("got' in line.repro


def test_the_call_that_is_shown_is_the_one_that_failed() -> None:
    """The law calls select, which is wrong, and then retained_length, which is right."""
    body = "    return _select(keys, values, **settings) & (settings['sink_size'] > 3)\n"
    wrong = f"\n\n_select = select\n\n\ndef select(keys, values, **settings):\n{body}"
    message = explained("lagkv", "select", bundled("lagkv") + wrong, "retained_length").message
    assert "impl.lagkv.select(keys=keys" in message
    assert "impl.lagkv.retained_length" not in message


def test_time_in_the_queue_of_the_processors_is_not_the_students(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def unit_keys(keys):\n    return 2 * keys\n"
    with child_of(tmp_path, source) as child:
        assert child._queued() >= 0
        child._allowed = child._waited = 0.0  # no time is left
        monkeypatch.setattr(child, "_queued", lambda: child._queued_before + 60)
        assert (child.call("unit_keys", np.ones(3)) == 2).all()
        child._waited = 0.0
        monkeypatch.undo()
        monkeypatch.setattr(child, "_queued", lambda: child._queued_before)
        with pytest.raises(ChildDied, match="no answer within 0 s"):
            child.call("unit_keys", np.ones(3))


def test_the_time_limit_of_a_law_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "SECONDS", 1)
    monkeypatch.setattr(grading, "SECONDS", 1)
    source = "import time\n\n\ndef anchor(keys):\n    time.sleep(600)\n"
    one = replace(assignments.load("keydiff"), steps=assignments.load("keydiff").steps[:1])
    result = grading.judge(source.encode(), one, secret=b"a secret", examples=2)
    assert result.lines[0].reason == "no verdict within 1 s"
    assert next(iter(result.lines[0].laws.values())) == "timed out"


@pytest.mark.parametrize("name", ["kernel", "contest"])
def test_an_assignment_without_its_hardware_is_blocked(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = assignments.load(name)

    def absent() -> Any:
        raise InstallError("no index")

    monkeypatch.setattr(contest, "load_model", absent)
    monkeypatch.setattr(grading.importlib.util, "find_spec", lambda module: None if module == "triton" else object())
    order = classes.Order(name, b"a secret", 1, EVERY_FORMAT)
    (grade,) = classes.run(order, {"ada": written(tmp_path)}, tmp_path / "grades", 1)
    assert {line["verdict"] for line in grade["lines"]} == {"blocked"}
    assert classes.summary([grade])["blocked"] == ["ada"]
    assert "Blocked, which is not the student's doing: this machine has no" in formats.gradescope(grade)
    assert classes._stored(order, "ada", tmp_path / "ada.py", tmp_path / "grades") is None
    written(tmp_path, name=Path(one.file).name)
    (tmp_path / Path(one.file).parent).mkdir(exist_ok=True)
    written(tmp_path, name=one.file)
    assert invoke("check", name, "--work", tmp_path).exit_code == 2


def test_the_id_of_a_student_is_that_of_the_archive(tmp_path: Path) -> None:
    work, archive = tmp_path / "work", tmp_path / "keydiff (1).zip"
    work.mkdir()
    written(work, SOLUTION.read_bytes(), "keydiff.py")
    assert invoke("submit", "keydiff", "--work", work, "--output", archive, "--student", "ada").exit_code == 0
    assert submissions.personal_id(archive, "keydiff (1)") == "ada"
    (tmp_path / "upload").mkdir()
    archive.rename(tmp_path / "upload" / "x.zip")
    assert submissions.personal_id(tmp_path / "upload", "upload") == "ada"
    assert submissions.personal_id(written(tmp_path, name="Ada (1).py"), "Ada (1)") == "Ada"
    with zipfile.ZipFile(tmp_path / "eve.zip", "w") as packed:
        packed.writestr(submissions.MANIFEST, '{"student": "../ada"}')
    assert submissions.personal_id(tmp_path / "eve.zip", "eve") == "eve"
    assert invoke("submit", "keydiff", "--work", work, "--output", archive, "--student", "a/b").exit_code == 2
    grades = [{"personal_id": each, "student": f"{each}{place}"} for place, each in enumerate(("ada", "ada", "bob"))]
    whole = {"lines": [], "error": "", "score": 0, "walls": {}, "seconds": 0}
    assert classes.summary([whole | grade for grade in grades])["one_id"] == ["ada0", "ada1"]


def test_an_archive_is_read_once_for_its_file_and_once_for_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading starts a process."""
    work, archive = tmp_path / "work", tmp_path / "ada.zip"
    work.mkdir()
    written(work, SOLUTION.read_bytes(), "lagkv.py")
    submissions.pack(assignments.load("lagkv"), work, archive, "ada")
    asked: list[str] = []
    read = submissions._from_archive

    def counted(path: Path, name: str) -> bytes:
        asked.append(name)
        return read(path, name)

    monkeypatch.setattr(submissions, "_from_archive", counted)
    monkeypatch.setattr(grading, "judge", lambda source, assignment, **settings: grading.empty(assignment))
    grade = classes.grade_one(classes.Order("lagkv", b"a secret", 1, (), personal=True), "upload (1)", archive)
    assert (grade["personal_id"], grade["constants"]) == ("ada", assignments.load("lagkv").constants_of("ada"))
    assert sorted(asked) == [submissions.MANIFEST, "lagkv.py"]


@pytest.mark.parametrize(
    "secret", [b"1", b"2", pytest.param(b"3", marks=pytest.mark.slow), pytest.param(b"4", marks=pytest.mark.slow)]
)
def test_a_softmax_without_its_maximum_loses_the_same_points_at_every_seed(secret: bytes) -> None:
    (one,) = (each for each in classroom_styles.submissions("lagkv") if each.wrong == "softmax_without_the_maximum")
    assignment = assignments.load("lagkv")
    first = replace(assignment, steps=assignment.steps[:4])
    result = grading.judge(one.source.encode(), first, secret=secret, examples=3, explain=False)
    assert verdicts(result) == {"score": "failed", "range": "passed", "normalise": "passed", "deviation": "passed"}
