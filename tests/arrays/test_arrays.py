"""JAX and MLX, right and wrong, in one run for each library. `make arrays` installs them and runs this."""

import json

import pytest
from tools import ROOT, judge, laid

pytestmark = pytest.mark.arrays
RIGHT = ROOT / "conformance" / "clients"


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("library", ["jax", "mlx"])
def test_right_code_passes(library, dtype):
    done = judge(
        RIGHT / library, "--json", "--dtype", dtype, "--domain", "head_dim=64", "--domain", "max_length=4096"
    )
    (judged,) = json.loads(done.stdout)["implementations"]
    assert (judged["array_library"], judged["dtype"]) == (library, dtype)


@pytest.mark.parametrize("library", ["jax", "mlx"])
def test_the_mean_of_keys_that_are_no_directions_is_named(library, tmp_path):
    """The mean is taken of the keys as they are, and the answer is a known bug."""
    text = (RIGHT / library / "keydiff.py").read_text(encoding="utf-8")
    wrong = text.replace("anchor = unit(directions.mean", "anchor = unit(keys.mean")
    assert wrong != text
    done = judge(
        laid(tmp_path, {"keydiff.py": wrong}), "--law", "test_score_is_minus_the_cosine_to_the_anchor", code=1
    )
    assert "mean taken before normalising" in done.stdout
