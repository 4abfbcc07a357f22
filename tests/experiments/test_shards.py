"""A run on several machines: its shards are disjoint and equally heavy, one that was killed goes on, what is
joined is what one machine writes, and nothing else is joined.
"""

import json
import lzma
import shutil
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import filelock
import pytest
from tools import as_json, failed, invoke, printed, python, refused, saved, without_seconds

from evictionary import __version__, store
from evictionary.evaluation import run as evaluation, shards, study
from evictionary.store import Shard

HERE = {"evictionary": __version__, "torch": "2"}


@dataclass(frozen=True)
class Squares(store.Plan):
    """The square of each number; two numbers are a unit."""

    model: str = "numbers"
    numbers: Sequence[int] = range(20)

    IDENTITY = ("model", "number")

    def work(self) -> list[tuple[int, list[int]]]:
        return [(number, [number, number + 1]) for number in self.numbers[::2]]

    def named(self, unit: int, part: int) -> dict[str, int]:
        return {"number": part}

    def measure(self, unit: int, parts: Sequence[int]) -> Iterator[store.Line]:
        for part in parts:
            yield {"model": self.model, "number": part, "square": part * part, "versions": HERE}

    def text(self, line: store.Line) -> str:
        return str(line["number"])


def measured(output: Path, *numbers: int, of: int = 3, plan: Squares | None = None) -> list[Path]:
    """The folders of these shards, measured."""
    for number in numbers:
        shards.measure(plan or Squares(), output, Shard(number, of), "squares")
    return [shards.folder_of(output, Shard(number, of)) for number in numbers]


def joined(folders: Sequence[Path], output: Path, **how: Any) -> tuple[list[store.Line], list[str]]:
    return shards.join(shards.of_one_run(folders), Squares, output, **how)


def changed(folder: Path, **fields: Any) -> Path:
    """The folder, the first line of which has other fields."""
    path = folder / store.RESULTS
    first, *others = path.read_text().splitlines(keepends=True)
    path.write_text("".join([json.dumps(json.loads(first) | fields) + "\n", *others]))
    return folder


# The split
# ---------------------------------------------------------------------------------------------------------

PLANS = [
    evaluation.Plan("m", [("keydiff", {})], ["copy", "passkey7", "variables"], [500, 900], range(9), [0.5]),
    study.Plan("m", ["keydiff"], ["copy", "passkey7"], range(13), lengths=[500, 900]),
]


@pytest.mark.parametrize("of", [1, 2, 3, 5, 8, 100])
@pytest.mark.parametrize("plan", PLANS, ids=["eval", "study"])
def test_shards_are_disjoint_whole_and_alike(plan: evaluation.Plan | study.Plan, of: int) -> None:
    """Each has as many prompts of a length and task as any other, or one more: no machine waits for long."""
    every = [plan.share(Shard(number, of)) for number in range(1, of + 1)]
    units = [[unit for unit, _ in share] for share in every]
    assert Counter(unit for share in units for unit in share) == Counter(unit for unit, _ in plan.work())
    for length in plan.lengths:
        for task in plan.tasks:
            counts = [sum(unit[:2] == (task, length) for unit in share) for share in units]
            assert max(counts) - min(counts) <= 1
    order = [unit for unit, _ in plan.work()]
    assert all([unit for unit in order if unit in share] == share for share in units)
    assert plan.share(store.WHOLE) == plan.work()


def test_the_split_is_known() -> None:
    """Machines of different days and versions agree on it."""
    plan = replace(PLANS[0], tasks=["passkey7", "copy"], lengths=[900, 500], seeds=range(2))
    assert [unit for unit, _ in plan.share(Shard(2, 3))] == [
        ("passkey7", 900, 1),
        ("copy", 900, 0),
        ("copy", 500, 1),
    ]


def test_a_task_that_is_named_twice_is_measured_once() -> None:
    for plan in PLANS:
        assert replace(plan, tasks=[*plan.tasks, *plan.tasks]).work() == plan.work()


@pytest.mark.parametrize(
    "text", ["0/8", "9/8", "3", "a/b", "", "3/", "/8", "3/8/2", "-1/8", "03/8", "3 / 8", "٣/8"]
)
def test_what_is_no_shard_is_refused(text: str, tmp_path: Path) -> None:
    refused(lambda: Shard.read(text), error=ValueError)
    for command in ("eval", "study"):
        told = failed(command, "--shard", text, "--output", tmp_path / "out", code=2)
        assert (
            "'--shard'" in told
            and f"got {text!r}, wanted a shard" in told
            and "from 1/8 to 8/8" in told.replace("│ ", "")
        )
    assert not list(tmp_path.iterdir())


