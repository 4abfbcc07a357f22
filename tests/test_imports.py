"""What is imported where. `make lint` asks that imports run one way: pyproject.toml, `tool.importlinter`."""

import ast
import pkgutil
import re
import sys
import tomllib
from importlib.metadata import metadata

import pytest
from packaging.specifiers import SpecifierSet
from tools import ROOT, python, run

from evictionary import optimized, reference


def test_reference_imports_numpy_and_itself_alone() -> None:
    program = (
        "import importlib, pkgutil, sys\npackage = importlib.import_module(sys.argv[1])\n"
        "for module in pkgutil.walk_packages({}, package.__name__ + '.'):\n    "
        "importlib.import_module(module.name)\n"
        "print('\\n'.join({{name.split('.')[0] for name in sys.modules}}))"
    )
    ours, numpys = (
        set(python("-c", program.format(inside), package).stdout.split())
        for package, inside in (("evictionary.reference", "package.__path__"), ("numpy", "[]"))
    )
    assert ours - numpys - set(sys.stdlib_module_names) == {"evictionary"}


def test_optimized_needs_triton_for_its_kernels_alone() -> None:
    program = (
        "import importlib, pkgutil, sys; sys.modules['triton'] = None\n"
        "import torch; from evictionary import optimized\n"
        "for file in pkgutil.iter_modules(optimized.__path__):\n    "
        "file.name == 'teaching' or importlib.import_module('evictionary.optimized.' + file.name)\n"
        "assert optimized.keydiff.score(torch.ones(3, 4)).shape == (3,)\n"
        "assert not hasattr(optimized.kernels, 'nothing')\n"
        "optimized.kernels.keydiff"
    )
    assert "ModuleNotFoundError: import of triton halted" in python("-c", program, code=1).stderr


@pytest.mark.parametrize("room", ["reference", "optimized", "spec_tests"])
def test_no_module_exists_twice(room: str) -> None:
    assert f"import evictionary.{room}" in python("-c", f"import {room}", code=1).stderr


def test_no_file_imports_a_file_of_laws() -> None:
    laws = {path.stem for path in ROOT.glob("spec_tests/*/test_*.py")}
    assert [
        f"{path}:{node.lineno}"
        for path in run("git", "ls-files", "*.py").stdout.split()
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom) and laws & set(re.findall(r"\w+", ast.unparse(node)))
    ] == []


def test_every_optimized_stem_mirrors_a_reference_stem() -> None:
    extra = {module.name for module in pkgutil.iter_modules(optimized.__path__)} - {
        module.name for module in pkgutil.iter_modules(reference.__path__)
    }
    named = {"cpu", "flash", "gradients", "kernels", "momentkv_ragged", "operators", "softmax", "states"}
    named |= {"teaching"}
    assert extra <= named


def test_the_pinned_versions_install_on_the_oldest_python() -> None:
    oldest = (
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
        + ".0"
    )
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "requirements" / "tested.txt").read_text(), re.M)
    wanted = {name: metadata(name).get("Requires-Python", "") for name in pinned}
    assert pinned and not {name: range for name, range in wanted.items() if oldest not in SpecifierSet(range)}


def test_tab_completion_shows_what_to_use() -> None:
    program = "import evictionary; print([getattr(evictionary, name) and name for name in dir(evictionary)])"
    assert python("-c", program).stdout == (
        "['EvictingCache', '__version__', 'optimized', 'reference', 'spec_tests']\n"
    )


def test_make_help_lists_every_target() -> None:
    targets = re.findall(r"\S+", re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)[0])
    listed = [line.split()[0] for line in run("make", "--no-print-directory", "help").stdout.splitlines()]
    assert sorted(listed) == sorted(targets)
