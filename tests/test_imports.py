"""Imports run one way: reference <- spec_tests, reference <- optimized, everything <- workbench."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

# What a package may not import, directly or through what it imports.
FORBIDDEN = {
    "reference": {"optimized", "spec_tests", "workbench", "torch", "triton", "transformers", "hypothesis", "pytest"},
    "spec_tests": {"optimized", "workbench", "transformers"},
    "optimized": {"spec_tests", "workbench", "transformers"},
}

# Import every module of a package in a fresh interpreter and print what came along.
PROGRAM = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
print("\\n".join({name.split(".")[0] for name in sys.modules}))
"""


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_imports_run_one_way(package: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, package], capture_output=True, text=True, check=True)
    assert not FORBIDDEN[package] & set(done.stdout.split())


def test_reference_imports_numpy_and_itself_alone() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, "reference"], capture_output=True, text=True, check=True)
    numpy_alone = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("walk_packages(package.__path__", "walk_packages([]"), "numpy"],
        capture_output=True,
        text=True,
        check=True,
    )
    extra = set(done.stdout.split()) - set(numpy_alone.stdout.split()) - set(sys.stdlib_module_names) - {"reference"}
    assert extra == set()


def test_every_optimized_stem_mirrors_a_reference_stem() -> None:
    import optimized
    import reference

    stems = {module.name for module in pkgutil.iter_modules(reference.__path__)}
    extra = {module.name for module in pkgutil.iter_modules(optimized.__path__)} - stems
    assert extra <= {"kernels"}
