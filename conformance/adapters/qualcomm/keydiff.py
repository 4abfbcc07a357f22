"""KeyDiff in C++ for phones: `keyDiffScores`, compiled with
a line of C linkage around it and called through ctypes.
"""

import ctypes
import subprocess

import numpy as np

from conformance.borrowed import FETCHED, folder_of

ARRAY_LIBRARY = "numpy"
DOMAIN = {"dtype": ("float32",)}
IMPLEMENTS = {"score": "keydiff.raw_mean_score"}

# Its own header declares three functions of these types.
HEADER = """
#pragma once
#include <cstddef>
#include <vector>
namespace geniex::kv {
std::vector<float> keyDiffScores(const float* keys, size_t n_valid, size_t head_dim);
}
"""
LINKAGE = """
#include "{source}"
extern "C" void score(const float* keys, size_t tokens, size_t head_dim, float* out) {{
    auto found = geniex::kv::keyDiffScores(keys, tokens, head_dim);
    for (size_t token = 0; token < tokens; ++token) out[token] = found[token];
}}
"""


def _compiled():
    source, built = folder_of("qualcomm") / "core/src/llm/kv_eviction.cpp", FETCHED / "qualcomm_built"
    (built / "llm").mkdir(parents=True, exist_ok=True)
    (built / "llm" / "kv_eviction.h").write_text(HEADER, encoding="utf-8")
    (built / "score.cpp").write_text(LINKAGE.format(source=source), encoding="utf-8")
    subprocess.run(
        [
            "c++",
            "-std=c++17",
            "-O2",
            "-shared",
            "-fPIC",
            f"-I{built}",
            str(built / "score.cpp"),
            "-o",
            str(built / "score.so"),
        ],
        check=True,
    )
    return ctypes.CDLL(str(built / "score.so"))


_library = _compiled()


def score(keys):
    rows = np.ascontiguousarray(keys, dtype=np.float32).reshape(-1, *keys.shape[-2:])
    found = np.empty(rows.shape[:2], dtype=np.float32)
    pointer = ctypes.POINTER(ctypes.c_float)
    for row, out in zip(rows, found, strict=True):
        size = map(ctypes.c_size_t, row.shape)
        _library.score(row.ctypes.data_as(pointer), *size, out.ctypes.data_as(pointer))
    return found.reshape(keys.shape[:-1]) - np.float32(1)  # it returns one minus the cosine
