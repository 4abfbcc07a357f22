"""Paragraphs of docstrings whose last line has one or two words, over which a reader stumbles.

`python -m tests.paragraphs` lists them, and `--write` breaks their lines evenly: the same words in the same
number of lines. A paragraph that even lines do not mend stays, and so does a list, a table or an example.
"""

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = (
    "evictionary",
    "reference",
    "optimized",
    "spec_tests",
    "tests",
    "benchmarks",
    "conformance",
    "docs_build",
    "tutorials",
)
FEW = 2
"""Words that make a short line."""
WORD = re.compile(r"(?:`[^`]*`|\[[^\[\]]*\]|[^\s`\[])+|\S+")
"""A word, a formula or the axes of an array: no line ends inside it."""


def mended(text: str) -> str:
    """A file with the lines of such paragraphs broken evenly."""
    for start, stop in reversed([*docstrings(text)]):
        text = text[:start] + _mended(text[start:stop], start - text.rfind("\n", 0, start) - 1) + text[stop:]
    return text


def docstrings(text: str) -> Iterator[tuple[int, int]]:
    """Where each docstring of a file begins and ends, quotes included, in the order of the file."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            match node.body:
                case [ast.Expr(value=ast.Constant(value=str()) as said), *_]:
                    ends = (said.lineno, said.col_offset), (said.end_lineno or 0, said.end_col_offset or 0)
                    found.append([starts[line - 1] + column for line, column in ends])
    whole = text.encode()
    for start, stop in sorted(found):
        yield len(whole[:start].decode()), len(whole[:stop].decode())


def _mended(docstring: str, column: int) -> str:
    parts = re.split(r"(\n[ \t]*\n)", docstring.removesuffix('"""'))
    for place, part in enumerate(parts):
        lines = part.rstrip().split("\n")
        short = len(lines) > 1 and len(lines[-1].split()) <= FEW
        if short and not any(
            "    " in line.strip() or re.match(r"\s*([-*|>]|>>>) |\s*\w+:$", line) for line in lines
        ):
            first = column if place == 0 else len(lines[0]) - len(lines[0].lstrip())
            parts[place] = "\n".join(_evenly(lines, first)) + part[len(part.rstrip()) :]
    return "".join(parts) + '"""'


def _evenly(lines: list[str], first: int) -> list[str]:
    """The same words in as many lines, the shortest that hold them; `first` is the column of the first."""
    indents = {re.match(r"\s*", line)[0] for line in lines[1:]}  # type: ignore[index]
    words = WORD.findall(" ".join(line.strip() for line in lines))
    if len(indents) > 1:
        return lines
    (indent,), lead = indents, re.match(r"\s*", lines[0])[0]  # type: ignore[index]
    for width in range(50, 110):
        found = [" " * (first - len(lead)) + lead]
        for word in words:
            if len(found[-1]) + len(word) + 1 > width and found[-1].strip():
                found.append(indent)
            found[-1] += " " * bool(found[-1].strip()) + word
        if len(found) == len(lines):
            found[0] = found[0][first - len(lead) :]
            is_even = len(found[-1].split()) > FEW and max(map(len, found)) < 110
            return found if is_even else lines
    return lines


def files() -> list[Path]:
    """Every Python file of the project."""
    return sorted({path.resolve() for room in ROOMS for path in (ROOT / room).rglob("*.py")})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="break the lines of these paragraphs anew")
    write = parser.parse_args().write
    for path in files():
        text = path.read_text(encoding="utf-8")
        if (new := mended(text)) != text:
            print(path.relative_to(ROOT))
            if write:
                path.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
