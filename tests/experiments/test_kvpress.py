"""The bridge to kvpress, with the two names that it takes from there in a stand-in; kvpress 0.5.5 itself kept
the same tokens.
"""

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tools import refused
from tools.pages import ROOT, blocks

from evictionary.errors import UsageError
from evictionary.methods.method import Request
from evictionary.methods.resolve import resolve
from evictionary.optimized import ada_kv, keydiff, selection, snapkv

B, H_Q, H_KV, T, D = 2, 4, 2, 40, 8
KEYS, VALUES = torch.randn(2, B, H_KV, T, D, generator=torch.Generator().manual_seed(0))
QUERIES = torch.randn(B, H_Q, T, D, generator=torch.Generator().manual_seed(1))
STILL = {"position_embeddings": (torch.ones(B, T, D), torch.zeros(B, T, D))}
WINDOW = {"window_size": 8, "kernel_size": 3}


def prerope_queries(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    return module.q_proj(hidden).view(B, T, H_Q, D).transpose(1, 2)


@pytest.fixture
def bridge(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, members in {
        "kvpress": {},
        "kvpress.presses": {},
        "kvpress.presses.base_press": {"BasePress": object},
        "kvpress.utils": {"get_prerope_query_states": prerope_queries},
    }.items():
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[name]).update(members)
    monkeypatch.delitem(sys.modules, "evictionary.evaluation.kvpress", raising=False)
    return importlib.import_module("evictionary.evaluation.kvpress")


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
