"""What the tests share that start a program: where it runs, in which environment, and how it has to end."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from . import ROOT


def run(*command: object, code: int | None = 0, cwd: Path = ROOT, **environment: object) -> subprocess.CompletedProcess[str]:
    """What a program leaves that ends with this exit code, or with any for None."""
    words, named = map(str, command), {name: str(value) for name, value in environment.items()}
    done = subprocess.run(list(words), cwd=cwd, env=os.environ | named, capture_output=True, text=True)
    assert code in (None, done.returncode), done.stdout + done.stderr
    return done


def python(*arguments: object, **named: object) -> subprocess.CompletedProcess[str]:
    """The same of this Python."""
    return run(sys.executable, *arguments, **named)  # type: ignore[arg-type]


def pytest_of(*arguments: object, **named: object) -> subprocess.CompletedProcess[str]:
    """The same of pytest, in a process that keeps no cache."""
    return python("-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, **named)


def judge(*arguments: object, **named: object) -> subprocess.CompletedProcess[str]:
    """The same of `evictionary judge` with few inputs for each law."""
    return python("-m", "evictionary", "judge", *arguments, "--profile", "quick", **named)


def json_in(output: str) -> Any:
    """The JSON object that an output holds beside other lines."""
    return json.loads(output[output.index("{") : output.rindex("}") + 1])
