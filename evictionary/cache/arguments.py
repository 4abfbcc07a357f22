"""The arguments of a cache, checked before a model is loaded or a prompt is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evictionary.errors import UsageError
from evictionary.methods.method import Method, tokens_to_keep
from evictionary.methods.resolve import resolve


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
    if options and found is None:
        raise UsageError("options: got options without a method, wanted none")
    return found, found.typed_options(options) if found else {}, _tokens_between(found, every, budget)


def _tokens_between(method: Method | None, every: int | None, budget: int | None) -> int:
    """The tokens between two compressions, 0 for the prompt alone. Raises UsageError if the method cannot compress like that."""
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 0):
        raise UsageError(f"every: got {every!r}, wanted a whole number of tokens, or 0 to compress the prompt alone")
    traits = method.traits if method else frozenset()
    every = int("every_token" in traits) if every is None else every
    if every and method and "recursive" in traits and budget is not None:
        raise UsageError(
            f"budget: got {budget} with every={every}, wanted a compression_ratio: {method.name} keeps a fraction of "
            "each new partition, so the number of kept tokens grows with the text"
        )
    if every and method and "prompt_only" in traits:
        raise UsageError(
            f"every: got {every}, wanted 0: {method.name} reads the queries of all tokens, and these are gone "
            "when the cache compresses again"
        )
    return every
