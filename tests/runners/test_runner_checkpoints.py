"""What a runner's checkpoints hold, when they are written, and how they are taken up again."""

import copy
import warnings

import pytest
import torch
from torch import nn

from canter.envs.torch_envs import CartPole, PointRobot
from canter.modules import build as policies
from canter.modules.actor_critic import ActorCritic
from canter.utils.checkpoint import CheckpointError, load_checkpoint, newest_valid_checkpoint, save_checkpoint

EVERYTHING = {
    "empirical_normalization": True,
    "normalize_rewards": True,
    "rnd_cfg": {"weight": 0.5, "predictor_hidden_dims": [4], "target_hidden_dims": [4], "reward_normalization": True},
}
GRU = {"class_name": "ActorCriticRecurrent", "rnn_type": "gru", "rnn_hidden_size": 6}


def files(directory):
    return sorted(path.name for path in directory.glob("*.pt"))


# ------------------------------------------------------------------ content and names
def test_the_content_is_the_documented_one_and_loads_without_pickle(make_runner, tmp_path):
    runner = make_runner(algorithm=EVERYTHING, policy=GRU)
    runner.learn(3)
    runner.save(tmp_path / "x.pt", infos={"note": "best", "score": 4.5})
    state = torch.load(tmp_path / "x.pt", weights_only=True)
    assert set(state) == {
        "format_version",
        "model_state_dict",
        "optimizer_state_dict",
        "learning_rate",
        "rnd_state_dict",
        "rnd_optimizer_state_dict",
        "return_scaler_state_dict",
        "iter",
        "total_timesteps",
        "environment",
        "infos",
        "config",
        "resume",
    }
    assert (state["iter"], state["total_timesteps"]) == (3, 48)
    assert state["infos"] == {"note": "best", "score": 4.5}
    assert state["config"] == runner.config()
    assert {name.split(".")[0] for name in state["model_state_dict"]} == {
        "actor",
        "critic",
        "std",
        "memory_a",
        "memory_c",
        "obs_normalizer",
        "critic_obs_normalizer",
    }
    assert set(state["resume"]) == {"num_envs", "rng", "env", "algorithm", "runner"}


def test_a_loaded_runner_is_the_saved_one(make_runner, differing, weights, tmp_path):
    saved = make_runner(algorithm={**EVERYTHING, "schedule": "adaptive"}, save_dir=tmp_path)
    saved.learn(3)
    assert saved.save_checkpoint("mine.pt") == tmp_path / "mine.pt"
    other = make_runner(algorithm={**EVERYTHING, "schedule": "adaptive"}, save_dir=tmp_path, seed=9)
    assert differing(weights(saved), weights(other))
    assert other.load_checkpoint("mine.pt") is None
    assert differing(weights(saved), weights(other)) == []
    assert (other.iteration, other.tot_timesteps) == (3, 48)
    assert other.alg.learning_rate == saved.alg.learning_rate != 1e-3
    saved.save(tmp_path / "sub" / "deep.pt", infos=[1, 2])
    assert other.load(tmp_path / "sub" / "deep.pt") == [1, 2]
    assert other.load_checkpoint(str(tmp_path / "mine.pt")) is None  # an absolute path


def test_names_cannot_leave_the_directory(make_runner, tmp_path):
    runner = make_runner(save_dir=tmp_path / "run")
    with pytest.raises(ValueError, match="'..'"):
        runner.save_checkpoint("../x.pt")


def test_periodic_and_final_files(make_runner, tmp_path):
    runner = make_runner(log_dir=tmp_path, save_interval=2)
    runner.learn(5)
    assert files(tmp_path) == ["checkpoint_final.pt", "model_2.pt", "model_4.pt", "model_5.pt"]
    runner.learn(1)
    assert files(tmp_path) == ["checkpoint_final.pt", "model_2.pt", "model_4.pt", "model_5.pt", "model_6.pt"]
    assert load_checkpoint(tmp_path / "model_4.pt")["iter"] == 4
    assert load_checkpoint(tmp_path / "checkpoint_final.pt")["iter"] == 6
    assert newest_valid_checkpoint(tmp_path).name == "model_6.pt"


