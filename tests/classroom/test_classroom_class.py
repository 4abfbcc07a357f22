"""A class: what is written for each submission, grading
in one command, the commands of students and instructors.
"""

import csv
import functools
import io
import json
import os
import re
import shutil
import sys
import zipfile
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from jsonschema import ValidationError
from markdown_it import MarkdownIt
from tools import ROOT, as_json, failed, invoke, printed, refused, run, says
from tools.grader import (
    EVERY_FILE,
    EVERY_FORMAT,
    SOLUTION,
    bundled,
    graded,
    handed_in,
    json_of,
    order,
    text_of,
    to_grade,
    written,
)
from tools.pages import commands

from docs_build import transcript
from evictionary.classroom import (
    assignment as assignments,
    classes,
    contest,
    formats,
    gradebook,
    grading,
    submissions,
)
from evictionary.classroom.child import StudentError
from evictionary.classroom.judgement import Run, empty
from evictionary.spec_tests.proof.planted import load_mutants

# What is written


def test_every_format_is_valid(tmp_path: Path, junit: Any) -> None:
    grade = graded(bundled("keydiff", load_mutants()["keydiff.raw_mean_anchor"]), tmp_path, 2, EVERY_FORMAT)
    files = {name: text_of(tmp_path / "grades" / "ada" / file) for name, (file, _) in formats.FORMATS.items()}
    junit.validate(files["junit"])
    assert 'failures="1"' in files["junit"] and 'skipped="3"' in files["junit"]
    assert cells(files["markdown"])[0] == 1 + len(grade["lines"])
    told = f"Student ada, file ada.py (SHA-256 {grade['source_sha256'][:16]}), graded {grade['graded_at']}."
    assert told in files["markdown"]
    for name in ("gradescope", "classroom50"):
        result = json.loads(files[name])
        points = [test["score"] for test in result["tests"]]
        assert result["score"] == sum(points) == grade["score"] == 30 and {*map(type, points)} == {int}
    for changed in ({"extra": 1}, {"score": 1.5}):
        checked = functools.partial(formats.validator("classroom50").validate, result | changed)
        refused(checked, error=ValidationError)


def cells(page: str, dialect: str = "commonmark") -> tuple[int, int, set[str]]:
    """The rows and the cells of the tables of a Markdown page, and the kinds of text in it."""
    tokens = MarkdownIt(dialect, {"linkify": False}).enable("table").parse(page)
    kinds = [token.type for token in tokens]
    return (
        kinds.count("tr_open"),
        kinds.count("td_open"),
        {child.type for token in tokens for child in token.children or []},
    )


def test_what_the_runner_of_classroom_50_says_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {
        "CLASSROOM": "llm-systems",
        "OWNER": "ada",
        "SUBMISSION_TAG": "submit/1",
        "COMMIT_URL": "https://c",
    }
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    graded("", tmp_path, 1, ("classroom50",))
    result = json_of(tmp_path / "grades" / "ada" / "result.json")
    assert [result[key] for key in ("classroom", "owner", "submission", "commit", "review")] == [
        *said.values(),
        "https://c",
    ]


HOSTILE = (
    "\0\x1b[31m\x9b\ufffe\uffff\u202e </failure> ````````\n| a \\| b | ![x](https://a.b/c) [y](d) "
    "<img> www.e.f https://g.h **i**"
)


def test_a_hostile_message_is_text_in_every_format(tmp_path: Path, junit: Any) -> None:
    grade = graded(f"def anchor(keys):\n    raise RuntimeError({HOSTILE!r})\n", tmp_path, 1, EVERY_FORMAT)
    files = {file: text_of(tmp_path / "grades" / "ada" / file) for file, _ in formats.FORMATS.values()}
    junit.validate(files["junit.xml"])
    assert {"\x1b", "\x9b", "\ufffe", "\u202e"}.isdisjoint("".join(files.values()))
    # Beside the message, which stands in a fence, the same words stand in a cell and in a sentence.
    page = formats.markdown(
        grade | {"error": HOSTILE, "lines": [line | {"reason": HOSTILE} for line in grade["lines"]]}
    )
    rows, fields, kinds = cells(page, "gfm-like")
    assert (rows, fields) == (1 + len(grade["lines"]), 4 * len(grade["lines"]))
    assert kinds <= {"text", "text_special"}
    says(page.split("`" * 8)[0], never=["https://", "www."])


# A class


