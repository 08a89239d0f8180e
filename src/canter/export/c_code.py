"""A policy as plain C99: the graph of one step with one row, as loops over fixed buffers.

The graph comes from `torch.export`, in core ATen operators. Slices, permutations and reshapes cost nothing: a value is
a buffer with an offset and strides. Nodes that depend on weights alone are computed here. Everything is a float.
"""

import math
import re
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.fx.node import map_arg

from canter.export.c_operations import VIEWS, WRITERS, Node
from canter.export.c_writer import HELPERS, NotInCError, Value, Writer, literal, packed_strides
from canter.export.graph import Port, StepModule, exported_program, quiet

SKIPPED = ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range_for_size")


RESERVED = {
    *HELPERS,
    "state",
    "scratch",
    "policy_state",
    "policy_reset",
    "policy_step",
    "auto",
    "break",
    "case",
    "char",
    "const",
    "continue",
    "default",
    "do",
    "double",
    "else",
    "enum",
    "extern",
    "float",
    "for",
    "goto",
    "if",
    "inline",
    "int",
    "long",
    "register",
    "restrict",
    "return",
    "short",
    "signed",
    "sizeof",
    "static",
    "struct",
    "switch",
    "typedef",
    "union",
    "unsigned",
    "void",
    "volatile",
    "while",
}


class CFiles(NamedTuple):
    """The two files of a policy in C."""

    header: str
    source: str


def c_files(module: StepModule, comment: str = "") -> CFiles:
    """policy.h and policy.c of a step; NotInCError names an operation that cannot be written."""
    names = [identifier(port.name) for port in (*module.observations, *module.results)]
    if len(set(names)) < len(names):
        raise NotInCError(f"different names in C for all of {', '.join(names)}")
    program = exported_program(module, rows=1)
    with quiet():
        program = program.run_decompositions()
    writer, values = Writer(), {}
    inputs = iter(module.input_names)
    by_name = dict(zip(module.input_names, [*module.observations, *module.memories], strict=True))
    state = {**program.state_dict, **program.constants}
    signature = program.graph_signature
    tensors = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    tensors |= signature.inputs_to_lifted_tensor_constants
    for node in program.graph.nodes:
        if node.op == "placeholder":
            if node.name in tensors:
                values[node] = state[tensors[node.name]]
            else:
                name = next(inputs)
                values[node] = input_value(writer, name, by_name[name])
        elif node.op == "call_function":
            values[node] = run_node(writer, node, values)
        elif node.op == "output":
            results = [writer.value(values[given]) for given in node.args[0]]
            # Old memories are copied before new ones are written over them.
            kept = [writer.pointwise(r.shape, "{0}", r) if "->" in r.buffer else r for r in results]
            for port, result in zip(module.results, kept, strict=True):
                write_result(writer, module, port, result)
    # The name of a task is data: nothing in it may end the comment.
    return render(module, writer, re.sub(r"[^\w .,:/-]", "_", comment, flags=re.ASCII))


def input_value(writer: Writer, name: str, port: Port) -> Value:
    """The C value of an input; bytes become floats first."""
    shape = (1, *port.shape)
    if name.endswith("_in") and port.name != name:
        return Value(f"state->{identifier(port.name)}", shape, packed_strides(shape))
    given = Value(identifier(name), shape, packed_strides(shape))
    return writer.pointwise(shape, "(float){0}", given) if port.dtype != "float32" else given


def has_value(given: Any) -> bool:
    """Whether an argument, or a part of a list, depends on the inputs."""
    return any(map(has_value, given)) if isinstance(given, list | tuple) else isinstance(given, Value)


