"""What a course makes of the grades: the roster, late days, overrides, the table of Canvas, similar files."""

import ast
import csv
import io
import itertools
import math
import os
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import classroom_styles
import pytest
from tools import ROOT, as_json, failed, invoke, printed, python, refused, saved, says
from tools.grader import SOLUTION, order, text_of
from tools.pages import commands

from docs_build import course
from docs_build.pages import PAPERS
from evictionary.classroom import assignment as assignments, classes, contest, exam, formats, grading
from evictionary.classroom.child import StudentError
from evictionary.classroom.judgement import empty
from evictionary.models.load import load
from tutorials import build


def a_class(folder: Path, points: dict[str, int], name: str = "keydiff") -> Path:
    """A folder of grades: each student has so many of 100 points, and lost the others in the first step."""
    one = assignments.load(name)
    for student, score in points.items():
        judged = empty(one).as_json()
        for line in judged["lines"]:
            line["verdict"], line["points"] = "passed", line["max_points"]
        if score < 100:
            judged["lines"][0] |= {"verdict": "failed", "reason": "mu is the mean", "points": 0}
        grade: dict[str, Any] = {
            "schema": formats.SCHEMA,
            "suite": "0.1.0",
            "assignment": name,
            "seed_id": "0" * 16,
            "examples": 25,
            "constants": {},
            "personal_id": student,
            "assignment_sha256": "0" * 64,
            "title": one.title,
            "student": student,
            "file": f"{student}.py",
            "source_sha256": "0" * 64,
            "graded_at": formats.now(),
            **judged,
            "score": score,
        }
        formats.write(grade, folder / student, [])
    return folder


def book(folder: Path, name: str = "gradebook.csv") -> dict[str, dict[str, str]]:
    return {row["id"]: row for row in csv.DictReader(io.StringIO(text_of(folder / name)))}


@pytest.fixture
def grades(tmp_path: Path) -> Path:
    return a_class(tmp_path / "grades", {"ada": 100, "bob": 80, "eve": 50})


def test_who_handed_in_nothing_has_a_line_and_a_stranger_is_named(grades: Path, tmp_path: Path) -> None:
    roster = saved(tmp_path / "roster.csv", "ada,Ada\nbob,Bob\nkim,Kim\n\n")
    result = as_json("gradebook", grades, "--roster", roster)
    assert (result["nothing_handed_in"], result["not_on_roster"]) == (["kim"], ["eve"])
    assert [*book(grades)] == ["ada", "bob", "eve", "kim"]
    assert book(grades)["kim"] == {
        "id": "kim",
        "points": "0",
        "of": "100",
        "comment": "nothing was handed in",
    }
    says(printed("gradebook", grades, "--roster", roster), "Handed in nothing: kim", "Not on the roster: eve")


def test_late_days_cost_what_the_course_says(grades: Path, tmp_path: Path) -> None:
    late = saved(tmp_path / "late.csv", "id,days\nada,1\nbob,3\neve,40\n")
    as_json("gradebook", grades, "--days-late", late, "--free-days", 2, "--percent-a-day", 12.5)
    assert {name: row["points"] for name, row in book(grades).items()} == {
        "ada": "100",
        "bob": "70",
        "eve": "0",
    }
    says(
        book(grades)["bob"]["comment"],
        "3 days late, 2 free: 12.5 % of 80 lost; anchor: failed, mu is the mean",
    )
    # the grade itself is what the file is worth
    assert formats.read(grades / "bob" / formats.GRADE)["score"] == 80


def test_a_second_grader_has_the_last_word_with_a_reason_and_a_name(grades: Path, tmp_path: Path) -> None:
    late = saved(tmp_path / "late.csv", "days,id\n5,eve\n")
    lines = 'id,points,reason,by\neve,72.5,"right, by another sign",kim\n'
    overrides = saved(tmp_path / "overrides.csv", lines)
    as_json("gradebook", grades, "--days-late", late, "--overrides", overrides)
    row = book(grades)["eve"]
    assert row["points"] == "72.5"
    says(row["comment"], "set to 72.5 by kim, instead of 25: right, by another sign; 5 days late")


def test_a_student_and_the_assistants_see_the_points_that_count(tmp_path: Path) -> None:
    grades = a_class(tmp_path / "grades", {"ada": 100, "eve": 50})
    formats.write(formats.read(grades / "eve" / formats.GRADE), grades / "eve", ["markdown"])
    before = text_of(grades / "eve" / "grade.md")
    overrides = saved(tmp_path / "overrides.csv", "id,points,reason,by\neve,95,by another sign,kim\n")
    roster = saved(tmp_path / "roster.csv", "ada\neve\nmax\n")
    as_json("gradebook", grades, "--overrides", overrides, "--roster", roster)
    told = "set to 95 by kim, instead of 50: by another sign"
    says(
        text_of(grades / "eve" / "grade.md"), "50 of 100", f"**Your course counts 95 of 100 points: {told}.**"
    )
    rows = [
        line for line in text_of(grades / "assistants.md").splitlines() if line.startswith(("| eve", "| max"))
    ]
    says(rows[0], "| eve | 95 of 100 | anchor |", f"| {told} |")
    says(rows[1], "| max | 0 of 100 |  | nothing was handed in |")
    # What the course makes of the points is not kept: the tables of the next time count.
    as_json("gradebook", grades)
    assert text_of(grades / "eve" / "grade.md") == before and not (grades / "ada" / "grade.md").exists()
    (grades / "ada" / "grade.md").symlink_to(overrides)
    as_json("gradebook", grades)
    says(text_of(overrides), "eve,95")


