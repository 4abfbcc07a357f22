"""A stand-in for a CUDA graph, and what a step has to be for one, on a machine without a GPU.

torch shows a mode each call of its operators. A graph keeps which call works on which memory, and no number
of Python that changes: so does `Recording`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

WAITING = {
    "_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "repeat_interleave",
    "unique_dim", "unique_consecutive", "_unique2",
}  # fmt: skip
"""The operators for whose results the processor waits, or whose results have a size that numbers decide."""


class Waits(RuntimeError):
    """A call for whose result the processor would wait for a GPU."""


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


class NeverWaiting(TorchDispatchMode):
    """Refuse each call that would wait for a GPU."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        by_mask = name.startswith("index") and any(each.dtype == torch.bool for each in _tensors(args[1:2]))
        if name in WAITING or by_mask:
            raise Waits(f"{function} waits for a GPU")
        return self.call(function, args, kwargs or {})

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        return function(*args, **kwargs)


class Trace(NeverWaiting):
    """`calls`: each call, with the shapes and the dtypes of its tensors, and the numbers of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        results = function(*args, **kwargs)

        def shown(each: Any) -> Any:
            return (each.dtype, each.shape) if isinstance(each, torch.Tensor) else each

        self.calls.append(f"{function}: {tree_map(shown, (args, kwargs, results))}")
        return results


class Recording(NeverWaiting):
    """Keep each call with its tensors. As in a graph that is recorded,
    nothing has happened afterwards: what the calls wrote is undone, and what
    they gave has no numbers. `replay` calls them again, on the same memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self._before: dict[int, tuple[Any, Any]] = {}  # the storages that were written into, with copies
        self._own: dict[int, torch.Tensor] = {}  # what the calls allocated

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        named = kwargs | dict(zip((each.name for each in function._schema.arguments), args, strict=False))
        for argument in function._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name in named:
                storage = named[argument.name].untyped_storage()
                if storage.data_ptr() not in self._own.keys() | self._before.keys():
                    self._before[storage.data_ptr()] = storage, storage.clone()
        results = function(*args, **kwargs)
        given = {each.untyped_storage().data_ptr() for each in _tensors((args, kwargs))}
        for each in _tensors(results):
            if each.untyped_storage().data_ptr() not in given:
                self._own[each.untyped_storage().data_ptr()] = each
        self.calls.append((function, args, kwargs, results))
        return results

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for storage, copied in self._before.values():
            storage.copy_(copied)
        for each in self._own.values():
            if each.is_floating_point():
                each.fill_(torch.nan)

    def replay(self) -> None:
        with torch._C._AutoDispatchBelowADInplaceOrView():  # torch does not see what a graph writes
            for function, args, kwargs, results in self.calls:
                again = function(*args, **kwargs)
                for ours, new in zip(_tensors(results), _tensors(again), strict=True):
                    if ours.data_ptr() != new.data_ptr():
                        ours.copy_(new)


def record(call: Callable[[], torch.Tensor], device: Any) -> tuple[Callable[[], None], torch.Tensor]:
    """In the place of captured_step.record."""
    with Recording() as recording:
        result = call()
    return recording.replay, result