# Joined
# ---------------------------------------------------------------------------------------------------------


def test_the_shards_are_joined_to_what_one_machine_writes(tmp_path: Path) -> None:
    whole = store.run(Squares(), tmp_path / "whole")
    folders = measured(tmp_path, 3, 1, 2)
    lines, missing = joined(folders, tmp_path / "joined")
    assert lines == whole and missing == []
    wanted = (tmp_path / "whole" / store.RESULTS).read_bytes()
    assert (tmp_path / "joined" / store.RESULTS).read_bytes() == wanted
    # again, with a part that is there twice, and one that is packed
    copy = shutil.copytree(folders[0], tmp_path / "copy")
    path = folders[1] / store.RESULTS
    saved(path.with_name(f"{path.name}.xz"), lzma.compress(path.read_bytes()))
    path.unlink()
    joined([*folders, copy, copy, folders[2]], tmp_path / "joined")
    assert (tmp_path / "joined" / store.RESULTS).read_bytes() == wanted


def test_more_shards_than_work_are_joined_too(tmp_path: Path) -> None:
    folders = measured(tmp_path, *range(1, 13), of=12)
    assert joined(folders, tmp_path / "joined")[0] == store.run(Squares(), tmp_path / "whole")
    refused(lambda: joined(folders[-1:], tmp_path / "none", partial=True), "got no measurement")


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    folders = measured(tmp_path, 1, 3)
    path = folders[1] / store.RESULTS
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:4]) + '{"model": "cut o')
    wanted = "parts: got a run without 2/3, 2 of 6 measurements of 3/3, wanted all of it"
    refused(lambda: joined(folders, tmp_path / "joined"), wanted)
    assert not (tmp_path / "joined" / store.RESULTS).exists()
    lines, missing = joined(folders, tmp_path / "joined", partial=True)
    assert len(lines) == 12 and missing == ["2/3", "2 of 6 measurements of 3/3"]
    # the same commands go on, and the rest takes the place of the part
    folders = measured(tmp_path, 1, 2, 3)
    assert joined(folders, tmp_path / "joined") == (store.run(Squares(), tmp_path / "whole"), [])


def test_a_measurement_has_one_result(tmp_path: Path) -> None:
    folders = measured(tmp_path, 1, 2, 3)
    copy = changed(shutil.copytree(folders[1], tmp_path / "copy"), square=-1)
    wanted = r"got .*2-of-3 \(shard 2/3\) and .*copy \(shard 2/3\) with different results of "
    refused(lambda: joined([*folders, copy], tmp_path / "joined"), wanted)
    assert not (tmp_path / "joined" / store.RESULTS).exists()


@pytest.mark.parametrize(
    ("other", "of", "named"),
    [
        (Squares(numbers=range(18)), 3, "numbers"),
        (Squares("others", range(18)), 3, "model, numbers"),
        (Squares(), 4, "number of shards"),
    ],
)
def test_shards_of_different_runs_are_refused(other: Squares, of: int, named: str, tmp_path: Path) -> None:
    folders = measured(tmp_path / "a", 1, 2) + measured(tmp_path / "b", 3, of=of, plan=other)
    wanted = (
        rf"got .*a/1-of-3 \(shard 1/3\) and .*b/3-of-{of} .*, whose {named} differ, wanted shards of one run"
    )
    refused(lambda: joined(folders, tmp_path / "joined", partial=True), wanted)


def test_a_shard_goes_on_with_its_own_settings_alone(tmp_path: Path) -> None:
    measured(tmp_path, 2)
    before = (tmp_path / "2-of-3" / store.RESULTS).read_bytes()
    other = Squares(numbers=range(18))
    refused(lambda: measured(tmp_path, 2, plan=other), r"output: .*2-of-3 holds .* another run \(its numbers")
    assert (tmp_path / "2-of-3" / store.RESULTS).read_bytes() == before


