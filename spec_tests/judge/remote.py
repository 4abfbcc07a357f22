"""A process that is asked over its two pipes: each wait has an end, and whoever gives no answer is said to
have given none.

The programs of `judge --exec`, the process that imports what is judged, and the child that runs a student's
file are one of these.
"""

import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NoReturn


class Gone(Exception):
    """The process gives no answer, and has been ended; the
    message says why, `is_late` whether it ran out of time.
    """

    def __init__(self, told: str, is_late: bool = False) -> None:
        super().__init__(told)
        self.is_late = is_late


class Remote:
    """A running process with pipes to its standard input and output, which is called `name` in messages.

    It may be waited for `seconds` in all, until `allow` gives it others; time that it waits for a processor
    does not count, because others have that one. cpu_seconds is its limit of processor time, if it has one.
    Unless stderr says where it goes, the end of what it writes there is part of the message where it ends.
    """

    def __init__(
        self, name: str, command: Sequence[str], seconds: float, *, cpu_seconds: int = 0, **settings: Any
    ) -> None:
        self.name, self.cpu_seconds, self.gone = name, cpu_seconds, ""
        self._words = None if "stderr" in settings else tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            **{"stderr": self._words, **settings},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out, self._unread = self._process.stdin, self._process.stdout, b""
        for pipe in (self._in, self._out):
            os.set_blocking(pipe.fileno(), False)
        self.pid = self._process.pid
        self.allow(seconds)

    def allow(self, seconds: float) -> None:
        """Wait for as long as this from now on."""
        self.seconds, self._waited, self._queued_before = seconds, 0.0, self.queued()

    @contextmanager
    def asking(self) -> Iterator[None]:
        """What stands inside sends a question and reads the answer; the clock runs. Raises Gone if there
        is no answer.

        Any other error ends the process too, also an alarm
        or Ctrl-C: half of an answer may be left in the pipe.
        """
        if self.gone:
            raise Gone(self.gone)
        self._since = time.monotonic()
        try:
            yield
        except BrokenPipeError:
            self.end(self._ending())
        except BaseException:
            self.gone = self.gone or f"{self.name} was interrupted in a call"
            self._kill()
            raise
        finally:
            self._waited += time.monotonic() - self._since

    def send(self, data: bytes) -> None:
        """Write all of it."""
        left = memoryview(data)
        while left:
            self._wait(self._in, selectors.EVENT_WRITE)
            left = left[os.write(self._in.fileno(), left[: 2**16]) :]

    def receive(self, count: int) -> bytes:
        """The next `count` bytes."""
        while len(self._unread) < count:
            self._read()
        found, self._unread = self._unread[:count], self._unread[count:]
        return found

    def line(self, longest: int) -> bytes:
        """The next line, of at most `longest` bytes, without its end."""
        while b"\n" not in self._unread:
            self._read()
            if len(self._unread) > longest:
                beginning = self._unread[:80].decode(errors="replace")
                self.end(f"printed {longest} bytes without the end of a line: {beginning!r}...")
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def unasked(self) -> bytes:
        """What it has written since the last line, without waiting for any."""
        with suppress(BlockingIOError):
            self._unread += os.read(self._out.fileno(), 4096)
        return self._unread

    def end(self, why: str, is_late: bool = False) -> NoReturn:
        """End it, and all that it has started in its session. Raises Gone with the name and the reason."""
        self.gone = f"{self.name} {why}"
        self._kill()
        raise Gone(self.gone, is_late)

    def close(self, patience: float = 0) -> None:
        """End it, after so many seconds in which it may end by itself, as the end of its input asks for."""
        with suppress(OSError, subprocess.TimeoutExpired):
            self._in.close()
            self._process.wait(timeout=patience)
        self._kill()
        self._process.wait()
        for file in (self._in, self._out, self._words):
            with suppress(OSError):  # what it had not read yet
                file and file.close()

    def _read(self) -> None:
        """Wait for more of its output, and keep it."""
        self._wait(self._out, selectors.EVENT_READ)
        part = os.read(self._out.fileno(), 2**20)
        if not part:
            self.end(self._ending())
        self._unread += part

    def _wait(self, pipe: IO[bytes], event: int) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, event)
            while True:
                taken = self._waited + time.monotonic() - self._since
                left = self.seconds + self.queued() - self._queued_before - taken
                if left <= 0:
                    self.end(f"did not answer within {self.seconds:g} s", is_late=True)
                if selector.select(left):
                    return

    def queued(self) -> float:
        """The seconds for which it was ready and others had
        the processors; 0 where the system does not say.
        """
        return self._scheduled()[1]

    def busy(self) -> float:
        """The seconds of processor time that it has taken, as the kernel counts them; 0 where the system
        does not say.

        The kernel adds them up when the process begins to wait: a moment after it has answered, up to a
        second on a full machine.
        """
        for _ in range(1000):
            time.sleep(0.001)
            with suppress(OSError):
                if (
                    " R "
                    not in Path(f"/proc/{self._process.pid}/stat")
                    .read_text(encoding="ascii")
                    .rpartition(")")[2]
                ):
                    break
        return self._scheduled()[0]

    def _scheduled(self) -> tuple[float, float]:
        try:
            busy, queued, _ = Path(f"/proc/{self._process.pid}/schedstat").read_text(encoding="ascii").split()
            return int(busy) / 1e9, int(queued) / 1e9
        except (OSError, ValueError):
            return 0.0, 0.0

    def _ending(self) -> str:
        """How it ended, and what it last wrote as an error."""
        try:
            told = f"ended with {ended(self._process.wait(timeout=5), self.cpu_seconds)}"
        except subprocess.TimeoutExpired:
            return "closed its standard output"
        if self._words is None:
            return told
        start = max(0, os.fstat(self._words.fileno()).st_size - 2000)
        words = os.pread(self._words.fileno(), 2000, start).decode(errors="replace").split("\n")
        words = [line.strip() for line in words if line.strip()][-3:]
        return told + (f"; its last words: {' | '.join(words)}" if words else "")

    def _kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def ended(code: int, cpu_seconds: int = 0) -> str:
    """What an exit code of a process says; cpu_seconds is its limit of processor time, if it has one."""
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    if cpu_seconds and name in ("SIGXCPU", "SIGKILL"):
        return f"signal {name}: more than {cpu_seconds} s of processor time?"
    return f"signal {name}" + (", as where a machine has no memory left" if name == "SIGKILL" else "")
