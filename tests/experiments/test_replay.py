"""The prompt read twice for KVzip: what a layer is shown of the replay, and that nothing of it stays."""

import numpy as np
import pytest
import torch
from conftest import tiny_llama
from tools.reading import IDS, cached, generate, padded, positions_of, read, refused
from transformers import LlamaForCausalLM

from evictionary.cache.evicting_cache import EvictingCache
from evictionary.cache.model_hooks import PREFIX
from evictionary.errors import UsageError
from evictionary.reference import kvzip, selection

REPLAY = ("replay_queries", "replay_keys")


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama().double()


def test_the_kept_tokens_are_those_of_the_prompt_followed_by_itself(model: LlamaForCausalLM) -> None:
    cache = cached(model, IDS, "kvzip", budget=20)
    with EvictingCache(model, None, record=("queries",)) as twice:
        read(model, torch.cat([IDS, IDS], dim=1), twice)
    for index, layer in enumerate(cache.layers):
        queries, keys = twice.recorded[index]["queries"].numpy(), twice.layers[index].keys.numpy()
        scores = kvzip.score(keys[:, :, :60], queries[:, :, 60:], keys[:, :, 60:])
        assert positions_of(layer) == [np.flatnonzero(row).tolist() for row in selection.top_k(scores, 20)[0]]


def test_nothing_of_the_replay_stays(model: LlamaForCausalLM) -> None:
    """The full cache, the bytes and the answer are those
    without a replay; a compressed one has its own positions.
    """
    plain, full = cached(model, IDS, None), cached(model, IDS, None, record=REPLAY)
    assert (full.get_seq_length(), full.nbytes) == (60, plain.nbytes)
    assert torch.equal(full.layers[1].keys, plain.layers[1].keys)
    assert positions_of(
        EvictingCache.from_prefilled(model, full, "kvzip", budget=20).layers[1]
    ) == positions_of(cached(model, IDS, "kvzip", budget=20).layers[1])
    assert torch.equal(generate(model, IDS, EvictingCache(model, "kvzip", 0.0)), generate(model, IDS))
    assert not model.config._attn_implementation.startswith(PREFIX)
    assert generate(model, IDS, EvictingCache(model, "kvzip+ada_kv", 0.5)).shape == (1, 68)


def test_what_cannot_be_read_twice_is_refused(model: LlamaForCausalLM) -> None:
    short = tiny_llama(max_position_embeddings=100)
    refused(
        lambda: cached(short, IDS, "kvzip", budget=20),
        r"prompt: got 60 tokens, wanted at most half of the model's context of 100",
    )
    assert not short.config._attn_implementation.startswith(PREFIX)
    ids, given = padded(30, 20)
    with (
        EvictingCache(model, "kvzip", budget=10) as cache,
        pytest.raises(UsageError, match="got padding, wanted prompts of one"),
    ):
        read(model, ids, cache, **given)
    refused(lambda: EvictingCache(model, "kvzip", every=5), "every: got 5, wanted 0")
