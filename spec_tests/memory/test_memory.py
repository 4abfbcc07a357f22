"""Laws of every seam, whatever it computes: MEM-1 to MEM-9. They are about memory, where kernels go wrong.

They put every function of the contract to the test, with arguments that `arguments.py` draws from its line;
the message names the function.
"""

import importlib
import pickle
import random
import sys

from evictionary.spec_tests.judge import compiled
from evictionary.spec_tests.judge.degenerate import MEMORY, REFUSAL
from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.memory.arguments import batched, fits
from evictionary.spec_tests.memory.gradients import (
    calls_of_the_contract,
    directions_of,
    gradients,
    is_wrong,
    slope,
)
from evictionary.spec_tests.memory.helpers import (
    PLAIN,
    VIEWS,
    agree_within_rounding,
    answers,
    ask,
    callables,
    holds_nan,
    in_turn,
    leaves,
    natives_of,
    same_bits,
)

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
        ask(impl, path, natives)
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
        ask(impl, path, natives_of(impl, arguments))
        require(global_generators() == before, f"{path} changed the state of a global random generator")


def share_memory(impl: Implementation, one: Any, other: Any) -> bool:
    if impl.array_library != "torch":
        return np.shares_memory(one, other)
    return one.numel() > 0 and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def any_shared(impl: Implementation, results: list[Any], others: list[Any]) -> bool:
    return any(share_memory(impl, *pair) for pair in itertools.product(results, others))


@law("MEM-2", of=ANY, case=SMALL, not_for=with_strides)
def test_outputs_are_memory_of_their_own(impl, case):
    """Writing into a result never changes an input, nor the result of the next call: also where every
    token is kept.
    """
    for path, arguments, _ in callables(impl, case):
        whole = {**arguments, "kept": np.ones_like(arguments["kept"])} if "kept" in arguments else arguments
        natives = natives_of(impl, whole if fits(path, whole) else arguments)
        results, later = (leaves(ask(impl, path, natives)) for _ in range(2))
        given = leaves(tuple(natives.values()))
        if path in VIEWS and any_shared(impl, results, given):
            continue
        for what, others in (("an argument", given), ("that of the next call", later)):
            require(not any_shared(impl, results, others), f"a result of {path} shares memory with {what}")


@law("MEM-3", of=ANY, case=SMALL)
def test_the_same_call_gives_the_same_bits(impl, case):
    """Two calls in a row with the same inputs agree to the last bit, and with an earlier one within rounding.

    Between them other sizes were asked for, after which a compiler may use another program.
    """
    calls = list(callables(impl, case))
    for path, arguments, first in reversed(calls):
        again, at_once = (to_numpy(ask(impl, path, natives_of(impl, arguments))) for _ in range(2))
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
        agree_within_rounding(impl, path, arguments, plain, ask(impl, path, strided))


@law("MEM-4", of=ANY, case=PLAIN, not_for=with_strides)
def test_expanded_inputs_are_read_as_copies(impl, case):
    """A batch that repeats one item without storing it twice (stride 0) gives what two stored copies give."""
    for path, arguments, _ in callables(impl, case):
        if any(isinstance(value, tuple) for value in arguments.values()):
            continue
        natives, expanded = dict[str, Any](), dict[str, Any]()
        for name, value in arguments.items():
            natives[name] = expanded[name] = impl.native(value)
            if name in batched(path):
                natives[name] = impl.native(np.concatenate([value[:1]] * 2))
                one = impl.native(value[:1])
                shape = (2, *one.shape[1:])
                expanded[name] = (
                    np.broadcast_to(one, shape) if impl.array_library != "torch" else one.expand(shape)
                )
        repeated = {name: to_numpy(value) for name, value in natives.items()}
        if not fits(path, repeated):
            continue
        agree_within_rounding(impl, path, repeated, ask(impl, path, natives), ask(impl, path, expanded))


@law("MEM-5", of=ANY, case=SMALL, not_for=torch_only)
def test_poisoned_memory_does_not_shine_through(impl, case):
    """With every uninitialised tensor filled with NaN the results are the same: each element is written."""
    torch = importlib.import_module("torch")
    for path, arguments, plain in callables(impl, case):
        natives, before = natives_of(impl, arguments), torch.get_deterministic_debug_mode()
        torch.set_deterministic_debug_mode("warn")  # fills what torch.empty gives
        try:
            poisoned = to_numpy(ask(impl, path, natives))
        finally:
            torch.set_deterministic_debug_mode(before)
        # A number may differ by a rounding: what is compiled is compiled anew in this mode.
        agree_within_rounding(
            impl, path, arguments, plain, poisoned, "leaves elements of its result unwritten"
        )


@law("MEM-6", of=ANY, case=SMALL, not_for=cuda_only, why="a missing synchronisation shows on a GPU alone")
def test_another_stream_gives_the_same_numbers(impl, case):
    """A call queued on a stream of its own, behind other work, gives the same numbers."""
    torch = importlib.import_module("torch")
    for path, arguments, _ in callables(impl, case):
        plain = to_numpy(ask(impl, path, natives_of(impl, arguments)))
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            busy = torch.randn(2048, 2048, device=impl.device)
            for _ in range(8):
                busy = busy @ busy / 2048
            result = ask(impl, path, natives_of(impl, arguments))
        stream.synchronize()
        agree_within_rounding(impl, path, arguments, plain, result, "gives other numbers on another stream")


