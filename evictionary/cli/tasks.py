"""The command `evictionary tasks`."""

from pathlib import Path
from typing import Annotated

import typer

from evictionary.cli.console import AsJson, app, exit_codes, one_of, require_folder, show

FORMS = ("flashinfer-bench", "kernelbench")


@app.command(epilog="Example: [bold]evictionary tasks my_tasks --format kernelbench[/]")
def tasks(
    folder: Annotated[Path, typer.Argument(help="Where the files go.")],
    form: Annotated[str, one_of(FORMS, "The benchmark that reads them.", "--format")],
    as_json: AsJson = False,
) -> None:
    """Write functions of the contract as tasks of a benchmark of generated kernels; `verify` judges what
    comes back.
    """
    with exit_codes():
        from evictionary.classroom import tasks as made

        require_folder(folder)
        written = made.write(form, folder)
    show(as_json, written, [f"wrote {len(written)} tasks to {folder}"], soft_wrap=True)
