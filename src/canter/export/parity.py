"""Runs a bundle's ONNX, TorchScript and C files on its recorded samples and compares the results.

Reading a bundle runs nothing of it. Checking it does: TorchScript is loaded, and the C file is compiled and run. Check
bundles of people you trust.
"""

import ctypes
import io
import os
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from canter.export.runtime import Bundle, Policy, refuse_difference, replay

FLAGS = ("-O2", "-Wall", "-Werror", "-std=c99")
KINDS: dict[str, Any] = {"float32": ctypes.c_float, "uint8": ctypes.c_ubyte, "int64": ctypes.c_int}
SIZE_FUNCTION = '#include "policy.h"\nunsigned long policy_state_size(void);\nunsigned long policy_state_size(void)'
SIZE_FUNCTION += " { return sizeof(policy_state); }\n"


def compiler() -> str | None:
    """The C compiler: the one in the variable CC, or cc."""
    return shutil.which(os.environ.get("CC") or "cc")


class TorchScriptPolicy:
    """The policy.ts of a bundle, with the calls of `runtime.Policy`."""

    def __init__(self, bundle: Bundle) -> None:
        import torch

        self.torch, self.spec = torch, bundle.spec
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # libtorch still loads TorchScript, and nothing else
            self.module = torch.jit.load(io.BytesIO(bundle.files["policy.ts"]), map_location="cpu")
        self.state: list[Any] = []
        self.outputs: dict[str, np.ndarray] = {}

    def predict(self, obs: Any) -> np.ndarray:
        """The actions of a batch."""
        torch, memories = self.torch, self.spec["memories"]
        given = [torch.from_numpy(np.array(obs[port["name"]])) for port in self.spec["inputs"]]
        if not self.state:
            self.state = [torch.zeros(len(given[0]), *memory["shape"]) for memory in memories]
        with torch.inference_mode():
            found = self.module(*given, *self.state)
        names = [port["name"] for port in self.spec["outputs"]]
        self.outputs = {name: value.numpy() for name, value in zip(names, found, strict=False)}
        self.state = list(found[len(names) :])
        return self.outputs["actions"]

    def reset(self, dones: Any = None) -> None:
        """Clear the memories of rows whose episode ended; of all if None."""
        if dones is None:
            self.state = []
        else:
            ended = self.torch.from_numpy(np.array(dones, bool)).view(-1, 1, 1, 1)
            self.state = [state.masked_fill(ended, 0.0) for state in self.state]


class CPolicy:
    """The policy.c of a bundle, compiled, with the calls of `runtime.Policy`; one state for each row."""

    def __init__(self, bundle: Bundle, folder: str | Path) -> None:
        command = compiler()
        if command is None:
            raise FileNotFoundError("there is no C compiler: install cc, or name one in the variable CC")
        self.spec, folder = bundle.spec, Path(folder)
        for name in ("policy.h", "policy.c"):
            (folder / name).write_bytes(bundle.files[name])
        (folder / "size.c").write_text(SIZE_FUNCTION)
        library = folder / "policy.so"
        sources = [str(folder / name) for name in ("policy.c", "size.c")]
        parts = [command, *FLAGS, "-fPIC", "-shared", *sources, "-o", str(library), "-lm"]
        done = subprocess.run(parts, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise RuntimeError(f"{command} cannot compile policy.c: {done.stderr.strip()[:2000]}")
        self.library = ctypes.CDLL(str(library))
        self.library.policy_state_size.restype = ctypes.c_ulong
        self.size = int(self.library.policy_state_size())
        self.states: list[Any] = []
        self.outputs: dict[str, np.ndarray] = {}

    def new_state(self) -> Any:
        """A cleared state."""
        state = ctypes.create_string_buffer(self.size)
        self.library.policy_reset(state)
        return state

    def predict(self, obs: Any) -> np.ndarray:
        """The actions of a batch."""
        inputs = {p["name"]: np.ascontiguousarray(obs[p["name"]], p["dtype"]) for p in self.spec["inputs"]}
        rows = len(next(iter(inputs.values())))
        if len(self.states) != rows:
            self.states = [self.new_state() for _ in range(rows)]
        ports = self.spec["outputs"]
        found = {
            p["name"]: np.zeros((rows, *p["shape"]), "int32" if p["dtype"] == "int64" else "float32") for p in ports
        }
        types = [KINDS[p["dtype"]] for p in (*self.spec["inputs"], *ports)]
        for row, state in enumerate(self.states):
            arrays = [array[row : row + 1] for array in (*inputs.values(), *found.values())]
            pairs = zip(arrays, types, strict=True)
            self.library.policy_step(state, *(a.ctypes.data_as(ctypes.POINTER(kind)) for a, kind in pairs))
        self.outputs = found
        return found["actions"]

    def reset(self, dones: Any = None) -> None:
        """Clear the memories of rows whose episode ended; of all if None."""
        if dones is None:
            self.states = []
            return
        for state, is_done in zip(self.states, dones, strict=True):
            if is_done:
                self.library.policy_reset(state)


def check_bundle(path: Any) -> dict[str, float]:
    """Largest difference of every executable file of a bundle from the recorded samples; above 1e-5 is an error.

    `nan` stands for a C file that could not be checked because there is no compiler.
    """
    bundle = path if isinstance(path, Bundle) else Bundle(path)
    found = {"policy.onnx": Policy(bundle, check=False).difference()}
    if "policy.ts" in bundle.files:
        found["policy.ts"] = replay(TorchScriptPolicy(bundle), bundle)
    if "policy.c" in bundle.files:
        found["policy.c"] = float("nan")
        if compiler() is not None:
            with tempfile.TemporaryDirectory() as folder:
                found["policy.c"] = replay(CPolicy(bundle, folder), bundle)
    for name, largest in found.items():
        if not np.isnan(largest):
            refuse_difference(largest, name)
    return found
