"""Draws the idea of a method: the same twelve tokens for all, what it reads of them, its scores, who goes.

The tokens have keys, values and queries of two channels, without RoPE. The scores and
the choice come from the method's own functions of `reference/`, so a picture shows
what the method does. What twelve tokens cannot give, such as gates and weights, is a
small input that the picture states. An addition is drawn without it and with it.
"""

import html
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from evictionary.methods import catalogue
from evictionary.reference import (
    ada_kv,
    cake,
    cam,
    chunk_kv,
    dms,
    expected_attention,
    gvote,
    h2o,
    keydiff,
    lagkv,
    momentkv,
    protect,
    pyramid_kv,
    q_filters,
    quantisation,
    quest,
    rerotation,
    snapkv,
    triattention,
)
from evictionary.reference.selection import top_k

# The twelve tokens: most keys point one way, as in a real head; 0, 4 and 7 do not.
KEYS = np.array(
    [
        (-0.4, 0.5),
        (1.0, 0.3),
        (0.9, 0.5),
        (1.1, 0.2),
        (0.2, -1.1),
        (1.0, 0.6),
        (0.8, 0.4),
        (-0.3, 1.1),
        (1.3, 0.3),
        (0.9, -0.2),
        (0.6, 0.8),
        (1.0, 0.5),
    ]
)
VALUES = np.array(
    [
        (0.1, 0.1),
        (0.6, -0.3),
        (0.5, -0.2),
        (0.7, -0.3),
        (-0.9, 0.8),
        (0.5, -0.4),
        (0.2, 0.9),
        (-0.6, -0.7),
        (0.6, -0.2),
        (0.3, 0.3),
        (0.9, 0.6),
        (0.5, 0.1),
    ]
)
QUERIES = np.array(
    [
        (-1.0, 1.0),
        (0.5, 1.5),
        (1.2, 0.6),
        (1.6, -0.2),
        (0.6, -1.6),
        (1.4, 0.8),
        (1.0, 1.2),
        (0.2, 1.8),
        (1.8, 0.2),
        (1.2, -0.8),
        (0.4, 2.0),
        (0.8, 2.2),
    ]
)
TOKENS, BUDGET = len(KEYS), len(KEYS) // 2
DELAY = 4
# Settings of a text of twelve tokens, where a method has them.
SETTINGS: dict[str, Any] = {
    "budget": BUDGET,
    "compression_ratio": 0.5,
    "keep_ratio": 0.5,
    "window_size": 2,
    "recent_size": 2,
    "sink_size": 1,
    "kernel_size": 3,
    "chunk_size": 3,
    "page_size": 3,
    "lag_size": 3,
    "merge_size": 2,
    "p": 0.5,
    "threshold": 0.5,
}
# What a method needs otherwise.
OWN: dict[str, dict[str, Any]] = {
    "duo_attention": {"keys": np.stack([KEYS, KEYS])[None]},
    "lagkv": {"sink_size": 0},
    "tova": {"queries": QUERIES[None, None, -1:]},
}


def inputs() -> dict[str, Any]:
    """What a method can read of the twelve tokens, by the names of the contract: one text, one head."""
    mean, covariance = expected_attention.query_statistics(QUERIES[None, None])
    direction, slack = triattention.statistics(QUERIES[None, None])
    keys, values, queries = (each[None, None] for each in (KEYS, VALUES, QUERIES))
    earlier = momentkv.update(
        momentkv.no_moments(keys, values), keys, values, np.isin(np.arange(TOKENS), (1, 3, 5))[None, None]
    )
    return {
        "keys": keys,
        "values": values,
        "queries": queries,
        "query": queries[:, :, -1],
        "replay_queries": queries,
        "replay_keys": keys,
        "unrotated_keys": keys,
        "hidden_states": QUERIES[None],
        "sampled_queries": np.array([(0.6, 1.8), (1.6, 0.2), (0.4, -1.0)])[None, None],
        "query_mean": mean,
        "query_covariance": covariance,
        "query_direction": direction,
        "query_slack": slack,
        "q_filters": q_filters.calibrate(queries, 1),
        "moments": earlier,
        "w_o": np.array([[(1.0, 0.0), (0.0, 2.0)]]),
        "sketch": np.array([[[(1.0, 0.0), (0.0, 1.0)]]]),
        "gates": np.array([[0.9, 0.2]]),
        "surrogate_weights": np.array([[(0.2, 0.6)]]),
        "surrogate_bias": np.array([[0.0]]),
        "layer_index": 2,
    }


