"""Everyday user code, each piece a complete small training run: `execution="auto"` must train exactly as "eager" does.

An idiom is a class: a policy (`Net`), a teacher (`TeacherNet`), an extension (`Ext`), an algorithm (`Alg`), a Q-network
(`QNet`), an actor of SAC (`Actor`), or a script around plain PPO (`Script`). Its method `callback(runner, i)` runs
before every iteration i.

"expected" says how its functions run where they can be recorded or captured:

- "recorded": replayed, without a message.
- "eager": not replayed; one message for each function names the function, and a line of the idiom's class.
- "either": replayed, or eager with that message.
"""

import ast
import copy
import datetime
import functools
import itertools
import os
import random
import re
import tempfile
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import idiom_settings
import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from canter.algorithms import DQN, PPO, SAC, DQNConfig, Extension, PPOConfig, SACConfig
from canter.algorithms.optim import GuardedOptimizer
from canter.algorithms.teacher import Teacher
from canter.envs.torch_envs.base import TorchEnv
from canter.modules import ActorCritic, ActorCriticRecurrent
from canter.modules.actors import MLPSquashedGaussianActor
from canter.modules.mlp import mlp
from canter.modules.q_networks import MLPQNetwork
from canter.runners import OffPolicyRunner, OnPolicyRunner
from canter.storage import Field
from canter.utils.config import settings

NUM_ENVS, NUM_STEPS, NUM_ITERATIONS, WIDTH = 4, 8, 7, 4
NUM_VECTOR_STEPS = 48  # of off-policy idioms; they learn from the 8th on
FILE = __file__
SMALL = {"actor_hidden_dims": [8], "critic_hidden_dims": [8]}


class Walk(TorchEnv):
    """A noisy walk in four dimensions with short episodes; at step `spike_at` one coordinate is 200 for a moment."""

    obs_space = critic_obs_space = spaces.Box(-np.inf, np.inf, (WIDTH,))
    action_space: Any = spaces.Box(-1.0, 1.0, (2,))
    max_episode_length = 11
    kept_on_reset = ("clock",)
    spike_at = -1

    def initial_state(self, n):
        return {"x": self.normal(n, WIDTH), "clock": torch.zeros(n, 1, device=self.device)}

    def push(self, action):
        """(N, 2) change of the first two coordinates."""
        return action

    def dynamics(self, state, action):
        pushed = F.pad(0.3 * self.push(action).float().clamp(-1, 1), (0, WIDTH - 2))
        x = 0.7 * state["x"] + pushed + self.normal(self.num_envs, WIDTH)
        reward = -x.square().sum(-1) - 0.1 * action.float().reshape(self.num_envs, -1).square().sum(-1)
        return {"x": x, "clock": state["clock"] + 1}, reward, x[:, 0] > 2.5

    def observe(self, state):
        is_spike = (state["clock"] == self.spike_at) & (torch.arange(WIDTH, device=self.device) == 3)
        return torch.where(is_spike, 200.0, state["x"])


class Choices(Walk):
    """The same with three actions."""

    action_space = spaces.Discrete(3)

    def push(self, action):
        return torch.stack([action - 1.0, 1.0 - action], -1)


# Training: one run, and everything of it that can be compared.
class Run(NamedTuple):
    """What a run computed and said."""

    runner: Any
    tensors: dict[str, torch.Tensor]
    metrics: list[dict[str, str]]
    attributes: list[dict[str, Any]]
    messages: list[str]


class Idiom(NamedTuple):
    """A piece of user code: `build(execution, device)` gives a runner and the user's object."""

    name: str
    build: Callable[[str, str], tuple[Any, Any]]
    expected: str
    expected_on_gpu: str
    lines: Collection[int]

    def run(self, execution: str, device: str = "cpu") -> Run:
        """Train once."""
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(0)
        tensors, metrics, attributes = {}, [], []

        def after_rollout(runner, _):
            if isinstance(runner, OnPolicyRunner):
                tensors.update(all_tensors(f"rollout {runner.iteration}", runner.alg.storage.data))

        def after_iteration(runner, found):
            metrics.append({k: repr(v) for k, v in found.items() if not k.startswith(("time/", "perf/"))})
            attributes.append(plain_attributes(user))

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            runner, user = self.build(execution, device)
            if hasattr(user, "callback"):
                runner.add_callback("pre_rollout", lambda runner: user.callback(runner, runner.iteration))
            runner.add_callback("post_rollout", after_rollout)
            runner.add_callback("post_iteration", after_iteration)
            is_on_policy = isinstance(runner, OnPolicyRunner)
            runner.learn(num_learning_iterations=NUM_ITERATIONS if is_on_policy else NUM_VECTOR_STEPS)
        tensors |= all_tensors("", {name: part.state_dict() for name, part in runner.alg.checkpoint_parts().items()})
        if not is_on_policy:
            tensors |= all_tensors("replay", runner.alg.replay.state_dict())
        return Run(runner, tensors, metrics, attributes, [str(w.message) for w in caught])


def all_tensors(path: str, state: Any) -> dict[str, torch.Tensor]:
    """Copies of the tensors in nested dicts and lists, by path."""
    if torch.is_tensor(state):
        return {path: state.detach().clone()}
    parts = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list | tuple) else ()
    return {name: value for key, part in parts for name, value in all_tensors(f"{path} {key}", part).items()}


def plain_attributes(user: Any) -> dict[str, Any]:
    """Numbers, strings, dicts of numbers, and lengths of lists among the attributes of the user's object."""
    state = {}
    for name, value in vars(user).items():
        if name.startswith("_"):
            continue
        if isinstance(value, int | float | str):
            state[name] = value
        elif isinstance(value, list | deque):
            state[name] = len(value)
        elif isinstance(value, dict) and all(isinstance(v, int | float) for v in value.values()):
            state[name] = dict(value)
    return state


def assert_same(auto: Run, eager: Run) -> None:
    """Every number of both runs is the same, bit by bit."""
    assert auto.tensors.keys() == eager.tensors.keys()
    for name, wanted in eager.tensors.items():
        got = auto.tensors[name]
        if not torch.equal(got.nan_to_num(12.5), wanted.nan_to_num(12.5)):
            raise AssertionError(f"{name.strip()} differs by {(got.double() - wanted.double()).abs().max()}")
    assert auto.metrics == eager.metrics, "metrics differ"
    assert auto.attributes == eager.attributes, "attributes differ"


def check_messages(messages: Sequence[str], eager_only: set[str], file: str, lines: Collection[int]) -> None:
    """One message for each function that runs eagerly, with its name, and the file and a line of the idiom."""
    found = [message for message in messages if "eager" in message]
    for name in eager_only:
        own = [message for message in found if repr(name) in message]
        assert len(own) == 1, f"{len(own)} messages about {name!r}: {found}"
        named = [int(number) for number in re.findall(rf"{re.escape(file)}:(\d+)", own[0])]
        assert any(number in lines for number in named), f"no line of the idiom in: {own[0]}"
    assert len(found) == len(eager_only), f"messages {found}, but eager are {eager_only}"


def check_executor(executor: Any, expected: str, functions: set[str]) -> None:
    """Functions run as expected; `functions` are replayed where nothing runs eagerly."""
    replayed = {signature[0] for signature in executor.graphs}
    if expected == "recorded":
        assert not executor.eager_only, f"eager: {executor.eager_only}"
        assert functions <= replayed, f"replayed: {replayed}"
    if expected == "eager":
        assert executor.eager_only, f"replayed: {replayed}"


def check_idiom(idiom: Idiom, execution: str, device: str, expected: str, on_policy: set[str]) -> None:
    """An idiom trains as it does eagerly, and runs as expected."""
    run = idiom.run(execution, device)
    assert_same(run, idiom.run("eager", device))
    executor = run.runner.alg.executor
    check_messages(run.messages, executor.eager_only, FILE, idiom.lines)
    is_on_policy = isinstance(run.runner, OnPolicyRunner)
    check_executor(executor, expected, on_policy if is_on_policy else {"explore", "insert", "learn"})


IDIOMS: list[Idiom] = []
# Lines of every class with its decorators; inspect would parse this file once for each.
CLASS_LINES = {
    node.name: range(min(part.lineno for part in (node, *node.decorator_list)), (node.end_lineno or node.lineno) + 1)
    for node in ast.parse(Path(__file__).read_text(encoding="utf-8")).body
    if isinstance(node, ast.ClassDef)
}


def idiom(expected: str, on_gpu: str | None = None, **options: Any) -> Callable[[type], type]:
    """Add a class to the table; `options` are settings of its algorithm."""

    def add(cls: type) -> type:
        lines = {line for base in cls.__mro__ if base.__module__ == __name__ for line in CLASS_LINES[base.__name__]}
        build = functools.partial(build_run, cls, options)
        IDIOMS.append(Idiom(cls.__name__, build, expected, on_gpu or expected, lines))
        return cls

    return add


