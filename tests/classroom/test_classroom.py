"""The classroom: the assignments, what a student is told, the grader's files, and that the grader grades."""

import doctest
import pickle
import re
import runpy
import sys
import types
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import classroom_styles
import numpy as np
import pytest
from hypothesis import assume, strategies as st
from tools import invoke, refused, sampled, says
from tools.grader import (
    EVERY_FORMAT,
    KERNEL,
    NUMPY,
    SOLUTION,
    alone,
    bundled,
    child_of,
    judged,
    line_of,
    text_of,
    verdicts,
    written,
)

from docs_build import handouts
from evictionary import store
from evictionary.classroom import assignment as assignments, classes, contest, formats, grading
from evictionary.classroom.child import Child
from evictionary.classroom.inputs import decided_by
from evictionary.classroom.judgement import empty, reference
from evictionary.errors import InstallError
from evictionary.models import embedded
from evictionary.spec_tests.judge import outcome
from evictionary.spec_tests.judge.cases import Case
from evictionary.spec_tests.judge.degenerate import REFUSAL
from evictionary.spec_tests.judge.domain import NothingToAsk
from evictionary.spec_tests.judge.implementation import Call, load
from evictionary.spec_tests.judge.law import REQUIREMENTS, Law, load_laws
from evictionary.spec_tests.judge.misfits import fitting
from evictionary.spec_tests.judge.remote import Gone
from evictionary.spec_tests.proof.planted import load_mutants

# The assignments

every_assignment = pytest.mark.parametrize("name", [*NUMPY, "judge", "kernel", "contest"])


def test_the_assignments_are_those_of_this_list() -> None:
    assert assignments.names() == sorted([*NUMPY, "judge", "kernel", "contest"])


@every_assignment
def test_an_assignment_is_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, laws = assignments.load(name), load_laws()
    assert one.max_score == 100
    handout, note = (text_of(one.folder / file) for file in ("README.md", "instructor.md"))
    for place, step in enumerate(one.steps):
        assert set(step.needs) <= {each.name for each in one.steps[:place]}
        assert step.requirement in REQUIREMENTS
        assert not step.laws or step.requirement in {laws[law].requirement.id for law in step.laws}
    rows = [f"| {step.name} | {step.requirement} | {step.title} | {step.points} |" for step in one.steps]
    says(handout, "**AI assistants.**", *rows)
    titles = "Letters and equations|Numbers by hand|In the real model|Two questions in words|Points"
    assert re.findall(f"^## ({titles})$", handout, flags=re.MULTILINE) == titles.split("|")
    # The numbers of a handout are those of the reference, which stands here where the student's file stands.
    monkeypatch.setitem(sys.modules, one.stem, reference(one.stem))
    failed, attempted = doctest.testfile(str(one.folder / "README.md"), module_relative=False)
    assert attempted > failed == 0 and "Expected time" in note
    assert set(re.findall(r'^- "(.+?)"(?:: |$)', note, flags=re.MULTILINE)) <= {
        mutant.misconception for mutant in load_mutants().values()
    }


@every_assignment
def test_a_handout_and_its_note_say_the_hours_points_and_deliverables_of_the_assignment(name: str) -> None:
    """`python -m docs_build.handouts` writes them from assignment.toml."""
    one = assignments.load(name)
    handout, note = (text_of(one.folder / file) for file in ("README.md", "instructor.md"))
    assert one.hours and handout == handouts.written(name, handout)
    says(handout, "<!-- glance -->", f"| {one.takes} | {one.max_score} from the grader", f"`{name}.zip`")
    says(note, "Expected time: ", f"{one.takes} hours")
    asked = handout.partition("## Two questions in words")[2].partition("\n## ")[0]
    assert len(re.findall(r"^\d\. ", asked, flags=re.MULTILINE)) == len(one.questions)
    rubric = note.partition("## The two questions in words")[2]
    each = [sum(map(int, re.findall(r"- (\d+) points?:", part))) for part in re.split(r"\n\d\. ", rubric)[1:]]
    assert tuple(each) == one.questions


def test_the_hours_of_an_assignment_do_not_grade_a_class_again() -> None:
    one = assignments.load("keydiff")
    assert repr(one) == repr(replace(one, hours=(99,), questions=()))


