"""kvpress's `KeyDiffPress`, whose score reads the keys alone."""

from kvpress import KeyDiffPress

ARRAY_LIBRARY = "torch"
DOMAIN = {"dtype": ("float32",)}


def score(keys):
    return KeyDiffPress().score(None, None, keys, None, None, {})
