"""Expected Attention (arXiv 2510.00636): reconstruction error, normality, correlation of expected and observed attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from evictionary.claims.claim import Claim, Condition, Findings, mean_of, median_of, share_of
from evictionary.claims.pictures import band, legend
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
)
from evictionary.optimized import expected_attention as fast
from evictionary.optimized import h2o, keydiff, knorm, lagkv, snapkv, streaming_llm, tova
from evictionary.optimized.selection import budget, top_k
from evictionary.reference import expected_attention as paper
from evictionary.reference import expected_attention_theory as theory

ARXIV = "2510.00636"
TITLE = "Expected Attention"
OURS = "expected_attention"
VARIANTS = {"epsilon": "expected_attention, epsilon 0", "sinks": "expected_attention, 4 sinks kept"}
RATIOS = (0.5, 0.75)
SINKS = 4
BINS = np.linspace(-6, 6, 61)

CLAIMS = (
    Claim(
        id="EA-A (error)",
        source="appendix A, figure 6",
        statement="Of the methods compared, Expected Attention moves the residual stream least, averaged over tokens and layers.",
        measured="The prompt's cache is compressed, the text is read on, and the residual stream between the layers is "
        "compared with that of the full cache: mean of |h - h_compr| over tokens and layers, divided by the "
        "smallest such error among the other methods (not counting random). Below 1 means that Expected "
        "Attention is best. Each head keeps the same number of tokens; the paper divides them unevenly among "
        "the heads.",
        seen_if=(Condition("error_vs_best_other_50", "<", 1), Condition("error_vs_best_other_75", "<", 1)),
        beside=("error_vs_random_50", "error_vs_random_75", "epsilon_vs_best_other_50", "sinks_vs_best_other_50"),
    ),
    Claim(
        id="EA-A (correlation)",
        source="appendix C, figure 10",
        statement="In every layer and head shown, the expected attention is strongly correlated with the attention observed.",
        measured="Query statistics from the first quarter of the text; expected weights of the prompt's tokens against the mean "
        "attention that the later queries gave them. Pearson correlation for each query head, median over heads; 0.7 and more "
        "counts as strong.",
        seen_if=(Condition("pearson", ">=", 0.7),),
        beside=("pearson_without_sinks", "rank_correlation", "share_of_strong_heads"),
    ),
    Claim(
        id="EA-A (queries)",
        source="appendix B, figures 7 to 9",
        statement="Queries before RoPE keep a clear Gaussian shape, which the method rests on.",
        measured=f"Each channel of each query head over the tokens after the first {SINKS}. A channel counts as near Gaussian with "
        "|skewness| <= 0.5 and |excess kurtosis| <= 1; most channels have to.",
        seen_if=(Condition("near_gaussian_queries", ">", 0.5),),
        beside=("skewness_queries", "kurtosis_queries"),
    ),
    Claim(
        id="EA-A (hidden states)",
        source="appendix B, figures 7 to 9",
        statement="Hidden states are mostly unimodal and near Gaussian, with a few outliers of heavy tails.",
        measured="As for the queries, on the channels of what the norm hands to the attention of each layer.",
        seen_if=(Condition("near_gaussian_hidden", ">", 0.5),),
        beside=("skewness_hidden", "kurtosis_hidden"),
    ),
)


def statistics(layer: Layer, count: int, recording: Recording, horizon: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean [1, H_q, D] and covariance of the first `count` queries, averaged over the positions that follow the prompt."""
    mean, covariance = fast.query_statistics(layer.plain_queries[:, :, :count])
    return fast.average_rope(mean, covariance, position=recording.split, horizon=horizon, theta=recording.theta)


