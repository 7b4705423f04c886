"""Plans for a small trainable encoder with two frozen language models, checked against a calculation by hand.

Llama-3.1-8B and Qwen2.5-7B in bfloat16 and 50 million trainable parameters, samples of 512 tokens. Memory and FLOPs are
calculated from the published shapes, layer by layer, for two kinds of training: gradients flow through the
frozen models to the encoder, or the frozen models only provide targets.
"""

from dataclasses import dataclass

import pytest

from samestep.planner.cluster_spec import parse_cluster_spec
from samestep.planner.model_profile import ModelPart, ModelProfile, Op, PeakMemory
from samestep.planner.plan import make_plan

GIB, TOKENS, GLOBAL_BATCH = 2**30, 512, 64
TRAINABLE = 50_000_000 * 4


@dataclass(frozen=True)
class Shape:
    """A decoder, as described by its configuration file."""

    name: str
    parameters: int
    layers: int
    width: int
    heads_kv: float
    """Width of keys and of values as a fraction of the width."""
    inner: int
    vocabulary: int

    @property
    def kept(self):
        """Bytes per token that a layer saves for the gradient of its input; frozen weights need no saved inputs.

        In bfloat16: queries, keys, values, outputs of attention, gate, up and their product; two norms in float32.
        """
        half = self.width * (2 + 2 * self.heads_kv) + 3 * self.inner
        return int(2 * half + 2 * (2 + 4) * self.width)

    @property
    def logits(self):
        """Bytes of a token's logits in bfloat16, and of the logits and their gradient in float32."""
        return self.vocabulary * (2 + 4 + 4)


LLAMA = Shape("llama", 8_030_261_248, 32, 4096, 0.25, 14336, 128256)
QWEN = Shape("qwen", 7_615_616_512, 28, 3584, 1 / 7, 18944, 152064)


def two_frozen_models(gradients_pass):
    """The profile of the encoder with both models."""
    shapes = (LLAMA, QWEN)
    forward = {shape.name: 2.0 * shape.parameters * TOKENS for shape in shapes}
    trains = 2.0 * TRAINABLE / 4 * TOKENS
    passes = 2 if gradients_pass else 1
    step = 3 * trains + passes * sum(forward.values())
    logits = sum(shape.logits for shape in shapes)
    kept = sum(shape.layers * shape.kept for shape in shapes) if gradients_pass else max(s.kept for s in shapes)
    inputs = sum(shape.layers * 2 * shape.width for shape in shapes) if gradients_pass else 0
    one_layer = max(shape.kept for shape in shapes)
    again = sum(forward.values()) if gradients_pass else 0.0
    return ModelProfile(
        name="TwoFrozen",
        trainable={"float32": TRAINABLE},
        frozen={"bfloat16": sum(2 * shape.parameters for shape in shapes)},
        buffers=0,
        gradients=TRAINABLE,
        optimizer="AdamW",
        optimizer_state=2 * TRAINABLE,
        activations=PeakMemory.linear(0, TOKENS * (kept + logits)),
        checkpointed_activations=PeakMemory.linear(0, TOKENS * (inputs + one_layer + logits)),
        forward_flops=trains + sum(forward.values()),
        step_flops=step,
        checkpointed_step_flops=step + trains + again,
        ops=(Op("aten.mm", 4000, step, 0.0, "bfloat16"),),
        traced_samples=1,
        blocks=tuple(
            ModelPart(
                f"{shape.name}.layers.{at}", 0, 2 * shape.parameters // shape.layers, forward[shape.name] / shape.layers
            )
            for shape in shapes
            for at in range(shape.layers)
        ),
        frozen_parts=tuple(
            ModelPart(shape.name, 0, 2 * shape.parameters, forward[shape.name], gradients_pass) for shape in shapes
        ),
        method="by hand",
    )


THROUGH, TARGETS = two_frozen_models(gradients_pass=True), two_frozen_models(gradients_pass=False)

# (GPUs, the strategy if gradients flow through the frozen models, the strategy if they do not)
TABLE = [
    ("h100:1", "single", "single"),
    ("h100:2", "ddp", "ddp"),
    ("h100:3", "ddp", "ddp"),
    ("h100:4", "ddp", "ddp"),
    ("a100-40gb:1", "single", "single"),
    ("a100-40gb:2", "ddp", "ddp"),
    ("a100-40gb:3", "ddp", "ddp"),
    ("a100-40gb:4", "ddp", "ddp"),
]


@pytest.mark.parametrize(("gpus", "through", "targets"), TABLE, ids=[row[0] for row in TABLE])
def test_the_chosen_strategy_matches_a_calculation_by_hand(gpus, through, targets):
    for profile, expected in ((THROUGH, through), (TARGETS, targets)):
        chosen = make_plan(parse_cluster_spec(gpus), profile, GLOBAL_BATCH).chosen
        assert chosen is not None
        assert chosen.layout.name.split(" + ")[0] == expected
        assert chosen.layout.teacher_placement is None


def test_both_models_and_a_sample_fit_into_40_gb():
    chosen = make_plan(parse_cluster_spec("a100-40gb:2"), THROUGH, GLOBAL_BATCH).chosen
    assert chosen.memory.weights == TRAINABLE + 2 * (8_030_261_248 + 7_615_616_512)
    assert chosen.memory.weights / GIB == pytest.approx(29.3, abs=0.1)
    assert chosen.memory.total / GIB < 37.1
    assert chosen.micro_batch >= 1


def test_three_gpus_share_a_global_batch_that_is_not_divisible_by_three():
    chosen = make_plan(parse_cluster_spec("h100:3"), THROUGH, GLOBAL_BATCH).chosen
    assert chosen.layout.ranks == 3
    assert chosen.micro_batch * chosen.accumulation >= 22  # 22, 21 and 21 samples


def test_splitting_the_models_is_slower_than_a_copy_on_each_gpu():
    found = make_plan(parse_cluster_spec("a100-40gb:2"), TARGETS, GLOBAL_BATCH)
    seconds = {each.layout.name: each.time.total for each in found.candidates if each.fits}
    assert seconds["single + frozen balanced"] > 1.9 * seconds["ddp"]
    assert seconds["ddp + frozen sharded"] > seconds["ddp"]


@pytest.mark.parametrize("gpus", ["rtx4090:2", "a10g:4"])
def test_frozen_models_are_offloaded_if_a_copy_does_not_fit(gpus):
    found = make_plan(parse_cluster_spec(gpus), TARGETS, GLOBAL_BATCH)
    fitting = {each.layout.name: each for each in found.candidates if each.fits}
    assert "ddp" not in fitting
    # offload loads a layer while the previous one computes; so does sharding, which leaves less memory for samples
    assert found.chosen is fitting["ddp + frozen offload"]
    assert fitting["ddp + frozen sharded"].time.total < 1.3 * found.chosen.time.total
    assert fitting["ddp + frozen sharded"].micro_batch <= found.chosen.micro_batch


def test_if_frozen_models_with_gradient_flow_do_not_fit_the_advice_says_what_would():
    found = make_plan(parse_cluster_spec("a10g:4"), THROUGH, GLOBAL_BATCH)
    assert found.chosen is None
    assert found.advice[0] == "no number of a10g up to 64 would fit"
    assert found.advice[1].startswith("1 x a100-40gb (39.4 GiB) would fit, with single")
