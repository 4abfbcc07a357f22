"""MomentKV (arXiv 2606.01563): evicted mass, angle of the two sub-outputs, selections, error with and
without the correction.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from evictionary.claims.claim import Findings, read_paper
from evictionary.claims.pictures import by_layer, finish
from evictionary.claims.recording import (
    Lab,
    Observed,
    Recording,
    Scale,
    as_array,
    of_texts,
    spread_by_layer,
    stacked,
)
from evictionary.optimized import h2o, momentkv as fast, snapkv, streaming_llm
from evictionary.optimized.selection import top_k
from evictionary.reference import momentkv as paper, momentkv_theory as theory
from evictionary.reference.attention import log_sum_exp

PAPER = read_paper("momentkv")
WINDOW = 32
PROMPTS = 8
EVERY = 3
# What multiplies a token's attention in Algorithm 1: nothing, the norm of its value, or that of its moment
# residual (MI).
BY_STEPS = ("attention", "value", "residual")
SELECTIONS = {
    "random": "random",
    "recent": "recent + sinks",
    "attention": "attention, by steps",
    "value": "attention x |v|, by steps",
    "residual": "attention x |r|, by steps (MI)",
    "snapkv": "SnapKV",
    "oracle": "the query's own top tokens",
}


QUANTITIES = ("mass", "cosine", "none", "zeroth", "first", "direction", "gamma", "spread", "gap")
SKEWED = QUANTITIES[-3:]  # a few steps are far from the others, so the median stands for a layer


def errors(
    query: np.ndarray, keys: np.ndarray, values: np.ndarray, kept: np.ndarray
) -> dict[str, np.ndarray]:
    """What eviction does to the output of one query without a correction: [B, H_kv, G] each.

    Args: query [B, H_kv, G, D]; keys [B, H_kv, N, D]; values [B, H_kv, N, D_v]; kept [B, H_kv, N]: R, the
    others are E.
    """
    seen = query, keys[:, :, None], values[:, :, None]
    full, (retained, evicted) = theory.full_output(*seen), theory.sub_outputs(*seen, kept[:, :, None])
    mass = theory.mass(query, seen[1], kept[:, :, None])[1]
    return {
        "mass": mass,
        "cosine": cosine(retained, evicted),
        "none": theory.norm(full - retained) / theory.norm(full),
        "gamma": theory.amplification(retained, evicted, mass),
    }


def corrections(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    kept: np.ndarray,
    moments: paper.Moments | None = None,
) -> dict[str, np.ndarray]:
    """What the correction makes of it, arguments and shapes
    as `errors`; `moments` of E in place of exact ones.

    zeroth and first: the relative error; direction: cos(f_E, fhat_E); spread: sigma, the largest centred
    logit of E; gap: log(Z_E / Zhat_E).
    """
    seen = query, keys[:, :, None], values[:, :, None]
    moments = moments or paper.update(paper.no_moments(keys, values), keys, values, ~kept)
    of_each_query = paper.Moments(*(part[:, :, None] for part in moments))
    full, evicted = theory.full_output(*seen), theory.sub_outputs(*seen, kept[:, :, None])[1]
    logits, gone = theory.logits_of(query, seen[1]), ~kept[:, :, None]
    centre = (logits * gone).sum(axis=-1, keepdims=True) / gone.sum(axis=-1, keepdims=True)
    heads = query.reshape(len(query), -1, query.shape[-1]), keys, values, kept, moments

    def error(output: np.ndarray) -> np.ndarray:
        return theory.norm(full - output.reshape(full.shape)) / theory.norm(full)

    return {
        "zeroth": error(theory.attend_zeroth_order(*heads)),
        "first": error(paper.attend(*heads)),
        "direction": cosine(evicted, paper.approximate_evicted(query, of_each_query)),
        "spread": (np.abs(logits - centre) * gone).max(axis=-1),
        "gap": log_sum_exp(np.where(gone, logits, -np.inf))
        - paper.log_evicted_partition(query, of_each_query),
    }


def cosine(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The cosine of two rows of vectors, [..., D] twice to [...]; 0 with a zero vector."""
    size = theory.norm(one) * theory.norm(other)
    return (one * other).sum(axis=-1) / np.where(size == 0, 1, size)


