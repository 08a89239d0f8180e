"""The page "st_rl": its part on storage section by section, and the examples of its part on runners.

Its parts on algorithms, modules and runners are those of the pages of these names.
"""

from collections import namedtuple

import numpy as np
import pytest
import torch

from canter.algorithms import APPO
from canter.datasets.dagger_saver import DaggerSaver
from canter.datasets.motion_loader import CLIPS, AMPLoader
from canter.envs import PointRobot
from canter.modules import ActorCritic
from canter.runners import AmpPolicyRunner
from canter.storage.replay_buffer import ReplayBuffer
from canter.storage.rollout_files.base import RolloutFileBase
from canter.storage.rollout_files.catalog import TrajectoryWriter
from canter.storage.rollout_files.rollout_dataset import RolloutDataset
from canter.storage.rollout_storage import (
    ActionLabelRollout,
    AmpRolloutStorage,
    QueueRolloutStorage,
    RolloutStorage,
    SarsaRolloutStorage,
)

N, T, OBS, CRITIC, ACTIONS = 2, 3, 2, 4, 1


def add_steps(storage, count=T, first=0, **more):
    """Step t of environment n has the number 100 * n + t everywhere."""
    for t in range(first, first + count):
        number = 100.0 * torch.arange(N) + t
        step = storage.Transition()
        step.observations = number.view(N, 1).expand(N, OBS).clone()
        step.critic_observations = number.view(N, 1).expand(N, CRITIC).clone()
        step.actions, step.values = number.view(N, 1), number.view(N, 1)
        step.rewards, step.dones = number, torch.zeros(N, dtype=torch.bool)
        step.actions_log_prob = number
        step.action_mean, step.action_sigma = number.view(N, 1), torch.ones(N, 1)
        for name, value in more.items():
            setattr(step, name, value(number))
        storage.add_transitions(step)
    return storage


# Storage 1. reply_buffer.py
def test_1_replay_buffer_is_a_ring_of_pairs():
    buffer = ReplayBuffer(2, 4, "cpu")
    assert (buffer.states.shape, buffer.step, buffer.num_samples) == ((4, 2), 0, 0)
    numbers = torch.arange(6.0).view(-1, 1).expand(-1, 2)
    buffer.insert(states=numbers[:3], next_states=numbers[:3] + 1)
    assert (buffer.step, buffer.num_samples) == (3, 3)
    buffer.insert(numbers[3:], numbers[3:] + 1)
    assert (buffer.step, buffer.num_samples) == (2, 4)
    assert buffer.states[:, 0].tolist() == [4.0, 5.0, 2.0, 3.0]
    batches = list(buffer.feed_forward_generator(num_mini_batch=3, mini_batch_size=5))
    assert len(batches) == 3
    states, following = batches[0]
    assert states.shape == (5, 2)
    torch.testing.assert_close(following, states + 1)


# Storage 2. rollout_storage.py
def test_2_1_rollout_storage_keeps_all_that_ppo_needs():
    storage = add_steps(RolloutStorage(N, T, [OBS], [CRITIC], [ACTIONS], "cpu"))
    assert storage.rewards[:, :, 0].tolist() == [[0.0, 100.0], [1.0, 101.0], [2.0, 102.0]]
    storage.compute_returns(torch.zeros(N, 1), 1.0, 1.0, normalize=False)
    assert storage.returns[:, 1, 0].tolist() == [303.0, 203.0, 102.0]
    assert storage.advantages[2].flatten().tolist() == [0.0, 0.0]
    length, reward = storage.get_statistics()
    assert (float(length), float(reward)) == (3.0, 51.0)
    batches = list(storage.mini_batch_generator(3, 2))
    assert len(batches) == 6
    assert isinstance(batches[0], RolloutStorage.MiniBatch)
    assert sorted(torch.cat([b.actions.flatten() for b in batches[:3]]).tolist()) == [0, 1, 2, 100, 101, 102]
    batch = batches[0]
    assert (batch.obs.shape, batch.critic_obs.shape) == ((2, OBS), (2, CRITIC))
    torch.testing.assert_close(batch.old_mu, batch.actions)
    assert batch.masks is None
    assert batch.hidden_states is None
    recurrent = next(iter(storage.reccurent_mini_batch_generator(1, 1)))
    assert recurrent.obs.shape == (T, N, OBS)
    assert recurrent.masks.all()
    with pytest.raises(AssertionError, match="overflow"):
        add_steps(storage, 1)
    storage.clear()
    assert storage.step == 0


