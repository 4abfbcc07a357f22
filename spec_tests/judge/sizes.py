"""The sizes that the papers use themselves, between the short inputs of most laws and the long ones: few
channels, one head.
"""

import os
from collections.abc import Iterable, Iterator

from evictionary.spec_tests.judge.cases import Case
from evictionary.spec_tests.judge.domain import OutsideDomain
from evictionary.spec_tests.judge.implementation import Implementation

BUDGETS = (64, 128, 256, 512, 1024)
"""Tokens that a head keeps, of a prompt or while decoding, in the tables of MomentKV and of the papers
that it compares with.
"""


def narrow(
    impl: Implementation, seed: int, lengths: Iterable[int] = BUDGETS, kind: str = "normal", **sizes: int
) -> Iterator[Case]:
    """One case of each length, which costs milliseconds: three batch items, one head, two channels, or
    what the domain has.

    Triton's interpreter takes a second for a millisecond: there the lengths beyond 256 are left out. Raises
    OutsideDomain if all lengths are beyond the domain.
    """
    shape = {"batch": 3, "head_dim": 2, "value_dim": 2} | sizes
    asked = [length for length in lengths if length <= 256 or os.environ.get("TRITON_INTERPRET") != "1"]
    cases = [
        impl.domain.fitted({"case": Case(kind=kind, seed=seed, length=length, **shape)})["case"]
        for length in asked
    ]
    inside = [case for case, length in zip(cases, asked, strict=True) if case.length >= length]
    if asked and not inside:
        raise OutsideDomain(f"lengths from {min(asked)} on lie outside its domain", always=True)
    yield from inside
