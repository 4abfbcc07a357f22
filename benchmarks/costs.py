"""What each method costs in a model, in one table: `python -m benchmarks.costs`.

Three figures for every method, each against the full cache of transformers (DynamicCache) in the same run:

- decode: the time of a token, half of the prompt removed. The cache and the full one take turns token by
  token, so a busy machine slows both down. The ratio is that of the medians.
- prompt: the time to read a prompt and compress it to half. What a method captures, or reads a second time,
  counts.
- growth: the power of the number of tokens with which the time of a compression grows, from prompts of a
  quarter and a half of the tokens and of all.

Decode runs in the whole model. Prompt and growth run in its first layers, for a layer is like the next. Time
is processor time on one thread. Every finished row is stored, and `--method` measures some rows again.
"""

import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from transformers import DynamicCache, PreTrainedModel

from benchmarks.timing import RESULTS, exponent, provenance, seconds, write_json
from evictionary.cache.evicting_cache import CAPTURED, EvictingCache
from evictionary.evaluation import passkey
from evictionary.evaluation.pages import markdown
from evictionary.evaluation.study import compositions
from evictionary.methods import catalogue
from evictionary.methods.resolve import resolve
from evictionary.models import versions
from evictionary.models.load import EMBEDDED, load as load_model

OPTIONS: dict[str, dict[str, Any]] = {"lagkv": {"lag_size": 128}}
ADDED = ("keydiff", "momentkv")  # what is added to these shows what an addition costs
LAYERS = 4  # of the model that reads prompts
TEMPLATE = Path(__file__).parent / "templates" / "costs.md.j2"
clock = time.process_time


def names() -> list[str]:
    """Every method, with AdaKV where the heads of a layer can share its budget; with every addition, those of
    ADDED.
    """
    found = []
    for name in [*catalogue.evicting(), *_per_query()]:
        for composed, method in compositions(name, ["ada_kv"]).items():
            if name in ADDED or not method.corrected or name == composed:
                found.append(composed)
    return [*found, *(f"keydiff+{name}" for name in catalogue.additions() if name != "ada_kv")]


def _per_query() -> list[str]:
    return [name for name in catalogue.names() if resolve(name).is_per_query]


@torch.no_grad()
def read(model: PreTrainedModel, ids: torch.Tensor, cache: Any) -> None:
    """Read tokens [1, T] into a cache, without computing logits."""
    model(ids, **versions.argument(cache), use_cache=True, logits_to_keep=1)


class Reader:
    """A model, a prompt, and the full cache of it that recorded what the methods read."""

    def __init__(self, model: PreTrainedModel, prompt: torch.Tensor) -> None:
        self.model, self.prompt = model, prompt
        self.twice = 2 * prompt.shape[1] <= model.config.max_position_embeddings
        self.whole = EvictingCache(
            model, None, record=CAPTURED - (frozenset() if self.twice else catalogue.REPLAYED)
        )
        read(model, prompt, self.whole)

    def serves(self, name: str) -> bool:
        """Whether the model has positions for a method that reads the prompt twice."""
        return self.twice or not catalogue.REPLAYED & resolve(name).captured

    def compressed(self, name: str) -> EvictingCache:
        """The prompt with half of it removed by a method."""
        return EvictingCache.from_prefilled(self.model, self.whole, name, 0.5, options=_options(name))


def _options(name: str) -> dict[str, Any] | None:
    return OPTIONS.get(name.partition("+")[0])


def a_token(reader: Reader, name: str, full: DynamicCache, rounds: int) -> dict[str, float]:
    """Milliseconds of a token with a method and with the full cache, which take turns, and the ratio.

    The full cache forgets the tokens afterwards: it has to be as long for the next method.
    """
    token = reader.prompt[:, -1:]
    with reader.compressed(name) as cache:
        pairs = [
            tuple(seconds(lambda own=own: read(reader.model, token, own), clock) for own in (cache, full))
            for _ in range(rounds + 1)
        ][1:]  # the first tokens warm up
        share = cache.nbytes / cache.nbytes_full
    full.crop(reader.prompt.shape[1] - full.get_seq_length())
    own, others = (statistics.median(side) for side in zip(*pairs, strict=True))
    low, _, high = statistics.quantiles([one / other for one, other in pairs], n=4)
    return {"ms": own * 1e3, "ratio": own / others, "low": low, "high": high, "bytes": share}


