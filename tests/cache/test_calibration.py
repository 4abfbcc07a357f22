"""Calibrated state: what is computed from a text, how it reaches a method, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import tiny_llama
from safetensors.torch import save_file
from tools.reading import IDS, cached, positions_of, read, refused
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from evictionary.cache import calibration
from evictionary.cache.evicting_cache import EvictingCache
from evictionary.cli.app import app
from evictionary.errors import UsageError
from evictionary.evaluation.calibration import of_text
from evictionary.reference import duo_attention, q_filters, rope, triattention

TEXT = torch.randint(3, 259, (1, 300), generator=torch.Generator().manual_seed(8))


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(max_position_embeddings=512).double()


@pytest.fixture
def file(model: LlamaForCausalLM, tmp_path: Path) -> Path:
    path = tmp_path / "text.calibration"
    calibration.write(model, of_text(model, TEXT), path)
    return path


def test_a_text_gives_what_the_reference_computes_from_its_queries(model: LlamaForCausalLM, file: Path) -> None:
    with EvictingCache(model, None, record=("queries",)) as full, torch.no_grad():
        model(TEXT, past_key_values=full, use_cache=True)
    queries = full.recorded[1]["queries"].numpy()
    state = calibration.read(model, file)[1]
    keys = full.layers[1].keys.numpy()
    mean, slack = triattention.statistics(rope.rotate(queries, -np.arange(300.0)))
    inputs = calibration.at_position(model, 1, state, 40)
    wanted = {
        "query_direction": triattention.average_over_offsets(mean, position=40),
        "query_slack": slack,
        "q_filters": q_filters.calibrate(queries, 2),
        "gates": duo_attention.estimate_gates(mean, rope.rotate(keys, -np.arange(300.0)).mean(axis=2)),
    }
    for name, value in wanted.items():
        np.testing.assert_allclose(inputs[name].numpy(), value, atol=2e-4, err_msg=name)


@pytest.mark.parametrize("method", ["triattention", "q_filters"])
def test_the_file_reaches_each_head_and_the_prompt_calibrates_without_one(model: LlamaForCausalLM, file: Path, method: str) -> None:
    """With ragged heads each one is scored alone, and keeps what it keeps beside the others."""
    options = {"calibration": str(file)}
    kept = positions_of(cached(model, IDS, method, budget=20, options=options).layers[1])
    with cached(model, IDS, f"{method}+ada_kv", budget=40, options=options, every=1) as ragged:
        assert ragged.tokens_kept == 40
        with torch.no_grad():
            model(IDS[:, :1], past_key_values=ragged, use_cache=True)
        assert ragged.tokens_kept == 40
    assert kept != positions_of(cached(model, IDS, method, budget=20).layers[1])
    state = calibration.read(model, file)
    score = {"triattention": triattention.score, "q_filters": q_filters.score}[method]
    inputs = {name: each.double().numpy() for name, each in calibration.at_position(model, 1, state[1], 60).items()}
    arguments = (inputs["q_filters"],) if method == "q_filters" else (inputs["query_direction"], inputs["query_slack"])
    full = cached(model, IDS, None)
    scores = score(full.layers[1].keys.numpy(), *arguments)
    assert kept == [sorted(np.argsort(-row, kind="stable")[:20].tolist()) for row in scores[0]]


def test_duo_attention_reads_its_gates_from_the_file(model: LlamaForCausalLM, tmp_path: Path) -> None:
    """Gates that were trained: of each layer one head streams; later tokens push earlier ones out of its window."""
    gates = {layer: state | {"gates": torch.tensor([[0.9, 0.1]])} for layer, state in of_text(model, TEXT).items()}
    calibration.write(model, gates, tmp_path / "trained")
    options = {"calibration": str(tmp_path / "trained"), "sink_size": 2, "recent_size": 6}
    cache = cached(model, IDS, "duo_attention", options=options, every=1)
    assert positions_of(cache.layers[1]) == [list(range(60)), [0, 1, *range(54, 60)]]
    read(model, IDS[:, :1], cache)
    assert positions_of(cache.layers[1]) == [list(range(61)), [0, 1, *range(55, 61)]]
    assert cache.nbytes < cache.nbytes_full
    refused(lambda: EvictingCache(model, "duo_attention", every=4), "every: got 4 without the option calibration, wanted 0")


def test_another_model_another_file_and_a_short_text_are_refused(model: LlamaForCausalLM, file: Path, tmp_path: Path) -> None:
    other = tiny_llama(max_position_embeddings=512).double()
    with torch.no_grad():
        next(iter(other.model.layers[0].self_attn.parameters())).mul_(2)
    refused(
        lambda: EvictingCache(other, "q_filters", options={"calibration": str(file)}),
        "of another model, wanted that of LlamaForCausalLM",
    )
    save_file({"x": torch.zeros(1)}, tmp_path / "x")
    for path, message in ((tmp_path / "x", "of schema None, wanted"), (tmp_path / "absent", "a file of `evictionary calibrate`")):
        with pytest.raises(UsageError, match=message):
            EvictingCache(model, "triattention", options={"calibration": str(path)})
    refused(
        lambda: EvictingCache(model, "keydiff", options={"calibration": str(file)}),
        "option calibration: keydiff has no such option",
    )
    refused(lambda: of_text(model, TEXT[:, :40]), "got 40 tokens, wanted at least 256")
    refused(lambda: calibration.write(model, of_text(model, TEXT), tmp_path), "wanted a file that can be written")


def test_the_command_writes_a_file_for_the_model(model_folder: Path, tmp_path: Path) -> None:
    text, output = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("The baker sold eleven loaves of bread on Monday, and none on Tuesday. " * 20, encoding="utf-8")
    arguments = ["calibrate", "--model", str(model_folder), "--text-file", str(text), "--output", str(output)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "2 layers, from" in done.output and output.is_file()
    assert CliRunner().invoke(app, [*arguments[:-3], str(tmp_path / "absent"), *arguments[-2:]]).exit_code == 2
