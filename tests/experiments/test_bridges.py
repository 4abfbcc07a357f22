"""The bridges to kvpress, lm-evaluation-harness and the generate of transformers. What the first two take
from there has a stand-in; kvpress 0.5.5 itself kept the same tokens.
"""

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tools import printed
from tools.pages import ROOT, blocks
from tools.reading import IDS, generate, masked_logits, refused
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from evictionary import EvictingCache
from evictionary.cache.export import export
from evictionary.errors import UsageError
from evictionary.methods.method import Request
from evictionary.methods.resolve import resolve
from evictionary.models import versions
from evictionary.optimized import ada_kv, keydiff, selection, snapkv


def bridge_to(name: str, others: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of ours, imported where these modules of others have these members."""
    for other, members in others.items():
        monkeypatch.setitem(sys.modules, other, ModuleType(other))
        vars(sys.modules[other]).update(members)
    monkeypatch.delitem(sys.modules, f"evictionary.evaluation.{name}", raising=False)
    return importlib.import_module(f"evictionary.evaluation.{name}")


# kvpress

B, H_Q, H_KV, T, D = 2, 4, 2, 40, 8
KEYS, VALUES = torch.randn(2, B, H_KV, T, D, generator=torch.Generator().manual_seed(0))
QUERIES = torch.randn(B, H_Q, T, D, generator=torch.Generator().manual_seed(1))
STILL = {"position_embeddings": (torch.ones(B, T, D), torch.zeros(B, T, D))}
WINDOW = {"window_size": 8, "kernel_size": 3}


def prerope_queries(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    return module.q_proj(hidden).view(B, T, H_Q, D).transpose(1, 2)


@pytest.fixture
def bridge(monkeypatch: pytest.MonkeyPatch) -> Any:
    others: dict[str, dict[str, Any]] = {
        "kvpress": {},
        "kvpress.presses": {},
        "kvpress.presses.base_press": {"BasePress": object},
        "kvpress.utils": {"get_prerope_query_states": prerope_queries},
    }
    return bridge_to("kvpress", others, monkeypatch)


def layer(bridge: Any) -> Any:
    return bridge.layer(H_Q, H_KV, D, num_hidden_layers=2)


def compressed(bridge: Any, module: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = QUERIES.transpose(1, 2).flatten(2)
    return bridge.MethodPress(*arguments).compress(module, hidden, KEYS, VALUES, None, STILL)


@pytest.mark.parametrize(
    ("arguments", "scores"),
    [
        (("keydiff", 0.5), lambda: keydiff.score(KEYS)),
        (("snapkv", 0.5, WINDOW), lambda: snapkv.score(QUERIES[:, :, -8:], KEYS, **WINDOW)),
    ],
)
def test_a_press_keeps_what_the_method_keeps(bridge: Any, arguments: Any, scores: Any) -> None:
    kept = selection.top_k(scores(), T // 2)
    for got, whole in zip(compressed(bridge, layer(bridge), *arguments), (KEYS, VALUES), strict=True):
        assert torch.equal(got, whole[kept].view(B, H_KV, T // 2, D))


def test_heads_of_different_budgets_are_masked(bridge: Any) -> None:
    module = layer(bridge)
    keys, _ = compressed(bridge, module, "keydiff+ada_kv", 0.5)
    kept = ada_kv.select(keydiff.score(KEYS), T // 2)
    assert keys is KEYS and kept.sum(-1).unique().numel() > 1
    kept[module.masked_key_indices] = True
    assert kept.all() and len(module.masked_key_indices[0]) == B * H_KV * T // 2
    module.config._attn_implementation = "eager"
    refused(lambda: compressed(bridge, module, "keydiff+ada_kv", 0.5), "eager attention", UsageError)


@pytest.mark.parametrize(
    ("method", "needs"),
    [
        ("kvzip", "replay_keys, replay_queries"),
        ("q_filters", "q_filters"),
        ("keydiff+moments", "an attention"),
    ],
)
def test_a_method_that_needs_more_is_refused(bridge: Any, method: str, needs: str) -> None:
    refused(lambda: bridge.MethodPress(method, 0.5), f"which needs {needs}", UsageError)


def test_a_press_scores_the_states_that_a_method_gets(bridge: Any) -> None:
    def score(module: Any, hidden: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> torch.Tensor:
        cos, sin = kwargs["position_embeddings"]
        queries = prerope_queries(module, hidden) * cos[:, None] + sin[:, None]
        assert module.num_key_value_groups == H_Q // H_KV
        return (queries[:, ::2] * keys).sum(-1) + values.sum(-1)

    expected = (QUERIES[:, ::2] * KEYS).sum(-1) + VALUES.sum(-1)
    found = bridge.score_of(SimpleNamespace(score=score), QUERIES.numpy(), KEYS.numpy(), VALUES.numpy())
    assert torch.equal(found, expected)


def test_the_file_of_the_page_is_a_method(bridge: Any, tmp_path: Path) -> None:
    (program,) = [block for block in blocks(ROOT / "docs" / "in_a_model.md", "python") if "score_of" in block]
    (tmp_path / "my_press.py").write_text(program)
    sys.modules["kvpress"].SnapKVPress = lambda **settings: SimpleNamespace(  # type: ignore[attr-defined]
        score=lambda module, hidden, keys, *others: settings["window_size"] * keys.norm(dim=-1)
    )
    states = {"queries": QUERIES, "keys": KEYS, "values": VALUES}
    kept = resolve(str(tmp_path / "my_press.py")).kept(states, Request(compression_ratio=0.5))
    assert torch.equal(kept, selection.top_k(KEYS.norm(dim=-1), T // 2))


def test_a_press_that_reads_more_of_a_layer_is_refused(bridge: Any) -> None:
    greedy = SimpleNamespace(score=lambda module, *others: module.rotary_emb)
    told = "wanted one that reads queries, keys and values alone: .* no attribute 'rotary_emb'"
    refused(lambda: bridge.score_of(greedy, QUERIES, KEYS, VALUES), told, UsageError)


# lm-evaluation-harness


class Theirs:
    """What the harness's own model has, as far as ours asks for it."""

    def __init__(self, pretrained: Any, max_length: int = 60) -> None:
        self.model, self.max_length = pretrained, max_length

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **options: Any) -> Any:
        return self.model.generate(context, max_length=max_length, do_sample=False, pad_token_id=0, **options)


