"""A model whose checkpoint is known to fit it, before any weight is read."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torchtune.modules import TransformerDecoder

from ppl_eval import fingerprint as fingerprints
from ppl_eval.adapter.check import Adapter, install, read_adapter, strip
from ppl_eval.checkpoint import section as checkpoints
from ppl_eval.checkpoint.config_json import ModelConfig
from ppl_eval.checkpoint.names import Convert
from ppl_eval.checkpoint.tensor_files import Source
from ppl_eval.checkpoint.weight_files import has_adapter
from ppl_eval.model.build import build_on_meta
from ppl_eval.model.check_config import check_against_config, config_of
from ppl_eval.model.from_folder import check_expressible
from ppl_eval.model.load import check_names, load
from ppl_eval.model.torchtune_decoder import TorchtuneDecoder
from ppl_eval.parallel.dims import Meshes
from ppl_eval.parallel.shard import shard_decoder
from ppl_eval.parallel.tensor import check_heads, split_decoder


@dataclass(frozen=True)
class Layout:
    """How a model is about to be split, for checks.

    Attributes:
        tp: ranks that share a matrix.
        cp: ranks that share a window.
        key: of the config that says so.
    """

    tp: int = 1
    cp: int = 1
    key: str = "parallel"


@dataclass(frozen=True)
class PreparedModel:
    """What is ready before any weight is read; the same on every rank.

    Attributes:
        section: the model section.
        checkpointer: the section, its weight files found.
        config: config.json of the folder.
        model: on the meta device.
        source: the checkpoint's tensors, names and shapes checked against the model.
        convert: from their names to torchtune's.
        checkpoint_dtype: what most of the checkpoint's numbers are.
        adapter: added to the weights, if there is one.
        warnings: what a user should hear before the run, one sentence each.
        notes: what is good to know, one sentence each.
    """

    section: Mapping[str, Any]
    checkpointer: Mapping[str, Any]
    config: ModelConfig
    model: TransformerDecoder
    source: Source
    convert: Convert
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
        own = checkpoints.fingerprint(self.checkpointer, self.section)
        if self.adapter is None:
            return own
        return fingerprints.of(own, fingerprints.of_files(list(self.adapter.files)))

    def place(
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
        load(
            self.model,
            self.source,
            self.convert,
            device,
            adapter=self.adapter,
            show_progress=show_progress,
        )
        if self.adapter is not None:
            self.adapter.forget()


def prepare_model(
    section: Mapping[str, Any],
    checkpointer: Mapping[str, Any],
    dtype: torch.dtype,
    layout: Layout,
    *,
    adapter_dir: str | None = None,
    merge: bool = True,
) -> PreparedModel:
    """Build a model on the meta device and check everything about it that needs no weights.

    Args:
        section: the model section.
        checkpointer: its checkpointer section.
        dtype: of the parameters.
        layout: how it is about to be split.
        adapter_dir: folder of a LoRA or DoRA adapter, or None.
        merge: add it to the weights as they are read; False keeps its matrices beside them.

    Raises:
        UserError: whatever is wrong with section, checkpoint or adapter.
    """
    node = checkpoints.complete_checkpointer(checkpointer)
    config = config_of(node)
    if section["_component_"].startswith("torchtune."):
        check_expressible(config, Path(node.get("checkpoint_dir") or "") / "config.json")
    model = build_on_meta(section, dtype, config)
    slots = strip(model)
    check_against_config(model, node, config)
    adapter = None
    if adapter_dir is not None:
        adapter = read_adapter(adapter_dir, node, config.values, model, slots)
        if not merge:
            install(model, adapter)
    check_heads(TorchtuneDecoder(model), layout.tp, section["_component_"], f"{layout.key}.tp")
    _check_layout(model, layout)
    source, convert, names_layout = checkpoints.open_checkpoint(node, config)
    checkpoint_dtype = check_names(model, source, convert, names_layout, adapter)
    warnings, notes = _about_adapters(node, adapter, bool(slots), section)
    notes = (*config.notes, *notes)
    return PreparedModel(
        section,
        node,
        config,
        model,
        source,
        convert,
        checkpoint_dtype,
        adapter,
        warnings,
        notes,
    )


def num_ids(model: TransformerDecoder) -> int:
    """Rows of the embedding, and of the head."""
    return model.tok_embeddings.num_embeddings


def _check_layout(model: TransformerDecoder, layout: Layout) -> None:
    """Refuse attention that cannot be split."""
    if layout.cp > 1:
        TorchtuneDecoder(model).check_attention(
            f"{layout.key}.cp is {layout.cp}", f"{layout.key}.cp=1"
        )


def _about_adapters(
    checkpointer: Mapping[str, Any],
    adapter: Adapter | None,
    has_slots: bool,
    section: Mapping[str, Any],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(warnings, notes): what is done with an adapter, or with one that lies about."""
    folder = checkpointer.get("checkpoint_dir")
    beside = folder is not None and has_adapter(Path(folder))
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
