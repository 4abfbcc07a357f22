"""A captured step: it waits for nothing, does the same for each token in the same memory, and gives what the
cache gives by itself. A stand-in records and replays it, as a CUDA graph does.
"""

import contextlib
import copy
import doctest
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from conftest import tiny_llama
from tools import refused, says
from tools.reading import IDS, cached, loaded, padded, read, same, small
from tools.recording import NeverWaiting, Trace, record
from transformers import DynamicCache

from evictionary import EvictingCache
from evictionary.cache import captured_step as captured, checks
from evictionary.cache.captured_step import CapturedStep, captured_step
from evictionary.cache.session import Session
from evictionary.errors import UsageError
from evictionary.methods import catalogue
from evictionary.models.load import load
from evictionary.optimized import momentkv

ROWS = torch.randint(3, 259, (3, 90), generator=torch.Generator().manual_seed(4))
IN_PLACE: tuple[str, dict[str, Any]] = ("momentkv", {"budget": 16})
IN_BLOCKS: list[tuple[str, dict[str, Any]]] = [
    ("keydiff", {"budget": 16, "every": 8}),
    ("lagkv", {"compression_ratio": 0.5, "every": 8, "options": small("lagkv")}),
]
CACHES = [IN_PLACE, *IN_BLOCKS]
NAMES = [name for name, _ in CACHES]


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a GPU: NaN is not looked for, and MomentKV scores each token."""
    monkeypatch.setattr(checks, "is_finite", lambda states: True)
    monkeypatch.setattr(momentkv, "FEW", 1_000_000)


@pytest.fixture
def with_graphs(monkeypatch: pytest.MonkeyPatch, as_on_a_gpu: None) -> list[int]:
    """Graphs by the stand-in; a number for each recording: of its calls."""
    recorded: list[int] = []

    def recording(call: Callable[[], torch.Tensor], device: torch.device) -> Any:
        replay, result = record(call, device)
        recorded.append(len(replay.__self__.calls))  # type: ignore[attr-defined]
        return replay, result

    monkeypatch.setattr(captured, "has_graphs", lambda device: True)
    monkeypatch.setattr(captured, "record", recording)
    monkeypatch.setattr(captured, "aside", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(captured, "never_waiting", NeverWaiting)
    return recorded


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def pair(model: Any, ids: torch.Tensor, name: str, **named: Any) -> tuple[EvictingCache, EvictingCache]:
    return cached(model, ids, name, **named), cached(model, ids, name, **named)


def require_near(got: torch.Tensor, wanted: torch.Tensor, is_exact: bool) -> None:
    torch.testing.assert_close(got, wanted, rtol=0 if is_exact else 1e-4, atol=0 if is_exact else 2e-4)


def memory_of(cache: EvictingCache) -> list[int]:
    """Where the states of all layers lie."""
    return [each.data_ptr() for layer in cache.layers for each in layer.memory().values()]


# What a graph can hold
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "named"), CACHES, ids=NAMES)
def test_a_step_waits_for_nothing_and_is_the_same_for_each_token(
    as_on_a_gpu: None, name: str, named: dict[str, Any]
) -> None:
    model = tiny_llama()
    step = captured_step(cached(model, ROWS[:, :40], name, **named))
    inner, found, places = step._step, [], []
    for place in range(3):
        assert inner.settle()
        inner.take(ROWS[:, 40 + place, None])
        with Trace() as trace:
            inner.run()
        found.append(trace.calls)
        places.append(memory_of(step.cache))
    assert found[0] == found[1] == found[2] and len(found[0]) > 50
    assert places[0] == places[1] == places[2]


def test_what_the_cache_does_by_itself_is_not_the_same_for_each_token(as_on_a_gpu: None) -> None:
    """So the test before this one can fail."""
    model = tiny_llama()
    cache, found = cached(model, IDS[:, :41], "momentkv", sizes=[40, 1], budget=16), []
    for token in (IDS[:, 41:42], IDS[:, 42:43]):
        with Trace() as trace:
            model(token, **cache.argument)
        found.append(trace.calls)
    assert len(found[0]) == len(found[1]) and found[0] != found[1]
    with pytest.raises(RuntimeError, match="waits for a GPU"), NeverWaiting():
        torch.ones(2).sum().item()


# The same tokens as the cache by itself
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "named"), CACHES, ids=NAMES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("graphs", [False, True], ids=["without", "with"])
def test_a_step_gives_what_the_cache_gives(
    request: pytest.FixtureRequest, name: str, named: dict[str, Any], graphs: bool, attention: str
) -> None:
    """Bit for bit where a token takes another's place; a mask over empty places rounds otherwise."""
    if graphs:
        recorded = request.getfixturevalue("with_graphs")
    model = tiny_llama()
    # eager makes a mask in each forward, which the cache does not read
    model.set_attn_implementation(attention)
    ours, theirs = pair(model, ROWS[:, :40], name, **named)
    step = captured_step(ours)
    assert step.is_captured == graphs
    for token in ROWS[:, 40:].split(1, dim=1):
        require_near(step(token), read(model, token, theirs)[:, -1], is_exact=name == "momentkv")
    assert ours.get_seq_length() == theirs.get_seq_length() == 90
    assert (ours.tokens_kept, ours.peak_tokens) == (theirs.tokens_kept, theirs.peak_tokens)
    for own, other in zip(ours.layers, theirs.layers, strict=True):
        assert torch.equal(own.positions, other.positions) and own.evicted_at == other.evicted_at
    if name == "momentkv":
        same(ours, theirs)
        assert all(
            torch.equal(one, other)
            for own, its in zip(ours.layers, theirs.layers, strict=True)
            for one, other in zip(own.moments, its.moments, strict=True)
        )
    if graphs:  # one recording serves a budget; the cache of a ratio grows out of its memory
        assert len(recorded) == 1 if ours.budget else 1 < len(recorded) < 5


