"""The program of the child process: it loads one student file and answers calls, and holds no secrets.

It is started as `python -I -S worker.py SITE WIRE` with two pipes: where NumPy is, and the file that reads and writes frames. It
imports the standard library, these two and, if the assignment needs it, torch. Expected values, seeds and verdicts stay in the
parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib
import importlib.util
import itertools
import linecache
import os
import re
import resource
import struct
import sys
import traceback
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

LARGEST_CALL = 512 * 2**20  # a call holds the keys and values of a long text
MOST_OPEN = 64
MOST_TRIED, LONGEST_TRIED = 8, 60  # what the hook writes down of the actions that it refuses
NOBODY = 65534

# Walls

_READ_FILE, _READ_DIR = 1 << 2, 1 << 3


def without(path: str, closed: list[str]) -> list[str]:
    """The path, or its entries without the forbidden ones: Landlock opens a folder together with everything below it."""
    if path in closed:
        return []
    if not any(each.startswith(path.rstrip(os.sep) + os.sep) for each in closed):
        return [path]
    with os.scandir(path) as entries:
        # A link would open its target; an allowed target is in the list by its own name.
        inside = sorted(entry.path for entry in entries if not entry.is_symlink())
    return [kept for entry in inside for kept in without(entry, closed)]


def filter_calls(program: bytes) -> bool:
    """Have the kernel refuse the system calls of `seccomp.program` permanently; False if there is no filter for this machine."""
    if not program:
        return False
    prctl = ctypes.CDLL(None).prctl
    instructions = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions))
    prctl(38, 1, 0, 0, 0)  # no new privileges
    return int(prctl(22, ctypes.c_ulong(2), header, 0, 0)) == 0


def end_with_parent() -> None:
    """Have the kernel end this process when the parent ends in any way; Linux."""
    if sys.platform.startswith("linux"):
        parent = os.getppid()
        ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(0)


def landlock(readable: list[str], listable: list[str]) -> int:
    """Forbid this process all files but the readable ones, all writing, TCP and signals to others; Linux 5.13 and newer.

    Returns the kernel's version of Landlock, 0 if the kernel has none or refuses.
    """
    if not sys.platform.startswith("linux"):
        return 0
    call = ctypes.CDLL(None, use_errno=True).syscall
    version = int(call(444, None, ctypes.c_size_t(0), ctypes.c_uint32(1)))
    if version < 1:
        return 0
    rights = (1 << (13 + (version >= 2) + (version >= 3) + (version >= 5))) - 1
    handled = struct.pack("QQQ", rights, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    handled = handled[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = int(call(444, handled, ctypes.c_size_t(len(handled)), ctypes.c_uint32(0)))
    if ruleset < 0:
        return 0
    for paths, access in ((readable, _READ_FILE | _READ_DIR), (listable, _READ_DIR)):
        for path in paths:
            try:
                opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            rule = struct.pack("=Qi", access if os.path.isdir(path) else access & _READ_FILE, opened)
            call(445, ruleset, 1, rule, ctypes.c_uint32(0))
            os.close(opened)
    ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)  # no new privileges
    done = int(call(446, ruleset, ctypes.c_uint32(0)))
    os.close(ruleset)
    return version if done == 0 else 0


_DENIED = (
    "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system", "os.spawn", "os.kill", "os.killpg", "subprocess.Popen",
    "pty.spawn", "socket.", "ctypes.", "os.symlink", "os.link", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.truncate",
    "os.chmod", "os.chown", "os.chflags", "os.utime", "os.setxattr", "os.removexattr", "resource.setrlimit", "resource.prlimit",
)  # fmt: skip


THERE = {"numpy": ("numpy",), "torch": ("numpy", "torch", "triton")}  # what a file may import beside the standard library


def guard(readable: list[str], banned: list[str], library: str, file: str) -> list[str]:
    """Refuse, by an audit hook, actions that no scorer needs: the oracle, other people's files, writing, programs, the network.

    The hook gives clear messages. A student who knows the interpreter well can evade it; then the other protections hold.
    library is that of the assignment: its file may import that and the standard library. What torch imports itself is its affair.
    The list that is returned names what the code tries from now on.
    """
    roots = tuple(os.path.realpath(path) + os.sep for path in readable)
    closed, denied = frozenset(banned), _DENIED  # own references: a student can replace a module's names
    there, frame_of = sys.stdlib_module_names.union(THERE[library]), sys._getframe
    only = "torch, Triton and NumPy are there" if library == "torch" else "this assignment is for NumPy only"
    only += f" (and Python's own modules); of your files only {os.path.basename(file)} is handed in"
    tried: list[str] = []

    def refusal(what: str, told: str) -> PermissionError:
        if what not in tried and len(tried) < MOST_TRIED:
            tried.append(what[:LONGEST_TRIED])
        return PermissionError(told)

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "import" and arguments[0].split(".")[0] in closed:
            refusal(f"import {arguments[0]}", "")
            raise ImportError(f"{arguments[0]}: not there while your code is judged")
        if event == "import" and (library == "numpy" or frame_of(1).f_code.co_filename == file):
            top = arguments[0].split(".")[0]
            if top not in there and not top.startswith("_sysconfigdata"):
                raise ImportError(f"{arguments[0]}: {only}")
        if event == "open" and isinstance(arguments[0], str | bytes):
            path, mode, flags = os.fsdecode(arguments[0]), arguments[1], arguments[2]
            if (isinstance(mode, str) and set(mode) & set("wax+")) or (
                isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)
            ):
                raise refusal(f"write {path}", f"{path}: no writing while your code is judged")
            if not (os.path.realpath(path) + os.sep).startswith(roots):
                raise refusal(f"open {path}", f"{path}: not yours to read while your code is judged")
        if event.startswith(denied):
            raise refusal(event, f"{event}: not allowed while your code is judged")

    sys.addaudithook(refuse)
    return tried


def limit(cpu_seconds: int, memory: int) -> bool:
    """Bound processor time, memory, files (none may grow, few are open) and processes (no new one); False if a limit is missing."""
    holds = True
    for name, value in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, MOST_OPEN),  # each pipe has a buffer in the kernel, which counts as nobody's memory
    ):
        try:
            resource.setrlimit(name, (value, value))
        except (ValueError, OSError):  # a system without this limit, or with a lower one
            holds = holds and 0 <= resource.getrlimit(name)[1] <= value
    return holds


def reaches(user: int, paths: list[str]) -> bool:
    """Whether the user can enter the folders of all paths by their modes alone, without a right of root's."""
    for path in paths:
        while path != os.path.dirname(path):
            found = os.stat(path)
            if os.path.isdir(path) and not found.st_mode & (0o100 if found.st_uid == user else 0o001):
                return False
            path = os.path.dirname(path)
    return True


