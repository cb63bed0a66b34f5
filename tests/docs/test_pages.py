"""The code of the pages runs over a tiny model: README.md, the first page of the guides, then every other page."""

from __future__ import annotations

import functools
import pydoc
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import speccompile
from speccompile import pretrained
from speccompile.cli.models import tiny_tokenizer
from speccompile.lowering import backends
from speccompile.modes import registry
from speccompile.quantized import GroupedWeight, QuantizedWeights
from speccompile.sampling import pipeline
from speccompile.serve.options import ServeOptions
from speccompile.serve.service import Service
from support import serving
from support.pages import ROOT, blocks, pages
from support.tiny import tiny_llama

#: These leave the names that every other page begins with.
CONTINUED = ("README.md", "docs/guides/index.md")
#: Pages whose example continues that of another page.
CONTINUES = {"docs/guides/online_learning.md": "docs/guides/training.md"}
#: tests/docs/test_publishing.py runs it, by processes.
BY_PROCESSES = "docs/guides/publishing.md"
SERVER, DEFAULT_ADDRESS = "docs/server.md", "http://127.0.0.1:8000"
OTHERS = [
    (*filter(None, [CONTINUES.get(page)]), page)
    for page in pages()
    if page not in (*CONTINUED, SERVER, BY_PROCESSES, *CONTINUES.values()) and blocks(page)
]
TEMPLATE = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pytest.MonkeyPatch]:
    """``wrap`` compiles nothing, and ``pretrained.load`` returns a tiny model."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "examples").symlink_to(ROOT / "examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speccompile, "wrap", functools.partial(speccompile.wrap, backend="eager"))
        patch.chdir(folder)
        yield patch


@pytest.fixture(autouse=True)
def what_blocks_register_is_removed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_modes", dict(registry._modes))
    monkeypatch.setattr(backends, "_own", dict(backends._own))
    registered, options = dict(pipeline.REGISTERED), dict(pipeline.OPTIONS)
    yield
    for table, before in ((pipeline.REGISTERED, registered), (pipeline.OPTIONS, options)):
        table.clear()
        table.update(before)


@pytest.fixture(scope="module")
def readme(patched: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The names that the blocks of the README and of the guides' first page leave."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    model = tiny_llama(layers=6, vocab=256, max_positions=2048)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = 0
    patched.setattr(pretrained, "load", lambda name: (model, tokenizer))
    patched.setattr(pretrained, "load_quantized", lambda path: (model, quantized_weights(model)))
    namespace: dict[str, Any] = {"__name__": "readme"}
    for page in CONTINUED:
        run(page, namespace)
    yield namespace
    namespace["spec"].close()


def quantized_weights(model: PreTrainedModel) -> QuantizedWeights:
    name = "model.layers.0.self_attn.q_proj.weight"
    values = torch.zeros(model.get_parameter(name).shape, dtype=torch.int8)
    weight = GroupedWeight(values, 8, torch.ones(len(values), 1), None, values.shape[1])
    return QuantizedWeights({name: weight}, "GGUF Q8_0")


def run(page: str, namespace: dict[str, Any]) -> None:
    for block in blocks(page):
        exec(compile(block, f"<{page}>", "exec"), namespace)


def test_every_block_of_the_readme_runs(readme: dict[str, Any]) -> None:
    assert len(blocks("README.md")) >= 2
    assert torch.is_tensor(readme["ids"])


def test_every_guide_begins_with_an_example() -> None:
    """Code comes before the first section; a page of steps has it in the first one."""
    for page in pages():
        if page.startswith("docs/guides/") and page != "docs/guides/index.md":
            beginning = (ROOT / page).read_text().split("\n## ")
            first = beginning[1] if page == "docs/guides/training.md" else beginning[0]
            assert re.search(r"^(```python| {4}\S)", first, re.MULTILINE), page


def test_every_block_of_the_server_page_runs() -> None:
    """Its client calls the address that ``speccompile serve`` has by default: here, a server on a free port."""
    with serving.speculator(serving.model()) as spec:
        service = Service(spec, serving.tokenizer(), "smollm2", ServeOptions())
        with serving.listening(service) as address:
            namespace: dict[str, Any] = {"__name__": "server"}
            for block in blocks(SERVER):
                assert DEFAULT_ADDRESS in block or "client" in namespace
                exec(compile(block.replace(DEFAULT_ADDRESS, address), f"<{SERVER}>", "exec"), namespace)


@pytest.mark.parametrize("names", OTHERS, ids=lambda names: names[-1])
def test_every_block_of_a_page_runs(names: tuple[str, ...], readme: dict[str, Any]) -> None:
    """Each begins with the names that the README leaves: ``model``, ``tokenizer``, ``spec``, and ``ids``."""
    namespace = dict(readme)
    for page in names:
        run(page, namespace)


def slugs(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    without_code = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", without_code, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(
    "page", ["README.md", "benchmarks/README.md", "heads/smollm2-135m-instruct/README.md", *pages()]
)
def test_links_lead_to_files_and_headings_as_on_github(page: str) -> None:
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if "://" not in target:
            file = (ROOT / page).parent / path if path else ROOT / page
            assert file.exists(), target
            assert not anchor or anchor in slugs(file.read_text()), target


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


def test_files_of_the_package_that_pages_name_exist() -> None:
    """Without the package's own folder, as ``ops/define.py``."""
    package, folders = (
        ROOT / "speccompile",
        "|".join(path.name for path in (ROOT / "speccompile").iterdir() if path.is_dir()),
    )
    for page in ("CONTRIBUTING.md", *pages()):
        for file in re.findall(rf"`((?:{folders})/[\w/.-]+\.\w+)`", (ROOT / page).read_text()):
            assert (package / file).exists(), (page, file)


def test_pages_that_the_code_names_exist() -> None:
    for folder in ("benchmarks", "examples", "speccompile"):
        for file in (ROOT / folder).rglob("*.py"):
            for page in re.findall(r"docs/[\w/.-]+\.md", file.read_text()):
                assert (ROOT / page).is_file(), (file, page)


@pytest.mark.parametrize(
    ("page", "name", "module"),
    [
        ("docs/reference/options.md", "wrap options", "speccompile.compiler.options.WrapOptions"),
        ("docs/reference/options.md", "submit options", "speccompile.runtime.request_options.SubmitOptions"),
        ("docs/reference/options.md", "text options", "speccompile.training.text_options.TextOptions"),
        ("docs/reference/options.md", "train options", "speccompile.training.train_options.TrainOptions"),
        ("docs/reference/options.md", "online options", "speccompile.training.online.OnlineTraining"),
        ("docs/guides/ranks.md", "rank costs", "speccompile.tools.rank_costs"),
    ],
)
def test_pages_have_the_tables_that_modules_print(page: str, name: str, module: str) -> None:
    inside = (ROOT / page).read_text().split(f"<!-- {name} -->")[1].split(f"<!-- end of {name} -->")[0]
    assert inside.strip() == pydoc.locate(module).table(), f"run python -m {module.rpartition('.')[0]}"  # type: ignore


def test_public_names_in_pages_exist() -> None:
    """``speccompile.x.y`` in code is a name that can be reached."""
    for page in pages():
        for name in re.findall(r"`speccompile((?:\.\w+)+)[`(]", (ROOT / page).read_text()):
            assert pydoc.locate(f"speccompile{name}") is not None, (page, name)
