"""A cache beside transformers' own: each part of a text is read by both, and a mask hides from the other
what ours has evicted.

The other cache keeps every token; the mask of a layer, a row and a head says what the head held before the
part was read. So the states of layers without a cache are transformers' own on both sides, and the difference
is the eviction's alone. `python -m tests.tools.masked` prints the table of docs/in_a_model.md.
"""

import datetime
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, __version__ as transformers_version

sys.path[:0] = [str(Path(__file__).parents[1])]
from evictionary import EvictingCache  # noqa: E402
from evictionary.models import versions  # noqa: E402
from tools.families import OF_2026, build  # noqa: E402
from tools.reading import masked_logits, small  # noqa: E402

IDS = torch.randint(3, 299, (2, 44), generator=torch.Generator().manual_seed(0))
METHODS = ("keydiff", "snapkv+ada_kv")
"""One number of tokens in all heads, and ragged heads."""
PHASES: dict[str, dict[str, Any]] = {
    "prompt": {"sizes": [40, 1, 1]},
    "prompt in blocks": {"sizes": [15, 15, 14], "every": 15},
    "decoding": {"sizes": [32, *[1] * 8], "every": 3},
    "several tokens later": {"sizes": [40, 4]},
    "padded rows": {"sizes": [40, 1, 1], "padding": 7},
}


REFUSED = [("Jamba", "prompt in blocks"), ("Jamba", "several tokens later")]
"""What transformers itself gets wrong: the layers with a state begin anew where several later tokens are
read at once.
"""


class Difference(NamedTuple):
    """The largest difference of two sets of logits, and the largest logit."""

    largest: float
    of: float


@torch.no_grad()
def difference(model: Any, method: str, sizes: Sequence[int], padding: int = 0, every: int = 0) -> Difference:
    """Read parts of these sizes with half of the tokens evicted, and compare. The second row has `padding`
    on its left.
    """
    ids, batch = IDS[: 1 + bool(padding)], 1 + bool(padding)
    real = torch.arange(IDS.shape[1]) >= torch.tensor([0, padding])[:batch, None]
    positions = (real.cumsum(dim=1) - 1).clamp(min=0)
    others, worst, largest = DynamicCache(config=model.config), 0.0, 0.0
    with EvictingCache(model, method, 0.5, small(method), every=every) as cache:
        seen, views = 0, {}
        for size in sizes:
            part, end = slice(seen, seen + size), seen + size
            named = {"attention_mask": real[:, :end].long(), "position_ids": positions[:, part]}
            for index in cache._session.settings.places:
                held = _held(cache, index, batch)
                visible = torch.cat([held, real[:, None, part].expand(-1, held.shape[1], -1)], dim=-1)
                seen_by = visible[:, :, None] & (torch.arange(end) <= torch.arange(seen, end)[:, None])
                views[index] = seen_by | torch.eye(end, dtype=torch.bool)[part]  # padding sees itself
            ours = model(ids[:, part], **versions.argument(cache), **named).logits[real[:, part]]
            theirs = masked_logits(model, ids[:, part], views, others, **named)[real[:, part]]
            worst, largest = (
                max(worst, float((ours - theirs).abs().max())),
                max(largest, float(theirs.abs().max())),
            )
            seen = end
        assert cache.nbytes < cache.nbytes_full
    return Difference(worst, largest)


def _held(cache: EvictingCache, index: int, batch: int) -> torch.Tensor:
    """What each head of a layer holds of the tokens that
    it has seen, [B, H_kv, seen], or one head of none.
    """
    layer = cache.layers[index]
    if layer.keys is None:
        return torch.zeros(batch, 1, 0, dtype=torch.bool)
    _, _, positions, filled = layer.contents()
    return torch.zeros(*positions.shape[:2], layer.seen + 1, dtype=torch.bool).scatter(
        2, torch.where(filled, positions, layer.seen).long(), True
    )[..., :-1]


def table() -> Iterator[str]:
    """The lines of a table, models by phases: the largest
    difference over the methods, of the largest logit.
    """
    yield from (
        f"| logits differ by at most | {' | '.join(PHASES)} | of logits up to |",
        "|---" * (len(PHASES) + 2) + "|",
    )
    for family in OF_2026:
        model = build(family)
        names = [name for name in PHASES if (family, name) not in REFUSED]
        found = {name: max(difference(model, method, **PHASES[name]) for method in METHODS) for name in names}
        cells = [f"{found[name].largest:.0e}" if name in found else "refused" for name in PHASES]
        yield f"| {family} | {' | '.join(cells)} | {max(each.of for each in found.values()):.0f} |"
    made = f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d} with transformers {transformers_version}"
    yield f"\nMeasured on {made} by `python -m tests.tools.masked`, with {' and '.join(METHODS)}."


if __name__ == "__main__":
    for line in table():
        print(line, flush=True)
