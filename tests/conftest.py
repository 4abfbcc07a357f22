"""A tiny random Llama and a tokenizer of bytes, so that the tests of the cache and the commands need no
network and no time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

# Imported where they are used: the process that shares the tests out reads this file too, and needs none of
# them.
if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
    from xmlschema import XMLSchema

# Triton chooses its interpreter when it is imported, so the tests of the kernels have a run of their own: see
# the Makefile.
collect_ignore = ["a_new_method"] + ["kernels/test_kernels.py"] * (os.environ.get("TRITON_INTERPRET") != "1")


# Rooms and files of tests that run whole commands, most of them in processes of their own.
WHOLE = {"classroom", "experiments", "test_apart", "test_judge", "test_process", "test_project", "test_suite"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs a browser, which not every machine has, and what runs whole commands."""
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker("browser")
        if WHOLE & {item.path.parent.name, item.path.stem}:
            item.add_marker("whole")


CHAT = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    """Two layers, four query heads over two KV heads of
    eight channels, random weights that are always the same.
    """
    import torch
    from tools.families import SMALL
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = SMALL | {"num_hidden_layers": 2, "initializer_range": 0.6}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**settings | changes)).eval()


@pytest.fixture(scope="session")
def shared_model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture(scope="session")
def deep_model() -> LlamaForCausalLM:
    """Eight layers, so that a pyramid and a cascade have steps."""
    return tiny_llama(num_hidden_layers=8)


@pytest.fixture
def model(shared_model: LlamaForCausalLM) -> Iterator[LlamaForCausalLM]:
    """The tiny model; a test that leaves a hook or another attention in it fails."""
    before = shared_model.config._attn_implementation
    yield shared_model
    assert shared_model.config._attn_implementation == before
    assert not [
        module for module in shared_model.modules() if module._forward_pre_hooks or module._forward_hooks
    ]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, after three special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    fast.chat_template = CHAT
    return fast


def save_tiny_model(folder: Path) -> None:
    """The tiny model with its tokenizer, as a user's own folder."""
    tiny_llama(max_position_embeddings=2048).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


@pytest.fixture(autouse=True)
def hushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No command says what it is doing, however long it takes on a busy machine."""
    monkeypatch.setattr("evictionary.progress.FIRST", float("inf"))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command says at once whatever it begins to do, and nothing in between."""
    for name, seconds in {"FIRST": 0.0, "LEAST": 0.0, "PART": 0.0, "PAUSE": 1e6}.items():
        monkeypatch.setattr(f"evictionary.progress.{name}", seconds)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-llama")
    save_tiny_model(folder)
    return folder


@pytest.fixture
def prompt() -> torch.Tensor:
    """Forty token ids, [1, 40]."""
    import torch

    return torch.randint(3, 259, (1, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="session")
def junit() -> XMLSchema:
    """The schema of JUnit's reports."""
    from xmlschema import XMLSchema

    from evictionary.classroom import formats

    return XMLSchema(formats.SCHEMAS / "junit.xsd")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    """The kernels that are launched and their grids; nothing is compiled."""
    grids: list[tuple[str, tuple[int, ...]]] = []

    def run(kernel: Any, *arguments: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> None:
        grids.append((kernel.__name__, grid))

    monkeypatch.setattr("triton.runtime.jit.JITFunction.run", run)
    target = SimpleNamespace(backend="cuda", arch=90)
    monkeypatch.setattr("triton.runtime.driver._active", SimpleNamespace(get_current_target=lambda: target))
    return grids
