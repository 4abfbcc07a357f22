"""Every method has a page of the same sections, with a picture, a formula, results and code to run. A picture
shows what the functions of `reference/` give for its twelve tokens.
"""

import html
import re
from collections.abc import Callable
from xml.etree import ElementTree

import numpy as np
import pytest
from tools import says

from docs_build import facts, frontier, idea, methods, pages
from docs_build.entries import ROOT, entries, stem_of
from evictionary.methods import catalogue
from evictionary.reference import chunk_kv, h2o, keydiff, kvzip, pyramid_kv, tova
from evictionary.reference.quantisation import QUANTISERS, quantised_tokens
from evictionary.reference.selection import top_k

every_method = pytest.mark.parametrize("stem", methods.PAGES)
TREE = "docs/methods"


def page(stem: str) -> str:
    return (ROOT / TREE / f"{stem}.md").read_text(encoding="utf-8")


def sections(stem: str) -> dict[str, str]:
    """The sections of a page as a reader sees it."""
    shown = pages.filled(f"methods/{stem}.md", page(stem))
    return dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", shown, re.MULTILINE))


@every_method
def test_a_page_has_every_section_a_picture_with_its_words_and_a_formula(stem: str) -> None:
    told = sections(stem)
    assert tuple(told)[: len(methods.SECTIONS)] == methods.SECTIONS
    assert all(len(told[name].split()) >= 15 for name in methods.SECTIONS)
    first = told["What it does"]
    (words,) = re.findall(r'<svg [^>]*role="img" aria-label="([^"]+)"', first)
    assert html.unescape(words) == idea.picture(stem).alt
    assert re.search(r"^\$\$\n.+\n\$\$$", first, re.MULTILINE)
    formulas = re.findall(r"\[([A-Z\d]+-\S+) · ", first)
    assert formulas and {stem_of()[name] for name in formulas} <= {stem}
    assert all(entries()[name].requirement.tex for name in formulas)


def test_the_page_of_quantised_caches_has_the_same_sections() -> None:
    """Three additions share it, so it says by hand what the others' pages make."""
    told = sections("quantisation")
    assert tuple(told)[: len(methods.SECTIONS)] == methods.SECTIONS
    assert all(len(told[name].split()) >= 15 for name in methods.SECTIONS)
    first = told["What it does"]
    assert html.unescape(idea.picture("quantisation").alt) in html.unescape(first)
    says(first, *(f"- **`+{name}`** " for name in QUANTISERS))
    formulas = re.findall(r"\[([A-Z\d]+-\S+) · ", first)
    assert formulas and {stem_of()[name] for name in formulas} == {"quantisation"}


