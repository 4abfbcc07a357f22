"""A class: what is written for each submission, grading in one command, the commands of students and instructors."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import ValidationError
from markdown_it import MarkdownIt
from test_pages import blocks, commands
from tools.grader import (
    EVERY_FILE,
    EVERY_FORMAT,
    SOLUTION,
    as_json,
    graded,
    invoke,
    json_of,
    names_in,
    order,
    packed,
    text_of,
    written,
)
from tools.synthetic import SOLUTION as SOLVED
from tools.synthetic import bundled

from docs_build import transcript
from evictionary.classroom import assignment as assignments
from evictionary.classroom import classes, contest, formats, grading, submissions
from evictionary.classroom.child import StudentError
from evictionary.classroom.judgement import Judgement, Run, empty
from evictionary.errors import UsageError
from evictionary.spec_tests.harness.planted import load_mutants

# What is written


def test_every_format_is_valid(tmp_path: Path, junit: Any) -> None:
    grade = graded(bundled("keydiff", load_mutants()["keydiff.raw_mean_anchor"]), tmp_path, 2, EVERY_FORMAT)
    files = {name: text_of(tmp_path / "grades" / "ada" / file) for name, (file, _) in formats.FORMATS.items()}
    junit.validate(files["junit"])
    gradescope, classroom50 = json.loads(files["gradescope"]), json.loads(files["classroom50"])
    assert gradescope["score"] == sum(test["score"] for test in gradescope["tests"]) == grade["score"] == 15
    assert classroom50["score"] == sum(test["score"] for test in classroom50["tests"]) == 15
    assert all(type(test["score"]) is int for test in classroom50["tests"])
    assert 'failures="1"' in files["junit"] and 'skipped="4"' in files["junit"]
    assert cells(files["markdown"])[0] == 1 + len(grade["lines"])
    for changed in ({"extra": 1}, {"score": 1.5}):
        with pytest.raises(ValidationError):
            formats.validator("classroom50").validate(classroom50 | changed)


def cells(page: str, dialect: str = "commonmark") -> tuple[int, int, set[str]]:
    """The rows and the cells of the tables of a Markdown page, and the kinds of text in it."""
    tokens = MarkdownIt(dialect, {"linkify": False}).enable("table").parse(page)
    kinds = [token.type for token in tokens]
    return kinds.count("tr_open"), kinds.count("td_open"), {child.type for token in tokens for child in token.children or []}


def test_what_the_runner_of_classroom_50_says_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"CLASSROOM": "llm-systems", "OWNER": "ada", "SUBMISSION_TAG": "submit/1", "COMMIT_URL": "https://c"}
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    graded("", tmp_path, 1, ("classroom50",))
    result = json_of(tmp_path / "grades" / "ada" / "result.json")
    assert [result[key] for key in ("classroom", "owner", "submission", "commit", "review")] == [*said.values(), "https://c"]


HOSTILE = (
    "\0\x1b[31m\x9b\ufffe\uffff\u202e </failure> ````````\n| a \\| b | ![x](https://a.b/c) [y](d) <img> www.e.f https://g.h **i**"
)


def test_a_hostile_message_is_text_in_every_format(tmp_path: Path, junit: Any) -> None:
    graded(f"def anchor(keys):\n    raise RuntimeError({HOSTILE!r})\n", tmp_path, 1, EVERY_FORMAT)
    folder = tmp_path / "grades" / "ada"
    junit.validate(text_of(folder / "junit.xml"))
    for file, _ in formats.FORMATS.values():
        assert {"\x1b", "\x9b", "\ufffe", "\u202e"}.isdisjoint(text_of(folder / file))
    # Beside the message, which stands in a fence, the same words stand in a cell and in a sentence.
    grade = json_of(folder / "grade.json")
    page = formats.markdown(grade | {"error": HOSTILE, "lines": [line | {"reason": HOSTILE} for line in grade["lines"]]})
    rows, fields, kinds = cells(page, "gfm-like")
    assert (rows, fields) == (1 + len(grade["lines"]), 4 * len(grade["lines"]))
    assert kinds <= {"text", "text_special"}
    assert "https://" not in page.split("`" * 8)[0] and "www." not in page.split("`" * 8)[0]


# A class


def test_a_class_is_graded_resumed_and_summed_up(tmp_path: Path) -> None:
    handed_in, grades, done = tmp_path / "handed_in", tmp_path / "grades", []
    written(handed_in / "folder", SOLUTION, "keydiff.py")
    written(handed_in, "def score(keys):\n    return keys[..., 0]\n", "wrong.py")
    written(handed_in, "no archive", "broken.zip")
    one, found = order(1, ("gradescope",)), classes.find([handed_in], "keydiff.py")
    first = {grade["student"]: grade for grade in classes.run(one, found, grades, 2, done.append)}
    assert {student: grade["score"] for student, grade in first.items()} == {"broken": 0, "folder": 100, "wrong": 0}
    assert sorted(done) == sorted(found) == ["broken", "folder", "wrong"]
    assert "cannot be read" in first["broken"]["error"]
    assert all((grades / student / "results.json").exists() for student in found)
    # What is done is read, not graded again; a file that has changed is.
    written(grades / "folder", json.dumps(first["folder"] | {"seconds": 12345.0}), "grade.json")
    written(handed_in, "", "wrong.py")
    second = {grade["student"]: grade for grade in classes.run(one, found, grades, 1)}
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
    asked = []

    class Pool:
        """Breaks where it has several processes, or is given eve's file."""

        def __init__(self, jobs: int, **_: Any) -> None:
            self.jobs = jobs

        def submit(self, grade: Any, order: classes.Order, student: str, path: Path) -> Future[Any]:
            asked.append((student, self.jobs))
            future: Future[Any] = Future()
            if self.jobs > 1 or student == "eve":
                future.set_exception(BrokenProcessPool())
            else:
                future.set_result(grade(order, student, path))
            return future

        def shutdown(self, **_: Any) -> None:
            return

    monkeypatch.setattr(classes, "ProcessPoolExecutor", Pool)
    found = {student: written(tmp_path, name=f"{student}.py") for student in ("ada", "eve")}
    grades = {grade["student"]: grade["error"] for grade in classes.run(order(), found, tmp_path / "grades", 2)}
    assert sorted(asked) == [("ada", 1), ("ada", 2), ("eve", 1), ("eve", 2)]
    assert grades["ada"] == ""
    assert "not the student's doing: BrokenProcessPool" in grades["eve"]


