"""docs/reliability.md and SECURITY.md name a test for every case and promise; the tests exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tests():
    """The names of the tests by file, relative to this folder's parent."""
    folder = ROOT / "tests"
    texts = {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in folder.rglob("test_*.py")}
    return {name: set(re.findall(r"def (test_\w+)\(", text)) for name, text in texts.items()}


@pytest.mark.parametrize("page", ["docs/reliability.md", "SECURITY.md"])
def test_every_test_that_is_named_exists(tests, page):
    named = re.findall(r"`(?:([\w/]+\.py)::)?(test_\w+)`", (ROOT / page).read_text(encoding="utf-8"))
    everywhere = set().union(*tests.values())
    assert len(named) > 25
    assert [name for file, name in named if name not in (tests.get(file, ()) if file else everywhere)] == []


def test_every_case_has_a_test():
    lines = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ") and line.count("|") == 4 and line[:8] != "| case |"]
    assert len(rows) >= 88  # a case that is taken away is missed
    assert [row for row in rows if "test_" not in row.split("|")[3]] == []
