"""The inputs of a grading: each law on so many inputs as it asks for, decided by a seed and by nothing else."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.database import InMemoryExampleDatabase

from evictionary.spec_tests.harness.implementation import Implementation
from evictionary.spec_tests.harness.law import Law

BYTES_OF_AN_INPUT = 2**13  # more than the strategies of any law use up


def decided_by(seed: int, law: Law, count: int, *, shrinks: bool = False) -> Law:
    """The law on `count` inputs: the smallest one that it can draw, then inputs made from the bytes of a seeded generator.

    Hypothesis's own search would also draw numbers that stand in the modules which happen to be loaded, so that the hundredth
    student had other inputs than the first. With shrinks, the law fails with the smallest input that Hypothesis finds from the
    first failing one. Raises RuntimeError where the law accepts none of ten times as many inputs.
    """
    if not law.drawn:
        return law

    def check(impl: Implementation) -> None:
        def judged(**inputs: object) -> None:
            law.check(impl, **inputs)

        profile = settings(
            database=InMemoryExampleDatabase(),
            phases=[Phase.reuse, Phase.shrink],
            deadline=None,
            report_multiple_bugs=False,
            print_blob=False,
            suppress_health_check=list(HealthCheck),
        )
        test: Any = profile(given(**law.drawn)(judged))
        generator, accepted = random.Random(seed), 0
        for number in range(10 * count):
            content = generator.randbytes(BYTES_OF_AN_INPUT) if number else bytes(BYTES_OF_AN_INPUT)
            try:
                accepted += test.hypothesis.fuzz_one_input(content) is not None
            except BaseException:
                if shrinks:
                    test()  # finds the failing input in the database, and fails with a smaller one
                raise
            if accepted == count:
                return
        if not accepted:
            raise RuntimeError(f"{law.name}: got no input of {10 * count} that it accepts")

    return replace(law, check=check, drawn={})
