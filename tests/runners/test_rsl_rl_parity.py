"""The same weights and the same steps give the numbers of the real rsl_rl: values, returns, losses, new weights."""

import copy
import importlib.metadata
import math
import sys
from pathlib import Path

import pytest
import torch

from canter.algorithms.foreign import import_state
from canter.runners import OnPolicyRunner

pytest.importorskip("tensordict")
sys.path.insert(0, str(Path(__file__).parent / "rsl_rl"))
from peer import PeerEnv, model_cfg

NEEDED = "compares with the real rsl_rl: pip install 'rsl-rl-lib>=5.5'"
CASES = {
    "mlp": (model_cfg(normalized=(True, True)), {"schedule": "adaptive", "desired_kl": 1e-4}),
    "one_normaliser": (model_cfg(normalized=(False, True)), {"normalize_advantage_per_mini_batch": True}),
    "tight_clip": (model_cfg(), {"max_grad_norm": 0.05, "use_clipped_value_loss": False, "value_loss_coef": 3.0}),
    "lstm": (model_cfg("lstm", (True, False)), {}),
    "gru": (model_cfg("gru"), {"optimizer": "adamw", "max_grad_norm": 0.1}),
    "state_dependent": (model_cfg(distribution={"class_name": "HeteroscedasticGaussianDistribution"}), {}),
    "beta": (model_cfg(distribution={"class_name": "BetaDistribution", "action_range": [-2.0, 1.0]}), {}),
}


def close(ours, theirs, atol=2e-5):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=atol)


def both(cfg, tmp_path):
    """rsl_rl's runner and ours with its weights."""
    rsl_rl = pytest.importorskip("rsl_rl.runners", reason=NEEDED)
    if tuple(map(int, importlib.metadata.version("rsl-rl-lib").split(".")[:2])) < (5, 5):
        pytest.skip(NEEDED)  # before, normalisers took every step into account at once, not at the end of an update
    torch.manual_seed(3)
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
    cfg["algorithm"] |= {"num_learning_epochs": 3, "num_mini_batches": 1, **settings}
    env, peer, ours = both(cfg, tmp_path)
    alg, distribution = ours.alg, ours.policy.distribution
    obs = env.get_observations()
    for iteration in range(2):
        with torch.inference_mode():
            for _ in range(cfg["num_steps_per_env"]):
                actions = peer.alg.act(obs)
                theirs = peer.alg.transition
                alg.act(ours.env.actor_obs(obs), obs["critic"])
                step = alg.transition
                close(step.values, theirs.values)
                # A share of the range is what our Beta distribution is about.
                chosen = (actions + 2.0) / 3.0 if case == "beta" else actions
                step.actions = chosen.clone()
                step.actions_log_prob = distribution.log_prob(step.params, step.actions)
                close(step.actions_log_prob, theirs.actions_log_prob.squeeze(-1))
                obs, rewards, dones, extras = env.step(actions)
                peer.alg.process_env_step(obs, rewards.clone(), dones, extras)
                alg.process_env_step(rewards, dones, dict(extras), ours.env.actor_obs(obs), obs["critic"])
            peer.alg.compute_returns(obs)
            alg.compute_returns(obs["critic"])
        close(alg.storage.data["rewards"].squeeze(-1), peer.alg.storage.rewards.squeeze(-1))
        close(alg.storage.data["returns"].squeeze(-1), peer.alg.storage.returns.squeeze(-1))
        close(alg.storage.data["advantages"].squeeze(-1), peer.alg.storage.advantages.squeeze(-1))
        expected = peer.alg.update()
        losses, _ = alg.update(iteration)
        close(torch.tensor(losses["value_loss"]), torch.tensor(expected["value"]))
        close(torch.tensor(losses["surrogate_loss"]), torch.tensor(expected["surrogate"]))
        offset = 2 * math.log(3.0) if case == "beta" else 0.0  # rsl_rl leaves out the logarithm of the range
        close(torch.tensor(-losses["entropy"]), torch.tensor(expected["entropy"] + offset))
        assert alg.learning_rate == pytest.approx(peer.alg.learning_rate)
        new = import_state({**peer.alg.save(), "iter": 0})["model_state_dict"]
        for name, value in ours.policy.state_dict().items():
            close(value, new[name])
