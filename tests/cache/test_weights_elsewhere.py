"""Models whose weights are no plain tensors at hand: offloaded
by accelerate, packed, behind an adapter, or nowhere.

torchao, PEFT and others are not installed for the tests. What stands in for them refuses what they refuse.
"""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from conftest import tiny_llama
from tools import refused
from tools.families import build
from tools.reading import IDS, cached, loaded, near, padded, positions_of, read, same, small
from torch.utils._pytree import tree_map
from transformers import LlamaForCausalLM

from evictionary import EvictingCache
from evictionary.cache import calibration, file
from evictionary.cache.model_hooks import attention_modules
from evictionary.evaluation.calibration import of_text
from evictionary.evaluation.questions import ask, prefill
from evictionary.models.load import load
from evictionary.models.queries import project, rotation
from evictionary.models.weights import device_of, devices_of_layers, linear_map, output_projection

READING = ["keydiff", "expected_attention", "gvote", "compactor", "criticalkv", "kvzap", "snapkv+ada_kv"]
"""Methods, most of which read weights or the device."""
CPU = torch.device("cpu")
PARTS = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "disk"}


def on_disk(model: Any, folder: Path) -> Any:
    return disk_offload(model, str(folder), execution_device=CPU)


def split(model: Any, folder: Path) -> Any:
    places = PARTS | {"model.layers.0": "disk", "model.layers.1": "cpu"}
    return dispatch_model(model, places, main_device="cpu", offload_dir=str(folder))


def in_blocks(name: str) -> Callable[[Any, Path], Any]:
    """Hooks that bring the weights of a whole module before its forward."""
    return lambda model, _: cpu_offload(model, execution_device=CPU, preload_module_classes=[name])


AWAY: dict[str, Callable[[Any, Path], Any]] = {
    "in memory": lambda model, _: cpu_offload(model, execution_device=CPU, offload_buffers=True),
    "on the disk": on_disk,
    "split": split,
    "attention in blocks": in_blocks("LlamaAttention"),
    "layers in blocks": in_blocks("LlamaDecoderLayer"),
}


def both(name: str, folder: Path, **named: Any) -> tuple[Any, Any]:
    """The tiny model, offloaded and plain."""
    return AWAY[name](tiny_llama(**named), folder), tiny_llama(**named)


@pytest.mark.parametrize("method", READING)
@pytest.mark.parametrize("away", AWAY)
def test_an_offloaded_model_does_what_the_model_does(tmp_path: Path, away: str, method: str) -> None:
    """The same tokens stay, now and once they are compressed outside of a forward; files go both ways."""
    models = both(away, tmp_path, tie_word_embeddings=True)
    every = {} if method in ("compactor", "kvzap") else {"every": 8}
    caches = [cached(each, IDS[:, :40], method, 0.5, small(method), **every) for each in models]
    for model, cache in zip(models, caches, strict=True):
        read(model, IDS[:, 40:43], cache)
        if every:
            cache.compress()
    same(*caches)
    swapped = [loaded(cache, tmp_path, model) for cache, model in zip(caches, models[::-1], strict=True)]
    near(*([read(model, IDS[:, 43:47], cache)] for cache, model in zip(swapped, models[::-1], strict=True)))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("away", AWAY)
def test_the_fingerprint_is_the_same_wherever_the_weights_are(tmp_path: Path, away: str, tied: bool) -> None:
    offloaded, model = both(away, tmp_path, tie_word_embeddings=tied)
    assert file.fingerprint(offloaded) == file.fingerprint(model)
    another, _ = both(away, tmp_path / "another", tie_word_embeddings=tied, vocab_size=299)
    assert file.fingerprint(another) != file.fingerprint(model)


@pytest.mark.parametrize("away", AWAY)
def test_a_calibration_of_an_offloaded_model_is_that_of_the_model(tmp_path: Path, away: str) -> None:
    text = torch.randint(3, 259, (1, 300), generator=torch.Generator().manual_seed(8))
    models = both(away, tmp_path, max_position_embeddings=512)
    for model in models:
        calibration.write(model, of_text(model, text), tmp_path / "text")
    found = [calibration.read(model, tmp_path / "text") for model in models]
    torch.testing.assert_close(*found)
    options = {"calibration": str(tmp_path / "text")}
    same(*(cached(model, IDS, "triattention", budget=20, options=options) for model in models))


