"""What several files of the laws of shared use."""

import numpy as np


def draw_mask(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """A mask whose heads keep different numbers of tokens, some all and some none."""
    generator = np.random.default_rng(seed)
    share = generator.choice([0.0, 0.2, 0.5, 1.0], size=(*shape[:-1], 1))
    return generator.random(shape) < share


def sorted_choice(scores, count, protected):
    """The `count` first of each row by a stable sort: the protected before the others, then by falling score."""
    by_score = np.argsort(-scores, axis=-1, kind="stable")
    second = np.argsort(~np.take_along_axis(protected, by_score, axis=-1), axis=-1, kind="stable")
    kept = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(kept, np.take_along_axis(by_score, second, axis=-1)[..., :count], True, axis=-1)
    return kept
