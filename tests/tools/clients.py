"""Programs that know nothing of ours."""

# KeyDiff as somebody writes it who has the paper and no NumPy.
PLAIN_KEYDIFF = """
import math


def unit(vector):
    length = math.hypot(*vector)
    return [x / length if length else 0.0 for x in vector]


def score(keys):
    if isinstance(keys, list) and keys and isinstance(keys[0], list) and keys[0] and isinstance(keys[0][0], list):
        return [score(each) for each in keys]
    if not keys or not isinstance(keys[0], list) or not all(keys) or not all(map(math.isfinite, sum(keys, []))):
        raise ValueError("keys: empty or not finite")
    directions = [unit(key) for key in keys]
    anchor = unit([sum(channel) / len(keys) for channel in zip(*directions)])
    return [-sum(x * y for x, y in zip(direction, anchor)) for direction in directions]
"""
