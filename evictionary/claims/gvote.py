"""GVote (arXiv 2509.03136): synthetic against real queries, sizes by head and by kind of text, samples against p."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from evictionary.claims.claim import Claim, Condition, Findings, mean_of, median_of, share_of
from evictionary.claims.pictures import band, legend
from evictionary.claims.recording import Lab, Layer, Observed, Recording, as_array, by_layer, later_attention, spread_by_layer
from evictionary.optimized import gvote as fast
from evictionary.reference import gvote as paper
from evictionary.reference import gvote_theory as theory
from evictionary.reference.expected_attention_theory import correlation, skewness_and_kurtosis

ARXIV = "2509.03136"
TITLE = "GVote"
SAMPLES, P = 8, 0.95
SWEEP_SAMPLES = (1, 2, 4, 8, 16)
SWEEP_P = (0.8, 0.9, 0.95, 0.975, 0.99)
SINKS = 4
POSITIONS = 2
EVERY = 8

CLAIMS = (
    Claim(
        id="GV-A4 (hidden states)",
        source="section 3.1, figure 2",
        statement="Each channel of the hidden states is close to Gaussian along the sequence.",
        measured=f"Channels of what the norm hands to the attention, over the tokens after the first {SINKS}. A channel "
        "counts as near Gaussian with |skewness| <= 0.5 and |excess kurtosis| <= 1; most channels have to.",
        seen_if=(Condition("near_gaussian_channels", ">", 0.5),),
    ),
    Claim(
        id="GV-F3 (overlap)",
        source="section 3.3, figure 3",
        statement="The tokens that hold 95 % of a synthetic query's attention hold a little less than that of the real "
        "next query's.",
        measured="One synthetic query from the tokens before a position, against the real query there, over all tokens "
        "before it. The paper's number was lost; a mean from 0.85 on counts as a little less than 0.95.",
        seen_if=(Condition("overlap", ">=", 0.85),),
        beside=("tokens_of_synthetic_query", "tokens_of_real_query"),
    ),
    Claim(
        id="GV-F3 (correlation)",
        source="section 3.3, figure 3",
        statement="The attention of synthetic and real queries is strongly correlated.",
        measured="Pearson correlation of the two rows of attention, median over heads; 0.7 and more counts as strong.",
        seen_if=(Condition("pearson", ">=", 0.7),),
    ),
    Claim(
        id="GV-O (future)",
        source="sections 3.1 and 3.2",
        statement="The union of the votes keeps what the future queries will need.",
        measured=f"S = {SAMPLES}, p = {P}: share of the attention of the queries that did come, over the prompt's "
        "tokens, that falls on the kept ones, mean over query heads; at least p.",
        seen_if=(Condition("captured", ">=", 0.95),),
        beside=("captured_by_random_of_that_size", "recall_of_optimal_set", "kept_share"),
    ),
    Claim(
        id="GV-F1 (tasks)",
        source="section 1, figure 1",
        statement="GVote gives clearly different budgets to different kinds of text, by itself.",
        measured="Mean kept share of each kind of text, over layers and heads: the largest divided by the smallest; 1.5"
        " and more counts as clearly different. Whether these are the best budgets, as the paper says, needs"
        " benchmarks that a model of this size cannot do.",
        seen_if=(Condition("largest_over_smallest_task", ">=", 1.5),),
        beside=("kept_share",),
    ),
    Claim(
        id="GV-A12 (heads)",
        source="section 3.4",
        statement="The heads keep different numbers of tokens, so that the cache becomes ragged.",
        measured="90th percentile of the kept share of the KV heads of a text, divided by the 10th; 2 and more counts as ragged.",
        seen_if=(Condition("spread_of_heads", ">=", 2),),
    ),
    Claim(
        id="GV-F7 (S and p)",
        source="sections 3.5 and 4.4, figure 7",
        statement="The number of samples S changes the size of the cache less than p does.",
        measured="Growth of the mean kept share from S = 8 to 16 at p = 0.95, against the growth from p = 0.9 to 0.95 "
        "at S = 8: twice the samples against half of the mass left out.",
        seen_if=(Condition("growth_by_p_over_growth_by_samples", ">", 1),),
        beside=("growth_by_samples", "growth_by_p"),
    ),
)


def synthetic_queries(layer: Layer, length: int, horizon: int, theta: float, noise: np.ndarray) -> np.ndarray:
    """GV-A4..8 from the first `length` tokens: noise [S, C] gives queries [H_q, S, D], averaged over the next positions."""
    mean, variance = paper.hidden_statistics(as_array(layer.hidden_states)[0, :length], sink_size=SINKS)
    states = paper.sample_hidden_states(mean, variance, noise)
    bias = None if layer.query_bias is None else as_array(layer.query_bias)
    sampled = paper.project(states[None], as_array(layer.query_weight), bias)
    return paper.average_rotation(sampled, position=length, horizon=horizon, theta=theta)


def observe(lab: Lab, recording: Recording) -> Observed:
    """Measure one text."""
    found: dict[str, list[np.ndarray]] = {}
    generator = np.random.default_rng([lab.seed, recording.number])
    # one draw for all layers of a text, as the heads of a layer share one
    noise = generator.standard_normal((max(SWEEP_SAMPLES), recording.layers[0].hidden_states.shape[-1]))
    for layer in recording.layers:
        skewness, kurtosis = skewness_and_kurtosis(as_array(layer.hidden_states)[0, SINKS:])
        measured = {"near": (np.abs(skewness) <= 0.5) & (np.abs(kurtosis) <= 1)}
        measured |= _one_query(recording, layer, noise[:1]) | _sizes(recording, layer, noise, generator)
        for name, values in measured.items():
            found.setdefault(name, []).append(values)
    return Observed(recording.kind, {name: np.stack(each) for name, each in found.items()})


def _one_query(recording: Recording, layer: Layer, noise: np.ndarray) -> dict[str, np.ndarray]:
    queries, keys = as_array(layer.queries)[0], as_array(layer.keys)[0]
    keys = np.repeat(keys, len(queries) // len(keys), axis=0)  # one row for each query head
    found: dict[str, list[np.ndarray]] = {"overlap": [], "pearson": [], "synthetic_tokens": [], "real_tokens": []}
    for position in np.linspace(recording.split, queries.shape[1] - 1, POSITIONS + 1).astype(int)[1:]:
        before = keys[:, :position]
        synthetic = synthetic_queries(layer, int(position), recording.later, recording.theta, noise)[:, 0]
        guessed, real = (paper.attention_weights(query, before) for query in (synthetic, queries[:, position]))
        candidates = paper.nucleus(guessed, P)
        found["overlap"].append(theory.attention_overlap(real, candidates))
        found["pearson"].append(correlation(real, guessed))
        found["synthetic_tokens"].append(candidates.mean(axis=-1))
        found["real_tokens"].append(paper.nucleus(real, P).mean(axis=-1))
    return {name: np.stack(each) for name, each in found.items()}


def _sizes(recording: Recording, layer: Layer, noise: np.ndarray, generator: np.random.Generator) -> dict[str, np.ndarray]:
    split = recording.split
    sampled = synthetic_queries(layer, split, recording.later, recording.theta, noise)
    states = torch.as_tensor(sampled, dtype=layer.keys.dtype, device=layer.keys.device)[None]
    query, keys = layer.queries[:, :, split - 1], layer.keys[:, :, :split]

    def kept_with(samples: int, p: float) -> np.ndarray:
        return fast.select(query, keys, states[:, :, :samples], p=p)[0].cpu().numpy()

    sizes = {f"S {samples}": kept_with(samples, P).mean(axis=-1) for samples in SWEEP_SAMPLES}
    sizes |= {f"p {p}": kept_with(SAMPLES, p).mean(axis=-1) for p in SWEEP_P}
    kept = kept_with(SAMPLES, P)
    attention = later_attention(recording, layer)[:, :, ::EVERY, :split]
    attention = attention / attention.sum(axis=-1, keepdims=True)
    as_many = generator.permuted(kept, axis=-1)
    optimal = theory.optimal_keep_set(attention.reshape(len(kept), -1, split), P)
    return sizes | {
        "captured": theory.attention_overlap(attention, np.broadcast_to(kept[:, None, None], attention.shape)).mean(axis=-1),
        "random": theory.attention_overlap(attention, np.broadcast_to(as_many[:, None, None], attention.shape)).mean(axis=-1),
        "recall": (kept & optimal).sum(axis=-1) / optimal.sum(axis=-1),
        "optimal": optimal.mean(axis=-1),
    }


def conclude(lab: Lab, texts: Sequence[Observed]) -> Findings:
    """The numbers of all texts together."""
    found = {name: by_layer(texts, name) for name in texts[0].values}
    share, kinds = found[f"S {SAMPLES}"], np.array([text.kind for text in texts])
    by_kind = {kind: share[kinds == kind] for kind in dict.fromkeys(kinds.tolist())}
    optimal = {kind: found["optimal"][kinds == kind].mean() for kind in by_kind}
    of_text = np.percentile(share.reshape(len(kinds), -1), [10, 90], axis=-1)
    task_means = [float(each.mean()) for each in by_kind.values()]
    of_samples = found["S 16"].mean(axis=(1, 2)) / found["S 8"].mean(axis=(1, 2)) - 1
    of_p = found["p 0.95"].mean(axis=(1, 2)) / found["p 0.9"].mean(axis=(1, 2)) - 1
    numbers = {
        "near_gaussian_channels": share_of(found["near"], "share of the channels that are near Gaussian, over texts"),
        "overlap": mean_of(found["overlap"], "attention of the real query on the synthetic query's 95 % tokens"),
        "pearson": median_of(found["pearson"], "Pearson correlation of synthetic and real attention, over query heads"),
        "tokens_of_synthetic_query": mean_of(found["synthetic_tokens"], "share of tokens in the synthetic query's 95 %"),
        "tokens_of_real_query": mean_of(found["real_tokens"], "share of tokens in the real query's 95 %"),
        "captured": mean_of(found["captured"], "attention of the queries that came on the kept tokens"),
        "captured_by_random_of_that_size": mean_of(found["random"], "the same for as many random tokens"),
        "recall_of_optimal_set": mean_of(found["recall"], "share of the optimal keep set (union of the real nuclei) that is kept"),
        "kept_share": mean_of(share, "share of the prompt that is kept, over KV heads"),
        "largest_over_smallest_task": mean_of(
            [max(task_means) / min(task_means)], "largest kept share of a kind of text divided by the smallest"
        ),
        "spread_of_heads": mean_of(of_text[1] / of_text[0], "90th over 10th percentile of the heads' kept shares, over texts"),
        "growth_by_samples": mean_of(of_samples, "growth of the kept share from S = 8 to 16, over texts"),
        "growth_by_p": mean_of(of_p, "growth of the kept share from p = 0.9 to 0.95, over texts"),
        "growth_by_p_over_growth_by_samples": mean_of([of_p.mean() / of_samples.mean()], "the second growth over the first"),
    }
    series = {
        "overlap": spread_by_layer(texts, "overlap"),
        "pearson": spread_by_layer(texts, "pearson"),
        "share_by_kind": {kind: values.ravel().round(4).tolist() for kind, values in by_kind.items()},
        "optimal_by_kind": {kind: float(value) for kind, value in optimal.items()},
        "share_by_head": share.mean(axis=0).round(4).tolist(),
        "samples": [[each, float(found[f"S {each}"].mean())] for each in SWEEP_SAMPLES],
        "p": [[each, float(found[f"p {each}"].mean())] for each in SWEEP_P],
    }
    return Findings(numbers, series)


def draw(figure: Figure, series: dict[str, Any]) -> None:
    """Four panels: synthetic against real queries, sizes by kind of text, by head, and by S and p."""
    (overlap, kinds), (heads, sweep) = figure.subplots(2, 2)
    band(overlap, series["overlap"], "overlap: median and 10 to 90 % of heads")
    band(overlap, series["pearson"], "Pearson correlation")
    overlap.axhline(P, color="grey", linestyle="--", linewidth=1)
    overlap.set_ylim(-0.45, 1.02)  # room for the legend
    overlap.set_xlabel("layer")
    overlap.set_ylabel("share of attention, correlation")
    overlap.set_title("one synthetic query against the real one")
    legend(overlap)
    names = list(series["share_by_kind"])
    kinds.boxplot([series["share_by_kind"][name] for name in names], whis=(10, 90), showfliers=False, tick_labels=names)
    kinds.plot(
        range(1, len(names) + 1), [series["optimal_by_kind"][name] for name in names], "x", label="union of the real nuclei, mean"
    )
    kinds.set_ylim(0, 1.02)
    kinds.set_ylabel("share of the prompt kept")
    kinds.set_title("size by kind of text (KV heads: quartiles, 10 to 90 %)")
    legend(kinds)
    picture = heads.imshow(
        np.asarray(series["share_by_head"]).T, aspect="auto", vmin=0, vmax=1, cmap="viridis", interpolation="none"
    )
    figure.colorbar(picture, ax=heads, label="share of the prompt kept")
    heads.set_yticks(range(len(series["share_by_head"][0])))
    heads.set_xlabel("layer")
    heads.set_ylabel("KV head")
    heads.set_title("size by head, mean over texts")
    sweep.plot(*zip(*series["samples"], strict=True), marker="o", label=f"by samples S at p = {P} (lower axis)")
    sweep.set_xscale("log", base=2)
    sweep.set_xticks(SWEEP_SAMPLES, [str(each) for each in SWEEP_SAMPLES])
    sweep.set_xlabel("samples S (log scale)")
    sweep.set_ylabel("share of the prompt kept")
    sweep.set_ylim(0, 1.02)
    other = sweep.twiny()
    places = range(len(series["p"]))
    other.plot(
        places, [value for _, value in series["p"]], marker="s", color="tab:orange", label=f"by p at S = {SAMPLES} (upper axis)"
    )
    other.set_xticks(places, [f"{p:g}" for p, _ in series["p"]])
    other.set_xlabel("p")
    lines = [*sweep.get_lines(), *other.get_lines()]
    sweep.legend(lines, [str(line.get_label()) for line in lines], frameon=False, fontsize=8)
