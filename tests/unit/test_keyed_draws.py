"""Which rows a draw belongs to, and what is said if that cannot be known."""

import itertools
import random
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from samestep import Run
from samestep.parallel.draw_rules import DRAW_RULES
from samestep.parallel.keyed_draws import KeyedDraws, Layout, LayoutMemory, candidate_layouts
from samestep.parallel.model_randomness import ModelRandomness
from samestep.torch_private import without_override_check


@pytest.mark.parametrize(
    ("shape", "batch_dim", "activation", "tiled", "expected"),
    [
        ((4, 7), None, False, False, [Layout()]),
        ((3,), None, False, False, []),
        ((7, 4, 5), None, True, False, [Layout(dim=1)]),
        ((4, 4, 5), None, True, False, [Layout(), Layout(dim=1)]),
        ((4, 4, 5), 1, True, False, [Layout(dim=1), Layout()]),
        ((7, 4), None, True, False, []),
        ((7, 4), 1, True, False, [Layout(dim=1)]),
        ((12, 5), None, True, False, [Layout(parts=3)]),
        ((12, 5), None, False, False, []),
        ((12, 5), None, True, True, [Layout(parts=3, tiled=True)]),
        ((), None, True, False, []),
    ],
)
def test_the_rows_are_found_by_their_number(shape, batch_dim, activation, tiled, expected):
    assert candidate_layouts(shape, 4, batch_dim, activation, tiled) == expected


@pytest.mark.parametrize("layout", [Layout(), Layout(dim=1), Layout(parts=3), Layout(parts=3, tiled=True)])
def test_a_layout_can_be_undone(layout):
    shape = (5, 4, 2) if layout.dim else (4 * layout.parts, 5)
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    by_row = layout.by_row(tensor, 4)
    assert by_row.shape == (4, *layout.row_sizes(shape))
    assert torch.equal(layout.back(by_row, shape), tensor)


def test_another_number_of_rows_shows_which_dimension_has_them():
    warnings = []
    memory = LayoutMemory(lambda topic, text: warnings.append(text))
    both = [Layout(), Layout(dim=1)]
    assert memory.choose("a", 4, (6, 4, 8), [Layout(dim=1)]) == Layout(dim=1)
    assert memory.choose("a", 6, (6, 6, 8), both) == Layout(dim=1)
    assert memory.choose("b", 3, (5,), []) is None
    assert memory.choose("b", 5, (5,), [Layout()]) is None
    assert not warnings


def test_a_guess_that_turns_out_wrong_is_reported():
    warnings = []
    memory = LayoutMemory(lambda topic, text: warnings.append(text))
    assert memory.choose("a", 5, (5,), [Layout()]) == Layout()
    assert memory.choose("a", 3, (5,), []) is None
    assert (
        "was treated as one with the rows in its first dimension, and this micro-batch of 3 rows shows" in warnings[0]
    )
    assert memory.choose("b", 3, (7, 2), []) is None
    assert memory.choose("b", 3, (8, 2), []) is None
    assert "a draw of shape (8, 2) does not have the 3 rows of the micro-batch in its first dimension" in warnings[1]


class Draws:
    """A micro-batch with given rows; `draw(function)` runs it with keyed draws."""

    def __init__(self):
        self.warnings = []
        self.mode = KeyedDraws(DRAW_RULES, lambda topic, text: self.warnings.append(text))

    def __call__(self, function, first, rows, step=1):
        self.mode.begin(torch.arange(first, first + rows) * 7919, step, fused_seed=first)
        with self.mode:
            return function(torch.ones(rows, 6))


