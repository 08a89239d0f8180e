"""The programs of docs/simulators.md, run with stand-ins that have the interfaces of the simulators.

Every stand-in has 4 environments whose first ends for good after two steps; the others run out of time
after 3, 4 and 5.
"""

import dataclasses
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from canter.envs import wrap_env
from canter.runners import MjlabRunner, construction

tensordict = pytest.importorskip("tensordict")
onnxruntime = pytest.importorskip("onnxruntime")

ROOT = Path(__file__).parent.parent.parent
SECTION = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
PROGRAM = re.compile(r"^```py\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROGRAMS = {name: PROGRAM.search(text)[1] for name, text in SECTION.findall((ROOT / "docs/simulators.md").read_text())}
N, LENGTHS = 4, torch.tensor([2, 3, 4, 5])


class Robots:
    """What the stand-ins share: the observation is (100 * env + age, 1, 1), the critic's has its negative too."""

    num_envs, num_actions, max_episode_length, device = N, 2, 5, "cpu"

    def __init__(self):
        self.episode_length_buf = torch.zeros(N, dtype=torch.long)
        self.extras, self.num_resets, self.seen = {}, 0, []

    def observe(self):
        code = 100.0 * torch.arange(N) + self.episode_length_buf
        obs = torch.stack([code, torch.ones(N), torch.ones(N)], 1)
        return obs, torch.cat([obs, -code.unsqueeze(1)], 1)

    def advance(self, actions):
        """Rewards, ends for good and time-outs of a step; ended episodes have begun again."""
        assert actions.shape == (N, 2)
        self.seen.append(actions.detach().clone())
        self.episode_length_buf += 1
        ended = self.episode_length_buf >= LENGTHS
        self.last = self.observe()
        reward = self.episode_length_buf.float()
        self.episode_length_buf[ended] = 0
        terminal = ended & (torch.arange(N) == 0)
        return reward, terminal, ended & ~terminal


class LeggedRobot(Robots):
    """legged_gym: steps of five, buffers that are written again, `time_outs` only when an episode ended."""

    num_obs, num_privileged_obs = 3, 4

    def get_observations(self):
        return self.observe()[0]

    def get_privileged_observations(self):
        return self.observe()[1]

    def reset(self):
        self.num_resets += 1
        self.episode_length_buf[:] = 0
        return self.observe()

    def step(self, actions):
        reward, terminal, late = self.advance(actions)
        ended = terminal | late
        if ended.any():
            self.extras = {"episode": {"rew_lin_vel": torch.tensor(1.0)}, "time_outs": late}
        return *self.observe(), reward, ended.long(), self.extras


class Go2Env(Robots):
    """Genesis' example: TensorDicts, bool resets, float time-outs, the critic's observation in the extras."""

    def __init__(self, num_envs, env_cfg, obs_cfg, reward_cfg, command_cfg):
        super().__init__()
        assert num_envs == 4096
        assert env_cfg["num_actions"] == 2
        self.cfg = env_cfg

    def get_observations(self):
        return tensordict.TensorDict({"policy": self.observe()[0]}, batch_size=[N])

    def reset(self):
        self.num_resets += 1
        self.episode_length_buf[:] = 0
        return self.get_observations()

    def step(self, actions):
        reward, terminal, late = self.advance(actions)
        self.extras = {"time_outs": late.float(), "episode": {"rew_tracking": 0.5}}
        return self.get_observations(), reward, terminal | late, self.extras


class RSLRLBraxWrapper(Robots):
    """MuJoCo Playground's wrapper: `seed` is a number, ends are floats, asking for observations resets everything."""

    def __init__(self, env, num_actors, seed, episode_length, action_repeat, device_rank=None):
        super().__init__()
        assert (env, num_actors, episode_length) == ("Go1JoystickFlatTerrain", 4096, 1000)
        self.seed, self.batch_size = seed, N
        self.num_obs, self.num_privileged_obs = 3, 4
        del self.episode_length_buf
        self.age = torch.zeros(N, dtype=torch.long)
        self.device = "cpu"

    @property
    def unwrapped(self):
        raise AttributeError("unwrapped")

    def groups(self):
        obs, critic = self.observe()
        return tensordict.TensorDict({"state": obs, "privileged_state": critic}, batch_size=[N])

    def observe(self):
        code = 100.0 * torch.arange(N) + self.age
        obs = torch.stack([code, torch.ones(N), torch.ones(N)], 1)
        return obs, torch.cat([obs, -code.unsqueeze(1)], 1)

    def reset(self):
        self.num_resets += 1
        self.age[:] = 0
        return self.groups()

    def get_observations(self):
        return self.reset()

    def step(self, action):
        self.seen.append(action.detach().clone())
        self.age += 1
        ended, reward = self.age >= LENGTHS, self.age.float()
        self.age[ended] = 0
        late = ended & (torch.arange(N) > 0)
        info = {
            "time_outs": late.float(),
            "observations": {"critic": self.observe()[1]},
            "log": {"reward/upright": 1.0},
        }
        return self.groups(), reward, ended.float(), info


class IsaacEnv(gymnasium.Env):
    """Isaac Lab's `ManagerBasedRLEnv`: flags apart, groups of observations, the final ones in the extras."""

    is_vector_env = True

    def __init__(self, cfg, render_mode=None):
        self.cfg, self.robots, self.render_mode = cfg, Robots(), render_mode
        self.num_envs, self.device, self.max_episode_length, self.step_dt = N, "cpu", 5, 0.02
        self.common_step_counter = 0
        self.single_action_space = self.action_space = spaces.Box(-np.inf, np.inf, (2,))
        self.observation_space = spaces.Dict({"policy": spaces.Box(-np.inf, np.inf, (3,))})
        self.episode_length_buf = self.robots.episode_length_buf

    def groups(self):
        obs, critic = self.robots.observe()
        return {"policy": obs, "critic": critic}

    def reset(self, *, seed=None, options=None):
        self.robots.num_resets += 1
        return self.groups(), {"log": {}}

    def step(self, actions):
        self.common_step_counter += 1
        reward, terminal, late = self.robots.advance(actions)
        final = dict(zip(("policy", "critic"), self.robots.last, strict=True))
        return self.groups(), reward, terminal, late, {"log": {"Curriculum/terrain": 1.0}, "final_obs": final}


class RslRlVecEnvWrapper:
    """Isaac Lab's wrapper for rsl_rl 3 and later."""

    def __init__(self, env, clip_actions=None):
        self.env, self.clip_actions = env, clip_actions
        self.num_envs, self.device, self.num_actions = N, "cpu", 2
        self.max_episode_length = env.unwrapped.max_episode_length
        env.reset()

    @property
    def unwrapped(self):
        return self.env.unwrapped

    @property
    def cfg(self):
        return self.unwrapped.cfg

    @property
    def episode_length_buf(self):
        return self.unwrapped.episode_length_buf

    @episode_length_buf.setter
    def episode_length_buf(self, value):
        self.unwrapped.episode_length_buf[:] = value

    def seed(self, seed=-1):
        return seed

    def reset(self):
        obs, extras = self.env.reset()
        return tensordict.TensorDict(obs, batch_size=[N]), extras

    def get_observations(self):
        return tensordict.TensorDict(self.unwrapped.groups(), batch_size=[N])

    def step(self, actions):
        actions = actions if self.clip_actions is None else actions.clamp(-self.clip_actions, self.clip_actions)
        obs, reward, terminated, truncated, extras = self.env.step(actions)
        extras["time_outs"] = truncated
        return tensordict.TensorDict(obs, batch_size=[N]), reward, (terminated | truncated).long(), extras

    def close(self):
        return self.env.close()


class PickCube(gymnasium.Env):
    """A ManiSkill environment: batched tensors, and `reset(options={"env_idx": ...})` for some of them."""

    reconfiguration_freq, num_envs, device = 0, N, "cpu"

    def __init__(self, num_envs, obs_mode, control_mode, render_mode=None):
        self.robots, self.render_mode = Robots(), render_mode
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (3,))
        self.single_action_space = spaces.Box(-1.0, 1.0, (2,))
        self.observation_space = spaces.Box(-np.inf, np.inf, (N, 3))
        self.action_space = spaces.Box(-1.0, 1.0, (N, 2))

    def reset(self, *, seed=None, options=None):
        ids = (options or {}).get("env_idx", torch.arange(N))
        self.robots.episode_length_buf[ids] = 0
        return self.robots.observe()[0], {}

    def step(self, actions):
        robots = self.robots
        reward, terminal, late = robots.advance(actions)
        robots.episode_length_buf[terminal | late] = robots.last[0][terminal | late][:, 0].long() % 100
        return robots.observe()[0], reward, terminal, late, {"success": terminal}


