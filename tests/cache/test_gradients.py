"""Gradients through a cache: those of a model whose cache evicts are the slopes of its loss, and the kernels
change nothing about them.
"""

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_llama
from tools import python
from tools.reading import IDS, positions_of, small

from evictionary import EvictingCache
from evictionary.methods import catalogue
from evictionary.policies import moments_of

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
PROMPT, SIZES, STEP = 24, (1, 1, 2), 2.0**-13
COMPOSED = (
    "keydiff+ada_kv",
    "keydiff+moments",
    "snapkv+ada_kv+moments",
    "momentkv+ada_kv",
    "lagkv+moments",
    "knorm+chunk_kv+pyramid_kv",
    "snapkv+cake",
    "keydiff+cam",
)
# A layer that is full, whose slots a step would write into, one that grows, and layers that compress again.
SETTINGS: dict[str, dict[str, Any]] = {
    "momentkv": {"budget": 12},
    "momentkv, growing": {"compression_ratio": 0.5},
    "keydiff, again": {"budget": 10, "every": 2},
    "lagkv, again": {"compression_ratio": 0.5, "every": 1},
}
IN_KERNELS = ("knorm", "keydiff+ada_kv", "keydiff+moments", "momentkv", "lagkv")


def weights_of(model: Any) -> dict[str, list[torch.Tensor]]:
    """The weights of each projection, of all layers."""
    return {
        name: [each for path, each in model.named_parameters() if path.split(".")[-2] == name]
        for name in PROJECTIONS
    }


def loss_of(model: Any, name: str, at_prompt: AbstractContextManager[Any] | None = None) -> tuple[Any, Any]:
    """A loss of the tokens after a prompt, read one by one and then two at once, and the positions that
    each head keeps.
    """
    method = name.partition(",")[0]
    with EvictingCache(model, method, options=small(method), **SETTINGS.get(name, {})) as cache:
        with at_prompt or nullcontext():
            model(IDS[:, :PROMPT], **cache.argument)
        parts = IDS[:, PROMPT : PROMPT + sum(SIZES)].split(SIZES, dim=1)
        logits = torch.cat([model(part, **cache.argument).logits for part in parts], dim=1)
        return logits.log_softmax(dim=-1)[..., 7].sum(), [*map(positions_of, cache.layers)]


def gradients_of(model: Any, loss: torch.Tensor) -> dict[str, list[torch.Tensor]]:
    """The gradient of each weight. Fails where one is missing, NaN, or all zero."""
    weights = weights_of(model)
    found = iter(
        torch.autograd.grad(loss, [each for own in weights.values() for each in own], allow_unused=True)
    )
    gradients = {name: [next(found) for _ in own] for name, own in weights.items()}
    wrong = [
        (name, layer)
        for name, own in gradients.items()
        for layer, gradient in enumerate(own)
        if gradient is None or not gradient.isfinite().all() or not gradient.any()
    ]
    assert not wrong
    return gradients


@pytest.fixture(scope="module")
def wide() -> Any:
    return tiny_llama().double()


@pytest.mark.parametrize("name", [*catalogue.names(), *COMPOSED, *SETTINGS])
def test_a_prompt_and_later_tokens_have_the_gradient_of_their_loss(wide: Any, name: str) -> None:
    """What Attention Matching reads a second time is a constant to the graph and none to the slope: its
    gradient has to be there, and no more is asked of it.
    """
    loss, kept = loss_of(wide, name)
    gradients = gradients_of(wide, loss)
    for projection, weights in weights_of(wide).items() if name != "attention_matching" else ():
        slope, along = slope_of(wide, name, weights, kept)
        terms = [own * there for own, there in zip(gradients[projection], along, strict=True)]
        found, size = (float(sum(each.sum() for each in some)) for some in (terms, map(torch.abs, terms)))
        assert abs(found - slope) < 0.01 * size, projection


