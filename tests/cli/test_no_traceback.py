"""What a user can cause ends with one line that names it, and an exit code."""

import io
import subprocess
import sys
import zipfile

import gymnasium
import pytest
import torch
import yaml

from canter.cli import COMMANDS, register_command
from canter.cli.__main__ import main
from canter.envs import PointRobot
from canter.runners import OnPolicyRunner
from canter.utils.checkpoint import load_checkpoint, save_checkpoint
from canter.utils.logging import Logger


def edit(run, change):
    config = yaml.safe_load((run / "config.yaml").read_text())
    change(config)
    (run / "config.yaml").write_text(yaml.safe_dump(config))


def one_line(capsys):
    """The only line on stderr."""
    text = capsys.readouterr().err
    assert text.startswith("canter: ")
    assert text.count("\n") == 1
    return text


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("resume", "a: ["),
        ("resume", "\x00"),
        ("eval", "a: &a [*a]"),
        ("collect", "a: 2020-99-99"),
        ("export", "- 1"),
        ("distill", ""),
    ],
)
def test_a_damaged_config_is_named(trained, capsys, command, text):
    (trained / "config.yaml").write_text(text)
    assert main([command, str(trained)]) == 2
    assert "config.yaml" in one_line(capsys)


@pytest.mark.parametrize("command", ["resume", "eval"])
@pytest.mark.parametrize("path", [("run",), ("run", "task"), ("run", "num_envs"), ("run", "total_timesteps")])
def test_a_missing_key_is_named(trained, capsys, command, path):
    def drop(config):
        for name in path[:-1]:
            config = config[name]
        del config[path[-1]]

    edit(trained, drop)
    if command == "eval" and path[-1] in ("num_envs", "total_timesteps"):  # which it does not need
        assert main([command, str(trained), "--episodes", "1"]) == 0
        return
    assert main([command, str(trained)]) == 2
    assert ("does not name the task" if path[-1] in ("run", "task") else path[-1]) in one_line(capsys)


def test_commands_know_the_task_of_a_program_from_its_run_info_or_its_config(tmp_path, capsys):
    cfg = {"num_steps_per_env": 4, "policy": {"actor_hidden_dims": [4], "critic_hidden_dims": [4]}}
    for name, info in (("named", {"task": "canter/PointRobot"}), ("nameless", None)):
        runner = OnPolicyRunner(PointRobot(2), cfg, tmp_path / name, "cpu", run_info=info, show_progress=False)
        runner.learn(1)
        runner.close()
    assert main(["eval", str(tmp_path / "named"), "--episodes", "1"]) == 0
    assert main(["eval", str(tmp_path / "nameless"), "--episodes", "1"]) == 2
    assert "add it there, as in `run: {task: CartPole-v1}`" in one_line(capsys)
    edit(tmp_path / "nameless", lambda config: config.update(run={"task": "canter/PointRobot"}))
    assert main(["eval", str(tmp_path / "nameless"), "--episodes", "1"]) == 0


def test_sections_that_are_left_out_get_their_defaults_or_are_named(trained, capsys):
    for name in ("eval_episodes", "algorithm", "policy", "storage"):
        edit(trained, lambda config: config.pop(name, None))
        assert main(["eval", str(trained), "--episodes", "1"]) in (0, 2, 6)


@pytest.mark.parametrize("command", ["resume", "eval"])
def test_a_checkpoint_of_another_architecture_is_one_line_with_every_tensor(trained, capsys, command):
    edit(trained, lambda config: config["policy"].update(actor_hidden_dims=[7], critic_hidden_dims=[7]))
    assert main([command, str(trained)]) == 6
    text = one_line(capsys)
    assert "does not fit ActorCritic" in text
    assert "shape of actor.0.weight: want (7, 4), got" in text


