"""The arguments of a cache, checked before a model is loaded or a prompt is read."""

from collections.abc import Mapping
from typing import Any

import torch

from evictionary.errors import UsageError, require
from evictionary.methods.catalogue import CAPTURED_FOR, INPUTS
from evictionary.methods.method import Method, Request, tokens_to_keep
from evictionary.methods.resolve import resolve
from evictionary.optimized.states import zero_moments

TRIED = 1024  # tokens on which options are tried out
# of the axes that have another size than 2 there
SIZES = {"B": 1, "H_q": 1, "H_kv": 1, "M": TRIED, "T": TRIED, "D/2": 1, "8": 8}


def checked(
    method: str | Method | None,
    compression_ratio: float,
    options: Mapping[str, Any] | None,
    budget: int | None,
    every: int | None,
) -> tuple[Method | None, dict[str, Any], int]:
    """The method, its options in the types of their defaults, and the tokens between two compressions.

    Raises UsageError for an argument that cannot be used.
    """
    found = resolve(method) if isinstance(method, str) else method
    tokens_to_keep(1, compression_ratio, budget)
    require(not options or found is not None, "options: got options without a method, wanted none")
    typed = found.typed_options(options) if found else {}
    # a user's function may do anything when it is called
    if found and typed and found.module.__name__.startswith("evictionary."):
        _try_out(found, typed)
    return found, typed, _tokens_between(found, every, budget)


def _try_out(method: Method, options: Mapping[str, Any]) -> None:
    """Call a method of the dictionary with some numbers,
    so that it refuses an option before a prompt is read.
    """

    def supply(name: str, *_: Any) -> dict[str, Any]:
        shape = INPUTS[name].partition("[")[2].partition("]")[0]  # its meaning begins with it
        return {name: torch.ones([SIZES.get(axis, 2) for axis in shape.split(", ")])}

    states = {name: supply(name)[name] for name in ("keys", "values", *CAPTURED_FOR.values())}
    moments = zero_moments(states["keys"], states["values"])
    try:
        method.kept(
            {**states, "moments": moments},
            Request(budget=TRIED // 2, options=options, preferences=torch.ones(1), supply=supply),
        )
    except UsageError as error:
        if any(f"{name}: got" in str(error) for name in options):
            raise


def _tokens_between(method: Method | None, every: int | None, budget: int | None) -> int:
    """The tokens between two compressions, 0 for the prompt alone. Raises UsageError if the method cannot
    compress like that.
    """
    require(
        every is None or (not isinstance(every, bool) and isinstance(every, int) and every >= 0),
        f"every: got {every!r}, wanted a whole number of tokens, or 0 to compress the prompt alone",
    )
    name, traits = (method.name, method.traits) if method else ("", frozenset())
    every = int("every_token" in traits) if every is None else every
    require(
        not every or "recursive" not in traits or budget is None,
        f"budget: got {budget} with every={every}, wanted a compression_ratio: {name} keeps a fraction of "
        "each new partition, so the number of kept tokens grows with the text",
    )
    require(
        not every or budget is None or not (method and method.delays),
        f"budget: got {budget} with every={every}, wanted a compression_ratio or the option cutoff: "
        f"{name} keeps what its threshold says, so the number of kept tokens grows with the text",
    )
    require(
        not every or "per_query" not in traits,
        f"every: got {every}, wanted 0: {name} evicts nothing, and chooses for each token",
    )
    require(
        not every or "prompt_only" not in traits,
        f"every: got {every}, wanted 0: {name} reads the queries of all tokens, and these are gone when the "
        "cache compresses again",
    )
    return every