def test_the_example_gives_what_it_shows(model: Any, prompt: torch.Tensor) -> None:
    (example,) = doctest.DocTestFinder().find(captured_step, "captured_step")
    inputs = {"input_ids": prompt.repeat(1, 2)}
    example.globs = {"torch": torch, "EvictingCache": EvictingCache, "model": model, "inputs": inputs}
    runner = doctest.DocTestRunner()
    assert runner.run(example) == (0, 4)


@pytest.mark.parametrize("layers", [2, 6])
def test_a_replay_costs_python_as_many_calls_of_torch_for_any_number_of_layers(
    monkeypatch: pytest.MonkeyPatch, with_graphs: list[int], layers: int
) -> None:
    model = tiny_llama(num_hidden_layers=layers)
    step = captured_step(cached(model, IDS[:, :40], "momentkv", budget=16))
    token = IDS[:, 40:41]
    monkeypatch.setattr(step, "_replay", lambda: None)
    with Trace() as trace:
        step(token)
    # how many tokens there were, the token, its id in the text, and the logits
    called = [call.split(".")[1] for call in trace.calls]
    assert called == ["fill_", "copy_", "_to_copy", "clone"]


def test_a_replay_gives_the_tokens_of_the_embedded_model_bit_for_bit(with_graphs: list[int]) -> None:
    model, tokenizer = load("embedded")
    ids = tokenizer("The key of the safe is 4817263. " * 12, return_tensors="pt")["input_ids"]
    ours, theirs = pair(model, ids, "momentkv", budget=64)
    step = captured_step(ours)
    token = ids[:, -1:]
    for _ in range(20):
        got, wanted = step(token), read(model, token, theirs)[:, -1]
        assert torch.equal(got, wanted)
        token = wanted.argmax(dim=-1, keepdim=True)
    same(ours, theirs)
    assert len(with_graphs) == 1 and len({tuple(token.shape)}) == 1


def test_a_recording_changes_nothing(with_graphs: list[int]) -> None:
    model = tiny_llama()
    ours, theirs = pair(model, IDS[:, :40], *IN_PLACE[:1], **IN_PLACE[1])
    captured_step(ours)
    assert ours.get_seq_length() == 40 and ours.peak_tokens == theirs.peak_tokens
    same(ours, theirs)


@pytest.mark.parametrize(("name", "named"), CACHES, ids=NAMES)
def test_what_is_done_with_a_cache_in_between(
    with_graphs: list[int], tmp_path: Path, name: str, named: dict[str, Any]
) -> None:
    """Saving sorts the tokens into other memory; the model reads on by itself; a copy goes its own way."""
    model = tiny_llama()
    ours, theirs = pair(model, ROWS[:, :40], name, **named)
    step = captured_step(ours)
    step(ROWS[:, 40:41])
    read(model, ROWS[:, 40:41], theirs)
    twin = copy.deepcopy(ours)
    for token in ROWS[:, 41:44].split(1, dim=1):
        read(model, token, ours), read(model, token, theirs)
    for cache in (ours, theirs):
        loaded(cache, tmp_path, model).close()
    for token in ROWS[:, 44:50].split(1, dim=1):
        require_near(step(token), read(model, token, theirs)[:, -1], is_exact=name == "momentkv")
    rest = read(model, ROWS[:, 50:52], ours), read(model, ROWS[:, 50:52], theirs)
    require_near(*rest, is_exact=name == "momentkv")
    assert twin.get_seq_length() == 41 and ours._session.reading.text.ids.shape == (3, 52)
    again = cached(model, ROWS[:, :41], name, sizes=[40, 1], **named)
    require_near(read(model, ROWS[:, 41:43], twin), read(model, ROWS[:, 41:43], again), is_exact=False)


