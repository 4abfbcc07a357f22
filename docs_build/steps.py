"""Pictures that step through time, where time is the point of a method: blocks of KeyDiff, decoding with H2O
and TOVA, partitions of LagKV, votes of GVote.

A step is a picture of `idea`, of the same twelve tokens and by the same functions of `reference/`. A page has
the steps beside the whole picture; the site's script shows them, and without scripts the whole picture stays.
"""

import json
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from docs_build import idea
from docs_build.idea import BUDGET, KEYS, QUERIES, SETTINGS, TOKENS, VALUES, Picture, Seen, plural
from evictionary.reference import gvote, keydiff
from evictionary.reference.attention import attention_logits, softmax
from evictionary.reference.selection import top_k

BLOCK = 3  # the tokens of a block of the prompt


class Moment(NamedTuple):
    """A token of a text that is read: the tokens that its query attends to, their weights, the number of each
    token by which one goes, and who stays.
    """

    there: list[int]
    weights: np.ndarray
    numbers: np.ndarray
    stay: list[int]


def read(queries: np.ndarray, keys: np.ndarray, budget: int, recent: int, is_sum: bool) -> list[Moment]:
    """Read a text of one head token by token, as H2O and TOVA decode.

    Args: queries and keys [T, D]; budget, the tokens that stay; recent, how many of the last ones always
    stay; is_sum, whether a token's number is all the attention it got (H2O) or the last query's (TOVA).
    """
    numbers, moments = np.zeros(len(keys)), list[Moment]()
    stay: list[int] = []
    for token, query in enumerate(queries):
        there = [*stay, token]
        weights = softmax(attention_logits(query[None], keys[there]))[0]
        numbers[there] = weights + (numbers[there] if is_sum else 0)
        chosen = top_k(numbers[there], budget, np.array(there) > token - recent)
        stay = [each for each, stays in zip(there, chosen, strict=True) if stays]
        moments.append(Moment(there, weights, numbers.copy(), stay))
    return moments


def _only(tokens: list[int], numbers: np.ndarray) -> np.ndarray:
    """Numbers for all tokens: NaN for the others than these."""
    found = np.full(TOKENS, np.nan)
    found[tokens] = numbers
    return found


def _mask(tokens: list[int]) -> np.ndarray:
    return np.isin(np.arange(TOKENS), tokens)


def _picture(words: str, *rows: idea.Row) -> Picture:
    """A step, which says its words and nothing of its rows."""
    return Picture([row._replace(told="") for row in rows], words)


def _goes(tokens: list[int]) -> str:
    return f"{plural('token', tokens, 'tokens').capitalize()} {'go' if len(tokens) > 1 else 'goes'}"


def _of_keydiff() -> Iterator[Picture]:
    """The prompt in blocks of three; after each block the cache is cut back to its budget."""
    cache: list[int] = []
    for start in range(0, TOKENS, BLOCK):
        block = range(start, start + BLOCK)
        there = [*cache, *block]
        numbers = keydiff.score(KEYS[there])
        cache = [token for token, stays in zip(there, top_k(numbers, BUDGET), strict=True) if stays]
        words = f"The block of {plural('token', block, 'tokens')} comes"
        gone = sorted({*there} - {*cache})
        seen = Seen("", idea.beside_all(keydiff.anchor(KEYS[there])))
        yield _picture(
            f"{words}. {_goes(gone) if gone else 'No token goes, because the cache has room'}",
            idea.arrows(
                "keys, and in orange the mean direction of the cache and the block", KEYS, "key", seen, there
            ),
            idea.bars("score", _only(there, numbers)),
            idea.boxes("who stays", _mask(cache), waits=range(start + BLOCK, TOKENS)),
        )


def _decoded(label: str, recent: int, is_sum: bool) -> Iterator[Picture]:
    """A prompt of as many tokens as the budget, and then one token after the other."""
    for token, moment in enumerate(read(QUERIES, KEYS, BUDGET, recent, is_sum)):
        if token < BUDGET - 1:
            continue
        gone = sorted({*moment.there} - {*moment.stay})
        begins = f"Token {token} comes" if token >= BUDGET else f"The first {BUDGET} tokens are there"
        seen = Seen("", idea.beside_all(QUERIES[token]))
        yield _picture(
            f"{begins}. {_goes(gone) if gone else 'No token goes, because the cache has room'}",
            idea.arrows(f"keys, and in orange the query of token {token}", KEYS, "key", seen, moment.there),
            idea.bars(label, _only(moment.there, moment.numbers[moment.there])),
            idea.boxes("who stays", _mask(moment.stay), waits=range(token + 1, TOKENS)),
        )


