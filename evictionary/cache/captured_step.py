"""A decoded token as one CUDA graph: the step of a full cache, recorded once and replayed for each token.

A model and the hooks of a cache are called from Python, which takes longer than a GPU
does for a short cache. A CUDA graph holds the launches of a whole step. It can be
replayed where each step does the same to the same memory. So a captured step reads what
changes from token to token from memory too (`layers.Clock`), and Python only counts.

- A cache that evicts with each token writes the new token into the slot of another one.
- A cache with `every` writes it behind the others, into memory with room for all tokens until the next
  compression. The attention masks the empty places. The compression itself is not captured.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from evictionary.cache.evicting_cache import EvictingCache
from evictionary.cache.layers import GROWTH, Clock, EvictingLayer
from evictionary.cache.session import Session
from evictionary.errors import require, usage
from evictionary.models import versions

REHEARSALS = 3
"""The steps before a recording: kernels are compiled in them, and libraries take the memory they need."""


def captured_step(cache: EvictingCache) -> CapturedStep:
    """Capture the step of a cache that has read its prompt: a function from tokens to the next logits.

    It takes the place of `model(tokens, **cache.argument)`. On a GPU each call replays one CUDA graph.
    Elsewhere it runs the same step without a graph. The cache goes on as it does by itself: it compresses
    when it is due, and can be saved, copied, or read by the model in between.

    Args:
        cache: One that evicts with each token, with a budget, once each head is full; or one with `every`, of
            a method that reads keys and values alone.

    Raises:
        UsageError: The step of this cache is not the same for each token, or gradients are enabled. The cache
            is unchanged then.

    Examples:
        Eight tokens after a prompt:

        >>> from evictionary.cache.captured_step import captured_step
        >>> cache = EvictingCache(model, "momentkv", budget=64)
        >>> with torch.no_grad():
        ...     token = model(**inputs, **cache.argument).logits[:, -1:].argmax(dim=-1)
        ...     step = captured_step(cache)
        ...     for _ in range(8):
        ...         token = step(token).argmax(dim=-1, keepdim=True)
        >>> cache.tokens_kept
        64
    """
    return CapturedStep(cache)


class CapturedStep:
    """A function from tokens [B, 1] to logits [B, vocabulary], which `captured_step` makes.

    `is_captured` says whether one CUDA graph runs it. A graph reads the weights of the model where they lay
    when it was recorded.
    """

    is_captured = False

    def __init__(self, cache: EvictingCache) -> None:
        self.cache = cache
        self._begin()

    def _begin(self) -> None:
        """Make a step of the cache as it is now, and record it."""
        require_capturable(self.cache)
        step = _Step(self.cache)
        if has_graphs(step.device):
            _rehearse(self.cache)
            with step.uncounted():
                self._replay, self._logits = record(step.run, step.device)
            step.settle()
            self.is_captured = True
        self._step = step

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Read one token in each row, and return the logits [B, vocabulary] of the next one.

        Args:
            tokens: Their ids, [B, 1].

        Raises:
            UsageError: The tokens do not fit the cache, or its step can no longer be captured.
        """
        _require_mode(self._step.device)
        if not self._step.settle():  # the cache has grown, or holds another batch
            self._begin()
        step = self._step
        step.take(tokens)
        if self.is_captured:
            self._replay()
            step.count()
            logits = self._logits.clone()  # the next call writes into the same memory
        else:
            logits = step.run()
        step.session.compress_due()
        return logits


