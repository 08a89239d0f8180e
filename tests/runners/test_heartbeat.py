"""Each of two processes notices whether the other is there."""

import os
import time
import warnings

import pytest

from canter.runners import heartbeat
from canter.runners.heartbeat import Heartbeat


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still: `clock[0]` is the time of this process."""
    now = [1000.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
    return now


class Partner:
    """Another process, on a machine whose clock says another time."""

    def __init__(self, path, ahead):
        self.path, self.ahead, self.beats = path, ahead, 0

    def beat(self):
        self.path.touch()
        self.beats += 1
        os.utime(self.path, (time.time() + self.ahead + self.beats,) * 2)


def test_a_file_is_renewed_while_its_process_lives_and_removed_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.02)
    with Heartbeat(tmp_path / "run" / "a", tmp_path / "b", "other"):
        os.utime(tmp_path / "run" / "a", (0, 0))
        end = time.monotonic() + 60
        while (tmp_path / "run" / "a").stat().st_mtime < 1:
            assert time.monotonic() < end
            time.sleep(0.01)
    assert not (tmp_path / "run" / "a").exists()


@pytest.mark.parametrize("stops", [True, False])
@pytest.mark.parametrize("ahead", [0, 3600, -3600], ids=["same clock", "an hour ahead", "an hour behind"])
def test_a_partner_that_leaves_is_reported_once_and_so_is_its_return(tmp_path, clock, stops, ahead):
    partner = Partner(tmp_path / "b", ahead)
    mine = Heartbeat(tmp_path / "a", partner.path, "collector", stops)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert not mine.is_over()  # it has not come yet
        for _ in range(3):
            partner.beat()
            assert not mine.is_over()
            clock[0] += 5
        assert mine.has_partner()
    clock[0] += 6
    rest = "this process stops" if stops else "goes on without it"
    with pytest.warns(UserWarning, match=f"the collector is gone: no sign of it in .*{rest}"):
        assert mine.is_over() is stops
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert mine.is_over() is stops
    partner.beat()
    with pytest.warns(UserWarning, match="the collector is back"):
        assert not mine.is_over()


def test_the_file_of_a_dead_process_is_no_sign_of_it(tmp_path, clock):
    Partner(tmp_path / "b", 3600).beat()
    mine = Heartbeat(tmp_path / "a", tmp_path / "b", "collector")
    assert not any((mine.has_partner(), mine.is_over(), mine.has_partner()))


@pytest.mark.parametrize("is_hard", [False, True])
def test_a_file_that_is_a_link_is_refused_and_its_target_stays(tmp_path, is_hard):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (os.link if is_hard else os.symlink)(precious, tmp_path / "a")
    with pytest.raises(OSError, match="it is a link"), Heartbeat(tmp_path / "a", tmp_path / "b", "collector"):
        pass
    assert precious.read_text() == "precious"
