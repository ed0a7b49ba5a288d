"""Which values a config may have, beyond their types."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from ppl_eval.config.limits import check_limits
from ppl_eval.config.schema import EvalConfig
from ppl_eval.data.protocol import RULES, rule_of
from ppl_eval.errors import UserError
from ppl_eval.quantize.schemes import read_quantizer

CHOICES = {
    "protocol.name": tuple(RULES),
    "dtype": ("fp32", "bf16", "fp16"),
    "teacher_dtype": ("fp32", "bf16", "fp16"),
    "logits_dtype": ("fp32", "model"),
    "process_group.backend": ("auto", "gloo", "nccl"),
    "log_level": ("DEBUG", "INFO", "WARNING", "ERROR"),
}
"""Key -> the values that it may have, apart from null."""

_LEAST = {
    "process_group.timeout_s": 1,
    "max_tokens_per_batch": 1,
    "max_documents": 1,
    "log_every_n_steps": 1,
    "log_every_s": 0,
    "seed": 0,
    "teacher_parallel.tp": 1,
    "teacher_parallel.cp": 1,
    "bootstrap.resamples": 0,
    "bootstrap.seed": 0,
    "verify.tolerance": 0,
}
"""Key -> the least value that it may have, apart from null."""

_DTYPES = {
    **{"float32": "fp32", "float": "fp32"},
    **{"bfloat16": "bf16", "float16": "fp16", "half": "fp16"},
}
"""torch's name of a dtype -> the name in a config."""


def check_values(config: EvalConfig) -> None:
    """Check every value that is not an argument of a component, without looking at files.

    torch's names of dtypes are replaced by ours, and the keys of ``fail_if`` become dotted.

    Raises:
        UserError: the first value that is not allowed.
    """
    for key in ("dtype", "teacher_dtype", "logits_dtype"):
        value = getattr(config, key)
        if value is not None:
            setattr(config, key, _DTYPES.get(value.removeprefix("torch."), value))
    values = dict(leaves(dataclasses.asdict(config)))
    for key in ("output_dir", "checkpoint_dir", "teacher_checkpoint_dir"):
        if values[key] == "":
            raise UserError(f"{key} is empty: write . for the current folder")
    rule_of(config.protocol.name)  # a protocol that was removed has a message that says so
    for key, allowed in CHOICES.items():
        if values[key] is not None and values[key] not in allowed:
            raise UserError(f"{key} is {values[key]!r}, but it is one of {', '.join(allowed)}")
    for key, least in _LEAST.items():
        if values[key] is not None and values[key] < least:
            raise UserError(f"{key} is {values[key]}, but it is at least {least}")
    if config.seed >= 2**63:
        raise UserError(f"seed is {config.seed}, but it is below 2**63")
    read_quantizer(config.quantizer)
    windows = config.verify.windows
    if windows != "all" and (isinstance(windows, str) or windows < 0):
        raise UserError(f"verify.windows is {windows!r}, but it is a number, or all")
    config.fail_if = dict(leaves(config.fail_if))
    check_limits(config.fail_if, config.protocol.name)
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{key} is {value}, but it is a finite number")


def check_teacher(config: EvalConfig) -> None:
    """Check the keys that are about a teacher, once it is known whether there is one.

    Raises:
        UserError: such a key without a teacher, or logits_dtype: model with a teacher.
    """
    if config.has_teacher:
        if config.logits_dtype != "fp32":
            raise UserError(
                f"logits_dtype is {config.logits_dtype}, but with a teacher logits are fp32: the"
                " rounding of bf16 logits is as large as what is measured; set logits_dtype=fp32"
            )
        return
    given = [key for key in config.fail_if if key.startswith(("fidelity.", "teacher."))]
    for key, value in leaves(dataclasses.asdict(config)):
        if key.startswith(("teacher_parallel.", "teacher_dtype")) and value is not None:
            given.append(key)
    if given:
        raise UserError(
            f"{given[0]} is set, but there is no teacher: set teacher_checkpoint_dir=DIR"
        )


def leaves(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything that is neither a mapping nor a list."""
    if not isinstance(node, dict | list):
        yield key, node
        return
    for name, value in node.items() if isinstance(node, dict) else enumerate(node):
        yield from leaves(value, f"{key}.{name}" if key else str(name))
