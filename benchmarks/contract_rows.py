"""The rows of the GPU benchmark that time one function of the contract, on arguments drawn from its line."""

import math
from collections.abc import Callable, Iterable
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.row import Inputs, Place, Row, Work, error, exact, sized
from benchmarks.rows import XL
from evictionary.optimized.kernels import launching
from evictionary.reference.answers import answers
from evictionary.reference.contract import arguments
from evictionary.spec_tests.judge.implementation import oracle

# What normal numbers become for a kind of argument, or for one whose name asks for it.
DRAWN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bool": lambda numbers: numbers > 0,
    "share": lambda numbers: numbers.abs().clamp(max=1),
    "low": lambda numbers: -numbers.abs(),
    "high": torch.abs,
}


# The torch path takes what no kernel does: in a call that this decorates, every dtype.
IN_TORCH = patch.multiple(launching, DTYPES=(), _warn_once=lambda message: None)


@sized
def contract_row(place: Place, function: str, kernel: tuple[str, str], length: int, products: str) -> Work:
    """A function with the file and the launcher of its kernel, beside its torch path.

    products are the axes of the multiplications that nothing
    saves. What is read and written, its signature says.
    """
    tokens, queries, dim = place.tokens(length), place.heads * place.group, place.head_dim
    sizes = {
        "B": 1,
        "H_q": queries,
        "H_kv": place.heads,
        "...": place.heads,
        "T": tokens,
        "P": tokens // 16,
        "M": min(32, tokens // 2),
        "D": dim,
        "D_v": dim,
        "D/2": dim // 2,
        "T/2": tokens // 2,
        "C": queries * dim,
        "hidden": queries * dim,
    }
    given = [(each, [axis.split("<")[0] for axis in each.axes]) for each in arguments(function)]
    shapes = [[sizes[axis] for axis in axes] for _, axes in given]
    (answer,) = answers(function)
    assert answer is not None
    # The first KV head and its query heads are compared, unless the output is about all of them.
    heads = {} if answer.axes == ("B",) else {"H_q": place.group, "H_kv": 1, "...": 1}
    stem, name = function.split(".")
    ours = place.ours(*kernel, entry=(stem, name))

    def count(axes: Iterable[str]) -> int:
        return math.prod(sizes[axis] for axis in axes)

    def drawn(number: int, seed: int) -> torch.Tensor:
        numbers, argument = place.states(*shapes[number], seed=10 * seed + number), given[number][0]
        change = DRAWN.get(argument.kind) or DRAWN.get(argument.name)
        return change(numbers) if change else numbers

    def want(inputs: Inputs) -> np.ndarray:
        cut = (
            each[tuple(slice(heads.get(axis)) for axis in axes)]
            for (_, axes), each in zip(given, inputs, strict=True)
        )
        return oracle(function)(*exact(*cut))

    def apart(got: torch.Tensor, wanted: np.ndarray) -> float:
        compared, finite = exact(got[tuple(map(slice, wanted.shape))])[0], np.isfinite(wanted)
        return error(compared[finite], wanted[finite])  # a window is infinite

    read = [shape for shape, (argument, _) in zip(shapes, given, strict=True) if argument.kind != "bool"]
    return Work(
        make=lambda seed: tuple(drawn(number, seed) for number in range(len(given))),
        bytes=(sum(map(math.prod, read)) + count(answer.axes)) * place.dtype.itemsize,
        flops=2.0 * count(products.split()) if products else 0.0,
        arms={"ours": ours, "torch path": IN_TORCH(ours)},
        want=want,
        read=lambda inputs, got: got,
        apart=apart,
        limit=1e-2 if answer.axes[-1] == "D_v" else 1e-3,  # an output in the dtype of the cache
    )


PROJECT, WINDOW = ("projections", "project"), "H_q M T D"
CONTRACT_ROWS = [
    Row(
        str(number),
        f"{title}; T = {length}",
        (function.partition(".")[0],),
        contract_row(function, kernel, length, products),
        peer="torch path",
        latency=function == "quest.bounds",
    )
    for number, (title, length, function, kernel, products) in enumerate(
        (
            ("Q-Filters: score", XL, "q_filters.score", PROJECT, ""),
            ("TriAttention: score", XL, "triattention.score", PROJECT, ""),
            (
                "KVzip: score, 32 replayed tokens", XL, "kvzip.score", ("received_attention", "score_replay"),
                WINDOW,
            ),
            (
                "CriticalKV: norms of projected values", 8192, "criticalkv.projected_norms",
                ("criticalkv", "projected_norms"), "H_q T D hidden",
            ),
            ("R-KV: redundancy", 8192, "rkv.redundancy", ("rkv", "totals"), "H_kv T T/2 D"),
            ("DropKV: score, W = 32", 32768, "dropkv.score", ("dropkv", "sum_squares"), WINDOW),
            ("CaM: values merged, half kept", XL, "cam.spread", ("cam", "spread"), ""),
            (
                "CAKE: preference, W = 32", 32768, "cake.preference",
                ("received_attention", "measure_window"), WINDOW,
            ),
            ("KVzap: score", 32768, "kvzap.score", ("kvzap", "score"), "H_kv T C"),
            ("Quest: bounds of pages", XL, "quest.bounds", ("quest", "bounds"), ""),
        ),
        start=20,
    )
]  # fmt: skip
