"""A measurement that is killed in the middle of a line, for the tests of what a second run finds."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import importlib, os, signal, sys
from pathlib import Path
sys.path.insert(0, "tests")
from evictionary.evaluation import run as evaluation

module, test, model_folder, folder, lines = sys.argv[1:]
append, written = evaluation.append, []

def append_and_die(path, line):
    if len(written) == int(lines):
        with path.open("ab") as file:
            file.write(b'{"model": "cut o')
        os.kill(os.getpid(), signal.SIGKILL)
    append(path, line)
    written.append(line)

evaluation.append = append_and_die
importlib.import_module(module).run(importlib.import_module(test).plan_for(Path(model_folder)), Path(folder))
"""


def killed(module: str, test: str, model_folder: Path, folder: Path, lines: int) -> bytes:
    """What results.jsonl holds after `module.run` of `test.plan_for(model_folder)` was killed in the line after so many."""
    arguments = [module, test, str(model_folder), str(folder), str(lines)]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    written = (folder / "results.jsonl").read_bytes()
    assert written.count(b"\n") == lines
    assert not written.endswith(b"\n")
    return written