def masks(recording: Recording, layer: Layer, amount: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The mask [1, H_kv, split] of every method that is compared, all keeping about `amount` tokens in each head."""
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
    lag = max(1, split // 6)  # the paper's 1024 would leave this prompt whole
    ratio: Any = lagkv.keep_ratio_for(split, amount, lag_size=lag)
    kept["lagkv"] = lagkv.select(keys, values, keep_ratio=ratio, lag_size=lag)
    return kept


def observe(lab: Lab, recording: Recording) -> Observed:
    """Measure one text; reading on is what takes long, so it is done for the first text of each kind."""
    found: dict[str, list[np.ndarray]] = {}
    densities = {"queries": np.zeros(len(BINS) - 1), "hidden": np.zeros(len(BINS) - 1)}
    for layer in recording.layers:
        measured = _correlations(recording, layer)
        for name, each in (("queries", layer.plain_queries[0]), ("hidden", layer.hidden_states[0])):
            states = as_array(each)[..., SINKS:, :]
            measured[f"skewness_{name}"], measured[f"kurtosis_{name}"] = theory.skewness_and_kurtosis(states)
            densities[name] += np.histogram(standardised(states), BINS)[0]
        for name, values in measured.items():
            found.setdefault(name, []).append(values)
    errors = {ratio: reconstruction(lab, recording, ratio) for ratio in RATIOS} if recording.number == 0 else {}
    return Observed(
        recording.kind, {name: np.stack(each) for name, each in found.items()} | {"density": densities, "errors": errors}
    )


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
    """The rank of each number of a row, 0 for the smallest; [..., T] to [..., T]. The correlation of ranks is Spearman's."""
    return values.argsort(axis=-1, kind="stable").argsort(axis=-1, kind="stable").astype(np.float64)


def standardised(states: np.ndarray) -> np.ndarray:
    """Each channel of [..., T, D] with mean 0 and deviation 1 over the tokens; a constant channel is 0."""
    centred = theory.centre(states)
    deviation = np.sqrt((centred * centred).mean(axis=-2, keepdims=True))
    return centred / np.where(deviation == 0, 1, deviation)


def reconstruction(lab: Lab, recording: Recording, ratio: float) -> dict[str, np.ndarray]:
    """For each method the mean of |h - h_compr| over the tokens read on, one number for each layer."""
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
    pearson = by_layer(texts, "pearson")
    numbers = {
        "pearson": median_of(pearson, "Pearson correlation of expected and observed attention, over query heads"),
        "pearson_without_sinks": median_of(by_layer(texts, "without_sinks"), f"the same without the first {SINKS} tokens"),
        "rank_correlation": median_of(by_layer(texts, "rank"), "the same with ranks in the place of weights (Spearman)"),
        "share_of_strong_heads": share_of(
            pearson >= 0.7, "share of query heads with a Pearson correlation of 0.7 or more, over texts"
        ),
    }
    for name, label in (("queries", "queries before RoPE"), ("hidden", "hidden states")):
        skewness, kurtosis = by_layer(texts, f"skewness_{name}"), by_layer(texts, f"kurtosis_{name}")
        near = (np.abs(skewness) <= 0.5) & (np.abs(kurtosis) <= 1)
        numbers[f"near_gaussian_{name}"] = share_of(near, f"share of the channels of {label} that are near Gaussian, over texts")
        numbers[f"skewness_{name}"] = median_of(skewness, f"skewness of the channels of {label} (0 for a Gaussian)")
        numbers[f"kurtosis_{name}"] = median_of(kurtosis, f"excess kurtosis of the channels of {label} (0 for a Gaussian)")
    read = [text.values["errors"] for text in texts if text.values["errors"]]
    error: dict[str, dict[str, list[float]]] = {}
    for ratio in RATIOS:
        of = {name: np.array([each[ratio][name].mean() for each in read]) for name in read[0][ratio]}
        best = min((name for name in of if name not in (OURS, *VARIANTS.values(), "random")), key=lambda name: of[name].mean())
        label = f"{ratio:.0%} removed, over texts"
        numbers[f"error_vs_best_other_{ratio:.0%}".rstrip("%")] = mean_of(
            of[OURS] / of[best], f"its error divided by that of the best other method ({best}), {label}"
        )
        numbers[f"error_vs_random_{ratio:.0%}".rstrip("%")] = mean_of(
            of[OURS] / of["random"], f"its error divided by that of random eviction, {label}"
        )
        for variant, name in VARIANTS.items():
            numbers[f"{variant}_vs_best_other_{ratio:.0%}".rstrip("%")] = mean_of(
                of[name] / of[best], f"the first number for {name}, {label}"
            )
        error[f"{ratio:.0%}"] = {name: each.tolist() for name, each in of.items()}
    counts = {name: sum(text.values["density"][name] for text in texts) for name in ("queries", "hidden")}
    series = {
        "error": error,
        "pearson_by_layer": spread_by_layer(texts, "pearson"),
        "density": {name: (count / count.sum() / np.diff(BINS)).tolist() for name, count in counts.items()},
    }
    return Findings(numbers, series)


def draw(figure: Figure, series: dict[str, Any]) -> None:
    """Three panels: the error by method, the correlation by layer, the shape of queries and hidden states."""
    error, correlation, shape = figure.subplots(1, 3)
    first = next(iter(series["error"].values()))
    names = sorted(first, key=lambda name: np.mean(first[name]))
    for offset, (label, by_method) in enumerate(series["error"].items()):
        places = np.arange(len(names)) + 0.4 * offset
        error.barh(places, [np.mean(by_method[name]) for name in names], height=0.38, label=f"{label} removed")
    error.set_yticks(np.arange(len(names)) + 0.2, names)
    error.invert_yaxis()
    error.set_xlabel("mean |h - h_compr| (residual stream)")
    error.set_title("reconstruction error by method")
    legend(error)
    band(correlation, series["pearson_by_layer"], "median and 10 to 90 % of heads")
    correlation.axhline(0.7, linestyle="--", color="grey", linewidth=1)
    correlation.set_ylim(-0.3, 1.02)
    correlation.set_xlabel("layer")
    correlation.set_ylabel("Pearson correlation")
    correlation.set_title("expected against observed attention")
    legend(correlation)
    middles = (BINS[1:] + BINS[:-1]) / 2
    for name, density in series["density"].items():
        shape.semilogy(middles, np.maximum(density, 1e-6), label={"hidden": "hidden states"}.get(name, name))
    shape.semilogy(middles, np.exp(-(middles**2) / 2) / np.sqrt(2 * np.pi), color="grey", linestyle="--", label="Gaussian")
    shape.set_ylim(1e-5, 1)
    shape.set_xlabel("standard deviations from the channel's mean")
    shape.set_ylabel("density (log scale)")
    shape.set_title("shape of the activations")
    legend(shape)
