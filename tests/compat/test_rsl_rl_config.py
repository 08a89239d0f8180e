"""Training dicts of rsl_rl 1.x to 5.x, of Isaac Lab and of mjlab: every key is applied, listed or refused."""

import copy
import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch

from canter.compat.training_dicts import DEFAULTS, Translation, complete_rnd, signed_permutation
from canter.envs.wrappers import ClipActions
from canter.modules import ActorCritic, ActorCriticRecurrent, Beta, register_policy
from canter.modules.normalizer import EmpiricalNormalization, NoNormalization
from canter.runners import OnPolicyRunner
from canter.runners.run_config import make_plan, parse_train_cfg

pytest.importorskip("tensordict")
from tensordict import TensorDict

sys.path.insert(0, str(Path(__file__).parent / "rsl_rl"))
from peer import PeerEnv, model_cfg, policy_cfg

DATA = Path(__file__).parent / "rsl_rl"
MJLAB = json.loads((DATA / "mjlab_configs.json").read_text())
ISAAC_LAB = json.loads((DATA / "isaac_lab_configs.json").read_text())
REFUSED = {  # what only classes of a task can do
    "3.0.0 contrib/keyboard:SO101PPORunnerCfg": "'isaaclab_tasks.contrib.keyboard.*SharedEncoderPPO'",
    "3.0.0 contrib/multitask_manipulation:MultitaskManipulationPPORunnerCfg": "'TaskHeadedGaussianDistribution' is not",
    "3.0.0 contrib/ur10_particle_push:UR10ParticlePushPPORunnerCfg": "'UR10ParticlePushGaussianDistribution' is not",
}
LEGGED_GYM = {
    "seed": 1,
    "runner_class_name": "OnPolicyRunner",
    "init_member_classes": {},
    "policy": {
        "init_noise_std": 1.0,
        "actor_hidden_dims": [12],
        "critic_hidden_dims": [12],
        "activation": "elu",
        "init_member_classes": {},
    },
    "algorithm": {
        "value_loss_coef": 1.0,
        "use_clipped_value_loss": True,
        "clip_param": 0.2,
        "entropy_coef": 0.01,
        "num_learning_epochs": 5,
        "num_mini_batches": 4,
        "learning_rate": 1e-3,
        "schedule": "adaptive",
        "gamma": 0.99,
        "lam": 0.95,
        "desired_kl": 0.01,
        "max_grad_norm": 1.0,
    },
    "runner": {
        "policy_class_name": "ActorCritic",
        "algorithm_class_name": "PPO",
        "num_steps_per_env": 24,
        "max_iterations": 1500,
        "save_interval": 50,
        "experiment_name": "test",
        "run_name": "",
        "resume": False,
        "load_run": -1,
        "checkpoint": -1,
        "resume_path": None,
    },
}


def runner_on(cfg, style=5, **given):
    torch.manual_seed(0)
    return OnPolicyRunner(PeerEnv(style), copy.deepcopy(cfg), device="cpu", show_progress=False, **given)


def listed(cfg):
    """Names of the keys that the translation reports as unused."""
    translation = Translation(cfg)
    translation.run()
    return translation.unused


# ------------------------------------------------------------------ whole dicts
@pytest.mark.parametrize("task", sorted(MJLAB))
def test_the_dict_of_every_mjlab_task_is_taken_as_it_is(task):
    given = MJLAB[task]
    plan = parse_train_cfg(given)
    cfg, actor, critic = plan.cfg, given["actor"], given["critic"]
    for name, value in given["algorithm"].items():
        if name not in ("class_name", "optimizer", "share_cnn_encoders"):
            assert getattr(cfg, name) == value, name
    assert cfg.optimizer_class_name == "adam"
    normalized = (actor["obs_normalization"], critic["obs_normalization"])
    assert (cfg.empirical_normalization, cfg.critic_obs_normalization) == normalized
    run = {name: given[name] for name in ("num_steps_per_env", "max_iterations", "save_interval", "seed")}
    assert {name: getattr(cfg, name) for name in run} == run
    assert (cfg.logger_backend, cfg.logger_kwargs) == ("wandb", {"wandb": {"project": "mjlab"}})
    assert plan.obs_groups == given["obs_groups"]
    if "Depth" in task or "Rgb" in task or "Seg" in task:
        assert plan.policy["actor_model"]["cnn_cfg"] == actor["cnn_cfg"]
        assert plan.policy["critic_model"]["class_name"].endswith(":SpatialSoftmaxCNNModel")
    else:
        assert plan.policy["actor_hidden_dims"] == actor["hidden_dims"]
        assert plan.policy["critic_hidden_dims"] == critic["hidden_dims"]
    assert plan.policy["init_noise_std"] == 1.0
    assert listed(given) == ["experiment_name", "load_run", "load_checkpoint", "class_name"]


