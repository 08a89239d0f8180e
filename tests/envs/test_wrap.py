import gymnasium
import pytest
import torch
from gymnasium.vector import SyncVectorEnv

from canter.envs import torch_envs
from canter.envs.gymnasium import GymVecEnv
from canter.envs.gymnasium_vector import GymVectorEnvAdapter
from canter.envs.rsl_rl import RslRlAdapter
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
    with pytest.raises(ValueError, match="no torch-native environment 'Cartpole'; there are CartPole, Course,"):
        wrap_env("canter/Cartpole")
    with pytest.raises(gymnasium.error.Error):
        wrap_env("NoSuchEnv-v0")


def test_pictures_can_be_asked_for_by_name():
    env = wrap_env("canter/Pendulum", render_mode="rgb_array")
    assert env.render().shape[2] == 3


def test_a_wrong_number_of_environments_is_an_error(scripted, second):
    with pytest.raises(ValueError, match="num_envs=4 was requested, but Scripted holds 1"):
        wrap_env(scripted(), num_envs=4)
    with pytest.raises(ValueError, match="num_envs=4 was requested, but Second holds 3"):
        wrap_env(second(), num_envs=4)
    assert wrap_env(second(), num_envs=3).num_envs == 3


@pytest.mark.parametrize("thing", [3, None, [], [1, 2], {"a": 1}])
def test_anything_else_is_an_error_that_lists_what_was_looked_for(thing):
    with pytest.raises(TypeError) as error:
        wrap_env(thing)
    assert f"{type(thing).__name__} is no environment that canter knows" in str(error.value)
    for part in ("VecEnv", "VectorEnv", "gymnasium.Env", "rsl_rl", "num_actions", "canter/<task>", "EnvPool", "ApexRL"):
        assert part in str(error.value)


def test_an_environment_that_lacks_an_attribute_is_told_which(second):
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
