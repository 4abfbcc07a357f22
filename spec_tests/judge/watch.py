"""What a worker does with a law that may end its process: it notes each call, and ends itself where a call
takes too long.

A worker notes each call before it makes it (`WATCH`); a call that takes too long ends the worker. Where a
worker dies, `Deaths` reads the note: the law at hand has failed, and others are asked by another worker. A
function that has ended `GIVEN_UP` workers is asked no more.
"""

import faulthandler
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from evictionary.spec_tests.judge.remote import ended

GIVEN_UP = 3
NO_MORE = f"is asked no more after {GIVEN_UP} laws without an answer"

# The libraries whose errors skip a test or draw another input: from a function, none is an answer.
ASKING = {"_pytest", "hypothesis", "unittest"}

_NOTE, _DUMP, _GIVEN_UP = "note", "dump", "given up"


class NotAsked(BaseException):
    """A law that is not asked, or has no answer: the message says why.

    No Exception: hypothesis would try again, and a law would take it for a refusal.
    """


class Watch:
    """Keeps an eye on the calls of this process: each has to
    end within `seconds`, without which nothing is watched.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._folder: Path | None = None
        self._note: IO[bytes] | None = None
        self._dump: IO[bytes] = os.fdopen(2, "wb", closefd=False)

    def begin(self, seconds: float, folder: Path | None = None, worker: str = "") -> None:
        """Watch from now on; in a worker, leave notes in files of its name in a folder."""
        self.seconds, self._folder = seconds, folder
        if folder is None:
            self._dump = os.fdopen(os.dup(2), "wb")
            return
        # Ctrl-C ends a worker at once, so that a KeyboardInterrupt in it is one that a function raises.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        self._note, self._dump = (
            (folder / f"{worker}.{name}").open("wb", buffering=0) for name in (_NOTE, _DUMP)
        )
        faulthandler.enable(self._dump)

    def call(self, path: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function of an implementation, with a note of what it is given."""
        if not self.seconds:
            return function(*args, **kwargs)
        if self._note is not None:
            os.pwrite(self._note.fileno(), _described_call(path, [*args, *kwargs.values()]).ljust(512), 0)
        faulthandler.dump_traceback_later(self.seconds, exit=True, file=self._dump)
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            homes = {each.__module__.partition(".")[0] for each in type(error).__mro__}
            if homes & ASKING or isinstance(
                error, (SystemExit, KeyboardInterrupt) if self._folder else SystemExit
            ):
                raise NotAsked(
                    f"it raised {type(error).__name__}({error}), which ends or skips a law"
                ) from error
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()

    def require_alive(self, column: str, functions: tuple[str, ...]) -> None:
        """Raise NotAsked for a law of a function that has ended too many processes."""
        given_up = self._folder and self._folder / _GIVEN_UP
        for line in (
            given_up.read_text(encoding="utf-8").splitlines() if given_up and given_up.exists() else []
        ):
            each, path, what = line.split("\t")
            if each == column and {path, "*"} & set(functions):
                raise NotAsked(f"{path} {NO_MORE}: {what}")


WATCH = Watch()


def _described_call(path: str, arguments: list[Any]) -> bytes:
    shapes = [tuple(each.shape) for each in arguments if hasattr(each, "shape")]
    return f"{path} of arrays of the shapes {', '.join(map(str, shapes))}".encode()[:512]


class Deaths:
    """What became of the workers that died: each has left its notes in the folder."""

    def __init__(self) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="evictionary-")
        self.folder = Path(self._temporary.name)
        self._counts: Counter[str] = Counter()

    def told(self, worker: Any, column: str) -> tuple[str, str]:
        """How a worker died, with the call that it was making,
        and the line of the implementation that it was at.
        """
        name = worker.gateway.id
        note = text_of(self.folder / f"{name}.{_NOTE}").strip()
        dump = text_of(self.folder / f"{name}.{_DUMP}")
        key = f"{column}\t{note.split(' ')[0]}"
        if slow := re.match(r"Timeout \((?:(\d+):(\d+):([\d.]+))\)", dump):
            hours, minutes, seconds = map(float, slow.groups())
            what = f"it did not answer within {3600 * hours + 60 * minutes + seconds:g} s, and was ended"
        else:
            what = f"it ended the process: {_ending(worker)}"
        self._counts[key] += 1
        if self._counts[key] == GIVEN_UP:
            with (self.folder / _GIVEN_UP).open("a", encoding="utf-8") as lines:
                lines.write(f"{key}\t{what}\n")
        return (f"{what} (asked for {note})" if note else what), _line_of(dump)


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _ending(worker: Any) -> str:
    """How the process of a worker ended; pytest-xdist itself says only that it did."""
    try:
        return ended(worker.gateway._io.popen.wait(timeout=5))
    except (AttributeError, subprocess.TimeoutExpired):
        return "nobody knows how"


def _line_of(dump: str) -> str:
    """The line of the implementation that a dump of
    faulthandler shows: the innermost of the watched thread.
    """
    thread = next((part for part in dump.split("\n\n") if f'{Path(__file__).name}"' in part), "")
    inner = thread.partition(f'{Path(__file__).name}"')[0]
    frames = re.findall(r'^  File "(.+)", line (\d+) in (.+)$', inner, flags=re.MULTILINE)
    own = [
        frame
        for frame in frames
        if "site-packages" not in frame[0] and not frame[0].startswith(sys.base_prefix)
    ]
    return "{}:{}, {}".format(*(own or frames)[0]) if frames else ""