@pytest.mark.parametrize("method", ["keydiff", "snapkv+ada_kv"])
def test_learned_sinks_of_an_offloaded_model_take_part(tmp_path: Path, method: str) -> None:
    plain, offloaded = build("gpt-oss"), on_disk(build("gpt-oss"), tmp_path)
    caches = [cached(each, IDS[:, :40], method, 0.5, small(method)) for each in (plain, offloaded)]
    near(
        *([read(each, IDS[:, 40:44], cache)] for each, cache in zip((plain, offloaded), caches, strict=True))
    )


def test_questions_are_asked_of_an_offloaded_model(tmp_path: Path, tokenizer: Any) -> None:
    offloaded, model = both("on the disk", tmp_path)
    answers = []
    for each in (offloaded, model):
        cache = EvictingCache(each, "keydiff", 0.5)
        prefill(each, IDS[:, :30], cache)
        answers.append(ask(each, tokenizer, cache, IDS[:, 30:34], max_new_tokens=4).token_ids)
    assert answers[0] == answers[1]


class Whole(dict[str, torch.Tensor]):
    """The weights of a model, which must not be copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise AssertionError("copied")


def test_rope_is_asked_without_the_weights_of_the_model_and_stays_as_it_is(tmp_path: Path) -> None:
    """The hook holds all weights of a model that lies in memory: to copy it for a rotation copies them."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    offloaded, model = both("in memory", tmp_path, rope_parameters=rope, max_position_embeddings=32)
    rotary = offloaded.model.rotary_emb
    rotary._hf_hook.weights_map = Whole()
    before = rotary.inv_freq.clone()
    near(*(rotation(each, 0, torch.arange(100)) for each in (offloaded, model)))
    assert torch.equal(rotary.inv_freq, before) and rotary.max_seq_len_cached == 32


def hooked(device: str | None) -> Any:
    return SimpleNamespace(hooks=[SimpleNamespace(execution_device=device)])


def test_a_module_computes_where_its_nearest_hook_says(model: LlamaForCausalLM) -> None:
    assert device_of(model) == CPU and devices_of_layers(model) == {0: CPU, 1: CPU}
    spread: Any = tiny_llama().to("meta")
    assert device_of(spread) == CPU
    spread._hf_hook, spread.model.layers[1]._hf_hook = hooked("cuda:0"), hooked("cuda:1")
    spread.model.layers[0].self_attn.q_proj._hf_hook = hooked("cuda:3")
    assert device_of(spread) == torch.device("cuda:0")
    assert devices_of_layers(spread) == {0: torch.device("cuda:0"), 1: torch.device("cuda:1")}
    spread._hf_hook = hooked(None)
    assert devices_of_layers(spread) == {0: torch.device("cuda:3"), 1: torch.device("cuda:1")}


# nowhere


@pytest.mark.parametrize("method", ["keydiff", "gvote", None])
def test_a_model_without_numbers_is_refused_where_the_cache_is_made(
    tmp_path: Path, model: LlamaForCausalLM, method: str | None
) -> None:
    path = tmp_path / "cache"
    cached(model, IDS, method, 0.5).save(path)
    absent = tiny_llama().to("meta")
    told = r"model: got LlamaForCausalLM without numbers in model\.embed_tokens\.weight \(device meta\)"
    refused(lambda: EvictingCache(absent, method, 0.5), told)
    refused(lambda: EvictingCache.load(path, absent), told)


def test_a_model_whose_hooks_bring_nothing_is_refused_at_its_first_forward() -> None:
    absent = tiny_llama().to("meta")
    absent.register_forward_pre_hook(lambda *given: None)
    cache = EvictingCache(absent, "keydiff", 0.5)
    refused(lambda: read(absent, IDS.to("meta"), cache), "got states on the device meta")