class ManiSkillVectorEnv(VectorEnv):
    """ManiSkill's wrapper: resets within the step, the final observations of all rows in the infos."""

    def __init__(self, env, auto_reset=True, ignore_terminations=False):
        self._env, self.num_envs, self.ignore_terminations = env, N, ignore_terminations
        self.spec, self.device = env.spec, "cpu"
        base = self.base_env
        self.single_observation_space, self.single_action_space = (
            base.single_observation_space,
            base.single_action_space,
        )
        self.observation_space, self.action_space = base.observation_space, base.action_space
        self.metadata = {**env.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}

    @property
    def base_env(self):
        return self._env.unwrapped

    @property
    def unwrapped(self):
        return self.base_env

    def reset(self, *, seed=None, options=None):
        return self._env.reset(seed=seed, options=options)

    def step(self, actions):
        obs, reward, terminated, truncated, infos = self._env.step(actions)
        if self.ignore_terminations:
            terminated[:] = False
        dones = terminated | truncated
        if dones.any():
            final, (obs, infos) = obs.clone(), self.reset(options={"env_idx": torch.arange(N)[dones]})
            infos |= {"final_observation": final, "_final_observation": dones}
        return obs, reward, terminated, truncated, infos

    def close_extras(self, **kwargs):
        self._env.close()


