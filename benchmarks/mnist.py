"""Seconds an epoch of the MNIST example, each recipe against float32.

python -m benchmarks.mnist [--epochs 8] [--recipes delayed_scaling,mxfp8]

All runs take turns, one epoch each, so that a busy moment of the machine meets every
recipe. The first epoch compiles and is left out of the medians. CPU is processor time,
which other jobs on the machine disturb less than the wall clock.
"""

import argparse
import platform
import statistics
import time

import jax
from flax import nnx

import te_flax as te
from examples.mnist.data import load
from examples.mnist.model import CNN
from examples.mnist.training import fit

RECIPES = "delayed_scaling,current_scaling,mxfp8"
LIMIT = {"delayed_scaling": 1.5}


def measure(recipes, epochs, batch_size):
    """Wall and processor seconds of the epochs from the second on, by recipe."""
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
            start = time.process_time()
            wall = next(run)["seconds"]
            seconds[name].append((wall, time.process_time() - start))
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
    names = ("recipe", "median", "min", "max", "ratio", "CPU", "ratio")
    print("{:<16}{:>9}{:>9}{:>9}{:>8}{:>9}{:>8}".format(*names))
    reference = [statistics.median(part) for part in zip(*seconds["none"], strict=True)]
    for name, pairs in seconds.items():
        wall, cpu = zip(*pairs, strict=True)
        medians = statistics.median(wall), statistics.median(cpu)
        ratio, cpu_ratio = (m / r for m, r in zip(medians, reference, strict=True))
        row = f"{name:<16}{medians[0]:>7.2f} s{min(wall):>7.2f} s{max(wall):>7.2f} s"
        row += f"{ratio:>7.2f}x{medians[1]:>7.2f} s{cpu_ratio:>7.2f}x"
        print(row + (f"  (target <= {LIMIT[name]}x)" if name in LIMIT else ""))


if __name__ == "__main__":
    main()