def test_only_the_pages_that_change_are_written(tmp_path: Path) -> None:
    grades = a_class(tmp_path / "grades", {"ada": 100, "bob": 80, "eve": 50})
    pages = {name: grades / name / "grade.md" for name in ("ada", "bob", "eve")}
    for name, page in pages.items():
        formats.write(formats.read(grades / name / formats.GRADE), grades / name, ["markdown"])
        os.utime(page, (1, 1))
    pages["eve"].unlink()
    late = saved(tmp_path / "late.csv", "id,days\nbob,1\neve,1\n")

    def told(*options: Any) -> list[str]:
        """Whose page a run of the command says that it has written, compared with the files' times."""
        before = {name: page.stat().st_mtime for name, page in pages.items() if page.exists()}
        found = as_json("gradebook", grades, *options)["told_anew"]
        assert [name for name in before if pages[name].stat().st_mtime != before[name]] == found
        return found

    assert told() == []
    assert told("--days-late", late) == ["bob"]
    assert told("--days-late", late) == []
    assert pages["ada"].stat().st_mtime == 1 and not pages["eve"].exists()
    says(printed("gradebook", grades), "grade.md was written anew for 1 of 3 students.")


def test_a_comment_says_the_mistake_and_not_only_the_law(grades: Path) -> None:
    grade = formats.read(grades / "eve" / formats.GRADE)
    grade["lines"][0] |= {
        "reason": "mu is the mean of the unit keys.",
        "message": "what is wrong",
        "laws": {"test_the_mean": "failed"},
        "misconceptions": ["mean taken before normalising"],
    }
    formats.write(grade, grades / "eve", ["markdown"])
    as_json("gradebook", grades)
    told = "failed the law: mu is the mean of the unit keys; it looks like: mean taken before normalising"
    says(book(grades)["eve"]["comment"], f"anchor: {told}")
    says(text_of(grades / "eve" / "grade.md"), told)
    # A function that is missing is no law, and what is said is what happened.
    grade["lines"][0] |= {
        "reason": "no function anchor",
        "message": "no function anchor",
        "misconceptions": [],
    }
    assert formats.verdict(grade["lines"][0]) == "failed, no function anchor"


def test_grades_of_two_assignments_are_in_two_folders(tmp_path: Path) -> None:
    folder, secret = tmp_path / "grades", saved(tmp_path / "secret", "nobody guesses this")
    a_class(folder, {"ada": 100})
    before = text_of(folder / "ada" / formats.GRADE)
    given = ("--assignment", "lagkv", "--output", folder)
    submission = saved(tmp_path / "ada.py", "")
    told = f"--output: got {folder}, which has grades of keydiff; wanted a folder of its own for lagkv"
    for arguments in ((submission, "--seed-file", secret), ("--zero", "late", "--student", "kim")):
        says(failed("grade", *arguments, *given, code=2), told)
    assert text_of(folder / "ada" / formats.GRADE) == before and not (folder / "kim").exists()
    a_class(folder, {"bob": 80}, "lagkv")
    says(
        failed("gradebook", folder, code=2), "grades of keydiff and lagkv, wanted one assignment in a folder"
    )


@pytest.mark.parametrize(
    ("option", "table", "said"),
    [
        ("--days-late", "id,days\nada,-1\n", "got 'ada,-1' in line 2 of"),
        ("--days-late", "id,days\nada,soon\n", "wanted a whole number of days, 0 or more"),
        ("--days-late", "id\nada\n", "without days, wanted the columns id, days"),
        ("--days-late", "id,days\nada,1\nada,2\n", "wanted each id once"),
        ("--days-late", "id,days\nmax,1\n", "got max, wanted ids that have a grade or are on the roster"),
        ("--overrides", "id,points,reason,by\nada,90,,kim\n", "a reason, and who gives it"),
        ("--overrides", "id,points,reason,by\nada,90,kind\n", "a reason, and who gives it"),
        ("--overrides", "id,points,reason,by\nada,nan,kind,kim\n", "points of 0 or more"),
        ("--overrides", "id,points,reason,by\nada,101,kind,kim\n", "got 101 for ada, wanted at most the 100"),
        ("--roster", "\n , \n", "without an id, wanted one in each line"),
        ("--canvas", "Name,Mark\nada,1\n", "wanted Canvas's export, with the columns Student and one of"),
    ],
)
def test_a_table_that_is_not_right_is_named_with_its_line(
    option: str, table: str, said: str, grades: Path, tmp_path: Path
) -> None:
    file = saved(tmp_path / "table.csv", table)
    says(failed("gradebook", grades, option, file, code=2), option, said)


