#!/usr/bin/env python
"""One CUDA device: tokens per second against bare vLLM, and how long new weights take, at two sizes.

    python scripts/gpu_bench.py [--sizes 0.6B 8B] [--only decode] [--rounds 3] [--device cuda]

For each size two processes share the device: `LLM.generate` of vLLM as it is installed, and this project's engine.
Both have random weights, equal KV caches and the same requests, and take turns. Then bare vLLM leaves, and float32
weights on the device are published in bfloat16, loaded into the engine under running requests, and verified there.

`decode`: tokens per second ÷ bare vLLM's. `pull_seconds`: publish, load and verify; `link_share`: the time of plain
copies of as many bytes from and to page-locked memory by that of the pull. The first pull makes the shared memory and
is not counted. `--device cpu` runs a tiny policy through all of it: a test of this program.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from titan_rl.generation.config import GeneratorConfig, generator_environment
from titan_rl.policy.config import TinyPolicyConfig

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 128},
    "0.6B": {"dim": 1024, "layers": 28, "heads": 16, "kv_heads": 8, "head_dim": 128, "ffn": 3072},
    "8B": {"dim": 4096, "layers": 36, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn": 12288},
}
VOCABULARY = 151936
REQUESTS, PROMPT, NEW_TOKENS = 96, 64, 192
KV_BYTES = 4 << 30
END_SECONDS = 30.0
PARTS = ("decode", "pulls")


class Engine:
    """One contender, which answers on its standard output what it is asked on its standard input."""

    def __init__(self, size: str, model: Path, device: str) -> None:
        self.model, self.device, self.cuda = model, device, device == "cuda"
        self.requests, self.new = (REQUESTS, NEW_TOKENS) if self.cuda else (16, 16)
        self.length = PROMPT + NEW_TOKENS

    def prompts(self, number: int) -> list[list[int]]:
        import numpy as np

        drawn = np.random.default_rng(number).integers(2, 1000 if self.cuda else 12, (self.requests, PROMPT))
        return drawn.tolist()


class Bare(Engine):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        from vllm import LLM

        settings: dict[str, Any] = {"kv_cache_memory_bytes": KV_BYTES if self.cuda else 64 << 20}
        settings |= {"gpu_memory_utilization": 0.01} if self.cuda else {"enforce_eager": True}
        self.llm = LLM(
            model=str(self.model),
            dtype="bfloat16" if self.cuda else "float32",
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=self.length,
            max_num_seqs=REQUESTS,
            max_num_batched_tokens=8192,
            enable_prefix_caching=True,
            logprobs_mode="processed_logprobs",
            **settings,
        )

    def decode(self, number: int) -> float:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        prompts = [TokensPrompt(prompt_token_ids=row) for row in self.prompts(number)]
        params = [
            SamplingParams(
                max_tokens=self.new,
                seed=seed,
                logprobs=0,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            for seed in range(self.requests)
        ]
        began = time.perf_counter()
        done = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        assert sum(len(each.outputs[0].token_ids) for each in done) == self.requests * self.new
        return self.requests * self.new / seconds


class Ours(Engine):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        from titan_rl.generation.vllm import engine as module

        # Only the first weights are random instead of read from files; a pull stores others over them.
        made = module.engine_arguments
        module.engine_arguments = lambda *given: made(*given) | {"load_format": "dummy"}
        config = GeneratorConfig(
            dtype="bfloat16" if self.cuda else "float32",
            max_model_len=self.length,
            max_num_seqs=REQUESTS,
            kv_cache_bytes=KV_BYTES if self.cuda else 64 << 20,
            shares_device=True,
        )
        self.engine = module.VllmEngine(config, self.model, self.device)

    def add(self, number: int) -> None:
        import numpy as np

        from titan_rl.types import GenerationRequest, SamplingParams

        sampling = SamplingParams(max_new_tokens=self.new, temperature=1.0)
        for seed, row in enumerate(self.prompts(number)):
            tokens = np.array(row, np.int32)
            request = {"request_id": f"{number}.{seed}", "prompt_token_ids": tokens, "sampling": sampling}
            self.engine.add(GenerationRequest(**request, seed=seed))

    def decode(self, number: int) -> float:
        began, tokens = time.perf_counter(), 0
        self.add(number)
        while self.engine.has_work():
            tokens += len(self.engine.step().sampled)
        seconds = time.perf_counter() - began
        assert tokens == self.requests * self.new, tokens
        return tokens / seconds

    def pulls(self, rounds: int) -> dict[str, Any]:
        import torch

        from titan_rl.types import PolicyVersion
        from titan_rl.weights.manifest import LM_HEAD, TensorShard
        from titan_rl.weights.publisher import SharedMemoryPublisher
        from titan_rl.weights.puller import SharedMemoryReader, verify

        def wait() -> float:
            if self.cuda:
                torch.cuda.synchronize()
            return time.perf_counter()

        dtype = torch.bfloat16 if self.cuda else torch.float32
        shapes = {shard.name: tuple(shard.global_shape) for shard in self.engine.served_shards()}
        aliases = ((LM_HEAD, "model.embed_tokens.weight"),) if self.engine._tied else ()
        shapes = {name: shape for name, shape in shapes.items() if not (aliases and name == LM_HEAD)}
        shards = [
            TensorShard.whole(name, 0.02 * torch.randn(shape, device=self.device)) for name, shape in shapes.items()
        ]
        size = sum(shard.data.numel() for shard in shards) * dtype.itemsize
        publisher = SharedMemoryPublisher(channel="bench", rank=0, group=None, max_live=1)
        reader, seconds = SharedMemoryReader(), []
        try:
            for number in range(rounds + 1):
                for shard in shards:
                    shard.data.mul_(1.01)
                self.add(100 + number)
                self.engine.step()
                times, version = [wait()], PolicyVersion(0, number)
                published = publisher.publish(version, shards, dtype=dtype, aliases=aliases)
                times.append(wait())
                self.engine.load_weights(reader.tensors(published), version)
                times.append(wait())
                self.engine.drop_cache()
                verify(published, self.engine.served_shards(), None)
                times.append(wait())
                self.engine.step()
                times.append(wait())
                self.engine.abort(self.engine.running())
                while self.engine.has_work():
                    self.engine.step()
                publisher.release(version)
                seconds.append([after - before for before, after in zip(times, times[1:], strict=False)])
                print(f"{self.model.name} pull {number}: {[round(each, 3) for each in seconds[-1]]}", file=sys.stderr)
        finally:
            publisher.close()
        publish, load, check, _ = (statistics.median(column) for column in zip(*seconds[1:], strict=True))
        there = torch.empty(min(size, 1 << 30), dtype=torch.uint8, pin_memory=self.cuda)
        here = torch.empty_like(there, device=self.device)
        began = wait()
        there.copy_(here)
        here.copy_(there)
        link = (wait() - began) * size / len(there)
        pull = publish + load + check
        return {
            "gb": size / 1e9,
            "publish_seconds": publish,
            "load_seconds": load,
            "verify_seconds": check,
            "pull_seconds": pull,
            "link_share": link / pull,
            "first_pull_seconds": sum(seconds[0][:3]),
        }


def contender(name: str, size: str, model: str, device: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    began = time.monotonic()
    engine: Any = {"bare": Bare, "ours": Ours}[name](size, Path(model), device)
    print(json.dumps(time.monotonic() - began), file=answers, flush=True)
    for line in sys.stdin:
        method, number = line.split()
        print(json.dumps(getattr(engine, method)(int(number))), file=answers, flush=True)


class Process:
    def __init__(self, name: str, size: str, model: Path, device: str, scratch: Path) -> None:
        variables = {"PYTHONPATH": str(Path(__file__).resolve().parents[1]), "OMP_NUM_THREADS": "1"}
        variables |= {"VLLM_USE_FLASHINFER_SAMPLER": "0"}  # with logprobs vLLM has no use for it
        if name == "ours":
            variables |= generator_environment(device) | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
            variables |= {"TITAN_RL_RENDEZVOUS": str(scratch / f"rendezvous{size}")}
        command = [sys.executable, __file__, "--inside", name, size, str(model), device]
        self.log = scratch / f"{name}-{size}.log"
        self._process = subprocess.Popen(
            command,
            env=os.environ | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            text=True,
            start_new_session=True,
        )

    def answer(self) -> Any:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"{self.log.name} ended:\n{self.log.read_text()[-4000:]}")
        return json.loads(line)

    def ask(self, method: str, number: int) -> Any:
        assert self._process.stdin is not None
        print(method, number, file=self._process.stdin, flush=True)
        return self.answer()

    def close(self) -> None:
        """By itself, as vLLM's engine, which is a process of its own, ends with it and gives its memory back."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def model_directory(size: str, cuda: bool, scratch: Path) -> Path:
    """A checkpoint without weights; on the CPU a tiny one."""
    if not cuda:
        from titan_rl.policy.models.tiny import make_tiny_policy

        return make_tiny_policy(TinyPolicyConfig(**SIZES["tiny"], max_length=PROMPT + NEW_TOKENS), scratch)
    shape = SIZES[size]
    sizes = {"vocab_size": VOCABULARY, "hidden_size": shape["dim"], "num_hidden_layers": shape["layers"]}
    sizes |= {"num_attention_heads": shape["heads"], "num_key_value_heads": shape["kv_heads"]}
    sizes |= {"head_dim": shape["head_dim"], "intermediate_size": shape["ffn"], "max_position_embeddings": 40960}
    rest = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16"}
    rest |= {"tie_word_embeddings": size == "0.6B", "rope_theta": 1e6, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
    directory = scratch / size
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(sizes | rest))
    return directory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=("0.6B", "8B"), default=["0.6B", "8B"])
    parser.add_argument("--only", choices=PARTS, help="decoding, or pulls; default: both")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--inside", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        contender(*arguments.inside)
        return 0
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        scratch, processes = Path(directory), {}
        for size in arguments.sizes:
            model = model_directory(size, arguments.device == "cuda", scratch)
            for name in ("ours", "bare") if arguments.only != "pulls" else ("ours",):
                processes[name, size] = Process(name, size, model, arguments.device, scratch)
        try:
            for (name, size), process in processes.items():
                figures[f"start_seconds_{name}_{size}"] = round(process.answer(), 1)
                print(f"{name} {size} is up after {figures[f'start_seconds_{name}_{size}']} s", flush=True)
            for size in arguments.sizes if arguments.only != "pulls" else ():
                speeds: dict[str, list[float]] = {"ours": [], "bare": []}
                for number in range(arguments.rounds + 1):
                    for name in ("ours", "bare"):
                        speed = processes[name, size].ask("decode", number)
                        if number:  # the first warms up
                            speeds[name].append(speed)
                ratio = statistics.median(a / b for a, b in zip(speeds["ours"], speeds["bare"], strict=True))
                figures |= {f"decode_{size}": round(ratio, 3)}
                figures |= {
                    f"tokens_per_second_{name}_{size}": round(statistics.median(speeds[name])) for name in speeds
                }
                print(f"{size}: decode {ratio:.3f} of bare, {speeds}", flush=True)
                processes["bare", size].close()
            for size in arguments.sizes if arguments.only != "decode" else ():
                pulled = processes["ours", size].ask("pulls", arguments.rounds)
                processes["ours", size].close()
                figures |= {f"{name}_{size}": round(value, 3) for name, value in pulled.items()}
                print(f"{size}: {pulled}", flush=True)
        finally:
            for process in processes.values():
                process.close()
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