def test_the_page_of_quantised_caches_says_what_was_measured() -> None:
    """Costs in nats of what its sentences compare, and the bytes beside them."""
    found = {(one.method, one.bits, one.ratio): one for one in frontier.points()}
    kivi, hadamard, alone = (f"keydiff+ada_kv{name}" for name in ("+kivi", "+hadamard", ""))

    def cost(*key: object) -> str:
        return f"{found[key].cost:.2f}"  # type: ignore[index]

    def evicting(ratio: float, verb: str = "") -> str:
        least = min(one.cost for one in found.values() if one.ratio == ratio and not one.bits)
        return f"eviction alone {verb}{least:.2f} or more"

    def at_each_size(said: Callable[[frontier.Point], str], method: str) -> str:
        first, second, third = (said(found[method, None, ratio]) for ratio in (0.67, 0.8, 0.9))
        return f"{first}, {second} and {third}"

    def costs(method: str) -> str:
        return at_each_size(lambda one: f"{one.cost:.2f}", method)

    def right(method: str) -> str:
        return at_each_size(lambda one: str(one.right), method)

    assert right("random_protected") == "0, 0 and 0"
    says(
        page("quantisation"),
        f"costs less here than KeyDiff**: {costs('random_protected')} nats at a third, "
        f"a fifth and a tenth, against {costs(alone)}.",
        f"  0 of 7, and KeyDiff finds {right(alone)}.",
        f"four bits of every token cost {cost(kivi, 4, 0)} nats (`+kivi`), and {evicting(0.67)}.",
        f"needs as many bytes and costs {cost(hadamard, 4, 0)}.",
        f"two bits of every token cost {cost(kivi, 2, 0)} nats, and {evicting(0.8)}.",
        f"four bits of the others cost {cost(kivi, 4, 0.67)}. At a tenth, {evicting(0.9, 'costs ')}.",
        f"{cost(kivi, 4, 0.8)} nats with them and {cost(alone, None, 0.8)} without where four fifths",
        f"on {found[kivi, 4, 0].texts} neighbouring windows",
    )
    shares = [round(found[key].share, 2) for key in ((kivi, 4, 0), (kivi, 2, 0), (kivi, 4, 0.67))]
    assert shares == [0.33, 0.21, 0.12] and found[alone, None, 0.9].share == pytest.approx(0.1, abs=0.01)
    assert found[kivi, 4, 0.8].share < found[alone, None, 0.8].share / 2
    assert {one.texts for one in found.values()} == {16} and {one.asked for one in found.values()} == {7}


def test_the_picture_of_re_rotation_has_neighbours_that_end_before_the_next_token() -> None:
    """The kept tokens have positions in a row, the last that of the last token, and one key turns."""
    before, moved, after = (idea.picture("rerotation").rows[place] for place in (0, 2, 3))
    positions = [int(each) for mark in moved.marks for each in re.findall(r">(\d+)<", mark)]
    assert positions == [*range(idea.TOKENS - len(positions), idea.TOKENS)]
    assert len(after.marks) == len(positions)
    assert [mark in before.marks for mark in after.marks].count(False) == 1


def test_the_picture_of_quantised_caches_has_four_numbers_in_a_group_and_an_exact_window() -> None:
    (before, after) = np.array(bars("quantisation")).reshape(2, idea.TOKENS)
    setting = dict(re.findall(r"(group size|residual) (\d+)", idea.picture("quantisation").below))
    sizes = {name.replace(" ", "_"): int(size) for name, size in setting.items()}
    assert quantised_tokens(idea.TOKENS, **sizes)[0] == 8  # by QC-6 the residual says which keys are exact
    np.testing.assert_array_equal(before[8:], after[8:])
    for start in (0, 4):
        group = before[start : start + 4]
        levels = np.linspace(group.min(), group.max(), 4)
        assert all(np.abs(levels - number).min() < 0.01 for number in after[start : start + 4])


def test_a_page_that_leaves_sections_out_has_them_all() -> None:
    own = "# KNorm\n\n## What it does\n\nOne.\n\n## Sources\n\nTwo.\n\n## More\n\nThree.\n"
    made = methods.completed("knorm", own)
    assert re.findall(r"^## (.+)$", made, re.MULTILINE) == [*methods.SECTIONS, "More"]
    says(
        made,
        "One.\n\n<!-- idea: knorm -->\n\n<!-- formulas: KN-1 -->",
        "Two.\n\n<!-- sources: knorm -->",
        "Three.",
    )
    whole = page("knorm")
    assert methods.completed("knorm", whole) == whole


@every_method
def test_a_page_says_what_its_method_reads_costs_and_comes_from(stem: str) -> None:
    told = sections(stem)
    says(told["What it reads and costs"], *(f"- **{subject}**" for subject, _ in methods.reads(stem)))
    says(told["Run it"], f'method="{methods.composition(stem)}"', f"--method {methods.composition(stem)} ")
    says(told["Sources"], "- **Paper** ", f"[`reference/{stem}.py`]", "](../wild.md)")
    measured = methods.is_measured(stem)
    assert measured != ("No quality of it was measured yet" in told["Results"])
    assert not measured or re.search(r"\d\.\d+ ", told["Results"])