def test_the_page_for_assistants_has_what_no_student_sees(tmp_path: Path) -> None:
    grades = a_class(tmp_path / "grades", {"ada": 100, "b|ob": 80})
    path = grades / "b|ob" / formats.GRADE
    grade = formats.read(path)
    grade["notes"] = ["the code tried: open /etc/passwd"]
    grade["lines"][0]["misconceptions"] = ["mean taken before normalising"]
    formats.write(grade, path.parent, ["markdown"])
    as_json("gradebook", grades)
    page = text_of(grades / "assistants.md")
    says(page, "# KeyDiff by hand: for the assistants", "| ada | 100 of 100 |  |  |  |  |")
    row = "| b&#124;ob | 80 of 100 | anchor | mean taken before normalising |"
    row += " handout, part 1; KeyDiff, section 3.2"
    says(page, f"{row} | the code tried: open /etc/passwd |")
    says(text_of(path.parent / "grade.md"), never=["passwd"])


def test_one_submission_is_graded_anew_and_the_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = Mock(side_effect=lambda source, assignment, **settings: empty(assignment))
    monkeypatch.setattr(grading, "judge", judge)
    found = {name: saved(tmp_path / f"{name}.py", name) for name in ("ada", "bob")}
    for again in ((), (), ("bob",)):
        done = list(classes.run(order(), found, tmp_path / "grades", 1, again=again))
        assert {grade["student"] for grade in done} == {"ada", "bob"}
    assert [call.args[0] for call in judge.call_args_list] == [b"ada", b"bob", b"bob"]
    grade = ("grade", tmp_path / "ada.py", "--assignment", "keydiff", "--again", "adda")
    says(failed(*grade, code=2), "--again: got 'adda'", "did you mean ada?")


COPIED = SOLUTION.replace("keys", "the_keys").replace("import numpy as np", "# mine\nimport numpy as np")
OTHERWISE = """import numpy as np


def anchor(keys):
    total = np.zeros(keys.shape[:-2] + keys.shape[-1:])
    for place in range(keys.shape[-2]):
        one = keys[..., place, :]
        size = np.sqrt(np.einsum("...d,...d->...", one, one))[..., None]
        total += np.divide(one, size, out=np.zeros_like(one), where=size > 0)
    return total / keys.shape[-2]


def score(keys):
    raise NotImplementedError
"""


def test_a_copy_with_other_names_is_alike_and_another_way_is_not(tmp_path: Path) -> None:
    starter = assignments.load("keydiff").starter.read_text(encoding="utf-8")
    files = {
        "ada.py": SOLUTION,
        "bob.py": COPIED,
        "eve.py": OTHERWISE,
        "kim.py": starter,
        "lou.py": starter,
        "max.py": "def (",
        "zoe.zip": "no archive",
    }
    for name, text in files.items():
        saved(tmp_path / "handed_in" / name, text)
    arguments = ("similar", tmp_path / "handed_in", "--assignment", "keydiff")
    result = as_json(*arguments)
    assert [(pair["one"], pair["other"]) for pair in result["pairs"]] == [("ada", "bob")]
    assert result["pairs"][0]["share"] > 0.95 and result["unread"] == ["zoe"] and result["submissions"] == 6
    says(printed(*arguments), "100%", "ada", "bob", "Cannot be read: zoe")
    says(failed(*arguments, "--least", 0, code=2), "--least: got 0, wanted more than 0 and at most 1")


EXPORT = """Student,ID,SIS User ID,SIS Login ID,Section,KeyDiff by hand (77),Current Score
    Points Possible,,,,,100,(read only)
"Lovelace, Ada",501,s1,ada,LM-1,,
"Babbage, Bob",bob,s2,cb,LM-1,,
"Turing, Alan",503,s3,alan,LM-2,,
"""


def test_canvas_gets_the_columns_of_its_own_export(grades: Path, tmp_path: Path) -> None:
    export = saved(tmp_path / "export.csv", EXPORT)
    result = as_json("gradebook", grades, "--canvas", export, "--column", "KeyDiff by hand (77)")
    assert result["not_in_canvas"] == ["eve"]
    assert (
        text_of(grades / "canvas.csv")
        == """Student,ID,SIS User ID,SIS Login ID,Section,KeyDiff by hand (77)
    Points Possible,,,,,100
"Lovelace, Ada",501,s1,ada,LM-1,100
"Babbage, Bob",bob,s2,cb,LM-1,80
"""
    )


# The whole course


@pytest.fixture
def a_course(tmp_path: Path) -> Path:
    """Two assignments and an exam: bob missed the exam, eve the second assignment, kim all but the exam."""
    roster = saved(tmp_path / "roster.csv", "ada,Ada\nbob,Bob\neve,Eve\nkim,Kim\n")
    late = saved(tmp_path / "late.csv", "id,days\nada,2\nbob,1\n")
    a_class(tmp_path / "grades" / "keydiff", {"ada": 100, "bob": 80, "eve": 50})
    a_class(tmp_path / "grades" / "lagkv", {"ada": 90, "bob": 70}, "lagkv")
    as_json("gradebook", tmp_path / "grades" / "keydiff", "--roster", roster, "--days-late", late)
    as_json("gradebook", tmp_path / "grades" / "lagkv", "--days-late", late, "--free-days", 2)
    saved(tmp_path / "exam.csv", "id,points,of,days_late\nada,24,30,\neve,15,30,1\nkim,30,30,0\nbob,,30,0\n")
    parts = '[assignments]\nweight = 60\nof = ["grades/keydiff", "grades/lagkv/gradebook.csv"]\n'
    return saved(tmp_path / "course.toml", f'{parts}[exam]\nweight = 40\nof = ["exam.csv"]\n')