@pytest.fixture
def in_the_model(
    monkeypatch: pytest.MonkeyPatch, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], list[str]]:
    """What the program of a handout prints, which puts the reference of an assignment into a tiny model."""

    def lines(assignment: str) -> list[str]:
        handout = text_of(assignments.load(assignment).folder / "README.md")
        (program,) = re.findall(r"^```python title=.*?\n(.*?)^```$", handout, flags=re.DOTALL | re.MULTILINE)
        monkeypatch.setattr(embedded, "install", lambda: model_folder)
        monkeypatch.setitem(sys.modules, assignment, reference(assignment))
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)  # transformers says so of a name that it takes away
            exec(compile(program, "in_the_model.py", "exec"), {})
        return capsys.readouterr().out.splitlines()

    return lines


def test_a_cache_is_tried_in_a_model_as_its_handout_says(
    in_the_model: Callable[[str], list[str]],
) -> None:
    difference, token, measured = in_the_model("kv_cache")
    assert (difference, token) == ("largest difference of a logit: 0.0", "the same next token: True")
    assert len(set(re.findall(r"\d+", measured))) == 1, measured


def test_a_quantised_cache_is_tried_in_a_model_as_its_handout_says(
    in_the_model: Callable[[str], list[str]],
) -> None:
    lines = in_the_model("quantisation")
    moved = [float(re.findall(r"move (.+) of", line)[0]) for line in lines]
    assert [line.split()[0] for line in lines] == ["8", "4", "2", "1"]
    assert 0 < moved[0] < moved[1] < moved[2] <= 1


@every_assignment
def test_the_starter_file_scores_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "load_model", lambda: None)  # no text is read to a file without a scorer
    result = judged(name, assignments.load(name).starter_for(None), examples=1, explain=False)
    assert result.score == 0 and "NotImplementedError" in result.lines[0].message


# What messages of refusals have to name.
WORDS = "queries keys values budget shape axes heads tokens wanted window sinks bits group_size"


@pytest.mark.parametrize("name", sampled(NUMPY, every=len(NUMPY)))
def test_a_file_that_refuses_everything_scores_nothing(name: str) -> None:
    """Whoever refuses each input refuses the bad ones too, in any words."""
    one = assignments.load(name)
    names = re.findall(r"^def (\w+)", text_of(one.starter), flags=re.MULTILINE)
    raises = [f"def {each}(*args, **kwargs):\n    raise ValueError({WORDS!r})\n" for each in names]
    assert judged(name, "\n\n".join(raises), examples=1, explain=False).score == 0


@pytest.mark.parametrize("name", sampled(NUMPY, every=len(NUMPY)))
def test_the_reference_as_a_student_has_full_marks_and_the_canary_none(name: str) -> None:
    one = assignments.load(name)
    right = bundled(one.stem)
    result = judged(name, right)
    # What the attacks on the oracle are after is worth having: reading it is all that stands between them and
    # full marks.
    assert result.score == 100, [line.message for line in result.lines if line.message]
    # The same file, whose functions raise: whoever graded the reference in the student's place would not
    # notice.
    names = re.findall(r"^def (\w+)", text_of(one.starter), flags=re.MULTILINE)
    raises = "\n\ndef raises(*args, **kwargs):\n    raise RuntimeError('canary')\n\n"
    canary = right + raises + "".join(f"{each} = raises\n" for each in names)
    assert judged(name, canary, examples=1, explain=False).score == 0


@pytest.mark.slow
def test_a_kernel_is_graded_in_the_interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EVICTIONARY_COMPILED", str(tmp_path))  # tests/compiled has the step that is blocked
    result = judged("kernel", KERNEL, examples=1)
    last = result.lines[-1]
    assert (result.score, last.verdict, last.reason) == (80, "blocked", grading.NO_EXECUTOR)


@pytest.mark.slow
def test_a_kernel_that_keeps_its_output_contributes(tmp_path: Path) -> None:
    kept = KERNEL.replace(
        "torch.empty(keys.shape[:-1], device=keys.device)",
        "OUTPUT.setdefault(keys.shape, torch.empty(keys.shape[:-1]))",
    )
    path = written(tmp_path, "OUTPUT = {}\n" + kept, "keydiff.py")
    keys = np.random.default_rng(0).standard_normal((1, 2, 17, 8), dtype=np.float32)
    with Child(
        path, "keydiff", library="torch", limits=assignments.load("kernel").limits(60), interpret=True
    ) as child:
        plain = child.call("score", keys)
        assert (child.call("score", keys, change_launches=True) != plain).all()
        assert (child.call("score", keys) == plain).all()


