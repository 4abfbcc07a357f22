"""kvpress's `TOVAPress`, given the attention that a model would hand to it."""

from kvpress import TOVAPress

from conformance.borrowed import causal_attention

DOMAIN = {"dtype": ("float32",), "min_length": 2}  # of one token there is nothing to evict


def score(queries, keys):
    return TOVAPress().score(None, None, keys, None, causal_attention(queries, keys), {})
