"""Hugging Face models as users wrap them: padded batches, labels, dataclasses returned, adapters."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, BatchEncoding, LlamaConfig

from tests.dist.lightning_modules import Mesh, differences, loader, make_trainer, numbers, seeded, whole_weights

VOCAB = 32
LENGTHS = (7, 4, 6, 7, 3, 7, 5, 2)
"""Tokens of the samples: padded to the longest of their batch."""


def tiny_llama(**changes: Any) -> LlamaConfig:
    """Fewer key/value heads than heads, four layers."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
    }
    return LlamaConfig(**{**sizes, **changes})


def lora(model: Any, **changes: Any) -> Any:
    """``model`` with adapters that do something from the start, around column and row layers."""
    layers = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    options: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": layers, "init_lora_weights": False}
    return get_peft_model(model, LoraConfig(**{**options, **changes}))


def adapted(model: Any, method: str) -> Any:
    """``model`` with something else of PEFT."""
    from peft import IA3Config, PrefixTuningConfig, PromptTuningConfig

    configs = {
        "prompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "prefix": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "ia3": IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    }
    return get_peft_model(model, configs[method])


class CausalLM(LightningModule):
    """The plainest wrapper of a causal language model.

    Args:
        config: Of the model.
        returns: What ``training_step`` gives: ``"output"``, the dataclass of the model; ``"loss"``; ``"own"``, a dict
            with a loss in the type of the logits, where the model's own is always in float32.
        attention: ``attn_implementation``.
        checkpointing: Whether the model's own gradient checkpointing is switched on; ``"reentrant"`` as of old.
        prepare: Changes the model after it was built.
    """

    def __init__(
        self,
        config: Any,
        returns: str = "loss",
        attention: str = "sdpa",
        checkpointing: bool | str = False,
        prepare: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__()
        self.returns = returns
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        self.model = prepare(model) if prepare else model
        if checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})

    def forward(self, batch: Any) -> Any:
        return self.model(**batch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch)
        if self.returns == "own":
            out.loss = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        self.log("train_loss", out.loss, on_step=True, on_epoch=True)
        if self.returns == "own":
            return {"loss": out.loss, "logits": out.logits.detach()}
        return out if self.returns == "output" else out.loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self(batch).loss)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch)
        self.log("test_loss", out.loss)
        return out

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch).logits.argmax(-1)

    def micro_batch_weight(self, batch: Any) -> Tensor:
        return (batch["labels"][:, 1:] != -100).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


def samples(count: int = 8) -> list[Tensor]:
    """Token rows of different lengths."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, VOCAB, (LENGTHS[index % len(LENGTHS)],), generator=generator) for index in range(count)]


def padded(rows: Sequence[Tensor], positions: bool = True) -> dict[str, Tensor]:
    """A batch whose shorter rows are padded on the right; labels of padding, and of the first tokens, are -100."""
    length = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = row
    mask = (ids != 0).long()
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, 0] = -100
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if positions:
        batch["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return batch


def encoded(rows: Sequence[Tensor]) -> BatchEncoding:
    """The same as what a tokenizer gives."""
    return BatchEncoding(padded(rows, positions=False))


class Case(NamedTuple):
    """One training run."""

    module: Mapping[str, Any]
    """Arguments of :class:`CausalLM`."""
    config: Any = None
    """Of the model; :func:`tiny_llama` by default."""
    options: Mapping[str, Any] = {}
    """Of the strategy."""
    collate: Any = padded


def fit(mesh: Mesh | None, case: Case, **trainer: Any) -> Any:
    """The Trainer after two steps."""
    module = seeded(CausalLM, case.config or tiny_llama(), **case.module)
    made = make_trainer(mesh, dict(case.options) if mesh else None, **trainer)
    made.fit(module, loader(samples(), 4, mesh, collate_fn=case.collate))
    return made


def train(mesh: Mesh | None, cases: Sequence[Case]) -> Any:
    """Logged numbers and weights after two steps, case by case."""
    found = []
    for case in cases:
        trainer = fit(mesh, case)
        found.append((numbers(trainer.callback_metrics), whole_weights(trainer)))
    return found


def agree(results: Sequence[Any], expected: Any, cases: Sequence[Case]) -> None:
    """Every rank logged what one process logged, and the weights are those of one process."""
    for rank, found in enumerate(results):
        for case, (logged, weights), (right_logged, right) in zip(cases, found, expected, strict=True):
            assert not differences(logged, right_logged), f"rank {rank}, {case}"
            if rank:
                continue
            assert weights.keys() == right.keys()
            # The models' own loss is computed in float32, whose rounding depends on how the batch is cut.
            tolerance = 1e-10 if case.module.get("returns") == "own" else 1e-5
            for name, value in right.items():
                torch.testing.assert_close(
                    weights[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name, c=case: f"{c} {n}: {m}"
                )


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """No warning of anybody, in Python or in the log of transformers."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setLevel(logging.WARNING)
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for kind in (DeprecationWarning, FutureWarning):  # between the libraries themselves
                warnings.simplefilter("ignore", kind)
            yield
    finally:
        logger.removeHandler(handler)
    assert not stream.getvalue()
