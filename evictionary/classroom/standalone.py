"""A function of the reference and what it calls, as one
short file to read: no checks, nothing to install but NumPy.

A reader of a task wants the formula. So the text of each function comes as it stands in `reference/`, with
its comments, and three things go: what refuses bad input, the sentences about it, and the imports between
files. A name that two files use for two things gets its file in front.
"""

import ast
import itertools
import re
import textwrap
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from evictionary import reference

FOLDER = Path(next(iter(reference.__path__)))
REFUSING = re.compile(r"require\w*")
"""They return nothing."""

INDENT = " " * 4

Key = tuple[str, str]
"""A file of the reference and a name in it."""


@dataclass
class Module:
    """A file of the reference: its text, what it defines, and where its other names come from."""

    stem: str
    text: str
    defined: dict[str, ast.stmt] = field(default_factory=dict)
    imported: dict[str, Key] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    libraries: dict[str, str] = field(default_factory=dict)

    @cached_property
    def lines(self) -> list[str]:
        """The lines of the text, each with its end."""
        return self.text.splitlines(keepends=True)

    @cached_property
    def starts(self) -> list[int]:
        """Where each line begins in the text, and where the text ends."""
        return [0, *itertools.accumulate(map(len, self.lines))]

    def at(self, node: Any) -> tuple[int, int]:
        """Where a node begins and ends in the text. The text is ASCII, so a byte is a character."""
        start = self.starts[node.lineno - 1] + node.col_offset
        return start, self.starts[node.end_lineno - 1] + node.end_col_offset

    def key(self, node: ast.AST) -> Key | None:
        """What of the reference a name means here, or `file.name`."""
        match node:
            case ast.Name(id=name) if name in self.defined:
                return self.stem, name
            case ast.Name(id=name):
                return self.imported.get(name)
            case ast.Attribute(value=ast.Name(id=file), attr=name) if file in self.files:
                return self.files[file], name
        return None


@cache
def module(stem: str) -> Module:
    """A file of the reference, read."""
    text = (FOLDER / f"{stem}.py").read_text(encoding="ascii")
    found = Module(stem, text)
    for node in ast.parse(text).body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.defined[name] = node
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                found.defined[name] = node
            case ast.Assign(targets=[ast.Tuple(elts=several)]):
                found.defined |= {ast.unparse(each): node for each in several}
            case ast.ImportFrom(level=1, module=None):
                found.files |= {each.asname or each.name: each.name for each in node.names}
            case ast.ImportFrom(level=1, module=str(other)):
                found.imported |= {each.asname or each.name: (other, each.name) for each in node.names}
            case ast.Import() | ast.ImportFrom():
                for each in node.names:
                    found.libraries[each.asname or each.name] = ast.unparse(
                        ast.Import([each])
                        if isinstance(node, ast.Import)
                        else ast.ImportFrom(node.module, [each], 0)
                    )
    return found


def standalone(path: str) -> str:
    """The text of a function `file.name` of the reference as a file of its own, the function first."""
    stem, name = path.split(".")
    parts: dict[Key, Part] = {}
    _collect((stem, name), parts)
    names = _names(parts, (stem, name))
    libraries = sorted({line for part in parts.values() for line in part.libraries()})
    functions = [key for key in parts if isinstance(parts[key].node, ast.FunctionDef)]
    # What is no function is needed when the file is read, and so is a function that is a default.
    first = [key for key in reversed(parts) if key not in functions]
    first += [key for part in parts.values() for key in part.defaults()]
    body = "\n\n\n".join(parts[key].written(names) for key in dict.fromkeys([*first, *functions]))
    return "from __future__ import annotations\n\n" + "\n".join(libraries) + f"\n\n\n{body}\n"


def _collect(key: Key, parts: "dict[Key, Part]") -> None:
    """Add a definition and all that it needs, in the order in which a reader meets them."""
    if key in parts:
        return
    stem, name = key
    node = module(stem).defined[name]
    if any(part.node is node for part in parts.values()):  # two constants of one line
        return
    parts[key] = Part(module(stem), node)
    for needed in parts[key].uses():
        _collect(needed, parts)


