"""The pages of the API: each public name is there with a
sentence, each parameter is described, and every example runs.
"""

import doctest
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tools.pages import ROOT, blocks

import evictionary
from docs_build import api, pages
from evictionary import EvictingCache
from evictionary.methods.method import Method, Request
from evictionary.methods.resolve import resolve
from evictionary.models import embedded
from evictionary.models.load import load

PAGES = ROOT / "docs" / "reference" / "api"
CALLED = (
    EvictingCache,
    EvictingCache.from_prefilled,
    EvictingCache.rest_of,
    EvictingCache.save,
    EvictingCache.load,
    EvictingCache.crop,
    Method.kept,
    Method.typed_options,
    load,
    resolve,
)


def described(found: Any, section: str) -> set[str]:
    """The names that a section of a docstring describes."""
    _, _, after = (inspect.getdoc(found) or "").partition(f"{section}:\n")
    lines = re.split(r"\n(?=\S)", after)[0]
    return {name.lstrip("*") for name in re.findall(r"^    (\*{0,2}\w+): \S", lines, re.MULTILINE)}


def test_the_index_has_each_public_name_and_each_module_with_a_sentence() -> None:
    index = pages.api_pages()["reference/api/modules.md"]
    rows = dict(re.findall(r"^\| \[?`([\w.]+)`.*? \| (.+) \|$", index, re.MULTILINE))
    assert set(dir(evictionary)) <= set(rows)
    linked = dict(re.findall(r"^\| \[`\w+`\]\((.+?)\.md\) \| (.+) \|$", index, re.MULTILINE))
    assert set(api.modules()) <= set(linked)
    assert [name for name, said in (rows | linked).items() if len(said.split()) < 2 or said[-1] != "."] == []


@pytest.mark.parametrize("found", CALLED, ids=lambda found: found.__qualname__)
def test_a_page_describes_every_parameter_and_no_other(found: Any) -> None:
    assert described(found, "Args") == set(inspect.signature(found).parameters) - {"self"}


@pytest.mark.parametrize("found", [Method, Request])
def test_a_page_describes_every_field(found: Any) -> None:
    assert described(found, "Attributes") == set(found.__dataclass_fields__)


def test_every_page_has_the_name_that_the_index_gives_and_the_others_beside_it() -> None:
    for name, (page, _) in api.PUBLIC.items():
        if page.endswith(".md"):
            text = (PAGES / page).read_text(encoding="utf-8")
            assert "## See also\n\n- [" in text, page
            assert page == "judge.md" or f"::: evictionary.{name}\n" in text or name == "EvictingCache"
    assert api.described("evictionary/cli/judge.py::judge") in pages.api_pages()["reference/api/modules.md"]


def test_the_page_of_the_judge_has_every_option_of_the_command() -> None:
    told = pages.filled("reference/api/judge.md", (PAGES / "judge.md").read_text(encoding="utf-8"))
    for one in pages.PROGRAM.commands["judge"].params:
        assert f"| `{one.opts[0]}`" in told and one.help


def examples(found: Any, place: dict[str, Any]) -> doctest.TestResults:
    """Run the examples of an object and of its methods, which go on with the names of the first."""
    runner = doctest.DocTestRunner()
    for test in sorted(doctest.DocTestFinder().find(found, found.__name__), key=lambda test: test.name):
        test.globs = place
        runner.run(test, clear_globs=False)
    return runner.summarize(verbose=False)


@pytest.mark.parametrize("found", [EvictingCache, load, resolve, Method], ids=lambda found: found.__name__)
def test_every_example_of_a_docstring_gives_what_it_shows(
    found: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, model_folder: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(embedded, "install", lambda: model_folder)
    monkeypatch.chdir(tmp_path)
    ran = examples(found, {})
    assert ran.attempted >= 3 and ran.failed == 0


@pytest.mark.whole
def test_the_example_of_the_judge_prints_what_the_page_shows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (program,) = blocks(PAGES / "judge.md", "python")
    exec(compile(program, "judge.md", "exec"), {})
    _, shown, _ = blocks(PAGES / "judge.md", "text")
    assert capsys.readouterr().out.strip() == shown.strip()
