"""Hostile submissions, and the process that runs a student's file: each scores nothing, ends in time, and
is written down.
"""

import io
import itertools
import json
import math
import struct
from contextlib import nullcontext
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from markdown_it import MarkdownIt
from tools import attacks, ends_with_its_parent, python, refused, sampled, says
from tools.grader import (
    EVERY_FILE,
    EVERY_FORMAT,
    SOLUTION,
    child_of,
    handed_in,
    json_of,
    judged,
    order,
    text_of,
    to_grade,
    verdicts,
    written,
)

from evictionary import reference
from evictionary.classroom import (
    assignment as assignments,
    classes,
    formats,
    grading,
    sandbox,
    seccomp,
    submissions,
    worker,
)
from evictionary.classroom.child import LARGEST_ANSWER, Child, StudentError, as_tuple, closed
from evictionary.classroom.judgement import empty
from evictionary.spec_tests.judge import wire
from evictionary.spec_tests.judge.outcome import TimedOut, time_limit
from evictionary.spec_tests.judge.remote import Gone

ORACLE = Path(next(iter(reference.__path__))) / "keydiff.py"


# A sample at every run, all of them in `make test-all`.
SAMPLED = sampled(attacks.SOURCES, every=4)


@pytest.mark.parametrize("name", SAMPLED)
def test_an_attack_scores_nothing(name: str, tmp_path: Path) -> None:
    path = written(tmp_path, attacks.SOURCES[name], "mallory.py")
    (grade,) = classes.run(order(5, EVERY_FORMAT, seconds=0.3), {"mallory": path}, tmp_path / "grades", 1)
    assert (grade["score"], grade["error"]) == (0, "")
    assert {path.name for path in (tmp_path / "grades" / "mallory").iterdir()} == EVERY_FILE


def test_the_disk_stays_as_it_is() -> None:
    judged("keydiff", attacks.SOURCES["fills the disk"], examples=5, explain=False)
    for folder in ("/tmp", "/dev/shm", "/var/tmp"):
        assert not [each for each in Path(folder).glob("full[0-9]*") if each.stat().st_size]


def test_hostile_archives_are_refused(tmp_path: Path) -> None:
    for name, path in attacks.archives(tmp_path / "handed_in", ORACLE).items():
        grade = classes.grade_one(order(5), "mallory", path)
        assert grade["score"] == 0 and grade["error"], name
        formats.write(grade, tmp_path / "grades", [])
    assert not (tmp_path / "grade.json").exists()


# Whatever is handed in ends as a result


def tried(often: int, at_night: int) -> pytest.MarkDecorator:
    """Try the same random things at every run, and many others in `make slow`."""
    # The grader loads its laws, which are tests of Hypothesis, where an archive can be read.
    calm = [HealthCheck.too_slow, HealthCheck.nested_given]
    always = settings(
        max_examples=often, deadline=None, suppress_health_check=calm, derandomize=True, database=None
    )
    others = settings(always, max_examples=at_night, derandomize=False)
    return pytest.mark.parametrize(
        "tries", [always, pytest.param(others, marks=pytest.mark.slow)], ids=["often", "at night"]
    )


def changed(content: bytes) -> st.SearchStrategy[bytes]:
    """The content with a few bytes replaced, cut out or added."""
    edit = st.tuples(
        st.integers(0, len(content)),
        st.integers(0, 8),
        st.binary(max_size=8) | st.sampled_from([b"\xff" * 8, b"9" * 12, b"\x80" + bytes(11)]),
    )

    def edited(edits: list[tuple[int, int, bytes]]) -> bytes:
        result = content
        for start, length, new in edits:
            result = result[:start] + new + result[start + length :]
        return result

    return st.lists(edit, min_size=1, max_size=4).map(edited)


RIGHT: dict[str, dict[str, str]] = {
    "ada.tar": {"ä" * 120: "", "keydiff.py": ""},
    "ada.tar.gz": {"ä" * 120: "", "keydiff.py": ""},
    "ada.zip": {"keydiff.py": "# right" * 9},
}


@tried(20, 400)
def test_any_archive_is_read_or_refused(tmp_path: Path, tries: settings) -> None:
    right = {path.name: path.read_bytes() for path in handed_in(tmp_path / "right", RIGHT).iterdir()}

    @tries
    @given(st.data())
    def check(data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(right)))
        grade = classes.grade_one(
            order(seconds=5), "ada", written(tmp_path, data.draw(changed(right[name])), name)
        )
        assert (grade["score"], "not the student's doing" in grade["error"]) == (0, False)

    check()


FRAMES = [wire.frame({}, [value]) for value in (1.5, np.ones((2, 3)), (np.arange(3), None), [True])]


