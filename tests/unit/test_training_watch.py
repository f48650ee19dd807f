"""Monitoring of a training: divergence, speed, needle scores, boards."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from bosch.errors import RunError
from bosch.hardware import DEVICES, device_named
from bosch.model.loading import load_model
from bosch.objective.decoder_shape import DecoderShape
from bosch.window import Window
from stages.context import Runtime
from stages.shape import stored_shape
from stages.stage import ModelInfo
from stages.train import decisions
from stages.train import run as training
from stages.train import watch as watching
from stages.train.data import PackedSequences, collate_documents
from stages.train.decisions import RestartTimer, step_timeout
from stages.train.loop import Loop
from stages.train.loss import install_loss
from stages.train.metrics import peak_flops, step_flops
from stages.train.schedule import make_schedule
from stages.train.stage import TrainConfig
from stages.train.storage import RestartPoints
from stages.train.trainable import restrict_training
from stages.train.watch import HeldOutWatch, NeedleWatch, make_needle_watch
from tests.hybrid_case import small_model
from tests.training_case import (
    SEQUENCE_LENGTH,
    TRAIN,
    make_case,
    metrics,
    stage_config,
    train_here,
    train_in_processes,
)

BASE = Path(__file__).resolve().parents[2] / "recipes" / "quickstart" / "base_model"


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_case(tmp_path_factory.mktemp("case"))


@pytest.fixture(scope="module")
def undisturbed(case: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    work_dir = tmp_path_factory.mktemp("undisturbed")
    train_here(case, work_dir)
    return work_dir


def poison(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """Make the losses of some steps NaN."""
    loss_of = Loop.loss_of

    def poisoned_loss(self: Loop, *args: Any) -> Any:
        loss = loss_of(self, *args)
        return loss * float("nan") if self.step in steps else loss

    monkeypatch.setattr(Loop, "loss_of", poisoned_loss)


def test_a_loss_that_is_not_finite_ends_training(
    case: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It first waits for the restart point that is being written."""
    publish = RestartPoints.publish

    def publish_late(self: RestartPoints, *args: Any) -> None:
        time.sleep(0.3)
        publish(self, *args)

    monkeypatch.setattr(RestartPoints, "publish", publish_late)
    poison(monkeypatch, 3)
    for _ in range(2):  # also after a resume
        with pytest.raises(RunError, match="diverged: loss is nan at step 3 "):
            train_here(case, tmp_path)
        assert (tmp_path / "restart" / "step-2").exists()
        assert not (tmp_path / "summary.json").exists()


def test_weights_broken_by_an_update_end_training_before_they_are_published(
    case: Path, tmp_path: Path
) -> None:
    """The loss and norm of that step belong to the weights before it, and are fine."""
    short = {"total_tokens": 128, "checkpoint_tokens": [128], "learning_rate": 1e38}
    with pytest.raises(RunError, match=r"diverged: the held-out loss is nan at step 1 .128 tokens"):
        train_here(
            case, tmp_path, train={**short, "warmup_ratio": 0.0},
            runtime={"heldout_every_steps": 1, "heldout_sequences": 4},
        )  # fmt: skip
    [step] = metrics(tmp_path)
    assert step["loss"] is not None and step["heldout_loss"] is None
    assert not (tmp_path / "checkpoints" / "tokens-128").exists()