def test_a_course_has_the_points_late_days_and_total_of_each(a_course: Path, tmp_path: Path) -> None:
    table = ("--output", tmp_path / "course.csv")
    result = as_json("course", a_course, *table)
    assert text_of(tmp_path / "course.csv").splitlines() == [
        "id,keydiff,lagkv,exam,days_late,total",
        # 2 days at 10 % cost 20 of 100 in keydiff, and are free in lagkv: 60 * (0.8 + 0.9) / 2 + 40 * 24 / 30
        "ada,80,90,24,4,83",
        "bob,72,70,missing,2,missing",
        "eve,50,missing,15,1,missing",
        "kim,missing,missing,30,0,missing",
    ]
    kim = {"id": "kim", "points": {"keydiff": None, "lagkv": None, "exam": 30}, "days_late": 0, "total": None}
    assert result["students"][-1] == kim and result["without_a_total"] == ["bob", "eve", "kim"]
    as_json("course", a_course, *table, "--missing-is-zero")
    totals = [line.rpartition(",")[2] for line in text_of(tmp_path / "course.csv").splitlines()[1:]]
    assert totals == ["83", "42.6", "35", "40"]
    told = "No total, because work is missing: bob, eve, kim. --missing-is-zero counts it as 0."
    says(printed("course", a_course, *table), "assignments: 60 %, the best 2", told)


def test_the_best_count_and_parts_without_weights_count_alike(a_course: Path, tmp_path: Path) -> None:
    parts = '[assignments]\nbest = 1\nof = ["grades/lagkv", "grades/keydiff"]\n[exam]\nof = ["exam.csv"]\n'
    saved(a_course, parts)
    result = as_json("course", a_course, "--output", tmp_path / "course.csv")
    totals = {line["id"]: line["total"] for line in result["students"]}
    assert totals == {"ada": 85, "bob": None, "eve": 50, "kim": None}


def test_an_override_and_a_zero_with_a_reason_are_not_missing(a_course: Path, tmp_path: Path) -> None:
    overrides = saved(tmp_path / "overrides.csv", "id,points,reason,by\nkim,60,by mail,lou\n")
    folder, roster = tmp_path / "grades" / "keydiff", tmp_path / "roster.csv"
    as_json("gradebook", folder, "--roster", roster, "--overrides", overrides)
    zero = ("--zero", "Copied.", "--student", "eve", "--assignment", "lagkv")
    printed("grade", *zero, "--output", tmp_path / "grades" / "lagkv")
    as_json("gradebook", tmp_path / "grades" / "lagkv")
    result = as_json("course", a_course, "--output", tmp_path / "course.csv")
    points = {line["id"]: [*line["points"].values()] for line in result["students"]}
    assert (points["kim"], points["eve"]) == ([60, None, 30], [50, 0, 15])


def test_an_id_that_fits_no_other_is_named(a_course: Path, tmp_path: Path) -> None:
    exam = saved(tmp_path / "exam.csv", "id,points,of\nada,24,30\nBob,30,30\n=1+1,1,30\nlou,9,30\n")
    given = ("course", a_course, "--roster", tmp_path / "roster.csv", "--output", tmp_path / "course.csv")
    result = as_json(*given)
    single = {"=1+1": "exam", "Bob": "exam", "eve": "keydiff", "kim": "keydiff", "lou": "exam"}
    assert (result["in_one_only"], result["alike"]) == (single, ["Bob", "bob"])
    assert result["not_on_roster"] == ["=1+1", "Bob", "lou"]
    told = ("In one gradebook only: =1+1 (exam), Bob (exam)", "accents: 'Bob', 'bob'", "roster: =1+1, Bob")
    says(printed(*given), *told)
    says(text_of(tmp_path / "course.csv"), "\n'=1+1,missing,")
    saved(exam, "id,points,of\n")
    says(failed(*given, code=2), "without a line")


EXAM, TWO = '[exam]\nof = ["exam.csv"]\n', 'of = ["grades/keydiff", "grades/lagkv"]\n'


