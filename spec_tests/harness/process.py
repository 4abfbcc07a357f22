"""A program in any language as an implementation: JSON lines over its standard input and output, arrays as raw files.

docs/any_language.md is the protocol, conformance/clients/ holds programs that speak it. A program that hangs, dies or breaks the
protocol is killed and started again for the next law, `STARTS` times at most.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import select
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
import types
import weakref
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from evictionary.spec_tests.harness.arithmetic import round_to
from evictionary.spec_tests.harness.domain import OutsideDomain

PROTOCOL = 1
PREFIX = "exec:"
"""What a target of `load` begins with where the rest of it is a command line."""

SECONDS = 60.0
STARTS = 10
_JSON = {dict: "object", bool: "true or false"}
LONGEST_LINE = 2**20
STORED = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "int64": "<i8", "int32": "<i4", "bool": "u1"}
"""How a file holds the numbers of each dtype: little-endian, without a header; bfloat16 as its 16 bits, bool as a byte."""


class ProgramFailed(BaseException):
    """The program hung, died or broke the protocol; the message says how.

    No Exception: hypothesis would run it again many times to find a smaller input, and a law would take it for a refusal.
    """


_programs: weakref.WeakSet[Program] = weakref.WeakSet()


def close_all() -> None:
    """End every program: a worker of pytest-xdist ends without what an interpreter does at its end."""
    for program in list(_programs):
        program.close()


class Program:
    """A running program that answers calls; `dtype` is that of the floating-point arrays that it is given."""

    def __init__(self, command: str, seconds: float = SECONDS) -> None:
        self.seconds, self.dtype, self.reads_fractions = seconds, "float64", False
        self.words = _words(command)
        self._folder = Path(tempfile.mkdtemp(prefix="evictionary-"))
        self._running: list[subprocess.Popen[bytes]] = []
        self._buffer, self._asked, self._starts = b"", 0, 0
        self._end = weakref.finalize(self, _end, self._running, self._folder)  # also runs when the interpreter ends
        _programs.add(self)

    def close(self) -> None:
        """End the program and remove the files."""
        self._end()

    def hello(self) -> dict[str, Any]:
        """Start the program; what it says of itself, checked. Raises ProgramFailed where that cannot be used."""
        said = self._ask("hello", {"protocol": PROTOCOL})
        if "error" in said:
            self._fail(f"refused the handshake: {_shown(said['error'])}")
        said = said["result"]
        if not isinstance(said, dict) or said.get("protocol") != PROTOCOL:
            got = said.get("protocol") if isinstance(said, dict) else said
            self._fail(f"speaks another protocol: got {_shown(got)}, wanted {PROTOCOL}")
        functions = said.get("functions")
        if not isinstance(functions, list) or not functions:
            self._fail(f'provides nothing: got {_shown(functions)} for "functions", wanted a list such as ["keydiff.score"]')
        for name in functions:
            if not isinstance(name, str) or not isinstance(member(name), types.FunctionType):
                self._fail(f"provides {_shown(name)}, which is no function of the contract such as keydiff.score")
        for key, kind in (("domain", dict), ("conventions", list), ("implements", dict), ("name", str), ("fractions", bool)):
            if not isinstance(said.get(key, kind()), kind):
                self._fail(f'says {_shown(said[key])} for "{key}", wanted a JSON {_JSON.get(kind, kind.__name__)}')
        self.reads_fractions = said.get("fractions", False)
        return said

    def modules(self) -> tuple[str, dict[str, types.ModuleType], types.ModuleType]:
        """Its name, a module for each file of the contract with a function for each that it provides, and one of what it says."""
        said = self.hello()
        name = said.get("name") or Path(self.words[0]).stem
        modules: dict[str, types.ModuleType] = {}
        for path in said["functions"]:
            stem, function = path.split(".")
            module = modules.setdefault(stem, types.ModuleType(stem))
            vars(module).setdefault("IMPLEMENTS", {})
            setattr(module, function, self._function(path))
            if path in said.get("implements", {}):
                vars(module)["IMPLEMENTS"][function] = str(said["implements"][path])
        package = types.ModuleType(name)
        domain = {key: tuple(each) if isinstance(each, list) else each for key, each in said.get("domain", {}).items()}
        vars(package).update(ARRAY_LIBRARY="exec", DOMAIN=domain, CONVENTIONS=tuple(said.get("conventions", ())))
        return name, modules, package

    def _function(self, path: str) -> Callable[..., Any]:
        signature = inspect.signature(member(path))

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = {}
            for name, value in bound.arguments.items():
                if not callable(value):
                    arguments[name] = value
                elif value is not signature.parameters[name].default:
                    raise OutsideDomain(f"{name} is a function, which cannot be written down for another program")
            return self.call(path, arguments)

        return call

    def call(self, function: str, arguments: dict[str, Any]) -> Any:
        """Ask for one call: NumPy arrays in and out. Raises ValueError where the program refuses the arguments."""
        if not self._running and self._asked:
            self.hello()  # it failed before
        try:
            answer = self._ask(function, arguments)
            if "error" in answer:
                raise ValueError(str(answer["error"]))
            return self._read(answer["result"], function)
        finally:
            for path in self._folder.glob(f"{self._asked}[.-]*"):
                path.unlink(missing_ok=True)

    def _ask(self, function: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """One request and its answer, which has either `result` or `error`."""
        if not self._running:
            self._start()
        program = self._running[0]
        self._asked += 1
        written = {name: self._written(value, f"{self._asked}-{name}") for name, value in arguments.items()}
        request = {"id": self._asked, "function": function, "arguments": written, "output": str(self._folder / f"{self._asked}.")}
        if select.select([_fd(program)], [], [], 0)[0]:
            self._buffer += os.read(_fd(program), 4096)
        if self._buffer:
            self._fail(f"printed something that nobody asked for: {_shown(self._buffer.decode(errors='replace'))}", function)
        assert program.stdin is not None
        try:
            program.stdin.write(json.dumps(request, ensure_ascii=False).encode() + b"\n")
            program.stdin.flush()
        except OSError:
            self._fail(self._ending(), function)
        line = self._line(function)
        try:
            answer = json.loads(line, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            reason = f": {error}" if isinstance(error, _NotJson) else ""
            self._fail(f"answered with something that is no JSON{reason}: {_shown(line)}", function)
        if not isinstance(answer, dict) or ("result" in answer) == ("error" in answer):
            self._fail(f'answered {_shown(line)}, wanted an object with "id" and either "result" or "error"', function)
        if answer.get("id") != self._asked:
            self._fail(f"answered out of order: got id {_shown(answer.get('id'))}, wanted {self._asked}", function)
        return answer

    def _line(self, function: str) -> str:
        program = self._running[0]
        deadline = time.monotonic() + self.seconds
        while b"\n" not in self._buffer:
            if not select.select([_fd(program)], [], [], max(0.0, deadline - time.monotonic()))[0]:
                self._fail(f"did not answer within {self.seconds:g} s", function)
            chunk = os.read(_fd(program), 2**16)
            if not chunk:
                self._fail(self._ending(), function)
            self._buffer += chunk
            if len(self._buffer) > LONGEST_LINE:
                shown = _shown(self._buffer[:1000].decode(errors="replace"))
                self._fail(f"printed {LONGEST_LINE} bytes without the end of a line: {shown}", function)
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode(errors="replace")

    def _start(self) -> None:
        if self._starts == STARTS:
            raise ProgramFailed(f"the program {self.words[0]} failed {STARTS} times and is not started again")
        self._starts += 1
        self._buffer = b""
        with (self._folder / "stderr").open("wb") as errors:
            try:
                program = subprocess.Popen(
                    self.words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
                )
            except OSError as error:
                raise ProgramFailed(f"the program {self.words[0]} cannot be started: {error.strerror}") from None
        self._running.append(program)

    def _ending(self) -> str:
        """How the program ended, and what it last said on standard error."""
        try:
            code = self._running[0].wait(timeout=1)
        except subprocess.TimeoutExpired:
            return "closed its standard output"
        said = (self._folder / "stderr").read_bytes()[-2000:].decode(errors="replace").split("\n")
        said = [line.strip() for line in said if line.strip()][-3:]
        how = f"died with signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return how + (f"; its last words: {' | '.join(said)}" if said else "")

    def _fail(self, what: str, function: str = "") -> NoReturn:
        _stop(self._running)
        raise ProgramFailed(f"the program {self.words[0]} {what}" + (f" (asked for {function})" if function else ""))

    def _written(self, value: Any, name: str) -> Any:
        """A value as JSON; an array as the file that it is now in."""
        if isinstance(value, np.ndarray):
            dtype = self.dtype if value.dtype.kind == "f" else "bool" if value.dtype.kind == "b" else "int64"
            path = self._folder / name
            path.write_bytes(_as_stored(value, dtype).tobytes())
            return {"file": str(path), "shape": list(value.shape), "dtype": dtype}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            fields = {field: self._written(each, f"{name}.{field}") for field, each in zip(value._fields, value, strict=True)}
            return {"type": type_name(value), **fields}
        if isinstance(value, tuple | list):
            return [self._written(each, f"{name}.{place}") for place, each in enumerate(value)]
        if isinstance(value, Fraction) and self.reads_fractions:
            return {"fraction": [value.numerator, value.denominator]}
        if isinstance(value, Fraction) and Fraction(repr(float(value))) != value:
            raise OutsideDomain(f'{value} is no decimal number, and the program does not say that it reads "fractions"')
        return plain(value)

    def _read(self, value: Any, function: str) -> Any:
        """What an answer says, arrays read from their files."""
        if isinstance(value, dict) and "file" in value:
            return self._array(value, function)
        if isinstance(value, dict) and "type" in value:
            made = member(str(value["type"]))
            fields = getattr(made, "_fields", None)
            if fields is None or sorted(fields) != sorted(set(value) - {"type"}):
                wanted = f"the fields {', '.join(fields)}" if fields else "a type of the contract such as cache.CompressedCache"
                self._fail(f"answered {_shown(json.dumps(value))}, wanted {wanted}", function)
            return made(**{field: self._read(value[field], function) for field in fields})
        if isinstance(value, dict):
            self._fail(f'answered {_shown(json.dumps(value))}, wanted an object with "file" or "type"', function)
        if isinstance(value, list):
            entries = [self._read(each, function) for each in value]
            return tuple(entries) if any(isinstance(each, np.ndarray | tuple) for each in entries) else entries
        return float(value) if value in ("nan", "inf", "-inf") else value

    def _array(self, value: dict[str, Any], function: str) -> np.ndarray:
        shape, dtype, path = value.get("shape"), value.get("dtype"), Path(str(value["file"]))
        if not isinstance(shape, list) or not all(type(each) is int and each >= 0 for each in shape):
            self._fail(f"answered an array of shape {_shown(shape)}, wanted a list of whole numbers", function)
        if not isinstance(dtype, str) or dtype not in STORED:
            self._fail(f"answered an array of dtype {_shown(dtype)}, wanted one of {', '.join(STORED)}", function)
        if path.parent != self._folder or not path.name.startswith(f"{self._asked}."):
            self._fail(f'wrote {path}, wanted a file whose path begins with "output"', function)
        if not path.is_file():
            self._fail(f"answered with the file {path.name}, which it did not write", function)
        stored = np.dtype(STORED[dtype])
        count = int(np.prod(shape, dtype=object))
        if path.stat().st_size != count * stored.itemsize:
            self._fail(
                f"wrote {path.stat().st_size} bytes for an array of shape {tuple(shape)} and {dtype}, "
                f"wanted {count * stored.itemsize}",
                function,
            )
        numbers = np.fromfile(path, dtype=stored).reshape(shape)
        if dtype == "bfloat16":
            return (numbers.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        if dtype == "bool":
            if (numbers > 1).any():
                self._fail(f"wrote a bool of {numbers.max()}, wanted bytes of 0 and 1", function)
            return numbers.astype(bool)
        return numbers.astype(stored.newbyteorder("="))


def plain(value: Any) -> Any:
    """A number, a text or nothing as JSON has it: a number that is not finite as the text nan, inf or -inf."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Fraction):
        value = float(value)
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise OutsideDomain(f"a {type(value).__name__} cannot be written down for another program")