@pytest.mark.parametrize(
    ("versions", "wanted"),
    [
        (HERE | {"torch": "1"}, "1-of-3 .* with torch 1 and .* with torch 2, wanted one of the two"),
        (HERE | {"evictionary": "0.0.1"}, r"1-of-3 .* with evictionary 0\.0\.1 and .* with evictionary"),
    ],
)
def test_lines_of_two_versions_are_refused(versions: dict[str, str], wanted: str, tmp_path: Path) -> None:
    folders = measured(tmp_path, 1, 2, 3)
    changed(folders[0], versions=versions)
    refused(lambda: joined(folders, tmp_path / "joined"), wanted)


def test_lines_of_an_older_evictionary_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HERE, "evictionary", "0.0.1")
    folders = measured(tmp_path, 1, 2, 3)
    refused(
        lambda: joined(folders, tmp_path / "joined"),
        rf"1-of-3 \(shard 1/3\) of evictionary 0\.0\.1, wanted {__version__}, which runs here",
    )


def test_an_output_with_other_lines_and_a_folder_that_is_no_shard_are_refused(tmp_path: Path) -> None:
    folders = measured(tmp_path, 1, 2, 3)
    store.run(Squares(numbers=range(30)), tmp_path / "other")
    before = (tmp_path / "other" / store.RESULTS).read_bytes()
    refused(lambda: joined(folders, tmp_path / "other"), "other holds 10 measurements that are in no part")
    assert (tmp_path / "other" / store.RESULTS).read_bytes() == before
    refused(lambda: joined(folders, folders[0]), "1-of-3, a shard, wanted a folder of its own")
    store.run(Squares(), folders[0])
    refused(lambda: joined(folders, tmp_path / "joined"), "with 20 measurements, wanted no more than its 8")
    with filelock.FileLock(folders[1] / store.LOCK):
        refused(lambda: joined(folders, tmp_path / "joined"), "2-of-3 is being written by another run")
    wanted = r"parts: got .*, wanted a folder that `--shard` wrote, with its shard\.json: "
    refused(lambda: shards.read(tmp_path / "nowhere"), wanted + "No such file")
    for text in ("{}", "[]", "no JSON", '{"shard": "4/3", "measurements": 1, "run": {}}'):
        saved(folders[2] / shards.ABOUT, text)
        refused(lambda: shards.read(folders[2]), wanted)


# The commands
# ---------------------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.suffix != ".lock"
    }


def test_a_study_of_three_shards_is_that_of_one_machine_byte_for_byte(
    model_folder: Path, tmp_path: Path
) -> None:
    asked = [
        *("study", "--model", model_folder, "--methods", "keydiff,random", "--allocators", "ada_kv"),
        *("--ratios", 0.5, "--tasks", "passkey7", "--lengths", 300, "--samples", 12, "--output"),
    ]
    found = as_json(*asked, tmp_path / "whole")
    parts = [as_json(*asked, tmp_path / "parts", "--shard", f"{number}/3") for number in (1, 2, 3)]
    assert [part["measurements"] for part in parts] == [8, 8, 8]
    assert printed("join", *(part["output"] for part in parts)).startswith("24 measurements")
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert json.loads((tmp_path / "parts" / "summary.json").read_text())["rows"] == found["rows"]
    assert as_json("join", *(part["output"] for part in parts))["parts"] == ["1/3", "2/3", "3/3"]


KILLED = """
import os
import signal
import time
from pathlib import Path

calls = Path(__file__).with_name("calls")


def score(keys):
    with calls.open("ab", buffering=0) as file:
        file.write(b".")
        call = file.tell()
    if call == DEADLY:
        time.sleep(2)  # what others have finished is stored
        os.kill(os.getpid(), signal.SIGKILL)
    return keys.sum(-1)
"""


def evaluated(model_folder: Path, mine: Path) -> list[object]:
    """A command of five prompts: those of a shard 1/2 are three. Each calls the method in two layers."""
    return [
        *("eval", "--model", model_folder, "--methods", mine, "--ratios", 0.5, "--tasks", "passkey7"),
        *("--lengths", 300, "--samples", 5, "--output"),
    ]


