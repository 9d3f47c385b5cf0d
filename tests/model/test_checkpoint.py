"""Finding a checkpoint, and reading its small files."""

import json
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

import carat_jax
from carat_jax.model.checkpoint import find_checkpoint, generation_config, read_config
from tests.toys import CONFIGS, config_json, make_weights, write_checkpoint


def write_config(folder, change=lambda config: None, form="nested"):
    config = config_json(CONFIGS["T4"], form)
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# ---- where it is -----------------------------------------------------------------------------


def test_folders_and_the_embedded_model_are_found(tmp_path, monkeypatch):
    assert find_checkpoint("tiny") == Path(carat_jax.__file__).parent / "tiny"
    assert find_checkpoint(str(tmp_path)) == tmp_path
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_checkpoint("owner/name") == Path("owner/name")  # a folder comes before the hub
    assert find_checkpoint("~/owner") == tmp_path / "owner"


@pytest.mark.parametrize(
    "name", ["gemma", "./gemma", "../a/b", "/no/such/folder", "a/b/c", "a b/c"]
)
def test_what_cannot_be_a_hub_name_is_not_looked_up(name, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(ValueError, match=r"^model: .*: no such folder, and not a hub name"):
        find_checkpoint(name)


def test_a_file_is_not_a_folder(tmp_path):
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(
        ValueError, match=r"^model: .*model\.safetensors is a file; give the folder"
    ):
        find_checkpoint(file)


@pytest.fixture
def offline_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_a_cached_repository_is_used_offline(offline_hub):
    repository = offline_hub / "models--google--gemma-4-toy"
    snapshot = repository / "snapshots" / ("0" * 40)
    write_checkpoint(snapshot, CONFIGS["T4"], make_weights(CONFIGS["T4"]))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    folder = find_checkpoint("google/gemma-4-toy")
    assert folder == snapshot
    assert read_config(folder)[0].hidden_size == 64


def test_a_repository_that_is_not_cached_offline(offline_hub):
    with pytest.raises(ValueError, match=r"^model: google/gemma-4-toy: ") as caught:
        find_checkpoint("google/gemma-4-toy")
    text = str(caught.value)
    assert "\n" not in text
    assert "not in the local cache" in text
    assert "go online, give a downloaded folder, or use model: tiny" in text
    with pytest.raises(ValueError, match=r"^decode\.draft_model: .* or give a downloaded folder$"):
        find_checkpoint("google/gemma-4-toy", key="decode.draft_model")


def http_error(kind):
    """An error of the hub's client without the answer that it was made from."""
    error = kind.__new__(kind)
    Exception.__init__(error, "401\nRequest ID: 1")
    return error


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (huggingface_hub.errors.GatedRepoError, "licence must be accepted on its page"),
        (huggingface_hub.errors.RepositoryNotFoundError, "no public repository of this name"),
        (huggingface_hub.errors.HfHubHTTPError, r"from the hub \(HfHubHTTPError\)"),
        (ConnectionError, r"from the hub \(ConnectionError\)"),
    ],
)
def test_what_the_hub_refuses_is_one_line(monkeypatch, kind, words):
    asked = {}

    def download(name, **options):
        asked.update(options, name=name)
        raise http_error(kind)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ValueError, match=words) as caught:
        find_checkpoint("google/gemma-4-31B-it")
    assert "\n" not in str(caught.value)
    assert asked == {
        "name": "google/gemma-4-31B-it",
        "allow_patterns": ["*.json", "*.jinja", "*.safetensors"],
    }
    with pytest.raises(ValueError, match=words):
        find_checkpoint("google/gemma-4-31B-it", with_weights=False)
    assert asked["allow_patterns"] == ["*.json", "*.jinja"]


# ---- what it says ----------------------------------------------------------------------------


def test_config_and_raw_config(tmp_path):
    config, raw = read_config(write_config(tmp_path))
    assert (config.hidden_size, config.sliding_window, config.tie_word_embeddings) == (64, 8, True)
    assert raw == config_json(CONFIGS["T4"])


@pytest.mark.parametrize("in_text", [None, True, False])
@pytest.mark.parametrize("outside", [None, True, False])
def test_either_section_can_untie_the_head(tmp_path, in_text, outside):
    def change(config):
        for section, value in ((config, outside), (config["text_config"], in_text)):
            section.pop("tie_word_embeddings", None)
            if value is not None:
                section["tie_word_embeddings"] = value

    config, _ = read_config(write_config(tmp_path, change))
    assert config.tie_word_embeddings == (in_text is not False and outside is not False)


@pytest.mark.parametrize("is_nested", [True, False])
def test_a_quantised_checkpoint_is_refused_by_the_name_of_its_method(tmp_path, is_nested):
    def change(config):
        section = config["text_config"] if is_nested else config
        section["quantization_config"] = {"quant_method": "compressed-tensors", "bits": 4}

    with pytest.raises(ValueError, match=rf"^{tmp_path}: quantised by 'compressed-tensors'"):
        read_config(write_config(tmp_path, change))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no config.json; is this the folder of a checkpoint"),
        ("", "config.json: not readable as JSON"),
        ('{"hidden_size": ', "config.json: not readable as JSON"),
        ("[1]", "config.json: an object was expected, not a list"),
        ("{}", "config.json: missing vocab_size"),
        ('{"text_config": [1, 2]}', "config.json: "),
        ('{"quantization_config": "int8"}', "config.json: |quantised by"),
        (b"\xff\xfe", "config.json: not readable as JSON"),
    ],
)
def test_a_damaged_config_is_one_line(tmp_path, content, words):
    if content is not None:
        data = content if isinstance(content, bytes) else content.encode()
        (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(ValueError, match=words) as caught:
        read_config(tmp_path)
    assert str(tmp_path) in str(caught.value) or "config.json: missing" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_size", "64"), ("head_dim", 16.0), ("layer_types", 7), ("rope_parameters", [1])],
)
def test_a_value_of_the_wrong_type_is_one_line(tmp_path, key, value):
    write_config(tmp_path, lambda config: config["text_config"].update({key: value}))
    with pytest.raises(ValueError, match=r"config\.json: ") as caught:
        read_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_generation_config_may_be_absent(tmp_path):
    assert generation_config(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.0, "eos_token_id": [1]}')
    assert generation_config(tmp_path) == {"temperature": 0.0, "eos_token_id": [1]}
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config\.json: not readable as JSON"):
        generation_config(tmp_path)
