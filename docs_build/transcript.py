"""A student's way from `start` to full marks: `python -m docs_build.transcript` runs it and writes the page."""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from typer.testing import CliRunner

from evictionary.cli.app import app

FOLDER = Path(__file__).parents[1] / "docs" / "classroom"
PAGE = FOLDER / "transcript.md"
FILES = FOLDER / "transcript"
# The student's steps: a command, or a file that is saved as work/keydiff.py, with a sentence before it.
WAY = (
    ("The first command writes the starter file.", "start keydiff"),
    ("Nothing is written yet.", "check keydiff --seed 0"),
    ("The first attempt averages the keys themselves.", "1_raw_mean.py"),
    ("", "check keydiff --seed 0"),
    ("The second attempt divides each key by its norm before it takes the mean.", "2_zero_keys.py"),
    ("", "check keydiff --seed 0"),
    ("A zero key has no direction, and counts as 0. The last attempt also writes the edges and the pairwise score.", "3_right.py"),
    ("", "check keydiff --seed 0"),
    ("The student hands in an archive of one file and its checksum.", "submit keydiff"),
)


def run(way: Sequence[tuple[str, str]] = WAY) -> str:
    """The page, from commands that are run in an empty folder. Seconds are left out, because they differ each time."""
    parts = [
        "# From start to full marks",
        "",
        "Written by `python -m docs_build.transcript`; a test runs it again and compares.",
        "The code boxes are files that the same run judged.",
    ]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for sentence, step in way:
            parts += ["", sentence] if sentence else []
            if step.endswith(".py"):
                source = FILES / step
                shutil.copy(source, "work/keydiff.py")
                parts += ["", '```python title="work/keydiff.py"', source.read_text(encoding="utf-8").rstrip(), "```"]
            else:
                result = CliRunner().invoke(app, step.split(), env={"COLUMNS": "100"})
                lines = [line.rstrip() for line in result.stdout.rstrip().splitlines()]
                shown = [_placed(line) for line in lines if line]
                parts += ["", "```text", f"$ evictionary {step}", *shown, "```"]
    return "\n".join(parts) + "\n"


def _placed(line: str) -> str:
    """A line without the parts that differ between machines: seconds, and the folder of the clone."""
    line = re.sub(r"(points) in \d+ s$", r"\1", line)
    return re.sub(r"\S*/(tutorials/assignments/)", r"\1", line)


def main() -> None:
    PAGE.write_text(run(), encoding="utf-8")


if __name__ == "__main__":
    main()
