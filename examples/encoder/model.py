"""A transformer encoder whose layers run in FP8."""

import jax
import jax.numpy as jnp
from flax import nnx

import te_flax as te
from examples.encoder.tokenizer import PADDING

# What the dims of a layer's arrays stand for; te.logical_axis_rules places them.
AXES = {
    "input_axes": ("batch", "seqlen", None),
    "dot_input_axes": ("batch", None, None),
    "qkv_kernel_axes": ("embed", "heads", None),
    "qkv_bias_axes": ("heads", None),
    "attention_axes": ("batch", None, "heads", None),
    "out_kernel_axes": ("heads", None, "embed"),
    "mlp_kernel_axes_1": ("embed", "mlp"),
    "mlp_bias_axes_1": ("mlp",),
    "mlp_axes": ("batch", None, "mlp"),
    "mlp_kernel_axes_2": ("mlp", "embed"),
}


class Encoder(nnx.Module):
    """Embeds words and places, applies the layers, and classifies their mean.

    The recipe of the surrounding ``te.autocast`` decides the precision of the layers;
    embedding and classifier stay in float32.

    Args:
        vocabulary: number of different tokens.
        classes: number of labels.
        layers: number of transformer layers.
        hidden: size of what goes from layer to layer; a multiple of ``heads``.
        heads: attention heads of a layer.
        length: tokens of a sentence.
        dropout: rate of all dropout.
        sequence_first: whether the layers see ``[sequence, batch, hidden]``.
        rngs: source of the initial parameters and of dropout.

    Example:
        >>> sizes = {"layers": 1, "hidden": 16, "heads": 2, "length": 4}
        >>> model = Encoder(10, 6, **sizes, rngs=nnx.Rngs(0))
        >>> tokens = jnp.array([[2, 5, 3, 0], [4, 4, 0, 0]])
        >>> nnx.jit(Encoder.__call__)(model, tokens).shape
        (2, 6)
    """

    def __init__(
        self,
        vocabulary: int,
        classes: int,
        *,
        layers: int,
        hidden: int,
        heads: int,
        length: int,
        dropout: float = 0.1,
        sequence_first: bool = False,
        rngs: nnx.Rngs,
    ):
        self.sequence_first = sequence_first
        small = nnx.initializers.normal(0.02)
        self.words = nnx.Embed(vocabulary, hidden, embedding_init=small, rngs=rngs)
        self.places = nnx.Param(small(rngs.params(), (length, hidden)))
        self.layers = nnx.List(
            te.TransformerLayer(
                hidden,
                4 * hidden,
                heads,
                hidden_dropout=dropout,
                attention_dropout=dropout,
                self_attn_mask_type="padding",
                enable_relative_embedding=False,
                transpose_batch_sequence=sequence_first,
                **AXES,
                rngs=rngs,
            )
            for _ in range(layers)
        )
        self.norm = te.LayerNorm(hidden, rngs=rngs)
        self.classifier = nnx.Linear(hidden, classes, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps tokens int32 [batch, length] to logits float32 [batch, classes]."""
        is_word = tokens != PADDING
        lengths = is_word.sum(axis=1)
        x = self.dropout(self.words(tokens) + self.places[...])
        if self.sequence_first:
            x = x.swapaxes(0, 1)
        for layer in self.layers:
            x = layer(x, seqlen=lengths)
        x = self.norm(x)
        if self.sequence_first:
            x = x.swapaxes(0, 1)
        mean = jnp.einsum("blh,bl->bh", x, is_word / lengths[:, None])
        return self.classifier(self.dropout(mean))
