"""The cost and the saving of eviction in a real model: `python -m benchmarks.model`, on the embedded
SmolLM2-135M or another.

It measures three ratios within one run: the time to compress a prompt over the time to read it; the time of a
token with half of the cache removed (the same number of tokens in every head, and ragged heads) over the time
with the full cache, and the same with kvpress; and the peak memory of the cache when a prompt is read in
blocks over the memory of the full cache.
"""

import datetime
import json
import platform
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.progress import track
from transformers import DynamicCache, PreTrainedModel

from benchmarks.cpu import in_kvpress
from benchmarks.timing import RESULTS, bytes_of, seconds, show, taking_turns, write_json
from evictionary.cache.evicting_cache import CAPTURED, EvictingCache
from evictionary.evaluation import passkey
from evictionary.evaluation.study import compositions
from evictionary.methods import catalogue
from evictionary.methods.resolve import resolve
from evictionary.models import embedded, versions
from evictionary.models.load import EMBEDDED, load as load_model

OPTIONS: dict[str, dict[str, Any]] = {"lagkv": {"lag_size": 128}}
ROUNDS, DECODED, PROMPTS = 5, 4, 3
BUDGET, BLOCK = 1024, 512


@torch.no_grad()
def read(model: PreTrainedModel, ids: torch.Tensor, cache: Any) -> None:
    """Read tokens [1, T] into a cache, without computing logits."""
    model(ids, **versions.argument(cache), use_cache=True, logits_to_keep=1)


def compression(model: PreTrainedModel, ids: torch.Tensor) -> list[dict[str, Any]]:
    """Seconds to compress a prompt to half with each method, once it is read, and as a share of the
    seconds to read it.

    One row more: what H2O adds to the reading of a cache that compresses as soon as it has read, which
    computes the attention once.
    """
    full = EvictingCache(model, None, record=CAPTURED)
    read(model, ids, full)
    prefill, with_h2o = [], []
    for _ in track(range(PROMPTS), description="reading"):
        prefill.append(seconds(lambda: read(model, ids, DynamicCache())))
        with_h2o.append(seconds(lambda: read(model, ids, EvictingCache(model, "h2o", 0.5))))
    added = min(with_h2o) - min(prefill)
    rows: list[dict[str, Any]] = [
        {"method": "h2o, while it reads", "seconds": added, "share_of_prefill": added / min(prefill)}
    ]
    names = [*catalogue.evicting(), "knorm+ada_kv", "keydiff+moments"]
    for name in track(names, description="compressing"):

        def compress(name: str = name) -> None:
            EvictingCache.from_prefilled(model, full, name, 0.5, options=OPTIONS.get(name)).close()

        times = [seconds(compress) for _ in range(1 if name == "h2o" else 2)]
        rows.append({"method": name, "seconds": min(times), "share_of_prefill": min(times) / min(prefill)})
    return [{"method": "reading the prompt", "seconds": min(prefill), "share_of_prefill": 1.0}, *rows]


