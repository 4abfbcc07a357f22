"""The walls around a student's code, which the child puts up before it loads the file: each holds where
another is missing.

The child loads this file by its path, so that it imports the standard library alone. `seccomp.py` writes the
filter of system calls.
"""

import ctypes
import os
import signal
import struct
import sys
from typing import Any

MOST_OPEN = 64
MOST_TRIED, LONGEST_TRIED = 8, 60  # what the hook writes down of the actions that it refuses
NOBODY = 65534
# The walls that each system has, by their names in grade.json. Where a kernel lacks one, the child says so.
WALLS = {
    "Linux": ("limits", "landlock", "system calls", "no rights of root", "audit hook"),
    "macOS": ("limits", "audit hook"),  # as every other Unix
    "Windows": (),  # no code of others runs there: see `lacking`
}
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3


def system() -> str:
    """The name of this system in WALLS; a Unix other than Linux has what macOS has."""
    return {"linux": "Linux", "win32": "Windows"}.get(sys.platform, "macOS")


def has(wall: str) -> bool:
    """Whether this system has a wall of that name."""
    return wall in WALLS[system()]


def lacking() -> str:
    """What this system lacks to run code within limits, and
    the way out, as the end of a sentence; empty on Unix.
    """
    needed = ((os, "killpg"), (os, "set_blocking"), (signal, "setitimer"))
    missing = [f"{module.__name__}.{name}" for module, name in needed if not hasattr(module, name)]
    try:
        import resource  # noqa: F401
    except ImportError:
        missing.insert(0, "module resource")
    if not missing:
        return ""
    return (
        f"it has no {', '.join(missing)}, by which code is run within limits; on Windows use WSL (`wsl "
        "--install`), and install evictionary in it"
    )


