"""The page of re-rotation says what its measurements say."""

import json
import lzma
import math
import statistics
from collections import defaultdict

from docs_build import methods, pages
from docs_build.entries import ROOT

PAGE = (ROOT / "docs" / "methods" / "rerotation.md").read_text(encoding="utf-8")
NAMES = {"streaming_llm": "StreamingLLM", "keydiff": "KeyDiff"}


def losses() -> dict[tuple[str, float], dict[int, float]]:
    """-log p of the next tokens, in nats a token, by method, ratio and window."""
    stored = (ROOT / "docs" / "study" / "rerotated.jsonl.xz").read_bytes()
    found: dict[tuple[str, float], dict[int, float]] = defaultdict(dict)
    for line in map(json.loads, lzma.decompress(stored).decode().splitlines()):
        found[line["method"], line["ratio"]][line["seed"]] = math.log(line["perplexity"])
    return found


def signed(number: float) -> str:
    """Three decimals, without the sign of a zero."""
    return f"{round(number, 3) + 0.0:.3f}"


def test_the_table_is_that_of_the_measurements() -> None:
    found, rows = losses(), []
    full = found["full", 0.0]
    assert len(full) == 12 and all(own.keys() == full.keys() for own in found.values())
    for name, shown in NAMES.items():
        for ratio in (0.5, 0.8):
            alone, turned = found[name, ratio], found[f"{name}+rerotate", ratio]
            costs = [statistics.mean(own[seed] - full[seed] for seed in full) for own in (alone, turned)]
            change = [turned[seed] - alone[seed] for seed in full]
            error = statistics.stdev(change) / math.sqrt(len(change))
            assert abs(statistics.mean(change)) < 2 * error
            cells = (*map(signed, costs), f"{signed(statistics.mean(change))} ± {signed(error)}")
            rows.append(f"| {shown} | {ratio:.0%} | {' | '.join(cells)} |".replace("%", " %"))
    assert "\n".join(rows) in PAGE


def test_the_page_has_the_sections_of_a_method() -> None:
    shown = pages.filled("methods/rerotation.md", PAGE)
    told = [line.removeprefix("## ") for line in shown.splitlines() if line.startswith("## ")]
    assert tuple(told[: len(methods.SECTIONS)]) == methods.SECTIONS
