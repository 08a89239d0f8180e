"""The same weights and the same steps give the numbers of the real rsl_rl: values, returns, losses, new weights."""

import copy
import importlib.metadata
import math
import sys
from pathlib import Path

import pytest
import torch

from canter.compat.checkpoints import import_state
from canter.envs.records import take_groups
from canter.runners import OnPolicyRunner

pytest.importorskip("tensordict")
from tensordict import TensorDict

sys.path.insert(0, str(Path(__file__).parent / "rsl_rl"))
from peer import PPO, RUN, PeerEnv, model_cfg


def mirror(env, obs=None, actions=None):
    """The image of every group and of the actions, below the originals."""
    if obs is not None:
        image = {"proprio": obs["proprio"] * torch.tensor([1.0, -1.0, 1.0]), "command": obs["command"][:, [1, 0]]}
        image["critic"] = obs["critic"][:, [3, 1, 2, 0]]
        obs = torch.cat([obs, TensorDict(image, batch_size=obs.batch_size)])
    return obs, None if actions is None else torch.cat([actions, -actions.flip(1)])


def symmetry(augment, loss):
    flags = {"use_data_augmentation": augment, "use_mirror_loss": loss, "mirror_loss_coeff": 0.7}
    return {"symmetry_cfg": {"data_augmentation_func": mirror, **flags}}


RND = {"weight": 50.0, "num_outputs": 2, "predictor_hidden_dims": [5], "target_hidden_dims": [6]}
NEEDED = "compares with the real rsl_rl: pip install 'rsl-rl-lib>=5.5'"
CASES = {
    "mlp": (model_cfg(normalized=(True, True)), {"schedule": "adaptive", "desired_kl": 1e-4}),
    "one_normaliser": (model_cfg(normalized=(False, True)), {"normalize_advantage_per_mini_batch": True}),
    "tight_clip": (model_cfg(), {"max_grad_norm": 0.05, "use_clipped_value_loss": False, "value_loss_coef": 3.0}),
    "lstm": (model_cfg("lstm", (True, False)), {}),
    "gru": (model_cfg("gru"), {"optimizer": "adamw", "max_grad_norm": 0.1}),
    "state_dependent": (model_cfg(distribution={"class_name": "HeteroscedasticGaussianDistribution"}), {}),
    "beta": (model_cfg(distribution={"class_name": "BetaDistribution", "action_range": [-2.0, 1.0]}), {}),
    "mirror_images": (model_cfg(), symmetry(True, False)),
    "mirror_loss": (model_cfg(), symmetry(False, True)),
    "both_symmetries": (model_cfg(), symmetry(True, True)),
    "rnd": (model_cfg(), {"rnd_cfg": RND}),
}


def close(ours, theirs, atol=2e-5):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=atol)


def real_rsl_rl():
    """The runners of the real rsl_rl."""
    rsl_rl = pytest.importorskip("rsl_rl.runners", reason=NEEDED)
    if tuple(map(int, importlib.metadata.version("rsl-rl-lib").split(".")[:2])) < (5, 5):
        pytest.skip(NEEDED)  # before, normalisers took every step into account at once, not at the end of an update
    torch.manual_seed(3)
    return rsl_rl


def both(cfg, tmp_path):
    """rsl_rl's runner and ours with its weights."""
    rsl_rl = real_rsl_rl()
    env = PeerEnv()
    peer = rsl_rl.OnPolicyRunner(env, copy.deepcopy(cfg), log_dir=None, device="cpu")
    peer.alg.train_mode()
    peer.logger.save_model = lambda *_: None
    peer.save(str(tmp_path / "peer.pt"))
    given = {**cfg, "algorithm": {**cfg["algorithm"], "execution": "eager"}}
    ours = OnPolicyRunner(PeerEnv(), given, device="cpu", show_progress=False)
    ours.load(str(tmp_path / "peer.pt"))
    ours.alg.train_mode()
    ours.alg.on_record = ours.alg.on_step = []  # statistics that only the runner's loop reads
    return env, peer, ours


