"""Small models and their batches, and the single-process reference they are judged by.

Every case has a batch of NUM_SAMPLES samples, which divides evenly by worlds of 1, 2, 3 and 4, and a loss
that is a mean with equal weight per sample, so that the mean over shards of the shard losses is the loss of
the whole batch. Weights and batches are deterministic and the same in every process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

NUM_SAMPLES = 12
VOCABULARY = 37
SEQUENCE = 6

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    name: str
    build_module: Callable[[], nn.Module]
    make_batch: Callable[[torch.Generator], Batch]
    loss: Callable[[nn.Module, Batch], torch.Tensor]
    ddp_options: dict[str, Any] = field(default_factory=dict)
    # False where the loss of a batch is not the mean of its shards' losses (batch norm in training mode
    # normalises by the shard's own statistics): the reference then runs shard by shard and averages.
    reference_on_whole_batch: bool = True
    # Overrides the tolerance in float64, for a model that computes a part in float32 whatever its dtype.
    float64_tolerance: float | None = None

    def module(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return self.build_module().to(dtype)

    def batch(self, step: int, dtype: torch.dtype = torch.float32) -> Batch:
        batch = self.make_batch(torch.Generator().manual_seed(100 + step))
        return {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}


def shard(batch: Batch, rank: int, world: int) -> Batch:
    return {k: v.chunk(world)[rank] for k, v in batch.items()}


def reference_backward(case: Case, module: nn.Module, batch: Batch, world: int) -> float:
    """One process's gradients for what the world computes together, accumulated into .grad."""
    if case.reference_on_whole_batch:
        loss = case.loss(module, batch)
    else:
        loss = torch.stack([case.loss(module, shard(batch, rank, world)) for rank in range(world)]).mean()
    loss.backward()
    return loss.item()


# Plain torch modules


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 8, 3, stride=2)
        self.norm2 = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm1(self.conv1(x)))
        x = torch.relu(self.norm2(self.conv2(x)))
        return self.head(x.mean(dim=(2, 3)))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder whose output projection is the token embedding itself."""

    def __init__(self, width: int = 16, num_blocks: int = 2) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(SEQUENCE, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 10)
        self.lstm = nn.LSTM(10, 12, num_layers=2, batch_first=True)
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embed(tokens))
        return self.head(hidden)


class Branches(nn.Module):
    """Samples choose whether to pass a side branch; a shard in which none does leaves it unused. `never` is
    used by nobody, so its gradient stays None, as it does in one process."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.side = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.other = nn.Linear(16, 16)
        self.never = nn.Linear(16, 4)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.stem(x))
        if (route == 1).any():
            h = h + self.side(h) * (route == 1).to(h.dtype).unsqueeze(1)
        if (route == 2).any():
            h = h + self.other(h) * (route == 2).to(h.dtype).unsqueeze(1)
        return self.head(h)


# Models of the transformers library, from tiny configs with random weights


def tiny_bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=SEQUENCE,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config)


def tiny_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQUENCE,
        use_cache=False,
        # Id 2 and friends are ordinary tokens in these batches.
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


# Batches


def regression_batch(generator: torch.Generator) -> Batch:
    return {
        "x": torch.randn(NUM_SAMPLES, 8, generator=generator, dtype=torch.float64),
        "y": torch.randn(NUM_SAMPLES, 3, generator=generator, dtype=torch.float64),
    }


def branches_batch(generator: torch.Generator) -> Batch:
    batch = regression_batch(generator)
    # Sorted, so that shards differ in which branches they use.
    batch["route"] = torch.randint(0, 3, (NUM_SAMPLES,), generator=generator).sort().values
    return batch


def image_batch(generator: torch.Generator) -> Batch:
    return {
        "x": torch.randn(NUM_SAMPLES, 3, 7, 7, generator=generator, dtype=torch.float64),
        "y": torch.randint(0, 5, (NUM_SAMPLES,), generator=generator),
    }


def token_batch(generator: torch.Generator) -> Batch:
    tokens = torch.randint(0, VOCABULARY, (NUM_SAMPLES, SEQUENCE + 1), generator=generator)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def masked_batch(generator: torch.Generator) -> Batch:
    """Two masked positions in every sample: with a varying number the loss would weigh shards unequally."""
    tokens = torch.randint(1, VOCABULARY, (NUM_SAMPLES, SEQUENCE), generator=generator)
    places = torch.rand(NUM_SAMPLES, SEQUENCE, generator=generator).argsort(dim=1)[:, :2]
    labels = torch.full_like(tokens, -100).scatter(1, places, tokens.gather(1, places))
    return {"input_ids": tokens.scatter(1, places, 0), "labels": labels}


def causal_batch(generator: torch.Generator) -> Batch:
    tokens = torch.randint(0, VOCABULARY, (NUM_SAMPLES, SEQUENCE), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


# Losses


def squared_error(module: nn.Module, batch: Batch) -> torch.Tensor:
    return functional.mse_loss(module(batch["x"]), batch["y"])


def routed_squared_error(module: nn.Module, batch: Batch) -> torch.Tensor:
    return functional.mse_loss(module(batch["x"], route=batch["route"]), batch["y"])


def class_loss(module: nn.Module, batch: Batch) -> torch.Tensor:
    return functional.cross_entropy(module(batch["x"]), batch["y"])


def next_token_loss(module: nn.Module, batch: Batch) -> torch.Tensor:
    return functional.cross_entropy(module(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def own_loss(module: nn.Module, batch: Batch) -> torch.Tensor:
    return module(**batch).loss


def eval_mode_conv_net() -> nn.Module:
    """Batch norm with fixed statistics: the samples of a batch do not influence each other."""
    return ConvNet().eval()


CASES = {
    case.name: case
    for case in (
        Case("mlp", MLP, regression_batch, squared_error),
        Case("cnn_fixed_statistics", eval_mode_conv_net, image_batch, class_loss),
        Case("cnn_batch_statistics", ConvNet, image_batch, class_loss, reference_on_whole_batch=False),
        Case("gpt_tied", GPT, token_batch, next_token_loss),
        Case("lstm", Recurrent, token_batch, next_token_loss),
        Case("branches", Branches, branches_batch, routed_squared_error, {"find_unused_parameters": True}),
        Case("bert", tiny_bert, masked_batch, own_loss),
        # Its norms and its loss are computed in float32.
        Case("llama", tiny_llama, causal_batch, own_loss, float64_tolerance=2e-6),
    )
}

# Every world in one dtype, and in the other where soaks are run.
WORLDS_AND_DTYPES = [
    pytest.param(world, dtype, id=f"{world}-{str(dtype).removeprefix('torch.')}", marks=marks)
    for dtype, worlds in ((torch.float64, (2, 3)), (torch.float32, (1, 4)))
    for world in (1, 2, 3, 4)
    for marks in [[] if world in worlds else [pytest.mark.soak]]
]
