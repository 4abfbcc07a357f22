"""Kernels with one mistake each that Triton's interpreter
runs as if nothing were: `make compiled` names the line.

A mistake is a comment on its line: `# fault: KIND`. A function calls its kernel on tensors of its own and
returns the result.
"""

import torch
import triton
import triton.language as tl


def _launched(kernel, programs, *arguments):
    """The last tensor of the arguments, after so many programs of a kernel."""
    kernel[(programs,)](*arguments)
    return [each for each in arguments if isinstance(each, torch.Tensor)][-1]


@triton.jit
def _norms(keys, scores, length, step, head_dim: tl.constexpr, block: tl.constexpr):
    tokens = tl.program_id(0) * block + tl.arange(0, block)
    places = tokens[:, None] * step + tl.arange(0, head_dim)[None, :]
    loaded = tl.load(keys + places, mask=(tokens < length)[:, None], other=0.0)
    tl.store(scores + tokens, tl.sqrt(tl.sum(loaded * loaded, axis=1)))  # fault: oob_write


def store_without_a_mask(device):
    """The last tile writes past the end of the scores."""
    return _launched(
        _norms, 2, torch.ones(70, 16, device=device), torch.empty(70, device=device), 70, 16, 16, 64
    )


@triton.jit
def _sums(keys, sums, length, block: tl.constexpr):
    tokens = tl.arange(0, block)
    loaded = tl.load(keys + tokens)  # fault: oob_read
    tl.store(sums, tl.sum(tl.where(tokens < length, loaded, 0.0), axis=0))


def load_without_a_mask(device):
    """What lies behind the keys is read, and thrown away later."""
    return _launched(_sums, 1, torch.ones(70, device=device), torch.empty(1, device=device), 70, 128)


@triton.jit
def _tail_sum(keys, sums, length, block: tl.constexpr):
    tokens = tl.arange(0, block)
    loaded = tl.load(keys + tokens, mask=tokens < length)  # fault: undefined
    tl.store(sums, tl.sum(loaded, axis=0))


def load_without_other(device, dtype="float32"):
    """A masked load without `other` gives no number behind the end, and the sum takes it in."""
    keys = torch.ones(70, dtype=getattr(torch, dtype), device=device)
    return _launched(_tail_sum, 1, keys, torch.empty(1, device=device), 70, 128)


@triton.jit
def _count(kept, total, block: tl.constexpr):
    tokens = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(total, tl.load(total) + tl.sum(tl.load(kept + tokens), axis=0))  # fault: race


def programs_that_share_a_sum(device):
    """Each program reads the sum, adds its own and writes it: two at once lose one."""
    return _launched(_count, 4, torch.ones(256, device=device), torch.zeros(1, device=device), 64)


@triton.jit
def _running(lengths, ends, block: tl.constexpr):
    row = tl.program_id(0)
    before = tl.load(ends + row)
    tl.store(ends + row + 1, before + tl.load(lengths + row))  # fault: race


def a_program_that_waits_for_the_one_before(device):
    """The programs happen to run in order in the interpreter; no GPU promises it."""
    return _launched(_running, 4, torch.ones(4, device=device), torch.zeros(5, device=device), 1)


@triton.jit
def _some(keys, scores, length, block: tl.constexpr):
    tokens = tl.program_id(0) * block + tl.arange(0, block)
    loaded = tl.load(keys + tokens, mask=tokens < length, other=0.0)
    tl.store(scores + tokens, loaded, mask=(tokens < length) & (loaded > 0))


def output_that_is_not_written(device):
    """Tokens with a negative key have no score: what memory held before shines through."""
    keys = torch.tensor([1.0, -1.0, 2.0, -2.0], device=device)
    return _launched(_some, 1, keys, torch.empty(4, device=device), 4, 4)


@triton.jit
def _item(keys, firsts, step: tl.int32):
    item = tl.program_id(0)
    tl.store(firsts + item, tl.load(keys + item * step))  # fault: oob_read


def offsets_of_32_bits(device):
    """The third item lies 2^31 elements behind the first, and a 32-bit product of its place is negative."""
    keys = torch.empty(2**31 + 1, dtype=torch.int8, device=device)
    return _launched(_item, 3, keys, torch.empty(3, dtype=torch.int8, device=device), 2**30)


@triton.jit
def _average(kept, out, length, block: tl.constexpr):
    tokens = tl.arange(0, block)
    total = tl.sum(tl.load(kept + tokens, mask=tokens < length, other=0), axis=0)
    tl.store(out, length // total)  # fault: poison


def a_division_by_nothing(device):
    """A head that keeps no token divides by zero, which is undefined for whole numbers."""
    kept, out = (torch.zeros(size, dtype=torch.int32, device=device) for size in (4, 1))
    return _launched(_average, 1, kept, out, 4, 4)


@triton.jit
def _scatter(places, values, out, block: tl.constexpr):
    tokens = tl.arange(0, block)
    tl.store(out + tl.load(places + tokens), tl.load(values + tokens))  # fault: poison


def lanes_that_write_one_place(device):
    """Two tokens of one program go to the same slot: which of them stays is undefined."""
    places = torch.tensor([0, 1, 1, 2], device=device)
    return _launched(_scatter, 1, places, torch.arange(4.0, device=device), torch.zeros(3, device=device), 4)


@triton.jit
def _compact(keys, kept, slots, out, length, head_dim: tl.constexpr):
    token = tl.program_id(0)
    channels = tl.arange(0, head_dim)
    if tl.load(kept + token):
        loaded = tl.load(keys + token * head_dim + channels)
        tl.store(out + tl.load(slots + token) * head_dim + channels, loaded)  # fault: race


def compaction_in_place(device):
    """Kept tokens move to the front of the same tensor:
    one is written where another program has not read yet.
    """
    keys = torch.arange(32.0, device=device).reshape(8, 4)
    kept = torch.tensor([0, 1, 0, 1, 1, 0, 1, 1], dtype=torch.int32, device=device)
    return _launched(_compact, 8, keys, kept, torch.cumsum(kept, 0) - 1, keys, 8, 4)
