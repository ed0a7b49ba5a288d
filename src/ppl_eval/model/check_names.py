"""Do a checkpoint's tensors fit the model? Names, shapes and dtypes, before any weight is read."""

from collections import Counter
from collections.abc import Iterable

import torch

from ppl_eval.adapter.merge import Adapter
from ppl_eval.checkpoint.checkpoint import LAYOUTS, Checkpoint
from ppl_eval.checkpoint.names import HUGGING_FACE, META, TORCHTUNE
from ppl_eval.checkpoint.tensor_files import DistributedSource
from ppl_eval.decoder import Decoder
from ppl_eval.errors import UserError
from ppl_eval.plural import some

HEAD, EMBEDDING = "output.weight", "tok_embeddings.weight"

_QUANTISED_BY = {
    "qweight": "GPTQ or AWQ",
    "weight_scale_inv": "FP8",
    "_blocks": "MXFP4",
    "absmax": "bitsandbytes",
    "SCB": "bitsandbytes",
}
"""End of a tensor's name -> the method of quantisation that adds such tensors."""

_MARKS = {".self_attn.": HUGGING_FACE, ".attention.w": META, ".attn.": TORCHTUNE}
"""Part of a tensor's name -> the layout whose names have it."""


def check_names(decoder: Decoder, checkpoint: Checkpoint, adapter: Adapter | None = None) -> str:
    """Compare names, shapes and dtypes of checkpoint and model.

    Args:
        decoder: on the meta device, sharded or not.
        checkpoint: the model's checkpoint.
        adapter: the model's adapter. Unmerged, its parameters are not in the checkpoint.

    Returns:
        The dtype that most of the checkpoint's numbers have, such as ``bfloat16``.

    Raises:
        UserError: missing or unknown names, other shapes, weights that are not floating-point
            numbers, or a DoRA adapter on a distributed checkpoint.
    """
    names, stored = checkpoint.names, checkpoint.source.stored
    if adapter is not None and isinstance(checkpoint.source, DistributedSource):
        adapter.refuse_dora()
    sizes: Counter[str] = Counter()
    shapes: dict[str, torch.Size] = {}
    unknown = []
    for name, tensor in stored.items():
        if isinstance(tensor.dtype, str):
            raise UserError(
                f"{name} is {tensor.dtype} in the checkpoint: weights that are quantised"
                f"{_quantised_by(stored)} are not evaluated"
            )
        sizes[str(tensor.dtype).removeprefix("torch.")] += tensor.num_bytes
        plain = torch.empty(tensor.shape, device="meta")
        converted = names.convert(name, plain if tensor.quantized is None else tensor.quantized)
        if converted is None:
            unknown.append(name)
        else:
            shapes |= {new: value.shape for new, value in converted.items()}
    slots = decoder.weights()
    for name in adapter.unmerged() if adapter is not None else ():
        slots.pop(name, None)
    if HEAD not in slots and EMBEDDING in slots and shapes.get(HEAD) == shapes.get(EMBEDDING):
        shapes.pop(HEAD, None)  # a second copy of the tied weight; its values are compared later
    differing = [
        f"{name} is {tuple(shapes[name])} in the checkpoint and {tuple(slot.shape)} in the model"
        for name, slot in slots.items()
        if name in shapes and shapes[name] != slot.shape
    ]
    found = (
        ("missing from the checkpoint", [name for name in slots if name not in shapes]),
        ("unknown to the model", unknown + [name for name in shapes if name not in slots]),
        ("of another shape", differing),
    )
    problems = [f"{len(names)} {what}: {some(names, 5, '; ')}" for what, names in found if names]
    if problems:
        advice = _advice(stored, names.layout)
        raise UserError(f"checkpoint and model do not match: {' | '.join(problems)}: {advice}")
    return sizes.most_common(1)[0][0]


def _quantised_by(names: Iterable[str]) -> str:
    found = (how for name in names for end, how in _QUANTISED_BY.items() if name.endswith(end))
    return "".join(f" by {method}" for method in sorted(found)[:1])


def _advice(names: Iterable[str], layout: str) -> str:
    found = next((of for mark, of in _MARKS.items() if any(mark in n for n in names)), layout)
    if found == layout:
        return "check the model section against the checkpoint's config.json"
    checkpointer = next(name for name, of in LAYOUTS.items() if of == found)
    return f"the names are {found}'s: use torchtune.training.{checkpointer}"
