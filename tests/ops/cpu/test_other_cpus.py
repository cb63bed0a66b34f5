"""The C++ ops on CPUs with less than this one: the same tests, in a process that does without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch._inductor.cpu_vec_isa import valid_vec_isa_list

from speccompile.errors import Degraded
from speccompile.ops.cpu import library

FILES = ("test_native_ops.py", "test_grouped.py", "test_choose_in_cpp.py", "test_draw_in_cpp.py")
TESTS = [str(Path(__file__).with_name(name)) for name in FILES]
#: Importing torch again would cost more than some of the tests: the same process says what the ops are built for.
PROGRAM = """
import sys, pytest
from speccompile.ops.cpu.library import vector_name
print(vector_name(), flush=True)
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(("capability", "name"), [("avx512", "avx512"), ("avx2", "avx2"), ("default", "plain C++")])
def test_native_ops_on(capability: str, name: str) -> None:
    if capability != "default" and not any(capability in str(isa) for isa in valid_vec_isa_list()):
        pytest.skip(f"this CPU has no {capability}")
    if name == library.vector_name():
        pytest.skip("that is what this CPU is, and the tests beside this file have run on it")
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, "-q", "-p", "no:cacheprovider", *TESTS],
        env=os.environ | {"ATEN_CPU_CAPABILITY": capability},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-1000:]
    assert ran.stdout.splitlines()[0] == name


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what this process has built already, and keep what waits for the real library."""
    for name, nothing in (("_found", {}), ("_loaded", set()), ("_failures", {}), ("_when_loaded", {})):
        monkeypatch.setattr(library, name, nothing)


@pytest.mark.usefixtures("anew")
def test_without_a_compiler_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise RuntimeError

    monkeypatch.setattr(library, "get_cpp_compiler", none)
    assert library.load_cpu_ops() == "no C++ compiler was found"


@pytest.mark.usefixtures("anew")
def test_a_compiler_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(library, "FLAGS", ("--no-such-option",))
    reason = library.load_cpu_ops()
    assert reason is not None and reason.startswith("the C++ compiler failed") and "--no-such-option" in reason
    assert not list(tmp_path.rglob("*.so")) and not list(tmp_path.rglob("*.o"))


@pytest.mark.usefixtures("anew")
def test_the_next_wrap_tries_again_what_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And no earlier call does: a build that fails may take a while."""
    loaded: list[str] = []

    def fail(name: str, isa: object, target: Path) -> None:
        raise RuntimeError(f"{name}.cpp: error: no space")

    monkeypatch.setattr(library, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(library, "_load", loaded.append)
    monkeypatch.setattr(library, "_build", fail)
    reason = "the C++ compiler failed: base.cpp: error: no space"
    assert library.load_cpu_ops("lora") == reason
    monkeypatch.setattr(library, "_build", lambda *of: of[-1].write_bytes(b"whole"))
    assert library.load_cpu_ops() == reason and not loaded
    library.forget_failures()
    assert library.load_cpu_ops("lora") is None
    assert [Path(path).name.partition("-")[0] for path in loaded] == ["base", "lora"]


@pytest.mark.usefixtures("anew")
def test_a_library_that_was_cut_off_is_built_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loaded = []

    def load(path: str) -> None:
        if Path(path).read_bytes() != b"whole":
            raise OSError("file too short")
        loaded.append(path)

    monkeypatch.setattr(library, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(library, "_build", lambda *of: of[-1].write_bytes(b"whole"))
    monkeypatch.setattr(library, "_load", load)
    target = library._library(library.cache_dir() / "cpu-ops", library.BASE)
    target.write_bytes(b"")
    assert library.load_cpu_ops() is None and loaded == [str(target)]


@pytest.mark.usefixtures("anew")
def test_one_that_does_not_load_when_it_is_new_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def load(path: str) -> None:
        raise OSError("undefined symbol: x")

    monkeypatch.setattr(library, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(library, "_build", lambda *of: of[-1].write_bytes(b"whole"))
    monkeypatch.setattr(library, "_load", load)
    answer = "the library of the C++ ops does not load: undefined symbol: x"
    assert library.load_cpu_ops() == answer


@pytest.mark.usefixtures("anew")
def test_a_folder_that_cannot_be_written_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(library, "cache_dir", lambda: tmp_path / "file")
    monkeypatch.setattr(library, "spare_dir", lambda folder, error: None)
    reason = library.load_cpu_ops()
    assert reason is not None and reason.startswith("a cache folder cannot be written")


@pytest.mark.usefixtures("anew")
def test_that_a_folder_cannot_be_written_is_said_at_the_callers_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(library, "cache_dir", lambda: tmp_path / "file")
    monkeypatch.setattr("speccompile.utils.storage._spare", [])
    monkeypatch.setattr(library, "_build", lambda *of: of[-1].write_bytes(b"whole"))
    with pytest.warns(Degraded, match="cannot be written") as warned:
        library.cpu_ops().result()
    assert [warning.filename for warning in warned] == [__file__]


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize("warm", [False, True])
def test_a_read_only_folder_is_used_if_the_library_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, warm: bool
) -> None:
    """And a folder of the process otherwise."""
    loaded: list[str] = []
    monkeypatch.setattr(library, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(library, "spare_dir", lambda folder, error: tmp_path / "spare")
    monkeypatch.setattr(library, "_build", lambda *of: of[-1].write_bytes(b"whole"))
    monkeypatch.setattr(library, "_load", loaded.append)
    if warm:
        library._library(tmp_path / "cache" / "cpu-ops", library.BASE)
    lock = library.FileLock

    def refused(path: str) -> object:
        if path.startswith(str(tmp_path / "cache")):
            raise PermissionError(13, "Permission denied", path)
        return lock(path)

    monkeypatch.setattr(library, "FileLock", refused)
    assert library.load_cpu_ops() is None
    assert [Path(path).parents[1].name for path in loaded] == ["cache" if warm else "spare"]


@pytest.mark.usefixtures("anew")
def test_on_a_full_disk_the_library_is_built_in_another_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The compiler, which is another process, only writes a message."""
    loaded: list[str] = []

    def build(name: str, isa: object, target: Path) -> None:
        if target.is_relative_to(tmp_path / "cache"):
            raise RuntimeError("Command:\ng++\n\nOutput:\nFatal error: ops.o: No space left on device\n")
        target.write_bytes(b"whole")

    monkeypatch.setattr(library, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(library, "spare_dir", lambda folder, error: tmp_path / error.strerror)
    monkeypatch.setattr(library, "_build", build)
    monkeypatch.setattr(library, "_load", loaded.append)
    assert library.load_cpu_ops() is None
    assert [Path(path).parents[1].name for path in loaded] == ["No space left on device"]
