"""Simulations of bundles: tasks by name, MuJoCo scenes, delay, noise, pushes, reports, refusals."""

import json
import math
import os
import select
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import canter
from canter.envs import GymVecEnv
from canter.export.bundle import export_bundle
from canter.export.runtime import BundleError, Policy, spec_hash
from canter.export.scene import MujocoScene, push
from canter.export.simulation import Disturbance, GymnasiumTask, make_task, simulate
from canter.modules import ActorCritic
from canter.runners.evaluation import InferencePolicy

gymnasium = pytest.importorskip("gymnasium")


def linear(width, actions, weight, bias=None):
    layer = nn.Linear(width, actions)
    layer.weight.data = torch.as_tensor(weight, dtype=torch.float32)
    layer.bias.data = torch.zeros(actions) if bias is None else torch.as_tensor(bias, dtype=torch.float32)
    return layer


def exported(folder, actor, width, actions, task=None, robot=None, clip=None, segments=None, group=None):
    policy = ActorCritic(width, width, actions, actor=actor, critic=nn.Linear(width, 1), obs_segments=segments).eval()
    info = {"config": {"run": {"task": task}}, "environment": {"robot": robot or {}, "obs_group": group}}
    acting = InferencePolicy(policy, info=info, action_bounds=clip)
    return acting, Policy(export_bundle(acting, folder, formats=("onnx",)).path)


@pytest.fixture(scope="module")
def pendulum(tmp_path_factory):
    """A linear controller of Pendulum-v1: torque = -2 sin - 0.5 velocity, clipped to 2."""
    bounds = (np.array([-2.0], np.float32), np.array([2.0], np.float32))
    folder = tmp_path_factory.mktemp("pendulum") / "b"
    return exported(folder, linear(3, 1, [[0.0, -2.0, -0.5]]), 3, 1, "Pendulum-v1", {"control_period": 0.05}, bounds)


def test_a_bundle_gets_the_return_of_the_policy_it_was_made_from(pendulum):
    acting, policy = pendulum
    report = simulate(policy, make_task(policy, None, seed=3), episodes=2)
    returns = []
    for episode in range(2):
        env, total = gymnasium.make("Pendulum-v1"), 0.0
        obs, _ = env.reset(seed=3 + episode)
        for _ in range(200):
            obs, reward, _, _, _ = env.step(acting.predict(obs))
            total += reward
        returns.append(total)
    assert report.returns == pytest.approx(returns, rel=1e-4)
    assert report.lengths == [200, 200]
    assert report.falls == 0
    assert report.summary()["mean_return"] == pytest.approx(np.mean(returns), rel=1e-4)
    assert 0 < report.step_median <= report.step_p99
    assert report.error_x is report.error_y is report.error_yaw is report.mean_velocity is None


class Recorded:
    """Observations 1, 2, 3, ...; an episode of five steps; keeps the actions."""

    physics = None

    def __init__(self):
        self.actions = []

    def reset(self, episode):
        self.step_number = 1
        return {"obs": np.full(1, 1.0, np.float32)}

    def step(self, action):
        self.actions.append(float(np.ravel(action)[0]))
        self.step_number += 1
        return {"obs": np.full(1, self.step_number, np.float32)}, 1.0, self.step_number == 6, False


def test_numbers_among_the_arguments_of_the_trained_environment_need_no_adapter(pendulum, monkeypatch):
    policy = pendulum[1]
    monkeypatch.setitem(policy.spec["training"], "env_kwargs", {"g": 5.0})
    task = make_task(policy, None, 0)
    assert isinstance(task, GymnasiumTask)
    assert task.env.unwrapped.g == 5.0
    assert make_task(policy, "Pendulum-v1", 0).env.unwrapped.g == 10.0
    monkeypatch.setitem(policy.spec["training"], "env_kwargs", {"g": 5.0, "render_mode": "rgb_array"})
    assert not isinstance(make_task(policy, None, 0), GymnasiumTask)


@pytest.fixture(scope="module")
def doubler(tmp_path_factory):
    return exported(tmp_path_factory.mktemp("doubler") / "b", linear(1, 1, [[2.0]]), 1, 1)[1]


