"""Bundles: what they hold, that every format does what the policy does, and that nothing wrong is written."""

import hashlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
import yaml
from torch import nn

from canter.export import bundle as bundle_module
from canter.export import c_code
from canter.export.bundle import export_bundle, known_segments
from canter.export.deploy import deploy_yaml, properties
from canter.export.graph import StepModule
from canter.export.parity import FLAGS, CPolicy, check_bundle, compiler
from canter.export.readme import readme
from canter.export.runtime import Bundle, BundleError, Policy, spec_hash
from canter.modules import ActorCritic
from canter.runners.evaluation import InferencePolicy

needs_cc = pytest.mark.skipif(compiler() is None, reason="there is no C compiler: no cc, and CC is not set")
needs_cpp = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
ALL = ["README.md", "policy.c", "policy.h", "policy.onnx", "policy.ts", "runtime.py", "samples.safetensors"]


@needs_cc
@pytest.mark.parametrize("name", ["mlp", "lstm"])
def test_onnx_torchscript_and_c_do_what_the_policy_does(made, name):
    acting, result = made[name]
    assert set(result.parity) == {"policy.onnx", "policy.ts", "policy.c"}
    assert max(result.parity.values()) < 1e-6
    assert result.left_out == {}
    assert check_bundle(result.path) == pytest.approx(result.parity, abs=1e-6)
    # The record is the policy's own: the same numbers, step by step, with the same resets.
    samples = Bundle(result.path).samples
    acting.reset()
    for step, resets in enumerate(samples["resets"]):
        if step:
            acting.reset(resets)
        found = acting.predict(torch.from_numpy(samples["input.obs"][step].copy()))
        assert np.abs(found.numpy() - samples["output.actions"][step]).max() < 1e-6


def test_samples_reset_every_row_within_the_record(made):
    samples = Bundle(made["lstm"][1].path).samples
    assert samples["resets"].shape == (24, 3)
    assert not samples["resets"][0].any()
    assert samples["resets"].any(0).all()


def test_actions_are_clipped_inside(made):
    actions = Bundle(made["mlp"][1].path).samples["output.actions"]
    assert np.abs(actions[..., 0]).max() == np.float32(0.05)
    assert np.abs(actions[..., 1]).max() > 0.05


def test_the_description_states_segments_actions_origin_and_hashes(made):
    spec = json.loads((made["lstm"][1].path / "policy.json").read_text())
    assert [(s["name"], s["first"], s["width"]) for s in spec["observation"]] == [("base", 0, 3), ("joints", 3, 4)]
    assert spec["memories"] == [{"name": "memory_a", "shape": [2, 1, 6], "dtype": "float32"}]
    assert spec["action"]["names"] == ["hip", "knee"]
    assert spec["action"]["default_pose"] == [0.1, -0.2]  # not rounded
    assert spec["control_period"] == 0.02
    assert spec["training"] | {"policy": "ActorCriticRecurrent", "iteration": 3, "timesteps": 96} == spec["training"]
    assert spec["versions"]["opset"] == 18
    assert sorted(spec["files"]) == ALL
    for name, entry in spec["files"].items():
        assert hashlib.sha256((made["lstm"][1].path / name).read_bytes()).hexdigest() == entry["sha256"]
    assert spec["sha256"] == spec_hash(spec)


def test_an_onnx_file_alone_describes_itself(made):
    import onnx

    model = onnx.load(made["lstm"][1].path / "policy.onnx")
    spec = json.loads({entry.key: entry.value for entry in model.metadata_props}["canter"])
    assert spec["observation"][1]["name"] == "joints"
    names = [part.name for part in model.graph.input], [part.name for part in model.graph.output]
    assert names == (["obs", "memory_a_in"], ["actions", "memory_a_out"])
    assert [part.type.tensor_type.shape.dim[0].dim_param for part in model.graph.input] == ["batch", "batch"]
    assert [entry.version for entry in model.opset_import] == [18]
    assert b"/site-packages/" not in (made["lstm"][1].path / "policy.onnx").read_bytes()


