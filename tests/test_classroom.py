"""The classroom: the assignments, what a student is told, the grader's files, and that the grader grades."""

from __future__ import annotations

import io
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xmlschema
from jsonschema import ValidationError
from markdown_it import MarkdownIt
from typer.testing import CliRunner, Result

from spec_tests.law import REQUIREMENTS
from spec_tests.matrix import load_laws
from spec_tests.mutants import load_mutants
from workbench.classroom import assignment as assignments
from workbench.classroom import classes, contest, formats, grading, submissions, transcript, worker
from workbench.classroom.child import Child, ChildDied, Limits
from workbench.classroom.synthetic import NUMPY, SOLUTION, bundled
from workbench.cli import app

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


# The assignments


def test_there_are_seven_assignments() -> None:
    assert assignments.names() == sorted([*NUMPY, "kernel", "contest"])


@pytest.mark.parametrize("name", [*NUMPY, "kernel", "contest"])
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


@pytest.mark.parametrize("name", [*NUMPY, "kernel", "contest"])
def test_the_starter_file_scores_nothing(name: str) -> None:
    result = judged(name, assignments.load(name).starter_for(None), examples=1, explain=False)
    assert result.score == 0
    assert "NotImplementedError" in result.lines[0].message


@pytest.mark.parametrize("name", NUMPY)
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
)


@pytest.mark.parametrize(("name", "mutant"), MISTAKES)
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


def test_a_scorer_is_judged_beside_lagkv(monkeypatch: pytest.MonkeyPatch, model_folder: Path) -> None:
    from workbench import models

    monkeypatch.setattr(contest, "load_model", lambda: models.load(str(model_folder)))
    contest.texts.cache_clear()
    source = "def score(keys, values):\n    return values.norm(dim=-1)\n"
    result = judged("contest", source, secret=None)
    contest.texts.cache_clear()
    assert verdicts(result)["scores"] == "passed"
    assert {"not judged yet"}.isdisjoint(verdicts(result).values())
    assert [row["name"] for row in result.leaderboard] == ["right of 1", "relative distance"]
    noisy = judged("contest", "import torch\n\n\ndef score(keys, values):\n    return torch.rand(keys.shape[:-1])\n")
    assert (noisy.score, noisy.leaderboard) == (0, [])


# The child


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
    path = tmp_path / "keydiff.py"
    path.write_text(
        "import os, sys\n\n\ndef seen():\n    return (str(dict(os.environ)), str(sys.argv), str(sorted(sys.modules)))\n"
    )
    with Child(path, "keydiff", limits=Limits(10)) as child:
        environment, arguments, modules = child.call("seen")
    assert "A_TOKEN" not in environment
    assert "secret" not in arguments
    for name in ("reference", "optimized", "spec_tests", "hypothesis", "workbench"):
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
    # A header that claims more than there is.
    claims = io.BytesIO()
    with zipfile.ZipFile(claims, "w") as archive:
        member = io.BytesIO()
        np.lib.format.write_array_header_1_0(member, {"descr": "<f8", "fortran_order": False, "shape": (10**12,)})
        archive.writestr("a0.npy", member.getvalue())
    with pytest.raises(worker.BadFrame, match="size"):
        worker.unpack(b"{}", claims.getvalue())


def test_a_child_that_does_not_read_does_not_hold_the_grader(tmp_path: Path) -> None:
    path = tmp_path / "keydiff.py"
    path.write_text("import time\n\n\ndef score(keys):\n    time.sleep(60)\n")
    with Child(path, "keydiff", limits=Limits(0.3)) as child, pytest.raises(ChildDied, match="no answer"):
        child.call("score", np.zeros(10**6))


# What is written


def graded(source: bytes, tmp_path: Path, **changes: Any) -> dict[str, Any]:
    path = tmp_path / "ada.py"
    path.write_bytes(source)
    order = classes.Order("keydiff", b"a secret", 2, tuple(formats.FORMATS), **changes)
    grade = classes.grade_one(order, "ada", path)
    formats.write(grade, tmp_path / "grades" / "ada", list(formats.FORMATS))
    return grade


def test_every_format_is_valid(tmp_path: Path) -> None:
    wrong = bundled("keydiff", load_mutants()["keydiff.raw_mean_anchor"])
    grade = graded(wrong.encode(), tmp_path)
    folder = tmp_path / "grades" / "ada"
    files = {name: (folder / file).read_text(encoding="utf-8") for name, (file, _) in formats.FORMATS.items()}
    xmlschema.XMLSchema(formats.SCHEMAS / "junit.xsd").validate(files["junit"])
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
    for name, value in {
        "CLASSROOM": "llm-systems",
        "OWNER": "ada",
        "SUBMISSION_TAG": "submit/1",
        "COMMIT_URL": "https://c",
    }.items():
        monkeypatch.setenv(name, value)
    graded(b"", tmp_path)
    written = json.loads((tmp_path / "grades" / "ada" / "result.json").read_text(encoding="utf-8"))
    assert (written["classroom"], written["owner"], written["submission"]) == ("llm-systems", "ada", "submit/1")
    assert written["commit"] == written["review"] == "https://c"


