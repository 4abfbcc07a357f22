"""The parent's side of a child process that runs one student file: start it, call its functions, watch the time, end it."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from evictionary.classroom import seccomp, worker

START_SECONDS = 120.0
BANNED = ("reference", "optimized", "spec_tests", "workbench", "evictionary", "__editable__", "tutorials")
# A message can carry the secret inputs out, so that it is short: with the kind of the error and its place, 500 characters.
LONGEST_MESSAGE, LONGEST_KIND, LONGEST_PLACE, MOST_FUNCTIONS = 500, 60, 160, 1000


def closed(site: Path) -> list[str]:
    """Folders that a child may never read: the clone that holds this file, and the installed package."""
    project = Path(worker.__file__).resolve().parents[2]
    folders = {site.resolve(), project, Path(sysconfig.get_path("purelib", vars={"base": sys.base_prefix})).resolve()}
    found = [each for folder in folders if folder.is_dir() for each in folder.iterdir() if _is_banned(each.name)]
    # Installed, this file lies beside NumPy, which the child needs.
    return sorted(str(each) for each in [*found, *([] if project == site.resolve() else [project])])


def _is_banned(name: str) -> bool:
    return name.split(".")[0].split("-")[0] in BANNED


def visible(text: Any) -> str:
    """A student's text with U+FFFD for control characters, half characters and whatever else cannot be shown."""
    return "".join(each if each.isprintable() or each in "\t\n\u00a0\u3000" else "\ufffd" for each in str(text))


def clean(text: Any, longest: int = LONGEST_MESSAGE) -> str:
    """A student's text, visible and cut to `longest` characters."""
    shown = visible(str(text)[:longest])
    return shown if len(str(text)) <= longest else f"{shown} ... and {len(str(text)) - longest} characters more"


@dataclass(frozen=True)
class Limits:
    """The limits of a child for one requirement: seconds of waiting and of processor time, bytes of memory."""

    wall_seconds: float = 20.0
    cpu_seconds: int = 20
    memory: int = 2 * 2**30


class ChildDied(Exception):
    """The child ended, or was ended, before it answered; the message says why, `is_late` whether it ran out of time."""

    is_late = False


class StudentError(Exception):
    """The student's code raised something other than ValueError: `kind`, the message, and the line of the student's file."""

    def __init__(self, kind: str, message: str, place: str) -> None:
        kind, place = kind[:LONGEST_KIND], place[:LONGEST_PLACE]
        message = clean(message, LONGEST_MESSAGE - len(kind) - len(place) - len(":  ()"))
        super().__init__((f"{kind}: {message}" if message else kind) + (f" ({place})" if place else ""))


