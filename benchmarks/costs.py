"""What each method costs in a model, in one table: `python -m benchmarks.costs`.

For every method, against the full cache of transformers (DynamicCache) in the same run:

- decode: the time of a token, half of the prompt removed. The cache and the full one take turns token by
  token, so a busy machine slows both down. The ratio is that of the medians.

And with `--also`, which takes longer:

- prompt: the time to read a prompt and compress it to half. What a method captures, or reads a second time,
  counts.
- growth: the power of the number of tokens with which the time of a compression grows, from prompts of a
  quarter and a half of the tokens and of all.

Decode runs in the whole model. Prompt and growth run in its first layers, for a layer is like the next. Time
is processor time on one thread. Every finished row is stored, and `--method` measures some rows again. To
compare with another commit, run this file there with `--run before` and the same `--out`.
"""

import copy
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
from evictionary.cache.session import Session
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
ALSO = ("prompt", "growth")
LIMIT = 1.1  # the ratio of a token above which the table says what takes the time
SEVERAL = (
    "AD-3: heads of several lengths take two products each, where the full cache takes one call "
    "(`attend_token` in `evictionary/cache/partial_attention.py`)"
)
# What takes the time, by the method or its additions; a row looks for its whole name first.
WORK = {
    "momentkv": "MK-A1: at every second token each head scores its tokens, evicts one and sums it up "
    "(`step_trusted` in `optimized/momentkv.py`)",
    "momentkv+ada_kv": "MK-A1 and AD-3: at every token each head scores its tokens, and the layer evicts one "
    "or more (`step_trusted` in `optimized/momentkv_ragged.py`, `replace_in_heads` in "
    "`evictionary/cache/layers.py`)",
    "quest": "QU-2: all keys and values stay and are read, and the bounds of all pages are beside them "
    "(`attend_pages` in `optimized/quest.py`)",
    "moments": "MK-9: each query head reads the moments, D_v x D numbers (`evicted_part` in "
    "`optimized/momentkv.py`)",
    "ada_kv": SEVERAL,
    "gvote": SEVERAL,
    "kvzap": SEVERAL,
}
TEMPLATE = Path(__file__).parent / "templates" / "costs.md.j2"
clock = time.process_time


def names() -> list[str]:
    """Every method, with AdaKV where the heads of a layer can
    share its budget; with every addition, those of ADDED.
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


class SessionOfOneLayer(Session):
    """Compresses the first layer alone; the others hold copies of it."""

    def compress(self, layer_index: int) -> None:
        if layer_index:
            vars(self.layers[layer_index]).update(copy.deepcopy(vars(self.layers[0])))
        else:
            super().compress(layer_index)


class OneLayer(EvictingCache):
    """A cache of which one layer is compressed. A token costs the same with the copies, and a method that
    takes a minute for each layer is measured too.
    """

    _session_type = SessionOfOneLayer


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
        is_slow = any(policy.is_slow for policy in resolve(name).policies)
        kind = OneLayer if is_slow else EvictingCache
        return kind.from_prefilled(self.model, self.whole, name, 0.5, options=_options(name))


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
    sides = zip(*pairs, strict=True)
    own, others = map(statistics.median, sides)
    low, _, high = statistics.quantiles([one / other for one, other in pairs], n=4)
    return {
        "ms": own * 1e3,
        "ratio": own / others,
        "low": low,
        "high": high,
        "bytes": share,
    }


def a_prompt(reader: Reader, name: str, rounds: int) -> float:
    """The time to read and compress a prompt over the time to
    read it: medians of rounds in which the two take turns.
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
    """The power of the number of tokens with which the time
    of a compression grows: the least of some rounds counts.
    """
    sizes = [reader.prompt.shape[1] for reader in readers]
    least = [
        min(seconds(lambda own=own: own.compressed(name).close(), clock) for _ in range(rounds))
        for own in readers
    ]
    return exponent(sizes, least)


