"""Every kernel compiles for GPUs that need not be here: no spills, loads of 16 bytes, tensor cores where
the design says.
"""

import ast
import json
import pathlib
import re
from typing import Any

import pytest
from tools import ROOT
from tools.kernels import KERNELS, compiled

pytest.importorskip("triton")


METHODS = ("to", "cast", "dtype", "shape")
FOLDER = ROOT / "optimized"
COMPILING = ("-m", "evictionary.optimized.kernels.compiling")


def sources(folder: str) -> dict[str, str]:
    """The text of each file of a folder of `optimized`."""
    return {path.name: path.read_text("utf-8") for path in (FOLDER / folder).glob("*.py")}


LAUNCHED = re.compile(r"launch\((\w+), |^ +(?:return )?(\w+)\[[^\n]*\]\(", re.M)


def kernels_of(folder: str) -> list[ast.FunctionDef]:
    """The functions of a folder of `optimized` that Triton compiles."""
    functions = [
        each
        for text in sources(folder).values()
        for each in ast.parse(text).body
        if isinstance(each, ast.FunctionDef)
    ]
    return [
        each for each in functions if any("triton.jit" in ast.unparse(line) for line in each.decorator_list)
    ]


def arguments(kernel: ast.FunctionDef) -> set[str]:
    """The names of the arguments that are no constants."""
    return {argument.arg for argument in kernel.args.args if argument.annotation is None}


def unspecialized(kernel: ast.FunctionDef) -> set[str]:
    """The arguments that `do_not_specialize` names."""
    return {
        name
        for line in kernel.decorator_list
        if isinstance(line, ast.Call)
        for option in line.keywords
        if option.arg == "do_not_specialize"
        for name in ast.literal_eval(option.value)
    }


def tuples(kernel: ast.FunctionDef) -> set[str]:
    """The names that a kernel asks for a field, or takes apart."""
    asked = {node.value for node in ast.walk(kernel) if isinstance(node, ast.Attribute)}
    apart = {
        node.value
        for node in ast.walk(kernel)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)
    }
    return {value.id for value in asked | apart if isinstance(value, ast.Name)}


MOST_ARGUMENTS = 15


@pytest.mark.parametrize("folder", ["kernels", "teaching"])
def test_the_arguments_of_a_kernel_are_read_at_a_glance(folder: str) -> None:
    """What belongs together is one tuple with names. Kernels that other kernels call count too."""
    counts = {each.name: len(each.args.args + each.args.kwonlyargs) for each in kernels_of(folder)}
    assert len(counts) > 20
    assert {name: count for name, count in counts.items() if count > MOST_ARGUMENTS} == {}


def test_what_is_not_specialized_is_a_number() -> None:
    """Triton looks for 1 and for multiples of 16 in every tuple, whatever `do_not_specialize` says of it: in
    a tuple a length would have a kernel compiled again.
    """
    kernels = {each.name: each for each in kernels_of("kernels")}
    assert "length" in unspecialized(kernels["sum_rows"]) and "sizes" in tuples(kernels["sum_rows"])
    assert {
        name: both for name, each in kernels.items() if (both := unspecialized(each) & tuples(each))
    } == {}


@pytest.mark.parametrize("folder", ["kernels", "teaching"])
def test_no_kernel_asks_an_argument_for_its_methods(folder: str) -> None:
    """On a GPU an argument that is 1, or a number of a tuple, is a
    constant without methods, such as `to`; the interpreter cannot see it.
    """
    kernels = kernels_of(folder)
    launched = {
        name for text in sources(folder).values() for found in LAUNCHED.findall(text) for name in found
    }
    numbers = {
        name
        for each in kernels
        if each.name in launched
        for name in arguments(each)
        if not name.endswith("_ptr")
    }
    assert len(launched) > 20 and "length" in numbers
    asked = [
        f"{kernel.name}: {ast.unparse(node)}"
        for kernel in kernels
        for node in ast.walk(kernel)
        if isinstance(node, ast.Attribute)
        and node.attr in METHODS
        and ast.unparse(node.value).partition(".")[0] in numbers & arguments(kernel)
    ]
    assert not asked


def test_every_kernel_is_launched_in_one_place() -> None:
    """`launch` alone decides how a kernel is built: no file calls kernel[grid] itself."""
    for name, text in sources("kernels").items():
        own = [
            ast.unparse(node.func)
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
        ]
        assert not own, f"{name} launches {own}, wanted launch(kernel, grid)(...)"


