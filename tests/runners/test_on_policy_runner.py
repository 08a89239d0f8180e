"""Both documented constructors, the length and the result of `learn`, and one rollout step."""

import math
import warnings

import gymnasium
import pytest
import torch

from canter.algorithms import PPO, PPOConfig
from canter.envs import GymVecEnvContinuous
from canter.envs.torch_envs import CartPole, Pendulum, PointRobot
from canter.modules.actor_critic import ActorCritic
from canter.modules.actors import MLPActor, MLPCritic
from canter.runners import OffPolicyRunner, OnPolicyRunner

SMALL = {"hidden_dims": [8]}


def test_flat_and_nested_dicts_give_the_same_run(tiny, differing, weights):
    flat = tiny(algorithm={"entropy_coef": 0.01}, empirical_normalization=True)
    nested = {
        "runner": {"policy_class_name": "ActorCritic", "algorithm_class_name": "PPO", "seed": 1},
        "algorithm": {name: value for name, value in flat["algorithm"].items() if name != "class_name"},
        "policy": {name: value for name, value in flat["policy"].items() if name != "class_name"},
    }
    nested["runner"] |= {"num_steps_per_env": 4, "save_interval": 0, "empirical_normalization": True}
    runners = [OnPolicyRunner(PointRobot(4), cfg, device="cpu", show_progress=False) for cfg in (flat, nested)]
    for runner in runners:
        runner.learn(2)
        assert runner.alg.entropy_coef == 0.01
    assert differing(*map(weights, runners)) == []
    other = OnPolicyRunner(PointRobot(4), {**flat, "seed": 2}, show_progress=False)
    other.learn(2)
    assert differing(weights(runners[0]), weights(other))


def test_dict_observations_reach_the_policy_as_named_segments(make_runner):
    class Split(PointRobot):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            box = gymnasium.spaces.Box(-math.inf, math.inf, (2,))
            self.obs_space = self.critic_obs_space = gymnasium.spaces.Dict({"velocity": box, "command": box})
            self.obs_segments = self.critic_obs_segments = None

        def observe(self, state):
            return {"velocity": state["measured"].clone(), "command": state["command"].clone()}

    runner = make_runner(Split(4))
    runner.learn(1)
    assert runner.policy.obs_segments == {"velocity": (2,), "command": (2,)}
    assert runner.alg.rollout.observations.shape == (4, 4, 4)


def test_the_documented_snippet_trains_pendulum():
    env = GymVecEnvContinuous([lambda: gymnasium.make("Pendulum-v1") for _ in range(2)])
    runner = OnPolicyRunner(
        env=env,
        algorithm="ppo",
        actor_class=MLPActor,
        critic_class=MLPCritic,
        actor_cfg=SMALL,
        critic_cfg=SMALL,
        cfg=PPOConfig(num_steps_per_env=8, seed=1),
        device="cpu",
        show_progress=False,
    )
    runner.learn(total_timesteps=32)
    assert runner.iteration == 2
    assert runner.policy.actor is not runner.policy.critic
    runner.close()


def test_a_ready_agent_is_used_as_it_is():
    env = PointRobot(4)
    cfg = PPOConfig(num_steps_per_env=4, num_mini_batches=2)
    agent = PPO(env=env, cfg=cfg, actor_class=MLPActor, critic_class=MLPCritic, actor_cfg=SMALL, critic_cfg=SMALL)
    storage = agent.storage
    runner = OnPolicyRunner(agent=agent, env=env, cfg=cfg, show_progress=False)
    assert runner.agent is agent
    assert runner.alg.storage is storage
    runner.learn(1)
    assert OnPolicyRunner(env, agent, show_progress=False).agent is agent  # the algorithm in place of the dict


def test_an_agent_of_another_number_of_environments_gets_new_storage():
    agent = PPO(ActorCritic(6, 9, 2, actor_hidden_dims=[8], critic_hidden_dims=[8]), num_mini_batches=2)
    agent.init_obs_norm(6, 9)
    agent.init_storage(2, 24, [6], [9], [2])
    runner = OnPolicyRunner(PointRobot(3), agent, show_progress=False)
    runner.learn(1)
    assert agent.rollout.num_envs == 3


def test_an_agent_in_other_environments_keeps_its_normaliser_statistics():
    agent = PPO(ActorCritic(6, 9, 2, actor_hidden_dims=[8], critic_hidden_dims=[8]), empirical_normalization=True)
    OnPolicyRunner(PointRobot(4), agent, show_progress=False).learn(1)
    runner = OnPolicyRunner(PointRobot(3), agent, show_progress=False)
    assert int(agent.obs_normalizer.count) == 4 * 24
    runner.learn(1)
    assert int(agent.obs_normalizer.count) == 7 * 24