def build_run(cls: Any, options: dict[str, Any], execution: str, device: str) -> tuple[Any, Any]:
    """A runner with the user's code, and the object that holds the code."""
    options = {"execution": execution, "precision": "fp32", "save_interval": 0, **options}
    if issubclass(cls, QNet | Actor):
        return build_off_policy(cls, options, device)
    cfg = PPOConfig(
        **{
            "num_learning_epochs": 2,
            "num_mini_batches": 2,
            "learning_rate": 3e-3,
            "empirical_normalization": True,
            "normalize_rewards": True,
            "entropy_coef": 0.01,
            "num_steps_per_env": NUM_STEPS,
            "log_interval": 1,
            **options,
        }
    )
    policy, extensions, alg_class, user = Net(), [], PPO, None
    if issubclass(cls, Alg):
        alg_class = cls
    elif issubclass(cls, Ext):
        extensions = [user := cls()]
    elif issubclass(cls, TeacherNet):
        extensions = [Teacher(policies=[user := cls().to(device)], teacher_act_prob=0.3)]
    elif issubclass(cls, Script):
        user = cls()
    else:
        policy = user = cls()
    alg = alg_class(policy, cfg=cfg, device=device, seed=3, extensions=extensions)
    env = getattr(cls, "env_class", Walk)(NUM_ENVS, device, seed=1)
    return OnPolicyRunner(env, agent=alg, show_progress=False), alg if user is None else user


def build_off_policy(cls: Any, options: dict[str, Any], device: str) -> tuple[Any, Any]:
    """A runner of DQN with a Q-network, or of SAC with an actor; and that network."""
    options |= {"learning_starts": 8 * NUM_ENVS, "batch_size": 8, "buffer_size": 400, "log_interval": 8 * NUM_ENVS}
    options |= {"gradient_steps": 2, "target_update_interval": 2}
    if issubclass(cls, QNet):
        env, cfg = Choices(NUM_ENVS, device, seed=1), DQNConfig(network_hidden_dims=(8,), **options)
        alg: Any = DQN(env, cfg, device=device, seed=3, q_network_class=cls)
        return OffPolicyRunner(env, agent=alg, show_progress=False), alg.q_network
    env, cfg = Walk(NUM_ENVS, device, seed=1), SACConfig(actor_hidden_dims=(8,), critic_hidden_dims=(8,), **options)
    alg = SAC(env, cfg, device=device, seed=3, actor_class=cls)
    return OffPolicyRunner(env, agent=alg, show_progress=False), alg.actor


class Net(ActorCritic):
    """Base of policies; `parts` builds what a subclass needs."""

    def __init__(self):
        super().__init__(WIDTH, 2, init_noise_std=0.5, **SMALL)
        self.parts()

    def parts(self):
        pass


class TeacherNet(Net):
    """Base of teachers that label the actions of a plain policy."""


class RecurrentNet(ActorCriticRecurrent):
    """Base of recurrent policies."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH, 2, rnn_type="gru", rnn_hidden_size=4, **SMALL)


class Ext(Extension):
    """Base of extensions, with a loss "mine"; `parts` builds what a subclass needs."""

    name = "mine"

    def attach(self, alg):
        super().attach(alg)
        alg.loss_weights["mine"] = 0.1
        self.parts(alg)

    def parts(self, alg):
        pass


class Alg(PPO):
    """Base of algorithms."""


class QNet(MLPQNetwork):
    """Base of Q-networks."""

    def __init__(self, obs_space, action_space, cfg=None):
        super().__init__(obs_space, action_space, cfg)
        self.parts()

    def parts(self):
        pass


class Actor(MLPSquashedGaussianActor):
    """Base of SAC's actors."""


class Script:
    """Base of scripts around plain PPO: only callbacks."""


# Values of tensors read by Python.
@idiom("eager")
class BranchOnMeanObservation(Net):
    def actor_features(self, obs, ctx):
        if obs[..., 0].mean() > 0:
            obs = obs * 1.5
        return obs


@idiom("eager")
class BranchInTheCritic(Net):
    def critic_features(self, obs, ctx):
        return -obs if obs.sum() < 0 else obs


@idiom("eager")
class GuardAgainstSpikes(Net):
    class env_class(Walk):
        spike_at = 5 * NUM_STEPS + 3

    def head_params(self, features, obs, ctx):
        if (features.abs() > 10).any():
            features = features.clamp(-1.0, 1.0)
        return super().head_params(features, obs, ctx)


@idiom("eager")
class AssertFinite(Net):
    def actor_features(self, obs, ctx):
        assert torch.isfinite(obs).all(), "not finite"
        return obs


@idiom("eager")
class TeacherThroughNumpy(TeacherNet):
    def actor_features(self, obs, ctx):
        return torch.from_numpy(np.tanh(obs.cpu().numpy())).to(obs.device)


@idiom("eager")
class ScaleByItem(Net):
    def head_value(self, features, obs, ctx):
        return super().head_value(features, obs, ctx) * (1.0 + features.std().item())


@idiom("eager")
class BooleanSelection(Ext):
    def loss_terms(self, terms, batch, out):
        chosen = out.mean[batch.obs[..., 0] > 0]
        terms.losses["mine"] = chosen.square().sum() / max(len(chosen), 1)


@idiom("either")
class BooleanAssignment(Net):
    def actor_features(self, obs, ctx):
        x = obs.clone()
        x[x < 0] = 0.0
        return x


@idiom("eager")
class BranchOnLossOfMinibatch(Alg):
    def loss_terms(self, batch, out):
        terms = super().loss_terms(batch, out)
        if terms.losses["surrogate_loss"] > 0:
            terms.losses["surrogate_loss"] = 0.5 * terms.losses["surrogate_loss"]
        return terms


@idiom("eager")
class PrintedLoss(Ext):
    def parts(self, alg):
        self.lines = []

    def loss_terms(self, terms, batch, out):
        self.lines.append(f"value loss {terms.losses['value_loss']:.3f}")
        terms.losses["mine"] = out.mean.square().mean()


@idiom("eager")
class ExceptionByData(Net):
    def actor_features(self, obs, ctx):
        x = obs.detach()
        try:
            torch.linalg.cholesky(x[:3].mT @ x[:3] + (x[0, 0] - 0.5) * torch.eye(WIDTH, device=x.device))
        except torch.linalg.LinAlgError:
            return obs * 0.5
        return obs


@idiom("recorded")
class ExceptionByShape(Net):
    def actor_features(self, obs, ctx):
        try:
            return obs.view(-1, 99)
        except RuntimeError:
            return obs * 0.5


@idiom("either")
class TorchCond(Net):
    def actor_features(self, obs, ctx):
        return torch.cond(obs.sum() > 0, lambda x: x * 2.0, lambda x: x - 1.0, (obs,))


@idiom("eager")
class RewardClippedByBranch(Ext):
    def reward(self, reward, record):
        return reward.clamp(-3.0, 3.0) if float(reward.min()) < -6.0 else reward

    def loss_terms(self, terms, batch, out):
        terms.losses["mine"] = out.mean.square().mean()


# Tensors made inside.
@idiom("either")
class LossFromTensor(Alg):
    def loss_terms(self, batch, out):
        terms = super().loss_terms(batch, out)
        loss = torch.tensor(0.0, device=self.device)
        loss += out.mean.square().mean()
        terms.losses["surrogate_loss"] = terms.losses["surrogate_loss"] + loss
        return terms


@idiom("recorded")
class LossFromZeros(Ext):
    def loss_terms(self, terms, batch, out):
        loss = torch.zeros((), device=batch.obs.device)
        for column in out.mean.unbind(-1):
            loss += column.square().mean()
        terms.losses["mine"] = loss


@idiom("recorded")
class LossFromPythonZero(Ext):
    def loss_terms(self, terms, batch, out):
        terms.losses["mine"] = sum(column.square().mean() for column in out.mean.unbind(-1))


@idiom("either")
class LegacyTensorConstructor(Ext):
    def loss_terms(self, terms, batch, out):
        total = torch.Tensor([0.0]).to(batch.obs.device)
        total += out.mean.square().mean()
        terms.losses["mine"] = total.sum()


@idiom("either")
class StatisticsFromNumpyZeros(Ext):
    def loss_terms(self, terms, batch, out):
        total = torch.from_numpy(np.zeros(2, np.float32)).to(batch.obs.device)
        total.add_(out.mean.mean(0).detach())
        terms.losses["mine"] = (out.mean - total).square().mean()


