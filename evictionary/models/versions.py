"""What differs between versions of transformers, and which versions the tests ran with.

transformers 5.24 calls the argument `cache` that was `past_key_values` before; 5.40 and 6.0 take the old name
away. Nothing else in this project knows either name.
"""

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement
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


def untried(requirements: Iterable[str], installed: Callable[[str], str]) -> list[str]:
    """A sentence for each installed package whose version lies outside of its range.

    Args: requirements, as in a package's metadata; installed, the version of a package, or
    PackageNotFoundError.
    """
    found = []
    for requirement in map(Requirement, requirements):
        try:
            version = installed(requirement.name)
        except metadata.PackageNotFoundError:
            continue
        if requirement.specifier and not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{requirement.name} {version} is installed, wanted {requirement.specifier}")
    return sorted(set(found))


def warn_of_untried() -> None:
    """Warn, in one sentence, of packages outside of the ranges that the tests ran with, and go on."""
    try:
        found = untried(metadata.requires("evictionary") or (), metadata.version)
    except metadata.PackageNotFoundError:  # a tree that was never installed says no ranges
        return
    if found:
        warnings.warn(f"evictionary was not tested with this: {'; '.join(found)}", stacklevel=2)


warn_of_untried()
