"""kvpress's `KeyDiffPress`, whose score reads the keys alone."""

from kvpress import KeyDiffPress

ARRAY_LIBRARY = "torch"


def score(keys):
    return KeyDiffPress().score(None, None, keys, None, None, {})
