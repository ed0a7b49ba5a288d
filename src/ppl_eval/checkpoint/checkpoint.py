"""The checkpoint that a ``checkpointer`` section names: its files, names and config.json."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ppl_eval import compat, components
from ppl_eval import fingerprint as fingerprints
from ppl_eval.checkpoint.config_json import NOTHING, ModelConfig, read_model_config
from ppl_eval.checkpoint.names import HUGGING_FACE, META, TORCHTUNE, Names
from ppl_eval.checkpoint.tensor_files import DistributedSource, FileSource, StateSource
from ppl_eval.checkpoint.weight_files import check_shards, find_weight_files, need_folder
from ppl_eval.errors import UserError
from ppl_eval.files import refuse_lfs_pointer
from ppl_eval.plural import some

LAYOUTS = {
    "FullModelHFCheckpointer": HUGGING_FACE,
    "FullModelMetaCheckpointer": META,
    "FullModelTorchTuneCheckpointer": TORCHTUNE,
    "DistributedCheckpointer": TORCHTUNE,
}
"""torchtune's checkpointers -> the layout by which the tensors in their files are named."""

_TRAINING_ARGUMENTS = (
    *("adapter_checkpoint", "recipe_checkpoint"),
    *("resume_from_checkpoint", "should_load_recipe_state"),
)
"""Arguments of torchtune's checkpointers that name what an evaluation does not load."""


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint that a ``checkpointer`` section names.

    torchtune's checkpointers are not called, since they read every tensor on every rank: their
    files are read here. Any other component is called, and its whole state dict is taken.

    Attributes:
        section: the ``checkpointer`` section.
        config: what config.json in the folder says.
        files: the weight files; empty for a user's component that names none.
        kind: the name of torchtune's checkpointer; None for a user's component.
    """

    section: Mapping[str, Any]
    config: ModelConfig
    files: tuple[Path, ...] = ()
    kind: str | None = None

    @classmethod
    def open(cls, section: Mapping[str, Any]) -> "Checkpoint":
        """Check a section, find its files, and read config.json; no weight is read.

        Raises:
            UserError: folder or files are missing, config.json cannot be read, torchtune does not
                know the model type, or an argument is for training only.
        """
        kind = _kind(section)
        _check_arguments(section, kind)
        checkpoint = cls(section, config_of(section), _files(section, kind), kind)
        if checkpoint._layout == HUGGING_FACE and _config_file(section) is None:
            raise UserError(
                f"there is no {checkpoint.folder}/config.json, which a Hugging Face checkpoint"
                " needs"
            )
        return checkpoint

    @property
    def folder(self) -> str | None:
        """``checkpoint_dir`` as the section gives it."""
        return self.section.get("checkpoint_dir")

    @property
    def model_type(self) -> str | None:
        """torchtune's name of the family, which selects the conversion of the names."""
        return self.section.get("model_type")

    @property
    def _layout(self) -> str | None:
        return LAYOUTS.get(self.kind or "")

    @cached_property
    def names(self) -> Names:
        """The conversion of the tensors' names to torchtune's.

        Raises:
            UserError: the family is not evaluated.
        """
        return Names(self._layout or TORCHTUNE, self.model_type, self.config.values)

    @cached_property
    def source(self) -> FileSource | StateSource | DistributedSource:
        """The checkpoint's tensors: their names and shapes are read here, their values later.

        Raises:
            UserError: a file cannot be read, or a user's component gives no state dict.
        """
        if self.kind == "DistributedCheckpointer":
            return DistributedSource(self.files[0].parent)
        if self._layout is not None:
            return FileSource(self.files)
        return StateSource(self._loaded_state())

    def quantized(self) -> dict[str, torch.Tensor]:
        """torchtune's name of each weight that torchao has quantised -> the tensor on the meta
        device.

        Raises:
            UserError: config.json says that there are some, and there are none.
        """
        found: dict[str, torch.Tensor] = {}
        for name, stored in self.source.stored.items():
            if stored.quantized is not None:
                found |= self.names.convert(name, stored.quantized) or {}
        if self.config.is_quantized and not found:
            raise UserError(
                f"{self.folder}/config.json has quantization_config of torchao, but the files name"
                " no weight as quantised: if the weights are dequantised, remove it; else the"
                " metadata of the safetensors is lost"
            )
        return found

    def _loaded_state(self) -> dict[str, Any]:
        """The state dict of a user's checkpointer. What that raises is shown with its traceback."""
        more: dict[str, Any] = {}
        if self.files and not self.section["checkpoint_files"]:
            more["checkpoint_files"] = [path.name for path in self.files]
        # checkpointers like torchtune's make their output_dir at once; nothing is written to it
        with tempfile.TemporaryDirectory() as nowhere:
            if "output_dir" in self.section:
                more["output_dir"] = nowhere
            checkpointer = components.build(self.section, "checkpointer", **more)
            components.need(checkpointer, "checkpointer", "load_checkpoint")
            loaded = checkpointer.load_checkpoint()
        if not isinstance(loaded, Mapping) or not isinstance(loaded.get("model"), Mapping):
            raise UserError(
                f"checkpointer ({self.section['_component_']}).load_checkpoint() gives no state"
                ' dict under the key "model": return {"model": tensors by torchtune\'s names}'
            )
        return dict(loaded["model"])

    def fingerprint(self, model_section: Mapping[str, Any]) -> str:
        """Hash of the model's component, of the weights, and of how they are read.

        Args:
            model_section: the ``model`` section. The folder's path does not count.
        """
        paths = [path for path in (*self.files, _config_file(self.section)) if path is not None]
        left_out = ("checkpoint_dir", "checkpoint_files", "output_dir") if paths else ()
        reading = {key: value for key, value in self.section.items() if key not in left_out}
        return fingerprints.of(model_section, reading, fingerprints.of_files(paths))


