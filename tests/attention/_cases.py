"""Calls of attention with every option, and the same in float64 by plain loops."""

import jax
import jax.numpy as jnp
import numpy as np

import te_flax as te
from te_flax.testing.oracle_attention import Inputs

FAST = {"xla_backend_optimization_level": 0}  # halves the time to compile
B, T, S, N, K, H, V = 2, 7, 9, 4, 2, 8, 6
RNG = np.random.default_rng(0)
SWAP = (0, 2, 1, 3)  # BTNH to BNTH and back


def normal(*shape, dtype=jnp.float32):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def integers(*rows):
    return jnp.asarray(rows, jnp.int32)


Q, KEYS, VALUES = normal(B, T, N, H), normal(B, S, K, H), normal(B, S, K, V)
DO, DLSE = normal(B, T, N, V), normal(B, N, T)
SEGMENTS = (
    integers([1, 1, 1, 2, 2, 0, 0], [1, 2, 2, 2, 3, 3, 3]),
    integers([1, 1, 1, 1, 2, 2, 2, 2, 0], [1, 2, 2, 2, 2, 3, 3, 0, 0]),
)
LENGTHS = {"q_seqlen": jnp.array([3, 7]), "kv_seqlen": jnp.array([9, 0])}
PACKED = {
    "q_seqlen": integers([3, 4], [7, -1]),
    "kv_seqlen": integers([4, 4], [8, -1]),
    "offsets": (
        integers([0, 3, 7], [0, -1, -1]),
        integers([1, 5, 9], [1, -1, -1]),
    ),
}
SOME = jnp.asarray(RNG.random((B, 1, T, S)) < 0.5)
CASES = {
    "plain": {},
    "scale": {"scale": -0.3},
    "causal": {"mask_type": "causal"},
    "bottom_right": {"mask_type": "causal_bottom_right"},
    "window": {"window": (2, 1)},
    "window_left": {"window": (2, -1), "mask_type": "causal"},
    "bias": {"bias": normal(1, N, T, S)},
    "bias_shared": {"bias": normal(S)},
    "mask": {"mask": SOME, "mask_type": "causal"},
    "mask_added": {"mask": jnp.where(SOME[:, :, :1], -jnp.inf, 0.5)},
    "lengths": {"mask_type": "padding", **LENGTHS},
    "lengths_causal": {"mask_type": "padding_causal", **LENGTHS},
    "lengths_bottom_right": {"mask_type": "padding_causal_bottom_right", **LENGTHS},
    "segments": {"segment_ids": SEGMENTS, "mask_type": "padding_causal"},
    "segments_bottom_right": {
        "segment_ids": SEGMENTS,
        "mask_type": "padding_causal_bottom_right",
        "max_segments": 3,
    },
    "positions": {
        "segment_ids": SEGMENTS,
        "positions": (
            jnp.flip(integers(range(T), range(T)), 1),
            integers(range(S), range(S)),
        ),
        "mask_type": "padding_causal",
        "window": (4, 0),
    },
    "packed": {"mask_type": "padding_causal", **PACKED},
    "packed_bottom_right": {"mask_type": "padding_causal_bottom_right", **PACKED},
    "packed_dense": {
        "mask_type": "padding",
        "q_seqlen": PACKED["q_seqlen"],
        "kv_seqlen": PACKED["kv_seqlen"],
    },
    "alibi": {"alibi_slopes": jnp.abs(normal(N)), "mask_type": "causal"},
    "off_by_one": {"softmax_type": "off_by_one", **LENGTHS},
    "sink": {"softmax_type": "learnable", "sink": normal(N), "window": (1, 1)},
}
DIFFERENTIABLE = ("bias", "sink")


