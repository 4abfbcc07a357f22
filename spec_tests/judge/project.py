"""A project names its functions in pyproject.toml; then
`pytest` asks their laws beside the tests of the project.

    [tool.evictionary.functions]
    "keydiff.score" = "my_kernels.scores:keydiff"

    [tool.evictionary]
    dtype = ["float32", "bfloat16"]      # also device, profile, strict, domain and conventions

`evictionary judge pyproject.toml` asks the same laws.
"""

import importlib
import re
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

FILE = "pyproject.toml"
PROFILES = {"quick": 4, "student": 25, "default": 50, "thorough": 500}
"""How many inputs a law draws, by the name of a profile."""

FORMS = {
    "functions": dict,
    "dtype": list,
    "device": str,
    "profile": str,
    "strict": bool,
    "domain": dict,
    "conventions": list,
}


class BadProject(Exception):
    """The table of a project cannot be used; the message names the key, what was got and what is wanted."""


def table(path: Path) -> dict[str, Any]:
    """The table `[tool.evictionary]` of a pyproject.toml; empty where it names no functions, or where
    there is no such file.
    """
    if not path.is_file() or "tool.evictionary" not in (text := path.read_text(encoding="utf-8")):
        return {}
    try:
        found = tomllib.loads(text).get("tool", {}).get("evictionary", {})
    except tomllib.TOMLDecodeError as error:
        raise BadProject(f"{path.name}: {error}") from None
    for key, value in found.items():
        if key not in FORMS or not isinstance(value, FORMS[key]):
            kinds = ", ".join(f"{name} ({form.__name__})" for name, form in FORMS.items())
            raise BadProject(f"{path.name}: tool.evictionary.{key}: got {value!r}, wanted one of {kinds}")
    return found if found.get("functions") else {}


def modules(path: Path, known: frozenset[str]) -> tuple[dict[str, types.ModuleType], types.ModuleType]:
    """The functions that a project names, as modules like those of `reference/`, and what it says of them
    as their package.
    """
    sys.path[:0] = [str(folder) for folder in (path.parent / "src", path.parent) if folder.is_dir()]
    said = table(path)
    found: dict[str, types.ModuleType] = {}
    for name, place in said.get("functions", {}).items():
        where = f"{path.name}: tool.evictionary.functions: {name}"
        if name not in known:
            raise BadProject(
                f"{where}: no such function, wanted one such as keydiff.score (`evictionary contract` lists "
                "them)"
            )
        if not isinstance(place, str) or not re.fullmatch(r"[\w.]+:[\w.]+", place):
            raise BadProject(
                f"{where}: got {place!r}, wanted a module and a function: 'my_package.kernels:score'"
            )
        module, _, attribute = place.partition(":")
        try:
            function = importlib.import_module(module)
            for part in attribute.split("."):
                function = getattr(function, part)
        except Exception as error:
            raise BadProject(f"{where}: importing {place} raised {type(error).__name__}: {error}") from error
        stem, _, own = name.partition(".")
        setattr(found.setdefault(stem, types.ModuleType(stem)), own, function)
    package = types.ModuleType(path.resolve().parent.name)
    package.DOMAIN = said.get("domain", {})  # type: ignore[attr-defined]
    # Without `strict` the laws of refusals would fail and not count: they are not asked.
    unchecked = () if said.get("strict") else ("unchecked",)
    package.CONVENTIONS = tuple({*said.get("conventions", ()), *unchecked})  # type: ignore[attr-defined]
    return found, package


def options(path: Path) -> list[str]:
    """The arguments of pytest that ask the laws of a
    project's functions; none where it names no functions.
    """
    if not (said := table(path)):
        return []
    # Here, since every run of pytest beside an installed evictionary loads this file and few go on.
    from evictionary.spec_tests.judge.law import SUITE, judging_files

    files = judging_files(stems={name.split(".")[0] for name in said["functions"]} | {"memory"})
    named = [
        f"--{key}={({'profile': 'student', 'device': 'cpu'} | said)[key]}" for key in ("device", "profile")
    ]
    named += [f"--dtype={','.join(said['dtype'])}"] if said.get("dtype") else []
    if said.get("strict"):
        named.append("--strict")
        files.append(SUITE / "shared" / "test_refusals.py")
    return [f"--impl={path}", "--brief", *named, *map(str, files)]