def _of_lagkv() -> Iterator[Picture]:
    """Each partition is compared with the next one, which is the last to come."""
    lag, stay, numbers, seen = (
        SETTINGS["lag_size"],
        idea.kept("lagkv")[0],
        idea.scores("lagkv"),
        idea.seen("lagkv"),
    )
    assert numbers is not None and seen is not None and seen.boxes is not None
    for start in range(0, TOKENS, lag):
        now, following = range(start, start + lag), range(start + lag, min(start + 2 * lag, TOKENS))
        boxes = np.where(np.isin(np.arange(TOKENS), now)[:, None, None], seen.boxes, np.nan)
        gone = [token for token in now if not stay[token]]
        words = (
            f"The range of {plural('token', following, 'tokens')} judges {plural('token', now, 'tokens')}. "
            + _goes(gone)
            if following
            else f"{plural('token', now, 'tokens').capitalize()} have no next partition, and stay"
        )
        done = range(start + lag)
        yield _picture(
            words,
            idea.arrows(
                "keys, and in orange the range of the next three keys", KEYS, "key", Seen("", boxes=boxes)
            ),
            idea.arrows("values", VALUES, "value"),
            idea.bars(idea.NUMBERS["lagkv"], _only(list(done), numbers[0][: len(done)])),
            idea.boxes("who stays", stay, waits=range(len(done), TOKENS)),
        )


def _of_gvote() -> Iterator[Picture]:
    """The last query says how many tokens a vote has; then one sample after the other votes."""
    known, votes = idea.inputs(), np.zeros(TOKENS)
    query, samples = known["query"][0], known["sampled_queries"][0, 0]
    weights = gvote.attention_weights(query[0], KEYS)
    nucleus = gvote.nucleus(weights, SETTINGS["p"])
    size = int(gvote.single_step_budget(nucleus))
    chosen = np.flatnonzero(nucleus).tolist()
    everyone = range(TOKENS)

    def keys(words: str, arrow: np.ndarray) -> idea.Row:
        return idea.arrows(f"keys, and in orange {words}", KEYS, "key", Seen("", idea.beside_all(arrow)))

    yield _picture(
        f"{plural('Token', chosen, 'Tokens')} get half of the last query's attention, so a vote has {size} "
        "tokens",
        keys("the last query", query),
        idea.bars("attention of the last query", weights),
        idea.boxes("the nucleus", nucleus, waits=[token for token in everyone if token not in chosen]),
    )
    for number, sample in enumerate(samples, 1):
        ballot = gvote.top_each(gvote.sampled_logits(sample[None], KEYS), np.array([size]))[0]
        votes += ballot
        voted = np.flatnonzero(ballot).tolist()
        is_last = number == len(samples)
        gone = np.flatnonzero(votes == 0).tolist()
        yield _picture(
            f"Sample {number} votes for {plural('token', voted, 'tokens')}"
            + (f". {_goes(gone)}, without a vote" if is_last else ""),
            keys(f"sample {number} of the future queries", sample),
            idea.bars("votes so far", votes.copy()),
            idea.boxes("who stays", votes > 0, waits=() if is_last else gone),
        )


STEPS: dict[str, Callable[[], Iterator[Picture]]] = {
    "gvote": _of_gvote,
    "h2o": lambda: _decoded("sum of the attention so far", (BUDGET + 1) // 2, is_sum=True),
    "keydiff": _of_keydiff,
    "lagkv": _of_lagkv,
    "tova": lambda: _decoded("attention of the last query", 0, is_sum=False),
}


def element(stem: str) -> str:
    """The steps of a method's picture for the site's script, each line of their drawings once; nothing for a
    method without steps.
    """
    if stem not in STEPS:
        return ""
    lines: dict[str, int] = {}
    frames = []
    for picture in STEPS[stem]():
        drawn = "\n".join(picture.drawn()).splitlines()
        numbers = [lines.setdefault(line, len(lines)) for line in drawn]
        frames.append({"lines": numbers, "box": picture.box, "told": picture.alt})
    data = json.dumps({"lines": [*lines], "frames": frames}, ensure_ascii=False, separators=(",", ":"))
    return f'<script type="application/json">{data}</script>'
