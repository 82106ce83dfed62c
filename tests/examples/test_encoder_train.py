"""The command of the encoder example: what it writes, resumes, and refuses."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from _sentences import write_sentences
from matplotlib.image import imread

from examples import reporting
from examples.encoder import launch, train

SCRIPT = Path(train.__file__)
FIELDS = ["epoch", "train_loss", "train_accuracy", "test_loss", "test_accuracy"]
SIZES = {"layers": 1, "hidden": 16, "heads": 2, "length": 12, "batch-size": 16}
SMALL = [word for name, size in SIZES.items() for word in (f"--{name}", str(size))]
# Orbax warns of its own next version.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:orbax")


ARGUMENTS = ["--epochs", "3", "--recipe", "delayed_scaling", "--seed", "5"]


def run(sentences, folder, *words, main=train.main):
    """Runs the command on a small model and returns its metrics."""
    files = ["--data", sentences, "--metrics", folder / "m", "--plot", folder / "p"]
    assert main([*SMALL, *map(str, files), *ARGUMENTS, *map(str, words)]) == 0
    return read(folder / "m")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The metrics of an unbroken run on one device."""
    folder = tmp_path_factory.mktemp("whole")
    with jax.numpy_dtype_promotion("standard"):
        return run(write_sentences(folder), folder)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def curve(entries):
    return [[entry[name] for name in FIELDS] for entry in entries]


def close(entries, others):
    """Epoch means within 1 %: a few steps only, which may differ by that."""
    assert len(entries) == len(others)
    for a, b in zip(entries, others, strict=True):
        for name in ("train_loss", "test_loss"):
            assert a[name] == pytest.approx(b[name], rel=0.01), (name, entries, others)


def test_metrics(whole):
    assert [list(entry) for entry in whole] == [[*FIELDS, "seconds"]] * 3
    assert [entry["epoch"] for entry in whole] == [1, 2, 3]
    assert all(math.isfinite(value) for entry in whole for value in entry.values())
    assert whole[2]["train_loss"] < whole[0]["train_loss"]


def test_an_interrupted_run_resumes_with_the_same_curve(
    whole, sentences, tmp_path, monkeypatch
):
    """Bit for bit on its own mesh, and closely on another."""
    saved = (sentences, tmp_path, "--checkpoints", tmp_path / "saved")
    epoch = reporting.Report.epoch

    def interrupt(report, entry):
        if entry["epoch"] == 2:
            raise KeyboardInterrupt
        epoch(report, entry)

    with monkeypatch.context() as patch:
        patch.setattr(reporting.Report, "epoch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(*saved)
    assert curve(read(tmp_path / "m")) == curve(whole)[:1]
    assert curve(run(*saved)) == curve(whole)
    assert imread(tmp_path / "p").shape[:2] == (432, 1080)

    (tmp_path / "saved" / "3").rename(tmp_path / "elsewhere")
    moved = run(*saved, "--mesh", "dp=2,tp=2", "--sp")
    assert curve(moved)[:2] == curve(whole)[:2]
    close(moved, whole)


def test_two_processes_make_one_run(whole, sentences, tmp_path, monkeypatch, capfd):
    """Over jax.distributed; what they write is that of one process."""
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    pair = run(sentences, tmp_path, "--processes", 2, main=launch.main)
    out = capfd.readouterr().out
    assert out.count("epoch   1") == out.count("plot: ") == 1
    close(pair, whole)


BAD = [
    ("--recipe fp7", "preset must be one of .*mxfp8.*, got 'fp7'"),
    ("--mesh dp=2,pp=2", "--mesh must name axes of dp, fsdp, tp, got 'pp'; write"),
    ("--mesh dp", "--mesh must give each axis a size of at least 1, got 'dp'"),
    ("--mesh dp=0", "--mesh must give each axis a size of at least 1, got 'dp=0'"),
    ("--mesh tp=-2", "--mesh must give each axis a size .* got 'tp=-2'"),
    ("--mesh dp=2,dp=2", "--mesh must name each axis once, got 'dp=2,dp=2'"),
    ("--mesh dp=16", "fit the 8 devices of this run, got 'dp=16', 16 devices; .*=16"),
    ("--mesh dp=3", "--batch-size must be a multiple of 3, for the mesh 'dp=3', got"),
    ("--mesh fsdp=8 --hidden 20", "--hidden must be a multiple of 8, for the mesh"),
    ("--mesh tp=4", "--heads must be a multiple of 4, for the mesh 'tp=4', got 2"),
    ("--mesh tp=2 --sp --length 9", "--length must be a multiple of 2, for the me"),
    ("--mesh dp=2 --sp", "--sp must come with a tp axis in --mesh, got 'dp=2'; add"),
    ("--sp", "--sp must come with a tp axis in --mesh, got 'dp=1'; add tp=2"),
    ("--heads 3", "--hidden must be a multiple of --heads, 3, got 16; change one"),
    ("--heads 0", "argument --heads: invalid positive value: '0'"),
    ("--batch-size 999", "--batch-size must be at most 128, the number of training"),
    ("--data {tmp}/nix.tsv", "--data must be a readable file, got .*No such file"),
    ("--metrics {tmp}/nix/m", "--metrics must be writable"),
    ("--plot {tmp}", "--plot must be writable"),
    ("--checkpoints {tmp}/file", "--checkpoints must be a folder that can be writ"),
    ("--distributed", "--distributed must be used in a job that jax.distributed k"),
    ("--speed 9", "unrecognized arguments: --speed 9"),
]


@pytest.mark.parametrize(("arguments", "line"), BAD)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments, line, sentences, tmp_path, capsys, monkeypatch
):
    def alone():
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", alone)
    (tmp_path / "file").write_text("")
    words = [*SMALL, "--data", str(sentences), "--plot", str(tmp_path / "p.png")]
    words += arguments.format(tmp=tmp_path).split()
    assert train.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert re.search(line, err), err


def test_the_script_from_another_directory(tmp_path):
    (tmp_path / "bad.tsv").write_text("sentence\tlabel\nragged\n")
    command = [sys.executable, str(SCRIPT), "--data", "bad.tsv"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "bad.tsv, line 2, must have 2 columns, got 1" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "encoder.png").exists()
