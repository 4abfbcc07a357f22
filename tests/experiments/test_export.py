"""The exported folder: model.generate evicts with it, offline, as with a cache of ours."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tools.reading import IDS, generate, refused
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from typer.testing import CliRunner

from evictionary.cache.evicting_cache import EvictingCache
from evictionary.cache.export import export
from evictionary.cli.app import app

IS_CALLED: dict[str, Any] = {
    "attention_mask": torch.ones_like(IDS),
    "max_new_tokens": 8,
    "do_sample": False,
    "pad_token_id": 0,
}


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies the program to a folder of its own before it imports it, and looks at no network
    here.
    """
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--budget", "20"], {"budget": 20}),
        (["--method", "snapkv+ada_kv", "--option", "window_size=4"], {"options": {"window_size": 4}}),
        (
            ["--method", "momentkv", "--compression-ratio", "0.75", "--every", "1"],
            {"compression_ratio": 0.75, "every": 1},
        ),
    ],
)
def test_generate_evicts_with_the_exported_folder(
    model: LlamaForCausalLM, tmp_path: Path, arguments: list[str], named: dict[str, Any]
) -> None:
    folder = tmp_path / "evicting"
    done = CliRunner().invoke(app, ["export", str(folder), *arguments])
    assert done.exit_code == 0, done.output
    assert done.stdout.strip() == str(folder / "custom_generate" / "generate.py")
    cache = EvictingCache(model, arguments[1] if arguments[0] == "--method" else "keydiff", **named)
    wanted = generate(model, IDS, cache, min_new_tokens=0)
    cache.close()
    found: Any = model.generate(
        IDS, custom_generate=str(folder), trust_remote_code=True, return_dict_in_generate=True, **IS_CALLED
    )
    assert torch.equal(found.sequences, wanted)
    assert found.past_key_values.tokens_kept == cache.tokens_kept < IDS.shape[1]
    assert model.config._attn_implementation == "sdpa"


def test_a_model_folder_with_the_export_evicts_by_itself(model_folder: Path, tmp_path: Path) -> None:
    """from_pretrained then puts the function in the place of model.generate."""
    AutoModelForCausalLM.from_pretrained(model_folder).eval().save_pretrained(tmp_path / "model")
    export(tmp_path / "model", budget=20)
    evicting: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", trust_remote_code=True).eval()
    for ids in ({"inputs": IDS}, {"input_ids": IDS}):
        found = evicting.generate(**ids, return_dict_in_generate=True, **IS_CALLED)
        assert found.past_key_values.tokens_kept < 20 + 8
    assert torch.equal(evicting.generate(IDS, **IS_CALLED), found.sequences)
    refused(
        lambda: evicting.generate(IDS, past_key_values=EvictingCache(evicting), **IS_CALLED),
        "past_key_values: got a cache, wanted none",
        ValueError,
    )


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"method": "mine.py"}, "method: got 'mine.py', wanted a name of the dictionary"),
        ({"method": "keydif"}, "keydif"),
        ({"budget": 0}, "budget: got 0"),
        ({"compression_ratio": 1.0}, "compression_ratio"),
        ({"options": {"window": 3}}, "option window: keydiff has no such option"),
        ({"method": "h2o", "every": 5}, "every: got 5, wanted 0"),
    ],
)
def test_what_cannot_be_exported_is_refused_and_nothing_is_written(
    tmp_path: Path, named: dict[str, Any], message: str
) -> None:
    refused(lambda: export(tmp_path / "evicting", **named), message)
    assert not (tmp_path / "evicting").exists()


def test_a_generation_of_others_is_left_alone(tmp_path: Path) -> None:
    path = export(tmp_path)
    assert export(tmp_path, budget=5) == path and "'budget': 5" in path.read_text()
    path.write_text("def generate(model): ...\n")
    refused(lambda: export(tmp_path), r"holds another custom_generate/generate\.py")
    assert path.read_text() == "def generate(model): ...\n"
    (tmp_path / "file").write_text("")
    refused(lambda: export(tmp_path / "file"), "wanted a folder that can be written")
