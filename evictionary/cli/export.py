"""The command `evictionary export`."""

from pathlib import Path
from typing import Annotated

import typer

from evictionary.cli.console import (
    Budget,
    Options,
    RandomSeed,
    Ratio,
    app,
    exit_codes,
    options_in,
    require_seed,
    whole_number,
)


@app.command(
    epilog="Example: [bold]evictionary export evicting --method keydiff --budget 512[/], then "
    '[bold]model.generate(**inputs, custom_generate="evicting", trust_remote_code=True)[/]'
)
def export(
    folder: Annotated[Path, typer.Argument(help="The folder to write; the folder of a model will do.")],
    method: Annotated[
        str, typer.Option(help="A method's name, or a composition: snapkv+ada_kv, keydiff+moments.")
    ] = "keydiff",
    compression_ratio: Ratio = 0.5,
    budget: Budget = None,
    option: Options = None,
    every: Annotated[
        int | None,
        whole_number(
            "Compress again after this many new tokens, such as 64; by default only the prompt is "
            "compressed, "
            "with momentkv each token."
        ),
    ] = None,
    seed: RandomSeed = 0,
) -> None:
    """Write a folder for model.generate(custom_generate=FOLDER): plain transformers code can use it
    unchanged.
    """
    with exit_codes(extra="model"):
        require_seed(seed)
        from evictionary.cache.export import export as write

        path = write(
            folder, method, compression_ratio, options_in(option or []), budget, every=every, seed=seed
        )
    typer.echo(str(path))