def slope_of(
    model: Any, name: str, weights: Sequence[torch.Tensor], kept: Any
) -> tuple[float, list[torch.Tensor]]:
    """How fast the loss moves with some weights along a
    direction, the first that leaves the choice as it is.
    """
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        along = [torch.randn(weight.shape, generator=generator).to(weight) for weight in weights]
        losses = []
        with torch.no_grad():
            for there in (1, -1):
                move(weights, along, there * STEP)
                loss, now = loss_of(model, name)
                move(weights, along, -there * STEP)
                losses += [float(loss)] if now == kept else []
        if len(losses) == 2:
            return (losses[0] - losses[1]) / (2 * STEP), along
    raise AssertionError("other tokens stay after every step")


def move(weights: Sequence[torch.Tensor], along: Sequence[torch.Tensor], step: float) -> None:
    for weight, direction in zip(weights, along, strict=True):
        weight += step * direction


def flat(model: Any, name: str) -> list[float]:
    """All gradients of the tokens after a prompt that was read without a graph."""
    loss, _ = loss_of(model, name, torch.no_grad())
    return torch.cat([each.flatten() for own in gradients_of(model, loss).values() for each in own]).tolist()


def test_the_kernels_leave_the_gradients_as_they_are() -> None:
    """In the interpreter the prompt is read and compressed
    with the kernels. The tokens after it want a gradient.
    """
    program = (
        "import json, sys; from test_gradients import *; "
        "from evictionary.optimized.kernels import launching; "
        "launched = []; own = launching.gradients.refuse; "
        "launching.gradients.refuse = lambda launcher, *given: "
        "(launched.append(launcher.__name__), own(launcher, *given)); "
        "model = tiny_llama(); found = {name: flat(model, name) for name in sys.argv[1:]}; "
        "print(json.dumps([launched, found]))"
    )
    here = Path(__file__).parent
    done = python("-c", program, *IN_KERNELS, TRITON_INTERPRET=1, PYTHONPATH=f"{here}:{here.parent}")
    launched, found = json.loads(done.stdout.splitlines()[-1])
    assert {"compress", "compress_prompt", "score"} <= set(launched)
    model = tiny_llama()
    for name in IN_KERNELS:
        got, wanted = torch.tensor(found[name]), torch.tensor(flat(model, name))
        assert (got - wanted).abs().max() < 1e-4 * wanted.abs().max(), name


def test_queries_alone_may_want_a_gradient() -> None:
    """An adapter of the queries: keys, values and moments require none, and no later token writes into
    what the graph has saved of them, nor does a step.
    """
    for name in ("knorm", "keydiff+ada_kv", "momentkv"):
        gradients = []
        for frozen in (False, True):
            model = tiny_llama(num_hidden_layers=1).double()
            for path, parameter in model.named_parameters():
                parameter.requires_grad_(not frozen or "q_proj" in path)
            loss, _ = loss_of(model, name)
            (gradient,) = torch.autograd.grad(loss, weights_of(model)["q_proj"])
            gradients.append(gradient)
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-8)


def test_decoding_without_a_graph_leaves_the_one_before_it_alone() -> None:
    """A step writes into slots and moments in place: into copies, where a graph may have saved them."""
    gradients = []
    for decodes in (False, True):
        model = tiny_llama().double()
        with EvictingCache(model, "momentkv", budget=12) as cache:
            model(IDS[:, :PROMPT], **cache.argument)
            loss = model(IDS[:, PROMPT : PROMPT + 1], **cache.argument).logits.sum()
            with torch.no_grad():
                for place in range(PROMPT + 1, PROMPT + 4 if decodes else 0):
                    model(IDS[:, place : place + 1], **cache.argument)
            assert not decodes or not moments_of(cache.layers[0].state).key_sum.requires_grad
        gradients.append(torch.autograd.grad(loss, weights_of(model)["k_proj"]))
    torch.testing.assert_close(*gradients)
