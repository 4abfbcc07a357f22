"""Methods by name and by file: what their functions
receive, their options, and what is said when they go wrong.
"""

import functools
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tools.reading import IDS, cached, places, positions_of, refused, written
from transformers import LlamaForCausalLM

from evictionary import EvictingCache, reference
from evictionary.errors import MethodError
from evictionary.methods import catalogue
from evictionary.methods.method import Method, Request, tokens_to_keep
from evictionary.methods.resolve import resolve
from evictionary.spec_tests.judge.implementation import load

HALF = Request(compression_ratio=0.5)


@pytest.fixture
def states() -> dict[str, torch.Tensor]:
    """Keys and values [1, 2, 40, 4]."""
    draw = torch.Generator().manual_seed(3)
    return {name: torch.randn(1, 2, 40, 4, generator=draw) for name in ("keys", "values")}


def user_method(folder: Path, text: str, suffix: str = "") -> Method:
    return resolve(written(folder, text) + suffix)


def test_the_file_system_is_the_registry() -> None:
    assert {"keydiff", "knorm", "lagkv", "streaming_llm"} <= set(catalogue.names())
    assert not {"attention", "selection", "checks", "rope"} & set(catalogue.names())
    assert all(catalogue.describe(name)["description"] for name in [*catalogue.names(), "random"])
    wanted = {"paper": "2504.04704", "options": {"sink_size": 16, "lag_size": 1024}}
    assert catalogue.describe("lagkv").items() >= wanted.items()


def test_optimized_is_preferred_and_agrees_with_the_reference(states: dict[str, torch.Tensor]) -> None:
    method = resolve("keydiff")
    assert method.module.__name__ == "evictionary.optimized.keydiff"
    assert places(method.kept(states, HALF).numpy()) == places(
        reference.selection.top_k(reference.keydiff.score(states["keys"].double().numpy()), 20)
    )


def test_every_input_arrives_under_its_name(tmp_path: Path, states: dict[str, torch.Tensor]) -> None:
    text = """
import json
def score(keys, values, queries, hidden_states, positions, length, layer_index, num_layers, budget,
          compression_ratio, keep_ratio):
    assert type(keys).__module__ == "numpy" and keys.dtype == "float64" and values.shape == (1, 2, 40, 4)
    assert queries.shape == (1, 4, 40, 4) and hidden_states.shape == (1, 40, 6)
    assert positions.tolist() == list(range(40)) and positions.dtype == "int64"
    got = length, layer_index, num_layers, budget
    assert got == (40, 1, 3, 4), got
    assert (compression_ratio, keep_ratio) == (0.9, 0.1), keep_ratio
    return keys.sum(-1)
"""
    more = {"queries": torch.ones(1, 4, 40, 4), "hidden_states": torch.ones(1, 40, 6)}
    assert user_method(tmp_path, text).kept(
        states | more, Request(compression_ratio=0.9, layer_index=1, num_layers=3)
    ).sum(-1).tolist() == [[4, 4]]


def test_a_file_that_imports_torch_receives_tensors(tmp_path: Path, states: dict[str, torch.Tensor]) -> None:
    text = (
        "import torch\ndef score(keys, /):\n    assert isinstance(keys, torch.Tensor)\n    return "
        "keys[..., 0]\n"
    )
    kept = user_method(tmp_path, text).kept(states, HALF)
    assert torch.equal(kept, torch.from_numpy(reference.selection.top_k(states["keys"][..., 0].numpy(), 20)))


def test_select_goes_before_score_and_a_function_can_be_named(
    tmp_path: Path, states: dict[str, torch.Tensor]
) -> None:
    text = (
        "def score(keys):\n    return keys[..., 0]\ndef select(keys):\n    return keys[..., 0] == "
        "keys[..., 0]\n"
    )
    assert user_method(tmp_path, text).kept(states, HALF).all()
    assert user_method(tmp_path, text, ":score").kept(states, HALF).sum(-1).tolist() == [[20, 20]]


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.6])
def test_lagkv_meets_the_budget_through_its_keep_ratio(states: dict[str, torch.Tensor], ratio: float) -> None:
    method, options = resolve("lagkv"), {"sink_size": 4, "lag_size": 6}
    budget = reference.selection.budget(40, ratio)
    solved = reference.lagkv.keep_ratio_for(40, budget, **options)
    for named, keep_ratio in ((options, solved), (options | {"keep_ratio": 0.5}, 0.5)):
        left = reference.lagkv.retained_length(40, keep_ratio=keep_ratio, **options)
        assert left <= budget or keep_ratio == 0.5
        assert method.kept(states, Request(compression_ratio=ratio, options=named)).sum(-1).tolist() == [
            [left, left]
        ]


