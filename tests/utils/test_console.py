import io
import math
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from canter.utils.console import Console, format_number, shown_metrics

METRICS = {
    "time/fps": 5000.0,
    "train/value_loss": 0.25,
    "train/policy_loss": -0.5,
    "episode/mean_length": 80.0,
    "episode/mean_reward": 12.5,
    "train/learning_rate": 3e-4,
    "policy/mean_noise_std": 0.7,
    "extra/log/robot/height": 1.0,
}


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "30")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_without_a_terminal_there_is_one_line_every_few_seconds_with_what_is_new(monkeypatch):
    clock, stream = Clock(monkeypatch), io.StringIO()
    with Console(200, "CartPole-v1", stream=stream, path=Path("runs/a")) as console:
        clock.now += 2.0
        console.update(1, 1000, METRICS)
        console.update(2, 2000)  # no metrics: nothing to print
        clock.now += 3.0
        console.update(3, 5000, {"episode/mean_reward": 19.0, "eval/mean_reward": 30.0})  # too early
        clock.now += 2.0
        console.update(4, 9000, {"episode/mean_reward": 20.0})
        console.update(200, 9000, {"episode/mean_reward": 21.0})  # the last one is always printed
        console.message("saved model_3.pt")
    assert stream.getvalue().splitlines() == [
        "CartPole-v1  runs/a",
        "[  1/200]  1k steps  5k steps/s  0:00:02 elapsed  0:06:38 left  return 12.5  episode length 80  "
        "policy loss -0.5  value loss 0.25  learning rate 3.00e-04  action std 0.7",
        "[  4/200]  9k steps  1.6k steps/s  0:00:07 elapsed  0:05:43 left  return 20  evaluation return 30",
        "[200/200]  9k steps  1.6k steps/s  0:00:07 elapsed  0:00:00 left  return 21",
        "saved model_3.pt",
    ]


ENVIRONMENT = {
    "extra/log/Episode_Reward/track_lin_vel": 0.5,  # Isaac Lab and mjlab
    "extra/episode/rew_torques": -0.25,  # legged_gym
    "reward_components/alive": 1.0,
    "extra/log/Curriculum/terrain_levels": 2.5,
    "extra/episode/terrain_level": 3.0,
    "extra/log/Episode_Termination/time_out": 7.0,
}


def test_a_line_names_reward_terms_and_curriculum(monkeypatch):
    clock, stream = Clock(monkeypatch), io.StringIO()
    console = Console(10, stream=stream)
    clock.now += 1.0
    console.update(1, 10, ENVIRONMENT)
    assert stream.getvalue().endswith(
        "left  reward track lin vel 0.5  torques -0.25  alive 1  curriculum terrain levels 2.5  terrain level 3\n"
    )


def test_the_live_display_names_the_evaluation_with_its_step_and_the_run_directory(monkeypatch, terminal):
    clock = Clock(monkeypatch)
    console = Console(40, stream=terminal, path=Path("runs/a"))
    clock.now += 1.0
    console.update(1, 1000, {"eval/mean_reward": 30.0})
    clock.now += 1.0
    console.update(2, 2000, ENVIRONMENT)
    console.close()
    last = [line.rstrip() for line in plain(terminal.getvalue()).rsplit("iteration 2/40", 1)[1].splitlines()]
    assert last[2].startswith("runs/a  ")
    assert re.match(r"return +30$", last[last.index("evaluation at 1k steps") + 1])
    assert re.match(r"track lin vel +0.5 +torques +-0.25 +alive +1", last[last.index("reward") + 1])
    assert re.match(r"terrain levels +2.5", last[last.index("curriculum") + 1])


def test_resumed_training_estimates_from_its_own_iterations(monkeypatch):
    clock = Clock(monkeypatch)
    console = Console(1000, iteration=900, enabled=False)
    assert math.isnan(console.seconds_left())
    clock.now += 10.0
    console.update(905, 50_000)
    assert console.seconds_left() == pytest.approx(95 * 2.0)
    clock.now += 10.0
    console.update(1000, 100_000)
    assert console.seconds_left() == 0.0
    assert console.rate() == pytest.approx(5000.0)


