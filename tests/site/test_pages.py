"""What the pages tell a reader to type: every command is understood, every program runs, every quotation
is the code that runs.
"""

import doctest
import json
import re
import shlex
import warnings
from pathlib import Path
from typing import Any

import pytest
import typer
from tools import refused
from tools.pages import ROOT, blocks, commands
from typer.testing import CliRunner

from docs_build import methods
from docs_build.pages import filled
from docs_build.running import said
from evictionary.cli.app import app
from evictionary.models import embedded

DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [
    README,
    ROOT / "CONTRIBUTING.md",
    *sorted(DOCS.rglob("*.md")),
    *sorted((ROOT / "tutorials").rglob("*.md")),
]
BOOK = "Clara Winter kept the lighthouse of Skerry for forty years. She wrote a book about it in 1911. " * 3


def understood(command: str) -> None:
    """Let the command line be read without carrying it out.
    Raises where an option, an argument or a value is unknown.
    """
    words = shlex.split(command)[1:]
    program: Any = typer.main.get_command(app)
    if words[0] in ("--help", "--version"):
        return
    with program.make_context("evictionary", words[:1], resilient_parsing=True) as context:
        name, chosen, rest = program.resolve_command(context, words)
        if chosen is None:
            raise ValueError(f"No such command: {words[0]}")
        chosen.make_context(name, rest, parent=context, resilient_parsing="..." in rest or "--help" in rest)


@pytest.mark.parametrize("page", [README, ROOT / "README.zh.md"], ids=lambda page: page.stem)
def test_a_kernel_to_copy_counts_its_elements_in_64_bits(page: Path) -> None:
    """`row * D` wraps at 2^31 in 32 bits, and no law asks a tensor of so many elements."""
    kernels = [block for block in blocks(page, "python") if "@triton.jit" in block]
    places = [place for block in kernels for place in re.findall(r"program_id\(\d\)(\S*)", block)]
    assert places and {*places} == {".to(tl.int64)"}


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.stem)
def test_every_command_is_understood(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text(BOOK)
    wrong = {}
    for command in commands(page):
        try:
            understood(command.replace("$SLURM_ARRAY_TASK_ID", "1"))  # which Slurm sets
        except Exception as error:  # typer has a copy of click's classes, which is not public
            # a sentence may name a command with the option that it is about
            if type(error).__name__ != "MissingParameter":
                wrong[command] = str(error)
    assert wrong == {}


def test_every_target_of_make_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for page in PAGES:
        for span in re.findall(r"`make ([a-z][^`]*)`", page.read_text(encoding="utf-8")):
            named = {word for word in span.split() if re.fullmatch(r"[a-z][a-z-]*", word)}
            assert named <= targets, (page.name, span)


def test_the_readme_quotes_the_code_that_runs() -> None:
    (quoted,) = [
        block for block in blocks(README, "python") if re.match(r"@contract\ndef \w+\(.*np\.ndarray", block)
    ]
    assert quoted in (ROOT / "reference" / "keydiff.py").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "wrong",
    [
        "evictionary jugde x",
        "evictionary judge --nothing",
        "evictionary judge x --profile 5 --jobs none",
    ],
)
def test_a_command_that_is_not_there_is_seen(wrong: str) -> None:
    refused(lambda: understood(wrong), r"No such|valid integer", Exception)


@pytest.fixture
def tiny_for_embedded(monkeypatch: pytest.MonkeyPatch, model_folder: Path, tmp_path: Path) -> Path:
    """The tiny model where a page loads the embedded one, and a folder with the files that the pages call
    the reader's own.
    """
    monkeypatch.setattr(embedded, "install", lambda: model_folder)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text(BOOK)
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "my_scorer.py").write_text(
        "def score(keys):\n    return -(keys * keys).sum(-1)\n"
    )
    (tmp_path / "path" / "or").mkdir()
    (tmp_path / "path" / "or" / "hub-name").symlink_to(model_folder)
    return tmp_path


@pytest.mark.parametrize("page", [README, DOCS / "in_a_model.md"], ids=lambda page: page.stem)
def test_every_program_runs(page: Path, tiny_for_embedded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    programs = [block for block in blocks(page, "python") if "= load(" in block]
    assert programs
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # transformers says so of a name that it takes away
        for program in programs:
            exec(compile(program, page.name, "exec"), {})
    assert " MiB -> " in capsys.readouterr().out or page != README


@pytest.mark.parametrize("stem", methods.PAGES)
def test_the_lines_of_a_method_page_run(
    stem: str, tiny_for_embedded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (DOCS / "methods" / f"{stem}.md").read_text(encoding="utf-8")
    (marker,) = re.findall(r"<!-- run: .+ -->", page)
    assert marker == f"<!-- run: {methods.composition(stem)} -->"
    told = filled(f"methods/{stem}.md", marker)
    exec(compile(told.split("```")[1].removeprefix("python\n"), stem, "exec"), {})
    assert "Clara Winter" in capsys.readouterr().out
    understood(told.split("`")[-2])


def test_the_commands_of_the_readme_run(tiny_for_embedded: Path) -> None:
    chosen = [
        command
        for command in commands(README)
        if command.startswith(("evictionary run", "evictionary methods"))
    ]
    assert chosen
    for command in chosen:
        result = CliRunner().invoke(app, shlex.split(command)[1:])
        assert result.exit_code == 0, (command, result.output)


def told(page: Path, folder: Path, name: str = "keydiff.py") -> list[tuple[str, str]]:
    """Follow a page in a folder: its programs become the file that its commands judge. Each command's
    output, shown and printed.
    """
    found = []
    for language, body in re.findall(
        r"^```(python|text)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    ):
        if language == "python":
            (folder / name).write_text(body)
        elif body.startswith("$ evictionary judge"):
            command, _, shown = body.removeprefix("$ ").partition("\n")
            found.append((shown.strip(), said(command, folder)))
    return found


def matches(shown: str, output: str) -> bool:
    """Whether the output is what is shown, where a line of three dots stands for any lines."""
    return bool(re.fullmatch(re.escape(shown).replace(r"\ \ \.\.\." + "\\\n", "(?:.*\n)*"), output))


@pytest.mark.parametrize(
    ("page", "name", "verdicts"),
    [
        pytest.param(README, "keydiff.py", "FAIL", marks=pytest.mark.whole),
        pytest.param(DOCS / "ten_minutes.md", "keydiff.py", "FAIL FAIL PASS", marks=pytest.mark.whole),
        pytest.param(DOCS / "paging.md", "paging.py", "FAIL", marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "stem", value),
)
def test_the_programs_of_a_page_are_told_what_it_shows(
    page: Path, name: str, verdicts: str, tmp_path: Path
) -> None:
    """And the badge of the last one is that of the page."""
    (tmp_path / "my_kernels").symlink_to(".")  # the README calls the folder so
    for shown, output in (pairs := told(page, tmp_path, name)):
        assert matches(shown, output), output
    found = [each for _, output in pairs for each in re.findall("^(PASS|FAIL): ", output, re.MULTILINE)]
    assert " ".join(found) == verdicts
    for badge in map(json.loads, blocks(page, "json")):
        assert badge == json.loads((tmp_path / "verdict" / "badge.json").read_text()) | {"color": "green"}


def test_the_worked_example_of_a_cache_in_pages_gives_what_it_shows() -> None:
    failed, attempted = doctest.testfile(str(DOCS / "paging.md"), module_relative=False)
    assert attempted > 10 and failed == 0
