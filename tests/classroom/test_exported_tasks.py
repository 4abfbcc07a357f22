"""`evictionary tasks`: each file is short, needs NumPy and torch alone, and gives the numbers of the
reference. `python -m conformance.verifiers --read` has flashinfer-bench, which is no dependency, run them.
"""

import ast
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from tools import as_json, failed, says

from evictionary.classroom import standalone, tasks
from evictionary.reference.contract import contracts, states
from evictionary.spec_tests.judge.implementation import oracle

torch = pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]

# Small enough to be quick, and longer than the windows.
SMALL = {
    "B": 1, "H_kv": 2, "H_q": 4, "D": 8, "D_v": 6, "T": 100, "M": 40, "S": 4, "L": 3, "N": 30, "P": 5, "n": 5,
    "C": 7, "hidden": 7, "k": 3, "R": 9, "kept": 20,
}  # fmt: skip


def small_tasks() -> list[tasks.Task]:
    with patch.object(tasks, "SIZES", SMALL):
        return tasks.tasks()


TASKS = small_tasks()


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_task_gives_the_numbers_of_the_reference(task: tasks.Task) -> None:
    scope: dict[str, Any] = {}
    with patch.object(tasks, "SIZES", SMALL), patch.object(tasks, "SHORT", {}):
        text, sizes = task.kernelbench(), task.sizes
    exec(text, scope)
    torch.manual_seed(0)
    inputs = scope["get_inputs"]()
    answers = scope["Model"](*scope["get_init_inputs"]())(*inputs)
    answers = answers if isinstance(answers, tuple) else (answers,)

    given = dict(zip((each.name for each in task.inputs), inputs, strict=True))
    function = {task.path.split(".")[1]: oracle(task.path)}
    wanted = eval(task.call, {"in_numpy": scope["in_numpy"], **states(), **function, **given})
    fields = wanted if isinstance(wanted, tuple) else (wanted,)
    for got, exact, spec in zip(answers, fields, task.outputs().values(), strict=True):
        rounded = torch.from_numpy(np.array(exact)).to(got.dtype)
        assert torch.equal(got, rounded) and got.isnan().sum() == 0
        assert list(got.shape) == [sizes[axis] for axis in spec["shape"]]
        assert str(got.dtype) == f"torch.{spec['dtype']}"


def test_every_method_has_a_task_at_every_dtype() -> None:
    methods = {
        path.split(".")[0] for path in contracts() if path.split(".")[1] in ("score", "select", "attend")
    }
    methods -= {"ada_kv", "keydiff_theory", "gvote_theory"}  # scores in float32 alone, and theory
    for dtype in tasks.DTYPES:
        assert methods <= {task.path.split(".")[0] for task in TASKS if task.dtype == dtype}
    assert {"ada_kv", "cake", "cam", "chunk_kv", "paging"} <= {task.path.split(".")[0] for task in TASKS}


@pytest.mark.parametrize("path", contracts())
def test_a_file_of_its_own_is_short_and_holds_no_check(path: str) -> None:
    text = standalone.standalone(path)
    tree = ast.parse(text)
    imported = [each for each in tree.body if isinstance(each, ast.Import | ast.ImportFrom)]
    names = {each.module if isinstance(each, ast.ImportFrom) else each.names[0].name for each in imported}
    assert {name.split(".")[0] for name in names} <= {*sys.stdlib_module_names, "numpy"}
    assert len(text) < 16_000 and "Raises" not in text
    assert not [each for each in ast.walk(tree) if isinstance(each, ast.Raise)]
    first = next(each for each in tree.body if isinstance(each, ast.FunctionDef))
    assert first.name == path.split(".")[1] or first.name == "score"  # a default is defined before
    exec(compile(tree, path, "exec"), {})


def test_the_page_says_how_many_and_how_long() -> None:
    made = tasks.tasks()
    page = " ".join((ROOT / "docs" / "verify.md").read_text(encoding="utf-8").split())
    paths = Counter(task.path for task in made)
    average = round(sum(len(task.reference()) for task in made) / len(made), -2)
    says(
        page,
        f"There are {len(paths)} functions. Of these {sum(each == 3 for each in paths.values())} read keys",
        f"The other {sum(each == 1 for each in paths.values())} read only scores",
        f"That makes {len(made)} tasks",
        f"It has {average:,.0f} characters on average",
        f"flashinfer-bench read all {len(made)} tasks",
    )


def test_comments_and_decisions_stay() -> None:
    text = standalone.standalone("gvote.nucleus")
    assert "# Decision: mass is relative to the sum of the row" in text
    assert "Fraction(str(p))" in text and "as_fraction" not in text


def test_the_files_are_what_both_benchmarks_read(tmp_path: Path) -> None:
    files = as_json("tasks", tmp_path, "--format", "flashinfer-bench", "--dtype", "bfloat16")
    (file,) = (each for each in files if "keydiff_score" in each)
    task = json.loads((tmp_path / file).read_text(encoding="utf-8"))
    assert [task["axes"][axis].get("value") for axis in task["inputs"]["keys"]["shape"]] == [
        None, 8, None, 128
    ]  # fmt: skip
    assert task["inputs"]["keys"]["dtype"] == "bfloat16"
    assert task["outputs"] == {"result": {"shape": ["B", "H_kv", "T"], "dtype": "float32"}}
    for each in files:
        definition = json.loads((tmp_path / each).read_text(encoding="utf-8"))
        lines = (tmp_path / each.replace("definitions", "workloads").replace(".json", ".jsonl")).read_text()
        workload = json.loads(lines)["workload"]
        assert list(workload["inputs"]) == list(definition["inputs"])
        assert set(workload["axes"]) == {
            name for name, axis in definition["axes"].items() if axis["type"] == "var"
        }
        stored = {one["path"] for one in workload["inputs"].values() if one["type"] == "safetensors"}
        assert all((tmp_path / path).is_file() for path in stored)


def test_a_dtype_that_no_task_has_is_refused(tmp_path: Path) -> None:
    said = failed("tasks", tmp_path, "--format", "kernelbench", "--dtype", "bf16", code=2)
    assert "--dtype: got 'bf16' (did you mean bfloat16?), wanted one of" in said
    assert not [*tmp_path.iterdir()]
