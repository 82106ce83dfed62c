"""A small convolutional network whose wide dense layers run in FP8."""

import jax
from flax import nnx

import te_flax as te


class CNN(nnx.Module):
    """Two convolutions, two te_flax dense layers, and a classifier in float32.

    The recipe of the surrounding ``te.autocast`` decides the precision of ``hidden``
    and ``features``. Convolutions and the classifier, ten numbers wide, stay as they
    are: te_flax layers and flax.nnx layers compose freely.

    Args:
        rngs: source of the initial parameters and of dropout.

    Example:
        >>> import jax.numpy as jnp
        >>> CNN(rngs=nnx.Rngs(0))(jnp.zeros((8, 28, 28, 1))).shape
        (8, 10)
    """

    def __init__(self, *, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 16, (5, 5), strides=2, rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), strides=2, rngs=rngs)
        self.hidden = te.DenseGeneral(7 * 7 * 32, 256, rngs=rngs)
        self.features = te.DenseGeneral(256, 128, rngs=rngs)
        self.classifier = nnx.Linear(128, 10, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Maps images float32 [batch, 28, 28, 1] to logits float32 [batch, 10]."""
        x = nnx.relu(self.conv1(images))
        x = nnx.relu(self.conv2(x))
        x = self.dropout(x.reshape(x.shape[0], -1))
        x = self.dropout(nnx.relu(self.hidden(x)))
        x = nnx.relu(self.features(x))
        return self.classifier(x)
