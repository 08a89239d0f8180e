"""The off-policy loop: exploring, learning, logging, saving, exact continuation, and errors."""

import contextlib
import dataclasses
import warnings

import numpy as np
import pytest
import torch
from gymnasium import spaces

from canter.algorithms import DQN, SAC, DQNConfig, SACConfig, TD3Config
from canter.envs.torch_envs import CartPole, PointRobot
from canter.envs.vec_env import StepRecord, VecEnv
from canter.envs.wrap import wrap_env
from canter.presets import profile_settings
from canter.runners import OffPolicyRunner, StopTraining
from canter.runners.run_config import parse_train_cfg
from canter.utils.metrics import NonFiniteError

SMALL = {"batch_size": 8, "learning_starts": 10, "buffer_size": 300, "log_interval": 20, "save_interval": 0, "seed": 3}
CONFIGS = {
    "dqn": DQNConfig(**SMALL, network_hidden_dims=(8,)),
    "per": DQNConfig(**SMALL, network_hidden_dims=(8,), prioritized_replay=True, n_step=2, schedule="linear"),
    "repeats": DQNConfig(**SMALL, network_hidden_dims=(8,), epsilon_repeats=16),
    "sac": SACConfig(**SMALL, actor_hidden_dims=(8,), critic_hidden_dims=(8,), empirical_normalization=True),
    "td3": TD3Config(**SMALL, actor_hidden_dims=(8,), critic_hidden_dims=(8,)),
    "strong": SACConfig(**SMALL, **profile_settings("sac", "strong") | {"critic_hidden_dims": (8, 8)}),
}


def env_for(kind, num_envs=2):
    cls = CartPole if kind in ("dqn", "per", "repeats") else PointRobot
    return cls(num_envs, max_episode_length=7)


def make(kind="dqn", env=None, log_dir=None, **changes):
    cfg = dataclasses.replace(CONFIGS[kind], **changes)
    return OffPolicyRunner(env or env_for(kind), cfg, log_dir=log_dir, device="cpu", show_progress=False)


# ---------------------------------------------------------------------- the loop
@pytest.mark.slow
def test_the_documented_dqn_snippet(tmp_path):
    cfg = DQNConfig(learning_starts=500)
    runner = OffPolicyRunner(env=wrap_env("CartPole-v1", "cpu", num_envs=1), cfg=cfg, algorithm="dqn", device="cpu")
    runner.learn(total_timesteps=2000)
    assert runner.tot_timesteps == 2000
    assert runner.eval(2)["eval/mean_reward"] > 0


@pytest.mark.slow
def test_the_documented_sac_snippet():
    cfg = SACConfig(learning_starts=500, batch_size=32)
    runner = OffPolicyRunner(wrap_env("Pendulum-v1", "cpu", num_envs=1), cfg, device="cpu")
    history = runner.learn(2000).history
    assert isinstance(runner.alg, SAC)
    assert {"train/actor_loss", "train/critic1_loss", "train/critic2_loss", "train/alpha", "train/entropy"} <= set(
        history[-1]
    )


def test_train_freq_counts_vector_steps_from_learning_starts_on(monkeypatch):
    runner = make("dqn", learning_starts=12, train_freq=3, gradient_steps=4)
    calls = []
    train = type(runner.alg).train
    monkeypatch.setattr(type(runner.alg), "train", lambda self, n: (calls.append((self.timesteps, n)), train(self, n)))
    runner.learn(40)
    assert calls == [(12, 4), (18, 4), (24, 4), (30, 4), (36, 4)]  # every third of 20 vector steps, from 12 on
    assert runner.alg.num_updates == 20


def test_minus_one_takes_as_many_gradient_steps_as_environment_steps():
    runner = make("dqn", gradient_steps=-1, train_freq=2)
    runner.learn(40)
    steps = [t for t in range(2, 21, 2) if 2 * t >= 10]
    assert runner.alg.num_updates == 4 * len(steps)


def test_actions_are_random_until_learning_starts():
    runner = make("dqn", learning_starts=20, epsilon_start=0.0, epsilon_end=0.0)
    calls = []
    random = runner.alg.random_actions
    runner.alg.random_actions = lambda: (calls.append(runner.alg.timesteps), random())[1]
    runner.learn(40)
    assert calls == list(range(0, 20, 2))


class OwnAgent(DQN):
    """A user's agent with an exploration of its own and no epsilon."""

    def explore_step(self, obs):
        return torch.zeros(self.num_envs, dtype=torch.long)

    def before_exploring(self):
        pass

    def get_epsilon(self, timesteps):
        raise AssertionError("the runner must not ask for epsilon")

    def exploration(self):
        return {}


