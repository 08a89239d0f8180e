"""Deterministic episodes with fair quotas that leave the training alone, and the policy that is handed out."""

import os
import signal

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from canter.algorithms import DQNConfig
from canter.envs import GymVecEnv, GymVectorEnvAdapter
from canter.envs.torch_envs import CartPole, MaskedCartPole, Pendulum, PointRobot
from canter.runners import OffPolicyRunner
from canter.runners.evaluation import run_episodes, space_form
from canter.utils.checkpoint import load_checkpoint
from canter.utils.plots import read_metrics

GRU = {"class_name": "ActorCriticRecurrent", "rnn_type": "gru", "rnn_hidden_size": 6}


def test_quotas_give_every_environment_its_share(make_runner, counting):
    runner = make_runner(counting((2, 3, 5)))
    for num_episodes, quotas in ((7, [3, 2, 2]), (2, [1, 1, 0]), (6, [2, 2, 2])):
        _, lengths = run_episodes(runner.get_inference_policy(), runner.env, num_episodes)
        assert [lengths.count(length) for length in (2, 3, 5)] == quotas


def test_the_statistics_of_known_episodes(make_runner, counting):
    runner = make_runner(counting((2, 3, 5)))
    result = runner.eval(4)  # quotas 2, 1, 1: returns 3, 3, 306, 1015
    assert result["eval/mean_reward"] == 331.75
    assert result["eval/std_reward"] == pytest.approx((683646.75 / 4) ** 0.5)  # of the population
    assert (result["eval/min_reward"], result["eval/max_reward"]) == (3.0, 1015.0)
    assert result["eval/mean_length"] == (2 + 2 + 3 + 5) / 4
    assert set(result) == {
        f"eval/{name}" for name in ("mean_reward", "std_reward", "min_reward", "max_reward", "mean_length")
    }


def test_evaluation_starts_from_a_reset_and_is_deterministic(make_runner):
    runner = make_runner(PointRobot(4, max_episode_length=6), eval_env=PointRobot(4, seed=3, max_episode_length=6))
    runner.learn(1)
    state = runner.eval_env.get_state()
    results = []
    for _ in range(2):
        runner.eval_env.set_state(state)
        results.append(runner.eval(4))
    assert results[0] == results[1]
    seen = []
    runner.policy.sample_action = lambda *args: seen.append(args)
    runner.eval(4)
    assert seen == []


def test_memories_are_cleared_after_an_end_and_again_after_the_step_that_only_reset(noise_env):
    env = noise_env(num_envs=2, end_prob=0.5, has_invalid_steps=True)
    given, cleared = [], []

    class Act:
        def __call__(self, obs):
            return torch.zeros(2, 2)

        def reset(self, dones=None):
            cleared.append(dones)

    step = env.step
    env.step = lambda actions: given.append(step(actions)) or given[-1]
    run_episodes(Act(), env, 4)
    assert any((~record.valid).any() for record in given)
    assert cleared[0] is None
    assert [mask.tolist() for mask in cleared[1:]] == [(record.done | ~record.valid).tolist() for record in given]


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_steps_that_only_reset_are_no_part_of_an_episode(make_runner, mode):
    """Episodes of 3 steps from a reset, whatever the vector environment does between them."""

    class Three(gymnasium.Env):
        observation_space, action_space = spaces.Box(-9, 9, (1,)), spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            self.t = 0
            return np.zeros(1, np.float32), {}

        def step(self, action):
            self.t += 1
            return np.full(1, self.t, np.float32), float(self.t), False, self.t >= 3, {}

    class PaysForResets(GymVectorEnvAdapter):
        def step(self, actions):
            record = super().step(actions)
            return record._replace(reward=record.reward + 100.0 * ~record.valid)

    envs = SyncVectorEnv([Three, Three], autoreset_mode=mode)
    result = make_runner(PaysForResets(envs)).eval(6)
    assert (result["eval/mean_length"], result["eval/mean_reward"], result["eval/std_reward"]) == (3.0, 6.0, 0.0)
    envs.close()


def test_an_impossible_number_of_episodes_is_refused(make_runner):
    with pytest.raises(ValueError, match="at least 1, got 0"):
        make_runner().eval(0)


