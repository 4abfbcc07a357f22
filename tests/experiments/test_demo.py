"""The passkey task, the demo's measurements and its report, on the tiny model."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import tiny_llama
from tools import refused, saved
from tools.pages import pictures_of
from transformers import DynamicCache, PreTrainedTokenizerFast

from evictionary.cache.evicting_cache import EvictingCache
from evictionary.errors import MethodError
from evictionary.evaluation import demo, passkey, tasks
from evictionary.evaluation.questions import ask, likelihood, prefill, tokenize


@pytest.fixture(scope="module")
def demonstrated(tokenizer: PreTrainedTokenizerFast) -> Callable[..., demo.Result]:
    """Runs the demo with the tiny model."""
    return functools.partial(demo.run, tiny_llama(max_position_embeddings=2048), tokenizer)


@pytest.fixture(scope="module")
def result(demonstrated: Callable[..., demo.Result]) -> demo.Result:
    return demonstrated(
        method_names=["keydiff", "lagkv", "random"], ratios=(0.5,), depths=(0.2, 0.8), tokens=400
    )


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_the_needle_is_where_it_is_said_to_be(tokenizer: PreTrainedTokenizerFast, depth: float) -> None:
    prompt = passkey.make(tokenizer, depth=depth, tokens=600)
    first, last = prompt.needle
    needle = tokenizer.decode(prompt.context_ids[0, first:last])
    assert needle.strip().startswith("The secret number is") and needle.count(prompt.answer) == 2
    texts = [tokenizer.decode(ids[0]) for ids in (prompt.context_ids, prompt.question_ids)]
    assert [text.count(prompt.answer) for text in texts] == [2, 0]
    assert abs(first / prompt.context_ids.shape[1] - depth) < 0.35


def test_texts_are_drawn_from_the_seed(tokenizer: PreTrainedTokenizerFast) -> None:
    one, same, other = (passkey.make(tokenizer, depth=0.5, seed=seed, tokens=300) for seed in (1, 1, 2))
    assert torch.equal(one.context_ids, same.context_ids) and one.answer != other.answer
    assert len(one.answer) == len(other.answer) == 7


def test_an_answer_is_right_iff_the_digits_appear(tokenizer: PreTrainedTokenizerFast) -> None:
    answer = passkey.make(tokenizer, depth=0.5, tokens=100).answer
    given = {f"It is {answer}.": True, f"{int(answer):,}": True, answer[:6]: False}
    assert {text: tasks.score_number(answer, text).exact == 1 for text in given} == given
    refused(lambda: passkey.make(tokenizer, depth=1.5), "depth")
    refused(lambda: passkey.make(tokenizer, depth=0.5, tokens=5), "tokens")


def test_context_and_question_are_cut_inside_one_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    context, question = tokenize(tokenizer, "A text.", "Who?", "It is")
    cut = [tokenizer.decode(ids[0]) for ids in (context, question)]
    assert cut == ["<s>user\nA text.\n\n", "Who?</s><s>assistant\nIt is"]
    for arguments in (("", "Who?"), ("A text.", " ")):
        refused(lambda arguments=arguments: tokenize(tokenizer, *arguments), "got no text")


def test_a_model_without_a_chat_format(tokenizer: PreTrainedTokenizerFast) -> None:
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, bos_token="<s>")
    context, question = tokenize(plain, "A text.", "Who?")
    assert plain.decode(torch.cat([context, question], dim=1)[0]) == "<s>A text.\n\nWho?\nAnswer:"


def test_asking_is_greedy_and_leaves_the_cache_as_it_was(tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny_llama()
    context, question = tokenize(tokenizer, "A text.", "Who?")
    cache = DynamicCache()
    prefill(model, context, cache)
    first, again = (ask(model, tokenizer, cache, question, max_new_tokens=6) for _ in range(2))
    assert cache.get_seq_length() == context.shape[1]
    ids = torch.cat([context, question], dim=1)
    wanted = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :].tolist()
    assert first.token_ids == again.token_ids == wanted[: len(first.token_ids)]
    assert tuple(first.hidden_states.shape) == (question.shape[1], 32)
    refused(lambda: ask(model, tokenizer, cache, question, max_new_tokens=400), "context of 256")


def test_the_likelihood_of_an_answer_is_that_of_the_whole_text(tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny_llama()
    context, question = tokenize(tokenizer, "The gate key is 12.", "What is the gate key?")
    cache = EvictingCache(model, method=None)
    prefill(model, context, cache)
    answer = torch.tensor([ask(model, tokenizer, cache, question, max_new_tokens=6).token_ids])
    for given in (answer, (answer + 1) % 200):
        text = torch.cat([context, question, given], dim=1)
        with torch.no_grad():
            logits = model(text).logits[0, -given.shape[1] - 1 : -1]
        wanted = torch.log_softmax(logits, dim=-1).gather(-1, given[0, :, None])[:, 0].tolist()
        for block_size in (None, 1, 4):
            found = likelihood(model, cache, question, given, block_size)
            assert found.log_probabilities == pytest.approx(wanted, abs=1e-4)
            assert all(found.is_likeliest) == (given is answer)
            assert cache.get_seq_length() == context.shape[1]
    refused(lambda: likelihood(model, cache, question, answer.repeat(1, 60)), "context")


def test_every_method_has_a_row_and_a_picture(result: demo.Result) -> None:
    assert [row.label for row in result.rows] == ["full cache", "keydiff", "lagkv (lag_size=128)", "random"]
    full, keydiff = (row.measured for row in result.rows[:2])
    assert full["bytes_after"] == full["bytes_before"] and full["error"] == [0.0, 0.0]
    assert keydiff["tokens_after"] == [before // 2 for before in keydiff["tokens_before"]]
    assert keydiff["bytes_after"] == [after * 2 * 2 * 2 * 8 * 4 for after in keydiff["tokens_after"]]
    assert min(keydiff["error"]) > 0
    for picture, row in zip(result.pictures, result.rows[1:], strict=True):
        shape = (2, 2, row.measured["tokens_before"][1])
        assert (picture.label, picture.kept.shape) == (row.label, shape)
        assert (picture.kept.sum(axis=-1) == row.measured["tokens_after"][1]).all()
    assert json.loads(json.dumps(result.as_json()))["rows"][1]["summary"]["of"] == 2


def test_a_method_that_sets_its_own_budget_is_asked_once(demonstrated: Callable[..., demo.Result]) -> None:
    found = demonstrated(method_names=["gvote", "knorm"], ratios=(0.25, 0.5), depths=(0.5,), tokens=300)
    asked = [("gvote", "own"), ("knorm", "25%"), ("knorm", "50%")]
    assert [(row.label, row.asked) for row in found.rows[1:]] == asked
    assert found.rows[1].measured["tokens_after"][0] < found.rows[1].measured["tokens_before"][0]


def test_default_methods_say_whom_they_leave_out() -> None:
    runnable, left_out = demo.default_methods()
    assert {"keydiff", "knorm", "lagkv", "streaming_llm", "random", "random_protected"} <= set(runnable)
    assert not set(runnable) & set(left_out)
    # README promises minutes for the demo; this one alone doubled them.
    assert "--methods attention_matching runs it" in left_out["attention_matching"]


def test_the_report_asks_the_network_for_nothing(result: demo.Result, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    demo.write(result, path)
    assert pictures_of(path) == 4 and "lagkv (lag_size=128)" in path.read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_a_method_that_fails_ends_the_demo(demonstrated: Callable[..., demo.Result], tmp_path: Path) -> None:
    mine = str(saved(tmp_path / "mine.py", "def score(keys):\n    raise RuntimeError('not yet')\n"))
    refused(
        lambda: demonstrated(method_names=[mine], depths=(0.5,), tokens=200),
        r"score in mine\.py raised RuntimeError at mine\.py, line 2: not yet",
        MethodError,
    )
