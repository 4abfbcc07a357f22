"""The wheel tried as a user would: built, installed into environments of its own, and used in two folders.

One folder holds the user's own file alone, the other is a project that has its own `reference/`,
`benchmarks/` and `tests/`, which must stay out of the way and be left alone. `python tests/wheel.py`; it
needs a package index.
"""

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


def environment(folder: Path, wheel: Path, extra: str) -> Path:
    """A fresh environment with the wheel and an extra of it; returns its folder of programs."""
    venv.create(folder, with_pip=True)
    run(
        folder / "bin" / "pip",
        "install",
        "--quiet",
        "--constraint",
        ROOT / "constraints.txt",
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
    """What needs NumPy and pytest alone."""
    evictionary = programs / "evictionary"
    assert printed(evictionary, "--version", cwd=folder) == printed(
        programs / "python", "-m", "evictionary", "--version", cwd=folder
    )
    assert "keydiff" in printed(evictionary, "methods", cwd=folder)
    assert "hold" in printed(evictionary, "judge", "mine", "--profile", "quick", cwd=folder)
    judged = json_in(
        printed(evictionary, "judge", "mine/keydiff.py", "--profile", "quick", "--json", cwd=folder)
    )
    assert judged["implementations"][0]["requirements"]["KD-8"]["kinds"]["mathematics"] == "pass"
    client = f"{programs / 'python'} {ROOT / 'conformance' / 'clients' / 'keydiff.py'}"
    assert "hold" in printed(evictionary, "judge", "--exec", client, "--profile", "quick", cwd=folder)
    run(evictionary, "vectors", "--output", "vectors", "--method", "knorm", cwd=folder)
    run(evictionary, "vectors", "--check", "vectors", cwd=folder)
    run(evictionary, "start", "keydiff", cwd=folder)
    run(evictionary, "check", "keydiff", cwd=folder, code=1)
    (folder / "work" / "keydiff.py").write_text(
        (ROOT / "docs" / "classroom" / "transcript" / "3_right.py").read_text()
    )
    assert "100 of 100" in printed(evictionary, "check", "keydiff", cwd=folder)
    run(evictionary, "submit", "keydiff", cwd=folder)
    (folder / "secret").write_text("a secret")
    run(
        evictionary,
        "grade",
        "work",
        "--assignment",
        "keydiff",
        "--seed-file",
        "secret",
        "--jobs",
        "1",
        cwd=folder,
    )
    assert "pip install 'path/to/the/clone[model]'" in printed(evictionary, "demo", cwd=folder, code=1)


def try_the_model(programs: Path, folder: Path, model: Path) -> None:
    """What runs a transformer, on a tiny one."""
    run(programs / "python", "-c", "from evictionary import EvictingCache", cwd=folder)
    (folder / "text.txt").write_text("A text about nothing at all. " * 20)
    evictionary, given = (
        programs / "evictionary",
        ("--model", model, "--prompt-file", "text.txt", "--question", "What?"),
    )
    assert "tokens kept" in printed(evictionary, "run", *given, "--max-new-tokens", "4", cwd=folder)
    asked = (
        "--model",
        model,
        "--methods",
        "keydiff,mine/keydiff.py",
        "--ratios",
        "0.5",
        "--depths",
        "0.5",
        "--tokens",
        "600",
    )
    run(evictionary, "demo", *asked, cwd=folder)
    assert (folder / "report.html").is_file()


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        parent = Path(temporary)
        # files that are gone from the tree would stay in the wheel
        shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)
        run(sys.executable, "-m", "build", "--wheel", "--outdir", parent, ROOT, cwd=parent)
        (wheel,) = parent.glob("*.whl")
        print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB")
        from conftest import save_tiny_model  # beside this program

        save_tiny_model(parent / "model")
        base = environment(parent / "base", wheel, "")
        both = folders(parent)
        for folder in both:
            try_the_base(base, folder)
            print(f"base install, {folder.name}: judge, start, check, submit and grade work")
        full = environment(parent / "full", wheel, "[model]")
        for folder in both:
            try_the_model(full, folder, parent / "model")
            print(f"with [model], {folder.name}: run and demo work")


if __name__ == "__main__":
    main()
