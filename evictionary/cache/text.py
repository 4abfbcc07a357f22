"""What a cache has read, so that it can compare it with what a caller says: the ids of the tokens, and the
position at which each row goes on.
"""

from __future__ import annotations

import torch

UNKNOWN = -1
"""The id of a token that came as an embedding, or past the cache."""
JOINED = 64
"""Ids that come one by one are joined after so many."""


class Text:
    """The ids [B, T] of the tokens that a cache has read, and a shift for each row, or one for all.

    The next token of a row stands at position T + shift. The shift is minus the padding of the row, where
    positions do not count it, another number after an image, and NaN where it is not known. Ids stay on the
    device that they came from, so no GPU waits for them.
    """

    def __init__(self) -> None:
        self.length = 0
        self.shifts: list[float] = [0.0]
        self._parts: list[torch.Tensor] = []  # int32, [B, n]; none is ever written into
        self._new = 0  # how many of the last parts have not been joined

    @property
    def ids(self) -> torch.Tensor:
        """[B, T], int32, padding included, UNKNOWN where it is not known; [1, 0] without a token."""
        if not self._parts:
            return torch.zeros(1, 0, dtype=torch.int32)
        self._join(len(self._parts))
        return self._parts[0]

    @property
    def nbytes(self) -> int:
        """The bytes of the ids."""
        return sum(part.nbytes for part in self._parts)

    def read(self, tokens: torch.Tensor) -> None:
        """Add ids [B, M], or M unknown ones for embeddings [B, M, hidden]."""
        rows, count = tokens.shape[:2]
        if tokens.ndim == 2:
            self._add(tokens.to(torch.int32, copy=True))
        else:
            self._add(torch.full((rows, count), UNKNOWN, dtype=torch.int32, device=tokens.device))

    def fit(self, length: int, rows: int) -> None:
        """Forget the tokens from `length` on, which were cropped or never stored; add unknown ones for those
        that came past the cache.
        """
        if length > self.length:
            self._add(torch.full((rows, length - self.length), UNKNOWN, dtype=torch.int32))
        elif length < self.length:
            self._parts, self._new, self.length = ([self.ids[:, :length]] if length else []), 0, length

    def select(self, indices: torch.Tensor) -> None:
        """Keep these rows, in this order."""
        if self._parts:
            self._parts, self._new = [self.ids[indices.to(self.ids.device)]], 0
        if len(self.shifts) > 1:
            self.shifts = torch.tensor(self.shifts)[indices.to("cpu")].tolist()

    def copy(self) -> Text:
        """The same text, to go on in another way."""
        twin = Text()
        twin.__dict__ |= self.__dict__ | {"_parts": [*self._parts]}
        return twin

    def _add(self, ids: torch.Tensor) -> None:
        self._parts.append(ids)
        self._new += 1
        self.length += ids.shape[1]
        if self._new > JOINED:
            self._join(self._new)

    def _join(self, count: int) -> None:
        """Make one of the last parts."""
        if count > 1:
            last = self._parts[-count:]
            joined = torch.cat([part.to(last[-1].device) for part in last], dim=1)
            self._parts[-count:] = [joined]
        self._new = 0
