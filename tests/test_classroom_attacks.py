"""Hostile submissions: each scores nothing, ends in time, and is written down like any other."""

from __future__ import annotations

import io
import itertools
import tarfile
import zipfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from sampling import sampled
from tools import attacks

from evictionary import reference
from evictionary.classroom import assignment as assignments
from evictionary.classroom import classes, formats, grading, submissions
from evictionary.classroom.child import Child, StudentError
from evictionary.classroom.judgement import empty
from evictionary.spec_tests.harness import wire
from evictionary.spec_tests.harness.remote import Gone, Remote

ORACLE = Path(next(iter(reference.__path__))) / "keydiff.py"


# A sample at every run, all of them in `make test-all`.
SAMPLED = sampled(attacks.SOURCES, every=4)


@pytest.mark.parametrize("name", SAMPLED)
def test_an_attack_scores_nothing(name: str, tmp_path: Path) -> None:
    path = tmp_path / "mallory.py"
    path.write_text(attacks.SOURCES[name], encoding="utf-8")
    order = classes.Order("keydiff", b"a secret", 5, tuple(formats.FORMATS), seconds=0.3)
    (grade,) = classes.run(order, {"mallory": path}, tmp_path / "grades", 1)
    assert grade["score"] == 0
    assert grade["error"] == ""
    assert {each.name for each in (tmp_path / "grades" / "mallory").iterdir()} == {
        "grade.json",
        *(file for file, _ in formats.FORMATS.values()),
    }


def test_the_disk_stays_as_it_is() -> None:
    grading.judge(attacks.SOURCES["fills the disk"].encode(), assignments.load("keydiff"), examples=5, explain=False)
    for folder in ("/tmp", "/dev/shm", "/var/tmp"):
        assert not [each for each in Path(folder).glob("full[0-9]*") if each.stat().st_size]


def test_hostile_archives_are_refused(tmp_path: Path) -> None:
    order = classes.Order("keydiff", b"a secret", 5, ())
    for name, path in attacks.archives(tmp_path / "handed_in", ORACLE).items():
        grade = classes.grade_one(order, "mallory", path)
        assert grade["score"] == 0, name
        assert grade["error"], name
        formats.write(grade, tmp_path / "grades", [])
    assert not (tmp_path / "grade.json").exists()


def test_the_oracle_in_the_file_itself_would_have_full_marks() -> None:
    """What the attacks on the oracle are after is worth having: reading it is all that stands between them and full marks."""
    from tools.synthetic import bundled

    result = grading.judge(bundled("keydiff").encode(), assignments.load("keydiff"), secret=b"a secret", examples=1)
    assert result.score == 100


# Whatever is handed in ends as a result


def tried(often: int, at_night: int) -> pytest.MarkDecorator:
    """Try the same random things at every run, and many others in `make slow`."""
    # The grader loads its laws, which are tests of Hypothesis, where an archive can be read.
    calm = [HealthCheck.too_slow, HealthCheck.nested_given]
    always = settings(max_examples=often, deadline=None, suppress_health_check=calm, derandomize=True, database=None)
    others = settings(always, max_examples=at_night, derandomize=False)
    return pytest.mark.parametrize("tries", [always, pytest.param(others, marks=pytest.mark.slow)], ids=["often", "at night"])


def changed(content: bytes) -> st.SearchStrategy[bytes]:
    """The content with a few bytes replaced, cut out or added."""
    place = st.integers(0, len(content))
    edit = st.tuples(
        place, st.integers(0, 8), st.binary(max_size=8) | st.sampled_from([b"\xff" * 8, b"9" * 12, b"\x80" + bytes(11)])
    )

    def edited(edits: list[tuple[int, int, bytes]]) -> bytes:
        result = content
        for start, length, new in edits:
            result = result[:start] + new + result[start + length :]
        return result

    return st.lists(edit, min_size=1, max_size=4).map(edited)


def packed() -> dict[str, bytes]:
    """An archive of each kind with a file keydiff.py."""
    found = {}
    for ending, mode in (("tar", "w"), ("tar.gz", "w:gz")):
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode=mode, format=tarfile.PAX_FORMAT) as archive:  # type: ignore[call-overload]
            for name in ("ä" * 120, "keydiff.py"):
                archive.addfile(tarfile.TarInfo(name))
        found[ending] = stream.getvalue()
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("keydiff.py", b"# right" * 9)
    return found | {"zip": stream.getvalue()}


PACKED = packed()


@tried(20, 400)
def test_any_archive_is_read_or_refused(tmp_path: Path, tries: settings) -> None:
    @tries
    @given(st.data())
    def check(data: st.DataObject) -> None:
        ending = data.draw(st.sampled_from(sorted(PACKED)))
        path = tmp_path / f"ada.{ending}"
        path.write_bytes(data.draw(changed(PACKED[ending])))
        grade = classes.grade_one(classes.Order("keydiff", b"a secret", 1, (), seconds=5), "ada", path)
        assert (grade["score"], "not the student's doing" in grade["error"]) == (0, False)

    check()


FRAMES = [wire.frame({}, [value]) for value in (1.5, np.ones((2, 3)), (np.arange(3), None), [True])]


@tried(200, 2000)
def test_any_frame_is_an_answer_or_ends_the_child(tries: settings) -> None:
    class Dictated(Remote):
        """A process that answers with the frame, and ends after it."""

        gone = ""

        def __init__(self, frame: bytes) -> None:
            self.said = io.BytesIO(frame)

        def asking(self) -> Any:
            return nullcontext()

        def send(self, data: bytes) -> None:
            return

        def receive(self, count: int) -> bytes:
            part = self.said.read(count)
            return part if len(part) == count else self.end("ended")

        def end(self, why: str, is_late: bool = False) -> NoReturn:
            raise Gone(why)

    def answered(frame: bytes) -> Any:
        child = Child(Path("keydiff.py"), "keydiff")
        child.remote = Dictated(frame)
        try:
            return child.call("score", 1)
        except (Gone, StudentError, ValueError) as error:
            return str(error)

    @tries
    @given(st.sampled_from(FRAMES).flatmap(changed))
    def check(frame: bytes) -> None:
        assert isinstance(answered(frame), np.ndarray | np.generic | tuple | list | bool | int | float | str | None)

    check()


@tried(60, 600)
def test_any_name_and_message_are_text_in_every_format(tmp_path: Path, junit: Any, tries: settings) -> None:
    numbers = itertools.count()

    @tries
    @given(name=st.binary(min_size=1, max_size=300), said=st.text(st.characters(), max_size=60))
    def check(name: bytes, said: str) -> None:
        path = Path(name.replace(b"/", b"").replace(b"\0", b"").decode("utf-8", "surrogateescape") + ".py")
        student = submissions.student_of(path)
        assert submissions.is_id(student)
        judged = empty(assignments.load("keydiff"), grading.clean(said))
        for line in judged.lines:
            line.verdict, line.reason, line.message = "failed", grading.clean(said), grading.clean(said)
        order = classes.Order("keydiff", b"a secret", 1, ())
        grade = classes._as_json(order, classes._settings(order, student, path)[0], student, path, "", judged)
        folder = tmp_path / str(next(numbers)) / student
        formats.write(grade, folder, list(formats.FORMATS))
        junit.validate((folder / "junit.xml").read_text(encoding="utf-8"))
        tokens = MarkdownIt().enable("table").parse((folder / "grade.md").read_text(encoding="utf-8"))
        assert [token.type for token in tokens].count("td_open") == 4 * len(judged.lines)
        assert {child.type for token in tokens for child in token.children or []} <= {"text", "text_special", "softbreak"}

    check()
