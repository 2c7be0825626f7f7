"""Pooling configs, read from the files of models that people use, and of broken ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlxsrv.formats.encoders import is_classifier, is_encoder, read_cross_encoder_config
from mlxsrv.formats.pooling import PoolingConfig, read_pooling_config
from tests.support.encoders import CONFIGS, references

OLD = "sentence_transformers.models."
BERT = {"model_type": "bert", "architectures": ["BertModel"]}
XLM_ROBERTA = {
    "model_type": "xlm-roberta",
    "architectures": ["XLMRobertaModel"],
    "max_position_embeddings": 514,
    "pad_token_id": 1,
}
MODERNBERT = {"model_type": "modernbert", "architectures": ["ModernBertModel"]}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
DENSE = {"in_features": 8, "out_features": 4, "bias": True}
QUERY = "Instruct: Given a web search query, retrieve relevant passages\nQuery:"


def modules(*kinds: str) -> list[dict[str, Any]]:
    """A `modules.json` as sentence-transformers wrote it for years."""
    return [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": OLD + kind}
        for i, kind in enumerate(kinds)
    ]


def pooling(mode: str, **other: Any) -> dict[str, Any]:
    """A `1_Pooling/config.json` of these years."""
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "lasttoken")
    return {f"pooling_mode_{each}": each == mode for each in modes} | other


PLAIN = modules("Transformer", "Pooling")
NORMAL = modules("Transformer", "Pooling", "Normalize")


def write(folder: Path, config: dict[str, Any], **files: Any) -> Path:
    """A model's folder; of the files' names `__` is a slash, and `.json` is left out."""
    for name, value in {"config": config, **files}.items():
        path = folder / (name.removeprefix("_").replace("__", "/") + ".json")
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


def read(folder: Path, *, decoder: bool = False, name: str = "some/model") -> PoolingConfig:
    return read_pooling_config(folder, decoder=decoder, name=name)


def made(pooling: Any, **other: Any) -> PoolingConfig:
    plain: dict[str, Any] = {
        "dense": (),
        "normalize": True,
        "max_length": None,
        "lowercase": False,
        "prompts": {},
        "default_prompt": None,
    }
    return PoolingConfig(pooling=pooling, **(plain | other))


# Models that people use, as their files are on the hub.


def test_all_minilm(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        BERT,
        modules=NORMAL,
        _1_Pooling__config=pooling("mean_tokens", word_embedding_dimension=384),
        sentence_bert_config={"max_seq_length": 256, "do_lower_case": False},
        config_sentence_transformers={"__version__": {"sentence_transformers": "2.0.0"}},
    )
    assert read(folder) == made("mean", max_length=256)


def test_bge(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        BERT,
        modules=NORMAL,
        _1_Pooling__config=pooling("cls_token"),
        sentence_bert_config={"max_seq_length": 512, "do_lower_case": True},
    )
    assert read(folder) == made("cls", max_length=512, lowercase=True)


def test_multilingual_e5(tmp_path: Path) -> None:
    """514 positions, of which RoBERTa's kind uses 512."""
    folder = write(tmp_path, XLM_ROBERTA, modules=NORMAL, _1_Pooling__config=pooling("mean_tokens"))
    assert read(folder) == made("mean", max_length=512)


def test_qwen3_embedding(tmp_path: Path) -> None:
    prompts = {"query": QUERY, "document": ""}
    folder = write(
        tmp_path,
        QWEN3,
        modules=NORMAL,
        _1_Pooling__config=pooling("lasttoken", include_prompt=True),
        config_sentence_transformers={"prompts": prompts, "default_prompt_name": None},
    )
    assert read(folder, decoder=True) == made("last", prompts=prompts)


def test_gte_modernbert_does_not_normalize(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        MODERNBERT,
        modules=PLAIN,
        _1_Pooling__config=pooling("cls_token", pooling_mode_weightedmean_tokens=False),
        sentence_bert_config={"max_seq_length": 8192, "do_lower_case": False},
    )
    assert read(folder) == made("cls", normalize=False, max_length=8192)


