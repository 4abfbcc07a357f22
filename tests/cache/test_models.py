"""The models of 2026 in a cache: every phase against masks by hand, and what methods read of a softmax
that is not plain.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from tools import masked
from tools.families import OF_2026, SMALL, build, random_model
from tools.reading import cached, generate, loaded, read, read_in, refused
from transformers import DynamicCache, HrmTextConfig

from evictionary import EvictingCache
from evictionary.cache import partial_attention
from evictionary.cache.layers import EvictingLayer, is_recurrent
from evictionary.cache.model_hooks import attention_modules
from evictionary.models import queries as future_queries
from evictionary.optimized import criticalkv, dropkv, expected_attention, h2o, kvzip, momentkv, snapkv, tova
from evictionary.optimized.attention import attend
from evictionary.optimized.cache import compress
from evictionary.optimized.softmax import Softmax, of_model
from evictionary.policies import with_moments
from evictionary.policies.momentkv import MomentKV

IDS = masked.IDS[:1]
PAGE = Path(__file__).parents[2] / "docs" / "in_a_model.md"
RECURRENT = ["Qwen3-Next", "Jamba", "Nemotron-H", "LFM2", "Falcon-H1", "Zamba2"]


@pytest.mark.parametrize(
    ("family", "phase", "method"),
    [
        *itertools.product(OF_2026, masked.PHASES, masked.METHODS),
        *itertools.product(["Laguna", "MiMo-V2-Flash"], ["prompt", "padded rows"], ["criticalkv"]),
    ],
)
def test_a_model_reads_what_the_masks_by_hand_leave_it(family: str, phase: str, method: str) -> None:
    if (family, phase) in masked.REFUSED:
        refused(
            lambda: masked.difference(build(family), method, **masked.PHASES[phase]),
            "wanted one: with several the recurrent",
        )
        return
    found = masked.difference(build(family), method, **masked.PHASES[phase])
    assert found.largest <= 2e-4 * found.of


@torch.no_grad()
def test_what_is_refused_is_wrong_in_transformers_itself() -> None:
    """The day it is right there, it need not be refused here."""
    model = build("Jamba")
    assert (
        read_in(model, DynamicCache(config=model.config), [36, 8], IDS) - read(model, IDS, None)
    ).abs().max() > 1


@pytest.mark.parametrize("phase", masked.PHASES)
def test_a_model_that_goes_through_its_layers_again_and_again(phase: str) -> None:
    """HRM has a place in the cache for each time. It magnifies
    the rounding of float32, so it is compared in float64.
    """
    model = random_model(HrmTextConfig(**{**SMALL, "num_hidden_layers": 2})).double()
    found = masked.difference(model, "keydiff", **masked.PHASES[phase])
    assert found.largest <= 1e-4 * found.of


def test_the_page_has_these_models_in_these_phases() -> None:
    """Rounding differs from machine to machine, so the numbers are those of the day that the page names."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines()]
    start = next(index for index, row in enumerate(rows) if row[0] == "logits differ by at most")
    assert rows[start][1:-1] == list(masked.PHASES)
    table = list(itertools.takewhile(lambda row: len(row) > 1, rows[start + 2 :]))
    of_this_version = [row[0] for row in table if row[0] in OF_2026]
    assert of_this_version == list(OF_2026)
    # each is there since 5.23, so none goes unnoticed
    assert len(of_this_version) == len(table) or Version(transformers.__version__) < Version("5.23")
    cells = [
        (row[0], phase, cell, row[-1])
        for row in table
        for phase, cell in zip(masked.PHASES, row[1:-1], strict=True)
    ]
    assert [(family, phase) for family, phase, cell, _ in cells if cell == "refused"] == masked.REFUSED
    assert all(cell == "refused" or float(cell) <= 2e-4 * float(largest) for *_, cell, largest in cells)


@pytest.mark.parametrize("family", RECURRENT)
def test_a_recurrent_state_is_copied_saved_chosen_by_beams_and_reset(tmp_path: Path, family: str) -> None:
    model = build(family)
    cache = cached(model, IDS[:, :36], "snapkv+ada_kv", 0.5, {"window_size": 4})
    assert (
        any(map(is_recurrent, cache.layers)) and cache._session.reading.evicting and cache.nbytes_beside > 0
    )
    others = (
        EvictingCache.from_prefilled(model, cached(model, IDS[:, :36], None), "keydiff", 0.5),
        loaded(cache, tmp_path, model),
    )
    steps = {"position_ids": torch.tensor([[36]])}
    wanted = read(model, IDS[:, 36:37], cached(model, IDS[:, :36], "keydiff", 0.5), **steps)
    torch.testing.assert_close(read(model, IDS[:, 36:37], others[0], **steps), wanted)
    refused(lambda: read(model, IDS[:, 37:].expand(2, -1), others[0]), "batch size: got 2, wanted 1")
    for each in (cache, others[1]):
        each.batch_repeat_interleave(3)
    rows = [read(model, IDS[:, 36:37].expand(3, -1), each, **steps) for each in (cache, others[1])]
    torch.testing.assert_close(*rows, rtol=0, atol=0)
    refused(lambda: cache.crop(-1), "crop: got layers with a recurrent state", RuntimeError)
    beams = generate(model, IDS, EvictingCache(model, "keydiff", 0.5), count=4, num_beams=3)
    assert beams.shape == (1, IDS.shape[1] + 4)
    cache.reset()
    assert torch.equal(
        generate(model, IDS, cache),
        generate(model, IDS, EvictingCache(model, "snapkv+ada_kv", 0.5, {"window_size": 4})),
    )


