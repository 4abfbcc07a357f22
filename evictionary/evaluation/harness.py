"""Scores a method on the tasks of lm-evaluation-harness, whose package `lm-eval` you install beside this one.

    python -m evictionary.evaluation.harness --model evictionary --tasks niah_single_1,ruler_vt \
        --model_args pretrained=embedded,dtype=float32,method=keydiff,compression_ratio=0.5 \
        --metadata '{"max_seq_lengths": [1024]}'

The arguments are those of `lm-eval`. Its own model reads a context and a continuation in one forward, before
anything can be evicted. Here the context is read first and compressed, and the continuation comes after it.
"""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm
from transformers import DynamicCache

from evictionary.cache.evicting_cache import EvictingCache
from evictionary.errors import UsageError
from evictionary.evaluation.questions import likelihood, prefill
from evictionary.models import embedded, versions
from evictionary.models.names import EMBEDDED


@register_model("evictionary")
class Evicting(HFLM):
    """The harness's model of transformers, whose cache a method compresses after each context.

    `method`, `compression_ratio`, `budget` and `every` are those of EvictingCache, which says what is wrong
    with them before the first task. The other arguments are those of the harness's model `hf`.
    """

    def __init__(
        self,
        pretrained: str,
        method: str = "keydiff",
        compression_ratio: float = 0.0,
        budget: int | None = None,
        every: int | None = None,
        **others: Any,
    ) -> None:
        super().__init__(pretrained, **others)
        self.evicting = partial(
            EvictingCache, self.model, method, compression_ratio, budget=budget, every=every
        )
        self.evicting().close()

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """For each continuation its log-likelihood, and whether greedy decoding gives it.

        The last token of the context is read after the compression, as a question is. The requests are
        answered one by one, whatever the batch size.
        """
        answers = []
        for _, context, continuation in tqdm(requests, disable=disable_tqdm):
            read = torch.tensor([context[-(self.max_length + 1 - len(continuation)) :]])
            # A context of one token has nothing to evict before the continuation.
            nothing = nullcontext(DynamicCache(config=self.model.config))
            with self.evicting() if read.shape[1] > 1 else nothing as cache:
                if read.shape[1] > 1:
                    prefill(self.model, read[:, :-1], cache)
                found = likelihood(self.model, cache, read[:, -1:], torch.tensor([continuation]))
            answers.append((sum(found.log_probabilities), all(found.is_likeliest)))
        return answers

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Refused: the windows of such a task have no context that could be compressed."""
        raise UsageError(
            "tasks: got one that scores a whole text (loglikelihood_rolling), wanted tasks with a context; "
            "`evictionary eval --tasks` has texts that go on"
        )

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **options: Any) -> Any:
        with self.evicting() as cache:
            return super()._model_generate(context, max_length, stop, **versions.argument(cache), **options)


if __name__ == "__main__":
    # Tasks that make their texts load a tokenizer of this name too.
    name = f"pretrained={EMBEDDED}"
    if any(name in word for word in sys.argv):
        sys.argv = [word.replace(name, f"pretrained={embedded.install()}") for word in sys.argv]
    cli_evaluate()
