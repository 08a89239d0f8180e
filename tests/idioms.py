"""Everyday user code, each piece a complete small training run: `execution="auto"` must train exactly as "eager" does.

An idiom is a class: a policy (`Net`), a teacher (`TeacherNet`), an extension (`Ext`), an algorithm (`Alg`), a Q-network
(`QNet`), an actor of SAC (`Actor`) or TD3 (`DeterministicActor`), or a script around plain PPO (`Script`). Its method
`callback(runner, i)` runs before every iteration i.

The verdict says what `execution="auto"` gives:

- "recorded": what eager gives, all of it replayed, without a message.
- "same": what eager gives, replayed or not.
- "late": what eager gives but for at most 20 gradient steps, which a message counts.
- "limit": state outside of tensors changes within an iteration and shows in none of the compared calls, so a replay may
  use an old value. Documented, and not compared here; it must train.
"""

import array
import collections
import contextvars
import copy
import ctypes
import functools
import itertools
import math
import os
import pathlib
import queue
import random
import re
import sys
import tempfile
import threading
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import nn
from torch.nn.utils import parametrizations

from canter.algorithms import DQN, PPO, SAC, TD3, DQNConfig, Extension, PPOConfig, SACConfig, TD3Config
from canter.algorithms.optim import GuardedOptimizer
from canter.algorithms.teacher import Teacher
from canter.envs.torch_envs.base import TorchEnv
from canter.modules import ActorCritic, ActorCriticRecurrent
from canter.modules.actors import MLPDeterministicActor, MLPSquashedGaussianActor
from canter.modules.mlp import mlp
from canter.modules.q_networks import MLPQNetwork
from canter.runners import OffPolicyRunner, OnPolicyRunner
from canter.storage import Field

NUM_ENVS, NUM_STEPS, NUM_ITERATIONS, WIDTH = 4, 8, 5, 4
NUM_VECTOR_STEPS = 48  # of off-policy idioms; they learn from the 8th on
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
    verdict: str

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


def check_messages(messages: Sequence[str], eager_only: set[str]) -> None:
    """One message for each function that runs eagerly, with its name."""
    found = [message for message in messages if "runs eagerly" in message]
    assert len(found) == len(eager_only), f"messages {found}, but eager are {eager_only}"
    assert all(any(repr(name) in message for message in found) for name in eager_only)


def check_executor(executor: Any, verdict: str, functions: set[str]) -> None:
    """Functions with the verdict "recorded" are replayed."""
    replayed = {signature[0] for signature in executor.graphs}
    if verdict == "recorded":
        assert not executor.eager_only, f"eager: {executor.eager_only}"
        assert functions <= replayed, f"replayed: {replayed}"


def check_idiom(idiom: Idiom, execution: str, device: str, on_policy: set[str]) -> None:
    """An idiom trains as its verdict says."""
    run = idiom.run(execution, device)
    executor = run.runner.alg.executor
    check_messages(run.messages, executor.eager_only)
    if idiom.verdict in ("same", "recorded"):
        assert_same(run, idiom.run("eager", device))
    if idiom.verdict == "late":
        late = [message for message in run.messages if re.search(r"up to \d+ calls since the last comparison", message)]
        assert late, run.messages
        assert all(int(re.findall(r"up to (\d+) calls", message)[0]) <= 20 for message in late)
    is_on_policy = isinstance(run.runner, OnPolicyRunner)
    check_executor(executor, idiom.verdict, on_policy if is_on_policy else {"explore", "insert", "learn"})


IDIOMS: list[Idiom] = []


def idiom(verdict: str, **options: Any) -> Callable[[type], type]:
    """Add a class to the table; `options` are settings of its algorithm."""

    def add(cls: type) -> type:
        IDIOMS.append(Idiom(cls.__name__, functools.partial(build_run, cls, options), verdict))
        return cls

    return add


def build_run(cls: Any, options: dict[str, Any], execution: str, device: str) -> tuple[Any, Any]:
    """A runner with the user's code, and the object that holds the code."""
    options = {"execution": execution, "precision": "fp32", "save_interval": 0, **options}
    if issubclass(cls, QNet | Actor | DeterministicActor):
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
    made, config = (TD3, TD3Config) if issubclass(cls, DeterministicActor) else (SAC, SACConfig)
    env, cfg = Walk(NUM_ENVS, device, seed=1), config(actor_hidden_dims=(8,), critic_hidden_dims=(8,), **options)
    alg = made(env, cfg, device=device, seed=3, actor_class=cls)
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


class DeterministicActor(MLPDeterministicActor):
    """Base of TD3's actors."""


class Script:
    """Base of scripts around plain PPO: only callbacks."""