def test_exploration_stays_in_the_algorithm():
    cfg = dataclasses.replace(CONFIGS["dqn"], learning_starts=0)
    runner = OffPolicyRunner(env_for("dqn"), agent=OwnAgent(env_for("dqn"), cfg, device="cpu"), show_progress=False)
    runner.learn(30)
    assert runner.alg.replay.data["actions"].sum() == 0


def test_rewards_between_two_logs_are_all_counted():
    runner = make("dqn", CartPole(2, max_episode_length=7), log_interval=5000)
    runner.num_kept = 4
    runner.keep_stats(4)
    runner.learn(100)
    assert runner.stats.tracker.num_episodes == 2 * (50 // 7)
    assert list(runner.rewbuffer)[0] == 7.0


def test_a_value_that_is_not_finite_is_named_with_its_vector_step():
    runner = make("dqn", CartPole(2, max_episode_length=7))
    real, calls = runner.env.step, []

    def step(actions):
        record = real(actions)
        calls.append(actions)
        if len(calls) == 6:
            record.reward[1] = float("nan")
        return record

    runner.env.step = step
    with pytest.raises(NonFiniteError, match=r"'reward' \(environments 1\) at step 5"):
        runner.learn(40)


def test_timesteps_are_added_in_every_call_and_after_loading(tmp_path):
    runner = make()
    runner.learn(20)
    runner.learn(15)
    assert runner.tot_timesteps == 36, "rounded up to whole vector steps"
    runner.save(tmp_path / "a.pt")
    other = make()
    other.load(tmp_path / "a.pt")
    other.learn(10)
    assert other.tot_timesteps == other.alg.timesteps == 46
    planned = make(max_timesteps=30)
    planned.learn()
    assert planned.tot_timesteps == 30
    with pytest.raises(ValueError, match=r"length of the training.*learn\(total_timesteps\) or max_timesteps"):
        make().learn()


def test_callbacks_come_in_order_and_can_stop():
    runner = make("dqn", learning_starts=4, batch_size=4)
    seen = []
    for event in ("pre_iteration", "pre_rollout", "pre_update"):
        runner.add_callback(event, lambda runner, event=event: seen.append(event))
    for event in ("post_rollout", "post_update", "post_iteration"):
        runner.add_callback(event, lambda runner, stats, event=event: seen.append(event))
    runner.learn(4)
    assert seen[:4] == ["pre_iteration", "pre_rollout", "post_rollout", "post_iteration"]
    assert seen[4:] == ["pre_iteration", "pre_rollout", "post_rollout", "pre_update", "post_update", "post_iteration"]

    def stop(runner, stats):
        raise StopTraining

    runner.add_callback("post_iteration", stop)
    runner.learn(100)
    assert runner.tot_timesteps == 6


# ---------------------------------------------------------------------- saving
def test_checkpoints_come_at_multiples_and_restore_the_counters(tmp_path):
    runner = make("dqn", log_dir=tmp_path, save_interval=20, keep_checkpoints=None, epsilon_decay_steps=100)
    runner.learn(50)
    assert sorted(p.name for p in tmp_path.glob("*.pt")) == [
        "checkpoint_final.pt",
        "model_10.pt",
        "model_20.pt",
        "model_25.pt",
    ]
    other = make("dqn", epsilon_decay_steps=100)
    other.load(tmp_path / "model_20.pt")
    assert (other.iteration, other.tot_timesteps, other.alg.timesteps) == (20, 40, 40)
    assert other.alg.num_updates == 16
    assert other.alg.get_epsilon(other.alg.timesteps) == pytest.approx(1 - 0.95 * 0.4)


def halves(kind, tmp_path, keep, differing):
    """The final checkpoints of a run of 80 steps, and of one that was saved at 40 and went on in a new runner."""
    straight = make(kind, save_replay_buffer=keep, max_timesteps=80)
    straight.learn(80)
    straight.save(tmp_path / "straight.pt")
    first = make(kind, save_replay_buffer=keep, max_timesteps=80)
    first.learn(40)
    first.save(tmp_path / "half.pt")
    torch.manual_seed(99)
    second = make(kind, save_replay_buffer=keep, max_timesteps=80)
    second.load(tmp_path / "half.pt")
    second.learn(40)
    second.save(tmp_path / "resumed.pt")
    names = differing(tmp_path / "straight.pt", tmp_path / "resumed.pt")
    return [name for name in names if not name.startswith(("resume.rng.torch", "infos"))], second


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_a_run_with_its_replay_continues_bit_for_bit(kind, tmp_path, differing):
    names, _ = halves(kind, tmp_path, True, differing)
    assert names == []


@pytest.mark.parametrize("kind", ["dqn", "sac"])
def test_a_run_without_its_replay_fills_it_again_before_it_learns(kind, tmp_path, differing):
    names, second = halves(kind, tmp_path, False, differing)
    assert any(name.startswith("model_state_dict") for name in names)
    assert len(second.alg.replay) == 40
    assert second.alg.num_updates > 16
    state = torch.load(tmp_path / "half.pt", weights_only=True)
    assert "replay_buffer" not in state
    fresh = make(kind, max_timesteps=80)
    fresh.load(tmp_path / "half.pt")
    fresh.learn(8)
    assert fresh.alg.num_updates == state["num_updates"], "no update without stored steps"
    second.load(tmp_path / "half.pt")  # which has stored steps of its own
    second.learn(8)
    fresh.save(tmp_path / "fresh.pt")
    second.save(tmp_path / "second.pt")
    assert len(second.alg.replay) == len(fresh.alg.replay) == 8
    assert differing(tmp_path / "fresh.pt", tmp_path / "second.pt") == ["resume.runner.executed"]


def test_another_capacity_is_refused_before_anything_is_changed(tmp_path, weights):
    runner = make("sac", save_replay_buffer=True)
    runner.learn(20)
    runner.save(tmp_path / "a.pt")
    other = make("sac", save_replay_buffer=True, buffer_size=200)
    before = weights(other)["alg"]["model_state_dict"]
    with pytest.raises(ValueError, match="capacity=300, this one 200"):
        other.load(tmp_path / "a.pt")
    after = other.alg.state_dict()["model_state_dict"]
    assert all(torch.equal(before[name], after[name]) for name in before)
    other.load(tmp_path / "a.pt", load_optimizer=False)  # to play, no replay is needed
    assert other.alg.replay is None or len(other.alg.replay) == 0


# ---------------------------------------------------------------------- evaluation
class Counting(VecEnv):
    """Observation: how many steps the episode has; it cannot be put back, so evaluation resets it."""

    def __init__(self):
        self.num_envs, self.device, self.max_episode_length = 1, torch.device("cpu"), 9
        self.obs_space = self.critic_obs_space = spaces.Box(-np.inf, np.inf, (1,))
        self.action_space = spaces.Discrete(2)
        self.t = 0

    def reset(self):
        self.t = 0
        return self.get_observations()

    def get_observations(self):
        obs = torch.full((1, 1), float(self.t))
        return obs, obs

    def seed(self, seed):
        pass

    def step(self, actions):
        self.t += 1
        final, done = torch.full((1, 1), float(self.t)), torch.tensor([self.t >= 9])
        self.t = 0 if self.t >= 9 else self.t
        obs, no = self.get_observations()[0], torch.zeros(1, dtype=torch.bool)
        return StepRecord(obs, obs, torch.ones(1), no, done, final, final, torch.ones_like(no), {})


def test_no_stored_step_spans_an_evaluation_that_resets():
    runner = make("dqn", Counting(), eval_interval=5, eval_episodes=1)
    runner.learn(32)
    buffer = runner.alg.replay
    rows = buffer.data["order"][: int(buffer.count)].long()
    batch = buffer.take(rows, 0, 1, 0.9)
    assert (batch.next_obs - batch.obs == 1).all()
    assert (batch.dones == 0).all(), "cut off, not ended"
    windows = buffer.take(rows, 0, 3, 0.5)
    assert ((windows.next_obs - windows.obs)[:, 0] == (windows.discounts.log2().abs())).all()


def test_a_repeated_random_action_ends_with_an_evaluation_that_resets():
    runner = make("dqn", Counting(), epsilon_repeats=50, learning_starts=0, epsilon_start=1.0)
    repeated = runner.alg.repeated
    while not repeated.left.any():
        runner.learn(1)
    runner.eval(1)
    assert not repeated.left.any()


@pytest.mark.parametrize(("ends", "gives_final"), [("truncated", True), ("truncated", False), ("terminated", True)])
def test_the_end_of_an_episode_is_stored_with_its_final_observation(ends, gives_final):
    class Ending(Counting):
        def step(self, actions):
            record = super().step(actions)
            if ends == "terminated":
                record = record._replace(terminated=record.truncated, truncated=record.terminated)
            return record if gives_final else record._replace(final_obs=None, final_critic_obs=None)

    runner = make("dqn", Ending())
    with contextlib.nullcontext() if gives_final else pytest.warns(UserWarning, match="no final observation") as said:
        runner.learn(30)
    assert gives_final or len([w for w in said if "final observation" in str(w.message)]) == 1
    buffer = runner.alg.replay
    batch = buffer.take(buffer.data["order"][:30].long(), 0, 1, 0.9)
    is_last = batch.obs[:, 0] == 8
    assert is_last.sum() == 3
    assert torch.equal(batch.dones.bool(), is_last & torch.tensor(ends == "terminated"))
    assert (batch.next_obs[~is_last] - batch.obs[~is_last] == 1).all()
    assert (batch.next_obs[is_last] == (9 if gives_final else 8)).all()


def test_evaluation_changes_no_state_of_the_algorithm(differing, snapshot):
    runner = make("sac")
    runner.learn(30)
    before = snapshot(runner.alg)
    result = runner.eval(3)
    assert result["eval/mean_length"] == 7
    assert differing(before, snapshot(runner.alg)) == []
    policy = runner.get_inference_policy()
    obs, _ = runner.env.get_observations()
    assert torch.equal(policy(obs), runner.alg.act(obs, deterministic=True))


# ---------------------------------------------------------------------- construction
def test_a_training_dict_describes_a_run():
    algorithm = {"class_name": "SAC", "profile": "massive", "batch_size": 64, "actor_hidden_dims": [16, 8]}
    runner = OffPolicyRunner(PointRobot(4), {"algorithm": algorithm, "seed": 1, "device": "cpu"}, show_progress=False)
    assert (runner.cfg.gamma, runner.cfg.batch_size, runner.cfg.num_atoms) == (0.97, 64, 101)
    assert runner.cfg.actor_hidden_dims == (16, 8)
    assert runner.cfg.log_interval == 1000
    again = parse_train_cfg(runner.config())
    assert {f.name: getattr(again.cfg, f.name) for f in dataclasses.fields(again.cfg)} == {
        f.name: getattr(runner.cfg, f.name) for f in dataclasses.fields(runner.cfg)
    }
    with pytest.raises(TypeError, match="SAC has no setting 'entropy_coeff'"):
        parse_train_cfg({"algorithm": {"class_name": "SAC", "entropy_coeff": 1.0}})
    with pytest.raises(TypeError, match="has no setting 'num_steps_per_env'"):
        parse_train_cfg({"algorithm": {"class_name": "SAC"}, "num_steps_per_env": 4})


def test_a_buffer_larger_than_memory_is_refused_before_training():
    with pytest.raises(MemoryError, match="the replay buffer does not fit"):
        make("sac", buffer_size=10**13).learn(10)


def test_a_nan_reward_is_an_error():
    class Broken(PointRobot):
        def step(self, actions):
            record = super().step(actions)
            return record._replace(reward=record.reward * float("nan"))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match="NaN or infinity in 'reward'"):
            make("sac", Broken(2)).learn(10)


