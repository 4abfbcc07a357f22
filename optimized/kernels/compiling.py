"""Offline compilation: inspects the machine code of the kernels without a GPU.

A kernel that is right in the interpreter may still be slow on a GPU: registers spilled to memory, loads of
two bytes instead of sixteen, more shared memory than a block may have, too few programs on a multiprocessor
to hide the time of a load. The machine code shows all of this, and Triton ships the assemblers. A kernel file
lists its `CONFIGURATIONS`, each one a call of its own launchers on tensors of the device `meta`, which have
shapes, strides and alignment but no storage; the launch is intercepted where Triton would compile, so that
the types, alignments and constants are those of the real call.

`python -m evictionary.optimized.kernels.compiling [--every] [--target sm_90] [--store FILE] [stem ...]`
prints one JSON line for each kernel compiled and exits with 1 if one breaks a rule. Without `--every`, it
takes the first configuration of each file. `--store` puts the figures into a file, beside those of other
versions of Triton: docs/kernels.md shows them. Run it without TRITON_INTERPRET.

Another version of Triton needs no other environment: `pip install --no-deps --target FOLDER triton==3.6.0`,
and FOLDER on the PYTHONPATH. `make compile-all` does this.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib
import json
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch


class Target(NamedTuple):
    """A GPU: what Triton compiles for, and what a block and a multiprocessor may hold, memory in bytes."""

    backend: str
    architecture: int | str
    warp_size: int
    block_memory: int
    memory: int
    warps: int
    reserved: int  # of the shared memory, for each block


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 163 * 1024, 164 * 1024, 64, 1024),
    "sm_90": Target("cuda", 90, 32, 227 * 1024, 228 * 1024, 64, 1024),
    "sm_100": Target("cuda", 100, 32, 227 * 1024, 228 * 1024, 64, 1024),
    "gfx942": Target("hip", "gfx942", 64, 64 * 1024, 64 * 1024, 32, 0),
    "sm_75": Target("cuda", 75, 32, 64 * 1024, 64 * 1024, 32, 1024),
    "sm_86": Target("cuda", 86, 32, 99 * 1024, 100 * 1024, 48, 1024),
    "sm_89": Target("cuda", 89, 32, 99 * 1024, 100 * 1024, 48, 1024),
}
# Cards with less memory: a kernel must fit there, and nothing is promised of its speed.
SMALL = ("sm_75", "sm_86", "sm_89")
RESIDENCY_TARGET = "sm_90"


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One call to compile: `launch` calls a launcher on `meta` tensors.

    Every kernel must load 16 bytes at a time from global memory, except the kernels named in `scalar` (which
    read a few numbers); the kernels named in `tensor_cores` must multiply on tensor cores; of the kernels
    named in `resident`, a multiprocessor of RESIDENCY_TARGET must hold so many programs at once. At most
    `spills` instructions may move registers to memory and back.
    """

    name: str
    launch: Callable[[], object]
    tensor_cores: frozenset[str] = frozenset()
    scalar: frozenset[str] = frozenset()
    resident: Mapping[str, int] = dataclasses.field(default_factory=dict)
    spills: int = 0


HEAD_DIMS = (128, 64, 80, 96, 256)
FEW_SPILLS = 16


def configurations(
    launch: Callable[..., object],
    *shapes: dict[str, int],
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32),
    tensor_cores: Collection[str] = (),
    scalar: Collection[str] = (),
    resident: Mapping[str, int] | None = None,
    spills: int = 0,
) -> list[Configuration]:
    """Return `launch(dtype, **shape)` as a configuration for
    each dtype and shape; float32 does not use tensor cores.

    `resident`, and that at most `spills` registers are spilled, are promises of the first configuration
    alone, the one that is measured: longer rows need more registers, and the assembler spills a few to fit
    one more program on a multiprocessor.
    """
    return [
        Configuration(
            " ".join(
                [str(dtype).removeprefix("torch."), *(f"{name} {value}" for name, value in shape.items())]
            ),
            functools.partial(launch, dtype, **shape),
            frozenset() if dtype == torch.float32 else frozenset(tensor_cores),
            frozenset(scalar),
            *(((resident or {}), spills) if (dtype, shape) == (dtypes[0], shapes[0]) else ({}, FEW_SPILLS)),
        )
        for dtype in dtypes
        for shape in shapes
    ]


def stems() -> list[str]:
    """Return the kernel files: those beside this one that have `CONFIGURATIONS`."""
    files = sorted(pathlib.Path(__file__).parent.glob("*.py"))
    return [
        path.stem for path in files if re.search(r"^CONFIGURATIONS\b", path.read_text(encoding="utf-8"), re.M)
    ]


