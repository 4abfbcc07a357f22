"""The command `evictionary verify`."""

import json
import secrets
from pathlib import Path
from typing import Annotated, Any

import typer

from evictionary.cli.console import (
    app,
    examples,
    exit_codes,
    messages,
    missing_walls,
    number,
    progress,
    require_seed,
    whole_number,
)
from evictionary.errors import did_you_mean, require, usage


@app.command(
    epilog=examples(
        "evictionary verify keydiff.py",
        "evictionary verify answer.py --method keydiff.score",
    )
)
def verify(
    file: Annotated[
        Path, typer.Argument(help="A Python file with functions of the contract; it may be hostile.")
    ],
    method: Annotated[
        str | None,
        typer.Option(
            help="The function to judge, such as keydiff.score; by default all that the file has of the "
            "method of its name."
        ),
    ] = None,
    seed: Annotated[
        int | None, whole_number("Draw the inputs of an earlier run again; new ones by default.")
    ] = None,
    examples: Annotated[int, whole_number("How many inputs each law draws.")] = 12,
    timeout: Annotated[
        float, typer.Option(parser=number, metavar="SECONDS", help="How long one call may take.")
    ] = 20.0,
    domain: Annotated[
        list[str] | None,
        typer.Option(
            help="The inputs that it has to accept, as in `evictionary judge`; what the file says does not "
            "count."
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option(help="Edges and refusals count too, not only the mathematics.")
    ] = False,
    device: Annotated[
        str,
        typer.Option(help="`compiled` executes Triton kernels as compiled code, and not in the interpreter."),
    ] = "cpu",
    allow: Annotated[
        str,
        typer.Option(
            metavar="PACKAGES", help="Packages that the file may import too, such as einops,scipy,numba."
        ),
    ] = "",
    without_walls: Annotated[
        bool,
        typer.Option("--without-walls", help="Run the code even if parts of the sandbox are missing here."),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json/--no-json", help="Print JSON on standard output, or only the line for people on stderr."
        ),
    ] = True,
) -> None:
    """Test untrusted code in a sandbox, with fresh inputs. It
    prints one JSON object, and a line for people on stderr.

    The code is run in its own process: without network, files, other programs, and the reference. The
    laws run, the time is taken, and the laws run again. The exit code is 0 if the code is correct, 1 if it is
    not, and 2 if nothing was judged.
    """
    with exit_codes():
        from evictionary.classroom import verifier
        from evictionary.spec_tests.judge.domain import BadDomain, Domain
        from evictionary.spec_tests.judge.implementation import contract_functions

        with usage(f"file: got {file}, wanted a file that can be read", OSError):
            source = file.read_bytes()
        known = contract_functions()
        stems = {path.split(".")[0] for path in known}
        name = method or file.stem
        wanted = f"a function or file of the contract, such as keydiff.score{did_you_mean(name, known)}"
        require(method is None or name in {*known, *stems}, f"--method: got {name!r}, wanted {wanted}")
        require(
            name in {*known, *stems},
            f"file: got {file.name!r}, wanted --method, or a file that has the name of a method",
        )
        require(examples >= 1, f"--examples: got {examples}, wanted at least 1")
        require(timeout > 0, f"--timeout: got {timeout:g}, wanted more than 0 seconds")
        drawn = secrets.randbelow(2**31) if seed is None else seed
        require_seed(drawn)
        require(device in ("cpu", "compiled"), f"--device: got {device!r}, wanted cpu or compiled")
        with usage("--domain", BadDomain):
            accepted = Domain.parse(domain or [])
        missing_walls(without_walls)
        settings: dict[str, Any] = {
            "examples": examples,
            "seconds": timeout,
            "domain": accepted,
            "strict": strict,
            "device": device,
            "allowed": tuple(filter(None, allow.replace(" ", "").split(","))),
        }
        with progress("the reference answers") as (plan, advance):
            functions = (name,) if name in known else ()
            found = verifier.verify(
                source, name.split(".")[0], functions, seed=drawn, plan=plan, advance=advance, **settings
            )
        style = "green" if found["correct"] else "red"
        messages.print(f"{found['verdict']} (seed {drawn})", style=style, markup=False, soft_wrap=True)
    if as_json:
        typer.echo(json.dumps({"file": str(file), **found}, indent=1))
    raise typer.Exit(0 if found["correct"] else 1)
