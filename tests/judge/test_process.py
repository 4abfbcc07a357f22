"""A program in any language is judged over its standard
input and output, and whatever it does wrong is one sentence.
"""

import functools
import os
import re
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import yaml
from tools import (
    PLAIN_KEYDIFF,
    ROOT,
    invoke,
    json_in,
    judge,
    laid,
    pytest_of,
    python,
    refused,
    run,
    saved,
    says,
)

from evictionary.reference import cache, keydiff
from evictionary.spec_tests.judge.compare import agrees
from evictionary.spec_tests.judge.domain import NothingToAsk
from evictionary.spec_tests.judge.implementation import Implementation, UnusableImplementation, load
from evictionary.spec_tests.judge.law import load_laws
from evictionary.spec_tests.judge.outcome import outcome
from evictionary.spec_tests.judge.process import Program, ProgramFailed
from evictionary.spec_tests.judge.tolerance import Violation
from evictionary.spec_tests.judge.watch import NotAsked
from evictionary.spec_tests.verdict import vectors

CLIENTS, PAGES = ROOT / "conformance" / "clients", ROOT / "docs"
ACTION = yaml.safe_load((ROOT / ".github" / "actions" / "judge" / "action.yml").read_text())
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"]}
COSINE = "test_keydiff::test_score_is_minus_the_cosine_to_the_anchor"
KEYS = np.array([[[[3.0, 4.0], [0.5, -1.0], [1.0, 1.0]]]])

# A program that answers the handshake and then does `body` with each request; `answer(result)` answers it.
PROGRAM = """
import json, os, sys, time
def answer(result, id=None):
    print(json.dumps({{"id": request["id"] if id is None else id, "result": result}}), flush=True)
def numbers(shape, dtype, data, name="scores"):
    open(request["output"] + name, "wb").write(data)
    return {{"file": request["output"] + name, "shape": shape, "dtype": dtype}}
for line in sys.stdin:
    request = json.loads(line)
    if request["function"] == "hello":
        answer({{"protocol": 1, "functions": ["keydiff.score"], **{hello}}})
        continue
    {body}
"""


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., str]:
    """Writes a program and gives its command line."""

    def write(body: str = "pass", hello: dict[str, Any] | None = None) -> str:
        path = saved(tmp_path / "program.py", PROGRAM.format(body=body, hello=repr(hello or {})))
        return f"{sys.executable} -S {path}"

    return write


@pytest.fixture
def started(command: Callable[..., str]) -> Iterator[Callable[..., Program]]:
    """Starts a program and shakes hands with it; it ends with the test."""
    with ExitStack() as stack:

        def start(body: str, dtype: str | None = None) -> Program:
            program = Program(command(body))
            stack.callback(program.close)
            program.dtype = dtype or program.dtype
            program.hello()
            return program

        yield start


COMPILERS = {
    "c++": ("c++", "keydiff.cpp", "-std=c++17", "-Wall", "-Wextra", "-Werror"),
    "rust": ("rustc", "keydiff.rs", "--edition", "2021", "-D", "warnings"),
}


def clients() -> dict[str, str]:
    """How to start each client; those whose language is
    not here are left out, and the first needs nothing.
    """
    starts = {
        "python": f"{sys.executable} {CLIENTS / 'keydiff.py'}",
        "javascript": f"node {CLIENTS / 'keydiff.js'}",
        **dict.fromkeys(COMPILERS, "keydiff"),
    }
    return {
        language: start
        for language, start in starts.items()
        if works(COMPILERS.get(language, start.split())[0])
    }


def works(program: str) -> bool:
    """Whether it is here and says its version: rustup's `rustc` stands there without a toolchain too."""
    return bool(shutil.which(program)) and not run(program, "--version", code=None).returncode


def compiled(language: str, folder: Path) -> str:
    compiler, source, *flags = COMPILERS[language]
    run(compiler, *flags, CLIENTS / source, "-o", folder / "keydiff")
    return str(folder / "keydiff")


