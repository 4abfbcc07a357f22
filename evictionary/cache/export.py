"""Writes a folder that gives
`model.generate(custom_generate=FOLDER, trust_remote_code=True)` a cache with eviction.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evictionary.cache.arguments import checked
from evictionary.errors import require, usage
from evictionary.policies import DEFAULT

FIRST_LINE = (
    '"""Generation with KV-cache eviction, written by `evictionary export`; it needs the package evictionary.'
)
PROGRAM = '''

    model.generate(**inputs, custom_generate="the folder above this one", trust_remote_code=True)
"""

from evictionary import EvictingCache
from evictionary.models import versions

SETTINGS = {settings!r}


def generate(*inputs, model, **arguments):
    """What model.generate does with these inputs and arguments, with a cache that compresses the prompt."""
    if versions.cache_of(arguments) is not None:
        raise ValueError(f"{versions.NAME}: got a cache, wanted none: this generation makes its own")
    with EvictingCache(model, **SETTINGS) as cache:
        # not model.generate: from_pretrained may have put this function there
        return type(model).generate(model, *inputs, **cache.argument, **versions.without_cache(arguments))
'''


def export(
    folder: str | Path,
    method: str = DEFAULT,
    compression_ratio: float = 0.5,
    options: Mapping[str, Any] | None = None,
    budget: int | None = None,
    *,
    every: int | None = None,
    seed: int = 0,
) -> Path:
    """Write `folder / custom_generate / generate.py` for a method of the dictionary, and return its path.

    The other arguments are those of EvictingCache. Raises UsageError for one that cannot be used, for a
    method in a file, which would not go with the folder, and for a folder that holds another generate.py.
    """
    require(
        not re.search(r"\.py\b", method),
        f"method: got {method!r}, wanted a name of the dictionary: a file would not go with the folder",
    )
    typed = checked(method, compression_ratio, options, budget, every)[1]
    settings = {
        "method": method,
        "compression_ratio": compression_ratio,
        "budget": budget,
        "options": typed,
        "every": every,
        "seed": seed,
    }
    path = Path(folder) / "custom_generate" / "generate.py"
    require(
        not path.exists() or path.read_text(encoding="utf-8", errors="replace").startswith(FIRST_LINE),
        f"folder: got {folder}, which holds another custom_generate/generate.py, wanted a folder without one",
    )
    with usage(f"folder: got {folder}, wanted a folder that can be written", OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(FIRST_LINE + PROGRAM.replace("{settings!r}", repr(settings)), encoding="utf-8")
    return path
