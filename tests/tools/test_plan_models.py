"""What a plan knows of a model: presets, configs, named shapes and modules, and what is refused of each."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from canzona_compile.errors import CanzonaError
from canzona_compile.tools.planning.configs import module_of, presets, read_object
from canzona_compile.tools.planning.plan import model_of
from canzona_compile.tools.planning.weights import (
    Model,
    ModelWeight,
    arranged,
    from_module,
    from_shapes,
    parse_split,
    tensor_dim,
)
from tests.harness.marks import first
from tests.harness.moe_models import CONFIGS

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of transformers
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
    "deepseek-v3": 671.026,
    "gpt-oss-120b": 116.829,
}
ACTIVE = {"qwen3-30b-a3b": 3.0, "qwen3-235b-a22b": 21.5, "deepseek-v3": 36.6, "gpt-oss-120b": 5.1}


def small(kind: str, **changes: Any) -> dict[str, Any]:
    """A config with what makes a kind of model special, in few layers."""
    return {"model_type": kind, **CONFIGS[kind], **changes}


def refusal(caught: pytest.ExceptionInfo[CanzonaError]) -> tuple[str, str, str]:
    error = caught.value
    return error.problem, error.at or "", error.hint or ""


# -- presets ---------------------------------------------------------------------------------------


def test_presets_are_those_that_are_public() -> None:
    assert presets().keys() == PUBLIC.keys()


@pytest.mark.parametrize("name", first(PUBLIC))
def test_parameters_are_as_many_as_the_public_models_have(name: str) -> None:
    model = model_of(name)
    assert round(sum(weight.elements for weight in model.everything) / 1e9, 3) == PUBLIC[name]
    assert {weight.layer for weight in model.weights} == set(range(model.layers))
    assert len({weight.name for weight in model.weights}) == len(model.weights)


@pytest.mark.parametrize("name", first(ACTIVE))
def test_a_token_meets_few_experts(name: str) -> None:
    assert model_of(name).active / 1e9 == pytest.approx(ACTIVE[name], rel=0.02)


@pytest.mark.parametrize(
    ("split", "matrices"), [("none", 4 * 28), ("qkv", 6 * 28), ("gate-up", 5 * 28), ("qkv,gate-up", 7 * 28)]
)
def test_splits_change_matrices_and_no_elements(split: str, matrices: int) -> None:
    model, apart = model_of("qwen3-0.6b", split), model_of("qwen3-0.6b")
    assert (len(model.weights), len(apart.weights)) == (matrices, 196)
    assert sum(w.elements for w in model.everything) == sum(w.elements for w in apart.everything)
    assert (model.elements, model.active) == (apart.elements, apart.active)


def test_weights_of_a_layer() -> None:
    fused, apart = (model_of("qwen3-0.6b", split).weights for split in ("none", "qkv,gate-up"))
    assert fused[:4] == (
        ModelWeight("model.layers.0.self_attn.qkv_proj.weight", (4096, 1024), 0, 0),
        ModelWeight("model.layers.0.self_attn.o_proj.weight", (1024, 2048), 0, 1),
        ModelWeight("model.layers.0.mlp.gate_up_proj.weight", (6144, 1024), 0, 0),
        ModelWeight("model.layers.0.mlp.down_proj.weight", (1024, 3072), 0, 1),
    )
    assert [(w.name.split(".")[4], w.shape, w.tensor_dim) for w in apart[-7:]] == [
        ("q_proj", (2048, 1024), 0),
        ("k_proj", (1024, 1024), 0),
        ("v_proj", (1024, 1024), 0),
        ("o_proj", (1024, 2048), 1),
        ("gate_proj", (3072, 1024), 0),
        ("up_proj", (3072, 1024), 0),
        ("down_proj", (1024, 3072), 1),
    ]
    assert apart[-1].layer == 27


def test_a_preset_that_there_is_not_names_all_that_there_are() -> None:
    with pytest.raises(CanzonaError) as caught:
        model_of("gpt-5")
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


def configured(folder: Path, config: Any, split: str = "qkv,gate-up") -> Model:
    (folder / "config.json").write_text(json.dumps(config))
    return model_of(folder, split)  # the folder stands for its file


def stacks(model: Model) -> dict[str, tuple[tuple[int, ...], int | None]]:
    return {w.name.split(".", 2)[2]: (w.shape, w.tensor_dim) for w in model.weights if w.experts}


def test_deepseek_v3_has_latent_attention_a_dense_layer_and_a_shared_expert(tmp_path: Path) -> None:
    model = configured(tmp_path, small("deepseek_v3"))
    found = {w.name.removeprefix("model.layers."): w for w in model.weights}
    assert found["0.self_attn.kv_b_proj.weight"].shape == (4 * (16 + 16), 32)
    assert found["0.self_attn.q_a_proj.weight"].tensor_dim is None, "its plan leaves attention to every rank"
    assert found["0.mlp.gate_proj.weight"].shape == (96, 64)
    assert (found["1.mlp.shared_experts.up_proj.weight"].tensor_dim, found["1.mlp.gate.weight"].shape) == (0, (4, 64))
    assert stacks(model) == {
        "1.mlp.experts.gate_up_proj[gate]": ((4, 32, 64), 1),
        "1.mlp.experts.gate_up_proj[up]": ((4, 32, 64), 1),
        "1.mlp.experts.down_proj": ((4, 64, 32), 2),
    }
    assert (model.name, model.layers, model.experts, model.routed, model.heads) == ("deepseek_v3", 2, 4, 0.5, 0)
    assert [w.layer for w in model.everything if not w.name.startswith("model.layers.")] == [0, 1, 1]


def test_glm_4_moe(tmp_path: Path) -> None:
    model = configured(tmp_path, small("glm4_moe"), "none")
    names = [w.name.removeprefix("model.layers.") for w in model.weights]
    assert names[:4] == [
        "0.self_attn.qkv_proj.weight",
        "0.self_attn.o_proj.weight",
        "0.mlp.gate_up_proj.weight",
        "0.mlp.down_proj.weight",
    ]
    assert stacks(model) == {
        "1.mlp.experts.gate_up_proj": ((4, 64, 64), 1),
        "1.mlp.experts.down_proj": ((4, 64, 32), 2),
    }
    assert (model.heads, model.kv_heads) == (4, 2)


def test_gpt_oss_has_no_plan_for_its_experts_and_interleaves_gate_and_up(tmp_path: Path) -> None:
    model = configured(tmp_path, small("gpt_oss", num_hidden_layers=1))
    assert stacks(model) == {
        "0.mlp.experts.gate_up_proj": ((4, 64, 192), None),
        "0.mlp.experts.down_proj": ((4, 96, 64), None),
    }
    biases = [w for w in model.everything if w.name.endswith("proj_bias")]
    assert [(w.shape, w.experts, w.elementwise) for w in biases] == [((4, 192), True, True), ((4, 64), True, True)]


def test_llama_4_has_experts_that_are_transposed(tmp_path: Path) -> None:
    config = small("llama4_text", moe_layers=[1])
    model = configured(tmp_path, config)
    assert stacks(model) == {
        "1.feed_forward.experts.gate_up_proj[gate]": ((4, 64, 32), 2),
        "1.feed_forward.experts.gate_up_proj[up]": ((4, 64, 32), 2),
        "1.feed_forward.experts.down_proj": ((4, 32, 64), 1),
    }
    within = {"model_type": "llama4", "text_config": config}
    assert configured(tmp_path, within).weights == model.weights


def test_qwen3_next_has_linear_attention(tmp_path: Path) -> None:
    model = configured(tmp_path, small("qwen3_next"))
    linear = {w.name.split("linear_attn.")[1]: w for w in model.everything if ".0.linear_attn." in w.name}
    assert {name for name, w in linear.items() if not w.elementwise} == {
        "in_proj_qkvz.weight",
        "in_proj_ba.weight",
        "out_proj.weight",
    }
    assert len(stacks(model)) == 4 * 3


def test_mixtral(tmp_path: Path) -> None:
    model = configured(tmp_path, small("mixtral", num_hidden_layers=1))
    assert [w.name.rpartition("layers.0.")[2] for w in model.weights] == [
        *(f"self_attn.{n}_proj.weight" for n in "qkvo"),
        "mlp.gate.weight",
        *(f"mlp.experts.{n}" for n in ("gate_up_proj[gate]", "gate_up_proj[up]", "down_proj")),
    ]


def test_a_module_of_transformers_is_planned_as_it_is() -> None:
    module = module_of(small("mixtral"), "here")
    assert model_of(module).weights == arranged(model_of(module), ("qkv",)).weights
    assert {w.name for w in model_of(module).everything} == {name for name, _ in module.named_parameters()}


@pytest.mark.parametrize(
    ("style", "dims"),
    [
        ("colwise", (0, 0, 1)),
        ("colwise_gather_output", (0, 0, 1)),
        ("rowwise", (None, 1, 2)),
        ("packed_rowwise", (None, 1, 2)),
        ("embedding_rowwise", (0, 0, 0)),
        ("embedding_colwise", (1, 1, 1)),
        ("replicate", (None, None, None)),
        ("grouped_gemm", (None, None, None)),
    ],
)
def test_what_tensor_parallelism_cuts(style: str, dims: tuple[int | None, ...]) -> None:
    assert tuple(tensor_dim(style, (8,) * n) for n in (1, 2, 3)) == dims


KIMI = {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "auto_map": {"AutoConfig": "x.py--X"}}


@pytest.mark.parametrize(
    ("config", "says", "remedy"),
    [
        ({"hidden_size": 64}, "transformers has no model_type None", "--params"),
        ({"model_type": ["qwen3"]}, "transformers has no model_type ['qwen3']", "--params"),
        (KIMI, "transformers has no model_type 'kimi_k2'", '"model_type": "deepseek_v3"'),
        ({"model_type": "t5"}, "transformers cannot build the model", "causal language model"),
        (small("mixtral") | {"hidden_size": "64"}, "transformers cannot build the model", "as on the hub"),
        (small("mixtral") | {"num_hidden_layers": 2**30}, "num_hidden_layers is 1073741824", "copy it"),
    ],
)
def test_configs_that_are_refused(config: dict[str, Any], says: str, remedy: str, tmp_path: Path) -> None:
    with pytest.raises(CanzonaError) as caught:
        configured(tmp_path, config)
    problem, at, hint = refusal(caught)
    assert at == str(tmp_path / "config.json")
    assert (says in problem, remedy in hint) == (True, True), (problem, hint)


def test_code_of_a_config_is_never_run(tmp_path: Path) -> None:
    other = {"auto_map": {"AutoModelForCausalLM": "evil.Model"}, "quantization_config": {"quant_method": "fp8"}}
    plain = configured(tmp_path, small("mixtral"))
    (tmp_path / "evil.py").write_text("raise SystemExit")
    assert configured(tmp_path, small("mixtral") | other) == plain


def test_without_transformers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *given: Any) -> Any:
        if name == "transformers":
            raise ImportError("No module named 'transformers'")
        return real(name, *given)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(CanzonaError, match="No module named 'transformers'") as caught:
        module_of(small("mixtral"), "mine.json")
    assert refusal(caught)[1:] == (
        "mine.json",
        'run `pip install "canzona-compile[plan]"`, or list the shapes in a file and pass it as --params',
    )


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
        ModelWeight("experts", (6, 4, 8), 3, 2, True),
        ModelWeight("more", (9, 4, 8), 0, None, True),
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
        ModelWeight("experts", (4, 8, 8), experts=True),
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
