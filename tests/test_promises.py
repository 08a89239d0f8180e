"""Every test that SECURITY.md and the reliability page name exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


@pytest.mark.parametrize("page", ["SECURITY.md", "docs/reliability.md"])
def test_every_named_test_exists(page):
    found = NAMED.findall((ROOT / page).read_text(encoding="utf-8"))
    assert len(found) > 20
    for file, name in found:
        path = ROOT / "tests" / file
        assert path.is_file(), f"{page} names {file}"
        assert f"def {name}(" in path.read_text(encoding="utf-8"), f"{page} names {file}::{name}"


def test_every_promise_about_security_names_a_test():
    promises = re.split(r"\n- ", (ROOT / "SECURITY.md").read_text(encoding="utf-8").partition("Not promised")[0])[1:]
    assert [text[:60] for text in promises if not NAMED.search(text)] == []
