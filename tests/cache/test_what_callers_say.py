"""What a caller says of a text is compared with what the cache has read: masks, positions, the text itself,
a budget. Each refusal has a twin that is right and goes on.
"""

import copy
import functools
import re
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from conftest import tiny_llama, tiny_tokenizer
from packaging.version import Version
from tools.families import FAMILIES, NO_HEAD_DIM, OF_2026, build, random_model
from tools.pages import ROOT, blocks
from tools.reading import IDS, after, cached, generate, loaded, padded, read, refused, same, small, written
from transformers import DynamicCache, LlamaForCausalLM, Qwen2VLConfig, Qwen2VLForConditionalGeneration

from evictionary import EvictingCache
from evictionary.cache.chat import next_turn
from evictionary.cache.text import JOINED
from evictionary.evaluation.questions import prefill
from evictionary.models import versions

METHODS = ["keydiff", "snapkv+ada_kv", "momentkv", "quest", None]
"""The model attends by itself again, or the cache does; one that chooses for each query; nothing removed."""
PROMPT = 40


def prompted(model: Any, method: str | None, ids: torch.Tensor = IDS[:, :PROMPT]) -> EvictingCache:
    return cached(model, ids, method, 0.5, small(method or ""))


def ones(columns: int, rows: int = 1, dtype: torch.dtype = torch.long) -> torch.Tensor:
    return torch.ones(rows, columns, dtype=dtype)


def hidden(columns: int, *places: int) -> torch.Tensor:
    mask = ones(columns)
    mask[:, places] = 0
    return mask


def refused_alone(model: Any, method: str | None, ids: torch.Tensor, message: str, **named: Any) -> None:
    """Refused, and the cache goes on as its twin does that was not asked."""
    cache, twin = (prompted(model, method) for _ in range(2))
    refused(lambda: read(model, ids, cache, **named), message)
    assert torch.equal(*(read(model, IDS[:, PROMPT : PROMPT + 3], each) for each in (cache, twin)))
    same(cache, twin)


# masks


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32])
@pytest.mark.parametrize("columns", [-1, 0, 1])
@pytest.mark.parametrize("method", METHODS)
def test_the_mask_of_a_prompt_has_a_column_for_each_token(
    model: LlamaForCausalLM, method: str | None, columns: int, dtype: torch.dtype
) -> None:
    with EvictingCache(model, method, 0.5, small(method or "")) as cache:
        mask = ones(PROMPT + columns, dtype=dtype)
        if columns:
            refused(
                lambda: read(model, IDS[:, :PROMPT], cache, attention_mask=mask),
                rf"attention_mask: got \[1, {PROMPT + columns}\], wanted \[1, 40\], a column for each token",
            )
            assert cache.get_seq_length() == 0
        else:
            read(model, IDS[:, :PROMPT], cache, attention_mask=mask)
            same(cache, prompted(model, method))


@pytest.mark.parametrize("new", [1, 5])
@pytest.mark.parametrize("method", METHODS)
def test_the_mask_of_later_tokens_has_a_column_for_each_token_that_was_read(
    model: LlamaForCausalLM, method: str | None, new: int
) -> None:
    """Of the stored tokens, of those and the new ones, of the new ones alone, of one less and one more."""
    ids, stored = IDS[:, PROMPT : PROMPT + new], int(prompted(model, method).tokens_kept)
    for columns in {new, stored, stored + new, PROMPT, PROMPT + new - 1, PROMPT + new + 1} - {PROMPT + new}:
        for dtype in (torch.bool, torch.long, torch.float32):
            message = rf"attention_mask: got \[1, {columns}\], wanted \[1, {PROMPT + new}\]"
            refused_alone(model, method, ids, message, attention_mask=ones(columns, dtype=dtype))
    told, not_told = prompted(model, method), prompted(model, method)
    torch.testing.assert_close(
        read(model, ids, told, attention_mask=ones(PROMPT + new)), read(model, ids, not_told)
    )


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (ones(PROMPT + 5, rows=2), r"attention_mask: got \[2, 45\], wanted \[1, 45\]"),
        (ones(PROMPT + 5)[:, None, None], r"attention_mask: got .*, wanted \[batch, tokens\]"),
        (
            hidden(PROMPT + 5, 7),
            "attention_mask: got padding at token 7 of row 0, where the cache has read a",
        ),
        (ones(PROMPT + 5) * 2, "attention_mask: got numbers from 2 to 2, wanted 1 for a token and 0 for"),
        (torch.zeros(1, PROMPT + 5), "attention_mask: got padding at token 0"),
        (torch.full((1, PROMPT + 5), -1e9), "attention_mask: got numbers from -10+.0 to -10+.0, wanted 1"),
    ],
    ids=["rows", "four axes", "a token that was read", "twos", "added, of zeros", "added"],
)
@pytest.mark.parametrize("method", METHODS)
def test_a_mask_says_what_was_read(
    model: LlamaForCausalLM, method: str | None, mask: torch.Tensor, message: str
) -> None:
    refused_alone(model, method, IDS[:, PROMPT : PROMPT + 5], message, attention_mask=mask)


