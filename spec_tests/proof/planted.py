"""What is planted to measure the laws: wrong implementations that must die, and correct ones on which no
law may raise an alarm.

A mutant is a mistake that people make, with the requirement that must kill it and the misconception behind
it; when an implementation fails with the numbers of a mutant, the report names that mistake. A control is
correct but different.
"""

import copy
import functools
import hashlib
import importlib
import inspect
import tomllib
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from evictionary.errors import require
from evictionary.reference.contract import contract, naming
from evictionary.spec_tests.judge.domain import Domain
from evictionary.spec_tests.judge.implementation import STEMS, Implementation, oracle
from evictionary.spec_tests.judge.law import REQUIREMENTS, SUITE, import_all
from evictionary.spec_tests.judge.libraries import to_numpy


@dataclass(frozen=True)
class Mutant:
    """A wrong implementation of the function `of`; `killed_by` is the requirement whose laws must kill it.

    It is written as a function, or as the right one with `edits`: pairs of a text of its source and what
    stands there instead. One that is right up to some size says it in `above`: "4,096 tokens".
    """

    name: str
    of: str
    killed_by: str
    misconception: str
    written: Callable[..., Any] | None = None
    array_library: str = "numpy"
    edits: tuple[tuple[str, str], ...] = ()
    edited: str = ""  # the function whose source is edited, where that is not `of`
    above: str = ""

    @functools.cached_property
    def function(self) -> Callable[..., Any]:
        """What is called in the place of the right function."""
        return self.written or edited(self.of, self.edited or self.of, self.edits)

    @property
    def version(self) -> str:
        """A digest of what is wrong, and of the requirement that it breaks."""
        source = inspect.getsource(self.written) if self.written else ""
        told = (self.of, self.killed_by, self.array_library, self.edits, self.edited, self.above, source)
        return hashlib.sha256(repr(told).encode()).hexdigest()[:16]

    def implementation(self, dtype: str | None = None) -> Implementation:
        """The reference with this one function replaced, judged at a dtype: without one at float64, and
        float32 for torch.
        """
        in_torch = self.array_library == "torch"
        fields = {
            "array_library": self.array_library,
            "dtype": dtype or ("float32" if in_torch else "float64"),
        }
        return replaced(f"mutant {self.name}", {self.of: self.function}, **fields)


MUTANTS: dict[str, Mutant] = {}


