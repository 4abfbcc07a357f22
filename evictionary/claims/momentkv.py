"""MomentKV (arXiv 2606.01563): evicted mass, angle of the two sub-outputs, error with and without the correction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from evictionary.claims.claim import Findings, read_paper
from evictionary.claims.pictures import band, finish
from evictionary.claims.recording import Lab, Layer, Observed, Recording, as_array, by_layer, stacked
from evictionary.optimized import h2o
from evictionary.reference import momentkv as paper
from evictionary.reference import momentkv_theory as theory

PAPER = read_paper("momentkv")
WINDOW = 32
POSITIONS = 8


def errors(query: np.ndarray, keys: np.ndarray, values: np.ndarray, kept: np.ndarray, split: int) -> dict[str, np.ndarray]:
    """Everything measured for one query, [H_kv, G] each.

    Args: query [H_kv, G, D]; keys [H_kv, T, D]; values [H_kv, T, D_v]; kept [H_kv, T], True after the prompt of `split` tokens.
    """
    per_query_head = keys[:, None], values[:, None], kept[:, None]
    full = theory.full_output(query, *per_query_head[:2])
    retained, evicted = theory.sub_outputs(query, *per_query_head)
    mass = theory.mass(query, keys[:, None], kept[:, None])[1]
    prompt = slice(0, split)
    nothing = paper.no_moments(keys, values)
    moments = paper.update(nothing, keys[:, prompt], values[:, prompt], ~kept[:, prompt])
    of_each_query = paper.Moments(*(part[:, None] for part in moments))
    batched = (
        query.reshape(1, -1, query.shape[-1]),
        keys[None],
        values[None],
        kept[None],
        paper.Moments(*(part[None] for part in moments)),
    )
    size = theory.norm(full)

    def error(output: np.ndarray) -> np.ndarray:
        return theory.norm(full - output.reshape(full.shape)) / size

    return {
        "mass": mass,
        "cosine": cosine(retained, evicted),
        "direction": cosine(evicted, paper.approximate_evicted(query, of_each_query)),
        "none": error(retained),
        "zeroth": error(theory.attend_zeroth_order(*batched)),
        "first": error(paper.attend(*batched)),
    }


def cosine(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The cosine of two rows of vectors, [..., D] twice to [...]; 0 with a zero vector."""
    size = theory.norm(one) * theory.norm(other)
    return (one * other).sum(axis=-1) / np.where(size == 0, 1, size)


def observe(lab: Lab, recording: Recording) -> Observed:
    """Measure one text."""

    def measured(layer: Layer) -> dict[str, np.ndarray]:
        selections = _selections(recording, layer, lab.scale.budgets, lab.scale.main_budget)
        by_selection = {selection: _over_queries(recording, layer, kept) for selection, kept in selections.items()}
        return {f"{selection}: {name}": found for selection, each in by_selection.items() for name, found in each.items()}

    return Observed(recording.kind, stacked(map(measured, recording.layers)))


def _selections(recording: Recording, layer: Layer, budgets: tuple[int, ...], main: int) -> dict[str, np.ndarray]:
    """Kept masks [H_kv, split]: H2O at each budget, and MomentKV's own selection at the main one."""
    split = recording.split
    queries, keys, values = layer.queries[:, :, :split], layer.keys[:, :, :split], layer.values[:, :, :split]
    kept = {f"h2o {budget}": h2o.select(queries, keys, budget=budget)[0].cpu().numpy() for budget in {*budgets, main}}
    window = as_array(queries[:, :, -WINDOW:])
    kept["momentkv"] = paper.select_prompt(window, as_array(keys), as_array(values), main)[0]
    return kept


def _over_queries(recording: Recording, layer: Layer, kept: np.ndarray) -> dict[str, np.ndarray]:
    queries, keys, values = (as_array(each)[0] for each in (layer.queries, layer.keys, layer.values))
    num_kv_heads, length, _ = keys.shape
    grouped = queries.reshape(num_kv_heads, -1, *queries.shape[1:])
    later = np.ones((num_kv_heads, length - recording.split), dtype=bool)
    everywhere = np.concatenate([kept, later], axis=-1)

    def measured(position: int) -> dict[str, np.ndarray]:
        seen = slice(0, position + 1)
        return errors(grouped[:, :, position], keys[:, seen], values[:, seen], everywhere[:, seen], recording.split)

    return stacked(map(measured, np.linspace(recording.split, length - 1, POSITIONS).astype(int)))