def test_2_2_queue_rollout_storage_expands_loops_and_unties():
    storage = QueueRolloutStorage(N, T, [OBS], [CRITIC], [ACTIONS], "cpu", buffer_dilation_ratio=5 / 3)
    for rollout in range(3):
        add_steps(storage, first=10 * rollout)
        storage.untie_buffer_loop()
        storage.clear()
    assert storage.capacity == 5
    assert storage.actions[:, 0, 0].tolist() == [11.0, 12.0, 20.0, 21.0, 22.0]


def test_2_3_action_label_rollout():
    storage = ActionLabelRollout(N, T, [OBS], [CRITIC], [ACTIONS], buffer_dilation_ratio=1.0, device="cpu")
    assert isinstance(storage, QueueRolloutStorage)
    add_steps(storage, action_labels=lambda number: -number.view(N, 1))
    batch = next(iter(storage.mini_batch_generator(1, 1)))
    torch.testing.assert_close(batch.action_labels, -batch.actions)


def test_2_4_sarsa_rollout_storage_aligns_the_next_state():
    storage = SarsaRolloutStorage(N, T, [OBS], [CRITIC], [ACTIONS], "cpu")
    following = {
        "next_observations": lambda number: number.view(N, 1).expand(N, OBS) + 1,
        "next_critic_observations": lambda number: number.view(N, 1).expand(N, CRITIC) + 1,
    }
    add_steps(storage, **following)
    assert storage.all_observations.shape == (T + 1, N, OBS)
    torch.testing.assert_close(storage.next_observations, storage.observations + 1)
    torch.testing.assert_close(storage.next_critic_observations, storage.privileged_observations + 1)
    batch = next(iter(storage.mini_batch_generator(1, 1)))
    torch.testing.assert_close(batch.next_critic_obs, batch.critic_obs + 1)
    assert issubclass(AmpRolloutStorage, ActionLabelRollout)


# Storage 3. rollout_files
class Numbers(RolloutFileBase):
    """Serves the numbers of the steps."""

    Buffer = namedtuple("Buffer", ["observation", "timeout"])

    def reset_all(self):
        self.cursor = torch.zeros(self.num_envs)

    def refresh_handlers(self, env_ids):
        self.cursor[env_ids] = 0

    def get_buffer(self, num_transitions_per_env=None):
        times = () if num_transitions_per_env is None else (num_transitions_per_env,)
        return self.Buffer(torch.zeros(*times, self.num_envs, 1), torch.zeros(*times, self.num_envs, dtype=torch.bool))

    def fill_transition(self, buffer, env_ids=None):
        buffer.observation[:, 0] = self.cursor
        buffer.timeout[:] = self.cursor == 1
        self.cursor += 1


def test_3_1_a_dataset_of_ones_own_with_a_plain_named_tuple():
    dataset = Numbers(data_dir="nowhere", num_envs=2, device="cpu")
    assert dataset.all_env_ids.tolist() == [0, 1]
    first = dataset.get_batch()
    assert first.observation.flatten().tolist() == [0.0, 0.0]
    transition, infos = dataset.get_transition_batch()
    assert transition.observation.flatten().tolist() == [1.0, 1.0]
    assert infos["time_outs"].tolist() == [True, True]
    dataset.reset(env_ids=[1])
    assert dataset.get_batch(num_transitions_per_env=2).observation[:, :, 0].tolist() == [[2.0, 0.0], [3.0, 1.0]]
    assert next(iter(dataset)).observation.flatten().tolist() == [0.0, 0.0]


