"""The mailbox turns sums into maxima: exact for one, never below for many."""

import fp8_numpy
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from te_flax.quantize import mailbox

encode, decode = jax.jit(mailbox.encode), jax.jit(mailbox.decode)
MAX = float(np.finfo(np.float32).max)
TINY = float(np.finfo(np.float32).tiny)
amaxes = st.floats(TINY, MAX, width=32)


def mail(*values, flag=0.0):
    return encode(jnp.array([[v, flag] for v in values], jnp.float32))


@jax.jit
def combine(pairs, weight, divisor):
    """The amax that a weighted sum of five or fewer contributions decodes to."""
    return decode((encode(pairs) * weight).sum(0) / divisor)[0]


def combined(values, weight=1.0, divisor=1.0):
    values = [*values, *[0.0] * (5 - len(values))]
    pairs = np.array([[v, 0.0] for v in values], np.float32)
    return float(combine(pairs, np.float32(weight), np.float32(divisor)))


def bound(value):
    return min(fp8_numpy.bound(value), MAX)


def test_one_contribution_is_exact():
    """Random bit patterns of all normal floats, and the ends of every binade."""
    bits = np.random.default_rng(0).integers(1 << 23, 0x7F800000, 20000, np.int32)
    edges = np.arange(1, 255, dtype=np.int32) << 23
    bits = np.concatenate([bits, edges, edges + 1, edges - 1 + (1 << 23)])
    values = bits.view(np.float32)
    pairs = jnp.stack([jnp.asarray(values), jnp.zeros(len(values))], -1)
    np.testing.assert_array_equal(np.asarray(decode(encode(pairs)))[:, 0], values)


def test_layout():
    assert mail(1.0).shape == (1, mailbox.MAILBOX_SIZE) == (1, 279)
    assert encode(jnp.zeros((2, 3, 2))).shape == (2, 3, 279)
    assert encode(jnp.zeros(2)).dtype == decode(jnp.zeros(279)).dtype == jnp.float32
    # 3 = 0.75 * 2^2: slot of k = 2, and the second highest mantissa bit.
    assert np.flatnonzero(mail(3.0)[0]).tolist() == [126 + 2, 255 + 22]


def test_zero_subnormal_and_flag():
    for value in (0.0, -0.0, 1e-40):
        np.testing.assert_array_equal(decode(mail(value, flag=1.0)), [[0, 1]])
    np.testing.assert_array_equal(decode(jnp.zeros((3, 279))), np.zeros((3, 2)))
    both = mail(2.0).sum(0) + mail(3.0, flag=1.0).sum(0)
    np.testing.assert_array_equal(decode(both), [4, 1])


def test_nan_in_a_mailbox_delivers_nothing():
    np.testing.assert_array_equal(decode(jnp.full(279, jnp.nan)), [0, 0])


@settings(max_examples=150, deadline=None)
@given(st.lists(amaxes, min_size=2, max_size=5), st.sampled_from(["sum", "mean"]))
def test_many_contributions_give_the_power_of_two(values, how):
    found = combined(values, divisor=len(values) if how == "mean" else 1)
    largest = max(np.float32(v) for v in values)
    if how == "mean" and len(set(values)) == 1:
        assert found in (largest, bound(largest))
    else:
        assert found == bound(float(largest))


@settings(max_examples=100, deadline=None)
@given(amaxes, st.integers(1, 2**20), st.integers(2, 5))
def test_never_below_for_nearly_equal_contributions(value, ulps, count):
    """The mean of f and f^2 cannot tell these apart; the mantissa bits can."""
    high = np.float32(value).view(np.int32) + np.int32(ulps)
    high = min(high, np.int32(0x7F7FFFFF)).view(np.float32)
    values = [value] * (count - 1) + [float(high)]
    assert combined(values, divisor=count) >= high


@settings(max_examples=100, deadline=None)
@given(st.lists(amaxes, min_size=1, max_size=4), st.floats(2**-90, 2**90, width=32))
def test_never_below_under_any_positive_factor(values, factor):
    """Loss scales and clipping: the power of two, unless the factor is one."""
    found = combined(values, weight=factor)
    largest = max(float(np.float32(v)) for v in values)
    assert largest <= found <= bound(largest)


def test_the_mean_of_1_and_1000():
    np.testing.assert_array_equal(decode(mail(1, 1000).mean(0)), [1024, 0])
    np.testing.assert_array_equal(decode(mail(5, 5, 5).mean(0)), [5, 0])
    np.testing.assert_array_equal(decode(mail(MAX, 1).sum(0)), [np.float32(MAX), 0])
    # Same binade, disjoint mantissas: only the count in the slot tells them apart.
    np.testing.assert_array_equal(decode(mail(5, 6).sum(0)), [8, 0])


def test_stacked_and_vmapped():
    values = jnp.arange(1.0, 13.0).reshape(2, 3, 2) * jnp.array([1.0, 0.0])
    np.testing.assert_array_equal(decode(encode(values)), values)
    mapped = jax.vmap(jax.vmap(lambda a: decode(encode(a))))(values)
    np.testing.assert_array_equal(mapped, values)


def test_push():
    x, kernel = jnp.array([[2.0, 1], [4, 3]]), jnp.array([[7.0], [8]])
    amax = jnp.array([[0.0, 1], [5, 0]])
    x_new, _, count = mailbox.push(x, x, jnp.int32([0, 9]), amax, amax)
    np.testing.assert_array_equal(x_new, [[2, 1], [5, 4]])
    np.testing.assert_array_equal(count, [2, 9])
    one, two, count = mailbox.push(kernel, kernel, jnp.int32([0, 0]), amax, 1 - amax)
    np.testing.assert_array_equal(one, [[7], [5]])
    np.testing.assert_array_equal(two, [[1], [8]])
    np.testing.assert_array_equal(count, [1, 1])


def test_push_letter():
    letters = encode(jnp.array([[0.0, 1], [5, 0]]))
    history, count = mailbox.push_letter(letters, jnp.ones((2, 2)), jnp.int32([3, 3]))
    np.testing.assert_array_equal(history, [[1, 1], [5, 1]])
    np.testing.assert_array_equal(count, [4, 3])


def test_dtypes_with_x64():
    with jax.enable_x64(True):
        assert encode(jnp.ones(2, jnp.float32)).dtype == jnp.float32
        assert decode(jnp.ones(279, jnp.float32)).dtype == jnp.float32
        ones = jnp.ones(2, jnp.float32)
        pushed = mailbox.push(ones, ones, jnp.int32(0), ones, ones)
        assert [a.dtype for a in pushed] == [jnp.float32, jnp.float32, jnp.int32]
