"""The command `evictionary join`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from evictionary.cli.console import (
    LIBRARIES,
    AsJson,
    app,
    escaped,
    examples,
    exit_codes,
    require_folder,
    show,
    show_failures,
)
from evictionary.errors import require, require_known
from evictionary.progress import doing


@app.command(
    epilog=examples(
        "evictionary join measured/*-of-8",
        "evictionary join measured/*-of-8 --partial --output so_far",
    )
)
def join(
    parts: Annotated[
        list[Path], typer.Argument(help="The folders that `eval` or `study` wrote with --shard.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            help="The folder for results.jsonl, the tables, the pictures and the report.",
            show_default="the folder above the parts",
        ),
    ] = None,
    partial: Annotated[bool, typer.Option("--partial", help="Join what is there of the run.")] = False,
    as_json: AsJson = False,
) -> None:
    """Join the shards of one run: the results and the report are those that one machine would have written.

    Exits with 2 if the parts are of different runs or versions, if a measurement has two results, or if
    something is missing.
    """
    with exit_codes(extra="model"):
        from evictionary.evaluation import shards

        above = {part.resolve().parent for part in parts}
        require(
            output is not None or len(above) == 1,
            f"--output: got none for parts in {len(above)} folders, wanted a folder",
        )
        output = output or parts[0].parent
        require_folder(output)
        opened = shards.of_one_run(parts)
        command = str(opened[0].run.get("command"))
        require_known("parts: the command", command, ("eval", "study"))
        with doing(LIBRARIES):
            from evictionary.evaluation import report, run as evaluation, study as experiment

        kinds: dict[str, Any] = {
            "eval": (evaluation.Plan, report.write),
            "study": (experiment.Plan, experiment.write),
        }
        plan, write = kinds[command]
        lines, missing = shards.join(opened, plan, output, partial)
        with doing("writing the report"):
            failures = write(lines, output).get("failures", [])
    found = {
        "command": command,
        "parts": [str(part.shard) for part in opened],
        "measurements": len(lines),
        "missing": missing,
        "failures": failures,
        "output": str(output),
    }
    told = [f"{len(lines)} measurements, tables, pictures and a report: [bold]{escaped(output)}[/]"]
    show(as_json, found, [missing and f"Missing: {', '.join(missing)}", *told], soft_wrap=True)
    show_failures(failures)
