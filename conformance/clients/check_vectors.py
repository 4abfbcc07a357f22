"""Compare a function with the cases that `evictionary vectors` wrote, by the standard library alone.

python check_vectors.py FOLDER keydiff.score my_file.py [DTYPE]; arrays: nested lists, bad input: ValueError.
"""

import importlib.util
import json
import pathlib
import sys


def nested(value):
    if isinstance(value, list):
        return [nested(each) for each in value]
    if not isinstance(value, dict) or "data" not in value:
        return value
    rows = [float(each) if isinstance(each, str) else each for each in value["data"]]
    for size in value["shape"][:0:-1]:
        rows = [rows[start : start + size] for start in range(0, len(rows), size)] if size else []
    return rows if value["shape"] else rows[0]


def flat(value):
    return [leaf for each in value for leaf in flat(each)] if isinstance(value, list | tuple) else [value]


def fault(case, function, dtype):
    try:
        got = function(**{name: nested(value) for name, value in case["arguments"].items()})
    except ValueError as error:
        return "" if "error" in case["expected"] else f"refused: {error}"
    if "error" in case["expected"]:
        return f"accepted what is to be refused: {case['expected']['error']}"
    expected, several = case["expected"], isinstance(case["expected"], list)
    for wanted, answer in zip(expected if several else [expected], got if several else [got], strict=True):
        most = wanted.get("tolerance", {}).get(dtype, {"largest": 0, "mean": 0})
        pairs = zip(flat(nested(wanted)), flat(answer), strict=True)
        errors = [0 if one == other else abs(one - other) for one, other in pairs]
        if not max(errors, default=0) <= most["largest"] or not sum(errors) <= most["mean"] * len(errors):
            return f"off by {max(errors):.3g}, allowed are {most['largest']:.3g}"
    return ""


folder, path, file, dtype = (*sys.argv[1:], "float32")[:4]
spec = importlib.util.spec_from_file_location("mine", file)
spec.loader.exec_module(mine := importlib.util.module_from_spec(spec))
contents = [json.loads(each.read_text()) for each in sorted(pathlib.Path(folder).glob("*-*.json"))]
mistakes = {name: text for content in contents for name, text in content["mistakes"].items()}
cases = [case for content in contents for case in content["cases"] if case["function"] == path]
faults = {case["id"]: fault(case, getattr(mine, path.split(".")[1]), dtype) for case in cases}
for case in cases:
    if faults[case["id"]]:
        print(f"{case['id']} ({case['kind']}): {faults[case['id']]}")
generic = [case for case in cases if case["kind"] == "mathematics"]
failed = {case["id"] for case in generic if faults[case["id"]]}
for name, text in mistakes.items():  # a mistake fails the cases that catch it, and no others
    if failed and failed == {case["id"] for case in generic if name in case["catches"]}:
        print(f"these are the cases that catch: {text}")
print(f"{sum(not each for each in faults.values())} of {len(cases)} cases hold")
sys.exit(any(faults.values()) or not cases)
