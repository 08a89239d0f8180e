import importlib
import sys
from pathlib import Path

import gymnasium
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from canter.cli.__main__ import main
from canter.compat.batched_envs import RslRlAdapter
from canter.envs import check_env, register_adapter, register_env, torch_envs, wrap
from canter.envs.gymnasium import GymVecEnv
from canter.envs.gymnasium_vector import GymVectorEnvAdapter
from canter.envs.wrap import wrap_env


def test_a_vec_env_passes_through():
    env = torch_envs.CartPole(2)
    assert wrap_env(env) is env
    assert wrap_env(env, device="cpu", num_envs=2) is env
    assert wrap_env(env, device="meta").device == torch.device("meta")


def test_a_seed_reaches_a_vec_env():
    first, second = (wrap_env(torch_envs.CartPole(2), seed=4) for _ in range(2))
    assert torch.equal(first.reset()[0], second.reset()[0])


def test_gymnasium_environments_in_every_form(scripted, staggered):
    for source in (scripted(), scripted, [scripted, scripted], [scripted()]):
        assert type(wrap_env(source)) is GymVecEnv
    assert wrap_env(scripted, num_envs=5).num_envs == 5
    assert wrap_env(staggered).num_envs == 3
    assert len({id(env) for env in wrap_env(scripted, num_envs=5).envs}) == 5


def test_a_vector_environment(staggered):
    env = wrap_env(SyncVectorEnv(staggered), device="cpu")
    assert type(env) is GymVectorEnvAdapter
    assert env.num_envs == 3


def test_rsl_rl_style_environments(second, third):
    assert type(wrap_env(second())) is RslRlAdapter
    assert type(wrap_env(second)) is RslRlAdapter
    env = wrap_env(third(), obs_groups={"actor": ["critic"]})
    assert env.num_obs == 2


def test_names():
    env = wrap_env("CartPole-v1", num_envs=3, seed=1)
    assert type(env) is GymVecEnv
    assert env.num_envs == 3
    assert torch.equal(env.reset()[0], wrap_env("CartPole-v1", num_envs=3, seed=1).reset()[0])
    robot = wrap_env("canter/PointRobot", num_envs=7, seed=1)
    assert type(robot) is torch_envs.PointRobot
    assert robot.num_envs == 7
    assert torch.equal(robot.reset()[0], wrap_env("canter/PointRobot", num_envs=7, seed=1).reset()[0])


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(ValueError, match="'canter/CartPole'"):
        wrap_env("canter/Cartpole")
    with pytest.raises(gymnasium.error.Error):
        wrap_env("NoSuchEnv-v0")


def test_a_named_environment_renders_images():
    env = wrap_env("canter/Pendulum", render_mode="rgb_array")
    assert env.render().shape[2] == 3


def test_a_wrong_number_of_environments_is_an_error(scripted, second):
    with pytest.raises(ValueError, match="num_envs=4 was requested, but Scripted holds 1"):
        wrap_env(scripted(), num_envs=4)
    with pytest.raises(ValueError, match="num_envs=4 was requested, but Second holds 3"):
        wrap_env(second(), num_envs=4)
    assert wrap_env(second(), num_envs=3).num_envs == 3


@pytest.mark.parametrize("thing", [3, None, [], [1, 2], {"a": 1}])
def test_an_unknown_object_is_an_error_that_lists_the_adapters(thing):
    with pytest.raises(TypeError) as error:
        wrap_env(thing)
    assert f"{type(thing).__name__} is no environment that canter knows" in str(error.value)
    for part in ("VecEnv", "VectorEnv", "gymnasium.Env", "rsl_rl", "num_actions", "canter/<task>", "EnvPool", "ApexRL"):
        assert part in str(error.value)


def test_a_missing_attribute_is_named_in_the_error(second):
    class NoActions(second):
        num_actions = None

    with pytest.raises(TypeError, match="NoActions has no attribute 'num_actions'"):
        wrap_env(NoActions())


def test_a_function_must_return_an_environment():
    with pytest.raises(TypeError, match="it must return an environment"):
        wrap_env(lambda: "CartPole-v1")


def test_an_unwrapped_maniskill_environment_is_refused(batched):
    class Maniskill(batched):
        __module__ = "mani_skill.envs.tasks"

        def reset(self):
            return self.obs, {}

        def step(self, actions):
            return None

    with pytest.raises(TypeError, match="wrap it in ManiSkillVectorEnv"):
        wrap_env(Maniskill())


