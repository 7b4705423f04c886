"""The diffs of the migration pages: with the same samples in each step, both sides end with the same weights.

The sides of a diff differ in what the pages say: the order of samples, and the size of the global batch. Here both read
the samples in the order of the dataset, and take steps of the same size.
"""

import contextlib
import io
import os
import re
import warnings
from pathlib import Path

import pytest
import torch

from tests.e2e.pages import REPOSITORY, fences, sides

pytestmark = pytest.mark.slow

# What to replace on both sides, before and after: steps of 64 samples (32 for the Trainer) in the order of the dataset.
DIGITS = {"images[:1500], labels[:1500]": "images[:1408], labels[:1408]"}
RUN = {"shuffle=True": "shuffle=False", "global_batch=128": "global_batch=64", "epochs(10)": "epochs(3)"}
PAGES = {
    "migrate-ddp.md": (
        DIGITS,
        {"(train_set, size, rank)": "(train_set, size, rank, shuffle=False)", "(start, 10)": "(start, 3)"},
        RUN,
    ),
    "migrate-accelerate.md": (DIGITS, {"shuffle=True": "shuffle=False", "range(10)": "range(3)"}, RUN),
    "migrate-lightning.md": (DIGITS, {"shuffle=True": "shuffle=False", "max_epochs=10": "max_epochs=3"}, RUN),
    "migrate-trainer.md": (
        {},
        {"report_to=": 'train_sampling_strategy="sequential",\n    report_to=',
         "num_train_epochs=6": "num_train_epochs=2"},
        {"shuffle=True": "shuffle=False", "epochs(6)": "epochs(2)", "6 * len": "2 * len"},
    ),
}  # fmt: skip


def replaced(code: str, *changes: dict[str, str]) -> str:
    for old, new in ((old, new) for change in changes for old, new in change.items()):
        assert old in code, f"the page has no {old}: change this test"
        code = code.replace(old, new)
    return code


def run(code: str, folder: Path) -> dict[str, object]:
    """Run a script in a separate folder; returns its names, with what it has printed as `printed`."""
    folder.mkdir()
    before = Path.cwd()
    os.chdir(folder)
    names: dict[str, object] = {"__name__": "__main__"}
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), warnings.catch_warnings(action="ignore"):  # of the other libraries
            exec(compile(code, "page", "exec"), names)
    finally:
        os.chdir(before)
    return names | {"printed": out.getvalue()}


def old_weights(page: str, folder: Path, names: dict) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    match page:
        case "migrate-ddp.md":
            return torch.load(folder / "checkpoint.pt")["model"]
        case "migrate-accelerate.md":
            return load_file(folder / "out" / "model.safetensors")
        case "migrate-lightning.md":
            return names["trainer"].lightning_module.net.state_dict()
        case _:
            return load_file(folder / "out" / "model" / "model.safetensors")


def both_sides(page: str, folder: str) -> tuple[float, float, list[str]]:
    """The largest difference and the largest weight after both scripts, and the numbers that they print. For a rank."""
    (block,) = [block for block in fences((REPOSITORY / "docs" / page).read_text()) if block.language == "diff"]
    before, after = sides(block.text)
    shared, of_before, of_after = PAGES[page]
    old = run(replaced(before, shared, of_before), Path(folder, "before"))
    new = run(replaced(after, shared, of_after), Path(folder, "after"))
    weights = old_weights(page, Path(folder, "before"), old)
    found = new["model"].state_dict()
    assert weights.keys() <= found.keys()
    difference = max(float((weights[name] - found[name]).abs().max()) for name in weights)
    printed = [" ".join(re.findall(r"accuracy (\S+)", str(each["printed"]))) for each in (old, new)]
    return difference, max(float(each.abs().max()) for each in weights.values()), printed


@pytest.mark.parametrize("page", PAGES)
def test_both_sides_of_a_diff_train_the_same_weights(ranks, page, tmp_path):
    ((difference, largest, printed),) = ranks(1, both_sides, page, str(tmp_path))
    assert difference < 1e-5 * max(largest, 1.0), f"the weights differ by {difference}"
    if page in ("migrate-ddp.md", "migrate-accelerate.md"):  # the others do not print each epoch
        assert printed[0] == printed[1]
        assert len(printed[0].split()) == 3
