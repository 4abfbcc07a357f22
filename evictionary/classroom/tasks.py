"""Functions of the contract as tasks of two benchmarks of generated kernels; `evictionary verify` judges
what comes back.

`flashinfer-bench`: a definition in JSON and a workload, as version 0.1.2 of that package reads them.
`kernelbench`: a file with a class `Model`, `get_inputs` and `get_init_inputs`. The reference in both is the
function as it stands in `reference/`, in NumPy and float64, with what it calls.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evictionary.classroom.standalone import standalone
from evictionary.reference.contract import Argument, arguments, contracts
from evictionary.source import first_paragraph
from evictionary.spec_tests.judge.cases import Case
from evictionary.spec_tests.judge.implementation import load, oracle
from evictionary.spec_tests.judge.law import load_laws
from evictionary.spec_tests.memory.arguments import OF_CASE, SETTINGS, arguments_of, signature_of
from evictionary.store import put

DTYPES = ("float32", "float16", "bfloat16")
OP_TYPE = "kv_cache_eviction"

# Every axis of this case has a size of its own, by which it is known in an answer.
NAMED = Case(batch=2, num_kv_heads=3, group=4, length=17, head_dim=8, value_dim=10, num_queries=6)
MEANINGS = {
    "B": "batch", "H_kv": "key-value heads", "H_q": "query heads", "T": "tokens", "D": "channels of a key",
    "D_v": "channels of a value", "M": "queries", "S": "sampled queries, or tokens of a page", "L": "layers",
    "N": "tokens of all heads", "P": "pages", "n": "pages of a sequence", "C": "channels of hidden states",
    "hidden": "channels of hidden states", "k": "columns of a sketch",
}  # fmt: skip
FIXED = {"H_kv": 8, "H_q": 32, "D": 128, "D_v": 128}
CONSTANT = (*FIXED, "half_D")
COMPUTED = {"D/2": "half_D", "n*S": "slots"}
"""Names for axes of the contract that are computed, for a definition takes names alone."""
SIZES = {
    **FIXED, "B": 1, "T": 4096, "M": 64, "S": 16, "L": 32, "N": 2048, "P": 256, "n": 256, "C": 256,
    "hidden": 256, "k": 64, "R": 512, "kept": 512,
}  # fmt: skip
SHORT = {"T": 512, "R": 64, "n": 32}
QUADRATIC = {
    "attention_matching.bounded_least_squares", "cam.merge_values", "cam.probabilities", "cam.shares",
    "cam.spread", "compactor.chunk_attention", "compactor.score", "dropkv.score", "keydiff.pairwise_score",
    "keydiff.similarity_matrix", "rkv.redundancy", "rkv.score", "rkv.similarities",
}  # fmt: skip
"""They compare every token with every other, or go step by step, and are asked of a shorter text."""
STORED = {
    "key", "keys", "value", "values", "query", "queries", "states", "w_o", "query_weight", "sketch", "low",
    "high",
}  # fmt: skip
"""The name, or its last word, of what a model computes or stores in its dtype. Scores, weights of attention
and statistics are float32 beside them, as in the kernels of `optimized`.
"""
COUNTED = {
    "attention_matching.fit_values",
    "paging.slot_mapping",
    "quantisation.by_channel",
    "quantisation.dequantise",
}
"""The number of kept tokens, a setting or the groups are the size of an axis of theirs."""
OF_THE_STATES = (
    "append", "attend", "attend_certified", "attend_pages", "gated_attention", "merge_values", "no_bounds",
    "page_bounds", "rotate", "spread",
)  # fmt: skip
"""Functions that answer with vectors of the dtype of the states; all others answer in float32."""
DRAWS = {
    "attention": "torch.randn({shape}).softmax(-1)",
    "budgets": "torch.randint(1, T, ({shape}))",
    "cache_lengths": "torch.full(({shape}), N // (B * H_kv))",
    "going": "torch.full(({shape},), H_kv * T // 4)",
    "high": "low + torch.rand({shape})",
    "low": "torch.randn({shape})",
    "moments_count": "torch.full(({shape}), 100)",
    "moments_key_sum": "10 * torch.randn({shape})",
    "moments_value_key_sum": "10 * torch.randn({shape})",
    "moments_value_sum": "10 * torch.randn({shape})",
    "new": "torch.arange(T).repeat(B, H_kv, 1) // 2",
    "old": "torch.arange(T).repeat(B, H_kv, 1)",
    "paged_block_table": "torch.arange(P).reshape({shape}).flip(1)",
    "paged_lengths": "torch.full(({shape}), n * S - 1)",
    "paged_positions": (
        "((n - 1 - torch.arange(P) % n)[:, None] * S + torch.arange(S))[:, :, None].repeat(1, 1, H_kv)"
    ),
    "paged_seen": "torch.full(({shape},), n * S - 1)",
    "query_slack": "torch.rand({shape})",
}
"""What is drawn for an input of this name, where normal numbers are none of its values. The moments are those
of a hundred tokens.
"""
DRAWS_OF_KIND = {
    "weight": "torch.rand({shape})",
    "share": "torch.rand({shape})",
    "bool": "torch.rand({shape}) < 0.5",
    "whole": "torch.arange({shape})",
    "low": "-3 - torch.rand({shape})",
    "high": "3 + torch.rand({shape})",
    "covariance": "covariance({shape})",
    "real": "torch.randn({shape})",
}
COVARIANCE = """