@pytest.mark.parametrize(
    ("course", "said"),
    [
        ("", "without a part, wanted a table for each"),
        ("[exam", "wanted a TOML file of a course"),
        ("exam = 3", "got [exam] of"),
        ('[exam]\nof = "exam.csv"', "of = 'exam.csv', wanted a list of gradebooks"),
        ("[exam]\nof = []", "of = [], wanted a list of gradebooks"),
        (f"{EXAM}wieght = 100", "got 'wieght' (did you mean weight?), wanted one of of, weight, best"),
        (f"{EXAM}weight = true", "weight = True, wanted a number above 0 and at most 100"),
        (f"{EXAM}weight = nan", "weight = nan, wanted a number above 0"),
        (f"{EXAM}weight = 90", "got weights that sum to 90 in"),
        (f"[work]\nweight = 60\n{TWO}{EXAM}weight = 30", "(work 60, exam 30), wanted 100"),
        (f"[work]\nweight = 60\n{TWO}{EXAM}", "a weight for only some parts"),
        (f"[work]\nbest = 3\n{TWO}", "best = 3, wanted a whole number from 1 to its gradebooks"),
        ('[work]\nof = ["grades/keydif"]', "'grades/keydif' (did you mean keydiff?), which is not there"),
        ('[work]\nof = ["grades"]', "wanted a folder in which `evictionary gradebook` ran"),
        ('[work]\nof = ["grades/keydiff", "grades/../grades/keydiff"]', "got keydiff twice"),
        ('[work]\nof = ["total.csv"]', "got total twice"),
    ],
)
def test_a_course_that_is_not_right_is_refused(
    course: str, said: str, a_course: Path, tmp_path: Path
) -> None:
    saved(tmp_path / "total.csv", "id,points,of\nada,1,2\n")
    saved(a_course, course)
    says(failed("course", a_course, "--output", tmp_path / "course.csv", code=2), said)
    assert not (tmp_path / "course.csv").exists()


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("id,points\nada,1\n", "without of, wanted the columns id, points, of"),
        ("id,points,of\nada,1,30\nada,2,30\n", "got 'ada,2,30' in line 3"),
        ("id,points,of\nada,31,30\n", "got 'ada,31,30' in line 2"),
        ("id,points,of\nada,-1,30\n", "got 'ada,-1,30' in line 2"),
        ("id,points,of\nada,many,30\n", "got 'ada,many,30' in line 2"),
        ("id,points,of\nada,1,inf\n", "got 'ada,1,inf' in line 2"),
        ("id,points,of,days_late\nada,1,30,-2\n", "got 'ada,1,30,-2' in line 2"),
        ("id,points,of\nada,1,30\nbob,1,20\n", "with 2 numbers in the column `of`, wanted one for all"),
    ],
)
def test_a_table_of_a_course_is_named_with_its_line(
    table: str, said: str, a_course: Path, tmp_path: Path
) -> None:
    saved(tmp_path / "exam.csv", table)
    says(failed("course", a_course, "--output", tmp_path / "course.csv", code=2), "exam.csv", said)


def test_a_folder_that_an_earlier_version_summed_up_says_what_to_run(a_course: Path, tmp_path: Path) -> None:
    saved(tmp_path / "grades" / "lagkv" / "summary.json", "{}")
    told = failed("course", a_course, "--output", tmp_path / "course.csv", code=2)
    says(told, f"Run `evictionary gradebook {tmp_path / 'grades' / 'lagkv'}`")


def test_two_students_of_one_id_are_refused_and_a_line_twice_is_not(grades: Path, tmp_path: Path) -> None:
    roster = saved(tmp_path / "roster.csv", "ada,Ada Lovelace\nada,Ada Lovelace\nbob,Bob\n")
    assert as_json("gradebook", grades, "--roster", roster)["not_on_roster"] == ["eve"]
    saved(roster, "ada,Ada Lovelace\nada,Ada Smith\n")
    told = f"got the id 'ada' twice in {roster}, as Ada Lovelace and as Ada Smith"
    says(failed("gradebook", grades, "--roster", roster, code=2), told)


# The exam and the plan


def _entries(text: str) -> list[float]:
    """The numbers of a text, in their order."""
    return [float(each.replace(",", "").rstrip(".")) for each in re.findall(r"-?\d[\d,.]*", text)]


def kept_of_keydiff(numbers: list[float]) -> str:
    angles = [math.radians(each) for each in numbers[0:8:2]]
    middle = [sum(turn(each) for each in angles) for turn in (math.cos, math.sin)]
    far = sorted(angles, key=lambda each: math.cos(each) * middle[0] + math.sin(each) * middle[1])[:2]
    return " and ".join(f"{numbers[0:8:2][angles.index(each)]:.0f}" for each in sorted(far, key=angles.index))


def left_of_lagkv(numbers: list[float]) -> str:
    sinks, lag, share, length = numbers
    partitions = (length - sinks) // lag
    whole = length - (partitions - 1) * lag
    return f"= {int(share * lag) * (partitions - 1) + whole:.0f} tokens"


def nucleus(numbers: list[float]) -> str:
    *parts, share = numbers
    sizes = [size for size in range(1, 7) if sum(parts[:size]) >= share * sum(parts) - 1e-12]
    return f"{sizes[0]}: the first"


def rounded(numbers: list[float]) -> str:
    size, least, most, bits, moved, exact = numbers
    step = (most - least) / (2**bits - 1)
    nearest = min((least + step * code for code in range(int(2**bits))), key=lambda level: abs(level - moved))
    return f"comes back as {nearest:g}; {bits:g} + 2 * 16 / {size:g} = {bits + 2 * exact / size:g} bits"


