"""What the pages say in their sentences is what the data has: figures, counts, the commands of the READMEs,
and the same of both READMEs.

Each sentence is made here with the figures of `docs_build.facts`, and has to stand on its page. A failure
shows the sentence as it should be beside the nearest of the page.
"""

import difflib
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tools.pages import ROOT, blocks
from transformers import LlamaConfig, LlamaForCausalLM

import evictionary
from benchmarks.gpu import ROWS
from docs_build import abstracts, facts, figures
from docs_build.charts import CHARTS, at_ratios
from docs_build.facts import cost, counts, found, moved, real, retrieved, timed
from docs_build.pages import METHODS, PAPERS
from docs_build.running import said
from docs_build.study import Change, changes, interval, measured, of_moments
from evictionary.evaluation.study import OPTIONS, recommended
from evictionary.methods import catalogue
from evictionary.methods.resolve import resolve
from evictionary.models import load as load_module

ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh.md"
TESTING = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
WORDS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven"),
    *("twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
WHOLE, HALF, QUARTER, TENTH = 0, 0.5, 0.75, 0.9
"""The shares of a cache that are removed."""


def word(number: int) -> str:
    """A number in words where the pages write it so."""
    return WORDS[number] if number < len(WORDS) else f"{number:,}"


def three(numbers: list[str]) -> str:
    return f"{numbers[0]}, {numbers[1]} and {numbers[2]}"


def nats(three_costs: list[float]) -> str:
    return three([f"{each:.2f}" for each in three_costs])


def auto(readings: int = 1) -> str:
    """The composition that `evictionary run` takes without a method, the same for every share removed."""
    (name,) = {recommended(ratio, readings)[0] for ratio in (HALF, QUARTER, TENTH)}
    return name


def readme() -> list[str]:
    of = counts()
    keydiff, corrected = moved("keydiff"), moved("keydiff+moments")
    gpu = facts.stored("benchmarks/results/gpu.json")
    ran = {stem for stem, failed in gpu["laws"].items() if not failed} & set(catalogue.names())
    ((minutes, seconds),) = re.findall(r"^\| `make test` \| (\d+) min (\d+) s", TESTING, re.MULTILINE)
    return [
        f"**Test everything** ({word(round(int(minutes) + int(seconds) / 60))} minutes",
        f"Of {of['implementations']} public implementations that we tested, {of['fails']} differ",
        f"and {of['choices']} more by choice",
        f"the model, {of['MB of the model']} MB",
        f"{word(of['lessons'])} [lessons]",
        f"{word(of['assignments'])} [assignments]",
        f"| {of['methods']} methods, {of['additions']} additions |",
        f"| over {(of['mistakes'] - 1) // 100 * 100:,} planted bugs |",
        f"[{of['implementations']} implementations in {of['code bases']} public code bases]",
        f"compares {of['selections']} selections",
        f"KVzip with AdaKV (`--readings 2`) finds {real('essay_single', auto(2), 1000, QUARTER)} of 10",
        f"KeyDiff finds {real('essay_single', 'keydiff', 1000, QUARTER)}.",
        f"from {keydiff[0]} to {corrected[0]}",
        f"gave {timed('13', 'full cache, SDPA'):.1f} times the tokens per second",
        f"The kernels of {len(ran)} methods pass the laws on one GPU",
        f"Those of the other {of['methods'] - len(ran)} have not run",
        f"All compile for {word(of['GPUs'])} GPUs",
    ]


def index() -> list[str]:
    shown, tokens = figures.stored(), 131_072
    half, heads = 2 * figures.STRIP, shown["layers"] * shown["heads"]
    assert half == len(shown["tokens"])
    # keys and values of Llama-3.1-8B, of two bytes: 32 layers, 8 heads, 128 channels
    gib = 2 * 2 * 32 * 8 * 128 * tokens / 2**30
    model = shown["model"].removesuffix("-Instruct")
    assert set(PAPERS) < set(catalogue.names())
    return [
        f"and {counts()['methods'] - len(PAPERS)} more methods. Each method is there in three ways",
        f"a text of {half} tokens, and each method keeps half of the cache of {model}.",
        f"The more of the {heads} heads",
        f"a text of {tokens:,} tokens the cache of Llama-3.1-8B takes {gib:.0f} GiB",
    ]


def results() -> list[str]:
    dtypes = facts.stored("benchmarks/results/cpu.json")["methods"]
    slower = {
        dtype: {name: sum(sizes[name]["ratio"]["value"] < 1 for sizes in of.values()) for name in of["1024"]}
        for dtype, of in dtypes.items()
    }
    told = {dtype: {name: times for name, times in of.items() if times} for dtype, of in slower.items()}
    # What the sentence calls always, and what it calls some shorter lengths.
    assert [{name: times == 4 for name, times in of.items()} for of in told.values()] == [
        {"knorm": True, "q_filters": False},
        {"knorm": False, "q_filters": False, "kvzap": True},
    ]
    (momentkv,) = (
        rows for each in abstracts.ABSTRACTS if each.paper == "momentkv" and (rows := [*abstracts.rows(each)])
    )
    behind = [row.best for row in momentkv if row.verdict == abstracts.OTHER]
    assert set(behind) == {"h2o"} and len(momentkv) == 3
    return [
        moments()[0]
        .replace(", and at 90 % removed", ". With 90 % of a made-up prompt removed,")
        .replace(" tokens.", "."),
        f"At {word(len(behind))} of the three sizes it costs more than H2O.",
        f"{counts()['selections']} selections, with and without AdaKV's division",
        "That holds for KNorm in float32 and KVzap in bfloat16.",
        "At some shorter lengths it holds for KNorm and Q-Filters too.",
    ]


def which_method() -> list[str]:
    rows = facts.stored(facts.STUDY)["rows"]
    kept = {row["method"]: row["tokens_kept"] for row in rows if row["ratio"] == HALF}
    assert cost("", "gvote", HALF) > cost("", "random", HALF) and 0.9 < kept["gvote"] / kept["random"] < 1.1
    low, high = interval(*(measured("results")[TENTH][name] for name in ("criticalkv+ada_kv", "random")))
    assert low < 0 < high
    once = recommended(TENTH)[0]
    for part in ("finals", "real_finals"):
        for ratio, of in measured(part).items():
            first, *others = sorted(of, key=lambda name, of=of: of[name].cost)
            assert first.startswith("kvzip+ada_kv") and (part == "finals" or first == "kvzip+ada_kv")
            if ratio != HALF:
                assert next(name for name in others if "kvzip" not in name) == once
    assert "criticalkv" not in {row["method"] for row in facts.stored(facts.STUDY)["real_finals"]["rows"]}
    return [
        "GVote kept about half, and cost more than random eviction of half",
        "no part in the second one",
        f"`{once}`, which `auto` takes",
        "level with random eviction on made-up prompts",
        "on human-written texts it lost least at every compression ratio",
    ]


def protection() -> dict[tuple[str, float], Change]:
    """What `+protect` changes in the compositions of the study without a correction."""
    every = {(one.method, one.removed): one for one in changes("protected", "protect")}
    return {key: one for key, one in every.items() if "moments" not in one.method}


def protected() -> list[str]:
    """Sentences of the study; the others on protection are held here too."""
    of = protection()
    behind = [one.after for one in of.values() if one.removed == HALF]
    chosen = [
        (name, cost("protected", f"{name}+protect", HALF), ends(name)) for name in ("random", "keydiff")
    ]
    chosen.append(("expected_attention", of["expected_attention", HALF].after, ends("expected_attention")))
    assert all(of["random", ratio].low < 0 < of["random", ratio].high for ratio in (HALF, QUARTER, TENTH))
    assert all(of["random", ratio].difference < 0 for ratio in (HALF, QUARTER, TENTH))
    assert all(of["expected_attention", ratio].high < 0 for ratio in (HALF, QUARTER))
    assert all(of[name, TENTH].low > 0 for name in ("keydiff", "keydiff+ada_kv", "expected_attention+ada_kv"))
    still = [one for one in of.values() if one.method.partition("+")[0] in ("snapkv", "streaming_llm")]
    assert len(still) == 12 and all(abs(one.difference) < 0.002 for one in still)
    assert all(of["tova", ratio][2:] == of["tova+ada_kv", ratio][2:] for ratio in (HALF, QUARTER, TENTH))
    gains = [-of["expected_attention", ratio].difference for ratio in (HALF, QUARTER)]
    loses = [
        of[name, TENTH].difference for name in ("keydiff", "keydiff+ada_kv", "expected_attention+ada_kv")
    ]
    return [
        f"the costs still range from {min(behind):.2f} to {max(behind):.2f} nats",
        f"the costs behind protection range from {min(behind):.2f} to {max(behind):.2f} nats",
        "Protected random eviction costs {1:.2f} ({2}), protected".format(*chosen[0]),
        "KeyDiff {1:.2f} ({2}), and".format(*chosen[1]),
        "Expected Attention {1:.2f} ({2}).".format(*chosen[2]),
        f"Expected Attention costs {gains[0]:.2f} and {gains[1]:.2f} nats less.",
        f"KeyDiff costs {loses[0]:.2f} nats more, and {loses[1]:.2f} with AdaKV's division.",
        f"Attention with that division costs {loses[2]:.2f} nats more.",
    ]


def ends(selection: str) -> str:
    """The interval of the cost of a protected selection, with half of the cache removed."""
    (row,) = (
        row
        for row in facts.stored(facts.STUDY)["protected"]["rows"]
        if (row["method"], row["ratio"]) == (f"{selection}+protect", HALF)
    )
    return "{:.2f} to {:.2f}".format(*row["interval"])


def of_protect() -> list[str]:
    of = protection()
    assert all(of["expected_attention", ratio].high < 0 for ratio in (HALF, QUARTER))
    loses = [of[name, TENTH].difference for name in ("keydiff", "expected_attention+ada_kv")]
    assert max(of.values(), key=lambda one: one.difference).method == "expected_attention+ada_kv"
    return [
        f"KeyDiff costs {loses[0]:.2f} nats more, and Expected Attention with AdaKV's division "
        f"{loses[1]:.2f} more."
    ]


def corrected() -> list[str]:
    """On human texts the correction lowers the cost of Expected Attention, and raises that of KVzip."""
    of = {(one.method, one.removed): one for one in changes("real_finals", "moments")}
    helped = [one for key, one in of.items() if key[0].startswith("expected_attention")]
    raised = [one for key, one in of.items() if key[0].startswith("kvzip")]
    assert len(helped) == len(raised) == 6
    assert all(one.high < 0 for one in helped) and all(one.difference > 0 for one in raised)
    assert all(one.low > 0 for one in raised if one.method == "kvzip")
    lowered: dict[str, bool] = {}
    for one in changes("results", "moments"):
        lowered[one.method] = lowered.get(one.method, True) and one.high < 0
    finalists = {name for name in measured("finals")[HALF] if "moments" not in name}
    assert {name for name, always in lowered.items() if always} == finalists and len(finalists) == 4
    return [
        "at each size only behind the best four selections with `ada_kv`",
        "It raised the cost of KVzip in all six pairs, by "
        f"{max(one.difference for one in raised):.2f} nats at most.",
    ]


def told_apart() -> None:
    """Two sentences of the study on Compactor and CAKE's division, for each length."""
    parts = ("real", "real_2000", "real_4000")
    of = {(part, ratio): found for part in parts for ratio, found in measured(part).items()}
    lower = [
        key for key, found in of.items() if interval(found["snapkv+cake"], found["random_protected"])[1] < 0
    ]
    assert lower == [("real", TENTH)]
    beside = {
        (*key, name): interval(found["compactor"], found[name])
        for key, found in of.items()
        for name in ("keydiff", "criticalkv", "expected_attention")
    }
    level = [each for (part, ratio, _), each in beside.items() if part == "real" and ratio != TENTH]
    assert len(level) == 6 and all(low < 0 < high for low, high in level)
    less = [
        each
        for (part, _, name), each in beside.items()
        if part == "real_2000" and name != "expected_attention"
    ]
    assert len(less) == 6 and all(high < 0 for _, high in less)


def moments() -> list[str]:
    """What the moments take beside the tokens that heads keep, in the first study and in its last final."""
    tokens = f"{of_moments():.0f} more tokens"
    name = "keydiff+ada_kv+moments"
    (tenth,) = {f"{measured(part)[TENTH][name].kept:.0f}" for part in ("results", "finals")}
    kept = [f"{measured('real_finals')[ratio][name].kept:,.0f}" for ratio in (HALF, QUARTER, TENTH)]
    return [
        f"memory of {tokens} in each head, and at 90 % removed a head keeps {tenth} tokens.",
        f"take the memory of {tokens}, where heads keep {three(kept)}:",
    ]


def of_abstracts() -> list[str]:
    return [f"take the memory of {of_moments():.0f} more tokens in each head"]


def cheat_sheet() -> list[str]:
    return [f"Later questions and time: `{auto(2)}`. One reading: `{auto()}`."]


def faq() -> list[str]:
    taken = {name: resolve(name).captured for name in catalogue.names()}
    alone = {name for name, states in taken.items() if not states}
    assert alone == {"keydiff", "lagkv", "knorm", "streaming_llm"}
    return ["Yes, with every method. KeyDiff, LagKV, KNorm and StreamingLLM need only the cache."]


def study() -> list[str]:
    told_apart()
    sizes = (HALF, QUARTER, TENTH)
    lengths = [cost("real_finals", "kvzip+ada_kv", TENTH, length) for length in ("1000", "2000", "4000")]
    fitted, winner = (
        [cost("real", name, size) for size in sizes] for name in ("attention_matching", "kvzip+ada_kv")
    )
    needles = [cost("real", "attention_matching", size, "essay_multikey") for size in sizes]
    likelier = [-cost("real_4000", "kvzip", size, "squad") for size in sizes[1:]]
    changes = [
        cost(part, "kvzip+ada_kv+moments", size) - cost(part, "kvzip+ada_kv", size)
        for part in ("real", "real_2000", "real_4000", "real_finals")
        for size in sizes
    ]
    (lowered,) = [-change for change in changes if change < 0]
    return [
        *protected(),
        *corrected(),
        *moments(),
        f"So ϵ of Expected Attention is {epsilon()}, and its paper takes 0 for needles.",
        f"Here {counts()['selections']} of the {counts()['methods']} methods take part",
        f"In the final it is {nats(lengths)} nats with AdaKV's division. The prompts have",
        f"it lowered that cost once in {len(changes)} times, by {lowered:.2f} nats",
        f"in 4,000 tokens by {likelier[0]:.2f} and {likelier[1]:.2f} nats",
        f"{nats(fitted)} nats, against {nats(winner)}",
        f"these cost {nats(needles)} nats",
        f"Of these `{auto()}` costs least on average where the prompt is read once, and `{auto(2)}` costs",
    ]


def epsilon() -> str:
    """The default of Expected Attention, which all its measurements have."""
    defaults = catalogue.split_signature(catalogue.entry(catalogue.definition("expected_attention")))[1]
    rows = [*facts.stored(facts.REAL)["rows"], *facts.stored("benchmarks/results/perplexity.json")["rows"]]
    labels = {row["label"] for row in rows if row["method"] == "expected_attention"}
    assert labels == {"expected_attention"} and "expected_attention" in retrieved_labels()
    assert "expected_attention" not in OPTIONS
    return f"{defaults['epsilon']:g}"


def retrieved_labels() -> set[str]:
    """The methods of docs/retrieval.md, with their options."""
    return set(at_ratios(CHARTS["retrieval"].data))


def of_expected_attention() -> list[str]:
    return [f"All measurements on this page have the default, {epsilon()}."]


def real_texts() -> list[str]:
    def pair(method: str, length: int, ratio: float, tasks: str = "essay_single essay_multikey") -> str:
        first, second = (real(task, method, length, ratio) for task in tasks.split())
        return f"{first} and {second}"

    def keydiff(task: str, length: int) -> str:
        return " and ".join(str(real(task, "keydiff", length, ratio)) for ratio in (HALF, QUARTER))

    assert auto(2) == "kvzip+ada_kv"
    return [
        f"so ϵ of Expected Attention is {epsilon()}.",
        "**KVzip with AdaKV's division keeps most needles.** `evictionary run --readings 2` takes it.",
        f"finds {pair(auto(2), 1000, QUARTER)} of 10 at 1,000 tokens, where the full cache finds "
        f"{pair('full', 1000, WHOLE)}.",
        f"finds {real('essay_multikey', auto(2), 4000, QUARTER)} of 5 numbers among four",
        f"It finds {keydiff('needle_single', 1000)} of 10 numbers among made-up sentences, and "
        f"{keydiff('essay_single', 1000)} of the same",
        f"At 2,000 tokens it finds {keydiff('essay_single', 2000)}.",
        f"it finds {real('needle_single', 'expected_attention', 1000, HALF)} of 10 among made-up sentences, "
        f"and {real('essay_single', 'expected_attention', 1000, HALF)} in essays",
        f"The full cache answers {real('hotpot', 'full', 1000)} and {real('hotpot', 'full', 2000)} of 10",
    ]


def retrieval() -> list[str]:
    pictured = {name for name in retrieved() if "+" not in name} & set(METHODS)
    random, protected = retrieved()["random"], moved("random_protected")

    def mib(method: str) -> list[str]:
        return [f"{one['bytes_after'] / facts.MIB:.1f}" for one in retrieved()[method]]

    def falls(method: str) -> str:
        steps = [f"from {old} to {new}" for old, new in zip(moved("keydiff"), moved(method), strict=True)]
        return three(steps)

    perplexity = {
        (row["method"], row["task"]): row["perplexity"]
        for row in facts.stored("benchmarks/results/perplexity.json")["rows"]
    }
    rises = [
        100 * (perplexity[name, "perplexity_decoding"] / perplexity[name, "perplexity"] - 1)
        for name in ("knorm", "expected_attention")
    ]
    at_first = {name: summaries[0] for name, summaries in retrieved().items()}
    drawn = at_first.pop("random_protected")
    fewer = sum(one["right"] < drawn["right"] for one in at_first.values())
    further = sum(one["error"] > drawn["error"] for one in at_first.values())
    return [
        f"Expected Attention has ϵ = {epsilon()} on this page",
        f"numbers of {len(pictured)} of the {counts()['methods']} methods",
        f"take {three(mib('keydiff'))} MiB of {random[0]['bytes_before'] / facts.MIB:.1f} "
        f"(LagKV {three(mib('lagkv'))})",
        f"moves the hidden states by {three(protected)}. Without them it moves these by "
        f"{three(moved('random'))}. It finds the number in "
        f"{three([str(found('random_protected', ratio)) for ratio in (0.25, 0.5, 0.75)])} of 5 texts",
        f"{word(fewer)} of the other rows find it less often, and {word(further)} move",
        f"The distance falls {falls('keydiff+moments')}.",
        f"The distance grows {falls('keydiff+cam')}.",
        f"It keeps {retrieved()['gvote'][0]['tokens_after']:.0f} tokens of each head",
        f"keeps {retrieved()['kvzap'][0]['tokens_after']:.0f} of {random[0]['tokens_before']:,.0f} tokens",
        f"Their perplexity rises by {rises[0]:.0f} and {rises[1]:.0f} %",
        f"finds the number in {word(found('snapkv+cake', 0.25))} texts and not in "
        f"{word(found('snapkv', 0.25))}. Whole chunks find it in {word(found('snapkv+chunk_kv', 0.25))}.",
    ]


def token(method: str) -> str:
    """The time of a token with a method, over that with the full cache."""
    (measured,) = facts.stored("benchmarks/results/costs.json")["now"]["tokens"].values()
    ratios = {row["method"]: row["decode"]["ratio"] for row in measured["rows"]}
    return f"{ratios[method]:.2f} times"


def in_a_model() -> list[str]:
    return [f"A token takes {token('momentkv+ada_kv')} as long as with the full cache"]


def of_momentkv() -> list[str]:
    shared = "momentkv+ada_kv"
    return [
        f"A decoded token then takes {token('momentkv')} as long as with the full cache.",
        f"With `{shared}` it takes {token(shared)} ",
    ]


def of_cam() -> list[str]:
    pairs = ("streaming_llm", "h2o", "h2o+cam", "keydiff", "keydiff+cam")
    return [f"| `{name}` | {' | '.join(moved(name))} |" for name in pairs]


def of_kvzip() -> list[str]:
    for part in ("finals", "real_finals"):
        rows = [row for row in facts.stored(facts.STUDY)[part]["rows"] if "moments" not in row["method"]]
        for ratio in (HALF, QUARTER, TENTH):
            least = min((row["cost"], row["method"]) for row in rows if row["ratio"] == ratio)
            assert least[1] == "kvzip+ada_kv"
    return ["it cost least in both finals of [the study](../study.md), of all compositions without"]


def of_attention_matching() -> list[str]:
    for ratio in (HALF, QUARTER, TENTH):
        own, other = (
            cost("real", name, ratio, "essay_multikey") for name in ("attention_matching", "kvzip+ada_kv")
        )
        assert own > other
    return ["it costs more than KVzip with AdaKV's division"]


def of_pyramid_kv() -> list[str]:
    effects = facts.stored(facts.STUDY)["pyramid"]["effects"]
    assert {row["better"] for row in effects if row["addition"] == "pyramid_kv"} == {0}
    return ["In the study here it made every composition worse, at each size."]


def verify() -> list[str]:
    return [f"## {counts()['exploits']} exploits"]


def roadmap() -> list[str]:
    timed_rows = {row["id"] for row in facts.stored("benchmarks/results/gpu.json")["rows"]}
    return [f"{word(len(set(ROWS) - timed_rows)).capitalize()} rows are newer and wait for a GPU"]


SAID: dict[str, Callable[[], list[str]]] = {
    "README.md": readme,
    "docs/abstracts.md": of_abstracts,
    "docs/index.md": index,
    "docs/cheat_sheet.md": cheat_sheet,
    "docs/faq.md": faq,
    "docs/in_a_model.md": in_a_model,
    "docs/methods/attention_matching.md": of_attention_matching,
    "docs/methods/cam.md": of_cam,
    "docs/methods/expected_attention.md": of_expected_attention,
    "docs/methods/kvzip.md": of_kvzip,
    "docs/methods/momentkv.md": of_momentkv,
    "docs/methods/protect.md": of_protect,
    "docs/methods/pyramid_kv.md": of_pyramid_kv,
    "docs/real_texts.md": real_texts,
    "docs/results.md": results,
    "docs/retrieval.md": retrieval,
    "docs/roadmap.md": roadmap,
    "docs/study.md": study,
    "docs/verify.md": verify,
    "docs/which_method.md": which_method,
}


def text_of(page: str | Path) -> str:
    """A page in one line."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


@pytest.mark.parametrize("page", SAID)
def test_a_figure_in_a_sentence_is_that_of_the_data(page: str) -> None:
    text = text_of(page)
    for sentence in SAID[page]():
        sentences = re.split(r"(?<=[.:|]) ", text)
        near = difflib.get_close_matches(sentence, sentences, n=1, cutoff=0) or [""]
        assert sentence in text, f"{page} should say {sentence!r}; the nearest there is {near[0]!r}"


# A count of what grows stands on many pages; every one of them says today's number.
COUNTED = {
    "methods": "methods",
    "additions": "additions",
    "implementations": "implementations",
    "public code bases": "code bases",
    "selections": "selections",
    "lessons": "lessons",
    "assignments": "assignments",
    "exploits": "exploits",
    "planted mistakes": "mistakes",
}
OTHERS = {
    ("README.md", "10 methods"): "whose kernels ran on a GPU",
    ("docs/classroom/class.md", "52 planted mistakes"): "those that were handed in",
    ("docs/in_a_model.md", "thirteen methods"): "of one measurement",
}
LARGE = "|".join([*WORDS[10:], "thirty", "forty", "fifty", "sixty"])
PAGES = [ENGLISH, CHINESE, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_count_on_a_page_is_todays(page: Path) -> None:
    """Pages once gave two numbers of planted mistakes."""
    name = page.relative_to(ROOT).as_posix()
    for number, what in re.findall(
        rf"(?<![\w.,-])(\d[\d,]+|{LARGE}) (?:of the )?({'|'.join(COUNTED)})\b", text_of(page), re.IGNORECASE
    ):
        if (name, f"{number} {what}") not in OTHERS:
            wanted = counts()[COUNTED[what.lower()]]
            assert number.lower() in (str(wanted), f"{wanted:,}", word(wanted)), f"{name}: {number} {what}"


def test_the_counts_that_are_of_something_else_are_on_their_pages() -> None:
    assert [(page, told) for page, told in OTHERS if told not in text_of(page)] == []


def test_every_method_has_a_kernel_and_only_one_addition_has_none() -> None:
    """The table of the README says so, and its page says which has only a kernel to read."""
    files = {path.stem for path in ROOT.glob("optimized/teaching/*.py")}
    assert set(catalogue.names()) <= files
    for folder in ("reference", "optimized"):
        assert {*catalogue.names(), *catalogue.additions()} <= {
            path.stem for path in (ROOT / folder).glob("*.py")
        }


def test_one_state_and_one_version_are_said() -> None:
    """The recipe of a release once named a file that has no version."""
    project = facts.stored("pyproject.toml")
    (state,) = [one for one in project["project"]["classifiers"] if one.startswith("Development Status")]
    assert state.endswith(" - Alpha") and "This is alpha software." in text_of(ENGLISH)
    module, _, name = project["tool"]["setuptools"]["dynamic"]["version"]["attr"].rpartition(".")
    file = f"{module.replace('.', '/')}/__init__.py"
    assert f"Set `{name}` in `{file}`" in text_of("CONTRIBUTING.md")
    assert f'{name} = "{evictionary.__version__}"' in (ROOT / file).read_text(encoding="utf-8")
    assert f"version: {evictionary.__version__} " in text_of("CITATION.cff")


# The two READMEs.

NUMERALS = "零一二三四五六七八九"
FRACTIONS = {
    "half": "1/2",
    "halves": "1/2",
    "quarter": "1/4",
    "一半": "1/2",
    "半": "1/2",
    "四分之一": "1/4",
}


def numbers_of(text: str) -> list[str]:
    """The numbers of a piece of a README, but for one: digits, words and Chinese numerals, sorted."""
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", " ", text)
    text = re.sub("几十", " ", text)  # dozens
    text = re.sub(r"[A-Za-z][\w.]*(?:-[\w.]*\d[\w.]*)+|H100", " ", text)  # KD-8, Llama-3.1-8B
    found = []

    def take(pattern: str, number: Callable[[str], str]) -> None:
        nonlocal text
        found.extend(map(number, re.findall(pattern, text, re.IGNORECASE)))
        text = re.sub(pattern, " ", text, flags=re.IGNORECASE)

    take("四分之一|一半|半|\\b(?:half|halves|quarter)\\b", lambda part: FRACTIONS[part.lower()])
    take(r"\d[\d,.]*(?<![,.])", lambda digits: digits.replace(",", ""))
    take(rf"\b(?:{'|'.join(WORDS[2:])})\b", lambda name: str(WORDS.index(name.lower())))
    take("[二三四五六七八九]?十[一二三四五六七八九]?", _tens)
    take("[二两三四五六七八九]", lambda one: str(NUMERALS.index("二" if one == "两" else one)))
    return sorted(found)


def _tens(numeral: str) -> str:
    tens, ones = numeral.split("十")
    return str((NUMERALS.index(tens) if tens else 1) * 10 + (NUMERALS.index(ones) if ones else 0))


def pieces(page: Path) -> list[str]:
    """A README in pieces: headings, paragraphs, items, rows and blocks of code."""
    text = page.read_text(encoding="utf-8")
    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    return [
        piece.strip()
        for place, part in enumerate(parts)
        for piece in ([part] if place % 2 else re.split(r"\n\s*\n|\n(?=- |\|)", part))
        if piece.strip()
    ]


def shape(piece: str) -> dict[str, object]:
    """What a piece has in both languages: its kind, code, links, pictures, bold words and numbers."""
    if piece.startswith("```"):
        return {"code": piece}
    kind = re.match(r"#+|-|\||!", piece)
    return {
        "kind": kind[0] if kind else "",
        "cells": piece.count("|"),
        "code": Counter(re.findall(r"`[^`]+`", piece)),
        "links": Counter(re.findall(r"\]\(([^)]+)\)", piece)),
        "bold": len(re.findall(r"\*\*.+?\*\*", piece)),
        "numbers": numbers_of(piece),
    }


def test_the_two_readmes_have_the_same_pieces_code_links_and_figures() -> None:
    """The Chinese one once said that the papers are written three times, and less of the limits."""
    english, chinese = (pieces(page) for page in (ENGLISH, CHINESE))
    for one, other in zip(english, chinese, strict=False):
        shapes = (shape(one), shape(other))
        for each, its in zip(shapes, ("README.zh.md", "README.md"), strict=True):
            if isinstance(links := each.get("links"), Counter):
                links.pop(its, None)  # each README links to the other one
        assert shapes[0] == shapes[1], f"these differ:\n{one}\n\n{other}"
    assert len(english) == len(chinese)


def test_numbers_are_read_in_both_languages() -> None:
    assert numbers_of("KD-8: sixteen of 1,400, a quarter, half, 9 of 10 with 3.8 times, `4`") == sorted(
        ["16", "1400", "1/4", "1/2", "9", "10", "3.8"]
    )
    assert numbers_of("十六节 1,400 个 四分之一 一半 二十一 两个 几十篇 一些 H100") == sorted(
        ["16", "1400", "1/4", "1/2", "21", "2"]
    )


def test_a_readme_is_short_and_has_the_two_commands() -> None:
    prose = re.sub(r"```.*?```", "", ENGLISH.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(prose.split()) <= 700
    lines = [line for block in blocks(ENGLISH, "") for line in block.splitlines()]
    typed = {line.partition("  #")[0].strip() for line in lines}
    assert {"make demo", "make test", "pytest spec_tests/ --impl my_kernels"} <= typed
    assert "`pytest spec_tests/`" in prose
    # What a reader types to test everything is what continuous integration runs, word for word.
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (tests,) = [block for block in blocks(ENGLISH, "") if "make test " in block]
    for command in [line.partition("  #")[0].strip() for line in tests.splitlines()]:
        assert re.search(rf"^alone {re.escape(command)}( +#.*)?$", script, re.MULTILINE), command


class Spelled(NamedTuple):
    """A tokenizer that makes as many tokens of a page's text as that of SmolLM2 does, in any letters."""

    tokens: int

    def __call__(self, text: str, return_tensors: str) -> dict[str, torch.Tensor]:
        return {
            "input_ids": torch.arange(self.tokens)[None] % 32,
            "attention_mask": torch.ones(1, self.tokens),
        }

    def decode(self, tokens: torch.Tensor) -> str:
        return f"{len(tokens)} tokens"


@pytest.mark.parametrize(
    ("page", "tokens"),
    [(ENGLISH, 517), (ROOT / "docs" / "methods" / "quantisation.md", 392)],
    ids=lambda given: given.stem if isinstance(given, Path) else "",
)
def test_the_memory_that_a_page_shows_is_that_of_the_models_shape(
    page: Path, tokens: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The layers, heads and channels of SmolLM2-135M decide it, and no weight does."""
    shape = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    config = LlamaConfig(hidden_size=18, intermediate_size=16, vocab_size=32, eos_token_id=None, **shape)
    model = LlamaForCausalLM(config).eval()
    monkeypatch.setattr(load_module, "load", lambda name: (model, Spelled(tokens)))
    (program,) = [block for block in blocks(page, "python") if "= load(" in block]
    exec(compile(program, page.name, "exec"), {})
    shown = capsys.readouterr().out.splitlines()[-1]
    assert shown in blocks(page, "text")[-1].splitlines()


@pytest.mark.whole
def test_pytest_says_of_the_readmes_kernel_what_judge_says(tmp_path: Path) -> None:
    (kernel,) = [block for block in blocks(ENGLISH, "python") if "anchor = keys.mean" in block]
    (tmp_path / "keydiff.py").write_text(kernel, encoding="utf-8")
    (command,) = [
        line for block in blocks(ENGLISH, "") for line in block.splitlines() if line.endswith("my_kernels")
    ]
    told = said(command.replace("my_kernels", str(tmp_path)), ROOT)
    (verdict,) = re.findall(r"^FAIL: .*$", ENGLISH.read_text(encoding="utf-8"), re.MULTILINE)
    assert told.splitlines()[-1] == verdict
    assert "your numbers match a known bug: mean taken before normalising" in told


LLAMA = {"layers": 32, "kv_heads": 8, "heads": 32, "channels": 128, "inner": 14336, "words": 128256}
"""The figures of Llama 3.1 8B, whose input and output embeddings are two matrices."""


def test_the_memory_that_hurts_is_computed_from_the_models_figures() -> None:
    """And the weights beside it, in two bytes each."""
    layers, channels = LLAMA["layers"], LLAMA["channels"]
    cached, hidden = LLAMA["kv_heads"] * channels, LLAMA["heads"] * channels
    gib = 2 * layers * cached * 2 * 131072 / 2**30
    layer = 2 * hidden * hidden + 2 * hidden * cached + 3 * hidden * LLAMA["inner"] + 2 * hidden
    weights = 2 * (layers * layer + 2 * LLAMA["words"] * hidden + hidden) / 2**30
    assert gib == 16 > weights
    assert f"131,072 tokens, this KV cache of Llama-3.1-8B takes {gib:.0f} GiB, more than" in text_of(ENGLISH)


def test_the_readme_links_every_method() -> None:
    linked = set(re.findall(r"docs/methods/(\w+)\.md", ENGLISH.read_text(encoding="utf-8")))
    assert set(catalogue.names()) <= linked


@pytest.mark.whole
def test_the_triton_kernel_of_the_readme_passes(tmp_path: Path) -> None:
    (kernel,) = [block for block in blocks(ENGLISH, "python") if "@triton.jit" in block]
    (tmp_path / "knorm.py").write_text(kernel, encoding="utf-8")
    told = subprocess.run(
        [sys.executable, "-m", "evictionary", "judge", str(tmp_path)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0 and told.stdout.splitlines()[-1].startswith("PASS"), told.stdout + told.stderr