def test_a_result_that_cannot_be_written_is_one_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def derive(grade: dict[str, Any]) -> str:
        return "fine" if grade["error"] else str(1 / 0)

    monkeypatch.setitem(formats.FORMATS, "markdown", ("grade.md", derive))
    assert "ZeroDivisionError" in graded("", tmp_path, 1, ("markdown",))["error"]
    assert (tmp_path / "grades" / "ada" / "grade.md").read_text(encoding="utf-8") == "fine"


def test_what_students_hand_in(tmp_path: Path) -> None:
    one, right, handed_in = assignments.load("keydiff"), b"# right", tmp_path / "handed_in"
    work = written(tmp_path / "work", right, "keydiff.py")
    handed_in.mkdir()
    for name, mode in (("dan.tar.gz", "w:gz"), ("dora.tgz", "w:gz"), ("dirk.tar", "w")):
        with tarfile.open(handed_in / name, mode) as archive:  # type: ignore[call-overload]
            archive.add(work, "./keydiff.py")
    shadows = ("keydiff.py", "numpy.py", "json.py", "sitecustomize.py", "mine.pth", "grade.json")
    packed(handed_in / "mac.zip", {"keydiff.py": right, "__MACOSX/keydiff.py": b"of the Finder"})
    packed(handed_in / "windows.zip", {"work\\keydiff.py": right})
    packed(handed_in / "shadows.zip", dict.fromkeys(shadows, right))
    for name in ("Žofie Müller.py", os.fsdecode(b"\xff.py")):
        written(handed_in, right, name)
    for name in (".DS_Store", "essay.docx", "__MACOSX/a", "grades/a", ".git/a"):
        written(handed_in, name=name)
    left_out: list[Path] = []
    found = classes.find([handed_in], "keydiff.py", handed_in / "grades", left_out.append)
    assert sorted(found) == sorted(["dan", "dora", "dirk", "mac", "windows", "shadows", "Žofie Müller", "\ufffd-baadfedd"])
    assert [path.name for path in left_out] == ["essay.docx"]
    with pytest.raises(submissions.BadSubmission, match=r"there is work/keydiff\.py\. `evictionary submit` packs it"):
        submissions.read(found.pop("windows"), one)
    for student, path in found.items():
        assert submissions.read(path, one) == right, student


