"""The sizes that the laws of MEM-10 ask: those of today's models, which `models.toml` has, and others."""

import tomllib
from pathlib import Path

from evictionary.reference.contract import contract_of
from evictionary.spec_tests.judge.cases import Case

MODELS: dict[str, dict[str, float]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
"""By the name of a model: num_layers, num_kv_heads, group (query heads of each KV head), head_dim, theta."""


def sizes(name: str, *others: int) -> list[int]:
    """Each number that a model has under this name, and others, in order."""
    return sorted({int(model[name]) for model in MODELS.values()} | {*others})


OF_A_MODEL = ("num_layers", "num_kv_heads", "head_dim", "theta")
"""Settings that a model has."""


def values_in_use(path: str, name: str) -> list[float]:
    """The values of a setting of a function that papers and models use: its default, and those that its
    signature and the models say.
    """
    contract = contract_of(path)
    default = contract.signature.parameters[name].default
    found = [default] if isinstance(default, int | float) and not isinstance(default, bool) else []
    if name in contract.settings:
        found += contract.settings[name].values
    if name in OF_A_MODEL:
        found += [model[name] for model in MODELS.values()]
    return sorted({*found})


SMALL = Case(batch=1, num_kv_heads=2, group=2, length=24, head_dim=4, value_dim=4, num_queries=2)
"""The usual sizes, of which one at a time is another."""

KV_HEADS = sizes("num_kv_heads")
GROUPS = [size for size in sizes("group", *range(1, 9), 16) if size != SMALL.group]
BATCHES = [2, 3, 4, 8]
CHANNELS = sizes("head_dim", 32, 80, 96)
LENGTHS = [300, 511, 1000]

NOT_ASKED = {
    "attention_matching.active_set": "of an answer by least squares others are almost as good",
    "attention_matching.bounded_least_squares": "of an answer by least squares others are almost as good",
    "attention_matching.fit_bias": "of an answer by least squares others are almost as good",
    "attention_matching.fit_values": "of an answer by least squares others are almost as good",
    "cake_theory.cascade": "it compresses once for each layer, and takes a tenth of a second at any size",
    "pyramid_kv.budgets": "whole numbers of a line may be rounded in several right ways",
}
"""What is left to the laws of its own equation, and why."""

ALL_PAIRS = {
    "cake.budgets": "it takes the budgets of layers, and no tokens",
    "cam.merge_values": "each token has a share of each later one",
    "cam.probabilities": "each token has a share of each later one",
    "cam.shares": "each token has a share of each later one",
    "cam.spread": "each token has a share of each later one",
    "compactor.chunk_attention": "its chunks are of four tokens here; of 256 it is asked with its default",
    "compactor.score": "its chunks are of four tokens here; of 256 it is asked with its default",
    "keydiff.pairwise_score": "it compares each key with each other",
    "keydiff.process_prompt": "its blocks are of three tokens here; of 128 it is asked with the paper's",
    "keydiff.similarity_matrix": "it compares each key with each other",
    "keydiff_theory.causal_attention": "each token attends to each earlier one",
    "kvzip.top_r": "it tries each number of tokens",
    "momentkv.decode_step": "it decodes one token after another",
}
"""What costs more than a pass over the tokens is asked for few of them, and why."""
