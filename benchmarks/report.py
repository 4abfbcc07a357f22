"""The page of the stored results: `python -m benchmarks.report` writes docs/benchmarks.md from benchmarks/results/*.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.timing import RESULTS, ROOT

CLOCKS = {"process_time": "processor time", "perf_counter": "wall-clock time"}
PAGE = ROOT / "docs" / "benchmarks.md"

HEAD = """# Benchmarks

This page is written by `python -m benchmarks.report` from the results that are stored in `benchmarks/results/`; no figure on it
was typed. A floor is the least time that the bytes or the multiplications of a task allow on the machine at hand, a goal is what is
aimed at. A ratio is claimed where the intervals from the 20 % to the 80 % quantile of the two sides do not overlap, and marked "~"
where they do.
"""

NO_GPU = """No GPU result is stored yet. On a machine with an NVIDIA GPU and this project installed, this makes one; it limits
itself to nine minutes, laws included:

```
python -m benchmarks.gpu --out benchmarks/results
python -m benchmarks.report
```

`python -m benchmarks.gpu --list` prints the rows and their goals anywhere.
"""

NO_CPU = """No CPU result is stored yet. This makes one, in an environment of its own that it builds once:

```
python -m benchmarks.cpu
python -m benchmarks.report
```
"""

NO_MODEL = """No result is stored yet. This makes one, with the embedded model:

