"""Private names of torch: each still exists, one file uses them, and canter trains without them.

If a canary fails, a torch release has renamed or removed the name: look at its use in canter/execution.
"""

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import canter

SOURCE = Path(canter.__file__).parent

USES = {
    "intercept operations in the recorder": "torch.utils._python_dispatch.TorchDispatchMode",
    "read addresses without noting it": "torch._C.DisableTorchFunction",
    "let views of weights in inference mode be as outside a mode": "torch._C._SetExcludeDispatchKeyGuard",
    "name the key of that guard": "torch._C.DispatchKey.ADInplaceOrView",
    "build the graph of a recording": "torch._C.Graph",
    "type its tensors": "torch._C.TensorType.get",
    "type its unused arguments": "torch._C.AnyType.get",
    "type its lists": "torch._C.ListType",
    "type its results": "torch._C.TupleType",
    "run it": "torch._C._create_function_from_graph",
    "keep it as it was recorded": "torch._C._set_graph_executor_optimize",
    "restore the user's setting": "torch._C._get_graph_executor_optimize",
    "begin operations at their kernels": "torch._C._ExcludeDispatchKeyGuard",
    "list the keys before these": "torch._C.DispatchKeySet",
    "name the first of them": "torch._C.DispatchKey.AutogradCPU",
    "copy gradients into a flat vector in one call": "torch._foreach_copy_",
    "draw Beta actions with a generator": "torch._sample_dirichlet",
    "compile the graph of a recording": "torch._inductor.compile_fx",
    "set compiler options": "torch._inductor.config",
    "keep the autograd cache from skipping our hook": "torch._functorch.config",
    "run graph rewrites as the compiler's last pass": "torch._inductor.custom_graph_pass.CustomGraphPass",
    "identify these rewrites in the compiler's cache": "torch._inductor.custom_graph_pass.get_hash_for_files",
}
OPERATIONS = {
    "results that depend on shapes only": (
        "ones_like.default",
        "zeros_like.default",
        "full_like.default",
        "new_zeros.default",
        "new_ones.default",
        "new_full.default",
    ),
    "running statistics that an operation writes": (
        "native_batch_norm.default",
        "cudnn_batch_norm.default",
        "batch_norm.default",
    ),
    "constants made inside a function": ("lift_fresh.default", "clone.default"),
    "identities and products with one": (
        "detach.default",
        "alias.default",
        "t.default",
        "mul.Tensor",
        "mul.Scalar",
        "pow.Tensor_Scalar",
        "view.default",
    ),
    "layers whose weights are transposed once": ("linear.default",),
    "stacks that are copied part by part": ("stack.default", "select.int", "_to_copy.default"),
    "writes that can be compiled": (
        "copy_.default",
        "index_copy_.default",
        "add_.Tensor",
        "mul_.Tensor",
        "__ior__.Tensor",
        "empty.memory_format",
    ),
    "list operations to decompose": (
        "_foreach_add_.Scalar",
        "_foreach_add_.List",
        "_foreach_sub_.Scalar",
        "_foreach_sub_.List",
        "_foreach_mul_.Scalar",
        "_foreach_mul_.List",
        "_foreach_copy_.default",
        "cat.default",
        "reshape.default",
    ),
    "fused optimizer steps to decompose": ("_fused_adam_.tensor_lr", "_fused_adamw_.tensor_lr"),
    "arithmetic of decomposed steps": (
        "add.Tensor",
        "sub.Tensor",
        "div.Tensor",
        "neg.default",
        "rsub.Scalar",
        "pow.Scalar",
        "sqrt.default",
        "where.self",
        "eq.Scalar",
        "_to_copy.default",
    ),
    "rewrites of compiled graphs": (
        "addmm.default",
        "mm.default",
        "tanh.default",
        "sigmoid.default",
        "as_strided.default",
    ),
}
NAMES = [(name, use) for use, name in USES.items()]
NAMES += [(f"torch.ops.aten.{name}", use) for use, names in OPERATIONS.items() for name in names]


def find(name):
    """The object of a dotted name; submodules are imported."""
    parts = name.split(".")
    value = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], 2):
        try:
            value = getattr(value, part)
        except AttributeError:
            value = importlib.import_module(".".join(parts[:i]))
    return value


@pytest.mark.parametrize(("name", "use"), NAMES, ids=[name for name, _ in NAMES])
def test_torch_has_the_private_name(name, use):
    assert find(name) is not None, f"canter.execution needs {name} to {use}"


def test_operations_have_a_schema_tags_and_names():
    add, write = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
    assert (add.name(), add.namespace) == ("aten::add.Tensor", "aten")
    assert not add._schema.is_mutable
    assert write._schema.is_mutable
    assert write._schema.arguments[0].alias_info.is_write
    assert torch.ops.aten.view.default._schema.returns[0].alias_info is not None
    assert torch.Tag.pointwise in add.tags
    assert torch.Tag.nondeterministic_seeded in torch.ops.aten.randn.generator.tags
    assert torch.Tag.dynamic_output_shape in torch.ops.aten.nonzero.default.tags
    assert torch.Tag.data_dependent_output in torch.ops.aten._local_scalar_dense.default.tags


def test_generators_have_an_address():
    assert isinstance(torch.Generator()._cdata, int)


def test_the_compiler_has_the_options_in_use():
    from canter.execution.compile import INDUCTOR_OPTIONS

    compile_fx, config = find("torch._inductor.compile_fx"), find("torch._inductor.config")
    assert all(hasattr(config, name) for name in (*INDUCTOR_OPTIONS, "post_grad_custom_post_pass"))
    assert callable(config.patch)
    assert callable(compile_fx.compile_fx)
    assert callable(compile_fx.compile_fx_inner)
    assert hasattr(find("torch._functorch.config"), "enable_autograd_cache")


