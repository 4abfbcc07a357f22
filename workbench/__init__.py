"""Runs any implementation inside a real language model: methods, an evicting cache, the demo, the command `evictionary`.

from workbench.cache import EvictingCache

cache = EvictingCache(model, method="keydiff", compression_ratio=0.5)
model.generate(**inputs, past_key_values=cache)
"""

__version__ = "0.1.0"