def become_nobody(readable: list[str]) -> bool:
    """Become the user nobody: the limit on processes does not bind root. Stay root if that user cannot read the files."""
    if not reaches(NOBODY, readable):
        return False
    try:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    except PermissionError:  # a container that took this right from root
        return False
    return True


def drop_rights(readable: list[str]) -> bool:
    """Give up all capabilities of root for good, but that of reading where root needs it to reach Python; Linux.

    The process can then be traced by nobody, and the kernel keeps no core of it, not even through a pipe.
    """
    if not sys.platform.startswith("linux"):
        return os.getuid() != 0
    libc = ctypes.CDLL(None)
    kept = 0 if os.getuid() or reaches(0, readable) else 1 << 2  # CAP_DAC_READ_SEARCH
    for number in range(64):
        if not kept >> number & 1:
            libc.prctl(24, number, 0, 0, 0)  # out of the bounding set
    # Version 3 of the call, this process; effective, permitted and inheritable capabilities, the low words and the high ones.
    sets = struct.pack("=6I", kept, kept, 0, 0, 0, 0)
    done = libc.capset(struct.pack("=Ii", 0x20080522, 0), sets) == 0
    return libc.prctl(4, 0, 0, 0, 0) == 0 and done


def confined(setup: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Put up all walls: which stand, and the list of what the code tries from now on."""
    site, folder = setup["site"], os.path.dirname(setup["path"])
    needed = [sys.base_prefix, site, folder]
    roots = [sys.base_prefix, "/usr/lib", "/lib", "/lib64", "/dev/null", "/dev/urandom", folder, site]
    readable = [kept for root in roots if os.path.exists(root) for kept in without(os.path.realpath(root), setup["closed"])]
    walls: dict[str, Any] = {"audit hook": True}
    if os.getuid() == 0:
        walls["user nobody"] = become_nobody(needed)
    walls["no rights of root"] = drop_rights(needed)
    end_with_parent()
    walls["limits"] = limit(setup["cpu_seconds"], setup["memory"])
    walls["landlock"] = landlock(readable, [site])
    walls["system calls"] = filter_calls(bytes.fromhex(setup["filter"]))
    return walls, guard([*readable, site + os.sep + "__pycache__"], setup["banned"], setup["library"], setup["path"])


# The student's file


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
    """An exception as the parent shows it: its type, its message and the last line of the student's file in it."""
    # Not by extract_tb: it opens the files of all frames, and the audit hook would write that down as tried by the student.
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == path]
    place = f"{os.path.basename(path)}:{lines[-1]}: {linecache.getline(path, lines[-1]).strip()}" if lines else ""
    message = f"{type(error).__name__} {error}"
    hint = next((hint for part, hint in HINTS if part in message), "")
    return {
        "error": type(error).__name__,
        "message": ": ".join(each for each in (str(error)[:2000], hint) if each),
        "place": place,
        "value_error": isinstance(error, ValueError),
    }


