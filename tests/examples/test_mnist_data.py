"""The data of the MNIST example: IDX files, the split, the batches."""

import gzip
import hashlib
import re

import numpy as np
import pytest

from examples.errors import InputError
from examples.mnist import data


def distinct_images(count):
    return np.random.default_rng(7).integers(0, 256, (count, 28, 28)).astype(np.uint8)


def keys(images):
    return {image.tobytes() for image in images}


def test_idx_files_plain_and_gzipped_hold_the_same_images(idx_folder):
    packed = data.load(idx_folder)
    for path in list(idx_folder.glob("*.gz")):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    plain = data.load(str(idx_folder))
    for a, b in zip(packed, plain, strict=True):
        np.testing.assert_array_equal(a, b)
    assert packed.train_images.shape == (120, 28, 28)
    assert packed.test_images.dtype == np.uint8
    assert packed.train_labels.dtype == np.int32
    expected = np.random.default_rng(0).integers(0, 256, (120, 28, 28))
    np.testing.assert_array_equal(packed.train_images, expected)
    np.testing.assert_array_equal(packed.test_labels, np.arange(30) % 10)


def cut(path):
    path.write_bytes(path.read_bytes()[:-5])


def wrong_mark(path):
    path.write_bytes(bytes([0, 0, 13, 1]) + path.read_bytes()[4:])


def header_only(path):
    path.write_bytes(path.read_bytes()[:6])


def empty(path):
    path.write_bytes(b"")


def garbage(path):
    path.write_bytes(b"not a gzip file")


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    path.write_bytes(bytes(raw))


def label_ten(path):
    path.write_bytes(path.read_bytes()[:-1] + b"\x0a")


def one_label_less(path):
    raw = path.read_bytes()
    path.write_bytes(raw[:4] + (119).to_bytes(4, "big") + raw[8:-1])


IMAGES, LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte"


@pytest.mark.parametrize(
    ("name", "damage", "rule"),
    [
        (LABELS, cut, r"must hold 120 bytes for its shape \(120,\), got 115"),
        (LABELS, wrong_mark, r"must begin with 0, 0, 8, 1 .* got \[0, 0, 13, 1"),
        (
            LABELS,
            header_only,
            r"must begin with 0, 0, 8, 1 .* got \[0, 0, 8, 1, 0, 0\]",
        ),
        (LABELS, empty, r"must begin with 0, 0, 8, 1 .* got \[\]"),
        (LABELS, label_ten, r"must hold 120 labels from 0 to 9, got 120 from 0 to 10"),
        (LABELS, one_label_less, r"must hold 120 labels from 0 to 9, got 119"),
        (IMAGES, cut, "must be a readable file"),
        (IMAGES, garbage, "must be a readable file"),
        (IMAGES, flip, "must be a readable file"),
    ],
)
def test_a_corrupt_file_is_named(idx_folder, name, damage, rule):
    damage(idx_folder / name)
    with pytest.raises(InputError, match=f"{name} {rule}") as caught:
        data.load(idx_folder)
    assert "\n" not in str(caught.value)


def test_images_of_another_size_are_refused(idx_folder):
    path = idx_folder / IMAGES
    raw = bytearray(gzip.decompress(path.read_bytes()))
    raw[8:16] = (14).to_bytes(4, "big") + (56).to_bytes(4, "big")
    path.write_bytes(gzip.compress(bytes(raw)))
    with pytest.raises(
        InputError, match=r"must hold 28x28 images, got \(120, 14, 56\)"
    ):
        data.load(idx_folder)


def test_a_wrong_directory_is_named(idx_folder, tmp_path):
    with pytest.raises(
        InputError, match=r"--data-dir must be a directory, got '.*/nix'"
    ):
        data.load(tmp_path / "nix")
    with pytest.raises(InputError, match="must be a directory"):
        data.load(idx_folder / LABELS)
    (idx_folder / LABELS).unlink()
    with pytest.raises(InputError, match=f"must hold {LABELS} or {LABELS}.gz, got no"):
        data.load(idx_folder)
    (tmp_path / "bare").mkdir()
    with pytest.raises(InputError, match="got an empty directory"):
        data.load(tmp_path / "bare")


