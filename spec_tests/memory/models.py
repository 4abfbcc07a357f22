"""The sizes of today's models: `models.toml` has them, and whatever asks for one reads it here."""

import tomllib
from pathlib import Path

from evictionary.reference.contract import contract_of

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