@pytest.mark.parametrize("language", clients())
def test_the_clients_give_the_numbers_of_the_reference(language: str, tmp_path: Path) -> None:
    start = compiled(language, tmp_path) if language in COMPILERS else clients()[language]
    for dtype in ("float64", "float32"):
        impl = load(f"exec:{start}", dtype=dtype)
        agrees(impl, "keydiff.score", np.random.default_rng(0).normal(size=(2, 3, 17, 5)))
        with impl.refuses():
            impl.keydiff.score(KEYS * np.nan)
        if "selection.top_k" in impl.functions():
            assert impl.selection.top_k(
                np.array([[1.0, -np.inf, 2.0, 2.0]]), 2, np.array([[False, True, False, False]])
            ).tolist() == [[False, True, True, False]]


@pytest.fixture(scope="module")
def kd_8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The vectors of one requirement; those of a method take a minute."""
    laws = [law for law in vectors.laws_of(["keydiff"]) if law.requirement.id == "KD-8"]
    folder = tmp_path_factory.mktemp("vectors")
    vectors.write(vectors.generate(laws, lambda step: None), folder)
    return folder


@pytest.mark.parametrize("language", clients())
def test_the_clients_hold_the_vectors(language: str, kd_8: Path, tmp_path: Path) -> None:
    """Each reads the files of `evictionary vectors` in its own language, and finds a wrong number."""
    start, folder = clients()[language], Path(shutil.copytree(kd_8, tmp_path / "vectors"))
    command = [*(compiled(language, tmp_path) if language in COMPILERS else start).split(), folder]
    if language == "python":  # the checker is a program of its own
        source = (CLIENTS / "keydiff.py").read_text().split("def answer")[0]
        scorer = saved(tmp_path / "mine.py", source + NESTED)
        command = [sys.executable, CLIENTS / "check_vectors.py", folder, "keydiff.score", scorer, "float64"]
    elif language == "c++":
        command[1:] = sorted(folder.glob("*-*.json"))
    assert " cases hold" in run(*command).stdout
    wrong = folder / "KD-8.json"
    saved(wrong, wrong.read_text().replace('"data": [0.', '"data": [7.'))
    assert " cases hold" in run(*command, code=1).stdout


# What the checker asks of a file: nested lists, any leading axes, ValueError for bad input.
NESTED = """

one_head = score


def score(keys):
    if not keys or not isinstance(keys, list) or not isinstance(keys[0], list) or not keys[0]:
        raise ValueError("keys: wanted numbers [..., T, D]")
    if isinstance(keys[0][0], list):
        return [score(each) for each in keys]
    if not all(math.isfinite(x) for key in keys for x in key):
        raise ValueError("keys: got numbers that are not finite")
    return one_head(keys)
"""


def test_a_program_is_told_what_a_file_would_be_told(tmp_path: Path) -> None:
    right = (CLIENTS / "keydiff.py").read_text()
    wrong = saved(tmp_path / "wrong.py", right.replace("return [-math.fsum", "return [math.fsum"))
    start, law = f"{sys.executable} {wrong}", f"spec_tests/keydiff/{COSINE.replace('::', '.py::')}"
    says(
        pytest_of("--profile", "quick", law, "--exec", start, "--dtype", "float32", code=1).stdout,
        "KD-8 does not hold for keydiff.score of plain_python (exec, cpu, float32)",
        "your numbers match a known bug: the sign left out",
        f"judge --exec '{start}' --dtype float32 --profile quick --law ",
    )


@pytest.mark.slow
def test_judge_takes_a_program() -> None:
    output = judge("--exec", clients()["python"], "--method", "keydiff", "--json", "--strict").stdout
    for judged, dtype in zip(json_in(output)["implementations"], ("float64", "float32"), strict=True):
        assert (judged["name"], judged["array_library"], judged["dtype"]) == ("plain_python", "exec", dtype)
        assert judged["requirements"]["KD-8"]["verdict"] == "pass"


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--exec", "true", "keydiff.py"], "wanted one of the two"),
        ([], "nothing to judge: give a file"),
        (["--exec", "true", "--timeout", "0"], "--timeout: got 0"),
    ],
)
def test_judge_asks_for_one_of_two(arguments: list[str], wanted: str) -> None:
    done = invoke("judge", *arguments)
    assert done.exit_code == 2 and wanted in " ".join(done.output.split())


LEAVES = """
import os, sys
from typer.testing import CliRunner
from evictionary.cli.app import app

