"""Every setting of off-policy runs, DQN, SAC and TD3, declared once."""

from __future__ import annotations

import math

from canter.algorithms.ppo import CommonRunSettings
from canter.utils.config import settings


@settings
class OffPolicyRunSettings(CommonRunSettings):
    """How an off-policy run is made; its intervals are environment steps."""

    max_timesteps: int | None = None
    """Length of the run where `learn` is not told another; linear schedules end here."""
    log_interval: int = 1_000
    """Environment steps between two log entries."""
    save_interval: int = 10_000
    """Environment steps between two checkpoints; 0 saves only at the end."""
    eval_interval: int | None = None
    """Environment steps between two evaluations; None evaluates only on request."""
    offline_data: str | None = None
    """Steps to begin with: a directory of trajectory files, or "minari:<dataset id>"."""
    offline_gradient_steps: int = 0
    """Gradient steps on that data before the first step of the environment."""


@settings
class OffPolicySettings:
    """What every off-policy algorithm can be told."""

    gamma: float = 0.99
    """Discount."""
    batch_size: int = 256
    """Steps in one gradient step."""
    buffer_size: int = 1_000_000
    """Steps of all environments together that are kept."""
    buffer_steps_per_env: int | None = None
    """Steps of each environment that are kept, instead of `buffer_size`."""
    learning_starts: int = 5_000
    """Environment steps, taken at random, before learning starts."""
    train_freq: int = 1
    """Vector steps between two updates."""
    gradient_steps: int = 1
    """Gradient steps per update; -1 for as many as there were environment steps since the last."""
    target_update_interval: int = 1
    """Gradient steps between two updates of the target networks."""
    tau: float = 0.005
    """Fraction of the way that target networks move towards the learned ones; 1 copies."""
    n_step: int = 1
    """Rewards summed before a value is asked for; windows end with episodes."""
    max_grad_norm: float | None = 10.0
    """Gradients are scaled down to this global norm; 0 or None leaves them."""
    optimizer_class_name: str = "Adam"
    """Any optimizer of torch.optim."""
    weight_decay: float = 0.0
    """Decay of the weights in every step; with AdamW apart from the gradient."""
    schedule: str = "fixed"
    """Learning rates: "fixed" (or "constant"), or "linear" to 0."""
    activation: str = "relu"
    """Nonlinearity of the networks."""
    layer_norm: bool = False
    """Normalise the features of every hidden layer."""
    empirical_normalization: bool = False
    """Normalise observations by running statistics, kept in the policy; the replay keeps them raw."""
    save_replay_buffer: bool = False
    """Put the replay buffer into checkpoints, so that a resumed run goes on exactly."""
    execution: str = "auto"
    """How hot functions run: "eager", "graph" (CUDA graphs), "compile" (compiled inside them), "auto": the fastest."""
    precision: str = "tf32"
    """Of matrix products on a GPU: "tf32", "fp32" or "bf16"; weights, log-probabilities and losses stay float32."""


@settings
class DQNSettings(OffPolicySettings):
    """What DQN can be told."""

    learning_rate: float = 1e-3
    """Step size."""
    batch_size: int = 128
    buffer_size: int = 100_000
    learning_starts: int = 1_000
    target_update_interval: int = 250
    tau: float = 1.0
    double_dqn: bool = True
    """Let the learned network choose the action whose target value is taken (van Hasselt et al. 2016)."""
    dueling: bool = False
    """Split values into a level and advantages (Wang et al. 2016)."""
    epsilon_start: float = 1.0
    """Probability of a random action at first."""
    epsilon_end: float = 0.05
    """Probability of a random action from `epsilon_decay_steps` on."""
    epsilon_decay_steps: int = 10_000
    """Environment steps over which the probability falls linearly."""
    prioritized_replay: bool = False
    """Draw steps by how wrong their value was (Schaul et al. 2016)."""
    priority_exponent: float = 0.6
    """How much priorities count: 0 draws uniformly."""
    importance_exponent: float = 0.4
    """How much of the bias that priorities bring is corrected at first; it grows to 1 over the run."""
    network_hidden_dims: tuple[int, ...] = (256, 256)
    """Widths of the hidden layers."""


