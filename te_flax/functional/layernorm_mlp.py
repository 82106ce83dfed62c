"""The feed-forward block y = act(norm(x) . wi + bi) . wo + bo as one function.

Between its two GEMMs nothing is read twice: the norm and the activation write the
quantized operands, the activation's backward pass writes the quantized cotangent of the
first GEMM together with its bias gradient.
"""

import dataclasses
import functools
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from te_flax.errors import message
from te_flax.functional import _core
from te_flax.functional._checks import check_dtypes, check_gemm, check_norm
from te_flax.functional.activation import activate
from te_flax.functional.config import (
    ActivationConfig,
    DenseConfig,
    GemmState,
    NormConfig,
)
from te_flax.functional.lora import Lora, low_rank
from te_flax.ops.activation import ACT_BWD, ACT_FWD
from te_flax.quantize.fused import Produced, produce
from te_flax.typing import Array


class MLPParams(NamedTuple):
    """The arrays that :func:`layernorm_mlp` trains; None for what it lacks.

    Attributes:
        scale: ``[in]``, gamma of the norm.
        norm_bias: ``[in]``, beta of the norm.
        wi: ``[in, n_act, mid]``.
        wi_bias: ``[n_act, mid]``.
        wo: ``[mid, *out]``.
        wo_bias: ``[*out]``.
        wi_lora: low-rank addition to ``wi``.
        wo_lora: low-rank addition to ``wo``.

    Example:
        >>> MLPParams(None, None, jnp.ones((2, 1, 4)), None, jnp.ones((4, 2))).wi_lora
    """

    scale: Array | None
    norm_bias: Array | None
    wi: Array
    wi_bias: Array | None
    wo: Array
    wo_bias: Array | None = None
    wi_lora: Lora | None = None
    wo_lora: Lora | None = None


_NORM, _GEMM, _ACTIVATION = NormConfig(), DenseConfig(), ActivationConfig()


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """All that both passes of :func:`layernorm_mlp` must know before tracing.

    Attributes:
        norm: which norm; None for none.
        wi: of the first GEMM.
        wo: of the second GEMM.
        activation: between them.
        dropout_rate: of the activation's result, in [0, 1).
        dropout_dims: its dims along which one draw serves all.
        lora_scale: factor of the low-rank additions.
        return_layernorm_output: whether norm(x) is returned.
        ffn1_name: name of the first GEMM's result for checkpoint policies.
        ffn2_name: likewise of the second's.

    Example:
        >>> MLPConfig().activation.name
        'gelu'
    """

    norm: NormConfig | None = _NORM
    wi: DenseConfig = _GEMM
    wo: DenseConfig = _GEMM
    activation: ActivationConfig = _ACTIVATION
    dropout_rate: float = 0.0
    dropout_dims: tuple[int, ...] = ()
    lora_scale: float = 1.0
    return_layernorm_output: bool = False
    ffn1_name: str = "ffn1"
    ffn2_name: str = "ffn2"


def layernorm_mlp(
    x: Array,
    params: MLPParams,
    *,
    config: MLPConfig | None = None,
    states: tuple[GemmState, GemmState] = (GemmState(), GemmState()),
    dropout_key: Array | None = None,
) -> tuple[Array, Array | None, tuple[tuple[Array | None, Array | None], ...]]:
    """Computes ``y = dropout(act(norm(x) . wi + bi)) . wo + bo``.

    Args:
        x: ``[*batch, in]`` float32, bfloat16 or float16.
        params: the trained arrays.
        config: norm, activation, quantizers and options.
        states: what the recipe asks for, of both GEMMs.
        dropout_key: of the dropout; None drops nothing.

    Returns:
        y ``[*batch, *out]``, norm(x) or None, and for both GEMMs the amax ``[2]`` of
        its input and of its kernel, None where none was measured.

    Raises:
        ValueError: shapes do not match each other or the activation.
        TypeError: an operand is no float32, bfloat16 or float16 array.

    Example:
        >>> import jax.numpy as jnp
        >>> ones = jnp.ones(2)
        >>> p = MLPParams(ones, 0 * ones, jnp.ones((2, 1, 4)), None, jnp.ones((4, 2)))
        >>> layernorm_mlp(jnp.ones((3, 2)), p)[0].shape
        (3, 2)
    """
    config = config or MLPConfig()
    params = jax.tree.map(jnp.asarray, params)
    _check(config, x, params)
    return _mlp(config, jnp.asarray(x), params, states, dropout_key)


