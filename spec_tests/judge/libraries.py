"""The array libraries that an implementation may compute with. Laws think in NumPy: arrays go in, and come
back, through here.
"""

import importlib
import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from evictionary.spec_tests.judge.arithmetic import round_to

LIBRARIES = ("numpy", "torch", "jax", "mlx", "cupy")
# A caller chooses the strides of these arrays, and may write into them.
WITH_STRIDES = ("numpy", "torch", "exec")
# The dtypes that NumPy has too.
OF_NUMPY = ("float64", "float32", "float16")
_HOMES = {"torch": "torch", "jax": "jax", "jaxlib": "jax", "mlx": "mlx", "cupy": "cupy"}


def library_of(value: Any) -> str:
    """The library that an array, a function or a module comes from; NumPy where it is no other one."""
    home = (
        value.__name__
        if isinstance(value, types.ModuleType)
        else getattr(value, "__module__", None) or type(value).__module__
    )
    return _HOMES.get(str(home).split(".")[0], "numpy")


def library_used(modules: Iterable[types.ModuleType]) -> str:
    """The library that modules compute with: the first one but NumPy that they import, or that a function
    of theirs uses.
    """
    for module in modules:
        for own in list(vars(module).values()):
            value = inspect.unwrap(own) if callable(own) else own  # a decorator has globals of its own
            used = [
                value,
                *(
                    each
                    for each in getattr(value, "__globals__", {}).values()
                    if isinstance(each, types.ModuleType)
                ),
            ]
            if found := [library for library in map(library_of, used) if library != "numpy"]:
                return found[0]
    return "numpy"


def missing_library(library: str) -> str:
    """Why a library cannot be used here, or an empty string."""
    try:
        importlib.import_module("mlx.core" if library == "mlx" else library)
    except ImportError as error:
        return f"computes with {library}, which cannot be imported here ({error})"
    return ""


def of_each(function: Callable[[Any], Any], value: Any) -> Any:
    """What a function makes of a value, or of each entry of a tuple; a named tuple stays one."""
    if not isinstance(value, tuple):
        return function(value)
    entries = [of_each(function, entry) for entry in value]
    return type(value)(*entries) if hasattr(value, "_fields") else tuple(entries)


def from_numpy(array: np.ndarray, library: str, dtype: str, device: str = "cpu") -> Any:
    """A copy of an array as one of the library, with its floating-point numbers rounded to `dtype`."""
    real = array.dtype.kind == "f"
    if real and dtype not in OF_NUMPY:
        array = round_to(array, dtype)
    with np.errstate(over="ignore"):
        # torch refuses negative strides, which a copy in this order does not have
        own = array.astype(
            dtype if real and dtype in OF_NUMPY else array.dtype, order="C" if library == "torch" else "K"
        )
    if library == "torch":
        import torch

        tensor = torch.from_numpy(own)
        return tensor.to(device=device, dtype=getattr(torch, dtype) if real else tensor.dtype)
    if library == "jax":
        jax = importlib.import_module("jax")
        # Without it JAX has no float64; with it, what a function makes itself would be float64 too.
        jax.config.update("jax_enable_x64", dtype == "float64")
        return jax.numpy.array(own, dtype=dtype if real else jax.dtypes.canonicalize_dtype(own.dtype))
    if library == "mlx":
        mlx = importlib.import_module("mlx.core")
        if dtype == "float64":
            mlx.set_default_device(mlx.cpu)  # its GPUs have none
        return mlx.array(own, dtype=getattr(mlx, dtype)) if real else mlx.array(own)
    return importlib.import_module("cupy").asarray(own) if library == "cupy" else own


def to_numpy(value: Any) -> Any:
    """What an implementation returned, as NumPy: floating point as float64, tuples entry by entry."""
    if isinstance(value, tuple):
        return of_each(to_numpy, value)
    library = library_of(type(value))
    if library == "torch":
        value = value.detach().cpu()
        if not value.is_floating_point():
            return value.numpy()
        known = str(value.dtype).removeprefix("torch.") in OF_NUMPY
        return (value if known else value.float()).numpy().astype(np.float64)
    if library == "mlx":
        mlx = importlib.import_module("mlx.core")
        value = np.array(value.astype(mlx.float32) if value.dtype == mlx.bfloat16 else value)
    elif library == "cupy":
        value = value.get()
    elif library == "jax":
        value = np.asarray(value)
    if not isinstance(value, np.ndarray):
        return value
    value = np.asarray(value)  # without what a subclass makes of a comparison
    # NumPy has no bfloat16 of its own: JAX's is of the kind V.
    return value.astype(np.float64) if value.dtype.kind in "fV" else value