@pytest.fixture
def evicting(monkeypatch: pytest.MonkeyPatch) -> Any:
    others: dict[str, dict[str, Any]] = {
        "lm_eval": {},
        "lm_eval.__main__": {"cli_evaluate": None},
        "lm_eval.api": {},
        "lm_eval.api.registry": {"register_model": lambda name: lambda made: made},
        "lm_eval.models": {},
        "lm_eval.models.huggingface": {"HFLM": Theirs},
    }
    return bridge_to("harness", others, monkeypatch).Evicting


def request(context: torch.Tensor, continuation: torch.Tensor) -> tuple[Any, list[int], list[int]]:
    return ("", ""), context.tolist(), continuation.tolist()


def test_a_continuation_is_as_likely_as_with_a_mask_over_what_is_evicted(
    evicting: Any, shared_model: LlamaForCausalLM
) -> None:
    """StreamingLLM keeps 4 sinks and the latest 16 of 40 tokens; token 40, the last of the context, sees
    these and itself.
    """
    seen = torch.ones(60, 60, dtype=torch.bool).tril()
    seen[40:, 4:24] = False
    logits = masked_logits(shared_model, IDS, dict.fromkeys((0, 1), seen.expand(1, 2, -1, -1)))
    right = logits[0, 40:-1].log_softmax(dim=-1).gather(-1, IDS[0, 41:, None]).sum()
    judged = evicting(shared_model, method="streaming_llm", compression_ratio=0.5)
    asked = [request(IDS[0, :41], following) for following in (IDS[0, 41:], logits[0, 40].argmax()[None])]
    (found, is_greedy), (_, first_is_greedy) = judged._loglikelihood_tokens(asked)
    assert found == pytest.approx(float(right), abs=1e-4) and not is_greedy and first_is_greedy