class _Saved(NamedTuple):
    """Residuals: the operands of the GEMMs quantized, z and x as they were."""

    wi: _core.GemmResiduals
    wo: _core.GemmResiduals
    z: Array
    stats: tuple[Array, ...]
    lora: tuple[Lora | None, Lora | None]
    dropout_key: Array | None
    x: Array | None = None
    scale: Array | None = None
    h1: Array | None = None
    h2: Array | None = None
    types: _core.Types = _core.Types()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(config, x, params, states, dropout_key):
    return _forward(config, x, params, states, dropout_key, backward=False)[0]


def _forward(config, x, p, states, dropout_key, *, backward: bool):
    norm, lora = config.norm, (p.wi_lora, p.wo_lora)
    keep = config.return_layernorm_output or lora[0] is not None
    first = _core.normalize_input(
        config.wi, norm, x, p.scale, p.norm_bias, states[0], backward=backward, h=keep
    )
    wide = (norm and norm.out_dtype) or x.dtype.name
    z, wi_amax, wi_saved = _core.multiply(
        config.wi,
        first.quantized,
        p.wi,
        p.wi_bias,
        1,
        states[0],
        wide,
        backward=backward,
    )
    if lora[0] is not None:
        z = _add_low_rank(config, z, first.h, lora[0])
    z = checkpoint_name(z, config.ffn1_name)
    second = _activate(config, z, states[1], dropout_key, lora[1] is not None, backward)
    y, wo_amax, wo_saved = _core.multiply(
        config.wo,
        second.quantized,
        p.wo,
        p.wo_bias,
        1,
        states[1],
        config.wo.out_dtype or wide,
        backward=backward,
    )
    if lora[1] is not None:
        y = _add_low_rank(config, y, second.h, lora[1])
    y = checkpoint_name(y, config.ffn2_name)
    h = first.h if config.return_layernorm_output else None
    amaxes = (first.quantized.amax, wi_amax), (second.quantized.amax, wo_amax)
    if not backward:
        return (y, h, amaxes), None
    saved = _Saved(wi_saved, wo_saved, z, first.extras, lora, dropout_key)
    if norm is not None:
        saved = saved._replace(x=x, scale=p.scale)
    highs = [m.h if a else None for m, a in zip((first, second), lora, strict=True)]
    return (y, h, amaxes), saved._replace(h1=highs[0], h2=highs[1])


def _add_low_rank(config, y, h, lora):
    return y + low_rank(h, lora, config.lora_scale).astype(y.dtype)


def _activate(config, z, state, key, h: bool, backward: bool) -> Produced:
    """The quantized operand of the second GEMM."""
    if key is None:
        return produce(
            config.wo.x,
            ACT_FWD,
            z,
            k_ndim=1,
            rowwise=True,
            colwise=backward,
            out_dtype=z.dtype.name,
            scale=state.scales.x,
            h=h,
            amax_axes=config.wo.amax_axes,
            impl=config.wo.impl,
            **config.activation.attrs,
        )
    plain = dataclasses.replace(config.activation, impl=config.wo.impl, out_dtype=None)
    dropped = _drop(config, activate(plain, z), key)
    copies = _core.quantize_input(config.wo, dropped, 1, state, backward=backward)
    return copies._replace(h=dropped)


def _drop(config, x: Array, key: Array) -> Array:
    """Dropout: the same draw in both passes, from the same key."""
    keep = 1.0 - config.dropout_rate
    shape = list(x.shape)
    for dim in config.dropout_dims:
        shape[dim] = 1
    mask = jax.random.bernoulli(key, keep, shape)
    mask = jnp.broadcast_to(mask, x.shape)
    return lax.select(mask, x * jnp.asarray(1 / keep, x.dtype), jnp.zeros_like(x))


def _mlp_fwd(config, x, params, states, dropout_key):
    out, saved = _forward(config, x, params, states, dropout_key, backward=True)
    types = jax.tree.map(jax.typeof, (x, params))
    leaves, tree = jax.tree.flatten((*types, *map(_core.mail_types, states)))
    kept = cast(_Saved, saved)._replace(types=_core.Types((tuple(leaves), tree)))
    return out, kept