def test_a_delay_applies_zeros_and_then_late_actions(doubler):
    task = Recorded()
    report = simulate(doubler, task, 1, Disturbance(delay=2))
    assert task.actions == [0.0, 0.0, 2.0, 4.0, 6.0]
    assert (report.returns, report.lengths, report.falls) == ([5.0], [5], 1)


def test_noise_is_added_to_observations_and_repeats_with_a_seed(doubler):
    runs = []
    for seed in (1, 1, 2):
        task = Recorded()
        simulate(doubler, task, 200, Disturbance(noise=0.1), seed)
        runs.append(np.array(task.actions).reshape(200, 5))
    assert np.array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])
    assert runs[0].mean(0) == pytest.approx([2, 4, 6, 8, 10], abs=0.06)
    assert runs[0].std(0) == pytest.approx([0.2] * 5, rel=0.2)


def test_wrong_disturbances_are_refused(doubler):
    for given in (Disturbance(delay=-1), Disturbance(noise=-1.0), Disturbance(push_interval=0.0)):
        with pytest.raises(ValueError, match="must not be negative"):
            simulate(doubler, Recorded(), 1, given)
    with pytest.raises(ValueError, match="pushes need MuJoCo's data"):
        simulate(doubler, Recorded(), 1, Disturbance(push=1.0))


def test_an_environment_with_other_widths_is_refused(pendulum):
    with pytest.raises(
        BundleError, match=r"observations are \{'obs': \(4,\)\}, but the bundle wants \{'obs': \(3,\)\}"
    ):
        make_task(pendulum[1], "CartPole-v1", 0)
    with pytest.raises(BundleError, match=r"observations are \{'obs': \(6,\)\}"):
        make_task(pendulum[1], "canter/PointRobot", 0)


def test_a_task_that_would_import_a_module_is_not_made_unasked(pendulum, tmp_path, monkeypatch):
    path = shutil.copytree(pendulum[1].bundle.path, tmp_path / "b")
    spec = json.loads((path / "policy.json").read_text())
    spec["training"]["task"] = "evil_module:Pendulum-v1"
    spec["sha256"] = spec_hash(spec)
    (path / "policy.json").write_text(json.dumps(spec))
    monkeypatch.setattr(gymnasium, "make", None)
    with pytest.raises(BundleError, match=r"'evil_module:Pendulum-v1', which is not made without asking"):
        make_task(Policy(path), None, 0)


def test_a_bundle_without_a_task_asks_for_one(doubler):
    with pytest.raises(BundleError, match="does not say on which task it was trained; name one: --task NAME"):
        make_task(doubler, None, 0)


def test_torch_native_tasks_are_simulated(tmp_path):
    from canter.envs import CartPole
    from canter.runners import OnPolicyRunner

    cfg = {"num_steps_per_env": 4, "policy": {"actor_hidden_dims": [4], "critic_hidden_dims": [4]}}
    runner = OnPolicyRunner(CartPole(2), cfg, None, "cpu", run_info={"task": "canter/CartPole"}, show_progress=False)
    runner.save(tmp_path / "model.pt")
    policy = Policy(export_bundle(canter.load(tmp_path / "model.pt"), tmp_path / "b", formats=("onnx",)).path)
    report = simulate(policy, make_task(policy, None, 0), 3)
    assert report.returns == [float(length) for length in report.lengths]
    assert report.falls == 3


class Grouped(gymnasium.Env):
    """Groups of observations, of which the actor's is a dict with a Discrete part; actions that start at 5."""

    observation_space = gymnasium.spaces.Dict(
        {
            "policy": gymnasium.spaces.Dict(
                {"gear": gymnasium.spaces.Discrete(3), "speed": gymnasium.spaces.Box(-9, 9, (2,), np.float64)}
            ),
            "critic": gymnasium.spaces.Box(-9, 9, (7,)),
        }
    )
    action_space = gymnasium.spaces.Discrete(2, start=5)
    taken: list = []

    def reset(self, seed=None, options=None):
        return {"policy": {"gear": 2, "speed": np.array([0.5, -1.5])}, "critic": np.zeros(7, np.float32)}, {}

    def step(self, action):
        self.taken.append(action)
        return self.reset()[0], 1.0, True, False, {}


