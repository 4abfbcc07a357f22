"""The model for lm-evaluation-harness, with the three names that it takes from there in a stand-in."""

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tools.reading import IDS, generate, masked_logits, refused
from transformers import LlamaForCausalLM

from evictionary import EvictingCache


class Theirs:
    """What the harness's own model has, as far as ours asks for it."""

    def __init__(self, pretrained: Any, max_length: int = 60) -> None:
        self.model, self.max_length = pretrained, max_length

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **options: Any) -> Any:
        return self.model.generate(context, max_length=max_length, do_sample=False, pad_token_id=0, **options)


@pytest.fixture
def evicting(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, members in {
        "lm_eval": {},
        "lm_eval.__main__": {"cli_evaluate": None},
        "lm_eval.api": {},
        "lm_eval.api.registry": {"register_model": lambda name: lambda made: made},
        "lm_eval.models": {},
        "lm_eval.models.huggingface": {"HFLM": Theirs},
    }.items():
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[name]).update(members)
    monkeypatch.delitem(sys.modules, "evictionary.evaluation.harness", raising=False)
    return importlib.import_module("evictionary.evaluation.harness").Evicting


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
    found, greedy = judged._loglikelihood_tokens(
        [request(IDS[0, :41], IDS[0, 41:]), request(IDS[0, :41], logits[0, 40].argmax()[None])]
    )
    assert found[0] == pytest.approx(float(right), abs=1e-4) and not found[1]
    assert greedy[1]


def test_a_long_context_loses_its_beginning(evicting: Any, shared_model: LlamaForCausalLM) -> None:
    short, whole = (evicting(shared_model, max_length=length) for length in (20, 60))
    assert short._loglikelihood_tokens([request(IDS[0, :55], IDS[0, 55:])]) == whole._loglikelihood_tokens(
        [request(IDS[0, 39:55], IDS[0, 55:])]
    )


def test_a_context_of_one_token_has_nothing_to_evict(evicting: Any, shared_model: LlamaForCausalLM) -> None:
    full, half = (evicting(shared_model, compression_ratio=ratio) for ratio in (0.0, 0.5))
    asked = [request(IDS[0, :1], IDS[0, 1:9])]
    assert full._loglikelihood_tokens(asked) == half._loglikelihood_tokens(asked)


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