@pytest.mark.parametrize(("name", "named"), CACHES, ids=NAMES)
def test_another_prompt_and_other_rows_need_no_other_step(
    with_graphs: list[int], name: str, named: dict[str, Any]
) -> None:
    model = tiny_llama()
    ours, theirs = pair(model, ROWS[:, :40], name, **named)
    step = captured_step(ours)
    step(ROWS[:, 40:41])
    for cache in (ours, theirs):
        cache.reset()
        read(model, ROWS[:, 20:60], cache)
        cache.batch_select_indices(torch.tensor([2, 0]))
    rows = ROWS[[2, 0]]
    for token in rows[:, 60:70].split(1, dim=1):
        require_near(step(token), read(model, token, theirs)[:, -1], is_exact=name == "momentkv")


@pytest.mark.parametrize(("name", "named"), CACHES[:2], ids=NAMES[:2])
def test_rows_that_were_padded_keep_their_positions(
    with_graphs: list[int], name: str, named: dict[str, Any]
) -> None:
    model, (ids, given) = tiny_llama(), padded(30, 26)
    ours, theirs = (cached(model, ids, name, given=given, **named) for _ in range(2))
    step = captured_step(ours)
    positions, mask = given["position_ids"][:, -1:], given["attention_mask"]
    for token in ROWS[:2, :12].split(1, dim=1):
        positions, mask = positions + 1, torch.nn.functional.pad(mask, (0, 1), value=1)
        wanted = read(model, token, theirs, position_ids=positions, attention_mask=mask)[:, -1]
        require_near(step(token), wanted, is_exact=name == "momentkv")


def test_a_cache_in_blocks_need_not_be_full_and_one_recording_serves_it(with_graphs: list[int]) -> None:
    model = tiny_llama()
    ours, theirs = pair(model, ROWS[:, :10], "keydiff", budget=24, every=6)
    step = captured_step(ours)
    for token in ROWS[:, 10:60].split(1, dim=1):
        require_near(step(token), read(model, token, theirs)[:, -1], is_exact=False)
    assert len(with_graphs) == 1 and ours.tokens_kept == theirs.tokens_kept < 30


def test_a_cache_that_the_model_has_filled_beyond_the_memory_of_its_step(with_graphs: list[int]) -> None:
    """A turn of many tokens stays as it is where a method keeps all of it; a step is recorded anew."""
    model, named = tiny_llama(), {"compression_ratio": 0.0, "every": 8}
    ours, theirs = pair(model, ROWS[:, :20], "keydiff", **named)
    step = captured_step(ours)
    for cache in (ours, theirs):
        read(model, ROWS[:, 20:70], cache)
    for token in ROWS[:, 70:80].split(1, dim=1):
        require_near(step(token), read(model, token, theirs)[:, -1], is_exact=False)
    assert len(with_graphs) >= 2