def test_groups_parts_and_offsets_are_those_of_the_adapters(tmp_path):
    from canter.envs.wrappers import FlattenObs
    from canter.runners import OnPolicyRunner

    gymnasium.register("Grouped-v0", Grouped)
    try:
        cfg = {"num_steps_per_env": 4, "policy": {"actor_hidden_dims": [4], "critic_hidden_dims": [4]}}
        env = GymVecEnv([Grouped] * 2)
        runner = OnPolicyRunner(env, cfg, None, "cpu", run_info={"task": "Grouped-v0"}, show_progress=False)
        runner.save(tmp_path / "model.pt")
        policy = Policy(export_bundle(canter.load(tmp_path / "model.pt"), tmp_path / "b", formats=("onnx",)).path)
        assert policy.spec["obs_group"] == "policy"
        task = make_task(policy, None, 0)
        assert isinstance(task, GymnasiumTask)
        assert task.reset(0)["obs"].tolist() == FlattenObs(env).reset()[0][0].tolist() == [0.0, 0.0, 1.0, 0.5, -1.5]
        Grouped.taken.clear()
        simulate(policy, task, 1)
        assert Grouped.taken == [int(policy.predict(task.reset(0)))] == [5 + int(policy(task.reset(0)))]
        text = (tmp_path / "b" / "README.md").read_text()
        assert "Actions of the files are numbered from 0, those of the environment from 5:" in text
    finally:
        gymnasium.registry.pop("Grouped-v0")


# ---------------------------------------------------------------------- MuJoCo scenes
mujoco = pytest.importorskip("mujoco")

WALKER = """
<mujoco>
  <option timestep="0.005" gravity="0 0 {gravity}"/>
  <worldbody>
    <body name="base" pos="0 0 1">
      <freejoint/>
      <geom type="box" size="0.2 0.1 0.05" mass="1"/>
      <body><joint name="hip" axis="0 1 0"/><geom pos="0 0 -0.2" size="0.05" mass="0.1"/></body>
      <body><joint name="knee" axis="0 1 0"/><geom pos="0 0 0.2" size="0.05" mass="0.1"/></body>
    </body>
  </worldbody>
  <actuator>{actuators}</actuator>
  <sensor><jointpos name="hip_sensor" joint="hip"/></sensor>
</mujoco>
"""
MOTORS = '<motor name="b" joint="knee"/><motor name="a" joint="hip"/>'
SERVOS = '<position name="b" joint="knee" kp="20"/><position name="a" joint="hip" kp="20"/>'
SEGMENTS = {"base_lin_vel": (3,), "base_ang_vel": (3,), "projected_gravity": (3,), "joint_pos": (2,), "joint_vel": (2,)}
SEGMENTS |= {"actions": (2,), "command": (3,)}
TERMS = [{"name": name, "width": shape[0]} for name, shape in SEGMENTS.items()]
TERMS[3] |= {"scale": [10.0], "clip": [-0.2, 0.2]}
JOINTS = {"names": ["hip", "knee"], "target": "position", "scale": [0.5], "default_pose": [0.1, -0.3]}
GAINS = {"stiffness": [20.0, 30.0], "damping": [0.5, 0.25]}


@pytest.fixture(scope="module")
def walker(tmp_path_factory):
    """A policy that always commands the actions (0.2, -0.4)."""
    robot = {"control_period": 0.02, "observation": TERMS, "action": JOINTS | GAINS}
    actor = linear(18, 2, np.zeros((2, 18)), [0.2, -0.4])
    folder = tmp_path_factory.mktemp("walker") / "b"
    return exported(folder, actor, 18, 2, robot=robot, segments=SEGMENTS)[1]


def scene(folder, policy, actuators=MOTORS, gravity=0.0, **options):
    path = folder / "scene.xml"
    path.write_text(WALKER.format(actuators=actuators, gravity=gravity))
    options = {"command": (0.5, 0.0, 0.1), "reset_noise": 0.0, "seconds": 0.2, **options}
    return MujocoScene(path, policy, seed=0, **options)


