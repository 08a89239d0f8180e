"""Runs an exported policy with numpy and onnxruntime alone; a copy of this file is in every bundle.

    policy = Policy("bundle")            # refuses a bundle that was changed
    policy.reset()                       # at the start of an episode
    actions = policy.predict(obs)        # an array, or a dict of arrays; one observation or a batch

`python runtime.py BUNDLE` checks a bundle and measures a step. Reading a bundle imports and unpickles nothing of it.
"""

import hashlib
import json
import math
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

FORMAT, VERSION = "canter-policy", 2
READ_VERSIONS = (1, 2)
LIMIT = 1e-5
MAX_SPEC, MAX_BYTES, MAX_NUMBERS = 1 << 24, 1 << 31, 1 << 26  # of policy.json, of any other file, of an array
FILES = ("policy.onnx", "policy.ts", "policy.h", "policy.c", "samples.safetensors", "README.md", "runtime.py")
FILES += ("deploy.yaml",)
NEEDED = ("policy.onnx", "samples.safetensors")
DTYPES = {"F32": "float32", "U8": "uint8", "I64": "int64", "BOOL": "bool"}
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,120}")


class BundleError(ValueError):
    """A bundle cannot be used; the message names the file and the reason."""


class Bundle:
    """The files of a bundle, verified: `spec` is the content of policy.json."""

    def __init__(self, path: Any) -> None:
        self.path = Path(path)
        if not (self.path / "policy.json").is_file():
            raise BundleError(f"{self.path} is no bundle: it has no policy.json; write one with `canter export RUN`")
        self.spec = read_spec(self.path / "policy.json")
        self.files = {name: self._read(name, entry) for name, entry in self.spec["files"].items()}
        """Content by name."""
        self.samples = read_safetensors(self.files["samples.safetensors"])

    def _read(self, name: str, entry: Mapping[str, Any]) -> bytes:
        content = read_file(self.path / name, MAX_BYTES)
        if hashlib.sha256(content).hexdigest() != entry["sha256"]:
            raise BundleError(f"{self.path / name} was changed: its SHA-256 is not the one in policy.json")
        return content


def read_file(path: Path, limit: int) -> bytes:
    """The content of a file of at most `limit` bytes."""
    if not path.exists():
        raise BundleError(f"{path} is missing; copy the whole bundle, or export it again")
    try:
        if path.stat().st_size > limit or not path.is_file():
            raise BundleError(f"{path} is no plain file, or has more than {limit} bytes")
        return path.read_bytes()
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error}") from error


def read_spec(path: Path) -> dict[str, Any]:
    """The content of a policy.json whose own hash is right and whose structure is as documented."""
    content = read_file(path, MAX_SPEC)
    try:
        spec = json.loads(content, parse_constant=lambda text: _refuse(path, f"{text} is not a number"))
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path} cannot be read: {error}") from error
    if not isinstance(spec, dict) or spec.get("format") != FORMAT:
        raise BundleError(f"{path} does not describe a policy of canter")
    if spec.get("version") not in READ_VERSIONS:
        known = " and ".join(map(str, READ_VERSIONS))
        raise BundleError(f"{path} has format version {spec.get('version')!r}, this canter reads {known}")
    if spec.get("sha256") != spec_hash(spec):
        raise BundleError(f"{path} was changed: its own SHA-256 does not match")
    check_structure(path, spec)
    return spec


def _refuse(path: Path, reason: str) -> Any:
    raise BundleError(f"{path}: {reason}")


def spec_hash(spec: Mapping[str, Any]) -> str:
    """SHA-256 of everything in a policy.json but its own hash."""
    content = {name: value for name, value in spec.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def check_structure(path: Path, spec: Mapping[str, Any]) -> None:
    """Refuse a policy.json that lacks an entry, or names files and shapes that it must not."""
    files: Any = spec.get("files")
    if not isinstance(files, dict) or not set(NEEDED) <= set(files) <= set(FILES):
        _refuse(path, f"files must be some of {', '.join(FILES)}, with {' and '.join(NEEDED)}; got {files!r}")
    for name, entry in files.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("sha256"), str):
            _refuse(path, f"the file {name} has no sha256")
    for group in ("inputs", "outputs", "memories"):
        ports: Any = spec.get(group)
        if not isinstance(ports, list) or (group != "memories" and not ports):
            _refuse(path, f"{group} must be a list, got {ports!r}")
        for port in ports:
            check_port(path, group, port)
    if spec["outputs"][0]["name"] != "actions":
        _refuse(path, f"the first output must be actions, got {spec['outputs'][0]['name']!r}")
    for name in ("training", "action"):
        if not isinstance(spec.get(name), dict):
            _refuse(path, f"{name} must be an object, got {spec.get(name)!r}")
    check_observation(path, spec)


