"""The program that reads one file out of a student's archive: `python -I -S archives.py PATH NAME`, under
limits of its own.

An archive of a few bytes can ask its reader for endless time or memory. So the grader reads none itself:
`submissions.py` starts this program, which writes the file's content and exits with 0, or writes the reason
for refusing the archive and exits with 1.
"""

import contextlib
import gzip
import io
import stat
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from typing import IO

LARGEST_FILE = 2**20
LARGEST_ARCHIVE = 64 * 2**20
MOST_ENTRIES = 1000
CPU_SECONDS, MEMORY = 3, 512 * 2**20


class BadSubmission(Exception):
    """The submission cannot be opened, or is hostile; the message says why."""


def require(holds: object, why: str) -> None:
    """Raise BadSubmission for this reason unless something holds."""
    if not holds:
        raise BadSubmission(why)


def from_zip(path: str, name: str) -> bytes:
    """The file `name` of a zip, stored or deflated: other methods write more than an entry says, and ask
    for more memory.
    """
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        place = place_of(
            name,
            ((each.filename, stat.S_ISLNK(each.external_attr >> 16), each.file_size) for each in entries),
        )
        is_known = entries[place].compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
        require(is_known, f"{name} is neither stored nor deflated in the archive")
        with archive.open(entries[place]) as member:
            return _at_most(member, name)


def from_tar(path: str, name: str) -> bytes:
    """The file `name` of a tar, which may be packed by gzip."""
    with open(path, "rb") as file:
        is_packed = file.read(2) == b"\x1f\x8b"
    with gzip.open(path) if is_packed else open(path, "rb") as stream:
        content = stream.read(LARGEST_ARCHIVE + 1)
    require(len(content) <= LARGEST_ARCHIVE, f"the archive holds more than {LARGEST_ARCHIVE} bytes")
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
        entries: list[tarfile.TarInfo] = []

        def read() -> Iterator[tuple[str, bool, int]]:
            for each in archive:
                entries.append(each)
                yield each.name, not (each.isfile() or each.isdir()), each.size

        member = archive.extractfile(entries[place_of(name, read())])
        assert member is not None
        return _at_most(member, name)


def place_of(name: str, entries: Iterable[tuple[str, bool, int]]) -> int:
    """The file's place in an archive, given the name, whether it is a link, and the size of each entry."""
    found, others = [], []
    for place, (path, is_link, size) in enumerate(entries):
        require(place < MOST_ENTRIES, f"more than {MOST_ENTRIES} entries in the archive")
        parts = path.replace("\\", "/").split("/")
        is_inside = parts[0] != "" and ".." not in parts and ":" not in parts[0]
        require(is_inside, f"an entry of the archive leads out of it: {path!r}")
        require(not is_link, f"an entry of the archive is a symbolic link, or no file: {path!r}")
        parts = [part for part in parts if part != "."]
        # macOS adds a second entry with the same name beside each file.
        if parts[-1:] == [name] and "__MACOSX" not in parts:
            found.append((parts, place, size))
        elif parts[-1:] and "__MACOSX" not in parts:
            others.append(parts[-1])
    at_top = [(place, size) for parts, place, size in found if parts == [name]]
    elsewhere = ", ".join("/".join(parts) for parts, _, _ in found if parts != [name])
    instead = (
        f"; there is {elsewhere}. `evictionary submit` packs it as it should be"
        if elsewhere
        else there_is(others)
    )
    require(len(at_top) == 1, f"{len(at_top)} files {name} at the top of the archive, wanted one{instead}")
    ((place, size),) = at_top
    require(size <= LARGEST_FILE, f"{name} has {size} bytes, more than {LARGEST_FILE}")
    return place


def there_is(names: Iterable[str]) -> str:
    """Which files of programs are there instead of the right
    one, as the end of a sentence; empty if there is none.
    """
    found = sorted(each for each in names if ".py" in each.lower() or each.lower().endswith(".ipynb"))
    return f"; there is {', '.join(map(repr, found[:5]))}" if found else ""


def _at_most(member: IO[bytes], name: str) -> bytes:
    """Read a file of an archive; the file may be larger than its entry says."""
    content = member.read(LARGEST_FILE + 1)
    require(len(content) <= LARGEST_FILE, f"{name} has more than {LARGEST_FILE} bytes")
    return content


def main(path: str, name: str) -> int:
    """Write the file, or why there is none, to the standard output; return the exit code."""
    import resource  # not on Windows, where this file is imported all the same

    for limit, value in (
        (resource.RLIMIT_CPU, CPU_SECONDS),
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_CORE, 0),
    ):
        # a system without it, or with a lower one; the grader's clock remains
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(limit, (value, value))
    try:
        sys.stdout.buffer.write(from_zip(path, name) if path.endswith(".zip") else from_tar(path, name))
    except BadSubmission as error:
        reason = str(error)
    except Exception as error:  # the modules that read archives raise much more than they document
        reason = f"the archive cannot be read: {type(error).__name__}: {error}"
    else:
        return 0
    sys.stdout.buffer.write(reason[:2000].encode("utf-8", "replace"))
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
