"""What every method page says alike, from the catalogue and from stored results: what a method reads and
costs, where it is strong, its results with intervals, its sources.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from markdown.extensions.toc import slugify

from conformance import wild
from docs_build import facts
from docs_build.charts import CHARTS
from docs_build.entries import ROOT, entries, stem_of
from evictionary.errors import UsageError
from evictionary.evaluation.run import label
from evictionary.evaluation.study import OPTIONS
from evictionary.methods import catalogue
from evictionary.methods.resolve import resolve
from evictionary.spec_tests.judge.law import REQUIREMENTS
from tutorials.build import heading, lessons

MARKERS = {
    "What it does": ("idea", "formulas"),
    "What it reads and costs": ("reads",),
    "Where it shines and where it fails": ("strengths",),
    "Results": ("retrieved", "costs"),
    "Run it": ("run",),
    "Sources": ("sources",),
}
"""The sections with which every method page begins, in this order, and the markers that each has."""
SECTIONS = tuple(MARKERS)
PAGES = (*catalogue.names(), *catalogue.additions())
"""What has a page with them: the methods, and the additions."""
# Inputs that say how much to keep and where a layer is, and nothing of the text.
SIZES = {"budget", "keep_ratio", "compression_ratio", "layer_index", "num_layers", "length"}
# The method behind which an addition was measured, and is shown.
BEHIND = {
    "ada_kv": "keydiff",
    "cake": "snapkv",
    "cam": "h2o",
    "chunk_kv": "snapkv",
    "protect": "keydiff",
    "pyramid_kv": "keydiff",
}
KINDS = {
    "merge_values": "It merges values of evicted tokens into kept ones, and changes no choice.",
    "preference": "It divides a budget among the layers, by a comparison of the layers.",
    "budgets": "It divides a budget among the layers, by their depth alone.",
    "choose": "It chooses other tokens of a head than those of the highest scores.",
    "select": "It divides the budget of a layer among its heads.",
}
RANDOM = catalogue.RANDOM


def composition(stem: str) -> str:
    """How a method is called in `evictionary run`; an addition follows the method of BEHIND."""
    return f"{BEHIND[stem]}+{stem}" if stem in BEHIND else stem


def completed(stem: str, markdown: str) -> str:
    """A method page with every section and marker: what it does not write itself comes at its place."""
    begin, *blocks = re.split(r"^## (.+)\n", markdown, flags=re.MULTILINE)
    written = dict(zip(blocks[::2], blocks[1::2], strict=True))
    given = {"formulas": ", ".join(ids_with_formulas(stem)), "run": composition(stem)}
    sections = []
    for title, markers in MARKERS.items():
        own = written.pop(title, "").strip()
        missing = [name for name in markers if f"<!-- {name}: " not in own]
        made = [f"<!-- {name}: {given.get(name, stem)} -->" for name in missing]
        sections.append("\n\n".join([f"## {title}", *([own] if own else []), *made]))
    rest = [f"## {title}\n\n{body.strip()}" for title, body in written.items()]
    return "\n\n".join([begin.strip(), *sections, *rest]) + "\n"


def ids_with_formulas(stem: str) -> list[str]:
    """The requirements of a method that have a formula, in their order."""
    return [name for name, own in stem_of().items() if own == stem and entries()[name].requirement.tex]


def parts(method: str) -> list[str]:
    """The names in a composition, or in the label of a row with options behind it."""
    return method.partition(" ")[0].split("+")


def is_about(method: str, stem: str) -> bool:
    """Whether a row belongs on a page: a method's page has what begins with it, an addition's what has it."""
    return stem in parts(method)[1:] if stem in BEHIND else parts(method)[0] == stem


def without(method: str, stem: str) -> str:
    """A composition without an addition."""
    return "+".join(part for part in parts(method) if part != stem)


# What it reads and costs.


def reads(stem: str) -> list[tuple[str, str]]:
    """Lines of a subject and what is said of it."""
    return [*(_of_addition(stem) if stem in BEHIND else _of_method(stem)), *_measured(stem)]


def _inputs(function: Any) -> list[tuple[str, str]]:
    found = catalogue.split_signature(function)[0] if function else []
    return [(f"Reads `{name}`", f"{catalogue.INPUTS[name]}.") for name in found if name not in SIZES]


def _of_method(stem: str) -> list[tuple[str, str]]:
    module, method = catalogue.definition(stem), resolve(stem)
    function, traits = catalogue.entry(module), catalogue.traits(module)
    names = set(catalogue.split_signature(function)[0]) if function else set()
    state = sorted({name.replace("replay_", "").replace("_", " ") for name in method.captured} - {"keys"})
    kept = catalogue.protected(stem, {}).strip("-").replace(", ", " and the ")
    kept = re.sub(r"\d+", lambda count: "token" if count[0] == "1" else f"{count[0]} tokens", kept, count=1)
    yours = [("Budget", "You choose it, as a ratio or as a number of tokens.")]
    budget = [] if "own_budget" in traits else yours
    return [
        *_inputs(function),
        (
            "Fused attention",
            f"It works, and the model hands over its {' and '.join(state)}."
            if state
            else "It works, because the method reads the cache alone.",
        ),
        ("Always stays", f"The {kept}." if kept else "No token."),
        *budget,
        *(("Trait", f"It {catalogue.TRAITS[trait]}.") for trait in sorted(traits)),
        (
            "Calibration",
            "A text of yours, or else the prompt itself." if names & catalogue.CALIBRATED else "None.",
        ),
        (
            "Second reading",
            "The model reads the prompt twice."
            if names & catalogue.REPLAYED
            else "The model reads the calibration text twice."
            if names & catalogue.REFITTED
            else "None.",
        ),
    ]


def _of_addition(stem: str) -> list[tuple[str, str]]:
    module = catalogue.modules()[stem]
    kind = next(said for name, said in KINDS.items() if hasattr(module, name))
    works, refused = [], []
    for name in catalogue.names():
        try:
            resolve(f"{name}+{stem}")
            works.append(f"`{name}`")
        except UsageError:
            refused.append(f"`{name}`")
    function = getattr(module, "preference", None) or getattr(module, "merge_values", None)
    scores = [] if hasattr(module, "merge_values") else [("Reads scores", "Those of the method before it.")]
    return [
        ("Kind", kind),
        *scores,
        *_inputs(function),
        ("Works after", f"{', '.join(works)}."),
        ("Is refused after", f"{', '.join(refused)}." if refused else "No method."),
    ]


def _measured(stem: str) -> Iterable[tuple[str, str]]:
    """The measured costs of a method; those of a token with it and without it of an addition."""
    timed = {row["method"]: row for row in CHARTS["speed"].data["compression"]}
    if stem in timed:
        yield (
            "Time to compress",
            f"{timed[stem]['share_of_prefill']:.1%} of the time to read 4,096 tokens, on two CPU cores.",
        )
    memory = CHARTS["against_kvpress"].data["methods"]["float32"]["4096"]
    if stem in memory:
        mib = memory[stem]["ours_bytes"] / facts.MIB
        yield "Memory to score", f"{mib:.1f} MiB beside 4,096 tokens of one layer of Llama-3.1-8B."
    (found,) = facts.stored("benchmarks/results/costs.json")["now"]["tokens"].items()
    length, ratios = found[0], {row["method"]: row["decode"]["ratio"] for row in found[1]["rows"]}
    name = f"keydiff+{stem}" if stem in BEHIND else stem
    if name in ratios:
        times = f"{ratios[name]:.2f} times the time with the full cache, at half of {int(length):,} tokens"
        beside = f" behind KeyDiff, which alone takes {ratios['keydiff']:.2f} times" if stem in BEHIND else ""
        yield "A later token", f"{times}{beside}."


# Where it is strong, and its results.


class Cost(NamedTuple):
    """The cost of a composition in a part of the study, at one ratio: nats a token, its interval, and the
    tokens that a head keeps on average.
    """

    value: float
    low: float
    high: float
    kept: float


def costs(part: str, stem: str) -> dict[str, dict[float, Cost]]:
    """The costs of a page's compositions without MomentKV's correction, of the same ones without an addition,
    and of random eviction; empty where none of the page's own is there.
    """
    study = facts.stored(facts.STUDY)
    rows = (study[part] if part else study)["rows"]
    own = {row["method"] for row in rows if is_about(row["method"], stem)}
    own -= {name for name in own if catalogue.MOMENTS in parts(name)}
    shown = own and {*own, RANDOM, *(without(name, stem) for name in own if stem in BEHIND)}
    found: dict[str, dict[float, Cost]] = {name: {} for name in sorted(shown)}
    for row in rows:
        if row["method"] in shown:
            found[row["method"]][row["ratio"]] = Cost(row["cost"], *row["interval"], row["tokens_kept"])
    return {name: costs for name, costs in found.items() if costs}


def studied_as(method: str) -> str:
    """A composition with the options that it has in the study: `lagkv (lag_size=32)`."""
    return label({"method": method, "options": OPTIONS.get(parts(method)[0], {})})


class Task(NamedTuple):
    """The cost of a method in a task of the study, beside that of random eviction, in nats a token."""

    share: float
    task: str
    cost: float
    drawn: float


def tasks(method: str, ratio: float = 0.5) -> list[Task]:
    """The tasks of the study, from the one where a method costs the least share of random eviction."""
    rows = {row["method"]: row["tasks"] for row in facts.stored(facts.STUDY)["rows"] if row["ratio"] == ratio}
    own, drawn = rows.get(method, {}), rows[RANDOM]
    return sorted(Task(own[task] / drawn[task], task, own[task], drawn[task]) for task in own)


def sets_budget(stem: str) -> bool:
    """Whether a method decides by itself how many tokens stay."""
    return stem in catalogue.names() and "own_budget" in catalogue.traits(catalogue.definition(stem))


def own_size(method: str) -> float:
    """The tokens of a head that a method with its own budget kept in the study; 0 for any other."""
    kept = {row["method"]: row["tokens_kept"] for row in facts.stored(facts.STUDY)["rows"]}
    return float(kept.get(method, 0)) if sets_budget(method) else 0


def effects(stem: str) -> list[tuple[str, Mapping[str, Any]]]:
    """What an addition changed in the parts of the study that have it, the same composition without it
    beside it: the part's name and the row.
    """
    study = facts.stored(facts.STUDY)
    named = {"": "the study", "pyramid": "the study of layers", "real_finals": "texts that people wrote"}
    return [
        (name, row)
        for part, name in named.items()
        for row in (study[part] if part else study)["effects"]
        if row["addition"] == stem
    ]


def found(method: str) -> list[int] | None:
    """The prompts of docs/retrieval.md, of five, whose number is found at RATIOS; None without a row."""
    rows = facts.retrieved()
    return [int(one["right"]) for one in rows[method]] if method in rows else None


def pairs(stem: str) -> list[tuple[str, str]]:
    """The compositions of docs/retrieval.md that have an addition, with the same without it."""
    return [
        (without(name, stem), name)
        for name in facts.retrieved()
        if is_about(name, stem) and without(name, stem) in facts.retrieved()
    ]


def is_retrieved(stem: str) -> bool:
    """Whether docs/retrieval.md has a row for a page."""
    return any(is_about(name, stem) for name in facts.retrieved())


def is_measured(stem: str) -> bool:
    """Whether any result of a method's quality is stored."""
    studied = any(costs(part, stem) for part in ("", "pyramid", "protected", "real", "real_finals"))
    return studied or is_retrieved(stem) or len(perplexities(stem)) > 1