def run_node(writer: Writer, node: Any, values: dict[Any, Any]) -> Any:
    """The C value of a node, or the tensor itself where it depends on weights alone."""
    target = node.target
    args, kwargs = map_arg((node.args, node.kwargs), lambda given: values[given])
    if getattr(target, "__name__", "") == "getitem":
        return args[0][args[1]]
    name = str(target).split(".")[1] if str(target).startswith("aten.") else str(target)
    if name in SKIPPED:
        return None
    if not any(has_value(part) for part in (*args, *kwargs.values())):
        return target(*args, **kwargs)
    if name not in WRITERS:
        raise NotInCError(f"the operation {target}")
    shown = node.meta["val"]
    shape = tuple(int(n) for n in shown.shape) if torch.is_tensor(shown) else ()
    if name in VIEWS:  # of a weight: a table first
        args = (writer.value(args[0]), *args[1:])
    return WRITERS[name](writer, Node(tuple(args), dict(kwargs), shape))


def write_result(writer: Writer, module: StepModule, port: Port, value: Value) -> None:
    """Copy a result to the caller's array, or to the memory of the next step."""
    shape = (1, *port.shape)
    is_memory = port.name in {memory.name for memory in module.memories}
    buffer = f"state->{identifier(port.name)}" if is_memory else identifier(port.name)
    out = Value(buffer, shape, packed_strides(shape))
    cast = "" if port.dtype == "float32" else "(int)"
    writer.loop(shape, lambda i: f"{out.at(i)} = {cast}{value.at(i)}")


def identifier(name: str) -> str:
    """A name that C accepts and that no other name in policy.c has."""
    clean = re.sub(r"\W", "_", name, flags=re.ASCII)
    is_taken = clean in RESERVED or re.fullmatch(r"[wi]\d+", clean) is not None
    return f"x{clean}" if is_taken or not clean[:1].isalpha() else clean


def render(module: StepModule, writer: Writer, comment: str) -> CFiles:
    """The text of both files."""
    memories = [(identifier(memory.name), math.prod(memory.shape)) for memory in module.memories]
    results = module.results[: len(module.results) - len(module.memories)]
    kinds = {"float32": "float", "uint8": "unsigned char", "int64": "int"}
    inputs = [f"const {kinds[port.dtype]} *{identifier(port.name)}" for port in module.observations]
    outputs = [f"{kinds[port.dtype]} *{identifier(port.name)}" for port in results]
    prototype = f"void policy_step(policy_state *state, {', '.join([*inputs, *outputs])})"
    sizes = "".join(
        f"#define POLICY_{identifier(port.name).upper()} {math.prod(port.shape)}\n"
        for port in [*module.observations, *results]
    )
    fields = "".join(f"    float {name}[{size}];\n" for name, size in memories)
    header = f"""/* {comment} */
#ifndef CANTER_POLICY_H
#define CANTER_POLICY_H

/* number of values in each array */
{sizes}
/* memories of one robot, zero when an episode begins, and scratch memory; nothing is allocated */
typedef struct {{
{fields}    float scratch[{max(1, writer.scratch)}];
}} policy_state;

#ifdef __cplusplus
extern "C" {{
#endif

/* clear the memories: call it before the first step of every episode */
void policy_reset(policy_state *state);

/* one control step: raw observations in, actions out */
{prototype};

#ifdef __cplusplus
}}
#endif
#endif
"""
    tables = "".join(c_table(name, table) for name, table in writer.weights.items())
    helpers = "".join(text + "\n" for name, text in HELPERS.items() if name in writer.helpers)
    body = "\n".join(writer.lines)
    uses = "    float *scratch = state->scratch;\n" if "scratch" in body else ""
    clears = "".join(f"    memset(state->{name}, 0, sizeof state->{name});\n" for name, _ in memories)
    source = f"""/* {comment} */
#include "policy.h"

#include <math.h>
#include <string.h>

{tables}
{helpers}void policy_reset(policy_state *state)
{{
{clears or "    (void)state;" + chr(10)}}}

{prototype}
{{
{uses or "    (void)state;" + chr(10)}{body}
}}
"""
    return CFiles(header, source)


def c_table(name: str, table: np.ndarray) -> str:
    """One array of weights."""
    texts = [literal(number) for number in table]
    rows = [", ".join(texts[i : i + 8]) for i in range(0, len(texts), 8)]
    return f"static const float {name}[{len(texts)}] = {{\n    " + ",\n    ".join(rows) + "};\n"