CliRunner().invoke(app, ["contract"])  # which sets what every command sets
before = dict(os.environ), sys.stdout
done = CliRunner().invoke(app, ["judge", sys.argv[1], "--jobs", "2", "--profile", "quick"])
assert done.exit_code == 0, done.output
assert (dict(os.environ), sys.stdout) == before, set(os.environ.items()) ^ set(before[0].items())
"""


def test_a_judge_leaves_its_process_as_it_was(tmp_path: Path) -> None:
    """A notebook and a server judge more than once, and start other programs afterwards."""
    python(
        "-c", LEAVES, saved(tmp_path / "knorm.py", "def score(keys):\n    return -(keys**2).sum(-1) ** 0.5\n")
    )


@pytest.mark.parametrize(
    ("start", "wanted"),
    [
        ("./no-such-program", "the program ./no-such-program does not exist"),
        (str(ROOT / "README.md"), "README.md is not executable"),
        (str(ROOT), f"the program {ROOT} is a folder"),
        ("'", "wanted a command line"),
        ("", "got an empty command line"),
        ("true", "the program true ended with exit code 0 (asked for hello)"),
    ],
)
def test_a_program_that_cannot_be_asked_is_a_sentence(start: str, wanted: str) -> None:
    refused(lambda: load(f"exec:{start}"), re.escape(wanted), UnusableImplementation)


@pytest.mark.parametrize(
    ("hello", "wanted"),
    [
        ({"protocol": 2}, "speaks another protocol: got '2', wanted 1"),
        ({"functions": []}, "provides nothing: got '[]'"),
        (
            {"functions": ["keydiff.nonsense"]},
            "provides 'keydiff.nonsense', which is no function of the contract",
        ),
        ({"functions": ["keydiff.Cache"]}, "provides 'keydiff.Cache', which is no function"),
        ({"fractions": 1}, "says '1' for \"fractions\", wanted a JSON true or false"),
        ({"domain": [64]}, "says '[64]' for \"domain\", wanted a JSON object"),
        ({"domain": {"heads": 3}}, "DOMAIN: heads: got a key that no domain has"),
        ({"conventions": ["bitmaps"]}, "CONVENTIONS: got 'bitmaps'"),
        (
            {"implements": {"keydiff.score": "keydiff.nonsense"}},
            "IMPLEMENTS: got 'keydiff.nonsense' for score",
        ),
    ],
)
def test_a_handshake_that_cannot_be_understood_is_a_sentence(
    command: Callable[..., str], hello: dict[str, Any], wanted: str
) -> None:
    refused(lambda: load(f"exec:{command(hello=hello)}"), re.escape(wanted), UnusableImplementation)


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("time.sleep(60)", "did not answer within 0.5 s (asked for keydiff.score)"),
        ("sys.exit('out of memory')", "ended with exit code 1; its last words: out of memory"),
        ("os.kill(os.getpid(), 11)", "ended with signal SIGSEGV"),
        ("os.close(1); time.sleep(60)", "closed its standard output"),
        (
            "print('loading kernels ' * 20, flush=True)",
            "answered with something that is no JSON (JSONDecodeError): 'loading ",
        ),
        ("print('x' * 2**21, flush=True)", "printed 1048576 bytes without the end of a line: 'xxx"),
        ("print('[]', flush=True)", "answered '[]', wanted an object"),
        ("answer(1, id=7)", "answered out of order: got id '7', wanted 2"),
        ('print(\'{"id": 2, "result": NaN}\', flush=True)', "no JSON, which has no NaN"),
        (
            "answer(numbers([1, 1, 3], 'float64', b'1234'))",
            "wrote 4 bytes for an array of shape (1, 1, 3) and float64, wanted 24",
        ),
        ("answer(numbers([1, 1, 3], 'float8', b'123'))", "wrote an array of dtype 'float8'"),
        ("answer(numbers([1, -3], 'float64', b''))", "wrote an array of shape '[1, -3]'"),
        ("answer(numbers([1, 1, 3], 'bool', b'abc'))", "wrote a bool of 99"),
        (
            "answer({'file': request['output'] + 'x', 'shape': [3], 'dtype': 'bool'})",
            ".x, which it did not write",
        ),
        (
            "answer({'file': '/etc/hostname', 'shape': [3], 'dtype': 'bool'})",
            "wrote /etc/hostname, wanted a file whose path",
        ),
        ("answer(numbers([0, 10**30], 'float64', b''))", "wrote an array of shape '[0, 1000"),
        ("answer({'scores': 1})", "wanted an object with"),
        (
            "answer({'type': 'cache.CompressedCache', 'keys': 1})",
            "wanted the fields keys, values, positions, lengths",
        ),
        ("answer({'type': 'cache.Nothing'})", "wanted a type of the contract"),
    ],
)
def test_a_program_that_misbehaves_is_one_sentence(
    started: Callable[..., Program], body: str, wanted: str
) -> None:
    program = started(body)
    if "sleep" in body:
        program.seconds = 0.5
    refused(
        lambda: program.call("keydiff.score", {"keys": KEYS}), rf"\A.*{re.escape(wanted)}.*\Z", ProgramFailed
    )


def test_what_nobody_asked_for_is_seen_at_the_next_call(started: Callable[..., Program]) -> None:
    """Which of the two sentences it is depends on when the second line arrives."""
    program = started("answer(1); answer(2)")
    assert program.call("keydiff.score", {}) == 1
    either = r"printed something that nobody asked for|answered out of order"
    refused(lambda: program.call("keydiff.score", {}), either, ProgramFailed)


def test_a_crash_costs_one_law_and_is_not_made_smaller(command: Callable[..., str], tmp_path: Path) -> None:
    log, law = tmp_path / "log", load_laws()[COSINE]
    impl = load("exec:" + command(f"open({str(log)!r}, 'a').write('x'); sys.exit(3)"))
    for crashes in range(1, 11):
        word, message = outcome(law, impl, max_examples=20)
        assert (word, len(log.read_text())) == ("crashed", crashes) and "ended with exit code 3" in message
    assert "failed 10 times and is not started again" in outcome(law, impl)[1]
    assert len(log.read_text()) == 10


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_numbers_of_every_dtype_and_named_tuples_come_back_as_they_went(
    started: Callable[..., Program], dtype: str
) -> None:
    again = (
        "answer({key: each if key == 'type' else numbers(each['shape'], each['dtype'], open(each['file'], "
        "'rb').read(), key)"
        " for key, each in request['arguments']['cache'].items()})"
    )
    stored = cache.compress(KEYS, KEYS[..., :1], np.array([[[True, False, True]]]))
    found = started(again, dtype).call("attention.attend", {"cache": stored})
    assert isinstance(found, cache.CompressedCache)
    for sent, got in zip(stored, found, strict=True):
        assert np.array_equal(sent, got) and sent.dtype.kind == got.dtype.kind


def test_a_program_ends_with_the_run_and_leaves_no_files(command: Callable[..., str], tmp_path: Path) -> None:
    start = command("answer(os.getpid())")
    program = (
        f"from evictionary.spec_tests.judge.process import Program; p = Program({start!r}); p.hello();"
        "print(p.call('keydiff.score', {}))"
    )
    number = int(python("-c", program, TMPDIR=tmp_path).stdout)
    refused(lambda: os.kill(number, 0), "", ProcessLookupError)
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]


def test_arguments_that_cannot_travel_are_not_applicable(command: Callable[..., str]) -> None:
    impl = load(f"exec:{command('answer(1)', {'functions': ['keydiff.decode']})}")
    given = keydiff.append(None, KEYS, KEYS), KEYS[..., 0, :], KEYS[..., 0, :]
    assert impl.call("keydiff.decode", *given, budget=2) == 1
    asked = functools.partial(impl.call, "keydiff.decode", *given, budget=2, scorer=keydiff.anchor)
    refused(asked, "scorer is a function", BaseException)


RETAINED = (
    "from fractions import Fraction; a = request['arguments']; n, s, l = a['length'], a['sink_size'], "
    "a['lag_size'];"
    "r = a['keep_ratio']; r = Fraction(*r['fraction']) if isinstance(r, dict) else Fraction(repr(r));"
    "answer(n if n < s + 2 * l else n - ((n - s) // l - 1) * (l - int(r * l)))"
)


def test_a_fraction_goes_exactly_to_a_program_that_reads_fractions_and_to_no_other(
    command: Callable[..., str],
) -> None:
    """A third as a float keeps no token of three: a program that is given the float is not judged by it."""
    law = load_laws()["test_lagkv::test_retained_length_at_its_edges"]
    functions = {"functions": ["lagkv.retained_length"]}
    law.check(load("exec:" + command(RETAINED, {**functions, "fractions": True})))
    impl = load("exec:" + command(RETAINED, functions))
    message = '1/3 is no decimal number, and the program does not say that it reads "fractions"'
    refused(lambda: law.check(impl), message, NothingToAsk)
    # a half is 0.5, which every program reads
    assert impl.lagkv.retained_length(8, keep_ratio=Fraction(1, 2), sink_size=2, lag_size=3) == 6


NO_DRIVERS = RuntimeError("0 active drivers ([]). There should only be one.")


def in_memory(score: Callable[..., Any]) -> Implementation:
    return Implementation("mine", {"keydiff": types.SimpleNamespace(score=score)})


def test_an_implementation_that_writes_into_its_inputs_is_told_so_and_it_counts_as_no_refusal() -> None:
    def score(keys: np.ndarray) -> np.ndarray:
        keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
        return -keys.sum(axis=-1)

    impl = in_memory(score)
    refused(lambda: impl.keydiff.score(KEYS), r"keydiff\.score writes into its argument keys", Violation)
    impl.strict = False
    with pytest.raises(Violation, match="writes into its argument keys"), impl.refuses():
        impl.keydiff.score(KEYS)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_one_number_that_is_written_into_a_large_state_is_seen(library: str) -> None:
    def attend(queries: Any, cache: Any) -> None:
        cache.values[4000, 0] = np.inf

    impl = Implementation("mine", {"attention": types.SimpleNamespace(attend=attend)}, array_library=library)
    states = np.zeros((1, 1, 4097, 2))
    held = cache.compress(states, states, np.ones(states.shape[:3], bool))
    refused(lambda: impl.attention.attend(states, held), "into its argument cache", Violation)


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("cuda:9", "; --device compiled executes Triton kernels without a GPU"),
        ("abacus", "--device abacus: torch has no such device here: "),
    ],
)
def test_a_device_that_is_not_here_is_a_sentence(tmp_path: Path, device: str, words: str) -> None:
    file = saved(tmp_path / "keydiff.py", "import torch\ndef score(keys): return -keys.norm(dim=-1)")
    asked = functools.partial(load, str(file), device=device)
    refused(asked, words, UnusableImplementation)


@pytest.mark.parametrize(
    ("has_gpu", "raised", "error", "message"),
    [
        (False, NO_DRIVERS, NotAsked, r"keydiff\.score needs a GPU, and this machine has none \(Runtime"),
        (False, AssertionError("Torch not compiled with CUDA enabled"), NotAsked, "needs a GPU"),
        (True, NO_DRIVERS, RuntimeError, "active drivers"),
        (False, ValueError("gpu_cache must be 4-D"), ValueError, "4-D"),
        (False, ValueError(f"{NO_DRIVERS}"), ValueError, "active drivers"),
        (False, RuntimeError("CUDA error: misaligned address"), RuntimeError, "misaligned"),
    ],
)
def test_a_kernel_without_its_gpu_is_told_so_in_a_sentence(
    has_gpu: bool, raised: Exception, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    refused(lambda: in_memory(Mock(side_effect=raised)).keydiff.score(KEYS), message, error)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (
            {"JUDGED": "my kernels/keydiff.py", "ARGUMENTS": "--strict --method keydiff"},
            ["my kernels/keydiff.py", "--strict"],
        ),
        ({"COMMAND": "node keydiff.js"}, ["--exec=node keydiff.js", "--report"]),
    ],
)
def test_the_action_hands_on_what_it_is_given(
    given: dict[str, str], wanted: list[str], tmp_path: Path
) -> None:
    step = STEPS["Judge"]
    named = {key: given.get(key, "") for key in step["env"]} | {"REPORT": "a report"}
    assert set(given) < set(named)
    saved(tmp_path / "evictionary" / "bin" / "evictionary", "#!/bin/sh\nprintf '%s\\n' \"$@\"\n").chmod(0o755)
    said = run("bash", "-eu", "-c", step["run"], RUNNER_TEMP=tmp_path, **named).stdout.splitlines()
    assert (
        said[:2] == ["judge", wanted[0]] and set(wanted) < set(said) and said[-2:] == ["--report", "a report"]
    )


def test_the_action_says_in_its_summary_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "temp" / "evictionary" / "bin").mkdir(parents=True)
    (tmp_path / "temp" / "evictionary" / "bin" / "python").symlink_to(sys.executable)
    saved(tmp_path / "knorm.py", "def score(keys):\n    return -(keys ** 2).sum(-1)\n")
    judge("knorm.py", "--report", "found", cwd=tmp_path, code=1)
    told = run(
        "bash", "-eu", "-c", STEPS["Say what was found"]["run"],
        cwd=tmp_path, RUNNER_TEMP=tmp_path / "temp", GITHUB_STEP_SUMMARY=tmp_path / "summary.md",
        REPORT="found",
    )  # fmt: skip
    rows = ("### knorm (numpy, cpu, float64)", "| KN-1 | fail | your numbers match a known bug: ")
    says((tmp_path / "summary.md").read_text(), *rows, never=["not provided"])
    assert told.stderr.startswith(
        "::error title=KN-1 does not hold for knorm.score::your numbers match a known bug: "
    )


def typed(command: str, folder: Path, code: int = 0) -> str:
    """What a reader sees who types this in a folder, `pytest spec_tests` in the clone."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return run(
        "sh", "-c", command, cwd=ROOT if command.startswith("pytest") else folder, code=code, PATH=path
    ).stdout


