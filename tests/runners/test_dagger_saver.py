"""DAgger's collector: the student drives, the teacher labels, and the newest checkpoint is always the one in use."""

import json

import numpy as np
import pytest
import torch

from canter.modules.actor_critic import ActorCritic
from canter.runners.dagger_saver import DaggerSaver
from canter.storage.rollout_files import read_trajectory
from canter.utils.checkpoint import save_checkpoint


class Teacher:
    """Wants 7 everywhere."""

    def __init__(self):
        self.resets = []

    def act_inference(self, obs):
        return torch.full((len(obs), 1), 7.0)

    def act(self, obs):
        return self.act_inference(obs)

    def reset(self, dones=None):
        self.resets.append(dones.tolist())


POLICY = {"class_name": "ActorCritic", "actor_hidden_dims": [4], "critic_hidden_dims": [4], "init_noise_std": 1e-9}


def student(value):
    """A policy that acts `value` everywhere."""
    policy = ActorCritic(2, 2, 1, **{k: v for k, v in POLICY.items() if k != "class_name"})
    with torch.no_grad():
        policy.actor[-1].weight.zero_()
        policy.actor[-1].bias.fill_(value)
    return policy


def save(run, iteration, value):
    save_checkpoint(run / f"model_{iteration}.pt", {"model_state_dict": student(value).state_dict(), "iter": iteration})


@pytest.fixture
def run(tmp_path):
    directory = tmp_path / "student"
    directory.mkdir()
    (directory / "config.json").write_text(
        json.dumps({"runner": {"policy_class_name": "ActorCritic"}, "policy": {**POLICY, "class_name": None}})
    )
    return directory


@pytest.fixture
def saver(counting, tmp_path, run):
    made = []

    def make(lengths=(2, 3), extras=None, **given):
        env = counting(lengths, extras=extras)
        env.given = []
        step = env.step
        env.step = lambda actions: (env.given.append(actions.flatten().tolist()), step(actions))[1]
        given = {"rollout_storage_length": 4, "min_timesteps": 1, "min_episodes": 1, "show_progress": False} | given
        given = {"training_policy_logdir": run, "teacher_act_prob": 0.0, "policy": Teacher()} | given
        made.append(DaggerSaver(env, save_dir=tmp_path / "data", **given))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_the_policy_must_be_given(counting, tmp_path, run):
    with pytest.raises(TypeError, match="policy"):
        DaggerSaver(env=counting(), save_dir=tmp_path, training_policy_logdir=run)


def test_labels_are_the_teachers_though_the_student_acted(saver, run, tmp_path):
    save(run, 3, -2.0)
    one = saver()
    one.collect_and_save()
    assert all(row == pytest.approx([-2.0, -2.0]) for row in one.env.given)
    for folder in (tmp_path / "data").glob("trajectory_*"):
        assert (read_trajectory(folder)["actions"] == 7.0).all()


@pytest.mark.parametrize(("probability", "driven"), [(1.0, 7.0), (0.0, -2.0)])
def test_environments_of_the_teacher_are_drawn_by_the_probability(saver, run, probability, driven):
    save(run, 3, -2.0)
    one = saver(teacher_act_prob=probability)
    one.check_stop()
    one.get_transition()
    assert one.env.given[-1] == pytest.approx([driven] * 2)


def test_the_schedule_is_over_the_students_iterations_and_drawn_at_every_check(saver, run):
    asked = []
    save(run, 40, 0.0)
    one = saver(lengths=[2] * 64, teacher_act_prob=lambda iteration: asked.append(iteration) or 0.5)
    torch.manual_seed(0)
    masks = [(one.check_stop(), one.use_teacher_act_mask.clone())[1] for _ in range(3)]
    assert asked == [40, 40, 40]
    assert not torch.equal(masks[0], masks[1])
    assert 0.25 < torch.stack(masks).float().mean() < 0.75
    fallen = saver(teacher_act_prob="linear", update_times_scale=80)
    assert fallen.teacher_act_prob(40) == pytest.approx(0.5)


def test_the_newest_number_is_loaded_and_junk_is_ignored(saver, run):
    save(run, 9, 9.0)
    save(run, 10, 10.0)
    (run / "model_best.pt").write_text("x")
    (run / "model_12.pt.tmp").write_text("x")
    one = saver()
    one.check_stop()
    assert one.training_policy_iteration == 10
    one.get_transition()
    assert one.env.given[-1] == pytest.approx([10.0, 10.0])


def test_without_a_checkpoint_an_untrained_student_acts_with_one_warning(saver):
    one = saver()
    with pytest.warns(
        UserWarning, match=r"no model_<iteration>\.pt in .*student yet: an untrained student acts"
    ) as caught:
        [one.check_stop() for _ in range(2)]
    assert len(caught) == 1
    one.get_transition()
    assert one.training_policy_iteration == 0


def test_a_damaged_newest_checkpoint_is_passed_over(saver, run):
    save(run, 9, 9.0)
    (run / "model_10.pt").write_bytes((run / "model_9.pt").read_bytes()[:-50])
    one = saver()
    with pytest.warns(UserWarning, match=r"model_10\.pt cannot be read yet"):
        one.check_stop()
    assert one.training_policy_iteration == 9