def a_prompt(reader: Reader, name: str, rounds: int) -> float:
    """The time to read and compress a prompt over the time to read it: medians of rounds in which the two
    take turns.
    """
    model, pairs = reader.model, []
    for _ in range(rounds):
        cache = EvictingCache(model, name, 0.5, options=_options(name))
        pairs.append(
            [
                seconds(lambda own=own: read(model, reader.prompt, own), clock)
                for own in (cache, DynamicCache())
            ]
        )
        cache.close()
    own, others = (statistics.median(side) for side in zip(*pairs, strict=True))
    return own / others


def growth(readers: list[Reader], name: str, rounds: int) -> float:
    """The power of the number of tokens with which the time of a compression grows: the least of some
    rounds counts.
    """
    sizes = [reader.prompt.shape[1] for reader in readers]
    least = [
        min(seconds(lambda own=own: own.compressed(name).close(), clock) for _ in range(rounds))
        for own in readers
    ]
    return exponent(sizes, least)


def rows(model_name: str, tokens: int, rounds: int, wanted: list[str]) -> Iterator[dict[str, Any]]:
    """A row for each method."""
    model, tokenizer = load_model(model_name)
    ids = passkey.make(tokenizer, depth=0.5, tokens=tokens + 200).context_ids[:, :tokens].to(model.device)
    whole, full = Reader(model, ids), DynamicCache()
    read(model, ids, full)
    short = load_model(model_name)[0]
    short.model.layers = short.model.layers[:LAYERS]
    short.config.num_hidden_layers = LAYERS
    readers = [Reader(short, ids[:, : tokens // part]) for part in (4, 2, 1)]
    for name in track(wanted, description=f"{len(wanted)} methods", console=Console(stderr=True)):
        if whole.serves(name):
            yield {
                "method": name,
                "decode": a_token(whole, name, full, rounds),
                "prompt": a_prompt(readers[-1], name, max(2, rounds // 5)),
                "growth": growth(readers, name, max(2, rounds // 5)),
            }


def table(result: dict[str, Any]) -> str:
    """The Markdown table of a result."""
    return markdown(TEMPLATE, {}, costs=result)


def main(
    name: Annotated[str, typer.Option("--model", help="A hub name, a folder, or embedded.")] = EMBEDDED,
    tokens: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 2048,
    rounds: Annotated[int, typer.Option(help="Tokens that are decoded with each method.")] = 15,
    method: Annotated[
        list[str] | None, typer.Option(help="Measure this one again, of a stored result; may be repeated.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where costs.json goes.")] = RESULTS,
) -> None:
    """Measure what each method costs: a token, a prompt, and the growth of a compression."""
    if unknown := set(method or ()) - set(names()):
        raise typer.BadParameter(
            f"--method: got {', '.join(sorted(unknown))}, wanted some of {', '.join(names())}"
        )
    torch.set_num_threads(1)
    path, key = out / "costs.json", f"{tokens}"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    found |= provenance("torch", "transformers") | {"model": name, "layers": LAYERS}
    kept = found.setdefault("tokens", {}).setdefault(key, {"rounds": rounds, "rows": []})
    for row in rows(name, tokens, rounds, method or names()):
        kept["rows"] = [other for other in kept["rows"] if other["method"] != row["method"]] + [row]
        kept["rows"].sort(key=lambda row: -row["decode"]["ratio"])
        write_json(path, found)  # a killed run keeps what it had
    print(table(found))


if __name__ == "__main__":
    typer.run(main)
