"""Makes the data of the survivors figure: `python -m docs_build.figures` reads a prompt and writes each
method's kept tokens.

The picture of the README and the gallery of the methods show the same data, at one budget. The other two
figures, of MomentKV and of KeyDiff and LagKV, calculate in the browser; tests compare it with `reference/`.
"""

import html
import io
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.image import imsave
from PIL import Image
from transformers import PreTrainedModel

from evictionary.cache.evicting_cache import CAPTURED, EvictingCache
from evictionary.evaluation import passkey
from evictionary.evaluation.pages import drawn
from evictionary.evaluation.pictures import Picture, survival_figure, survivors as kept
from evictionary.evaluation.questions import prefill
from evictionary.methods import catalogue
from evictionary.models.load import load as load_model
from evictionary.palette import GOES, STAYS

OUTPUT = Path(__file__).parent.parent / "docs" / "figures" / "assets" / "survivors.data.js"
# The data is a script and not a .json file: a page opened from a disk may not fetch files, but it may load
# scripts.
PREFIX = "globalThis.evictionarySurvivors = "

# Options for methods with defaults that would leave a prompt of 300 tokens whole.
OPTIONS: dict[str, dict[str, Any]] = {"lagkv": {"sink_size": 4, "lag_size": 32}}

DEPTH, TOKENS, SEED = 0.4, 300, 0
# The budgets of the figure in tokens, all below the length of the prompt.
SMALLEST, STEP = 50, 10
# The budget of the strips: half of the prompt.
STRIP = 150


def survivors(
    model: PreTrainedModel,
    prompt: passkey.Passkey,
    pieces: Sequence[str],
    method_names: Sequence[str],
    budgets: Sequence[int],
) -> dict[str, Any]:
    """Read the prompt once and compress it by every method to every budget; return the figure's data,
    ready for JSON.

    Args: pieces, the text of each token; budgets, ascending, in tokens for each head.
    """
    with EvictingCache(model, method=None, record=CAPTURED) as full:
        prefill(model, prompt.context_ids, full)
        masks = {
            name: np.stack([_kept(model, full, name, each) for each in budgets]) for name in method_names
        }
    layers, heads = masks[method_names[0]].shape[1:3]
    return {
        "model": Path(str(model.config.name_or_path)).name,
        "tokens": list(pieces),
        "needle": list(prompt.needle),
        "layers": layers,
        "heads": heads,
        "budgets": list(budgets),
        "methods": [
            {
                "name": name,
                "options": OPTIONS.get(name, {}),
                "description": catalogue.description(catalogue.definition(name)),
                **encode(own),
            }
            for name, own in masks.items()
        ],
    }


def _kept(model: PreTrainedModel, full: EvictingCache, name: str, budget: int) -> np.ndarray:
    settings = {"options": OPTIONS.get(name), "budget": budget, "seed": SEED}
    with EvictingCache.from_prefilled(model, full, name, **settings) as cache:
        return kept(cache)


def encode(masks: np.ndarray) -> dict[str, Any]:
    """Masks [budgets, layers, H_kv, T] as `levels` and `exceptions`.

    levels has a letter for each layer, head and token: A if all budgets keep it, B if all but one do, and so
    on; those that do not are the smallest ones. exceptions are the places, in the array of all masks, where
    that is not so: a larger budget may drop a token that a smaller one keeps.
    """
    dropped = (~masks).sum(axis=0)
    return {
        "levels": (ord("A") + dropped).astype(np.uint8).tobytes().decode("ascii"),
        "exceptions": np.flatnonzero(_nested(dropped, len(masks)) != masks).tolist(),
    }


def _nested(dropped: np.ndarray, budgets: int) -> np.ndarray:
    """Masks [budgets, ..] of tokens [..] that so many of the smallest budgets drop."""
    return dropped <= np.arange(budgets).reshape(-1, *[1] * dropped.ndim)


def decode(data: Any, method: Any) -> np.ndarray:
    """Masks [budgets, layers, H_kv, T] of one method of the figure's data."""
    letters = np.frombuffer(method["levels"].encode("ascii"), dtype=np.uint8)
    dropped = (letters - ord("A")).reshape(data["layers"], data["heads"], len(data["tokens"]))
    masks = _nested(dropped, len(data["budgets"]))
    masks.flat[method["exceptions"]] ^= True
    return masks


def stored() -> Any:
    """The data of the figure, as it is in the repository."""
    return json.loads(OUTPUT.read_text(encoding="utf-8").removeprefix(PREFIX).rstrip(";\n"))