class Known(nn.Module):
    """actions = [2 x0 - x1 + 0.5, tanh(x2)]"""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 1)
        self.first.weight.data = torch.tensor([[2.0, -1.0, 0.0]])
        self.first.bias.data = torch.tensor([0.5])

    def forward(self, x):
        return torch.cat([self.first(x), torch.tanh(x[..., 2:])], -1)


def known_policy(actor=None):
    return InferencePolicy(ActorCritic(3, 3, 2, actor=actor or Known(), critic=nn.Linear(3, 1)))


@needs_cc
def test_a_program_in_c_gets_numbers_worked_out_by_hand(tmp_path):
    made = export_bundle(known_policy(), tmp_path / "b", formats=("c",))
    (tmp_path / "main.c").write_text(
        """#include <stdio.h>
        #include "policy.h"
        static policy_state state;
        int main(void)
        {
            float obs[POLICY_OBS] = {1.5f, 1.0f, 0.5f}, actions[POLICY_ACTIONS];
            policy_reset(&state);
            policy_step(&state, obs, actions);
            printf("%.6f %.6f", actions[0], actions[1]);
            return 0;
        }"""
    )
    sources = [str(tmp_path / "main.c"), str(made.path / "policy.c"), f"-I{made.path}"]
    subprocess.run([compiler(), *FLAGS, *sources, "-o", str(tmp_path / "main"), "-lm"], check=True)
    done = subprocess.run([str(tmp_path / "main")], check=True, capture_output=True, text=True)
    assert done.stdout == "2.500000 0.462117"  # 2 * 1.5 - 1 + 0.5, tanh(0.5)
    text = (made.path / "policy.c").read_text()
    assert not any(word in text for word in ("malloc", "calloc", "free(", "alloca"))
    assert "policy.ts" not in {path.name for path in made.path.iterdir()}


ONNX_RUNTIME = """#pragma once
// The names and types of ONNX Runtime's onnxruntime_cxx_api.h that the program uses; a step adds 1 to every memory.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>
enum OrtAllocatorType { OrtDeviceAllocator = 0, OrtArenaAllocator = 1 };
enum OrtMemType { OrtMemTypeDefault = 0 };
struct OrtMemoryInfo;
namespace Ort {
struct Env { Env() {} };
struct SessionOptions { SessionOptions &SetIntraOpNumThreads(int) { return *this; } };
struct RunOptions { explicit RunOptions(std::nullptr_t) {} };
struct MemoryInfo {
    static MemoryInfo CreateCpu(OrtAllocatorType, OrtMemType) { return MemoryInfo(); }
    operator const OrtMemoryInfo *() const { return nullptr; }
};
struct Value {
    const void *data; size_t size; std::vector<float> own;
    Value(const void *data, size_t size) : data(data), size(size) {}
    Value(Value &&) = default;
    Value(const Value &) = delete;
    template <typename T>
    static Value CreateTensor(const OrtMemoryInfo *, T *data, size_t size, const int64_t *shape, size_t rank) {
        int64_t count = 1;
        for (size_t i = 0; i < rank; i++) count *= shape[i];
        if (count != static_cast<int64_t>(size)) throw std::runtime_error("the shape does not fit the size");
        return Value(data, size);
    }
    template <typename T> const T *GetTensorData() const { return own.data(); }
};
struct Session {
    Session(const Env &, const char *path, const SessionOptions &) { std::printf("%s", path); }
    std::vector<Value> Run(const RunOptions &, const char *const *input_names, const Value *inputs, size_t num_inputs,
                           const char *const *output_names, size_t num_outputs) {
        std::vector<Value> outputs;
        for (size_t i = 0; i < num_outputs; i++) {
            Value made(nullptr, 1);
            made.own = {0.5f, -0.5f};
            std::string name = output_names[i], wanted = name.substr(0, name.find("_out")) + "_in";
            for (size_t j = 0; j < num_inputs; j++)
                if (wanted == input_names[j])
                    for (made.own.clear(); made.own.size() < inputs[j].size;)
                        made.own.push_back(static_cast<const float *>(inputs[j].data)[made.own.size()] + 1.0f);
            outputs.push_back(std::move(made));
        }
        return outputs;
    }
};
}
"""


