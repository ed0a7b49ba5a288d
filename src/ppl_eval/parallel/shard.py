"""FSDP2: each decoder layer is a unit of its own, the rest belongs to the root."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from ppl_eval.decoder import Decoder


def shard_decoder(
    decoder: Decoder, mesh: DeviceMesh, *, reshard_after_forward: bool = True
) -> None:
    """Shard a decoder in place over a one-dimensional mesh.

    Embedding, final norm and head stay in the root unit: a tied head reads the embedding's weight,
    which therefore must be unsharded when the head runs. On a mesh of one rank nothing is done.

    Args:
        decoder: on the meta device or materialised.
        mesh: the ``fsdp`` mesh.
        reshard_after_forward: free a layer's full parameters once it has run. False keeps them:
            faster, and each rank holds the whole model after the first step.
    """
    if mesh.size() == 1:
        return
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward)
    # The first and the last thing of a forward pass need the root's parameters, so resharding them
    # in between would only gather them again in the next step.
    fully_shard(decoder.model, mesh=mesh, reshard_after_forward=False)


def reshard(model: nn.Module) -> None:
    """Free what FSDP2 has gathered, so that the next forward reads the shards as they are then.

    The root stays gathered between the steps of an evaluation. Left so, a training step that
    changes the shards would not be seen.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