def covariance(*shape):
    rows = torch.randn(shape)
    return rows @ rows.mT / shape[-1]
"""
RUN = '''

def run({names}):
    """{says}"""
    found = {call}
    return {answer}


def in_numpy(tensor):
    tensor = tensor.detach().cpu()
    return (tensor.double() if tensor.is_floating_point() else tensor).numpy()


def in_torch(array, like, dtype):
    return torch.from_numpy(np.array(array)).to(like.device, dtype)
'''
MODEL = '''

class Model(torch.nn.Module):
    """{says}"""

    def forward(self, {names}):
        return run({names})


{axes} = {sizes}
{helpers}

def get_inputs():
    {drawn}
    return [{names}]


def get_init_inputs():
    return []
'''


@dataclass(frozen=True)
class Input:
    """An argument of a task: an array, a field of a state, or a number."""

    name: str
    axes: tuple[str, ...] | None
    dtype: str
    kind: str
    value: Any

    @property
    def spec(self) -> dict[str, Any]:
        """As a definition has it."""
        return {"shape": None if self.axes is None else list(self.axes), "dtype": self.dtype}

    def draw(self, dtype: str) -> str:
        """The line of torch that draws it, with the names of its axes for sizes."""
        if self.axes is None:
            return repr(self.value)
        text = (DRAWS.get(self.name) or DRAWS_OF_KIND[self.kind]).format(shape=", ".join(self.axes))
        return text if dtype == "float32" or dtype != self.dtype else f"{text}.to(torch.{dtype})"

    @property
    def is_normal(self) -> bool:
        """Whether it is an array of normal numbers."""
        return self.axes is not None and self.name not in DRAWS and self.kind == "real"


@dataclass(frozen=True)
class Task:
    """A function of the contract with the states in a dtype."""

    path: str
    dtype: str
    inputs: tuple[Input, ...]
    call: str
    answer: Any

    @property
    def name(self) -> str:
        """Its name in a benchmark."""
        return f"evictionary_{self.path.replace('.', '_')}_{self.dtype}"

    @property
    def axes(self) -> list[str]:
        """The axes of its inputs."""
        return list(dict.fromkeys(axis for each in self.inputs for axis in each.axes or ()))

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis in a benchmark."""
        short = SHORT if self.path in QUADRATIC else {}
        return {axis: _size(axis, SIZES | short) for axis in self.axes}

    @property
    def says(self) -> str:
        """What the function gives, in a sentence or two."""
        return first_paragraph(oracle(self.path).__doc__ or "")

    def outputs(self) -> dict[str, dict[str, Any]]:
        """The specification of each array of the answer, by name."""
        found = {}
        for name, _, array in _leaves(self.answer):
            axes = self._axes_of(array.shape)
            vectors = self.path.split(".")[1] in OF_THE_STATES or self.path == "momentkv_bounded.update"
            floats = self.dtype if vectors and axes[-1] in ("D", "D_v") else "float32"
            kinds = {"f": floats, "b": "bool", "i": "int64"}
            found[name] = {"shape": axes, "dtype": kinds[array.dtype.kind]}
        return found

    def _axes_of(self, shape: tuple[int, ...]) -> list[str]:
        """The axes of an answer: those of the input that begins with its shape, or each by its size."""
        sizes: dict[int, str] = {}
        for each in self.inputs:
            own = np.shape(each.value)
            if each.axes and own[: len(shape)] == shape:
                return list(each.axes[: len(shape)])
            for size, axis in zip(own, each.axes or (), strict=True):
                sizes.setdefault(size, axis)
        return [sizes.get(size, "unknown") for size in shape]

    def reference(self) -> str:
        """The file with the function, and `run`, which takes tensors."""
        specs, found = self.outputs().values(), []
        like = next(each.name for each in self.inputs if each.axes is not None)
        for (_, place, _), spec in zip(_leaves(self.answer), specs, strict=True):
            found.append(f"in_torch(found{place}, {like}, torch.{spec['dtype']})")
        run = RUN.format(
            names=", ".join(each.name for each in self.inputs),
            says=self.says,
            call=self.call,
            answer=", ".join(found),
        )
        text = standalone(self.path)
        return text.replace("import numpy as np\n", "import numpy as np\nimport torch\n", 1) + run

    def definition(self) -> dict[str, Any]:
        """The task as flashinfer-bench has it."""
        stem = self.path.split(".")[0]
        laws = dict.fromkeys(law.requirement for law in load_laws().values() if law.functions == (self.path,))
        limits = {
            "H_q % H_kv == 0": {"H_q", "H_kv"},
            "M <= T": {"M", "T"},
            "half_D * 2 == D": {"half_D", "D"},
            "P == B * n": {"P", "n"},
            "slots == n * S": {"slots", "n", "S"},
        }
        return {
            "name": self.name,
            "op_type": OP_TYPE,
            "description": " ".join(
                [self.says, *(f"{each.id}: {each.statement} ({each.source})." for each in laws)]
            ),
            "tags": ["evictionary", f"method:{stem}", *(f"requirement:{each.id}" for each in laws)],
            "axes": {axis: _axis(axis) for axis in self.axes},
            "constraints": [text for text, axes in limits.items() if axes <= set(self.axes)],
            "inputs": {each.name: each.spec for each in self.inputs},
            "outputs": self.outputs(),
            "reference": self.reference(),
        }

    def kernelbench(self) -> str:
        """The task as a file of KernelBench."""
        drawn = [f"{each.name} = {each.draw(self.dtype)}" for each in self.inputs]
        return self.reference() + MODEL.format(
            says=self.says,
            names=", ".join(each.name for each in self.inputs),
            axes=", ".join(self.sizes),
            sizes=", ".join(map(str, self.sizes.values())),
            helpers=COVARIANCE if any("covariance(" in line for line in drawn) else "",
            drawn="\n    ".join(drawn),
        )

    def workload(self, folder: Path) -> dict[str, Any]:
        """A workload of flashinfer-bench. What is no random numbers is written to a file of tensors."""
        import torch
        from safetensors.torch import save_file

        inputs: dict[str, Any] = {}
        scope: dict[str, Any] = {"torch": torch, **self.sizes}
        exec(COVARIANCE, scope)
        torch.manual_seed(0)
        blob = f"blob/workloads/{OP_TYPE}/{self.name}/{self.name}_1.safetensors"
        tensors = {}
        for each in self.inputs:
            if each.axes is None:
                inputs[each.name] = {"type": "scalar", "value": each.value}
            elif each.is_normal:
                inputs[each.name] = {"type": "random"}
            else:
                scope[each.name] = tensors[each.name] = eval(each.draw(self.dtype), scope).contiguous()
                inputs[each.name] = {"type": "safetensors", "path": blob, "tensor_key": each.name}
        if tensors:
            (folder / blob).parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, folder / blob)
        axes = {axis: size for axis, size in self.sizes.items() if axis not in CONSTANT}
        return {"definition": self.name, "workload": {"uuid": "1", "axes": axes, "inputs": inputs}}


