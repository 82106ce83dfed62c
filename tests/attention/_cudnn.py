"""cuDNN's attention as XLA's custom calls define it, in plain JAX, and cases for it.

The emulation reads the configuration and the operands as cuDNN would. What cuDNN does
not promise to write it fills with NaN.
"""

import dataclasses
import json
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _cases import FAST
from _compare import compare

import te_flax as te
from te_flax.functional.attention import capabilities
from te_flax.ops import attention, attention_fp8
from te_flax.testing.oracle_attention import Inputs


class _Spec(NamedTuple):
    """What both passes read."""

    scale: float
    mask_type: str
    window: int
    segments: int
    backward: bool
    bias: bool


@jax.numpy_dtype_promotion("standard")
def call(name, operands, results, text):
    """As te_flax.ops.cudnn_call.call, on any platform."""
    given = json.loads(text)["cudnn_fmha_backend_config"]
    if name.endswith("F8"):
        return _fp8(given, [a for a, _ in operands], results)
    spec = _Spec(
        given["fmha_scale"],
        given["mask_type"],
        given["sliding_window_length"],
        given["max_seg_per_batch"],
        name.endswith("Backward"),
        "Bias" in name,
    )
    arrays = [a for a, _ in operands]
    q, k, v, *rest = arrays
    b, t, n, _ = q.shape
    dims = [str(d) for d in (b, n, t, k.shape[1])]
    assert given["intermediate_tensor_shape"]["dimensions"] == dims
    do = o = None
    if spec.backward:
        _, do, *rest = rest
    bias = rest.pop(0) if spec.bias else None
    if spec.backward:
        o = rest.pop(0)
        assert o.shape == do.shape
    assert len(rest) == 2 * ("PADDING" in spec.mask_type) + 2 * (spec.segments > 1)
    sides = _sides(spec, rest, q, k)

    def forward(q, k, v, bias):
        return _forward(spec, sides, q, k, v, bias)

    if not spec.backward:
        o, stats = forward(q, k, v, bias)
        made = _written(spec, sides[0], o), _stats(spec, sides[0], stats, n)
    else:
        _, pull = jax.vjp(lambda *a: forward(*a)[0], q, k, v, bias)
        dq, dk, dv, dbias = pull(do)
        made = [_written(spec, sides[0], dq)]
        made += [_written(spec, sides[1], a) for a in (dk, dv)]
        made += [dbias] * (len(results) == 4)
    for a, (kind, _) in zip(made, results, strict=True):
        assert (a.shape, a.dtype) == (kind.shape, kind.dtype)
    return list(made)


def _sides(spec, tokens, q, k):
    """Per side: segment ``[B, tokens]``, -1 where there is none, and position."""
    found = []
    for i, a in enumerate((q, k)):
        b, count, n, h = a.shape
        index = jnp.arange(count)
        if not tokens:
            found.append((jnp.zeros((b, count), int), jnp.tile(index, (b, 1))))
        elif spec.segments == 1:
            inside = index < tokens[i][:, None]
            found.append((jnp.where(inside, 0, -1), jnp.tile(index, (b, 1))))
        else:
            lengths = tokens[i].reshape(-1)
            offsets = tokens[2 + i].reshape(-1)[: lengths.size + 1]
            start = offsets[:-1] // (n * h)
            local = jnp.arange(b * count)[:, None] - start
            inside = (local >= 0) & (local < lengths)
            segment = jnp.where(inside.any(1), inside.argmax(1), -1)
            local = jnp.take_along_axis(local, jnp.maximum(segment, 0)[:, None], 1)
            found.append((segment.reshape(b, count), local.reshape(b, count)))
    return found


def _seen(spec, rows, cols):
    own, other = rows[0][:, :, None], cols[0][:, None, :]
    seen = (own == other) & (own >= 0)
    ahead = cols[1][:, None, :] - rows[1][:, :, None]
    if "CAUSAL" in spec.mask_type:
        seen &= ahead <= 0
    if spec.window:
        seen &= ahead > -spec.window
    return seen[:, None]


