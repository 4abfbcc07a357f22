"""Runs the lessons and writes docs/lessons: for each a page with what it prints and draws, and a notebook to download.

python -m tutorials.build              every lesson, each in a kernel of its own
python -m tutorials.build --only 02    those whose name begins so
python -m tutorials.build --check      writes nothing: runs them all as scripts in this process, puts every exercise to its
                                       check, untouched and solved, and says which pages are older than their lesson
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import os
import re
import runpy
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "lessons"
LIMIT_IN_SECONDS = 60

# One notebook cell after the other, as nbconvert does it, but: outputs in fences; folded are imports, code that only draws, what is
# to be predicted, and the solutions.
TEMPLATE = """
{%- extends 'markdown/index.md.j2' -%}
{%- macro fold(kind, title) %}
<details markdown="1" class="{{ kind }}"><summary>{{ title }}</summary>
{% endmacro -%}
{%- block codecell -%}
{%- set tags = cell.metadata.get('tags', []) -%}
{%- if 'solution' in tags %}{{ fold('success', 'A solution') }}{% endif -%}
{{ super() }}
{%- if 'solution' in tags %}
</details>
{% endif -%}
{%- endblock codecell -%}
{%- block input -%}
{%- set tags = cell.metadata.get('tags', []) -%}
{%- if 'setup' in tags %}{{ fold('aside', 'What is imported') }}{% endif -%}
{%- if 'drawing' in tags %}{{ fold('aside', 'How it is drawn') }}{% endif %}
{{ super() }}
{%- if 'setup' in tags or 'drawing' in tags %}
</details>
{% endif -%}
{%- endblock input -%}
{%- block output_group -%}
{%- set folded = 'predict' in cell.metadata.get('tags', []) -%}
{%- if folded %}{{ fold('question', 'What it gives') }}{% endif -%}
{{ super() }}
{%- if folded %}
</details>
{% endif -%}
{%- endblock output_group -%}
{%- block stream %}
```text
{{ output.text.rstrip() }}
```
{% endblock stream -%}
{%- block data_png %}
![{{ cell.metadata.alt }}]({{ output.metadata.filenames['image/png'] | path2url }})
{% endblock data_png -%}
"""


def lessons(only: str = "") -> list[Path]:
    """The lessons whose name begins with `only`, in their order."""
    return sorted(path for path in Path(__file__).parent.glob("[0-9][0-9]_*.py") if path.stem.startswith(only))


def title(lesson: Path) -> str:
    """The heading of a lesson."""
    found = re.search(r"^# # (.+)$", lesson.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise ValueError(f"{lesson.name}: got no heading, wanted a line '# # ...'")
    return found[1]


def question(lesson: Path) -> str:
    """The question that a lesson begins with: its first line in bold."""
    found = re.search(r"^# \*\*(.+)\*\*$", lesson.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise ValueError(f"{lesson.name}: got no question, wanted a line '# **...**'")
    return found[1]


def mark(lesson: Path) -> str:
    """What a page carries of the lesson that it was made from."""
    return f"<!-- made from {lesson.name} {hashlib.sha256(lesson.read_bytes()).hexdigest()[:16]} -->"


def build(lesson: Path) -> None:
    """Run a lesson in a kernel of its own and write its page, its pictures and its notebook."""
    import jupytext
    import nbformat
    from jinja2 import DictLoader
    from nbclient import NotebookClient
    from nbconvert import MarkdownExporter
    from nbconvert.preprocessors import CoalesceStreamsPreprocessor

    name = lesson.stem
    notebook = jupytext.read(lesson)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.metadata.pop("jupytext", None)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"{name}-{number}"  # a number instead of a random one, so that the same lesson is the same file
    PAGES.mkdir(parents=True, exist_ok=True)
    (PAGES / f"{name}.ipynb").write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
    NotebookClient(notebook, timeout=10 * LIMIT_IN_SECONDS, resources={"metadata": {"path": str(ROOT)}}).execute()
    exporter: Any = MarkdownExporter(extra_loaders=[DictLoader({"lesson.md.j2": TEMPLATE})], template_file="lesson.md.j2")
    exporter.register_preprocessor(CoalesceStreamsPreprocessor, enabled=True)
    for cell in notebook.cells:  # progress bars and warnings of libraries
        cell["outputs"] = [output for output in cell.get("outputs", []) if output.get("name") != "stderr"]
    body, resources = exporter.from_notebook_node(notebook, {"output_files_dir": name, "unique_key": "picture"})
    body = re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+$", "", body, flags=re.MULTILINE)).strip()
    download = f"[Download it as a notebook]({name}.ipynb), or read on: what the code gives stands below it."
    rest = re.sub(r"^\*\*Predict\*\*(?:.+\n)+", r"\g<0>{ .predict }\n", body.partition("\n")[2], flags=re.MULTILINE)
    (PAGES / f"{name}.md").write_text(f"# {heading(lesson)}\n\n{download}\n{rest}\n\n{mark(lesson)}\n", encoding="utf-8")
    shutil.rmtree(PAGES / name, ignore_errors=True)
    for path, content in resources["outputs"].items():
        (PAGES / path).parent.mkdir(exist_ok=True)
        (PAGES / path).write_bytes(content)


def heading(lesson: Path) -> str:
    """The heading of a lesson's page: its number, by which lessons name each other, and its title."""
    return f"{int(lesson.stem[:2])}. {title(lesson)}"


