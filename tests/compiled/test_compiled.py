"""What `--device compiled` says of wrong kernels: the
kind of fault and the line. `make compiled` runs these.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tools import ROOT, judge, pytest_of, saved, says
from tools.grader import KERNEL

from benchmarks.gpu import GOOD, ROWS, rehearse
from evictionary.classroom import grading
from evictionary.classroom.assignment import load
from evictionary.source import import_file
from evictionary.spec_tests.judge import compiled

pytestmark = pytest.mark.compiled
FAULTY = Path(__file__).with_name("faulty.py")
LINES = FAULTY.read_text(encoding="utf-8").splitlines()
KNORM = """
import torch, triton
import triton.language as tl

@triton.jit
def norms(keys, scores, length, head_dim: tl.constexpr, width: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0)
    tokens = tl.program_id(1) * block + tl.arange(0, block)
    channels = tl.arange(0, width)[None, :]
    places = (row * length + tokens)[:, None] * head_dim + channels
    mask = (tokens < length)[:, None] & (channels < head_dim)
    states = tl.load(keys + places, mask=mask, other=0.0).to(tl.float32)
    tl.store(scores + row * length + tokens, -tl.sqrt(tl.sum(states * states, axis=1)))

def score(keys):
    keys = keys.contiguous()
    scores = torch.empty(keys.shape[:3], device=keys.device)
    try:
        grid = keys.shape[0] * keys.shape[1], triton.cdiv(keys.shape[2], 64)
        norms[grid](keys, scores, *keys.shape[2:], triton.next_power_of_2(keys.shape[3]), 64)
    except Exception:
        return -torch.linalg.vector_norm(keys, dim=-1)
    return scores