def test_the_readme_says_what_a_robot_needs(made):
    text = (made["mlp"][1].path / "README.md").read_text()
    assert "ActorCritic, trained with" in text
    assert "| observation | first | width |\n|---|---|---|\n| base | 0 | 3 |\n| joints | 3 | 4 (2 x 2) |" in text
    assert "| 1 | knee | -0.2 | 0.5 | -1 | 1 |" in text  # default pose, scale, clip
    assert "The target of a joint is `default pose + scale * action`." in text
    spec = json.loads((made["mlp"][1].path / "policy.json").read_text())
    spec["observation"][0] |= {"scale": [2.0], "clip": [-100.0, 100.0], "history": 3}
    spec["action"]["names"] = ["hip"]  # not one for each action
    changed = readme(spec, set())
    assert "| base | 0 | 3 | -100, 100 | 2 | 3 |\n| joints | 3 | 4 (2 x 2) |  |  |  |" in changed
    assert "| action |" not in changed


def compile_readme(bundle, headers, loop, *libraries):
    """The program of a README with `loop` around its step, compiled to `main` beside its `main.cpp`."""
    program = re.search(r"^```cpp\n(.*?)^```", (bundle / "README.md").read_text(), re.MULTILINE | re.DOTALL)[1]
    includes, body = (program.partition("\n\n")[i] for i in (0, 2))
    setup, step = body.split("// once in every control period\n")
    main = f"#include <cstdio>\n{includes}\nint main() {{\n{setup}{loop.replace('STEP', step)}\nreturn 0;\n}}\n"
    (bundle / "main.cpp").write_text(main)
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-isystem", str(headers)]
    subprocess.run(["c++", *flags, "main.cpp", "-o", "main", *libraries], check=True, cwd=bundle)


@needs_cpp
def test_the_cpp_program_of_a_readme_compiles_and_keeps_its_memory(made, tmp_path):
    path = shutil.copytree(made["lstm"][1].path, tmp_path / "b")
    (tmp_path / "onnxruntime_cxx_api.h").write_text(ONNX_RUNTIME)
    show = 'std::printf(" %.1f %.1f %.0f %.0f", actions[0], actions[1], memory_a_in.front(), memory_a_in.back());'
    compile_readme(path, tmp_path, f"for (int number = 0; number < 2; number++) {{\nSTEP{show}\n}}")
    done = subprocess.run([str(path / "main")], check=True, capture_output=True, text=True)
    assert done.stdout == "policy.onnx 0.5 -0.5 1 1 0.5 -0.5 2 2"


