"""te.autocast: precedence, nesting, and its place in the jit cache key."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import te_flax as te
from te_flax.recipe.context import check_recipe, local_amax_axes, resolve

DELAYED, MXFP8 = te.DelayedScaling(), te.MXFP8BlockScaling()


def test_nesting():
    assert te.current_recipe() is None
    with te.autocast(DELAYED):
        assert te.current_recipe() == DELAYED
        with te.autocast(MXFP8):
            assert te.current_recipe() == MXFP8
        with te.autocast(None):
            assert te.current_recipe() is None
        with te.autocast(te.HIGH_PRECISION):
            assert te.current_recipe() is None
        assert te.current_recipe() == DELAYED
    assert te.current_recipe() is None


def test_disabled_beats_everything_inside():
    with te.autocast(DELAYED, enabled=False):
        assert resolve(None) is None
        assert resolve(MXFP8) is None
        with te.autocast(MXFP8):
            assert resolve(None) is None
            assert resolve(MXFP8) is None
    with te.autocast(DELAYED), te.autocast(MXFP8, False):
        assert te.current_recipe() is None


def test_layer_recipe_beats_the_context():
    assert resolve(MXFP8) == MXFP8
    with te.autocast(DELAYED):
        assert resolve(MXFP8) == MXFP8
        assert resolve(te.HIGH_PRECISION) is None
        assert resolve(None) == DELAYED


def test_the_context_is_restored_after_an_error():
    with pytest.raises(RuntimeError), te.autocast(DELAYED):
        raise RuntimeError
    assert te.current_recipe() is None


def test_decorator():
    @te.autocast(DELAYED)
    def inside():
        return te.current_recipe()

    assert inside() == inside() == DELAYED


@pytest.mark.parametrize("jit", [jax.jit, nnx.jit])
def test_recipe_is_part_of_the_jit_cache_key(jit):
    traced = []

    @jit
    def f(x):
        traced.append(te.current_recipe())
        return x

    for recipe in (DELAYED, MXFP8, DELAYED, te.DelayedScaling(), MXFP8):
        with te.autocast(recipe):
            f(jnp.ones(2))
    f(jnp.ones(2))
    with te.autocast(DELAYED, enabled=False):
        f(jnp.ones(2))
    assert traced == [DELAYED, MXFP8, None, None]


def test_local_amax_axes_add_up():
    assert local_amax_axes() == ()
    with te.autocast(DELAYED, local_amax_axes=("pp",)):
        with te.autocast(MXFP8, local_amax_axes=["ep", "pp"]):
            assert local_amax_axes() == ("pp", "ep")
        with te.autocast(MXFP8):
            assert local_amax_axes() == ("pp",)


def test_without_a_recipe_the_outer_one_goes_on():
    with te.autocast():
        assert te.current_recipe() is None
    with te.autocast(DELAYED):
        with te.autocast(local_amax_axes=("pp",)):
            assert te.current_recipe() == DELAYED
            assert local_amax_axes() == ("pp",)
            with te.autocast(MXFP8), te.autocast():
                assert te.current_recipe() == MXFP8
        with te.autocast(enabled=False), te.autocast():
            assert te.current_recipe() is None
        for off in (None, te.HIGH_PRECISION):
            with te.autocast(off, local_amax_axes=("pp",)), te.autocast():
                assert te.current_recipe() is None
        assert te.current_recipe() == DELAYED


@pytest.mark.parametrize("recipe", ["mxfp8", te.DelayedScaling, 1, False])
def test_recipe_errors(recipe):
    rule = "recipe must be a recipe, None or te.HIGH_PRECISION, got "
    match = f'Layer: {rule}.*; pass .*te.load_recipe."mxfp8".'
    with pytest.raises(TypeError, match=match):
        check_recipe("Layer", recipe)
    for allowed in (None, te.HIGH_PRECISION, DELAYED):
        check_recipe("Layer", allowed)
    match = f"autocast: {rule}"
    with pytest.raises(TypeError, match=match), te.autocast(recipe):
        pass


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"enabled": 1}, "enabled must be True or False, got 1"),
        ({"local_amax_axes": "pp"}, "local_amax_axes must be a sequence of mesh axis"),
        ({"local_amax_axes": (1,)}, "local_amax_axes must be a sequence of mesh axis"),
    ],
)
def test_option_errors(options, match):
    with (
        pytest.raises(ValueError, match=f"autocast: {match}"),
        te.autocast(DELAYED, **options),
    ):
        pass
