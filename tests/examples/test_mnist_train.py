"""The command: what it writes, and how it refuses bad input."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.image import imread

from examples.mnist import train

SCRIPT = Path(train.__file__)
FIELDS = ["epoch", "train_loss", "train_accuracy", "test_loss", "test_accuracy"]


def test_the_command_from_another_directory(idx_folder, tmp_path):
    """The script itself, as a user starts it, with its default recipe and plot."""
    command = [sys.executable, str(SCRIPT), "--data-dir", str(idx_folder)]
    command += ["--epochs", "2", "--batch-size", "40", "--metrics", "m.jsonl"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "test accuracy" in done.stdout
    lines = (tmp_path / "m.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    assert [list(entry) for entry in entries] == [[*FIELDS, "seconds"]] * 2
    assert [entry["epoch"] for entry in entries] == [1, 2]
    assert all(math.isfinite(value) for entry in entries for value in entry.values())
    assert imread(tmp_path / "mnist.png").shape[:2] == (432, 1080)


def test_a_recipe_from_a_file_and_repeatable_metrics(idx_folder, tmp_path):
    recipe = tmp_path / "short.toml"
    recipe.write_text('recipe = "DelayedScaling"\namax_history_len = 2048\n')
    runs = []
    for name in ("a", "b"):
        arguments = ["--data-dir", idx_folder, "--recipe", recipe, "--epochs", 1]
        arguments += ["--metrics", tmp_path / name, "--plot", tmp_path / "p.png"]
        assert train.main([str(word) for word in [*arguments, "--batch-size", 60]]) == 0
        (line,) = (tmp_path / name).read_text().splitlines()
        runs.append(json.loads(line))
    assert [runs[0][name] for name in FIELDS] == [runs[1][name] for name in FIELDS]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--recipe", "fp7"], "preset must be one of .*mxfp8.*, got 'fp7'"),
        (["--recipe", "no/such.toml"], "must be an existing TOML file, got 'no/such"),
        (["--recipe", "{tmp}/bad.toml"], "bad.toml.*: file must be valid UTF-8 TOML"),
        (["--recipe", "{tmp}/key.toml"], "key must be one of .*, got 'histry'"),
        (["--data-dir", "{tmp}/nix"], "--data-dir must be a directory, got"),
        (["--data-dir", "{tmp}"], "--data-dir must hold train-images-idx3-ubyte or"),
        ([], "the data set must be downloadable once .* or pass --data-dir"),
        (["--epochs", "0"], "argument --epochs: invalid positive value: '0'"),
        (["--batch-size", "many"], "argument --batch-size: invalid positive value"),
        (["--speed"], "unrecognized arguments: --speed"),
        (["--data-dir", "{idx}", "--batch-size", "121"], "be at most 120, the number"),
        (["--data-dir", "{idx}", "--metrics", "{tmp}/nix/m"], "--metrics must be writ"),
        (["--data-dir", "{idx}", "--plot", "{tmp}"], "--plot must be writable"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments, line, idx_folder, tmp_path, no_network, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.toml").write_text("recipe = = 3")
    (tmp_path / "key.toml").write_text('recipe = "DelayedScaling"\nhistry = 3\n')
    words = [word.format(tmp=tmp_path, idx=idx_folder) for word in arguments]
    assert train.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert "Traceback" not in err
    assert re.search(line, err), err


def test_a_corrupt_file_through_the_command(idx_folder, tmp_path):
    (idx_folder / "t10k-labels-idx1-ubyte").write_bytes(b"junk")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--data-dir", str(idx_folder)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "40"},
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "t10k-labels-idx1-ubyte must begin with 0, 0, 8, 1" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "mnist.png").exists()
