"""The suite as an instrument: `--impl` names what is judged, the header says what it provides, the end
gives the verdict.
"""

import importlib
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.errors import Unsatisfiable

from evictionary.errors import did_you_mean
from evictionary.spec_tests.judge import compiled, garbage, project
from evictionary.spec_tests.judge.apart import described
from evictionary.spec_tests.judge.arithmetic import EPSILON
from evictionary.spec_tests.judge.domain import BadDomain, Domain, NothingToAsk
from evictionary.spec_tests.judge.implementation import (
    ANY,
    CANNOT_HOLD,
    NO_GPU,
    OWN,
    UnusableImplementation,
    load_each,
)
from evictionary.spec_tests.judge.law import REQUIREMENTS, SUITE, Law, load_laws
from evictionary.spec_tests.judge.process import PREFIX, SECONDS, close_all
from evictionary.spec_tests.judge.watch import WATCH, Deaths
from evictionary.spec_tests.verdict import report, verdict

WITHOUT_A_GPU = "Triton kernels are judged without one by TRITON_INTERPRET=1 or --device compiled"
EXPECTED = pytest.StashKey[dict[str, str]]()
DEATHS = pytest.StashKey[Deaths]()
CHOSEN = pytest.StashKey[list[str]]()
for _name, _examples in project.PROFILES.items():
    settings.register_profile(
        _name,
        settings.get_profile("ci"),
        max_examples=_examples,
        report_multiple_bugs=False,
        print_blob=False,
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.filter_too_much,
            HealthCheck.large_base_example,
        ],
        # Explaining reruns the shrunk example many times over; the report compares expected and got instead.
        phases=[Phase.explicit, Phase.generate, Phase.target, Phase.shrink],
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("evictionary", "the laws of KV-cache eviction")
    group.addoption(
        "--impl",
        action="append",
        metavar="NAME",
        help="what to judge: a package, a folder of files named as in reference/, or one such file "
        "(path/to/keydiff.py). "
        "May be given several times. Default: reference and optimized",
    )
    group.addoption(
        "--exec",
        action="append",
        default=[],
        metavar="COMMAND",
        help="judge a program in any language, started by this command line (docs/any_language.md); --impl "
        "'exec:COMMAND' says the "
        "same. May be given several times",
    )
    group.addoption(
        "--call-timeout",
        type=float,
        metavar="SECONDS",
        help=f"for each call of a function or a program. Default: {SECONDS:g}, and {compiled.SECONDS:g} with "
        f"--device {compiled.DEVICE}",
    )
    group.addoption(
        "--device",
        default="cpu",
        help="the device that torch implementations run on, or `compiled`: kernels run as Triton compiles "
        "them, without a GPU "
        "(docs/compiled.md). Default: cpu",
    )
    group.addoption(
        "--dtype",
        help="comma-separated dtypes to judge at: float64, float32, float16, bfloat16. "
        "Default: float64 for NumPy, float32 for torch",
    )
    group.addoption(
        "--domain",
        action="append",
        default=[],
        metavar="KEY=VALUES",
        help="what the implementation accepts, beside its own DOMAIN: head_dim=64,128 (also value_dim, "
        "group, lag_size, batch, "
        "dtype, min_length, max_length, length_multiple_of). May be given several times",
    )
    group.addoption(
        "--method",
        action="append",
        default=[],
        metavar="NAME",
        help="ask laws of memory of this method's functions only",
    )
    # pytest has a --strict of its own, which asks for all of pytest's checks; here it asks for all classes of
    # law besides.
    group.addoption(
        "--brief", action="store_true", help="a summary and the first failure, in place of everything"
    )
    group.addoption(
        "--expected-failures",
        metavar="FILE",
        help="lines of a requirement's id, or of a law's name, and a reason: they may fail",
    )
    group.addoption(
        "--require",
        action="append",
        metavar="ID",
        help="fail where this requirement is not provided; `all` for every requirement. May be given several "
        "times",
    )
    group.addoption(
        "--report", metavar="FOLDER", help="write conformance.json, junit.xml and badge.json into this folder"
    )
    group.addoption(
        "--profile",
        default="default",
        choices=sorted(project.PROFILES),
        help="how many inputs a law draws. Default: default",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "law(registered): the law of a requirement, judged for each implementation"
    )
    settings.load_profile(config.getoption("--profile"))
    if (folder := config.getoption("--report")) and not config.option.xmlpath:
        Path(folder).mkdir(parents=True, exist_ok=True)
        config.option.xmlpath = str(Path(folder) / "junit.xml")
    for name in config.getoption("--require") or ():
        if name != "all" and name not in REQUIREMENTS:
            raise pytest.UsageError(
                f"--require: got {name!r}, wanted 'all' or a requirement such as {next(iter(REQUIREMENTS))}"
            )
    config.option.impl = [
        *(config.getoption("--impl") or ()),
        *(PREFIX + command for command in config.getoption("--exec")),
    ]
    config.option.exec = []  # a worker of pytest-xdist gets the options as they are left here
    if config.option.call_timeout is None:
        config.option.call_timeout = _usual_seconds(config)
    if not config.getoption("--impl"):
        config.option.strict, config.option.impl = True, ["reference", "optimized"]
    if config.getoption("--brief"):
        # What pytest says at the end. With --no-summary, pytest 8 would not ask for the verdict either.
        config.option.tbstyle, config.option.reportchars, config.option.disable_warnings = "no", "", True
    report.ASKED[:] = _asked(config)
    if not _told_later(config):
        _load(config)


