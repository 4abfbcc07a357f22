"""The store: what was measured is kept, whatever kills a run; files are written whole or not at all;
tables are Markdown.
"""

import json
import logging
import lzma
import os
import queue
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import filelock
import pytest
from distributed import Client, LocalCluster
from joblib.externals import loky
from tools import ends_with_its_parent, python, refused, saved

from evictionary import store
from evictionary.errors import UsageError


@dataclass(frozen=True)
class Powers(store.Plan):
    """Each power of each base; the base is a unit. A power of 0 fails."""

    model: str = "numbers"
    bases: Sequence[int] = (3, 2)
    exponents: Sequence[int] = (1, 2, 3)

    IDENTITY = ("model", "base", "exponent")

    def work(self) -> list[tuple[int, Sequence[int]]]:
        return [(base, self.exponents) for base in self.bases]

    def named(self, unit: int, part: int) -> dict[str, int]:
        return {"base": unit, "exponent": part}

    def measure(self, unit: int, parts: Sequence[int]) -> Iterator[store.Line]:
        print("measuring")
        for part in parts:
            yield {
                "model": self.model,
                **self.named(unit, part),
                "error": None if unit else "0 has no powers here",
                "power": unit**part,
                "process": os.getpid(),
            }

    def text(self, line: store.Line) -> str:
        return f"{line['base']} to the {line['exponent']}"


def powers(lines: Sequence[store.Line]) -> list[int]:
    return [line["power"] for line in lines]


def test_a_run_measures_what_is_missing_and_the_file_is_sorted(tmp_path: Path) -> None:
    told: list[store.Progress] = []
    path = tmp_path / "new" / "folder" / store.RESULTS
    store.run(Powers(exponents=(2,)), path.parent, advance=told.append)
    assert (told[-1].done, told[-1].total, told[-1].seconds_left) == (2, 2, 0)
    lines = store.run(Powers(), path.parent, advance=told.append)
    assert [f"{base} to the {power}" for base, power in ((3, 2), (2, 2), (3, 1), (3, 3), (2, 1), (2, 3))] == [
        each.text for each in told
    ]
    assert powers(lines) == [2, 4, 8, 3, 9, 27]
    before = path.read_bytes()
    assert [json.loads(text) for text in before.splitlines()] == lines
    assert store.run(Powers(), path.parent, advance=lambda progress: pytest.fail("measured again")) == lines
    assert path.read_bytes() == before
    assert len(store.run(Powers(bases=(5,)), path.parent)) == 9, "the lines of other plans stay"


PROGRAM = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = ["tests", "tests/experiments"]
from evictionary import store
from test_store import Powers

append, written = store.append, []

def append_and_die(path, line):
    if len(written) == 4:
        with path.open("ab") as file:
            file.write(b'{"model": "cut o')
        os.kill(os.getpid(), signal.SIGKILL)
    append(path, line)
    written.append(line)

