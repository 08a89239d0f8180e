"""The adapter of mjlab's environments, on a stand-in with its interface and, where mjlab is installed, on mjlab."""

import dataclasses
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from canter.cli.__main__ import main
from canter.cli.options import parse_train
from canter.envs import MjlabAdapter, PointRobot, make_env, wrap_env
from canter.envs.mjlab import set_entry
from canter.export.load import load
from canter.presets import load_preset, presets
from canter.runners import MjlabRunner, OnPolicyRunner
from canter.utils.checkpoint import load_checkpoint


class Simulator:
    """`ManagerBasedRlEnv` without physics: the observation is 100 * env + age; episodes of env i last 2 + i steps."""

    num_envs, device, max_episode_length, render_mode = 3, "cpu", 4, None

    def __init__(self, is_finite_horizon=False, auto_reset=True):
        self.cfg = SimpleNamespace(auto_reset=auto_reset, is_finite_horizon=is_finite_horizon)
        self.unwrapped, self.action_manager = self, SimpleNamespace(total_action_dim=2)
        levels = torch.zeros(3, dtype=torch.long)
        terrain = {"terrain_levels": levels, "terrain_types": torch.zeros(3, dtype=torch.long)}
        terrain |= {"terrain_origins": torch.arange(5.0).view(5, 1, 1), "env_origins": torch.zeros(3, 1)}
        self.scene = SimpleNamespace(terrain=SimpleNamespace(**terrain))
        self.position, self.command_range, self.contact_times = torch.zeros(3, 1), 1.0, torch.zeros(3)
        self.curriculum_manager = SimpleNamespace(compute=self.update_curriculum, reset=lambda env_ids: {})
        self.episode_length_buf = torch.zeros(3, dtype=torch.long)
        self.common_step_counter, self.resets, self.pending = 0, [], False
        self.extras = {}
        self.obs_buf = {"actor": torch.zeros(3, 1), "critic": torch.zeros(3, 2)}

    def update_curriculum(self, env_ids=None):
        """Robots that are away from their origin move up; after 8 steps commands are faster."""
        terrain, ids = self.scene.terrain, torch.arange(3) if env_ids is None else env_ids
        self.command_range = 2.0 if self.common_step_counter >= 8 else 1.0
        terrain.terrain_levels[ids] += (self.position - terrain.env_origins)[ids, 0].abs().gt(0.5).long()
        terrain.terrain_levels.clamp_(max=4)
        terrain.env_origins[:] = terrain.terrain_origins[terrain.terrain_levels, terrain.terrain_types]

    def compute(self):
        code = 100.0 * torch.arange(3) + self.episode_length_buf
        self.obs_buf["actor"][:, 0], self.obs_buf["critic"][:, 0] = code, -code  # buffers are written in place
        return self.obs_buf

    def reset(self, *, seed=None, env_ids=None, options=None):
        ids = torch.arange(3) if env_ids is None else env_ids
        self.resets.append(ids.tolist())
        self.curriculum_manager.compute(env_ids=ids)
        self.curriculum_manager.reset(ids)
        self.position[ids] = self.scene.terrain.env_origins[ids]
        self.contact_times[ids] = 0.0
        self.episode_length_buf[ids] = 0
        self.extras["log"], self.pending = {"Episode_Reward/upright": 1.0}, False
        return self.compute(), self.extras

    def step(self, actions):
        assert not self.pending, "reset(env_ids=...) must come before the next step"
        self.extras["log"] = {"Metrics/steps": 1.0}
        self.contact_times = self.contact_times + 1.0  # a new tensor, as mjlab's sensors make them
        self.episode_length_buf += 1
        self.common_step_counter += 1
        self.reset_buf = self.episode_length_buf >= 2 + torch.arange(3)
        self.reset_time_outs = self.reset_buf & (torch.arange(3) > 0)
        self.reset_terminated = self.reset_buf & ~self.reset_time_outs
        rewards = self.episode_length_buf.float()
        if self.cfg.auto_reset and self.reset_buf.any():
            self.episode_length_buf[self.reset_buf] = 0
        self.pending = not self.cfg.auto_reset and bool(self.reset_buf.any())
        return self.compute(), rewards, self.reset_terminated, self.reset_time_outs, self.extras

    def get_observations(self):
        return self.compute()

    def seed(self, seed):
        return seed

    def close(self):
        pass


