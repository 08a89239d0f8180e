"""Policies of rsl_rl's model classes, on a stand-in for them and, where rsl_rl is installed, on the real CNNs."""

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from canter.compat.models import RslRlModels, model_class
from canter.runners import OnPolicyRunner


class CNNModel(nn.Module):
    """The constructor and the forward pass of rsl_rl's CNNModel, with one convolution."""

    def __init__(
        self, obs, obs_groups, obs_set, output_dim, hidden_dims=(8,), activation="elu", cnn_cfg=None, cnns=None
    ):
        super().__init__()
        self.flat = [name for name in obs_groups[obs_set] if obs[name].dim() == 2]
        self.images = [name for name in obs_groups[obs_set] if obs[name].dim() == 4]
        made = {name: nn.Conv2d(obs[name].shape[1], cnn_cfg["output_channels"][0], 3) for name in self.images}
        self.cnns = nn.ModuleDict(made) if cnns is None else cnns
        width = sum(obs[name].shape[1] for name in self.flat) + sum(c.out_channels for c in self.cnns.values())
        self.mlp = nn.Sequential(nn.Linear(width, hidden_dims[0]), nn.ELU(), nn.Linear(hidden_dims[0], output_dim))

    def forward(self, obs):
        parts = [obs[name] for name in self.flat] + [self.cnns[name](obs[name]).amax((2, 3)) for name in self.images]
        return self.mlp(torch.cat(parts, 1))


class CameraEnv:
    num_envs, num_actions, device, max_episode_length = 4, 2, "cpu", 20

    def get_observations(self):
        return {"actor": torch.randn(4, 3) + 5, "camera": torch.rand(4, 1, 6, 8), "critic": torch.randn(4, 5)}

    def step(self, actions):
        return self.get_observations(), -actions.square().sum(1), torch.zeros(4), {}


def camera_cfg(class_name, cnn_cfg, share=False):
    model = {
        "class_name": class_name,
        "hidden_dims": [8],
        "activation": "elu",
        "obs_normalization": True,
        "cnn_cfg": cnn_cfg,
    }
    noise = {"class_name": "GaussianDistribution", "init_std": 0.5, "std_type": "scalar"}
    sets = {"actor": ["actor", "camera"], "critic": ["critic", "camera"]}
    algorithm = {"class_name": "PPO", "num_learning_epochs": 1, "num_mini_batches": 2, "schedule": "fixed"}
    return {
        "num_steps_per_env": 4,
        "obs_groups": sets,
        "actor": {**model, "distribution_cfg": noise},
        "critic": dict(model),
        "algorithm": {**algorithm, "share_cnn_encoders": share},
    }


def check_trains(cfg, tmp_path):
    runner = OnPolicyRunner(CameraEnv(), cfg, device="cpu", show_progress=False)
    assert type(runner.policy) is RslRlModels
    before = {name: p.detach().clone() for name, p in runner.policy.named_parameters()}
    runner.learn(2)
    assert all(not torch.equal(p, before[name]) for name, p in runner.policy.named_parameters())
    normalized = runner.policy.obs_normalizer.normalize(runner.obs)
    assert torch.equal(normalized["camera"], runner.obs["camera"])  # images are exempt
    assert normalized["actor"].mean().abs() < 1.5
    obs = CameraEnv().get_observations()
    runner.save(tmp_path / "model.pt")
    again = OnPolicyRunner(CameraEnv(), runner.config(), device="cpu", show_progress=False)
    again.load(tmp_path / "model.pt")
    torch.testing.assert_close(again.get_inference_policy()(obs), runner.get_inference_policy()(obs))
    step = runner.alg.get_policy().as_onnx()
    assert step.input_names == ["actor", "camera"]
    torch.testing.assert_close(step(obs["actor"], obs["camera"]), runner.get_inference_policy()(obs))
    torch.testing.assert_close(runner.policy.as_jit()(obs["actor"], obs["camera"]), step(obs["actor"], obs["camera"]))
    return runner


