"""Finds methods, by name in `optimized/` and `reference/` or in a user's file, and runs them on one layer's states."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from optimized import selection
from workbench import catalogue
from workbench.binding import call, checked_kept, checked_scores, describe_exception, typed_option
from workbench.catalogue import INPUTS, RANDOM
from workbench.errors import UsageError


@dataclass(frozen=True)
class Method:
    """One way to decide what stays: a `select` function, or a `score` function whose highest scores stay."""

    name: str
    description: str
    paper: str | None
    seams: tuple[str, ...]
    module: ModuleType
    function: Callable[..., Any]
    is_select: bool
    inputs: tuple[str, ...]
    options: dict[str, Any] = field(hash=False)
    as_torch: bool = True

    @property
    def label(self) -> str:
        """'score in keydiff.py', for messages."""
        return f"{self.function.__name__} in {Path(inspect.getsourcefile(self.function) or '?').name}"

    def typed_options(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the given options in the types of their defaults. Raises UsageError for an unknown one or a wrong type."""
        # keep_ratio is the one input that a user may set instead of the budget: LagKV's papers report it.
        known = dict(self.options) | ({"keep_ratio": 0.5} if "keep_ratio" in self.inputs else {})
        for name in given or {}:
            if name not in known:
                wanted = ", ".join(known) if known else "none: the method has no options"
                raise UsageError(f"option {name}: {self.name} has no such option; wanted one of {wanted}")
        return {name: typed_option(name, value, known[name]) for name, value in (given or {}).items()}

    def kept(
        self,
        states: Mapping[str, torch.Tensor],
        *,
        compression_ratio: float = 0.0,
        budget: int | None = None,
        options: Mapping[str, Any] | None = None,
        layer_index: int = 0,
        num_layers: int = 1,
        seed: int = 0,
    ) -> torch.Tensor:
        """Return the kept mask [B, H_kv, T] of one layer.

        `states` has keys [B, H_kv, T, D], values [B, H_kv, T, D_v] and, if the method names them, queries and hidden_states.
        `budget`, if given, takes the place of compression_ratio. Raises UsageError for arguments out of range or states that
        the method names and nobody recorded, MethodError for what goes wrong inside the method.
        """
        keys = states["keys"]
        shape, length = tuple(keys.shape[:3]), keys.shape[2]
        options = self.typed_options(options)
        amount = tokens_to_keep(length, compression_ratio, budget)
        if amount == length and "keep_ratio" not in options:
            return torch.ones(shape, dtype=torch.bool, device=keys.device)
        removed = compression_ratio if budget is None else 1 - amount / length
        available: dict[str, Any] = {
            **states,
            "positions": torch.arange(length, device=keys.device),
            "length": length,
            "layer_index": layer_index,
            "num_layers": num_layers,
            "budget": amount,
            "compression_ratio": removed,
        }
        if "keep_ratio" in self.inputs:
            available["keep_ratio"] = self._keep_ratio(length, amount, removed, options)
        if "generator" in self.inputs:
            available["generator"] = torch.Generator().manual_seed(seed * 1_000_003 + layer_index)
        absent = [name for name in self.inputs if name not in available]
        if absent:
            raise UsageError(
                f"method {self.name}: reads {', '.join(absent)}, which this prefilled cache did not record; "
                f"prefill with record=({', '.join(map(repr, absent))},) or run the prompt through the EvictingCache"
            )
        arguments = {name: available[name] for name in self.inputs} | dict(options)
        result = call(self.function, self.label, arguments, as_torch=self.as_torch)
        if self.is_select:
            return checked_kept(self.label, result, shape, keys.device)
        scores = checked_scores(self.label, result, shape, keys.device)
        return selection.top_k(scores, amount)

    def _keep_ratio(self, length: int, amount: int, removed: float, options: Mapping[str, Any]) -> Any:
        """The ratio that meets the budget: solved by the method's own `keep_ratio_for` where it has one."""
        solve = self._helper("keep_ratio_for")
        if solve is None:
            return float(1 - Decimal(repr(float(removed))))
        return solve(length, amount, **_accepted(solve, {**self.options, **options}))

    def why_nothing_removed(self, length: int, options: Mapping[str, Any] | None = None) -> str | None:
        """Say why a cache of `length` tokens stays whole, in the method's own words, or None where it does not say."""
        explain = self._helper("why_nothing_removed")
        return explain and explain(length, **_accepted(explain, self.options | self.typed_options(options)))

    def _helper(self, name: str) -> Callable[..., Any] | None:
        """A helper of the method's module, or of the reference module with the same stem."""
        if hasattr(self.module, name):
            return getattr(self.module, name)
        stem = self.module.__name__.rpartition(".")[2]
        in_package = self.module.__name__.startswith("optimized.")
        return getattr(importlib.import_module(f"reference.{stem}"), name, None) if in_package else None


