"""An executable dictionary of KV-cache eviction: the mathematics,
fast kernels, laws, and a cache for transformers models.

>>> from evictionary import EvictingCache
>>> cache = EvictingCache(model, method="keydiff", compression_ratio=0.5)
>>> model.generate(**inputs, **cache.argument)

`evictionary.reference` is the mathematics, `evictionary.optimized`
the fast code, `evictionary.spec_tests` the laws.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evictionary.cache.evicting_cache import EvictingCache

__version__ = "0.1.0"
__all__ = ["EvictingCache", "__version__"]
FOLDERS = ("optimized", "reference", "spec_tests")

# Where Git makes no links, as on Windows, the linked folders are found where they are, beside this one.
if os.path.isfile(os.path.join(__path__[0], "reference")):
    __path__.append(os.path.dirname(__path__[0]))


def __getattr__(name: str) -> Any:
    # Imported on first use: torch takes seconds to import, and users who only judge NumPy functions need no
    # torch.
    if name == "EvictingCache":
        from evictionary import ranges

        ranges.warn_of_untried()  # before anything that a newer release may break
        from evictionary.cache.evicting_cache import EvictingCache

        return EvictingCache
    if name in FOLDERS:
        return importlib.import_module(f"evictionary.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *FOLDERS])
