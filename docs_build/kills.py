"""Measures which planted mistakes the laws of a requirement kill: `python -m docs_build.kills` writes
docs/four_laws.json.

The page docs/four_laws.md shows it. Run it again after a change of these laws or of the mistakes planted in
what they call.
"""

import json

from docs_build.entries import ROOT
from evictionary.spec_tests.judge.outcome import outcome
from evictionary.spec_tests.proof.matrix import laws_for
from evictionary.spec_tests.proof.planted import Mutant, load_mutants
from evictionary.store import grouped

OUTPUT = ROOT / "docs" / "four_laws.json"
SHOWN = ("MK-15", "MK-31", "MK-11", "KD-O", "LK-12", "LK-13")
EXAMPLES = 60


def candidates(identifier: str) -> list[Mutant]:
    """The planted mistakes in the functions that the laws of a requirement call, without those that need
    long inputs to show.
    """
    return [mutant for mutant in load_mutants().values() if not mutant.above and laws_for(mutant, identifier)]


def dies(mutant: Mutant, identifier: str, examples: int = EXAMPLES) -> bool:
    """Whether a law of the requirement kills the mistake; laws of long inputs are not asked."""
    implementation = mutant.implementation()
    own = (
        law for law in laws_for(mutant, identifier) if not law.examples and not law.missing(implementation)[0]
    )
    return any(outcome(law, implementation, max_examples=examples)[0] == "killed" for law in own)


def main() -> None:
    """Write, for each requirement of the page, the names of the planted mistakes that its laws kill, and
    of those they do not.
    """
    found = {}
    for identifier in SHOWN:
        outcomes = grouped((dies(mutant, identifier), mutant.name) for mutant in candidates(identifier))
        names = {"killed": outcomes.get(True, []), "not_seen": outcomes.get(False, [])}
        found[identifier] = names
        print(f"{identifier}: {len(names['killed'])} killed, {len(names['not_seen'])} not seen")
    OUTPUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"Wrote {OUTPUT}.")


if __name__ == "__main__":
    main()