@pytest.fixture
def recorded(tmp_path):
    with TrajectoryWriter(tmp_path / "data") as writer:
        for k in range(2):
            numbers = (100 * k + np.arange(3)).astype(np.float32)[:, None]
            steps = {
                "observations": numbers,
                "actions": numbers,
                "rewards": numbers,
                "dones": np.zeros((3, 1), np.uint8),
            }
            writer.add(k, steps, 0, "truncated")
    return tmp_path / "data"


def test_3_2_rollout_dataset_by_position(recorded):
    dataset = RolloutDataset(recorded, 2, 1, False, 0, [0, 1], "cpu")
    transition, infos = dataset.get_transition_batch()
    names = ("observation", "privileged_observation", "action", "reward", "done", "timeout")
    assert transition._fields == (*names, "next_observation", "next_privileged_observation")
    assert sorted(transition.observation.flatten().tolist()) == [0.0, 100.0]
    torch.testing.assert_close(transition.next_observation, transition.observation + 1)
    assert infos["time_outs"].tolist() == [False, False]
    dataset.get_transition_batch()
    last, infos = dataset.get_transition_batch()
    assert last.done.tolist() == infos["time_outs"].tolist() == [True, True]
    with pytest.raises(StopIteration):
        dataset.get_batch()


# The examples
def test_the_example_of_amp_policy_runner(tmp_path):
    discriminator = {"input_dim": 4, "style_reward_coef": 1.0, "hidden_dims": [8], "task_reward_lerp": 0.5}
    policy = {"class_name": "AmpActorCritic", "actor_hidden_dims": [8], "critic_hidden_dims": [8]}
    cfg = {
        "policy": policy | {"amp_discriminator": discriminator},
        "algorithm": {"num_learning_epochs": 1, "num_mini_batches": 1, "schedule": "fixed"},
        "num_steps_per_env": 3,
    }

    class WithMotion(PointRobot):
        def step(self, actions):
            record = super().step(actions)
            window = torch.randn(self.num_envs, 4)
            extras = {**record.extras, "observations": {"ref_obs": window}, "ref_motion": window + 1.0}
            return record._replace(extras=extras)

    env = WithMotion(4, max_episode_length=5)
    algo = APPO.from_cfg(cfg, env)  # documented: APPO(cfg, env)
    runner = AmpPolicyRunner(env, algo, device="cpu", log_dir=str(tmp_path), show_progress=False)
    runner.learn(num_learning_iterations=1)
    assert len((runner.metrics_velrmsd, runner.metrics_CoT)) == 2
    runner.close()


def test_the_example_of_dagger_saver(tmp_path):
    env = PointRobot(4, max_episode_length=5)
    sizes = {"actor_hidden_dims": [8], "critic_hidden_dims": [8]}
    policy = ActorCritic(env.num_obs, env.num_privileged_obs or env.num_obs, 2, **sizes)
    student = tmp_path / "student_policy"
    student.mkdir()
    (student / "config.json").write_text('{"policy": {"actor_hidden_dims": [8], "critic_hidden_dims": [8]}}')
    torch.save({"model_state_dict": policy.state_dict(), "iter": 1}, student / "model_1.pt")
    saver = DaggerSaver(
        env=env,
        policy=policy,  # the teacher, which the example leaves out
        save_dir=tmp_path / "dagger_demos",
        training_policy_logdir=student,
        teacher_act_prob="exp",
        action_sample_std=0.1,
        log_to_tensorboard=True,
        min_timesteps=40,
        min_episodes=1,
    )
    saver.init_traj_handlers()
    for i in range(1000):
        saver.load_latest_training_policy()
        _teacher_actions, _rewards, dones, infos, _obs, _critic_obs = saver.get_transition()
        saver.add_transition(i, infos)
        if dones.any():
            saver.policy_reset(dones)
        if saver.check_stop():
            break
    assert saver.print_log()
    saver.close()
    assert len(list((tmp_path / "dagger_demos").glob("trajectory_*"))) >= 4


def test_motion_is_loaded_by_the_documented_loader():
    loader = AMPLoader("cpu", 0.02, CLIPS, motion_files=["point_circle.txt"])
    now, then = next(iter(loader.feed_forward_generator(1, 5)))
    assert now.shape == then.shape
    assert len(now) == 5