MISTAKES = (
    ("kv_cache", "kv_cache.heads_tiled"),
    ("keydiff", "keydiff.raw_mean_anchor"),
    ("keydiff", "keydiff.row_means"),
    ("lagkv", "lagkv.population_deviation"),
    ("expected_attention", "expected_attention.variance_not_halved"),
    ("momentkv", "momentkv.kept_for_evicted"),
    ("gvote", "gvote.crossing_token_left_out"),
    ("h2o", "h2o.mask_from_the_upper_left"),
    ("duo_attention", "duo_attention.above_the_threshold"),
    ("quantisation", "quantisation.rounded_down"),
)


@pytest.mark.parametrize(("name", "mutant"), sampled(MISTAKES, every=len(MISTAKES)))
def test_a_mistake_loses_its_points_and_is_named(name: str, mutant: str) -> None:
    planted = load_mutants()[mutant]
    result = judged(name, bundled(assignments.load(name).stem, planted), examples=15)
    failed = [line for line in result.lines if line.verdict == "failed"]
    assert planted.killed_by in [line.requirement for line in failed]
    assert planted.misconception in [each for line in result.lines for each in line.misconceptions]
    says(failed[0].message, "the law", "smallest input", "expected", "got", "to see it again")
    compile(failed[0].repro, "repro", "exec")


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
    scorer = "def score(keys, values):\n    return values.norm(dim=-1)\n"
    told = Mock()
    result = judged("contest", scorer, secret=None, told=told)
    contest.texts.cache_clear()
    assert verdicts(result)["scores"] == "passed" and "not judged yet" not in verdicts(result).values()
    assert [row["name"] for row in result.leaderboard] == ["right of 5", "relative distance"]
    assert [call.args[1:] for call in told.call_args_list] == [(done, 5) for done in range(5)]
    scorer = "import torch\n\n\ndef score(keys, values):\n    return "
    huge = judged("contest", f"{scorer}keys[..., 0].double() * 1e300\n")
    noisy = judged("contest", f"{scorer}torch.rand(keys.shape[:-1])\n")
    assert (huge.score, noisy.score, noisy.leaderboard) == (0, 0, []) and "infinite" in huge.lines[0].reason


WHOLE_MATRIX = """
import numpy as np


def score(queries, keys):
    logits = queries @ np.swapaxes(keys, -1, -2) / keys.shape[-1] ** 0.5
    weights = np.exp(np.where(np.tri(keys.shape[2], dtype=bool), logits, -np.inf))
    return (weights / weights.sum(-1, keepdims=True)).sum(-2)
"""


def test_a_long_prompt_has_no_room_for_a_matrix_of_its_weights() -> None:
    line = judged(alone("h2o", "blocks", laws=()), WHOLE_MATRIX, examples=1).lines[0]
    assert line.points == 0
    told = "8192 queries on 8192 tokens are scored without a matrix of their weights"
    says(line.message, "MemoryError: Unable to allocate 512. MiB", told)


@pytest.mark.slow
def test_a_step_may_draw_more_inputs_than_others() -> None:
    """One mistake shows on few inputs: with 10 for each law
    it passes, at some seed, the step that it gets wrong.
    """
    mistake, few = load_mutants()["gvote.ranked_together"], alone("gvote", "votes", thoroughness=1)
    wrong = bundled("gvote", mistake)
    lucky = next(
        secret
        for secret in (str(number).encode() for number in range(30))
        if judged(few, wrong, explain=False, secret=secret, examples=10).score == 15
    )
    line = judged(alone("gvote", "votes"), wrong, secret=lucky, examples=10).lines[0]
    assert line.points == 0 and mistake.misconception in line.misconceptions


