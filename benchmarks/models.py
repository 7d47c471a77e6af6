"""The models that are measured, each with a batch maker and a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.num_heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Decoder with tied input and output embeddings; ``forward`` gives the loss."""

    def __init__(
        self,
        num_symbols: int,
        context: int,
        width: int,
        num_layers: int,
        num_heads: int,
        reentrant: bool | None = None,
    ) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(num_symbols, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_symbols, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.symbols.weight
        # None: no activation checkpointing; otherwise the flavour of it.
        self.reentrant = reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.symbols(inputs) + self.places(torch.arange(inputs.shape[1], device=tokens.device))
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        scores = self.head(self.norm(x))
        return F.cross_entropy(scores.flatten(0, 1).float(), targets.flatten())


class SmallCNN(nn.Module):
    """Many small parameters: 3 per layer, each layer cheap."""

    def __init__(self, width: int = 32, num_layers: int = 40, batch_norm: bool = True) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
        for _ in range(num_layers):
            layers.append(nn.Conv2d(width, width, 3, padding=1, bias=not batch_norm))
            layers.append(nn.BatchNorm2d(width) if batch_norm else nn.GroupNorm(4, width))
            layers.append(nn.ReLU())
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images).mean((2, 3))).square().mean()


class ManyTiny(nn.Module):
    """Parameters of a few elements whose own gradients cost next to nothing, so that the hooks show."""

    def __init__(self, num_parameters: int, size: int = 4) -> None:
        super().__init__()
        self.tiny = nn.ParameterList(nn.Parameter(torch.ones(size)) for _ in range(num_parameters))

    def forward(self, scale: Tensor) -> Tensor:
        return (torch.cat(list(self.tiny)) * scale).sum()


class WideMLP(nn.Module):
    """Large matrices, so that gradients outweigh everything else in memory."""

    def __init__(self, width: int = 2048, num_layers: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def give_own_code(module: nn.Module) -> None:
    """Let a compiler see this module's forward as code of its own.

    Graphs are kept by code object: otherwise a subject would be given the graphs of the one compiled before it.
    """
    forward = type(module).forward
    own = FunctionType(forward.__code__.replace(), forward.__globals__, forward.__name__, forward.__defaults__)
    module.forward = MethodType(own, module)


@dataclass(frozen=True)
class Workload:
    """A model and the batch of one rank; the model's forward takes the batch and gives the loss."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Tensor]


WORKLOADS = {
    w.name: w
    for w in [
        # 4.9 M parameters in 75 tensors.
        Workload(
            "gpt5m",
            lambda: GPT(num_symbols=512, context=128, width=256, num_layers=6, num_heads=4),
            lambda: torch.randint(512, (4, 65)),
        ),
        # Four times the batch: on one core its step takes longer than 1 Gbit/s needs for the gradients.
        Workload(
            "gpt5m_batch16",
            lambda: GPT(num_symbols=512, context=128, width=256, num_layers=6, num_heads=4),
            lambda: torch.randint(512, (16, 65)),
        ),
        # 0.37 M parameters in 124 tensors.
        Workload("cnn_small", SmallCNN, lambda: torch.randn(4, 3, 16, 16)),
        # 67 M parameters, 256 MiB of gradients.
        Workload("mlp67m_batch4", WideMLP, lambda: torch.randn(4, 2048)),
        Workload("mlp67m_batch1024", WideMLP, lambda: torch.randn(1024, 2048)),
        Workload("tiny2000", lambda: ManyTiny(2000), lambda: torch.tensor(0.5)),
    ]
}
