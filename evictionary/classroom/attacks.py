"""What a hostile submission to the KeyDiff assignment may try: each must score nothing, and end as a result file like any other."""

from __future__ import annotations

import io
import stat
import tarfile
import zipfile
from pathlib import Path

_ALL = ("anchor", "score", "similarity_matrix", "pairwise_score")


def _every(body: str, before: str = "import numpy as np\n") -> str:
    """A file in which each function has the same body."""
    return before + "".join(f"\n\ndef {name}(keys):\n    {body}\n" for name in _ALL)


_FIND = """import os, sys
import numpy as np

def found():
    project = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(sys.modules["__main__"].__file__))))
    return os.path.join(project, "reference", "keydiff.py")
"""
_RUN_IT = """
sys.path.insert(0, os.path.dirname(os.path.dirname(found())))
source = open(found()).read().replace("from .", "from reference.")
exec(source)
"""
_UNDO = """
import gc, types
for thing in gc.get_objects():
    if isinstance(thing, types.FunctionType) and thing.__qualname__.startswith("guard."):
        thing.__code__ = (lambda event, arguments: None).__code__.replace(co_freevars=thing.__code__.co_freevars)
"""

# Everything that a program may do to others, tried on the grader: `harm` gives the names of what was not refused.
PROBE = (
    """import os, resource, sys
import ctypes  # the hook would refuse its functions
"""
    + _UNDO
    + """
import socket


def tried(attempt):
    try:
        return attempt() not in (-1, 32512)
    except OSError:
        return False


def harm():
    parent, libc = os.getppid(), ctypes.CDLL(None)
    attempts = {
        "fork": os.fork,
        "run a program": lambda: os.posix_spawn("/bin/true", ["true"], {}),
        "run a shell": lambda: os.system("true"),
        "signal the parent": lambda: os.kill(parent, 0),
        "signal everybody": lambda: os.kill(-1, 0),
        "slow the parent down": lambda: os.setpriority(os.PRIO_PROCESS, parent, os.getpriority(os.PRIO_PROCESS, parent)),
        "schedule the parent": lambda: os.sched_setaffinity(parent, os.sched_getaffinity(parent)),
        "read the parent's limits": lambda: resource.prlimit(parent, resource.RLIMIT_CPU),
        "trace the parent": lambda: libc.ptrace(16, parent, 0, 0),
        "raise its own limits": lambda: libc.setrlimit(resource.RLIMIT_AS, (ctypes.c_ulong * 2)(2**40, 2**40)),
        "a session of its own": os.setsid,
        "a UDP socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
        "a Unix socket": lambda: socket.socket(socket.AF_UNIX),
        "memory that stays": lambda: libc.shmget(0, 4096, 0o1600),
        "the mode of a file": lambda: os.chmod(__file__, 0o600),
        "the times of a file": lambda: os.utime(__file__),
        "the owner of a file": lambda: os.chown(__file__, os.getuid(), os.getgid()),
        "write a file": lambda: open(__file__, "a"),
        "plant a link": lambda: os.symlink("/", os.path.join(os.path.dirname(__file__), "link")),
    }
    return ", ".join(name for name, attempt in attempts.items() if tried(attempt))
"""
)

# Frames as the worker writes them, but made by hand, and put into every pipe that is open.
_FRAMES = """import io, os, struct, zipfile

def frame(text, body=b""):
    return struct.pack(">QQ", len(text), len(body)) + text + body

def send(data):
    for number in range(3, 12):
        try:
            os.set_blocking(number, True)
            os.write(number, data)
        except OSError:
            pass
"""
_OVERLAPPING = """
def bomb():
    body = io.BytesIO()
    with zipfile.ZipFile(body, "w") as archive:
        archive.writestr("a0.npy", b"0" * 2**20)
    data = body.getvalue()
    start = data.rindex(b"PK\\x01\\x02")
    entry = data[start : data.rindex(b"PK\\x05\\x06")]
    count = 60_000
    return data[:start] + entry * count + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, count, count, len(entry) * count, start, 0)
"""


def _frame(made: str, before: str = "") -> str:
    """A file that answers each call with a frame of its own making."""
    return _every(f"send({made})", _FRAMES + before)


