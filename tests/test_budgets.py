"""No room has more statements than its budget in budgets.toml."""

import ast
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUDGETS = tomllib.loads((ROOT / "tests" / "budgets.toml").read_text(encoding="utf-8"))


def statements(room: str) -> int:
    """The statements of the Python files of a room, its folders included; links lead to files that are
    counted elsewhere.
    """
    pattern = "*.py" if room == "all" else f"{room}/*.py"
    listed = subprocess.run(
        ["git", "ls-files", "-z", pattern], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    files = [ROOT / name for name in listed.split("\0") if name.endswith(".py") and (ROOT / name).is_file()]
    return sum(
        isinstance(node, ast.stmt)
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    )


def test_no_room_has_more_statements_than_its_budget() -> None:
    counted = {room: statements(room) for room in BUDGETS}
    assert counted["all"] > 10_000  # the files were found
    assert {room: count for room, count in counted.items() if count > BUDGETS[room]} == {}
