"""Every name below a run directory that any command opens, replaced by what a stranger might put there.

The names are those that the commands of `canter` really open, traced by an audit hook, so that a new file of a run
is tried as soon as a command reads or writes it. Each is replaced by a link to a file of the user's, to a device, by a
pipe, a directory, or a sparse file of a terabyte. A command may then work, or refuse it in one line. It must not hang,
use memory without bounds, change the user's file, or show its content.
"""

import base64
import contextlib
import os
import resource
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from canter.cli.__main__ import main
from canter.utils.films import Film

SECRET = b"-----a file of the user's, 7e1f9c-----\n"
TINY = ["--num-envs", "2", "--num-steps-per-env", "4", "--num-mini-batches", "1", "--num-learning-epochs", "1"]
TINY += ["--final-episodes", "2", "--eval-interval", "2", "--eval-episodes", "2", "--no-video", "--execution", "eager"]
COMMANDS = {
    "resume": lambda run: ["resume", str(run), "--total-timesteps", "8"],
    "report": lambda run: ["report", str(run), "--out", str(run / "report.html")],
    "plot": lambda run: ["plot", str(run), "--out", str(run / "plot.png")],
    "export": lambda run: ["export", str(run), "--formats", "onnx", "--no-env-samples"],
    "check": lambda run: ["export", str(run / "export" / "checkpoint_final"), "--check"],
    "eval": lambda run: ["eval", str(run), "--episodes", "1"],
    "collect": lambda run: ["collect", str(run), "--num-envs", "2", "--file-steps", "4", "--steps", "8"],
    "dagger": lambda run: [
        *("dagger", str(run), "--role", "train", "--num-envs", "2", "--num-steps-per-env", "4", "--iterations", "2"),
        *("--eval-episodes", "0", "--data", str(run / "demonstrations")),
    ],
}
QUICK = ("report", "resume")  # of which every name is tried in every run of the tests
MEMORY = 1 << 30  # bytes that a command may take beyond what it has
SECONDS = 60


def link_to_secret(path, secret):
    path.symlink_to(secret)


def hard_link_of_secret(path, secret):
    os.link(secret, path)


def link_to_device(path, secret):
    path.symlink_to("/dev/zero")


def pipe(path, secret):
    os.mkfifo(path)


def directory(path, secret):
    path.mkdir()


def sparse(path, secret):
    with path.open("wb") as file:
        file.truncate(1 << 40)


def loop(path, secret):
    path.symlink_to(path.name)


HOSTILE = (link_to_secret, hard_link_of_secret, link_to_device, pipe, directory, sparse, loop)


class Trace:
    """The names of all files that are opened while it is switched on."""

    def __init__(self):
        self.is_on, self.names = False, set()
        sys.addaudithook(self.note)

    def note(self, event, args):
        if self.is_on and event == "open" and isinstance(args[0], (str, bytes, os.PathLike)):
            self.names.add(os.path.basename(os.fsdecode(args[0])))  # canter opens names relative to a directory

    def below(self, folder, call):
        """The files below a folder that a call opens."""
        self.is_on, self.names = True, set()
        try:
            call()
        finally:
            self.is_on = False
        files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name in self.names]
        return [str(path.relative_to(folder)) for path in files if not path.name.startswith((".tmp-", "events."))]


TRACE = Trace()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with what a run can have: films, pictures, a record of the code, a dataset."""
    folder, threads = tmp_path_factory.mktemp("hostile"), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        # Drawing costs more than everything else, and opens no file of a run.
        patch.setattr("canter.cli.train.plot_runs", lambda runs, path, **options: path)
        patch.setattr("canter.utils.html_page.Page.drawing", lambda *args: None)
        patch.setattr("matplotlib.figure.Figure.savefig", lambda self, file, **options: file.write(b"drawing"))
        patch.chdir(Path(__file__).parents[2])
        train = ["train", "canter/CartPole", *TINY, "--name", "r", "--runs-dir", str(folder), "--total-timesteps", "32"]
        assert main(train) == 0
        run = folder / "canter" / "CartPole" / "r-seed1"
        assert main(COMMANDS["collect"](run)) == 0
        with Film(run / "film.gif", 10) as film:
            film.add(np.zeros((16, 16, 3), np.uint8))
        shutil.copy(run / "film.gif", run / "view.gif")
        (run / "git").mkdir(exist_ok=True)
        (run / "git" / "0.diff").write_text("commit: 0123456789abcdef\n")
        yield run
    torch.set_num_threads(threads)


@contextlib.contextmanager
def bounded():
    """Let a call take a gigabyte and a minute, and no more."""

    def stop(*_):
        raise AssertionError("it hangs")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + MEMORY, before[1]))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def attack(run, command, name, make, folder, capfd):
    """Replace one name by something hostile, run the command, and look what it did."""
    copy, secret = folder / "copy", folder / "secret"
    shutil.copytree(run, copy, symlinks=True)
    path = copy / name
    original = path.read_bytes()
    # A picture of the user's would pass every check but that for links.
    content = original + SECRET if path.suffix in (".gif", ".png", ".mp4") else SECRET
    secret.write_bytes(content)
    path.unlink()
    make(path, secret)
    with bounded():
        code = main(COMMANDS[command](copy))  # raises what is no error of a user
    said = "".join(capfd.readouterr())
    assert code in (0, 2, 5, 6), said
    assert "MemoryError" not in said
    assert secret.read_bytes() == content, f"{name}: the user's file was changed"
    if make is not hard_link_of_secret:  # which nobody can tell from a file
        shown = (SECRET, base64.b64encode(content))
        files = [p for p in copy.rglob("*") if p.is_file() and not p.is_symlink() and p.stat().st_size < 1 << 24]
        leaks = [p.name for p in files if any(text in p.read_bytes() for text in shown)]
        assert leaks == []
        assert SECRET.decode().strip() not in said
    shutil.rmtree(folder)
    return code


def try_names(run, command, folder, capfd, kinds):
    """Attack every name that a command opens; returns the number of attacks."""
    traced = folder / "traced"
    shutil.copytree(run, traced)
    names = TRACE.below(traced, lambda: main(COMMANDS[command](traced)))
    assert len(names) >= 2, names
    number = 0
    for place, name in enumerate(names):
        if not (run / name).is_file():  # the command made it
            continue
        for make in kinds(place):
            number += 1
            attack(run, command, name, make, folder / f"attack{number}", capfd)
    return number


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("command", QUICK)
def test_a_hostile_file_under_any_name_that_is_opened_is_harmless(run, command, tmp_path, capfd):
    assert try_names(run, command, tmp_path, capfd, lambda place: [HOSTILE[place % len(HOSTILE)]]) >= 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("command", COMMANDS)
def test_every_hostile_file_under_every_name_that_is_opened_is_harmless(run, command, tmp_path, capfd):
    if command == "check" and not (run / "export").exists():
        assert main(COMMANDS["export"](run)) == 0
    number = try_names(run, command, tmp_path, capfd, lambda place: HOSTILE)
    with capfd.disabled():
        print(f"{command}: {number} hostile files")
