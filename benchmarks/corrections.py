"""Measures the corrections of `reference/momentkv_bounded.py`
on drawn decoding steps: `python -m benchmarks.corrections`.

Prints the table of docs/methods/momentkv_bounded.md, in about fifteen seconds on one core. With `--model`: a
row for each kind of text that the claims are measured on, read by the embedded model, in about forty seconds.
"""

import sys
from collections.abc import Callable, Iterator

import numpy as np
import torch

from evictionary.claims import texts
from evictionary.claims.recording import Lab, Scale, as_array, record
from evictionary.models.load import load
from evictionary.reference import momentkv, momentkv_bounded
from evictionary.store import table

STEPS, AT_ONCE = 25_000, 500
LENGTH, EVICTED, CHANNELS = 48, 24, 16
NAMES = ("none", "MomentKV", "MB-6", "MB-7")
# More than the rounding of float64, less than what anybody would call worse.
ROUNDING = 1e-12


def unrelated(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Query, keys and values independent of each other."""
    shape = AT_ONCE, 1, LENGTH, CHANNELS
    return (
        generator.normal(size=(AT_ONCE, 1, CHANNELS)),
        generator.normal(size=shape),
        generator.normal(size=shape),
    )


def linear(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values that are a linear function of the keys, with noise: what MomentKV assumes."""
    query, keys, values = unrelated(generator)
    return (
        query,
        keys,
        keys @ generator.normal(size=(AT_ONCE, 1, CHANNELS, CHANNELS)) / CHANNELS**0.5 + 0.3 * values,
    )


def peaked(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As linear, with queries three times as long: attention on a few tokens, beyond the first order."""
    query, keys, values = linear(generator)
    return 3 * query, keys, values


def moved(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A text that moves on: the evicted first half has other values, and keys that vary little."""
    query, keys, values = unrelated(generator)
    first = (np.arange(LENGTH) < EVICTED)[:, None]
    return query, np.where(first, 0.3, 1) * keys, np.where(first, values + 3, values)


KINDS: tuple[Callable[[np.random.Generator], tuple[np.ndarray, np.ndarray, np.ndarray]], ...] = (
    unrelated,
    linear,
    peaked,
    moved,
)


def errors(query: np.ndarray, keys: np.ndarray, values: np.ndarray, evicted: np.ndarray) -> np.ndarray:
    """The distance from full attention of each of NAMES,
    [4, B * H_q]; every token that is not evicted is kept.
    """
    empty, kept = momentkv.no_moments(keys, values), ~evicted
    moments = momentkv.update(empty, keys, values, evicted)
    bounds = momentkv_bounded.update(momentkv_bounded.no_bounds(keys, values), keys, values, evicted)
    full = momentkv.attend(query, keys, values, np.ones_like(kept), empty)
    outputs = (
        momentkv.attend(query, keys, values, kept, empty),
        momentkv.attend(query, keys, values, kept, moments),
        momentkv_bounded.attend(query, keys, values, kept, moments, bounds),
        momentkv_bounded.attend_certified(query, keys, values, kept, moments, bounds),
    )
    return np.stack([np.linalg.norm(output - full, axis=-1).ravel() for output in outputs])


COLUMNS = (
    [f"error: {name}" for name in NAMES]
    + [f"worse than none: {name}" for name in NAMES[1:]]
    + ["MB-6 worse than MomentKV"]
)


def rows(steps: int = STEPS) -> Iterator[list[str]]:
    """A row for each kind of input."""
    evicted = np.broadcast_to(np.arange(LENGTH) < EVICTED, (AT_ONCE, 1, LENGTH))
    for kind in KINDS:
        generator = np.random.default_rng(0)
        yield _row(
            kind.__name__,
            np.concatenate([errors(*kind(generator), evicted) for _ in range(steps // AT_ONCE)], axis=1),
        )


def rows_of_model() -> Iterator[list[str]]:
    """A row for each kind of text: every layer and query head
    at four later tokens; MomentKV keeps 128 of 384 tokens.
    """
    lab = Lab(*load(), Scale(prompt_tokens=384, later_tokens=64))
    for kind in texts.KINDS:
        with torch.inference_mode():
            recording = record(lab, kind)
        found = []
        for layer in recording.layers:
            queries, keys, values = (as_array(states) for states in (layer.queries, layer.keys, layer.values))
            prompt = slice(0, recording.split)
            window = queries[:, :, recording.split - 32 : recording.split]
            kept = momentkv.select_prompt(window, keys[:, :, prompt], values[:, :, prompt], 128)
            evicted = np.zeros(keys.shape[:3], dtype=bool)
            evicted[..., prompt] = ~kept
            for place in np.linspace(recording.split, keys.shape[2] - 1, 4).astype(int):
                seen = slice(0, place + 1)
                found.append(
                    errors(queries[:, :, place], keys[:, :, seen], values[:, :, seen], evicted[..., seen])
                )
        yield _row(kind, np.concatenate(found, axis=1))


def _row(name: str, found: np.ndarray) -> list[str]:
    worse = found > found[0] + ROUNDING
    shares = (*worse[1:].mean(axis=1), (found[2] > found[1] + ROUNDING).mean())
    return [
        name,
        *(f"{error:.4f}" for error in found.mean(axis=1)),
        *(f"{100 * share:.2f} %" for share in shares),
    ]


if __name__ == "__main__":
    of_model = "--model" in sys.argv
    head = ["kind of text"] if of_model else [f"{STEPS:,} steps each"]
    print(table(head + COLUMNS, rows_of_model() if of_model else rows(), "lr"))
