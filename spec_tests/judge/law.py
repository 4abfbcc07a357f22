"""A law: a test of one requirement, quantified over drawn inputs, that any implementation can be put to."""

import ast
import functools
import hashlib
import importlib
import inspect
import math
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, reject, settings
from hypothesis.strategies import SearchStrategy

from evictionary.errors import require
from evictionary.source import first_paragraph
from evictionary.spec_tests.judge.degenerate import KINDS, MATHEMATICS, REFUSAL
from evictionary.spec_tests.judge.domain import Domain, NothingToAsk, OutsideDomain

SUITE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Requirement:
    """One equation, theorem, table or claim of a paper, or
    one shared rule; the unit in which verdicts are given.

    `statement` is what the paper prints in the `version` that was read, and `verdict` what became of it:
    definition, true, restored (its text was lost), measured, or the grades of its errata. `mended` says what
    holds, where that is another or a narrower statement. `no_law` says why a requirement has no law, where it
    has none. An equation has a `name`, and `tex`, the formula as printed; `mended_tex` is the formula that
    holds, or of a definition the one that is used, where it differs.
    """

    id: str
    paper: str
    statement: str
    where: str = ""
    verdict: str = "definition"
    no_law: str = ""
    name: str = ""
    tex: str = ""
    mended: str = ""
    mended_tex: str = ""
    version: str = ""

    @property
    def source(self) -> str:
        """The paper and the place in it."""
        return f"{self.paper}, {self.where}" if self.where else self.paper


def _read_requirements() -> dict[str, Requirement]:
    found = {}
    for path in sorted(SUITE.glob("*/requirements.toml")):
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        of_all = {name: content.pop(name) for name in ("paper", "version") if name in content}
        for identifier, fields in content.items():
            require(identifier not in found, f"{identifier}: {path} has it, and another folder too", KeyError)
            found[identifier] = Requirement(id=identifier, **of_all, **fields)
    return found


REQUIREMENTS = _read_requirements()


@functools.cache
def suite_version() -> dict[str, str]:
    """The version of the suite and a digest of its laws and of the mathematics that they compare with."""
    digest = hashlib.sha256()
    for folder in (SUITE, SUITE.parent / "reference"):
        for path in sorted(folder.rglob("*.py")) + sorted(folder.rglob("*.toml")):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    try:
        number = version("evictionary")
    except PackageNotFoundError:
        number = "unknown"
    return {"version": number, "sha256": digest.hexdigest()}


# What every verdict depends on beside the laws and the mathematics of its own method. contract.py is left
# out: it hands on what it is given, and tests hold what it refuses.
COMMON = tuple(
    [
        SUITE.parent / "reference" / f"{name}.py"
        for name in ("attention", "cache", "checks", "rope", "selection")
    ]
    + [
        SUITE / "judge" / f"{name}.py"
        for name in ("arithmetic", "by_hand", "cases", "degenerate", "domain", "sizes", "tolerance")
    ]
)


@functools.cache
def laws_version(folder: str) -> str:
    """A digest of the code that judges the functions of a folder of the suite: `keydiff`, or `shared`.

    It covers laws, mathematics and COMMON; no comments or docstrings, no mistakes or variants.
    """
    mathematics, laws = SUITE.parent.glob(f"reference/{folder}*.py"), SUITE.glob(f"{folder}/*.py")
    own = [path for path in laws if path.stem == "helpers" or path.stem.startswith("test_")]
    digest = hashlib.sha256()
    for path in sorted({*mathematics, *own, *COMMON}):
        digest.update(f"{path.name}\0{ast.unparse(_tree(path))}\0".encode())
    return digest.hexdigest()


@functools.cache
def law_version(name: str, folder: str) -> str:
    """A digest of the code by which one law judges the mistakes of a folder: the law with what stands beside
    it in its file, the helpers of its folder, the mathematics of both, and COMMON.

    It covers no other law. A law that is made from the contract depends on what the contract refuses too.
    """
    test = name.partition("::")[2]
    file = SUITE / LAWS[name].path
    helpers = [path for path in file.parent.glob("*.py") if path.stem not in OF_PROOF]
    beside = [path for path in helpers if not path.stem.startswith("test_")]
    mathematics = [
        path
        for each in dict.fromkeys((file.parent.name, folder))
        for path in SUITE.parent.glob(f"reference/{each}*.py")
    ]
    is_made = test not in {law for law, _ in _pieces(file)}
    refusing = [SUITE.parent / "reference" / "contract.py", SUITE / "judge" / "misfits.py"] if is_made else []
    return _digest(sorted({*mathematics, *beside, *COMMON, *refusing}), file, test)


