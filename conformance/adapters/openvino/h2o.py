"""OpenVINO's `KVCacheCompressor` in its H2O mode, token
by token: what it accumulates over all heads of a layer.
"""

from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from logging import getLogger

from conformance.borrowed import causal_attention, take

DOMAIN = {"dtype": ("float32",), "batch": (1,)}

_found = take(
    "openvino",
    "modules/genai_optimizations/genai_opt/token_eviction.py",
    *(
        "KVCacheCompressionMode",
        "KVCacheRefinedSelection",
        "KVCacheCompressionParameters",
        "KVCacheCompressor",
    ),
    contextmanager=contextmanager,
    dataclass=dataclass,
    Enum=Enum,
    logger=getLogger(__name__),
)


def score(queries, keys):
    mode = _found.KVCacheCompressionMode.H2O
    parameters = _found.KVCacheCompressionParameters(algorithm=mode, granularity="per_token", start_tokens=0)
    compressor = _found.KVCacheCompressor(parameters)
    compressor.aggregate_scores(0, causal_attention(queries, keys))
    # A sum over all query heads, where the contract has a mean: a positive factor.
    return (compressor.get_scores(0) / queries.shape[1])[:, None].expand(keys.shape[:3])