@pytest.mark.parametrize(("keep", "expected"), [(2, [6, 7]), (3, [5, 6, 7]), (None, [1, 2, 3, 4, 5, 6, 7])])
def test_keep_checkpoints_limits_the_number_of_files(make_runner, tmp_path, keep, expected):
    make_runner(log_dir=tmp_path, save_interval=1, keep_checkpoints=keep).learn(7)
    assert files(tmp_path) == ["checkpoint_final.pt", *(f"model_{n}.pt" for n in expected)]


def test_only_files_that_the_runner_wrote_periodically_are_removed(make_runner, tmp_path):
    make_runner(log_dir=tmp_path).learn(1)  # a run without a limit
    (tmp_path / "model_1.pt").rename(tmp_path / "model_900.pt")
    runner = make_runner(log_dir=tmp_path, save_interval=1, keep_checkpoints=2)
    runner.learn(3)
    runner.save_checkpoint("model_3.pt")  # written by the user from here on
    runner.save_checkpoint("model_50.pt")
    runner.learn(3)
    kept = ["model_3.pt", "model_5.pt", "model_50.pt", "model_6.pt", "model_900.pt"]
    assert files(tmp_path) == ["checkpoint_final.pt", *kept]


def test_a_resumed_run_removes_the_files_of_the_process_before(make_runner, tmp_path):
    settings = {"log_dir": tmp_path, "save_interval": 1, "keep_checkpoints": 2}
    make_runner(**settings).learn(3)
    assert files(tmp_path) == ["checkpoint_final.pt", "model_2.pt", "model_3.pt"]
    resumed = make_runner(**settings)
    resumed.load_checkpoint("model_3.pt")
    resumed.learn(2)
    assert files(tmp_path) == ["checkpoint_final.pt", "model_4.pt", "model_5.pt"]


@pytest.mark.parametrize("text", ["", "{", "3", "null"])
def test_without_a_readable_list_no_earlier_file_is_removed(make_runner, tmp_path, text):
    settings = {"log_dir": tmp_path, "save_interval": 1, "keep_checkpoints": 2}
    make_runner(**settings).learn(2)
    (tmp_path / "periodic_checkpoints.json").write_text(text)
    resumed = make_runner(**settings)
    resumed.load_checkpoint("model_2.pt")
    resumed.learn(3)
    assert files(tmp_path) == ["checkpoint_final.pt", "model_1.pt", "model_2.pt", "model_4.pt", "model_5.pt"]