OF_PROOF = ("forms", "mutants", "variants")
"""Files of a folder that judge nothing."""


def _digest(paths: Iterable[Path], file: Path, only: str) -> str:
    """A digest of what files say; of `file`, of what is no law and of the one law `only`."""
    said = [(path.name, text) for path in paths for _, text in _pieces(path)]
    said += [(file.name, text) for law, text in _pieces(file) if law in ("", only)]
    return hashlib.sha256(repr(said).encode()).hexdigest()[:16]


@functools.cache
def _pieces(path: Path) -> list[tuple[str, str]]:
    """What a file says: each law with its name, and all else with an empty one."""
    return [(_law_name(node), ast.unparse(node)) for node in _tree(path).body]


def _tree(path: Path) -> ast.Module:
    """The code of a file, without comments, docstrings, values that papers use of a setting, and what is said
    of an answer: all of these describe the code and change nothing that it does.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if not _imports_notation(node)]
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)
            and ast.get_docstring(node, clean=False) is not None
        ):
            node.body[0] = ast.Pass()
        if isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == "Setting":
            del node.slice.elts[2:]  # type: ignore[attr-defined]
        if isinstance(node, ast.FunctionDef):
            node.returns = None
    return tree


def _imports_notation(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and (node.level, node.module) == (1, "contract")


def _law_name(node: ast.stmt) -> str:
    """The name of a function that is decorated as a law; empty for anything else."""
    if not isinstance(node, ast.FunctionDef):
        return ""
    decorators = [each.func for each in node.decorator_list if isinstance(each, ast.Call)]
    return node.name if any(getattr(each, "id", "") == "law" for each in decorators) else ""


@dataclass(frozen=True)
class Law:
    """A registered law: the requirement it holds to, the
    functions it calls (`keydiff.score`), and the test itself.

    `path` is the file that it is written in, from the folder of the suite
    (`keydiff/test_keydiff.py`), empty for one that is in no file of it; `name` is
    the stem of that file and the test: `test_keydiff::test_scores_are_cosines`.
    """

    requirement: Requirement
    functions: tuple[str, ...]
    name: str
    sentence: str
    why: str
    check: Callable[..., None]
    drawn: dict[str, SearchStrategy]
    not_for: Callable[[Any], str]
    kind: str = MATHEMATICS
    brute_force: bool = False
    examples: int = 0
    path: str = ""

    @property
    def place(self) -> tuple[str, int]:
        """Where it stands in the specification: the file, and the line. What is most basic comes first."""
        return self.path, inspect.unwrap(self.check).__code__.co_firstlineno

    @property
    def relates(self) -> bool:
        """Whether it relates answers of one implementation by a verb for that, whatever their numbers are."""
        return not RELATING.isdisjoint(inspect.unwrap(self.check).__code__.co_names)

    @property
    def in_words(self) -> str:
        """Its name as words: `scores move with their tokens`."""
        return self.name.partition("::")[2].removeprefix("test_").replace("_", " ")

    def missing(self, implementation: Any) -> tuple[str, str]:
        """Why the law cannot judge this implementation: ("not provided" or "not applicable", the reason),
        or two empty strings.
        """
        if reason := implementation.missing(self.functions):
            return "not provided", reason
        if reason := self.not_for(implementation):
            return "not applicable", reason
        if self.kind == REFUSAL and "unchecked" in implementation.conventions:
            return "not applicable", "it checks no argument"
        domain: Domain = implementation.domain
        if self.brute_force and max(domain.min_length, domain.length_multiple_of) > 5:
            return "not applicable", "it tries every choice among a few tokens, fewer than the domain allows"
        return "", ""

    def test(self, profile: settings | None = None) -> Callable[..., None]:
        """The check quantified over its inputs, as hypothesis runs it; a new one each time, so that
        settings can differ.

        profile, settings of hypothesis; without, those that were loaded.
        """
        if not self.drawn:
            return self.check
        quantified = given(**self.drawn)(self.check)
        if self.examples:
            profile = profile or settings()
            few = max(1, self.examples * profile.max_examples // 50)
            # What is large does not shrink to something that a person checks by hand.
            profile = settings(profile, max_examples=few, phases=[Phase.explicit, Phase.generate])
        return profile(quantified) if profile else quantified


# The verbs that relate answers of one implementation (`compare.py`).
RELATING = frozenset({"same", "itself", "move_with_tokens", "same_alone"})

LAWS: dict[str, Law] = {}


def load_laws() -> dict[str, Law]:
    """Import every `test_*.py` of the suite and return the laws by name."""
    import_all("test_*.py")
    return LAWS


@functools.cache
def import_all(pattern: str) -> None:
    """Import the files of the suite's folders whose names match."""
    for path in sorted(SUITE.glob(f"*/{pattern}")):
        importlib.import_module(f"evictionary.spec_tests.{path.parent.name}.{path.stem}")


