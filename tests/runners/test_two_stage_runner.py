"""Two stages: first the dataset, without a step of the environment, then the environment."""

import warnings

import numpy as np
import pytest
import torch
import yaml

from canter.runners.two_stage_runner import TwoStageRunner
from canter.storage.rollout_files import TrajectoryWriter

pytestmark = pytest.mark.filterwarnings("error:TPPO has no teacher", "ignore:.*trajectories for .* environments")


@pytest.fixture
def demos(tmp_path):
    """Four trajectories of seven steps: observations (100 + k, t), actions 0.5."""
    with TrajectoryWriter(tmp_path / "demos") as writer:
        for k in range(4):
            obs = np.stack([np.full(7, 100 + k), np.arange(7)], 1).astype(np.float32)
            rest = {"rewards": np.ones((7, 1), np.float32), "dones": np.zeros((7, 1), np.uint8)}
            writer.add(k, {"observations": obs, "actions": np.full((7, 1), 0.5, np.float32), **rest}, 0, "truncated")
    return tmp_path / "demos"


@pytest.fixture
def make(counting, tiny, demos):
    made = []

    def build(env=None, algorithm=None, runner=None, **given):
        env = counting((2, 3)) if env is None else env
        given = {"pretrain_iterations": 2, "pretrain_dataset": {"data_dir": str(demos), "dataset_loops": -1}} | given
        cfg = tiny({"class_name": "TPPO", **(algorithm or {})}, **given)
        made.append(TwoStageRunner(env, cfg, show_progress=False, **(runner or {})))
        return made[-1]

    yield build
    for one in made:
        one.close()


def test_the_dataset_is_required_by_name(counting, tiny):
    with pytest.raises(AssertionError, match="pretrain_dataset"):
        TwoStageRunner(counting(), tiny({"class_name": "TPPO"}), show_progress=False)


def test_the_environment_is_not_stepped_before_its_turn(make):
    runner = make()
    steps = []
    runner.add_callback("post_iteration", lambda r, stats: steps.append(r.env.num_steps))
    runner.learn(4)
    assert steps == [0, 0, 4, 8]


def test_a_negative_number_is_for_ever_and_zero_is_plain(make):
    forever, never = make(pretrain_iterations=-1), make(pretrain_iterations=0)
    forever.learn(4)
    never.learn(1)
    assert (forever.env.num_steps, never.env.num_steps) == (0, 4)


