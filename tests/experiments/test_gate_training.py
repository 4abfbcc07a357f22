"""The training of DuoAttention's gates: what it computes,
that a killed one loses nothing, and what is refused.
"""

import os
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import tiny_llama, tiny_tokenizer
from tools import as_json, saved
from tools.families import FAMILIES, build
from tools.reading import IDS, cached, masked_logits, positions_of, refused
from transformers import LlamaForCausalLM

from evictionary.cache import calibration
from evictionary.cache.evicting_cache import EvictingCache
from evictionary.evaluation import gate_training
from evictionary.evaluation.gate_training import GatedModel, Recipe, distance, prompt, recipe_of, train
from evictionary.reference import duo_attention

TOKENIZER = tiny_tokenizer()
RECIPE = Recipe(5, shortest=500, longest=560, sink_size=2, recent_size=6, penalty=0.01, learning_rate=0.2)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(max_position_embeddings=1024)


def test_a_head_mixes_full_and_streaming_attention_as_the_reference_says() -> None:
    model = tiny_llama().double()
    gated, draw = GatedModel(model, sink_size=2, recent_size=3), np.random.default_rng(0)
    queries, keys, values = (draw.normal(size=(1, heads, 9, 8)) for heads in (4, 2, 2))
    gates = np.array([[1.0, 0.5], [0.75, 0.0]])

    def attention(mask: torch.Tensor | None) -> tuple[torch.Tensor, None]:
        states = (
            torch.from_numpy(each) for each in (queries, keys.repeat(2, axis=1), values.repeat(2, axis=1))
        )
        return torch.nn.functional.scaled_dot_product_attention(
            *states, attn_mask=mask, is_causal=mask is None
        ).transpose(1, 2), None

    gated._gates = torch.from_numpy(gates)
    gated._mask = gate_training._streaming_mask(9, 2, 3, model)
    for layer in (0, 1):
        got = gated.attend(layer, torch.nn.Module(), torch.zeros(0), None, attention)[0].transpose(1, 2)
        wanted = duo_attention.gated_attention(
            queries, keys, values, gates[layer, None], sink_size=2, recent_size=3
        )
        np.testing.assert_allclose(got.numpy(), wanted, atol=1e-12)


def test_gates_of_one_are_the_model_and_gates_of_zero_the_model_that_streams(model: LlamaForCausalLM) -> None:
    gated = GatedModel(model, sink_size=2, recent_size=6)
    full = gated.final_states(IDS, 60)
    assert torch.equal(gated.final_states(IDS, 60, torch.ones(2, 2)), full)
    places = torch.arange(60)
    visible = (places <= places[:, None]) & ((places > places[:, None] - 6) | (places < 2))
    torch.testing.assert_close(
        model.lm_head(gated.final_states(IDS, 60, torch.zeros(2, 2)))[None],
        masked_logits(model, IDS, dict.fromkeys(range(2), visible[None, None])),
        atol=1e-4,
        rtol=1e-4,
    )
    assert (gated.final_states(IDS, 7, torch.zeros(2, 2)) - full[-7:]).abs().max() > 0.1
    assert model.config._attn_implementation == "sdpa" and not model.model._forward_pre_hooks


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_gate_for_each_head_with_full_attention(family: str, attention: str) -> None:
    gated = GatedModel(build(family, attn_implementation=attention), sink_size=2, recent_size=6)
    assert gated.layers == ([1, 2] if family == "gemma3" else [0, 1, 2])
    ones = torch.ones(len(gated.layers), gated.num_kv_heads)
    torch.testing.assert_close(
        gated.final_states(IDS, 9, ones), gated.final_states(IDS, 9), atol=1e-4, rtol=1e-4
    )
    gates = (ones / 2).requires_grad_()
    (gradient,) = torch.autograd.grad(distance(gated, IDS, 9, gates), gates)
    assert (gradient != 0).all()