def check_port(path: Path, group: str, port: Any) -> None:
    """Refuse an input, output or memory without a proper name, shape and dtype."""
    if not isinstance(port, dict) or not isinstance(port.get("name"), str) or not _NAME.fullmatch(port["name"]):
        _refuse(path, f"{group} has an entry without a proper name: {port!r}")
    shape: Any = port.get("shape")
    is_shape = isinstance(shape, list) and all(type(n) is int and 0 < n <= MAX_NUMBERS for n in shape)
    if not is_shape or math.prod(shape) > MAX_NUMBERS:
        _refuse(path, f"{group} {port['name']!r} has no proper shape: {shape!r}")
    if port.get("dtype") not in DTYPES.values():
        _refuse(path, f"{group} {port['name']!r} has no known dtype: {port.get('dtype')!r}")


def check_observation(path: Path, spec: Mapping[str, Any]) -> None:
    """Refuse segments that do not fill the observation, and a control period that is no time."""
    segments: Any = spec.get("observation")
    if segments is not None:
        is_list = isinstance(segments, list) and all(isinstance(s, dict) for s in segments)
        widths: Any = [segment.get("width") for segment in segments] if is_list else [None]
        fills = all(type(n) is int for n in widths) and [sum(widths)] == spec["inputs"][0]["shape"]
        if not fills or not all(isinstance(segment.get("name"), str) for segment in segments):
            _refuse(path, f"the segments of the observation are {widths} wide, the input {spec['inputs'][0]['shape']}")
        for segment in segments:
            source: Any = segment.get("source", {"kind": ""})
            if not isinstance(source, dict) or not isinstance(source.get("kind"), str):
                _refuse(path, f"the source of the segment {segment['name']!r} has no kind: {source!r}")
    for name in ("joints", "commands"):
        entries: Any = spec.get(name, [])
        if not isinstance(entries, list) or not all(
            isinstance(e, dict) and isinstance(e.get("name"), str) for e in entries
        ):
            _refuse(path, f"{name} must be a list of objects with names, got {entries!r}")
    period = spec.get("control_period")
    if period is not None and not (isinstance(period, int | float) and 0 < period < 3600):
        _refuse(path, f"control_period must be a number of seconds, got {period!r}")