def test_observations_are_the_quantities_of_the_scene(walker, tmp_path):
    made = scene(tmp_path, walker)
    assert made.substeps == 4
    obs = made.reset(0)["obs"]
    assert obs.tolist() == pytest.approx([0] * 6 + [0, 0, -1] + [0, 0] + [0, 0] + [0, 0] + [0.5, 0, 0.1])
    # On its side: a turn of 90 degrees about x, 2 m/s along the world's y, joints off their default pose.
    made.data.qpos[3:7] = [math.sqrt(0.5), math.sqrt(0.5), 0, 0]
    made.data.qvel[:6] = [0, 2, 0, 0, 0, 0.7]
    made.data.qpos[made.joint_pos_at] = [0.15, 0.0]
    obs = made.observe()["obs"]
    assert obs[:3].tolist() == pytest.approx([0, 0, -2], abs=1e-6)
    assert obs[3:6].tolist() == pytest.approx([0, 0, 0.7])
    assert obs[6:9].tolist() == pytest.approx([0, -1, 0], abs=1e-6)
    assert obs[9:11].tolist() == pytest.approx([0.5, 2.0])  # 10 * 0.05, and 10 * 0.3 clipped at 0.2


def test_actions_reach_actuators_by_joint_name_as_targets_or_torques(walker, tmp_path):
    made = scene(tmp_path, walker, SERVOS)
    assert made.are_servos
    made.reset(0)
    made.step([0.2, -0.4])
    assert made.data.ctrl.tolist() == pytest.approx([-0.3 - 0.2, 0.1 + 0.1])  # knee first in this scene
    made = scene(tmp_path, walker, MOTORS)
    made.substeps = 1
    made.reset(0)
    made.step([0.2, -0.4])
    assert made.data.ctrl.tolist() == pytest.approx([30.0 * -0.2, 20.0 * 0.1])  # stiffness * (target - pose)


def test_a_scene_reports_tracking_and_falls(walker, tmp_path):
    report = simulate(walker, scene(tmp_path, walker, SERVOS), 2)
    assert report.lengths == [10, 10]  # 0.2 s at 0.02 s
    assert report.falls == 0
    made = scene(tmp_path, walker, SERVOS)
    made.start[3:7] = [math.cos(1.2), math.sin(1.2), 0, 0]  # tilted by 137 degrees
    report = simulate(walker, made, 1)
    assert (report.falls, report.lengths) == (1, [1])
    still = scene(tmp_path, walker, SERVOS, command=(3.0, 0.0, 4.0))
    still.velocity = lambda: np.zeros(3)
    found = simulate(walker, still, 1)
    assert (found.error_x, found.error_y, found.error_yaw) == pytest.approx((3.0, 0.0, 4.0))  # m/s, m/s, rad/s
    assert math.isnan(report.returns[0])
    assert "mean_return" not in report.summary()
    json.dumps(report.summary(), allow_nan=False)


IMU = {"type": "site", "name": "imu", "body": "base", "position": [0.1, 0.0, 0.2], "orientation": [0.0, 0.0, 0.0, 1.0]}
SOURCES = [
    {"name": "speed", "width": 3, "source": {"kind": "sensor", "sensor": "velocimeter", "name": "v", "object": IMU}},
    {"name": "turn", "width": 3, "source": {"kind": "sensor", "sensor": "gyro", "name": "g", "object": IMU}},
    {"name": "up", "width": 3, "source": {"kind": "gravity", "body": "base"}},
    {
        "name": "joints",
        "width": 2,
        "source": {"kind": "joint_position", "joints": ["knee", "hip"], "offset": [1.0, 0.5], "relative": True},
        "delay": [0.02, 0.04],
    },
]


@pytest.fixture(scope="module")
def sensing(tmp_path_factory):
    """A policy with described sources and a torque for each joint of the walker."""
    physics = {"timestep": 0.002, "integrator": "implicitfast", "cone": "elliptic", "impratio": 1.0}
    joints = [{"name": "hip", "effort": 3.0}, {"name": "knee", "effort": 100.0}]
    robot = {"control_period": 0.02, "observation": SOURCES, "action": JOINTS | GAINS, "physics": physics}
    actor = linear(11, 2, np.zeros((2, 11)), [0.2, -0.4])
    folder = tmp_path_factory.mktemp("sensing") / "b"
    return exported(folder, actor, 11, 2, robot=robot | {"joints": joints})[1]


