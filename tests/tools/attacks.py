"""Attacks of hostile submissions to the KeyDiff assignment: each must get no points and an ordinary result file."""

import io
import stat
import struct
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

FUNCTIONS = ("anchor", "score", "similarity_matrix", "pairwise_score")
_WRITTEN: dict[str, dict[str, Any]] = tomllib.loads((Path(__file__).parent / "attacks.toml").read_text(encoding="utf-8"))
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


def _blocks(*headers: tarfile.TarInfo, content: bytes = b"") -> bytes:
    """A tar with headers that no program writes; the content follows each header that gives its size."""
    padded = content + bytes(-len(content) % 512)
    return b"".join(each.tobuf(tarfile.GNU_FORMAT) + padded * (each.size == len(content)) for each in headers) + bytes(1024)


def _entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind, link
    return entry


def _without_end(folder: Path) -> dict[str, Path]:
    """Archives that ask their reader for endless time or memory."""
    back, digits, long_name = _entry("back.txt"), _entry("pax", tarfile.XHDTYPE), _entry("././@LongLink", tarfile.GNUTYPE_LONGNAME)
    back.size, digits.size, long_name.size = -512, 10**6, 4
    written = {
        "a tar that leads back to itself": ("tar", _blocks(_entry("keydiff.py"), back)),
        "a tar with a number of a million digits": ("tar", _blocks(digits, content=b"1" * 10**6)),
        "a tar of names of names": ("tar", _blocks(*[long_name] * 3000, content=b"abc\0")),
    }
    for name, method in (("bzip2", zipfile.ZIP_BZIP2), ("LZMA", zipfile.ZIP_LZMA)):
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", method) as archive:
            archive.writestr("keydiff.py", b"#" * 2**24)
        # The directory says that the 16 MiB are 10 bytes.
        written[f"a file that swells by {name}"] = (
            "zip",
            packed.getvalue().replace(struct.pack("<I", 2**24), struct.pack("<I", 10)),
        )
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("keydiff.py", "")
    data, count = packed.getvalue(), 2**16 - 2
    start, end = data.rindex(b"PK\1\2"), data.rindex(b"PK\5\6")
    directory = data[start:end] * count
    sizes = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, count, count, len(directory), start, 0)
    written["a zip whose entries are all the same"] = ("zip", data[:start] + directory + sizes)
    found = {}
    for name, (ending, content) in written.items():
        found[name] = folder / f"{name.replace(' ', '_')}.{ending}"
        found[name].write_bytes(content)
    return found


def archives(folder: Path, oracle: Path) -> dict[str, Path]:
    """Write the hostile archives and folders, named after their attack; `oracle` is the file that their links lead to."""
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
    found |= _without_end(folder)
    linked = folder / "a_folder_with_a_link"
    linked.mkdir(exist_ok=True)
    if not (linked / "keydiff.py").is_symlink():
        (linked / "keydiff.py").symlink_to(oracle)
    found["a symbolic link in a folder"] = linked
    return found