def config_of(section: Mapping[str, Any]) -> ModelConfig:
    """What config.json in the folder of a ``checkpointer`` section says, if there is one."""
    path = _config_file(section)
    return read_model_config(path) if path is not None else NOTHING


def _config_file(section: Mapping[str, Any]) -> Path | None:
    path = Path(section.get("checkpoint_dir") or "", "config.json")
    return path if path.is_file() else None


def _kind(section: Mapping[str, Any]) -> str | None:
    """Name of torchtune's checkpointer, None for a user's component."""
    package, _, name = str(section["_component_"]).rpartition(".")
    return name if package.split(".")[0] == "torchtune" and name in LAYOUTS else None


def _check_arguments(section: Mapping[str, Any], kind: str | None) -> None:
    for name in _TRAINING_ARGUMENTS:
        if section.get(name):
            raise UserError(
                f"checkpointer.{name} is {section[name]!r}, but a checkpointer reads full weights"
                " here: remove it, point checkpoint_dir at them, and adapter.dir at an adapter"
            )
    has_folder = "checkpoint_dir" in section or kind is not None
    if has_folder and not isinstance(section.get("checkpoint_dir"), str):
        raise UserError(
            f"checkpointer.checkpoint_dir is {section.get('checkpoint_dir')!r}, but it is the"
            " folder with the weights: set checkpointer.checkpoint_dir=DIR"
        )
    model_types = compat.model_types()
    if section.get("model_type", model_types[0]) not in model_types:
        raise UserError(
            f"checkpointer.model_type is {section['model_type']!r}, but it is one of"
            f" {', '.join(model_types)}"
        )
    if not isinstance(section.get("output_dir", ""), str | None):
        raise UserError(f"checkpointer.output_dir is {section['output_dir']!r}, but it is a folder")


def _files(section: Mapping[str, Any], kind: str | None) -> tuple[Path, ...]:
    """The weight files; each is known to exist."""
    if kind == "DistributedCheckpointer":
        return tuple(sorted(_newest_epoch(Path(section["checkpoint_dir"])).iterdir()))
    if kind is None and not {"checkpoint_dir", "checkpoint_files"} <= set(section):
        return ()
    folder = Path(section["checkpoint_dir"])
    need_folder(folder, "checkpointer.checkpoint_dir")
    files = section.get("checkpoint_files") or find_weight_files(folder)
    is_list = isinstance(files, list) and all(isinstance(name, str) for name in files)
    if not is_list and not isinstance(files, dict):
        raise UserError(f"checkpointer.checkpoint_files is {files!r}, but it is a list of names")
    paths = [folder / name for name in compat.file_names(files)]
    absent = [path.name for path in paths if not path.is_file()]
    if absent:
        raise UserError(f"{folder} lacks weight files that are asked for: {some(absent)}")
    check_shards([path.name for path in paths])
    for path in paths:
        refuse_lfs_pointer(path)
    return tuple(paths)


def _newest_epoch(folder: Path) -> Path:
    """The folder itself, or its ``dist_epoch_N`` with the largest N that is complete."""
    if (folder / ".metadata").is_file():
        return folder
    epochs = [path.parent for path in folder.glob("dist_epoch_*/.metadata")]
    if not epochs:
        raise UserError(
            f"{folder} holds no distributed checkpoint: no .metadata, and no dist_epoch_N with one"
        )
    return max(epochs, key=lambda path: int(path.name.rsplit("_", 1)[-1]))