# Values of tensors read by Python.
@idiom("same")
class BranchOnMeanObservation(Net):
    def actor_features(self, obs, ctx):
        if obs[..., 0].mean() > 0:
            obs = obs * 1.5
        return obs


@idiom("same")
class GuardAgainstSpikes(Net):
    class env_class(Walk):
        spike_at = 3 * NUM_STEPS + 3

    def head_params(self, features, obs, ctx):
        if (features.abs() > 10).any():
            features = features.clamp(-1.0, 1.0)
        return super().head_params(features, obs, ctx)


@idiom("same")
class TeacherThroughNumpy(TeacherNet):
    def actor_features(self, obs, ctx):
        return torch.from_numpy(np.tanh(obs.cpu().numpy())).to(obs.device)


@idiom("same")
class BranchOnLossOfMinibatch(Alg):
    def loss_terms(self, batch, out):
        terms = super().loss_terms(batch, out)
        if terms.losses["surrogate_loss"] > 0:
            terms.losses["surrogate_loss"] = 0.5 * terms.losses["surrogate_loss"]
        return terms


@idiom("same")
class PrintedLoss(Ext):
    def parts(self, alg):
        self.lines = []

    def losses(self, terms, batch, out):
        self.lines.append(f"value loss {terms.losses['value_loss']:.3f}")
        terms.losses["mine"] = out.mean.square().mean()


# Tensors made inside.
# The iteration, and other Python state.
@idiom("same")
class AnnealByIteration(Ext):
    def losses(self, terms, batch, out):
        left = max(0.0, 1.0 - self.alg.current_learning_iteration / 10)
        terms.losses["mine"] = left * out.mean.square().mean()


@idiom("same")
class SwitchAfterIteration(Alg):
    def loss_terms(self, batch, out):
        terms = super().loss_terms(batch, out)
        if self.current_learning_iteration > 2:
            terms.losses["value_loss"] = terms.losses["value_loss"] * 0.1
        return terms


@idiom("same")
class NumberSetInBeginUpdate(Ext):
    def parts(self, alg):
        self.weight = 0.0

    def begin_update(self, iteration):
        self.weight = 3.0 if iteration >= 3 else 0.1

    def losses(self, terms, batch, out):
        terms.losses["mine"] = self.weight * out.mean.square().mean()


@idiom("recorded")
class DeviceNumberSetInBeginUpdate(Ext):
    def parts(self, alg):
        self.weight = alg.device_scalar(0.0)

    def begin_update(self, iteration):
        self.weight.fill_(0.3 * iteration)

    def losses(self, terms, batch, out):
        terms.losses["mine"] = self.weight * out.mean.square().mean()


@idiom("same")
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


@idiom("same")
class DequeOfObservations(Ext):
    def fields(self):
        return {"older": Field((WIDTH,))}

    def begin(self, storage):
        self.past = deque(maxlen=3)

    def after_act(self, step, obs, critic_obs):
        self.past.append(obs.clone())
        step["older"] = self.past[0]

    def losses(self, terms, batch, out):
        terms.losses["mine"] = (out.mean * batch.older[..., :2]).mean()


@idiom("recorded")
class FrameStackInBuffer(Ext):
    def fields(self):
        return {"older": Field((3, WIDTH))}

    def begin(self, storage):
        self.frames = torch.zeros(storage.num_envs, 3, WIDTH, device=storage.device)

    def after_act(self, step, obs, critic_obs):
        self.frames.copy_(torch.cat([self.frames[:, 1:], obs.unsqueeze(1)], 1))
        step["older"] = self.frames.clone()

    def reset(self, ends):
        self.frames.masked_fill_(ends.view(-1, 1, 1), 0.0)

    def losses(self, terms, batch, out):
        terms.losses["mine"] = (out.mean * batch.older.mean(-2)[..., :2]).mean()


@idiom("same")
class Counter(Net):
    def parts(self):
        self.calls = 0

    def actor_features(self, obs, ctx):
        self.calls += 1
        return obs * (1.0 + 0.01 * self.calls)


@idiom("same")
class CounterReadByNobody(Net):
    def parts(self):
        self.calls = 0

    def actor_features(self, obs, ctx):
        self.calls += 1
        return obs * 0.5


@idiom("same")
class CounterInNestedObject(Ext):
    class Schedule:
        def __init__(self):
            self.calls = 0

        def value(self):
            self.calls += 1
            return 5.0 if self.calls > 14 else 0.5

    def parts(self, alg):
        self.schedule = self.Schedule()

    def losses(self, terms, batch, out):
        terms.losses["mine"] = self.schedule.value() * out.mean.square().mean()


