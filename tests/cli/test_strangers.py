"""A run directory of a stranger is data: commands on it write through no link, import nothing and tell no secret."""

import json
import socket
import sys

import numpy as np
import pytest
import torch
import yaml

import canter
from canter.cli.__main__ import main
from canter.cli.runs import changed_settings
from canter.utils.checkpoint import load_checkpoint, save_checkpoint
from canter.utils.films import Film
from canter.utils.logging import loaded_settings, register_logger
from canter.utils.logging.backends import BACKENDS, Backend
from canter.utils.reading import named_modules


def edit(run, change):
    """Change the config.yaml of a run."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    change(config)
    (run / "config.yaml").write_text(yaml.safe_dump(config))


@pytest.fixture
def outside(tmp_path):
    """A file and an empty directory outside the run, which must stay as they are."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (tmp_path / "precious").write_text("mine\n")
    yield folder
    assert list(folder.iterdir()) == []
    assert (tmp_path / "precious").read_text() == "mine\n"


@pytest.fixture
def tell_tale(tmp_path, monkeypatch):
    """A module that leaves a file where it is imported."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "stranger.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path / "path")
    yield tmp_path / "ran"
    sys.modules.pop("stranger", None)


def test_resume_writes_through_none_of_the_links_of_a_run(trained, tmp_path, outside, monkeypatch):
    monkeypatch.setattr("canter.cli.train.record_video", lambda *_: "none")
    for name in ("config.json", "evaluation.json", "curve.png", "checkpoint_final.pt"):
        content = (trained / name).read_bytes() if (trained / name).exists() else b""
        (tmp_path / f"linked_{name}").write_bytes(content)
        (trained / name).unlink(missing_ok=True)
        (trained / name).symlink_to(tmp_path / f"linked_{name}")
    (trained / "git").rename(trained / "moved") if (trained / "git").exists() else None
    (trained / "git").symlink_to(outside)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("linked_*")}
    assert main(["resume", str(trained), "--total-timesteps", "64"]) == 0
    assert {path.name: path.read_bytes() for path in tmp_path.glob("linked_*")} == before


@pytest.mark.parametrize(
    ("folder", "command"), [("export", ["export"]), ("demonstrations", ["collect"]), ("dagger", ["dagger"])]
)
def test_commands_refuse_a_linked_folder_of_the_run(trained, outside, capsys, folder, command):
    (trained / folder).symlink_to(outside)
    assert main([*command, str(trained)]) == 6
    assert f"{folder}'" in capsys.readouterr().err


def test_a_video_replaces_a_link_and_not_its_target(tmp_path, outside):
    for name in ("play.mp4", "play.gif"):
        (tmp_path / name).symlink_to(tmp_path / "precious")
        with Film(tmp_path / name, 10) as film:
            for i in range(3):
                film.add(np.full((16, 16, 3), i, np.uint8))
        assert not (tmp_path / name).is_symlink()
        assert (tmp_path / name).stat().st_size > 30


@pytest.mark.parametrize("command", ["resume", "eval", "play", "collect", "distill", "dagger"])
def test_a_task_of_a_stranger_imports_nothing(trained, tell_tale, capsys, command):
    edit(trained, lambda config: config["run"].update(task="stranger:canter/CartPole"))
    assert main([command, str(trained)]) == 2
    text = capsys.readouterr().err
    assert "run.task would import the module 'stranger'" in text
    assert "add --modules stranger" in text
    assert not tell_tale.exists()


def test_a_task_whose_module_the_user_names_is_made(trained, tell_tale, capsys):
    edit(trained, lambda config: config["run"].update(task="stranger:canter/CartPole"))
    assert main(["eval", str(trained), "--episodes", "1", "--modules", "stranger"]) == 0
    assert tell_tale.exists()
    capsys.readouterr()
    assert main(["resume", str(trained), "--total-timesteps", "64", "--modules", "stranger"]) == 0
    summary = capsys.readouterr().out
    assert f"canter play {trained} --modules stranger\n" in summary
    assert f"canter export {trained} --modules stranger\n" in summary


@pytest.mark.parametrize(
    ("section", "settings"),
    [
        ("algorithm", {"symmetry_cfg": {"data_augmentation_func": "stranger:mirror", "use_data_augmentation": True}}),
        ("policy", {"class_name": "RslRlModels", "actor_model": {"class_name": "stranger.Model"}}),
    ],
)
def test_functions_and_classes_of_a_stranger_import_nothing(trained, tell_tale, capsys, section, settings):
    edit(trained, lambda config: config[section].update(settings))
    assert main(["resume", str(trained)]) == 2
    assert "would import the module 'stranger'" in capsys.readouterr().err
    assert not tell_tale.exists()


def test_load_and_export_import_no_model_of_a_stranger(trained, tell_tale, capsys):
    path = trained / "checkpoint_final.pt"
    state = load_checkpoint(path)
    state["config"]["policy"] = {"class_name": "RslRlModels", "actor_model": {"class_name": "stranger:Model"}}
    save_checkpoint(path, {**state, "format_version": 1})
    with pytest.raises(ValueError, match=r"would import the module 'stranger'.*modules=\['stranger'\]"):
        canter.load(path)
    assert main(["export", str(path)]) == 2
    assert not tell_tale.exists()


@pytest.mark.parametrize(
    ("command", "setting", "value"),
    [
        ("eval", "policy.actor_hidden_dims", [10**12]),
        ("resume", "policy.critic_hidden_dims", [8, 10**12]),
        ("collect", "policy", {"class_name": "ActorCriticRecurrent", "rnn_hidden_size": 10**8}),
        ("eval", "policy", {"class_name": "ActorCriticRecurrent", "rnn_num_layers": 10**9}),
        ("resume", "run.num_envs", 10**12),
        ("resume", "run.workers", 10**8),
        ("eval", "run.components", {"history": {"obs": 10**12}}),
        ("resume", "num_steps_per_env", 10**12),
    ],
)
def test_a_config_that_asks_for_more_memory_than_there_is_is_refused(trained, capsys, command, setting, value):
    def change(config):
        if setting == "run.workers":
            config["run"] |= {"task": "CartPole-v1", "num_envs": value}
        *sections, name = setting.split(".")
        for section in sections:
            config = config[section]
        config[name] = value

    edit(trained, change)
    assert main([command, str(trained)]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert any(words in text for words in ("iB left for it", "iB are free", "iB free", "more than 10,000 tensors")), (
        text
    )


def test_load_and_export_refuse_a_checkpoint_that_asks_for_more_memory_than_there_is(trained, capsys):
    path = trained / "checkpoint_final.pt"
    state = load_checkpoint(path)
    state["config"]["policy"]["actor_hidden_dims"] = [10**12]
    save_checkpoint(path, {**state, "format_version": 1})
    with pytest.raises(MemoryError, match=r"the policy of .*checkpoint_final.pt needs a tensor of shape \(10{12}, 4\)"):
        canter.load(path)
    assert main(["export", str(path)]) == 2
    assert "TiB, but cpu has" in capsys.readouterr().err


def test_names_of_rsl_rl_and_of_canter_are_no_modules():
    config = {"policy": {"class_name": "ActorCritic", "actor_model": {"class_name": "rsl_rl.models:CNNModel"}}}
    assert list(named_modules({**config, "run": {"task": "canter/CartPole"}})) == []
    code = {"run": {"task": "a.b:C"}, "x": [{"class_name": "d.E"}, {"data_augmentation_func": "f:g"}]}
    assert [module for _, module in named_modules(code)] == ["a.b", "d", "f"]
    wrappers = ["TimeLimit", "a:B", {"c.d:E": {"x": 1}}, {"FrameStack": {"n": 4}}]
    for given in (wrappers, tuple(wrappers)):
        assert [module for _, module in named_modules({"run": {"wrappers": given}})] == ["a", "c.d"]


class Spy(Backend):
    """A backend that keeps its settings."""

    loadable = frozenset({"project", "tags"})
    opened: dict = {}

    def __init__(self, log_dir, **kwargs):
        super().__init__(log_dir)
        Spy.opened = kwargs

    def log_scalars(self, scalars, step):
        pass


@pytest.fixture
def spied(trained, monkeypatch):
    """A run whose config.yaml names hosts, keys and accounts for its logging backend."""
    monkeypatch.setattr("canter.cli.train.record_video", lambda *_: "none")
    monkeypatch.setattr("canter.cli.train.plot_runs", lambda *_, **__: "none")
    monkeypatch.setitem(BACKENDS, "spy", Spy)
    settings = {"project": "gallop", "tags": ["a"], "entity": "them", "settings": {"base_url": "https://evil.invalid"}}
    edit(trained, lambda config: config.update(logger_backend=["spy"], logger_kwargs={"spy": settings}))
    return trained


def test_hosts_and_accounts_of_a_loaded_config_are_left_out_with_a_message(spied, capsys):
    assert main(["resume", str(spied), "--total-timesteps", "64"]) == 0
    assert Spy.opened == {"project": "gallop", "tags": ["a"]}
    text = capsys.readouterr().err
    assert "not used: spy.entity, spy.settings" in text
    assert "--logger-kwargs '{spy: {entity: ...}}'" in text


def test_hosts_and_accounts_given_on_the_command_line_are_used(spied, capsys):
    given = "{spy: {entity: us, settings: {base_url: http://localhost}}}"
    assert main(["resume", str(spied), "--total-timesteps", "64", "--logger-kwargs", given]) == 0
    expected = {"project": "gallop", "tags": ["a"], "entity": "us", "settings": {"base_url": "http://localhost"}}
    assert Spy.opened == expected
    assert "not used" not in capsys.readouterr().err


def test_an_upload_takes_no_host_from_a_checkpoint(spied, monkeypatch, capsys):
    monkeypatch.setattr(Spy, "save_file", lambda self, path: None)
    path = spied / "checkpoint_final.pt"
    state = load_checkpoint(path)
    state["config"] |= {"logger_backend": ["spy"], "logger_kwargs": {"spy": {"host": "evil.invalid", "tags": "a"}}}
    save_checkpoint(path, state)
    assert main(["export", str(path), "--upload", "--formats", "onnx", "--no-env-samples"]) == 0
    assert Spy.opened == {"tags": "a"}
    assert "not used: spy.host" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("backend", "hostile"),
    [
        (
            "wandb",
            {"settings": {"base_url": "https://evil.invalid"}, "entity": "them", "dir": "/", "project": "them/x"},
        ),
        ("swanlab", {"api_key": "k", "host": "evil.invalid", "workspace": "them", "log_dir": "/", "callbacks": ["a"]}),
        (
            "trackio",
            {"space_id": "them/x", "server_url": "https://evil.invalid", "webhook_url": "https://evil.invalid"},
        ),
        ("mlflow", {"tracking_uri": "https://evil.invalid", "tags": {"mlflow.user": "them"}, "experiment": "../x"}),
        ("tensorboard", {"filename_suffix": "/../../x", "log_dir": "/"}),
    ],
)
def test_no_backend_takes_a_host_key_account_or_path_from_a_file(backend, hostile):
    assert loaded_settings(backend, hostile, None) == ({backend: {}}, [f"{backend}.{name}" for name in hostile])
    assert loaded_settings(backend, hostile, hostile) == ({backend: hostile}, [])


def test_a_backend_of_the_user_declares_what_may_be_loaded():
    class Plain(Backend):
        pass

    register_logger("plain", Plain)
    try:
        assert loaded_settings("plain", {"filename": "metrics.csv"}, None) == ({"plain": {}}, ["plain.filename"])
    finally:
        del BACKENDS["plain"]


def test_a_changed_setting_in_config_yaml_is_named_on_resume(trained, capsys, monkeypatch):
    monkeypatch.setattr("canter.cli.train.record_video", lambda *_: "none")
    edit(trained, lambda config: config["algorithm"].update(gamma=0.5))
    assert main(["resume", str(trained), "--total-timesteps", "64"]) == 0
    assert "algorithm.gamma is 0.5, was 0.9" in capsys.readouterr().err
    assert changed_settings({"a": {"b": 1}, "device": "cpu"}, {"a": {"b": 1, "c": 2}}) == ["a.c is None, was 2"]


def test_a_crafted_checksum_does_not_let_a_bomb_in(trained, capsys):
    path = trained / "checkpoint_final.pt"
    save_checkpoint(path, {"model_state_dict": {"actor.0.weight": torch.zeros(1).expand(1 << 40)}})
    assert main(["eval", str(trained), "--checkpoint", str(path)]) == 6
    assert "expands to more than" in capsys.readouterr().err


def test_a_run_opens_no_port_and_no_connection(train, monkeypatch):
    def refuse(*args):
        raise AssertionError("a socket was used")

    for name in ("listen", "connect", "connect_ex", "bind"):
        monkeypatch.setattr(socket.socket, name, refuse)
    assert train()[0] == 0


def test_records_of_a_run_that_are_damaged_are_named(trained, capsys):
    (trained / "best.json").write_text(json.dumps({"eval/mean_reward": "much"}))
    assert main(["resume", str(trained), "--total-timesteps", "64"]) == 6
    assert "best.json has no mean return but 'much'; delete it" in capsys.readouterr().err
