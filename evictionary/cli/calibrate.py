"""The command `evictionary calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evictionary.cli.console import ModelName, exit_codes, text_of

app = typer.Typer()


@app.command(
    epilog="Example: [bold]evictionary calibrate --text-file book.txt --output book.calibration[/], then "
    "[bold]evictionary run --method q_filters --option calibration=book.calibration ...[/]"
)
def calibrate(
    text_file: Annotated[Path, typer.Option(help="A UTF-8 text file of some hundred to some thousand words.")],
    output: Annotated[Path, typer.Option(help="The file to write.")],
    model: ModelName = "embedded",
) -> None:
    """Calibrate TriAttention, Q-Filters and DuoAttention on a text, for any number of later prompts of the same model."""
    with exit_codes(extra="model"):
        text = text_of("--text-file", text_file)
        from evictionary.cache.calibration import write
        from evictionary.evaluation.calibration import MOST, of_text
        from evictionary.models.load import load

        loaded, tokenizer = load(model)
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        layers = of_text(loaded, ids)
        write(loaded, layers, output)
    typer.echo(f"{output}: {len(layers)} layers, from {min(ids.shape[1], MOST)} tokens")
