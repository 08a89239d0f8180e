"""The time of one PPO iteration with an environment that costs nothing."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any, Literal, NamedTuple

import torch
from gymnasium import spaces
from torch import Tensor

from canter.envs.vec_env import StepRecord, VecEnv
from canter.runners.on_policy_runner import OnPolicyRunner

EPISODE_LENGTH = 1000
POOL_SIZE = 8


@dataclasses.dataclass
class Workload:
    """The sizes of one iteration; the defaults are those of a walking robot."""

    num_envs: int = 4096
    """Environments stepped together."""
    num_steps_per_env: int = 24
    """Steps of each environment between two updates."""
    num_obs: int = 48
    """Width of the actor's observation."""
    num_critic_obs: int = 235
    """Width of the critic's observation."""
    num_actions: int = 12
    """Width of the action."""
    hidden_dims: tuple[int, ...] = (512, 256, 128)
    """Widths of the hidden layers, of actor and critic alike."""
    num_learning_epochs: int = 5
    """Passes over each rollout."""
    num_mini_batches: int = 4
    """Minibatches per pass."""
    rnn_type: Literal["lstm", "gru"] | None = None
    """Memory of a recurrent policy; None for none."""
    rnn_hidden_size: int = 256
    """Width of the memory."""


class NullEnv(VecEnv):
    """The same few random observations in turn; episodes are cut off at 1000 steps, one environment after another."""

    gives_final_obs = False

    def __init__(self, work: Workload, device: torch.device | str) -> None:
        num_envs = self.num_envs = work.num_envs
        self.device = torch.device(device)
        self.max_episode_length = EPISODE_LENGTH
        self.obs_space, self.critic_obs_space = (spaces.Box(-9, 9, (n,)) for n in (work.num_obs, work.num_critic_obs))
        self.action_space = spaces.Box(-1, 1, (work.num_actions,))
        draw = torch.Generator(self.device).manual_seed(0)
        shapes = ((num_envs, work.num_obs), (num_envs, work.num_critic_obs), (num_envs,))
        self.pool = [[torch.randn(s, generator=draw, device=self.device) for s in shapes] for _ in range(POOL_SIZE)]
        age = torch.arange(num_envs, device=self.device) % EPISODE_LENGTH
        self.truncated = [age == t for t in range(EPISODE_LENGTH)]
        self.no = torch.zeros(num_envs, dtype=torch.bool, device=self.device)
        self.yes = torch.ones_like(self.no)
        self.episode_length_buf = age
        self.t = 0

    def seed(self, seed: int) -> None:
        """Do nothing: the steps are always the same."""

    def reset(self) -> tuple[Tensor, Tensor]:
        """The current observation: there is nothing to start anew."""
        return self.get_observations()

    def get_observations(self) -> tuple[Tensor, Tensor]:
        """The current observation and the critic's."""
        obs, critic_obs, _ = self.pool[self.t % POOL_SIZE]
        return obs, critic_obs

    def step(self, actions: Tensor) -> StepRecord:
        """The next of the prepared steps, whatever the actions."""
        self.t += 1
        obs, critic_obs, reward = self.pool[self.t % POOL_SIZE]
        cut = self.truncated[self.t % EPISODE_LENGTH]
        return StepRecord(obs, critic_obs, reward, self.no, cut, None, None, self.yes, {})


def null_runner(env: VecEnv, work: Workload, execution: str = "auto", precision: str = "tf32") -> OnPolicyRunner:
    """PPO with an adaptive schedule, set up as robots are trained, that writes nothing."""
    policy: dict[str, Any] = {"class_name": "ActorCritic"}
    policy |= {"actor_hidden_dims": list(work.hidden_dims), "critic_hidden_dims": list(work.hidden_dims)}
    if work.rnn_type is not None:
        policy["class_name"] = "ActorCriticRecurrent"
        policy |= {"rnn_type": work.rnn_type, "rnn_hidden_size": work.rnn_hidden_size}
    algorithm = {
        "num_learning_epochs": work.num_learning_epochs,
        "num_mini_batches": work.num_mini_batches,
        "gamma": 0.99,
        "entropy_coef": 0.01,
        "schedule": "adaptive",
        "empirical_normalization": True,
        "execution": execution,
        "precision": precision,
        "timeout_bootstrap": "current_value",
    }
    cfg = {"num_steps_per_env": work.num_steps_per_env, "algorithm": algorithm, "policy": policy}
    return OnPolicyRunner(env, {**cfg, "log_interval": 0, "seed": 1}, None, env.device, show_progress=False)


class Timing(NamedTuple):
    """What was measured: milliseconds of collecting and of learning, and seconds until both were warm."""

    collect: float
    learn: float
    ready: float
    num_steps: int
    """Environment steps of one iteration."""
    memory: float = float("nan")
    """Peak GiB, where it was measured."""

    @property
    def iteration(self) -> float:
        """Milliseconds of one whole iteration."""
        return self.collect + self.learn

    @property
    def rate(self) -> float:
        """Environment steps per second."""
        return self.num_steps / self.iteration * 1e3


def time_iterations(runner: OnPolicyRunner, warm_up: int = 8, iterations: int = 20) -> Timing:
    """Medians over `iterations`, after a `warm_up` in which kernels are compiled and captured."""
    begin = time.perf_counter()
    runner.learn(warm_up)
    wait_for(runner.device)
    ready = time.perf_counter() - begin
    for event in ("post_rollout", "post_update"):
        runner.add_callback(event, lambda runner, stats: wait_for(runner.device))
    runner.log_interval = 1
    history = runner.learn(iterations).history
    collect, learn = (
        statistics.median(metrics[name] for metrics in history) * 1e3 for name in ("time/collection", "time/learning")
    )
    return Timing(collect, learn, ready, runner.steps_per_iteration())


def wait_for(device: torch.device) -> None:
    """Let a GPU finish what it was given, so that a clock read next is right."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