@pytest.fixture
def fake_simulator(monkeypatch):
    """A module of a user's that registers an adapter and a prefix of names; forgotten afterwards."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr(wrap, "ADAPTERS", dict(wrap.ADAPTERS))
    monkeypatch.setattr(wrap, "ENV_NAMES", dict(wrap.ENV_NAMES))
    monkeypatch.delitem(sys.modules, "fake_simulator", raising=False)
    return lambda: importlib.import_module("fake_simulator")


def test_a_registered_simulator_is_adapted(fake_simulator):
    module = fake_simulator()
    arena = module.Arena("push", 3)
    env = wrap_env(arena, num_envs=3)
    assert type(env) is module.ArenaEnv
    assert env.step(torch.ones(3, 1)).reward.tolist() == pytest.approx([0.1] * 3)
    assert type(wrap_env(lambda: module.Arena("push", 3))) is module.ArenaEnv
    assert wrap_env(arena, device="meta").device == torch.device("meta")
    with pytest.raises(ValueError, match="num_envs=4 was requested, but Arena holds 3"):
        wrap_env(arena, num_envs=4)


def test_check_env_reports_the_adapter(fake_simulator, scripted, second):
    report = check_env(fake_simulator().Arena("push", 3), num_steps=40)
    assert report.ok
    assert report.adapter == "Arena"
    assert "adapter             Arena" in str(report)
    assert check_env(scripted, num_steps=2).adapter == "Gymnasium"
    assert check_env("CartPole-v1", num_steps=2).adapter == "Gymnasium"
    assert check_env(wrap_env(second()), num_steps=2).adapter == "rsl_rl style"
    assert check_env(torch_envs.CartPole(2), num_steps=2).adapter == "none"


def test_a_registered_prefix_makes_environments_by_name(fake_simulator):
    env = wrap_env("fake_simulator:arena/push", num_envs=5)
    assert (type(env).__name__, env.arena.task, env.num_envs, env.adapter) == ("ArenaEnv", "push", 5, "Arena")
    assert wrap_env("arena/slide", num_envs=2).arena.task == "slide"
    register_env("arena/solo", lambda task, num_envs, **options: torch_envs.CartPole(num_envs))
    assert type(wrap_env("arena/solo")) is torch_envs.CartPole


def test_a_registered_name_is_trained_from_the_command_line(fake_simulator, tmp_path):
    sizes = ["--num-envs", "4", "--num-steps-per-env", "4", "--num-mini-batches", "1", "--max-iterations", "1"]
    ends = ["--final-episodes", "0", "--eval-interval", "0", "--no-video", "--name", "r", "--runs-dir", str(tmp_path)]
    assert main(["train", "fake_simulator:arena/push", *sizes, *ends]) == 0
    assert list(tmp_path.rglob("config.yaml"))


def test_the_adapter_registered_last_is_tried_first(fake_simulator, second):
    register_adapter("mine", lambda env: isinstance(env, second), lambda *given: torch_envs.CartPole(3), "a Second")
    assert type(wrap_env(second())) is torch_envs.CartPole
    order = [line.split(":")[0] for line in known_adapters(3).splitlines()[1:]]
    ours = ["- canter", "- PettingZoo", "- Stable-Baselines3", "- EnvPool", "- Gymnasium vector", "- ApexRL style"]
    assert order[:7] == ["- mine", *ours]
    register_adapter("mine", lambda env: False, lambda *given: None, "nothing")
    assert type(wrap_env(second())) is RslRlAdapter
    assert known_adapters(3).count("- mine") == 1


def known_adapters(thing):
    with pytest.raises(TypeError) as error:
        wrap_env(thing)
    return str(error.value)


def test_an_adapter_must_return_a_vec_env(fake_simulator):
    register_adapter("wrong", lambda env: isinstance(env, int), lambda *given: "nothing", "a number")
    with pytest.raises(TypeError, match="the adapter 'wrong' returned str, not a canter.envs.VecEnv"):
        wrap_env(3)


def test_apexrl_environments_are_distinguished_from_rsl_rl(second):
    class Apex(second):
        action_space_gym = spaces.Discrete(2)

    assert wrap_env(Apex()).adapter == "ApexRL style"
    assert wrap_env(second()).adapter == "rsl_rl style"
