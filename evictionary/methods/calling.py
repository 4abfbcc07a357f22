"""Calls a method's function with tensors or arrays, reads its options, and checks its result."""

import ast
import contextlib
import inspect
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evictionary.errors import MethodError, UsageError, require
from evictionary.source import file_of


def typed_option(name: str, value: Any, default: Any) -> Any:
    """Return `value` in the type of the option's default;
    text, as the command line gives it, is read as that type.

    Raises UsageError with the option's name if the value does not fit.
    """
    wanted = type(default)
    if isinstance(value, str) and wanted is not str:
        # it stays text; only an option without a typed default accepts that
        with contextlib.suppress(ValueError, SyntaxError):
            value = ast.literal_eval(value.capitalize() if wanted is bool else value)
    if wanted is float and type(value) is int:
        value = float(value)
    named = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    such = f"{named.get(wanted, f'a {wanted.__name__}')} such as {default!r}"
    require(
        default is None or type(value) is wanted,
        f"option {name}: got {value!r}, wanted {such}",
    )
    return value


def call(
    function: Callable[..., Any],
    label: str,
    arguments: Mapping[str, Any],
    *,
    as_torch: bool,
    chooses: bool = True,
) -> Any:
    """Call a method's function with tensors, or with NumPy float64 arrays if it does not use torch. What it
    gives has no graph if it is for a choice.

    Positional-only arguments work too. Raises UsageError where the function refuses an option, and
    MethodError, with the file and line, for any other exception of the function, and for one that writes into
    its arguments: they are the model's own cache.
    """
    before = {name: _writes(value) for name, value in arguments.items()}
    given = {name: value if as_torch else _as_numpy(value) for name, value in arguments.items()}
    positional = [
        given.pop(name)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.POSITIONAL_ONLY and name in given
    ]
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not chooses):
            result = function(*positional, **given)
    except (Exception, SystemExit) as error:
        refused = arguments.get(str(error).partition(":")[0])
        if isinstance(error, ValueError) and isinstance(refused, bool | int | float | str):
            raise UsageError(f"{label}: {error}") from None
        told = f"{label} raised {describe_exception(error, file_of(function))}"
        if not as_torch and isinstance(error, AttributeError | TypeError):
            told += (
                "; it gets NumPy arrays, because its file does not import torch: `import torch` there "
                "gives it tensors"
            )
        raise MethodError(told) from error
    changed = [name for name, value in arguments.items() if _writes(value) != before[name]]
    require(
        not changed,
        f"{label} writes into {', '.join(changed)}, wanted a function that changes a copy: x = x.clone()",
        MethodError,
    )
    return result


def _writes(value: Any) -> int:
    """The number of writes to a tensor; 0 for tensors of inference mode."""
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


def describe_exception(error: BaseException, source: Path | None) -> str:
    """Return 'TypeError at file.py, line 7: message', with the deepest line inside `source`."""
    message = f"{type(error).__name__}"
    if isinstance(error, SyntaxError):
        return f"{message} at {Path(error.filename or '?').name}, line {error.lineno}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename) == source] or frames
    place = f" at {Path(own[-1].filename).name}, line {own[-1].lineno}" if own else ""
    return f"{message}{place}: {error}"


def _as_numpy(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    array = value.detach().cpu()
    return (array.to(torch.float64, copy=True) if array.is_floating_point() else array).numpy()


def _as_tensor(label: str, result: Any, wanted: str, device: torch.device) -> torch.Tensor:
    if isinstance(result, np.ndarray) and not result.flags.writeable:
        result = result.copy()  # torch has no read-only tensors
    try:
        return torch.as_tensor(result, device=device)
    except (TypeError, ValueError, RuntimeError):
        raise MethodError(f"{label} returned {type(result).__name__}, wanted {wanted}") from None


def checked_scores(label: str, result: Any, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return the scores as a tensor [B, H_kv, T]. Raises
    MethodError for another shape, no real numbers, or NaN.
    """
    wanted = f"scores of shape {list(shape)} ([B, H_kv, T]), real numbers, higher = keep"
    scores = _as_tensor(label, result, wanted, device)
    require(
        tuple(scores.shape) == shape,
        f"{label} returned shape {list(scores.shape)}, wanted {wanted}",
        MethodError,
    )
    require(
        scores.dtype != torch.bool and not scores.is_complex(),
        f"{label} returned dtype {scores.dtype}, wanted {wanted}; a kept mask comes from a `select`",
        MethodError,
    )
    if scores.isnan().any():
        batch, head, token = (int(index) for index in scores.isnan().nonzero()[0])
        raise MethodError(
            f"{label} returned NaN (batch {batch}, head {head}, token {token}), wanted {wanted}"
        )
    return scores


def checked_kept(label: str, result: Any, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return the kept mask as a tensor [B, H_kv, T]. Raises
    MethodError for another shape or dtype, or an empty row.
    """
    wanted = f"a boolean mask of shape {list(shape)} ([B, H_kv, T]), True = keep"
    kept = _as_tensor(label, result, wanted, device)
    require(
        tuple(kept.shape) == shape, f"{label} returned shape {list(kept.shape)}, wanted {wanted}", MethodError
    )
    require(kept.dtype == torch.bool, f"{label} returned dtype {kept.dtype}, wanted {wanted}", MethodError)
    require(
        kept.any(dim=-1).all(),
        f"{label} keeps no token in some head, wanted at least one token in each head",
        MethodError,
    )
    return kept
