"""MXFP8 layers whose products read values: the numbers of codes, the same residuals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

import te_flax as te
from te_flax.functional import _core
from te_flax.functional.config import DenseConfig, GemmState
from te_flax.functional.dense import _dense_fwd, _Static
from te_flax.ops.products import mxfp8_products
from te_flax.recipe.record import start_recording
from te_flax.testing.patterns import same_bits

M, K, N = 72, 96, 64
RECIPE = te.MXFP8BlockScaling(fp8_format="hybrid")
EPS = 2.0**-24


def _rngs():
    return nnx.Rngs(0)


LAYERS = {
    "dense": lambda **kw: te.DenseGeneral(K, N, rngs=_rngs(), **kw),
    "layernorm_dense": lambda **kw: te.LayerNormDenseGeneral(K, N, rngs=_rngs(), **kw),
    "layernorm_mlp": lambda **kw: te.LayerNormMLP(
        K, N, activations=("silu", "linear"), rngs=_rngs(), **kw
    ),
}
each_layer = pytest.mark.parametrize("name", LAYERS)


def step(layer, x):
    """Loss, gradients of the parameters and of x."""

    graphdef, params, rest = nnx.split(layer, nnx.Param, ...)

    def loss(params, x):
        y = nnx.merge(graphdef, params, rest)(x)
        return jnp.sum(jnp.sin(y.astype(jnp.float32)))

    return jax.value_and_grad(loss, argnums=(0, 1))(params, x)


def under(how, fn, *args):
    with mxfp8_products(how), te.autocast(RECIPE):
        return fn(*args)


def data(dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(0), (M, K), dtype)


def primitives(jaxpr):
    """Names of the te_flax ops in a jaxpr and all inside it."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name.startswith("te_"):
            yield eqn.primitive.name[3:]
        for sub in jaxprs_in_params(eqn.params):
            yield from primitives(sub)


def traced(name, how, dtype=jnp.bfloat16):
    layer = LAYERS[name](dtype=dtype)
    jaxpr = under(how, jax.make_jaxpr(lambda x: step(layer, x)), data(dtype))
    return sorted(primitives(jaxpr.jaxpr))


@each_layer
def test_every_operand_is_quantized_once_and_no_product_reads_codes(name):
    ops = traced(name, "values")
    gemms = 2 if name == "layernorm_mlp" else 1
    quantized = [op for op in ops if "mxfp8" in op and not op.startswith("dequantize")]
    assert len(quantized) == 3 * gemms, ops
    assert all("values" in op for op in quantized), ops
    assert len([op for op in ops if op.startswith("dequantize_mxfp8")]) == 2 * gemms
    products = [op for op in ops if op.startswith("gemm")]
    assert len(products) == 3 * gemms
    assert not any("mxfp8" in op for op in products)
    assert "values" not in "".join(traced(name, "codes"))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
def test_operands_equal_those_of_codes_bit_for_bit(dtype):
    x, kernel = data(dtype), jax.random.normal(jax.random.key(1), (K, N))
    dy = jax.random.normal(jax.random.key(2), (M, N), dtype)
    with mxfp8_products("values"):
        values = RECIPE.operands()
    codes = RECIPE.quantizers()
    for role, array in (("x", x), ("kernel", kernel), ("dy", dy)):
        how = {"k_ndim": 1, "rowwise": True, "colwise": True}
        got = getattr(values, role)(array, **how)
        want = getattr(codes, role)(array, **how)
        for copy in ("rowwise", "colwise"):
            a, b = getattr(got, copy), getattr(want, copy)
            wide = a.data if a.holds_values else a.dequantize(jnp.bfloat16)
            same_bits(wide, np.asarray(b.dequantize(jnp.bfloat16)))
            exact = np.asarray(b.dequantize(jnp.float32))
            same_bits(np.asarray(wide).astype(np.float32), exact)


def test_products_agree_within_the_accumulation_bound():
    x, kernel = data(jnp.float32), jax.random.normal(jax.random.key(1), (K, N))
    dy = jax.random.normal(jax.random.key(2), (M, N), jnp.float32)

    def run(x, kernel):
        config = DenseConfig(**RECIPE.operands()._asdict())
        y, pull = jax.vjp(lambda *a: te.dense(*a, config=config)[0], x, kernel)
        return y, *pull(dy)

    results = [under(how, run, x, kernel) for how in ("codes", "values")]
    q = RECIPE.quantizers()
    how = {"k_ndim": 1, "rowwise": True, "colwise": True}
    qx, qk, qdy = (
        [np.abs(np.asarray(c.dequantize(jnp.float32), np.float64)) for c in pair[:2]]
        for pair in (q.x(x, **how), q.kernel(kernel, **how), q.dy(dy, **how))
    )
    sizes = (qx[0] @ qk[1], qdy[0] @ qk[0].T, qx[1].T @ qdy[1])
    for a, b, size, count in zip(*results, sizes, (K, N, M), strict=True):
        off = np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64))
        assert np.all(off <= 2 * (count + 1) * EPS * size)