def test_a_dense_layer(tmp_path: Path) -> None:
    """As LaBSE and distiluse have one."""
    folder = write(
        tmp_path,
        BERT,
        modules=modules("Transformer", "Pooling", "Dense", "Normalize"),
        _1_Pooling__config=pooling("cls_token"),
        _2_Dense__config=DENSE,
    )
    (folder / "2_Dense" / "model.safetensors").touch()
    assert read(folder) == made("cls", dense=(folder / "2_Dense",))


def test_what_sentence_transformers_writes_now(tmp_path: Path) -> None:
    layout = {path.removesuffix(".json"): value for path, value in references()["layout"].items()}
    write(tmp_path, BERT, **{f"_{key.replace('/', '__')}": v for key, v in layout.items()})
    (tmp_path / "2_Dense" / "model.safetensors").touch()
    prompts = {"query": "query: ", "document": ""}
    assert read(tmp_path) == made("mean", dense=(tmp_path / "2_Dense",), prompts=prompts)


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        (pooling("max_tokens"), "max"),
        (pooling("mean_sqrt_len_tokens"), "mean_sqrt_len"),
        (pooling("lasttoken"), "last"),
        (pooling("", pooling_mode_weightedmean_tokens=True), "weightedmean"),
        (pooling(""), "mean"),
        ({"word_embedding_dimension": 8}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "mean_sqrt_len_tokens"}, "mean_sqrt_len"),
        ({"pooling_mode": ["weightedmean"]}, "weightedmean"),
        ({"pooling_mode": "cls", "pooling_mode_mean_tokens": True}, "cls"),
    ],
)
def test_poolings(mode: dict[str, Any], wanted: str, tmp_path: Path) -> None:
    folder = write(tmp_path, BERT, modules=PLAIN, _1_Pooling__config=mode)
    assert read(folder).pooling == wanted


@pytest.mark.parametrize(
    ("name", "config", "decoder", "wanted"),
    [
        ("BAAI/bge-m3", XLM_ROBERTA, False, "cls"),
        ("bge-small-en-v1.5", BERT, False, "cls"),
        ("intfloat/e5-small", BERT, False, "mean"),
        ("bert-base-uncased", BERT, False, "mean"),
        ("mlx-community/Qwen3-Embedding-0.6B-4bit-DWQ", QWEN3, True, "last"),
        ("org/my-Embedder", QWEN3, True, "last"),
        ("org/model", {**QWEN3, "architectures": ["Qwen3Model"]}, True, "last"),
        ("org/model", {**QWEN3, "architectures": ["QWenLMHeadModel"]}, True, "mean"),
        ("Qwen/Qwen3-0.6B", QWEN3, True, "mean"),
        ("google/embeddinggemma-300m", QWEN3, True, "mean"),
    ],
)
def test_what_is_usual_where_nothing_is_said(
    name: str, config: dict[str, Any], decoder: bool, wanted: str, tmp_path: Path
) -> None:
    found = read(write(tmp_path / "x", config), decoder=decoder, name=name)
    assert (found.pooling, found.normalize) == (wanted, True)
    folder = write(tmp_path / name.rpartition("/")[2], config)
    assert read(folder, decoder=decoder, name="").pooling == wanted


def test_a_lone_pooling_counts(tmp_path: Path) -> None:
    """Conversions lose `modules.json`."""
    folder = write(tmp_path, BERT, _1_Pooling__config=pooling("max_tokens"))
    assert read(folder) == made("max")


@pytest.mark.parametrize("prompts", [None, {}, {"query": "", "document": ""}])
def test_without_prompts_it_does_not_matter_that_they_are_left_out(
    prompts: dict[str, str] | None, tmp_path: Path
) -> None:
    folder = write(
        tmp_path,
        BERT,
        modules=NORMAL,
        _1_Pooling__config=pooling("cls_token", include_prompt=False),
        config_sentence_transformers={"prompts": prompts},
    )
    assert read(folder) == made("cls", prompts=prompts or {})