def _told_later(config: pytest.Config) -> bool:
    """Whether the process that tells the verdict loads what is judged beside its workers, and not before
    them: what is of this package, where nothing is said of it at the start.
    """
    workers = getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput")
    own = all(target.split(".")[0] in OWN for target in config.getoption("--impl"))
    return bool(workers and own and config.getoption("no_header"))


def _load(config: pytest.Config) -> None:
    """Load what is judged. Raises UsageError where nothing can be judged."""
    dtypes = _dtypes(config.getoption("--dtype"))
    try:
        domain = Domain.parse(config.getoption("--domain"))
        where = {
            "device": config.getoption("--device"),
            "seconds": (seconds := config.getoption("--call-timeout")),
            "methods": tuple(config.getoption("--method")),
        }
        foreign = [target for target in config.getoption("--impl") if target.split(".")[0] not in OWN]
        apart = bool(foreign) and not hasattr(config, "workerinput") and _work_apart(config)
        if apart:
            config.stash[DEATHS] = Deaths()
        elif foreign and not hasattr(config, "workerinput"):
            WATCH.begin(seconds)
        elsewhere = [target for target in foreign if apart and not target.startswith(PREFIX)]
        config.stash[verdict.JUDGED] = [
            each
            for target in config.getoption("--impl")
            for each in (described if target in elsewhere else load_each)(target, dtypes, domain, **where)
        ]
        for each in config.stash[verdict.JUDGED]:
            each.strict = config.getoption("strict")
        path = config.getoption("--expected-failures")
        config.stash[EXPECTED] = verdict.read_expected(Path(path)) if path else {}
        if any(each.domain.excludes_small for each in config.stash[verdict.JUDGED]):
            # What must be large does not shrink to something that a person checks by hand: the time goes into
            # other inputs.
            settings.register_profile(
                "large",
                settings.get_profile(config.getoption("--profile")),
                phases=[Phase.explicit, Phase.generate],
            )
            settings.load_profile("large")
    except UnusableImplementation as error:
        raise pytest.UsageError(str(error)) from None
    except BadDomain as error:
        raise pytest.UsageError(f"--domain {error}") from None
    except (OSError, UnicodeDecodeError, verdict.BadExpectation) as error:
        raise pytest.UsageError(f"--expected-failures {error}") from None


