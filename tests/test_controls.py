"""No false alarms: correct but different implementations pass every law, at every dtype that they claim."""

from __future__ import annotations

from collections import Counter

import pytest

from spec_tests.controls import load_controls
from spec_tests.matrix import load_laws, outcome

CONTROLS = load_controls()
CLAIMS = [(name, dtype) for name, control in sorted(CONTROLS.items()) for dtype in control.dtypes]


@pytest.mark.parametrize(("name", "dtype"), CLAIMS)
def test_no_law_raises_an_alarm_on_a_correct_implementation(name: str, dtype: str) -> None:
    control = CONTROLS[name]
    # A law that also calls other functions gets them from the reference, which does not take torch arrays.
    laws = [
        law
        for law in load_laws().values()
        if control.of in law.functions and (control.array_library == "numpy" or law.functions == (control.of,))
    ]
    assert laws
    alarms = {
        law.name: result for law in laws if (result := outcome(law, control.implementation(dtype), max_examples=60))[0] != "passed"
    }
    assert not alarms


def test_every_method_has_three_controls() -> None:
    stems = Counter(control.of.split(".")[0] for control in CONTROLS.values())
    assert {stem for stem, count in stems.items() if count < 3} == set()
