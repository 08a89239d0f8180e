"""canter.load: the policy of any run, without its environment, for observations of any kind."""

import sys
import warnings

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import canter
from canter.cli.errors import UserError
from canter.cli.runs import read_run
from canter.envs import CartPole, FlattenObs, GymVecEnv, ImageReach, PointRobot
from canter.envs.spec import SpecEnv, describe_env, plain_space, space_from
from canter.export.bundle import export_bundle
from canter.export.runtime import Policy
from canter.modules import ActorCritic, MLPActor, MLPCritic
from canter.runners import OffPolicyRunner, OnPolicyRunner
from canter.runners.evaluation import InferencePolicy
from canter.utils.checkpoint import load_checkpoint, save_checkpoint

SMALL = {"actor_hidden_dims": [8], "critic_hidden_dims": [8]}
RNN = {"class_name": "ActorCriticRecurrent", "rnn_hidden_size": 4}
NORMALISED = {"empirical_normalization": True, "value_normalization": "running"}
pytestmark = pytest.mark.filterwarnings("ignore:the training dict leaves out settings")


def on_policy(env, policy=None, **algorithm):
    cfg = {"num_steps_per_env": 4, "policy": {**SMALL, **(policy or {})}, "algorithm": algorithm}
    return OnPolicyRunner(env, cfg, device="cpu", show_progress=False)


def off_policy(name, task):
    cfg = {"algorithm": {"class_name": name, "learning_starts": 4, "batch_size": 4, "empirical_normalization": True}}
    return OffPolicyRunner([lambda: gymnasium.make(task)] * 2, cfg, device="cpu", show_progress=False)


class Parts(gymnasium.Env):
    """A dict observation, with an image or without."""

    def __init__(self, image=False):
        parts = {"arm": spaces.Box(-1, 1, (3,)), "goal": spaces.Box(-1, 1, (2,))}
        parts |= {"camera": spaces.Box(0, 255, (1, 12, 12), np.uint8)} if image else {}
        self.observation_space, self.action_space = spaces.Dict(parts), spaces.Box(-0.5, 0.5, (2,))

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {}


VISUAL = {"class_name": "VisualActorCritic", "visual_component_name": "camera", "visual_latent_size": 4}
CNN = {"conv_channels": [4], "conv_kernels": [4], "conv_strides": [4], "hidden_dims": [8]}
RUNNERS = {
    "ppo": lambda: on_policy(PointRobot(3), {}, **NORMALISED),
    "clipped": lambda: on_policy([Parts] * 2, {}, empirical_normalization=True, clip_obs=0.1),
    "lstm": lambda: on_policy(PointRobot(3), RNN),
    "discrete": lambda: on_policy(CartPole(3)),
    "beta": lambda: on_policy(PointRobot(3), {"action_distribution": "beta"}),
    "dict": lambda: on_policy([Parts] * 2, {}, empirical_normalization=True),
    "visual": lambda: on_policy([lambda: Parts(image=True)] * 2, VISUAL, empirical_normalization=True),
    "image": lambda: OnPolicyRunner(
        ImageReach(2),
        {
            "num_steps_per_env": 4,
            "policy": {
                "actor_class": "CNNActor",
                "critic_class": "CNNCritic",
                "actor_cfg": CNN,
                "critic_cfg": CNN,
            },
        },
        device="cpu",
        show_progress=False,
    ),
    "apexrl": lambda: OnPolicyRunner(
        PointRobot(2), algorithm="ppo", actor_class=MLPActor, critic_class=MLPCritic, device="cpu", show_progress=False
    ),
    "dqn": lambda: off_policy("DQN", "CartPole-v1"),
    "sac": lambda: off_policy("SAC", "Pendulum-v1"),
    "td3": lambda: off_policy("TD3", "Pendulum-v1"),
}


