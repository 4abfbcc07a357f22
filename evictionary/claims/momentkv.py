"""MomentKV (arXiv 2606.01563): evicted mass, angle of the two sub-outputs, error with and without the correction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from evictionary.claims.claim import Findings, read_paper
from evictionary.claims.pictures import band, finish
from evictionary.claims.recording import Lab, Layer, Observed, Recording, Scale, as_array, of_texts, spread_by_layer, stacked
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


def observe(lab: Lab, recording: Recording) -> dict[str, Any]:
    """Measure one text: each quantity as the mean over the queries, [layers, heads], where no other shape is said."""
    scale = lab.scale

    def measured(layer: Layer) -> dict[str, Any]:
        selections = _selections(recording, layer, scale.budgets, scale.main_budget)
        found = {selection: _over_queries(recording, layer, kept) for selection, kept in selections.items()}
        theirs, ours = found[f"h2o {scale.main_budget}"], found["momentkv"]
        means = {f"h2o: {name}": theirs[name].mean(axis=0) for name in ("mass", "cosine", "none")}
        means |= {name: ours[name].mean(axis=0) for name in ("none", "zeroth", "first", "direction")}
        # of a layer, over queries and heads
        means |= {f"{name} hurts": (ours[name] > ours["none"]).mean() for name in ("zeroth", "first")}
        means["amplification"] = np.median(theirs["none"] / theirs["mass"])
        for budget in scale.budgets:
            means |= {f"h2o {budget}: {name}": found[f"h2o {budget}"][name].mean() for name in ("mass", "none")}
        return means

    return stacked(map(measured, recording.layers))


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


def conclude(scale: Scale, texts: Sequence[Observed]) -> Findings:
    """The numbers of all texts together."""
    found = {name: of_texts(texts, name) for name in texts[0].values}
    # the mean over the heads, [texts, layers]
    mass, cosine, relative = (found[f"h2o: {name}"].mean(axis=(2, 3)) for name in ("mass", "cosine", "none"))
    none, zeroth, first, direction = (found[name].mean(axis=(2, 3)) for name in ("none", "zeroth", "first", "direction"))
    hurt, size = found["first hurts"], none.mean(axis=1)
    numbers = PAPER.numbers([text.kind for text in texts], smallest=min(scale.budgets))
    numbers.mean("evicted_mass", mass)
    numbers.add("share_of_layers_below_005", lambda mass: (mass.mean(axis=0) < 0.05).mean(), mass)
    numbers.mean("evicted_mass_at_the_paper_s_share", found[f"h2o {min(scale.budgets)}: mass"])
    numbers.add("size_of_layer_cosine", lambda cosine: np.abs(cosine.mean(axis=0)).mean(), cosine)
    numbers.mean("cosine", cosine)
    numbers.mean("relative_error", relative)
    numbers.median("amplification", found["amplification"])
    numbers.mean("loss_against_h2o", first.mean(axis=1) / relative.mean(axis=1))
    numbers.add("share_of_layers_improved", lambda first, none: (first.mean(axis=0) < none.mean(axis=0)).mean(), first, none)
    numbers.add("reduction", lambda first, none: (1 - first.mean(axis=0) / none.mean(axis=0)).mean(), first, none)
    numbers.mean("direction", direction)
    numbers.add("direction_of_worst_layer", lambda direction: direction.mean(axis=0).min(), direction)
    numbers.mean("gain_of_zeroth_order", (none - zeroth).mean(axis=1) / size)
    numbers.mean("further_gain_of_first_order", (zeroth - first).mean(axis=1) / size)
    numbers.mean("share_hurt", hurt)
    numbers.mean("share_hurt_zeroth_order", found["zeroth hurts"])
    numbers.add("worst_layer_hurt", lambda hurt: hurt.mean(axis=0).max(), hurt)
    by_budget = {name: [float(found[f"h2o {each}: {name}"].mean()) for each in scale.budgets] for name in ("mass", "none")}
    series = {
        **{name: spread_by_layer(texts, f"h2o: {name}", np.mean) for name in ("mass", "cosine")},
        "direction": spread_by_layer(texts, "direction", np.mean),
        "error": {name: each.mean(axis=0).tolist() for name, each in {"none": none, "zeroth": zeroth, "first": first}.items()},
        "hurt": hurt.mean(axis=0).tolist(),
        "by_budget": {"budget": list(scale.budgets), "mass": by_budget["mass"], "relative error": by_budget["none"]},
    }
    return Findings(numbers, series)


def draw(figure: Figure, series: dict[str, Any]) -> None:
    """Draw the paper's picture; `shown` in its file says what is seen."""
    (mass, angle, budgets), (error, direction, hurt) = figure.subplots(2, 3)
    band(mass, series["mass"], "mean and 10 to 90 % of heads")
    mass.axhline(0.08, color="grey", linestyle="--", linewidth=1)
    finish(mass, xlabel="layer", ylabel="evicted mass w_E", title="H2O: attention on evicted tokens")
    band(angle, series["cosine"], "mean and 10 to 90 % of heads")
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
    band(direction, series["direction"], "mean and 10 to 90 % of heads")
    finish(direction, xlabel="layer", ylabel="cos(f_E, its approximation)", title="direction of the approximated output")
    hurt.bar(range(len(series["hurt"])), series["hurt"])
    hurt.set(xlabel="layer", ylabel="share of steps", title="where the correction makes it worse")