@idiom("limit")
class GeneratorFunction(Ext):
    def parts(self, alg):
        self.weights = itertools.chain([0.5] * 14, itertools.repeat(5.0))

    def losses(self, terms, batch, out):
        terms.losses["mine"] = next(self.weights) * out.mean.square().mean()


@idiom("same")
class ForwardHookThatAppends(Net):
    def parts(self):
        self.kept = []
        self.actor[0].register_forward_hook(lambda module, args, out: self.kept.append(out.detach().mean()))


@idiom("same")
class CachedFeaturesReadByCallback(Net):
    def parts(self):
        self.level, self.last = 0.0, None

    def callback(self, runner, i):
        self.level = 0.0 if self.last is None else float(self.last.abs().mean())

    def actor_features(self, obs, ctx):
        self.last = (obs * 0.5).detach()
        return obs * 0.5


@idiom("same")
class CachedFeaturesReadInTheSameStep(Net):
    def actor_features(self, obs, ctx):
        self.last = obs * 0.5
        return self.last

    def head_params(self, features, obs, ctx):
        return super().head_params(features + self.last, obs, ctx)


@idiom("limit")
class CounterOfFunction(Net):
    @staticmethod
    def scale():
        CounterOfFunction.scale.calls += 1
        return 0.5 if CounterOfFunction.scale.calls % 31 == 0 else 1.0

    def parts(self):
        CounterOfFunction.scale.calls = 0

    def actor_features(self, obs, ctx):
        return obs * self.scale()


@idiom("same")
class CounterOfAlgorithmMadeInItsFirstCall(Alg):
    def weighted_sum(self, losses):
        self.calls = getattr(self, "calls", 0) + 1
        return super().weighted_sum(losses) * (0.1 if self.calls % 7 == 0 else 1.0)


# Random numbers.
@idiom("same")
class NewNumpyGeneratorInEveryCall(Ext):
    def losses(self, terms, batch, out):
        weight = 1.0 if np.random.default_rng().random() < 2.0 else 20.0
        terms.losses["mine"] = weight * out.mean.square().mean()


@idiom("same")
class GeneratorOfTheAlgorithmReplaced(Script):
    def callback(self, runner, i):
        if i == 3:
            runner.alg.generators["action"] = torch.Generator(runner.device).manual_seed(1)


@idiom("same")
class RareNumpyGenerator(Ext):
    def parts(self, alg):
        self.rng = np.random.default_rng(3)

    def losses(self, terms, batch, out):
        terms.losses["mine"] = out.mean.square().mean() * (10.0 if self.rng.random() > 0.85 else 1.0)


@idiom("recorded")
class TorchGlobalRandom(Net):
    def actor_features(self, obs, ctx):
        return obs + 0.1 * torch.rand_like(obs)


@idiom("recorded")
class OwnTorchGenerator(Net):
    def actor_features(self, obs, ctx):
        if not hasattr(self, "noise"):
            self.noise = torch.Generator(obs.device).manual_seed(5)
        return obs + 0.1 * torch.randn(obs.shape, generator=self.noise, device=obs.device)


@idiom("recorded")
class GeneratorOfTheAlgorithm(Ext):
    def parts(self, alg):
        self.noise = alg.new_generator("mine")

    def losses(self, terms, batch, out):
        drawn = torch.randn(out.mean.shape, generator=self.noise, device=out.mean.device)
        terms.losses["mine"] = (out.mean * drawn).mean()


# Settings, tensors and modules changed by a callback.
@idiom("same")
class AttributeChangedAfterTheRollout(Net):
    def parts(self):
        self.scale, self.is_hooked = 1.0, False

    def callback(self, runner, i):
        if not self.is_hooked:
            self.is_hooked = True
            runner.add_callback("pre_update", lambda runner: setattr(self, "scale", 1.0 + (runner.iteration == 3)))

    def actor_features(self, obs, ctx):
        return obs * self.scale


@idiom("same")
class AttributeOfTorchModuleChanged(Net):
    def parts(self):
        self.soft = nn.LeakyReLU(0.1)

    def callback(self, runner, i):
        self.soft.negative_slope = 0.1 if i < 3 else 0.9

    def actor_features(self, obs, ctx):
        return self.soft(obs)


@idiom("same")
class DropoutRateChanged(Net):
    def parts(self):
        self.drop = nn.Dropout(0.1)

    def callback(self, runner, i):
        self.drop.p = 0.1 if i < 3 else 0.6

    def actor_features(self, obs, ctx):
        return self.drop(obs)


