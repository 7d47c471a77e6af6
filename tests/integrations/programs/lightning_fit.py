"""Lightning's Trainer with automatic and manual optimization, and Fabric."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from cases import OUT, RANK, Record, run_cases
from lightning.fabric import Fabric
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

NUM_FEATURES = 16


def make_data() -> torch.utils.data.DataLoader:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(64, NUM_FEATURES, generator=generator)
    targets = inputs.sum(dim=1, keepdim=True).sin()
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=8)


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(NUM_FEATURES, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 1))


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class TwoHalves(lightning.LightningModule):
    """Manual optimization: one backward, and an optimizer for each half of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.encoder, self.head = make_net()[:3], nn.Linear(24, 1)

    def training_step(self, batch: Any, batch_index: int) -> None:
        inputs, targets = batch
        first, second = self.optimizers()
        loss = nn.functional.mse_loss(self.head(self.encoder(inputs)), targets)
        self.manual_backward(loss)
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(self.encoder.parameters(), lr=0.05), torch.optim.AdamW(self.head.parameters(), lr=0.01)]


class TwoPlayers(lightning.LightningModule):
    """Manual optimization as for a GAN: two losses, two backward passes in a step, each through its own half."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(NUM_FEATURES, NUM_FEATURES), make_net()

    def training_step(self, batch: Any, batch_index: int) -> None:
        inputs, _ = batch
        generate, judge = self.optimizers()

        self.toggle_optimizer(generate)
        self.manual_backward(-self.critic(self.generator(inputs)).mean())
        generate.step()
        generate.zero_grad()
        self.untoggle_optimizer(generate)

        self.toggle_optimizer(judge)
        made = self.generator(inputs).detach()
        self.manual_backward(self.critic(made).square().mean() + (self.critic(inputs) - 1).square().mean())
        judge.step()
        judge.zero_grad()
        self.untoggle_optimizer(judge)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=0.01),
            torch.optim.Adam(self.critic.parameters(), lr=0.01),
        ]


def fit(module: lightning.LightningModule, strategy: Any, **settings: Any) -> dict[str, Any]:
    record = Record(module)
    wrapped = []

    class Remember(lightning.Callback):
        def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
            wrapped.append(trainer.strategy.model)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=OUT,
        callbacks=[Remember()],
        **settings,
    )
    trainer.fit(module, make_data())
    if trainer.global_step == 0:
        raise AssertionError("no step was made")
    return record.end(wrapped[0])


def automatic() -> dict[str, Any]:
    return fit(Regression(), "ddp", accumulate_grad_batches=3, gradient_clip_val=0.5, precision="bf16-mixed")


def hook_and_static_graph() -> dict[str, Any]:
    return fit(Regression(), DDPStrategy(ddp_comm_hook=fp16_compress_hook, static_graph=True))


def manual_two_halves() -> dict[str, Any]:
    return fit(TwoHalves(), "ddp")


def manual_two_players() -> dict[str, Any]:
    return fit(TwoPlayers(), "ddp_find_unused_parameters_true")


def manual_static_graph() -> dict[str, Any]:
    return fit(TwoHalves(), DDPStrategy(static_graph=True))


def fabric() -> dict[str, Any]:
    """Accumulation by no_backward_sync; saved halfway, and gone on with from the file."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    net = make_net()
    record = Record(net)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    data = fabric.setup_dataloaders(make_data())

    def epoch() -> None:
        for number, (inputs, targets) in enumerate(data):
            accumulating = number % 2 == 0
            with fabric.no_backward_sync(model, enabled=accumulating):
                fabric.backward(nn.functional.mse_loss(model(inputs), targets))
            if not accumulating:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()

    epoch()
    state = {"model": model, "optimizer": optimizer}
    fabric.save(OUT / "fabric.ckpt", state)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(RANK)
    fabric.load(OUT / "fabric.ckpt", state)
    epoch()
    return record.end(model._forward_module)


run_cases(automatic, hook_and_static_graph, fabric, manual_two_halves, manual_two_players, manual_static_graph)
