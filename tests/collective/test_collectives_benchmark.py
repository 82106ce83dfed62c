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
        made = made._asdict() if hasattr(made, "_asdict") else made
        found.append({k: made[k] for k in outputs if k != "quantized"})
    for other in found[1:]:
        for name, a in found[0].items():
            np.testing.assert_allclose(
                np.asarray(a, np.float32), np.asarray(other[name], np.float32), 2**-7
            )
