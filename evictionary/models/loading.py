"""How a model is loaded: on which device or devices, in which numbers, of which revision. Torch is imported
only where a device is looked for, so that the help of a command does not wait for it.
"""

import itertools
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from evictionary.errors import require

DTYPES = ("auto", "float32", "bfloat16", "float16")
DIVISIONS = ("auto", "balanced", "balanced_low_0", "sequential")
NUMBERS = ("dtype", "revision", "attn")
"""What changes the numbers that a model gives: a folder of results has one of each."""

DeviceMap = str | Mapping[str, int | str]


@dataclass(frozen=True)
class Loading:
    """How to load a model; by default on the first GPU, or the CPU without one, as its files have it.

    `device` is cpu, cuda, cuda:1 or another device of torch; `dtype` one of DTYPES, where
    auto is what the model's files say; `device_map` one of DIVISIONS, by which accelerate
    divides the model among all devices, or a device for each module; `revision` a branch,
    tag or commit on the hub; `attn` an attention of transformers, such as sdpa. Raises
    UsageError for words that can be none of these, and for a device beside a device_map.
    """

    device: str | None = None
    dtype: str = "auto"
    device_map: DeviceMap | None = field(default=None, hash=False)
    revision: str | None = None
    attn: str | None = None

    def __post_init__(self) -> None:
        is_division = self.device in DIVISIONS
        require(
            self.device is None or (re.fullmatch(r"[a-z]+(:\d+)?", self.device) and not is_division),
            f"device: got {self.device!r}, wanted cpu, cuda, or one GPU such as cuda:1"
            + "; --device-map divides a model" * is_division,
        )
        require(self.dtype in DTYPES, f"dtype: got {self.dtype!r}, wanted one of {', '.join(DTYPES)}")
        require(
            self.device_map is None or isinstance(self.device_map, Mapping) or self.device_map in DIVISIONS,
            f"device_map: got {self.device_map!r}, wanted one of {', '.join(DIVISIONS)}, or a device for "
            "each module (a JSON file for --device-map); --device names one device",
        )
        require(
            self.device is None or self.device_map is None,
            f"device: got {self.device!r} beside device_map {self.device_map!r}, wanted one of the two",
        )
        for name in ("revision", "attn"):
            value = getattr(self, name)
            require(value is None or value.strip(), f"{name}: got {value!r}, wanted a name")

    def numbers(self) -> dict[str, str]:
        """What was asked of NUMBERS: nothing for a model as its files have it."""
        default = Loading()
        asked = {name: getattr(self, name) for name in NUMBERS}
        return {name: value for name, value in asked.items() if value != getattr(default, name)}

    def require_here(self) -> None:
        """Raise UsageError for a device that this machine lacks, or a division without accelerate."""
        require(
            self.device_map is None or find_spec("accelerate"),
            f"device_map: got {self.device_map!r} without accelerate, wanted it: pip install accelerate",
        )
        if self.device is not None:
            _require_device("device", self.device)
        places = self.device_map.values() if isinstance(self.device_map, Mapping) else ()
        for place in {f"cuda:{each}" if isinstance(each, int) else each for each in places} - {"disk"}:
            _require_device("device_map", place)

    def in_worker(self) -> "Loading":
        """The same in one of several processes that measure: each takes a GPU, the one that fewest have."""
        import torch

        if self.device_map is not None or self.device not in (None, "cuda") or torch.cuda.device_count() < 2:
            return self
        return replace(self, device=f"cuda:{_own_gpu()}")

    def shared_out(self, jobs: int) -> str:
        """What `jobs` processes on this machine do with its
        GPUs, in a sentence; empty for one, and without a GPU.

        Raises UsageError where each of them would divide a model among all devices.
        """
        import torch

        require(
            jobs == 1 or self.device_map is None,
            f"jobs: got {jobs} with device_map {self.device_map!r}, wanted 1: each process would divide a "
            "model of its own among all devices",
        )
        gpus, device = torch.cuda.device_count(), self.device or "cuda"
        if jobs == 1 or not gpus or not device.startswith("cuda"):
            return ""
        told = f"{jobs} processes, each with a model of its own"
        if gpus == 1 or device != "cuda":
            place = "cuda:0" if device == "cuda" else device
            return f"{told}, share {place}: take fewer --jobs where its memory is short"
        some = f"{-(-jobs // gpus)} at most share one" if jobs > gpus else "each alone"
        return f"{told}, on {gpus} GPUs: {some}"


def _require_device(argument: str, text: str) -> None:
    import torch

    try:
        there = torch.get_device_module(torch.device(text).type)
        count = there.device_count() if there.is_available() else 0
    except (RuntimeError, AttributeError):
        count = 0  # a name that this torch does not know
    index = int(text.partition(":")[2] or 0)
    require(index < count, f"{argument}: got {text!r}, wanted {_wanted()}")


def _wanted() -> str:
    """The devices of this machine, in words."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus:
        return "cpu, cuda, or cuda:0" + f" to cuda:{gpus - 1}" * (gpus > 1)
    if torch.backends.mps.is_available():
        return "cpu or mps"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.version.cuda is None and torch.version.hip is None:
        why = f"torch {torch.__version__} is built for the CPU alone"
    else:
        why = "torch finds no GPU here" + f", with CUDA_VISIBLE_DEVICES={visible!r}" * (visible is not None)
    return f"cpu: {why}"


# One GPU for each process
# ---------------------------------------------------------------------------------------------------------


def fewest(gpus: Sequence[str], take: Callable[[str], bool]) -> int:
    """The index of the GPU, of those with these names, that fewest processes have; the first of several.

    A GPU has any number of seats, "name.0" before "name.1". `take` takes a seat and returns True, unless
    another process has it. So the process i of those that see n GPUs gets the GPU i modulo n.
    """
    seats = ((index, f"{gpu}.{row}") for row in itertools.count() for index, gpu in enumerate(gpus))
    return next(index for index, seat in seats if take(seat))


@cache
def _own_gpu() -> int:
    """The GPU of this process, as long as it lives."""
    import torch

    every = range(torch.cuda.device_count())
    return fewest([str(torch.cuda.get_device_properties(index).uuid) for index in every], _take)


_seats: list[Any] = []
"""The locks that this process holds. The system frees them when it ends, however it ends."""


def _take(seat: str) -> bool:
    """Take a seat for this process, unless another process of this user on this machine has it."""
    import filelock

    folder = Path(tempfile.gettempdir()) / f"evictionary-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    lock = filelock.FileLock(folder / seat)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return False
    _seats.append(lock)
    return True