class _Step:
    """The step of a cache as it is, in memory of its own: what it reads, and where its layers live."""

    def __init__(self, cache: EvictingCache) -> None:
        self.cache, self.session = cache, cache._session
        self.model: Any = cache.model
        self.layers: list[EvictingLayer] = cache.layers
        self.device = self.layers[0].device
        self.replaces = self.layers[0].moments is not None
        # in a mode in which any later step may write into them
        with torch.inference_mode(False):
            rows, numbers = self.session.reading.rows, {"dtype": torch.int64, "device": self.device}
            self.tokens, self.shifts = torch.zeros(2, rows, 1, **numbers)
            self.seen = torch.zeros(1, **numbers)
            # of each layer, the tokens that it has seen and does not store
            self.gone = torch.zeros(len(self.layers), **numbers)
            self.memory = [self._memory_of(layer) for layer in self.layers]
        self._told: Any = None  # the shifts and the tokens gone, when they were written
        self._states: list[Any] = [None] * len(self.layers)
        self.settle()

    def _memory_of(self, layer: EvictingLayer) -> dict[str, torch.Tensor]:
        """Memory for what a layer stores, and for the tokens until its next compression."""
        own = layer.memory()
        if self.replaces:
            return {name: torch.empty_like(each) for name, each in own.items()}
        settings, room = self.session.settings, self._needed(layer)
        if settings.budget is None:  # each compression leaves more than the one before
            room += room // GROWTH
        else:  # a layer that is not full yet grows so far
            room = max(room, settings.budget + settings.every)
        shapes = {name: (*each.shape[:2], room, each.shape[3]) for name, each in own.items()}
        # an empty place has no weight, and a number that is not NaN
        return {name: each.new_zeros(shapes[name]) for name, each in own.items()}

    def _needed(self, layer: EvictingLayer) -> int:
        """The places that a layer needs until its next compression."""
        if self.replaces:
            return layer.stored
        return layer.stored + max(1, self.session.settings.every - (layer.seen - layer.evicted_at))

    def settle(self) -> bool:
        """Let the layers live in this memory, wherever they have moved to since the last step; False where
        the cache needs another step.
        """
        if not self.session.is_watching:
            return False
        for place, (layer, memory) in enumerate(zip(self.layers, self.memory, strict=True)):
            if self._needed(layer) > memory["keys"].shape[2]:
                return False
            is_here = layer._keys is memory["keys"] and layer.state is self._states[place]
            if not is_here and self._fits(layer, memory):
                layer.live_in(memory)
                self._states[place] = layer.state
            elif not is_here:
                return False
        shifts = self.session.reading.text.shifts
        gone = [] if self.replaces else [layer.seen - layer.stored for layer in self.layers]
        if self._told != (shifts, gone):
            self._told = shifts, gone
            self.shifts.copy_(torch.tensor(shifts)[:, None])
            if gone:
                self.gone.copy_(torch.tensor(gone))
        self.seen.fill_(self.session.reading.seen)
        return True

    def _fits(self, layer: EvictingLayer, memory: dict[str, torch.Tensor]) -> bool:
        """Whether what a layer stores can live in a memory."""
        if layer._keys is None or layer.ragged_slots is not None:
            return False
        own = layer.memory()
        return own.keys() == memory.keys() and all(
            own[name].shape[:2] == each.shape[:2] and (own[name].shape == each.shape or not self.replaces)
            for name, each in memory.items()
        )

    def take(self, tokens: torch.Tensor) -> None:
        """Write the tokens [B, 1] that come to where the step reads them."""
        reading = self.session.reading
        wanted = reading.rows, 1
        require(
            tokens.shape == wanted and not tokens.is_floating_point(),
            f"tokens: got {list(tokens.shape)} of {tokens.dtype}, wanted {list(wanted)} of torch.int64: one "
            "token for each row of the cache",
        )
        self.tokens.copy_(tokens)
        self.session.see_step(tokens)

    def run(self) -> torch.Tensor:
        """A forward of the model over this memory: the logits [B, vocabulary]."""
        ends = (self.seen - self.gone).split(1)
        try:
            self.session.is_stepping = True
            for layer, end in zip(self.layers, ends, strict=True):
                layer.clock = Clock(self.seen, end)
            positions = self.seen + self.shifts
            argument = versions.argument(self.cache)
            output = self.model(self.tokens, position_ids=positions, **argument, use_cache=True)
        finally:
            self.session.is_stepping = False
            for layer in self.layers:
                layer.clock = None
        return output.logits[:, -1]

    def count(self) -> None:
        """Count the token that a graph has stored, as `run` does."""
        for layer in self.layers:
            layer.count(self.replaces)
        session = self.session
        session.peak_tokens = max(session.peak_tokens, *(layer.longest for layer in self.layers))

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Let nothing be counted inside: while a graph is recorded, no token is stored."""
        before = [(layer.seen, layer.evicted_at, layer.stored) for layer in self.layers]
        peak = self.session.peak_tokens
        try:
            yield
        finally:
            self.session.peak_tokens = peak
            for layer, numbers in zip(self.layers, before, strict=True):
                layer.seen, layer.evicted_at, layer.stored = numbers


def has_graphs(device: torch.device) -> bool:
    """Whether a device runs CUDA graphs."""
    return device.type == "cuda"


def record(call: Callable[[], torch.Tensor], device: torch.device) -> tuple[Callable[[], None], torch.Tensor]:
    """Record what a call launches on a device, which does not run yet: what runs it, and its result in memory
    that each run writes.
    """
    graph = torch.cuda.CUDAGraph()
    with (
        torch.cuda.device(device),
        # other threads may go on with their own work
        torch.cuda.graph(graph, stream=torch.cuda.Stream(device), capture_error_mode="thread_local"),
    ):
        result = call()
    return graph.replay, result


def _rehearse(cache: EvictingCache) -> None:
    """Run the step of a copy some times. Raises UsageError
    where it waits for the GPU, which would spoil a recording.
    """
    twin = copy.deepcopy(cache)
    try:
        step = _Step(twin)
        refused = usage(
            f"model: got {type(step.model).__name__}, whose step waits for the GPU, wanted one that a CUDA "
            "graph can hold",
            RuntimeError,
        )
        with aside(step.device), step.uncounted():
            for _ in range(REHEARSALS):
                step.run()
            with refused, never_waiting():
                step.run()
    finally:
        twin.close()


@contextlib.contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """Run on a stream of its own, as torch asks of what comes before a recording."""
    now, own = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    own.wait_stream(now)
    with torch.cuda.stream(own):
        yield
    now.wait_stream(own)


@contextlib.contextmanager
def never_waiting() -> Iterator[None]:
    """Raise RuntimeError where the processor waits for a GPU."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _require_mode(device: torch.device) -> None:
    """Raise UsageError where gradients or torch.autocast are enabled."""
    require(
        not torch.is_grad_enabled(),
        "captured_step: got gradients enabled, wanted torch.no_grad(): a CUDA graph carries none",
    )
    is_available = torch.amp.is_autocast_available(device.type)
    require(
        not (is_available and torch.is_autocast_enabled(device.type)),
        "captured_step: got torch.autocast, wanted a model in one dtype",
    )


