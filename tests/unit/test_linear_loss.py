"""The chunked cross entropy of a linear layer: values, gradients and memory, compared with the plain loss."""

import re

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.functional import cross_entropy, linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from samestep.errors import SamestepError, StepError
from samestep.nn import linear_cross_entropy
from samestep.torch_private import without_memory

TOKENS, CLASSES, WIDTH = (3, 7), 11, 5


def plain(hidden, weight, labels, bias=None, ignore_index=-100):
    logits = linear(hidden, weight, bias).flatten(0, -2)
    losses = cross_entropy(logits, labels.flatten(), reduction="none", ignore_index=ignore_index)
    return losses.view(labels.shape)


def example(dtype=torch.float64, tokens=TOKENS, classes=CLASSES, width=WIDTH, ignored=3):
    """Hidden states, weight, labels and bias; some labels are -100."""
    rng = torch.Generator().manual_seed(0)
    shapes = (*tokens, width), (classes, width), (classes,)
    hidden, weight, bias = (torch.randn(shape, generator=rng).to(dtype).requires_grad_() for shape in shapes)
    labels = torch.randint(0, classes, tokens, generator=rng)
    labels.view(-1)[torch.randperm(labels.numel(), generator=rng)[:ignored]] = -100
    return hidden, weight, labels, bias


def gradients(losses, inputs, upstream):
    """The losses and the gradients of the inputs for gradients of the losses."""
    return [losses.detach(), *torch.autograd.grad(losses, inputs, upstream.to(losses.dtype))]


def upstream_of(labels):
    """Random gradients of the losses, zero for masked tokens."""
    rng = torch.Generator().manual_seed(1)
    return torch.randn(labels.shape, generator=rng).double() * (torch.rand(labels.shape, generator=rng) < 0.7)


def errors(found, expected):
    return [float((one.double() - other.double()).norm()) for one, other in zip(found, expected, strict=True)]


@pytest.mark.parametrize("chunk", [1, 4, 7, 21, 1000, None])
@pytest.mark.parametrize("with_bias", [True, False])
def test_losses_and_gradients_are_those_of_the_plain_loss(chunk, with_bias):
    hidden, weight, labels, bias = example()
    bias = bias if with_bias else None
    inputs = [hidden, weight, bias] if with_bias else [hidden, weight]
    expected = gradients(plain(hidden, weight, labels, bias), inputs, upstream_of(labels))
    losses = linear_cross_entropy(hidden, weight, labels, bias, chunk=chunk)
    assert losses.shape == labels.shape
    assert (losses[labels == -100] == 0).all()
    for found, wanted in zip(gradients(losses, inputs, upstream_of(labels)), expected, strict=True):
        assert found.dtype == torch.float64
        assert (found - wanted).abs().max() < 1e-12


def test_fp32_differs_by_rounding():
    inputs = example(torch.float32, (4, 50), 97, 32)
    reference = [tensor.detach().double() if tensor.is_floating_point() else tensor for tensor in inputs]
    found = linear_cross_entropy(*inputs, chunk=33)
    assert found.dtype == torch.float32
    assert (found - plain(*reference)).abs().max() < 1e-5


def test_gradcheck():
    hidden, weight, labels, bias = example(tokens=(5,), classes=4, width=3, ignored=1)
    assert torch.autograd.gradcheck(
        lambda *x: linear_cross_entropy(x[0], x[1], labels, x[2], chunk=2), (hidden, weight, bias)
    )


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_at_least_as_exact_as_the_plain_loss(dtype, autocast):
    """The inputs have the same values in fp64, so that only products, reductions and gradients are rounded."""
    given = example(dtype, (4, 64), 200, 48)
    exact = [each.detach().double().requires_grad_() if each.is_floating_point() else each for each in given]
    half = [each.detach().float().requires_grad_() if autocast and each.is_floating_point() else each for each in given]
    upstream = upstream_of(given[2]).to(dtype).double()

    def run(loss, inputs, enabled):
        with torch.autocast("cpu", dtype, enabled=enabled):
            losses = loss(*inputs)
        return gradients(losses, [inputs[0], inputs[1], inputs[3]], upstream)

    expected = run(plain, exact, False)
    ours = run(lambda *inputs: linear_cross_entropy(*inputs, chunk=50), half, autocast)
    theirs = run(plain, half, autocast)
    assert ours[0].dtype == torch.float32
    assert [each.dtype for each in ours[1:]] == [torch.float32 if autocast else dtype] * 3
    for mine, other, size in zip(errors(ours, expected), errors(theirs, expected), expected, strict=True):
        assert mine <= 1.05 * other  # both end with one rounding to the dtype of the input
        assert mine < 0.01 * size.norm()


