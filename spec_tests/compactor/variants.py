"""Correct Compactors of other kinds."""

from evictionary.spec_tests.shared.variants import *


@control("compactor.leverage", array_library="torch", dtypes=ALL[1:], max_length=1024)
@in_float32
def by_the_products_of_tokens(keys, *, ridge=0.0):
    """The same shares from the T x T products of the keys, in float64: they square what keys round."""
    powers, basis = torch.linalg.eigh(keys.double() @ keys.double().mT)
    shares = torch.where(powers > 1e-12 * powers[..., -1:], powers / (powers + ridge), 0)
    return (basis.square() * shares[..., None, :]).sum(dim=-1).to(keys.dtype)


@control("compactor.sketched_leverage", array_library="torch", dtypes=ALL[1:])
@in_float32
def centred_in_the_sketch(keys, sketch, *, ridge=0.01):
    """Sketched first and then centred; the hat matrix of the k x k products, in float64."""
    rows = keys.double() @ sketch.double()
    rows = rows - rows.mean(dim=-2, keepdim=True)
    products = rows.mT @ rows + ridge * torch.eye(rows.shape[-1])
    return ((rows @ torch.linalg.pinv(products, rtol=1e-12)) * rows).sum(dim=-1).to(keys.dtype)


@control("compactor.chunk_attention", array_library="torch", dtypes=ALL, max_length=4096)
@in_float32
def one_matrix_with_a_mask(queries, keys, *, chunk_size=256):
    """All logits at once, -inf where query and token are of different chunks."""
    chunk = torch.arange(keys.shape[-2]) // chunk_size
    return (queries @ keys.mT).masked_fill(chunk[:, None] != chunk, -torch.inf).softmax(dim=-1).sum(dim=-2)
