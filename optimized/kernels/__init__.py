"""Triton kernels under the entry points of `optimized`, with the same file and function names, so they stand on their own too.

On a GPU, `optimized` calls them. Without one, `TRITON_INTERPRET=1` runs them on CPU tensors through Triton's interpreter:
`TRITON_INTERPRET=1 pytest spec_tests/ --impl optimized.kernels` puts every law to the kernels themselves. What the interpreter
cannot see, the machine code, is checked by compiling for several GPUs (`compiling.py`, `tests/test_kernel_compile.py`).

A kernel file has the launcher (the contract's signature), the kernels, and `CONFIGURATIONS`: the calls to compile offline. Its
docstring says what is read and written, the floor in bytes and time, why this tiling, and the torch expression it equals.
Rules that every kernel keeps: float32 inside, whatever the inputs; offsets in int64; every load masked with its `other`; no
float atomics and fixed-order reductions, so that two runs agree in every bit; no length becomes a constant of a kernel, so that
a growing cache does not recompile; bfloat16 is converted right after the load, since the interpreter cannot compute with it.
"""

ARRAY_LIBRARY = "torch"