# The iteration, and other Python state.
@idiom("either")
class AnnealByIteration(Ext):
    def loss_terms(self, terms, batch, out):
        left = max(0.0, 1.0 - self.alg.current_learning_iteration / 10)
        terms.losses["mine"] = left * out.mean.square().mean()


@idiom("either")
class SwitchAfterIteration(Alg):
    def loss_terms(self, batch, out):
        terms = super().loss_terms(batch, out)
        if self.current_learning_iteration > 4:
            terms.losses["value_loss"] = terms.losses["value_loss"] * 0.1
        return terms


@idiom("either")
class SwitchByIterationOfTheRunner(Ext):
    def callback(self, runner, i):
        self.runner = runner

    def loss_terms(self, terms, batch, out):
        weight = 1.0 if self.runner.iteration < 5 else 20.0
        terms.losses["mine"] = weight * out.mean.square().mean()


@idiom("either")
class NumberSetInBeginUpdate(Ext):
    def parts(self, alg):
        self.weight = 0.0

    def begin_update(self, iteration):
        self.weight = 3.0 if iteration >= 5 else 0.1

    def loss_terms(self, terms, batch, out):
        terms.losses["mine"] = self.weight * out.mean.square().mean()


@idiom("recorded")
class NumberInRecordingKey(NumberSetInBeginUpdate):
    def recording_key(self):
        return (self.weight,)


@idiom("recorded")
class DeviceNumberSetInBeginUpdate(Ext):
    def parts(self, alg):
        self.weight = alg.device_scalar(0.0)

    def begin_update(self, iteration):
        self.weight.fill_(0.3 * iteration)

    def loss_terms(self, terms, batch, out):
        terms.losses["mine"] = self.weight * out.mean.square().mean()


@idiom("eager")
class ReboundAverage(Ext):
    def begin(self, storage):
        self.ema = torch.zeros(WIDTH, device=storage.device)

    def declare_fields(self):
        return {"average": Field((WIDTH,))}

    def after_act(self, step, obs, critic_obs):
        self.ema = 0.9 * self.ema + 0.1 * obs.mean(0)
        step["average"] = self.ema.expand_as(obs).clone()

    def loss_terms(self, terms, batch, out):
        terms.losses["mine"] = (out.mean * batch.average[..., :2]).mean()


@idiom("eager")
class ReboundBuffer(Net):
    def parts(self):
        self.center = nn.Buffer(torch.zeros(WIDTH))

    def actor_features(self, obs, ctx):
        self.center = 0.9 * self.center + 0.1 * obs.detach().reshape(-1, WIDTH).mean(0)
        return obs - self.center.clone()


@idiom("recorded")
class BufferAverageInPlace(Net):
    def parts(self):
        self.center = nn.Buffer(torch.zeros(WIDTH))

    def actor_features(self, obs, ctx):
        self.center.lerp_(obs.detach().reshape(-1, WIDTH).mean(0), 0.1)
        return obs - self.center.clone()


@idiom("eager")
class DequeOfObservations(Ext):
    def declare_fields(self):
        return {"older": Field((WIDTH,))}

    def begin(self, storage):
        self.past = deque(maxlen=3)

    def after_act(self, step, obs, critic_obs):
        self.past.append(obs.clone())
        step["older"] = self.past[0]

    def loss_terms(self, terms, batch, out):
        terms.losses["mine"] = (out.mean * batch.older[..., :2]).mean()


@idiom("recorded")
class FrameStackInBuffer(Ext):
    def declare_fields(self):
        return {"older": Field((3, WIDTH))}

    def begin(self, storage):
        self.frames = torch.zeros(storage.num_envs, 3, WIDTH, device=storage.device)

    def after_act(self, step, obs, critic_obs):
        self.frames.copy_(torch.cat([self.frames[:, 1:], obs.unsqueeze(1)], 1))
        step["older"] = self.frames.clone()

    def after_record(self, record):
        self.frames.masked_fill_(record.done.view(-1, 1, 1), 0.0)

    def loss_terms(self, terms, batch, out):
        terms.losses["mine"] = (out.mean * batch.older.mean(-2)[..., :2]).mean()


@idiom("recorded")
class FrameStackByShiftedAssignment(FrameStackInBuffer):
    def after_act(self, step, obs, critic_obs):
        self.frames[:, :-1] = self.frames[:, 1:].clone()
        self.frames[:, -1] = obs
        step["older"] = self.frames.clone()


@idiom("eager")
class Counter(Net):
    def parts(self):
        self.calls = 0

    def actor_features(self, obs, ctx):
        self.calls += 1
        return obs * (1.0 + 0.01 * self.calls)


@idiom("eager")
class CounterReadByNobody(Net):
    def parts(self):
        self.calls = 0

    def actor_features(self, obs, ctx):
        self.calls += 1
        return obs * 0.5


@idiom("eager")
class CounterThatActsLate(Ext):
    def parts(self, alg):
        self.calls = 0

    def loss_terms(self, terms, batch, out):
        self.calls += 1
        terms.losses["mine"] = (5.0 if self.calls > 21 else 0.5) * out.mean.square().mean()


@idiom("eager")
class CounterInNestedObject(Ext):
    class Schedule:
        def __init__(self):
            self.calls = 0

        def value(self):
            self.calls += 1
            return 5.0 if self.calls > 21 else 0.5

    def parts(self, alg):
        self.schedule = self.Schedule()

    def loss_terms(self, terms, batch, out):
        terms.losses["mine"] = self.schedule.value() * out.mean.square().mean()


@idiom("eager")
class GeneratorFunction(Ext):
    def parts(self, alg):
        self.weights = itertools.chain([0.5] * 21, itertools.repeat(5.0))

    def loss_terms(self, terms, batch, out):
        terms.losses["mine"] = next(self.weights) * out.mean.square().mean()


@idiom("eager")
class DelayedUpdate(Ext):
    """Takes part in every third minibatch."""

    def parts(self, alg):
        self.calls = 0

    def loss_terms(self, terms, batch, out):
        self.calls += 1
        terms.losses["mine"] = out.mean.square().mean() * (3.0 if self.calls % 3 == 0 else 0.0)


@idiom("eager")
class DictOfNumbersMutated(Net):
    def parts(self):
        self.numbers = {"scale": 1.0}

    def actor_features(self, obs, ctx):
        self.numbers["scale"] *= 0.99
        return obs * self.numbers["scale"]


@idiom("eager")
class ListOfTensors(Net):
    def parts(self):
        self.kept = []

    def actor_features(self, obs, ctx):
        self.kept.append(obs.detach().mean())
        return obs * 0.5


@idiom("eager")
class ForwardHookThatAppends(Net):
    def parts(self):
        self.kept = []
        self.actor[0].register_forward_hook(lambda module, args, out: self.kept.append(out.detach().mean()))


@idiom("either")
class ForwardHookThatScales(Net):
    def parts(self):
        self.actor[0].register_forward_hook(lambda module, args, out: out * 0.5)


@idiom("eager")
class CachedFeaturesReadByCallback(Net):
    def parts(self):
        self.level, self.last = 0.0, None

    def callback(self, runner, i):
        self.level = 0.0 if self.last is None else float(self.last.abs().mean())

    def actor_features(self, obs, ctx):
        self.last = (obs * 0.5).detach()
        return obs * 0.5


@idiom("either")
class CachedFeaturesReadInTheSameStep(Net):
    def actor_features(self, obs, ctx):
        self.last = obs * 0.5
        return self.last

    def head_params(self, features, obs, ctx):
        return super().head_params(features + self.last, obs, ctx)


@idiom("eager")
class CounterOfFunction(Net):
    @staticmethod
    def scale():
        CounterOfFunction.scale.calls += 1
        return 0.5 if CounterOfFunction.scale.calls % 31 == 0 else 1.0

    def parts(self):
        CounterOfFunction.scale.calls = 0

    def actor_features(self, obs, ctx):
        return obs * self.scale()


@idiom("eager")
class CounterOfAlgorithmMadeInItsFirstCall(Alg):
    def weighted_sum(self, losses):
        self.calls = getattr(self, "calls", 0) + 1
        return super().weighted_sum(losses) * (0.1 if self.calls % 7 == 0 else 1.0)


@idiom("eager")
class NumberReadFromFile(Ext):
    def parts(self, alg):
        self._folder = tempfile.TemporaryDirectory()
        self._file = f"{self._folder.name}/weight"

    def callback(self, runner, i):
        with open(self._file, "w") as file:
            file.write("1.0" if i < 5 else "20.0")

    def loss_terms(self, terms, batch, out):
        with open(self._file) as file:
            terms.losses["mine"] = float(file.read()) * out.mean.square().mean()