# Cross-encoders.

JUDGE = BERT | {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
TWO = {"id2label": {"0": "no", "1": "yes"}}
SIGMOID, IDENTITY = "torch.nn.modules.activation.Sigmoid", "torch.nn.modules.linear.Identity"


@pytest.mark.parametrize(
    ("config", "beside", "activation"),
    [
        ({}, {}, "sigmoid"),
        ({"sentence_transformers": {"activation_fn": SIGMOID}}, {}, "sigmoid"),
        ({"sentence_transformers": {"activation_fn": IDENTITY}}, {}, "identity"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.Identity"}}, {}, "identity"),
        ({"sbert_ce_default_activation_function": IDENTITY}, {}, "identity"),
        (
            {"sbert_ce_default_activation_function": SIGMOID},
            {"activation_fn": IDENTITY},
            "identity",
        ),
        (TWO, {}, "softmax"),
        (TWO, {"activation_fn": IDENTITY}, "softmax"),
        ({"id2label": None}, {}, "softmax"),
    ],
)
def test_how_a_cross_encoder_judges(
    config: dict[str, Any], beside: dict[str, Any], activation: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, JUDGE | config, config_sentence_transformers=beside)
    assert read_cross_encoder_config(folder).activation == activation


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"architectures": ["BertModel"]}, "not a cross-encoder"),
        ({"id2label": {str(i): str(i) for i in range(5)}}, "5 labels"),
        ({"id2label": None, "num_labels": 3}, "3 labels"),
        ({"id2label": None, "num_labels": "x"}, "num_labels"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}}, "Tanh"),
        ({"sentence_transformers": {"activation_fn": "my.code.Softly"}}, r"my\.code\.Softly"),
        (TWO | {"sentence_transformers": {"activation_fn": SIGMOID}}, "Sigmoid"),
    ],
)
def test_a_judgement_that_is_not_known_is_refused(
    config: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=reason):
        read_cross_encoder_config(write(tmp_path, JUDGE | config))


def test_a_cross_encoder_makes_no_vectors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="/v1/rerank"):
        read(write(tmp_path, JUDGE))


# Refusals.


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"modules": modules("Transformer", "Pooling", "LayerNorm")}, "LayerNorm"),
        ({"modules": modules("Transformer", "WeightedLayerPooling")}, "WeightedLayerPooling"),
        ({"modules": modules("Transformer", "Dense")}, "modules are Transformer, Dense;"),
        ({"modules": modules("Transformer", "Pooling", "Normalize", "Dense")}, "a final Normalize"),
        ({"modules": modules("Normalize", "Transformer", "Pooling")}, "a final Normalize"),
        ({"modules": []}, "modules are none"),
        ({"modules": {}}, "not a list"),
        ({"modules": [1]}, "not a list"),
        ({"modules": "[" * 100_000}, "not valid JSON"),
        ({"modules": [{"type": "custom_st.Transformer"}]}, "custom_st"),
        ({"modules": [{**PLAIN[0], "path": "0_Transformer"}, PLAIN[1]]}, "folder of its own"),
        ({"modules": [PLAIN[0], {**PLAIN[1], "path": "../1_Pooling"}]}, "not a folder beside"),
        ({"modules": [PLAIN[0], {**PLAIN[1], "path": ""}]}, "not a folder beside"),
        ({"modules": [PLAIN[0], {**PLAIN[1], "path": "2_Pooling"}]}, "config.json"),
        ({"_1_Pooling__config": {"pooling_mode": "attention"}}, "attention"),
        ({"_1_Pooling__config": {"pooling_mode": ["cls", "mean"]}}, "not supported: cls, mean"),
        (
            {
                "_1_Pooling__config": pooling("cls_token", include_prompt=False),
                "config_sentence_transformers": {"prompts": {"query": "q: ", "document": ""}},
            },
            "include_prompt",
        ),
        ({"_1_Pooling__config": []}, "not a JSON object"),
        ({"sentence_bert_config": {"transformer_task": "fill-mask"}}, "fill-mask"),
        ({"adapter_config": {"peft_type": "LORA"}}, "adapter"),
        ({"config": BERT | {"position_embedding_type": "alibi"}}, "alibi"),
        ({"config": BERT | {"lora_adaptations": ["retrieval.query"]}}, "adapters"),
        ({"config": BERT | {"quantization": {"bits": 4}}}, "quantized"),
        ({"config": BERT | {"is_decoder": True}}, "decoder"),
    ],
)
def test_what_is_not_computed_is_refused(
    files: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    plain = {"config": BERT, "modules": PLAIN, "_1_Pooling__config": pooling("mean_tokens")}
    folder = write(tmp_path, **(plain | files))
    with pytest.raises(ValueError, match=reason):
        read(folder)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"activation_function": "torch.nn.modules.activation.Hardtanh"}, "Hardtanh"),
        ({"use_residual": True}, "residual"),
        ({"module_input_name": "token_embeddings"}, "token_embeddings"),
        ({"in_features": None}, "in_features"),
        ({}, "no model.safetensors"),
    ],
)
def test_dense_layers_that_are_refused(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        BERT,
        modules=modules("Transformer", "Pooling", "Dense"),
        _1_Pooling__config=pooling("mean_tokens"),
        _2_Dense__config=DENSE | change,
    )
    (folder / "2_Dense" / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match=reason):
        read(folder)


