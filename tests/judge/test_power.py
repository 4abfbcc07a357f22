"""What the laws still see in half precision, and inside a domain of 64 channels, where real kernels run."""

import functools
import tomllib
import types
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import typer
from tools import refused, sampled, saved

from evictionary.spec_tests.judge import law, tolerance
from evictionary.spec_tests.judge.degenerate import MATHEMATICS
from evictionary.spec_tests.judge.domain import Domain
from evictionary.spec_tests.judge.implementation import Implementation, oracle
from evictionary.spec_tests.judge.law import load_laws
from evictionary.spec_tests.judge.outcome import outcome
from evictionary.spec_tests.judge.widen import widened
from evictionary.spec_tests.proof import alarms, asking, matrix, power
from evictionary.spec_tests.proof.planted import load_controls, load_mutants, replaced

LAWS = load_laws()
ASKED = sorted(name for name, law in LAWS.items() if law.functions and law.kind == MATHEMATICS)
CHANNELS = Domain.read({"head_dim": (64,)})


def reference_at(dtype: str) -> Implementation:
    found = replaced("reference", {}, dtype=dtype)
    found.domain |= CHANNELS
    return found


# Why these allow as much as they expect, or more, in half precision.
ANGLE = (
    "an angle of a far position is a product rounded in float32, and the mean of many turns nearly cancels"
)
LARGE = "a logit of 1e4 in half precision is off by tens; the law asks that nothing overflows"
SINK = "a sink of 50 has a logit that bfloat16 knows to a quarter, and it shares its weight with three others"
PARTS = (
    "of the log-sum-exps of two parts half precision keeps so few digits that their shares are known to "
    "some per cent"
)
TWO_BITS = "half a step of two bits is as much as a number is; the law asks first for a number of the group"
SIMILAR = "a cosine near the threshold may be on either side of it, and then a row counts another key"
WIDE = {
    "test_attention::test_two_disjoint_caches_merge_exactly": PARTS,
    "test_cake::test_the_total_is_exact_and_each_layer_has_its_share": (
        "a budget is whole, and may lie a token for each layer from its share"
    ),
    "test_criticalkv::test_every_token_of_a_long_prompt_has_its_score": SINK,
    "test_expected_attention::test_the_expectation_is_that_of_sampled_queries": (
        "the log of the ratio of two scores is small where the scores are near each other"
    ),
    "test_expected_attention_sizes::test_queries_of_far_positions_turn_by_them": ANGLE,
    "test_expected_attention_statistics::test_mean_and_covariance_are_turned_alike": ANGLE,
    "test_expected_attention_statistics::test_the_horizon_is_512_and_the_base_10000_unless_given": ANGLE,
    "test_momentkv::test_a_predicted_token_scores_zero": "float16 has no digits at a scale of 2^-22",
    "test_momentkv::test_logits_of_ten_thousand_do_not_overflow_the_score": LARGE,
    "test_momentkv_attend::test_logits_of_ten_thousand_do_not_overflow": LARGE,
    "test_momentkv_sizes::test_thousands_of_tokens_and_their_moments_mix": SINK,
    "test_momentkv_theory::test_the_geometric_bound_is_the_printed_number": (
        "what half precision rounds of an exponent is a factor of the exponential"
    ),
    "test_quantisation::test_a_long_text_is_quantised_group_by_group": TWO_BITS,
    "test_quantisation::test_keys_of_a_long_text_share_a_scale_along_the_tokens": TWO_BITS,
    "test_rkv::test_every_token_of_a_long_prompt_has_its_importance": SINK,
    "test_rkv::test_the_released_code_leaves_out_token_0_where_no_key_is_similar": SIMILAR,
    "test_rope::test_a_quarter_turn_moves_the_first_half_to_the_second": (
        "all but two of 64 numbers are expected to be 0, and those two are larger than what is allowed"
    ),
    "test_rope::test_a_dot_product_depends_on_the_distance_only": ANGLE,
    "test_rope::test_rotations_add_up": ANGLE,
    "test_triattention::test_a_constant_added_to_all_positions_changes_nothing": ANGLE,
    "test_triattention::test_the_last_offset_is_65536_by_default": ANGLE,
    "test_triattention::test_with_constant_queries_s_is_the_exact_logit": ANGLE,
}