def answers(stem: str) -> tuple[Sequence[Any], Sequence[Any]]:
    """The rows of docs/real_texts.md at 1,000 tokens whose task the model can do with the full cache: those
    of the full cache, and those of a page's methods.
    """
    data = facts.stored(facts.REAL)
    full = {
        row["task"]: row
        for row in data["full"]
        if row["length"] == 1000 and row["perplexity"] is None and row["exact"] >= 0.5
    }
    rows = [
        row
        for row in data["rows"]
        if row["length"] == 1000 and row["task"] in full and row["ratio"] and is_about(row["method"], stem)
    ]
    return list(full.values()), rows


def perplexities(stem: str) -> list[tuple[str, float, float, float]]:
    """Of a page's compositions, with their options, the perplexity of half of the cache, read at once and
    while decoding, and the tokens that a head keeps.
    """
    rows = {
        (row["label"], row["task"]): (row["perplexity"], row["tokens_kept"])
        for row in facts.stored("benchmarks/results/perplexity.json")["rows"]
    }
    names = dict.fromkeys(name for name, _ in rows if is_about(name, stem) or name == "full")
    found = [(name, *rows[name, "perplexity"], rows[name, "perplexity_decoding"][0]) for name in names]
    return [(name, at_once, decoding, kept) for name, at_once, kept, decoding in found]


