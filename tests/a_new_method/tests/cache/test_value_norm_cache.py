"""ValueNorm in a cache: it keeps what its score keeps, and computes no norm twice."""

from pathlib import Path

import pytest
import torch
from tools.reading import IDS, positions_of, read_in
from transformers import LlamaForCausalLM

from evictionary.cache.evicting_cache import EvictingCache
from evictionary.optimized import value_norm

PLAIN = "import torch\ndef score(values):\n    return values.norm(dim=-1)\n"


def test_the_norms_of_kept_values_are_not_computed_again(
    tmp_path: Path, model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    own = value_norm.score
    monkeypatch.setattr(value_norm, "score", lambda values: asked.append(values.shape[2]) or own(values))
    (tmp_path / "plain.py").write_text(PLAIN)
    with (
        EvictingCache(model, "value_norm", budget=10, every=4) as cache,
        EvictingCache(model, str(tmp_path / "plain.py"), budget=10, every=4) as plain,
    ):
        for each in (cache, plain):
            read_in(model, each, [20, *[1] * 6])
        assert asked == [20, 20, 4, 4]
        cache.save(tmp_path / "cache")
        with EvictingCache.load(tmp_path / "cache", model) as loaded:
            for each in (cache, plain, loaded):
                read_in(model, each, [1, 1], IDS[:, 26:])
            for layer, like, again in zip(cache.layers, plain.layers, loaded.layers, strict=True):
                assert positions_of(layer) == positions_of(like) == positions_of(again)
                torch.testing.assert_close(layer.state["norms"], layer.values.norm(dim=-1))
                assert torch.equal(layer.state["norms"], again.state["norms"])
