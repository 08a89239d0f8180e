"""Every phase of every command, struck by every fault: it goes on, or it ends saved, or with one line and nothing lost.

Each cell is one life of a command that is struck in a phase, and a second life, when the fault is gone, that must bring
the work to its end. `python tests/faults/fault_table.py` lives all of them and prints the table of
docs/reliability.md.
"""

import contextlib
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import lives
import pytest
import torch

from canter.export.runtime import Bundle
from canter.storage.rollout_files import read_chunk, read_manifest
from canter.utils.checkpoint import find_checkpoints, load_checkpoint, newest_valid_checkpoint
from canter.utils.logging import read_rows

PATIENCE = 120.0  # seconds until a life counts as hung
COMMON = ["--num-envs", "2", "--execution", "eager", "--final-episodes", "0", "--eval-episodes", "2", "--no-video"]
COMMON += ["--total-timesteps", str(lives.TOTAL), "--name", "r", "--runs-dir", "disk/runs", "--logger-backend", "jsonl"]
PPO = ["--num-steps-per-env", "4", "--num-mini-batches", "1", "--num-learning-epochs", "1", "--save-interval", "1"]
PPO += ["--eval-interval", "2", "--log-interval", "1"]
SMALL = ["--policy.actor-hidden-dims", "8", "--policy.critic-hidden-dims", "8"]
SAC = ["--algo", "sac", "--actor-hidden-dims", "8", "--critic-hidden-dims", "8", "--batch-size", "4"]
SAC += ["--learning-starts", "4", "--buffer-size", "64", "--save-interval", "8", "--eval-interval", "16"]
SAC += ["--save-replay-buffer"]  # without it a run continues, but not bit for bit
RECURRENT = ["--policy.class-name", "ActorCriticRecurrent", "--policy.rnn-hidden-size", "8"]
LEARNERS = {
    "PPO": ["canter/CartPole", *PPO, *SMALL],
    "recurrent PPO": ["canter/CartPole", *PPO, *RECURRENT, *SMALL],
    "SAC": ["canter/PointRobot", *SAC, "--log-interval", "8"],
    "two ranks": ["canter/CartPole", *PPO, *SMALL, "--rank-timeout", "30"],
}
TRAINING = ("start-up", "rollout", "update", "evaluation", "film", "checkpoint", "log write")
OTHERS = ("resume", "export", "report", "sweep", "dataset write")
FAULTS = ("kill -9", "SIGTERM", "SIGTERM twice", "SIGINT", "disk full", "read-only", "no descriptors", "memory limit")
FAULTS += ("SIGSTOP 10 s",)
CODES = {"SIGTERM": 143, "SIGTERM twice": 143, "SIGINT": 130}
CLEAN = {2: "usage", 5: "diverged", 6: "storage", 7: "ranks"}
# Commands that run in one process, whatever trained the policy; and those that know nothing of the policy.
ALONE = ("export", "report", "sweep", "dataset write", "film")
SAME_FOR_ALL = ("sweep", "film")
CELLS = [
    (phase, fault, learner)
    for phase in (*TRAINING, *OTHERS)
    for fault in FAULTS
    for learner in LEARNERS
    if not (phase in ALONE and learner == "two ranks") and not (phase in SAME_FOR_ALL and learner != "PPO")
]
# One cell of every phase, with every fault and learner among them, that is lived in every run of the tests.
QUICK = [
    ("start-up", "SIGTERM", "SAC"),
    ("rollout", "SIGTERM twice", "two ranks"),
    ("update", "memory limit", "recurrent PPO"),
    ("evaluation", "SIGINT", "PPO"),
    ("film", "SIGTERM", "PPO"),
    ("checkpoint", "kill -9", "SAC"),
    ("log write", "disk full", "PPO"),
    ("resume", "read-only", "recurrent PPO"),
    ("export", "kill -9", "PPO"),
    ("report", "no descriptors", "PPO"),
    ("sweep", "SIGINT", "PPO"),
    ("dataset write", "SIGSTOP 10 s", "PPO"),
]


