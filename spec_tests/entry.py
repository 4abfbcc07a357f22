"""What pytest loads wherever this package is installed: `--impl` and its companions, for runs that ask
laws and for no other.

`pytest --pyargs evictionary.spec_tests --impl mine` works in any folder. Options such as `--profile` have
common names, so that they exist only where an argument is `--impl`, `--exec`, a path in this folder, or a
folder that holds it.
"""

from pathlib import Path

import pytest

from evictionary import ranges

SUITE = Path(__file__).resolve().parent
PLUGIN = "evictionary.spec_tests.plugin"


def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    asked = any(
        each.split("=")[0] in ("--impl", "--exec") or each.startswith("evictionary.spec_tests")
        for each in args
    )
    here = early_config.invocation_params.dir
    places = [
        (here / each.split("::")[0]).resolve() for each in early_config.known_args_namespace.file_or_dir
    ] or [here]
    asked = asked or (
        early_config.rootpath == SUITE.parent and any(each.startswith("--profile") for each in args)
    )
    asked = asked or (
        not early_config.known_args_namespace.file_or_dir and _asks_its_laws(early_config, args)
    )
    if asked or any(SUITE in (place, *place.parents) or place in SUITE.parents for place in places):
        ranges.warn_of_untried()
        early_config.pluginmanager.import_plugin(PLUGIN)


def _asks_its_laws(config: pytest.Config, args: list[str]) -> bool:
    """Add the laws of the functions that the project's pyproject.toml names; its own tests stay."""
    from evictionary.spec_tests.judge import project

    try:
        found = project.options(config.rootpath / project.FILE)
    except project.BadProject as error:
        raise pytest.UsageError(str(error)) from None
    if found:
        args += [*found, *(config.getini("testpaths") or [str(config.invocation_params.dir)])]
    return bool(found)
