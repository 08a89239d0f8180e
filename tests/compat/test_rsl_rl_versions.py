"""Runs of rsl_rl 2.x to 5.x: what its own runners wrote goes on here, and its numbers are ours."""

import copy
import importlib.metadata
import math
import sys
from pathlib import Path

import pytest
import torch

from canter.compat.checkpoints import import_state
from canter.envs.records import take_groups
from canter.runners import OnPolicyRunner

pytest.importorskip("tensordict")
from tensordict import TensorDict

sys.path.insert(0, str(Path(__file__).parent / "rsl_rl"))
from peer import PPO, RUN, PeerEnv, model_cfg

DATA = Path(__file__).parent / "rsl_rl"
FILES = sorted(DATA.glob("*.pt"))


def read(file):
    return torch.load(file, weights_only=True)


def runner_for(infos, **more):
    torch.manual_seed(5)
    env = PeerEnv(int(infos["version"][0]))
    return OnPolicyRunner(env, {**infos["cfg"], **more}, device="cpu", show_progress=False)


def check_actions_and_values(runner, infos):
    act = runner.get_inference_policy(device="cpu")
    for step, obs in enumerate(infos["obs"]):
        if step == 2:
            runner.alg.policy.reset(infos["dones"])
        is_vector = infos["version"].startswith("2")
        actions = act(torch.cat([obs["proprio"], obs["command"]], 1) if is_vector else TensorDict(obs, batch_size=[4]))
        torch.testing.assert_close(actions, infos["actions"][step], rtol=0, atol=1e-6)
        values = runner.policy.evaluate(obs["critic"])
        torch.testing.assert_close(values, infos["values"][step], rtol=0, atol=1e-6)


def check_moments(runner, state):
    """Every moment of the optimizer belongs to the parameter that it was saved for."""
    parts = [state[name] for name in ("model_state_dict", "actor_state_dict", "critic_state_dict") if name in state]
    weights = [value for part in parts for name, value in part.items() if "normalizer" not in name]
    ours = runner.alg.optimizer.state_dict()["state"]
    assert len(weights) == len(ours)
    for index, parameter in enumerate(runner.policy.parameters()):
        [place] = [i for i, weight in enumerate(weights) if torch.equal(weight, parameter)]
        theirs = state["optimizer_state_dict"]["state"][place]
        torch.testing.assert_close(ours[index]["exp_avg_sq"], theirs["exp_avg_sq"])


@pytest.mark.parametrize("version", ["2", "3", "4", "5"])
def test_a_run_of_this_version_goes_on_with_its_actions_values_and_moments(version):
    files = [file for file in FILES if file.stem[7] == version]
    assert files
    for file in files:
        state = read(file)
        runner = runner_for(state["infos"])
        assert runner.load(str(file))["version"] == state["infos"]["version"]
        assert runner.current_learning_iteration == 1
        check_moments(runner, state)
        check_actions_and_values(runner, state["infos"])
        before = {name: p.detach().clone() for name, p in runner.policy.named_parameters()}
        runner.learn(1)
        assert runner.current_learning_iteration == 2
        assert all(not torch.equal(p, before[name]) for name, p in runner.policy.named_parameters())


def test_load_cfg_selects_the_actor_alone():
    file = DATA / "rsl_rl_5_lstm_normalized.pt"
    runner = runner_for(read(file)["infos"])
    before = {name: value.clone() for name, value in runner.policy.state_dict().items()}
    runner.load(str(file), load_cfg={"actor": True}, strict=True, map_location="cpu")
    assert runner.current_learning_iteration == 0
    after = runner.policy.state_dict()
    changed = {name.split(".")[0] for name in after if not torch.equal(after[name], before[name])}
    assert changed == {"log_std", "actor", "memory_a", "obs_normalizer"}
    assert runner.alg.optimizer.state_dict()["state"] == {}
    runner.load(str(file), {"critic": True, "iteration": True})  # rsl_rl's positional order
    assert runner.current_learning_iteration == 1
    torch.testing.assert_close(runner.policy.state_dict(), import_state(read(file))["model_state_dict"])