def judging_files(suite: Path = SUITE, stems: Iterable[str] = ()) -> list[Path]:
    """The files of laws that judge an implementation, of these stems or of all.

    Those about a paper alone are in `papers/`.
    """
    found = sorted(suite.glob("*/test_*.py"), key=lambda path: path.stem)
    found = [path for path in found if path.parent.name != "papers"]
    begun = tuple(f"test_{stem}_" for stem in stems)
    return [path for path in found if f"{path.stem}_".startswith(begun)] if begun else found


# After so many inputs outside the domain, and none inside, a law is not applicable.
ENOUGH_OUTSIDE = 30


def law(
    requirement: str,
    *,
    of: str | tuple[str, ...] = (),
    why: str = "",
    not_for: Callable[[Any], str] = lambda implementation: "",
    kind: str = MATHEMATICS,
    brute_force: bool = False,
    examples: int = 0,
    **drawn: SearchStrategy,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test function the law of a requirement.

    With `of` it judges an implementation. Without, it is about the paper alone (a theorem, a counterexample,
    a recomputed figure): it takes no `impl`, runs once, and stands in a file of `papers/`.

    Args: requirement, an id of a `requirements.toml`; of, the function or functions of the implementation
    that the law calls (an implementation without them is reported as not providing them); why, for a law that
    kills no mutant, what it is there for; not_for, given an implementation, says why the law does not apply
    to it (an empty string: it does); kind, one of mathematics, edge (a degenerate input whose meaning is our
    decision) and refusal (bad input raises); brute_force, for a law that tries every choice among few tokens;
    examples, for a law of long inputs: how many it draws where others draw 50; drawn, a hypothesis strategy
    for each further argument. The test receives `impl`, the implementation, and the drawn arguments. The
    first paragraph of its docstring is the sentence that a failure prints. Raises KeyError for an unknown
    requirement or kind.
    """
    functions = (of,) if isinstance(of, str) else of

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        path = Path(test.__code__.co_filename).resolve().relative_to(SUITE)
        name = f"{path.stem}::{test.__name__}"

        @functools.wraps(test)
        def judging(impl: Any, **arguments: Any) -> None:
            impl.begin(name)
            impl.asking = kind
            impl.drawn = impl.domain.fitted(arguments)
            asked = -math.inf
            past = list(impl.history) if examples else []
            try:
                test(impl, **impl.drawn)
            except OutsideDomain as error:
                impl.outside, asked = str(error), ENOUGH_OUTSIDE if error.always else 1
                if not drawn or impl.outside_of[name] + asked >= ENOUGH_OUTSIDE:
                    raise NothingToAsk(impl.outside) from None
                reject()
            finally:
                impl.outside_of[name] += asked
                if examples:  # 64 long inputs, which the history would hold, are gigabytes
                    impl.history.clear()
                    impl.history.extend(past)

        check: Callable[..., None] = judging if functions else test
        sentence = first_paragraph(test.__doc__ or test.__name__)
        if kind not in KINDS:
            raise KeyError(f"{name}: kind={kind!r}, wanted one of {', '.join(KINDS)}")
        LAWS[name] = Law(
            REQUIREMENTS[requirement],
            functions,
            name,
            sentence,
            why,
            check,
            drawn,
            not_for,
            kind,
            brute_force,
            examples,
            path.as_posix(),
        )
        return pytest.mark.law(LAWS[name])(LAWS[name].test())

    return decorate
