"""How near right variants come to what the laws allow, and which of them say something that no other says.

A variant is there to be a right implementation that a law might fail. Two things bring it near to that: an
error that takes much of its allowance, and an answer other than the reference's where no allowance helps, as
where scores are equal. Both are measured for each variant in each *cell*: a function, a law that calls it,
and a dtype. The variants that are then chosen come near enough to the largest in every cell.

`python -m evictionary.spec_tests.proof.margins` changes nothing that is judged, and deletes nothing.
"""

import contextlib
import functools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import numpy as np
import typer

from evictionary.progress import tracked
from evictionary.spec_tests.judge import compare, tolerance
from evictionary.spec_tests.judge.arithmetic import EPSILON
from evictionary.spec_tests.judge.degenerate import EDGE, MATHEMATICS
from evictionary.spec_tests.judge.domain import OutsideDomain
from evictionary.spec_tests.judge.implementation import Implementation, oracle
from evictionary.spec_tests.judge.law import Law, load_laws
from evictionary.spec_tests.proof.asking import folder_of, outcome
from evictionary.spec_tests.proof.planted import Control, load_controls
from evictionary.store import grouped, put

NEAR = 1.25
"""A share is matched by one that is at most so many times smaller."""

LEAST = 0.05
"""Who uses less of an allowance than this is near to no alarm, and no cell counts it."""


@dataclass(frozen=True)
class Cell:
    """A function, a law that calls it, and a dtype, with what each variant of the function showed there.

    shares: the largest part of its allowance that a variant used. otherwise: the variants that once gave
    another mask, count, integer or shape than the reference.
    """

    function: str
    law: str
    dtype: str
    shares: dict[str, float]
    otherwise: tuple[str, ...]

    def wanted(self) -> list[set[str]]:
        """What a choice of variants has to hold one of: who comes
        near to the largest share, and who answers otherwise.
        """
        largest = max(self.shares.values(), default=0.0)
        near = {name for name, share in self.shares.items() if share * NEAR >= largest >= LEAST}
        return [some for some in (near, set(self.otherwise)) if some]


def cover(cells: Iterable[Cell]) -> list[tuple[str, int]]:
    """The variants chosen of some cells, each with how many wants it meets that none before it met.

    Each time the one that meets the most is taken, of equal ones the first by name.
    """
    wants = [names for cell in cells for names in cell.wanted()]
    chosen = []
    while wants:
        names = sorted(set().union(*wants))
        best = max(names, key=lambda name: sum(name in want for want in wants))
        left = [want for want in wants if best not in want]
        chosen.append((best, len(wants) - len(left)))
        wants = left
    return chosen


@contextlib.contextmanager
def used() -> Iterator[list[float]]:
    """The share of its allowance that each comparison inside used, in the order of the comparisons."""
    found: list[float] = []
    inside = False

    def listening(covers: Callable[..., bool]) -> Callable[..., bool]:
        @functools.wraps(covers)
        def heard(self: tolerance.Allowance, largest: float, mean: float) -> bool:
            nonlocal inside
            if inside:  # an allowance that asks the one that it is made of
                return covers(self, largest, mean)
            inside = True
            try:
                holds = covers(self, largest, mean)
                # the comparison stays as it was where all runs show that the dtype cannot hold the result
                with contextlib.suppress(OutsideDomain):
                    allowed = self.errors()
                    found.append(max(map(part, (largest, mean), allowed)))
                return holds
            finally:
                inside = False

        return heard

    kinds = (tolerance.Allowance, tolerance.Measured, tolerance.OfTwo, tolerance.Wider)
    compare.LISTENERS.append(found)
    try:
        with contextlib.ExitStack() as stack:
            for kind in kinds:
                stack.enter_context(mock.patch.object(kind, "covers", listening(kind.covers)))
            yield found
    finally:
        compare.LISTENERS.remove(found)


def part(error: float, allowed: float) -> float:
    """The share of what is allowed that an error is: that of no error is 0, of nothing too."""
    if error <= 0:
        return 0.0
    return error / allowed if allowed else np.inf


def exact(answer: Any) -> list[tuple[tuple[int, ...], Any]]:
    """What of an answer no allowance is for: every shape, and
    the masks, counts and integers; None stands for real numbers.
    """
    if isinstance(answer, tuple | list):
        return [entry for each in answer for entry in exact(each)]
    array = np.asarray(answer)
    return [(array.shape, None if array.dtype.kind == "f" else array.tolist())]