def tasks(dtypes: tuple[str, ...] = DTYPES) -> list[Task]:
    """A task for each function that takes arrays, states and numbers and gives arrays whose axes are those
    of its inputs, and for each dtype that it stores something in.
    """
    impl = load("reference")
    found = []
    for path in contracts():
        given = arguments_of(impl, path, NAMED)
        aside = path in COUNTED or "_theory." in path or "_variants." in path
        if aside or given is None or any(map(callable, given.values())):
            continue
        answer = oracle(path)(**given)
        defaults = {
            name for name, each in signature_of(path).parameters.items() if each.default is not each.empty
        }
        asked = {name: value for name, value in given.items() if name in _line(path) or name not in defaults}
        for dtype in dtypes:
            task = Task(path, dtype, tuple(_inputs(path, asked, dtype)), _call(path, asked), answer)
            has_dtype = dtype == "float32" or any(each.dtype == dtype for each in task.inputs)
            if has_dtype and _is_of_arrays(answer) and _names_its_axes(task):
                found.append(task)
    return found


def _line(path: str) -> dict[str, Argument]:
    """The arrays and states of a function by name."""
    return {each.name: each for each in arguments(path)}


def _names_its_axes(task: Task) -> bool:
    """Whether every axis of the answer is one of the inputs."""
    return all(axis in task.axes for each in task.outputs().values() for axis in each["shape"])


