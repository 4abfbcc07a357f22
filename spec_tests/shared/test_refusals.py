"""What does not fit is refused: a law for each function of `reference/contract.py`, made from its line
there.
"""

import inspect
from collections.abc import Callable

from evictionary.reference.contract import CONTRACT
from evictionary.spec_tests.judge.prelude import *
from evictionary.spec_tests.verdict.coverage import ids_of

# Where a function stands for several requirements, the one that its other laws are of.
REQUIREMENT = {
    "expected_attention.score": "EA-9",
    "gvote.select": "GV-A11",
    "lagkv_theory.attention_weights": "LK-6",
    "momentkv.attend": "MK-12",
    "rope.rotate": "ROPE-2",
}


def takes(impl: Implementation, path: str, argument: str) -> bool:
    """Whether the function has this argument, which older implementations of it may lack."""
    stem, name = path.split(".")
    parameters = inspect.signature(getattr(impl.modules[stem], name)).parameters.values()
    return any(
        each.name == argument or each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL) for each in parameters
    )


def refuse(impl: Implementation, path: str, wrong: Misfit) -> None:
    """Raise Violation unless the call is refused by the name of the argument, or a NaN shows where that is
    enough.
    """
    parameters = inspect.signature(oracle(path)).parameters
    by_name = {
        name: value
        for name, value in wrong.given.items()
        if parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
    }
    by_place = [value for name, value in wrong.given.items() if name not in by_name]
    if not wrong.shows:
        refused(impl, wrong.argument, path, *by_place, **by_name)
        return
    try:
        got = impl.call(path, *by_place, **by_name)
    except Violation:
        raise
    except Exception as error:
        if impl.strict and not isinstance(error, ValueError):
            raise
        return
    require(
        any(
            np.isnan(np.asarray(each, dtype=np.float64)).any()
            for each in (got if isinstance(got, tuple) else [got])
        ),
        f"{wrong.what} passes in silence",
        np.nan,
        got,
    )


def refusing(path: str) -> Callable[..., None]:
    function = oracle(path)

    def test(impl: Implementation) -> None:
        for wrong in misfits(path):
            if (impl.reads_numbers or not wrong.reads_numbers) and takes(impl, path, wrong.argument):
                refuse(impl, path, wrong)

    test.__name__ = f"test_{path.replace('.', '_')}_refuses_what_does_not_fit"
    test.__doc__ = (
        f"Of `{path}`, an argument whose axes or numbers do not fit is refused by its name: {CONTRACT[path]}."
    )
    requirement = REQUIREMENT.get(path) or ids_of(function.__doc__)[-1]
    return law(requirement, of=path, kind="refusal", why="what the contract says is asked of every function")(
        test
    )


for path in CONTRACT:
    made = refusing(path)
    vars()[made.__name__] = made
