"""Manual optimization: an unchanged GAN with two optimizers has the same weights on any number of ranks."""

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.utils.data import DataLoader, TensorDataset

from tests.lightning.trained import closing, make_trainer, max_difference, weights

pytestmark = pytest.mark.slow


def gan(kind: str):
    """Return the GAN of Lightning's documentation, in a variant."""
    from lightning.pytorch import LightningModule

    class GAN(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.automatic_optimization = False
            self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)).double()
            self.discriminator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()

        def forward(self, z):
            return self.generator(z)

        def loss(self, images, real):
            scores = self.discriminator(images)
            return bce(scores, torch.full_like(scores, float(real)))

        def training_step(self, batch):
            (images,) = batch
            z = torch.randn(images.shape[0], 3).type_as(images)
            optimizer_g, optimizer_d = self.optimizers()

            self.toggle_optimizer(optimizer_g)
            g_loss = self.loss(self(z), True)
            self.log("g_loss", g_loss)
            backward(self, kind, g_loss)
            self.clip_gradients(optimizer_g, gradient_clip_val=0.05)
            optimizer_g.step()
            optimizer_g.zero_grad()
            self.untoggle_optimizer(optimizer_g)

            if kind != "untoggled":
                self.toggle_optimizer(optimizer_d)
            if kind == "two backward passes":
                self.manual_backward(self.loss(images, True) / 2)
                self.manual_backward(self.loss(self(z).detach(), False) / 2)
            else:
                d_loss = (self.loss(images, True) + self.loss(self(z).detach(), False)) / 2
                self.log("d_loss", d_loss, on_epoch=True)
                backward(self, kind, d_loss)
            optimizer_d.step()
            optimizer_d.zero_grad()
            if kind != "untoggled":
                self.untoggle_optimizer(optimizer_d)

        def configure_optimizers(self):
            g = torch.optim.Adam(self.generator.parameters(), lr=0.01, betas=(0.5, 0.999))
            d = torch.optim.Adam(self.discriminator.parameters(), lr=0.01, betas=(0.5, 0.999))
            return [g, d], []

    return GAN()


def backward(module, kind, loss):
    loss.backward() if kind == "plain backward" else module.manual_backward(loss)


def fit_gan(kind, options):
    return closing(_fit_gan, kind, options)


def _fit_gan(kind, options):
    from samestep.lightning import SameStep

    data = TensorDataset(torch.randn(29, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))
    same, module = SameStep(global_batch=8), gan(kind)
    trainer = make_trainer(callbacks=[same], max_epochs=2, **options)
    trainer.fit(module, datamodule=same.dataloaders(train=DataLoader(data, shuffle=True)))
    metrics = {name: float(trainer.callback_metrics[name]) for name in ("d_loss_epoch",) if kind == "typical"}
    return weights(module), metrics, trainer.global_step


@pytest.mark.parametrize("kind", ["typical", "two backward passes", "untoggled"])
def test_a_gan_has_the_same_weights_on_any_number_of_ranks(ranks, kind):
    ((one, one_metrics, steps),) = ranks(1, fit_gan, kind, {})
    assert steps == 16  # two optimizers, two epochs of four steps
    for size in (2, 3):
        runs = ranks(size, fit_gan, kind, {})
        for mine, metrics, _ in runs:
            assert max_difference(mine, one) < 1e-13
            assert metrics == pytest.approx(one_metrics, rel=1e-12)
            assert max_difference(mine, runs[0][0]) == 0


def test_the_strategy_that_lightning_recommends_for_gans_gives_the_same_weights(ranks):
    (one, _, _), *_ = ranks(1, fit_gan, "typical", {})
    runs = ranks(2, fit_gan, "typical", {"strategy": "ddp_find_unused_parameters_true"})
    assert all(max_difference(mine, one) < 1e-13 for mine, _, _ in runs)


def test_a_backward_pass_without_manual_backward_is_an_error_on_any_number_of_ranks(ranks):
    for size in (1, 2):
        for error in ranks.errors(size, fit_gan, "plain backward", {}):
            assert (
                "the optimizer of 4 parameter(s), generator.0.weight first, steps with a gradient from a backward pass "
                "that samestep did not see, so the step would not be the mean over the global batch: call "
                "self.manual_backward(loss) instead of loss.backward()"
            ) in error
