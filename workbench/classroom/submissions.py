"""Opens what was handed in, a file, a folder or an archive, and takes the assignment's file out of it and nothing else."""

from __future__ import annotations

import hashlib
import json
import stat
import zipfile
from pathlib import Path

from workbench import __version__
from workbench.classroom.assignment import Assignment

LARGEST_FILE = 2**20
MOST_ENTRIES = 1000
MANIFEST = "evictionary.json"


class BadSubmission(Exception):
    """The submission cannot be opened, or is built to do harm; the message says why."""


def student_of(path: Path) -> str:
    """The student's id: the name of the file or folder, without its ending."""
    return path.resolve().name if path.is_dir() else path.stem


def read(path: Path, assignment: Assignment) -> bytes:
    """The bytes of the assignment's file. Raises BadSubmission for links, paths that lead out, and what is too large."""
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
    if path.suffix == ".py":
        return _read_file(path)
    if path.suffix == ".zip":
        return _from_zip(path, name)
    raise BadSubmission(f"{path.name}: wanted a folder, a .zip or a .py file")


def _read_file(path: Path) -> bytes:
    size = path.stat().st_size
    if size > LARGEST_FILE:
        raise BadSubmission(f"{path.name} has {size} bytes, more than {LARGEST_FILE}")
    return path.read_bytes()


def _from_zip(path: Path, name: str) -> bytes:
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            if len(entries) > MOST_ENTRIES:
                raise BadSubmission(f"{len(entries)} entries in the archive, more than {MOST_ENTRIES}")
            for entry in entries:
                parts = entry.filename.replace("\\", "/").split("/")
                if entry.filename.startswith(("/", "\\")) or ".." in parts or ":" in parts[0]:
                    raise BadSubmission(f"an entry of the archive leads out of it: {entry.filename!r}")
                if stat.S_ISLNK(entry.external_attr >> 16):
                    raise BadSubmission(f"an entry of the archive is a symbolic link: {entry.filename!r}")
            chosen = [entry for entry in entries if entry.filename == name]
            if len(chosen) != 1:
                raise BadSubmission(f"{len(chosen)} files {name} at the top of the archive, wanted one")
            if chosen[0].file_size > LARGEST_FILE:
                raise BadSubmission(f"{name} has {chosen[0].file_size} bytes, more than {LARGEST_FILE}")
            with archive.open(chosen[0]) as member:
                return member.read(LARGEST_FILE)
    except (zipfile.BadZipFile, OSError, RuntimeError, NotImplementedError, EOFError) as error:
        raise BadSubmission(f"the archive cannot be read: {error}") from None


def pack(assignment: Assignment, work: Path, output: Path) -> list[str]:
    """Write the archive to hand in: the assignment's file and a manifest with its SHA-256. Returns the names in it.

    Raises FileNotFoundError where the file has not been started.
    """
    source = work / assignment.file
    name = Path(assignment.file).name
    content = source.read_bytes()
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