@dataclasses.dataclass
class AgentCfg:
    """Isaac Lab's settings for rsl_rl 3.x."""

    max_iterations: int = 300
    num_steps_per_env: int = 6
    device: str = "cpu"
    clip_actions: float | None = 2.0
    experiment_name: str = "anymal_d_flat"
    obs_groups: dict = dataclasses.field(default_factory=lambda: {"policy": ["policy"], "critic": ["critic"]})
    policy: dict = dataclasses.field(
        default_factory=lambda: {
            "class_name": "ActorCritic",
            "init_noise_std": 1.0,
            "actor_obs_normalization": True,
            "critic_obs_normalization": True,
            "actor_hidden_dims": [8],
            "critic_hidden_dims": [8],
            "activation": "elu",
        }
    )
    algorithm: dict = dataclasses.field(
        default_factory=lambda: {"class_name": "PPO", "num_learning_epochs": 2, "num_mini_batches": 2}
    )

    def to_dict(self):
        return dataclasses.asdict(self)


OLD_CFG = {  # of rsl_rl 1.x, with its sections
    "runner": {"policy_class_name": "ActorCritic", "algorithm_class_name": "PPO", "num_steps_per_env": 6}
    | {"max_iterations": 1500, "experiment_name": "flat_anymal_c", "run_name": ""},
    "algorithm": {"num_learning_epochs": 2, "num_mini_batches": 2, "schedule": "adaptive"},
    "policy": {"init_noise_std": 1.0, "actor_hidden_dims": [8], "critic_hidden_dims": [8], "activation": "elu"},
    "seed": 1,
    "runner_class_name": "OnPolicyRunner",
}


def train_cfg(name, iterations):
    """The training dict of Genesis' example, for rsl_rl 2.x."""
    return {**OLD_CFG["runner"], "max_iterations": iterations, "algorithm": OLD_CFG["algorithm"], "seed": 1} | {
        "policy": {"class_name": "ActorCritic", **OLD_CFG["policy"]},
        "obs_groups": {"policy": ["policy"]},
    }


