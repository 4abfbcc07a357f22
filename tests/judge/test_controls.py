"""No false alarms: correct but different implementations pass every law, at every dtype that they claim."""

import importlib
from collections import Counter
from pathlib import Path

import pytest
from tools import sampled

from evictionary.spec_tests.judge.cases import Case
from evictionary.spec_tests.judge.implementation import STEMS, load
from evictionary.spec_tests.judge.law import load_laws
from evictionary.spec_tests.judge.outcome import outcome
from evictionary.spec_tests.proof.alarms import alarms
from evictionary.spec_tests.proof.planted import load_controls

CONTROLS = load_controls()
EXAMPLES = 12
# One dtype of each here, the last that it claims; `make measure` takes all of them over 200 seeds.
# A sample at every run, all of them in `make test-all`.
SAMPLED = sampled([(name, control.dtypes[-1]) for name, control in sorted(CONTROLS.items())], every=40)


@pytest.mark.parametrize(("name", "dtype"), SAMPLED)
def test_no_law_raises_an_alarm_on_a_correct_implementation(name: str, dtype: str) -> None:
    assert alarms(name, dtype, seed=0, max_examples=EXAMPLES) == []


# Each was an alarm once: a rounding that the law did not know, an error that mathematics asked for, what
# float16 cannot hold, angles of float32 at position 1,000, a tie, what a paper
# leaves open.
SILENCED = [
    ("keydiff.torch_cosine_to_the_anchor", "float32", 23, False),
    ("selection.torch_topk", "float32", 0, False),
    ("criticalkv.change_by_change", "float64", 0, False),
    ("momentkv_theory.exponentials_once", "float64", 0, True),
    ("momentkv.torch_widened", "float16", 2, True),
    ("triattention.torch_tables", "float32", 1, False),
    ("duo_attention.torch_estimate", "float32", 1, False),
    ("attention.padded_storage", "float64", 118, False),
    ("ada_kv.select_last_of_equals", "float64", 0, False),
    ("keydiff_variants.select_with_recent_last_of_equals", "float64", 0, False),
    ("momentkv.decode_step_last_of_equals", "float64", 0, False),
    ("momentkv.select_prompt_last_of_equals", "float64", 0, False),
    ("expected_attention_theory.leaving_one_out", "float32", 2, False),
    ("rope.torch_tables_in_the_dtype", "float32", 69, True),
    ("triattention.torch_tables", "float64", 0, False),
    ("criticalkv.score_last_of_equals", "float64", 46, True),
    ("h2o.torch_odd_token_to_the_heavy_hitters", "float64", 0, True),
    ("kv_cache.torch_decode", "float32", 69, True),
    ("kv_cache.torch_prefill", "float32", 69, True),
    ("lagkv_variants.torch_local_select", "bfloat16", 23, True),
    ("quantisation.torch_scaled", "float64", 184, True),
    ("keydiff.torch_in_float32", "float16", 46, False),
]


@pytest.mark.parametrize(("name", "dtype", "seed", "bare"), SILENCED)
def test_an_alarm_that_was_mended_stays_silent(name: str, dtype: str, seed: int, bare: bool) -> None:
    assert alarms(name, dtype, seed=seed, max_examples=4, bare=bare) == []


def test_scores_in_a_wider_dtype_than_their_selection_gets_are_no_mistake(tmp_path: Path) -> None:
    """Kernels in half precision answer with float32 scores. A law compared the selection with those, and
    top-k had rounded ones.
    """
    (tmp_path / "dropkv.py").write_text(
        "from evictionary.optimized import dropkv\n\n\ndef score(*states, **settings):\n"
        "    return dropkv.score(*(each.float() for each in states), **settings)\n"
    )
    (tmp_path / "selection.py").write_text("from evictionary.optimized.selection import top_k\n")
    implementation = load(str(tmp_path), dtype="bfloat16")
    law = load_laws()["test_dropkv::test_the_window_is_kept"]
    assert [outcome(law, implementation, max_examples=10, seed=seed) for seed in (0, 1, 2)] == [
        ("passed", "")
    ] * 3
    assert implementation.calls[-2].dtype == "float32"


@pytest.mark.parametrize("law", ["same_call_gives_the_same_bits", "poisoned_memory_does_not_shine_through"])
def test_a_program_compiled_anew_may_round_otherwise(law: str) -> None:
    """torch.compile makes another program in deterministic mode,
    and one for any size: one ulp was called unwritten memory.
    """
    implementation = CONTROLS["keydiff.torch_compiled_anew"].implementation("float32")
    found = next(each for name, each in load_laws().items() if name.endswith(law))
    assert outcome(found, implementation, max_examples=20) == ("passed", "")


def test_the_loops_of_a_law_may_round_large_logits() -> None:
    """Queries and keys of a thousand have logits of millions,
    whose roundings the law took for an error of the oracle.
    """
    case = Case(
        kind="huge",
        seed=8761,
        batch=2,
        num_kv_heads=3,
        group=4,
        length=16,
        head_dim=64,
        value_dim=64,
        num_queries=3,
    )
    load_laws()["test_keydiff_blocks::test_causal_attention_in_plain_loops"].check(
        load("reference", dtype="float64"), case=case
    )


def test_every_method_has_three_controls() -> None:
    methods = {
        stem for stem in STEMS if hasattr(importlib.import_module(f"evictionary.reference.{stem}"), "METHOD")
    }
    counts = Counter(control.of.split(".")[0] for control in CONTROLS.values())
    assert {stem for stem in methods if counts[stem] < 3} == set()