class Child:
    """One student file in a process of its own. Use it as a context manager; `functions` names the functions of the file.

    `tried` takes what the audit hook refused to the code.

    Raises StudentError if the file cannot be imported and ChildDied if the process ends.
    """

    def __init__(
        self,
        path: Path,
        stem: str,
        *,
        library: str = "numpy",
        limits: Limits = Limits(),
        device: str = "cpu",
        interpret: bool = False,
        confine: bool = True,
        named: Callable[[str, list[str]], Any] = worker.namedtuple,
        tried: set[str] | None = None,
    ) -> None:
        self.path, self.stem, self.library, self.limits = path.resolve(), stem, library, limits
        self.device, self.interpret, self.confine, self.named = device, interpret, confine, named
        self.tried = set() if tried is None else tried  # what the audit hook refused, as the child tells it
        self.functions: list[str] = []
        self.walls: dict[str, Any] = {}
        self._waited, self._queued_before, self._allowed = 0.0, 0.0, START_SECONDS
        self._dead = ""
        self.is_late = False

    def __enter__(self) -> Child:
        environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": str(self.path.parent)}
        environment |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        if self.interpret:
            environment["TRITON_INTERPRET"] = "1"
        site = str(Path(np.__file__).parents[1])
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", worker.__file__, site],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=self.path.parent,
            env=environment,
            start_new_session=True,
        )
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        setup = {
            "site": site,
            "path": str(self.path),
            "stem": self.stem,
            "library": self.library,
            "device": self.device,
            "interpret": self.interpret,
            "confine": self.confine,
            "banned": BANNED,
            "closed": closed(Path(site)),
            "filter": seccomp.program().hex(),
            "cpu_seconds": self.limits.cpu_seconds,
            "memory": self.limits.memory,
        }
        try:
            try:
                self.walls = self._exchange(setup, [])[0]["walls"]
            except ChildDied as error:  # no code of the student has run yet
                raise RuntimeError(f"the child process did not start: {error}") from None
            # importing torch is not the student's time
            self._waited, self._queued_before, self._allowed = 0.0, self._queued(), self.limits.wall_seconds
            reply, _ = self._exchange(None, [])
            if "error" in reply:
                raise _student_error(reply)
            if not isinstance(reply.get("functions"), list):
                raise self._end("its answer cannot be read")
        except BaseException:
            self.close()
            raise
        public = [name for name in reply["functions"] if isinstance(name, str) and name.isidentifier() and name[0] != "_"]
        self.functions = public[:MOST_FUNCTIONS]
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process and all processes that it started in its session."""
        self._kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()

    def call(self, name: str, *args: Any, time_it: bool = False, change_launches: bool = False, **kwargs: Any) -> Any:
        """Call a function of the student's file; with `time_it`, return its median milliseconds on a GPU.

        With `change_launches`, 1 is added to every number that a Triton kernel writes meanwhile, in the interpreter.

        A ValueError is raised unchanged, because laws expect it; any other exception is raised as StudentError.
        """
        arrays: list[Any] = []
        message = {
            "call": name,
            "arguments": [worker.encode(value, arrays) for value in args],
            "keywords": {key: worker.encode(value, arrays) for key, value in kwargs.items()},
            "time": time_it,
            "change launches": change_launches,
        }
        reply, found = self._exchange(message, arrays)
        if "error" in reply:
            if reply.get("value_error"):
                raise ValueError(clean(reply.get("message")))
            raise _student_error(reply)
        try:
            return worker.decode(reply["result"], found, self.named)
        except Exception as error:
            raise self._end(f"its answer cannot be read ({type(error).__name__})") from None

    def _exchange(self, message: dict[str, Any] | None, arrays: list[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Send a message, if there is one, and wait for the next frame."""
        if self._dead:
            raise ChildDied(self._dead)
        started = time.monotonic()
        try:
            if message is not None:
                self._send(worker.pack(message, arrays), started)
            text, body = self._parsed(worker.sizes, self._receive(16, started))
            reply, found = self._parsed(worker.unpack, self._receive(text, started), self._receive(body, started))
            told = reply.get("tried")
            if isinstance(told, list) and len(self.tried) < worker.MOST_TRIED:
                self.tried |= {clean(each, worker.LONGEST_TRIED) for each in told[: worker.MOST_TRIED] if isinstance(each, str)}
            return reply, found
        except BrokenPipeError:
            raise self._end(self._how_it_ended()) from None
        except ChildDied:
            raise
        except BaseException:  # the alarm of a law, or Ctrl-C: half of an answer may be left in the pipe
            self._end("the call was interrupted")
            raise
        finally:
            self._waited += time.monotonic() - started

    def _parsed(self, parse: Callable[..., Any], *parts: bytes) -> Any:
        try:
            return parse(*parts)
        except Exception as error:  # the student's process may have written anything into the pipe
            raise self._end(f"its answer cannot be read ({type(error).__name__}: {clean(error)})") from None

    def _send(self, frame: bytes, started: float) -> None:
        assert self._process.stdin is not None
        left = memoryview(frame)
        while left:
            self._wait(self._process.stdin, selectors.EVENT_WRITE, started)
            left = left[os.write(self._process.stdin.fileno(), left[: 2**16]) :]

    def _receive(self, count: int, started: float) -> bytes:
        assert self._process.stdout is not None
        parts = []
        while count:
            self._wait(self._process.stdout, selectors.EVENT_READ, started)
            part = os.read(self._process.stdout.fileno(), min(count, 2**20))
            if not part:
                raise self._end(self._how_it_ended())
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _wait(self, pipe: IO[bytes], event: int, started: float) -> None:
        """Wait until the pipe is ready; end a child that lets the parent wait for too long.

        The time that it waits for a processor is not its own: on a busy machine right work would lose its points.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, event)
            while True:
                left = self._allowed + self._queued() - self._queued_before - self._waited - (time.monotonic() - started)
                if left <= 0:
                    self.is_late = True
                    raise self._end(f"no answer within {self._allowed:g} s: an endless loop, or waiting for something?")
                if selector.select(left):
                    return

    def _queued(self) -> float:
        """The seconds for which the child was ready and others had the processors; 0 where the system does not say."""
        try:
            return int(Path(f"/proc/{self._process.pid}/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "the process closed its pipes"
        if code == -signal.SIGXCPU or (code == -signal.SIGKILL and self.limits.cpu_seconds):
            return (
                f"the process was ended by {signal.Signals(-code).name}: more than {self.limits.cpu_seconds} s of processor time?"
            )
        return f"the process was ended by {signal.Signals(-code).name}" if code < 0 else f"the process exited with code {code}"

    def _end(self, reason: str) -> ChildDied:
        self._dead = reason
        self._kill()
        died = ChildDied(reason)
        died.is_late = self.is_late
        return died

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


# What a student's code can do where a wall is missing, after it removes the audit hook.
OPEN = {
    "landlock": "read the seed file, the submissions and your home, and change or delete submissions and grades",
    "system calls": "send what it reads over the network, and slow or end other programs of yours",
    "limits": "fill the memory and the disk",
}


def walls_here() -> dict[str, Any]:
    """The walls that stand around a child on this machine: one with an empty file says so."""
    with tempfile.TemporaryDirectory(prefix="evictionary-") as folder:
        os.chmod(folder, 0o755)
        (empty := Path(folder) / "empty.py").touch()
        with Child(empty, "empty") as child:
            return child.walls


def _student_error(reply: dict[str, Any]) -> StudentError:
    return StudentError(*(visible(str(reply.get(key, ""))[:2000]) for key in ("error", "message", "place")))
