"""The laws as a kernel meets them: by what each mistake dies at a dtype and a number of channels.

`python -m evictionary.spec_tests.proof.matrix --dtype bfloat16 --head-dim 64` writes docs/power.json.xz, of
which docs/kill_matrix.md is the page.
"""

import hashlib
import math
from typing import Any

from evictionary.spec_tests.judge.domain import Domain
from evictionary.spec_tests.judge.law import load_laws
from evictionary.spec_tests.proof.asking import (
    DOCS,
    by_folder,
    folder_of,
    in_processes,
    laws_for,
    outcome,
    store,
    stored,
    versions_of,
)
from evictionary.spec_tests.proof.planted import load_mutants

POWER = DOCS / "power.json.xz"


def dies(name: str, dtype: str, head_dim: int, max_examples: int) -> tuple[str, str]:
    """By what a mutant dies at a dtype, judged as a kernel for so many channels: its "own" law, "another",
    a "crash", or "none"; and the name of the law that kills it.
    """
    mutant = load_mutants()[name]
    implementation = mutant.implementation(dtype)
    implementation.domain |= Domain.read({"head_dim": (head_dim,)})
    laws = [law for law in laws_for(mutant) if not law.missing(implementation)[0]]
    own = [law for law in laws if law.requirement.id == mutant.killed_by]
    others, crash = [law for law in laws if law not in own], False
    # Most mistakes show in few inputs. One that does not gets a longer look before it counts as alive.
    looks = [(law, more) for some in (own, others) for more in (0.25, 1) for law in some]
    for law, more in looks + [(law, 4) for law in own]:
        word, _ = outcome(law, implementation, max_examples=math.ceil(more * max_examples))
        if word == "killed":
            return "own" if law in own else "another", law.name
        crash |= word == "crashed"
    return "crash" if crash else "none", ""


def found_by(name: str, law: str) -> list[str]:
    """What it stands for that a law kills a mutant, or without a law that none does: the mutant and the law,
    or all of its laws, as they are today.
    """
    mutant = load_mutants()[name]
    laws = [law] if law in load_laws() else [] if law else [each.name for each in laws_for(mutant)]
    versions = versions_of(laws, mutant.of)
    return [mutant.version, hashlib.sha256(repr(versions).encode()).hexdigest()[:16]]


def cells() -> dict[str, dict[str, Any]]:
    """What is stored of each dtype and number of channels (`bfloat16 64`): by what each mutant dies."""
    return stored(POWER)


def names(cell: dict[str, Any], word: str) -> list[str]:
    """The mutants that are planted today and die by "own", "another", a "crash" or "none"."""
    return [
        name for name, found in cell["mutants"].items() if found["dies"] == word and name in load_mutants()
    ]


def earlier(cell: dict[str, Any]) -> list[str]:
    """The mutants whose death was measured by other laws than today's, or not at all."""
    known = {name: found for name, found in cell["mutants"].items() if name in load_mutants()}
    today = {name for name, found in known.items() if found["by"] == found_by(name, found["law"])}
    return [name for name in load_mutants() if name not in today]


def folders_of(mutants: list[str]) -> list[str]:
    """The folders that specify the functions of some mutants."""
    return sorted({folder_of(load_mutants()[name].of) for name in mutants})


def run_power(dtype: str, head_dim: int, max_examples: int, jobs: int, only: list[str]) -> int:
    """Judge the mutants of some folders at a dtype and a number of channels, or those whose death was
    measured by other laws.

    Writes docs/power.json.xz after each folder, and returns how many live.
    """
    content = stored(POWER)
    cell = content.setdefault(f"{dtype} {head_dim}", {"mutants": {}})
    cell["max_examples"] = max_examples
    stale = set(earlier(cell))
    for folder in only or sorted(by_folder(), key=lambda folder: len(by_folder()[folder])):
        asked = [name for name in by_folder()[folder] if only or name in stale]
        calls = [(name, dtype, head_dim, max_examples) for name in asked]
        for name, (word, law) in zip(asked, in_processes(jobs, dies, calls, folder), strict=True):
            cell["mutants"][name] = {"dies": word, "law": law, "by": found_by(name, law)}
        store(POWER, content)
    alive, every = names(cell, "none"), len(cell["mutants"])
    print(
        f"{every - len(alive)} of {every} die in {dtype} with {head_dim} channels; alive: "
        f"{', '.join(alive) or 'none'}"
    )
    return len(alive)