def test_lagkv_says_why_a_short_prompt_stays_whole(states: dict[str, torch.Tensor]) -> None:
    method = resolve("lagkv")
    assert method.kept(states, HALF).all() and "2064" in str(method.why_nothing_removed(40))
    assert method.why_nothing_removed(40, {"lag_size": "8", "sink_size": 4}) is None
    assert resolve("keydiff").why_nothing_removed(40) is None


@pytest.mark.parametrize("given", ["8", 8])
def test_options_have_the_type_of_their_default(given: Any) -> None:
    assert resolve("lagkv").typed_options({"lag_size": given}) == {"lag_size": 8}


@pytest.mark.parametrize("given", ["0.5", "x", True])
def test_options_of_another_type_than_their_default_are_refused(given: Any) -> None:
    refused(lambda: resolve("lagkv").typed_options({"lag_size": given}), "whole number")


def test_options_of_other_types(tmp_path: Path) -> None:
    text = "def score(keys, *, share=0.5, strict=False, mode='mean', window=None):\n    return keys[..., 0]\n"
    method = user_method(tmp_path, text)
    typed = method.typed_options({"share": "1", "strict": "true", "mode": "7", "window": "3"})
    assert typed == {"share": 1.0, "strict": True, "mode": "7", "window": 3}
    refused(lambda: method.typed_options({"strict": "perhaps"}), "true or false")
    refused(lambda: method.typed_options({"shares": 1}), "one of share, strict, mode, window")


SINKS_AND_NEWEST = """
import numpy as np
def select(keys, values, *, keep_ratio, sink_size=4):
    place, length = np.arange(keys.shape[2]), keys.shape[2]
    kept = (place < sink_size) | (place >= length - max(1, int(length * keep_ratio)))
    return np.broadcast_to(kept, keys.shape[:3])
"""


def test_arguments_like_lagkvs_do_not_make_a_method_recursive(
    tmp_path: Path, model: LlamaForCausalLM
) -> None:
    """keep_ratio and sink_size say what a function reads; that it is recursive is for TRAITS alone to say."""
    method = user_method(tmp_path, SINKS_AND_NEWEST)
    assert method.traits == frozenset()
    layer = cached(model, IDS[:, :40], method, 0.5, {"sink_size": 2}, every=4, sizes=[8] * 5).layers[0]
    (positions, _) = positions_of(layer)
    assert not layer.state and positions[:2] == [0, 1] and positions[-1] == 39
    EvictingCache(model, method, budget=10, every=4)  # of a recursive method a budget is refused


@pytest.mark.parametrize(
    ("name", "traits"),
    [
        ("lagkv", {"recursive"}),
        ("gvote", {"own_budget"}),
        ("h2o", {"prompt_only"}),
        ("momentkv", {"every_token", "evicts_first"}),
        ("keydiff", set()),
    ],
)
def test_what_a_method_is_stands_in_its_module(name: str, traits: set[str]) -> None:
    assert resolve(name).traits == traits


def test_a_file_is_read_as_it_is_however_fast_it_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "knorm.py"
    for number in (1, 2):
        path.write_text(f"def score(keys, *, power={number}):\n    return keys.sum(-1)\n")
        os.utime(path, (1e9, 1e9))
        assert resolve(str(path)).options == {"power": number}
        assert load(str(path)).modules["knorm"].score.__kwdefaults__ == {"power": number}


def test_what_a_users_method_is_stands_in_its_file(tmp_path: Path, model: LlamaForCausalLM) -> None:
    score = "def score(keys):\n    return keys.sum(-1)\n"
    assert EvictingCache(model, user_method(tmp_path, f"TRAITS = {{'every_token'}}\n{score}")).every == 1
    once = user_method(tmp_path, f"TRAITS = {{'prompt_only'}}\n{score}")
    message = r"every: got 5, wanted 0: .*mine.py reads the queries of all tokens"
    refused(lambda: EvictingCache(model, once, every=5), message)
    for text, message in (
        (
            f"TRAITS = {{'recursiv'}}\n{score}",
            r"TRAITS of mine.py: got \{'recursiv'\}, wanted a set of every_token, evicts_first",
        ),
        (
            f"TRAITS = {{'recursive'}}{SINKS_AND_NEWEST}",
            r"TRAITS of .*mine.py: got 'recursive', wanted select to take lag_size then",
        ),
    ):
        refused(functools.partial(user_method, tmp_path, text), message)
    recursive = SINKS_AND_NEWEST.replace("sink_size=4", "sink_size=4, lag_size=8")
    assert user_method(tmp_path, f"TRAITS = ('recursive',){recursive}").traits == {"recursive"}


