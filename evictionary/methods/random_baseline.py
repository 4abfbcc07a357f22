"""The baseline that every method has to beat: keep random
tokens. It belongs to no paper, so it is not in reference/.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

METHOD = "keeps random tokens, drawn anew for every layer, head and compression (the baseline to beat)"


def score(keys: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return uniform scores [B, H_kv, T] for keys
    [B, H_kv, T, D], drawn on the CPU so that every device agrees.
    """
    import torch  # imported here, so that listing the methods does not wait for torch

    return torch.rand(keys.shape[:-1], generator=generator).to(keys.device)
