"""Expected Attention (arXiv 2510.00636): reconstruction error, normality, correlation of expected and observed attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from evictionary.claims.claim import Findings, read_paper
from evictionary.claims.pictures import band, finish
from evictionary.claims.recording import (
    Lab,
    Layer,
    Observed,
    Recording,
    as_array,
    by_layer,
    compressed,
    later_attention,
    read_on,
    spread_by_layer,
    stacked,
)
from evictionary.optimized import expected_attention as fast
from evictionary.optimized import h2o, keydiff, knorm, lagkv, snapkv, streaming_llm, tova
from evictionary.optimized.selection import budget, top_k
from evictionary.reference import expected_attention as paper
from evictionary.reference import expected_attention_theory as theory

PAPER = read_paper("expected_attention")
OURS = "expected_attention"
VARIANTS = {"epsilon": "expected_attention, epsilon 0", "sinks": "expected_attention, 4 sinks kept"}
RATIOS = (0.5, 0.75)
SINKS = 4
BINS = np.linspace(-6, 6, 61)


def statistics(layer: Layer, count: int, recording: Recording, horizon: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean [1, H_q, D] and covariance of the first `count` queries, averaged over the positions that follow the prompt."""
    mean, covariance = fast.query_statistics(layer.plain_queries[:, :, :count])
    return fast.average_rope(mean, covariance, position=recording.split, horizon=horizon, theta=recording.theta)


