"""A model whose checkpoint is known to fit it, before any weight is read."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ppl_eval import fingerprint as fingerprints
from ppl_eval.adapter.check import install, read_adapter, strip
from ppl_eval.adapter.merge import Adapter
from ppl_eval.checkpoint.checkpoint import Checkpoint
from ppl_eval.checkpoint.weight_files import find_adapter
from ppl_eval.errors import UserError
from ppl_eval.model.build import build_on_meta
from ppl_eval.model.check_config import check_against_config
from ppl_eval.model.check_names import check_names
from ppl_eval.model.from_folder import check_expressible
from ppl_eval.model.load import Target, load
from ppl_eval.model.torchtune_decoder import TorchtuneDecoder
from ppl_eval.parallel.dims import Meshes
from ppl_eval.parallel.process_group import world
from ppl_eval.parallel.shard import shard_decoder
from ppl_eval.parallel.tensor import check_heads, split_decoder
from ppl_eval.plural import counted
from ppl_eval.quantize.layers import Quantized, quantize_layers, report, take_quantized
from ppl_eval.quantize.schemes import Quantizer


@dataclass(frozen=True)
class PreparedModel:
    """A model on the meta device and what its weights are read from; the same on every rank.

    Attributes:
        section: the model section.
        checkpoint: the weights; names and shapes fit the model.
        decoder: the model, on the meta device until :meth:`load`.
        checkpoint_dtype: the dtype of most of the checkpoint's numbers, such as ``bfloat16``.
        adapter: an adapter to add to the weights, if there is one.
        quantized: how linear layers are quantised, if they are.
        warnings: to print before the run, one sentence each.
        notes: what was decided for the user, one sentence each.
    """

    section: Mapping[str, Any]
    checkpoint: Checkpoint
    decoder: TorchtuneDecoder
    checkpoint_dtype: str
    adapter: Adapter | None = None
    quantized: Quantized | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def component(self) -> str:
        """Import path of the builder."""
        return self.section["_component_"]

    def fingerprint(self) -> str:
        """Hash of the model's component, its weights, how they are read, and its adapter."""
        parts: list[Any] = [self.checkpoint.fingerprint(self.section)]
        if self.adapter is not None:
            parts.append(fingerprints.of_files(list(self.adapter.files)))
        if self.quantized is not None and self.quantized.quantizer is not None:
            parts.append(asdict(self.quantized.quantizer))
        return fingerprints.of(*parts) if len(parts) > 1 else parts[0]

    def reads_the_files_of(self, other: "PreparedModel") -> bool:
        """Whether both have the same weights, read in the same way."""
        mine, others = self.checkpoint, other.checkpoint
        return bool(mine.files) and mine.files == others.files and mine.names == others.names

    def quantization(self) -> dict[str, Any] | None:
        """The ``quantization`` of results.json, after loading; every rank calls it."""
        if self.quantized is None:
            return None
        return report(self.quantized, self.decoder.model, world())

    def shard(self, meshes: Meshes | None, *, reshard_after_forward: bool = True) -> None:
        """Split and shard the model over ``meshes``, before its weights are read."""
        if meshes is not None:
            split_decoder(self.decoder, meshes.tp)
            shard_decoder(self.decoder, meshes.fsdp, reshard_after_forward=reshard_after_forward)

    def load(self, device: torch.device, *, show_progress: bool = False) -> None:
        """Read this rank's weights onto ``device``: see :func:`load_models`."""
        load_models([self], device, show_progress=show_progress)


def load_models(
    models: Sequence[PreparedModel], device: torch.device, *, show_progress: bool = False
) -> None:
    """Read this rank's weights of models that have the same checkpoint, its files once.

    No communication. Afterwards the models can evaluate.

    Args:
        models: of one checkpoint: see :meth:`PreparedModel.reads_the_files_of`.
        device: the device of this rank.
        show_progress: show a bar, if stderr is a terminal.
    """
    targets = [Target(model.decoder, model.adapter) for model in models]
    load(models[0].checkpoint, targets, device, show_progress=show_progress)
    for model in models:
        if model.adapter is not None:
            model.adapter.forget()