def mutant(
    of: str, *, killed_by: str, misconception: str, array_library: str = "numpy", above: str = ""
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Plant the decorated function as a wrong `of`; the misconception completes "your numbers match a
    known bug: ...".
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        name = f"{of.split('.')[0]}.{function.__name__}"
        _plant(Mutant(name, of, killed_by, misconception, function, array_library, above=above))
        return function

    return decorate


def _plant(mutant: Mutant) -> None:
    require(
        mutant.killed_by in REQUIREMENTS,
        f"{mutant.name}: killed_by={mutant.killed_by!r} is no requirement",
        KeyError,
    )
    require(mutant.name not in MUTANTS, f"{mutant.name}: planted twice", KeyError)
    MUTANTS[mutant.name] = mutant


def load_mutants() -> dict[str, Mutant]:
    """Read every file `mutants*`, functions (.py) and edits (.toml), and return the mutants by name."""
    import_all("mutants*.py")
    _plant_edits()
    return MUTANTS


@functools.cache
def _plant_edits() -> None:
    for path in sorted(SUITE.glob("*/mutants*.toml")):
        for name, entry in tomllib.loads(path.read_text(encoding="utf-8")).items():
            edits = edits_of(entry.pop("was", []), entry.pop("is", []))
            for key, how in (("before", made_to_fit), ("instead", never_refused)):
                if text := entry.pop(key, ""):
                    edits += ((CHECKED, f"@{how.__name__}({text!r})\n{CHECKED}"),)
            _plant(
                Mutant(
                    f"{entry['of'].split('.')[0]}.{name}", edited=entry.pop("in", ""), edits=edits, **entry
                )
            )


CHECKED = "@contract\n"
"""The line above a function that checks its arguments."""


def made_to_fit(text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The mistake `before`: what these lines do to the arguments, before they are checked."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def changed(*args: Any, **kwargs: Any) -> Any:
            given, scope = given_to(function, args, kwargs)
            exec(text, scope)
            return function(**{name: scope[name] for name in given})

        return changed

    return decorate


def never_refused(text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The mistake `instead`: this expression of the arguments is the answer where they should be refused."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def answered(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except ValueError:
                return eval(text, given_to(function, args, kwargs)[1])

        return answered

    return decorate


def given_to(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of a call by name, defaults too, and names for lines that compute with them."""
    given = naming(inspect.signature(function))(*args, **kwargs)
    return given, inspect.unwrap(function).__globals__ | given


AROUND = {each.__name__: each for each in (made_to_fit, never_refused)}
"""What the source of such a mistake names above the check."""


def edits_of(was: str | list[str], now: str | list[str]) -> tuple[tuple[str, str], ...]:
    """The edits that an entry of a TOML file says: one, or a list of them."""
    return tuple(zip(was, now, strict=True)) if isinstance(was, list) else ((was, now),)  # type: ignore[return-value]


def edited_source(path: str, edits: Iterable[tuple[str, str]]) -> str:
    """The source of the function `path` of the reference,
    with the edits made; ValueError as `edited_text` says.
    """
    return edited_text(path, inspect.getsource(oracle(path)), edits)


def edited_text(path: str, source: str, edits: Iterable[tuple[str, str]]) -> str:
    """The source with the edits made. Raises ValueError where
    a text to be replaced does not stand in it exactly once.
    """
    for was, now in edits:
        require(
            source.count(was) == 1,
            f"{path}: got {source.count(was)} places of {was!r}, wanted exactly one to edit",
            ValueError,
        )
        source = source.replace(was, now)
    return source


def copied(
    function: Callable[..., Any], code: types.CodeType | None = None, scope: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """A function of a module once more, with its checks; with other code, or with other globals."""
    own = inspect.unwrap(function)
    assert isinstance(own, types.FunctionType)
    scope = own.__globals__ if scope is None else scope
    copy = types.FunctionType(code or own.__code__, scope, own.__name__, own.__defaults__, own.__closure__)
    copy.__kwdefaults__ = own.__kwdefaults__
    copy.__annotations__ = own.__annotations__
    copy.__module__ = own.__module__
    return copy if own is function else contract(copy)


def again(module: types.ModuleType) -> dict[str, Any]:
    """The functions of a module once more, with globals of their own."""
    scope = dict(vars(module))
    scope |= {
        name: copied(member, scope=scope)
        for name, member in vars(module).items()
        if inspect.isfunction(member) and inspect.unwrap(member).__globals__ is vars(module)
    }
    return scope


def edited(of: str, path: str, edits: tuple[tuple[str, str], ...]) -> Callable[..., Any]:
    """The function `of` of the reference where the source of the function `path`, itself or one that it
    calls, is edited.
    """
    module, target = (
        importlib.import_module(f"evictionary.reference.{each.split('.')[0]}") for each in (of, path)
    )
    source = edited_source(path, edits)
    scope = again(module)  # what calls the edited function finds it
    scope |= AROUND
    if target is module:
        exec("from __future__ import annotations\n" + source, scope)
    else:
        own = vars(target) | AROUND
        exec("from __future__ import annotations\n" + source, own)
        scope[path.split(".")[1]] = own[path.split(".")[1]]
    # a mistake dies by its numbers, not by a warning
    return np.errstate(all="ignore")(scope[of.split(".")[1]])


def answer(function: Callable[..., Any], *args: Any, **arguments: Any) -> Any:
    """What a right or a wrong function gives for a copy of the arguments, or the exception that it raises."""
    try:
        with np.errstate(all="ignore"):
            # some planted mistakes write into their inputs
            return function(*copy.deepcopy(args), **copy.deepcopy(arguments))
    except Exception as error:
        return error


def replaced(name: str, functions: dict[str, Callable[..., Any]], **fields: Any) -> Implementation:
    """The reference as an implementation to judge, with some functions (`stem.function`) replaced.

    The reference takes no tensors: a replacement that computes with torch is judged alone. Laws of memory,
    which hold of every function, ask the replaced ones: the others are the reference as it is.
    """
    alone = fields.get("array_library") == "torch"
    modules, files = {}, sorted({path.split(".")[0] for path in functions})
    for stem in files if alone else STEMS:
        modules[stem] = types.ModuleType(stem)
        if not alone:
            vars(modules[stem]).update(vars(importlib.import_module(f"evictionary.reference.{stem}")))
    for path, function in functions.items():
        stem, attribute = path.split(".")
        setattr(modules[stem], attribute, function)
    return Implementation(name, modules, **{"methods": tuple(functions)} | fields)


@dataclass(frozen=True)
class Control:
    """A correct implementation of the function `of`, computing with NumPy or torch, at each of the dtypes
    that it claims.

    It owes every law, or without `edges` all but those of our decisions on degenerate inputs.
    """

    name: str
    of: str
    array_library: str
    dtypes: tuple[str, ...]
    function: Callable[..., Any]
    max_length: int | None = None
    edges: bool = True

    @property
    def version(self) -> str:
        """A digest of what it computes, and of what it claims."""
        claims = (self.name, self.of, self.array_library, self.dtypes, self.max_length, self.edges)
        told = (*claims, inspect.getsource(self.function))
        return hashlib.sha256(repr(told).encode()).hexdigest()[:16]

    def implementation(self, dtype: str, bare: bool = False) -> Implementation:
        """This one function, judged alone at a dtype; bare is without checks. What else its laws call
        comes from the reference.
        """
        fields = {
            "array_library": self.array_library,
            "dtype": dtype,
            "domain": Domain(max_length=self.max_length),
        }
        function = self.function if bare else refusing(self.of, self.function)
        return replaced(f"control {self.name}", {self.of: function}, **fields)


def refusing(path: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A right variant behind the checks of the reference: what it writes otherwise is the mathematics."""

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        found = answer(
            oracle(path), *map(to_numpy, args), **{name: to_numpy(value) for name, value in kwargs.items()}
        )
        if isinstance(found, ValueError):
            raise found
        return function(*args, **kwargs)

    return checked


CONTROLS: dict[str, Control] = {}


def control(
    of: str,
    *,
    array_library: str = "numpy",
    dtypes: tuple[str, ...] = ("float64",),
    max_length: int | None = None,
    edges: bool = True,
    name: str = "",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as a correct `of`, under its name or another.

    max_length, for one whose memory or time is their square; edges
    is false for one that decides degenerate inputs otherwise.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        path = f"{of.split('.')[0]}.{name or function.__name__}"
        require(path not in CONTROLS, f"{path}: registered twice", KeyError)
        CONTROLS[path] = Control(path, of, array_library, dtypes, function, max_length, edges)
        return function

    return decorate


def put_together(forms: types.ModuleType, function: str, **chosen: Any) -> Callable[..., Any]:
    """The part `function` of a file of forms, where each
    part is the form chosen for it, or else the first.
    """
    scope = again(forms)
    scope |= {part: scope.get(form.__name__, form) for part, form in chosen.items()}
    return scope[function]


def load_controls() -> dict[str, Control]:
    """Import every file `variants*.py` and return the controls by name."""
    import_all("variants*.py")
    return CONTROLS
