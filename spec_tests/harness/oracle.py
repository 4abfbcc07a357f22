"""Who guards the oracle: every planted mistake is made in the implementation and in the reference at once.

A law that only compares the two sees nothing then. What remains are the laws that compute in a way of their own: plain loops, brute
force, an exact fraction, a closed form, an example by hand.
`python -m spec_tests.harness.oracle` lists the mistakes that stay unseen.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from contextlib import contextmanager

from evictionary.spec_tests.harness import tolerance
from evictionary.spec_tests.harness.degenerate import REFUSAL
from evictionary.spec_tests.harness.implementation import ANY
from evictionary.spec_tests.harness.matrix import load_laws, outcome
from evictionary.spec_tests.harness.planted import Mutant, load_mutants


@contextmanager
def wrong_oracle(mutant: Mutant) -> Iterator[None]:
    """The reference with this mistake in it, for every law that asks it."""
    stem, name = mutant.of.split(".")
    module = importlib.import_module(f"evictionary.reference.{stem}")
    right = getattr(module, name)
    setattr(module, name, mutant.function)
    tolerance.forget()
    try:
        yield
    finally:
        setattr(module, name, right)
        tolerance.forget()


def seen_by(mutant: Mutant, max_examples: int) -> str | None:
    """A law that sees the mistake although the oracle makes it too; an empty string where none does.

    None for a mistake that no law of mathematics or of an edge sees beside the right oracle either: it only refuses or accepts.
    """
    laws = [law for law in load_laws().values() if (mutant.of in law.functions or ANY in law.functions) and law.kind != REFUSAL]
    laws.sort(key=lambda law: law.requirement.id != mutant.killed_by)

    def first() -> str:
        for law in laws:
            implementation = mutant.implementation()
            if not law.missing(implementation)[0] and outcome(law, implementation, max_examples=max_examples)[0] == "killed":
                return law.name
        return ""

    with wrong_oracle(mutant):
        found = first()
    return found if found or first() else None


def main() -> None:
    from joblib import Parallel, delayed
    from rich.progress import track

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-examples", type=int, default=60, help="inputs that each law draws (default 60)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--every", type=int, default=1, help="take each so many-th mistake (default 1: all)")
    arguments = parser.parse_args()
    planted = [mutant for mutant in load_mutants().values() if mutant.array_library == "numpy"]
    planted = sorted(planted, key=lambda mutant: mutant.name)[:: arguments.every]
    work = Parallel(n_jobs=arguments.jobs, return_as="generator")(
        delayed(seen_by)(each, arguments.max_examples) for each in planted
    )
    seen = dict(zip(planted, track(work, total=len(planted), description="mistakes"), strict=True))
    unseen = [mutant for mutant, law in seen.items() if law == ""]
    for mutant in unseen:
        print(f"unseen: {mutant.name} of {mutant.of} ({mutant.misconception})")
    numeric = sum(law is not None for law in seen.values())
    print(f"{numeric - len(unseen)} of {numeric} are seen; {len(planted) - numeric} others give no other numbers")
    raise SystemExit(bool(unseen))


if __name__ == "__main__":
    main()
