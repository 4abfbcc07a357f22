"""What every launcher asks before it launches, and the shapes that Triton wants."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.driver import driver

LARGEST_HEAD_DIM = 256
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def require_launchable(name: str, value: torch.Tensor, *, largest: int | None = LARGEST_HEAD_DIM) -> None:
    """Raise ValueError unless the kernels can run on `value`: its device, its dtype, and its last axis, at most `largest`.

    Tensors of the device `meta` pass: offline compilation launches nothing.
    """
    interpreted = value.device.type == "cpu" and triton.knobs.runtime.interpret
    if not (value.is_cuda or interpreted or value.device.type == "meta"):
        raise ValueError(f"{name}: got device {value.device}, wanted a GPU (or a CPU with TRITON_INTERPRET=1)")
    if value.dtype not in DTYPES:
        raise ValueError(f"{name}: got dtype {value.dtype}, wanted float32, float16 or bfloat16")
    if largest is not None and value.shape[-1] > largest:
        raise ValueError(f"{name}: got head_dim {value.shape[-1]}, wanted at most {largest}")


def as_heads(states: torch.Tensor) -> torch.Tensor:
    """Return `[..., T, D]` as `[B, H, T, D]`: a view for up to two leading axes, a reshape beyond."""
    if states.ndim > 4:
        return states.reshape(-1, *states.shape[-3:])
    return states[(None,) * (4 - states.ndim)]


def padded(size: int) -> int:
    """Return the power of two that holds `size`; Triton's tiles have no other sizes, the rest is masked."""
    return max(16, triton.next_power_of_2(size))


def is_interpreted(states: torch.Tensor) -> bool:
    """Return whether the kernels run in the interpreter, on the CPU."""
    return states.device.type == "cpu"


def is_amd(states: torch.Tensor) -> bool:
    """Return whether the GPU to compile for is AMD's, with 64 threads to a warp."""
    return not is_interpreted(states) and driver.active.get_current_target().backend == "hip"


def dot_dtype(states: torch.Tensor) -> Any:
    """What the factors of a product are: the dtype of the cache, but the interpreter cannot multiply bfloat16."""
    bfloat16 = tl.float32 if is_interpreted(states) else tl.bfloat16
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: bfloat16}[states.dtype]