def test_the_heads_of_momentkv_share_a_prompts_budget_by_an_allocator(
    states: dict[str, torch.Tensor],
) -> None:
    """MK-P2: the heads keep different numbers of tokens, as many together; each keeps the first token and
    the window of 4.
    """
    states["queries"] = 8 * torch.randn(1, 4, 40, 4, generator=torch.Generator().manual_seed(0))
    alone, composed = (
        resolve(name).kept(states, Request(budget=8)) for name in ("momentkv", "momentkv+ada_kv")
    )
    assert alone.sum(dim=-1).tolist() == [[8, 8]]
    assert composed.sum() == alone.sum() and len(composed.sum(dim=-1).unique()) > 1
    assert all(kept[..., 0].all() and kept[..., -4:].all() for kept in (alone, composed))


@pytest.mark.parametrize(
    ("text", "suffix", "message"),
    [
        ("def rank(keys):\n    return keys\n", "", "it has rank"),
        ("def score(keys):\n    return keys\n", ":scoer", "wanted a function scoer"),
        ("x = 1\ndef score(keys:\n", "", r"cannot be imported: SyntaxError at mine.py, line 2"),
        ("\n1 / 0\n", "", r"cannot be imported: ZeroDivisionError at mine.py, line 2"),
        ("import sys\nsys.exit(3)\n", "", r"cannot be imported: SystemExit at mine.py, line 2: 3"),
        (
            "def score(keys, logits):\n    return keys\n",
            "",
            r"names the argument logits in score.*some of keys, values, queries",
        ),
    ],
)
def test_files_that_hold_no_method(tmp_path: Path, text: str, suffix: str, message: str) -> None:
    refused(lambda: user_method(tmp_path, text, suffix), message)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("keydif", "did you mean keydiff"),
        ("selection", "wanted one of"),
        ("absent.py", "exists"),
        (
            "keydiff+ada_kv+moments+ada_kv",
            r"got 'ada_kv' twice in 'keydiff\+ada_kv\+moments\+ada_kv', wanted each addition once",
        ),
        ("gvote+ada_kv", "gvote chooses its tokens itself"),
        ("keydiff+ada_kv+chunk_kv", "'chunk_kv' after another addition that chooses tokens by scores"),
        (
            "keydiff+adakv",
            r"got 'adakv' after the \+ \(did you mean ada_kv\?\), wanted one of ada_kv, cake, cam, chunk_kv, "
            r"protect, pyramid_kv, moments",
        ),
        *(
            (name, rf"got '{name}' first, wanted a method before it, such as \w+\+{name}")
            for name in [*catalogue.additions(), "moments"]
        ),
    ],
)
def test_names_and_files_that_are_no_method(name: str, message: str) -> None:
    refused(lambda: resolve(name), message)


@pytest.mark.parametrize(
    ("name", "body", "message"),
    [
        (
            "score",
            "keys",
            r"score in mine.py returned shape \[1, 2, 40, 4\], wanted scores of shape \[1, 2, 40\]",
        ),
        ("score", "keys[..., 0] > 0", "returned dtype torch.bool"),
        ("score", "'high'", "returned str"),
        ("score", "None", "returned NoneType"),
        ("score", "keys[..., 0] * float('nan')", r"returned NaN \(batch 0, head 0, token 0\)"),
        ("score", "keys[..., 9]", "raised IndexError at mine.py, line 2"),
        ("select", "keys[..., 0]", "returned dtype torch.float64, wanted a boolean mask"),
        ("select", "(keys > 0)[..., :3, 0]", r"returned shape \[1, 2, 3\]"),
        ("select", "keys[..., 0] > 1e9", "keeps no token in some head"),
    ],
)
def test_wrong_scores_and_masks_are_named(
    tmp_path: Path, states: dict[str, torch.Tensor], name: str, body: str, message: str
) -> None:
    method = user_method(tmp_path, f"def {name}(keys):\n    return {body}\n")
    refused(lambda: method.kept(states, HALF), message, MethodError)


WRITING = "import {}\ndef score(keys, values):\n    keys *= 2\n    return keys.sum(-1)\n"


def test_the_cache_is_not_written_to(tmp_path: Path, states: dict[str, torch.Tensor]) -> None:
    """A file of torch is refused; arrays are copies, of float64 tensors too, so a file of NumPy may do
    what it likes.
    """
    states = {name: value.double() for name, value in states.items()}
    before = states["keys"].clone()
    user_method(tmp_path, WRITING.format("numpy")).kept(states, HALF)
    assert torch.equal(states["keys"], before)
    message = r"score in mine.py writes into keys, wanted a function that changes a copy"
    refused(lambda: user_method(tmp_path, WRITING.format("torch")).kept(states, HALF), message, MethodError)


