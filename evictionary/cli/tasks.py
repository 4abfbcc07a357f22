"""The command `evictionary tasks`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from evictionary.cli.console import AsJson, exit_codes, require_folder, show

app = typer.Typer()


class Form(StrEnum):
    FLASHINFER_BENCH = "flashinfer-bench"
    KERNELBENCH = "kernelbench"


@app.command(epilog="Example: [bold]evictionary tasks my_tasks --format kernelbench[/]")
def tasks(
    folder: Annotated[Path, typer.Argument(help="Where the files go.")],
    form: Annotated[Form, typer.Option("--format", help="The benchmark that reads them.")],
    as_json: AsJson = False,
) -> None:
    """Write functions of the contract as tasks of a benchmark of generated kernels; `verify` judges what
    comes back.
    """
    with exit_codes():
        from evictionary.classroom import tasks as made

        require_folder(folder)
        written = made.write(form.value, folder)
    show(as_json, written, [f"wrote {len(written)} tasks to {folder}"], soft_wrap=True)
