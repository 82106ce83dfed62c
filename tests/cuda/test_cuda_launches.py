"""A step of a delayed-scaling layer launches few kernels, all in command buffers."""

import functools

import jax
import jax.numpy as jnp
import pytest
from _gpu import GPU
from _profile import LIBRARY, kinds, launches_in_hlo, profiled
from flax import nnx

import te_flax as te

pytestmark = GPU
# Some kernels of cuBLASLt start from a counter that the library clears.
LIMITS = {"gemm": 3, "quantize": 3, "small": 4, LIBRARY: 3}
TOKENS, WIDTH = 1024, 1024
WANTED = te.diff_filter(nnx.Param)
each_bias = pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])


def prepared(bias: bool, options=None):
    """The compiled step for a given dy, and what runs it with its state donated."""
    layer = te.DenseGeneral(
        WIDTH, WIDTH, use_bias=bias, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
    )
    graphdef, diff, rest = nnx.split(layer, WANTED, ...)
    diff, diff_tree = jax.tree.flatten(diff)
    rest, rest_tree = jax.tree.flatten(rest)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(rest, diff, x, dy):
        def forward(diff, x):
            parts = diff, jax.tree.unflatten(rest_tree, rest)
            inner = nnx.merge(graphdef, *parts, copy=True)
            with te.autocast(te.DelayedScaling()):
                y = inner(x)
            return y, nnx.state(inner, nnx.Not(WANTED))

        diff = jax.tree.unflatten(diff_tree, diff)
        y, pull, rest = jax.vjp(forward, diff, x, has_aux=True)
        found, dx = pull(dy)
        model = nnx.merge(graphdef, diff, rest, copy=True)
        grads = te.absorb(model, found)
        rest = nnx.state(model, nnx.Not(WANTED))
        return jax.tree.leaves(rest), (y, dx, jax.tree.leaves(grads))

    gpu = jax.devices("cuda")[0]
    keys = jax.random.split(jax.random.key(0))
    x, dy = (jax.random.normal(k, (TOKENS, WIDTH), jnp.bfloat16) for k in keys)
    rest, diff, x, dy = jax.device_put((rest, diff, x, dy), gpu)
    executable = step.lower(rest, diff, x, dy).compile(options)
    state = {"rest": rest}

    def run():
        state["rest"], results = executable(state["rest"], diff, x, dy)
        return results

    return executable, run


def hold_limits(names: list[str], bias: bool) -> None:
    """At most the limits of each kind; a bias adds at most one launch to all."""
    found = kinds(names)
    listed = "\n".join(f"{k}: {len(v)} {sorted(v)}" for k, v in found.items())
    print(listed)
    over = {k: max(0, len(v) - LIMITS[k]) for k, v in found.items()}
    assert sum(over.values()) <= int(bias), listed


@each_bias
def test_the_program_has_few_launches(bias):
    executable, _ = prepared(bias)
    names = launches_in_hlo(executable.as_text())
    assert sum(name.startswith("te_flax.gemm") for name in names) == 3, names
    hold_limits(names, bias)


@each_bias
def test_a_step_has_few_launches(bias, tmp_path):
    """Kernels, memsets and copies on the device, those inside a handler too."""
    names, _ = profiled(prepared(bias)[1], tmp_path)
    hold_limits(names, bias)


@each_bias
def test_a_step_is_one_graph_or_a_few(bias, tmp_path):
    """Nothing is launched on its own: XLA has recorded all of it."""
    steps = 4
    options = {"xla_enable_command_buffers_during_profiling": True}
    _, host = profiled(prepared(bias, options)[1], tmp_path, steps)
    graphs = [name for name in host if "GraphLaunch" in name]
    assert len(graphs) >= steps, f"no graph was launched: {sorted(set(host))}"
    assert graphs == host, sorted(set(host) - set(graphs))
