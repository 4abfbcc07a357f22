"""The rows of the GPU benchmark that time one function of the contract, on arguments drawn from its line."""

import importlib
import math
from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.row import Arm, Inputs, Place, Row, Work, error, exact, sized
from benchmarks.rows import XL
from evictionary.optimized.kernels import launching
from evictionary.reference.contract import arguments

# What normal numbers become for a kind of argument, or for one whose name asks for it.
DRAWN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bool": lambda numbers: numbers > 0,
    "share": lambda numbers: numbers.abs().clamp(max=1),
    "low": lambda numbers: -numbers.abs(),
    "high": torch.abs,
}


def in_torch(ours: Arm) -> Arm:
    """The torch path of one of our functions, which takes what no kernel does: here every dtype."""

    def run(*inputs: Any) -> Any:
        with patch.multiple(launching, DTYPES=(), _warn_once=lambda message: None):
            return ours(*inputs)

    return run


@sized
def contract_row(
    place: Place,
    function: str,
    kernel: tuple[str, str],
    length: int,
    products: str = "",
    written: str = "B H_kv T",
) -> Work:
    """A function with the file and the launcher of its kernel, beside its torch path.

    products are the axes of the multiplications that nothing saves, written those of the output.
    """
    tokens, queries, dim = place.tokens(length), place.heads * place.group, place.head_dim
    sizes = {"B": 1, "H_q": queries, "H_kv": place.heads, "...": place.heads, "T": tokens, "P": tokens // 16}
    sizes |= {"M": min(32, tokens // 2), "D": dim, "D_v": dim, "D/2": dim // 2, "T/2": tokens // 2}
    sizes |= {"C": queries * dim, "hidden": queries * dim}
    stem, name = function.split(".")
    ours = place.ours(*kernel, entry=(stem, name))
    given = [(each, [axis.split("<")[0] for axis in each.axes]) for each in arguments(function)]
    # The first KV head and its query heads are compared, unless the output is about all of them.
    heads = {} if written == "B" else {"H_q": place.group, "H_kv": 1, "...": 1}

    def size(axes: Iterable[str]) -> int:
        return math.prod(sizes[axis] for axis in axes)

    def make(seed: int) -> Inputs:
        drawn = (
            place.states(*(sizes[axis] for axis in axes), seed=10 * seed + number)
            for number, (_, axes) in enumerate(given)
        )
        return tuple(
            DRAWN.get(argument.kind, DRAWN.get(argument.name, torch.clone))(numbers)
            for (argument, _), numbers in zip(given, drawn, strict=True)
        )

    def want(inputs: Inputs) -> np.ndarray:
        cut = [
            each[tuple(slice(heads.get(axis)) for axis in axes)]
            for (_, axes), each in zip(given, inputs, strict=True)
        ]
        return getattr(importlib.import_module(f"evictionary.reference.{stem}"), name)(*exact(*cut))

    def apart(got: torch.Tensor, wanted: np.ndarray) -> float:
        compared, finite = exact(got[tuple(map(slice, wanted.shape))])[0], np.isfinite(wanted)
        return error(compared[finite], wanted[finite])  # a window is infinite

    numbers = sum(size(axes) for argument, axes in given if argument.kind != "bool")
    return Work(
        make=make,
        bytes=(numbers + size(written.split())) * place.dtype.itemsize,
        flops=2.0 * size(products.split()) if products else 0.0,
        arms={"ours": ours, "torch path": in_torch(ours)},
        want=want,
        read=lambda inputs, got: got,
        apart=apart,
        limit=1e-2 if written.endswith("D") else 1e-3,  # an output in the dtype of the cache
    )


CONTRACT_ROWS = [
    Row(
        "20",
        "Q-Filters: score; T = 131072",
        ("q_filters",),
        contract_row("q_filters.score", ("projections", "project"), XL),
        None,
        None,
        "torch path",
    ),
    Row(
        "21",
        "TriAttention: score; T = 131072",
        ("triattention",),
        contract_row("triattention.score", ("projections", "project"), XL),
        None,
        None,
        "torch path",
    ),
    Row(
        "22",
        "KVzip: score, 32 replayed tokens; T = 131072",
        ("kvzip",),
        contract_row("kvzip.score", ("received_attention", "score_replay"), XL, "H_q M T D"),
        None,
        None,
        "torch path",
    ),
    Row(
        "23",
        "CriticalKV: norms of projected values; T = 8192",
        ("criticalkv",),
        contract_row("criticalkv.projected_norms", ("criticalkv", "projected_norms"), 8192, "H_q T D hidden"),
        None,
        None,
        "torch path",
    ),
    Row(
        "24",
        "R-KV: redundancy; T = 8192",
        ("rkv",),
        contract_row("rkv.redundancy", ("rkv", "totals"), 8192, "H_kv T T/2 D"),
        None,
        None,
        "torch path",
    ),
    Row(
        "25",
        "DropKV: score, W = 32; T = 32768",
        ("dropkv",),
        contract_row("dropkv.score", ("dropkv", "sum_squares"), 32768, "H_q M T D"),
        None,
        None,
        "torch path",
    ),
    Row(
        "26",
        "CaM: values merged, half kept; T = 131072",
        ("cam",),
        contract_row("cam.spread", ("cam", "spread"), XL, "", "B H_kv T D"),
        None,
        None,
        "torch path",
    ),
    Row(
        "27",
        "CAKE: preference, W = 32; T = 32768",
        ("cake",),
        contract_row("cake.preference", ("received_attention", "measure_window"), 32768, "H_q M T D", "B"),
        None,
        None,
        "torch path",
    ),
    Row(
        "28",
        "KVzap: score; T = 32768",
        ("kvzap",),
        contract_row("kvzap.score", ("kvzap", "score"), 32768, "H_kv T C"),
        None,
        None,
        "torch path",
    ),
    Row(
        "29",
        "Quest: bounds of pages; T = 131072",
        ("quest",),
        contract_row("quest.bounds", ("quest", "bounds"), XL, "", "B H_q P"),
        None,
        None,
        "torch path",
        True,
    ),
]
