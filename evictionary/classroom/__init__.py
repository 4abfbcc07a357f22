"""The classroom: assignments, messages for students,
and a grader that runs student code in a child process.

`assignment.py` reads an assignment's folder; `worker.py` is the program of the child, `sandbox.py` and
`seccomp.py` are the walls around it, `child.py` is the parent's end; `judgement.py` says what becomes of a
submission; `grading.py` puts the laws to it, and `contest.py` its scorer into the embedded model; `inputs.py`
draws the inputs from a seed; `submissions.py` opens archives; `formats.py` writes grade.json and the files
for platforms; `classes.py` grades a folder of submissions; `gradebook.py` sums up the grades of an
assignment, and `course.py` those of several; `bundle.py` writes the reference as a right answer.
`verifier.py` puts the laws to code that nobody trusts, and `tasks.py` writes what such code is asked:
functions of the contract as files of `standalone.py`, short enough to read.
"""

from importlib.resources import files
from pathlib import Path

ASSIGNMENTS = Path(str(files("evictionary.tutorials"))) / "assignments"


def names(folder: Path | None = None) -> list[str]:
    """The names of the assignments in a folder; by default those of the project."""
    return sorted(path.parent.name for path in (folder or ASSIGNMENTS).glob("*/assignment.toml"))