def test_without_a_transition_the_environment_is_stepped_from_its_observation(make):
    runner = make()
    runner.rollout_dataset.get_transition_batch = lambda: (None, {"waiting": 1.0})
    seen = []
    act = runner.alg.act
    runner.alg.act = lambda obs, critic_obs: (seen.append(obs.clone()), act(obs, critic_obs))[1]
    runner.learn(1)
    assert runner.env.num_steps == 4
    assert torch.equal(seen[0], torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
    assert [obs[:, 1].tolist() for obs in seen] == [[0, 0], [1, 1], [0, 2], [1, 0]]


def test_the_first_action_of_stage_two_is_for_the_environments_observation(make):
    runner = make()
    seen = []
    act = runner.alg.act
    runner.alg.act = lambda obs, critic_obs: (seen.append(obs.clone()), act(obs, critic_obs))[1]
    runner.learn(3)
    assert [int(obs[0, 0]) >= 100 for obs in seen] == [True] * 8 + [False] * 4
    assert torch.equal(seen[8], torch.tensor([[0.0, 0.0], [1.0, 0.0]]))


def test_no_episode_spans_the_stages(make):
    runner = make()
    runner.learn(3)
    # episodes of 2 and 3 steps of stage two alone; those of the dataset have 7
    assert set(runner.lenbuffer) <= {2, 3}
    assert list(runner.lenbuffer)[0] == 2


def test_memories_are_reset_between_the_stages(make):
    runner = make(policy={"class_name": "ActorCriticRecurrent", "rnn_hidden_size": 4}, num_steps_per_env=5)
    hidden = []
    act = runner.alg.act

    def spy(obs, critic_obs):
        hidden.append(torch.cat([h.flatten() for h in runner.policy.hidden(2).values()]).abs().sum().item())
        return act(obs, critic_obs)

    runner.alg.act = spy
    runner.learn(3)
    assert hidden[9] > 0
    assert hidden[10] == 0
    assert hidden[11] > 0


def test_an_exhausted_dataset_ends_stage_one(make, demos):
    runner = make(pretrain_iterations=50, pretrain_dataset={"data_dir": str(demos), "dataset_loops": 1})
    with pytest.warns(UserWarning, match="dataset ended in iteration 3; training continues in the environment"):
        runner.learn(5)
    # two environments play 4 trajectories of 7 steps in 14 steps: three rollouts of 4 and a piece, which is dropped
    assert runner.env.num_steps == 4 * 2
    assert not runner.is_pretraining


def test_stage_one_clones_and_stage_two_is_ppo(make):
    runner = make(algorithm={"distill_target": "mse_sum"}, log_interval=1, pretrain_iterations=30)
    history = runner.learn(31).history
    assert "train/distillation_loss" in history[0]
    assert "train/policy_loss" not in history[0]
    assert history[29]["train/distillation_loss"] < 0.3 * history[0]["train/distillation_loss"]
    assert "train/policy_loss" in history[30]
    assert "train/distillation_loss" not in history[30]


def test_an_algorithm_that_cannot_is_refused_at_once(make):
    with pytest.raises(TypeError, match="PPO cannot learn from recorded steps; use TPPO"):
        make(algorithm={"class_name": "PPO"})
    make(algorithm={"class_name": "PPO"}, pretrain_iterations=0).learn(1)


def test_a_dataset_of_another_environment_is_refused_with_the_difference(make, counting, tmp_path):
    with TrajectoryWriter(tmp_path / "wide") as writer:
        rest = {"rewards": np.ones((7, 1), np.float32), "dones": np.zeros((7, 1), np.uint8)}
        arrays = {"observations": np.zeros((7, 5), np.float32), "actions": np.zeros((7, 1), np.float32), **rest}
        writer.add(0, arrays, 0)
    runner = make(pretrain_dataset={"data_dir": str(tmp_path / "wide")})
    with pytest.raises(ValueError, match=r"observation: dataset \(5,\), environment \(2,\)"):
        runner.learn(1)


def test_a_resumed_run_continues_in_its_stage(make, tmp_path):
    log_dir = tmp_path / "run"
    make(runner={"log_dir": log_dir}, pretrain_iterations=3).learn(3)
    config = yaml.safe_load((log_dir / "config.yaml").read_text())
    assert config["pretrain_iterations"] == 3
    assert config["pretrain_dataset"]["dataset_loops"] == -1
    again = make(runner={"log_dir": log_dir}, pretrain_iterations=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again.load(log_dir / "model_3.pt")
    seen = []
    act = again.alg.act
    again.alg.act = lambda obs, critic_obs: (seen.append(obs.clone()), act(obs, critic_obs))[1]
    again.learn(1)
    assert torch.equal(seen[0], torch.tensor([[0.0, 0.0], [1.0, 0.0]]))  # not the dataset's


def test_a_run_that_was_interrupted_in_stage_one_ends_as_one_that_was_not(make, demos, tmp_path):
    source = {"data_dir": str(demos), "dataset_loops": -1, "random_shuffle_traj_order": True}
    given = {"pretrain_iterations": 5, "save_interval": 2}
    whole = make(runner={"log_dir": tmp_path / "whole"}, pretrain_dataset={**source, "seed": 1}, **given)
    whole.learn(6)
    again = make(runner={"log_dir": tmp_path / "again"}, pretrain_dataset={**source, "seed": 7}, **given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again.load(tmp_path / "whole" / "model_2.pt")
    again.learn(4)
    assert again.current_learning_iteration == whole.current_learning_iteration == 6
    for ours, theirs in zip(again.policy.parameters(), whole.policy.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    for file in demos.glob("trajectory_1/*"):
        file.unlink()
    (demos / "trajectory_1").rmdir()
    fresh = make(runner={"log_dir": tmp_path / "fresh"}, pretrain_dataset={**source, "seed": 7}, **given)
    with pytest.warns(UserWarning, match="dataset starts from its beginning: 1 trajectories are no longer in"):
        fresh.load(tmp_path / "whole" / "model_2.pt")
    fresh.learn(1)


# ---------------------------------------------------------------------- with a motion prior
AMP_POLICY = {
    "class_name": "AmpActorCritic",
    "amp_discriminator": {"input_dim": 2, "style_reward_coef": 1.0, "hidden_dims": [8], "task_reward_lerp": 0.5},
}


def motion(step):
    """Features of the policy near -1, of the expert near 1."""
    noise = torch.randn(2, 2, generator=torch.Generator().manual_seed(step)) * 0.1
    return {"observations": {"ref_obs": noise - 1.0}, "ref_motion": noise + 1.0}


@pytest.fixture
def make_atppo(make, counting):
    def build(algorithm=None, **given):
        given = {"policy": AMP_POLICY, "log_interval": 1, **given}
        algorithm = {"class_name": "ATPPO", "distill_target": "mse_sum", **(algorithm or {})}
        return make(counting((2, 3), extras=motion), algorithm, **given)

    return build


def test_recorded_steps_teach_the_policy_and_not_the_discriminator(make_atppo):
    runner = make_atppo(pretrain_iterations=10)
    discriminator = runner.policy.discriminator
    before = {name: value.clone() for name, value in discriminator.state_dict().items()}
    history = runner.learn(10).history
    assert history[-1]["train/distillation_loss"] < 0.5 * history[0]["train/distillation_loss"]
    assert [row["amp/updates"] for row in history] == [0.0] * 10
    assert history[-1]["train/discriminator_expert_loss"] == 0.0
    assert all(torch.equal(before[name], value) for name, value in discriminator.state_dict().items())
    assert runner.alg.ref_obs_normalizer.count == 0
    assert float(runner.alg.motion_prior.accuracy) == 0.5


def test_the_discriminator_learns_from_the_environments_steps_alone(make_atppo):
    runner = make_atppo({"discriminator_learning_rate": 1e-2, "num_learning_epochs": 8}, pretrain_iterations=3)
    history = runner.learn(13).history
    assert history[3]["amp/updates"] == 1.0
    assert history[-1]["amp/expert_d"] > 0.3 > -0.3 > history[-1]["amp/policy_d"]
    assert history[3]["Episode_Reward/style_reward"] > 0.0
    # 40 steps of 2 environments: 80 windows of the expert, and 80 of the policy less 20 + 13 that end an episode
    assert runner.alg.ref_obs_normalizer.count == 80 + 80 - 33


def test_recorded_rows_that_stay_in_a_longer_buffer_are_no_expert_motion(make_atppo):
    cfg = {"buffer_dilation_ratio": 3.0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runner = make_atppo(cfg, pretrain_iterations=2)
    runner.learn(3)
    storage = runner.alg.storage
    known = storage.data["ref_motion_valid"].squeeze(-1)
    assert known.sum() == 4 * 2
    assert len(known) == 12
    assert bool((storage.data["ref_motion"][known] > 0.5).all())
    assert bool((storage.data["ref_motion"][~known] == 0.0).all())