def test_the_split_depends_on_the_bytes_only():
    images = distinct_images(1300)
    labels = np.arange(1300, dtype=np.int32) % 10
    first = data.split(images, labels)
    order = np.random.default_rng(3).permutation(1300)
    second = data.split(images[order], labels[order])
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
    assert [len(part) for part in first] == [300, 300, 1000, 1000]
    assert not keys(first.train_images) & keys(first.test_images)
    assert keys(first.train_images) | keys(first.test_images) == keys(images)
    largest = max(hashlib.sha256(i.tobytes()).hexdigest() for i in first.test_images)
    smallest = min(hashlib.sha256(i.tobytes()).hexdigest() for i in first.train_images)
    assert largest < smallest


def test_labels_stay_with_their_images():
    images = distinct_images(1200)
    labels = images[:, 0, 0].astype(np.int32) % 10
    parts = data.split(images, labels)
    np.testing.assert_array_equal(parts.test_images[:, 0, 0] % 10, parts.test_labels)
    np.testing.assert_array_equal(parts.train_images[:, 0, 0] % 10, parts.train_labels)


def test_the_digits_are_the_expected_ones():
    """Needs the data set: with no network and no cache it fails with the clear line."""
    digits = data.load()
    assert [len(part) for part in digits] == [4000, 4000, 1000, 1000]
    assert len(keys(digits.train_images) | keys(digits.test_images)) == 5000
    counts = np.bincount(digits.test_labels, minlength=10)
    assert counts.sum() == 1000
    assert counts.min() >= 70
    test_set = digits.test_images.tobytes() + digits.test_labels.astype("<i4").tobytes()
    assert hashlib.sha256(test_set).hexdigest()[:16] == "9e453d17f873f8ca"
    assert abs(float(data.normalize(digits.train_images).mean())) < 0.05


def test_a_shift_moves_whole_images():
    images = distinct_images(40)
    moved = data.shift(images, np.random.default_rng(1))
    seen = set()
    for image, result in zip(images, moved, strict=True):
        canvas = np.zeros((32, 32), np.uint8)
        canvas[2:30, 2:30] = image
        places = [
            (down, right)
            for down in range(5)
            for right in range(5)
            if (canvas[down : down + 28, right : right + 28] == result).all()
        ]
        assert len(places) == 1
        seen.update(places)
    assert len(seen) > 10


def test_batches_repeat_for_a_seed_and_differ_between_epochs(idx_folder):
    digits = data.load(idx_folder)

    def batches(seed, epoch):
        return list(data.train_batches(digits, 50, seed, epoch))

    first, again = batches(0, 1), batches(0, 1)
    assert [x.shape for x, _ in first] == [(50, 28, 28, 1)] * 2
    for (x, y), (x2, y2) in zip(first, again, strict=True):
        np.testing.assert_array_equal(x, x2)
        np.testing.assert_array_equal(y, y2)
    assert not np.array_equal(first[0][1], batches(0, 2)[0][1])
    assert not np.array_equal(first[0][1], batches(1, 1)[0][1])


def test_evaluation_sees_each_test_image_once(idx_folder, monkeypatch):
    monkeypatch.setattr(data, "EVAL_BATCH", 20)
    digits = data.load(idx_folder)
    images, labels = zip(*data.eval_batches(digits), strict=True)
    assert [len(x) for x in images] == [20, 10]
    np.testing.assert_array_equal(np.concatenate(labels), digits.test_labels)
    raw = np.concatenate(images)[..., 0] * data.STD + data.MEAN
    np.testing.assert_allclose(raw * 255, digits.test_images, rtol=0, atol=1e-3)


def test_every_message_is_one_line():
    assert re.fullmatch("a b c", str(InputError("a\n  b\tc")))