@idiom("eager")
class SwitchByFile(Ext):
    def parts(self, alg):
        self._folder = tempfile.TemporaryDirectory()

    def callback(self, runner, i):
        if i == 5:
            os.mkdir(f"{self._folder.name}/on")

    def loss_terms(self, terms, batch, out):
        weight = 20.0 if os.path.exists(f"{self._folder.name}/on") else 1.0
        terms.losses["mine"] = weight * out.mean.square().mean()


@idiom("recorded")
class FinalizerInEveryCall(Ext):
    """The class of finalizers in the standard library has a dict of all of them, which is no state of the user's."""

    def parts(self, alg):
        self._folder = tempfile.TemporaryDirectory()  # has a finalizer

    def loss_terms(self, terms, batch, out):
        weakref.finalize(self._folder, int)
        terms.losses["mine"] = out.mean.square().mean()


@idiom("eager")
class SwitchByDate(Ext):
    def loss_terms(self, terms, batch, out):
        weight = 1.0 if datetime.datetime.now().year > 2000 else 2.0
        terms.losses["mine"] = weight * out.mean.square().mean()


# Random numbers.
@idiom("eager")
class NewNumpyGeneratorInEveryCall(Ext):
    def loss_terms(self, terms, batch, out):
        weight = 1.0 if np.random.default_rng().random() < 2.0 else 20.0
        terms.losses["mine"] = weight * out.mean.square().mean()


@idiom("either")
class GeneratorOfTheAlgorithmReplaced(Script):
    def callback(self, runner, i):
        if i == 5:
            runner.alg.generators["action"] = torch.Generator(runner.device).manual_seed(1)


@idiom("eager")
class PythonRandom(Net):
    def actor_features(self, obs, ctx):
        return obs * (0.5 if random.random() < 0.5 else 1.5)


@idiom("eager")
class RarePythonRandom(Ext):
    def loss_terms(self, terms, batch, out):
        terms.losses["mine"] = out.mean.square().mean() * (10.0 if random.random() > 0.9 else 1.0)


@idiom("eager")
class NumpyRandom(Net):
    def actor_features(self, obs, ctx):
        return obs * float(np.random.rand())


@idiom("eager")
class RareNumpyGenerator(Ext):
    def parts(self, alg):
        self.rng = np.random.default_rng(3)

    def loss_terms(self, terms, batch, out):
        terms.losses["mine"] = out.mean.square().mean() * (10.0 if self.rng.random() > 0.85 else 1.0)


@idiom("eager")
class RareRandomObject(Ext):
    def parts(self, alg):
        self.rng = random.Random(3)

    def loss_terms(self, terms, batch, out):
        terms.losses["mine"] = out.mean.square().mean() * (10.0 if self.rng.random() > 0.85 else 1.0)


@idiom("recorded")
class TorchGlobalRandom(Net):
    def actor_features(self, obs, ctx):
        return obs + 0.1 * torch.rand_like(obs)


@idiom("recorded", on_gpu="either")
class OwnTorchGenerator(Net):
    def actor_features(self, obs, ctx):
        if not hasattr(self, "noise"):
            self.noise = torch.Generator(obs.device).manual_seed(5)
        return obs + 0.1 * torch.randn(obs.shape, generator=self.noise, device=obs.device)


@idiom("recorded")
class GeneratorOfTheAlgorithm(Ext):
    def parts(self, alg):
        self.noise = alg.new_generator("mine")

    def loss_terms(self, terms, batch, out):
        drawn = torch.randn(out.mean.shape, generator=self.noise, device=out.mean.device)
        terms.losses["mine"] = (out.mean * drawn).mean()


@idiom("eager")
class ReseededEveryStep(Ext):
    def loss_terms(self, terms, batch, out):
        torch.manual_seed(7)
        terms.losses["mine"] = (out.mean * torch.randn_like(out.mean)).mean()


# Settings, tensors and modules changed by a callback.
@idiom("either")
class AttributeChanged(Net):
    def parts(self):
        self.scale = 1.0

    def callback(self, runner, i):
        self.scale = 1.0 if i < 3 else 0.25

    def actor_features(self, obs, ctx):
        return obs * self.scale


@idiom("either")
class AttributeChangedLate(AttributeChanged):
    def callback(self, runner, i):
        self.scale = 1.0 if i < 5 else 0.25


@idiom("either")
class AttributeChangedAfterTheRollout(Net):
    def parts(self):
        self.scale, self.is_hooked = 1.0, False

    def callback(self, runner, i):
        if not self.is_hooked:
            self.is_hooked = True
            runner.add_callback("pre_update", lambda runner: setattr(self, "scale", 1.0 + (runner.iteration == 5)))

    def actor_features(self, obs, ctx):
        return obs * self.scale


@idiom("either")
class AttributeOfInnerModuleChanged(Net):
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = 1.0

        def forward(self, x):
            return x * self.factor

    def parts(self):
        self.inner = self.Scale()

    def callback(self, runner, i):
        self.inner.factor = 1.0 if i < 5 else 0.25

    def actor_features(self, obs, ctx):
        return self.inner(obs)


@idiom("either")
class AttributeOfTorchModuleChanged(Net):
    def parts(self):
        self.soft = nn.LeakyReLU(0.1)

    def callback(self, runner, i):
        self.soft.negative_slope = 0.1 if i < 5 else 0.9

    def actor_features(self, obs, ctx):
        return self.soft(obs)


@idiom("either")
class DropoutRateChanged(Net):
    def parts(self):
        self.drop = nn.Dropout(0.1)

    def callback(self, runner, i):
        self.drop.p = 0.1 if i < 5 else 0.6

    def actor_features(self, obs, ctx):
        return self.drop(obs)


@idiom("either")
class StringSwitched(Net):
    def parts(self):
        self.mode = "plain"

    def callback(self, runner, i):
        self.mode = "plain" if i < 5 else "squared"

    def actor_features(self, obs, ctx):
        return obs.square() if self.mode == "squared" else obs


@idiom("either")
class LambdaReplaced(Net):
    def parts(self):
        self.transform = lambda x: x

    def callback(self, runner, i):
        if i == 5:
            self.transform = lambda x: x.tanh()

    def actor_features(self, obs, ctx):
        return self.transform(obs)


@idiom("either")
class MethodReplaced(Net):
    def callback(self, runner, i):
        if i == 5:
            self.actor_features = lambda obs, ctx: obs.tanh()

    def actor_features(self, obs, ctx):
        return obs


@idiom("either")
class ClosureOverVariable(Net):
    def parts(self):
        scale = 1.0

        def change(runner, i):
            nonlocal scale
            scale = 1.0 if i < 5 else 0.25

        self.callback, self.transform = change, lambda x: x * scale

    def actor_features(self, obs, ctx):
        return self.transform(obs)


SCALE = 1.0


@idiom("either")
class GlobalVariable(Net):
    def callback(self, runner, i):
        global SCALE
        SCALE = 1.0 if i < 5 else 0.25

    def actor_features(self, obs, ctx):
        return obs * SCALE


@idiom("either")
class VariableOfAnotherModule(Net):
    def callback(self, runner, i):
        idiom_settings.gain = 1.0 if i < 5 else 0.25

    def actor_features(self, obs, ctx):
        return obs * idiom_settings.gain


@idiom("either")
class FunctionOfAnotherModule(Net):
    def callback(self, runner, i):
        idiom_settings.gain = 1.0 if i < 5 else 0.25

    def actor_features(self, obs, ctx):
        return idiom_settings.scaled(obs)


@idiom("either")
class ClassOfAnotherModule(Net):
    def callback(self, runner, i):
        idiom_settings.Options.gain = 1.0 if i < 5 else 0.25

    def actor_features(self, obs, ctx):
        return obs * idiom_settings.Options.gain


@idiom("either")
class ObjectOfAnotherModule(Net):
    def callback(self, runner, i):
        idiom_settings.OPTIONS.scale = 1.0 if i < 5 else 0.25

    def actor_features(self, obs, ctx):
        return obs * idiom_settings.OPTIONS.scale


@idiom("either")
class ObjectOfAClosure(Net):
    def parts(self):
        options = idiom_settings.Options()
        self.options, self.transform = [options], lambda x: x * options.scale

    def callback(self, runner, i):
        self.options[0].scale = 1.0 if i < 5 else 0.25

    def actor_features(self, obs, ctx):
        return self.transform(obs)


@idiom("either")
class DefaultArgument(Net):
    def callback(self, runner, i):
        self.actor_features.__defaults__[0]["scale"] = 1.0 if i < 5 else 0.25

    def actor_features(self, obs, ctx, options={"scale": 1.0}):  # noqa: B006 (a mistake that users make)
        return obs * options["scale"]


