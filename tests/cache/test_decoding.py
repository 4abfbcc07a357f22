"""What a decoded token costs, counted in numbers and multiplications instead of seconds, and that what is
done in place says the same as what is done anew.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_llama
from tools.reading import IDS, cached, loaded, near, read_in, same
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from evictionary import EvictingCache, reference
from evictionary.optimized import ada_kv, momentkv, quest, rkv
from evictionary.optimized.states import Moments


def tokens(count: int, rows: int = 1) -> torch.Tensor:
    return torch.randint(3, 259, (rows, count), generator=torch.Generator().manual_seed(8))


def test_a_decoded_token_reads_the_pages_that_it_changes() -> None:
    seen: list[int] = []

    class Pages(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "aminmax" in str(function):
                seen.append(args[0].numel())
            return function(*args, **(kwargs or {}))

    model = tiny_llama(num_hidden_layers=1)
    cache = cached(model, IDS[:, :41], "quest", budget=12, options={"page_size": 4, "skipped_layers": 0})
    with Pages():
        read_in(model, cache, [1] * 9, IDS[:, 41:])
    of_a_token = 2 * 8  # numbers of its keys
    # the pages of the prompt, once, then the last page of each token
    assert [numbers // of_a_token for numbers in seen] == [40, 2, 3, 4, 1, 2, 3, 4, 1, 2]


def test_pages_that_grow_bound_the_keys_as_all_keys_at_once_do() -> None:
    keys = torch.randn(2, 3, 57, 8, generator=torch.Generator().manual_seed(0))
    pages = quest.Pages(keys, 5)
    for length in (3, 5, 6, 20, 21, 41, 57):  # one token, and several at a time
        for ours, wanted in zip(
            pages.update(keys[:, :, :length]),
            quest.page_bounds(keys[:, :, :length], page_size=5),
            strict=True,
        ):
            assert torch.equal(ours, wanted)


# Heads that share a budget and evict with each token
# ------------------------------------------------------------------------------------------------------------


def decoded(
    model: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch | None, **named: Any
) -> tuple[torch.Tensor, EvictingCache]:
    """The logits of 24 tokens after a prompt, and the cache; with a patch, each token compresses anew."""
    cache = cached(model, ids[:, :36], "momentkv+ada_kv", **named)
    if monkeypatch is not None:
        monkeypatch.setattr(cache._session.attending, "step_in_heads", None)
    return read_in(model, cache, [1] * 24, ids[:, 36:]), cache


@pytest.mark.parametrize("named", [{"budget": 15}, {"compression_ratio": 0.5}, {"budget": 3}])
@pytest.mark.parametrize("rows", [1, 3])
def test_ragged_heads_evict_in_place_what_a_compression_would(
    monkeypatch: pytest.MonkeyPatch, named: dict[str, Any], rows: int
) -> None:
    model, ids = tiny_llama().double(), tokens(60, rows)
    (got, ours), (wanted, theirs) = (
        decoded(model, ids, None, **named),
        decoded(model, ids, monkeypatch, **named),
    )
    assert any(layer._rows is not None for layer in ours.layers)
    near([got], [wanted.numpy()], rtol=1e-8, atol=1e-8)
    for one, other in zip(ours.layers, theirs.layers, strict=True):
        assert one.lengths.tolist() == other.lengths.tolist()
        near(one.contents(), [each.numpy() for each in other.contents()], rtol=1e-8, atol=1e-8)
        near(one.moments, [each.numpy() for each in other.moments], rtol=1e-6, atol=1e-6)


def test_heads_that_evicted_in_place_are_copied_stored_reordered_and_compressed(tmp_path: Path) -> None:
    model, ids = tiny_llama(), tokens(60, 2)
    _, cache = decoded(model, ids, None, budget=15)
    twins = [copy.deepcopy(cache), loaded(cache, tmp_path, model)]
    for twin in twins:
        same(twin, cache)
    wanted = read_in(model, cache, [1, 3, 1], ids)
    for twin in twins:
        twin.batch_select_indices(torch.tensor([1, 0]))
        near([read_in(model, twin, [1, 3, 1], ids.flip(0)).flip(0)], [wanted.numpy()])
    for layer in cache.layers:
        heads = layer.ragged.lengths.flatten().tolist()
        assert all((part.diff() > 0).all() for part in layer.ragged.positions.split(heads))


def test_few_leave_a_layer_as_if_all_were_shared_out_anew() -> None:
    """AD-1..3 with ties of scores, and with heads that are at their own budget."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        scores = torch.randint(0, 4, (2, 3, 12), generator=generator).float()
        budget = int(torch.randint(5, 12, (), generator=generator))
        kept = ada_kv.select(scores, budget)
        positions = torch.arange(12).expand(2, 3, 12)
        spare = torch.full((2, 3), 12 - ada_kv.own_budget(budget))
        shuffled = torch.rand(2, 3, 12, generator=generator).argsort(dim=-1)
        leaves = ada_kv.leaving(
            scores.gather(-1, shuffled), positions.gather(-1, shuffled), spare, [3 * (12 - budget)] * 2
        )
        assert torch.equal(~kept, torch.zeros_like(kept).scatter_(-1, shuffled, leaves))