def _work_apart(config: pytest.Config) -> bool:
    """Whether workers of pytest-xdist ask the laws; where nothing is said of processes, one is made to."""
    options = config.option
    if options.impl[0].endswith(project.FILE) and not getattr(options, "numprocesses", None):
        return False  # a project's own tests run where they always run
    if not hasattr(options, "numprocesses") or options.usepdb or options.trace or options.collectonly:
        return False
    if options.numprocesses is None and options.dist == "no":
        options.numprocesses, options.tx, options.dist = 1, ["popen"], "load"
    options.maxworkerrestart = options.maxworkerrestart or "20"
    return options.dist != "no"


def _dtypes(option: str | None) -> list[str | None]:
    if option is None:
        return [None]
    names = option.split(",")
    for name in names:
        if name not in EPSILON:
            # float8 is no slip for float64: a name is meant where its digits are, in any order
            alike = [each for each in EPSILON if sorted(_digits(each)) == sorted(_digits(name))]
            raise pytest.UsageError(
                f"--dtype: got {name!r}{did_you_mean(name, alike)}, wanted some of {', '.join(EPSILON)}, "
                "separated by commas"
            )
    return list(names)


def _digits(name: str) -> str:
    return "".join(filter(str.isdigit, name))


def _usual_seconds(config: pytest.Config) -> float:
    return compiled.SECONDS if config.getoption("--device") == compiled.DEVICE else SECONDS


def _asked(config: pytest.Config) -> list[str]:
    """The options that are not the default, as `evictionary judge` names them."""
    usual = {"device": "cpu", "dtype": None, "profile": "default", "call-timeout": _usual_seconds(config)}
    given = [(name, each) for name in usual if (each := config.getoption(f"--{name}")) != usual[name]]
    given += [(name, each) for name in ("domain", "method") for each in config.getoption(f"--{name}")]
    options = [f"--{name.removeprefix('call-')} {shlex.quote(str(each))}" for name, each in given]
    return options + ["--strict"] * bool(config.getoption("strict"))


def pytest_unconfigure() -> None:
    close_all()
    garbage.unsettle()


@pytest.hookimpl(wrapper=True)
def pytest_sessionstart(session: pytest.Session) -> Any:
    """A worker of pytest-xdist watches the calls that it makes; now, since pytest has turned its own dump
    of a crash on. While the workers of this process begin, it loads what they judge.
    """
    plugins = session.config.pluginmanager
    if session.config.getoption("--brief") and (workers := plugins.getplugin("terminaldistreporter")):
        # nobody asked how many workers there are, nor for an empty line where they begin
        plugins.unregister(workers)
        plugins.getplugin("dsession").terminal = None
    worker = getattr(session.config, "workerinput", {})
    if found := worker.get("deaths"):
        WATCH.begin(session.config.getoption("--call-timeout"), Path(found), worker["workerid"])
    result = yield
    if verdict.JUDGED not in session.config.stash:
        _load(session.config)
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    if DEATHS in node.config.stash:
        node.workerinput["deaths"] = str(node.config.stash[DEATHS].folder)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    node.config.stash[CHOSEN] = list(ids)
    load_laws()  # while the workers ask: the verdict tells of them


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[CHOSEN] = [item.nodeid for item in session.items]
    garbage.settle()


def pytest_runtest_call(item: pytest.Item) -> None:
    compiled.forget()
    if (law := law_of(item)) is not None and law.functions:
        WATCH.require_alive(str(_subject(item)), law.functions)


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: Any, sched: Any) -> None:
    """What pytest-xdist reports as a crash of its worker is a law that has failed."""
    config = sched.config
    law, subject = _asked_by(config, crashitem)
    if law is not None and DEATHS in config.stash:
        _fail(report, law, subject, *config.stash[DEATHS].told(report.node, str(subject)))


