"""Lists the methods from the file system, and the inputs that their functions read. It runs without torch.

A module of `reference/` with the attribute `METHOD = "one-line description"` is a method; nothing else
registers it. Beside it `TRAITS = {"recursive"}` names the method's special properties, if it has any; a
user's file may have it too. `INPUTS` names the inputs that the method brings along, each with its source and
its meaning; `evictionary/policies/` computes them.
"""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from evictionary import reference
from evictionary.errors import did_you_mean, require, require_known
from evictionary.reference.quantisation import QUANTISERS
from evictionary.source import first_paragraph

# The options that count tokens which stay whatever their scores.
PROTECTING = {
    "first": ("sink_size", "sinks", "first"),
    "last": ("window_size", "recent_size", "window", "lag_size", "last", "delay"),
}
SEAMS = ("score", "select", "compress", "attend")
RANDOM = "random"
# The addition that corrects the attention by moments of the evicted tokens.
MOMENTS = "moments"
# The addition that keeps the tokens at both ends of a text.
PROTECT = "protect"
# The addition that turns kept keys to consecutive positions.
REROTATE = "rerotate"
# The addition that evicts by a threshold what leaves a window.
DMS = "dms"
# The methods of no paper that every table has, and their modules.
BASELINES = {RANDOM: "random_baseline", "random_protected": "random_protected"}

# The inputs that a cache has for every method: the state of the model that each is computed from, and its
# meaning.
SHARED = {
    "keys": ("", "[B, H_kv, T, D], cached, after RoPE"),
    "values": ("", "[B, H_kv, T, D_v]"),
    "queries": ("queries", "[B, H_q, M, D], after RoPE: of every prompt token, later of the last 128 tokens"),
    "query": ("queries", "[B, H_q, D], the last of the queries"),
    "moments": ("", "Moments of the evicted tokens (MK-22)"),
    "hidden_states": (
        "hidden_states",
        "[B, M, hidden], what the attention layer reads: of every prompt token, later of the last 128 tokens",
    ),
    "replay_queries": (
        "replay_queries",
        "[B, H_q, T, D], after RoPE, of the same prompt read a second time, after itself",
    ),
    "replay_keys": ("replay_keys", "[B, H_kv, T, D], after RoPE, of the same tokens"),
    "replay_hidden_states": (
        "replay_hidden_states",
        "[B, T, hidden], what the attention layer reads of the same tokens",
    ),
    "w_o": ("", "[H_q, D_v, hidden], the output projection of each query head"),
    "positions": ("", "[T], of the tokens in the text"),
    "length": ("", "T, the tokens in the cache"),
    "layer_index": ("", "0 to num_layers - 1"),
    "num_layers": ("", "layers of the model"),
    "budget": ("", "tokens to keep in each head"),
    "compression_ratio": ("", "fraction to remove"),
    "keep_ratio": ("", "fraction to keep"),
    "generator": ("", "a seeded torch.Generator, a new one for each layer and compression"),
}

CALIBRATION = "calibration"
SECOND_READING = "second reading"
# The inputs for which the cache lets the model read the prompt again.
REPLAYED = frozenset({"replay_queries", "replay_keys", "replay_hidden_states"})

# The words that a module can name in TRAITS, and their meaning.
TRAITS = {
    "every_token": "compresses again with every new token",
    "evicts_first": "evicts before the new token attends, so the new token attends to the kept tokens",
    "own_budget": "decides by itself how many tokens stay: a compression ratio or a budget changes nothing",
    "moving_window": "evicts what leaves its window, even from a head with fewer tokens than the budget",
    "per_query": "evicts nothing: for each later token a select says which tokens each query head attends to",
    "prompt_only": "compresses only the prompt here, since the cache keeps neither all queries nor running "
    "sums of their attention",
    "recursive": "compresses each token once and leaves it alone afterwards: a select with keep_ratio, "
    "sink_size (the tokens left "
    "alone) and lag_size (the tokens of a partition)",
}


def modules() -> dict[str, ModuleType]:
    """The modules of `reference/` by stem."""
    return {
        each.name: importlib.import_module(f"evictionary.reference.{each.name}")
        for each in pkgutil.iter_modules(reference.__path__)
    }


# Each input that a method brought along: the stem of the method, the source and the meaning.
DECLARED: dict[str, tuple[str, str, str]] = {
    name: (stem, *said)
    for stem, module in modules().items()
    for name, said in getattr(module, "INPUTS", {}).items()
}
# The arguments that a function can name in its signature, and their meaning.
INPUTS = {name: meaning for name, (_, meaning) in SHARED.items()} | {
    name: meaning for name, (*_, meaning) in DECLARED.items()
}

