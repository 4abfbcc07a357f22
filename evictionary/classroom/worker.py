"""The program of the child process: it loads one student file and answers calls, and holds no secrets.

It is started as `python -I -S worker.py SITE WIRE SANDBOX` with two pipes: where NumPy is, the file that
reads and writes frames, and `sandbox.py`. It imports the standard library, these and, if the assignment needs
it, torch. Expected values, seeds and verdicts stay in the parent.
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import itertools
import linecache
import os
import pickle
import random
import re
import sys
import traceback
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

LARGEST_CALL = 512 * 2**20  # a call holds the keys and values of a long text


def load(path: str, name: str) -> Any:
    """Import a file as the module of a name."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


HINTS = (  # a part of an error, and what it comes from
    ("BdbQuit", "there is no terminal here: take the breakpoint out, and run the script that `check` writes"),
    ("EOF when reading", "nobody types anything here: take input() out"),
    ("'grid_idx'", "a kernel is launched with its grid, as kernel[grid](...)"),
    ("grid_dim", "a kernel is launched with its grid, as kernel[grid](...)"),
)


def describe(error: BaseException, path: str) -> dict[str, Any]:
    """An exception as the parent shows it: its type, its
    message and the last line of the student's file in it.
    """
    # Not by extract_tb: it opens the files of all frames, and the audit hook would write that down as tried
    # by the student.
    lines = [
        line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == path
    ]
    place = (
        f"{os.path.basename(path)}:{lines[-1]}: {linecache.getline(path, lines[-1]).strip()}" if lines else ""
    )
    hint = next((hint for part, hint in HINTS if part in f"{type(error).__name__} {error}"), "")
    return {
        "error": type(error).__name__,
        "message": ": ".join(each for each in (str(error)[:2000], hint) if each),
        "place": place,
        "value_error": isinstance(error, ValueError),
    }


@contextlib.contextmanager
def watched_launches() -> Iterator[dict[str, float]]:
    """Triton's interpreter as the grader needs it: places that a load leaves out hold NaN, unless it says
    what else they hold.

    The number "added" of what is returned is added to every number that a kernel writes: an answer that a
    kernel computes changes too. The interpreter is the same object before and after, so that a file does not
    see when the grader looks.
    """
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _get_np_dtype

    state, originals = {"added": 0.0}, {}

    def watch(name: str, change: Callable[..., tuple[Any, ...]]) -> None:
        originals[name] = original = getattr(InterpreterBuilder, name)
        watched = functools.wraps(original)(
            lambda self, *args, **named: original(self, *change(*args), **named)
        )
        del watched.__wrapped__
        setattr(InterpreterBuilder, name, watched)

    def changed(value: Any) -> Any:
        return (
            dataclasses.replace(value, data=value.data + state["added"])
            if value.data.dtype.kind == "f"
            else value
        )

    def filled(place: Any, mask: Any, other: Any, *rest: Any) -> tuple[Any, ...]:
        dtype = _get_np_dtype(place.get_element_ty())
        if other is None and dtype.kind == "f":  # a GPU leaves there what was there
            other = TensorHandle(np.full_like(place.data, np.nan, dtype=dtype), place.get_element_ty())
        return place, mask, other, *rest

    watch("create_masked_load", filled)
    watch("create_masked_store", lambda place, value, *rest: (place, changed(value), *rest))
    watch("create_atomic_rmw", lambda kind, place, value, *rest: (kind, place, changed(value), *rest))
    try:
        yield state
    finally:
        for name, original in originals.items():
            setattr(InterpreterBuilder, name, original)


# What torch may do to the keys of a kernel: allocate, move, look whether they are finite. Anything else is
# arithmetic.
MOVES = re.compile(
    r"(new_)?(empty|zeros|ones|full)(_like|_strided)?|clone|contiguous|copy_|to|cpu|float|view|reshape|flatten|(un)?squeeze|expand|"
    r"transpose|swapaxes|movedim|permute|t|as_strided|detach|narrow|select|split|unbind|chunk|cat|stack|pad|fill_|zero_|"
    r"__(get|getitem|setitem|set|iter)__|abs|max|min|amax|amin|aminmax|nan_to_num"
)
SMALL_KEYS = 4096  # of fewer numbers a step between two launches may be as large


