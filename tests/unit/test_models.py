"""The quickstart's model and data are what they say, in one process."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_3d.models import GPT, ByteText, CausalLM
from lightning_3d.models.optimization import lr_factor
from lightning_3d.models.text import Windows, entropy


def small(**options: object) -> GPT:
    torch.manual_seed(0)
    return GPT(num_layers=2, width=16, num_heads=2, sequence_length=12, vocab_size=256, **options)


def test_a_position_sees_nothing_that_comes_after_it() -> None:
    model = small()
    tokens = torch.randint(256, (2, 12))
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_order_matters_to_the_model() -> None:
    model = small()
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6]])
    swapped = tokens[:, [1, 0, 2, 3, 4, 5]]
    assert not torch.allclose(model(tokens)[:, -1], model(swapped)[:, -1], atol=1e-5)


def test_the_loss_starts_near_that_of_a_guess() -> None:
    loss = small().loss(torch.randint(256, (8, 13)))
    assert abs(float(loss.detach()) - math.log(256)) < 1.0


def test_tied_weights_are_one_parameter() -> None:
    model = small(tie_weights=True)
    assert model.head.weight is model.token_embedding.weight
    untied = small()
    assert sum(1 for _ in untied.parameters()) == sum(1 for _ in model.parameters()) + 1


def test_only_matrices_inside_blocks_decay() -> None:
    model = small(weight_decay=0.3)
    model._trainer = SimpleNamespace(max_steps=10)  # type: ignore[assignment]
    optimizer = model.configure_optimizers()["optimizer"]
    decayed, others = optimizer.param_groups
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    assert sorted(names[parameter] for parameter in decayed["params"]) == sorted(
        f"blocks.{block}.{layer}.weight"
        for block in range(2)
        for layer in ("attention.qkv", "attention.proj", "mlp.up", "mlp.down")
    )
    assert len(decayed["params"]) + len(others["params"]) == len(names)


def test_the_learning_rate_warms_up_and_falls_to_its_share() -> None:
    model = small(warmup_steps=4, min_lr_ratio=0.1)
    factors = [lr_factor(step, 20, model.warmup_steps, model.min_lr_ratio) for step in range(21)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert factors[20] == pytest.approx(0.1)


def test_layers_that_are_made_late_are_the_same() -> None:
    late = small(build_late=True)
    assert not list(late.parameters())
    torch.manual_seed(0)
    late.configure_model()
    late.configure_model()
    now = small()
    assert list(late.state_dict()) == list(now.state_dict())
    for name, value in now.state_dict().items():
        assert torch.equal(late.state_dict()[name], value), name


def test_a_sample_repeats_and_is_as_long_as_asked() -> None:
    model = small()
    first, second = model.generate("def ", 20), model.generate("def ", 20)
    assert first == second
    assert first.startswith("def ")
    assert model.generate("def ", 20, seed=1) != first


def test_a_width_that_heads_cannot_share_is_refused() -> None:
    with pytest.raises(ValueError, match="width=16 cannot be shared by num_heads=3"):
        GPT(width=16, num_heads=3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for index in range(40):
        path = tmp_path / f"package{index % 4}" / f"module{index}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"value{index} = {index}\n" * 20)
    (tmp_path / "notes.md").write_text("not taken")
    return tmp_path


def test_every_file_is_in_one_part_and_stays_there(folder: Path) -> None:
    training, validation = ByteText(str(folder), validation_share=0.2).split()
    assert len(training) + len(validation) == 40
    assert not set(training) & set(validation)
    (folder / "another.py").write_text("x = 1\n")
    later_training, later_validation = ByteText(str(folder), validation_share=0.2).split()
    assert set(training) <= set(later_training)
    assert set(validation) <= set(later_validation)


def test_samples_overlap_by_the_byte_that_is_only_read() -> None:
    windows = Windows(torch.arange(10, dtype=torch.uint8), 3)
    assert [window.tolist() for window in windows] == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]


def test_few_samples_are_spread_over_all_the_data() -> None:
    windows = Windows(torch.arange(100, dtype=torch.uint8), 9, count=3)
    assert [int(windows[index][0]) for index in range(len(windows))] == [0, 27, 63]


def test_the_order_of_samples_depends_on_the_seed_alone(folder: Path) -> None:
    def order(seed: int) -> list[torch.Tensor]:
        data = ByteText(str(folder), sequence_length=16, batch_size=4, validation_share=0.2, seed=seed)
        data.setup("fit")
        torch.rand(3)  # what others draw from the default generator is no matter
        return list(data.train_dataloader())

    first, second, other = order(0), order(0), order(1)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_folder_that_is_missing_or_too_small_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a folder"):
        ByteText(str(tmp_path / "missing"))
    with pytest.raises(ValueError, match=r"0 training and 0 validation files that match pattern='\*.rs'"):
        ByteText(str(folder), pattern="*.rs").split()
    with pytest.raises(ValueError, match="less than one sample"):
        ByteText(str(folder), sequence_length=1_000_000, validation_share=0.2).setup("fit")


def test_the_entropy_of_equal_shares_is_the_logarithm_of_their_number() -> None:
    assert entropy(torch.tensor([3, 3, 7, 7, 9, 9], dtype=torch.uint8)) == pytest.approx(math.log(3))
    assert entropy(torch.zeros(5, dtype=torch.uint8)) == 0.0


def test_the_standard_library_is_the_default_text() -> None:
    training, validation = ByteText().split()
    names = {path.name for path in training} | {path.name for path in validation}
    assert {"argparse.py", "dataclasses.py", "typing.py"} <= names
    assert not any({"test", "site-packages"} & set(path.parts) for path in training)
    assert 0 < len(validation) < len(training) / 5


def test_weights_of_a_checkpoint_are_kept_in_the_type_of_the_run(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=32, num_key_value_heads=2, **sizes)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    for options in ({"pretrained": str(tmp_path)}, {"config": str(tmp_path)}):
        model = CausalLM(**options)  # type: ignore[arg-type]
        model.configure_model()
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
