"""A run that is killed in the middle of a line, for the tests of what a second run finds."""

import importlib
import json
import signal
import subprocess
import sys
from pathlib import Path

from evictionary import store
from evictionary.store import Line, Progress

PROGRAM = """
import importlib, os, signal, sys
from pathlib import Path
sys.path[:0] = ["tests", "tests/experiments"]
from evictionary import store

test, model_folder, folder, lines = sys.argv[1:]
append, written = store.append, []

def append_and_die(path, line):
    if len(written) == int(lines):
        with path.open("ab") as file:
            file.write(b'{"model": "cut o')
        os.kill(os.getpid(), signal.SIGKILL)
    append(path, line)
    written.append(line)

store.append = append_and_die
store.run(importlib.import_module(test).plan_for(Path(model_folder)), Path(folder))
"""


def goes_on(test: str, model_folder: Path, folder: Path, lines: int) -> tuple[list[Line], list[Progress]]:
    """Kill the run of `test.plan_for(model_folder)` after so many lines and run it again: its lines, and what it told.

    What the killed run wrote has to be there as it is.
    """
    arguments = [test, str(model_folder), str(folder), str(lines)]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    written = (folder / store.RESULTS).read_bytes()
    assert written.count(b"\n") == lines
    assert not written.endswith(b"\n")
    told: list[Progress] = []
    found = store.run(importlib.import_module(test).plan_for(model_folder), folder, advance=told.append)
    left = len(found) - lines
    assert [(each.done, each.total) for each in told] == [(index, left) for index in range(1, left + 1)]
    assert all(json.loads(text) in found for text in written.splitlines()[:lines])
    return found, told