def _forward(spec, sides, q, k, v, bias):
    group = q.shape[2] // k.shape[2]
    wide = [a.astype(jnp.float32) for a in (q, k, v)]
    k, v = (jnp.repeat(a, group, axis=2) for a in wide[1:])
    scores = spec.scale * jnp.einsum("btnh,bsnh->bnts", wide[0], k)
    if bias is not None:
        scores += bias
    seen = _seen(spec, *sides)
    scores = jnp.where(seen, scores, -1e30)
    stats = jax.nn.logsumexp(scores, axis=-1)
    p = jnp.where(seen, jnp.exp(scores - stats[..., None]), 0)
    # 0 / 0, but not in padding.
    lost = (sides[0][0] >= 0)[:, None] & ~seen.any(-1)
    p = jnp.where(lost[..., None], jnp.nan, p)
    return jnp.einsum("bnts,bsnh->btnh", p, v).astype(q.dtype), stats


def _written(spec, side, a):
    if spec.segments > 1 or ("PADDING" in spec.mask_type and spec.window):
        return jnp.where((side[0] >= 0)[:, :, None, None], a, jnp.nan)
    return a


def _stats(spec, side, stats, n):
    """Each segment's queries from 0 on."""
    inside = (side[0] >= 0)[:, None]
    if spec.segments == 1:
        return jnp.where(inside, stats, jnp.nan)
    b, t = side[0].shape
    place = jnp.where(side[0] >= 0, side[0] * t + side[1], b * spec.segments * t)
    made = jnp.full((n, b * spec.segments * t), jnp.nan)
    flat = jnp.moveaxis(stats, 1, 0).reshape(n, -1)
    made = made.at[:, place.reshape(-1)].set(flat, mode="drop")
    return jnp.moveaxis(made.reshape(n, b * spec.segments, t), 0, 1)


def _round(x, scale, dtype):
    """Codes and the amax of what they stand for."""
    limit = float(jnp.finfo(dtype).max)
    return jnp.clip(x * scale, -limit, limit).astype(dtype), jnp.max(jnp.abs(x))


def _fp8(given, arrays, results):
    """Both passes; the backward one has do behind o."""
    forward = "bmm1_dot_dimension_numbers" in given
    (q, k, v), rest = arrays[:3], arrays[3:]
    o, do, stats = (None,) * 3 if forward else rest[:3]
    q_inv, k_inv, v_inv, *rest = (a.reshape(()) for a in rest[0 if forward else 3 :])
    group = q.shape[2] // k.shape[2]
    dtype = q.dtype
    q = q.astype(jnp.float32) * q_inv
    k, v = (a.astype(jnp.float32) * f for a, f in ((k, k_inv), (v, v_inv)))
    k, v = (jnp.repeat(a, group, axis=2) for a in (k, v))
    scores = given["fmha_scale"] * jnp.einsum("btnh,bsnh->bnts", q, k)
    if given["mask_type"] == "CAUSAL":
        t, s = scores.shape[2:]
        scores = jnp.where(jnp.arange(s) <= jnp.arange(t)[:, None], scores, -jnp.inf)
    if forward:
        s_inv, s_scale, o_scale = rest
        stats = jax.nn.logsumexp(scores, axis=-1)
        p = jnp.exp(scores - stats[..., None])
        amax_s = jnp.max(p)
        # The kernel rounds exponentials, of which the largest of a row is 1.
        top = jnp.exp(scores.max(-1) - stats) * float(jnp.finfo(dtype).max) * s_inv
        s = (jnp.minimum(p, top[..., None]) * s_scale).astype(dtype)
        o = jnp.einsum("bnts,bsnh->btnh", s.astype(jnp.float32) * s_inv, v)
        o, amax_o = _round(o, o_scale, dtype)
        made = [o, amax_s, amax_o, stats]
    else:
        s_inv, o_inv, do_inv, dp_inv, s_scale, dp_scale, *scales = rest
        assert do.dtype == dtype
        out, (o, do) = dtype, (a.astype(jnp.float32) for a in (o, do))
        o, do = o * o_inv, do * do_inv
        p = jnp.exp(scores - stats[..., None])
        s = _round(p, s_scale, dtype)[0].astype(jnp.float32) * s_inv
        delta = jnp.einsum("btnh,btnh->bnt", do, o)[..., None]
        dp = p * (jnp.einsum("btnh,bsnh->bnts", do, v) - delta) * given["fmha_scale"]
        dp, amax_dp = _round(dp, dp_scale, out)
        dp = dp.astype(jnp.float32) * dp_inv
        grads = [
            jnp.einsum("bnts,bsnh->btnh", dp, k),
            jnp.einsum("bnts,btnh->bsnh", dp, q),
            jnp.einsum("bnts,btnh->bsnh", s, do),
        ]
        for i in (1, 2):
            b, n, _, h = grads[i].shape
            grads[i] = grads[i].reshape(b, n, -1, group, h).sum(3)
        pairs = [_round(g, f, out) for g, f in zip(grads, scales, strict=True)]
        made = [*(c for c, _ in pairs), *(a for _, a in pairs), amax_dp]
    return [a.reshape(kind.shape) for a, (kind, _) in zip(made, results, strict=True)]


