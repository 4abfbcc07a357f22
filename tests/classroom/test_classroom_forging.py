"""No upload reaches a grade: what code can do to files where there is no Landlock, how the grader writes, and
the recipes of the pages, run as they are written in a root of their own.
"""

import os
import stat
import struct
from pathlib import Path
from typing import Any

import pytest
from tools import attacks, invoke, laid, python, refused, run, says
from tools.grader import SOLUTION, json_of, order, text_of, to_grade, written

from evictionary.classroom import classes, formats, seccomp, submissions
from evictionary.classroom.child import KEEP_FILES

RECIPES = Path(classes.__file__).parent / "recipes"
PAGES = Path(__file__).parents[2] / "docs" / "classroom"
SECRET = "nobody guesses this"

# The kernel answers as one without Landlock does. "no filter" in the arguments takes the other wall away too.
WITHOUT = """
import struct, sys
from evictionary.classroom import sandbox, seccomp
lines = (0x20, 0, 0, 0), (0x15, 0, 1, 444), (6, 0, 0, 0x50000 | 38), (6, 0, 0, 0x7FFF0000)
sandbox.filter_calls(b"".join(struct.pack("=HBBI", *line) for line in lines))
if "no filter" in sys.argv:
    sys.argv.remove("no filter")
    seccomp.program = lambda: b""
"""
COMMAND = f"{WITHOUT}\nfrom evictionary.cli.app import app\napp(sys.argv[1:])\n"
PROBE = f"""{WITHOUT}
from pathlib import Path
from evictionary.classroom.child import Child
with Child(Path(sys.argv[1]), "keydiff") as child:
    print(child.walls["landlock"], child.call("harm"))
"""


def test_without_landlock_the_filter_alone_keeps_every_file(tmp_path: Path) -> None:
    path = written(tmp_path, attacks.PROBE, "keydiff.py")
    assert python("-c", PROBE, path).stdout == "0 \n" or not seccomp.program()


def answer(machine: str, number: int, *arguments: int) -> int:
    """What the filter of a machine says of a call: the kernel's word for it."""
    architecture = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine]
    data = struct.pack("=iIQ6Q", number, architecture, 0, *[*arguments, *[0] * 6][:6])
    lines, place, loaded = list(struct.iter_unpack("=HBBI", seccomp.program(machine))), 0, 0
    while True:
        code, if_true, if_false, value = lines[place]
        if code == 0x06:
            return int(value)
        if code == 0x20:
            (loaded,) = struct.unpack_from("=I", data, value)
            place += 1
            continue
        holds = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}[code]
        place += 1 + (if_true if holds else if_false)


ALLOWED, FORBIDDEN, MISSING = 0x7FFF0000, 0x50001, 0x50026


@pytest.mark.parametrize(
    ("machine", "opening", "terminal", "limits", "numbers"),
    [
        (
            "x86_64",
            [(2, (0,)), (257, (2**64 - 100, 0))],
            16,
            302,
            {"rename": 82, "mkdir": 83, "openat2": 437},
        ),
        ("aarch64", [(56, (2**64 - 100, 0))], 29, 261, {"renameat": 38, "mkdirat": 34, "openat2": 437}),
    ],
)
def test_a_file_is_opened_to_be_read_or_not_at_all(
    machine: str, opening: list[Any], terminal: int, limits: int, numbers: dict[str, int]
) -> None:
    assert numbers.items() <= seccomp.refused(machine).items()
    for number in seccomp.refused(machine).values():
        assert answer(machine, number) == FORBIDDEN
    for number, before in opening:
        for flags in (os.O_RDONLY, os.O_RDONLY | os.O_CLOEXEC, os.O_DIRECTORY, os.O_PATH):
            assert answer(machine, number, *before, flags) == ALLOWED
        for flags in (
            os.O_WRONLY,
            os.O_RDWR,
            os.O_CREAT,
            os.O_TRUNC,
            os.O_CLOEXEC | os.O_CREAT,
            os.O_TMPFILE | 2,
        ):
            assert answer(machine, number, *before, flags) == FORBIDDEN
    says_of = {0x5401: ALLOWED, 0x5451: ALLOWED, 0x5412: FORBIDDEN, 0x40086602: FORBIDDEN}
    assert {value: answer(machine, terminal, 0, value) for value in says_of} == says_of
    assert [
        answer(machine, limits, *asked) for asked in ((0, 7, 0), (0, 7, 1), (5, 7, 0), (0, 7, 2**32))
    ] == [
        ALLOWED,
        *[FORBIDDEN] * 3,
    ]
    # clone3 and what nobody knows yet seem to be missing
    assert [answer(machine, number) for number in (435, 470, 600)] == [MISSING] * 3


