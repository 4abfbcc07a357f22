"""Correct rotary position embeddings of other kinds."""

from __future__ import annotations

import math

import numpy as np
import torch

from evictionary.spec_tests.proof.planted import control

FREQUENCIES, ROTATE = "rope.frequencies", "rope.rotate"
ALL = ("float64", "float32", "float16", "bfloat16")


def refuse_odd(head_dim) -> None:
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim: got {head_dim}, wanted an even number of at least 2")


@control(FREQUENCIES)
def repeated_product(head_dim, theta=10000.0):
    """Each frequency the one before times the same factor."""
    refuse_odd(head_dim)
    factor = theta ** (-2 / head_dim)
    return np.cumprod(np.full(head_dim // 2, factor)) / factor


@control(FREQUENCIES)
def through_the_logarithm(head_dim, theta=10000.0):
    refuse_odd(head_dim)
    return np.exp(-np.arange(head_dim // 2) * (2 * math.log(theta) / head_dim))


@control(FREQUENCIES, array_library="torch", dtypes=("float32",))
def torch_inverse_power(head_dim, theta=10000.0):
    """1 / theta^(2i/D) in float32, as transformers has it."""
    refuse_odd(head_dim)
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


@control(ROTATE)
def complex_numbers(states, positions, theta=10000.0):
    """Each pair as a complex number, times e^(i angle)."""
    refuse_odd(states.shape[-1])
    half = states.shape[-1] // 2
    angles = np.asarray(positions)[..., None] * through_the_logarithm(states.shape[-1], theta)
    pairs = (states[..., :half] + 1j * states[..., half:]) * np.exp(1j * angles)
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


@control(ROTATE, dtypes=("float64", "float32"))
def rotation_matrices(states, positions, theta=10000.0):
    """A D x D matrix for each position."""
    width = states.shape[-1]
    refuse_odd(width)
    half = width // 2
    angles = np.asarray(positions)[..., None] * theta ** (-np.arange(half) / half)
    matrices = np.zeros((*angles.shape[:-1], width, width))
    first = np.arange(half)
    matrices[..., first, first] = matrices[..., first + half, first + half] = np.cos(angles)
    matrices[..., first + half, first] = np.sin(angles)
    matrices[..., first, first + half] = -np.sin(angles)
    return np.einsum("...tij,...tj->...ti", matrices.astype(states.dtype), states)


def rotate_half(states):
    first, second = states.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def torch_angles(states, positions, theta, dtype):
    refuse_odd(states.shape[-1])
    inverse = 1.0 / theta ** (torch.arange(0, states.shape[-1], 2, dtype=dtype) / states.shape[-1])
    angles = positions.to(dtype)[..., None] * inverse
    return torch.cat([angles, angles], dim=-1)


@control(ROTATE, array_library="torch", dtypes=ALL)
def torch_tables_in_the_dtype(states, positions, theta=10000.0):
    """As transformers does it: angles in float32, sines and cosines rounded to the dtype of the states."""
    angles = torch_angles(states, positions, theta, torch.float64 if states.dtype == torch.float64 else torch.float32)
    return states * angles.cos().to(states.dtype) + rotate_half(states) * angles.sin().to(states.dtype)


@control(ROTATE, array_library="torch", dtypes=("float16", "bfloat16"))
def torch_widened(states, positions, theta=10000.0):
    """In float32 up to the last rounding."""
    angles = torch_angles(states, positions, theta, torch.float32)
    return (states.float() * angles.cos() + rotate_half(states.float()) * angles.sin()).to(states.dtype)