Simulator.__module__ = "mjlab.envs.stand_in"
ACTIONS = torch.zeros(3, 2)


def test_the_bare_environment_is_taken_as_it_is():
    env = wrap_env(Simulator())
    assert isinstance(env, MjlabAdapter)
    assert (env.num_actions, env.num_obs, env.num_privileged_obs, env.adapter) == (2, 1, 2, "mjlab")
    env.seed(1)
    env.reset()
    env.step(ACTIONS)
    assert env.contract == "mjlab, resets by canter"


def test_the_final_observation_is_that_before_the_reset():
    simulator = Simulator()
    env = wrap_env(simulator)
    env.reset()
    env.step(ACTIONS)
    record = env.step(ACTIONS)  # env 0 ends for good
    assert record.terminated.tolist() == [True, False, False]
    assert record.final_obs[0].tolist() == [2.0]
    assert record.final_critic_obs[0].tolist() == [-2.0, 0.0]
    assert record.obs[:, 0].tolist() == [0.0, 102.0, 202.0]
    assert record.reward.tolist() == [2.0, 2.0, 2.0]
    record = env.step(ACTIONS)  # env 1 runs out of time
    assert record.truncated.tolist() == [False, True, False]
    assert record.final_obs[1].tolist() == [103.0]
    assert record.obs[1].tolist() == [100.0]
    assert simulator.resets[-2:] == [[0], [1]]
    assert record.extras["log"] == {"Metrics/steps": 1.0, "Episode_Reward/upright": 1.0}
    assert env.gives_final_obs


def test_without_final_observations_the_simulator_resets_itself():
    simulator = Simulator()
    env = MjlabAdapter(simulator, final_obs=False)
    env.reset()
    num_resets = len(simulator.resets)
    for _ in range(3):
        record = env.step(ACTIONS)
    assert record.truncated.tolist() == [False, True, False]
    assert record.final_obs is None
    assert len(simulator.resets) == num_resets


def test_a_limit_that_belongs_to_the_task_is_no_truncation():
    env = wrap_env(Simulator(is_finite_horizon=True))
    env.reset()
    for _ in range(3):
        record = env.step(ACTIONS)
    assert record.terminated.tolist() == [False, True, False]
    assert not record.truncated.any()


def test_a_resumed_run_continues_the_curriculum(tmp_path):
    cfg = {"policy": {"actor_hidden_dims": [4], "critic_hidden_dims": [4]}, "num_steps_per_env": 4}
    first = Simulator()
    runner = OnPolicyRunner(first, cfg, device="cpu", show_progress=False)
    runner.learn(2)
    first.scene.terrain.terrain_levels[:] = torch.tensor([0, 2, 3])
    runner.save(str(tmp_path / "model.pt"))
    assert first.common_step_counter == 8
    second = Simulator()
    again = OnPolicyRunner(second, cfg, device="cpu", show_progress=False)
    again.load(str(tmp_path / "model.pt"))
    assert (second.common_step_counter, second.command_range) == (8, 2.0)
    assert second.scene.terrain.terrain_levels.tolist() == [0, 2, 3]
    assert second.position[:, 0].tolist() == [0.0, 2.0, 3.0]  # every robot stands on its terrain
    again.learn(1)  # every episode ends at least once; nobody has walked
    assert second.scene.terrain.terrain_levels.tolist() == [0, 2, 3]


def test_a_checkpoint_is_loaded_between_two_trainings(tmp_path):
    cfg = {"policy": {"actor_hidden_dims": [4], "critic_hidden_dims": [4]}, "num_steps_per_env": 3}
    runner = OnPolicyRunner(Simulator(), cfg, device="cpu", show_progress=False)
    runner.learn(1)
    runner.save(str(tmp_path / "model.pt"))
    for load_cfg in (None, {"actor": True}):
        runner.learn(1)
        runner.load(str(tmp_path / "model.pt"), load_cfg=load_cfg)
        runner.init_writer()
        assert runner.obs[:, 0].tolist() == [0.0, 100.0, 200.0]  # of the new episodes