# How the grader writes


def test_a_result_takes_the_place_of_a_plain_file_only(tmp_path: Path) -> None:
    result, other = tmp_path / "results.json", written(tmp_path, "mine", "other.txt")
    os.link(other, result)
    formats.put(result, "the grade")
    assert (text_of(result), text_of(other)) == ("the grade", "mine")
    assert stat.S_IMODE(result.stat().st_mode) == stat.S_IMODE(other.stat().st_mode)
    result.unlink()
    for place in (lambda: result.symlink_to(other), result.mkdir, lambda: os.mkfifo(result)):
        place()
        refused(lambda: formats.put(result, "the grade"), "results.json is no plain file", OSError)
        result.rmdir() if result.is_dir() else result.unlink()
    assert text_of(other) == "mine" and [each.name for each in tmp_path.iterdir()] == ["other.txt"]
    # a folder or a name where something fails leaves nothing behind
    refused(lambda: formats.put(tmp_path / "none" / "results.json", ""), error=OSError)


def test_a_grade_is_no_link_and_its_folder_neither(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    grade = classes.grade_one(order(), "ada", "nothing was handed in")
    formats.write(grade, elsewhere, [])
    (tmp_path / "ada").symlink_to(elsewhere)
    refused(lambda: formats.write(grade, tmp_path / "ada", []), "is a link", OSError)
    linked = tmp_path / "bob" / formats.GRADE
    linked.parent.mkdir()
    linked.symlink_to(elsewhere / formats.GRADE)
    refused(lambda: formats.read(linked), "is a link", ValueError)


def test_what_is_in_the_way_of_a_grade_is_a_failure(tmp_path: Path) -> None:
    path = written(tmp_path, "not Python")
    (tmp_path / "grades" / "ada" / "results.json").mkdir(parents=True)
    done = invoke("grade", path, *to_grade(tmp_path))
    assert done.exit_code == 1 and "is no plain file" in " ".join(done.stderr.split())
    assert not (tmp_path / "grades" / "ada" / formats.GRADE).exists()


def test_no_code_runs_where_it_could_write_its_own_grade(tmp_path: Path) -> None:
    path = written(tmp_path, "raise RuntimeError\n")
    command = ("-c", COMMAND, "no filter", "grade", path, *to_grade(tmp_path), "--without-walls")
    done = python(*command, cwd=tmp_path, code=2)
    says(" ".join(done.stderr.split()), "could write its own grade", "Nothing was run")
    assert not (tmp_path / "grades").exists()


def test_a_wall_that_is_missing_later_runs_nothing_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seccomp, "program", lambda: b"")
    path, one = written(tmp_path, SOLUTION), order(needs=KEEP_FILES)
    grade = classes.grade_one(one, "ada", path)
    assert grade["score"] == 0 and "a wall is missing that was there before: system calls" in grade["error"]
    assert classes.grade_one(order(needs=("landlock",)), "ada", path)["score"] == 100


def test_a_grader_is_not_looked_into(tmp_path: Path) -> None:
    program = (
        "import ctypes, sys\nfrom pathlib import Path\nfrom evictionary.classroom.child import Child\n"
        "with Child(Path(sys.argv[1]), 'keydiff'):\n    print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))\n"
    )
    assert python("-c", program, written(tmp_path, "", "keydiff.py")).stdout == "0\n"


def test_zero_points_need_no_submission(tmp_path: Path) -> None:
    zero = ("grade", "--zero", "Nothing was handed in.", "--student", "ada", *to_grade(tmp_path))
    assert invoke(*zero).exit_code == 0
    folder = tmp_path / "grades" / "ada"
    assert (json_of(folder / "results.json")["score"], json_of(folder / "results.json")["output"]) == (
        0,
        "Nothing was handed in.",
    )
    says(text_of(tmp_path / "grades" / submissions.GRADEBOOK), "ada,0,100,Nothing was handed in.")
    for more in ((written(tmp_path),), ("--try",), ("--law", "a")):
        assert "--zero: wanted it with a --student" in " ".join(invoke(*zero, *more).stderr.split())


# The recipes