# The multiplications of a score
# ------------------------------------------------------------------------------------------------------------


def stepping(length: int, *, hidden: bool = False) -> tuple[tuple[torch.Tensor, ...], Moments]:
    """A query, a new token, a full cache of one head and its
    moments; `hidden` residuals have nothing in the first channels.
    """
    draw = torch.Generator().manual_seed(2)
    query, new_key, new_value = (torch.randn(1, 1, 64, generator=draw).double() for _ in range(3))
    keys, values = (torch.randn(1, 1, length, 64, generator=draw).double() for _ in range(2))
    gone = (torch.randn(1, 1, 400, 64, generator=draw).double() for _ in range(2))
    gone_keys, gone_values = gone
    if hidden:
        for each in (values, new_value, gone_values):
            each[..., : momentkv.PROBED] = 0
    moments = momentkv.update(
        momentkv.no_moments(keys, values), gone_keys, gone_values, torch.ones(1, 1, 400, dtype=torch.bool)
    )
    return (query, new_key, new_value, keys, values), moments


@pytest.mark.parametrize("hidden", [False, True])
def test_a_step_of_momentkv_evicts_the_lowest_score_of_all(hidden: bool) -> None:
    """Also where the channels that are looked at first say nothing, so that every token is scored in full."""
    (query, *new, keys, values), moments = stepping(600, hidden=hidden)
    arrays = [each.numpy() for each in (query, *new, keys, values)]
    wanted = reference.momentkv.decode_step(
        *arrays, reference.momentkv.Moments(*(field.numpy() for field in moments)), 600
    )
    positions = torch.arange(600).expand(1, 1, 600).clone()
    output = momentkv.step(query, *new, keys, values, positions, moments, 600)
    order = positions.argsort()[..., None].expand(keys.shape)
    near([output, keys.gather(2, order)], [wanted.output, wanted.keys], rtol=1e-9, atol=1e-9)


def test_a_step_of_momentkv_multiplies_few_keys_with_the_covariance() -> None:
    (query, *new, keys, values), moments = stepping(600)
    positions = torch.arange(600).expand(1, 1, 600).clone()
    with FlopCounterMode(display=False) as counted:
        momentkv.step(query, *new, keys, values, positions, moments, 600)
    of_all_residuals = 2 * 600 * 64 * 64
    assert counted.get_total_flops() < 0.5 * of_all_residuals


def test_r_kv_multiplies_each_pair_of_keys_once() -> None:
    """Where no key resembles another, and nothing can be left out."""
    keys = torch.randn(1, 1, 4 * rkv.BLOCK, 128, generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counted:
        rkv.redundancy(keys)
    of_all_pairs = 2 * keys.shape[2] ** 2 * 128
    # the four blocks on the diagonal are whole
    assert counted.get_total_flops() < (0.5 + 0.5 / 4 + 0.01) * of_all_pairs
