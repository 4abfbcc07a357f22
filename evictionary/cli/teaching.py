"""What the commands under Teach share: an option, the id of a student, a seed file, names in a message."""

import os
from pathlib import Path
from typing import Annotated

import typer

from evictionary.cli.console import messages
from evictionary.errors import require, usage

Assignments = Annotated[
    Path | None, typer.Option(help="A folder of your own assignments, in place of those that come with this.")
]
FOLDER = "a folder that can be written"


def as_id(student: str) -> str:
    from evictionary.classroom import submissions

    told = f"--student: got {student!r}, wanted an id that can be the name of a folder of its own"
    require(submissions.is_id(student), told)
    return student


def few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def secret_of(seed_file: Path | None) -> bytes:
    if seed_file is None:
        messages.print(
            "No --seed-file: the seeds are new, and a second run will have others.", style="yellow"
        )
        return os.urandom(32)
    with usage(f"--seed-file: got {seed_file}, wanted a file that can be read", OSError):
        secret = seed_file.read_bytes()
    require(
        len(secret.strip()) >= 8,
        f"--seed-file: got {seed_file} with {len(secret)} bytes, wanted at least 8 secret bytes",
    )
    return secret
