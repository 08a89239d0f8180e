"""Whether the code of a policy, an extension or a teacher can be replayed, found out before a run."""

import copy
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

from canter.algorithms import PPO
from canter.envs.dummy import DummyVecEnv
from canter.execution.executor import Executor
from canter.modules.policy import Policy
from canter.runners.on_policy_runner import OnPolicyRunner
from canter.runners.runner import Runner

NUM_ITERATIONS = 9  # in each, functions are compared with their replays
NUM_STEPS = 1000  # of an off-policy algorithm, after those with random actions
DESCRIPTIONS = {
    "act": "choose actions",
    "store": "store a step",
    "scale": "scale rewards",
    "finish": "compute the rewards to learn from",
    "rollout": "choose actions, step and store, for a whole rollout",
    "returns": "compute returns and advantages",
    "learn": "take gradient steps",
    "explore": "choose actions",
    "insert": "store a step in the replay buffer",
}


class FunctionReport(NamedTuple):
    """How one function of an algorithm runs."""

    name: str
    how: str
    """"recorded", "captured" or "eager"."""
    reason: str
    """Why it runs eagerly or was recorded anew, with the file and line; "" if neither."""


class PolicyReport(NamedTuple):
    """How the functions of an algorithm run with the user's code in them."""

    functions: tuple[FunctionReport, ...]

    @property
    def ok(self) -> bool:
        """Whether every function is replayed."""
        return all(function.how != "eager" for function in self.functions)

    def __str__(self) -> str:
        lines = [f"  {'function':<10}{'runs':<10}does"]
        for function in self.functions:
            lines.append(f"  {function.name:<10}{function.how:<10}{DESCRIPTIONS.get(function.name, '')}")
            lines += [f"  {'':<10}{'because ' * (function.how == 'eager')}{function.reason}"] if function.reason else []
        end = "Every function is replayed." if self.ok else "Functions that run eagerly give the same results, slower."
        return "\n".join([*lines, "", f"  {end}"])


def check_policy(subject: Policy | Runner, **settings: Any) -> PolicyReport:
    """Train for a few iterations and report which functions are replayed, and why others run eagerly.

    Args:
        subject: A policy for flat observations, of which a copy is trained with PPO on random numbers; or a runner made
            for this check, with the environment, the algorithm, the extensions and the teacher of the run.
        **settings: Settings of PPO for a policy, such as `extensions`.
    """
    if isinstance(subject, Policy):
        subject = runner_of(subject, settings)
    elif settings:
        raise ValueError(f"a runner has its settings; leave out {', '.join(settings)}")
    executor = subject.alg.executor
    if not executor.replays:
        raise ValueError(f"execution={executor.execution!r} runs every function eagerly; check with 'auto'")
    subject.show_progress = False
    length = {} if isinstance(subject, OnPolicyRunner) else {"total_timesteps": subject.alg.learning_starts + NUM_STEPS}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'.*' cannot be")  # the report says it
        subject.learn(**(length or {"num_learning_iterations": NUM_ITERATIONS}))
    how = "recorded" if executor.records else "captured"
    replayed = {signature[0] for signature in executor.graphs} - executor.eager_only.keys()
    found = [FunctionReport(name, how, renewals(executor, name)) for name in replayed]
    found += [FunctionReport(name, "eager", reason) for name, reason in executor.eager_only.items()]
    order = list(DESCRIPTIONS)
    return PolicyReport(tuple(sorted(found, key=lambda f: order.index(f.name) if f.name in order else len(order))))


def renewals(executor: Executor, name: str) -> str:
    """Why a function was recorded more than once; "" if it was not."""
    count = executor.recordings[name]
    return f"recorded {count} times, because {executor.reasons[name]}" if name in executor.reasons else ""


def runner_of(policy: Policy, settings: Mapping[str, Any]) -> OnPolicyRunner:
    """A runner that trains a copy of a policy on random numbers."""
    if not hasattr(policy, "obs_layout"):
        raise ValueError(
            f"{type(policy).__name__} takes observations of any structure; give a runner with its environment"
        )
    env = DummyVecEnv(8, policy.obs_layout.width, 1, "cpu", 20, policy.critic_obs_layout.width)
    action_space: Any = policy.action_space
    env.action_space = action_space
    policy = copy.deepcopy(policy)
    policy.to("cpu")
    given = {"num_learning_epochs": 2, "num_mini_batches": 2, "schedule": "adaptive", **settings}
    return OnPolicyRunner(env, agent=PPO(policy, env=env, **given), show_progress=False)