FUNCTIONS = {
    "dropout": lambda x: functional.dropout(x, 0.5),
    "dropout_": lambda x: torch.dropout_(x.clone(), 0.5, True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "feature_alpha_dropout": lambda x: functional.feature_alpha_dropout(x.unsqueeze(-1), 0.5, True),
    "rand": lambda x: torch.rand(x.shape[0], 3),
    "randn": lambda x: torch.randn((x.size(0), 3)),
    "rand size": lambda x: torch.rand(size=(x.shape[0], 3)),
    "randn size": lambda x: torch.randn(size=x.shape),
    "dropout train": lambda x: torch.dropout(x, p=0.5, train=True),
    "dropout inplace": lambda x: functional.dropout(x.clone(), 0.5, inplace=True),
    "dropout3d": lambda x: functional.dropout3d(x.view(-1, 3, 2, 1, 1), 0.5),
    "feature_dropout": lambda x: torch.feature_dropout(x.view(-1, 3, 2), 0.5, train=True),
    "feature_dropout_": lambda x: torch.feature_dropout_(x.view(-1, 3, 2), 0.5, True),
    "alpha_dropout": lambda x: torch.alpha_dropout(x, 0.5, train=True),
    "alpha_dropout_": lambda x: torch.alpha_dropout_(x, 0.5, True),
    "feature_alpha_dropout_": lambda x: torch.feature_alpha_dropout_(x.view(-1, 3, 2), 0.5, True),
    "out": lambda x: torch.rand(x.shape[0], 2, out=torch.empty(x.shape[0], 2)),
    "randint": lambda x: torch.randint(5, 1000, (x.shape[0],)),
    "randint high": lambda x: torch.randint(high=1000, size=(x.shape[0], 2)),
    "randint_like": lambda x: torch.randint_like(x, 1000),
    "rand_like": lambda x: torch.rand_like(x, dtype=torch.bfloat16),
    "normal": lambda x: torch.normal(x, 2.0),
    "normal_": lambda x: torch.empty(x.shape[0], 2).normal_(1.0, 3.0),
    "uniform_": lambda x: x.new_empty(x.shape[0], 2).uniform_(-1, 1),
    "bernoulli": lambda x: torch.bernoulli(x * 0.5),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_(),
    "random_": lambda x: torch.empty_like(x, dtype=torch.int64).random_(0, 1000),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.01),
    "multinomial": lambda x: torch.multinomial(x, 3),
    "multinomial of tokens": lambda x: torch.multinomial(x.repeat_interleave(5, 0), 3).view(-1, 15),
    "categorical": lambda x: torch.distributions.Categorical(probs=x.view(-1, 2, 3)).sample(),
    "categories": lambda x: torch.distributions.Categorical(probs=x.view(-1, 2, 3)).sample((5,)).transpose(0, 1),
    "stacked": lambda x: functional.dropout(torch.stack([x, x]).flatten(0, 1)).view(2, -1, 6).transpose(0, 1),
    "expanded": lambda x: torch.randn_like(x[None].expand(5, -1, -1).reshape(-1, 6)).view(5, -1, 6).transpose(0, 1),
    "binomial": lambda x: torch.binomial(x * 100, x * 0.5),
    "poisson": lambda x: torch.poisson(x * 20),
    "rrelu": lambda x: functional.rrelu(-x, training=True),
    "torch.rrelu": lambda x: torch.rrelu(-x, training=True),
    "rrelu_": lambda x: torch.rrelu_(-x, training=True),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(),
    "gamma": lambda x: torch.distributions.Gamma(x, x).rsample(),
    "dirichlet": lambda x: torch.distributions.Dirichlet(x).rsample(),
    "beta": lambda x: torch.distributions.Beta(x, x).rsample(),
    "student": lambda x: torch.distributions.StudentT(x + 2).rsample(),
    "fractional_max_pool2d": lambda x: functional.fractional_max_pool2d(
        torch.arange(256.0).expand(x.shape[0], 1, 256).view(-1, 1, 16, 16), 2, output_size=6
    ),
    "gumbel": functional.gumbel_softmax,
    "distribution": lambda x: torch.distributions.Normal(x, x).rsample(),
    "several samples": lambda x: torch.distributions.Normal(x, x).rsample((5,)).transpose(0, 1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_numbers_of_a_row_do_not_depend_on_its_neighbors(name):
    draws, function = Draws(), FUNCTIONS[name]
    whole = draws(function, 0, 8)
    parts = torch.cat([draws(function, 0, 3), draws(function, 3, 3), draws(function, 6, 2)])
    assert torch.equal(whole, parts)
    assert len({tuple(row.flatten().tolist()) for row in whole}) > 4  # rows differ
    assert not draws.warnings


def test_other_draws_belong_to_the_step():
    draws = Draws()
    shared = [draws(lambda x: torch.rand(3), 0, 8), draws(lambda x: torch.rand(3), 8, 4)]
    assert torch.equal(*shared)
    assert not torch.equal(shared[0], draws(lambda x: torch.rand(3), 0, 8, step=2))
    weights = nn.Parameter(torch.ones(8, 6))
    noisy = [draws(lambda x: functional.dropout(weights), first, 8) for first in (0, 8)]
    assert torch.equal(*noisy)


def test_uniform_numbers_of_bfloat16_stay_below_one():
    numbers = Draws()(lambda x: torch.rand(4, 100_000, dtype=torch.bfloat16), 0, 4)
    assert numbers.max() < 1


def per_row(x):
    return torch.rand(x.shape[0], 3)


def of_all(x):
    return torch.rand(1, 3)


def test_a_single_row_differs_from_a_constant():
    draws = Draws()
    assert torch.equal(draws(per_row, 3, 1), draws(per_row, 0, 8)[3:4])
    assert not draws.warnings
    shared = [draws(of_all, first, 1) for first in (3, 4)]
    assert torch.equal(*shared)
    assert "may be meant for its sample or for all samples, and samestep takes it for all samples" in draws.warnings[0]


def test_a_generator_of_the_user_is_reported_if_it_draws_rows():
    draws = Draws()
    rng = torch.Generator().manual_seed(0)
    draws(lambda x: torch.rand(3, generator=rng), 0, 8)
    assert not draws.warnings
    draws(lambda x: torch.rand(8, 3, generator=rng), 0, 8)
    assert "rand(generator=...) draws for the rows of a micro-batch from a generator of your own" in draws.warnings[0]


def test_a_permutation_of_the_rows_is_reported():
    draws = Draws()
    permutation = draws(lambda x: torch.randperm(8), 0, 8)
    assert sorted(permutation.tolist()) == list(range(8))
    assert "torch.randperm(8) permutes the rows of the micro-batch" in draws.warnings[0]


@pytest.mark.parametrize(
    ("reorder", "coupled"),
    [
        (lambda x: x.flip(0), True),
        (lambda x: torch.flip(x, (0, 1)), True),
        (lambda x: x.roll(1, 0), True),
        (lambda x: torch.roll(x, shifts=1, dims=0), True),
        (lambda x: torch.flip(input=x, dims=(0,)), True),
        (lambda x: torch.roll(input=x, shifts=1), True),
        (lambda x: x.flip(-2), True),
        (lambda x: x.roll(1), True),
        (lambda x: x.roll(shifts=(1, 1), dims=(1, 0)), True),
        (lambda x: x.flip(1), False),
        (lambda x: x.flip(-1), False),
        (lambda x: x.roll(1, 1), False),
        (lambda x: torch.ones(3).flip(0), False),
    ],
)
def test_mixing_rows_is_reported(reorder, coupled):
    draws = Draws()
    draws(reorder, 0, 8)
    assert [("rows of the micro-batch, which couples its samples" in text) for text in draws.warnings] == [
        True
    ] * coupled


def test_attention_that_does_not_fit_is_fused_and_reported():
    draws = Draws()
    draws.mode.attention_limit = 10

    def attend(x):
        heads = x.view(-1, 1, 2, 3)
        return functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5)

    attended = draws(attend, 0, 8)
    assert attended.shape == (8, 1, 2, 3)
    assert (
        "computes in a fused kernel, since its attention weights of 0.0 GiB per layer do not fit" in draws.warnings[0]
    )


def test_attention_fits_if_the_weights_of_all_layers_do():
    draws = Draws()
    draws.mode.attention_limit = 8 * 4 * 8 * 2  # of 8 rows with 2 x 2 weights of 8 bytes, twice

    def attend(x, layers):
        heads = x.view(-1, 1, 2, 3)
        for _ in range(layers):
            heads = functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5)
        return heads

    for _ in range(3):
        draws(lambda x: attend(x, 2), 0, 8)
    assert not draws.warnings
    for _ in range(2):  # what the first micro-batch with more layers has shown holds for the second
        draws(lambda x: attend(x, 3), 0, 8)
    assert len(draws.warnings) == 3


