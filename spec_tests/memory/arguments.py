"""Arguments of every function of the contract, drawn from the signatures that say their axes.

What has a meaning in a case, such as keys, is that of the case, with its kind; everything else is drawn at
generic numbers. Settings have one value each, with which a text of eight tokens is long enough.
"""

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from evictionary.reference import (
    attention,
    cache,
    expected_attention,
    keydiff,
    keydiff_theory,
    kv_cache,
    lagkv,
    momentkv,
    momentkv_bounded,
    momentkv_theory,
)
from evictionary.reference.contract import Argument, arguments
from evictionary.spec_tests.judge.cases import Case
from evictionary.spec_tests.judge.implementation import Implementation, oracle

SETTINGS: dict[str, Any] = {
    "aggregate": lambda weights: weights.sum(axis=-2),
    "attend": lambda states: 2 * states,
    "block_size": 3,
    "buffer_size": 4,
    "chunk_size": 4,
    "compression_ratio": 0.5,
    "epsilon": 0.02,
    "feed_forward": lambda states: 2 * states,
    "horizon": 8,
    "interval": 1,
    "keep_ratio": 0.5,
    "kernel_size": 3,
    "largest_norm": 2.0,
    "layer": 2,
    "layer_index": 2,
    "merge_size": 2,
    "num_layers": 3,
    "p": 0.9,
    "page_size": 4,
    "penalty": 1.0,
    "position": 1,
    "recent_ratio": 0.5,
    "recent_size": 2,
    "share": 0.25,
    "shift": 2.0,
    "sink_size": 1,
    "threshold": 0.0,
    "weight": 0.5,
    "window_size": 1,
}
OF_CASE: dict[str, Callable[[Case], Any]] = {
    "budget": lambda case: max(1, case.length // 2),
    "count": lambda case: 1,
    "head_dim": lambda case: case.head_dim,
    "lag_size": lambda case: max(3, case.length // 8),
    "length": lambda case: case.length,
    "num_kv_heads": lambda case: case.num_kv_heads,
    "num_query_heads": lambda case: case.num_kv_heads * case.group,
    "positions": lambda case: np.arange(case.length),
    "target": lambda case: max(1, case.length // 2),
}
"""What a function takes beside its arrays. It is given where it has no default, and where its default is
longer than the text, or no generic one (GIVEN).
"""
GIVEN = {
    "block_size", "buffer_size", "chunk_size", "horizon", "interval", "lag_size", "merge_size", "p",
    "page_size", "recent_size", "sink_size", "window_size",
}  # fmt: skip


def mask(case: Case, shape: tuple[int, ...], share: float) -> np.ndarray:
    """A share of the tokens, another number of them in each head."""
    return np.random.default_rng(case.seed).random(shape) < share


def moments_of(case: Case) -> momentkv.Moments:
    """Those of some tokens of the next partition."""
    empty = momentkv.no_moments(case.keys, case.values)
    return momentkv.update(empty, case.next_keys, case.next_values, mask(case, case.keys.shape[:3], 0.5))


def in_pages(case: Case) -> cache.PagedCache:
    """Each sequence in a page of its own, of which the last
    token is missing: `kept` is a mask over its places.
    """
    keys, values = (states.swapaxes(1, 2) for states in (case.keys, case.values))
    positions = np.broadcast_to(np.arange(case.length)[:, None], keys.shape[:3])
    lengths = np.full((case.batch, case.num_kv_heads), max(1, case.length - 1))
    return cache.PagedCache(
        keys, values, positions, np.arange(case.batch)[::-1, None], lengths, lengths[:, 0]
    )


def compressed(case: Case) -> cache.CompressedCache:
    """Seven of ten tokens, more in one head than in another."""
    return cache.compress(case.keys, case.values, mask(case, case.keys.shape[:3], 0.7))


def bounds_of(case: Case) -> momentkv_bounded.Bounds:
    """Those of the evicted tokens of `moments_of`, somewhat wider: their mean is not on an edge."""
    exact = momentkv_bounded.update(
        momentkv_bounded.no_bounds(case.keys, case.values),
        case.next_keys,
        case.next_values,
        mask(case, case.keys.shape[:3], 0.5),
    )
    return exact._replace(
        **{name: getattr(exact, name) + (0.5 if name.endswith("high") else -0.5) for name in exact._fields}
    )


STATES_OF: dict[str, Callable[[Case], Any]] = {
    "Bounds": bounds_of,
    "Cache": lambda case: keydiff.append(None, case.next_keys, case.next_values),
    "CompressedCache": compressed,
    "Decoding": lambda case: expected_attention.start_decoding(case.keys, case.values, case.queries),
    "Expansion": lambda case: momentkv_theory.expansion(
        case.queries[:, :: case.group, 0], case.keys, case.values
    ),
    "KVCache": lambda case: kv_cache.KVCache(case.next_keys, case.next_values, case.length + 3),
    "Moments": moments_of,
    "Operations": lambda case: keydiff_theory.operation_count(case.length, case.head_dim),
    "PagedCache": in_pages,
    "Stream": lambda case: lagkv.step(
        None,
        case.next_keys,
        case.next_values,
        keep_ratio=0.5,
        sink_size=1,
        lag_size=OF_CASE["lag_size"](case),
    ),
}
"""Each state as the reference makes it of a case."""


# What a case says itself, where it has the axes of the argument.
NAMED: dict[str, Callable[[Case], np.ndarray]] = {
    "keys": lambda case: case.keys,
    "values": lambda case: case.values,
    "next_keys": lambda case: case.next_keys,
    "next_values": lambda case: case.next_values,
    "states": lambda case: case.keys,
    "queries": lambda case: case.queries,
    "query": lambda case: case.queries[:, :, 0],
    "scores": lambda case: case.keys[..., 0],
    "attention": lambda case: attention.softmax(case.keys[..., 0]),
    "kept": lambda case: mask(case, case.keys.shape[:3], 0.5),
    "evicted": lambda case: mask(case, case.keys.shape[:3], 0.5),
}


@functools.cache
def batched(path: str) -> frozenset[str]:
    """The arguments of a function whose first axis is the batch, as they are drawn here."""
    return frozenset(
        each.name
        for each in arguments(path)
        if each.own[:1] == ("B",) or (each.lead and not _is_shared(each))
    )


@functools.cache
def signature_of(path: str) -> inspect.Signature:
    """That of the reference, by which the contract is called."""
    return inspect.signature(oracle(path))


def arguments_of(
    impl: Implementation, path: str, case: Case, settings: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """Arguments of a function by name, its settings among them, in the sizes of a case and rounded to the
    dtype; None where a method takes no such case, such as one token.

    The settings are for short texts. With `settings`, those are taken, and the defaults of all others.
    """
    try:
        with np.errstate(all="ignore"):  # a state that is made of large logits overflows
            ragged = drawn(impl, path, case, settings, ragged=True)
            if fits(path, ragged):
                return ragged
            alike = drawn(impl, path, case, settings, ragged=False)
    except (KeyError, ValueError):  # nothing says an argument, or there is no state of such a case
        return None
    return alike if fits(path, alike) else None


def arguments_inside(
    impl: Implementation, path: str, case: Case, settings: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """The same in a case of the domain; None too where the arguments of no such case lie inside."""
    given = arguments_of(impl, path, impl.domain.fitted({"case": case})["case"], settings)
    return None if given is None or impl.domain.excludes(given, path) else given


def fits(path: str, given: dict[str, Any]) -> bool:
    """Whether the mathematics takes these arguments."""
    with np.errstate(all="ignore"):
        try:
            oracle(path)(**given)
        except (ValueError, ArithmeticError):
            return False
    return True


def drawn(
    impl: Implementation, path: str, case: Case, settings: Mapping[str, Any] | None = None, *, ragged: bool
) -> dict[str, Any]:
    """The same, whether the mathematics takes them or not; ragged, with masks that keep more tokens of one
    head than of another.
    """
    generator = np.random.default_rng(case.seed)
    line = {each.name: each for each in arguments(path)}
    given: dict[str, Any] = {}
    for name, parameter in signature_of(path).parameters.items():
        required = parameter.default is parameter.empty
        if name in line and (required or not line[name].optional):
            given[name] = _made(line[name], case, generator, ragged)
        elif settings and name in settings:
            given[name] = settings[name]
        elif name == "lag_size" and impl.domain.lag_size:
            given[name] = impl.domain.lag_size[0]
        elif required and name in NAMED:  # a new method, which has no line yet
            given[name] = NAMED[name](case)
        elif required or (name in GIVEN and settings is None):
            given[name] = OF_CASE[name](case) if name in OF_CASE else SETTINGS[name]
    if {"low", "high"} <= line.keys():
        given["high"] = given["low"] + np.abs(given["high"])
    return {name: impl.rounded(value) for name, value in given.items()}


def _made(argument: Argument, case: Case, generator: np.random.Generator, ragged: bool) -> Any:
    if argument.state:
        state = STATES_OF[argument.kind](case)
        alone = argument.kind == "Moments" and not argument.axes
        return type(state)(*(each[0, 0] for each in state)) if alone else state
    lead = (case.batch, case.num_kv_heads) if argument.lead and not _is_shared(argument) else ()
    shape = (*lead, *(_size(axis, case) for axis in argument.own))
    if argument.name in NAMED and (ragged or argument.kind != "bool"):
        own = NAMED[argument.name](case)
        if own.shape == shape or (argument.name.startswith("next_") and own.ndim == len(shape)):
            return own
    numbers = generator.normal(size=shape)
    if argument.name == "attention":
        return attention.softmax(numbers)
    if argument.name.endswith("covariance") and shape[-1] == shape[-2]:
        return numbers @ np.swapaxes(numbers, -1, -2) / shape[-1]
    if argument.name == "query_slack":
        return np.abs(numbers)
    match argument.kind:
        case "bool":  # as many in each row, half of them or the last one
            return numbers.argsort(axis=-1).argsort(axis=-1) >= shape[-1] // 2
        case "whole":
            return generator.integers(1, 3, size=shape)
        case "weight" | "share":
            return generator.uniform(0.1, 0.9, size=shape)
        case "cosine":
            return np.clip(numbers, -1, 1)
    return numbers


def _is_shared(argument: Argument) -> bool:
    """Whether an argument is a weight of the layer, the same for all texts."""
    return argument.lead == "*" and argument.name.endswith("_weight")


MOST_LAYERS = 64


def _size(axis: str, case: Case) -> int:
    sizes = {
        "B": case.batch,
        "H_kv": case.num_kv_heads,
        "H_q": case.num_kv_heads * case.group,
        "T": case.length,
        "n": case.length,
        "R": case.length + 3,  # more rows than columns, so that one solution is the best
        "L": min(case.length, MOST_LAYERS),
        "M": min(case.length, case.num_queries),
        "S": 3 * case.num_queries,
        "D": case.head_dim,
        "d_h": case.head_dim,
        "D_v": case.value_dim,
        "kept": case.length - case.length // 2,
        "n*S": case.length,
        "1": 1,
    }
    name = axis.split("<")[0].split(">")[0].split("%")[0]
    if name == "D/2":
        return case.head_dim // 2
    if name not in sizes and "*" in name:
        return math.prod(_size(each, case) for each in name.split("*"))
    return sizes.get(name, 5)