def test_a_new_run_between_the_files_of_another_is_a_warning(make_runner, tmp_path):
    make_runner(log_dir=tmp_path).learn(3)
    with pytest.warns(UserWarning, match=r"checkpoints of an earlier run, up to model_3\.pt"):
        make_runner(log_dir=tmp_path).learn(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        again = make_runner(log_dir=tmp_path)
        again.load(tmp_path / "model_3.pt")
        again.learn(1)


@pytest.mark.parametrize("name", ["with space", "запуск", "実験", "🤖", "x" * 200])
def test_any_directory_name_will_do_and_may_change(make_runner, tmp_path, name):
    make_runner(log_dir=tmp_path / name).learn(1)
    (tmp_path / name).rename(tmp_path / "moved")
    runner = make_runner(log_dir=tmp_path / "moved")
    runner.load(newest_valid_checkpoint(tmp_path / "moved"))
    runner.learn(1)
    assert runner.iteration == 2


# ------------------------------------------------------------------ loading in part, elsewhere, from elsewhere
def test_without_its_optimizer_only_weights_and_counters_are_taken(make_runner, differing, tmp_path):
    make_runner(algorithm={"schedule": "adaptive", "empirical_normalization": True}, log_dir=tmp_path).learn(3)
    runner = make_runner(algorithm={"schedule": "adaptive", "empirical_normalization": True}, seed=9)
    runner.learn(1)
    before = copy.deepcopy({"o": runner.alg.optimizer.state_dict(), "lr": runner.alg.learning_rate})
    obs = runner.obs
    runner.load(tmp_path / "model_3.pt", load_optimizer=False)
    assert differing(before, {"o": runner.alg.optimizer.state_dict(), "lr": runner.alg.learning_rate}) == []
    assert runner.obs is obs
    saved = torch.load(tmp_path / "model_3.pt", weights_only=True)
    assert differing(saved["model_state_dict"], dict(runner.policy.state_dict())) == []
    assert runner.iteration == 3


@pytest.mark.parametrize("where", [None, "cpu", torch.device("cpu"), {"cuda:0": "cpu"}])
def test_map_location_takes_every_form(make_runner, tmp_path, where):
    make_runner(log_dir=tmp_path).learn(1)
    runner = make_runner()
    runner.load(tmp_path / "model_1.pt", map_location=where)
    runner.learn(1)
    assert runner.iteration == 2


@pytest.mark.parametrize(("saved", "loaded"), [(4, 2), (1, 4), (2, 1)])
@pytest.mark.parametrize("policy", [{}, GRU])
def test_another_number_of_environments_continues_from_new_episodes(make_runner, tmp_path, saved, loaded, policy):
    kwargs = {"algorithm": {**EVERYTHING, "num_mini_batches": 1}, "policy": policy}
    first = make_runner(PointRobot(saved, max_episode_length=7), log_dir=tmp_path, **kwargs)
    first.learn(3)
    runner = make_runner(PointRobot(loaded, max_episode_length=7), **kwargs)
    runner.load(tmp_path / "model_3.pt")
    assert list(runner.rewbuffer) == list(first.rewbuffer) != []
    assert runner.stats.tracker.cur_episode_length.tolist() == [0] * loaded
    assert torch.equal(runner.alg.return_scaler.var, first.alg.return_scaler.var)
    assert runner.alg.return_scaler.returns.tolist() == [0.0] * loaded
    assert runner.obs.shape == (loaded, 6)
    runner.learn(2)
    runner.eval(1)
    player = make_runner(PointRobot(loaded), **kwargs)
    player.load(tmp_path / "model_3.pt", load_optimizer=False)
    assert player.iteration == 3


def test_an_environment_that_cannot_be_restored_starts_new_episodes(make_runner, counting, tmp_path):
    make_runner(counting((50, 50)), log_dir=tmp_path, policy=GRU).learn(1)
    env = counting((50, 50))
    runner = make_runner(env, policy=GRU)
    resets = env.num_resets
    runner.load(tmp_path / "model_1.pt")
    assert env.num_resets == resets + 1
    assert runner.obs[:, 1].tolist() == [0.0, 0.0]
    assert runner.stats.tracker.cur_episode_length.tolist() == [0, 0]
    assert not runner.policy.memory_a.state.any()


@pytest.mark.parametrize("damage", ["generators", "env"])
def test_state_of_another_device_or_environment_is_a_warning(make_runner, tmp_path, damage):
    make_runner(log_dir=tmp_path).learn(2)
    state = torch.load(tmp_path / "model_2.pt", weights_only=True)
    if damage == "generators":  # a GPU's generators have states of 16 bytes
        state["resume"]["algorithm"]["generators"]["action"] = torch.zeros(16, dtype=torch.uint8)
    else:
        state["resume"]["env"]["state"] = {"other": torch.zeros(4, 2)}
    save_checkpoint(tmp_path / "other.pt", state)
    runner = make_runner()
    with pytest.warns(UserWarning, match="the state was not restored"):
        runner.load(tmp_path / "other.pt")
    assert runner.stats.tracker.cur_episode_length.tolist() == [0] * 4
    runner.learn(1)
    assert runner.iteration == 3


@pytest.mark.parametrize("layout", ["rsl_rl", "apex"])
def test_files_of_other_libraries_give_their_weights(make_runner, tmp_path, layout):
    source = make_runner(algorithm={"empirical_normalization": True}, seed=3)
    source.learn(1)
    weights = {k: v for k, v in source.policy.state_dict().items() if "normalizer" not in k}
    norms = {
        f"{name}norm_state_dict": getattr(source.policy, f"{name}normalizer").state_dict()
        for name in ("obs_", "critic_obs_")
    }
    if layout == "rsl_rl":
        torch.save({"model_state_dict": weights, **norms, "iter": 7, "infos": {"a": 1}}, tmp_path / "f.pt")
    else:  # its two networks; a Gaussian's noise belongs to the actor
        source = make_runner(CartPole(4), seed=3)
        parts = {"actor": {}, "critic": {}}
        for name, value in source.policy.state_dict().items():
            part, _, rest = name.partition(".")
            parts[part][rest] = value
        state = {f"{part}_state_dict": value for part, value in parts.items()}
        torch.save({**state, "iteration": 7}, tmp_path / "f.pt")
    env = CartPole(4) if layout == "apex" else None
    runner = make_runner(env, algorithm={"empirical_normalization": layout == "rsl_rl"})
    with pytest.warns(UserWarning, match="no optimizer_state_dict"):
        infos = runner.load(tmp_path / "f.pt")
    assert infos == ({"a": 1} if layout == "rsl_rl" else None)
    assert (runner.iteration, runner.tot_timesteps) == (7, 7 * 16)
    for name, value in source.policy.state_dict().items():
        assert torch.equal(runner.policy.state_dict()[name], value)
    runner.learn(1)


# ------------------------------------------------------------------ refusing
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policy": {"actor_hidden_dims": [9]}}, r"shape of actor.0.weight: want \(9, 6\), got \(8, 6\)"),
        ({"policy": {"critic_hidden_dims": [8, 8]}}, r"missing critic.4.weight"),
        ({"policy": GRU}, r"missing memory_a.rnn.weight_ih_l0"),
        ({"env": CartPole(4)}, r"shape of actor.0.weight: want \(8, 4\), got \(8, 6\)"),
        ({"algorithm": {"empirical_normalization": True}}, "set empirical_normalization=False"),
    ],
)
def test_another_architecture_is_refused_whole(make_runner, differing, weights, tmp_path, change, message):
    make_runner(log_dir=tmp_path).learn(2)
    env = change.pop("env", None)
    runner = make_runner(env, **change, seed=9)
    before = weights(runner)
    with pytest.raises((RuntimeError, ValueError), match=message):
        runner.load(tmp_path / "model_2.pt")
    assert differing(before, weights(runner)) == []
    assert (runner.iteration, runner.tot_timesteps) == (0, 0)
    runner.learn(1)