# The inputs that are arrows, with the words of the picture for them.
LOOKED_AT = {
    "queries": "the queries of all tokens",
    "query": "the last query",
    "replay_queries": "the queries of the second reading",
    "hidden_states": "the hidden states",
    "query_mean": "the mean query",
    "query_direction": "the mean query",
    "q_filters": "the main direction of the queries",
}
# The inputs that are stated in words.
STATED = {
    "query_covariance": "the covariance of the twelve queries",
    "query_slack": "what the mean hides of the queries' length",
    "w_o": "an output projection that doubles the second channel",
    "sketch": "a sketch that changes nothing",
    "moments": "the moments of three tokens evicted before, which were as 1, 3 and 5",
    "surrogate_weights": "a surrogate of 0.2 and 0.6 for the two channels",
    "gates": "gates of 0.9 and 0.2",
}


def called(function: Callable[..., Any], own: Mapping[str, Any] | None = None) -> Any:
    """The answer of a function of `reference/` about the twelve tokens.

    Args: own, inputs and settings in place of the shared ones. Raises TypeError for an input that the twelve
    tokens do not have: give it to `inputs`.
    """
    known = {**inputs(), **SETTINGS, **(own or {})}
    wanted = inspect.signature(function).parameters
    return function(**{name: known[name] for name in wanted if name in known})


def settings(function: Callable[..., Any], stem: str) -> dict[str, Any]:
    """The settings of the picture that a function takes, but for the budget."""
    known = SETTINGS | {key: value for key, value in OWN.get(stem, {}).items() if key in SETTINGS}
    return {
        name: known[name]
        for name, parameter in inspect.signature(function).parameters.items()
        if name in known and parameter.default is not inspect.Parameter.empty
    }


class Seen(NamedTuple):
    """What a method looks at beside the keys: words, arrows [T, n, 2] that each key is compared with, and
    boxes [T, 2, 2] from the lowest to the highest numbers that it is compared with.
    """

    words: str
    arrows: np.ndarray | None = None
    boxes: np.ndarray | None = None


def seen(stem: str) -> Seen | None:
    """What a method compares each of the twelve keys with, or None."""
    if stem in SEEN:
        return SEEN[stem]()
    function = _entry(stem)
    found = [name for name in inspect.signature(function).parameters if name in LOOKED_AT]
    if not found:
        return None
    given = (inputs() | OWN.get(stem, {}))[found[0]].reshape(-1, 2)
    words = LOOKED_AT[found[0]]
    if found[0] == "queries":
        given = given[-settings(function, stem).get("window_size", TOKENS) :]
        if len(given) < TOKENS:
            words = plural("the query of token", range(TOKENS - len(given), TOKENS), "the queries of tokens")
    return Seen(words, beside_all(given))


def beside_all(arrows: np.ndarray) -> np.ndarray | None:
    """The same few arrows beside each of the twelve keys; None for more, which a key has no room for."""
    few = np.reshape(arrows, (1, -1, 2))
    return np.broadcast_to(few, (TOKENS, *few.shape[1:])) if few.shape[1] <= MOST_ARROWS else None


def _of_keydiff() -> Seen:
    return Seen("the mean direction of all keys", beside_all(keydiff.anchor(KEYS)))


