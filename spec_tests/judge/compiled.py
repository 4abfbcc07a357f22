"""`--device compiled`: kernels as Triton compiles them, executed on a CPU.

Each launch is compiled to Triton's IR for an H100 (sm_90), and `ttsem` executes that IR on the tensors of the
launch. It stops where a program reads or writes outside a tensor, where two programs touch the same element
and one of them writes it, and where an operation has an undefined result. It says nothing of time and of how
a GPU schedules programs.
"""

import atexit
import contextlib
import functools
import hashlib
import os
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

DEVICE = "compiled"
WANTED = {"ttsem": "0.1.0", "triton": "3.8.0"}
"""ttsem reads the IR of this one version of Triton."""

TARGET = "sm_90"
SECONDS = 900.0
"""How long one call may take by default: one of 131,072 tokens takes a minute or more."""

SHARED_MEMORY = 232_448
"""Bytes of shared memory that a program may take there; a launch that needs more is refused."""

STOPPED: list[Exception] = []
"""The faults of the law at hand. Code that catches a fault and goes on hides it from nobody."""

UNEXECUTED: list[Exception] = []
"""The launches of the law at hand that ttsem cannot execute."""

UNFILLED: dict[str, str] = {}
"""Lines with a masked load without `other` in the launches of the law at hand. Behind the mask such a load
holds no number.
"""

COUNTED = {"launches": 0, "accesses": 0, "unchecked": 0}
"""Of this process: launches, the accesses in which races were looked for, and launches that have too many
for that.
"""

CHANGED = {"added": 0.0}
"""What is added to each floating-point number that a kernel stores."""

CANNOT = "ttsem cannot execute a launch"
_SESSION = contextlib.ExitStack()