def require_capturable(cache: EvictingCache) -> None:
    """Raise UsageError for a cache whose step is not the same for each token."""
    session, settings = cache._session, cache._session.settings
    named = f"got {settings.method.name if settings.method else None}"
    require(cache.get_seq_length(), "cache: got an empty one, wanted one that has read its prompt")
    others = {type(layer).__name__ for layer in cache.layers if type(layer) is not EvictingLayer}
    require(
        not others,
        f"model: got layers with another cache ({', '.join(sorted(others))}), wanted full attention alone",
    )
    _require_mode(cache.layers[0].device)
    require(cache.model is not None, "model: got a cache whose model is gone, wanted it in use")
    require(
        settings.every,
        f"every: {named} without it, wanted a number of tokens: this cache grows with each token",
    )
    require(session.is_watching, "cache: got one that was closed, wanted an open one")
    devices = {str(layer.device) for layer in cache.layers}
    require(len(devices) == 1, f"model: got layers on {', '.join(sorted(devices))}, wanted one device")
    require(
        not any(map(math.isnan, session.reading.text.shifts)),
        "cache: got a text whose next position is not known, as after an image; wanted text alone",
    )
    require(
        all(layer.is_full for layer in cache.layers),
        f"method: {named}, whose heads or rows keep different numbers of tokens, wanted as many in each",
    )
    if any(layer.moments is not None for layer in cache.layers):
        _require_replacing(session, named)
    else:
        _require_appending(session, named)


def _require_replacing(session: Session, named: str) -> None:
    """Raise UsageError unless the next token takes the slot of another in each layer, and each later one."""
    require(
        session.settings.budget is not None,
        f"budget: {named} with a compression_ratio, wanted a budget: the cache of a ratio grows",
    )
    require(
        session.attending.step is not None and session.settings.every == 1,
        f"method: {named} with moments beside tokens that are stored behind the others, wanted a method "
        "whose tokens take the slots of others, with every=1, or one without +moments",
    )
    for index in session.settings.places:
        layer: EvictingLayer = session.layers[index]
        key = layer.slots()[0][:, :, :1]
        require(
            session.attending.replaces_a_token(index, layer, session.reading, key),
            f"cache: got {layer.stored} tokens in each head of layer {index}, wanted it full to its budget "
            f"of {session.settings.budget}",
        )


def _require_appending(session: Session, named: str) -> None:
    """Raise UsageError unless each layer only stores its tokens until the next compression."""
    method = session.settings.method
    assert method is not None
    reads = ", ".join(sorted(session.settings.captured))
    require(
        not reads,
        f"method: {named}, which reads {reads} of each token, wanted one that reads keys and values alone",
    )
    require(
        not (method.traits & {"evicts_first", "per_query"}),
        f"method: {named}, which decides before each token attends, wanted one that decides afterwards",
    )
    require(
        all(layer.is_plain for layer in session.layers),
        f"method: {named}, which adds a bias to its tokens, wanted a method without one",
    )