@idiom("either")
class PartialFunction(Net):
    def parts(self):
        self.transform = functools.partial(lambda x, options: x * options["scale"], options={"scale": 1.0})

    def callback(self, runner, i):
        self.transform.keywords["options"]["scale"] = 1.0 if i < 5 else 0.25

    def actor_features(self, obs, ctx):
        return self.transform(obs)


class Slots:
    """An object without a dict of attributes."""

    __slots__ = ("scale",)


@idiom("either")
class ObjectWithSlots(Net):
    def parts(self):
        self.options = Slots()
        self.options.scale = 1.0

    def callback(self, runner, i):
        self.options.scale = 1.0 if i < 5 else 0.25

    def actor_features(self, obs, ctx):
        return obs * self.options.scale


@idiom("either")
class EnvironmentVariable(Net):
    def callback(self, runner, i):
        os.environ["CANTER_TEST_SCALE"] = "1.0" if i < 5 else "0.25"

    def actor_features(self, obs, ctx):
        return obs * float(os.environ.get("CANTER_TEST_SCALE", "1.0"))


@idiom("either")
class VariableThatAnAlgorithmReads(Alg):
    def callback(self, runner, i):
        idiom_settings.gain = 1.0 if i < 5 else 0.25

    def loss_terms(self, batch, out):
        terms = super().loss_terms(batch, out)
        terms.losses["value_loss"] = terms.losses["value_loss"] * idiom_settings.gain
        return terms


@idiom("either")
class ClassAttributeOfAlgorithm(Alg):
    scale = 1.0

    def callback(self, runner, i):
        type(self).scale = 1.0 if i < 5 else 0.25

    def loss_terms(self, batch, out):
        terms = super().loss_terms(batch, out)
        terms.losses["value_loss"] = terms.losses["value_loss"] * self.scale
        return terms


@idiom("either")
class AttributeOverClassAttributeOfAlgorithm(Alg):
    scale = 1.0

    def callback(self, runner, i):
        if i == 5:
            self.scale = 0.25

    def loss_terms(self, batch, out):
        terms = super().loss_terms(batch, out)
        terms.losses["value_loss"] = terms.losses["value_loss"] * self.scale
        return terms


@idiom("either")
class ClassAttribute(Net):
    shared_scale = 1.0

    def callback(self, runner, i):
        type(self).shared_scale = 1.0 if i < 5 else 0.25

    def actor_features(self, obs, ctx):
        return obs * self.shared_scale


@idiom("either")
class NestedSettings(Net):
    def parts(self):
        self.options = {"features": {"scales": [1.0, 1.0]}}

    def callback(self, runner, i):
        self.options["features"]["scales"][1] = 1.0 if i < 5 else 0.25

    def actor_features(self, obs, ctx):
        return obs * self.options["features"]["scales"][1]


@idiom("recorded")
class TensorFilledByCallback(Net):
    def parts(self):
        self.scale = nn.Buffer(torch.tensor(1.0))

    def callback(self, runner, i):
        self.scale.fill_(1.0 - 0.1 * i)

    def actor_features(self, obs, ctx):
        return obs * self.scale


@idiom("either")
class TensorReplacedByCallback(Net):
    def parts(self):
        self.scale = torch.tensor(1.0)

    def callback(self, runner, i):
        self.scale = torch.tensor(1.0 if i < 5 else 0.25, device=runner.device)

    def actor_features(self, obs, ctx):
        return obs * self.scale.to(obs.device)


@idiom("either")
class TensorInListReplaced(Net):
    def parts(self):
        self.scales = [torch.tensor(1.0)]

    def callback(self, runner, i):
        self.scales[0] = torch.tensor(1.0 if i < 5 else 0.25, device=runner.device)

    def actor_features(self, obs, ctx):
        return obs * self.scales[0].to(obs.device)


@idiom("either")
class NumpyConstant(Net):
    def parts(self):
        self.table = np.linspace(0.5, 1.5, WIDTH, dtype=np.float32)

    def actor_features(self, obs, ctx):
        return obs * torch.as_tensor(self.table, device=obs.device)


@idiom("either")
class NumpyArrayChanged(Net):
    def parts(self):
        self.table = np.linspace(0.5, 1.5, WIDTH, dtype=np.float32)

    def callback(self, runner, i):
        self.table[0] = 0.5 if i < 5 else 3.0

    def actor_features(self, obs, ctx):
        return obs * torch.as_tensor(self.table, device=obs.device)


@idiom("either")
class LargeNumpyArrayChanged(Ext):
    def parts(self, alg):
        self.table = np.ones(2000)

    def callback(self, runner, i):
        if i == 5:
            self.table[7] = 30.0

    def loss_terms(self, terms, batch, out):
        terms.losses["mine"] = float(self.table[7]) * out.mean.square().mean()


@idiom("either")
class MemberOfSetReplaced(Ext):
    def parts(self, alg):
        self.modes = {"calm"}

    def callback(self, runner, i):
        if i == 5:
            self.modes.remove("calm")
            self.modes.add("wild")

    def loss_terms(self, terms, batch, out):
        terms.losses["mine"] = (10.0 if "wild" in self.modes else 1.0) * out.mean.square().mean()


@idiom("either")
class NumpyScalarChanged(Net):
    def parts(self):
        self.scales = np.ones(2)

    def callback(self, runner, i):
        self.scales[1] = 1.0 if i < 5 else 0.25

    def actor_features(self, obs, ctx):
        return obs * float(self.scales[1])


@idiom("either")
class WeightAttributeOfExtension(Ext):
    def parts(self, alg):
        self.weight = 1.0

    def callback(self, runner, i):
        self.weight = 1.0 if i < 5 else 20.0

    def loss_terms(self, terms, batch, out):
        terms.losses["mine"] = self.weight * out.mean.square().mean()


@idiom("either")
class RewardWeightOfExtension(Ext):
    def parts(self, alg):
        self.weight = 0.1

    def callback(self, runner, i):
        self.weight = 0.1 if i < 5 else 2.0

    def bonus(self, record):
        return self.weight * record.reward.tanh()

    def loss_terms(self, terms, batch, out):
        terms.losses["mine"] = out.mean.square().mean()


@idiom("recorded")
class EntropyAnnealed(Script):
    def callback(self, runner, i):
        runner.alg.entropy_coef = 0.01 * (1.0 - i / 10)


@idiom("either")
class EntropySwitchedOff(Script):
    def callback(self, runner, i):
        runner.alg.entropy_coef = 0.5 if i < 5 else 0.0


@idiom("recorded")
class ManySettingsAnnealed(Script):
    def callback(self, runner, i):
        runner.alg.gamma = 0.9 + 0.01 * i
        runner.alg.clip_param = 0.2 - 0.02 * i
        runner.alg.learning_rate = 1e-3 * (i + 1)
        runner.alg.max_grad_norm = 1.0 / (i + 1)


@idiom("either")
class SettingReadAsNumber(Alg):
    def callback(self, runner, i):
        self.entropy_coef = 0.01 if i < 5 else 0.5

    def loss_terms(self, batch, out):
        terms = super().loss_terms(batch, out)
        terms.losses["surrogate_loss"] = terms.losses["surrogate_loss"] + self.entropy_coef * out.mean.square().mean()
        return terms


@idiom("either")
class SettingOfExtensionReadAsNumber(Ext):
    @settings
    class settings_class:
        strength: float = 0.1

    def callback(self, runner, i):
        runner.alg.strength = 0.1 if i < 5 else 5.0

    def loss_terms(self, terms, batch, out):
        terms.losses["mine"] = self.cfg.strength * out.mean.square().mean()


@idiom("either")
class SettingReadFromTheConfig(Ext):
    def callback(self, runner, i):
        runner.alg.gamma = 0.99 if i < 5 else 0.5

    def loss_terms(self, terms, batch, out):
        terms.losses["mine"] = self.alg.cfg.gamma * out.mean.square().mean()


@idiom("eager")
class NumberOfTheEnvironmentReadThroughTheRunner(Ext):
    def callback(self, runner, i):
        self.runner = runner
        runner.env.level = 1.0 if i < 5 else 9.0

    def loss_terms(self, terms, batch, out):
        terms.losses["mine"] = self.runner.env.level * out.mean.square().mean()


@idiom("either")
class LearningRateReadAsNumber(Alg):
    def loss_terms(self, batch, out):
        terms = super().loss_terms(batch, out)
        terms.losses["value_loss"] = terms.losses["value_loss"] * (1.0 + 10.0 * self.learning_rate)
        return terms


@idiom("eager")
class StepOfTheRollout(Ext):
    def declare_fields(self):
        return {"is_last": Field((1,))}

    def after_act(self, step, obs, critic_obs):
        is_last = self.alg.rollout.step == NUM_STEPS - 1
        step["is_last"] = torch.full((len(obs), 1), float(is_last), device=obs.device)

    def loss_terms(self, terms, batch, out):
        terms.losses["mine"] = (out.mean * batch.is_last).mean()