def test_every_method_of_today_has_its_paper() -> None:
    assert "](https://arxiv.org/abs/2504.15364v1)" in methods.paper("keydiff")
    unpublished = [stem for stem in methods.PAGES if methods.paper(stem) == "None."]
    assert len(unpublished) <= 1, unpublished  # a toy that is being added


def test_only_quest_waits_for_a_measurement_of_quality() -> None:
    waiting = {stem for stem in methods.PAGES if not methods.is_measured(stem)}
    # a method that is being added has not been measured
    assert "quest" in waiting and len(waiting) <= 2


def test_what_a_method_reads_is_said_from_its_signature_and_its_traits() -> None:
    told = dict(methods.reads("kvzip"))
    assert told["Second reading"] == "The model reads the prompt twice."
    assert told["Reads `replay_keys`"] == "[B, H_kv, T, D], after RoPE, of the same tokens."
    assert dict(methods.reads("q_filters"))["Calibration"].startswith("A text of yours")
    assert dict(methods.reads("keydiff"))["Fused attention"].startswith("It works, because")
    assert dict(methods.reads("momentkv"))["Always stays"] == "The first token and the last 32 of a prompt."
    assert dict(methods.reads("gvote")).keys().isdisjoint({"Budget"})
    refused = dict(methods.reads("cam"))["Is refused after"]
    assert refused == "`attention_matching`, `momentkv`, `quest`."


def test_what_is_best_and_worst_is_that_of_the_study() -> None:
    told = methods.tasks("keydiff")
    assert [one.share for one in told] == sorted(one.cost / one.drawn for one in told) and len(told) == 5
    assert methods.tasks("quest") == []
    assert (
        methods.costs("", "keydiff")["keydiff"][0.5].low < methods.costs("", "keydiff")["keydiff"][0.5].high
    )
    assert methods.costs("", "cake") == {}
    pair = {"keydiff+ada_kv", "keydiff+ada_kv+pyramid_kv"}
    assert pair <= set(methods.costs("pyramid", "pyramid_kv"))
    assert methods.own_size("duo_attention") > 300 and methods.own_size("lagkv") == 0
    assert methods.pairs("cam") == [("h2o", "h2o+cam"), ("keydiff", "keydiff+cam")]


def test_a_row_says_with_which_partitions_lagkv_ran_and_what_it_kept() -> None:
    """Three measurements have three sizes, and with a tenth of a short prompt more than a tenth stays."""
    told = pages.filled("methods/lagkv.md", "<!-- costs: lagkv -->\n\n<!-- strengths: lagkv -->")
    for row in (
        r"lagkv \(lag\\?_size=32\) \|.* \| 62 \|$",
        r"random \|.* \| 46 \|$",
        r"lagkv \(lag\\?_size=128\) \| 50% \| \d+ \|.*",
        r"lagkv \(lag\\?_size=64\) \| [\d.]+ \| [\d.]+ \| 467 \|$",
    ):
        assert re.search(rf"^\|.*{row}", told, re.MULTILINE), row
    assert "it (lag_size=32) costs" in told and "lagkv |" not in told


def drawn(stem: str) -> ElementTree.Element:
    return ElementTree.fromstring(idea.picture(stem).svg())


def gone(picture: idea.Picture) -> list[list[int]]:
    """The struck tokens of each row of tokens."""
    return [[int(each) for each in re.findall(r"\d+", row.told)] for row in picture.rows if row.told]