def test_every_difference_is_listed(make_runner, tmp_path):
    make_runner(log_dir=tmp_path).learn(1)
    runner = make_runner(policy={"actor_hidden_dims": [9], "critic_hidden_dims": [7]})
    with pytest.raises(RuntimeError, match="does not fit ActorCritic") as caught:
        runner.load(tmp_path / "model_1.pt")
    text = str(caught.value)
    for name in (
        "actor.0.weight",
        "actor.0.bias",
        "actor.2.weight",
        "critic.0.weight",
        "critic.0.bias",
        "critic.2.weight",
    ):
        assert f"shape of {name}" in text


def test_another_optimizer_is_refused_before_anything_changes(make_runner, differing, weights, tmp_path):
    make_runner(log_dir=tmp_path).learn(1)
    state = torch.load(tmp_path / "model_1.pt", weights_only=True)
    state["optimizer_state_dict"]["state"][0]["exp_avg"] = torch.zeros(3, 3)
    save_checkpoint(tmp_path / "odd.pt", state)
    runner = make_runner(seed=9)
    before = weights(runner)
    with pytest.raises(RuntimeError, match=r"'exp_avg' of parameter 0"):
        runner.load(tmp_path / "odd.pt")
    assert differing(before, weights(runner)) == []


def test_a_checkpoint_of_the_future_is_refused(make_runner, tmp_path):
    make_runner(log_dir=tmp_path).learn(1)
    state = torch.load(tmp_path / "model_1.pt", weights_only=True)
    save_checkpoint(tmp_path / "new.pt", {**state, "format_version": 99})
    with pytest.raises(CheckpointError, match="format version 99"):
        make_runner().load(tmp_path / "new.pt")


