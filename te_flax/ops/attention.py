"""cuDNN's fused attention as ops: what runs on one device, and how meshes cut it.

The heads of q are split into K groups of G that share a head of k and v, so that one
named dim says how q, k and v are cut together.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from te_flax.ops._op import KernelOp
from te_flax.ops.cudnn_call import call, config, target
from te_flax.ops.quantize import signature
from te_flax.typing import Array, Shape

QUERIES, KEYS = "B.. T K G H", "B.. S K H"
ATTRS = {"scale": float, "causal": bool, "layout": str}


class Kind(NamedTuple):
    """Which operands a call has.

    Attributes:
        bias: "" for none, else which dims it has beside T and S: "BN", "B", "N" or
            "shared" for none of them.
        dbias: "dbias" where the bias has a gradient, else "".
        lengths: "" for none, "prefix" for a length an example, "packed" for segments.
    """

    bias: str = ""
    dbias: str = ""
    lengths: str = ""

    @property
    def bias_dims(self) -> str:
        """The bias in the words of a signature."""
        has = "" if self.bias == "shared" else self.bias
        return f"{'B.. ' * ('B' in has)}{'K G ' * ('N' in has)}T S"

    def operands(self) -> dict[str, str]:
        """The operands behind q, k and v."""
        found = {"bias": self.bias_dims} if self.bias else {}
        if self.lengths == "prefix":
            found |= {"q_count": "B..", "kv_count": "B.."}
        if self.lengths == "packed":
            names = ("q_count", "kv_count", "q_start", "kv_start")
            found |= dict.fromkeys(names, "B.. M")
        return found

    @property
    def stats(self) -> str:
        """The log-sum-exp; of packed segments the kernel numbers the queries anew."""
        return "B.. M K G T" if self.lengths == "packed" else "B.. K G T"


class Shapes(NamedTuple):
    """The dims of one call, examples in one dim.

    Attributes:
        outer: the dims of ``B..``.
        examples: their product.
        queries: T.
        keys: S.
        groups: K.
        each: G.
    """

    outer: Shape
    examples: int
    queries: int
    keys: int
    groups: int
    each: int

    @classmethod
    def of(cls, q: Any, k: Any) -> "Shapes":
        """Reads the dims of q and k."""
        outer = q.shape[:-4]
        return cls(outer, math.prod(outer), q.shape[-4], k.shape[-3], *q.shape[-3:-1])

    @property
    def heads(self) -> int:
        """N, the heads of q."""
        return self.groups * self.each

    def whole(self, a: Array) -> Array:
        """``[B.., T, K, G, H]`` or ``[B.., S, K, H]`` to ``[B, T, N, H]``."""
        tokens = a.shape[len(self.outer)]
        return a.reshape(self.examples, tokens, -1, a.shape[-1])

    def scores(self) -> Shape:
        """B, N, T, S."""
        return self.examples, self.heads, self.queries, self.keys

    def text(self, dtype: Any, lengths: str, segments: int, **options: Any) -> str:
        """The configuration of the call."""
        causal, window = options["causal"], options.get("window", 0)
        words = ["PADDING"] * bool(lengths) + ["CAUSAL"] * causal
        return config(
            self.scores(),
            jnp.dtype(dtype).name,
            backward=options["backward"],
            scale=options["scale"],
            mask_type="_".join(words) or "NO_MASK",
            window=window,
            segments=segments,
        )


def _tokens(kind: Kind, given: dict[str, Array], at: Shapes) -> list[Array]:
    """The lengths and offsets as cuDNN reads them; a missing segment is empty."""
    if not kind.lengths:
        return []
    counts = [jnp.maximum(given[n], 0) for n in ("q_count", "kv_count")]
    if kind.lengths == "prefix":
        return [a.reshape(at.examples) for a in counts]
    segments = counts[0].shape[-1]
    counts = [a.reshape(at.examples, segments) for a in counts]
    example = jnp.arange(at.examples, dtype=jnp.int32)[:, None]
    sides = (
        ("q_start", at.queries, given["q"]),
        ("kv_start", at.keys, given["k"]),
    )
    offsets = []
    for name, tokens, a in sides:
        stride = math.prod(a.shape) // max(1, at.examples * tokens)  # of one token
        start = jnp.clip(given[name].reshape(at.examples, segments), 0, tokens)
        start = (start + example * tokens).reshape(-1)
        end = jnp.full(at.examples, at.examples * tokens, jnp.int32)
        start = jnp.concatenate([start, end]) * jnp.int32(stride)
        offsets.append(start.reshape(at.examples, segments + 1))
    return [*counts, *offsets]


def _segments(kind: Kind, given: dict[str, Array]) -> int:
    return given["q_count"].shape[-1] if kind.lengths == "packed" else 1


def _bias(kind: Kind, given: dict[str, Array], at: Shapes) -> list[Array]:
    """``[B|1, N|1, T, S]``."""
    if not kind.bias:
        return []
    b = at.examples if "B" in kind.bias else 1
    n = at.heads if "N" in kind.bias else 1
    return [given["bias"].reshape(b, n, at.queries, at.keys)]


def _forward(kind: Kind, names: tuple[str, ...], *arrays: Array, **attrs: Any) -> tuple:
    given = dict(zip(names, arrays, strict=True))
    q, k, v = arrays[:3]
    at, layout = Shapes.of(q, k), attrs["layout"]
    segments = _segments(kind, given)
    bias, tokens = _bias(kind, given, at), _tokens(kind, given, at)
    o = (at.examples, at.queries, at.heads, v.shape[-1])
    stats = (at.examples * segments, at.heads, at.queries)
    made = call(
        target(backward=False, bias=bool(kind.bias)),
        [
            *((at.whole(a), layout) for a in (q, k, v)),
            *((a, None) for a in (*bias, *tokens)),
        ],
        [
            (jax.ShapeDtypeStruct(o, q.dtype), layout),
            (jax.ShapeDtypeStruct(stats, jnp.float32), None),
        ],
        at.text(q.dtype, kind.lengths, segments, backward=False, **attrs),
    )
    inner = (segments,) if kind.lengths == "packed" else ()
    split = (at.groups, at.each)
    return (
        made[0].reshape(*at.outer, at.queries, *split, v.shape[-1]),
        made[1].reshape(*at.outer, *inner, *split, at.queries),
    )


def _backward(
    kind: Kind, names: tuple[str, ...], *arrays: Array, **attrs: Any
) -> tuple:
    given = dict(zip(names, arrays, strict=True))
    q, k, v = arrays[:3]
    at, layout = Shapes.of(q, k), attrs["layout"]
    segments = _segments(kind, given)
    stats = given["stats"].reshape(at.examples * segments, at.heads, at.queries)
    bias, tokens = _bias(kind, given, at), _tokens(kind, given, at)
    dbias = bias if kind.dbias else []
    like = [q, k, v, *((given["bias"],) if kind.dbias else ())]
    made = call(
        target(backward=True, bias=bool(kind.bias)),
        [
            *((at.whole(a), layout) for a in (q, k, v)),
            (stats, None),
            (at.whole(given["do"]), layout),
            *((a, None) for a in bias),
            (at.whole(given["o"]), layout),
            *((a, None) for a in tokens),
        ],
        [
            *((_type(at.whole, a), layout) for a in (q, k, v)),
            *((jax.ShapeDtypeStruct(a.shape, a.dtype), None) for a in dbias),
        ],
        at.text(q.dtype, kind.lengths, segments, backward=True, **attrs),
    )
    return tuple(a.reshape(b.shape) for a, b in zip(made, like, strict=True))


def _type(change: Callable, a: Any) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(change, jax.ShapeDtypeStruct(a.shape, a.dtype))


@functools.cache
def forward(kind: Kind) -> KernelOp:
    """The op ``(q, k, v, ...) -> (o, stats)`` with the operands of ``kind``.

    Attributes of the op: ``scale``, ``causal`` (top left), ``window`` (keys that a
    query sees, its own included; 0 is all) and ``layout``, the order in memory.
    """
    operands = {"q": QUERIES, "k": KEYS, "v": "B.. S K D", **kind.operands()}
    results = {"o": "B.. T K G D", "stats": kind.stats}
    return _declare("fwd", kind, _forward, operands, results)


@functools.cache
def backward(kind: Kind) -> KernelOp:
    """The op ``(q, k, v, o, do, stats, ...) -> (dq, dk, dv[, dbias])``."""
    operands = {"q": QUERIES, "k": KEYS, "v": "B.. S K D"}
    operands |= {"o": "B.. T K G D", "do": "B.. T K G D", "stats": kind.stats}
    operands |= kind.operands()
    results = {"dq": QUERIES, "dk": KEYS, "dv": "B.. S K D"}
    if kind.dbias:
        results["dbias"] = kind.bias_dims
    return _declare("bwd", kind, _backward, operands, results)


def _declare(
    direction: str,
    kind: Kind,
    compute: Callable,
    operands: dict[str, str],
    results: dict[str, str],
) -> KernelOp:
    name = "_".join(["cudnn_attention", direction, *filter(None, kind)])
    # A result that lacks a dim along which q is cut: dk and dv of shared heads, and
    # dbias of a bias that examples or heads share.
    summed = tuple("sum" if n in ("dk", "dv", "dbias") else None for n in results)
    packed = ("M",) if kind.lengths == "packed" else ()
    return KernelOp(
        name=name,
        signature=signature(operands, results),
        reference=functools.partial(compute, kind, tuple(operands)),
        attrs={**ATTRS, "window": int},
        reduce=summed,
        replicated=("T", "S", "H", "D", *packed),
        batch_group="B",
        listed=False,
    )
