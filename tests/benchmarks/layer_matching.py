"""Attention outputs matched layer by layer before the logits, beside logits alone.

    python -m tests.benchmarks.layer_matching FOLDER [SEED ...]

As `distillation`: the same hybrid, tokens, order, rates and samples, and the tokens after which 90
and 99 % of the lost needle score are back. In the first steps each layer gets the teacher's input
and its attention learns the teacher's output (squared error over the output's mean square); no
gradient passes from layer to layer. Then the KL divergence of the logits, as alone in "logits". In
"larger rates" attention of layers with sliding heads has three times the rate, in "all rates
larger" every weight.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bosch.model.head_table import heads_by_window
from bosch.model.interface import attention_modules
from stages.materialize.stage import MODEL
from stages.train.data import PackedSequences, collate
from stages.train.distillation import TeacherLoss, load_teacher
from stages.train.model import load_for_training
from stages.train.optimizer import make_optimizer
from stages.train.schedule import make_schedule
from stages.train.watch import make_needle_watch
from tests.benchmarks.distillation import compare, config_of

CPU = torch.device("cpu")
EVERY = 8  # steps between scores
MATCHED = {"logits": 0, "32 steps matched": 32, "64 steps matched": 64, "larger rates": 0,
           "all rates larger": 0}  # fmt: skip
FACTOR = 3.0


def matching_loss(student: Any, teacher: Any, input_ids: Tensor) -> Tensor:
    """Mean over layers of the relative squared error of attention's output."""
    inputs: list[Tensor] = []
    wanted: list[Tensor] = []
    given: list[Tensor] = []

    def note_input(_module: Any, args: Any) -> None:
        inputs.append(args[0])

    def note(outputs: list[Tensor]) -> Any:
        return lambda _module, _args, output: outputs.append(output[0])

    def use_input(number: int) -> Any:
        return lambda _module, args: (inputs[number], *args[1:])

    layers = teacher.get_decoder().layers
    hooks = [layer.register_forward_pre_hook(note_input) for layer in layers]
    hooks += [
        attention.register_forward_hook(note(wanted)) for attention in attention_modules(teacher)
    ]
    decoder = student.get_decoder()
    for number, layer in enumerate(decoder.layers):
        hooks.append(layer.register_forward_pre_hook(use_input(number)))
    hooks += [
        attention.register_forward_hook(note(given)) for attention in attention_modules(student)
    ]
    with torch.no_grad():
        teacher(input_ids, None)
    decoder(input_ids=input_ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    assert len(given) == len(wanted) == len(layers)
    errors = [
        (own - other).square().mean() / other.square().mean()
        for own, other in zip(given, wanted, strict=True)
    ]
    return torch.stack(errors).mean()


def train(variant: str, seed: int, inputs: dict[str, Path]) -> dict[int, float]:
    """Needle score by tokens."""
    config = config_of(seed, [])
    section, runtime = config.section, config.runtime
    folder = inputs["materialize"] / MODEL
    teacher = load_teacher(folder, config.model, section, runtime, CPU)
    distillation = TeacherLoss(teacher, 1.0, 1.0)
    student: Any = load_for_training(folder, config.model, section, runtime, seed, distillation)
    watch = make_needle_watch(config, inputs["prepare"])
    data = PackedSequences(inputs["prepare"] / "train")
    schedule = make_schedule(section, runtime, data.sequence_length, 1, on_gpu=False)
    data.arrange(schedule, seed)
    optimizer: Any = make_optimizer(student, section)
    changed = {
        "larger rates": _changed_attention(student), "all rates larger": {*student.parameters()}
    }.get(variant, set())  # fmt: skip
    _split_groups(optimizer, changed)
    scores = {}
    for step in range(1, schedule.steps + 1):
        rate = section.learning_rate * schedule.learning_rate_factor(step - 1)
        for group in optimizer.param_groups:
            group["lr"] = rate * (FACTOR if group["changed"] else 1.0)
        start = (step - 1) * schedule.sequences
        batch = collate([data[index] for index in range(start, start + schedule.sequences)])
        if step <= MATCHED[variant]:
            loss = matching_loss(student, teacher, batch["input_ids"])
        else:
            loss = student(**batch, num_items_in_batch=batch["labels"][:, 1:].numel())["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), section.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            scores[step * section.batch_tokens] = watch.score(student, CPU)
    return scores


def _changed_attention(student: Any) -> set[nn.Parameter]:
    rows = zip(attention_modules(student), heads_by_window(student.config), strict=True)
    return {weight for module, row in rows if set(row) != {None} for weight in module.parameters()}


def _split_groups(optimizer: Any, changed: set[nn.Parameter]) -> None:
    groups, optimizer.param_groups = optimizer.param_groups, []
    for group in groups:
        for is_changed in (False, True):
            chosen = [weight for weight in group["params"] if (weight in changed) is is_changed]
            if chosen:
                optimizer.add_param_group({**group, "params": chosen, "changed": is_changed})


def main(folder: Path, seeds: list[int]) -> None:
    def trained(name: str, seed: int, inputs: dict[str, Path]) -> dict[int, float]:
        file = folder / f"{name.replace(' ', '-')}-{seed}.json"
        if not file.exists():
            file.write_text(json.dumps(train(name, seed, inputs)))
        return {int(tokens): score for tokens, score in json.loads(file.read_text()).items()}

    compare(folder, seeds, MATCHED, trained)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(seed) for seed in sys.argv[2:]] or [1, 2, 3])
