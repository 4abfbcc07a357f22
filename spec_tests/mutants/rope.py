"""Wrong rotary position embeddings."""

from __future__ import annotations

import numpy as np

from evictionary.reference.rope import frequencies, rotate
from evictionary.spec_tests.harness.planted import mutant

FREQUENCIES, ROTATE = "rope.frequencies", "rope.rotate"


def angles_of(states, positions, theta):
    return np.asarray(positions, dtype=np.float64)[..., None] * frequencies(states.shape[-1], theta)


def turned(states, cos, sin):
    """The rotation of the pairs (i, i + D/2) with a cosine and a sine of one's own."""
    first, second = np.split(states, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def to_bfloat16(array):
    return (np.asarray(array, dtype=np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32).astype(np.float64)


@mutant(FREQUENCIES, killed_by="ROPE-1", misconception="theta^(-i/D): the factor 2 of the exponent dropped")
def exponent_halved(head_dim, theta=10000.0):
    return np.sqrt(frequencies(head_dim, theta))


@mutant(FREQUENCIES, killed_by="ROPE-1", misconception="pairs counted from 1, so that the first frequency is below 1")
def counted_from_one(head_dim, theta=10000.0):
    return frequencies(head_dim, theta) * theta ** (-2 / head_dim)


@mutant(
    FREQUENCIES,
    killed_by="ROPE-1",
    misconception="the exponents spread up to 1 (linspace with its end): the last frequency is 1/theta",
)
def end_included(head_dim, theta=10000.0):
    frequencies(head_dim, theta)
    return theta ** -np.linspace(0, 1, head_dim // 2)


@mutant(FREQUENCIES, killed_by="ROPE-1", misconception="wavelengths theta^(2i/D) returned for frequencies")
def wavelengths(head_dim, theta=10000.0):
    return 1 / frequencies(head_dim, theta)


@mutant(FREQUENCIES, killed_by="ROPE-1", misconception="theta fixed at 10000, whatever is given")
def theta_ignored(head_dim, theta=10000.0):
    return frequencies(head_dim)


@mutant(FREQUENCIES, killed_by="ROPE-1", misconception="frequencies in float16")
def half_precision_frequencies(head_dim, theta=10000.0):
    return frequencies(head_dim, theta).astype(np.float16).astype(np.float64)


@mutant(FREQUENCIES, killed_by="ROPE-1", misconception="the last channel of an odd head_dim dropped in silence")
def odd_width_cut(head_dim, theta=10000.0):
    return theta ** (-np.arange(0, head_dim - head_dim % 2, 2) / max(head_dim, 1))


@mutant(ROTATE, killed_by="ROPE-2", misconception="channels paired as (2i, 2i + 1) instead of (i, i + D/2)")
def interleaved_pairs(states, positions, theta=10000.0):
    split = np.concatenate([states[..., 0::2], states[..., 1::2]], axis=-1)
    result = np.empty_like(states)
    result[..., 0::2], result[..., 1::2] = np.split(rotate(split, positions, theta), 2, axis=-1)
    return result


@mutant(ROTATE, killed_by="ROPE-2", misconception="the rotation turned the other way: the signs of the sines exchanged")
def turned_backwards(states, positions, theta=10000.0):
    return rotate(states, -np.asarray(positions), theta)


@mutant(ROTATE, killed_by="ROPE-2", misconception="sine and cosine exchanged")
def sine_for_cosine(states, positions, theta=10000.0):
    angles = angles_of(states, positions, theta)
    return turned(states, np.sin(angles), np.cos(angles))


@mutant(ROTATE, killed_by="ROPE-2", misconception="frequencies in reverse: the last pair turns fastest")
def frequencies_reversed(states, positions, theta=10000.0):
    angles = angles_of(states, positions, theta)[..., ::-1]
    return turned(states, np.cos(angles), np.sin(angles))


@mutant(ROTATE, killed_by="ROPE-2", misconception="positions counted from 1")
def positions_from_one(states, positions, theta=10000.0):
    return rotate(states, np.asarray(positions) + 1, theta)


@mutant(ROTATE, killed_by="ROPE-2", misconception="positions rounded to bfloat16: from 256 on neighbours share one")
def positions_in_bfloat16(states, positions, theta=10000.0):
    return rotate(states, to_bfloat16(positions), theta)


@mutant(ROTATE, killed_by="ROPE-2", misconception="sines and cosines rounded to float16")
def half_precision_tables(states, positions, theta=10000.0):
    angles = angles_of(states, positions, theta)
    return turned(states, *(table.astype(np.float16).astype(np.float64) for table in (np.cos(angles), np.sin(angles))))


@mutant(ROTATE, killed_by="ROPE-2", misconception="theta fixed at 10000, whatever is given")
def default_theta(states, positions, theta=10000.0):
    return rotate(states, positions)


@mutant(ROTATE, killed_by="ROPE-2", misconception="the last channel of an odd width left as it is in silence")
def odd_channel_left(states, positions, theta=10000.0):
    even = states.shape[-1] - states.shape[-1] % 2
    turned_part = rotate(states[..., :even], positions, theta) if even else states[..., :0]
    return np.concatenate([turned_part, states[..., even:]], axis=-1)


@mutant(ROTATE, killed_by="ROPE-3", misconception="both halves given the same sign: a pair is sheared, not turned")
def minus_sign_lost(states, positions, theta=10000.0):
    angles = angles_of(states, positions, theta)
    first, second = np.split(states, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos + second * sin, second * cos + first * sin], axis=-1)


@mutant(ROTATE, killed_by="ROPE-3", misconception="the attention scale D^(-1/4) folded into the rotation")
def scale_folded_in(states, positions, theta=10000.0):
    return rotate(states, positions, theta) * states.shape[-1] ** -0.25


@mutant(ROTATE, killed_by="ROPE-3", misconception="the first half overwritten in place before the second one reads it")
def updated_in_place(states, positions, theta=10000.0):
    angles = angles_of(states, positions, theta)
    first, second = np.split(states, 2, axis=-1)
    first = first * np.cos(angles) - second * np.sin(angles)
    return np.concatenate([first, second * np.cos(angles) + first * np.sin(angles)], axis=-1)


@mutant(ROTATE, killed_by="ROPE-4", misconception="the square root of the position as the angle: far tokens turn too little")
def compressed_positions(states, positions, theta=10000.0):
    return rotate(states, np.sign(positions) * np.sqrt(np.abs(positions)), theta)


@mutant(ROTATE, killed_by="ROPE-4", misconception="positions beyond a trained length of 1024 clipped to it")
def clipped_positions(states, positions, theta=10000.0):
    return rotate(states, np.minimum(positions, 1023), theta)


@mutant(ROTATE, killed_by="ROPE-5", misconception="positions counted from the buffer (0, 1, 2, ..), the given ones ignored")
def positions_from_the_buffer(states, positions, theta=10000.0):
    return rotate(states, np.arange(states.shape[-2]), theta)


@mutant(ROTATE, killed_by="ROPE-5", misconception="the position of the first token used for all")
def first_position_for_all(states, positions, theta=10000.0):
    return rotate(states, np.asarray(positions)[..., :1], theta)


@mutant(ROTATE, killed_by="ROPE-5", misconception="positions sorted: tokens turned in the order of their places")
def positions_sorted(states, positions, theta=10000.0):
    return rotate(states, np.sort(positions), theta)


@mutant(ROTATE, killed_by="ROPE-5", misconception="negative positions clipped to 0: a rotation cannot be undone")
def negative_positions_clipped(states, positions, theta=10000.0):
    return rotate(states, np.maximum(positions, 0), theta)
