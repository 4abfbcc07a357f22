"""The suite as an instrument: `--impl` names what is judged, the header says what it provides, the end gives the verdict."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from spec_tests import report
from spec_tests.arithmetic import EPSILON
from spec_tests.implementation import UnusableImplementation, load
from spec_tests.law import Law

PROFILES = {"student": 25, "default": 50, "thorough": 500}
for _name, _examples in PROFILES.items():
    settings.register_profile(
        _name,
        settings.get_profile("ci"),
        max_examples=_examples,
        report_multiple_bugs=False,
        print_blob=False,
        suppress_health_check=[HealthCheck.too_slow],
        # Explaining reruns the shrunk example many times over; the report compares expected and got instead.
        phases=[Phase.explicit, Phase.generate, Phase.target, Phase.shrink],
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("evictionary", "the laws of KV-cache eviction")
    group.addoption(
        "--impl",
        action="append",
        metavar="NAME",
        help="what to judge: a package, a folder of files named as in reference/, or one such file (path/to/keydiff.py). "
        "May be given several times. Default: reference and optimized",
    )
    group.addoption("--device", default="cpu", help="the device that torch implementations run on. Default: cpu")
    group.addoption(
        "--dtype",
        help="comma-separated dtypes to judge at: float64, float32, float16, bfloat16. "
        "Default: float64 for NumPy, float32 for torch",
    )
    group.addoption("--profile", default="default", choices=sorted(PROFILES), help="how many inputs a law draws. Default: default")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "law(registered): the law of a requirement, judged for each implementation")
    settings.load_profile(config.getoption("--profile"))
    dtypes = _dtypes(config.getoption("--dtype"))
    try:
        config.stash[report.JUDGED] = [
            load(target, device=config.getoption("--device"), dtype=dtype)
            for target in config.getoption("--impl") or ("reference", "optimized")
            for dtype in dtypes
        ]
    except UnusableImplementation as error:
        raise pytest.UsageError(f"--impl {error}") from None


def _dtypes(option: str | None) -> list[str | None]:
    if option is None:
        return [None]
    names = option.split(",")
    for name in names:
        if name not in EPSILON:
            raise pytest.UsageError(f"--dtype: got {name!r}, wanted some of {', '.join(EPSILON)}, separated by commas")
    return list(names)


def pytest_report_header(config: pytest.Config) -> list[str]:
    return [f"judging {implementation}: {', '.join(implementation.functions())}" for implementation in config.stash[report.JUDGED]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "impl" in metafunc.fixturenames:
        judged = metafunc.config.stash[report.JUDGED]
        metafunc.parametrize("impl", judged, ids=[f"{one.name}-{one.dtype}" for one in judged], scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the laws of functions that an implementation does not provide; the verdict names them with the reason."""
    left_out = [item for item in items if (law := law_of(item)) and law.functions and _subject(item).missing(law.functions)]
    for item in left_out:
        law = law_of(item)
        assert law is not None
        config.stash.setdefault(report.NOT_PROVIDED, []).append((law, _subject(item), _subject(item).missing(law.functions)))
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def law_of(item: pytest.Item) -> Law | None:
    marker = item.get_closest_marker("law")
    return marker.args[0] if marker else None


def _subject(item: pytest.Item) -> Any:
    return item.callspec.params["impl"]  # type: ignore[attr-defined]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    result = yield
    law = law_of(item)
    if law is not None:
        result.user_properties.append(("law", (law.requirement.id, str(_subject(item)) if law.functions else report.PAPER)))
        if law.functions and result.when == "call" and result.failed and call.excinfo is not None:
            result.longrepr = report.sentence(law, _subject(item), call.excinfo.value)
    return result


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    report.write_verdict(terminalreporter, config)
