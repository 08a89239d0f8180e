import os
import shutil
import subprocess
from pathlib import Path

import pytest

from canter.utils.code_state import find_repository, store_code_state


def git(root, *args):
    if shutil.which("git") is None:
        pytest.skip("needs git")
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", *identity, *args], cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def make_repository(root):
    (root / "pkg").mkdir(parents=True)
    (root / "pkg" / "a.py").write_text("x = 1\n")
    (root / ".env").write_text("NOTHING=1\n")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "first")
    return root


@pytest.fixture
def repository(tmp_path):
    return make_repository(tmp_path / "walker")


def test_commit_dirty_flag_and_names_are_stored_without_the_content(tmp_path, repository):
    (repository / "pkg" / "a.py").write_text("x = 'changed'\n")
    (repository / "new.txt").write_text("untracked content")
    run = tmp_path / "run"
    paths = store_code_state(run, [repository / "pkg" / "a.py"])
    assert paths == [run / "git" / "walker.diff"]
    text = paths[0].read_text()
    assert f"commit: {git(repository, 'rev-parse', 'HEAD')}\ndirty: yes\n" in text
    assert " M pkg/a.py\n?? new.txt\n" in text
    assert "changed" not in text
    assert "untracked content" not in text


def test_diff_is_stored_with_with_diff(tmp_path, repository):
    (repository / "pkg" / "a.py").write_text("x = 'changed'\n")
    (repository / "new.txt").write_text("untracked content")
    text = store_code_state(tmp_path / "run", [repository], with_diff=True)[0].read_text()
    assert "-x = 1\n+x = 'changed'\n" in text
    assert "untracked content" not in text


def test_clean_repository_is_marked_not_dirty(tmp_path, repository):
    assert "dirty: no\n" in store_code_state(tmp_path / "run", [repository])[0].read_text()


def test_secrets_are_scrubbed_from_the_diff(tmp_path, repository):
    lines = [
        "password = 'k-one'",
        'wandb_api_key: "k-two"',
        "url = 'https://me:k-three@host/x'",
        "AKIA" + "K" * 16,
        "-----BEGIN RSA PRIVATE KEY-----",
        "k-four",
        "-----END RSA PRIVATE KEY-----",
        "y = 'kept'",
        "z = '" + "w" * 600 + "k-five'",
    ]
    (repository / "pkg" / "a.py").write_text("\n".join(lines) + "\n")
    (repository / ".env").write_text("NOTHING=k-six\n")
    text = store_code_state(tmp_path / "run", [repository], with_diff=True)[0].read_text()
    for number in ("one", "two", "three", "four", "five", "six"):
        assert f"k-{number}" not in text
    assert "KKKK" not in text
    assert "+y = 'kept'" in text
    assert text.count("<removed: looks like a secret>") == 7
    assert " M .env" in text


def test_large_diff_is_cut_at_a_megabyte(tmp_path, repository):
    (repository / "pkg" / "a.py").write_text("abcdefghi\n" * 150_000)
    path = store_code_state(tmp_path / "run", [repository], with_diff=True)[0]
    assert 900_000 < path.stat().st_size < 1_100_000
    assert "<cut at 1000000 of " in path.read_text()


def test_existing_file_is_not_overwritten(tmp_path, repository):
    first = store_code_state(tmp_path / "run", [repository])
    (repository / "new.txt").write_text("")
    before = first[0].read_text()
    assert store_code_state(tmp_path / "run", [repository]) == []
    assert first[0].read_text() == before


def test_repositories_of_the_same_name_get_separate_files_once_each(tmp_path):
    a, b = make_repository(tmp_path / "a" / "walker"), make_repository(tmp_path / "b" / "walker")
    paths = store_code_state(tmp_path / "run", [a, a / "pkg", b, b])
    assert len(set(paths)) == len(paths) == 2
    assert paths[0].name == "walker.diff"
    assert paths[1].name.startswith("walker-")


def test_no_repository_is_skipped(tmp_path):
    (tmp_path / "plain").mkdir()
    assert store_code_state(tmp_path / "run", [tmp_path / "plain", tmp_path / "missing" / "x.py", "a\0b"]) == []
    assert not (tmp_path / "run").exists()


def test_installed_package_does_not_reveal_the_project_around_it(repository):
    package = repository / ".venv" / "lib" / "site-packages" / "canter"
    package.mkdir(parents=True)
    assert find_repository(package / "x.py") is None
    assert find_repository(repository / "pkg" / "a.py") == repository


def test_no_git_program_is_skipped(tmp_path, repository, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert store_code_state(tmp_path / "run", [repository]) == []


def test_slow_or_broken_git_never_fails_the_run(tmp_path, repository, monkeypatch):
    fake = tmp_path / "bin" / "git"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\nexec sleep 5\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    monkeypatch.setattr("canter.utils.code_state._GIT_TIMEOUT_S", 0.1)
    assert store_code_state(tmp_path / "run", [repository]) == []
    fake.write_text("#!/bin/sh\nexit 128\n")
    assert store_code_state(tmp_path / "run", [repository]) == []


def test_repository_without_a_commit_is_stored(tmp_path):
    root = tmp_path / "fresh"
    root.mkdir()
    git(root, "init", "-q")
    (root / "a.py").write_text("")
    text = store_code_state(tmp_path / "run", [root], with_diff=True)[0].read_text()
    assert "commit: none yet\ndirty: yes\n" in text


def test_repository_settings_cannot_run_programs(tmp_path, repository):
    git(repository, "config", "core.fsmonitor", f"touch {tmp_path}/ran; false")
    git(repository, "config", "diff.external", f"touch {tmp_path}/ran; true")
    (repository / "pkg" / "a.py").write_text("x = 2\n")
    assert "+x = 2" in store_code_state(tmp_path / "run", [repository], with_diff=True)[0].read_text()
    assert not (tmp_path / "ran").exists()


def test_git_leaves_no_lock_and_does_not_touch_the_index(tmp_path, repository):
    index = repository / ".git" / "index"
    os.utime(repository / "pkg" / "a.py", (1e9, 1e9))  # stale, so that a plain `git status` would rewrite the index
    before = index.read_bytes()
    store_code_state(tmp_path / "run", [Path(repository)])
    assert index.read_bytes() == before
