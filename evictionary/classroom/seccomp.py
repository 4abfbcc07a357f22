"""A filter of system calls for the child: what no scorer needs, the kernel refuses. Linux on x86-64 and on 64-bit ARM.

Landlock keeps a child from files. It says nothing about starting programs with root's rights, slowing or limiting the grader's own
process, sockets other than TCP, changing the mode of a file, or memory that outlives the process. The filter does, for the child
and all its threads, and nothing that runs in the child can take it away. `program` makes it as the kernel reads it (classic BPF);
`worker.py` installs it.
"""

from __future__ import annotations

import platform
import struct
import sys

# Name, number on x86-64, number on 64-bit ARM (- where it has none). From 424 on, both have the same numbers.
_REFUSED = """
fork 57 -               vfork 58 -              execve 59 221           execveat 322 281
kill 62 129             tkill 200 130           tgkill 234 131          rt_sigqueueinfo 129 138   rt_tgsigqueueinfo 297 240
pidfd_send_signal 424 424  pidfd_open 434 434   pidfd_getfd 438 438     process_madvise 440 440
ptrace 101 117          process_vm_readv 310 270  process_vm_writev 311 271  kcmp 312 272
setsid 112 157          setpgid 109 154         setpriority 141 140     ioprio_set 251 30
sched_setparam 142 118  sched_setscheduler 144 119  sched_setaffinity 203 122  sched_setattr 314 274
migrate_pages 256 238   move_pages 279 239      setrlimit 160 164
socket 41 198           socketpair 53 199
chmod 90 -              fchmod 91 52            fchmodat 268 53         fchmodat2 452 452
chown 92 -              fchown 93 55            lchown 94 -             fchownat 260 54
utime 132 -             utimes 235 -            futimesat 261 -         utimensat 280 88
setxattr 188 5          lsetxattr 189 6         fsetxattr 190 7         setxattrat 463 463
removexattr 197 14      lremovexattr 198 15     fremovexattr 199 16     removexattrat 466 466
shmget 29 194           semget 64 190           msgget 68 186           mq_open 240 180
memfd_create 319 279    memfd_secret 447 447    userfaultfd 323 282     io_uring_setup 425 425
bpf 321 280             perf_event_open 298 241  add_key 248 217        request_key 249 218       keyctl 250 219
mount 165 40            umount2 166 39          pivot_root 155 41       chroot 161 51             unshare 272 97
setns 308 268           open_tree 428 428       move_mount 429 429      fsopen 430 430            fsmount 432 432
mount_setattr 442 442   open_by_handle_at 304 265  fanotify_init 300 262  quotactl 179 60          acct 163 89
reboot 169 142          sethostname 170 161     setdomainname 171 162   settimeofday 164 170      clock_settime 227 112
adjtimex 159 171        clock_adjtime 305 266   swapon 167 224          swapoff 168 225           syslog 103 116
init_module 175 105     finit_module 313 273    delete_module 176 106   kexec_load 246 104        kexec_file_load 320 294
iopl 172 -              ioperm 173 -
"""
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
    """The calls that are refused whatever their arguments, with their numbers on `machine`."""
    words = _REFUSED.split()
    column = 1 + _MACHINES[machine][0]
    return {words[at]: int(words[at + column]) for at in range(0, len(words), 3) if words[at + column] != "-"}


def program(machine: str | None = None) -> bytes:
    """The filter for `machine`, by default this one; empty where there is none."""
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
        (_EQUAL, 0, 1, _CLONE3),  # its flags cannot be read here; told that it is not there, the C library uses clone
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
