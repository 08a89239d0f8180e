"""A log holds every step, survives a torn tail, and its loop leaves the robot in its safe state."""

import threading

import numpy as np
import pytest
from small_robot import JOINTS, readings

from canter.export.robot.log import LogError, LogWriter, read_log, record_size
from canter.export.robot.loop import run


class Playback:
    """A transport without a robot: readings of an upright robot, whose joints come in another order."""

    joints = ("ankle", "hip", "knee")

    def __init__(self, slow_at=None, break_at=None):
        self.time, self.sent, self.is_closed, self.steps = 0.0, [], False, 0
        self.slow_at, self.break_at = slow_at, break_at

    def read(self):
        self.steps += 1
        if self.steps == self.break_at:
            raise OSError("the cable is gone")
        return readings(self.time, joint_pos=[0.3, 0.1, -0.2])

    def write(self, command):
        self.sent.append(command)
        self.time += 0.05 if self.steps == self.slow_at else 0.001

    def wait(self, until):
        self.time = max(self.time, until)
        return self.time

    def close(self):
        self.is_closed = True


@pytest.fixture
def standing(controller):
    controller.request("stand")
    return controller


def test_joints_are_matched_by_name_in_both_directions(standing):
    transport = Playback()
    run(standing, transport, seconds=0.6, show=None)
    np.testing.assert_allclose(standing.values[:3], [0.1, -0.2, 0.3])
    np.testing.assert_allclose(transport.sent[20].target, [0.3, 0.1, -0.2])


def test_a_robot_with_other_joints_is_refused(standing):
    transport = Playback()
    transport.joints = ("ankle", "hip", "elbow")
    with pytest.raises(ValueError, match="elbow"):
        run(standing, transport, seconds=0.1, show=None)


def test_an_error_in_the_transport_leaves_the_robot_damped_and_the_log_complete(standing, tmp_path):
    transport, log = Playback(break_at=9), LogWriter(tmp_path / "robot.log", standing.robot)
    with pytest.raises(OSError, match="cable"):
        run(standing, transport, log=log, show=None)
    log.close()
    assert transport.is_closed
    assert all(not command.kp.any() and command.kd.all() for command in transport.sent[-3:])
    assert [why for _, _, why in read_log(log.path).events()] == ["requested", "the program ended"]


def test_a_late_step_is_an_overrun_and_the_missed_ones_are_left_out(standing):
    timing = run(standing, Playback(slow_at=5), seconds=0.4, show=None)
    assert (timing.overruns, timing.steps) == (1, 19)
    assert timing.period_max == pytest.approx(0.05)


def test_a_log_has_what_the_loop_saw_and_did(standing, tmp_path):
    log = LogWriter(tmp_path / "robot.log", standing.robot)
    timing = run(standing, Playback(), seconds=0.6, log=log, show=None)
    log.close()
    found = read_log(log.path)
    assert (len(found), found.damaged) == (timing.steps + 1, 0)
    assert found.header["names"]["joint"] == JOINTS
    np.testing.assert_allclose(np.diff(found.time[:-1]), 0.02)
    np.testing.assert_allclose(found.sensor("joint_pos")[3], [0.1, -0.2, 0.3], rtol=1e-6)
    assert np.isnan(found.sensor("joint_torque")).all()  # an extra that this robot does not have
    np.testing.assert_allclose(found.columns["target"][25], [0.1, -0.2, 0.3], rtol=1e-6)
    np.testing.assert_allclose(found.columns["age"][:-1, :5], 0.0, atol=1e-6)


def test_a_torn_tail_and_a_changed_record_are_left_out_and_the_rest_is_read(standing, tmp_path):
    log = LogWriter(tmp_path / "robot.log", standing.robot)
    run(standing, Playback(), seconds=0.4, log=log, show=None)
    log.close()
    content = bytearray(log.path.read_bytes())
    whole = read_log(log.path)
    stride = record_size(standing.robot)
    content[-3 * stride + 40] ^= 1
    log.path.write_bytes(content[:-7])
    found = read_log(log.path)
    assert (len(found), found.damaged) == (len(whole) - 2, 2)
    np.testing.assert_array_equal(found.time, np.delete(whole.time, [len(whole) - 3, len(whole) - 1]))


def test_a_file_that_is_no_log_is_refused(tmp_path):
    (tmp_path / "other").write_bytes(b"CANTERLOG1\n" + bytes(20))
    for path in (tmp_path / "other", tmp_path / "missing"):
        with pytest.raises(LogError, match=path.name):
            read_log(path)


def test_a_log_never_overwrites_another_and_a_full_disk_does_not_stop_the_loop(standing, tmp_path, monkeypatch):
    log = LogWriter(tmp_path / "robot.log", standing.robot)
    with pytest.raises(FileExistsError):
        LogWriter(log.path, standing.robot)
    failed = threading.Event()

    def full(handle):
        failed.set()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fdatasync", full)
    timing = run(standing, Playback(), seconds=0.4, log=log, show=None)
    assert timing.steps == 20
    with pytest.raises(OSError, match="No space"):
        log.close()
    assert failed.is_set()


def test_a_robot_whose_sensors_stay_silent_is_not_driven(standing):
    transport = Playback()
    transport.read = dict
    with pytest.raises(TimeoutError, match="joint_pos"):
        run(standing, transport, seconds=0.4, show=None)
    assert transport.is_closed
    assert transport.sent == []