@pytest.mark.parametrize("task", sorted(ISAAC_LAB))
def test_dicts_of_isaac_lab_are_taken_as_they_are_or_refused_by_name(task):
    given = ISAAC_LAB[task]
    if task in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[task]):
            parse_train_cfg(given)
        return
    plan = parse_train_cfg(given)
    algorithm, cfg = given["algorithm"], plan.cfg
    same = ("learning_rate", "num_learning_epochs", "gamma", "lam", "entropy_coef", "desired_kl", "clip_param")
    assert all(getattr(cfg, name) == algorithm[name] for name in same if name in algorithm)
    assert [cfg.num_steps_per_env, cfg.max_iterations] == [given["num_steps_per_env"], given["max_iterations"]]
    first = given.get("actor") or given.get("student") or given["policy"]
    widths = first.get("hidden_dims") or first.get("actor_hidden_dims") or first["student_hidden_dims"]
    assert plan.policy.get("actor_hidden_dims", plan.policy.get("actor_model", {}).get("hidden_dims")) == widths
    is_normalized = [first.get(name) for name in ("obs_normalization", "actor_obs_normalization")]
    is_normalized += [first.get("student_obs_normalization"), given.get("empirical_normalization")]
    assert cfg.empirical_normalization == any(is_normalized)  # {} is a field that was left out
    assert set(listed(given)) <= {
        "experiment_name",
        "run_name",
        "neptune_project",
        "load_run",
        "load_checkpoint",
        "class_name",
        "check_for_nan",
        "init_at_random_ep_len",
        "store_code_state",
        "teacher.obs_normalization",
        "teacher.init_noise_std",
    }


def test_a_dict_of_legged_gym_trains():
    plan = parse_train_cfg(LEGGED_GYM)
    assert (plan.algorithm, plan.cfg.num_learning_epochs, plan.cfg.max_iterations) == ("PPO", 5, 1500)
    assert listed(LEGGED_GYM) == ["runner_class_name", "experiment_name", "load_run", "checkpoint"]
    runner = runner_on({**LEGGED_GYM, "num_steps_per_env": 3}, style=2)
    runner.learn(1)


@pytest.mark.parametrize("rnn", [None, "lstm", "gru"])
@pytest.mark.parametrize("style", [2, 3, 5])
def test_dicts_of_every_version_train(style, rnn):
    cfg = model_cfg(rnn, (True, False)) if style == 5 else policy_cfg(style, rnn, normalized=True)
    runner = runner_on(cfg, style)
    assert type(runner.policy) is (ActorCriticRecurrent if rnn else ActorCritic)
    if rnn:
        assert runner.policy.memory_a.rnn.hidden_size == 4
    assert runner.policy.actor[0].out_features == 6
    assert runner.policy.critic[0].out_features == 5
    runner.learn(1)
    normalizers = (runner.policy.obs_normalizer, runner.policy.critic_obs_normalizer)
    wanted = (EmpiricalNormalization, NoNormalization if style == 5 else EmpiricalNormalization)
    assert tuple(map(type, normalizers)) == wanted
    assert normalizers[0].count == 24
    assert runner.policy.obs_normalizer.shape == (5,)  # two groups in the actor's set


def test_what_the_runner_writes_is_read_back(tmp_path):
    runner = runner_on({**model_cfg("gru", (True, False)), "clip_actions": 0.5}, log_dir=tmp_path)
    again = parse_train_cfg(runner.config())
    assert again.to_dict() == runner.plan.to_dict()
    assert again.clip_actions == 0.5