def test_a_bad_name_costs_one_submission(tmp_path: Path) -> None:
    handed_in, right, one = tmp_path / "handed_in", b"# right", assignments.load("keydiff")
    packed(handed_in / "bob" / "upload.zip", {"keydiff.py": right})  # as course platforms store it
    for name in (b"eve/keydiff.py", b"keydiff.py", b"summary.json.py", b" .py", b"\xff" * 200 + b".py", b"a\nb.py", b"a\\b.py"):
        written(handed_in, right, os.fsdecode(name))
    (handed_in / "mallory").symlink_to(handed_in / "eve")
    (handed_in / "loop").symlink_to(handed_in / "loop")
    found = classes.find([handed_in], "keydiff.py")
    assert len(found) == 10
    assert {"bob", "eve", "mallory", "loop", "keydiff"} <= set(found)
    for student in found:
        assert submissions.is_id(student)
        (tmp_path / "grades" / student).mkdir(parents=True)
    for student in ("mallory", "loop"):
        with pytest.raises(submissions.BadSubmission, match="is a symbolic link"):
            submissions.read(found.pop(student), one)
    assert {submissions.read(path, one) for path in found.values()} == {right}
    # A folder with one assignment's file is one submission.
    assert classes.find([handed_in / "eve"], "keydiff.py") == {"eve": handed_in / "eve"}


def test_two_submissions_of_one_name_cost_that_student_alone(tmp_path: Path) -> None:
    handed_in = tmp_path / "in"
    files = "ada.py", "ada.zip", "bob.py", "bob.ipynb", "eve.ipynb", "dan.py.txt", "kim/Keydiff.py", "lee/a.zip", "lee/b.zip"
    for name in files:
        written(handed_in, name=name)
    left_out: list[Path] = []
    found = classes.find([handed_in], "keydiff.py", leave_out=left_out.append)
    assert sorted(found) == ["ada", "bob", "dan", "eve", "kim", "lee"]
    assert [path.name for path in left_out] == ["bob.ipynb"]
    told = {grade["student"]: grade["error"] for grade in classes.run(order(), found, tmp_path / "grades", 1)}
    assert told == {
        "bob": "",
        "ada": "more than one submission has this name: ada.py, ada.zip",
        "dan": "dan.py.txt is a text file: call it keydiff.py, and hand that in",
        "eve": "eve.ipynb is a notebook: write the functions into a file keydiff.py, and hand that in",
        "kim": "there is no file keydiff.py; there is 'Keydiff.py'",
        "lee": "there is no file keydiff.py, and 2 archives: a.zip, b.zip; wanted one",
    }
    assert all((tmp_path / "grades" / student / "grade.json").exists() for student in found)


def test_names_that_one_folder_may_hold_twice_are_said() -> None:
    grade = {"lines": [], "error": "", "score": 0, "walls": {}, "seconds": 0, "personal_id": "", "notes": []}
    names = ["ada", "Ada", "ada ", "a\u030ada", "\u00e5da", "bob"]
    assert classes.summary([grade | {"student": name} for name in names])["alike"] == sorted(names[:-1])


def test_the_gradebook_computes_nothing(tmp_path: Path) -> None:
    """Every platform takes a table of ids and points, and every spreadsheet computes what begins as a formula does."""
    grade = graded("def anchor(keys):\n    raise RuntimeError('=1+1')\n", tmp_path)
    named = [grade | {"student": name} for name in ('=HYPERLINK("http://a.b","x")', "--help", " @ada", "bob", 'eve, "the" second')]
    rows = list(csv.DictReader(io.StringIO(classes.gradebook([*named, grade | {"student": "kim", "error": "=no\nfile"}]))))
    assert {row["id"] for row in rows} == {'\'=HYPERLINK("http://a.b","x")', "'--help", "' @ada", "bob", 'eve, "the" second', "kim"}
    assert {(row["points"], row["of"]) for row in rows} == {("0", "100")}
    assert [row["comment"] for row in rows if row["id"] == "kim"] == ["'=no file"]
    unloadable = graded("import scipy", tmp_path)
    (row,) = csv.DictReader(io.StringIO(classes.gradebook([unloadable])))
    assert row["comment"].startswith("file: failed, your file cannot be loaded: ImportError: scipy")
    assert "()" not in formats.gradescope(unloadable) + formats.junit(unloadable)
    result = invoke("gradebook", tmp_path / "grades", "--json")
    assert json.loads(result.stdout)["distribution"] == {"0": 1}
    table = (tmp_path / "grades" / "gradebook.csv").read_text(encoding="utf-8")
    assert table.startswith('id,points,of,comment\nada,0,100,"file: failed')
    assert invoke("gradebook", tmp_path).exit_code == 2


