"""Expected Attention (arXiv 2510.00636): reconstruction error,
normality, correlation of expected and observed attention.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from evictionary.claims.claim import Findings, read_paper
from evictionary.claims.pictures import by_layer, finish
from evictionary.claims.recording import (
    Lab,
    Layer,
    Observed,
    Recording,
    Scale,
    as_array,
    later_attention,
    of_texts,
    read_kept,
    spread_by_layer,
    stacked,
)
from evictionary.optimized import (
    ada_kv,
    expected_attention as fast,
    h2o,
    keydiff,
    knorm,
    lagkv,
    snapkv,
    streaming_llm,
    tova,
)
from evictionary.optimized.selection import budget, top_k
from evictionary.palette import GREY
from evictionary.reference import expected_attention as paper, expected_attention_theory as theory

PAPER = read_paper("expected_attention")
OURS = "expected_attention"
VARIANTS = {
    "epsilon": "expected_attention, epsilon 0",
    "sinks": "expected_attention, 4 sinks kept",
    "adaptive": "expected_attention, AdaKV",
    "output": "expected_attention, W_o v",
}
RATIOS = (0.5, 0.75)
SINKS = 4
BINS = np.linspace(-6, 6, 61)
STATES = {"queries": "plain_queries", "hidden": "hidden_states"}


def statistics(
    layer: Layer, count: int, recording: Recording, horizon: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean [1, H_q, D] and covariance of the first `count` queries, averaged over the positions that
    follow the prompt.
    """
    mean, covariance = fast.query_statistics(layer.plain_queries[:, :, :count])
    return fast.average_rope(
        mean, covariance, position=recording.split, horizon=horizon, theta=recording.theta
    )