@idiom("recorded")
class EvaluationInBetween(Net):
    def parts(self):
        self.drop = nn.Dropout(0.3)

    def callback(self, runner, i):
        if i in (3, 5):
            runner.eval(4)

    def actor_features(self, obs, ctx):
        return self.drop(obs)


@idiom("recorded")
class WeightsRestored(Net):
    def callback(self, runner, i):
        if i == 2:
            self._saved = copy.deepcopy(self.state_dict())
        if i == 5:
            self.load_state_dict(self._saved)


@idiom("either")
class SwitchOfTheAlgorithmChanged(Script):
    def callback(self, runner, i):
        runner.alg.use_clipped_value_loss = i < 5


@idiom("recorded")
class LossWeightAnnealed(Ext):
    def callback(self, runner, i):
        runner.alg.loss_weights["mine"] = 0.1 * (i + 1)

    def loss_terms(self, terms, batch, out):
        terms.losses["mine"] = out.mean.square().mean()


@idiom("recorded", schedule="fixed")
class RateInParamGroups(Script):
    def callback(self, runner, i):
        runner.alg.optimizer.param_groups[0]["lr"] = 1e-3 / (i + 1)


@idiom("either", schedule="fixed")
class OtherOptionInParamGroups(Script):
    def callback(self, runner, i):
        runner.alg.optimizer.param_groups[0]["weight_decay"] = 0.0 if i < 5 else 0.3


@idiom("recorded")
class WeightsChangedInPlace(Net):
    def callback(self, runner, i):
        if i == 5:
            self.actor[0].weight.data.mul_(0.5)


@idiom("either")
class DataAssigned(Net):
    def callback(self, runner, i):
        if i == 5:
            self.actor[0].weight.data = torch.ones_like(self.actor[0].weight)


@idiom("either")
class AllDataAssigned(Net):
    def callback(self, runner, i):
        if i == 5:
            vector = torch.nn.utils.parameters_to_vector(self.parameters())
            torch.nn.utils.vector_to_parameters(0.9 * vector, self.parameters())


@idiom("either")
class MomentsCleared(Net):
    def callback(self, runner, i):
        if i == 5:
            runner.alg.optimizer.optimizer.state.clear()


@idiom("either")
class MomentsReplaced(Script):
    def callback(self, runner, i):
        if i == 5:
            for moments in runner.alg.optimizer.optimizer.state.values():
                moments["exp_avg"] = torch.zeros_like(moments["exp_avg"])


@idiom("either")
class OptimizerRestored(Script):
    def callback(self, runner, i):
        if i == 2:
            self._saved = copy.deepcopy(runner.alg.optimizer.state_dict())
        if i == 5:
            runner.alg.optimizer.load_state_dict(self._saved)


@idiom("either")
class LossTermsOfAlgorithmReplaced(Script):
    def callback(self, runner, i):
        if i == 5:
            runner.alg.loss_terms = functools.partial(self.doubled, runner.alg.loss_terms)

    def doubled(self, loss_terms, batch, out):
        terms = loss_terms(batch, out)
        terms.losses["value_loss"] = 5.0 * terms.losses["value_loss"]
        return terms


@idiom("either")
class ForwardOfAlgorithmReplaced(Script):
    def callback(self, runner, i):
        if i == 5:
            forward = runner.alg.policy.forward
            runner.alg.forward = lambda obs, *others: forward(0.5 * obs, *others)


@idiom("either")
class GradientHookRegisteredByCallback(Net):
    def callback(self, runner, i):
        if i == 5:
            self.actor[0].weight.register_hook(lambda gradient: 0.0 * gradient)


@idiom("either")
class GradientHookRemoved(Net):
    def parts(self):
        self._hook = self.actor[0].weight.register_hook(lambda gradient: 0.0 * gradient)

    def callback(self, runner, i):
        if i == 5:
            self._hook.remove()


@idiom("either")
class ModuleReplaced(Net):
    def callback(self, runner, i):
        if i == 5:
            with torch.random.fork_rng(devices=[]):
                self.actor = mlp([WIDTH, 8, 2], "elu").to(runner.device)


@idiom("either")
class LayerReplaced(Net):
    def callback(self, runner, i):
        if i == 5:
            self.actor[1] = nn.Tanh()


@idiom("either")
class ModuleReplacedByEqualOne(Net):
    def callback(self, runner, i):
        if i == 5:
            self.critic = copy.deepcopy(self.critic)


@idiom("either")
class LayersFrozen(Net):
    def callback(self, runner, i):
        self.actor[0].requires_grad_(i < 5)


@idiom("either")
class LayersFrozenAndReleased(Net):
    def callback(self, runner, i):
        self.actor[0].requires_grad_(not 2 <= i < 5)


@idiom("either")
class ModesToggled(Net):
    def parts(self):
        self.drop = nn.Dropout(0.3)

    def callback(self, runner, i):
        self.drop.train(i < 5)

    def actor_features(self, obs, ctx):
        return self.drop(obs)


@idiom("either")
class ModesToggledInside(Net):
    def parts(self):
        self.drop = nn.Dropout(0.3)

    def actor_features(self, obs, ctx):
        self.drop.train(torch.is_grad_enabled())
        return self.drop(obs)


@idiom("either")
class HookRegisteredByCallback(Net):
    def callback(self, runner, i):
        if i == 5:
            self.actor[0].register_forward_hook(lambda module, args, out: out * 0.25)


@idiom("either")
class TeacherReplaced(TeacherNet):
    def callback(self, runner, i):
        if i == 5:
            runner.alg.teacher.policies[0] = copy.deepcopy(self).apply(negated)


def negated(module):
    if isinstance(module, nn.Linear):
        module.weight.data.neg_()


# Time.
TICKS = [0]


class Clock:
    """A clock that both runs read alike: it counts its calls."""

    def elapsed_time(self):
        TICKS[0] += 1
        return 0.01 * TICKS[0]


@idiom("eager")
class ScaleByClock(Clock, Net):
    def parts(self):
        TICKS[0] = 0

    def actor_features(self, obs, ctx):
        return obs * min(1.0, self.elapsed_time())


@idiom("eager")
class SwitchByClock(Clock, Ext):
    def parts(self, alg):
        TICKS[0] = 0

    def loss_terms(self, terms, batch, out):
        weight = 10.0 if self.elapsed_time() > 0.215 else 1.0
        terms.losses["mine"] = weight * out.mean.square().mean()


# Networks.
@idiom("either")
class TransformerWithPaddingMask(Net):
    def parts(self):
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.embed, self.encoder = nn.Linear(1, 4), nn.TransformerEncoder(layer, 1)

    def actor_features(self, obs, ctx):
        padding = obs < -0.5
        padding = padding & ~padding.all(-1, keepdim=True)
        return obs + self.encoder(self.embed(obs.unsqueeze(-1)), src_key_padding_mask=padding).mean(-1)


@idiom("either")
class TransformerAsTeacher(TransformerWithPaddingMask, TeacherNet):
    """In evaluation mode, in which torch takes another path."""


@idiom("recorded")
class SelfAttention(Net):
    def parts(self):
        self.embed, self.attention = nn.Linear(1, 4), nn.MultiheadAttention(4, 2, batch_first=True)

    def actor_features(self, obs, ctx):
        tokens = self.embed(obs.unsqueeze(-1))
        return obs + self.attention(tokens, tokens, tokens, need_weights=False)[0].mean(-1)


@idiom("recorded")
class ScaledDotProduct(Net):
    def parts(self):
        self.embed = nn.Linear(1, 12)

    def actor_features(self, obs, ctx):
        query, key, value = self.embed(obs.unsqueeze(-1)).chunk(3, -1)
        return obs + F.scaled_dot_product_attention(query, key, value, is_causal=True).mean(-1)


@idiom("recorded")
class BatchNorm(Net):
    def parts(self):
        self.norm = nn.BatchNorm1d(WIDTH)

    def actor_features(self, obs, ctx):
        return self.norm(obs)


@idiom("eager")
class BatchNormWithCumulativeAverage(Net):
    def parts(self):
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None)

    def actor_features(self, obs, ctx):
        return self.norm(obs)


@idiom("recorded")
class LayerNorm(Net):
    def parts(self):
        self.norm = nn.LayerNorm(WIDTH)

    def actor_features(self, obs, ctx):
        return self.norm(obs)


@idiom("recorded")
class Dropout(Net):
    def parts(self):
        self.drop = nn.Dropout(0.3)

    def critic_features(self, obs, ctx):
        return self.drop(obs)


