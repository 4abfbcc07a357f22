"""The command `evictionary demo`."""

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from evictionary.cli.console import (
    AS_IT_IS,
    LIBRARIES,
    AsJson,
    Loading,
    ModelName,
    app,
    examples,
    exit_codes,
    given_names,
    loads_a_model,
    mebibytes,
    numbers_in,
    plain_table,
    progress,
    require_seed,
    require_sizes,
    require_usable,
    require_writable,
    show,
    whole_number,
)
from evictionary.progress import doing

if TYPE_CHECKING:
    from evictionary.evaluation.demo import Result

DISTANCES = (
    "|h - h_c|: how far the final hidden states of the answer move from those of the full cache; "
    "rel.: this distance over their length"
)


@app.command(
    epilog=examples(
        "evictionary demo",
        "evictionary demo --depths 0.1,0.5,0.9 --ratios 0.5,0.75",
        "evictionary demo --methods keydiff,my_scorer.py --ratios 0.5 --json",
    )
)
@loads_a_model
def demo(
    output: Annotated[Path, typer.Option(help="The file to write the report to.")] = Path("report.html"),
    model: ModelName = "embedded",
    loading: Loading = AS_IT_IS,
    methods: Annotated[
        list[str] | None,
        typer.Option(help="Names or files, comma-separated or repeated; all methods by default."),
    ] = None,
    ratios: Annotated[list[str], typer.Option(help="Fractions to remove, comma-separated or repeated.")] = [  # noqa: B006
        "0.25,0.5,0.75"
    ],
    depths: Annotated[
        list[str],
        typer.Option(help="Where the number stands, as fractions of the text, comma-separated or repeated."),
    ] = ["0.1,0.3,0.5,0.7,0.9"],  # noqa: B006
    tokens: Annotated[int, whole_number("About how many tokens each text has.")] = 1500,
    seed: Annotated[
        int, whole_number("The seed of the texts, the hidden numbers and the random baseline.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Hide a number in a long text, compress the cache with every method, and ask for the number.

    Without options this takes about 20 minutes on a CPU. Fewer places, ratios or methods take less.
    """
    with exit_codes(extra="model"):
        removed, places = numbers_in("--ratios", ratios), numbers_in("--depths", depths)
        names = given_names("--methods", methods)
        require_seed(seed)
        require_writable(output)
        require_sizes(removed)
        require_usable(model, names or [])
        with progress(LIBRARIES) as (plan, advance):
            from evictionary.evaluation import demo as experiment
            from evictionary.models.load import load as load_model

            experiment.require_usable(names, removed, places, tokens)
            with doing("loading the model"):
                loaded, tokenizer = load_model(model, **vars(loading))
            result = experiment.run(
                loaded,
                tokenizer,
                names,
                ratios=removed,
                depths=places,
                seed=seed,
                tokens=tokens,
                plan=plan,
                advance=advance,
            )
            advance("writing the report")
            experiment.write(result, output)
    left_out = [Text(f"Left out: {name} {reason}", "dim") for name, reason in result.left_out.items()]
    report = f"The report, with pictures of which tokens survive: [bold]{output}[/]"
    parts = [_demo_table(result), Text(DISTANCES, "dim"), *left_out, report]
    show(as_json, result.as_json() | {"report": str(output)}, parts)


def _demo_table(result: "Result") -> Table:
    numbers = ("removed", "KV MiB", "right", "|h - h_c|", "rel.", "sec.")
    title = "A number in a long text, asked for after compression"
    table = plain_table("method", *numbers, right=numbers, title=title, collapse_padding=True)
    for _, rows in itertools.groupby(result.rows, lambda row: row.label):
        for row in rows:
            each = row.summary()
            colour = {each["of"]: "green", 0: "red"}.get(each["right"], "yellow")
            table.add_row(
                row.label,
                row.asked,
                f"{mebibytes(each['bytes_before'])} → {mebibytes(each['bytes_after'])}",
                f"[{colour}]{each['right']}/{each['of']}[/]",
                f"{each['error']:.1f}",
                f"{each['relative_error']:.3f}",
                f"{each['seconds']:.2f}",
            )
        table.add_section()
    return table