def test_a_class_is_graded_resumed_and_summed_up(tmp_path: Path) -> None:
    grades, done = tmp_path / "grades", []
    files = {
        "folder/keydiff.py": SOLUTION,
        "wrong.py": "def score(keys):\n    return keys[..., 0]\n",
        "broken.zip": "no archive",
        "twice.py": "",
        "twice.zip": "",
    }
    one, (found, _) = (
        order(1, ("gradescope",)),
        classes.find([handed_in(tmp_path / "in", files)], "keydiff.py"),
    )
    first = {grade["student"]: grade for grade in classes.run(one, found, grades, 2, done.append)}
    assert {student: grade["score"] for student, grade in first.items()} == {
        "broken": 0,
        "folder": 100,
        "wrong": 0,
        "twice": 0,
    }
    assert sorted(done) == sorted(found) == ["broken", "folder", "twice", "wrong"]
    assert "cannot be read" in first["broken"]["error"] and "more than one" in first["twice"]["error"]
    assert all(
        (grades / student / file).exists() for student in found for file in ("results.json", "grade.json")
    )
    # What is done is read, not graded again; a file that has changed is.
    written(grades / "folder", json.dumps(first["folder"] | {"seconds": 12345.0}), "grade.json")
    written(tmp_path / "in", "", "wrong.py")
    second = {grade["student"]: grade for grade in classes.run(one, found, grades, 1)}
    assert second["folder"]["seconds"] == 12345
    assert second["wrong"]["source_sha256"] != first["wrong"]["source_sha256"]
    # On a system without a wall, the instructor is told.
    bare = second["wrong"] | {"walls": {"landlock": 0, "system calls": True, "user nobody": False}}
    summary = classes.summary([*second.values(), bare])
    assert (summary["distribution"], summary["unjudged"], summary["errors"]) == (
        {0: 4, 100: 1},
        ["broken", "twice"],
        2,
    )
    assert {"landlock", "user nobody"} <= set(summary["walls_missing"])


def test_one_ended_process_is_no_other_students_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool of processes breaks as a whole; each student of it is graded again alone."""
    asked = []

    def pool(jobs: int, **_: Any) -> Any:
        """It breaks where it has several processes, or is given eve's file."""

        def submit(grade: Any, order: classes.Order, student: str, path: Path) -> Future[Any]:
            asked.append((student, jobs))
            future: Future[Any] = Future()
            if jobs > 1 or student == "eve":
                future.set_exception(BrokenProcessPool())
            else:
                future.set_result(grade(order, student, path))
            return future

        return Mock(submit=submit)

    monkeypatch.setattr(classes, "ProcessPoolExecutor", pool)
    found = {student: written(tmp_path, name=f"{student}.py") for student in ("ada", "eve")}
    grades = {
        grade["student"]: grade["error"] for grade in classes.run(order(), found, tmp_path / "grades", 2)
    }
    assert sorted(asked) == [("ada", 1), ("ada", 2), ("eve", 1), ("eve", 2)]
    assert grades["ada"] == "" and "not the student's doing: BrokenProcessPool" in grades["eve"]


def test_a_failure_of_the_grader_is_written_down_and_graded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grading, "judge", Mock(side_effect=MemoryError("no memory")))
    assert "not the student's doing" in graded("", tmp_path)["error"]
    monkeypatch.undo()
    assert graded("", tmp_path)["error"] == ""
    # A result that cannot be written in a format is one that says so.
    monkeypatch.setitem(
        formats.FORMATS, "markdown", ("grade.md", lambda grade: "fine" if grade["error"] else str(1 / 0))
    )
    assert "ZeroDivisionError" in graded("", tmp_path, 1, ("markdown",))["error"]
    assert text_of(tmp_path / "grades" / "ada" / "grade.md") == "fine"


RIGHT = b"# right"
ARCHIVE = {"keydiff.py": RIGHT}
ODD_NAMES = (b"summary.json.py", b" .py", b"\xff" * 200 + b".py", b"\xff.py", b"a\nb.py", b"a\\b.py")
FILES = {
    **{os.fsdecode(name): RIGHT for name in ODD_NAMES},
    **dict.fromkeys(("keydiff.py", "Žofie Müller.py", "eve/keydiff.py"), RIGHT),
    **{name: {"./keydiff.py": RIGHT} for name in ("dan.tar.gz", "dora.tgz", "dirk.tar")},
    "upload/upload.zip": ARCHIVE,  # as course platforms store it
    "mac.zip": {**ARCHIVE, "__MACOSX/keydiff.py": b"of the Finder"},
    "windows.zip": {"work\\keydiff.py": RIGHT},
    "shadows.zip": {
        **ARCHIVE,
        **dict.fromkeys(("numpy.py", "json.py", "sitecustomize.py", "mine.pth", "grade.json"), RIGHT),
    },
    **dict.fromkeys((".DS_Store", "__MACOSX/a", "grades/a", ".git/a", "essay.docx", "bob.ipynb"), b""),
    "bob.py": RIGHT,
    **dict.fromkeys(
        ("ada.py", "ada.zip", "ina.ipynb", "dina.py.txt", "kim/Keydiff.py", "lee/a.zip", "lee/b.zip"), b""
    ),
}
REFUSED = {
    "mallory": "mallory is a symbolic link",
    "loop": "loop is a symbolic link",
    "windows": "0 files keydiff.py at the top of the archive, wanted one; there is work/keydiff.py. "
    "`evictionary submit` packs it as it should be",
    "ada": "more than one submission has this name: ada.py, ada.zip",
    "dina": "dina.py.txt is a text file: call it keydiff.py, and hand that in",
    "ina": "ina.ipynb is a notebook: write the functions into a file keydiff.py, and hand that in",
    "kim": "there is no file keydiff.py; there is 'Keydiff.py'",
    "lee": "there is no file keydiff.py, and 2 archives: a.zip, b.zip; wanted one",
}


