"""What the contract says of a function, and the files that a writer of kernels begins with."""

import inspect
import re
import textwrap
import types
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evictionary import source
from evictionary.errors import did_you_mean, require, require_known
from evictionary.store import grouped

if TYPE_CHECKING:
    from evictionary.spec_tests.judge.law import Law

# The functions that a cache calls: a starter file of a method has those of them that the method has.
CALLED = ("score", "select", "compress", "attend", "budgets")


def write(names: Iterable[str], folder: Path, judged: Path | None = None) -> list[Path]:
    """Write a file for each method into a folder: signatures
    and what the functions return, with bodies to be written.

    Args: names, of functions (keydiff.score) or methods (keydiff); judged, what the files say to judge, by
    default each itself. Raises UsageError for an unknown name, and before anything is written over.
    """
    from evictionary.spec_tests.judge.implementation import contract_functions

    known = contract_functions()
    texts: dict[Path, list[dict[str, Any]]] = {}
    for name in names:
        if "." not in name:
            require_known("method", name, dict.fromkeys(path.partition(".")[0] for path in known))
        own = functions_of(name)
        for path in [path for path in own if path.rpartition(".")[2] in CALLED] or own or [name]:
            texts.setdefault(folder / f"{name.partition('.')[0]}.py", []).append(described(path))
    for file in texts:
        require(not file.exists(), f"{file} exists already; it is not written over")
    folder.mkdir(parents=True, exist_ok=True)
    for file, found in texts.items():
        file.write_text(_file(found, judged or file), encoding="utf-8")
    return [*texts]


def functions_of(method: str | None) -> list[str]:
    """The functions of a method, in the contract's order; those of all for None, none for another name."""
    from evictionary.spec_tests.judge.implementation import contract_functions

    return [path for path in contract_functions() if method in (None, path.partition(".")[0])]


def laws_of(path: str) -> "list[Law]":
    """The laws that call a function. Any file of laws may have one, so it takes most of a second."""
    from evictionary.spec_tests.judge.law import load_laws

    return [law for law in load_laws().values() if path in law.functions]


def described(path: str) -> dict[str, Any]:
    """What the contract says of a function. Raises UsageError for a function that it does not have."""
    from evictionary.reference.answers import answers
    from evictionary.reference.contract import contract_of
    from evictionary.spec_tests.judge.arithmetic import EPSILON
    from evictionary.spec_tests.judge.implementation import contract_functions, oracle
    from evictionary.spec_tests.judge.law import REQUIREMENTS
    from evictionary.spec_tests.memory.models import values_in_use
    from evictionary.spec_tests.verdict.coverage import ids_of

    known = contract_functions()
    own = functions_of(path.partition(".")[0])
    wanted = f"one of {', '.join(own)}" if own else "a function such as keydiff.score, or a method"
    stems = {one.partition(".")[0] for one in known}
    near = did_you_mean(path, own or [*known, *stems])
    require(path in known, f"function: got {path!r}, wanted {wanted}{near}")
    function = oracle(path)
    ids = ids_of(function.__doc__) or dict.fromkeys(law.requirement.id for law in laws_of(path))
    said = contract_of(path)
    return {
        "function": path,
        "signature": source.signature(inspect.getsource(function)),
        "says": inspect.getdoc(function) or "",
        "axes": {name: [*each.axes] for name, each in _arrays(said.arguments).items()},
        "kinds": {name: each.kind for name, each in _arrays(said.arguments).items()},
        "answers": {
            name: {"kind": each.kind, "axes": [*each.axes]}
            for name, each in _arrays(filter(None, answers(path))).items()
        },
        "settings": {name: allowed.text for name, allowed in said.settings.items()},
        "values": {name: values for name in said.settings if (values := values_in_use(path, name))},
        "dtypes": list(EPSILON),
        "equations": {name: REQUIREMENTS[name].tex or REQUIREMENTS[name].statement for name in ids},
    }


def _arrays(said: Iterable[Any]) -> dict[str, Any]:
    """Each array that is said, by its name; of a state those of its fields: `cache.keys`."""
    return {array.name: array for each in said for array in (each.fields.values() if each.fields else [each])}


def _file(found: list[dict[str, Any]], judged: Path) -> str:
    from evictionary.spec_tests.judge.implementation import oracle

    needed = {part for each in found for part in _imports(each["signature"], oracle(each["function"]))}
    imports = [
        f"from {module} import {', '.join(sorted(names))}" if module else f"import {', '.join(sorted(names))}"
        for module, names in sorted(grouped(needed).items())
    ]
    bodies = [
        f"{each['signature']}\n"
        + textwrap.indent(f'r"""{each["says"]}\n"""\nraise NotImplementedError\n', "    ")
        for each in found
    ]
    head = f'"""`evictionary judge {judged}` says whether these functions are right."""\n\n'
    return head + "\n".join(imports) + "\n\n\n" + "\n\n".join(bodies)


def _imports(signature: str, function: Any) -> list[tuple[str, str]]:
    """The imports that a signature needs, a module and a name, or no module: NumPy, typing, and classes and
    constants of the reference, but no function of it.
    """
    from evictionary.reference import contract

    found = []
    for name in set(re.findall(r"\b[A-Za-z_]\w*", signature)):
        value = inspect.unwrap(function).__globals__.get(name)
        if isinstance(value, types.ModuleType):
            found.append(("", value.__name__ + f" as {name}" * (value.__name__ != name)))
        elif value is not None and not isinstance(value, types.FunctionType):
            is_notation = value is getattr(contract, name, None)
            own = value.__module__ if is_notation or isinstance(value, type) else function.__module__
            found.append((own, name))
    return found