def test_a_packed_sequence_with_dropout_is_reported():
    draws, lstm = Draws(), nn.LSTM(6, 4, 2, dropout=0.5)
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 6), torch.ones(2, 6)])
    draws(lambda x: lstm(packed), 0, 2)
    assert "a recurrent layer with dropout=0.5 between its layers got a packed sequence" in draws.warnings[0]


class Hidden(nn.Module):
    """Draws in a way that no torch function shows: a generator's own state."""

    def forward(self, x):
        torch.default_generator.set_state(torch.Generator().manual_seed(99).get_state())
        return x


def warnings_of(body, rows=4, micro_batches=3, model=None, batch_dim=None):
    """What is said while `body(inputs)` runs in some micro-batches."""
    said = []
    randomness = ModelRandomness(0, 0, torch.device("cpu"), said.append)
    if model is not None:
        randomness.add_model(model, batch_dim)
    for step in range(micro_batches):
        with randomness.micro_batch("training", step, 0, lambda: torch.arange(rows)):
            body(torch.ones(rows, 3))
    return said


class Interrupted(Exception):
    pass


def interrupt_at_line(number):
    """Trace the methods that enter and leave a micro-batch; raise at the `number`-th line, as a signal handler may."""
    lines = itertools.count()

    def trace(frame, event, _):
        if "model_randomness" not in frame.f_code.co_filename:
            return None
        if event == "line" and next(lines) == number:
            raise Interrupted
        return trace

    return trace


