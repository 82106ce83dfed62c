"""Labelled sentences in the column formats of GLUE's CoLA and SST-2 files."""

from pathlib import Path

from examples.errors import InputError, invalid

SST2_HEADER = ["sentence", "label"]
FORMATS = (
    "be in the format of SST-2 (the header 'sentence<TAB>label', 2 columns) or of "
    "CoLA (no header, 4 columns: source, label, mark, sentence)"
)


def read(path: str | Path) -> tuple[list[tuple[str, str]], str]:
    """Reads a file of sentences with the label 0 or 1.

    Args:
        path: a UTF-8 file with one sentence a line and tabs between its columns:
            SST-2's ``sentence, label`` under a header, or CoLA's ``source, label,
            mark, sentence`` without one.

    Returns:
        Pairs of sentence and label, and the name of the format.

    Raises:
        InputError: the file cannot be read, is in another format, has a row with
            another number of columns, or a label that is neither 0 nor 1.
    """
    rows = _rows(Path(path))
    if rows[0] == SST2_HEADER:
        return _labelled(path, rows, 2, 2, sentence=0, label=1), "SST-2"
    if len(rows[0]) == 4:
        return _labelled(path, rows, 1, 4, sentence=3, label=1), "CoLA"
    remedy = "convert it; GLUE's test files have no labels and cannot be used"
    raise invalid(str(path), FORMATS, f"the first line {rows[0][:5]}", remedy)


def _rows(path: Path) -> list[list[str]]:
    """The columns of each line; no quoting, as in GLUE."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        remedy = "name a UTF-8 file of tab-separated columns"
        raise invalid("--data", "be a readable file", error, remedy) from error
    lines = text.replace("\r\n", "\n").split("\n")  # nothing else ends a line
    if lines[-1] == "":
        lines.pop()
    if not lines:
        raise invalid(str(path), FORMATS, "an empty file", "name another file")
    return [line.split("\t") for line in lines]


def _labelled(
    path: str | Path,
    rows: list[list[str]],
    first: int,
    columns: int,
    *,
    sentence: int,
    label: int,
) -> list[tuple[str, str]]:
    """Checks each row, counted from 1, and picks its two columns."""
    found = []
    for number, row in enumerate(rows[first - 1 :], start=first):
        if len(row) != columns:
            rule, got = f"have {columns} columns", f"{len(row)}"
            raise _bad_row(path, number, rule, got)
        if row[label] not in ("0", "1"):
            raise _bad_row(path, number, "have the label 0 or 1", repr(row[label]))
        found.append((row[sentence], row[label]))
    return found


def _bad_row(path: str | Path, number: int, rule: str, got: str) -> InputError:
    return invalid(f"{path}, line {number},", rule, got, "correct or remove the line")
