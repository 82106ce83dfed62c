"""The options of the example."""

import argparse
from pathlib import Path
from typing import Any

from examples import command_line
from examples.errors import invalid


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Returns the options.

    Raises:
        InputError: a word is unknown or malformed, or the heads do not divide.
    """
    parser = command_line.Parser(
        "Trains a transformer encoder with te_flax layers to classify sentences.",
        epochs=4,
        batch_size=64,
        plot="encoder.png",
    )
    positive = command_line.positive
    parser.add_argument("--layers", type=positive, default=2)
    parser.add_argument("--hidden", type=positive, default=128, help="width of a layer")
    parser.add_argument("--heads", type=positive, default=4)
    parser.add_argument("--length", type=positive, default=24, help="tokens a sentence")
    first = "let the layers work on [sequence, batch, hidden]"
    parser.add_argument("--sequence-first", action="store_true", help=first)
    parser.add_argument("--mesh", help="dp=4,tp=2: sizes of the axes dp, fsdp and tp")
    parser.add_argument("--sp", action="store_true", help="split the sequence over tp")
    files = "a .tsv in the format of CoLA or SST-2; default: TREC, downloaded once"
    parser.add_argument("--data", type=Path, metavar="FILE", help=files)
    resume = "save after each epoch here, and go on from what was saved"
    parser.add_argument("--checkpoints", type=Path, metavar="DIR", help=resume)
    cluster = "join the other processes of a Slurm, MPI, Kubernetes or TPU job"
    parser.add_argument("--distributed", action="store_true", help=cluster)
    options = parser.parse_args(argv)
    if options.hidden % options.heads:
        rule = f"be a multiple of --heads, {options.heads}"
        raise invalid("--hidden", rule, options.hidden, "change one of them")
    return options


def settings(options: argparse.Namespace, fingerprint: str) -> dict[str, Any]:
    """Returns what decides the curve of a run; its checkpoints remember it.

    Args:
        options: of the run.
        fingerprint: of the data set.
    """
    names = ("recipe", "epochs", "batch_size", "seed")
    names += ("layers", "hidden", "heads", "length", "sequence_first")
    return {name: getattr(options, name) for name in names} | {"data": fingerprint}
