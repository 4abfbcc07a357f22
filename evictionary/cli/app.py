"""The command `evictionary`: collects the subcommands; each stands in a file of its own that imports no
other.
"""

import os
from typing import Annotated

import typer

from evictionary import __version__
from evictionary.cli import (
    calibrate,
    claims,
    classroom,
    contract,
    data,
    demo,
    evaluate,
    export,
    judge,
    methods,
    run,
    study,
    tasks,
    vectors,
    verify,
)

# torch and transformers take seconds to import, so each command imports what it needs when it runs.

app = typer.Typer(
    help="An executable dictionary of KV-cache eviction: judge an implementation, or run any method inside a "
    "real language model.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


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


_judging = (methods, judge, verify, tasks, contract, vectors)
for _commands in (*_judging, demo, run, export, calibrate, evaluate, data, study, claims, classroom):
    app.add_typer(_commands.app)
