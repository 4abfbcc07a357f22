"""The folder .github of a template repository: GitHub Classroom copies it into each student's repository,
and each step has its points at each push.

`classroom.yml` uses the actions of GitHub Classroom: a grader for each step, and the reporter of the points.
`autograding.json` says the same steps to its form.
"""

import json

from evictionary import __version__
from evictionary.classroom.assignment import Assignment

INSTALL = (
    f"python -m pip install 'evictionary @ git+https://github.com/evictionary/evictionary@v{__version__}'"
)
MINUTES = 10  # for a step

_BEGIN = """\
name: Autograding Tests
on: [push, workflow_dispatch, repository_dispatch]
permissions:
  checks: write
  actions: read
  contents: read
jobs:
  run-autograding-tests:
    runs-on: ubuntu-latest
    if: github.actor != 'github-classroom[bot]'
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.12"
      - name: Install Evictionary
        run: {install}
"""
_STEP = """\
      - name: {title}
        id: {name}
        uses: classroom-resources/autograding-command-grader@v1
        with:
          test-name: {title}
          command: {command}
          timeout: {minutes}
          max-score: {points}
"""
_END = """\
      - name: Autograding Reporter
        uses: classroom-resources/autograding-grading-reporter@v1
        env:
{results}
        with:
          runners: {names}
"""


def files(chosen: Assignment) -> dict[str, str]:
    """What the folder holds for an assignment, by the paths in the repository."""
    commands = [f"evictionary check {chosen.name} --work . --step {step.name}" for step in chosen.steps]
    tests = [
        {
            "name": step.title,
            "setup": "" if place else INSTALL,
            "run": command,
            "input": "",
            "output": "",
            "comparison": "included",
            "timeout": MINUTES,
            "points": step.points,
        }
        for place, (step, command) in enumerate(zip(chosen.steps, commands, strict=True))
    ]
    graders = [
        _STEP.format(
            name=step.name,
            title=json.dumps(step.title, ensure_ascii=False),  # a text of JSON is one of YAML
            command=command,
            minutes=MINUTES,
            points=step.points,
        )
        for step, command in zip(chosen.steps, commands, strict=True)
    ]
    results = [
        f"          {step.name.upper()}_RESULTS: ${{{{ steps.{step.name}.outputs.result }}}}"
        for step in chosen.steps
    ]
    end = _END.format(results="\n".join(results), names=",".join(step.name for step in chosen.steps))
    return {
        ".github/classroom/autograding.json": json.dumps({"tests": tests}, indent=2, ensure_ascii=False)
        + "\n",
        ".github/workflows/classroom.yml": "".join([_BEGIN.format(install=INSTALL), *graders, end]),
    }