def test_a_message_with_control_characters_is_xml_and_markdown_all_the_same(tmp_path: Path) -> None:
    source = b"def anchor(keys):\n    raise RuntimeError('\\0\\x1b[31m </failure> ````````\\n| a | b |')\n"
    graded(source, tmp_path)
    text = (tmp_path / "grades" / "ada" / "junit.xml").read_text(encoding="utf-8")
    xmlschema.XMLSchema(formats.SCHEMAS / "junit.xsd").validate(text)


# A class


def test_a_class_is_graded_resumed_and_summed_up(tmp_path: Path) -> None:
    handed_in = tmp_path / "handed_in"
    (handed_in / "folder").mkdir(parents=True)
    (handed_in / "folder" / "keydiff.py").write_bytes(SOLUTION.read_bytes())
    (handed_in / "wrong.py").write_text("def score(keys):\n    return keys[..., 0]\n", encoding="utf-8")
    (handed_in / "broken.zip").write_bytes(b"no archive")
    order = classes.Order("keydiff", b"a secret", 1, ("gradescope",))
    found = classes.find([handed_in], "keydiff.py")
    assert sorted(found) == ["broken", "folder", "wrong"]
    done: list[str] = []
    first = {grade["student"]: grade for grade in classes.run(order, found, tmp_path / "grades", 2, done.append)}
    assert {student: grade["score"] for student, grade in first.items()} == {"broken": 0, "folder": 100, "wrong": 0}
    assert sorted(done) == sorted(found)
    assert "cannot be read" in first["broken"]["error"]
    for student in found:
        assert (tmp_path / "grades" / student / "results.json").exists()
    # What is done is read, not graded again; a file that has changed is.
    stored = tmp_path / "grades" / "folder" / "grade.json"
    stored.write_text(json.dumps(first["folder"] | {"seconds": 12345.0}), encoding="utf-8")
    (handed_in / "wrong.py").write_text("", encoding="utf-8")
    second = {grade["student"]: grade for grade in classes.run(order, found, tmp_path / "grades", 1)}
    assert second["folder"]["seconds"] == 12345
    assert second["wrong"]["source_sha256"] != first["wrong"]["source_sha256"]
    summary = classes.summary(list(second.values()))
    assert summary["distribution"] == {0: 2, 100: 1}
    assert summary["errors"] == 1


def test_a_failure_of_the_grader_is_written_down_and_graded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise MemoryError("no memory")

    path = tmp_path / "ada.py"
    path.write_text("", encoding="utf-8")
    order = classes.Order("keydiff", b"a secret", 1, ())
    monkeypatch.setattr(grading, "judge", fail)
    (grade,) = classes.run(order, {"ada": path}, tmp_path / "grades", 1)
    assert "not the student's doing" in grade["error"]
    monkeypatch.undo()
    (again,) = classes.run(order, {"ada": path}, tmp_path / "grades", 1)
    assert again["error"] == ""


def test_seeds_are_secret_and_differ_by_law() -> None:
    one = assignments.load("keydiff")
    run = grading._Run(one, Path(), "", b"a secret", 1, {}, None)
    assert run.seed("a") != run.seed("b")
    assert run.seed("a") == grading._Run(one, Path(), "", b"a secret", 9, {}, None).seed("a")
    order = classes.Order("keydiff", b"a secret", 1, ())
    assert "secret" not in order.seed_id
    assert order.seed_id != classes.Order("keydiff", b"another", 1, ()).seed_id


# The command line


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_transcript_of_the_docs_is_what_happens() -> None:
    assert transcript.PAGE.read_text(encoding="utf-8") == transcript.run()


def test_mistakes_on_the_command_line(tmp_path: Path) -> None:
    for arguments, wanted in (
        (("start", "calculus"), "wanted one of"),
        (("check", "keydiff", "--work", tmp_path), "evictionary start keydiff"),
        (("submit", "keydiff", "--work", tmp_path), "evictionary start keydiff"),
        (("grade", tmp_path / "nothing", "--assignment", "keydiff"), "exists"),
        (("grade", tmp_path, "--assignment", "keydiff", "--format", "pdf"), "gradescope"),
    ):
        result = invoke(*arguments)
        assert result.exit_code == 2
        assert wanted in " ".join(result.stderr.split())
    assert invoke("start", "keydiff", "--work", tmp_path).exit_code == 0
    again = invoke("start", "keydiff", "--work", tmp_path)
    assert again.exit_code == 2 and "may hold your work" in again.stderr


def test_grade_reads_what_submit_packs(tmp_path: Path) -> None:
    work, archive, secret = tmp_path / "work", tmp_path / "ada.zip", tmp_path / "secret"
    work.mkdir()
    (work / "keydiff.py").write_bytes(SOLUTION.read_bytes())
    (work / "diary.txt").write_text("not to be handed in", encoding="utf-8")
    secret.write_text("nobody guesses this", encoding="utf-8")
    assert invoke("submit", "keydiff", "--work", work, "--output", archive).exit_code == 0
    assert sorted(zipfile.ZipFile(archive).namelist()) == [submissions.MANIFEST, "keydiff.py"]
    arguments = ("--assignment", "keydiff", "--seed-file", secret, "--output", tmp_path / "grades", "--examples", 1, "--json")
    result = invoke("grade", archive, *arguments)
    assert json.loads(result.stdout)["distribution"] == {"100": 1}
    assert {path.name for path in (tmp_path / "grades" / "ada").iterdir()} == {
        "grade.json",
        *(file for file, _ in formats.FORMATS.values()),
    }