def end(processes, seconds=PATIENCE):
    """The exit codes of processes that end by themselves."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    if hung := [process for process in processes if process.is_alive()]:
        for process in hung:
            process.kill()
            process.join()
        raise AssertionError("it hangs")
    return [process.exitcode for process in processes]


def said(place):
    """What a command printed."""
    return "".join(path.read_text(errors="replace") for path in sorted(place.glob("said*")))


def run_directory(place):
    return next((place / "disk" / "runs").glob("*/*/r-seed1"), None)


def commands(phase, learner):
    """The words of the command that is struck, and those that finish its work."""
    run = f"disk/runs/{LEARNERS[learner][0]}/r-seed1"
    longer = ["resume", run, "--total-timesteps", str(lives.TOTAL)]
    if phase == "resume":
        return longer
    if phase == "export":
        return ["export", run, "--formats", "onnx", "--no-env-samples"]
    if phase == "report":
        return ["report", run, "--out", "disk/report.html", "--metric", "time/fps"]
    if phase == "dataset write":
        return ["collect", run, "--out", "disk/data", "--num-envs", "2", "--file-steps", "8", "--steps", "48"]
    if phase == "sweep":
        flags = [flag for flag in COMMON if flag not in ("--name", "r")]
        flags[flags.index("--final-episodes") + 1] = "2"
        search = ["--space", "learning_rate=1e-4..1e-3", "--trials", "1", "--jobs", "1", "--stale-after", "1"]
        return ["sweep", *LEARNERS[learner], *flags, *search]
    film = ["--film-interval", "3"] if phase == "film" else []
    return ["train", *LEARNERS[learner], *COMMON, *film]


class World:
    """Where commands live: a fork server that has imported everything, and a trained run of each learner."""

    def __init__(self, folder):
        self.folder, self.context = folder, multiprocessing.get_context("forkserver")
        os.environ["OMP_NUM_THREADS"] = "1"
        self.context.set_forkserver_preload(["lives"])
        self.trained = {}

    command, said = staticmethod(commands), staticmethod(said)

    def begin(self, place, args, learner, phase=None):
        """Start a command: one process, or two ranks."""
        size = 2 if learner == "two ranks" and args[0] in ("train", "resume") else 1
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for old in ("reached0", "reached1", "struck"):
            (place / old).unlink(missing_ok=True)
        started = []
        for rank in range(size):
            process = self.context.Process(target=lives.live, args=(place, phase, args, rank, size, port))
            process.start()
            started.append(process)
        return started

    def run_of(self, learner):
        """A folder with a trained run."""
        if learner not in self.trained:
            place = self.folder / f"trained {learner}"
            (place / "disk").mkdir(parents=True)
            codes = end(self.begin(place, ["train", *LEARNERS[learner], *COMMON], learner))
            assert set(codes) == {0}, said(place)
            self.trained[learner] = place
        return self.trained[learner]


class Blow(contextlib.AbstractContextManager):
    """A fault that strikes processes, until the end of the block."""

    def __init__(self, fault, place, processes):
        self.fault, self.place, self.pids = fault, place, [process.pid for process in processes]
        self.disk, self.undo = place / "disk", contextlib.ExitStack()

    def __enter__(self):
        last = self.pids[-1:]  # of several ranks one is killed or stopped; launchers send the others to all
        if self.fault == "kill -9":
            self.signal(signal.SIGKILL, last)
        elif self.fault.startswith("SIGTERM"):
            self.signal(signal.SIGTERM, self.pids)
            if self.fault.endswith("twice"):
                time.sleep(0.02)
                self.signal(signal.SIGTERM, self.pids)
        elif self.fault == "SIGINT":
            self.signal(signal.SIGINT, self.pids)
        elif self.fault == "SIGSTOP 10 s":
            self.signal(signal.SIGSTOP, last)
            (self.place / "struck").touch()
            time.sleep(10)
            self.signal(signal.SIGCONT, last)
        elif self.fault == "disk full":
            self.fill()
        elif self.fault == "read-only":
            # Over itself, because files of the first mount are open for writing.
            subprocess.run(["mount", "--bind", str(self.disk), str(self.disk)], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", str(self.disk)], check=True)
            self.undo.callback(subprocess.run, ["umount", "-l", str(self.disk)], check=True)
        elif self.fault == "no descriptors":
            for pid in self.pids:
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, 4096))
        elif self.fault == "memory limit":
            for pid in self.pids:
                # Less than it has: only what is free within it can be allocated from now on.
                resource.prlimit(pid, resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))
        (self.place / "struck").touch()
        return self

    def signal(self, number, pids):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def fill(self):
        filler = self.disk / "filler"
        self.undo.callback(filler.unlink, missing_ok=True)
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(b"x" * 4096):
                pass

    def __exit__(self, *exc):
        self.undo.close()


@contextlib.contextmanager
def small_disk(place):
    """A file system of 8 MB of its own."""
    disk = place / "disk"
    disk.mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def steps_saved(place):
    """The environment steps of the newest checkpoint; every checkpoint must be sound."""
    run = run_directory(place)
    if run is None or not find_checkpoints(run):
        return 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # not even the newest is damaged
        return load_checkpoint(newest_valid_checkpoint(run))["total_timesteps"]


def newest_weights(run):
    return load_checkpoint(newest_valid_checkpoint(run))["model_state_dict"].values()


def strike(world, place, phase, fault, learner):
    """Live one cell; returns how the life ended, in words. An AssertionError is an end that is not allowed."""
    args = commands(phase, learner)
    if phase in OTHERS and phase != "sweep":
        shutil.copytree(world.run_of(learner) / "disk", place / "disk", dirs_exist_ok=True)
    before = steps_saved(place)
    processes = world.begin(place, args, learner, phase)
    deadline = time.monotonic() + PATIENCE
    while not list(place.glob("reached*")):
        assert any(process.is_alive() for process in processes), f"it did not reach the phase: {said(place)}"
        assert time.monotonic() < deadline, f"it did not reach the phase: {said(place)}"
        time.sleep(0.005)
    if len(processes) > 1 and phase not in ("evaluation", "log write"):
        while len(list(place.glob("reached*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.005)
    began = time.monotonic()
    with Blow(fault, place, processes):
        codes = end(processes)
    seconds, text = time.monotonic() - began, said(place)
    ended = judge(phase, fault, codes, text)
    if fault.startswith("SIG") and "STOP" not in fault and codes != [0] * len(codes):
        assert seconds < 30, f"it took {seconds:.0f} s to stop"
    after = steps_saved(place)
    least = {"start-up": 0, "checkpoint": lives.STRUCK_AT - lives.EVERY}.get(phase, lives.STRUCK_AT)
    if phase in TRAINING and ended.startswith("saved"):
        assert after >= lives.STRUCK_AT, f"saved {after} steps of {lives.STRUCK_AT}"
    elif phase in TRAINING:
        assert after >= min(least, lives.STRUCK_AT - lives.EVERY), f"{after} steps are left"
    assert after >= before
    finish(world, place, phase, learner, args)
    return ended


def judge(phase, fault, codes, text):
    """How a life ended: in one of the three allowed ways."""
    number, code = CODES.get(fault), codes[0]
    assert not re.search(r"^Traceback", text, re.M), text
    if fault == "kill -9":
        assert codes in ([-9], [7, -9]), f"{codes} {text}"
        return "killed" if len(codes) == 1 else "killed, 7"
    if number is not None and code != 0:
        wanted = {number, -(number - 128)}  # where nothing is to be saved, the signal does what it does to any program
        assert set(codes) <= wanted, f"{codes} {text}"
        return f"saved, {number}" if "saved" in text else f"ends, {number}"
    if set(codes) == {0}:
        return "goes on"
    assert set(codes) <= set(CLEAN), f"{codes} {text}"
    assert re.search(r"^canter: ", text, re.M), text
    return f"error {code}"


def finish(world, place, phase, learner, args):
    """Bring the work to its end without a fault, and look whether all of it is there."""
    run = run_directory(place)
    if phase in TRAINING:
        is_begun = run is not None and any(run.glob("*.pt"))
        args = ["resume", str(run)] if is_begun else args
    elif phase == "resume":
        args = ["resume", str(run)]
        if steps_saved(place) == lives.TOTAL:
            args += ["--total-timesteps", str(lives.TOTAL)]
    if phase == "sweep":
        args = [*args, "--trials", "2"]  # one that failed, as on a full disk, is not tried again
    codes = end(world.begin(place, args, learner))
    assert set(codes) == {0}, said(place)
    run = run_directory(place)
    if phase in (*TRAINING, "resume"):
        assert steps_saved(place) == lives.TOTAL * (2 if phase == "resume" else 1)
        steps = [row["step"] for row in read_rows(run / "metrics.jsonl") if "time/fps" in row]
        assert steps == sorted(set(steps)), "rows are there twice"
        assert set(range(16, steps_saved(place) + 1, 16)) <= set(steps), f"rows are lost: {steps}"
        assert not list(run.glob(".tmp-*"))
        if phase != "resume":  # it ends like a run that was not struck, bit for bit
            weights = [newest_weights(folder) for folder in (run, run_directory(world.run_of(learner)))]
            assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    elif phase == "export":
        Bundle(next((run / "export").glob("*/policy.json")).parent)
    elif phase == "report":
        assert (place / "disk" / "report.html").read_bytes().endswith(b"</html>\n")
        json.loads((place / "disk" / "report.json").read_text())
    elif phase == "dataset write":
        data = place / "disk" / "data"
        listed = {entry["file"]: entry["end"] - entry["start"] for entry in read_manifest(data)}
        assert sum(listed.values()) >= 48
        for name, steps in listed.items():
            assert len(read_chunk(data / name)["rewards"]) == steps


def live_all(pattern=""):
    """Live every cell whose name has the pattern, and print the table."""
    ended = {}
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        for cell in (cell for cell in CELLS if pattern in " / ".join(cell)):
            place = Path(folder) / "cell"
            try:
                with small_disk(place):
                    ended[cell] = strike(world, place, *cell)
            except AssertionError as error:
                ended[cell] = f"FAILS {str(error)[-1500:]}"
            print(json.dumps([*cell, ended[cell]]), flush=True)
            shutil.rmtree(place, ignore_errors=True)
    return ended


def page():
    """What docs/reliability.md says of each cell."""
    lines = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {
        (phase, fault, learner): text
        for phase, learners, *cells in (row for row in rows if len(row) == len(FAULTS) + 2)
        for learner in learners.split(", ")
        for fault, text in zip(FAULTS, cells, strict=True)
    }


def table(ended):
    """The table as Markdown: a row for each phase and learner, where learners differ."""
    lines = [f"| phase | learner | {' | '.join(FAULTS)} |", "|---" * (len(FAULTS) + 2) + "|"]
    for phase in (*TRAINING, *OTHERS):
        rows = {}
        for learner in LEARNERS:
            cells = {fault: ended.get((phase, fault, learner), "-") for fault in FAULTS}
            if cells["memory limit"] in ("goes on", "error 2"):  # by what the heap has free
                cells["memory limit"] = "goes on or error 2"
            cells = tuple(cells.values())
            rows.setdefault(cells, []).append(learner)
        for cells, learners in rows.items():
            if set(cells) != {"-"}:
                lines.append(f"| {phase} | {', '.join(learners)} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    print(table(live_all(" ".join(sys.argv[1:]))))
