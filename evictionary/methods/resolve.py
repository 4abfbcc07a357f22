"""Finds methods: by name in `optimized/` and `reference/`, in a user's file, or composed of several."""

import importlib
import importlib.util
import inspect
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from evictionary.errors import UsageError, require
from evictionary.methods import catalogue
from evictionary.methods.calling import describe_exception
from evictionary.methods.method import Method
from evictionary.optimized import selection
from evictionary.reference.quantisation import QUANTISERS
from evictionary.source import import_file

MOMENTS = catalogue.MOMENTS


def resolve(method: str) -> Method:
    """The method of that name, of that file, or composed of several.

    A name means the module of that stem in `optimized/`, or else in `reference/`. Names with `+` between them
    compose: additions (`catalogue.additions`) and `moments`, the correction by moments, follow the method.

    Args:
        method: A name, `path/to/file.py`, `path/to/file.py:function`, or a composition of either.

    Returns:
        The method, which an EvictingCache takes as it is.

    Raises:
        UsageError: The name is unknown, the file cannot be imported, or the function has an argument that
            cannot be supplied.

    Examples:
        >>> from evictionary.methods.resolve import resolve
        >>> resolve("lagkv").options
        {'sink_size': 16, 'lag_size': 1024}
        >>> resolve("snapkv+ada_kv").inputs
        ['queries', 'keys']
    """
    base, additions = catalogue.parts(method)
    found = _resolve_one(base)
    for addition in additions:
        found = replace(_compose(found, addition), name=f"{found.name}+{addition}")
    return replace(found, name=method)


def _compose(method: Method, addition: str) -> Method:
    if addition in QUANTISERS:
        return _quantised(method, addition)
    if addition == catalogue.REROTATE:
        return _rerotated(method)
    if addition == catalogue.DMS:
        return _delayed(method)
    module: Any = addition != MOMENTS and importlib.import_module(f"evictionary.optimized.{addition}")
    merges, compares = hasattr(module, "merge_values"), hasattr(module, "preference")
    makes_up = merges or addition == MOMENTS
    require(
        not (makes_up and any(policy.stands_for_evicted for policy in method.policies))
        and not (merges and method.corrected),
        f"method: {method.name} makes up for the evicted tokens, which {addition} would count again; "
        "wanted it alone",
    )
    require(
        not (makes_up and method.is_per_query),
        f"method: {method.name} evicts nothing that {addition} could sum up; wanted it alone",
    )
    require(
        not method.rerotated or not (compares or addition == MOMENTS),
        f"method: got {addition!r} after {catalogue.REROTATE}, {_WHY_NOT[addition == MOMENTS]}; wanted one "
        "of them",
    )
    require(
        not (merges and method.preference) and not (compares and method.merge),
        f"method: got {addition!r} after {method.name}, but one shrinks a layer when its queries are gone, "
        "and the other reads them; wanted one of them",
    )
    require(
        not method.delays or makes_up or addition == catalogue.PROTECT,
        f"method: got {addition!r} after {catalogue.DMS}, but {_DECIDES}; wanted one of them",
    )
    if addition == MOMENTS:
        return replace(method, corrected=True)
    require(
        not (merges and method.quantised),
        f"method: got {addition!r} after {method.quantised}, but it gives kept tokens other values, which "
        "are quantised already; wanted one of them",
    )
    if merges:
        return replace(method, merge=_from_module(module, addition, "merge_values"))
    require(
        not hasattr(module, "budgets") or method.layer_budgets is None,
        f"method: got {addition!r} after another division among layers, wanted one of them",
    )
    if hasattr(module, "budgets") and not compares:
        return replace(method, layer_budgets=module.budgets)
    protects = addition == catalogue.PROTECT
    if protects:
        _require_protectable(method)
    else:
        require(
            not method.is_select and not (compares and method.prompt_function),
            f"method: {method.name} chooses its tokens itself, but {addition} chooses them by scores; wanted "
            "a scorer first",
        )
    if compares:
        preference, traits = _from_module(module, addition, "preference"), method.traits | {"prompt_only"}
        return replace(method, layer_budgets=module.budgets, preference=preference, traits=traits)
    divides = not hasattr(module, "choose")
    require(
        method.choose is selection.top_k if protects else method.is_top_k or (divides and method.protects),
        f"method: got {addition!r} after another addition that chooses tokens by scores, wanted one of them",
    )
    if divides:
        return replace(method, head_budgets=module.select)
    options = catalogue.protect_options() if protects else {}
    return replace(method, choose=module.choose, options=method.options | options)


def _quantised(method: Method, addition: str) -> Method:
    """The method with quantised keys and values. Raises UsageError where they cannot be."""
    require(
        not method.quantised,
        f"method: got {addition!r} after {method.quantised}, wanted one of them",
    )
    require(
        not method.rerotated,
        f"method: got {addition!r} after {catalogue.REROTATE}, but quantised keys would be rounded again; "
        "wanted one of them",
    )
    require(
        not method.is_per_query,
        f"method: {method.name} evicts nothing, and reads keys by a summary of their pages, which {addition} "
        "would change; wanted it alone",
    )
    require(
        method.merge is None and not any(policy.stands_for_evicted for policy in method.policies),
        f"method: {method.name} gives kept tokens other values, which {addition} would not quantise; wanted "
        "it alone",
    )
    options = catalogue.quantiser_options(addition)
    _require_other_options(method, addition, options)
    return replace(method, quantised=addition, options=method.options | options)


