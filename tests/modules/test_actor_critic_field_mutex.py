"""Choosing, smoothing, overriding and resetting sub-policies, with actions that are known numbers."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from no_host_sync import NoHostSync

from canter.algorithms.teacher import Teacher
from canter.modules.actor_critic_field_mutex import ActorCriticClimbMutex, ActorCriticFieldMutex
from canter.modules.actor_critic_recurrent import ActorCriticRecurrent
from canter.modules.normalizer import EmpiricalNormalization
from canter.runners.evaluation import InferencePolicy

spec = importlib.util.spec_from_file_location("mutex_runs", Path(__file__).parent / "mutex_runs.py")
runs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(runs)
SHAPE = (runs.NUM_OBS, runs.NUM_OBS, runs.NUM_ACTIONS)
pytestmark = pytest.mark.filterwarnings("ignore:obstacles .* have no sub-policy")


@pytest.fixture
def paths(tmp_path):
    """Five sub-policies; the action of number i is i + 1."""
    return [runs.write_run(tmp_path / str(i), runs.constant_policy(i + 1.0)) for i in range(5)]


@pytest.fixture
def recurrent_paths(tmp_path):
    """Three sub-policies with memories."""
    torch.manual_seed(0)
    made = [runs.constant_policy(0.0, ActorCriticRecurrent, **runs.RNN) for _ in range(3)]
    return [runs.write_run(tmp_path / f"r{i}", policy) for i, policy in enumerate(made)]


def made(paths, cls=ActorCriticFieldMutex, **settings):
    return cls(*SHAPE, None, sub_policy_paths=paths, obs_segments=runs.SEGMENTS, **settings)


def numbers(policy, obs):
    return policy.get_policy_selection(obs).int().argmax(-1).tolist()


def test_every_sub_policy_normalises_by_its_own_statistics(tmp_path):
    copies_the_first = runs.constant_policy(0.0)
    copies_the_first.actor[0].weight.data[:, 0] = 1.0
    copies_the_first.obs_normalizer = EmpiricalNormalization(runs.NUM_OBS)
    copies_the_first.obs_normalizer._mean.fill_(7.0)
    paths = [runs.write_run(tmp_path / str(i), p) for i, p in enumerate([copies_the_first, runs.constant_policy(2.0)])]
    obs = runs.observation([0, 1])
    obs[:, 0] = 9.02
    assert made(paths).act_inference(obs)[:, 0].tolist() == pytest.approx([2.0, 2.0], abs=1e-5)  # 2.02 / (1 + eps)


def test_other_components_can_choose(paths, tmp_path):
    layout = {"ahead": (3,), "rest": (53,)}
    policy = ActorCriticFieldMutex(*SHAPE, None, sub_policy_paths=paths[:3], obs_segments=layout, selection="ahead")
    obs = torch.zeros(2, runs.NUM_OBS)
    obs[1, 2] = 1.0
    assert numbers(policy, obs) == [0, 2]
    assert policy.last_action_at is None
    assert policy.recover_last_action(obs, policy.get_policy_selection(obs)) is obs  # no such component


def test_velocities_are_numbers_or_ranges_and_only_finished_episodes_get_new_ones(paths):
    torch.manual_seed(0)
    policy = made(paths, cmd_vel_mapping={"0": 0.5, 1: (1.0, 2.0), 2: [3.0, 4.0]})  # JSON has texts and lists
    current = policy.cmd_vel_current
    assert set(current) == {0, 1, 2}
    assert current[0] == 0.5
    assert 1 <= current[1] <= 2
    assert 3 <= current[2] <= 4
    policy.act_inference(runs.observation([0] * 6))
    before = {i: v.clone() for i, v in policy.cmd_vel_current.items()}
    assert torch.equal(before[1], torch.full((6,), current[1]))  # one for all environments at first
    dones = torch.tensor([0, 1, 0, 1, 1, 0])  # integers, as some simulators give them
    policy.resample_cmd_vel_current(dones)
    after = policy.cmd_vel_current
    assert torch.equal(after[0], before[0])
    for i, low in ((1, 1.0), (2, 3.0)):
        assert torch.equal(after[i][dones == 0], before[i][dones == 0])
        fresh = after[i][dones == 1]
        assert (fresh != before[i][dones == 1]).all()
        assert fresh.unique().numel() == 3  # one each
        assert ((low <= fresh) & (fresh <= low + 1)).all()


def test_resampling_for_all_is_one_number_again(paths):
    policy = made(paths, cmd_vel_mapping={1: (1.0, 2.0)})
    policy.act_inference(runs.observation([0] * 3))
    policy.reset(torch.tensor([True, False, False]))
    assert policy.cmd_vel_current[1].shape == (3,)
    policy.reset()
    assert isinstance(policy.cmd_vel_current[1], float)


def test_another_position_can_be_the_command(paths):
    policy = made(paths, cmd_vel_mapping={1: 0.5}, command="proprioception[0]")
    obs = runs.observation([1])
    assert policy.override_cmd_vel(obs, policy.get_policy_selection(obs))[0, 0] == 1.0


def test_actions_are_averaged_over_the_last_choices(paths):
    policy = made(paths, action_smoothing_buffer_len=2)
    assert policy.action_smoothing_buffer is None
    given = [policy.act_inference(runs.observation([block]))[0, 0].item() for block in (0, 0, 1, 1, 3)]
    assert given == [1.0, 1.0, 1.5, 2.0, 3.0]  # the first is not scaled down
    assert policy.action_smoothing_buffer.shape == (2, 1, 5)
    assert policy.action_smoothing_buffer[:, 0].tolist() == [[0, 1, 0, 0, 0], [0, 0, 0, 1, 0]]


def test_a_new_episode_is_not_averaged_with_the_one_before(paths):
    policy = made(paths, action_smoothing_buffer_len=4)
    for _ in range(4):
        policy.act_inference(runs.observation([0, 0]))
    policy.reset(torch.tensor([True, False]))
    assert policy.act_inference(runs.observation([4, 4]))[:, 0].tolist() == [5.0, 0.75 * 1.0 + 0.25 * 5.0]


def memories(policy):
    return [sub.memory_a.state[:, 0, 0].abs().sum(-1) > 0 for sub in policy.submodules]


@pytest.mark.parametrize("setting", ["all", True])
def test_memories_that_are_not_among_the_last_choices_are_zeroed(recurrent_paths, setting):
    policy = made(recurrent_paths, reset_non_selected=setting, action_smoothing_buffer_len=2)
    policy.act_inference(runs.observation([0, 1, 2]))
    assert [m.tolist() for m in memories(policy)] == [[True, False, False], [False, True, False], [False, False, True]]
    policy.act_inference(runs.observation([1, 1, 0]))  # the earlier choice is still averaged in, and kept
    assert [m.tolist() for m in memories(policy)] == [[True, False, True], [True, True, False], [False, False, True]]
    policy.act_inference(runs.observation([1, 1, 0]))
    assert [m.tolist() for m in memories(policy)] == [[False, False, True], [True, True, False], [False, False, False]]


def test_when_skill_keeps_the_first_and_all_while_the_first_acts(recurrent_paths):
    policy = made(recurrent_paths, reset_non_selected="when_skill")
    policy.act_inference(runs.observation([0, 1, 2]))
    assert [m.tolist() for m in memories(policy)] == [[True, True, True], [True, True, False], [True, False, True]]


def test_a_chosen_memory_goes_on_as_it_would_alone(recurrent_paths):
    policy = made(recurrent_paths)
    alone = made(recurrent_paths).submodules[1]
    obs = [runs.observation([1, 1]) + 0.1 * torch.randn(2, 56) * (torch.arange(56) < 48) for _ in range(4)]
    for step in obs:
        torch.testing.assert_close(policy.act_inference(step), alone.act_inference(step))
    policy.reset(torch.tensor([True, False]))
    alone.reset(torch.tensor([True, False]))
    torch.testing.assert_close(policy.act_inference(obs[0]), alone.act_inference(obs[0]))


def test_the_callers_observation_is_not_changed(tmp_path):
    folders = [runs.write_run(tmp_path / str(i), runs.constant_policy(1.0), 0.25) for i in range(3)]
    policy = made(folders, cmd_vel_mapping={0: 1.0, 1: 1.0, 2: 1.0})
    obs = runs.observation([None, 1, 2, 4])
    before = obs.clone()
    policy.act_inference(obs)
    policy.infer(obs)
    assert torch.equal(obs, before)


@pytest.mark.parametrize("length", [1, 3])
def test_the_pure_and_the_stateful_calls_agree(recurrent_paths, length):
    torch.manual_seed(0)
    settings = {"action_smoothing_buffer_len": length, "cmd_vel_mapping": {1: 0.5}}
    stateful, pure = made(recurrent_paths, **settings), InferencePolicy(made(recurrent_paths, **settings))
    for t in range(12):
        obs = runs.observation([(t + n) % 3 for n in range(4)])
        torch.testing.assert_close(stateful.act_inference(obs), pure(obs))
        dones = torch.rand(4) < 0.3
        stateful.reset(dones)
        pure.reset(dones)


def test_it_can_be_a_teacher_whose_state_is_written_in_place(recurrent_paths):
    settings = {"action_smoothing_buffer_len": 3, "cmd_vel_mapping": {1: 0.5}}
    teacher = Teacher(policies=[made(recurrent_paths, **settings)])
    teacher.hidden = [policy.initial_hidden(4) for policy in teacher.policies]
    teacher.alg = SimpleNamespace(device="cpu", generators={"teacher": torch.Generator()})
    teacher.teacher_prob, teacher.use_teacher_act_mask = torch.tensor(1.0), torch.ones(4, dtype=torch.bool)
    pure = InferencePolicy(made(recurrent_paths, **settings))
    for t in range(8):
        obs = runs.observation([(t // 2 + n) % 3 for n in range(4)])
        torch.testing.assert_close(teacher.label(obs, torch.Generator()), pure(obs))
        dones = torch.tensor([t == 3, False, t == 5, False])
        teacher.reset(dones)
        pure.reset(dones)


def test_acting_is_deterministic_and_nothing_waits_for_the_host(recurrent_paths):
    policy = made(recurrent_paths, cmd_vel_mapping={1: (0.5, 1.0)}, action_smoothing_buffer_len=2)
    obs = runs.observation([0, 1, 2])
    policy.act_inference(obs)
    with NoHostSync():
        _, hidden = policy.infer(obs, policy.hidden(3))
        policy.infer(obs, hidden)
    first = policy.act(obs)
    assert torch.equal(policy.action_mean, first)
    assert policy.action_std.abs().max() == 0


def test_it_acts_step_by_step(paths):
    with pytest.raises(ValueError, match=r"acts step by step on \(N, D\), got \(2, 3, 56\)"):
        made(paths).infer(torch.zeros(2, 3, runs.NUM_OBS))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"selection": "obstacle[1:6]"}, KeyError, "no segment 'obstacle'"),
        ({"selection": "engaging_block[1:16]"}, ValueError, "lies outside of 'engaging_block', which has 8 values"),
        ({"command": "cmd[0]", "cmd_vel_mapping": {0: 1.0}}, KeyError, "no segment 'cmd'"),
        ({"command": "proprioception[9:11]", "cmd_vel_mapping": {0: 1.0}}, ValueError, "2 values, but needs 1"),
        ({"last_action": "proprioception[-3:]"}, ValueError, "3 values, but needs 12"),
        ({"last_action": "history"}, KeyError, "no segment 'history'"),
        ({"cmd_vel_mapping": {7: 1.0}}, ValueError, "names sub-policy 7; there are 0 to 4"),
        ({"cmd_vel_mapping": {"x": 1.0}}, ValueError, "names sub-policy 'x'"),
        ({"cmd_vel_mapping": {0: [1.0]}}, ValueError, "give a number, or a range of two"),
        ({"cmd_vel_mapping": {0: [2.0, 1.0]}}, ValueError, "give a number, or a range of two"),
        ({"cmd_vel_mapping": {0: "fast"}}, ValueError, "give a number, or a range of two"),
        ({"reset_non_selected": "some"}, ValueError, "must be one of all, when_skill, none, got 'some'"),
        ({"action_smoothing_buffer_len": 0}, ValueError, "at least 1, got 0"),
    ],
)
def test_wrong_settings_are_refused_at_construction(paths, settings, error, message):
    with pytest.raises(error, match=message):
        made(paths, **settings)


def test_a_commanded_sub_policy_needs_a_scale_for_its_command(tmp_path):
    path = runs.write_run(tmp_path / "a", runs.constant_policy(1.0), normalization={"obs_scales": {"ang_vel": 1.0}})
    assert made([path]).cmd_scales == [{"ang_vel": 1.0}]
    with pytest.raises(KeyError, match="obs_scales of sub-policy 0 has no lin_vel"):
        made([path], cmd_vel_mapping={0: 1.0})


# ---------------------------------------------------------------------- climbing
def climbing(paths, **settings):
    return made(paths[:4], ActorCriticClimbMutex, jump_down_policy_path=paths[4], **settings)


def test_the_last_sub_policy_climbs_obstacles_that_lead_down(paths):
    policy = climbing(paths)
    obs = runs.observation([3, 3, 2, None])
    obs[0, -1], obs[1, -1] = 1.0, -1.0
    assert numbers(policy, obs) == [3, 4, 2, 0]
    assert policy.act_inference(obs)[:, 0].tolist() == [4.0, 5.0, 3.0, 1.0]
    obs[0, -1] = 0.0
    assert numbers(policy, obs)[0] == 4
    assert numbers(policy, runs.observation([4])) == [0]  # the last has no number of its own


@pytest.mark.parametrize(("given", "low", "high"), [(None, 1.0, 2.0), (0.25, 0.25, 0.25), ([0.1, 0.2], 0.1, 0.2)])
def test_the_velocity_downwards(paths, given, low, high):
    torch.manual_seed(0)
    policy = climbing(paths, cmd_vel_mapping={3: (1.0, 2.0)}, jump_down_vel=given)
    policy.act_inference(runs.observation([3] * 5))
    policy.reset(torch.ones(5, dtype=torch.bool))
    current = policy.cmd_vel_current
    assert ((low <= current[4] + 1e-6) & (current[4] <= high + 1e-6)).all()
    assert torch.equal(current[4], current[3]) == (given is None)  # the same draw, not another
    assert current[3].unique().numel() == 5


def test_climbing_needs_a_climber_and_a_velocity(paths):
    with pytest.raises(ValueError, match="sub-policy 3 climbs, but sub_policy_paths has only 2"):
        made(paths[:2], ActorCriticClimbMutex, jump_down_policy_path=paths[4])
    with pytest.raises(KeyError, match="no velocity for sub-policy 3 either"):
        climbing(paths, cmd_vel_mapping={0: 1.0})
    with pytest.raises(ValueError, match="but needs 1"):
        climbing(paths, jump_up="engaging_block")