def test_the_gradient_of_each_gate_is_that_of_finite_differences() -> None:
    gated = GatedModel(tiny_llama().double(), sink_size=2, recent_size=6)
    gates = torch.tensor([[0.3, 0.8], [0.6, 0.45]], dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(distance(gated, IDS, 5, gates), gates)
    assert all(weight.grad is None for weight in gated.model.parameters())
    with torch.no_grad():
        for place in np.ndindex(2, 2):
            step = torch.zeros(2, 2, dtype=torch.float64)
            step[place] = 0.01  # the norms of the model round to float32, which a smaller step would see
            slope = (distance(gated, IDS, 5, gates + step) - distance(gated, IDS, 5, gates - step)) / 0.02
            assert abs(slope - found[place]) < 2e-3 * (1 + abs(slope)) and abs(slope) > 0.01, place


def test_prompts_have_random_lengths_and_end_before_the_last_token_of_the_answer() -> None:
    lengths, ends = set(), set()
    for step in range(12):
        ids, rows = prompt(TOKENIZER, RECIPE, step)
        assert torch.equal(prompt(TOKENIZER, RECIPE, step)[0], ids)
        text, _, answer = TOKENIZER.decode(ids[0]).rpartition(" ")
        assert len(answer) == rows - 2 and text.count(answer) >= 2, "all of the answer but its last digit"
        ends.add(rows)
        lengths.add(ids.shape[1] - rows + 1)
    assert ends == {8, 65} and len(lengths) > 6 and max(lengths) <= 560 and min(lengths) > 440


def test_a_killed_training_goes_on_as_if_it_had_not_been_killed(
    model: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unbroken = train(model, TOKENIZER, RECIPE, tmp_path / "unbroken")
    assert len(unbroken.curve) == 5 and unbroken.curve[0][0] == 0 < unbroken.curve[-1][0]
    every = torch.cat(list(unbroken.gates.values()))
    assert 0 <= every.min() < every.max() <= 1

    kill = Mock(side_effect=KeyboardInterrupt)
    for _ in range(2):
        refused(lambda: train(model, TOKENIZER, RECIPE, tmp_path / "killed", kill), error=KeyboardInterrupt)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", kill)
        refused(lambda: train(model, TOKENIZER, RECIPE, tmp_path / "killed"), error=KeyboardInterrupt)
    told = Mock()
    resumed = train(model, TOKENIZER, RECIPE, tmp_path / "killed", told)
    totals = [call.args[0].total for call in told.call_args_list]
    assert totals == [3, 3, 3], "the two steps before are not repeated"
    for again in (resumed, train(model, TOKENIZER, RECIPE, tmp_path / "killed", kill)):
        assert again.curve == unbroken.curve
        assert all(torch.equal(again.gates[layer], gates) for layer, gates in unbroken.gates.items())


@pytest.mark.parametrize(("penalty", "wanted"), [(0.0, 1.0), (1e6, 0.0)])
def test_without_a_penalty_all_heads_stay_and_with_a_huge_one_all_stream(
    model: LlamaForCausalLM, tmp_path: Path, penalty: float, wanted: float
) -> None:
    settings = {"shortest": "500", "longest": "500", "learning_rate": "0.8", "penalty": str(penalty)}
    for gates in train(model, TOKENIZER, recipe_of(4, settings), tmp_path / "state").gates.values():
        assert torch.equal(gates, torch.full((1, 2), wanted))


@pytest.mark.parametrize(
    ("steps", "settings", "message"),
    [
        (
            3,
            {"lenght": "9"},
            r"recipe: got 'lenght' \(did you mean longest\?\), wanted one of shortest, longest, sink_size",
        ),
        (3, {"penalty": "much"}, "penalty: got 'much', wanted a number such as 0.005"),
        (3, {"penalty": "nan"}, "penalty: got nan, wanted at least 0"),
        (3, {"recent_size": "0"}, "recent_size: got 0, wanted at least 1"),
        (3, {"longest": "100"}, "longest: got 100, wanted at least 256"),
        (
            3,
            {"recent_size": "240"},
            "shortest: got prompts of 256 tokens, wanted more than the 256 of a streaming head",
        ),
        (0, {}, "steps: got 0, wanted at least 1"),
    ],
)
def test_a_recipe_that_trains_nothing_is_refused(steps: int, settings: dict[str, str], message: str) -> None:
    refused(lambda: recipe_of(steps, settings), message)


def test_prompts_that_do_not_fit_and_the_state_of_another_training_are_refused(
    model: LlamaForCausalLM, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    refused(lambda: train(model, TOKENIZER, Recipe(1), state), "tokens: got 256, wanted at least")
    refused(
        lambda: train(model, TOKENIZER, Recipe(1, shortest=500, longest=1000), state),
        "got 1065 tokens, wanted at most the model's context of 1024",
    )
    one = Recipe(1, shortest=500, longest=500)
    train(model, TOKENIZER, one, state)
    refused(
        lambda: train(model, TOKENIZER, Recipe(2, shortest=500, longest=500), state),
        r"another recipe.*delete the file to start again",
    )
    other = tiny_llama(max_position_embeddings=1024)
    with torch.no_grad():
        next(other.parameters()).mul_(2)
    refused(lambda: train(other, TOKENIZER, one, state), "another model")
    state.write_bytes(b"no tensors")
    refused(lambda: train(model, TOKENIZER, one, state), "wanted a file of a training of gates, or none")


def test_the_command_trains_and_streaming_heads_free_their_memory(model_folder: Path, tmp_path: Path) -> None:
    said = "The baker sold eleven loaves of bread on Monday, and none on Tuesday. "
    text, output = saved(tmp_path / "text.txt", said * 20), tmp_path / "out"
    recipe = "shortest=500 longest=560 learning_rate=0.3 penalty=0.01 sink_size=2 recent_size=6"
    arguments = [
        *("calibrate", "--model", model_folder, "--text-file", text, "--output", output),
        *("--train-gates", 4, *f" {recipe}".replace(" ", " --recipe ").split()),
    ]
    found = as_json(*arguments)
    assert found == as_json(*arguments), "a finished training is read from its state"
    assert found["heads"] == 4 and len(found["curve"]) == 4 == found["recipe"]["steps"]

    model = tiny_llama(max_position_embeddings=2048)
    state = calibration.read(model, output)
    gates = [float(gate) for layer in sorted(state) for gate in state[layer]["gates"][0]]
    assert [round(gate, 4) for gate in gates] == [gate for row in found["gates"].values() for gate in row]
    options = {"calibration": str(output), "sink_size": 2, "recent_size": 6, "threshold": max(gates)}
    cache = cached(model, IDS, "duo_attention", options=options)
    counts = [len(head) for layer in cache.layers for head in positions_of(layer)]
    assert counts == [60 if gate == max(gates) else 8 for gate in gates] and set(counts) == {60, 8}
    bytes_of_a_token = 2 * 8 * 4  # a key and a value of 8 float32 numbers in each head
    assert cache.nbytes == sum(counts) * bytes_of_a_token < cache.nbytes_full == 240 * bytes_of_a_token
    assert state[0].keys() == {
        *("gates", "q_filters", "query_mean", "query_slack", "surrogate_weights", "surrogate_bias")
    }
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    refused(
        lambda: EvictingCache(model, "duo_attention", options=options),
        "of another model, wanted that of LlamaForCausalLM",
    )
