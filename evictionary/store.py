"""Measurements that take hours: a plan, what is missing of it, units of work, processes, lines on the
disk, a table.

A plan names every measurement. Its units of work are shared out among
processes, and each measurement becomes one line of JSON. The file of the lines
grows only by whole lines, so a run that was killed goes on where it stopped.
"""

import contextlib
import functools
import json
import logging
import lzma
import os
import queue
import re
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from evictionary.errors import UsageError, require

RESULTS = "results.jsonl"
LOCK = ".lock"
PATIENCE = 300
"""Seconds to wait for a worker where a cluster has none."""

Line = dict[str, Any]
"""One measurement: the fields that identify it, its results, the versions of the software."""

Work = Sequence[tuple[Any, Sequence[Any]]]
"""Units of work, each with its parts. A part becomes one line."""


class Progress(NamedTuple):
    """Measurements done and planned in this run, a description
    of the last one, and the estimated seconds left.
    """

    done: int
    total: int
    text: str
    seconds_left: float


class Shard(NamedTuple):
    """One of the parts that a run is divided into, for a machine of its own: `number` of `of`, from 1."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    @classmethod
    def read(cls, text: str) -> "Shard":
        """The shard that '3/8' names. Raises ValueError for another text."""
        number, _, of = text.partition("/")
        shard = cls(int(number), int(of))
        if text != str(shard) or not 1 <= shard.number <= shard.of:
            raise ValueError(text)
        return shard


WHOLE = Shard(1, 1)


class Plan(ABC):
    """What is to be measured. A dataclass of the settings
    inherits from it, and travels to the processes that measure.
    """

    model: str
    IDENTITY: ClassVar[tuple[str, ...]]
    """The fields that identify a line."""

    @abstractmethod
    def work(self) -> Iterable[tuple[Any, Sequence[Any]]]:
        """Every unit of work with its parts, in the order in which they are measured."""

    @abstractmethod
    def named(self, unit: Any, part: Any) -> Mapping[str, Any]:
        """The fields that identify the line of a part, without the model."""

    @abstractmethod
    def measure(self, unit: Any, parts: Sequence[Any]) -> Iterator[Line]:
        """Measure some parts of a unit, and yield the line of each."""

    @abstractmethod
    def text(self, line: Line) -> str:
        """A description of a line, for the progress."""

    @classmethod
    def subject(cls, line: Mapping[str, Any]) -> str:
        """What a line is a measurement of, in words. All lines of a folder have one subject."""
        return line["model"]

    def alike(self, unit: Any) -> Any:
        """A sorting key that units have in common if they
        take equally long: each shard has its share of them.
        """
        return 0

    @classmethod
    def conditions(cls, line: Line) -> dict[str, Any]:
        """What the lines of one run have in common beside its settings: the versions of the software."""
        return line.get("versions", {"evictionary": "unknown"})

    def common(self) -> dict[str, Any]:
        """The fields that every line of this plan has."""
        return {"model": self.model}

    def in_worker(self) -> "Plan":
        """The plan as one of several processes carries it out."""
        return self

    @classmethod
    def order(cls, line: Line) -> list[Any]:
        """The sorting key of the file: the fields of the identity in turn, None last."""
        values = (line[name] for name in cls.IDENTITY)
        return [
            (value is None, json.dumps(value, sort_keys=True) if isinstance(value, dict) else value)
            for value in values
        ]

    @classmethod
    def identify(cls, line: Line) -> str:
        """The identity of a line of a file. Raises KeyError
        or ValueError for a line that is no such measurement.
        """
        return cls.key(line)

    @classmethod
    def key(cls, fields: Mapping[str, Any]) -> str:
        """The fields of an identity, as JSON."""
        return json.dumps([fields[name] for name in cls.IDENTITY], sort_keys=True)

    def is_done(self, line: Line, part: Any) -> bool:
        """Whether a line that is there still counts: a measurement that failed is tried again."""
        return line.get("error") is None

    def check(self, folder: Path, found: Mapping[str, Line], work: Work) -> None:
        """Raise UsageError, before hours of work, for lines of the folder or for work that cannot be used."""
        return

    def share(self, shard: Shard) -> Work:
        """The units of a shard, with their parts. They depend on the plan alone, and never on the machine.

        Units that take equally long are dealt to the shards in turn. The order of the work stays.
        """
        work = list(self.work())
        dealt = sorted(range(len(work)), key=lambda index: self.alike(work[index][0]))
        return [work[index] for index in sorted(dealt[shard.number - 1 :: shard.of])]

    def key_of(self, unit: Any, part: Any) -> str:
        """The identity of the line of a part."""
        return self.key({"model": self.model, **self.named(unit, part)})

    def missing(self, found: Mapping[str, Line], shard: Shard = WHOLE) -> Work:
        """The units of a shard that are not finished, each with the parts that it lacks."""

        def lacks(unit: Any, part: Any) -> bool:
            line = found.get(self.key_of(unit, part))
            return line is None or not self.is_done(line, part)

        units = [(unit, [part for part in parts if lacks(unit, part)]) for unit, parts in self.share(shard)]
        return [(unit, parts) for unit, parts in units if parts]


def run(
    plan: Plan,
    folder: Path,
    *,
    shard: Shard = WHOLE,
    jobs: int = 1,
    dask: str | None = None,
    patience: float = PATIENCE,
    advance: Callable[[Progress], None] = lambda progress: None,
    tell: Callable[[str], None] = lambda text: None,
    name: str = RESULTS,
) -> list[Line]:
    """Measure what the file `name` of a folder lacks of a shard
    of the plan, and return every line of that file, sorted.

    `jobs` processes share the units. `dask` sends them to Dask workers instead: it is a scheduler's address,
    or "local" for a cluster of `jobs` workers on this machine. Where a cluster has no worker, `tell` is told,
    and one is waited for `patience` seconds. One process stores each line at once; several processes store
    each unit at once. Raises UsageError for an unusable folder or cluster, and for a folder with the results
    of another model; OSError where a worker died, none came, or the scheduler is gone: what was stored stays.
    """
    require(jobs >= 1, f"jobs: got {jobs}, wanted at least 1")
    path = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder):
        found = read(path, plan.identify)
        subject = plan.subject(plan.common())
        others = {plan.subject(line) for line in found.values() if "model" in line} - {subject}
        require(
            not others,
            f"output: {folder} holds the results of {', '.join(sorted(others))}, wanted a folder for "
            f"{subject}",
        )
        work = plan.missing(found, shard)
        plan.check(folder, found, work)
        total = sum(len(parts) for _, parts in work)
        start, done = time.perf_counter(), 0
        for lines in _measured(plan, work, jobs, dask, patience, tell):
            for line in lines:
                append(path, line)
                found[plan.identify(line)] = line
            done += len(lines)
            left = (time.perf_counter() - start) / done * (total - done)
            advance(Progress(done, total, plan.text(lines[-1]), left))
        every = sorted(found.values(), key=plan.order)
        write(path, every)  # the order of the file does not depend on which process was faster
    return every


# Files
# ---------------------------------------------------------------------------------------------------------


def read(path: Path, identify: Callable[[Line], str]) -> dict[str, Line]:
    """The lines of a file by their identity; of several lines with one identity, the last.

    The lines of a file that is stored as `path`.xz come first. An incomplete last line, from a write that was
    cut off, is removed from the file. Raises UsageError for any other line that `identify` refuses.
    """
    packed, texts = path.with_name(f"{path.name}.xz"), {}
    if packed.exists():
        texts[packed] = lzma.decompress(packed.read_bytes())
    if path.exists():
        data = path.read_bytes()
        texts[path], _, cut_off = data.rpartition(b"\n")
        if cut_off:
            os.truncate(path, len(data) - len(cut_off))
    found = {}
    for file, whole in texts.items():
        for number, text in enumerate(whole.splitlines(), start=1):
            try:
                line = json.loads(text)
                found[identify(line)] = line
            except (ValueError, TypeError, KeyError):
                raise UsageError(
                    f"output: line {number} of {file} is no measurement; wanted a file that this command "
                    "wrote: delete that "
                    "line, and what it said is measured again"
                ) from None
    return found


def append(path: Path, line: Line) -> None:
    """Append one line in one write, and return when it is on the disk."""
    data = (json.dumps(line) + "\n").encode()
    with path.open("ab", buffering=0) as file:
        require(
            file.write(data) == len(data),
            f"{path}: a line could not be written whole; is the disk full?",
            OSError,
        )
        os.fsync(file.fileno())


def write(path: Path, lines: Iterable[Line]) -> None:
    """Replace the file by these lines."""
    put(path, "".join(json.dumps(line) + "\n" for line in lines))


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A path to write to. The file takes the place of `path` at the end, completely or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(f"{path} cannot be written: {error.strerror}") from error


def put(path: Path, content: str | bytes) -> None:
    """Write the file, completely or not at all."""
    with replaced(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lock the folder: two runs in one folder would measure
    everything twice. A killed run leaves no lock behind.
    """
    import filelock

    try:
        with filelock.FileLock(folder / LOCK, timeout=0):
            yield
    except filelock.Timeout:
        raise UsageError(f"output: {folder} is being written by another run, wanted another folder") from None