def shares(name: str, dtype: str) -> list[float]:
    """Of each comparison of a law, the mean error that is
    allowed in parts of the mean number that is expected.
    """
    tolerance.LISTENERS.append(found := [])
    try:
        outcome(LAWS[name], reference_at(dtype), max_examples=8)
    finally:
        tolerance.LISTENERS.pop()
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", sampled(ASKED, every=40))
def test_no_law_allows_as_much_as_it_expects(name: str, dtype: str) -> None:
    """One that does would pass a tensor of zeros. Those that must say why."""
    found = shares(name, dtype)
    assert not found or median(found) <= 1 or name in WIDE


@pytest.mark.parametrize(
    ("sizes", "head_dims", "found"),
    [
        ((2, 2), (64,), 64),
        ((4, 4), (32, 64), 64),
        ((2, 65), (64, 256), None),
        ((128, 2), (64,), None),
        ((64, 2), (16, 256), 256),
    ],
)
def test_channels_are_added_and_never_taken(
    sizes: tuple[int, int], head_dims: tuple[int, ...], found: int | None
) -> None:
    """A factor of four comes first; more channels of keys
    or values than there is room for leave the law out.
    """
    states = {"keys": np.ones((1, 1, 3, sizes[0])), "values": np.ones((1, 1, 3, sizes[1]))}
    wide = widened("momentkv.no_moments", oracle("momentkv.no_moments"), states, Domain(head_dim=head_dims))
    assert (wide and wide[0]["keys"].shape[-1]) == found


def test_a_law_by_hand_is_asked_of_a_kernel_for_64_channels() -> None:
    """Channels of zeros change no logit, so the law is asked. One whose numbers they change is not."""
    asked = LAWS["test_h2o::test_equal_keys_score_by_how_long_they_were_seen"]
    apart = LAWS["test_lagkv::test_the_deviation_is_that_of_a_sample"]
    assert outcome(asked, reference_at("bfloat16"))[0] == "passed"
    wrong = load_mutants()["h2o.mean_over_queries"].implementation("bfloat16")
    wrong.domain |= CHANNELS
    assert outcome(asked, wrong)[0] == "killed"
    assert outcome(apart, reference_at("float64")) == ("not asked", "head_dim 2 lies outside its domain (64)")


def test_a_kernel_may_multiply_before_it_divides() -> None:
    """Logits of 1e4 are 8e4 before they are divided by the root of 64 channels; float16 ends at 65,504."""
    law = LAWS["test_gvote_steps::test_weights_of_large_logits_are_finite"]
    right = load_controls()["gvote.torch_weights"].implementation("float16", bare=True)
    right.domain |= CHANNELS
    assert {outcome(law, right, seed=seed)[0] for seed in range(8)} <= {"passed", "not asked"}


def test_at_most_three_of_a_hundred_mistakes_live_and_each_for_a_reason() -> None:
    """What docs/power.json.xz stores of each dtype and number
    of channels, and the reasons that the kill matrix gives.
    """
    reasons = {
        name
        for names in tomllib.loads((asking.DOCS / "alive.toml").read_text(encoding="utf-8")).values()
        for name in names
    }
    alive = [power.names(cell, "none") for cell in power.cells().values()]
    assert len(alive) == 6
    assert max(map(len, alive)) <= 0.03 * len(load_mutants())
    assert set().union(*alive) <= reasons <= set(load_mutants())


