"""The versions that the tests ran with, as the ranges of
pyproject.toml say them, and one sentence for what lies outside.
"""

import functools
import warnings
from collections.abc import Callable, Iterable
from importlib import metadata

from packaging.requirements import Requirement

EXTRAS = ("", "torch", "model", "cluster", "harness")
"""What a user runs: the base install and these extras. The others are for who works on this project."""


def is_run(requirement: Requirement) -> bool:
    """Whether a user may run the package: it comes with the base install, or with one of EXTRAS."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in EXTRAS)


def untried(requirements: Iterable[str], installed: Callable[[str], str]) -> list[str]:
    """A sentence for each installed package whose version lies outside of its range.

    Args: requirements, as in a package's metadata; installed,
    the version of a package, or PackageNotFoundError.
    """
    found = []
    for requirement in map(Requirement, requirements):
        if not is_run(requirement):
            continue
        try:
            version = installed(requirement.name)
        except metadata.PackageNotFoundError:
            continue
        if requirement.specifier and not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{requirement.name} {version} is installed, wanted {requirement.specifier}")
    return sorted(set(found))


@functools.cache
def warn_of_untried() -> None:
    """Warn once, in one sentence, of packages outside of the ranges that the tests ran with, and go on."""
    try:
        found = untried(metadata.requires("evictionary") or (), metadata.version)
    except metadata.PackageNotFoundError:  # a tree that was never installed says no ranges
        return
    if found:
        warnings.warn(f"evictionary was not tested with this: {'; '.join(found)}", stacklevel=2)