@pytest.fixture
def on_gpu(monkeypatch):
    """Takes this machine for one with a GPU."""
    choose = capabilities.choose

    def chosen(given, implementation):
        return choose(dataclasses.replace(given, platform="gpu"), implementation)

    monkeypatch.setattr(capabilities, "choose", chosen)


@pytest.fixture
def emulated(on_gpu, monkeypatch):
    """And for one with cuDNN."""
    for module in (attention, attention_fp8):
        monkeypatch.setattr(module, "call", call)


class Sizes(NamedTuple):
    """Of one set of cases."""

    b: int = 3
    t: int = 16
    s: int = 16
    n: int = 4
    k: int = 2
    h: int = 16
    v: int = 16


def arrays(at, dtype, seed=0):
    """q, k, v, do, dlse."""
    rng = np.random.default_rng(seed)
    shapes = (
        (at.b, at.t, at.n, at.h),
        (at.b, at.s, at.k, at.h),
        (at.b, at.s, at.k, at.v),
        (at.b, at.t, at.n, at.v),
    )
    made = [jnp.asarray(rng.standard_normal(s, np.float32), dtype) for s in shapes]
    return *made, jnp.asarray(rng.standard_normal((at.b, at.n, at.t), np.float32))


def cases(at, dtype):
    """Name -> (options, which keys each query sees ``[B, 1|N, T, S]``)."""
    rng = np.random.default_rng(1)
    t, s = np.arange(at.t)[:, None], np.arange(at.s)
    whole = np.ones((at.b, 1, at.t, at.s), bool)
    causal, near = whole & (s <= t), whole & (s <= t) & (s > t - 5)
    q_seqlen = np.array([at.t, 1 + at.t // 3, at.t // 2])
    kv_seqlen = np.array([at.s // 3, at.s - 1, 0])
    inside = (t < q_seqlen[:, None, None]) & (s < kv_seqlen[:, None, None])
    inside = inside[:, None]
    lengths = {"q_seqlen": jnp.asarray(q_seqlen), "kv_seqlen": jnp.asarray(kv_seqlen)}
    mask = np.asarray(rng.random((at.b, 1, at.t, at.s)) < 0.5)
    mask[:, :, 1] = False

    def bias(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)

    found = {
        "plain": ({}, whole),
        "scale": ({"scale": 0.3}, whole),
        "causal": ({"mask_type": "causal"}, causal),
        "window": ({"mask_type": "causal", "window": (4, -1)}, near),
        "window_alone": ({"window": (4, 0)}, near),
        "lengths": ({"mask_type": "padding", **lengths}, inside),
        "lengths_of_keys": (
            {"kv_seqlen": lengths["kv_seqlen"]},
            whole & (s < kv_seqlen[:, None, None, None]),
        ),
        "lengths_window": (
            {"mask_type": "padding_causal", "window": (4, 0), **lengths},
            inside & near,
        ),
        "bias": ({"bias": bias(1, at.n, at.t, at.s)}, whole),
        "bias_whole": ({"bias": bias(at.b, at.n, at.t, at.s)}, whole),
        "bias_example": (
            {"bias": bias(at.b, 1, at.t, at.s), "mask_type": "causal"},
            causal,
        ),
        "bias_shared": ({"bias": bias(at.s)}, whole),
        "bias_lengths": ({"bias": bias(at.n, at.t, at.s), **lengths}, inside),
        "mask": ({"mask": jnp.asarray(mask), "mask_type": "causal"}, mask & causal),
        "mask_and_bias": (
            {"mask": jnp.asarray(mask), "bias": bias(at.n, at.t, at.s)},
            mask & whole,
        ),
    }
    if at.t == at.s:
        found["bottom_right"] = ({"mask_type": "causal_bottom_right"}, causal)
    return found | (_packed(at) if at.h == at.v else {})


def _packed(at):
    """Segments with gaps, without, and one segment an example."""
    t, s = at.t // 4, at.s // 4
    counts = (
        np.array([[t, 2 * t], [3 * t, -1], [t, t]]),
        np.array([[s, 2 * s], [4 * s, -1], [2 * s, s]]),
    )
    starts = (
        np.array([[1, t + 2, 3 * t + 2], [2, -1, -1], [0, t, 2 * t]]),
        np.array([[0, s + 1, 3 * s + 1], [0, -1, -1], [1, 2 * s + 2, 3 * s + 2]]),
    )
    given = {
        "q_seqlen": jnp.asarray(counts[0], jnp.int32),
        "kv_seqlen": jnp.asarray(counts[1], jnp.int32),
        "mask_type": "padding_causal",
    }
    gaps = {"offsets": tuple(jnp.asarray(a, jnp.int32) for a in starts)}
    dense = [np.cumsum(np.maximum(a, 0), 1) - np.maximum(a, 0) for a in counts]
    one = {n: a[:, :1] if n != "mask_type" else a for n, a in given.items()}
    return {
        "packed": (given | gaps, _segments(at, counts, starts)),
        "packed_dense": (
            given | {"window": (t // 2, 0)},
            _segments(at, counts, dense, t // 2),
        ),
        "packed_one": (
            one | {"offsets": tuple(a[:, :2] for a in gaps["offsets"])},
            _segments(at, [a[:, :1] for a in counts], starts),
        ),
    }


def _segments(at, counts, starts, left=None):
    """Causal within each segment."""
    seen = np.zeros((at.b, 1, at.t, at.s), bool)
    for b in range(at.b):
        for m in range(counts[0].shape[1]):
            n, keys = counts[0][b, m], counts[1][b, m]
            row, col = starts[0][b, m], starts[1][b, m]
            if n > 0:
                ahead = np.arange(keys) - np.arange(n)[:, None]
                found = ahead <= 0 if left is None else (ahead <= 0) & (ahead >= -left)
                seen[b, 0, row : row + n, col : col + keys] = found
    return seen


RESIDUAL = ("plain", "lengths_window", "mask", "packed")  # return it, with a gradient


def run(at, name, dtype, implementation=None, fast=True):
    """o, log-sum-exp where the case returns it, and all gradients."""
    options = dict(cases(at, dtype)[name][0])
    q, k, v, do, dlse = arrays(at, dtype)
    bias = {n: options.pop(n) for n in ("bias",) if n in options}
    residual = name in RESIDUAL

    def loss(q, k, v, bias):
        made = te.dot_product_attention(
            q,
            k,
            v,
            return_residual=residual,
            implementation=implementation,
            **options,
            **bias,
        )
        o, lse = cast(Any, made if residual else (made, jnp.zeros(())))
        known = jnp.where(lse == -jnp.inf, 0, lse)
        total = jnp.sum(o.astype(jnp.float32) * do.astype(jnp.float32))
        return total + jnp.sum(known * dlse), {"o": o, "lse": lse}

    how = FAST if fast else None
    f = jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True), compiler_options=how)
    (dq, dk, dv, dbias), made = f(q, k, v, bias)
    if not residual:
        del made["lse"]
    return {**made, "dq": dq, "dk": dk, "dv": dv, **dbias}


def check(at, name, dtype, implementation=None, fast=True):
    """Results and all gradients against float64."""
    options, seen = cases(at, dtype)[name]
    q, k, v, do, dlse = arrays(at, dtype)
    got = run(at, name, dtype, implementation, fast)
    heads_first = [np.swapaxes(np.asarray(a, np.float64), 1, 2) for a in (q, k, v, do)]
    shape = (at.b, at.n, at.t, at.s)
    added = np.broadcast_to(np.asarray(options.get("bias", 0), np.float64), shape)
    x = Inputs(
        *heads_first,
        dlse=np.asarray(dlse, np.float64) * (name in RESIDUAL),
        seen=np.broadcast_to(seen, shape),
        added=added,
        scale=options.get("scale", at.h**-0.5),
        sink=np.full(at.n, -np.inf),
        kept=np.ones(shape),
    )
    dtype = np.dtype(dtype)
    compare(got, x, dtype, operands=dtype, fused=True)