@each_layer
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
def test_gradients_have_the_types_and_nearly_the_numbers_of_codes(name, dtype):
    layer, x = LAYERS[name](dtype=dtype), data(dtype)
    found = [jax.tree.leaves(under(h, step, layer, x)) for h in ("codes", "values")]
    for a, b in zip(*found, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        a, b = (np.asarray(v, np.float64) for v in (a, b))
        # A product may round the other way, and a code behind it then move one step.
        assert np.linalg.norm(a - b) <= 2.0**-4 * np.linalg.norm(a)


def residuals(how):
    x, kernel = data(), jax.random.normal(jax.random.key(1), (K, N))
    with mxfp8_products(how):
        config = DenseConfig(**RECIPE.operands()._asdict())
    static = _Static(config, None, 1, False)
    _, (saved, kept, _) = _dense_fwd(static, x, None, None, kernel, None, GemmState())
    assert kept is None
    return saved


def test_residuals_are_codes():
    saved = residuals("values")
    want = residuals("codes")
    nbytes = sum(a.nbytes for a in jax.tree.leaves(saved))
    assert nbytes == M * K + -(-M // 32) * K + K * N + K * (N // 32)
    for got, codes in zip(jax.tree.leaves(saved), jax.tree.leaves(want), strict=True):
        same_bits(got, np.asarray(codes))


def test_codes_stay_where_the_other_operand_has_codes():
    saved = residuals("codes")
    assert _core._like(saved.x, saved.kernel, DenseConfig()) is saved.x


def test_cached_kernels_give_the_bits_of_fresh_ones():
    layer, x = LAYERS["dense"](), data(jnp.float32)

    def cached(layer, x):
        with te.cache_quantized(layer):
            kernel = layer.fp8.kernel_cache.get_value()
            assert kernel.colwise.holds_values
            assert kernel.rowwise.scaling == "mxfp8"
            return step(layer, x)

    fresh, held = (
        jax.tree.leaves(under("values", fn, layer, x)) for fn in (step, cached)
    )
    for a, b in zip(fresh, held, strict=True):
        same_bits(a, np.asarray(b))


def test_remat_quantizes_nothing_twice():
    layer = LAYERS["layernorm_mlp"](dtype=jnp.bfloat16)
    policy = te.checkpoint_policies.save_quantized()
    graphdef, state = nnx.split(layer)

    @functools.partial(jax.checkpoint, policy=policy)
    def run(state, x):
        return nnx.merge(graphdef, state)(x)

    def loss(x):
        return jnp.sum(jnp.sin(run(state, x).astype(jnp.float32)))

    jaxpr = under("values", jax.make_jaxpr(jax.grad(loss)), data())
    made = [op for op in primitives(jaxpr.jaxpr) if "values" in op]
    assert len(made) == 6, made


def test_vmap_gives_each_example_its_own_blocks():
    kernel = jax.random.normal(jax.random.key(1), (K, N), jnp.bfloat16)
    x = jax.random.normal(jax.random.key(3), (3, 40, K), jnp.bfloat16)
    with mxfp8_products("values"):
        config = DenseConfig(**RECIPE.operands()._asdict())

    def loss(x):
        return jnp.sum(jnp.sin(te.dense(x, kernel, config=config)[0].astype("float32")))

    mapped = jax.vmap(jax.grad(loss))(x)
    for i in range(3):
        same_bits(mapped[i], np.asarray(jax.grad(loss)(x[i])))


@pytest.mark.parametrize("name", ["dense", "layernorm_mlp"])
def test_records_show_what_codes_lose(name):
    """Of x, kernel and dy, though products read values."""

    def recorded(how):
        layer = LAYERS[name](recipe=RECIPE)
        states = [m for _, m in nnx.iter_modules(layer) if isinstance(m, te.Fp8State)]
        for state in states:
            start_recording(state)
        x = data(jnp.float32)
        dy = jnp.exp(8 * jax.random.normal(jax.random.key(1), layer(x).shape))
        with mxfp8_products(how):
            te.grad(lambda layer: jnp.sum(layer(x) * dy))(layer)
        return [np.asarray(state.record[...]) for state in states]

    pairs = list(zip(recorded("values"), recorded("codes"), strict=True))
    for got, want in pairs:
        np.testing.assert_allclose(got, want, rtol=2.0**-7)  # of values in bfloat16
    assert any(got[2, 3] > 0 for got, _ in pairs)  # something of dy is flushed