def masks(recording: Recording, layer: Layer, amount: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The kept mask [1, H_kv, split] of every compared method, with about `amount` tokens in each head."""
    split = recording.split
    queries, keys, values = layer.queries[:, :, :split], layer.keys[:, :, :split], layer.values[:, :, :split]
    scores: dict[str, Callable[[], torch.Tensor]] = {
        OURS: lambda: fast.score(keys, values, *statistics(layer, split, recording, recording.later)),
        "snapkv": lambda: snapkv.score(queries, keys),
        "tova": lambda: tova.score(queries, keys),
        "keydiff": lambda: keydiff.score(keys),
        "knorm": lambda: knorm.score(keys),
        "streaming_llm": lambda: streaming_llm.score(keys),
        "random": lambda: torch.rand(keys.shape[:3], generator=generator).to(keys.device),
    }
    kept = {name: top_k(score(), amount) for name, score in scores.items()}
    theirs = fast.score(keys, values, *statistics(layer, split, recording, recording.later), epsilon=0)
    kept[VARIANTS["epsilon"]] = top_k(theirs, amount)
    sinks = torch.arange(split, device=keys.device).expand(keys.shape[:3]) < SINKS
    kept[VARIANTS["sinks"]] = top_k(scores[OURS](), amount, sinks)
    kept["h2o"] = h2o.select(queries, keys, budget=amount)
    lag = max(1, split // 6)  # with the paper's 1024 nothing of this prompt would be removed
    ratio: Any = lagkv.keep_ratio_for(split, amount, lag_size=lag)
    kept["lagkv"] = lagkv.select(keys, values, keep_ratio=ratio, lag_size=lag)
    return kept


def observe(lab: Lab, recording: Recording) -> Observed:
    """Measure one text; the error after the prompt takes long, so it is measured on the first text of each kind only."""
    measured = stacked(_correlations(recording, layer) | _shapes(layer) for layer in recording.layers)
    errors = {ratio: reconstruction(lab, recording, ratio) for ratio in RATIOS} if recording.number == 0 else {}
    return Observed(recording.kind, {**measured, "errors": errors})


def _shapes(layer: Layer) -> dict[str, np.ndarray]:
    measured = {}
    for name, states in (("queries", layer.plain_queries), ("hidden", layer.hidden_states)):
        channels = as_array(states)[0, ..., SINKS:, :]
        measured[f"skewness_{name}"], measured[f"kurtosis_{name}"] = theory.skewness_and_kurtosis(channels)
        measured[f"density_{name}"] = np.histogram(standardised(channels), BINS)[0]
    return measured


def near_gaussian(skewness: np.ndarray, kurtosis: np.ndarray) -> np.ndarray:
    """Whether each channel is near Gaussian, by its skewness and excess kurtosis."""
    return (np.abs(skewness) <= 0.5) & (np.abs(kurtosis) <= 1)


def _correlations(recording: Recording, layer: Layer) -> dict[str, np.ndarray]:
    split = recording.split
    observed = later_attention(recording, layer)[..., :split].mean(axis=-2)  # [H_kv, G, split]
    mean, covariance = statistics(layer, (split + recording.later) // 4, recording, recording.later)
    num_kv_heads, group = observed.shape[:2]
    keys = as_array(layer.keys)[0, :, None, :split]
    expected = paper.expected_weights(
        keys,
        as_array(mean)[0].reshape(num_kv_heads, group, -1),
        as_array(covariance)[0].reshape(num_kv_heads, group, *covariance.shape[2:]),
    )
    return {
        "pearson": theory.correlation(observed, expected),
        "without_sinks": theory.correlation(observed[..., SINKS:], expected[..., SINKS:]),
        "rank": theory.correlation(ranks(observed), ranks(expected)),
    }


def ranks(values: np.ndarray) -> np.ndarray:
    """The rank of each number in its row, 0 for the smallest; [..., T] to [..., T]. Spearman's correlation uses these ranks."""
    return values.argsort(axis=-1, kind="stable").argsort(axis=-1, kind="stable").astype(np.float64)


def standardised(states: np.ndarray) -> np.ndarray:
    """Each channel of [..., T, D] with mean 0 and deviation 1 over the tokens; a constant channel is 0."""
    centred = theory.centre(states)
    deviation = np.sqrt((centred * centred).mean(axis=-2, keepdims=True))
    return centred / np.where(deviation == 0, 1, deviation)


def reconstruction(lab: Lab, recording: Recording, ratio: float) -> dict[str, np.ndarray]:
    """For each method the mean of |h - h_compr| over the tokens after the prompt, one number for each layer."""
    split = recording.split
    generator = torch.Generator().manual_seed(lab.seed)
    kept = [masks(recording, layer, budget(split, ratio), generator) for layer in recording.layers]
    stored = [(layer.keys[:, :, :split], layer.values[:, :, :split]) for layer in recording.layers]
    original = as_array(recording.residual)
    following = recording.input_ids[:, split : split + original.shape[1]]
    errors = {}
    for name in kept[0]:
        cache = compressed(stored, [of_layer[name] for of_layer in kept])
        output = read_on(lab.model, following, cache, split, output_hidden_states=True, logits_to_keep=1)
        got = as_array(torch.stack([states[0] for states in output.hidden_states[1:-1]]))
        errors[name] = theory.reconstruction_error(original, got)
    return errors


def conclude(lab: Lab, texts: Sequence[Observed]) -> Findings:
    """The numbers of all texts together."""
    read = [text.values["errors"] for text in texts if text.values["errors"]]
    error = {ratio: {name: np.array([each[ratio][name].mean() for each in read]) for name in read[0][ratio]} for ratio in RATIOS}
    best = {ratio: _best_other(of) for ratio, of in error.items()}
    numbers = PAPER.numbers(**{f"best_{100 * ratio:g}": name for ratio, name in best.items()})
    for ratio, of in error.items():
        percent, smallest = f"{100 * ratio:g}", of[best[ratio]]
        numbers.mean(f"error_vs_best_other_{percent}", of[OURS] / smallest)
        numbers.mean(f"error_vs_random_{percent}", of[OURS] / of["random"])
        for variant, name in VARIANTS.items():
            numbers.mean(f"{variant}_vs_best_other_{percent}", of[name] / smallest)
    pearson = by_layer(texts, "pearson")
    numbers.median("pearson", pearson)
    numbers.median("pearson_without_sinks", by_layer(texts, "without_sinks"))
    numbers.median("rank_correlation", by_layer(texts, "rank"))
    numbers.share("share_of_strong_heads", pearson >= 0.7)
    for name in ("queries", "hidden"):
        skewness, kurtosis = by_layer(texts, f"skewness_{name}"), by_layer(texts, f"kurtosis_{name}")
        numbers.share(f"near_gaussian_{name}", near_gaussian(skewness, kurtosis))
        numbers.median(f"skewness_{name}", skewness)
        numbers.median(f"kurtosis_{name}", kurtosis)
    counts = {name: sum(text.values[f"density_{name}"].sum(axis=0) for text in texts) for name in ("queries", "hidden")}
    series = {
        "error": {f"{ratio:.0%}": {name: each.tolist() for name, each in of.items()} for ratio, of in error.items()},
        "pearson_by_layer": spread_by_layer(texts, "pearson"),
        "density": {name: (count / count.sum() / np.diff(BINS)).tolist() for name, count in counts.items()},
    }
    return Findings(numbers, series)


def _best_other(error: dict[str, np.ndarray]) -> str:
    """The method with the smallest error, except Expected Attention and random eviction."""
    others = [name for name in error if name not in (OURS, "random", *VARIANTS.values())]
    return min(others, key=lambda name: error[name].mean())


def draw(figure: Figure, series: dict[str, Any]) -> None:
    """Draw the paper's picture; `shown` in its file says what is seen."""
    error, correlation, shape = figure.subplots(1, 3)
    first = next(iter(series["error"].values()))
    names = sorted(first, key=lambda name: np.mean(first[name]))
    for offset, (label, by_method) in enumerate(series["error"].items()):
        places = np.arange(len(names)) + 0.4 * offset
        error.barh(places, [np.mean(by_method[name]) for name in names], height=0.38, label=f"{label} removed")
    error.set_yticks(np.arange(len(names)) + 0.2, names)
    error.invert_yaxis()
    finish(error, xlabel="mean |h - h_compr| (residual stream)", title="reconstruction error by method")
    band(correlation, series["pearson_by_layer"], "median and 10 to 90 % of heads")
    correlation.axhline(0.7, linestyle="--", color="grey", linewidth=1)
    finish(
        correlation, ylim=(-0.3, 1.02), xlabel="layer", ylabel="Pearson correlation", title="expected against observed attention"
    )
    middles = (BINS[1:] + BINS[:-1]) / 2
    for name, density in series["density"].items():
        shape.semilogy(middles, np.maximum(density, 1e-6), label={"hidden": "hidden states"}.get(name, name))
    shape.semilogy(middles, np.exp(-(middles**2) / 2) / np.sqrt(2 * np.pi), color="grey", linestyle="--", label="Gaussian")
    finish(
        shape,
        ylim=(1e-5, 1),
        xlabel="standard deviations from the channel's mean",
        ylabel="density (log scale)",
        title="shape of the activations",
    )
