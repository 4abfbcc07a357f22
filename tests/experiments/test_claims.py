"""The claims: intervals, rules, texts, recordings, runs that resume, and the command, on the tiny model."""

import html
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny_llama
from tools import ROOT, as_json, printed, refused, says, without_seconds
from tools.reading import IDS, masked_logits, read
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedTokenizerFast

from evictionary import store
from evictionary.claims import expected_attention, gvote, keydiff, lagkv, momentkv, run, texts
from evictionary.claims.claim import (
    FAILS,
    HOLDS,
    OTHER_MODEL,
    UNDECIDED,
    Claim,
    Condition,
    Number,
    Numbers,
    check_claims,
)
from evictionary.claims.recording import (
    Lab,
    Recording,
    Scale,
    as_array,
    compressed,
    later_attention,
    read_kept,
    read_on,
    record,
    residual_after,
)
from evictionary.evaluation import pages, run as evaluation
from evictionary.models import versions
from evictionary.optimized import tova
from evictionary.reference import momentkv as reference
from evictionary.reference.expected_attention_theory import correlation

SCALE = Scale(
    prompt_tokens=96,
    later_tokens=32,
    passkey_tokens=272,
    passkey_digits=16,
    passkey_depths=(0.2, 0.6),
    lag_sizes=(32, 64),
    keep_ratios=(0.25, 0.5),
    budgets=(12, 48),
    main_budget=48,
)
KINDS = ("varied", "code")


def plan_for(model: Path, papers: list[str] | None = None, **changes: Any) -> run.Plan:
    """Two kinds of text and two seeds: twenty measurements of all papers."""
    settings: dict[str, Any] = {"texts": KINDS, "seeds": (0, 1), "scale": SCALE}
    return run.Plan(str(model), check_claims(papers), **(settings | changes))


@pytest.fixture(scope="module")
def lab(tokenizer: PreTrainedTokenizerFast) -> Lab:
    return Lab(tiny_llama(max_position_embeddings=2048), tokenizer, SCALE)


@pytest.fixture(scope="module")
def recording(lab: Lab) -> Recording:
    return record(lab, "varied")


