"""The command `evictionary judge`."""

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Generator, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer

from evictionary.cli import starter
from evictionary.cli.console import (
    AsJson,
    app,
    examples,
    exit_codes,
    given_names,
    messages,
    number,
    require_folder,
)
from evictionary.errors import UsageError, did_you_mean, require, require_known
from evictionary.progress import doing

MEMORY = "memory"
WHAT, HOW, COUNTS, RESULT = "What is judged", "How the laws run", "What counts", "The result"


@app.command(
    epilog=examples(
        "evictionary judge my_kernels",
        "evictionary judge keydiff.py --domain head_dim=64,128 --json",
        "evictionary judge my_kernel.py --method keydiff.score",
        "evictionary judge --exec ./my_binary",
        "evictionary judge --starter keydiff",
    )
)
def judge(
    path: Annotated[
        str | None,
        typer.Argument(
            show_default=False,
            help="A package, a folder of files as in reference/, one such file, or pyproject.toml.",
        ),
    ] = None,
    command: Annotated[
        str | None,
        typer.Option(
            "--exec",
            metavar="COMMAND",
            rich_help_panel=WHAT,
            help="Instead of a path: a program in any language, which answers over its standard input.",
        ),
    ] = None,
    new_file: Annotated[
        str | None,
        typer.Option(
            "--starter",
            metavar="METHOD",
            rich_help_panel=WHAT,
            help="Instead of a path: write a file for this method, such as keydiff, into the current folder, "
            "to begin with.",
        ),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            rich_help_panel=WHAT,
            help="Judge these methods only, such as keydiff; by default all that are there.",
        ),
    ] = None,
    law: Annotated[
        str | None,
        typer.Option(rich_help_panel=WHAT, help="Run only this law (copy its name from a report)."),
    ] = None,
    domain: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=WHAT,
            help="The inputs that it accepts: head_dim=64,128, also value_dim, group, lag_size, batch, "
            "dtype, min_length, "
            "max_length, length_multiple_of; may be given several times. A DOMAIN in the file or package "
            "says the same.",
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            rich_help_panel=HOW,
            help="The device that torch implementations run on, or `compiled`: kernels run as Triton "
            "compiles them, without a GPU.",
        ),
    ] = "cpu",
    dtype: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=HOW,
            help="Comma-separated: float64, float32, float16, bfloat16. By default DOMAIN's, else float64, "
            "torch float32.",
        ),
    ] = None,
    profile: Annotated[
        str,
        typer.Option(
            rich_help_panel=HOW,
            help="How many inputs a law draws: quick 4, student 25, default 50, thorough 500.",
        ),
    ] = "default",
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            rich_help_panel=HOW,
            help="How many processes; by default two if there are two processors, and one on a GPU.",
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            parser=number,
            metavar="SECONDS",
            rich_help_panel=HOW,
            help="How long a function or a program may take for one call; by default 60, and 900 with "
            "--device compiled.",
        ),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option(rich_help_panel=COUNTS, help="Edges and refusals count too, not only the mathematics."),
    ] = False,
    expected_failures: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=COUNTS,
            help="File that lists the ids or laws that may fail, one a line, each with a reason.",
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(rich_help_panel=RESULT, help="A folder for conformance.json, junit.xml and badge.json."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Judge an implementation by the laws of the functions that it provides.

    Four classes are told apart: mathematics, what the equation says; edge, a degenerate input whose meaning
    is our decision; refusal, bad input that must raise; and memory, what compiled code touches. The exit code
    is 0 if the mathematics holds, and the memory with --device compiled, 1 if they do not, and 2 if there is
    nothing to judge.
    """
    with exit_codes(extra="torch"), _told_as_json(as_json) as content:
        with doing("loading the laws"):
            from evictionary.spec_tests.judge import project

        given = [
            f"{name} {value}"
            for name, value in (("path", path), ("--exec", command), ("--starter", new_file))
            if value is not None
        ]
        nothing = (
            "nothing to judge: give a file, folder or package, or --exec COMMAND, or --starter METHOD "
            "for a file to begin with."
        )
        require(given, f"{nothing} Example: evictionary judge my_kernels")
        require(
            len(given) == 1, f"path: got {' and '.join(given).removeprefix('path ')}, wanted one of the two"
        )
        if new_file is not None:
            (written,) = starter.write([new_file], Path())
            messages.print(
                f"wrote {written}: write the body, then run evictionary judge {written}", highlight=False
            )
            return
        require(timeout is None or timeout > 0, f"--timeout: got {timeout}, wanted more than 0 seconds")
        require(
            path is None or not path.endswith((".py", "/")) or Path(path).exists(),
            f"{path}: no such file or folder",
        )
        require_known("--profile", profile, project.PROFILES)
        if report is not None:
            require_folder(report)
        laws = Path(str(files("evictionary.spec_tests")))
        target, names = _purpose(path, given_names("--method", methods) or [])
        with doing("loading the laws"):
            chosen = _law_files(laws, names)
        with tempfile.TemporaryDirectory() as temporary:
            folder = report or Path(temporary)
            # With an equals sign: pytest takes what stands alone for a path of tests, and loads the
            # conftest.py beside it.
            options = [
                f"--impl={target}" if command is None else f"--exec={command}",
                *[f"--device={device}", f"--profile={profile}", f"--report={folder}", "--brief"],
                *[f"--domain={each}" for each in domain or []],
                *[f"--method={each}" for each in names if MEMORY not in names],
                *[
                    f"--{name}={value}"
                    for name, value in {
                        "call-timeout": timeout,
                        "dtype": dtype,
                        "expected-failures": expected_failures,
                    }.items()
                    if value
                ],
                *(["--strict"] if strict else []),
                *([f"-k={law}"] if law else []),
            ]
            jobs = jobs or (min(2, os.cpu_count() or 1) if device in ("cpu", "compiled") and not law else 1)
            options += ["-p", "xdist.plugin", f"--numprocesses={jobs}", "--dist=worksteal"]
            code, said = _run_pytest(
                laws, [str(law) for law in chosen], options, shared=jobs > 1, quiet=as_json
            )
            verdict = folder / "conformance.json"
            if verdict.is_file():
                content |= json.loads(verdict.read_text(encoding="utf-8"))
            if code == 2:  # pytest's code for a run that somebody has stopped
                raise KeyboardInterrupt
            require(code in (0, 1), _why_nothing(code, said, path or command, law, names))
            if as_json:
                typer.echo(json.dumps(content, indent=1), file=sys.__stdout__)
            if report and verdict.is_file():
                messages.print(
                    f"wrote conformance.json, junit.xml and badge.json to {report}", highlight=False
                )
    raise typer.Exit(code)


def _purpose(path: str | None, methods: list[str]) -> tuple[str | None, list[str]]:
    """What is judged, and the methods whose laws are asked. A file whose name is that of no method is judged
    as the function or the method that --method names.
    """
    from evictionary.spec_tests.judge.implementation import AS, STEMS, contract_functions

    for name in methods:
        meant = did_you_mean(name, contract_functions())
        require(
            "." not in name or name in contract_functions(),
            f"--method: got {name!r}{meant}, wanted a function that `evictionary contract` lists",
        )
    stems = [name.partition(".")[0] for name in methods]
    file = Path(path or "")
    require(
        file.suffix != ".ipynb",
        f"{path}: a notebook, wanted a file: write the function out with %%writefile keydiff.py in its cell",
    )
    if file.suffix != ".py" or file.stem in STEMS or not methods:
        return path, stems
    require(
        len(methods) == 1,
        f"--method: got {', '.join(methods)} for {file.name}, wanted one; a file of several functions says "
        'IMPLEMENTS = {"my_score": "keydiff.score"}',
    )
    return f"{path}{AS}{methods[0]}", stems


def _why_nothing(code: int, said: str, judged: str | None, law: str | None, methods: list[str]) -> str:
    """Why pytest has asked no law, in words."""
    if code not in (4, 5):
        return f"path: the run of {judged} ended before its verdict (pytest: {code})"
    if said:
        return said
    why = f"it has no function of {' or '.join(methods)}" if methods else "it has no function of a law"
    if law:
        why = f"no law that applies to it has {law} in its name"
    return f"path: nothing of {judged} was judged: {why}"


def _law_files(laws: Path, methods: list[str]) -> list[Path]:
    """The files of the laws that judge an implementation: of these methods and of the memory of their
    functions, or of all.
    """
    from evictionary.spec_tests.judge.law import judging_files

    known = [path.stem.removeprefix("test_") for path in judging_files(laws)]
    for method in methods:
        require(
            method in known,
            f"--method: got {method!r}{did_you_mean(method, known)}, wanted a method or a function that "
            "`evictionary contract` lists",
        )
    return judging_files(laws, [*methods, MEMORY] if methods else ())


@contextlib.contextmanager
def _told_as_json(as_json: bool) -> Iterator[dict[str, Any]]:
    """Where nothing is judged, the reason is on standard output too, with what is known of each law: whoever
    reads JSON gets some.
    """
    content: dict[str, Any] = {}
    try:
        yield content
    except UsageError as error:
        if as_json:
            typer.echo(json.dumps({"error": str(error), **content}, indent=1), file=sys.__stdout__)
        raise


def _run_pytest(
    laws: Path, chosen: list[str], options: list[str], *, shared: bool, quiet: bool
) -> tuple[int, str]:
    """Run pytest in this process with nothing of the project around it: not its configuration, its plugins
    or its cache. Returns its exit code, and why nothing was judged if it says so.
    """
    import pytest

    from evictionary.spec_tests.verdict.verdict import FOUND

    class Asking:
        """Progress in the place of pytest's dots, until the verdict is written."""

        def __init__(self) -> None:
            self.shown = contextlib.ExitStack()
            self.now = self.shown.enter_context(doing("starting the processes"))
            self.laws, self.asked = 0, 0
            self.said = ""

        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_cmdline_main(self) -> Generator[None, Any, Any]:
            try:
                return (yield)
            except pytest.UsageError as error:  # pytest would print it, and the command does
                self.said = str(error)
                return int(pytest.ExitCode.USAGE_ERROR)

        def pytest_unconfigure(self, config: pytest.Config) -> None:
            found = config.stash.get(FOUND, None)
            self.said = found.line if found else ""

        def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
            self.laws = len(ids)
            self.now("asking the laws", 0, self.laws)

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "teardown":
                self.asked += 1
                self.now("asking the laws", self.asked, self.laws)

        @pytest.hookimpl(wrapper=True)
        def pytest_report_teststatus(self) -> Generator[None, tuple[str, Any, Any], tuple[str, Any, Any]]:
            category, *_ = yield
            return category, "", ""

        @pytest.hookimpl(tryfirst=True)
        def pytest_sessionfinish(self) -> None:
            self.shown.close()

    alone = [
        *(f"--rootdir={laws.parent}", f"--config-file={os.devnull}", "--assert=plain"),
        *("-p", "no:cacheprovider", "-p", "_hypothesis_pytestplugin", "-p", "evictionary.spec_tests.plugin"),
    ]
    # twice quiet: the verdict says how many laws fail, and nothing else counts them otherwise
    told = ["-qq", "--no-header", "--override-ini=console_output_style=classic"]
    asking = Asking()
    with asking.shown, pytest.MonkeyPatch.context() as changed:
        changed.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        if shared and "OPENBLAS_NUM_THREADS" not in os.environ:
            # the processes share the cores: none takes all for a product
            changed.setenv("OPENBLAS_NUM_THREADS", "1")
        if not quiet:
            # the verdict is the result, and exit_codes sends what a command prints to standard error
            changed.setattr(sys, "stdout", sys.__stdout__)
        code = int(pytest.main([*chosen, *options, *alone, *told], plugins=[asking]))
    return code, asking.said
