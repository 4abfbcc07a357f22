"""LagKV (arXiv 2504.04704): retrieval of a long number by the tokens kept, against LocalKV and L2;
likeness of neighbours.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import combinations
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from transformers import Cache, DynamicCache

from evictionary.cache.evicting_cache import EvictingCache
from evictionary.claims import texts as kinds_of_text
from evictionary.claims.claim import Findings, read_paper
from evictionary.claims.pictures import finish
from evictionary.claims.recording import (
    Lab,
    Observed,
    Scale,
    as_array,
    compressed,
    of_texts,
    read_on,
    stacked,
)
from evictionary.evaluation.passkey import ANSWER_START, QUESTION, count_tokens, sentences_of
from evictionary.evaluation.questions import prefill, tokenize
from evictionary.models import versions
from evictionary.models.queries import rotation, unrotated
from evictionary.models.weights import device_of
from evictionary.optimized import lagkv as fast
from evictionary.palette import GREY
from evictionary.reference import lagkv as paper, lagkv_variants as variants
from evictionary.reference.expected_attention_theory import correlation

PAPER = read_paper("lagkv")
SINKS = 16
SPARE = 6  # tokens beside the digits that an answer may begin with
METHODS = ("lagkv", "local", "norm")
STATES = ("keys", "plain_keys", "values")
LABELS = {"lagkv": "LagKV", "local": "LocalKV", "norm": "L2 norm"}


@dataclass(frozen=True)
class Prompts:
    """Prompts of `passkey_tokens` tokens: keys and values [P, H_kv, T, D] of each layer, the question's ids
    [P, M], the numbers.
    """

    layers: list[tuple[torch.Tensor, torch.Tensor]]
    question_ids: torch.Tensor
    answers: list[str]


def make_text(tokenizer: Any, scale: Scale, kind: str, seed: int) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Return context ids [1, tokens], question ids [1, M] and the number, which stands at a drawn depth of
    a text of that kind.
    """
    draw = random.Random(f"{seed}/{kind}/{scale.passkey_digits}")
    digits, tokens, depth = scale.passkey_digits, scale.passkey_tokens, draw.uniform(*scale.passkey_depths)
    answer = "".join(draw.choice("0123456789") for _ in range(digits))
    needle = f"The secret number is {answer}."
    introduction = (
        "A long secret number is hidden in the following text. Find it and remember all of its digits."
    )

    reserved = count_tokens(tokenizer, introduction) + count_tokens(tokenizer, needle)
    sentences = sentences_of(tokenizer, lambda: kinds_of_text.KINDS[kind](draw), tokens - reserved)
    place = round(depth * len(sentences))
    text = " ".join([introduction, *sentences[:place], needle, *sentences[place:]])
    context_ids, question_ids = tokenize(tokenizer, text, QUESTION, ANSWER_START)
    return context_ids[:, :tokens], question_ids, answer


def partial_match(text: str, answer: str) -> float:
    """The longest run of the answer's digits in a text, as
    a share of the answer; spaces and commas are ignored.
    """
    plain = text.replace(" ", "").replace(",", "")
    return SequenceMatcher(None, plain, answer, autojunk=False).find_longest_match().size / len(answer)


def setups(scale: Scale) -> list[tuple[int, float]]:
    """(lag size, keep ratio) of every setup."""
    return [(lag, ratio) for lag in scale.lag_sizes for ratio in scale.keep_ratios]