def lazy_memory_only(impl):
    copied = "ttsem copies all the memory of a launch, here 8 GB" if impl.device == compiled.DEVICE else ""
    return torch_only(impl) or copied


@law("MEM-7", of=ANY, not_for=lazy_memory_only)
def test_offsets_do_not_wrap_at_two_to_the_31(impl):
    """Batch items 2^31 elements apart are read where they are. Only the pages that are touched take memory
    on a CPU.
    """
    torch = importlib.import_module("torch")
    case = impl.domain.fitted({"case": Case(batch=2, num_kv_heads=2, length=8)})["case"]
    dtype = getattr(torch, impl.dtype)
    paths = [path for path in impl.asked_of_memory() if "keys" in batched(path)]
    for path, arguments, _ in callables(impl, case, paths):
        natives = natives_of(impl, arguments)
        keys = natives["keys"]
        step = 2**31 + 64
        far = torch.empty(step + keys[0].numel(), dtype=dtype, device=impl.torch_device)
        far = far.as_strided(keys.shape, (step, *keys.stride()[1:]))
        far.copy_(keys)
        plain = ask(impl, path, natives)
        agree_within_rounding(impl, path, arguments, plain, ask(impl, path, {**natives, "keys": far}))


def compiled_only(impl):
    return (
        "" if impl.device == compiled.DEVICE else f"it is asked of compiled code: --device {compiled.DEVICE}"
    )


# Part of a tile, whole tiles and more; a few channels, and those of a model. Every profile draws all.
TILES = st.sampled_from(
    [
        Case(seed=turn, batch=2, num_kv_heads=2, group=2, length=length, head_dim=head_dim)
        for turn, (length, head_dim) in enumerate(((17, 3), (128, 64), (130, 3), (130, 64)))
    ]
)


@law(
    "MEM-8",
    of=ANY,
    kind=MEMORY,
    examples=100,
    case=TILES,
    not_for=compiled_only,
    why="the mistakes of kernels are planted apart",
)
def test_compiled_code_touches_its_own_memory_alone(impl, case):
    """Each launch stays inside its tensors, no two programs touch an element that one of them changes, and
    no value is undefined.
    """
    compiled.forget()
    found = list(answers(impl, case, in_turn(impl.asked_of_memory(), case, case.seed)))
    for error in compiled.STOPPED + compiled.UNEXECUTED:
        raise error
    for path, _, numbers in found:
        require(not holds_nan(numbers), f"{path} answers with a NaN, which is in none of its arguments")


GENERIC = st.builds(
    Case,
    seed=seeds(),
    batch=st.integers(1, 2),
    num_kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 2]),
    length=st.sampled_from([8, 17]),
    head_dim=st.sampled_from([4, 8]),
    value_dim=st.sampled_from([4, 8]),
    num_queries=st.integers(1, 2),
)


def with_graphs(impl: Implementation) -> str:
    return "" if impl.array_library == "torch" else "gradients are asked of torch"


@law("MEM-9", of=ANY, kind=REFUSAL, examples=10, case=GENERIC, not_for=with_graphs)
def test_an_answer_carries_the_graph_or_is_refused(impl, case):
    """Where a gradient is wanted, an answer has the numbers of a call without one, and the gradient of each
    argument is the slope of the mathematics. Or the call is refused, and the error names the function.
    """
    for path, arguments, plain in calls_of_the_contract(impl, case):
        if (found := gradients(impl, path, arguments, case.seed)) is None:
            continue
        answer, of = found
        agree_within_rounding(impl, path, arguments, plain, answer, "answers otherwise with a graph")
        for name, along in directions_of(arguments, case.seed):
            expected, own = slope(path, arguments, name, along, case.seed), of[name]
            terms = np.zeros(1) if own is None else own * along
            if abs(terms.sum() - expected) <= graph_slack(impl, terms, answer):
                continue
            if is_wrong(impl, path, arguments, plain):  # the laws of its equation say so
                break
            argument = ".".join(filter(None, name))
            said = "carries no graph of" if own is None else "gives a wrong gradient of"
            raise Violation(f"{path} {said} {argument}", expected, float(terms.sum()))


def graph_slack(impl: Implementation, terms: np.ndarray, answer: Any) -> float:
    """What a slope may be wrong by: a hundredth of its terms, for each is a product of many rounded numbers,
    and a few roundings of the answer. A graph that is cut misses a term as a whole.
    """
    size = sum(
        np.abs(leaf[np.isfinite(leaf)]).sum() for leaf in leaves(to_numpy(answer)) if leaf.dtype.kind == "f"
    )
    return float(np.abs(terms).sum() / 100 + 8 * EPSILON[impl.dtype] * (1 + size))
