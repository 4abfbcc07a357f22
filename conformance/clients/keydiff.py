"""KeyDiff's score as a program of its own, for `evictionary judge --exec "python keydiff.py"`: the
standard library alone.

docs/any_language.md is the protocol. The array module reads and
writes the numbers as this machine stores them: little-endian.
"""

import json
import math
import sys
from array import array

HELLO = {
    "protocol": 1,
    "name": "plain_python",
    "functions": ["keydiff.score"],
    "domain": {"dtype": ["float64", "float32"]},
}
CODES = {"float64": "d", "float32": "f"}


def unit(vector):
    """The direction of a vector; of the zero vector, zero."""
    largest = max(map(abs, vector))
    scaled = [x / largest if largest else 0.0 for x in vector]
    length = math.hypot(*scaled)
    return [x / length if length else 0.0 for x in scaled]


def score(keys):
    """Minus the cosine of each key of a head with the mean of their directions."""
    directions = [unit(key) for key in keys]
    anchor = unit([math.fsum(channel) / len(keys) for channel in zip(*directions, strict=True)])
    return [-math.fsum(x * y for x, y in zip(direction, anchor, strict=True)) for direction in directions]


def answer(request):
    if request["function"] == "hello":
        return {"result": HELLO}
    keys = request["arguments"]["keys"]
    *heads, length, channels = shape = keys["shape"] if len(keys["shape"]) >= 2 else [0, 0]
    if 0 in shape or keys["dtype"] not in CODES:
        return {
            "error": f"keys: got shape {keys['shape']} and dtype {keys['dtype']}, wanted numbers [..., T, D]"
        }
    numbers = array(CODES[keys["dtype"]])
    with open(keys["file"], "rb") as file:
        numbers.frombytes(file.read())
    if not all(map(math.isfinite, numbers)):
        return {"error": "keys: got numbers that are not finite"}
    rows = [numbers[start : start + channels] for start in range(0, len(numbers), channels)]
    scores = [each for start in range(0, len(rows), length) for each in score(rows[start : start + length])]
    output = request["output"] + "scores"
    with open(output, "wb") as file:
        array(numbers.typecode, scores).tofile(file)
    return {"result": {"file": output, "shape": [*heads, length], "dtype": keys["dtype"]}}


for line in sys.stdin:
    request = json.loads(line)
    print(json.dumps({"id": request["id"], **answer(request)}), flush=True)
