"""The parent's side of a child process that runs one student file: start it, call its functions, watch the
time, end it.
"""

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evictionary.classroom import sandbox, seccomp, worker
from evictionary.errors import require
from evictionary.spec_tests.judge import compiled, interpreted, wire
from evictionary.spec_tests.judge.remote import Gone, Remote

START_SECONDS = 120.0
BANNED = ("reference", "optimized", "spec_tests", "workbench", "evictionary", "__editable__", "tutorials",
    "kvpress", "pytest", "_pytest", "hypothesis")  # fmt: skip
# A message can carry the secret inputs out, so that it is short: with the kind of the error and its place,
# 500 characters.
LONGEST_MESSAGE, LONGEST_KIND, LONGEST_PLACE, MOST_FUNCTIONS = 500, 60, 160, 1000
# The answers of all assignments have at most 0.2 MiB; a failing law keeps several of them.
LARGEST_ANSWER = 4 * 2**20


def closed(site: Path) -> list[str]:
    """Folders that a child may never read: the clone that holds this file, and the installed package."""
    project = Path(worker.__file__).resolve().parents[2]
    folders = {
        site.resolve(),
        project,
        Path(sysconfig.get_path("purelib", vars={"base": sys.base_prefix})).resolve(),
    }
    entries = [each for folder in folders if folder.is_dir() for each in folder.iterdir()]
    found = [each for each in entries if re.split("[.-]", each.name)[0] in BANNED]
    # Installed, this file lies beside NumPy, which the child needs.
    return sorted(str(each) for each in [*found, *([] if project == site.resolve() else [project])])


def visible(text: Any) -> str:
    """A student's text with U+FFFD for control characters,
    half characters and whatever else cannot be shown.
    """
    return "".join(
        each if each.isprintable() or each in "\t\n\u00a0\u3000" else "\ufffd" for each in str(text)
    )


def clean(text: Any, longest: int = LONGEST_MESSAGE) -> str:
    """A student's text, visible and cut to `longest` characters."""
    shown = visible(str(text)[:longest])
    return (
        shown if len(str(text)) <= longest else f"{shown} ... and {len(str(text)) - longest} characters more"
    )


@dataclass(frozen=True)
class Limits:
    """The limits of a child for one requirement: seconds of waiting and of processor time, bytes of memory
    and of an answer.

    With each_call the seconds of waiting are those of one call.
    """

    wall_seconds: float = 20.0
    cpu_seconds: int = 20
    memory: int = 2 * 2**30
    answer: int = LARGEST_ANSWER
    each_call: bool = False


class StudentError(Exception):
    """The student's code raised something other than ValueError:
    `kind`, the message, and the line of the student's file.
    """

    def __init__(self, kind: str, message: str, place: str) -> None:
        kind, place = kind[:LONGEST_KIND], place[:LONGEST_PLACE]
        message = clean(message, LONGEST_MESSAGE - len(kind) - len(place) - len(":  ()"))
        super().__init__((f"{kind}: {message}" if message else kind) + (f" ({place})" if place else ""))


def as_tuple(name: str, fields: dict[str, Any]) -> Any:
    """What stands for a named tuple of the student's file where nobody knows the type: its fields alone."""
    return tuple(fields.values())


