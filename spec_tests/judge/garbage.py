"""The garbage collector looks at all objects that live, again and again: torch and the laws alone are half a
million. A process that asks laws lets it rest, which is a seventh of its time.
"""

import gc

USUAL = gc.get_threshold()


def settle() -> None:
    """Let the collector leave alone what lives now, and look less often at what comes."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, *USUAL[1:])


def unsettle() -> None:
    """Let the collector look as often as usual again; what lives it leaves alone up to the end."""
    gc.set_threshold(*USUAL)
