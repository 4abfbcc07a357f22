"""The rulers hold where they have a bound, their page shows them, and they count what they say."""

from pathlib import Path

import pytest
from tools import laid

from docs_build import pages
from tests.rulers import (
    Code,
    Definition,
    circles_of_imports,
    files,
    functions_of_the_rule,
    kinds_of_lines,
    lines_above_formula,
    lines_under_the_name,
    markdown,
    methods,
    rulers,
    way_to_the_kernel,
)

MATHEMATICS = '''"""A method of two functions."""

from .checks import require_few
from .length import length

METHOD = "keeps the longest keys"


@contract
def score(
    keys,
):
    """NO-1: `|k|`.

    Returns scores.
    """
    require_few(keys)
    if not keys:
        raise ValueError("no keys")
    # each by itself
    return [length(key) for key in keys]
'''
ENTRY = """from .kernels.launching import kernels_for
from .checks import require_few

def score(keys):
    require_few(keys)
    if kernels := _kernels(keys):
        return kernels.score(keys)
    return keys

def _kernels(keys):
    found = kernels_for("norm", keys)
    return found
"""
LAUNCHING = """import importlib

def kernels_for(stem, keys):
    if keys:
        return Launchers(importlib.import_module(stem))
    return None

class Launchers:
    pass
"""
KERNELS = """import triton

def score(keys):
    launch(add_up, keys)

@triton.jit
def add_up(keys):
    pass
"""
TREE = {
    "reference/norm.py": MATHEMATICS,
    "reference/length.py": "def length(key):\n    return key\n",
    "reference/checks.py": "def require_few(keys):\n    return len(keys)\n",
    "optimized/norm.py": ENTRY,
    "optimized/checks.py": "def require_few(keys):\n    pass\n",
    "optimized/kernels/__init__.py": "",
    "optimized/kernels/norm.py": KERNELS,
    "optimized/kernels/launching.py": LAUNCHING,
    "spec_tests/norm/mutants.toml": "[one]\n",
    "spec_tests/papers/test_norm_paper.py": "def test_one():\n    pass\n",
    "evictionary/__init__.py": "",
    "evictionary/one.py": "if TYPE_CHECKING:\n    from .three import Three\n",
    "evictionary/two.py": "def f():\n    from evictionary import one\n",
    "evictionary/three.py": "from evictionary.two import f\n",
    "evictionary/four.py": "from evictionary import three\n",
}


@pytest.fixture
def code(tmp_path: Path) -> Code:
    return Code(laid(tmp_path, TREE))


def test_what_was_reached_stays_reached() -> None:
    """Lower a bound in tests/rulers.py where the code has become better; write no code for a ruler."""
    assert [(one.what, one.today, one.made_of) for one in rulers() if not one.holds] == []


def test_a_kernel_is_found_for_every_method_that_has_one() -> None:
    """A new way to launch a kernel, which the ruler does not see, would count as none."""
    ways = next(one.made_of for one in rulers() if one.what.startswith("Where is a kernel of a method"))
    assert len(ways) >= 19 and all(
        way[-1].module.startswith("evictionary.optimized.kernels") for way in ways.values()
    )


def test_the_page_shows_every_ruler() -> None:
    page = (pages.ROOT / "docs" / "rulers.md").read_text(encoding="utf-8")
    assert markdown(rulers()) in pages.filled("rulers.md", page)


def test_lines_are_counted_by_their_kind(code: Code) -> None:
    assert methods(code) == ["norm"]
    assert lines_above_formula(code, "norm") == MATHEMATICS.splitlines().index(
        "    return [length(key) for key in keys]"
    )
    kinds = {"signature": 5, "docstring": 4, "check": 3, "comment": 1, "mathematics": 2}
    assert kinds_of_lines(code) == kinds
    assert lines_under_the_name(code, "norm") == sum(
        len(TREE[path].splitlines()) for path in TREE if "norm" in path
    )


def test_a_rule_is_the_functions_that_compute_it(code: Code) -> None:
    rule = [
        Definition("evictionary.reference.norm", "score"),
        Definition("evictionary.reference.length", "length"),
    ]
    assert functions_of_the_rule(code, "norm") == rule


def test_the_way_to_a_kernel_passes_what_finds_its_file(code: Code) -> None:
    way = way_to_the_kernel(code, "norm")
    assert [definition.name for definition in way] == [
        *("score", "_kernels", "kernels_for", "Launchers"),
        *("score", "add_up"),
    ]
    assert len(files(way)) == 3


def test_the_way_to_a_kernel_is_short_where_its_file_is_imported(tmp_path: Path) -> None:
    direct = "from . import kernels\n\ndef score(keys):\n    return kernels.norm.score(keys)\n"
    way = way_to_the_kernel(Code(laid(tmp_path, TREE | {"optimized/norm.py": direct})), "norm")
    assert [definition.name for definition in way] == ["score", "score", "add_up"]
    assert len(files(way)) == 2


def test_a_circle_is_seen_through_imports_for_types_and_inside_of_functions(code: Code) -> None:
    assert circles_of_imports(code) == [[f"evictionary.{name}" for name in ("one", "three", "two")]]
