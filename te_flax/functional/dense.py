"""The dense product y = x . kernel + bias: the place where its two passes meet."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from te_flax.errors import check_float64, message
from te_flax.ops._op import cotangent_like
from te_flax.quantize.gemm import gemm
from te_flax.quantize.mailbox import MAILBOX_SIZE, encode
from te_flax.quantize.quantizer import Identity, Quantizer
from te_flax.quantize.tensor import ScaledTensor
from te_flax.typing import FLOATS, Array

_IDENTITY = Identity()


class Amaxes(NamedTuple):
    """The amax of earlier steps that fixes each operand's scale, float32 ``[]``.

    None in place of one: its scale comes from the array itself.

    Attributes:
        x: of the input.
        kernel: of the kernel.
        dy: of the cotangent.

    Example:
        >>> Amaxes().dy is None
        True
    """

    x: Array | None = None
    kernel: Array | None = None
    dy: Array | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """All that both passes must know before tracing; read once, where it is made.

    Attributes:
        x: quantizer of the input.
        kernel: quantizer of the kernel.
        dy: quantizer of the cotangent.
        split_accumulator: of the forward, input-gradient and kernel-gradient GEMM.
        out_dtype: name of y's dtype; None takes x's.
        precision: of the products of unquantized operands.
        out_sharding: wanted of y.
        amax_axes: manual mesh axes over which an amax is the maximum.
        report_dy: whether amax(dy) leaves through the mailbox's cotangent.
        impl: kernel rules of every op of both passes.

    Example:
        >>> import te_flax as te
        >>> e4m3 = te.TensorQuantizer()
        >>> e5m2 = te.TensorQuantizer(format="e5m2")
        >>> config = DenseConfig(x=e4m3, kernel=e4m3, dy=e5m2)
        >>> te.dense(jnp.ones((2, 3)), jnp.ones((3, 4)), config=config)[0].shape
        (2, 4)
    """

    x: Quantizer = _IDENTITY
    kernel: Quantizer = _IDENTITY
    dy: Quantizer = _IDENTITY
    split_accumulator: tuple[bool, bool, bool] = (False, True, True)
    out_dtype: str | None = None
    precision: str = "default"
    out_sharding: PartitionSpec | None = None
    amax_axes: tuple[str, ...] = ()
    report_dy: bool = False
    impl: tuple | None = None


def dense(
    x: Array,
    kernel: Array,
    bias: Array | None = None,
    *,
    k_ndim: int = 1,
    config: DenseConfig | None = None,
    amaxes: Amaxes | None = None,
    mailbox: Array | None = None,
) -> tuple[Array, tuple[Array | None, Array | None]]:
    """Computes ``y = x . kernel + bias`` with quantized operands in both passes.

    ``dx = dy . kernel^T`` and ``dkernel = x^T . dy`` read the copies that the forward
    pass made; nothing is quantized twice and no unquantized operand is kept.

    Args:
        x: ``[*batch, *in]`` float32, bfloat16 or float16.
        kernel: ``[*in, *out]``.
        bias: ``[*out]`` or None.
        k_ndim: number of dims in ``in``.
        config: quantizers and options; None multiplies unquantized.
        amaxes: amax of earlier steps under delayed scaling.
        mailbox: float32 ``[279]``; its cotangent carries amax(dy) out of the backward
            pass when ``config.report_dy``.

    Returns:
        y ``[*batch, *out]``, and the amax ``[2]`` (largest finite magnitude, non-finite
        flag) of x and of the kernel, None where none was measured.

    Raises:
        ValueError: ranks or contracted sizes do not match.
        TypeError: an operand is no float32, bfloat16 or float16 array (float64 only
            unquantized and with ``jax_enable_x64``).

    Example:
        >>> import jax.numpy as jnp
        >>> y, _ = dense(jnp.ones((2, 3)), jnp.ones((3, 4)), jnp.ones(4))
        >>> y.shape, float(y[0, 0])
        ((2, 4), 4.0)
    """
    _check(x, kernel, bias, k_ndim, config)
    if bias is not None:
        bias = jnp.asarray(bias)
    config = config or DenseConfig()
    return _dense(
        (config, k_ndim),
        jnp.asarray(x),
        jnp.asarray(kernel),
        bias,
        amaxes or Amaxes(),
        mailbox,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Residuals:
    """What the backward pass reads: one copy of each operand, in its own orientation.

    Under a recipe that is one byte an element plus the scales:
    ``M K (1 + s) + K N (1 + s)`` with s = 0 (tensor scaling, plus 4 bytes a tensor) or
    1/32 (MXFP8).
    """

    x: ScaledTensor
    kernel: ScaledTensor
    dy_amax: Array | None
    types: tuple = dataclasses.field(metadata={"static": True})


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dense(static, x, kernel, bias, amaxes, mailbox):
    """Forward pass alone: only the copies that the forward product reads."""
    return _forward(static, x, kernel, bias, amaxes, backward=False)[0]


def _forward(static, x, kernel, bias, amaxes, *, backward: bool):
    config, k_ndim = static
    how = {"amax_axes": config.amax_axes, "impl": config.impl}
    qx = config.x(
        x, k_ndim=k_ndim, rowwise=True, colwise=backward, amax=amaxes.x, **how
    )
    n_ndim = kernel.ndim - k_ndim
    qk = config.kernel(
        kernel,
        k_ndim=n_ndim,
        rowwise=backward,
        colwise=True,
        amax=amaxes.kernel,
        **how,
    )
    y = gemm(
        qx.rowwise,
        qk.colwise,
        contracting_dims=(range(x.ndim - k_ndim, x.ndim), range(k_ndim)),
        bias=bias,
        out_dtype=config.out_dtype or x.dtype,
        split_accumulator=config.split_accumulator[0],
        precision=config.precision,
        out_sharding=config.out_sharding,
        impl=config.impl,
    )
    return (y, (qx.amax, qk.amax)), (qx.colwise, qk.rowwise)


def _dense_fwd(static, x, kernel, bias, amaxes, mailbox):
    out, (x_col, kernel_row) = _forward(static, x, kernel, bias, amaxes, backward=True)
    types = tuple(None if a is None else jax.typeof(a) for a in (x, kernel, bias))
    mail = None if mailbox is None else jax.typeof(mailbox)
    return out, Residuals(
        x=x_col, kernel=kernel_row, dy_amax=amaxes.dy, types=(*types, mail)
    )


def _dense_bwd(static, res: Residuals, cotangents):
    config, k_ndim = static
    dy, _ = cotangents
    x_type, kernel_type, bias_type, mail_type = res.types
    n_ndim = kernel_type.ndim - k_ndim
    tokens = range(dy.ndim - n_ndim)
    qdy = config.dy(
        dy,
        k_ndim=n_ndim,
        rowwise=True,
        colwise=True,
        amax=res.dy_amax,
        amax_axes=config.amax_axes,
        impl=config.impl,
    )
    options = {"precision": config.precision, "impl": config.impl}
    dx = gemm(
        qdy.rowwise,
        res.kernel,
        contracting_dims=(range(len(tokens), dy.ndim), range(k_ndim, kernel_type.ndim)),
        out_dtype=x_type.dtype,
        split_accumulator=config.split_accumulator[1],
        out_sharding=_wanted(x_type),
        **options,
    )
    dkernel = gemm(
        res.x,
        qdy.colwise,
        contracting_dims=(tokens, tokens),
        batch_dims=(tokens, tokens),
        out_dtype=kernel_type.dtype,
        split_accumulator=config.split_accumulator[2],
        out_sharding=_wanted(kernel_type),
        **options,
    )
    dbias = mail = None
    if bias_type is not None:
        wide = jnp.promote_types(dy.dtype, jnp.float32)
        dbias = jnp.sum(dy.astype(wide), tuple(tokens))
        dbias = cotangent_like(dbias, bias_type)
    if mail_type is not None:
        mail = jnp.zeros(MAILBOX_SIZE, jnp.float32)
        if config.report_dy and qdy.amax is not None:
            mail = encode(qdy.amax)
        mail = cotangent_like(mail, mail_type)
    dx = cotangent_like(dx, x_type)
    return dx, cotangent_like(dkernel, kernel_type), dbias, None, mail


_dense.defvjp(_dense_fwd, _dense_bwd)


def _wanted(aval) -> PartitionSpec | None:
    """The sharding that a gradient should arrive in, where the type says it."""
    spec = aval.sharding.spec
    return spec if any(s is not None for s in spec) else None


def _check(x, kernel, bias, k_ndim: int, config: DenseConfig | None) -> None:
    check_float64("dense", x=x, kernel=kernel, bias=bias)
    unquantized = config is None or config.x == config.kernel == _IDENTITY
    wide = (jnp.float64,) if unquantized else ()
    for name, array in (("x", x), ("kernel", kernel), ("bias", bias)):
        if array is not None and array.dtype not in (*FLOATS, *wide):
            raise TypeError(
                message(
                    "dense",
                    name,
                    "be float32, bfloat16 or float16",
                    array.dtype,
                    "cast it first",
                )
            )
    if kernel.ndim <= k_ndim or x.ndim < k_ndim:
        raise ValueError(
            message(
                "dense",
                "kernel",
                f"have {k_ndim} input dims and at least one output dim, x the same "
                f"{k_ndim} last dims",
                f"kernel {kernel.shape}, x {x.shape}",
                "reshape them or pass k_ndim",
            )
        )
    if x.shape[x.ndim - k_ndim :] != kernel.shape[:k_ndim]:
        raise ValueError(
            message(
                "dense",
                "x",
                f"end in {kernel.shape[:k_ndim]} like kernel {kernel.shape}",
                f"shape {x.shape}",
                "check the contracted features",
            )
        )
    if bias is not None and bias.shape != kernel.shape[k_ndim:]:
        raise ValueError(
            message(
                "dense",
                "bias",
                f"have shape {kernel.shape[k_ndim:]}",
                f"shape {bias.shape}",
                "one bias for each output feature",
            )
        )
