"""Triton's interpreter has no GPU to time a configuration on: `@triton.autotune` takes its first one there.

The child of the classroom loads this file by its path: it imports nothing of ours.
"""

import functools
import os
from typing import Any


def is_used() -> bool:
    """Whether kernels run in the interpreter, which takes a second for a millisecond."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def take_first_configurations() -> None:
    """From now on each autotuned kernel of this process runs with the first configuration that it lists."""
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.run

    @functools.wraps(original)
    def run(self: Any, *arguments: Any, **named: Any) -> Any:
        every, self.configs = self.configs, self.configs[:1]
        try:
            return original(self, *arguments, **named)
        finally:
            self.configs = every

    Autotuner.run = run