# Sources.


def bibliography() -> dict[str, dict[str, str]]:
    """The entries of the bibliography by their keys, without the braces of LaTeX."""
    text = (ROOT / "docs" / "reference" / "papers.bib").read_text(encoding="utf-8")
    return {
        key: {
            name: re.sub(r"[{}$\\]|\\'", "", value.replace(r"{\'e}", "é")).replace("L_2", "L2")
            for name, value in re.findall(r"^ *(\w+) *= *\{(.*)\},?$", body, re.MULTILINE)
        }
        for key, body in re.findall(r"^@\w+\{(\w+),\n(.*?)^\}$", text, re.MULTILINE | re.DOTALL)
    }


def paper(stem: str) -> str:
    """The paper of a method: authors, title, year and a link to the version that was read; a method that the
    bibliography does not have is of none.
    """
    if stem not in (known := bibliography()):
        return "None."
    entry = known[stem]
    version = next((one.version for name, one in REQUIREMENTS.items() if stem_of()[name] == stem), "")
    number = entry.get("eprint")
    url = f"https://arxiv.org/abs/{number}{version}" if number else entry["url"]
    link = f"[{f'arXiv {number}' if number else url}]({url})"
    who = entry.get("author", "").replace(" and others", " et al").replace(" and ", "; ")
    told = ", ".join(each for each in (f"*{entry['title']}*", entry.get("year", ""), link) if each)
    return f"{who}. {told}." if who else f"{told}."