def test_sources_are_read_at_the_site_that_the_bundle_states(sensing, tmp_path):
    made = scene(tmp_path, sensing)
    made.reset(0)
    made.data.qvel[:6] = [1.0, 0, 0, 0, 0, 2.0]  # 1 m/s along x, 2 rad/s about z
    made.data.qpos[7:] = [0.25, 3.0]
    made.mujoco.mj_forward(made.model, made.data)
    obs = made.observe()["obs"]
    # The site is 0.1 m in front and turned by 180 degrees: v = (1, 2 * 0.1) turns into (-1, -0.2).
    assert obs[:3].tolist() == pytest.approx([-1.0, -0.2, 0.0], abs=1e-6)
    assert obs[3:6].tolist() == pytest.approx([0, 0, 2.0], abs=1e-6)
    assert obs[6:9].tolist() == pytest.approx([0, 0, -1.0])
    assert obs[9:].tolist() == pytest.approx([-0.3 - 1.0, 0.1 - 0.5])  # those of the reset: one period late
    assert made.observe()["obs"][9:].tolist() == pytest.approx([3.0 - 1.0, 0.25 - 0.5])


def test_joints_without_actuators_are_driven_by_the_bundles_gains_within_their_efforts(sensing, tmp_path):
    made = scene(tmp_path, sensing, actuators="")
    made.substeps = 1
    made.reset(0)
    made.step([2.0, -0.4])
    assert made.data.qfrc_applied[6:].tolist() == pytest.approx([3.0, 30.0 * -0.2])  # 20 * 1.0 is above the limit
    notes = " ".join(made.notes())
    assert "the scene has no actuators" in notes
    assert "the scene's timestep is 0.005, the policy was trained with 0.002" in notes
    assert "cone is pyramidal" in notes
    assert "impratio" not in notes


def test_servos_get_the_bundles_gains(sensing, tmp_path):
    made = scene(tmp_path, sensing, SERVOS)
    assert made.model.actuator_gainprm[:, 0].tolist() == [30.0, 20.0]  # knee, hip
    assert made.model.actuator_biasprm[:, 1:3].tolist() == [[-30.0, -0.25], [-20.0, -0.5]]
    assert any("gains of the scene's servos" in note for note in made.notes())


def test_pushes_add_a_horizontal_velocity(walker, tmp_path):
    made = scene(tmp_path, walker)
    made.reset(0)
    push(made.physics, 0.5, np.random.default_rng(0))
    assert np.hypot(*made.data.qvel[:2]) == pytest.approx(0.5)
    assert made.data.qvel[2:].tolist() == [0] * 6


def test_keys_change_the_command(walker, tmp_path):
    made = scene(tmp_path, walker)
    for key in (265, 265, 262, 46, 999):
        made.press(key)
    assert made.command.tolist() == pytest.approx([0.7, -0.1, 0.0])
    made.press(32)
    assert made.command.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals")
