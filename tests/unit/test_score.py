"""The scoring pass: hidden states, head in chunks, padding, precision."""

import pytest
import torch
import torch.nn.functional as F
from helpers import BigramTable, nll_of, sharp_llama

from ppl_eval.parallel import products
from ppl_eval.score import head


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def model(request, device):
    return sharp_llama(tied=request.param).to(device)


@pytest.fixture
def batch(model, device):
    """Text that the model itself would write, so that each target is likely where it belongs."""
    torch.manual_seed(1)
    tokens = torch.randint(101, (3, 1)).to(device)
    with torch.no_grad():
        while tokens.shape[1] < 21:
            chances = model(tokens)[:, -1].softmax(dim=-1)
            tokens = torch.cat([tokens, chances.multinomial(1)], dim=1)
    scored = (torch.rand(3, 20) < 0.6).to(device)
    return tokens[:, :-1], tokens[:, 1:], scored


def by_hand(model, inputs, targets, scored):
    with torch.no_grad():
        logits = model(inputs).double()
    nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return torch.where(scored, nll.view(targets.shape), 0)


def test_scored_positions_equal_the_full_logits(model, batch):
    with torch.no_grad():
        nll = nll_of(model, *batch)
    assert nll.dtype == torch.float32
    torch.testing.assert_close(nll.double(), by_hand(model, *batch), rtol=2e-6, atol=2e-6)
    assert (nll[~batch[2]] == 0).all()


def test_a_label_shift_would_show(model, batch):
    """The guard of this file: the models are sharp enough to tell."""
    inputs, targets, scored = batch
    right = by_hand(model, *batch).sum()
    shifted = by_hand(model, inputs, targets.roll(1, dims=1), scored).sum()
    assert shifted > 2 * right


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_chunks_of_the_head_change_nothing(model, batch, rows, monkeypatch):
    with torch.no_grad():
        whole = nll_of(model, *batch)
        monkeypatch.setattr(head, "CHUNK_ELEMENTS", rows * 101)
        chunked = nll_of(model, *batch)
    torch.testing.assert_close(chunked, whole, rtol=2e-6, atol=2e-6)


def test_full_logits_never_exist(model, batch, monkeypatch):
    from torch.utils._python_dispatch import TorchDispatchMode

    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 4 * 101)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.shape[1:] == (101,) and len(out) != 64:
                largest = max(largest, out.numel())
            return out

    with torch.no_grad(), Watch():
        nll_of(model, *batch)
    assert 0 < largest <= 4 * 101


@pytest.mark.parametrize("pad_id", [0, 5, 2])
def test_padding_is_never_read_or_scored(model, device, pad_id):
    torch.manual_seed(2)
    tokens = torch.randint(101, (1, 9)).to(device)
    every = torch.ones_like(tokens[:, 1:]).bool()
    alone = nll_of(model, tokens[:, :-1], tokens[:, 1:], every)
    inputs = torch.full((2, 30), pad_id, device=device)
    targets, scored = torch.zeros_like(inputs), torch.zeros_like(inputs).bool()
    inputs[0, :8], targets[0, :8], scored[0, :8] = tokens[0, :-1], tokens[0, 1:], True
    inputs[1] = torch.randint(101, (30,)).to(device)
    padded = nll_of(model, inputs, targets, scored)
    torch.testing.assert_close(padded[0, :8], alone[0], rtol=1e-5, atol=1e-5)
    assert padded[0, 8:].abs().sum() == 0


def test_bf16_logits_are_computed_in_fp32(batch, device):
    """The model's own bf16 product is off by hundredths of a nat, ours is not."""
    model = sharp_llama().bfloat16().to(device)
    _, targets, scored = batch
    seen = {}
    model.norm.register_forward_hook(lambda m, a, out: seen.update(hidden=out))
    with torch.no_grad():
        nll = nll_of(model, *batch)[scored]
        weight = model.output.weight.double()
        logits = seen["hidden"].double() @ weight.T
        truth = F.cross_entropy(logits, targets[scored], reduction="none")
        rounded = nll_of(model, *batch, fp32_logits=False)[scored]
    assert (nll - truth).abs().max() < 1e-5
    assert (rounded - truth).abs().max() > 1e-3


def test_the_cast_of_a_large_low_precision_head_goes_in_blocks(batch, device, monkeypatch):
    model = sharp_llama().bfloat16().to(device)
    with torch.no_grad():
        whole = nll_of(model, *batch)
        monkeypatch.setattr(products, "CAST_ROWS", 7)
        blocks = nll_of(model, *batch)
    torch.testing.assert_close(blocks, whole, rtol=1e-6, atol=1e-6)


def test_float64_logits_stay_in_float64(batch, device):
    inputs, targets, scored = batch
    table = torch.randn(101, 101, dtype=torch.float64).to(device)
    nll = nll_of(BigramTable(table), *batch)
    assert nll.dtype == torch.float64
    expected = -table.log_softmax(dim=1)[inputs, targets][scored]
    torch.testing.assert_close(nll[scored], expected, rtol=1e-12, atol=1e-12)


def test_the_model_is_left_as_it_was(model, batch, device):
    before = dict(vars(model))
    with torch.no_grad():
        nll_of(model, *batch)
    assert vars(model) == before
    assert model.unembed.__func__ is type(model).unembed
    if device == "cuda":
        return  # whose context an index out of range ends
    with torch.no_grad(), pytest.raises(IndexError):
        nll_of(model, batch[0] + 1000, *batch[1:])
    assert "unembed" not in vars(model)


def test_any_module_that_returns_logits(batch, device):
    torch.manual_seed(3)
    table = torch.randn(101, 101).log_softmax(dim=1).to(device)
    inputs, targets, scored = batch
    nll = nll_of(BigramTable(table), *batch)
    torch.testing.assert_close(nll[scored], -table[inputs, targets][scored], rtol=1e-5, atol=1e-5)


def test_nothing_to_score(model, device):
    nothing = torch.zeros(1, 1, dtype=torch.int64, device=device)
    with torch.no_grad():
        assert nll_of(model, nothing, nothing, nothing.bool()).tolist() == [[0.0]]