def test_episodes_that_never_end_are_an_error_with_a_way_out(make_runner, counting):
    runner = make_runner(counting((10**9, 2), max_episode_length=4))
    with pytest.raises(RuntimeError, match=r"only 1 of 2 evaluation episodes ended within 6 steps.*max_steps"):
        runner.eval(2)
    with pytest.raises(RuntimeError, match="within 11 steps"):
        runner.eval(2, max_steps=11)
    assert runner.policy.training


def test_evaluation_restores_modes_and_statistics(make_runner):
    runner = make_runner(algorithm={"empirical_normalization": True, "normalize_rewards": True})
    runner.learn(2)
    modes, step = [], runner.env.step
    runner.env.step = lambda actions: (modes.append(runner.policy.training), step(actions))[1]
    before = {name: value.clone() for name, value in runner.policy.obs_normalizer.state_dict().items()}
    runner.eval(3)
    assert all(torch.equal(before[name], value) for name, value in runner.policy.obs_normalizer.state_dict().items())
    assert set(modes) == {False}
    assert runner.policy.training
    assert runner.policy.obs_normalizer.training
    runner.eval_mode()
    runner.eval(3)
    assert not runner.policy.training
    runner.learn(1)


@pytest.mark.parametrize("policy", [{}, GRU])
@pytest.mark.parametrize("where", ["eval_env", "training_env", "global_noise"])
def test_periodic_evaluation_changes_nothing_in_the_training(
    make_runner, resume_cases, differing, tmp_path, where, policy
):
    """Bit for bit, the whole checkpoint but for the evaluations themselves."""
    cls = resume_cases.NoisyRobot if where == "global_noise" else PointRobot
    everything = {"empirical_normalization": True, "normalize_rewards": True}
    for name, interval in (("with", 2), ("without", None)):
        torch.manual_seed(0)
        resume_cases.random.seed(0)
        resume_cases.np.random.seed(0)
        eval_env = None if where == "training_env" else cls(2, seed=8, max_episode_length=5)
        runner = make_runner(
            cls(3, max_episode_length=7),
            policy=policy,
            algorithm=everything,
            eval_env=eval_env,
            eval_episodes=3,
            **({} if interval is None else {"eval_interval": interval}),
        )
        history = runner.learn(4).history
        assert [i for i, row in enumerate(history) if "eval/mean_reward" in row] == ([1, 3] if interval else [])
        runner.save(tmp_path / f"{name}.pt")
    different = differing(tmp_path / "with.pt", tmp_path / "without.pt")
    evaluations = ["config.eval_interval", "resume.runner.num_evals"]
    assert [name for name in different if not name.startswith("resume.eval_env.")] == evaluations


def test_every_second_iteration_is_evaluated_in_the_evaluation_environment(make_runner, counting):
    env, eval_env = counting((2, 2)), counting((3, 4))
    runner = make_runner(env, eval_env=eval_env, eval_interval=2, eval_episodes=2, log_interval=1)
    lengths = [row.get("eval/mean_length") for row in runner.learn(4).history]
    assert lengths == [None, 3.5, None, 3.5]
    assert eval_env.num_resets == 2


@pytest.mark.parametrize("kind", ["ppo", "dqn"])
def test_an_evaluation_between_two_log_entries_is_logged(make_runner, tmp_path, kind):
    options = {"log_dir": tmp_path, "eval_env": CartPole(1, max_episode_length=3)}
    if kind == "ppo":
        runner = make_runner(CartPole(1), **options, num_steps_per_env=4, log_interval=3, eval_interval=2)
    else:
        cfg = DQNConfig(
            device="cpu",
            seed=1,
            batch_size=4,
            learning_starts=4,
            buffer_size=100,
            log_interval=12,
            eval_interval=8,
            network_hidden_dims=(8,),
        )
        runner = OffPolicyRunner(CartPole(1), cfg, **options, show_progress=False)
    history = runner.learn(total_timesteps=24).history
    runner.close()
    logged = read_metrics(tmp_path)
    assert logged["eval/mean_length"][0] == [8, 16, 24]
    assert logged["rollout/mean_reward"][0] == [12, 24]
    assert ["eval/mean_length" in row for row in history] == [True, False, True, True]


def test_a_run_without_log_entries_logs_no_evaluations(make_runner, tmp_path):
    runner = make_runner(log_dir=tmp_path, eval_episodes=1, eval_interval=1, log_interval=0)
    assert runner.learn(2).history == []
    assert read_metrics(tmp_path) == {}