def verdict(numbers: list[float]) -> str:
    _, low, high = numbers
    return "it holds" if high < 0 else "it does not hold" if low >= 0 else "undecided"


def received(numbers: list[float]) -> str:
    count, _, token = map(int, numbers)
    return f"= {sum(1 / place for place in range(token + 1, count + 1)):.4f}"


# Each answer again, from the numbers in the question alone.
ANSWERS: dict[str, Callable[[list[float]], str]] = {
    "kv_cache": lambda of: f"= {2 * of[0] * of[2] * of[3] * of[4] * 2 / 2**20:g} MiB",
    "keydiff": lambda of: f"the keys at {kept_of_keydiff(of)} degrees",
    "lagkv": left_of_lagkv,
    "budgets_and_positions": lambda of: f"KV head {of[2] // (of[0] / of[1]):.0f}, position {of[3]:,.0f}",
    "expected_attention": lambda of: " and ".join(f"{of[0] * key + of[1] * key**2 / 2:g}" for key in of[2:]),
    "momentkv": lambda of: f"{of[1]:.0f}, and {sum(of[1:]) / (len(of) - 1):.4g}:",
    "reading_a_paper": lambda of: f"= {(of[0] + 2) / (2 * of[1]):.1%}",
    "quantised_caches": rounded,
    "gvote": nucleus,
    "how_to_measure": lambda of: f": {(of[0] / 100) ** of[1]:.1%}.",
    "what_abstracts_claim": verdict,
    "serving_with_pages": lambda of: (
        f"{3 * math.ceil(max(of[:3]) / of[3])} if they share, since the longest head decides, and "
        f"{sum(math.ceil(each / of[3]) for each in of[:3])} with"
    ),
    "numpy_to_triton": lambda of: f"{math.ceil(of[0] / of[1])} tiles, {-of[0] % of[1]:.0f} places",
    "received_attention": lambda of: (
        f"= {sum(1 / place for place in range(int(of[2]) + 1, int(of[0]) + 1)):.4f}"
    ),
}


@pytest.mark.parametrize("name", exam.QUESTIONS)
def test_an_answer_of_the_exam_is_right_for_every_secret(name: str) -> None:
    asked = [exam.drawn(f"secret {number}".encode(), (name,))[0] for number in range(40)]
    for each in asked:
        says(each.answer, ANSWERS[name](_entries(each.asked)))
    assert len({each.asked for each in asked}) > 10


def test_an_exam_is_that_of_its_secret(tmp_path: Path) -> None:
    secret = saved(tmp_path / "secret", "nobody guesses this")
    arguments = ("exam", "--seed-file", secret, "--output", tmp_path / "first")
    few = as_json(*arguments, "--questions", "lagkv,keydiff")
    assert few["points"] == 10
    every = {each["name"]: each for each in as_json(*arguments)["questions"]}
    assert few["questions"] == [every["lagkv"], every["keydiff"]] and [*every] == [*exam.QUESTIONS]
    sheet, answers = (text_of(tmp_path / "first" / f"{name}.md") for name in ("exam", "answers"))
    says(sheet, "# Exam: 70 points", "Name: ____", "You have 70 minutes.")
    says(sheet, *(each["asked"] for each in every.values()))
    says(answers, "Of the 5 points, 3 are for the way and 2 for the result.")
    says(answers, *(each["answer"] for each in every.values()))
    says(sheet, never=[each["answer"] for each in every.values()])
    assert exam.drawn(b"another one") != exam.drawn(b"nobody guesses this")
    says(failed(*arguments, "--questions", "lagvk", code=2), "--questions: got 'lagvk' (did you mean lagkv?)")


def test_the_plan_has_twelve_weeks_with_every_lesson_assignment_and_paper() -> None:
    weeks = course.plan()
    taught = [name for week in weeks for name in week["lessons"]]
    stems = [lesson.stem.partition("_")[2] for lesson in build.lessons()]
    assert len(weeks) == 12 and sorted(taught) == sorted(stems) and {*exam.QUESTIONS} <= {*stems}
    assert sorted(name for week in weeks for name in week["at_home"]) == sorted(assignments.names())
    assert {name for week in weeks for name in week.get("papers", [])} == {*PAPERS}
    assert all(
        (course.PLAN.parents[1] / file).is_file() for week in weeks for _, file in week.get("read", [])
    )


@pytest.mark.parametrize("name", assignments.names())
def test_the_plan_gives_an_assignment_after_the_lessons_that_its_handout_names(name: str) -> None:
    (place,) = [place for place, week in enumerate(course.plan()) if name in week["at_home"]]
    before = {each for week in course.plan()[: place + 1] for each in week["lessons"]}
    # kv_cache begins the course, and its later parts have the weeks up to lesson 4.
    before |= {"budgets_and_positions"} if name == "kv_cache" else set()
    handout = text_of(assignments.load(name).folder / "README.md")
    (background,) = re.findall(r"^Background: (.+)$", handout, flags=re.MULTILINE)
    assert {*re.findall(r"lessons/\d\d_(\w+)\.md", background)} <= before


