"""No false alarms: correct but different implementations pass every law, at every dtype that they claim."""

from __future__ import annotations

import importlib
from collections import Counter

import pytest
from sampling import sampled

from evictionary.spec_tests.harness.implementation import STEMS
from evictionary.spec_tests.harness.matrix import alarms
from evictionary.spec_tests.harness.planted import load_controls

CONTROLS = load_controls()
EXAMPLES = 12
# One dtype of each here, the last that it claims; `make measure` takes all of them over 200 seeds.
CLAIMS = [(name, control.dtypes[-1]) for name, control in sorted(CONTROLS.items())]


# A sample at every run, all of them in `make test-all`.
SAMPLED = sampled(CLAIMS, every=40)


@pytest.mark.parametrize(("name", "dtype"), SAMPLED)
def test_no_law_raises_an_alarm_on_a_correct_implementation(name: str, dtype: str) -> None:
    assert alarms(name, dtype, seed=0, max_examples=EXAMPLES) == []


def test_every_method_has_three_controls() -> None:
    methods = {stem for stem in STEMS if hasattr(importlib.import_module(f"evictionary.reference.{stem}"), "METHOD")}
    counts = Counter(control.of.split(".")[0] for control in CONTROLS.values())
    assert {stem for stem in methods if counts[stem] < 3} == set()
