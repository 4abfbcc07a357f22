"""The methods as fast code: torch entry points with the file names, function names and argument order of `reference/`.

Each file here has a batched torch path that reads like the reference and runs anywhere; where the tensors live on a GPU it hands
over to the Triton kernel of the same stem in `optimized/kernels/`. float16 and bfloat16 inputs are computed in float32; scores
come back in float32 (float64 for float64 inputs), gathered or attended states in the dtype of their input. Inputs are never
modified and never aliased. Nothing here imports transformers; `reference` lends its exact integer decisions
(budgets, partition counts) and nothing else.
"""

ARRAY_LIBRARY = "torch"
