"""The encoder example on two GPUs learns as on one, in one process and in two.

python -m pytest -s tests/cuda/test_two_gpus_encoder.py, without -n: all runs start at
once, as many as there are cores, and take turns on the GPUs. The data are the TREC
questions where they are cached, else Shakespeare's lines.
"""

import concurrent.futures
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from _gpu import PAIR, TWO_GPUS

from examples.encoder import data, launch
from examples.wheel import cache_dir

pytestmark = TWO_GPUS
MODULE = "tests.cuda.encoder_turns"
RECIPES = (
    "none",
    "delayed_scaling",
    "current_scaling",
    "mxfp8",
    "float8_block_scaling",
    "nvfp4",
)
LAYOUTS = {
    "one GPU": (),
    "dp=2": ("--mesh", "dp=2"),
    "tp=2, sp": ("--mesh", "tp=2", "--sp"),
    "two processes": (),
}
FIELDS = ("train_loss", "test_loss")
RUNS = max(2, (os.cpu_count() or 2) - 8)  # at once
# Each process chooses the algorithms of its products, and untimed they are the same.
ENVIRONMENT = {
    "TE_FLAX_AUTOTUNE": "0",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_FLAGS": "--xla_gpu_autotune_level=0",
    "JAX_NUM_CPU_DEVICES": "1",
}


def train(recipe, layout, folder):
    """The losses of all steps, and the metrics of each epoch."""
    name = f"{recipe}, {layout}".replace(" ", "_")
    losses, metrics, plot = (folder / f"{name}.{end}" for end in ("losses", "m", "png"))
    argv = ["--recipe", recipe, "--epochs", "2", *LAYOUTS[layout]]
    argv += ["--metrics", str(metrics), "--plot", str(plot)]
    if not (cache_dir() / data.WHEEL.file).exists():
        argv += ["--data", "examples/encoder/shakespeare.tsv"]
    words = [str(folder / "lock"), str(losses), *argv]
    if layout == "two processes":
        assert launch.run(MODULE, 2, words) == 0, name
    else:
        command = [sys.executable, "-m", MODULE, "-", "1", "0", *words]
        environment = os.environ | {"JAX_NUM_CPU_DEVICES": "2"}
        subprocess.run(command, env=environment, cwd=launch.ROOT, check=True)
    lines = metrics.read_text().splitlines()
    return np.array(json.loads(losses.read_text())), [json.loads(s) for s in lines]


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """The run of each recipe that is asked for, and each layout, under way."""
    folder = tmp_path_factory.mktemp("runs")
    own = [item for item in request.session.items if item.module is request.module]
    recipes = [item.callspec.params["recipe"] for item in own]
    paths = [str(launch.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    # All GPUs for the runs, whose own setting is the platform of the tests.
    environment = ENVIRONMENT | {
        "JAX_PLATFORMS": PAIR[0].platform.replace("gpu", "cuda"),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    with (
        pytest.MonkeyPatch.context() as patch,
        concurrent.futures.ThreadPoolExecutor(RUNS) as pool,
    ):
        for variable, value in environment.items():
            patch.setenv(variable, value)
        yield {
            (recipe, layout): pool.submit(train, recipe, layout, folder)
            for recipe in recipes
            for layout in LAYOUTS
        }


@pytest.fixture(scope="module")
def table():
    """Takes the rows of a table that is printed at the end."""
    rows = ["| recipe | devices | first 20 losses | means of an epoch | accuracy |"]
    yield rows
    print("", *rows, sep="\n")


def difference(a, b):
    """The largest relative one."""
    return float(np.max(np.abs(np.array(a) / np.array(b) - 1)))


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_gpus_have_the_curve_of_one(recipe, runs, table):
    """The first 20 losses within 1 %, the means of an epoch within 3 %."""
    want_losses, want = runs[recipe, "one GPU"].result()
    assert len(want_losses) >= 20
    assert len(want) == 2
    over = []
    for layout in LAYOUTS:
        losses, entries = runs[recipe, layout].result()
        means = [[entry[name] for name in FIELDS] for entry in (*entries, *want)]
        first = difference(losses[:20], want_losses[:20])
        epochs = difference(means[:2], means[2:])
        reached = entries[-1]["test_accuracy"]
        row = f"| {recipe} | {layout} | {first:.1e} | {epochs:.1e} | {reached:.2%} |"
        table.append(row)
        over += [row] if first > 0.01 or epochs > 0.03 else []
    assert not over
