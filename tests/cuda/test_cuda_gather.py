"""Gathered rows over one and two GPUs: one GPU's results, and what travels as what."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _gpu import GPU
from _rows import (
    FEATURES,
    OUTPUTS,
    A,
    E,
    bits,
    call,
    gradients,
    inside,
    line,
    one_device,
    operands,
    place,
    same,
)
from jax.sharding import PartitionSpec as P

import te_flax as te

pytestmark = GPU
each_size = pytest.mark.parametrize(
    "size",
    [
        1,
        pytest.param(
            2,
            marks=pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs"),
        ),
    ],
)
ROWS = 250


def program(f, mesh, *arrays):
    with jax.set_mesh(mesh):
        return jax.jit(f).lower(*place(mesh, *arrays)).compile()


@each_size
@pytest.mark.parametrize("quantize", ["mxfp8", "mxfp6_e2m3"])
@pytest.mark.parametrize("outputs", OUTPUTS, ids="+".join)
def test_results(outputs, quantize, size):
    """Inside shard_map, on an Auto and on an Explicit mesh."""
    x, gamma = operands(rows=ROWS)
    want = one_device(x, gamma, outputs, quantize)
    f = call(outputs, quantize)
    cases = (
        (inside(f, line(A, size), False, P()), line(A, size)),
        (f, line(A, size)),
        (f, line(E, size)),
    )
    for fn, mesh in cases:
        same(program(fn, mesh, x, gamma)(*place(mesh, x, gamma)), want)


@each_size
@pytest.mark.parametrize("outputs", OUTPUTS, ids="+".join)
def test_nothing_is_copied_around_the_gather(outputs, size):
    """Codes travel as they are, one byte each; nothing else runs."""
    x, gamma = operands(rows=ROWS)
    text = program(inside(call(outputs), line(size=size)), line(size=size), x, gamma)
    text = text.as_text() or ""
    assert "bitcast-convert" not in text
    lines = re.findall(r".* all-gather(?:-start)?\(.*", text)
    alone = outputs == ("quantized",)
    assert 0 < len(lines) <= 1 + alone if size > 1 else not lines
    assert not any(re.search(r"\b(f16|f32)\[", text) for text in lines)
    assert not alone or not any("bf16[" in text for text in lines)


@each_size
def test_nan_payloads(size):
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 2**16, (ROWS, FEATURES), np.uint16)
    mesh = line(size=size)
    placed = place(mesh, jnp.asarray(raw.view(jnp.bfloat16)), jnp.ones(FEATURES))
    f = inside(call(("residual",)), mesh, False, P())
    np.testing.assert_array_equal(bits(jax.jit(f)(*placed).residual), raw)


@each_size
@pytest.mark.parametrize("vma", [True, False], ids=["vma", "no_vma"])
def test_gradients(vma, size):
    """Small integers as cotangents: dx is te.norm's of their sum, to the bit."""
    x, gamma = operands(rows=ROWS, between=())
    mesh = line(size=size)
    rng = np.random.default_rng(1)
    said = [rng.integers(-4, 5, (size, ROWS, FEATURES)) for _ in range(2)]
    total = [jnp.asarray(ct.sum(0), x.dtype) for ct in said]
    config = te.NormConfig(kind="rmsnorm")
    pulled = jax.vjp(lambda x, g: te.norm(x, g, config=config), x, gamma)[1]
    dx, dgamma = jax.jit(pulled)(total[0])
    flat = [jnp.asarray(ct.reshape(-1, FEATURES), x.dtype) for ct in said]
    cut = [place(mesh, ct)[0] for ct in flat]
    f = inside(call(("normed", "residual")), mesh, vma)
    got = jax.jit(gradients(f, *cut))(*place(mesh, x, gamma))
    np.testing.assert_array_equal(bits(got[0]), bits(dx + total[1]))
    # bfloat16: each device's part of the sum is rounded, and then the sum.
    normed = np.abs(np.asarray(x, np.float64))
    normed /= np.sqrt(np.mean(normed**2, -1, keepdims=True))
    bound = 2.0**-7 * (normed * np.abs(np.asarray(total[0], np.float64))).sum(0)
    error = np.abs(np.asarray(got[1], np.float64) - np.asarray(dgamma, np.float64))
    assert (error <= bound).all()
