"""Re-rotated keys behind any method, `+rerotate`: after each compression the kept tokens of a head lie at
consecutive positions, right before the next token.

Attention depends on distances alone. So the next token stays at its true position, and each head may keep
another number of tokens (RR-9). The stored tokens of a head are consecutive before each compression too. So a
key moves by the number of tokens that are evicted behind it, and no position is stored. Values do not move,
nor do the tokens behind the last evicted one.
"""

from typing import Any

import torch

from evictionary.errors import require
from evictionary.models.queries import rotation, turned
from evictionary.optimized.cache import compress
from evictionary.optimized.rerotation import positions_before
from evictionary.policies import Compression, Policy


class Rerotation(Policy):
    def serves(self, method: Any) -> bool:
        return bool(method.rerotated)

    def evicted(self, compression: Compression, kept: torch.Tensor) -> None:
        """Turn the kept keys that tokens are evicted behind."""
        stored = torch.ones_like(kept) if compression.filled is None else compression.filled
        if torch.equal(kept, stored):
            return
        require(
            compression.model is not None,
            "model: got none any more, wanted the model of the cache, whose RoPE turns the kept keys",
        )
        moves = (positions_before(kept) - positions_before(stored))[kept]
        copied = compression.compressed or compress(compression.keys, compression.values, kept)
        keys = _moved(copied.keys, moves, compression)
        compression.compressed = copied._replace(keys=keys)


def _moved(keys: torch.Tensor, moves: torch.Tensor, compression: Compression) -> torch.Tensor:
    """The keys [n, D], each moved by so many positions [n], in float32 and back in their dtype."""
    # a layer has far fewer distances than keys, whose table would be as large as the keys
    distances, place = moves.unique(return_inverse=True)
    cos, sin = rotation(compression.model, compression.layer_index, distances)
    # a cached key has the scale of cosine and sine already (YaRN)
    scale = (cos.square() + sin.square()).sqrt()
    return turned(keys.float(), (cos / scale)[place], (sin / scale)[place]).to(keys.dtype)