def test_an_onnx_file_that_mjlab_cannot_describe_is_written_and_the_warning_says_so(tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")

    def get_base_metadata(env, run):
        raise KeyError("Scene element 'robot' not found")

    monkeypatch.setitem(sys.modules, "mjlab.rl.exporter_utils", SimpleNamespace(get_base_metadata=get_base_metadata))
    simulator = Simulator()
    simulator.command_manager = SimpleNamespace(active_terms=[])
    runner = MjlabRunner(simulator, {"num_steps_per_env": 4}, device="cpu", show_progress=False)
    with pytest.warns(UserWarning, match=r"\.onnx has no metadata of mjlab: KeyError.*'robot' not found"):
        runner.save(tmp_path / "model_0.pt")
    assert (tmp_path / f"{tmp_path.name}.onnx").is_file()


def test_the_counter_in_a_checkpoint_of_mjlabs_own_runner_is_restored(tmp_path):
    runner = OnPolicyRunner(Simulator(), {"num_steps_per_env": 4}, device="cpu", show_progress=False)
    weights = {"model_state_dict": runner.policy.state_dict(), "iter": 3}
    torch.save({**weights, "infos": {"env_state": {"common_step_counter": 72}}}, tmp_path / "model_3.pt")
    runner.load(str(tmp_path / "model_3.pt"), load_cfg={"actor": True})
    assert runner.env.unwrapped.common_step_counter == 72


def test_names_without_mjlab_say_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "mjlab.tasks", None)
    for attempt in (lambda: make_env("mjlab/Mjlab-Cartpole-Balance"), lambda: load_preset("mjlab/X")):
        with pytest.raises(ImportError, match=r"pip install 'canter\[mjlab\]'"):
            attempt()


@dataclasses.dataclass
class MotionCfg:
    motion_file: str = ""
    noise: dict = dataclasses.field(default_factory=lambda: {"pose": 0.1})


@dataclasses.dataclass
class TaskCfg:
    """A stand-in for the configuration of a tracking task."""

    scene: SimpleNamespace = dataclasses.field(default_factory=SimpleNamespace)
    commands: dict = dataclasses.field(default_factory=lambda: {"motion": MotionCfg()})
    decimation: int = 4


def test_entries_of_a_configuration_are_set_by_the_names_that_lead_to_them():
    cfg = TaskCfg()
    for name, value in (("decimation", 2), ("commands.motion.motion_file", "a.npz"), ("commands.motion.noise.pose", 0)):
        set_entry(cfg, name, value, "Track")
    assert (cfg.decimation, cfg.commands["motion"]) == (2, MotionCfg("a.npz", {"pose": 0}))
    with pytest.raises(ValueError, match=r"commands.moton.x: .* task 'Track' has no 'moton' there, but motion"):
        set_entry(cfg, "commands.moton.x", 1, "Track")
    with pytest.raises(ValueError, match="decimation.x: .* has no 'x' there, but none"):
        set_entry(cfg, "decimation.x", 1, "Track")


def test_a_tracking_task_without_a_motion_says_how_to_give_one(monkeypatch):
    tasks = SimpleNamespace(load_env_cfg=lambda task: TaskCfg(), list_tasks=lambda: ["Track"])
    monkeypatch.setattr("canter.envs.mjlab.registry", lambda: tasks)
    with pytest.raises(ValueError, match=r"'Track' follows a motion .* '{commands.motion.motion_file: FILE}'"):
        make_env("mjlab/Track", num_envs=2)


def test_a_task_that_mjlab_lacks_is_an_error_that_names_the_nearest(monkeypatch):
    tasks = SimpleNamespace(list_tasks=lambda: ["Mjlab-Cartpole-Balance", "Mjlab-Cartpole-Swingup"])
    monkeypatch.setattr("canter.envs.mjlab.registry", lambda: tasks)
    for attempt in (make_env, load_preset):
        with pytest.raises(ValueError, match="mjlab/Mjlab-Cartpole-Bal"):
            attempt("mjlab/Mjlab-Cartpole-Balanc")
        with pytest.raises(ValueError, match="'mjlab/X'.*Mjlab-Cartpole-Balance"):
            attempt("mjlab/X")