@tried(200, 2000)
def test_any_frame_is_an_answer_or_ends_the_child(tries: settings) -> None:
    def answered(frame: bytes) -> Any:
        said, child = io.BytesIO(frame), Child(Path("keydiff.py"), "keydiff")

        def end(why: str) -> NoReturn:
            raise Gone(why)

        def receive(count: int) -> bytes:
            part = said.read(count)
            return part if len(part) == count else end("ended")

        child.remote = SimpleNamespace(asking=nullcontext, send=lambda data: None, receive=receive, end=end)  # type: ignore[assignment]
        try:
            return child.call("score", 1)
        except (Gone, StudentError, ValueError) as error:
            return str(error)

    @tries
    @given(st.sampled_from(FRAMES).flatmap(changed))
    def check(frame: bytes) -> None:
        assert isinstance(
            answered(frame), np.ndarray | np.generic | tuple | list | bool | int | float | str | None
        )

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
        one = order()
        grade = classes._as_json(one, classes._settings(one, student, path)[0], student, path, "", judged)
        folder = tmp_path / str(next(numbers)) / student
        formats.write(grade, folder, list(formats.FORMATS))
        junit.validate(text_of(folder / "junit.xml"))
        tokens = MarkdownIt().enable("table").parse(text_of(folder / "grade.md"))
        assert [token.type for token in tokens].count("td_open") == 4 * len(judged.lines)
        assert {child.type for token in tokens for child in token.children or []} <= {
            "text",
            "text_special",
            "softbreak",
        }

    check()


# The process that runs a student's file: what it may do, what it answers, how it ends


def test_the_kernel_refuses_what_the_hook_would(tmp_path: Path) -> None:
    with child_of(tmp_path, attacks.PROBE) as child:
        assert child.walls["system calls"] == bool(seccomp.program())
        assert child.call("harm") == "" or not child.walls["system calls"]


def test_the_filter_of_system_calls() -> None:
    """Each machine's numbers are different ones, and what a scorer needs is not among them."""
    for machine, socket, allowed in (
        ("x86_64", 41, {"read": 0, "write": 1, "mmap": 9, "futex": 202}),
        ("aarch64", 198, {"read": 63, "write": 64, "futex": 98}),
    ):
        numbers = seccomp.refused(machine)
        assert numbers["socket"] == socket and len(set(numbers.values())) == len(numbers)
        assert set(allowed.values()).isdisjoint(numbers.values())
        assert len(seccomp.program(machine)) % 8 == 0
    assert seccomp.program("riscv64") == b""


def test_an_error_carries_five_hundred_characters_out_in_all(tmp_path: Path) -> None:
    """A forged frame has three texts; each may be as long
    as one of the student's messages, and all may not.
    """
    forged = attacks.SOURCES["a frame of three long messages"]
    with child_of(tmp_path, forged) as child, pytest.raises(StudentError, match="xxx") as error:
        child.call("anchor", np.ones((1, 1, 2, 2)))
    assert str(error.value).count("x") <= 500


def test_what_the_code_tried_is_written_down(tmp_path: Path) -> None:
    source = (
        "import os\n\n\ndef anchor(keys):\n    try:\n        open('/etc/passwd')\n    except OSError:\n "
        "       os.kill(1, 0)\n"
    )
    notes = {source: ["the code tried: open /etc/passwd, os.kill"], SOLUTION: []}
    assert {each: judged("keydiff", each, examples=1, explain=False).notes for each in notes} == notes


WITHOUT_LANDLOCK = """
import struct, sys
from evictionary.classroom import sandbox
from evictionary.cli.app import app
lines = (0x20, 0, 0, 0), (0x15, 0, 1, 444), (6, 0, 0, 0x50000 | 38), (6, 0, 0, 0x7FFF0000)
sandbox.filter_calls(b"".join(struct.pack("=HBBI", *line) for line in lines))
app(sys.argv[1:])
"""


@pytest.mark.parametrize(("more", "code"), [((), 2), (("--without-walls",), 0)])
def test_without_landlock_nothing_is_run_unless_told_to(
    more: tuple[str, ...], code: int, tmp_path: Path
) -> None:
    """The kernel answers as an older one does, or as a container that forbids Landlock."""
    path = written(tmp_path, "def anchor(keys):\n    return 1.0\n")
    done = python("-c", WITHOUT_LANDLOCK, "grade", path, *to_grade(tmp_path), *more, cwd=tmp_path, code=code)
    assert "no landlock: it could read the seed file, the submissions and your home" in " ".join(
        done.stderr.split()
    )
    assert (tmp_path / "grades").exists() == (code == 0)
    if code == 0:
        # and nothing of Hypothesis
        assert sorted(each.name for each in tmp_path.iterdir()) == ["ada.py", "grades", "secret"]
        assert "landlock" in json_of(tmp_path / "grades" / "summary.json")["walls_missing"]


def test_a_child_ends_with_its_grader(tmp_path: Path) -> None:
    path = written(tmp_path, "import time\n\n\ndef score(keys):\n    time.sleep(600)\n", "keydiff.py")
    program = (
        "import sys\nfrom pathlib import Path\nfrom evictionary.classroom.child import Child\n"
        "with Child(Path(sys.argv[1]), 'keydiff') as child:\n    print(child.remote.pid, flush=True)\n"
        "    child.call('score', 1)\n"
    )
    assert ends_with_its_parent(program, path)