def test_what_students_hand_in(tmp_path: Path) -> None:
    folder, read = handed_in(tmp_path / "in", FILES), {}
    for link, target in (("mallory", "eve"), ("loop", "loop")):
        (folder / link).symlink_to(folder / target)
    found, left_out = classes.find([folder], "keydiff.py", folder / "grades")
    for student, path in found.items():
        assert submissions.is_id(student)
        (tmp_path / "grades" / student).mkdir(parents=True)
        try:
            read[student] = submissions.read(path, assignments.load("keydiff")).decode()
        except submissions.BadSubmission as error:
            read[student] = str(error)
    assert {student: told for student, told in read.items() if told != RIGHT.decode()} == REFUSED
    named = {
        "dan",
        "dora",
        "dirk",
        "upload",
        "mac",
        "shadows",
        "Žofie Müller",
        "bob",
        "eve",
        "keydiff",
        "\ufffd-baadfedd",
    }
    assert named <= set(read) and len(read) == len(REFUSED) + len(named) + len(ODD_NAMES) - 1
    assert [path.name for path in left_out] == ["essay.docx", "bob.ipynb"]
    # A folder with one assignment's file is one submission.
    assert classes.find([folder / "eve"], "keydiff.py") == ({"eve": folder / "eve"}, [])


def test_what_the_instructor_is_told_of_names() -> None:
    """Names that one folder may hold twice, and ids that two of the class have."""
    grade = {"lines": [], "error": "", "score": 0, "walls": {}, "seconds": 0, "notes": []}
    names = {"ada": 1, "Ada": 2, "ada ": 3, "a\u030ada": 4, "\u00e5da": 5, "bob": 6, "eve": 6}
    summary = classes.summary(
        [grade | {"student": name, "personal_id": str(each)} for name, each in names.items()]
    )
    assert (summary["alike"], summary["one_id"]) == (sorted([*names][:-2]), ["bob", "eve"])


def test_the_gradebook_computes_nothing(tmp_path: Path) -> None:
    """Every platform takes a table of ids and points, and
    every spreadsheet computes what begins as a formula does.
    """
    grade = graded("def anchor(keys):\n    raise RuntimeError('=1+1')\n", tmp_path)
    named = [
        grade | {"student": name}
        for name in ('=HYPERLINK("http://a.b","x")', "--help", " @ada", "bob", 'eve, "the" second')
    ]
    page = gradebook.table(gradebook.rows([*named, grade | {"student": "kim", "error": "=no\nfile"}]))
    rows = {row["id"]: row for row in csv.DictReader(io.StringIO(page))}
    ids = {'\'=HYPERLINK("http://a.b","x")', "'--help", "' @ada", "bob", 'eve, "the" second', "kim"}
    assert rows.keys() == ids and rows["kim"]["comment"] == "'=no file"
    assert {(row["points"], row["of"]) for row in rows.values()} == {("0", "100")}
    unloadable = graded("import scipy", tmp_path)
    says(formats.gradescope(unloadable) + formats.junit(unloadable), never=["()"])
    assert as_json("gradebook", tmp_path / "grades")["distribution"] == {"0": 1}
    assert text_of(tmp_path / "grades" / "gradebook.csv").startswith(
        'id,points,of,comment\nada,0,100,"file: failed, your file cannot be loaded: ImportError: scipy'
    )
    assert "wanted a folder that `evictionary grade` wrote" in failed("gradebook", tmp_path, code=2)


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
    path, settings = written(tmp_path, "def anchor(keys):\n    return keys[..., 0, :]\n"), to_grade(tmp_path)
    printed("grade", path, *settings)
    texts = [text_of(each) for each in (tmp_path / "grades" / "ada").iterdir()]
    assert len(texts) == 1 + len(formats.FORMATS)
    for text in texts:
        assert "evictionary judge" not in text
        assert text.count("this runs the student") + text.count("This runs the student") == text.count(
            "judge.implementation import load"
        )
    for file, _ in formats.FORMATS.values():  # what a student reads
        text = text_of(tmp_path / "grades" / "ada" / file)
        says(
            text,
            "to see it again evictionary check keydiff",
            never=["this law alone", "your rights", "oracle("],
        )
    (law,) = {
        found
        for text in texts
        for found in re.findall(r"evictionary grade \S+ --assignment keydiff --law (\w+)", text)
    }
    for source, code, told in (
        (path.read_bytes(), 1, "smallest input"),
        (SOLUTION, 0, "passed: The anchor is"),
        ("import scipy", 1, "your file cannot be loaded"),
    ):
        one = invoke("grade", written(tmp_path, source, "eve.py"), "--law", law, *settings[:4])
        assert (one.exit_code, told in one.stdout) == (code, True)
    assert "test_a_zero_key_scores_zero" in failed("grade", path, *settings, "--law", "test_nothing", code=2)


