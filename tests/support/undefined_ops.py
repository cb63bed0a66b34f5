"""``python -m support.undefined_ops FOLDER`` prints the ops of this package that a module of the folder calls but does
not define, imported in its own process."""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch

# What takes longest to import. It defines no op.
import speccompile.utils.torch_private  # noqa: F401


def in_child(run: Callable[[], None]) -> None:
    child = os.fork()
    if not child:
        run()
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(1)


def module_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts)


def check(path: Path) -> None:
    importlib.import_module(module_of(path))
    for name in sorted(called(path)):
        if not hasattr(torch.ops.speccompile, name):
            print(f"{path} calls {name}")


def called(path: Path) -> set[str]:
    return set(re.findall(r"torch\.ops\.speccompile\.(\w+)", path.read_text()))


def check_all(folder: Path, paths: list[Path]) -> None:
    # An import of a module imports its package first.
    importlib.import_module(module_of(folder))
    for path in paths:
        in_child(functools.partial(check, path))


if __name__ == "__main__":
    found = sorted(path for path in Path("speccompile", sys.argv[1]).rglob("*.py") if called(path))
    for folder, paths in itertools.groupby(found, lambda path: path.parent):
        in_child(functools.partial(check_all, folder, list(paths)))