def test_arguments_by_position_are_those_of_rsl_rl(tmp_path):
    file = DATA / "rsl_rl_5_mlp.pt"
    state = read(file)
    del state["actor_state_dict"]["mlp.2.bias"]
    torch.save(state, tmp_path / "changed.pt")
    runner = runner_for(state["infos"])
    runner.load(str(file), None, True, "cpu")  # 5.x: load_cfg, strict, map_location
    runner.load(str(file), True, "cpu")  # 3.x: load_optimizer, map_location
    runner.load(str(tmp_path / "changed.pt"), {"actor": True}, False, "cpu")
    with pytest.raises(RuntimeError, match=r"missing actor.2.bias"):
        runner.load(str(tmp_path / "changed.pt"), {"actor": True}, True)
    with pytest.raises(TypeError, match="'more' is one too many"):
        runner.load(str(file), None, True, "cpu", "more")


def test_a_part_that_no_checkpoint_has_is_an_error(tmp_path):
    file = DATA / "rsl_rl_5_mlp.pt"
    runner = runner_for(read(file)["infos"])
    before = {name: value.clone() for name, value in runner.policy.state_dict().items()}
    for wrong in ({"load_cfg": {"acotr": True}}, {"load_optimizer": {"acotr": True}}):
        with pytest.raises(ValueError, match="load_cfg has no part 'acotr'; parts of a checkpoint are actor, critic"):
            runner.load(file, **wrong)
    torch.testing.assert_close(runner.policy.state_dict(), before)


def test_without_strict_a_tensor_that_one_side_lacks_keeps_its_value(tmp_path):
    file = DATA / "rsl_rl_5_mlp.pt"
    state = read(file)
    state["actor_state_dict"]["extra.weight"] = state["actor_state_dict"].pop("mlp.2.bias")
    torch.save(state, tmp_path / "changed.pt")
    runner = runner_for(state["infos"])
    own = runner.policy.actor[2].bias.detach().clone()
    with pytest.raises(RuntimeError, match=r"missing actor.2.bias, want \(2,\)"):
        runner.load(tmp_path / "changed.pt")
    runner.load(tmp_path / "changed.pt", strict=False, load_optimizer=False)
    torch.testing.assert_close(runner.policy.actor[2].bias.detach(), own)
    torch.testing.assert_close(runner.policy.actor[0].weight.detach(), state["actor_state_dict"]["mlp.0.weight"])


def test_a_normaliser_that_only_one_side_has_is_an_error_that_names_the_setting():
    file = DATA / "rsl_rl_5_mlp_normalized.pt"
    runner = OnPolicyRunner(PeerEnv(), model_cfg(normalized=(True, True)), device="cpu", show_progress=False)
    with pytest.raises(ValueError, match="lacks statistics for critic_obs_normalizer.*critic_obs_normalization=False"):
        runner.load(file)


def test_a_checkpoint_of_rsl_rl_is_a_teacher():
    file = DATA / "rsl_rl_5_mlp_normalized.pt"
    infos = read(file)["infos"]
    teacher = {"actor_hidden_dims": [6], "critic_hidden_dims": [5], "noise_std_type": "log"}
    algorithm = {"class_name": "TPPO", "using_ppo": False, "teacher_ac_path": str(file), "teacher_policy": teacher}
    cfg = {"obs_groups": {"actor": ["command"], "critic": ["proprio", "command"]}, "algorithm": algorithm}
    runner = OnPolicyRunner(PeerEnv(), cfg, device="cpu", show_progress=False)
    for obs, actions in zip(infos["obs"], infos["actions"], strict=True):
        seen = torch.cat([obs["proprio"], obs["command"]], 1)
        torch.testing.assert_close(runner.alg.teacher_actor_critic.act_inference(seen), actions, rtol=0, atol=1e-6)
    runner.learn(1)


