"""GVote (arXiv 2509.03136): synthetic against real
queries, sizes by head and kind of text, and S against p.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from evictionary.claims.claim import Findings, read_paper
from evictionary.claims.expected_attention import errors_of, near_gaussian
from evictionary.claims.lagkv import make_text
from evictionary.claims.pictures import by_layer, finish
from evictionary.claims.recording import (
    Lab,
    Layer,
    Observed,
    Recording,
    Scale,
    as_array,
    hiding,
    later_attention,
    of_texts,
    read_on,
    record_ids,
    spread_by_layer,
    stacked,
)
from evictionary.optimized import gvote as fast
from evictionary.palette import GOES, shades
from evictionary.reference import gvote as paper, gvote_theory as theory
from evictionary.reference.expected_attention_theory import correlation, skewness_and_kurtosis

PAPER = read_paper("gvote")
SAMPLES, P = 8, 0.95
SWEEP_SAMPLES = (1, 2, 4, 8, 16)
SWEEP_P = (0.8, 0.9, 0.95, 0.975, 0.99)
# (name, S, p) of the settings of figure 7.
SWEEP = [(f"S {samples}", samples, P) for samples in SWEEP_SAMPLES] + [
    (f"p {p}", SAMPLES, p) for p in SWEEP_P
]
SINKS = 4
POSITIONS = 2
EVERY = 8


def synthetic_queries(layer: Layer, length: int, horizon: int, theta: float, noise: np.ndarray) -> np.ndarray:
    """GV-A4..8 from the first `length` tokens: noise [S, C]
    gives queries [H_q, S, D], averaged over the next positions.
    """
    mean, variance = paper.hidden_statistics(as_array(layer.hidden_states)[0, :length], sink_size=SINKS)
    states = paper.sample_hidden_states(mean, variance, noise)
    bias = None if layer.query_bias is None else as_array(layer.query_bias)
    sampled = paper.project(states[None], as_array(layer.query_weight), bias)
    return paper.rotate_by_average(sampled, position=length, horizon=horizon, theta=theta)


def observe(lab: Lab, recording: Recording) -> dict[str, Any]:
    """Measure one text."""
    generator = np.random.default_rng(recording.seed)
    # one draw for all layers of a text, as the heads of a layer share one
    noise = generator.standard_normal((max(SWEEP_SAMPLES), recording.layers[0].hidden_states.shape[-1]))

    def measured(layer: Layer) -> dict[str, np.ndarray]:
        near = near_gaussian(*skewness_and_kurtosis(as_array(layer.hidden_states)[0, SINKS:]))
        return (
            {"near": near.mean()}
            | _one_query(recording, layer, noise[:1])
            | _sizes(recording, layer, noise, generator)
        )

    return stacked(map(measured, recording.layers)) | {"accuracy": accuracies(lab, recording.kind, noise)}


def accuracies(lab: Lab, kind: str, noise: np.ndarray) -> dict[str, float]:
    """Figure 7: with each S and p, the share of a hidden number's digits that the model gives, each after
    the true ones before it.

    `full` is that of the full cache; noise [S, C].
    """
    context_ids, question_ids, answer = make_text(lab.tokenizer, lab.scale, kind, lab.seed)
    digits = lab.tokenizer(answer, add_special_tokens=False, return_tensors="pt")["input_ids"]
    space = lab.tokenizer(" ", add_special_tokens=False, return_tensors="pt")["input_ids"]
    split, wanted = context_ids.shape[1], digits.shape[1]
    recording = record_ids(lab, kind, torch.cat([context_ids, question_ids, space, digits], dim=1), split)
    sampled = [_sampled(recording, layer, noise) for layer in recording.layers]

    def right(kept: Sequence[torch.Tensor]) -> float:
        with hiding(lab, recording, kept, recording.later) as cache:
            logits = read_on(
                lab.model, recording.input_ids[:, split:], cache, split, logits_to_keep=wanted + 1
            ).logits
        return float((logits[0, :-1].argmax(dim=-1) == recording.input_ids[0, -wanted:]).float().mean())

    full = right(
        [torch.ones_like(layer.keys[:, :, :split, 0], dtype=torch.bool) for layer in recording.layers]
    )
    return {"full": full} | {
        name: right(
            [
                _kept(recording, *of_layer, samples, p)
                for of_layer in zip(recording.layers, sampled, strict=True)
            ]
        )
        for name, samples, p in SWEEP
    }


def _sampled(recording: Recording, layer: Layer, noise: np.ndarray) -> torch.Tensor:
    """Synthetic queries [1, H_q, S, D] from the prompt."""
    sampled = synthetic_queries(layer, recording.split, recording.later, recording.theta, noise)
    return torch.as_tensor(sampled, dtype=layer.keys.dtype, device=layer.keys.device)[None]


def _kept(recording: Recording, layer: Layer, sampled: torch.Tensor, samples: int, p: float) -> torch.Tensor:
    """What GVote keeps of the prompt, [1, H_kv, split]."""
    split = recording.split
    return fast.select(layer.queries[:, :, split - 1], layer.keys[:, :, :split], sampled[:, :, :samples], p=p)


def _one_query(recording: Recording, layer: Layer, noise: np.ndarray) -> dict[str, np.ndarray]:
    queries, keys = as_array(layer.queries)[0], as_array(layer.keys)[0]
    keys = np.repeat(keys, len(queries) // len(keys), axis=0)  # one row for each query head

    def measured(position: int) -> dict[str, np.ndarray]:
        before = keys[:, :position]
        synthetic = synthetic_queries(layer, position, recording.later, recording.theta, noise)[:, 0]
        guessed, real = (
            paper.attention_weights(query, before) for query in (synthetic, queries[:, position])
        )
        candidates = paper.nucleus(guessed, P)
        return {
            "overlap": theory.attention_overlap(real, candidates),
            "pearson": correlation(real, guessed),
            "synthetic_tokens": candidates.mean(),
            "real_tokens": paper.nucleus(real, P).mean(),
        }

    positions = np.linspace(recording.split, queries.shape[1] - 1, POSITIONS + 1).astype(int)[1:]
    return stacked(map(measured, positions.tolist()))


def _sizes(
    recording: Recording, layer: Layer, noise: np.ndarray, generator: np.random.Generator
) -> dict[str, np.ndarray]:
    split, sampled = recording.split, _sampled(recording, layer, noise)

    def kept_with(samples: int, p: float) -> np.ndarray:
        return _kept(recording, layer, sampled, samples, p)[0].cpu().numpy()

    sizes = {name: kept_with(samples, p).mean() for name, samples, p in SWEEP}
    kept = kept_with(SAMPLES, P)
    attention = later_attention(recording, layer)[:, :, ::EVERY, :split]
    attention = attention / attention.sum(axis=-1, keepdims=True)
    as_many = generator.permuted(kept, axis=-1)
    optimal = theory.optimal_keep_set(attention.reshape(len(kept), -1, split), P)
    return sizes | {
        "kept_share": kept.mean(axis=-1),
        "captured": theory.attention_overlap(
            attention, np.broadcast_to(kept[:, None, None], attention.shape)
        ).mean(),
        "random": theory.attention_overlap(
            attention, np.broadcast_to(as_many[:, None, None], attention.shape)
        ).mean(),
        "recall": ((kept & optimal).sum(axis=-1) / optimal.sum(axis=-1)).mean(),
        "optimal": optimal.mean(),
    }


def conclude(scale: Scale, texts: Sequence[Observed]) -> Findings:
    """The numbers of all texts together."""
    found = {name: of_texts(texts, name) for name in texts[0].values if name != "accuracy"}
    accuracy = errors_of(texts, "accuracy")
    share, kinds = found["kept_share"], [text.kind for text in texts]
    names = list(dict.fromkeys(kinds))
    places = np.array([names.index(kind) for kind in kinds])
    by_kind = {kind: share[places == place] for place, kind in enumerate(names)}
    optimal = {kind: found["optimal"][places == place].mean() for place, kind in enumerate(names)}
    of_text = np.percentile(share.reshape(len(kinds), -1), [10, 90], axis=-1)
    mean = {name: found[name].mean(axis=-1) for name in ("S 16", "S 8", "p 0.95", "p 0.9")}
    of_samples, of_p = mean["S 16"] / mean["S 8"] - 1, mean["p 0.95"] / mean["p 0.9"] - 1

    def largest_over_smallest(shares: np.ndarray, places: np.ndarray) -> float:
        means = [shares[places == place].mean() for place in np.unique(places)]
        return float(max(means) / min(means))

    numbers = PAPER.numbers(kinds)
    numbers.means(
        near_gaussian_channels=found["near"],
        overlap=found["overlap"],
        tokens_of_synthetic_query=found["synthetic_tokens"],
        tokens_of_real_query=found["real_tokens"],
        captured=found["captured"],
        captured_by_random_of_that_size=found["random"],
        recall_of_optimal_set=found["recall"],
        kept_share=share,
        spread_of_heads=of_text[1] / of_text[0],
        growth_by_samples=of_samples,
        growth_by_p=of_p,
        accuracy_by_samples=accuracy["S 16"] - accuracy["S 1"],
        accuracy_by_p=accuracy["p 0.99"] - accuracy["p 0.8"],
        accuracy_by_p_over_samples=accuracy["p 0.95"]
        - accuracy["p 0.9"]
        - (accuracy["S 16"] - accuracy["S 8"]),
        **{f"accuracy_{name.replace(' ', '_').replace('0.', '')}": of for name, of in accuracy.items()},
    )
    numbers.medians(pearson=found["pearson"])
    of_each = share.mean(axis=(1, 2))
    numbers.add("largest_over_smallest_task", largest_over_smallest, of_each, places, compares_kinds=True)
    numbers.add(
        "growth_by_p_over_growth_by_samples", lambda p, samples: p.mean() / samples.mean(), of_p, of_samples
    )
    series = {
        "overlap": spread_by_layer(texts, "overlap"),
        "pearson": spread_by_layer(texts, "pearson"),
        "share_by_kind": {kind: values.ravel().round(4).tolist() for kind, values in by_kind.items()},
        "optimal_by_kind": {kind: float(value) for kind, value in optimal.items()},
        "share_by_head": share.mean(axis=0).round(4).tolist(),
        "samples": [[each, float(found[f"S {each}"].mean())] for each in SWEEP_SAMPLES],
        "p": [[each, float(found[f"p {each}"].mean())] for each in SWEEP_P],
    }
    return numbers, series


def draw(figure: Figure, series: dict[str, Any]) -> None:
    """Draw the paper's picture; `shown` in its file says what is seen."""
    (overlap, kinds), (heads, sweep) = figure.subplots(2, 2)
    by_layer(
        overlap,
        {
            "overlap: median and 10 to 90 % of heads": series["overlap"],
            "Pearson correlation": series["pearson"],
        },
        level=P,
        ylim=(-0.45, 1.02),  # room for the legend
        ylabel="share of attention, correlation",
        title="one synthetic query against the real one",
    )
    names = list(series["share_by_kind"])
    kinds.boxplot(
        [series["share_by_kind"][name] for name in names], whis=(10, 90), showfliers=False, tick_labels=names
    )
    kinds.plot(
        range(1, len(names) + 1),
        [series["optimal_by_kind"][name] for name in names],
        "x",
        label="union of the real nuclei, mean",
    )
    finish(
        kinds,
        ylim=(0, 1.02),
        ylabel="share of the prompt kept",
        title="size by kind of text (KV heads: quartiles, 10 to 90 %)",
    )
    picture = heads.imshow(
        np.asarray(series["share_by_head"]).T,
        aspect="auto",
        vmin=0,
        vmax=1,
        cmap=shades(),
        interpolation="none",
    )
    figure.colorbar(picture, ax=heads, label="share of the prompt kept")
    heads.set(
        yticks=range(len(series["share_by_head"][0])),
        xlabel="layer",
        ylabel="KV head",
        title="size by head, mean over texts",
    )
    sweep.plot(
        *zip(*series["samples"], strict=True), marker="o", label=f"by samples S at p = {P} (lower axis)"
    )
    sweep.set_xscale("log", base=2)
    sweep.set(
        xticks=SWEEP_SAMPLES,
        xticklabels=SWEEP_SAMPLES,
        xlabel="samples S (log scale)",
        ylabel="share of the prompt kept",
        ylim=(0, 1.02),
    )
    other = sweep.twiny()
    places = range(len(series["p"]))
    other.plot(
        places,
        [value for _, value in series["p"]],
        marker="s",
        color=GOES,
        label=f"by p at S = {SAMPLES} (upper axis)",
    )
    other.set(xticks=places, xticklabels=[f"{p:g}" for p, _ in series["p"]], xlabel="p")
    lines = [*sweep.get_lines(), *other.get_lines()]
    sweep.legend(lines, [str(line.get_label()) for line in lines], frameon=False, fontsize=8)