def _accepted(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in inspect.signature(function).parameters}


def tokens_to_keep(length: int, compression_ratio: float, budget: int | None = None) -> int:
    """Return how many of `length` tokens stay in each head. A budget larger than the cache keeps all.

    Raises UsageError for a ratio outside [0, 1) or a budget below 1.
    """
    if budget is None:
        try:
            return selection.budget(length, compression_ratio)
        except ValueError as error:
            raise UsageError(str(error)) from None
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
        raise UsageError(f"budget: got {budget!r}, wanted a whole number of at least 1")
    return min(budget, length)


def resolve(method: str) -> Method:
    """Return the method of that name, or of that user file: `path/to/file.py` or `path/to/file.py:function`.

    A name means the module of that stem in `optimized/`, or in `reference/` where there is none. Raises UsageError for an
    unknown name, a file that cannot be imported, or a function that names an argument which nobody can supply.
    """
    path, function_name = _split_path(method)
    if path is not None:
        return _from_module(_import_file(path), method, function_name)
    known = [*catalogue.names(), RANDOM]
    if method not in known:
        close = difflib.get_close_matches(method, known, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise UsageError(f"method: got {method!r}{hint}, wanted one of {', '.join(known)}, or path/to/file.py")
    if method != RANDOM and importlib.util.find_spec(f"optimized.{method}"):
        optimized = importlib.import_module(f"optimized.{method}")
        if catalogue.entry(optimized):
            return _from_module(optimized, method)
    return _from_module(catalogue.definition(method), method)


def _split_path(method: str) -> tuple[Path | None, str | None]:
    head, colon, tail = method.rpartition(":")
    if colon and head.endswith(".py") and tail.isidentifier():
        return Path(head), tail
    return (Path(method), None) if method.endswith(".py") else (None, None)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"method: got {path}, wanted a Python file that exists")
    spec = importlib.util.spec_from_file_location(f"user_method_{path.stem}", path.resolve())
    if spec is None or spec.loader is None:
        raise UsageError(f"method: got {path}, wanted a Python file that can be imported")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"method: {path} cannot be imported: {describe_exception(error, str(path.resolve()))}") from error
    return module


def _from_module(module: ModuleType, name: str, function_name: str | None = None) -> Method:
    function = getattr(module, function_name, None) if function_name else catalogue.entry(module)
    if not callable(function):
        own = [key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__]
        wanted = f"a function {function_name}" if function_name else "a function score or select"
        raise UsageError(f"method: got {name}, wanted {wanted} in it; it has {', '.join(own) or 'no functions'}")
    inputs, options, missing = catalogue.split_signature(function)
    if missing:
        raise UsageError(
            f"method: {name} names the argument {', '.join(missing)} in {function.__name__}, which cannot be supplied; wanted "
            f"some of {', '.join(INPUTS)}, or an argument with a default, which becomes an option"
        )
    package, _, stem = module.__name__.rpartition(".")
    # a module of `optimized/` leaves its description and its paper to the reference
    described = catalogue.definition(stem) if package == "optimized" else module
    imports_torch = re.search(r"^\s*(import|from)\s+(torch|triton)\b", inspect.getsource(module), re.MULTILINE)
    return Method(
        name=name,
        description=catalogue.description(described),
        paper=catalogue.paper(described),
        seams=catalogue.seams(module),
        module=module,
        function=function,
        is_select=function.__name__.startswith("select"),
        inputs=tuple(inputs),
        options=options,
        as_torch=package == "optimized" or imports_torch is not None,
    )