@contextlib.contextmanager
def watched_launches() -> Iterator[dict[str, float]]:
    """Triton's interpreter as the grader needs it: places that a load leaves out hold NaN, unless it says what else they hold.

    The number "added" of what is returned is added to every number that a kernel writes: an answer that a kernel computes changes
    too. The interpreter is the same object before and after, so that a file does not see when the grader looks.
    """
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _get_np_dtype

    state, originals = {"added": 0.0}, {}

    def watch(name: str, change: Callable[..., tuple[Any, ...]]) -> None:
        originals[name] = original = getattr(InterpreterBuilder, name)
        watched = functools.wraps(original)(lambda self, *args, **named: original(self, *change(*args), **named))
        del watched.__wrapped__
        setattr(InterpreterBuilder, name, watched)

    def changed(value: Any) -> Any:
        return dataclasses.replace(value, data=value.data + state["added"]) if value.data.dtype.kind == "f" else value

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


# What torch may do to the keys of a kernel: allocate, move, look whether they are finite. Anything else is arithmetic.
MOVES = re.compile(
    r"(new_)?(empty|zeros|ones|full)(_like|_strided)?|clone|contiguous|copy_|to|cpu|float|view|reshape|flatten|(un)?squeeze|expand|"
    r"transpose|swapaxes|movedim|permute|t|as_strided|detach|narrow|select|split|unbind|chunk|cat|stack|pad|fill_|zero_|"
    r"__(get|getitem|setitem|set|iter)__|abs|max|min|amax|amin|aminmax|nan_to_num"
)
SMALL_KEYS = 4096  # of fewer numbers a step between two launches may be as large


