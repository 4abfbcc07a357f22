"""Offline compilation: inspects the machine code of the kernels without a GPU.

A kernel that is right in the interpreter may still be slow on a GPU: registers spilled to memory, loads of two bytes instead of
sixteen, more shared memory than a block may have. The machine code shows all of this, and Triton ships the
assemblers. A kernel file lists its `CONFIGURATIONS`, each one a call of its own launchers on tensors of the device `meta`, which
have shapes, strides and alignment but no storage; the launch is intercepted where Triton would compile, so that the types,
alignments and constants are those of the real call.

`python -m evictionary.optimized.kernels.compiling [--every] [--target sm_90] [stem ...]` prints one JSON line for each kernel
compiled and exits with 1 if one breaks a rule. Without `--every`, it takes the first configuration of each file. Run it without
TRITON_INTERPRET.
"""

from __future__ import annotations

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
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

# name: (backend, architecture, threads of a warp, bytes of shared memory that a block may have)
TARGETS: dict[str, tuple[str, int | str, int, int]] = {
    "sm_80": ("cuda", 80, 32, 163 * 1024),
    "sm_90": ("cuda", 90, 32, 227 * 1024),
    "sm_100": ("cuda", 100, 32, 227 * 1024),
    "gfx942": ("hip", "gfx942", 64, 64 * 1024),
}


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One call to compile: `launch` calls a launcher on `meta` tensors.

    Every kernel must load 16 bytes at a time from global memory, except the kernels named in `scalar` (which read a few numbers);
    the kernels named in `tensor_cores` must multiply on tensor cores.
    """

    name: str
    launch: Callable[[], object]
    tensor_cores: frozenset[str] = frozenset()
    scalar: frozenset[str] = frozenset()


HEAD_DIMS = (128, 64, 80, 96, 256)


def configurations(
    launch: Callable[..., object],
    *shapes: dict[str, int],
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32),
    tensor_cores: Collection[str] = (),
    scalar: Collection[str] = (),
) -> list[Configuration]:
    """Return `launch(dtype, **shape)` as a configuration for each dtype and shape; float32 does not use tensor cores."""
    return [
        Configuration(
            " ".join([str(dtype).removeprefix("torch."), *(f"{name} {value}" for name, value in shape.items())]),
            functools.partial(launch, dtype, **shape),
            frozenset() if dtype == torch.float32 else frozenset(tensor_cores),
            frozenset(scalar),
        )
        for dtype in dtypes
        for shape in shapes
    ]


def stems() -> list[str]:
    """Return the kernel files: those beside this one that have `CONFIGURATIONS`."""
    files = sorted(pathlib.Path(__file__).parent.glob("*.py"))
    return [path.stem for path in files if re.search(r"^CONFIGURATIONS\b", path.read_text(encoding="utf-8"), re.M)]


def reports(stem: str, target: str, *, every: bool) -> Iterator[dict[str, Any]]:
    """Compile the kernels of one file for one target: its first configuration, or every one."""
    listed: list[Configuration] = importlib.import_module(f"evictionary.optimized.kernels.{stem}").CONFIGURATIONS
    for configuration in listed if every else listed[:1]:
        for kernel, compile_now in _intercepted(configuration.launch, target):
            names = {"stem": stem, "configuration": configuration.name, "kernel": kernel, "target": target}
            yield names | inspect(configuration, kernel, target, compile_now())


def _intercepted(launch: Callable[[], object], target: str) -> list[tuple[str, Callable[[], Any]]]:
    """Call `launch` and return the kernels that it would have compiled, each with the function that does it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.driver import driver

    backend, architecture, warp_size, _ = TARGETS[target]
    gpu = GPUTarget(backend, architecture, warp_size)
    found: dict[str, tuple[str, Callable[[], Any]]] = {}

    def intercept(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        source = ASTSource(fn.jit_function, compile["signature"], compile["constants"], compile["configs"][0])
        options = {name: compile[name] for name in ("num_warps", "num_ctas", "num_stages", "enable_fp_fusion")}
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
    """Read registers, spills, memory and instructions from the machine code, and list the broken rules in `broken`."""
    backend, _, _, limit = TARGETS[target]
    found = (_inspect_nvidia if backend == "cuda" else _inspect_amd)(compiled)
    spills, stack, shared, narrow = (found[name] for name in ("spills", "stack", "shared", "narrow_loads"))
    broken = {
        f"spills {spills} and uses {stack} bytes of stack, wanted none": spills or stack,
        f"uses {shared} bytes of shared memory, wanted at most {limit}": shared > limit,
        "has no loads of 16 bytes": kernel not in configuration.scalar and not found["vector_loads"],
        f"has {narrow} loads of two bytes, wanted none": narrow,
        "multiplies without tensor cores": kernel in configuration.tensor_cores and not found["tensor_core_instructions"],
    }
    return found | {"broken": [rule for rule, is_broken in broken.items() if is_broken]}


def _inspect_nvidia(compiled: Any) -> dict[str, int]:
    """Read the instructions from PTX, and the registers and memory from the linked program."""
    import triton

    ptx = compiled.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, machine_code = (
            subprocess.run([triton.knobs.nvidia.cuobjdump.path, what, file.name], check=True, capture_output=True, text=True).stdout
            for what in ("--dump-resource-usage", "--dump-sass")
        )
    allotted = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return {
        "registers": allotted["REG"],
        "shared": compiled.metadata.shared,
        "stack": allotted["STACK"] + allotted["LOCAL"],
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", machine_code)),
        "vector_loads": len(re.findall(r"ld\.global[\w.:]*\.(?:v4\.b32|v2\.b64)|cp\.async\.(?:cg|bulk)", ptx)),
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
        # A scalar register spills into a lane of a vector register; a spill to memory would show in the stack size.
        "spills": allotted["vgpr_spill_count"],
        "vector_loads": len(re.findall(r"\b(?:global|buffer)_load_dwordx4\b", assembly)),
        "narrow_loads": len(re.findall(r"\b(?:global|buffer)_load_(?:[us]short|short)", assembly)),
        "tensor_core_instructions": len(re.findall(r"\bv_mfma_", assembly)),
    }


def main() -> int:
    """Run the command line: print a JSON line for each compiled kernel, and return 1 if one breaks a rule."""
    parser = argparse.ArgumentParser(description="Compile the kernels for GPUs, without a GPU here, and inspect the code.")
    parser.add_argument("stems", nargs="*", help="kernel files, such as keydiff; all by default")
    parser.add_argument("--every", action="store_true", help="every configuration, not only the first of each file")
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="may be repeated; all by default")
    arguments = parser.parse_args()
    found = []
    for stem in arguments.stems or stems():
        for target in arguments.target or TARGETS:
            for report in reports(stem, target, every=arguments.every):
                print(json.dumps(report), flush=True)
                found.append(report)
    broken = sum(bool(report["broken"]) for report in found)
    print(f"{len(found)} builds, {broken} of them break a rule", file=sys.stderr)
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
