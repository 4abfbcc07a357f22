"""The commands `evictionary contract` and `evictionary new`: what a function takes and gives, and a file
to begin with.
"""

import ast
import inspect
import re
import textwrap
import types
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from evictionary.cli.console import AsJson, exit_codes, messages, show
from evictionary.errors import UsageError, did_you_mean, require

app = typer.Typer()
AXES = {
    "B": "batch",
    "H_kv": "key-value heads",
    "H_q": "query heads",
    "T": "tokens",
    "M": "queries",
    "D": "channels of a key",
    "D_v": "channels of a value",
    "L": "tokens of a partition",
}


def described(path: str) -> dict[str, Any]:
    """What the contract says of a function. Raises UsageError for a function that it does not have."""
    from evictionary.reference.contract import CONTRACT, arguments
    from evictionary.spec_tests.judge.arithmetic import EPSILON
    from evictionary.spec_tests.judge.implementation import contract_functions, oracle
    from evictionary.spec_tests.judge.law import REQUIREMENTS, load_laws
    from evictionary.spec_tests.verdict.coverage import ids_of

    known = contract_functions()
    require(
        path in known,
        f"function: got {path!r}, wanted a function such as keydiff.score{did_you_mean(path, known)}",
    )
    function = oracle(path)
    laws = [law for law in load_laws().values() if path in law.functions]
    ids = ids_of(function.__doc__) or dict.fromkeys(law.requirement.id for law in laws)
    listed = arguments(path) if path in CONTRACT else ()
    return {
        "function": path,
        "signature": _signature(function),
        "says": inspect.getdoc(function) or "",
        "axes": {each.name: [*each.axes] for each in listed if each.axes},
        "dtypes": list(EPSILON),
        "equations": {name: REQUIREMENTS[name].tex or REQUIREMENTS[name].statement for name in ids},
        "laws": len(laws),
    }


def _signature(function: Any) -> str:
    """The lines of a function from `def` to the colon, as its file has them."""
    source = inspect.getsource(function)
    (node,) = ast.parse(source).body
    return "\n".join(source.splitlines()[node.lineno - 1 : node.body[0].lineno - 1])  # type: ignore[attr-defined]


@app.command(
    epilog="Examples: [bold]evictionary contract[/]   [bold]evictionary contract keydiff.score --json[/]"
)
def contract(
    function: Annotated[
        str | None, typer.Argument(show_default=False, help="Such as keydiff.score; without it, a list.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print what a function takes and gives: signature, axes, dtypes, equations, number of laws (property
    tests).
    """
    with exit_codes():
        from evictionary.spec_tests.judge.implementation import contract_functions

        found = described(function) if function else {}
    if not function:
        show(as_json, known := contract_functions(), map(Text, known))
        return
    named = {axis: AXES[axis] for axes in found["axes"].values() for axis in axes if axis in AXES}
    lines = [
        *(found["signature"], "", found["says"], ""),
        *(f"{name}: [{', '.join(axes)}]" for name, axes in found["axes"].items()),
        *(["axes: " + ", ".join(f"{axis} {meaning}" for axis, meaning in named.items())] if named else []),
        *(f"{name}: {text}" for name, text in found["equations"].items()),
        f"dtypes: {', '.join(found['dtypes'])}",
        f"{found['laws']} laws",
    ]
    show(as_json, found, [Text("\n".join(lines))])


@app.command(epilog="Example: [bold]evictionary new keydiff.score lagkv.score --folder my_kernels[/]")
def new(
    functions: Annotated[
        list[str], typer.Argument(help="The functions that you want to write, such as keydiff.score.")
    ],
    folder: Annotated[Path, typer.Option(help="Where the files go.")] = Path("my_kernels"),
) -> None:
    """Write a folder with a file for each method: the signatures are right, and you write the bodies."""
    with exit_codes():
        texts: dict[str, list[dict[str, Any]]] = {}
        for each in functions:
            texts.setdefault(f"{each.split('.')[0]}.py", []).append(described(each))
        if there := [name for name in texts if (folder / name).exists()]:
            raise UsageError(f"--folder: {folder / there[0]} exists; it is not written over")
        folder.mkdir(parents=True, exist_ok=True)
        for name, found in texts.items():
            (folder / name).write_text(_file(found, folder), encoding="utf-8")
            messages.print(
                f"wrote {folder / name}: write the body, then run evictionary judge {folder}", highlight=False
            )


def _file(found: list[dict[str, Any]], folder: Path) -> str:
    from evictionary.spec_tests.judge.implementation import oracle

    imports = sorted(
        {line for each in found for line in _imports(each["signature"], oracle(each["function"]))}
    )
    bodies = [
        f"{each['signature']}\n"
        + textwrap.indent(f'r"""{each["says"]}\n"""\nraise NotImplementedError\n', "    ")
        for each in found
    ]
    head = f'"""`evictionary judge {folder}` says whether these functions are right."""\n\n'
    return head + "\n".join(imports) + "\n\n\n" + "\n\n".join(bodies)


def _imports(signature: str, function: Any) -> list[str]:
    """The imports that a signature needs: NumPy, typing, and classes and constants of the reference."""
    found = []
    for name in set(re.findall(r"\b[A-Za-z_]\w*", signature)):
        value = function.__globals__.get(name)
        if isinstance(value, types.ModuleType):
            found.append(f"import {value.__name__}" + f" as {name}" * (value.__name__ != name))
        elif value is not None:
            found.append(f"from {function.__module__} import {name}")
    return found