def test_a_dataclass_with_missing_fields_is_read_as_isaac_lab_means_it():
    missing = dataclasses.MISSING

    @dataclasses.dataclass
    class Distribution:
        class_name: str = "GaussianDistribution"
        init_std: float = 0.7
        std_type: str = "log"

    @dataclasses.dataclass
    class Model:
        hidden_dims: tuple = (8,)
        distribution_cfg: object = None
        class_name: str = "MLPModel"
        activation: str = "swish"
        obs_normalization: bool = False
        stochastic: object = None
        init_noise_std: object = None
        noise_std_type: str = "scalar"
        state_dependent_std: bool = False

    @dataclasses.dataclass
    class Algorithm:
        class_name: str = "PPO"
        num_learning_epochs: int = 3
        rnd_cfg: object = None

    @dataclasses.dataclass
    class Agent:
        algorithm: Algorithm
        actor: Model
        critic: Model
        policy: object = None
        empirical_normalization: object = None
        num_steps_per_env: int = 4
        device: str = "cpu"

    agent = Agent(Algorithm(), Model(distribution_cfg=Distribution()), Model())
    agent.policy, agent.empirical_normalization = missing, missing
    for model in (agent.actor, agent.critic):
        model.stochastic = model.init_noise_std = missing
    plan = make_plan(agent, None, None, None, {})
    assert plan.policy["noise_std_type"] == "log"
    assert plan.policy["init_noise_std"] == 0.7
    assert plan.policy["actor_activation"] == plan.policy["critic_activation"] == "silu"
    assert (plan.cfg.num_learning_epochs, plan.cfg.num_mini_batches, plan.cfg.num_steps_per_env) == (3, 4, 4)


# ------------------------------------------------------------------ defaults
def test_defaults_are_those_of_the_version_that_the_dict_is_written_for():
    third, second = (policy_cfg(style) for style in (3, 2))
    fifth = model_cfg()
    for cfg in (third, second, fifth):
        cfg["algorithm"] = {"class_name": "PPO"}
    for cfg in (third, fifth):
        made = parse_train_cfg(cfg).cfg
        assert {name: getattr(made, name) for name in DEFAULTS} == DEFAULTS
        assert (made.clip_param, made.lam, made.learning_rate, made.max_grad_norm) == (0.2, 0.95, 1e-3, 1.0)
    made = parse_train_cfg(second).cfg
    values = (made.num_learning_epochs, made.num_mini_batches, made.gamma, made.entropy_coef, made.schedule)
    assert values == (1, 1, 0.998, 0.0, "fixed")


def test_actor_and_critic_are_clipped_together_up_to_3_and_apart_from_4_on():
    assert parse_train_cfg(policy_cfg(3)).cfg.clip_grads_separately is False
    assert parse_train_cfg(model_cfg()).cfg.clip_grads_separately is True
    alg = runner_on(model_cfg("lstm")).alg
    separate = {id(p) for p in alg.optimizer.separate}
    names = {name.split(".")[0] for name, p in alg.policy.named_parameters() if id(p) in separate}
    assert names == {"critic", "memory_c"}


@pytest.mark.parametrize("is_models", [False, True])
def test_a_normaliser_of_the_actor_alone_leaves_out_the_critics(is_models):
    cfg = model_cfg(normalized=(True, True)) if is_models else policy_cfg(3, normalized=True)
    (cfg["critic"] if is_models else cfg["policy"]).pop(
        "obs_normalization" if is_models else "critic_obs_normalization"
    )
    policy = runner_on(cfg, 5 if is_models else 3).policy
    assert isinstance(policy.obs_normalizer, EmpiricalNormalization)
    assert isinstance(policy.critic_obs_normalizer, NoNormalization)


# ------------------------------------------------------------------ classes
@register_policy
class OwnPolicy(ActorCritic):
    """A policy of a user."""


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("rsl_rl.modules:ActorCritic", ActorCritic),
        ("rsl_rl.modules.ActorCriticRecurrent", ActorCriticRecurrent),
        (ActorCriticRecurrent, ActorCriticRecurrent),
        (OwnPolicy, OwnPolicy),
        (f"{__name__}:OwnPolicy", OwnPolicy),
    ],
)
def test_a_policy_is_named_by_its_path_or_is_the_class(name, wanted):
    cfg = policy_cfg(3)
    cfg["policy"]["class_name"] = name
    assert type(runner_on(cfg, 3).policy) is wanted


def test_a_class_that_is_not_registered_is_an_error_that_says_how_to_register_it():
    class Stranger(ActorCritic):
        pass

    for section, message in (("algorithm", "register_algorithm"), ("policy", "register_policy")):
        for name in ("my_package.learning:Mine", Stranger):
            cfg = policy_cfg(3)
            cfg[section]["class_name"] = name
            with pytest.raises(
                (ValueError, KeyError), match=f"{'Mine' if name is not Stranger else 'Stranger'}.*{message}"
            ):
                runner_on(cfg, 3)