def test_out_of_memory_during_training_is_one_line_with_advice(trained, capsys, monkeypatch):
    def fail(self, actions):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr("canter.envs.torch_envs.CartPole.step", fail)
    assert main(["resume", str(trained), "--total-timesteps", "1000"]) == 2
    text = capsys.readouterr().err
    assert "Traceback" not in text
    assert "canter: cpu ran out of memory in iteration 5: " in text
    assert "lower num_envs (now " in text


def test_a_checkpoint_without_weights_is_named(trained, capsys):
    state = load_checkpoint(trained / "checkpoint_final.pt")
    del state["model_state_dict"]
    save_checkpoint(trained / "empty.pt", state)
    for command in ("resume", "eval"):
        assert main([command, str(trained), "--checkpoint", "empty.pt"]) == 2
        assert "empty.pt: the checkpoint has no model_state_dict; it has" in one_line(capsys)
    assert main(["export", str(trained / "empty.pt")]) == 2
    assert "empty.pt has no model_state_dict" in one_line(capsys)


def test_an_unknown_logger_is_named_in_a_new_run_and_in_an_old_one(trained, train, capsys):
    assert train("canter/CartPole", "--logger-backend", "wanbd", name="x")[0] == 2
    assert "'wanbd'" in one_line(capsys)
    edit(trained, lambda config: config.update(logger_backend="wanbd"))
    assert main(["resume", str(trained)]) == 2
    assert "'wanbd'" in one_line(capsys)


def test_a_logging_setting_that_does_not_exist_is_named_before_anything_is_written(trained, capsys):
    before = (trained / "metrics.jsonl").read_bytes()
    assert main(["resume", str(trained), "--logger-kwargs", "{nonsense: 1}"]) == 2
    assert "nonsense" in one_line(capsys)
    assert (trained / "metrics.jsonl").read_bytes() == before


