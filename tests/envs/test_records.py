import warnings

import numpy as np
import pytest
import torch
from no_host_sync import NoHostSync

from canter.envs.records import FINAL_OBS_NAMES, EndWatch, split_groups, step_record, to_obs

CPU = torch.device("cpu")
DONE = torch.tensor([True, False, True])
OBS = torch.zeros(3, 2)
FINAL = torch.tensor([[10.0, 11.0], [20.0, 21.0], [30.0, 31.0]])
A, B, C = torch.full((2, 1), 1.0), torch.full((2, 2), 2.0), torch.full((2, 3), 3.0)


def record(dones=DONE, extras=None, obs=OBS, critic_obs=None, **more):
    critic_obs = obs if critic_obs is None else critic_obs
    return step_record(obs, critic_obs, torch.zeros(len(dones)), dones, extras or {}, **more)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_dones_of_any_dtype_give_the_same_flags(dtype, shape):
    r = record(DONE.to(dtype).view(shape))
    assert r.terminated.tolist() == [True, False, True]
    assert r.terminated.dtype == torch.bool
    assert r.done.tolist() == [True, False, True]
    assert r.truncated.tolist() == [False] * 3


@pytest.mark.parametrize(
    "rewards", [torch.tensor([1, 2, 3]), torch.tensor([[1.0], [2.0], [3.0]]), np.array([1.0, 2.0, 3.0])]
)
def test_rewards_of_any_dtype_become_one_float32_row(rewards):
    r = step_record(OBS, OBS, rewards, DONE, {})
    assert r.reward.tolist() == [1.0, 2.0, 3.0]
    assert r.reward.dtype == torch.float32


def test_a_scalar_reward_is_that_of_one_environment():
    r = step_record(None, None, 2.5, True, {})
    assert r.reward.tolist() == [2.5]
    assert r.terminated.tolist() == [True]


@pytest.mark.parametrize("shape", [(3, 2), (3, 3), (1, 3)])
def test_rewards_that_would_broadcast_are_refused(shape):
    with pytest.raises(ValueError, match=r"(rewards|dones) of . environments must have shape"):
        step_record(OBS, OBS, torch.zeros(shape), DONE, {})


def test_time_outs_and_truncated_mean_the_same():
    cut = torch.tensor([True, False, False])
    for name in ("time_outs", "truncated"):
        r = record(extras={name: cut})
        assert r.truncated.tolist() == [True, False, False], name
        assert r.terminated.tolist() == [False, False, True], name


def test_truncated_has_priority_over_time_outs():
    r = record(extras={"truncated": DONE, "time_outs": torch.zeros(3)})
    assert r.truncated.tolist() == [True, False, True]


def test_time_outs_count_only_where_an_episode_ended():
    r = record(extras={"time_outs": torch.tensor([1.0, 1.0, 0.0])})
    assert r.truncated.tolist() == [True, False, False]
    assert r.done.tolist() == [True, False, True]


def test_terminated_has_priority_over_truncated():
    both = {"terminated": DONE, "truncated": DONE}
    r = record(extras=both)
    assert r.terminated.tolist() == [True, False, True]
    assert r.truncated.tolist() == [False, False, False]


def test_terminated_alone_makes_the_other_ends_truncations():
    r = record(extras={"terminated": torch.tensor([True, False, False])})
    assert r.truncated.tolist() == [False, False, True]


def test_flags_that_disagree_with_dones_warn_once_and_count_together():
    extras = {"terminated": torch.tensor([False, True, False]), "truncated": torch.tensor([False, False, False])}
    with pytest.warns(UserWarning, match="dones differ from terminated"):
        first = record(extras=extras)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        record(extras=extras)
    assert first.done.tolist() == [True, True, True]
    assert first.terminated.tolist() == [True, True, True]


def test_agreeing_flags_do_not_warn(recwarn):
    record(extras={"terminated": DONE, "truncated": torch.zeros(3)})
    assert not recwarn.list


@pytest.mark.parametrize("name", [n for n in FINAL_OBS_NAMES if n != "terminal"])
def test_final_observation_is_found_under_every_name(name):
    r = record(extras={name: FINAL})
    assert r.final_obs.tolist() == FINAL.tolist()
    assert r.final_critic_obs is r.final_obs


def test_final_observation_names_are_those_in_use():
    assert FINAL_OBS_NAMES[:2] == ("final_obs", "final_observation")
    assert set(FINAL_OBS_NAMES) == {
        "final_obs",
        "final_observation",
        "terminal",
        "terminal_obs",
        "final_observations",
        "terminal_observation",
    }