def test_the_two_exams_of_the_plan_ask_each_question_once_and_after_its_lesson() -> None:
    exams = [
        shlex.split(each) for each in commands(course.PLAN.parent / "semester.md") if "exam" in each.split()
    ]
    asked = [words[words.index("--questions") + 1].split(",") for words in exams]
    assert sorted(itertools.chain(*asked)) == sorted(exam.QUESTIONS)
    assert len({words[words.index("--seed-file") + 1] for words in exams}) == len(exams) == 2
    for number, names in enumerate(asked):
        (week,) = [
            place
            for place, each in enumerate(course.plan())
            if f"the {('first', 'second')[number]} exam" in each.get("also", "")
        ]
        assert {*names} <= {name for each in course.plan()[: week + 1] for name in each["lessons"]}


def _printed(name: str) -> tuple[int, bool] | None:
    """The number of the lesson that prints functions of an assignment, and whether it prints all."""
    starter = ast.parse(text_of(assignments.load(name).starter))
    wanted = {each.name for each in starter.body if isinstance(each, ast.FunctionDef)}
    lesson_of = {lesson.stem.partition("_")[2]: lesson for lesson in build.lessons()}
    lesson = lesson_of.get("numpy_to_triton" if name == "kernel" else name)
    calls = re.findall(r"^show\((.+)\)$", text_of(lesson), flags=re.MULTILINE) if lesson else []
    shown = set(re.findall(r"\w+\.(\w+)", " ".join(calls)))
    return (int(lesson.stem[:2]), wanted <= shown) if lesson and wanted & shown else None


def test_the_plan_says_which_lessons_print_the_functions_of_an_assignment() -> None:
    printed = [found for name in assignments.names() if (found := _printed(name))]
    every, some = (sorted(number for number, whole in printed if whole == wanted) for wanted in (True, False))
    listed = lambda numbers: f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"  # noqa: E731
    told = (
        f"Lessons {listed(every)} print every function of their assignment, and lessons {listed(some)} print"
    )
    says(" ".join(text_of(course.PLAN.parent / "semester.md").split()), told)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "lagkv" else pytest.mark.slow)
        for name in classroom_styles.readable()
    ],
)
def test_a_model_solution_is_short_and_loses_only_what_is_to_be_refused(name: str, tmp_path: Path) -> None:
    source = classroom_styles.solution(name)
    assert len(source.splitlines()) < 100 and "evictionary" not in source
    starter = ast.parse(text_of(assignments.load(name).starter))
    wanted = {each.name for each in starter.body if isinstance(each, ast.FunctionDef)}
    assert wanted <= {each.name for each in ast.parse(source).body if isinstance(each, ast.FunctionDef)}
    handed_in = saved(tmp_path / f"{name}.py", source)
    grade = classes.grade_one(classes.Order(name, b"a secret", 3, ()), "ada", handed_in)
    lost = [line["name"] for line in grade["lines"] if line["verdict"] != "passed"]
    assert lost in (["edges"], ["refused"]) and grade["score"] >= 85


def test_the_command_of_the_plan_writes_a_model_solution_of_each(tmp_path: Path) -> None:
    plan = course.PLAN.parent / "semester.md"
    (words,) = re.findall(r"^python (.+ --solutions) solutions$", text_of(plan), flags=re.MULTILINE)
    python(*shlex.split(words), tmp_path / "solutions", PYTHONPATH=ROOT)
    written = {path.stem: text_of(path) for path in (tmp_path / "solutions").iterdir()}
    assert written == {name: classroom_styles.solution(name) for name in classroom_styles.readable()}
    lengths = sorted(len(source.splitlines()) for source in written.values())
    says(text_of(plan), f"of {lengths[0]} to {lengths[-1]} lines")
    (row,) = [line for line in text_of(plan).splitlines() if "in `solutions/`" in line]
    assert sorted(row.split("|")[1].strip().split(", ")) == sorted(written.keys() - {"keydiff"})


# The page of the gradebook

GRADEBOOK = course.PLAN.parent / "gradebook.md"