def _names(parts: "dict[Key, Part]", entry: Key) -> dict[Key, str]:
    """The name of each definition in the file: its own, unless another has it."""
    found = {entry: entry[1]}
    for stem, name in parts:
        found.setdefault((stem, name), f"{stem}_{name}" if name in found.values() else name)
    return found


def _without_refusals(paragraph: str) -> str:
    """A paragraph of a docstring without the sentence that says what is refused."""
    found = re.sub(r"\s*Raises\s+\w*Error.*?(?=\s+Source:|\Z)", "", paragraph, flags=re.DOTALL)
    if found == paragraph:
        return paragraph
    first = INDENT * paragraph.startswith(INDENT)
    return textwrap.fill(" ".join(found.split()), 100, initial_indent=first, subsequent_indent=INDENT)


Edit = tuple[int, int, str]
"""Characters from one place to another, and what stands there instead."""


class Part:
    """A definition of the reference, and how its text changes."""

    def __init__(self, of: Module, node: ast.stmt) -> None:
        self.module, self.node = of, node
        self.edits: list[Edit] = []
        self.names: list[tuple[ast.AST, Key]] = []
        self.own = self._bound()
        self._visit(node)

    def _bound(self) -> set[str]:
        """The names that a function gives to its arguments and to what it computes."""
        return {
            each.arg if isinstance(each, ast.arg) else each.id
            for each in ast.walk(self.node)
            if isinstance(each, ast.arg) or (isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))
        } - {getattr(self.node, "name", None)}

    def uses(self) -> list[Key]:
        """The definitions that are named, in order."""
        return list(dict.fromkeys(key for _, key in self.names))

    def defaults(self) -> list[Key]:
        """The functions that are the default of an argument."""
        if not isinstance(self.node, ast.FunctionDef):
            return []
        given = [*self.node.args.defaults, *self.node.args.kw_defaults]
        found = [self.module.key(each) for each in given if each is not None]
        return [key for key in found if key is not None]

    def libraries(self) -> set[str]:
        """The lines that import what is named of other libraries."""
        text = self.written({key: key[1] for key in self.uses()})
        known = module("checks").libraries | self.module.libraries
        return {line for name, line in known.items() if re.search(rf"\b{name}\b", text)}

    def _visit(self, node: ast.AST) -> None:
        """Note what changes below a node."""
        if self._refuses(node):
            return self._drop(node)
        match node:
            case ast.Call(func=func, args=[_, value]) if self._of_checks(func) == "as_count":
                return self._leave(node, value)
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Tuple(elts=[said, *_])) if (
                self._of_contract(name)
            ):
                return self._leave(node, said)
            case ast.FunctionDef():
                self._shorten(node)
                self._exact(node)
                for part in [node.args, *node.body, *filter(None, [node.returns])]:
                    self._visit(part)
                return None
            case ast.Name() | ast.Attribute():
                key = self.module.key(node)
                if key and getattr(node, "id", None) not in self.own and not self._hides(node):
                    self.names.append((node, key))
                    return None
            case ast.ClassDef():
                self._shorten(node)
        for child in ast.iter_child_nodes(node):
            self._visit(child)
        return None

    def _refuses(self, node: ast.AST) -> bool:
        """Whether a statement does nothing but refuse."""
        match node:
            case ast.Expr(value=ast.Call(func=func)):
                return REFUSING.fullmatch(self._of_checks(func)) is not None
            case ast.If(body=body, orelse=[]) | ast.For(body=body):
                return all(map(self._refuses, body))
        return isinstance(node, ast.Raise)

    def _of_contract(self, name: str) -> bool:
        """Whether a name says what an argument is."""
        return self.module.imported.get(name, ("", ""))[0] == "contract"

    def _exact(self, node: ast.FunctionDef) -> None:
        """Read a setting as it is written, where the contract does: 0.9 is nine tenths."""
        for each in [*node.args.args, *node.args.kwonlyargs]:
            said = ast.unparse(each.annotation) if each.annotation else ""
            if said.startswith("Setting[") and "Fraction" in said:
                place = self.module.starts[node.body[1].lineno - 1]
                self.edits.append((place, place, f"{INDENT}{each.arg} = Fraction(str({each.arg}))\n"))

    def _hides(self, node: ast.AST) -> bool:
        """Whether an argument has the name of the file that an attribute seems to be of."""
        return isinstance(node, ast.Attribute) and getattr(node.value, "id", None) in self.own

    def _of_checks(self, func: ast.AST) -> str:
        """The name of a function of the checks, or nothing."""
        stem, name = self.module.key(func) or ("", "")
        return name if stem == "checks" else ""

    def _leave(self, node: ast.AST, part: ast.expr) -> None:
        """Put a part of an expression in its place."""
        self.edits.append((self.module.at(node)[0], self.module.at(part)[0], ""))
        self.edits.append((self.module.at(part)[1], self.module.at(node)[1], ""))
        self._visit(part)

    def _drop(self, node: Any) -> None:
        """Leave out a statement, with the comment in front of it."""
        first, starts = node.lineno - 1, self.module.starts
        while self.module.lines[first - 1].strip().startswith("#"):
            first -= 1
        self.edits.append((starts[first], starts[node.end_lineno], ""))

    def _shorten(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        """Leave the sentences about refusals out of a docstring."""
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            start, end = self.module.at(first)
            paragraphs = self.module.text[start:end].removesuffix('"""').rstrip().split("\n\n")
            paragraphs[1:1] = self._axes(node)
            said = "\n\n".join(map(_without_refusals, paragraphs)).rstrip()
            # Quotes behind a text of several lines stand alone.
            self.edits.append((start, end, said + "\n    " * ("\n" in said) + '"""'))

    def _axes(self, node: ast.FunctionDef | ast.ClassDef) -> list[str]:
        """A paragraph with the axes of the arrays that a function takes and gives, as its signature says."""
        if isinstance(node, ast.ClassDef):
            return []
        taken = [
            f"{each.arg} {axes}"
            for each in [*node.args.args, *node.args.kwonlyargs]
            if (axes := self._said(each.annotation))
        ]
        match node.returns:
            case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=parts)):
                given = [axes for part in parts if (axes := self._said(part))]
            case one:
                given = [axes] if (axes := self._said(one)) else []
        said = [*taken, *([f"the answer {' and '.join(given)}"] if given else [])]
        lines = textwrap.wrap("; ".join(said) + ".", 96)
        return [textwrap.indent("\n".join(lines), INDENT)] if said else []

    def _said(self, annotation: ast.expr | None) -> str:
        """The axes of an array as its annotation says them, `[B, H_kv, T]`; empty for anything else."""
        match annotation:
            case ast.Subscript(
                value=ast.Name(id=kind), slice=ast.Tuple(elts=[_, ast.Constant(value=text)])
            ) if self._of_contract(kind) and kind not in ("Setting", "State"):
                return f"[{', '.join(str(text).split())}]"
        return ""

    def written(self, names: dict[Key, str]) -> str:
        """The text of the definition, with these names."""
        start, end = self.module.at(self.node)
        edits = [*self.edits, *((*self.module.at(node), names.get(key, key[1])) for node, key in self.names)]
        if hasattr(self.node, "name"):
            name = names.get((self.module.stem, self.node.name), self.node.name)
            at = self.module.text.index(self.node.name, start)
            edits.append((at, at + len(self.node.name), name))
        text, done = "", start
        for first, last, new in sorted(edits):
            text += self.module.text[done:first] + new
            done = last
        return re.sub(r"  # type: ignore\[.*", "", text + self.module.text[done:end])
