"""The course by hand, and a policy of sub-policies on it."""

import math
import runpy
from pathlib import Path

import pytest
import torch

from canter.envs.torch_envs.tasks import KINDS, Course
from canter.modules.build import build_actor_critic
from canter.runners import OnPolicyRunner
from canter.runners.evaluation import InferencePolicy

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "course.py"


def put(env, **values):
    state = env.get_state()
    for name, value in values.items():
        state["state"][name] = torch.tensor(value, dtype=torch.float32).expand_as(state["state"][name]).clone()
    env.set_state(state)


def test_open_ground_by_hand():
    env = Course(1, segments=("flat",), action_scale=0.5)
    put(env, position=[[0.0, 0.1]], velocity=[[1.0, 0.0]], command=[[1.0]])
    record = env.step(torch.tensor([[0.5, -0.25]]))
    # force 8 * 0.5 * action = (2, -1); friction 1 N per m/s; 0.05 s
    vx, vy = 1.0 + 0.05 * (2.0 - 1.0), 0.05 * -1.0
    y = 0.1 + 0.05 * vy
    obs = record.obs[0]
    assert obs[:2].tolist() == pytest.approx([2 * vx, 2 * vy])
    assert obs[9].item() == 2.0
    assert obs[12].item() == pytest.approx(y)
    assert obs[13:15].tolist() == [0.5, -0.25]
    reward = math.exp(-8 * 0.05**2) + math.exp(-20 * y**2) - 0.02 * (0.25**2 + 0.125**2)
    assert record.reward.item() == pytest.approx(reward, rel=1e-5)


def test_mud_holds_a_weak_push_and_lets_a_strong_one_through():
    env = Course(2, segments=("mud",), action_scale=1.0)
    put(env, velocity=[[0.0, 0.0]] * 2)
    speeds = env.step(torch.tensor([[0.8, 0.0], [1.0, 0.0]])).obs[:, 0] / env.lin_vel_scale
    assert speeds.tolist() == pytest.approx([0.0, 0.05 * (8.0 - 7.0)])  # 6.4 N are less than 7


def test_the_beam_pulls_outwards_and_ends_the_episode_at_its_edge():
    env = Course(3, segments=("beam",))
    put(env, position=[[0.0, 0.1], [0.0, 0.19], [0.0, -0.19]], velocity=[[0.0, 0.0], [0.0, 0.3], [0.0, 0.3]])
    put(env, wind=[[0.5]] * 3)
    record = env.step(torch.zeros(3, 2))
    assert record.final_obs[0, 1].item() == pytest.approx(2.0 * 0.05 * (25 * 0.1 + 0.5))
    assert record.terminated.tolist() == [False, True, False]
    assert record.reward[1] == -10.0


def test_obstacles_are_announced_just_before_they_begin_and_until_they_end():
    env = Course(6)  # flat, mud from 3 to 6, flat, beam from 9 to 12, flat
    put(env, position=[[2.7, 0.0], [2.9, 0.0], [5.9, 0.0], [6.1, 0.0], [8.9, 0.0], [11.95, 0.0]], wind=[[0.25]] * 6)
    blocks = env.get_observations()[0][:, 15:]
    assert blocks[:, 1:6].tolist() == [
        [0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0],
        [0, 1, 0, 0, 0],
        [0, 0, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 0, 0],
    ]
    assert blocks[:, 0].tolist() == pytest.approx([0.3, 0.1, 0.1, 2.9, 0.1, 0.05], abs=1e-5)
    assert blocks[:, 6:].tolist()[4] == pytest.approx([0.2, 0.25])
    assert blocks[:4, 6:].abs().max() == 0


def test_only_a_course_of_several_kinds_has_an_end():
    whole, endless = Course(1), Course(1, segments=("flat",))
    for env in (whole, endless):
        put(env, position=[[14.99, 0.0]], velocity=[[1.0, 0.0]])
    assert whole.step(torch.zeros(1, 2)).terminated.item()
    assert not endless.step(torch.zeros(1, 2)).terminated.item()


def test_unknown_ground_is_refused():
    with pytest.raises(ValueError, match=r"kinds flat, mud, beam, got \['flat', 'lava'\]"):
        Course(1, segments=("flat", "lava"))
    with pytest.raises(ValueError, match="got \\[\\]"):
        Course(1, segments=())


def train_skills(folder, iterations):
    for kind in KINDS:
        policy = {"actor_hidden_dims": [8], "critic_hidden_dims": [8]}
        policy |= {"class_name": "ActorCriticRecurrent", "rnn_hidden_size": 4} if kind == "beam" else {}
        cfg = {"seed": 1, "num_steps_per_env": 8, "save_interval": 0, "policy": policy}
        info = {"control": {"action_scale": 1.0}, "normalization": {"obs_scales": {"lin_vel": 2.0}}}
        env = Course(4, segments=(kind,), action_scale=1.0)
        runner = OnPolicyRunner(env, cfg, folder / kind, "cpu", run_info=info, show_progress=False)
        runner.learn(iterations)
        runner.close()


def test_trained_skills_are_switched_smoothed_commanded_and_reset(tmp_path):
    train_skills(tmp_path, 1)
    env = Course(6, seed=0)
    settings = {
        "sub_policy_paths": [str(tmp_path / kind) for kind in KINDS],
        "cmd_vel_mapping": {"1": 0.5, "2": [0.3, 0.4]},
        "action_smoothing_buffer_len": 4,
        "env_action_scale": env.action_scale,
    }
    with pytest.warns(UserWarning, match=r"obstacles \[3, 4\]"):
        policy = build_actor_critic(env, "ActorCriticFieldMutex", settings)
    acting = InferencePolicy(policy)
    shares, memories = [], []
    for x in (2.5, 2.5, 4.0, 4.0, 4.0, 4.0, 10.0, 10.0, 10.0, 10.0):
        put(env, position=[[x, 0.0]] * 6)
        acting(env.get_observations()[0])
        shares.append(acting.hidden["selections"].mean((1, 2))[0].tolist())
        memories.append(bool((acting.hidden["memory_a_2"] != 0).any()))
    assert shares[1:6] == [[1, 0, 0], [0.75, 0.25, 0], [0.5, 0.5, 0], [0.25, 0.75, 0], [0, 1, 0]]
    assert memories == [False] * 6 + [True] * 4
    drawn = acting.hidden["velocities"][:, 0, 0, 2]
    assert ((drawn >= 0.3) & (drawn <= 0.4)).all()


@pytest.mark.slow
def test_the_course_is_driven_by_the_mutex_and_by_no_skill_alone(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARK.parent)  # as for a script that is run
    result = runpy.run_path(str(BENCHMARK))["main"](
        ["--out", str(tmp_path / "x.json"), "--plot", str(tmp_path / "x.png")]
    )
    assert result["arrivals"]["mutex"][0] > 0.95
    assert max(share for name, (share, _) in result["arrivals"].items() if name.endswith("alone")) < 0.6
    assert (tmp_path / "x.png").stat().st_size > 20_000
    assert str(tmp_path) not in (tmp_path / "x.json").read_text()
