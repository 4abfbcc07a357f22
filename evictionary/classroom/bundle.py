"""The reference of a method as one file that imports only NumPy: what a student hands in who has it right."""

import re
from pathlib import Path

from evictionary import reference
from evictionary.spec_tests.judge.implementation import STEMS

_LOADER = '''"""A whole package in one file: what a student hands in who has it right, or who has made one mistake."""

import sys
import types

SOURCES = {sources!r}
for name, source in SOURCES.items():
    module = sys.modules[name] = types.ModuleType(name)
    parent, _, stem = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], stem, module)
    else:
        module.__path__ = []
    exec(compile(source, name, "exec"), vars(module))
for name, value in vars(sys.modules["bundled.{stem}"]).items():
    if not name.startswith("_"):
        globals()[name] = value
{last}
'''


def bundled(stem: str) -> str:
    """The file of a method of the reference."""
    return packed(stem, sources())


def packed(stem: str, sources: dict[str, str], last: str = "") -> str:
    """One file of these modules, with the names of the method's module; `last` is the end of the file."""
    return _LOADER.format(sources=sources, stem=stem, last=last)


def sources() -> dict[str, str]:
    """The text of each module of the reference, by its name in the file, after those that it imports."""
    found = {"bundled": ""}
    for name in STEMS:
        add(name, found)
    return found


def add(name: str, sources: dict[str, str]) -> None:
    """Add a module of the reference after those that it imports."""
    source = (Path(next(iter(reference.__path__))) / f"{name}.py").read_text(encoding="utf-8")
    for module, listed in re.findall(r"^from \.(\w*) import \(?([\w, ]*)", source, flags=re.MULTILINE):
        for needed in [module] if module else re.findall(r"\w+", listed):
            if f"bundled.{needed}" not in sources:
                add(needed, sources)
    sources.setdefault(f"bundled.{name}", renamed(source))


def renamed(source: str) -> str:
    """The text of a module of the project, with the names that modules have in the file."""
    source = source.replace("evictionary.spec_tests.judge.implementation", "bundled.oracle")
    source = re.sub(r"(spec_tests)\.(judge|proof)\.", r"\1.", source)
    source = re.sub(
        r"^from \.(\w*) import",
        lambda found: f"from bundled.{found[1]} import".replace(". ", " "),
        source,
        flags=re.M,
    )
    return re.sub(r"\bfrom evictionary\.(reference|spec_tests)\b", "from bundled", source)
