"""MomentKV (arXiv 2606.01563): evicted mass, angle of the two sub-outputs, error with and without the correction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from evictionary.claims.claim import Claim, Condition, Findings, mean_of, median_of, share_of
from evictionary.claims.pictures import band, legend
from evictionary.claims.recording import Lab, Layer, Observed, Recording, as_array, by_layer
from evictionary.optimized import h2o
from evictionary.reference import momentkv as paper
from evictionary.reference import momentkv_theory as theory

ARXIV = "2606.01563"
TITLE = "MomentKV"
WINDOW = 32
POSITIONS = 8

SETTING = (
    "L = 128 of 768 prompt tokens (the paper: 128 of 4096); eight later queries of each text, which also see the later "
    "tokens before them, all retained"
)

CLAIMS = (
    Claim(
        id="MK-F2 (mass)",
        source="section 3, figure 2 (a)",
        statement="With H2O at L = 128 the evicted tokens hold little attention: below 0.08 on average over the network, and below "
        "0.05 in most layers.",
        measured=f"w_E of each query head; {SETTING}. Layers count by their mean.",
        seen_if=(Condition("evicted_mass", "<", 0.08), Condition("share_of_layers_below_005", ">", 0.5)),
        beside=("evicted_mass_at_the_paper_s_share",),
    ),
    Claim(
        id="MK-F2 (angle)",
        source="section 3, figure 2 (b) and (c)",
        statement="The outputs of retained and evicted tokens are nearly orthogonal in every layer: their cosine swings around 0.",
        measured="cos(f_R, f_E) in the same setting; the mean over layers of the size of each layer's mean has to stay within 0.2.",
        seen_if=(Condition("size_of_layer_cosine", "<=", 0.2),),
        beside=("cosine",),
    ),
    Claim(
        id="MK-F2 (error)",
        source="section 3, figure 2 (d)",
        statement="Although the evicted mass averages below 0.08, the relative error averages above 20 %.",
        measured="|f - f_R| / |f| in the same setting, mean over heads, layers and queries; both halves have to hold.",
        seen_if=(Condition("evicted_mass", "<", 0.08), Condition("relative_error", ">", 0.2)),
        beside=("amplification",),
    ),
    Claim(
        id="MK-F3 (loss)",
        source="section 4.2, figure 3 (a)",
        statement="MomentKV loses less than H2O at the same budget.",
        measured="Mean relative error of each text with MomentKV's selection and correction, divided by that of H2O "
        "without; below 1 means that MomentKV loses less. Budgets are even across heads; the moments are extra"
        " memory.",
        seen_if=(Condition("loss_against_h2o", "<", 1),),
    ),
    Claim(
        id="MK-F3 (layers)",
        source="section 4.2, figure 3 (b)",
        statement="The correction lowers the error in every layer.",
        measured="Mean relative error of a layer with and without the correction, tokens selected by MomentKV; 95 % of the layers "
        "count as every one.",
        seen_if=(Condition("share_of_layers_improved", ">=", 0.95),),
        beside=("reduction",),
    ),
    Claim(
        id="MK-F3 (direction)",
        source="section 4.2, figure 3 (c)",
        statement="The approximated output of the evicted tokens points the way of the true one, in all layers.",
        measured="cos(f_E, fhat_E), tokens selected by MomentKV: a mean of at least 0.8, and no layer's mean below 0.5.",
        seen_if=(Condition("direction", ">=", 0.8), Condition("direction_of_worst_layer", ">=", 0.5)),
    ),
    Claim(
        id="MK-T4 (order)",
        source="section 5.3, table 4",
        statement="Correcting with the mean value alone already helps; the first-order term helps more (there: three "
        "times more, in LongBench points).",
        measured="Fall of the mean relative error as a share of the error without correction, tokens selected by "
        "MomentKV: zeroth order has to take 5 % away, and first order another 5 %.",
        seen_if=(Condition("gain_of_zeroth_order", ">=", 0.05), Condition("further_gain_of_first_order", ">=", 0.05)),
    ),
    Claim(
        id="MK-36 (never worse)",
        source="appendix B, after equation 36",
        statement="The corrected output is always at least as accurate as attention over the retained tokens.",
        measured="Share of (text, layer, head, query) in which |f - fhat| > |f - f_R|, tokens selected by MomentKV; one"
        " in a thousand is allowed for.",
        seen_if=(Condition("share_hurt", "<=", 0.001),),
        beside=("share_hurt_zeroth_order", "worst_layer_hurt"),
    ),
)


def errors(query: np.ndarray, keys: np.ndarray, values: np.ndarray, kept: np.ndarray, split: int) -> dict[str, np.ndarray]:
    """Everything that is measured of one query, [H_kv, G] each.

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
    found: dict[str, list[np.ndarray]] = {}
    for layer in recording.layers:
        for selection, kept in _selections(recording, layer, lab.scale.budgets, lab.scale.main_budget).items():
            for name, values in _over_queries(recording, layer, kept).items():
                found.setdefault(f"{selection}: {name}", []).append(values)
    return Observed(recording.kind, {name: np.stack(each) for name, each in found.items()})


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
    each = []
    for position in np.linspace(recording.split, length - 1, POSITIONS).astype(int):
        seen = slice(0, position + 1)
        each.append(errors(grouped[:, :, position], keys[:, seen], values[:, seen], everywhere[:, seen], recording.split))
    return {name: np.stack([values[name] for values in each]) for name in each[0]}