@every_method
def test_a_picture_has_twelve_tokens_and_says_who_goes(stem: str) -> None:
    found, shown = drawn(stem), idea.picture(stem)
    rows = [row for row in shown.rows if row.told]
    assert rows and len(found.findall(".//rect[@class='stays']")) + len(
        found.findall(".//rect[@class='goes']")
    ) == idea.TOKENS * len(rows)
    assert len(found.findall(".//line[@class='struck']")) == sum(map(len, gone(shown)))
    assert all(row.told in shown.alt or row.told.capitalize() in shown.alt for row in rows)
    # Nothing leaves the picture, so nothing is cut off on a phone.
    for place in found.iter("polygon"):
        for corner in str(place.get("points")).split():
            assert 0 <= float(corner.partition(",")[0]) <= idea.WIDTH


@pytest.mark.parametrize("stem", catalogue.names())
def test_a_method_goes_where_its_scores_are_lowest(stem: str) -> None:
    kept, numbers = idea.kept(stem), idea.scores(stem)
    assert gone(idea.picture(stem)) == [list(np.flatnonzero(~each)) for each in kept]
    free = {"own_budget", "recursive"} & catalogue.traits(catalogue.definition(stem))
    if numbers is not None and not free and stem != "h2o":  # H2O keeps the last half whatever its scores
        np.testing.assert_array_equal(kept, top_k(numbers, idea.BUDGET))


def bars(stem: str) -> list[float]:
    """The numbers that the bars of a picture say, in their order."""
    told = [str(one.text).rpartition(" ")[2] for one in drawn(stem).iter("title")]
    return [float(number.replace("infinity", "inf")) for number in told]


@pytest.mark.parametrize(
    ("stem", "numbers"),
    [
        ("keydiff", keydiff.score(idea.KEYS)),
        ("h2o", h2o.score(idea.QUERIES[None, None], idea.KEYS[None, None])),
        ("tova", tova.score(idea.QUERIES[None, None], idea.KEYS[None, None])),
        ("kvzip", kvzip.score(*(each[None, None] for each in (idea.KEYS, idea.QUERIES, idea.KEYS)))),
    ],
)
def test_bars_are_the_numbers_of_reference(stem: str, numbers: np.ndarray) -> None:
    np.testing.assert_allclose(bars(stem), numbers.ravel(), rtol=5e-3)


def test_additions_are_drawn_without_and_with_them() -> None:
    assert gone(idea.picture("chunk_kv")) == [
        list(np.flatnonzero(~top_k(keydiff.score(idea.KEYS), idea.BUDGET))),
        list(np.flatnonzero(~chunk_kv.choose(keydiff.score(idea.KEYS), idea.BUDGET, chunk_size=3))),
    ]
    sizes = [idea.TOKENS - len(each) for each in gone(idea.picture("pyramid_kv"))]
    assert sizes[::2] == [idea.BUDGET] * 3
    assert sizes[1::2] == pyramid_kv.budgets(idea.BUDGET, 3, length=idea.TOKENS, window_size=2)
    for stem in ("ada_kv", "cake"):
        sizes = [idea.TOKENS - len(each) for each in gone(idea.picture(stem))]
        assert sum(sizes[::2]) == sum(sizes[1::2]) and len(set(sizes[1::2])) > 1
    assert len(gone(idea.picture("cam"))) == 1


def test_a_method_that_reads_what_the_twelve_tokens_lack_is_refused() -> None:
    def score(keys: np.ndarray, weather: np.ndarray) -> np.ndarray:
        return keys[..., 0] + weather

    with pytest.raises(TypeError, match="weather"):
        idea.called(score)


@every_method
def test_a_cost_and_a_perplexity_say_how_long_the_prompts_are(stem: str) -> None:
    """The two disagree where the texts are of different lengths."""
    told = sections(stem)
    for line in told["Where it shines and where it fails"].splitlines():
        assert ("task, beside random eviction**" in line) == (", on prompts of 500 tokens, " in line), line
    assert ("next 64 tokens" in told["Results"]) == ("four texts of 1,000 tokens" in told["Results"])
    measured = facts.stored("benchmarks/results/perplexity.json")["rows"]
    assert {row["length"] for row in measured} == {1000} and facts.stored(facts.STUDY)["lengths"] == [512]
