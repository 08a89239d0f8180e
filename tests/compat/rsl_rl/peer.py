"""An environment with the interfaces of rsl_rl 2.x, 3.x and 5.x, and training dicts for its real runners."""

import torch
from tensordict import TensorDict

WIDTHS = {"proprio": 3, "command": 2, "critic": 4}


class PeerEnv:
    """Random observation groups; an action changes the reward only. `style` is rsl_rl's major version."""

    num_envs, num_actions, device, max_episode_length = 4, 2, "cpu", 20
    step_dt, cfg = 0.02, {}

    def __init__(self, style=5, seed=0):
        self.style, self.generator = style, torch.Generator().manual_seed(seed)
        self.episode_length_buf = torch.zeros(self.num_envs, dtype=torch.long)
        self.taken = []
        self.unwrapped = self
        self.draw()

    def draw(self):
        rows = {name: torch.randn(self.num_envs, n, generator=self.generator) * 2 + 1 for name, n in WIDTHS.items()}
        self.groups = TensorDict(rows, batch_size=[self.num_envs])

    def get_observations(self):
        if self.style > 2:
            return self.groups
        both = torch.cat([self.groups["proprio"], self.groups["command"]], 1)
        return both, {"observations": {"critic": self.groups["critic"]}}

    def reset(self):
        return self.get_observations() if self.style == 2 else (self.get_observations(), {})

    def step(self, actions):
        self.taken.append(actions.clone())
        self.draw()
        reward = -actions.square().sum(1) + torch.randn(self.num_envs, generator=self.generator)
        dones = (torch.rand(self.num_envs, generator=self.generator) < 0.2).long()
        extras = {"time_outs": dones * (torch.rand(self.num_envs, generator=self.generator) < 0.5)}
        if self.style > 2:
            return self.groups, reward, dones, extras
        obs, more = self.get_observations()
        return obs, reward, dones, {**extras, **more}


PPO = {
    "class_name": "PPO",
    "num_learning_epochs": 2,
    "num_mini_batches": 2,
    "learning_rate": 0.01,
    "schedule": "fixed",
    "gamma": 0.99,
    "lam": 0.95,
    "entropy_coef": 0.01,
    "desired_kl": 0.01,
    "max_grad_norm": 1.0,
    "value_loss_coef": 1.0,
    "use_clipped_value_loss": True,
    "clip_param": 0.2,
}
RUN = {"num_steps_per_env": 6, "save_interval": 50, "max_iterations": 2, "experiment_name": "peer"}


def policy_cfg(style, rnn=None, normalized=False, **more):
    """A training dict of rsl_rl 2.x or 3.x."""
    policy = {"class_name": "ActorCriticRecurrent" if rnn else "ActorCritic", "init_noise_std": 0.8}
    policy |= {"actor_hidden_dims": [6], "critic_hidden_dims": [5], "activation": "elu"}
    if rnn:
        policy |= {"rnn_type": rnn, "rnn_hidden_dim": 4, "rnn_num_layers": 1}
    cfg = {**RUN, "policy": policy, "algorithm": dict(PPO)}
    if style == 2:
        cfg["empirical_normalization"] = normalized
    else:
        policy |= {"actor_obs_normalization": normalized, "critic_obs_normalization": normalized}
        cfg["obs_groups"] = {"policy": ["proprio", "command"], "critic": ["critic"]}
    policy |= more
    return cfg


def model_cfg(rnn=None, normalized=(False, False), distribution=None):
    """A training dict of rsl_rl 5.x."""
    memory = {"rnn_type": rnn, "rnn_hidden_dim": 4, "rnn_num_layers": 1} if rnn else {}
    common = {"class_name": "RNNModel" if rnn else "MLPModel", "activation": "elu", **memory}
    distribution = distribution or {"class_name": "GaussianDistribution", "init_std": 0.8, "std_type": "log"}
    actor = {**common, "hidden_dims": [6], "obs_normalization": normalized[0], "distribution_cfg": distribution}
    critic = {**common, "hidden_dims": [5], "obs_normalization": normalized[1]}
    sets = {"actor": ["proprio", "command"], "critic": ["critic"]}
    return {**RUN, "obs_groups": sets, "actor": actor, "critic": critic, "algorithm": {**PPO, "optimizer": "adam"}}
