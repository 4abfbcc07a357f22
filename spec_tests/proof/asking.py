"""What every measurement of the laws shares: which laws judge a mistake, which folder of the suite specifies
a function, the version of a law, where results are stored, and processes that ask side by side.
"""

import functools
import json
import lzma
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from evictionary.progress import tracked
from evictionary.spec_tests.judge import garbage
from evictionary.spec_tests.judge.implementation import ANY
from evictionary.spec_tests.judge.law import SUITE, Law, law_version, load_laws
from evictionary.spec_tests.judge.outcome import outcome as at_once
from evictionary.spec_tests.proof.planted import Mutant, load_mutants
from evictionary.store import grouped, put

DOCS = Path(__file__).resolve().parents[2] / "docs"
outcome = functools.partial(at_once, patience=10)  # a measurement shares the machine with other work


def laws_for(mutant: Mutant, requirement: str | None = None) -> list[Law]:
    """The laws that call the mutant's function, of one requirement
    or of all; those of its own requirement come first.
    """
    found = (
        law
        for law in load_laws().values()
        if mutant.of in law.functions or ANY in law.functions
        if requirement in (None, law.requirement.id)
    )
    return sorted(found, key=lambda law: law.requirement.id != mutant.killed_by)


@functools.cache
def folder_of(path: str) -> str:
    """The folder of the suite that specifies a function: `lagkv` for `lagkv_variants.score`."""
    folders = (each.parent.name for each in SUITE.glob("*/requirements.toml"))
    return max((name for name in folders if re.match(rf"{name}(_|\.)", path)), key=len, default="shared")


@functools.cache
def by_folder() -> dict[str, list[str]]:
    """The names of the mutants of each folder."""
    return grouped((folder_of(mutant.of), name) for name, mutant in sorted(load_mutants().items()))


def versions_of(laws: Iterable[str], of: str) -> dict[str, str]:
    """A digest of each of some laws, as they judge what stands in for the function `of`."""
    return {name: law_version(name, folder_of(of)) for name in sorted(laws)}


def stored(path: Path) -> dict[str, Any]:
    """What a measurement has stored in a compressed file; nothing where there is none."""
    return dict(json.loads(lzma.decompress(path.read_bytes()))) if path.exists() else {}


def store(path: Path, content: dict[str, Any]) -> None:
    """Write a compressed file, completely or not at all."""
    put(path, lzma.compress(json.dumps(content, sort_keys=True).encode()))


def in_processes(
    jobs: int, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], what: str
) -> Iterator[Any]:
    """The results of a function with each of these arguments, in their order, computed in processes."""
    from joblib import Parallel, delayed

    answers = Parallel(n_jobs=jobs, return_as="generator")(
        delayed(_when_loaded)(function, *each) for each in calls
    )
    return tracked(answers, len(calls), what)


def _when_loaded(function: Callable[..., Any], *arguments: Any) -> Any:
    _load()
    return function(*arguments)


@functools.cache
def _load() -> None:
    """Load the laws and the mistakes, once a process."""
    load_laws()
    load_mutants()
    garbage.settle()
