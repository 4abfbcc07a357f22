"""Shared by the commands: the app, options, messages, exit codes, progress."""

import functools
import inspect
import itertools
import json
import re
import sys
import tempfile
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from evictionary.errors import (
    InstallError,
    MethodError,
    UsageError,
    did_you_mean,
    require,
    require_known,
    usage,
)
from evictionary.models.loading import DIVISIONS, DTYPES, Loading
from evictionary.progress import console as stderr, doing
from evictionary.store import Shard

if TYPE_CHECKING:
    from evictionary import store
    from evictionary.evaluation.run import ModelPlan

app = typer.Typer(
    help="An executable dictionary of KV-cache eviction: judge an implementation, or run any method inside a "
    "real language model.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
messages, out = stderr, Console(highlight=False)


def reader(kind: Callable[[str], Any], wanted: str, known: Iterable[str] = ()) -> Callable[[str], Any]:
    """What reads an option's value, perhaps one of `known`; typer's message would not have the form "got
    ..., wanted ...".
    """

    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise typer.BadParameter(f"got {text!r}{did_you_mean(text, known)}, wanted {wanted}") from None

    return read


COLUMNS = 74
"""The columns of an example, with which it fits a terminal of 80."""


def examples(*commands: str) -> str:
    """The end of a help text: examples, each on a line. A long one takes several, which a shell joins; an
    option stays beside its value.
    """
    shown = []
    for command in commands:
        lines = [""]
        for part in re.split(r" (?=--)", command):
            if lines[-1].strip() and len(lines[-1]) + len(part) >= COLUMNS:
                lines[-1] += " \\"
                lines.append("   ")
            lines[-1] += f" {part}"
        shown.append("\n".join([lines[0].strip(), *lines[1:]]))
    return f"Example{'s' * (len(shown) > 1)}:\n\n[bold]{escape(chr(10).join(shown))}[/]"


def one_of(names: tuple[str, ...], help: str, *flags: str) -> Any:
    """An option that takes one of some names."""
    return typer.Option(
        *flags,
        parser=reader(lambda text: names[names.index(text)], f"one of {', '.join(names)}", names),
        metavar=f"[{'|'.join(names)}]",
        help=help,
    )


whole, number = reader(int, "a whole number"), reader(float, "a number")


def whole_number(help: str, **named: Any) -> Any:
    """An option that takes a whole number."""
    return typer.Option(parser=whole, metavar="<int>", help=help, **named)


# The names stand here because the tasks import torch, and the help must not wait for torch; a test compares
# the names.
TASKS = (
    "passkey7,passkey64,needle_single,needle_multikey,needle_multivalue,variables,common_words,frequent_words,copy,"
    "perplexity,perplexity_decoding"
)
REAL = (
    "squad,hotpot,essay_single,essay_multikey,essay_multivalue,essay_multiquery,essay_variables,essay_common_words,"
    "essay_frequent_words,code"
)

DaskCluster = Annotated[
    str | None,
    typer.Option(
        help="The address of a Dask scheduler, or 'local' for a cluster of --jobs workers on this machine."
    ),
]
DaskWait = Annotated[
    int,
    typer.Option(
        parser=whole,
        metavar="<seconds>",
        help="How long to wait if the Dask cluster has no worker; a queue such as Slurm's may need hours.",
    ),
]
WAIT = 300
OneShard = Annotated[
    Any,
    typer.Option(
        "--shard",
        parser=reader(Shard.read, "a shard and the number of all, from 1/8 to 8/8"),
        metavar="<k/n>",
        help="Measure one of n parts of the prompts, such as 3/8, into a folder of its own in --output. "
        "`evictionary join` joins them.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")]
ModelName = Annotated[
    str,
    typer.Option(
        "--model", help="A Hugging Face name, a local folder, or 'embedded' for SmolLM2-135M-Instruct."
    ),
]
AS_IT_IS = Loading()
# The options that a command has for a `loading`, and their texts.
LOADING = {
    "device": "The device of the model, such as cpu or cuda:1; by default the first GPU. With --jobs each "
    "process takes the next GPU, unless one is named here.",
    "dtype": f"The type of the model's numbers, one of {', '.join(DTYPES)}; auto is the type of its files "
    "(float32 for 'embedded').",
    "device_map": "Divide a model that outgrows one device among all devices: one of "
    f"{', '.join(DIVISIONS)}, or a JSON file with the device of each module.",
    "revision": "The branch, tag or commit of a Hugging Face name.",
    "attn": "An attention of transformers, such as sdpa, eager or flash_attention_2, instead of the model's "
    "own.",
}


def loads_a_model(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of LOADING in the place of its argument `loading`."""
    signature = inspect.signature(command)
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=getattr(AS_IT_IS, name),
            annotation=Annotated[str | None, typer.Option(help=help, show_default=name == "dtype")],
        )
        for name, help in LOADING.items()
    ]

    @functools.wraps(command)
    def with_options(**given: Any) -> None:
        with exit_codes():
            asked = {name: given.pop(name) for name in LOADING}
            loading = Loading(**asked | {"device_map": _device_map(asked["device_map"])})
        command(**given, loading=loading)

    places = [
        option
        for name, parameter in signature.parameters.items()
        for option in (options if name == "loading" else [parameter])
    ]
    vars(with_options)["__signature__"] = signature.replace(parameters=places)
    return with_options


def _device_map(text: str | None) -> Any:
    """The name of a division, or what a JSON file says of each module."""
    if text is None or not text.endswith(".json"):
        return text
    wanted = 'a JSON file with a device for each module, such as {"model": 0, "lm_head": "cpu"}'
    with usage(f"--device-map: got {text}, wanted {wanted}", json.JSONDecodeError):
        found = json.loads(text_of("--device-map", Path(text)))
    places = list(found.values()) if isinstance(found, dict) else []
    require(
        places and all(isinstance(place, int | str) for place in places),
        f"--device-map: got {text} with {found!r}, wanted {wanted}",
    )
    return found


# What a method is given in a cache.
Ratio = Annotated[
    float | None,
    typer.Option(
        parser=number,
        metavar="<float>",
        help="The fraction of the cache to remove, in [0, 1).",
        show_default="0.5 without --budget",
    ),
]
Budget = Annotated[int | None, whole_number("Tokens to keep in each head, instead of the ratio.")]
Options = Annotated[
    list[str] | None, typer.Option(help="An option of the method, as name=value; may be repeated.")
]
RandomSeed = Annotated[int, whole_number("The seed for methods that draw random numbers.")]


@contextmanager
def exit_codes(stopped: str = "", extra: str = "") -> Iterator[None]:
    """Turn errors into one line and an exit code: 2 for an argument that cannot be used, 1 for a failure,
    130 for Ctrl-C.

    Text that a user's method prints goes to standard error: standard output is for results. `stopped` is the
    advice after Ctrl-C, `extra` the extra that the command needs if a module is missing.
    """
    code = 1
    try:
        with redirect_stdout(sys.stderr):
            yield
        return
    except KeyboardInterrupt:
        told, code = f"[bold red]stopped[/] {stopped}", 130
    except UsageError as error:
        told, code = f"[bold red]usage error[/] {escaped(error)}", 2
    except ModuleNotFoundError as error:
        needed = extra_with(error.name or "")
        if needed is None:
            raise
        told = (
            f"[bold red]failed[/] this command needs {error.name}, which is not installed: install "
            "evictionary with its extra, "
            f"from a clone [bold]pip install 'path/to/the/clone\\[{extra or needed}]'[/]"
        )
    except (MethodError, InstallError, OSError) as error:
        told = f"[bold red]failed[/] {escaped(error)}"
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch is not imported for its name
            raise
        reason = escaped(str(error).partition(" Of the allocated memory")[0])
        less = "--dtype bfloat16, --device-map auto, shorter texts or fewer --jobs need less on a device"
        told = f"[bold red]failed[/] {reason} {less}{f'; {stopped}' if stopped else ''}"
    messages.print(told, soft_wrap=True, highlight=False)
    raise typer.Exit(code)


def show(
    as_json: bool, found: Any, parts: Iterable[Any], *, indent: int | None = 1, soft_wrap: bool = False
) -> None:
    """Print a result as JSON, or its parts for people, one below the other, without those that are empty.

    A string may have markup. A Text is printed as it is, in
    lines of any length; with soft_wrap the strings are too.
    """
    if as_json:
        typer.echo(json.dumps(found, indent=indent))
        return
    for part in filter(None, parts):
        out.print(part, soft_wrap=soft_wrap or isinstance(part, Text))


def plain_table(*columns: str, right: Container[str] = (), **named: Any) -> Table:
    """A table without a frame; what stands in the columns
    `right` ends at their right edge, and is not wrapped.
    """
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title_justify="left", **named)
    for column in columns:
        is_right = column in right
        table.add_column(column, justify="right" if is_right else "left", no_wrap=is_right, overflow="fold")
    return table


def extra_with(module: str) -> str | None:
    """The extra of this distribution that installs a module, or None where no extra does."""
    from packaging.requirements import Requirement

    required = map(Requirement, metadata.requires("evictionary") or [])
    markers = (each.marker for each in required if each.name == module.split(".")[0] and each.marker)
    extras = ((extra, marker) for marker in markers for extra in ("torch", "model", "cluster"))
    return next((extra for extra, marker in extras if marker.evaluate({"extra": extra})), None)


def escaped(error: object) -> str:
    """A text in one line, which Rich prints as it is."""
    return escape(" ".join(str(error).split()))


def names_in(texts: list[str] | None) -> list[str] | None:
    return [name.strip() for name in ",".join(texts or []).split(",") if name.strip()] or None


def options_in(pairs: list[str]) -> dict[str, Any]:
    """The options of a method, from texts name=value. Raises UsageError for another text."""
    parts = [[part.strip() for part in pair.partition("=")] for pair in pairs]
    for pair, (name, equals, _) in zip(pairs, parts, strict=True):
        require(equals and name, f"--option: got {pair!r}, wanted name=value, such as lag_size=128")
    return {name: value for name, _, value in parts}


def text_of(argument: str, path: Path) -> str:
    """The text of a file. Raises UsageError, naming the argument, for one that cannot be read as UTF-8, or
    holds no text.
    """
    with usage(f"{argument}: got {path}, wanted a readable UTF-8 text file", OSError, UnicodeDecodeError):
        text = path.read_text(encoding="utf-8")
    require(text.strip(), f"{argument}: got {path} without text, wanted a text")
    require("\0" not in text, f"{argument}: got {path} with bytes of zero, wanted a text file")
    return text


def ratio_of(compression_ratio: float | None, budget: int | None) -> float:
    """The ratio of a command that may be given a budget instead. Raises UsageError for both, and for one
    that is out of range.
    """
    require(
        compression_ratio is None or budget is None,
        f"--budget: got {budget} and --compression-ratio {compression_ratio}, wanted one of the two",
    )
    ratio = 0.5 if compression_ratio is None else compression_ratio
    require_sizes([ratio], [] if budget is None else [budget])
    return ratio


def require_sizes(ratios: Iterable[float], budgets: Iterable[int] = ()) -> None:
    """Raise UsageError for a fraction to remove or a budget that no cache can have."""
    from evictionary.reference.checks import as_count, as_fraction

    try:
        for ratio in ratios:
            as_fraction("compression_ratio", ratio, closed_high=False)
        for budget in budgets:
            as_count("budget", budget, low=1)
    except ValueError as error:
        raise UsageError(str(error)) from None


def require_usable(
    model: str | None = None, methods: Iterable[str] = (), tasks: Iterable[str] = (), jobs: int = 1
) -> None:
    """Raise UsageError, before torch is imported, for a method, a task, a number of processes or a model
    that cannot be used.
    """
    from evictionary.methods import catalogue
    from evictionary.models.names import require_model

    for method in methods:
        catalogue.parts(method)
    for task in tasks:
        require_known("tasks", task, f"{TASKS},{REAL}".split(","))
    require(jobs >= 1, f"jobs: got {jobs}, wanted at least 1")
    if model is not None:
        require_model(model)


def given_names(argument: str, texts: list[str] | None) -> list[str] | None:
    """The names that an option was given, or None without the option. Raises UsageError for an option
    without any name.
    """
    names = names_in(texts)
    require(not texts or names, f"{argument}: got {','.join(texts or [])!r}, wanted at least one name")
    return names


def numbers_in(argument: str, texts: list[str]) -> list[float]:
    text = ",".join(texts)
    with usage(
        f"{argument}: got {text!r}, wanted numbers with commas between them, such as 0.25,0.5", ValueError
    ):
        return [float(part) for part in text.split(",")]


def tokens_in(argument: str, texts: list[str]) -> list[int]:
    numbers = numbers_in(argument, texts)
    for number in numbers:
        require(number.is_integer(), f"{argument}: got {number}, wanted a whole number of tokens")
    return [int(number) for number in numbers]


def require_writable(output: Path) -> None:
    require(
        not output.is_dir() and can_write_into(output.resolve().parent),
        f"--output: got {output}, wanted a file in a folder that exists and can be written",
    )


def require_seed(seed: int) -> None:
    """Raise UsageError for a seed that no generator takes."""
    require(0 <= seed < 2**31, f"--seed: got {seed}, wanted a whole number from 0 to {2**31 - 1}")


def can_write_into(folder: Path) -> bool:
    """Whether a file can be made in the folder, by making
    one: on some file systems the permissions do not tell.
    """
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def require_folder(output: Path) -> None:
    """Raise UsageError, before hours of work, if the folder `output` cannot be made or written."""
    existing = next(folder for folder in (output.resolve(), *output.resolve().parents) if folder.exists())
    require(can_write_into(existing), f"--output: got {output}, wanted a folder that can be written, or made")


# What every command that needs torch does first.
LIBRARIES = "loading the libraries"


@contextmanager
def progress(text: str = "preparing") -> Iterator[tuple[Callable[[int], None], Callable[[str], None]]]:
    """Progress on stderr, as (plan, advance): the number of steps, then what each step is about to do."""
    with doing(text) as now:
        done, planned = itertools.count(), list[int]()
        yield planned.append, lambda text: now(text, next(done), sum(planned))


@contextmanager
def measuring(first: str = "loading the model") -> "Iterator[Callable[[store.Progress], None]]":
    """Progress on stderr of measurements that are shared out, with the time left."""
    with doing(first) as now:
        yield lambda at: now(at.text, at.done, at.total, left=at.seconds_left)


def carry_out(
    plan: "ModelPlan",
    output: Path,
    jobs: int,
    dask: str | None,
    patience: int,
    shard: Shard | None = None,
    command: str = "",
) -> "list[store.Line]":
    """Measure what the folder lacks of a plan, with progress, and return all its lines; or of a shard of it,
    in a folder of its own. What `jobs` processes do with the GPUs of this machine is said first.
    """
    from evictionary import store
    from evictionary.evaluation import shards

    def tell(text: str) -> None:
        messages.print(text, style="italic", markup=False, soft_wrap=True)

    if dask in (None, "local"):
        plan.loading.require_here()
        if shared := plan.loading.shared_out(jobs):
            tell(shared)
    with measuring() as advance:
        how: dict[str, Any] = {"jobs": jobs, "dask": dask, "patience": patience}
        how |= {"advance": advance, "tell": tell}
        if shard is None:
            return store.run(plan, output, **how)
        return shards.measure(plan, output, shard, command, **how)


def show_shard(as_json: bool, shard: Shard, measurements: int, output: Path, **more: Any) -> None:
    """Say that a shard is measured, where it is, and how the shards are joined."""
    from evictionary.evaluation import shards

    folder = shards.folder_of(output, shard)
    found = {"shard": str(shard), "measurements": measurements, **more, "output": str(folder)}
    told = [
        f"{measurements} measurements of shard {shard}: [bold]{escaped(folder)}[/]",
        f"Once all are there: [bold]evictionary join {escaped(output)}/*-of-{shard.of}[/]",
    ]
    show(as_json, found, told, soft_wrap=True)


def show_failures(failures: Iterable[dict[str, Any]]) -> None:
    """Name each method that failed, on standard error."""
    for failure in failures:
        text = escaped(f"{failure['label']}, {failure['count']} times: {failure['error']}")
        messages.print(f"[bold red]failed[/] {text}", soft_wrap=True, highlight=False)


def missing_walls(without: bool) -> list[str]:
    """The walls that are missing here. Raises UsageError if code could do harm and nobody says `without`."""
    from evictionary.classroom import child

    walls = child.walls_here()
    harm = [f"no {name}: it could {what}" for name, what in child.OPEN.items() if not walls.get(name)]
    if not any(walls.get(name) for name in child.KEEP_FILES):
        harm.append(f"no {' and no '.join(child.KEEP_FILES)}: it could change or delete your files")
    told = f"The code has too few walls around it on this machine ({'; '.join(harm)})."
    require(
        not harm or without,
        f"--without-walls: {told} Nothing was run. Run it in a container of its own "
        "(the page of that name in the documentation), or give --without-walls if there is nothing here to "
        "lose",
    )
    if harm:
        messages.print(told, style="yellow", markup=False)
    return [name for name, stands in walls.items() if not stands]


def mebibytes(nbytes: float) -> str:
    return f"{nbytes / 2**20:.1f}"