@pytest.fixture(scope="module")
def finished(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[store.Line]]:
    """A folder with the measurements of the plan, and its lines."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, store.run(plan_for(model_folder), folder)


@pytest.fixture(scope="module")
def result(finished: tuple[Path, list[store.Line]], model_folder: Path) -> dict[str, Any]:
    return run.report(plan_for(model_folder), finished[1])


def number(value: float, low: float, high: float, **by_text: float) -> Number:
    return Number(value, low, high, 18, by_text or {"varied": value}, "")


def claim_of(*conditions: str, possible_if: tuple[str, ...] = ()) -> Claim:
    return Claim(
        "X-1", "", "", "", tuple(map(Condition, conditions)), tuple(map(Condition, possible_if)), ("more",)
    )


@pytest.mark.parametrize(
    ("ends", "wanted"),
    [
        ({}, HOLDS),
        ({"gain": (0.0, 0.3)}, UNDECIDED),  # an end on a bound that must be exceeded
        ({"gain": (-0.3, 0.0)}, FAILS),
        ({"gain": (-0.3, 0.0), "loss": (0.1, 0.3)}, FAILS),
        ({"loss": (0.1, 0.3)}, UNDECIDED),
        ({"able": (0.4, 0.6), "gain": (-0.3, -0.1)}, UNDECIDED),
        ({"able": (0.3, 0.4), "gain": (-0.3, -0.1)}, OTHER_MODEL),
    ],
)
def test_a_rule_decides_by_its_conditions_alone(ends: dict[str, tuple[float, float]], wanted: str) -> None:
    claim = claim_of("gain > 0", "loss <= 0.2", possible_if=("able >= 0.5",))
    assert claim.rule == "other model needed unless able >= 0.5; holds here if gain > 0 and loss <= 0.2"
    assert claim.numbers == ["gain", "loss", "able", "more"]
    every = {"gain": (0.1, 0.3), "loss": (0.0, 0.2), "able": (0.5, 0.9)} | ends
    assert claim.verdict({name: number(sum(each) / 2, *each) for name, each in every.items()}) == wanted


TWO = claim_of("gain > 0", "loss <= 0.2")
LOSS = number(0.1, 0.05, 0.19, varied=0.0, code=0.3)
FAILED = {"gain": number(-0.1, -0.15, -0.05), "loss": number(0.5, 0.4, 0.6)}


@pytest.mark.parametrize(
    ("claim", "numbers", "told"),
    [
        (
            TWO,
            {"gain": number(0.4, 0.2, 0.7, varied=0.1, code=0.7), "loss": LOSS},
            "More texts may change it. The interval of loss would have to be 1.11 times as wide to reach "
            "0.2. "
            "Other texts would change it: code alone gives another verdict.$",
        ),
        (  # half of the interval is twice the distance: four times the texts
            TWO,
            {
                "gain": number(0.4, -0.4, 1.2, varied=0.4, code=0.4),
                "loss": number(0.1, 0.05, 0.19, varied=0.1, code=0.1),
            },
            "About 4.0 times as many texts and kinds would decide gain > 0, if the value stays. "
            "Robust to other texts. No single kind of text gives another verdict.$",
        ),
        (
            TWO,
            {"gain": number(0.0, -0.4, 0.4), "loss": LOSS},
            "No number of texts would: gain lies on its bound 0.",
        ),
        # of two conditions that fail, the one that fails more clearly keeps the verdict
        (TWO, FAILED, ".*Robust to more texts. The interval of loss would have to be 3 times"),
        (
            claim_of("gain > 0", possible_if=("able >= 0.5",)),
            FAILED | {"able": number(0.2, 0.1, 0.3)},
            "A model with able >= 0.5 would. Robust to more texts. The interval of able would have to be 3 ",
        ),
        (
            claim_of("gain > 0"),
            {"gain": Number(3.0, 2.0, 4.0, 18, {}, "")},
            ".*Other kinds of text may change it: the claim compares the kinds.$",
        ),
    ],
)
def test_what_would_change_a_verdict(claim: Claim, numbers: dict[str, Number], told: str) -> None:
    assert re.match(told, claim.changes(numbers))


def test_intervals_have_the_width_of_a_mean_of_drawn_kinds_and_texts() -> None:
    """The variance of a mean of k kinds is the variance of their means over k, and that of a mean of n
    texts theirs over n.
    """
    draw = np.random.default_rng(3)
    kinds = [f"kind {kind}" for kind in range(30) for _ in range(3)]
    values = draw.normal(size=(30, 3)) + draw.normal(size=(30, 1))
    numbers = Numbers({"it": "what it is", "all": "", "largest": ""}, kinds)
    numbers.means(it=values.reshape(-1))
    of_texts = (values.var(axis=1, ddof=1) / 3).mean()
    deviation = np.sqrt(values.mean(axis=1).var(ddof=1) / 30 + of_texts / 29)
    numbers.medians(all=np.repeat(values.reshape(-1, 1), 4, axis=1))
    # a number that compares the kinds keeps them: only the texts vary
    numbers.add("largest", np.mean, values.reshape(-1), compares_kinds=True)
    got, every, largest = (numbers[name] for name in ("it", "all", "largest"))
    assert (got.texts, got.meaning) == (90, "what it is") and got.low < got.value < got.high
    assert [got.value, every.value, largest.value] == pytest.approx(
        [values.mean(), np.median(values), values.mean()]
    )
    widths = [(each.high - each.low) / 2 / 1.96 for each in (got, largest)]
    assert widths == pytest.approx([deviation, np.sqrt(of_texts / 30)], rel=0.1)
    means = {f"kind {kind}": values[kind].mean() for kind in range(30)}
    assert got.by_text == pytest.approx(means) and largest.by_text == {}


def test_fewer_than_a_dozen_texts_give_no_interval_and_no_verdict() -> None:
    """Twelve equal texts give one of no width; eleven texts
    give none, however far from the bound the value lies.
    """
    claim = claim_of("it > 0", possible_if=("it > 1",))
    for count, verdict in ((11, UNDECIDED), (12, HOLDS)):
        numbers = Numbers({"it": ""}, [f"kind {place}" for place in range(count)])
        numbers.means(it=np.full(count, 5.0))
        assert (numbers["it"].value, numbers["it"].low) == (5.0, None if count == 11 else 5.0)
        assert Claim("X-1", "", "", "", claim.holds_if, claim.possible_if).verdict(numbers) == verdict
    ends = ({"low": None, "high": None}, {"low": 0.1234, "high": 2})
    assert [pages.interval(each) for each in ends] == ["no interval", "0.123 to 2"]


def test_numbers_refuse_what_is_not_finite() -> None:
    numbers = Numbers({"it": ""}, ["a", "a"])
    for bad in ([], [1.0, float("nan")], [float("inf"), 0.0]):
        refused(lambda bad=bad: numbers.medians(it=bad), r"values of it: .* wanted finite ones", ValueError)


@pytest.mark.parametrize("name", run.PAPERS)
def test_every_claim_says_where_it_stands_and_reads_numbers_that_are_measured(
    name: str, result: dict[str, Any]
) -> None:
    paper = run.PAPERS[name].PAPER
    assert re.fullmatch(r"\d{4}\.\d{5}", paper.arxiv)
    assert len({claim.id for claim in paper.claims}) == len(paper.claims)
    found = next(each for each in result["papers"] if each["paper"] == name)["claims"]
    for claim, measured in zip(paper.claims, found, strict=True):
        assert re.search(r"section|appendix", claim.source) and list(measured["numbers"]) == claim.numbers
        assert claim.statement.endswith(".") and claim.measured.endswith(".")


def test_texts_are_drawn_from_the_seed_and_differ_in_kind(tokenizer: PreTrainedTokenizerFast) -> None:
    for kind in texts.KINDS:
        one, same, other = (texts.make(tokenizer, kind, seed=seed, tokens=300) for seed in (1, 1, 2))
        assert one.shape == (1, 300) and torch.equal(one, same) and not torch.equal(one, other)
    assert len({texts.varied(random.Random(seed)) for seed in range(300)}) == 300
    pattern = r"has (\d+) .*buys (\d+) .*away (\d+).*so (\d+) are left\.$"
    start, more, less, left = map(int, re.findall(pattern, texts.sums(random.Random(0)))[0])
    assert start + more - less == left


def test_a_recording_is_what_the_model_computed(lab: Lab, recording: Recording) -> None:
    """Queries before RoPE are W_Q times the hidden states, and the recorded attention is the model's own."""
    for layer in recording.layers:
        projected = torch.einsum("btc,hcd->bhtd", layer.hidden_states, layer.query_weight)
        torch.testing.assert_close(layer.plain_queries, projected, rtol=1e-4, atol=1e-5)
    eager = tiny_llama(max_position_embeddings=2048, attn_implementation="eager")
    with torch.no_grad():
        output = eager(recording.input_ids, output_attentions=True, output_hidden_states=True)
    for layer, weights in zip(recording.layers, output.attentions, strict=True):
        got = later_attention(recording, layer).reshape(4, recording.later, -1)
        np.testing.assert_allclose(got, as_array(weights[0, :, recording.split :]), atol=1e-5)
    half = slice(recording.split, recording.split + recording.later // 2)
    torch.testing.assert_close(recording.residual[0], output.hidden_states[1][0, half], rtol=1e-4, atol=1e-3)


def prompt_states(recording: Recording) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of the prompt in each layer."""
    split = recording.split
    return [
        (layer.keys[:, :, :split].clone(), layer.values[:, :, :split].clone()) for layer in recording.layers
    ]


def test_reading_on_from_a_whole_cache_changes_nothing(lab: Lab, recording: Recording) -> None:
    stored = prompt_states(recording)
    cache = compressed(stored, [torch.ones(keys.shape[:3], dtype=torch.bool) for keys, _ in stored])
    got = residual_after(lab, recording, cache, recording.residual.shape[1])
    np.testing.assert_allclose(got, as_array(recording.residual), rtol=1e-4, atol=1e-3)


def test_a_removed_token_is_no_longer_read(lab: Lab, recording: Recording) -> None:
    split, half, stored = recording.split, recording.split // 2, prompt_states(recording)
    kept = [torch.arange(split).expand(keys.shape[:3]) >= half for keys, _ in stored]
    before = compressed(stored, kept)
    for keys, values in stored:
        keys[:, :, :half] = values[:, :, :half] = 1e3
    caches, ids = (before, compressed(stored, kept)), recording.input_ids[:, split:]
    assert torch.equal(*(read_on(lab.model, ids, cache, split).logits for cache in caches))


def test_the_rope_base_has_to_be_plain(lab: Lab) -> None:
    scaled = tiny_llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0})
    refused(lambda: record(Lab(scaled, lab.tokenizer, SCALE), "varied"), "linear")


def test_expected_attention_compares_methods_of_one_size(lab: Lab, recording: Recording) -> None:
    kept = expected_attention.masks(recording, recording.layers[0], 48, torch.Generator().manual_seed(0))
    adaptive = kept.pop(expected_attention.VARIANTS["adaptive"]).sum(dim=-1)
    assert adaptive.sum() == 2 * 48 and adaptive.min() >= 48 // 5 and len(adaptive.unique()) == 2
    assert {int(mask.sum(dim=-1).unique()) for name, mask in kept.items() if name != "lagkv"} == {48}
    assert 44 <= int(kept["lagkv"].sum(dim=-1).unique()) <= 48  # its partitions are whole
    everything = [
        {"all": torch.ones(1, 2, 96, dtype=torch.bool), "one": kept["tova"]} for _ in recording.layers
    ]
    errors = expected_attention.reconstruction(lab, recording, everything)
    assert errors["all"] < 1e-4 < errors["one"]


def test_the_score_with_w_o_is_equation_9_of_each_query_head(lab: Lab, recording: Recording) -> None:
    """Against the reference head by head, with columns of the model's own projection."""
    layer, module = recording.layers[0], lab.model.base_model.layers[0].self_attn
    statistics = expected_attention.statistics(layer, 96, recording, recording.later)
    got = expected_attention.by_output(layer, layer.keys, layer.values, statistics)[0]
    mean, covariance, keys, values = (as_array(each)[0] for each in (*statistics, layer.keys, layer.values))
    columns = np.split(as_array(module.o_proj.weight), 4, axis=1)
    each = [
        expected_attention.paper.contribution(
            expected_attention.paper.expected_weights(keys[head // 2], mean[head], covariance[head]),
            values[head // 2],
            0.02,
            columns[head],
        )
        for head in range(4)
    ]
    np.testing.assert_allclose(got, [(each[0] + each[1]) / 2, (each[2] + each[3]) / 2], rtol=1e-3)


def test_a_hidden_token_is_as_good_as_removed(lab: Lab, recording: Recording) -> None:
    """A mask in a whole cache gives what a cache without the tokens gives."""
    split, count = recording.split, recording.residual.shape[1]
    scores = [tova.score(layer.queries[:, :, :split], layer.keys[:, :, :split]) for layer in recording.layers]
    kept = [score >= score.median() for score in scores]
    wanted = residual_after(lab, recording, compressed(prompt_states(recording), kept), count)
    np.testing.assert_allclose(read_kept(lab, recording, kept, count), wanted, atol=1e-4)
    assert not lab.model.base_model.layers[0].self_attn._forward_pre_hooks


def test_ranks_give_spearman() -> None:
    rising = np.array([1.0, 2.0, 4.0, 1000.0])
    assert correlation(
        expected_attention.ranks(rising), expected_attention.ranks(np.exp(rising / 100))
    ) == pytest.approx(1)
    assert expected_attention.ranks(np.array([[3.0, 1.0, 2.0]])).tolist() == [[2, 0, 1]]


def test_keydiff_volume_by_hand() -> None:
    """Keys (1, 0), (0, 2) and (5, 5), of which the first two stay: det = 4."""
    keys = np.array([[[1.0, 0.0], [0.0, 2.0], [5.0, 5.0]]])
    assert keydiff.log_volume(keys, np.array([[True, True, False]])) == pytest.approx(np.log(4))


def test_momentkv_errors_are_zero_where_the_theory_says_so() -> None:
    """Equal evicted keys: the moments are exact. All keys
    orthogonal to the query: every output is a plain mean.
    """
    draw = np.random.default_rng(0)
    query, keys, values = (draw.normal(size=(1, 2, count, 4)) for count in (3, 9, 9))
    kept = np.ones((1, 2, 9), dtype=bool)
    kept[..., 1:5] = False
    keys[..., 1:5, :] = keys[..., 1:2, :]
    got = momentkv.errors(query, keys, values, kept) | momentkv.corrections(query, keys, values, kept)
    np.testing.assert_allclose([got["first"], got["spread"], got["gap"]], 0, atol=1e-12)
    np.testing.assert_allclose(got["direction"], 1)
    assert (got["none"] > 1e-3).all()
    np.testing.assert_allclose(got["gamma"] * got["mass"], got["none"])
    np.testing.assert_allclose(momentkv.errors(0 * query, keys, values, kept)["mass"], 4 / 9)


def test_selection_by_steps_is_phase_1_of_algorithm_1() -> None:
    """Token by token as the reference decodes; without moments,
    and with values of length one, where no residual selects.
    """
    draw = torch.Generator().manual_seed(1)
    queries, keys, values = (
        torch.randn(2, heads, 24, 8, generator=draw, dtype=torch.float64) for heads in (4, 2, 2)
    )
    chosen = {}
    for weight in momentkv.BY_STEPS:
        chosen[weight] = list(momentkv.by_steps(queries, keys, values, 6, [9, 24], weight))
        added = torch.ones_like(values) if weight == "attention" else values
        arrays = [as_array(each) for each in (queries, keys, added)]
        left, moments = [each[:, :, :6] for each in arrays[1:]], reference.no_moments(*arrays[1:])
        for last in range(6, 24):
            _, *left, after = reference.decode_step(*[each[:, :, last] for each in arrays], *left, moments, 6)
            moments = after if weight == "residual" else moments
            if last == 8:
                np.testing.assert_array_equal(
                    arrays[1][:, :, :9][chosen[weight][0].numpy()].reshape(2, 2, 6, 8), left[0]
                )
        np.testing.assert_array_equal(arrays[1][chosen[weight][1].numpy()].reshape(2, 2, 6, 8), left[0])
    assert len({mask[1].numpy().tobytes() for mask in chosen.values()}) == 3


def test_moments_in_half_precision_stall_where_half_precision_does() -> None:
    """MK-C2: a sum of ones stops at 2048 in float16; few small numbers are exact."""
    ones = np.ones((1, 1, 3000, 1))
    assert momentkv.in_half(ones, ones, ones[..., 0] > 0)[1:] == (2048, 2048, 2048)
    keys = np.arange(6.0).reshape(1, 1, 3, 2)
    evicted = np.array([[[True, False, True]]])
    exact = reference.update(reference.no_moments(keys, keys), keys, keys, evicted)
    for half, whole in zip(momentkv.in_half(keys, keys, evicted), exact, strict=True):
        np.testing.assert_array_equal(half, whole)


def test_keydiff_variants_of_the_tables(recording: Recording) -> None:
    kept = keydiff.tables(as_array(recording.layers[0].keys), 0.5)
    assert {int(mask.sum(dim=-1).unique()) for mask in kept.values()} == {64}
    assert torch.equal(kept["keydiff"], kept["pairwise"])
    assert kept["recent_20"][..., -12:].all() and not torch.equal(kept["recent_20"], kept["keydiff"])
    assert len({mask.numpy().tobytes() for mask in kept.values()}) == len(kept) - 1


def test_keydiff_in_one_block_is_keydiff_in_one_shot_and_smaller_blocks_are_not(
    lab: Lab, recording: Recording
) -> None:
    """The cache that evicts, against the mask in a whole cache."""
    kept = [keydiff.tables(as_array(layer.keys)[:, :, :96], 0.5) for layer in recording.layers]
    whole, in_blocks = (keydiff.error_in_blocks(lab, recording, "keydiff", block) for block in (96, 24))
    assert whole == pytest.approx(
        expected_attention.reconstruction(lab, recording, kept)["keydiff"], rel=1e-4
    )
    assert whole != pytest.approx(in_blocks, rel=1e-2)


def test_gvote_synthetic_queries_without_noise_are_the_mean_query(recording: Recording) -> None:
    layer, channels = recording.layers[0], recording.layers[0].hidden_states.shape[-1]
    got = gvote.synthetic_queries(layer, 96, 1, recording.theta, np.zeros((2, channels)))
    mean = as_array(layer.plain_queries)[0, :, gvote.SINKS : 96].mean(axis=1)
    assert got.shape == (4, 2, 8)
    np.testing.assert_allclose(
        np.linalg.norm(got, axis=-1), np.linalg.norm(mean, axis=-1)[:, None].repeat(2, 1), rtol=1e-4
    )


def test_nearness_is_the_correlation_over_all_pairs() -> None:
    """A turning vector is the less alike the further; the other head is random; each pair by a loop."""
    angles, draw = torch.arange(8) / 4, torch.Generator().manual_seed(0)
    states = torch.stack(
        [torch.stack([angles.cos(), 2 * angles.sin()], dim=-1), torch.randn(8, 2, generator=draw)]
    )
    pairs = [(one, other) for one in range(8) for other in range(one)]
    for head, got in zip(as_array(states), lagkv.nearness(states), strict=True):
        cosines = [
            head[one] @ head[other] / np.linalg.norm(head[one]) / np.linalg.norm(head[other])
            for one, other in pairs
        ]
        assert got == pytest.approx(
            np.corrcoef(cosines, [-np.log(one - other) for one, other in pairs])[0, 1]
        )
    assert lagkv.nearness(states)[0] > 0.7


def test_keys_before_rope_are_the_projection(lab: Lab, recording: Recording) -> None:
    """Equal hidden states give equal keys before RoPE, so their nearness is that of W_K times the states."""
    layer, module = recording.layers[0], lab.model.base_model.layers[0].self_attn
    projected = module.k_proj(layer.hidden_states).unflatten(-1, (2, -1)).transpose(1, 2)
    got = lagkv.near_are_alike(lab, layer.keys, layer.values, 0)
    for name, states in (("keys", layer.keys), ("plain_keys", projected), ("values", layer.values)):
        np.testing.assert_allclose(
            got[f"near_{name}"][0], lagkv.nearness(states[0, :, lagkv.SINKS :]), atol=1e-4
        )
    assert not np.allclose(got["near_keys"], got["near_plain_keys"], atol=1e-3)


def test_the_first_digit_of_chunks(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache holds what the paper's recursion keeps; where nothing can be removed, the digit is that of
    the full cache.
    """
    lengths: list[int] = []

    def reads(model: Any, ids: torch.Tensor, cache: Any, *arguments: Any, **named: Any) -> Any:
        lengths.append(cache.get_seq_length() if isinstance(cache, DynamicCache) else cache.layers[1].stored)
        return read_on(model, ids, cache, *arguments, **named)

    monkeypatch.setattr(lagkv, "read_on", reads)
    lagkv.first_digits(lab, "varied")
    kept: Any = {"keep_ratio": min(SCALE.keep_ratios), "sink_size": lagkv.SINKS}
    lags = sorted(SCALE.lag_sizes, reverse=True)
    assert lengths == [272, *(lagkv.paper.retained_length(272, lag_size=lag, **kept) for lag in lags)]
    whole, in_chunks = lagkv.first_digits(replace(lab, scale=replace(SCALE, lag_sizes=(129,))), "varied")
    assert whole == in_chunks


def test_partial_match() -> None:
    wanted = {" 12 34,56.": 1, "It is 99934": 2 / 6, "": 0}
    assert {answer: lagkv.partial_match(answer, "123456") for answer in wanted} == pytest.approx(wanted)


def test_chance_is_the_partial_match_of_random_digits() -> None:
    """A claim is not testable where a method does no better."""
    draw, scale = random.Random(0), Scale()
    lengths = (scale.passkey_digits + lagkv.SPARE, scale.passkey_digits)
    drawn = [
        ["".join(draw.choice("0123456789") for _ in range(length)) for length in lengths] for _ in range(500)
    ]
    chance = np.mean([lagkv.partial_match(given, answer) for given, answer in drawn])
    (claim,) = (each for each in lagkv.PAPER.claims if each.id == "LK-14 (LocalKV)")
    assert claim.possible_if[1].bound == pytest.approx(chance, abs=0.005)
    assert f"({claim.possible_if[1].bound:g} by chance)" in claim.measured


def test_the_long_number_stands_in_the_text(tokenizer: PreTrainedTokenizerFast) -> None:
    for kind in texts.KINDS:
        context_ids, question_ids, answer = lagkv.make_text(
            tokenizer, replace(SCALE, passkey_tokens=500), kind, 3
        )
        assert context_ids.shape == (1, 500) and tokenizer.decode(context_ids[0]).count(answer) == 1
        assert len(answer) == 16 and answer not in tokenizer.decode(question_ids[0])


def test_answers_of_a_batch_are_the_models_own(lab: Lab) -> None:
    """Whole caches in one batch answer as `generate` does prompt by prompt."""
    prompts = lagkv.read(lab, KINDS)
    whole = [torch.ones(keys.shape[:3], dtype=torch.bool) for keys, _ in prompts.layers]
    one = lagkv.answers(lab, prompts, whole)
    count = SCALE.passkey_digits + lagkv.SPARE
    for index, kind in enumerate(KINDS):
        context_ids, question_ids, _ = lagkv.make_text(lab.tokenizer, SCALE, kind, 0)
        ids = torch.cat([context_ids, question_ids], dim=1)
        wanted = lab.model.generate(
            ids,
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            **versions.argument(DynamicCache()),
        )
        assert one[index] == lab.tokenizer.decode(wanted[0, ids.shape[1] :])


def test_layers_of_different_lengths_read_everything_they_hold(model: LlamaForCausalLM) -> None:
    """The first layer whole and the second without its
    first half, against an explicit mask in the same model.
    """
    ids, full = IDS[:, :40], DynamicCache()
    read(model, ids[:, :30], full)
    kept = [torch.ones(1, 2, 30, dtype=torch.bool), torch.arange(30).expand(1, 2, 30) >= 15]
    cache = compressed([(layer.keys, layer.values) for layer in full.layers], kept)
    with torch.no_grad():
        got = [read_on(model, ids[:, place : place + 1], cache, place).logits for place in range(30, 40)]
    whole = torch.ones(1, 1, 40, 40, dtype=torch.bool).tril()
    part = whole & ~((torch.arange(40) >= 30)[:, None] & (torch.arange(40) < 15))
    wanted = masked_logits(model, ids, {0: whole, 1: part})[:, 30:]
    torch.testing.assert_close(torch.cat(got, dim=1), wanted, rtol=1e-4, atol=1e-4)


def measured(lines: list[store.Line]) -> list[tuple[str, str, int]]:
    return [(line["paper"], line["text"], line["seed"]) for line in lines]


def test_a_finished_run_measures_nothing_again(
    finished: tuple[Path, list[store.Line]], model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, lines = finished
    assert set(measured(lines)) == set(plan_for(model_folder).lines())
    monkeypatch.setattr(run, "_observed", lambda *arguments: pytest.fail("measured again"))
    assert store.run(plan_for(model_folder), folder) == lines
    one = plan_for(model_folder, ["gvote"], texts=("code",))
    assert measured(one.own(store.run(one, folder))) == [("gvote", "code", 0), ("gvote", "code", 1)]


def test_more_texts_join_the_results(
    finished: tuple[Path, list[store.Line]], model_folder: Path, tmp_path: Path
) -> None:
    store.write(tmp_path / store.RESULTS, finished[1])
    told: list[str] = []
    more = plan_for(model_folder, ["keydiff", "lagkv"], texts=("varied", "chat"), seeds=(1, 2))
    lines = store.run(more, tmp_path, advance=lambda progress: told.append(progress.text))
    batches = ["LagKV, chat, seed 1", "LagKV, varied, seed 2", "LagKV, chat, seed 2"]
    assert told == [*batches, "KeyDiff, chat, seed 1", "KeyDiff, chat, seed 2", "KeyDiff, varied, seed 2"]
    assert len(more.own(lines)) == 8
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 26


@pytest.mark.slow
def test_two_processes_find_the_same(
    finished: tuple[Path, list[store.Line]], model_folder: Path, tmp_path: Path
) -> None:
    assert without_seconds(store.run(plan_for(model_folder), tmp_path, jobs=2)) == without_seconds(
        finished[1]
    )


def test_measurements_of_two_kinds_are_not_mixed(
    finished: tuple[Path, list[store.Line]],
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store.write(tmp_path / store.RESULTS, finished[1])
    refused(
        lambda: store.run(plan_for(model_folder, scale=replace(SCALE, prompt_tokens=128)), tmp_path),
        "measurements with prompt_tokens 96, wanted a folder of its own for prompt_tokens 128",
    )
    monkeypatch.setattr(run, "versions", lambda: evaluation.versions() | {"numpy": "9"})
    refused(
        lambda: store.run(plan_for(model_folder), tmp_path),
        r"output: .* measurements with numpy .*, wanted a folder of its own for numpy 9",
    )


def test_what_is_written(result: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "claims"
    assert sorted(run.write(result, folder)) == sorted(folder.iterdir())
    assert json.loads((folder / "results.json").read_text()) == json.loads(json.dumps(result))
    assert [paper["paper"] for paper in result["papers"]] == list(run.PAPERS)
    page, index = (folder / "claims.html").read_text(), (folder / "index.md").read_text()
    assert index.count("](keydiff.md)") == len(keydiff.PAPER.claims) and not re.findall(r"https?://", page)
    for paper in result["papers"]:
        picture = folder / paper["picture"]
        assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size < 150_000
        text = (folder / f"{paper['paper']}.md").read_text()
        for claim in paper["claims"]:
            # four texts give no interval
            told = (UNDECIDED, "An interval needs 12 texts, and there are only 4.")
            assert (claim["verdict"], claim["changes"]) == told
            assert f"## {claim['id']}: {UNDECIDED}\n" in text and html.escape(claim["rule"]) in page
            row = next(row for row in index.splitlines() if f"| {claim['id']}: " in row)
            assert row.endswith(f" | 4 | {' | '.join(told)} |")
            for number in claim["numbers"].values():
                assert (number["texts"], number["low"], number["high"]) == (4, None, None)
                assert set(number["by_text"]) in (set(KINDS), set())
        rows = re.findall(r"^\|.*\|$", text, re.MULTILINE)
        assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {11}


def test_the_stored_results_follow_from_their_measurements() -> None:
    """docs/claims holds a real run: today's rules make the
    stored verdicts and intervals of the stored measurements.
    """
    folder = ROOT / "docs" / "claims"
    result = json.loads((folder / "results.json").read_text())
    assert (result["model"], result["weights"]) == ("embedded", "SmolLM2-135M-Instruct")
    kinds, seeds = tuple(result["texts"]), result["seeds"]
    plan = run.Plan("embedded", check_claims(), kinds, seeds, seeds_of=result["seeds_of"])
    lines = list(store.read(folder / "results.jsonl", run.Plan.identify).values())
    assert len(lines) == len(plan.lines())
    made = json.loads(json.dumps(run.report(plan, lines, result["command"])))
    assert made | {"date": result["date"]} == result


@pytest.mark.slow
def test_the_command(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scale.__init__, "__defaults__", tuple(vars(SCALE).values()))
    asked = [
        *("claims", "--model", model_folder, "--output", tmp_path / "claims", "--seeds", 2),
        *("--only", "KD-7 (diversity),MK-36", "--texts", "chat,sums"),
    ]
    got = as_json(*asked)
    claims = [claim["id"] for paper in got["papers"] for claim in paper["claims"]]
    assert claims == ["KD-7 (diversity)", "MK-36 (never worse)"]
    assert "--only 'KD-7 (diversity),MK-36' --texts 'chat,sums'" in got["command"]
    assert (tmp_path / "claims" / "momentkv.png").is_file()
    says(printed(*asked), "gain_over_tova > 0: ", "MK-36")


@pytest.mark.parametrize(
    ("chosen", "ids"),
    [
        ({"only": ["KD-7"]}, ["KD-7 (correlation)", "KD-7 (diversity)"]),
        ({"papers": ["keydiff"], "only": ["KD-7 (diversity)"]}, ["KD-7 (diversity)"]),
    ],
)
def test_claims_are_chosen_by_paper_and_id(chosen: dict[str, list[str]], ids: list[str]) -> None:
    assert list(check_claims()) == list(run.PAPERS)
    assert [claim.id for claim in check_claims(**chosen)["keydiff"]] == ids


def test_the_help_names_every_kind_of_text_and_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    says(" ".join(printed("claims", "--help").split()), f"Some of {', '.join(texts.KINDS)}", *run.PAPERS)