BLOCKS_BEGIN_AGAIN = (
    f"prefill_chunk_size: got it after the {PROMPT} tokens that the cache has read, wanted it with a first"
    if Version(transformers.__version__) < Version("5.21")
    else ""
)
"""What older versions are told of a later turn in blocks: they would read it from token 0 on."""


@pytest.mark.parametrize("method", METHODS)
def test_generate_names_the_mask_that_it_was_given(model: LlamaForCausalLM, method: str | None) -> None:
    """It drops a mask of ones in newer versions, and so
    the model never sees its length; in older ones it does.
    """
    stored = int(prompted(model, method).tokens_kept)
    for ids in (IDS[:, PROMPT : PROMPT + 1], IDS[:, PROMPT : PROMPT + 4], IDS):
        new = ids.shape[1]
        for columns in {stored, stored + new, PROMPT - 1} - {PROMPT + new, new}:
            for chunks in ({}, {"prefill_chunk_size": 3}):
                other = (
                    rf"attention_mask: got ({columns} columns|\[1, {columns}\]), "
                    rf"wanted ({PROMPT + new}|\[1, {PROMPT + new}\]), a column for each token"
                )
                refused(
                    lambda ids=ids, columns=columns, chunks=chunks: generate(
                        model, ids, prompted(model, method), mask=ones(columns), **chunks
                    ),
                    (chunks and BLOCKS_BEGIN_AGAIN) or other,
                )
    whole = generate(model, IDS[:, :44], prompted(model, method))
    for ids in (IDS[:, PROMPT:44], IDS[:, :44]):
        answer = generate(model, ids, prompted(model, method), mask=ones(44))
        assert torch.equal(answer[:, -8:], whole[:, -8:])
        in_blocks = functools.partial(
            generate, model, ids, prompted(model, method), mask=ones(44), prefill_chunk_size=3
        )
        if BLOCKS_BEGIN_AGAIN:
            refused(in_blocks, BLOCKS_BEGIN_AGAIN)
        else:
            # momentkv evicts after each block
            assert torch.equal(in_blocks()[:, -8:], whole[:, -8:]) or method == "momentkv"


@pytest.mark.parametrize("method", [None, "keydiff"])
def test_padding_is_told_as_long_as_the_model_attends_by_itself(method: str | None) -> None:
    """In all layers of a full cache; with eviction, in those with a sliding window."""
    model = tiny_llama() if method is None else build("gemma3")
    ids, given = padded(30, 20)
    cache = EvictingCache(model, method, 0.5)
    read(model, ids, cache, **given)
    told, token = after(given), IDS[:, :1].expand(2, -1)
    positions = {"position_ids": told["position_ids"]}
    refused(lambda: read(model, token, cache, **positions), "attention_mask: got none, wanted")
    read(model, token, cache, **told)
    cache.close()


def test_what_a_gpu_would_have_to_be_waited_for_is_not_looked_at(model: LlamaForCausalLM) -> None:
    """The numbers of a token alone; its shapes are, and so are the numbers of several tokens."""
    cache = prompted(model, "momentkv")
    token, mask, positions = (
        torch.ones(1, width, dtype=torch.long, device="meta") for width in (1, PROMPT + 1, 1)
    )
    for named, message in (
        ({"attention_mask": mask[:, 1:]}, r"attention_mask: got \[1, 40\], wanted \[1, 41\]"),
        ({"position_ids": mask}, r"position_ids: got \[1, 41\], wanted \[1, 1\]"),
    ):
        refused(lambda named=named: cache._session.see_batch(token, named), message)
    cache._session.see_batch(token, {"attention_mask": mask, "position_ids": positions})
    refused(
        lambda: cache._session.see_batch(mask[:, :2], {"position_ids": mask[:, :2]}),
        "meta",
        (NotImplementedError, RuntimeError),
    )


