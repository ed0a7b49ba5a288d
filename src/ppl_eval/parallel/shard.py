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
    which must be gathered when the head runs. On a mesh of one rank nothing is done.

    Args:
        decoder: on the meta device or materialised.
        mesh: the ``fsdp`` mesh.
        reshard_after_forward: free a layer's gathered parameters after its forward. False keeps
            them: faster, but each rank holds the whole model after the first step.
    """
    if mesh.size() == 1:
        return
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward)
    # A forward pass starts and ends with the root's parameters: resharded, they would have to be
    # gathered again in the next step.
    fully_shard(decoder.model, mesh=mesh, reshard_after_forward=False)


def reshard(model: nn.Module) -> None:
    """Free the parameters that FSDP2 has gathered, so that the next forward gathers them anew.

    The root stays gathered between the steps of an evaluation. If it stayed so afterwards, the next
    evaluation would not see what a training step has changed in the shards.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
