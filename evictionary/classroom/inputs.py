"""The inputs of a grading: as many for each law as it asks for; they depend on a seed and on nothing else."""

import random
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.database import InMemoryExampleDatabase
from hypothesis.errors import Flaky

from evictionary.errors import require
from evictionary.spec_tests.judge.domain import NothingToAsk
from evictionary.spec_tests.judge.implementation import Implementation
from evictionary.spec_tests.judge.law import Law

BYTES_OF_AN_INPUT = 2**13  # more than the strategies of any law use up


def decided_by(seed: int, law: Law, count: int, *, shrinks: bool = False) -> Law:
    """Run the law on `count` inputs: the smallest that it can
    draw, then inputs made from the bytes of a seeded generator.

    Hypothesis's own search also draws numbers from the source of loaded modules, so the hundredth student
    would get other inputs than the first. With shrinks, the law fails with the smallest input that Hypothesis
    finds from the first failing one, or with Flaky if that one passes the second time. Raises NothingToAsk if
    the law accepts none of ten times as many inputs.
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
                    test()  # Hypothesis finds the failing input in the database, and fails with a smaller one
                    raise Flaky("the input that failed passes now") from None
                raise
            if accepted == count:
                return
        require(accepted, f"{law.name}: got no input of {10 * count} that it accepts", NothingToAsk)

    return replace(law, check=check, drawn={})