# positions


@pytest.mark.parametrize("new", [1, 4])
@pytest.mark.parametrize("method", METHODS)
def test_positions_go_on_where_the_text_ended(model: LlamaForCausalLM, method: str | None, new: int) -> None:
    ids, places = IDS[:, PROMPT : PROMPT + new], torch.arange(new)[None]
    for start in {int(prompted(model, method).tokens_kept), 0, PROMPT - 1, PROMPT + 1, 30} - {PROMPT}:
        message = f"position_ids: got {start} for new token 0 of row 0, wanted 40: the cache has read 40"
        refused_alone(model, method, ids, message, position_ids=start + places)
    places = PROMPT + places
    for wrong in (places.repeat(2, 1), torch.cat([places, places], dim=1), places[0], places[None]):
        message = r"position_ids: got \[.*\], wanted \[1, .\], a position for each new token"
        refused_alone(model, method, ids, message, position_ids=wrong)
    told = prompted(model, method)
    logits = read(model, ids, told, position_ids=places)
    torch.testing.assert_close(logits, read(model, ids, prompted(model, method)))


@pytest.mark.parametrize("method", METHODS)
def test_positions_of_a_prompt_begin_at_its_first_token(model: LlamaForCausalLM, method: str | None) -> None:
    with EvictingCache(model, method, 0.5, small(method or "")) as cache:
        for wrong in (torch.arange(PROMPT)[None] + 3, torch.arange(PROMPT)[None] * 2, torch.zeros(1, PROMPT)):
            refused(
                lambda wrong=wrong: read(model, IDS[:, :PROMPT], cache, position_ids=wrong),
                "position_ids: got .* for new token . of row 0, wanted",
            )
        read(model, IDS[:, :PROMPT], cache, position_ids=torch.arange(PROMPT)[None])
        same(cache, prompted(model, method))


def counted(width: int) -> torch.Tensor:
    return torch.arange(width)[None].expand(2, -1)


@pytest.mark.parametrize("method", ["keydiff", "snapkv+ada_kv", "momentkv", None])
def test_positions_count_padding_or_not_from_the_first_token_to_the_last(
    model: LlamaForCausalLM, method: str | None
) -> None:
    """A rotary model reads the same in both ways, but not if they change in between."""
    ids, given = padded(30, 20)
    token, told = IDS[:, :1].expand(2, -1), after(given)
    mask = {"attention_mask": given["attention_mask"]}
    ways = {"without": given, "none": mask, "counted": mask | {"position_ids": counted(30)}}
    later = {
        "without": told,
        "none": {"attention_mask": told["attention_mask"]},
        "counted": told | {"position_ids": torch.full((2, 1), 30)},
    }
    logits = []
    for way, said in ways.items():
        for then in later:
            cache = EvictingCache(model, method, 0.5, small(method or ""))
            read(model, ids, cache, **said)
            go_on = functools.partial(read, model, token, cache, **later[then])
            if (way == "without") == (then == "without"):
                logits.append(go_on())
            else:
                refused(go_on, "position_ids: got")
                assert cache.get_seq_length() == 30
            cache.close()
    for each in logits[1:]:
        torch.testing.assert_close(each, logits[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ([[PROMPT]], r"position_ids: got a list, wanted \[1, 1\]"),
        (torch.tensor([[PROMPT + 0.5]]), "position_ids: got 40.5 for new token 0 of row 0, wanted 40"),
    ],
)
def test_positions_are_shown_as_they_are_given(model: LlamaForCausalLM, told: Any, message: str) -> None:
    cache = prompted(model, "keydiff")
    refused(lambda: read(model, IDS[:, PROMPT : PROMPT + 1], cache, position_ids=told), message)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (([1, 2],), r"input_ids: got a list, wanted a tensor \[rows, tokens\]"),
        ((IDS[0],), r"input_ids: got \[60\], wanted a tensor \[rows, tokens\]"),
        ((IDS, [[1] * 60]), "attention_mask: got a list, wanted a tensor"),
    ],
)
@pytest.mark.parametrize("method", ["keydiff", None])
def test_the_text_of_rest_of_is_a_tensor_of_rows(
    model: LlamaForCausalLM, method: str | None, told: Any, message: str
) -> None:
    refused(lambda: EvictingCache(model, method).rest_of(*told), message)
    refused(lambda: prompted(model, method).rest_of(*told), message)


