"""Sources of models: paths that do not exist, the hub and its cache, and what a loader raises."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import constants, hf_hub_url
from huggingface_hub.utils import HFValidationError, validate_repo_id

from speccompile import pretrained
from speccompile.errors import PretrainedError, UnsupportedCheckpoint
from speccompile.modes.network import draft_models
from speccompile.pretrained import loading
from speccompile.utils import hub, model_names
from speccompile.utils.hub import check_hub_tokenizer, check_reachable
from speccompile.utils.model_names import check_model_name, check_tokenizer, is_hub_id
from support.errors import raises
from support.float8_folders import write_float8
from support.tiny import tiny_llama


def test_a_path_that_does_not_exist_is_no_hub_id(tmp_path: Path) -> None:
    not_of_the_hub = ("a--b", "a/b..c", "nobody/nothing.git", "-a", "a/b-", "x" * 97)
    for name in ("./nowhere", "/no/where", "../nowhere", "~/nowhere", "no/such/folder", *not_of_the_hub):
        with raises(PretrainedError, source=name, reason="no such folder"):
            check_model_name(name)
    with raises(PretrainedError, source="nowhere.gguf", reason="no such file"):
        check_model_name("nowhere.gguf")
    file = tmp_path / "model.safetensors"
    file.touch()
    with raises(PretrainedError, source=str(file), reason="it is a file"):
        check_model_name(str(file))
    for name in ("gpt2", "HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2", "tiny", str(tmp_path)):
        check_model_name(name)
    for name in not_of_the_hub:
        with pytest.raises(HFValidationError):
            validate_repo_id(name)
    for name in ("HuggingFaceTB/SmolLM2-135M-Instruct", "a.b/c_d", "x" * 96):
        validate_repo_id(name)
        check_model_name(name)
    assert is_hub_id("gpt2") and not is_hub_id(str(tmp_path)) and not is_hub_id("smollm2")


@pytest.fixture
def empty_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def at(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the hub at a port of this machine."""

    def url(repo_id: str, filename: str) -> str:
        return hf_hub_url(repo_id, filename, endpoint=f"http://127.0.0.1:{port}")

    monkeypatch.setattr(hub, "hf_hub_url", url)


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@pytest.mark.usefixtures("empty_hub_cache")
def test_a_hub_that_cannot_be_reached_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    at(closed_port(), monkeypatch)
    lists(monkeypatch)
    loads: list[object] = []
    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", loads.append)
    with raises(PretrainedError, source="nobody/nothing", reason=re.compile(r"the hub cannot be reached \(Connect")):
        pretrained.load("nobody/nothing")
    assert loads == [], "transformers would retry for half a minute"
    monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", loads.append)
    with raises(PretrainedError, source="nobody/nothing", reason=re.compile(r"the hub cannot be reached \(Connect")):
        pretrained.load_tokenizer("nobody/nothing")
    monkeypatch.setattr(draft_models.PretrainedConfig, "get_config_dict", loads.append)
    assert draft_models.draft_config("nobody/nothing") == {}
    assert loads == [], "transformers would retry for half a minute"


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """A hub that answers every request with 404; the first lines of the requests."""
    requests: list[bytes] = []
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        try:
            while True:
                connection, _ = server.accept()
                with connection:
                    requests.append(connection.recv(65536).splitlines()[0])
                    connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        except OSError:
            return

    thread = threading.Thread(target=serve)
    thread.start()
    at(server.getsockname()[1], monkeypatch)
    yield requests
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join()


@pytest.mark.usefixtures("empty_hub_cache")
def test_what_the_hub_answers_is_left_to_transformers(answering: list[bytes]) -> None:
    check_reachable("nobody/nothing")
    assert answering == [b"HEAD /nobody/nothing/resolve/main/config.json HTTP/1.1"]


@pytest.mark.usefixtures("empty_hub_cache")
def test_a_slow_hub_is_not_taken_for_an_unreachable_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        at(silent.getsockname()[1], monkeypatch)
        metadata = hub.get_hf_file_metadata
        monkeypatch.setattr(hub, "get_hf_file_metadata", lambda url: metadata(url, timeout=0.2))
        started = time.monotonic()
        check_reachable("nobody/nothing")
        assert time.monotonic() - started >= 0.2


def cached(folder: Path, repository: str, *files: str) -> None:
    """Put a repository with these files, empty but for ``{}``, into the cache of huggingface_hub."""
    root = folder / f"models--{repository.replace('/', '--')}"
    snapshot = root / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("abc")
    for file in files:
        (snapshot / file).write_text("{}")