def test_keys_of_a_terminal_drive_a_scene_until_q(walker, tmp_path):
    import pty
    import termios

    scene(tmp_path, walker, SERVOS)
    ours, theirs = pty.openpty()
    args = ["--mujoco", tmp_path / "scene.xml", "--command", "0", "0", "0", "--seconds", "600", "--keys"]
    args += ["--reset-noise", "0", "--report", tmp_path / "report.json"]
    command = [sys.executable, "-m", "canter.cli", "play", walker.bundle.path, *args]
    headless = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "WAYLAND_DISPLAY")}
    process = subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, text=True, env=headless)
    while not select.select([process.stdout], [], [], 0.5)[0]:  # keys that come before the simulation are dropped
        os.write(ours, b" ")
    assert process.stdout.readline().split() == ["command", "0.0,", "0.0,", "0.0"]
    os.write(ours, b"\x1b[A\x1b[A\x1b[B\x1b[A\x1b[D,x")  # forward, turn left, to the left, and a key without meaning
    lines = []
    while not lines or "0.2, 0.1, 0.1" not in lines[-1]:
        lines.append(process.stdout.readline())
        assert lines[-1].startswith("  command"), "".join(lines)
    os.write(ours, b"q")
    process.communicate(timeout=60)
    assert process.returncode == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["error_x"] > 0
    assert report["lengths"][0] < 600 / 0.02
    assert termios.tcgetattr(theirs)[3] & termios.ICANON, "the terminal reads lines again"
    refused = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=headless)
    assert refused.returncode == 2
    assert "--keys reads keys from a terminal, and standard input is none" in refused.stderr
    piped = subprocess.run(command, input="\x1b[A\x1b[Aq", capture_output=True, text=True, env=headless)
    assert piped.returncode == 0
    assert "command     0.2, 0.0, 0.0" in piped.stdout


def test_other_terms_sensors_ranges_and_histories(tmp_path):
    segments = {"angle": (1,), "past": (6,)}
    terms = [{"name": "angle", "width": 1}, {"name": "past", "width": 6, "history": 3, "term": "qvel[6:]"}]
    robot = {"control_period": 0.01, "observation": terms, "action": JOINTS}
    policy = exported(tmp_path / "b", linear(7, 2, np.zeros((2, 7))), 7, 2, robot=robot, segments=segments)[1]
    with pytest.raises(BundleError, match=r"nothing called 'angle' for the segment 'angle'; --terms '\{angle: TERM\}'"):
        scene(tmp_path, policy)
    made = scene(tmp_path, policy, terms={"angle": "hip_sensor"})
    made.reset(0)
    assert made.observe()["obs"].tolist() == pytest.approx([0.1] + [0] * 6)
    made.data.qvel[6:] = [1.0, 2.0]
    assert made.observe()["obs"][1:].tolist() == pytest.approx([0, 0, 0, 0, 1, 2])  # oldest first
    with pytest.raises(BundleError, match="no segment 'other'"):
        scene(tmp_path, policy, terms={"angle": "hip_sensor", "other": "qpos"})
    with pytest.raises(BundleError, match=r"'angle' is 1 wide, but 'qpos\[0:3\]' has 3 values"):
        scene(tmp_path, policy, terms={"angle": "qpos[0:3]"})
    with pytest.raises(BundleError, match="is not a term"):
        scene(tmp_path, policy, terms={"angle": "__import__('os')"})


def test_scenes_that_do_not_fit_are_refused(walker, doubler, tmp_path):
    with pytest.raises(BundleError, match=r"the segment 'command' is 3 wide, .*; give the command: --command"):
        scene(tmp_path, walker, command=())
    with pytest.raises(BundleError, match="no multiple of the scene's time step"):
        scene(tmp_path, walker, period=0.012)
    with pytest.raises(BundleError, match="no actuator or actuated joint 'hip'"):
        scene(tmp_path, walker, '<motor name="b" joint="knee"/>')
    with pytest.raises(BundleError, match="does not state its control period; give it: --period"):
        scene(tmp_path, doubler)
    with pytest.raises(BundleError, match="has 1 actions without names, the scene 2 actuators"):
        scene(tmp_path, doubler, period=0.02)
    with pytest.raises(FileNotFoundError, match=r"there is no scene .*nothing.xml; give an XML file of MuJoCo"):
        MujocoScene(tmp_path / "nothing.xml", walker)


def test_gymnasium_and_mujoco_tasks_run_where_torch_cannot_be_imported(pendulum):
    code = """
import sys
sys.modules["torch"] = None
from canter.export.runtime import Policy
from canter.export.simulation import make_task, simulate
policy = Policy(sys.argv[1])
print(simulate(policy, make_task(policy, None, 3), 1).returns[0])
"""
    command = [sys.executable, "-c", code, str(pendulum[1].bundle.path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    here = simulate(pendulum[1], make_task(pendulum[1], None, 3), 1).returns[0]
    assert float(done.stdout) == pytest.approx(here, rel=1e-6)
