"""The command `evictionary`."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from workbench import __version__
from workbench.errors import InstallError, MethodError, UsageError

if TYPE_CHECKING:
    from workbench.cache import EvictingCache
    from workbench.demo import Result
    from workbench.questions import Answer

# torch and transformers take seconds to import, so each command imports what it needs when it runs.

app = typer.Typer(
    help="An executable dictionary of KV-cache eviction: run any method inside a real language model.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
messages = Console(stderr=True)


def whole(text: str) -> int:
    """Read an option's whole number; the message then says what was got, as that of every other option does."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"got {text!r}, wanted a whole number") from None


def number(text: str) -> float:
    """Read an option's number."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"got {text!r}, wanted a number") from None


def whole_number(help: str) -> Any:
    """An option that takes a whole number."""
    return typer.Option(parser=whole, metavar="<int>", help=help)


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")]
ModelName = Annotated[
    str, typer.Option("--model", help="A Hugging Face name, a local folder, or 'embedded' for SmolLM2-135M-Instruct.")
]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"evictionary {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Run any KV-cache eviction method inside a real language model."""
    # Before torch is loaded: threads that spin while they wait make everything ten times slower on a machine that is busy.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@contextmanager
def _exit_codes(stopped: str = "") -> Iterator[None]:
    """2 for an argument that cannot be used, 1 for a failure, 130 for Ctrl-C; one line each, no traceback.

    What a user's method prints meanwhile goes to standard error: standard output is for results. `stopped` says what to do after
    Ctrl-C.
    """
    try:
        with redirect_stdout(sys.stderr):
            yield
    except KeyboardInterrupt:
        messages.print(f"[bold red]stopped[/] {stopped}", highlight=False)
        raise typer.Exit(130) from None
    except UsageError as error:
        messages.print(f"[bold red]usage error[/] {_escaped(error)}", soft_wrap=True, highlight=False)
        raise typer.Exit(2) from None
    except (MethodError, InstallError, OSError) as error:
        messages.print(f"[bold red]failed[/] {_escaped(error)}", soft_wrap=True, highlight=False)
        raise typer.Exit(1) from None


def _escaped(error: Exception) -> str:
    from rich.markup import escape

    return escape(" ".join(str(error).split()))


def _quiet_transformers() -> None:
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


@app.command(epilog="Example: [bold]evictionary methods --json[/]")
def methods(as_json: AsJson = False) -> None:
    """List the methods: what they keep, their paper, their seams and their options.

    They compose, with + between the names: a method, then allocators, then moments. ada_kv lets the heads of a layer share its
    budget, pyramid_kv gives more to lower layers, and moments adds MomentKV's correction for what was evicted:
    snapkv+pyramid_kv+ada_kv, keydiff+moments. A file of your own, path/to/file.py, composes likewise.
    """
    from workbench.catalogue import RANDOM, describe, names

    found = [describe(name) for name in [*names(), RANDOM]]
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    table = Table.grid(padding=(0, 2))
    for each in found:
        paper = f"arXiv {each['paper']}; " if each["paper"] else ""
        options = "".join(f"; {name}={value}" for name, value in each["options"].items())
        table.add_row(f"[bold]{each['name']}[/]", each["description"])
        table.add_row("", f"[dim]{paper}{', '.join(each['seams'])}{options}[/]")
    for name, meaning in ADDITIONS.items():
        table.add_row(f"[bold]+{name}[/]", meaning)
    console = Console()
    console.print(table)
    console.print("\nThey compose: a method, then allocators, then moments, such as snapkv+pyramid_kv+ada_kv or keydiff+moments.")


ADDITIONS = {
    "ada_kv": "an allocator for any method with scores: the heads of a layer share its budget",
    "pyramid_kv": "an allocator: lower layers get more of the budget than higher ones",
    "moments": "MomentKV's correction beside any selection: moments of what was evicted join the attention",
}
"""What may follow a method's name after a +."""


