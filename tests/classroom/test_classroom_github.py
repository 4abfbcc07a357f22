"""The template repository of GitHub Classroom: its files, and its steps run as GitHub's graders run them."""

import errno
import itertools
import json
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from tools import ROOT, failed, printed, run, saved, says
from tools.grader import SOLUTION, text_of, with_another

from evictionary import __version__
from evictionary.classroom import assignment as assignments

NAMES = [name for name in assignments.names() if assignments.load(name).library == "numpy"]
WORKFLOW, FORM = ".github/workflows/classroom.yml", ".github/classroom/autograding.json"
GRADER = "classroom-resources/autograding-command-grader@v1"


def template(folder: Path, name: str = "keydiff") -> tuple[dict[Any, Any], dict[str, Any]]:
    """The workflow and the form of a new template repository."""
    printed("start", name, "--work", folder, "--github-classroom")
    return yaml.safe_load(text_of(folder / WORKFLOW)), json.loads(text_of(folder / FORM))


@pytest.mark.parametrize("name", NAMES)
def test_each_step_has_a_grader_with_its_points(name: str, tmp_path: Path) -> None:
    workflow, form = template(tmp_path, name)
    chosen = assignments.load(name)
    (job,) = workflow["jobs"].values()
    graders = [step for step in job["steps"] if step.get("uses") == GRADER]
    points = [(step["with"]["test-name"], step["with"]["max-score"]) for step in graders]
    assert points == [(step.title, step.points) for step in chosen.steps]
    assert [(test["name"], test["points"]) for test in form["tests"]] == points
    commands = [f"evictionary check {name} --work . --step {step.name}" for step in chosen.steps]
    assert (
        [step["with"]["command"] for step in graders] == [test["run"] for test in form["tests"]] == commands
    )
    # the reporter finds the result of a grader by the grader's id
    reporter = job["steps"][-1]
    assert reporter["with"]["runners"].split(",") == [step["id"] for step in graders]
    assert reporter["env"] == {
        f"{step['id'].upper()}_RESULTS": f"${{{{ steps.{step['id']}.outputs.result }}}}" for step in graders
    }


def test_the_version_that_wrote_the_workflow_is_installed_before_the_first_step(tmp_path: Path) -> None:
    workflow, form = template(tmp_path)
    (job,) = workflow["jobs"].values()
    (place, install), *others = [
        (place, step["run"]) for place, step in enumerate(job["steps"]) if "run" in step
    ]
    assert not others and all(
        "with" not in step or "command" not in step["with"] for step in job["steps"][:place]
    )
    address = f"git+https://github.com/evictionary/evictionary@v{__version__}"
    assert shlex.split(install) == ["python", "-m", "pip", "install", f"evictionary @ {address}"]
    assert [test["setup"] for test in form["tests"]] == [install] + [""] * (len(form["tests"]) - 1)


def test_the_steps_run_and_give_the_points_of_what_is_right(tmp_path: Path) -> None:
    """As the grader of GitHub Classroom does: a command that exits with 0 has all points of its step."""
    repository = tmp_path / "repository"
    workflow, _ = template(repository)
    saved(repository / "keydiff.py", with_another("pairwise_score", "(keys):\n    return -right(keys)"))
    program = saved(
        tmp_path / "bin" / "evictionary", f'#!/bin/sh\nexec "{sys.executable}" -m evictionary "$@"\n'
    )
    program.chmod(0o755)
    paths = {"PATH": f"{program.parent}:{os.environ['PATH']}", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    (job,) = workflow["jobs"].values()
    points = {}
    for step in job["steps"]:
        if step.get("uses") == GRADER:
            done = run("bash", "-c", step["with"]["command"], code=None, cwd=repository, **paths)
            says(done.stdout + done.stderr, never=["Traceback"])
            points[step["id"]] = 0 if done.returncode else step["with"]["max-score"]
    assert points == {"anchor": 15, "score": 30, "symmetries": 15, "edges": 15, "pairwise": 0, "sizes": 10}


def test_a_step_is_judged_with_those_that_it_needs() -> None:
    chosen = assignments.load("keydiff")
    assert [step.name for step in chosen.only("anchor").steps] == ["anchor"]
    assert [step.name for step in chosen.only("sizes").steps] == ["anchor", "score", "sizes"]
    far = assignments.load("quantisation")
    for step in far.steps:
        found = [each.name for each in far.only(step.name).steps]
        assert found[-1] == step.name and all({*each.needs} <= {*found} for each in far.only(step.name).steps)


def test_what_no_template_can_have_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    says(failed("start", "kernel", "--github-classroom", code=2), "--github-classroom: got kernel, wanted an")
    told = failed("start", "keydiff", "--github-classroom", "--student", "ada", code=2)
    says(told, "--student: a template is the same for a whole class")
    saved(Path("work") / WORKFLOW, "mine")
    says(failed("start", "keydiff", "--github-classroom", code=2), f"{WORKFLOW} exists already")
    assert not Path("work/keydiff.py").exists() and text_of(Path("work") / WORKFLOW) == "mine"
    saved(Path("work") / "keydiff.py", SOLUTION)
    says(failed("check", "keydiff", "--step", "ankor", code=2), "--step: got 'ankor' (did you mean anchor?)")
    saved(Path("work") / "scorer.py", SOLUTION)
    says(failed("check", "contest", "--step", "scores", code=2), "the contest judges its steps together")


@pytest.mark.parametrize("taken", [".github", ".github/workflows"])
def test_nothing_is_written_where_a_file_has_the_place_of_a_folder(taken: str, tmp_path: Path) -> None:
    work = tmp_path / "template"
    saved(work / taken, "mine")
    told = failed("start", "keydiff", "--work", work, "--github-classroom", code=2)
    says(told, f"--github-classroom: {work / taken} is no folder; move it away")
    assert [each for each in work.rglob("*") if each.is_file()] == [work / taken]
    assert text_of(work / taken) == "mine"


@pytest.mark.parametrize(("name", "before"), [("mkdir", 3), ("mkstemp", 2), ("replace", 0)])
def test_a_template_that_cannot_be_written_leaves_nothing(
    name: str, before: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full after so many folders or files: neither the starter file nor a folder stays."""
    module = {"mkdir": Path, "mkstemp": tempfile, "replace": os}[name]
    real, calls = getattr(module, name), itertools.count()

    def full(*given: Any, **named: Any) -> Any:
        if next(calls) >= before:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*given, **named)

    monkeypatch.setattr(module, name, full)
    work = tmp_path / "template"
    told = failed("start", "keydiff", "--work", work, "--github-classroom", code=2)
    says(told, f"--work: got {work}, wanted a folder that can be written: No space left on device")
    assert next(calls) > before and not work.exists()
