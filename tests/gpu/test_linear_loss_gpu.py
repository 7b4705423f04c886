"""The chunked cross entropy of a linear layer on a GPU: products into fp32, compiled code, and memory."""

import pytest
import torch
from torch.nn.functional import cross_entropy, linear

from samestep.nn import linear_cross_entropy

TOKENS, CLASSES, WIDTH = (4, 256), 4001, 128


def plain(hidden, weight, labels, bias):
    logits = linear(hidden, weight, bias).flatten(0, 1)
    return cross_entropy(logits, labels.flatten(), reduction="none").view(labels.shape)


def example(dtype, frozen):
    """Hidden states, weight, labels and bias; some labels are -100."""
    rng = torch.Generator("cuda").manual_seed(0)
    shapes = (*TOKENS, WIDTH), (CLASSES, WIDTH), (CLASSES,)
    hidden, weight, bias = (torch.randn(shape, generator=rng, device="cuda").to(dtype) for shape in shapes)
    labels = torch.randint(0, CLASSES, TOKENS, generator=rng, device="cuda")
    labels[:, ::7] = -100
    for tensor in (hidden,) if frozen else (hidden, weight, bias):
        tensor.requires_grad_()
    return hidden, weight, labels, bias


def results(loss, inputs, upstream):
    """Losses and gradients in fp64."""
    losses = loss(*inputs)
    trained = [tensor for tensor in inputs if tensor.requires_grad]
    return [each.double() for each in (losses.detach(), *torch.autograd.grad(losses, trained, upstream.to(losses)))]


def in_fp64(tensor):
    wide = tensor.detach().double() if tensor.is_floating_point() else tensor
    return wide.requires_grad_(tensor.requires_grad)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_losses_and_gradients_are_at_least_as_exact_as_those_of_the_plain_loss(dtype, frozen, compiled):
    torch.compiler.reset()
    inputs = example(dtype, frozen)
    upstream = torch.rand(TOKENS, device="cuda", dtype=torch.float64) / inputs[2].numel()
    expected = results(plain, [in_fp64(each) for each in inputs], upstream)
    theirs = results(plain, inputs, upstream)

    def loss(*given):
        return linear_cross_entropy(*given, chunk=300)

    ours = results(torch.compile(loss, fullgraph=True) if compiled else loss, inputs, upstream)
    for mine, other, exact in zip(ours, theirs, expected, strict=True):
        assert (mine - exact).norm() <= 1.1 * (other - exact).norm() + 1e-6 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_under_autocast_gradients_have_the_dtype_of_their_tensors(dtype):
    hidden, weight, labels, bias = example(torch.float32, False)
    with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
        losses = linear_cross_entropy(hidden, weight, labels, bias, chunk=300)
    found = torch.autograd.grad(losses.sum(), [hidden, weight, bias])
    assert [each.dtype for each in (losses, *found)] == [torch.float32] * 4
    exact = plain(*(in_fp64(each) for each in (hidden, weight, labels, bias)))
    assert (losses - exact).abs().max() < {torch.bfloat16: 0.5, torch.float32: 0.05}[dtype]


@pytest.mark.parametrize("frozen", [False, True])
def test_memory_does_not_grow_with_the_number_of_tokens(frozen):
    def peak(tokens):
        hidden = torch.randn(tokens, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(50_000, 16, device="cuda", dtype=torch.bfloat16, requires_grad=not frozen)
        labels = torch.zeros(tokens, device="cuda", dtype=torch.long)
        for _ in range(2):
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            linear_cross_entropy(hidden, weight, labels).sum().backward()
            hidden.grad = weight.grad = None
        return torch.cuda.max_memory_allocated() - before

    few, many = peak(2_000), peak(20_000)
    assert many < 3 * 256 * 2**20 < 4 * 20_000 * 50_000  # bytes of the logits of all tokens
    assert many < few + 20_000 * 16 * 16
