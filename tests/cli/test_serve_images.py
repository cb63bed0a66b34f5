"""``speccompile serve`` of a folder with a vision-language model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import LlavaProcessor
from typer.testing import CliRunner

from speccompile.cli import app
from speccompile.serve import server
from speccompile.serve.service import Service
from support import letters
from support.serving import Client
from support.vision_processor import data_url, model_of, picture, processor_of

OPTIONS = ["--mode", "ngram", "--tiers", "0,3", "--backend", "eager", "--max-len", "64", "--max-batch", "2"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    processor: LlavaProcessor = processor_of(letters.tokenizer())
    model_of(processor).save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    return tmp_path


def served(monkeypatch: pytest.MonkeyPatch, folder: Path) -> tuple[list[int], str]:
    """Status of a chat with an image and of one without, and what the command writes to stderr."""
    status: list[int] = []

    def ask(service: Service, host: str, port: int) -> None:
        image = {"type": "image_url", "image_url": {"url": data_url(picture(1))}}
        for content in ([image, {"type": "text", "text": "ab"}], "ab"):
            body: dict[str, Any] = {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
            status.append(Client(service).post("/v1/chat/completions", body).status_code)

    monkeypatch.setattr(server, "run_server", ask)
    result = CliRunner().invoke(app, ["serve", str(folder), *OPTIONS], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return status, result.stderr


def test_chats_may_have_images(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    status, text = served(monkeypatch, folder)
    assert status == [200, 200] and "refused" not in text


def test_without_a_processor_images_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    for name in ("processor_config.json", "preprocessor_config.json"):
        (folder / name).unlink(missing_ok=True)
    status, text = served(monkeypatch, folder)
    assert status == [400, 200]
    assert "images in messages are refused: cannot load" in text
