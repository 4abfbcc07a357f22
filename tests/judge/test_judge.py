"""`evictionary judge`: what an implementation says of itself
is respected, and three classes of law are told apart.
"""

import inspect
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import settings
from tools import json_in, judge as judged, laid, refused, saved, says

from evictionary.spec_tests.judge.cases import Case
from evictionary.spec_tests.judge.degenerate import MATHEMATICS, REFUSAL
from evictionary.spec_tests.judge.domain import BadDomain, Domain, NothingToAsk, OutsideDomain
from evictionary.spec_tests.judge.implementation import NOT_SEAMS, STEMS, load
from evictionary.spec_tests.judge.law import ENOUGH_OUTSIDE, load_laws

# As kernel authors write them: nothing is checked, and head_dim is what the tile is.
UNCHECKED = """
import numpy as np

def score(keys):
    assert keys.shape[-1] in (64, 128) and keys.shape[-2] % 16 == 0
    directions = keys / np.sqrt((keys * keys).sum(-1, keepdims=True))
    mean = directions.mean(-2, keepdims=True)
    return -(directions * mean).sum(-1) / np.sqrt((mean * mean).sum(-1))
"""
DOMAIN = 'DOMAIN = {"head_dim": (64, 128), "length_multiple_of": 16}\n'
RAW_MEAN = """
import numpy as np

def score(keys):
    mean = keys.mean(-2, keepdims=True)
    return -(keys * mean).sum(-1) / np.sqrt((keys * keys).sum(-1) * (mean * mean).sum(-1))
"""
# LagKV's softmax added up token by token: right, and off by more roundings than the plain sum.
LOG_ADD_EXP = """
import numpy as np

def part(states, following):
    low, high = following.min(-2, keepdims=True), following.max(-2, keepdims=True)
    deviation = ((states - low) / (high - low)).std(-1, ddof=1)
    return np.exp(deviation - np.logaddexp.reduce(deviation, axis=-1, keepdims=True))

def score(keys, values, next_keys, next_values):
    return part(keys, next_keys) + part(values, next_values)
"""
POSITIONS = """
import numpy as np

CONVENTIONS = ("indices",)

def top_k(scores, budget, protected=None):
    if protected is not None:
        scores = np.where(protected, np.inf, scores)
    return np.argsort(-scores, axis=-1, kind="stable")[..., :budget]
"""


def judge(*arguments: str | Path, code: int = 0) -> str:
    done = judged(*arguments, code=code)
    return done.stdout + done.stderr


def verdicts(*arguments: str | Path, code: int = 0) -> dict[str, Any]:
    return json_in(judge(*arguments, "--json", code=code))["implementations"][0]["requirements"]


def last_line(output: str) -> str:
    return next(line for line in reversed(output.splitlines()) if line.startswith(("PASS", "FAIL")))


IGNORES_STRIDES = """
import torch

def score(keys):
    if keys.ndim < 2 or 0 in keys.shape or not torch.isfinite(keys).all():
        raise ValueError("keys: got no finite numbers")
    memory = torch.as_strided(keys, keys.shape, torch.empty(keys.shape).stride(), keys.storage_offset())
    return -memory.norm(dim=-1)
"""


def test_the_laws_of_memory_are_asked_of_the_method_that_is_named(tmp_path: Path) -> None:
    files = {
        "knorm.py": IGNORES_STRIDES,
        "selection.py": POSITIONS.replace("import numpy", "import torch, numpy"),
    }
    law = ("--law", "strides_do_not_matter or minus_the_norm or budget_beyond")
    found = verdicts(laid(tmp_path, files), "--method", "knorm", *law, code=1)
    assert (found["MEM-4"]["verdict"], found["KN-1"]["verdict"]) == ("fail", "pass")
    assert "SEL-2" not in found


def test_the_laws_of_memory_ask_the_functions_of_the_methods_alone() -> None:
    reference = load("reference")
    reference.methods = ("keydiff",)
    assert {path.partition(".")[0] for path in reference.asked_of_memory()} == {
        stem for stem in STEMS if stem.startswith("keydiff")
    } - set(NOT_SEAMS)


@pytest.mark.parametrize(
    ("named", "code", "verdict", "reason"),
    [
        ((), 1, "fail", "knorm.score raises ZeroDivisionError: division by zero"),
        # a file of laws, and no method
        (("--method", "lagkv_sizes"), 2, "not provided", "no function belongs to lagkv_sizes"),
    ],
)
def test_a_law_of_memory_fails_for_what_raises_and_does_not_apply_where_nothing_is_asked(
    tmp_path: Path, named: tuple[str, ...], code: int, verdict: str, reason: str
) -> None:
    files = {"rope.py": "def rotate(*_): ...", "knorm.py": "import numpy\ndef score(keys): 1 / 0"}
    memory = verdicts(laid(tmp_path, files), "--law", "strides_do_not_matter", *named, code=code)["MEM-4"]
    said = [law["said"]["what is wrong"] for law in memory["laws"]] or [memory["reason"]]
    assert (memory["verdict"], said) == (verdict, [reason])


