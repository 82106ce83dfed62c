"""A step of a delayed-scaling layer launches few kernels, all in command buffers."""

import jax
import pytest
from _delayed_step import delayed_step
from _gpu import GPU
from _profile import LIBRARY, kinds, launches_in_hlo, profiled

pytestmark = GPU
# Some kernels of cuBLASLt start from a counter that the library clears.
LIMITS = {"gemm": 3, "quantize": 3, "small": 4, LIBRARY: 3}
each_bias = pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])


def prepared(bias: bool, options=None):
    """The compiled step, and what runs it with its state donated."""
    step, arrays = delayed_step(bias)
    rest, *others = jax.device_put(arrays, jax.devices("cuda")[0])
    executable = step.lower(rest, *others).compile(options)
    state = {"rest": rest}

    def run():
        state["rest"], results = executable(state["rest"], *others)
        return results

    return executable, run


def hold_limits(names: list[str], bias: bool) -> None:
    """At most the limits of each kind; a bias adds its cast to the layer's dtype."""
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