@contextlib.contextmanager
def kernels_alone(keys: Any) -> Iterator[None]:
    """Raise TypeError if torch or NumPy does arithmetic with as many numbers as the keys have: a kernel has to."""
    import torch
    from torch.overrides import TorchFunctionMode

    counts: Counter[str] = Counter()

    class Counting(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result, name = function(*args, **(kwargs or {})), getattr(function, "__name__", str(function))
            numbers = [each for each in (*args, *(kwargs or {}).values()) if isinstance(each, torch.Tensor)]
            leaves = name in ("numpy", "tolist", "__array__", "__dlpack__")
            is_float = isinstance(result, torch.Tensor) and result.is_floating_point()
            is_total = name in ("sum", "mean") and is_float and result.numel() == 1  # NaN or infinite if one of them is
            if leaves or (is_float and not is_total and not MOVES.fullmatch(name)):
                counts[name] += max((each.numel() for each in numbers), default=0)
            return result

    with Counting():
        yield
    if counts.total() >= max(keys.numel(), SMALL_KEYS):
        told = f"{', '.join(sorted(counts))} on {counts.total()} numbers outside of a kernel, for {keys.numel()} numbers of keys"
        raise TypeError(f"{told}: a kernel has to compute with the keys")


def numbers(value: Any) -> Any:
    """The bytes of an array, of each array of a tuple in turn; anything else as it is."""
    if isinstance(value, tuple):
        return [numbers(entry) for entry in value]
    return value.detach().cpu().numpy().tobytes() if hasattr(value, "detach") else getattr(value, "tobytes", lambda: value)()


def answer(function: Callable[..., Any], arguments: list[Any], keywords: dict[str, Any]) -> Any:
    """Call a function. Raises TypeError if it returns nothing, or has written into an argument by then."""
    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code else ()
    named = itertools.zip_longest(names[: len(arguments)], range(1, 1 + len(arguments)))
    given = dict(zip((name or f"argument {place}" for name, place in named), arguments, strict=True)) | keywords
    before = {name: numbers(value) for name, value in given.items()}
    result = function(*arguments, **keywords)
    called = getattr(function, "__name__", "the function")
    if result is None:
        raise TypeError(f"{called} returned None: is there a return?")
    if written := [name for name, value in given.items() if numbers(value) != before[name]]:
        raise TypeError(f"{called} writes into {', '.join(written)}, which others still need: work on a copy")
    return result


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Read the settings from the first frame, load the file, then answer one call after another."""
    sys.path.append(sys.argv[1])
    import numpy as np

    wire = load(sys.argv[2], "wire")
    tried: list[str] = []
    module = torch = None

    def reply(message: dict[str, Any], *values: Any) -> None:
        replies.write(wire.frame(message | {"tried": tried}, values))
        replies.flush()

    def named(name: str, fields: dict[str, Any]) -> Any:
        kind = name.rpartition(".")[2]
        return (getattr(module, kind, None) or namedtuple(kind, fields))(*fields.values())

    def native(array: Any) -> Any:
        return array if torch is None else torch.from_numpy(np.array(array, order="K")).to(setup["device"])

    def request() -> tuple[dict[str, Any], list[Any]]:
        header = requests.read(16)
        if len(header) < 16:
            os._exit(0)  # the parent has ended or closed the pipe
        text, body = wire.sizes(header, LARGEST_CALL)
        message, values = wire.read(requests.read(text), requests.read(body), named, native)
        return message, values

    setup, _ = request()
    if setup["library"] == "torch":
        torch = importlib.import_module("torch")
        torch.set_num_threads(1)
        if setup["interpret"]:
            os.environ["TRITON_INTERPRET"] = "1"
            import triton.language  # noqa: F401
    watching = watched_launches() if setup["interpret"] else contextlib.nullcontext({"added": 0.0})
    launches = watching.__enter__()  # as long as the process lives
    path = setup["path"]
    walls, tried = confined(setup) if setup["confine"] else ({"audit hook": False}, [])
    reply({"walls": walls})
    try:
        module = load(path, f"student_{setup['stem']}")
    except BaseException as error:
        reply(describe(error, path))
        return
    reply({"functions": [name for name, value in vars(module).items() if callable(value)]})
    while True:
        message, values = request()
        try:
            function, count = getattr(module, message["call"]), len(values) - len(message["keywords"])
            arguments, keywords = values[:count], dict(zip(message["keywords"], values[count:], strict=True))
            if message["time"]:
                from triton.testing import do_bench

                result = do_bench(functools.partial(function, *arguments, **keywords), return_mode="median")
            else:
                launches["added"] = float(message["change launches"])
                asked = kernels_alone(arguments[0])(function) if setup["interpret"] else function
                result = answer(asked, arguments, keywords)
            reply({}, result)
        except wire.BadMessage as error:
            reply({"error": "TypeError", "message": f"{message['call']} returned {error}", "place": "", "value_error": False})
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            reply(describe(error, path))


def main() -> None:
    """Keep the pipes, and give the student's code an empty input and an output that is discarded."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    serve(requests, replies)


if __name__ == "__main__":
    main()
