"""The arguments of every seam by name, and what each seam gives for them; the grader makes them here too."""

import inspect
from collections.abc import Callable, Iterator

from evictionary.reference import attention, cache, momentkv
from evictionary.spec_tests.judge.compiled import STOPPED, UNEXECUTED
from evictionary.spec_tests.judge.domain import OutsideDomain
from evictionary.spec_tests.judge.prelude import *

PLAIN = st.builds(
    Case, seed=seeds(), batch=st.just(2), num_kv_heads=st.just(2), length=st.sampled_from([8, 17])
)


def mask(case: Case, shape: tuple[int, ...], share: float) -> np.ndarray:
    return np.random.default_rng(case.seed).random(shape) < share


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


def moments_of(case: Case) -> momentkv.Moments:
    empty = momentkv.no_moments(case.keys, case.values)
    return momentkv.update(empty, case.next_keys, case.next_values, mask(case, case.keys.shape[:3], 0.5))


def in_pages(case: Case) -> cache.PagedCache:
    """Each sequence in a page of its own, of which the last token is missing: `kept` is a mask over its
    places.
    """
    keys, values = (states.swapaxes(1, 2) for states in (case.keys, case.values))
    positions = np.broadcast_to(np.arange(case.length)[:, None], keys.shape[:3])
    lengths = np.full((case.batch, case.num_kv_heads), max(1, case.length - 1))
    return cache.PagedCache(
        keys, values, positions, np.arange(case.batch)[::-1, None], lengths, lengths[:, 0]
    )


def covariance(case: Case) -> np.ndarray:
    factor = np.concatenate([case.queries, case.queries[..., ::-1] / 2], axis=2)
    return np.swapaxes(factor, -1, -2) @ factor


# How to make the argument of a name, from a case. A seam with another required argument is left to its own
# laws.
ARGUMENTS: dict[str, Callable[[Case], Any]] = {
    "keys": lambda case: case.keys,
    "values": lambda case: case.values,
    "next_keys": lambda case: case.next_keys,
    "next_values": lambda case: case.next_values,
    "queries": lambda case: case.queries,
    "query": lambda case: case.queries[:, :, 0],
    "sampled_queries": lambda case: (
        np.repeat(case.queries, 3, axis=2) * np.arange(1, 3 * case.num_queries + 1)[:, None]
    ),
    "scores": lambda case: case.keys[..., 0],
    "budget": lambda case: max(1, case.length // 2),
    "kept": lambda case: mask(case, case.keys.shape[:3], 0.5),
    "paged": in_pages,
    "cache": lambda case: cache.compress(case.keys, case.values, mask(case, case.keys.shape[:3], 0.7)),
    "attention": lambda case: attention.softmax(case.keys[..., 0]),
    "query_mean": lambda case: case.queries.mean(axis=2),
    "query_covariance": covariance,
    "q_filters": lambda case: case.queries[:, :: case.group, 0],
    "query_direction": lambda case: case.queries[:, :, 0],
    "query_slack": lambda case: np.abs(case.queries[:, :, 0, ::2]),
    "moments": moments_of,
    "evicted": lambda case: mask(case, case.keys.shape[:3], 0.5),
    "p": lambda case: 0.9,
    "keep_ratio": lambda case: 0.5,
    "sink_size": lambda case: 1,
    "lag_size": lambda case: max(3, case.length // 8),
}


def natives_of(impl: Implementation, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments as arrays of the library of the implementation; no two calls share them."""
    return {name: impl.native(value) for name, value in arguments.items()}


def answers(impl: Implementation, case: Case) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Each provided seam that ARGUMENTS can call, its arguments by name (NumPy, rounded to the dtype), and
    what it gives; not where it fails, of which the laws of its equation say. Of none there is nothing to ask.
    """
    silent = {}
    for path in (asked := impl.asked_of_memory()):
        silent[path] = "no arguments are made for it"
        arguments = arguments_of(impl, path, case)
        if arguments is not None:
            try:
                answer = to_numpy(impl.function(path)(**natives_of(impl, arguments)))
            except Exception as error:
                silent[path] = f"it raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            else:
                del silent[path]
                yield path, arguments, answer
    if len(silent) == len(asked) and not STOPPED + UNEXECUTED:
        raise OutsideDomain("; ".join(f"{path}: {why}" for path, why in silent.items()))


def callables(impl: Implementation, case: Case) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """The same without answers that hold a NaN, of which the laws of its equation say too."""
    return (each for each in answers(impl, case) if not holds_nan(each[2]))


def arguments_of(impl: Implementation, path: str, case: Case) -> dict[str, Any] | None:
    """The arguments of a seam, rounded to the dtype; None where ARGUMENTS cannot call it."""
    if path.split(".")[1] not in SEAMS:
        return None
    arguments = {}
    for parameter in inspect.signature(oracle(path)).parameters.values():
        if parameter.name in ARGUMENTS:
            arguments[parameter.name] = impl.rounded(ARGUMENTS[parameter.name](case))
        elif parameter.default is parameter.empty:
            return None
    try:
        oracle(path)(**arguments)
    except ValueError:  # this method wants something else of such a case, such as a query for each token
        return None
    return arguments


def holds_nan(numbers: Any) -> bool:
    return any(np.isnan(leaf).any() for leaf in leaves(numbers) if leaf.dtype.kind == "f")


def leaves(value: Any) -> list[Any]:
    """The arrays of a value, tensors among them, tuples taken apart."""
    if isinstance(value, tuple | list):
        return [leaf for entry in value for leaf in leaves(entry)]
    return [value] if hasattr(value, "shape") and hasattr(value, "dtype") else []


def same_bits(first: Any, second: Any) -> bool:
    return all(
        np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
        for one, other in zip(leaves(to_numpy(first)), leaves(to_numpy(second)), strict=True)
    )


def agree_within_rounding(
    impl: Implementation,
    path: str,
    arguments: dict[str, Any],
    plain: Any,
    other: Any,
    otherwise: str = "depends on how its inputs are stored",
) -> None:
    """Raise Violation unless two results agree within twice what one of them may be wrong by."""
    if same_bits(plain, other):  # most often so, and the allowance is dear
        return
    several, found = isinstance(plain, tuple), impl.allowance
    if several and any(isinstance(part, tuple) for part in plain):  # all numbers in a row
        several, plain, other, found = False, in_a_row(plain), in_a_row(other), allowance_in_a_row(impl)
    pairs = zip(leaves(to_numpy(plain)), leaves(to_numpy(other)), strict=True)
    for place, (expected, got) in enumerate(pairs):
        if expected.dtype.kind != "f":
            wrong = expected.shape != got.shape or (expected != got).any()
        else:
            allowed = found(path, pick=place if several else None, **arguments)
            finite = np.isfinite(expected)
            wrong = got.shape != expected.shape or (finite != np.isfinite(got)).any()
            wrong = wrong or np.abs(got[finite] - expected[finite]).max(initial=0) > 2 * allowed.largest
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