@pytest.fixture
def at_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A folder with grades, submissions and the tables of the page; gives its commands by their first
    option or their name.
    """
    monkeypatch.chdir(tmp_path)
    a_class(tmp_path / "grades" / "keydiff", {"ada": 80, "bob": 100, "keydiff-eve": 50})
    for name in ("lagkv", "gvote"):
        as_json("gradebook", a_class(tmp_path / "grades" / name, {"ada": 100, "bob": 60}, name))
    for name, text in {"ada.py": SOLUTION, "bob.py": COPIED, "keydiff-eve/keydiff.py": OTHERWISE}.items():
        saved(tmp_path / "handed_in" / name, text)
    for name, table in re.findall(
        r'```(?:text|toml) title="(\w+\.(?:csv|toml))"\n(.*?)```', text_of(GRADEBOOK), flags=re.DOTALL
    ):
        saved(tmp_path / name, table)
    saved(tmp_path / "export.csv", EXPORT)
    return {each.split()[1]: each for each in commands(GRADEBOOK) if "canvas" not in each}


def test_the_commands_of_the_page_run_with_its_own_tables(at_the_page: dict[str, str]) -> None:
    run = lambda command: as_json(*shlex.split(command)[1:])  # noqa: E731
    result = run(at_the_page["gradebook"])
    assert (result["nothing_handed_in"], result["not_on_roster"]) == (["kim"], ["keydiff-eve"])
    rows = book(Path("grades/keydiff"))
    assert {name: row["points"] for name, row in rows.items()} == {
        "ada": "95",
        "bob": "90",
        "keydiff-eve": "50",
        "kim": "0",
    }
    says(rows["ada"]["comment"], "set to 95 by kim, instead of 80: part 4 is right, by another convention")
    course = run(at_the_page["course"])
    totals = {line["id"]: line["total"] for line in course["students"]}
    # the best 2 of 95, 100, 100 and of 90, 60, 60; then 8 and 9 of 10, and 24 and 27 of 30
    assert totals == {"ada": 50 + 8 + 32, "bob": 37.5 + 9 + 36, "keydiff-eve": None, "kim": None}
    assert course["in_one_only"] == {"keydiff-eve": "keydiff"} and course["alike"] == []
    assert [pair["one"] for pair in run(at_the_page["similar"])["pairs"]] == ["ada"]
    (canvas,) = [each for each in commands(GRADEBOOK) if "canvas" in each]
    assert run(canvas)["not_in_canvas"] == ["keydiff-eve"]
    assert "--again bob" in at_the_page["grade"]


def test_the_script_for_nbgrader_sets_the_points_of_each_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for nbgrader's Gradebook, with the five methods that the script calls."""
    grades: dict[str, Any] = {}
    gradebook = MagicMock()
    gradebook.return_value.__enter__.return_value = gradebook
    gradebook.find_grade.side_effect = lambda cell, notebook, one, who: grades.setdefault(
        who, SimpleNamespace()
    )
    monkeypatch.setitem(sys.modules, "nbgrader", ModuleType("nbgrader"))
    monkeypatch.setitem(sys.modules, "nbgrader.api", SimpleNamespace(Gradebook=gradebook))
    script = runpy.run_path(str(Path(classes.__file__).parent / "recipes" / "to_nbgrader.py"))
    a_class(tmp_path, {"ada": 100, "bob": 80})
    as_json("gradebook", tmp_path)
    assert script["write"](tmp_path / "gradebook.csv", "keydiff", "sqlite:///a.db") == 2
    assert {who: grade.manual_score for who, grade in grades.items()} == {"ada": 100, "bob": 80}
    gradebook.update_or_create_grade_cell.assert_called_once_with(
        "evictionary", "keydiff", "keydiff", max_score=100, cell_type="code"
    )
    gradebook.db.commit.assert_called_once_with()


# A student's file elsewhere


@pytest.mark.slow
def test_a_students_file_runs_everywhere_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_folder: Path
) -> None:
    """From an empty folder: `start`, `check`, then the commands of the student's page, with a tiny model."""
    monkeypatch.chdir(tmp_path)
    printed("start", "keydiff")
    written = saved(Path("work") / "keydiff.py", SOLUTION)
    assert as_json("check", "keydiff")["score"] == 100
    saved(Path("text.txt"), "The baker sold eleven loaves of bread on Monday. " * 6)
    page = {each.split()[1]: each for each in commands(course.PLAN.parent / "student.md") if "work/" in each}
    small = {
        "run": "--max-new-tokens 4",
        "demo": "--depths 0.5 --tokens 300",
        "eval": "--lengths 300 --output measured",
    }
    found = {
        name: as_json(*shlex.split(page[name])[1:], "--model", model_folder, *more.split())
        for name, more in small.items()
    }
    assert found["run"]["tokens_kept"] == found["run"]["tokens"] // 2
    assert [row["method"] for row in found["demo"]["rows"]] == ["full cache", "work/keydiff.py", "random"]
    says(str(found["eval"]), "'method': 'work/keydiff.py'")
    shutil.copy(written, "work/scorer.py")
    monkeypatch.setattr(contest, "load_model", lambda: load(str(model_folder)))
    contest.texts.cache_clear()
    told = invoke("check", "contest").output
    contest.texts.cache_clear()
    says(told, "20 of 20", never=["not judged yet", "Traceback"])


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("import numpy as np\ndef score(keys): pass", ("numpy", ("keys",))),
        ("import numpy as np, torch\ndef score(keys, values): pass", ("torch", ("keys", "values"))),
        ("from numpy import linalg\ndef score(k, v): pass", ("numpy", ("keys", "values"))),
        ("def score(values): pass", ("torch", ("values",))),
        ("def score(*given): pass", ("torch", ("keys", "values"))),
        ("score = len", ("torch", ("keys", "values"))),
        ("def (", ("torch", ("keys", "values"))),
    ],
)
def test_the_contest_gives_a_file_what_it_asks_for(source: str, wanted: tuple[str, tuple[str, ...]]) -> None:
    assert contest.asked(source.encode()) == wanted


def test_a_scorer_that_reads_what_the_contest_does_not_give_is_told_so() -> None:
    told = "score reads queries, and the contest gives keys and values"
    refused(lambda: contest.asked(b"def score(queries, keys): pass"), told, StudentError)
