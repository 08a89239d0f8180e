"""Mutation testing: every mutant in `table.txt` breaks one line of canter, and the tests named beside it must notice.

    python tests/mutants/run.py [--jobs 2] [--only PATTERN] [--list]

The table has the mutants of each file of `src/canter`: what goes wrong, the text that is replaced (-), the text that
replaces it (+) and the tests that must fail (?).

    algorithms/ppo.py
      entropy is minimised
      - losses["entropy"] = -batch.mean
      + losses["entropy"] = batch.mean
      ? algorithms/test_ppo.py::test_the_entropy_term_is_minus_the_mean_entropy

A mutant is applied to a copy of `src/canter`; the working tree is never changed. The named tests must pass on the
unchanged code and fail on the mutant. A mutant that survives, that no longer fits the source, or whose tests give no
verdict makes the exit status 1.
"""

import argparse
import compileall
import gc
import importlib.util
import itertools
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple, TypeVar

import pytest

T = TypeVar("T")
R = TypeVar("R")
ROOT = Path(__file__).parents[2]
KILLED, SURVIVED = "killed", "SURVIVED"
TIME_LIMIT_S = 300
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["gymnasium", "pytest", "rich", "tensorboard", "torch._dynamo", "tyro", "yaml"])
# By pytest's exit status; any other one is an error in the selection of tests.
VERDICTS: dict[int | None, str] = {0: SURVIVED, 1: KILLED}


class NotApplicableError(ValueError):
    """A mutant does not fit the source."""


class Mutant(NamedTuple):
    """One change of the source, and the tests that must notice it."""

    file: str
    reason: str
    old: str
    new: str
    tests: tuple[str, ...]


def read_table(text: str) -> list[Mutant]:
    """The mutants of a table."""
    mutants = []
    for block in re.split(r"\n(?=\S)", text.strip()):
        file, *lines = block.splitlines()
        parts: list[dict[str, list[str]]] = []
        for line in filter(None, lines):
            kind = line[2:4]
            if kind not in ("- ", "+ ", "? "):
                parts.append({"reason": [line.strip()], "- ": [], "+ ": [], "? ": []})
            else:
                parts[-1][kind].append(line[4:])
        for part in parts:
            reason, old, new = ("\n".join(part[name]) for name in ("reason", "- ", "+ "))
            mutants.append(Mutant(file, reason, old, new, tuple(part["? "])))
    return mutants


MUTANTS = read_table(Path(__file__).with_name("table.txt").read_text(encoding="utf-8"))