def confined(setup: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Put up all walls: which stand, and the list of what the code tries from now on."""
    site, folder = setup["site"], os.path.dirname(setup["path"])
    executor = [setup["triton"]] if setup["triton"] else []
    needed = [sys.base_prefix, site, folder, *executor]
    readable = [
        kept
        for root in [*needed, "/usr/lib", "/lib", "/lib64", "/dev/null", "/dev/urandom"]
        if os.path.exists(root)
        for kept in without(os.path.realpath(root), setup["closed"])
    ]
    walls: dict[str, Any] = {"audit hook": True}
    if os.getuid() == 0:
        walls["user nobody"] = become_nobody(needed)
    walls["no rights of root"] = drop_rights(needed)
    end_with_parent()
    walls["limits"] = limit(setup["cpu_seconds"], setup["memory"])
    walls["landlock"] = landlock(readable, [site])
    walls["system calls"] = filter_calls(bytes.fromhex(setup["filter"]))
    return walls, guard(
        [*readable, site + os.sep + "__pycache__"],
        setup["banned"],
        setup["library"],
        setup["path"],
        setup["allowed"],
    )


def without(path: str, closed: list[str]) -> list[str]:
    """The path, or its entries without the forbidden ones: Landlock opens a folder together with
    everything below it.
    """
    if path in closed:
        return []
    if not any(each.startswith(path.rstrip(os.sep) + os.sep) for each in closed):
        return [path]
    with os.scandir(path) as entries:
        # A link would open its target; an allowed target is in the list by its own name.
        inside = sorted(entry.path for entry in entries if not entry.is_symlink())
    return [kept for entry in inside for kept in without(entry, closed)]


def filter_calls(program: bytes) -> bool:
    """Have the kernel refuse the system calls of `seccomp.program` permanently; False if there is no
    filter for this machine.
    """
    if not program:
        return False
    prctl = ctypes.CDLL(None).prctl
    instructions = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions))
    prctl(38, 1, 0, 0, 0)  # no new privileges
    return int(prctl(22, ctypes.c_ulong(2), header, 0, 0)) == 0


def end_with_parent() -> None:
    """Have the kernel end this process when the parent ends in any way; Linux."""
    if system() == "Linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(0)


def hide() -> None:
    """Close the memory and the open files of this process to others of the same user; Linux."""
    if system() == "Linux":
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)


def landlock(readable: list[str], listable: list[str]) -> int:
    """Forbid this process all files but the readable ones, all writing, TCP and signals to others; Linux
    5.13 and newer.

    Returns the kernel's version of Landlock, 0 if the kernel has none or refuses.
    """
    if not has("landlock"):
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


# To look at the frames and objects of others, and to follow what they do. Libraries do it too, and there is
# nothing to find: where the file does it, it is written down and not refused.
_LOOKING = (
    "sys._getframe",
    "sys._current_",
    "sys.settrace",
    "sys.setprofile",
    "sys.addaudithook",
    "gc.",
    "object.__setattr__",
)
_DENIED = (
    "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system", "os.spawn", "os.kill", "os.killpg",
    "subprocess.Popen",
    "pty.spawn", "socket.", "ctypes.", "os.symlink", "os.link", "os.remove", "os.rename", "os.mkdir",
    "os.rmdir", "os.truncate",
    "os.chmod", "os.chown", "os.chflags", "os.utime", "os.setxattr", "os.removexattr", "resource.setrlimit",
    "resource.prlimit",
)  # fmt: skip


# what a file may import beside the standard library
THERE = {"numpy": ("numpy",), "torch": ("numpy", "torch", "triton")}


def asked_by(file: str) -> bool:
    """Whether the event of an audit hook is the file's doing,
    or that of a text that it runs, and not a library's.

    The frame is that to which an error leads: asking for a frame would be an event of its own.
    """
    try:
        raise LookupError
    except LookupError as error:
        frame = error.__traceback__.tb_frame.f_back.f_back  # type: ignore[union-attr]
    while frame and frame.f_code.co_filename.endswith("inspect.py"):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename in (file, "<string>")


def guard(
    readable: list[str], banned: list[str], library: str, file: str, allowed: list[str] | None = None
) -> list[str]:
    """Refuse, by an audit hook, actions that no scorer needs: the oracle, other people's files, writing,
    programs, the network. allowed are the other packages that code of a stranger may use; None of a student.

    The hook gives clear messages. A student who knows the interpreter well can evade it; then the other
    protections hold. library is that of the assignment: its file may import that and the standard library.
    What torch imports itself is its affair. The list that is returned names what the code tries from now on.
    """
    roots = tuple(os.path.realpath(path) + os.sep for path in readable)
    closed, denied = frozenset(banned), _DENIED  # own references: a student can replace a module's names
    looking, there, is_asked = (
        _LOOKING,
        sys.stdlib_module_names.union(THERE[library], allowed or ()),
        asked_by,
    )
    only = "torch, Triton and NumPy are there" if library == "torch" else "this assignment is for NumPy only"
    only += f" (and Python's own modules); of your files only {os.path.basename(file)} is handed in"
    if allowed is not None:
        found = ", ".join([*THERE[library], *allowed])
        only = f"{found} and Python's own modules are there; --allow {'{}'} brings another package"
    tried: list[str] = []

    def refusal(what: str, told: str) -> PermissionError:
        if what not in tried and len(tried) < MOST_TRIED:
            tried.append(what[:LONGEST_TRIED])
        return PermissionError(told)

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "import" and arguments[0].split(".")[0] in closed:
            refusal(f"import {arguments[0]}", "")
            raise ImportError(f"{arguments[0]}: not there while your code is judged")
        if event == "import" and ((library == "numpy" and not allowed) or is_asked(file)):
            top = arguments[0].split(".")[0]
            if top not in there and not top.startswith("_sysconfigdata"):
                raise ImportError(f"{arguments[0]}: {only.format(top)}")
        if event == "open" and isinstance(arguments[0], str | bytes):
            path, mode, flags = os.fsdecode(arguments[0]), arguments[1], arguments[2]
            if (isinstance(mode, str) and set(mode) & set("wax+")) or (
                isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)
            ):
                raise refusal(f"write {path}", f"{path}: no writing while your code is judged")
            if not (os.path.realpath(path) + os.sep).startswith(roots):
                raise refusal(f"open {path}", f"{path}: not yours to read while your code is judged")
        if event.startswith(looking) and is_asked(file):
            refusal(event, "")
        # A package that compiles what it is given, such as numba, calls C.
        if event.startswith(denied) and not (allowed and event.startswith("ctypes.") and not is_asked(file)):
            raise refusal(event, f"{event}: not allowed while your code is judged")

    sys.addaudithook(refuse)
    return tried


def limit(cpu_seconds: int, memory: int) -> bool:
    """Bound processor time, memory, files (none may grow, few are open) and processes (no new one); False
    if a limit is missing.
    """
    import resource  # not on Windows, where this file is imported all the same

    holds = True
    for name, value in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
        # each pipe has a buffer in the kernel, which counts as nobody's memory
        (resource.RLIMIT_NOFILE, MOST_OPEN),
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
    """Become the user nobody: the limit on processes does not bind root. Stay root if that user cannot
    read the files.
    """
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
    """Give up all capabilities of root for good, but that
    of reading where root needs it to reach Python; Linux.

    The process can then be traced by nobody, and the kernel keeps no core of it, not even through a pipe.
    """
    if not has("no rights of root"):
        return os.getuid() != 0
    libc = ctypes.CDLL(None)
    kept = 0 if os.getuid() or reaches(0, readable) else 1 << 2  # CAP_DAC_READ_SEARCH
    for number in range(64):
        if not kept >> number & 1:
            libc.prctl(24, number, 0, 0, 0)  # out of the bounding set
    # Version 3 of the call, this process; effective, permitted and inheritable capabilities, the low words
    # and the high ones.
    done = libc.capset(struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", kept, kept, 0, 0, 0, 0)) == 0
    return libc.prctl(4, 0, 0, 0, 0) == 0 and done