def test_arguments_are_taken_in_the_documented_order_and_no_more_of_them(tmp_path):
    env = CartPole(1)
    runner = OffPolicyRunner(env, DQNConfig(), "dqn", None, env.obs_space, env.action_space, None, None, tmp_path / "a")
    assert runner.log_dir == tmp_path / "a"
    runner.close()
    with pytest.raises(TypeError, match="at most 17 positional arguments"):
        OffPolicyRunner(env, *[None] * 17)


def test_parts_of_a_checkpoint_are_for_ppo_alone(tmp_path):
    agent = SAC(env=PointRobot(2))
    with pytest.raises(ValueError, match="load_cfg and strict=False are for PPO; SAC loads whole checkpoints"):
        agent.load_state_dict(agent.state_dict(), load_cfg={"actor": True})


@pytest.mark.parametrize(("changes", "needed"), [({"learning_starts": 100}, 100), ({"batch_size": 64}, 64)])
def test_a_training_that_ends_before_it_learns_is_a_warning(changes, needed):
    runner = make(**changes)
    problem = f"the 20 steps of this training only fill the replay buffer, learning begins after {needed}"
    with pytest.warns(UserWarning, match=f"^{problem} .learning_starts={runner.alg.learning_starts}, batch_size="):
        runner.learn(20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runner.learn(needed)
        make(**changes, max_timesteps=200).learn(20)  # a part of a longer run