def by_steps(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    budget: int,
    lengths: Sequence[int],
    weight: str,
) -> Iterator[torch.Tensor]:
    """Phase 1 of Algorithm 1, token by token from an empty
    cache: what is kept [B, H_kv, N] when N tokens have come.

    Args: queries [B, H_q, T, D], keys and values [B, H_kv, T, D]; lengths, each N, rising, above the budget;
    weight, of BY_STEPS.
    """
    batch, heads = keys.shape[:2]
    slots = torch.arange(budget, device=keys.device).repeat(batch, heads, 1)
    read = values if weight != "attention" else torch.ones_like(values[..., :1])
    moments = nothing = fast.no_moments(keys, read)
    for last in range(budget, lengths[-1]):
        slots = torch.cat([slots, torch.full_like(slots[..., :1], last)], dim=-1)
        kept_keys, kept_read = (states.take_along_dim(slots[..., None], dim=2) for states in (keys, read))
        scores = fast.score(
            queries[:, :, last], kept_keys, kept_read, moments if weight == "residual" else nothing
        )
        evicted = torch.arange(budget + 1, device=keys.device) == scores.argmin(dim=-1, keepdim=True)
        moments = fast.update(moments, kept_keys, kept_read, evicted)
        slots = slots[~evicted].view(batch, heads, budget)
        if last + 1 in lengths:
            yield torch.zeros(batch, heads, last + 1, dtype=torch.bool, device=keys.device).scatter(
                2, slots, True
            )


def in_half(keys: np.ndarray, values: np.ndarray, evicted: np.ndarray) -> paper.Moments:
    """MK-C2, MK-C4: the moments of the evicted tokens
    [B, H_kv, N], each product and each sum rounded to float16.
    """
    halves = [torch.as_tensor(states * evicted[..., None]).half() for states in (keys, values)]
    sums = [torch.zeros_like(states[:, :, 0]) for states in halves]
    products = torch.zeros_like(sums[1][..., None] * sums[0][..., None, :])
    for key, value in zip(*(states.unbind(dim=2) for states in halves), strict=True):
        sums = [sums[0] + key, sums[1] + value]
        products += value[..., None] * key[..., None, :]
    return paper.Moments(evicted.sum(axis=-1), *map(as_array, (*sums, products)))


def observe(lab: Lab, recording: Recording) -> dict[str, Any]:
    """Measure one text: its first N tokens are the prompt, for eight N, and the last query reads R and E
    of these N tokens.

    The mean over the prompts, [layers, heads], of what H2O and
    MomentKV do; [layers], every third, for the other selections.
    """
    scale, draw = lab.scale, torch.Generator().manual_seed(recording.seed)
    states = [
        torch.cat([getattr(layer, name).to(recording.input_ids.device) for layer in recording.layers])
        for name in ("queries", "keys", "values")
    ]
    some = [each[::EVERY] for each in states]
    lengths = np.linspace(recording.split, recording.input_ids.shape[1], PROMPTS).astype(int).tolist()
    queries, keys, values = some
    steps = {
        weight: by_steps(queries, keys, values, scale.main_budget, lengths, weight) for weight in BY_STEPS
    }

    def measured(length: int) -> dict[str, np.ndarray]:
        prompt, part = ([each[:, :, :length] for each in given] for given in (states, some))
        found = _outcomes(prompt, _of_papers(prompt, scale), corrected=("momentkv",))
        kept = _compared(part, scale, draw) | {weight: next(masks) for weight, masks in steps.items()}
        found |= _outcomes(part, kept, corrected=SELECTIONS)
        if length == lengths[-1]:
            query, *read = _last(part)
            mask = as_array(kept["residual"]) > 0
            last["half"] = corrections(query, read[0], read[1], mask, in_half(read[0], read[1], ~mask))[
                "first"
            ].mean(axis=(1, 2))
            last["whole"] = found["residual: first"].mean(axis=(1, 2))
        return found

    last: dict[str, np.ndarray] = {}
    found = stacked(map(measured, lengths))  # [prompts, layers, H_kv, G] each
    main, ours = (
        f"h2o {scale.main_budget}",
        {name: found[f"momentkv: {name}"] for name in ("none", "zeroth", "first", "direction")},
    )
    of_layers: dict[str, Any] = {
        **{f"h2o {budget}: {name}": np.mean for budget in scale.budgets for name in ("mass", "none")},
        **{
            f"{name}: {quantity}": np.median if quantity in SKEWED else np.mean
            for name in SELECTIONS
            for quantity in QUANTITIES
        },
    }
    return {
        **{f"h2o: {name}": found[f"{main}: {name}"].mean(axis=0) for name in ("mass", "cosine", "none")},
        **{name: each.mean(axis=0) for name, each in ours.items()},
        **{f"{name} hurts": (ours[name] > ours["none"]).mean(axis=(0, 2, 3)) for name in ("zeroth", "first")},
        "amplification": np.median(found[f"{main}: gamma"], axis=(0, 2, 3)),
        **{name: middle(found[name], axis=(0, 2, 3)) for name, middle in of_layers.items()},
        **last,
    }


