"""Whether `evictionary similar` tells a disguised copy from a file that somebody else wrote.

Right files come from the forms of the methods: two of them share no form of any part. Each is handed in again
in six disguises. docs/decisions.md has the numbers of this test beside those of the libraries.
"""

import ast
import copy
import inspect
import runpy
from collections.abc import Callable
from functools import partial
from itertools import combinations
from pathlib import Path

import classroom_styles
import pytest
from tools import ROOT, as_json, laid, says
from tools.grader import text_of

from evictionary.classroom import assignment as assignments, similar
from evictionary.cli import course as commands


def functions_of(tree: ast.AST) -> list[ast.FunctionDef]:
    return [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)]


def authors(assignment: str) -> list[str]:
    """Right files of an assignment, as many as share no form: the first has the first form of each part."""
    parts = runpy.run_path(str(classroom_styles.forms_of(assignment)))["FORMS"]
    tree = ast.parse(classroom_styles.whole(assignment))
    chosen = zip(*parts.values(), strict=False)
    return [
        only(tree, {part: form.__name__ for part, form in zip(parts, each, strict=True)}) for each in chosen
    ]


def only(tree: ast.Module, chosen: dict[str, str]) -> str:
    """The imports, and of the functions what these forms need; each form has the name of its part."""
    functions = {each.name: each for each in copy.deepcopy(tree).body if isinstance(each, ast.FunctionDef)}
    needed, asked = set[str](), [*chosen.values()]
    while asked:
        name = asked.pop()
        if name in functions and name not in needed:
            needed.add(name)
            names = {each.id for each in ast.walk(functions[name]) if isinstance(each, ast.Name)}
            asked += [chosen.get(each, each) for each in names]
    for part, form in chosen.items():
        functions[form].name = part
    imports = [each for each in tree.body if isinstance(each, ast.Import | ast.ImportFrom)]
    return ast.unparse(ast.Module([*imports, *(functions[name] for name in functions if name in needed)], []))


class _Renamed(ast.NodeTransformer):
    def __init__(self, kept: set[str]) -> None:
        self.kept = kept

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = node.id if node.id in self.kept else f"my_{node.id}"
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.arg = f"my_{node.arg}"
        return node


def renamed(text: str) -> str:
    """Each name that the student chose is another one."""
    tree = ast.parse(text)
    functions = {each.name for each in functions_of(tree)}
    imports = [each for each in tree.body if isinstance(each, ast.Import | ast.ImportFrom)]
    imported = {name.asname or name.name for each in imports for name in each.names}
    return ast.unparse(_Renamed(functions | imported | similar._PLAIN).visit(tree))


def turned_round(text: str) -> str:
    """The last function comes first."""
    tree = ast.parse(text)
    tree.body.sort(key=lambda each: (isinstance(each, ast.FunctionDef), -each.lineno))
    return ast.unparse(tree)


def explained(text: str) -> str:
    """Each line has a comment, and each function a text."""
    tree = ast.parse(text)
    for each in functions_of(tree):
        each.body.insert(0, ast.Expr(ast.Constant(f"This is what {each.name} does.")))
    return "\n".join(f"{line}  # mine" for line in ast.unparse(tree).splitlines())


class _Longer(ast.NodeTransformer):
    def visit_Return(self, node: ast.Return) -> list[ast.stmt]:
        assert node.value is not None
        named = ast.Assign([ast.Name("answer", ast.Store())], node.value)
        return [named, ast.Return(ast.Name("answer", ast.Load()))]


def longer(text: str) -> str:
    """Each result gets a name before it is returned."""
    return ast.unparse(ast.fix_missing_locations(_Longer().visit(ast.parse(text))))


def padded(text: str) -> str:
    """Each function begins with lines that do nothing."""
    tree = ast.parse(text)
    for each in functions_of(tree):
        each.body[:0] = ast.parse("unused = 0\nif unused:\n    unused = unused + 1").body
    return ast.unparse(ast.fix_missing_locations(tree))


def at_once(text: str) -> str:
    """All of these."""
    for disguise in (longer, padded, turned_round, renamed, explained):
        text = disguise(text)
    return text


DISGUISES: list[Callable[[str], str]] = [renamed, turned_round, explained, longer, padded, at_once]


LEAST = inspect.signature(commands.similar).parameters["least"].default
# The files of `kernel` differ in a few lines of one kernel, so they are no files of their own.
NAMES = [name for name in classroom_styles.names() if name != "kernel"]


def shared(starter: bytes, one: str, other: str) -> float:
    (pair,) = similar.pairs({"one": one.encode(), "other": other.encode()}, starter, least=0)
    return pair.share


@pytest.fixture(scope="module")
def shares() -> tuple[list[float], dict[str, list[float]]]:
    """The shares of files that two people wrote, and those of copies in each disguise."""
    own: list[float] = []
    copies: dict[str, list[float]] = {each.__name__: [] for each in DISGUISES}
    for name in NAMES:
        share = partial(shared, assignments.load(name).starter.read_bytes())
        files = authors(name)
        own += [share(*pair) for pair in combinations(files, 2)]
        for disguise in DISGUISES:
            copies[disguise.__name__] += [share(text, disguise(text)) for text in files]
    return own, copies


def test_a_disguised_copy_is_more_alike_than_any_two_files_of_their_own(
    shares: tuple[list[float], dict[str, list[float]]],
) -> None:
    own, copies = shares
    every = [share for found in copies.values() for share in found]
    assert (len(own), len(every)) == (32, 156)
    assert max(own) < min(every)


def test_the_page_of_decisions_has_these_numbers(shares: tuple[list[float], dict[str, list[float]]]) -> None:
    """Of the copies, those that the command shows by default; of files of their own, none."""
    own, copies = shares
    shown = sum(share >= LEAST for found in copies.values() for share in found)
    assert not [share for share in own if share >= LEAST]
    row = f"| ours | {shown} of 156 | 0 of 32 | {100 * max(own):.0f} % |"
    says(text_of(ROOT / "docs" / "decisions.md"), row)


@pytest.mark.parametrize("disguise", [renamed, explained])
def test_names_and_comments_hide_nothing(
    disguise: Callable[[str], str], shares: tuple[list[float], dict[str, list[float]]]
) -> None:
    assert {*shares[1][disguise.__name__]} == {1.0}


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_of_the_reference_shows_and_a_right_file_does_not(name: str, tmp_path: Path) -> None:
    """The reference is in what students install; a file of their own is right and not shown."""
    right, *_ = authors(name)
    ((own, model),) = similar.model(assignments.load(name).stem).items()
    stem = assignments.load(name).stem
    laid(tmp_path, {f"ada/{stem}.py": right, f"bob/{stem}.py": renamed(model.decode())})
    found = as_json("similar", tmp_path, "--assignment", name)
    assert [(pair["one"], pair["other"]) for pair in found["pairs"]] == [("bob", own)]
    assert found["submissions"] == 2


def test_an_assignment_without_a_reference_has_no_model() -> None:
    assert similar.model("nobody_wrote_it") == {}