def test_ppo_learns_evaluates_and_saves_through_a_runner(monkeypatch, tmp_path):
    cfg = PPOConfig(num_steps_per_env=4, num_mini_batches=2)
    classes = {"actor_class": MLPActor, "critic_class": MLPCritic, "actor_cfg": SMALL, "critic_cfg": SMALL}
    agent = PPO(env=PointRobot(4, max_episode_length=5), cfg=cfg, **classes)
    agent.learn(total_timesteps=32)
    assert agent.runner().tot_timesteps == 32
    assert agent.eval(2)["eval/mean_length"] == 5
    agent.save(tmp_path / "agent.pt")
    assert agent.load(tmp_path / "agent.pt") is None
    calls = []
    monkeypatch.setattr(OnPolicyRunner, "learn", lambda self, *args, **kwargs: calls.append((args, kwargs)))
    agent.learn(3, total_timesteps=7)
    assert calls == [((3,), {"total_timesteps": 7})]
    with pytest.raises(ValueError, match=r"need an environment"):
        PPO(ActorCritic(6, 9, 2)).learn(1)


@pytest.mark.parametrize("algorithm", ["PPO", "DQN", "SAC", "TD3"])
def test_without_a_path_algorithms_and_runners_save_in_the_run_directory(algorithm, tmp_path):
    env = CartPole(2) if algorithm == "DQN" else Pendulum(2)
    cls, cfg = (
        (OnPolicyRunner, {"num_steps_per_env": 4}) if algorithm == "PPO" else (OffPolicyRunner, {"buffer_size": 512})
    )
    cfg = {**cfg, "algorithm": {"class_name": algorithm}, "device": "cpu"}

    runner = cls(env, cfg, log_dir=tmp_path, show_progress=False)
    runner.save()
    runner.iteration = 7
    runner.alg.save()
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["model_0.pt", "model_7.pt"]
    with pytest.raises(IsADirectoryError, match=r"is a directory; name a file in it"):
        runner.save(tmp_path)
    with pytest.raises(ValueError, match=r"no directory to save in; name the file, as in save\('policy.pt'\)"):
        cls(env, cfg, show_progress=False).save()


@pytest.mark.parametrize(("widths", "kind"), [((5, 9), "observation"), ((6, 5), "critic's observation")])
def test_a_policy_for_observations_of_another_width_is_refused(widths, kind):
    agent = PPO(ActorCritic(*widths, 2), device="cpu")
    with pytest.raises(ValueError, match=f"the {kind} of the environment has . values, but .* was made for 5"):
        OnPolicyRunner(PointRobot(2), agent, show_progress=False)


def test_total_timesteps_round_up_and_add(make_runner):
    runner = make_runner(PointRobot(24))  # T * N = 96
    runner.learn(total_timesteps=100)
    assert (runner.iteration, runner.tot_timesteps) == (2, 192)
    runner.learn(total_timesteps=100)
    assert (runner.iteration, runner.tot_timesteps) == (4, 384)
    runner.learn(total_timesteps=1e2)
    assert (runner.iteration, runner.tot_timesteps) == (6, 576)


@pytest.mark.parametrize("length", ["100", 2.5, True, [1], None])
def test_a_length_that_is_no_whole_number_or_given_twice_is_refused(make_runner, length):
    runner = make_runner()
    message = "must be a whole number of at least 0, got" if length is not None else "is given twice, as 2 iterations"
    for given in ({"num_learning_iterations": length}, {"total_timesteps": length}):
        given = {"num_learning_iterations": 2, "total_timesteps": 100} if length is None else given
        with pytest.raises(ValueError, match=f"the length of the training {message}"):
            runner.learn(**given)
    assert runner.iteration == 0


