"""The ``quantizer`` section of a config: which scheme, with which groups. Imports nothing heavy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ppl_eval.errors import UserError
from ppl_eval.hints import did_you_mean


@dataclass(frozen=True)
class Scheme:
    """How weights and activations are quantised.

    Attributes:
        weight: what the weight is stored in.
        group_size: default number of input features that share a scale; None: a scale for each
            output feature.
        activations: how activations are quantised in each forward; None: not at all.
    """

    weight: str
    group_size: int | None = None
    activations: str | None = None


SCHEMES = {
    "int8_weight_only": Scheme("int8"),
    "int8_dynamic": Scheme("int8", activations="int8"),
    "int8_dynamic_int4": Scheme("int4", 32, activations="int8"),
    "int4_weight_only": Scheme("int4", 128),
    "float8_weight_only": Scheme("float8"),
    "float8_dynamic": Scheme("float8", activations="float8"),
    "nf4": Scheme("nf4", 64),
}

_TORCHTUNE = {
    "Int8DynActInt4WeightQuantizer": ("int8_dynamic_int4", 256),
    "Int8DynActInt4WeightQATQuantizer": ("int8_dynamic_int4", 256),
    "Int8DynActInt4WeightQATQuantizerModuleSwap": ("int8_dynamic_int4", 256),
    "Int4WeightOnlyQuantizer": ("int4_weight_only", 128),
}
"""Quantizers of torchtune -> our scheme, and their default ``groupsize``."""

_NOT_QAT = ("Int4WeightOnlyQATQuantizer", "Int4WeightOnlyQATQuantizerModuleSwap")
"""Quantizers of torchtune whose fake quantisation no scheme computes."""


@dataclass(frozen=True)
class Quantizer:
    """A checked ``quantizer`` section.

    Attributes:
        scheme: a key of :data:`SCHEMES`.
        group_size: input features that share a scale, None for all of an output feature.
        head: whether an untied head is quantised, too.
        fp32_scales: whether scales are fp32 in a bf16 model, too.
        tiled: whether int4 is packed for torchao's kernel on CUDA, with zero points.
        notes: what was decided for the user, one sentence each.
    """

    scheme: str
    group_size: int | None
    head: bool = False
    fp32_scales: bool = False
    tiled: bool = False
    notes: tuple[str, ...] = ()


def read_quantizer(section: Mapping[str, Any]) -> Quantizer | None:
    """The quantizer that a section names; None for an empty one.

    Args:
        section: ``{scheme, group_size}``, or torchtune's ``{_component_, groupsize}``.

    Raises:
        UserError: an unknown scheme, key or component, or a group size that the scheme has not.
    """
    if not section:
        return None
    section, of_torchtune = dict(section), None
    if "_component_" in section:
        section, of_torchtune = _of_torchtune(section)
    name, size = section.pop("scheme", None), section.pop("group_size", None)
    if section:
        key = next(iter(section))
        raise UserError(f"unknown config key quantizer.{key}: it has scheme and group_size")
    if not isinstance(name, str) or name not in SCHEMES:
        hint = did_you_mean(str(name), SCHEMES)
        raise UserError(
            f"quantizer.scheme is {name!r}, but it is one of {', '.join(SCHEMES)}{hint}"
        )
    default = SCHEMES[name].group_size
    if size is not None and default is None:
        raise UserError(
            f"quantizer.group_size is {size!r}, but {name} has one scale for each output feature:"
            " leave it out"
        )
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 2):
        raise UserError(f"quantizer.group_size is {size!r}, but it is a number of at least 2")
    size = default if size is None else size
    if of_torchtune is None:
        return Quantizer(name, size)
    note = (
        f"quantizer is torchtune's {of_torchtune}: {name} with groups of {size}; an untied head is"
        " quantised, too, as torchtune does it"
    )
    if name == "int4_weight_only":
        note += ", but on a CPU the integers are symmetric around 0"
    return Quantizer(name, size, head=True, fp32_scales="QAT" in of_torchtune, notes=(note,))


def _of_torchtune(section: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """torchtune's section as (one of ours, the name of its class)."""
    component = str(section.pop("_component_"))
    package, _, name = component.rpartition(".")
    is_known = package.startswith(("torchtune.training", "torchao.quantization.qat"))
    if is_known and name in _NOT_QAT:
        raise UserError(
            f"quantizer._component_ is {component}, whose zero points are floating-point numbers of"
            " a CUDA kernel, which no scheme has: evaluate without quantizer, or as"
            " quantizer.scheme=int4_weight_only, which rounds differently"
        )
    if not is_known or name not in _TORCHTUNE:
        raise UserError(
            f"quantizer._component_ is {component}, but a quantizer is one of torchtune's"
            f" {', '.join(_TORCHTUNE)}, or quantizer.scheme of {', '.join(SCHEMES)}"
        )
    both = next((key for key in ("scheme", "group_size") if key in section), None)
    if both is not None:
        raise UserError(f"quantizer has _component_ and {both}: torchtune's have groupsize alone")
    scheme, size = _TORCHTUNE[name]
    if name == "Int4WeightOnlyQuantizer":
        section.pop("inner_k_tiles", None)  # the layout of a kernel
    return {"scheme": scheme, "group_size": section.pop("groupsize", size), **section}, name