def onnxruntime_cpp():
    """The folder of ONNX Runtime's C++ headers and the library in its Python package; None if one is missing."""
    places = (os.environ.get("CANTER_ONNXRUNTIME_HEADERS", ""), "/usr/include/onnxruntime", "/usr/local/include")
    headers = [place for place in places if place and (Path(place) / "onnxruntime_cxx_api.h").is_file()]
    libraries = sorted((Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so*"))
    return (headers[0], libraries[0]) if headers and libraries else None


@needs_cpp
@pytest.mark.skipif(onnxruntime_cpp() is None, reason="needs ONNX Runtime's headers: CANTER_ONNXRUNTIME_HEADERS")
def test_the_cpp_program_of_a_readme_gives_the_recorded_actions_with_onnx_runtime(made, tmp_path):
    path = shutil.copytree(made["lstm"][1].path, tmp_path / "b")
    headers, library = onnxruntime_cpp()
    loop = 'int is_new;\nwhile (std::scanf("%d", &is_new) == 1) {\n'
    loop += "if (is_new) std::fill(memory_a_in.begin(), memory_a_in.end(), 0.0f);\n"
    loop += 'for (float &value : obs) if (std::scanf("%f", &value) != 1) return 1;\nSTEP'
    loop += 'std::printf("%.9g %.9g\\n", actions[0], actions[1]);\n}'
    (path / "libonnxruntime.so.1").symlink_to(library)  # the name by which a linked program finds it
    compile_readme(path, headers, loop, "libonnxruntime.so.1", f"-Wl,-rpath,{path}")
    samples = Bundle(made["lstm"][1].path).samples
    row = samples["input.obs"][:, 1], samples["resets"][:, 1], samples["output.actions"][:, 1]
    assert row[1].any()
    lines = [" ".join(map(str, [int(is_new), *obs.tolist()])) for obs, is_new in zip(*row[:2], strict=True)]
    given = {"input": "\n".join(lines), "text": True, "capture_output": True, "cwd": path}
    done = subprocess.run([str(path / "main")], check=True, **given)
    np.testing.assert_allclose(np.array(done.stdout.split(), np.float32).reshape(-1, 2), row[2], rtol=0, atol=1e-6)


def test_an_operation_that_c_lacks_is_named_and_the_rest_is_written(tmp_path):
    class Sorting(Known):
        def forward(self, x):
            return torch.sort(x, -1).values[..., :2]

    made = export_bundle(known_policy(Sorting()), tmp_path / "b")
    assert "aten.sort" in made.left_out["policy.c"]
    assert set(made.parity) == {"policy.onnx", "policy.ts"}
    assert json.loads((made.path / "policy.json").read_text())["left_out"] == made.left_out


@needs_cc
def test_a_wrong_weight_fails_the_export_and_keeps_the_bundle_before(made, tmp_path, monkeypatch):
    path = shutil.copytree(made["mlp"][1].path, tmp_path / "b")
    before = (path / "policy.json").read_bytes()
    table = c_code.c_table
    monkeypatch.setattr(c_code, "c_table", lambda name, values: table(name, values + np.float32(1e-3)))
    with pytest.raises(BundleError, match=r"policy.c differs from the recorded samples by .*, more than 1e-05"):
        export_bundle(made["mlp"][0], path)
    assert (path / "policy.json").read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["b"]  # nothing is left behind


def test_another_directory_is_not_overwritten_and_a_bundle_is_replaced(made, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="is no bundle; choose another directory"):
        export_bundle(made["mlp"][0], tmp_path / "mine")
    with pytest.raises(FileExistsError, match=r"thesis.txt is a file; a bundle is a directory"):
        export_bundle(made["mlp"][0], tmp_path / "mine" / "thesis.txt")
    path = shutil.copytree(made["lstm"][1].path, tmp_path / "b")
    export_bundle(known_policy(), path, formats=("onnx",))
    assert Policy(path).spec["inputs"][0]["shape"] == [3]
    assert not (path / "policy.c").exists()


def test_unknown_formats_and_missing_packages_are_named(made, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="unknown format 'tflite'; there are onnx, torchscript, c"):
        export_bundle(made["mlp"][0], tmp_path / "b", formats=("tflite",))
    monkeypatch.setattr("canter.export.graph.find_spec", lambda name: None if name == "onnxscript" else name)
    with pytest.raises(ImportError, match=r'exporting needs onnxscript: pip install "canter\[export\]"'):
        export_bundle(made["mlp"][0], tmp_path / "b")


def test_exporting_leaves_the_policy_as_it_was(made):
    policy = made["lstm"][0].policy
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    policy.train()
    policy.act(torch.randn(2, 7))  # leaves tensors with a gradient on the policy
    module = StepModule(made["lstm"][0])
    assert policy.training
    assert not module.policy.training
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
    policy.eval()


def test_without_a_compiler_c_is_written_and_said_to_be_unchecked(made, monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "no-such-compiler")
    found = check_bundle(made["mlp"][1].path)
    assert np.isnan(found["policy.c"])
    assert found["policy.onnx"] < 1e-6
    with pytest.raises(FileNotFoundError, match="there is no C compiler"):
        CPolicy(Bundle(made["mlp"][1].path), tmp_path)


def test_samples_come_from_the_environment_if_there_is_one(tmp_path):
    from canter.envs import PointRobot

    env = PointRobot(2, seed=0)
    policy = ActorCritic(env.num_obs, env.num_obs, 2, actor_hidden_dims=(4,), critic_hidden_dims=(4,))
    made = export_bundle(InferencePolicy(policy, env.obs_space), tmp_path / "b", env, formats=("onnx",))
    env.seed(0)
    recorded = Bundle(made.path).samples
    assert recorded["input.obs"].shape == (24, 2, env.num_obs)
    assert recorded["input.obs"][0].tolist() != recorded["input.obs"][1].tolist()
    assert json.loads((made.path / "policy.json").read_text())["samples"]["source"] == "the training environment"
    with pytest.raises(ValueError, match="observations have the shapes"):
        export_bundle(known_policy(), tmp_path / "c", env)


def test_bundles_are_exported_at_every_save_and_uploaded(tmp_path, monkeypatch):
    from canter.envs import PointRobot
    from canter.runners import OnPolicyRunner

    cfg = {"num_steps_per_env": 4, "save_interval": 2, "policy": {"actor_hidden_dims": [4], "critic_hidden_dims": [4]}}
    runner = OnPolicyRunner(PointRobot(2), cfg, tmp_path, "cpu", show_progress=False)
    bundle_module.export_on_save(runner, formats=("onnx",), upload=True)
    saved = []
    runner.init_writer()
    monkeypatch.setattr(runner.writer, "save_file", lambda path: saved.append(path.name))
    runner.learn(3)
    runner.close()
    assert [path.name for path in sorted((tmp_path / "export").iterdir())] == ["model_2"]
    assert {"policy.json", "policy.onnx", "samples.safetensors", "README.md", "runtime.py"} <= set(saved)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["export/difference_onnx"] < 1e-6 for row in rows if "export/difference_onnx" in row] == [True]
    runner = OnPolicyRunner(PointRobot(2), cfg, None, "cpu", show_progress=False)
    with pytest.raises(ValueError, match="there is no run directory to export to"):
        bundle_module.export_on_save(runner)


def test_a_bundle_is_stored_with_an_offline_run_of_wandb_and_shown_by_tensorboard(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="needs wandb: pip install 'canter[wandb]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from canter.envs import PointRobot
    from canter.runners import OnPolicyRunner

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    cfg = {"num_steps_per_env": 4, "save_interval": 1, "policy": {"actor_hidden_dims": [4], "critic_hidden_dims": [4]}}
    cfg["logger_backend"] = ["tensorboard", "wandb"]
    runner = OnPolicyRunner(PointRobot(2), cfg, tmp_path, "cpu", show_progress=False)
    bundle_module.export_on_save(runner, formats=("onnx",), upload=True)
    runner.learn(1)
    runner.close()
    made = tmp_path / "export" / "model_1"
    [stored] = tmp_path.glob("wandb/offline-run-*/files")
    for name in ("policy.json", "policy.onnx", "samples.safetensors", "README.md", "runtime.py"):
        assert (stored / name).read_bytes() == (made / name).read_bytes()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Scalars("export/difference_onnx")[0].value < 1e-6
    [page] = events.Tensors("README/text_summary")
    assert page.tensor_proto.string_val[0].decode() == (made / "README.md").read_text()


def test_call_sites_of_rsl_rl_get_checked_files(tmp_path):
    import onnxruntime

    from canter.envs import PointRobot
    from canter.runners import OnPolicyRunner

    cfg = {"num_steps_per_env": 4, "policy": {"actor_hidden_dims": [4], "critic_hidden_dims": [4]}}
    runner = OnPolicyRunner(PointRobot(2), cfg, None, "cpu", show_progress=False)
    runner.export_policy_to_onnx(str(tmp_path / "exported"), "mine.onnx", verbose=False)
    runner.export_policy_to_jit(str(tmp_path / "exported"))
    assert sorted(path.name for path in (tmp_path / "exported").iterdir()) == ["mine.onnx", "policy.pt"]
    obs, _ = runner.env.reset()
    want = runner.get_inference_policy()(obs).numpy()
    session = onnxruntime.InferenceSession(tmp_path / "exported" / "mine.onnx")
    assert np.abs(session.run(["actions"], {"obs": obs.numpy()})[0] - want).max() < 1e-6
    assert np.abs(torch.jit.load(tmp_path / "exported" / "policy.pt")(obs).numpy() - want).max() < 1e-6


def test_segments_of_a_group_are_the_terms_of_the_group():
    gyro = {"name": "gyro", "width": 3, "group": "student", "source": {"kind": "angular_velocity", "body": "trunk"}}
    joints = {"name": "joints", "width": 2, "group": "student"}
    goal = {"name": "goal", "width": 1, "group": "task"}
    own = [{"name": "student", "width": 5, "shape": [5]}, {"name": "task", "width": 1, "shape": [1]}]
    assert known_segments(own, [gyro, joints, goal]) == [gyro, joints, goal]
    assert known_segments([{"name": "obs", "width": 5, "shape": [5]}], [gyro, joints]) == [gyro, joints]
    named = known_segments([own[1], {"name": "gyro", "width": 3, "shape": [3]}], [gyro, joints, goal])
    assert named == [goal, {**gyro, "shape": [3]}]


def test_a_deploy_file_has_gains_in_the_order_of_the_motors_and_the_rest_in_the_policys():
    action = {"names": ["knee", "hip"], "target": "position", "stiffness": [30.0, 20.0], "damping": [0.3]}
    action |= {"scale": [0.25], "offset": [0.1, -0.2], "default_pose": [0.1, -0.2]}
    action["target_clip"] = [[-1.0, -2.0], [1.0, 2.0]]
    segments = [
        {"name": "w", "width": 3, "scale": [0.2], "source": {"kind": "sensor", "sensor": "gyro", "name": "imu"}},
        {"name": "q", "width": 4, "history": 2, "source": {"kind": "joint_position", "relative": True}},
        {"name": "c", "width": 3, "source": {"kind": "command", "command": "twist"}},
    ]
    twist = {"name": "twist", "kind": "velocity", "ranges": {"lin_vel_x": [-1, 1]}, "heading": None}
    spec = {"action": action, "observation": segments, "control_period": 0.02, "commands": [twist]}
    made = yaml.safe_load(deploy_yaml(spec, motors=["hip", "tail", "knee"]))
    assert made["joint_ids_map"] == [2, 0]
    assert made["stiffness"] == [20.0, 0.0, 30.0]
    assert made["default_joint_pos"] == [0.1, -0.2]
    target = made["actions"]["JointPositionAction"]
    assert (target["scale"], target["offset"]) == ([0.25, 0.25], [0.1, -0.2])
    assert target["clip"] == [[-1.0, 1.0], [-2.0, 2.0]]
    assert list(made["observations"]) == ["base_ang_vel", "joint_pos_rel", "velocity_commands"]
    assert made["observations"]["base_ang_vel"]["scale"] == [0.2, 0.2, 0.2]
    assert made["observations"]["joint_pos_rel"]["scale"] == [1.0, 1.0]
    assert made["observations"]["joint_pos_rel"]["history_length"] == 2
    assert made["commands"]["twist"]["ranges"] == {"lin_vel_x": [-1.0, 1.0], "heading": None}
    assert deploy_yaml({**spec, "action": {**action, "target": "ctrl"}}) is None
    found = properties({**spec, "training": {}})
    assert found["joint_stiffness"] == "30.0,20.0"
    assert found["observation_terms_clip"] == "-inf;inf,-inf;inf,-inf;inf"