# Processes
# -----------------------------------------------------------------------------------------------------


DIED = "a worker process died, perhaps for lack of memory: the same command goes on, with "


def _measured(
    plan: Plan, work: Work, jobs: int, dask: str | None, patience: float, tell: Callable[[str], None]
) -> Iterator[Sequence[Line]]:
    """Yield the lines: one at a time from this process, a unit at a time from another one."""
    if not work:
        return
    if dask is not None:
        yield from _by_dask(plan, work, jobs, dask, patience, tell)
    elif jobs > 1:
        yield from _by_processes(plan, work, jobs)
    else:
        for unit, parts in work:
            yield from ([line] for line in plan.measure(unit, parts))


def _by_processes(plan: Plan, work: Work, jobs: int) -> Iterator[Sequence[Line]]:
    import joblib

    calls = (joblib.delayed(_measure_in_child)(plan, unit, parts) for unit, parts in work)
    with joblib.parallel_config(backend="loky", n_jobs=jobs):
        try:
            yield from joblib.Parallel(return_as="generator_unordered", batch_size=1)(calls)
        except BrokenProcessPool as error:
            raise OSError(f"{DIED}fewer --jobs") from error


def _by_dask(
    plan: Plan, work: Work, jobs: int, dask: str, patience: float, tell: Callable[[str], None]
) -> Iterator[Sequence[Line]]:
    with contextlib.ExitStack() as stack:
        client = _client(jobs, dask, stack)
        from distributed import CancelledError, KilledWorker

        # joblib's own adapter of Dask waits for ever for a unit whose workers died.
        done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        units = {client.submit(measure_apart, plan, unit, parts, pure=False) for unit, parts in work}
        for each in units:
            each.add_done_callback(done.put)
        while units:
            try:
                each, lines = _next(done, client, patience, tell)
            except KilledWorker as error:
                fewer = "fewer --jobs" if dask == "local" else "more memory for each worker or fewer of them"
                raise OSError(f"{DIED}{fewer}") from error
            except CancelledError as error:
                raise OSError(
                    f"the Dask scheduler at {client.scheduler.address} is gone: the same command goes on, "
                    "once there is one"
                ) from error
            units.remove(each)
            yield lines


