"""Triton kernels to read: for each method the shortest kernel
that keeps its laws, beside the tuned one in `optimized/kernels/`.

Each file is read from top to bottom: the functions of the contract, then the kernels, at most 60 lines
together. To stay short they take float32 alone, head_dims that are powers of two, and contiguous tensors (a
function copies one that is not). They check no argument, need a GPU or TRITON_INTERPRET=1, and nothing else
in the project calls them. A kernel carries no graph: `forward_only` refuses arguments of which a gradient is
wanted, and a mask has none (`torch.no_grad`). The same laws judge them:

    TRITON_INTERPRET=1 pytest spec_tests/keydiff/test_keydiff.py --impl evictionary.optimized.teaching

What torch says in a line, such as a mean over the heads of a group or the softmax of logits that are there,
torch does. A product of a tile with a vector is written as a multiplication and a sum. A product of two tiles
is `tl.dot`: 16 channels at a time, because all at once would need more registers than there are, and in full
float32 ("ieee"), because the default keeps 10 bits.
"""

ARRAY_LIBRARY = "torch"
CONVENTIONS = ("unchecked",)
DOMAIN = {
    "head_dim": (1, 2, 4, 8, 16, 32, 64, 128),
    "value_dim": (1, 2, 4, 8, 16, 32, 64, 128),
    "dtype": "float32",
}
