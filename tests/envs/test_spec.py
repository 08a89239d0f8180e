"""Descriptions of robots from the environments that know them."""

from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from canter.envs import GymVecEnv, ObsComponents, RslRlAdapter, VecEnvWrapper, make_env
from canter.envs.spec import describe_env, describe_robot


class ManagerEnv:
    """The attributes that mjlab's and Isaac Lab's manager-based environments have in common, with 2 of 3 joints."""

    num_envs, num_actions, max_episode_length, device, step_dt, clip_actions = 2, 2, 10, "cpu", 0.02, 5.0

    def __init__(self, group="policy", gains="data"):
        names, shapes = ["base_lin_vel", "joint_pos"], [(3,), (4,)]
        cfgs = [
            SimpleNamespace(scale=2.0, clip=None, history_length=0),
            SimpleNamespace(clip=(-1.0, 1.0), history_length=2),
        ]
        self.observation_manager = SimpleNamespace(
            active_terms={group: names}, group_obs_term_dim={group: shapes}, _group_obs_term_cfgs={group: cfgs}
        )
        term = SimpleNamespace(_scale=torch.tensor([[0.25, 0.5]] * 2), _joint_names=["hip", "knee"])
        self.action_manager = SimpleNamespace(active_terms=["joint_pos"], get_term=lambda name: term)
        data = SimpleNamespace(default_joint_pos=torch.tensor([[0.123456789, -0.2, 0.3]] * 2))
        robot = SimpleNamespace(joint_names=["hip", "knee", "tail"], data=data)
        if gains == "data":
            data.joint_stiffness, data.joint_damping = torch.full((2, 3), 20.0), torch.full((2, 3), 0.5)
        else:
            parts = [SimpleNamespace(target="robot/knee", id=0), SimpleNamespace(target="robot/hip", id=1)]
            robot.spec = SimpleNamespace(actuators=parts)
            gain, bias = np.array([[30.0, 0], [20.0, 0]]), np.array([[0, -30.0, -0.3], [0, -20.0, -0.2]])
            self.sim = SimpleNamespace(mj_model=SimpleNamespace(actuator_gainprm=gain, actuator_biasprm=bias))
        self.scene = {"robot": robot}
        self.group = group

    @property
    def unwrapped(self):
        return self

    def get_observations(self):
        return {self.group: torch.zeros(2, 7)}

    def step(self, actions):
        return self.get_observations(), torch.zeros(2), torch.zeros(2, dtype=torch.bool), {}


@pytest.mark.parametrize("group", ["policy", "actor"])
def test_manager_based_environments_state_joints_gains_scales_and_terms(group):
    found = describe_env(RslRlAdapter(ManagerEnv(group)))
    robot = found["robot"]
    assert robot["control_period"] == 0.02
    assert robot["observation"] == [
        {"name": "base_lin_vel", "width": 3, "group": group, "scale": [2.0]},
        {"name": "joint_pos", "width": 4, "group": group, "clip": [-1.0, 1.0], "history": 2},
    ]
    assert robot["action"]["names"] == ["hip", "knee"]
    assert robot["action"]["scale"] == [0.25, 0.5]
    assert robot["action"]["default_pose"][0] == pytest.approx(0.123456789, abs=1e-8)  # not rounded to three decimals
    assert robot["action"]["stiffness"] == [20.0] * 2  # those of the joints that the actions move
    assert found["action_clip"] == [[-5.0, -5.0], [5.0, 5.0]]


def test_gains_come_from_the_model_where_the_robot_has_none():
    action = describe_env(RslRlAdapter(ManagerEnv(gains="model")))["robot"]["action"]
    assert (action["stiffness"], action["damping"]) == ([20.0, 30.0], [0.2, 0.3])  # hip, knee


@pytest.mark.parametrize("key", ["entity_name", "asset_name"])
def test_the_robot_is_the_entity_that_the_actions_move(key):
    env = ManagerEnv()
    env.scene = {"terrain": None, "cartpole": env.scene["robot"]}
    env.action_manager.get_term("joint_pos").cfg = SimpleNamespace(**{key: "cartpole"})
    assert describe_env(RslRlAdapter(env))["robot"]["action"]["default_pose"][1:] == pytest.approx([-0.2])


def test_poses_gains_and_scales_are_in_the_order_of_the_actions():
    env = ManagerEnv()
    env.scene["robot"].data.joint_stiffness = torch.tensor([[1.0, 2.0, 3.0]] * 2)
    parts = {
        "legs": SimpleNamespace(_scale=0.5, _joint_names=["knee", "hip"]),
        "tail": SimpleNamespace(_scale=torch.tensor([[0.1]] * 2), _joint_names=["tail"]),
    }
    env.action_manager = SimpleNamespace(active_terms=list(parts), get_term=parts.get)
    env.num_actions = 3
    action = describe_env(RslRlAdapter(env))["robot"]["action"]
    assert action["names"] == ["knee", "hip", "tail"]
    assert action["default_pose"] == pytest.approx([-0.2, 0.123456789, 0.3])
    assert action["stiffness"] == [2.0, 1.0, 3.0]
    assert action["scale"] == pytest.approx([0.5, 0.5, 0.1])


def test_effort_actions_have_no_gains():
    class JointEffortAction(SimpleNamespace): ...

    env = ManagerEnv(gains="model")
    term = JointEffortAction(**vars(env.action_manager.get_term("joint_pos")))
    env.action_manager.get_term = lambda name: term
    action = describe_env(RslRlAdapter(env))["robot"]["action"]
    assert (action["target"], action["names"], "stiffness" in action) == ("effort", ["hip", "knee"], False)


def base_ang_vel(env): ...