def test_a_run_ends_wherever_a_signal_interrupts_a_micro_batch():
    """torch raises the death of a data worker from a signal handler, in the middle of anything."""
    modes_before, interrupted = torch._C._len_torch_function_stack(), True
    for number in itertools.count():
        randomness = ModelRandomness(0, 0, torch.device("cpu"), pytest.fail)
        interrupted = False
        with randomness.micro_batch("training", 0, 0, lambda: torch.arange(4)):
            inner = randomness.micro_batch("evaluation", 0, 0, lambda: torch.arange(4))
            sys.settrace(interrupt_at_line(number))
            try:
                with inner:
                    pass
            except Interrupted:
                interrupted = True
            finally:
                sys.settrace(None)
            randomness.close()
        assert torch._C._len_torch_function_stack() == modes_before, f"line {number}"
        if not interrupted:
            break
    assert number > 50


def test_an_unseen_draw_names_its_module():
    model = nn.Sequential(nn.Linear(3, 3), Hidden())
    (warning,) = warnings_of(model, model=model)
    assert "random numbers are drawn in 1 (Hidden) in a way that samestep cannot key by sample" in warning


def per_row_with_numpy(rows):
    np.random.randn(rows, 2)


def per_row_with_random(rows):
    [random.uniform(0, 1) for _ in range(rows)]


def per_step(rows):
    random.random(), np.random.rand(2)


@pytest.mark.parametrize(
    ("draw", "name"), [(per_row_with_numpy, "numpy.random"), (per_row_with_random, "random"), (per_step, None)]
)
@pytest.mark.parametrize("rows", [2, 9, 700])
def test_a_number_of_python_or_numpy_for_each_row_is_reported_with_its_line(draw, name, rows):
    warnings = warnings_of(lambda x: draw(max(rows, 8)), rows, micro_batches=6)
    assert sys.gettrace() is None
    line = draw.__code__.co_firstlineno + 1
    expected = f"{name} at {__file__}:{line} draws at least one number for each of the {rows} rows of a micro-batch"
    assert [text.startswith(expected) for text in warnings] == ([True] if name else [])


class HiddenBesideDropout(Hidden):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return super().forward(self.drop(x))


def test_an_unseen_draw_beside_a_keyed_one_names_its_module():
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), HiddenBesideDropout())
    (warning,) = warnings_of(model, model=model)
    assert "random numbers are drawn in 2 (HiddenBesideDropout) in a way that samestep cannot key" in warning


def evaluate_after_training(evaluate, rows, kinds=("training", "evaluation")):
    """What `evaluate` draws for 8 samples in micro-batches of `rows`, after dropout of (rows, 6) in training."""
    warnings, drawn = [], []
    randomness = ModelRandomness(0, 0, torch.device("cpu"), warnings.append)
    for step in range(2):
        for number, first in enumerate(range(0, 8, rows)):
            for kind in kinds:
                with randomness.micro_batch(kind, step, number, lambda: torch.arange(first, first + rows) * 7919):  # noqa: B023
                    if kind == "training":
                        functional.dropout(torch.ones(rows, 6), 0.5)
                    else:
                        drawn.append(evaluate(torch.ones(rows, 6)))
    return torch.cat(drawn), warnings


def in_second_dimension(x):
    return torch.randn_like(x.expand(5, *x.shape)).transpose(0, 1)


def flattened(x):
    return functional.dropout(x.repeat_interleave(5, 0), 0.5).view(-1, 30)