# The inputs that may be random.
DRAWN = frozenset({"generator", *DECLARED})
REFITTED = frozenset(name for name, (_, source, _) in DECLARED.items() if source == SECOND_READING)
# The inputs that a text calibrates: one of your own through the option `calibration`, else the prompt itself.
# Those in REFITTED need a text that the model reads twice.
CALIBRATED = REFITTED | {name for name, (_, source, _) in DECLARED.items() if source == CALIBRATION}

_SOURCES = {name: source for name, (source, _) in SHARED.items()} | {
    name: source for name, (_, source, _) in DECLARED.items()
}
# The inputs that only the running model has, and the model state from which each input is computed.
CAPTURED_FOR = {
    name: {CALIBRATION: "queries", SECOND_READING: "replay_queries"}.get(source, source)
    for name, source in _SOURCES.items()
    if source
}


def captured(names: Iterable[str]) -> frozenset[str]:
    """The states of the running model that some inputs are computed from."""
    found = {CAPTURED_FOR[name] for name in names if name in CAPTURED_FOR}
    return frozenset(found | (REPLAYED | {"hidden_states"} if REFITTED & set(names) else set()))


def allocators() -> list[str]:
    """The modules that divide a budget among layers (`budgets`) or heads (`select(scores, budget)`), each
    layer by itself.
    """
    return [
        stem
        for stem, module in modules().items()
        if (hasattr(module, "budgets") and not hasattr(module, "preference"))
        or (hasattr(module, "select") and next(iter(inspect.signature(module.select).parameters)) == "scores")
    ]


def additions() -> list[str]:
    """The allocators, the modules that choose other tokens of a head than a top-k (`choose(scores, budget)`),
    those whose budgets compare the layers with one another (`preference`), and those that merge evicted
    values into kept ones (`merge_values`).
    """
    others = (
        stem
        for stem, module in modules().items()
        if {"choose", "preference", "merge_values"} & vars(module).keys()
    )
    return sorted([*allocators(), *others])


def names() -> list[str]:
    """The methods of the dictionary, in alphabetical order."""
    return sorted(stem for stem, module in modules().items() if hasattr(module, "METHOD"))


def definition(name: str) -> ModuleType:
    """The module that defines a method of the dictionary, or a baseline."""
    return importlib.import_module(
        f"evictionary.methods.{BASELINES[name]}" if name in BASELINES else f"evictionary.reference.{name}"
    )


def protected(name: str, options: Mapping[str, Any]) -> str:
    """What a method keeps whatever its scores, 'first 4, last 32' tokens; a dash for none, and for a file
    of one's own.
    """
    base, *composed = name.split("+")
    if base not in {*names(), *BASELINES}:
        return "-"
    module = definition(base)
    said = getattr(module, "PROTECTED", None)
    functions = [entry(module), getattr(module, "select_prompt", None)]
    known: dict[str, Any] = {}
    for function in filter(None, functions):
        known |= split_signature(function)[1]
    for addition, own in ((PROTECT, protect_options), (DMS, dms_options)):
        known |= own() if addition in composed else {}
    known |= options
    most = {
        place: max([known[key] for key in keys if key in known], default=0)
        for place, keys in PROTECTING.items()
    }
    parts = [f"{place} {count}" for place, count in most.items() if count]
    parts += ["the prompt"] if known.get("prompt") else []
    return ", ".join([*parts, *([said] if said else [])]) or "-"


def protect_options() -> dict[str, Any]:
    """The options of the addition that protects, with their defaults: those of its function, and `prompt`,
    which keeps a whole prompt while decoding.
    """
    return split_signature(modules()[PROTECT].choose)[1] | {"prompt": False}


def dms_options() -> dict[str, Any]:
    """The options of the addition that judges by a threshold, with their defaults: `delay`, the window of
    its function, and `cutoff`, the threshold, None for the one that the first text gives.
    """
    return {"cutoff": None, "delay": split_signature(modules()[DMS].due)[1]["window_size"]}


def quantiser_options(name: str) -> dict[str, Any]:
    """The options of an addition that quantises: those of its function, and `residual`, the tokens of the
    exact window, by default none.
    """
    return {"residual": 0} | split_signature(getattr(modules()["quantisation"], QUANTISERS[name]))[1]


