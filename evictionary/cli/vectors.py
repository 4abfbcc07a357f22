"""The commands `evictionary vectors` and `evictionary tasks`: what others read."""

from pathlib import Path
from typing import Annotated

import typer

from evictionary.cli.console import (
    AsJson,
    app,
    examples,
    exit_codes,
    given_names,
    one_of,
    progress,
    require_folder,
    show,
)
from evictionary.errors import require, require_known, usage
from evictionary.progress import doing


@app.command(
    epilog=examples(
        "evictionary vectors --output vectors --method keydiff",
        "evictionary vectors --output half --dtype bfloat16 --domain head_dim=64",
        "evictionary vectors --check vectors",
    )
)
def vectors(
    output: Annotated[
        Path | None, typer.Option(help="The folder for the cases, their schema and vectors.json, the index.")
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Instead: say whether the files of a folder are as its index says."
        ),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option("--method", help="Of these methods only, such as keydiff; by default all."),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="Every input is exact at this dtype, and its tolerance is written: float32, float16 or "
            "bfloat16."
        ),
    ] = "float32",
    domain: Annotated[
        list[str] | None, typer.Option(help="Inputs that your port accepts, as in `judge`: head_dim=64,128.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the test cases as JSON, for implementations that cannot be called from Python.

    A file for each requirement holds inputs, what the reference gives, the error that each dtype allows, and
    which planted mistakes each case catches. All methods take three minutes or so. With --check the exit code
    is 1 where a file has been changed.
    """
    with exit_codes():
        from evictionary.spec_tests.judge.domain import BadDomain, Domain
        from evictionary.spec_tests.verdict import vectors as made

        require(
            (output is None) != (check is None),
            f"--output: got {output} and --check {check}, wanted one of the two",
        )
        if check is not None:
            with usage("--check", ValueError), doing("comparing the files with their index"):
                problems = made.check(check)
        elif output is not None:
            require(
                not output.exists()
                or (output / made.INDEX).is_file()
                or (output.is_dir() and not any(output.iterdir())),
                f"--output: got {output}, which holds other things, wanted a new folder or one of vectors",
            )
            require_folder(output)
            require_known("--dtype", dtype, made.WRITTEN)
            with usage("--domain", BadDomain):
                accepted = Domain.parse(domain or [])
            names = given_names("--method", methods)
            with doing("loading the laws"):
                laws = made.laws_of(names)
                known = dict.fromkeys(law.name.split("::")[0].removeprefix("test_") for law in made.laws_of())
            for name in names or []:
                require_known("--method", name, known)
            with progress() as (plan, advance):
                plan(len(laws) + len({law.requirement.id for law in laws}))
                index = made.write(made.generate(laws, advance, dtype, accepted), output)
    if check is not None:
        told = "\n".join(problems) or f"{check}: every file is as {made.INDEX} says"
        show(as_json, {"folder": str(check), "problems": problems}, [told], soft_wrap=True)
        raise typer.Exit(1 if problems else 0)
    entries = [entry for entry in index["files"].values() if "cases" in entry]
    cases, mistakes = (sum(entry[name] for entry in entries) for name in ("cases", "mistakes"))
    told = (
        f"{cases} cases of {len(entries)} requirements, which catch {mistakes} planted mistakes: "
        f"[bold]{output}[/]"
    )
    show(as_json, index, [told], soft_wrap=True)


FORMS = ("flashinfer-bench", "kernelbench")


@app.command(
    epilog=examples(
        "evictionary tasks my_tasks --format kernelbench",
        "evictionary tasks my_tasks --format flashinfer-bench --dtype bfloat16",
    )
)
def tasks(
    folder: Annotated[Path, typer.Argument(help="Where the files go.")],
    form: Annotated[str, one_of(FORMS, "The benchmark that reads them.", "--format")],
    dtypes: Annotated[
        list[str] | None,
        typer.Option(
            "--dtype", help="That of the keys, values and queries: float32, float16 or bfloat16; repeated."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write functions of the contract as tasks of a benchmark of generated kernels, by default at three
    dtypes; `verify` judges what comes back.

    The reference in a task is the function in NumPy and float64, with what it calls, in a file to read.
    """
    with exit_codes(), doing("writing the tasks"):
        from evictionary.classroom import tasks as made

        for dtype in dtypes or []:
            require_known("--dtype", dtype, made.DTYPES)
        require_folder(folder)
        written = made.write(form, folder, tuple(dtypes or made.DTYPES))
    show(as_json, written, [f"wrote {len(written)} tasks to {folder}"], soft_wrap=True)
