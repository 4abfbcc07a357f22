"""`evictionary verify` knows what `evictionary judge` knows: every function, dtype, size and layout."""

from pathlib import Path
from typing import Any

import pytest
from tools import failed, sampled
from tools.grader import SOLUTION, bundled, written

from conformance.verifiers import BASES
from evictionary.classroom import verifier
from evictionary.errors import UsageError
from evictionary.spec_tests.judge import compiled
from evictionary.spec_tests.judge.domain import Domain
from evictionary.spec_tests.judge.implementation import contract_functions

SETTINGS: dict[str, Any] = {"seed": 1, "examples": 1, "seconds": 60}
SHORT = Domain(max_length=129)
# A function as an argument and slices as answers do not travel.
NOT_HERE = ("cache.heads", "keydiff_theory.transformer_block", "keydiff_theory.attention_policy")
FUNCTIONS = [path for path in contract_functions() if path not in NOT_HERE]
# This law of a state of thousands of tokens has none of 129.
WITH_LONG = ("keydiff.process_block",)
TORCH = BASES["torch"]


def verified(source: str, method: str = "keydiff.score", **settings: Any) -> dict[str, Any]:
    return verifier.verify(
        source.encode(), method.split(".")[0], (method,), **SETTINGS | {"domain": SHORT} | settings
    )


def wrapped(source: str, body: str) -> str:
    """The right file with another score, which may call it by the name `right`."""
    return f"{source}\n\nimport numpy as np\n\nright = score\nkept = {{}}\n\n\n{body}\n"


# A sample at every run, all of them in `make test-all`.
@pytest.mark.parametrize("path", sampled(FUNCTIONS, every=24))
def test_the_reference_of_every_function_is_correct(path: str) -> None:
    domain = Domain() if path in WITH_LONG else SHORT
    found = verified(bundled(path.split(".")[0]), path, domain=domain)
    assert (found["correct"], found["score"], found["functions"]) == (True, 1, [path]), found["verdict"]
    assert "grader::inputs in turn" in found["laws"]["hold"]


@pytest.mark.parametrize("path", NOT_HERE)
def test_what_does_not_travel_is_refused(path: str) -> None:
    with pytest.raises(UsageError, match="does not travel to another process: judge it with"):
        verified(bundled(path.split(".")[0]), path)


REUSED = """def score(k):
    out = kept.setdefault(k.shape, np.empty(k.shape[:-1]))
    out[...] = right(k)
    return out"""
SEEDED = """def score(*arrays):
    np.random.seed(0)
    return right(*arrays)"""


def zeros_where(condition: str) -> str:
    return f"def score(k):\n    return right(k) * (not ({condition}))"


