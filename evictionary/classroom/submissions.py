"""Opens a submission (a file, a folder or an archive) and takes only the assignment's file out of it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tokenize
import unicodedata
import zipfile
from collections.abc import Collection
from pathlib import Path

from evictionary import __version__
from evictionary.classroom import archives
from evictionary.classroom.archives import BadSubmission
from evictionary.classroom.assignment import Assignment
from evictionary.classroom.child import clean, visible

READ_SECONDS = 60  # of waiting; the reader limits its own processor time
MANIFEST = "evictionary.json"
ARCHIVES = (".tar.gz", ".tgz", ".tar", ".zip")
ENDINGS = (*ARCHIVES, ".py")
# What students hand in by mistake; each gets a result that says so.
MISTAKEN = {
    ".ipynb": "is a notebook: write the functions into a file {name}, and hand that in",
    ".py.txt": "is a text file: call it {name}, and hand that in",
}
KINDS = "a folder, a .zip, a .tar.gz or a .py file"
SUMMARY, GRADEBOOK = "summary.json", "gradebook.csv"
Handed = Path | str  # where a submission is; a text says why there is none to read
LONGEST_ID = 120
TURNING = ("LRE", "LRO", "RLE", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
_NO_BREAKS = str.maketrans("\\\t\n", "___")


def is_id(student: str) -> bool:
    """Whether the id can be the name of a student's folder among the grades."""
    is_name = student.strip() not in ("", ".", "..", SUMMARY, GRADEBOOK) and {"/", "\\"}.isdisjoint(student)
    return is_name and student.isprintable() and len(student.encode()) <= LONGEST_ID


def student_of(path: Path) -> str:
    """The student's id: the name of the file or folder without its ending; a name that cannot be an id gets a digest of its own."""
    name = path.name
    if not path.is_dir():
        name = next((name.removesuffix(ending) for ending in (*ENDINGS, *MISTAKEN) if name.endswith(ending)), path.stem)
    if is_id(name):
        return name
    # Old archives leave names that are not valid UTF-8; students choose others to disturb the grader.
    digest = hashlib.sha256(os.fsencode(path.name)).hexdigest()[:8]
    return f"{visible(name[:20]).translate(_NO_BREAKS)}-{digest}"


def packed_id(path: Path) -> str | None:
    """The id that `submit --student` packed: from an archive, a folder that holds one, or one that a platform has unpacked."""
    try:
        packed = _packed(path, MANIFEST)
        if (packed / MANIFEST).is_file() and not (packed / MANIFEST).is_symlink():
            content = _read_file(packed / MANIFEST)
        elif packed.name.endswith(ARCHIVES) and not packed.is_symlink():
            content = _from_archive(packed, MANIFEST)
        else:
            return None
        found = json.loads(content)["student"]
    except Exception:  # no manifest, or one that a stranger wrote; `read` says what is wrong with an archive
        return None
    return found if isinstance(found, str) and is_id(found) else None


def personal_id(path: Handed, student: str, roster: Collection[str] = ()) -> tuple[str, str]:
    """The id that the student's constants are drawn from, and what the instructor should know about it, or an empty text.

    It is the submission's name if the roster has that, else the id in the archive if the roster has it, else the name again.
    Without a roster it is the id in the archive. Browsers add a number to the name of a second download: "ada (1)" is ada's file.
    """
    name = re.sub(r"[ _]*\(\d+\)$", "", student) or student
    packed = None if isinstance(path, str) else packed_id(path)
    if packed is None or packed == name:
        return name, f"{name!r} is not on the roster" if roster and name not in roster else ""
    if not roster:
        return packed, f"the constants are those of {packed!r}, an id that the student wrote; the submission is named {name!r}"
    if name not in roster and packed in roster:
        return packed, ""
    why = "the submission is named" if name in roster else "the roster does not have it; the submission is named"
    return name, f"the archive says {packed!r}, and {why} {name!r}"


def _packed(path: Path, name: str) -> Path:
    """The archive in a folder that holds one and no file of that name, as course platforms store an upload; or the path itself."""
    if not path.is_dir():
        return path
    packed = [each for each in path.iterdir() if each.name.endswith(ARCHIVES) and each.name[0] != "."]
    return packed[0] if len(packed) == 1 and not os.path.lexists(path / name) else path


def read(path: Handed, assignment: Assignment) -> bytes:
    """The bytes of the assignment's file, from a folder, an archive, a folder with one archive, or the file itself.

    Raises BadSubmission for links, paths that leave the archive, too large files, and where there is nothing to read.
    """
    name = Path(assignment.file).name
    if isinstance(path, str):
        raise BadSubmission(path)
    if path.is_symlink():
        raise BadSubmission(f"{visible(path.name)} is a symbolic link")
    instead = ""
    if path.is_dir():
        packed, instead = _packed(path, name), _instead(path)
        path = path / name if packed == path else packed
        if path.is_symlink():
            raise BadSubmission(f"{visible(path.name)} is a symbolic link")
    if not path.is_file():
        raise BadSubmission(f"there is no file {visible(path.name)}{instead}")
    if path.name.endswith(".py"):
        return _read_file(path)
    if path.name.endswith(ARCHIVES):
        return _from_archive(path, name)
    told = next((told for ending, told in MISTAKEN.items() if path.name.endswith(ending)), "")
    raise BadSubmission(f"{visible(path.name)} {told.format(name=name)}" if told else f"{visible(path.name)}: wanted {KINDS}")


def _instead(folder: Path) -> str:
    """What a folder holds in place of the assignment's file, as the end of a sentence."""
    names = [visible(each.name) for each in folder.iterdir()]
    packed = sorted(each for each in names if each.endswith(ARCHIVES))
    return f", and {len(packed)} archives: {', '.join(packed[:5])}; wanted one" if packed else archives.there_is(names)


def oddities(source: bytes) -> list[str]:
    """What a reader would not see in a file: an encoding in which a comment may be code, and marks that turn text around."""
    try:
        encoding = tokenize.detect_encoding(io.BytesIO(source).readline)[0]
    except SyntaxError:  # an encoding that Python does not know; the file does not load either
        return []
    told = []
    if encoding not in ("utf-8", "utf-8-sig"):
        told.append(f"the file is in {clean(encoding, 40)}, not in UTF-8: what a reader sees as a comment may be code")
    marks = {f"U+{ord(each):04X}" for each in source.decode("utf-8", "ignore") if unicodedata.bidirectional(each) in TURNING}
    if marks:
        told.append(f"the file has marks that change the order in which its text is shown: {', '.join(sorted(marks))}")
    return told


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
