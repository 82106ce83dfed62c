"""The chunked implementation's memory is linear in the sequence, in both passes."""

import jax
import jax.numpy as jnp
import pytest

import te_flax as te

HEADS, DIM, LENGTH = 2, 16, 2048


def temporary(implementation, length, backward, **options):
    """Bytes beside arguments and results."""

    def attend(q, k, v):
        return te.dot_product_attention(
            q, k, v, implementation=implementation, **options
        )

    run = jax.grad(lambda *a: jnp.sum(attend(*a)), (0, 1, 2)) if backward else attend
    shape = jax.ShapeDtypeStruct((1, length, HEADS, DIM), jnp.float32)
    compiled = jax.jit(run).lower(shape, shape, shape).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("options", [{}, {"mask_type": "causal", "window": (700, 0)}])
@pytest.mark.parametrize("backward", [False, True])
def test_memory_is_linear(backward, options):
    one, two, four = (
        temporary("chunked", n * LENGTH, backward, **options) for n in (1, 2, 4)
    )
    # Blocks of a fixed size, and a part that grows with the sequence alone.
    assert two < 2 * one
    assert four - two <= 2.1 * (two - one)
    matrix = 4 * HEADS * (4 * LENGTH) ** 2
    assert four < matrix / 8


@pytest.mark.parametrize("backward", [False, True])
def test_a_third_of_the_whole_matrix(backward):
    ours = temporary("chunked", 4096, backward)
    whole = temporary("reference", 4096, backward)
    assert ours < whole / 3