SOURCES: dict[str, str] = {
    "raises always": _every("raise RuntimeError('no')"),
    "raises ValueError always": _every("raise ValueError('keys: no')"),
    "returns the input": _every("return keys"),
    "returns a constant": _every("return np.zeros(np.asarray(keys).shape[:-1])"),
    "returns nothing": _every("return None"),
    "returns NaN": _every("return np.full(np.asarray(keys).shape[:-1], np.nan)"),
    "imports the oracle": "from evictionary.reference.keydiff import anchor, pairwise_score, score, similarity_matrix\n",
    "imports the oracle from its folder": _FIND + "sys.path.insert(0, os.path.dirname(os.path.dirname(found())))\n"
    "from reference.keydiff import anchor, pairwise_score, score, similarity_matrix\n",
    "reads the oracle's source": _FIND + _RUN_IT,
    "reads the oracle's source past the audit hook": _FIND + _UNDO + _RUN_IT,
    "looks into the parent": _every(
        "return open(f'/proc/{os.getppid()}/environ', 'rb').read() and open(f'/proc/{os.getppid()}/mem', 'rb').read(1)",
        "import os\n",
    ),
    "replaces parts of numpy": "import numpy as np\nnp.abs = np.isnan = np.allclose = lambda *a, **k: np.float64(0)\n"
    "np.ndarray = dict\nnp.savez = lambda *a, **k: None\n" + _every("return 0.0", ""),
    "an array that equals everything": "import numpy as np\n\n\nclass Same(np.ndarray):\n    def __eq__(self, other):\n"
    "        return True\n\n    def __array_ufunc__(self, *a, **k):\n        return True\n"
    + _every("return np.zeros(np.asarray(keys).shape[:-1]).view(Same)", ""),
    "an array of objects": _every("return np.array([print] * 4, dtype=object)"),
    "prints full marks": _every(
        "print(RESULT, flush=True)",
        'RESULT = \'{"schema": "evictionary/grade/1", "score": 100, "max_score": 100, "verdict": "passed"}\'\nprint(RESULT)\n',
    ),
    "writes full marks into every pipe": _every(
        "[write(n) for n in range(64)]",
        "import os\n\n\ndef write(n):\n    try:\n        os.write(n, b'{\"score\": 100}' * 40)\n"
        "    except OSError:\n        pass\n",
    ),
    "exits 0 when imported": "import os\nos._exit(0)\n",
    "raises SystemExit when imported": "raise SystemExit(0)\n",
    "exits 0 when called": _every("os._exit(0)", "import os\n"),
    "kills its parent": _every("os.kill(os.getppid(), 9)", "import os\n"),
    "forks without end": _every("[os.fork() for _ in range(99)]", "import os\n"),
    "starts threads without end": _every(
        "[threading.Thread(target=time.sleep, args=(60,)).start() for _ in range(10**6)]", "import threading, time\n"
    ),
    "runs a program": _every("subprocess.run(['sh', '-c', 'echo 100'])", "import subprocess\n"),
    "opens a connection": _every("socket.create_connection(('127.0.0.1', 22))", "import socket\n"),
    "fills the disk": _every(
        "fill()",
        "import os\n\n\ndef fill():\n    for folder in ('.', '/tmp', '/dev/shm', '/var/tmp'):\n        for n in range(99):\n"
        "            with open(os.path.join(folder, f'full{n}'), 'wb') as file:\n                file.write(b'0' * 2**28)\n",
    ),
    "sleeps": _every("time.sleep(3600)", "import time\n"),
    "sleeps when imported": "import time\ntime.sleep(3600)\n",
    "computes without end": _every("[None for _ in iter(int, 1)]"),
    "allocates 10 GB": _every("return np.ones(10 * 2**30 // 8).sum()"),
    "returns 1 GB": _every("return np.zeros(2**27)"),
    "recurses without end": "import sys\nsys.setrecursionlimit(10**9)\n" + _every("return score(keys)", ""),
    "limits the parent's processor time": _UNDO
    + _every("resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))", "import os, resource\n"),
    "slows the parent down": _every("os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)", "import os\n"),
    "starts a process below the audit hook": _every(
        "_posixsubprocess.fork_exec([b'sh'], [b'/bin/sh'], True, (), None, None, -1, -1, -1, -1, -1, -1, -1, -1, True, True, 0,"
        " None, None, None, -1, os.setsid, True)",
        "import os\nimport _posixsubprocess\n",
    ),
    "starts a Python that may import everything": _every(
        "subprocess.run([sys.executable, '-c', 'import evictionary.reference.keydiff'], check=True)", "import subprocess, sys\n"
    ),
    "imports the laws": "from evictionary.spec_tests.harness.implementation import oracle\nscore = oracle('keydiff.score')\n",
    "imports a neighbour": "from .reference import keydiff\n",
    "loads the oracle as a file of another name": _FIND + "import importlib.util\n"
    "spec = importlib.util.spec_from_file_location('mine', found())\nmine = importlib.util.module_from_spec(spec)\n"
    "spec.loader.exec_module(mine)\nfrom mine import score\n",
    "reads the oracle below the audit hook": _FIND
    + """
import readline
readline.read_history_file(found())
exec("\\n".join(readline.get_history_item(n + 1) for n in range(readline.get_current_history_length())))
""",
    "looks for the answer in every frame and object": _every(
        "return found(keys)",
        "import gc, sys\nimport numpy as np\n\n\ndef found(keys):\n    frame, seen = sys._getframe(), []\n    while frame:\n"
        "        seen += list(frame.f_locals.values()) + list(frame.f_globals.values())\n        frame = frame.f_back\n"
        "    seen += gc.get_objects()\n    arrays = [each for each in seen if isinstance(each, np.ndarray) and each is not keys]\n"
        "    return next(each for each in arrays if each.shape == keys.shape[:-1])\n",
    ),
    "traces the worker": _every("return SEEN[-1]", "import sys\nSEEN = []\nsys.setprofile(lambda *seen: SEEN.append(seen))\n"),
    "replaces the worker's own functions": "import __main__\n__main__.encode = lambda value, arrays: {'plain': 'passed', "
    "'verdict': 'passed', 'points': 100}\n__main__._DENIED = ()\n" + _every("return keys", ""),
    "answers when it is over": "import atexit, os, signal\n\n\nclass Last:\n    def __del__(self):\n"
    "        os.write(4, b'100')\n\n\nlast = Last()\natexit.register(lambda: os.write(4, b'100'))\n"
    "for number in (1, 2, 3, 14, 15):\n    signal.signal(number, lambda *a: os.write(4, b'100'))\n"
    + _every("raise SystemExit(0)", ""),
    "a thread that answers for it": _FRAMES + "import threading\n\n\ndef speak():\n    while True:\n"
    '        send(frame(b\'{"result": {"plain": 1.0}}\'))\n\n\nthreading.Thread(target=speak, daemon=True).start()\n'
    + _every("return 0.0", ""),
    "an error message with half a character": _every("raise RuntimeError('\\ud800 [/bold] \\x00')", ""),
    "an error message of 100 MB": _every("raise RuntimeError('no ' * 2**25)", ""),
    "an error that is no Exception": "class Out(BaseException):\n    pass\n" + _every("raise Out", ""),
    "names that no module may have": "for name in ('__class__', '__dict__', '__name__', 'a b', ''):\n    globals()[name] = print\n",
    "a fraction that is never worked out": "from fractions import Fraction\n\n\nclass Endless(Fraction):\n    def __str__(self):\n"
    "        return '1e999999999'\n" + _every("return Endless(1)", ""),
    "a named tuple of a million fields": "class Wide(tuple):\n    _fields = tuple(f'f{n}' for n in range(10**6))\n"
    + _every("return Wide()", ""),
    "a tuple in a tuple without end": _every(
        "return nest()", "def nest():\n    one = ()\n    for _ in range(10**5):\n        one = (one,)\n    return one\n"
    ),
    "more than its parts": _every("return keys[..., 0], keys[..., 0]"),
    "text": _every("return 'passed'"),
    "infinite numbers": _every("return np.full(np.asarray(keys).shape[:-1], np.inf)"),
    "an array whose dtype lies": "import numpy as np\n\n\nclass Liar(np.ndarray):\n    dtype = np.dtype('f8')\n"
    + _every("return np.array([print] * 4, dtype=object).view(Liar)", ""),
    "prints without end": _every("[print('100' * 10**5, flush=True) for _ in iter(int, 1)]"),
    "a frame of arrays that lie over each other": _frame(
        'frame(b\'{"result": {"array": 0, "scalar": false}}\', bomb())', _OVERLAPPING
    ),
    "a frame with a fraction that is never worked out": _frame('frame(b\'{"result": {"fraction": "1e999999999"}}\')'),
    "a frame of brackets": _frame("frame(b'[' * 10**5)"),
    "a frame of other things": _frame('frame(b\'{"result": {"plain": {"score": [100]}}, "functions": 100}\')'),
    "a frame that promises an exabyte": _frame("b'\\x0f' * 16"),
    "a frame in place of the list of functions": _FRAMES + "send(frame(b'{\"functions\": 100}'))\n",
    "an answer in drips": _FRAMES
    + "import time\n"
    + _every("send(struct.pack('>QQ', 2**20, 0)) or [(send(b' '), time.sleep(0.01)) for _ in range(10**4)]", ""),
    "brackets without end": "score = " + "(" * 10**5 + ")" * 10**5 + "\n",
    "signs without end": "score = " + "-" * 10**6 + "1\n",
    "is no Python": "def score(keys:\n    return 100\n",
    "has NUL bytes": "\0" * 100,
    "is empty": "",
}