def test_a_step_that_cannot_be_recorded_again_replays_nothing_else(
    with_graphs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, named = tiny_llama(), {"compression_ratio": 0.0, "every": 8}
    ours, theirs = pair(model, ROWS[:, :20], "keydiff", **named)
    step, failing = captured_step(ours), Mock(side_effect=UsageError("no graph, wanted one"))
    for cache in (ours, theirs):
        read(model, ROWS[:, 20:70], cache)
    with monkeypatch.context() as patched:
        patched.setattr(captured, "record", failing)
        for _ in range(2):
            refused(lambda: step(ROWS[:, 70:71]), "no graph")
    assert ours.get_seq_length() == 70
    require_near(step(ROWS[:, 70:71]), read(model, ROWS[:, 70:71], theirs)[:, -1], is_exact=False)


def test_layers_of_several_budgets_are_captured(with_graphs: list[int]) -> None:
    model = tiny_llama(num_hidden_layers=4)
    for name, named in (("keydiff", {"every": 6}), ("momentkv", {})):
        ours, theirs = pair(model, ROWS[:, :60], f"{name}+pyramid_kv", budget=20, **named)
        assert len({layer.stored for layer in ours.layers}) > 1
        step = captured_step(ours)
        for token in ROWS[:, 60:80].split(1, dim=1):
            require_near(step(token), read(model, token, theirs)[:, -1], is_exact=name == "momentkv")


def test_what_a_gpu_has_no_memory_to_compress_stays_and_the_step_goes_on(
    monkeypatch: pytest.MonkeyPatch, with_graphs: list[int]
) -> None:
    """As in the cache by itself: the layers grow, and compress with a later token."""
    model = tiny_llama()
    ours, theirs = pair(model, IDS[:, :20], "keydiff", budget=16, every=4)
    step, compress, failing = captured_step(ours), Session.compress, [1] * 4

    def compressing(session: Session, layer_index: int) -> None:
        if failing and failing.pop():
            raise torch.OutOfMemoryError
        compress(session, layer_index)

    found = []
    monkeypatch.setattr(Session, "compress", compressing)
    for cache, call in ((ours, step), (theirs, lambda token: read(model, token, theirs)[:, -1])):
        failing[:] = [1] * 4
        with pytest.warns(UserWarning, match="out of memory, so 20 tokens stay until the next compression"):
            found.append(torch.cat([call(token) for token in IDS[:, 20:40].split(1, dim=1)]))
        assert not failing and cache.peak_tokens == 22
    require_near(*found, is_exact=False)


@pytest.mark.parametrize("name", catalogue.names())
def test_each_method_is_captured_or_refused_for_a_reason(with_graphs: list[int], name: str) -> None:
    model, sizes = tiny_llama(), {"budget": 16} if name == "momentkv" else {"budget": 16, "every": 8}
    if name == "lagkv":
        sizes = {"compression_ratio": 0.5, "every": 8}
    found = ""
    try:
        ours, theirs = pair(model, IDS[:, :40], name, options=small(name), **sizes)
        step = captured_step(ours)
    except ValueError as error:
        found = str(error)
    if name in ("momentkv", "keydiff", "lagkv", "knorm"):
        assert not found
    if found:
        says(found, ", wanted ")
        return
    for token in IDS[:, 40:].split(1, dim=1):
        require_near(step(token), read(model, token, theirs)[:, -1], is_exact=name == "momentkv")
    assert [layer.positions.tolist() for layer in ours.layers] == [
        layer.positions.tolist() for layer in theirs.layers
    ]


def test_what_torch_has_saved_for_a_gradient_is_not_changed_in_silence(with_graphs: list[int]) -> None:
    """The graph writes past torch, which is told of it."""
    model = tiny_llama()
    cache = cached(model, IDS[:, :40], "keydiff", budget=16, every=8)
    step = captured_step(cache)
    step(IDS[:, 40:41])
    with torch.enable_grad():
        loss = model(IDS[:, 41:42], **cache.argument).logits.sum()
    step(IDS[:, 42:43])
    refused(loss.backward, "modified by an inplace operation", RuntimeError)


def test_the_same_in_inference_mode(with_graphs: list[int]) -> None:
    model = tiny_llama()
    with torch.inference_mode():
        ours = cached(model, IDS[:, :40], "momentkv", budget=16)
        step = captured_step(ours)
        first = step(IDS[:, 40:41])
    theirs = cached(model, IDS[:, :40], "momentkv", budget=16)
    assert torch.equal(first, read(model, IDS[:, 40:41], theirs)[:, -1])
    assert torch.equal(step(IDS[:, 41:42]), read(model, IDS[:, 41:42], theirs)[:, -1])


# What cannot be captured
# ------------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "not full": (
        "momentkv",
        {"budget": 50},
        "got 40 tokens in each head of layer 0, wanted it full to .* 50",
    ),
    "a ratio": ("momentkv", {"compression_ratio": 0.5}, "budget: got momentkv with a compression_ratio"),
    "moments": ("momentkv", {"budget": 16, "every": 4}, "moments beside tokens that are stored behind"),
    "other moments": ("keydiff+moments", {"budget": 16, "every": 4}, "or one without .moments"),
    "ragged": ("momentkv+ada_kv", {"budget": 16}, "whose heads or rows keep different numbers"),
    "no every": ("keydiff", {"budget": 16}, "every: got keydiff without it, .* grows with each token"),
    "queries": ("snapkv", {"budget": 16, "every": 4, "options": small("snapkv")}, "reads queries of each"),
    "full": (None, {}, "every: got None without it"),
}


