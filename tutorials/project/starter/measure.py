"""Perplexity and runtime with a compressed KV cache:
`python measure.py --text book.txt --methods full keydiff scorer.py`.

The model reads the first tokens of the text as a prompt; then it is given the true next token, one at a time,
and its cross-entropy is summed. Perplexity is the exponential of the mean.
"""

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch

from evictionary import EvictingCache
from evictionary.models.load import load
from evictionary.store import table


@torch.no_grad()
def measure(model: Any, ids: torch.Tensor, prompt: int, cache: EvictingCache) -> dict[str, float]:
    """Read ids [1, T] with the cache, the first `prompt`
    of them at once; the perplexity is that of the others.
    """
    started = time.perf_counter()
    logits = model(ids[:, :prompt], **cache.argument, use_cache=True, logits_to_keep=1).logits[0, -1]
    first = time.perf_counter() - started
    loss, started = 0.0, time.perf_counter()
    for place in range(prompt, ids.shape[1]):
        loss -= float(torch.log_softmax(logits.float(), dim=-1)[ids[0, place]])
        logits = model(ids[:, place : place + 1], **cache.argument, use_cache=True).logits[0, -1]
    count = ids.shape[1] - prompt
    return {
        "perplexity": math.exp(loss / count),
        "first token, s": first,
        "per token, ms": 1000 * (time.perf_counter() - started) / count,
        "tokens kept": cache.tokens_kept,
        "cache, MiB": cache.nbytes / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="embedded", help="a hub name, a folder, or 'embedded'")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument(
        "--methods", nargs="+", default=["full", "keydiff"], help="'full', a method's name, or your own file"
    )
    parser.add_argument("--ratio", type=float, default=0.5, help="the fraction of the cache to remove")
    parser.add_argument("--every", type=int, help="compress again after this many new tokens")
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=200, help="tokens whose perplexity is measured")
    arguments = parser.parse_args()
    model, tokenizer = load(arguments.model)
    ids = tokenizer(arguments.text.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"].to(
        model.device
    )
    ids = ids[:, : arguments.prompt + arguments.tokens]
    if ids.shape[1] <= arguments.prompt:
        parser.error(
            f"--text: got {ids.shape[1]} tokens, wanted more than the {arguments.prompt} of the prompt"
        )
    rows = {}
    for name in arguments.methods:
        method = None if name == "full" else name
        every = arguments.every if method else None
        with EvictingCache(model, method, arguments.ratio, every=every) as cache:
            rows[name] = measure(model, ids, arguments.prompt, cache)
    names = list(rows[arguments.methods[0]])
    print(
        table(
            ["method", *names],
            [[name, *(f"{row[each]:.4g}" for each in names)] for name, row in rows.items()],
        )
    )


if __name__ == "__main__":
    main()