def write_gguf(model: LlamaForCausalLM, path: Path) -> None:
    """The tiny model as a GGUF file, with a tokenizer of single letters."""
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    letters = [chr(300 + index) for index in range(config.vocab_size - 2)]
    # transformers 5.17 reads a list of one merge as its letters
    merges = [letters[:2], letters[1:3]]
    words = letters + ["".join(each) for each in merges]
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * len(words))
    writer.add_token_merges([" ".join(each) for each in merges])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if "q_proj" in name or "k_proj" in name:  # llama.cpp keeps the two channels of a rotation together
            tensor = tensor.unflatten(0, (-1, 2, config.head_dim // 2)).transpose(1, 2).flatten(0, 2)
        writer.add_tensor(names.get_name(name, (".weight",)), tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_loaded_by_its_name(tmp_path: Path, model: LlamaForCausalLM) -> None:
    write_gguf(model, tmp_path / "tiny.gguf")
    unpacked, _ = load(str(tmp_path / "tiny.gguf"))
    caches = [cached(each, IDS[:, :40], "criticalkv", 0.5, small("criticalkv")) for each in (unpacked, model)]
    same(*caches)
    loaded(caches[0], tmp_path, unpacked)
    refused(lambda: load(str(tmp_path)), "a folder without a config.json, wanted one of its files")
    refused(
        lambda: load(str(tmp_path / "cache")), "a file, wanted the folder with its config.json, or a GGUF"
    )


# packed


class Packed(torch.Tensor):
    """Eight bits and a scale for each row, as torchao packs
    a weight: it can be multiplied and unpacked, no more.
    """

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> "Packed":
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def dequantize(self) -> torch.Tensor:
        return self.codes * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        if func in (torch.ops.aten.t.default, torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            return func(*tree_map(lambda each: each.dequantize() if isinstance(each, cls) else each, args))
        raise NotImplementedError(f"Packed: {func} is not implemented")


class Flattened(Packed):
    """As torchao's own: it says what it is packed in, and nothing else unpacks it."""

    dequantize = torch.Tensor.dequantize  # type: ignore[assignment]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        plain = tree_map(lambda each: Packed(each.codes, each.scale) if isinstance(each, cls) else each, args)
        return Packed.__torch_dispatch__(func, types, plain, kwargs)


class PackedLinear(torch.nn.Module):
    """As GPTQ and AWQ keep a layer: integers and scales in buffers, and no weight."""

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states @ (self.codes * self.scale).T


class Hidden(torch.nn.Module):
    """As torch and bitsandbytes keep a layer: numbers that are neither parameters nor buffers, but saved."""

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        super().__init__()
        self.codes, self.scale = codes, scale

    def get_extra_state(self) -> Any:
        return {"packed": (self.codes, self.scale), "kind": "rows"}

    forward = PackedLinear.forward


def with_subclass(kind: type[Packed], codes: torch.Tensor, scale: torch.Tensor) -> torch.nn.Module:
    linear = torch.nn.Linear(*codes.T.shape, bias=False)
    linear.weight = torch.nn.Parameter(kind(codes, scale), requires_grad=False)
    return linear


PACKED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.nn.Module]] = {
    "a subclass that unpacks": lambda *given: with_subclass(Packed, *given),
    "a subclass that is flattened": lambda *given: with_subclass(Flattened, *given),
    "integers in buffers": PackedLinear,
    "numbers beside": Hidden,
}


def packed(how: str) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """The tiny model with packed projections, and the plain model with the numbers that these unpack to."""
    model, plain = tiny_llama(), tiny_llama()
    for layers in zip(model.model.layers, plain.model.layers, strict=True):
        for name in ("q_proj", "o_proj"):
            weight = getattr(layers[1].self_attn, name).weight.data
            scale = weight.abs().amax(dim=1, keepdim=True) / 127
            codes = (weight / scale).round().to(torch.int8)
            weight.copy_(codes * scale)
            setattr(layers[0].self_attn, name, PACKED[how](codes, scale))
    return model, plain


@pytest.mark.parametrize("method", READING)
@pytest.mark.parametrize("how", PACKED)
def test_packed_weights_are_what_they_compute(tmp_path: Path, how: str, method: str) -> None:
    models = packed(how)
    caches = [cached(each, IDS[:, :40], method, 0.5, small(method)) for each in models]
    assert [positions_of(layer) for layer in caches[0].layers] == [
        positions_of(layer) for layer in caches[1].layers
    ]
    caches[0] = loaded(caches[0], tmp_path, models[0])
    near(*([read(model, IDS[:, 40:44], cache)] for model, cache in zip(models, caches, strict=True)))


@pytest.mark.parametrize("how", PACKED)
def test_one_packed_number_makes_another_model(how: str) -> None:
    model, _ = packed(how)
    own = file.fingerprint(model)
    assert own == file.fingerprint(packed(how)[0]) != file.fingerprint(tiny_llama())
    projection: Any = model.model.layers[1].self_attn.o_proj
    holder = projection.weight if hasattr(projection, "weight") else projection
    for numbers in (holder.codes, holder.scale):
        kept = numbers[-2, -1].clone()
        numbers[-2, -1] += 1
        assert file.fingerprint(model) != own
        numbers[-2, -1] = kept
    assert file.fingerprint(model) == own


def test_weights_that_no_one_can_read_are_refused_in_a_sentence(tmp_path: Path) -> None:
    class Closed(Flattened):
        def __getattribute__(self, name: str) -> Any:
            if name == "__tensor_flatten__":
                raise AttributeError(name)
            return super().__getattribute__(name)

    model, _ = packed("a subclass that is flattened")
    projection: Any = model.model.layers[1].self_attn.o_proj
    weight = projection.weight
    projection.weight = torch.nn.Parameter(Closed(weight.codes, weight.scale), requires_grad=False)
    cache = cached(model, IDS, "criticalkv", 0.5, small("criticalkv"))
    refused(lambda: cache.save(tmp_path / "cache"), "got weights of the type Closed")


def test_torchs_own_eight_bits_are_read_saved_and_loaded(tmp_path: Path, model: LlamaForCausalLM) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        made = [
            torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {torch.nn.Linear}) for _ in range(2)
        ]
    cache = cached(made[0], IDS[:, :40], "criticalkv", 0.5, small("criticalkv"))
    projection: Any = attention_modules(made[0])[1].o_proj  # type: ignore[union-attr]
    wanted = projection.weight().dequantize().T.unflatten(0, (4, 8))
    near([output_projection(attention_modules(made[0])[1], torch.empty(8))], [wanted], rtol=0.01)
    again = loaded(cache, tmp_path, made[1])
    near(*([read(each, IDS[:, 40:44], own)] for each, own in zip(made, (cache, again), strict=True)))
    assert file.fingerprint(made[0]) != file.fingerprint(model)


# adapters


class Adapter(torch.nn.Module):
    """As PEFT's Linear with LoRA: the old layer, and two small ones beside it under the names of adapters."""

    adapter_layer_names = ("lora_A", "lora_B")

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.scaling, self.active_adapters = base, {"mine": 2.0, "other": 1.0}, ["mine"]
        self.disable_adapters = self.merged = False
        self.lora_A, self.lora_B = (
            torch.nn.ModuleDict({name: torch.nn.Linear(*size, bias=False) for name in self.scaling})
            for size in ((base.in_features, 4), (4, base.out_features))
        )

    def added(self, states: torch.Tensor) -> Any:
        on = [] if self.disable_adapters or self.merged else self.active_adapters
        return sum(self.lora_B[name](self.lora_A[name](states)) * self.scaling[name] for name in on)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.base_layer(states) + self.added(states)

    @torch.no_grad()
    def merge(self) -> None:
        self.base_layer.weight += self.added(torch.eye(self.base_layer.in_features)).T
        self.merged = True


def adapted() -> tuple[LlamaForCausalLM, list[Adapter]]:
    model, layers = tiny_llama(), []
    torch.manual_seed(4)
    for layer in model.model.layers:
        for name in ("q_proj", "o_proj"):
            layers.append(Adapter(getattr(layer.self_attn, name)))
            setattr(layer.self_attn, name, layers[-1])
    return model.eval(), layers


def merged() -> LlamaForCausalLM:
    """The plain model with the adapters in its weights."""
    model, layers = adapted()
    for layer in layers:
        layer.merge()
    for layer in model.model.layers:
        for name in ("q_proj", "o_proj"):
            setattr(layer.self_attn, name, getattr(layer.self_attn, name).base_layer)
    return model


@pytest.mark.parametrize("method", READING)
def test_adapters_count_as_they_do_when_they_are_merged(tmp_path: Path, method: str) -> None:
    models = adapted()[0], merged()
    caches = [cached(each, IDS[:, :40], method, 0.5, small(method)) for each in models]
    assert [positions_of(layer) for layer in caches[0].layers] == [
        positions_of(layer) for layer in caches[1].layers
    ]
    caches[0] = loaded(caches[0], tmp_path, models[0])
    near(*([read(model, IDS[:, 40:44], cache)] for model, cache in zip(models, caches, strict=True)))


def test_adapters_that_are_off_or_merged_are_no_part_of_the_fingerprint(model: LlamaForCausalLM) -> None:
    changed, layers = adapted()
    plain, own = file.fingerprint(model), file.fingerprint(changed)
    layers[3].lora_A["other"].weight.data += 1  # idle
    assert file.fingerprint(changed) == own
    changes: list[tuple[str, Any]] = [("active_adapters", ["other"]), ("scaling", {"mine": 3.0})]
    for name, value in changes:
        kept = getattr(layers[3], name)
        setattr(layers[3], name, value)
        assert file.fingerprint(changed) not in (own, plain)
        setattr(layers[3], name, kept)
    for layer in layers:
        layer.disable_adapters = True
    assert file.fingerprint(changed) == plain
    for layer in layers:
        layer.disable_adapters = False
        layer.merge()
    assert file.fingerprint(changed) == file.fingerprint(merged())


# projections that are asked


class Normed(torch.nn.Linear):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(states * (states.square().mean(dim=-1, keepdim=True) + 1e-6).rsqrt())


class OfRows(torch.nn.Linear):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if len(states) != 2:
            raise ValueError("got 1 row, wanted 2")
        return super().forward(states)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Normed, r"Normed, which does not map the sum of states to the sum"),
        (OfRows, r"OfRows, which does not answer to unit vectors.*: got 1 row, wanted 2"),
    ],
)
def test_a_projection_that_is_no_matrix_is_refused(kind: type[torch.nn.Linear], told: str) -> None:
    model = tiny_llama()
    for layer in model.model.layers:
        layer.self_attn.o_proj.__class__ = kind
    refused(lambda: cached(model, IDS.repeat(2, 1), "criticalkv", 0.5, small("criticalkv")), told)


