import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from canter.envs.check import check_env
from canter.envs.torch_envs import TORCH_ENVS, CartPole
from canter.envs.wrap import wrap_env
from canter.envs.wrappers import VecEnvWrapper


@pytest.mark.parametrize("name", sorted(TORCH_ENVS))
def test_torch_native_environments_have_no_problem(name):
    report = check_env(TORCH_ENVS[name](3, seed=0), num_steps=60)
    assert report.ok, str(report)
    assert report.final_obs == "given in the record"
    assert report.bootstrap == "time-outs continue with the value of the final observation"
    assert report.steps == 60


def test_the_report_is_a_readable_table(staggered):
    report = check_env(SyncVectorEnv(staggered), num_steps=10)
    text = str(report)
    assert "gymnasium.vector.VectorEnv (SyncVectorEnv)" in text
    assert "3 on cpu" in text
    assert "(3,) float32" in text
    assert "Discrete(2)" in text
    assert "next step (the resetting step is masked)" in text
    assert text.endswith("no problem in 10 steps")


def test_the_report_names_the_autoreset_mode(staggered):
    reports = {mode: check_env(SyncVectorEnv(staggered, autoreset_mode=mode), num_steps=12) for mode in AutoresetMode}
    assert reports[AutoresetMode.SAME_STEP].final_obs == "extras['final_obs']"
    assert reports[AutoresetMode.NEXT_STEP].final_obs == "the observation of the step that ended the episode"
    assert reports[AutoresetMode.DISABLED].autoreset == "by canter"
    assert all(report.ok for report in reports.values())


def test_a_wrapped_environment_is_reported_as_it_is(staggered, legacy):
    report = check_env(VecEnvWrapper(wrap_env(SyncVectorEnv(staggered))), num_steps=12)
    assert report.autoreset == "next step (the resetting step is masked)"
    assert report.contract == "gymnasium.vector.VectorEnv (SyncVectorEnv)"
    assert check_env(VecEnvWrapper(wrap_env(legacy())), num_steps=3).contract == "rsl_rl style, 1.x (5-tuple)"


def test_nothing_is_printed(staggered, capsys):
    check_env(staggered, num_steps=5)
    assert capsys.readouterr() == ("", "")


def test_the_report_names_the_rsl_rl_version_and_the_bootstrap(legacy, second, third):
    assert check_env(legacy(), num_steps=8).contract == "rsl_rl style, 1.x (5-tuple)"
    report = check_env(third(), num_steps=8)
    assert report.contract == "rsl_rl style, 3.x and later (observation groups)"
    assert report.final_obs == "extras['final_obs']"
    assert report.critic_obs == "(2,) float32"
    report = check_env(second(), num_steps=8)
    assert report.final_obs == "none"
    assert report.bootstrap.startswith("time-outs continue with the value of the state before the last step")
    assert any("extras['final_obs']" in note for note in report.notes)
    assert any("dones are int64" in note for note in report.notes)


def test_the_report_notes_that_no_episode_timed_out(second):
    class Endless(second):
        def step(self, actions):
            obs, reward, done, extras = super().step(actions)
            return obs, reward, done, {"observations": extras["observations"]}

    report = check_env(Endless(), num_steps=8)
    assert report.bootstrap == "none so far: every end was terminal"
    assert any("extras['time_outs']" in note for note in report.notes)


def test_conversions_are_noted(second):
    class Odd(second):
        def get_observations(self):
            return self.obs.double(), {}

        def step(self, actions):
            obs, reward, done, extras = super().step(actions)
            return obs.double(), reward.unsqueeze(1), done.float(), {"time_outs": extras["time_outs"]}

    report = check_env(Odd(), num_steps=6)
    assert report.ok
    assert "obs is float64 and kept as float32" in report.notes
    assert "rewards have shape (3, 1) and are taken as (3,)" in report.notes
    assert "dones are float32 and taken as bool" in report.notes


class SameBuffer:
    def step(self, actions):
        obs, *rest = super().step(actions)
        self.buffer = getattr(self, "buffer", torch.zeros(3, 4))
        self.buffer.copy_(obs)
        return self.buffer, *rest


