"""Compares the kept tokens of this project and kvpress on
the same model and prompt: `python -m benchmarks.peers`.

kvpress reads a passkey text with the embedded model in an environment of its own (`benchmarks.cpu` makes it)
and writes down the scores of its presses. We read the same tokens and choose with our methods at the same
options. If the two definitions agree, the kept sets must agree too, up to rounding; if not, the table gives
the reason. `make peers` runs it; nothing else needs it.
"""

import sys
import tempfile
import tomllib
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.cpu import KVPRESS, in_kvpress
from benchmarks.timing import RESULTS, ROOT, bytes_of, provenance, show, taking_turns, write_json

RATIO = 0.5
PAGE = ROOT / "docs" / "peers.md"


@dataclass(frozen=True)
class Peer:
    """A method in both libraries, from peers.toml."""

    ours: str
    theirs: str
    options: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    differs: str = ""


PEERS = [
    Peer(**peer)
    for peer in tomllib.loads((Path(__file__).parent / "peers.toml").read_text(encoding="utf-8"))["peer"]
]


def model_in_kvpress(folder: str) -> Any:
    """The model of a folder, in the environment of kvpress."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def their_scores(folder: str, prompt: list[list[int]], output: str) -> None:
    """Run in the environment of kvpress: keys [layers, H_kv, T, D]
    and the scores of every press [layers, H_kv, T].
    """
    import kvpress
    from transformers import DynamicCache

    model = model_in_kvpress(folder)
    ids = torch.tensor(prompt)
    found: dict[str, np.ndarray] = {}
    with torch.no_grad():
        cache = DynamicCache()
        model(ids, past_key_values=cache)
        found["keys"] = torch.cat([layer.keys for layer in cache.layers]).numpy()
        for peer in PEERS:
            press = getattr(kvpress, peer.theirs)(compression_ratio=RATIO, **peer.arguments)
            scores = []
            original = press.score

            def record(
                *arguments: Any, original: Any = original, scores: list[Any] = scores, **named: Any
            ) -> Any:
                scores.append(original(*arguments, **named))
                return scores[-1]

            press.score = record
            with press(model):
                model(ids, past_key_values=DynamicCache())
            found[peer.ours] = torch.cat(scores).numpy()
    np.savez(output, **found)


def their_decoding(
    folder: str, prompt: list[list[int]], lengths: list[int], rounds: int, decoded: int
) -> list[dict[str, Any]]:
    """Run in the environment of kvpress: a token after each prompt with half of the cache, against the full
    cache, for every press and for KeyDiff's with AdaKV's, which masks what it removes.
    """
    import kvpress
    from transformers import DynamicCache

    model = model_in_kvpress(folder)
    attention = [layer.self_attn for layer in model.model.layers]

    def read(tokens: torch.Tensor, cache: DynamicCache, masked: list[Any], times: int = 1) -> None:
        for module, indices in zip(attention, masked, strict=True):
            module.masked_key_indices = indices
        for _ in range(times):
            model(tokens, past_key_values=cache, logits_to_keep=1)

    presses = {
        peer.ours: getattr(kvpress, peer.theirs)(compression_ratio=RATIO, **peer.arguments) for peer in PEERS
    }
    presses["keydiff+ada_kv"] = kvpress.AdaKVPress(kvpress.KeyDiffPress(compression_ratio=RATIO))
    rows = []
    with torch.no_grad():
        for length in lengths:
            ids, full, none = torch.tensor(prompt)[:, :length], DynamicCache(), [None] * len(attention)
            read(ids, full, none)
            for name, press in presses.items():
                cache = DynamicCache()
                with press(model):
                    read(ids, cache, none)
                token, masked = ids[:, -1:], [module.masked_key_indices for module in attention]
                row = {"cache": f"kvpress: {name}", "tokens": length, "bytes": bytes_of(cache)}
                calls = (
                    partial(read, token, cache, masked, decoded),
                    partial(read, token, full, none, decoded),
                )
                rows.append(row | taking_turns(*calls, rounds))
                full.crop(length - full.get_seq_length())
    return rows


def compare(folder: str, ids: np.ndarray, theirs: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """For each method the share of kvpress's kept tokens
    that we keep too, on average and in the worst head.
    """
    from evictionary.cache.evicting_cache import CAPTURED, EvictingCache
    from evictionary.models.load import load as load_model

    model, _ = load_model(folder)
    full = EvictingCache(model, None, record=CAPTURED)
    with torch.no_grad():
        model(torch.from_numpy(ids), past_key_values=full, use_cache=True, logits_to_keep=1)
    drift = max(
        float((layer.keys[0] - torch.from_numpy(keys)).abs().max())
        for layer, keys in zip(full.layers, theirs["keys"], strict=False)
    )
    rows: list[dict[str, Any]] = []
    for peer in PEERS:
        cache = EvictingCache.from_prefilled(model, full, peer.ours, RATIO, options=peer.options)
        shares = []
        for layer, scores in zip(cache.layers, theirs[peer.ours], strict=True):
            count = max(1, int(scores.shape[-1] * (1 - RATIO)))
            chosen = np.argsort(-scores, axis=-1, kind="stable")[:, :count]
            for own, other in zip(layer.positions[0].tolist(), chosen, strict=True):
                shares.append(len(set(own) & set(other.tolist())) / count)
        cache.close()
        rows.append(
            {
                "method": peer.ours,
                "options": peer.options,
                "kvpress": peer.theirs,
                "in_common": float(np.mean(shares)),
                "in_common_worst_head": float(np.min(shares)),
                "heads_alike": float(np.mean(np.array(shares) == 1)),
                "differs": peer.differs,
            }
        )
    return [{"largest_difference_of_keys": drift}, *rows]


def main(tokens: Annotated[int, typer.Option(help="Tokens of the text.")] = 1000) -> None:
    """Compare the kept tokens of this project and kvpress. The
    exit code is 1 if they differ although the definitions agree.
    """
    from benchmarks.report import rendered  # with matplotlib, which the environment of kvpress need not have
    from evictionary.evaluation import passkey
    from evictionary.models import embedded
    from evictionary.models.load import load as load_model

    folder = str(embedded.install())
    _, tokenizer = load_model(folder)
    ids = passkey.make(tokenizer, depth=0.5, tokens=tokens).context_ids.numpy()
    with tempfile.NamedTemporaryFile(suffix=".npz") as output:
        in_kvpress("benchmarks.peers", "their_scores", folder, ids.tolist(), output.name)
        theirs = dict(np.load(output.name))
    summary, *rows = compare(folder, ids, theirs)
    stored = (
        provenance("torch", "transformers")
        | summary
        | {"tokens": ids.shape[1], "heads": int(theirs["knorm"][..., 0].size)}
    )
    stored |= {"kvpress": KVPRESS, "compression_ratio": RATIO, "rows": rows}
    write_json(RESULTS / "peers.json", stored)
    PAGE.write_text(rendered("peers.md.j2", **stored), encoding="utf-8")
    names = ("in_common", "in_common_worst_head", "heads_alike")
    show(
        "",
        [
            {
                "method": row["method"],
                **{name: f"{row[name]:.1%}" for name in names},
                "differs": row["differs"],
            }
            for row in rows
        ],
    )
    broken = [row["method"] for row in rows if not row["differs"] and row["in_common"] < 0.999]
    if broken:
        print(f"kept sets differ although the definitions agree: {', '.join(broken)}", file=sys.stderr)
    raise typer.Exit(int(bool(broken)))


if __name__ == "__main__":
    typer.run(main)
