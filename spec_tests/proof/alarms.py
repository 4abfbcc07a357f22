"""Right variants against the laws: an alarm is a law that a right program fails.

`python -m evictionary.spec_tests.proof.matrix --controls 200`
writes docs/controls.json.xz, which docs/kill_matrix.md shows.
"""

from typing import Any

from rich.console import Console

from evictionary.spec_tests.judge.degenerate import EDGE, MATHEMATICS
from evictionary.spec_tests.judge.domain import Domain
from evictionary.spec_tests.judge.implementation import CANNOT_HOLD
from evictionary.spec_tests.judge.law import Law, load_laws
from evictionary.spec_tests.proof.asking import (
    DOCS,
    folder_of,
    in_processes,
    outcome,
    store,
    stored,
    versions_of,
)
from evictionary.spec_tests.proof.planted import Control, load_controls
from evictionary.store import grouped

CONTROLS = DOCS / "controls.json.xz"

# What kernel authors accept; a seed takes one of them, in turn.
DOMAINS = (
    {"head_dim": (64, 128)},
    {"head_dim": (128,), "length_multiple_of": 16, "batch": (1,)},
    {"head_dim": (64,), "group": (1, 4, 8), "min_length": 16},
)
# Laws of long inputs take most of the time: they are asked at each so many-th seed. A prime, so that they
# meet every dtype and domain, which seeds take in turn.
LONG_EVERY = 23
# Of the laws of every function a right variant owes these: they are about numbers, the others about memory.
OF_SIZES = "MEM-10"


def owed_by(control: Control) -> list[Law]:
    """The laws that a right variant owes: of its function, and of sizes. Not those of our decisions on
    degenerate inputs, where it says so.
    """
    return [
        law
        for law in load_laws().values()
        if (control.of in law.functions or law.requirement.id == OF_SIZES)
        if law.kind != EDGE or control.edges
    ]


def alarms(
    name: str,
    dtype: str,
    seed: int,
    max_examples: int,
    bare: bool = False,
    asked: list[str] | None = None,
) -> list[tuple[str, str]]:
    """The laws that a correct variant fails at one seed, each with what it said; none is what they are for.

    bare is the variant as a kernel author writes it: it checks no argument, takes some sizes only, and owes
    the mathematics alone. asked: the names of some of its laws, or all.
    """
    control = load_controls()[name]
    implementation = control.implementation(dtype, bare)
    if bare:
        implementation.domain |= Domain.read(DOMAINS[seed % len(DOMAINS)])
    silent = {"passed", "not asked"} if bare else {"passed"}
    found = []
    for law in owed_by(control):
        if asked is not None and law.name not in asked:
            continue
        if law.missing(implementation)[0] or (bare and law.kind != MATHEMATICS):
            continue
        if law.examples and seed % LONG_EVERY:
            continue
        word, message = outcome(law, implementation, max_examples=max_examples, seed=seed)
        # Laws of sizes leave out steps, and some functions that take long.
        is_left_out = law.requirement.id == OF_SIZES or CANNOT_HOLD in message
        if word not in silent and not (word == "not asked" and is_left_out):
            said = f"{name} at {dtype}, seed {seed}{', bare' * bare}: {law.name} {word}: {message}"
            found.append((law.name, said))
    return found


def over_seeds(name: str, seeds: int, max_examples: int, asked: list[str]) -> list[tuple[str, str]]:
    """The alarms of one variant over the seeds, as it is and bare. Each seed takes one of the dtypes that it
    claims, in turn.
    """
    dtypes = load_controls()[name].dtypes
    return [
        each
        for seed in range(seeds)
        for bare in (False, True)
        for each in alarms(name, dtypes[seed % len(dtypes)], seed, max_examples, bare, asked)
    ]


def record(name: str) -> dict[str, Any]:
    """What the alarms of a variant are found by today: a digest of it, and of each law that it owes."""
    control = load_controls()[name]
    return {
        "version": control.version,
        "laws": versions_of([law.name for law in owed_by(control)], control.of),
    }


def to_ask(name: str, found: dict[str, Any] | None, seeds: int, max_examples: int) -> list[str]:
    """The laws of a variant that are not known over so many seeds: all, where the variant is another."""
    now = record(name)
    of = {"version": now["version"], "max_examples": max_examples}
    if found is None or found["seeds"] < seeds or {key: found[key] for key in of} != of:
        return list(now["laws"])
    return [law for law, version in now["laws"].items() if found["laws"].get(law) != version]


def measured() -> dict[str, Any]:
    """What is stored: `variants`, those of today by name, and `mended`, the alarms of earlier laws."""
    content = stored(CONTROLS) or {"variants": {}, "mended": []}
    content["variants"] = {
        name: found for name, found in content["variants"].items() if name in load_controls()
    }
    return content


def earlier() -> list[str]:
    """The folders with a variant that was not judged by the laws of today, at as many seeds as it was."""
    known = measured()["variants"]
    return sorted(
        {
            folder_of(control.of)
            for name, control in load_controls().items()
            if name not in known
            or to_ask(name, known[name], known[name]["seeds"], known[name]["max_examples"])
        }
    )


def run_controls(seeds: int, max_examples: int, jobs: int, only: list[str]) -> int:
    """Judge the right variants of some folders, or of all, over the
    seeds, by the laws that have changed since docs/controls.json.xz.

    Prints each alarm, stores each folder of the suite as it is done, and returns how many alarms there are.
    """
    content, console = measured(), Console()
    folders = grouped((folder_of(control.of), name) for name, control in sorted(load_controls().items()))
    for folder in only or sorted(folders, key=lambda each: len(folders[each])):
        calls = [
            (name, seeds, max_examples, asked)
            for name in folders.get(folder, [])
            if (asked := to_ask(name, content["variants"].get(name), seeds, max_examples))
        ]
        for (name, _, _, asked), found in zip(
            calls, in_processes(jobs, over_seeds, calls, f"{folder}, {seeds} seeds"), strict=True
        ):
            for _, said in found:
                console.print(said, markup=False, soft_wrap=True)
            now, before = record(name), content["variants"].get(name, {"alarms": []})["alarms"]
            kept = [[law, said] for law, said in before if law in now["laws"] and law not in asked]
            content["variants"][name] = now | {
                "seeds": seeds,
                "max_examples": max_examples,
                "alarms": kept + found,
            }
            store(CONTROLS, content)  # after each variant: a run that is stopped keeps what it had
    every = [said for found in content["variants"].values() for _, said in found["alarms"]]
    console.print(
        f"{len(every)} alarms in {seeds} seeds of {len(content['variants'])} right variants, {max_examples} "
        "inputs a law"
    )
    return bool(every)
