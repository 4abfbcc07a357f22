"""What is judged: a package, a folder or a file that mirrors `reference/`, called with NumPy arrays
whatever it computes with.
"""

import functools
import importlib
import importlib.util
import inspect
import itertools
import os
import pkgutil
import re
import shlex
import sys
import types
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from evictionary import reference
from evictionary.errors import did_you_mean, require
from evictionary.source import import_file
from evictionary.spec_tests.judge import compiled, interpreted, project
from evictionary.spec_tests.judge.arithmetic import EPSILON, LARGEST, round_to
from evictionary.spec_tests.judge.degenerate import MATHEMATICS, REFUSAL, degenerate
from evictionary.spec_tests.judge.domain import BadDomain, Domain, OutsideDomain
from evictionary.spec_tests.judge.libraries import (
    LIBRARIES,
    from_numpy,
    library_used,
    missing_library,
    of_each,
    to_numpy,
)
from evictionary.spec_tests.judge.process import PREFIX, SECONDS, Program, ProgramFailed
from evictionary.spec_tests.judge.reach import Reach, extend
from evictionary.spec_tests.judge.remote import Gone
from evictionary.spec_tests.judge.tolerance import Allowance, Violation, allowance
from evictionary.spec_tests.judge.watch import WATCH, NotAsked
from evictionary.spec_tests.judge.widen import overflows, widened

STEMS = tuple(module.name for module in pkgutil.iter_modules(reference.__path__))
# The packages of this project, which go by these names on the command line.
OWN = ("reference", "optimized")
# The seams of the contract, by which an implementation is recognised; equation functions are optional extras.
NOT_SEAMS = ("answers", "checks", "contract")
STEPS = frozenset({
    "attention.attention", "attention.attention_logits", "attention.grouped", "attention.log_sum_exp",
    "attention.softmax", "attention_matching.active_set", "attention_matching.logits_of_group",
    "attention_matching.require_equal_heads", "cache.heads", "compactor.z_scores", "dropkv.perturbation",
    "expected_attention.appended", "expected_attention.norm", "expected_attention_theory.centre",
    "keydiff.cosine", "keydiff.unit", "lagkv.reference_maximum", "lagkv.reference_minimum",
    "lagkv.tokens_per_partition", "lagkv.variation_score", "momentkv_theory.algorithm_1",
    "momentkv_theory.logits_of", "momentkv_theory.numbers_stored", "momentkv_theory.share_of_cache",
    "rkv.combined", "selection.gather", "triattention.pair_lengths",
})  # fmt: skip
"""Steps of the reference that no law names. A file may have a helper of such a name, which does something
else.
"""

NO_GPU = "needs a GPU, and this machine has none"
# How torch, Triton, CuPy and JAX begin to say that there is no GPU.
NO_DRIVER = (
    "Torch not compiled with CUDA enabled",
    "PyTorch was compiled without CUDA support",
    "torch.cuda.Stream requires CUDA support",
    "Tried to instantiate dummy base class",
    "Cannot get CUDA generator",
    "Cannot access accelerator device",
    "module 'torch._C' has no attribute '_cuda",
    "Found no NVIDIA driver",
    "No CUDA GPUs are available",
    "Unexpected error from cudaGetDeviceCount()",
    "CUDA driver version is insufficient",
    "CUDA error: no CUDA-capable device",
    "0 active drivers",
    "cudaErrorNoDevice:",
    "cudaErrorInsufficientDriver:",
    "Unknown backend: 'gpu' requested",
    "Unable to initialize backend 'cuda'",
)
CANNOT_HOLD = "cannot hold the numbers"
# Between a file whose name is that of no method, and what it implements: `my_kernel.py as keydiff.score`.
AS = " as "
# In place of a function, for laws that hold of every function that an implementation provides.
ANY = "*"


class UnusableImplementation(Exception):
    """The implementation cannot be loaded or provides nothing; the message says why."""