def strips(data: Any) -> dict[str, bytes]:
    """For each method a picture of what it keeps at STRIP
    tokens a head: a row for each head, a column for each token.
    """
    colours = ListedColormap(["white", STAYS, "#f8d9c8", GOES])
    needle = np.zeros(len(data["tokens"]), dtype=int)
    needle[slice(*data["needle"])] = 2
    found = {}
    for method in data["methods"]:
        kept = decode(data, method)[data["budgets"].index(STRIP)]
        picture = io.BytesIO()
        imsave(picture, kept.reshape(-1, len(needle)) + needle, cmap=colours, vmin=0, vmax=3, format="png")
        found[method["name"]] = picture.getvalue()
    return found


# What the README's picture shows.
PICTURE = Path(__file__).parent.parent / "docs" / "images" / "survivors.png"
PICTURED = ("keydiff", "lagkv", "knorm")


def picture(data: Any) -> bytes:
    """The README's picture, a PNG: what PICTURED keep at STRIP tokens a head, on a ground of any colour."""
    methods = {method["name"]: method for method in data["methods"]}
    at = data["budgets"].index(STRIP)
    removed = f"{1 - STRIP / len(data['tokens']):.0%}"
    figure = survival_figure(
        [Picture(name, removed, decode(data, methods[name])[at], tuple(data["needle"])) for name in PICTURED]
    )
    figure.set(size_inches=(9.6, 2.7), dpi=130)
    for axes, name in zip(figure.axes, PICTURED, strict=True):
        axes.set_title(f"{name}, {removed} removed")
        axes.label_outer()
    drawn_in_full = io.BytesIO(drawn(figure, "png"))
    with Image.open(drawn_in_full) as image:
        small = io.BytesIO()
        image.quantize(32).save(small, "png", optimize=True)
    return small.getvalue()


# What the cover shows: methods that read keys, queries and positions, in some sentences around the number.
COVER = {
    "keydiff": ("KeyDiff", "reads the keys, and keeps those that point elsewhere"),
    "snapkv": ("SnapKV", "keeps what the last queries attended to"),
    "streaming_llm": ("StreamingLLM", "keeps the first tokens and the last ones"),
}
AROUND = (110, 188)


def cover(data: Any) -> str:
    """The cover of the site as HTML: for each method of COVER the sentences around the number, each token
    marked by the share of the heads that keep it when half of all tokens stay.
    """
    pieces, needle = data["tokens"], range(*data["needle"])
    digits = [place for place in needle if pieces[place].strip().isdigit()]
    sections = []
    for method in data["methods"]:
        if method["name"] in COVER:
            kept = decode(data, method)[data["budgets"].index(STRIP)]
            shares = kept.reshape(-1, len(pieces)).mean(0)
            title, idea = COVER[method["name"]]
            found = f"{shares[digits].mean():.0%} of the number stays"
            sections.append(
                f'<section><p class="name">{title}</p><p>{idea}: <strong>{found}</strong>.</p>'
                f'<p class="text" role="img" aria-label="{title}: {found}">'
                f"{_marked(pieces, shares, digits)}</p></section>"
            )
    return f'<div class="cover">{"".join(sections)}</div>'


def _marked(pieces: Sequence[str], shares: np.ndarray, digits: Sequence[int]) -> str:
    """The pieces of AROUND, those of one mark together; a digit of the number is underlined."""
    marks = [(round(10 * shares[place]), place in digits) for place in range(*AROUND)]
    runs = itertools.groupby(zip(pieces[slice(*AROUND)], marks, strict=True), key=lambda each: each[1])
    return "".join(
        f'<span style="--s:{tenths}"'
        + (' class="needle">' if digit else ">")
        + html.escape("".join(piece for piece, _ in run))
        + "</span>"
        for (tenths, digit), run in runs
    )


def main() -> None:
    """Write the data of the site's figure, with the embedded model, and the README's picture of it."""
    model, tokenizer = load_model()
    prompt = passkey.make(tokenizer, depth=DEPTH, seed=SEED, tokens=TOKENS)
    pieces = [tokenizer.decode([token]) for token in prompt.context_ids[0].tolist()]
    budgets = range(SMALLEST, len(pieces), STEP)
    data = survivors(model, prompt, pieces, [*catalogue.evicting(), catalogue.RANDOM], budgets)
    OUTPUT.write_text(f"{PREFIX}{json.dumps(data, separators=(',', ':'))};\n", encoding="utf-8")
    PICTURE.write_bytes(picture(data))


if __name__ == "__main__":
    main()