def conclude(lab: Lab, texts: Sequence[Observed]) -> Findings:
    """The numbers of all texts together."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for key in texts[0].values:
        selection, _, name = key.partition(": ")
        found.setdefault(selection, {})[name] = by_layer(texts, key)
    main = lab.scale.main_budget
    theirs, ours = found[f"h2o {main}"], found["momentkv"]
    none, zeroth, first = (ours[name] for name in ("none", "zeroth", "first"))
    of_layer = {name: ours[name].mean(axis=(0, 2)) for name in ("none", "zeroth", "first", "direction")}
    hurt = (first > none).mean(axis=(0, 2))
    numbers = PAPER.numbers(smallest=min(lab.scale.budgets))
    numbers.mean("evicted_mass", theirs["mass"])
    numbers.mean("share_of_layers_below_005", theirs["mass"].mean(axis=(0, 2)) < 0.05)
    numbers.mean("evicted_mass_at_the_paper_s_share", found[f"h2o {min(lab.scale.budgets)}"]["mass"])
    numbers.mean("size_of_layer_cosine", np.abs(theirs["cosine"].mean(axis=(0, 2))))
    numbers.mean("cosine", theirs["cosine"])
    numbers.mean("relative_error", theirs["none"])
    numbers.median("amplification", theirs["none"] / theirs["mass"])
    numbers.mean("loss_against_h2o", first.mean(axis=(1, 2)) / theirs["none"].mean(axis=(1, 2)))
    numbers.mean("share_of_layers_improved", of_layer["first"] < of_layer["none"])
    numbers.mean("reduction", 1 - of_layer["first"] / of_layer["none"])
    numbers.mean("direction", ours["direction"])
    numbers.mean("direction_of_worst_layer", [of_layer["direction"].min()])
    numbers.mean("gain_of_zeroth_order", (none - zeroth).mean(axis=(1, 2)) / none.mean(axis=(1, 2)))
    numbers.mean("further_gain_of_first_order", (zeroth - first).mean(axis=(1, 2)) / none.mean(axis=(1, 2)))
    numbers.share("share_hurt", first > none)
    numbers.share("share_hurt_zeroth_order", zeroth > none)
    numbers.mean("worst_layer_hurt", [hurt.max()])
    return Findings(numbers, _series(lab, found, hurt))


def _series(lab: Lab, found: dict[str, dict[str, np.ndarray]], hurt: np.ndarray) -> dict[str, Any]:
    theirs, ours = found[f"h2o {lab.scale.main_budget}"], found["momentkv"]

    def band_of(values: np.ndarray) -> list[list[float]]:
        low, high = np.percentile(values, [10, 90], axis=(0, 2))
        return [low.tolist(), values.mean(axis=(0, 2)).tolist(), high.tolist()]

    by_budget = {budget: found[f"h2o {budget}"] for budget in lab.scale.budgets}
    return {
        "mass": band_of(theirs["mass"]),
        "cosine": band_of(theirs["cosine"]),
        "direction": band_of(ours["direction"]),
        "error": {name: ours[name].mean(axis=(0, 2)).tolist() for name in ("none", "zeroth", "first")},
        "hurt": hurt.tolist(),
        "by_budget": {
            "budget": list(by_budget),
            "mass": [float(each["mass"].mean()) for each in by_budget.values()],
            "relative error": [float(each["none"].mean()) for each in by_budget.values()],
        },
    }


def draw(figure: Figure, series: dict[str, Any]) -> None:
    """Draw the paper's picture; `shown` in its file says what is seen."""
    (mass, angle, budgets), (error, direction, hurt) = figure.subplots(2, 3)
    band(mass, series["mass"], "mean and 10 to 90 % of steps")
    mass.axhline(0.08, color="grey", linestyle="--", linewidth=1)
    finish(mass, xlabel="layer", ylabel="evicted mass w_E", title="H2O: attention on evicted tokens")
    band(angle, series["cosine"], "mean and 10 to 90 % of steps")
    angle.axhline(0, color="grey", linewidth=1)
    finish(angle, xlabel="layer", ylabel="cos(f_R, f_E)", title="H2O: retained against evicted output")
    for name in ("mass", "relative error"):
        label = "evicted mass" if name == "mass" else name
        budgets.plot(series["by_budget"]["budget"], series["by_budget"][name], marker="o", label=label)
    budgets.set_xscale("log", base=2)
    budgets.set_xticks(series["by_budget"]["budget"], [str(each) for each in series["by_budget"]["budget"]])
    finish(
        budgets,
        xlabel="tokens kept in each head (log scale)",
        ylabel="mean over heads and layers",
        title="H2O: mass and error by budget",
    )
    labels = {"none": "no correction", "zeroth": "zeroth order", "first": "first order (MomentKV)"}
    for name, values in series["error"].items():
        error.plot(values, label=labels[name])
    finish(
        error, xlabel="layer", ylabel="mean relative error |f - output| / |f|", title="MomentKV's selection: error of the output"
    )
    band(direction, series["direction"], "mean and 10 to 90 % of steps")
    finish(direction, xlabel="layer", ylabel="cos(f_E, its approximation)", title="direction of the approximated output")
    hurt.bar(range(len(series["hurt"])), series["hurt"])
    hurt.set(xlabel="layer", ylabel="share of steps", title="where the correction makes it worse")
