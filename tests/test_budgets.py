"""No room has more statements than its budget in budgets.toml."""

import ast
import tomllib

from tools import ROOT, run

BUDGETS = tomllib.loads((ROOT / "tests" / "budgets.toml").read_text(encoding="utf-8"))


def statements(name: str) -> int:
    tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
    return sum(isinstance(node, ast.stmt) for node in ast.walk(tree))


def test_no_room_has_more_statements_than_its_budget() -> None:
    """git names a link to a folder of the tree, and none of the files behind it."""
    names = run("git", "ls-files", "-z", "*.py").stdout.split("\0")
    files = {name: statements(name) for name in names if (ROOT / name).is_file()}
    counted = {
        room: sum(count for name, count in files.items() if room == "all" or name.startswith(f"{room}/"))
        for room in BUDGETS
    }
    assert counted["all"] > 10_000  # the files were found
    assert {room: count for room, count in counted.items() if count > BUDGETS[room]} == {}