def test_mjlabs_cartpole_trains_with_its_registered_settings(tmp_path):
    pytest.importorskip("mjlab", reason="needs mjlab: pip install 'canter[mjlab]'")
    env = make_env("mjlab/Mjlab-Cartpole-Balance", num_envs=8)
    preset = load_preset("mjlab/Mjlab-Cartpole-Balance")
    runner = OnPolicyRunner(env, preset, tmp_path, "cpu", show_progress=False)
    assert runner.policy.actor[0].out_features == preset["actor"]["hidden_dims"][0]
    runner.env.episode_length_buf = torch.full((8,), int(env.max_episode_length) - 5)
    result = runner.learn(2)
    assert env.gives_final_obs
    assert len(result.history) == 2
    act = runner.get_inference_policy()
    assert act(env.simulator.get_observations()).shape == (8, 1)


def train_with_mjlab(task, runner_class, folder, **settings):
    """The run directory after mjlab's own train script has run `runner_class` for one iteration of 4 steps."""
    from mjlab.scripts.train import TrainConfig, launch_training
    from mjlab.tasks.registry import list_tasks, load_env_cfg, load_rl_cfg, register_mjlab_task

    name = f"Canter-{runner_class.__name__}-{task}"
    if name not in list_tasks():
        register_mjlab_task(name, load_env_cfg(task), load_env_cfg(task, play=True), load_rl_cfg(task), runner_class)
    args = TrainConfig.from_task(name)
    args.env.scene.num_envs, args.agent.logger, args.agent.max_iterations = 8, "tensorboard", 1
    args.agent.num_steps_per_env = 4
    if "motion_file" in settings:
        args.env.commands["motion"].motion_file = settings.pop("motion_file")
    for key, value in settings.items():
        setattr(args.agent, key, value)
    launch_training(name, dataclasses.replace(args, log_root=str(folder), gpu_ids=None))
    return max((path.parent for path in folder.rglob("checkpoint_final.pt")), key=lambda run: run.stat().st_mtime)


@pytest.mark.slow
def test_mjlabs_own_train_script_trains_and_resumes_canters_runner(tmp_path, monkeypatch):
    pytest.importorskip("mjlab", reason="needs mjlab: pip install 'canter[mjlab]'")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    from mjlab.tasks.registry import load_rl_cfg

    task = "Mjlab-Cartpole-Balance"
    run = train_with_mjlab(task, OnPolicyRunner, tmp_path)
    settings = dataclasses.asdict(load_rl_cfg(task))
    runner = OnPolicyRunner(make_env(f"mjlab/{task}", num_envs=8), settings, device="cpu", show_progress=False)
    final = str(run / "checkpoint_final.pt")
    runner.load(final, load_cfg={"actor": True}, strict=True, map_location="cpu")  # as mjlab's play does
    assert runner.env.simulator.common_step_counter == 4
    resumed = train_with_mjlab(task, OnPolicyRunner, tmp_path, resume=True, run_name="again")
    assert resumed != run
    saved = load_checkpoint(resumed / "checkpoint_final.pt")
    assert (saved["iter"], saved["resume"]["counters"]["common_step_counter"]) == (2, 8)


