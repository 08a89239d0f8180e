"""Filling a replay buffer from recorded episodes."""

import types

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from canter.algorithms import SAC, SACConfig
from canter.envs import GymVecEnv
from canter.envs.torch_envs import PointRobot
from canter.runners import OffPolicyRunner
from canter.storage.offline import Episode, episodes_from, fill_replay
from canter.storage.replay import PrioritizedReplayBuffer, TransitionReplayBuffer
from canter.storage.rollout_files.catalog import TrajectoryWriter


def episode(number, length, terminated=False):
    """Observation (number, step), action = reward = 10 * number + step."""
    obs = np.stack([np.full(length + 1, number), np.arange(length + 1)], 1).astype(np.float32)
    steps = 10.0 * number + np.arange(length)
    return Episode(obs, steps[:, None].astype(np.float32), steps.astype(np.float32), terminated)


def buffer(capacity=40, num_envs=1, cls=TransitionReplayBuffer):
    return cls(capacity, (2,), (1,), action_dtype=torch.float32, num_envs=num_envs)


def stored(replay, n_step=1):
    out = []
    for env in range(replay.num_envs):
        count, size = int(replay.count[env]), int(replay.size[env])
        slots = torch.arange(count - size, count) % replay.num_rows * replay.num_envs + env
        rows = replay.data["order"][slots].long()
        out.append(replay.take(rows, torch.full_like(rows, env), n_step, 0.5))
    return out


def test_episodes_are_stored_one_after_the_other():
    replay = buffer()
    assert fill_replay(replay, [episode(1, 3, True), episode(2, 2), episode(3, 4, True)]) == 9
    (batch,) = stored(replay)
    assert batch.obs.tolist() == [[1, 0], [1, 1], [1, 2], [2, 0], [2, 1], [3, 0], [3, 1], [3, 2], [3, 3]]
    assert (batch.next_obs - batch.obs == torch.tensor([0.0, 1.0])).all()
    assert batch.dones.tolist() == [0, 0, 1, 0, 0, 0, 0, 0, 1]
    assert torch.equal(batch.actions[:, 0], batch.rewards)
    (windows,) = stored(replay, 3)
    assert windows.rewards[:5].tolist() == [10 + 5.5 + 3, 11 + 6, 12, 20 + 10.5, 21]
    assert windows.next_obs[3].tolist() == [2, 2]


def test_steps_taken_after_filling_follow_the_episodes():
    replay = buffer(8)
    fill_replay(replay, [episode(1, 3), episode(2, 2, True)])
    for t in range(3):
        obs = torch.tensor([[9.0, float(t)]])
        replay.add(obs, torch.zeros(1, 1), torch.tensor([90.0 + t]), obs + torch.tensor([0.0, 1.0]), torch.zeros(1))
    (batch,) = stored(replay)
    # Nine rows: the final observations of 1 and 2 take one each, and so does the head; the oldest three are gone.
    assert batch.obs.tolist() == [[1, 2], [2, 0], [2, 1], [9, 0], [9, 1], [9, 2]][-len(batch.obs) :]
    assert len(replay) == len(batch.obs) >= 5
    assert (batch.next_obs[:, 1] - batch.obs[:, 1] == 1).all()
    assert (batch.next_obs[:, 0] == batch.obs[:, 0]).all()


def test_environments_share_the_episodes_and_a_full_buffer_stops():
    replay = buffer(12, num_envs=2)
    added = fill_replay(replay, (episode(i, 3) for i in range(1, 100)))
    assert added == 12
    a, b = stored(replay)
    assert {*a.obs[:, 0].tolist()} & {*b.obs[:, 0].tolist()} == set()
    for batch in (a, b):
        assert len(batch.obs) >= 4
        assert (batch.next_obs[:, 1] - batch.obs[:, 1] == 1).all()


def test_a_long_episode_is_shortened_without_a_terminal_state():
    replay = buffer(6)
    assert fill_replay(replay, [episode(1, 50, True)], max_steps=5) == 5
    (batch,) = stored(replay)
    assert batch.dones.sum() == 0
    assert batch.next_obs[-1].tolist() == [1, 5]


def test_steps_are_joined_to_episodes():
    def steps():
        for number, length in ((1, 2), (2, 3)):
            for t in range(length):
                yield {
                    "obs": np.array([number, t], np.float32),
                    "action": np.array([0.5]),
                    "reward": float(t),
                    "next_obs": np.array([number, t + 1], np.float32),
                    "terminated": number == 1 and t == length - 1,
                    "truncated": number == 2 and t == length - 1,
                }

    first, second = episodes_from(steps())
    assert first.terminated
    assert not second.terminated
    assert first.obs.tolist() == [[1, 0], [1, 1], [1, 2]]
    assert second.rewards.tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="a step lacks next_obs, terminated; it has obs, action, reward"):
        list(episodes_from([{"obs": 1, "action": 1, "reward": 1}]))