@idiom("same")
class LambdaReplaced(Net):
    def parts(self):
        self.transform = lambda x: x

    def callback(self, runner, i):
        if i == 3:
            self.transform = lambda x: x.tanh()

    def actor_features(self, obs, ctx):
        return self.transform(obs)


@idiom("same")
class MethodReplaced(Net):
    def callback(self, runner, i):
        if i == 3:
            self.actor_features = lambda obs, ctx: obs.tanh()

    def actor_features(self, obs, ctx):
        return obs


@idiom("recorded")
class TensorFilledByCallback(Net):
    def parts(self):
        self.scale = nn.Buffer(torch.tensor(1.0))

    def callback(self, runner, i):
        self.scale.fill_(1.0 - 0.1 * i)

    def actor_features(self, obs, ctx):
        return obs * self.scale


@idiom("same")
class TensorReplacedByCallback(Net):
    def parts(self):
        self.scale = torch.tensor(1.0)

    def callback(self, runner, i):
        self.scale = torch.tensor(1.0 if i < 3 else 0.25, device=runner.device)

    def actor_features(self, obs, ctx):
        return obs * self.scale.to(obs.device)


@idiom("same")
class NumpyArrayChanged(Net):
    def parts(self):
        self.table = np.linspace(0.5, 1.5, WIDTH, dtype=np.float32)

    def callback(self, runner, i):
        self.table[0] = 0.5 if i < 3 else 3.0

    def actor_features(self, obs, ctx):
        return obs * torch.as_tensor(self.table, device=obs.device)


@idiom("same")
class RewardWeightOfExtension(Ext):
    def parts(self, alg):
        self.weight = 0.1

    def callback(self, runner, i):
        self.weight = 0.1 if i < 3 else 2.0

    def bonus(self, rollout):
        return self.weight * rollout.column("env_rewards").tanh()

    def losses(self, terms, batch, out):
        terms.losses["mine"] = out.mean.square().mean()


@idiom("same")
class EntropySwitchedOff(Script):
    def callback(self, runner, i):
        runner.alg.entropy_coef = 0.5 if i < 3 else 0.0


@idiom("recorded")
class ManySettingsAnnealed(Script):
    def callback(self, runner, i):
        runner.alg.gamma = 0.9 + 0.01 * i
        runner.alg.clip_param = 0.2 - 0.02 * i
        runner.alg.learning_rate = 1e-3 * (i + 1)
        runner.alg.max_grad_norm = 1.0 / (i + 1)


@idiom("same")
class SettingReadAsNumber(Alg):
    def callback(self, runner, i):
        self.entropy_coef = 0.01 if i < 3 else 0.5

    def loss_terms(self, batch, out):
        terms = super().loss_terms(batch, out)
        terms.losses["surrogate_loss"] = terms.losses["surrogate_loss"] + self.entropy_coef * out.mean.square().mean()
        return terms


@idiom("same")
class SettingReadFromTheConfig(Ext):
    def callback(self, runner, i):
        runner.alg.gamma = 0.99 if i < 3 else 0.5

    def losses(self, terms, batch, out):
        terms.losses["mine"] = self.alg.cfg.gamma * out.mean.square().mean()


@idiom("same")
class LearningRateReadAsNumber(Alg):
    def loss_terms(self, batch, out):
        terms = super().loss_terms(batch, out)
        terms.losses["value_loss"] = terms.losses["value_loss"] * (1.0 + 10.0 * self.learning_rate)
        return terms


@idiom("limit")
class StepOfTheRollout(Ext):
    def fields(self):
        return {"is_last": Field((1,))}

    def after_act(self, step, obs, critic_obs):
        is_last = self.alg.rollout.step == NUM_STEPS - 1
        step["is_last"] = torch.full((len(obs), 1), float(is_last), device=obs.device)

    def losses(self, terms, batch, out):
        terms.losses["mine"] = (out.mean * batch.is_last).mean()


@idiom("recorded")
class EvaluationInBetween(Net):
    def parts(self):
        self.drop = nn.Dropout(0.3)

    def callback(self, runner, i):
        if i in (2, 3):
            runner.eval(4)

    def actor_features(self, obs, ctx):
        return self.drop(obs)


@idiom("recorded")
class WeightsRestored(Net):
    def callback(self, runner, i):
        if i == 1:
            self._saved = copy.deepcopy(self.state_dict())
        if i == 3:
            self.load_state_dict(self._saved)


@idiom("same")
class SwitchOfTheAlgorithmChanged(Script):
    def callback(self, runner, i):
        runner.alg.use_clipped_value_loss = i < 3