@pytest.mark.parametrize(
    "workers",
    [
        [],
        pytest.param(["--jobs", 2], marks=pytest.mark.slow),
        pytest.param(["--jobs", 1, "--dask", "local"], marks=pytest.mark.slow),
    ],
    ids=["one process", "two workers", "dask"],
)
def test_a_killed_shard_goes_on_and_is_joined(
    workers: list[object], model_folder: Path, tmp_path: Path
) -> None:
    """SIGKILL ends the process that measures the third of its prompts, and the same command goes on."""
    mine = saved(tmp_path / "mine.py", KILLED.replace("DEADLY", "5"))
    asked = evaluated(model_folder, mine)
    shard = [*asked, tmp_path / "parts", *workers, "--shard", "1/2"]
    died = python("-m", "evictionary", *shard, code=1 if workers else -signal.SIGKILL)
    if workers:
        assert "a worker process died, perhaps for lack of memory: the same command goes on" in died.stderr
    path = tmp_path / "parts" / "1-of-2" / store.RESULTS
    kept = path.read_text().splitlines()
    prompts = {json.loads(text)["seed"] for text in kept}
    assert prompts and len(prompts) < 3 + (not workers)
    told = failed("join", tmp_path / "parts" / "1-of-2", code=2)
    assert f"got a run without 2/2, {12 - len(kept)} of 12 measurements of 1/2, wanted all of it" in told
    printed(*shard)
    assert set(kept) <= set(path.read_text().splitlines()), "what was stored stays as it was"
    printed(*asked, tmp_path / "parts", "--shard", "2/2")
    found = as_json("join", tmp_path / "parts" / "1-of-2", tmp_path / "parts" / "2-of-2")
    assert found["missing"] == found["failures"] == [] and found["measurements"] == 20
    printed(*asked, tmp_path / "whole")
    read = [
        list(store.read(tmp_path / name / store.RESULTS, evaluation.Plan.identify).values())
        for name in ("parts", "whole")
    ]
    assert without_seconds(read[0]) == without_seconds(read[1])
    tables = [(tmp_path / name / "table.md").read_text() for name in ("parts", "whole")]
    assert tables[0] == tables[1] and (tmp_path / "parts" / "report.html").exists()


def test_a_joined_evaluation_is_that_of_one_machine_byte_for_byte(model_folder: Path, tmp_path: Path) -> None:
    """With the seconds of the whole run: its lines lie in the folders of the shards."""
    asked = evaluated(model_folder, Path("keydiff,lagkv:lag_size=16"))
    printed(*asked, tmp_path / "whole")
    lines = (tmp_path / "whole" / store.RESULTS).read_text().splitlines(keepends=True)
    for number in (1, 2):
        printed(*asked, tmp_path / "parts", "--shard", f"{number}/2")
        path = tmp_path / "parts" / f"{number}-of-2" / store.RESULTS
        seeds = {json.loads(text)["seed"] for text in path.read_text().splitlines()}
        path.write_text("".join(text for text in lines if json.loads(text)["seed"] in seeds))
    told = printed("join", tmp_path / "parts" / "1-of-2", tmp_path / "parts" / "2-of-2")
    assert told.startswith("25 measurements")
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_a_file_that_was_edited_between_two_shards_is_refused(model_folder: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    asked = evaluated(model_folder, mine)
    for number in (1, 2):
        saved(mine, f"def score(keys):\n    return {number} * keys.sum(-1)\n")
        printed(*asked, tmp_path, "--shard", f"{number}/2")
    told = failed("join", tmp_path / "1-of-2", tmp_path / "2-of-2", code=2)
    assert "with the file of" in told and "measure the older again" in told


def test_a_method_that_fails_fails_its_shard_and_is_in_what_is_joined(
    model_folder: Path, tmp_path: Path
) -> None:
    mine = saved(tmp_path / "mine.py", "def score(keys):\n    raise RuntimeError('not yet')\n")
    asked = evaluated(model_folder, mine)
    for number in (1, 2):
        done = invoke(*asked, tmp_path, "--shard", f"{number}/2", "--json")
        assert done.exit_code == 1 and json.loads(done.stdout)["failures"][0]["count"] == 4 - number
    found = as_json("join", tmp_path / "1-of-2", tmp_path / "2-of-2")
    assert [each["count"] for each in found["failures"]] == [5] and found["missing"] == []
    assert "failed" in (tmp_path / "table.md").read_text()


def test_parts_of_several_folders_need_an_output(tmp_path: Path) -> None:
    folders = measured(tmp_path / "a", 1) + measured(tmp_path / "b", 2)
    assert "--output: got none for parts in 2 folders" in failed("join", *folders, code=2)
    told = failed("join", *folders, "--output", tmp_path / "out", code=2)
    assert "parts: the command: got 'squares', wanted one of eval, study" in told
