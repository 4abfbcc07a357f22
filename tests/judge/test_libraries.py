"""Array libraries beside NumPy and torch: what is not installed is said, and CuPy is tested by a stand-in."""

import sys

import numpy as np
import pytest
from tools import laid

from evictionary.spec_tests.judge.implementation import UnusableImplementation, load
from evictionary.spec_tests.judge.law import load_laws
from evictionary.spec_tests.judge.libraries import from_numpy, library_of, to_numpy
from evictionary.spec_tests.judge.outcome import outcome

# As CuPy does it: arrays of its own, which `get` copies to NumPy.
CUPY = """
import numpy

class ndarray(numpy.ndarray):
    def get(self):
        return numpy.array(self)

def asarray(array):
    return array.view(ndarray)

def norm(keys):
    assert isinstance(keys, ndarray)
    return numpy.linalg.norm(keys, axis=-1).view(ndarray)
"""
KNORM = "import cupy\n\ndef score(keys):\n    return {}cupy.norm(keys)\n"


@pytest.fixture
def cupy(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(laid(tmp_path / "installed", {"cupy.py": CUPY})))
    yield tmp_path
    sys.modules.pop("cupy", None)


@pytest.mark.parametrize(("sign", "verdict"), [("-", "passed"), ("", "killed")])
def test_arrays_of_cupy_go_in_and_come_back(cupy, sign, verdict):
    implementation = load(str(laid(cupy / f"of{sign}", {"knorm.py": KNORM.format(sign)})))
    law = load_laws()["test_knorm::test_score_is_minus_the_norm"]
    assert (implementation.array_library, implementation.dtype) == ("cupy", "float32")
    assert outcome(law, implementation, max_examples=5)[0] == verdict


def test_cupy_has_no_bfloat16(cupy):
    with pytest.raises(UnusableImplementation, match="cupy, which has no bfloat16"):
        load(str(laid(cupy / "of", {"knorm.py": KNORM.format("-")})), dtype="bfloat16")


def test_a_library_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    file = laid(tmp_path, {"knorm.py": "ARRAY_LIBRARY = 'jax'\ndef score(keys): ..."})
    with pytest.raises(UnusableImplementation, match="computes with jax, which cannot be imported here"):
        load(str(file))


@pytest.mark.parametrize("numbers", [[[1.5, -0.25]], [3], [True]], ids=["real", "whole", "mask"])
def test_tensors_go_and_come_as_they_are(numbers):
    array = np.array(numbers)
    tensor = from_numpy(array, "torch", "bfloat16")
    assert library_of(type(tensor)) == "torch"
    np.testing.assert_array_equal(to_numpy(tensor), array, strict=True)


def test_an_answer_compares_as_a_plain_array_does():
    assert type(to_numpy(np.ma.masked_array([1.0], mask=[True]))) is np.ndarray