@pytest.fixture
def own_cache(empty_hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache that look-ups read as well."""
    look = hub.try_to_load_from_cache

    def looks(repo_id: str, filename: str) -> Any:
        return look(repo_id, filename, cache_dir=empty_hub_cache)

    monkeypatch.setattr(hub, "try_to_load_from_cache", looks)
    return empty_hub_cache


def test_what_is_in_the_cache_asks_no_hub(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached(own_cache, "nobody/cached", "config.json")
    at(closed_port(), monkeypatch)
    check_reachable("nobody/cached")
    check_reachable("nobody/cached", "tokenizer.json", "config.json")
    with pytest.raises(PretrainedError):
        check_reachable("nobody/cached", "tokenizer.json")
    with pytest.raises(PretrainedError):
        check_reachable("nobody/nothing")


def lists(monkeypatch: pytest.MonkeyPatch, *files: str) -> list[str]:
    """Let the hub list ``files`` for every repository, or be unreachable without any; the ids that were asked for."""
    asked = []

    def info(repo_id: str, *, timeout: float) -> Any:
        asked.append(repo_id)
        if not files:
            raise OSError("no network")
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=file) for file in files])

    monkeypatch.setattr(hub, "model_info", info)
    return asked


NO_TOKENIZER = ("config.json", "model.safetensors", "original/tokenizer.model")


@pytest.mark.parametrize("listed", [NO_TOKENIZER, ()], ids=["by the hub's list", "by the cache, without a network"])
def test_a_hub_id_without_a_tokenizer_is_refused_before_its_weights_are_loaded(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, listed: tuple[str, ...]
) -> None:
    cached(own_cache, "nobody/bare", "config.json")
    asked = lists(monkeypatch, *listed)
    loads: list[object] = []
    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", loads.append)
    with raises(PretrainedError, source="nobody/bare", reason="it has no tokenizer"):
        pretrained.load("nobody/bare")
    assert asked == ["nobody/bare"] and loads == []


def test_a_tokenizer_is_looked_for_in_the_cache_and_then_on_the_hub(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached(own_cache, "nobody/whole", "config.json", "tokenizer.json")
    cached(own_cache, "nobody/part", "config.json")
    asked = lists(monkeypatch, *NO_TOKENIZER, "tokenizer.json")
    for name in ("nobody/whole", "nobody/part", "nobody/elsewhere"):
        check_hub_tokenizer(name)
    assert asked == ["nobody/part", "nobody/elsewhere"]
    lists(monkeypatch)
    # No list of its files: what is wrong is left to the loading.
    check_hub_tokenizer("nobody/elsewhere")


def test_tekken_json_alone_needs_mistral_common(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_names, "find_spec", lambda name: None)
    cached(own_cache, "nobody/tekken", "config.json", "tekken.json")
    for file in ("config.json", "tekken.json", "tokenizer_config.json"):
        (tmp_path / file).write_text("{}")
    for load in (pretrained.load, pretrained.load_tokenizer):
        with raises(PretrainedError, source=str(tmp_path), reason="it needs mistral-common"):
            load(str(tmp_path))
    with raises(PretrainedError, source="nobody/tekken", reason="it needs mistral-common"):
        check_hub_tokenizer("nobody/tekken")


def test_tekken_json_beside_another_tokenizer_or_with_its_package_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in ("config.json", "tekken.json"):
        (tmp_path / file).write_text("{}")
    monkeypatch.setattr(model_names, "find_spec", lambda name: name == "mistral_common" or None)
    check_tokenizer(str(tmp_path))
    monkeypatch.setattr(model_names, "find_spec", lambda name: None)
    (tmp_path / "tokenizer.json").write_text("{}")
    check_tokenizer(str(tmp_path))


def test_an_fp8_checkpoint_of_the_hub_is_dequantised(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cached(own_cache, "nobody/fp8", "config.json")
    folder = own_cache / "models--nobody--fp8" / "snapshots" / "abc"
    reference = write_float8(tiny_llama(layers=1), folder, "modelopt in its own file")
    model = pretrained.load_model("nobody/fp8")
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, reference.model.layers[0].mlp.up_proj.weight)
    assert model.config.name_or_path == "nobody/fp8"
    # Without the file that declares it, the dtypes are what the hub's answer is checked by.
    (folder / "hf_quant_config.json").unlink()
    with raises(UnsupportedCheckpoint, source="nobody/fp8", reason=re.compile("it is F8_E4M3")):
        pretrained.load_model("nobody/fp8")


# --- what a loader raises ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ImportError("Install it: `pip install bitsandbytes`"), "`pip install bitsandbytes`"),
        (ImportError("A valid HQQ version is not available"), "pip install hqq"),
        (RuntimeError("No GPU found"), "RuntimeError: No GPU found"),
        (KeyError("config"), "KeyError: 'config'"),
    ],
)
@pytest.mark.parametrize("of", ["AutoModelForCausalLM", "AutoTokenizer"])
def test_any_error_of_a_loader_is_a_pretrained_error(
    of: str, error: Exception, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(getattr(loading, of), "from_pretrained", fail)
    tiny_llama(layers=1).config.save_pretrained(tmp_path)
    load = pretrained.load_model if of == "AutoModelForCausalLM" else pretrained.load_tokenizer
    with raises(PretrainedError, source=str(tmp_path), reason=re.compile(re.escape(reason))) as raised:
        load(str(tmp_path))
    assert reason in str(raised.value)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    tiny_llama(layers=1).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 130}))
    with raises(PretrainedError, reason=re.compile("its checkpoint has in another shape 2 .lm_head.weight")):
        pretrained.load_model(str(tmp_path))


def test_no_code_of_a_checkpoint_is_run_and_none_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("transformers asks whether code may be run"))
    code = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard_of", "auto_map": code}))
    with pytest.raises(PretrainedError, match="No code of a checkpoint is run here: load it with transformers"):
        pretrained.load_model(str(tmp_path))