def test_rnd_of_rsl_rl_goes_on(tmp_path):
    state = read(DATA / "rsl_rl_5_mlp.pt")
    cfg = state["infos"]["cfg"]
    cfg["algorithm"]["rnd_cfg"] = {"weight": 1.0, "num_outputs": 2, "predictor_hidden_dims": [3]}
    cfg["algorithm"]["rnd_cfg"] |= {
        "target_hidden_dims": [3],
        "state_normalization": True,
        "reward_normalization": True,
    }
    cfg["obs_groups"]["rnd_state"] = ["critic"]
    nets = {"0.weight": torch.randn(3, 4), "0.bias": torch.randn(3), "2.weight": torch.randn(2, 3)}
    nets["2.bias"] = torch.randn(2)
    rnd = {f"{net}.{name}": torch.randn_like(value) for net in ("predictor", "target") for name, value in nets.items()}
    statistics = {"_mean": torch.randn(1, 4), "_var": torch.full((1, 4), 4.0), "_std": torch.full((1, 4), 2.0)}
    rnd |= {f"state_normalizer.{name}": value for name, value in statistics.items()}
    scale = {"_mean": torch.tensor([3.0]), "_var": torch.tensor([9.0]), "_std": torch.tensor([3.0])}
    rnd |= {f"reward_normalizer.emp_norm.{name}": value for name, value in scale.items()}
    rnd |= {name: torch.tensor(50) for name in ("state_normalizer.count", "reward_normalizer.emp_norm.count")}
    moments = {i: {"step": torch.tensor(7.0), "exp_avg": v, "exp_avg_sq": v.abs()} for i, v in enumerate(nets.values())}
    group = {**state["optimizer_state_dict"]["param_groups"][0], "params": [0, 1, 2, 3]}
    state |= {"rnd_state_dict": rnd, "rnd_optimizer_state_dict": {"state": moments, "param_groups": [group]}}
    torch.save(state, tmp_path / "model.pt")
    runner = OnPolicyRunner(PeerEnv(), cfg, device="cpu", show_progress=False)
    runner.load(tmp_path / "model.pt")
    model = runner.alg.extensions["rnd"].model
    loaded = model.state_dict()
    for name, value in rnd.items():
        if "reward" not in name:
            torch.testing.assert_close(loaded[name], value)
    assert (float(model.reward_scaler.mean), float(model.reward_scaler.var), int(model.reward_scaler.count)) == (
        3,
        9,
        50,
    )
    saved = model.optimizer.state_dict()["state"]
    torch.testing.assert_close(saved[2]["exp_avg"].reshape(2, 3), nets["2.weight"])
    runner.learn(1)


def without(state, *prefixes):
    return {name: value for name, value in state.items() if not name.startswith(prefixes)}


def only(state, prefix):
    return {name[len(prefix) + 1 :]: value for name, value in state.items() if name.startswith(prefix + ".")}


@pytest.fixture
def saved(make_ppo, collect):
    """`saved(kind)`: a trained PPO and a copy of its state."""

    def train(kind, **settings):
        alg, env = make_ppo(kind, **settings)
        collect(alg, env)
        alg.update(0)
        return alg, copy.deepcopy(alg.state_dict())

    return train


def test_a_separate_actor_and_critic_are_one_model(make_ppo, saved, snapshot, differing):
    alg, state = saved("dict")
    model = state.pop("model_state_dict")
    state["actor_state_dict"], state["critic_state_dict"] = only(model, "actor"), only(model, "critic")
    other, _ = make_ppo("dict", seed=5)
    with torch.no_grad():
        for p in other.policy.parameters():
            p.zero_()
    other.load_state_dict(state)
    assert differing(snapshot(alg), snapshot(other)) == []


def test_separate_normalisers_join_the_model(make_ppo, saved, snapshot, differing):
    alg, state = saved("mlp", empirical_normalization=True)
    model = state["model_state_dict"]
    state["obs_norm_state_dict"] = only(model, "obs_normalizer")
    state["critic_obs_norm_state_dict"] = only(model, "critic_obs_normalizer")
    state["model_state_dict"] = without(model, "obs_normalizer.", "critic_obs_normalizer.")
    other, _ = make_ppo("mlp", empirical_normalization=True)
    other.load_state_dict(state)
    assert other.obs_normalizer.count == 24
    assert differing(snapshot(alg), snapshot(other)) == []