def test_a_newer_student_replaces_the_old_in_mid_collection(saver, run):
    save(run, 1, 1.0)
    one = saver()
    one.check_stop()
    one.get_transition()
    save(run, 2, 2.0)
    one.get_transition()
    one.check_stop()
    one.get_transition()
    assert [row[0] for row in one.env.given] == pytest.approx([1.0, 1.0, 2.0])


def test_the_students_normaliser_comes_with_it(saver, run):  # A4
    from canter.modules.normalizer import EmpiricalNormalization

    policy = student(0.0)
    policy.obs_normalizer = EmpiricalNormalization([2])
    policy.obs_normalizer.train()
    policy.obs_normalizer.update(torch.randn(100, 2) * 5 + 3)
    save_checkpoint(run / "model_4.pt", {"model_state_dict": policy.state_dict(), "iter": 4})
    one = saver()
    one.check_stop()
    obs = torch.tensor([[1.0, 2.0]])
    assert torch.equal(one.training_policy.obs_normalizer.normalize(obs), policy.obs_normalizer.normalize(obs))
    assert not torch.equal(one.training_policy.obs_normalizer.normalize(obs), obs)


def test_both_policies_are_reset_where_episodes_ended(saver, run):
    save(run, 1, 0.0)
    one = saver(lengths=(2, 3))
    one.check_stop()
    seen = []
    one.training_policy.reset = None
    object.__setattr__(one.training_policy, "reset", lambda dones: seen.append(dones.tolist()))
    for i in range(3):
        one.collect_step(i)
    assert seen == one.policy.resets == [[True, False], [False, True]]


def test_statistics_are_merged_by_their_names(saver, run, capsys):
    save(run, 6, 0.0)
    said = {"height_max": torch.tensor([1.0, 5.0]), "height_min": -2.0, "reward": torch.tensor([1.0, float("nan")])}
    one = saver(extras=lambda step: {"episode": {**said, "reward": step}} if step < 3 else {}, log_to_tensorboard=True)
    logged = []
    one.tb_writer.add_scalar = lambda *row: logged.append(row)
    one.check_stop()
    for i in range(4):
        one.collect_step(i)
    one.save_steps()
    capsys.readouterr()
    text = one.print_log()
    assert capsys.readouterr().out == f"{text}\n"
    assert sorted(logged) == [
        ("Episode/height_max", 5.0, 6),
        ("Episode/height_min", -2.0, 6),
        ("Episode/reward", 1.5, 6),
    ]
    assert "Episode/reward: 1.5" in text
    assert "8 timesteps" in text


def test_no_statistics_are_no_error_and_counting_does_not_hide_checkpoints(saver, run):
    save(run, 1, 1.0)
    one = saver()
    one.check_stop()
    for _ in range(3):
        one.print_log()
    assert (one.collection_iteration, one.training_policy_iteration) == (3, 1)
    save(run, 2, 2.0)
    one.check_stop()
    assert one.training_policy_iteration == 2


def test_the_documented_loop_runs(saver, run, tmp_path):
    from canter.datasets.dagger_saver import DaggerSaver as Documented

    assert Documented is DaggerSaver
    save(run, 1, 1.0)
    one = saver(min_timesteps=1000)
    one.init_traj_handlers()
    for i in range(20):
        one.load_latest_training_policy()
        teacher_actions, rewards, dones, infos, obs, critic_obs = one.get_transition()
        one.add_transition(i, infos)
        if dones.any():
            one.policy_reset(dones)
        if one.check_stop():
            break
    one.print_log()
    one.close()
    assert (teacher_actions == 7.0).all()
    assert sum(len(read_trajectory(p)["rewards"]) for p in (tmp_path / "data").glob("trajectory_*")) == 40


def test_the_metadata_names_the_student(saver, run, tmp_path):
    save(run, 1, 1.0)
    saver(action_sample_std=0.1).collect_and_save()
    metadata = json.loads((tmp_path / "data/metadata.json").read_text())
    assert metadata["training_policy_logdir"] == "../student"  # both may be moved together
    assert (metadata["update_times_scale"], metadata["action_sample_std"]) == (5000, 0.1)


def test_a_run_without_config_is_named(saver, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"empty has no config\.yaml or config\.json: start"):
        saver(training_policy_logdir=tmp_path / "empty").init_traj_handlers()
    assert not (tmp_path / "data").exists()


def test_discrete_actions_are_mixed_and_kept_as_numbers(tmp_path, run):
    from canter.envs.torch_envs import CartPole
    from canter.modules.build import build_actor_critic

    def build(env):
        return build_actor_critic(env, "ActorCritic", {"actor_hidden_dims": [4]})

    (run / "config.json").write_text(json.dumps({"policy": {"class_name": "ActorCritic", "actor_hidden_dims": [4]}}))

    class Right(Teacher):
        def act_inference(self, obs):
            return torch.ones(len(obs), dtype=torch.long)

    env = CartPole(4, seed=0)
    save_checkpoint(run / "model_1.pt", {"model_state_dict": build(env).state_dict(), "iter": 1})
    with DaggerSaver(env, Right(), tmp_path / "d", 8, training_policy_logdir=run, teacher_act_prob=0.5) as one:
        for i in range(8):
            one.collect_step(i)
    whole = read_trajectory(tmp_path / "d" / "trajectory_0")
    assert whole["actions"].dtype == np.int64
    assert (whole["actions"] == 1).all()
