"""Opens a submission (a file, a folder or an archive) and takes only the assignment's file out of it."""

import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tokenize
import unicodedata
import zipfile
from collections.abc import Collection
from pathlib import Path

from evictionary import __version__
from evictionary.classroom import archives
from evictionary.classroom.archives import BadSubmission, require
from evictionary.classroom.assignment import Assignment
from evictionary.classroom.child import clean, visible
from evictionary.spec_tests.judge.remote import ended

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
SUMMARY, GRADEBOOK, CANVAS, ASSISTANTS = "summary.json", "gradebook.csv", "canvas.csv", "assistants.md"
Handed = Path | str  # where a submission is; a text says why there is none to read
LONGEST_ID = 120
TURNING = ("LRE", "LRO", "RLE", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
_NO_BREAKS = str.maketrans("\\\t\n", "___")


def is_id(student: str) -> bool:
    """Whether the id can be the name of a student's folder among the grades."""
    taken = ("", ".", "..", SUMMARY, GRADEBOOK, CANVAS, ASSISTANTS)
    is_name = student.strip() not in taken and {"/", "\\"}.isdisjoint(student)
    return is_name and student.isprintable() and len(student.encode()) <= LONGEST_ID


def student_of(path: Path) -> str:
    """The student's id: the name of the file or folder without its ending; a name that cannot be an id
    gets a digest of its own.
    """
    ending = next((each for each in (*ENDINGS, *MISTAKEN) if path.name.endswith(each)), path.suffix)
    name = path.name if path.is_dir() else path.name.removesuffix(ending)
    if is_id(name):
        return name
    # Old archives leave names that are not valid UTF-8; students choose others to disturb the grader.
    return (
        f"{visible(name[:20]).translate(_NO_BREAKS)}-{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:8]}"
    )


def packed_id(path: Path) -> str | None:
    """The id that `submit --student` packed: from an archive, a folder that holds one, or one that a
    platform has unpacked.
    """
    try:
        found = json.loads(_content(path, MANIFEST))["student"]
    except Exception:  # no manifest, or one that a stranger wrote; `read` says what is wrong with an archive
        return None
    return found if isinstance(found, str) and is_id(found) else None


def personal_id(path: Handed, student: str, roster: Collection[str] = ()) -> tuple[str, str]:
    """The id that the student's constants are drawn from, and what the instructor should know about it, or
    an empty text.

    It is the submission's name if the roster has that, else the id in the archive if the roster has it, else
    the name again. Without a roster it is the id in the archive. Browsers add a number to the name of a
    second download: "ada (1)" is ada's file.
    """
    name = re.sub(r"[ _]*\(\d+\)$", "", student) or student
    packed = None if isinstance(path, str) else packed_id(path)
    if packed is None or packed == name:
        return name, f"{name!r} is not on the roster" if roster and name not in roster else ""
    if not roster:
        return (
            packed,
            f"the constants are those of {packed!r}, an id that the student wrote; the submission is named "
            f"{name!r}",
        )
    if name not in roster and packed in roster:
        return packed, ""
    why = (
        "the submission is named"
        if name in roster
        else "the roster does not have it; the submission is named"
    )
    return name, f"the archive says {packed!r}, and {why} {name!r}"


def read(path: Handed, assignment: Assignment) -> bytes:
    """The bytes of the assignment's file, from a folder, an
    archive, a folder with one archive, or the file itself.

    Raises BadSubmission for links, paths that leave the archive,
    too large files, and where there is nothing to read.
    """
    if isinstance(path, str):
        raise BadSubmission(path)
    return _content(path, Path(assignment.file).name)


def _content(path: Path, name: str) -> bytes:
    """The bytes of the file `name`. The path is that file
    by any name, an archive, or a folder with one of them.
    """
    place = _place(path, name)
    for each in (path, place):
        require(not each.is_symlink(), f"{visible(each.name)} is a symbolic link")
    require(
        place.is_file(), f"there is no file {visible(place.name)}{_instead(path) if path.is_dir() else ''}"
    )
    if place.suffix == Path(name).suffix:
        return _read_file(place)
    if place.name.endswith(ARCHIVES):
        return _from_archive(place, name)
    told = next(
        (told.format(name=name) for ending, told in MISTAKEN.items() if place.name.endswith(ending)), ""
    )
    raise BadSubmission(f"{visible(place.name)} {told}" if told else f"{visible(place.name)}: wanted {KINDS}")


def _place(path: Path, name: str) -> Path:
    """Where a file is in a folder: the only archive of a folder without the file, as platforms store an
    upload, or the file.
    """
    if not path.is_dir():
        return path
    packed = [each for each in path.iterdir() if each.name.endswith(ARCHIVES) and each.name[0] != "."]
    return packed[0] if len(packed) == 1 and not os.path.lexists(path / name) else path / name


def _instead(folder: Path) -> str:
    """What a folder holds in place of the assignment's file, as the end of a sentence."""
    names = [visible(each.name) for each in folder.iterdir()]
    packed = sorted(each for each in names if each.endswith(ARCHIVES))
    return (
        f", and {len(packed)} archives: {', '.join(packed[:5])}; wanted one"
        if packed
        else archives.there_is(names)
    )


def oddities(source: bytes) -> list[str]:
    """What a reader would not see in a file: an encoding in which a comment may be code, and marks that
    turn text around.
    """
    try:
        encoding = tokenize.detect_encoding(io.BytesIO(source).readline)[0]
    except SyntaxError:  # an encoding that Python does not know; the file does not load either
        return []
    text = source.decode("utf-8", "ignore")
    marks = sorted({f"U+{ord(each):04X}" for each in text if unicodedata.bidirectional(each) in TURNING})
    coding, order = f"in {clean(encoding, 40)}, not in UTF-8", "change the order in which its text is shown"
    is_odd = {
        f"the file is {coding}: what a reader sees as a comment may be code": encoding
        not in ("utf-8", "utf-8-sig"),
        f"the file has marks that {order}: {', '.join(marks)}": bool(marks),
    }
    return [told for told, holds in is_odd.items() if holds]


def _read_file(path: Path) -> bytes:
    _require_size(path, archives.LARGEST_FILE)
    return path.read_bytes()


def _require_size(path: Path, largest: int) -> None:
    size = path.stat().st_size
    require(size <= largest, f"{visible(path.name)} has {size} bytes, more than {largest}")


def _from_archive(path: Path, name: str) -> bytes:
    """The file of an archive, read by a process of its own: nothing that an archive does to its reader is
    done to the grader.
    """
    _require_size(path, archives.LARGEST_ARCHIVE)
    command, told = (
        [sys.executable, "-I", "-S", "-B", archives.__file__, str(path), name],
        "the archive cannot be read",
    )
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=READ_SECONDS)
    except subprocess.TimeoutExpired:
        raise BadSubmission(f"{told} within {READ_SECONDS} s") from None
    ending = ended(done.returncode, archives.CPU_SECONDS)
    why = clean(done.stdout.decode("utf-8", "replace")) or f"{told}: its reader ended with {ending}"
    require(done.returncode == 0, why)
    return done.stdout


def pack(assignment: Assignment, work: Path, output: Path, student: str | None = None) -> list[str]:
    """Write the archive to hand in: the assignment's file and a manifest with its SHA-256 and the id.
    Returns the names in it.

    Raises BadSubmission where the file is one that the grader would refuse.
    """
    name = Path(assignment.file).name
    content = _read_file(work / assignment.file)
    manifest = {
        "schema": "evictionary/submission/1",
        "assignment": assignment.name,
        "suite": __version__,
        "files": {name: hashlib.sha256(content).hexdigest()},
        **({} if student is None else {"student": student}),
    }
    with zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
        archive.writestr(MANIFEST, json.dumps(manifest, indent=1) + "\n")
    return [name, MANIFEST]
