"""The command `evictionary claims`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from evictionary.cli.console import AsJson, ModelName, exit_codes, given_names, progress, require_folder, whole_number

app = typer.Typer()

COLOURS = {"seen": "green", "not seen": "red", "other model needed": "yellow"}


@app.command(
    epilog="Examples: [bold]evictionary claims[/]   [bold]evictionary claims --papers keydiff,momentkv --output measured[/]"
)
def claims(
    papers: Annotated[
        list[str] | None,
        typer.Option(
            help="Some of expected_attention, keydiff, lagkv, momentkv, gvote, comma-separated or repeated; all by default."
        ),
    ] = None,
    model: ModelName = "embedded",
    output: Annotated[Path, typer.Option(help="The folder for results.json, the pictures and the pages.")] = Path("claims"),
    seed: Annotated[int, whole_number("The seed of the texts, the hidden numbers and the methods' random draws.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Measure the papers' empirical claims on a model: each claim gets numbers, a picture and a verdict, seen or not seen.

    All papers take about ten minutes on one core.
    """
    with exit_codes(extra="model"):
        names = given_names("--papers", papers)
        from evictionary.claims import run as experiment
        from evictionary.models.load import load as load_model

        chosen = experiment.check_papers(names)
        require_folder(output)
        loaded, tokenizer = load_model(model)
        given = f" --papers {','.join(chosen)}" if names else ""
        command = f"evictionary claims{given} --model {model} --seed {seed}"
        with progress() as (plan, advance):
            report = experiment.run(
                loaded, tokenizer, model_name=model, papers=chosen, seed=seed, command=command, plan=plan, advance=advance
            )
            advance("drawing the pictures")
            result = report.as_json()
            experiment.write(result, output)
    if as_json:
        typer.echo(json.dumps(result | {"output": str(output)}, indent=1))
    else:
        Console().print(_table(result))
        Console().print(f"Numbers, pictures and a page for each paper: [bold]{output}[/]")


def _table(result: dict[str, Any]) -> Table:
    table = Table(title=f"The papers' claims on {result['weights']}", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for header in ("claim", "numbers", "verdict"):
        table.add_column(header)
    for paper in result["papers"]:
        for claim in paper["claims"]:
            numbers = ", ".join(f"{name} {number['value']:.3g}" for name, number in claim["numbers"].items())
            table.add_row(claim["id"], numbers, f"[{COLOURS[claim['verdict']]}]{claim['verdict']}[/]")
        table.add_section()
    return table
