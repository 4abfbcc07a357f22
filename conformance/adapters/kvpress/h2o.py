"""kvpress's `ObservedAttentionPress`, given the attention of the whole prompt."""

from kvpress import ObservedAttentionPress

from conformance.borrowed import causal_attention


def score(queries, keys):
    return ObservedAttentionPress().score(None, None, keys, None, causal_attention(queries, keys), {})