def _last(prompt: Sequence[torch.Tensor]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The prompt's last query by KV head [layers, H_kv, G, D], its keys and its values."""
    queries, keys, values = map(as_array, (prompt[0][:, :, -1], *prompt[1:]))
    return queries.reshape(*keys.shape[:2], -1, keys.shape[-1]), keys, values


def _outcomes(
    prompt: Sequence[torch.Tensor], kept: Mapping[str, torch.Tensor], corrected: Container[str]
) -> dict[str, np.ndarray]:
    """`errors` of each selection, and `corrections` of the
    named ones: [layers, H_kv, G] by "selection: quantity".
    """
    last = _last(prompt)
    masks = {name: as_array(mask) > 0 for name, mask in kept.items()}
    wholly = {name: corrections(*last, masks[name]) if name in corrected else {} for name in kept}
    return {
        f"{name}: {quantity}": value
        for name, mask in masks.items()
        for quantity, value in (errors(*last, mask) | wholly[name]).items()
    }


def _of_papers(prompt: Sequence[torch.Tensor], scale: Scale) -> dict[str, torch.Tensor]:
    """Kept masks [layers, H_kv, N]: H2O at each budget, and MomentKV's own selection at the main one."""
    queries, keys, values = prompt
    received = h2o.score(queries, keys)
    kept = {
        f"h2o {budget}": h2o.select_scored(received, budget=budget)
        for budget in {*scale.budgets, scale.main_budget}
    }
    return kept | {"momentkv": fast.select_prompt(queries[:, :, -WINDOW:], keys, values, scale.main_budget)}


def _compared(prompt: Sequence[torch.Tensor], scale: Scale, draw: torch.Generator) -> dict[str, torch.Tensor]:
    """Kept masks [layers, H_kv, N] of the selections that are made in one shot."""
    queries, keys, values = prompt
    ones = torch.ones_like(values[..., :1])
    scores = {
        "snapkv": snapkv.score(queries[:, :, -WINDOW:], keys, window_size=WINDOW),
        "oracle": fast.score(queries[:, :, -1], keys, ones, fast.no_moments(keys, ones)),
        "recent": streaming_llm.score(keys),
        "random": torch.rand(keys.shape[:3], generator=draw).to(keys.device),
    }
    return {name: top_k(score, scale.main_budget) for name, score in scores.items()}


def conclude(scale: Scale, texts: Sequence[Observed]) -> Findings:
    """The numbers of all texts together."""
    found = {name: of_texts(texts, name) for name in texts[0].values}
    # the mean over the heads, [texts, layers]
    mass, cosine, relative = (found[f"h2o: {name}"].mean(axis=(2, 3)) for name in ("mass", "cosine", "none"))
    none, zeroth, first, direction = (
        found[name].mean(axis=(2, 3)) for name in ("none", "zeroth", "first", "direction")
    )
    hurt, size = found["first hurts"], none.mean(axis=1)
    smallest, largest = (f"h2o {pick(scale.budgets)}" for pick in (min, max))
    residual = {name: found[f"residual: {name}"] for name in QUANTITIES}
    base = found["attention: none"]
    selected, corrected = 1 - _ratio(residual["none"], base), 1 - _ratio(found["attention: first"], base)
    both = 1 - _ratio(residual["first"], base)

    def over(one: str, other: str, quantity: str) -> np.ndarray:
        return _ratio(found[f"{one}: {quantity}"], found[f"{other}: {quantity}"])

    numbers = PAPER.numbers(
        [text.kind for text in texts], smallest=min(scale.budgets), largest=max(scale.budgets)
    )
    numbers.means(
        evicted_mass=mass,
        evicted_mass_at_the_paper_s_share=found[f"{smallest}: mass"],
        cosine=cosine,
        relative_error=relative,
        mass_at_largest_over_smallest_budget=over(largest, smallest, "mass"),
        shallow_error_at_largest_budget=found[f"{largest}: none"][:, : -(-mass.shape[1] // 4)],
        error_at_largest_budget=found[f"{largest}: none"],
        loss_against_h2o=_ratio(first, relative),
        direction=direction,
        gain_of_zeroth_order=(none - zeroth).mean(axis=1) / size,
        further_gain_of_first_order=(zeroth - first).mean(axis=1) / size,
        share_hurt=hurt,
        share_hurt_zeroth_order=found["zeroth hurts"],
        loss_of_algorithm_1_against_h2o=_ratio(residual["first"], relative[:, ::EVERY]),
        direction_by_algorithm_1=residual["direction"],
        gain_of_zeroth_order_by_algorithm_1=1 - _ratio(residual["zeroth"], residual["none"]),
        further_gain_of_first_order_by_algorithm_1=_ratio(
            residual["zeroth"] - residual["first"], residual["none"]
        ),
        error_by_value_over_attention=over("value", "attention", "none"),
        spread_by_value_over_attention=over("value", "attention", "spread"),
        gap_by_value_over_attention=over("value", "attention", "gap"),
        error_by_residual_over_attention=over("residual", "attention", "none"),
        spread_by_residual_over_attention=over("residual", "attention", "spread"),
        gap_by_residual_over_attention=over("residual", "attention", "gap"),
        spread=residual["spread"],
        gain_of_selection=selected,
        gain_of_correction=corrected,
        gain_of_both=both,
        correction_minus_selection=corrected - selected,
        excess_of_both=both - selected - corrected,
        gain_of_correction_after_snapkv=1 - _ratio(found["snapkv: first"], found["snapkv: none"]),
        mass_of_attention_over_random=over("attention", "random", "mass"),
        gamma_of_attention_over_random=over("attention", "random", "gamma"),
        mass_of_oracle_over_attention=over("oracle", "attention", "mass"),
        gamma_of_oracle_over_attention=over("oracle", "attention", "gamma"),
        cosine_of_random=found["random: cosine"],
        cosine_of_attention=found["attention: cosine"],
        cosine_of_oracle=found["oracle: cosine"],
        size_of_change_in_half=np.abs(_ratio(found["half"], found["whole"]) - 1),
    )
    numbers.medians(amplification=found["amplification"], partition_ratio=np.exp(residual["gap"]))
    # what is said of the means of the layers over the texts
    of_layers: dict[str, tuple[Any, ...]] = {
        "share_of_layers_below_005": (lambda mass: (mass < 0.05).mean(), mass),
        "size_of_layer_cosine": (lambda cosine: np.abs(cosine).mean(), cosine),
        "share_of_layers_improved": (lambda first, none: (first < none).mean(), first, none),
        "reduction": (lambda first, none: (1 - first / none).mean(), first, none),
        "direction_of_worst_layer": (np.min, direction),
        "worst_layer_hurt": (np.max, hurt),
    }
    for name, (statistic, *values) in of_layers.items():
        numbers.add(name, lambda *each, of=statistic: of(*(one.mean(axis=0) for one in each)), *values)
    by_budget = {
        name: [float(found[f"h2o {each}: {name}"].mean()) for each in scale.budgets]
        for name in ("mass", "none")
    }
    series = {
        **{name: spread_by_layer(texts, f"h2o: {name}", np.mean) for name in ("mass", "cosine")},
        "direction": spread_by_layer(texts, "direction", np.mean),
        "error": {
            name: each.mean(axis=0).tolist()
            for name, each in {"none": none, "zeroth": zeroth, "first": first}.items()
        },
        "hurt": hurt.mean(axis=0).tolist(),
        "by_budget": {
            "budget": list(scale.budgets),
            "mass": by_budget["mass"],
            "relative error": by_budget["none"],
        },
        "by_selection": {
            name: {each: float(found[f"{name}: {each}"].mean()) for each in QUANTITIES} for name in SELECTIONS
        },
    }
    return numbers, series


def _ratio(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The mean over the layers [texts, layers] of one quantity, divided by that of another: [texts]."""
    return one.mean(axis=1) / other.mean(axis=1)


def draw(figure: Figure, series: dict[str, Any]) -> None:
    """Draw the paper's picture; `shown` in its file says what is seen."""
    (mass, angle, budgets), (error, direction, hurt), (selections, gamma, spread) = figure.subplots(3, 3)
    for axes, name, level, ylabel, title in (
        (mass, "mass", 0.08, "evicted mass w_E", "H2O: attention on evicted tokens"),
        (angle, "cosine", 0, "cos(f_R, f_E)", "H2O: retained against evicted output"),
        (direction, "direction", None, "cos(f_E, its approximation)", "direction of the approximated output"),
    ):
        by_layer(axes, {"mean and 10 to 90 % of heads": series[name]}, level, ylabel=ylabel, title=title)
    sizes = series["by_budget"]["budget"]
    for name, label in (("mass", "evicted mass"), ("relative error", "relative error")):
        budgets.plot(sizes, series["by_budget"][name], marker="o", label=label)
    budgets.set_xscale("log", base=2)
    finish(
        budgets,
        xticks=sizes,
        xticklabels=sizes,
        xlabel="tokens kept in each head (log scale)",
        ylabel="mean over heads and layers",
        title="H2O: mass and error by budget",
    )
    labels = {"none": "no correction", "zeroth": "zeroth order", "first": "first order (MomentKV)"}
    for name, values in series["error"].items():
        error.plot(values, label=labels[name])
    finish(
        error,
        xlabel="layer",
        ylabel="mean relative error |f - output| / |f|",
        title="MomentKV's selection: error of the output",
    )
    hurt.bar(range(len(series["hurt"])), series["hurt"])
    hurt.set(xlabel="layer", ylabel="share of steps", title="where the correction makes it worse")
    names = list(series["by_selection"])
    places, drawn = np.arange(len(names)), series["by_selection"].values()
    for offset, (name, label) in enumerate((("none", "no correction"), ("first", "first order"))):
        selections.barh(places + 0.4 * offset, [each[name] for each in drawn], height=0.38, label=label)
    finish(
        selections,
        yticks=places + 0.2,
        yticklabels=[SELECTIONS[name] for name in names],
        xlabel="mean relative error",
        title="each selection, with and without the correction",
    )
    for axes, name, label in (
        (gamma, "gamma", "median error / evicted mass"),
        (spread, "spread", "median sigma of E"),
    ):
        axes.barh(places, [each[name] for each in drawn])
        axes.set(
            yticks=places,
            yticklabels=[],
            xlabel=label,
            title=f"each selection: {'amplification' if name == 'gamma' else 'spread of the logits'}",
        )