def test_empty_normalisers_of_a_run_without_them_are_no_difference(make_ppo, saved):
    alg, state = saved("mlp")
    state["obs_norm_state_dict"] = state["critic_obs_norm_state_dict"] = {}
    other, _ = make_ppo("mlp")
    other.load_state_dict(state)
    assert torch.equal(other.policy.std, alg.policy.std)


def test_normalisers_of_a_file_are_refused_where_normalisation_is_off(make_ppo, saved):
    alg, state = saved("mlp", empirical_normalization=True)
    state["obs_norm_state_dict"] = only(state["model_state_dict"], "obs_normalizer")
    state["model_state_dict"] = without(state["model_state_dict"], "obs_normalizer.", "critic_obs_normalizer.")
    other, _ = make_ppo("mlp")
    with pytest.raises(ValueError, match="has statistics for obs_normalizer.*set empirical_normalization=True"):
        other.load_state_dict(state)


def test_the_iteration_gets_our_name_and_nothing_given_is_changed():
    state = {"model_state_dict": {"x": 1}, "iteration": 7, "obs_norm_state_dict": {"y": 2}}
    before = copy.deepcopy(state)
    assert import_state(state) == {"model_state_dict": {"x": 1, "obs_normalizer.y": 2}, "iter": 7}
    assert state == before
    assert import_state({"model_state_dict": {}, "iter": 3, "iteration": 4})["iter"] == 3


def mirror(env, obs=None, actions=None):
    """The image of every group and of the actions, below the originals."""
    if obs is not None:
        image = {"proprio": obs["proprio"] * torch.tensor([1.0, -1.0, 1.0]), "command": obs["command"][:, [1, 0]]}
        image["critic"] = obs["critic"][:, [3, 1, 2, 0]]
        obs = torch.cat([obs, TensorDict(image, batch_size=obs.batch_size)])
    return obs, None if actions is None else torch.cat([actions, -actions.flip(1)])


def symmetry(augment, loss):
    flags = {"use_data_augmentation": augment, "use_mirror_loss": loss, "mirror_loss_coeff": 0.7}
    return {"symmetry_cfg": {"data_augmentation_func": mirror, **flags}}


RND = {"weight": 50.0, "num_outputs": 2, "predictor_hidden_dims": [5], "target_hidden_dims": [6]}
NEEDED = "compares with the real rsl_rl: pip install 'rsl-rl-lib>=5.5'"
CASES = {
    "mlp": (model_cfg(normalized=(True, True)), {"schedule": "adaptive", "desired_kl": 1e-4}),
    "one_normaliser": (model_cfg(normalized=(False, True)), {"normalize_advantage_per_mini_batch": True}),
    "tight_clip": (model_cfg(), {"max_grad_norm": 0.05, "use_clipped_value_loss": False, "value_loss_coef": 3.0}),
    "lstm": (model_cfg("lstm", (True, False)), {}),
    "gru": (model_cfg("gru"), {"optimizer": "adamw", "max_grad_norm": 0.1}),
    "state_dependent": (model_cfg(distribution={"class_name": "HeteroscedasticGaussianDistribution"}), {}),
    "beta": (model_cfg(distribution={"class_name": "BetaDistribution", "action_range": [-2.0, 1.0]}), {}),
    "mirror_images": (model_cfg(), symmetry(True, False)),
    "mirror_loss": (model_cfg(), symmetry(False, True)),
    "both_symmetries": (model_cfg(), symmetry(True, True)),
    "rnd": (model_cfg(), {"rnd_cfg": RND}),
}


def close(ours, theirs, atol=2e-5):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=atol)


