"""The command `evictionary judge`."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from evictionary.cli.console import AsJson, exit_codes, require_folder
from evictionary.errors import UsageError

app = typer.Typer()


@app.command(
    epilog="Examples: [bold]evictionary judge my_kernels[/]   [bold]evictionary judge keydiff.py --dtype bfloat16,float16 --json[/]"
)
def judge(
    path: Annotated[str, typer.Argument(help="A package, a folder of files named as in reference/, or one such file.")],
    device: Annotated[str, typer.Option(help="The device that torch implementations run on.")] = "cpu",
    dtype: Annotated[
        str | None, typer.Option(help="Comma-separated: float64, float32, float16, bfloat16. By default float64, torch float32.")
    ] = None,
    profile: Annotated[
        str, typer.Option(help="How many inputs a law draws: quick 4, student 25, default 50, thorough 500.")
    ] = "default",
    report: Annotated[Path | None, typer.Option(help="A folder for conformance.json, junit.xml and badge.json.")] = None,
    as_json: AsJson = False,
) -> None:
    """Put an implementation to the laws of the functions that it provides.

    The exit code is 0 where all hold, 1 where one does not, and 2 where there is nothing to judge.
    """
    with exit_codes():
        if report is not None:
            require_folder(report)
        with tempfile.TemporaryDirectory() as temporary:
            folder = report or Path(temporary)
            code = _run(path, device, dtype, profile, folder, quiet=as_json)
            verdict = folder / "conformance.json"
            if as_json and verdict.is_file():
                typer.echo(json.dumps(json.loads(verdict.read_text(encoding="utf-8")), indent=1), file=sys.__stdout__)
        if code not in (0, 1):
            raise UsageError(
                "path: nothing was judged; the lines above say why" if not as_json else f"path: got {path!r}, see stderr"
            )
    raise typer.Exit(code)


def _run(path: str, device: str, dtype: str | None, profile: str, report: Path, *, quiet: bool) -> int:
    """The laws by pytest, in this process, with nothing of the project around: no configuration, no plugin, no cache of its."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    import pytest

    laws = Path(str(files("evictionary.spec_tests")))
    arguments = [str(law) for law in sorted(laws.glob("test_*.py"))]
    arguments += ["--impl", path, "--device", device, "--profile", profile, "--report", str(report), "-q", "--no-header"]
    arguments += [
        f"--rootdir={laws.parent}",
        f"--config-file={os.devnull}",
        "-p",
        "no:cacheprovider",
        "-p",
        "_hypothesis_pytestplugin",
    ]
    arguments += ["-W", "error::RuntimeWarning", *(["--dtype", dtype] if dtype else [])]
    if not quiet:
        sys.stdout = sys.__stdout__  # the verdict is the result, and exit_codes sends what a command prints to standard error
    return int(pytest.main(arguments))