store.append = append_and_die
store.run(Powers(), Path(sys.argv[1]))
"""


def test_a_killed_run_loses_nothing(tmp_path: Path) -> None:
    """It is killed in the middle of its fifth line. What it wrote has to be there as it is."""
    python("-c", PROGRAM, tmp_path, code=-signal.SIGKILL)
    *written, cut_off = (tmp_path / store.RESULTS).read_bytes().split(b"\n")
    assert len(written) == 4 and cut_off
    told: list[store.Progress] = []
    lines = store.run(Powers(), tmp_path, advance=told.append)
    assert powers(lines) == [2, 4, 8, 3, 9, 27] and all(json.loads(text) in lines for text in written)
    left = [(1, 2, "2 to the 2"), (2, 2, "2 to the 3")]
    assert [(each.done, each.total, each.text) for each in told] == left


def test_a_part_that_failed_is_measured_again(tmp_path: Path) -> None:
    plan = Powers(bases=(0, 1), exponents=(1,))
    assert [line["error"] for line in store.run(plan, tmp_path)] == ["0 has no powers here", None]
    told: list[store.Progress] = []
    assert len(store.run(plan, tmp_path, advance=told.append)) == 2
    assert [each.text for each in told] == ["0 to the 1"]


def test_two_processes_find_the_same_and_leave_the_standard_output_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Processes that an earlier run left write to the standard error of that run.
    loky.get_reusable_executor().shutdown()
    told: list[store.Progress] = []
    lines = store.run(Powers(), tmp_path, jobs=2, advance=told.append)
    assert powers(lines) == [2, 4, 8, 3, 9, 27]
    assert os.getpid() not in {line["process"] for line in lines}
    # A process hands over a whole unit: told line by line, the first would seem to have taken all of the
    # time.
    assert [each.done for each in told] == [3, 6]
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err.count("measuring") == 2


# Dask
# ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Deadly(Powers):
    """The unit 7 ends the process that measures it, as the system does for lack of memory."""

    def measure(self, unit: int, parts: Sequence[int]) -> Iterator[store.Line]:
        if unit == 7:
            os._exit(1)
        yield from super().measure(unit, parts)


@contextmanager
def cluster_of(workers: int) -> Iterator[Any]:
    """A cluster that gives a unit up with the first worker that it kills."""
    with LocalCluster(
        n_workers=workers,
        threads_per_worker=1,
        dashboard_address=None,
        scheduler_kwargs={"allowed_failures": 0},
        silence_logs=logging.CRITICAL,
    ) as cluster:
        yield cluster


def test_a_dead_worker_ends_the_run_with_a_sentence_and_the_same_command_goes_on(tmp_path: Path) -> None:
    first = store.run(Powers(bases=(3, 2)), tmp_path)
    with cluster_of(1) as cluster:
        address = cluster.scheduler_address
        refused(
            lambda: store.run(Deadly(bases=(3, 2, 7)), tmp_path, dask=address),
            "a worker process died, perhaps for lack of memory: the same command goes on, with more memory",
            OSError,
        )
        assert list(store.read(tmp_path / store.RESULTS, Powers.identify).values()) == first
        lines = store.run(Powers(bases=(3, 2, 7)), tmp_path, dask=address)
    assert len(lines) == 9 and [line for line in lines if line["base"] != 7] == first


def test_lines_that_went_with_their_worker_are_waited_for_no_longer(tmp_path: Path) -> None:
    """A unit may end and its worker die before the lines are fetched; Dask has it measured again."""
    unit = SimpleNamespace(status="finished", add_done_callback=lambda put: put(unit), result=Mock())
    unit.result.side_effect = [TimeoutError, ["lines"]]
    client = Mock(scheduler_info=lambda: {"workers": {}})
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    done.put(unit)
    assert store._next(done, client, 100, Mock()) == (unit, ["lines"])
    done.put(unit)
    unit.result.side_effect = TimeoutError
    refused(lambda: store._next(done, client, 0, Mock()), "took work for 0 s: start some", OSError)
    unit.status = "error"  # what was measured raised it itself
    refused(lambda: store._next(done, client, 100, Mock()), None, TimeoutError)


def test_a_dead_worker_of_this_machine_does_too(tmp_path: Path) -> None:
    for dask in ("local", None):
        refused(
            lambda dask=dask: store.run(Deadly(bases=(7, 3)), tmp_path, jobs=2, dask=dask),
            "a worker process died, perhaps for lack of memory: the same command goes on, with fewer --jobs",
            OSError,
        )


def test_a_cluster_without_workers_is_waited_for_no_longer_than_said(tmp_path: Path) -> None:
    told: list[str] = []
    with cluster_of(0) as cluster:
        refused(
            lambda: store.run(
                Powers(), tmp_path, dask=cluster.scheduler_address, patience=0, tell=told.append
            ),
            f"no Dask worker at {cluster.scheduler_address} took work for 0 s: start some",
            OSError,
        )
        (line,) = told
        assert line.startswith(f"no Dask worker at {cluster.scheduler_address} takes work")
        assert line.endswith("waiting for 0 s")

        def start(text: str) -> None:
            told.append(text)
            cluster.scale(1)

        assert len(store.run(Powers(), tmp_path, dask=cluster.scheduler_address, tell=start)) == 6
    assert len(told) == 2 and told[1].endswith(f"waiting for {store.PATIENCE} s")


def test_a_scheduler_that_goes_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    with cluster_of(1) as cluster:
        plan = Powers(bases=range(2, 200))
        address = cluster.scheduler_address
        refused(
            lambda: store.run(plan, tmp_path, dask=address, advance=lambda progress: cluster.close()),
            f"the Dask scheduler at {address} is gone: the same command goes on",
            OSError,
        )
    assert len(store.read(tmp_path / store.RESULTS, Powers.identify)) >= 3


def test_a_dask_worker_may_outlive_what_started_it(tmp_path: Path) -> None:
    """The shell of `dask worker --no-nanny &` closes, and the worker goes on."""
    with cluster_of(1) as cluster, Client(cluster) as client:
        store.run(Powers(), tmp_path, dask=cluster.scheduler_address)
        assert list(client.run(lambda: store.end_with_parent.cache_info().currsize).values()) == [0]


@pytest.mark.slow
def test_a_worker_ends_with_the_process_that_started_it() -> None:
    worker = (
        "import os, time\nfrom evictionary import store\nstore.end_with_parent()\nprint(os.getpid(), "
        "flush=True)\ntime.sleep(600)\n"
    )
    assert ends_with_its_parent(
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {worker!r}])\n"
    )


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with filelock.FileLock(tmp_path / store.LOCK), pytest.raises(UsageError, match="written by another run"):
        store.run(Powers(), tmp_path)
    store.run(Powers(), tmp_path)
    refused(
        lambda: store.run(Powers("others"), tmp_path),
        r"holds the results of numbers, wanted a folder for others",
    )
    path = tmp_path / store.RESULTS
    lines = path.read_text().splitlines(keepends=True)
    for text in ('{"model": 1}\n', "[]\n", "no JSON\n"):
        path.write_text(lines[0] + text)
        refused(lambda: store.run(Powers(), tmp_path), r"line 2 of .* is no measurement.* delete that line")
    refused(lambda: store.run(Powers(), tmp_path / "other", jobs=0), "jobs")
    refused(lambda: store.run(Powers(), tmp_path / "other", dask="no address"), "dask")


def test_the_last_of_two_lines_counts_and_a_line_that_was_cut_off_is_removed(tmp_path: Path) -> None:
    path = saved(
        tmp_path / store.RESULTS, '{"a": 1, "b": 1}\n{"a": 2, "b": 2}\n{"a": 1, "b": 3}\n{"a": 4, "b"'
    )
    assert [line["b"] for line in store.read(path, lambda line: line["a"]).values()] == [3, 2]
    store.append(path, {"a": 5, "b": 5})
    assert path.read_text().endswith('"b": 3}\n{"a": 5, "b": 5}\n')


def test_a_run_goes_on_from_a_packed_file(tmp_path: Path) -> None:
    path, packed = tmp_path / store.RESULTS, tmp_path / f"{store.RESULTS}.xz"
    lines = store.run(Powers(), tmp_path)
    packed.write_bytes(lzma.compress(path.read_bytes()))
    path.unlink()
    assert store.run(Powers(), tmp_path, advance=lambda progress: pytest.fail("measured again")) == lines
    path.write_text(json.dumps(lines[0] | {"power": 0}) + "\n")
    assert powers(list(store.read(path, Powers.identify).values())) == [0, 4, 8, 3, 9, 27]
    packed.write_bytes(lzma.compress(b"{}\n"))
    refused(lambda: store.run(Powers(), tmp_path), r"line 1 of .*\.xz is no measurement")


def test_a_file_that_cannot_be_written_is_named_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.html"
    store.put(page, "before")
    monkeypatch.setattr(store.os, "replace", Mock(side_effect=OSError(28, "No space left on device")))
    refused(lambda: store.put(page, "text"), r"page\.html cannot be written: No space left", OSError)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]


def test_a_table_is_markdown() -> None:
    assert store.table(["name", "a | b", "count"], [["x|y", "already \\| so", 3]], "lr").splitlines() == [
        "| name | a \\| b | count |",
        "|---|--:|--:|",
        "| x\\|y | already \\| so | 3 |",
    ]
    assert store.table(["none"], []) == "| none |\n|---|"