def _is_of_arrays(answer: Any) -> bool:
    """Whether it is arrays of the kinds that a task can name; the codes of a quantised cache are bytes."""
    fields = answer if isinstance(answer, tuple) else (answer,)
    return all(isinstance(each, np.ndarray) and each.dtype.kind != "u" for each in fields)


def _leaves(answer: Any) -> Iterator[tuple[str, str, np.ndarray]]:
    """The arrays of an answer: a name, how the answer is asked for it, and the array."""
    if isinstance(answer, np.ndarray):
        yield ("kept_mask" if answer.dtype == bool else "result"), "", answer
    elif hasattr(answer, "_fields"):
        yield from ((name, f".{name}", getattr(answer, name)) for name in answer._fields)
    else:
        yield from ((f"result_{place}", f"[{place}]", each) for place, each in enumerate(answer))


def _inputs(path: str, given: dict[str, Any], dtype: str) -> Iterator[Input]:
    """The arguments of a function, the fields of a state one by one."""
    line = _line(path)
    for name, value in given.items():
        argument = line.get(name)
        if isinstance(value, np.ndarray) and argument is None:
            yield Input(name, ("T",), "int64", "whole", value)
        elif argument is None:
            value = OF_CASE[name](Case(length=SIZES["T"])) if name in OF_CASE else SETTINGS.get(name, value)
            yield Input(name, None, "int32" if isinstance(value, int) else "float32", "", value)
        elif argument.state:
            for field, each in argument.fields.items():
                yield _array(each, f"{name}_{field}", getattr(value, field), dtype)
        elif value is not None:
            yield _array(argument, name, value, dtype)


def _array(argument: Argument, name: str, value: np.ndarray, dtype: str) -> Input:
    lead = value.ndim - len(argument.own)
    leading = ("B", "H_kv") if argument.lead else ()
    named = (known or COMPUTED[axis] for known, axis in zip(argument.known, argument.own, strict=True))
    axes = (*leading[:lead], *named)
    stored = name in STORED or name.split("_")[-1] in STORED
    kinds = {"f": dtype if stored else "float32", "b": "bool", "i": "int64"}
    return Input(name, axes, kinds[value.dtype.kind], _kind(argument, name), value)


def _kind(argument: Argument, name: str) -> str:
    """By which a value is drawn."""
    for end in ("covariance", "low", "high"):
        if name.endswith("_" + end):
            return end
    return argument.kind if argument.kind in DRAWS_OF_KIND else "real"


def _size(axis: str, sizes: dict[str, int]) -> int:
    computed = {"half_D": sizes["D"] // 2, "slots": sizes["n"] * sizes["S"]}
    return computed.get(axis) or sizes[axis]


def _call(path: str, given: dict[str, Any]) -> str:
    """The call of the function with the inputs of a task."""
    line = _line(path)
    parts = []
    for name, value in given.items():
        if name in line and line[name].state:
            fields = ", ".join(f"in_numpy({name}_{field})" for field in line[name].fields)
            parts.append(f"{name}={line[name].kind}({fields})")
        elif isinstance(value, np.ndarray):
            parts.append(f"{name}=in_numpy({name})")
        elif value is not None:
            parts.append(f"{name}={name}")
    name = path.split(".")[1]
    lines = "".join(f"\n        {part}," for part in parts)
    return f"{name}({parts[0]})" if len(parts) == 1 else f"{name}({lines}\n    )"


def _axis(name: str) -> dict[str, Any]:
    kind = {"type": "const", "value": _size(name, SIZES)} if name in CONSTANT else {"type": "var"}
    return {**kind, **({"description": MEANINGS[name]} if name in MEANINGS else {})}


def write(form: str, folder: Path, dtypes: tuple[str, ...] = DTYPES) -> list[str]:
    """Write every task in a form, and return the names of its files, one for each task."""
    made = tasks(dtypes)
    folder.mkdir(parents=True, exist_ok=True)
    if form == "kernelbench":
        names = [f"{number}_{task.name}.py" for number, task in enumerate(made, 1)]
        for name, task in zip(names, made, strict=True):
            put(folder / name, task.kernelbench())
        return names
    for kind in ("definitions", "workloads"):
        (folder / kind / OP_TYPE).mkdir(parents=True, exist_ok=True)
    for task in made:
        put(folder / "workloads" / OP_TYPE / f"{task.name}.jsonl", json.dumps(task.workload(folder)) + "\n")
        definition = json.dumps(task.definition(), indent=1) + "\n"
        put(folder / "definitions" / OP_TYPE / f"{task.name}.json", definition)
    return [f"definitions/{OP_TYPE}/{task.name}.json" for task in made]
