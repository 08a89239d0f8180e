"""What users import: every documented name, its signature, and that nothing optional is needed for it."""

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import canter
from canter.algorithms import PPO, PPOConfig
from canter.modules import ActorCritic
from canter.runners import OnPolicyRunner

PACKAGES = ["algorithms", "datasets", "envs", "modules", "runners", "storage", "utils.logging"]
OPTIONAL = [
    "wandb",
    "swanlab",
    "trackio",
    "mlflow",
    "optuna",
    "ray",
    "onnx",
    "onnxruntime",
    "imageio",
    "minari",
    "mjlab",
]
OPTIONAL += ["envpool", "mujoco", "Box2D", "pygame", "tensordict", "h5py", "pandas"]
SOURCE = Path(canter.__file__).parent

# Documented name -> where it is imported from.
DOCUMENTED = {
    "canter.datasets": ["AMPLoader"],
    "canter.datasets.dagger_saver": ["DaggerSaver"],
    "canter.datasets.motion_loader": ["AMPLoader"],
    "canter.storage.replay_buffer": ["ReplayBuffer"],
    "canter.modules.amp_discriminator": ["AMPDiscriminator", "AmpMixin"],
    "canter.modules.all_mixer": ["AmpActorCritic", "AmpActorCriticRecurrent"],
    "canter.algorithms.appo": ["APPO", "APPOAlgoMixin", "ATPPO"],
    "canter.algorithms.tppo": ["TPPO"],
    "canter.storage.rollout_files": ["RolloutDataset", "RolloutFileBase"],
    "canter.runners": [
        "OnPolicyRunner",
        "OffPolicyRunner",
        "AmpPolicyRunner",
        "MjlabRunner",
        "TwoStageRunner",
        "DemonstrationSaver",
        "DaggerSaver",
        "build_runner",
        "StopTraining",
        "TrialPruned",
    ],
    "canter.algorithms": [
        "APPO",
        "ATPPO",
        "EstimatorTPPO",
        "TPPO",
        "PPO",
        "PPOConfig",
        "DQN",
        "DQNConfig",
        "SAC",
        "SACConfig",
        "TD3",
        "TD3Config",
        "GET_PROB_FUNC",
        "register_algorithm",
        "RND",
    ],
    "canter.modules": [
        "MLPQNetwork",
        "MLPContinuousQNetwork",
        "MLPSquashedGaussianActor",
        "EncoderActorCriticMixin",
        "EncoderActorCritic",
        "EncoderActorCriticRecurrent",
        "EstimatorMixin",
        "StateAc",
        "StateAcRecurrent",
        "EstimatorActorHiddenState",
        "PrivilegeEstimatorMixin",
        "PrivilegeStateAcRecurrent",
        "AdaptorActorHiddenState",
        "EncoderStateAc",
        "EncoderStateAcRecurrent",
        "EncoderAmpActorCriticRecurrent",
        "VisualActorCriticMixin",
        "VisualDeterministicAC",
        "VisualDeterministicRecurrent",
        "ActorCritic",
        "ActorCriticRecurrent",
        "ActorCriticMutex",
        "ActorCriticFieldMutex",
        "ActorCriticClimbMutex",
        "Beta",
        "Memory",
        "ActorCriticHiddenState",
        "LstmHiddenState",
        "MlpModel",
        "Conv2dModel",
        "Conv2dHeadModel",
        "EmpiricalNormalization",
        "Normalizer",
        "Normalize",
        "RunningMeanStd",
        "DeterministicPolicyMixin",
        "MLPActor",
        "MLPCritic",
        "CNNActor",
        "CNNCritic",
        "ContinuousActor",
        "DiscreteActor",
        "conv2d_output_shape",
        "get_activation_Cls",
    ],
    "canter.storage": [
        "QueueRolloutStorage",
        "ActionLabelRollout",
        "SarsaRolloutStorage",
        "AmpRolloutStorage",
        "RolloutStorage",
        "split_and_pad_trajectories",
        "unpad_trajectories",
    ],
    "canter.envs": [
        "VecEnv",
        "GymVecEnv",
        "GymVecEnvContinuous",
        "DummyVecEnv",
        "VecEnvWrapper",
        "wrap_env",
        "check_env",
    ],
    "canter.utils.logging": ["Logger"],
    "canter.utils.ckpt_manipulator": ["replace_encoder0"],
}


