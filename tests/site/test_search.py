"""The search of the site: a question loses the words that say nothing, words that no page has become those of
the pages, and pages that explain come before pages of equations. tests/site/site_search.py asks a built site.
"""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import material
from markdown.extensions.toc import slugify

from docs_build import finished, pages
from tests.site.site_search import NODE, QUESTIONS, SCRIPT, asked, is_first, worker_of, wrong

DOCS = Path(__file__).parents[2] / "docs"
WORKER = worker_of(Path(material.__file__).parent / "templates")
CONFIG = {
    "lang": ["en"],
    "separator": re.findall(r"separator: '(.+)'", (DOCS.parent / "mkdocs.yml").read_text("utf-8"))[0],
    "pipeline": ["stopWordFilter"],
    "fields": {"title": {"boost": 1e3}, "text": {"boost": 1.0}, "tags": {"boost": 1e6}},
}


def index(*sections: tuple[str, str, str]) -> dict[str, Any]:
    """What the search reads of a site with these sections: address, title and text."""
    return {
        "config": CONFIG,
        "docs": [
            {"location": address, "title": title, "text": text, "boost": finished.boost(address, title)}
            for address, title, text in sections
        ],
    }


SMALL = index(
    ("classroom/isolation.html", "Isolation of thieves: documents, items, inputs", ""),
    ("faq.html", "Frequent questions", ""),
    ("faq.html#cite", "How do I cite it?", "With BibTeX."),
    ("faq.html#licence", "What is the licence?", "Apache."),
    ("faq.html#quantized", "Can I use a quantized cache?", "No."),
    ("methods/keydiff.html", "KeyDiff", "A method."),
    ("methods/keydiff_equations.html", "KeyDiff: all equations", "KeyDiff keydiff keydiff."),
    ("methods/keydiff_equations.html#kd-8", "KD-8 · The score", "The mean."),
    ("lessons/02_keydiff.html", "2. KeyDiff: keep what points elsewhere", "A lesson."),
    ("lessons/02_keydiff.html#why", "Why the average is enough (KD-7, KD-8)", "The mean."),
    ("lessons/13_numpy_to_triton.html", "13. From a line to a kernel", "A lesson."),
)


def test_the_first_hit_is_what_was_asked_for() -> None:
    first = {
        "How do I cite this?": "faq.html#cite",
        "license": "faq.html#licence",
        "quantization": "faq.html#quantized",
        "a cache that is quantised": "faq.html#quantized",
        "keydiff": "methods/keydiff.html",
        "KD-8": "methods/keydiff_equations.html#kd-8",
        "my kernels": "lessons/13_numpy_to_triton.html",
        "+keydiff +points": "lessons/02_keydiff.html",  # the search's own language still works
    }
    found = dict(zip(first, asked(WORKER, SMALL, list(first)), strict=True))
    assert {question: pages[0][0] for question, pages in found.items()} == first


def test_without_the_script_and_the_order_the_search_finds_other_pages() -> None:
    """As it once did, so that the tests above can fail."""
    questions = ["How do I cite this?", "license", "KD-8"]
    flat = SMALL | {"docs": [{**section, "boost": 1} for section in SMALL["docs"]]}
    cite, licence, kd8 = asked(WORKER, flat, questions, script=None)
    assert cite[0][0] == "classroom/isolation.html" and licence == []
    assert kd8[0][0] == "lessons/02_keydiff.html#why"


def terms(*questions: str) -> list[str]:
    """What the script makes of questions."""
    program = f"{SCRIPT.read_text('utf-8')}\nconsole.log(JSON.stringify({json.dumps(questions)}.map(terms)))"
    return json.loads(
        subprocess.run([NODE, "-e", program], capture_output=True, text=True, check=True).stdout
    )


def test_a_question_keeps_what_says_something() -> None:
    asked_for = {
        "How do I use this with vLLM?": "vllm",
        "which methods are there": "method",
        "What is a loss": "loss",
        "GPU memory of attention heads": "gpu memory attention head",
        "bf16 on MPS": "bfloat16 mac",
        "KD-8": "+kd +8",
        "why does lk-r fail": "+lk +r fail",
        "paged-attention plug-in": "paged-attention plug-in",
        "how do I": "how do I",  # nothing would be left
        '"exact words"': '"exact words"',
        "": "",
    }
    assert dict(zip(asked_for, terms(*asked_for), strict=True)) == asked_for


def test_only_a_question_of_this_search_is_rewritten() -> None:
    """Zensical's search has messages of the same kind with other content, and once got none of them."""
    messages = [{"type": 2, "data": "what is a loss"}, {"type": 2, "data": {"input": "a"}}, {"type": 0}]
    program = (
        "const sent = []; class Worker { postMessage(message) { sent.push(message); } }"
        f"globalThis.Worker = Worker; {SCRIPT.read_text('utf-8')}\n"
        f"for (const message of {json.dumps(messages)}) new Worker().postMessage(message);"
        "console.log(JSON.stringify(sent))"
    )
    told = subprocess.run([NODE, "-e", program], capture_output=True, text=True, check=True)
    assert json.loads(told.stdout) == [{"type": 2, "data": "loss"}, *messages[1:]]


def test_every_section_that_readers_should_find_is_on_a_page() -> None:
    """Of pages that are written and filled here; the lessons and the API are made with the site."""
    assert len(QUESTIONS) >= 20
    for question, wanted in QUESTIONS.items():
        address, _, anchor = wanted.partition("#")
        page = address.replace(".html", ".md")
        path = DOCS.parent / "tutorials" / Path(page).name if page.startswith("lessons/") else DOCS / page
        text = pages.filled(page, path.read_text(encoding="utf-8"))
        titles = re.findall(r"^#+ (.+?)(?: \{ #([\w-]+) \})?$", text, re.MULTILINE)
        assert not anchor or anchor in {given or slugify(title, "-") for title, given in titles}, question


def test_a_wrong_first_hit_is_complained_of() -> None:
    question, wanted = next(iter(QUESTIONS.items()))
    assert "#" in wanted and wrong({question: [[wanted], ["index.html"]]}) == []
    for pages_found in ([], [["index.html"], [wanted]], [[wanted.partition("#")[0], wanted]]):
        assert len(wrong({question: pages_found})) == 1
    assert is_first("faq.html", ["faq.html#cite", "faq.html"]) and not is_first("faq.html", ["wild.html"])


def test_pages_that_explain_come_before_equations_and_records() -> None:
    order = [
        ("which_method.html", "Which method should I use?"),
        ("methods/keydiff.html", "KeyDiff"),
        ("lessons/02_keydiff.html", "2. KeyDiff"),
        ("methods/keydiff_equations.html#kd-8", "KD-8 · The score"),
        ("tolerance.html", "Tolerance"),
        ("methods/keydiff_equations.html", "KeyDiff: all equations"),
    ]
    boosts = [finished.boost(*one) for one in order]
    assert boosts == sorted(boosts, reverse=True) and len(set(boosts)) == len(boosts)