@idiom("recorded")
class SpectralNorm(Net):
    def parts(self):
        self.layer = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def actor_features(self, obs, ctx):
        return self.layer(obs)


@idiom("either")
class OldSpectralNorm(Net):
    """The module's weight is a new attribute in every pass."""

    def parts(self):
        self.layer = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def critic_features(self, obs, ctx):
        return self.layer(obs)


@idiom("recorded")
class WeightNorm(Net):
    def parts(self):
        self.layer = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def actor_features(self, obs, ctx):
        return self.layer(obs)


@idiom("either")
class CachedParametrization(Net):
    """The cache lives on the parametrised module, and in a global of torch."""

    def parts(self):
        self.layer = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def actor_features(self, obs, ctx):
        with nn.utils.parametrize.cached():
            return self.layer(self.layer(obs))


@idiom("either")
class ActivationCheckpoint(Net):
    def parts(self):
        self.layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def actor_features(self, obs, ctx):
        return checkpoint(self.layer, obs, use_reentrant=False)


@idiom("either")
class ActivationCheckpointWithDropout(Net):
    """The recomputation draws the same mask again, from a saved state of the random generator."""

    def parts(self):
        self.layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.3))

    def actor_features(self, obs, ctx):
        return checkpoint(self.layer, obs, use_reentrant=False)


@idiom("either")
class VmappedEnsemble(Net):
    def parts(self):
        self.members = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def actor_features(self, obs, ctx):
        weights = {name: torch.stack([getattr(m, name) for m in self.members]) for name in ("weight", "bias")}

        def call(weights, x):
            return torch.func.functional_call(self.members[0], weights, (x,))

        return torch.vmap(call, (0, None))(weights, obs).mean(0)


@idiom("either")
class JacobianByFunctionalTransforms(Ext):
    def loss_terms(self, terms, batch, out):
        jacobian = torch.vmap(torch.func.jacrev(self.alg.policy.actor))(batch.obs)
        terms.losses["mine"] = jacobian.square().mean()


@idiom("either")
class ScriptedModule(Net):
    def parts(self):
        self.layer = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))

    def actor_features(self, obs, ctx):
        return self.layer(obs)


def branch(x: torch.Tensor) -> torch.Tensor:
    if bool(x.mean() > 0):
        x = x * 1.5
    return x


def scaled_by_item(x: torch.Tensor) -> torch.Tensor:
    return x * (1.0 + x.mean().item())


@idiom("eager")
class ScriptedBranch(Net):
    def parts(self):
        self.transform = torch.jit.script(branch)

    def actor_features(self, obs, ctx):
        return self.transform(obs)


@idiom("eager")
class ScriptedItem(Net):
    def parts(self):
        self.transform = torch.jit.script(scaled_by_item)

    def critic_features(self, obs, ctx):
        return self.transform(obs)


@idiom("either")
class CompiledFunction(Net):
    def parts(self):
        self.transform = torch.compile(lambda x: x.tanh() * 0.5, backend="eager")

    def actor_features(self, obs, ctx):
        return self.transform(obs)


@idiom("eager")
class CompiledBranch(Net):
    def parts(self):
        self.transform = torch.compile(lambda x: x * 1.5 if x.mean() > 0 else x, backend="eager")

    def actor_features(self, obs, ctx):
        return self.transform(obs)


@idiom("recorded")
class Convolution(Net):
    def parts(self):
        self.conv = nn.Conv1d(1, 2, 3, padding=1)

    def actor_features(self, obs, ctx):
        return self.conv(obs.unsqueeze(-2)).mean(-2)


@idiom("recorded")
class GRUCellInHook(Net):
    def parts(self):
        self.cell = nn.GRUCell(1, WIDTH)

    def actor_features(self, obs, ctx):
        state = obs.new_zeros(len(obs), WIDTH)
        for column in obs.split(1, -1):
            state = self.cell(column, state)
        return state


@idiom("recorded")
class LSTMInHook(Net):
    def parts(self):
        self.lstm = nn.LSTM(1, WIDTH, batch_first=True)

    def actor_features(self, obs, ctx):
        return self.lstm(obs.unsqueeze(-1))[0][:, -1]