@app.command(
    epilog="Examples: [bold]evictionary demo[/]   [bold]evictionary demo --methods keydiff,my_scorer.py --ratios 0.5 --json[/]"
)
def demo(
    output: Annotated[Path, typer.Option(help="Where to write the report.")] = Path("report.html"),
    model: ModelName = "embedded",
    methods: Annotated[
        list[str] | None, typer.Option(help="Names or files, with commas between them or given several times; all by default.")
    ] = None,
    ratios: Annotated[list[str], typer.Option(help="Fractions to remove, likewise.")] = ["0.25,0.5,0.75"],  # noqa: B006
    depths: Annotated[list[str], typer.Option(help="Where the number stands in the text, as fractions, likewise.")] = [  # noqa: B006
        "0.1,0.3,0.5,0.7,0.9"
    ],
    tokens: Annotated[int, whole_number("About how many tokens each text has.")] = 1500,
    seed: Annotated[int, whole_number("Draws the texts, the numbers and the random baseline.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Hide a number in a long text, compress the cache with every method, and ask for the number."""
    with _exit_codes():
        removed, places = _numbers("--ratios", ratios), _numbers("--depths", depths)
        names = _given_names("--methods", methods)
        _require_writable(output)
        from workbench import demo as experiment
        from workbench import models, report

        _quiet_transformers()
        loaded, tokenizer = models.load(model)
        with _progress() as (plan, advance):
            result = experiment.run(
                loaded,
                tokenizer,
                method_names=names,
                ratios=removed,
                depths=places,
                seed=seed,
                tokens=tokens,
                plan=plan,
                advance=advance,
            )
            advance("writing the report")
            report.write(result, output)
    if as_json:
        typer.echo(json.dumps(result.as_json() | {"report": str(output)}, indent=1))
    else:
        Console().print(_demo_table(result))
        for name, reason in result.left_out.items():
            Console().print(f"Left out: {name} {reason}", style="dim", markup=False)
        Console().print(f"The report, with pictures of which tokens survive: [bold]{output}[/]")


def _names(texts: list[str] | None) -> list[str] | None:
    return [name.strip() for name in ",".join(texts or []).split(",") if name.strip()] or None


def _given_names(argument: str, texts: list[str] | None) -> list[str] | None:
    """The names of an option, or None where it was not given. Raises UsageError where it was, without a name in it."""
    names = _names(texts)
    if texts and not names:
        raise UsageError(f"{argument}: got {','.join(texts)!r}, wanted at least one name")
    return names


def _numbers(argument: str, texts: list[str]) -> list[float]:
    text = ",".join(texts)
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{argument}: got {text!r}, wanted numbers with commas between them, such as 0.25,0.5") from None


def _require_writable(output: Path) -> None:
    if output.is_dir() or not can_write_into(output.resolve().parent):
        raise UsageError(f"--output: got {output}, wanted a file in a folder that exists and can be written")


def can_write_into(folder: Path) -> bool:
    """Whether a file can really be made in the folder: not every file system tells by its permissions."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def require_folder(output: Path) -> None:
    """Raise UsageError, before hours of work, where the folder `output` cannot be made or written."""
    existing = next(folder for folder in (output.resolve(), *output.resolve().parents) if folder.exists())
    if not can_write_into(existing):
        raise UsageError(f"--output: got {output}, wanted a folder that can be written, or made")


@contextmanager
def _progress() -> Iterator[tuple[Callable[[int], None], Callable[[str], None]]]:
    """A progress bar on stderr, as (plan, advance): the number of steps, then what each step is about to do."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<48}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=messages, transient=True) as progress:
        task = progress.add_task("preparing", total=None, completed=-1)
        yield (
            lambda steps: progress.update(task, total=steps),
            lambda text: progress.update(task, advance=1, description=text),
        )


def _demo_table(result: Result) -> Table:
    table = Table(
        title="A number in a long text, asked for after compression",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("method", no_wrap=True)
    for header in ("removed", "KV MiB", "right", "|h - h_c|", "rel.", "sec."):
        table.add_column(header, justify="right", no_wrap=True)
    previous = result.rows[0].label
    for row in result.rows:
        if row.label != previous:
            table.add_section()
            previous = row.label
        each = row.summary()
        colour = {each["of"]: "green", 0: "red"}.get(each["right"], "yellow")
        table.add_row(
            row.label,
            row.asked,
            f"{_mebibytes(each['bytes_before'])} → {_mebibytes(each['bytes_after'])}",
            f"[{colour}]{each['right']}/{each['of']}[/]",
            f"{each['error']:.1f}",
            f"{each['relative_error']:.3f}",
            f"{each['seconds']:.2f}",
        )
    return table


def _mebibytes(nbytes: float) -> str:
    return f"{nbytes / 2**20:.1f}"


@app.command(
    epilog="Example: [bold]evictionary run --method lagkv --option lag_size=128 --compression-ratio 0.5 --prompt-file book.txt "
    '--question "Who wrote it?" --question "When?"[/]'
)
def run(
    prompt_file: Annotated[Path, typer.Option(help="A UTF-8 text file: the context to compress.")],
    question: Annotated[list[str], typer.Option(help="A question about it; may be given several times.")],
    model: ModelName = "embedded",
    method: Annotated[
        str,
        typer.Option(
            help="A method's name, path/to/file.py[:function], or a composition: snapkv+pyramid_kv+ada_kv, keydiff+moments."
        ),
    ] = "keydiff",
    compression_ratio: Annotated[
        float, typer.Option(parser=number, metavar="<float>", help="The fraction of the cache to remove, in [0, 1).")
    ] = 0.5,
    budget: Annotated[int | None, whole_number("Tokens to keep in each head, in place of the ratio.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="An option of the method, as name=value; may be repeated.")] = None,
    every: Annotated[
        int | None,
        whole_number("Compress again after so many new tokens, reading the text in blocks of them; by default the prompt alone."),
    ] = None,
    max_new_tokens: Annotated[int, whole_number("The longest answer, in tokens.")] = 64,
    seed: Annotated[int, whole_number("For methods that draw.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Compress the cache of a text once, then answer several questions from it."""
    with _exit_codes():
        options = _options(option or [])
        text = _read(prompt_file)
        if max_new_tokens < 1:
            raise UsageError(f"--max-new-tokens: got {max_new_tokens}, wanted at least 1")
        from workbench import models
        from workbench.cache import EvictingCache
        from workbench.methods import resolve, tokens_to_keep
        from workbench.questions import ask, prefill, tokenize

        chosen = resolve(method)
        options = chosen.typed_options(options)
        tokens_to_keep(1, compression_ratio, budget)
        _quiet_transformers()
        loaded, tokenizer = models.load(model)
        asked = [tokenize(tokenizer, text, each) for each in question]
        with _progress() as (plan, advance):
            plan(1 + len(question))
            context_ids = asked[0][0]
            advance(f"reading {context_ids.shape[1]} tokens")
            cache = EvictingCache(loaded, chosen, compression_ratio, options, budget, every=every, seed=seed)
            prefill(loaded, context_ids, cache, every)
            before, after = cache.nbytes_full, cache.nbytes
            answers = []
            for index, (_, question_ids) in enumerate(asked):
                advance(f"answering question {index + 1} of {len(question)}")
                answers.append(ask(loaded, tokenizer, cache, question_ids, max_new_tokens))
        note = _note(cache)
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "model": model,
                    "method": chosen.name,
                    "options": options,
                    "compression_ratio": compression_ratio if budget is None else None,
                    "budget": budget,
                    "every": cache.every,
                    "tokens": cache.get_seq_length(),
                    "tokens_kept": cache.tokens_kept,
                    "bytes_before": before,
                    "bytes_after": after,
                    "peak_tokens": cache.peak_tokens,
                    "note": note,
                    "answers": [{"question": each, "answer": answer.text} for each, answer in zip(question, answers, strict=True)],
                },
                indent=1,
            )
        )
    else:
        _print_run(cache, question, answers, note, before, after)


def _print_run(
    cache: EvictingCache, questions: list[str], answers: list[Answer], note: str | None, before: int, after: int
) -> None:
    console = Console(highlight=False)
    assert cache.method is not None
    kept, seen = cache.tokens_kept, cache.get_seq_length()
    sizes = f"{_mebibytes(before)} MiB became {_mebibytes(after)} MiB"
    console.print(f"{cache.method.name}: {kept:.5g} of {seen} tokens kept in each head, {sizes}")
    if note:
        console.print(note, style="yellow", markup=False)
    for asked, answer in zip(questions, answers, strict=True):
        console.print(f"\n{asked}", style="bold", markup=False)
        console.print(answer.text, markup=False)


def _options(pairs: list[str]) -> dict[str, Any]:
    options = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"--option: got {pair!r}, wanted name=value, such as lag_size=128")
        options[name.strip()] = value.strip()
    return options


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompt-file: got {path}, wanted a readable UTF-8 text file: {error}") from None


def _note(cache: EvictingCache) -> str | None:
    """Why nothing was removed although compression was asked for."""
    length = cache.get_seq_length()
    from workbench.methods import tokens_to_keep

    asked = tokens_to_keep(length, cache.compression_ratio, cache.budget) < length
    if not asked or cache.tokens_kept < length:
        return None
    assert cache.method is not None
    reason = cache.method.why_nothing_removed(length, cache.options)
    known = ", ".join(f"{name}={value}" for name, value in (cache.method.options | cache.options).items())
    advice = f"; smaller options may help (now {known}): --option name=value" if known else ""
    return f"Nothing was removed: {reason or f'{cache.method.name} chose to keep every token'}{advice}"


from workbench import cli_claims, cli_classroom, cli_eval  # noqa: E402, F401
