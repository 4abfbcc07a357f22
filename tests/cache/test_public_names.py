"""What a version promises of an EvictingCache: its names beside those of transformers' own caches."""

from conftest import tiny_llama
from tools.reading import IDS, read
from transformers import DynamicCache

from evictionary import EvictingCache

PROMISED = {
    # what was asked for
    "budget",
    "compression_ratio",
    "every",
    "method",
    "model",
    "options",
    "record",
    "seed",
    # a cache in use
    "argument",
    "close",
    "compress",
    "from_prefilled",
    "load",
    "rest_of",
    "save",
    # what has come of it
    "nbytes",
    "nbytes_beside",
    "nbytes_full",
    "peak_tokens",
    "recorded",
    "tokens_kept",
}
OF_TRANSFORMERS = {
    "activate_past_recording",
    "batch_repeat_interleave",
    "batch_select_indices",
    "crop",
    "get_mask_sizes",
    "is_croppable",
    "reorder_cache",
    "reset",
    "update",
}
"""Names of a cache of transformers that this one has in its own way; older versions lack some of them."""


def public(found: object) -> set[str]:
    return {name for name in dir(found) if not name.startswith("_")}


def test_a_cache_has_the_names_that_are_promised_and_no_other() -> None:
    """Whoever adds a name promises it: CONTRIBUTING.md says to whom."""
    model = tiny_llama()
    inherited = public(DynamicCache(config=model.config)) | OF_TRANSFORMERS
    with EvictingCache(model, "knorm+ada_kv", every=4) as cache:
        assert public(cache) - inherited == PROMISED
        read(model, IDS[:, :20], cache)
        read(model, IDS[:, 20:24], cache)
        assert public(cache) - inherited == PROMISED
    assert {name for name in vars(EvictingCache) if not name.startswith("_")} <= PROMISED | OF_TRANSFORMERS
