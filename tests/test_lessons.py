"""Every lesson runs, every exercise can be solved and not by leaving it as it is, every page is that of its lesson."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tutorials.build import LIMIT_IN_SECONDS, PAGES, ROOT, lessons

LESSONS = lessons()


def test_every_lesson_runs_and_every_exercise_can_be_solved() -> None:
    """In a process of its own: a lesson on kernels needs Triton's interpreter, which is chosen once and for all at its import."""
    command = [sys.executable, "-m", "tutorials.build", "--check"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    limit = LIMIT_IN_SECONDS * len(LESSONS)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.stem)
def test_a_page_has_alternative_texts_and_its_pictures(lesson: Path) -> None:
    page = (PAGES / f"{lesson.stem}.md").read_text(encoding="utf-8")
    assert "![](" not in page
    shown = {line.split("](")[1].rstrip(")") for line in page.splitlines() if line.startswith("![")}
    assert shown == {f"{lesson.stem}/{path.name}" for path in (PAGES / lesson.stem).iterdir()}
    assert len(shown) >= 2


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.stem)
def test_a_lesson_asks_predicts_and_breaks_something(lesson: Path) -> None:
    text = lesson.read_text(encoding="utf-8")
    assert text.count("**Predict**") >= 3
    assert "goes wrong" in text
    assert text.count("def check_") >= 2


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.stem)
def test_a_page_has_its_number_folds_what_is_to_be_folded_and_answers_every_question(lesson: Path) -> None:
    text, page = lesson.read_text(encoding="utf-8"), (PAGES / f"{lesson.stem}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {int(lesson.stem[:2])}. ")
    questions = text.count("**Predict**")
    assert page.count("\n{ .predict }\n") == questions
    assert page.count("<summary>What it gives</summary>") == questions
    assert page.count("<summary>What is imported</summary>") == 1
    assert page.count("<summary>How it is drawn</summary>") == text.count('tags=["drawing"')
    assert page.count("<summary>A solution</summary>") == text.count("def check_")


def test_a_lesson_leads_to_the_next_one() -> None:
    for lesson, following in itertools.pairwise(LESSONS):
        ending = (PAGES / f"{lesson.stem}.md").read_text(encoding="utf-8").rpartition("Next:")[2]
        assert f"]({following.stem}.md)" in ending, lesson.stem


def test_the_notebook_for_download_has_no_outputs() -> None:
    for lesson in LESSONS:
        cells = json.loads((PAGES / f"{lesson.stem}.ipynb").read_text(encoding="utf-8"))["cells"]
        assert not [cell for cell in cells if cell.get("outputs")]


def test_the_committed_pages_stay_small() -> None:
    assert sum(path.stat().st_size for path in PAGES.rglob("*") if path.is_file()) < 6 * 2**20