def dotted(node):
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def private_names(path):
    """Dotted private names of torch in a source file; `aten` stands for torch.ops.aten."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            name = dotted(node)
            names.add(f"torch.ops.{name}" if name.startswith("aten.") else name)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            if not isinstance(node.args[1], ast.Constant):
                continue
            names.add(f"{dotted(node.args[0]) or ast.unparse(node.args[0])}.{node.args[1].value}")
    names = {f"torch._C.{name[7:]}" if name.startswith("script.") else name for name in names}
    parts = {name: name.split(".") for name in names if name.startswith("torch.")}
    return {
        name
        for name, (_, *inner) in parts.items()
        if inner[0] == "ops" or any(part.startswith("_") and not part.startswith("__") for part in inner)
    }


def test_only_one_file_uses_private_names():
    found = {str(path.relative_to(SOURCE)): private_names(path) for path in SOURCE.rglob("*.py")}
    del found["execution/torch_private.py"]
    own = found["utils/distributed.py"]  # canter's own operators
    found["utils/distributed.py"] = {name for name in own if not f"{name}.".startswith("torch.ops.canter.")} - {
        "torch.ops"
    }
    allowed = ("torch.ops", "torch._C.")  # the second through the name `script`
    others = {
        p: {n for n in names if not (p.startswith("execution/") and n.startswith(allowed))}
        for p, names in found.items()
    }
    assert {path: names for path, names in others.items() if names} == {}


def test_every_private_name_in_use_has_a_canary():
    found = set().union(*(private_names(path) for path in (SOURCE / "execution").rglob("*.py")))
    operations = {name for name in found if name.startswith("torch.ops.aten.") and name.count(".") == 4}
    # Of these only parts are used.
    whole = {"torch._C", "torch._C.DispatchKey", "torch._C.TensorType", "torch._C.AnyType", "torch._C._functorch"}
    others = {name for name in found if not name.startswith("torch.ops")} - whole
    assert operations | others == {name for name, _ in NAMES}


def run_python(code, *args):
    env = {**os.environ, "PYTHONPATH": str(SOURCE.parent), "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-c", code, *args], env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_canter_loads_no_module_that_needs_private_names():
    code = """
import sys
import canter.algorithms, canter.envs, canter.modules, canter.runners, canter.storage
print([name for name in sys.modules if name.startswith("canter.execution.")])
"""
    needed = {"executor", "cuda_graph", "torch_private"}
    assert set(ast.literal_eval(run_python(code))) == {f"canter.execution.{name}" for name in needed}


TRAIN = """
import importlib, sys, warnings
import torch
import torch._dynamo  # torch.optim imports it in its first step, and it needs the name
from torch.utils._python_dispatch import TorchDispatchMode

class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))

parameter = torch.nn.Parameter(torch.ones(1))
parameter.grad = torch.ones(1)
with Mode():  # torch looks an operation up by its name when a mode first sees it, and remembers it
    torch.optim.Adam([parameter], lr=torch.tensor(0.1), fused=True).step()

owner, _, name = sys.argv[1].rpartition(".")
if owner == "torch.ops.aten":  # operations are looked up when they are first used
    namespace = torch.ops.aten
    look_up = type(namespace).__getattr__
    def refuse(self, other):
        if self is namespace and other == name:
            raise AttributeError(f"no operation {name}")
        return look_up(self, other)
    type(namespace).__getattr__ = refuse
    vars(namespace).pop(name, None)
else:
    delattr(importlib.import_module(owner), name)

from canter.envs import wrap_env
from canter.presets import load_preset
from canter.runners import OnPolicyRunner

import canter.execution.executor
if sys.argv[2] == "compile":
    from canter.execution import record
    record.PAYING_SECONDS = 0.0
settings = load_preset("CartPole-v1")
settings["algorithm"]["execution"] = sys.argv[2]
runner = OnPolicyRunner(wrap_env("CartPole-v1", num_envs=settings["num_envs"]), settings, show_progress=False)
before = [p.detach().clone() for p in runner.alg.policy.parameters()]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", UserWarning)
    runner.learn(2)
    for graph in runner.alg.executor.graphs.values():
        if graph.compilation is not None:
            graph.compilation.thread.join()
assert not any(torch.equal(p, q) for p, q in zip(before, runner.alg.policy.parameters()))
recorded = sorted({signature[0] for signature in runner.alg.executor.graphs})
print((recorded, [str(w.message) for w in caught if name in str(w.message)]))
"""


@pytest.mark.parametrize(
    ("name", "execution", "is_recorded", "message"),
    [
        ("torch.ops.aten._fused_adam_", "auto", True, ""),
        ("torch.ops.aten._fused_adam_", "compile", True, "cannot be compiled (no operation _fused_adam_)"),
        ("torch.utils._python_dispatch.TorchDispatchMode", "auto", False, "functions run eagerly, slower"),
        ("torch._foreach_copy_", "auto", True, ""),
        ("torch._C._create_function_from_graph", "auto", True, ""),
    ],
)
def test_ppo_trains_without_the_private_name(name, execution, is_recorded, message):
    recorded, messages = ast.literal_eval(run_python(TRAIN, name, execution).splitlines()[-1])
    assert bool(recorded) == is_recorded
    assert bool(messages) == bool(message)
    assert all(message in text for text in messages)