def test_a_method_that_needs_positions_says_which(model: LlamaForCausalLM) -> None:
    ids, given = padded(30, 20)
    named = {"attention_mask": given["attention_mask"], "position_ids": counted(30)}
    cache = EvictingCache(model, "expected_attention", 0.5)
    refused(lambda: read(model, ids, cache, **named), "position_ids: got those that count the padding")


FORGETFUL = {"Jamba"}  # it reads several later tokens at once no more


@pytest.mark.parametrize("family", [*FAMILIES, *OF_2026])
def test_what_generate_says_is_right_for_every_family(family: str) -> None:
    """Rows that are padded, a second turn, blocks, beams, another cache, and tokens alone with their mask."""
    model, (ids, given) = build(family), padded(30, 20)
    mask = given["attention_mask"]
    for every in (0, 16):
        cache = EvictingCache(model, "keydiff", 0.5, every=every)
        said = generate(model, ids, cache, mask=mask, count=3)
        if family not in FORGETFUL:
            said = torch.cat([said, IDS[:, :5].expand(2, -1)], dim=1)
            mask_of_all = torch.cat([mask, ones(said.shape[1] - 30, rows=2)], dim=1)
            assert generate(model, said, cache, mask=mask_of_all, count=3).shape == (2, 41)
        cache.close()
    if family not in FORGETFUL:
        blocks_of_16 = EvictingCache(model, "keydiff", 0.5, every=16)
        generate(model, ids, blocks_of_16, mask=mask, count=3, prefill_chunk_size=16)
        blocks_of_16.close()
    full = EvictingCache(model, None)
    read(model, ids, full, **given)
    later = EvictingCache.from_prefilled(model, full, "keydiff", 0.5)
    more, mask = torch.cat([ids, IDS[:, :1].expand(2, -1)], dim=1), torch.cat([mask, ones(1, rows=2)], dim=1)
    for each in (later, copy.deepcopy(later), full):
        assert generate(model, more, each, mask=mask, count=2).shape == (2, 33)
        each.close()
    cache = prompted(model, "keydiff", IDS[:, :30])
    assert generate(model, IDS[:, 30:31], cache, mask=ones(31), count=2).shape == (1, 3)
    cache = EvictingCache(model, "keydiff", 0.5)
    assert generate(model, IDS[:, :30], cache, num_beams=3, count=3).shape == (1, 33)


VISION = {
    "depth": 1,
    "embed_dim": 16,
    "hidden_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
M_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}


@pytest.mark.parametrize("method", ["keydiff", "snapkv+ada_kv", None])
def test_an_image_takes_fewer_positions_than_tokens(tmp_path: Path, method: str | None) -> None:
    """A model with three planes of positions: an image, text after it, and a second turn."""
    text = {**NO_HEAD_DIM, "rope_parameters": M_ROPE}
    tokens = {"image_token_id": 299, "vision_start_token_id": 298}
    config = Qwen2VLConfig(text_config=text, vision_config=VISION, **tokens)
    model = random_model(config, of=Qwen2VLForConditionalGeneration._from_config)
    ids = IDS[:, :40] % 290
    ids[:, 10], ids[:, 11:17] = 298, 299
    pixels = torch.randn(24, 96, generator=torch.Generator().manual_seed(0))
    image = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 6]])}
    cache = EvictingCache(model, method, 0.5, small(method or ""))
    said = generate(model, ids, cache, mm_token_type_ids=(ids == 299).int(), **image)
    assert cache.get_seq_length() == 47 and cache._session.reading.text.shifts == [-3]
    for each in (copy.deepcopy(cache), loaded(cache, tmp_path, model)):
        for start, planes in ((44, 3), (44, 4), (47, 3), (20, 3)):
            positions = torch.full((planes, 1, 1), start)
            go_on = functools.partial(read, model, said[:, -1:], copy.deepcopy(each), position_ids=positions)
            if start == 44:
                assert go_on().isfinite().all()
            else:
                refused(go_on, f"position_ids: got {start} for new token 0 of row 0, wanted 44")
    said = torch.cat([said, ids[:, :5]], dim=1)
    del image["pixel_values"]  # their tokens were read
    assert generate(model, said, cache, mm_token_type_ids=(said == 299).int(), **image).shape[1] == 61
    model.base_model.rope_deltas = None
    plain = prompted(model, method, ids[:, :10])
    refused(lambda: read(model, ids[:, 20:21], plain, position_ids=torch.full((3, 1, 1), 5)), "wanted 10")
    read(model, ids[:, 20:21], plain)