def parts(method: str) -> tuple[str, list[str]]:
    """What a composition begins with, a name or the path of a file, and its additions, by their names alone.

    Raises UsageError for an unknown name, a file that does not exist, and an addition that is first or twice.
    """
    found = re.fullmatch(r"(.*?)((?:\+\w+)*)", method)
    base, composed = (found[1], found[2].split("+")[1:]) if found else (method, [])
    wanted = [*additions(), MOMENTS, *QUANTISERS, REROTATE, DMS]
    path, _ = file_of(base)
    require(
        base not in wanted,
        f"method: got {base!r} first, wanted a method before it, such as {names()[0]}+{base}",
    )
    require(path is None or path.is_file(), f"method: got {path}, wanted a Python file that exists")
    if path is None and base not in (known := [*names(), *BASELINES]):
        require_known("method", base, [*known, "path/to/file.py"])
    for index, addition in enumerate(composed):
        require(
            addition in wanted,
            f"method: got {addition!r} after the +{did_you_mean(addition, wanted)}, wanted one of "
            f"{', '.join(wanted)}",
        )
        require(
            addition not in composed[:index],
            f"method: got {addition!r} twice in {method!r}, wanted each addition once",
        )
    return base, composed


def file_of(base: str) -> tuple[Path | None, str | None]:
    """The file and the function of a method that is `path/to/file.py` or `path/to/file.py:function`, or a
    folder with one file that is named as a method, as `evictionary judge` takes it.
    """
    head, colon, tail = base.rpartition(":")
    if colon and head.endswith(".py") and tail.isidentifier():
        return Path(head), tail
    if base.endswith(".py"):
        return Path(base), None
    if base in (*names(), *BASELINES) or not Path(base).is_dir():
        return None, None
    files = [file for file in sorted(Path(base).glob("*.py")) if file.stem in names()]
    one = " or ".join(map(str, files)) or f"{Path(base) / f'{names()[0]}.py'} in it"
    require(len(files) == 1, f"method: got the folder {base} with {len(files)} methods, wanted {one}")
    return files[0], None


def evicting() -> list[str]:
    """The methods of the dictionary that evict tokens."""
    return [name for name in names() if "per_query" not in traits(definition(name))]


def describe(name: str) -> dict[str, Any]:
    """Name, description, paper (arXiv number or None), seams,
    inputs and options with their defaults, of a known method.
    """
    module = definition(name)
    function = entry(module)
    inputs, options, _ = split_signature(function) if function else ([], {}, [])
    return {
        "name": name,
        "description": description(module),
        "paper": paper(module),
        "seams": list(seams(module)),
        "inputs": inputs,
        "options": options,
    }


def description(module: ModuleType) -> str:
    """METHOD, or the first paragraph of the module's docstring."""
    return getattr(module, "METHOD", None) or first_paragraph(module.__doc__ or "a method of your own")


def paper(module: ModuleType) -> str | None:
    """The arXiv number that the module's docstring names first."""
    found = re.search(r"arXiv[: ]*(\d{4}\.\d{4,5})", module.__doc__ or "")
    return found and found.group(1)


def traits(module: ModuleType) -> frozenset[str]:
    """The module's TRAITS, an empty set without the attribute. Raises UsageError for an unknown word."""
    said = getattr(module, "TRAITS", ())
    require(
        set(said) <= set(TRAITS),
        f"TRAITS of {Path(module.__file__ or '?').name}: got {said!r}, wanted a set of {', '.join(TRAITS)}",
    )
    return frozenset(said)


def seams(module: ModuleType) -> tuple[str, ...]:
    """The functions of the contract that the module has."""
    return tuple(seam for seam in SEAMS if callable(getattr(module, seam, None)))


def entry(module: ModuleType) -> Callable[..., Any] | None:
    """The function that decides which tokens stay: `select` if there is one, else `score`."""
    return getattr(module, "select", None) or getattr(module, "score", None)


def split_signature(function: Callable[..., Any]) -> tuple[list[str], dict[str, Any], list[str]]:
    """Return (inputs that it reads, options with their defaults, arguments that cannot be supplied)."""
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }
    inputs = [name for name in defaults if name in INPUTS]
    others: dict[str, Any] = {"calibration": ""} if CALIBRATED & {*inputs} else {}
    others |= {name: default for name, default in defaults.items() if name not in INPUTS}
    options = {name: default for name, default in others.items() if default is not inspect.Parameter.empty}
    return inputs, options, [name for name in others if name not in options]
