"""A transformer layer in float64 numpy, written from the formulas."""

import numpy as np


def dense(p, x, axes=1):
    y = np.tensordot(x, p["kernel"], axes)
    if "lora_a" in p:
        y = y + np.tensordot(np.tensordot(x, p["lora_a"], axes), p["lora_b"], 1)
    return y + p.get("bias", 0.0)


def norm(p, x, o):
    if o["layernorm_type"] == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    scale = p["scale"] + (1.0 if o["zero_centered_gamma"] else 0.0)
    return x * scale + p.get("bias", 0.0)


def rotate(x, o):
    """Pairs as complex numbers."""
    half = x.shape[-1] // 2
    low, high = o["rotary_pos_emb_windows"]
    rate = 1 / (low * (high / low) ** (np.arange(half) / half))
    angle = np.arange(x.shape[1])[:, None, None] * rate
    if o["rotary_pos_emb_group_method"] == "alternate":
        z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
        return np.concatenate([z.real, z.imag], -1)
    z = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)
    return np.stack([z.real, z.imag], -1).reshape(x.shape)


def softmax(scores, sink):
    top = scores.max(-1, keepdims=True)
    e = np.exp(scores - top)
    return e / (
        e.sum(-1, keepdims=True) + (0.0 if sink is None else np.exp(sink - top))
    )


def attend(q, k, v, seen, bias, scale, sink):
    groups = q.shape[2] // k.shape[2]
    k, v = (np.repeat(a, groups, 2) for a in (k, v))
    scores = np.einsum("btnh,bsnh->bnts", q, k) * scale + bias
    scores = np.where(seen, scores, -np.inf)
    return np.einsum("bnts,bsnh->btnh", softmax(scores, sink), v)


def attention(p, x, kv, o, causal, bias=0.0):
    first = p["qkv"] if "qkv" in p else p["query"]
    h = norm(first["norm"], x, o) if "norm" in first else x
    kv = h if kv is None else kv
    if "qkv" in p:
        q, k, v = np.moveaxis(dense(p["qkv"], h), -3, 0)
    else:
        q = dense(p["query"], h)
        if "kv" in p:
            k, v = np.moveaxis(dense(p["kv"], kv), -3, 0)
        else:
            k, v = dense(p["key"], kv), dense(p["value"], kv)
    if "query_ln" in p:
        q, k = norm(p["query_ln"], q, o), norm(p["key_ln"], k, o)
    if o["enable_rotary_pos_emb"]:
        q, k = rotate(q, o), rotate(k, o)
    ahead = np.arange(k.shape[1]) - np.arange(q.shape[1])[:, None]
    left, right = o["window_size"] or (-1, -1)
    seen = np.ones_like(ahead, bool) if not causal else ahead <= 0
    seen &= (ahead >= -left) | (left == -1)
    seen &= (ahead <= right) | (right == -1)
    scale = q.shape[-1] ** -0.5 if o["scale_attn_logits"] else 1.0
    sink = p.get("core_attention", {}).get("softmax_offset")
    sink = None if sink is None else sink[:, None, None]
    context = attend(q, k, v, seen, bias, scale, sink)
    return dense(p["out"], context, 2), h


def buckets(q, k, bidirectional, count=32, furthest=128):
    """T5's, one pair of tokens after the other."""
    found = np.empty((q, k), int)
    for i in range(q):
        for j in range(k):
            each, start, far = count, 0, i - j
            if bidirectional:
                each, start = count // 2, (count // 2 if far < 0 else 0)
                far = abs(far)
            far = max(far, 0)
            exact = each // 2
            if far >= exact:
                share = np.log(far / exact) / np.log(furthest / exact)
                far = min(exact + int(share * (each - exact) + 1e-9), each - 1)
            found[i, j] = start + far
    return found


def gelu(x):
    return x / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def mlp(p, x, o):
    h = norm(p["norm"], x, o)
    z = dense(p["wi"], h)
    if o["mlp_activations"] == ("silu", "linear"):
        z = z[..., 0, :] / (1 + np.exp(-z[..., 0, :])) * z[..., 1, :]
    else:
        z = gelu(z)
    return dense(p["wo"], z), h


def layer(p, o, x, encoded=None):
    """The result for batch-first inputs, nothing dropped."""
    post = o["apply_residual_connection_post_layernorm"]
    bias = 0.0
    if "relative_embedding" in p:
        table = p["relative_embedding"]["embedding"]
        bias = table[:, buckets(x.shape[1], x.shape[1], o["layer_type"] == "encoder")]
    causal = o["self_attn_mask_type"] == "causal"
    y, h = attention(p["self_attention"], x, None, o, causal, bias)
    x = y + (h if post else x)
    if encoded is not None:
        y, h = attention(p["cross_attention"], x, encoded, o, False)
        x = y + (h if post else x)
    y, h = mlp(p["mlp"], x, o)
    x = y + (h if post else x)
    return norm(p["output_norm"], x, o) if "output_norm" in p else x