def rows(
    model_name: str, tokens: int, rounds: int, wanted: list[str], also: list[str]
) -> Iterator[dict[str, Any]]:
    """A row for each method."""
    model, tokenizer = load_model(model_name)
    ids = passkey.make(tokenizer, depth=0.5, tokens=tokens + 200).context_ids[:, :tokens].to(model.device)
    whole, full = Reader(model, ids), DynamicCache()
    read(model, ids, full)
    readers = _shallow(model_name, ids) if also else []
    again = max(2, rounds // 5)
    for name in track(wanted, description=f"{len(wanted)} methods", console=Console(stderr=True)):
        if whole.serves(name):
            row: dict[str, Any] = {"method": name, "decode": a_token(whole, name, full, rounds)}
            if "prompt" in also:
                row["prompt"] = a_prompt(readers[-1], name, again)
            if "growth" in also:
                row["growth"] = growth(readers, name, again)
            yield row


def _shallow(model_name: str, ids: torch.Tensor) -> list[Reader]:
    """The first layers of a model, with a quarter and a half of a prompt and with all."""
    short = load_model(model_name)[0]
    short.model.layers = short.model.layers[:LAYERS]
    short.config.num_hidden_layers = LAYERS
    return [Reader(short, ids[:, : ids.shape[1] // part]) for part in (4, 2, 1)]


def work(row: dict[str, Any]) -> str:
    """What takes the time of a row above the limit; nothing for another."""
    if row["decode"]["ratio"] <= LIMIT:
        return ""
    name = row["method"]
    known = [WORK[name]] if name in WORK else [WORK[part] for part in name.split("+") if part in WORK]
    return "; ".join(known) or "not known"


def compared(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the run `now`, for each number of tokens, with those of the run `before` beside them."""
    parts = []
    for tokens, measured in result["now"]["tokens"].items():
        before = result.get("before", {}).get("tokens", {}).get(tokens, {"rows": []})
        known = {row["method"]: row for row in before["rows"]}
        found = [{**row, "before": known.get(row["method"]), "work": work(row)} for row in measured["rows"]]
        parts.append({"tokens": int(tokens), "rounds": measured["rounds"], "rows": found})
    return parts


def table(result: dict[str, Any]) -> str:
    """The Markdown table of a result."""
    return markdown(TEMPLATE, {}, parts=compared(result), limit=LIMIT)


def main(
    name: Annotated[str, typer.Option("--model", help="A hub name, a folder, or embedded.")] = EMBEDDED,
    tokens: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 2048,
    rounds: Annotated[int, typer.Option(help="Tokens that are decoded with each method.")] = 15,
    method: Annotated[
        list[str] | None, typer.Option(help="Measure this one again, of a stored result; may be repeated.")
    ] = None,
    also: Annotated[list[str] | None, typer.Option(help="prompt or growth; may be repeated.")] = None,
    run: Annotated[str, typer.Option(help="Store the rows as this run: now, or before.")] = "now",
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where costs.json goes.")] = RESULTS,
) -> None:
    """Measure what each method costs: a token; with --also, a prompt and the growth of a compression."""
    for option, given, known in (
        ("--method", method, names()),
        ("--also", also, ALSO),
        ("--run", [run], ("now", "before")),
    ):
        if unknown := set(given or ()) - set(known):
            raise typer.BadParameter(
                f"{option}: got {', '.join(sorted(unknown))}, wanted some of {', '.join(known)}"
            )
    torch.set_num_threads(1)
    path, key = out / "costs.json", f"{tokens}"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    here = found.setdefault(run, {})
    made = provenance("torch", "transformers")
    of_row = {"made": made} if method and here else {}  # the other rows keep the origin that they have
    if not of_row:
        here |= made | {"model": name, "layers": LAYERS}
    kept = here.setdefault("tokens", {}).setdefault(key, {"rounds": rounds, "rows": []})
    for row in rows(name, tokens, rounds, method or names(), also or []):
        kept["rows"] = [other for other in kept["rows"] if other["method"] != row["method"]] + [row | of_row]
        kept["rows"].sort(key=lambda row: -row["decode"]["ratio"])
        write_json(path, found)  # a killed run keeps what it had
    if "now" in found:
        print(table(found))


if __name__ == "__main__":
    typer.run(main)
