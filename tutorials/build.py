"""Runs the lessons and makes their pages for the site: the
output and the pictures of each, and a notebook to download.

`mkdocs build` and tests/site/test_lessons.py get each lesson from `built`. A lesson is run again only after a
change of its file or of the code that it may run or show.
"""

import hashlib
import io
import os
import re
import shutil
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from filelock import FileLock

ROOT = Path(__file__).parent.parent
BUILT = ROOT / "build" / "lessons"
# for one cell, which hangs then; a lesson takes less than a minute on two cores that do nothing else
LIMIT_IN_SECONDS = 600
SOURCES = ("reference", "optimized", "spec_tests", "evictionary")  # the code that a lesson may run or show
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"][
    "Homepage"
]
INSTALL = """# A hosted notebook begins with nothing installed.
import importlib.util

if importlib.util.find_spec("evictionary") is None:
    %pip install -q "evictionary[docs] @ git+{}"

# Progress bars are text here, and the library that draws them would warn of it in red.
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")
"""
# Their names until the numbers became the order in which to read: links to them lead to the lessons of today.
EARLIER = (
    "04_expected_attention",
    "05_momentkv",
    "06_gvote",
    "08_numpy_to_triton",
    "09_your_own_scorer",
    "10_reading_a_paper",
    "11_received_attention",
    "12_a_judge_at_real_sizes",
    "13_duo_attention",
    "14_serving_with_pages",
    "15_how_to_measure",
    "16_budgets_and_positions",
)
# The output of a prediction, which lesson.md.j2 folds, then the pictures and the one paragraph that say the
# answer too. A paragraph that ends in a colon or a question leads on, so it stays.
_DRAWN = (
    r'\s*<details markdown="1" class="aside"><summary>How it is drawn</summary>[\s\S]*?</details>\s*'
    r"(?:```text\n[\s\S]*?\n```\s*)?!\[[^\n]*\n"
)
_PARAGRAPH = r"\n*(?!\*\*|#|<|\||- |\$\$|```|!\[)(?:[^\n]+\n)+(?<![:?,]\n)(?=\n|\Z)"
FORETOLD = re.compile(
    r'(<details markdown="1" class="question"><summary>What it gives</summary>[\s\S]*?)\n</details>\n'
    rf"((?:{_DRAWN})*(?:{_PARAGRAPH})?(?:{_DRAWN})*)"
)
JUDGED = "from tutorials.build import judge_exercises; judge_exercises(globals())"


class LessonError(Exception):
    """A lesson cannot be run, or one of its exercises is not right; the message says so in one sentence."""


def lessons() -> list[Path]:
    """The lessons in their order."""
    return sorted(Path(__file__).parent.glob("[0-9][0-9]_*.md"))


def moved() -> dict[str, Path]:
    """The lesson that has each of the earlier names now; its own name differs in the number alone."""
    now = {lesson.stem.partition("_")[2]: lesson for lesson in lessons()}
    return {name: now[name.partition("_")[2]] for name in EARLIER}


