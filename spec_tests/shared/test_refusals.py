"""What does not fit is refused: a law for each function
that checks its arguments, made from its signature.
"""

from collections.abc import Callable

from evictionary.reference.contract import contracts
from evictionary.spec_tests.judge.implementation import STEPS
from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.shared.helpers import refuse, takes
from evictionary.spec_tests.verdict.coverage import ids_of

# Where a function stands for several requirements, the one that its other laws are of.
REQUIREMENT = {
    "ada_kv.select": "AD-1",
    "expected_attention.score": "EA-9",
    "gvote.select": "GV-A11",
    "lagkv.keep_ratio_for": "LK-13",
    "lagkv_theory.attention_weights": "LK-6",
    "momentkv.attend": "MK-12",
    "pyramid_kv.budgets": "PY-1",
    "rope.rotate": "ROPE-2",
}


def said(path: str) -> str:
    """The arrays and the settings of a function, as its signature says them."""
    found = contracts()[path]
    return ", ".join(
        [*map(str, found.arguments), *(f"{name} {own.text}" for name, own in found.settings.items())]
    )


def refusing(path: str) -> Callable[..., None]:
    function = oracle(path)

    def test(impl: Implementation) -> None:
        for wrong in misfits(path):
            if (impl.reads_numbers or not wrong.reads_numbers) and takes(impl, path, wrong.argument):
                refuse(impl, path, wrong)

    test.__name__ = f"test_{path.replace('.', '_')}_refuses_what_does_not_fit"
    test.__doc__ = (
        f"Of `{path}`, an argument whose axes, numbers or range do not fit is refused by its name: "
        f"{said(path)}."
    )
    requirement = REQUIREMENT.get(path) or ids_of(function.__doc__)[-1]
    return law(requirement, of=path, kind="refusal", why="what the contract says is asked of every function")(
        test
    )


for path in sorted(contracts().keys() - STEPS):
    made = refusing(path)
    vars()[made.__name__] = made
