"""The loop that runs on a robot: read, step, write, wait; and what a robot must offer for it."""

import dataclasses
import math
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from canter.export.robot.controller import Command, Controller, Sensors
from canter.export.robot.log import LogWriter


class Transport(Protocol):
    """The connection to a robot: four functions, and the names of its joints in its own order."""

    @property
    def joints(self) -> Sequence[str]:
        """Names of the joints, in the robot's own order."""
        ...

    def read(self) -> Sensors:
        """The newest readings by sensor; `joint_pos`, `joint_vel` (in the order of `joints`) and `orientation`."""
        ...

    def write(self, command: Command) -> None:
        """Send targets and gains, in the order of `joints`."""
        ...

    def wait(self, until: float) -> float:
        """Sleep until a time of the clock that stamps the readings, and return the time now."""
        ...

    def close(self) -> None:
        """End the connection."""
        ...


@dataclasses.dataclass
class Timing:
    """How punctual a loop was."""

    steps: int
    overruns: int
    """Steps that were not done when the next one was due."""
    period_mean: float
    period_std: float
    period_max: float
    step_median: float
    """Seconds from reading to writing."""
    step_p99: float
    step_max: float

    def text(self) -> str:
        """One line."""
        mean, std, longest = self.period_mean * 1e3, self.period_std * 1e6, self.period_max * 1e3
        median, p99, most = (1e6 * seconds for seconds in (self.step_median, self.step_p99, self.step_max))
        period = f"period {mean:.3f} ms, std {std:.0f} us, max {longest:.2f} ms"
        step = f"step {median:.0f} us, 99 % {p99:.0f} us, max {most:.0f} us"
        return f"{self.steps} steps, {self.overruns} overruns; {period}; {step}"


class InOrder:
    """A transport whose vectors are brought into the controller's order of joints."""

    def __init__(self, transport: Transport, joints: Sequence[str]) -> None:
        theirs = list(transport.joints)
        if sorted(theirs) != sorted(joints):
            raise ValueError(f"the robot has the joints {theirs}, its description {list(joints)}")
        self.transport, self.count = transport, len(theirs)
        self.reading = np.array([theirs.index(joint) for joint in joints])
        self.writing = np.argsort(self.reading)

    def read(self) -> Sensors:
        """The readings, in the controller's order."""
        found = dict(self.transport.read())
        for name in ("joint_pos", "joint_vel", "joint_torque"):
            if name in found and np.size(found[name][1]) == self.count:
                found[name] = found[name][0], np.asarray(found[name][1])[self.reading]
        return found

    def write(self, command: Command) -> None:
        """Send a command, in the robot's order."""
        self.transport.write(Command(*(part[self.writing] for part in (command.target, command.kp, command.kd))))


def run(
    controller: Controller,
    transport: Transport,
    seconds: float = math.inf,
    log: LogWriter | None = None,
    on_step: Callable[[float], Any] | None = None,
    show: Callable[[str], Any] | None = print,
) -> Timing:
    """Run the control loop; whatever ends it, such as Ctrl-C, the last thing that is sent is the safe state.

    Args:
        controller: The state machine.
        transport: The connection to the robot; it is closed at the end.
        seconds: Time after which the loop ends.
        log: Where every step is written.
        on_step: Called before every step with the time since the start; it may request modes.
        show: Called with a line for every change of the mode.
    """
    robot, ordered = controller.robot, InOrder(transport, controller.robot.joints)
    starts: list[float] = []
    times: list[float] = []
    overruns, begin = 0, await_sensors(controller, transport)
    due, now = begin, begin
    try:
        while due - begin < seconds:
            now = transport.wait(due)
            if on_step is not None:
                on_step(now - begin)
            clock = time.perf_counter()
            command = controller.step(now, ordered.read())
            ordered.write(command)
            spent = time.perf_counter() - clock
            starts.append(now)
            times.append(spent)
            due += robot.period
            late = transport.wait(-math.inf) - due
            if late > 0:  # the steps that were missed are left out
                overruns += 1
                due += robot.period * math.floor(late / robot.period)
            if log is not None:
                log.add(controller, now, command, overruns, spent)
            if controller.event.reason and show is not None:
                show(f"{now - begin:9.3f} s  {controller.mode_name:<8} {controller.event.text(robot.names)}")
    except KeyboardInterrupt:
        pass  # of the operator: the usual end
    finally:
        command = controller.end()
        for _ in range(3):  # a datagram may get lost
            ordered.write(command)
            now = transport.wait(now + robot.period)
        if log is not None:
            log.add(controller, now, command, overruns, 0.0)
        transport.close()
    return timing(starts, times, overruns)


def await_sensors(controller: Controller, transport: Transport, seconds: float = 10.0) -> float:
    """Wait until every sensor has a reading; returns the time."""
    begin = now = transport.wait(-math.inf)
    while missing := controller.robot.sensors.keys() - transport.read().keys():
        if now - begin > seconds:
            transport.close()
            raise TimeoutError(f"the robot gave no reading of {', '.join(sorted(missing))} in {seconds:.0f} s")
        now = transport.wait(now + controller.robot.period)
    return transport.wait(-math.inf)


def timing(starts: Sequence[float], times: Sequence[float], overruns: int) -> Timing:
    """Statistics of periods and steps."""
    periods = np.diff(starts) if len(starts) > 1 else np.zeros(1)
    spent = np.array(times or [0.0])
    return Timing(
        len(starts),
        overruns,
        float(periods.mean()),
        float(periods.std()),
        float(periods.max()),
        float(np.median(spent)),
        float(np.quantile(spent, 0.99)),
        float(spent.max()),
    )


def end_on_signals() -> None:
    """Make SIGTERM end the loop as Ctrl-C does."""

    def end(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
