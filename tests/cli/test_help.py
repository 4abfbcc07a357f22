"""The help of each command at 80 columns: nothing is cut, each example has lines of its own, and a switch
takes no value.
"""

import itertools
import re

import pytest
from typer.testing import CliRunner

from docs_build.pages import PROGRAM
from evictionary.cli.app import app
from evictionary.cli.console import COLUMNS, examples

HELP = {"COLUMNS": "80", "TERMINAL_WIDTH": "80", "NO_COLOR": "1"}


@pytest.mark.parametrize("name", PROGRAM.commands)
def test_nothing_of_a_help_is_cut_and_each_example_has_its_lines(name: str) -> None:
    told = CliRunner().invoke(app, [name, "--help"], env=HELP).output
    assert "…" not in told and max(map(len, told.splitlines())) <= 80
    _, _, shown = told.partition(" Example")
    lines = [line.strip() for line in shown.splitlines()[1:] if line.strip()]
    assert lines and lines[0].startswith(f"evictionary {name}")
    for before, line in itertools.pairwise(lines):
        assert line.startswith("--") == before.endswith("\\"), line
    assert re.findall(r"--(?:json|quiet|strict)\b.*<bool>", told) == []


def test_a_long_example_is_broken_before_an_option() -> None:
    long = "evictionary eval --methods keydiff,lagkv --ratios 0.5,0.75,0.9 --tasks passkey64 --lengths 500"
    first, second = examples(long).removeprefix("Example:\n\n[bold]").removesuffix("[/]").split("\n")
    assert first.endswith(" --ratios 0.5,0.75,0.9 \\") and second == "    --tasks passkey64 --lengths 500"
    assert len(first) <= COLUMNS + 2 and examples("a", "b") == "Examples:\n\n[bold]a\nb[/]"


def test_what_is_on_by_default_can_be_switched_off() -> None:
    for name, command in PROGRAM.commands.items():
        switches = [one for one in command.params if one.default is True and one.opts[0] == "--json"]
        assert all(one.secondary_opts == ["--no-json"] for one in switches), name