def test_time_first_activations_may_be_flattened():
    results = []
    for rows in (8, 4):
        draws = Draws()
        draws.mode.batch_dim = 1

        def flatten(x):
            dropped = functional.dropout(x.expand(5, *x.shape).reshape(-1, 6))
            return dropped.view(5, -1, 6).transpose(0, 1)

        results.append(torch.cat([draws(flatten, first, rows) for first in range(0, 8, rows)]))
    assert torch.equal(*results)


def test_categories_that_are_certain_are_drawn_for_the_right_tokens():
    expected = torch.randint(16, (12, 7), generator=torch.Generator().manual_seed(0))
    certain = functional.one_hot(expected, 16).double()
    sample = torch.distributions.Categorical(probs=certain).sample
    assert torch.equal(Draws()(lambda x: sample(), 0, 12), expected)
    assert torch.equal(Draws()(lambda x: sample((5,)), 0, 12), expected.expand(5, 12, 7))


def restore_a_state(x):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        torch.randn_like(x)
    with torch.random.fork_rng(devices=[]):
        torch.rand(2)
    torch.rand(3)


def test_a_state_that_the_script_restores_is_not_an_unseen_draw():
    assert warnings_of(restore_a_state) == []


def loop_over_rows(x):
    for row in x:
        row * torch.rand(1)


def loop_over_layers(x):
    for _ in range(3):
        x = functional.dropout(x) * torch.rand(1)


def test_a_loop_over_the_rows_that_draws_is_reported_with_its_line():
    (warning,) = warnings_of(loop_over_rows)
    line = loop_over_rows.__code__.co_firstlineno + 2
    assert warning.startswith(f"{__file__}:{line} draws 4 times in a micro-batch of 4 rows, as in a loop over its rows")
    assert warnings_of(loop_over_layers) == []


def python_numbers(micro_batches, kind, between=False, start=0):
    """What the script draws from Python and numpy in each of 6 steps, with some micro-batches each."""
    drawn, said = [], []
    randomness = ModelRandomness(0, 0, torch.device("cpu"), said.append)
    for step in range(6):
        for number in range(micro_batches):
            if between and number == 0:
                drawn.append((random.random(), np.random.rand()))
            with randomness.micro_batch(kind, step, number, lambda: torch.arange(4)):
                if kind == "training":
                    functional.dropout(torch.ones(4, 2))
                if not between and step >= start:
                    drawn.append((step, random.random(), np.random.rand()))
    return (drawn if between else sorted(set(drawn))), said


@pytest.mark.parametrize("kind", ["training", "evaluation"])
@pytest.mark.parametrize("between", [False, True])
def test_numbers_of_python_and_numpy_for_a_step_do_not_depend_on_the_micro_batches(kind, between):
    state = random.getstate(), np.random.get_state()
    results = []
    for micro_batches in (1, 2, 5):
        random.seed(1)
        np.random.seed(1)
        results.append(python_numbers(micro_batches, kind, between))
    random.setstate(state[0])
    np.random.set_state(state[1])
    assert results[0] == results[1] == results[2]
    assert len(results[0][0]) == 6
    assert results[0][1] == []


def test_numbers_of_python_that_begin_late_are_reported():
    said = python_numbers(2, "training", start=4)[1]
    assert [text.startswith("the model has started to draw random numbers in training") for text in said] == [True]


@pytest.mark.parametrize("evaluate", [in_second_dimension, flattened])
def test_an_evaluation_may_have_another_layout_than_training(evaluate):
    (whole, said), (parts, also_said) = (evaluate_after_training(evaluate, rows) for rows in (8, 4))
    assert torch.equal(whole, parts)
    assert said == also_said == []


def test_branches_may_have_different_layouts():
    results = []
    for rows in (8, 4):
        draws, drawn = Draws(), []
        for step in range(4):
            branch = in_second_dimension if step % 2 else flattened
            drawn.append(torch.cat([draws(branch, first, rows, step).flatten(1) for first in range(0, 8, rows)]))
        results.append(torch.cat([each.flatten() for each in drawn]))
        assert not draws.warnings
    assert torch.equal(*results)


@pytest.mark.parametrize("batch_dim", [None, 0, 1])
def test_a_draw_that_fits_in_two_ways_is_reported_unless_declared(batch_dim):
    sample = torch.distributions.Normal(torch.ones(4, 3), 1.0).sample
    warnings = warnings_of(lambda x: sample((4,)), model=nn.Linear(1, 1), batch_dim=batch_dim)
    expected = "a draw of shape (4, 4, 3) may have the 4 rows of the micro-batch in its first dimension or in its"
    assert [expected in text for text in warnings] == [True] * (batch_dim is None)


