"""Which cases `make test` runs of a long list: some at once, the rest with `make slow`."""

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], every: int) -> list[Any]:
    """Cases for `parametrize`, all but each `every`-th of them marked slow, the first one not; a tuple is
    several arguments.
    """
    apart = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(*case, marks=[pytest.mark.slow] if index % every else [])
        for index, case in enumerate(apart)
    ]