@pytest.mark.parametrize("name", RUNNERS)
def test_a_checkpoint_alone_gives_the_policy_of_every_algorithm(name, tmp_path, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runner = RUNNERS[name]()
        runner.learn(2)
    runner.save(tmp_path / "model.pt")
    monkeypatch.setattr("canter.export.load.make_env", None)  # no environment is made
    loaded, trained = canter.load(tmp_path / "model.pt"), runner.get_inference_policy()
    obs, _ = runner.env.reset()
    bounds = runner.env.action_bounds
    for _ in range(2):  # the second step has a memory
        want = trained(obs)
        want = want if bounds is None else want.clamp(*map(torch.as_tensor, bounds))
        assert torch.equal(loaded.predict(obs), want)
    assert loaded.info["timesteps"] == runner.tot_timesteps
    runner.close()


@pytest.fixture
def acting(tmp_path):
    runner = on_policy([Parts] * 2, {}, empirical_normalization=True)
    runner.learn(1)
    runner.save(tmp_path / "model.pt")
    return canter.load(tmp_path / "model.pt", seed=5)


def test_arrays_tensors_single_batched_flat_and_dict_observations_agree(acting):
    rows = np.random.default_rng(0).normal(size=(4, 5))
    want = acting.predict(rows)
    assert isinstance(want, np.ndarray)
    assert want.shape == (4, 2)
    tensors = acting.predict(torch.from_numpy(rows))
    assert isinstance(tensors, torch.Tensor)
    assert np.array_equal(tensors.numpy(), want)
    assert np.allclose(acting.predict(rows[2]), want[2], atol=1e-6)
    parts = {"goal": rows[:, 3:], "arm": rows[:, :3]}  # in another order
    assert np.array_equal(acting.predict(parts), want)
    assert np.allclose(acting.predict({name: part[2] for name, part in parts.items()}), want[2], atol=1e-6)
    assert np.array_equal(acting(rows), want)
    rows.flags.writeable = False
    assert np.array_equal(acting.predict(rows), want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_observations_of_any_dtype_get_the_precision_of_the_policy(dtype):
    policy = ActorCritic(3, 3, 2, actor_hidden_dims=(4,), critic_hidden_dims=(4,))
    obs = torch.tensor([[0, 1, 1]]).to(dtype)
    want = InferencePolicy(policy, spaces.Box(-1, 1, (3,)))(torch.tensor([[0.0, 1.0, 1.0]]))
    assert torch.equal(InferencePolicy(policy, spaces.Box(-1, 1, (3,)))(obs), want)
    exact = InferencePolicy(policy.double(), spaces.Box(-1, 1, (3,)))(obs)
    assert exact.dtype == torch.float64
    torch.testing.assert_close(exact.float(), want)


def test_a_policy_of_a_dict_takes_flat_vectors(tmp_path):
    runner = on_policy([lambda: Parts(image=True)] * 2, VISUAL, empirical_normalization=True)
    runner.save(tmp_path / "model.pt")
    loaded, obs = canter.load(tmp_path / "model.pt"), runner.env.reset()[0]
    want = loaded.predict(obs)
    flat = torch.cat([leaf.float().flatten(1) / (255 if leaf.dtype == torch.uint8 else 1) for leaf in obs.values()], 1)
    assert torch.allclose(loaded.predict(flat), want, atol=1e-6)
    assert torch.allclose(loaded.predict({name: leaf[1] for name, leaf in obs.items()}), want[1], atol=1e-6)


def test_wrong_observations_are_named(acting):
    with pytest.raises(
        ValueError, match=r"has shape \(\); the policy wants \(5,\), or \('N', 5\); Discrete .* one-hot"
    ):
        acting.predict(np.int64(3))
    with pytest.raises(
        ValueError, match=r"the observation has shape \(4, 6\); the policy wants \(5,\), or \('N', 5\)$"
    ):
        acting.predict(np.zeros((4, 6)))
    with pytest.raises(ValueError, match=r"has the parts \['arm'\], expected \['arm', 'goal'\]"):
        acting.predict({"arm": np.zeros(3)})
    with pytest.raises(ValueError, match=r"the goal has shape \(4,\)"):
        acting.predict({"arm": np.zeros((2, 3)), "goal": np.zeros((2, 4))})
    flat = InferencePolicy(acting.policy, spaces.Box(-1, 1, (5,)))
    with pytest.raises(ValueError, match=r"one observation is an array of shape \(5,\), got parts \['arm'\]"):
        flat.predict({"arm": np.zeros(3)})


def test_actions_are_clipped_where_the_environment_did(acting):
    acting.policy.actor[-1].bias.data = torch.tensor([9.0, -9.0])
    assert acting.predict(np.zeros(5)).tolist() == [0.5, -0.5]


def test_sampled_actions_spread_and_repeat_with_a_seed(acting, tmp_path):
    acting.action_bounds = acting._bounds = acting._env_bounds = None
    rows = np.zeros((2000, 5))
    first = acting.predict(rows, deterministic=False)
    assert first.std(0) == pytest.approx([1.0, 1.0], rel=0.1)  # the initial noise
    assert first.mean(0) == pytest.approx(acting.predict(rows[0]), abs=0.1)
    again = canter.load(tmp_path / "model.pt", seed=5)
    again._bounds = again._env_bounds = None
    assert np.array_equal(again.predict(rows, deterministic=False), first)


def test_a_reset_clears_the_memory_of_finished_rows_alone(tmp_path):
    runner = on_policy(PointRobot(2), RNN)
    runner.save(tmp_path / "model.pt")
    acting = canter.load(tmp_path / "model.pt")
    obs = np.ones((2, runner.env.num_obs), np.float32)
    first = acting.predict(obs)
    acting.predict(obs)
    acting.reset(np.array([True, False]))
    third = acting.predict(obs)
    assert np.array_equal(third[0], first[0])
    assert not np.array_equal(third[1], first[1])
    acting.reset()
    assert np.array_equal(acting.predict(obs), first)


def test_a_checkpoint_of_an_earlier_version_makes_its_task_once(tmp_path):
    runner = OnPolicyRunner(
        GymVecEnv([lambda: gymnasium.make("Pendulum-v1")] * 2),
        {"num_steps_per_env": 4, "policy": SMALL},
        tmp_path,
        "cpu",
        run_info={"task": "Pendulum-v1"},
        show_progress=False,
    )
    runner.write_config()
    runner.save(tmp_path / "model_1.pt")
    state = load_checkpoint(tmp_path / "model_1.pt")
    for name in ("environment", "config"):
        del state[name]
    save_checkpoint(tmp_path / "model_1.pt", state)
    obs, _ = runner.env.reset()
    found = canter.load(tmp_path).predict(obs)
    assert torch.equal(found, runner.get_inference_policy()(obs).clamp(-2.0, 2.0))
    (tmp_path / "config.yaml").unlink()
    with pytest.raises(ValueError, match=r"does not say how its policy was built, and there is no config.yaml"):
        canter.load(tmp_path)


def test_a_stranger_s_task_imports_no_module(tmp_path):
    task = "antigravity:Pendulum-v1"
    runner = OnPolicyRunner(
        GymVecEnv([lambda: gymnasium.make("Pendulum-v1")] * 2),
        {"num_steps_per_env": 4, "policy": SMALL},
        tmp_path,
        "cpu",
        run_info={"task": task},
        show_progress=False,
    )
    runner.save(tmp_path / "model_1.pt")
    canter.load(tmp_path)  # the checkpoint describes the environment
    state = load_checkpoint(tmp_path / "model_1.pt")
    del state["environment"]
    save_checkpoint(tmp_path / "model_1.pt", state)
    with pytest.raises(ValueError, match="'antigravity:Pendulum-v1' would import a module"):
        canter.load(tmp_path)
    assert "antigravity" not in sys.modules


def test_networks_built_in_python_are_given(tmp_path):
    from canter.algorithms import PPO

    env = PointRobot(2)
    network = ActorCritic(env.num_obs, env.num_privileged_obs, 2, actor_hidden_dims=(8,))
    OnPolicyRunner(env, agent=PPO(network), show_progress=False).save(tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"were built in Python; give them: canter.load\(path, policy=<policy>\)"):
        canter.load(tmp_path / "model.pt")
    fresh = ActorCritic(env.num_obs, env.num_privileged_obs, 2, actor_hidden_dims=(8,))
    loaded, obs = canter.load(tmp_path / "model.pt", policy=fresh), env.reset()[0]
    assert torch.equal(loaded.predict(obs), network.infer(obs)[0])


class OwnQ(torch.nn.Linear):
    """A Q network that has no name in canter."""

    def __init__(self, obs_space, action_space, cfg):
        super().__init__(obs_space.shape[0], int(action_space.n))


def test_networks_of_a_class_of_one_s_own_are_given(tmp_path):
    runners = [OffPolicyRunner(CartPole(2), {"seed": s}, q_network_class=OwnQ, show_progress=False) for s in (1, 2)]
    runners[0].save(tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"'OwnQ'; one of your own .* canter.load\(path, pol"):
        canter.load(tmp_path / "model.pt")
    obs = torch.tensor([[0.1, -0.2, 0.3, -0.4]])
    values = runners[0].alg.q_network(obs)
    loaded = canter.load(tmp_path / "model.pt", policy=runners[1].policy)
    assert torch.equal(runners[1].alg.q_network(obs), values)
    assert loaded.predict(obs).tolist() == values.argmax(1).tolist()


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no run directory or checkpoint"):
        canter.load(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint .*checkpoint_best.pt; .* has none"):
        canter.load(tmp_path, checkpoint="best")
    save_checkpoint(tmp_path / "model_1.pt", {"other": 1})
    with pytest.raises(ValueError, match="has no model_state_dict; it has format_version, other"):
        canter.load(tmp_path)
    with pytest.raises(ValueError, match="is a checkpoint already"):
        canter.load(tmp_path / "model_1.pt", checkpoint="best")
    (tmp_path / "policy.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is a bundle, not a run; load it with canter.export.runtime.Policy\('"):
        canter.load(tmp_path)
    with pytest.raises(UserError, match=r"is a bundle, not a run; `canter play` and `canter export --check` take"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1.0, 1.0, (3,)),
        spaces.Box(np.array([-1.0, -np.inf], np.float32), np.array([2.0, np.inf], np.float32)),
        spaces.Box(0, 255, (4, 5, 3), np.uint8),
        spaces.Discrete(4, start=2),
        spaces.MultiDiscrete([2, 5]),
        spaces.Dict([("z", spaces.Box(0, 1, (2,))), ("a", spaces.Dict({"b": spaces.Discrete(3)}))]),
    ],
    ids=str,
)
def test_spaces_survive_their_description(space):
    import json

    plain = json.loads(json.dumps(plain_space(space)))
    assert space_from(plain) == space
    if isinstance(space, spaces.Dict):
        assert list(space_from(plain).spaces) == list(space.spaces)  # in the same order


def test_a_description_stands_for_its_environment_but_cannot_be_stepped():
    env = FlattenObs(GymVecEnv([Parts] * 2))
    made = SpecEnv(describe_env(env))
    assert (made.num_obs, made.num_actions, made.obs_segments) == (5, 2, {"arm": (3,), "goal": (2,)})
    assert made.action_bounds[1].tolist() == [0.5, 0.5]
    for call in (made.reset, made.get_observations, lambda: made.step(torch.zeros(1, 2))):
        with pytest.raises(NotImplementedError, match="cannot be stepped"):
            call()
    with pytest.raises(ValueError, match="reads descriptions of version 1, got 7"):
        SpecEnv({"version": 7})
    huge = {"type": "Box", "shape": [1 << 40], "dtype": "float32", "low": 0.0, "high": 1.0}
    with pytest.raises(ValueError, match="is not a space of observations"):
        space_from(huge)
    with pytest.raises(TypeError, match="a Text space has no description"):
        plain_space(spaces.Text(3))


class Lever(gymnasium.Env):
    """Rewards its first lever; levers are numbered as the action space says."""

    observation_space = spaces.Box(-1.0, 1.0, (1,))

    def __init__(self, action_space):
        self.action_space = action_space

    def reset(self, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.last = np.ravel(action)
        return np.zeros(1, np.float32), float(self.last[0]), False, True, {}


@pytest.mark.parametrize(
    ("space", "first"),
    [(spaces.Discrete(2, start=5), [5]), (spaces.MultiDiscrete([2, 3], start=[-4, 20]), [-4, 20])],
    ids=["Discrete", "MultiDiscrete"],
)
def test_predict_numbers_discrete_actions_as_the_environment_does(space, first, tmp_path):
    env = GymVecEnv([lambda: Lever(space)] * 2)
    cfg = {"num_steps_per_env": 4, "policy": {"actor_hidden_dims": [4], "critic_hidden_dims": [4]}}
    runner = OnPolicyRunner(env, cfg, tmp_path, "cpu", show_progress=False)
    runner.learn(1)
    for policy in (canter.load(tmp_path), runner.get_inference_policy()):
        for deterministic in (True, False):
            action = policy.predict(np.zeros(1, np.float32), deterministic)
            assert space.contains(action if space.shape else action.item())
        obs, _ = env.reset()
        assert (policy.predict(obs) - policy(obs)).reshape(2, -1).tolist() == [first, first]
        env.step(policy(obs))  # to which the adapter adds the number of the first lever
        assert env.envs[0].unwrapped.last.tolist() == policy.predict(obs)[0].reshape(-1).tolist()
    bundle = Policy(export_bundle(canter.load(tmp_path), tmp_path / "bundle", formats=("onnx",)).path)
    assert bundle.predict(np.zeros(1)).tolist() == canter.load(tmp_path).predict(np.zeros(1)).tolist()


def test_predict_gives_actions_within_the_bounds_and_in_the_shape_of_a_box(tmp_path):
    space = spaces.Box(-0.01, 0.02, (2, 2))
    env = GymVecEnv([lambda: Lever(space)] * 2)
    cfg = {"num_steps_per_env": 4, "policy": {"actor_hidden_dims": [4], "critic_hidden_dims": [4]}}
    runner = OnPolicyRunner(env, cfg, tmp_path, "cpu", show_progress=False)
    runner.learn(1)
    obs, _ = env.reset()
    for policy in (canter.load(tmp_path), runner.get_inference_policy()):
        assert space.contains(policy.predict(np.zeros(1, np.float32), deterministic=False))
        env.step(policy(obs))  # which the adapter clips and shapes
        assert policy.predict(obs).shape == (2, 2, 2)
        assert env.envs[1].unwrapped.last.tolist() == policy.predict(obs)[1].flatten().tolist()


def test_predict_gives_whole_numbers_for_a_box_of_integers(tmp_path):
    space = spaces.Box(0, 9, (2,), np.int16)
    env = GymVecEnv([lambda: Lever(space)] * 2)
    cfg = {"num_steps_per_env": 4, "policy": {"actor_hidden_dims": [4], "critic_hidden_dims": [4]}}
    runner = OnPolicyRunner(env, cfg, tmp_path, "cpu", show_progress=False)
    with torch.no_grad():
        runner.policy.actor[-1].bias.copy_(torch.tensor([2.6, 11.0]))
    runner.save(tmp_path / "model_1.pt")
    for policy in (canter.load(tmp_path / "model_1.pt"), runner.get_inference_policy()):
        assert space.contains(policy.predict(np.zeros(1, np.float32)))
        assert policy.predict(torch.zeros(2, 1)).tolist() == [[3, 9], [3, 9]]
        env.step(policy(torch.zeros(2, 1)))
        assert env.envs[0].unwrapped.last.tolist() == [3, 9], "the same as in training"


@pytest.mark.parametrize("obs", ["north", (np.zeros(3), 1)], ids=["text", "tuple"])
def test_an_observation_that_is_no_array_is_an_error_with_the_way_out(acting, obs):
    with pytest.raises(TypeError, match=rf"is numbers, got {type(obs).__name__} .*spaces.flatten\(env.observation_sp"):
        acting.predict(obs)