def conclude(lab: Lab, texts: Sequence[Observed]) -> Findings:
    """The numbers of all texts together."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for key in texts[0].values:
        selection, _, name = key.partition(": ")
        found.setdefault(selection, {})[name] = by_layer(texts, key)
    main = lab.scale.main_budget
    theirs, ours = found[f"h2o {main}"], found["momentkv"]
    at_share = found[f"h2o {min(lab.scale.budgets)}"]
    mass_of_layer = theirs["mass"].mean(axis=(0, 2))
    none, zeroth, first = (ours[name] for name in ("none", "zeroth", "first"))
    of_layer = {name: ours[name].mean(axis=(0, 2)) for name in ("none", "zeroth", "first", "direction")}
    hurt = (first > none).mean(axis=(0, 2))
    numbers = {
        "evicted_mass": mean_of(theirs["mass"], "w_E under H2O"),
        "share_of_layers_below_005": mean_of(mass_of_layer < 0.05, "share of layers whose mean w_E is below 0.05"),
        "evicted_mass_at_the_paper_s_share": mean_of(
            at_share["mass"], f"w_E with {min(lab.scale.budgets)} tokens kept, the same share of the prompt as 128 of 4096"
        ),
        "size_of_layer_cosine": mean_of(np.abs(theirs["cosine"].mean(axis=(0, 2))), "size of each layer's mean cos(f_R, f_E)"),
        "cosine": mean_of(theirs["cosine"], "cos(f_R, f_E) under H2O"),
        "relative_error": mean_of(theirs["none"], "|f - f_R| / |f| under H2O"),
        "amplification": median_of(theirs["none"] / theirs["mass"], "relative error divided by evicted mass (gamma)"),
        "loss_against_h2o": mean_of(
            first.mean(axis=(1, 2)) / theirs["none"].mean(axis=(1, 2)), "error of MomentKV divided by that of H2O, over texts"
        ),
        "share_of_layers_improved": mean_of(of_layer["first"] < of_layer["none"], "share of layers whose mean error falls"),
        "reduction": mean_of(1 - of_layer["first"] / of_layer["none"], "fall of the mean error of a layer, as a share"),
        "direction": mean_of(ours["direction"], "cos(f_E, fhat_E)"),
        "direction_of_worst_layer": mean_of([of_layer["direction"].min()], "the smallest mean cos(f_E, fhat_E) of a layer"),
        "gain_of_zeroth_order": mean_of(
            (none - zeroth).mean(axis=(1, 2)) / none.mean(axis=(1, 2)),
            "share of the error that zeroth order takes away, over texts",
        ),
        "further_gain_of_first_order": mean_of(
            (zeroth - first).mean(axis=(1, 2)) / none.mean(axis=(1, 2)), "share that first order takes beyond that, over texts"
        ),
        "share_hurt": share_of(first > none, "share of steps in which the first-order correction hurts, over texts"),
        "share_hurt_zeroth_order": share_of(zeroth > none, "share of steps in which the zeroth-order correction hurts, over texts"),
        "worst_layer_hurt": mean_of([hurt.max()], "the largest share of a layer"),
    }
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
    """Six panels: mass, angle and budgets under H2O; error, direction and harm of the correction."""
    (mass, angle, budgets), (error, direction, hurt) = figure.subplots(2, 3)
    band(mass, series["mass"], "mean and 10 to 90 % of steps")
    mass.axhline(0.08, color="grey", linestyle="--", linewidth=1)
    mass.set_ylabel("evicted mass w_E")
    mass.set_title("H2O: attention on evicted tokens")
    band(angle, series["cosine"], "mean and 10 to 90 % of steps")
    angle.axhline(0, color="grey", linewidth=1)
    angle.set_ylabel("cos(f_R, f_E)")
    angle.set_title("H2O: retained against evicted output")
    for name in ("mass", "relative error"):
        label = "evicted mass" if name == "mass" else name
        budgets.plot(series["by_budget"]["budget"], series["by_budget"][name], marker="o", label=label)
    budgets.set_xscale("log", base=2)
    budgets.set_xticks(series["by_budget"]["budget"], [str(each) for each in series["by_budget"]["budget"]])
    budgets.set_xlabel("tokens kept in each head (log scale)")
    budgets.set_ylabel("mean over heads and layers")
    budgets.set_title("H2O: mass and error by budget")
    labels = {"none": "no correction", "zeroth": "zeroth order", "first": "first order (MomentKV)"}
    for name, values in series["error"].items():
        error.plot(values, label=labels[name])
    error.set_ylabel("mean relative error |f - output| / |f|")
    error.set_title("MomentKV's selection: error of the output")
    band(direction, series["direction"], "mean and 10 to 90 % of steps")
    direction.set_ylabel("cos(f_E, its approximation)")
    direction.set_title("direction of the approximated output")
    hurt.bar(range(len(series["hurt"])), series["hurt"])
    hurt.set_ylabel("share of steps")
    hurt.set_title("where the correction makes it worse")
    for axes in (mass, angle, error, direction, hurt):
        axes.set_xlabel("layer")
    for axes in (mass, angle, budgets, error, direction):
        legend(axes)
