"""KVzap in a cache: what it keeps of a prompt, of blocks and while decoding, and what calibrates it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tools.reading import (
    IDS,
    after,
    cached,
    loaded,
    near,
    padded,
    places,
    positions_of,
    read,
    read_in,
    refused,
)

from evictionary import EvictingCache
from evictionary.cache import calibration
from evictionary.evaluation.calibration import of_text
from evictionary.methods.catalogue import REPLAYED
from evictionary.reference import kvzap

TEXT = torch.randint(3, 259, (1, 256), generator=torch.Generator().manual_seed(8))
RULE = {"window_size": 6, "threshold": 0.0}


@pytest.fixture
def options(model: Any, tmp_path: Path) -> dict[str, Any]:
    """A surrogate of another text."""
    calibration.write(model, of_text(model, TEXT), tmp_path / "text")
    return RULE | {"calibration": str(tmp_path / "text")}


def by_hand(model: Any, index: int, ids: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The hidden states of a layer that has read ids twice, and the target of a surrogate."""
    full = cached(model, ids, None, record=(*REPLAYED, "hidden_states"))
    states = {name: each.numpy() for name, each in full.recorded[index].items()}
    w_o = model.model.layers[index].self_attn.o_proj.weight.detach().numpy().T.reshape(4, 8, -1)
    replay = [states[f"replay_{name}"] for name in ("queries", "keys", "hidden_states")]
    stored = (each.numpy() for each in full.layers[index].slots())
    return states["hidden_states"], kvzap.target(*stored, w_o, *replay)


def test_a_prompt_calibrates_itself(model: Any) -> None:
    cache = cached(model, IDS, "kvzap", options=RULE)
    for index, layer in enumerate(cache.layers):
        states, target = by_hand(model, index, IDS)
        kept = kvzap.select(np.ones((1, 2, 60, 1)), states, *kvzap.fit(states, target), **RULE)
        assert positions_of(layer) == places(kept) and 12 < kept.sum() < 120
    refused(lambda: EvictingCache(model, "kvzap", every=4), "every: got 4 without the option calibration")


def test_a_text_calibrates_in_parts_and_a_file_without_a_surrogate_is_refused(
    model: Any, options: dict[str, Any]
) -> None:
    """Of 256 places a part may have 128 tokens, so that it is read twice: there are two."""
    found = calibration.read(model, options["calibration"])
    parts = [by_hand(model, 1, part) for part in TEXT.tensor_split(2, dim=1)]
    wanted = kvzap.fit(
        *(np.concatenate(each, axis) for each, axis in zip(zip(*parts, strict=True), (1, 2), strict=True))
    )
    near([found[1][f"surrogate_{name}"] for name in ("weights", "bias")], wanted, rtol=1e-3, atol=1e-3)
    for state in found.values():
        del state["surrogate_weights"]
    calibration.write(model, found, options["calibration"])
    refused(lambda: cached(model, IDS, "kvzap", options=options), "got a file without surrogate_weights")


@pytest.mark.parametrize(("every", "sizes"), [(1, [20, *[1] * 40]), (7, [12, 30, *[1] * 18])])
def test_blocks_and_tokens_stay_as_all_at_once(
    model: Any, options: dict[str, Any], tmp_path: Path, every: int, sizes: list[int]
) -> None:
    """The hidden states of the first layer do not depend on what is kept. What has not been compressed yet is
    whole, and a cache from a file goes on as the one that was saved.
    """
    first, *rest = sizes
    cache = loaded(cached(model, IDS[:, :first], "kvzap", options=options, every=every), tmp_path, model)
    read_in(model, cache, rest, IDS[:, first:])
    layer, surrogate = cache.layers[0], calibration.read(model, options["calibration"])[0]
    scores = kvzap.score(
        by_hand(model, 0, IDS)[0], surrogate["surrogate_weights"].numpy(), surrogate["surrogate_bias"].numpy()
    )
    kept = places(kvzap.dms(scores[..., : layer.evicted_at], **RULE))
    assert positions_of(layer) == [[*row, *range(layer.evicted_at, 60)] for row in kept]
    assert 12 < layer.lengths.sum() < 100


def test_a_row_of_a_padded_batch_keeps_what_it_keeps_alone(model: Any, options: dict[str, Any]) -> None:
    ids, given = padded(30, 20)
    cache = cached(model, ids, "kvzap", options=options, every=1, given=given)
    alone = cached(model, IDS[:, 20:40], "kvzap", options=options, every=1)
    for step in range(1, 5):
        read(model, IDS[:, step : step + 1].expand(2, -1), cache, **after(given, step))
        read(model, IDS[:, step : step + 1], alone)
    cache.batch_select_indices(torch.tensor([1]))
    wanted = [[place + 10 for place in row] for row in positions_of(alone.layers[1])]
    assert positions_of(cache.layers[1]) == wanted