@idiom("recorded")
class LossWeightAnnealed(Ext):
    def callback(self, runner, i):
        runner.alg.loss_weights["mine"] = 0.1 * (i + 1)

    def losses(self, terms, batch, out):
        terms.losses["mine"] = out.mean.square().mean()


@idiom("recorded", schedule="fixed")
class RateInParamGroups(Script):
    def callback(self, runner, i):
        runner.alg.optimizer.param_groups[0]["lr"] = 1e-3 / (i + 1)


@idiom("same", schedule="fixed")
class OtherOptionInParamGroups(Script):
    def callback(self, runner, i):
        runner.alg.optimizer.param_groups[0]["weight_decay"] = 0.0 if i < 3 else 0.3


@idiom("recorded")
class WeightsChangedInPlace(Net):
    def callback(self, runner, i):
        if i == 3:
            self.actor[0].weight.data.mul_(0.5)


@idiom("same")
class DataAssigned(Net):
    def callback(self, runner, i):
        if i == 3:
            self.actor[0].weight.data = torch.ones_like(self.actor[0].weight)


@idiom("same")
class MomentsCleared(Net):
    def callback(self, runner, i):
        if i == 3:
            runner.alg.optimizer.optimizer.state.clear()


@idiom("same")
class OptimizerRestored(Script):
    def callback(self, runner, i):
        if i == 1:
            self._saved = copy.deepcopy(runner.alg.optimizer.state_dict())
        if i == 3:
            runner.alg.optimizer.load_state_dict(self._saved)


@idiom("same")
class LossTermsOfAlgorithmReplaced(Script):
    def callback(self, runner, i):
        if i == 3:
            runner.alg.loss_terms = functools.partial(self.doubled, runner.alg.loss_terms)

    def doubled(self, loss_terms, batch, out):
        terms = loss_terms(batch, out)
        terms.losses["value_loss"] = 5.0 * terms.losses["value_loss"]
        return terms


@idiom("same")
class GradientHookRegisteredByCallback(Net):
    def callback(self, runner, i):
        if i == 3:
            self.actor[0].weight.register_hook(lambda gradient: 0.0 * gradient)


@idiom("same")
class ModuleReplaced(Net):
    def callback(self, runner, i):
        if i == 3:
            with torch.random.fork_rng(devices=[]):
                self.actor = mlp([WIDTH, 8, 2], "elu").to(runner.device)


@idiom("same")
class LayersFrozen(Net):
    def callback(self, runner, i):
        self.actor[0].requires_grad_(i < 3)


@idiom("same")
class ModesToggled(Net):
    def parts(self):
        self.drop = nn.Dropout(0.3)

    def callback(self, runner, i):
        self.drop.train(i < 3)

    def actor_features(self, obs, ctx):
        return self.drop(obs)


@idiom("same")
class HookRegisteredByCallback(Net):
    def callback(self, runner, i):
        if i == 3:
            self.actor[0].register_forward_hook(lambda module, args, out: out * 0.25)


@idiom("same")
class TeacherReplaced(TeacherNet):
    def callback(self, runner, i):
        if i == 3:
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


@idiom("same")
class ScaleByClock(Clock, Net):
    def parts(self):
        TICKS[0] = 0

    def actor_features(self, obs, ctx):
        return obs * min(1.0, self.elapsed_time())


@idiom("limit")
class SwitchByClock(Clock, Ext):
    def parts(self, alg):
        TICKS[0] = 0

    def losses(self, terms, batch, out):
        weight = 10.0 if self.elapsed_time() > 0.145 else 1.0
        terms.losses["mine"] = weight * out.mean.square().mean()


# Networks.
@idiom("same")
class TransformerWithPaddingMask(Net):
    def parts(self):
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.embed, self.encoder = nn.Linear(1, 4), nn.TransformerEncoder(layer, 1)

    def actor_features(self, obs, ctx):
        padding = obs < -0.5
        padding = padding & ~padding.all(-1, keepdim=True)
        return obs + self.encoder(self.embed(obs.unsqueeze(-1)), src_key_padding_mask=padding).mean(-1)


@idiom("limit")
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
class BatchNorm(Net):
    def parts(self):
        self.norm = nn.BatchNorm1d(WIDTH)

    def actor_features(self, obs, ctx):
        return self.norm(obs)


@idiom("recorded")
class SpectralNorm(Net):
    def parts(self):
        self.layer = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def actor_features(self, obs, ctx):
        return self.layer(obs)


@idiom("same")
class CachedParametrization(Net):
    """The cache lives on the parametrised module, and in a global of torch."""

    def parts(self):
        self.layer = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def actor_features(self, obs, ctx):
        with nn.utils.parametrize.cached():
            return self.layer(self.layer(obs))


