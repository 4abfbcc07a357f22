"""Every kernel compiles for GPUs that need not be here: no spills, loads of 16 bytes, tensor cores where the design says."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).resolve().parents[1]
KERNELS = sorted(
    path.stem
    for path in (ROOT / "optimized" / "kernels").glob("*.py")
    if re.search(r"^CONFIGURATIONS\b", path.read_text(encoding="utf-8"), re.M)
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module in a process of its own, without Triton's interpreter, which would take the place of the compiler."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_DEFAULT_FP_FUSION": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("stem", KERNELS)
def test_first_configuration_compiles_for_every_target(stem: str) -> None:
    """The first configuration of a kernel file keeps every rule of `compiling` on sm_80, sm_90, sm_100 and gfx942."""
    done = run("-m", "evictionary.optimized.kernels.compiling", stem)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {report["target"] for report in found} == {"sm_80", "sm_90", "sm_100", "gfx942"}, done.stderr
    broken = [f"{r['kernel']} on {r['target']}: {'; '.join(r['broken'])}" for r in found if r["broken"]]
    assert not broken and done.returncode == 0, "\n".join(broken)
    stored = json.loads((ROOT / "docs" / "kernels.json").read_text(encoding="utf-8"))
    for report in found:
        figures = stored.get(f"{stem}.{report['kernel']}", {}).get(f"{report['triton']} {report['target']}")
        # Another version of Triton than the table's makes other code. Of the variants of a kernel the table has the largest.
        assert not figures or report["registers"] <= figures["registers"], "docs/kernels.json is old: run `make compile-all`"


def test_inspection_sees_what_it_is_there_for(tmp_path: pathlib.Path) -> None:
    """A kernel that loads half-precision numbers one at a time and spills its registers is reported for both."""
    (tmp_path / "probe.py").write_text(PROBE, encoding="utf-8")
    done = run(str(tmp_path / "probe.py"))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["narrow_loads"] and not report["vector_loads"]
    assert report["spills"] and report["stack"]
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