def test_a_page_for_people_says_whose_it_is(tmp_path: Path) -> None:
    grade = graded("", tmp_path, 1, ("markdown",))
    told = f"Student ada, file ada.py (SHA-256 {grade['source_sha256'][:16]}), graded {grade['graded_at']}."
    assert told in text_of(tmp_path / "grades" / "ada" / "grade.md")


UTF_7 = "the file is in utf-7, not in UTF-8: what a reader sees as a comment may be code"
TURNED = "the file has marks that change the order in which its text is shown: U+202E, U+2066"


@pytest.mark.parametrize(
    ("source", "notes"),
    [
        ("# coding: utf-7\n# +AAo-raise OSError\n", [UTF_7]),
        ("# \u202e eil\u2066\n", [TURNED]),
        ("# coding: latin-1x\n", []),
        ("\ufeff# -*- coding: utf-8 -*-\n# \u05d0 \u0627\n", []),
    ],
)
def test_code_that_a_reader_does_not_see_is_noted(source: str, notes: list[str], tmp_path: Path) -> None:
    assert graded(source, tmp_path)["notes"] == notes


def test_a_grade_sends_nobody_outside_of_the_walls_unwarned(tmp_path: Path) -> None:
    path, secret = (
        written(tmp_path, "def anchor(keys):\n    return keys[..., 0, :]\n"),
        written(tmp_path, "nobody guesses", "secret"),
    )
    settings = ("--assignment", "keydiff", "--seed-file", secret)
    assert invoke("grade", path, *settings, "--output", tmp_path / "grades", "--examples", 1).exit_code == 0
    texts = [each.read_text(encoding="utf-8") for each in (tmp_path / "grades" / "ada").iterdir()]
    assert len(texts) == 1 + len(formats.FORMATS)
    for text in texts:
        assert "evictionary judge" not in text
        scripts = text.count("harness.implementation import load")
        assert text.count("this runs the student") + text.count("This runs the student") == scripts
    (command,) = {found for text in texts for found in re.findall(r"evictionary (grade \S+ --assignment keydiff --law \w+)", text)}
    words = command.split()
    for source, code, told in ((path, 1, "smallest input"), (SOLVED, 0, "passed: The anchor is")):
        one = invoke(words[0], source, *words[2:], *settings[2:])
        assert (one.exit_code, told in one.stdout) == (code, True)
    unloadable = invoke(words[0], written(tmp_path, "import scipy", "eve.py"), *words[2:], *settings[2:])
    assert unloadable.exit_code == 1 and "your file cannot be loaded" in unloadable.stdout
    assert "test_a_zero_key_scores_zero" in invoke("grade", path, *settings, "--law", "test_nothing").stderr


def test_a_kernel_that_a_gpu_refuses_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> float:
        raise StudentError("CompilationError", "at 3:5 [/bold]", "")

    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(grading, "gpu_milliseconds", fails)
    monkeypatch.setattr(grading, "judge", lambda source, assignment, **settings: empty(assignment))
    assert invoke("start", "kernel", "--work", tmp_path).exit_code == 0
    checked = invoke("check", "kernel", "--work", tmp_path)
    assert "On a GPU: the kernel fails, although the interpreter runs it: CompilationError: at 3:5 [/bold]" in checked.stdout
    assert checked.exit_code == 1


def test_the_constants_are_those_of_an_id_that_the_course_knows(tmp_path: Path) -> None:
    """A student could try ids until one has the constants of somebody's file."""
    eve = packed(tmp_path / "eve.zip", {submissions.MANIFEST: '{"student": "eve-95"}', "lagkv.py": ""})
    # A platform may unpack the archive, and name all submissions alike.
    alike = written(tmp_path / "submission", '{"student": "ada"}', submissions.MANIFEST).parent
    written(alike, name="lagkv.py")
    own = "the constants are those of 'eve-95', an id that the student wrote; the submission is named 'eve'"
    for path, name, roster, wanted in (
        (eve, "eve", (), ("eve-95", own)),
        (eve, "eve", {"ada", "eve"}, ("eve", "the archive says 'eve-95', and the submission is named 'eve'")),
        (eve, "eve", {"ada", "eve-95"}, ("eve-95", "")),
        (eve, "eve", {"ada"}, ("eve", "the archive says 'eve-95', and the roster does not have it; the submission is named 'eve'")),
        (tmp_path / "bob.zip", "bob", {"ada"}, ("bob", "'bob' is not on the roster")),
        (alike, "student", {"ada"}, ("ada", "")),
    ):
        assert submissions.personal_id(path, name, roster) == wanted
    # The command names those whom the instructor should ask, and draws nothing from an id that is not the course's.
    roster, secret = written(tmp_path, "id,name\nada,Ada L.\n", "roster.csv"), written(tmp_path, "nobody guesses", "secret")
    settings = ("--assignment", "lagkv", "--seed-file", secret, "--output", tmp_path / "grades", "--personal", "--examples", 1)
    for more, personal_id in ((), "eve-95"), (("--roster", roster), "eve"):
        result = as_json("grade", eve, *settings, *more)
        assert json_of(tmp_path / "grades" / "eve" / "grade.json")["personal_id"] == personal_id
        assert "'eve-95'" in result["notes"]["eve"][0]