def test_a_pyramid_counts_the_layers_that_are_compressed() -> None:
    cache = cached(build("Qwen3-Next"), IDS, "knorm+pyramid_kv", 0.5)
    kept = [int(layer.lengths.sum()) for layer in cache._session.reading.evicting]
    assert kept[0] > kept[1] and sum(kept) == 2 * len(kept) * IDS.shape[1] // 2


STATE_OR_WINDOW = "a sliding window or a recurrent state, wanted full attention alone"
CAPPED = "with capped attention logits, wanted a method without a closed form"


@pytest.mark.parametrize(
    ("family", "method", "message"),
    [
        ("Jamba", "kvzip", STATE_OR_WINDOW),
        ("gpt-oss", "kvzip", STATE_OR_WINDOW),
        ("Cohere", "triattention", "rotated by RoPE in two halves; wanted .* instead of triattention"),
        *(("Gemma 2", method, CAPPED) for method in ("expected_attention", "momentkv", "keydiff+moments")),
    ],
)
def test_a_method_that_does_not_fit_a_model_is_refused(family: str, method: str, message: str) -> None:
    """A prompt read twice beside a state, halves where neighbours turn, a formula without a cap."""
    refused(lambda: EvictingCache(build(family), method), message)


@pytest.mark.parametrize("family", ["Gemma 2", "gpt-oss"])
def test_an_attention_that_leaves_out_a_part_of_the_softmax_is_refused(family: str) -> None:
    """transformers 5.17 to 5.20 took sdpa for a model with a cap, and its logits were without it."""
    model = build(family)
    model.config._attn_implementation_internal = "sdpa"
    refused(
        lambda: EvictingCache(model, "snapkv+ada_kv"),
        "with the attention sdpa, which leaves out the cap or the sinks of its softmax; wanted .*eager",
    )


# queries before RoPE


@torch.no_grad()
@pytest.mark.parametrize(
    "family", ["Qwen3-Next", "Granite 4 hybrid", "gpt-oss", "Cohere", "Cohere2", "SmolLM3", "Llama 4"]
)
def test_queries_are_brought_back_to_before_rope_however_a_layer_rotates(family: str) -> None:
    model = build(family)
    cache = EvictingCache(model, "expected_attention", 0.5)
    read(model, IDS, cache)
    assert cache.tokens_kept == IDS.shape[1] // 2
    for index, states in cached(model, IDS, None, record=("queries", "hidden_states")).recorded.items():
        module: Any = attention_modules(model)[index]
        got = future_queries.unrotated(
            states["queries"], *future_queries.rotation(model, index, torch.arange(IDS.shape[1]))
        )
        projected = future_queries.project(model, module, states["hidden_states"])
        torch.testing.assert_close(
            got, projected * future_queries.logit_factor(module, got.shape[-1]), rtol=1e-3, atol=1e-4
        )


# another softmax


HEADS, GROUP, LENGTH = 2, 2, 24


def states(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


QUERIES, KEYS, VALUES = (
    states(1, HEADS * GROUP, LENGTH, 8),
    states(1, HEADS, LENGTH, 8),
    states(1, HEADS, LENGTH, 6),
)
SINKS = torch.tensor([[3.0, -1.0, 0.5, 2.0]], dtype=torch.float64)


def probabilities(cap: float | None, sinks: torch.Tensor | None) -> torch.Tensor:
    """[B, H_kv, G, M, T], written out: the logits, their cap, the causal mask, and a column for the sink."""
    logits = torch.einsum("bhgmd,bhtd->bhgmt", QUERIES.view(1, HEADS, GROUP, LENGTH, 8), KEYS) / 8**0.5
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    logits = logits.masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.view(1, HEADS, GROUP, 1, 1).expand(-1, -1, -1, LENGTH, 1)], dim=-1)
    return logits.softmax(dim=-1)[..., :LENGTH]


SOFTMAXES = {"capped": Softmax(0.7), "with sinks": Softmax(None, SINKS), "both": Softmax(0.7, SINKS)}