def test_a_minari_dataset_is_read_through_its_own_interface():
    def iterate():
        for number in (1, 2):
            e = episode(number, 3)
            ends = {"terminations": np.array([0, 0, number == 1]), "truncations": np.array([0, 0, number == 2])}
            yield types.SimpleNamespace(observations=e.obs, actions=e.actions, rewards=e.rewards, **ends)

    replay = buffer()
    assert fill_replay(replay, types.SimpleNamespace(iterate_episodes=iterate)) == 6
    (batch,) = stored(replay)
    assert batch.dones.tolist() == [0, 0, 1, 0, 0, 0]


def test_trajectory_files_are_read(tmp_path):
    with TrajectoryWriter(tmp_path, {}) as writer:
        for number, (length, ended) in enumerate([(3, "terminated"), (4, "truncated"), (3, "")], 1):
            e = episode(number, length)
            dones = np.zeros((length, 1), np.uint8)
            dones[-1] = ended != ""
            arrays = {"observations": e.obs[:-1], "actions": e.actions, "rewards": e.rewards[:, None], "dones": dones}
            arrays["timeouts"] = dones[:, 0].astype(bool) & (ended == "truncated")
            if ended == "truncated":
                arrays["final_observations"] = e.obs[-1:]
            writer.add(number, arrays, 0, ended)
    found = {int(e.obs[0, 0]): e for e in episodes_from(str(tmp_path))}
    assert [len(found[k].rewards) for k in (1, 2, 3)] == [3, 4, 2], "of the last, what followed is not known"
    assert [found[k].terminated for k in (1, 2, 3)] == [True, False, False]
    assert found[2].obs[-1].tolist() == [2, 4]
    assert found[3].obs[-1].tolist() == [3, 2]
    replay = buffer()
    assert fill_replay(replay, [tmp_path]) == 9


def test_prioritised_replay_draws_recorded_steps_too():
    replay = buffer(cls=PrioritizedReplayBuffer)
    fill_replay(replay, [episode(1, 4)])
    assert sorted(set(replay.draw(200, 1, 0.9, None).rewards.tolist())) == [10, 11, 12, 13]


def test_data_of_other_shapes_is_refused():
    with pytest.raises(ValueError, match=r"the data has observations of shape \(2,\), the environment .*\(3,\)"):
        fill_replay(TransitionReplayBuffer(10, (3,), (1,), action_dtype=torch.float32), [episode(1, 2)])
    with pytest.raises(ValueError, match="there is no episode in"):
        fill_replay(buffer(), [])
    critic = TransitionReplayBuffer(10, (2,), (1,), action_dtype=torch.float32, critic_obs_shape=(3,))
    with pytest.raises(ValueError, match="the critic has observations of its own"):
        fill_replay(critic, [episode(1, 2)])


class Plain(PointRobot):
    """Without a privileged observation."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.critic_obs_space = self.obs_space = spaces.Box(-np.inf, np.inf, (6,))

    def observe(self, state):
        return super().observe(state)[0]


class Still(gymnasium.Env):
    """Observes zeros."""

    observation_space = spaces.Box(-1.0, 1.0, (2,))

    def __init__(self, action_space):
        self.action_space = action_space

    def reset(self, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, False, False, {}


def test_a_run_starts_with_recorded_data_in_its_buffer(tmp_path):
    with TrajectoryWriter(tmp_path, {}) as writer:
        for number in range(1, 4):
            dones = np.zeros((20, 1), np.uint8)
            dones[-1] = 1
            arrays = {"observations": np.random.rand(20, 6).astype(np.float32), "dones": dones}
            arrays |= {"actions": np.zeros((20, 2), np.float32), "rewards": np.ones((20, 1), np.float32)}
            writer.add(number, arrays, 0, "terminated")
    cfg = SACConfig(
        batch_size=8,
        learning_starts=0,
        buffer_size=200,
        offline_data=str(tmp_path),
        seed=1,
        offline_gradient_steps=5,
        actor_hidden_dims=(8,),
        critic_hidden_dims=(8,),
    )
    runner = OffPolicyRunner(Plain(2), cfg, device="cpu", show_progress=False)
    runner.learn(8)
    assert isinstance(runner.alg, SAC)
    assert runner.alg.num_updates == 5 + 4
    assert len(runner.alg.replay) == 60 + 8


def test_recorded_actions_are_those_that_the_environment_executed():
    box = spaces.Box(np.float32([-1.0, 0.0]), np.float32([1.0, 5.0]))
    env = GymVecEnv([lambda: Still(box)])
    agent = SAC(env, learning_starts=0, batch_size=2, buffer_size=50)
    chosen = np.float32([[-3.0, -3.0], [0.5, 4.0], [9.0, 9.0]])
    agent.fill([Episode(np.zeros((4, 2)), chosen, np.zeros(3), terminated=False)])
    assert agent.replay.data["actions"][:3].tolist() == [[-1.0, 0.0], [0.5, 4.0], [1.0, 5.0]]
    free = SAC(GymVecEnv([lambda: Still(box)], clip_actions=False), learning_starts=0, batch_size=2, buffer_size=50)
    free.fill([Episode(np.zeros((4, 2)), chosen, np.zeros(3), terminated=False)])
    assert free.replay.data["actions"][:3].tolist() == chosen.tolist()


def test_a_missing_directory_of_recordings_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no directory '.*demos' of trajectory files"):
        fill_replay(buffer(), str(tmp_path / "demos"))
