"""docs/reliability.md names a test for every case; the tests exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_named_in_the_table_exists():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")))
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 40
    assert named - set(re.findall(r"def (test_\w+)\(", source)) == set()