def gradients(case, implementation, arrays=(Q, KEYS, VALUES), do=DO, dlse=DLSE):
    """o, log-sum-exp and all gradients, those of bias and sink in a dict."""
    extra = {n: case[n] for n in DIFFERENTIABLE if n in case}
    rest = {n: a for n, a in case.items() if n not in extra}

    def loss(q, k, v, extra):
        o, lse = te.dot_product_attention(
            q,
            k,
            v,
            return_residual=True,
            implementation=implementation,
            **rest,
            **extra,
        )
        known = jnp.where(lse == -jnp.inf, 0, lse)
        total = jnp.sum(o.astype(known.dtype) * do.astype(known.dtype))
        return total + jnp.sum(known * dlse), (o, lse)

    f = jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True), compiler_options=FAST)
    (dq, dk, dv, dextra), (o, lse) = f(*arrays, extra)
    return {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv, **dextra}


def _tokens(case, side, b, count):
    """(segment, position) of every token, and how many each segment has."""
    lengths = case.get(("q_seqlen", "kv_seqlen")[side])
    if "segment_ids" in case:
        segments = np.asarray(case["segment_ids"][side])[b].tolist()
    elif lengths is not None and lengths.ndim == 1:
        segments = [int(i < lengths[b]) for i in range(count)]
    elif lengths is not None:
        segments, start = [0] * count, 0
        for m, n in enumerate(lengths[b].tolist()):
            if "offsets" in case:
                start = int(case["offsets"][side][b, m])
            for i in range(max(n, 0)):
                segments[start + i] = m + 1
            start += max(n, 0)
    else:
        segments = [1] * count
    # A prefix is one array, padding included; a run of one segment id is another.
    runs = "segment_ids" in case or (lengths is not None and lengths.ndim == 2)
    places, before = [], None
    for i, segment in enumerate(segments):
        fresh = i == 0 or (runs and segment != before)
        places.append(0 if fresh else places[-1] + 1)
        before = segment
    if "positions" in case:
        places = np.asarray(case["positions"][side])[b].tolist()
    return segments, places, {m: segments.count(m) for m in set(segments)}


def visible(case):
    """Which keys every query sees ``[B, N, T, S]``, and how far they lie ahead."""
    left, right = case.get("window", (None, None))
    mask_type = case.get("mask_type", "no_mask")
    seen, ahead = np.zeros((B, N, T, S), bool), np.zeros((B, N, T, S))
    for b in range(B):
        q_segments, q_places, q_count = _tokens(case, 0, b, T)
        segments, places, count = _tokens(case, 1, b, S)
        for t in range(T):
            own = q_segments[t]
            shift = 0
            if mask_type.endswith("bottom_right"):
                shift = count.get(own, 0) - q_count[own]
            for s in range(S):
                far = places[s] - q_places[t] - shift
                ahead[b, :, t, s] = far
                ok = own == segments[s] and own > 0
                ok = ok and not ("causal" in mask_type and far > 0)
                ok = ok and not (right not in (None, -1) and far > right)
                seen[b, :, t, s] = ok and not (left not in (None, -1) and far < -left)
    return seen, ahead


def inputs(case, arrays=(Q, KEYS, VALUES), do=DO, dlse=DLSE, kept=None) -> Inputs:
    """The call as the oracle takes it."""
    seen, ahead = visible(case)
    added = np.zeros((B, N, T, S))
    for name in ("bias", "mask"):
        a = np.asarray(case.get(name, 0.0))
        if a.dtype == bool:
            seen = seen & a
            continue
        seen = seen & (a > -1e37)
        added = added + np.where(a > -1e37, a, 0).astype(np.float64)
    if "alibi_slopes" in case:
        slopes = np.asarray(case["alibi_slopes"], np.float64)[:, None, None]
        added = added - slopes * np.abs(ahead)
    sink = np.full(N, -np.inf)
    if "softmax_type" in case:
        sink = np.asarray(case.get("sink", np.zeros(N)), np.float64)
    q, k, v, do = (np.transpose(np.asarray(a, np.float64), SWAP) for a in (*arrays, do))
    scale = case.get("scale", 1 / np.sqrt(H))
    kept = np.ones_like(added) if kept is None else kept
    dlse = np.asarray(dlse, np.float64)
    return Inputs(q, k, v, do, dlse, seen, added, scale, sink, kept)