def test_a_long_context_loses_its_beginning(evicting: Any, shared_model: LlamaForCausalLM) -> None:
    short, whole = (evicting(shared_model, max_length=length) for length in (20, 60))
    assert short._loglikelihood_tokens([request(IDS[0, :55], IDS[0, 55:])]) == whole._loglikelihood_tokens(
        [request(IDS[0, 39:55], IDS[0, 55:])]
    )


def test_a_context_of_one_token_has_nothing_to_evict(evicting: Any, shared_model: LlamaForCausalLM) -> None:
    judged = [evicting(shared_model, compression_ratio=ratio) for ratio in (0.0, 0.5)]
    full, half = (each._loglikelihood_tokens([request(IDS[0, :1], IDS[0, 1:9])]) for each in judged)
    assert full == half


def test_an_answer_is_generated_with_the_compressed_prompt(
    evicting: Any, shared_model: LlamaForCausalLM
) -> None:
    judged = evicting(shared_model, method="knorm", budget=9)
    with EvictingCache(shared_model, "knorm", budget=9) as cache:
        expected = generate(shared_model, IDS, cache, count=6)
    assert torch.equal(judged._model_generate(IDS, IDS.shape[1] + 6, []), expected)


def test_what_evicts_nothing_or_cannot_be_understood_is_refused(
    evicting: Any, shared_model: LlamaForCausalLM
) -> None:
    refused(lambda: evicting(shared_model, method="keydif"), "keydif")
    whole_text = [SimpleNamespace(args=("a text",))]
    refused(
        lambda: evicting(shared_model).loglikelihood_rolling(whole_text),
        "^tasks: got one that scores a whole",
    )


# transformers' own generate, with an exported folder

IS_CALLED: dict[str, Any] = {
    "attention_mask": torch.ones_like(IDS),
    "max_new_tokens": 8,
    "do_sample": False,
    "pad_token_id": 0,
}


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies the program to a folder of its
    own before it imports it, and looks at no network here.
    """
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.usefixtures("modules")
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
    path = folder / "custom_generate" / "generate.py"
    assert printed("export", folder, *arguments) == f"{path}\n"
    cache = EvictingCache(model, arguments[1] if arguments[0] == "--method" else "keydiff", **named)
    wanted = generate(model, IDS, cache, min_new_tokens=0)
    cache.close()
    found: Any = model.generate(
        IDS, custom_generate=str(folder), trust_remote_code=True, return_dict_in_generate=True, **IS_CALLED
    )
    assert torch.equal(found.sequences, wanted)
    assert versions.cache_in(found).tokens_kept == cache.tokens_kept < IDS.shape[1]
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.usefixtures("modules")
def test_a_model_folder_with_the_export_evicts_by_itself(model_folder: Path, tmp_path: Path) -> None:
    """from_pretrained then puts the function in the place of model.generate."""
    AutoModelForCausalLM.from_pretrained(model_folder).eval().save_pretrained(tmp_path / "model")
    export(tmp_path / "model", budget=20)
    evicting: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", trust_remote_code=True).eval()
    for ids in ({"inputs": IDS}, {"input_ids": IDS}):
        found = evicting.generate(**ids, return_dict_in_generate=True, **IS_CALLED)
        assert versions.cache_in(found).tokens_kept < 20 + 8
    assert torch.equal(evicting.generate(IDS, **IS_CALLED), found.sequences)
    refused(
        lambda: evicting.generate(IDS, **versions.argument(EvictingCache(evicting)), **IS_CALLED),
        f"{versions.NAME}: got a cache, wanted none",
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