# the text itself


@pytest.mark.parametrize("method", METHODS)
def test_the_rest_of_a_text_is_what_was_not_read(
    model: LlamaForCausalLM, method: str | None, tmp_path: Path
) -> None:
    wanted = generate(model, IDS[:, :45], prompted(model, method))[:, PROMPT:]
    cache = prompted(model, method)
    for each in (copy.deepcopy(cache), loaded(cache, tmp_path, model), cache):
        rest = each.rest_of(IDS[:, :45])
        assert torch.equal(rest["input_ids"], IDS[:, PROMPT:45]) and "position_ids" not in rest
        answer = generate(model, rest["input_ids"], copy.deepcopy(each), mask=rest["attention_mask"])
        assert torch.equal(answer, wanted)
        read(model, rest.pop("input_ids"), each, **rest)
        assert torch.equal(each.rest_of(IDS)["input_ids"], IDS[:, 45:])
    cache.reset()
    assert torch.equal(cache.rest_of(IDS)["input_ids"], IDS)
    cache.close()


OTHER = IDS.clone()
OTHER[0, 31] = (OTHER[0, 31] + 1) % 250 + 3
PARTED = f"at token 31 of row 0 it has read {IDS[0, 31]}, and the input has {OTHER[0, 31]}; wanted a text"


@pytest.mark.parametrize("method", METHODS)
def test_a_text_that_began_in_another_way_is_refused(
    model: LlamaForCausalLM, method: str | None, tmp_path: Path
) -> None:
    """By rest_of and by generate(), from the cache, its copy, its file, and one made of it."""
    cache, full = prompted(model, method), prompted(model, None)
    made = EvictingCache.from_prefilled(model, full, "keydiff", 0.5)
    for each in (cache, copy.deepcopy(cache), loaded(cache, tmp_path, model), made):
        another = f"input_ids: got another text than the 40 tokens that the cache has read: {PARTED}"
        refused(lambda each=each: each.rest_of(OTHER), another)
        refused(lambda each=each: generate(model, OTHER, each), another)
        refused(
            lambda each=each: generate(model, OTHER, each, prefill_chunk_size=5),
            BLOCKS_BEGIN_AGAIN or another,
        )
        for short in (1, PROMPT - 1):
            refused(
                lambda each=each, short=short: generate(model, IDS[:, :short], each),
                rf"prompt: got no new token after the 40 .* took the {short} given for the whole text .* "
                f"attention_mask of {PROMPT + short} columns",
            )
        refused(
            lambda each=each: generate(model, IDS[:, :PROMPT], each),
            "got 40 tokens, and the cache has read as many",
        )
        refused(
            lambda each=each: each.rest_of(IDS[:, :PROMPT]), "input_ids: got 40 tokens in row 0, of which"
        )
        assert generate(model, IDS, each).shape[1] == 68
        each.close()


def test_each_row_has_a_text_of_its_own(model: LlamaForCausalLM) -> None:
    """Rows that beams reorder, that are repeated, cropped, padded, and read one by one."""
    ids, given = padded(30, 20)
    cache = EvictingCache(model, "keydiff", 0.5)
    read(model, ids, cache, **given)
    more = torch.cat([ids, IDS[:, :3].expand(2, -1)], dim=1)
    mask = torch.cat([given["attention_mask"], ones(3, rows=2)], dim=1)
    again = copy.deepcopy(cache)
    again.reorder_cache(torch.tensor([1, 0, 0]))
    rest = again.rest_of(more[[1, 0, 0]], mask[[1, 0, 0]])
    assert torch.equal(rest["attention_mask"], mask[[1, 0, 0]])
    assert rest["position_ids"].tolist() == [[20, 21, 22], [30, 31, 32], [30, 31, 32]]
    read(model, rest.pop("input_ids"), again, **rest)
    refused(lambda: cache.rest_of(more.flip(0), mask.flip(0)), "at token 0 of row 0")
    refused(lambda: cache.rest_of(more[:1]), "batch size: got 1, wanted 2")
    refused(lambda: generate(model, more.roll(1, 1), cache, mask=mask), "input_ids: got another text")
    # the padding of a text may be another one: its tokens count
    wider = torch.nn.functional.pad(more, (4, 0)), torch.nn.functional.pad(mask, (4, 0))
    assert torch.equal(cache.rest_of(*wider)["input_ids"], more[:, 30:])
    for place in range(30, 33):
        read(model, more[:, place : place + 1], cache, **after(given, place - 29))
    cache.crop(-2)
    assert torch.equal(cache.rest_of(more, mask)["input_ids"], more[:, 31:])
    cache.close()
    single = EvictingCache(model, "keydiff", 0.5)
    beams = generate(model, IDS[:, :30].expand(2, -1), single, num_beams=2, num_return_sequences=2)
    assert single._session.reading.text.length == single.get_seq_length() == beams.shape[1] - 1