# ------------------------------------------------------------------ single keys
def test_the_noise_of_a_distribution_section():
    given = {"class_name": "GaussianDistribution", "init_std": 0.3, "std_range": [0.1, 2.0], "learn_std": False}
    runner = runner_on(model_cfg(distribution=given))
    assert (runner.cfg.clip_min_std, runner.cfg.clip_max_std) == (0.1, 2.0)
    assert not runner.policy.std.requires_grad
    runner.learn(1)
    torch.testing.assert_close(runner.policy.std, torch.full((2,), 0.3), rtol=0, atol=0)


def test_state_dependent_noise_is_clamped_as_in_rsl_rl():
    given = {"class_name": "HeteroscedasticGaussianDistribution", "init_std": 0.3}
    policy = runner_on(model_cfg(distribution=given)).policy
    policy.act(torch.randn(4, 5))
    torch.testing.assert_close(policy.action_std, torch.full((4, 2), 0.3))
    with torch.no_grad():
        policy.actor[-1].bias[2:] = torch.tensor([-1.0, 5.0])
    policy.clip_std(min=1e-6, max=2.0)
    policy.act(torch.randn(4, 5))
    torch.testing.assert_close(policy.action_std, torch.tensor([[1e-6, 2.0]]).expand(4, 2))


def test_a_beta_distribution_has_the_range_of_the_dict():
    runner = runner_on(model_cfg(distribution={"class_name": "BetaDistribution", "action_range": [-0.5, 2.0]}))
    assert isinstance(runner.policy.distribution, Beta)
    runner.learn(1)
    taken = torch.stack(runner.env.env.taken)
    assert taken.min() >= -0.5
    assert taken.max() <= 2.0


def test_hidden_layers_of_minus_one_are_as_wide_as_the_input():
    cfg = model_cfg()
    cfg["actor"]["hidden_dims"], cfg["critic"]["hidden_dims"] = [-1, 3], [-1]
    runner = runner_on(cfg)
    assert [layer.out_features for layer in runner.policy.actor if hasattr(layer, "out_features")] == [5, 3, 2]
    assert runner.policy.critic[0].out_features == 4


def test_desired_kl_of_none_leaves_the_learning_rate_alone():
    cfg = model_cfg()
    cfg["algorithm"] |= {"desired_kl": None, "schedule": "adaptive"}
    assert parse_train_cfg(cfg).cfg.schedule == "fixed"


def test_mixed_precision_and_optimizer():
    cfg = model_cfg()
    cfg["algorithm"] |= {"use_mixed_precision": True, "optimizer": "adamw", "grad_reduce_bucket_mb": 25}
    made = parse_train_cfg(cfg).cfg
    assert (made.precision, made.optimizer_class_name) == ("bf16", "adamw")
    assert "algorithm.grad_reduce_bucket_mb" in listed(cfg)


@pytest.mark.parametrize(
    ("given", "backend", "kwargs"),
    [
        (
            {"logger": "wandb", "wandb_project": "p", "wandb_tags": ["a"]},
            "wandb",
            {"wandb": {"project": "p", "tags": ["a"]}},
        ),
        ({"logger": "SwanLab", "neptune_project": "n"}, "swanlab", None),
        ({"logger": {"class_name": "WandbLogWriter", "project_name": "q"}}, "wandb", {"wandb": {"project": "q"}}),
        ({"logger": "tensorboard", "wandb_tags": []}, "tensorboard", None),
    ],
)
def test_loggers_and_their_projects_and_tags(given, backend, kwargs):
    cfg = parse_train_cfg({**model_cfg(), **given}).cfg
    assert (cfg.logger_backend, cfg.logger_kwargs) == (backend, kwargs)


def test_clip_actions_bounds_what_the_environment_gets():
    runner = runner_on({**model_cfg(), "clip_actions": 0.25})
    assert isinstance(runner.env, ClipActions)
    runner.learn(1)
    taken = torch.stack(runner.env.env.env.taken)
    assert taken.abs().max() == 0.25
    assert runner.alg.storage.data["actions"].abs().max() > 0.25  # the policy learns from the action it chose


def test_clip_actions_is_part_of_an_exported_policy(tmp_path):
    runner = runner_on({**model_cfg(), "clip_actions": 0.01})
    runner.export_policy_to_jit(tmp_path)
    obs = torch.randn(8, 5) * 5
    actions = torch.jit.load(tmp_path / "policy.pt")(obs)
    torch.testing.assert_close(actions, runner.policy.act_inference(obs).clamp(-0.01, 0.01))


