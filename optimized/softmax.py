r"""The softmax of a model where it is not the plain one: capped logits (Gemma 2), or a learned sink beside
the tokens (gpt-oss).

The papers of the methods know neither. A cache opens `of_model` around a method, and everything in
`optimized` that computes attention asks here: `capped` for its logits, `weights` for its probabilities.
Without `of_model` they are plain. Kernels are plain too, so `kernels.take` leaves what reads attention to
torch in that time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch

from . import gradients


class Softmax(NamedTuple):
    """cap, the largest logit: `cap tanh(logit / cap)` takes its place; sinks, a logit for each query head:
    [H_q], or [B, H_q] where a method is called. A sink takes part in the softmax and has no value.
    """

    cap: float | None = None
    sinks: torch.Tensor | None = None


PLAIN = Softmax()
_now: ContextVar[Softmax] = ContextVar("softmax", default=PLAIN)


@contextmanager
def of_model(softmax: Softmax) -> Iterator[None]:
    """Compute attention with this softmax, in this thread, until the end of the block."""
    before = _now.set(softmax)
    try:
        yield
    finally:
        _now.reset(before)


def current() -> Softmax:
    """The softmax that attention is computed with now."""
    return _now.get()


def capped(logits: torch.Tensor) -> torch.Tensor:
    """The logits under the model's cap, in place unless a gradient is wanted: tanh's needs its result."""
    cap = current().cap
    if cap is None:
        return logits
    within = logits.div_(cap).tanh_()
    return within * cap if gradients.are_wanted(within) else within.mul_(cap)


def with_sink(logits: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Logits [B, H_kv, G, ..., T] with that of the sink behind them, [..., T + 1], or as they are;
    `first`, their first KV head.
    """
    sinks = current().sinks
    if sinks is None:
        return logits
    heads, group = logits.shape[1:3]
    own = sinks[:, first * group : (first + heads) * group].to(logits)
    return torch.cat(
        [logits, own.view(-1, heads, group, *[1] * (logits.ndim - 3)).expand(*logits.shape[:-1], 1)], dim=-1
    )


def weights(logits: torch.Tensor, first: int = 0) -> torch.Tensor:
    """The probabilities of the tokens, as `with_sink`; beside a sink they sum to less than 1."""
    return with_sink(logits, first).softmax(dim=-1)[..., : logits.shape[-1]]