def _line(lesson: Path, pattern: str, wanted: str) -> str:
    found = re.search(pattern, lesson.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise ValueError(f"{lesson.name}: wanted {wanted}")
    return found[1]


def heading(lesson: Path) -> str:
    """The heading of a lesson's page: its number, which other lessons use, and its title."""
    return f"{int(lesson.stem[:2])}. {_line(lesson, r'^# (.+)$', 'a heading, # ...')}"


def question(lesson: Path) -> str:
    """The question that a lesson begins with: its first line in bold."""
    return _line(lesson, r"^\*\*(.+)\*\*$", "a question, **...**")


def is_built(lesson: Path) -> bool:
    """Whether `built` would find the lesson's pages without running it."""
    stamp = BUILT / lesson.stem / "made_from"
    return stamp.exists() and stamp.read_text(encoding="utf-8") == _made_from(lesson)


def built(lesson: Path) -> Path:
    """The folder with a lesson's page, notebook and pictures, made now if there is none for this lesson
    and this code.

    Raises LessonError if the lesson cannot be run, a cell takes longer than LIMIT_IN_SECONDS, or an exercise
    is not right.
    """
    folder = BUILT / lesson.stem
    BUILT.mkdir(parents=True, exist_ok=True)
    with FileLock(BUILT / f"{lesson.stem}.lock"):
        if not is_built(lesson):
            made_from = _made_from(lesson)
            shutil.rmtree(folder, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=BUILT) as name:
                _build(lesson, Path(name))
                (Path(name) / "made_from").write_text(made_from, encoding="utf-8")
                shutil.copytree(name, folder)
    return folder


def _made_from(lesson: Path) -> str:
    """A digest of all that the pages of a lesson are made from."""
    paths = [path for path in Path(__file__).parent.iterdir() if path.is_file() and path not in lessons()]
    for folder in SOURCES:
        paths += [path for path in (ROOT / folder).rglob("*.*") if path.suffix in (".py", ".toml")]
    return hashlib.sha256(
        REPOSITORY.encode() + b"".join(path.read_bytes() for path in [lesson, *sorted(paths)])
    ).hexdigest()


def _build(lesson: Path, folder: Path) -> None:
    """Run a lesson in a kernel of its own and write its
    page, its pictures and its notebook into the folder.
    """
    import jupytext
    import nbformat
    from jinja2 import FileSystemLoader
    from nbconvert import MarkdownExporter
    from nbconvert.preprocessors import CoalesceStreamsPreprocessor
    from PIL import Image

    name = lesson.stem
    notebook = jupytext.read(lesson)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.metadata.pop("jupytext", None)
    for number, cell in enumerate(notebook.cells):
        # a fixed id instead of a random one: the same lesson gives the same file
        cell["id"] = f"{name}-{number}"
    install = nbformat.v4.new_code_cell(INSTALL.format(REPOSITORY), id=f"{name}-install")
    (folder / f"{name}.ipynb").write_text(
        nbformat.writes(
            nbformat.from_dict(notebook | {"cells": [*notebook.cells[:1], install, *notebook.cells[1:]]})
        )
        + "\n",
        encoding="utf-8",
    )
    # It runs as it is downloaded. The page leaves out the first code, so its pictures keep their numbers.
    notebook.cells = [install, *notebook.cells, nbformat.v4.new_code_cell(JUDGED)]
    _run(notebook, lesson)
    notebook.cells = notebook.cells[1:-1]
    for cell in notebook.cells:  # progress bars and warnings of libraries
        cell["outputs"] = [output for output in cell.get("outputs", []) if output.get("name") != "stderr"]
    exporter: Any = MarkdownExporter(
        extra_loaders=[FileSystemLoader(Path(__file__).parent)], template_file="lesson.md.j2"
    )
    exporter.register_preprocessor(CoalesceStreamsPreprocessor, enabled=True)
    body, resources = exporter.from_notebook_node(
        notebook, {"output_files_dir": name, "unique_key": "picture"}
    )
    body = re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+$", "", body, flags=re.MULTILINE)).strip()
    body = FORETOLD.sub(r"\1\n\2\n</details>\n", body)
    # Colab reads notebooks from a branch on GitHub; pages.yml puts them on this one.
    github = re.fullmatch(r"https://github\.com/([^/]+/[^/]+)", REPOSITORY)
    offer = (
        "[Open it in "
        f"Colab](https://colab.research.google.com/github/{github[1]}/blob/notebooks/{name}.ipynb), [download"
        if github
        else "[Download"
    )
    download = f"{offer} it as a notebook]({name}.ipynb), or read on: the output stands below the code."
    rest = re.sub(
        r"^\*\*Predict\*\*(?:.+\n)+", r"\g<0>{ .predict }\n", body.partition("\n")[2], flags=re.MULTILINE
    )
    (folder / f"{name}.md").write_text(f"# {heading(lesson)}\n\n{download}\n{rest}\n", encoding="utf-8")
    for path, content in resources["outputs"].items():
        (folder / path).parent.mkdir(exist_ok=True)
        # Lines and areas of a few colours: a palette looks the same and takes a third of the bytes.
        Image.open(io.BytesIO(content)).convert("RGB").quantize(64).save(folder / path, optimize=True)


def _run(notebook: Any, lesson: Path) -> None:
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    from evictionary.errors import InstallError
    from evictionary.models import embedded

    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    client = NotebookClient(notebook, timeout=LIMIT_IN_SECONDS, resources={"metadata": {"path": str(ROOT)}})
    try:
        embedded.install()
        client.execute(env=environment)
    except CellExecutionError as error:
        raise LessonError(
            f"{lesson.name} cannot be run: {error.ename}: {' '.join(error.evalue.split())}"
        ) from error
    # no model; a kernel that does not start, dies or hangs
    except (InstallError, RuntimeError, TimeoutError) as error:
        raise LessonError(f"{lesson.name} cannot be run: {' '.join(str(error).split())}") from error


def judge_exercises(names: dict[str, Any]) -> None:
    """Called in the kernel of a lesson, at its end, with all its names: run the check of every exercise,
    untouched and solved.

    Raises ValueError if there is no exercise or an untouched
    exercise passes, and what a check raises if a solution fails.
    """
    exercises = [name.removeprefix("check_") for name in names if name.startswith("check_")]
    if not exercises:
        raise ValueError("the lesson has no exercise")
    for name in exercises:
        names[f"check_{name}"](names[f"solution_{name}"])
        try:
            names[f"check_{name}"](names[name])
        except Exception:
            continue
        raise ValueError(f"the untouched exercise {name} passes its check")