def real_rsl_rl():
    """The runners of the real rsl_rl."""
    rsl_rl = pytest.importorskip("rsl_rl.runners", reason=NEEDED)
    if tuple(map(int, importlib.metadata.version("rsl-rl-lib").split(".")[:2])) < (5, 5):
        pytest.skip(NEEDED)  # before, normalisers took every step into account at once, not at the end of an update
    torch.manual_seed(3)
    return rsl_rl


def both(cfg, tmp_path):
    """rsl_rl's runner and ours with its weights."""
    rsl_rl = real_rsl_rl()
    env = PeerEnv()
    peer = rsl_rl.OnPolicyRunner(env, copy.deepcopy(cfg), log_dir=None, device="cpu")
    peer.alg.train_mode()
    peer.logger.save_model = lambda *_: None
    peer.save(str(tmp_path / "peer.pt"))
    given = {**cfg, "algorithm": {**cfg["algorithm"], "execution": "eager"}}
    ours = OnPolicyRunner(PeerEnv(), given, device="cpu", show_progress=False)
    ours.load(str(tmp_path / "peer.pt"))
    ours.alg.train_mode()
    ours.alg.on_record = ours.alg.on_step = []  # statistics that only the runner's loop reads
    return env, peer, ours


@pytest.mark.parametrize("case", CASES)
def test_two_iterations_give_the_numbers_of_rsl_rl(case, tmp_path):
    cfg, settings = copy.deepcopy(CASES[case])
    cfg["obs_groups"] |= {"rnd_state": ["critic"]} if case == "rnd" else {}
    cfg["algorithm"] |= {"num_learning_epochs": 3, "num_mini_batches": 1, **settings}
    env, peer, ours = both(cfg, tmp_path)
    alg, distribution = ours.alg, ours.policy.distribution
    obs = env.get_observations()
    for iteration in range(2):
        with torch.inference_mode():
            for _ in range(cfg["num_steps_per_env"]):
                actions = peer.alg.act(obs)
                theirs = peer.alg.transition
                alg.act(take_groups(obs, ours.env.sets[0]), obs["critic"])
                step = alg.transition
                close(step.values, theirs.values)
                # A share of the range is what our Beta distribution is about.
                chosen = (actions + 2.0) / 3.0 if case == "beta" else actions
                step.actions = chosen.clone()
                step.actions_log_prob = distribution.log_prob(step.params, step.actions)
                close(step.actions_log_prob, theirs.actions_log_prob.squeeze(-1))
                obs, rewards, dones, extras = env.step(actions)
                peer.alg.process_env_step(obs, rewards.clone(), dones, extras)
                alg.process_env_step(rewards, dones, dict(extras), take_groups(obs, ours.env.sets[0]), obs["critic"])
            peer.alg.compute_returns(obs)
            alg.compute_returns(obs["critic"])
        close(alg.storage.data["rewards"].squeeze(-1), peer.alg.storage.rewards.squeeze(-1))
        close(alg.storage.data["returns"].squeeze(-1), peer.alg.storage.returns.squeeze(-1))
        close(alg.storage.data["advantages"].squeeze(-1), peer.alg.storage.advantages.squeeze(-1))
        expected = peer.alg.update()
        losses, _ = alg.update(iteration)
        close(torch.tensor(losses["value_loss"]), torch.tensor(expected["value"]))
        close(torch.tensor(losses["surrogate_loss"]), torch.tensor(expected["surrogate"]))
        if "symmetry" in expected:  # theirs is a mean over the actions, ours a sum
            close(torch.tensor(losses["mirror_loss"]), env.num_actions * torch.tensor(expected["symmetry"]))
        if "rnd" in expected:
            close(torch.tensor(losses["rnd_loss"]), torch.tensor(expected["rnd"]))
            ours_rnd, theirs_rnd = alg.extensions["rnd"].model.predictor, peer.alg.rnd.predictor
            torch.testing.assert_close(ours_rnd.state_dict(), theirs_rnd.state_dict(), rtol=1e-4, atol=2e-5)
        offset = 2 * math.log(3.0) if case == "beta" else 0.0  # rsl_rl leaves out the logarithm of the range
        close(torch.tensor(-losses["entropy"]), torch.tensor(expected["entropy"] + offset))
        assert alg.learning_rate == pytest.approx(peer.alg.learning_rate)
        new = import_state({**peer.alg.save(), "iter": 0})["model_state_dict"]
        for name, value in ours.policy.state_dict().items():
            close(value, new[name])


