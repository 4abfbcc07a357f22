"""Attacks of hostile submissions to the KeyDiff assignment:
each must get no points and an ordinary result file.
"""

import io
import stat
import struct
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

from .grader import handed_in

FUNCTIONS = ("anchor", "score", "similarity_matrix", "pairwise_score")
_WRITTEN: dict[str, dict[str, Any]] = tomllib.loads(
    (Path(__file__).parent / "attacks.toml").read_text(encoding="utf-8")
)
_PIECES = _WRITTEN.pop("pieces")


def _source(uses: tuple[str, ...] = (), imports: str = "", file: str = "", every: str = "") -> str:
    """The text of a file from its parts, as attacks.toml explains them."""
    if every and not (uses or imports or file):
        imports = "numpy as np"
    parts = [*(_PIECES[name] for name in uses), f"import {imports}\n" if imports else "", file]
    return "".join([*parts, *(f"\n\ndef {name}(keys):\n    {every}\n" for name in FUNCTIONS if every)])


SOURCES = {name: _source(**attack) for name, attack in _WRITTEN.items()} | {
    "brackets without end": "score = " + "(" * 10**5 + ")" * 10**5 + "\n",
    "signs without end": "score = " + "-" * 10**6 + "1\n",
    "has NUL bytes": "\0" * 100,
}
# A program that removes the audit hook, then tries to harm other processes.
PROBE = "import ctypes, os, resource, sys\n" + _PIECES["undo"] + _PIECES["probe"]


def _blocks(*headers: tarfile.TarInfo, content: bytes = b"") -> bytes:
    """A tar with headers that no program writes; the content follows each header that gives its size."""
    padded = content + bytes(-len(content) % 512)
    return b"".join(
        each.tobuf(tarfile.GNU_FORMAT) + padded * (each.size == len(content)) for each in headers
    ) + bytes(1024)


def _entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind, link
    return entry


def _without_end() -> dict[str, bytes]:
    """Archives that ask their reader for endless time or memory."""
    back, digits, long_name = (
        _entry("back.txt"),
        _entry("pax", tarfile.XHDTYPE),
        _entry("././@LongLink", tarfile.GNUTYPE_LONGNAME),
    )
    back.size, digits.size, long_name.size = -512, 10**6, 4
    written = {
        "a tar that leads back to itself.tar": _blocks(_entry("keydiff.py"), back),
        "a tar with a number of a million digits.tar": _blocks(digits, content=b"1" * 10**6),
        "a tar of names of names.tar": _blocks(*[long_name] * 3000, content=b"abc\0"),
    }
    for name, method in (("bzip2", zipfile.ZIP_BZIP2), ("LZMA", zipfile.ZIP_LZMA)):
        # The directory says that the 16 MiB are 10 bytes.
        written[f"a file that swells by {name}.zip"] = _zipped(b"#" * 2**24, method).replace(
            struct.pack("<I", 2**24), struct.pack("<I", 10)
        )
    data, count = _zipped(b"", zipfile.ZIP_STORED), 2**16 - 2
    start, end = data.rindex(b"PK\1\2"), data.rindex(b"PK\5\6")
    directory = data[start:end] * count
    sizes = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, count, count, len(directory), start, 0)
    return written | {"a zip whose entries are all the same.zip": data[:start] + directory + sizes}


def _zipped(content: bytes, method: int) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", method) as archive:
        archive.writestr("keydiff.py", content)
    return packed.getvalue()


def archives(folder: Path, oracle: Path) -> dict[str, Path]:
    """Write the hostile archives and folders, named after their attack; `oracle` is the file that their
    links lead to.
    """
    link = zipfile.ZipInfo("keydiff.py")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    contents: dict[str, bytes | dict[Any, str | bytes]] = {
        "a symbolic link in the archive.zip": {link: str(oracle)},
        "a path that leads out of the archive.zip": {"keydiff.py": "", "../../grade.json": '{"score": 100}'},
        "an absolute path in the archive.zip": {"keydiff.py": "", "/tmp/keydiff.py": ""},
        "a file that swells to 64 MiB.zip": {"keydiff.py": b"#" * 2**26},
        "no file of the name.zip": {"other.py": ""},
        "a path of Windows that leads out.zip": {"keydiff.py": "", "..\\..\\grade.json": '{"score": 100}'},
        "a drive of Windows.zip": {"keydiff.py": "", "C:\\grade.json": '{"score": 100}'},
        "two thousand files.zip": {"keydiff.py": "", **{f"{number}.py": "" for number in range(2000)}},
        "a symbolic link in a tar.tar.gz": {_entry("keydiff.py", tarfile.SYMTYPE, str(oracle)): ""},
        "a hard link in a tar.tar.gz": {_entry("keydiff.py", tarfile.LNKTYPE, str(oracle)): ""},
        "a device in a tar.tar.gz": {_entry("keydiff.py", tarfile.CHRTYPE): ""},
        "a path that leads out of a tar.tar.gz": {"keydiff.py": "", "../../grade.json": ""},
        "a tar that swells.tar.gz": {
            "keydiff.py": "",
            **{f"{number}.txt": b"#" * 2**20 for number in range(65)},
        },
        "a broken archive.zip": b"PK\3\4 and no more",
        "a broken tar.tar.gz": b"\x1f\x8b and no more",
        **_without_end(),
    }
    handed_in(folder, {name.replace(" ", "_"): content for name, content in contents.items()})
    linked = folder / "a_folder_with_a_link"
    linked.mkdir(exist_ok=True)
    (linked / "keydiff.py").unlink(missing_ok=True)
    (linked / "keydiff.py").symlink_to(oracle)
    return {name.split(".")[0]: folder / name.replace(" ", "_") for name in contents} | {
        "a symbolic link in a folder": linked
    }