@pytest.mark.parametrize("limit", [0, -1.0, True, "1"])
def test_clip_actions_that_is_no_limit_is_refused(limit):
    with pytest.raises(ValueError, match=rf"\(clip_actions\) must be a number above 0, got {limit!r}"):
        runner_on({**model_cfg(), "clip_actions": limit})


def test_resume_without_a_loaded_checkpoint_is_refused(tmp_path):
    runner = runner_on({**model_cfg(), "resume": True})
    with pytest.raises(ValueError, match="resume=True, but no checkpoint was loaded; call load"):
        runner.learn(1)
    runner.save(str(tmp_path / "model_0.pt"))
    runner.load(str(tmp_path / "model_0.pt"))
    runner.learn(1)


def test_upload_model_is_honoured(tmp_path):
    runner = runner_on({**model_cfg(), "upload_model": False}, log_dir=tmp_path)
    runner.init_writer()
    sent = []
    runner.writer.save_model = lambda path, it: sent.append(path)
    runner.save(str(tmp_path / "a.pt"))
    assert sent == []
    runner.cfg.upload_model = True
    runner.save(str(tmp_path / "b.pt"))
    assert sent == [tmp_path / "b.pt"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"actor.distribution_cfg": None}, "actor.distribution_cfg is None, but PPO explores"),
        ({"actor.distribution_cfg": {"class_name": "Cauchy"}}, "distribution_cfg.class_name='Cauchy' is not known"),
        ({"critic.distribution_cfg": {"class_name": "GaussianDistribution"}}, "critic.distribution_cfg must be None"),
        ({"critic.class_name": "RNNModel"}, "both must have a memory or none; use RNNModel for both"),
        ({"actor.hiden_dims": [3]}, "'actor.hidden_dims'"),
        (
            {
                "actor.class_name": "CNNModel",
                "critic.class_name": "CNNModel",
                "actor.distribution_cfg": {"class_name": "BetaDistribution"},
            },
            "actor.class_name='CNNModel' needs distribution_cfg of GaussianDistribution",
        ),
        ({"critic": None}, "a section 'actor' alone; give actor and critic"),
        ({"algorithm.share_cnn_encoders": True}, "share_cnn_encoders=True needs actor and critic of class CNNModel"),
        ({"algorithm.class_name": "Distillation"}, "needs the sections student and teacher, got actor, critic"),
        (
            {"algorithm.symmetry_cfg": {"use_mirror_loss": True, "data_augmentation_func": None}},
            "data_augmentation_func is None; name the function",
        ),
    ],
)
def test_a_key_that_cannot_be_honoured_is_an_error_that_names_it(change, message):
    cfg = model_cfg()
    for key, value in change.items():
        section, _, name = key.rpartition(".")
        (cfg[section] if section else cfg)[name] = value
    with pytest.raises(ValueError, match=message):
        parse_train_cfg(cfg)


def test_memories_that_differ_are_an_error():
    cfg = model_cfg("gru")
    cfg["critic"]["rnn_hidden_dim"] = 9
    with pytest.raises(ValueError, match="rnn_hidden_size is 4 in the actor and 9 in the critic"):
        parse_train_cfg(cfg)


# ------------------------------------------------------------------ what the environment decides
RND = {"weight": 50.0, "num_outputs": 2, "predictor_hidden_dims": [-1, 3], "target_hidden_dims": [-1]}


def test_the_weight_of_rnd_is_per_second_and_its_layers_are_resolved():
    cfg = model_cfg()
    cfg["obs_groups"]["rnd_state"] = ["critic"]
    cfg["algorithm"]["rnd_cfg"] = dict(RND)
    runner = runner_on(cfg)
    assert runner.cfg.rnd_cfg["weight"] == pytest.approx(1.0)  # 50 a second, 0.02 s a step
    assert runner.cfg.rnd_cfg["predictor_hidden_dims"] == (4, 3)
    runner.learn(1)
    assert parse_train_cfg(runner.config()).cfg.rnd_cfg["weight"] == pytest.approx(1.0)
    again = OnPolicyRunner(PeerEnv(), runner.config(), device="cpu", show_progress=False)
    assert again.cfg.rnd_cfg["weight"] == pytest.approx(1.0)  # not scaled twice


def test_the_weight_of_rnd_is_not_scaled_again_when_a_run_is_read_back():
    cfg = policy_cfg(3)
    cfg["obs_groups"]["rnd_state"] = ["critic"]
    cfg["algorithm"]["rnd_cfg"] = dict(RND)
    runner = runner_on(cfg, 3)
    again = OnPolicyRunner(PeerEnv(3), runner.config(), device="cpu", show_progress=False)
    assert runner.cfg.rnd_cfg["weight"] == again.cfg.rnd_cfg["weight"] == pytest.approx(1.0)