def test_many_tokens_one_by_one_are_remembered(model: LlamaForCausalLM) -> None:
    ids = IDS.repeat(1, 3)
    cache = cached(model, ids[:, :150], "momentkv", budget=20, sizes=[20, *[1] * 130])
    assert 2 * JOINED < 130 and torch.equal(cache._session.reading.text.ids, ids[:, :150].int())
    assert torch.equal(cache.rest_of(ids)["input_ids"], ids[:, 150:])


def test_embeddings_have_no_ids(model: LlamaForCausalLM) -> None:
    """They fit any text; the tokens after them do not."""
    cache = EvictingCache(model, "keydiff", 0.5)
    with torch.no_grad():
        model(inputs_embeds=model.get_input_embeddings()(IDS[:, :30]), **cache.argument)
    read(model, IDS[:, 30:40], cache)
    assert torch.equal(cache.rest_of(IDS)["input_ids"], IDS[:, 40:])
    refused(lambda: cache.rest_of(OTHER), "at token 31 of row 0")


def test_an_interrupted_forward_leaves_no_text(model: LlamaForCausalLM) -> None:
    cache = prompted(model, "keydiff")
    with model.model.embed_tokens.register_forward_hook(Mock(side_effect=KeyboardInterrupt)):
        refused(lambda: read(model, OTHER[:, PROMPT:50], cache), None, KeyboardInterrupt)
    assert torch.equal(cache.rest_of(IDS)["input_ids"], IDS[:, PROMPT:])


@pytest.mark.parametrize("tokens", [30, PROMPT, 50])
def test_after_an_interruption_that_is_the_cause_whatever_is_said(
    model: LlamaForCausalLM, tokens: int
) -> None:
    cache = EvictingCache(model, "keydiff", 0.5)
    with model.model.layers[0].mlp.register_forward_hook(Mock(side_effect=KeyboardInterrupt)):
        refused(lambda: generate(model, IDS[:, :PROMPT], cache), None, KeyboardInterrupt)
    refused(lambda: generate(model, IDS[:, :tokens], cache), "a forward was interrupted", RuntimeError)
    cache.reset()
    assert generate(model, IDS[:, :tokens], cache).shape[1] == tokens + 8


def test_a_prompt_that_is_read_twice_is_one_text(model: LlamaForCausalLM) -> None:
    cache = prompted(model, "kvzip")
    assert (
        torch.equal(cache._session.reading.text.ids, IDS[:, :PROMPT].int())
        and generate(model, IDS, cache).shape[1] == 68
    )


@pytest.mark.parametrize("block", [None, 8])
def test_a_prompt_that_was_read_before_is_generated_from(model: LlamaForCausalLM, block: int | None) -> None:
    cache = EvictingCache(model, "keydiff", budget=20, every=8)
    prefill(model, IDS[:, :50], cache, block)
    assert generate(model, IDS[:, :51], cache).shape[1] == 59


# a chat

THINKS = (
    "{% for message in messages %}<s>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{{ message['content'].split('</think>')[-1] }}"
    "{% else %}{{ message['content'] }}{% endif %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n<think>\n{% endif %}"
)
"""It drops what the model thought in earlier turns, as those of Qwen3 do."""
WHOLE: dict[str, Any] = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
ASKED = ["A long text. " * 9 + "What is it about?", "Now the second question!"]


