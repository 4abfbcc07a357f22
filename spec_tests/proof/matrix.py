"""Laws against mutants: who kills whom. `python -m evictionary.spec_tests.proof.matrix` writes
docs/kill_matrix.json.xz, of which docs/kill_matrix.md is the page.

A mutant is killed only by an assertion of a law. A crash, a hang or a law that found nothing to judge is not
a kill and is counted apart.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from evictionary.spec_tests.judge.law import Law, load_laws
from evictionary.spec_tests.proof.alarms import run_controls
from evictionary.spec_tests.proof.asking import (
    DOCS,
    by_folder,
    in_processes,
    laws_for,
    outcome,
    store,
    stored,
    versions_of,
)
from evictionary.spec_tests.proof.planted import load_mutants
from evictionary.spec_tests.proof.power import run_power
from evictionary.store import grouped

MATRIX = DOCS / "kill_matrix.json.xz"


def row(name: str, max_examples: int, asked: Sequence[str], known: dict[str, str]) -> dict[str, str]:
    """What each law that calls its function says of one mutant, by the name of the law; those that are not
    asked again say what is known.
    """
    mutant = load_mutants()[name]
    implementation = mutant.implementation()
    laws = [law for law in laws_for(mutant) if not law.missing(implementation)[0]]
    outcomes = {
        law.name: known[law.name]
        if law.name in known and law.name not in asked
        else outcome(law, implementation, max_examples=max_examples)[0]
        for law in laws
    }
    mine = [law for law in laws if law.requirement.id == mutant.killed_by]
    if all(outcomes[law.name] == "passed" for law in mine):
        # A mistake that few inputs show gets a longer look before it counts as a survivor, as in the tests.
        outcomes |= {
            law.name: outcome(law, implementation, max_examples=20 * max_examples)[0] for law in mine
        }
    return outcomes


def verdict(name: str, outcomes: dict[str, str]) -> str:
    """What the laws of its own requirement say of a mutant, by its row."""
    laws, killed_by = load_laws(), load_mutants()[name].killed_by
    own = {word for law, word in outcomes.items() if law in laws and laws[law].requirement.id == killed_by}
    return next((word for word in ("killed", "timed out", "crashed") if word in own), "survived")


def kill_matrix() -> dict[str, Any]:
    """The stored matrix: of each folder the versions of its mutants and laws, and the rows of its mutants."""
    return stored(MATRIX) or {"judged": {}, "mutants": {}, "max_examples": {}}


def rows() -> dict[str, dict[str, str]]:
    """The stored row of each mutant that is planted today, in the order of their names."""
    every = {name: row for found in kill_matrix()["mutants"].values() for name, row in found.items()}
    return {name: every[name] for name in sorted(load_mutants()) if name in every}


def what_breaks() -> dict[str, list[tuple[Law, list[str]]]]:
    """Of each folder, in the order of the specification, each law and the mistakes that it sees, in words:
    what an implementation that breaks the law may have done.
    """
    laws, every, found = load_laws(), rows(), {}
    for folder, names in by_folder().items():
        seen = grouped(
            (law, name)
            for name in names
            for law, word in every.get(name, {}).items()
            if word == "killed" and law in laws
        )
        own = sorted(
            map(laws.__getitem__, seen), key=lambda law: (law.path.split("/")[0] != folder, law.place)
        )
        # A mistake that few laws see says most of each.
        seers = {name: list(every.get(name, {}).values()).count("killed") for name in names}
        found[folder] = [
            (
                law,
                [
                    load_mutants()[name].misconception
                    for name in sorted(seen[law.name], key=seers.__getitem__)
                ],
            )
            for law in own
        ]
    return found


def versions(folder: str) -> dict[str, dict[str, str]]:
    """What the rows of a folder are made by: a digest of each of its mutants, and of each law that is asked
    about one of them.
    """
    mutants = [load_mutants()[name] for name in by_folder()[folder]]
    laws = {law.name for mutant in mutants for law in laws_for(mutant)}
    return {
        "mutants": {mutant.name: mutant.version for mutant in mutants},
        "laws": versions_of(laws, mutants[0].of),
    }


def earlier() -> list[str]:
    """The folders whose rows were made by other laws or of other mistakes than those of today."""
    judged = kill_matrix()["judged"]
    return [folder for folder in sorted(by_folder()) if judged.get(folder) != versions(folder)]


def to_ask(name: str, known: dict[str, dict[str, str]], now: dict[str, dict[str, str]]) -> list[str]:
    """The laws of one mutant that are others since its row was made; all, where the mutant is another."""
    laws = [law.name for law in laws_for(load_mutants()[name])]
    if known["mutants"].get(name) != now["mutants"][name]:
        return laws
    return [law for law in laws if known["laws"].get(law) != now["laws"][law]]


NOTHING: dict[str, dict[str, str]] = {"mutants": {}, "laws": {}}


def run_matrix(max_examples: int, jobs: int, only: list[str]) -> int:
    """Judge the mutants of some folders by all laws, or every mutant by the laws that have changed since.

    Writes docs/kill_matrix.json.xz after each folder, and returns how many are not killed.
    """
    content = kill_matrix()
    # Small folders come first, so that a run that is stopped has done most of them.
    for folder in only or sorted(by_folder(), key=lambda folder: len(by_folder()[folder])):
        now, known = versions(folder), NOTHING if only else content["judged"].get(folder, NOTHING)
        if known == now:
            continue
        before = content["mutants"].get(folder, {})
        calls = [
            (name, max_examples, asked, before.get(name, {}))
            for name in by_folder()[folder]
            for asked in [to_ask(name, known, now)]
        ]
        found = list(in_processes(jobs, row, calls, f"{folder} ({sum(len(call[2]) for call in calls)} laws)"))
        content["mutants"][folder] = dict(zip(by_folder()[folder], found, strict=True))
        content["judged"][folder], content["max_examples"][folder] = now, max_examples
        store(MATRIX, content)
    survivors = [name for name, outcomes in rows().items() if verdict(name, outcomes) != "killed"]
    print(f"not killed by their own laws: {', '.join(survivors) or 'none'}")
    return len(survivors)


def main(
    max_examples: Annotated[
        int | None,
        typer.Option(help="Inputs that each law draws: 30 by default, and 2 for --controls."),
    ] = None,
    controls: Annotated[
        int, typer.Option(metavar="SEEDS", help="Run the right variants instead, over this many seeds.")
    ] = 0,
    dtype: Annotated[
        str,
        typer.Option(help="Judge the mistakes at it, with --head-dim, up to the first law that sees them."),
    ] = "",
    head_dim: Annotated[int, typer.Option(help="The channels of that kernel.")] = 64,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="FOLDER", help="This folder of the suite alone; repeated."),
    ] = None,
    jobs: Annotated[int, typer.Option(help="Processes.")] = 2,
) -> None:
    """Run planted mistakes against the laws: those whose laws have changed since docs/kill_matrix.json.xz."""
    if unknown := sorted(set(only or []) - set(known := by_folder())):
        raise typer.BadParameter(f"--only: got {unknown[0]!r}, wanted some of {', '.join(known)}")
    if controls:
        raise typer.Exit(run_controls(controls, max_examples or 2, jobs, only or []))
    if dtype:
        raise typer.Exit(bool(run_power(dtype, head_dim, max_examples or 30, jobs, only or [])))
    raise typer.Exit(bool(run_matrix(max_examples or 30, jobs, only or [])))


if __name__ == "__main__":
    typer.run(main)