def test_under_autocast_inputs_of_products_are_rounded():
    """Values that bf16 cannot represent: the losses are those of rounded inputs."""
    hidden, weight, labels, _ = example(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_cross_entropy(hidden, weight, labels)
    rounded = [tensor.detach().bfloat16().double() for tensor in (hidden, weight)]
    assert (found - plain(*rounded, labels)).abs().max() < 1e-5
    assert (found - plain(hidden.double(), weight.double(), labels)).abs().max() > 1e-4


def test_autocast_leaves_fp64_as_it_is():
    hidden, weight, labels, bias = example()
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_cross_entropy(hidden, weight, labels, bias)
    assert torch.equal(found, linear_cross_entropy(hidden, weight, labels, bias))


def test_another_ignore_index_and_labels_of_32_bits():
    hidden, weight, labels, bias = example(ignored=0)
    labels[0, :3] = 2
    found = linear_cross_entropy(hidden, weight, labels.int(), bias, ignore_index=2)
    assert (found - plain(hidden, weight, labels, bias, ignore_index=2)).abs().max() < 1e-12
    assert (found[0, :3] == 0).all()


def test_no_token_counts():
    hidden, weight, labels, bias = example(ignored=21)
    found = gradients(linear_cross_entropy(hidden, weight, labels, bias), [hidden, weight, bias], upstream_of(labels))
    assert all((each == 0).all() for each in found)
    empty = linear_cross_entropy(hidden[:0], weight, labels[:0], bias)
    assert empty.shape == (0, 7)
    assert (torch.autograd.grad(empty.sum(), weight)[0] == 0).all()


def test_one_token_and_hidden_states_that_are_not_contiguous():
    hidden, weight, labels, _ = example()
    found = linear_cross_entropy(hidden.transpose(0, 1), weight, labels.T, chunk=4)
    assert (found - plain(hidden, weight, labels).T).abs().max() < 1e-12
    expected = torch.autograd.grad(plain(hidden, weight, labels).sum(), hidden)[0]
    assert (torch.autograd.grad(found.sum(), hidden)[0] - expected).abs().max() < 1e-12
    assert linear_cross_entropy(hidden[0, 0], weight, torch.tensor(3)).shape == ()


FROZEN = {"hidden": [0], "weight": [1], "weight and bias": [1, 2]}


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("compiled", [True, False])
def test_a_frozen_input_gets_no_gradient(frozen, compiled):
    hidden, weight, labels, bias = example()
    for number in FROZEN[frozen]:
        (hidden, weight, bias)[number].requires_grad_(False)
    trained = [tensor for tensor in (hidden, weight, bias) if tensor.requires_grad]
    expected = gradients(plain(hidden, weight, labels, bias), trained, upstream_of(labels))
    torch._dynamo.reset()
    loss = torch.compile(chunked, backend="aot_eager", fullgraph=True) if compiled else chunked
    found = gradients(loss(hidden, weight, labels, bias), trained, upstream_of(labels))
    assert max(errors(found, expected)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_through_a_frozen_head_are_as_exact_as_those_of_the_plain_loss(dtype):
    hidden, weight, labels, _ = example(dtype, (4, 64), 200, 48)
    weight.requires_grad_(False)
    exact = [tensor.detach().double() for tensor in (hidden, weight)]
    upstream = upstream_of(labels).to(dtype).double()
    expected = gradients(plain(exact[0].requires_grad_(), exact[1], labels), [exact[0]], upstream)
    ours = gradients(linear_cross_entropy(hidden, weight, labels, chunk=50), [hidden], upstream)
    theirs = gradients(plain(hidden, weight, labels), [hidden], upstream)
    assert ours[1].dtype == dtype
    assert errors(ours, expected)[1] <= 1.05 * errors(theirs, expected)[1]


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("frozen", "expected"), [([], 4), ([1], 2), ([0], 3)])
def test_no_product_is_repeated_behind_a_frozen_head(frozen, expected):
    """Logits, and one product per gradient; the logits twice if the weight trains."""
    hidden, weight, labels, _ = example()
    for number in frozen:
        (hidden, weight)[number].requires_grad_(False)
    with Products() as products:
        linear_cross_entropy(hidden, weight, labels, chunk=labels.numel()).sum().backward()
    assert products.count == expected
    with Products() as products, torch.no_grad():
        linear_cross_entropy(hidden, weight, labels, chunk=labels.numel())
    assert products.count == 1


class Tied(nn.Module):
    """Embedding and head share their weight; returns the losses."""

    def __init__(self, loss, checkpointed=False):
        super().__init__()
        torch.manual_seed(0)
        self.loss, self.checkpointed = loss, checkpointed
        self.tokens, self.layer = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens, labels):
        arguments = self.layer(self.tokens(tokens)).tanh(), self.head.weight, labels
        if self.checkpointed:
            return checkpoint(self.loss, *arguments, use_reentrant=False)
        return self.loss(*arguments)


