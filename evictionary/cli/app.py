"""The command `evictionary`: collects the subcommands, from files that do not import one another."""

import functools
import inspect
import os
import re
from collections.abc import Callable
from typing import Annotated, Any, get_args

import typer

from evictionary import __version__, progress, ranges
from evictionary.classroom import sandbox
from evictionary.cli import (
    calibrate,
    claims,
    classroom,
    contract,
    course,
    demo,
    evaluate,
    grades,
    join,
    judge,
    methods,
    run,
    study,
    vectors,
    verify,
)
from evictionary.cli.console import app, exit_codes
from evictionary.errors import require

# torch and transformers take seconds to import, so each command imports what it needs when it runs.


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"evictionary {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run any KV-cache eviction method inside a real language model."""
    # This must be set before torch is loaded: threads that spin while they wait are ten times slower on a
    # busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Hypothesis would keep a folder of its own where the command is typed; a folder below a device cannot be
    # made.
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", os.path.join(os.devnull, "hypothesis"))
    ranges.warn_of_untried()


Quiet = Annotated[
    bool, typer.Option("--quiet", metavar="", help="Say nothing of the progress on standard error.")
]


def quietable(command: Callable[..., Any]) -> Callable[..., Any]:
    """A command with the option `--quiet` too."""

    @functools.wraps(command)
    def called(*, quiet: bool, **given: Any) -> Any:
        progress.is_quiet = quiet
        return command(**given)

    signature = inspect.signature(command)
    for parameter in signature.parameters.values():
        if get_args(parameter.annotation)[:1] == (bool,):
            get_args(parameter.annotation)[1].metavar = ""  # a switch takes no value
    own = inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Quiet)
    called.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), own]
    )
    called.__annotations__ = {**command.__annotations__, "quiet": Quiet}
    return called


# The panels of the help, and the files of the commands in each.
PANELS = {
    "Validate": (judge, verify, contract, vectors),
    "Run": (methods, demo, run, calibrate),
    "Measure": (evaluate, study, claims, join),
    "Teach": (classroom, grades, course),
}
# These run the code of others in a process of its own, which not every system has limits for.
APART = (judge.judge, verify.verify, vectors.vectors, classroom.check, grades.grade)


def _on_unix(command: Callable[..., None]) -> Callable[..., None]:
    """The command, which says in one sentence where this system cannot run it."""

    @functools.wraps(command)
    def asked(**given: Any) -> None:
        with exit_codes():
            told = sandbox.lacking()
            require(not told, f"`evictionary {command.__name__}` does not run on this system: {told}")
        command(**given)

    return asked


_PANEL_OF = {file.__name__: panel for panel, files in PANELS.items() for file in files}
app.registered_commands.sort(key=lambda command: [*_PANEL_OF].index(command.callback.__module__))
for _command in app.registered_commands:
    assert _command.callback is not None
    _command.rich_help_panel = _PANEL_OF[_command.callback.__module__]
    # A help text is written in lines of the file; the terminal breaks it into lines of its own.
    if _command.callback in APART:
        _command.callback = _on_unix(_command.callback)
    _command.help = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(_command.callback) or "")
    _command.callback = quietable(_command.callback)
