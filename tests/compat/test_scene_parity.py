"""What a MuJoCo scene reads by a bundle's description, compared with mjlab on the same physics states."""

import numpy as np
import pytest

from canter.compat.scene_parity import check_scene
from canter.envs import make_env
from canter.envs.spec import describe_env

SMALL = {"scene.terrain.terrain_generator.num_rows": 1, "scene.terrain.terrain_generator.num_cols": 1}


pytest.importorskip("mjlab", reason="needs mjlab: pip install 'canter[mjlab]'")


@pytest.fixture(scope="module")
def motion(tmp_path_factory):
    """A motion of the G1 that sways and turns."""
    import mujoco
    from mjlab.asset_zoo.robots import get_g1_robot_cfg

    model = get_g1_robot_cfg().spec_fn().compile()
    data, frames = mujoco.MjData(model), []
    for step in range(60):
        data.qpos[:7] = [0.01 * step, 0.0, 0.8, np.cos(0.01 * step), 0.0, 0.0, np.sin(0.01 * step)]
        data.qpos[7:] = 0.1 * np.sin(0.1 * step + np.arange(model.nq - 7))
        mujoco.mj_forward(model, data)
        frames.append((data.qpos[7:].copy(), data.xpos[1:].copy(), data.xquat[1:].copy()))
    joints, positions, orientations = (np.stack(part) for part in zip(*frames, strict=True))
    still = np.zeros_like(positions)
    path = tmp_path_factory.mktemp("motion") / "motion.npz"
    velocities = {"joint_vel": np.gradient(joints, axis=0) * 50, "body_lin_vel_w": still, "body_ang_vel_w": still}
    np.savez(path, fps=[50], joint_pos=joints, body_pos_w=positions, body_quat_w=orientations, **velocities)
    return {"commands.motion.motion_file": str(path)}


def stand_near_the_origin(env):
    """Move the robots to the tile nearest to the origin: at 24 m from it, 32-bit positions are 2e-6 apart."""
    terrain = env.simulator.scene.terrain
    if getattr(terrain, "terrain_origins", None) is not None:
        terrain.terrain_types[:] = terrain.terrain_origins[0].norm(dim=-1).argmin()
        terrain.env_origins[:] = terrain.terrain_origins[terrain.terrain_levels, terrain.terrain_types]


def bundle_spec(env):
    """The entries of a policy.json that a scene needs."""
    robot = describe_env(env)["robot"]
    first = 0
    for segment in robot["observation"]:
        segment["first"] = first
        first += segment["width"]
    ports = {"inputs": [{"name": "obs", "shape": [first]}], "outputs": [{"shape": [env.num_actions]}]}
    return {**robot, **ports, "action": {**robot["action"], "kind": "continuous"}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "options", "names"),
    [
        ("Velocity-Flat-Unitree-Go1", {}, ["base_lin_vel", "base_ang_vel", "projected_gravity", "joint_pos"]),
        ("Velocity-Flat-Unitree-G1", {}, ["base_lin_vel", "joint_vel", "actions", "command"]),
        ("Velocity-Rough-Unitree-Go1", SMALL, ["base_lin_vel", "height_scan"]),
        ("Tracking-Flat-Unitree-G1", "motion", ["command", "motion_anchor_pos_b", "motion_anchor_ori_b", "joint_pos"]),
    ],
)
def test_scene_and_simulator_agree_on_every_segment(task, options, names, request):
    options = request.getfixturevalue("motion") if options == "motion" else options
    env = make_env(f"mjlab/Mjlab-{task}", "cpu", 2, seed=1, env_kwargs=options)
    stand_near_the_origin(env)
    spec = bundle_spec(env)
    checked = check_scene(env, spec)
    assert checked is not None
    found = checked["segments"]
    assert set(names) <= set(found) == {segment["name"] for segment in spec["observation"]}
    assert all(difference is not None and difference < 1e-6 for difference in found.values()), found
    terms = env.simulator.observation_manager._group_obs_term_cfgs["actor"]
    assert any(term.noise is not None for term in terms)  # the noise of the training is back
    # A description that is wrong is found out: the base's origin instead of the site, another order of joints.
    wrong = {**spec, "observation": [dict(segment) for segment in spec["observation"]]}
    by_name = {segment["name"]: segment for segment in wrong["observation"]}
    body = by_name["base_lin_vel"]["source"]["object"]["body"]
    by_name["base_lin_vel"]["source"] = {"kind": "linear_velocity", "body": body}
    joints = by_name["joint_pos"]["source"]
    by_name["joint_pos"]["source"] = {**joints, "joints": joints["joints"][::-1]}
    found = check_scene(env, wrong, states=4)["segments"]
    assert found["base_lin_vel"] > 1e-3
    assert found["joint_pos"] > 1e-2
    env.close()