@pytest.mark.slow
def test_the_commands_of_any_language_judge_its_programs(tmp_path: Path) -> None:
    (tmp_path / "conformance").symlink_to(ROOT / "conformance")
    page = (PAGES / "any_language.md").read_text()
    block = page.partition("## A program that answers\n\n```\n")[2].partition("```")[0]
    build, *judging = block.splitlines()
    assert shutil.which("c++") and shutil.which("node")
    typed(build, tmp_path)
    for command in judging:
        assert "\nPASS: " in typed(f"{command} --profile quick", tmp_path), command


@pytest.mark.slow
def test_the_vectors_of_any_language_find_the_mistake_that_the_page_shows(tmp_path: Path) -> None:
    page = (PAGES / "any_language.md").read_text()
    written = page.partition("## Vectors\n\n```\n")[2].partition("\n```")[0].splitlines()
    command, *shown = (
        page.partition("```text\n$ python check_vectors.py")[2].partition("\n```")[0].splitlines()
    )
    shutil.copy(CLIENTS / "check_vectors.py", tmp_path)
    (tmp_path / "raw_mean.py").write_text(PLAIN_KEYDIFF.replace("zip(*directions)", "zip(*keys)"))
    for line in written:
        typed(line, tmp_path)
    said = typed(f"python check_vectors.py{command}", tmp_path, code=1).splitlines()
    before, after = shown[: shown.index("...")], shown[shown.index("...") + 1 :]
    assert (said[: len(before)], said[-len(after) :]) == (before, after)


