"""Kinds of model names: ``smollm2``, a folder, a GGUF file or a hub id; and names of model families. This module
imports neither torch nor transformers."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from speccompile.errors import PretrainedError, UnknownFamily

SMOLLM2 = "smollm2"
TINY = "tiny"
_AUTO = "models/auto"

MODEL_HELP = f"{SMOLLM2}, {TINY} (random weights), a local folder, a GGUF file or a hub id."

# "name" or "organisation/name", as huggingface_hub accepts them.
_HUB_ID = re.compile(r"(?!.*(--|\.\.))(\b[\w.-]+\b/)?\b[\w.-]{1,96}\b(?<!\.git)")


def is_gguf(name: str) -> bool:
    """Whether ``name`` is the name of a GGUF file."""
    return name.lower().endswith(".gguf")


def is_hub_id(name: str) -> bool:
    """Whether ``name`` can only be a hub id: it is neither a folder, nor a path, nor a known name."""
    return name not in (SMOLLM2, TINY) and not os.path.isdir(name) and not is_gguf(name)


def is_repository(name: str) -> bool:
    """Whether huggingface_hub accepts ``name`` as the name of a repository."""
    return _HUB_ID.fullmatch(name) is not None


def check_model_name(name: str) -> None:
    """Check that a local path exists. It is not checked whether the hub has an id.

    Raises:
        PretrainedError: ``name`` is a path, and no such folder or file exists.
    """
    if is_gguf(name):
        if not Path(name).is_file():
            raise PretrainedError(f"no such file: {name!r}.", source=name, reason="no such file")
    elif is_hub_id(name) and not is_repository(name):
        if Path(name).is_file():
            message = f"{name!r} is a file; give the folder of a checkpoint, or a GGUF file (*.gguf)."
            raise PretrainedError(message, source=name, reason="it is a file")
        raise PretrainedError(f"no such folder: {name!r}.", source=name, reason="no such folder")


#: The tokenizer file of mistral-common.
_TEKKEN = "tekken.json"
# Names of the files that `save_pretrained` and the tokenizer classes of transformers write.
_TOKENIZER_FILES = (
    *("tokenizer*", "vocab*", "*.model", "*.spm", "*.tokenizer", "*.tiktoken"),
    *("merges.txt", "bpe.codes", "dict.txt", _TEKKEN),
)


def check_tokenizer(name: str) -> None:
    """Check that the folder of a checkpoint has a tokenizer, and that its package is installed.

    Raises:
        PretrainedError: the folder has none, or mistral-common is not installed.
    """
    folder = Path(name)
    if name in (SMOLLM2, TINY) or not (folder / "config.json").is_file():
        return
    files = [path.name for path in folder.iterdir()]
    if not has_tokenizer(files):
        load = f"transformers.AutoTokenizer.from_pretrained(HUB_ID).save_pretrained({name!r})"
        raise no_tokenizer(name, f"Save the model's tokenizer into that folder: {load}.")
    check_mistral_common(name, files)


def check_mistral_common(name: str, files: Iterable[str]) -> None:
    """Check that mistral-common is installed if a checkpoint's only tokenizer is ``tekken.json``. Without it
    transformers converts the file to a tokenizer that adds no BOS token and has no chat template.

    Raises:
        PretrainedError: it is not installed.
    """
    tokenizers = {file for file in files if has_tokenizer([file])} - {"tokenizer_config.json"}
    if tokenizers == {_TEKKEN} and find_spec("mistral_common") is None:
        message = (
            f"{name!r} has only {_TEKKEN} as its tokenizer, which mistral-common reads: pip install mistral-common."
        )
        raise PretrainedError(message, source=name, reason="it needs mistral-common")


def has_tokenizer(files: Iterable[str]) -> bool:
    """Whether a tokenizer is among the files of a checkpoint."""
    return any(fnmatchcase(file, pattern) for file in files for pattern in _TOKENIZER_FILES)


def no_tokenizer(name: str, advice: str) -> PretrainedError:
    """The error for a model without a tokenizer."""
    message = f"{name!r} has no tokenizer, and text needs one. {advice}"
    return PretrainedError(message, source=name, reason="it has no tokenizer")


_CAUSAL_LMS = re.compile(r"^MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = (.*?)^\)", re.MULTILINE | re.DOTALL)


def check_families(names: Collection[str]) -> None:
    """Check names of families against the source of the installed transformers, since its import needs seconds.

    A family without a causal LM passes. Every name passes if the source has another form than expected. For these,
    :func:`speccompile.tools.families.find_families` decides.

    Raises:
        UnknownFamily: transformers has no family of that name.
    """
    spec = find_spec("transformers")
    folders = spec.submodule_search_locations if spec is not None else None
    sources = {path.name: path.read_text() for folder in folders or () for path in Path(folder, _AUTO).glob("*.py")}
    section = _CAUSAL_LMS.search(sources.get("modeling_auto.py", ""))
    if section is None:
        return
    named = {name for source in sources.values() for name in re.findall(r'"([^"\n]+)"', source)}
    if unknown := [name for name in names if name not in named]:
        raise unknown_family(unknown, re.findall(r'\("([^"]+)",', section[1]))


def unknown_family(names: Collection[str], known: Collection[str]) -> UnknownFamily:
    """Return the error for ``names``, with the similar names among ``known``."""
    close = {name: difflib.get_close_matches(name.lower().replace("-", "_"), known) for name in names}
    meant = [f"{', '.join(matches)} (for {name})" for name, matches in close.items() if matches]
    return UnknownFamily(
        version=version("transformers"),
        names=", ".join(repr(name) for name in names),
        advice=f"Close: {'; '.join(meant)}." if meant else "A family is named by the model_type of its config.",
    )