@idiom("recorded")
class LSTMInHook(Net):
    def parts(self):
        self.lstm = nn.LSTM(1, WIDTH, batch_first=True)

    def actor_features(self, obs, ctx):
        return self.lstm(obs.unsqueeze(-1))[0][:, -1]


@idiom("same")
class PackedSequence(Net):
    """Lengths are read by the host."""

    def parts(self):
        self.rnn = nn.GRU(1, WIDTH, batch_first=True)

    def actor_features(self, obs, ctx):
        lengths = (obs > 0).sum(-1).clamp(1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(obs.unsqueeze(-1), lengths, True, enforce_sorted=False)
        return self.rnn(packed)[1][0]


@idiom("same")
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


@idiom("same")
class GradientHookThatCounts(Net):
    def parts(self):
        self.calls, self.layer = 0, nn.Linear(WIDTH, WIDTH)

    def count(self, grad):
        self.calls += 1
        return grad * (1.0 if self.calls < 10 else 0.1)

    def actor_features(self, obs, ctx):
        x = self.layer(obs)
        if x.requires_grad:
            x.register_hook(self.count)
        return x


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


@idiom("same")
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

    def losses(self, terms, batch, out):
        self.follow()
        terms.losses["mine"] = (out.value - self.target(batch.critic_obs)).square().mean()


@idiom("recorded")
class TargetNetworkInEndUpdate(Ext):
    def parts(self, alg):
        self.target = copy.deepcopy(alg.policy.critic).requires_grad_(False)

    def losses(self, terms, batch, out):
        terms.losses["mine"] = (out.value - self.target(batch.critic_obs)).square().mean()

    def end_update(self, rollout):
        self.target.load_state_dict(self.alg.policy.critic.state_dict())


@idiom("recorded")
class OwnNetworkAndOptimizer(Ext):
    def parts(self, alg):
        with torch.random.fork_rng(devices=[]):
            self.model = nn.Linear(WIDTH, WIDTH).to(alg.device)
        self.optimizer = GuardedOptimizer(self.model, "Adam", 1e-2)

    def losses(self, terms, batch, out):
        terms.losses["mine"] = (self.model(batch.obs) - batch.obs).square().mean()

    def checkpoint_parts(self):
        return {"mine": self.model, "mine_optimizer": self.optimizer}


class OwnTorchOptimizer(Ext):
    """Base of extensions with an optimizer of torch.optim, stepped in `learn`."""

    def parts(self, alg):
        with torch.random.fork_rng(devices=[]):
            self.model = nn.Linear(WIDTH, WIDTH).to(alg.device)
        self.own = self.make()

    def losses(self, terms, batch, out):
        terms.inter_vars["obs"] = batch.obs

    def checkpoint_parts(self):
        return {"mine": self.model}


@idiom("same")
class TorchAdamInLearn(OwnTorchOptimizer):
    def make(self):
        return torch.optim.Adam(self.model.parameters(), lr=1e-2)

    def learn(self, terms):
        obs = terms.inter_vars["obs"]
        loss = (self.model(obs) - obs).square().mean()
        self.own.zero_grad()
        loss.backward()
        self.own.step()


@idiom("recorded")
class GradientPenalty(Ext):
    def losses(self, terms, batch, out):
        obs = batch.obs.detach().clone().requires_grad_()
        (grad,) = torch.autograd.grad(self.alg.policy.critic(obs).sum(), obs, create_graph=True)
        terms.losses["mine"] = grad.square().sum(-1).mean()


@idiom("same")
class CounterInHostHook(Ext):
    """A hook that should be tensor code counts the steps."""

    def parts(self, alg):
        self.steps = 0

    def fields(self):
        return {"age": Field((1,))}

    def record(self, record):
        self.steps += 1
        return {"age": torch.full((NUM_ENVS, 1), 0.1 * self.steps, device=record.reward.device)}

    def losses(self, terms, batch, out):
        terms.losses["mine"] = (out.mean * batch.age).mean()


@idiom("recorded")
class CurriculumOfTheEnvironment(Script):
    class env_class(Walk):
        strength = 1.0

        def push(self, action):
            return action * self.strength

    def callback(self, runner, i):
        runner.env.strength = 1.0 if i < 3 else -1.0


@idiom("recorded")
class CounterInTheEnvironment(Script):
    class env_class(Walk):
        count = 0

        def push(self, action):
            self.count += 1
            return action * (1.0 if self.count % 5 else -1.0)


@idiom("same")
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


@idiom("same")
class RateSetByLoss(Alg):
    def optimizer_step(self, terms, total):
        self.lr.fill_(1e-2 if float(terms.losses["value_loss"]) > 1.0 else 1e-3)
        return super().optimizer_step(terms, total)


@idiom("limit")
class SharedContextOfPolicyAndExtension(Ext):
    """A policy hook replaced at construction reads a number of the extension."""

    def parts(self, alg):
        self.scale = 1.0
        features = alg.policy.head_value
        alg.policy.head_value = lambda x, obs, ctx: self.scale * features(x, obs, ctx)

    def callback(self, runner, i):
        self.scale = 1.0 if i < 3 else 0.5

    def losses(self, terms, batch, out):
        terms.losses["mine"] = out.mean.square().mean()


# Off-policy.
@idiom("same")
class BranchInQNetwork(QNet):
    def forward(self, obs):
        return super().forward(obs * 1.5 if obs.mean() > 0 else obs)


@idiom("same")
class CounterInQNetwork(QNet):
    def parts(self):
        self.calls = 0

    def forward(self, obs):
        self.calls += 1
        return super().forward(obs) * (1.0 + 0.01 * self.calls)


@idiom("same")
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


@idiom("same")
class DataOfQNetworkAssigned(QNet):
    def callback(self, runner, i):
        if i == 37:
            weight = self.heads["out"].weight
            weight.data = weight.data * 0.5

    def forward(self, obs):
        return super().forward(obs)


@idiom("recorded")
class EpsilonAnnealed(QNet):
    def callback(self, runner, i):
        runner.alg.epsilon_end = 0.3 / (i + 1)


@idiom("recorded")
class PlainActor(Actor):
    def get_params(self, obs):
        return super().get_params(obs * 0.5)


@idiom("same")
class NumpyInActor(Actor):
    def get_params(self, obs):
        shift = np.tanh(obs.detach().cpu().numpy()).mean()
        return super().get_params(obs + float(shift))


@idiom("same")
class ActorFrozen(Actor):
    def callback(self, runner, i):
        self.requires_grad_(not 20 <= i < 37)


# A number that a callback changes between iterations, wherever it stands.
class Place(NamedTuple):
    """Where a number stands."""

    write: Callable[[float], Any]
    read: Callable[[], float]


def place(name: str, make: Callable[[], Place]) -> None:
    """Add an extension whose loss is weighted by the number in the place that `make()` gives."""

    class Weighted(Ext):
        def parts(self, alg):
            self._place = make()

        def callback(self, runner, i):
            self._place.write(1.0 if i < 3 else 20.0)

        def losses(self, terms, batch, out):
            terms.losses["mine"] = self._place.read() * out.mean.square().mean()

    IDIOMS.append(Idiom(f"Number in {name}", functools.partial(build_run, Weighted, {}), "same"))


def attribute_of(owner: Any) -> Place:
    """An attribute of any object."""
    return Place(functools.partial(setattr, owner, "number"), lambda: owner.number)


def item_of(owner: Any, key: Any) -> Place:
    """An item of any container."""

    def write(value):
        owner[key] = type(owner[key])(value)

    return Place(write, lambda: float(owner[key]))


class Slots:
    """An object without a dict of attributes."""

    __slots__ = ("number",)


SCALE = 1.0


def a_global_variable():
    def write(value):
        global SCALE
        SCALE = value

    return Place(write, lambda: SCALE)


def an_environment_variable():
    return Place(
        lambda value: os.environ.__setitem__("CANTER_TEST_SCALE", str(value)),
        lambda: float(os.environ["CANTER_TEST_SCALE"]),
    )


def a_closure():
    number = 1.0

    def write(value):
        nonlocal number
        number = value

    return Place(write, lambda: number)


def a_default_argument():
    def read(options={"scale": 1.0}):  # noqa: B006 (a mistake that users make)
        return options["scale"]

    return Place(lambda value: read.__defaults__[0].update(scale=value), read)


def a_file():
    folder = tempfile.TemporaryDirectory()
    path = pathlib.Path(folder.name, "weight")
    return Place(lambda value: path.write_text(str(value)), lambda folder=folder: float(path.read_text()))


def a_set():
    modes = set()
    return Place(lambda value: modes.add("wild") if value > 1 else None, lambda: 20.0 if modes else 1.0)


def a_mass_of_a_simulator():
    import mujoco

    xml = "<mujoco><worldbody><body><geom size='1'/></body></worldbody></mujoco>"
    return item_of(mujoco.MjModel.from_xml_string(xml).body_mass, 1)


def a_scheduler():
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0), 3, 20.0)

    def write(value):
        schedule.optimizer.step()
        schedule.step()

    return Place(write, lambda: schedule.get_last_lr()[0])


