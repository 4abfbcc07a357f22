"""A program in any language is judged over its standard input and output, and whatever it does wrong is one sentence."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from evictionary.cli.app import app
from evictionary.reference import cache, keydiff
from evictionary.spec_tests.judge.compare import agrees
from evictionary.spec_tests.judge.domain import NothingToAsk
from evictionary.spec_tests.judge.implementation import Implementation, UnusableImplementation, load
from evictionary.spec_tests.judge.law import load_laws
from evictionary.spec_tests.judge.outcome import outcome
from evictionary.spec_tests.judge.process import Program, ProgramFailed
from evictionary.spec_tests.judge.tolerance import Violation
from evictionary.spec_tests.judge.watch import NotAsked

ROOT = Path(__file__).parent.parent
CLIENTS = ROOT / "conformance" / "clients"
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
        path = tmp_path / "program.py"
        path.write_text(PROGRAM.format(body=body, hello=repr(hello or {})))
        return f"{sys.executable} -S {path}"

    return write


def clients() -> dict[str, str]:
    """How to start each client; those whose language is not here are left out, and the first needs nothing."""
    found = {"python": f"{sys.executable} {CLIENTS / 'keydiff.py'}"}
    if shutil.which("node"):
        found["javascript"] = f"node {CLIENTS / 'keydiff.js'}"
    if shutil.which("c++"):
        found["c++"] = "keydiff"
    return found


@pytest.mark.parametrize("language", clients())
def test_the_clients_give_the_numbers_of_the_reference(language: str, tmp_path: Path) -> None:
    start = clients()[language]
    if language == "c++":
        start = str(tmp_path / "keydiff")
        subprocess.run(["c++", "-std=c++17", "-Wall", "-Wextra", "-Werror", CLIENTS / "keydiff.cpp", "-o", start], check=True)
    for dtype in ("float64", "float32"):
        impl = load(f"exec:{start}", dtype=dtype)
        agrees(impl, "keydiff.score", np.random.default_rng(0).normal(size=(2, 3, 17, 5)))
        with impl.refuses():
            impl.keydiff.score(KEYS * np.nan)
        if "selection.top_k" in impl.functions():
            kept = impl.selection.top_k(np.array([[1.0, -np.inf, 2.0, 2.0]]), 2, np.array([[False, True, False, False]]))
            assert kept.tolist() == [[False, True, True, False]]


def judge(*arguments: str, code: int) -> str:
    """`evictionary judge` in this process, for what it says before it runs any law."""
    done = CliRunner().invoke(app, ["judge", *arguments])
    assert done.exit_code == code, done.output
    return " ".join(done.output.split())


def test_a_program_is_told_what_a_file_would_be_told(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text((CLIENTS / "keydiff.py").read_text().replace("return [-math.fsum", "return [math.fsum"))
    start = f"{sys.executable} {wrong}"
    law = "spec_tests/keydiff/test_keydiff.py::test_score_is_minus_the_cosine_to_the_anchor"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--profile", "quick", law, "--exec", start]
    output = subprocess.run([*command, "--dtype", "float32"], cwd=ROOT, capture_output=True, text=True).stdout
    assert "KD-8 does not hold for keydiff.score of plain_python (exec, cpu, float32)" in output
    assert "your numbers equal those of: the sign left out" in output
    assert f"judge --exec '{start}' --law " in output


@pytest.mark.slow
def test_judge_takes_a_program() -> None:
    command = [sys.executable, "-m", "evictionary", "judge", "--exec", clients()["python"], "--method", "keydiff", "--json"]
    done = subprocess.run([*command, "--profile", "quick", "--strict"], cwd=ROOT, capture_output=True, text=True, check=True)
    content = json.loads(done.stdout[done.stdout.index("{") : done.stdout.rindex("}") + 1])
    for judged, dtype in zip(content["implementations"], ("float64", "float32"), strict=True):
        assert (judged["name"], judged["array_library"], judged["dtype"]) == ("plain_python", "exec", dtype)
        assert judged["requirements"]["KD-8"]["verdict"] == "pass"


def test_judge_asks_for_one_of_two() -> None:
    assert "wanted one of the two" in judge("--exec", "true", "keydiff.py", code=2)
    assert "wanted one of the two" in judge(code=2)
    assert "--timeout: got 0" in judge("--exec", "true", "--timeout", "0", code=2)


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
    with pytest.raises(UnusableImplementation) as caught:
        load(f"exec:{start}")
    assert wanted in str(caught.value)


@pytest.mark.parametrize(
    ("hello", "wanted"),
    [
        ({"protocol": 2}, "speaks another protocol: got '2', wanted 1"),
        ({"functions": []}, "provides nothing: got '[]'"),
        ({"functions": ["keydiff.nonsense"]}, "provides 'keydiff.nonsense', which is no function of the contract"),
        ({"functions": ["keydiff.Cache"]}, "provides 'keydiff.Cache', which is no function"),
        ({"fractions": 1}, "says '1' for \"fractions\", wanted a JSON true or false"),
        ({"domain": [64]}, "says '[64]' for \"domain\", wanted a JSON object"),
        ({"domain": {"heads": 3}}, "DOMAIN: heads: got a key that no domain has"),
        ({"conventions": ["bitmaps"]}, "CONVENTIONS: got 'bitmaps'"),
        ({"implements": {"keydiff.score": "keydiff.nonsense"}}, "IMPLEMENTS: got 'keydiff.nonsense' for score"),
    ],
)
def test_a_handshake_that_cannot_be_understood_is_a_sentence(
    command: Callable[..., str], hello: dict[str, Any], wanted: str
) -> None:
    with pytest.raises(UnusableImplementation) as caught:
        load(f"exec:{command(hello=hello)}")
    assert wanted in str(caught.value)


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("time.sleep(60)", "did not answer within 0.5 s (asked for keydiff.score)"),
        ("sys.exit('out of memory')", "ended with exit code 1; its last words: out of memory"),
        ("os.kill(os.getpid(), 11)", "ended with signal SIGSEGV"),
        ("os.close(1); time.sleep(60)", "closed its standard output"),
        ("print('loading kernels ' * 20, flush=True)", "answered with something that is no JSON (JSONDecodeError): 'loading "),
        ("print('x' * 2**21, flush=True)", "printed 1048576 bytes without the end of a line: 'xxx"),
        ("print('[]', flush=True)", "answered '[]', wanted an object"),
        ("answer(1, id=7)", "answered out of order: got id '7', wanted 2"),
        ('print(\'{"id": 2, "result": NaN}\', flush=True)', "no JSON, which has no NaN"),
        ("answer(numbers([1, 1, 3], 'float64', b'1234'))", "wrote 4 bytes for an array of shape (1, 1, 3) and float64, wanted 24"),
        ("answer(numbers([1, 1, 3], 'float8', b'123'))", "wrote an array of dtype 'float8'"),
        ("answer(numbers([1, -3], 'float64', b''))", "wrote an array of shape '[1, -3]'"),
        ("answer(numbers([1, 1, 3], 'bool', b'abc'))", "wrote a bool of 99"),
        ("answer({'file': request['output'] + 'x', 'shape': [3], 'dtype': 'bool'})", ".x, which it did not write"),
        (
            "answer({'file': '/etc/hostname', 'shape': [3], 'dtype': 'bool'})",
            "wrote /etc/hostname, wanted a file whose path",
        ),
        ("answer(numbers([0, 10**30], 'float64', b''))", "wrote an array of shape '[0, 1000"),
        ("answer({'scores': 1})", "wanted an object with"),
        ("answer({'type': 'cache.CompressedCache', 'keys': 1})", "wanted the fields keys, values, positions, lengths"),
        ("answer({'type': 'cache.Nothing'})", "wanted a type of the contract"),
    ],
)
def test_a_program_that_misbehaves_is_one_sentence(command: Callable[..., str], body: str, wanted: str) -> None:
    program = Program(command(body))
    program.hello()
    if "sleep" in body:
        program.seconds = 0.5
    with pytest.raises(ProgramFailed) as caught:
        program.call("keydiff.score", {"keys": KEYS})
    assert wanted in str(caught.value) and "\n" not in str(caught.value)
    program.close()


def test_what_nobody_asked_for_is_seen_at_the_next_call(command: Callable[..., str]) -> None:
    program = Program(command("answer(1); answer(2)"))
    program.hello()
    assert program.call("keydiff.score", {}) == 1
    with pytest.raises(ProgramFailed, match=r"printed something that nobody asked for|answered out of order"):
        program.call("keydiff.score", {})  # which of the two depends on when the second line arrives
    program.close()


def test_a_crash_costs_one_law_and_is_not_made_smaller(command: Callable[..., str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    impl = load("exec:" + command(f"open({str(log)!r}, 'a').write('x'); sys.exit(3)"))
    law = load_laws()["test_keydiff::test_score_is_minus_the_cosine_to_the_anchor"]
    for crashes in range(1, 11):
        word, message = outcome(law, impl, max_examples=20)
        assert word == "crashed" and "ended with exit code 3" in message
        assert len(log.read_text()) == crashes
    assert "failed 10 times and is not started again" in outcome(law, impl)[1]
    assert len(log.read_text()) == 10


def test_numbers_of_every_dtype_and_named_tuples_come_back_as_they_went(command: Callable[..., str]) -> None:
    again = "answer({key: each if key == 'type' else numbers(each['shape'], each['dtype'], open(each['file'], 'rb').read(), key)"
    again += " for key, each in request['arguments']['cache'].items()})"
    stored = cache.compress(KEYS, KEYS[..., :1], np.array([[[True, False, True]]]))
    for dtype in ("float64", "float32", "float16", "bfloat16"):
        program = Program(command(again))
        program.dtype = dtype
        program.hello()
        found = program.call("attention.attend", {"cache": stored})
        assert isinstance(found, cache.CompressedCache)
        for sent, got in zip(stored, found, strict=True):
            assert np.array_equal(sent, got) and sent.dtype.kind == got.dtype.kind
        program.close()


def test_a_program_ends_with_the_run_and_leaves_no_files(command: Callable[..., str], tmp_path: Path) -> None:
    start = command("answer(os.getpid())")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"from evictionary.spec_tests.judge.process import Program; p = Program({start!r}); p.hello();"
            "print(p.call('keydiff.score', {}))",
        ],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]


def test_arguments_that_cannot_travel_are_not_applicable(command: Callable[..., str]) -> None:
    impl = load(f"exec:{command('answer(1)', {'functions': ['keydiff.decode']})}")
    given = keydiff.append(None, KEYS, KEYS)
    assert impl.call("keydiff.decode", given, KEYS[..., 0, :], KEYS[..., 0, :], budget=2) == 1
    with pytest.raises(BaseException, match="scorer is a function"):
        impl.call("keydiff.decode", given, KEYS[..., 0, :], KEYS[..., 0, :], budget=2, scorer=keydiff.anchor)


RETAINED = (
    "from fractions import Fraction; a = request['arguments']; n, s, l = a['length'], a['sink_size'], a['lag_size'];"
    "r = a['keep_ratio']; r = Fraction(*r['fraction']) if isinstance(r, dict) else Fraction(repr(r));"
    "answer(n if n < s + 2 * l else n - ((n - s) // l - 1) * (l - int(r * l)))"
)


def test_a_fraction_goes_exactly_to_a_program_that_reads_fractions_and_to_no_other(command: Callable[..., str]) -> None:
    """A third as a float keeps no token of three: a program that is given the float is not judged by it."""
    law = load_laws()["test_lagkv::test_retained_length_at_its_edges"]
    functions = {"functions": ["lagkv.retained_length"]}
    law.check(load("exec:" + command(RETAINED, {**functions, "fractions": True})))
    with pytest.raises(NothingToAsk, match='1/3 is no decimal number, and the program does not say that it reads "fractions"'):
        law.check(load("exec:" + command(RETAINED, functions)))
    half = load("exec:" + command(RETAINED, functions)).lagkv.retained_length(8, keep_ratio=Fraction(1, 2), sink_size=2, lag_size=3)
    assert half == 6  # a half is 0.5, which every program reads


def in_memory(score: Callable[..., Any]) -> Implementation:
    module = types.ModuleType("keydiff")
    module.score = score  # type: ignore[attr-defined]
    return Implementation("mine", {"keydiff": module})


def test_an_implementation_that_writes_into_its_inputs_is_told_so_and_it_counts_as_no_refusal() -> None:
    def score(keys: np.ndarray) -> np.ndarray:
        keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
        return -keys.sum(axis=-1)

    with pytest.raises(Violation, match=r"keydiff\.score writes into its argument keys"):
        in_memory(score).keydiff.score(KEYS)
    impl = in_memory(score)
    impl.strict = False
    with pytest.raises(Violation, match="writes into its argument keys"), impl.refuses():
        impl.keydiff.score(KEYS)


def test_a_device_that_is_not_here_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "keydiff.py").write_text("import torch\ndef score(keys): return -keys.norm(dim=-1)")
    for device in ("cuda:9", "abacus"):
        with pytest.raises(UnusableImplementation, match=f"--device {device}: torch has no such device here"):
            load(str(tmp_path / "keydiff.py"), device=device)


def test_a_kernel_without_its_gpu_is_told_so_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def score(keys: np.ndarray) -> np.ndarray:
        raise RuntimeError("0 active drivers ([]). There should only be one.")

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(NotAsked, match=r"keydiff\.score needs a GPU, and this machine has none \(Runtime"):
        in_memory(score).keydiff.score(KEYS)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(RuntimeError, match="active drivers"):
        in_memory(score).keydiff.score(KEYS)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"JUDGED": "my kernels/keydiff.py", "ARGUMENTS": "--strict --method keydiff"}, ["my kernels/keydiff.py", "--strict"]),
        ({"COMMAND": "node keydiff.js"}, ["--exec=node keydiff.js", "--report"]),
    ],
)
def test_the_action_hands_on_what_it_is_given(given: dict[str, str], wanted: list[str], tmp_path: Path) -> None:
    action = yaml.safe_load((ROOT / ".github" / "actions" / "judge" / "action.yml").read_text())
    judge = next(step for step in action["runs"]["steps"] if step["name"] == "Judge")
    named = {key: given.get(key, "") for key in judge["env"]} | {"REPORT": "a report"}
    assert set(given) < set(named)
    program = tmp_path / "evictionary" / "bin" / "evictionary"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    program.chmod(0o755)
    environment = {**os.environ, **named, "RUNNER_TEMP": str(tmp_path)}
    done = subprocess.run(["bash", "-eu", "-c", judge["run"]], env=environment, capture_output=True, text=True, check=True)
    said = done.stdout.splitlines()
    assert said[:2] == ["judge", wanted[0]] and set(wanted) < set(said) and said[-2:] == ["--report", "a report"]


PAGES = ROOT / "docs"


def typed(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What a reader types, in a folder; `pytest spec_tests` in the clone."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    place = ROOT if command.startswith("pytest") else folder
    return subprocess.run(command, shell=True, cwd=place, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_the_commands_of_any_language_judge_its_programs(tmp_path: Path) -> None:
    (tmp_path / "conformance").symlink_to(ROOT / "conformance")
    block = (PAGES / "any_language.md").read_text().partition("## A program that answers\n\n```\n")[2].partition("```")[0]
    build, *judging = block.splitlines()
    assert shutil.which("c++") and shutil.which("node") and typed(build, tmp_path).returncode == 0
    for command in judging:
        done = typed(f"{command} --profile quick", tmp_path)
        assert done.returncode == 0 and "\nPASS: " in done.stdout, (command, done.stdout + done.stderr)


@pytest.mark.slow
def test_the_vectors_of_any_language_find_the_mistake_that_the_page_shows(tmp_path: Path) -> None:
    from test_vectors import PLAIN_KEYDIFF

    page = (PAGES / "any_language.md").read_text()
    writing, checking = page.partition("## Vectors\n\n```\n")[2].partition("\n```")[0].splitlines()
    command, *shown = page.partition("```text\n$ python check_vectors.py")[2].partition("\n```")[0].splitlines()
    shutil.copy(CLIENTS / "check_vectors.py", tmp_path)
    (tmp_path / "raw_mean.py").write_text(PLAIN_KEYDIFF.replace("zip(*directions)", "zip(*keys)"))
    for line in (writing, checking):
        assert typed(line, tmp_path).returncode == 0, line
    said = typed(f"python check_vectors.py{command}", tmp_path).stdout.splitlines()
    before, after = shown[: shown.index("...")], shown[shown.index("...") + 1 :]
    assert (said[: len(before)], said[-len(after) :]) == (before, after)


@pytest.mark.slow
def test_the_commands_of_plug_in_do_what_the_table_says(tmp_path: Path) -> None:
    (tmp_path / "my_kernels").mkdir()
    right = re.findall(r"^```python\n(.*?)^```$", (PAGES / "judging.md").read_text(), re.DOTALL | re.MULTILINE)[-1]
    (tmp_path / "my_kernels" / "keydiff.py").write_text(right)
    (tmp_path / "known.txt").write_text("MEM-4 we know it\n")
    (tmp_path / "my_binary").write_text(f"#!/bin/sh\nexec python {CLIENTS / 'keydiff.py'}\n")
    (tmp_path / "my_binary").chmod(0o755)
    table = (PAGES / "reference" / "plug_in.md").read_text().partition("## Judge it")[2].partition("\n\nThe smallest")[0]
    shown = [command for row in table.splitlines()[4:] for command in re.findall(r"`([^`]+)`", row.split("|")[1])]
    commands = [command.replace("...", "evictionary judge my_kernels") for command in shown]
    assert len(commands) >= 12
    for command in commands:
        known = command.replace("NAME", "test_scores_are_cosines").replace("FOLDER", str(tmp_path / "report"))
        known = known.replace(
            "spec_tests --impl my_kernels", f"spec_tests/keydiff/test_keydiff.py --impl {tmp_path / 'my_kernels'}"
        )
        done = typed(known if "--profile" in known else f"{known} --profile quick", tmp_path)
        wanted = 2 if "cuda" in command and not torch.cuda.is_available() else 0
        assert done.returncode == wanted, (known, done.stdout + done.stderr)
    assert (tmp_path / "report" / "conformance.json").exists()
