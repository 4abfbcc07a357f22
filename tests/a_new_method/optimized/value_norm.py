r"""ValueNorm (a toy, of no paper): keep the tokens whose values are longest."""

import torch

from .checks import fits, working_dtype


@fits()
def score(values: torch.Tensor) -> torch.Tensor:
    r"""VN-1: `score_i = |v_i|`.

    Args: values [B, H_kv, T, D_v] (any leading axes). Returns scores [B, H_kv, T], float32 (float64 for
    float64 values). Raises ValueError for an empty, non-finite or wrongly shaped `values`.
    """
    return torch.linalg.vector_norm(values.to(working_dtype(values)), dim=-1)
