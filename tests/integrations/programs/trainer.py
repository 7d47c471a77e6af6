"""Hugging Face Trainer on tiny models made from configs, with synthetic tokens."""

from __future__ import annotations

from typing import Any

import torch
from cases import OUT, RANK, Record, run_cases
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

VOCABULARY = 61


class Tokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(VOCABULARY, (12,), generator=generator)
        return {"input_ids": tokens, "labels": tokens.clone()}


def gpt2() -> nn.Module:
    """Tied embeddings, and dropout, so that random numbers have to agree too."""
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=32, n_layer=2, n_head=2))


def llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
        )
    )


def bert() -> nn.Module:
    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=48,
            max_position_embeddings=16,
        )
    )


def make_trainer(model: nn.Module, name: str, **settings: Any) -> Trainer:
    settings = {"max_steps": 3, "save_strategy": "no", "logging_strategy": "no", **settings}
    arguments = TrainingArguments(
        output_dir=str(OUT / name),
        use_cpu=True,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to="none",
        disable_tqdm=True,
        seed=7,
        **settings,
    )
    return Trainer(model=model, args=arguments, train_dataset=Tokens())


def train(model: nn.Module, name: str, **settings: Any) -> dict[str, Any]:
    record = Record(model)
    trainer = make_trainer(model, name, **settings)
    trainer.train()
    return record.end(trainer.model_wrapped)


def accumulation_and_bf16() -> dict[str, Any]:
    return train(gpt2(), "accumulation", bf16=True, gradient_accumulation_steps=2)


def checkpointing_reentrant() -> dict[str, Any]:
    return train(
        llama(), "reentrant", gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}
    )


def checkpointing_non_reentrant() -> dict[str, Any]:
    return train(
        llama(), "non_reentrant", gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}
    )


def options_of_ddp() -> dict[str, Any]:
    """An unused parameter and a buffer that differs between ranks, with options given through TrainingArguments."""
    model = llama()
    model.register_parameter("spare", nn.Parameter(torch.ones(3)))
    model.register_buffer("counter", torch.full((2,), float(RANK)))
    return train(model, "options", ddp_find_unused_parameters=True, ddp_bucket_cap_mb=1, ddp_broadcast_buffers=True)


def compiled() -> dict[str, Any]:
    return train(bert(), "compiled", torch_compile=True, torch_compile_backend="aot_eager")


def uninterrupted() -> dict[str, Any]:
    return train(gpt2(), "whole", max_steps=4, save_strategy="steps", save_steps=2)


def resumed() -> dict[str, Any]:
    """The second half of the case before, from its checkpoint: optimizer, schedule and random numbers included."""
    model = gpt2()
    record = Record(model)
    trainer = make_trainer(model, "whole", max_steps=4)
    trainer.train(resume_from_checkpoint=str(OUT / "whole" / "checkpoint-2"))
    return record.end(trainer.model_wrapped)


run_cases(
    accumulation_and_bf16,
    checkpointing_reentrant,
    checkpointing_non_reentrant,
    options_of_ddp,
    uninterrupted,
    resumed,
    compiled,
)