def judged(stem: str) -> list[str]:
    """The names of the public code bases whose implementation of a method was judged, and the code's own
    name where it is only related to the method.
    """
    rows = facts.stored("conformance/results.json")["rows"]
    return [
        source.title + (f", its {said.named}" if said.named else "")
        for source in wild.sources()
        for name, said in source.methods.items()
        if name == stem and f"{source.name}/{name}" in rows
    ]


def taught(stem: str) -> list[tuple[str, str]]:
    """The lessons whose code uses a method's module: page and title."""
    module = r"evictionary\.(?:reference|optimized)[.\w]*"
    uses = re.compile(rf"^from {module} import [^\n]*\b{stem}\b", re.MULTILINE)
    return [
        (f"lessons/{lesson.name}", heading(lesson))
        for lesson in lessons()
        if uses.search(lesson.read_text(encoding="utf-8"))
    ]


def display(stem: str) -> str:
    """A method's name as the papers write it."""
    return (catalogue.modules()[stem].__doc__ or "").partition(" (")[0].partition(",")[0]


def decisions(stem: str) -> str:
    """The anchor of the part of docs/decisions.md about a method, or nothing."""
    text = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8")
    for title in re.findall(r"^#{2,3} (.+)$", text, re.MULTILINE):
        if title == display(stem):
            return slugify(title, "-")
    return ""


def errata(stem: str) -> int:
    """How many entries of docs/errata.md are about a method's paper."""
    return len({one for name, entry in entries().items() if stem_of()[name] == stem for one in entry.errata})


def files(stem: str) -> list[str]:
    """The files of a method, from the mathematics to the kernels."""
    folders = ("reference", "optimized", "optimized/kernels", "optimized/teaching", "evictionary/policies")
    return [path for folder in folders if (ROOT / (path := f"{folder}/{stem}.py")).exists()]
