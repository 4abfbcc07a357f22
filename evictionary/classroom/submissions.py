"""Opens a submission (a file, a folder or an archive) and takes only the assignment's file out of it."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from evictionary import __version__
from evictionary.classroom.assignment import Assignment

LARGEST_FILE = 2**20
LARGEST_TAR = 64 * 2**20
MOST_ENTRIES = 1000
MANIFEST = "evictionary.json"
ENDINGS = (".tar.gz", ".tgz", ".tar", ".zip", ".py")
KINDS = "a folder, a .zip, a .tar.gz or a .py file"


class BadSubmission(Exception):
    """The submission cannot be opened, or is hostile; the message says why."""


def student_of(path: Path) -> str:
    """The student's id: the name of the file or folder, without its ending."""
    name = path.resolve().name
    if not path.is_dir():
        name = next((path.name.removesuffix(ending) for ending in ENDINGS if path.name.endswith(ending)), path.stem)
    # Old archives leave names that are not valid UTF-8; the escaped name can be printed and written.
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def read(path: Path, assignment: Assignment) -> bytes:
    """The bytes of the assignment's file. Raises BadSubmission for links, paths that leave the archive, and too large files."""
    name = Path(assignment.file).name
    if path.is_dir():
        found = path / name
        if found.is_symlink():
            raise BadSubmission(f"{name} is a symbolic link")
        if not found.is_file():
            raise BadSubmission(f"no file {name} in the folder")
        return _read_file(found)
    if path.is_symlink() or not path.is_file():
        raise BadSubmission(f"{path.name} is no file")
    if path.name.endswith(".py"):
        return _read_file(path)
    if path.name.endswith(".zip"):
        return _from_zip(path, name)
    if path.name.endswith((".tar.gz", ".tgz", ".tar")):
        return _from_tar(path, name)
    raise BadSubmission(f"{path.name}: wanted {KINDS}")


def _read_file(path: Path) -> bytes:
    size = path.stat().st_size
    if size > LARGEST_FILE:
        raise BadSubmission(f"{path.name} has {size} bytes, more than {LARGEST_FILE}")
    return path.read_bytes()


def _from_zip(path: Path, name: str) -> bytes:
    try:
        with zipfile.ZipFile(path) as archive:
            sizes = [(entry.filename, stat.S_ISLNK(entry.external_attr >> 16), entry.file_size) for entry in archive.infolist()]
            place = _place_of(name, sizes)
            return _at_most(archive.open(archive.infolist()[place]).read, name)
    except (zipfile.BadZipFile, zlib.error, OSError, ValueError, RuntimeError, NotImplementedError, EOFError) as error:
        raise BadSubmission(f"the archive cannot be read: {error}") from None


def _from_tar(path: Path, name: str) -> bytes:
    try:
        with path.open("rb") as file:
            is_packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if is_packed else path.open("rb") as stream:
            content = stream.read(LARGEST_TAR + 1)
        if len(content) > LARGEST_TAR:
            raise BadSubmission(f"the archive holds more than {LARGEST_TAR} bytes")
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            entries = archive.getmembers()
            place = _place_of(name, [(entry.name, not (entry.isfile() or entry.isdir()), entry.size) for entry in entries])
            member = archive.extractfile(entries[place])
            assert member is not None
            return _at_most(member.read, name)
    except (tarfile.TarError, zlib.error, OSError, ValueError, EOFError) as error:
        raise BadSubmission(f"the archive cannot be read: {error}") from None


def _place_of(name: str, entries: list[tuple[str, bool, int]]) -> int:
    """The file's place in an archive, given the name, whether it is a link, and the size of each entry."""
    if len(entries) > MOST_ENTRIES:
        raise BadSubmission(f"{len(entries)} entries in the archive, more than {MOST_ENTRIES}")
    found = []
    for place, (path, is_link, size) in enumerate(entries):
        parts = path.replace("\\", "/").split("/")
        if parts[0] == "" or ".." in parts or ":" in parts[0]:
            raise BadSubmission(f"an entry of the archive leads out of it: {path!r}")
        if is_link:
            raise BadSubmission(f"an entry of the archive is a symbolic link, or no file: {path!r}")
        parts = [part for part in parts if part != "."]
        # macOS adds a second entry with the same name beside each file.
        if parts[-1:] == [name] and "__MACOSX" not in parts:
            found.append((parts, place, size))
    at_top = [each for each in found if each[0] == [name]]
    if len(at_top) != 1:
        elsewhere = ", ".join("/".join(parts) for parts, _, _ in found if parts != [name])
        raise BadSubmission(
            f"{len(at_top)} files {name} at the top of the archive, wanted one"
            + (f"; there is {elsewhere}. `evictionary submit` packs it as it should be" if elsewhere else "")
        )
    _, place, size = at_top[0]
    if size > LARGEST_FILE:
        raise BadSubmission(f"{name} has {size} bytes, more than {LARGEST_FILE}")
    return place


def _at_most(read: Callable[[int], bytes], name: str) -> bytes:
    """Read a file of an archive; the file may be larger than its entry says."""
    content = read(LARGEST_FILE + 1)
    if len(content) > LARGEST_FILE:
        raise BadSubmission(f"{name} has more than {LARGEST_FILE} bytes")
    return content


def pack(assignment: Assignment, work: Path, output: Path) -> list[str]:
    """Write the archive to hand in: the assignment's file and a manifest with its SHA-256. Returns the names in it.

    Raises BadSubmission where the file is one that the grader would refuse.
    """
    name = Path(assignment.file).name
    content = _read_file(work / assignment.file)
    manifest = {
        "schema": "evictionary/submission/1",
        "assignment": assignment.name,
        "suite": __version__,
        "files": {name: hashlib.sha256(content).hexdigest()},
    }
    with zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
        archive.writestr(MANIFEST, json.dumps(manifest, indent=1) + "\n")
    return [name, MANIFEST]
