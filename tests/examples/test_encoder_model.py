"""The network of the encoder example."""

import doctest

import jax.numpy as jnp
import numpy as np
from flax import nnx

import examples.encoder.model
from examples.encoder.model import Encoder

TOKENS = jnp.array([[2, 7, 3, 0, 0, 0], [4, 4, 5, 6, 2, 9], [1, 0, 0, 0, 0, 0]])
SIZES = {"layers": 1, "hidden": 16, "heads": 2, "length": 6}


def make(**options):
    model = Encoder(10, 4, **SIZES, **options, rngs=nnx.Rngs(0))
    model.eval()
    return model


@nnx.jit
def run(model):
    return model(TOKENS)


def test_the_docstring():
    assert doctest.testmod(examples.encoder.model).failed == 0


def test_padding_is_not_read():
    model = make()
    before = run(model)
    model.places[...] = model.places[...].at[3:, :4].add(1.0)
    after = run(model)
    np.testing.assert_array_equal(before[::2], after[::2])
    assert (before[1] != after[1]).all()


def test_sequence_first_gives_the_same_logits():
    np.testing.assert_array_equal(run(make(sequence_first=True)), run(make()))