def _asked_by(config: pytest.Config, nodeid: str) -> tuple[Law | None, Any]:
    """The law and the implementation of a test, which another process has collected."""
    place, _, test = nodeid.rpartition("::")
    name, _, one = test.partition("[")
    subjects = {verdict.identifier(each): each for each in config.stash[verdict.JUDGED]}
    return load_laws().get(f"{Path(place).stem}::{name}"), subjects.get(one.removesuffix("]"), verdict.PAPER)


def _fail(result: Any, law: Law, subject: Any, what: str, line: str = "") -> None:
    """Make a report that of a law which has no answer."""
    result.when, result.outcome, result.longrepr = (
        "call",
        "failed",
        report.unanswered(law, subject, what, line),
    )
    result.user_properties = [("law", _identity(law, str(subject))), ("unanswered", what)]


def _identity(law: Law, column: str) -> tuple[Any, ...]:
    return law.requirement.id, column, law.name, law.kind, law.functions


class LawFile(pytest.Module):
    """A file of laws under the one name by which it is imported: pytest would load `spec_tests.test_x` as
    a second module.
    """

    def _getobj(self) -> Any:
        inside = self.path.resolve().relative_to(SUITE).with_suffix("")
        return importlib.import_module(".".join(("evictionary.spec_tests", *inside.parts)))


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> pytest.Module | None:
    return LawFile.from_parent(parent, path=module_path) if SUITE in module_path.resolve().parents else None


def pytest_collect_directory(path: Path, parent: Any) -> pytest.Dir | None:
    # A package would be imported too, as `spec_tests`.
    inside = path.resolve()
    return pytest.Dir.from_parent(parent, path=path) if inside == SUITE or SUITE in inside.parents else None