def an_event():
    event = threading.Event()
    return Place(lambda value: event.set() if value > 1 else None, lambda: 20.0 if event.is_set() else 1.0)


def a_queue():
    waiting = queue.SimpleQueue()
    return Place(lambda value: waiting.put(1) if value > 1 else None, lambda: 1.0 + 10.0 * waiting.qsize())


def a_context_variable():
    number = contextvars.ContextVar("number", default=1.0)
    return Place(number.set, number.get)


def a_cached_result():
    numbers = [1.0]
    cached = functools.lru_cache(lambda: numbers[-1])

    def write(value):
        numbers.append(value)
        cached.cache_clear()

    return Place(write, cached)


def a_weak_reference():
    kept = {"thing": np.zeros(1)}
    reference = weakref.ref(kept["thing"])
    return Place(lambda value: kept.clear() if value > 1 else None, lambda: 1.0 if reference() is not None else 20.0)


place("an object with slots", lambda: attribute_of(Slots()))
place("an object", lambda: attribute_of(types.SimpleNamespace()))
place("another module", lambda: attribute_of(types.ModuleType("settings")))
place("a class", lambda: attribute_of(type("Settings", (), {})))
place("a class of an installed package", lambda: attribute_of(spaces.Box))
place("a list in a dict", lambda: item_of({"features": [1.0]}["features"], 0))
place("a user dict", lambda: item_of(collections.UserDict(weight=1.0), "weight"))
place("a large array", lambda: item_of(np.ones(2000), 7))
place("an array of Python", lambda: item_of(array.array("d", [1.0]), 0))
place("bytes", lambda: item_of(bytearray(2), 1))
for made in (
    an_environment_variable,
    a_global_variable,
    a_closure,
    a_default_argument,
    a_file,
    a_set,
    a_mass_of_a_simulator,
    a_scheduler,
    an_event,
    a_queue,
    a_context_variable,
    a_cached_result,
    a_weak_reference,
):
    place(made.__name__.replace("_", " "), made)