def observe(lab: Lab, kinds: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Measure one prompt of each kind, all of them in one batch: the partial match with the full cache and
    in each setup.
    """
    prompts = read(lab, kinds)
    everything = [
        torch.ones(keys.shape[:3], dtype=torch.bool, device=keys.device) for keys, _ in prompts.layers
    ]
    found = {"full": partial(lab, prompts, everything)} | {
        method: np.stack(
            [partial(lab, prompts, _masks(prompts, method, *each)) for each in setups(lab.scale)], axis=1
        )
        for method in METHODS
    }
    likeness = stacked(near_are_alike(lab, *states, layer) for layer, states in enumerate(prompts.layers))
    found |= {name: each.swapaxes(0, 1) for name, each in likeness.items()}
    found["first_digit"] = np.array([first_digits(lab, kind) for kind in kinds])
    yield from (
        {name: of_prompts[index] for name, of_prompts in found.items()} for index in range(len(kinds))
    )


@torch.no_grad()
def first_digits(lab: Lab, kind: str) -> list[int]:
    """Figure 3: the first token after the answer's space, of the full cache and of chunks at each L,
    largest first, smallest r.
    """
    context_ids, question_ids, _ = make_text(lab.tokenizer, lab.scale, kind, lab.seed)
    space = lab.tokenizer(" ", add_special_tokens=False, return_tensors="pt")["input_ids"]
    asked, length = torch.cat([question_ids, space], dim=1), context_ids.shape[1]

    def first(cache: Cache, ends: tuple[int, ...]) -> int:
        for chunk in context_ids.to(device_of(lab.model)).tensor_split(ends, dim=1):
            lab.model(chunk, **versions.argument(cache), use_cache=True, logits_to_keep=1)
        output = read_on(lab.model, asked.to(device_of(lab.model)), cache, length, logits_to_keep=1)
        return int(output.logits[0, -1].argmax())

    settings = {"keep_ratio": min(lab.scale.keep_ratios), "sink_size": SINKS}
    in_chunks = (
        (EvictingCache(lab.model, "lagkv", options=settings | {"lag_size": lag}, every=lag), lag)
        for lag in sorted(lab.scale.lag_sizes, reverse=True)
    )
    return [
        first(DynamicCache(), ()),
        *(first(cache, tuple(range(SINKS + 2 * lag, length, lag))) for cache, lag in in_chunks),
    ]


def near_are_alike(lab: Lab, keys: torch.Tensor, values: torch.Tensor, layer: int) -> dict[str, np.ndarray]:
    """The nearness of the keys, the keys before RoPE and the values of a layer, [P, H_kv] each, without
    the attention sinks.
    """
    turns = rotation(lab.model, layer, torch.arange(keys.shape[2], device=keys.device))
    every = (keys, unrotated(keys, *turns), values)
    return {
        f"near_{name}": np.stack([*map(nearness, states[:, :, SINKS:])])
        for name, states in zip(STATES, every, strict=True)
    }


def nearness(states: torch.Tensor) -> np.ndarray:
    """Over all pairs of tokens, the correlation of their cosine with minus the logarithm of their
    distance; [H, T, D] to [H].
    """
    unit = torch.nn.functional.normalize(states.double(), dim=-1)
    one, other = torch.triu_indices(*(2 * [states.shape[1]]), offset=1, device=states.device)
    return correlation(as_array((unit @ unit.mT)[:, one, other]), -np.log(as_array(other - one)))


def partial(lab: Lab, prompts: Prompts, kept: list[torch.Tensor]) -> np.ndarray:
    """The partial match of each prompt's answer, from the tokens that `kept` leaves in each layer."""
    given = answers(lab, prompts, kept)
    return np.array(
        [partial_match(text, answer) for text, answer in zip(given, prompts.answers, strict=True)]
    )


def read(lab: Lab, kinds: Sequence[str]) -> Prompts:
    """Make a prompt of each kind and read them one by one."""
    stored, questions, numbers = [], [], []
    for kind in kinds:
        context_ids, question_ids, number = make_text(lab.tokenizer, lab.scale, kind, lab.seed)
        cache = DynamicCache()
        prefill(lab.model, context_ids, cache)
        in_layers: list[Any] = cache.layers
        stored.append([(layer.keys, layer.values) for layer in in_layers])
        questions.append(question_ids)
        numbers.append(number)
    layers = []
    while stored[0]:  # the last layer first; each layer is released as soon as it is copied
        keys, values = zip(*(each.pop() for each in stored), strict=True)
        layers.append((torch.cat(keys), torch.cat(values)))
    return Prompts(layers[::-1], torch.cat(questions).to(device_of(lab.model)), numbers)


def _masks(prompts: Prompts, method: str, lag: int, ratio: float) -> list[torch.Tensor]:
    """The kept mask [P, H_kv, T] of every layer. LocalKV and L2 exist only in the reference."""
    settings: dict[str, Any] = {"keep_ratio": ratio, "sink_size": SINKS, "lag_size": lag}
    if method == "lagkv":
        return [fast.select(keys, values, **settings) for keys, values in prompts.layers]
    arrays = ((as_array(keys), as_array(values)) for keys, values in prompts.layers)
    kept = (
        variants.local_select(*states, **settings)
        if method == "local"
        else variants.norm_select(*states, layer=layer, **settings)
        for layer, states in enumerate(arrays)
    )
    return [torch.as_tensor(mask, device=prompts.question_ids.device) for mask in kept]


@torch.no_grad()
def answers(lab: Lab, prompts: Prompts, kept: list[torch.Tensor]) -> list[str]:
    """The greedy answers to all prompts in one batch, from
    the tokens that `kept` [P, H_kv, T] leaves in each layer.
    """
    cache = compressed(prompts.layers, kept)
    position = lab.scale.passkey_tokens
    # The causal mask is made for the first layer's length, so layers of other lengths have to read one token
    # at a time.
    lengths = {cache.get_seq_length(index) for index in range(len(kept))}
    block = prompts.question_ids.shape[1] if len(lengths) == 1 else 1
    for part in prompts.question_ids.split(block, dim=1):
        output = read_on(lab.model, part, cache, position, logits_to_keep=1)
        position += part.shape[1]
    generated: list[torch.Tensor] = []
    for _ in range(lab.scale.passkey_digits + SPARE):
        generated.append(output.logits[:, -1].argmax(dim=-1, keepdim=True))
        output = read_on(lab.model, generated[-1], cache, position, logits_to_keep=1)
        position += 1
    return lab.tokenizer.batch_decode(torch.cat(generated, dim=1))


def conclude(scale: Scale, texts: Sequence[Observed]) -> Findings:
    """The numbers of all prompts together."""
    places = setups(scale)
    lags, ratios, digits = scale.lag_sizes, scale.keep_ratios, scale.passkey_digits
    full = of_texts(texts, "full")
    score = {method: of_texts(texts, method) for method in METHODS}  # [prompts, setups] each
    lagkv = score["lagkv"]
    kept_each = np.array([paper.tokens_per_partition(ratio, lag) for lag, ratio in places])
    above = kept_each >= digits
    by_lag = lagkv.reshape(len(texts), len(lags), len(ratios))
    pairs = combinations(range(len(places)), 2)
    equal = [(one, other) for one, other in pairs if kept_each[one] == kept_each[other]]
    over_local, over_norm = (lagkv - score[other] for other in ("local", "norm"))
    at = {
        name: [ratio == pick(ratios) for _, ratio in places]
        for name, pick in (("smallest", min), ("largest", max))
    }
    numbers = PAPER.numbers(
        [text.kind for text in texts],
        digits=digits,
        smaller_lag=lags[0],
        larger_lag=lags[-1],
        smallest=min(ratios),
        largest=max(ratios),
    )
    whole, *in_chunks = of_texts(texts, "first_digit").T
    near = {f"near_{name}": of_texts(texts, f"near_{name}") for name in STATES}
    numbers.means(
        full_partial=full,
        full_exact=full == 1,
        partial_above_64=lagkv[:, above],
        partial_below_64=lagkv[:, ~above],
        gain_above_64=lagkv[:, above].mean(axis=1) - lagkv[:, ~above].mean(axis=1),
        gain_of_larger_lag=by_lag[:, -1] - by_lag[:, 0],
        gain_of_smaller_lag_at_equal_rL=np.stack(
            [lagkv[:, one] - lagkv[:, other] for one, other in equal], axis=1
        ),
        over_local=over_local,
        over_norm=over_norm,
        over_local_at_smallest_ratio=over_local[:, at["smallest"]],
        lagkv_at_smallest_ratio=lagkv[:, at["smallest"]],
        local_at_smallest_ratio=score["local"][:, at["smallest"]],
        first_token_in_chunks=in_chunks[0] == whole,
        first_token_in_smaller_chunks=in_chunks[-1] == whole,
        **{f"share_{name}": of > 0 for name, of in near.items()},
        **{f"partial_{method}": of for method, of in score.items()},
        **{f"exact_{method}": of == 1 for method, of in score.items()},
    )
    numbers.medians(**near)
    numbers.add("size_of_gap_at_largest_ratio", lambda gap: abs(gap.mean()), over_local[:, at["largest"]])
    series = {
        "digits": digits,
        "full": float(full.mean()),
        "setups": [
            {"lag_size": lag, "keep_ratio": ratio, "rL": int(kept)}
            for (lag, ratio), kept in zip(places, kept_each, strict=True)
        ],
        "partial": {method: each.T.tolist() for method, each in score.items()},
    }
    return numbers, series


def draw(figure: Figure, series: dict[str, Any]) -> None:
    """Draw the paper's picture; `shown` in its file says what is seen."""
    scale, variants = figure.subplots(1, 2)
    places, lagkv = series["setups"], np.array(series["partial"]["lagkv"])
    for lag in sorted({place["lag_size"] for place in places}):
        rows = [row for row, place in enumerate(places) if place["lag_size"] == lag]
        across = [places[row]["rL"] for row in rows]
        (line,) = scale.plot(
            across, lagkv[rows].mean(axis=1), marker="o", label=f"L = {lag}, mean over prompts"
        )
        for row, x in zip(rows, across, strict=True):
            scale.plot([x] * lagkv.shape[1], lagkv[row], ".", color=line.get_color(), alpha=0.4)
    scale.axhline(series["full"], color=GREY, linestyle="-.", linewidth=1, label="full cache")
    scale.axvline(series["digits"], color=GREY, linestyle=":", linewidth=1, label="tokens of the number")
    scale.set_xscale("log", base=2)
    ticks = sorted({place["rL"] for place in places})
    finish(
        scale,
        xticks=ticks,
        xticklabels=ticks,
        ylim=(-0.02, 1.05),
        xlabel="rL, tokens kept of each partition (log scale)",
        ylabel="partial match",
        title="LagKV: retrieval against rL",
    )
    for offset, (method, label) in enumerate(LABELS.items()):
        means = np.array(series["partial"][method]).mean(axis=1)
        variants.bar(np.arange(len(places)) + 0.27 * offset, means, width=0.25, label=label)
    variants.axhline(series["full"], color=GREY, linestyle="-.", linewidth=1, label="full cache")
    finish(
        variants,
        xticks=np.arange(len(places)) + 0.27,
        xticklabels=[f"L={place['lag_size']}\nr={place['keep_ratio']:g}" for place in places],
        ylim=(0, 1.05),
        ylabel="partial match, mean over prompts",
        title="LagKV, LocalKV and the L2 norm",
    )
