"""Opens a submission (a file, a folder or an archive) and takes only the assignment's file out of it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

from evictionary import __version__
from evictionary.classroom import archives
from evictionary.classroom.archives import BadSubmission
from evictionary.classroom.assignment import Assignment
from evictionary.classroom.child import visible

READ_SECONDS = 60  # of waiting; the reader limits its own processor time
MANIFEST = "evictionary.json"
ARCHIVES = (".tar.gz", ".tgz", ".tar", ".zip")
ENDINGS = (*ARCHIVES, ".py")
KINDS = "a folder, a .zip, a .tar.gz or a .py file"
SUMMARY = "summary.json"
LONGEST_ID = 120
_NO_BREAKS = str.maketrans("\\\t\n", "___")


def is_id(student: str) -> bool:
    """Whether the id can be the name of a student's folder among the grades."""
    is_name = student.strip() not in ("", ".", "..", SUMMARY) and {"/", "\\"}.isdisjoint(student)
    return is_name and student.isprintable() and len(student.encode()) <= LONGEST_ID


def student_of(path: Path) -> str:
    """The student's id: the name of the file or folder without its ending; a name that cannot be an id gets a digest of its own."""
    name = path.name
    if not path.is_dir():
        name = next((name.removesuffix(ending) for ending in ENDINGS if name.endswith(ending)), path.stem)
    if is_id(name):
        return name
    # Old archives leave names that are not valid UTF-8; students choose others to disturb the grader.
    digest = hashlib.sha256(os.fsencode(path.name)).hexdigest()[:8]
    return f"{visible(name[:20]).translate(_NO_BREAKS)}-{digest}"


def personal_id(path: Path, student: str) -> str:
    """The id that the student's constants are drawn from: the one that `submit --student` packed, or else the submission's name.

    Browsers add a number to the name of a second download: "ada (1)" is ada's file.
    """
    try:
        packed = _packed(path, MANIFEST)
        if packed.name.endswith(ARCHIVES) and not packed.is_symlink():
            packed_id = json.loads(_from_archive(packed, MANIFEST))["student"]
            if isinstance(packed_id, str) and is_id(packed_id):
                return packed_id
    except Exception:  # no manifest, or one that a stranger wrote; `read` says what is wrong with an archive
        return student
    return re.sub(r"[ _]*\(\d+\)$", "", student) or student


def _packed(path: Path, name: str) -> Path:
    """The archive in a folder that holds one and no file of that name, as course platforms store an upload; or the path itself."""
    if not path.is_dir():
        return path
    packed = [each for each in path.iterdir() if each.name.endswith(ARCHIVES) and each.name[0] != "."]
    return packed[0] if len(packed) == 1 and not os.path.lexists(path / name) else path


def read(path: Path, assignment: Assignment) -> bytes:
    """The bytes of the assignment's file, from a folder, an archive, a folder with one archive, or the file itself.

    Raises BadSubmission for links, paths that leave the archive, and too large files.
    """
    name = Path(assignment.file).name
    if path.is_symlink():
        raise BadSubmission(f"{visible(path.name)} is a symbolic link")
    if path.is_dir():
        packed = _packed(path, name)
        path = path / name if packed == path else packed
        if path.is_symlink():
            raise BadSubmission(f"{visible(path.name)} is a symbolic link")
    if not path.is_file():
        raise BadSubmission(f"there is no file {visible(path.name)}")
    if path.name.endswith(".py"):
        return _read_file(path)
    if path.name.endswith(ARCHIVES):
        return _from_archive(path, name)
    raise BadSubmission(f"{visible(path.name)}: wanted {KINDS}")


def _read_file(path: Path) -> bytes:
    size = path.stat().st_size
    if size > archives.LARGEST_FILE:
        raise BadSubmission(f"{visible(path.name)} has {size} bytes, more than {archives.LARGEST_FILE}")
    return path.read_bytes()


def _from_archive(path: Path, name: str) -> bytes:
    """The file of an archive, read by a process of its own: nothing that an archive does to its reader is done to the grader."""
    size = path.stat().st_size
    if size > archives.LARGEST_ARCHIVE:
        raise BadSubmission(f"{visible(path.name)} has {size} bytes, more than {archives.LARGEST_ARCHIVE}")
    command = [sys.executable, "-I", "-S", "-B", archives.__file__, str(path), name]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=READ_SECONDS)
    except subprocess.TimeoutExpired:
        raise BadSubmission(f"the archive cannot be read within {READ_SECONDS} s") from None
    if done.returncode < 0:
        raise BadSubmission(f"the archive cannot be read: {signal.Signals(-done.returncode).name} ended its reader")
    if done.returncode:
        raise BadSubmission(done.stdout.decode("utf-8", "replace") or "the archive cannot be read: its reader ended")
    return done.stdout


def pack(assignment: Assignment, work: Path, output: Path, student: str | None = None) -> list[str]:
    """Write the archive to hand in: the assignment's file and a manifest with its SHA-256 and the id. Returns the names in it.

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
    if student is not None:
        manifest["student"] = student
    with zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
        archive.writestr(MANIFEST, json.dumps(manifest, indent=1) + "\n")
    return [name, MANIFEST]