GAPS = zeros_where("k.size > 1 and k.shape[-1] > 1 and k.strides[-1] == 2 * k.itemsize")
WRONG = {
    "reused": (REUSED, "test_memory::test_outputs_are_memory_of_their_own"),
    "seeded": (SEEDED, "test_memory::test_global_random_generators_are_left_alone"),
    "gaps": (GAPS, "test_memory::test_strides_do_not_matter"),
    "expanded": (zeros_where("k.strides[0] == 0"), "test_memory::test_expanded_inputs_are_read_as_copies"),
    "eight heads": (zeros_where("k.ndim == 4 and k.shape[1] == 8"), "grader::8 KV heads, group 4"),
    "128 channels": (zeros_where("k.shape[-1] == 128"), "grader::4 KV heads, group 7"),
    "batch of four": (zeros_where("len(k) == 4"), "grader::8 KV heads, group 4"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_that_a_pipe_or_a_small_input_hides_is_named(mistake: str) -> None:
    body, law = WRONG[mistake]
    domain = Domain() if law.startswith("grader") else SHORT
    found = verified(wrapped(SOLUTION, body), domain=domain, examples=8 if mistake == "gaps" else 1)
    assert not found["correct"] and law in found["laws"]["fail"], found["verdict"]
    assert found["wrong"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_torch_is_asked_in_every_dtype_of_a_model(dtype: str) -> None:
    body = f"def score(k):\n    return right(k) * (k.dtype != torch.{dtype})"
    found = verified(wrapped(TORCH, body))
    assert found["dtypes"]["asked"] == ["float32", "bfloat16", "float16"]
    assert not found["correct"] and all(name.endswith(f"[{dtype}]") for name in found["laws"]["fail"])


@pytest.mark.slow
def test_a_dtype_that_is_refused_is_said_and_one_that_is_asked_for_counts() -> None:
    narrow = "if k.dtype != torch.float32:\n        raise TypeError('float32 alone')"
    body = f"def score(k):\n    {narrow}\n    return right(k)"
    found = verified(wrapped(TORCH, body))
    assert found["correct"] and found["dtypes"]["asked"] == ["float32"]
    assert {*found["dtypes"]["not_asked"]} == {"bfloat16", "float16"}
    assert "float32 alone" in found["dtypes"]["not_asked"]["bfloat16"]
    named = verified(wrapped(TORCH, body), domain=Domain.parse(["dtype=bfloat16", "max_length=129"]))
    assert not named["correct"] and named["dtypes"]["asked"] == ["bfloat16"]


def test_numpy_is_asked_in_the_dtype_that_is_named() -> None:
    body = "def score(k):\n    return right(k) * (k.dtype != np.float32)"
    assert verified(wrapped(SOLUTION, body))["correct"]
    found = verified(wrapped(SOLUTION, body), domain=Domain.parse(["dtype=float32", "max_length=129"]))
    assert not found["correct"] and found["dtypes"]["asked"] == ["float32"]


@pytest.mark.parametrize(
    ("key", "values"), [("head_dim", "8"), ("batch", "2"), ("max_length", "16"), ("length_multiple_of", "4")]
)
def test_every_key_of_a_domain_is_obeyed(key: str, values: str) -> None:
    """Code that is right inside alone is correct."""
    outside = {
        "head_dim": "k.shape[-1] != 8",
        "batch": "k.ndim == 4 and len(k) != 2",
        "max_length": "k.shape[-2] > 16",
        "length_multiple_of": "k.shape[-2] % 4",
    }[key]
    body = f"def score(k):\n    return right(k) * (not ({outside}))"
    short = [] if key == "max_length" else ["max_length=128"]
    assert verified(wrapped(SOLUTION, body), domain=Domain.parse([f"{key}={values}", *short]))["correct"]
    assert not verified(wrapped(SOLUTION, body))["correct"]


def test_packages_are_there_for_whoever_allows_them() -> None:
    source = f"import mpmath\n\n{SOLUTION}"
    found = verified(source)
    assert "mpmath: numpy and Python's own modules are there; --allow mpmath brings" in found["verdict"]
    assert verified(source, allowed=("mpmath",))["correct"]
    # What is refused to everybody stays refused.
    for module in ("evictionary.reference", "socket"):
        told = verified(f"import {module}\n{source}\nimport socket\nsocket.socket()", allowed=("mpmath",))
        assert not told["correct"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--allow", "no_such_package"], "--allow: got 'no_such_package', wanted the name of a package"),
        (["--allow", "evictionary"], "--allow: got 'evictionary', wanted the name of a package"),
        (["--domain", "dtype=bfloat16"], "--domain: got dtype=bfloat16, which NumPy has not"),
        (["--device", "cuda"], "--device: got 'cuda', wanted cpu or compiled"),
        (["--device", "compiled"], "--device: got compiled, wanted a file that imports triton"),
    ],
)
def test_what_cannot_be_asked_is_refused(words: list[str], told: str, tmp_path: Path) -> None:
    assert told in failed("verify", written(tmp_path, SOLUTION, "keydiff.py"), *words, code=2)


@pytest.mark.parametrize("text", ["score = torch.compile(score)", "from torch import compile"])
def test_torch_compile_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(UsageError, match=r"torch\.compile starts a compiler and writes files"):
        verified(f"{TORCH}\n{text}\n")


AUTOTUNED = """
import torch
import triton
import triton.language as tl


@triton.autotune(configs=[triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64})], key=["length"])
@triton.jit
def norms(
    keys, out, length, channels, batch_step, head_step, row_step, step, heads,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):
    row, tile = tl.program_id(0), tl.program_id(1)
    tokens, columns = tile * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDE)
    inside = (tokens[:, None] < length) & (columns[None, :] < channels)
    start = keys + (row // heads) * batch_step + (row % heads) * head_step
    places = start + tokens[:, None] * row_step + columns[None, :] * step
    block = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * length + tokens, -tl.sqrt(tl.sum(block * block, 1)), mask=tokens < length)


def score(keys):
    if keys.ndim != 4 or keys.numel() == 0 or not torch.isfinite(keys).all():
        raise ValueError("keys: wanted finite numbers [B, H_kv, T, D]")
    batch, heads, length, channels = keys.shape
    out = torch.empty((batch, heads, length), dtype=torch.float32, device=keys.device)
    grid = lambda chosen: (batch * heads, triton.cdiv(length, chosen["BLOCK"]))
    norms[grid](keys, out, length, channels, *keys.stride(), heads, WIDE=triton.next_power_of_2(channels))
    return out.to(keys.dtype)
"""


@pytest.mark.slow
def test_an_autotuned_kernel_runs_with_its_first_configuration() -> None:
    found = verified(AUTOTUNED, "knorm.score")
    assert found["correct"], found["verdict"]
    assert found["dtypes"]["asked"] == ["float32", "float16"]
    assert "no bfloat16" in found["dtypes"]["not_asked"]["bfloat16"]


@pytest.mark.compiled
def test_compiled_code_is_verified_and_a_read_past_the_end_found() -> None:
    settings = {"device": compiled.DEVICE, "seconds": 300}
    found = verified(AUTOTUNED, "knorm.score", **settings)
    assert found["correct"] and found["device"] == compiled.DEVICE, found["verdict"]
    beyond = AUTOTUNED.replace(
        "(tokens[:, None] < length) & (columns[None, :] < channels)", "columns[None, :] < channels"
    )
    faulty = verified(beyond, "knorm.score", **settings)
    assert not faulty["correct"] and "past the end" in faulty["wrong"]