def test_decoders_that_look_both_ways_are_refused(tmp_path: Path) -> None:
    """By a flag, or by the name of a class, as published embedders have them."""
    llama = {"model_type": "llama"}
    for config in (
        {"model_type": "gemma3_text", "use_bidirectional_attention": True},
        {"model_type": "gemma3", "text_config": {"use_bidirectional_attention": True}},
        {"model_type": "qwen2", "is_causal": False},
        llama | {"architectures": ["LlamaBidirectionalModel"]},
        llama | {"architectures": ["LlamaBidirectionalForSequenceClassification"]},
        {"model_type": "qwen3", "architectures": ["VoyageQwen3BidirectionalEmbedModel"]},
        {"model_type": "mistral", "architectures": "MistralBiModel"},
        llama | {"auto_map": {"AutoModel": "modeling_llama_encoder.LlamaEncoderModel"}},
        {"model_type": "llama_bidirec", "architectures": []},
    ):
        folder = write(tmp_path, config)
        with pytest.raises(ValueError, match="bidirectional"):
            read(folder, decoder=True)


def test_decoders_that_look_back_only_are_not_refused(tmp_path: Path) -> None:
    for config in (
        {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
        {"model_type": "qwen3", "architectures": ["Qwen3Model"], "auto_map": {"AutoModel": 3}},
        {"model_type": "phi3", "auto_map": {"AutoModelForCausalLM": "m.Phi3ForCausalLM"}},
        {"model_type": "qwen2", "is_causal": True, "auto_map": None, "architectures": None},
    ):
        assert read(write(tmp_path, config), decoder=True).pooling, config


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json"):
        read(tmp_path)


def test_what_is_an_encoder() -> None:
    assert {name for name, config in CONFIGS.items() if not is_encoder(config)} == {"qwen3"}
    judges = {name for name, config in CONFIGS.items() if is_classifier(config)}
    assert judges == {n for n in CONFIGS if n.endswith(("-classifier", "-mean"))}
    assert not is_classifier(
        {"model_type": "qwen3", "architectures": ["Qwen3ForSequenceClassification"]}
    )
    assert not is_encoder({})
    assert not is_encoder({"model_type": ["bert"]})


@pytest.mark.served
def test_it_imports_no_mlx() -> None:
    code = "import sys, mlxsrv.formats.pooling; print([m for m in sys.modules if m == 'mlx'])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]"
