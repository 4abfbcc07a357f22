"""The commands `evictionary contract` and `evictionary new`: what a function takes and gives, and a file
to begin with.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from evictionary.cli import starter
from evictionary.cli.console import AsJson, app, examples, exit_codes, messages, show
from evictionary.progress import doing

AXES = {
    "B": "batch",
    "H_kv": "key-value heads",
    "H_q": "query heads",
    "T": "tokens",
    "M": "queries",
    "D": "channels of a key",
    "D_v": "channels of a value",
    "L": "tokens of a partition",
}


@app.command(
    epilog=examples(
        "evictionary contract",
        "evictionary contract h2o",
        "evictionary contract keydiff.score --json",
    )
)
def contract(
    function: Annotated[
        str | None,
        typer.Argument(
            show_default=False,
            help="Such as keydiff.score. A method, such as h2o, lists its functions; nothing lists all.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print what a function takes and gives: signature, axes, ranges of
    settings, dtypes, equations, number of laws (property tests).
    """
    with exit_codes(), doing("reading the contract"):
        listed = starter.functions_of(function)
        found = {} if listed else starter.described(function or "")
    if listed:
        show(as_json, listed, map(Text, listed))
        return
    given = [each["axes"] for each in found["answers"].values()]
    named = {axis: AXES[axis] for axes in (*found["axes"].values(), *given) for axis in axes if axis in AXES}
    lines = [
        *(found["signature"], "", found["says"], ""),
        *(array(name, axes, found["kinds"][name]) for name, axes in found["axes"].items()),
        *(f"{name}: {allowed}{in_use(found, name)}" for name, allowed in found["settings"].items()),
        *(array(name, each["axes"], each["kind"]) for name, each in found["answers"].items()),
        *(["axes: " + ", ".join(f"{axis} {meaning}" for axis, meaning in named.items())] if named else []),
        *(f"{name}: {text}" for name, text in found["equations"].items()),
        f"dtypes: {', '.join(found['dtypes'])}",
    ]

    def count() -> Iterator[Text]:
        with exit_codes(), doing("loading the laws"):
            found["laws"] = len(starter.laws_of(found["function"]))
        yield Text(f"{found['laws']} laws")

    # The laws take longer to load than all else, so the rest is printed before.
    counted = [*count()] if as_json else count()
    show(as_json, found, itertools.chain([Text("\n".join(lines))], counted))


KINDS = {
    "real": "finite numbers",
    "weight": "numbers of at least 0",
    "share": "numbers from 0 to 1",
    "cosine": "numbers from -1 to 1",
    "open": "numbers, infinite ones too",
    "memory": "numbers, also infinity and NaN",
    "bool": "booleans",
    "whole": "whole numbers of at least 0",
}


def array(name: str, axes: list[str], kind: str) -> str:
    """What is said of an array that a function takes or gives: `keys: [B, H_kv, T, D], finite numbers`."""
    return f"{name}: [{', '.join(axes)}], {KINDS[kind]}"


def in_use(found: dict[str, Any], name: str) -> str:
    """The values that papers and models use of a setting, as the end of its line."""
    values = found["values"].get(name)
    return f" (in use: {', '.join(f'{value:g}' for value in values)})" if values else ""


@app.command(
    epilog=examples(
        "evictionary new keydiff.score lagkv.score --folder my_kernels",
    )
)
def new(
    functions: Annotated[
        list[str], typer.Argument(help="The functions that you want to write, such as keydiff.score.")
    ],
    folder: Annotated[Path, typer.Option(help="Where the files go.")] = Path("my_kernels"),
) -> None:
    """Write a folder with a file for each method: the signatures are right, and you write the bodies."""
    with exit_codes():
        with doing("loading the laws"):
            written = starter.write(functions, folder, folder)
        for path in written:
            messages.print(
                f"wrote {path}: write the body, then run evictionary judge {folder}", highlight=False
            )