def test_a_kernel_that_a_gpu_refuses_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(
        grading, "gpu_milliseconds", Mock(side_effect=StudentError("CompilationError", "at 3:5 [/bold]", ""))
    )
    monkeypatch.setattr(grading, "judge", lambda source, assignment, **settings: empty(assignment))
    printed("start", "kernel", "--work", tmp_path)
    checked = invoke("check", "kernel", "--work", tmp_path)
    assert (
        "On a GPU: the kernel fails, although the interpreter runs it: CompilationError: at 3:5 [/bold]"
        in checked.stdout
    )
    assert checked.exit_code == 1


# Whose constants they are


def said_by(student: str) -> str:
    return json.dumps({"student": student})


IDS = {
    "eve.zip": {submissions.MANIFEST: said_by("eve-95"), "lagkv.py": ""},
    "keydiff (1).zip": {submissions.MANIFEST: said_by("ada")},
    "upload/x.zip": {submissions.MANIFEST: said_by("ada")},
    # A platform may unpack the archive, and name all submissions alike.
    f"submission/{submissions.MANIFEST}": said_by("ada"),
    "submission/lagkv.py": "",
    "Ada (1).py": "",
    "stranger.zip": {submissions.MANIFEST: said_by("../ada")},
}
OWN = "the constants are those of {!r}, an id that the student wrote; the submission is named {!r}"
NO_ROSTER: set[str] = set()


@pytest.mark.parametrize(
    ("file", "name", "roster", "student", "note"),
    [
        ("eve.zip", "eve", NO_ROSTER, "eve-95", OWN.format("eve-95", "eve")),
        (
            "eve.zip",
            "eve",
            {"ada", "eve"},
            "eve",
            "the archive says 'eve-95', and the submission is named 'eve'",
        ),
        ("eve.zip", "eve", {"ada", "eve-95"}, "eve-95", ""),
        (
            *("eve.zip", "eve", {"ada"}, "eve"),
            "the archive says 'eve-95', and the roster does not have it; the submission is named 'eve'",
        ),
        ("bob.zip", "bob", {"ada"}, "bob", "'bob' is not on the roster"),
        ("submission", "student", {"ada"}, "ada", ""),
        ("keydiff (1).zip", "keydiff (1)", NO_ROSTER, "ada", OWN.format("ada", "keydiff")),
        ("upload", "upload", NO_ROSTER, "ada", OWN.format("ada", "upload")),
        ("Ada (1).py", "Ada (1)", NO_ROSTER, "Ada", ""),
        ("stranger.zip", "stranger", NO_ROSTER, "stranger", ""),
    ],
)
def test_the_constants_are_those_of_an_id_that_the_course_knows(
    file: str, name: str, roster: set[str], student: str, note: str, tmp_path: Path
) -> None:
    """A student could try ids until one has the constants of somebody's file."""
    assert submissions.personal_id(handed_in(tmp_path, IDS) / file, name, roster) == (student, note)


def test_grade_names_those_whom_the_instructor_should_ask(tmp_path: Path) -> None:
    """And it draws nothing from an id that is not the course's."""
    roster, settings = written(tmp_path, "id,name\nada,Ada L.\n", "roster.csv"), to_grade(tmp_path, "lagkv")
    for more, personal_id in ((), "eve-95"), (("--roster", roster), "eve"):
        result = as_json("grade", handed_in(tmp_path, IDS) / "eve.zip", *settings, "--personal", *more)
        assert json_of(tmp_path / "grades" / "eve" / "grade.json")["personal_id"] == personal_id
        assert "'eve-95'" in result["notes"]["eve"][0]


