"""Functions of the contract as tasks of two benchmarks of generated kernels; `evictionary verify` judges
what comes back.

`flashinfer-bench`: a definition in JSON, as version 0.1.2 of that package reads it. `kernelbench`: a file
with a class `Model`, `get_inputs` and `get_init_inputs`. The reference in both is that of the method, in
NumPy and float64, with nothing to install.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from evictionary.classroom import bundle
from evictionary.source import first_paragraph
from evictionary.spec_tests.judge.cases import Case
from evictionary.spec_tests.judge.implementation import contract_functions, load, oracle
from evictionary.spec_tests.judge.law import load_laws
from evictionary.spec_tests.memory.arguments import OF_CASE, SETTINGS, arguments_of
from evictionary.spec_tests.memory.helpers import SEAMS

# Every axis of this case has a size of its own, by which it is known in an argument and in the answer.
NAMED = Case(batch=2, num_kv_heads=3, group=4, length=17, head_dim=8, value_dim=10, num_queries=5)
AXES = {2: "B", 3: "H_kv", 12: "H_q", 17: "T", 8: "D", 10: "D_v", 5: "M", 15: "S"}
MEANINGS = {
    "B": "batch", "H_kv": "key-value heads", "H_q": "query heads", "T": "tokens", "D": "channels of a key",
    "D_v": "channels of a value", "M": "queries", "S": "sampled queries",
}  # fmt: skip
FIXED = {"H_kv": 8, "H_q": 32, "D": 128, "D_v": 128}
SIZES = {**FIXED, "B": 1, "T": 4096, "M": 16, "S": 16}
# Arguments that any numbers are; a matrix that has to be a covariance, or weights, would need more words than
# a task has.
FREE = {
    "keys", "values", "next_keys", "next_values", "queries", "query", "scores", "sampled_queries", "kept",
    "budget", "p",
    "keep_ratio", "sink_size", "lag_size",
}  # fmt: skip
RUN = '''

import numpy as np
import torch


def run({names}):
    """{says}"""
    given = {{{given}}}
    found = {function}(**{{key: _numpy(each) for key, each in given.items()}})
    device = next((each.device for each in given.values() if hasattr(each, "device")), "cpu")
    found = torch.from_numpy(np.ascontiguousarray(found)).to(device)
    return found.float() if found.is_floating_point() else found


def _numpy(value):
    if not hasattr(value, "detach"):
        return value
    value = value.detach().cpu()
    return (value.double() if value.is_floating_point() else value).numpy()
'''
MODEL = '''

class Model(torch.nn.Module):
    """{says}"""

    def forward(self, {names}):
        return run({names})


def get_inputs():
    return [{inputs}]


def get_init_inputs():
    return []
'''


def tasks() -> list[dict[str, Any]]:
    """The definition of each function that takes free arrays and numbers and gives one array, as
    flashinfer-bench has it.
    """
    impl = load("reference")
    seams = (path for path in contract_functions() if path.split(".")[1] in SEAMS)
    asked = {path: arguments_of(impl, path, NAMED) for path in seams}
    free = {path: given for path, given in asked.items() if given is not None and set(given) <= FREE}
    answers = {path: oracle(path)(**given) for path, given in free.items()}
    return [
        _definition(path, free[path], answer)
        for path, answer in answers.items()
        if isinstance(answer, np.ndarray)
    ]


def _definition(path: str, arguments: dict[str, Any], answer: np.ndarray) -> dict[str, Any]:
    stem, name = path.split(".")
    inputs = {key: _tensor(each) for key, each in arguments.items()}
    output = _tensor(answer)
    used = [axis for each in (*inputs.values(), output) for axis in each["shape"] or []]
    laws = dict.fromkeys(law.requirement for law in load_laws().values() if law.functions == (path,))
    says = first_paragraph(oracle(path).__doc__ or "").replace("\\", "\\\\")
    modules = {"bundled": ""}
    bundle.add(stem, modules)
    given = ", ".join(f'"{key}": {key}' for key in arguments)
    run = RUN.format(names=", ".join(arguments), says=says, given=given, function=name)
    limits = {"H_q % H_kv == 0": {"H_q", "H_kv"}, "M <= T": {"M", "T"}}
    return {
        "name": f"evictionary_{stem}_{name}",
        "op_type": "kv_cache_eviction",
        "description": " ".join([says, *(f"{each.id}: {each.statement} ({each.source})." for each in laws)]),
        "tags": ["evictionary", f"method:{stem}", *(f"requirement:{each.id}" for each in laws)],
        "axes": {axis: _axis(axis) for axis in dict.fromkeys(used)},
        "constraints": [text for text, axes in limits.items() if axes <= set(used)],
        "inputs": inputs,
        "outputs": {"kept_mask" if answer.dtype == bool else "result": output},
        "reference": bundle.packed(stem, modules) + run,
    }


def _axis(name: str) -> dict[str, Any]:
    kind = {"type": "const", "value": FIXED[name]} if name in FIXED else {"type": "var"}
    return {**kind, "description": MEANINGS[name]}


def _tensor(value: Any) -> dict[str, Any]:
    """The axes and the dtype of an array or a number."""
    array = np.asarray(value)
    dtype = {"f": "float32", "b": "bool", "i": "int32"}[array.dtype.kind]
    return {"shape": [AXES[size] for size in array.shape] if array.ndim else None, "dtype": dtype}


def kernelbench(task: dict[str, Any]) -> str:
    """A task as a file of KernelBench."""
    case = Case(length=SIZES["T"])
    inputs = []
    for key, each in task["inputs"].items():
        shape = [SIZES[axis] for axis in each["shape"] or []]
        drawn = f"torch.rand({shape}) < 0.5" if each["dtype"] == "bool" else f"torch.randn({shape})"
        inputs.append(drawn if shape else repr(OF_CASE[key](case) if key in OF_CASE else SETTINGS[key]))
    return task["reference"] + MODEL.format(
        says=task["description"].split(" (")[0], names=", ".join(task["inputs"]), inputs=", ".join(inputs)
    )


def write(form: str, folder: Path) -> list[str]:
    """Write every task in a form, and return the names of the files."""
    made = tasks()
    if form == "kernelbench":
        texts = {f"{number}_{task['name']}.py": kernelbench(task) for number, task in enumerate(made, 1)}
    else:
        texts = {
            f"definitions/{one['op_type']}/{one['name']}.json": json.dumps(one, indent=1) + "\n"
            for one in made
        }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return [*texts]