@pytest.mark.parametrize("rows", [256, 2])
@pytest.mark.parametrize("name", SOFTMAXES)
def test_methods_read_the_probabilities_of_the_model(
    name: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H2O, SnapKV, TOVA, KVzip, CriticalKV, MomentKV and
    DropKV, each from the probabilities as they are written out.
    """
    monkeypatch.setattr(h2o, "TILE", 1)  # the prompt in one tile of rows, or in several
    monkeypatch.setattr(h2o, "LEAST_ROWS", rows)
    softmax, norms, window = SOFTMAXES[name], VALUES.norm(dim=-1), {"window_size": 4, "kernel_size": 1}
    attention = probabilities(*softmax)
    last, newest = attention[..., -4:, :], attention[..., -1, :]
    mean, largest = last.mean(dim=(2, 3)), last[..., :-4].amax(dim=(2, 3))
    output = torch.einsum("bhgmt,bhtd->bhgmd", attention, VALUES)
    change = last / (1 - last) * (VALUES[:, :, None, None] - output[..., -4:, None, :]).norm(dim=-1)
    wanted = {
        "the output": output.flatten(1, 2),
        "h2o": attention.mean(dim=2).sum(dim=2),
        "snapkv": snapkv.average_pool(mean[..., :-4], 7),
        "tova": newest.mean(dim=(1, 2)),
        "momentkv, of a prompt": mean * norms,
        "momentkv": newest.mean(dim=2) * norms,
        "kvzip": largest,
        "criticalkv": largest.maximum(largest.mean(dim=-1, keepdim=True)),
        "dropkv": change.square().sum(dim=3).mean(dim=2)[..., :-4],
    }
    with of_model(softmax):
        attended, received = h2o.attend_and_score(QUERIES, KEYS, VALUES)
        nothing = momentkv.no_moments(KEYS, VALUES)
        found = {
            "the output": attended,
            "h2o": received,
            "snapkv": snapkv.score(QUERIES, KEYS, window_size=4)[..., :-4],
            "tova": tova.score(QUERIES, KEYS)[:, 0],
            "momentkv, of a prompt": momentkv.score_prompt(QUERIES[:, :, -4:], KEYS, VALUES, chunk_size=1),
            "momentkv": momentkv.score(QUERIES[:, :, -1], KEYS, VALUES, nothing),
            "kvzip": kvzip.score(KEYS[:, :, :-4], QUERIES[:, :, -4:], KEYS[:, :, -4:]),
            "criticalkv": criticalkv.importance(QUERIES, KEYS, **window),
            "dropkv": dropkv.score(QUERIES, KEYS, VALUES, **window)[..., :-4],
        }
    torch.testing.assert_close(found, wanted)
    assert (attention.sum(dim=-1) < 0.999).any() == (softmax.sinks is not None)


def test_expected_attention_counts_a_sink_among_the_expected_weights() -> None:
    mean, covariance = QUERIES.mean(dim=2), torch.eye(8, dtype=torch.float64).expand(1, HEADS * GROUP, 8, 8)
    expected = expected_attention.expected_logits(KEYS, mean, covariance).exp()
    shares = expected / (expected.sum(dim=-1, keepdim=True) + SINKS.view(1, HEADS, GROUP, 1).exp())
    with of_model(Softmax(None, SINKS)):
        got = expected_attention.score(KEYS, VALUES, mean, covariance, epsilon=0)
    torch.testing.assert_close(got, shares.mean(dim=2) * VALUES.norm(dim=-1))


def test_moments_and_a_sink_share_one_softmax() -> None:
    """The tokens that stay, those that went by their
    moments, and the sink, which adds nothing to the output.
    """
    kept = torch.arange(LENGTH).expand(1, HEADS, LENGTH) % 3 == 0
    layer = EvictingLayer()
    layer.update(KEYS.float(), VALUES.float())
    moments = momentkv.update(
        momentkv.no_moments(KEYS.float(), VALUES.float()), KEYS.float(), VALUES.float(), ~kept
    )
    layer.evict(kept)
    layer.state, policy = with_moments(moments), MomentKV()
    query = QUERIES[:, :, -1:].float()
    got = partial_attention.attend(query, layer, [policy], Softmax(None, SINKS[0]))[:, :, 0]
    output, mass = attend(query, compress(KEYS.float(), VALUES.float(), kept))
    part, evicted = policy.part(query, moments)
    shares = torch.stack([mass, evicted, SINKS[:, :, None].float()]).softmax(dim=0)
    torch.testing.assert_close(got, (shares[0, ..., None] * output + shares[1, ..., None] * part)[:, :, 0])


@pytest.mark.parametrize("method", ["keydiff+moments", "momentkv", "snapkv+ada_kv+moments"])
def test_moments_of_nothing_change_nothing_beside_sinks(method: str) -> None:
    model = build("gpt-oss")
    cache = EvictingCache(model, method, 0.0, {"window_size": 4} if "snapkv" in method else None)
    torch.testing.assert_close(
        read_in(model, cache, [40, 1, 3], IDS), read(model, IDS, None), rtol=1e-3, atol=1e-3
    )


def test_a_cap_that_only_the_call_of_a_module_tells_is_refused() -> None:
    model = build("gpt-oss")
    module: Any = attention_modules(model)[1]
    own = module.forward
    module.forward = lambda *arguments, **named: own(*arguments, **named, softcap=3.0)
    refused(
        lambda: read(model, IDS, EvictingCache(model, "keydiff")),
        "with a softmax of its own, wanted a plain one",
    )