def test_robot_metrics_are_read_from_the_environment(make_runner, counting):
    env = counting()
    env.tracking_error, env.CoT = torch.tensor([0.2, 0.4, 0.3]), 0.7
    runner = make_runner(env)
    runner.evaluation()
    assert (runner.metrics_velrmsd, runner.metrics_CoT) == pytest.approx((0.3, 0.7))
    assert env.num_steps == 0
    plain = make_runner(counting())
    result = plain.learn(1)
    assert math.isnan(plain.metrics_velrmsd)
    assert math.isnan(plain.metrics_CoT)
    assert "eval/velrmsd" not in result.history[0]


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("policy", [{}, {"class_name": "ActorCriticRecurrent", "rnn_hidden_size": 6}])
def test_rollouts_run_in_inference_mode_by_default(make_runner, enabled, policy):
    seen = []

    class Spy(PointRobot):
        def step(self, actions):
            seen.append((torch.is_inference_mode_enabled(), actions.requires_grad))
            return super().step(actions)

    runner = make_runner(Spy(4), inference_mode_rollout=enabled, policy=policy)
    runner.learn(2)
    assert set(seen) == {(enabled, False)}
    assert not runner.alg.rollout.values.requires_grad


def test_modes_reach_policy_and_normalisers(make_runner):
    runner = make_runner(algorithm={"empirical_normalization": True, "normalize_rewards": True})
    runner.eval_mode()
    assert not runner.policy.training
    assert not runner.policy.obs_normalizer.training
    assert not runner.alg.return_scaler.training
    runner.train_mode()
    assert runner.policy.training
    assert runner.policy.obs_normalizer.training
    runner.eval_mode()
    runner.learn(1)  # switches back by itself
    assert int(runner.policy.obs_normalizer.count) == 16


def test_random_episode_ages_are_in_range_and_repeatable(make_runner):
    ages = []
    for seed in (1, 1, 2):
        env = PointRobot(64, max_episode_length=50)
        runner = make_runner(env, seed=seed)
        runner.init_writer(init_at_random_ep_len=True)
        ages.append(env.episode_length_buf.clone())
    assert ages[0].min() >= 0
    assert ages[0].max() < 50
    assert len(ages[0].unique()) > 20
    assert torch.equal(ages[0], ages[1])
    assert not torch.equal(ages[0], ages[2])
    runner.learn(1, init_at_random_ep_len=True)


def test_an_environment_without_episode_ages_is_a_warning(make_runner, counting):
    class ReadOnly(counting):
        @property
        def episode_length_buf(self):
            return self.t.long()

    for env in (counting(), ReadOnly()):
        with pytest.warns(UserWarning, match="episode_length_buf"):
            make_runner(env).learn(1, init_at_random_ep_len=True)


def test_nothing_is_written_without_a_directory(make_runner, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner = make_runner(save_interval=1)
    runner.learn(2)
    assert runner.writer is None
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="save_dir"):
        runner.save_checkpoint("x.pt")


@pytest.mark.parametrize("has_cuda", [True, False])
def test_the_device_is_a_gpu_if_there_is_one(monkeypatch, has_cuda):
    from canter.utils.runtime import resolve_device

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    assert resolve_device(None).type == ("cuda" if has_cuda else "cpu")


def test_runner_arguments_override_a_copy_of_the_config():
    cfg = PPOConfig(num_steps_per_env=4, log_interval=7, save_interval=8, device="cuda:7")
    runner = OnPolicyRunner(
        PointRobot(2),
        cfg=cfg,
        actor_class=MLPActor,
        critic_class=MLPCritic,
        actor_cfg=SMALL,
        critic_cfg=SMALL,
        log_interval=3,
        save_interval=5,
        eval_interval=6,
        eval_episodes=4,
        device="cpu",
        show_progress=False,
    )
    assert (runner.log_interval, runner.save_interval) == (3, 5)
    assert (runner.cfg.eval_interval, runner.cfg.eval_episodes, runner.alg.device.type) == (6, 4, "cpu")
    assert (cfg.log_interval, cfg.save_interval, cfg.eval_interval, cfg.device) == (7, 8, None, "cuda:7")


@pytest.mark.parametrize("algorithm", [{}, {"rnd_cfg": {"weight": 1.0, "predictor_hidden_dims": [4]}}])
def test_one_seed_is_one_run(make_runner, differing, weights, algorithm):  # D0
    states = []
    for seed in (1, 1, 2):
        runner = make_runner(PointRobot(4), seed=seed, algorithm=algorithm)
        runner.learn(2)
        states.append(weights(runner))
    assert differing(states[0], states[1]) == []
    assert differing(states[0], states[2])


class GlobalNoise(PointRobot):
    """Its rewards and its first states come from torch's global generator, as those of many simulators."""

    def initial_state(self, n):
        state = super().initial_state(n)
        return {**state, "position": state["position"] + torch.rand_like(state["position"])}

    def step(self, actions):
        record = super().step(actions)
        return record._replace(reward=record.reward + torch.rand(self.num_envs))


