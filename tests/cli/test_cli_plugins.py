"""Registered subcommands, and plugins that register commands and algorithms."""

import os
import re
import subprocess
import sys

import pytest
import yaml

from canter.algorithms import PPO, REGISTRY, Entry, PPOConfig
from canter.cli import COMMANDS, register_command
from canter.cli.__main__ import main
from canter.cli.errors import UserError
from canter.cli.options import parse_train
from canter.utils.config import settings

PLUGIN = '''
import tyro

from canter.algorithms import PPO, PPOConfig, register_algorithm
from canter.cli import register_command
from canter.cli.errors import UserError
from canter.utils.config import settings


class FewEpochs(PPO):
    """PPO under another name."""


@settings
class FewEpochsConfig(PPOConfig):
    """Its settings."""

    num_learning_epochs: int = 3


register_algorithm("fewepochs", FewEpochs, FewEpochsConfig)


def greet(name: tyro.conf.Positional[str], times: int = 1):
    """Greet a person.

    Args:
        name: Name to greet.
        times: Number of greetings.
    """
    if name == "nobody":
        raise UserError("there is nobody to greet")
    print(" ".join(["hello"] * times), name)


register_command("greet", greet, "greet a person", "NAME")
'''
TINY = ["--num-envs", "2", "--num-steps-per-env", "8", "--total-timesteps", "32", "--final-episodes", "0", "--no-video"]
TINY += ["--eval-interval", "0", "--name", "r", "--execution", "eager"]


def installed(*args, cwd, plugins):
    """The installed command, in a process of its own."""
    script = cwd / "bin" / "canter"
    script.parent.mkdir()
    script.write_text("import sys\nfrom canter.cli.__main__ import main\nsys.exit(main())\n")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CANTER_PLUGINS": plugins}
    command = [sys.executable, str(script), *args]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


@pytest.fixture
def lab(tmp_path):
    (tmp_path / "my_lab.py").write_text(PLUGIN)
    return tmp_path


@pytest.fixture
def commands():
    """The table of commands, restored after the test."""
    before = dict(COMMANDS)
    yield COMMANDS
    COMMANDS.clear()
    COMMANDS.update(before)


@pytest.fixture
def canter(monkeypatch, capsys, commands):
    """`canter(*args, cwd, plugins)`: exit code, output and errors of a command in this process."""
    algorithms = dict(REGISTRY)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*args, cwd, plugins):
        monkeypatch.chdir(cwd)
        monkeypatch.setenv("CANTER_PLUGINS", plugins)
        return main([*args]), *capsys.readouterr()

    yield run
    REGISTRY.clear()
    REGISTRY.update(algorithms)
    for name in ("my_lab", "broken_lab", "taken_lab"):
        sys.modules.pop(name, None)


# ---------------------------------------------------------------------- plugins
def test_a_plugin_adds_a_command_that_help_lists(lab, canter):
    code, out, _ = canter("--help", cwd=lab, plugins="my_lab")
    assert code == 0
    assert re.search(r"^  greet NAME +greet a person$", out, re.MULTILINE)
    assert "  train TASK " in out
    assert canter("greet", "ada", "--times", "2", cwd=lab, plugins=" my_lab ,") == (0, "hello hello ada\n", "")
    assert canter("greet", "nobody", cwd=lab, plugins="my_lab") == (2, "", "canter: there is nobody to greet\n")


def test_a_plugin_in_the_working_directory_is_found_by_the_installed_command(lab):
    done = installed("greet", "ada", cwd=lab, plugins="my_lab")
    assert (done.returncode, done.stdout) == (0, "hello ada\n"), done.stderr


def test_a_task_of_a_module_in_the_working_directory_is_found_by_the_installed_command(tmp_path):
    made = "lambda task, num_envs, device, seed, **options: PointRobot(num_envs, device, seed)"
    text = f"from canter.envs import PointRobot, register_env\n\nregister_env('my/point', {made})\n"
    (tmp_path / "my_tasks.py").write_text(text)
    done = installed("check-env", "my_tasks:my/point", "--num-steps", "4", cwd=tmp_path, plugins="")
    assert done.returncode == 0, done.stderr


def test_an_algorithm_of_a_plugin_trains_with_its_own_defaults_and_resumes(lab, canter):
    code, _, errors = canter("train", "canter/CartPole", "--algo", "fewepochs", *TINY, cwd=lab, plugins="my_lab")
    assert code == 0, errors
    run = lab / "runs/canter/CartPole/r-seed1"
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["algorithm"]["class_name"] == "FewEpochs"
    assert config["algorithm"]["num_learning_epochs"] == 3
    assert canter("resume", str(run), "--total-timesteps", "16", cwd=lab, plugins="my_lab")[0] == 0


