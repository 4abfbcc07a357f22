"""The command `evictionary claims`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from evictionary.cli.console import (
    AS_IT_IS,
    LIBRARIES,
    WAIT,
    AsJson,
    DaskCluster,
    DaskWait,
    Loading,
    ModelName,
    app,
    carry_out,
    examples,
    exit_codes,
    given_names,
    loads_a_model,
    plain_table,
    require_folder,
    require_seed,
    require_usable,
    show,
    whole_number,
)
from evictionary.errors import require
from evictionary.progress import doing

COLOURS = {
    "holds here": "green",
    "does not hold here": "red",
    "undecided": "yellow",
    "other model needed": "yellow",
}


@app.command(
    epilog=examples(
        "evictionary claims --jobs 2",
        "evictionary claims --only KD-7,MK-36 --texts code,chat --seeds 8 --output measured",
    )
)
@loads_a_model
def claims(
    papers: Annotated[
        list[str] | None,
        typer.Option(
            help="Some of expected_attention, keydiff, lagkv, momentkv, gvote, comma-separated or repeated; "
            "all by default."
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Ids of claims, comma-separated or repeated: KD-7, or 'KD-7 (diversity)' for one of them."
        ),
    ] = None,
    model: ModelName = "embedded",
    loading: Loading = AS_IT_IS,
    output: Annotated[
        Path,
        typer.Option(
            help="The folder for results.jsonl (a later run continues it), the pictures and the pages."
        ),
    ] = Path("claims"),
    seeds: Annotated[
        int, whole_number("Texts of each kind, at least 2: an interval needs 12 texts of all kinds together.")
    ] = 3,
    seed: Annotated[
        int, whole_number("The seed of the first text; each later text of a kind has the next seed.")
    ] = 0,
    seeds_of: Annotated[
        list[str] | None,
        typer.Option(help="Another number of texts for some papers, comma-separated or repeated: gvote=4."),
    ] = None,
    texts: Annotated[
        list[str] | None,
        typer.Option(
            help="Some of repetitive, varied, records, sums, code, chat, comma-separated or repeated; all by "
            "default."
        ),
    ] = None,
    jobs: Annotated[int, whole_number("Processes that share the texts, each with its own model.")] = 1,
    dask: DaskCluster = None,
    dask_wait: DaskWait = WAIT,
    as_json: AsJson = False,
) -> None:
    """Measure the papers' empirical claims on a model: each gets numbers with intervals, a verdict, and
    what would change it.

    A claim holds here, or does not, if whole intervals say so; otherwise it is undecided. A run that was
    stopped goes on where it stopped if you repeat the command. One text of all papers takes about five
    minutes of one core.
    """
    with exit_codes("the same command goes on where it stopped", extra="model"):
        from evictionary.claims.claim import check_claims

        asked = {"--papers": given_names("--papers", papers), "--only": given_names("--only", only)}
        kinds = given_names("--texts", texts)
        require_folder(output)
        require_seed(seed)
        require_usable(model, jobs=jobs)
        chosen = check_claims(*asked.values())
        with doing(LIBRARIES):
            from evictionary.claims import run as experiment, texts as known

        apart = given_names("--seeds-of", seeds_of)
        others = {paper: range(seed, seed + count) for paper, count in map(_paper_and_count, apart or ())}
        chosen_texts = tuple(dict.fromkeys(kinds or known.KINDS))
        seeded = range(seed, seed + seeds)
        plan = experiment.Plan(model, chosen, chosen_texts, seeded, seeds_of=others, loading=loading)
        options = {**asked, "--texts": kinds, "--seeds-of": apart}
        given = "".join(f" {option} '{','.join(names)}'" for option, names in options.items() if names)
        numbers = "".join(f" --{name} {value}" for name, value in loading.numbers().items())
        lines = carry_out(plan, output, jobs, dask, dask_wait)
        with doing("intervals, pictures and pages"):
            asked_for = f"evictionary claims{given} --model {model}{numbers} --seeds {seeds} --seed {seed}"
            result = experiment.report(plan, lines, asked_for)
            experiment.write(result, output)
    pages = f"Numbers, pictures and a page for each paper: [bold]{output}[/]"
    show(as_json, result | {"output": str(output)}, [_table(result), pages])


def _paper_and_count(text: str) -> tuple[str, int]:
    paper, _, count = text.partition("=")
    require(count.isdecimal(), f"--seeds-of: got {text!r}, wanted a paper and a number, such as gvote=4")
    return paper, int(count)


def _table(result: dict[str, Any]) -> Table:
    from evictionary.evaluation.pages import interval

    columns = ("claim", f"numbers ({result['confidence']:.0%} interval)", "texts", "verdict")
    table = plain_table(*columns, title=f"The papers' claims on {result['weights']}")
    for paper in result["papers"]:
        for claim in paper["claims"]:
            deciding = ((condition, claim["numbers"][name]) for condition, name in claim["deciding"].items())
            shown = (f"{text}: {each['value']:.3g} ({interval(each)})" for text, each in deciding)
            verdict = f"[{COLOURS[claim['verdict']]}]{claim['verdict']}[/]"
            table.add_row(claim["id"], "\n".join(shown), str(claim["texts"]), verdict)
        table.add_section()
    return table