def test_a_reused_buffer_is_noted_or_a_problem(second):
    class Reusing(SameBuffer, second):
        pass

    report = check_env(Reusing(), num_steps=6)
    assert report.ok
    assert "obs is one buffer that every step overwrites; canter copies it" in report.notes

    class Lying(Reusing):
        returns_fresh_tensors = True

    report = check_env(Lying(), num_steps=6)
    assert not report.ok
    assert any("says returns_fresh_tensors" in problem for problem in report.problems)


def test_fresh_tensors_are_not_called_reused(second):
    report = check_env(second(), num_steps=20)
    assert not any("buffer" in note for note in report.notes)


def test_numbers_that_are_not_finite_are_a_problem(second):
    class Exploding(second):
        def step(self, actions):
            obs, reward, done, extras = super().step(actions)
            if self.t[2] == 3:
                obs[1, 0] = torch.inf
                reward[2] = torch.nan
            return obs, reward, done, extras

    report = check_env(Exploding(), num_steps=6)
    assert "obs is not finite in environment(s) [1]" in report.problems
    assert "reward is not finite in environment(s) [2]" in report.problems
    assert str(report).endswith("2 problem(s) in 6 steps")


def test_a_shape_that_changes_is_a_problem(second):
    class Growing(second):
        def step(self, actions):
            obs, *rest = super().step(actions)
            return torch.cat([obs, obs], 1), *rest

    report = check_env(Growing(), num_steps=6)
    assert len(report.problems) == 1
    assert "step 0 raised ValueError: observation group 'policy' changed at step 1" in report.problems[0]


def test_a_vec_env_that_breaks_the_contract_is_a_problem():
    class Careless(CartPole):
        def step(self, actions):
            record = super().step(actions)
            self.obs = getattr(self, "obs", record.obs)
            self.obs.copy_(record.obs)
            return record._replace(obs=self.obs, critic_obs=self.obs, reward=record.reward.unsqueeze(1))

    report = check_env(Careless(3, seed=0), num_steps=6)
    assert "obs of an earlier step was overwritten; return new tensors from step" in report.problems
    assert "reward must be (3,) torch.float32, got (3, 1) torch.float32" in report.problems


def test_the_report_says_which_network_each_part_gets(scripted):
    space = spaces.Dict({"camera": spaces.Box(0, 255, (8, 8, 3), np.uint8), "speed": spaces.Box(-1, 1, (2,))})
    space["privileged"] = spaces.Box(-1, 1, (3,))

    class Camera(scripted):
        observation_space = space

        def _obs(self):
            return space.sample()

    report = check_env(Camera, num_steps=3)
    assert report.ok
    assert report.networks == "CNN for camera, MLP for speed; critic: CNN for camera, MLP for speed, privileged"


def test_time_limits_are_reached_where_episodes_can_be_moved():
    env = CartPole(2, seed=0)
    env.dynamics = lambda state, action: (state, torch.ones(2), torch.zeros(2, dtype=torch.bool))
    report = check_env(env, num_steps=20)
    assert report.bootstrap == "time-outs continue with the value of the final observation"
    assert env.episode_length_buf.tolist() == [0, 0]


def test_every_action_space_is_tried(scripted):
    class Many(scripted):
        action_space = spaces.MultiDiscrete([2, 3])

    env = Many(0, 99)
    assert check_env(env, num_steps=40).ok
    assert {tuple(a.tolist()) for a in env.actions} == {(i, j) for i in range(2) for j in range(3)}

    class Half(scripted):
        action_space = spaces.Box(np.array([-1.0, -np.inf]), np.array([2.0, np.inf]), dtype=np.float64)

    env = Half(0, 99)
    assert check_env(env, num_steps=40).ok
    actions = np.stack(env.actions)
    assert actions[:, 0].min() >= -1
    assert actions[:, 0].max() <= 2
    assert actions[:, 1].std() > 0.5
    assert gymnasium.Env in type(env).__mro__
