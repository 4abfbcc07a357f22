"""How the controls refuse arguments, each by conditions of its own."""

from __future__ import annotations


def refuse_unless(**fits) -> None:
    """ValueError naming the first argument that does not fit."""
    for name, fit in fits.items():
        if not fit:
            raise ValueError(f"{name}: does not fit, or is not finite")
