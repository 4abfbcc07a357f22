"""Systems without links, without what only Unix has, without Triton: everything is there, or one sentence
says what is not.
"""

import os
import subprocess
import zipfile
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from tools import ROOT, python, refused, run, says
from tools.grader import written

from docs_build import course
from evictionary.classroom import assignment as assignments, child, grading, sandbox, seccomp, verifier

# A system that lacks what Windows lacks, but for its name: other libraries find Unix here.
WINDOWS = """
import importlib.abc, os, signal, sys
GONE = "resource fcntl pwd grp termios tty pty syslog readline curses".split()
class Windows(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in GONE:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Windows())
for name in GONE:
    sys.modules.pop(name, None)
for name in (
    "chown fork forkpty geteuid getgid getloadavg getpgid getuid killpg mkfifo nice pread sched_getaffinity "
    "set_blocking setgid setgroups setpgid setsid setuid"
).split():
    delattr(os, name)
for name in "SIGALRM SIGHUP SIGKILL SIGPROF SIGUSR1 SIGXCPU alarm pthread_kill setitimer".split():
    delattr(signal, name)
from evictionary.cli.app import app
app(sys.argv[1:])
"""
SENTENCE = (
    "does not run on this system: it has no module resource, os.killpg, os.set_blocking, signal.setitimer, "
    "by which code is run within limits; on Windows use WSL"
)


@pytest.mark.parametrize(
    ("command", "code", "told"),
    [
        ("start keydiff", 0, "Here `check` cannot judge it: it has no module resource"),
        ("start kernel --work other", 0, "evictionary check kernel"),
        ("submit keydiff", 0, "keydiff.zip holds keydiff.py"),
        ("gradebook grades", 0, "1 submission"),
        ("methods", 0, "keydiff"),
        ("contract keydiff.score", 0, "keys"),
        ("check --help", 0, "Judge your file"),
        ("check keydiff", 2, f"`evictionary check` {SENTENCE}"),
        ("grade keydiff.zip --assignment keydiff", 2, f"`evictionary grade` {SENTENCE}"),
        ("judge work/keydiff.py", 2, f"`evictionary judge` {SENTENCE}"),
        ("verify work/keydiff.py", 2, f"`evictionary verify` {SENTENCE}"),
        ("vectors --output vectors", 2, f"`evictionary vectors` {SENTENCE}"),
    ],
)
def test_a_command_works_without_unix_or_says_so(command: str, code: int, told: str, tmp_path: Path) -> None:
    starter = assignments.load("keydiff").starter.read_bytes()
    written(tmp_path / "work", starter, "keydiff.py") if "start" not in command else None
    zero = ["grade", "--zero", "late", "--student", "ada", "--assignment", "keydiff"]
    python("-m", "evictionary", *zero, cwd=tmp_path) if "gradebook" in command else None
    done = python("-c", WINDOWS, *command.split(), cwd=tmp_path, code=code, COLUMNS=1000)
    says(" ".join((done.stdout + done.stderr).split()), told, never=["Traceback"])


def test_unix_lacks_nothing() -> None:
    assert sandbox.lacking() == ""


@pytest.mark.parametrize(
    ("system", "advice"), [("linux", "pip install 'evictionary[torch]'"), ("win32", "on Windows use WSL")]
)
def test_without_triton_a_sentence_says_so(
    system: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grading.sys, "platform", system)
    monkeypatch.setattr(grading, "_is_there", lambda module: module != "triton")
    kernel = assignments.load("kernel")
    says(grading.lacking(kernel), "this machine has no triton", advice)
    assert "no triton" in grading.blocked(kernel) and not grading.lacking(assignments.load("keydiff"))
    source = b"import torch\nimport triton\n"
    refused(lambda: verifier.verify(source, "keydiff", seed=0), "this machine has no triton")


