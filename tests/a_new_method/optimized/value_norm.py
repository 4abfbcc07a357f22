r"""ValueNorm (a toy, of no paper): keep the tokens whose values are longest."""

import torch

from .checks import fits, working_dtype
from .operators import operator


@operator()
@fits()
def score(values: torch.Tensor) -> torch.Tensor:
    r"""VN-1: `score_i = |v_i|`, in float32, or in float64 for float64 values."""
    return torch.linalg.vector_norm(values.to(working_dtype(values)), dim=-1)
