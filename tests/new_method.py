"""A new method in an afternoon: copies the tree, adds the files of `tests/a_new_method/`, and tries the
method in the copy.

`python tests/new_method.py` is the recipe of docs/reference/add_a_method.md, followed literally: it fails
where an existing file would have to change, or a command to be run that the page does not name. It prints
what was added. Laws and tests that name another method ask nothing of this one, and are left out.
"""

import shutil
import tempfile
from pathlib import Path

from tools import ROOT, python, run

from evictionary.methods import catalogue

FILES = ROOT / "tests" / "a_new_method"
STEM = "value_norm"


def main() -> None:
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").stdout
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "evictionary"
        for name in filter(None, listed.split("\0")):
            # a link to a folder is copied as a link
            if (ROOT / name).is_file() or (ROOT / name).is_symlink():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
        for asked in ("init --quiet", "add --all", "commit --quiet --message before"):
            run("git", "-c", "user.name=a", "-c", "user.email=a@b", *asked.split(), cwd=copy)
        for source in sorted(FILES.rglob("*.*")):
            target = copy / source.relative_to(FILES)
            assert not target.exists(), f"{target}: a new method adds files and changes none"
            target.parent.mkdir(exist_ok=True)
            shutil.copy2(source, target)
        python("-m", "ruff", "check", ".", cwd=copy)
        pytest = ["-m", "pytest", "-q", "-n", "auto", "--dist", "worksteal", "-k"]
        # Pages count the methods of today: the recipe says that they change when a method is contributed.
        others = f"{STEM} or not ({' or '.join(catalogue.names())} or test_said)"
        python(*pytest, others, "spec_tests", "tests", "--profile", "quick", cwd=copy, OMP_NUM_THREADS=1)
        python(*pytest, STEM, "-m", "slow", "tests/judge/test_mutants.py", cwd=copy, OMP_NUM_THREADS=1)
        assert STEM in python("-m", "evictionary", "methods", cwd=copy).stdout
        python("-m", "evictionary", "judge", "reference", "--method", STEM, cwd=copy)
        run("git", "add", "--all", cwd=copy)
        print(run("git", "diff", "--cached", "--stat", cwd=copy).stdout)


if __name__ == "__main__":
    main()
