"""The suite as an instrument: `--impl` names what is judged, the header says what it provides, the end gives the verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from evictionary.spec_tests.harness import report, verdict
from evictionary.spec_tests.harness.arithmetic import EPSILON
from evictionary.spec_tests.harness.implementation import UnusableImplementation, load
from evictionary.spec_tests.harness.law import REQUIREMENTS, Law

PROFILES = {"quick": 4, "student": 25, "default": 50, "thorough": 500}
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
    group.addoption(
        "--require",
        action="append",
        metavar="ID",
        help="fail where this requirement is not provided; `all` for every requirement. May be given several times",
    )
    group.addoption("--report", metavar="FOLDER", help="write conformance.json, junit.xml and badge.json into this folder")
    group.addoption("--profile", default="default", choices=sorted(PROFILES), help="how many inputs a law draws. Default: default")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "law(registered): the law of a requirement, judged for each implementation")
    settings.load_profile(config.getoption("--profile"))
    if (folder := config.getoption("--report")) and not config.option.xmlpath:
        Path(folder).mkdir(parents=True, exist_ok=True)
        config.option.xmlpath = str(Path(folder) / "junit.xml")
    for name in config.getoption("--require") or ():
        if name != "all" and name not in REQUIREMENTS:
            raise pytest.UsageError(f"--require: got {name!r}, wanted 'all' or a requirement such as {next(iter(REQUIREMENTS))}")
    dtypes = _dtypes(config.getoption("--dtype"))
    try:
        config.stash[verdict.JUDGED] = [
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
    return [f"judging {implementation}: {', '.join(implementation.functions())}" for implementation in config.stash[verdict.JUDGED]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "impl" in metafunc.fixturenames:
        judged = metafunc.config.stash[verdict.JUDGED]
        metafunc.parametrize("impl", judged, ids=[f"{one.name}-{one.dtype}" for one in judged], scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the laws that an implementation does not provide for or that do not apply; the verdict says which and why."""
    left_out = []
    for item in items:
        law = law_of(item)
        if law is not None and law.functions:
            word, reason = law.missing(_subject(item))
            if word:
                left_out.append(item)
                entry = (law.requirement.id, str(_subject(item)), word, reason)
                config.stash.setdefault(verdict.LEFT_OUT, []).append(entry)
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
        column = str(_subject(item)) if law.functions else verdict.PAPER
        result.user_properties.append(("law", (law.requirement.id, column, law.name)))
        if law.functions and result.when == "call" and result.failed and call.excinfo is not None:
            result.longrepr = report.sentence(law, _subject(item), call.excinfo.value)
    return result


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    found = verdict.Verdict(terminalreporter, config)
    found.write_table(terminalreporter)
    if folder := config.getoption("--report"):
        found.write_files(Path(folder))
        terminalreporter.write_line(f"wrote conformance.json, junit.xml and badge.json to {folder}")
    for line in found.missing(config.getoption("--require") or []):
        terminalreporter.write_line(line, red=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """`--require` turns what is not provided into a failure."""
    config = session.config
    left_out = config.stash.get(verdict.LEFT_OUT, [])
    if hasattr(config, "workeroutput"):  # a worker of pytest-xdist tells the process that prints the verdict
        config.workeroutput["left_out"] = left_out
    required = config.getoption("--require") or []
    if session.exitstatus == pytest.ExitCode.OK and any(
        word == "not provided" and ("all" in required or name in required) for name, _, word, _ in left_out
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    output = getattr(node, "workeroutput", {})
    node.config.stash.setdefault(verdict.LEFT_OUT, []).extend(tuple(entry) for entry in output.get("left_out", []))