class Platform:
    """A root of its own, as Gradescope's is, and a machine without Landlock."""

    def __init__(self, folder: Path, command: str = "") -> None:
        self.root, self.programs = folder / "autograder", folder / "bin"
        self.results, self.upload = self.root / "results", self.root / "submission"
        for each in (self.upload, self.results):
            each.mkdir(parents=True)
        laid(self.root, {"source/secret": SECRET, "source/no_landlock.py": COMMAND})
        real = f'exec {python_here()} {self.root}/source/no_landlock.py "$@"'
        self.has(f"#!/bin/sh\n{command}\n{real} --examples 1\n")
        self.recipe = text_of(RECIPES / "run_autograder.sh").replace("/autograder/", f"{self.root}/")

    def has(self, program: str) -> None:
        written(self.programs, program, "evictionary").chmod(0o755)

    def grade(self, code: int = 0) -> Any:
        """What the platform reads once the recipe has ended with this code."""
        script = written(self.root, self.recipe, "run_autograder")
        path = f"{self.programs}:{os.environ['PATH']}"
        done = run("bash", script, code=code, cwd=self.upload, PATH=path, TMPDIR=self.root / "source")
        self.log = done.stdout
        (result,) = self.results.iterdir()
        assert result.name == "results.json" and stat.S_IMODE(os.lstat(result).st_mode) == 0o644
        content = json_of(result)
        formats.validator("gradescope").validate(content)
        # nothing of the grader's stays
        assert sorted(each.name for each in (self.root / "source").iterdir()) == ["no_landlock.py", "secret"]
        assert stat.S_IMODE((self.root / "source" / "secret").stat().st_mode) == 0o600
        return content


def python_here() -> str:
    import sys

    return sys.executable


@pytest.fixture
def platform(tmp_path: Path) -> Platform:
    return Platform(tmp_path)


FAKE = '{"score": 100, "output": "100 of 100 points"}'
# Removes the audit hook, then tries everything on the way to the result; what worked is in the file's error.
HOSTILE = (
    "import ctypes, glob, os, shutil, sys, threading, time\n"
    + attacks._PIECES["undo"]
    + """
HERE, ROOT = "{upload}", "{root}"
result, libc = ROOT + "/results/results.json", ctypes.CDLL(None)
fake, folder = HERE + "/fake.json", HERE + "/d"
graders = [each for each in glob.glob(ROOT + "/source/tmp*") + glob.glob("/tmp/tmp*")]


def later():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(3)
            os.rename(fake, result)
        os._exit(0)


attempts = [
    *(lambda each=each: os.makedirs(each + "/grades/student/results.json") for each in graders),
    *(lambda each=each: os.rename(each, each + ".moved") for each in [*graders, ROOT + "/results", ROOT]),
    *(lambda each=each: os.symlink(HERE, each + "/grades") for each in graders),
    lambda: os.mkdir(result),
    lambda: os.rename(folder, result),
    lambda: os.rename(fake, result),
    lambda: os.replace(fake, result),
    lambda: libc.renameat2(-100, fake.encode(), -100, result.encode(), 2) and 1 / 0,
    lambda: os.link(fake, result),
    lambda: libc.linkat(os.open(fake, os.O_RDONLY), b"", -100, result.encode(), 0x1000) and 1 / 0,
    lambda: os.symlink(fake, result),
    lambda: os.mkfifo(result),
    lambda: open(result, "w").write("100"),
    lambda: os.open(result, os.O_CREAT),
    lambda: os.open(ROOT + "/results", os.O_TMPFILE | os.O_RDWR),
    lambda: shutil.copyfile(fake, result),
    lambda: os.truncate(ROOT + "/source/secret", 0),
    lambda: os.unlink(ROOT + "/source/secret"),
    lambda: os.chmod(ROOT + "/results", 0o777),
    lambda: os.open(ROOT + "/run_autograder", os.O_WRONLY | os.O_APPEND),
    lambda: [os.open(each, os.O_WRONLY) for each in glob.glob("/proc/[0-9]*/fd/*")
             if "pipe" not in os.readlink(each)][0],
    lambda: open("/proc/%d/mem" % os.getppid(), "r+b"),
    lambda: os.open("/proc/%d/mem" % os.getppid(), os.O_RDONLY),
    lambda: libc.ptrace(16, os.getppid(), 0, 0) and 1 / 0,
    lambda: os.kill(os.getppid(), 9),
    lambda: libc.inotify_init1(0) < 0 and 1 / 0,
    lambda: threading.Thread(target=print).start(),
    lambda: os.posix_spawn("/bin/sh", ["sh", "-c", "cp " + fake + " " + result], {{}}),
    lambda: os.execv("/bin/sh", ["sh", "-c", "cp " + fake + " " + result]),
    later,
]
worked = []
for number, attempt in enumerate(attempts):
    try:
        attempt()
        worked.append(number)
    except (OSError, RuntimeError, ArithmeticError, IndexError):
        pass
print('::set-output name=points::100')
if worked:
    raise SystemError("these worked: %s" % worked)
"""
)