def test_a_matrix_and_its_bias_are_what_hooks_make_of_them() -> None:
    torch.manual_seed(0)
    linear, like = torch.nn.Linear(6, 5), torch.empty(0)
    wanted = linear.weight.T, linear.bias
    torch.testing.assert_close(linear_map(linear, 6, like), wanted, rtol=0, atol=0)
    linear.register_forward_hook(lambda module, given, output: 2 * output + 1)
    torch.testing.assert_close(linear_map(linear, 6, like), (2 * wanted[0], 2 * wanted[1] + 1))
    pruned = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(6, 5))
    torch.testing.assert_close(linear_map(pruned, 6, like), (pruned.weight.T, pruned.bias))


def test_a_projection_is_asked_once_for_all_rows() -> None:
    """Rows of other lengths are compressed one by one."""
    model, asked = packed("integers in buffers")[0], []
    projection: Any = model.model.layers[0].self_attn.o_proj
    projection.register_forward_hook(lambda module, given, output: asked.append(given[0].shape[1]))
    ids, given = padded(30, 19)
    cached(model, ids, "criticalkv", 0.5, small("criticalkv"), given=given)
    assert asked == [projection.codes.shape[1] + 2, 30]


def test_the_queries_are_those_of_the_adapter() -> None:
    model, layers = adapted()
    states = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(0))
    queries = project(model, attention_modules(model)[0], states)
    near([queries.detach()], [layers[0](states).unflatten(-1, (4, 8)).transpose(1, 2).detach()])