def test_without_any_way_back_the_training_continues_from_fresh_episodes(make_runner, counting):
    env = counting((3, 50), max_episode_length=60)
    runner = make_runner(env, policy=GRU, num_steps_per_env=4, algorithm={"normalize_rewards": True})
    runner.learn(1)
    assert runner.stats.tracker.cur_episode_length.tolist() == [1, 4]
    assert runner.alg.return_scaler.returns.any()
    resets = env.num_resets
    runner.eval(1)
    assert env.num_resets == resets + 2  # one to begin with, one to go on
    assert runner.stats.tracker.cur_episode_length.tolist() == [0, 0]
    assert runner.obs[:, 1].tolist() == [0.0, 0.0]
    assert not runner.alg.return_scaler.returns.any()
    assert not runner.policy.memory_a.state.any()
    runner.learn(1)
    assert list(runner.lenbuffer) == [3, 3]


def test_a_failing_evaluation_puts_the_environment_back(make_runner, counting):
    env = counting((10**9,), can_restore=True, max_episode_length=3)
    runner = make_runner(env, algorithm={"num_mini_batches": 1})
    runner.learn(1)
    with pytest.raises(RuntimeError, match="evaluation episodes"):
        runner.eval(1)
    assert env.t.tolist() == [4.0]


# ------------------------------------------------------------------ continuing
def evaluated_run(make_runner, eval_env, log_dir, iterations, checkpoint=None, seed=1):
    """Evaluations of a run, its best one saved; the files in `log_dir`."""
    env = PointRobot(3, max_episode_length=7) if isinstance(eval_env, PointRobot) else Pendulum(3, max_episode_length=7)
    found, best = [], [-np.inf]
    runner = make_runner(
        env, eval_env=eval_env, eval_interval=1, eval_episodes=4, log_dir=log_dir, seed=seed, save_interval=1
    )
    if checkpoint is not None:
        runner.load(checkpoint)
        best[0] = max(row["eval/mean_reward"] for row in load_checkpoint(checkpoint)["infos"])
        found += load_checkpoint(checkpoint)["infos"]

    def keep(runner, stats):
        found.append({name: value for name, value in stats.items() if name.startswith("eval/")})
        if stats["eval/mean_reward"] > best[0]:
            best[0] = stats["eval/mean_reward"]
            runner.save_checkpoint("checkpoint_best.pt")
        runner.save(log_dir / f"after_{runner.iteration}.pt", infos=list(found))

    runner.add_callback("post_iteration", keep)
    runner.learn(iterations)
    return found


EVAL_ENVS = {
    "torch": lambda: PointRobot(2, max_episode_length=5),
    "gymnasium": lambda: GymVecEnv([lambda: gymnasium.make("Pendulum-v1", max_episode_steps=20)] * 2),
    "gymnasium_vector": lambda: SyncVectorEnv([lambda: gymnasium.make("Pendulum-v1", max_episode_steps=20)] * 2),
}


@pytest.mark.parametrize("seed", [1, None])
@pytest.mark.parametrize("kind", EVAL_ENVS)
def test_evaluations_continue_exactly(make_runner, differing, tmp_path, kind, seed):
    """Metrics and best checkpoint of 6 iterations are those of 3, a checkpoint, a new runner, and 3 more."""
    directories = [tmp_path / name for name in ("straight", "resumed")]
    straight = evaluated_run(make_runner, EVAL_ENVS[kind](), directories[0], 6, seed=seed)
    assert len({row["eval/mean_reward"] for row in straight}) == 6, "every evaluation has episodes of its own"
    resumed = evaluated_run(make_runner, EVAL_ENVS[kind](), directories[1], 3, directories[0] / "after_3.pt", seed=seed)
    assert resumed == straight
    best = [directory / "checkpoint_best.pt" for directory in directories]
    if best[1].exists():
        assert differing(*best) == []
    assert load_checkpoint(best[0])["iter"] > 3 or not best[1].exists()


def test_runs_of_one_seed_are_evaluated_in_the_same_episodes(make_runner, tmp_path):
    found = [
        evaluated_run(make_runner, EVAL_ENVS["gymnasium"](), tmp_path / str(number), 2, seed=seed)
        for number, seed in enumerate((1, 1, 2))
    ]
    assert found[0] == found[1] != found[2]


