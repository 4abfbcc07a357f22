"""Laws against mutants: who kills whom. `python -m evictionary.spec_tests.proof.matrix` writes
docs/kill_matrix.json.xz, of which docs/kill_matrix.md is the page.

A mutant is killed only by an assertion of a law. A crash, a hang or a law that found nothing to judge is not
a kill and is counted apart.
"""

import functools
import json
import lzma
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track

from evictionary.progress import tracked
from evictionary.spec_tests.judge.degenerate import EDGE, MATHEMATICS
from evictionary.spec_tests.judge.domain import Domain
from evictionary.spec_tests.judge.implementation import ANY
from evictionary.spec_tests.judge.law import SUITE, Law, law_version, laws_version, load_laws, suite_version
from evictionary.spec_tests.judge.outcome import outcome as at_once
from evictionary.spec_tests.proof.planted import Mutant, load_controls, load_mutants
from evictionary.store import grouped, put

DOCS = Path(__file__).resolve().parents[2] / "docs"
MATRIX = DOCS / "kill_matrix.json.xz"
CONTROLS = DOCS / "controls.json"
POWER = DOCS / "power.json"
outcome = functools.partial(at_once, patience=10)  # a measurement shares the machine with other work
# What docs/power.json lists by name: mistakes that die otherwise than by their own laws.
OTHERWISE = ("another", "crash", "none")


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


def dies(name: str, dtype: str, head_dim: int, max_examples: int) -> str:
    """By what a mutant dies at a dtype, judged as a kernel for so many channels: its "own" law, "another",
    a "crash", or "none".
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
            return "own" if law in own else "another"
        crash |= word == "crashed"
    return "crash" if crash else "none"


@functools.cache
def folder_of(path: str) -> str:
    """The folder of the suite that specifies a function: `lagkv` for `lagkv_variants.score`."""
    folders = (each.parent.name for each in SUITE.glob("*/requirements.toml"))
    return max((name for name in folders if re.match(rf"{name}(_|\.)", path)), key=len, default="shared")


@functools.cache
def by_folder() -> dict[str, list[str]]:
    """The names of the mutants of each folder."""
    return grouped((folder_of(mutant.of), name) for name, mutant in sorted(load_mutants().items()))


def judged(folder: str) -> list[Any]:
    """What a measurement of the mutants of a folder stands for: how many they are, and the laws."""
    return [len(by_folder()[folder]), laws_version(folder)]


def earlier(stored: dict[str, Any]) -> list[str]:
    """The folders whose laws or number of mutants are not those of `stored`, what was judged by folder."""
    return [folder for folder in sorted(by_folder()) if stored.get(folder) != judged(folder)]


def in_processes(jobs: int, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], what: str) -> Any:
    """The results of a function with each of these arguments, computed in several processes."""
    from joblib import Parallel, delayed

    answers = Parallel(n_jobs=jobs, return_as="generator")(delayed(function)(*each) for each in calls)
    return list(tracked(answers, len(calls), what))


def by_each_folder(
    only: list[str], known: dict[str, Any], function: Callable[..., Any], settings: tuple[Any, ...], jobs: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each of some folders, or of those that are not `known` by the laws and mutants of today, with what the
    function says of each mutant. The folder is known then.
    """
    for folder in only or earlier(known):
        names = by_folder()[folder]
        found = in_processes(jobs, function, [(name, *settings) for name in names], folder)
        known[folder] = judged(folder)
        yield folder, dict(zip(names, found, strict=True))


def kill_matrix() -> dict[str, Any]:
    """The stored matrix: of each folder the versions of its mutants and laws, and the rows of its mutants."""
    return dict(json.loads(lzma.decompress(MATRIX.read_bytes())))


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
        "laws": {name: law_version(name, folder) for name in sorted(laws)},
    }


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
    content = kill_matrix() if MATRIX.exists() else {"judged": {}, "mutants": {}, "max_examples": {}}
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
        found = in_processes(jobs, row, calls, f"{folder} ({sum(len(call[2]) for call in calls)} laws)")
        content["mutants"][folder] = dict(zip(by_folder()[folder], found, strict=True))
        content["judged"][folder], content["max_examples"][folder] = now, max_examples
        put(MATRIX, lzma.compress(json.dumps(content, sort_keys=True).encode()))
    survivors = [name for name, outcomes in rows().items() if verdict(name, outcomes) != "killed"]
    print(f"not killed by their own laws: {', '.join(survivors) or 'none'}")
    return len(survivors)


def run_power(dtype: str, head_dim: int, max_examples: int, jobs: int, only: list[str]) -> int:
    """Judge the mutants of some folders at a dtype and a number of channels, or those whose laws or mutants
    have changed since.

    Writes docs/power.json after each folder, and returns how many live.
    """
    content = json.loads(POWER.read_text(encoding="utf-8")) if POWER.exists() else {}
    cell = content.setdefault(f"{dtype} {head_dim}", {"judged": {}} | {word: [] for word in OTHERWISE})
    for _, found in by_each_folder(only, cell["judged"], dies, (dtype, head_dim, max_examples), jobs):
        cell["max_examples"] = max_examples
        for word in OTHERWISE:
            others = [name for name in cell[word] if name in load_mutants() and name not in found]
            cell[word] = sorted(others + [name for name, by in found.items() if by == word])
        put(POWER, json.dumps(content, indent=1) + "\n")
    alive, every = cell["none"], sum(count for count, _ in cell["judged"].values())
    print(
        f"{every - len(alive)} of {every} die in {dtype} with {head_dim} channels; alive: "
        f"{', '.join(alive) or 'none'}"
    )
    return len(alive)


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


