"""What each function of the contract gives for drawn arguments; the grader asks for it here too."""

import contextlib
import functools
import inspect
import zlib
from collections.abc import Callable, Iterator

from evictionary.spec_tests.judge import compiled
from evictionary.spec_tests.judge.degenerate import degenerate
from evictionary.spec_tests.judge.domain import OutsideDomain
from evictionary.spec_tests.judge.implementation import STEPS, require_gpu
from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.judge.reach import extend
from evictionary.spec_tests.memory.arguments import arguments_of, fits, signature_of

PLAIN = st.builds(
    Case, seed=seeds(), batch=st.just(2), num_kv_heads=st.just(2), length=st.sampled_from([8, 17])
)

SEAMS = (
    "score",
    "select",
    "compress",
    "attend",
    "top_k",
    "nucleus",
    "update",
    "compact_pages",
    "attend_pages",
)

VIEWS = frozenset({"attention.by_group", "attention.grouped", "expected_attention.start_decoding"})
"""Functions that give their arguments other axes, or put them into a state: their results may be memory of
the arguments.
"""


def natives_of(impl: Implementation, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments as arrays of the library of the implementation; no two calls share them."""
    return {name: impl.native(value) for name, value in arguments.items()}


def ask(impl: Implementation, path: str, natives: dict[str, Any]) -> Any:
    """Call a function of the implementation as the laws of its equation do: by place, and by name what the
    contract has behind a star.

    Raises Violation where the function raises.
    """
    with answering(path), np.errstate(all="ignore"):
        args, kwargs = as_called(path, natives)
        answer = impl.function(path)(*args, **kwargs)
        return tuple(answer) if isinstance(answer, Iterator) else answer


class Raises(Violation):
    """A function raises on arguments that the mathematics takes."""


@contextlib.contextmanager
def answering(path: str) -> Iterator[None]:
    """Where a function is called: what it raises is a Violation that says so. A fault of a kernel, a GPU that
    is absent and what the judge itself has to say stay what they are.
    """
    try:
        yield
    except (OutsideDomain, Violation):
        raise
    except Exception as error:
        if error in compiled.STOPPED + compiled.UNEXECUTED or compiled.fault(error):
            raise
        require_gpu(path, error)
        said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise Raises(f"{path} raises {said}", "an answer", said) from error


def taken(impl: Implementation, path: str, given: dict[str, Any] | None) -> dict[str, Any] | None:
    """The arguments without those that have a default and that a function does not take: it may be older, or
    do without. Both sides are asked without them.
    """
    if given is None:
        return None
    stem, function = path.split(".")
    left_out = _not_taken(path, getattr(impl.modules[stem], function))
    less = {name: value for name, value in given.items() if name not in left_out}
    # Where they do not fit without them, the code knows them in another way, such as a window by its queries.
    return less if left_out and fits(path, less) else given


@functools.lru_cache(maxsize=1024)
def _not_taken(path: str, function: Callable[..., Any]) -> frozenset[str]:
    """The arguments of the contract that have a default, and that a function does not take."""
    try:
        own = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # compiled code does not say it
        return frozenset()
    if any(each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL) for each in own):
        return frozenset()
    names = {each.name for each in own}
    places = sum(each.kind is not each.KEYWORD_ONLY for each in own)
    left_out = set()
    for place, each in enumerate(signature_of(path).parameters.values()):
        is_taken = each.name in names if each.kind is each.KEYWORD_ONLY else place < places
        if not is_taken and each.default is not each.empty:
            left_out.add(each.name)
    return frozenset(left_out)


def as_called(path: str, given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments by place, and those by name, of a call in which a function is given so much."""
    bound = signature_of(path).bind(**given)
    return bound.args, bound.kwargs


def answers(
    impl: Implementation, case: Case, paths: list[str] | None = None
) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Each provided function, or each of `paths`, its arguments by name (NumPy, rounded to the dtype), and
    what it gives.

    Raises Violation where a function fails on arguments that the mathematics takes, and OutsideDomain where
    there is nothing to ask. A helper that has the name of a step which no law names, and does something
    else, is left alone; so is a degenerate input that is refused, of which the laws of its equation say.
    """
    silent = {}
    for path in (asked := in_turn(impl.asked_of_memory(), case) if paths is None else paths):
        arguments = taken(impl, path, arguments_of(impl, path, case))
        if arguments is None:
            silent[path] = f"it takes no text of {case.length} tokens"
            continue
        if reason := impl.domain.excludes(arguments, path):
            silent[path] = reason
            continue
        extend(impl.reach, path, arguments)
        try:
            answer = to_numpy(ask(impl, path, natives_of(impl, arguments)))
        except Violation as error:
            if reason := degenerate(path, arguments):
                silent[path] = f"{reason} is degenerate"
            elif path in STEPS:
                silent[path] = "no law names it"
            else:
                raise error
        else:
            if path in STEPS and not is_of_the_contract(impl, path, arguments, answer):
                silent[path] = "no law names it"
                continue
            yield path, arguments, answer
    if len(silent) == len(asked) and not compiled.STOPPED + compiled.UNEXECUTED:
        why = "; ".join(f"{path}: {reason}" for path, reason in silent.items())
        raise OutsideDomain(why or "no function of it takes such arguments")


MOST, TURNS = 8, 4
"""Of more functions each input asks the seams and a quarter of the others, by chance another quarter: a
verdict is wanted in seconds, and Triton's interpreter takes a second for a call.
"""


def in_turn(paths: list[str], case: Case, turn: int | None = None) -> list[str]:
    """The functions that an input asks: always the same ones, for it may be asked again."""
    others = [path for path in paths if path.split(".")[1] not in SEAMS]
    turn = zlib.crc32(repr(case).encode()) % TURNS if turn is None else turn
    left_out = {*others} - {*others[turn::TURNS]} if len(paths) > MOST else set()
    return [path for path in paths if path not in left_out]


def is_of_the_contract(impl: Implementation, path: str, arguments: dict[str, Any], answer: Any) -> bool:
    """Whether an answer is that of the mathematics, within rounding."""
    with np.errstate(all="ignore"):
        expected = oracle(path)(**arguments)
    expected = tuple(expected) if isinstance(expected, Iterator) else expected
    try:
        agree_within_rounding(impl, path, arguments, expected, answer)
    except (Violation, OutsideDomain, ValueError):
        return False
    return True


def callables(
    impl: Implementation, case: Case, paths: list[str] | None = None
) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """The same without answers that hold a NaN, of which the laws of its equation say too."""
    return (each for each in answers(impl, case, paths) if not holds_nan(each[2]))


def holds_nan(numbers: Any) -> bool:
    return any(np.isnan(leaf).any() for leaf in leaves(numbers) if leaf.dtype.kind == "f")


def leaves(value: Any) -> list[Any]:
    """The arrays of a value, tensors among them, tuples taken apart."""
    if isinstance(value, tuple | list):
        return [leaf for entry in value for leaf in leaves(entry)]
    return [value] if hasattr(value, "shape") and hasattr(value, "dtype") else []


def same_bits(first: Any, second: Any) -> bool:
    """Whether two answers or arguments are the same: arrays, numbers, and tuples and lists of them."""
    if isinstance(first, tuple | list):
        return len(first) == len(second) and all(map(same_bits, first, second))
    one, other = to_numpy(first), to_numpy(second)
    if not isinstance(one, np.ndarray):
        return bool(one == other) or one != one
    return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


def agree_within_rounding(
    impl: Implementation,
    path: str,
    arguments: dict[str, Any],
    plain: Any,
    other: Any,
    otherwise: str = "depends on how its inputs are stored",
    more: float = 0.0,
) -> None:
    """Raise Violation unless two results agree within twice
    what one of them may be wrong by, and so much more.
    """
    if same_bits(plain, other):  # most often so, and the allowance is dear
        return
    several, found = isinstance(plain, tuple), impl.allowance
    if several and any(isinstance(part, tuple) for part in plain):  # all numbers in a row
        several, plain, other, found = False, in_a_row(plain), in_a_row(other), allowance_in_a_row(impl)
    these, those = leaves(to_numpy(plain)), leaves(to_numpy(other))
    require(len(these) == len(those), f"{path} {otherwise}", plain, other)
    for place, (expected, got) in enumerate(zip(these, those, strict=True)):
        if expected.dtype.kind != "f":
            wrong = expected.shape != got.shape or (expected != got).any()
        else:
            allowed = found(path, pick=place if several else None, **arguments)
            finite = np.isfinite(expected)
            wrong = got.shape != expected.shape or (finite != np.isfinite(got)).any()
            apart = float(np.abs(got[finite] - expected[finite]).max(initial=0)) if not wrong else np.inf
            wrong = wrong or not allowed.wider(more).covers(apart / 2, 0)
        require(not wrong, f"{path} {otherwise}", expected, got)


def in_a_row(answer: Any) -> np.ndarray:
    """All numbers of an answer, whatever its tuples."""
    return np.concatenate([np.ravel(leaf) for leaf in leaves(to_numpy(answer))], dtype=np.float64)


def allowance_in_a_row(impl: Implementation) -> Callable[..., Any]:
    """`impl.allowance` of the numbers of an answer in a row."""

    def found(path: str, pick: None, **arguments: Any) -> Any:
        return allowance(
            lambda **given: in_a_row(oracle(path)(**given)),
            dtype=impl.dtype,
            unrepresentable=impl.unrepresentable,
            **arguments,
        )

    return found


NEAR = 16
"""How much numbers are moved to see whether a selection is near a tie, in roundings."""


def agree(
    impl: Implementation,
    path: str,
    given: dict[str, Any],
    expected: Any,
    got: Any,
    otherwise: str,
    more: float = 0.0,
) -> None:
    """Raise Violation unless an answer is that of the mathematics: numbers within rounding and so much more,
    and anything else exactly. A selection that a rounding may decide says nothing.
    """
    expected, got = _arrays(expected), _arrays(got)
    if same_bits(expected, got):
        return
    exact, own = chosen(expected), chosen(got)
    if exact and not same_bits(exact, own):
        if is_near_a_tie(impl, path, given, exact) or a_rounding_decides(impl, path, given, exact, own):
            return
        raise Violation(f"{path} {otherwise}", expected, got)
    agree_within_rounding(impl, path, given, expected, got, otherwise, more)


def chosen(answer: Any) -> list[np.ndarray]:
    """What an answer selects or counts."""
    return [leaf for leaf in leaves(_arrays(answer)) if leaf.dtype.kind != "f"]


def _arrays(answer: Any) -> Any:
    """An answer with its numbers as arrays."""
    if isinstance(answer, tuple | list):
        return tuple(map(_arrays, answer))
    return np.asarray(answer) if isinstance(answer, int | float | np.generic) else answer


def is_near_a_tie(impl: Implementation, path: str, given: dict[str, Any], exact: list[Any]) -> bool:
    """Whether what is counted or selected is another where the numbers move by some roundings."""
    generator = np.random.default_rng(0)

    def moved(value: Any) -> Any:
        if isinstance(value, tuple):
            return type(value)(*map(moved, value))
        if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
            return value
        return value * (1 + NEAR * EPSILON[impl.dtype] * generator.uniform(-1, 1, size=value.shape))

    for _ in range(6):
        other = {name: moved(value) for name, value in given.items()}
        if not fits(path, other):
            continue
        with np.errstate(all="ignore"):
            answer = oracle(path)(**other)
        if not same_bits(chosen(answer), exact):
            return True
    return False


def a_rounding_decides(
    impl: Implementation,
    path: str,
    given: dict[str, Any],
    exact: list[np.ndarray],
    own: list[np.ndarray],
) -> bool:
    """Whether the mathematics itself, in the arithmetic of
    the dtype, selects or counts otherwise in as many places.
    """
    if len(exact) != len(own):
        return False

    def others(found: list[np.ndarray]) -> float:
        """The places where something else is chosen; all, where another number of them is."""
        pairs = zip(exact, found, strict=True)
        return float(sum((one != two).sum() if one.shape == two.shape else one.size for one, two in pairs))

    differing = allowance(lambda **given: others(chosen(oracle(path)(**given))), dtype=impl.dtype, **given)
    return others(own) <= differing.largest


def require_right(impl: Implementation, path: str, given: dict[str, Any], otherwise: str) -> None:
    """Raise Violation unless the answer to these arguments is that of the mathematics; NaN says nothing."""
    with np.errstate(all="ignore"):
        expected = oracle(path)(**given)
    if not holds_nan(expected):
        got = ask(impl, path, natives_of(impl, given))
        agree(impl, path, given, expected, got, otherwise)