def test_a_missing_package_of_a_logger_is_one_line(trained, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    edit(trained, lambda config: config.update(logger_backend="trackio"))
    assert main(["resume", str(trained)]) == 2
    assert 'pip install "canter[trackio]"' in one_line(capsys)


@pytest.mark.parametrize(
    ("task", "text"),
    [
        ("MyPole-v3", "'MyPole-v3'"),
        ("nosuchmodule:x/y", "there is no module 'nosuchmodule'"),
    ],
)
@pytest.mark.parametrize("command", ["eval", "play", "resume"])
def test_a_task_that_does_not_exist_here_is_named_with_the_file_that_names_it(trained, capsys, command, task, text):
    config = (trained / "config.yaml").read_text()
    (trained / "config.yaml").write_text(config.replace("task: canter/CartPole", f"task: {task}"))
    assert main([command, str(trained), "--modules", "nosuchmodule"]) == 2
    line = one_line(capsys)
    assert str(trained / "config.yaml") in line
    assert text in line


def test_a_run_that_is_in_use_is_not_touched_by_a_resume(trained, capsys):
    from canter.utils.files import RunLock

    before = {path.name: path.read_bytes() for path in trained.iterdir() if path.is_file() and path.name != ".lock"}
    with RunLock(trained):
        assert main(["resume", str(trained), "--total-timesteps", "64"]) == 6
    assert "is in use by pid" in one_line(capsys)
    assert {name: (trained / name).read_bytes() for name in before} == before


def test_an_unknown_envpool_task_gets_a_suggestion(capsys):
    pytest.importorskip("envpool")
    assert main(["train", "envpool/CartPole-v9"]) == 2
    assert "'envpool/CartPole-v" in one_line(capsys)


def test_a_damaged_clip_is_named(tmp_path, capsys):
    for name, content in (
        ("a.txt", b'{"Frames": [[1e999]]}'),
        ("b.csv", b"1,2\n3"),
        ("c.npz", b"PK"),
        ("d.json", b"["),
    ):
        (tmp_path / name).write_bytes(content)
        assert main(["motion", str(tmp_path / name)]) == 2
        assert name in one_line(capsys)
    with zipfile.ZipFile(tmp_path / "e.npz", "w") as archive:
        archive.writestr("frames.npy", b"")
    assert main(["motion", str(tmp_path / "e.npz")]) == 2
    assert "e.npz" in one_line(capsys)


@pytest.mark.parametrize("kind", [AttributeError, ZeroDivisionError, RuntimeError, AssertionError])
def test_an_error_of_any_kind_that_a_config_causes_is_one_line_with_a_way_to_the_place(
    trained, capsys, monkeypatch, kind
):
    def fail(*args, **kwargs):
        raise kind("inside")

    monkeypatch.setattr("canter.cli.runs.build_runner", fail)
    assert main(["resume", str(trained)]) == 2
    assert f"config.yaml: {kind.__name__}: inside; CANTER_TRACEBACK=1 shows where" in one_line(capsys)


def test_terminals_that_know_ascii_alone_get_every_line(monkeypatch):
    stream, errors = (io.TextIOWrapper(io.BytesIO(), encoding="ascii") for _ in range(2))
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", errors)
    register_command("say", lambda: print("97.3 ± 2.1"), "print a line")
    try:
        assert main(["say"]) == 0
        assert main(["eval", "実験"]) == 2
    finally:
        del COMMANDS["say"]
    for written, text in ((stream, b"97.3 ? 2.1"), (errors, b"there is no run directory ??")):
        written.flush()
        assert text in written.buffer.getvalue()


def test_a_device_that_does_not_exist_is_one_line(trained, capsys):
    if torch.cuda.is_available():
        pytest.skip("it exists here")
    assert main(["resume", str(trained), "--device", "cuda"]) == 2
    assert "cuda" in one_line(capsys).lower()


def test_the_message_of_a_logger_names_what_is_registered():
    with pytest.raises(ValueError, match="'nothing'.* jsonl, .*register_logger"):
        Logger("nothing")


@pytest.mark.parametrize("flag", ["--env-kwargs", "--components"])
def test_arguments_that_are_no_mapping_are_named(capsys, flag):
    assert main(["train", "CartPole-v1", flag, "gravity=5"]) == 2
    assert f"{flag} must be a mapping in YAML such as '{{name: value}}', got 'gravity=5'" in one_line(capsys)


def test_a_reader_that_has_enough_ends_a_command_in_silence():
    with subprocess.Popen([sys.executable, "-m", "canter", "train", "--help"], stdout=-1, stderr=-1) as process:
        process.stdout.close()  # `canter train --help | head` closes it early
        assert process.stderr.read() == b""
        assert process.wait() == 141


class Endless(gymnasium.Wrapper):
    """Never ends an episode, whatever its time limit."""

    _max_episode_steps = 4

    def step(self, action):
        return *super().step(action)[:2], False, False, {}


def test_evaluation_episodes_that_never_end_are_one_line_with_the_way_out(tmp_path, capsys):
    gymnasium.register("Endless-v0", lambda: Endless(gymnasium.make("Pendulum-v1").unwrapped))
    flags = "--num-envs 2 --num-steps-per-env 16 --total-timesteps 32 --eval-interval 0 --final-episodes 1 --no-video"
    assert main(["train", "Endless-v0", *flags.split(), "--runs-dir", str(tmp_path)]) == 2
    text = capsys.readouterr().err.splitlines()[-1]
    assert text.startswith("canter: only 0 of 1 evaluation episodes ended within 6 steps; give the environment")


def test_control_characters_of_a_strangers_names_do_not_reach_the_terminal(tmp_path, capsys):
    name = "\x1b]0;owned\x07\x1b[2J\u202e.pt"
    (tmp_path / name).write_bytes(b"no checkpoint")
    (tmp_path / "config.yaml").write_text("run: {task: canter/CartPole, num_envs: 1, total_timesteps: 8}\n")
    assert main(["resume", str(tmp_path / name)]) == 6
    text = capsys.readouterr().err
    assert r"\x1b]0;owned\x07\x1b[2J\u202e.pt" in text
    assert not {"\x1b", "\x07", "\u202e"} & set(text)
