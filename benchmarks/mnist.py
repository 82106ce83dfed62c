"""Seconds an epoch of the MNIST example, each recipe against float32.

python -m benchmarks.mnist [--epochs 8] [--recipes delayed_scaling,mxfp8]

All runs take turns, one epoch each, so that a busy moment of the machine meets every
recipe. The first epoch compiles and is left out of the medians.
"""

import argparse
import platform
import statistics

import jax
from flax import nnx

import te_flax as te
from examples.mnist.data import load
from examples.mnist.model import CNN
from examples.mnist.training import fit

RECIPES = "delayed_scaling,current_scaling,mxfp8"
LIMIT = {"delayed_scaling": 1.5}


def measure(recipes, epochs, batch_size):
    """Seconds of the epochs from the second on, by recipe."""
    data = load()
    runs = {}
    for name in recipes:
        model, recipe = CNN(rngs=nnx.Rngs(0)), te.load_recipe(name)
        runs[name] = fit(
            model, data, recipe, epochs=epochs, batch_size=batch_size, seed=0
        )
    seconds = {name: [] for name in recipes}
    for _ in range(epochs):
        for name, run in runs.items():
            seconds[name].append(next(run)["seconds"])
    return {name: values[1:] for name, values in seconds.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--recipes", default=RECIPES)
    options = parser.parse_args()
    recipes = ["none", *options.recipes.split(",")]
    seconds = measure(recipes, max(options.epochs, 2), options.batch_size)
    print(f"{platform.machine()}, jax {jax.__version__} on {jax.default_backend()}")
    print(f"{'recipe':<18}{'median':>9}{'min':>9}{'max':>9}{'ratio':>8}")
    reference = statistics.median(seconds["none"])
    for name, values in seconds.items():
        median = statistics.median(values)
        row = f"{name:<18}{median:>7.2f} s{min(values):>7.2f} s{max(values):>7.2f} s"
        limit = f"  (target <= {LIMIT[name]})" if name in LIMIT else ""
        print(f"{row}{median / reference:>7.2f}x{limit}")


if __name__ == "__main__":
    main()
