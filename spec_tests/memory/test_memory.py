"""Laws of every seam, whatever it computes: MEM-1 to MEM-8. They are about memory, where kernels go wrong.

They put to the test each seam whose arguments `ARGUMENTS` knows how to make; the message names the function.
"""

import importlib
import inspect
import pickle
import random
import sys
from collections.abc import Callable, Iterator

from evictionary.reference import attention, cache, momentkv
from evictionary.spec_tests.judge.compiled import DEVICE, STOPPED
from evictionary.spec_tests.judge.degenerate import MEMORY
from evictionary.spec_tests.judge.domain import OutsideDomain
from evictionary.spec_tests.judge.prelude import *

SMALL = st.builds(
    Case,
    kind=st.sampled_from(KINDS),
    seed=seeds(),
    batch=st.integers(1, 2),
    num_kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 2]),
    length=st.sampled_from([1, 8, 17]),
    head_dim=st.sampled_from([2, 8]),
    value_dim=st.sampled_from([2, 8]),
    num_queries=st.integers(1, 2),
)
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
    "moments": moments_of,
    "evicted": lambda case: mask(case, case.keys.shape[:3], 0.5),
    "p": lambda case: 0.9,
    "keep_ratio": lambda case: 0.5,
    "sink_size": lambda case: 1,
    "lag_size": lambda case: 3,
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
    if len(silent) == len(asked) and not STOPPED:
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


def torch_only(impl: Implementation) -> str:
    return "" if impl.array_library == "torch" else "its array library manages this memory itself"


def with_strides(impl: Implementation) -> str:
    return (
        ""
        if impl.array_library in WITH_STRIDES
        else f"a caller of {impl.array_library} chooses no strides, and shares no memory"
    )


def cuda_only(impl: Implementation) -> str:
    return "" if impl.device.startswith("cuda") else f"there are no streams on {impl.device}"


@law("MEM-1", of=ANY, case=SMALL)
def test_inputs_are_left_alone(impl, case):
    """No function writes into its inputs."""
    for path, arguments, _ in callables(impl, case):
        natives = natives_of(impl, arguments)
        impl.function(path)(**natives)
        for name, value in arguments.items():
            require(
                same_bits(impl.native(value), natives[name]),
                f"{path} changed its argument {name}",
                value,
                to_numpy(natives[name]),
            )


def global_generators() -> bytes:
    """The states of the random generators of a process: of Python, NumPy, and torch where it runs."""
    torch = sys.modules.get("torch")
    tensor = torch.get_rng_state().numpy() if torch else None
    return pickle.dumps((random.getstate(), np.random.get_state(), tensor))


def use_global_generators() -> None:
    """Draw a number from each, so that a seed would show."""
    random.random()
    np.random.random()
    if torch := sys.modules.get("torch"):
        torch.rand(1)


@law("MEM-1", of=ANY, case=SMALL)
def test_global_random_generators_are_left_alone(impl, case):
    """No function seeds a global random generator, or draws from it: its caller draws from it too."""
    for path, arguments, _ in callables(impl, case):
        use_global_generators()
        before = global_generators()
        impl.function(path)(**natives_of(impl, arguments))
        require(global_generators() == before, f"{path} changed the state of a global random generator")


def share_memory(impl: Implementation, one: Any, other: Any) -> bool:
    if impl.array_library != "torch":
        return np.shares_memory(one, other)
    return one.numel() > 0 and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@law("MEM-2", of=ANY, case=SMALL, not_for=with_strides)
def test_outputs_are_memory_of_their_own(impl, case):
    """Writing into a result never changes an input, nor the result of the next call: also where every
    token is kept.
    """
    for path, arguments, _ in callables(impl, case):
        if "kept" in arguments:
            arguments["kept"] = np.ones_like(arguments["kept"])
        natives = natives_of(impl, arguments)
        results, later = (leaves(impl.function(path)(**natives)) for _ in range(2))
        for what, others in (
            ("an argument", leaves(tuple(natives.values()))),
            ("that of the next call", later),
        ):
            shared = any(share_memory(impl, *pair) for pair in itertools.product(results, others))
            require(not shared, f"a result of {path} shares memory with {what}")


@law("MEM-3", of=ANY, case=SMALL)
def test_the_same_call_gives_the_same_bits(impl, case):
    """Two calls in a row with the same inputs agree to the last bit, and with an earlier one within rounding.

    Between them other sizes were asked for, after which a compiler may use another program.
    """
    calls = list(callables(impl, case))
    for path, arguments, first in reversed(calls):
        again, at_once = (to_numpy(impl.function(path)(**natives_of(impl, arguments))) for _ in range(2))
        require(same_bits(again, at_once), f"{path} gives other numbers the second time", again, at_once)
        agree_within_rounding(impl, path, arguments, first, again, "gives other numbers after other calls")


def transposed(impl: Implementation, native: Any) -> Any:
    """The same numbers, stored with the second and third axis exchanged."""
    if impl.array_library != "torch":
        return np.ascontiguousarray(native.swapaxes(1, 2)).swapaxes(1, 2)
    return native.transpose(1, 2).contiguous().transpose(1, 2)


def sliced(impl: Implementation, native: Any) -> Any:
    """The same numbers, every second one of a wider buffer whose rest is 77."""
    shape = (*native.shape[:-1], 2 * native.shape[-1])
    wide = np.full(shape, 77, native.dtype) if impl.array_library != "torch" else native.new_full(shape, 77)
    wide[..., ::2] = native
    return wide[..., ::2]


