"""ScaledTensor, the quantizers and the GEMM over them, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import te_flax as te
from te_flax.testing.formats import FORMATS

QUANTIZERS = {
    "tensor": te.TensorQuantizer(),
    "tensor e5m2": te.TensorQuantizer(format="e5m2", power_of_2=True),
    "mxfp8": te.MXFP8Quantizer(),
    "mxfp8 e5m2": te.MXFP8Quantizer(format="e5m2"),
    "mxfp6": te.MXFP6Quantizer(),
    "mxfp6 e3m2": te.MXFP6Quantizer(format="e3m2"),
}


def data(shape, seed=0):
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(values, jnp.float32)


def both(name, x, k_ndim=1):
    return QUANTIZERS[name](x, k_ndim=k_ndim, rowwise=True, colwise=True)


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize(("shape", "k_ndim"), [((40, 72), 1), ((3, 5, 4, 9), 2)])
@pytest.mark.parametrize("copy", ["rowwise", "colwise"])
def test_dequantize_gives_the_array_back_within_half_a_step(name, shape, k_ndim, copy):
    x = data(shape)
    tensor = getattr(both(name, x, k_ndim), copy)
    assert tensor.shape == shape
    assert tensor.data.dtype.itemsize == 1
    unit, floor = FORMATS[tensor.format]
    bound = np.maximum(unit * np.abs(x), floor * float(jnp.max(jnp.abs(x))))
    for dtype, eps in (("float32", 0.0), ("bfloat16", 2.0**-8)):
        got = tensor.dequantize(dtype)
        assert got.dtype == dtype
        error = np.abs(np.asarray(got.astype(jnp.float32)) - x)
        assert (error <= bound + eps * np.abs(x)).all()


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8 e5m2", "mxfp6"])
def test_block_scales_are_e8m0_by_bitcast(name):
    tensor = both(name, data((64, 96))).rowwise
    assert tensor.scale_inv.dtype == jnp.float8_e8m0fnu
    exponents = np.asarray(tensor.scale, np.float64) - 127
    np.testing.assert_array_equal(
        np.asarray(tensor.scale_inv).astype(np.float64), 2.0**exponents
    )


@pytest.mark.parametrize("name", QUANTIZERS)
def test_one_copy_equals_the_same_copy_of_both(name):
    x = data((33, 70))
    two = both(name, x)
    for copy in ("rowwise", "colwise"):
        asked = {"rowwise": copy == "rowwise", "colwise": copy == "colwise"}
        one = QUANTIZERS[name](x, k_ndim=1, **asked)
        other = "colwise" if copy == "rowwise" else "rowwise"
        assert getattr(one, other) is None
        for a, b in zip(
            jax.tree.leaves(getattr(one, copy)),
            jax.tree.leaves(getattr(two, copy)),
            strict=True,
        ):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
        np.testing.assert_array_equal(one.amax, two.amax)


def test_nbytes_counts_codes_and_scales():
    x = data((64, 96))
    assert both("tensor", x).rowwise.nbytes == 64 * 96 + 4
    assert both("mxfp8", x).rowwise.nbytes == 64 * 96 + 64 * 3
    assert both("mxfp8", x).colwise.nbytes == 64 * 96 + 2 * 96
    assert both("mxfp6", x).rowwise.nbytes == 64 * 72 + 64 * 3
    assert both("mxfp6", x).colwise.nbytes == 64 * 72 + 2 * 96


def test_a_given_amax_fixes_the_scale():
    x = data((8, 32))
    quantizer = te.TensorQuantizer(margin=1)
    given = quantizer.scale(jnp.float32(7.0))
    tensor = quantizer(x, k_ndim=1, rowwise=True, colwise=False, scale=given).rowwise
    assert tensor is not None
    scale = np.float32(448.0) / np.float32(7.0) / 2
    assert float(tensor.scale_inv) == np.float32(1) / scale


def test_under_vmap_each_example_has_its_own_amax():
    x = data((3, 8, 32)) * jnp.asarray([1.0, 10.0, 100.0])[:, None, None]

    def scale(x):
        q = te.TensorQuantizer()(x, k_ndim=1, rowwise=True, colwise=False)
        return q.rowwise.scale_inv

    for got, example in zip(jax.vmap(scale)(x), x, strict=True):
        assert float(got) == float(scale(example))


GEMMS = {  # how each pass of a dense layer contracts x [M, K], w [K, N], g [M, N]
    "fprop": ((40, 72), (72, 24), ((1,), (0,)), "rowwise", "colwise"),
    "dgrad": ((40, 24), (72, 24), ((1,), (1,)), "rowwise", "rowwise"),
    "wgrad": ((40, 72), (40, 24), ((0,), (0,)), "colwise", "colwise"),
}


@pytest.mark.parametrize("name", [None, "tensor", "mxfp8", "mxfp6"])
@pytest.mark.parametrize("product", GEMMS)
def test_gemm_is_the_product_of_the_dequantized_operands(name, product):
    a_shape, b_shape, dims, a_copy, b_copy = GEMMS[product]
    a, b = data(a_shape), data(b_shape, 1)
    lhs, rhs = a, b
    if name is not None:
        lhs, rhs = getattr(both(name, a), a_copy), getattr(both(name, b), b_copy)
        a, b = lhs.dequantize(), rhs.dequantize()
    got = te.gemm(lhs, rhs, contracting_dims=dims, precision="highest")
    a, b = (np.asarray(v, np.float64) for v in (a, b))
    want = np.tensordot(a, b, dims)
    length = a.shape[dims[0][0]]
    # K products rounded into the sum, and two multiplications by the scales.
    bound = (length + 2) * 2.0**-24 * np.tensordot(np.abs(a), np.abs(b), dims)
    assert (np.abs(np.asarray(got, np.float64) - want) <= bound).all()


def test_packed_codes_of_rows_that_do_not_fill_their_last_group():
    x = data((3, 5, 4, 9))
    pair = te.MXFP6Quantizer()(x, k_ndim=2, rowwise=True, colwise=True)
    assert pair.rowwise.data.shape == pair.colwise.data.shape == (3, 5, 27)
    assert pair.rowwise.scale.shape == (3, 5, 2)
    assert pair.colwise.scale.shape == (1, 4, 9)
    odd = te.MXFP6Quantizer()(x[..., :7], k_ndim=1, rowwise=True, colwise=True)
    assert odd.rowwise.data.shape == (3, 5, 4, 6)
    assert odd.colwise.shape == odd.colwise.dequantize().shape == (3, 5, 4, 7)


@pytest.mark.parametrize("special", [jnp.nan, jnp.inf, -jnp.inf])
def test_packed_blocks_with_nan_or_inf_come_back_so(special):
    x = data((2, 70)).at[0, 40].set(special)
    tensor = both("mxfp6", x).rowwise
    back = np.asarray(tensor.dequantize())
    if np.isnan(special):  # the whole block, as FP6 has no NaN
        assert np.isnan(back[0, 32:64]).all()
    else:
        assert back[0, 40] == special
        assert not back[0, 32:40].any()
    assert np.isfinite(np.delete(back, np.s_[32:64], 1)).all()
    assert np.isfinite(back[1]).all()


def test_values_of_codes_are_exact_in_bfloat16():
    for format in ("e2m3", "e3m2"):
        tensor = te.MXFP6Quantizer(format=format)(
            data((33, 70)), k_ndim=1, rowwise=True, colwise=False
        ).rowwise
        values = tensor.values()
        assert (values.scaling, values.holds_values) == ("none", True)
        assert values.data.dtype == jnp.bfloat16
        np.testing.assert_array_equal(
            values.data.astype(jnp.float32), tensor.dequantize()
        )


BAD = [
    (
        lambda q, x: te.MXFP6Quantizer(format="e4m3"),
        ValueError,
        r"MXFP6Quantizer: format must be e2m3 or e3m2, got 'e4m3'; ",
    ),
    (
        lambda q, x: te.MXFP6Quantizer()(x, k_ndim=1, rowwise=False, colwise=False),
        ValueError,
        r"MXFP6Quantizer: rowwise, colwise must be True for at least one of them",
    ),
    (
        lambda q, x: te.gemm(
            both("mxfp6", x).rowwise,
            both("mxfp8", x).rowwise,
            contracting_dims=((1,), (1,)),
        ),
        ValueError,
        r"gemm: rhs must be scaled like lhs \(mxfp6\), got mxfp8; ",
    ),
    (
        lambda q, x: te.ScaledTensor(data=x, scaling="bogus").dequantize(),
        ValueError,
        r"ScaledTensor.dequantize: scaling must be 'none' .* got 'bogus' without a ",
    ),
    (
        lambda q, x: te.TensorQuantizer()(x, k_ndim=1, rowwise=False, colwise=False),
        ValueError,
        r"TensorQuantizer: rowwise, colwise must be True for at least one of them",
    ),
    (
        lambda q, x: te.gemm(np.ones((2, 3)), x, contracting_dims=((1,), (0,))),
        TypeError,
        r"gemm: lhs must be float32, .* got float64; ",
    ),
    (
        lambda q, x: te.gemm(x, x, contracting_dims=((5,), (0,))),
        ValueError,
        r"gemm: contracting_dims of lhs must be different dims of lhs, which has 2, ",
    ),
    (
        lambda q, x: te.gemm(x, x, contracting_dims=((1,), (0, 1))),
        ValueError,
        r"gemm: contracting_dims must name as many dims of lhs as of rhs, got ",
    ),
    (
        lambda q, x: te.gemm(x, x, contracting_dims=((1,),)),
        ValueError,
        r"gemm: contracting_dims must hold the dims of lhs and those of rhs, got ",
    ),
    (
        lambda q, x: te.gemm(x[0, 0], x, contracting_dims=((0,), (0,))),
        ValueError,
        r"gemm: contracting_dims of lhs must be different dims of lhs, which has 0, ",
    ),
    (
        lambda q, x: te.gemm(
            x, x.T, contracting_dims=((1,), (0,)), batch_dims=((9,), ())
        ),
        ValueError,
        r"gemm: batch_dims of lhs must be different dims of lhs, which has 2, got ",
    ),
    (
        lambda q, x: te.gemm(
            x, x, contracting_dims=((0, 1), (0, 1)), batch_dims=((0,), (0,))
        ),
        ValueError,
        r"gemm: batch_dims must name all of the contracting dims, or none of them",
    ),
    (
        lambda q, x: te.gemm(x, x.T, contracting_dims=((1,), (0,)), out_dtype="int8"),
        TypeError,
        r"gemm: out_dtype must be float32 or .* got int8; ",
    ),
    (
        lambda q, x: te.gemm(q.colwise, x, contracting_dims=((1,), (0,))),
        ValueError,
        r"gemm: contracting_dims of lhs must be its first or .*, got \(1,\); ",
    ),
    (
        lambda q, x: te.gemm(q.rowwise, x.T, contracting_dims=((1,), (0,))),
        ValueError,
        r"gemm: rhs must be scaled like lhs \(tensor\), got none; ",
    ),
    (
        lambda q, x: te.gemm(x, x, contracting_dims=((1,), (0,))),
        ValueError,
        r"gemm_nn: rhs must have K.. = 32 like lhs, got 8 in shape",
    ),
    (
        lambda q, x: q.rowwise.dequantize(jnp.int8),
        TypeError,
        r"ScaledTensor.dequantize: dtype must be float32, .* got int8; ",
    ),
]


@pytest.mark.parametrize(("call", "error", "text"), BAD)
def test_bad_operands(call, error, text):
    x = data((8, 32))
    with pytest.raises(error, match=text):
        call(both("tensor", x), x)


def test_two_e5m2_operands_are_refused():
    q = both("tensor e5m2", data((32, 32)))
    with pytest.raises(TypeError, match="gemm: rhs must not be e5m2 like lhs"):
        te.gemm(q.rowwise, q.rowwise, contracting_dims=((1,), (1,)))


@pytest.mark.parametrize("named", [((0,), (0,)), ((0,), ()), ((), (0,))])
def test_batch_dims_of_either_side_are_never_gathered(named):
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Explicit,))
    x, g = data((64, 24)), data((64, 16), 1)

    def wgrad(x, g):
        return te.gemm(x, g, contracting_dims=((0,), (0,)), batch_dims=named)

    with jax.set_mesh(mesh):
        whole = jax.device_put(g, NamedSharding(mesh, P()))
        cut = jax.device_put(x, NamedSharding(mesh, P("dp")))
        compiled = jax.jit(wgrad).lower(cut, whole).compile()
        got = compiled(cut, whole)
    text = compiled.as_text() or ""
    assert "all-gather" not in text
    assert text.count("all-reduce(") == 1
    want = np.asarray(x, np.float64).T @ np.asarray(g, np.float64)
    bound = 64 * 2.0**-24 * np.abs(x).T @ np.abs(g)
    assert (np.abs(np.asarray(got, np.float64) - want) <= bound).all()


@pytest.mark.parametrize("name", ["tensor", "mxfp8"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_amax_is_the_maximum_over_the_named_manual_axes(name, check_vma):
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Auto,))
    x = data((64, 32))

    def amax(x):
        q = QUANTIZERS[name](
            x, k_ndim=1, rowwise=True, colwise=False, amax_axes=("dp",)
        )
        return q.amax

    f = jax.shard_map(
        amax, mesh=mesh, in_specs=P("dp"), out_specs=P(), check_vma=check_vma
    )
    got = jax.jit(f)(x)
    for shard in got.addressable_shards:  # the same on every device
        assert float(shard.data[0]) == float(jnp.max(jnp.abs(x)))
