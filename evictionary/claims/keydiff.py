"""KeyDiff (arXiv 2504.15364): similarity of keys against attention, diversity of the kept keys, means of
keys and queries.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from evictionary.cache.evicting_cache import EvictingCache
from evictionary.claims.claim import Findings, read_paper
from evictionary.claims.expected_attention import RATIOS, SINKS, errors_of, ranks, reconstruction
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
    residual_after,
    spread_by_layer,
    stacked,
)
from evictionary.evaluation.questions import prefill
from evictionary.optimized import keydiff as fast, streaming_llm, tova
from evictionary.optimized.selection import budget, top_k
from evictionary.reference import keydiff as paper, keydiff_variants as variants
from evictionary.reference.expected_attention_theory import correlation, reconstruction_error

PAPER = read_paper("keydiff")
RATIO = 0.5
OTHERS = ("tova", "streaming_llm")
# Tables 2 and 3: the score of each anchor and similarity.
ANCHORS = {
    "keydiff": paper.score,
    "pairwise": paper.pairwise_score,
    "median": variants.median_score,
    "raw_mean": variants.raw_mean_score,
    "dot": variants.dot_product_score,
    "euclidean": variants.euclidean_score,
}
RECENT = (10, 20)
BLOCKS = (64, 128, 256)
BY_ATTENTION = ("tova", "snapkv")
IN_BLOCKS = ("keydiff", "streaming_llm", *BY_ATTENTION)


def log_volume(keys: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """log det(K^T K) of the kept keys in nats: keys [H, T, D], kept [H, T]; -> [H]."""
    chosen = keys * kept[..., None]
    return np.linalg.slogdet(np.swapaxes(chosen, -1, -2) @ chosen)[1]


def observe(lab: Lab, recording: Recording) -> dict[str, Any]:
    """Measure one text; `example` is the head whose correlation is in the middle."""
    measured: dict[str, Any] = stacked(
        _alignment(recording, layer) | _volumes(recording, layer) for layer in recording.layers
    )
    pearson = measured["pearson"]
    layer, head = (
        int(place[0]) for place in np.nonzero(pearson == np.sort(pearson, axis=None)[pearson.size // 2])
    )
    heads = {name: measured.pop(name)[layer, head] for name in ("similarity", "attention")}
    prompts = [as_array(layer.keys)[:, :, : recording.split] for layer in recording.layers]
    measured |= {
        f"error_{100 * ratio:g}": reconstruction(lab, recording, [tables(keys, ratio) for keys in prompts])
        for ratio in RATIOS
    }
    in_blocks = [
        *((method, str(block), block) for block in BLOCKS for method in IN_BLOCKS),
        *((method, "one shot", recording.split) for method in BY_ATTENTION),
    ]
    measured["error_in_blocks"] = {
        f"{method} {name}": error_in_blocks(lab, recording, method, block)
        for method, name, block in in_blocks
    }
    return measured | {"example": {"pearson": pearson[layer, head]} | heads}


def error_in_blocks(lab: Lab, recording: Recording, method: str, block: int) -> float:
    """KD-T7, KD-T10: the mean of |h - h_compr| after the
    prompt, half of which a cache removes, block by block.
    """
    split, original = recording.split, as_array(recording.residual)
    cache = EvictingCache(lab.model, method, budget=budget(split, RATIO), every=block)
    prefill(lab.model, recording.input_ids[:, :split], cache, block)
    return float(
        reconstruction_error(original, residual_after(lab, recording, cache, original.shape[1])).mean()
    )


def tables(keys: np.ndarray, ratio: float) -> dict[str, torch.Tensor]:
    """KD-T2, KD-T3, KD-T11: what each variant keeps of keys
    [1, H_kv, N, D], [1, H_kv, N]; `ratio` is the share removed.
    """
    amount = budget(keys.shape[2], ratio)
    kept = {name: top_k(torch.as_tensor(score(keys)), amount) for name, score in ANCHORS.items()}
    recent = {
        each: variants.select_with_recent(keys, budget=amount, recent_ratio=each / 100) for each in RECENT
    }
    return kept | {f"recent_{each}": torch.as_tensor(mask) for each, mask in recent.items()}


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
    scores = {
        "keydiff": fast.score(keys),
        "tova": tova.score(queries, keys),
        "streaming_llm": streaming_llm.score(keys),
    }
    amount = budget(split, RATIO)
    arrays = as_array(keys)[0]
    kept = {name: top_k(score, amount)[0].cpu().numpy() for name, score in scores.items()}
    of_units = {f"{name} unit": log_volume(paper.unit(arrays), mask) for name, mask in kept.items()}
    return {name: log_volume(arrays, mask) for name, mask in kept.items()} | of_units


def conclude(scale: Scale, texts: Sequence[Observed]) -> Findings:
    """The numbers of all texts together."""
    examples = sorted((text.values["example"] for text in texts), key=lambda example: example["pearson"])
    found = {
        name: of_texts(texts, name) for name in texts[0].values if name != "example" and "error" not in name
    }
    pearson = found["pearson"]
    numbers = PAPER.numbers([text.kind for text in texts])
    gains = {
        **{other: found["keydiff"] - found[other] for other in OTHERS},
        **{f"{other}_unit_keys": found["keydiff unit"] - found[f"{other} unit"] for other in OTHERS},
    }
    numbers.medians(
        pearson=pearson,
        pearson_without_sinks=found["without_sinks"],
        rank_correlation=found["rank"],
        key_cosine=found["key_cosine"],
        query_cosine=found["query_cosine"],
        cosine_of_means=found["cosine_of_means"],
        **{f"gain_over_{other}": gain for other, gain in gains.items()},
    )
    numbers.means(
        share_of_negative_heads=pearson < 0,
        share_of_opposed_heads=found["cosine_of_means"] < 0,
        wins_over_both=np.all([gains[other] > 0 for other in OTHERS], axis=0),
    )
    errors = {f"{100 * ratio:g}": errors_of(texts, f"error_{100 * ratio:g}") for ratio in RATIOS}
    for percent, each in errors.items():
        over = {name: error / each["keydiff"] for name, error in each.items() if name != "keydiff"}
        numbers.means(**{f"{name}_over_keydiff_{percent}": error for name, error in over.items()})
        gaps = np.stack([over["pairwise"], over["median"]], axis=1)
        numbers.add(
            f"largest_gap_of_anchors_{percent}", lambda gaps: np.abs(gaps.mean(axis=0) - 1).max(), gaps
        )
    blocks = errors_of(texts, "error_in_blocks")
    for block in BLOCKS:
        ours, others = blocks[f"keydiff {block}"], [blocks[f"{other} {block}"] for other in IN_BLOCKS[1:]]
        against = {"best_other": np.min(others, axis=0), "one_shot": errors["50"]["keydiff"]}
        numbers.means(**{f"blocks_of_{block}_vs_{name}": ours / each for name, each in against.items()})
    numbers.means(
        **{
            f"{method}_in_blocks_vs_one_shot": blocks[f"{method} 128"] / blocks[f"{method} one shot"]
            for method in BY_ATTENTION
        }
    )
    series = {
        "error": {
            percent: {name: float(of.mean()) for name, of in each.items()} for percent, each in errors.items()
        },
        "example": examples[len(examples) // 2],
        "pearson_by_layer": spread_by_layer(texts, "pearson"),
        "rank_by_layer": spread_by_layer(texts, "rank"),
        "means_by_layer": spread_by_layer(texts, "cosine_of_means"),
        "volume": {name: found[name].ravel().round(1).tolist() for name in ("keydiff", *OTHERS)},
    }
    return numbers, series


def draw(figure: Figure, series: dict[str, Any]) -> None:
    """Draw the paper's picture; `shown` in its file says what is seen."""
    (head, layers, errors), (volume, means, other) = figure.subplots(2, 3)
    example = series["example"]
    head.semilogy(example["similarity"], np.maximum(example["attention"], 1e-7), ".", markersize=3)
    head.set(
        xlabel="mean cosine of the key with all keys",
        ylabel="mean attention received (log scale)",
        title=f"the KV head in the middle: correlation {float(example['pearson']):.2f}",
    )
    by_layer(
        layers,
        {
            "Pearson: median and 10 to 90 % of heads": series["pearson_by_layer"],
            "Spearman (ranks)": series["rank_by_layer"],
        },
        level=0,
        ylabel="correlation",
        title="similarity of a key against its attention",
    )
    everything = np.concatenate([np.asarray(each) for each in series["volume"].values()])
    bins = np.linspace(everything.min(), everything.max() + 1e-9, 50).tolist()
    for name, values in series["volume"].items():
        volume.hist(values, bins=bins, histtype="step", linewidth=1.5, label=name)
    finish(
        volume,
        xlabel="log det(K^T K) of the kept keys (nats)",
        ylabel="KV heads",
        title="diversity of what stays, half removed",
    )
    by_layer(
        means,
        {"median and 10 to 90 % of heads": series["means_by_layer"]},
        level=0,
        ylabel="cos(mean key, mean query)",
        title="mean key against mean query",
    )
    for axes, (percent, error) in zip((errors, other), series["error"].items(), strict=True):
        axes.barh(list(error), list(error.values()))
        axes.invert_yaxis()
        axes.set(xlabel="mean |h - h_compr| (residual stream)", title=f"variants: {percent}% removed")