def masks(
    recording: Recording, layer: Layer, amount: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """The kept mask [1, H_kv, split] of every compared method, with about `amount` tokens in each head."""
    split = recording.split
    queries, keys, values = layer.queries[:, :, :split], layer.keys[:, :, :split], layer.values[:, :, :split]
    averaged = statistics(layer, split, recording, recording.later)
    ours = fast.score(keys, values, *averaged)
    scores = {
        OURS: ours,
        "snapkv": snapkv.score(queries, keys),
        "tova": tova.score(queries, keys),
        "keydiff": keydiff.score(keys),
        "knorm": knorm.score(keys),
        "streaming_llm": streaming_llm.score(keys),
        "random": torch.rand(keys.shape[:3], generator=generator).to(keys.device),
        VARIANTS["epsilon"]: fast.score(keys, values, *averaged, epsilon=0),
        VARIANTS["output"]: by_output(layer, keys, values, averaged),
    }
    sinks = torch.arange(split, device=keys.device).expand(keys.shape[:3]) < SINKS
    lag = max(1, split // 6)  # with the paper's 1024 nothing of this prompt would be removed
    ratio: Any = lagkv.keep_ratio_for(split, amount, lag_size=lag)
    return {name: top_k(score, amount) for name, score in scores.items()} | {
        VARIANTS["adaptive"]: ada_kv.select(ours, amount),
        VARIANTS["sinks"]: top_k(ours, amount, sinks),
        "h2o": h2o.select(queries, keys, budget=amount),
        "lagkv": lagkv.select(keys, values, keep_ratio=ratio, lag_size=lag),
    }


def by_output(
    layer: Layer, keys: torch.Tensor, values: torch.Tensor, statistics: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Equation 9 as printed: the score of each query head
    with its own W_o v, mean over the group; [1, H_kv, T].
    """
    group = len(layer.output_weight) // keys.shape[1]
    each, values = (states.repeat_interleave(group, dim=1) for states in (keys, values))
    return fast.score(each, values @ layer.output_weight, *statistics).unflatten(1, (-1, group)).mean(dim=2)


def observe(lab: Lab, recording: Recording) -> dict[str, Any]:
    """Measure one text."""
    measured: dict[str, Any] = stacked(_correlations(recording, layer) for layer in recording.layers)
    for name, states in STATES.items():
        measured |= _shapes(name, [getattr(layer, states) for layer in recording.layers])
    for ratio in RATIOS:
        draw, amount = torch.Generator().manual_seed(recording.seed), budget(recording.split, ratio)
        kept = [masks(recording, layer, amount, draw) for layer in recording.layers]
        measured[f"error_{100 * ratio:g}"] = reconstruction(lab, recording, kept)
    return measured


def _shapes(name: str, states: Sequence[torch.Tensor]) -> dict[str, np.ndarray]:
    channels = [as_array(each)[0, ..., SINKS:, :] for each in states]
    skewness, kurtosis = (
        np.stack(each) for each in zip(*map(theory.skewness_and_kurtosis, channels), strict=True)
    )
    return {
        f"near_gaussian_{name}": near_gaussian(skewness, kurtosis).mean(),
        f"skewness_{name}": np.median(skewness),
        f"kurtosis_{name}": np.median(kurtosis),
        f"density_{name}": sum(np.histogram(standardised(each), BINS)[0] for each in channels),
    }


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
    """The rank of each number in its row, 0 for the smallest; [..., T] to [..., T]. Spearman's correlation
    uses these ranks.
    """
    return values.argsort(axis=-1, kind="stable").argsort(axis=-1, kind="stable").astype(np.float64)


def standardised(states: np.ndarray) -> np.ndarray:
    """Each channel of [..., T, D] with mean 0 and deviation 1 over the tokens; a constant channel is 0."""
    centred = theory.centre(states)
    deviation = np.sqrt((centred * centred).mean(axis=-2, keepdims=True))
    return centred / np.where(deviation == 0, 1, deviation)


def reconstruction(
    lab: Lab, recording: Recording, kept: Sequence[Mapping[str, torch.Tensor]]
) -> dict[str, float]:
    """For each method the mean of |h - h_compr| over layers and tokens after the prompt; `kept` [1, H_kv,
    split] by layer.
    """
    original = as_array(recording.residual)

    def error(name: str) -> float:
        got = read_kept(lab, recording, [of_layer[name] for of_layer in kept], original.shape[1])
        return float(theory.reconstruction_error(original, got).mean())

    return {name: error(name) for name in kept[0]}


def conclude(scale: Scale, texts: Sequence[Observed]) -> Findings:
    """The numbers of all texts together."""
    error = {f"{100 * ratio:g}": errors_of(texts, f"error_{100 * ratio:g}") for ratio in RATIOS}
    best = {f"best_{percent}": _best_other(of) for percent, of in error.items()}
    numbers = PAPER.numbers([text.kind for text in texts], **best)
    for percent, of in error.items():
        names, table = list(of), np.stack(list(of.values()), axis=1)

        def against_best(chosen: np.ndarray, errors: np.ndarray, names: list[str] = names) -> float:
            rows = dict(zip(names, errors.T, strict=True))
            return float((chosen / rows[_best_other(rows)]).mean())

        numbers.add(f"error_vs_best_other_{percent}", against_best, of[OURS], table)
        numbers.means(**{f"error_vs_random_{percent}": of[OURS] / of["random"]})
        for variant, name in VARIANTS.items():
            numbers.add(f"{variant}_vs_best_other_{percent}", against_best, of[name], table)
            numbers.means(**{f"{variant}_vs_plain_{percent}": of[name] / of[OURS]})
    pearson = of_texts(texts, "pearson")
    numbers.medians(
        pearson=pearson,
        pearson_without_sinks=of_texts(texts, "without_sinks"),
        rank_correlation=of_texts(texts, "rank"),
    )
    shapes = [f"{shape}_{name}" for shape in ("near_gaussian", "skewness", "kurtosis") for name in STATES]
    numbers.means(share_of_strong_heads=pearson >= 0.7, **{name: of_texts(texts, name) for name in shapes})
    counts = {name: of_texts(texts, f"density_{name}").sum(axis=0) for name in STATES}
    series = {
        "error": {
            f"{percent}%": {name: each.tolist() for name, each in of.items()} for percent, of in error.items()
        },
        "pearson_by_layer": spread_by_layer(texts, "pearson"),
        "density": {name: (count / count.sum() / np.diff(BINS)).tolist() for name, count in counts.items()},
    }
    return numbers, series


def errors_of(texts: Sequence[Observed], name: str) -> dict[str, np.ndarray]:
    """The error of each method, [texts]."""
    return {
        method: np.array([text.values[name][method] for text in texts]) for method in texts[0].values[name]
    }


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
        error.barh(
            places, [np.mean(by_method[name]) for name in names], height=0.38, label=f"{label} removed"
        )
    error.invert_yaxis()
    finish(
        error,
        yticks=np.arange(len(names)) + 0.2,
        yticklabels=names,
        xlabel="mean |h - h_compr| (residual stream)",
        title="reconstruction error by method",
    )
    by_layer(
        correlation,
        {"median and 10 to 90 % of heads": series["pearson_by_layer"]},
        level=0.7,
        ylim=(-0.3, 1.02),
        ylabel="Pearson correlation",
        title="expected against observed attention",
    )
    middles = (BINS[1:] + BINS[:-1]) / 2
    for name, density in series["density"].items():
        shape.semilogy(middles, np.maximum(density, 1e-6), label={"hidden": "hidden states"}.get(name, name))
    shape.semilogy(
        middles,
        np.exp(-(middles**2) / 2) / np.sqrt(2 * np.pi),
        color=GREY,
        linestyle="--",
        label="Gaussian",
    )
    finish(
        shape,
        ylim=(1e-5, 1),
        xlabel="standard deviations from the channel's mean",
        ylabel="density (log scale)",
        title="shape of the activations",
    )