def index() -> str:
    """The page that lists the lessons."""
    rows = "".join(f"| [{heading(lesson)}]({lesson.stem}.md) | {question(lesson)} |\n" for lesson in lessons())
    return f"""# Lessons

Each lesson asks a question, answers it for numbers that fit on a page, shows the equation beside the function that is it, breaks it
on purpose, and then looks at a real language model of 135 million parameters. It runs in less than a minute on a CPU. Where it
says **Predict**, decide before you unfold what comes out. The exercises have a check and a solution each.

You need NumPy and have heard of transformers; lesson 1 explains the rest, and the [glossary](../reference/glossary.md) has every
word. Read lesson 1 first. Lessons 2 to 6 are one for each paper, in any order; 7 draws what they share. Lessons 8 and 9 are for
those who write kernels and methods, 10 for those who read papers.

To work on one, install the project, download the notebook, and open it in Jupyter or an editor that runs notebooks; the files
`tutorials/*.py` are the same lessons as scripts. The model is fetched once (a 93 MB wheel from the package index).

| lesson | question |
|---|---|
{rows}"""


def check(lesson: Path) -> list[str]:
    """Run a lesson as a script and return what is wrong with it."""
    import matplotlib.pyplot as plt

    start = _processor_seconds()
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            names = runpy.run_path(str(lesson))
        except Exception:
            return [f"{lesson.name} raised\n{traceback.format_exc()}"]
    seconds = _processor_seconds() - start
    plt.close("all")
    wrong = (
        [f"{lesson.name}: took {seconds:.0f} s of processor time, wanted less than {LIMIT_IN_SECONDS}"]
        if seconds > LIMIT_IN_SECONDS
        else []
    )
    exercises = [name.removeprefix("check_") for name in names if name.startswith("check_")]
    if not exercises:
        wrong.append(f"{lesson.name}: no exercise")
    for name in exercises:
        if _passes(names[f"check_{name}"], names[name]) is None:
            wrong.append(f"{lesson.name}: the untouched exercise {name} passes its check")
        error = _passes(names[f"check_{name}"], names[f"solution_{name}"])
        if error is not None:
            wrong.append(f"{lesson.name}: the solution of {name} does not pass: {error!r}")
    page = PAGES / f"{lesson.stem}.md"
    if not page.exists() or mark(lesson) not in page.read_text(encoding="utf-8"):
        wrong.append(f"{lesson.name}: its page is older than the lesson; run python -m tutorials.build --only {lesson.stem}")
    print(f"{lesson.name}: {seconds:.1f} s, {len(exercises)} exercises", flush=True)
    return wrong


def _processor_seconds() -> float:
    """Of this process and its children; a clock on the wall would count what else the machine does."""
    return sum(os.times()[:4])


def _passes(check: Any, attempt: Any) -> Exception | None:
    try:
        check(attempt)
    except Exception as error:
        return error
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="the beginning of a lesson's name, such as 02")
    parser.add_argument("--check", action="store_true", help="write nothing, say what is wrong")
    arguments = parser.parse_args()
    os.environ.setdefault("TRITON_INTERPRET", "1")  # a kernel, and a lesson on kernels, then needs no GPU
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"
    chosen = lessons(arguments.only)
    if not chosen:
        parser.error(f"--only: got {arguments.only!r}, wanted the beginning of one of {', '.join(path.stem for path in lessons())}")
    if arguments.check:
        os.environ["MPLBACKEND"] = "agg"
        wrong = [line for lesson in chosen for line in check(lesson)]
        page = PAGES / "index.md"
        if not page.exists() or page.read_text(encoding="utf-8") != index():
            wrong.append("docs/lessons/index.md is older than the lessons; run python -m tutorials.build")
        print("\n".join(wrong))
        return 1 if wrong else 0
    for lesson in chosen:
        start = time.perf_counter()
        build(lesson)
        print(f"{lesson.name}: {time.perf_counter() - start:.1f} s")
    (PAGES / "index.md").write_text(index(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