@idiom("eager")
class PackedSequence(Net):
    """Lengths are read by the host."""

    def parts(self):
        self.rnn = nn.GRU(1, WIDTH, batch_first=True)

    def actor_features(self, obs, ctx):
        lengths = (obs > 0).sum(-1).clamp(1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(obs.unsqueeze(-1), lengths, True, enforce_sorted=False)
        return self.rnn(packed)[1][0]


@idiom("recorded")
class Embedding(Net):
    def parts(self):
        self.table = nn.Embedding(3, WIDTH)

    def actor_features(self, obs, ctx):
        return obs + self.table((obs[..., 0] > 0).long() + (obs[..., 1] > 0).long())


@idiom("recorded")
class CustomGradient(Net):
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return -0.1 * grad

    def parts(self):
        self.layer = nn.Linear(WIDTH, WIDTH)

    def actor_features(self, obs, ctx):
        return self.Reverse.apply(self.layer(obs))


@idiom("eager")
class CustomGradientThatReads(Net):
    class Clipped(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            norm = float(grad.norm())
            return grad / norm if norm > 0.01 else grad

    def parts(self):
        self.layer = nn.Linear(WIDTH, WIDTH)

    def actor_features(self, obs, ctx):
        return self.Clipped.apply(self.layer(obs))


@idiom("eager")
class GradientHookThatCounts(Net):
    def parts(self):
        self.calls, self.layer = 0, nn.Linear(WIDTH, WIDTH)

    def count(self, grad):
        self.calls += 1
        return grad * (1.0 if self.calls < 15 else 0.1)

    def actor_features(self, obs, ctx):
        x = self.layer(obs)
        if x.requires_grad:
            x.register_hook(self.count)
        return x


@idiom("either")
class AutocastInside(Net):
    def parts(self):
        self.layer = nn.Linear(WIDTH, WIDTH)

    def actor_features(self, obs, ctx):
        with torch.autocast(obs.device.type, torch.bfloat16):
            return self.layer(obs).float()


@idiom("recorded")
class TensorRecipes(Net):
    """Sorting, gathering, scattering, sums, masks and einsum."""

    def parts(self):
        self.mix = nn.Parameter(torch.eye(WIDTH))

    def actor_features(self, obs, ctx):
        order = obs.argsort(-1)
        x = obs.gather(-1, order).cumsum(-1).masked_fill(obs > 2.0, 0.0)
        x = torch.zeros_like(x).scatter(-1, order, x)
        x = torch.where(x > 0, x, 0.1 * x).clamp(-3.0, 3.0)
        x[..., 0] = x[..., 1] * 0.5
        return torch.einsum("...i,ij->...j", x, self.mix)


@idiom("recorded")
class NoGradAndDetach(Net):
    def actor_features(self, obs, ctx):
        with torch.no_grad():
            target = self.critic(obs)
        return obs + target.detach().tanh()


@idiom("either")
class BranchOnGradMode(Net):
    def actor_features(self, obs, ctx):
        return obs * 0.5 if torch.is_grad_enabled() else obs * torch.full_like(obs, 0.5)


@idiom("recorded")
class InPlaceOnObservation(Net):
    def actor_features(self, obs, ctx):
        return obs.mul_(0.5).clamp_(-2.0, 2.0)


@idiom("recorded")
class ViewOfParameters(Net):
    def callback(self, runner, i):
        if i == 0:
            self.row = self.actor[0].weight.detach()[0]

    def actor_features(self, obs, ctx):
        return obs + self.row


@idiom("recorded")
class SharedWeights(Net):
    def parts(self):
        self.critic[0].weight = self.actor[0].weight


@idiom("eager")
class RecurrentBranch(RecurrentNet):
    def head_params(self, features, obs, ctx):
        return super().head_params(features * 0.5 if features.mean() > 0 else features, obs, ctx)


@idiom("recorded")
class RecurrentScaled(RecurrentNet):
    def actor_features(self, obs, ctx):
        return super().actor_features(obs * 0.5, ctx)


# Extensions.
@idiom("recorded")
class TargetNetworkInPlace(Ext):
    def parts(self, alg):
        self.target = copy.deepcopy(alg.policy.critic).requires_grad_(False)

    @torch.no_grad()
    def follow(self):
        for own, trained in zip(self.target.parameters(), self.alg.policy.critic.parameters(), strict=True):
            own.lerp_(trained, 0.1)

    def loss_terms(self, terms, batch, out):
        self.follow()
        terms.losses["mine"] = (out.value - self.target(batch.critic_obs)).square().mean()


@idiom("recorded")
class TargetNetworkInEndUpdate(Ext):
    def parts(self, alg):
        self.target = copy.deepcopy(alg.policy.critic).requires_grad_(False)

    def loss_terms(self, terms, batch, out):
        terms.losses["mine"] = (out.value - self.target(batch.critic_obs)).square().mean()

    def end_update(self, rollout):
        self.target.load_state_dict(self.alg.policy.critic.state_dict())


@idiom("either")
class TargetNetworkCopiedAnew(TargetNetworkInEndUpdate):
    def end_update(self, rollout):
        self.target = copy.deepcopy(self.alg.policy.critic).requires_grad_(False)


@idiom("recorded")
class OwnNetworkAndOptimizer(Ext):
    def parts(self, alg):
        with torch.random.fork_rng(devices=[]):
            self.model = nn.Linear(WIDTH, WIDTH).to(alg.device)
        self.optimizer = GuardedOptimizer(self.model, "Adam", 1e-2)

    def loss_terms(self, terms, batch, out):
        terms.losses["mine"] = (self.model(batch.obs) - batch.obs).square().mean()

    def checkpoint_parts(self):
        return {"mine": self.model, "mine_optimizer": self.optimizer}


class OwnTorchOptimizer(Ext):
    """Base of extensions with an optimizer of torch.optim, stepped in `learn`."""

    def parts(self, alg):
        with torch.random.fork_rng(devices=[]):
            self.model = nn.Linear(WIDTH, WIDTH).to(alg.device)
        self.own = self.make()

    def loss_terms(self, terms, batch, out):
        terms.inter_vars["obs"] = batch.obs

    def checkpoint_parts(self):
        return {"mine": self.model}


@idiom("either")
class TorchAdamInLearn(OwnTorchOptimizer):
    def make(self):
        return torch.optim.Adam(self.model.parameters(), lr=1e-2)

    def learn(self, terms):
        obs = terms.inter_vars["obs"]
        loss = (self.model(obs) - obs).square().mean()
        self.own.zero_grad()
        loss.backward()
        self.own.step()


@idiom("eager")
class TorchSGDWithAccumulation(OwnTorchOptimizer):
    """Gradients of two minibatches are added before a step."""

    def make(self):
        self.calls = 0
        return torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9)

    def learn(self, terms):
        obs, self.calls = terms.inter_vars["obs"], self.calls + 1
        (self.model(obs) - obs).square().mean().backward()
        if self.calls % 2 == 0:
            self.own.step()
            self.own.zero_grad()


@idiom("either")
class TorchSGD(OwnTorchOptimizer):
    def make(self):
        return torch.optim.SGD(self.model.parameters(), lr=1e-2)

    def callback(self, runner, i):
        self.own.param_groups[0]["lr"] = 1e-2 if i < 5 else 1e-1

    def learn(self, terms):
        obs = terms.inter_vars["obs"]
        self.own.zero_grad()
        (self.model(obs) - obs).square().mean().backward()
        self.own.step()


@idiom("recorded")
class GradientPenalty(Ext):
    def loss_terms(self, terms, batch, out):
        obs = batch.obs.detach().clone().requires_grad_()
        (grad,) = torch.autograd.grad(self.alg.policy.critic(obs).sum(), obs, create_graph=True)
        terms.losses["mine"] = grad.square().sum(-1).mean()


@idiom("recorded")
class LatePenalty(Ext):
    def loss_terms(self, terms, batch, out):
        terms.inter_vars["obs"] = batch.obs

    def late_terms(self, terms):
        obs = terms.inter_vars["obs"].detach().clone().requires_grad_()
        (grad,) = torch.autograd.grad(self.alg.policy.critic(obs).sum(), obs, create_graph=True)
        terms.losses["mine"] = grad.square().sum(-1).mean()


@idiom("recorded", on_gpu="either")
class CounterInHostHook(Ext):
    """`record_fields` is a host hook, but part of a rollout that is captured as a whole."""

    def parts(self, alg):
        self.steps = 0

    def declare_fields(self):
        return {"age": Field((1,))}

    def record_fields(self, record):
        self.steps += 1
        return {"age": torch.full((NUM_ENVS, 1), 0.1 * self.steps, device=record.reward.device)}

    def loss_terms(self, terms, batch, out):
        terms.losses["mine"] = (out.mean * batch.age).mean()


@idiom("recorded", on_gpu="either")
class CurriculumOfTheEnvironment(Script):
    class env_class(Walk):
        strength = 1.0

        def push(self, action):
            return action * self.strength

    def callback(self, runner, i):
        runner.env.strength = 1.0 if i < 5 else -1.0


@idiom("recorded", on_gpu="either")
class CounterInTheEnvironment(Script):
    class env_class(Walk):
        count = 0

        def push(self, action):
            self.count += 1
            return action * (1.0 if self.count % 5 else -1.0)


@idiom("eager")
class StatisticsKeptByName(Alg):
    """A running mean on the algorithm, rebound in every minibatch."""

    baseline: Any = 0.0

    def loss_terms(self, batch, out):
        terms = super().loss_terms(batch, out)
        self.baseline = 0.9 * self.baseline + 0.1 * out.value.detach().mean()
        terms.losses["value_loss"] = terms.losses["value_loss"] + (out.value - self.baseline).square().mean()
        return terms


@idiom("recorded")
class LossReplaced(Alg):
    def ppo_terms(self, batch, out):
        terms = super().ppo_terms(batch, out)
        log_prob = self.policy.distribution.log_prob(out.params, batch.actions)
        terms.losses["surrogate_loss"] = -batch.mean(log_prob * batch.advantages.squeeze(-1))
        return terms


@idiom("eager")
class RateSetByLoss(Alg):
    def optimizer_step(self, terms, total):
        self.lr.fill_(1e-2 if float(terms.losses["value_loss"]) > 1.0 else 1e-3)
        return super().optimizer_step(terms, total)


@idiom("either")
class SharedContextOfPolicyAndExtension(Ext):
    """A policy hook replaced at construction reads a number of the extension."""

    def parts(self, alg):
        self.scale = 1.0
        features = alg.policy.head_value
        alg.policy.head_value = lambda x, obs, ctx: self.scale * features(x, obs, ctx)

    def callback(self, runner, i):
        self.scale = 1.0 if i < 5 else 0.5

    def loss_terms(self, terms, batch, out):
        terms.losses["mine"] = out.mean.square().mean()


# Off-policy.
@idiom("eager")
class BranchInQNetwork(QNet):
    def forward(self, obs):
        return super().forward(obs * 1.5 if obs.mean() > 0 else obs)


@idiom("eager")
class CounterInQNetwork(QNet):
    def parts(self):
        self.calls = 0

    def forward(self, obs):
        self.calls += 1
        return super().forward(obs) * (1.0 + 0.01 * self.calls)


@idiom("either")
class AttributeOfQNetworkChanged(QNet):
    def parts(self):
        self.scale = 1.0

    def callback(self, runner, i):
        self.scale = 1.0 if i < 37 else 0.5

    def forward(self, obs):
        return super().forward(obs) * self.scale


@idiom("recorded")
class DropoutInQNetwork(QNet):
    def forward(self, obs):
        return super().forward(F.dropout(obs, 0.2))


@idiom("recorded")
class BatchNormInQNetwork(QNet):
    def parts(self):
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, obs):
        return super().forward(self.norm(obs))


@idiom("either")
class DataOfQNetworkAssigned(QNet):
    def callback(self, runner, i):
        if i == 37:
            weight = self.heads["out"].weight
            weight.data = weight.data * 0.5

    def forward(self, obs):
        return super().forward(obs)


@idiom("either")
class LayerOfQNetworkReplaced(QNet):
    def callback(self, runner, i):
        if i == 37:
            self.heads["nonlinearity"] = nn.Tanh()


@idiom("either")
class QNetworkFrozen(QNet):
    def callback(self, runner, i):
        self.encoder.requires_grad_(not 20 <= i < 37)


@idiom("recorded")
class EpsilonAnnealed(QNet):
    def callback(self, runner, i):
        runner.alg.epsilon_end = 0.3 / (i + 1)


@idiom("recorded")
class PlainActor(Actor):
    def get_params(self, obs):
        return super().get_params(obs * 0.5)


@idiom("eager")
class NumpyInActor(Actor):
    def get_params(self, obs):
        shift = np.tanh(obs.detach().cpu().numpy()).mean()
        return super().get_params(obs + float(shift))


@idiom("either")
class ActorFrozen(Actor):
    def callback(self, runner, i):
        self.requires_grad_(not 20 <= i < 37)


@idiom("either")
class ActorLayerReplaced(Actor):
    def callback(self, runner, i):
        if i == 37:
            self.network.mlp[-1] = copy.deepcopy(self.network.mlp[-1])