WRONG_ASSIGNMENTS = (
    ('needs = ["score"]', 'needs = ["scor"]', "step 'symmetries': needs: got 'scor', wanted a step before it: anchor, score"),
    ("points = 15", "points = -40", "step 'anchor': points: got -40, wanted a whole number, at least 1"),
    ("points = 15", "points = 2.5", "step 'anchor': points: got 2.5, wanted a whole number"),
    ("points = 15", "points = true", "step 'anchor': points: got True, wanted a whole number"),
    ('name = "score"', 'name = "anchor"', "step 'anchor': name: got 'anchor', wanted a name that no other step has"),
    ('requirement = "KD-7"', 'requirement = "TV-1"', "step 'pairwise': requirement: got 'TV-1', wanted the id of a requirement"),
    (
        "::test_scores_are_cosines",
        "::test_score_are_cosine",
        "wanted a law of the suite, such as test_keydiff::test_scores_are_cosines",
    ),
    ('library = "numpy"', 'library = "jax"', "library: got 'jax', wanted numpy or torch"),
    ("points = 15", 'points = 15\ncheck = "vote"', "step 'anchor': check: got 'vote', wanted a check"),
    ('stem = "keydiff"', 'stem = "tova"', "check: got 'sizes', wanted a check of the grader that this stem has"),
    ("points = 15", 'points = 15\ncatches = ["a.b"]', "step 'anchor': catches: got 'a.b', wanted a planted mistake"),
    (
        "points = 15",
        "point = 15",
        "step 'anchor': Additional properties are not allowed ('point' was unexpected); it may have name, requirement",
    ),
    ("points = 15", "points = 15.0", "step 'anchor': points: got 15.0, wanted a whole number"),
    ('title = "KeyDiff by hand"', "", "'title' is a required property"),
    ('file = "keydiff.py"', 'file = "../keydiff.py"', "file: got '../keydiff.py'"),
    ("[[step]]", "[[step]", "wanted a TOML file"),
    ("[[step]]", "[[steps]]", "('steps' was unexpected)"),
)


@pytest.mark.parametrize(("right", "wrong", "told"), WRONG_ASSIGNMENTS)
def test_a_mistake_in_an_assignment_is_a_sentence(right: str, wrong: str, told: str, tmp_path: Path) -> None:
    one = assignments.load("keydiff")
    text, own = text_of(one.folder / "assignment.toml"), written(tmp_path / "keydiff", name="starter.py").parent
    written(own, text, "assignment.toml")
    assert assignments.load("keydiff", tmp_path).steps == one.steps
    written(own, text.replace(right, wrong) if right == "[[step]]" else text.replace(right, wrong, 1), "assignment.toml")
    with pytest.raises(UsageError, match=re.escape(told)):
        assignments.load("keydiff", tmp_path)


def of_the_page(folder: Path) -> None:
    """Write the files that the page for instructors shows."""
    page = (transcript.FOLDER / "instructor.md").read_text(encoding="utf-8")
    for name, text in re.findall(r'^```\w+ title="([\w./]+)"\n(.*?)^```$', page, re.DOTALL | re.MULTILINE):
        written(folder, text, name)


def test_an_assignment_of_the_instructors_own_is_tried_and_graded(tmp_path: Path) -> None:
    """The page for instructors has it; its reference is a method that no assignment of the project has."""
    of_the_page(tmp_path)
    mine, work = ("--assignments", tmp_path / "mine"), ("--work", tmp_path / "work")
    tried = invoke("grade", "--try", "--assignment", "tova", *mine, "--examples", 2)
    assert (tried.exit_code, tried.stdout) == (0, "the reference: 100 points, wanted 100\nthe starter file: 0 points, wanted 0\n")
    assert "evictionary check tova --work" in invoke("start", "tova", *mine, *work).stdout
    assert invoke("check", "tova", *mine, *work).exit_code == 1
    assert invoke("submit", "tova", *mine, *work, "--output", tmp_path / "ada.zip").exit_code == 0
    settings = ("--assignment", "tova", *mine, "--output", tmp_path / "grades", "--examples", 1)
    assert json.loads(invoke("grade", tmp_path / "ada.zip", *settings, "--json").stdout)["distribution"] == {"0": 1}
    assert invoke("grade", tmp_path / "mine" / "tova" / "starter.py", "--try", *settings).exit_code == 1


