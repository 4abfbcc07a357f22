"""One law on one implementation: passed, failed by an assertion of the law or by anything else, without an
end, or not asked.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, Phase, seed as with_seed, settings
from hypothesis.errors import Unsatisfiable

from evictionary.spec_tests.judge.domain import NothingToAsk
from evictionary.spec_tests.judge.implementation import Implementation
from evictionary.spec_tests.judge.law import Law

SECONDS = 60


class TimedOut(BaseException):
    """Not an Exception: hypothesis would try the input again."""


@contextmanager
def time_limit(seconds: float, patience: float = 1) -> Iterator[None]:
    """Raise TimedOut in what stands inside if it takes more
    processor time, or `patience` times as long by the clock.
    """

    def stop(*_: Any) -> None:
        raise TimedOut

    limits = {
        signal.SIGPROF: (signal.ITIMER_PROF, seconds),
        signal.SIGALRM: (signal.ITIMER_REAL, patience * seconds),
    }
    previous = {number: signal.signal(number, stop) for number in limits}
    for timer, limit in limits.values():
        signal.setitimer(timer, limit)
    try:
        yield
    finally:
        for number, (timer, _) in limits.items():
            signal.setitimer(timer, 0)
            signal.signal(number, previous[number])


def prepared(law: Law, *, max_examples: int, seed: int | None) -> Callable[..., None]:
    """The test of a law with so many inputs, drawn from a seed or else always the same; it stores nothing."""
    profile = settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        derandomize=seed is None,
        report_multiple_bugs=False,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
        # Where the kill counts and not its smallest form, nothing is shrunk.
        phases=[Phase.explicit, Phase.generate],
    )
    test = law.test(profile)
    return test if seed is None or not law.drawn else with_seed(seed)(test)


def outcome(
    law: Law,
    implementation: Implementation,
    *,
    max_examples: int = 100,
    seed: int | None = None,
    patience: float = 1,
) -> tuple[str, str]:
    """Run one law on one implementation: ("passed" | "killed"
    | "crashed" | "timed out" | "not asked", the message).

    A law is not asked where it has no input that the implementation accepts. More patience keeps a busy
    machine from changing a verdict of code in this process; a call of another process waits as long.
    """
    test = prepared(law, max_examples=max_examples, seed=seed)
    try:
        with time_limit(SECONDS, patience):
            test(impl=implementation)
    except TimedOut:
        return "timed out", f"no verdict within {SECONDS} s"
    except AssertionError as error:
        return "killed", str(error)
    except (NothingToAsk, Unsatisfiable) as error:
        return "not asked", str(error)
    except BaseException as error:
        # pytest.raises reports "did not raise" with an exception of its own, which is an assertion all the
        # same.
        if type(error).__name__ == "Failed":
            return "killed", str(error)
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return "crashed", f"{type(error).__name__}: {error}"
    return "passed", ""
