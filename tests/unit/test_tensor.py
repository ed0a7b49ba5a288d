"""What tensor parallelism refuses, and what it splits; the numbers are in tests/distributed."""

import pytest
import torch
from torch import nn
from torchtune.models.llama3_2 import llama3_2, lora_llama3_2
from torchtune.modules import MultiHeadAttention

from ppl_eval import UserError
from ppl_eval.model.attention import Attention
from ppl_eval.model.torchtune_decoder import LayerAttention, TorchtuneDecoder
from ppl_eval.parallel.tensor import check_heads

SHAPE = {
    "vocab_size": 11,
    "num_layers": 2,
    "intermediate_dim": 10,
    "max_seq_len": 16,
    "scale_factor": 1,
}


def llama(heads, kv_heads):
    with torch.device("meta"):
        return llama3_2(num_heads=heads, num_kv_heads=kv_heads, embed_dim=heads * 4, **SHAPE)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "fits"),
    [(4, 1, 2, "1"), (3, 3, 2, "1 or 3"), (12, 3, 4, "1 or 3"), (8, 4, 3, "1 or 2 or 4")],
)
def test_heads_that_tp_does_not_divide_are_refused_with_the_tp_that_fit(heads, kv_heads, tp, fits):
    with pytest.raises(UserError) as error:
        check_heads(TorchtuneDecoder(llama(heads, kv_heads)), tp, "models.some")
    assert str(error.value) == (
        f"parallel.tp is {tp}, but models.some has {heads} heads and {kv_heads} kv heads,"
        f" which tp must both divide: set parallel.tp to {fits}"
    )


@pytest.mark.parametrize(("heads", "kv_heads", "tp"), [(4, 4, 4), (8, 2, 2), (9, 3, 3), (5, 1, 1)])
def test_heads_that_divide(heads, kv_heads, tp):
    check_heads(TorchtuneDecoder(llama(heads, kv_heads)), tp)


def test_matrices_that_the_plan_does_not_know():
    model = llama(4, 2)
    model.layers[1].mlp.extra = nn.Linear(4, 4, device="meta")
    with pytest.raises(UserError, match=r"how to split layers.1.mlp.extra.weight of a Linear is"):
        check_heads(TorchtuneDecoder(model), 2)
    check_heads(TorchtuneDecoder(model), 1)
    with torch.device("meta"):
        adapted = lora_llama3_2(
            ["q_proj"],
            **SHAPE,
            num_heads=4,
            num_kv_heads=2,
            embed_dim=16,
            lora_rank=2,
            lora_alpha=4,
        )
    with pytest.raises(UserError, match=r"how to split layers.0.attn.q_proj.* of a LoRALinear is"):
        check_heads(TorchtuneDecoder(adapted), 2)


def test_a_head_that_is_more_than_a_product():
    model = llama(4, 2)
    model.output = nn.Linear(16, 11, device="meta")
    with pytest.raises(UserError, match="the head has a bias"):
        check_heads(TorchtuneDecoder(model), 2)

    class Scaled(nn.Linear):
        def forward(self, input):
            return super().forward(input) * 0.25

    model.output = Scaled(16, 11, bias=False, device="meta")
    with pytest.raises(UserError, match=r"how to split output.weight of a Scaled is not known"):
        check_heads(TorchtuneDecoder(model), 2)


def test_attention_that_masks_in_its_own_way():
    class Local(MultiHeadAttention):
        pass

    model = llama(4, 2)
    why = ("parallel.cp is 2", "parallel.cp=1")
    TorchtuneDecoder(model).check_attention(*why)
    model.layers[1].attn.__class__ = Local
    with pytest.raises(UserError, match="parallel.cp is 2, but how a Local masks is not known"):
        TorchtuneDecoder(model).check_attention(*why)
    q = torch.ones(1, 1, 3, 4)
    with pytest.raises(UserError, match="gives its attention a mask"):
        LayerAttention(Attention())(
            q, q, q, mask=torch.ones(3, 3).bool(), dropout_p=0.0, is_causal=False
        )