@pytest.fixture
def stand_in(monkeypatch):
    for name in ("rsl_rl", "rsl_rl.models"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["rsl_rl.models"].CNNModel = CNNModel


def test_a_cnn_policy_trains_is_saved_and_acts_on_groups(stand_in, tmp_path):
    runner = check_trains(camera_cfg("CNNModel", {"output_channels": [3]}), tmp_path)
    actor, critic = (runner.policy.get_submodule(f"{side}.model.cnns.camera") for side in ("actor", "critic"))
    assert actor is not critic
    assert runner.policy.noise_std().shape == (2,)


def test_shared_encoders_are_one_module(stand_in, tmp_path):
    runner = check_trains(camera_cfg("CNNModel", {"output_channels": [3]}, share=True), tmp_path)
    assert runner.policy.actor.model.cnns is runner.policy.critic.model.cnns


def test_an_actor_with_a_camera_and_a_critic_without_one_are_two_models(stand_in, tmp_path):
    sys.modules["rsl_rl.models"].MLPModel = CNNModel
    cfg = camera_cfg("CNNModel", {"output_channels": [3]})
    cfg["critic"] = {"class_name": "MLPModel", "hidden_dims": [6], "activation": "elu", "obs_normalization": True}
    cfg["obs_groups"]["critic"] = ["critic"]
    runner = check_trains(cfg, tmp_path)
    assert [layer.in_features for layer in runner.policy.critic.model.mlp if hasattr(layer, "in_features")] == [5, 6]


@pytest.mark.parametrize("share", [False, True])
def test_a_checkpoint_of_rsl_rl_is_loaded_with_its_moments(stand_in, tmp_path, share):
    cfg = camera_cfg("CNNModel", {"output_channels": [3]}, share)
    source, runner = (OnPolicyRunner(CameraEnv(), cfg, device="cpu", show_progress=False) for _ in range(2))
    source.learn(1)
    policy, state, theirs = source.policy, {}, []
    sides = {"actor": policy.obs_normalizer, "critic": policy.critic_obs_normalizer}
    for side, normalizer in sides.items():  # as rsl_rl saves them: one normaliser for all vectors
        model, statistics = getattr(policy, side).model, normalizer.leaf(side).state_dict()
        own = {"distribution.std_param": policy.std.detach()} if side == "actor" else {}
        state[f"{side}_state_dict"] = {f"obs_normalizer.{n}": v for n, v in statistics.items()}
        state[f"{side}_state_dict"] |= own | model.state_dict()
        theirs += [*([policy.std] if own else []), *model.parameters()]
    numbers = [next(i for i, other in enumerate(theirs) if other is one) for one in theirs]
    moments = {
        i: {"step": torch.tensor(3.0), "exp_avg": p.detach() + 1, "exp_avg_sq": p.detach() ** 2}
        for i, p in enumerate(theirs)
        if i in numbers
    }
    group = {**source.alg.optimizer.state_dict()["param_groups"][0], "params": numbers}
    torch.save(
        {**state, "optimizer_state_dict": {"state": moments, "param_groups": [group]}, "iter": 1}, tmp_path / "m.pt"
    )
    runner.load(tmp_path / "m.pt")
    torch.testing.assert_close(runner.policy.state_dict(), policy.state_dict())
    loaded = runner.alg.optimizer.state_dict()["state"]
    for number, parameter in enumerate(runner.policy.parameters()):
        torch.testing.assert_close(loaded[number]["exp_avg"].reshape(parameter.shape), parameter.detach() + 1)
    runner.learn(1)


def test_a_model_gets_each_of_several_vector_groups_by_its_name(stand_in, tmp_path):
    class Named(CNNModel):
        def forward(self, obs):
            assert {name: part.shape[-1] for name, part in obs.items()} in ({"actor": 3, "critic": 5}, {"critic": 5})
            return super().forward(obs)

    sys.modules["rsl_rl.models"].Named = Named
    cfg = camera_cfg("rsl_rl.models:Named", None)
    cfg["obs_groups"] = {"actor": ["actor", "critic"], "critic": ["critic"]}
    runner = OnPolicyRunner(CameraEnv(), cfg, device="cpu", show_progress=False)
    runner.learn(1)
    obs = CameraEnv().get_observations()
    flat = torch.cat([obs["actor"], obs["critic"]], 1)
    step = runner.policy.as_onnx()
    assert step.input_names == ["obs"]
    torch.testing.assert_close(step(flat), runner.get_inference_policy()(obs))


def test_a_recurrent_model_is_refused(stand_in, monkeypatch):
    monkeypatch.setattr(CNNModel, "is_recurrent", True, raising=False)
    with pytest.raises(ValueError, match="CNNModel is recurrent; use RNNModel"):
        OnPolicyRunner(CameraEnv(), camera_cfg("CNNModel", {"output_channels": [3]}), device="cpu")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "rsl_rl.models", None)
    with pytest.raises(ImportError, match="'CNNModel' is a class of rsl_rl, which is missing: pip install rsl-rl-lib"):
        model_class("CNNModel")
    with pytest.raises(ImportError, match="'Net' is a class of no_such_package.nets, which is missing"):
        model_class("no_such_package.nets:Net")


@pytest.mark.slow
@pytest.mark.parametrize("share", [False, True, None])
def test_the_real_cnn_of_rsl_rl_trains(tmp_path, share):
    pytest.importorskip("rsl_rl.models", reason="needs the real rsl_rl: pip install 'rsl-rl-lib>=5'")
    cnn = {"output_channels": [3], "kernel_size": 3, "stride": 1, "padding": "zeros", "activation": "elu"}
    cfg = camera_cfg("CNNModel", {**cnn, "global_pool": "avg"}, bool(share))
    if share is None:  # the critic has no camera
        cfg["critic"] = {"class_name": "MLPModel", "hidden_dims": [6], "activation": "elu", "obs_normalization": True}
        cfg["obs_groups"]["critic"] = ["critic"]
    check_trains(cfg, tmp_path)
