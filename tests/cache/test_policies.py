"""What methods do in a cache beside choosing tokens:
whose it is, what it keeps, and that old files are read.
"""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tools.reading import IDS, after, padded, read, read_in
from transformers import LlamaForCausalLM

from evictionary import EvictingCache
from evictionary.cache import saved
from evictionary.cache.text import UNKNOWN
from evictionary.methods import catalogue
from evictionary.policies import Policy, known

ROOT = Path(__file__).parents[2]
OLD = Path(__file__).parent / "caches_of_2026"


def test_the_cache_knows_no_method_by_name() -> None:
    names = "|".join(catalogue.names())
    named = re.compile(rf"(?<![a-z])({names}|{names.replace('_', '')})(?![a-z])", re.IGNORECASE)
    for path in [
        each for room in ("cache", "methods") for each in (ROOT / "evictionary" / room).rglob("*.py")
    ]:
        lines = path.read_text(encoding="utf-8").splitlines()
        # An example of a docstring shows a name that a reader may write.
        code = [line for line in lines if not line.lstrip().startswith(">>> ")]
        assert not [line for line in code if named.search(line)], path


@pytest.mark.parametrize("name", sorted(path.name for path in OLD.iterdir() if path.name != "answers"))
def test_a_file_of_november_2026_answers_as_it_did_then(
    tmp_path: Path, model: LlamaForCausalLM, name: str
) -> None:
    """Files that the cache wrote before policies: moments, static tokens, an anchor, recent queries,
    ragged heads, padding. They have no ids of tokens, which fit any text then.
    """
    with EvictingCache.load(OLD / name, model) as cache:
        cache.save(tmp_path / "again")
        (old, tensors), (new, written) = (saved.read(path) for path in (OLD / name, tmp_path / "again"))
        assert all(
            torch.equal(written[tensor], tensors[tensor])
            for tensor in (tensors.keys() | written.keys()) - {"ids"}
        )
        assert (written["ids"] == UNKNOWN).all() and written["ids"].shape[1] == cache.get_seq_length()
        assert [each.get("static") for each in new["layers"]] == [each["static"] for each in old["layers"]]
        if name == "padded":
            got = read(model, IDS[:, 50:51].expand(2, 1), cache, **after(padded(30, 20)[1]))[:, 0]
        else:
            got = read_in(model, cache, [1, 1, 4], IDS[:, 30:])[0]
    torch.testing.assert_close(got[:, :32], load_file(OLD / "answers")[name], rtol=1e-4, atol=1e-4)


def test_a_policy_overrides_hooks_of_the_base_and_nothing_else() -> None:
    """A hook with another name would never be called."""
    hooks = {name for name in dir(Policy) if not name.startswith("_")}
    for policy in known():
        assert {name for name in vars(type(policy)) if not name.startswith("_")} <= hooks, policy.stem
