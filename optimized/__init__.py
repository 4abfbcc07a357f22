"""The methods as fast code: torch entry points with the file
names, function names and argument order of `reference/`.

The signature in `reference` says the axes and the range of each argument, and a docstring here what it leaves
open. Tensors may have any strides.

Each file here checks its arguments once, and has a batched torch path that reads like the reference and runs
anywhere. Inputs that the Triton kernels support (see `kernels/launching.py`) go to the file of the same stem
in `optimized/kernels/`. float16 and bfloat16 inputs are computed in float32; scores come back in float32
(float64 for float64 inputs), gathered or attended states in the dtype of their input. Inputs are never
modified and never aliased. Nothing here imports transformers; only the exact integer decisions (budgets,
partition counts) and the axes of the arguments (`contract`) come from `reference`.
"""

from evictionary import ranges

ARRAY_LIBRARY = "torch"

if __name__ != "evictionary.optimized":
    raise ImportError("import evictionary.optimized, so that no module of it exists twice")

ranges.warn_of_untried()