def listen_to(implementation: Implementation, function: str) -> list[bool]:
    """Listen to the calls of one function: whether each gave another exact answer than the reference."""
    found: list[bool] = []
    call = implementation.call

    def watched(path: str, *args: Any, **kwargs: Any) -> Any:
        answer = call(path, *args, **kwargs)
        latest = implementation.calls[-1]
        own = exact(latest.result)
        if path == function == latest.function and any(value is not None for _, value in own):
            given, named = latest.given
            found.append(own != exact(oracle(function)(*given, **named)))
        return answer

    implementation.call = watched  # type: ignore[method-assign]
    return found


def asked(law: Law, control: Control) -> bool:
    """Whether a law compares numbers or selections of a variant, and the variant owes it."""
    return control.of in law.functions and (law.kind == MATHEMATICS or (law.kind == EDGE and control.edges))


def look(control: Control, law: Law, dtype: str, max_examples: int, seed: int) -> tuple[float, bool]:
    """The largest share that a variant used in one law, and whether it ever answered otherwise."""
    implementation = control.implementation(dtype)
    otherwise = listen_to(implementation, control.of)
    with used() as shares:
        outcome(law, implementation, max_examples=max_examples, seed=seed)
    return max(shares, default=0.0), any(otherwise)


def measure(controls: list[Control], law: Law, dtype: str, max_examples: int, seeds: int) -> Cell:
    """The cell of the variants of one function. They see the same inputs; a law of long ones has one seed."""
    shares, otherwise = {}, []
    for control in controls:
        looks = [
            look(control, law, dtype, max_examples, seed) for seed in range(1 if law.examples else seeds)
        ]
        shares[control.name] = max(share for share, _ in looks)
        otherwise += [control.name] * any(other for _, other in looks)
    return Cell(controls[0].of, law.name, dtype, shares, tuple(otherwise))


def by_folder() -> dict[str, dict[str, list[Control]]]:
    """Of each folder of the suite the functions that have variants, and those."""
    controls = [control for _, control in sorted(load_controls().items())]
    folders = grouped((folder_of(control.of), control) for control in controls)
    return {name: grouped((each.of, each) for each in some) for name, some in sorted(folders.items())}


def cells_of(folder: str, dtypes: list[str], max_examples: int, seeds: int) -> list[Cell]:
    """All cells of a folder, measured."""
    work = [
        (owing, law, dtype)
        for controls in by_folder()[folder].values()
        for law in load_laws().values()
        for dtype in dtypes
        if (
            owing := [
                each
                for each in controls
                if dtype in each.dtypes
                if asked(law, each) and not law.missing(each.implementation(dtype))[0]
            ]
        )
    ]
    cells = (measure(*each, max_examples, seeds) for each in work)
    return list(tracked(cells, len(work), folder))


def report(folder: str, cells: list[Cell]) -> str:
    """What the measurement of a folder says of each variant, in lines."""
    lines = [f"{folder}: {len(cells)} cells"]
    for function, controls in by_folder()[folder].items():
        own = [cell for cell in cells if cell.function == function]
        chosen = dict(cover(own))
        for control in sorted(controls, key=lambda each: -chosen.get(each.name, 0)):
            largest = max((cell.shares.get(control.name, 0.0) for cell in own), default=0.0)
            others = sum(control.name in cell.otherwise for cell in own)
            says = f"meets {chosen[control.name]}" if control.name in chosen else "adds nothing"
            lines.append(
                f"  {control.name}: {says}; at most {largest:.2f} of an allowance, "
                f"another exact answer in {others} of {len(own)} cells"
            )
    return "\n".join(lines)


def main(
    only: Annotated[
        list[str] | None, typer.Option(metavar="FOLDER", help="Variants of this folder alone; repeated.")
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="One of the dtypes alone; repeated.")] = None,
    max_examples: Annotated[int, typer.Option(help="Inputs that each law draws at a seed.")] = 12,
    seeds: Annotated[int, typer.Option(help="Seeds from 0, each with inputs of its own.")] = 2,
    output: Annotated[
        Path | None, typer.Option(help="A JSON file of all cells, written after each folder.")
    ] = None,
) -> None:
    """Say how much of the laws' allowances each right variant uses, and which variants add nothing.

    For example: python -m evictionary.spec_tests.proof.margins --only h2o --seeds 2 --output h2o.json
    """
    for option, given, known in (("--only", only, list(by_folder())), ("--dtype", dtype, list(EPSILON))):
        if unknown := sorted(set(given or []) - set(known)):
            raise typer.BadParameter(f"{option}: got {unknown[0]!r}, wanted some of {', '.join(known)}")
    found = {}
    for folder in only or by_folder():
        cells = cells_of(folder, dtype or list(EPSILON), max_examples, seeds)
        print(report(folder, cells), flush=True)
        found[folder] = [vars(cell) for cell in cells]
        if output:
            content = {"max_examples": max_examples, "seeds": seeds, "cells": found}
            put(output, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
