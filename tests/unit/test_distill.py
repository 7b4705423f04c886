"""Distillation losses without ranks: values by hand and from torch, gradients, errors."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import kl_div, log_softmax

from samestep import SamestepError
from samestep.errors import StepError
from samestep.nn import Projection, TopK, distill_loss, match_features, top_k


def logits(*shape, seed=0, dtype=torch.float32):
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def torch_kl(student, teacher, temperature):
    summands = kl_div(
        log_softmax(student / temperature, -1),
        log_softmax(teacher / temperature, -1),
        reduction="none",
        log_target=True,
    )
    return summands.sum(-1) * temperature**2


def test_two_classes_match_the_value_computed_by_hand():
    # p = (0.8, 0.2), q = (0.5, 0.5)
    teacher = torch.tensor([[math.log(4.0), 0.0]])
    expected = 0.8 * math.log(0.8 / 0.5) + 0.2 * math.log(0.2 / 0.5)
    torch.testing.assert_close(distill_loss(torch.zeros(1, 2), teacher), torch.tensor([expected]))


def test_the_loss_is_scaled_by_the_temperature_squared():
    teacher = torch.tensor([[2 * math.log(4.0), 0.0]])  # divided by 2: p = (0.8, 0.2) again
    expected = 4 * (0.8 * math.log(0.8 / 0.5) + 0.2 * math.log(0.2 / 0.5))
    torch.testing.assert_close(distill_loss(torch.zeros(1, 2), teacher, temperature=2.0), torch.tensor([expected]))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("shape", [(5, 9), (3, 4, 9)])
def test_the_loss_is_the_kl_divergence_of_torch_per_position(shape, temperature):
    student, teacher = logits(*shape), logits(*shape, seed=1)
    losses = distill_loss(student, teacher, temperature)
    assert losses.shape == shape[:-1]
    torch.testing.assert_close(losses, torch_kl(student, teacher, temperature))


@pytest.mark.parametrize("k", [None, 1, 3, 7])
def test_gradients_match_finite_differences(k):
    student, teacher = logits(2, 3, 7, dtype=torch.float64).requires_grad_(), logits(2, 3, 7, seed=1).double()
    target = teacher if k is None else top_k(teacher, k, temperature=2.0)
    assert torch.autograd.gradcheck(lambda x: distill_loss(x, target, 2.0), student)


def test_gradients_do_not_shrink_with_the_temperature():
    norms = []
    for temperature in (10.0, 100.0):
        student = logits(4, 6).requires_grad_()
        distill_loss(student, logits(4, 6, seed=1), temperature).sum().backward()
        norms.append(student.grad.norm().item())
    assert norms[1] == pytest.approx(norms[0], rel=0.2)


def test_the_teacher_gets_no_gradient():
    student, teacher = logits(2, 3).requires_grad_(), logits(2, 3, seed=1).requires_grad_()
    distill_loss(student, teacher).sum().backward()
    assert student.grad is not None
    assert teacher.grad is None


def test_half_precision_is_computed_in_fp32():
    student, teacher = logits(4, 1000).bfloat16(), logits(4, 1000, seed=1).bfloat16()
    losses = distill_loss(student, teacher)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, torch_kl(student.float(), teacher.float(), 1.0))


def test_large_logits_do_not_overflow():
    student, teacher = torch.tensor([[1e4, 0.0, -1e4]], requires_grad=True), torch.tensor([[0.0, 1e4, -1e4]])
    loss = distill_loss(student, teacher)
    torch.testing.assert_close(loss, torch.tensor([1e4]))
    loss.backward()
    torch.testing.assert_close(student.grad, torch.tensor([[1.0, -1.0, 0.0]]))


@pytest.mark.parametrize("k", [None, 2, 3])
def test_classes_at_minus_infinity_in_both_logits_are_ignored(k):
    excluded = torch.tensor([False, False, False, True, True])
    student = logits(2, 5).masked_fill(excluded, -math.inf).requires_grad_()
    teacher = logits(2, 5, seed=1).masked_fill(excluded, -math.inf)
    losses = distill_loss(student, teacher if k is None else top_k(teacher, k))
    losses.sum().backward()
    assert student.grad.isfinite().all()
    if k != 2:
        torch.testing.assert_close(losses, torch_kl(student[:, :3], teacher[:, :3], 1.0))


def test_top_k_of_all_classes_is_the_full_divergence():
    student, teacher = logits(3, 4, 8), logits(3, 4, 8, seed=1)
    torch.testing.assert_close(distill_loss(student, top_k(teacher, 8, 2.0), 2.0), distill_loss(student, teacher, 2.0))


def test_top_k_counts_all_other_classes_as_one():
    student, teacher = logits(5, 9), logits(5, 9, seed=1)
    largest = top_k(teacher, 3)
    p, q = teacher.double().softmax(-1), student.double().softmax(-1)
    p, q = p.gather(-1, largest.indices), q.gather(-1, largest.indices)
    rest_p, rest_q = 1 - p.sum(-1), 1 - q.sum(-1)
    expected = (p * (p / q).log()).sum(-1) + rest_p * (rest_p / rest_q).log()
    losses = distill_loss(student, largest)
    torch.testing.assert_close(losses, expected.float())
    assert (losses <= distill_loss(student, teacher) + 1e-6).all()
    assert (losses >= 0).all()


def test_top_k_is_zero_if_the_student_agrees():
    teacher = logits(5, 9)
    torch.testing.assert_close(distill_loss(teacher, top_k(teacher, 2)), torch.zeros(5), atol=1e-6, rtol=0)


def test_a_certain_teacher_leaves_no_probability_for_other_classes():
    teacher = torch.tensor([[200.0, 0.0, 0.0, 0.0]])
    student = torch.zeros(1, 4, requires_grad=True)
    loss = distill_loss(student, top_k(teacher, 1))
    torch.testing.assert_close(loss, torch.tensor([math.log(4.0)]))
    loss.backward()
    torch.testing.assert_close(student.grad, torch.tensor([[-0.75, 0.25, 0.25, 0.25]]))


@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize("side", ["student", "teacher"])
def test_a_masked_position_has_no_loss_and_no_gradient_even_with_nan(side, k):
    mask = torch.tensor([[True, False], [True, True]])
    student, teacher = logits(2, 2, 5), logits(2, 2, 5, seed=1)
    expected = distill_loss(student, teacher if k is None else top_k(teacher, k))
    (student if side == "student" else teacher)[0, 1] = math.nan
    student.requires_grad_()
    losses = distill_loss(student, teacher if k is None else top_k(teacher, k), mask=mask)
    torch.testing.assert_close(losses, torch.where(mask, expected, 0.0))
    losses.sum().backward()
    assert student.grad.isfinite().all()
    assert not student.grad[0, 1].any()


def test_features_are_compared_by_mean_squared_difference():
    student, teacher = torch.tensor([[1.0, 2.0], [0.0, 0.0]]), torch.tensor([[1.0, 4.0], [3.0, 4.0]])
    torch.testing.assert_close(match_features(student, teacher), torch.tensor([2.0, 12.5]))


def test_features_are_compared_by_cosine_similarity():
    student, teacher = (
        torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]),
        torch.tensor([[5.0, 0.0], [0.0, 2.0], [-1.0, 0.0]]),
    )
    torch.testing.assert_close(match_features(student, teacher, by="cosine"), torch.tensor([0.0, 1.0, 2.0]))


def test_a_projection_maps_to_the_width_of_the_teacher_and_gets_gradients():
    projection = Projection(3, 5)
    student, teacher = logits(2, 4, 3).requires_grad_(), logits(2, 4, 5, seed=1)
    losses = match_features(student, teacher, projection)
    torch.testing.assert_close(
        losses, (nn.functional.linear(student, *projection.parameters()) - teacher).square().mean(-1)
    )
    losses.sum().backward()
    assert student.grad.any()
    assert all(parameter.grad.any() for parameter in projection.parameters())


@pytest.mark.parametrize("by", ["mse", "cosine"])
def test_masked_features_have_no_loss_and_no_gradient(by):
    mask = torch.tensor([[True, False]])
    student, teacher = logits(1, 2, 3), logits(1, 2, 3, seed=1)
    student[0, 1] = teacher[0, 1] = math.inf
    student.requires_grad_()
    losses = match_features(student, teacher, Projection(3, 3), by, mask)
    losses.sum().backward()
    assert losses[0, 1] == 0
    assert student.grad.isfinite().all()
    assert not student.grad[0, 1].any()


def error_of(error, function, *arguments, **options):
    with pytest.raises(error) as caught:
        function(*arguments, **options)
    return str(caught.value)


def test_values_that_are_not_logits_raise():
    expected = "pass floating point logits of shape (rows, ..., classes), before any softmax, loss or mean"
    text = error_of(StepError, distill_loss, torch.tensor(1.0), logits(2, 3))
    assert text == f"distill_loss got a scalar for the student's logits: {expected}"
    text = error_of(StepError, distill_loss, logits(2, 3), torch.tensor([1, 2]))
    assert text == f"distill_loss got torch.int64 of shape (2,) for the teacher's logits: {expected}"
    assert error_of(StepError, top_k, logits(3), 1) == f"top_k got torch.float32 of shape (3,) for logits: {expected}"


def test_logits_of_different_shapes_raise():
    text = error_of(StepError, distill_loss, logits(2, 3), logits(2, 4))
    assert "distill_loss got logits of shape (2, 3) from the student and (2, 4) from the teacher: both must be" in text
    text = error_of(StepError, distill_loss, logits(3, 3), top_k(logits(2, 3), 2))
    assert "from the student and top-k logits of shape (2, 2) from the teacher: all dimensions but the last" in text


def test_a_temperature_other_than_that_of_the_top_k_logits_raises():
    text = error_of(StepError, distill_loss, logits(2, 3), top_k(logits(2, 3), 2), temperature=2.0)
    assert "got temperature=2.0, but the top-k logits were computed at temperature 1.0: compute them with" in text


@pytest.mark.parametrize("temperature", [0, -1.0, math.inf, math.nan, "2", None])
def test_an_invalid_temperature_raises(temperature):
    text = error_of(SamestepError, distill_loss, logits(2, 3), logits(2, 3), temperature)
    assert text == f"distill_loss got temperature={temperature!r}: pass a number above 0, such as 2.0"


def test_an_invalid_k_raises():
    for k in (4, 0, 1.5, "2", None):
        message = f"top_k got k={k!r} for 3 classes: pass k from 1 to 3"
        assert error_of(SamestepError, top_k, logits(2, 3), k) == message


def test_a_complete_model_output_raises_and_names_the_tensor_to_pass():
    output = {"logits": logits(2, 3)}
    text = error_of(StepError, distill_loss, output, logits(2, 3))
    assert text == "distill_loss got a dict for the student's logits: pass its .logits"
    text = error_of(StepError, distill_loss, logits(2, 3), (logits(2, 3),))
    assert text == "distill_loss got a tuple for the teacher's logits: pass the tensor of logits alone"
    assert error_of(StepError, top_k, None, 2) == "top_k got a NoneType for logits: pass the tensor of logits alone"
    text = error_of(StepError, match_features, [logits(2, 3)], logits(2, 3))
    assert text == "match_features got a list for the student's features: pass the tensor of features alone"


def test_a_mask_of_another_shape_raises():
    text = error_of(StepError, distill_loss, logits(2, 3), logits(2, 3), mask=torch.ones(2, 3))
    assert text == "the mask has shape (2, 3), but the losses have shape (2,): pass one value per loss"


def test_features_of_different_widths_need_a_projection():
    text = error_of(StepError, match_features, logits(2, 3), logits(2, 5))
    assert "match_features got features of shape (2, 3) from the student and (2, 5) from the teacher" in text
    assert text.endswith("other widths need projection=Projection(student_width, teacher_width)")
    assert "does not know by='mae': use one of 'mse', 'cosine'" in error_of(
        SamestepError, match_features, logits(2, 3), logits(2, 3), by="mae"
    )


@pytest.mark.parametrize(("width", "shown"), [(nn.Linear(2, 3), "a Linear"), (0, "0"), (None, "a NoneType")])
def test_a_projection_takes_integers_and_no_modules(width, shown):
    text = error_of(SamestepError, Projection, 4, width)
    assert text.startswith(f"Projection got teacher_width={shown}: pass the width as an integer from the")
    assert text.endswith("not from a teacher, which not every rank holds")


def test_top_k_is_a_tree_of_tensors():
    from samestep.data.loader import map_tensors

    mapped = map_tensors({"logits": top_k(logits(2, 5), 2)}, lambda tensor: tensor.double())
    assert isinstance(mapped["logits"], TopK)
    assert mapped["logits"].values.dtype == torch.float64
