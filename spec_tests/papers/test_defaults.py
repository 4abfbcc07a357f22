"""What an argument that is left out means: the settings of each paper's experiments, by hand."""

import inspect

from evictionary.reference import (
    ada_kv,
    cake,
    cam,
    chunk_kv,
    expected_attention,
    expected_attention_theory,
    gvote,
    keydiff,
    keydiff_theory,
    lagkv,
    lagkv_variants,
    momentkv,
    momentkv_theory,
    protect,
    pyramid_kv,
    quantisation,
    rope,
    snapkv,
    streaming_llm,
)
from evictionary.spec_tests.judge.law import law


def defaults(module):
    """{function: {argument: default}} of the numbers that
    the functions of a module take where none is given.
    """
    found = {}
    for name, function in inspect.getmembers(module, inspect.isfunction):
        arguments = inspect.signature(function).parameters.values()
        numbers = {each.name: each.default for each in arguments if isinstance(each.default, int | float)}
        if numbers and function.__module__ == module.__name__:
            found[name] = numbers
    return found


ROPE = {"horizon": 512, "theta": 10000.0}


@law("EA-10")
def test_the_settings_of_expected_attention():
    """512 positions ahead, theta = 10000, epsilon = 0.02,
    128 buffered queries, a compression every 512 tokens.
    """
    buffer, epsilon = {"buffer_size": 128}, {"epsilon": 0.02}
    assert defaults(expected_attention) == {
        "average_rotation": ROPE,
        "average_rope": ROPE,
        "score": epsilon,
        "start_decoding": buffer,
        "decode_step": ROPE | epsilon | buffer | {"interval": 512},
    }
    assert defaults(expected_attention_theory) == {"project": {"theta": 10000.0}}


@law("GV-A4")
def test_the_settings_of_gvote():
    """4 sinks, 512 positions ahead, p = 0.95."""
    assert defaults(gvote) == {
        "hidden_statistics": {"sink_size": 4},
        "average_cos_sin": ROPE,
        "rotate_by_average": ROPE,
        "select": {"p": 0.95},
        "algorithm_1": ROPE | {"p": 0.95, "sink_size": 4},
    }


@law("KD-A1")
def test_the_settings_of_keydiff():
    """A division counts 5 operations and a square root 8; blocks are scored by KD-8."""
    assert defaults(keydiff_theory) == {
        "score_step_by_step": {"epsilon": 1e-8},
        "flops": {"division": 5, "square_root": 8},
    }
    for function in (keydiff.process_block, keydiff.process_prompt, keydiff.decode):
        assert inspect.signature(function).parameters["scorer"].default is keydiff.score


@law("LK-12")
def test_the_settings_of_lagkv():
    """16 sinks and partitions of 1024 tokens; the variant by norms leaves two layers whole."""
    sizes = {"sink_size": 16, "lag_size": 1024}
    functions = (
        "retained_length",
        "compression_ratio",
        "keep_ratio_for",
        "why_nothing_removed",
        "select",
        "step",
    )
    assert defaults(lagkv) == dict.fromkeys(functions, sizes)
    assert defaults(lagkv_variants) == {"local_select": sizes, "norm_select": sizes | {"skipped_layers": 2}}


@law("MK-P")
def test_the_settings_of_momentkv():
    """Chunks of 4 tokens, and the first token is protected; the storage is that of the first order."""
    assert defaults(momentkv) == {
        "score_prompt": {"chunk_size": 4},
        "select_prompt": {"sink_size": 1, "chunk_size": 4},
    }
    assert defaults(momentkv_theory) == {"numbers_stored": {"order": 1}}


@law("ROPE-1")
def test_the_base_of_rope():
    """theta = 10000."""
    assert defaults(rope) == {"frequencies": {"theta": 10000.0}, "rotate": {"theta": 10000.0}}


@law("SN-1")
def test_the_settings_of_the_baselines():
    """SnapKV: a window of 32 and a kernel of 7; StreamingLLM: 4 sinks; AdaKV: a fifth for each head;
    PyramidKV: beta = 20; protection: 4 tokens and 32.
    """
    assert defaults(snapkv) == {"score": {"window_size": 32, "kernel_size": 7}}
    assert defaults(streaming_llm) == {"score": {"sink_size": 4}}
    assert defaults(ada_kv) == {"select": {"floor_ratio": 0.2}}
    assert defaults(cake) == {
        "preference": {"window_size": 32, "tau1": 1.0, "tau2": 1.0},
        "budgets": {"window_size": 0},
    }
    assert defaults(cam) == {
        name: {"merge_size": 32} for name in ("merge_values", "probabilities", "shares", "spread")
    }
    assert defaults(chunk_kv) == {name: {"chunk_size": 10} for name in ("choose", "chunk_means")}
    assert defaults(protect) == {name: {"first": 4, "last": 32} for name in ("choose", "protected")}
    assert defaults(pyramid_kv) == {"budgets": {"beta": 20.0, "window_size": 0}}


@law("QC-6")
def test_the_settings_of_quantised_caches():
    """KIVI: 2 bits, groups of 32 and 128 exact tokens; rotation: 4 bits."""
    bits, group, window = {"bits": 2}, {"group_size": 32}, {"residual": 128}
    assert defaults(quantisation) == {
        **dict.fromkeys(("quantise", "pack", "unpack"), bits),
        **dict.fromkeys(("by_token", "by_channel"), bits | group),
        "quantised_tokens": group | window,
        "kivi": bits | group | window,
        "kivi_bytes": bits | group | window | {"bytes_per_number": 2},
        "rotated": {"bits": 4} | group,
    }