# ------------------------------------------------------------------ changing a checkpoint while it is loaded
class Encoded(ActorCritic):
    """An actor-critic with two encoders, of which only the names matter here."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.encoders = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def actor_features(self, obs, ctx):
        return self.encoders[1](self.encoders[0](obs))


def test_replace_encoder0_keeps_the_fresh_encoder_and_drops_the_moments(make_runner, tmp_path, monkeypatch):
    monkeypatch.setitem(policies.POLICIES, "Encoded", Encoded)
    source = make_runner(policy={"class_name": "Encoded"}, log_dir=tmp_path)
    source.learn(2)
    runner = make_runner(policy={"class_name": "Encoded"}, seed=9, ckpt_manipulator="replace_encoder0")
    fresh = copy.deepcopy(runner.policy.state_dict())
    runner.load(tmp_path / "model_2.pt")
    for name, value in runner.policy.state_dict().items():
        expected = fresh if name.startswith("encoders.0.") else source.policy.state_dict()
        assert torch.equal(value, expected[name]), name
    assert not torch.equal(fresh["encoders.0.weight"], source.policy.state_dict()["encoders.0.weight"])
    assert runner.alg.optimizer.state_dict()["state"] == {}
    again = load_checkpoint(tmp_path / "manipulated_model_2.pt")
    assert torch.equal(again["model_state_dict"]["encoders.0.weight"], fresh["encoders.0.weight"])
    assert newest_valid_checkpoint(tmp_path).name == "model_2.pt"
    runner.learn(1)


def test_a_function_may_change_the_loaded_state(make_runner, tmp_path):
    make_runner(log_dir=tmp_path).learn(2)
    seen = []

    def older(loaded, fresh):
        seen.append(set(fresh) <= set(loaded))
        return {**loaded, "iter": 1}

    runner = make_runner(ckpt_manipulator=older)
    runner.load(tmp_path / "model_2.pt")
    assert (seen, runner.iteration) == ([True], 1)
    with pytest.raises(ValueError, match="'replace'.* replace_encoder0"):
        make_runner(ckpt_manipulator="replace").load(tmp_path / "model_2.pt")


def test_a_read_only_place_is_no_reason_not_to_load(make_runner, tmp_path, monkeypatch):
    make_runner(log_dir=tmp_path).learn(1)

    def refuse(path, state, root=None):
        raise PermissionError("read-only")

    monkeypatch.setattr("canter.runners.checkpoints.save_checkpoint", refuse)
    runner = make_runner(ckpt_manipulator=lambda loaded, fresh: loaded)
    with pytest.warns(UserWarning, match="manipulated checkpoint was not written: read-only"):
        runner.load(tmp_path / "model_1.pt")
    assert runner.iteration == 1


@pytest.mark.parametrize("when", ["after", "before"])
def test_what_a_user_saved_under_a_relative_path_or_before_the_runner_is_never_removed(
    make_runner, tmp_path, monkeypatch, when
):
    monkeypatch.chdir(tmp_path)
    runner = make_runner(log_dir="run", save_interval=1, keep_checkpoints=2)
    if when == "before":  # the runner saves the same iteration afterwards
        runner.add_callback("post_iteration", lambda r, stats: r.iteration == 1 and r.save("run/model_1.pt"))
    runner.learn(1)
    if when == "after":
        runner.save("run/model_1.pt")
    runner.learn(4)
    assert files(tmp_path / "run") == ["checkpoint_final.pt", "model_1.pt", "model_4.pt", "model_5.pt"]