def chunked(hidden, weight, labels, bias=None):
    return linear_cross_entropy(hidden, weight, labels, bias, chunk=4)


def trained(model, labels, run=None):
    """The losses of a model in fp64, and the gradients of its parameters."""
    losses = (model if run is None else run)(labels.clamp(min=0), labels)
    return gradients(losses, list(model.parameters()), upstream_of(labels))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_tied_weights_and_activation_checkpointing(checkpointed):
    labels = example()[2]
    expected = trained(Tied(plain).double(), labels)
    assert max(errors(trained(Tied(chunked, checkpointed).double(), labels), expected)) < 1e-12


class Recorder(TorchDispatchMode):
    """The bytes of the largest tensor that any operator returns."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        found = [leaf.numel() * leaf.itemsize for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.largest = max(self.largest, *found, 0)
        return result


def largest_tensor(loss, *arguments):
    with Recorder() as recorder:
        loss(*arguments).sum().backward()
    return recorder.largest


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_logits_of_all_tokens_never_exist(dtype):
    hidden, weight, labels, _ = example(dtype, (8, 32), 500, 4)
    wide = 8 if dtype == torch.float64 else 4
    assert largest_tensor(plain, hidden, weight, labels) >= 8 * 32 * 500 * dtype.itemsize
    assert largest_tensor(chunked, hidden, weight, labels) == 4 * 500 * wide


@pytest.mark.parametrize(("classes", "tokens"), [(50304, 1280), (128256, 512), (1_000_000, 67), (2**27, 1)])
def test_a_default_chunk_has_at_most_256_mib_of_logits(classes, tokens):
    with without_memory():
        hidden, weight = torch.empty(2, tokens, 1, requires_grad=True), torch.empty(classes, 1, requires_grad=True)
        found = largest_tensor(linear_cross_entropy, hidden, weight, torch.empty(2, tokens, dtype=torch.long))
    assert found == tokens * classes * 4
    assert tokens == 1 or found <= 256 * 2**20


def test_a_compiled_model_computes_the_same_and_never_has_the_logits_of_all_tokens():
    torch._dynamo.reset()
    labels, seen = example()[2], []

    def record(graph, _):
        seen.extend((str(node.target), node.meta.get("val")) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    model = Tied(chunked).double()
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=record), fullgraph=True)
    assert max(errors(trained(model, labels, compiled), trained(Tied(plain).double(), labels))) < 1e-12
    names = [name for name, _ in seen]
    assert names.count("samestep.linear_cross_entropy.default") == 1
    assert names.count("samestep.linear_cross_entropy_backward.default") == 1
    sizes = [leaf.numel() for _, value in seen for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    assert max(sizes) < labels.numel() * CLASSES


@pytest.mark.parametrize("autocast", [True, False])
def test_a_compiled_loss_and_the_loss_of_a_compiled_model_are_the_same(autocast):
    torch._dynamo.reset()
    hidden, weight, labels, bias = example(torch.float32)
    layer = nn.Linear(WIDTH, WIDTH)

    def whole(hidden, loss=linear_cross_entropy, layer=layer):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return loss(layer(hidden), weight, labels, bias)

    def run(function, **parts):
        return gradients(function(hidden, **parts), [hidden, weight, bias], upstream_of(labels))

    expected = run(whole)
    compiled = torch.compile(whole, backend="aot_eager", fullgraph=True)
    for found in (run(compiled), run(whole, layer=torch.compile(layer, backend="aot_eager"))):
        assert [each.dtype for each in found] == [torch.float32] * 4
        assert max(errors(found, expected)) < (0.01 if autocast else 1e-5)


def test_a_second_derivative_raises():
    hidden, weight, labels, _ = example()
    losses = linear_cross_entropy(hidden, weight, labels)
    message = (
        "linear_cross_entropy has no second derivative, and the backward pass was called with create_graph=True: "
        "compute the loss with cross_entropy(linear(hidden, weight), labels) instead"
    )
    with pytest.raises(StepError, match=re.escape(message)):
        torch.autograd.grad(losses.sum(), hidden, create_graph=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"hidden": torch.zeros(3, 7, 4)},
            "got hidden states of torch.float32 and shape (3, 7, 4) for a weight of shape (11, 5): pass floating point "
            "(..., width) and (classes, width), as in nn.Linear",
        ),
        (
            {"hidden": torch.zeros(3, 7, 5, dtype=torch.long)},
            "got hidden states of torch.int64 and shape (3, 7, 5) for",
        ),
        (
            {"labels": torch.zeros(3, 6, dtype=torch.long)},
            "got labels of torch.int64 and shape (3, 6) for hidden states of shape (3, 7, 5): pass one integer class "
            "per token, of shape (3, 7)",
        ),
        ({"labels": torch.zeros(3, 7)}, "got labels of torch.float32 and shape (3, 7) for hidden states of"),
        (
            {"bias": torch.zeros(5)},
            "got a bias of shape (5,) for a weight of shape (11, 5): pass one value per class, of shape (11,)",
        ),
        (
            {"weight": torch.zeros(11, 5)},
            "got hidden states in torch.float64 and a weight in torch.float32: convert one of them, or compute the "
            "losses under autocast, in the forward of a model from run.wrap",
        ),
        (
            {"labels": torch.full((3, 7), 11)},
            "got the label 11 at [0, 0], and the weight has 11 classes: pass labels from 0 to 10, or -100 "
            "(ignore_index) for tokens that do not count",
        ),
        ({"labels": torch.full((3, 7), -1)}, "got the label -1 at [0, 0], and the weight has 11 classes"),
    ],
)
def test_invalid_inputs_raise(change, message):
    hidden, weight, labels, bias = example()
    arguments = {"hidden": hidden, "weight": weight, "labels": labels, "bias": bias} | change
    with pytest.raises(StepError, match=re.escape(f"linear_cross_entropy {message}")):
        linear_cross_entropy(**arguments)


def test_a_chunk_below_one_raises():
    hidden, weight, labels, _ = example()
    message = "linear_cross_entropy got chunk=0: pass a number of tokens, at least 1, or omit it"
    with pytest.raises(SamestepError, match=re.escape(message)):
        linear_cross_entropy(hidden, weight, labels, chunk=0)