def test_an_archive_is_read_once_for_its_file_and_once_for_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reading starts a process."""
    one, archive, asked = assignments.load("lagkv"), tmp_path / "ada.zip", []
    submissions.pack(one, written(tmp_path, name="lagkv.py").parent, archive, "ada")
    read = submissions._from_archive
    monkeypatch.setattr(
        submissions, "_from_archive", lambda path, name: asked.append(name) or read(path, name)
    )
    monkeypatch.setattr(grading, "judge", lambda source, assignment, **settings: empty(assignment))
    grade = classes.grade_one(
        classes.Order("lagkv", b"a secret", 1, (), personal=True), "upload (1)", archive
    )
    assert (grade["personal_id"], grade["constants"]) == ("ada", one.constants_of("ada"))
    assert sorted(asked) == [submissions.MANIFEST, "lagkv.py"]


# Assignments of one's own


WRONG_ASSIGNMENTS = (
    (
        'needs = ["score"]',
        'needs = ["scor"]',
        "step 'symmetries': needs: got 'scor', wanted a step before it: anchor, score",
    ),
    ("points = 15", "points = -40", "step 'anchor': points: got -40, wanted a whole number, at least 1"),
    ("points = 15", "points = 2.5", "step 'anchor': points: got 2.5, wanted a whole number"),
    ("points = 15", "points = true", "step 'anchor': points: got True, wanted a whole number"),
    (
        'name = "score"',
        'name = "anchor"',
        "step 'anchor': name: got 'anchor', wanted a name that no other step has",
    ),
    (
        'requirement = "KD-7"',
        'requirement = "TV-1"',
        "step 'pairwise': requirement: got 'TV-1', wanted the id of a requirement",
    ),
    (
        "::test_scores_are_cosines",
        "::test_score_are_cosine",
        "wanted a law of the suite, such as test_keydiff::test_scores_are_cosines",
    ),
    ('library = "numpy"', 'library = "jax"', "library: got 'jax', wanted numpy or torch"),
    ("points = 15", 'points = 15\ncheck = "vote"', "step 'anchor': check: got 'vote', wanted a check"),
    (
        'stem = "keydiff"',
        'stem = "tova"',
        "check: got 'sizes', wanted a check of the grader that this stem has",
    ),
    (
        "points = 15",
        'points = 15\ncatches = ["a.b"]',
        "step 'anchor': catches: got 'a.b', wanted a planted mistake",
    ),
    (
        "points = 15",
        "point = 15",
        "step 'anchor': Additional properties are not allowed ('point' was unexpected); it may have name, "
        "requirement",
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
    text = text_of(one.folder / "assignment.toml")
    handed_in(tmp_path / "keydiff", {"starter.py": "", "assignment.toml": text})
    assert assignments.load("keydiff", tmp_path).steps == one.steps
    written(
        tmp_path / "keydiff", text.replace(right, wrong, -1 if right == "[[step]]" else 1), "assignment.toml"
    )
    refused(lambda: assignments.load("keydiff", tmp_path), re.escape(told))


def of_the_page(folder: Path) -> None:
    """Write the files that the page for instructors shows."""
    page = text_of(transcript.FOLDER / "instructor.md")
    handed_in(
        folder, dict(re.findall(r'^```\w+ title="([\w./]+)"\n(.*?)^```$', page, re.DOTALL | re.MULTILINE))
    )


def test_an_assignment_of_the_instructors_own_is_tried_and_graded(tmp_path: Path) -> None:
    """The page for instructors has it; its reference is a method that no assignment of the project has."""
    of_the_page(tmp_path)
    mine, work = ("--assignments", tmp_path / "mine"), ("--work", tmp_path / "work")
    tried = printed("grade", "--try", "--assignment", "tova", *mine, "--examples", 2)
    assert tried == "the reference: 100 points, wanted 100\nthe starter file: 0 points, wanted 0\n"
    assert "evictionary check tova --work" in printed("start", "tova", *mine, *work)
    assert invoke("check", "tova", *mine, *work).exit_code == 1
    printed("submit", "tova", *mine, *work, "--output", tmp_path / "ada.zip")
    settings = (*to_grade(tmp_path, "tova"), *mine)
    assert as_json("grade", tmp_path / "ada.zip", *settings)["distribution"] == {"0": 1}
    assert invoke("grade", tmp_path / "mine" / "tova" / "starter.py", "--try", *settings).exit_code == 1


# What is graded, and when it is graded again


@pytest.mark.parametrize(
    ("upload", "told"),
    [("", ""), ("wrong.py", "; there is 'wrong.py'"), ("essay.docx", "")],
)
def test_a_named_student_has_a_result_whatever_is_uploaded(upload: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "submission").mkdir()
    handed_in(tmp_path / "submission", {upload: ""} if upload else {})
    printed(
        "grade",
        tmp_path / "submission",
        *to_grade(tmp_path),
        "--student",
        "student",
        "--format",
        "gradescope",
    )
    result = json_of(tmp_path / "grades" / "student" / "results.json")
    assert (result["score"], result["output"]) == (0, f"there is no file keydiff.py{told}")


def test_other_points_or_limits_are_graded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = assignments.load("keydiff")
    path, judge = (
        written(tmp_path),
        Mock(side_effect=lambda source, assignment, **settings: empty(assignment)),
    )
    monkeypatch.setattr(grading, "judge", judge)
    changed = replace(one, steps=(replace(one.steps[0], points=20), *one.steps[1:]))
    fewer = replace(one, steps=(replace(one.steps[0], laws=one.steps[0].laws[:1]), *one.steps[1:]))
    for loaded, seconds in ((one, None), (one, None), (changed, None), (fewer, None), (fewer, 3)):
        monkeypatch.setattr(assignments, "load", lambda *_, loaded=loaded: loaded)
        list(classes.run(order(seconds=seconds), {"ada": path}, tmp_path / "grades", 1))
    assert [call.args[1].max_score for call in judge.call_args_list] == [100, 105, 100, 100]


def test_only_the_file_itself_is_run(tmp_path: Path) -> None:
    others = dict.fromkeys(("helper.py", "numpy.py", "sitecustomize.py"), SOLUTION)
    files = {"mallory.zip": {"keydiff.py": "from helper import score\n", **others}}
    grade = classes.grade_one(order(), "mallory", handed_in(tmp_path, files) / "mallory.zip")
    assert grade["score"] == 0
    assert "helper: this assignment is for NumPy only" in grade["lines"][0]["reason"]


def test_seeds_are_secret_and_differ_by_law() -> None:
    few, many = (
        Run(assignments.load("keydiff"), Path(), secret=b"a secret", examples=count) for count in (1, 9)
    )
    assert few.seed("b") != few.seed("a") == many.seed("a")
    assert "secret" not in order().seed_id and order().seed_id != order(secret=b"another").seed_id


# The command line


@pytest.mark.parametrize("command", ["start", "check", "submit"])
def test_the_help_names_every_assignment(command: str) -> None:
    assert set(assignments.names()) <= set(re.findall(r"\w+", printed(command, "--help")))


def test_submit_says_that_nothing_was_written(tmp_path: Path) -> None:
    submit = ("submit", "keydiff", "--work", tmp_path, "--output", tmp_path / "ada.zip", "--json")
    printed("start", "keydiff", "--work", tmp_path, "--student", "ada")
    for begun, told in ((False, "keydiff.py is still the starter file, as `start` wrote it."), (True, "")):
        result = invoke(*submit)
        assert (json.loads(result.stdout)["begun"], " ".join(result.stderr.split()).endswith(told)) == (
            begun,
            True,
        )
        assert submissions.packed_id(tmp_path / "ada.zip") == "ada"  # remembered since `start`
        written(tmp_path, SOLUTION, "keydiff.py")
    assert result.stderr == ""


@pytest.mark.slow
def test_the_transcript_of_the_docs_is_what_happens() -> None:
    assert text_of(transcript.PAGE) == transcript.run()


def test_the_transcript_begins_as_the_commands_do() -> None:
    assert text_of(transcript.PAGE).startswith(transcript.run(transcript.WAY[:2]).rstrip("\n"))


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Runs lines of a page in a folder with what they name; `docker` checks its options and runs the
    command by itself.
    """
    files = {
        "bin/evictionary": f'#!/bin/sh\nexec {sys.executable} -m evictionary "$@"\n',
        "bin/docker": f"#!{sys.executable}\n{DOCKER}",
        "bin/mv": MV,
        "handed_in/bob.py": "def anchor(keys):\n    return keys[..., 0, :]\n",
        "handed_in/eve.docx": "",
        "solution.py": bundled("tova"),
        "keydiff.secret": "nobody guesses this",
        "keydiff.py": "",
    }
    handed_in(tmp_path, files)
    for name in ("evictionary", "docker", "mv"):
        (tmp_path / "bin" / name).chmod(0o755)
    submissions.pack(assignments.load("keydiff"), tmp_path, tmp_path / "ada.zip", "ada")
    of_the_page(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))

    return lambda lines: run("bash", "-e", "-c", lines, cwd=tmp_path).stdout


