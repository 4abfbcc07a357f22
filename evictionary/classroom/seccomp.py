"""A filter of system calls for the child: the kernel refuses the calls that no scorer needs. Linux on x86-64 and 64-bit ARM.

Landlock keeps a child from files. It does not forbid starting programs with root's rights, slowing or limiting the grader's own
process, sockets other than TCP, changing the mode of a file, or memory that outlives the process. The filter forbids them, for the
child and all its threads, and no code in the child can remove the filter. `program` writes it in the kernel's format (classic
BPF); `worker.py` installs it.
"""

from __future__ import annotations

import platform
import struct
import sys
import tomllib
from pathlib import Path

# For each call its number on x86-64 and on 64-bit ARM, 0 if that machine does not have the call.
_REFUSED: dict[str, list[int]] = tomllib.loads((Path(__file__).parent / "system_calls.toml").read_text(encoding="utf-8"))
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_CLONE, _CLONE3, _PRLIMIT = (56, 220), 435, (302, 261)

# Instructions: load a word, jump if equal, if at least, if any bit is set, return.
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_THREAD = 0x00010000  # the flag of clone that makes a thread, not a process
_X32 = 0x40000000  # numbers from here on are those of another table


def refused(machine: str) -> dict[str, int]:
    """The calls that are always refused, with their numbers on `machine`."""
    column = _MACHINES[machine][0]
    return {name: numbers[column] for name, numbers in _REFUSED.items() if numbers[column]}


def program(machine: str | None = None) -> bytes:
    """The filter for `machine`, by default this machine; empty if there is no filter for it."""
    machine = (platform.machine() if sys.platform.startswith("linux") else "") if machine is None else machine
    if machine not in _MACHINES or struct.calcsize("P") != 8:
        return b""
    column, architecture = _MACHINES[machine]
    refuse = [(_RETURN, 0, 0, _ERROR | _EPERM)]
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
        (_EQUAL, 0, 1, _CLONE3),  # its flags cannot be read here; if it seems to be missing, the C library uses clone
        (_RETURN, 0, 0, _ERROR | _ENOSYS),
    ]
    for number in refused(machine).values():
        lines += [(_EQUAL, 0, 1, number), *refuse]
    lines += [
        (_EQUAL, 0, 4, _CLONE[column]),
        (_LOAD, 0, 0, _ARGUMENTS),
        (_ANY_BIT, 1, 0, _THREAD),
        *refuse,
        (_RETURN, 0, 0, _ALLOW),
    ]
    # prlimit64 may read the limits of this process: its first argument is 0, and both halves of its third, the new limit, are.
    lines += [(_EQUAL, 0, 7, _PRLIMIT[column])]
    for place, otherwise in ((0, 4), (16, 2), (20, 0)):
        lines += [(_LOAD, 0, 0, _ARGUMENTS + place), (_EQUAL, int(otherwise == 0), otherwise, 0)]
    lines += [*refuse, (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)