# One channel of keys or values, one token, one query, partitions of one token: (D, D_v, T).
SMALLEST = """
import json, torch
from evictionary.optimized.kernels import compiling, lagkv, received_attention
def states(*shape):
    return torch.empty((1, 1, *shape), dtype=torch.{dtype}, device="meta")
for head_dim, value_dim, lag in {shapes}:
    keys, values = states(4 * lag + 1, head_dim), states(4 * lag + 1, value_dim)
    part = keys[:, :, :lag], values[:, :, :lag], keys[:, :, :1], values[:, :, :1]
    settings = {{"sink_size": 1, "lag_size": lag, "kept_each": 1}}
    for launch in (
        lambda: lagkv.score(*part),
        lambda: lagkv.select(keys, values, states(4 * lag + 1).bool(), **settings),
        lambda: lagkv.compress(keys, values, 4 * lag, **settings),
        lambda: received_attention.score(keys[:, :, -1:], keys),
        lambda: received_attention.attend_and_score(*(each[:, :, -lag:] for each in (keys, keys, values))),
    ):
        for kernel, compile_now in compiling._intercepted(launch, "sm_90"):
            print(json.dumps({{"kernel": kernel, "fused": compile_now().metadata.enable_fp_fusion}}))
"""
# Of a partition of one token all are kept, or none: nothing is selected.
EVERY = {"score_partitions", "compress_partitions", "sum_rows", "sum_columns"}


def test_one_channel_and_one_token_compile_with_fused_products() -> None:
    """Also where Triton would not fuse products and sums by default."""
    found = compiled("-c", SMALLEST.format(dtype="float32", shapes="[(1, 1, 1)]"))
    assert {each["kernel"] for each in found} == EVERY and all(each["fused"] for each in found)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_other_extents_of_one_compile(dtype: str) -> None:
    found = compiled(
        "-c", SMALLEST.format(dtype=dtype, shapes="[(1, 1, 1), (1, 16, 2), (16, 1, 2), (16, 16, 1)]")
    )
    assert {each["kernel"] for each in found} == EVERY | {"keep_whole"}


def require_kept(found: list[dict[str, Any]], targets: set[str]) -> None:
    """Fail unless a report of every target has no broken rule."""
    assert {report["target"] for report in found} == targets
    assert not [
        f"{each['kernel']} on {each['target']}: {'; '.join(each['broken'])}"
        for each in found
        if each["broken"]
    ]


@pytest.mark.slow
@pytest.mark.parametrize("stem", KERNELS)
def test_every_kernel_fits_on_cards_with_less_memory(stem: str) -> None:
    """The first configuration needs no more shared memory than a program has on sm_75, sm_86 and sm_89."""
    targets = {"sm_75", "sm_86", "sm_89"}
    require_kept(compiled(*COMPILING, stem, *(f"--target={name}" for name in targets), code=None), targets)


@pytest.mark.slow
@pytest.mark.parametrize("stem", KERNELS)
def test_first_configuration_compiles_for_every_target(stem: str) -> None:
    """The first configuration of a kernel file keeps every
    rule of `compiling` on sm_80, sm_90, sm_100 and gfx942.
    """
    found = compiled(*COMPILING, stem)
    require_kept(found, {"sm_80", "sm_90", "sm_100", "gfx942"})
    stored = json.loads((ROOT / "docs" / "kernels.json").read_text(encoding="utf-8"))
    for report in found:
        figures = stored.get(f"{stem}.{report['kernel']}", {}).get(f"{report['triton']} {report['target']}")
        # Another version of Triton than the table's makes other code. Of the variants of a kernel the table
        # has the largest.
        assert not figures or report["registers"] <= figures["registers"], (
            "docs/kernels.json is old: run `make compile-all`"
        )


@pytest.mark.slow
def test_inspection_sees_what_it_is_there_for(tmp_path: pathlib.Path) -> None:
    """A kernel that loads half-precision numbers one at
    a time and spills its registers is reported for both.
    """
    (tmp_path / "probe.py").write_text(PROBE, encoding="utf-8")
    (report,) = compiled(tmp_path / "probe.py")
    assert report["narrow_loads"] and not report["vector_loads"] and report["spills"] and report["stack"]
    assert len(report["broken"]) == 4  # spills, no vector loads, narrow loads, no tensor cores


PROBE = """
import json, torch, triton, triton.language as tl
from evictionary.optimized.kernels import compiling

@triton.jit
def probe(source, target, stride, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    numbers = tl.load(source + index * stride)
    for shift in tl.static_range(3):
        numbers = tl.cumsum(numbers.to(tl.float32), axis=0) + numbers
    tl.store(target + index, numbers)

def launch():
    states = torch.empty(65536, dtype=torch.bfloat16, device="meta")
    probe[(1,)](states, states.float(), 3, BLOCK=32768, num_warps=1)

configuration = compiling.Configuration("probe", launch, tensor_cores=frozenset({"probe"}))
(kernel, compile_now), = compiling._intercepted(launch, "sm_90")
print(json.dumps(compiling.inspect(configuration, kernel, "sm_90", compile_now())))
"""