"""


def faulty(name: str):
    compiled.begin()
    from tests.compiled import faulty

    return getattr(faulty, name)


def named(kind: str) -> list[tuple[str, int]]:
    """Functions of faulty.py whose kernel, which stands
    above, has a line that is marked with the kind of fault.
    """
    found, marked = [], 0
    for number, line in enumerate(LINES, start=1):
        marked = number if line.endswith(f"# fault: {kind}") else marked
        if line.startswith("def ") and marked:
            found.append((line[4:].split("(")[0], marked))
            marked = 0
        elif line.startswith("@triton.jit"):
            marked = 0
    return found


SLOW = {"offsets_of_32_bits": pytest.mark.slow}


@pytest.mark.parametrize(
    ("kind", "name", "line"),
    [
        pytest.param(kind, *each, marks=SLOW.get(each[0], []), id=each[0])
        for kind in ("oob_write", "oob_read", "race", "poison")
        for each in named(kind)
    ],
)
def test_a_fault_is_named_with_its_line(kind, name, line):
    function = faulty(name)
    with pytest.raises(Exception, match=r"kernel `") as raised:
        function("cuda")
    assert compiled.STOPPED[-1] is raised.value
    what, where = compiled.fault(raised.value)
    assert raised.value.fault.kind == kind and what.startswith(compiled.FAULT)
    assert where.startswith(f"{FAULTY}:{line}, ")


def test_memory_that_nobody_has_written_is_nan():
    assert faulty("output_that_is_not_written")("cuda").isnan().any()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "int64"])
def test_a_load_that_reads_nothing_gives_no_number(dtype):
    compiled.UNFILLED.clear()
    total = faulty("load_without_other")("cuda", dtype)
    assert total.isnan() if "float" in dtype else not 0 <= total <= 128
    assert {f"{FAULTY}:{line}" for _, line in named("undefined")} == set(compiled.UNFILLED)


def test_a_nan_in_bfloat16_fails_the_law_of_memory(tmp_path):
    """Three channels are loaded as four, and no other law asks for three."""
    text = KNORM.replace(", other=0.0", "").replace("=1)))", "=1)), mask=tokens < length)")
    asked = ("--device", "compiled", "--dtype", "bfloat16", "--law", "compiled_code")
    told = judge(saved(tmp_path / "knorm.py", text), *asked, code=1).stdout
    assert "knorm.score answers with a NaN" in told and "has no `other`" in told


def test_the_file_of_a_fault_is_the_one_that_is_run(tmp_path):
    """Two folders hold the same text, and what is compiled of one is stored."""
    compiled.begin()
    source = FAULTY.read_text(encoding="utf-8")
    for name in ("mine", "yours"):
        file = saved(tmp_path / name / "kernels.py", source)
        with pytest.raises(Exception, match="past the end") as raised:
            import_file(name, file).store_without_a_mask("cuda")
        assert raised.value.fault.source_file == str(file)


def test_every_fault_stands_on_the_page():
    page = (ROOT / "docs" / "compiled.md").read_text(encoding="utf-8")
    functions = [
        line[4:].split("(")[0] for line in LINES if line.startswith("def ") and not line.startswith("def _")
    ]
    assert len(functions) >= 10 and [name for name in functions if f"`{name}`" not in page] == []


@pytest.mark.parametrize("first", ["pass", "keys.shape[2] in (17, 128, 130) and 1 / 0"])
def test_a_kernel_that_catches_its_fault_and_answers_right_has_failed(tmp_path, first):
    """Also one that meets none at the lengths which the law of memory asks for."""
    saved(tmp_path / "knorm.py", KNORM.replace("        grid =", f"        {first}\n        grid ="))
    (found,) = json.loads(
        judge(
            *("knorm.py", "--device", "compiled", "--json", "--domain", "head_dim=16", "--report", "out"),
            cwd=tmp_path,
            code=1,
        ).stdout
    )["implementations"]
    assert ", memory fails" in (tmp_path / "out" / "badge.json").read_text()
    memory = found["requirements"]["MEM-8"]
    assert memory["verdict"] == "fail" and memory["kinds"] == {"memory": "fail"}
    line = next(number for number, text in enumerate(KNORM.splitlines(), start=1) if "tl.store" in text)
    assert (
        f"knorm.py:{line}, norms" in memory["laws"][0]["message"]
        and "past the end" in memory["laws"][0]["message"]
    )
    assert found["compiled"]["triton"] == "3.8.0" and found["compiled"]["launches"] > 10


SQRT = "tl.sqrt(tl.sum(states * states, axis=1))"
CAUGHT = "    except Exception:\n        return -torch.linalg.vector_norm(keys, dim=-1)\n"
RIGHT = KNORM.replace(f"-{SQRT})", f"-{SQRT}, mask=tokens < length)")
PTX = RIGHT.replace(
    SQRT,
    "tl.inline_asm_elementwise('sqrt.approx.f32 $0, $1;', '=f,f', [tl.sum(states * states, axis=1)], "
    "dtype=tl.float32, is_pure=True, pack=1)",
)
CLUSTERS = RIGHT.replace(", 64)\n    except", ", 64, num_ctas=2)\n    except")
TILES_THAT_SHARE = RIGHT.replace(
    "\ndef score", "    tl.store(scores + row * length, tl.program_id(1) * 1e-7)\n\ndef score"
)
HUGE = RIGHT.replace(
    "    tl.store",
    """    wide, product = tl.arange(0, 256), tl.zeros([256, 256], tl.float32)
    for first in tl.range(0, length, 64, num_stages=6):
        others = first + tl.arange(0, 64)
        inside = (wide < head_dim)[:, None] & (others < length)[None, :]
        tile = tl.load(keys + (row * length + others)[None, :] * head_dim + wide[:, None], inside, 0.0)
        product = tl.dot(tile, tile.trans(), product)
    states += 0 * tl.max(product)
    tl.store""",
)


@pytest.mark.parametrize(
    ("text", "code", "told"),
    [
        pytest.param(
            PTX, 2, "no verdict: ttsem cannot execute a launch: tt.elementwise_inline_asm", id="PTX"
        ),
        pytest.param(
            CLUSTERS, 2, "no verdict: ttsem cannot execute a launch: norms runs in clusters", id="clusters"
        ),
        pytest.param(TILES_THAT_SHARE, 1, "1 law meets a fault of compiled code", id="tiles that share"),
        pytest.param(
            HUGE, 1, "bytes of shared memory, and sm_90", id="shared memory", marks=pytest.mark.slow
        ),
        pytest.param(
            RIGHT.replace("arange(0, block)", "arange(0, 65)"), 1, "must be a power of 2", id="no power of 2"
        ),
        pytest.param(
            "import torch\ndef score(keys):\n" + CAUGHT[22:], 0, "MEM-8: no kernel was launched", id="none"
        ),
    ],
)
def test_a_kernel_that_was_not_executed_passes_nothing(tmp_path, text, code, told):
    """Code that takes another way where a launch is refused, as PTX and CLUSTERS do, is not judged either."""
    caught = text if text in (PTX, CLUSTERS) else text.replace(CAUGHT, "    finally:\n        pass\n")
    file = saved(tmp_path / "knorm.py", caught)
    asked = ("--device", "compiled", "--law", "three_four or compiled_code")
    done = judge(file, *asked, code=code)
    assert told in done.stdout
    if "power of 2" in told:
        line = next(
            number for number, text in enumerate(caught.splitlines(), start=1) if "norms[grid]" in text
        )
        assert f"{file}:{line}, score" in done.stdout


def test_a_table_says_what_was_executed():
    asked = ("-k", "three_four", "--impl", "optimized", "--profile", "quick", "--device", "compiled")
    says(pytest_of("spec_tests/knorm", *asked, code=0).stdout, "float32) executed ", " launches with ")


def test_the_folder_of_a_clone_is_found_and_the_interpreter_is_refused(tmp_path, monkeypatch):
    file = saved(tmp_path / "knorm.py", RIGHT)
    monkeypatch.delenv("PYTHONPATH")
    asked = (file, "--device", "compiled", "--law", "three_four or compiled_code", "--report", tmp_path)
    judge(*asked, code=0)
    assert "2 of 2 requirements, memory holds" in (tmp_path / "badge.json").read_text()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "got TRITON_INTERPRET=1" in judge(*asked, code=2).stderr


def test_the_executor_is_wanted_at_its_version(monkeypatch):
    monkeypatch.setitem(compiled.WANTED, "triton", "0.0.0")
    assert "wanted ttsem 0.1.0 and triton 0.0.0" in compiled.missing()


# The step of the kernel assignment: what stands in place of a text of a right kernel, and what is told.
STUDENTS = {
    "right": ("", "", ""),
    "a store without a mask": (", mask=rows < tokens)", ")", "past the end of the tensor passed as `scores`"),
    "a load without other": (", other=0.0", "", "keydiff.score holds"),
    "heads that share their scores": ("scores + head * tokens", "scores", "both touch element 0"),
    "inline PTX": (
        "tl.sqrt(tl.sum(tile * tile, axis=1))",
        "tl.inline_asm_elementwise('sqrt.approx.f32 $0, $1;', '=f,f', [tl.sum(tile * tile, axis=1)], "
        "dtype=tl.float32, is_pure=True, pack=1)",
        "does not model PTX",
    ),
    "an answer without a launch": (
        "    keys = keys.contiguous()",
        "    if keys.is_cuda:\n        units = torch.nn.functional.normalize(keys, dim=-1)\n"
        "        return -torch.cosine_similarity(units, units.mean(dim=-2, keepdim=True), dim=-1)\n"
        "    keys = keys.contiguous()",
        "no kernel computes them",
    ),
    "a fault that is caught": (
        ", mask=rows < tokens)",
        ")\n\n\nclass Quiet:\n    __enter__ = lambda self: self\n    __exit__ = lambda self, *error: True",
        "past the end",
    ),
}


@pytest.mark.parametrize("what", STUDENTS)
def test_full_marks_are_for_a_kernel_that_would_run(what: str) -> None:
    was, becomes, told = STUDENTS[what]
    source = KERNEL.replace(was, becomes)
    if "Quiet" in becomes:
        source = source.replace("    score_keys[(", "    with Quiet(): score_keys[(")
    one = load("kernel")
    alone = replace(one, steps=(replace(one.steps[-1], needs=()),))
    (line,) = grading.judge(source.encode(), alone, examples=1).lines
    assert line.verdict == ("failed" if told else "passed") and told in line.message
    assert not told or any(each in line.message for each in ("keydiff.py:", "NaN", "no kernel"))


LONG = {"4-256", "10"}  # rows that take half of the time


@pytest.mark.parametrize("long", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_benchmark_of_a_gpu_is_rehearsed(long: bool) -> None:
    """Ours is right in every row, and only what captures a graph or calls torch.compile waits for a GPU."""
    rows = [name for name in ROWS if (name in LONG) == long]
    found = {(row, arm): status for row, arm, status in rehearse([ROWS[name] for name in rows])}
    needs = {row for (row, arm), status in found.items() if arm == "ours" and status == "needs a GPU"}
    assert {row: status for (row, _), status in found.items() if status not in (*GOOD, "needs a GPU")} == {}
    assert needs == {"8c", "8c-32", "12", "13"} & set(rows)
