"""The log of a robot: what it saw, did and when, in a file that survives a power cut.

    CANTERLOG1, newline | length, CRC of the header | header in JSON | record | record | ...

A record is `crc, number, time, floats` (`<IId` and float32), always of one length, with the CRC-32 of all that follows
it. A record that was torn by a power cut, or damaged, fails its CRC and is left out; the ones after it are still read.
"""

import collections
import dataclasses
import json
import os
import struct
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from canter.export.robot.controller import Command, Controller, Event
from canter.export.robot.description import Robot

MAGIC = b"CANTERLOG1\n"
STATUS = ("mode", "reason", "index", "value", "limited", "overruns", "seconds")
SYNC_SECONDS = 1.0
MOST_WAITING = 100_000


class LogError(ValueError):
    """A log cannot be read; the message names the file and the reason."""


def log_fields(robot: Robot) -> list[tuple[str, int]]:
    """Name and width of everything in a record, in order."""
    count = len(robot.joints)
    sensors = [(f"sensor.{name}", width) for name, width in robot.all_sensors.items()]
    ages = [("age", len(robot.all_sensors))]
    sent = [("obs", robot.width), ("action", count), ("target", count), ("kp", count), ("kd", count)]
    return [(name, 1) for name in STATUS] + sensors + ages + sent


def record_size(robot: Robot) -> int:
    """Bytes of a record."""
    return 16 + 4 * sum(width for _, width in log_fields(robot))


def log_header(robot: Robot, **more: Any) -> bytes:
    """The beginning of a log file."""
    hashes = {mode.name: mode.bundle.spec["sha256"] for mode in robot.modes if mode.bundle is not None}
    header = {
        "names": robot.names,
        "period": robot.period,
        "fields": log_fields(robot),
        "policies": hashes,
        "safety": dataclasses.asdict(robot.safety),
        **more,
    }
    text = json.dumps(header).encode()
    return MAGIC + struct.pack("<II", len(text), zlib.crc32(text)) + text


class LogWriter:
    """Writes a log from a thread of its own, so that the control loop never waits for a disk.

    Records are on the disk within a second, and those that begin with an event at once.
    """

    def __init__(self, path: str | Path, robot: Robot) -> None:
        self.path = Path(path)
        self.file = open(self.path, "xb", buffering=0)  # noqa: SIM115
        self.file.write(log_header(robot, started=time.time()))
        self.waiting: collections.deque[bytes] = collections.deque(maxlen=MOST_WAITING)
        self.number, self.width = 0, robot.width
        self.wake, self.is_over = threading.Event(), False
        self.error: OSError | None = None
        self.thread = threading.Thread(target=self._write, name="robot log", daemon=True)
        self.thread.start()

    def add(self, controller: Controller, now: float, sent: Command, overruns: int, seconds: float) -> None:
        """Add one step of the control loop."""
        event, count = controller.event, len(controller.robot.joints)
        status = [controller.mode, event.reason, event.index, event.value, controller.limited, overruns, seconds]
        obs, action = np.zeros(self.width), np.zeros(count)
        used = controller.robot.modes[controller.mode].obs_width
        obs[:used], action[: len(controller.action)] = controller.obs[:used], controller.action
        parts = [status, controller.values, now - controller.stamps, obs, action, sent.target, sent.kp, sent.kd]
        with np.errstate(over="ignore"):
            numbers = np.concatenate(parts).astype("<f4").tobytes()
        content = struct.pack("<Id", self.number, now) + numbers
        self.waiting.append(struct.pack("<I", zlib.crc32(content)) + content)
        self.number += 1
        if event.reason:
            self.wake.set()

    def _write(self) -> None:
        while not self.is_over or self.waiting:
            self.wake.wait(SYNC_SECONDS)
            self.wake.clear()
            parts = [self.waiting.popleft() for _ in range(len(self.waiting))]
            try:
                if parts:
                    self.file.write(b"".join(parts))
                    os.fdatasync(self.file.fileno())
            except OSError as error:  # a full disk must not stop the robot
                self.error = error
                return

    def close(self) -> None:
        """Write the rest; raises the error that stopped the writing, if there was one."""
        self.is_over = True
        self.wake.set()
        self.thread.join()
        self.file.close()
        if self.error is not None:
            raise self.error


@dataclasses.dataclass
class Log:
    """The steps of a log."""

    path: Path
    header: dict[str, Any]
    time: np.ndarray
    columns: dict[str, np.ndarray]
    """(T, width) by field, as in `log_fields`; `mode`, `reason` and the like are (T,)."""
    damaged: int
    """Records that were left out because they were torn or changed."""

    def __len__(self) -> int:
        return len(self.time)

    def sensor(self, name: str) -> np.ndarray:
        """(T, width) readings of a sensor."""
        if f"sensor.{name}" not in self.columns:
            known = [field.removeprefix("sensor.") for field in self.columns if field.startswith("sensor.")]
            raise LogError(f"{self.path} has no sensor {name!r}; it has {', '.join(known)}")
        return self.columns[f"sensor.{name}"]

    def events(self) -> list[tuple[float, str, str]]:
        """Time since the start, mode and reason of everything that happened."""
        found = []
        for step in np.flatnonzero(self.columns["reason"]):
            reason, index, value = (self.columns[name][step] for name in ("reason", "index", "value"))
            mode = self.header["names"]["mode"][int(self.columns["mode"][step])]
            text = Event(int(reason), int(index), float(value)).text(self.header["names"])
            found.append((float(self.time[step] - self.time[0]), mode, text))
        return found


def read_log(path: str | Path) -> Log:
    """Every intact record of a log."""
    path = Path(path)
    try:
        content = path.read_bytes()
        start = len(MAGIC) + 8
        length, crc = struct.unpack_from("<II", content, len(MAGIC))
        text = content[start : start + length]
        if not content.startswith(MAGIC) or zlib.crc32(text) != crc:
            raise ValueError("its header is damaged")
        header = json.loads(text)
        fields = [(str(name), int(width)) for name, width in header["fields"]]
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise LogError(f"{path} is no log of a robot: {error}") from error
    layout = np.dtype(
        [("crc", "<u4"), ("number", "<u4"), ("time", "<f8"), ("floats", "<f4", sum(w for _, w in fields))]
    )
    body = memoryview(content)[start + length :]
    count = len(body) // layout.itemsize
    records = np.frombuffer(body, layout, count)
    stride = layout.itemsize
    sums = [zlib.crc32(body[stride * n + 4 : stride * (n + 1)]) for n in range(count)]
    good = np.array(sums, np.uint32) == records["crc"]
    kept = records[good]
    ends = np.cumsum([width for _, width in fields])
    parts = np.split(kept["floats"], ends[:-1], axis=1)
    columns = {name: part[:, 0] if name in STATUS else part for (name, _), part in zip(fields, parts, strict=True)}
    damaged = int(np.sum(~good)) + (len(body) % layout.itemsize > 0)
    return Log(path, header, kept["time"].copy(), columns, damaged)
