r"""PyramidKV (arXiv 2406.02069), an allocator: budgets that fall linearly with depth, at the same total."""

from evictionary.reference.pyramid_kv import budgets

__all__ = ["budgets"]  # the budgets are exact integer arithmetic: the reference's function serves here too
