"""What a function takes, said once: in its signature. From it come the checks of both layers, the laws of
refusal, the inputs of the other laws, tasks, benchmarks and pages.

    @contract
    def score(
        queries: Real[np.ndarray, "B H_q M<=T D"],
        keys: Real[np.ndarray, "B H_kv T D"],
        *,
        window_size: Setting[int, ">= 1"] = 32,
    ) -> np.ndarray:

An array says its kind and the names of its axes, as jaxtyping writes them. An axis has one size wherever
its name stands in a signature, and is never empty. `...` are any leading axes, the same wherever they
stand; `*` are leading axes that broadcast. H_q is a multiple of H_kv. `M<=T` is M, and at most T; `N>=0`
is N, and may be empty; `D%2` is D, and even; `D/2` and `h*d_h` are such a size.

The kinds: `Real`, finite numbers; `Weight`, of at least 0; `Share`, from 0 to 1; `Cosine`, from -1 to 1;
`Open`, infinite ones too; `Memory`, NaN too; `Mask`, booleans; `Whole`, whole numbers of at least 0. A
`State` is a named tuple whose fields say their axes, each behind the axes that the signature gives to it.

A `Setting` says its range: `>= 1`, `> 0`, `odd`, `even`, `[0, 1)`, or `[-inf, inf]`, where infinity counts
as a number. Its type says what the function gets: an int, a float, or the decimal number as it was written,
where the type is `float | Fraction`.
Behind the range stand the values that papers and public code use beside the default:
`Setting[int, ">= 1", 128]`.

What may be None has None in its type. `@contract` checks; without it a signature says, and nothing checks.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import pkgutil
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar, get_args, get_type_hints

import numpy as np

from . import checks

if TYPE_CHECKING:
    from typing import (
        Annotated as Cosine,
        Annotated as Mask,
        Annotated as Memory,
        Annotated as Open,
        Annotated as Real,
        Annotated as Setting,
        Annotated as Share,
        Annotated as State,
        Annotated as Weight,
        Annotated as Whole,
    )
else:

    class Kind:
        """`Real[np.ndarray, "... T D"]`: a type, and what is said of it beside."""

        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, said: tuple[Any, ...]) -> Any:
            type_, text, *values = said
            return Annotated[type_, Said(self.name, text, tuple(values))]

    Real, Weight, Share, Cosine, Open, Memory, Mask, Whole, State, Setting = map(
        Kind, ("real", "weight", "share", "cosine", "open", "memory", "bool", "whole", "state", "setting")
    )

Function = TypeVar("Function", bound=Callable[..., Any])


def contract(function: Function) -> Function:
    """Check the arguments of a function as its signature says, and hand them
    on: real numbers as float64, masks and whole numbers in their own dtype.
    Raises ValueError naming the argument, what was got and what was wanted.
    """
    said = Contract(function)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        return function(**said.read(*args, **kwargs))

    checked.contract = said  # type: ignore[attr-defined]
    return checked  # type: ignore[return-value]


class Contract:
    """What the signature of a function says. It is read when first asked, for it may name a later class."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        """The signature with its annotations."""
        return inspect.signature(self.function, eval_str=True)

    @functools.cached_property
    def said(self) -> dict[str, tuple[Any, Said]]:
        """The type of each argument that says more than its type, and what it says."""
        found = {name: said_of(each.annotation) for name, each in self.signature.parameters.items()}
        return {name: each for name, each in found.items() if each}

    @functools.cached_property
    def arguments(self) -> tuple[Argument, ...]:
        """The arrays and states, in the order of the signature."""
        return tuple(
            argument_of(name, type_, said)
            for name, (type_, said) in self.said.items()
            if said.kind != "setting"
        )

    @functools.cached_property
    def settings(self) -> dict[str, Range]:
        """The settings that have a range, by name."""
        return {
            name: Range(type_, said.text, said.values)
            for name, (type_, said) in self.said.items()
            if said.kind == "setting"
        }

    @functools.cached_property
    def by_name(self) -> Callable[..., dict[str, Any]]:
        """What gives the arguments of a call by name."""
        return naming(self.signature)

    @property
    def line(self) -> str:
        """The arrays and states in one line, which `arguments` reads."""
        return ", ".join(map(str, self.arguments))

    def read(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The arguments of a call by name, as the function wants them; ValueError as `contract` says."""
        given = self.by_name(*args, **kwargs)
        read = arrays(self.arguments, given)
        return self.settled(given) | read

    def settled(self, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments with each setting as the function wants it. Raises ValueError naming a setting."""
        found = {name: own.read(name, given[name]) for name, own in self.settings.items() if name in given}
        return given | found


def naming(signature: inspect.Signature) -> Callable[..., dict[str, Any]]:
    """What gives the arguments of a call by name, defaults too. It raises TypeError for an argument too many
    or too few, as Python says it.
    """
    names = signature.parameters.keys()
    defaults = {
        name: each.default for name, each in signature.parameters.items() if each.default is not each.empty
    }

    def by_name(*args: Any, **kwargs: Any) -> dict[str, Any]:
        named = dict(zip(names, args, strict=False)) | kwargs
        given = defaults | named
        if len(named) < len(args) + len(kwargs) or given.keys() != names:
            signature.bind(*args, **kwargs)
        return given

    return by_name


def arrays(wanted: Iterable[Argument], given: dict[str, Any]) -> dict[str, Any]:
    """Arrays and states by name, as they are wanted; ValueError as `contract` says."""
    shapes: list[tuple[Argument, tuple[int, ...]]] = []
    read = {each.name: _read(each, given[each.name], shapes) for each in wanted}
    _require_fit(*shapes)
    return read


def _read(argument: Argument, value: Any, shapes: list[tuple[Argument, tuple[int, ...]]]) -> Any:
    """An array or a state as it is wanted; each array is added to the shapes."""
    if value is None and argument.optional:
        return None
    if argument.state:
        if not all(hasattr(value, name) for name in argument.fields):
            wanted = f"{argument.kind}({', '.join(argument.fields)})"
            raise ValueError(f"{argument.name}: got {type(value).__name__}, wanted {wanted}")
        read = {name: _read(field, getattr(value, name), shapes) for name, field in argument.fields.items()}
        return value._replace(**read)
    converted = checks.READ[argument.kind](argument.name, value)
    shapes.append((argument, converted.shape))
    return converted


@functools.lru_cache(maxsize=4096)  # most calls have the shapes of an earlier one
def _require_fit(*shapes: tuple[Argument, tuple[int, ...]]) -> None:
    """Raise ValueError unless each shape fits its argument, and all fit one another."""
    axes = Axes()
    for argument, shape in shapes:
        axes.fit(argument, shape)
    axes.relate()


class Said(NamedTuple):
    """What a signature says beside a type: a kind, and the axes of an array or the range of a setting with
    the values that papers use.
    """

    kind: str
    text: str
    values: tuple[float, ...] = ()


def said_of(annotation: Any) -> tuple[Any, Said] | None:
    """The type that an annotation names, and what it says beside; None where it says nothing."""
    type_, *beside = get_args(annotation) or [annotation]
    found = [each for each in beside if isinstance(each, Said)]
    return (type_, found[0]) if found else None


@functools.cache
def contracts() -> dict[str, Contract]:
    """The contract of each function that checks its arguments, by its path: `keydiff.score`."""
    return {
        f"{module.__name__.split('.')[-1]}.{name}": value.contract
        for module in _modules()
        for name, value in sorted(vars(module).items())
        if inspect.isfunction(value) and hasattr(value, "contract") and value.__module__ == module.__name__
    }


@functools.cache
def states() -> dict[str, type]:
    """The named tuples whose fields say their axes, by name."""
    found = (value for module in _modules() for value in vars(module).values())
    tuples = {each for each in found if isinstance(each, type) and hasattr(each, "_fields")}
    return {each.__name__: each for each in sorted(tuples, key=lambda each: each.__name__) if fields(each)}


def _modules() -> list[Any]:
    stems = sorted(each.name for each in pkgutil.iter_modules(importlib.import_module(__package__).__path__))
    return [importlib.import_module(f"{__package__}.{stem}") for stem in stems]


@functools.cache
def arguments(said: str) -> tuple[Argument, ...]:
    """The arrays and states of a function by its path, or of a line: `keys: B H_kv T D, kept: bool ... T`."""
    if ": " in said:
        return tuple(_argument_of_line(*text.split(": ")) for text in said.split(", "))
    return contract_of(said).arguments


@functools.cache
def contract_of(path: str) -> Contract:
    """What the signature of a function of the reference says, whether it checks or not."""
    stem, name = path.split(".")
    function = getattr(importlib.import_module(f"{__package__}.{stem}"), name)
    return getattr(function, "contract", None) or Contract(function)


@functools.cache
def fields(state: type) -> dict[str, Argument]:
    """The fields of a state that are arrays, by name."""
    found = {name: said_of(each) for name, each in get_type_hints(state, include_extras=True).items()}
    return {name: argument_of(name, *said) for name, said in found.items() if said}


@dataclass(frozen=True, eq=False)  # one object an argument, which is quick to look up
class Argument:
    """An array or a state that a function takes: its name, its kind and its axes; whether it may be None.
    Of a state the kind is the name of its class.
    """

    name: str
    kind: str
    axes: tuple[str, ...]
    optional: bool
    state: Any = None  # the class of a state

    def __str__(self) -> str:
        """As a line says it: `kept: bool B H_kv T`."""
        kind = [] if self.kind == "real" else [self.kind]
        return f"{self.name}{'?' * self.optional}: {' '.join([*kind, *self.axes])}"

    @functools.cached_property
    def fields(self) -> dict[str, Argument]:
        """The fields of a state by their names, with the axes that are in front of all of them."""
        own = fields(self.state) if self.state else {}
        return {
            name: replace(each, name=f"{self.name}.{name}", axes=self.axes + each.axes)
            for name, each in own.items()
        }

    @functools.cached_property
    def lead(self) -> str:
        """`...` or `*`, or an empty string where the argument has the named axes alone."""
        return self.axes[0] if self.axes and self.axes[0] in ("...", "*") else ""

    @functools.cached_property
    def own(self) -> tuple[str, ...]:
        """The axes behind the leading ones."""
        return self.axes[bool(self.lead) :]

    @functools.cached_property
    def known(self) -> tuple[str, ...]:
        """The name of each of these axes, empty for those that are computed from others."""
        return tuple("" if re.search("[/*]", axis) else re.split("[<>%]", axis)[0] for axis in self.own)

    @functools.cached_property
    def rules(self) -> dict[int, list[str]]:
        """What is asked of an axis beside its own size, by its place: `M<=T` is `["M", "<=", "T"]`."""
        parts = [re.split("(<=|>=|[/%*])", axis) for axis in self.own]
        return {place: part for place, part in enumerate(parts) if len(part) > 1 or part == ["H_q"]}


KINDS = ("real", "weight", "share", "cosine", "open", "memory", "bool", "whole")


def argument_of(name: str, type_: Any, said: Said) -> Argument:
    """The array or the state of this name, by what `said_of` gives."""
    optional = type(None) in get_args(type_)
    state = next((each for each in (type_, *get_args(type_)) if hasattr(each, "_fields")), None)
    kind = state.__name__ if state else said.kind
    return Argument(name, kind, tuple(said.text.split()), optional, state)


def _argument_of_line(name: str, text: str) -> Argument:
    kind, *axes = text.split()
    state = None
    if re.match("[A-Z][a-z]", kind):
        state = states()[kind]
    elif kind not in KINDS:
        kind, axes = "real", [kind, *axes]
    return Argument(name.removesuffix("?"), kind, tuple(axes), name.endswith("?"), state)


PARITIES = {"odd": (1.0, checks.as_odd), "even": (2.0, checks.as_even)}
"""The least number of each, and what reads it."""


@dataclass(frozen=True)
class Range:
    """What a setting may be: the type that its function gets, the range as the signature says it, and the
    values that papers use.
    """

    type: Any
    text: str
    values: tuple[float, ...] = ()

    @functools.cached_property
    def limits(self) -> tuple[float, float, bool, bool]:
        """The least and the largest number, and whether each of them belongs to the range."""
        if self.text in PARITIES:
            return PARITIES[self.text][0], math.inf, True, False
        if at_least := re.fullmatch(r"(>=?) (\S+)", self.text):
            return float(at_least[2]), math.inf, at_least[1] == ">=", False
        between = re.fullmatch(r"([\[(])(\S+), (\S+)([\])])", self.text)
        if not between:
            raise ValueError(f"range: got {self.text!r}, wanted one such as '>= 1', 'odd' or '[0, 1)'")
        return float(between[2]), float(between[3]), between[1] == "[", between[4] == "]"

    @functools.cached_property
    def whole(self) -> bool:
        """Whether the setting counts something."""
        return int in (self.type, *get_args(self.type))

    @functools.cached_property
    def optional(self) -> bool:
        """Whether the setting may be None."""
        return type(None) in get_args(self.type)

    @functools.cached_property
    def exact(self) -> bool:
        """Whether the function gets the decimal number as it was written."""
        return Fraction in get_args(self.type)

    def read(self, name: str, value: Any) -> Any:
        """The value as its function wants it. Raises ValueError naming the setting."""
        if value is None and self.optional:
            return None
        if self.text in PARITIES:
            return PARITIES[self.text][1](name, value)
        low, high, closed_low, closed_high = self.limits
        if self.whole:
            return checks.as_count(name, value, low=int(low), high=None if high == math.inf else int(high))
        if closed_high and high == math.inf:
            return float(checks.as_open(name, value))
        number = checks.as_fraction(
            name, value, low=low, high=high, closed_low=closed_low, closed_high=closed_high
        )
        return number if self.exact else float(number)


class Axes:
    """The sizes of the axes in one call, each with the argument in which it was first seen."""

    def __init__(self) -> None:
        self.sizes: dict[str, tuple[Any, str]] = {}
        self.seen: list[tuple[Argument, tuple[int, ...], int]] = []

    def fit(self, argument: Argument, shape: tuple[int, ...]) -> None:
        """Take the sizes of an argument. Raises ValueError where an axis has another size already."""
        lead = len(shape) - len(argument.own)
        if lead < 0 or (lead and not argument.lead):
            raise self._error(argument, shape)
        if 0 in shape and (0 in shape[:lead] or any(map(self._empty, argument.own, shape[lead:]))):
            raise self._error(argument, shape, "no empty axis")
        self._agree(argument, shape, argument.known, shape[lead:])
        if argument.lead == "...":
            self._agree(argument, shape, ("...",), (shape[:lead],))
        if argument.rules or argument.lead == "*":
            self.seen.append((argument, shape, lead))

    @staticmethod
    def _empty(axis: str, size: int) -> bool:
        return size == 0 and not axis.endswith(">=0")

    def _agree(
        self, argument: Argument, shape: tuple[int, ...], names: tuple[str, ...], own: tuple[Any, ...]
    ) -> None:
        for name, size in zip(names, own, strict=True):
            if name:
                wanted, first = self.sizes.setdefault(name, (size, argument.name))
                if size != wanted:
                    raise self._error(argument, shape, f"{name} = {wanted}", first)

    def relate(self) -> None:
        """Compare the axes with one another, when all are known. Raises ValueError as `fit` does."""
        broad: tuple[int, ...] = ()
        for argument, shape, lead in self.seen:
            for place, rule in argument.rules.items():
                if misfit := self._misfit(rule, shape[lead + place]):
                    raise self._error(argument, shape, *misfit)
            if argument.lead == "*":
                try:
                    broad = np.broadcast_shapes(broad, shape[:lead])
                except ValueError:
                    raise self._error(argument, shape, f"leading axes that broadcast to {broad}") from None

    def _misfit(self, rule: list[str], size: int) -> tuple[str, str] | None:
        """What an axis must be by another one, and where that was seen; None where it is."""
        said = "".join(rule)
        match rule:
            case ["H_q"] if "H_kv" in self.sizes:
                other, first = self.sizes["H_kv"]
                return (f"H_q a multiple of H_kv = {other}", first) if size % other else None
            case [_, "<=", most]:
                other, first = self.sizes[most]
                return (f"{said} = {other}", first) if size > other else None
            case [_, "%", parts]:
                return (f"{said} = 0", "") if size % int(parts) else None
            case [whole, "/", parts]:
                other, first = self.sizes[whole]
                return (f"{said} = {other / int(parts)}", first) if size * int(parts) != other else None
            case [left, "*", right]:
                (other, _), (by, first) = self.sizes[left], self.sizes[right]
                return (f"{said} = {other * by}", first) if size != other * by else None
        return None

    @staticmethod
    def _error(argument: Argument, shape: tuple[int, ...], rule: str = "", first: str = "") -> ValueError:
        because = f" with {rule}" * bool(rule) + f", as in {first}" * bool(first)
        return ValueError(f"{argument.name}: got shape {shape}, wanted [{', '.join(argument.axes)}]{because}")
