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
}

_NOT_YET = {
    "float8_dynamic": "torchao has a kernel for CUDA only, and it has not been run here: take"
    " float8_weight_only or int8_dynamic",
    "nf4": "its blocks do not end with a row: take int4_weight_only",
}
"""Schemes of torchao that are not evaluated -> why, and what to take."""

_TORCHTUNE = {
    "Int8DynActInt4WeightQuantizer": ("int8_dynamic_int4", 256),
    "Int4WeightOnlyQuantizer": ("int4_weight_only", 128),
}
"""Quantizers of torchtune -> our scheme, and their default ``groupsize``."""


@dataclass(frozen=True)
class Quantizer:
    """A checked ``quantizer`` section.

    Attributes:
        scheme: a key of :data:`SCHEMES`.
        group_size: input features that share a scale, None for all of an output feature.
        notes: what was decided for the user, one sentence each.
    """

    scheme: str
    group_size: int | None
    notes: tuple[str, ...] = ()

    @property
    def activations(self) -> str | None:
        """How activations are quantised."""
        return SCHEMES[self.scheme].activations


def read_quantizer(section: Mapping[str, Any]) -> Quantizer | None:
    """The quantizer that a section names; None for an empty one.

    Args:
        section: ``{scheme, group_size}``, or torchtune's ``{_component_, groupsize}``.

    Raises:
        UserError: an unknown scheme, key or component, or a group size that the scheme has not.
    """
    if not section:
        return None
    section, notes = dict(section), ()
    if "_component_" in section:
        section, notes = _of_torchtune(section)
    name, size = section.pop("scheme", None), section.pop("group_size", None)
    if section:
        key = next(iter(section))
        raise UserError(f"unknown config key quantizer.{key}: it has scheme and group_size")
    if name in _NOT_YET:
        raise UserError(f"quantizer.scheme is {name}, which is not evaluated yet: {_NOT_YET[name]}")
    if name not in SCHEMES:
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
    return Quantizer(name, default if size is None else size, notes)


def _of_torchtune(section: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    component = str(section.pop("_component_"))
    package, _, name = component.rpartition(".")
    if not package.startswith("torchtune.training") or name not in _TORCHTUNE:
        raise UserError(
            f"quantizer._component_ is {component}, but a quantizer is one of torchtune's"
            f" {' and '.join(_TORCHTUNE)}, or quantizer.scheme of {', '.join(SCHEMES)}"
        )
    scheme, size = _TORCHTUNE[name]
    size = section.pop("groupsize", size)
    note = f"quantizer is {component}: {scheme} with groups of {size}, by torchao's kernels here"
    return {"scheme": scheme, "group_size": size, **section}, (note,)