# State that no walk over objects finds.
@idiom("same")
class DistributionReplaced(Net):
    def parts(self):
        self._noise = torch.distributions.Normal(0.0, 0.1)

    def callback(self, runner, i):
        if i == 3:
            self._noise = torch.distributions.Normal(0.0, 1.0)

    def actor_features(self, obs, ctx):
        return obs + self._noise.scale * obs


@idiom("recorded")
class LibraryOfManyArrays(Ext):
    """A motion library of which a callback changes a weight beside it."""

    def parts(self, alg):
        self.clips, self.gain = [np.zeros(3)] * 100_000, 1.0

    def callback(self, runner, i):
        self.gain = 1.0 if i < 3 else 20.0

    def losses(self, terms, batch, out):
        terms.losses["mine"] = self.gain * len(self.clips) / 100_000 * out.mean.square().mean()


@idiom("same")
class KernelThatWritesThroughDataPtr(Net):
    def actor_features(self, obs, ctx):
        x = obs.detach().contiguous().clone()
        if not x.is_cuda:
            values = (ctypes.c_float * x.numel()).from_address(x.data_ptr())
            values[0] = math.tanh(values[0])
        return x


@idiom("recorded")
class UnderAProfiler(Script):
    def callback(self, runner, i):
        sys.setprofile((lambda frame, event, arg: None) if i < 3 else None)


@idiom("same")
class AutocastWithItsCache(Net):
    def actor_features(self, obs, ctx):
        with torch.autocast(obs.device.type, torch.bfloat16):
            return (obs @ self.actor[0].weight.T @ self.actor[0].weight).float()


@idiom("same")
class RecurrentScaledByCallback(RecurrentNet):
    def callback(self, runner, i):
        self.scale = 1.0 if i < 3 else 0.25

    def actor_features(self, obs, ctx):
        return super().actor_features(obs * getattr(self, "scale", 1.0), ctx)


@idiom("same")
class RecurrentHookRegistered(RecurrentNet):
    def callback(self, runner, i):
        if i == 3:
            self.actor[0].register_forward_hook(lambda module, args, out: out * 0.5)


@idiom("late")
class NumberInSacActor(Actor):
    gain = 1.0

    def callback(self, runner, i):
        NumberInSacActor.gain = 1.0 if i < 33 else 0.5

    def get_params(self, obs):
        return super().get_params(obs * self.gain)


@idiom("recorded")
class PlainDeterministicActor(DeterministicActor):
    pass


@idiom("same")
class AttributeOfDeterministicActor(DeterministicActor):
    scale = 1.0

    def callback(self, runner, i):
        if i == 16:
            self.scale = 0.5

    def get_params(self, obs):
        return super().get_params(obs * self.scale)
