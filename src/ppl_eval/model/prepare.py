"""A model whose checkpoint is known to fit it, before any weight is read."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torchtune.modules import TransformerDecoder

from ppl_eval import fingerprint as fingerprints
from ppl_eval.adapter.check import install, read_adapter, strip
from ppl_eval.adapter.merge import Adapter
from ppl_eval.checkpoint.checkpoint import Checkpoint
from ppl_eval.checkpoint.weight_files import find_adapter
from ppl_eval.model.build import build_on_meta
from ppl_eval.model.check_config import check_against_config
from ppl_eval.model.check_names import check_names
from ppl_eval.model.from_folder import check_expressible
from ppl_eval.model.load import load
from ppl_eval.model.torchtune_decoder import TorchtuneDecoder
from ppl_eval.parallel.dims import Meshes
from ppl_eval.parallel.shard import shard_decoder
from ppl_eval.parallel.tensor import check_heads, split_decoder


@dataclass(frozen=True)
class PreparedModel:
    """What is known of a model before any weight is read; the same on every rank.

    Attributes:
        section: the model section.
        checkpoint: its checkpoint, whose names and shapes fit the model.
        model: the model, on the meta device.
        checkpoint_dtype: what most of the checkpoint's numbers are.
        adapter: an adapter to add to the weights, if there is one.
        warnings: what to tell the user before the run, one sentence each.
        notes: what is good to know, one sentence each.
    """

    section: Mapping[str, Any]
    checkpoint: Checkpoint
    model: TransformerDecoder
    checkpoint_dtype: str
    adapter: Adapter | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def component(self) -> str:
        """Import path of the builder."""
        return self.section["_component_"]

    def fingerprint(self) -> str:
        """Hash of what makes the model: its component, its weights, how they are read, and its
        adapter."""
        own = self.checkpoint.fingerprint(self.section)
        if self.adapter is None:
            return own
        return fingerprints.of(own, fingerprints.of_files(list(self.adapter.files)))

    def load(
        self,
        meshes: Meshes | None,
        device: torch.device,
        *,
        reshard_after_forward: bool = True,
        show_progress: bool = False,
    ) -> None:
        """Split and shard the model over ``meshes``, and read this rank's weights onto ``device``.

        Afterwards the model can evaluate. No communication.
        """
        if meshes is not None:
            decoder = TorchtuneDecoder(self.model)
            split_decoder(decoder, meshes.tp)
            shard_decoder(decoder, meshes.fsdp, reshard_after_forward=reshard_after_forward)
        load(self.model, self.checkpoint, device, adapter=self.adapter, show_progress=show_progress)
        if self.adapter is not None:
            self.adapter.forget()


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
) -> PreparedModel:
    """Build a model on the meta device and check everything about it that needs no weights.

    Args:
        section: the model section.
        checkpointer: its checkpointer section.
        dtype: the dtype of the parameters.
        tp: ranks that will share a matrix.
        cp: ranks that will share a window.
        parallel_key: the section of the config that has tp and cp, for messages.
        adapter_dir: folder of a LoRA or DoRA adapter, or None.
        merge: add it to the weights as they are read; False keeps its matrices beside them.

    Raises:
        UserError: whatever is wrong with section, checkpoint or adapter.
    """
    checkpoint = Checkpoint.open(checkpointer)
    if section["_component_"].startswith("torchtune."):
        check_expressible(checkpoint.config, Path(checkpoint.folder or "") / "config.json")
    model = build_on_meta(section, dtype, checkpoint.config)
    slots = strip(model)
    check_against_config(model, checkpoint)
    adapter = None
    if adapter_dir is not None:
        adapter = read_adapter(adapter_dir, checkpoint, model, slots)
        if not merge:
            install(model, adapter)
    decoder = TorchtuneDecoder(model)
    check_heads(decoder, tp, section["_component_"], f"{parallel_key}.tp")
    if cp > 1:
        decoder.check_attention(f"{parallel_key}.cp is {cp}", f"{parallel_key}.cp=1")
    checkpoint_dtype = check_names(model, checkpoint, adapter)
    warnings, notes = _about_adapters(checkpoint, adapter, bool(slots), section)
    notes = (*checkpoint.config.notes, *notes)
    return PreparedModel(section, checkpoint, model, checkpoint_dtype, adapter, warnings, notes)


def num_ids(model: TransformerDecoder) -> int:
    """Rows of the embedding, and of the head."""
    return model.tok_embeddings.num_embeddings


def _about_adapters(
    checkpoint: Checkpoint,
    adapter: Adapter | None,
    has_slots: bool,
    section: Mapping[str, Any],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(warnings, notes): what is done with an adapter, or with one that lies about."""
    folder = checkpoint.folder
    beside = folder is not None and find_adapter(Path(folder)) is not None
    if adapter is not None:
        if not beside:
            return adapter.warnings, ()
        return (
            *adapter.warnings,
            f"adapter.dir is given, and {folder} has an adapter beside its weights: torchtune's"
            " recipes write weights with the adapter in them, and then it counts twice; for those"
            " leave out adapter.dir",
        ), ()
    if beside:
        return (), (
            f"{folder} has model weights and an adapter: the weights are taken as merged, as"
            " torchtune's recipes write them, and the adapter is left alone",
        )
    if has_slots:
        return (), (
            f"model is {section['_component_']} and no adapter is given: its base is evaluated;"
            " set adapter.dir=DIR for an adapter",
        )
    return (), ()