def test_flops_of_a_step_are_those_of_its_heads(case: Path) -> None:
    """Three of the case's four KV heads slide, with a window of 6."""
    folder = case / "materialize" / "model"
    schedule = training.make_schedule(TrainConfig(**TRAIN), Runtime(), 32, 1, False)
    content = json.loads((folder / "config.json").read_text())
    shape = stored_shape(ModelInfo(content))
    expected = shape.training_flops(128, 32, {Window(6): 0.75})
    config = AutoConfig.from_pretrained(folder)
    assert step_flops(config, schedule, TrainConfig(**TRAIN)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("lora", "freeze"), [({}, "attention_only"), ({"lora": {"rank": 3}}, "none")]
)
def test_flops_of_a_step_leave_out_frozen_weights(case: Path, lora: Any, freeze: str) -> None:
    """As torch counts those of the linear maps."""
    folder = case / "materialize" / "model"
    config, train = AutoConfig.from_pretrained(folder), TrainConfig(**TRAIN, **lora, freeze=freeze)
    schedule = training.make_schedule(train, Runtime(), 32, 1, False)
    model = load_model(folder, dtype=torch.float32)
    restrict_training(model, train)
    install_loss(model)
    ids = torch.zeros((4, 32), dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids)["loss"].backward()
    whole = training.make_schedule(TrainConfig(**TRAIN), Runtime(), 32, 1, False)
    everything = step_flops(config, whole, TrainConfig(**TRAIN))
    left_out = everything - step_flops(config, schedule, train)
    # Below the lowest queries, keys and values no tensor has a gradient, so none passes further.
    lowest = 0.0
    if lora or freeze != "none":
        lowest = 2 * 128 * (32 * (32 + 16 + 16) + (3 * 3 * 32 if lora else 0))
    linear = 6 * 128 * DecoderShape.of(config).active_parameters
    # The few weights of norms count like those of linear maps.
    counted = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    assert counted == pytest.approx(linear - left_out - lowest, rel=1e-3)
    taught = train.model_copy(update={"teacher": "original"})
    more = step_flops(config, schedule, taught) - step_flops(config, schedule, train)
    assert more == pytest.approx(DecoderShape.of(config).forward_flops(128, 32))


