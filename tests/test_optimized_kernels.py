"""The Triton kernels in the interpreter, against float64: the cases that the laws do not draw, in a process of its own.

The interpreter takes the place of the compiler when Triton is imported, so the checks of `interpreted_*.py` run in a subprocess
with TRITON_INTERPRET=1; each is one test here.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("triton")

ROOT = pathlib.Path(__file__).resolve().parents[1]
CHECKS = [
    (path.name, name)
    for path in sorted(pathlib.Path(__file__).parent.glob("interpreted_*.py"))
    for name in re.findall(r"^def check_(\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
]


@pytest.mark.parametrize(("file", "check"), CHECKS)
def test_in_the_interpreter(file: str, check: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(pathlib.Path(__file__).with_name(file)), check]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
