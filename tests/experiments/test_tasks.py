"""The tasks: deterministic, of the length asked for, with the answer where they say, and scored as they say."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tools import real_texts
from tools.reading import refused
from transformers import PreTrainedTokenizerFast

from evictionary.evaluation import tasks

TOKENS = 1100  # of one byte each
PROSE = ["perplexity", "perplexity_decoding"]
ASKED = [name for name in tasks.TASKS if name not in tasks.GOES_ON]


@pytest.fixture(scope="module", autouse=True)
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        real_texts.install(tmp_path_factory.mktemp("data"), patch)
        yield


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("seed", [0, 3])
def test_a_prompt_fits_and_holds_its_answer(tokenizer: PreTrainedTokenizerFast, name: str, seed: int) -> None:
    prompt = tasks.get(name).make(tokenizer, TOKENS, seed)
    length = prompt.context_ids.shape[1] + prompt.question_ids.shape[1]
    # as long as it may be: one more sentence, or one more of the words to count, would not fit
    assert TOKENS - 110 <= length <= TOKENS
    context, question = tokenizer.decode(prompt.context_ids[0]), tokenizer.decode(prompt.question_ids[0])
    assert all(answer in context and answer not in question for answer in prompt.answers)
    held = " ".join(tokenizer.decode(prompt.context_ids[0, first:last]) for first, last in prompt.needles)
    assert all(answer in held for answer in prompt.answers if prompt.needles)
    assert len(held) < len(context) / 2
    assert len(tokenizer(", ".join(prompt.answers))["input_ids"]) <= prompt.max_new_tokens


@pytest.mark.parametrize("name", ASKED)
def test_the_right_answer_scores_one_and_no_answer_nothing(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    prompt = tasks.get(name).make(tokenizer, TOKENS, 1)
    assert prompt.score(", ".join(prompt.answers)) == (1.0, 1.0)
    assert prompt.score("") == (0.0, 0.0)
    assert prompt.score("The postman sat down beside the harbour.") == (0.0, 0.0)


def test_the_same_seed_makes_the_same_prompt_and_another_seed_another(tokenizer: PreTrainedTokenizerFast) -> None:
    for task in tasks.TASKS.values():
        one, same, other = (task.make(tokenizer, TOKENS, seed) for seed in (1, 1, 2))
        assert torch.equal(one.context_ids, same.context_ids), task.name
        assert one.answers == same.answers != other.answers, task.name


def test_answers_are_the_same_in_every_process_and_at_every_length(tokenizer: PreTrainedTokenizerFast) -> None:
    wanted = {
        "passkey7": ("4576745",),
        "needle_single": ("9124758",),
        "needle_multivalue": ("9894116", "9030284", "5556599", "2258870"),
        "variables": ("MYJIE", "SOTAF", "SPIAR", "FERXG"),
        "common_words": ("wheat", "forest", "owl", "lemon", "cotton"),
        "frequent_words": ("lenodi", "livomo", "rikefo"),
    }
    for name, answers in wanted.items():
        for tokens in (TOKENS, 1300):
            assert tasks.get(name).make(tokenizer, tokens, 0).answers == answers, name


@pytest.mark.parametrize("name", PROSE)
def test_a_text_goes_on_with_its_continuation_and_the_next_window_goes_on_there(
    tokenizer: PreTrainedTokenizerFast, name: str
) -> None:
    first, second = (tasks.get(name).make(tokenizer, TOKENS, seed) for seed in (4, 5))
    read = [torch.cat([one.context_ids, one.question_ids], dim=1)[0].tolist() for one in (first, second)]
    assert first.continuation is not None and len(read[0]) + first.continuation.shape[1] == TOKENS
    start = int(tokenizer.bos_token_id is not None)
    number = first.continuation.shape[1]
    assert read[1][start:] == read[0][start + number :] + first.continuation[0].tolist()
    assert tokenizer.decode(first.continuation[0]) == first.answers[0]
    refused(lambda: tasks.get(name).make(tokenizer, TOKENS, 100_000), "the text of this task ends")


def test_five_seeds_try_five_depths(tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = [tasks.get("needle_single").make(tokenizer, 2000, seed) for seed in range(5)]
    places = [prompt.needles[0][0] / prompt.context_ids.shape[1] for prompt in prompts]
    assert places == sorted(places)
    assert places[0] < 0.25 and places[-1] > 0.75


@pytest.mark.parametrize("essays", ["", "essay_"])
@pytest.mark.parametrize(("name", "distinct"), [("common_words", 5), ("frequent_words", 3)])
def test_the_words_asked_for_are_the_most_frequent(
    tokenizer: PreTrainedTokenizerFast, name: str, distinct: int, essays: str
) -> None:
    for tokens in (TOKENS, 12_000):
        prompt = tasks.get(essays + name).make(tokenizer, tokens, 0)
        text = tokenizer.decode(prompt.context_ids[0])
        counts = Counter(text.partition("than others: ")[2].rstrip(".\n").split())
        ranked = counts.most_common()
        assert {word for word, _ in ranked[:distinct]} == set(prompt.answers)
        assert ranked[distinct - 1][1] > ranked[distinct][1]


@pytest.mark.parametrize("name", ["variables", "essay_variables"])
def test_variables_form_a_chain(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    prompt = tasks.get(name).make(tokenizer, TOKENS, 0)
    lines = [tokenizer.decode(prompt.context_ids[0, first:last]).strip() for first, last in prompt.needles]
    pairs = [line.removeprefix("Set ").removesuffix(".").split(" = ") for line in lines]
    assert [name for name, _ in pairs][1:] == list(prompt.answers)
    assert [value for _, value in pairs][1:] == [name for name, _ in pairs][:-1]


@pytest.mark.parametrize(
    ("score", "answer", "text", "wanted"),
    [
        (tasks.score_number, "1234567", "1,234,567.", (1.0, 1.0)),
        (tasks.score_number, "1234567", "It is 1234 567", (1.0, 1.0)),
        (tasks.score_number, "12345678", "1234999", (0.0, 0.5)),
        (tasks.score_number, "1234", "7, or rather: 1294", (0.0, 0.75)),
        (tasks.score_all, ["apple", "pear"], "Apple and pearl", (0.0, 0.5)),
        (tasks.score_all, ["apple", "pear"], "pear, apple", (1.0, 1.0)),
        (tasks.score_all, ["1234567", "7654321"], "1. 1,234,567\n2. 7654321", (1.0, 1.0)),
        (tasks.score_any, ["Paris", "the city"], "In paris.", (1.0, 1.0)),
        (tasks.score_any, ["Paris", "the city"], "In Rome.", (0.0, 0.0)),
        (tasks.score_copy, "a b c d", 'A b c d". And more', (1.0, 1.0)),
        (tasks.score_copy, "a b c d", "a b x c d", (0.0, 1.0)),
        (tasks.score_copy, "a b c d", "b a", (0.0, 0.25)),
    ],
)
def test_scores(score: Any, answer: Any, text: str, wanted: tuple[float, float]) -> None:
    assert score(answer, text) == wanted


def test_what_cannot_be_made(tokenizer: PreTrainedTokenizerFast) -> None:
    refused(lambda: tasks.get("passkey"), "did you mean passkey7")
    for task in tasks.TASKS.values():
        refused(lambda task=task: task.make(tokenizer, 60, 0), "tokens: got 60, wanted at least")