def prepare_model(
    section: Mapping[str, Any],
    checkpointer: Mapping[str, Any],
    dtype: torch.dtype,
    *,
    tp: int = 1,
    cp: int = 1,
    parallel_key: str = "parallel",
    adapter_dir: str | None = None,
    merge: bool = True,
    quantizer: Quantizer | None = None,
    device_type: str = "cpu",
) -> PreparedModel:
    """Build a model on the meta device and check everything about it that needs no weights.

    Args:
        section: the model section.
        checkpointer: the checkpointer section.
        dtype: the dtype of the parameters.
        tp: ranks that will share a matrix.
        cp: ranks that will share a window.
        parallel_key: the config section that has tp and cp, for messages.
        adapter_dir: folder of a LoRA or DoRA adapter, or None.
        merge: merge it into the weights as they are read; False keeps its matrices apart.
        quantizer: how to quantise the linear layers as they are read, or None.
        device_type: where it is to compute, ``cpu`` or ``cuda``.

    Raises:
        UserError: anything wrong with section, checkpoint, adapter or quantizer.
    """
    checkpoint = Checkpoint.open(checkpointer)
    if section["_component_"].startswith("torchtune."):
        check_expressible(checkpoint.config, Path(checkpoint.folder or "") / "config.json")
    model = build_on_meta(section, dtype, checkpoint.config)
    slots = strip(model)
    check_against_config(model, checkpoint)
    stored = checkpoint.quantized()
    _refuse_both(checkpoint, stored, adapter_dir, quantizer)
    adapter = None
    if adapter_dir is not None:
        adapter = read_adapter(adapter_dir, checkpoint, model, slots)
        if not merge:
            install(model, adapter)
    decoder = TorchtuneDecoder(model)
    quantized = None
    if quantizer is not None:
        quantized = quantize_layers(decoder, quantizer, device_type)
    elif stored:
        quantized = take_quantized(decoder, stored, device_type)
    check_heads(decoder, tp, section["_component_"], f"{parallel_key}.tp")
    if cp > 1:
        decoder.check_attention(f"{parallel_key}.cp is {cp}", f"{parallel_key}.cp=1")
    checkpoint_dtype = check_names(decoder, checkpoint, adapter)
    folder, notes = checkpoint.folder, checkpoint.config.notes
    warnings = () if adapter is None else adapter.warnings
    has_adapter_file = folder is not None and find_adapter(Path(folder)) is not None
    if adapter is not None and has_adapter_file:
        warnings += (
            f"adapter.dir is given, and {folder} has an adapter beside its weights: torchtune's"
            " recipes write weights with the adapter in them, and then it counts twice; for those"
            " leave out adapter.dir",
        )
    elif has_adapter_file:
        notes += (
            f"{folder} has model weights and an adapter: the weights are taken as merged, as"
            " torchtune's recipes write them, and the adapter is left alone",
        )
    elif adapter is None and slots:
        notes += (
            f"model is {section['_component_']} and no adapter is given: its base is evaluated;"
            " set adapter.dir=DIR for an adapter",
        )
    if quantizer is not None:
        notes += quantizer.notes
    return PreparedModel(
        section, checkpoint, decoder, checkpoint_dtype, adapter, quantized, warnings, notes
    )


def _refuse_both(
    checkpoint: Checkpoint,
    stored: Mapping[str, torch.Tensor],
    adapter_dir: str | None,
    quantizer: Quantizer | None,
) -> None:
    """Refuse what needs full-precision weights, if the checkpoint has quantised ones."""
    if not stored:
        return
    what = f"{checkpoint.folder or 'the checkpoint'} has {counted(len(stored), 'weight')}"
    if quantizer is not None:
        raise UserError(
            f"quantizer.scheme is {quantizer.scheme}, but {what} that are quantised already: leave"
            " out quantizer, or give the full-precision checkpoint"
        )
    if adapter_dir is not None:
        raise UserError(
            f"adapter.dir is {adapter_dir}, but {what} that are quantised, and an adapter is merged"
            " into full-precision ones: give that checkpoint, and quantizer.scheme to quantise it"
        )