def _of_lagkv() -> Seen:
    lag = SETTINGS["lag_size"]
    parts = KEYS.reshape(-1, lag, 2)
    boxes = np.stack([parts.min(axis=1), parts.max(axis=1)], axis=1)[1:].repeat(lag, axis=0)
    nothing = np.full((lag, 2, 2), np.nan)  # the last partition is compared with nothing
    return Seen("the range of the next three keys", boxes=np.concatenate([boxes, nothing]))


def _of_quest() -> Seen:
    bounds = np.stack([each[0, 0] for each in called(quest.page_bounds)], axis=1)
    boxes = bounds.repeat(SETTINGS["page_size"], axis=0)
    return Seen("the last query, and the range of the keys of a page", beside_all(QUERIES[-1:]), boxes)


def _of_gvote() -> Seen:
    return Seen("three samples of future queries", beside_all(inputs()["sampled_queries"]))


SEEN = {"gvote": _of_gvote, "keydiff": _of_keydiff, "lagkv": _of_lagkv, "quest": _of_quest}


def scores(stem: str) -> np.ndarray | None:
    """The numbers [H, T] by which a method chooses, from the lowest to the highest; None where it has none.

    LagKV has them for its partitions but the last, GVote as votes, and Quest for the pages.
    """
    if stem in SCORES:
        return SCORES[stem]()
    score = getattr(catalogue.definition(stem), "score", None)
    return called(score, OWN.get(stem))[0] if score else None


def _votes() -> np.ndarray:
    known = inputs()
    weights = gvote.attention_weights(known["query"][0, 0], KEYS)
    size = int(gvote.single_step_budget(gvote.nucleus(weights, SETTINGS["p"])))
    logits = gvote.sampled_logits(known["sampled_queries"][0, 0], KEYS)
    return gvote.top_each(logits, np.full(len(logits), size)).sum(axis=0)[None]


def _by_partition() -> np.ndarray:
    lag = SETTINGS["lag_size"]
    keys, values = (each.reshape(-1, lag, 2) for each in (KEYS, VALUES))
    found = lagkv.score(keys[:-1], values[:-1], keys[1:], values[1:])
    return np.append(found, np.full(lag, np.inf))[None]


def _of_pages() -> np.ndarray:
    found = quest.bounds(inputs()["query"], *called(quest.page_bounds))[0]
    return found.repeat(SETTINGS["page_size"], axis=-1)


SCORES = {"gvote": _votes, "lagkv": _by_partition, "quest": _of_pages, "duo_attention": lambda: None}


def kept(stem: str) -> np.ndarray:
    """The tokens [H, T] that a method keeps, or attends to: half of them, unless it decides by itself."""
    function = _entry(stem)
    found = called(function, OWN.get(stem))
    return (found if found.dtype == bool else top_k(found, BUDGET))[0]


def _entry(stem: str) -> Callable[..., Any]:
    function = catalogue.entry(catalogue.definition(stem))
    assert function, stem
    return function


# The picture: rows of twelve cells.

CELL, EDGE, LABEL, GAP, MOST_ARROWS = 32, 6, 15, 7, 3
WIDTH = TOKENS * CELL + 2 * EDGE


class Row(NamedTuple):
    """A row of the picture: its label, its marks with y from 0, their height, and what they say."""

    label: str
    marks: list[str]
    height: int
    told: str = ""


def _centre(token: int) -> float:
    return EDGE + CELL * (token + 0.5)


def _arrow(token: int, vector: np.ndarray, kind: str) -> str:
    """An arrow from the middle of a token's cell; the vector is in pixels, with y upwards."""
    x, y = _centre(token), CELL / 2
    right, up = (float(each) for each in vector)
    length = max(np.hypot(right, up), 1e-9)
    ahead, side = np.array([right, -up]) / length, np.array([up, right]) / length
    tip = np.array([x + right, y - up])
    corners = [tip, tip - 4 * ahead + 2 * side, tip - 4 * ahead - 2 * side]
    head = " ".join(f"{a:.1f},{b:.1f}" for a, b in corners)
    return (
        f'<g class="{kind}"><line x1="{x:.1f}" y1="{y:.1f}" x2="{tip[0]:.1f}" y2="{tip[1]:.1f}"/>'
        f'<polygon points="{head}"/></g>'
    )


