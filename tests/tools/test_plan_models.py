"""What a plan knows of a model: presets, configs, named shapes and modules, and what is refused of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from canzona_compile.errors import CanzonaError
from canzona_compile.tools.planning.weights import (
    Model,
    ModelWeight,
    from_config,
    from_module,
    from_shapes,
    parse_split,
    preset,
    presets,
    read_object,
)

BOTH = ("qkv", "gate-up")
# Parameters in billions, as the models' cards say.
PUBLIC = {
    "qwen3-0.6b": 0.596,
    "qwen3-1.7b": 1.721,
    "qwen3-4b": 4.022,
    "qwen3-8b": 8.191,
    "qwen3-14b": 14.768,
    "qwen3-32b": 32.762,
    "qwen3-30b-a3b": 30.532,
    "qwen3-235b-a22b": 235.094,
}
ACTIVE = {"qwen3-30b-a3b": 3.0, "qwen3-235b-a22b": 21.5}  # that a token meets, of the head and all matrices


def refusal(caught: pytest.ExceptionInfo[CanzonaError]) -> tuple[str, str, str]:
    error = caught.value
    return error.problem, error.at or "", error.hint or ""


# -- presets ---------------------------------------------------------------------------------------


def test_presets_are_those_that_are_public() -> None:
    assert presets().keys() == PUBLIC.keys()


@pytest.mark.parametrize("name", PUBLIC)
def test_parameters_are_as_many_as_the_public_models_have(name: str) -> None:
    model = preset(name, BOTH)
    assert round(sum(weight.elements for weight in model.everything) / 1e9, 3) == PUBLIC[name]
    assert {weight.layer for weight in model.weights} == set(range(model.layers))
    assert len({weight.name for weight in model.weights}) == len(model.weights)


@pytest.mark.parametrize("name", ACTIVE)
def test_a_token_meets_few_experts(name: str) -> None:
    assert preset(name, BOTH).active / 1e9 == pytest.approx(ACTIVE[name], rel=0.02)


@pytest.mark.parametrize(
    ("split", "matrices"), [((), 4 * 64), (("qkv",), 6 * 64), (("gate-up",), 5 * 64), (BOTH, 7 * 64)]
)
def test_splits_change_matrices_and_no_elements(split: tuple[str, ...], matrices: int) -> None:
    model, apart = preset("qwen3-32b", split), preset("qwen3-32b", BOTH)
    assert (len(model.weights), len(apart.weights)) == (matrices, 448)
    assert sum(w.elements for w in model.everything) == sum(w.elements for w in apart.everything)
    assert (model.elements, model.active) == (apart.elements, apart.active)


def test_weights_of_a_layer() -> None:
    fused, apart = (preset("qwen3-0.6b", split).weights for split in ((), BOTH))
    assert fused[:4] == (
        ModelWeight("layers.0.self_attn.qkv_proj.weight", (4096, 1024), 0, 0),
        ModelWeight("layers.0.self_attn.o_proj.weight", (1024, 2048), 0, 1),
        ModelWeight("layers.0.mlp.gate_up_proj.weight", (6144, 1024), 0, 0),
        ModelWeight("layers.0.mlp.down_proj.weight", (1024, 3072), 0, 1),
    )
    assert [(w.name.split(".")[3], w.shape, w.tensor_dim) for w in apart[-7:]] == [
        ("q_proj", (2048, 1024), 0),
        ("k_proj", (1024, 1024), 0),
        ("v_proj", (1024, 1024), 0),
        ("o_proj", (1024, 2048), 1),
        ("gate_proj", (3072, 1024), 0),
        ("up_proj", (3072, 1024), 0),
        ("down_proj", (1024, 3072), 1),
    ]
    assert apart[-1].layer == 27


def test_experts_are_matrices_of_their_own() -> None:
    layer = preset("qwen3-30b-a3b", BOTH).weights[: 4 + 3 * 128]
    assert [weight.expert for weight in layer] == [None] * 4 + [e for e in range(128) for _ in range(3)]
    assert layer[-1] == ModelWeight("layers.0.mlp.experts.127.down_proj.weight", (2048, 768), 0, 1, 127)


def test_a_preset_that_there_is_not_names_all_that_there_are() -> None:
    with pytest.raises(CanzonaError) as caught:
        preset("gpt-5", BOTH)
    problem, at, hint = refusal(caught)
    assert (problem, at) == ("there is no model 'gpt-5'", "model")
    assert all(name in hint for name in (*PUBLIC, "--hf-config", "--params"))


def test_splits_in_words() -> None:
    found = [parse_split(text) for text in ("qkv,gate-up", "qkv", "gate-up", "none")]
    assert found == [BOTH, ("qkv",), ("gate-up",), ()]


@pytest.mark.parametrize("text", ["", "q", "qkv, gate-up", "qkv,none"])
def test_splits_that_there_are_not(text: str) -> None:
    with pytest.raises(CanzonaError, match=r"there is no split '.*'\n  at:   split\n  hint: qkv, gate-up, both"):
        parse_split(text)


# -- configs ---------------------------------------------------------------------------------------

DENSE = {  # as on the hub, less what no plan needs
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
ROUTED = DENSE | {
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}


def configured(folder: Path, config: Any, split: tuple[str, ...] = BOTH) -> Model:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return from_config(path, split)


@pytest.mark.parametrize(("name", "config"), [("qwen3-0.6b", DENSE), ("qwen3-30b-a3b", ROUTED)])
@pytest.mark.parametrize("split", [(), BOTH], ids=["fused", "apart"])
def test_a_config_gives_the_model_of_the_preset(
    name: str, config: dict[str, Any], split: tuple[str, ...], tmp_path: Path
) -> None:
    found, expected = configured(tmp_path, config, split), preset(name, split)
    assert found.name == config["model_type"]
    assert (found.weights, found.everything) == (expected.weights, expected.everything)
    numbers = ("layers", "heads", "kv_heads", "experts", "active")
    assert {n: getattr(found, n) for n in numbers} == {n: getattr(expected, n) for n in numbers}


def test_fields_that_a_config_may_leave_out(tmp_path: Path) -> None:
    few = {k: v for k, v in DENSE.items() if k not in ("head_dim", "num_key_value_heads", "tie_word_embeddings")}
    model = configured(tmp_path, few | {"head_dim": None})
    assert {w.shape for w in model.weights[:4]} == {(1024, 1024)}  # 16 heads of 64, each with keys of its own
    assert (model.heads, model.kv_heads, model.experts) == (16, 16, 0)
    assert sum(w.elements for w in model.everything if w.elementwise) > 2 * 151936 * 1024


def test_experts_by_other_names(tmp_path: Path) -> None:
    mixtral = DENSE | {"num_local_experts": 4}  # their size is that of a dense MLP
    assert configured(tmp_path, mixtral).weights[4].shape == (3072, 1024)
    assert configured(tmp_path, DENSE | {"n_routed_experts": 4, "moe_intermediate_size": 64}).experts == 4


REQUIRED = ("num_attention_heads", "hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size")


def refused(folder: Path, config: Any) -> tuple[str, str]:
    """The problem of a config, and what to do."""
    with pytest.raises(CanzonaError) as caught:
        configured(folder, config)
    problem, at, hint = refusal(caught)
    assert at == str(folder / "config.json")
    return problem, hint


@pytest.mark.parametrize("name", REQUIRED)
def test_a_config_without_a_field(name: str, tmp_path: Path) -> None:
    found = refused(tmp_path, {k: v for k, v in DENSE.items() if k != name})
    assert found == (f"the field {name!r} is missing", "is it the config of a decoder?")


@pytest.mark.parametrize("value", [0, -1, "64", 64.0, True, 2**40, [64]], ids=str)
@pytest.mark.parametrize("name", [*REQUIRED, "head_dim", "num_key_value_heads", "num_experts"])
def test_a_field_that_is_no_count(name: str, value: object, tmp_path: Path) -> None:
    found = refused(tmp_path, DENSE | {name: value})
    assert found == (f"{name} is {value!r}, not a positive integer", "copy it from the model's config.json")


@pytest.mark.parametrize(
    ("changes", "says", "remedy"),
    [
        ({"hidden_size": 1023, "head_dim": None}, "hidden_size 1023 is not a multiple of 16 heads", "add head_dim"),
        ({"num_key_value_heads": 3}, "num_attention_heads 16 is not a multiple of num_key_value_heads 3", "omit"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok 5 is more than the 4", "each token"),
        *(
            (changes, f"{name} is {changes[name]}", "--params")
            for name, changes in {
                "decoder_sparse_step": {"num_experts": 4, "decoder_sparse_step": 2},
                "mlp_only_layers": {"num_experts": 4, "mlp_only_layers": [0]},
                "n_shared_experts": {"n_routed_experts": 4, "n_shared_experts": 1},
                "first_k_dense_replace": {"n_routed_experts": 4, "first_k_dense_replace": 1},
                "kv_lora_rank": {"kv_lora_rank": 512},
            }.items()
        ),
        ({"num_hidden_layers": 2**30}, "matrices of up to", "num_hidden_layers"),
        ({"intermediate_size": 2**30, "hidden_size": 2**30}, "matrices of up to", "intermediate_size"),
    ],
)
def test_configs_that_contradict_themselves_or_are_of_other_models(
    changes: dict[str, Any], says: str, remedy: str, tmp_path: Path
) -> None:
    problem, hint = refused(tmp_path, DENSE | changes)
    assert (says in problem, remedy in hint) == (True, True), (problem, hint)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        *(
            (text, "the file is not JSON")
            for text in (b"", b"{'a': 1}", b"[" * 100_000, b"\xef\xbb\xbf{}", b'{"\xe9": 1}')
        ),
        (b"[1]", "the file is not a JSON object"),
        (None, "it cannot be read: No such file"),
    ],
    ids=["empty", "Python", "deep", "a byte order mark", "Latin", "a list", "none"],
)
def test_files_that_hold_no_object(content: bytes | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CanzonaError) as caught:
        read_object(path)
    problem, at, hint = refusal(caught)
    assert (problem.startswith(says), at) == (True, str(path))
    assert hint


# -- shapes ----------------------------------------------------------------------------------------


def test_shapes_by_name() -> None:
    model = from_shapes(
        {
            "layers.0.q": [8, 4],
            "layers.12.o": {"shape": (4, 8), "tp": 1},
            "experts": {"shape": [6, 4, 8], "experts": True, "layer": 3, "tp": 2},
            "more": {"shape": [9, 4, 8], "experts": True},
            "block2.w": {"shape": [3, 3, 3, 3]},
        },
        "mine",
        "shapes",
    )
    assert model.weights == (
        ModelWeight("layers.0.q", (8, 4)),
        ModelWeight("layers.12.o", (4, 8), 12, 1),
        ModelWeight("experts", (6, 4, 8), 3, 2, None, True),
        ModelWeight("more", (9, 4, 8), 0, None, None, True),
        ModelWeight("block2.w", (3, 3, 3, 3)),
    )
    assert (model.name, model.layers, model.elements) == ("mine", 13, 32 + 32 + 192 + 288 + 81)
    assert (model.experts, model.heads, model.everything) == (3, 0, model.weights)  # what divides 6 and 9


@pytest.mark.parametrize(
    ("entry", "says", "remedy"),
    [
        ([8], "its shape is [8]", "[rows, columns]"),
        ([], "its shape is []", "[rows, columns]"),
        ([8, 0], "its shape is [8, 0]", "[rows, columns]"),
        ([8, -8], "its shape is [8, -8]", "[rows, columns]"),
        ([8, True], "its shape is [8, True]", "[rows, columns]"),
        ([8, 8.0], "its shape is [8, 8.0]", "[rows, columns]"),
        ("8x8", "its shape is '8x8'", "[rows, columns]"),
        (None, "its shape is None", "[rows, columns]"),
        ({"tp": 0}, "its shape is None", "[rows, columns]"),
        ([2**30, 2**30], "more than 2^48 elements", "number of elements"),
        ({"shape": [8, 8], "tp": 2}, "tp is 2, which is not a dim of [8, 8]", "omit it"),
        ({"shape": [8, 8], "tp": -1}, "tp is -1, which is not a dim of [8, 8]", "omit it"),
        ({"shape": [8, 8], "tp": True}, "tp is True", "omit it"),
        ({"shape": [8, 8], "tp": 1.0}, "tp is 1.0", "omit it"),
        ({"shape": [8, 8], "layer": "first"}, "layer is 'first', which is not a layer number", "count layers from 0"),
        ({"shape": [8, 8], "layer": -1}, "layer is -1", "count layers from 0"),
        ({"shape": [8, 8], "layer": None}, "layer is None", "count layers from 0"),
        ({"shape": [8, 8], "experts": True}, "experts is True for a shape of 2 dims", "three or more dims"),
        ({"shape": [4, 8, 8], "experts": "no"}, "experts is 'no'", "to true only"),
        ({"shape": [4, 8, 8], "experts": True, "tp": 0}, "tp is 0, the dim of experts", "ep"),
        ({"shape": [8, 8], "stage": 1}, "the field 'stage' is unknown", "shape, tp, experts, layer and elementwise"),
    ],
)
def test_shapes_that_cannot_be(entry: object, says: str, remedy: str) -> None:
    with pytest.raises(CanzonaError) as caught:
        from_shapes({"layers.0.q": entry}, "mine", "shapes.json")
    problem, at, hint = refusal(caught)
    assert says in problem
    assert at == "shapes.json: layers.0.q"
    assert remedy in hint


@pytest.mark.parametrize("name", ["", "a\nb", "\ud800", 3], ids=repr)
def test_names_that_cannot_be(name: Any) -> None:
    with pytest.raises(CanzonaError, match="is not a parameter name\n  at:   shapes"):
        from_shapes({name: [8, 8]}, "mine", "shapes")


def test_names_may_have_any_letters() -> None:
    names = ["名前.重み", "a b", "[red]x|y[/red]", "layers.².w"]
    model = from_shapes({name: [8, 8] for name in names}, "mine", "shapes")
    assert [(weight.name, weight.layer) for weight in model.weights] == [(name, 0) for name in names]


def test_a_model_without_parameters() -> None:
    with pytest.raises(CanzonaError, match="there are no matrices to plan\n  at:   shapes\n  hint: as in"):
        from_shapes({}, "mine", "shapes")


# -- modules ---------------------------------------------------------------------------------------


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.experts = nn.Parameter(torch.empty(4, 8, 8))
        self.norm = nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, 32, bias=False)
        self.again = self.layers[0]


def test_the_matrices_of_a_module_on_no_device() -> None:
    with torch.device("meta"):
        model = from_module(Decoder(), {"experts", "layers.0.weight", "layers.1.weight", "norm.weight"})
    assert model.weights == (
        ModelWeight("experts", (4, 8, 8)),
        ModelWeight("layers.0.weight", (8, 8)),
        ModelWeight("layers.1.weight", (8, 8), 1),
    )
    assert model.name == "Decoder"
    assert (
        sum(w.elements for w in model.everything if w.elementwise) == 2 * 32 * 8 + 4 * 8
    )  # embedding and head, norm and biases


def test_a_module_without_matrices() -> None:
    with pytest.raises(CanzonaError, match="there are no matrices to plan\n  at:   the module"):
        from_module(nn.LayerNorm(8), {"weight"})
