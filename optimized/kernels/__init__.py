"""Triton kernels under the entries of `optimized`, with the same file and function names.

An entry checks its arguments, asks `kernels.take("keydiff", keys)` and calls `kernels.keydiff.score(keys)`.
The kernels check nothing, and no file here imports an entry. `launching.py` says where the kernels run.
Without a GPU, `TRITON_INTERPRET=1 pytest spec_tests --impl optimized` checks every law on them, and
`tests/kernels/test_kernels.py` adds tests beyond the laws. The machine code, which the interpreter cannot
see, is checked by compiling for several GPUs (`compiling.py`).

A kernel file has the launchers, the kernels, and `CONFIGURATIONS`: the calls to compile offline. Its
docstring gives the torch expression that it equals, the work of each launch, the memory read and written, and
the reason for the tile sizes. Rules that every kernel keeps: float32 inside, whatever the inputs; offsets in
int64; every load masked with its `other`; no float atomics and fixed-order reductions, so that two runs agree
in every bit; no length becomes a constant of a kernel, so that a growing cache does not recompile; bfloat16
is converted right after the load, since the interpreter cannot compute with it; at most 15 arguments: what
belongs together is one tuple with names (strided.py), and a length is a number of its own.
"""

import importlib
import pkgutil
from types import ModuleType
from typing import TYPE_CHECKING

from .launching import take

__all__ = ["take"]

# An entry imports this package also without Triton, so a file of kernels is imported when it is first named.
if TYPE_CHECKING:
    from . import (  # noqa: F401
        attention,
        cache,
        cam,
        criticalkv,
        dropkv,
        expected_attention,
        gvote,
        keydiff,
        knorm,
        kvzap,
        lagkv,
        momentkv,
        paging,
        projections,
        quest,
        received_attention,
        rkv,
        selection,
        streaming_llm,
    )
else:

    def __getattr__(stem: str) -> ModuleType:
        """Import a file of kernels, and Triton with it."""
        if stem not in {file.name for file in pkgutil.iter_modules(__path__)}:
            raise AttributeError(f"module {__name__!r} has no attribute {stem!r}")
        return importlib.import_module(f"{__name__}.{stem}")