def test_final_observation_of_playground_lies_among_the_raw_observations():
    raw = {"obs": FINAL, "critic_obs": -FINAL}
    r = record(extras={"observations": {"raw": raw}}, critic_obs=OBS.clone())
    assert r.final_obs.tolist() == FINAL.tolist()
    assert r.final_critic_obs.tolist() == (-FINAL).tolist()


def test_final_observation_of_mjlab_names_its_environments():
    extras = {"terminal": {"env_ids": torch.tensor([2, 0]), "observations": {"actor": FINAL[[2, 0]]}}}
    with NoHostSync():
        r = record(extras=extras)
    assert r.final_obs[0].tolist() == [10.0, 11.0]
    assert r.final_obs[2].tolist() == [30.0, 31.0]


def test_a_flag_named_terminal_is_no_observation():
    assert record(extras={"terminal": DONE}).final_obs is None


def test_final_observations_of_sb3_lie_in_one_info_each():
    infos = [{"terminal_observation": FINAL[0].numpy()}, {}, {"terminal_observation": FINAL[2].numpy()}]
    r = step_record(OBS, OBS, torch.zeros(3), DONE, infos)
    assert r.final_obs[0].tolist() == [10.0, 11.0]
    assert r.final_obs[2].tolist() == [30.0, 31.0]


def test_rows_of_ended_environments_alone_are_put_in_place():
    r = record(extras={"final_obs": FINAL[[0, 2]]})
    assert r.final_obs.tolist() == [[10.0, 11.0], [0.0, 0.0], [30.0, 31.0]]


def test_no_rows_mean_no_final_observation():
    r = record(torch.zeros(3), extras={"final_obs": torch.zeros(0, 2)})
    assert r.final_obs is None


def test_object_arrays_may_have_holes():
    rows = np.array([FINAL[0].numpy(), None, FINAL[2].numpy()], dtype=object)
    assert record(extras={"final_obs": rows}).final_obs.tolist() == [[10.0, 11.0], [0.0, 0.0], [30.0, 31.0]]


def test_object_arrays_may_hold_dicts():
    rows = np.array([{"a": np.array([1.0]), "b": np.array([2.0])}, None, {"a": np.array([3.0]), "b": np.array([4.0])}])
    final = record(extras={"final_obs": rows}, obs={"a": torch.zeros(3, 1), "b": torch.zeros(3, 1)}).final_obs
    assert final["a"].tolist() == [[1.0], [0.0], [3.0]]
    assert final["b"].tolist() == [[2.0], [0.0], [4.0]]


def test_an_ended_environment_without_its_final_observation_is_an_error():
    rows = np.array([FINAL[0].numpy(), None, None], dtype=object)
    with pytest.raises(ValueError, match="environment 2 ended, but its final observation is None"):
        record(extras={"final_obs": rows})


def test_a_final_observation_of_another_size_is_an_error():
    with pytest.raises(ValueError, match=r"must be 3 \(every environment\) or 2 \(those that ended\)"):
        record(extras={"final_obs": torch.zeros(5, 2)})


@pytest.mark.parametrize("final", [torch.zeros(3, 1), {"obs": torch.zeros(3, 3)}, {"position": FINAL}])
def test_a_final_observation_of_another_width_or_structure_is_an_error(final):
    with pytest.raises(ValueError, match=r"the final observation has shapes .* the observation \{'obs': \(3, 2\)\}"):
        record(extras={"final_obs": final})
    critics = {"obs": FINAL, "critic_obs": torch.zeros(3, 4)}
    with pytest.raises(ValueError, match=r"'critic_obs': \(3, 4\)\}, the observation \{'critic_obs': \(3, 5\)"):
        record(extras={"final_obs": critics}, critic_obs=torch.zeros(3, 5))


@pytest.mark.parametrize("name", ["privileged_obs", "critic_obs", "critic"])
@pytest.mark.parametrize("actor", ["obs", "policy", "actor"])
def test_the_critic_has_its_own_part_of_the_final_observation(name, actor):
    r = record(extras={"final_observation": {actor: FINAL, name: -FINAL}}, critic_obs=OBS.clone())
    assert r.final_obs.tolist() == FINAL.tolist()
    assert r.final_critic_obs.tolist() == (-FINAL).tolist()


def test_the_critics_final_observation_is_unknown_without_its_part():
    assert record(extras={"final_obs": FINAL}, critic_obs=torch.zeros(3, 5)).final_critic_obs is None


def test_the_critics_final_observation_may_have_its_own_name():
    r = record(extras={"final_obs": FINAL, "final_critic_obs": -FINAL}, critic_obs=OBS.clone())
    assert r.final_critic_obs.tolist() == (-FINAL).tolist()