def test_the_recipe_grades_a_right_upload_and_no_other(platform: Platform) -> None:
    written(platform.upload, SOLUTION, "keydiff.py")
    assert platform.grade()["score"] == 100
    # the next upload finds the result of the last one
    written(platform.upload, "def score(keys):\n    return keys\n", "keydiff.py")
    result = platform.grade()
    assert result["score"] < 100 and all(line.startswith("| ") for line in platform.log.splitlines())


def test_a_hostile_upload_has_the_points_of_its_code(platform: Platform) -> None:
    hostile = HOSTILE.format(upload=platform.upload, root=platform.root)
    laid(
        platform.upload, {"keydiff.py": hostile + "\n" + SOLUTION, "fake.json": FAKE, "d/results.json": FAKE}
    )
    before = sorted(os.walk(platform.root))
    result = platform.grade()
    told = " ".join(test["output"] for test in result["tests"])
    assert "worked" not in told and result["score"] == 100, told
    after = [(each, folders, files) for each, folders, files in sorted(os.walk(platform.root))]
    changed = [(each, {*files} ^ {*dict_of(before)[each]}) for each, _, files in after]
    assert [(Path(each).name, names) for each, names in changed if names] == [
        ("autograder", {"run_autograder"}),
        ("results", {"results.json"}),
    ]


def dict_of(walked: list[Any]) -> dict[str, list[str]]:
    return {each: files for each, _, files in walked}


def test_a_result_that_lies_there_is_gone(platform: Platform, tmp_path: Path) -> None:
    victim, result = written(tmp_path, "a file of the grader's", "victim"), platform.results / "results.json"
    for place in (
        lambda: result.symlink_to(victim),
        lambda: os.link(victim, result),
        lambda: laid(result, {"results.json": FAKE, "more/results.json": FAKE}),
        lambda: result.write_text(FAKE),
    ):
        place()
        assert platform.grade()["output"] == "there is no file keydiff.py"
        assert text_of(victim) == "a file of the grader's" and not result.is_symlink()
        result.unlink()


FAILED = "The grader failed, which is not your doing. Please tell your instructor."


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("case $* in *seed-file*) exit 3;; esac", 3),  # the grader fails,
        ("case $* in *seed-file*) kill -9 $$;; esac", 137),  # is killed,
        ("case $* in *seed-file*) exit 0;; esac", 1),  # writes nothing,
        ("case $* in *seed-file*) set -- 'no filter' \"$@\";; esac", 2),  # would run code without a wall,
        ("exit 1", 1),  # or is not there
    ],
)
def test_a_grader_that_fails_gives_no_points(command: str, code: int, tmp_path: Path) -> None:
    platform = Platform(tmp_path, command)
    laid(platform.results / "results.json", {"results.json": FAKE})
    written(platform.upload, SOLUTION, "keydiff.py")
    assert {"score": 0, "output": FAILED}.items() <= platform.grade(code).items()


def test_a_link_in_place_of_the_graders_result_gives_no_points(tmp_path: Path) -> None:
    platform = Platform(tmp_path)
    fake = written(platform.upload, FAKE, "fake.json")
    link = f'mkdir -p "$2/student"; ln -s {fake} "$2/student/results.json"'
    only = "case $* in *--zero*) exit 0;; esac; while [ $1 != --output ]; do shift; done"
    platform.has(f"#!/bin/bash\n{only}; {link}\n")
    assert platform.grade(1) == {"score": 0, "output": FAILED}


def test_the_pages_have_the_recipes() -> None:
    for page, recipe in (("formats.md", "run_autograder.sh"), ("container.md", "grade_all.sh")):
        place = f"evictionary/classroom/recipes/{recipe}"
        says(text_of(PAGES / page), f"<!-- code: {place} -->", f"(../../{place})")
        run("bash", "-n", RECIPES / recipe)
    told = text_of(PAGES / "gradebook.md") + text_of(PAGES / "formats.md")
    assert {each.name for each in RECIPES.iterdir()} == {
        "run_autograder.sh",
        "grade_all.sh",
        "to_nbgrader.py",
    }
    assert "to_nbgrader.py" in told
