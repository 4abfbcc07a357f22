"""Decides where the kernels run, and holds helpers that the launchers share.

The kernels run on the device of the tensors: on a GPU, or on the CPU if TRITON_INTERPRET=1 is in the
environment. Triton then runs them in its interpreter, slowly but with the same meaning, and the laws judge
them through `optimized`. The variable has to be set before Triton is imported. Inputs that the kernels do not
support take the torch path, on any device; on a GPU a warning says why.

The entries of `optimized` import this file, also without Triton: it imports Triton when it is needed.
"""

import contextlib
import functools
import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

import torch

from .. import gradients, softmax

LARGEST_HEAD_DIM = 256
PLAIN_ALONE = {"attention", "dropkv", "expected_attention", "gvote", "momentkv", "received_attention"}
"""The kernels that compute a softmax, which is the plain one."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Given = ParamSpec("Given")
Result = TypeVar("Result")


def take(stem: str, *tensors: torch.Tensor, longest: int | None = LARGEST_HEAD_DIM, beside: Any = ()) -> bool:
    """Return whether the kernels of a stem take these tensors: their device, dtype and last axis, at most
    `longest`. False where a gradient is wanted of them, or of what they read `beside` them (gradients.py).

    Tensors on a GPU that no kernel takes give a warning, the first time for each reason.
    """
    if stem in PLAIN_ALONE and softmax.current() != softmax.PLAIN:
        return False
    if gradients.are_wanted(tensors, beside):
        if tensors[0].is_cuda:
            _warn_once(
                f"the {stem} kernels: got tensors that require a gradient, which no kernel gives; the slower "
                "torch path takes their place, and torch.no_grad() brings the kernels back"
            )
        return False
    for tensor in tensors:
        if not tensor.is_cuda and not (is_interpreted(tensor) and os.environ.get("TRITON_INTERPRET") == "1"):
            return False
        refused = tensor.dtype not in DTYPES
        if refused or (longest is not None and tensor.shape[-1] > longest):
            if tensor.is_cuda:
                got = str(tensor.dtype) if refused else f"{tensor.shape[-1]} channels"
                wanted = ", ".join(map(str, DTYPES)) if refused else f"at most {longest}"
                _warn_once(
                    f"the {stem} kernels: got {got}, wanted {wanted}; the slower torch path takes their place"
                )
            return False
    return True


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)  # of whoever calls the entry


def launcher(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Let a function that launches kernels run where its
    tensors are, and refuse those of which a gradient is wanted.

    Triton launches on the current device, which need not be that of the tensors: a layer of a model may live
    on another GPU. The first argument, a tensor or a tuple of tensors, says on which device all of them are.
    """

    @functools.wraps(function)
    def launched(*given: Given.args, **named: Given.kwargs) -> Result:
        gradients.refuse(function, given, named)
        first: Any = given[0]
        with current((first[0] if isinstance(first, tuple) else first).device):
            return function(*given, **named)

    return launched


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """Return the launch of a kernel on a grid of programs, to be called with its arguments and options.

    Products and sums are fused, whatever the default of this version of Triton is (3.10 changes it):
    rounding, registers and times are those of the fused code.
    """
    return functools.partial(kernel[grid], enable_fp_fusion=True)


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which a GPU is the current device; the interpreter has none."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def is_interpreted(states: torch.Tensor) -> bool:
    """Return whether a kernel that is launched on `states` runs in the interpreter."""
    return states.is_cpu


TARGETS: dict[torch.device, tuple[Any, Any]] = {}
"""What Triton compiles for, by the device, with the driver that said so."""


def target(states: torch.Tensor) -> Any:
    """Return what Triton compiles for where `states` are; a driver is asked once for each device."""
    from triton.runtime.driver import driver

    active = driver.active
    asked, found = TARGETS.get(states.device, (None, None))
    if asked is not active:
        asked, found = TARGETS[states.device] = active, active.get_current_target()
    return found


def is_amd(states: torch.Tensor) -> bool:
    """Return whether the target GPU is from AMD, with 64 threads in a warp."""
    return not is_interpreted(states) and target(states).backend == "hip"


def on_tensor_cores(states: torch.Tensor) -> bool:
    """Return whether products of these states run on tensor cores: not in float32, and not before sm_80.

    There Triton holds both factors in shared memory as float32,
    of which a program may have 64 KiB: its tiles are smaller.
    """
    return states.dtype != torch.float32 and (
        is_interpreted(states) or is_amd(states) or target(states).arch >= 80
    )


def is_for(states: torch.Tensor, architecture: int) -> bool:
    """Return whether the target GPU has this architecture: on another one the same constants may spill."""
    return not is_interpreted(states) and target(states).arch == architecture


def register_limit(states: torch.Tensor, most: int, architecture: int = 90) -> dict[str, int]:
    """Return the option that keeps a thread to `most` registers, for one architecture."""
    return {"maxnreg": most} if is_for(states, architecture) else {}


def warps(states: torch.Tensor, threads: int) -> int:
    """Return the number of warps of a program with `threads` threads."""
    return threads // (64 if is_amd(states) else 32)


def cdiv(size: int, part: int) -> int:
    """Return how many parts hold a size. `triton.cdiv` says the same, and takes ten times as long here."""
    return -(-size // part)


@functools.cache
def padded(size: int, least: int = 16) -> int:
    """Return the smallest power of two >= `size` and >= `least`: Triton's tiles have no other sizes, the
    rest is masked.
    """
    return max(least, 1 << (size - 1).bit_length())


def as_heads(states: torch.Tensor) -> torch.Tensor:
    """Return `[..., T, D]` as `[B, H, T, D]`: a view for up to two leading axes, a reshape beyond."""
    if states.ndim > 4:
        return states.reshape(-1, *states.shape[-3:])
    return states[(None,) * (4 - states.ndim)]


def floats(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Allocate float32 numbers on the device of `like`."""
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def outputs(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Allocate outputs in the dtype of `like`; the launcher converts its result to that dtype.

    The interpreter truncates float32 to bfloat16 instead of rounding:
    there the memory is float32, and torch rounds afterwards.
    """
    dtype = torch.float32 if is_interpreted(like) else like.dtype
    return torch.empty(shape, dtype=dtype, device=like.device)
