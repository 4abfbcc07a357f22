"""KeyDiff (arXiv 2504.15364): similarity of keys against attention, diversity of what stays, means of keys and queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from evictionary.claims.claim import Claim, Condition, Findings, median_of, share_of
from evictionary.claims.expected_attention import SINKS, ranks
from evictionary.claims.pictures import band, legend
from evictionary.claims.recording import Lab, Layer, Observed, Recording, as_array, by_layer, later_attention, spread_by_layer
from evictionary.optimized import keydiff as fast
from evictionary.optimized import streaming_llm, tova
from evictionary.optimized.selection import budget, top_k
from evictionary.reference import keydiff as paper
from evictionary.reference.expected_attention_theory import correlation

ARXIV = "2504.15364"
TITLE = "KeyDiff"
RATIO = 0.5
OTHERS = ("tova", "streaming_llm")

CLAIMS = (
    Claim(
        id="KD-7 (correlation)",
        source="section 3.1, figure 2",
        statement="Keys that resemble the other keys less draw more attention, whatever the query: the correlation is negative.",
        measured="Mean cosine of each prompt key with all keys of its head, against the mean attention that the later queries of "
        "its group gave it. Pearson correlation for each KV head; it has to be negative in three heads of four, with a median of "
        "-0.3 (a medium effect) or below.",
        seen_if=(Condition("pearson", "<=", -0.3), Condition("share_of_negative_heads", ">=", 0.75)),
        beside=("pearson_without_sinks", "rank_correlation"),
    ),
    Claim(
        id="KD-7 (diversity)",
        source="section 3.3, figure 5; appendix B.1",
        statement="The keys that KeyDiff keeps span more volume than those of TOVA and of sink attention: the log-determinant of "
        "their Gram matrix is larger.",
        measured="log det(K^T K) of the kept keys, half of the prompt, in one shot (the paper evicts block by block): KeyDiff's "
        "less that of the other method, in nats, for each KV head; the median has to be positive against both.",
        seen_if=(Condition("gain_over_tova", ">", 0), Condition("gain_over_streaming_llm", ">", 0)),
        beside=("wins_over_both", "gain_over_tova_unit_keys", "gain_over_streaming_llm_unit_keys"),
    ),
    Claim(
        id="KD-C1 (collinear)",
        source="appendix C, figure 11",
        statement="Most keys and most queries of a head lie within a small angle of their mean.",
        measured="Median cosine of the keys (after RoPE, as cached) with their mean, and of the queries with theirs, over heads; "
        "0.7 (45 degrees) and more counts as small.",
        seen_if=(Condition("key_cosine", ">=", 0.7), Condition("query_cosine", ">=", 0.7)),
    ),
    Claim(
        id="KD-C1 (opposed)",
        source="appendix C, figure 12",
        statement="Mean key and mean query have a negative cosine in all heads.",
        measured="cos(mean key, mean query) of each query head, after RoPE; negative in nine heads of ten counts as all.",
        seen_if=(Condition("share_of_opposed_heads", ">=", 0.9),),
        beside=("cosine_of_means",),
    ),
)


def log_volume(keys: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """log det(K^T K) of the kept keys in nats: keys [H, T, D], kept [H, T]; -> [H]."""
    chosen = keys * kept[..., None]
    return np.linalg.slogdet(np.swapaxes(chosen, -1, -2) @ chosen)[1]


def observe(lab: Lab, recording: Recording) -> Observed:
    """Measure one text."""
    found: dict[str, list[np.ndarray]] = {}
    for layer in recording.layers:
        for name, values in {**_alignment(recording, layer), **_volumes(recording, layer)}.items():
            found.setdefault(name, []).append(values)
    return Observed(recording.kind, {name: np.stack(each) for name, each in found.items()})


def _alignment(recording: Recording, layer: Layer) -> dict[str, np.ndarray]:
    split = recording.split
    keys, queries = as_array(layer.keys)[0, :, :split], as_array(layer.queries)[0]
    attention = later_attention(recording, layer)[..., :split].mean(axis=(1, 2))  # [H_kv, split]
    similarity = -paper.pairwise_score(keys) / split
    mean_key, mean_query = keys.mean(axis=-2), queries.mean(axis=-2)
    group = len(queries) // len(keys)
    return {
        "similarity": similarity,
        "attention": attention,
        "pearson": correlation(similarity, attention),
        "without_sinks": correlation(similarity[:, SINKS:], attention[:, SINKS:]),
        "rank": correlation(ranks(similarity), ranks(attention)),
        "key_cosine": np.median(paper.cosine(keys, mean_key), axis=-1),
        "query_cosine": np.median(paper.cosine(queries, mean_query), axis=-1),
        "cosine_of_means": paper.cosine(mean_query[:, None], np.repeat(mean_key, group, axis=0))[:, 0],
    }


def _volumes(recording: Recording, layer: Layer) -> dict[str, np.ndarray]:
    split = recording.split
    queries, keys = layer.queries[:, :, :split], layer.keys[:, :, :split]
    scores = {"keydiff": fast.score(keys), "tova": tova.score(queries, keys), "streaming_llm": streaming_llm.score(keys)}
    amount = budget(split, RATIO)
    arrays = as_array(keys)[0]
    volumes = {}
    for name, score in scores.items():
        kept: torch.Tensor = top_k(score, amount)
        volumes[name] = log_volume(arrays, kept[0].cpu().numpy())
        volumes[f"{name} unit"] = log_volume(paper.unit(arrays), kept[0].cpu().numpy())
    return volumes


def conclude(lab: Lab, texts: Sequence[Observed]) -> Findings:
    """The numbers of all texts together."""
    found = {name: by_layer(texts, name) for name in texts[0].values}
    pearson = found["pearson"]
    numbers = {
        "pearson": median_of(pearson, "Pearson correlation of similarity and attention, over KV heads"),
        "share_of_negative_heads": share_of(pearson < 0, "share of KV heads with a negative correlation, over texts"),
        "pearson_without_sinks": median_of(found["without_sinks"], f"the correlation without the first {SINKS} tokens"),
        "rank_correlation": median_of(found["rank"], "the correlation of ranks (Spearman)"),
        "key_cosine": median_of(found["key_cosine"], "median cosine of the keys of a head with their mean, over KV heads"),
        "query_cosine": median_of(found["query_cosine"], "median cosine of the queries of a head with their mean, over heads"),
        "share_of_opposed_heads": share_of(
            found["cosine_of_means"] < 0, "share of query heads with cos(mean key, mean query) < 0, over texts"
        ),
        "cosine_of_means": median_of(found["cosine_of_means"], "cos(mean key, mean query), over query heads"),
        "wins_over_both": share_of(
            (found["keydiff"] > found["tova"]) & (found["keydiff"] > found["streaming_llm"]),
            "share of KV heads in which KeyDiff's volume is the largest of the three, over texts",
        ),
    }
    for other in OTHERS:
        numbers[f"gain_over_{other}"] = median_of(
            found["keydiff"] - found[other], f"log-determinant of KeyDiff's keys less that of {other}'s, nats, over KV heads"
        )
        numbers[f"gain_over_{other}_unit_keys"] = median_of(
            found["keydiff unit"] - found[f"{other} unit"], f"the same with keys of length 1, against {other}"
        )
    text, layer, head = (int(place[0]) for place in np.nonzero(pearson == np.sort(pearson, axis=None)[pearson.size // 2]))
    heads = {name: texts[text].values[name][layer, head] for name in ("similarity", "attention")}
    series = {
        "example": {"pearson": float(pearson[text, layer, head])} | {name: each.round(6).tolist() for name, each in heads.items()},
        "pearson_by_layer": spread_by_layer(texts, "pearson"),
        "rank_by_layer": spread_by_layer(texts, "rank"),
        "means_by_layer": spread_by_layer(texts, "cosine_of_means"),
        "volume": {name: found[name].ravel().round(1).tolist() for name in ("keydiff", *OTHERS)},
    }
    return Findings(numbers, series)


def draw(figure: Figure, series: dict[str, Any]) -> None:
    """Four panels: one head, the correlation by layer, the volumes, the cosine of the means."""
    (head, layers), (volume, means) = figure.subplots(2, 2)
    example = series["example"]
    head.semilogy(example["similarity"], np.maximum(example["attention"], 1e-7), ".", markersize=3)
    head.set_xlabel("mean cosine of the key with all keys")
    head.set_ylabel("mean attention received (log scale)")
    head.set_title(f"the KV head in the middle: correlation {float(example['pearson']):.2f}")
    band(layers, series["pearson_by_layer"], "Pearson: median and 10 to 90 % of heads")
    band(layers, series["rank_by_layer"], "Spearman (ranks)")
    layers.axhline(0, color="grey", linewidth=1)
    layers.set_xlabel("layer")
    layers.set_ylabel("correlation")
    layers.set_title("similarity of a key against its attention")
    legend(layers)
    everything = np.concatenate([np.asarray(each) for each in series["volume"].values()])
    bins = np.linspace(everything.min(), everything.max() + 1e-9, 50).tolist()
    for name, values in series["volume"].items():
        volume.hist(values, bins=bins, histtype="step", linewidth=1.5, label=name)
    volume.set_xlabel("log det(K^T K) of the kept keys (nats)")
    volume.set_ylabel("KV heads")
    volume.set_title("diversity of what stays, half removed")
    legend(volume)
    band(means, series["means_by_layer"], "median and 10 to 90 % of heads")
    means.axhline(0, color="grey", linewidth=1)
    means.set_xlabel("layer")
    means.set_ylabel("cos(mean key, mean query)")
    means.set_title("mean key against mean query")
    legend(means)