def _next(done: Any, client: Any, patience: float, tell: Callable[[str], None]) -> tuple[Any, list[Line]]:
    """The next unit that ended, and its lines. Raises what it raised."""
    since = None
    while True:
        with contextlib.suppress(queue.Empty):
            unit = done.get(timeout=1)
            try:
                return unit, unit.result(timeout=5)
            except TimeoutError:
                if unit.status == "error":
                    raise
                unit.add_done_callback(done.put)  # its lines went with their worker, and it is measured again
        if _can_work(client):
            since = None
        elif since is None:
            since = time.monotonic()
            tell(
                f"no Dask worker at {client.scheduler.address} takes work: none is there, they died, or "
                f"their memory is full (dask worker --memory-limit 0); waiting for {patience:g} s"
            )
        elif time.monotonic() - since > patience:
            raise OSError(
                f"no Dask worker at {client.scheduler.address} took work for {patience:g} s: start some, "
                "such as `dask worker` with that address, and the same command goes on"
            )


def _can_work(client: Any) -> bool:
    """Whether a cluster has a worker that takes work; so too where its scheduler is gone, which the units
    are told of.
    """
    try:
        workers = client.scheduler_info()["workers"].values()
    except (OSError, RuntimeError):
        return True
    return any(worker.get("status", "running") == "running" for worker in workers)