@pytest.mark.slow
def test_the_commands_work_on_mjlab(tmp_path, monkeypatch, capsys):
    pytest.importorskip("mjlab", reason="needs mjlab: pip install 'canter[mjlab]'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MUJOCO_GL", "egl")
    task = "mjlab/Mjlab-Cartpole-Balance"
    assert main(["check-env", task]) == 0
    report = capsys.readouterr().out
    assert "adapter             mjlab" in report
    assert "time-outs continue with the value of the final observation" in report
    settings = "--num-envs 8 --max-iterations 2 --eval-interval 100 --device cpu --final-episodes 8 --no-video"
    assert main(["train", task, *settings.split(), "--name", "run"]) == 0
    [run] = tmp_path.glob(f"runs/{task}/run*")
    saved = load_checkpoint(run / "checkpoint_final.pt")
    steps = int(saved["config"]["num_steps_per_env"])
    assert saved["resume"]["counters"]["common_step_counter"] == 2 * steps
    assert saved["environment"]["robot"]["action"]["names"] == ["slider"]
    assert main(["resume", str(run), "--total-timesteps", str(8 * steps)]) == 0
    resumed = load_checkpoint(run / "checkpoint_final.pt")
    assert (resumed["iter"], resumed["resume"]["counters"]["common_step_counter"]) == (3, 3 * steps)
    capsys.readouterr()
    assert main(["eval", str(run), "--episodes", "8", "--device", "cpu"]) == 0
    assert "mean length      1000.00" in capsys.readouterr().out
    assert main(["play", str(run), "--video", "film.gif", "--episodes", "1", "--seconds", "5"]) == 0
    assert (tmp_path / "film.gif").stat().st_size > 10_000


@pytest.mark.slow
def test_presets_of_mjlab_are_of_registered_tasks_and_as_long_as_their_runs():
    pytest.importorskip("mjlab", reason="needs mjlab: pip install 'canter[mjlab]'")
    tasks = [task for task in presets() if task.startswith("mjlab/")]
    assert len(tasks) == 6
    for task in tasks:
        preset = load_preset(task)
        assert preset["total_timesteps"] == preset["max_iterations"] * preset["num_steps_per_env"] * 4096
        options, config = parse_train([task, "--entropy-coef", "0.002"])
        assert (options.num_envs, config["max_iterations"]) == (4096, preset["max_iterations"])
        assert config["algorithm"]["entropy_coef"] == 0.002


@pytest.mark.slow
def test_a_resumed_run_on_mjlabs_rough_terrain_continues_the_curriculum(tmp_path):
    pytest.importorskip("mjlab", reason="needs mjlab: pip install 'canter[mjlab]'")
    task, saved = "mjlab/Mjlab-Velocity-Rough-Unitree-Go1", torch.tensor([0, 1, 2, 3, 4, 5, 6, 7])
    settings = {**load_preset(task), "num_steps_per_env": 4}
    first = OnPolicyRunner(make_env(task, num_envs=8), settings, tmp_path, "cpu", show_progress=False)
    first.learn(1)
    first.env.simulator.scene.terrain.terrain_levels[:] = saved
    first.env.simulator.common_step_counter = steps = 6000 * 24  # beyond the second stage of the commands
    first.save(tmp_path / "model.pt")
    second = OnPolicyRunner(make_env(task, num_envs=8), settings, device="cpu", show_progress=False)
    simulator = second.env.simulator
    ranges = simulator.command_manager.get_term("twist").cfg.ranges
    slow = tuple(ranges.lin_vel_x)
    second.load(str(tmp_path / "model.pt"))
    terrain, robot = simulator.scene.terrain, simulator.scene["robot"]
    assert simulator.common_step_counter == steps
    assert terrain.terrain_levels.tolist() == saved.tolist()
    assert ranges.lin_vel_x[1] > slow[1]
    distance = (robot.data.root_link_pos_w - terrain.env_origins)[:, :2].norm(dim=1)
    assert distance.max() < 2.0, "every robot stands on its own terrain"
    torch.testing.assert_close(second.env.get_observations()[0], second.env._select(simulator.obs_buf)[0])
    second.env.episode_length_buf = torch.full((8,), int(second.env.max_episode_length) - 2)
    second.learn(1)
    assert simulator.common_step_counter == steps + 4
    assert (terrain.terrain_levels <= saved).all(), "robots that have not walked must not get harder terrain"


def onnx_parts(file):
    """The metadata of an ONNX file and a function from its inputs by name to its outputs by name."""
    import onnx
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file))
    names = [output.name for output in session.get_outputs()]
    metadata = {entry.key: entry.value for entry in onnx.load(file).metadata_props}
    return metadata, lambda **inputs: dict(zip(names, session.run(names, inputs), strict=True))