def test_devices_are_recognised_by_their_drivers_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, key in {
        "NVIDIA A800-SXM4-80GB": "a800", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200",
        "NVIDIA GeForce RTX 4090": "rtx4090", "NVIDIA L40S": "l40s",
    }.items():  # fmt: skip
        assert device_named(name) is DEVICES[key]
    # NVIDIA's data sheets, half of the figures for sparse products.
    for name, sparse in {
        "NVIDIA H100 PCIe": 1513, "NVIDIA H100 NVL": 1671, "NVIDIA H200 NVL": 1671,
        "NVIDIA GB200": 5000,
    }.items():  # fmt: skip
        device = device_named(name)
        assert device is not None and device.tflops == pytest.approx(sparse / 2, abs=1)
    for other in (
        "AMD EPYC cpu",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA RTX A1000 Laptop GPU",
        "NVIDIA H100 PCIe MIG 1g.10gb",
    ):
        assert device_named(other) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, peak in (("NVIDIA H100 80GB HBM3", 3 * 989e12), ("another", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        assert peak_flops(3) == peak


def made_samples(folder: Path) -> list[tuple[list[int], int]]:
    """Prompts with the model's own answers; two of five have other answers."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    samples = []
    for number, answer in enumerate((1, 2, 3, 1, 2)):
        ids = [(number + 3 * n) % 64 for n in range(9 + number)]
        for _ in range(answer):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if number > 2:
            ids[-1] = (ids[-1] + 1) % 64
        samples.append((ids, answer))
    return samples


def test_needle_scores_are_those_of_the_model_and_change_no_loss(
    case: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The score after the last step is known."""
    watch = NeedleWatch(made_samples(undisturbed / "checkpoints" / "tokens-1280"), every=5)
    monkeypatch.setattr(training, "make_needle_watch", lambda config, prepared: watch)
    train_here(case, tmp_path)
    steps = metrics(tmp_path)
    scores = {step["step"]: step.pop("needle_score") for step in steps if "needle_score" in step}
    assert list(scores) == [5, 10] and scores[10] == 3 / 5
    assert steps == metrics(undisturbed)


def test_needles_are_the_first_calibration_examples(tmp_path: Path) -> None:
    records = [{"input_ids": [*range(5 + n)], "answer_length": 1 + n} for n in range(4)]
    lines = map(json.dumps, records)
    (tmp_path / "calibration.jsonl").write_text("\n".join(lines))
    runtime = Runtime(needle_every_steps=3, needle_samples=3)
    watch, model, asked = make_needle_watch(runtime, {"search": tmp_path}), torch.nn.Module(), []

    def forward(input_ids: Any, labels: Any, measure: Any) -> Any:
        asked.append((input_ids[0].tolist(), int((labels >= 0).sum())))
        return {"values": torch.tensor([len(asked) == 2])}

    model.forward = forward  # type: ignore[method-assign]
    assert watch is not None
    assert [step for step in range(1, 9) if watch.is_due(step, 8)] == [3, 6, 8]
    assert watch.score(model, torch.device("cpu")) == 2 / 3 and model.training
    assert asked == [(record["input_ids"], record["answer_length"]) for record in records[:3]]
    assert make_needle_watch(Runtime(), {}) is None


@pytest.mark.parametrize(("processes", "sharing"), [(1, 1), (3, 1), (4, 2)])
def test_processes_score_every_needle_once_in_equally_many_passes(
    processes: int, sharing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that share a sample compute it in whole chunks; only one of them counts it."""
    samples = [([length] * length, 2) for length in (5, 6, 8, 9, 11)]
    monkeypatch.setattr(watching, "processes", lambda: processes)
    monkeypatch.setattr(watching, "sum_over_processes", lambda values, device: values)
    total, read = 0.0, []
    for rank in range(processes):
        monkeypatch.setattr(watching, "rank", lambda rank=rank: rank)
        model, ids = torch.nn.Module(), []

        def forward(input_ids: Any, labels: Any, measure: Any, ids: list[int] = ids) -> Any:
            ids.append(int(input_ids[0, 0]))
            assert sharing == 1 or input_ids.shape[1] % (2 * sharing) == 0
            assert (labels[0] >= 0).nonzero()[:, 0].tolist() == [ids[-1] - 2, ids[-1] - 1]
            return {"values": torch.tensor([ids[-1] % 3 == 0])}

        model.forward = forward  # type: ignore[method-assign]
        total += NeedleWatch(samples, 1, sharing).score(model, torch.device("cpu"))
        read.append(ids)
    assert total == pytest.approx(3 / 5)  # of 5, 8 and 11
    replicas = processes // sharing
    assert {len(ids) for ids in read} == {-(-5 // replicas)}
    assert all(ids == read[rank // sharing * sharing] for rank, ids in enumerate(read))
    assert {length for ids in read for length in ids} == {5, 6, 8, 9, 11}


@pytest.mark.parametrize("processes", [1, 2])
def test_the_held_out_loss_is_that_of_sequences_never_trained_on(
    case: Path, tmp_path: Path, processes: int
) -> None:
    """Three sequences: one of two processes runs a sequence only because the other does."""
    runtime = {"heldout_every_steps": 8, "heldout_sequences": 3}
    runtime |= {"sharding": "none" if processes == 1 else "fsdp"}
    train = {"total_tokens": 1024, "checkpoint_tokens": [], "document_masking": True}
    if processes == 1:
        train_here(case, tmp_path, train=train, runtime=runtime)
    else:
        done = train_in_processes(case, tmp_path, processes, train=train, runtime=runtime)
        assert done.returncode == 0, done.stderr
    config = stage_config(train=train)
    data = PackedSequences(case / "prepare" / "train")
    data.arrange(make_schedule(config.section, Runtime(), SEQUENCE_LENGTH, 1, False), config.seed)
    read = {bytes(data[index]["input_ids"]) for index in range(len(data))}
    rows = data.held_out(3)
    assert len(read) == 32 and not read & {bytes(row["input_ids"]) for row in rows}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoints" / "tokens-1024")
    batch = collate_documents(rows)
    with torch.no_grad():
        logits = model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
    expected = torch.nn.functional.cross_entropy(
        logits.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    )
    (score,) = (step for step in metrics(tmp_path) if "heldout_loss" in step)
    assert score["step"] == 8 and len(score["heldout_by_position"]) == 4
    assert score["heldout_loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert max(score["heldout_by_position"]) > score["heldout_loss"]
    assert len(data.held_out(8)) == 8


def test_a_sequence_that_is_run_again_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With three sequences on two processes, the second one repeats one."""
    model, device = small_model("qwen3_moe"), torch.device("cpu")
    install_loss(model)
    ids = [torch.arange(24)[None] % tokens for tokens in (50, 11, 7)]
    batches = [{"input_ids": row, "labels": row} for row in ids]
    alone = HeldOutWatch(batches[1:2], 1).score(model, device)
    for name, value in (("processes", 2), ("rank", 1)):
        monkeypatch.setattr(watching, name, lambda value=value: value)
    monkeypatch.setattr(watching, "sum_over_processes", lambda values, device: values)
    score = HeldOutWatch(batches, 1).score(model, device)
    assert score.keys() == alone.keys()
    for name, value in alone.items():
        assert score[name] == pytest.approx(value), name


@pytest.mark.parametrize(
    ("seconds", "minutes"),
    [([1.0] * 4, 15), ([1.0] * 5, 2), ([30.0] * 9 + [900.0], 10), ([90.0] * 20, 15)],
)
def test_the_time_limit_of_a_step_is_a_multiple_of_the_median_step(
    seconds: list[float], minutes: float
) -> None:
    assert step_timeout(seconds, 15) == minutes


def test_minutes_until_a_restart_point_count_from_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every five steps of three minutes each, and after ten minutes without a point."""
    step = 0
    monkeypatch.setattr(decisions, "time", SimpleNamespace(monotonic=lambda: 180.0 * step))
    runtime = Runtime(save_every_steps=5, save_every_minutes=10)
    timer, due = RestartTimer(runtime, torch.device("cpu")), []
    for step in range(1, 11):
        due += [step] * timer.decide(step)[0]
    assert due == [4, 5, 9, 10]


def test_training_in_a_thread_installs_no_signal_handlers() -> None:
    timer, entered = RestartTimer(Runtime(), torch.device("cpu")), []

    def run() -> None:
        with timer.signals():
            entered.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert entered == [True]


@pytest.mark.parametrize("training", [True, False])
def test_scoring_keeps_the_mode_of_the_model(training: bool) -> None:
    """In evaluation mode the next steps would have no dropout and recompute no activations."""
    model = small_model().train(training)
    install_loss(model)
    ids, device = torch.arange(8)[None], torch.device("cpu")
    modes: list[bool] = []
    caches: list[Any] = []
    model.register_forward_pre_hook(lambda *_: modes.append(model.training))
    model.get_decoder().register_forward_hook(lambda *call: caches.append(call[2].past_key_values))
    NeedleWatch([([1, 2], 1)], 1).score(model, device)
    assert model.training == training
    labels = ids.masked_fill((ids == 1) | (ids == 2), -100)  # no predicted token in a quarter
    score = HeldOutWatch([{"input_ids": ids, "labels": labels}], 1).score(model, device)
    assert score["heldout_by_position"][0] is None and min(score["heldout_by_position"][1:]) > 0
    assert model.training == training
    nothing = {"input_ids": ids, "labels": torch.full_like(ids, -100)}
    assert HeldOutWatch([nothing], 1).score(model, device) == {}
    assert modes == [False] * 3 and caches == [None] * 3


def test_a_checkpoints_card_counts_the_tokens_of_whole_steps(case: Path, tmp_path: Path) -> None:
    train_here(case, tmp_path, train={"checkpoint_tokens": [700, 1280]})
    card = (tmp_path / "checkpoints" / "tokens-700" / "README.md").read_text()
    assert "| continual pretraining | 768 tokens |" in card