@torch.inference_mode()
def test_methods_run_in_inference_mode(tmp_path: Path) -> None:
    method = user_method(tmp_path, "import torch\ndef score(keys):\n    return keys.sum(-1)\n")
    assert method.kept({name: torch.randn(1, 2, 40, 4) for name in ("keys", "values")}, HALF).sum(
        -1
    ).tolist() == [[20, 20]]


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("streaming_llm", {"sink_size": -1}),
        ("gvote", {"p": 2}),
        ("snapkv+ada_kv+moments", {"kernel_size": 4}),
        ("criticalkv", {"first_share": 1.5}),
        ("rkv", {"window_size": 0}),
        ("lagkv", {"lag_size": 0}),
    ],
)
def test_an_option_out_of_range_is_refused_before_a_prompt_is_read(
    model: LlamaForCausalLM, method: str, options: dict[str, Any]
) -> None:
    (name,) = options
    # the file of the method, and not that of a decorator
    where = rf"(in {method.partition('+')[0]}\.py:|^option)"
    refused(lambda: EvictingCache(model, method, options=options), rf"{where} {name}: got {options[name]}")


@pytest.mark.parametrize("method", [*catalogue.names(), "snapkv+ada_kv"])
def test_options_that_fit_are_accepted_before_a_prompt_is_read(model: LlamaForCausalLM, method: str) -> None:
    """Those of the method, and sizes far above the tokens that they are tried out on; what is drawn
    elsewhere stays as it is.
    """
    own = {name: value for name, value in resolve(method).options.items() if name != "calibration"}
    torch.manual_seed(5)
    for options in (own, {name: 4097 if name.endswith("_size") else value for name, value in own.items()}):
        EvictingCache(model, method, options=options)
    assert torch.rand(1) == torch.rand(1, generator=torch.Generator().manual_seed(5))


WASTES = """
import numpy as np
def select(keys, budget):
    kept = np.zeros(keys.shape[:3], dtype=bool)
    kept[..., : min(budget, budget // SHARE + 1)] = True
    return kept
"""


@pytest.mark.parametrize(
    ("share", "traits", "count"), [(10, "", 1), (10, "TRAITS = {'own_budget'}\n", 0), (1, "", 0)]
)
def test_a_select_that_wastes_its_budget_is_told_of_once(
    tmp_path: Path, model: LlamaForCausalLM, share: int, traits: str, count: int
) -> None:
    method = user_method(tmp_path, traits + WASTES.replace("SHARE", str(share)))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        cached(model, IDS[:, :40], method, budget=20)
    assert [str(each.message).count("keeps 3 tokens in a head, where the budget is 20") for each in told] == [
        1
    ] * count


def test_infinite_scores_protect_tokens(tmp_path: Path, states: dict[str, torch.Tensor]) -> None:
    text = (
        "def score(keys):\n    scores = keys[..., 0].copy()\n    scores[..., 5] = float('inf')\n    "
        "return scores\n"
    )
    assert user_method(tmp_path, text).kept(states, Request(budget=1))[..., 5].all()


@pytest.mark.parametrize(
    ("ratio", "budget", "kept"), [(0.9, None, 1), (0.5, 3, 3), (0.5, 99, 10), (0.0, None, 10)]
)
def test_tokens_to_keep(ratio: float, budget: int | None, kept: int) -> None:
    assert tokens_to_keep(10, ratio, budget) == kept


def test_a_folder_with_one_method_is_that_method(tmp_path: Path, model: LlamaForCausalLM) -> None:
    """As `evictionary judge` takes it: the file's name is that of a method."""
    score = "def score(keys):\n    return keys.sum(-1)\n"
    for name in ("keydiff.py", "helpers.py"):
        (tmp_path / name).write_text(score)
    cache = EvictingCache(model, str(tmp_path), budget=3)
    assert cache.method.name == str(tmp_path)
    cache.close()
    (tmp_path / "knorm.py").write_text(score)
    two = f"with 2 methods, wanted {tmp_path / 'keydiff.py'} or {tmp_path / 'knorm.py'}"
    refused(lambda: EvictingCache(model, str(tmp_path)), re.escape(two))
    (empty := tmp_path / "empty").mkdir()
    refused(
        lambda: EvictingCache(model, str(empty)),
        f"with 0 methods, wanted {re.escape(str(empty / 'attention_matching.py'))} in it",
    )