def test_attention_with_as_many_heads_as_rows_is_not_reported_if_another_draw_shows_where_the_rows_are():
    def body(x):
        functional.dropout(torch.ones(4, 7, 3))
        functional.dropout(torch.ones(4, 4, 7, 7))

    assert warnings_of(body) == []


def test_dropout_that_fits_in_two_ways_is_reported_if_nothing_shows_where_the_rows_are():
    def body(x):
        functional.dropout(torch.ones(4, 4, 3))
        functional.dropout2d(torch.ones(4, 4, 3, 3))  # its rows are always in the first dimension

    (warning,) = warnings_of(body)
    assert warning.startswith("a draw of shape (4, 4, 3) may have the 4 rows of the micro-batch in its first dim")


@pytest.mark.parametrize(("period", "first"), [(2, 4), (4, 4), (8, 3), (16, 4), (10, 7)])
def test_a_model_that_starts_to_draw_is_noticed_at_once(period, first):
    warnings, noticed = [], []
    randomness = ModelRandomness(0, 0, torch.device("cpu"), warnings.append)
    for step in range(60):
        with randomness.micro_batch("training", step, 0, lambda: torch.arange(4)):
            if step >= first and step % period == first % period:
                torch.rand(4)
        noticed.append(bool(warnings))
    assert noticed.index(True) == first
    assert "the model has started to draw random numbers in training" in warnings[0]


def test_a_model_that_draws_nothing_is_left_alone_and_leaves_no_trace():
    warnings = []
    randomness = ModelRandomness(0, 0, torch.device("cpu"), warnings.append)
    before = torch.get_rng_state()
    active = []
    for step in range(20):
        with randomness.micro_batch("training", step, 0, lambda: torch.arange(4)):
            active.append(_modes() > 0)
    assert active == [True] * 3 + [False] * 17
    assert torch.equal(torch.get_rng_state(), before)
    with randomness.micro_batch("training", 21, 0, lambda: torch.arange(4)):
        pass
    for step in range(22, 30):
        with randomness.micro_batch("training", step, 0, lambda: torch.arange(4)):
            torch.rand(2)
    assert "the model has started to draw random numbers in training" in warnings[0]


def _modes():
    return torch._C._len_torch_function_stack()


def test_torch_asks_for_overrides_by_the_names_that_are_replaced():
    for function in (functional.multi_head_attention_forward, functional.gumbel_softmax, torch.autograd.grad):
        copy = without_override_check(function)
        assert copy is not function
        assert copy.__globals__["has_torch_function"]("anything") is False
        assert "has_torch_function" in {
            name.removesuffix("_unary").removesuffix("_variadic") for name in function.__code__.co_names
        }


def open_batches():
    randomness = ModelRandomness(0, 0, torch.device("cpu"), pytest.fail)
    randomness.add_model(nn.Dropout(0.5), None)
    return lambda kind, step: randomness.micro_batch(kind, step, 0, lambda: torch.arange(4))


def test_a_loop_around_an_evaluation_continues_with_its_own_numbers():
    batch = open_batches()
    with batch("training", 0):
        alone = [torch.rand(4, 2), torch.rand(3)]
    with batch("training", 0):
        around = [torch.rand(4, 2)]
        with batch("evaluation", 0):
            torch.rand(5, 2)
        assert _modes() == 1
        around.append(torch.rand(3))
    assert _modes() == 0
    assert torch.equal(around[0], alone[0])
    assert torch.equal(around[1], alone[1])


def test_loops_that_end_out_of_order_leave_nothing_open():
    batch = open_batches()
    first = second = None
    for step in range(5):  # as zip(first, second) does
        for name in ("first", "second"):
            previous = first if name == "first" else second
            if previous is not None:
                previous.__exit__(None, None, None)
            opened = batch("training", step)
            opened.__enter__()
            first, second = (opened, second) if name == "first" else (first, opened)
        assert _modes() == 1
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert _modes() == 0


def test_a_loop_that_an_exception_left_open_ends_with_its_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    held = []
    with Run(global_batch=4) as run:
        step = next(iter(next(run.shard(list(range(8))).epochs(1))))
        held.append(iter(step))
        next(held[0])
        assert _modes() == 1
    assert _modes() == 0
    with pytest.raises(StopIteration):
        next(held[0])
    assert _modes() == 0
