"""The wheel tried as a user would: built, installed into environments of its own, and used in two folders.

One folder holds the user's own file alone, the other is a project that has its own `reference/`,
`benchmarks/` and `tests/`, which must stay out of the way and be left alone. `python tests/wheel.py`; it
needs a package index.
"""

import shlex
import shutil
import sys
import tempfile
import venv
from pathlib import Path

from tools import ROOT, json_in, laid, run

SCORER = """import numpy as np


def score(keys):
    size = np.linalg.norm(keys, axis=-1, keepdims=True)
    directions = keys / np.where(size == 0, 1, size)
    anchor = directions.mean(axis=-2, keepdims=True)
    length = np.linalg.norm(anchor, axis=-1, keepdims=True)
    return -(directions * anchor / np.where(length == 0, 1, length)).sum(axis=-1)
"""


def printed(*command: object, cwd: Path, code: int = 0) -> str:
    """What a command prints that ends with this exit code."""
    done = run(*command, cwd=cwd, code=code)
    return done.stdout + done.stderr


def built(folder: Path) -> Path:
    """The wheel of the tree, in this folder."""
    # files that are gone from the tree would stay in the wheel
    shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)
    run(sys.executable, "-m", "build", "--wheel", "--outdir", folder, ROOT, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB")
    return wheel


def environment(folder: Path, wheel: Path, extra: str) -> Path:
    """A fresh environment with the wheel and an extra of it; returns its folder of programs."""
    venv.create(folder, with_pip=True)
    run(
        folder / "bin" / "pip",
        "install",
        "--quiet",
        "--constraint",
        ROOT / "requirements" / "tested.txt",
        f"evictionary{extra} @ {wheel.as_uri()}",
        cwd=folder,
    )
    return folder / "bin"


def folders(parent: Path) -> list[Path]:
    package = "raise RuntimeError('this is the package of the project')\n"
    project = {
        f"{name}/__init__.py": package for name in ("reference", "optimized", "benchmarks", "tests")
    } | {
        "pytest.ini": "[pytest]\naddopts = --an-option-of-the-project\n",
        "conftest.py": "raise RuntimeError('this is the conftest of the project')\n",
    }
    files = {"alone": {}, "project": project}
    return [laid(parent / name, {"mine/keydiff.py": SCORER, **more}) for name, more in files.items()]


def try_the_base(programs: Path, folder: Path) -> None:
    """What needs NumPy and pytest alone, also where more is installed."""
    evictionary, python = programs / "evictionary", programs / "python"
    version = printed(python, "-m", "evictionary", "--version", cwd=folder)
    judged = printed(evictionary, *shlex.split("judge mine/keydiff.py --profile quick --json"), cwd=folder)
    kinds = json_in(judged)["implementations"][0]["requirements"]["KD-8"]["kinds"]
    assert kinds["mathematics"] == "pass"
    for command, code, said in (
        ("--version", 0, version),
        ("methods", 0, "keydiff"),
        ("judge mine --profile quick", 0, "hold"),
        (f"judge --profile quick --exec '{python} {ROOT / 'conformance/clients/keydiff.py'}'", 0, "hold"),
        ("vectors --output vectors --method knorm", 0, ""),
        ("vectors --check vectors", 0, ""),
        ("start keydiff", 0, ""),
        ("check keydiff", 1, ""),
    ):
        assert said in printed(evictionary, *shlex.split(command), cwd=folder, code=code)
    right = (ROOT / "docs" / "classroom" / "transcript" / "3_right.py").read_text()
    laid(folder, {"secret": "a secret", "work/keydiff.py": right})
    assert "100 of 100" in printed(evictionary, "check", "keydiff", cwd=folder)
    for command in ("submit keydiff", "grade work --assignment keydiff --seed-file secret --jobs 1"):
        run(evictionary, *command.split(), cwd=folder)


def try_what_the_base_lacks(programs: Path, folder: Path) -> None:
    """A command that needs a model names the extra that brings it."""
    told = printed(programs / "evictionary", "demo", cwd=folder, code=1)
    assert "pip install 'path/to/the/clone[model]'" in told, told


def try_the_model(programs: Path, folder: Path, model: Path) -> None:
    """What runs a transformer, on a tiny one."""
    run(programs / "python", "-c", "from evictionary import EvictingCache", cwd=folder)
    (folder / "text.txt").write_text("A text about nothing at all. " * 20)
    evictionary, given = programs / "evictionary", shlex.split("--prompt-file text.txt --question What?")
    told = printed(evictionary, "run", "--model", model, *given, "--max-new-tokens", 4, cwd=folder)
    assert "tokens kept" in told
    asked = shlex.split("--methods keydiff,mine/keydiff.py --ratios 0.5 --depths 0.5 --tokens 600")
    run(evictionary, "demo", "--model", model, *asked, cwd=folder)
    assert (folder / "report.html").is_file()


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        parent = Path(temporary)
        wheel = built(parent)
        from conftest import save_tiny_model  # beside this program

        save_tiny_model(parent / "model")
        base = environment(parent / "base", wheel, "")
        both = folders(parent)
        for folder in both:
            try_the_base(base, folder)
            try_what_the_base_lacks(base, folder)
            print(f"base install, {folder.name}: judge, start, check, submit and grade work")
        full = environment(parent / "full", wheel, "[model]")
        for folder in both:
            try_the_model(full, folder, parent / "model")
            print(f"with [model], {folder.name}: run and demo work")


if __name__ == "__main__":
    main()