class Child:
    """One student file in a process of its own. Use it as a context manager; `functions` names the
    functions of the file.

    `needs` names walls without which the file is not loaded. `named` makes the named tuples of answers.
    `tried` takes what the audit hook refused to the code. `strict` is for code that nobody trusts, and names
    functions whose results have to be memory of their own: arguments come at the addresses of earlier ones,
    what torch allocates holds NaN, and a function of a library that the file replaces counts as tried.
    `allowed` are packages beside the library that the file may import, None of a student's file. `dtype` is
    that of the tensors that torch is given, empty for that of the arrays. `notes` takes what a call of strict
    code did: it changed a random generator, or answered in the memory of an argument or of its last answer.

    Raises StudentError if the file cannot be imported, Gone if the process gives no answer, and RuntimeError
    before any code of the file runs if a wall is missing.
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
        strict: tuple[str, ...] = (),
        needs: tuple[str, ...] = (),
        named: Callable[[str, dict[str, Any]], Any] = as_tuple,
        tried: set[str] | None = None,
        allowed: tuple[str, ...] | None = None,
    ) -> None:
        self.path, self.limits, self.named, self.needs = path.resolve(), limits, named, needs
        self.site = str(Path(np.__file__).parents[1])
        self.setup = {"path": str(self.path), "stem": stem, "library": library, "device": device} | {
            "interpret": interpret,
            "executor": compiled.__file__,
            "interpreter": interpreted.__file__,
            "allowed": allowed,
            "triton": compiled.folder() if device == compiled.DEVICE else "",
            "confine": confine,
            "strict": strict,
            "site": self.site,
            "cpu_seconds": limits.cpu_seconds,
            "memory": limits.memory,
        }
        self.tried = set() if tried is None else tried  # what the audit hook refused, as the child tells it
        self.functions: list[str] = []
        self.dtype = ""
        self.notes: set[str] = set()
        self.walls: dict[str, Any] = {}
        self.is_late = False

    def __enter__(self) -> "Child":
        if self.setup["confine"]:
            sandbox.hide()
        environment = {
            "PATH": "/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "HOME": str(self.path.parent),
            **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
            **({"TRITON_INTERPRET": "1"} if self.setup["interpret"] else {}),
        }
        self.remote = Remote(
            "the process",
            [sys.executable, "-I", "-S", "-B", worker.__file__, self.site, wire.__file__, sandbox.__file__],
            START_SECONDS,
            cpu_seconds=self.limits.cpu_seconds,
            stderr=subprocess.DEVNULL,
            cwd=self.path.parent,
            env=environment,
        )
        walls = {"banned": BANNED, "closed": closed(Path(self.site)), "filter": seccomp.program().hex()}
        try:
            try:
                self.walls = self._exchange(wire.frame({**self.setup, **walls}))[0]["walls"]
            except Gone as error:  # no code of the student has run yet
                raise RuntimeError(f"the child process did not start: {error}") from None
            lacking = [name for name in self.needs if not self.walls.get(name)]
            require(
                not lacking, f"a wall is missing that was there before: {', '.join(lacking)}", RuntimeError
            )
            self.remote.allow(self.limits.wall_seconds)  # importing torch is not the student's time
            reply, _ = self._exchange()
            if "error" in reply:
                raise _student_error(reply)
            if not isinstance(reply.get("functions"), list):
                self.remote.end(f"{UNREADABLE} (no list of functions)")
        except BaseException:
            self.remote.close()
            raise
        public = [
            name
            for name in reply["functions"]
            if isinstance(name, str) and name.isidentifier() and name[0] != "_"
        ]
        self.functions = public[:MOST_FUNCTIONS]
        return self

    def __exit__(self, *_: object) -> None:
        self.remote.close()

    def call(
        self, name: str, *args: Any, time_it: bool = False, change_launches: bool = False, **kwargs: Any
    ) -> Any:
        """Call a function of the student's file; with `time_it`, return its median milliseconds on a GPU.

        With `change_launches`, 1 is added to every number that a Triton kernel writes meanwhile, in the
        interpreter or as compiled code.

        A ValueError is raised unchanged, because laws expect
        it; any other exception is raised as StudentError.
        """
        if self.limits.each_call:
            self.remote.allow(self.limits.wall_seconds)
        asked = {"call": name, "keywords": list(kwargs), "time": time_it, "change launches": change_launches}
        asked |= {"dtype": self.dtype}
        reply, values = self._exchange(wire.frame(asked, [*args, *kwargs.values()]))
        if reply.get("value_error"):
            raise ValueError(clean(reply.get("message")))
        if "error" in reply:
            raise _student_error(reply)
        return values[0] if len(values) == 1 else self.remote.end(f"{UNREADABLE} ({len(values)} results)")

    def _exchange(self, frame: bytes = b"") -> tuple[dict[str, Any], list[Any]]:
        """Send a frame, if there is one, and wait for the next one."""
        try:
            with self.remote.asking():
                self.remote.send(frame)
                text, body = wire.sizes(self.remote.receive(16), self.limits.answer)
                reply, values = wire.read(self.remote.receive(text), self.remote.receive(body), self.named)
        except Gone as gone:
            self.is_late = self.is_late or gone.is_late
            raise (
                Gone(f"{gone}: an endless loop, or waiting for something?", True) if gone.is_late else gone
            ) from None
        except Exception as error:  # the student's process may have written anything into the pipe
            self.remote.end(f"{UNREADABLE} ({clean(error)})")
        noted = reply.get("memory")
        if isinstance(noted, list):
            self.notes |= {each for each in ("random", "argument", "next") if each in noted}
        told = reply.get("tried")
        if isinstance(told, list) and len(self.tried) < sandbox.MOST_TRIED:
            self.tried |= {
                clean(each, sandbox.LONGEST_TRIED)
                for each in told[: sandbox.MOST_TRIED]
                if isinstance(each, str)
            }
        return reply, values


UNREADABLE = "gave an answer that cannot be read"


# What a student's code can do where a wall is missing, after it removes the audit hook.
OPEN = {
    "landlock": "read the seed file, the submissions and your home",
    "system calls": "send what it reads over the network, and slow or end other programs of yours",
    "limits": "fill the memory and the disk",
}
# Each of these walls keeps all files as they are, grades among them. Without both nothing does.
KEEP_FILES = ("landlock", "system calls")


def walls_here() -> dict[str, Any]:
    """The walls that stand around a child on this machine: one with an empty file says so."""
    with tempfile.TemporaryDirectory(prefix="evictionary-") as folder:
        os.chmod(folder, 0o755)
        (empty := Path(folder) / "empty.py").touch()
        with Child(empty, "empty") as child:
            return child.walls


def _student_error(reply: dict[str, Any]) -> StudentError:
    return StudentError(*(visible(str(reply.get(key, ""))[:2000]) for key in ("error", "message", "place")))