def test_the_oracle_is_closed_wherever_it_is_installed(tmp_path: Path) -> None:
    site = tmp_path / "lib" / "python3" / "site-packages"
    for name in ("reference", "numpy", "evictionary-1.dist-info"):
        (site / name).mkdir(parents=True)
    (tmp_path / "lib" / "link").symlink_to(site)
    (tmp_path / "lib" / "os.py").touch()
    hidden = closed(site)
    assert {
        str(site / "reference"),
        str(site / "evictionary-1.dist-info"),
        str(Path(__file__).parents[2]),
    } <= set(hidden)
    # Not Python's whole folder, then, nor a link that leads back to it.
    assert sandbox.without(str(tmp_path), hidden) == [str(tmp_path / "lib" / "os.py"), str(site / "numpy")]
    assert sandbox.without(str(site / "reference"), hidden) == []


def test_one_dead_child_costs_one_step() -> None:
    source = SOLUTION.replace("unit(anchor(keys))", "unit(unit(keys).mean(axis=-2))")
    result = judged("keydiff", source + "\n\ndef anchor(keys):\n    import os\n\n    os._exit(0)\n")
    assert verdicts(result) == {
        "anchor": "failed",
        **dict.fromkeys(("score", "symmetries", "edges", "pairwise"), "passed"),
        "sizes": "not judged yet",
    }
    first, *_, last = (line.reason for line in result.lines)
    assert "ended with exit code 0" in first and last == "needs anchor first"


def test_the_child_sees_neither_environment_nor_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_TOKEN", "of the grader")
    with child_of(
        tmp_path,
        "import os, sys\n\n\ndef seen():\n    return (str(dict(os.environ)), str(sys.argv), "
        "str(sorted(sys.modules)))\n",
    ) as child:
        environment, arguments, modules = child.call("seen")
    ours = ("reference", "optimized", "spec_tests", "hypothesis", "evictionary")
    says(modules, never=[f"'{name}'" for name in ours])
    says(environment + arguments, never=["A_TOKEN", "secret"])


def test_what_may_not_cross() -> None:
    for value in ({"a": 1}, print, np.array([print], dtype=object), np.array(["text"])):
        refused(lambda value=value: wire.frame({}, [value]), error=wire.BadMessage)
    # A description that claims more than there is, less, what lies under another array, or what no array has.
    for arrays, told in (
        ([{"shape": [10**12], "dtype": "float64"}], "16 bytes for an array of shape"),
        ([{"shape": [1], "dtype": "float64"}], "8 bytes that belong to no array"),
        ([{"shape": [2], "dtype": "float64"}] * 2, "0 bytes for an array of shape"),
        ([{"shape": [0, 10**30], "dtype": "float64"}], "Maximum allowed dimension exceeded"),
        ([{"shape": [-2], "dtype": "float64"}], "wanted a list of whole numbers"),
        ([{"shape": [2], "dtype": "object"}], "an array of dtype 'object'"),
        ([{"plain": [1]}], "an array of shape 'null'"),
        ([{"fraction": "1e999999999"}], "a fraction that is not"),
        ([{"fraction": ["1e999999999", 1]}], "a fraction that is not"),
        ([{"fraction": [1, 0]}], "a fraction that is not"),
        ({}, "no message"),
    ):
        with pytest.raises(wire.BadMessage, match=told):
            wire.read(json.dumps({"values": arrays}).encode(), bytes(16), as_tuple)
    # The keys that a kernel is timed with go through, an answer of that size does not.
    timed = struct.pack(">QQ", 100, 4 * math.prod(grading.TIMED_SHAPE))
    assert wire.sizes(timed, worker.LARGEST_CALL)[0] == 100
    for header in (timed, b"\xff" * 16):
        refused(lambda header=header: wire.sizes(header, LARGEST_ANSWER), "bytes, more than", wire.BadMessage)


def test_what_crosses_arrives_as_it_was_sent() -> None:
    sent = [
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.float32(0.1),
        Fraction(-3, 7),
        float("nan"),
        [1.5, "text", None],
        (np.zeros((0, 2), bool), 2),
        np.longdouble(3),
    ]
    frame = wire.frame({}, sent)
    text, body = wire.sizes(frame[:16], LARGEST_ANSWER)
    got = wire.read(frame[16 : 16 + text], frame[-body:], as_tuple)[1]
    assert repr(got) == repr(sent) and got[0].flags.f_contiguous and got[0].flags.writeable


def test_an_alarm_is_no_answer(tmp_path: Path) -> None:
    """The time limit of a law ends a child that the grader
    waits for: half of an answer may be left in its pipe.
    """
    with child_of(tmp_path, "import time\n\n\ndef score(keys):\n    time.sleep(60)\n") as child:
        with pytest.raises(TimedOut), time_limit(1):
            child.call("score", 1)
        refused(lambda: child.call("score", 1), "interrupted", Gone)


def test_a_child_that_does_not_read_does_not_hold_the_grader(tmp_path: Path) -> None:
    source = "import time\n\n\ndef score(keys):\n    time.sleep(60)\n"
    with child_of(tmp_path, source, 0.3) as child, pytest.raises(Gone, match="did not answer"):
        child.call("score", np.zeros(10**6))