@pytest.mark.parametrize(("said", "library"), [("", "torch"), ('ARRAY_LIBRARY = "numpy"\n', "numpy")])
def test_a_file_says_with_which_library_it_computes(tmp_path: Path, said: str, library: str) -> None:
    (tmp_path / "knorm.py").write_text(f"import torch\n{said}def score(keys):\n    return keys.sum(-1)\n")
    assert load(str(tmp_path)).array_library == load(str(tmp_path / "knorm.py")).array_library == library


@pytest.mark.parametrize(
    ("said", "functions"),
    [("", ["selection.budget", "selection.top_k"]), ('IMPLEMENTS = {"top_k": None}\n', ["selection.budget"])],
)
def test_a_helper_with_a_name_of_the_contract_is_left_out_where_the_file_says_so(
    tmp_path: Path, said: str, functions: list[str]
) -> None:
    helper = "def top_k(scores, budget, protected=None):\n    return scores\n"
    (tmp_path / "selection.py").write_text(f"{helper}def budget(length, ratio):\n    return 1\n{said}")
    assert load(str(tmp_path)).functions() == functions


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keydiff.py"


def test_a_right_kernel_that_checks_nothing_holds_inside_its_domain(file: Path) -> None:
    output = judge(saved(file, UNCHECKED + DOMAIN), "--method", "keydiff")
    assert re.search(r"mathematics    pass: [\w-]+(, [\w-]+)*$", output, flags=re.MULTILINE)
    assert re.fullmatch(
        r"PASS: \d+ laws hold(, \d+ laws? of (edge|refusal) fails? \(counted only with --strict\))*",
        last_line(output),
    )
    declared = saved(file, UNCHECKED + 'CONVENTIONS = ("unchecked",)\n')
    kinds = verdicts(declared, "--domain", "head_dim=64,128 length_multiple_of=16")["KD-8"]["kinds"]
    assert kinds["mathematics"] == "pass" and "refusal" not in kinds


@pytest.mark.slow
def test_degenerate_input_and_refusals_count_where_they_are_asked_for(file: Path) -> None:
    file.write_text(
        UNCHECKED.replace("    assert keys.shape[-1] in (64, 128) and keys.shape[-2] % 16 == 0\n", "")
    )
    output = judge(file, "--method", "keydiff")
    assert re.search(r"mathematics    pass: [\w-]+(, [\w-]+)*$", output, flags=re.MULTILINE)
    assert "edge           fail: KD-8 (counted only with --strict)" in output
    judge(file, "--method", "keydiff", "--strict", code=1)


@pytest.mark.slow
def test_a_wrong_kernel_fails_inside_its_domain(file: Path) -> None:
    output = judge(
        saved(file, UNCHECKED.replace("return -(", "return (") + DOMAIN), "--method", "keydiff", code=1
    )
    assert last_line(output).startswith("FAIL: ")
    assert output.index("what is wrong") < output.index("an input")  # what is wrong is read first
    bug, input_of_a_line = "your numbers match a known bug: the sign left out", "keys = impl.round(case.keys)"
    says(output, "mathematics    fail: KD-8", bug, input_of_a_line)


@pytest.mark.slow
def test_what_needs_a_requirement_that_fails_is_not_judged(tmp_path: Path) -> None:
    folder = laid(tmp_path, {"keydiff.py": RAW_MEAN, "selection.py": POSITIONS})
    found = verdicts(folder, "--method", "keydiff,selection", code=1)
    assert found["KD-8"]["verdict"] == "fail"
    assert (found["KD-O"]["verdict"], found["KD-O"]["reason"]) == ("not judged", "KD-8 fails")


def test_a_declared_variant_is_judged_as_that_variant(file: Path) -> None:
    found = verdicts(saved(file, RAW_MEAN + 'IMPLEMENTS = {"score": "keydiff.raw_mean_score"}\n'))
    assert (found["KD-8"]["verdict"], found["KD-T2"]["kinds"]["mathematics"]) == ("variant", "pass")


def test_a_selection_may_be_positions(tmp_path: Path) -> None:
    found = verdicts(laid(tmp_path, {"selection.py": POSITIONS}))
    asked = {"SEL-2": "mathematics", "SEL-3": "edge", "SEL-4": "mathematics"}
    assert {name: found[name]["kinds"][kind] for name, kind in asked.items()} == dict.fromkeys(asked, "pass")


def test_a_softmax_by_log_add_exp_is_right(tmp_path: Path) -> None:
    assert (
        "fail"
        not in judge(saved(tmp_path / "lagkv.py", LOG_ADD_EXP), "--method", "lagkv").partition("edge")[0]
    )