def test_submit_says_that_nothing_was_written(tmp_path: Path) -> None:
    submit = ("submit", "keydiff", "--work", tmp_path, "--output", tmp_path / "ada.zip", "--json")
    invoke("start", "keydiff", "--work", tmp_path, "--student", "ada")
    result = invoke(*submit)
    assert "keydiff.py is still the starter file" in result.stderr and not json.loads(result.stdout)["begun"]
    assert submissions.packed_id(tmp_path / "ada.zip") == "ada"  # remembered since `start`
    written(tmp_path, SOLUTION, "keydiff.py")
    result = invoke(*submit)
    assert (result.stderr, json.loads(result.stdout)["begun"]) == ("", True)


def test_the_help_names_every_assignment() -> None:
    for command in ("start", "check", "submit"):
        told = " ".join(invoke(command, "--help").stdout.split())
        assert all(name in told for name in assignments.names())


@pytest.mark.parametrize(
    ("upload", "told"),
    [("", ""), ("wrong.py", "; there is 'wrong.py'"), ("essay.docx", "")],
)
def test_a_named_student_has_a_result_whatever_is_uploaded(upload: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "submission").mkdir()
    if upload:
        written(tmp_path / "submission", name=upload)
    arguments = ("--assignment", "keydiff", "--student", "student", "--format", "gradescope", "--output", tmp_path / "grades")
    assert invoke("grade", tmp_path / "submission", *arguments).exit_code == 0
    result = json_of(tmp_path / "grades" / "student" / "results.json")
    assert (result["score"], result["output"]) == (0, f"there is no file keydiff.py{told}")


def test_other_points_or_limits_are_graded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = assignments.load("keydiff")
    path, asked = written(tmp_path), []

    def judge(source: bytes, assignment: assignments.Assignment, **settings: Any) -> Judgement:
        asked.append(assignment.max_score)
        return empty(assignment)

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
        monkeypatch.setattr(assignments, "load", lambda *_, loaded=loaded: loaded)
        list(classes.run(limits, {"ada": path}, tmp_path / "grades", 1))
    assert asked == [100, 105, 100, 100]


def test_only_the_file_itself_is_run(tmp_path: Path) -> None:
    others = dict.fromkeys(("helper.py", "numpy.py", "sitecustomize.py"), SOLUTION)
    archive = packed(tmp_path / "mallory.zip", {"keydiff.py": "from helper import score\n", **others})
    grade = classes.grade_one(order(), "mallory", archive)
    assert grade["score"] == 0
    assert "helper: this assignment is for NumPy only" in grade["lines"][0]["reason"]


def test_a_failure_of_the_grader_is_written_down_and_graded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(grading, "judge", fail)
    assert "not the student's doing" in graded("", tmp_path)["error"]
    monkeypatch.undo()
    assert graded("", tmp_path)["error"] == ""


def test_seeds_are_secret_and_differ_by_law() -> None:
    one = assignments.load("keydiff")
    run = Run(one, Path(), secret=b"a secret")
    assert run.seed("a") != run.seed("b")
    assert run.seed("a") == Run(one, Path(), secret=b"a secret", examples=9).seed("a")
    assert "secret" not in order().seed_id
    assert order().seed_id != order(secret=b"another").seed_id


# The command line


@pytest.mark.slow
def test_the_transcript_of_the_docs_is_what_happens() -> None:
    assert transcript.PAGE.read_text(encoding="utf-8") == transcript.run()