def missing() -> str:
    """What `--device compiled` needs and does not find, or an empty string."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "got TRITON_INTERPRET=1, wanted kernels that are compiled: unset it"
    if _found() != WANTED and "triton" not in sys.modules and (place := folder()):
        sys.path.insert(0, place)
    if (found := _found()) == WANTED:
        return ""
    got = " and ".join(f"{name} {number}" if number else f"no {name}" for name, number in found.items())
    wanted = " and ".join(f"{name} {number}" for name, number in WANTED.items())
    return (
        f"got {got}, wanted {wanted}: `make build/compiled` in a clone, or the commands of docs/compiled.md"
    )


def _found() -> dict[str, str]:
    return {name: _installed(name) for name in WANTED}


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def folder() -> str:
    """Where both lie for a process of its own: the folder that EVICTIONARY_COMPILED names, or build/compiled
    of a clone. Empty where there is neither.
    """
    clone = Path(__file__).resolve().parents[2] / "build" / "compiled"
    place = Path(os.environ.get("EVICTIONARY_COMPILED") or clone)
    there = all((place / f"{name}-{number}.dist-info").is_dir() for name, number in WANTED.items())
    return str(place.resolve()) if there else ""


@functools.cache
def begin() -> None:
    """From now on each launch of this process is executed by ttsem, and tensors on `cuda` lie in the
    memory of the CPU.
    """
    from triton import knobs
    from ttsem import harness, memory, sanitize

    execute, load, store, unfilled = harness.execute, memory.Memory.load, memory.Memory.store, set()
    compile_launch, needed, folder = harness._compile_asm, harness.shared_memory, knobs.cache.dir

    @contextlib.contextmanager
    def stored_apart(fn: Any) -> Iterator[None]:
        # the names of files are part of what is compiled, and no part of Triton's key
        with knobs.cache.scope():
            knobs.cache.dir = f"{folder}/{hashlib.sha256(fn.fn.__code__.co_filename.encode()).hexdigest()}"
            yield

    def compiled_apart(fn: Any, *launch: Any) -> Any:
        with stored_apart(fn):
            return compile_launch(fn, *launch)

    def shared(record: Any, target: Any) -> int:
        with stored_apart(record.fn):
            return needed(record, target)

    def loaded(self: Any, addresses: Any, mask: Any, other: Any, dtype: Any) -> Any:
        if other is None and mask is not None and not np.all(mask):
            unfilled.add(self.current_op)
            # Bits that are NaN in each floating-point format, some of which ttsem carries as bits, and as
            # whole numbers -1 and the largest in turn.
            bits = np.iinfo(f"u{np.dtype(dtype).itemsize}")
            other = np.resize(
                np.array([bits.max, bits.max >> 1], bits.dtype).view(dtype), np.shape(addresses)
            )
        return load(self, addresses, mask, other, dtype)

    def storing(self: Any, addresses: Any, values: Any, mask: Any) -> None:
        changes = CHANGED["added"] and np.asarray(values).dtype.kind == "f"
        store(
            self, addresses, values + np.asarray(CHANGED["added"], values.dtype) if changes else values, mask
        )

    def counting(record: Any, text: str, **options: Any) -> Any:
        if record.kwargs.get("num_ctas", 1) != 1:
            raise sanitize.Unjudged("unsupported", f"{record.fn_name} runs in clusters (num_ctas)", [])
        COUNTED["launches"] += 1
        unfilled.clear()
        # so that each access knows its line
        execution = execute(record, text, **{**options, "trace_access": True})
        COUNTED["launches"] -= execution.failure is not None
        for operation in unfilled:
            file, line, source = sanitize._source_of(operation, text)
            UNFILLED[f"{file}:{line}"] = source
        COUNTED["accesses"] += getattr(execution.memory, "_logged", 0)
        return execution

    def unchecked() -> None:
        COUNTED["unchecked"] += 1

    def stopped(error: Exception) -> None:
        (STOPPED if type(error).__name__ == "KernelFault" else UNEXECUTED).append(error)

    memory.Memory.load, memory.Memory.store = loaded, storing
    harness.execute, harness._compile_asm, harness.shared_memory = counting, compiled_apart, shared
    atexit.register(_SESSION.close)
    session = _SESSION.enter_context(
        sanitize.session(on_stop=stopped, on_unchecked=unchecked, inductor_lookback=False)
    )
    session.shared_limit = int(TARGET.removeprefix("sm_")), SHARED_MEMORY


def within_walls() -> None:
    """After `begin`, in a process that may soon write no file and start no program: compile no further than
    Triton's IR, and execute a kernel of one store, so that whatever a launch imports is there.
    """
    import torch
    import triton
    import triton.language as tl
    from ttsem import harness

    def compile_to_ir(*launch: Any) -> dict[str, str]:
        fn, args, kwargs, target = launch
        record = SimpleNamespace(fn=fn, args=args, kwargs=kwargs, fn_name=fn.__name__)
        return {"ttir": harness._stage_text(record, "ttir", target)}

    def store(place):
        tl.store(place, 1.0)

    harness._compile_asm, harness.shared_memory = compile_to_ir, lambda *launch: 0
    store.__globals__["tl"] = tl
    triton.jit(store)[(1,)](torch.empty(1, device="cuda"))


FAULT = "a fault of compiled code: "


def fault(error: BaseException) -> tuple[str, str] | None:
    """A launch that a GPU may not survive: what happened,
    and the line of the kernel. None for any other error.
    """
    if type(error).__name__ == "SharedOverLimit":
        need, kernel = error.required, error.kernel  # type: ignore[attr-defined]
        return (
            f"{FAULT}{kernel} needs {need:,} bytes of shared memory, and {TARGET} has {SHARED_MEMORY:,}",
            "",
        )
    if type(error).__name__ != "KernelFault":
        return None
    found = error.fault  # type: ignore[attr-defined]
    return (
        f"{FAULT}{error}",
        f"{found.source_file}:{found.source_line}, {found.kernel}" if found.source_line else "",
    )


def unexecuted(error: BaseException | None) -> str:
    """Why ttsem could not execute a launch of the law at hand, such as inline PTX, also where the code went
    another way then. Empty where it could, where a fault was met, and where the law ended by another error.
    """
    if not UNEXECUTED or STOPPED or (error is not None and error not in UNEXECUTED):
        return ""
    return f"{CANNOT}: {UNEXECUTED[0]}"


def forget() -> None:
    """Begin a law."""
    for each in (STOPPED, UNEXECUTED, UNFILLED):
        each.clear()