@pytest.mark.slow
def test_an_expected_failure_is_none_and_an_idle_line_is_told(file: Path, tmp_path: Path) -> None:
    known = saved(tmp_path / "known.txt", "KD-8 the raw mean is what we ship\nKN-1 long mended\n")
    output = judge(saved(file, RAW_MEAN), "--method", "keydiff", "--expected-failures", known)
    says(output, "expected failure: KD-8 (the raw mean is what we ship)", "KN-1 did not fail")


def test_a_right_function_that_answers_in_float32_is_told_of_its_dtype(file: Path) -> None:
    """A file of NumPy is judged in float64, where a kernel
    that computes in float32 is wrong in the eighth digit.
    """
    file.write_text(UNCHECKED.replace("(keys):", "(keys):\n    keys = keys.astype(np.float32)") + DOMAIN)
    law = ("--law", "test_score_is_minus_the_cosine_to_the_anchor")
    assert (
        "the dtype       it answers in float32 and is judged in float64; `--dtype float32` judges it in "
        "its own"
    ) in judge(file, *law, code=1)
    assert "the dtype" not in judge(file, *law, "--dtype", "float32")


def test_the_command_for_one_law_repeats_what_the_run_was_asked_for(file: Path) -> None:
    asked = "--dtype float32 --profile quick --timeout 9.0 --domain head_dim=4 --method keydiff --strict"
    assert f"judge {file} {asked} --law test_" in judge(saved(file, RAW_MEAN), *asked.split(), code=1)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("DOMAIN = {'heads': 3}", "heads: got a key that no domain has"),
        ("DOMAIN = {'head_dim': ()}", "leaves nothing to draw"),
        ("DOMAIN = {'head_dim': 0}", "head_dim: got 0, wanted a whole number of at least 1"),
        ("DOMAIN = {'dtype': 'float8'}", "dtype: got 'float8'"),
        (
            "DOMAIN = {'length_multiple_of': 64, 'max_length': 63}",
            "max_length: got 63, with which no length is left",
        ),
        ("IMPLEMENTS = {'score': 'keydiff.nonsense'}", "IMPLEMENTS: got 'keydiff.nonsense' for score"),
        ("IMPLEMENTS = {'rank': 'keydiff.raw_mean_score'}", "keydiff.py has no function rank"),
        ("CONVENTIONS = ('bitmaps',)", "CONVENTIONS: got 'bitmaps'"),
    ],
)
def test_what_cannot_be_understood_is_a_sentence(file: Path, text: str, wanted: str) -> None:
    assert wanted in judge(saved(file, RAW_MEAN + text), code=2)


def test_no_law_of_mathematics_asks_for_an_error() -> None:
    laws = [law for law in load_laws().values() if law.functions and law.kind != REFUSAL]
    sources = {law.name: inspect.getsource(inspect.unwrap(law.check)) for law in laws}
    assert not [name for name, source in sources.items() if re.search(r"\.refuses\(|pytest\.raises", source)]
    reference = load("reference")
    reference.asking = MATHEMATICS
    with (
        pytest.raises(RuntimeError, match="refuses: got a law of the class mathematics"),
        reference.refuses("keys"),
    ):
        reference.keydiff.score(np.zeros((2, 0, 4, 3)))


def test_numbers_that_a_dtype_cannot_hold_are_outside_of_what_is_asked() -> None:
    reference, keys = load("reference", dtype="float16"), np.full((1, 1, 1, 64), 6e4)
    refused(
        lambda: reference.allowance("knorm.score", keys), "float16 cannot hold the numbers", OutsideDomain
    )


def test_a_law_that_finds_nothing_inside_a_domain_soon_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, outside = load("reference"), Mock(side_effect=OutsideDomain("a size that it does not take"))
    monkeypatch.setattr(reference, "call", outside)
    law = load_laws()["test_keydiff::test_scores_are_cosines"].test(settings(database=None))
    refused(lambda: law(impl=reference), "a size that it does not take", NothingToAsk)
    assert outside.call_count == ENOUGH_OUTSIDE


def test_a_domain_moves_what_was_drawn_inside_it() -> None:
    domain = Domain.parse(["head_dim=64,128", "group=4", "length_multiple_of=16", "lag_size=128"])
    moved = domain.fitted({"case": Case(seed=3, length=9, group=3), "lag": 4})
    case = moved["case"]
    assert (case.head_dim, case.value_dim, case.group, moved["lag"]) == (128, 128, 4, 128)
    assert case.length % 16 == 0 and case.length >= 9 * 128 // 4
    assert not domain.excludes({"keys": case.keys, "values": case.values, "queries": case.queries})
    some = Domain.parse(["head_dim=1,2,3,4"])
    for seed in range(4):
        moved = some.fitted({"pairs": Case(seed=seed, head_dim=6), "any": Case(seed=seed, head_dim=5)})
        # a law about RoPE asks for pairs of channels
        assert (moved["pairs"].head_dim % 2, moved["any"].head_dim % 2) == (0, 1)
    refused(lambda: Domain.parse(["head_dim=x"]), "head_dim: got 'x'", BadDomain)
