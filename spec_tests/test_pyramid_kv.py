"""Laws of PyramidKV: PY-1, PY-2."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from evictionary.spec_tests.harness.by_hand import require_equal
from evictionary.spec_tests.harness.law import law
from evictionary.spec_tests.harness.tolerance import Violation

BUDGETS = "pyramid_kv.budgets"
counts: dict[str, Any] = {
    "budget": st.one_of(st.integers(1, 5000), st.integers(1, 2**17)),
    "num_layers": st.integers(1, 100),
    "beta": st.sampled_from([1, 1.5, 2, 14, 20, 100]),
}


@law("PY-2", of=BUDGETS, **counts)
def test_the_total_is_exact(impl, budget, num_layers, beta):
    """The budgets sum to num_layers * budget, and each is at least 1."""
    got = list(impl.pyramid_kv.budgets(budget, num_layers, beta=beta))
    if len(got) != num_layers or sum(got) != num_layers * budget or min(got) < 1:
        raise Violation(f"{len(got)} budgets from {min(got)} on sum to {sum(got)}", num_layers * budget, got)


@law("PY-1", of=BUDGETS, **counts)
def test_budgets_fall_linearly(impl, budget, num_layers, beta):
    """Every budget is within one token of the straight line from 2 b - b/beta to b/beta, and none exceeds the layer before."""
    got = np.array(impl.pyramid_kv.budgets(budget, num_layers, beta=beta), dtype=np.float64)
    last = max(1.0, budget / beta)
    line = np.linspace(2 * budget - last, last, num_layers) if num_layers > 1 else np.array([float(budget)])
    if np.abs(got - line).max() > 1 + 1e-9:
        raise Violation("a budget leaves the straight line by more than a token", line, got)
    if (np.diff(got) > 0).any():
        raise Violation("a deeper layer has a larger budget", line, got)


@law("PY-1", of=BUDGETS)
def test_three_layers_of_ten(impl):
    """Budget 10, three layers, beta 2: 15, 10 and 5, exactly."""
    got = list(impl.pyramid_kv.budgets(10, 3, beta=2))
    require_equal(got, [15, 10, 5], "other budgets")


@law(
    "PY-1", of=BUDGETS, kind="refusal", bad=st.sampled_from([("budget", 0, 4, 2.0), ("num_layers", 4, 0, 2.0), ("beta", 4, 4, 0.5)])
)
def test_bad_settings_are_refused(impl, bad):
    """A budget or a number of layers below 1, and a beta below 1, raise ValueError naming the argument."""
    name, budget, num_layers, beta = bad
    with impl.refuses(name):
        impl.pyramid_kv.budgets(budget, num_layers, beta=beta)