# The script for containers runs on macOS too, whose mv has no -T.
MV = f"""#!/bin/sh
case "$1" in -T) echo "illegal option" >&2; exit 64;; esac
exec {shutil.which("mv")} "$@"
"""
DOCKER = """
import os, sys
words = sys.argv[sys.argv.index("run") + 1:]
end = words.index("evictionary-grader")
options, words = words[:end], words[end + 1:]
wanted = {"--rm", "--read-only", "--network", "none", "--cap-drop", "ALL", "no-new-privileges"}
assert wanted <= set(options), options
volumes = [options[n + 1].split(":") for n, word in enumerate(options) if word == "--volume"]
(source, inside, mode), (grades, out) = volumes
assert mode == "ro" and out == "/out/" + os.path.basename(grades)
assert os.stat(os.path.dirname(grades)).st_mode & 0o777 == 0o700 and not os.listdir(grades)
if os.path.exists("fails") and open("fails").read() in source:
    open(grades + "/grade.json", "w").write("{}")
    sys.exit(137)
words = [os.path.dirname(grades) if word == "/out" else word.replace(inside, source) for word in words]
os.execvp("evictionary", ["evictionary", *words])
"""


@pytest.mark.slow  # the fast test beside it, in site/test_pages.py, asks whether each command is understood
def test_the_commands_of_the_instructors_page_run(shell: Callable[[str], str], tmp_path: Path) -> None:
    grade, one, law, tried, solution = (
        each
        for each in commands(transcript.FOLDER / "instructor.md")
        if re.search(r"--(seed-file|try)", each)
    )
    shell(f"{grade} --examples 1")
    grades = tmp_path / "grades" / "keydiff"
    assert sorted(each.name for each in grades.iterdir()) == ["bob", "gradebook.csv", "summary.json"]
    shell(f"{one} --examples 1")
    assert {each.name for each in (grades / "ada").iterdir()} == {
        "grade.json",
        "results.json",
        "junit.xml",
    }
    for command, told in (
        (f"! {law} --examples 1", "mu is the mean of the unit keys."),
        (f"{tried} --examples 1", "the reference: 100 points"),
        (f"{solution} --examples 1", "the right answer: 100 points"),
        ("evictionary gradebook grades/keydiff", "2 submissions"),
    ):
        assert told in shell(command)


