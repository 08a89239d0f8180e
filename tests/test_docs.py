"""What the documentation says is run: its Python, its commands, its names, its links."""

import dataclasses
import importlib
import importlib.util
import os
import pkgutil
import re
import runpy
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

import canter
from canter.algorithms import REGISTRY
from canter.algorithms.ppo import PPOConfig, PPOSettings
from canter.cli import COMMANDS
from canter.cli.options import parse_train
from canter.compat.spellings import OTHER_SPELLINGS
from canter.envs.wrap import ADAPTERS, ENV_NAMES
from canter.modules.actor_critic import ActorCritic
from canter.modules.amp_discriminator import AMPDiscriminator
from canter.modules.build import POLICIES
from canter.runners import construction
from canter.storage.rollout_files import RolloutDataset
from canter.utils.config import setting_names
from canter.utils.logging.backends import BACKENDS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "examples/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ROOT_PAGES = [ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
BASH = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def short_runs(monkeypatch, tmp_path):
    """Every `learn` does two iterations at most, and files go to a folder of the test's own."""
    count = construction.count_iterations
    monkeypatch.setattr(construction, "count_iterations", lambda *given: min(2, count(*given)))
    monkeypatch.chdir(tmp_path)
    tables = [(table, dict(table)) for table in (POLICIES, REGISTRY, BACKENDS, COMMANDS, ADAPTERS, ENV_NAMES)]
    yield
    for table, before in tables:
        table.clear()
        table.update(before)


