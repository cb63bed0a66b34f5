"""The code of the pages runs over a tiny model: README.md, then docs/guide.md, then every other page by itself."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import speccompile
from speccompile import pretrained
from speccompile.cli.models import tiny_tokenizer
from speccompile.lowering import backends
from speccompile.modes import registry
from speccompile.sampling import pipeline
from speccompile.serve.app import create_app
from speccompile.serve.options import ServeOptions
from speccompile.serve.service import Service
from support import serving
from support.pages import ROOT, blocks, pages
from support.tiny import tiny_llama

#: The guide continues the README.
CONTINUED = ("README.md", "docs/guide.md")
SERVER, DEFAULT_ADDRESS = "docs/server.md", "http://127.0.0.1:8000"
OTHERS = [page for page in pages() if page not in (*CONTINUED, SERVER) and blocks(page)]
TEMPLATE = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pytest.MonkeyPatch]:
    """``wrap`` compiles nothing, ``pretrained.load`` returns a tiny model, and what blocks register is taken back."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "examples").symlink_to(ROOT / "examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speccompile, "wrap", functools.partial(speccompile.wrap, backend="eager"))
        patch.setattr(registry, "_modes", dict(registry._modes))
        patch.setattr(backends, "_own", dict(backends._own))
        patch.chdir(folder)
        registered, options = dict(pipeline.REGISTERED), dict(pipeline.OPTIONS)
        yield patch
    for table, before in ((pipeline.REGISTERED, registered), (pipeline.OPTIONS, options)):
        table.clear()
        table.update(before)


@pytest.fixture(scope="module")
def readme(patched: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The names that the README's and the guide's blocks leave."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    model = tiny_llama(layers=6, vocab=256, max_positions=2048)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = 0
    patched.setattr(pretrained, "load", lambda name: (model, tokenizer))
    namespace: dict[str, Any] = {"__name__": "readme"}
    for page in CONTINUED:
        run(page, namespace)
    yield namespace
    namespace["spec"].close()


def run(page: str, namespace: dict[str, Any]) -> None:
    for block in blocks(page):
        exec(compile(block, f"<{page}>", "exec"), namespace)


def test_every_block_of_the_readme_and_the_guide_runs(readme: dict[str, Any]) -> None:
    assert sum(len(blocks(page)) for page in CONTINUED) >= 8
    assert torch.is_tensor(readme["ids"])


def test_every_block_of_the_server_page_runs() -> None:
    """Its client calls the address that ``speccompile serve`` has by default: here, a server on a free port."""
    with serving.speculator(serving.model()) as spec:
        app = create_app(Service(spec, serving.tokenizer(), "smollm2", ServeOptions()))
        with serving.listening(app) as address:
            namespace: dict[str, Any] = {"__name__": "server"}
            for block in blocks(SERVER):
                assert DEFAULT_ADDRESS in block or "client" in namespace
                exec(compile(block.replace(DEFAULT_ADDRESS, address), f"<{SERVER}>", "exec"), namespace)


@pytest.mark.parametrize("page", OTHERS)
def test_every_block_of_a_page_runs(page: str, readme: dict[str, Any]) -> None:
    """Each begins with the names that the README leaves: ``model``, ``tokenizer``, ``spec``, and ``ids``."""
    run(page, dict(readme))


def test_links_of_the_readme_lead_to_files_and_headings() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text()):
        path, _, anchor = target.partition("#")
        file = ROOT / path if path else ROOT / "README.md"
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in {heading.lower().replace(" ", "-") for heading in headings}, target


def test_files_that_pages_include_exist() -> None:
    for page in pages():
        text = (ROOT / page).read_text()
        for file in re.findall(r"^```\{(?:literal)?include\} (\S+)$", text, re.MULTILINE):
            assert (ROOT / page).parent.joinpath(file).is_file(), (page, file)


def test_paths_in_pages_exist() -> None:
    """Files of the repository that are named in text."""
    named = r"`((?:benchmarks|docs|examples|heads|speccompile|tests)/[\w/.-]+\.\w+)`"
    for page in pages():
        for file in re.findall(named, (ROOT / page).read_text()):
            assert (ROOT / file).exists(), (page, file)


def test_public_names_in_pages_exist() -> None:
    """``speccompile.x.y`` in code is a name that can be reached."""
    for page in pages():
        for name in re.findall(r"`speccompile((?:\.\w+)+)[`(]", (ROOT / page).read_text()):
            value: Any = speccompile
            for part in name.strip(".").split("."):
                value = getattr(value, part)
            assert value is not None, (page, name)
