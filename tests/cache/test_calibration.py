"""Calibrated state: what is computed from a text, how it reaches a method, and what is refused."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny_llama
from safetensors.torch import save_file
from tools import invoke, printed
from tools.reading import IDS, cached, near, places, positions_of, read, refused
from transformers import LlamaForCausalLM

from evictionary import EvictingCache
from evictionary.cache import calibration
from evictionary.evaluation.calibration import of_text
from evictionary.reference import duo_attention, q_filters, rope, selection, triattention

TEXT = torch.randint(3, 259, (1, 300), generator=torch.Generator().manual_seed(8))


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(max_position_embeddings=512).double()


@pytest.fixture
def file(model: LlamaForCausalLM, tmp_path: Path) -> Path:
    path = tmp_path / "text.calibration"
    calibration.write(model, of_text(model, TEXT), path)
    return path


def test_a_text_gives_what_the_reference_computes_from_its_queries(
    model: LlamaForCausalLM, file: Path
) -> None:
    full = cached(model, TEXT, None, record=("queries",))
    queries, keys = full.recorded[1]["queries"].numpy(), full.layers[1].keys.numpy()
    mean, slack = triattention.statistics(rope.rotate(queries, -np.arange(300.0)))
    inputs = calibration.at_position(model, 1, calibration.read(model, file)[1], 40)
    wanted = {
        "query_direction": triattention.average_over_offsets(mean, position=40),
        "query_slack": slack,
        "q_filters": q_filters.calibrate(queries, 2),
        "gates": duo_attention.estimate_gates(mean, rope.rotate(keys, -np.arange(300.0)).mean(axis=2)),
    }
    near([inputs[name] for name in wanted], wanted.values(), rtol=1e-7, atol=2e-4)


@pytest.mark.parametrize(
    ("method", "score", "inputs"),
    [
        ("triattention", triattention.score, ("query_direction", "query_slack")),
        ("q_filters", q_filters.score, ("q_filters",)),
    ],
)
def test_the_file_reaches_each_head_and_the_prompt_calibrates_without_one(
    model: LlamaForCausalLM, file: Path, method: str, score: Any, inputs: tuple[str, ...]
) -> None:
    """With ragged heads each one is scored alone, and keeps what it keeps beside the others."""
    options = {"calibration": str(file)}
    kept = positions_of(cached(model, IDS, method, budget=20, options=options).layers[1])
    ragged = cached(model, IDS, f"{method}+ada_kv", budget=40, options=options, every=1)
    assert ragged.tokens_kept == 40
    read(model, IDS[:, :1], ragged)
    assert ragged.tokens_kept == 40
    assert kept != positions_of(cached(model, IDS, method, budget=20).layers[1])
    named = calibration.at_position(model, 1, calibration.read(model, file)[1], 60)
    keys = cached(model, IDS, None).layers[1].keys.numpy()
    assert kept == places(
        selection.top_k(score(keys, *(named[name].double().numpy() for name in inputs)), 20)
    )


def test_duo_attention_reads_its_gates_from_the_file(model: LlamaForCausalLM, tmp_path: Path) -> None:
    """Gates that were trained: of each layer one head
    streams; later tokens push earlier ones out of its window.
    """
    gates = {
        layer: state | {"gates": torch.tensor([[0.9, 0.1]])} for layer, state in of_text(model, TEXT).items()
    }
    calibration.write(model, gates, tmp_path / "trained")
    options = {"calibration": str(tmp_path / "trained"), "sink_size": 2, "recent_size": 6}
    cache = cached(model, IDS, "duo_attention", options=options, every=1)
    assert positions_of(cache.layers[1]) == [list(range(60)), [0, 1, *range(54, 60)]]
    read(model, IDS[:, :1], cache)
    assert positions_of(cache.layers[1]) == [list(range(61)), [0, 1, *range(55, 61)]]
    assert cache.nbytes < cache.nbytes_full
    refused(
        lambda: EvictingCache(model, "duo_attention", every=4),
        "every: got 4 without the option calibration, wanted 0",
    )


def test_another_model_another_file_and_a_short_text_are_refused(
    model: LlamaForCausalLM, file: Path, tmp_path: Path
) -> None:
    other = tiny_llama(max_position_embeddings=512).double()
    other.model.layers[0].self_attn.q_proj.weight.data.mul_(2)
    save_file({"x": torch.zeros(1)}, tmp_path / "x")
    for of, method, path, message in (
        (other, "q_filters", file, "of another model, wanted that of LlamaForCausalLM"),
        (model, "triattention", tmp_path / "x", "of schema None, wanted"),
        (model, "triattention", tmp_path / "absent", "a file of `evictionary calibrate`"),
        (model, "keydiff", file, "option calibration: keydiff has no such option"),
    ):
        refused(functools.partial(EvictingCache, of, method, options={"calibration": str(path)}), message)
    refused(lambda: of_text(model, TEXT[:, :40]), "got 40 tokens, wanted at least 256")
    refused(
        lambda: calibration.write(model, of_text(model, TEXT), tmp_path), "wanted a file that can be written"
    )


def test_the_command_writes_a_file_for_the_model(model_folder: Path, tmp_path: Path) -> None:
    text, output = tmp_path / "text.txt", tmp_path / "out"
    text.write_text(
        "The baker sold eleven loaves of bread on Monday, and none on Tuesday. " * 20, encoding="utf-8"
    )
    asked = ["calibrate", "--model", model_folder, "--output", output, "--text-file"]
    assert "2 layers, from" in printed(*asked, text) and output.is_file()
    assert invoke(*asked, tmp_path / "absent").exit_code == 2