def test_what_the_environment_decides_survives_the_way_of_the_command_line():
    cfg = symmetric(use_mirror_loss=True, mirror_loss_coeff=0.5)
    cfg["obs_groups"]["rnd_state"] = ["critic"]
    cfg["algorithm"]["rnd_cfg"] = dict(RND)
    runner = runner_on(parse_train_cfg(cfg).to_dict())
    assert runner.cfg.rnd_cfg["weight"] == pytest.approx(1.0)
    assert runner.cfg.symmetry_cfg["actions"] == {"permutation": [0, 1], "signs": [-1, -1]}


def test_rnd_on_other_states_than_the_critics_is_refused():
    cfg = model_cfg()
    cfg["obs_groups"]["rnd_state"] = ["proprio"]
    cfg["algorithm"]["rnd_cfg"] = dict(RND)
    with pytest.raises(ValueError, match=r"obs_groups\['rnd_state'\] is \['proprio'\].*is \['critic'\]"):
        runner_on(cfg)


def test_rnd_without_a_step_length_is_refused():
    class Env:
        num_obs, num_privileged_obs, sets = 3, None, (["policy"], ["policy"])

    with pytest.raises(ValueError, match="env.unwrapped.step_dt, which is missing"):
        complete_rnd({"weight_per_second": 1.0}, {}, Env())


def mirror(env, obs=None, actions=None):
    """proprio: the second entry changes sign; command: exchanged; critic: the ends are exchanged; actions: negated."""
    if obs is not None:
        image = {
            "proprio": obs["proprio"] * torch.tensor([1.0, -1.0, 1.0]),
            "command": obs["command"][:, [1, 0]],
            "critic": obs["critic"][:, [3, 1, 2, 0]],
        }
        obs = torch.cat([obs, TensorDict(image, batch_size=obs.batch_size)])
    return obs, None if actions is None else torch.cat([actions, -actions])


def symmetric(**given):
    cfg = model_cfg()
    cfg["algorithm"]["symmetry_cfg"] = {"data_augmentation_func": mirror, **given}
    return cfg


def test_mirrors_are_found_by_asking_the_function_of_the_dict():
    cfg = symmetric(use_data_augmentation=True, use_mirror_loss=True, mirror_loss_coeff=0.5)
    runner = runner_on(cfg)
    found = runner.cfg.symmetry_cfg
    assert found["obs"]["proprio"] == {"permutation": [0, 1, 2], "signs": [1, -1, 1]}
    assert found["obs"]["command"] == {"permutation": [1, 0], "signs": [1, 1]}
    assert found["critic_obs"]["obs"] == {"permutation": [3, 1, 2, 0], "signs": [1, 1, 1, 1]}
    assert found["actions"] == {"permutation": [0, 1], "signs": [-1, -1]}
    assert (found["augment"], found["mirror_loss_coef"]) == (True, 0.25)  # a mean over 2 actions
    runner.learn(1)
    parse_train_cfg(runner.config())


def test_symmetry_that_is_only_logged_is_listed():
    cfg = symmetric(use_data_augmentation=False, use_mirror_loss=False)
    assert "algorithm.symmetry_cfg" in listed(cfg)
    assert parse_train_cfg(cfg).cfg.symmetry_cfg is None


def test_a_function_that_is_no_mirror_is_refused():
    def rotate(env, obs=None, actions=None):
        return (None if obs is None else torch.cat([obs] * 2)), None if actions is None else torch.cat(
            [actions, 2 * actions]
        )

    def four(env, obs=None, actions=None):
        return (None if obs is None else torch.cat([obs] * 4)), None if actions is None else torch.cat([actions] * 4)

    cfg = symmetric(use_data_augmentation=True)
    cfg["algorithm"]["symmetry_cfg"]["data_augmentation_func"] = rotate
    with pytest.raises(ValueError, match="does not exchange and negate the entries of actions"):
        runner_on(cfg)
    cfg["algorithm"]["symmetry_cfg"]["data_augmentation_func"] = four
    with pytest.raises(ValueError, match="gives 3 images of every step"):
        runner_on(cfg)
    images = torch.tensor([[1.0], [0.0], [1.0], [2.0]])  # 2 - x: the image of 1 is 1, that of 0 is 2
    with pytest.raises(ValueError, match="does not exchange and negate the entries of x"):
        signed_permutation(images, [0], "x")