def _archive(path: Path, entries: dict[str, str | bytes], link: str = "") -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
        if link:
            entry = zipfile.ZipInfo("keydiff.py")
            entry.external_attr = (stat.S_IFLNK | 0o777) << 16
            archive.writestr(entry, link)


def _tar(path: Path, *entries: tarfile.TarInfo, swollen: int = 0) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for entry in entries:
            archive.addfile(entry, io.BytesIO(b"#" * entry.size))
        for number in range(swollen):
            entry = tarfile.TarInfo(f"{number}.txt")
            entry.size = 2**20
            archive.addfile(entry, io.BytesIO(b"#" * entry.size))


def _entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind, link
    return entry


def archives(folder: Path, oracle: Path) -> dict[str, Path]:
    """Write the hostile archives and folders, by what they try; `oracle` is the file that they would like to be."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    contents: tuple[tuple[str, dict[str, str | bytes], str], ...] = (
        ("a symbolic link in the archive", {}, str(oracle)),
        ("a path that leads out of the archive", {"keydiff.py": "", "../../grade.json": '{"score": 100}'}, ""),
        ("an absolute path in the archive", {"keydiff.py": "", "/tmp/keydiff.py": ""}, ""),
        ("a file that swells to 64 MiB", {"keydiff.py": b"#" * 2**26}, ""),
        ("no file of the name", {"other.py": ""}, ""),
        ("a path of Windows that leads out", {"keydiff.py": "", "..\\..\\grade.json": '{"score": 100}'}, ""),
        ("a drive of Windows", {"keydiff.py": "", "C:\\grade.json": '{"score": 100}'}, ""),
        ("two thousand files", {"keydiff.py": "", **{f"{number}.py": "" for number in range(2000)}}, ""),
    )
    for name, entries, link in contents:
        found[name] = folder / f"{name.replace(' ', '_')}.zip"
        if not found[name].exists():
            _archive(found[name], entries, link)
    tars: tuple[tuple[str, tuple[tarfile.TarInfo, ...], int], ...] = (
        ("a symbolic link in a tar", (_entry("keydiff.py", tarfile.SYMTYPE, str(oracle)),), 0),
        ("a hard link in a tar", (_entry("keydiff.py", tarfile.LNKTYPE, str(oracle)),), 0),
        ("a device in a tar", (_entry("keydiff.py", tarfile.CHRTYPE),), 0),
        ("a path that leads out of a tar", (_entry("keydiff.py"), _entry("../../grade.json")), 0),
        ("a tar that swells", (_entry("keydiff.py"),), 65),
    )
    for name, members, swollen in tars:
        found[name] = folder / f"{name.replace(' ', '_')}.tar.gz"
        if not found[name].exists():
            _tar(found[name], *members, swollen=swollen)
    broken = folder / "a_broken_archive.zip"
    broken.write_bytes(b"PK\3\4 and no more")
    found["a broken archive"] = broken
    found["a broken tar"] = folder / "a_broken_tar.tar.gz"
    found["a broken tar"].write_bytes(b"\x1f\x8b and no more")
    linked = folder / "a_folder_with_a_link"
    linked.mkdir(exist_ok=True)
    if not (linked / "keydiff.py").is_symlink():
        (linked / "keydiff.py").symlink_to(oracle)
    found["a symbolic link in a folder"] = linked
    return found