```
python -m benchmarks.model
python -m benchmarks.report
```
"""

# What is aimed at, at most: compressing over reading the prompt, a token and the bytes over those of the full cache.
MODEL_GOALS = {"compression": 0.05, "decoding": 1.0, "blocks": 0.4}


def page(folder: Path = RESULTS) -> str:
    """The whole page, from the results in a folder."""
    found = {name: _read(folder / f"{name}.json") for name in ("gpu", "cpu", "model")}
    parts = [HEAD, "## On a GPU\n", gpu_section(found["gpu"]) if found["gpu"] else NO_GPU]
    parts += ["## On a CPU, against kvpress\n", cpu_section(found["cpu"]) if found["cpu"] else NO_CPU]
    parts += ["## In a real transformer\n", model_section(found["model"]) if found["model"] else NO_MODEL]
    return "\n".join(parts)


def gpu_section(result: dict[str, Any]) -> str:
    """A table with a line for each row, ours beside every peer that ran."""
    lines = [
        f"{result['gpu'] or 'no GPU'}; {_machine(result)}.",
        "",
        "Ceilings measured in the same run: "
        + ", ".join(f"{name} {value:.3g}" for name, value in result["ceilings"].items())
        + ".",
        "",
        "| row | measured us (p20 to p80) | floor us | of floor | goals | peers: measured us, ratio |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        name = f"{row['id']}: {row['title']}"
        if row["status"] != "measured":
            lines.append(f"| {name} | {row['status']} | | | | |")
            continue
        ours = row["arms"]["ours"]["seconds"]
        peers = [
            f"{peer} {_microseconds(arm['seconds']['p50'])}, {_ratio(row['ratios'][peer])}"
            for peer, arm in row["arms"].items()
            if peer != "ours" and "seconds" in arm
        ]
        peers += [f"{peer}: {arm['status']}" for peer, arm in row["arms"].items() if "seconds" not in arm]
        peers += [f"{peer}: not there" for peer in row["missing"]]
        goals = [] if row["goal_s"] is None else [_microseconds(row["goal_s"]) + " us"]
        goals += [] if row["goal_ratio"] is None else [f"{row['goal_ratio']:g} x"]
        measured = f"{_microseconds(ours['p50'])} ({_microseconds(ours['p20'])} to {_microseconds(ours['p80'])})"
        floor = f"{_microseconds(row['floor_s'])} | {row['share_of_floor']:.0%}"
        lines.append(f"| {name} | {measured} | {floor} | {', '.join(goals)} | {'; '.join(peers)} |")
    return "\n".join([*lines, ""])


def cpu_section(result: dict[str, Any]) -> str:
    """A table for each dtype: how many times faster and smaller than kvpress, and how the time grows."""
    tokens = result["tokens"]
    lines = [
        f"{result['processor']}, {result['threads']} thread, {CLOCKS[result['clock']]}; {_machine(result)}.",
        "",
        f"A layer of Llama-3.1-8B: {result['heads'][1]} KV heads, {result['heads'][0]} query heads, {result['head_dim']} channels. "
        "Each entry is how many times faster than kvpress, then, in brackets, how many times less memory the call took (the rise "
        "of the resident set; a dash where ours rose by less than 1 MiB). `exponent` is the fitted power of the number of tokens "
        f"with which our time grows, goal {result['goals']['exponent']} at most; each is linear in the number of tokens, and what "
        "lies above 1 comes of the shortest prompts, which fit into the processor's cache. kvpress computes bfloat16 caches in "
        "bfloat16 and returns bfloat16 scores (KNorm excepted); ours are computed and returned in float32.",
    ]
    for dtype in result["dtypes"]:
        header = "".join(f" T = {count} |" for count in tokens)
        lines += ["", f"### {dtype}", "", f"| method | goal |{header} exponent |", "|---|---|" + "---|" * (len(tokens) + 1)]
        for method, growth in result["exponents"][dtype].items():
            cells = []
            for count in tokens:
                one = result["methods"][dtype][str(count)][method]
                less = f"{one['kvpress_bytes'] / one['ours_bytes']:.1f} x" if one["ours_bytes"] >= 2**20 else "-"
                cells.append(f" {_ratio(one['ratio'])} ({less}) |")
            goal = result["goals"]["ratio"][method]
            lines.append(f"| {method} | {goal:g} x |{''.join(cells)} {growth['ours']:.2f} (kvpress {growth['kvpress']:.2f}) |")
    lines += ["", "### Medians in milliseconds, ours / kvpress", ""]
    names = [f"{dtype} {method}" for dtype in result["dtypes"] for method in result["exponents"][dtype]]
    lines += ["| |" + "".join(f" T = {count} |" for count in tokens), "|---|" + "---|" * len(tokens)]
    for name in names:
        dtype, method = name.split()
        cells = [result["methods"][dtype][str(count)][method] for count in tokens]
        texts = (f" {one['ours_s']['p50'] * 1e3:.3g} / {one['kvpress_s']['p50'] * 1e3:.3g} |" for one in cells)
        lines.append(f"| {name} |" + "".join(texts))
    return "\n".join([*lines, ""])


def model_section(result: dict[str, Any]) -> str:
    """Three tables: what compressing a prompt costs, how long a token takes afterwards, and the peak of a prompt read in blocks."""
    reading, *methods = result["compression"]
    block_tokens = result["blocks"][0]["prompt_tokens"]
    lines = [
        f"Model: {result['model']}; {result['machine']}; torch {result['torch']}, transformers {result['transformers']}; "
        f"{result['date']}. `python -m benchmarks.model`, each ratio within one run.",
        "",
        f"### Compressing a prompt of {result['tokens']:,} tokens to half, once it is read",
        "",
        f"Reading it took {reading['seconds']:.2f} s. Goal: at most {MODEL_GOALS['compression']:.0%} of that. H2O adds up the "
        "whole attention matrix, as much work as the attention of the prompt itself; it can meet that goal on no machine.",
        "",
        "| method | seconds | of reading the prompt |",
        "|---|---|---|",
        *(f"| {row['method']} | {row['seconds']:.3f} | {row['share_of_prefill']:.1%} |" for row in methods),
        "",
        f"### A token after {result['tokens']:,} tokens, three quarters of them removed",
        "",
        "Goal: at most the time with the full cache. The ratio is the median over rounds in which the caches take turns.",
        "",
        "| cache | milliseconds | ratio to the full cache (lowest to highest) | keys and values, MB | over the kept tokens' own |",
        "|---|---|---|---|---|",
    ]
    for row in result["decoding"]:
        spread = f"{row['ratio_to_full']:.2f} ({row['ratio_lowest']:.2f} to {row['ratio_highest']:.2f})"
        over = f"{row['bytes_over_tokens_kept']:.3f}" if "bytes_over_tokens_kept" in row else ""
        lines.append(f"| {row['cache']} | {row['seconds_per_token'] * 1e3:.1f} | {spread} | {row['bytes'] / 1e6:.1f} | {over} |")
    lines += [
        "",
        f"### A prompt of {block_tokens:,} tokens in blocks of {result['block']}, with a budget of {result['budget']:,}",
        "",
        f"Goal: the cache takes at most {MODEL_GOALS['blocks']:.0%} of the full one at its peak.",
        "",
        "| method | peak, MB | full, MB | share |",
        "|---|---|---|---|",
    ]
    for row in result["blocks"]:
        sizes = f"{row['peak_bytes'] / 1e6:.1f} | {row['full_bytes'] / 1e6:.1f} | {row['share_of_full']:.1%}"
        lines.append(f"| {row['method']} | {sizes} |")
    return "\n".join([*lines, ""])


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.4g}"


def _ratio(one: dict[str, Any]) -> str:
    return f"{'' if one['claimed'] else '~'}{one['value']:.2f} x"


def _machine(result: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items() if number != "not installed")
    return f"{versions}; commit {result['commit']}, {result['date']}"


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