def alarms(name: str, dtype: str, seed: int, max_examples: int, bare: bool = False) -> list[str]:
    """The laws that a correct variant fails at one seed,
    each with what it said; none is what they are for.

    bare is the variant as a kernel author writes it: it checks no argument, takes some sizes only, and owes
    the mathematics alone.
    """
    control = load_controls()[name]
    implementation = control.implementation(dtype, bare)
    if bare:
        implementation.domain |= Domain.read(DOMAINS[seed % len(DOMAINS)])
    silent = {"passed", "not asked"} if bare else {"passed"}
    owed = (
        law
        for law in load_laws().values()
        if (control.of in law.functions or law.requirement.id == OF_SIZES)
        if not law.missing(implementation)[0]
        if law.kind == MATHEMATICS or not bare
        if law.kind != EDGE or control.edges
        if not law.examples or not seed % LONG_EVERY
    )
    found = []
    for law in owed:
        word, message = outcome(law, implementation, max_examples=max_examples, seed=seed)
        # Laws of sizes leave out steps, and some functions that take long.
        if word not in silent and not (word == "not asked" and law.requirement.id == OF_SIZES):
            found.append(f"{name} at {dtype}, seed {seed}{', bare' * bare}: {law.name} {word}: {message}")
    return found


def run_controls(seeds: int, max_examples: int, jobs: int, only_new: bool = False) -> int:
    """Run every correct variant over the seeds, as it is and
    bare; print each alarm at once, write docs/controls.json.

    Returns how many alarms there were. Each seed takes one of the dtypes that the variant claims, in turn. A
    run that was stopped goes on with the next seed, unless laws, variants or their number of inputs have
    changed since. Runs with another number of inputs stay stored, and so do all if only_new takes the
    variants that no earlier run had.
    """
    from joblib import Parallel, delayed
    from rich.console import Console

    stored = json.loads(CONTROLS.read_text(encoding="utf-8")) if CONTROLS.exists() else {"sets": []}
    known = {name for one in stored["sets"] for name in one["controls"] if one["seeds"] >= seeds}
    controls = [each for each in sorted(load_controls().items()) if not (only_new and each[0] in known)]
    of = {
        "suite": suite_version(),
        "controls": [name for name, _ in controls],
        "max_examples": max_examples,
        "long_every": LONG_EVERY,
    }
    last = stored["sets"][-1] if stored["sets"] else {}
    goes_on = {name: last.get(name) for name in of} == of
    first, found = (last["seeds"], last["alarms"]) if goes_on else (0, [])
    others = (
        stored["sets"][:-1]
        if goes_on
        else [one for one in stored["sets"] if only_new or one["max_examples"] != max_examples]
    )
    of["mended"] = last.get("mended", []) if goes_on else []  # written by hand
    console = Console()
    with Parallel(n_jobs=jobs, batch_size=4) as parallel:
        for seed in track(range(first, seeds), description=f"seeds from {first}", console=console):
            runs = [
                (name, control.dtypes[seed % len(control.dtypes)], seed, max_examples)
                for name, control in controls
            ]
            both = [delayed(alarms)(*run, bare=bare) for run in runs for bare in (False, True)]
            for line in [line for lines in parallel(both) for line in lines]:
                found.append(line)
                console.print(line, markup=False, soft_wrap=True)
            this = of | {"seeds": seed + 1, "runs": 2 * (seed + 1) * len(controls), "alarms": found}
            # After each seed, and whole: a run that is stopped keeps what it had.
            content = {"schema": "evictionary/controls/3", "sets": [*others, this]}
            put(CONTROLS, json.dumps(content, indent=1) + "\n")
    console.print(
        f"{len(found)} alarms in {seeds} seeds of {len(controls)} correct variants, {max_examples} inputs a "
        "law"
    )
    return bool(found)


def main(
    max_examples: Annotated[
        int | None,
        typer.Option(help="Inputs that each law draws: 30 by default, and 4 for --controls."),
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
        typer.Option(metavar="FOLDER", help="Mistakes of this folder of the suite alone; repeated."),
    ] = None,
    new: Annotated[
        bool, typer.Option("--new", help="With --controls: the variants that no earlier run had.")
    ] = False,
    jobs: Annotated[int, typer.Option(help="Processes.")] = 2,
) -> None:
    """Run planted mistakes against the laws: those whose laws have changed since docs/kill_matrix.json.xz."""
    if unknown := sorted(set(only or []) - set(known := by_folder())):
        raise typer.BadParameter(f"--only: got {unknown[0]!r}, wanted some of {', '.join(known)}")
    if controls:
        raise typer.Exit(run_controls(controls, max_examples or 4, jobs, new))
    if dtype:
        raise typer.Exit(bool(run_power(dtype, head_dim, max_examples or 30, jobs, only or [])))
    raise typer.Exit(bool(run_matrix(max_examples or 30, jobs, only or [])))


if __name__ == "__main__":
    typer.run(main)