def _as_stored(array: np.ndarray, dtype: str) -> np.ndarray:
    if dtype != "bfloat16":
        return array.astype(STORED[dtype])
    return (round_to(array.astype(np.float64), dtype).astype(np.float32).view(np.uint32) >> 16).astype(STORED[dtype])


def _words(command: str) -> list[str]:
    """The command line in words. Raises ProgramFailed where it is none, or its program cannot be found."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ProgramFailed(f"got {command!r}, wanted a command line: {error}") from None
    if not words:
        raise ProgramFailed("got an empty command line, wanted a program and its arguments")
    if shutil.which(words[0]) is None:
        there = Path(words[0])
        found = "is a folder" if there.is_dir() else "is not executable" if there.is_file() else "does not exist"
        raise ProgramFailed(f"the program {words[0]} {found}")
    return words


def member(path: str) -> Any:
    """The function or named tuple of the reference that `keydiff.score` names, or None."""
    stem, _, name = path.partition(".")
    try:
        module = importlib.import_module(f"evictionary.reference.{stem}") if stem.isidentifier() else None
    except ImportError:
        return None
    found = getattr(module, name, None)
    return found if getattr(found, "__module__", None) == f"evictionary.reference.{stem}" else None


def type_name(value: Any) -> str:
    """`cache.CompressedCache` for the named tuple of that name."""
    return f"{type(value).__module__.rpartition('.')[2]}.{type(value).__name__}"


class _NotJson(ValueError):
    pass


def _no_constant(name: str) -> NoReturn:
    raise _NotJson(f'JSON has no {name}, wanted the text "nan", "inf" or "-inf"')


def _shown(value: Any) -> str:
    """The first 80 characters of what came."""
    text = value if isinstance(value, str) else json.dumps(value)
    return repr(text[:80]) + ("..." if len(text) > 80 else "")


def _fd(program: subprocess.Popen[bytes]) -> int:
    assert program.stdout is not None
    return program.stdout.fileno()


def _stop(running: list[subprocess.Popen[bytes]]) -> None:
    """End the program and what it has started."""
    while running:
        program = running.pop()
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()
        for stream in (program.stdin, program.stdout):
            with suppress(OSError):  # what it had not read yet
                stream.close()  # type: ignore[union-attr]


def _end(running: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """Let the program end by itself, which the end of its input asks for, and remove the files."""
    for program in running:
        with suppress(OSError, subprocess.TimeoutExpired):
            program.stdin.close()  # type: ignore[union-attr]
            program.wait(timeout=1)
    _stop(running)
    shutil.rmtree(folder, ignore_errors=True)