@pytest.mark.parametrize(
    ("plugins", "message"),
    [
        ("no_such_lab", "cannot import the plugin 'no_such_lab' of CANTER_PLUGINS: ModuleNotFoundError"),
        ("broken_lab", "cannot import the plugin 'broken_lab' of CANTER_PLUGINS: ZeroDivisionError: division by zero"),
        ("taken_lab", "there is a command 'train' already"),
    ],
)
def test_a_plugin_that_cannot_be_imported_is_one_line_and_exit_code_2(tmp_path, canter, plugins, message):
    (tmp_path / "broken_lab.py").write_text("1 / 0\n")
    (tmp_path / "taken_lab.py").write_text("from canter.cli import register_command as r\nr('train', print, 'mine')\n")
    code, _, errors = canter("tasks", cwd=tmp_path, plugins=plugins)
    assert code == 2
    assert errors.startswith("canter: ")
    assert message in errors
    assert errors.count("\n") == 1


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a package whose entry point in the group "canter.plugins" is a module."""

    def package(module):
        info = tmp_path / "packaged_lab-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: packaged-lab\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[canter.plugins]\nlab = {module}\n")
        monkeypatch.syspath_prepend(tmp_path)

    return package


def test_entry_points_of_installed_packages_are_imported(tmp_path, install, capsys, commands):
    code = "from canter.cli import register_command\nregister_command('wave', lambda args: print('waves'), 'wave')\n"
    (tmp_path / "packaged_lab.py").write_text(code)
    install("packaged_lab")
    assert main(["wave"]) == 0
    assert capsys.readouterr().out == "waves\n"


def test_an_entry_point_that_cannot_be_imported_is_named(install, capsys):
    install("absent_lab")
    assert main(["tasks"]) == 2
    assert "cannot import the plugin 'lab', an entry point: ModuleNotFoundError" in capsys.readouterr().err


# ---------------------------------------------------------------------- the table of commands
def divide(numerator: int, denominator: int = 2):
    return numerator // denominator


def test_a_command_is_a_function_or_the_name_of_one(commands, capsys):
    register_command("count", lambda args: len(args), "count the arguments")
    register_command("divide", divide, "divide two numbers")
    register_command("named", f"{__name__}:divide", "divide two numbers")
    assert main(["count", "a", "b", "--c"]) == 3
    assert main(["divide", "--numerator", "12"]) == 6
    assert main(["named", "--numerator", "12", "--denominator", "3"]) == 4
    assert main(["--help"]) == 0
    assert re.search(r"^  count +count the arguments$", capsys.readouterr().out, re.MULTILINE)


def test_an_error_inside_a_command_is_not_taken_for_a_wrong_flag(commands):
    register_command("divide", divide, "divide two numbers")
    with pytest.raises(ZeroDivisionError):
        main(["divide", "--numerator", "1", "--denominator", "0"])
    with pytest.raises(SystemExit) as stop:
        main(["divide", "--numerator", "one"])
    assert stop.value.code == 2


def test_a_name_that_is_taken_is_refused_and_the_same_command_twice_is_not(commands):
    train = COMMANDS["train"]
    with pytest.raises(ValueError, match="there is a command 'train' already"):
        register_command("train", print, "mine")
    register_command("train", train.run, train.help, train.arguments)
    assert COMMANDS["train"] == train


def test_a_mistyped_command_suggests_a_registered_one(commands, capsys):
    register_command("greet", print, "greet")
    assert main(["gret"]) == 2
    assert "'greet'" in capsys.readouterr().err


def test_a_failing_command_of_the_user_keeps_its_traceback_unless_it_is_a_user_error(commands, capsys):
    def fail(args):
        raise UserError("no") if args else RuntimeError("a bug")

    register_command("fail", fail, "fail")
    assert main(["fail", "x"]) == 2
    with pytest.raises(RuntimeError, match="a bug"):
        main(["fail"])


# ---------------------------------------------------------------------- flags of a registered algorithm
class Curious(PPO):
    """PPO under another name."""


@settings
class CuriousConfig(PPOConfig):
    """Its settings."""

    num_learning_epochs: int = 3


def test_the_settings_of_a_registered_algorithm_are_flags(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(REGISTRY, "curious", Entry(Curious, CuriousConfig, None))
    _, config = parse_train(["CartPole-v1", "--algo", "curious"])
    assert config["algorithm"]["num_learning_epochs"] == 3
    assert config["algorithm"]["class_name"] == "Curious"
    _, config = parse_train(["CartPole-v1", "--algo", "curious", "--num-learning-epochs", "4"])
    assert config["algorithm"]["num_learning_epochs"] == 4
    (tmp_path / "cartpole.yaml").write_text("task: CartPole-v1\nalgorithm: {num_learning_epochs: 6}\n")
    monkeypatch.setitem(REGISTRY, "curious", Entry(Curious, CuriousConfig, str(tmp_path)))
    assert parse_train(["CartPole-v1", "--algo", "curious"])[1]["algorithm"]["num_learning_epochs"] == 6
    with pytest.raises(SystemExit):
        parse_train(["CartPole-v1", "--algo", "curious", "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "Algorithm: appo" in text
    assert "curious (default: curious)" in text


def test_an_algorithm_may_be_registered_under_a_name_that_is_not_its_class(monkeypatch):
    monkeypatch.setitem(REGISTRY, "quick", Entry(Curious, CuriousConfig, None))
    _, config = parse_train(["CartPole-v1", "--algo", "quick"])
    assert config["algorithm"]["class_name"] == "quick"
    assert config["algorithm"]["num_learning_epochs"] == 3
