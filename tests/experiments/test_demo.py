"""The passkey task, the demo's measurements and its report, on the tiny model."""

import functools
import json
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path

import pytest
import torch
from conftest import tiny_llama
from markupsafe import escape
from tools import refused, saved, says
from tools.pages import ROOT, pictures_of
from transformers import DynamicCache, PreTrainedTokenizerFast

from evictionary.cache.evicting_cache import EvictingCache
from evictionary.errors import MethodError
from evictionary.evaluation import demo, passkey, tasks
from evictionary.evaluation.questions import ask, likelihood, prefill, tokenize
from evictionary.methods import catalogue
from tests.site.test_pages import understood
from tutorials.build import REPOSITORY


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


def test_the_report_shows_the_texts_the_answers_and_the_pages_of_the_methods(
    result: demo.Result, tmp_path: Path
) -> None:
    demo.write(result, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    for text in result.texts:
        assert text.needle.count(text.number) == 2
        says(page, f"The secret number is {text.number}.", f"<mark>{escape(text.needle)}</mark>")
    for row in result.rows:
        assert all(str(escape(answer)) in page for answer in row.measured["answers"])
    linked = re.findall(r'<a href="(\S+)">(\w+)', page)
    assert sorted(linked) == [(demo.page_of(name), name) for name in ("keydiff", "lagkv")]
    # The answers, the texts and the numbers are behind folds; the sentences are not.
    shown = re.sub(r"<details>.*?</details>", "", page, flags=re.DOTALL)
    says(shown, *(str(escape(one.sentence)) for one in demo.told(result)), never=["<mark>", "seconds"])
    for command in re.findall(r"<code>(evictionary .*?)</code>", page):
        understood(unescape(command))


def test_the_digits_that_a_cache_holds_are_counted_in_every_head(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    text = passkey.make(tokenizer, depth=0.5, tokens=200)
    assert [tokenizer.decode(text.context_ids[0, slice(*copy)]).strip() for copy in text.copies] == [
        text.answer
    ] * 2
    model = tiny_llama(max_position_embeddings=2048)
    for method, share in ((None, 1.0), ("streaming_llm", 0.0)):  # the number is in the middle
        cache = EvictingCache(model, method, **({"compression_ratio": 0.9} if method else {}))
        prefill(model, text.context_ids, cache)
        assert demo.digits_kept(cache, text) == share


def row(method: str, right: str, kept: float = 0.0, ratio: float | None = 0.5, left: int = 50) -> demo.Row:
    """Measurements of texts of 100 tokens, right where the letter is r."""
    each = len(right)
    measured = {
        "right": [letter == "r" for letter in right],
        "digits_kept": [kept] * each,
        "tokens_before": [100] * each,
        "tokens_after": [left] * each,
        "bytes_before": [2**21] * each,
        "bytes_after": [left * 2**20 // 50] * each,
        "answers": ["1234567" if letter == "r" else " 7\n" for letter in right],
        "error": [0.0] * each,
        "relative_error": [0.0] * each,
        "seconds": [0.0] * each,
    }
    return demo.Row(method, {}, ratio, measured)


FULL_ROW = row("full cache", "rrr", 1.0, 0.0, 100)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([row("knorm", "rrr", 0.6)], "Found every time. At 50% removed, 60% of the digits stayed."),
        ([row("knorm", "rww", 0.0)], "At 50% removed, every head had evicted every digit."),
        (
            [row("knorm", "rww", 0.3)],
            "At 50% removed, 30% of the digits stayed, and 50% of all tokens: "
            "it evicts them more than others.",
        ),
        (
            [row("knorm", "rrr", 1.0), row("knorm", "rww", 0.8, 0.75, 25)],
            "At 75% removed, 80% of the digits stayed, and 25% of all tokens: it evicts them no more "
            "than others, but the model answered '7'.",
        ),
        (
            [row("kvzip", "rww", 0.498)],  # as many as of all tokens, as far as the sentence shows it
            "At 50% removed, 50% of the digits stayed, and 50% of all tokens: it evicts them no more "
            "than others, but the model answered '7'.",
        ),
        ([row("gvote", "www", 0.0, None)], "With its own budget, every head had evicted every digit."),
    ],
)
def test_the_report_says_what_became_of_the_number(rows: list[demo.Row], sentence: str) -> None:
    assert demo.reason(rows, FULL_ROW) == sentence


def test_a_number_that_the_full_cache_misses_too_is_no_fault_of_a_method() -> None:
    told = demo.reason([row("knorm", "rrw")], row("full cache", "rrw", 1.0, 0.0, 100))
    assert told == "At 50% removed it was missed only where the full cache misses it too."


def test_who_found_the_number_comes_first_and_of_these_who_needs_less() -> None:
    rows = [
        FULL_ROW,
        row("h2o", "rrw", 0.1),
        row("keydiff", "rrr", 0.9),
        row("knorm", "rrr", 0.9, left=40),
        row("random", "www"),
    ]
    texts = [demo.Text(0.5, "a", "1234567", "b", "1234567")] * 3
    result = demo.Result("a/model", 0, rows, texts, [], {})
    told = demo.told(result)
    assert [one.label for one in told] == ["knorm", "keydiff", "h2o", "random"]
    assert demo.summary(result, told) == [
        "At 50% removed, 2 of 4 methods found the number in every text.",
        "The smallest cache with every answer right is that of knorm: 0.8 MiB instead of 2.0.",
        "3 of 3 right answers may mean 44% in the long run (95 % interval).",
    ]


def test_every_method_has_a_page_that_exists() -> None:
    """The report has no site beside it, so it knows where the pages are."""
    assert f"{REPOSITORY}/blob/main/docs/methods" == demo.METHOD_PAGES
    for name in catalogue.names():
        page = demo.page_of(name)
        assert page and (ROOT / "docs" / "methods" / page.rpartition("/")[2]).is_file()
    assert demo.page_of("keydiff+ada_kv") == demo.page_of("keydiff")
    assert demo.page_of("random") is None and demo.page_of("mine.py") is None


def test_a_method_that_fails_ends_the_demo(demonstrated: Callable[..., demo.Result], tmp_path: Path) -> None:
    mine = str(saved(tmp_path / "mine.py", "def score(keys):\n    raise RuntimeError('not yet')\n"))
    refused(
        lambda: demonstrated(method_names=[mine], depths=(0.5,), tokens=200),
        r"score in mine\.py raised RuntimeError at mine\.py, line 2: not yet",
        MethodError,
    )