def test_live_display_shows_progress_and_keeps_the_last_return(monkeypatch, terminal):
    clock = Clock(monkeypatch)
    console = Console(40, title="Ant [v5]", stream=terminal)
    assert console._live is not None
    clock.now += 1.0
    console.update(1, 1000, METRICS)
    clock.now += 1.0
    console.update(10, 10_000, {"train/value_loss": 0.125})
    console.close()
    last = plain(terminal.getvalue()).rsplit("Ant [v5]", 1)[1].splitlines()
    assert last[0].endswith("iteration 10/40")
    assert "10k steps" in last[1]
    assert "9k steps/s" in last[1]
    assert last[2].endswith("0:00:02 elapsed   0:00:06 left")
    assert re.search(r"return +12\.5 +episode length +80 +policy loss +-0\.5", last[3])
    assert re.search(r"value loss +0\.125 ", last[4])
    assert all(len(line) <= 100 for line in last)
    assert last[5].split() == ["environment"]
    assert last[6].split() == ["robot/height", "1"]
    assert terminal.getvalue().endswith("\x1b[?25h")  # the cursor is back


def test_live_display_is_redrawn_at_most_four_times_a_second(monkeypatch, terminal):
    clock = Clock(monkeypatch)
    console = Console(100, stream=terminal)
    frames = []
    monkeypatch.setattr(console._live, "update", lambda picture, refresh: frames.append(clock.now))
    for i in range(100):
        clock.now += 0.01
        console.update(i + 1, i, METRICS)
    assert len(frames) == 4
    console.close()
    assert len(frames) == 5  # the last state is always drawn


def test_message_appears_unchanged_above_the_live_display(terminal):
    with Console(10, stream=terminal) as console:
        console.message("saved [bold]runs/x[/bold]")
    assert "saved [bold]runs/x[/bold]" in plain(terminal.getvalue())


def test_narrow_terminal_never_cuts_a_number(monkeypatch, terminal):
    monkeypatch.setenv("COLUMNS", "50")
    with Console(10, stream=terminal) as console:
        console.update(1, 10, METRICS)
    text = plain(terminal.getvalue())
    assert "3.00e-04" in text
    assert all(len(line) <= 50 for line in text.rsplit("canter", 1)[1].splitlines()[1:])


def test_no_color_and_dumb_terminals_are_respected(monkeypatch, terminal):
    monkeypatch.setenv("NO_COLOR", "1")
    with Console(10, stream=terminal) as console:
        console.update(1, 10, METRICS)
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", terminal.getvalue())
    monkeypatch.setenv("TERM", "dumb")
    assert Console(10, stream=Terminal())._live is None


@pytest.mark.parametrize("live", [False, True])
def test_stream_closed_during_training_raises_no_error(live, terminal):
    stream = terminal if live else io.StringIO()
    before = sys.stdout
    console = Console(10, stream=stream)
    assert (console._live is not None) == live
    stream.close()
    for i in range(3):
        console.update(i, 10, METRICS)
        console.message("x")
    console.close()
    assert sys.stdout is before


def test_missing_or_broken_standard_output_raises_no_error(monkeypatch):
    class Broken(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    for stream in (None, Broken()):
        monkeypatch.setattr(sys, "stdout", stream)
        console = Console(10)
        console.update(1, 10, METRICS)
        console.close()


def test_ascii_stream_gets_replaced_characters():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Console(10, stream=stream).message("zażółć")
    assert raw.getvalue() == b"za????\n"


def test_real_terminal_with_the_c_locale_works():
    code = (
        "from canter.utils.console import Console\n"
        "with Console(4, title='za\\u017c') as c:\n"
        "    for i in range(4): c.update(i + 1, i * 10, {'train/' + 90 * 'x': 2.0})\n"
        "    c.message('\\u017c')\n"
        "    assert c._live, 'not live'\n"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "TERM": "xterm"}
    main, side = pty.openpty()
    child = subprocess.Popen([sys.executable, "-c", code], stdout=side, stderr=subprocess.PIPE, env=environment)
    os.close(side)
    seen = b""
    while select.select([main], [], [], 20)[0]:
        try:
            chunk = os.read(main, 65536)
        except OSError:  # the child closed its side
            break
        if not chunk:
            break
        seen += chunk
    _, errors = child.communicate()
    os.close(main)
    assert child.returncode == 0, errors.decode()
    assert b"iteration 4/4" in seen
    assert seen.rstrip().endswith(b"\x1b[?25h")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (45678.0, "45,678"),
        (1234.56, "1,234.6"),
        (0.71249, "0.7125"),
        (3e-4, "3.00e-04"),
        (-2.5e8, "-2.50e+08"),
        (math.nan, "nan"),
        (math.inf, "inf"),
    ],
)
def test_numbers_have_four_significant_digits(value, text):
    assert format_number(value) == text


def test_one_kl_divergence_is_shown_the_exact_one_if_there_is_one():
    estimate = {"train/approx_kl": 0.02, "train/value_loss": 1.0}
    assert shown_metrics(estimate)[""] == [("value loss", 1.0), ("approx kl", 0.02)]
    assert shown_metrics({**estimate, "train/kl": 0.03})[""] == [("value loss", 1.0), ("kl", 0.03)]
