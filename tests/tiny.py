"""A tiny model with a tokenizer of its own, made from nothing, and a vLLM server that serves it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from lachesis_actors.child import kept, tail
from lachesis_actors.engine import engine_command, engine_environment, on_cpu, reserve_port
from lachesis_configs.schema import Engine as EngineConfig
from lachesis_configs.schema import KeyValues

CORPUS = [
    "the thread is spun, measured and cut by three sisters; what is two plus three? two plus three is five.",
    "one two three four five six seven eight nine ten: add the numbers and write the answer, then stop.",
    "user assistant system 0 1 2 3 4 5 6 7 8 9 + - * / = ? ! . , ; :",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VOCABULARY = 320


def make_tiny_model(folder: Path, *, seed: int = 0) -> Path:
    """Write a random LlamaForCausalLM (hidden 64, 2 layers, 2 heads of 32, tied, bf16) and a byte-level tokenizer with
    a ChatML template into `folder`, in Hugging Face format; no network. Returns `folder`."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.2,  # wide enough that logits are far from uniform
        bos_token_id=fast.bos_token_id,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


TINY_ENGINE = EngineConfig(max_model_len=512, kv_cache_gib=1.0, max_num_seqs=32)


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyServer:
    """A vLLM server that tests share. Attach to it with lachesis_actors.engine.attach_engine(server.url)."""

    url: str
    log_path: Path
    model_path: Path
    config: EngineConfig


@contextmanager
def serve_tiny(
    model_path: Path, folder: Path, *, config: EngineConfig = TINY_ENGINE, kv: KeyValues = "recompute"
) -> Iterator[TinyServer]:
    """Run the command line that open_engine builds; end it and all its children with the block."""
    log_path = folder / "vllm.log"
    with reserve_port() as holder:
        port = holder.getsockname()[1]
        command = engine_command(config, model_path=model_path, port=port, seed=0, cpu=on_cpu(), kv=kv)
        env = engine_environment(config, inherited=os.environ, gpus=None, cpu=on_cpu())
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                kept(command, cores=config.cores),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(process, url, log_path, config.start_seconds)
            yield TinyServer(url=url, log_path=log_path, model_path=model_path, config=config)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def serving_all(*servers: AbstractContextManager[TinyServer]) -> Iterator[list[TinyServer]]:
    """Start servers at once: what a start takes is one process after the other that imports, on a core of its own."""
    with ExitStack() as stack, ThreadPoolExecutor(len(servers)) as starts:
        yield list(starts.map(stack.enter_context, servers))


def _wait(process: subprocess.Popen, url: str, log_path: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        if process.poll() is not None:
            raise RuntimeError(f"vLLM ended with status {process.returncode}:\n{tail(log_path)}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"vLLM did not answer within {seconds} s:\n{tail(log_path)}")
        with suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", trust_env=False, timeout=5).status_code == 200:
                return
        time.sleep(0.1)