def modules():
    """The packages that the programs import, by name."""
    task = "Isaac-Velocity-Flat-Anymal-D-v0"
    registry = SimpleNamespace(
        make_env=lambda name, args: (LeggedRobot(), None),
        get_cfgs=lambda name: (None, SimpleNamespace(runner=SimpleNamespace(max_iterations=1500))),
    )
    configs = ({"num_actions": 2}, {}, {}, {})
    contents = {
        "isaaclab_tasks": {},
        "isaaclab_tasks.utils": {
            "load_cfg_from_registry": lambda name, entry: AgentCfg(),
            "parse_env_cfg": lambda name, device, num_envs: SimpleNamespace(task=task),
        },
        "isaaclab_rl": {},
        "isaaclab_rl.rsl_rl": {"RslRlVecEnvWrapper": RslRlVecEnvWrapper},
        "isaacgym": {},
        "legged_gym": {},
        "legged_gym.envs": {},
        "legged_gym.utils": {
            "class_to_dict": lambda cfg: OLD_CFG,
            "get_args": lambda: SimpleNamespace(task="anymal_c_flat", rl_device="cpu"),
            "task_registry": registry,
        },
        "genesis": {"init": lambda backend: None, "gpu": "gpu", "device": torch.device("cpu")},
        "go2_env": {"Go2Env": Go2Env},
        "go2_train": {"get_cfgs": lambda: configs, "get_train_cfg": train_cfg},
        "mujoco_playground": {
            "registry": SimpleNamespace(load=lambda name: name),
            "wrapper_torch": SimpleNamespace(RSLRLBraxWrapper=RSLRLBraxWrapper),
        },
        "mani_skill": {},
        "mani_skill.envs": {},
        "mani_skill.vector": {},
        "mani_skill.vector.wrappers": {},
        "mani_skill.vector.wrappers.gymnasium": {"ManiSkillVectorEnv": ManiSkillVectorEnv},
    }
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content)
        yield name, module


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run a program of the page with two iterations of learning; gives its variables."""
    count = construction.count_iterations
    monkeypatch.setattr(construction, "count_iterations", lambda *given: min(2, count(*given)))
    monkeypatch.chdir(tmp_path)
    for name, module in modules():
        monkeypatch.setitem(sys.modules, name, module)
    registry = dict(gymnasium.registry)
    for name, entry in (("Isaac-Velocity-Flat-Anymal-D-v0", IsaacEnv), ("PickCube-v1", PickCube)):
        gymnasium.register(name, entry_point=entry, disable_env_checker=True, max_episode_steps=None)

    def run_program(name):
        (tmp_path / "program.py").write_text(PROGRAMS[name].replace("1024", "4"))
        return runpy.run_path(str(tmp_path / "program.py"))

    yield run_program
    gymnasium.registry.clear()
    gymnasium.registry.update(registry)


SIMULATORS = {  # widths of the two observations, whether final observations are known
    "Isaac Lab": (3, 4, True),
    "legged_gym": (3, 4, False),
    "Genesis": (3, None, False),
    "MuJoCo Playground": (3, 4, False),
    "ManiSkill": (3, None, True),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SIMULATORS)
def test_the_program_of_a_simulator_trains_plays_and_exports(run, tmp_path, name):
    width, critic_width, has_final = SIMULATORS[name]
    made = run(name)
    runner = made["runner"]
    assert runner.iteration == 2
    assert (runner.env.num_obs, runner.env.num_privileged_obs) == (width, critic_width)
    assert runner.env.gives_final_obs is has_final
    [file] = tmp_path.rglob("policy.onnx")
    obs = torch.randn(3, width)
    exported = onnxruntime.InferenceSession(str(file)).run(["actions"], {"obs": obs.numpy()})[0]
    actions, bounds = runner.get_inference_policy()(obs), runner.env.action_bounds
    if bounds is not None:  # which the environment applies; the file has them inside
        actions = actions.clamp(*(torch.as_tensor(bound) for bound in bounds))
    torch.testing.assert_close(torch.from_numpy(exported), actions, rtol=0, atol=1e-5)
    assert max(runner.lenbuffer) <= 5
    [final] = tmp_path.rglob("checkpoint_final.pt")
    again = run(name)["runner"]
    again.load(str(final))
    again.learn(1)
    assert again.iteration == 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SIMULATORS)
def test_ends_and_final_observations_of_a_simulator_are_read_right(run, name):
    env = wrap_env(run(name)["env"])
    env.reset()
    seen = {}
    for _ in range(6):
        record = env.step(torch.zeros(N, 2))
        for index in (record.terminated | record.truncated).nonzero().flatten().tolist():
            final = None if record.final_obs is None else record.final_obs[index, 0].item()
            seen.setdefault(index, (bool(record.truncated[index]), float(record.reward[index]), final))
    ignores_the_end = name == "ManiSkill"  # ignore_terminations
    assert seen.keys() == ({1, 2, 3} if ignores_the_end else {0, 1, 2, 3})
    for index, (is_truncated, reward, final) in seen.items():
        length = int(LENGTHS[index])
        assert (is_truncated, reward) == (index > 0, float(length))
        assert final == (100.0 * index + length if SIMULATORS[name][2] else None)


@pytest.mark.filterwarnings("ignore")
def test_playgrounds_observations_are_requested_once(run):
    made = run("MuJoCo Playground")
    assert made["env"].num_resets == 2  # when the runner was made, and by the program before it plays


@pytest.mark.filterwarnings("ignore")
def test_a_resumed_run_of_isaac_lab_continues_its_step_counter(run, tmp_path):
    first = run("Isaac Lab")
    steps = first["env"].unwrapped.common_step_counter
    [final] = tmp_path.rglob("checkpoint_final.pt")
    second = run("Isaac Lab")
    second["env"].unwrapped.common_step_counter = 0
    second["runner"].load(str(final))
    assert steps == 12 + 100
    assert second["env"].unwrapped.common_step_counter == 12


def test_the_program_for_mjlab_registers_a_task(run):
    registry = pytest.importorskip("mjlab.tasks.registry", reason="needs mjlab: pip install 'canter[mjlab]'")
    made = run("mjlab")
    assert registry.load_runner_cls(f"Canter-{made['task']}") is MjlabRunner
