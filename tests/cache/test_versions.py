"""What one module knows of the versions of transformers, and the sentence about versions that are untried."""

import ast
import subprocess
import sys
import warnings
from importlib import metadata
from pathlib import Path

import pytest
import torch
from tools import ROOT
from tools.reading import IDS, generate
from transformers import DynamicCache, LlamaForCausalLM

from evictionary import EvictingCache
from evictionary.models import versions

INSTALLED = {"torch": "2.13.0+cpu", "transformers": "5.25.0", "numpy": "2.4.6"}


def version(name: str) -> str:
    if name not in INSTALLED:
        raise metadata.PackageNotFoundError(name)
    return INSTALLED[name]


def test_a_version_beyond_the_ranges_is_named_with_the_range() -> None:
    asked = ["transformers<5.25,>=5.17; extra == 'model'", "torch<2.16,>=2.11", "numpy>=2", "gguf>=0.17"]
    assert versions.untried(asked, version) == ["transformers 5.25.0 is installed, wanted <5.25,>=5.17"]
    assert versions.untried(["torch>=2.14"], version) == ["torch 2.13.0+cpu is installed, wanted >=2.14"]


def test_an_import_beyond_the_ranges_warns_in_one_sentence_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "from importlib import metadata\n"
        "real = metadata.version\n"
        "metadata.version = lambda name: '5.99.0' if name == 'transformers' else real(name)\n"
        "from evictionary import EvictingCache\n"
        "print(EvictingCache.__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "EvictingCache\n", done.stderr
    assert done.stderr.count("evictionary was not tested with this: transformers 5.99.0 is installed") == 1


def test_what_is_installed_here_lies_in_the_ranges() -> None:
    asked = metadata.requires("evictionary") or []
    assert any(each.startswith("transformers") and "<" in each for each in asked)
    assert versions.untried(asked, metadata.version) == []


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
