"""The head masks in recipes/masks, their format, and conversion to and from other formats."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from bosch.budget import swa_budget
from bosch.commands.mask.formats import WRITERS
from bosch.errors import UserError
from bosch.heads import HeadMask, HeadMaskFile
from bosch.journal import Journal
from bosch.model.fingerprint import model_fingerprint
from bosch.model.loading import load_model
from bosch.window import Window
from pipeline.cli import main
from pipeline.recipe.load import load_recipe
from recipes.masks.make_masks import masks_of_study, with_provenance

ROOT = Path(__file__).resolve().parents[2]
MASKS = sorted((ROOT / "recipes" / "masks").rglob("*.json"))
SCHEMA = json.loads(resources.files("bosch").joinpath("head_mask.schema.json").read_text())


@pytest.mark.parametrize("path", MASKS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_published_mask_has_its_method_ratio_and_origin_in_its_name(path: Path) -> None:
    file = HeadMaskFile.load(path)
    method, *options, ratio = path.stem.split("-")
    assert method == file.method
    for option in options:  # g4: search.head_granularity
        counts = file.mask.full_kv_heads_per_layer
        assert option[0] == "g" and not any(count % int(option[1:]) for count in counts)
    units = file.num_layers * file.num_key_value_heads
    assert file.mask.num_sliding == swa_budget(units, float(ratio))
    provenance = json.loads(path.read_text())["provenance"]
    assert {"recipe", "command", "git_commit"} <= provenance.keys()
    assert with_provenance(file, provenance) == path.read_text()


@pytest.mark.parametrize("path", MASKS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_recipe_accepts_each_published_mask(path: Path) -> None:
    file = HeadMaskFile.load(path)
    loaded = load_recipe(
        ROOT / json.loads(path.read_text())["provenance"]["recipe"],
        [
            "search.method=given", f"search.mask={path}", f"search.swa_ratio={file.swa_ratio}",
            f"search.window_size={file.window_size}", "search.points=null",
        ],
    )  # fmt: skip
    assert loaded.recipe.model.path == str(ROOT / file.model)


def test_for_each_study_the_mask_of_the_largest_budget_is_published(tmp_path: Path) -> None:
    """Keys leave out a default budget; masks of several windows or another model are skipped.

    Of two equal budgets the mask of more examples is published.
    """
    recipe = Path("recipes", "study", "enumerable.yaml")
    loaded = load_recipe(ROOT / recipe, []).recipe
    model = model_fingerprint(load_model(loaded.model.path, **loaded.model.loading))
    masks = [HeadMask.from_swa_kv_heads([[head], [], []], 4).key for head in range(4)]
    journal = Journal(tmp_path / "results.jsonl")
    for mask, window, examples, settings in zip(
        [masks[0], *masks], (64, 64, 64, 64, [16, 64]), (96, 96, 16, 96, 96),
        ({}, {"budget_per_layer": 16}, {}, {}, {}), strict=True,
    ):  # fmt: skip
        settings |= {"swa_ratio": 0.25, "seed": loaded.seed}
        method = "moa" if window != 64 else "bosch"
        key = {"kind": "search", "method": method, "window_size": window, "sinks": 0}
        # The first entry is another model's.
        key["model"] = model if (tmp_path / "results.jsonl").exists() else "another"
        result = {"mask": mask, "score": 1.0, "costs": {"full_forward_equivalents": 1.0}}
        result["examples"] = examples
        journal.append({"key": key | {"settings": settings}, "result": result})
    (found,) = masks_of_study(recipe, tmp_path)
    assert found[0] == "bosch-0.25" and found[1].mask.key == masks[2]


def test_the_schema_has_the_fields_of_the_file() -> None:
    mask = HeadMask.of_choices([[0, 1, 2]])
    one = HeadMaskFile.of(
        HeadMask(mask.is_full), Window(8), model="m", method="rand", swa_ratio=2 / 3
    ).content
    several = HeadMaskFile.of(
        mask, [Window(8), Window(4)], model="m", method="rand", swa_ratio=2 / 3
    ).content
    biased = HeadMaskFile.of(
        mask, [Window(8), Window(4)], model="m", method="rand", swa_ratio=2 / 3,
        sink_bias=[[0.5] * 6],
    ).content  # fmt: skip
    assert one.keys() | biased.keys() | {"provenance"} == set(SCHEMA["properties"])
    own = {"window_size"}, {"window_sizes"}, {"window_sizes", "sink_bias"}
    for content, mine, number in zip((one, several, biased), own, (1, 2, 3), strict=True):
        assert content["format"] == number and mine <= content.keys()
        assert content.keys() - mine - {"score", "seed"} == set(SCHEMA["required"])
    assert MASKS, "there is no mask to check"
    for path in MASKS:
        content = json.loads(path.read_text())
        assert set(SCHEMA["required"]) <= content.keys() <= set(SCHEMA["properties"])


_MASK = HeadMask(np.array([[1, 0, 0], [0, 0, 1], [1, 1, 1]], dtype=bool))
_HEADS = ["--attention-heads", "6"]
_BOTH = [*_HEADS, "--key-value-heads", "3"]
_OF_SIZE = (
    '{"headwise_config": {"0": [1, 1, 0, 0, 0, 0], "sink_token_num": 0, "swa_token_num": %d}}'
)


def _saved(folder: Path, sinks: int = 2) -> Path:
    path = folder / "head_mask.json"
    HeadMaskFile.of(_MASK, Window(10, sinks), model="m", method="rand", swa_ratio=4 / 9).save(path)
    return path


@pytest.mark.parametrize("form", ["duoattention", "rtp_llm"])
def test_masks_of_several_windows_are_refused_by_other_formats(form: str, tmp_path: Path) -> None:
    path = tmp_path / "head_mask.json"
    HeadMaskFile.of(
        HeadMask.of_choices([[0, 1, 2]]), [Window(4), Window(9)],
        model="m", method="given", swa_ratio=2 / 3,
    ).save(path)  # fmt: skip
    file = HeadMaskFile.load(path)
    with pytest.raises(UserError, match=r"takes one window for all .* windows of 4 and 9"):
        WRITERS[form](file, tmp_path / "out", 6)


@pytest.mark.parametrize("form", ["duoattention", "rtp_llm"])
@pytest.mark.parametrize(("choices", "window"), [([[0, 2, 2]], 4), ([[0, 0, 0]], 9)])
def test_windows_that_a_fronts_point_does_not_use_are_left_out(
    form: str, choices: list[list[int]], window: int, tmp_path: Path
) -> None:
    mask = HeadMask.of_choices(choices)
    file = HeadMaskFile.of(
        mask, [Window(9), Window(4)], model="m", method="front", swa_ratio=mask.swa_ratio
    )
    WRITERS[form](file, tmp_path / "out", 6)
    imports = _BOTH if form == "rtp_llm" else []
    arguments = ["mask", "import", str(tmp_path / "out"), str(tmp_path / "back.json")]
    assert main([*arguments, "--format", form, *imports]) == 0
    back = HeadMaskFile.load(tmp_path / "back.json")
    assert back.windows == (Window(window),) and (back.mask.is_full == mask.is_full).all()


@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize(
    ("form", "export", "imports"),
    [("duoattention", [], []), ("rtp_llm", _HEADS, _BOTH)],
)
def test_a_mask_survives_conversion_to_a_format_and_back(
    tmp_path: Path, form: str, export: list[str], imports: list[str], sinks: int
) -> None:
    other, back = str(tmp_path / "other"), tmp_path / "back.json"
    source = str(_saved(tmp_path, sinks))
    assert main(["mask", "export", source, other, "--format", form, *export]) == 0
    assert main(["mask", "import", other, str(back), "--format", form, *imports]) == 0
    read = HeadMaskFile.load(back)
    assert (read.mask, read.window_size, read.sinks) == (_MASK, 10, sinks)
    assert read.method == form


def test_rtp_llm_counts_only_the_keys_before_the_query(tmp_path: Path) -> None:
    target = tmp_path / "config.json"
    arguments = ["mask", "export", str(_saved(tmp_path)), str(target), "--format", "rtp_llm"]
    assert main([*arguments, *_HEADS]) == 0
    settings = json.loads(target.read_text())["headwise_config"]
    assert settings["swa_token_num"] == 9 and settings["sink_token_num"] == 2
    # Up to 12 tokens a window of 10 with 2 sinks hides nothing.
    assert settings["seqlen_threshold"] == 12
    assert settings["0"] == [1, 1, 0, 0, 0, 0] and settings["2"] == [1] * 6


def test_gate_scores_are_read_as_a_ranking(tmp_path: Path) -> None:
    """The heads with the lowest scores slide; published files have this form."""
    scores = "6.05e-01\t0.0e+00\t9.6e-01\n2.49e-02\t1.0e+00\t0.0e+00\n"
    (tmp_path / "full_attention_heads.tsv").write_text(scores)
    (tmp_path / "config.json").write_text('{"sink_size": 128, "recent_size": 256, "lr": 0.02}')
    for ratio, heads in (("0", [[], []]), ("1", [[0, 1, 2]] * 2), ("0.4", [[1], [0, 2]])):
        target = tmp_path / f"{ratio}.json"
        arguments = ["mask", "import", str(tmp_path), str(target), "--format", "duoattention"]
        assert main([*arguments, "--swa-ratio", ratio, "--model", "org/name"]) == 0
        read = HeadMaskFile.load(target)
        assert (read.mask.swa_kv_heads, read.swa_ratio) == (heads, read.mask.swa_ratio)
        assert (read.window_size, read.sinks, read.model) == (256, 128, "org/name")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--format", "rtp_llm"], "--attention-heads: rtp-llm lists query heads"),
        (["--format", "rtp_llm", *_HEADS, "--model", "m"], "--model: has no effect on export"),
    ],
)
def test_masks_that_a_format_cannot_hold_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    source = str(_saved(tmp_path, sinks=0))
    assert main(["mask", "export", source, str(tmp_path / "out"), *arguments]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("form", "content", "extra", "sentence"),
    [
        ("duoattention", "0.5\t0.1\n", [], "--swa-ratio"),
        (
            "duoattention",
            "0.5\t0.1\n0.2\n",
            ["--swa-ratio", "0.5"],
            "a row of equal length for each layer\n",
        ),
        ("duoattention", "0.5\tx\n", ["--swa-ratio", "1"], "expected rows of numbers (could not"),
        ("duoattention", "nan\t1\n", ["--swa-ratio", "1"], "expected finite gate scores"),
        ("duoattention", "1\t0\n" * 1001, [], "1,001 layers of 2 KV heads; that is no model"),
        ("rtp_llm", _OF_SIZE % (2**31 - 1), _BOTH, "sinks are 2,147,483,648; expected fewer"),
        ("rtp_llm", _OF_SIZE % -1, _BOTH, "swa_token_num must be an integer of at least 0"),
        ("duoattention", "0.5\t0.1\n", ["--swa-ratio", "1.5"], "--swa-ratio: expected a share"),
        ("rtp_llm", '{"a": 1}', _BOTH, "expected rtp-llm's file, with an object headwise_config"),
        ("rtp_llm", '{"headwise_config": {"0": [1, 0, 1, 1, 0, 0]}}', _BOTH, "query heads of KV"),
        ("rtp_llm", '{"headwise_config": {"0": [1, 1, 0, 0]}}', _BOTH, "layer 0 has 4 query heads"),
        ("rtp_llm", '{"headwise_config": {"1": [1, 1]}}', _BOTH, 'from "0" on'),
        ("rtp_llm", "{}", [*_BOTH, "--swa-ratio", "0"], "--swa-ratio: has no effect on import"),
        ("duoattention", "1\t0\n", _HEADS, "--attention-heads: has no effect on import of duo"),
        ("rtp_llm", '{"headwise_config": {"0": [1, 1, 0, 0, 0, 0]}}', _BOTH, "swa_token_num"),
        ("rtp_llm", "{}", [], "--key-value-heads"),
        ("rtp_llm", '{"headwise_config": {"0": []}}', _BOTH, "a list of 0 and 1"),
        ("rtp_llm", '{"headwise_config": {"0": [1, 1, 2, 2]}}', _BOTH, "a list of 0 and 1"),
        ("rtp_llm", '{"headwise_config": {"²": [1]}}', _BOTH, 'from "0" on'),
        ("rtp_llm", '{"headwise_config": {"00": [1]}}', _BOTH, 'from "0" on'),
        ("rtp_llm", '{"headwise_config": {"' + "9" * 5000 + '": [1]}}', _BOTH, 'from "0" on'),
        ("rtp_llm", "[" + "{}," * 150_000 + "{}]", _BOTH, "more than 200,000 values"),
        ("rtp_llm", "[]", _BOTH, "expected a JSON object"),
        ("rtp_llm", "no json", _BOTH, "cannot be read as JSON ("),
    ],
)
def test_damaged_files_are_reported_by_name(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    form: str,
    content: str,
    extra: list[str],
    sentence: str,
) -> None:
    source = tmp_path / "full_attention_heads.tsv"
    source.write_text(content)
    (tmp_path / "config.json").write_text('{"sink_size": 1, "recent_size": 2}')
    read = tmp_path if form == "duoattention" else source
    arguments = ["mask", "import", str(read), str(tmp_path / "m.json"), "--format", form, *extra]
    assert main(arguments) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "m.json").exists()


def test_a_file_in_the_place_of_duoattention_s_folder_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["mask", "import", str(_saved(tmp_path)), str(tmp_path / "m.json")]
    assert main([*arguments, "--format", "duoattention"]) == 2
    assert "expected DuoAttention's folder with full_attention_heads" in capsys.readouterr().err