class GlobalNoiseBatch:
    """The same as an rsl_rl-style environment without a `seed` method."""

    num_envs, num_actions, device, max_episode_length = 3, 2, "cpu", 7

    def get_observations(self):
        return torch.rand(3, 4), {}

    reset = get_observations

    def step(self, actions):
        return torch.rand(3, 4), torch.rand(3), torch.rand(3) < 0.1, {}


@pytest.mark.filterwarnings("ignore:.*may differ from run to run")
@pytest.mark.parametrize("make_env", [lambda: GlobalNoise(3, max_episode_length=7), GlobalNoiseBatch])
def test_the_seed_determines_environments_that_draw_from_torchs_generator(make_runner, make_env):
    found = {}
    for name, seed, before in (("first", 1, 10), ("second", 1, 11), ("third", 2, 10)):
        torch.manual_seed(before)
        history = make_runner(make_env(), seed=seed).learn(3).history
        found[name] = [row["rollout/mean_reward"] for row in history]
    assert found["first"] == found["second"]
    assert found["first"] != found["third"]


def test_weights_and_the_environments_noise_do_not_depend_on_each_other(make_runner, weights):
    rewards, learned = [], []
    for env, width in ((GlobalNoise(3), 8), (GlobalNoise(3), 16), (PointRobot(3), 8)):
        torch.manual_seed(4)
        runner = make_runner(env, policy={"actor_hidden_dims": [width]})
        rewards.append(torch.rand(()))
        learned.append(weights(runner)["alg"]["model_state_dict"]["critic.0.weight"])
    assert rewards[0] == rewards[1]
    assert torch.equal(learned[0], learned[2])


def test_an_environment_that_cannot_be_seeded_is_a_warning(make_runner, counting):
    class NoSeed(counting):
        def seed(self, seed):
            raise NotImplementedError("NoSeed cannot be seeded")

    with pytest.warns(UserWarning, match=r"NoSeed cannot be seeded.*differ"):
        make_runner(NoSeed())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        make_runner(NoSeed(), seed=None)


def test_rsl_rl_style_environments_begin_anew_once_they_are_seeded(make_runner):
    class Seeded:
        num_envs, num_actions, device = 2, 1, "cpu"
        calls = []

        def seed(self, seed):
            self.calls.append(seed)

        def reset(self):
            self.calls.append("reset")
            return torch.zeros(2, 3), {}

        def step(self, actions):
            return torch.zeros(2, 3), torch.zeros(2), torch.zeros(2), {}

    make_runner(Seeded(), seed=7).learn(1)
    assert Seeded.calls == ["reset", 7, "reset"]


def test_discrete_actions_train(make_runner):
    runner = make_runner(CartPole(4), algorithm={"schedule": "adaptive"})
    runner.learn(2)
    assert runner.alg.rollout.actions.dtype == torch.int64


def test_closing_closes_logger_and_environments(make_runner, counting, tmp_path):
    closed = []
    env, eval_env = counting(), counting()
    env.close, eval_env.close = lambda: closed.append("env"), lambda: closed.append("eval")
    runner = make_runner(env, eval_env=eval_env, log_dir=tmp_path)
    runner.learn(1)
    runner.close()
    assert closed == ["env", "eval"]
    assert runner.writer is None


@pytest.mark.parametrize("surrounding", [torch.no_grad, torch.inference_mode])
def test_learn_has_gradients_whatever_surrounds_it(make_runner, surrounding, differing, weights):
    plain, surrounded = make_runner(PointRobot(4)), make_runner(PointRobot(4))
    plain.learn(2)
    with surrounding():
        surrounded.learn(2)
    assert differing(weights(plain), weights(surrounded)) == []


def test_a_policy_with_layers_of_double_precision_trains(make_runner):
    class Precise(ActorCritic):
        def __init__(self, *args, **settings):
            super().__init__(*args, **settings)
            self.extra = torch.nn.Linear(args[0], args[0]).double()

        def actor_features(self, obs, ctx):
            return super().actor_features(self.extra(obs.double()).float(), ctx)

    env = PointRobot(4)
    widths = env.obs_space.shape[0], env.critic_obs_space.shape[0]
    policy = Precise(*widths, 2, action_space=env.action_space)
    before = policy.extra.weight.detach().clone()
    OnPolicyRunner(env, PPO(policy, env=env), show_progress=False).learn(2)
    assert policy.extra.weight.dtype is torch.float64
    assert not torch.equal(policy.extra.weight, before)