@pytest.mark.slow
def test_the_commands_of_plug_in_do_what_the_table_says(tmp_path: Path) -> None:
    right = re.findall(
        r"^```python\n(.*?)^```$", (PAGES / "judging.md").read_text(), re.DOTALL | re.MULTILINE
    )[-1]
    laid(
        tmp_path,
        {
            "my_kernels/keydiff.py": right,
            "my_kernel.py": right.replace("def score(", "def least_similar("),
            "known.txt": "MEM-4 we know it\n",
        },
    )
    saved(tmp_path / "my_binary", f"#!/bin/sh\nexec python {CLIENTS / 'keydiff.py'}\n").chmod(0o755)
    table = (
        (PAGES / "reference" / "plug_in.md")
        .read_text()
        .partition("## Judge it")[2]
        .partition("\n\nThe smallest")[0]
    )
    shown = [
        command for row in table.splitlines()[4:] for command in re.findall(r"`([^`]+)`", row.split("|")[1])
    ]
    assert len(shown) >= 12
    names = {
        "...": "evictionary judge my_kernels",
        "NAME": "test_scores_are_cosines",
        "FOLDER": str(tmp_path / "report"),
        "spec_tests --impl "
        "my_kernels": f"spec_tests/keydiff/test_keydiff.py --impl {tmp_path / 'my_kernels'}",
    }
    for command in shown:
        for name, meant in names.items():
            command = command.replace(name, meant)
        wanted = 2 if "cuda" in command and not torch.cuda.is_available() else 0
        typed(command if "--profile" in command else f"{command} --profile quick", tmp_path, code=wanted)
    assert (tmp_path / "report" / "conformance.json").exists()