@pytest.mark.slow
def test_the_scripts_for_gradescope_and_containers_run(shell: Callable[[str], str], tmp_path: Path) -> None:
    for folder in ("submission", "source", "results"):
        (tmp_path / "autograder" / folder).mkdir(parents=True)
    written(tmp_path / "autograder" / "source", "nobody guesses this", "secret")
    recipes = Path(classes.__file__).parent / "recipes"
    shell(text_of(recipes / "run_autograder.sh").replace("/autograder/", f"{tmp_path}/autograder/"))
    result = json_of(tmp_path / "autograder" / "results" / "results.json")
    assert (result["score"], result["output"]) == (0, "there is no file keydiff.py")
    written(tmp_path / "handed_in", "not Python", "bob.py")
    # an earlier grade, and a container that fails
    handed_in(
        tmp_path, {"grades/keydiff/bob/grade.json": "{}", "handed_in/mallory.py": "", "fails": "mallory"}
    )
    assert "3 submissions" in shell(f"! ({text_of(recipes / 'grade_all.sh')})")
    grades = tmp_path / "grades" / "keydiff"
    failed_one = json_of(grades / "mallory" / "grade.json")
    assert failed_one["score"] == 0 and failed_one["error"].startswith("The grader failed")
    assert json_of(grades / "bob" / "grade.json")["student"] == "bob"
    assert {each.name for each in grades.iterdir()} == {
        "bob",
        "eve.docx",
        "mallory",
        "assistants.md",
        "gradebook.csv",
        "summary.json",
    }