def joint_pos_rel(env, biased=False): ...


def of_mine(env, gain): ...


for function in (base_ang_vel, joint_pos_rel):
    function.__module__ = "mjlab.envs.mdp.observations"


def test_terms_of_the_groups_that_a_student_reads_say_what_they_are():
    noise = SimpleNamespace(n_min=-0.2, n_max=0.2, operation="add")
    asset = SimpleNamespace(name="robot", joint_ids=[2, 0])
    groups = {
        "actor": ["height"],
        "proprioception": ["gyro", "joints"],
        "goal": ["mine"],
    }
    shapes = {"actor": [(7,)], "proprioception": [(3,), (2,)], "goal": [(4,)]}
    cfgs = {
        "actor": [SimpleNamespace()],
        "proprioception": [
            SimpleNamespace(func=base_ang_vel, params={}, noise=noise, delay_min_lag=1, delay_max_lag=2),
            SimpleNamespace(func=joint_pos_rel, params={"biased": True, "asset_cfg": asset}),
        ],
        "goal": [SimpleNamespace(func=of_mine, params={"gain": 2.0, "asset": asset})],
    }

    class Student(ManagerEnv):
        def get_observations(self):
            return {name: torch.zeros(2, sum(s[0] for s in shape)) for name, shape in shapes.items()}

    env = Student()
    env.scene["robot"].body_names = ["robot/trunk", "robot/leg"]
    env.cfg = SimpleNamespace(events={"bias": SimpleNamespace(params={"bias_range": (-0.01, 0.02)})})
    env.observation_manager = SimpleNamespace(active_terms=groups, group_obs_term_dim=shapes, _group_obs_term_cfgs=cfgs)
    sets = {"student": ["proprioception", "goal"], "teacher": ["actor"]}
    adapted = RslRlAdapter(env, obs_groups=sets)
    robot = describe_robot(adapted)
    assert robot["obs_groups"] == ["proprioception", "goal"]
    gyro, joints, mine = robot["observation"]
    assert gyro["source"] == {"kind": "angular_velocity", "body": "trunk"}
    assert (gyro["unit"], gyro["delay"]) == ("rad/s", [0.02, 0.04])
    assert gyro["noise"] == {"distribution": "uniform", "low": -0.2, "high": 0.2, "operation": "add"}
    assert joints["source"]["joints"] == ["tail", "hip"]
    assert joints["source"]["offset"] == pytest.approx([0.3, 0.123456789])
    assert joints["noise"] == {"bias": [-0.01, 0.02]}
    assert mine["source"] == {"kind": "other", "function": f"{__name__}:of_mine", "parameters": {"gain": 2.0}}
    parts = ObsComponents(adapted, actor=["mine", "gyro_history"], history={"gyro": 3}, own_critic=False)
    assert (parts.num_obs, parts.num_privileged_obs) == (13, 18)  # 4 + 3 * 3 of 9 and the window
    seen = describe_robot(parts)["observation"]
    assert [(term["name"], term["width"], term.get("history")) for term in seen] == [
        ("mine", 4, None),
        ("gyro_history", 9, 3),
    ]
    assert seen[1]["source"] == {"kind": "angular_velocity", "body": "trunk"}
    whole = ObsComponents(adapted, actor=["goal"], own_critic=False)
    assert whole.obs_segments == {"goal": (4,)}


def test_a_robot_that_cannot_be_described_does_not_stop_a_checkpoint():
    env = ManagerEnv()
    env.scene = None
    with pytest.warns(UserWarning, match="the robot of RslRlAdapter could not be described"):
        found = describe_env(RslRlAdapter(env))
    assert found["robot"] == {}
    assert found["obs_space"]["shape"] == [7]


def test_spaces_without_a_description_leave_all_of_it_out():
    env = GymVecEnv([lambda: gymnasium.make("Pendulum-v1")])
    env.action_space = spaces.Text(3)
    with pytest.warns(UserWarning, match="GymVecEnv could not be described: a Text space has no description"):
        assert describe_env(env) == {}


def test_gymnasium_states_periods_actuators_and_terms():
    pytest.importorskip("mujoco")
    robot = describe_robot(make_env("HalfCheetah-v5"))
    assert robot["control_period"] == pytest.approx(0.05)
    assert robot["observation"] == [
        {"name": "qpos", "width": 8, "term": "qpos[1:]"},
        {"name": "qvel", "width": 9, "term": "qvel"},
    ]
    assert robot["action"]["names"] == ["bthigh", "bshin", "bfoot", "fthigh", "fshin", "ffoot"]
    assert describe_robot(make_env("CartPole-v1")) == {"control_period": 0.02}
    assert describe_robot(make_env("canter/Pendulum")) == {"control_period": 0.05}


def test_terms_are_left_out_where_a_wrapper_changed_the_observation():
    pytest.importorskip("mujoco")

    class Wider(VecEnvWrapper):
        def __init__(self, env):
            super().__init__(env)
            self.obs_space = spaces.Box(-1, 1, (18,))

    robot = describe_robot(Wider(make_env("HalfCheetah-v5")))
    assert "observation" not in robot
    assert robot["action"]["names"][0] == "bthigh"


def test_clipping_is_described_where_the_adapter_clips():
    pendulum = [lambda: gymnasium.make("Pendulum-v1")]
    assert describe_env(GymVecEnv(pendulum))["action_clip"] == [[-2.0], [2.0]]
    assert describe_env(GymVecEnv(pendulum, clip_actions=False))["action_clip"] is None
    assert describe_env(VecEnvWrapper(GymVecEnv(pendulum)))["action_clip"] == [[-2.0], [2.0]]
