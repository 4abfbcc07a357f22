"""What differs between versions of transformers.

transformers 5.24 calls the argument `cache` that was `past_key_values` before; 5.40 and 6.0 take the old name
away. Nothing else in this project knows either name.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import GenerationMixin
from transformers.utils import ModelOutput

NAMES = ("cache", "past_key_values", "layer_past")
"""What a forward calls its cache: today's name, the one before 5.24, and that of GPT-NeoX's attention."""

_asked = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
NAME: str = next(name for name in NAMES if name in _asked)
"""What this version of transformers calls the argument."""


def argument(cache: Any) -> dict[str, Any]:
    """The cache as an argument of a forward or of `generate`, by the name that this version has for it."""
    return {NAME: cache}


def cache_of(named: Mapping[str, Any]) -> Any:
    """The cache among the named arguments of a forward, by any of its names; None without one."""
    return next((named[name] for name in NAMES if named.get(name) is not None), None)


def without_cache(named: Mapping[str, Any]) -> dict[str, Any]:
    """The named arguments of a forward or of `generate`, but for the cache."""
    return {name: value for name, value in named.items() if name not in NAMES}


def cache_in(output: ModelOutput) -> Any:
    """The cache in the output of a forward or of `generate`."""
    return getattr(output, NAME)
