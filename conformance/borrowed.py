"""What the adapters share: taking definitions out of a public file, and seeing what code that returns a
smaller cache has kept.
"""

import __future__

import ast
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from evictionary.errors import require
from evictionary.reference import selection
from evictionary.spec_tests.judge.domain import OutsideDomain

FETCHED = Path(__file__).parent.parent / "build" / "wild"


def folder_of(source: str) -> Path:
    """Where the files of a source lie: what the environment variable WILD_<SOURCE> names, or what `make
    wild` has brought.
    """
    return Path(os.environ.get(f"WILD_{source.upper()}") or FETCHED / source)


def take(source: str, path: str, *names: str, **given: Any) -> SimpleNamespace:
    """The functions and classes `names` of one file of a source, as they stand there.

    Their imports are not run: torch, nn, F and math are there, and `given` stands for what else they name.
    """
    file = folder_of(source) / path
    tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
    found = [
        node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names
    ]
    missing = sorted(set(names) - {node.name for node in found})
    require(
        not missing,
        f"{file}: got no definition of {', '.join(missing)}, wanted all of {', '.join(names)}",
        ImportError,
    )
    tree.body = list(found)
    scope: dict[str, Any] = {"torch": torch, "nn": torch.nn, "F": torch.nn.functional, "math": math, **given}
    # Annotations are not read: they name types of other packages.
    exec(compile(tree, str(file), "exec", flags=__future__.annotations.compiler_flag), scope)
    return SimpleNamespace(**{name: scope[name] for name in names})


class OldDynamicCache:
    """The part of transformers' `DynamicCache` before its
    change to layers that caches of that time inherit.
    """

    def __init__(self, *unused: Any) -> None:
        self.key_cache: list[torch.Tensor] = []
        self.value_cache: list[torch.Tensor] = []
        self._seen_tokens = 0


class Watching(TorchFunctionMode):
    """Sees what the code inside does: `scores` is what the latest topk or argsort got, `index` that of the
    latest gather or scatter_.
    """

    scores: torch.Tensor
    index: torch.Tensor | None = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.topk, torch.Tensor.topk, torch.argsort, torch.Tensor.argsort):
            self.scores = args[0]
        elif function in (torch.gather, torch.Tensor.scatter_):
            self.index = kwargs["index"] if kwargs and "index" in kwargs else args[2]
        return function(*args, **(kwargs or {}))


def ranked_by(call: Callable[..., Any], *args: Any) -> torch.Tensor:
    """The numbers by which a call ranks tokens."""
    with Watching() as watching:
        call(*args)
    return watching.scores


def positions_as_values(keys: torch.Tensor) -> torch.Tensor:
    """Values [B, H, T, D] that hold each token's position
    in every channel: what comes back says what was kept.
    """
    return torch.arange(keys.shape[2], dtype=keys.dtype)[:, None].expand(keys.shape).clone()


def mask(values: torch.Tensor, length: int) -> torch.Tensor:
    """The kept tokens [B, H, T], read from the `positions_as_values` that came back."""
    return torch.zeros(*values.shape[:2], length, dtype=torch.bool).scatter(2, values[..., 0].long(), True)


def scores_by_budget(kept_at: Callable[[int], torch.Tensor], budgets: range) -> torch.Tensor:
    """For code that keeps by position: at how many of the budgets a token is kept. Top-k of it keeps what
    the code keeps.
    """
    return sum((kept_at(budget).float() for budget in budgets), torch.tensor(0.0))


def with_window(before: torch.Tensor, window: int) -> torch.Tensor:
    """Scores of the tokens before a window that is always kept, with infinity for the window."""
    return torch.nn.functional.pad(before, (0, window), value=math.inf)


def leave_out(where: bool, what: str) -> None:
    """Raise OutsideDomain where the code is not asked, for it does not take that."""
    require(not where, what, OutsideDomain)


def leave_out_window(length: int, window: int) -> None:
    """Raise OutsideDomain for a prompt within the window, which such code leaves whole or refuses."""
    leave_out(length <= window, "a prompt within the window, which this code leaves whole or refuses")


def each_head(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Of tensors [B, H, ...], those of one head of one text after the other, for code that takes one head."""
    return zip(*(each.flatten(0, 1) for each in tensors), strict=True)


def for_all_queries(queries: torch.Tensor, length: int) -> torch.Tensor:
    """Queries of every token, for code that asks for them:
    zeros for those that were not given and do not count.
    """
    return torch.nn.functional.pad(queries, (0, 0, length - queries.shape[2], 0))


def causal_attention(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """What a model hands to such code: the attention [B, H_q, M, T] of the last M queries."""
    keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    logits = queries @ keys.mT / math.sqrt(keys.shape[-1])
    hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(logits.shape[-1] - logits.shape[-2] + 1)
    return logits.masked_fill(hidden, -math.inf).softmax(dim=-1)


def top_k(scores: torch.Tensor, budget: int, protected: torch.Tensor | None = None) -> torch.Tensor:
    """Ours, for laws that ask which tokens a score keeps: the reference's selection."""
    held = None if protected is None else protected.numpy()
    return torch.from_numpy(selection.top_k(scores.double().numpy(), budget, held))
