"""What a command that takes longer is doing, on standard
error: a bar in a terminal, elsewhere a line now and then.

A command says `with doing("loading the model") as now:` and later `now("reading", 3, 10)`. What it calls may
say the same inside: there is one bar, and what is outside of it comes back.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console

# Seconds before the first line, and between two lines: at least, at most, and as a part of the time so far.
FIRST, LEAST, MOST, PART = 2.0, 5.0, 60.0, 0.1
# Seconds between two looks at what is done.
PAUSE = 0.25

console = Console(stderr=True)
is_quiet = False


@dataclass(frozen=True)
class Step:
    """What is being done since a time: a text, how much of it is done, of how much, in which unit, and the
    seconds left where somebody knows them better.
    """

    text: str
    since: float
    done: Callable[[], float] = lambda: 0
    total: float | None = None
    unit: str = ""
    left: float | None = None

    def far(self, now: float) -> str:
        """How far it is, as `3 of 10 tokens, 8 s left`, or the time so far where nobody knows the number."""
        if not self.total:
            return duration(now - self.since)
        done = min(self.done(), self.total)
        left = self.left
        if left is None and done:
            left = (now - self.since) / done * (self.total - done)
        ahead = "" if left is None else f", {duration(left)} left"
        return f"{done:,.0f} of {self.total:,.0f}{self.unit}{ahead}"


class Doing:
    """What a command is doing now. `tell` is given the line of a log file, whenever one is due."""

    def __init__(
        self, text: str, tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tell, self._clock, self._lock = tell, clock, threading.Lock()
        self._began, self._told = clock(), -1.0
        self.step = Step(text, self._began)

    def __call__(
        self,
        text: str,
        done: float | Callable[[], float] = 0,
        total: float | None = None,
        unit: str = "",
        left: float | None = None,
    ) -> None:
        """Say what is done from now on. The time of a step that goes on is that of its beginning."""
        goes_on = total and not callable(done) and done and self.step.total
        since = self.step.since if goes_on else self._clock()
        count = done if callable(done) else lambda: done
        self.step = Step(text, since, count, total, unit, left)
        self.tick()

    def tick(self) -> None:
        """Tell the line, where one is due."""
        with self._lock:
            now = self._clock()
            so_far = now - self._began
            due = FIRST if self._told < 0 else self._told + min(MOST, max(LEAST, PART * so_far))
            if so_far < due:
                return
            self._told = so_far
        with contextlib.suppress(OSError, ValueError):  # standard error was closed
            self._tell(f"{self.step.text} ({self.far()})")

    def far(self) -> str:
        return self.step.far(self._clock())


_shown: Doing | None = None


@contextlib.contextmanager
def doing(text: str) -> Iterator[Doing]:
    """Say on standard error what is being done inside, once it takes two seconds."""
    global _shown
    if _shown is not None:
        before = _shown.step
        _shown(text)
        try:
            yield _shown
        finally:
            _shown.step = before
        return
    # the standard error of now: the bar stays visible while it is redirected
    console.file = sys.stderr
    is_bar = console.file.isatty() and os.environ.get("TERM") != "dumb"
    try:
        with _bar(text) if is_bar and not is_quiet else _lines(text) as (_shown, tick), _ticking(tick):
            yield _shown
    finally:
        _shown = None
        console.file = None  # type: ignore[assignment]


def tracked(items: Iterable[Any], total: int, text: str) -> Iterator[Any]:
    """The items, with progress."""
    with doing(text) as now:
        now(text, 0, total)
        for done, item in enumerate(items, start=1):
            now(text, done, total)
            yield item


def duration(seconds: float) -> str:
    """`8 s`, `12 min` or `3.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


@contextlib.contextmanager
def _lines(text: str) -> Iterator[tuple[Doing, Callable[[], None]]]:
    def tell(line: str) -> None:
        if not is_quiet:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    now = Doing(text, tell)
    yield now, now.tick


@contextlib.contextmanager
def _bar(text: str) -> Iterator[tuple[Doing, Callable[[], None]]]:
    # A command that shows no bar does not wait for the import.
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

    described = TextColumn("{task.description}", markup=False)
    columns = SpinnerColumn(), described, BarColumn(20), TextColumn("{task.fields[far]}")
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(text, total=None, far="")
        now = Doing(text, lambda line: None)

        def show() -> None:
            step = now.step
            done = step.done() if step.total else 0
            bar.update(task, description=step.text, completed=done, total=step.total, far=now.far())

        yield now, show


@contextlib.contextmanager
def _ticking(tick: Callable[[], None]) -> Iterator[None]:
    """Call a function now and then beside what is done inside."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(PAUSE):
            tick()

    tick()
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
