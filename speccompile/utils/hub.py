"""Checks on the hub before a model is loaded. Each needs one request, instead of half a minute of retries."""

from __future__ import annotations

import contextlib
import difflib
import os
from pathlib import Path

from huggingface_hub import get_hf_file_metadata, hf_hub_url, model_info, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, FileMetadataError, HfHubHTTPError, HFValidationError, HTTPError

from speccompile.errors import PretrainedError, error_line
from speccompile.utils.model_names import SMOLLM2, check_mistral_common, has_tokenizer, is_repository, no_tokenizer

#: The config file in PEFT's folders and repositories.
ADAPTER_CONFIG = "adapter_config.json"
_FILE = "config.json"
#: A tokenizer in the cache has at least one of these files.
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", _FILE)
_SECONDS = 10.0


def cached_folder(name_or_path: str) -> Path | None:
    """Return a local folder with a config, or the folder of a hub id in the cache of huggingface_hub; None if neither
    exists."""
    if (Path(name_or_path) / _FILE).is_file():
        return Path(name_or_path)
    with contextlib.suppress(HFValidationError):
        config = try_to_load_from_cache(name_or_path, _FILE)
        return Path(config).parent if isinstance(config, str) else None
    return None


def is_on_hub(repo_id: str, file: str) -> bool:
    """Whether the hub has a file. False if the hub cannot be reached."""
    try:
        get_hf_file_metadata(hf_hub_url(repo_id, file))
    except (HfHubHTTPError, EntryNotFoundError, HTTPError, OSError):
        return False
    except FileMetadataError:
        # The hub has answered.
        return True
    return True


def check_reachable(repo_id: str, *files: str) -> None:
    """Check that ``repo_id`` is in the cache of huggingface_hub, or that the hub answers.

    Args:
        files: at least one of them is in the cache if the repository is. Without any, its config.

    Raises:
        PretrainedError: neither is true.
    """
    if (reason := unavailable(repo_id, *(files or (_FILE,)))) is not None:
        meant = difflib.get_close_matches(repo_id.lower(), [SMOLLM2])
        advice = f" Did you mean {SMOLLM2!r}?" if meant else ""
        raise PretrainedError(f"cannot load {repo_id!r}: {reason}.{advice}", source=repo_id, reason=reason)


def unavailable(source: str, *files: str) -> str | None:
    """Return why ``source`` is neither a folder nor a repository with one of ``files``; None if it is one of them. This
    sends one request."""
    if os.path.isdir(source):
        return None
    if not is_repository(source):
        return "no such folder exists"
    if (error := _unreachable(source, *files)) is None:
        return None
    reason = "no such folder exists, it is not in the cache of huggingface_hub, and the hub cannot be reached"
    return f"{reason} ({error_line(error)})"


def _unreachable(repo_id: str, *files: str) -> Exception | None:
    """Return the error of the request if the cache of huggingface_hub has none of ``files`` and the hub does not
    answer; else None. It is not checked whether the hub has them. huggingface_hub waits longer for a slow answer, so a
    timeout is not an error here."""
    if any(isinstance(try_to_load_from_cache(repo_id, file), str) for file in files):
        return None
    try:
        get_hf_file_metadata(hf_hub_url(repo_id, files[0]))
    except (HfHubHTTPError, EntryNotFoundError, FileMetadataError):
        # The hub has answered; the library that loads reports what is wrong with the repository.
        return None
    except (HTTPError, OSError) as error:
        return None if _is_timeout(error) else error
    return None


def check_hub_tokenizer(repo_id: str) -> None:
    """Check that ``repo_id`` has a tokenizer: in the cache of huggingface_hub, or else on the hub. transformers would
    build an empty tokenizer for some families without one. Nothing is checked if neither has a list of its files.

    Raises:
        PretrainedError: the repository has no tokenizer, or mistral-common is not installed for it.
    """
    config = try_to_load_from_cache(repo_id, _FILE)
    files = [path.name for path in Path(config).parent.iterdir()] if isinstance(config, str) else []
    if not has_tokenizer(files):
        with contextlib.suppress(HfHubHTTPError, HTTPError, OSError):
            names = [file.rfilename for file in model_info(repo_id, timeout=_SECONDS).siblings or []]
            files = [name for name in names if "/" not in name]
    if files and not has_tokenizer(files):
        advice = "Save the model and its tokenizer into one folder with save_pretrained(FOLDER), and give that folder."
        raise no_tokenizer(repo_id, advice)
    check_mistral_common(repo_id, files)


def _is_timeout(error: Exception) -> bool:
    # Compared by name, since versions of huggingface_hub use different HTTP clients.
    return any(kind.__name__ == "TimeoutException" for kind in type(error).__mro__)
