"""The code beside the paper of KNorm: `l2_compress` sorts by the norms of the keys."""

from math import ceil

from conformance.borrowed import ranked_by, take

DOMAIN = {"dtype": ("float32",), "min_length": 2}  # of one token there is nothing to evict

l2_compress = take("l2compress", "cache.py", "l2_compress", ceil=ceil).l2_compress


def score(keys):
    return -ranked_by(l2_compress, [(keys, keys)], 0.5, 0)
