"""python -m te_flax.plot: a PNG, or one line and exit code 2."""

import json
import subprocess
import sys

import pytest

from te_flax import plot

HEADER = "step,path,role,amax,scale,saturated,flushed,nonfinite"
ROWS = [
    {"step": s, "path": p, "role": r, "amax": 1.0 + s, "scale": 448.0, "saturated": 0.0,
     "flushed": None, "nonfinite": 0.0}
    for s in range(3) for p in ("", "up") for r in ("x", "kernel", "dy")
]  # fmt: skip
PNG = b"\x89PNG\r\n\x1a\n"


def _write(path, rows=ROWS):
    if path.suffix == ".jsonl":
        lines = [json.dumps(row) for row in rows]
    else:
        cells = [["" if v is None else str(v) for v in row.values()] for row in rows]
        lines = [HEADER, *map(",".join, cells)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("name", ["run.csv", "run.jsonl"])
def test_both_formats_are_read_and_drawn(tmp_path, name, capsys):
    file = _write(tmp_path / name)
    assert plot.read(file) == ROWS
    assert plot.main([str(file)]) == 0
    assert (tmp_path / "run.png").read_bytes().startswith(PNG)
    assert capsys.readouterr().out == f"{tmp_path / 'run.png'}\n"


def test_one_role_zeros_and_many_layers(tmp_path):
    rows = [dict(ROWS[0], path=f"layer{i}", amax=0.0, step=i) for i in range(20)]
    file, png = _write(tmp_path / "run.csv", rows), tmp_path / "other.png"
    assert plot.main([str(file), "-o", str(png)]) == 0
    assert png.read_bytes().startswith(PNG)


def test_each_panel_draws_each_layer(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    curves, draw = [], Axes.plot

    def recorded(self, *args, **options):
        curves.append((options["label"], *map(list, args)))
        return draw(self, *args, **options)

    monkeypatch.setattr(Axes, "plot", recorded)
    plot.draw(ROWS, tmp_path / "run.png")
    assert ("up", [0, 1, 2], [1.0, 2.0, 3.0]) in curves
    assert {label for label, *_ in curves} == {"up", "the layer"}
    assert len(curves) == 3 * 2 * 3  # three roles, two layers; flushed is not known


def test_layers_of_other_roles_have_colors_and_names_of_their_own(
    tmp_path, monkeypatch
):
    from matplotlib.figure import Figure

    named, legend = [], Figure.legend

    def recorded(self, handles, labels, **options):
        named.extend(
            (text, h.get_color()) for h, text in zip(handles, labels, strict=True)
        )
        return legend(self, handles, labels, **options)

    monkeypatch.setattr(Figure, "legend", recorded)
    rows = [dict(ROWS[0], path=p, role=r) for p, r in (("up", "x"), ("core", "dq"))]
    plot.draw(rows, tmp_path / "run.png")
    assert named == [("up", "C0"), ("core", "C1")]


BAD = {
    "not json": ("run.jsonl", "{", "be a CSV or JSONL file of te.record, got"),
    "a number": ("run.jsonl", "3\n", "be a CSV or JSONL file of te.record, got"),
    "other columns": ("run.csv", "a,b\n1,2\n", "be a CSV or JSONL file of te.record"),
    "no number": ("run.csv", f"{HEADER}\n0,up,x,much,1,0,0,0\n", "be a CSV or JSONL"),
    "no step": ("run.csv", f"{HEADER}\n,up,x,1,1,0,0,0\n", "be a CSV or JSONL"),
    "short row": ("run.csv", f"{HEADER}\n0,up\n", "be a CSV or JSONL"),
    "a role": ("run.csv", f"{HEADER}\n0,up,w,1,1,0,0,0\n", "be a CSV or JSONL"),
    "no rows": ("run.csv", f"{HEADER}\n", "hold recorded steps"),
    "empty": ("run.csv", "", "hold recorded steps"),
    "binary": ("run.csv", b"\xff\xfe\x00", "be a CSV or JSONL file of te.record"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_one_line_and_exit_code_2(tmp_path, case, capsys):
    name, text, expected = BAD[case]
    file = tmp_path / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert plot.main([str(file)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith(f"plot: file must {expected}")
    assert not (tmp_path / "run.png").exists()


def test_a_place_that_cannot_be_written(tmp_path, capsys):
    file = _write(tmp_path / "run.csv")
    assert plot.main([str(file), "-o", str(tmp_path / "no" / "run.png")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_without_matplotlib(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert plot.main([str(_write(tmp_path / "run.csv"))]) == 2
    error = capsys.readouterr().err
    assert error.startswith("plot: matplotlib must be installed")
    assert error.endswith("; pip install matplotlib\n")


def test_as_a_command(tmp_path):
    command = [sys.executable, "-m", "te_flax.plot"]
    run = lambda *a: subprocess.run([*command, *a], capture_output=True, text=True)
    done = run(str(_write(tmp_path / "run.csv")))
    assert (done.returncode, done.stderr) == (0, "")
    missing = run(str(tmp_path / "no.csv"))
    assert missing.returncode == 2
    assert missing.stderr.startswith("plot: file must exist, got")
    assert missing.stderr.count("\n") == 1