@pytest.mark.parametrize("case", CASES)
def test_two_iterations_give_the_numbers_of_rsl_rl(case, tmp_path):
    cfg, settings = copy.deepcopy(CASES[case])
    cfg["obs_groups"] |= {"rnd_state": ["critic"]} if case == "rnd" else {}
    cfg["algorithm"] |= {"num_learning_epochs": 3, "num_mini_batches": 1, **settings}
    env, peer, ours = both(cfg, tmp_path)
    alg, distribution = ours.alg, ours.policy.distribution
    obs = env.get_observations()
    for iteration in range(2):
        with torch.inference_mode():
            for _ in range(cfg["num_steps_per_env"]):
                actions = peer.alg.act(obs)
                theirs = peer.alg.transition
                alg.act(take_groups(obs, ours.env.sets[0]), obs["critic"])
                step = alg.transition
                close(step.values, theirs.values)
                # A share of the range is what our Beta distribution is about.
                chosen = (actions + 2.0) / 3.0 if case == "beta" else actions
                step.actions = chosen.clone()
                step.actions_log_prob = distribution.log_prob(step.params, step.actions)
                close(step.actions_log_prob, theirs.actions_log_prob.squeeze(-1))
                obs, rewards, dones, extras = env.step(actions)
                peer.alg.process_env_step(obs, rewards.clone(), dones, extras)
                alg.process_env_step(rewards, dones, dict(extras), take_groups(obs, ours.env.sets[0]), obs["critic"])
            peer.alg.compute_returns(obs)
            alg.compute_returns(obs["critic"])
        close(alg.storage.data["rewards"].squeeze(-1), peer.alg.storage.rewards.squeeze(-1))
        close(alg.storage.data["returns"].squeeze(-1), peer.alg.storage.returns.squeeze(-1))
        close(alg.storage.data["advantages"].squeeze(-1), peer.alg.storage.advantages.squeeze(-1))
        expected = peer.alg.update()
        losses, _ = alg.update(iteration)
        close(torch.tensor(losses["value_loss"]), torch.tensor(expected["value"]))
        close(torch.tensor(losses["surrogate_loss"]), torch.tensor(expected["surrogate"]))
        if "symmetry" in expected:  # theirs is a mean over the actions, ours a sum
            close(torch.tensor(losses["mirror_loss"]), env.num_actions * torch.tensor(expected["symmetry"]))
        if "rnd" in expected:
            close(torch.tensor(losses["rnd_loss"]), torch.tensor(expected["rnd"]))
            ours_rnd, theirs_rnd = alg.extensions["rnd"].model.predictor, peer.alg.rnd.predictor
            torch.testing.assert_close(ours_rnd.state_dict(), theirs_rnd.state_dict(), rtol=1e-4, atol=2e-5)
        offset = 2 * math.log(3.0) if case == "beta" else 0.0  # rsl_rl leaves out the logarithm of the range
        close(torch.tensor(-losses["entropy"]), torch.tensor(expected["entropy"] + offset))
        assert alg.learning_rate == pytest.approx(peer.alg.learning_rate)
        new = import_state({**peer.alg.save(), "iter": 0})["model_state_dict"]
        for name, value in ours.policy.state_dict().items():
            close(value, new[name])


def network(rnn, width, normalized):
    memory = {"class_name": "RNNModel", "rnn_type": rnn, "rnn_hidden_dim": 4, "rnn_num_layers": 1}
    common = {"activation": "elu", "obs_normalization": normalized, "hidden_dims": [width]}
    noise = {"class_name": "GaussianDistribution", "init_std": 0.3}
    return {**(memory if rnn else {"class_name": "MLPModel"}), **common, "distribution_cfg": noise}


@pytest.mark.parametrize(
    ("student", "teacher", "normalized", "settings"),
    [
        (None, None, True, {}),
        (None, None, False, {"loss_type": "huber", "max_grad_norm": 0.05}),
        ("lstm", "gru", True, {"max_grad_norm": 0.1}),
    ],
)
def test_a_distillation_gives_the_numbers_of_rsl_rl(student, teacher, normalized, settings, tmp_path):
    rsl_rl, path = real_rsl_rl(), str(tmp_path / "teacher.pt")
    critic = {name: value for name, value in network(teacher, 5, False).items() if name != "distribution_cfg"}
    cfg = {**RUN, "obs_groups": {"actor": ["critic"], "critic": ["critic"]}, "algorithm": dict(PPO)}
    trained = rsl_rl.OnPolicyRunner(
        PeerEnv(), cfg | {"actor": network(teacher, 5, normalized), "critic": critic}, device="cpu"
    )
    trained.logger.save_model = lambda *_: None
    trained.learn(1)
    trained.save(path)
    algorithm = {"class_name": "Distillation", "num_learning_epochs": 2, "gradient_length": 6, "learning_rate": 0.01}
    cfg |= {"student": network(student, 6, normalized), "teacher": network(teacher, 5, normalized)}
    cfg |= {"obs_groups": {"student": ["proprio", "command"], "teacher": ["critic"]}}
    cfg |= {"algorithm": algorithm | settings}
    env = PeerEnv()
    peer = rsl_rl.DistillationRunner(env, copy.deepcopy(cfg), log_dir=None, device="cpu")
    ours = OnPolicyRunner(PeerEnv(), copy.deepcopy(cfg), device="cpu", show_progress=False)
    for runner in (peer, ours):
        runner.load(path)
        runner.alg.train_mode()
    alg = ours.alg
    alg.on_record = alg.on_step = []
    theirs = import_state({**peer.alg.save(), "iter": 0})["model_state_dict"]
    ours.policy.load_state_dict({**ours.policy.state_dict(), **theirs})
    obs = env.get_observations()
    for iteration in range(1 if student else 2):  # later, rsl_rl begins with the memories that its update left
        with torch.inference_mode():
            for _ in range(cfg["num_steps_per_env"]):
                actions = peer.alg.act(obs)
                alg.act(take_groups(obs, ours.env.sets[0]), obs["critic"])
                alg.transition.actions = actions.clone()
                obs, rewards, dones, extras = env.step(actions)
                peer.alg.process_env_step(obs, rewards, dones, extras)
                alg.process_env_step(rewards, dones, dict(extras), take_groups(obs, ours.env.sets[0]), obs["critic"])
            alg.compute_returns(obs["critic"])
        close(alg.storage.data["action_labels"], peer.alg.storage.privileged_actions)
        expected = peer.alg.update()
        losses, _ = alg.update(iteration)
        close(torch.tensor(losses["distillation_loss"]), torch.tensor(expected["behavior"]))
        new = import_state({**peer.alg.save(), "iter": 0})["model_state_dict"]
        for name, value in new.items():
            close(ours.policy.state_dict()[name], value)