_WHY_NOT = (
    "but it shrinks a layer again for each later layer, and each time would turn its keys",
    "but what makes up for the evicted tokens holds at their old distances alone",
)
"""Why keys are not re-rotated: beside an addition that compares the layers, and beside moments or a bias."""


def _rerotated(method: Method) -> Method:
    """The method with re-rotated keys. Raises UsageError where they cannot be."""
    name = catalogue.REROTATE
    require(
        not method.quantised,
        f"method: got {name!r} after {method.quantised}, but quantised keys would be rounded again; wanted "
        "one of them",
    )
    require(
        not method.is_per_query,
        f"method: {method.name} evicts nothing, so no key moves; wanted it without {name}",
    )
    # merged values have no position
    stands = method.merge is None and any(policy.stands_for_evicted for policy in method.policies)
    makes_up = method.corrected or stands
    require(
        not makes_up and not method.preference,
        f"method: got {name!r} after {method.name}, {_WHY_NOT[makes_up]}; wanted it without {name}",
    )
    return replace(method, rerotated=True)


_DECIDES = "a threshold decides how many tokens stay, so there is no budget to divide"


def _delayed(method: Method) -> Method:
    """The method with delayed eviction by a threshold. Raises UsageError for one that it does not judge."""
    name = catalogue.DMS
    require(
        not method.is_select and method.prompt_function is None,
        f"method: {method.name} chooses its tokens itself, but {name} judges them by scores; wanted a scorer "
        "first",
    )
    require(
        method.layer_budgets is None and (method.is_top_k or (method.protects and not method.head_budgets)),
        f"method: got {name!r} after {method.name}, but {_DECIDES}; wanted one of them",
    )
    options = catalogue.dms_options()
    _require_other_options(method, name, options)
    traits = method.traits | {"moving_window"}
    return replace(method, delays=True, traits=traits, options=method.options | options)


def _require_other_options(method: Method, addition: str, options: dict[str, Any]) -> None:
    """Raise UsageError for an option that a method and an addition both have."""
    twice = sorted(method.options.keys() & options.keys())
    require(
        not twice,
        f"method: {method.name} has an option {', '.join(twice)}, which {addition} has too; wanted another "
        "name for it",
    )


def _require_protectable(method: Method) -> None:
    """Raise UsageError for a method that chooses its tokens itself, and say what it keeps."""
    chooses = (method.is_select and "own_budget" not in method.traits) or method.prompt_function is not None
    named = {*catalogue.PROTECTING["first"], *catalogue.PROTECTING["last"]} & method.options.keys()
    kept = catalogue.protected(method.name, {}).replace("-", "no token by itself")
    own = f"its options {' and '.join(sorted(named))}, or " if named else ""
    require(
        not chooses,
        f"method: {method.name} chooses its tokens itself and keeps {kept}, but {catalogue.PROTECT} chooses "
        f"them by scores; wanted {own}a scorer first",
    )
    _require_other_options(method, catalogue.PROTECT, catalogue.protect_options())


def _resolve_one(method: str) -> Method:
    path, function_name = catalogue.file_of(method)
    if path is not None:
        return _from_module(_import_file(path), method, function_name)
    if method not in catalogue.BASELINES and importlib.util.find_spec(f"evictionary.optimized.{method}"):
        optimized = importlib.import_module(f"evictionary.optimized.{method}")
        if catalogue.entry(optimized):
            return _from_module(optimized, method)
    return _from_module(catalogue.definition(method), method)


def _import_file(path: Path) -> ModuleType:
    try:
        return import_file(f"user_method_{path.stem}", path)
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"method: {path} cannot be imported: {describe_exception(error, path.resolve())}"
        ) from error


def _from_module(module: ModuleType, name: str, function_name: str | None = None) -> Method:
    function = getattr(module, function_name, None) if function_name else catalogue.entry(module)
    if not callable(function):
        own = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        wanted = f"a function {function_name}" if function_name else "a function score or select"
        raise UsageError(
            f"method: got {name}, wanted {wanted} in it; it has {', '.join(own) or 'no functions'}"
        )
    inputs, options, missing = catalogue.split_signature(function)
    require(
        not missing,
        f"method: {name} names the argument {', '.join(missing)} in {function.__name__}, which cannot be "
        "supplied; wanted "
        f"some of {', '.join(catalogue.INPUTS)}, or an argument with a default, which becomes an option",
    )
    package, _, stem = module.__name__.rpartition(".")
    # a module of `optimized/` leaves its description and its paper to the reference
    described = catalogue.definition(stem) if package == "evictionary.optimized" else module
    traits = catalogue.traits(described)
    lacking = [each for each in ("keep_ratio", "sink_size", "lag_size") if each not in (*inputs, *options)]
    require(
        "recursive" not in traits or not lacking,
        f"TRAITS of {name}: got 'recursive', wanted {function.__name__} to take {', '.join(lacking)} then",
    )
    require(
        "per_query" not in traits
        or (function.__name__.startswith("select") and {"query", "queries"} & set(inputs)),
        f"TRAITS of {name}: got 'per_query', wanted a select that takes query or queries then",
    )
    imports_torch = re.search(
        r"^\s*(import|from)\s+(torch|triton)\b", inspect.getsource(module), re.MULTILINE
    )
    return Method(
        name=name,
        module=module,
        function=function,
        inputs=inputs,
        options=options,
        traits=traits,
        as_torch=package == "evictionary.optimized" or imports_torch is not None,
        prompt_function=getattr(module, "select_prompt", getattr(described, "select_prompt", None)),
        corrected="moments" in inputs,
    )
