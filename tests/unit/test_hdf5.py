"""HDF5Dataset reads the right rows in every process, decompresses each chunk once, and reports what is wrong."""

import copy
import multiprocessing.forkserver
import os
import pickle
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from samestep.data.file_datasets import HDF5Dataset
from samestep.errors import DataError

N = 97
IO_COUNTS = Path("/proc/self/io")
OPEN_FILES = Path("/proc/self/fd")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Write images whose every pixel is the label, so that a wrong row is detected."""
    file_path = tmp_path / "data.h5"
    labels = np.random.default_rng(0).permutation(N)
    with h5py.File(file_path, "w") as file:
        file.create_dataset(
            "images",
            data=np.repeat(labels, 48).reshape(N, 4, 12).astype(np.float32),
            chunks=(10, 4, 5),
            compression="gzip",
        )
        file["meta/labels"] = labels
        file["names"] = [f"face {label}" for label in labels]
        file["codes"] = np.array([f"c{label}" for label in labels], dtype="S4")
        file["big_endian"] = labels.astype(">i4")
        file["flags"] = labels % 2 == 0
        file["pairs"] = np.array([(label, label) for label in labels], dtype=[("a", "i4"), ("b", "f8")])
        file["short"] = labels[:-1]
        file["single"] = 3.0
        ragged = file.create_dataset("ragged", (N,), dtype=h5py.vlen_dtype(np.int32))
        for row, label in enumerate(labels):
            ragged[row] = np.arange(label % 3)
    return file_path


def read_labels(path: Path) -> list[int]:
    with h5py.File(path, "r", locking=False) as file:
        return file["meta/labels"][:].tolist()


def check_labels(batches) -> list[int]:
    """Check that each image matches its label, and return the labels."""
    labels = []
    for images, batch_labels in batches:
        assert (images == batch_labels.float()[:, None, None]).all()
        labels += batch_labels.tolist()
    return labels


def test_a_sample_is_a_tuple_in_the_order_of_the_keys(path):
    dataset = HDF5Dataset(path, keys=["meta/labels", "images"])
    label, image = dataset[5]
    assert label.shape == ()
    assert label == read_labels(path)[5]
    assert image.shape == (4, 12)
    assert image.dtype == torch.float32
    assert len(dataset) == N
    assert [label.item() for label, _ in dataset] == read_labels(path)


def test_every_kind_of_column_is_converted(path):
    keys = ["names", "codes", "big_endian", "flags", "pairs", "ragged"]
    name, code, big_endian, flag, pair, ragged = HDF5Dataset(path, keys)[7]
    label = read_labels(path)[7]
    assert (name, code) == (f"face {label}", f"c{label}")
    assert big_endian.dtype == torch.int32
    assert big_endian == label
    assert flag.dtype == torch.bool
    assert flag == (label % 2 == 0)
    assert pair["a"] == pair["b"] == label
    assert ragged.tolist() == list(range(label % 3))


def test_a_batch_keeps_the_order_and_repetitions_of_its_indices(path):
    dataset, labels = HDF5Dataset(path, ["meta/labels"]), read_labels(path)
    indices = [50, 3, 4, 96, 3, 0, 51]
    assert [label.item() for (label,) in dataset.__getitems__(indices)] == [labels[index] for index in indices]
    assert dataset.__getitems__([]) == []


def test_samples_share_no_memory(path):
    dataset = HDF5Dataset(path, ["images"])
    (first,), (again,), (neighbor,) = dataset.__getitems__([3, 3, 4])
    expected = neighbor.clone()
    first.fill_(-1)
    assert (again != -1).all()
    assert torch.equal(neighbor, expected)
    assert torch.equal(dataset[4][0], expected)
    assert neighbor.untyped_storage().nbytes() == 4 * 12 * 4


@pytest.fixture
def stop_forkserver() -> Iterator[None]:
    """Stop the server process of forkserver after the test, unless it served others before: warm ranks come from it."""
    server = multiprocessing.forkserver._forkserver
    served_others = server._forkserver_pid is not None
    yield
    if not served_others:
        server._stop()


@pytest.mark.usefixtures("stop_forkserver")
@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(each, marks=pytest.mark.slow) for each in ("forkserver", "spawn"))]
)
def test_workers_read_the_right_rows_after_the_parent_has_read(path, method):
    dataset = HDF5Dataset(path, ["images", "meta/labels"])
    check_labels([[column[None] for column in dataset[11]]])
    loader = DataLoader(dataset, batch_size=8, num_workers=2, multiprocessing_context=method)
    assert check_labels(loader) == read_labels(path)
    assert check_labels(DataLoader(dataset, batch_size=8)) == read_labels(path)


def test_parent_and_forked_workers_read_the_same_file_at_the_same_time(path):
    first, second = HDF5Dataset(path, ["images", "meta/labels"]), HDF5Dataset(path, ["images", "meta/labels"])
    labels = read_labels(path)
    assert first[0][1] == second[0][1] == labels[0]
    order = np.random.default_rng(1).permutation(N).tolist()
    batches = iter(DataLoader(Subset(second, order), batch_size=5, num_workers=2, multiprocessing_context="fork"))
    got = []
    for batch in batches:
        got += check_labels([batch])
        assert check_labels([[column[None] for column in first[len(got) % N]]]) == [labels[len(got) % N]]
    assert got == [labels[index] for index in order]


def descriptors(path: Path) -> set[str]:
    return {link.name for link in OPEN_FILES.iterdir() if link.resolve() == path.resolve()}


def send_descriptors(path: Path, dataset: HDF5Dataset, answer) -> None:
    inherited = descriptors(path)
    sample = dataset[1][0].item()
    answer.put((inherited, sample, len(descriptors(path))))


@pytest.mark.skipif(not OPEN_FILES.exists(), reason="open files are listed in /proc on Linux")
def test_no_handle_is_inherited_over_a_fork(path):
    first, second = HDF5Dataset(path, ["meta/labels"]), HDF5Dataset(path, ["meta/labels"])
    assert first[0][0] == second[0][0]
    assert descriptors(path)
    context = multiprocessing.get_context("fork")
    answer = context.SimpleQueue()
    child = context.Process(target=send_descriptors, args=(path, first, answer))
    child.start()
    inherited, sample, opened = answer.get()
    child.join()
    assert inherited == set()
    assert (sample, opened) == (read_labels(path)[1], 1)
    assert second[2][0] == read_labels(path)[2]


def test_an_open_dataset_can_be_pickled_and_copied_without_its_handle(path):
    dataset = HDF5Dataset(path, ["meta/labels"])
    dataset[0]
    assert pickle.loads(pickle.dumps(dataset))[3] == copy.copy(dataset)[3] == dataset[3]


def test_a_relative_path_refers_to_the_folder_in_which_the_dataset_was_made(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    dataset = HDF5Dataset("data.h5", ["meta/labels"])
    monkeypatch.chdir("/")
    assert dataset[2][0] == read_labels(path)[2]
    assert repr(dataset) == f"HDF5Dataset('{path}', keys=['meta/labels'])"


def test_a_closed_dataset_opens_again_when_read(path):
    dataset = HDF5Dataset(path, ["meta/labels"])
    dataset[0]
    dataset.close()
    dataset.close()
    assert dataset[1][0] == read_labels(path)[1]


def test_read_only_storage_is_enough(path):
    path.chmod(0o444)
    path.parent.chmod(0o555)
    try:
        assert HDF5Dataset(path, ["meta/labels"])[0][0] == read_labels(path)[0]
    finally:
        path.parent.chmod(0o755)


def test_the_user_may_have_the_same_file_open(path):
    with h5py.File(path, "r") as file:
        assert HDF5Dataset(path, ["meta/labels"])[0][0] == file["meta/labels"][0]


def bytes_read() -> int:
    return int(IO_COUNTS.read_text().split()[1])


@pytest.fixture
def large_chunks(tmp_path: Path) -> Path:
    """Write 2 chunks of rows of 10 MiB each that do not compress: more than the default cache of HDF5."""
    file_path = tmp_path / "large.h5"
    values = np.random.default_rng(0).integers(0, 256, (256, 10 << 13), dtype=np.uint8)
    with h5py.File(file_path, "w") as file:
        file.create_dataset("x", data=values, chunks=(128, 10 << 12), compression="gzip", compression_opts=1)
    return file_path


@pytest.mark.skipif(not IO_COUNTS.exists(), reason="reads are counted in /proc on Linux")
@pytest.mark.parametrize("access", ["one by one", "as one shuffled batch"])
def test_no_chunk_is_decompressed_twice(large_chunks, access):
    dataset = HDF5Dataset(large_chunks, ["x"])
    dataset[0]
    before = bytes_read()
    if access == "one by one":
        for index in range(len(dataset)):
            dataset[index]
    else:
        dataset.__getitems__(np.random.default_rng(0).permutation(len(dataset)).tolist())
    assert bytes_read() - before < 1.2 * large_chunks.stat().st_size


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"none\.h5 does not exist: check the path, and that this node has it"):
        HDF5Dataset(tmp_path / "none.h5", ["x"])


def test_a_folder_is_an_error(tmp_path):
    with pytest.raises(DataError, match="cannot be opened: it is a folder: name the file in it"):
        HDF5Dataset(tmp_path, ["x"])


def test_a_missing_key_is_an_error_that_lists_the_keys(path):
    with pytest.raises(DataError, match=r"has no dataset 'labels': it has .*'images', 'meta/labels', 'names'"):
        HDF5Dataset(path, ["images", "labels"])
    with pytest.raises(DataError, match="has no dataset 'images/x'"):
        HDF5Dataset(path, ["images/x"])


def test_the_list_of_keys_may_be_empty_or_shortened(tmp_path):
    with h5py.File(tmp_path / "empty.h5", "w"):
        pass
    with pytest.raises(DataError, match="has no dataset 'x': it has none"):
        HDF5Dataset(tmp_path / "empty.h5", ["x"])
    with h5py.File(tmp_path / "many.h5", "w") as file:
        for number in range(25):
            file[f"d{number:02}"] = [0]
    with pytest.raises(DataError, match=r"'d19' and 5 more$"):
        HDF5Dataset(tmp_path / "many.h5", ["x"])


def test_a_group_is_an_error(path):
    with pytest.raises(DataError, match=r"'meta' in .* is a group, not a dataset: name one of .*, 'meta/labels'"):
        HDF5Dataset(path, ["meta"])


def test_a_scalar_is_an_error(path):
    with pytest.raises(DataError, match=r"'single' in .* is a scalar: name a dataset with one row per sample"):
        HDF5Dataset(path, ["single"])


def test_datasets_of_different_length_are_an_error(path):
    with pytest.raises(DataError, match="differ in length: 'images' has 97, 'short' has 96, 'names' has 97"):
        HDF5Dataset(path, ["images", "short", "names"])


def test_a_truncated_file_and_a_file_that_is_not_hdf5_are_different_errors(path):
    content = path.read_bytes()
    path.write_bytes(content[:-1000])
    with pytest.raises(DataError, match=r"cannot be opened: it is truncated \(.*\): copy or write"):
        HDF5Dataset(path, ["images"])
    path.write_bytes(b"PK" + content[2:2000])
    with pytest.raises(DataError, match=r"cannot be opened: it is not an HDF5 file \(2000 bytes without"):
        HDF5Dataset(path, ["images"])


def test_a_corrupt_chunk_is_an_error_when_it_is_read(path):
    with h5py.File(path, "r") as file:
        chunk = file["images"].id.get_chunk_info_by_coord((10, 0, 0))
    with path.open("r+b") as raw:
        raw.seek(chunk.byte_offset)
        raw.write(b"\xff" * chunk.size)
    dataset = HDF5Dataset(path, ["images"])
    dataset[9]
    with pytest.raises(DataError, match=r"rows 12 to 13 of 'images' in .* cannot be read: .*: write or copy it again"):
        dataset.__getitems__([13, 12])


def rewrite(path):
    path.write_bytes(path.read_bytes() + b"more")


def replace_by_copy(path):
    shutil.copy(path, path.with_name("copy.h5"))
    path.with_name("copy.h5").replace(path)


@pytest.mark.parametrize(
    "change", [rewrite, replace_by_copy, lambda path: os.truncate(path, 4096), lambda path: path.unlink()],
    ids=["rewritten", "replaced", "truncated", "removed"],
)  # fmt: skip
@pytest.mark.parametrize("is_open", [False, True])
def test_a_file_that_changes_during_the_run_is_an_error(path, change, is_open):
    dataset = HDF5Dataset(path, ["meta/labels"])
    if is_open:
        dataset[0]
    size = path.stat().st_size
    change(path)
    now = f"{path.stat().st_size} bytes" if path.exists() else "no file"
    with pytest.raises(DataError) as caught:
        dataset[0]
    assert str(caught.value) == (
        f"{path} was changed or replaced during the run ({size} bytes at its start, {now} now): start the run again "
        "with the complete file, and do not write to it while a run reads it"
    )


@pytest.mark.parametrize("index", [-1, N, 10**12])
def test_an_index_out_of_range_is_an_error(path, index):
    with pytest.raises(DataError, match=f"index {index} is out of range: .* has samples 0 to 96"):
        HDF5Dataset(path, ["meta/labels"])[index]


def test_keys_must_be_a_list_of_names(path):
    with pytest.raises(DataError, match=r"keys='images' is one string and must be a list .* write keys=\['images'\]"):
        HDF5Dataset(path, "images")
    with pytest.raises(DataError, match="keys is empty: name at least one dataset"):
        HDF5Dataset(path, [])


def test_without_h5py_the_error_names_the_extra(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(DataError, match=r"need h5py, which is not installed: pip install 'samestep\[hdf5\]'"):
        HDF5Dataset(path, ["images"])


def test_it_cannot_be_subclassed():
    with pytest.raises(DataError, match="Augmented subclasses HDF5Dataset: write a Dataset that holds one"):
        type("Augmented", (HDF5Dataset,), {})


class Doubled(Dataset):
    """A dataset of the user that wraps it."""

    def __init__(self, rows: HDF5Dataset):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        (label,) = self.rows[index]
        return 2 * label


def test_a_dataset_that_wraps_it_can_be_pickled(path):
    rows = HDF5Dataset(path, ["meta/labels"])
    rows[0]
    loader = DataLoader(pickle.loads(pickle.dumps(Doubled(rows))), batch_size=50)
    assert torch.cat(list(loader)).tolist() == [2 * label for label in read_labels(path)]