def test_what_fails_in_explaining_changes_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    source = SOLUTION.replace("return unit(keys).mean(axis=-2)", "return keys.mean(axis=-2)")
    before = judged("keydiff", source, explain=False)
    monkeypatch.setattr(grading.ByLaws, "explain", Mock(side_effect=ZeroDivisionError))
    assert verdicts(judged("keydiff", source)) == verdicts(before)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each child that is started may be waited for."""
    waits: list[float] = []
    start = Child.__enter__
    monkeypatch.setattr(
        Child, "__enter__", lambda child: waits.append(child.limits.wall_seconds) or start(child)
    )
    return waits


def test_a_file_that_cannot_be_loaded_is_not_tried_for_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = counted(monkeypatch)
    first, *others = judged("lagkv", "import time\ntime.sleep(60)\n", seconds=0.25).lines
    assert waits == [0.25, 0.75]
    assert [line.verdict for line in others] == ["not judged yet"] * len(assignments.load("lagkv").steps)
    assert first.verdict == "failed" and "cannot be loaded" in first.reason
    assert first.read == "", "no part of a handout says why a file cannot be loaded"


def test_code_that_hangs_has_one_second_try_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(child: Child, *args: Any, **settings: Any) -> None:
        child.is_late = True
        child.remote.end("did not answer", is_late=True)

    waits = counted(monkeypatch)
    monkeypatch.setattr(Child, "call", hang)
    judged("lagkv", "def score(*args):\n    pass\n", seconds=10)
    assert waits == [10, 30, 10, 10, 10, 10, 10]


def test_a_seed_draws_the_same_inputs_whatever_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    law = next(law for law in load_laws().values() if law.functions)

    def drawn() -> list[int]:
        check = Mock()
        decided_by(1, replace(law, check=check, drawn={"number": st.integers()}), 200).check(None)
        return [call.kwargs["number"] for call in check.call_args_list]

    before = drawn()
    assert len(set(before)) > 190
    path = written(tmp_path, "\n".join(f"N{n} = {10**9 + n}" for n in range(200)), "numbers_of_mine.py")
    module = types.ModuleType("numbers_of_mine")
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "numbers_of_mine", module)
    assert drawn() == before


def test_a_law_counts_the_inputs_that_it_accepts_and_fails_with_the_smallest() -> None:
    law, accepted = next(law for law in load_laws().values() if law.functions), []

    def judged(impl: Any, number: int) -> None:
        assume(number % 2)
        accepted.append(number)
        assert impl or number < 1000

    asked = replace(law, check=judged, drawn={"number": st.integers(0, 2**16)})
    decided_by(1, asked, 20).check(True)
    assert len(accepted) == 20
    refused(lambda: decided_by(1, asked, 20, shrinks=True).check(False), error=AssertionError)
    assert accepted[-1] == 1001
    none = decided_by(1, replace(asked, drawn={"number": st.just(2)}), 20)
    refused(lambda: none.check(True), "got no input of 200", NothingToAsk)


# Luck, and points for the work


def test_every_form_of_every_style_is_handed_in() -> None:
    every = {name: classroom_styles.submissions(name) for name in classroom_styles.names()}
    for name, found in every.items():
        right = {each for each in found if not each.wrong}
        assert len(right) == classroom_styles.RIGHT_EACH
        parts = runpy.run_path(str(classroom_styles.forms_of(name)))["FORMS"]
        assert {chosen for each in right for chosen in each.chosen} == {
            (part, form.__name__) for part, each in parts.items() for form in each
        }
    assert sum(bool(each.wrong) for found in every.values() for each in found) >= 60


@pytest.mark.parametrize("name", sampled(NUMPY, every=len(NUMPY)))
def test_right_styles_have_full_marks(name: str) -> None:
    for line in classroom_styles.graded(name, 0, 1, classroom_styles.submissions(name)):
        assert line["points"] == 100 or line["wrong"], line


@pytest.mark.parametrize("form", ["softmax_by_log_add_exp", "softmax_by_reduce"])
def test_a_softmax_through_its_logarithm_is_right_at_deviations_of_ten_thousand(form: str) -> None:
    one = assignments.load("lagkv")
    step = next(step for step in one.steps if step.check == "overflow")
    source = next(
        each.source for each in classroom_styles.submissions("lagkv") if form in each.name and not each.wrong
    )
    run = grading.ByLaws(one, Path(), secret=b"a secret", examples=500)
    (law,) = (law for law in run.laws(step) if law.name == "grader::score")
    run.drawn(law, step).check(run.implementation(classroom_styles.Inside(source, one.stem), step))  # type: ignore[arg-type]


def test_a_softmax_through_its_logarithm_is_right_at_huge_keys() -> None:
    one, law = (
        assignments.load("expected_attention"),
        load_laws()["test_expected_attention::test_each_query_head_has_its_own_softmax"],
    )
    step = next(step for step in one.steps if law.name in step.laws)
    case = Case(
        kind="huge",
        seed=65122,
        batch=2,
        num_kv_heads=3,
        group=3,
        length=15,
        head_dim=6,
        value_dim=4,
        num_queries=3,
    )
    run = grading.ByLaws(one, Path(), secret=b"a secret", examples=1)
    for each in classroom_styles.submissions("expected_attention"):
        if not each.wrong:
            inside = classroom_styles.Inside(each.source, one.stem)
            law.check(run.implementation(inside, step), case=case, epsilon=0.5)  # type: ignore[arg-type]


def test_the_styles_are_kept_and_their_page_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def graded(assignment: str, seed: int, examples: int, found: Any) -> Any:
        for each in found:
            failed = ["weights"] if each.wrong and seed else []
            asked.append((seed, each.name))
            yield {"assignment": assignment, "seed": seed, "failed": failed} | {
                "submission": each.name,
                "wrong": bool(each.wrong),
                "points": 85 if failed else 100,
                "message": "",
            }

    asked: list[Any] = []
    monkeypatch.setattr(classroom_styles, "graded", graded)
    monkeypatch.setattr(classroom_styles, "LONG_EVERY", 1)
    store.run(classroom_styles.Plan(("gvote",), 1, 25), tmp_path)
    path = tmp_path / store.RESULTS
    path.write_bytes(path.read_bytes()[:-20])
    lines = store.run(classroom_styles.Plan(("gvote",), 2, 25), tmp_path)
    again = [each for each, count in Counter(asked).items() if count > 1]
    assert len(again) == 1 and {seed for seed, _ in asked} == {0, 1}, (
        "only the line that was cut off is graded again"
    )
    rows = ("| gvote | 30 | 25 | 2 | ", "| gvote | softmax in float32 | 85: 1, 100: 1 | weights |")
    says(classroom_styles.page(classroom_styles.current(lines)), *rows)


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
    one = alone("keydiff", "score", "symmetries")
    table = _Table(SOLUTION, "keydiff")

    def points(check_seed: int) -> int:
        run = grading.ByLaws(one, Path(), examples=3, check_seed=check_seed)
        run.child = lambda patience=1: table  # type: ignore[assignment, misc, return-value]
        result = empty(one)
        run.judge_steps(result, explained=True)
        return result.score

    assert points(1) == 45
    table.learns = False
    assert (points(1), points(2)) == (45, 0)


def wrong_style(name: str, mistake: str) -> classroom_styles.Submission:
    (one,) = (each for each in classroom_styles.submissions(name) if each.wrong == mistake)
    return one


def test_samples_that_never_vote_have_the_points_of_the_nucleus_alone() -> None:
    wrong, gvote = wrong_style("gvote", "samples_that_never_vote"), assignments.load("gvote")
    result = classroom_styles.side_by_side(gvote, [wrong], b"a secret", 6, long=False)[wrong]
    found = (verdicts(result)["votes"], verdicts(result)["logits"], result.score)
    assert found == ("failed", "not judged yet", 55)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake",
    [
        "",
        "a_launch_that_never_happens",
        "a_launch_whose_scores_are_left",
        "a_launch_that_is_multiplied_by_zero",
    ],
)
def test_a_launch_that_adds_nothing_is_worth_nothing(mistake: str) -> None:
    plain = (
        "import torch\n\n\ndef score(keys):\n    return -torch.cosine_similarity(keys.mean(-2, "
        "keepdim=True), keys, dim=-1)\n"
    )
    result = judged(
        "kernel", wrong_style("kernel", mistake).source if mistake else plain, examples=1, explain=False
    )
    assert (result.score, result.lines[0].laws["grader::score"]) == (0, "crashed")
    assert not mistake or "a kernel has to compute with the keys" in result.lines[0].message


# What a student is told


def test_time_in_the_queue_of_the_processors_is_not_the_students(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with child_of(tmp_path, "def unit_keys(keys):\n    return 2 * keys\n") as child:
        child.remote.allow(0)  # no time is left
        queued = child.remote.queued()
        monkeypatch.setattr(child.remote, "queued", lambda: queued + 60)
        assert (child.call("unit_keys", np.ones(3)) == 2).all()
        child.remote.allow(0)
        refused(lambda: child.call("unit_keys", np.ones(3)), "did not answer within 0 s", Gone)


def test_the_time_limit_of_a_law_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcome, "SECONDS", 1)
    monkeypatch.setattr(grading, "SECONDS", 1)
    line = line_of("keydiff", "anchor", "import time\n\n\ndef anchor(keys):\n    time.sleep(600)\n")
    assert line.reason == "no verdict within 1 s" and next(iter(line.laws.values())) == "timed out"


@pytest.mark.parametrize("name", ["kernel", "contest"])
def test_an_assignment_without_its_hardware_is_blocked(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contest, "load_model", Mock(side_effect=InstallError("no index")))
    monkeypatch.setattr(
        grading.importlib.util, "find_spec", lambda module: None if module == "triton" else object()
    )
    order = classes.Order(name, b"a secret", 1, EVERY_FORMAT)
    (grade,) = classes.run(order, {"ada": written(tmp_path)}, tmp_path / "grades", 1)
    assert {line["verdict"] for line in grade["lines"]} == {"blocked"}
    assert classes.summary([grade])["blocked"] == ["ada"]
    assert "Blocked, which is not the student's doing: this machine has no" in formats.gradescope(grade)
    assert classes._stored(order, "ada", tmp_path / "ada.py", tmp_path / "grades") is None
    written(tmp_path, name=assignments.load(name).file)
    checked = invoke("check", name, "--work", tmp_path)
    assert checked.exit_code == 2
    if name == "kernel":  # no time is taken where there is no torch to take it with
        told = "this machine has no triton, which the assignment needs: pip install 'evictionary[torch]'"
        assert f"Not judged: {told}" in checked.stdout and "GPU" not in checked.stdout
        assert told in invoke("start", name, "--work", tmp_path / "other").stdout


@pytest.mark.parametrize(
    "secret",
    [b"1", b"2", pytest.param(b"3", marks=pytest.mark.slow), pytest.param(b"4", marks=pytest.mark.slow)],
)
def test_a_softmax_without_its_maximum_loses_the_same_points_at_every_seed(secret: bytes) -> None:
    result = judged(
        alone("lagkv", "score", "range", "normalise", "deviation"),
        wrong_style("lagkv", "softmax_without_the_maximum").source,
        secret=secret,
        examples=3,
        explain=False,
    )
    assert verdicts(result) == {
        "score": "failed",
        "range": "passed",
        "normalise": "passed",
        "deviation": "passed",
    }


# What is refused


@pytest.mark.parametrize("name", NUMPY)
def test_a_refusal_is_no_part_of_a_step_of_mathematics(name: str) -> None:
    """Who forgets a check loses the points of the step about checks, and no others."""
    steps = assignments.load(name).steps
    refusing = {step.name for step in steps for law in step.laws if load_laws()[law].kind == REFUSAL}
    assert refusing <= {"refused", "edges"}


def refused_by(law: Law) -> list[Call]:
    """The calls of a law that the reference refuses."""
    implementation, found = load("reference"), []
    call = implementation.call

    def recorded(path: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(path, *args, **kwargs)
        except ValueError:
            found.append(implementation.calls[-1])
            raise

    implementation.call = recorded  # type: ignore[method-assign]
    assert outcome.outcome(law, implementation) == ("passed", "")
    return found


@pytest.mark.parametrize("name", NUMPY)
def test_a_handout_says_what_its_laws_refuse(name: str) -> None:
    """A law of refusals asks for nothing that the handout is silent about: an axis too few, NaN, infinity."""
    one = assignments.load(name)
    handout = text_of(one.folder / "README.md")
    said = handout[handout.lower().index("refuse") :].split("\n## ")[0]
    for law in (load_laws()[each] for step in one.steps for each in step.laws):
        for call in refused_by(law) if law.kind == REFUSAL else ():
            fit = fitting(call.function)
            for argument, value in call.arguments.items():
                if isinstance(value, np.ndarray) and isinstance(fit.get(argument), np.ndarray):
                    assert value.ndim >= fit[argument].ndim - 1 or "axes" in said or "axis" in said, argument
                if isinstance(value, float | np.ndarray) and not np.isfinite(value).all():
                    assert "NaN" in said or "finite" in said, f"{law.name}: {argument} = {value}"