def decoding(model: PreTrainedModel, ids: torch.Tensor) -> list[dict[str, Any]]:
    """Every method with half of the cache, in heads of one size and, where AdaKV can divide its budget, of
    several: a token after a quarter of the prompt, and after all of it.

    A method is left out where it reads the prompt twice and the model has no positions for that.
    """
    rows = []
    for prompt in (ids[:, : ids.shape[1] // 4], ids):
        twice = 2 * prompt.shape[1] <= model.config.max_position_embeddings
        names = [
            composed
            for name in catalogue.evicting()
            for composed in compositions(name, ["ada_kv"])
            if not composed.endswith("+moments") or composed == "keydiff+moments"
            if twice or not catalogue.REPLAYED & resolve(name).captured
        ]
        full = DynamicCache()
        read(model, prompt, full)
        whole = EvictingCache(model, None, record=CAPTURED if twice else CAPTURED - catalogue.REPLAYED)
        read(model, prompt, whole)
        rows.append(a_token(model, prompt, full, full) | {"cache": "full cache"})
        for name in track(names, description=f"decoding after {prompt.shape[1]:,} tokens"):
            with EvictingCache.from_prefilled(model, whole, name, 0.5, options=OPTIONS.get(name)) as cache:
                rows.append(a_token(model, prompt, cache, full) | {"cache": name})
    return rows


def a_token(model: PreTrainedModel, prompt: torch.Tensor, cache: Any, full: DynamicCache) -> dict[str, Any]:
    """The time of some tokens after a prompt, with a cache and with the full one, which take turns. The full
    cache forgets them afterwards: it has to be as long for the next cache.
    """
    token = prompt[:, -1:]
    calls = [lambda own=own: [read(model, token, own) for _ in range(DECODED)] for own in (cache, full)]
    row: dict[str, Any] = {"tokens": prompt.shape[1], "bytes": getattr(cache, "nbytes", 0) or bytes_of(cache)}
    row |= taking_turns(*calls, ROUNDS)
    full.crop(prompt.shape[1] - full.get_seq_length())
    return row


def decoding_kvpress(model: PreTrainedModel, ids: torch.Tensor) -> list[dict[str, Any]]:
    """The same prompts with the presses of kvpress, in its own environment, against the full cache there."""
    given = str(embedded.install()), ids.tolist(), [ids.shape[1] // 4, ids.shape[1]], ROUNDS, DECODED
    return in_kvpress("benchmarks.peers", "their_decoding", *given, threads=torch.get_num_threads())


def blocks(model: PreTrainedModel, ids: torch.Tensor) -> list[dict[str, Any]]:
    """The peak memory of the cache while a prompt is read
    in blocks, as a share of the full cache of that prompt.
    """
    rows = []
    for name in ("keydiff", "knorm+ada_kv", "tova"):
        cache = EvictingCache(model, name, budget=BUDGET, every=BLOCK)
        peak = 0
        start = time.perf_counter()
        for block in track(ids.split(BLOCK, dim=1), description=f"{name} in blocks"):
            read(model, block, cache)
            # Measured between two blocks; within a block, one layer at a time holds the block beside its
            # budget.
            largest = max(layer.longest for layer in cache.layers)
            peak = max(
                peak,
                cache.nbytes
                + cache.nbytes * (cache.peak_tokens - largest) // max(1, largest * len(cache.layers)),
            )
        rows.append(
            {
                "method": name,
                "prompt_tokens": ids.shape[1],
                "seconds": time.perf_counter() - start,
                "peak_tokens_of_a_head": cache.peak_tokens,
                "peak_bytes": peak,
                "full_bytes": cache.nbytes_full,
                "share_of_full": peak / cache.nbytes_full,
            }
        )
        cache.close()
    return rows


PARTS = {
    "compression": compression,
    "decoding": decoding,
    "decoding_kvpress": decoding_kvpress,
    "blocks": blocks,
}


def main(
    name: Annotated[str, typer.Option("--model", help="A hub name, a folder, or embedded.")] = EMBEDDED,
    tokens: Annotated[
        int, typer.Option(help="Tokens of the prompt; decoding and blocks read twice that.")
    ] = 4096,
    only: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(PARTS)}; may be repeated.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where model.json goes.")] = RESULTS,
) -> None:
    """Measure compression, decoding and reading in blocks in a real model."""
    if unknown := set(only or ()) - set(PARTS):
        raise typer.BadParameter(f"--only: got {', '.join(unknown)}, wanted some of {', '.join(PARTS)}")
    result = out / "model.json"
    model, tokenizer = load_model(name)
    ids = passkey.make(tokenizer, depth=0.5, tokens=2 * tokens + 200).context_ids.to(model.device)
    found: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {}
    found |= {
        "model": name,
        "tokens": tokens,
        "budget": BUDGET,
        "block": BLOCK,
        "decoded": DECODED,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, {model.device}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    for part in only or PARTS:
        longer = min(2 * tokens, model.config.max_position_embeddings)
        found.setdefault("dates", {})[part] = datetime.date.today().isoformat()
        found[part] = PARTS[part](model, ids[:, : tokens if part == "compression" else longer])
        show(part, found[part])
        write_json(result, found)  # a killed run keeps what it had


if __name__ == "__main__":
    typer.run(main)