def mutated(mutant: Mutant, source: str) -> str:
    """The source with the mutant applied; the text to replace must occur exactly once, and the result must compile."""
    found = source.count(mutant.old)
    if found != 1:
        raise NotApplicableError(f"its text occurs {found} times in {mutant.file}, not once: {mutant.old!r}")
    changed = source.replace(mutant.old, mutant.new)
    try:
        compile(changed, mutant.file, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise NotApplicableError(f"{mutant.file} does not compile with it: {error}") from error
    return changed


def copy_package(root: Path, folder: Path) -> Path:
    """Copy `src/canter` with its bytecode; returns the package of the copy."""
    package = folder / "canter"
    shutil.copytree(root / "src/canter", package, ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(package, quiet=2)
    return package


def run_tests(tests: Sequence[str], root: Path, package: Path) -> tuple[int | None, str]:
    """Run tests against a copy of the package; returns pytest's exit status, None after the time limit, and its output.

    Every run is a process forked from one that has imported torch, which takes longer than most of the tests.
    """
    output = package.parent / "output.txt"
    process = FORKS.Process(target=call_pytest, args=(root, package, [f"tests/{test}" for test in tests], output))
    process.start()
    process.join(TIME_LIMIT_S)
    if process.exitcode is None:
        process.kill()
        process.join()
        return None, f"{' '.join(tests)} did not end within {TIME_LIMIT_S} s"
    return process.exitcode, output.read_text(encoding="utf-8")


def call_pytest(root: Path, package: Path, tests: list[str], output: Path) -> None:
    """Exit with the status of pytest, whose output goes to a file.

    No bytecode is written: Python recognises a changed file by its size and its second, which two mutants may share.
    """
    with open(output, "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    assert "canter" not in sys.modules
    os.chdir(root)
    own = {"PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    os.environ |= own
    gc.freeze()  # pytest collects twice, and torch has many objects
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(package.parent))
    options = ["-x", "-q", "-m", "not gpu", "-p", "no:cacheprovider", "--assert=plain", "--tb=line"]
    sys.exit(pytest.main([*options, *tests]))


def try_mutant(mutant: Mutant, root: Path, package: Path) -> tuple[str, str]:
    """Apply a mutant to a copy of the package and run its tests; returns a verdict and its explanation."""
    path = package / mutant.file
    original = path.read_text(encoding="utf-8")
    try:
        path.write_text(mutated(mutant, original), encoding="utf-8")
        Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)
        status, output = run_tests(mutant.tests, root, package)
    except NotApplicableError as error:
        return "not applicable", str(error)
    finally:
        path.write_text(original, encoding="utf-8")
    failed = re.search(r"^FAILED tests/(\S+)", output, re.MULTILINE)
    explanation = failed[1] if failed else " ".join(mutant.tests)
    return VERDICTS.get(status, "no verdict"), explanation if status in VERDICTS else output


def in_copies(fn: Callable[[T, Path, Path], R], items: Sequence[T], root: Path, jobs: int) -> Iterator[tuple[T, R]]:
    """Every item and the result of `fn(item, root, package)`, `jobs` at a time, each with a copy of the package."""
    with tempfile.TemporaryDirectory(prefix="canter-mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        packages: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            packages.put(copy_package(root, Path(folder) / str(number)))

        def call(item: T) -> R:
            package = packages.get()
            try:
                return fn(item, root, package)
            finally:
                packages.put(package)

        yield from zip(items, pool.map(call, items), strict=True)


def try_all(mutants: Sequence[Mutant], root: Path = ROOT, jobs: int = 2) -> dict[Mutant, str]:
    """Try every mutant, with a line about each; returns their verdicts."""
    verdicts = {}
    for mutant, (verdict, text) in in_copies(try_mutant, mutants, root, jobs):
        verdicts[mutant] = verdict
        print(f"[{len(verdicts)}/{len(mutants)}] {verdict}: {mutant.file}: {mutant.reason} ({text})", flush=True)
    return verdicts


def passes_unchanged(mutants: Sequence[Mutant], root: Path = ROOT, jobs: int = 2) -> bool:
    """Whether the tests of all mutants pass on the unchanged code; each runs once."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    by_file = [tuple(group) for _, group in itertools.groupby(tests, key=lambda test: test.partition("::")[0])]
    print(f"checking that {len(tests)} tests pass on the unchanged code", flush=True)
    results = [result for _, result in in_copies(run_tests, by_file, root, jobs)]
    for status, output in results:
        if status != 0:
            print(output)
    return all(status == 0 for status, _ in results)


def main() -> int:
    """Try the mutants of the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--only", default="", help="regular expression of the files and reasons to try")
    parser.add_argument("--list", action="store_true", help="list the mutants and try none")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    mutants = [mutant for mutant in MUTANTS if re.search(args.only, f"{mutant.file}: {mutant.reason}")]
    if args.list:
        print("\n".join(f"{mutant.file}: {mutant.reason}" for mutant in mutants))
        return 0
    if not passes_unchanged(mutants, jobs=args.jobs):
        return 1
    verdicts = try_all(mutants, jobs=args.jobs)
    counts = {verdict: list(verdicts.values()).count(verdict) for verdict in dict.fromkeys(verdicts.values())}
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return int(set(counts) != {KILLED})


if __name__ == "__main__":
    sys.exit(main())
