"""The command `evictionary study`."""

from pathlib import Path
from typing import Annotated

import typer

from evictionary.cli.console import (
    AS_IT_IS,
    LIBRARIES,
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
    given_names,
    loads_a_model,
    numbers_in,
    require_folder,
    require_seed,
    require_sizes,
    require_usable,
    show,
    show_shard,
    tokens_in,
    whole_number,
)
from evictionary.errors import require
from evictionary.progress import doing

# These stand here because the study imports torch, and the help must not wait for torch; a test compares
# them.
TASKS = "passkey7,needle_multikey,variables,copy,perplexity"
FEWEST = 12


@app.command(
    epilog=examples(
        "evictionary study --jobs 2",
        "evictionary study --methods keydiff,my_scorer.py --ratios 0.75 --samples 12 --output mine --json",
    )
)
@loads_a_model
def study(
    output: Annotated[
        Path,
        typer.Option(
            help="The folder for results.jsonl (a later run continues it), the summary, the table and the "
            "picture."
        ),
    ] = Path("study"),
    model: ModelName = "embedded",
    loading: Loading = AS_IT_IS,
    methods: Annotated[
        list[str] | None,
        typer.Option(help="Names or files, comma-separated or repeated; all methods and random by default."),
    ] = None,
    ratios: Annotated[list[str], typer.Option(help="Fractions to remove, comma-separated or repeated.")] = [  # noqa: B006
        "0.5,0.75,0.9"
    ],
    tasks: Annotated[
        list[str],
        typer.Option(help="Some of the tasks of `evictionary eval`.", show_default=TASKS.replace(",", ", ")),
    ] = [TASKS],  # noqa: B006
    lengths: Annotated[
        list[str], typer.Option(help="Tokens of text and question together, comma-separated or repeated.")
    ] = ["512"],  # noqa: B006
    allocators: Annotated[
        list[str] | None,
        typer.Option(help="Divisions of the budget to add to each method; all that can be, by default."),
    ] = None,
    samples: Annotated[int, whole_number("Prompts for each task.")] = 40,
    seed: Annotated[
        int, whole_number("The seed of the first prompt; each later prompt has the next seed.")
    ] = 0,
    jobs: Annotated[int, whole_number("Processes that share the prompts, each with its own model.")] = 1,
    dask: DaskCluster = None,
    dask_wait: DaskWait = WAIT,
    shard: OneShard = None,
    as_json: AsJson = False,
) -> None:
    """Measure each method with each allocator, with and without MomentKV's correction, on the same
    prompts, and say which is best.

    The cost of a composition is what its eviction adds to -log p of the right answer, in nats for each token.
    A run that was stopped continues from there if you repeat the command. With the defaults it takes four
    to thirteen hours of one core.
    """
    with exit_codes("the same command goes on where it stopped", extra="model"):
        require(
            samples >= FEWEST,
            f"--samples: got {samples}, wanted at least {FEWEST}: an interval of fewer prompts says nothing",
        )
        require_seed(seed)
        removed = numbers_in("--ratios", ratios)
        names = given_names("--methods", methods)
        asked = given_names("--tasks", tasks) or []
        require_folder(output)
        require_sizes(removed)
        require_usable(model, names or [], asked, jobs)
        with doing(LIBRARIES):
            from evictionary.evaluation import study as experiment

        plan = experiment.Plan(
            model=model,
            loading=loading,
            selectors=tuple(dict.fromkeys(names or experiment.selectors())),
            tasks=asked,
            seeds=range(seed, seed + samples),
            ratios=removed,
            lengths=tokens_in("--lengths", lengths),
            allocators=given_names("--allocators", allocators),
        )
        lines = carry_out(plan, output, jobs, dask, dask_wait, shard, "study")
        if shard is None:
            with doing("intervals, table and picture"):
                found = experiment.write(lines, output)
    if shard is not None:
        return show_shard(as_json, shard, len(lines), output)
    best = [
        f"{100 * entry['ratio']:g}% removed: [bold]{entry['method']}[/] costs least, {entry['cost']:.3f} "
        "nats a token "
        f"({entry['interval'][0]:.3f} to {entry['interval'][1]:.3f}); {len(entry['as_good'])} others cannot "
        "be told from it"
        for entry in found["recommended"]
    ]
    written = f"Table, picture and every measurement: [bold]{output}[/]"
    show(as_json, found | {"output": str(output)}, [*best, written])