@settings
class ActorQSettings(OffPolicySettings):
    """What algorithms with an actor and twin critics can be told."""

    actor_learning_rate: float = 3e-4
    """Step size of the actor."""
    critic_learning_rate: float = 3e-4
    """Step size of the critics."""
    actor_hidden_dims: tuple[int, ...] = (256, 256)
    """Widths of the actor's hidden layers."""
    critic_hidden_dims: tuple[int, ...] = (256, 256)
    """Widths of the critics' hidden layers."""
    policy_delay: int = 1
    """Gradient steps of the critics per one of the actor."""
    critic_reduction: str = "min"
    """What two critics say together: "min" against overestimation, or "mean", where each learns from itself."""
    num_atoms: int = 1
    """Critics predict a distribution over so many returns (Bellemare et al. 2017); 1 predicts the mean alone."""
    v_min: float = -20.0
    """Lowest return that the distribution knows."""
    v_max: float = 20.0
    """Highest return that the distribution knows."""
    normalize_rewards: bool = False
    """Divide rewards, as they are sampled, so that returns fit between `v_min` and `v_max`, or vary by 1 if scalar."""
    action_low: float | tuple[float, ...] | None = None
    """Lower bound of the actions, where the environment's is none or far off: see `joint_limit_bounds`."""
    action_high: float | tuple[float, ...] | None = None
    """Upper bound of the actions."""


@settings
class SACSettings(ActorQSettings):
    """What SAC can be told."""

    alpha_learning_rate: float = 3e-4
    """Step size of the temperature."""
    auto_alpha: bool = True
    """Learn the temperature, so that the entropy stays near `target_entropy`."""
    init_alpha: float = 0.2
    """Temperature at first, or always if `auto_alpha` is off."""
    target_entropy: float | None = None
    """Entropy aimed at in nats; None aims at -1 per action, measured in units of half the action's range."""
    use_tanh_squash: bool = True
    """Press actions into their bounds; without it the environment has to."""
    min_log_std: float = -20.0
    """Least logarithm of the noise before squashing."""
    max_log_std: float = 2.0
    """Greatest logarithm of the noise before squashing."""
    init_std: float = 1.0
    """Noise before squashing at first."""


@settings
class TD3Settings(ActorQSettings):
    """What TD3 can be told."""

    policy_delay: int = 2
    exploration_noise: float = 0.1
    """Standard deviation of the noise on actions, in units of half their range."""
    exploration_noise_max: float | None = None
    """Spread the noise evenly over the environments, from `exploration_noise` to this."""
    target_noise: float = 0.2
    """Standard deviation of the noise on the target's actions."""
    target_noise_clip: float = 0.5
    """Bound of the noise on the target's actions."""


@settings
class DQNConfig(DQNSettings, OffPolicyRunSettings):
    """A whole DQN run in one object."""


@settings
class SACConfig(SACSettings, OffPolicyRunSettings):
    """A whole SAC run in one object."""


@settings
class TD3Config(TD3Settings, OffPolicyRunSettings):
    """A whole TD3 run in one object."""


RANGES: dict[str, tuple[float, float]] = {
    "gamma": (0.0, 1.0), "batch_size": (1, math.inf), "buffer_size": (1, math.inf), "learning_starts": (0, math.inf),
    "buffer_steps_per_env": (1, math.inf), "train_freq": (1, math.inf), "gradient_steps": (-1, math.inf),
    "target_update_interval": (1, math.inf), "tau": (0.0, 1.0), "n_step": (1, math.inf), "policy_delay": (1, math.inf),
    "max_grad_norm": (0.0, math.inf), "learning_rate": (0.0, math.inf), "actor_learning_rate": (0.0, math.inf),
    "critic_learning_rate": (0.0, math.inf), "alpha_learning_rate": (0.0, math.inf), "num_atoms": (1, math.inf),
    "epsilon_start": (0.0, 1.0), "epsilon_end": (0.0, 1.0), "epsilon_decay_steps": (0, math.inf),
    "priority_exponent": (0.0, math.inf), "importance_exponent": (0.0, 1.0), "init_alpha": (1e-12, math.inf),
    "exploration_noise": (0.0, math.inf), "target_noise": (0.0, math.inf), "init_std": (1e-12, math.inf),
}  # fmt: skip
CHOICES = {"schedule": ("fixed", "constant", "linear"), "critic_reduction": ("min", "mean")}


def check_off_policy(given: OffPolicySettings) -> None:
    """Refuse values with which nothing can be learned, NaN among them."""
    for name, (low, high) in RANGES.items():
        value = getattr(given, name, None)
        if value is not None and not low <= value <= high:
            wanted = f"from {low:g} to {high:g}" if high < math.inf else f"of at least {low:g}"
            raise ValueError(f"{name} must be a number {wanted}, got {value!r}")
    for name, known in CHOICES.items():
        value = getattr(given, name, known[0])
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    if getattr(given, "num_atoms", 1) > 1 and not given.v_min < given.v_max:  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError(f"v_min must be below v_max, got {given.v_min} and {given.v_max}")  # pyright: ignore[reportAttributeAccessIssue]
