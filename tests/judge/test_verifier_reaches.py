"""The verifier passes the reference of every function, here in the process of the test and on few inputs.

tests/classroom/test_verify_reach.py asks it of the process behind walls.
"""

import importlib
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evictionary.classroom import verifier
from evictionary.classroom.assignment import Assignment
from evictionary.classroom.step import Step
from evictionary.spec_tests.judge.domain import Domain
from evictionary.spec_tests.judge.implementation import contract_functions

NOT_HERE = ("cache.heads", "keydiff_theory.transformer_block", "keydiff_theory.attention_policy")
FUNCTIONS = [path for path in contract_functions() if path not in NOT_HERE]
STEP = Step("verify", "MEM-3", "", 0)


class InProcess(verifier.Untrusted):
    """The reference itself in the place of a process."""

    @contextmanager
    def child(self, patience: int = 1, **changes: Any) -> Any:
        module = importlib.import_module(f"evictionary.reference.{self.assignment.stem}")
        yield SimpleNamespace(
            functions=[path.split(".")[1] for path in contract_functions((self.assignment.stem,))],
            call=lambda name, *args, **named: getattr(module, name)(*args, **named),
            remote=SimpleNamespace(gone="", busy=time.process_time),
            notes=set(),
            walls={},
            dtype="",
        )


@pytest.mark.parametrize("path", FUNCTIONS)
def test_the_reference_of_every_function_is_correct(path: str) -> None:
    stem = path.split(".")[0]
    one = Assignment("verify", "", f"{stem}.py", stem, "numpy", Path(), (STEP,))
    # A law of this function asks a state of thousands of tokens, whatever the domain is.
    domain = Domain() if path == "keydiff.process_block" else Domain(max_length=129)
    if stem == "attention_matching":  # a least-squares problem of 129 unknowns takes half a minute
        domain = Domain(max_length=33)
    run = InProcess(
        one, Path(f"{stem}.py"), f"{stem}.py", functions=(path,), examples=1, check_seed=1, domain=domain
    )
    run.ask(STEP, lambda count: None, lambda sentence: None)
    run.reasons.pop("remembered", None)  # of this process nobody else has the processor
    told = verifier.told(run)
    assert (told["correct"], told["laws"]["fail"]) == (True, []), told["verdict"]
    assert "grader::inputs in turn" in told["laws"]["hold"]


def test_what_does_not_travel_is_all_that_is_missing() -> None:
    refused = [path for path in contract_functions() if verifier.does_not_travel(path)]
    assert sorted(refused) == sorted(NOT_HERE)