_one_at_a_time = threading.Lock()
"""A Dask worker may run several threads, but they would share one model and its attention."""


def measure_apart(plan: Plan, unit: Any, parts: Sequence[Any]) -> list[Line]:
    """The lines of a unit, measured in a worker. What a method prints there goes to standard error: the
    standard output of the command may be JSON.
    """
    with _one_at_a_time, contextlib.redirect_stdout(sys.stderr):
        return list(plan.in_worker().measure(unit, parts))


def _measure_in_child(plan: Plan, unit: Any, parts: Sequence[Any]) -> list[Line]:
    """The same in a process of this run, which ends with it. A Dask worker may outlive what started it."""
    end_with_parent()
    return measure_apart(plan, unit, parts)


@functools.cache
def end_with_parent() -> None:
    """End this process soon after the process that started
    it, even after SIGKILL: each worker holds a model.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _client(jobs: int, dask: str, stack: contextlib.ExitStack) -> Any:
    """A client of the cluster; `stack` closes it."""
    try:
        from distributed import Client, LocalCluster
        from distributed.utils import silence_logging_cmgr
    except ImportError:
        raise UsageError(
            f"dask: got {dask!r} but Dask is not installed, wanted it, from a clone: pip install "
            "'path/to/the/clone[cluster]'"
        ) from None
    # What Dask logs of a death or a lost connection is said in a sentence.
    stack.enter_context(silence_logging_cmgr(logging.CRITICAL))
    if dask == "local":
        cluster = LocalCluster(
            n_workers=jobs,
            threads_per_worker=1,
            dashboard_address=None,
            memory_limit=0,  # Dask would pause or end a worker for the size of its model
            scheduler_kwargs={"allowed_failures": 0},
            silence_logs=logging.CRITICAL,
        )
        return stack.enter_context(Client(stack.enter_context(cluster)))
    try:
        return stack.enter_context(Client(dask, timeout=10))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"dask: got {dask!r}, wanted 'local' or the address of a scheduler that answers: {error}"
        ) from None


# Tables
# --------------------------------------------------------------------------------------------------------


def grouped(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, list[Any]]:
    """The second of each pair, listed by the first, in their order."""
    found: dict[Any, list[Any]] = {}
    for name, value in pairs:
        found.setdefault(name, []).append(value)
    return found


def cell(value: object) -> str:
    """A cell of a Markdown table, its bars escaped."""
    return re.sub(r"(?<!\\)\|", r"\\|", str(value))


def table(head: Sequence[str], rows: Iterable[Sequence[object]], align: str = "") -> str:
    """A Markdown table, without a line break at its end.
    `align` has a letter for each column: l, or r for numbers.

    Columns without a letter take the last one. A bar inside a cell is escaped.
    """
    letters = (align or "l").ljust(len(head), (align or "l")[-1])
    first, *others = ["| " + " | ".join(map(cell, line)) + " |" for line in [head, *rows]]
    ruler = "|" + "|".join("--:" if letter == "r" else "---" for letter in letters) + "|"
    return "\n".join([first, ruler, *others])