@pytest.mark.parametrize(("name", "named", "message"), REFUSED.values(), ids=REFUSED)
def test_a_cache_without_a_step_of_one_size_is_refused(
    name: str, named: dict[str, Any], message: str
) -> None:
    model = tiny_llama()
    ours, theirs = pair(model, IDS[:, :40], name, **named)
    refused(lambda: captured_step(ours), message)
    require_near(read(model, IDS[:, 40:42], ours), read(model, IDS[:, 40:42], theirs), is_exact=True)


def test_what_is_not_ready_is_refused() -> None:
    model = tiny_llama()
    cache = EvictingCache(model, "momentkv", budget=16)
    refused(lambda: captured_step(cache), "cache: got an empty one, wanted one that has read its prompt")
    read(model, IDS[:, :40], cache)
    with torch.enable_grad():
        refused(lambda: captured_step(cache), "got gradients enabled, wanted torch.no_grad")
    with torch.autocast("cpu", torch.bfloat16):
        refused(lambda: captured_step(cache), "got torch.autocast, wanted a model in one dtype")
    cache.close()
    refused(lambda: captured_step(cache), "cache: got one that was closed")
    left = cached(tiny_llama(), IDS[:, :40], "momentkv", budget=16)
    gc.collect()
    refused(lambda: captured_step(left), "got a cache whose model is gone")
    ids, given = padded(30, 26)  # of two rows, one stores more than the other
    whole = cached(model, ids, "keydiff", budget=60, every=8, given=given)
    refused(lambda: captured_step(whole), "got keydiff, whose heads or rows keep different numbers of tokens")


def test_layers_with_another_cache_are_refused() -> None:
    model = tiny_llama(
        layer_types=["full_attention", "sliding_attention"], sliding_window=8, use_sliding_window=True
    )
    if type(DynamicCache(config=model.config).layers[1]).__name__ != "DynamicSlidingWindowLayer":
        pytest.fail("the model of this test has no sliding window")
    cache = cached(model, IDS[:, :40], "keydiff", budget=16, every=8)
    refused(
        lambda: captured_step(cache), r"another cache \(DynamicSlidingWindowLayer\), wanted full attention"
    )


def refused_tokens() -> list[torch.Tensor]:
    return [IDS[:, 40:42], IDS[0, 40:41], ROWS[:, :1], torch.ones(1, 1)]


@pytest.mark.parametrize("tokens", refused_tokens(), ids=["two", "one axis", "three rows", "floats"])
def test_other_tokens_are_refused_and_nothing_is_read(with_graphs: list[int], tokens: torch.Tensor) -> None:
    model = tiny_llama()
    ours, theirs = pair(model, IDS[:, :40], "momentkv", budget=16)
    step = captured_step(ours)
    refused(lambda: step(tokens), "tokens: got .*, wanted .1, 1. of torch.int64: one token for each row")
    with torch.enable_grad():
        refused(lambda: step(IDS[:, 40:41]), "got gradients enabled")
    assert torch.equal(step(IDS[:, 40:41]), read(model, IDS[:, 40:41], theirs)[:, -1])


def test_a_step_of_a_cache_that_is_gone_or_changed_is_refused() -> None:
    model = tiny_llama()
    cache = cached(model, IDS[:, :40], "momentkv", budget=16)
    step = captured_step(cache)
    assert isinstance(step, CapturedStep) and not step.is_captured
    step(IDS[:, 40:41])
    cache.reset()
    refused(lambda: step(IDS[:, 41:42]), "got an empty one")
    read(model, IDS[:, :8], cache)
    refused(lambda: step(IDS[:, 8:9]), "got 8 tokens in each head of layer 0, wanted it full")
    cache.close()
    refused(lambda: step(IDS[:, 8:9]), "got one that was closed")


def test_a_model_that_waits_is_refused_before_a_recording(
    with_graphs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama()
    ours, theirs = pair(model, IDS[:, :40], "momentkv", budget=16)
    waiting = model.model.norm.register_forward_hook(
        lambda module, given, output: output.sum().item() and None
    )
    refused(lambda: captured_step(ours), "got LlamaForCausalLM, whose step waits for the GPU")
    waiting.remove()
    assert not with_graphs
    same(ours, theirs)
    assert torch.equal(read(model, IDS[:, 40:41], ours), read(model, IDS[:, 40:41], theirs))
