"""Python sources: a file of the user as it is now; of a
function, its file, its signature and what it says first.
"""

import ast
import importlib.util
import inspect
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any


class _AsItIs(SourceFileLoader):
    """Compiles a file as it is: its bytecode passes for fresh
    if it is written twice in a second, at the same size.
    """

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def import_file(name: str, path: Path) -> ModuleType:
    """Import a file as a module of that name. Raises what the
    file raises, and nothing of it stays in sys.modules then.
    """
    spec = importlib.util.spec_from_file_location(
        name, path.resolve(), loader=_AsItIs(name, str(path.resolve()))
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # as an import does: a dataclass of the file looks itself up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def file_of(function: Callable[..., Any]) -> Path:
    """The file that a function is written in, and not that of its decorators; `?` if no file has it."""
    return Path(inspect.getsourcefile(inspect.unwrap(function)) or "?")


def signature(source: str) -> str:
    """The lines of a function or a class from `def` or `class`
    to the colon, as its source has them, without decorators.
    """
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.FunctionDef | ast.ClassDef)
    return "\n".join(source.splitlines()[definition.lineno - 1 : definition.body[0].lineno - 1])


def first_paragraph(text: str) -> str:
    """The first paragraph of a docstring, as one line."""
    return " ".join(text.strip().split("\n\n")[0].split())
