"""A student's way from `start` to full marks:
`python -m docs_build.transcript` runs it and writes the page.
"""

import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from docs_build.running import ROOT, said

FOLDER = ROOT / "docs" / "classroom"
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
    (
        "A zero key has no direction, and counts as 0. The last attempt also writes the edges and the "
        "pairwise score.",
        "3_right.py",
    ),
    ("", "check keydiff --seed 0"),
    ("The student hands in an archive of one file and its checksum.", "submit keydiff"),
)


def run(way: Sequence[tuple[str, str]] = WAY) -> str:
    """The page, from commands that are run in an empty folder.
    Seconds are left out, because they differ each time.
    """
    parts = [
        "# From start to full marks",
        "",
        "Written by `python -m docs_build.transcript`; a test runs it again and compares.",
        "The code boxes are files that the same run judged.",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for sentence, step in way:
            parts += ["", sentence] if sentence else []
            if step.endswith(".py"):
                source = FILES / step
                shutil.copy(source, Path(folder, "work", "keydiff.py"))
                parts += [
                    "",
                    '```python title="work/keydiff.py"',
                    source.read_text(encoding="utf-8").rstrip(),
                    "```",
                ]
            else:
                printed = re.sub(
                    r"\S*/(tutorials/assignments/)",
                    r"\1",
                    said(f"evictionary {step}", Path(folder), columns=100),
                )
                parts += ["", "```text", f"$ evictionary {step}", *filter(None, printed.splitlines()), "```"]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(run(), encoding="utf-8")
