"""The Triton kernels in the interpreter, against float64: the cases that the laws do not draw, in a process of its own.

The interpreter takes the place of the compiler when Triton is imported, so the checks of `interpreted_*.py` run in a subprocess
with TRITON_INTERPRET=1; each file is one test here, and the traceback names the check.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("triton")

ROOT = pathlib.Path(__file__).resolve().parents[1]
FILES = sorted(path.name for path in pathlib.Path(__file__).parent.glob("interpreted_*.py"))


@pytest.mark.parametrize("file", FILES)
def test_in_the_interpreter(file: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(pathlib.Path(__file__).with_name(file))]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
