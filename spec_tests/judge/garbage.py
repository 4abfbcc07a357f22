"""The garbage collector looks at all objects that live, again and again: torch and the laws alone are half a
million. A process that asks laws lets it rest, which is a seventh of its time.
"""

import atexit
import gc

USUAL = gc.get_threshold()
# Libraries that look for leaks at the end, as Triton's does, find what the collector has left alone.
atexit.register(gc.unfreeze)


def settle() -> None:
    """Let the collector leave alone what lives now, and look less often at what comes."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, *USUAL[1:])


def unsettle() -> None:
    """Let the collector look as often as usual again. What it leaves alone it takes up at the end."""
    gc.set_threshold(*USUAL)