def test_the_dockerfile_has_the_form_of_one() -> None:
    """No daemon is needed for this: each instruction is one,
    what is copied is there, and the page builds this file.
    """
    path = Path(classes.__file__).parent / "Dockerfile"
    whole = text_of(path).replace("\\\n", "")
    lines = [line.split() for line in whole.splitlines() if line and line[0] != "#"]
    words = ["FROM", "WORKDIR", "COPY", "RUN", "FROM", "COPY", "ARG", "RUN", "ENV", "WORKDIR", "ENTRYPOINT"]
    assert [line[0] for line in lines] == words
    assert lines[0][2:] == ["AS", lines[5][1].removeprefix("--from=")]
    of_the_clone = [place.removeprefix("/clone/") for place in lines[5] if place.startswith("/clone/")]
    assert [place for place in of_the_clone if (ROOT / place).is_file()] == of_the_clone != []
    assert f"-f {path.relative_to(transcript.FOLDER.parents[1])} ." in text_of(
        transcript.FOLDER / "container.md"
    )


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ("start calculus", "wanted one of"),
        ("check keydiff --work {0}", "evictionary start keydiff"),
        ("submit keydiff --work {0}", "evictionary start keydiff"),
        ("submit keydiff --work {0}/large --student a/b", "--student: got 'a/b'"),
        ("grade {0}/nothing", "exists"),
        ("grade {0} --format pdf", "gradescope"),
        ("grade {0}/ada.py --examples 0", "--examples: got 0, wanted at least 1"),
        ("grade {0}/ada.py --seconds nan", "--seconds: got nan"),
        ("grade {0}/ada.py --student ../ada", "--student: got '../ada'"),
        ("grade {0}/ada.py --student summary.json", "--student: got 'summary.json'"),
        ("grade {0}/ada.py --student {1}", "the name of a folder of its own"),
        ("grade {0}/ada.py --seed-file {0}/ada.py", "with 0 bytes, wanted at least 8"),
        ("grade {0}/ada.py --output {0}/ada.py", "--output"),
        ("start keydiff --work {0}/ada.py", "--work"),
        ("check keydiff --work {0}/large", "keydiff.py has 2000000 bytes"),
        ("submit keydiff --work {0}/large", "keydiff.py has 2000000 bytes"),
        ("submit lagkv --work {0}/large --output {0}/none/a.zip", "--output"),
        ("submit lagkv --work {0}/large --output a.rar", "ends in .zip"),
        ("start keydiff --work {0}/large", "may hold your work"),
    ],
)
def test_mistakes_on_the_command_line(arguments: str, wanted: str, tmp_path: Path) -> None:
    handed_in(tmp_path, {"ada.py": "", "large/keydiff.py": b"#" * 2_000_000, "large/lagkv.py": ""})
    words = arguments.format(tmp_path, "a" * 300).split()
    assert wanted in failed(*words, *(("--assignment", "keydiff") if words[0] == "grade" else ()), code=2)


def test_grade_reads_what_submit_packs(tmp_path: Path) -> None:
    work, archive = tmp_path / "work", tmp_path / "ada.zip"
    handed_in(work, {"keydiff.py": SOLUTION, "diary.txt": "not to be handed in"})
    printed("submit", "keydiff", "--work", work, "--output", archive, "--student", "ada")
    assert sorted(zipfile.ZipFile(archive).namelist()) == [submissions.MANIFEST, "keydiff.py"]
    assert as_json("grade", archive, *to_grade(tmp_path))["distribution"] == {"100": 1}
    assert {path.name for path in (tmp_path / "grades" / "ada").iterdir()} == EVERY_FILE


def test_what_is_typed_next_and_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "w[1]"
    begin = ("start", "lagkv", "--work", work, "--student", "ada")
    says(printed(*begin), f"evictionary check lagkv --work {work}\n", "results must be float64 too")
    assert text_of(work / "student.txt") == "ada\n"
    begun = as_json("start", "keydiff", "--work", work)
    assert begun["file"] == str(work / "keydiff.py") and Path(begun["handout"]).exists()
    checked, found = (invoke("check", "keydiff", "--work", work, *more) for more in ((), ("--json",)))
    assert (checked.exit_code, found.exit_code, json.loads(found.stdout)["hidden_cases"]) == (1, 1, 475)
    assert str(work / "see_keydiff.py") in checked.stdout
    handed = as_json("submit", "keydiff", "--work", work, "--output", tmp_path / "a.zip")
    assert handed["files"] == ["keydiff.py", submissions.MANIFEST]
    # What a student's message holds is no markup.
    monkeypatch.setattr(contest, "load_model", lambda: None)  # no text is read to a file without a scorer
    written(work, "raise RuntimeError('[/bold] no')\n", "scorer.py")
    unloadable = invoke("check", "contest", "--work", work)
    assert unloadable.exit_code == 1 and "[/bold] no" in " ".join(unloadable.stdout.split())


def test_check_draws_new_inputs_unless_told_otherwise(tmp_path: Path) -> None:
    written(tmp_path, "def score(keys):\n    return keys[..., 0]\n", "keydiff.py")
    check = ("check", "keydiff", "--work", tmp_path)
    assert len({json.loads(invoke(*check, "--json").stdout)["check_seed"] for _ in range(2)}) == 2
    says(invoke(*check, "--seed", 7).stdout, f"evictionary check keydiff --work {tmp_path} --seed 7")


def test_grade_says_what_it_leaves_out(tmp_path: Path) -> None:
    folder = handed_in(tmp_path / "in", {"ada.py": "", "essay.docx": ""})
    result, left_out = invoke("grade", folder, *to_grade(tmp_path), "--json"), folder / "essay.docx"
    assert json.loads(result.stdout)["left_out"] == [str(left_out)] and left_out.name in result.stderr


def test_an_interrupted_class_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classes, "run", Mock(side_effect=KeyboardInterrupt))
    settings = to_grade(tmp_path)
    assert "the same command goes on" in failed("grade", written(tmp_path), *settings, code=130)
    assert "begins anew" in failed("grade", written(tmp_path), *settings[:2], *settings[4:], code=130)