def test_the_transcript_begins_as_the_commands_do() -> None:
    assert transcript.PAGE.read_text(encoding="utf-8").startswith(transcript.run(transcript.WAY[:2]).rstrip("\n"))


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Runs lines of a page in a folder with what they name; `docker` checks its options and runs the command by itself."""
    bin, handed_in = tmp_path / "bin", tmp_path / "handed_in"
    for each in (bin, handed_in):
        each.mkdir()
    written(bin, f'#!/bin/sh\nexec {sys.executable} -m evictionary "$@"\n', "evictionary").chmod(0o755)
    written(bin, f"#!{sys.executable}\n{DOCKER}", "docker").chmod(0o755)
    written(handed_in, "def anchor(keys):\n    return keys[..., 0, :]\n", "bob.py")
    written(handed_in, name="eve.docx")
    written(tmp_path, bundled("tova"), "solution.py")
    written(tmp_path, "nobody guesses this", "secret")
    submissions.pack(assignments.load("keydiff"), written(tmp_path, name="keydiff.py").parent, tmp_path / "ada.zip", "ada")
    of_the_page(tmp_path)
    monkeypatch.setenv("PATH", f"{bin}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))

    def run(lines: str) -> str:
        done = subprocess.run(["bash", "-e", "-c", lines], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


DOCKER = """
import os, sys
words = sys.argv[sys.argv.index("run") + 1:]
end = words.index("evictionary-grader")
options, words = words[:end], words[end + 1:]
assert {"--rm", "--read-only", "--network", "none", "--cap-drop", "ALL", "no-new-privileges"} <= set(options), options
volumes = [options[n + 1].split(":") for n, word in enumerate(options) if word == "--volume"]
(source, inside, mode), (grades, out) = volumes
assert mode == "ro" and out == "/out/" + os.path.basename(grades)
words = [os.path.dirname(grades) if word == "/out" else word.replace(inside, source) for word in words]
os.execvp("evictionary", ["evictionary", *words])
"""


@pytest.mark.slow  # the fast test beside it, in test_pages.py, asks whether each command is understood
def test_the_commands_of_the_instructors_page_run(shell: Callable[[str], str], tmp_path: Path) -> None:
    page = transcript.FOLDER / "instructor.md"
    grade, one, law, tried, solution = (each for each in commands(page) if re.search(r"--(seed-file|try)", each))
    shell(f"{grade} --examples 1")
    assert sorted(each.name for each in (tmp_path / "grades").iterdir()) == ["bob", "gradebook.csv", "summary.json"]
    shell(f"{one} --examples 1")
    assert {each.name for each in (tmp_path / "grades" / "ada").iterdir()} == {"grade.json", "results.json", "junit.xml"}
    assert "mu is the mean of the unit keys." in shell(f"! {law} --examples 1")
    assert "the reference: 100 points" in shell(f"{tried} --examples 1")
    assert "the right answer: 100 points" in shell(f"{solution} --examples 1")
    assert "2 submissions" in shell("evictionary gradebook grades")


@pytest.mark.slow
def test_the_scripts_for_gradescope_and_containers_run(shell: Callable[[str], str], tmp_path: Path) -> None:
    for folder in ("submission", "source", "results"):
        (tmp_path / "autograder" / folder).mkdir(parents=True)
    written(tmp_path / "autograder" / "source", "nobody guesses this", "secret")
    (script,) = (each for each in blocks(transcript.FOLDER / "formats.md", "") if "results.json" in each)
    shell(script.replace("/autograder", f"{tmp_path}/autograder").replace("/tmp/grades", f"{tmp_path}/graded"))
    result = json.loads((tmp_path / "autograder" / "results" / "results.json").read_text(encoding="utf-8"))
    assert (result["score"], result["output"]) == (0, "there is no file keydiff.py")
    (tmp_path / "handed_in" / "bob.py").write_text("not Python", encoding="utf-8")
    (script,) = blocks(transcript.FOLDER / "container.md", "bash")
    assert "2 submissions" in shell(script)
    assert {each.name for each in (tmp_path / "grades").iterdir()} == {"bob", "eve.docx", "gradebook.csv", "summary.json"}


def test_the_dockerfile_has_the_form_of_one() -> None:
    """No daemon is needed for this: each instruction is one, what is copied is there, and the page builds this file."""
    path, page = Path(classes.__file__).parent / "Dockerfile", (transcript.FOLDER / "container.md").read_text(encoding="utf-8")
    lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
    words = ["FROM", "WORKDIR", "COPY", "RUN", "FROM", "COPY", "ARG", "RUN", "ENV", "WORKDIR", "ENTRYPOINT"]
    assert [line[0] for line in lines] == words
    assert lines[0][2:] == ["AS", lines[5][1].removeprefix("--from=")]
    assert f"-f {path.relative_to(transcript.FOLDER.parents[1])} ." in page


LARGE = "{0}/large"
KEYDIFF = ("--assignment", "keydiff")


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("start", "calculus"), "wanted one of"),
        (("check", "keydiff", "--work", "{0}"), "evictionary start keydiff"),
        (("submit", "keydiff", "--work", "{0}"), "evictionary start keydiff"),
        (("grade", "{0}/nothing", *KEYDIFF), "exists"),
        (("grade", "{0}", *KEYDIFF, "--format", "pdf"), "gradescope"),
        (("grade", "{0}/ada.py", *KEYDIFF, "--examples", "0"), "--examples: got 0, wanted at least 1"),
        (("grade", "{0}/ada.py", *KEYDIFF, "--seconds", "nan"), "--seconds: got nan"),
        (("grade", "{0}/ada.py", *KEYDIFF, "--student", "../ada"), "--student: got '../ada'"),
        (("grade", "{0}/ada.py", *KEYDIFF, "--student", "summary.json"), "--student: got 'summary.json'"),
        (("grade", "{0}/ada.py", *KEYDIFF, "--student", "a" * 300), "the name of a folder of its own"),
        (("grade", "{0}/ada.py", *KEYDIFF, "--seed-file", "{0}/ada.py"), "with 0 bytes, wanted at least 8"),
        (("grade", "{0}/ada.py", *KEYDIFF, "--output", "{0}/ada.py"), "--output"),
        (("start", "keydiff", "--work", "{0}/ada.py"), "--work"),
        (("check", "keydiff", "--work", LARGE), "keydiff.py has 2000000 bytes"),
        (("submit", "keydiff", "--work", LARGE), "keydiff.py has 2000000 bytes"),
        (("submit", "lagkv", "--work", LARGE, "--output", "{0}/none/a.zip"), "--output"),
        (("submit", "lagkv", "--work", LARGE, "--output", "a.rar"), "ends in .zip"),
        (("start", "keydiff", "--work", LARGE), "may hold your work"),
    ],
)
def test_mistakes_on_the_command_line(arguments: tuple[str, ...], wanted: str, tmp_path: Path) -> None:
    written(tmp_path, name="ada.py")
    written(tmp_path / "large", b"#" * 2_000_000, "keydiff.py")
    written(tmp_path / "large", name="lagkv.py")
    result = invoke(*(each.format(tmp_path) for each in arguments))
    assert result.exit_code == 2
    assert wanted in " ".join(result.stderr.split())


def test_grade_reads_what_submit_packs(tmp_path: Path) -> None:
    work, archive, secret = tmp_path / "work", tmp_path / "ada.zip", written(tmp_path, "nobody guesses this", "secret")
    written(work, SOLUTION, "keydiff.py")
    written(work, "not to be handed in", "diary.txt")
    assert invoke("submit", "keydiff", "--work", work, "--output", archive).exit_code == 0
    assert sorted(zipfile.ZipFile(archive).namelist()) == [submissions.MANIFEST, "keydiff.py"]
    arguments = ("--assignment", "keydiff", "--seed-file", secret, "--output", tmp_path / "grades", "--examples", 1)
    assert as_json("grade", archive, *arguments)["distribution"] == {"100": 1}
    assert names_in(tmp_path / "grades" / "ada") == EVERY_FILE


def test_what_is_typed_next_and_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "w[1]"
    started = invoke("start", "lagkv", "--work", work, "--student", "ada")
    assert f"evictionary check lagkv --work {work}\n" in started.stdout
    assert (work / "student.txt").read_text(encoding="utf-8") == "ada\n"
    assert "results must be float64 too" in started.stdout
    begun = as_json("start", "keydiff", "--work", work)
    assert begun["file"] == str(work / "keydiff.py")
    assert Path(begun["handout"]).exists()
    checked = invoke("check", "keydiff", "--work", work)
    assert checked.exit_code == 1
    assert str(work / "see_keydiff.py") in checked.stdout
    assert as_json("check", "keydiff", "--work", work)["hidden_cases"] == 475
    handed = as_json("submit", "keydiff", "--work", work, "--output", tmp_path / "a.zip")
    assert handed["files"] == ["keydiff.py", submissions.MANIFEST]
    # What a student's message holds is no markup.
    monkeypatch.setattr(contest, "load_model", lambda: None)  # no text is read to a file without a scorer
    written(work, "raise RuntimeError('[/bold] no')\n", "scorer.py")
    refused = invoke("check", "contest", "--work", work)
    assert refused.exit_code == 1
    assert "[/bold] no" in " ".join(refused.stdout.split())


def test_grade_says_what_it_leaves_out(tmp_path: Path) -> None:
    handed_in = written(tmp_path / "handed_in").parent
    essay = written(handed_in, name="essay.docx")
    result = invoke("grade", handed_in, "--assignment", "keydiff", "--output", tmp_path / "grades", "--json")
    assert "essay.docx" in result.stderr
    assert json.loads(result.stdout)["left_out"] == [str(essay)]


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