@dataclass
class Call:
    """One call that a law made: `keydiff.score`, its arguments
    by name, and what came back (None where it raised).

    The first `positional` arguments were given by their position: an implementation may have names of its own
    for them. dtype is that of the numbers as they came back, empty where there are none.
    """

    function: str
    arguments: dict[str, Any]
    result: Any = None
    positional: int = 0
    dtype: str = ""

    @property
    def given(self) -> tuple[list[Any], dict[str, Any]]:
        """The arguments as the law gave them: those by position, and those by name."""
        given = list(self.arguments.items())
        return [value for _, value in given[: self.positional]], dict(given[self.positional :])


@dataclass(repr=False)
class Implementation:
    """An implementation under test at one dtype on one device:
    `impl.keydiff.score(keys)` takes and returns NumPy.

    modules maps a stem of `reference` to the module that provides it; origin is what `load` was given;
    array_library is one of `LIBRARIES` or, for a program, "exec"; domain is what it accepts; conventions are
    its ways of saying things (`CONVENTIONS`); variants maps a function that it declares to be another one to
    that one; methods are the files and functions that laws of memory ask, all where none are named. asking is
    the class of the law at hand, law_at_hand its name; strict where a refusal has to be in our words;
    compares_order while scores count as an order; outside says what was asked outside the domain, outside_of
    how often each law asked there and nowhere else; drawn are the inputs of the example at hand. calls are
    those of the example at hand, history the latest of the law at hand; reach says how large the inputs were
    since it was last cleared.
    """

    name: str
    modules: dict[str, types.ModuleType]
    origin: str = ""
    array_library: str = "numpy"
    device: str = "cpu"
    dtype: str = "float64"
    domain: Domain = field(default_factory=Domain)
    conventions: frozenset[str] = frozenset()
    variants: dict[str, str] = field(default_factory=dict)
    methods: tuple[str, ...] = ()
    asking: str = ""
    law_at_hand: str = ""
    strict: bool = True
    compares_order: bool = False
    outside: str = ""
    outside_of: Counter[str] = field(default_factory=Counter)
    drawn: dict[str, Any] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    history: deque[Call] = field(default_factory=lambda: deque(maxlen=64))
    reach: Reach = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"{self.name} ({self.array_library}, {self.device}, {self.dtype})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # hypothesis would print every field, the history of calls among them

    def __getattr__(self, stem: str) -> Any:
        if stem.startswith("_") or stem not in STEMS:
            raise AttributeError(f"{stem}: not a file of reference/")
        return _Stem(self, stem)

    @property
    def torch_device(self) -> str:
        """The device of its tensors, as torch names it."""
        return "cuda" if self.device == compiled.DEVICE else self.device

    @property
    def reads_numbers(self) -> bool:
        """Whether arguments can be refused for their numbers: on a GPU that would mean to wait for it."""
        return self.device == "cpu"

    def begin(self, law: str) -> None:
        """Before an example of a law: forget the calls of the one before, and of another law all of them.

        What is left after the last example, the smallest, are its calls.
        """
        self.calls.clear()
        if self.law_at_hand != law:
            self.law_at_hand = law
            self.history.clear()

    def functions(self) -> list[str]:
        """The functions of `reference` that this implementation provides, as `stem.function`."""
        found = (path.split(".") for path in contract_functions(tuple(self.modules)))
        return [f"{stem}.{name}" for stem, name in found if callable(getattr(self.modules[stem], name, None))]

    def asked_of_memory(self) -> list[str]:
        """The functions that laws of memory ask: those that `methods` names, file or function, or all."""
        return [
            path
            for path in self.functions()
            if not self.methods
            or any(
                path == method or f"{path.split('.')[0]}_".startswith(f"{method}_") for method in self.methods
            )
        ]

    def missing(self, functions: tuple[str, ...]) -> str:
        """Say why one of `functions` cannot be judged, or return an empty string where all are provided."""
        for path in functions:
            if path == ANY:
                if self.methods and not self.asked_of_memory():
                    return f"no function belongs to {' or '.join(self.methods)}"
                continue
            stem, name = path.split(".")
            if stem not in self.modules:
                return f"no file {stem}.py"
            if not callable(getattr(self.modules[stem], name, None)):
                return f"no function {name} in {stem}.py"
        return ""

    def round(self, array: np.ndarray) -> np.ndarray:
        """Return float64 numbers that the dtype under test
        represents exactly, so that both sides see the same input.
        """
        return round_to(np.asarray(array, dtype=np.float64), self.dtype)

    def function(self, path: str) -> Callable[..., Any]:
        """The function `path` of the implementation, as it is; a program looks after its time itself, any
        other is watched.
        """
        stem, name = path.split(".")
        function = getattr(self.modules[stem], name)
        return function if self.array_library == "exec" else functools.partial(WATCH.call, path, function)

    def call(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """Call `path` of the implementation: NumPy in (rounded
        to the dtype), NumPy out. The call is recorded.
        """
        name = path.split(".")[1]
        function = self.function(path)
        call = Call(path, self._rounded_arguments(path, args, kwargs), positional=len(args))
        if self.asking not in ("", REFUSAL) and (reason := self.domain.excludes(call.arguments, path)):
            wide = widened(path, oracle(path), call.arguments, self.domain)
            if wide is None or self.domain.excludes(wide[0], path):
                raise OutsideDomain(reason)
            if overflows(wide[0], LARGEST[self.dtype]):
                raise OutsideDomain(f"the product of a query and a key is too large for {self.dtype}")
            values = list(wide[0].items())
            return wide[1](
                self.call(path, *(value for _, value in values[: len(args)]), **dict(values[len(args) :]))
            )
        if self.asking == MATHEMATICS and (reason := degenerate(path, call.arguments)):
            raise OutsideDomain(f"{reason} is degenerate, and the law is one of mathematics")
        self.calls.append(call)
        self.history.append(call)
        if self.asking != REFUSAL:  # what is refused is no size that a law asks
            extend(self.reach, path, call.arguments)
        if "ranks" in self.conventions and name.endswith("score") and not self.compares_order:
            raise OutsideDomain("its scores say the order of the tokens alone", always=True)
        if "beyond_budget" in self.conventions and call.arguments.get("protected") is not None:
            counts = np.unique(call.arguments["protected"].sum(axis=-1))
            if len(counts) > 1 or counts[0] > call.arguments["budget"]:
                raise OutsideDomain("its rows protect equally many tokens, beside the budget")
            args, kwargs = (), {**call.arguments, "budget": int(call.arguments["budget"] - counts[0])}
        given = [self.native(argument) for argument in args]
        named = {key: self.native(argument) for key, argument in kwargs.items()}
        with nullcontext() if self.origin.split(".")[0] in OWN else np.errstate(all="ignore"):
            try:
                answer = function(*given, **named)
                call.dtype = _dtype(answer)
                answer = to_numpy(answer)
            except Exception as error:
                require_gpu(path, error)
                raise
        self._require_untouched(call, {**dict(zip(call.arguments, given, strict=False)), **named})
        call.result = self._in_our_form(call, answer)
        # a law may write into what it gets, and a report looks at what was given
        return of_each(lambda entry: entry.copy() if isinstance(entry, np.ndarray) else entry, call.result)

    def _require_untouched(self, call: Call, given: dict[str, Any]) -> None:
        """Raise Violation where the implementation has written into an argument."""
        if not self.reads_numbers:
            return
        for name, native in given.items():
            if not _same(native, before := call.arguments[name]):
                raise Violation(f"{call.function} writes into its argument {name}", before, to_numpy(native))

    def _in_our_form(self, call: Call, answer: Any) -> Any:
        """An answer in the form of the contract, where the
        implementation has said that it answers in another.
        """
        if (
            "indices" in self.conventions
            and isinstance(answer, np.ndarray)
            and answer.dtype.kind in "iu"
            and answer.ndim
        ):
            rows = call.arguments.get("scores", call.arguments.get("attention"))
            shape = call.arguments["keys"].shape[:-1] if rows is None else rows.shape
            inside = (answer >= 0) & (answer < shape[-1])
            if answer.shape[:-1] == shape[:-1] and inside.all():
                kept = np.zeros(shape, dtype=bool)
                np.put_along_axis(kept, answer, True, axis=-1)
                # a position that is named twice shows as too few
                if (kept.sum(axis=-1) == answer.shape[-1]).all():
                    return kept
                raise Violation("the positions of the kept tokens are not distinct", None, answer)
        if (
            "cu_lengths" in self.conventions
            and call.function == "cache.compress"
            and isinstance(answer, tuple)
        ):
            *rows, ends = answer
            lengths = np.diff(ends).reshape(call.arguments["kept"].shape[:-1])
            return type(oracle(call.function)(**call.arguments))(*rows, lengths)
        return answer

    def allowance(self, path: str, *args: Any, pick: int | None = None, **kwargs: Any) -> Allowance:
        """What the oracle gives for these arguments, rounded to the dtype under test, and the error
        allowed on it.
        """
        args, kwargs = self.rounded(args), {key: self.rounded(value) for key, value in kwargs.items()}
        return allowance(
            oracle(path), *args, dtype=self.dtype, pick=pick, unrepresentable=self.unrepresentable, **kwargs
        )

    def unrepresentable(self) -> NoReturn:
        """Leave the case out: its dtype cannot hold the
        numbers, which says nothing about the implementation.
        """
        raise OutsideDomain(f"{self.dtype} {CANNOT_HOLD} that it asks for")

    @contextmanager
    def refuses(self, pattern: str = "") -> Iterator[None]:
        """What stands inside must raise: ValueError with this pattern in its message, or, where nobody
        asks for ours, anything.

        Raises Violation where nothing is raised, or something else than is asked for, and RuntimeError in a
        law of another class: who checks no argument may fail no mathematics.
        """
        if self.asking not in ("", REFUSAL):  # outside of laws nothing is asked
            raise RuntimeError(f"refuses: got a law of the class {self.asking}, wanted one of {REFUSAL}")
        try:
            yield
        except (Violation, Gone):  # no answer is no refusal
            raise
        except Exception as error:
            if self.strict and not (isinstance(error, ValueError) and re.search(pattern, str(error))):
                wanted = f"a ValueError with {pattern!r} in its message" if pattern else "a ValueError"
                raise Violation(
                    f"bad input raises {type(error).__name__}: {error}", wanted, str(error)
                ) from error
            return
        raise Violation("bad input is accepted in silence", "an error", None)

    def _rounded_arguments(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = inspect.signature(oracle(path)).bind(*args, **kwargs).arguments
        return {name: self.rounded(value) for name, value in bound.items()}

    def rounded(self, value: Any) -> Any:
        """`round` for arrays, alone or in a tuple; anything else as it is."""

        def of_one(entry: Any) -> Any:
            return self.round(entry) if isinstance(entry, np.ndarray) and entry.dtype.kind == "f" else entry

        return of_each(of_one, value)

    def native(self, value: Any) -> Any:
        """NumPy arrays, alone or in a tuple, as what the implementation computes with: rounded to its
        dtype, on its device.
        """

        def of_one(entry: Any) -> Any:
            is_array = isinstance(entry, np.ndarray)
            return from_numpy(entry, self.array_library, self.dtype, self.torch_device) if is_array else entry

        return of_each(of_one, value)


@dataclass
class _Stem:
    implementation: Implementation
    stem: str

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self.implementation.call(f"{self.stem}.{name}", *args, **kwargs)

        return call


def contract_functions(stems: tuple[str, ...] = STEMS) -> list[str]:
    """The functions that an implementation can provide, of these files of `reference/`."""
    return [path for stem in STEMS if stem in stems and stem not in NOT_SEAMS for path in _functions_of(stem)]


@functools.cache
def _functions_of(stem: str) -> list[str]:
    """The public functions of a file of `reference/`."""
    return [
        f"{stem}.{name}"
        for name, value in vars(_reference(stem)).items()
        if isinstance(value, types.FunctionType)
        and value.__module__ == f"evictionary.reference.{stem}"
        and not name.startswith("_")
    ]


def _same(native: Any, before: Any) -> bool:
    """Whether an array, or each of a state, still holds these numbers."""
    if isinstance(before, tuple):
        return all(map(_same, native, before))
    if not isinstance(before, np.ndarray):
        return True
    after = to_numpy(native)
    # Of large arrays the look for NaN takes longer than the comparison, and few have one.
    return np.array_equal(after, before) or (
        before.dtype.kind == "f" and np.array_equal(after, before, equal_nan=True)
    )


def require_gpu(path: str, error: Exception) -> None:
    """Raise NotAsked where a function raised because it needs a GPU and this machine has none."""
    theirs = isinstance(error, AssertionError | AttributeError | RuntimeError)
    torch = sys.modules.get("torch")
    if theirs and str(error).startswith(NO_DRIVER) and not (torch and torch.cuda.is_available()):
        raise NotAsked(f"{path} {NO_GPU} ({type(error).__name__}: {str(error).splitlines()[0]})") from None


def oracle(path: str) -> Callable[..., Any]:
    """Return the function of `reference` that `path` names, such as `keydiff.score`."""
    stem, name = path.split(".")
    return getattr(importlib.import_module(f"evictionary.reference.{stem}"), name)


def load(
    target: str,
    *,
    device: str = "cpu",
    dtype: str | None = None,
    domain: Domain | None = None,
    seconds: float = SECONDS,
    methods: tuple[str, ...] = (),
) -> Implementation:
    """Load an implementation: a package name, a folder with files named as in `reference/`, one such file,
    a file of another name `FILE as keydiff.score`, or `exec:COMMAND`.

    COMMAND starts a program that answers over its standard input and output (`process.py`), each call within
    `seconds`. dtype None means float64 for NumPy, and float32 for every other library. Which one it computes
    with (`LIBRARIES`) is read from its attribute `ARRAY_LIBRARY` or, without one, from what a provided module
    imports. It may say more, in package or file: `DOMAIN`, what it accepts (`domain` adds to it); `IMPLEMENTS
    = {"score": "keydiff.raw_mean_score"}`, as which variant it is to be judged, or None for a helper that is
    not judged; `CONVENTIONS = ("indices",)`, in which form it answers. methods are those that are asked, all
    where none are named. Raises UnusableImplementation, saying what was looked for, where nothing can be
    judged, and where a function cannot be called as the contract calls it.
    """
    if device == compiled.DEVICE:
        if reason := compiled.missing():
            raise UnusableImplementation(f"{target}: --device {device}: {reason}")
        compiled.begin()
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
        interpreted.take_first_configurations()
    file, _, purpose = target.partition(AS)
    path = Path(file)
    program = None
    package: types.ModuleType | None
    if target.startswith(PREFIX):
        try:
            program = Program(target.removeprefix(PREFIX), seconds)
            name, modules, package = program.modules()
        except ProgramFailed as error:
            raise UnusableImplementation(f"{target}: {error}") from None
    elif path.name == project.FILE:
        try:
            modules, package = project.modules(path, frozenset(contract_functions()))
        except project.BadProject as error:
            raise UnusableImplementation(str(error)) from None
        name = path.resolve().parent.name
    elif path.suffix == ".py" or path.is_dir():
        modules, package = _load_path(path, purpose)
        name = path.stem
    else:
        modules, package = _load_package(target)
        name = target
    said = [package, *modules.values()] if package is not None else list(modules.values())
    library = next(
        (each.ARRAY_LIBRARY for each in said if hasattr(each, "ARRAY_LIBRARY")), ""
    ) or library_used(modules.values())
    require(
        library in LIBRARIES or program is not None,
        f"{target}: ARRAY_LIBRARY is {library!r}, wanted one of {', '.join(LIBRARIES)}",
        UnusableImplementation,
    )
    if program is None and (reason := missing_library(library)):
        raise UnusableImplementation(f"{target}: {reason}")
    accepted = Domain()
    for module in said:
        try:
            accepted |= Domain.read(getattr(module, "DOMAIN", {}))
        except BadDomain as error:
            raise UnusableImplementation(f"{target}: DOMAIN: {error}") from None
    accepted |= domain or Domain()
    modules, variants = _as_declared(target, modules)
    implementation = Implementation(
        name,
        modules,
        target,
        library,
        device,
        dtype or (accepted.dtype[0] if accepted.dtype else "float64" if library == "numpy" else "float32"),
        accepted,
        _conventions(target, said),
        variants,
        methods,
    )
    require(
        implementation.functions(),
        f"{target}: provides no function of the contract; {_wanted_of(modules, path)}",
        UnusableImplementation,
    )
    require(
        library not in ("numpy", "cupy") or implementation.dtype != "bfloat16",
        f"{target}: computes with {library}, which has no bfloat16",
        UnusableImplementation,
    )
    if program is not None:
        program.dtype = implementation.dtype
    else:
        for asked in sorted({*implementation.asked_of_memory()} - STEPS):
            stem, function = asked.split(".")
            if reason := called_otherwise(asked, getattr(modules[stem], function)):
                raise UnusableImplementation(
                    f"{target}: {reason}; if it is a helper of that name, say so in the file: "
                    f'IMPLEMENTS = {{"{function}": None}}'
                )
    if device != "cpu" and (reason := _no_device(library, device)):
        raise UnusableImplementation(f"{target}: --device {device}: {reason}")
    return implementation


MOST_FILES = 5
"""So many files of a folder are named where none has the name of a method."""


def _wanted_of(modules: dict[str, types.ModuleType], path: Path) -> str:
    """What a file or folder would have to have, in a line."""
    if not modules and (others := [each for each in sorted(path.glob("*.py")) if each.stem != "__init__"]):
        if len(others) > 1:
            named = ", ".join(each.name for each in others[:MOST_FILES])
            return (
                f"{named} have the name of no method, so judge one of them alone: evictionary judge FILE "
                "--method keydiff.score"
            )
        file = others[0]
        says = "IMPLEMENTS" in file.read_text(encoding="utf-8", errors="replace")
        purpose = "" if says else " --method keydiff.score"
        return (
            f"the name of {file.name} is that of no method, so judge the file alone: "
            f"evictionary judge {shlex.quote(str(file))}{purpose}"
        )
    if len(modules) != 1:
        return "wanted files and functions named as in reference/, such as keydiff.py with score"
    names = [each.partition(".")[2] for each in contract_functions(tuple(modules))]
    ((stem, module),) = modules.items()
    own = _own_functions(module) or ["my_score"]
    example = f'IMPLEMENTS = {{"{own[0]}": "{stem}.{names[0]}"}}'
    return f"wanted one of {', '.join(names)}, or a line such as {example}"


def called_otherwise(path: str, function: Callable[..., Any]) -> str:
    """Why a function cannot be called as the laws call it, arrays by place, or an empty string."""
    try:
        own = inspect.signature(function)
    except (TypeError, ValueError):  # compiled code does not say it
        return ""
    named = inspect.signature(oracle(path)).parameters.values()
    shortest = [each for each in named if each.default is each.empty]
    for parameters in (shortest, list(named)):
        with suppress(TypeError):
            own.bind(
                *(0 for each in parameters if each.kind is not each.KEYWORD_ONLY),
                **{each.name: 0 for each in parameters if each.kind is each.KEYWORD_ONLY},
            )
            return ""
    words = [each.name if each.kind is not each.KEYWORD_ONLY else f"{each.name}=..." for each in shortest]
    name = path.split(".")[1]
    return f"{path}: got {name}{own}, wanted a function that can be called as {name}({', '.join(words)})"


def load_each(target: str, dtypes: list[str | None], domain: Domain, **options: Any) -> list[Implementation]:
    """The implementation at each dtype that was asked for, or else at each that it names in its domain."""
    if dtypes == [None]:
        first = load(target, domain=domain, **options)
        return [
            first,
            *(load(target, dtype=dtype, domain=domain, **options) for dtype in first.domain.dtype[1:]),
        ]
    found = [load(target, dtype=dtype, domain=domain, **options) for dtype in dtypes]
    for each in found:
        require(
            not each.domain.dtype or each.dtype in each.domain.dtype,
            f"{target}: --dtype {each.dtype} lies outside its domain ({', '.join(each.domain.dtype)})",
            UnusableImplementation,
        )
    return found


CONVENTIONS = {
    "indices": "a selection is the positions of the kept tokens, not a mask",
    "ranks": "only the order of the scores has a meaning, not their values",
    "beyond_budget": "protected tokens are kept in addition to the budget, not inside it",
    "cu_lengths": "the rows of a compressed cache end at cumulative lengths, which begin with 0",
    "unchecked": "it checks no argument, so that no law of refusals applies",
}
"""The forms in which an implementation may answer; what it says so is no mistake."""


def _no_device(library: str, device: str) -> str:
    """Why nothing can be computed on a device, or an empty string."""
    if library == "numpy":
        return "computes with NumPy, which runs on a CPU only"
    if library != "torch":
        return f"{'a program' if library == 'exec' else library} chooses its device itself, wanted cpu"
    if device == compiled.DEVICE:
        return ""
    import torch

    try:
        torch.empty(1, device=device)
    except Exception as error:
        return f"torch has no such device here: {str(error).strip().splitlines()[0]}" + (
            "; --device compiled executes Triton kernels without a GPU" * device.startswith("cuda")
        )
    return ""


def _conventions(target: str, said: list[types.ModuleType]) -> frozenset[str]:
    found = {each for module in said for each in getattr(module, "CONVENTIONS", ())}
    if unknown := sorted(found - set(CONVENTIONS)):
        raise UnusableImplementation(
            f"{target}: CONVENTIONS: got {unknown[0]!r}, wanted some of {', '.join(CONVENTIONS)}"
        )
    return frozenset(found)


def _as_declared(
    target: str, modules: dict[str, types.ModuleType]
) -> tuple[dict[str, types.ModuleType], dict[str, str]]:
    """The modules with each function that is declared a
    variant in the place of that variant, and the list of them.
    """
    declared: dict[str, str] = {}
    found = {stem: types.ModuleType(stem) for stem in modules}
    for stem, module in modules.items():
        vars(found[stem]).update(vars(module))
    for stem, module in modules.items():
        for name, variant in getattr(module, "IMPLEMENTS", {}).items():
            if variant is None:  # a helper, which only has the name of a function of the contract
                vars(found[stem]).pop(name, None)
                continue
            home, function = _home_of(target, name, variant)
            require(
                callable(getattr(module, name, None)),
                f"{target}: IMPLEMENTS: {stem}.py has no function {name}",
                UnusableImplementation,
            )
            delattr(found[stem], name)
            setattr(found.setdefault(home, types.ModuleType(home)), function, getattr(module, name))
            declared[f"{stem}.{name}"] = f"{home}.{function}"
    return found, declared


def _reference(stem: str) -> types.ModuleType:
    return importlib.import_module(f"evictionary.reference.{stem}")


def _load_package(target: str) -> tuple[dict[str, types.ModuleType], types.ModuleType]:
    if target.split(".")[0] in OWN:
        target = f"evictionary.{target}"
    try:
        package = importlib.import_module(target)
    except ImportError as error:
        raise UnusableImplementation(
            f"{target}: neither a folder, a .py file nor an importable package ({error})"
        ) from error
    require(
        hasattr(package, "__path__"),
        f"{target}: a module, not a package; give its file (path/to/keydiff.py) instead",
        UnusableImplementation,
    )
    provided = {module.name for module in pkgutil.iter_modules(package.__path__)}
    return {stem: _import(f"{target}.{stem}") for stem in STEMS if stem in provided}, package


def _load_path(path: Path, purpose: str) -> tuple[dict[str, types.ModuleType], types.ModuleType | None]:
    require(path.exists(), f"{path}: no such file or folder", UnusableImplementation)
    path = path.resolve()
    if path.is_file() and path.stem not in STEMS:
        return _load_file_of_another_name(path, purpose), None
    if path.is_dir() and (path / "__init__.py").exists():
        sys.path.insert(0, str(path.parent))
        return _load_package(path.name)
    files = [path] if path.is_file() else sorted(path.glob("*.py"))
    files = [file for file in files if file.stem in STEMS]
    sys.path.insert(0, str(path if path.is_dir() else path.parent))
    return {file.stem: _import_file(file) for file in files}, None


def _import_file(file: Path) -> types.ModuleType:
    # A name of its own: `keydiff` alone could shadow an installed module, and two implementations could
    # collide.
    name = f"_judged_{abs(hash(str(file)))}_{file.stem}"
    try:
        return import_file(name, file)
    except (Exception, SystemExit) as error:
        relative = isinstance(error, ImportError) and "relative import" in str(error)
        advice = f"; it is a file of a package: judge the folder {file.parent}" * relative
        raise UnusableImplementation(
            f"{file.name}: importing it raised {type(error).__name__}: {error}{advice}"
        ) from error


def _load_file_of_another_name(path: Path, purpose: str) -> dict[str, types.ModuleType]:
    """The functions of a file whose name says nothing, each where the reference has it: as `IMPLEMENTS`
    says, or else as `purpose` does, the name of a function or of a file of the reference.
    """
    sys.path.insert(0, str(path.parent))
    module = _import_file(path)
    declared = dict(getattr(module, "IMPLEMENTS", {}))
    if not declared and purpose in STEMS:
        return {purpose: module}
    if not declared and purpose:
        declared = {_meant(path, module, purpose): purpose}
    if not declared:
        own = _own_functions(module)
        example = f'IMPLEMENTS = {{"{own[0] if own else "my_score"}": "keydiff.score"}}'
        raise UnusableImplementation(
            f"{path.name}: the file's name is that of no method; say what it implements: --method "
            f"keydiff.score, or the line {example} in the file"
        )
    found: dict[str, types.ModuleType] = {}
    for name, function in declared.items():
        if function is None:
            continue
        stem, wanted = _home_of(path.name, name, function)
        require(
            callable(getattr(module, name, None)),
            f"{path.name}: IMPLEMENTS: it has no function {name}",
            UnusableImplementation,
        )
        setattr(found.setdefault(stem, types.ModuleType(stem)), wanted, getattr(module, name))
    for home, said in itertools.product(found.values(), ("ARRAY_LIBRARY", "DOMAIN", "CONVENTIONS")):
        if hasattr(module, said):
            setattr(home, said, getattr(module, said))
    return found


def _home_of(target: str, name: str, function: str) -> tuple[str, str]:
    """The file of the reference and the function in it that a declaration names: `keydiff.raw_mean_score` is
    one of keydiff_variants.
    """
    method, _, wanted = str(function).partition(".")
    homes = [each for each in (method, f"{method}_variants", f"{method}_theory") if each in STEMS]
    for home in homes:
        if callable(getattr(_reference(home), wanted, None)):
            return home, wanted
    raise UnusableImplementation(
        f"{target}: IMPLEMENTS: got {function!r} for {name}, wanted a function of the reference, such as "
        f"keydiff.raw_mean_score{did_you_mean(str(function), contract_functions())}"
    )


def _own_functions(module: types.ModuleType) -> list[str]:
    """The names of the functions that a file writes itself, and shows."""
    return [
        name
        for name, value in vars(module).items()
        if callable(value)
        and not name.startswith("_")
        and getattr(value, "__module__", "") == module.__name__
    ]


def _meant(path: Path, module: types.ModuleType, purpose: str) -> str:
    """The function of a file that stands for one of the reference: that of the same name, or the only one."""
    wanted = purpose.split(".")[1]
    own = _own_functions(module)
    if wanted in own:
        return wanted
    if len(own) == 1:
        return own[0]
    raise UnusableImplementation(
        f"{path.name}: which of {', '.join(own) or 'no function'} is {purpose}? Name it {wanted}, or write "
        f'IMPLEMENTS = {{"{own[0] if own else "my_score"}": "{purpose}"}} in the file'
    )


def _import(name: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise UnusableImplementation(
            f"{name}: importing it raised {type(error).__name__}: {error}"
        ) from error


def _dtype(answer: Any) -> str:
    """The floating-point dtype of an answer, or of the first entry that has one; empty where none has."""
    if isinstance(answer, tuple):
        return next(filter(None, map(_dtype, answer)), "")
    name = str(getattr(answer, "dtype", "")).rpartition(".")[2]
    return name if name in EPSILON else ""