# The walls of each system


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Writes down the calls of C, and leaves this process as it is."""
    found = Mock()
    monkeypatch.setattr(sandbox.ctypes, "CDLL", found)
    monkeypatch.setattr(sandbox.os, "getuid", lambda: 0)
    monkeypatch.setattr(sandbox, "become_nobody", lambda readable: False)
    monkeypatch.setattr(sandbox, "limit", lambda seconds, memory: True)
    monkeypatch.setattr(sandbox, "guard", lambda *settings: [])
    return found


@pytest.mark.parametrize("name", ["darwin", "freebsd14"])
def test_a_unix_without_the_calls_of_linux_has_the_walls_of_macos(
    name: str, calls: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox.sys, "platform", name)
    setup: dict[str, Any] = {"site": str(Path(np.__file__).parents[1]), "path": __file__, "triton": ""}
    setup |= {"filter": seccomp.program().hex(), "cpu_seconds": 1, "memory": 1, "closed": [], "banned": []}
    walls, _ = sandbox.confined({**setup, "library": "numpy", "allowed": None})
    sandbox.hide()
    assert {wall for wall, is_up in walls.items() if is_up} == {*sandbox.WALLS["macOS"]}
    assert sandbox.system() == "macOS" and not calls.called


def test_windows_has_no_wall(calls: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.sys, "platform", "win32")
    sandbox.hide()
    sandbox.end_with_parent()
    assert (sandbox.landlock([], []), sandbox.drop_rights([]), seccomp.program()) == (0, False, b"")
    assert sandbox.system() == "Windows" and not any(map(sandbox.has, sandbox.WALLS["Linux"]))
    assert not calls.called


def test_linux_has_the_walls_of_the_table() -> None:
    found = {wall for wall, is_up in child.walls_here().items() if is_up}
    assert found - {"user nobody"} == {*sandbox.WALLS["Linux"]}


def test_the_table_says_what_runs_on_each_system() -> None:
    rows = {row.split(" | ")[0].strip("| "): row for row in course.systems("").splitlines()[2:]}
    assert [*rows] == ["Linux", "macOS", "Windows"]
    says(rows["Linux"], "| runs | runs |", "`landlock`", "`system calls`")
    says(rows["macOS"], "| `limits`, `audit hook` | runs | writes no grade |")
    says(rows["Windows"], "| none | does not run; in WSL it does, as on Linux |")


# A clone without symbolic links


@pytest.fixture(scope="module")
def clones(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """This tree as Git checks it out, with links and without: a repository of what the tree has."""
    folder = tmp_path_factory.mktemp("clones")
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
    files = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).stdout
    there = "\0".join(each for each in files.split("\0") if each and os.path.lexists(ROOT / each))
    origin = folder / "origin"
    origin.mkdir()
    archive = ("tar", "--create", "--null", "--files-from=-", "--file", folder / "tree.tar")
    subprocess.run(list(map(str, archive)), cwd=ROOT, input=there.encode(), check=True)
    run("tar", "--extract", "--file", folder / "tree.tar", cwd=origin)
    for words in (("init", "--quiet"), ("add", "--all", "--force"), ("commit", "--quiet", "-m", "the tree")):
        run(*git, *words, cwd=origin)
    for name, links in (("with links", "true"), ("without links", "false")):
        run("git", "clone", "--quiet", "-c", f"core.symlinks={links}", origin, folder / name, cwd=folder)
    assert (folder / "without links" / "evictionary" / "reference").is_file()
    return {name: folder / name for name in ("origin", "with links", "without links")}


def wheel(source: object, folder: Path, **environment: object) -> dict[str, bytes]:
    """The files of the wheel that pip builds, with what is installed here."""
    build = ("pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source)
    python("-m", *build, cwd=folder.parent, PIP_DISABLE_PIP_VERSION_CHECK=1, **environment)
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_a_clone_without_links_is_installed_whole(clones: dict[str, Path], tmp_path: Path) -> None:
    whole = wheel(clones["with links"], tmp_path / "whole")
    assert {"evictionary/reference/keydiff.py", "evictionary/tutorials/assignments/keydiff/starter.py"} <= {
        *whole
    }
    # what students install has the handouts, and no rubric
    assert "evictionary/tutorials/assignments/keydiff/README.md" in whole
    assert not [name for name in whole if "instructor" in name]
    assert {f"evictionary/classroom/recipes/{name}.sh" for name in ("run_autograder", "grade_all")} <= {
        *whole
    }
    assert wheel(clones["without links"], tmp_path / "linkless") == whole
    # pip's own clone, of a Git that makes no links
    settings = {"GIT_CONFIG_COUNT": 1, "GIT_CONFIG_KEY_0": "core.symlinks", "GIT_CONFIG_VALUE_0": "false"}
    assert wheel(f"git+file://{clones['origin']}", tmp_path / "by git", **settings) == whole


def test_a_clone_without_links_runs_as_it_is(clones: dict[str, Path], tmp_path: Path) -> None:
    place = clones["without links"]
    right = (place / "docs" / "classroom" / "transcript" / "3_right.py").read_text(encoding="utf-8")
    command, settings = ("-m", "evictionary"), {"PYTHONPATH": place, "cwd": tmp_path}
    told = python(*command, "start", "keydiff", **settings).stdout
    assert str(place / "tutorials") in told.replace("\n", "")
    written(tmp_path / "work", right, "keydiff.py")
    assert "100 of 100 points" in python(*command, "check", "keydiff", **settings).stdout


def test_half_a_clone_is_refused_in_a_sentence(clones: dict[str, Path], tmp_path: Path) -> None:
    run("git", "clone", "--quiet", "-c", "core.symlinks=false", clones["origin"], tmp_path / "half")
    run("rm", "-r", tmp_path / "half" / "optimized")
    done = python("setup.py", "--name", cwd=tmp_path / "half", code=1)
    assert done.stderr.strip().endswith(
        "the folders optimized are missing beside evictionary/: install from a whole clone"
    )