def network(rnn, width, normalized):
    memory = {"class_name": "RNNModel", "rnn_type": rnn, "rnn_hidden_dim": 4, "rnn_num_layers": 1}
    common = {"activation": "elu", "obs_normalization": normalized, "hidden_dims": [width]}
    noise = {"class_name": "GaussianDistribution", "init_std": 0.3}
    return {**(memory if rnn else {"class_name": "MLPModel"}), **common, "distribution_cfg": noise}


@pytest.mark.parametrize(
    ("student", "teacher", "normalized", "settings"),
    [
        (None, None, True, {}),
        (None, None, False, {"loss_type": "huber", "max_grad_norm": 0.05}),
        ("lstm", "gru", True, {"max_grad_norm": 0.1}),
    ],
)
def test_a_distillation_gives_the_numbers_of_rsl_rl(student, teacher, normalized, settings, tmp_path):
    rsl_rl, path = real_rsl_rl(), str(tmp_path / "teacher.pt")
    critic = {name: value for name, value in network(teacher, 5, False).items() if name != "distribution_cfg"}
    cfg = {**RUN, "obs_groups": {"actor": ["critic"], "critic": ["critic"]}, "algorithm": dict(PPO)}
    trained = rsl_rl.OnPolicyRunner(
        PeerEnv(), cfg | {"actor": network(teacher, 5, normalized), "critic": critic}, device="cpu"
    )
    trained.logger.save_model = lambda *_: None
    trained.learn(1)
    trained.save(path)
    algorithm = {"class_name": "Distillation", "num_learning_epochs": 2, "gradient_length": 6, "learning_rate": 0.01}
    cfg |= {"student": network(student, 6, normalized), "teacher": network(teacher, 5, normalized)}
    cfg |= {"obs_groups": {"student": ["proprio", "command"], "teacher": ["critic"]}}
    cfg |= {"algorithm": algorithm | settings}
    env = PeerEnv()
    peer = rsl_rl.DistillationRunner(env, copy.deepcopy(cfg), log_dir=None, device="cpu")
    ours = OnPolicyRunner(PeerEnv(), copy.deepcopy(cfg), device="cpu", show_progress=False)
    for runner in (peer, ours):
        runner.load(path)
        runner.alg.train_mode()
    alg = ours.alg
    alg.on_record = alg.on_step = []
    theirs = import_state({**peer.alg.save(), "iter": 0})["model_state_dict"]
    ours.policy.load_state_dict({**ours.policy.state_dict(), **theirs})
    obs = env.get_observations()
    for iteration in range(1 if student else 2):  # later, rsl_rl begins with the memories that its update left
        with torch.inference_mode():
            for _ in range(cfg["num_steps_per_env"]):
                actions = peer.alg.act(obs)
                alg.act(take_groups(obs, ours.env.sets[0]), obs["critic"])
                alg.transition.actions = actions.clone()
                obs, rewards, dones, extras = env.step(actions)
                peer.alg.process_env_step(obs, rewards, dones, extras)
                alg.process_env_step(rewards, dones, dict(extras), take_groups(obs, ours.env.sets[0]), obs["critic"])
            alg.compute_returns(obs["critic"])
        close(alg.storage.data["action_labels"], peer.alg.storage.privileged_actions)
        expected = peer.alg.update()
        losses, _ = alg.update(iteration)
        close(torch.tensor(losses["distillation_loss"]), torch.tensor(expected["behavior"]))
        new = import_state({**peer.alg.save(), "iter": 0})["model_state_dict"]
        for name, value in new.items():
            close(ours.policy.state_dict()[name], value)
