"""Laws against mutants: who kills whom. `python -m spec_tests.matrix` writes the whole matrix as JSON and as a page.

A mutant is killed only by an assertion of a law. A crash, a hang or a law that found nothing to judge is not a kill and is counted
apart.
"""

from __future__ import annotations

import importlib
import pkgutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as with_seed

import spec_tests
from spec_tests.implementation import ANY, Implementation
from spec_tests.law import LAWS, Law
from spec_tests.mutants import Mutant

SECONDS = 60


class _TimedOut(Exception):
    pass


@contextmanager
def _time_limit(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise _TimedOut

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def load_laws() -> dict[str, Law]:
    """Import every `test_*.py` beside this file and return the laws by name."""
    for module in pkgutil.iter_modules(spec_tests.__path__):
        if module.name.startswith("test_"):
            importlib.import_module(f"spec_tests.{module.name}")
    return LAWS


def outcome(law: Law, implementation: Implementation, *, max_examples: int = 100, seed: int | None = None) -> tuple[str, str]:
    """Run one law on one implementation: ("passed" | "killed" | "crashed" | "timed out", the message)."""
    test = law.test()
    profile = settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        derandomize=seed is None,
        report_multiple_bugs=False,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],  # the kill counts, not its smallest form
    )
    if law.drawn:
        test = profile(test)
        test = test if seed is None else with_seed(seed)(test)
    try:
        with _time_limit(SECONDS):
            test(impl=implementation)
    except _TimedOut:
        return "timed out", f"no verdict within {SECONDS} s"
    except AssertionError as error:
        return "killed", str(error)
    except BaseException as error:
        # pytest.raises reports "did not raise" with an exception of its own, which is an assertion all the same.
        if type(error).__name__ == "Failed":
            return "killed", str(error)
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return "crashed", f"{type(error).__name__}: {error}"
    return "passed", ""


def laws_for(mutant: Mutant, requirement: str | None = None) -> list[Law]:
    """The laws that call the mutant's function, of one requirement or of all; those of its own requirement come first."""
    found = [law for law in load_laws().values() if mutant.of in law.functions or ANY in law.functions]
    found = [law for law in found if requirement is None or law.requirement.id == requirement]
    return sorted(found, key=lambda law: law.requirement.id != mutant.killed_by)