def arrows(
    label: str,
    vectors: np.ndarray,
    kind: str,
    beside: Seen | None = None,
    there: Collection[int] = range(TOKENS),
) -> Row:
    """A row of arrows [T, 2], and behind them in each cell what the token is compared with.

    Args: there, the tokens whose cells are not empty.
    """
    scale = (CELL / 2 - 1) / np.abs(vectors).max()
    marks = []
    if beside and beside.boxes is not None:
        for token, (low, high) in enumerate(beside.boxes):
            if np.isfinite(low).all() and token in there:
                x, y = _centre(token) + scale * low[0], CELL / 2 - scale * high[1]
                wide, tall = (float(each) for each in np.maximum(scale * (high - low), 1))
                marks.append(
                    f'<rect class="range" x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{tall:.1f}"/>'
                )
    if beside and beside.arrows is not None:
        longest = np.sqrt((beside.arrows**2).sum(axis=-1)).max()
        for token, few in enumerate(beside.arrows * (CELL / 2 - 1) / longest):
            marks += [_arrow(token, one, "look") for one in few if token in there]
    marks += [_arrow(token, one, kind) for token, one in enumerate(scale * vectors) if token in there]
    return Row(label, marks, CELL)


def bars(label: str, numbers: np.ndarray) -> Row:
    """A row of bars, from the lowest finite number to the highest; one that is infinite says so, and none is
    drawn for NaN.
    """
    finite = numbers[np.isfinite(numbers)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    marks, tallest = [], CELL - 4
    for token, number in enumerate(numbers):
        if np.isnan(number):
            continue
        known = np.isfinite(number)
        tall = 2 + (tallest - 2) * (number - low) / max(high - low, 1e-12) if known else tallest
        said = f"{number:.3g}" if known else "infinity"
        marks.append(
            f'<rect class="bar{"" if known else " whole"}" x="{_centre(token) - 9:.1f}" '
            f'y="{CELL - tall:.1f}" width="18" height="{tall:.1f}">'
            f"<title>token {token}: {said}</title></rect>"
        )
        if not known:
            marks.append(f'<text x="{_centre(token):.1f}" y="{CELL / 2 + 4:.1f}">∞</text>')
    return Row(label, marks, CELL)


def _box(token: int, kind: str, on: str, number: int) -> str:
    """A box in the cell of a token, with a number in it; kind and on are the style of the two."""
    x = _centre(token)
    return (
        f'<rect class="{kind}" x="{x - 13:.1f}" y="1" width="26" height="20" rx="3"/>'
        f'<text class="{on}" x="{x:.1f}" y="15">{number}</text>'
    )


def boxes(
    label: str, stay: np.ndarray, one: str = "goes", more: str = "go", waits: Collection[int] = ()
) -> Row:
    """A row of the tokens: filled where they stay, hollow and struck out where they go, pale where they wait.

    Args: one and more, the words for one token that does not stay and for several; waits, the tokens about
    which nothing is decided yet.
    """
    marks = []
    for token, stays in enumerate(stay):
        x = _centre(token)
        kind, on = ("waits", "off waits") if token in waits else ("stays", "on") if stays else ("goes", "off")
        marks.append(_box(token, kind, on, token))
        if kind == "goes":
            marks.append(f'<line class="struck" x1="{x - 11:.1f}" y1="19" x2="{x + 11:.1f}" y2="3"/>')
    gone = [token for token, stays in enumerate(stay) if not stays and token not in waits]
    told = (
        f"{plural('token', gone, 'tokens')} {more if len(gone) > 1 else one}" if gone else f"no token {one}"
    )
    return Row(label, marks, 22, told)


def plural(one: str, numbers: Sequence[int] | range, more: str) -> str:
    """`token 3`, or `tokens 3, 5 and 6`."""
    words = [str(number) for number in numbers]
    if len(words) == 1:
        return f"{one} {words[0]}"
    return f"{more} {', '.join(words[:-1])} and {words[-1]}"


class Picture(NamedTuple):
    """The rows of a picture, and what it says in words: the alternative text, and the line below it."""

    rows: list[Row]
    begins: str
    below: str = ""

    @property
    def alt(self) -> str:
        """What the picture shows, in words made from its numbers."""
        told = [row for row in self.rows if row.told]  # the rows of who goes
        each = [f"{row.label}: {row.told}" if len(told) > 1 else row.told.capitalize() for row in told]
        return ". ".join([self.begins, *each]) + "."

    @property
    def caption(self) -> str:
        """The line below the picture: with several rows of tokens it leaves those to the picture."""
        several = len([row for row in self.rows if row.told]) > 1
        return f"{self.begins}." if several else self.alt

    def svg(self, steps: str = "") -> str:
        """The picture, as lines of HTML without a blank one; steps, an element with those of `steps`."""
        return "\n".join(
            [
                '<div class="idea" data-search-exclude="">',
                f'<svg viewBox="{self.box}" role="img" aria-label="{html.escape(self.alt)}">',
                *self.drawn(),
                "</svg>",
                *([steps] if steps else []),
                "</div>",
            ]
        )

    @property
    def box(self) -> str:
        """The view box, in pixels."""
        return f"0 0 {WIDTH} {sum(LABEL + row.height + GAP for row in self.rows)}"

    def drawn(self) -> list[str]:
        """The elements of each row, at its place."""
        rows, top = [], 0
        for row in self.rows:
            label = f'<text class="label" x="{EDGE}" y="{top + 11}">{html.escape(row.label)}</text>'
            rows.append("\n".join([label, f'<g transform="translate(0 {top + LABEL})">', *row.marks, "</g>"]))
            top += LABEL + row.height + GAP
        return rows


def picture(stem: str) -> Picture:
    """The picture of a method or an addition."""
    return ADDITIONS[stem]() if stem in ADDITIONS else _of_method(stem)


def _of_method(stem: str) -> Picture:
    function, beside, numbers = _entry(stem), seen(stem), scores(stem)
    reads = inspect.signature(function).parameters
    per_query = "per_query" in catalogue.traits(catalogue.definition(stem))
    compared = beside is not None and (beside.arrows is not None or beside.boxes is not None)
    label = f"keys, and in orange {beside.words}" if beside and compared else "keys"
    rows = [arrows(label, KEYS, "key", beside)]
    if "values" in reads:
        rows.append(arrows("values", VALUES, "value"))
    if beside and not compared:
        rows.append(arrows(beside.words, QUERIES, "look"))
    if numbers is not None:
        rows += [bars(NUMBERS.get(stem, "score"), each) for each in numbers]
    stay = kept(stem)
    names = ["who is attended to" if per_query else "who stays"]
    verbs = ("is left out", "are left out") if per_query else ("goes", "go")
    if len(stay) > 1:
        names = [f"head {head}, with a gate of {gate}" for head, gate in enumerate(inputs()["gates"][0])]
    rows += [boxes(name, each, *verbs) for name, each in zip(names, stay, strict=True)]
    stated = [STATED[name] for name in reads if name in STATED]
    chosen = [f"{name.replace('_', ' ')} {value}" for name, value in settings(function, stem).items()]
    alone = " and ".join(f"the {name}" for name in ("keys", "values") if name in reads)
    looks = f"The method looks at {beside.words if beside else alone}"
    looks = looks if beside else ALONE.get(stem, looks)
    return Picture(rows, looks, _below(stated, chosen))


def _below(stated: Sequence[str], chosen: Sequence[str]) -> str:
    """What the picture takes as given, and its settings."""
    given = f"Given: {'; '.join(stated)}." if stated else ""
    small = f"Settings here: {', '.join(chosen)}." if chosen else ""
    return " ".join(each for each in (given, small) if each)


# What decides where a method compares the keys with nothing.
ALONE = {
    "duo_attention": "The gate of a head decides",
    "knorm": "The length of a key decides",
    "streaming_llm": "The place of a token decides, and no key is read",
}
NUMBERS = {
    "gvote": "votes of the three samples",
    "quest": "the bound of a token's page",
    "lagkv": "score of the keys and the values in a partition",
}


# Additions: without them and with them, behind a method.

LAYERS = 3


def two_heads() -> np.ndarray:
    """Keys [2, T, 2]: those of the second head point in
    more directions, so KeyDiff scores more of them high.
    """
    turned = np.linspace(-1.3, 1.3, TOKENS)
    return np.stack([KEYS, np.stack([np.cos(turned), np.sin(turned)], axis=-1)])


def _of_ada_kv() -> Picture:
    heads = two_heads()[None]
    found = keydiff.score(heads)
    without, with_it = top_k(found, BUDGET)[0], ada_kv.select(found, BUDGET)[0]
    rows = []
    for head in range(2):
        rows += [arrows(f"keys of head {head}", heads[0, head], "key"), bars("score", found[0, head])]
        rows += [boxes(f"head {head}, keydiff", without[head])]
        rows += [boxes(f"head {head}, keydiff+ada_kv", with_it[head])]
    begins = "Both heads share one budget, so one keeps more than the other"
    return Picture(rows, begins)


def _of_chunk_kv() -> Picture:
    found, size = keydiff.score(KEYS), SETTINGS["chunk_size"]
    means = chunk_kv.chunk_means(found, chunk_size=size)
    rows = [
        arrows("keys", KEYS, "key", seen("keydiff")),
        bars("score", found),
        boxes("keydiff", top_k(found, BUDGET)),
        bars("mean score of the chunk", means.repeat(size)[:TOKENS]),
        boxes("keydiff+chunk_kv", chunk_kv.choose(found, BUDGET, chunk_size=size)),
    ]
    return Picture(rows, "Neighbours stay together or go together", _below([], [f"chunk size {size}"]))


def _of_cam() -> Picture:
    known, size = inputs(), SETTINGS["merge_size"]
    attention, stay, draws = called(h2o.score), called(h2o.select), np.full((1, 1, TOKENS), 0.5)
    chance = cam.probabilities(attention, stay, merge_size=size)
    merged = cam.merge_values(known["values"], attention, stay, draws, merge_size=size)
    rows = [
        arrows("values", VALUES, "value"),
        bars("attention received", attention[0, 0]),
        boxes("h2o, and h2o+cam", stay[0, 0]),
        bars("probability of a merge", chance[0, 0]),
        arrows("values with h2o+cam", np.where(stay[0, 0][:, None], merged[0, 0], 0), "value"),
    ]
    below = _below(["a draw of 0.5 for each token"], [f"merge size {size}"])
    return Picture(rows, "The same tokens stay, but their values change", below)


def _layers(
    name: str, budgets: Sequence[int], labels: Sequence[str], scored: Sequence[np.ndarray]
) -> list[Row]:
    """Each layer's tokens with the same budget in all layers, and with a budget of its own."""
    rows = []
    for label, budget, each in zip(labels, budgets, scored, strict=True):
        rows.append(boxes(f"{label}, snapkv", top_k(each, BUDGET)))
        rows.append(boxes(f"{label}, snapkv+{name}", top_k(each, budget)))
    return rows


def _of_cake() -> Picture:
    """The queries of the layers have other lengths: short ones attend to all keys alike, long ones move."""
    window = SETTINGS["window_size"]
    queries = [{"queries": factor * QUERIES[None, None]} for factor in (0.5, 1, 2)]
    wanted = np.array([called(cake.preference, own)[0] for own in queries])
    budgets = cake.budgets(BUDGET, wanted, num_layers=LAYERS, length=TOKENS, window_size=window)
    labels = [f"layer {layer}, preference {each:.2g}" for layer, each in enumerate(wanted)]
    rows = _layers("cake", budgets, labels, [called(snapkv.score, own)[0, 0] for own in queries])
    below = _below(["queries that are twice as long in each next layer"], [f"window size {window}"])
    return Picture(rows, "Three layers share one budget by their preferences", below)


def _of_protect() -> Picture:
    found = keydiff.score(KEYS)
    rows = [
        arrows("keys", KEYS, "key", seen("keydiff")),
        bars("score", found),
        boxes("keydiff", top_k(found, BUDGET)),
        boxes("keydiff+protect", protect.choose(found, BUDGET, first=1, last=2)),
    ]
    return Picture(rows, "Both ends stay, whatever they score", _below([], ["first 1", "last 2"]))


def _of_dms() -> Picture:
    found = called(keydiff.score)[0, 0]
    there = np.ones((1, 1, TOKENS), dtype=bool)
    due = dms.due(there, TOKENS, window_size=DELAY)
    tau = dms.threshold(found[None, None], due, np.array([due.sum() // 2]))
    rows = [
        arrows("keys", KEYS, "key", seen("keydiff")),
        bars("score", found),
        boxes("keydiff", top_k(found, BUDGET)),
        boxes(
            "keydiff+dms",
            dms.judge(found[None, None], there, tau, TOKENS, window_size=DELAY)[0, 0],
            waits=range(TOKENS - DELAY, TOKENS),
        ),
    ]
    said = f"The last {DELAY} tokens wait, and of the others half go by a threshold"
    return Picture(rows, said, _below([], [f"delay {DELAY}"]))


def _of_quantisation() -> Picture:
    keys, values = KEYS[None, None], VALUES[None, None]
    found, _ = quantisation.kivi(keys, values, bits=2, group_size=4, residual=8)
    rows = [
        bars("keys, first channel", KEYS[:, 0]),
        bars("the same in two bits, with a window of eight", found[0, 0, :, 0]),
    ]
    said = "A quantised key is the nearest of four numbers of its group, and the last four keys are exact"
    return Picture(rows, said, _below([], ["bits 2", "group size 4", "residual 8"]))


def _of_rerotation() -> Picture:
    (stay,) = kept("streaming_llm")
    places = rerotation.positions_before(stay[None, None])
    turned = rerotation.rerotated(KEYS[None, None], np.arange(TOKENS)[None, None], places)
    there = np.flatnonzero(stay)
    rows = [
        arrows("keys", KEYS, "key"),
        boxes("streaming_llm", stay),
        _places("streaming_llm+rerotate: positions", dict(zip(there, places[0, 0, there], strict=True))),
        arrows("the kept keys, turned", turned[0, 0], "key", there=there),
    ]
    sink, new = there[0], places[0, 0, there[0]]
    return Picture(rows, f"Token {sink} moves to position {new}, and its key turns by {new - sink} positions")


def _places(label: str, positions: Mapping[int, int]) -> Row:
    """A row with the new positions of tokens, each in the cell of its token."""
    return Row(label, [_box(token, "stays", "on", position) for token, position in positions.items()], 22)


def _of_pyramid_kv() -> Picture:
    window = SETTINGS["window_size"]
    budgets = pyramid_kv.budgets(BUDGET, LAYERS, length=TOKENS, window_size=window)
    labels = [f"layer {layer}" for layer in range(LAYERS)]
    rows = _layers("pyramid_kv", budgets, labels, [called(snapkv.score)[0, 0]] * LAYERS)
    below = _below(["the same keys and queries in each layer"], [f"window size {window}"])
    return Picture([arrows("keys", KEYS, "key", seen("snapkv")), *rows], "Lower layers keep more", below)


ADDITIONS: dict[str, Callable[[], Picture]] = {
    "ada_kv": _of_ada_kv,
    "cake": _of_cake,
    "cam": _of_cam,
    "chunk_kv": _of_chunk_kv,
    "dms": _of_dms,
    "protect": _of_protect,
    "pyramid_kv": _of_pyramid_kv,
    "quantisation": _of_quantisation,
    "rerotation": _of_rerotation,
}
