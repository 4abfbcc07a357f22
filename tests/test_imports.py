"""Imports run one way, in every folder, and nothing imports itself in a circle. The house is drawn in CONTRIBUTING.md."""

from __future__ import annotations

import ast
import graphlib
import pkgutil
import re
import subprocess
import sys
import tomllib
from importlib.metadata import metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

import evictionary
from evictionary import optimized, reference

ROOT = Path(__file__).parent.parent

ROOMS = [
    ("reference", "source", "errors"),
    ("store",),
    ("spec_tests.harness", "optimized.checks"),
    ("spec_tests.mutants", "optimized.states", "optimized.rope"),
    ("spec_tests.controls", "optimized.kernels"),
    ("optimized",),
    ("spec_tests",),
    ("tutorials",),
    ("models", "methods"),
    ("cache",),
    ("evaluation",),
    ("claims", "classroom"),
    ("cli",),
]
"""A file imports its own room and those above it in this list, never one beside or below it."""

APART = {"spec_tests": {"optimized", "transformers"}, "optimized": {"spec_tests", "transformers"}}
"""What a folder may not import at all, although the order would allow it."""


def files() -> dict[str, Path]:
    """Every module under evictionary, by its name without that prefix."""
    found = {}
    for folder in (ROOT / "evictionary", *(ROOT / name for name in ("reference", "optimized", "spec_tests"))):
        base = folder if folder.name == "evictionary" else folder.parent
        for path in folder.rglob("*.py"):
            parts = path.relative_to(base).with_suffix("").parts
            found[".".join(part for part in parts if part != "__init__")] = path
    found.pop("")
    return found


FILES = files()


def room_of(module: str) -> str | None:
    """The innermost room that a module stands in; `__main__` and the package itself stand in none."""
    inside = [name for names in ROOMS for name in names if module == name or module.startswith(f"{name}.")]
    return max(inside, key=len, default=None)


def imports(module: str) -> set[str]:
    """The modules of the project that a file imports, wherever in the file; for type checkers alone does not count."""
    path = FILES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    unread = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in unread:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = node.module or ""
            if node.level:
                steps = package.split(".")[: len(package.split(".")) - node.level + 1]
                start = ".".join(["evictionary", *steps, *([node.module] if node.module else [])])
            found |= {f"{start}.{alias.name}" for alias in node.names} | {start}
    return found


def own(names: set[str]) -> set[str]:
    return {name.removeprefix("evictionary.") for name in names} & set(FILES)


@pytest.mark.parametrize("module", sorted(module for module in FILES if room_of(module)))
def test_a_file_imports_its_own_room_and_those_before_it(module: str) -> None:
    place = {name: index for index, names in enumerate(ROOMS) for name in names}
    room = room_of(module)
    assert room is not None
    for imported in own(imports(module)):
        other = room_of(imported)
        assert other is None or other == room or place[other] < place[room], f"{module} imports {imported}"
    named = {each.removeprefix("evictionary.").split(".")[0] for each in imports(module)}
    assert not named & APART.get(module.split(".")[0], set())


def test_no_file_imports_itself_in_a_circle() -> None:
    graph = {module: own(imports(module)) - {module} for module in FILES}
    packages = {module for module, path in FILES.items() if path.name == "__init__.py"}
    # `from evictionary.reference import keydiff` names the package too, whose file imports nothing.
    graph = {module: {each for each in needed if each not in packages or graph[each]} for module, needed in graph.items()}
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_reference_imports_numpy_and_itself_alone() -> None:
    program = (
        "import importlib, pkgutil, sys\npackage = importlib.import_module(sys.argv[1])\n"
        "for module in pkgutil.walk_packages({}, package.__name__ + '.'):\n    importlib.import_module(module.name)\n"
        "print('\\n'.join({{name.split('.')[0] for name in sys.modules}}))"
    )

    def loaded(package: str, inside: str) -> set[str]:
        command = [sys.executable, "-c", program.format(inside), package]
        return set(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split())

    extra = loaded("reference", "package.__path__") - loaded("numpy", "[]") - set(sys.stdlib_module_names)
    assert extra == {"reference"}


def test_every_optimized_stem_mirrors_a_reference_stem() -> None:
    stems = {module.name for module in pkgutil.iter_modules(reference.__path__)}
    extra = {module.name for module in pkgutil.iter_modules(optimized.__path__)} - stems
    assert extra <= {"kernels", "states", "teaching"}


def test_a_light_import_stays_light() -> None:
    program = "import sys, evictionary.cli.app, evictionary.spec_tests.harness.law\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
    assert evictionary.__version__


def test_the_pinned_versions_install_on_the_oldest_python() -> None:
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=") + ".0"
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.M)
    wanted = {name: metadata(name).get("Requires-Python", "") for name in pinned}
    assert pinned and not {name: range for name, range in wanted.items() if oldest not in SpecifierSet(range)}