@law("MEM-4", of=ANY, case=PLAIN, layout=st.sampled_from([transposed, sliced]), not_for=with_strides)
def test_strides_do_not_matter(impl, case, layout):
    """Inputs stored in another order, or with gaps, give what contiguous ones give."""
    for path, arguments, plain in callables(impl, case):
        natives = natives_of(impl, arguments)
        strided = {
            name: layout(impl, value)
            if isinstance(arguments[name], np.ndarray) and value.ndim >= 3
            else value
            for name, value in natives.items()
        }
        agree_within_rounding(impl, path, arguments, plain, impl.function(path)(**strided))


@law("MEM-4", of=ANY, case=PLAIN, not_for=with_strides)
def test_expanded_inputs_are_read_as_copies(impl, case):
    """A batch that repeats one item without storing it twice (stride 0) gives what two stored copies give."""
    for path, arguments, _ in callables(impl, case):
        if any(isinstance(value, tuple) for value in arguments.values()):
            continue
        natives, expanded = {}, {}
        for name, value in arguments.items():
            natives[name] = expanded[name] = impl.native(value)
            if isinstance(value, np.ndarray):
                natives[name] = impl.native(np.concatenate([value[:1]] * 2))
                one = impl.native(value[:1])
                shape = (2, *one.shape[1:])
                expanded[name] = (
                    np.broadcast_to(one, shape) if impl.array_library != "torch" else one.expand(shape)
                )
        repeated = {name: to_numpy(value) for name, value in natives.items()}
        agree_within_rounding(
            impl, path, repeated, impl.function(path)(**natives), impl.function(path)(**expanded)
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
    several = isinstance(plain, tuple)
    pairs = zip(leaves(to_numpy(plain)), leaves(to_numpy(other)), strict=True)
    for place, (expected, got) in enumerate(pairs):
        if expected.dtype.kind != "f":
            wrong = expected.shape != got.shape or (expected != got).any()
        else:
            allowed = impl.allowance(path, pick=place if several else None, **arguments)
            finite = np.isfinite(expected)
            wrong = got.shape != expected.shape or (finite != np.isfinite(got)).any()
            wrong = wrong or np.abs(got[finite] - expected[finite]).max(initial=0) > 2 * allowed.largest
        require(not wrong, f"{path} {otherwise}", expected, got)


@law("MEM-5", of=ANY, case=SMALL, not_for=torch_only)
def test_poisoned_memory_does_not_shine_through(impl, case):
    """With every uninitialised tensor filled with NaN the results are the same: each element is written."""
    torch = importlib.import_module("torch")
    for path, arguments, plain in callables(impl, case):
        natives = natives_of(impl, arguments)
        before = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty gives
        try:
            poisoned = to_numpy(impl.function(path)(**natives))
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        # A number may differ by a rounding: what is compiled is compiled anew in this mode.
        agree_within_rounding(
            impl, path, arguments, plain, poisoned, "leaves elements of its result unwritten"
        )


@law("MEM-6", of=ANY, case=SMALL, not_for=cuda_only, why="a missing synchronisation shows on a GPU alone")
def test_another_stream_gives_the_same_numbers(impl, case):
    """A call queued on a stream of its own, behind other work, gives the same numbers."""
    torch = importlib.import_module("torch")
    for path, arguments, _ in callables(impl, case):
        plain = to_numpy(impl.function(path)(**natives_of(impl, arguments)))
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            busy = torch.randn(2048, 2048, device=impl.device)
            for _ in range(8):
                busy = busy @ busy / 2048
            result = impl.function(path)(**natives_of(impl, arguments))
        stream.synchronize()
        agree_within_rounding(impl, path, arguments, plain, result, "gives other numbers on another stream")


def lazy_memory_only(impl):
    copied = "ttsem copies all the memory of a launch, here 8 GB" if impl.device == DEVICE else ""
    return torch_only(impl) or copied


@law("MEM-7", of=ANY, not_for=lazy_memory_only)
def test_offsets_do_not_wrap_at_two_to_the_31(impl):
    """Batch items 2^31 elements apart are read where they are. Only the pages that are touched take memory
    on a CPU.
    """
    torch = importlib.import_module("torch")
    case = Case(batch=2, num_kv_heads=2, length=8)
    dtype = getattr(torch, impl.dtype)
    for path, arguments, _ in callables(impl, case):
        if "keys" not in arguments:
            continue
        natives = natives_of(impl, arguments)
        keys = natives["keys"]
        step = 2**31 + 64
        far = torch.empty(step + keys[0].numel(), dtype=dtype, device=impl.torch_device)
        far = far.as_strided(keys.shape, (step, *keys.stride()[1:]))
        far.copy_(keys)
        plain = impl.function(path)(**natives)
        agree_within_rounding(impl, path, arguments, plain, impl.function(path)(**{**natives, "keys": far}))


def compiled_only(impl):
    return "" if impl.device == DEVICE else f"it is asked of compiled code: --device {DEVICE}"


# Whole tiles, one token more than a tile, and a few channels.
TILES = st.builds(
    Case,
    seed=seeds(),
    batch=st.just(2),
    length=st.sampled_from([17, 128, 130]),
    head_dim=st.sampled_from([3, 64]),
)


@law(
    "MEM-8",
    of=ANY,
    kind=MEMORY,
    examples=25,
    case=TILES,
    not_for=compiled_only,
    why="the mistakes of kernels are planted apart",
)
def test_compiled_code_touches_its_own_memory_alone(impl, case):
    """Each launch stays inside its tensors, no two programs touch an element that one of them writes, and
    no value is undefined.
    """
    STOPPED.clear()
    found = list(answers(impl, case))
    if STOPPED:
        raise STOPPED[0]
    for path, _, numbers in found:
        require(not holds_nan(numbers), f"{path} answers with a NaN, which is in none of its arguments")
