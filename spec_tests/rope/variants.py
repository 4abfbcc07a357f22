"""Correct rotary position embeddings of other kinds."""

from evictionary.spec_tests.shared import forms
from evictionary.spec_tests.shared.variants import *

FREQUENCIES, ROTATE = "rope.frequencies", "rope.rotate"


@control(FREQUENCIES)
def through_the_logarithm(head_dim, theta=10000.0):
    return np.exp(-np.arange(head_dim // 2) * (2 * math.log(theta) / head_dim))


@control(FREQUENCIES, array_library="torch", dtypes=("float32",))
def torch_inverse_power(head_dim, theta=10000.0):
    """1 / theta^(2i/D) in float32, as transformers has it."""
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


control(ROTATE, name="complex_numbers")(forms.turned_as_complex_numbers)


def torch_angles(states, positions, theta):
    """The angles of both halves [..., D], at least in float32."""
    dtype = torch.promote_types(states.dtype, torch.float32)
    inverse = 1.0 / theta ** (torch.arange(0, states.shape[-1], 2, dtype=dtype) / states.shape[-1])
    angles = positions.to(dtype)[..., None] * inverse
    return torch.cat([angles, angles], dim=-1)


def torch_turned(states, angles):
    first, second = states.chunk(2, dim=-1)
    return states * angles.cos().to(states.dtype) + torch.cat([-second, first], dim=-1) * angles.sin().to(
        states.dtype
    )


@control(ROTATE, array_library="torch", dtypes=ALL)
def torch_tables_in_the_dtype(states, positions, theta=10000.0):
    """As transformers does it: angles in float32, sines and cosines rounded to the dtype of the states."""
    return torch_turned(states, torch_angles(states, positions, theta))


control(ROTATE, array_library="torch", dtypes=("float16", "bfloat16"), name="torch_widened")(
    through_float32(torch_tables_in_the_dtype)
)