def read_safetensors(content: bytes) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file, with every size checked."""
    try:
        length = int.from_bytes(content[:8], "little")
        if not 2 <= length <= len(content) - 8:
            raise ValueError("its header is longer than the file")
        header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
        arrays = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            first, last = entry["data_offsets"]
            dtype, shape = np.dtype(DTYPES[entry["dtype"]]), [int(n) for n in entry["shape"]]
            if (
                not 0 <= first <= last <= len(data)
                or last - first != math.prod(shape) * dtype.itemsize
                or min([0, *shape]) < 0
            ):
                raise ValueError(f"{name} has wrong offsets")
            arrays[name] = np.frombuffer(data[first:last], dtype).reshape(shape)
        return arrays
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise BundleError(f"samples.safetensors is damaged: {error}") from error


class Policy:
    """An exported policy in ONNX Runtime, with its memories.

    Args:
        bundle: The bundle's directory, or a verified `Bundle`.
        threads: Threads of ONNX Runtime; one is fastest for the small networks of robots.
        check: Compare the policy with the recorded samples first; a difference above 1e-5 is an error.
    """

    def __init__(self, bundle: Any, threads: int = 1, check: bool = True) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise ImportError("running a bundle needs ONNX Runtime: pip install onnxruntime") from error
        self.bundle = bundle if isinstance(bundle, Bundle) else Bundle(bundle)
        self.spec = spec = self.bundle.spec
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = threads
        options.log_severity_level = 3
        model = self.bundle.files["policy.onnx"]
        try:
            self.session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise BundleError(f"ONNX Runtime {onnxruntime.__version__} cannot load policy.onnx: {error}") from error
        self.memories = [(f"{m['name']}_in", tuple(m["shape"])) for m in spec["memories"]]
        wanted = [port["name"] for port in spec["inputs"]] + [name for name, _ in self.memories]
        if [part.name for part in self.session.get_inputs()] != wanted:
            found = [part.name for part in self.session.get_inputs()]
            raise BundleError(f"policy.onnx has the inputs {found}, policy.json says {wanted}")
        self.output_names = [port["name"] for port in spec["outputs"]]
        self.start = first_action(spec)
        self.state: dict[str, np.ndarray] = {}
        self.outputs: dict[str, np.ndarray] = {}
        """Every output of the last step: actions, and logits or estimates where the policy has them."""
        if check:
            refuse_difference(self.difference(), "policy.onnx")

    def predict(self, obs: Any) -> np.ndarray:
        """The actions of one step, as the environment takes them, for one observation or a batch; advances memories."""
        return self(obs) + self.start if self.start.any() else self(obs)

    def __call__(self, obs: Any) -> np.ndarray:
        """The actions of one step as the files give them: discrete ones are numbered from 0."""
        arrays, is_single = self._arrange(obs)
        rows = len(next(iter(arrays.values())))
        if any(len(state) != rows for state in self.state.values()) or len(self.state) != len(self.memories):
            self.state = {name: np.zeros((rows, *shape), np.float32) for name, shape in self.memories}
        found: Any = self.session.run(None, {**arrays, **self.state})
        count = len(self.output_names)
        self.outputs = dict(zip(self.output_names, found[:count], strict=True))
        self.state = dict(zip([name for name, _ in self.memories], found[count:], strict=True))
        if is_single:
            self.outputs = {name: value[0] for name, value in self.outputs.items()}
        return self.outputs["actions"]

    def reset(self, dones: Any = None) -> None:
        """Clear the memories of rows whose episode ended; of all if None."""
        if dones is None:
            self.state = {}
        else:
            ended = np.asarray(dones, bool).reshape(-1, 1, 1, 1)
            rows = {len(state) for state in self.state.values()} - {len(ended)}
            if rows:
                raise ValueError(f"dones has {len(ended)} entries, but the last observations had {rows.pop()} rows")
            self.state = {name: np.where(ended, np.float32(0), state) for name, state in self.state.items()}

    def _arrange(self, obs: Any) -> tuple[dict[str, np.ndarray], bool]:
        """Inputs by name, as batches, and whether one observation was given."""
        ports = self.spec["inputs"]
        if isinstance(obs, Mapping):
            leaves = dict(_leaves(obs))
            if len(ports) == 1 and set(leaves) != {ports[0]["name"]}:
                leaves = {ports[0]["name"]: self._joined(leaves)}
        else:
            leaves = {ports[0]["name"]: np.asarray(obs)}
        if set(leaves) != {port["name"] for port in ports}:
            raise ValueError(f"the observation has the parts {sorted(leaves)}, expected {[p['name'] for p in ports]}")
        for port in ports:
            given = np.asarray(leaves[port["name"]]).dtype
            if port["dtype"] == "uint8" and given.kind == "f":  # a conversion would make 0 of everything below 1
                raise ValueError(f"{port['name']} has numbers of type {given}; the policy wants uint8 from 0 to 255")
        arrays = {port["name"]: np.asarray(leaves[port["name"]], port["dtype"]) for port in ports}
        shapes = {port["name"]: tuple(port["shape"]) for port in ports}
        is_single = all(array.shape == shapes[name] for name, array in arrays.items())
        if is_single:
            arrays = {name: array[None] for name, array in arrays.items()}
        for name, array in arrays.items():
            if array.shape[1:] != shapes[name]:
                raise ValueError(f"{name} has shape {array.shape}; the policy wants {shapes[name]}, or a batch of them")
        return arrays, is_single

    def _joined(self, leaves: Mapping[str, Any]) -> np.ndarray:
        """One flat observation from a dict by segment."""
        segments = {segment["name"]: segment for segment in self.spec.get("observation") or []}
        if set(leaves) != set(segments):
            raise ValueError(f"the observation has the parts {sorted(leaves)}, expected {list(segments)}")
        parts = {name: np.asarray(leaf) for name, leaf in leaves.items()}
        first, segment = next(iter(segments.items()))
        lead = () if parts[first].size == segment["width"] else (len(parts[first]),)
        return np.concatenate([parts[name].reshape(*lead, segments[name]["width"]) for name in segments], -1)

    def difference(self) -> float:
        """Largest difference between this policy's results and the recorded ones, relative to numbers above 1."""
        steps = replay(self, self.bundle)
        self.reset()
        return steps

    def latency(self, steps: int = 2000) -> dict[str, float]:
        """Seconds per step for one observation: median, 99th percentile and the longest."""
        names = [port["name"] for port in self.spec["inputs"]]
        first = {name: self.bundle.samples[f"input.{name}"][0, 0] for name in names}
        times = []
        for number in range(steps + 50):
            begin = time.perf_counter()
            self.predict(first)
            if number >= 50:
                times.append(time.perf_counter() - begin)
        self.reset()
        return {"median": float(np.median(times)), "p99": float(np.quantile(times, 0.99)), "max": max(times)}


