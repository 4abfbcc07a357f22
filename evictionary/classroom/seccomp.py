"""A filter of system calls for the child: the kernel refuses the calls that no scorer needs. Linux on
x86-64 and 64-bit ARM.

Landlock keeps a child from files. It does not forbid starting programs with root's rights, slowing or
limiting the grader's own process, sockets other than TCP, changing the mode of a file, or memory that
outlives the process. The filter forbids them, for the child and all its threads, and no code in the child can
remove the filter. `program` writes it in the kernel's format (classic BPF); `sandbox.py` installs it.
"""

import platform
import struct
import sys
import tomllib
from pathlib import Path

# For each call its number on x86-64 and on 64-bit ARM, 0 if that machine does not have the call.
_REFUSED: dict[str, list[int]] = tomllib.loads(
    (Path(__file__).parent / "system_calls.toml").read_text(encoding="utf-8")
)
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_CLONE3, _PRLIMIT = 435, (302, 261)
# Calls that are refused with some values of an argument: the numbers, the argument's offset, the values.
_FCNTL, _PRCTL, _IOCTL = (72, 25), (157, 167), (16, 29)
_REFUSED_WITH = (
    # The owner and the number of a file's signal, leases and notices about files, the size of a pipe's
    # buffer.
    (_FCNTL, 8, (8, 10, 15, 1024, 1026, 1031)),
    (_IOCTL, 8, (0x5452, 0x8901, 0x8902)),  # the same signals: FIOASYNC, FIOSETOWN, SIOCSPGRP
    # the signal at the grader's end, and whether others may look into the process or keep its core
    (_PRCTL, 0, (1, 4)),
)

# Instructions: load a word, jump if equal, if at least, return.
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
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
        # its flags cannot be read here; if it seems to be missing, the C library uses clone
        (_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _ERROR | _ENOSYS),
    ]
    for number in refused(machine).values():
        lines += [(_EQUAL, 0, 1, number), *refuse]
    for numbers, argument, values in _REFUSED_WITH:
        tests = [line for value in values for line in ((_EQUAL, 0, 1, value), *refuse)]
        lines += [
            (_EQUAL, 0, len(tests) + 2, numbers[column]),
            (_LOAD, 0, 0, _ARGUMENTS + argument),
            *tests,
            (_RETURN, 0, 0, _ALLOW),
        ]
    # prlimit64 may read the limits of this process: its first argument is 0, and both halves of its third,
    # the new limit, are.
    lines += [(_EQUAL, 0, 7, _PRLIMIT[column])]
    for place, otherwise in ((0, 4), (16, 2), (20, 0)):
        lines += [(_LOAD, 0, 0, _ARGUMENTS + place), (_EQUAL, int(otherwise == 0), otherwise, 0)]
    lines += [*refuse, (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)
