"""Asks questions about a context that has already been read into a cache."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from evictionary.cache.evicting_cache import EvictingCache
from evictionary.cache.model_hooks import require_prompt
from evictionary.errors import require
from evictionary.models import versions
from evictionary.models.weights import device_of

SPLIT = "<evictionary:question>"


@dataclass(frozen=True)
class Answer:
    """The greedy answer, and the final hidden states [M, hidden] over the question's tokens."""

    text: str
    token_ids: list[int]
    hidden_states: torch.Tensor


@dataclass(frozen=True)
class Likelihood:
    """How likely the model holds given tokens: for each, the logarithm of its probability, and whether it
    is the likeliest one.
    """

    log_probabilities: list[float]
    is_likeliest: list[bool]

    @property
    def loss(self) -> float:
        """The mean of -log p over the tokens, in nats; its exponential is the perplexity."""
        return -sum(self.log_probabilities) / len(self.log_probabilities)


def tokenize(
    tokenizer: Any, context: str, question: str, answer_start: str = ""
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (context ids [1, T], question ids [1, M]) of
    one user turn, in the model's chat format if it has one.

    The text is split between context and question, so the context can be compressed before the question is
    known. The question's tokens end with `answer_start`, the first words of the answer; the model goes on
    from there. Raises UsageError for an empty context or question.
    """
    for name, text in (("prompt", context), ("question", question)):
        require(text.strip(), f"{name}: got no text, wanted a text")
    if getattr(tokenizer, "chat_template", None):
        turn = [{"role": "user", "content": f"{context.strip()}\n\n{SPLIT}{question.strip()}"}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        before, _, after = text.rpartition(SPLIT)
        after += answer_start
    else:
        before, after = f"{context.strip()}\n\n", f"{question.strip()}\nAnswer: {answer_start}".rstrip()
        before = (tokenizer.bos_token or "") + before
    first, second = (
        tokenizer(part, return_tensors="pt", add_special_tokens=False)["input_ids"]
        for part in (before, after)
    )
    return first, second


@torch.no_grad()
def prefill(
    model: PreTrainedModel, context_ids: torch.Tensor, cache: Cache, block_size: int | None = None
) -> None:
    """Read the context [1, T] into the cache, in one forward or in blocks, without computing logits.

    A cache that compresses while it reads has compressed the last block too, then, whatever its length.
    """
    _require_room(model, cache, context_ids.shape[1])
    for block in context_ids.to(device_of(model)).split(block_size or context_ids.shape[1], dim=1):
        model(block, **versions.argument(cache), use_cache=True, logits_to_keep=1)
    if isinstance(cache, EvictingCache) and cache.every:
        cache.compress()


@torch.no_grad()
def ask(
    model: PreTrainedModel, tokenizer: Any, cache: Cache, question_ids: torch.Tensor, max_new_tokens: int = 32
) -> Answer:
    """Answer one question greedily and leave the cache as it was, ready for the next question.

    Raises UsageError if context, question and answer together exceed the model's context length.
    """
    _require_room(model, cache, question_ids.shape[1] + max_new_tokens)
    stops = _stop_ids(model, tokenizer)
    token_ids: list[int] = []
    with _left_alone(cache) as borrowed:
        output = model(
            question_ids.to(device_of(model)),
            **versions.argument(borrowed),
            use_cache=True,
            output_hidden_states=True,
        )
        hidden_states = output.hidden_states[-1][0]
        while (following := int(output.logits[0, -1].argmax())) not in stops:
            token_ids.append(following)
            if len(token_ids) == max_new_tokens:
                break
            output = model(
                torch.tensor([[following]], device=device_of(model)),
                **versions.argument(borrowed),
                use_cache=True,
            )
    return Answer(tokenizer.decode(token_ids, skip_special_tokens=True).strip(), token_ids, hidden_states)


@torch.no_grad()
def likelihood(
    model: PreTrainedModel,
    cache: Cache,
    question_ids: torch.Tensor,
    answer_ids: torch.Tensor,
    block_size: int | None = None,
) -> Likelihood:
    """How likely the answer [1, N] is after the question [1, M], with every token of it read as it is; the
    cache stays as it was.

    All tokens are read in one forward, or in blocks: with block_size 1 as they are while decoding. The
    likeliest tokens are all of the answer exactly where greedy decoding gives that answer. Raises UsageError
    as `ask` does.
    """
    number = answer_ids.shape[1]
    tokens = torch.cat([question_ids, answer_ids[:, :-1]], dim=1).to(device_of(model))
    _require_room(model, cache, tokens.shape[1])
    with _left_alone(cache) as borrowed:
        read = partial(model, **versions.argument(borrowed), use_cache=True)
        logits = [
            read(block, logits_to_keep=min(number, block.shape[1])).logits[0].float()
            for block in tokens.split(block_size or tokens.shape[1], dim=1)
        ]
    last = torch.cat(logits)[-number:]
    right = answer_ids[0].to(last.device)
    found = last.log_softmax(dim=-1).gather(-1, right[:, None])[:, 0]
    return Likelihood(found.tolist(), (last.argmax(dim=-1) == right).tolist())


@contextmanager
def _left_alone(cache: Cache) -> Iterator[Cache]:
    """The cache, for tokens that are taken out of it again; a copy of one that cannot give them back."""
    # A cache that evicts while it decodes, by a method or by a sliding window, cannot restore the evicted
    # tokens.
    if getattr(cache, "every", 0) or any(getattr(layer, "is_sliding", False) for layer in cache.layers):
        yield copy.deepcopy(cache)
        return
    before = cache.get_seq_length()
    try:
        yield cache
    finally:
        cache.crop(before - cache.get_seq_length())


def _require_room(model: PreTrainedModel, cache: Cache, tokens: int) -> None:
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    require_prompt(cache.get_seq_length() + tokens, longest)


def _stop_ids(model: PreTrainedModel, tokenizer: Any) -> set[int]:
    declared = model.generation_config.eos_token_id if model.generation_config else None
    stops = set(declared) if isinstance(declared, list) else {declared}
    return {stop for stop in (*stops, tokenizer.eos_token_id) if stop is not None}