def first_action(spec: Mapping[str, Any]) -> np.ndarray:
    """The number of the environment's first discrete action, one for each part of a MultiDiscrete; 0 for any other."""
    space = spec["action"].get("space")
    start: Any = space.get("start", 0) if isinstance(space, dict) else 0
    width = math.prod(spec["outputs"][0]["shape"])
    if not all(type(n) is int for n in (start if isinstance(start, list) else [start])):
        raise BundleError(f"the first action must be a whole number, got {start!r}")
    if isinstance(start, list) and len(start) != width:
        raise BundleError(f"policy.json has {width} actions, and numbers of the first one for {len(start)}")
    return np.asarray(start)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Any:
    for name, leaf in tree.items():
        if isinstance(leaf, Mapping):
            yield from _leaves(leaf, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", leaf


def replay(policy: Any, bundle: Bundle) -> float:
    """Largest difference between a policy's results on the samples, (T, N, ...) with resets inside, and the record."""
    samples, largest = bundle.samples, 0.0
    names = [port["name"] for port in bundle.spec["inputs"]]
    outputs = [port["name"] for port in bundle.spec["outputs"]]
    needed = [f"input.{name}" for name in names] + [f"output.{name}" for name in outputs] + ["resets"]
    lengths = {samples[name].shape[:2] for name in needed if name in samples}
    if any(name not in samples for name in needed) or len(lengths) != 1 or 0 in next(iter(lengths)):
        raise BundleError(f"samples.safetensors must have {needed} of one length, got {sorted(samples)}")
    policy.reset()
    for step, resets in enumerate(samples["resets"]):
        if step:
            policy.reset(resets)
        policy.predict({name: samples[f"input.{name}"][step] for name in names})
        for name in outputs:
            largest = max(largest, difference(policy.outputs[name], samples[f"output.{name}"][step]))
    return largest


def difference(found: np.ndarray, recorded: np.ndarray) -> float:
    """Largest |found - recorded| / max(1, |recorded|); infinite where shapes differ or a number is not finite."""
    if found.shape != recorded.shape or not (np.isfinite(found).all() and np.isfinite(recorded).all()):
        return math.inf
    found, recorded = found.astype(np.float64), recorded.astype(np.float64)
    return float(np.max(np.abs(found - recorded) / np.maximum(1.0, np.abs(recorded)), initial=0.0))


def refuse_difference(largest: float, what: str) -> None:
    """Raise if a difference is above 1e-5."""
    if not largest <= LIMIT:
        raise BundleError(f"{what} differs from the recorded samples by {largest:.3g}, more than {LIMIT:g}")


def main() -> int:
    """Check a bundle and print its parity and latency."""
    path = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).parent)
    try:
        policy = Policy(path, check=False)
        largest = policy.difference()
        refuse_difference(largest, "policy.onnx")
    except (BundleError, ImportError) as error:
        sys.stderr.write(f"{error}\n")
        return 6
    times = policy.latency()
    sys.stdout.write(f"policy.onnx: largest difference {largest:.2e}, ")
    sys.stdout.write(f"step {times['median'] * 1e6:.1f} us (99 %: {times['p99'] * 1e6:.1f} us)\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