def pages_with(pattern):
    return [pytest.param(page, id=page.stem) for page in PAGES if pattern.search(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", pages_with(PYTHON))
def test_the_python_of_a_page_runs_from_top_to_bottom(page, short_runs, tmp_path):
    runpy.run_path(str(python_of(page, tmp_path)))


def python_of(page, folder):
    """The page's Python as a file of its own, on the same lines, so that a traceback shows where it is."""
    text = page.read_text(encoding="utf-8")
    lines = [""] * text.count("\n")
    for match in PYTHON.finditer(text):
        first = text[: match.start(1)].count("\n")
        block = match[1].splitlines()
        lines[first : first + len(block)] = block
    script = folder / f"{page.stem}.py"
    script.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return script


@pytest.mark.slow
def test_the_ten_lines_of_the_readme_solve_their_task(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    first = PYTHON.search((ROOT / "README.md").read_text(encoding="utf-8"))
    Path("ten_lines.py").write_text(first[1].replace("log_dir=", "settings={'seed': 1}, log_dir="))
    runpy.run_path("ten_lines.py")
    assert float(capsys.readouterr().out.splitlines()[-1]) > 450


@pytest.mark.parametrize("page", pages_with(BASH))
def test_commands_shown_are_commands_there_are(page, monkeypatch):
    if importlib.util.find_spec("mjlab") is None:  # which has the settings of its tasks
        monkeypatch.setattr("canter.envs.mjlab.mjlab_training_dict", lambda task: {})
    for block in BASH.findall(page.read_text(encoding="utf-8")):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["canter"]:
                assert words[1] in COMMANDS, line
            if words[:2] == ["canter", "train"]:
                parse_train(words[2:])
            if words[:1] == ["make"]:
                assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line


@pytest.mark.parametrize("page", pages_with(BASH))
def test_lines_of_commands_are_seen_whole_on_a_small_screen(page):
    widest = max(
        (line for block in BASH.findall(page.read_text(encoding="utf-8")) for line in block.splitlines()), key=len
    )
    assert len(widest) <= 112, f"continue it with a backslash: {widest}"


@pytest.mark.parametrize("page", [*PAGES, *ROOT_PAGES], ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


# ---------------------------------------------------------------------- migration
def rows(heading):
    text = (ROOT / "docs/migration.md").read_text(encoding="utf-8")
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return lines[1:]  # without the heading


def resolve(path):
    module, rest = path, []
    while True:
        try:
            found = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, name = module.rpartition(".")
            rest.insert(0, name)
    for name in rest:
        found = getattr(found, name)
    return found


def settings_of(heading):
    """The settings of canter in the second table of a section."""
    rows_of_section = rows(heading)
    start = next(i for i, row in enumerate(rows_of_section) if row[0].endswith("setting there"))
    return {name for row in rows_of_section[start + 1 :] for name in re.findall(r"`(\w+)`", row[1])}


@pytest.mark.parametrize("library", ["Stable-Baselines3", "skrl"])
def test_every_setting_of_another_library_has_a_setting_here(library):
    known = {f.name for name in ("ppo", "sac", "td3", "dqn") for f in dataclasses.fields(REGISTRY[name].config_class)}
    found = settings_of(library) - {"n_steps", "batch_size", "vf_coef"}  # named to be explained
    assert len(found) > 10
    assert found <= known


@pytest.mark.parametrize("library", ["rsl_rl", "st_rl", "ApexRL", "Stable-Baselines3", "skrl"])
def test_every_name_to_migrate_to_exists(library):
    table = rows(library)
    ends = [i for i, row in enumerate(table) if row[0].endswith("setting there")]
    table = table[: ends[0]] if ends else table
    assert len(table) >= 8
    for row in table:
        paths = re.findall(r"`(canter[\w.]+)`", row[1])
        assert paths or "policy.obs_normalizer" in row[1], row
        for path in paths:
            assert resolve(path) is not None


def test_every_name_anywhere_on_the_migration_page_exists():
    text = (ROOT / "docs/migration.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"`(canter\.[\w.]+)`", text))
    assert len(paths) > 60
    for path in paths:
        assert resolve(path) is not None
    named = set(re.findall(r"`(\w+)=", text.split("## Differences in behaviour")[1])) - {"weights_only"}
    assert {"discriminator_optimizer", "mark_first_frame_done", "task_reward_lerp"} <= named
    known = setting_names(RolloutDataset) | setting_names(AMPDiscriminator)
    assert named <= known | {f.name for f in dataclasses.fields(REGISTRY["atppo"].config_class)}


# Documented names and calls that differ here.
DIFFERING = (
    "prepare_obs_slices",
    "build_encoders",
    "embed_encoders_latent",
    "build_estimator",
    "build_adaptor",
    "load_misaligned_state_dict",
    "teacher_act_prob",
    "APPO(cfg, env)",
    "discriminator_grad_len_loss",
    "init_writter",
    "reccurent_mini_batch_generator",
    "reply_buffer",
    "git_status_repos",
    "activation_utils",
    "saved_hidden_states",
    "get_minibatch_from_indices",
    "StatePairReplayBuffer",
    "ActorCriticPair",
    "build_mlp",
    "register_backend",
    "as_vec_env",
    "StepResult",
    "success_traj_only",
    "`forward`",
    "separate_amp_normalizers",
    "SarsaRolloutStorage",
)


@pytest.mark.parametrize("name", DIFFERING)
def test_a_documented_name_that_differs_is_on_the_migration_page(name):
    assert name in (ROOT / "docs/migration.md").read_text(encoding="utf-8")


def test_every_setting_to_migrate_to_exists_and_every_old_spelling_is_listed():
    known = {f.name for f in dataclasses.fields(PPOConfig)} | setting_names(POLICIES["ActorCriticRecurrent"])
    old = set()
    for row in rows("Settings"):
        new = re.findall(r"`(\w+)`", row[1])
        assert new, row
        assert set(new) <= known, row
        old |= set(re.findall(r"`([\w.]+)`", row[0]))
    assert set(OTHER_SPELLINGS) <= old
    for row in rows("Settings"):
        for name in re.findall(r"`(\w+)`", row[0]):
            if name in OTHER_SPELLINGS:
                assert OTHER_SPELLINGS[name] in row[1]


def test_the_metrics_to_migrate_to_are_logged(short_runs):
    from canter.envs import PointRobot
    from canter.runners import OnPolicyRunner

    cfg = {"num_steps_per_env": 8, "algorithm": {"rnd_cfg": {"weight": 0.1}}, "eval_interval": 1}
    runner = OnPolicyRunner(PointRobot(4, max_episode_length=5), cfg, show_progress=False)
    logged = set(runner.learn(2).history[-1])
    for row in rows("Metrics"):
        for name in re.findall(r"`([\w/]+)`", row[1]):
            assert name in logged or name.startswith("extra/"), name


# ---------------------------------------------------------------------- tables made from the settings
def settings_tables():
    spec = importlib.util.spec_from_file_location("settings_tables", ROOT / "docs/settings_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_of_settings_name_every_setting_with_its_default_and_sentence():
    module = settings_tables()
    pages = [(ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("training.md", "algorithms/ppo.md")]
    text = "".join(module.on_page_markdown(page) for page in pages)
    for field in dataclasses.fields(PPOConfig):
        assert f"| `{field.name}` |" in text
    assert "| `clip_param` | `0.2` | Clip range of the probability ratio and of the value step. |" in text
    assert "<!-- settings" not in text
    policies = module.on_page_markdown((ROOT / "docs/policies.md").read_text(encoding="utf-8"))
    assert "| `rnn_type` | `'lstm'` |" in policies
    assert "num_actor_obs` |" not in policies
    composed = module.on_page_markdown((ROOT / "docs/compose.md").read_text(encoding="utf-8"))
    assert "| `estimator_target_components` | `None` |" in composed
    assert "| `actor_hidden_dims` |" not in composed  # of every policy, so on the page of policies


def test_the_page_of_ppo_names_the_defaults_in_which_its_config_differs_from_a_training_dict():
    text = (ROOT / "docs/algorithms/ppo.md").read_text(encoding="utf-8")
    cfg = PPOConfig()
    differing = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(PPOSettings) if f.init}
    differing = {k: v for k, v in differing.items() if v != PPOSettings.__dataclass_fields__[k].default}
    assert len(differing) == 5
    for name, value in differing.items():
        assert f"`{name}` `{value}`" in text


# ---------------------------------------------------------------------- the reference and the site
def test_the_gradient_on_the_page_of_several_processes_is_that_of_its_networks():
    text = (ROOT / "docs/distributed.md").read_text()
    layers = [512, 256, 128]
    policy = ActorCritic(48, 235, 12, actor_hidden_dims=layers, critic_hidden_dims=layers)
    count = sum(p.numel() for p in policy.parameters())
    assert f"gradient         {count:,} * 4 bytes" in text


@pytest.mark.parametrize("script", sorted((ROOT / "docs").glob("*.py")), ids=lambda path: path.stem)
def test_a_script_of_the_documentation_finds_the_names_that_it_imports(script):
    assert runpy.run_path(str(script), run_name="imported")


def make_reference():
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "docs/make_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", pages_with(re.compile("<!-- settings: ")))
def test_every_table_of_settings_on_a_page_can_be_made(page):
    text = settings_tables().on_page_markdown(page.read_text(encoding="utf-8"))
    assert "<!-- settings" not in text
    assert "| setting | default | |" in text


def test_every_public_name_is_in_the_reference():
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs/reference").glob("*.md"))
    for package in ("algorithms", "datasets", "envs", "modules", "runners", "storage", "utils.logging"):
        for name in importlib.import_module(f"canter.{package}").__all__:
            assert f"| `{name}` |" in text, name
            assert f"::: canter.{package}.{name}\n" in pages, name
    needs_ros = "canter.export.robot.ros2_node"  # it is copied into a ROS package
    for module in pkgutil.walk_packages(canter.__path__, "canter."):
        if module.name != needs_ros and not any(part.startswith("_") for part in module.name.split(".")):
            for name in getattr(importlib.import_module(module.name), "__all__", ()):
                assert f"| `{name}` |" in text, f"{module.name}.{name}"


def test_the_pages_of_the_reference_are_those_of_the_code():
    for name, text in make_reference().pages().items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == text, "run python docs/make_reference.py"


def test_every_page_is_in_the_navigation_and_pages_work_from_files():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = set(re.findall(r"[\w/-]+\.md", str(site["nav"])))
    assert listed == {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert site["use_directory_urls"] is False
    assert "offline" in site["plugins"]
    assert site["theme"]["font"] is False


# ---------------------------------------------------------------------- the Makefile
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def plan(*args):
    done = subprocess.run(["make", "-n", "-B", *args], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


@needs_make
def test_make_train_installs_a_light_set_and_trains_the_task_asked_for():
    text = plan("train", "TASK=CartPole-v1", "ARGS=--seed 2", "HAS_BOX2D=yes")
    assert "--constraint constraints.txt --editable '.[box2d,mujoco,video]'" in text
    assert "canter train CartPole-v1 --seed 2" in text
    assert "canter train LunarLanderContinuous-v3" in plan("train", "HAS_BOX2D=yes")
    assert "canter train CartPole-v1" in plan("train", "HAS_BOX2D=")
    assert "'.[mujoco,video,envpool]'" in plan("train", "TASK=envpool/HalfCheetah-v5", "HAS_BOX2D=")


@needs_make
def test_make_check_runs_what_it_promises_and_ci_runs_the_tests():
    text = plan("check")
    for command in ("ruff format --check", "ruff check", "basedpyright", "pytest -n 2"):
        assert command in text
    assert "OMP_NUM_THREADS=1" in plan("test")
    assert os.access(ROOT / ".ci/run", os.X_OK)
    assert "make test" in (ROOT / ".ci/run").read_text()


def test_the_workflows_run_the_commands_of_the_readme_on_every_python_that_is_declared():
    jobs = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]
    commands = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    assert commands["test"] == ["make test"]
    assert commands["train"] == ["make train"]
    declared = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert jobs["test"]["strategy"]["matrix"]["python"] == declared
    for path in re.findall(r"tests/\S+\.py", " ".join(commands["check"])):
        assert (ROOT / path).is_file(), path
