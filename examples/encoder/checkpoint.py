"""Checkpoints of a run, from which an interrupted one goes on with the same curve."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from flax import nnx

import te_flax as te
from examples.errors import invalid
from examples.training import Metrics


class Checkpoints:
    """Saves model, optimizer and metrics after an epoch; a context manager.

    What is saved holds the FP8 statistics and the state of the random streams, so the
    resumed run has the numbers of the unbroken one, on this mesh or on another.

    Args:
        folder: that holds the checkpoints, or None to save nothing.
        settings: what decides the curve of the run; a checkpoint of other settings is
            refused.
    """

    def __init__(self, folder: Path | None, settings: Mapping[str, Any]):
        self.settings = dict(settings)
        self.manager = None
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            rule, remedy = "be a folder that can be written", "name another"
            raise invalid("--checkpoints", rule, error, remedy) from error
        keep = ocp.CheckpointManagerOptions(max_to_keep=2)
        self.manager = ocp.CheckpointManager(folder.resolve(), options=keep)

    def __enter__(self) -> "Checkpoints":
        """Returns self."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Waits until everything is written."""
        if self.manager is not None:
            self.manager.close()

    def restore(self, model: nnx.Module, optimizer: nnx.Optimizer) -> list[Metrics]:
        """Updates both from the last checkpoint; returns the metrics up to there.

        Raises:
            InputError: the checkpoint was made with other settings.
        """
        if self.manager is None or (epoch := self.manager.latest_step()) is None:
            return []
        saved = self.manager.restore(epoch, args=ocp.args.Composite(run=_RESTORE_JSON))
        self._compare(saved["run"]["settings"])
        state = _state(model, optimizer)
        target = ocp.args.StandardRestore(state)
        found = self.manager.restore(epoch, args=ocp.args.Composite(state=target))
        nnx.update((model, optimizer), found["state"])
        return saved["run"]["history"]

    def save(
        self, model: nnx.Module, optimizer: nnx.Optimizer, history: Sequence[Metrics]
    ) -> None:
        """Saves the end of the epoch that the metrics end with."""
        if self.manager is None:
            return
        run = {"settings": self.settings, "history": list(history)}
        self.manager.save(
            int(history[-1]["epoch"]),
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(_state(model, optimizer)),
                run=ocp.args.JsonSave(run),
            ),
        )

    def _compare(self, saved: Mapping[str, Any]) -> None:
        for name, value in self.settings.items():
            if saved.get(name) != value:
                option = "--" + name.replace("_", "-")
                rule = f"be {saved.get(name)}, as in the checkpoint"
                remedy = "repeat the options of that run, or name a new folder"
                raise invalid(option, rule, value, remedy)


_RESTORE_JSON = ocp.args.JsonRestore()


def _state(model: nnx.Module, optimizer: nnx.Optimizer) -> nnx.State:
    """All variables but the mailboxes, which are always zero."""
    return nnx.state((model, optimizer), te.checkpoint_filter)