def pytest_report_header(config: pytest.Config) -> list[str]:
    return [
        f"judging {implementation}: {', '.join(implementation.functions())}"
        for implementation in config.stash[verdict.JUDGED]
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "impl" in metafunc.fixturenames:
        judged = metafunc.config.stash[verdict.JUDGED]
        metafunc.parametrize("impl", judged, ids=[verdict.identifier(one) for one in judged], scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the laws that an implementation does not provide for or that do not apply; the verdict
    says which and why.
    """
    left_out = []
    for item in items:
        law = law_of(item)
        if law is not None and law.functions:
            # What fails is told by `report`. A traceback that nobody reads takes a tenth of a second.
            vars(item)["repr_failure"] = lambda failure: str(failure.value)
            word, reason = law.missing(_subject(item))
            if word:
                left_out.append(item)
                entry = (law.requirement.id, str(_subject(item)), word, reason)
                config.stash.setdefault(verdict.LEFT_OUT, []).append(entry)
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
        result.user_properties.append(("law", _identity(law, column)))
        if law.functions and result.when == "call":
            subject, error = _subject(item), call.excinfo and call.excinfo.value
            # Without such limits, a law that asks nothing is a broken law.
            narrowed = bool(subject.domain.said() or subject.conventions or subject.array_library == "exec")
            narrowed = narrowed or CANNOT_HOLD in subject.outside or ANY in law.functions
            silent = isinstance(error, NothingToAsk | Unsatisfiable) and narrowed and subject.outside
            if reason := compiled.unexecuted(error) or silent:
                result.outcome, result.longrepr = "passed", None
                result.user_properties.append(("not applicable", reason))
            elif compiled.STOPPED and result.passed:  # a fault that the code has caught
                _fail(result, law, subject, *(compiled.fault(compiled.STOPPED[0]) or ("", "")))
            elif result.failed and error and (why := report.unanswerable(subject, error)):
                _fail(result, law, subject, *why)
            elif result.failed and error:
                parts = report.said(law, subject, error)
                result.longrepr = report.told(law, subject, parts)
                result.user_properties.append(("said", dict(parts)))
            if subject.device == compiled.DEVICE:
                result.user_properties.append(("compiled", dict(compiled.COUNTED)))
                compiled.COUNTED.update(dict.fromkeys(compiled.COUNTED, 0))
            result.user_properties.append(("reach", dict(subject.reach)))
            subject.reach.clear()
            subject.outside = ""  # what this law asked outside the domain excuses no other
    return result


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    if config.option.collectonly:
        return
    found = config.stash[verdict.FOUND]
    if not config.getoption("--brief"):
        found.write_table(terminalreporter)
    elif exitstatus != pytest.ExitCode.NO_TESTS_COLLECTED:  # no law was chosen: there is nothing to sum up
        found.write_summary(terminalreporter)
    for name in sorted(found.unmatched):
        terminalreporter.write_line(
            f"--expected-failures: {name} did not fail: take its line out", yellow=True
        )
    if folder := config.getoption("--report"):
        found.write_files(Path(folder))
        if not config.getoption("--brief"):
            terminalreporter.write_line(f"wrote conformance.json, junit.xml and badge.json to {folder}")
    for line in found.missing(config.getoption("--require") or []):
        terminalreporter.write_line(line, red=True)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Any:
    """What was chosen and has no answer has failed; the
    exit code is that of the verdict, and its line the last.
    """
    config = session.config
    if config.option.collectonly:  # nothing was asked, so nothing has failed
        return (yield)
    if hasattr(config, "workeroutput"):  # a worker of pytest-xdist tells the process that prints the verdict
        config.workeroutput["left_out"] = config.stash.get(verdict.LEFT_OUT, [])
        return (yield)
    terminal: Any = config.pluginmanager.get_plugin("terminalreporter")
    _report_what_was_not_asked(config, terminal)
    found = config.stash[verdict.FOUND] = verdict.Verdict(terminal, config, config.stash[EXPECTED])
    passed, line = found.in_a_line(config.getoption("--require") or [])
    good, bad, nothing = pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED
    # Whoever stops a run by a key gets pytest's own exit code; a run that --maxfail has stopped is judged.
    # So is one whose processes what is judged has broken, such as by closing the standard output.
    if (
        session.exitstatus in (good, bad)
        or (session.exitstatus == pytest.ExitCode.INTERRUPTED and config.getoption("maxfail"))
        or (session.exitstatus == pytest.ExitCode.INTERNAL_ERROR and DEATHS in config.stash)
    ):
        sentence = found.unanswered_with(NO_GPU)
        if line:
            session.exitstatus, line = good if passed else bad, f"{line}: {sentence}" if sentence else line
        elif sentence:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR
            line = f"nothing was judged: {sentence}; {WITHOUT_A_GPU}"
        elif sentence := found.unexecuted():
            session.exitstatus, line = pytest.ExitCode.USAGE_ERROR, f"no verdict: {sentence}"
        elif found.reasons and not found.others:
            session.exitstatus, line = nothing, "nothing was judged: no law applies"
    found.line = line
    result = yield
    if session.exitstatus in (good, bad, nothing, pytest.ExitCode.USAGE_ERROR) and line:
        terminal.write_line(line, green=passed, red=not passed)
    return result


def _report_what_was_not_asked(config: pytest.Config, terminal: Any) -> None:
    reports = [each for word in ("passed", "failed", "error") for each in terminal.stats.get(word, [])]
    answered = {each.nodeid for each in reports if getattr(each, "when", "") == "call" or each.failed}
    for nodeid in config.stash.get(CHOSEN, []):
        if nodeid not in answered:
            law, subject = _asked_by(config, nodeid)
            if law is not None:
                place = nodeid.partition("::")[0]
                result: Any = pytest.TestReport(nodeid, (place, None, law.name), {}, "failed", "", "call")
                _fail(
                    result,
                    law,
                    subject,
                    "the law was not asked: the run ended before, or the law was skipped",
                )
                config.hook.pytest_runtest_logreport(report=result)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    output = getattr(node, "workeroutput", {})
    node.config.stash.setdefault(verdict.LEFT_OUT, []).extend(
        tuple(entry) for entry in output.get("left_out", [])
    )
