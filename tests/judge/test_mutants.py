"""The laws are measured: every planted mistake dies by its own law, by assertion, and every law is there
for a mistake.
"""

import pytest
from tools import sampled

from evictionary.spec_tests.judge.implementation import ANY
from evictionary.spec_tests.judge.law import REQUIREMENTS, load_laws
from evictionary.spec_tests.judge.outcome import outcome
from evictionary.spec_tests.proof.asking import laws_for
from evictionary.spec_tests.proof.planted import load_mutants

MUTANTS = load_mutants()


# A sample in `make test`, all of them in `make mutants`.
SAMPLED = sampled(sorted(MUTANTS), every=200)


@pytest.mark.parametrize("name", SAMPLED)
def test_every_mutant_dies_by_its_own_law(name: str) -> None:
    mutant = MUTANTS[name]
    own = laws_for(mutant, mutant.killed_by)
    assert own, f"no law of {mutant.killed_by} calls {mutant.of}"
    outcomes = {}
    # Most show in a few inputs. One that does not gets a longer look before it counts as a survivor.
    for max_examples in (8, 100, 1000):
        for law in own:
            outcomes[law.name] = outcome(law, mutant.implementation(), max_examples=max_examples)
            if outcomes[law.name][0] == "killed":
                return
    pytest.fail(f"{name} survives {REQUIREMENTS[mutant.killed_by].id} ({mutant.misconception}): {outcomes}")


SIZES = sorted(name for name, mutant in MUTANTS.items() if mutant.above)


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_every_mutant_of_size_dies_in_bfloat16_too(name: str) -> None:
    """Kernels at real sizes run in half precision, whose tolerance is wide: a law has to draw inputs where
    the mistake is wider.
    """
    mutant, implementation = MUTANTS[name], MUTANTS[name].implementation("bfloat16")
    assert any(
        outcome(law, implementation)[0] == "killed"
        for law in sorted(laws_for(mutant, mutant.killed_by), key=lambda law: not law.examples)
        if not law.missing(implementation)[0]
    )


@pytest.mark.parametrize("name", sampled(SIZES, every=60))
def test_a_mistake_of_size_passes_every_law_of_short_inputs(name: str) -> None:
    """It is right up to its size: only laws that draw long inputs (`examples`) can see it."""
    implementation = MUTANTS[name].implementation()
    short = [
        law for law in laws_for(MUTANTS[name]) if not law.examples and not law.missing(implementation)[0]
    ]
    outcomes = {law.name: outcome(law, implementation, max_examples=20) for law in short}
    assert {law: found for law, found in outcomes.items() if found[0] != "passed"} == {}


JUDGING = sorted(name for name, law in load_laws().items() if law.functions and not law.why)


@pytest.mark.slow
@pytest.mark.parametrize("name", JUDGING)
def test_every_law_kills_a_mutant_or_says_why_it_is_there(name: str) -> None:
    """A law of every seam is tried on the mistakes that are
    planted for it, and these come first for the others.
    """
    law = load_laws()[name]
    own, others = (
        [mutant for mutant in MUTANTS.values() if (mutant.killed_by == law.requirement.id) == is_own]
        for is_own in (True, False)
    )
    candidates = [
        mutant
        for mutant in (*own, *others)
        if mutant.of in law.functions or (ANY in law.functions and mutant in own)
    ]
    found = (
        outcome(law, mutant.implementation(), max_examples=count)[0]
        for count in (8, 100)
        for mutant in candidates
    )
    assert "killed" in found, "kills no mutant"
