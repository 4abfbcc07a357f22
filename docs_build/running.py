"""Runs the commands that the pages show: one place says
in which process, and what of their output a page shows.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRESS = re.compile(r"[.F]+ *(\[ *\d+%\])?$|bringing up nodes")


def said(command: str, folder: Path, columns: int = 80) -> str:
    """The output of `python -m command` in a folder, without progress and seconds, which differ each time."""
    # Where CI is set, pytest prints every report twice.
    environment = os.environ | {"CI": "", "PYTHONPATH": str(ROOT), "COLUMNS": str(columns)}
    words = shlex.split(command)
    # what a command is doing meanwhile is told with seconds
    quiet = ["--quiet"] if words[0] == "evictionary" and not words[1].startswith("-") else []
    program = [sys.executable, "-m", *words, *quiet]
    done = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    lines = [line.rstrip() for line in (done.stdout + done.stderr).splitlines() if not PROGRESS.match(line)]
    return re.sub(r" in [\d.]+ ?s( \(\S+\))?$", "", "\n".join(lines).strip(), flags=re.MULTILINE)
