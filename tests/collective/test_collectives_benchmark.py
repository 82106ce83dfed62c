"""The benchmark runs on CPU devices; its versions compute the same."""

import argparse

import jax
import numpy as np
import pytest
from _rows import inside, line, operands, place

from benchmarks import collectives

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", collectives.CASES)
def test_rows(case, capsys):
    options = argparse.Namespace(cases=[case], features=64, repeats=1, orders=True)
    rows = list(collectives.rows_of(line(), 8, options))
    for row in rows:
        collectives.show(row)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(rows) >= 5
    assert {row["ratio"] for row in rows if row["run"] == "XLA, gather first"} == {1}
    assert {row["devices"] for row in rows} == {8}


@pytest.mark.parametrize("case", collectives.CASES)
def test_versions_compute_the_same_norm(case):
    x, gamma = operands(between=())
    mesh, outputs = line(), collectives.CASES[case]
    versions = collectives.versions(outputs, True)
    versions.pop("all-gather of x alone")
    found = []
    for fn in versions.values():
        made = jax.jit(inside(fn, mesh, False))(*place(mesh, x, gamma))
        made = dict(made._asdict() if hasattr(made, "_asdict") else made)
        found.append({k: values(made[k]) for k in outputs})
    for other in found[1:]:
        for name, a in found[0].items():
            b, step = other[name], 0.0
            if name == "quantized":
                # Half a step each: 2^-4 of a value, or 2^-10 of a scale, which is
                # at most 2^-6.8 of the largest.
                largest = np.abs(a).reshape(*a.shape[:-1], -1, 32).max(-1)
                step = np.repeat(largest, 32, -1) * 2.0**-15 + np.abs(a) * 0.14
            assert (np.abs(a - b) <= np.abs(a) * 2.0**-7 + step).all()


def values(made):
    """Of an array, of plain jnp's codes and scales, or of a ScaledTensor."""
    if hasattr(made, "dequantize"):
        return np.asarray(made.dequantize(), np.float32)
    if not isinstance(made, tuple):
        return np.asarray(made, np.float32)
    codes, scales = (np.asarray(a, np.float32) for a in made)
    return codes * np.repeat(np.exp2(scales - 127), 32, -1)