def test_a_template_that_says_earlier_turns_in_another_way_loses_no_question(model: LlamaForCausalLM) -> None:
    """The whole chat in its words is refused; the next turn goes on."""
    tokenizer: Any = tiny_tokenizer()
    tokenizer.chat_template, said = THINKS, [{"role": "user", "content": ASKED[0]}]
    cache, twin = (EvictingCache(model, "keydiff", budget=100) for _ in range(2))
    chat = next_turn(tokenizer, None, *said)
    whole = tokenizer.apply_chat_template(said, **WHOLE)
    assert torch.equal(chat, whole["input_ids"])
    answers = [generate(model, chat, each) for each in (cache, twin)]
    said += [{"role": "assistant", "content": "Hm.</think>A text."}, {"role": "user", "content": ASKED[1]}]
    whole = tokenizer.apply_chat_template(said, **WHOLE)
    refused(
        lambda: model.generate(**whole, **cache.argument, max_new_tokens=2),
        "input_ids: got another text than the .*next_turn adds a turn",
    )
    refused(lambda: cache.rest_of(whole["input_ids"]), "input_ids: got another text")
    chat = next_turn(tokenizer, answers[0], said[-1])
    new = tokenizer.decode(chat[0, answers[0].shape[1] :])
    assert new == f"</s>\n<s>user\n{ASKED[1]}</s>\n<s>assistant\n<think>\n"
    answer = generate(model, chat, cache)
    assert torch.equal(cache._session.reading.text.ids, answer[:, :-1].int())
    assert torch.equal(answer, generate(model, chat, twin))
    ended = torch.cat([answers[0], torch.tensor([[tokenizer.eos_token_id]])], dim=1)
    # the token that ends an answer comes once
    assert torch.equal(next_turn(tokenizer, ended, said[-1]), chat)


@pytest.mark.parametrize("template", ["{{ messages[-1]['content'] }}", "{% if messages %}{% endif %}"])
def test_a_template_without_answers_is_refused(template: str) -> None:
    tokenizer: Any = tiny_tokenizer()
    tokenizer.chat_template = template
    message = {"role": "user", "content": "?"}
    refused(lambda: next_turn(tokenizer, IDS, message), "a chat template that shows no answer")
    refused(lambda: next_turn(tokenizer, IDS.repeat(2, 1), message), r"read: got \[2, 60\], wanted \[1, tok")


def test_the_chat_of_the_page_survives_such_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the user asked is in the text that the cache has read, in its order."""
    tokenizer: Any = tiny_tokenizer()
    tokenizer.chat_template = THINKS
    model = tiny_llama(max_position_embeddings=4096)
    monkeypatch.setattr("evictionary.models.load.load", lambda name: (model, tokenizer))
    page = ROOT / "docs" / "in_a_model.md"
    (program,) = [block for block in blocks(page, "python") if "next_turn" in block]
    found: dict[str, Any] = {}
    exec(compile(program, "in_a_model.md", "exec"), found)
    text = tokenizer.decode(found["cache"]._session.reading.text.ids[0])
    second = text.index("</s>\n<s>user\nIn one word?</s>\n<s>assistant\n<think>\n")
    assert 0 < text.index("What is it about?</s>\n<s>assistant\n<think>\n") < second
    assert text.count("<s>user") == 2 and found["cache"].tokens_kept == 200


# a budget


FIRST = """
import torch

def select(keys, length, budget):
    return (torch.arange(length) < FEW).expand(keys.shape[:3])
