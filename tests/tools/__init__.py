"""What the tests share: no test, and no part of what is installed. Here they write files, call commands and
other programs, and ask for errors.
"""

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from evictionary.cli.app import app
from evictionary.errors import UsageError

ROOT = Path(__file__).parents[2]
# KeyDiff as somebody writes it who has the paper and no NumPy.
PLAIN_KEYDIFF = """
import math


def unit(vector):
    length = math.hypot(*vector)
    return [x / length if length else 0.0 for x in vector]


def score(keys):
    inner = keys[0] if isinstance(keys, list) and keys else None
    if isinstance(inner, list) and inner and isinstance(inner[0], list):
        return [score(each) for each in keys]
    if not keys or not isinstance(inner, list) or not all(keys) or not all(map(math.isfinite, sum(keys, []))):
        raise ValueError("keys: empty or not finite")
    directions = [unit(key) for key in keys]
    anchor = unit([sum(channel) / len(keys) for channel in zip(*directions)])
    return [-sum(x * y for x, y in zip(direction, anchor)) for direction in directions]
"""


def refused(
    call: Callable[[], Any],
    message: str | None = None,
    error: type[BaseException] | tuple[type[BaseException], ...] = UsageError,
) -> None:
    """Fail unless the call raises this error, with a message that the pattern is found in."""
    with pytest.raises(error, match=message):
        call()


def says(text: str, *parts: str, never: Iterable[str] = ()) -> None:
    """Fail unless a text has each of these parts, and nothing of what it is never to have."""
    found = [part for part in parts if part not in text], [part for part in never if part in text]
    assert found == ([], []), text


def without_seconds(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Stored lines without the time that each took."""
    return [{name: value for name, value in line.items() if "seconds" not in name} for line in lines]


def saved(path: Path, content: str | bytes) -> Path:
    """The path of a file that has this content from now on; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def laid(folder: Path, files: Mapping[str, str]) -> Path:
    """A folder that has these files from now on, by their paths in it."""
    for name, content in files.items():
        saved(folder / name, content)
    return folder


def run(
    *command: object, code: int | None = 0, cwd: Path = ROOT, **environment: object
) -> subprocess.CompletedProcess[str]:
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


def ends_with_its_parent(program: str, *arguments: object) -> bool:
    """Whether the process whose number a Python program prints first ends when the program is killed."""
    with subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)], stdout=subprocess.PIPE, cwd=ROOT
    ) as parent:
        assert parent.stdout is not None
        ended = select.poll()
        ended.register(os.pidfd_open(int(parent.stdout.readline())), select.POLLIN)
        parent.kill()
        return bool(ended.poll(20_000))


def json_in(output: str) -> Any:
    """The JSON object that an output holds beside other lines."""
    return json.loads(output[output.index("{") : output.rindex("}") + 1])


def invoke(*arguments: object) -> Result:
    """The result of a command, whatever its exit code."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def printed(*arguments: object) -> str:
    """What a command that succeeds prints on standard output."""
    done = invoke(*arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


def as_json(*arguments: object) -> Any:
    """The JSON of a command that succeeds: nothing else may stand on its standard output."""
    return json.loads(printed(*arguments, "--json"))


def failed(*arguments: object, code: int) -> str:
    """What a command that exits with this code says on standard error, its line breaks as spaces."""
    done = invoke(*arguments)
    assert done.exit_code == code, done.output
    return " ".join(done.stderr.split())


def sampled(cases: Iterable[Any], every: int) -> list[Any]:
    """Cases for `parametrize`, all but each `every`-th of them marked slow, the first one not, so that `make
    slow` runs them. A tuple is several arguments.
    """
    apart = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(*case, marks=[pytest.mark.slow] if index % every else [])
        for index, case in enumerate(apart)
    ]
