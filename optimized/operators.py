"""Operators of torch: `keydiff.score` is `torch.ops.evictionary.keydiff_score` too, so that torch.compile
with fullgraph=True, torch.export, fake tensors and vmap see one node in its place.

    compiled = torch.compile(lambda keys: keydiff.score(keys).topk(64).indices, fullgraph=True)

Nothing is said twice: the arguments are those of the function, and the axes of its answer stand behind the
arrow of the same function in `reference`. What is said here is the dtype of numbers that are not scores.

- An operator carries no graph. Numbers of which a gradient is wanted are refused, as by a kernel.
- An axis that the numbers decide, such as how many tokens all heads keep, is a size that the graph learns
  when it runs.
- A function is no operator where it gives numbers of Python, or an answer of which its signature says no
  axes. Under torch.compile it runs outside the graph, and with fullgraph=True torch says why.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch._subclasses.fake_tensor import FakeTensor

from evictionary.reference.answers import answers, size_of
from evictionary.reference.contract import Argument, contract_of

from .checks import working_dtype

NAMESPACE = "evictionary"
SCHEMA = {
    torch.Tensor: "Tensor",
    torch.Tensor | None: "Tensor?",
    int: "int",
    int | None: "int?",
    float: "float",
    float | None: "float?",
    torch.device | None: "Device?",
}
"""What an argument of this type is in the schema of an operator."""

Dtype: TypeAlias = str | torch.dtype | None
Function = TypeVar("Function", bound=Callable[..., Any])
MADE: dict[str, Any] = {}
"""The operators of the files that are imported, each by the path of its function."""


def operator(*dtypes: Dtype) -> Callable[[Function], Function]:
    """Make a function an operator too, which takes its place where torch traces.

    Args: dtypes, of the tensors of its answer in their order: a dtype, the name of the argument that has it,
    or None for what is usual, as is everything where none are given. A mask is boolean, whole numbers are
    int64, and all other numbers have the dtype of scores.
    """

    def decorate(function: Function) -> Function:
        path = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        traced = _operator(path, function, dtypes)
        parameters = inspect.signature(function).parameters
        names = tuple(parameters)
        defaults = {name: each.default for name, each in parameters.items() if each.default is not each.empty}

        @functools.wraps(function)
        def called(*given: Any, **named: Any) -> Any:
            if not (torch.compiler.is_compiling() or _is_seen_through(given, named)):
                return function(*given, **named)
            by_name = defaults | dict(zip(names, given, strict=False)) | named
            if len(given) > len(names) or len(by_name) != len(names):
                raise TypeError(f"{path}: got {', '.join(sorted(by_name))}, wanted {', '.join(names)}")
            return traced([by_name[name] for name in names])

        return called  # type: ignore[return-value]

    return decorate


def _is_seen_through(given: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Whether an argument is one of many, as under vmap, or is a fake tensor, which has no numbers."""
    in_a_transform = torch._C._functorch.maybe_current_level() is not None
    for value in (*given, *named.values()):
        if type(value) is FakeTensor or (in_a_transform and _is_one_of_many(value)):
            return True
        if isinstance(value, tuple) and _is_seen_through(value, {}):
            return True
    return False


