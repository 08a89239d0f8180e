"""The table of mutants fits the source and the tests, and the tool tells killed mutants from survivors."""

import multiprocessing
import re
from collections import Counter

import pytest
import run
from run import KILLED, MUTANTS, ROOT, SURVIVED, Mutant, NotApplicableError, mutated, read_table


@pytest.mark.parametrize("file", sorted({mutant.file for mutant in MUTANTS}))
def test_every_mutant_fits_the_source_and_compiles(file):
    source = (ROOT / "src/canter" / file).read_text(encoding="utf-8")
    for mutant in MUTANTS:
        if mutant.file == file:
            assert mutated(mutant, source) != source, mutant


def test_every_named_test_exists():
    for test in sorted({test for mutant in MUTANTS for test in mutant.tests}):
        file, _, name = test.partition("[")[0].partition("::")
        assert f"\ndef {name}" in (ROOT / "tests" / file).read_text(encoding="utf-8"), test


def test_the_table_covers_every_part_and_names_each_mutant_once():
    assert len(MUTANTS) >= 80
    assert [reason for reason, count in Counter(f"{m.file} {m.reason}" for m in MUTANTS).items() if count > 1] == []
    parts = {re.split("[/.]", mutant.file)[0] for mutant in MUTANTS}
    assert parts >= {"algorithms", "storage", "modules", "envs", "runners", "utils", "execution"}


def test_text_that_is_absent_repeated_or_breaks_the_syntax_does_not_fit():
    source = "a = 1\nb = 1\n"
    assert mutated(Mutant("f.py", "reason", "a = 1", "a = 2", ()), source) == "a = 2\nb = 1\n"
    for old, new, message in [("c", "d", "0 times"), ("1", "2", "2 times"), ("a = 1", "a =", "does not compile")]:
        with pytest.raises(NotApplicableError, match=message):
            mutated(Mutant("f.py", "reason", old, new, ()), source)


def test_a_table_has_several_mutants_of_a_file_and_lines_with_their_indentation():
    table = (
        "a.py\n  first\n  -   x\n  - y\n  + z\n  ? t.py::one\n  ? t.py::two\n\n  second\n  - u\n  ? t.py::one\n\nb.py\n"
    )
    assert read_table(table + "  third\n  - v\n  + w\n  ? t.py::two\n") == [
        Mutant("a.py", "first", "  x\ny", "z", ("t.py::one", "t.py::two")),
        Mutant("a.py", "second", "u", "", ("t.py::one",)),
        Mutant("b.py", "third", "v", "w", ("t.py::two",)),
    ]


@pytest.fixture
def project(tmp_path):
    """A project with one function and two tests, of which one is too weak."""
    (tmp_path / "src/canter").mkdir(parents=True)
    (tmp_path / "src/canter/__init__.py").touch()
    (tmp_path / "src/canter/numbers.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "tests").mkdir()
    lines = ["from canter.numbers import double", "def test_strong():", "    assert double(3) == 6"]
    lines += ["def test_weak():", "    assert double(0) == 0", "def test_wrong():", "    assert double(3) == 7"]
    (tmp_path / "tests/test_numbers.py").write_text("\n".join(lines))
    return tmp_path


def test_a_mutant_is_killed_by_a_test_that_fails_and_survives_one_that_passes(project, monkeypatch, capfd):
    monkeypatch.setattr(run, "FORKS", multiprocessing.get_context("spawn"))  # nothing here needs torch

    def mutant(test, old="2 * x"):
        return Mutant("numbers.py", f"{test} {old}", old, "3 * x", (f"test_numbers.py::{test}",))

    strong, weak, gone, unknown = mutant("test_strong"), mutant("test_weak"), mutant("test_weak", "4"), mutant("test_x")
    before = (project / "src/canter/numbers.py").read_text()
    verdicts = run.try_all([strong, weak, gone, unknown], project)
    assert list(verdicts.values()) == [KILLED, SURVIVED, "not applicable", "no verdict"]
    assert (project / "src/canter/numbers.py").read_text() == before
    assert "occurs 0 times in numbers.py" in capfd.readouterr().out
    assert run.passes_unchanged([strong, weak], project)
    assert not run.passes_unchanged([mutant("test_wrong")], project)