@contextlib.contextmanager
def kernels_alone(keys: Any) -> Iterator[None]:
    """Raise TypeError if torch or NumPy does arithmetic
    with as many numbers as the keys have: a kernel has to.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    counts: Counter[str] = Counter()

    class Counting(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result, name = function(*args, **(kwargs or {})), getattr(function, "__name__", str(function))
            numbers = [each for each in (*args, *(kwargs or {}).values()) if isinstance(each, torch.Tensor)]
            leaves = name in ("numpy", "tolist", "__array__", "__dlpack__")
            is_float = isinstance(result, torch.Tensor) and result.is_floating_point()
            # NaN or infinite if one of them is
            is_total = name in ("sum", "mean") and is_float and result.numel() == 1
            if leaves or (is_float and not is_total and not MOVES.fullmatch(name)):
                counts[name] += max((each.numel() for each in numbers), default=0)
            return result

    with Counting():
        yield
    if counts.total() >= max(keys.numel(), SMALL_KEYS):
        told = (
            f"{', '.join(sorted(counts))} on {counts.total()} numbers outside of a kernel, for "
            f"{keys.numel()} numbers of keys"
        )
        raise TypeError(f"{told}: a kernel has to compute with the keys")


def numbers(value: Any) -> Any:
    """The bytes of an array, of each array of a tuple in turn; anything else as it is."""
    if isinstance(value, tuple):
        return [numbers(entry) for entry in value]
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
    return getattr(value, "tobytes", lambda: value)()


def in_memory_of(result: Any, given: Any) -> bool:
    """Whether a result, or an array of a tuple of them, lies in the memory of an argument."""
    import numpy as np

    if isinstance(result, tuple | list):
        return any(in_memory_of(entry, given) for entry in result)
    if hasattr(result, "untyped_storage") and hasattr(given, "untyped_storage"):
        return (
            bool(given.numel()) and result.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
        )
    return (
        isinstance(result, np.ndarray)
        and isinstance(given, np.ndarray)
        and np.may_share_memory(result, given)
    )


def in_memory_of_any(result: Any, given: Any) -> bool:
    """Whether a result lies in the memory of an array, or of one in a tuple or a list."""
    if isinstance(given, tuple | list):
        return any(in_memory_of_any(result, entry) for entry in given)
    return in_memory_of(result, given)


def global_generators(*, use: bool = False) -> bytes:
    """The states of the random generators of this process: of Python, NumPy, and torch where it runs. With
    `use`, after a number is drawn from each, so that a seed shows.
    """
    numpy, torch = sys.modules["numpy"], sys.modules.get("torch")
    if use:
        random.random()
        numpy.random.random()
        torch and torch.rand(1)
    tensor = torch.get_rng_state().numpy() if torch else None
    return pickle.dumps((random.getstate(), numpy.random.get_state(), tensor))


def answer(
    function: Callable[..., Any],
    arguments: list[Any],
    keywords: dict[str, Any],
    owes_memory: bool | None = None,
    numbers: Callable[[Any], Any] = numbers,
) -> Any:
    """Call a function. Raises TypeError if it returns nothing, or has written into an argument by then.

    A function that owes memory of its own may not return that of an argument. Of code that nobody trusts it
    is known whether it owes that, and nothing may be its answer.
    """
    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code else ()
    named = itertools.zip_longest(names[: len(arguments)], range(1, 1 + len(arguments)))
    given = (
        dict(zip((name or f"argument {place}" for name, place in named), arguments, strict=True)) | keywords
    )
    before = {name: numbers(value) for name, value in given.items()}
    result = function(*arguments, **keywords)
    called = getattr(function, "__name__", "the function")
    if result is None and owes_memory is None:
        raise TypeError(f"{called} returned None: is there a return?")
    if written := [name for name, value in given.items() if numbers(value) != before[name]]:
        raise TypeError(f"{called} writes into {', '.join(written)}, which others still need: work on a copy")
    if owes_memory and (lent := [name for name, value in given.items() if in_memory_of(result, value)]):
        raise TypeError(f"{called} returns memory of its argument {', '.join(lent)}: return a copy")
    return result


WATCHED = (
    "__main__",
    "wire",
    "sandbox",
    "builtins",
    "time",
    "math",
    "numpy",
    "numpy.linalg",
    "torch",
    "torch.nn.functional",
    "torch.testing",
)


def functions_there() -> dict[tuple[str, str], Any]:
    """The functions of the modules that a clock or a comparison needs, and that a file might replace."""
    modules = {name: vars(sys.modules[name]) for name in WATCHED if name in sys.modules}
    return {
        (module, name): value
        for module, names in modules.items()
        for name, value in names.items()
        if callable(value)
    }


def replaced(before: dict[tuple[str, str], Any]) -> list[str]:
    """The functions that are others than before."""
    return [
        f"replace {module}.{name}"
        for (module, name), was in before.items()
        if vars(sys.modules[module]).get(name) is not was
    ]


LARGEST_PLACE = 2**16  # numbers of an argument that comes where an earlier one was


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Read the settings from the first frame, load the file, then answer one call after another."""
    sys.path.append(sys.argv[1])

    wire, sandbox = load(sys.argv[2], "wire"), load(sys.argv[3], "sandbox")
    tried: list[str] = []
    there: dict[tuple[str, str], Any] = {}
    places: dict[Any, Any] = {}
    taken: list[Any] = []
    asked = {"dtype": ""}
    lent: dict[str, Any] = {}
    module = torch = None
    # By names of their own: a file can replace those of this module, and is seen then.
    ask, changes, generators, shares = answer, replaced, global_generators, in_memory_of_any

    def reply(message: dict[str, Any], *values: Any) -> None:
        told = [*tried, *changes(there)][: sandbox.MOST_TRIED]
        replies.write(wire.frame(message | {"tried": told}, values))
        replies.flush()

    def named(name: str, fields: dict[str, Any]) -> Any:
        kind = name.rpartition(".")[2]
        return (getattr(module, kind, None) or namedtuple(kind, fields))(*fields.values())

    def placed(array: Any) -> Any:
        """The array at the address of an earlier argument of its kind: a file that knows inputs by their
        addresses is wrong.
        """
        taken.append((len(taken), array.shape, array.strides, array.dtype.str))
        if array.size > LARGEST_PLACE:
            return array
        place = places.setdefault(taken[-1], array)
        place[...] = array
        return place

    def native(array: Any) -> Any:
        own = placed(array) if setup["strict"] else array
        if torch is None:
            return own
        tensor = torch.from_numpy(own)
        dtype = getattr(torch, asked["dtype"] or "") if asked["dtype"] and own.dtype.kind == "f" else None
        return tensor.to(setup["device"], dtype)

    def request() -> tuple[dict[str, Any], list[Any]]:
        header = requests.read(16)
        if len(header) < 16:
            os._exit(0)  # the parent has ended or closed the pipe
        text, body = wire.sizes(header, LARGEST_CALL)
        taken.clear()
        told = requests.read(text)
        asked["dtype"] = wire.parsed(told).get("dtype", "")
        message, values = wire.read(told, requests.read(body), named, native)
        return message, values

    setup, _ = request()
    compiled = load(setup["executor"], "compiled") if setup["device"] == "compiled" else None
    if compiled:
        sys.path.insert(0, setup["triton"])
        compiled.begin()
        compiled.within_walls()
        setup["device"] = "cuda"
    if setup["library"] == "torch":
        torch = importlib.import_module("torch")
        torch.set_num_threads(1)
        for dtype in (torch.float16, torch.bfloat16) if setup["strict"] else ():
            # it asks for the processor once, which the walls forbid
            torch.ones(2, 2, dtype=dtype).mm(torch.ones(2, 2, dtype=dtype)).mean()
        if setup["interpret"]:
            os.environ["TRITON_INTERPRET"] = "1"
            import triton.language  # noqa: F401

            load(setup["interpreter"], "interpreted").take_first_configurations()
        if setup["strict"]:
            torch.use_deterministic_algorithms(True, warn_only=True)  # what torch.empty gives holds NaN
    for name in setup["allowed"] or ():
        importlib.import_module(name)  # before the walls: some read files of theirs, or load a library in C
    watching = (
        watched_launches()
        if setup["interpret"]
        else contextlib.nullcontext(compiled.CHANGED if compiled else {"added": 0.0})
    )
    launches = watching.__enter__()  # as long as the process lives
    path = setup["path"]
    walls, tried = sandbox.confined(setup) if setup["confine"] else ({"audit hook": False}, [])
    reply({"walls": walls})
    there = functions_there() if setup["strict"] else {}
    try:
        module = load(path, setup["stem"])
    except BaseException as error:
        reply(describe(error, path))
        return
    reply({"functions": [name for name, value in vars(module).items() if callable(value)]})
    while True:
        message, values = request()
        notes: list[str] = []
        try:
            function, count = getattr(module, message["call"]), len(values) - len(message["keywords"])
            arguments, keywords = values[:count], dict(zip(message["keywords"], values[count:], strict=True))
            if message["time"]:
                from triton.testing import do_bench

                result = do_bench(functools.partial(function, *arguments, **keywords), return_mode="median")
            else:
                launches["added"] = float(message["change launches"])
                alone = setup["interpret"] and not setup["strict"]
                called = kernels_alone(arguments[0])(function) if alone else function
                owes_memory = message["call"] in setup["strict"] if setup["strict"] else None
                if compiled:
                    compiled.forget()
                before = generators(use=True) if setup["strict"] else None
                result = ask(called, arguments, keywords, owes_memory)
                if setup["strict"]:
                    notes += ["random"] * (generators() != before)
                    others = {"argument": [*arguments, *keywords.values()], "next": lent.get(message["call"])}
                    notes += [name for name, other in others.items() if shares(result, other)]
                    lent[message["call"]] = result
                for stop in compiled.STOPPED + compiled.UNEXECUTED if compiled else ():
                    raise stop  # also one that the file has caught
            reply({"memory": notes}, result)
        except wire.BadMessage as error:
            reply(
                {
                    "error": "TypeError",
                    "message": f"{message['call']} returned {error}",
                    "place": "",
                    "value_error": False,
                }
            )
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            told = describe(error, path)
            if fault := compiled and compiled.fault(error):
                told |= {"message": fault[0], "place": fault[1].replace(path, os.path.basename(path))}
            reply(told)


def main() -> None:
    """Keep the pipes, and give the student's code an empty input and an output that is discarded."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    serve(requests, replies)


if __name__ == "__main__":
    main()