def _is_one_of_many(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and torch._C._functorch.is_batchedtensor(value)


def _operator(path: str, function: Callable[..., Any], dtypes: tuple[Dtype, ...]) -> Callable[..., Any]:
    """What calls the operator of a function with the values of its arguments in their order."""
    types = get_type_hints(function)
    gives = types.pop("return")
    parts = get_args(gives) if get_origin(gives) is tuple else (gives,)
    if not all(each is torch.Tensor or hasattr(each, "_fields") for each in parts) or None in answers(path):
        return _outside(path, function)
    wanted = [f"{SCHEMA[type_]} {name}" for name, type_ in _leaves(types)]
    given_back = ["Tensor"] * len(_leaves(dict(enumerate(parts))))
    made = torch.library.custom_op(
        f"{NAMESPACE}::{path.replace('.', '_')}",
        lambda *values: _one_or_all(tuple(map(_alone, flat(function(**_together(types, values)))))),
        mutates_args=(),
        schema=f"({', '.join(wanted)}) -> ({', '.join(given_back)})",
    )
    made.register_fake(lambda *values: _one_or_all(_fake(path, _together(types, values), dtypes)))
    made.register_vmap(functools.partial(_one_by_one, made))
    MADE[path] = made
    is_of_masks = all(argument.kind == "bool" for argument in _arguments(answers(path)))

    def call(values: list[Any]) -> Any:
        row = flat(values)
        if not is_of_masks and torch.is_grad_enabled():
            for value in row:
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    raise ValueError(
                        f"{path}: got a tensor that requires a gradient, wanted none: an operator carries "
                        "no graph; call it under torch.no_grad(), or with a detached tensor"
                    )
        found, answer = flat(made(*row)), []
        for part in parts:
            size = len(getattr(part, "_fields", "1"))
            own, found = found[:size], found[size:]
            answer.append(own[0] if part is torch.Tensor else part(*own))
        return tuple(answer) if len(parts) > 1 else answer[0]

    return call


def _outside(path: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """What calls a function outside of the graph, which with fullgraph=True is an error that says why."""
    names = tuple(inspect.signature(function).parameters)

    def call(values: list[Any]) -> Any:
        torch._dynamo.graph_break(
            msg=f"{path} gives what a graph cannot hold: call it outside of what is compiled"
        )
        return torch._dynamo.disable(function)(**dict(zip(names, values, strict=True)))

    return call


def _leaves(types: dict[Any, Any]) -> list[tuple[str, Any]]:
    """The name and the type of each argument, those of a state one by one."""
    return [
        leaf
        for name, type_ in types.items()
        for leaf in (
            [(f"{name}_{field}", torch.Tensor) for field in type_._fields]
            if hasattr(type_, "_fields")
            else [(name, type_)]
        )
    ]


def flat(values: Any) -> tuple[Any, ...]:
    """The values in a row, those of a state or a tuple one by one."""
    if not isinstance(values, tuple | list):
        return (values,)
    row: list[Any] = []
    for value in values:
        row += value if isinstance(value, tuple) else [value]
    return tuple(row)


def _one_or_all(found: tuple[Any, ...]) -> Any:
    """What an operator gives: one tensor, or a tuple of them."""
    return found if len(found) > 1 else found[0]


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory is its own and in one piece, as an operator has to give it."""
    if tensor.is_contiguous() and not tensor.storage_offset():
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _together(types: dict[str, Any], row: tuple[Any, ...]) -> dict[str, Any]:
    """The arguments by name, of their values in a row."""
    values = iter(row)
    return {
        name: type_(*(next(values) for _ in type_._fields)) if hasattr(type_, "_fields") else next(values)
        for name, type_ in types.items()
    }


def _arguments(said: Iterable[Argument | None]) -> list[Argument]:
    """What is said of each tensor, of those of a state one by one."""
    return [
        leaf for each in said if each is not None for leaf in (each.fields.values() if each.state else [each])
    ]


def _fake(path: str, given: dict[str, Any], dtypes: tuple[Dtype, ...]) -> tuple[torch.Tensor, ...]:
    """Tensors with the axes and the dtypes of the answer, and no numbers."""
    tensors = [value for value in flat(list(given.values())) if isinstance(value, torch.Tensor)]
    device = tensors[0].device if tensors else given["device"]
    wanted, sizes = _arguments(answers(path)), _sizes(path, given)
    return tuple(
        torch.empty(_shape(argument, sizes), dtype=_dtype(argument, dtype, given, tensors), device=device)
        for argument, dtype in zip(wanted, dtypes or [None] * len(wanted), strict=True)
    )


def _dtype(
    argument: Argument, dtype: Dtype, given: dict[str, Any], tensors: list[torch.Tensor]
) -> torch.dtype:
    """The dtype of one tensor of an answer, by what `operator` was told of it."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype is not None:
        return _of_name(dtype, given).dtype
    usual = {"bool": torch.bool, "whole": torch.int64}
    return usual.get(argument.kind) or working_dtype(
        next(each for each in tensors if each.is_floating_point())
    )


def _of_name(name: str, given: dict[str, Any]) -> torch.Tensor:
    """An argument, or the field of a state: `paged.keys`."""
    whole, _, field = name.partition(".")
    return getattr(given[whole], field) if field else given[whole]


def _sizes(path: str, given: dict[str, Any]) -> dict[str, Any]:
    """The size of each axis of the arguments, and each setting that is a whole number."""
    sizes = {name: value for name, value in given.items() if isinstance(value, int | torch.SymInt)}
    for argument in contract_of(path).arguments:
        value = given[argument.name]
        fields = argument.fields.items() if argument.state else [("", argument)]
        for name, own in fields if value is not None else []:
            shape = (getattr(value, name) if name else value).shape
            lead = len(shape) - len(own.own)
            sizes |= {axis: size for axis, size in zip(own.known, shape[lead:], strict=True) if axis}
            if own.lead:
                sizes[own.lead] = torch.broadcast_shapes(sizes.get(own.lead, ()), shape[:lead])
    return sizes


def _shape(argument: Argument, sizes: dict[str, Any]) -> list[Any]:
    """The shape of a tensor. An axis that the numbers decide is a size that nobody knows yet."""
    shape = [*sizes[argument.lead]] if argument.lead else []
    for axis in argument.own:
        size = size_of(axis, sizes)
        if size is None:
            size = sizes[axis.partition(">")[0]] = torch.library.get_ctx().new_dynamic_size()
        shape.append(size)
    return shape


def _one_by_one(made: Any, info: Any, in_dims: tuple[int | None, ...], *row: Any) -> Any:
    """vmap: the operator for each entry of the batch."""
    found = []
    for at in range(info.batch_size):
        entry = [
            value if dim is None else value.select(dim, at) for value, dim in zip(row, in_dims, strict=True)
        ]
        found.append(flat(made(*entry)))
    stacked = tuple(torch.stack(each) for each in zip(*found, strict=True))
    return _one_or_all(stacked), _one_or_all((0,) * len(stacked))