def test_only_mistakes_whose_killer_has_changed_are_judged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistake that one law kills is known while that law is the same; one that lives, while all are."""
    version, asked = asking.law_version, list[str]()
    killer = {name: matrix.laws_for(each)[0].name for name, each in load_mutants().items()}

    def dies(name: str, *_: object) -> tuple[str, str]:
        asked.append(name)
        return ("none", "") if "epsilon" in name else ("own", killer[name])

    def again() -> set[str]:
        asked.clear()
        power.run_power("bfloat16", 64, 1, 1, only=[])
        return set(asked)

    monkeypatch.setattr(power, "POWER", tmp_path / "power.json.xz")
    monkeypatch.setattr(power, "dies", dies)
    every = set(load_mutants())
    assert again() == every
    assert again() == set()
    changed = killer["h2o.later_tokens_seen"]
    monkeypatch.setattr(
        asking, "law_version", lambda name, folder: version(name, folder) + "0" * (name == changed)
    )
    alive = {name for name in every if "epsilon" in name}
    assert again() == {name for name in every - alive if killer[name] == changed} | {
        name for name in alive if changed in [law.name for law in matrix.laws_for(load_mutants()[name])]
    }
    cell = power.cells()["bfloat16 64"]
    assert set(power.names(cell, "none")) == alive and power.earlier(cell) == []
    del cell["mutants"]["h2o.later_tokens_seen"]
    assert power.folders_of(power.earlier(cell)) == ["h2o"]
    refused(
        functools.partial(matrix.main, only=["h20"]), "--only: got 'h20', wanted some of", typer.BadParameter
    )


def test_only_variants_and_laws_that_have_changed_are_judged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And an alarm stays known while its law is not asked again."""
    version, asked = asking.law_version, dict[str, list[str]]()

    def over_seeds(name: str, seeds: int, max_examples: int, laws: list[str]) -> list[tuple[str, str]]:
        asked[name] = laws
        return [(laws[0], f"{name} was called wrong")] if name == "h2o.tokens_first" else []

    def again(seeds: int = 3) -> dict[str, list[str]]:
        asked.clear()
        assert alarms.run_controls(seeds, 1, 1, []) == 1
        return dict(asked)

    monkeypatch.setattr(alarms, "CONTROLS", tmp_path / "controls.json.xz")
    monkeypatch.setattr(alarms, "over_seeds", over_seeds)
    every = {name: sorted(law.name for law in alarms.owed_by(each)) for name, each in load_controls().items()}
    assert again() == every
    assert again() == again(2) == {} and alarms.earlier() == []
    changed = every["h2o.tokens_first"][1]
    monkeypatch.setattr(
        asking, "law_version", lambda name, folder: version(name, folder) + "0" * (name == changed)
    )
    assert "h2o" in alarms.earlier()
    alarms.run_controls(3, 1, 1, [])
    assert asked == {name: [changed] for name, laws in every.items() if changed in laws}
    found = alarms.measured()["variants"]["h2o.tokens_first"]["alarms"]
    assert [law for law, _ in found] == [every["h2o.tokens_first"][0], changed]


def test_the_matrix_asks_again_what_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A law that has changed is asked about every mistake, a new mistake of every law, and nothing else."""
    version, asked = asking.law_version, dict[str, list[str]]()

    def row(name: str, _: int, laws: list[str], known: dict[str, str]) -> dict[str, str]:
        asked[name] = laws
        return known | dict.fromkeys(laws, "killed")

    def again() -> dict[str, list[str]]:
        asked.clear()
        assert matrix.run_matrix(1, 1, []) == 0
        return {name: laws for name, laws in asked.items() if laws}

    monkeypatch.setattr(matrix, "MATRIX", tmp_path / "matrix.json.xz")
    monkeypatch.setattr(matrix, "row", row)
    everything = {name: [law.name for law in matrix.laws_for(each)] for name, each in load_mutants().items()}
    assert again() == everything
    assert again() == {}
    changed = everything["h2o.later_tokens_seen"][0]
    monkeypatch.setattr(
        asking, "law_version", lambda name, folder: version(name, folder) + "0" * (name == changed)
    )
    assert again() == {name: [changed] for name, laws in everything.items() if changed in laws}
    content = matrix.kill_matrix()
    del content["judged"]["h2o"]["mutants"]["h2o.later_tokens_seen"]
    asking.store(matrix.MATRIX, content)
    assert again() == {"h2o.later_tokens_seen": everything["h2o.later_tokens_seen"]}


def test_a_law_has_the_version_of_its_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another law of the file, a comment and a value that papers use do not change it; a helper does."""
    monkeypatch.setattr(law, "SUITE", tmp_path / "spec_tests")
    one = '@law("KN-1", of="knorm.score")\ndef test_one(impl):\n    assert impl\n'
    name = "test_knorm::test_one"
    monkeypatch.setitem(law.LAWS, name, types.SimpleNamespace(path="knorm/test_knorm.py"))

    def digest(beside: str = "", setting: str = "") -> str:
        saved(tmp_path / "spec_tests" / "knorm" / "test_knorm.py", one + beside)
        saved(tmp_path / "reference" / "knorm.py", f'def score(p: Setting[int, ">= 1"{setting}]): return p')
        law.law_version.cache_clear()
        law._pieces.cache_clear()
        return law.law_version(name, "knorm")

    plain = digest()
    assert plain == digest(one.replace("one", "other")) == digest("# why\n") == digest(setting=", 3")
    assert plain != digest("HELP = 1\n")
    law.law_version.cache_clear()
    law._pieces.cache_clear()
