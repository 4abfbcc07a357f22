"""A program in any language as an implementation: JSON lines
over its standard input and output, arrays as raw files.

docs/any_language.md is the protocol, conformance/clients/ holds programs that speak it. A program that hangs,
dies or breaks the protocol is killed and started again for the next law, `STARTS` times at most.
"""

from __future__ import annotations

import importlib
import inspect
import json
import shlex
import shutil
import tempfile
import types
import weakref
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from evictionary.errors import require
from evictionary.spec_tests.judge import wire
from evictionary.spec_tests.judge.arithmetic import round_to
from evictionary.spec_tests.judge.domain import OutsideDomain
from evictionary.spec_tests.judge.remote import Gone, Remote
from evictionary.spec_tests.judge.wire import STORED, BadMessage, shown

PROTOCOL = 1
PREFIX = "exec:"
"""What a target of `load` begins with where the rest of it is a command line."""

SECONDS = 60.0
STARTS = 10
_JSON = {dict: "object", bool: "true or false"}
LONGEST_LINE = 2**20


class ProgramFailed(BaseException):
    """The program hung, died or broke the protocol; the message says how.

    No Exception: hypothesis would run it again many times to find a smaller input, and a law would take it
    for a refusal.
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
        self._running: list[Remote] = []
        self._asked, self._starts = 0, 0
        # also runs when the interpreter ends
        self._end = weakref.finalize(self, _end, self._running, self._folder)
        _programs.add(self)

    def close(self) -> None:
        """End the program and remove the files."""
        self._end()

    def hello(self) -> dict[str, Any]:
        """Start the program; what it says of itself, checked.
        Raises ProgramFailed where that cannot be used.
        """
        said = self._ask("hello", {"protocol": PROTOCOL})
        if "error" in said:
            self._fail(f"refused the handshake: {shown(said['error'])}")
        said = said["result"]
        if not isinstance(said, dict) or said.get("protocol") != PROTOCOL:
            got = said.get("protocol") if isinstance(said, dict) else said
            self._fail(f"speaks another protocol: got {shown(got)}, wanted {PROTOCOL}")
        functions = said.get("functions")
        if not isinstance(functions, list) or not functions:
            self._fail(
                f'provides nothing: got {shown(functions)} for "functions", wanted a list such as '
                '["keydiff.score"]'
            )
        for name in functions:
            if not isinstance(name, str) or not isinstance(member(name), types.FunctionType):
                self._fail(
                    f"provides {shown(name)}, which is no function of the contract such as keydiff.score"
                )
        for key, kind in (
            ("domain", dict),
            ("conventions", list),
            ("implements", dict),
            ("name", str),
            ("fractions", bool),
        ):
            if not isinstance(said.get(key, kind()), kind):
                self._fail(
                    f'says {shown(said[key])} for "{key}", wanted a JSON {_JSON.get(kind, kind.__name__)}'
                )
        self.reads_fractions = said.get("fractions", False)
        return said

    def modules(self) -> tuple[str, dict[str, types.ModuleType], types.ModuleType]:
        """Its name, a module for each file of the contract with a function for each that it provides, and
        one of what it says.
        """
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
        domain = {
            key: tuple(each) if isinstance(each, list) else each
            for key, each in said.get("domain", {}).items()
        }
        vars(package).update(
            ARRAY_LIBRARY="exec", DOMAIN=domain, CONVENTIONS=tuple(said.get("conventions", ()))
        )
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
                    raise OutsideDomain(
                        f"{name} is a function, which cannot be written down for another program"
                    )
            return self.call(path, arguments)

        return call

    def call(self, function: str, arguments: dict[str, Any]) -> Any:
        """Ask for one call: NumPy arrays in and out. Raises
        ValueError where the program refuses the arguments.
        """
        if not self._running and self._asked:
            self.hello()  # it failed before
        try:
            answer = self._ask(function, arguments)
            if "error" in answer:
                raise ValueError(str(answer["error"]))
            return wire.from_json(answer["result"], self._array, _named)
        except BadMessage as error:
            self._fail(f"wrote {error}", function)
        finally:
            for path in self._folder.glob(f"{self._asked}[.-]*"):
                path.unlink(missing_ok=True)

    def _ask(self, function: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """One request and its answer, which has either `result` or `error`."""
        if not self._running:
            self._start()
        (program,) = self._running
        self._asked += 1
        written = {
            name: wire.to_json(value, self._written, f"{self._asked}-{name}")
            for name, value in arguments.items()
        }
        request = {
            "id": self._asked,
            "function": function,
            "arguments": written,
            "output": str(self._folder / f"{self._asked}."),
        }
        if unasked := program.unasked():
            self._fail(
                f"printed something that nobody asked for: {shown(unasked.decode(errors='replace'))}",
                function,
            )
        try:
            program.allow(self.seconds)
            with program.asking():
                program.send(json.dumps(request, ensure_ascii=False).encode() + b"\n")
                line = program.line(LONGEST_LINE).decode(errors="replace")
            answer = wire.parsed(line)
        except Gone as gone:
            self._fail(str(gone).removeprefix(f"{program.name} "), function)
        except BadMessage as error:
            self._fail(f"answered with {error}: {shown(line)}", function)
        if not isinstance(answer, dict) or ("result" in answer) == ("error" in answer):
            self._fail(
                f'answered {shown(line)}, wanted an object with "id" and either "result" or "error"', function
            )
        if answer.get("id") != self._asked:
            self._fail(
                f"answered out of order: got id {shown(answer.get('id'))}, wanted {self._asked}", function
            )
        return answer

    def _start(self) -> None:
        require(
            self._starts != STARTS,
            f"the program {self.words[0]} failed {STARTS} times and is not started again",
            ProgramFailed,
        )
        self._starts += 1
        try:
            self._running.append(Remote(f"the program {self.words[0]}", self.words, self.seconds))
        except OSError as error:
            raise ProgramFailed(f"the program {self.words[0]} cannot be started: {error.strerror}") from None

    def _fail(self, what: str, function: str = "") -> NoReturn:
        while self._running:
            self._running.pop().close()
        raise ProgramFailed(
            f"the program {self.words[0]} {what}" + (f" (asked for {function})" if function else "")
        )

    def _written(self, value: Any, name: str) -> Any:
        """What is no tuple as JSON; an array as the file that it is now in."""
        if isinstance(value, np.ndarray):
            dtype = self.dtype if value.dtype.kind == "f" else "bool" if value.dtype.kind == "b" else "int64"
            path = self._folder / name
            path.write_bytes(_as_stored(value, dtype).tobytes())
            return {"file": str(path), "shape": list(value.shape), "dtype": dtype}
        if isinstance(value, Fraction) and self.reads_fractions:
            return {"fraction": [value.numerator, value.denominator]}
        if isinstance(value, Fraction) and Fraction(repr(float(value))) != value:
            raise OutsideDomain(
                f'{value} is no decimal number, and the program does not say that it reads "fractions"'
            )
        return plain(value)

    def _array(self, content: dict[str, Any]) -> np.ndarray:
        """The numbers of a file that the program has written."""
        require("file" in content, f'{shown(content)}, wanted an object with "file" or "type"', BadMessage)
        path = Path(str(content["file"]))
        if path.parent != self._folder or not path.name.startswith(f"{self._asked}."):
            raise BadMessage(f'{path}, wanted a file whose path begins with "output"')
        require(path.is_file(), f"the name of a file, {path.name}, which it did not write", BadMessage)
        return wire.numbers(content, path.read_bytes(), STORED)


def plain(value: Any) -> Any:
    """A number, a text or nothing as JSON has it; OutsideDomain for anything else."""
    try:
        return wire.plain(float(value) if isinstance(value, Fraction) else value)
    except BadMessage:
        raise OutsideDomain(f"a {type(value).__name__} cannot be written down for another program") from None


def _as_stored(array: np.ndarray, dtype: str) -> np.ndarray:
    if dtype != "bfloat16":
        return array.astype(STORED[dtype])
    return (round_to(array.astype(np.float64), dtype).astype(np.float32).view(np.uint32) >> 16).astype(
        STORED[dtype]
    )


def _named(name: str, fields: dict[str, Any]) -> Any:
    """The named tuple of the contract of that name. Raises
    BadMessage where there is none with these fields.
    """
    made = member(name)
    wanted = getattr(made, "_fields", None)
    if wanted is None or sorted(wanted) != sorted(fields):
        told = (
            f"the fields {', '.join(wanted)}"
            if wanted
            else "a type of the contract such as cache.CompressedCache"
        )
        raise BadMessage(f"a {shown(name)} of {', '.join(fields) or 'nothing'}, wanted {told}")
    return made(**fields)


def _words(command: str) -> list[str]:
    """The command line in words. Raises ProgramFailed where it is none, or its program cannot be found."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ProgramFailed(f"got {command!r}, wanted a command line: {error}") from None
    require(words, "got an empty command line, wanted a program and its arguments", ProgramFailed)
    if shutil.which(words[0]) is None:
        there = Path(words[0])
        found = (
            "is a folder" if there.is_dir() else "is not executable" if there.is_file() else "does not exist"
        )
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


def _end(running: list[Remote], folder: Path) -> None:
    """Let the program end by itself, which the end of its input asks for, and remove the files."""
    for program in running:
        program.close(patience=1)
    shutil.rmtree(folder, ignore_errors=True)
