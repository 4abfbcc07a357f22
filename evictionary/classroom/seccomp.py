"""A filter of system calls for the child: the kernel refuses the calls that no scorer needs. Linux on
x86-64 and 64-bit ARM.

Landlock keeps a child from files. It does not forbid starting programs with root's rights,
slowing or limiting the grader's own process, sockets other than TCP, changing the mode of
a file, or memory that outlives the process. The filter forbids them, and where there is no
Landlock it alone keeps all files as they are: nothing is made, written, moved, linked or
deleted. It holds for the child and all its threads, and no code in the child can remove
it. `program` writes it in the kernel's format (classic BPF); `sandbox.py` installs it.
"""

import platform
import struct
import tomllib
from pathlib import Path

from evictionary.classroom.sandbox import has

# For each call its number on x86-64 and on 64-bit ARM, 0 if that machine does not have the call.
_REFUSED: dict[str, list[int]] = tomllib.loads(
    (Path(__file__).parent / "system_calls.toml").read_text(encoding="utf-8")
)
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_PRLIMIT = (302, 261)
# Calls of Linux 5.1 and newer have one number on all machines. No scorer needs one: what is not in the table
# seems to be missing, and the C library uses older ones. It does so for clone3, whose flags cannot be read.
_NEWER = 424
# Calls that are refused with some values of an argument: the numbers, the argument's place, the values.
_FCNTL, _PRCTL = (72, 25), (157, 167)
_REFUSED_WITH = (
    # The owner and the number of a file's signal, leases and notices about files, the size of a pipe's
    # buffer.
    (_FCNTL, 1, (8, 10, 15, 1024, 1026, 1031)),
    # the signal at the grader's end, and whether others may look into the process or keep its core
    (_PRCTL, 0, (1, 4)),
)
# Calls that are allowed with some values alone: whether a file is a terminal and of what size, whether a
# program inherits it, what waits in it. Other values change terminals, or attributes of files.
_ALLOWED_WITH = (((16, 29), 1, (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),)
# Calls that are refused with some bits of an argument: a file is opened to be read, or not at all.
_WRITES = 0o1 | 0o2 | 0o100 | 0o1000  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC of Linux
_REFUSED_WITH_BITS = (((2, 0), 1, (_WRITES,)), ((257, 56), 2, (_WRITES,)))

# Instructions: load a word, jump if equal, if at least, if a bit is set, return.
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_X32 = 0x40000000  # numbers from here on are those of another table


def refused(machine: str) -> dict[str, int]:
    """The calls that are always refused, with their numbers on `machine`."""
    column = _MACHINES[machine][0]
    return {name: numbers[column] for name, numbers in _REFUSED.items() if numbers[column]}


def program(machine: str | None = None) -> bytes:
    """The filter for `machine`, by default this machine; empty if there is no filter for it."""
    machine = (platform.machine() if has("system calls") else "") if machine is None else machine
    if machine not in _MACHINES or struct.calcsize("P") != 8:
        return b""
    column, architecture = _MACHINES[machine]
    allow, refuse = (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERROR | _EPERM)
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
    ]
    for number in refused(machine).values():
        lines += [(_EQUAL, 0, 1, number), refuse]
    lines += [(_AT_LEAST, 0, 1, _NEWER), (_RETURN, 0, 0, _ERROR | _ENOSYS)]
    for rules, jump, found, otherwise in (
        (_REFUSED_WITH, _EQUAL, refuse, allow),
        (_ALLOWED_WITH, _EQUAL, allow, refuse),
        (_REFUSED_WITH_BITS, _ANY_BIT, refuse, allow),
    ):
        for numbers, place, values in rules:
            tests = [line for value in values for line in ((jump, 0, 1, value), found)]
            asked = [(_LOAD, 0, 0, _ARGUMENTS + 8 * place), *tests, otherwise]
            if numbers[column]:
                lines += [(_EQUAL, 0, len(asked), numbers[column]), *asked]
    # prlimit64 may read the limits of this process: its first argument is 0, and both halves of its third,
    # the new limit, are.
    lines += [(_EQUAL, 0, 7, _PRLIMIT[column])]
    for half, next_line in ((0, 4), (16, 2), (20, 0)):
        lines += [(_LOAD, 0, 0, _ARGUMENTS + half), (_EQUAL, int(next_line == 0), next_line, 0)]
    return b"".join(struct.pack("=HBBI", *line) for line in [*lines, refuse, allow])
