"""What a hostile submission to the KeyDiff assignment may try: each must score nothing, and end as a result file like any other."""

from __future__ import annotations

import stat
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
source = open(found()).read().replace("from reference", "from numpy")
exec(source)
"""
_UNDO = """
import gc, types
for thing in gc.get_objects():
    if isinstance(thing, types.FunctionType) and thing.__qualname__.startswith("guard."):
        thing.__code__ = (lambda event, arguments: None).__code__.replace(co_freevars=thing.__code__.co_freevars)
"""

SOURCES: dict[str, str] = {
    "raises always": _every("raise RuntimeError('no')"),
    "raises ValueError always": _every("raise ValueError('keys: no')"),
    "returns the input": _every("return keys"),
    "returns a constant": _every("return np.zeros(np.asarray(keys).shape[:-1])"),
    "returns nothing": _every("return None"),
    "returns NaN": _every("return np.full(np.asarray(keys).shape[:-1], np.nan)"),
    "imports the oracle": "from reference.keydiff import anchor, pairwise_score, score, similarity_matrix\n",
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
    )
    for name, entries, link in contents:
        found[name] = folder / f"{name.replace(' ', '_')}.zip"
        if not found[name].exists():
            _archive(found[name], entries, link)
    broken = folder / "a_broken_archive.zip"
    broken.write_bytes(b"PK\3\4 and no more")
    found["a broken archive"] = broken
    linked = folder / "a_folder_with_a_link"
    linked.mkdir(exist_ok=True)
    if not (linked / "keydiff.py").is_symlink():
        (linked / "keydiff.py").symlink_to(oracle)
    found["a symbolic link in a folder"] = linked
    return found