@pytest.mark.parametrize("module", DOCUMENTED)
def test_documented_names_are_where_the_documents_say(module):
    imported = importlib.import_module(module)
    assert [name for name in DOCUMENTED[module] if not hasattr(imported, name)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_package_exports_exists_once_and_is_described(package):
    module = importlib.import_module(f"canter.{package}")
    assert module.__doc__
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, f"{package}.{name} has no docstring"


def modules():
    return [name for _, name, _ in pkgutil.walk_packages([str(SOURCE)], "canter.") if not name.endswith("__main__")]


@pytest.mark.parametrize("name", modules())
def test_every_module_says_what_lives_in_it(name):
    path = SOURCE.parent / Path(*name.split("."))
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    assert not text.strip() or text.startswith('"""')


def test_the_documented_signatures():
    def names(function):
        return list(inspect.signature(function).parameters)[1:]

    assert names(OnPolicyRunner.__init__)[:4] == ["env", "train_cfg", "log_dir", "device"]
    documented = {"cfg", "algorithm", "actor_class", "critic_class", "actor_cfg", "critic_cfg", "obs_space"}
    documented |= {"action_space", "agent", "save_dir", "log_interval", "save_interval"}
    assert documented <= set(names(OnPolicyRunner.__init__))
    assert names(OnPolicyRunner.learn) == [
        "num_learning_iterations",
        "init_at_random_ep_len",
        "trial",
        "total_timesteps",
    ]
    assert names(OnPolicyRunner.save) == ["path", "infos"]
    assert names(OnPolicyRunner.load)[:3] == ["path", "load_optimizer", "map_location"]
    assert names(OnPolicyRunner.log) == ["locs", "width", "pad"]
    assert names(OnPolicyRunner.rollout_step) == ["obs", "critic_obs", "kwargs"]
    assert names(OnPolicyRunner.init_writer) == ["init_at_random_ep_len"]
    assert names(OnPolicyRunner.get_inference_policy) == ["device"]
    for name in ("eval", "evaluation", "train_mode", "eval_mode", "add_callback", "add_git_repo_to_log", "close"):
        assert callable(getattr(OnPolicyRunner, name))
    assert names(PPO.process_env_step) == ["rewards", "dones", "infos", "next_obs", "next_critic_obs"]


def test_the_documented_defaults_of_ppo():
    defaults = {
        "num_learning_epochs": 1,
        "num_mini_batches": 1,
        "clip_param": 0.2,
        "gamma": 0.998,
        "lam": 0.95,
        "value_loss_coef": 1.0,
        "entropy_coef": 0.0,
        "learning_rate": 1e-3,
        "max_grad_norm": 1.0,
        "use_clipped_value_loss": True,
        "clip_min_std": 1e-15,
        "optimizer_class_name": "Adam",
        "schedule": "fixed",
        "desired_kl": 0.01,
        "empirical_normalization": False,
    }
    for owner in (PPO.full_settings_class()(), PPO(ActorCritic(1, 1))):
        assert {name: getattr(owner, name) for name in defaults} == defaults
    for name in ("extra_log_keys", "logger_backend", "logger_kwargs", "log_interval", "save_interval", "device"):
        assert hasattr(PPOConfig(), name)


def test_the_version_is_one():
    assert re.fullmatch(r"\d+\.\d+\.\d+", canter.__version__)
    citation = SOURCE.parents[1] / "CITATION.cff"
    if citation.is_file():  # not where canter is installed as a wheel
        assert f"\nversion: {canter.__version__}\n" in citation.read_text()


CORE = """
import sys
for name in {optional!r}:
    sys.modules[name] = None
import canter.algorithms, canter.envs, canter.modules, canter.presets, canter.runners, canter.storage
from canter.envs.torch_envs import PointRobot
from canter.runners import OnPolicyRunner
cfg = {{"num_steps_per_env": 4, "policy": {{"actor_hidden_dims": [4], "critic_hidden_dims": [4]}}}}
runner = OnPolicyRunner(PointRobot(2), cfg, log_dir=sys.argv[1], device="cpu", show_progress=False)
runner.learn(1)
for name in ("wandb", "swanlab", "trackio", "mlflow"):
    try:
        OnPolicyRunner(PointRobot(2), {{**cfg, "logger": name}}, sys.argv[1] + name, show_progress=False).learn(1)
    except ImportError as error:
        assert f"canter[{{name}}]" in str(error), error
    else:
        raise AssertionError(name)
from canter.envs import make_env
try:
    make_env("envpool/CartPole-v1")
except ImportError as error:
    assert "canter[envpool]" in str(error), error
print("trained")
"""


def test_the_core_trains_without_anything_optional(tmp_path):
    code = CORE.format(optional=OPTIONAL)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "trained", done.stderr


HEAVY = ["matplotlib", "imageio", "imageio_ffmpeg", "PIL", "tensorboard", "rich", "tyro", "onnx", "mujoco", "wandb"]
HEAVY += ["torch._dynamo", "torch._inductor", "sympy"]


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("canter", [*HEAVY, "torch", "gymnasium"]),
        ("canter.runners, canter.algorithms, canter.envs, canter.modules, canter.storage", HEAVY),
        ("canter.utils.films, canter.utils.plots, canter.utils.console, canter.utils.logging", HEAVY),
        ("canter.cli.train", [name for name in HEAVY if name not in ("tyro", "rich")]),
    ],
)
def test_heavy_modules_are_imported_when_they_are_used(module, heavy):
    code = f"import sys, {module}; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_package_says_that_it_is_typed():
    assert (SOURCE / "py.typed").is_file()


@pytest.mark.parametrize(
    "forbidden",
    [r"weights_only\s*=\s*False", r"^\s*(import|from)\s+(pickle|cloudpickle|dill|joblib)\b", r"shell\s*=\s*True"],
)
def test_no_file_that_is_loaded_can_run_code(forbidden):
    found = [
        f"{path.relative_to(SOURCE)}:{number}"
        for path in SOURCE.rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(forbidden, line)
        and not line.lstrip().startswith("#")
        # Its unpickler looks up nothing but a few names of ours: tests/datasets/test_convert.py.
        and not (path.name == "convert.py" and line == "import pickle")
    ]
    assert found == []
