"""What is particular to the pinned torchtune and torchao; no other module knows it."""

import logging
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def quiet() -> None:
    """Silence notices of torchao and torch that do not matter to an evaluation.

    A program calls it before torchtune is imported.
    """
    # on import: that torchao skips its C++ extensions with a torch that it was not built for
    logging.getLogger("torchao").setLevel(logging.ERROR)
    # torchtune's RMSNorm gives a float input and a bf16 scale to torch, which says that it then
    # takes the unfused kernel
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    # torchao 0.15's second version of int8 is wrong in bf16, so the first is used
    warnings.filterwarnings("ignore", message="Config Deprecation: version 1")


def model_types() -> list[str]:
    """Values of ``checkpointer.model_type``."""
    from torchtune.training.checkpointing import ModelType

    return [member.name for member in ModelType]


def file_names(checkpoint_files: list[str] | dict[str, str]) -> list[str]:
    """Names behind ``checkpoint_files``, which torchtune also takes as a pattern and a number."""
    from torchtune.training.checkpointing._utils import FormattedCheckpointFiles

    if isinstance(checkpoint_files, dict):
        return FormattedCheckpointFiles.from_dict(checkpoint_files).build_checkpoint_filenames()
    return list(checkpoint_files)


def rebuild_rope(model: "nn.Module") -> None:
    """Fill the rotary tables: buffers that no checkpoint holds and that meta leaves unset.

    Call it with the real device as torch's default device.
    """
    for module in model.modules():
        rope_init = getattr(module, "rope_init", None)
        if callable(rope_init):
            rope_init()
