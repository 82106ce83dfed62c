"""Row shards of the tests, what one device makes of them, and what travels."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import te_flax as te
from benchmarks.wire import bytes_of, collectives
from te_flax.functional.collective import GatheredNorm

DEVICES, SHARD, FEATURES = 8, 4, 96
CUT = P("tp")
A, E = AxisType.Auto, AxisType.Explicit
FAST = {"xla_backend_optimization_level": 0}
NAMES = ("normed", "quantized", "residual")
OUTPUTS = [named for n in (1, 2, 3) for named in itertools.combinations(NAMES, n)]
QUANTIZERS = {
    "mxfp8": te.MXFP8Quantizer(),
    "mxfp6_e2m3": te.MXFP6Quantizer(format="e2m3"),
    "mxfp6_e3m2": te.MXFP6Quantizer(format="e3m2"),
}
CODE_BITS = {"mxfp8": 8, "mxfp6_e2m3": 6, "mxfp6_e3m2": 6}
WIDTH = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def line(kind=A, size=DEVICES):
    """A mesh of one axis."""
    return jax.make_mesh((size,), ("tp",), axis_types=(kind,))


def operands(dtype=jnp.bfloat16, rows=DEVICES * SHARD, between=(3,), seed=0):
    """Rows of many magnitudes, and a factor for each feature."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, *between, FEATURES), np.float32)
    x *= 2.0 ** rng.integers(-6, 6, (rows, *between, 1)).astype(np.float32)
    return jnp.asarray(x, dtype), jnp.asarray(rng.standard_normal(FEATURES), dtype)


@functools.partial(jax.jit, static_argnums=(2, 3), static_argnames="offset")
def one_device(x, gamma, outputs, quantize="mxfp8", offset=0.0):
    """What the function means, of all rows: te.norm and the quantizer of its result."""
    if offset:
        gamma = gamma.astype(jnp.float32) + jnp.float32(offset)
    normed = te.norm(x, gamma, config=te.NormConfig(kind="rmsnorm"))
    quantizer = QUANTIZERS[quantize]
    copies = quantizer(normed, k_ndim=1, rowwise=True, colwise=False)
    found = GatheredNorm(normed, copies.rowwise, x)
    return GatheredNorm(**{name: getattr(found, name) for name in outputs})


def call(outputs, quantize="mxfp8", **options):
    """The function of a device's rows, or of all."""
    quantize = quantize if "quantized" in outputs else None
    options |= {"axis": "tp", "quantize": quantize, "outputs": outputs}
    return functools.partial(te.allgather_rms_norm, **options)


def inside(f, mesh, vma=True, results=CUT):
    """The function on each device of a mesh of one axis, results one behind another."""
    specs = {"in_specs": (P("tp"), P()), "out_specs": results}
    return jax.shard_map(f, mesh=mesh, check_vma=vma, **specs)


def place(mesh, *arrays, spec=CUT):
    """The first array cut, the others whole."""
    specs = (spec, *[P()] * (len(arrays) - 1))
    return [
        jax.device_put(a, NamedSharding(mesh, s))
        for a, s in zip(arrays, specs, strict=True)
    ]


def compiled(f, *arrays):
    return jax.jit(f).lower(*arrays).compile(FAST)


def run(f, *arrays):
    return compiled(f, *arrays)(*arrays)


def bits(a):
    a = np.asarray(a)
    return a.view(WIDTH[a.dtype.itemsize])


def same(got, want):
    """Equal to the bit, in every array."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(bits(a), bits(b))


def wire(executable):
    """The bytes of the results of each kind of collective, one number for each."""
    found = {}
    for each in collectives(executable.as_text(), DEVICES):
        found.setdefault(each.kind, []).extend(map(bytes_of, each.shapes))
    return {kind: sorted(sizes) for kind, sizes in found.items()}


def gathered(outputs, rows=DEVICES * SHARD * 3, width=2, quantize="mxfp8"):
    """Bytes that a group's rows are, in what travels for these outputs."""
    if outputs == ("quantized",):
        count = rows * FEATURES
        return [count // 32, count * CODE_BITS[quantize] // 8]
    return [width * rows * FEATURES]


def gradients(f, dnormed, dresidual):
    """Gradients of <normed, dnormed> + <residual, dresidual> with respect to both."""

    def loss(x, gamma, *cotangents):
        made, total = f(x, gamma), jnp.float32(0)
        for a, ct in zip((made.normed, made.residual), cotangents, strict=True):
            if a is not None:
                total += jnp.sum(a.astype(jnp.float32) * ct.astype(jnp.float32))
        return total

    return lambda x, gamma: jax.grad(loss, (0, 1))(x, gamma, dnormed, dresidual)


def summed(dgamma, vma):
    """What check_vma=False leaves to the user."""
    return dgamma if vma else lax.psum(dgamma, "tp")