def _mlp_bwd(config, saved, cotangents):
    leaves, tree = saved.types
    x_type, p, *mail_types = jax.tree.unflatten(tree, leaves)
    recorded = mail_types[0][1] is not None
    dy, dh_extra, _ = cotangents
    second, dh, dwo, dwo_lora = _wo_gradients(config, saved, dy, p)
    first, dx, dwi, dwi_lora = _wi_gradients(config, saved, dh, x_type, p, recorded)
    if config.return_layernorm_output:
        dx = _core.add(dx, dh_extra)
    dscale = dnorm_bias = None
    if config.norm is not None:
        types = (x_type, p.scale, p.norm_bias)
        dx, dscale, dnorm_bias = _core.norm_gradients(
            config.wi, config.norm, dx, saved.x, saved.scale, saved.stats, types
        )
    dwi_bias = _core.cotangent(first.dbias, p.wi_bias)
    dwo_bias = _core.cotangent(second.dbias, p.wo_bias)
    dparams = MLPParams(
        dscale, dnorm_bias, dwi, dwi_bias, dwo, dwo_bias, dwi_lora, dwo_lora
    )
    dstates = [
        _core.state_cotangent(c, made, types)
        for c, made, types in zip(
            (config.wi, config.wo), (first, second), mail_types, strict=True
        )
    ]
    return _core.cotangent(dx, x_type), dparams, tuple(dstates), None


def _wo_gradients(config, saved, dy, p):
    """Quantizes dy; gradients of the activation's result and of the second GEMM."""
    wo, lora = config.wo, saved.lora[1]
    with_bias = p.wo_bias is not None
    mid = jax.typeof(saved.z[..., 0, :])  # of the activation's result
    made = _core.quantize_cotangent(
        wo, saved.wo, dy, p.wo.ndim - 1, mid, dbias=with_bias
    )
    dh, dwo = _core.gradients(wo, saved.wo, made.quantized, 1, mid, p.wo)
    dlora = None
    if lora is not None:
        dh, dlora = _low_rank_gradients(config, saved.h2, lora, dy, dh)
    if saved.dropout_key is not None:
        dh = _drop(config, dh, saved.dropout_key)
    return made, dh, dwo, dlora


def _wi_gradients(config, saved, dh, x_type, p, recorded):
    """Through the activation, quantized in its pass; gradients of the first GEMM."""
    wi, lora = config.wi, saved.lora[0]
    made = produce(
        wi.dy,
        ACT_BWD,
        dh,
        saved.z,
        k_ndim=1,
        rowwise=True,
        colwise=True,
        out_dtype=saved.z.dtype.name,
        scale=saved.wi.dy_scale,
        h=recorded or lora is not None,
        dbias=p.wi_bias is not None,
        amax_axes=wi.amax_axes,
        key=_core.shard_key(saved.wi.key, dh),
        impl=wi.impl,
        **config.activation.attrs,
    )
    h_type = _core.type_after(config.norm, x_type)
    dx, dwi = _core.gradients(wi, saved.wi, made.quantized, 1, h_type, p.wi)
    dlora = None
    if lora is not None:
        dx, dlora = _low_rank_gradients(config, saved.h1, lora, made.h, dx)
    return made, dx, dwi, dlora


_mlp.defvjp(_mlp_fwd, _mlp_bwd)


def _low_rank_gradients(config, h, lora, dy, dh):
    """Adds the low-rank part to dh and returns its parameters' gradients."""
    add = functools.partial(low_rank, scale=config.lora_scale)
    _, pull = jax.vjp(add, h, lora)
    extra, dlora = pull(dy.astype(h.dtype))
    return _core.add(dh, extra), jax.tree.map(_core.cotangent, dlora, lora)


def _check(config: MLPConfig, x: Array, p: MLPParams) -> None:
    where = "layernorm_mlp"
    if config.norm is None:
        check_dtypes(where, config.wi, x=x)
    else:
        check_norm(where, config.norm, x, cast(Array, p.scale), p.norm_bias)
    check_gemm(where, x, p.wi, p.wi_bias, 1, config.wi)
    slices = config.activation.slices
    if p.wi.ndim != 3 or p.wi.shape[1] != slices:
        rule = f"be [in, {slices}, mid] for {config.activation.name!r}"
        remedy = "one slice of the kernel for each activation"
        raise ValueError(message(where, "wi", rule, f"shape {p.wi.shape}", remedy))
    if p.wo.ndim < 2 or p.wo.shape[0] != p.wi.shape[2]:
        rule = f"start with mid = {p.wi.shape[2]} like wi {p.wi.shape}"
        remedy = "check the intermediate size"
        raise ValueError(message(where, "wo", rule, f"shape {p.wo.shape}", remedy))
    if p.wo_bias is not None and p.wo_bias.shape != p.wo.shape[1:]:
        rule, remedy = f"have shape {p.wo.shape[1:]}", "one entry per output feature"
        raise ValueError(
            message(where, "wo_bias", rule, f"shape {p.wo_bias.shape}", remedy)
        )
    if not 0 <= config.dropout_rate < 1:
        rule, remedy = "be in [0, 1)", "use 0.0 for none"
        raise ValueError(
            message(where, "dropout_rate", rule, config.dropout_rate, remedy)
        )
