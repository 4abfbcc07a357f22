"""The store: what was measured is kept, whatever kills a run; files are written whole or not at all;
tables are Markdown.
"""

import json
import lzma
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock

import filelock
import pytest
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
    told: list[store.Progress] = []
    lines = store.run(Powers(), tmp_path, jobs=2, advance=told.append)
    assert powers(lines) == [2, 4, 8, 3, 9, 27]
    assert os.getpid() not in {line["process"] for line in lines}
    # A process hands over a whole unit: told line by line, the first would seem to have taken all of the
    # time.
    assert [each.done for each in told] == [3, 6]
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err.count("measuring") == 2


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