@pytest.mark.slow
def test_mjlabs_train_and_play_scripts_run_canters_runner_with_the_export_of_velocity_tasks(tmp_path, monkeypatch):
    pytest.importorskip("mjlab", reason="needs mjlab: pip install 'canter[mjlab]'")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    from mjlab.scripts import play

    task, seen = "Mjlab-Velocity-Flat-Unitree-Go1", []
    run = train_with_mjlab(task, MjlabRunner, tmp_path)

    class Viewer:
        """What mjlab's viewers do with the environment and the policy."""

        def __init__(self, env, policy, **_):
            self.env, self.policy = env, policy

        def run(self):
            for _ in range(2):
                with torch.inference_mode():
                    obs = self.env.get_observations()
                    seen.append((obs["actor"].clone(), self.policy(obs).clone()))
                    self.env.step(seen[-1][1])

    monkeypatch.setattr(play, "NativeMujocoViewer", Viewer)
    checkpoint = str(run / "checkpoint_final.pt")
    settings = play.PlayConfig(checkpoint_file=checkpoint, num_envs=3, viewer="native", device="cpu")
    play.run_play(f"Canter-MjlabRunner-{task}", settings)
    metadata, act = onnx_parts(run / f"{run.name}.onnx")
    assert len(metadata["joint_names"].split(",")) == 12
    assert metadata["observation_names"].startswith("base_lin_vel,")
    assert "control_period" in metadata["canter"]
    for obs, actions in seen:
        torch.testing.assert_close(torch.from_numpy(act(obs=obs.numpy())["actions"]), actions, rtol=0, atol=1e-5)
    assert len(seen) == 2


@pytest.mark.slow
def test_a_tracking_task_trains_and_its_onnx_file_has_the_policy_the_motion_and_mjlabs_metadata(tmp_path, monkeypatch):
    pytest.importorskip("mjlab", reason="needs mjlab: pip install 'canter[mjlab]'")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    import mujoco
    from mjlab.asset_zoo.robots import get_g1_robot_cfg

    model = get_g1_robot_cfg().spec_fn().compile()
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    steps = np.arange(30, dtype=np.float32)[:, None]  # the pose of every step is known by its first joint
    joints, still = np.repeat(data.qpos[None, 7:], 30, 0) + 0.001 * steps, np.zeros((30, model.nbody - 1, 3))
    bodies = {"body_pos_w": data.xpos[1:], "body_quat_w": data.xquat[1:]}
    bodies = {name: np.repeat(value[None], 30, 0) for name, value in bodies.items()}
    bodies |= {"body_lin_vel_w": still, "body_ang_vel_w": still}
    motion = tmp_path / "motion.npz"
    np.savez(motion, fps=[50], joint_pos=joints, joint_vel=np.zeros_like(joints), **bodies)
    task = "Mjlab-Tracking-Flat-Unitree-G1"
    monkeypatch.chdir(tmp_path)
    short = "--num-envs 4 --num-steps-per-env 8 --max-iterations 1 --final-episodes 2 --no-video --device cpu"
    assert (
        main(["train", f"mjlab/{task}", *short.split(), "--env-kwargs", "{commands.motion.motion_file: motion.npz}"])
        == 0
    )
    [started] = tmp_path.glob(f"runs/mjlab/{task}/*")
    assert main(["eval", str(started), "--episodes", "2", "--device", "cpu"]) == 0
    run = train_with_mjlab(task, MjlabRunner, tmp_path, motion_file=str(motion))
    metadata, act = onnx_parts(run / f"{run.name}.onnx")
    assert metadata["anchor_body_name"] == "torso_link"
    assert len(metadata["body_names"].split(",")) == 14
    obs = torch.randn(1, 160)
    found = act(obs=obs.numpy(), time_step=np.full((1, 1), 7, np.float32))
    torch.testing.assert_close(torch.from_numpy(found["actions"]), load(run).predict(obs), rtol=0, atol=1e-5)
    np.testing.assert_allclose(found["joint_pos"][0], joints[7], atol=1e-6)


def test_the_runner_for_mjlab_takes_no_other_environment():
    with pytest.raises(TypeError, match="environments of mjlab, not a PointRobot; use OnPolicyRunner"):
        MjlabRunner(PointRobot(2), {}, device="cpu", show_progress=False)
