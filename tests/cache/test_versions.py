"""What one module knows of the versions of transformers, and the sentence for versions beyond the ranges."""

import ast
import re
import subprocess
import sys
import warnings
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from tools import ROOT
from tools.reading import IDS, generate
from transformers import DynamicCache, LlamaForCausalLM

from evictionary import EvictingCache, ranges
from evictionary.models import versions

INSTALLED = {"torch": "2.13.0+cpu", "transformers": "5.25.0", "numpy": "2.4.6", "mkdocs": "2.0"}
# Run before a door is opened: packages have a version that no test ran with.
BEYOND = """from importlib import metadata
real = metadata.version
metadata.version = lambda name: "99.0" if name in {names!r} else real(name)
"""
# What a user opens, each in a process of its own: its program, what it prints then, and the packages beside
# NumPy that it needs.
LAWS = ["--pyargs", "evictionary.spec_tests.keydiff", "--impl", "reference", "--collect-only", "-q"]
DOORS = {
    "cache": (
        "from evictionary import EvictingCache as found; print(found)",
        "EvictingCache",
        "transformers",
    ),
    "kernels": (
        "from evictionary.optimized import keydiff as found; print(found)",
        "keydiff",
        "torch triton",
    ),
    "command": ("from evictionary.cli.app import app; app(['methods'])", "keydiff", "typer rich"),
    "pytest": (f"import pytest; pytest.main({LAWS})", "test_keydiff.py", "hypothesis pytest"),
}


def version(name: str) -> str:
    if name not in INSTALLED:
        raise metadata.PackageNotFoundError(name)
    return INSTALLED[name]


def test_a_version_beyond_the_ranges_is_named_with_the_range() -> None:
    asked = ["transformers<5.25,>=5.17; extra == 'model'", "torch<2.16,>=2.11", "numpy>=2", "gguf>=0.17"]
    asked += ["mkdocs<2; extra == 'docs'"]  # which no user of the package runs
    assert ranges.untried(asked, version) == ["transformers 5.25.0 is installed, wanted <5.25,>=5.17"]
    assert ranges.untried(["torch>=2.14"], version) == ["torch 2.13.0+cpu is installed, wanted >=2.14"]


@pytest.mark.parametrize("door", DOORS)
def test_a_door_beyond_the_ranges_warns_in_one_sentence_and_opens(door: str, tmp_path: Path) -> None:
    program, said, names = DOORS[door]
    beyond = sorted(["numpy", *names.split()])
    done = subprocess.run(
        [sys.executable, "-c", BEYOND.format(names=beyond) + program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    told = done.stdout + done.stderr
    assert said in done.stdout and done.returncode == 0, told
    assert told.count("evictionary was not tested with this: ") == 1, told
    (sentence,) = [line for line in told.splitlines() if "not tested with this" in line]
    assert re.findall(r"(\w+) 99\.0 is installed, wanted <", sentence) == beyond


def test_each_range_of_what_a_user_runs_has_two_ends() -> None:
    asked = [Requirement(each) for each in metadata.requires("evictionary") or []]
    run = [each for each in asked if each.name != "evictionary" and ranges.is_run(each)]
    assert len(run) > 15
    assert [str(each) for each in run if {"<", ">="} != {part.operator for part in each.specifier}] == []


def test_what_is_installed_here_lies_in_the_ranges() -> None:
    asked = metadata.requires("evictionary") or []
    assert any(each.startswith("transformers") and "<" in each for each in asked)
    assert ranges.untried(asked, metadata.version) == []


@pytest.mark.parametrize("name", versions.NAMES)
def test_a_cache_is_found_by_any_name(name: str) -> None:
    cache = DynamicCache()
    assert versions.cache_of({"input_ids": IDS, name: cache}) is cache
    assert versions.without_cache({"input_ids": IDS, name: cache}) == {"input_ids": IDS}
    assert versions.cache_of({"input_ids": IDS}) is None


@torch.no_grad()
def test_the_argument_gives_no_warning_and_the_other_name_works_too(model: LlamaForCausalLM) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        with EvictingCache(model, "keydiff") as cache:
            wanted = generate(model, IDS, cache, count=3)
        with EvictingCache(model, "keydiff") as cache:
            output = model(IDS, **cache.argument, use_cache=True)
            assert versions.cache_in(output) is cache and cache.tokens_kept == 30
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers says that it is the old name, where it is
        with EvictingCache(model, "keydiff") as cache:
            found = model.generate(IDS, past_key_values=cache, max_new_tokens=3, do_sample=False)
    assert torch.equal(found, wanted)


def test_no_other_file_knows_what_transformers_calls_a_cache() -> None:
    """A name in a call would warn in one version and fail in another."""
    allowed = {
        "evictionary/models/versions.py",
        "tests/cache/test_versions.py",
        "benchmarks/peers.py",  # runs in the environment of kvpress, whose transformers is 5.2
        "conformance/adapters/kvpress/kvzap.py",
    }
    found = set()
    for folder in ("evictionary", "benchmarks", "conformance", "docs_build", "tutorials", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            words = {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword)}
            words |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
            words |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
            if "past_key_values" in words:
                found.add(path.relative_to(ROOT).as_posix())
    assert found - allowed == set()
