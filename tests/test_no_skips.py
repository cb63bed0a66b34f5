"""The parts of CI that need a browser, Ray or client libraries fail where they are missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[1]
SKIPS = {
    "test": "def test_it():\n    pytest.skip('gone')\n",
    "fixture": "@pytest.fixture\ndef window():\n    pytest.skip('gone')\n\ndef test_it(window):\n    pass\n",
    "file": "pytest.importorskip('no_such_package')\n\ndef test_it():\n    pass\n",
}


@pytest.mark.parametrize("place", SKIPS)
def test_a_skip_is_a_failure(pytester: pytest.Pytester, place: str) -> None:
    pytester.makepyfile(test_other="def test_other():\n    pass\n", test_skipped=f"import pytest\n\n{SKIPS[place]}")
    options = ("-p", "support.no_skips", "-p", "no:cacheprovider")
    assert pytester.runpytest_inprocess(*options).ret == pytest.ExitCode.OK
    assert pytester.runpytest_inprocess(*options, "--no-skips").ret != pytest.ExitCode.OK


def test_all_files_with_a_browser_are_run_with_one() -> None:
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", "")
    (listed,) = re.findall(r"^BROWSER_TESTS := (.*)$", makefile, re.MULTILINE)
    using = [
        path
        for path in ROOT.glob("tests/**/test_*.py")
        if re.search(r"^from support\.(browser|pictures) ", path.read_text(), re.MULTILINE)
    ]
    assert sorted(listed.split()) == sorted(str(path.relative_to(ROOT)) for path in using)
