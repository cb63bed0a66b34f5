"""The code of README.md and docs/guide.md runs, one block after another, over a tiny model."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest

import speccompile
from speccompile import pretrained
from speccompile.cli.models import tiny_tokenizer
from support.tiny import tiny_llama

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/guide.md")
TEMPLATE = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def test_every_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    model = tiny_llama(layers=6, vocab=256, max_positions=2048)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = 0
    monkeypatch.setattr(pretrained, "load", lambda name: (model, tokenizer))
    monkeypatch.setattr(speccompile, "wrap", functools.partial(speccompile.wrap, backend="eager"))
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "readme"}
    count = 0
    for page in PAGES:
        for block in blocks(page):
            exec(compile(block, f"<{page}>", "exec"), namespace)
            count += 1
    assert count >= 8
    namespace["spec"].close()


def test_links_of_the_pages_lead_to_files_and_headings() -> None:
    for page in PAGES:
        folder = (ROOT / page).parent
        for target in re.findall(r"\]\(([^)]+)\)", (ROOT / page).read_text()):
            path, _, anchor = target.partition("#")
            file = folder / path if path else ROOT / page
            assert file.exists(), (page, target)
            if anchor:
                headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
                assert anchor in {heading.lower().replace(" ", "-") for heading in headings}, (page, target)