def test_a_run_continues_with_another_evaluation_environment(make_runner, tmp_path):
    runner = make_runner(eval_env=PointRobot(2, max_episode_length=5))
    runner.save(tmp_path / "model_0.pt")
    other = make_runner(eval_env=PointRobot(3, max_episode_length=5))
    with pytest.warns(UserWarning, match="evaluations do not continue exactly"):
        other.load(tmp_path / "model_0.pt")
    other.eval(3)
    make_runner().load(tmp_path / "model_0.pt")  # nor does it need one


# ------------------------------------------------------------------ the policy that is handed out
@pytest.mark.parametrize("policy", [{}, GRU])
def test_the_inference_policy_takes_raw_observations_and_freezes(make_runner, policy):
    runner = make_runner(policy=policy, algorithm={"empirical_normalization": True})
    runner.learn(3)
    normalizer = runner.policy.obs_normalizer
    act, count = runner.get_inference_policy(), int(normalizer.count)
    assert not runner.policy.training
    obs = 5.0 * torch.randn(4, 6)
    expected = runner.policy.actor_params(normalizer.normalize(obs), context(runner, 4))["mu"]
    assert torch.equal(act(obs), expected)
    assert not act(obs).requires_grad
    assert int(normalizer.count) == count
    runner.learn(1)
    assert runner.policy.training


def context(runner, num_envs):
    from canter.modules.policy import Context

    return Context(runner.policy.initial_hidden(num_envs))


def test_discrete_actions_come_as_the_environment_wants_them(make_runner):
    runner = make_runner(MaskedCartPole(3))
    assert runner.get_inference_policy()(torch.zeros(3, 2)).shape == (3,)


def test_on_step_sees_every_step_and_gymnasium_envs_evaluate(make_runner):
    env = gymnasium.make("CartPole-v1")
    runner = make_runner(env, policy={}, algorithm={"num_mini_batches": 1})
    seen = []
    returns, lengths = run_episodes(runner.get_inference_policy(), runner.env, 2, on_step=lambda e: seen.append(e))
    assert len(seen) == sum(lengths)
    assert returns == [float(length) for length in lengths]


def test_an_evaluation_environment_of_other_spaces_is_refused_with_both(make_runner):
    with pytest.raises(ValueError, match=r"observation space of eval_env is Box.*\(4,\).*training environment is Box"):
        make_runner(PointRobot(2), eval_env=CartPole(2))

    class MoreActions(PointRobot):
        def __init__(self, num_envs):
            super().__init__(num_envs)
            self.action_space = spaces.Box(-1.0, 1.0, (7,))

    with pytest.raises(ValueError, match=r"action space of eval_env is Box.*\(7,\).*same task with the same wrappers"):
        make_runner(PointRobot(2), eval_env=MoreActions(2))


def test_spaces_are_alike_with_other_bounds_and_not_with_another_number_of_choices():
    assert space_form(spaces.Box(-1.0, 1.0, (3,))) == space_form(spaces.Box(-9.0, 9.0, (3,)))
    parts = {"a": spaces.Discrete(3), "b": spaces.MultiDiscrete([2, 3])}
    assert space_form(spaces.Dict(parts)) == space_form(spaces.Dict(parts))
    assert space_form(spaces.Dict(parts)) != space_form(spaces.Dict(parts | {"a": spaces.Discrete(4)}))
    assert space_form(spaces.Dict(parts)) != space_form(spaces.Dict(parts | {"b": spaces.MultiDiscrete([2, 4])}))
    assert space_form(spaces.Box(0.0, 1.0, ())) != space_form(spaces.Discrete(2))


class Stopping(PointRobot):
    """An environment for evaluations that gets SIGTERM in its third step, and whose episodes are endless."""

    num_steps = 0

    def step(self, actions):
        self.num_steps += 1
        if self.num_steps == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().step(actions)._replace(terminated=torch.zeros(2, dtype=torch.bool))


def test_an_evaluation_stops_at_the_next_step_and_its_iteration_is_saved(make_runner, tmp_path):
    eval_env = Stopping(2, max_episode_length=5_000)
    runner = make_runner(log_dir=tmp_path, eval_env=eval_env, eval_interval=2, eval_episodes=2, save_interval=10)
    with pytest.raises(SystemExit, match="143"):
        runner.learn(9)
    assert eval_env.num_steps == 3  # of 5,000
    assert load_checkpoint(tmp_path / "checkpoint_final.pt")["iter"] == runner.iteration == 2