def test_observations_may_be_left_out():
    r = step_record(None, None, torch.ones(3), DONE, {"final_obs": FINAL, "time_outs": DONE})
    assert r.obs is None
    assert r.truncated.tolist() == [True, False, True]
    assert r.final_critic_obs is r.final_obs


def test_a_record_can_be_made_again_from_its_extras():
    groups = {"policy": FINAL, "critic": -FINAL, "ref_obs": 2 * FINAL}
    first = record(extras={"final_obs": groups, "truncated": DONE}, critic_obs=OBS.clone(), valid=~DONE)
    again = step_record(None, None, first.reward, first.done, first.extras)
    assert again.truncated.tolist() == first.truncated.tolist()
    assert again.valid.tolist() == [False, True, False]
    assert again.final_obs.tolist() == FINAL.tolist()
    assert again.final_critic_obs.tolist() == (-FINAL).tolist()
    assert first.extras["final_observation"]["ref_obs"].tolist() == (2 * FINAL).tolist()


def test_the_given_extras_are_left_alone():
    extras = {"final_obs": FINAL}
    record(extras=extras)
    assert list(extras) == ["final_obs"]


def test_an_end_watch_remembers():
    watch = EndWatch(CPU)
    assert not watch(torch.zeros(3, dtype=torch.bool))
    assert watch(DONE)
    assert watch(torch.zeros(3, dtype=torch.bool))


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (torch.float64, torch.float32),
        (torch.float32, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bool, torch.float32),
        (torch.int64, torch.float32),
        (torch.uint8, torch.uint8),
    ],
)
def test_observation_dtypes(given, kept):
    assert to_obs(torch.ones(2, 3).to(given)).dtype == kept
    assert to_obs({"a": {"b": torch.ones(2, 3).to(given)}})["a"]["b"].dtype == kept


def test_a_copy_shares_nothing_whatever_the_tensor_is():
    plain = torch.arange(6.0).view(2, 3)
    with torch.inference_mode():
        inference = plain.clone()
    for tensor in (plain, plain.clone().requires_grad_(), inference, plain.T.contiguous().T, plain.clone().numpy()):
        taken = to_obs(tensor, CPU, copy=True)
        assert taken.data_ptr() != torch.as_tensor(tensor).data_ptr()
        assert taken.is_contiguous()
        assert not taken.requires_grad
        assert not taken.is_inference()
        assert taken.tolist() == plain.tolist()
    expanded = to_obs(torch.arange(3.0).expand(2, 3), CPU, copy=True)
    expanded[0] = 9.0
    assert expanded[1].tolist() == [0.0, 1.0, 2.0]


def test_a_tensor_is_both_observations():
    actor, critic = split_groups(A)
    assert actor is A
    assert critic is A


@pytest.mark.parametrize("actor", ["obs", "policy", "actor"])
@pytest.mark.parametrize("critic", ["privileged_obs", "critic_obs", "critic"])
def test_groups_are_known_by_name_and_the_actor_sees_the_rest(actor, critic):
    assert split_groups({actor: A, critic: B}) == (A, B)
    assert split_groups({actor: A, critic: B, "other": C}) == ({actor: A, "other": C}, B)


def test_no_key_is_lost_beside_a_group_with_a_name():
    obs = {"obs": A, "other": B}
    assert split_groups(obs) == (obs, obs)


def test_a_privileged_group_is_what_the_critic_sees_beside_the_actors():
    obs = {"observation": A, "privileged": B}
    assert split_groups(obs) == (A, obs)
    assert split_groups({"policy": A, "critic": B, "privileged": C}) == (A, {"critic": B, "privileged": C})


def test_a_key_that_no_network_sees_is_named_in_a_warning():
    with pytest.warns(UserWarning, match="'critic_obs'"):
        split_groups({"actor_obs": A, "critic_obs": B, "privileged_obs": C})


def test_a_missing_critic_group_is_the_actors():
    actor, critic = split_groups({"policy": A, "critic": None})
    assert actor is A
    assert critic is A


def test_the_playground_pair_needs_both_names():
    assert split_groups({"state": A, "privileged_state": B}) == (A, B)
    dict_obs = {"state": A, "image": torch.zeros(2, 3, 8, 8, dtype=torch.uint8)}
    assert split_groups(dict_obs) == (dict_obs, dict_obs)


def test_privileged_obs_is_preferred_to_critic_obs():
    assert split_groups({"obs": A, "critic_obs": B, "privileged_obs": C})[1] is C