"""


@pytest.mark.parametrize("every", [0, 4])
@pytest.mark.parametrize(
    ("traits", "few", "stored"),
    [
        ("", "length", 40),
        ("", "budget + 1", 9),
        ("", "budget", None),
        ("TRAITS = {'own_budget'}", "length", None),
    ],
)
def test_a_select_that_keeps_more_than_its_budget_is_told_of_once(
    model: LlamaForCausalLM, tmp_path: Path, traits: str, few: str, stored: int | None, every: int
) -> None:
    """A file that ignores it, by a token or by all."""
    method = written(tmp_path, traits + FIRST.replace("FEW", few))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        cached(model, IDS[:, :52], method, budget=8, every=every, sizes=[40, *[4] * (every // 2)])
    wanted = (
        rf"method .*mine.py: the cache stores {stored} of 40 tokens in each head of layer 0, where 8 were"
    )
    assert len(told) == (stored is not None)
    assert all(re.match(wanted, str(each.message)) for each in told)


def test_rows_of_a_padded_batch_have_budgets_of_their_own(model: LlamaForCausalLM, tmp_path: Path) -> None:
    """Half of the longer row is more than half of the shorter one."""
    ids, given = padded(30, 20)
    with pytest.warns(
        UserWarning, match="stores 15 of 20 tokens in each head of layer 0, where 10 were asked"
    ):
        cached(model, ids, written(tmp_path, FIRST.replace("FEW", "15")), 0.5, given=given)


# refusals by their true cause


@pytest.mark.parametrize("method", ["keydiff", "expected_attention", "momentkv", None])
def test_gradient_checkpointing_is_refused_by_its_name(method: str | None) -> None:
    model = tiny_llama()
    model.gradient_checkpointing_enable()
    model.train()
    message = "model: got LlamaForCausalLM in train mode with gradient checkpointing, where transformers"
    refused(lambda: read(model, IDS, EvictingCache(model, method, 0.5)), message)
    model.eval()
    assert read(model, IDS, EvictingCache(model, method, 0.5)).isfinite().all()
    model.train()
    model.gradient_checkpointing_disable()
    assert read(model, IDS, EvictingCache(model, method, 0.5)).isfinite().all()


def test_a_model_that_gives_a_cache_nothing_is_told_so(model: LlamaForCausalLM) -> None:
    cache = EvictingCache(model, "keydiff")
    hooks = [
        layer.register_forward_pre_hook(
            lambda module, arguments, named: (arguments, named | versions.argument(None)), with_kwargs=True
        )
        for layer in model.model.layers
    ]
    message = "got a forward of LlamaForCausalLM that gave its cache no token"
    refused(lambda: read(model, IDS, cache), message, RuntimeError)
    for hook in hooks:
        hook.remove()
    cache.reset()
    assert read(model, IDS, cache).isfinite().all()


@pytest.mark.parametrize("method", ["attention_matching", "kvzip"])
def test_a_prompt_whose_second_reading_was_interrupted_says_so(model: LlamaForCausalLM, method: str) -> None:
    """In the last layer of the first reading, and in the second."""
    for calls in (1, 2):
        cache = EvictingCache(model, method, 0.5)
        stop = Mock(side_effect=[None] * (calls - 1) + [KeyboardInterrupt])
        with model.model.layers[1].mlp.register_forward_hook(stop):
            refused(lambda cache=cache: read(model, IDS[:, :30], cache), None, KeyboardInterrupt)
        if calls == 1:
            refused(
                lambda cache=cache: read(model, IDS[:, 30:32], cache),
                "cache: got more tokens before the prompt was read a second time: the forward before",
                RuntimeError,
            )
        cache.reset()
        read(model, IDS[:, :30], cache)
        assert cache.tokens_kept == 15


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (3, "crop: got 3, wanted a number from -2 to 0, minus the tokens to remove"),
        (-3, "crop: got -3, wanted a number from -2 to 0: the tokens before that are of the prompt or were"),
        (-0.5, "crop: got -0.5, wanted a whole number, minus the tokens to remove"),
    ],
)
@pytest.mark.parametrize("method", ["keydiff", None])
def test_a_crop_says_what_it_wants(
    model: LlamaForCausalLM, method: str | None, count: Any, message: str
) -> None:
    cache = prompted(model, method)
    read(model, IDS[:, PROMPT : PROMPT + 2], cache)
    refused(lambda: cache.crop(count), message, ValueError)
    cache.crop(torch.tensor(-2))  # as transformers 5.17 does
    assert torch.equal(cache.rest_of(IDS)["input_ids"], IDS[:, PROMPT:])


def test_a_prefilled_cache_has_a_mask_of_its_own_length(model: LlamaForCausalLM) -> None:
    ids, given = padded(30, 20)
    ours, theirs = EvictingCache(model, None), DynamicCache()
    for full in (ours, theirs):
        read(model, ids, full, **given)
        for mask, message in (
            (given["attention_mask"][:, :20], r"attention_mask: got \[2, 20\], wanted \[2, 30\]"),
            (given["attention_mask"][:1], r"attention_mask: got \[1, 30\], wanted \[2, 30\]"),
            (given["attention_mask"].flip(1), "attention_mask: got padding after tokens"),
        ):
            refused(
                lambda full=full, mask=mask: EvictingCache.from_prefilled(
                    model, full, "keydiff", attention_mask=mask
                ),
                message,
            )
        mask = given["attention_mask"]
        made = EvictingCache.from_prefilled(model, full, "keydiff", 0.5, attention_mask=mask)
        read(model, IDS[:, :1].expand(2, -1), made, **after(given))
        made.close()
    refused(
        lambda: EvictingCache.from_prefilled(model, ours, "keydiff", attention_mask=ones(30, rows=2)),
        "attention_mask: got no padding at token 0 of row 1, where the cache has read padding",
    )
