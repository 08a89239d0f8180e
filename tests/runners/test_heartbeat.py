"""Each of two processes notices whether the other is there."""

import os
import time
import warnings

import pytest

from canter.runners import heartbeat
from canter.runners.heartbeat import Heartbeat


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(heartbeat, "GONE_SECONDS", 30.0)


def age(path, seconds):
    os.utime(path, (time.time() - seconds,) * 2)


def test_a_file_is_renewed_while_its_process_lives_and_removed_at_the_end(tmp_path, quick):
    with Heartbeat(tmp_path / "run" / "a", tmp_path / "b", "other"):
        age(tmp_path / "run" / "a", 60)
        end = time.monotonic() + 60
        while time.time() - (tmp_path / "run" / "a").stat().st_mtime > 30:
            assert time.monotonic() < end
            time.sleep(0.01)
    assert not (tmp_path / "run" / "a").exists()


@pytest.mark.parametrize("stops", [True, False])
def test_a_partner_that_leaves_is_reported_once_and_so_is_its_return(tmp_path, quick, stops):
    mine = Heartbeat(tmp_path / "a", tmp_path / "b", "collector", stops)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert not mine.is_over()  # it has not come yet
        (tmp_path / "b").touch()
        assert not mine.is_over()
    age(tmp_path / "b", 60)
    rest = "this process stops" if stops else "goes on without it"
    with pytest.warns(UserWarning, match=f"the collector is gone: no sign of it in .*{rest}"):
        assert mine.is_over() is stops
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert mine.is_over() is stops
    (tmp_path / "b").touch()
    with pytest.warns(UserWarning, match="the collector is back"):
        assert not mine.is_over()