def reports(stem: str, target: str, *, every: bool) -> Iterator[dict[str, Any]]:
    """Compile the kernels of one file for one target: its first configuration, or every one."""
    listed: list[Configuration] = importlib.import_module(
        f"evictionary.optimized.kernels.{stem}"
    ).CONFIGURATIONS
    for configuration in listed if every else listed[:1]:
        for kernel, compile_now in _intercepted(configuration.launch, target):
            names = {"stem": stem, "configuration": configuration.name, "kernel": kernel, "target": target}
            names["triton"] = triton_version()
            yield names | inspect(configuration, kernel, target, compile_now())


def triton_version() -> str:
    """Return the version of Triton that compiles."""
    import triton

    return str(triton.__version__)


def _intercepted(launch: Callable[[], object], target: str) -> list[tuple[str, Callable[[], Any]]]:
    """Call `launch` and return the kernels that it would
    have compiled, each with the function that does it.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.driver import driver

    gpu = GPUTarget(*TARGETS[target][:3])
    found: dict[str, tuple[str, Callable[[], Any]]] = {}

    def intercept(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        source = ASTSource(fn.jit_function, compile["signature"], compile["constants"], compile["configs"][0])
        options = {
            name: compile[name] for name in ("num_warps", "num_ctas", "num_stages", "enable_fp_fusion")
        }
        # NVIDIA's alone
        options["maxnreg"] = json.loads(compile["specialization_data"])["options"].get("maxnreg")
        found[fn.name + key] = (fn.name, lambda: triton.compile(source, target=gpu, options=options))
        return True  # for Triton this means: do not compile and do not launch

    class Offline:
        """The part of a Triton driver that a launch uses before it compiles."""

        def get_current_target(self) -> Any:
            return gpu

        def get_current_device(self) -> str:
            return target  # Triton caches launches by device, so every target is its own device

        def get_current_stream(self, _: object) -> int:
            return 0

    with contextlib.ExitStack() as undo:
        undo.callback(setattr, driver, "_active", driver._active)
        undo.callback(setattr, triton.knobs.runtime, "jit_cache_hook", triton.knobs.runtime.jit_cache_hook)
        driver.set_active(Offline())
        triton.knobs.runtime.jit_cache_hook = intercept
        launch()
    return list(found.values())


def inspect(configuration: Configuration, kernel: str, target: str, compiled: Any) -> dict[str, Any]:
    """Read registers, spills, memory and instructions from
    the machine code, and list the broken rules in `broken`.
    """
    gpu = TARGETS[target]
    found = (_inspect_nvidia if gpu.backend == "cuda" else _inspect_amd)(compiled)
    found["warps"] = compiled.metadata.num_warps
    found["programs"] = programs(gpu, found["registers"], found["shared"], found["warps"])
    spills, stack, shared, narrow = (found[name] for name in ("spills", "stack", "shared", "narrow_loads"))
    resident = configuration.resident.get(kernel, 1) if target == RESIDENCY_TARGET else 1
    broken = {
        f"spills {spills} and uses {stack} bytes of stack, wanted {configuration.spills or 'none'}": spills
        > configuration.spills
        or (stack and not spills),
        f"uses {shared} bytes of shared memory, wanted at most {gpu.block_memory}": shared > gpu.block_memory,
        f"{found['programs']} programs fit on a multiprocessor, wanted {resident}": found["programs"]
        < resident,
        "has no loads of 16 bytes": kernel not in configuration.scalar and not found["vector_loads"],
        f"has {narrow} loads of two bytes, wanted none": narrow,
        "multiplies without tensor cores": kernel in configuration.tensor_cores
        and not found["tensor_core_instructions"],
    }
    return found | {
        "broken": [
            rule
            for rule, is_broken in broken.items()
            if is_broken and (target not in SMALL or "shared" in rule)
        ]
    }


def programs(gpu: Target, registers: int, shared: int, num_warps: int) -> int:
    """Return how many programs a multiprocessor holds at once.

    Each of its four parts has 512 registers for each thread of a warp; threads get them eight at a time.
    """
    warps = min(gpu.warps, 4 * (512 // (-(-registers // 8) * 8)))
    return min(warps // num_warps, gpu.memory // max(1, shared + gpu.reserved), 32)


def _innermost_loop(machine_code: str) -> int:
    """Return the number of instructions of the longest loop that has no loop inside, 0 without a loop."""
    branches = re.findall(r"/\*([0-9a-f]{4,})\*/[^;]*\bBRA\b[^;]*?(0x[0-9a-f]+)", machine_code)
    loops = {(int(to, 16), int(at, 16)) for at, to in branches if int(to, 16) < int(at, 16)}
    inner = [(a, b) for a, b in loops if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in loops)]
    return max((end - start) // 16 + 1 for start, end in inner) if inner else 0


def _inspect_nvidia(compiled: Any) -> dict[str, int]:
    """Read the instructions from PTX, and the registers and memory from the linked program."""
    import triton

    ptx = compiled.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, machine_code = (
            subprocess.run(
                [triton.knobs.nvidia.cuobjdump.path, what, file.name],
                check=True,
                capture_output=True,
                text=True,
            ).stdout
            for what in ("--dump-resource-usage", "--dump-sass")
        )
    allotted = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return {
        "registers": allotted["REG"],
        "shared": compiled.metadata.shared,
        "stack": allotted["STACK"] + allotted["LOCAL"],
        "instructions": len(re.findall(r"/\*[0-9a-f]{4,}\*/ +(?!NOP)[@A-Z]", machine_code)),
        "loop": _innermost_loop(machine_code),
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", machine_code)),
        "vector_loads": len(
            re.findall(r"ld\.global[\w.:]*\.(?:v4\.b32|v2\.b64)|cp\.async\.(?:cg|bulk)", ptx)
        ),
        "narrow_loads": len(re.findall(r"ld\.global(?![\w.:]*\.v\d)[\w.:]*\.[bus]16\b", ptx)),
        "tensor_core_instructions": len(re.findall(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)\b", ptx)),
    }


def _inspect_amd(compiled: Any) -> dict[str, int]:
    """Read the assembly; its trailer lists registers and memory."""
    assembly = compiled.asm["amdgcn"]
    allotted = {key: int(value) for key, value in re.findall(r"\.(\w+):\s+(\d+)\n", assembly)}
    return {
        "registers": allotted["vgpr_count"],
        "shared": compiled.metadata.shared,
        "stack": allotted["private_segment_fixed_size"],
        "instructions": len(re.findall(r"^\t[vsdgb]\w*_\w+", assembly, re.M)),
        # A scalar register spills into a lane of a vector register; a spill to memory would show in the stack
        # size.
        "spills": allotted["vgpr_spill_count"],
        "vector_loads": len(re.findall(r"\b(?:global|buffer)_load_dwordx4\b", assembly)),
        "narrow_loads": len(re.findall(r"\b(?:global|buffer)_load_(?:[us]short|short)", assembly)),
        "tensor_core_instructions": len(re.findall(r"\bv_mfma_", assembly)),
    }


STORED = ("registers", "shared", "warps", "programs", "instructions", "loop")


def store(path: pathlib.Path, found: list[dict[str, Any]]) -> None:
    """Write the figures of the first configuration of each file to the ones stored: {stem.kernel: {Triton
    and target: figures}}.

    Of the variants of a kernel, those with the most of each count, and the fewest programs.
    """
    stored: dict[str, dict[str, dict[str, int]]] = (
        json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    )
    first = {report["stem"]: report["configuration"] for report in reversed(found)}
    now: dict[tuple[str, str], dict[str, int]] = {}
    for report in found:
        if report["configuration"] == first[report["stem"]]:
            place = f"{report['stem']}.{report['kernel']}", f"{report['triton']} {report['target']}"
            figures = {name: report[name] for name in STORED if name in report}
            old = now.get(place, figures)
            now[place] = {
                name: (min if name == "programs" else max)(old[name], figures[name]) for name in figures
            }
    places = {place for _, place in now}
    for kernel in list(stored):  # a kernel that is gone leaves the file
        stem = kernel.partition(".")[0]
        stored[kernel] = {
            place: figures
            for place, figures in stored[kernel].items()
            if stem not in first or place not in places
        }
    for (kernel, where), figures in now.items():
        stored.setdefault(kernel, {})[where] = figures
    stored = {kernel: dict(sorted(figures.items())) for kernel, figures in sorted(stored.items()) if figures}
    path.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """Run the command line: print a JSON line for each compiled kernel, and return 1 if one breaks a rule."""
    parser = argparse.ArgumentParser(
        description="Compile the kernels for GPUs, without a GPU here, and inspect the code."
    )
    parser.add_argument("stems", nargs="*", help="kernel files, such as keydiff; all by default")
    parser.add_argument(
        "--every", action="store_true", help="every configuration, not only the first of each file"
    )
    parser.add_argument(
        "--target",
        action="append",
        choices=list(TARGETS),
        help="may be repeated; by default all but the small ones, " + ", ".join(SMALL),
    )
    parser.add_argument(
        "--store",
        type=pathlib.Path,
        help="a JSON file that gets the figures of each kernel's first configuration",
    )
    arguments = parser.parse_args()
    found = []
    for stem in arguments.stems or stems():
        for target in arguments.target or [name for name in TARGETS if name not in SMALL]:
            for report in reports(stem, target, every=arguments.every):
                print(json.dumps(report), flush=True)
                found.append(report)
    if arguments.store:
        store(arguments.store, found)
    broken = sum(bool(report["broken"]) for report in found)
    print(f"{len(found)} builds, {broken} of them break a rule", file=sys.stderr)
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
